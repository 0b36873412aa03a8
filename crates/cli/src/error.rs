//! What goes wrong in a command, and how it is told: one sentence that ends in what to do.

use std::error::Error;
use std::io;
use std::path::PathBuf;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CliError {
    /// The reader of the output went away, which is no error of ours.
    #[error("the reader of the output closed it")]
    BrokenPipe,
    /// Output that can't be written.
    #[error("cannot write the output: {0}")]
    Output(io::Error),
    /// A file that can't be read or written.
    #[error("{}: cannot {action}: {source}; check the path and its permissions", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What was tried, as a verb.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// Input that has not the right form.
    #[error("{what}: expected {expected}, found {found}; {help}")]
    Input {
        /// Which input.
        what: String,
        /// What would be right.
        expected: String,
        /// What is there.
        found: String,
        /// What to do.
        help: String,
    },
    /// A model that can't be found or fetched.
    #[error(transparent)]
    Hub(#[from] qwen_models::hub::HubError),
    /// A model that can't be described.
    #[error(transparent)]
    Model(#[from] qwen_models::family::ModelError),
    /// Devices that can't be used together.
    #[error(transparent)]
    Fleet(#[from] qwen_engine::FleetError),
    /// A model that can't be loaded, or a request that can't be served.
    #[error(transparent)]
    Engine(#[from] qwen_engine::EngineError),
    /// An answer that ended because of the model.
    #[error("the answer ended: {0}")]
    Answer(String),
    /// A checkpoint that can't be opened.
    #[error(transparent)]
    Format(#[from] qwen_formats::FormatError),
    /// A tokenizer that can't be built, or text that it can't encode.
    #[error(transparent)]
    Tokenizer(#[from] qwen_models::tokenizer::TokenizerError),
    /// A chat template that can't be used.
    #[error(transparent)]
    Template(#[from] qwen_models::chat_template::TemplateError),
    /// An error with the file that it is about.
    #[error("{}: {source}", path.display())]
    In {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: Box<Self>,
    },
    /// The terminal can't be read.
    #[error("cannot read the terminal: {0}")]
    Terminal(#[from] rustyline::error::ReadlineError),
    /// A value that can't be written as JSON.
    #[error("cannot write JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// A device that can't be used.
    #[error(transparent)]
    Device(#[from] qwen_hal::HalError),
    /// A plugin that does not conform.
    #[error("{failed} of {of} cases failed; --verbose shows all, --case TEXT runs some of them again")]
    Conformance {
        /// Failed cases.
        failed: usize,
        /// All cases.
        of: usize,
    },
    /// A plugin that can't be checked.
    #[error("{0}")]
    Uncheckable(String),
    /// A device that can't be measured, or a profile that can't be kept.
    #[error(transparent)]
    Dispatch(#[from] qwen_dispatch::DispatchError),
    /// A sheet of a chip that is refused.
    #[error(transparent)]
    Chip(#[from] qwen_chips::ChipError),
    /// A plugin that is not used.
    #[error(transparent)]
    Plugin(#[from] qwen_hal::loader::LoadError),
    /// A thread or a reactor that the system does not give.
    #[error("cannot start a thread: {0}; check the limits of the process (ulimit -u)")]
    Runtime(io::Error),
    /// A server that can't start.
    #[error(transparent)]
    Serve(#[from] qwen_server::ServeError),
    /// The signal handler can't be set.
    #[error("cannot watch for Ctrl-C: {0}")]
    Signal(#[from] ctrlc::Error),
}

impl From<io::Error> for CliError {
    /// Errors of standard output; those of files are [`CliError::File`].
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe { Self::BrokenPipe } else { Self::Output(error) }
    }
}

impl CliError {
    /// For `map_err`: an error of a file.
    pub fn file(path: impl Into<PathBuf>, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { path, action, source }
    }

    /// Input that has not the right form.
    pub fn input(
        what: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
        help: impl Into<String>,
    ) -> Self {
        Self::Input { what: what.into(), expected: expected.into(), found: found.into(), help: help.into() }
    }

    /// For `map_err`: adds the file that the error is about.
    pub fn within<E: Into<Self>>(path: impl Into<PathBuf>) -> impl FnOnce(E) -> Self {
        let path = path.into();
        move |source| Self::In { path, source: Box::new(source.into()) }
    }
}

/// The error and what caused it as one line. Many messages already hold their cause's: it isn't said twice.
#[must_use]
pub fn sentence(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    printable(&text.lines().map(str::trim).collect::<Vec<_>>().join(" "))
}

/// Most characters of a sentence. Its middle goes first: the file is told at the beginning, what to do at the end.
const MAX_SENTENCE: usize = 2000;
const SENTENCE_END: usize = 500;

/// Messages quote files and arguments that anybody may have written: they must not steer the terminal, nor fill it.
fn printable(text: &str) -> String {
    let shown: Vec<char> = text
        .chars()
        .flat_map(|c| {
            let (plain, escaped) = if c.is_control() { (None, Some(c.escape_default())) } else { (Some(c), None) };
            plain.into_iter().chain(escaped.into_iter().flatten())
        })
        .collect();
    if shown.len() <= MAX_SENTENCE {
        return shown.into_iter().collect();
    }
    let (start, end) = (&shown[..MAX_SENTENCE - SENTENCE_END], &shown[shown.len() - SENTENCE_END..]);
    start.iter().chain(&[' ', '…', ' ']).chain(end).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] io::Error);

    #[test]
    fn causes_are_told_once_and_on_one_line() {
        assert_eq!(sentence(&Outer(io::Error::other("a\n  b"))), "outer: a b");
        let file = CliError::file("x.gguf", "read")(io::Error::other("gone"));
        assert_eq!(sentence(&file), "x.gguf: cannot read: gone; check the path and its permissions");
    }

    #[test]
    fn what_a_file_says_neither_steers_nor_fills_the_terminal() {
        let long = format!("file: \u{1b}[31m\u{7}{}; what to do", "\u{9b}x".repeat(50_000));
        let told = sentence(&io::Error::other(long));
        assert!(told.starts_with("file: \\u{1b}[31m\\u{7}\\u{9b}x"), "{told}");
        assert!(told.ends_with("; what to do"), "{told}");
        assert!(told.chars().count() <= MAX_SENTENCE + 3 && !told.contains(char::is_control));
    }

    #[test]
    fn a_closed_pipe_is_told_apart() {
        assert!(matches!(CliError::from(io::Error::from(io::ErrorKind::BrokenPipe)), CliError::BrokenPipe));
        assert!(matches!(CliError::from(io::Error::other("full")), CliError::Output(_)));
    }
}
