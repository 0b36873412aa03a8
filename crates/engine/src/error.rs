//! Errors of the engine.

use std::path::PathBuf;

use qwen_formats::FormatError;
use qwen_models::chat_template::TemplateError;
use qwen_models::family::ModelError;
use qwen_models::tokenizer::TokenizerError;
use qwen_runtime::RuntimeError;

/// Why a model can't be loaded or a request can't be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// Files of the checkpoint.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Config or tensors.
    #[error("{path}: {source}")]
    Model {
        /// The model.
        path: PathBuf,
        /// What is wrong.
        source: Box<ModelError>,
    },
    /// Tokenizer.
    #[error("{path}: {source}")]
    Tokenizer {
        /// The model.
        path: PathBuf,
        /// What is wrong.
        source: Box<TokenizerError>,
    },
    /// Chat template.
    #[error("{path}: {source}")]
    Template {
        /// The model.
        path: PathBuf,
        /// What is wrong.
        source: Box<TemplateError>,
    },
    /// Device, memory, ops.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// An output that can't be written.
    #[error("cannot write: {0}")]
    Output(std::io::Error),
    /// A sampling parameter.
    #[error("{name}: expected {expected}, found {found}")]
    Parameter {
        /// Which.
        name: &'static str,
        /// Range.
        expected: String,
        /// Value.
        found: String,
    },
    /// A token that the model does not have.
    #[error("token {id} does not exist: expected ids below {vocab_size}, the size of the vocabulary")]
    TokenRange {
        /// Token.
        id: u32,
        /// Vocabulary.
        vocab_size: u32,
    },
    /// A prompt without tokens.
    #[error("the prompt is empty: expected at least one token; give some text")]
    EmptyPrompt,
    /// A prompt that does not fit.
    #[error(
        "the {what} has {prompt} tokens, but the context has room for {max_seq_len} tokens in all{}; shorten the {what} or \
         raise --max-seq-len", if *answer { ", one of them for the answer" } else { "" }
    )]
    ContextLength {
        /// What does not fit: a prompt, or a text whose vector is wanted.
        what: &'static str,
        /// Tokens of the prompt.
        prompt: usize,
        /// Whether an answer is to follow.
        answer: bool,
        /// Limit.
        max_seq_len: u32,
    },
    /// A request that would wait for ever.
    #[error(
        "{what} may take {tokens} tokens, {blocks} blocks of {block_size} in the KV cache, but it has {limit} \
         blocks in all; ask for fewer tokens or load the model with a larger cache"
    )]
    CacheSize {
        /// What does not fit: prompt and answer, or a text whose vector is wanted.
        what: &'static str,
        /// Tokens of prompt and longest answer.
        tokens: usize,
        /// Blocks for them.
        blocks: u32,
        /// Tokens of a block.
        block_size: u32,
        /// Blocks of the cache.
        limit: u32,
    },
    /// Logits that no token can be chosen from.
    #[error("the model gave {value} as a logit (token {token}): the checkpoint or the device is damaged")]
    NonFinite {
        /// First such token.
        token: u32,
        /// Its logit.
        value: f32,
    },
    /// The known answer differs from one run to the next.
    #[error("a known sequence computed twice gave different logits: the device computes wrongly now and then")]
    NotRepeated,
    /// A grammar that can't be compiled, is too large, or can't be fulfilled.
    #[error("the grammar: {reason}; simplify it, or ask without one")]
    Grammar {
        /// What is wrong.
        reason: String,
    },
    /// No thread for a grammar: the same request may succeed later.
    #[error("{at_once} grammars at a time are compiled, and too many wait; try again later, or ask without one")]
    CompilersBusy {
        /// Grammars that are compiled at the same time.
        at_once: usize,
    },
}
