//! The merges of a SentencePiece BPE vocabulary, which lists scores instead.
//!
//! SentencePiece joins the neighbours whose joined token has the highest score. As ranked merges:
//! every cut of a token into two tokens is a merge, ranked by the token's score. Ties are ranked as
//! the Hugging Face converter ranks them, so that both give the same ids.

use std::cmp::Reverse;

use tokenizers::models::bpe::{Merges, Vocab};

use super::TokenizerError;

/// No real vocabulary has longer tokens; cutting one is quadratic in its length.
const LONGEST_TOKEN: usize = 1024;

/// Ranked merges of `tokens` (id, text, score) within `vocab`.
pub(super) fn merges(tokens: &[(u32, &str, f32)], vocab: &Vocab) -> Result<Merges, TokenizerError> {
    let mut ranked = Vec::with_capacity(tokens.len() * 2);
    for &(id, text, score) in tokens {
        if text.len() > LONGEST_TOKEN {
            return Err(TokenizerError::Inconsistent(format!(
                "token {id} has {} bytes; at most {LONGEST_TOKEN} are read",
                text.len()
            )));
        }
        if score.is_nan() {
            return Err(TokenizerError::Inconsistent(format!("token {id} ({text:?}) has no number as its score")));
        }
        let mut cuts = Vec::new();
        for (at, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(at);
            if let (Some(&left_id), Some(&right_id)) = (vocab.get(left), vocab.get(right)) {
                cuts.push((left_id, right_id, left, right));
            }
        }
        cuts.sort_unstable_by_key(|&(left_id, right_id, ..)| (left_id, right_id));
        ranked.extend(cuts.into_iter().map(|(.., left, right)| (score, left, right)));
    }
    let length = |text: &str| text.chars().count();
    ranked.sort_by(|a, b| {
        b.0.total_cmp(&a.0).then_with(|| Reverse((length(a.1), length(a.2))).cmp(&Reverse((length(b.1), length(b.2)))))
    });
    Ok(ranked.into_iter().map(|(_, left, right)| (left.to_owned(), right.to_owned())).collect())
}
