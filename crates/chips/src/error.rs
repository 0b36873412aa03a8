//! What can be wrong with a sheet, one sentence each.

use std::path::PathBuf;

/// Why a sheet or a folder of sheets is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChipError {
    /// The file could not be read.
    #[error("{}: {what}", path.display())]
    Read {
        /// File or folder.
        path: PathBuf,
        /// The system's words.
        what: String,
    },
    /// The text is no sheet.
    #[error("{origin}: {what}")]
    Sheet {
        /// File, or the name of a built-in sheet.
        origin: String,
        /// What was expected and what was found, with its place.
        what: String,
    },
    /// Two sheets claim one name.
    #[error("{origin}: \"{name}\" is already a name of {other}; names and aliases are unique, rename one")]
    Duplicate {
        /// The later file.
        origin: String,
        /// The contested name.
        name: String,
        /// The sheet that has it.
        other: String,
    },
    /// No sheet has this name.
    #[error("no chip is called \"{name}\"; known are {known}")]
    Unknown {
        /// What was asked for.
        name: String,
        /// Names of all chips, separated by commas.
        known: String,
    },
}
