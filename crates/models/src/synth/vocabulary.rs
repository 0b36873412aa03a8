//! A byte-level BPE vocabulary of any size: the bytes, then pairs of them, then pairs and a byte, then a few control tokens.

use crate::tokenizer::char_of_byte;

/// Control tokens at the end of the vocabulary, what ends a text first.
pub(super) const CONTROL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// Tokens in order of id, and merges in order of rank.
#[derive(Debug)]
pub(super) struct SyntheticVocabulary {
    pub(super) tokens: Vec<String>,
    pub(super) merges: Vec<String>,
}

/// Of so many tokens, at least 256 and the control tokens.
pub(super) fn synthetic(size: usize) -> SyntheticVocabulary {
    let merged = size.saturating_sub(256 + CONTROL.len());
    let mut tokens: Vec<String> = (0..=255).map(|byte| char_of_byte(byte).to_string()).collect();
    let mut merges = Vec::with_capacity(merged);
    // Each token so far, longest after shortest, followed by each byte: every merge has its parts before it.
    let mut left = 0;
    while merges.len() < merged {
        for right in 0..256 {
            if merges.len() == merged {
                break;
            }
            let (a, b) = (&tokens[left], &tokens[right]);
            merges.push(format!("{a} {b}"));
            tokens.push(format!("{a}{b}"));
        }
        left += 1;
    }
    tokens.extend(CONTROL.map(str::to_owned));
    SyntheticVocabulary { tokens, merges }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_unique_and_as_many_as_asked_for() {
        for size in [259, 300, 151_936] {
            let vocabulary = synthetic(size);
            assert_eq!(vocabulary.tokens.len(), size);
            assert_eq!(vocabulary.merges.len(), size - 259);
            let unique: std::collections::HashSet<&String> = vocabulary.tokens.iter().collect();
            assert_eq!(unique.len(), size);
        }
    }
}
