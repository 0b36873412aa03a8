//! What can be wrong with a checkpoint: one variant per way, each message one sentence that says where, what was
//! expected, what was found and what to do.

use std::io;
use std::path::{Path, PathBuf};

use crate::DType;

/// Why a checkpoint, or a block of it, cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The operating system refused.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// File or directory.
        path: PathBuf,
        /// What was tried, as a verb.
        action: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// Neither GGUF nor safetensors.
    #[error("{}: not a model checkpoint: expected {expected}, found {found}", path.display())]
    Unrecognised {
        /// File or directory.
        path: PathBuf,
        /// What would have been accepted.
        expected: &'static str,
        /// What is there.
        found: String,
    },
    /// Well formed, but a version, type or feature that is refused by name.
    #[error("{}: {what} uses {found}, which is not supported; {help}", path.display())]
    Unsupported {
        /// File.
        path: PathBuf,
        /// The part of the file.
        what: String,
        /// The unsupported thing by name.
        found: String,
        /// What to do about it.
        help: &'static str,
    },
    /// The file ends too early.
    #[error(
        "{}: truncated: {what} needs bytes {start}..{end} but the file has {length}; download it again",
        path.display()
    )]
    Truncated {
        /// File.
        path: PathBuf,
        /// The part that does not fit.
        what: String,
        /// First byte of that part.
        start: u64,
        /// One past its last byte (saturated at 2^64 - 1).
        end: u64,
        /// Length of the file.
        length: u64,
    },
    /// A field holds a value that no correct writer produces.
    #[error(
        "{}: {what} (byte {offset}): expected {expected}, found {found}; the file is damaged, download or convert it again",
        path.display()
    )]
    Invalid {
        /// File.
        path: PathBuf,
        /// The field.
        what: String,
        /// Where the field is in the file.
        offset: u64,
        /// What would have been accepted.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A name that must be unique occurs twice.
    #[error("{}: {what} {name} occurs twice; the file is damaged, download or convert it again", path.display())]
    Duplicate {
        /// File.
        path: PathBuf,
        /// What kind of name.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// One file of a checkpoint in several files is absent.
    #[error("{}: the checkpoint needs {shard}, which is missing; download it into the same directory", path.display())]
    MissingShard {
        /// The file that names the shard.
        path: PathBuf,
        /// Name of the missing file.
        shard: String,
    },
    /// The files of a checkpoint in several files contradict each other.
    #[error("{}: {what}: expected {expected}, found {found}; the files are not from one checkpoint, download them again", path.display())]
    ShardMismatch {
        /// File.
        path: PathBuf,
        /// The contradiction.
        what: String,
        /// What the other files say.
        expected: String,
        /// What this file says.
        found: String,
    },
    /// A GGUF metadata key that is needed is absent.
    #[error("{}: metadata key {key} is missing: expected {expected}; convert the model again with a newer converter", path.display())]
    MissingKey {
        /// File.
        path: PathBuf,
        /// The key.
        key: String,
        /// Type that was asked for.
        expected: &'static str,
    },
    /// A GGUF metadata key holds another type than asked for.
    #[error("{}: metadata key {key}: expected {expected}, found {found}; convert the model again", path.display())]
    WrongType {
        /// File.
        path: PathBuf,
        /// The key.
        key: String,
        /// Type that was asked for.
        expected: &'static str,
        /// Type, and value where it is short.
        found: String,
    },
    /// A compiled model contradicts itself.
    #[error("{}: {what}: expected {expected}, found {found}; the compiled file is damaged, compile the model again", path.display())]
    Packed {
        /// File.
        path: PathBuf,
        /// The contradiction.
        what: String,
        /// What would have been accepted.
        expected: String,
        /// What is there.
        found: String,
    },
    /// Buffers given to a block routine do not fit each other.
    #[error("{dtype}: {what}: expected {expected}, found {found}; pass whole blocks")]
    BlockLength {
        /// Type of the blocks.
        dtype: DType,
        /// Which buffer.
        what: &'static str,
        /// Length that would fit.
        expected: usize,
        /// Length given.
        found: usize,
    },
    /// A type that has no values of the wanted kind.
    #[error("{dtype} cannot be {action}; use a type that holds numbers of that kind")]
    UnsupportedType {
        /// The type.
        dtype: DType,
        /// What was tried, as a participle.
        action: &'static str,
    },
    /// Text that names no storage type.
    #[error("unknown storage type {found}: expected a lower-case name such as f32, bf16, q4_0 or q4_k")]
    UnknownType {
        /// The text.
        found: String,
    },
}

impl FormatError {
    /// Turns an [`io::Error`] into [`FormatError::Io`], for `map_err`.
    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { path, action, source }
    }
}

/// As [`quote`] without the quotes: for names, which usually need none.
pub(crate) fn plain(name: &str) -> String {
    let quoted = quote(name.as_bytes());
    quoted.trim_matches('"').to_owned()
}

/// Text from an untrusted file, quoted, with control characters escaped and cut at 80 characters for a message.
pub(crate) fn quote(bytes: &[u8]) -> String {
    const LIMIT: usize = 80;
    // Four bytes is the longest character, so this many bytes are enough and a hostile megabyte is never scanned.
    let head = bytes.get(..(LIMIT + 1) * 4).unwrap_or(bytes);
    let text = String::from_utf8_lossy(head);
    let shown: String = text.chars().take(LIMIT).collect();
    let dots = if text.chars().nth(LIMIT).is_some() { "..." } else { "" };
    format!("\"{}{dots}\"", shown.escape_debug())
}
