//! What can be wrong with a tokenizer, or with text given to one.

use std::path::PathBuf;

/// A tokenizer that cannot be built, or text that it cannot encode.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A file of the checkpoint cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A folder holds no tokenizer that this program can read.
    #[error("{} holds no tokenizer.json{}", dir.display(), if *has_sentencepiece { ": it has only a SentencePiece tokenizer.model; convert it with the transformers library (AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR))" } else { "" })]
    NoTokenizer {
        /// The folder.
        dir: PathBuf,
        /// Whether a `tokenizer.model` lies there.
        has_sentencepiece: bool,
    },
    /// A JSON document does not have the expected form.
    #[error("{what} is not valid: {source}")]
    Json {
        /// Which document, or which part of it.
        what: String,
        /// What the parser said.
        source: serde_json::Error,
    },
    /// A part of the tokenizer is of a kind that is not built here.
    #[error("tokenizer {what} `{found}` is not supported; supported: {supported}")]
    Unsupported {
        /// Which part: model, pre-tokenizer, normalizer, …
        what: &'static str,
        /// Its name in the file.
        found: String,
        /// The names that are supported.
        supported: String,
    },
    /// A required entry is missing.
    #[error("the tokenizer has no {0}")]
    Missing(&'static str),
    /// Two parts of the tokenizer contradict each other.
    #[error("the tokenizer contradicts itself: {0}")]
    Inconsistent(String),
    /// A key of a GGUF file is missing or has another type.
    #[error(transparent)]
    Metadata(#[from] qwen_formats::FormatError),
    /// The tokenizers library refused a part.
    #[error("the tokenizer's {what} was refused: {message}")]
    Library {
        /// Which part, or which step.
        what: &'static str,
        /// What the library said.
        message: String,
    },
    /// The text has a byte that is no part of valid UTF-8, and the vocabulary has no token for it.
    #[error(
        "byte 0x{byte:02X} at offset {offset} is not valid UTF-8 and the vocabulary has no token for that byte; pass valid UTF-8"
    )]
    ByteNotInVocabulary {
        /// The byte.
        byte: u8,
        /// Where it is in the input.
        offset: usize,
    },
}

impl TokenizerError {
    pub(super) fn library(what: &'static str) -> impl Fn(tokenizers::Error) -> Self {
        move |error| Self::Library { what, message: error.to_string() }
    }

    pub(super) fn json(what: &str) -> impl Fn(serde_json::Error) -> Self + '_ {
        move |source| Self::Json { what: what.to_owned(), source }
    }
}
