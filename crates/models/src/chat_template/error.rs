//! What can be wrong with a chat template or its use.

use std::path::PathBuf;

/// A template that cannot be read or rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A JSON file that holds a template does not have the expected form.
    #[error("{} is not valid: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        source: serde_json::Error,
    },
    /// A key of a GGUF file has another type than it should.
    #[error(transparent)]
    Metadata(#[from] qwen_formats::FormatError),
    /// The template is longer than is read.
    #[error("the chat template has {bytes} bytes; at most {limit} are read")]
    SourceTooLong {
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The text is no template.
    #[error("the chat template is not valid{}: {message}", at(*line))]
    Syntax {
        /// Where.
        line: Option<usize>,
        /// What is wrong.
        message: String,
    },
    /// The template refused the conversation, in its own words.
    #[error("the chat template refused the conversation: {0}")]
    Raised(String),
    /// The template failed on this conversation.
    #[error("the chat template failed{}: {message}", at(*line))]
    Render {
        /// Where.
        line: Option<usize>,
        /// What went wrong.
        message: String,
    },
    /// The template computed for too long: an endless loop, or far too many messages.
    #[error("the chat template did not finish within {fuel} steps")]
    TooManySteps {
        /// The limit.
        fuel: u64,
    },
    /// The template wrote too much.
    #[error("the chat template wrote more than {limit} bytes")]
    OutputTooLong {
        /// The limit.
        limit: usize,
    },
    /// The template took too long.
    #[error("the chat template did not finish within {seconds} s")]
    TooSlow {
        /// The limit.
        seconds: f64,
    },
    /// No thread could be started to render in.
    #[error("cannot start a thread for the chat template: {0}")]
    Thread(std::io::Error),
    /// An extra variable would hide one that the template must be able to trust.
    #[error("chat_template_kwargs must not set `{0}`")]
    Reserved(String),
}

fn at(line: Option<usize>) -> String {
    line.map(|line| format!(" at line {line}")).unwrap_or_default()
}
