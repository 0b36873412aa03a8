//! Files that are written whole or not at all.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::error::CliError;

/// Writes a file under another name first, so that no half of one is taken for a model; one that is there is replaced by a
/// rename, which leaves whoever has it mapped with the old one.
///
/// # Errors
/// If the file can't be written; else what `write` says, and then nothing is left.
pub fn write_whole<T>(path: &Path, write: impl FnOnce(File, &Path) -> Result<T, CliError>) -> Result<T, CliError> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let file = File::create(&partial).map_err(CliError::file(&partial, "create"))?;
    let result = write(file, &partial);
    if result.is_err() {
        // The first error is the one to tell of.
        let _ = std::fs::remove_file(&partial);
        return result;
    }
    std::fs::rename(&partial, path).map_err(CliError::file(path, "write"))?;
    result
}
