//! What can be wrong with a model's description or its tensors.

use std::path::PathBuf;

use qwen_formats::{DType, FormatError};
use qwen_ir::IrError;

/// Why a model is refused. Each message says what was expected, what was found and, where it isn't plain, what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A known feature with a value that this version can't compute, refused by name.
    #[error("{what} {found} is not supported; supported: {supported}")]
    Unsupported {
        /// The feature, e.g. `architecture` or `rope_type`.
        what: String,
        /// Its value here.
        found: String,
        /// Values that work.
        supported: String,
    },
    /// A config value that is no description of a model.
    #[error("{key}: expected {expected}, found {found}; the config is damaged or was edited, download it again")]
    InvalidValue {
        /// Name of the key in the file.
        key: String,
        /// What would be right.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A needed config key is absent.
    #[error("{key} is missing: expected {expected}; the config is incomplete, download or convert the model again")]
    MissingKey {
        /// Name of the key in the file.
        key: String,
        /// What it would hold.
        expected: String,
    },
    /// The config asks for a tensor that the checkpoint hasn't got.
    #[error(
        "tensor {name} is missing: expected shape {expected:?}; the checkpoint is incomplete or its config belongs to another model"
    )]
    MissingTensor {
        /// Name of the tensor.
        name: String,
        /// Shape by the config.
        expected: Vec<u64>,
    },
    /// The checkpoint has tensors that the model doesn't use.
    #[error(
        "tensor {name} of shape {shape:?} has no place in a {family} model with this config (nor have {others} more); the config belongs to another model, or the model has a feature that is not supported"
    )]
    SurplusTensor {
        /// Name of the first one.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Name of the family.
        family: &'static str,
        /// How many more there are.
        others: usize,
    },
    /// A tensor with another shape than the config says.
    #[error(
        "tensor {name}: expected shape {expected:?} by the config, found {found:?}; the config belongs to another model"
    )]
    WrongShape {
        /// Name of the tensor.
        name: String,
        /// Shape by the config.
        expected: Vec<u64>,
        /// Shape in the checkpoint.
        found: Vec<u64>,
    },
    /// A tensor of a storage type that can't be used in its place.
    #[error("tensor {name}: expected it stored as {expected}, found {found}; convert the model to a supported type")]
    WrongType {
        /// Name of the tensor.
        name: String,
        /// Types that would do.
        expected: &'static str,
        /// Type in the checkpoint.
        found: DType,
    },
    /// A file that can't be read.
    #[error("{}: can't be read: {source}", path.display())]
    Io {
        /// File.
        path: PathBuf,
        /// Reason.
        source: std::io::Error,
    },
    /// Text that is no JSON object.
    #[error("expected a JSON object, found {found}; download the file again")]
    Json {
        /// What the parser said, or what stands there instead.
        found: String,
    },
    /// An error with the file that it is about.
    #[error("{}: {source}", path.display())]
    InFile {
        /// File.
        path: PathBuf,
        /// What is wrong.
        source: Box<Self>,
    },
    /// The container is wrong.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The graph doesn't type: a config whose sizes contradict each other.
    #[error("the sizes of the config contradict each other: {0}")]
    Graph(#[from] IrError),
}

impl ModelError {
    pub(super) fn unsupported(what: impl Into<String>, found: impl Into<String>, supported: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into(), found: found.into(), supported: supported.into() }
    }

    pub(super) fn invalid(key: impl Into<String>, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self::InvalidValue { key: key.into(), expected: expected.into(), found: found.into() }
    }

    /// Adds the file, for `map_err`.
    pub(super) fn in_file(path: &std::path::Path) -> impl FnOnce(Self) -> Self {
        let path = path.to_path_buf();
        // Container errors name their file by themselves.
        move |source| match source {
            Self::Format(_) | Self::InFile { .. } | Self::Io { .. } => source,
            _ => Self::InFile { path, source: Box::new(source) },
        }
    }
}

/// Text of an untrusted file for a message: quoted, control characters escaped, cut at 60 characters.
pub(super) fn quoted(text: &str) -> String {
    const LIMIT: usize = 60;
    let shown: String = text.chars().take(LIMIT).collect();
    let dots = if text.chars().nth(LIMIT).is_some() { "..." } else { "" };
    format!("\"{}{dots}\"", shown.escape_debug())
}
