//! Text of a growing answer.

use super::Tokenizer;

/// How a stream of ids becomes text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamOptions {
    /// Leave out markup of the model.
    pub skip_special: bool,
    /// The ids begin a text: the space that a SentencePiece tokenizer puts before every text is
    /// taken off. An answer to a prompt does not begin a text.
    pub start_of_text: bool,
}

/// Turns ids into text one by one and holds bytes back until their character is complete.
#[derive(Debug, Clone)]
pub struct StreamDecoder {
    options: StreamOptions,
    /// The beginning of a character, at most three bytes between calls.
    pending: Vec<u8>,
    at_start: bool,
}

impl StreamDecoder {
    /// A decoder at the beginning of a stream.
    #[must_use]
    pub fn new(options: StreamOptions) -> Self {
        Self { options, pending: Vec::new(), at_start: options.start_of_text }
    }

    /// The text that this token completes; empty where a character is not complete yet.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        if self.options.skip_special && tokenizer.is_special(id) {
            return String::new();
        }
        let bytes = tokenizer.token_bytes(id);
        let mut bytes = bytes.as_slice();
        if self.at_start && !bytes.is_empty() {
            self.at_start = false;
            if tokenizer.alphabet.strips_leading_space() {
                bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            }
        }
        self.pending.extend_from_slice(bytes);
        self.take_complete()
    }

    /// The end of the text: U+FFFD for a character that was never completed.
    #[must_use]
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }

    /// Takes what is text, or can never become text, from the held bytes.
    fn take_complete(&mut self) -> String {
        let mut text = String::new();
        let mut taken = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            taken += chunk.valid().len();
            if chunk.invalid().is_empty() {
                continue;
            }
            // Only the last chunk can be a character that later bytes complete.
            let at_end = taken + chunk.invalid().len() == self.pending.len();
            let unfinished = std::str::from_utf8(chunk.invalid()).is_err_and(|error| error.error_len().is_none());
            if at_end && unfinished {
                break;
            }
            text.push(char::REPLACEMENT_CHARACTER);
            taken += chunk.invalid().len();
        }
        self.pending.drain(..taken);
        text
    }
}
