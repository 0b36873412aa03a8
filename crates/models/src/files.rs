//! A small file of a checkpoint in, its bytes out.
//!
//! Only regular files are read, and only up to a size: the folder may come from anywhere, and opening a pipe in it would wait
//! for ever, reading a device would fill the memory.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Largest `tokenizer.json`; published ones have up to 35 MB.
pub const MAX_TOKENIZER_BYTES: u64 = 128 << 20;
/// Largest of the other files that describe a model: configs, templates.
pub const MAX_DESCRIPTION_BYTES: u64 = 16 << 20;

/// Reads a regular file of at most `limit` bytes.
///
/// # Errors
/// If it can't be read, is no regular file, or is larger.
pub fn read_file(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let refused = |found: String| Err(io::Error::new(io::ErrorKind::InvalidData, found));
    let metadata = std::fs::metadata(path)?;
    if metadata.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if !metadata.is_file() {
        return refused("expected a regular file, found a pipe or device".to_owned());
    }
    let mut bytes = Vec::new();
    // The file may have grown since.
    let length = match metadata.len() {
        length if length > limit => length,
        _ => File::open(path)?.take(limit + 1).read_to_end(&mut bytes)? as u64,
    };
    if length > limit {
        return refused(format!("expected at most {limit} bytes, found {length}"));
    }
    Ok(bytes)
}

/// The same, as text.
///
/// # Errors
/// Also if the bytes are not UTF-8.
pub fn read_text_file(path: &Path, limit: u64) -> io::Result<String> {
    let bytes = read_file(path, limit)?;
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        io::Error::new(io::ErrorKind::InvalidData, format!("expected UTF-8, found another byte at offset {at}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(path: &Path, limit: u64) -> String {
        read_file(path, limit).unwrap_err().to_string()
    }

    #[test]
    fn reads_up_to_the_limit() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        std::fs::write(&path, b"12345").unwrap();
        assert_eq!(read_file(&path, 5).unwrap(), b"12345");
        assert_eq!(message(&path, 4), "expected at most 4 bytes, found 5");
        std::fs::write(&path, [b'a', 0xFF]).unwrap();
        assert!(read_text_file(&path, 4).unwrap_err().to_string().contains("offset 1"));
    }

    #[cfg(unix)]
    #[test]
    fn pipes_devices_and_directories_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(read_file(directory.path(), 9).unwrap_err().kind(), io::ErrorKind::IsADirectory);
        assert_eq!(message(Path::new("/dev/zero"), 9), "expected a regular file, found a pipe or device");
        let socket = directory.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert_eq!(message(&socket, 9), "expected a regular file, found a pipe or device");
        assert_eq!(read_file(&directory.path().join("none"), 9).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
