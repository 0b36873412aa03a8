//! The tokens of a tokenizer by id: their text and what each is for.

use ahash::AHashMap;
use tokenizers::models::bpe::{BpeTrainer, Vocab};
use tokenizers::{Model, Token};

use super::TokenizerError;

/// What a token is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Text.
    Normal,
    /// Markup of the model: read from text only where the caller asks for it.
    Control,
    /// Text that is always one token.
    UserDefined,
    /// No text has this id.
    Hole,
}

/// Texts and kinds by id. The texts lie in one string: a vocabulary has some 100,000 of them.
#[derive(Debug, Default)]
pub(super) struct Vocabulary {
    text: String,
    entries: Vec<(usize, usize, Kind)>,
}

impl Vocabulary {
    pub(super) fn with_capacity(tokens: usize) -> Self {
        Self { text: String::with_capacity(tokens.saturating_mul(7)), entries: Vec::with_capacity(tokens) }
    }

    /// Adds the token with the next id.
    pub(super) fn push(&mut self, text: &str, kind: Kind) {
        let start = self.text.len();
        self.text.push_str(text);
        self.entries.push((start, self.text.len(), kind));
    }

    /// Builds the table from pairs in any order. Ids may have holes, but not so many that a small
    /// file asks for a large table.
    pub(super) fn from_ids(mut tokens: Vec<(u32, &str, Kind)>) -> Result<Self, TokenizerError> {
        tokens.sort_by_key(|&(id, ..)| id);
        let limit = tokens.len().saturating_mul(4).saturating_add(4096);
        let mut vocabulary = Self::with_capacity(tokens.len());
        for (id, text, kind) in tokens {
            let id = id as usize;
            if id > limit {
                return Err(TokenizerError::Inconsistent(format!(
                    "token {text:?} has id {id}, far beyond the {} tokens that are listed",
                    vocabulary.len()
                )));
            }
            if id < vocabulary.len() {
                let other = vocabulary.text(id).unwrap_or_default();
                if other == text {
                    continue;
                }
                return Err(TokenizerError::Inconsistent(format!(
                    "tokens {other:?} and {text:?} have the same id {id}"
                )));
            }
            while vocabulary.len() < id {
                vocabulary.push("", Kind::Hole);
            }
            vocabulary.push(text, kind);
        }
        Ok(vocabulary)
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    fn text(&self, id: usize) -> Option<&str> {
        let &(start, end, kind) = self.entries.get(id)?;
        if kind == Kind::Hole { None } else { self.text.get(start..end) }
    }

    /// Text and kind of a token.
    pub(super) fn get(&self, id: u32) -> Option<(&str, Kind)> {
        let &(.., kind) = self.entries.get(id as usize)?;
        Some((self.text(id as usize)?, kind))
    }
}

/// Gives the library's added tokens their ids: it asks a model for them.
pub(super) struct AddedIds<'a> {
    pub(super) added: &'a AHashMap<&'a str, u32>,
    pub(super) vocabulary_size: usize,
}

impl Model for AddedIds<'_> {
    type Trainer = BpeTrainer;

    fn tokenize(&self, _: &str) -> tokenizers::Result<Vec<Token>> {
        Err("added tokens are no model".into())
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.added.get(token).copied()
    }

    fn id_to_token(&self, _: u32) -> Option<String> {
        None
    }

    fn get_vocab(&self) -> std::collections::HashMap<String, u32> {
        self.added.iter().map(|(&token, &id)| (token.to_owned(), id)).collect()
    }

    fn get_vocab_size(&self) -> usize {
        self.vocabulary_size
    }

    fn save(&self, _: &std::path::Path, _: Option<&str>) -> tokenizers::Result<Vec<std::path::PathBuf>> {
        Err("added tokens are not saved".into())
    }

    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}

/// Longest text of a vocabulary, in bytes.
pub(super) fn longest(vocab: &Vocab) -> usize {
    vocab.keys().map(String::len).max().unwrap_or(0)
}
