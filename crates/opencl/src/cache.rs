//! Built programs on disk, so that a second start builds nothing.
//!
//! A file is named by the hash of everything that a build depends on, holds that hash, and ends with a hash of its content. Whatever is
//! not as it should be is not there: the program is built anew and the file replaced. Writing fails silently but for a warning:
//! the cache is only a matter of time.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::host;

/// First bytes of a file: format and version.
const MAGIC: &[u8; 8] = b"QHALOCL1";
/// Binaries above this size are not believed.
const MAX_BYTES: u64 = 256 << 20;

/// Identity of a built program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Key([u8; 32]);

impl Key {
    /// Of all parts, in order.
    pub(crate) fn of(parts: &[&str]) -> Self {
        let mut hash = Sha256::new();
        for part in parts {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Self(hash.finalize().into())
    }

    fn file_name(&self) -> String {
        let mut name: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        name.push_str(".bin");
        name
    }
}

/// A folder of built programs.
#[derive(Debug, Clone)]
pub(crate) struct Cache(Option<PathBuf>);

impl Cache {
    /// The user's: `QWEN_CACHE`, else `qwen-inference` in the user's cache folder; below it `opencl`. None if the user has none.
    pub(crate) fn of_user() -> Self {
        let set = |variable: &str| std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
        let user = || set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
        let root = set("QWEN_CACHE").or_else(|| Some(user()?.join("qwen-inference")));
        Self(root.map(|root| root.join("opencl")))
    }

    /// None, which keeps nothing.
    pub(crate) const fn none() -> Self {
        Self(None)
    }

    #[cfg(test)]
    fn at(folder: &Path) -> Self {
        Self(Some(folder.to_owned()))
    }

    /// The binary that was stored, if it is whole.
    pub(crate) fn load(&self, key: &Key) -> Option<Vec<u8>> {
        let path = self.0.as_ref()?.join(key.file_name());
        let file = fs::File::open(&path).ok()?;
        let mut bytes = Vec::new();
        let read = file.take(MAX_BYTES).read_to_end(&mut bytes);
        let content = read.ok().and_then(|_| unseal(&bytes, key));
        if content.is_none() {
            host::warn(&format!("{} is damaged, the program is built anew", path.display()));
        }
        content
    }

    /// Keeps a binary. The file appears whole or not at all.
    pub(crate) fn store(&self, key: &Key, binary: &[u8]) {
        let Some(folder) = &self.0 else { return };
        let path = folder.join(key.file_name());
        if let Err(error) = write(folder, &path, &seal(binary, key)) {
            host::warn(&format!("{} cannot be written, later starts build again: {error}", path.display()));
        }
    }

    /// Forgets a binary that the device does not take.
    pub(crate) fn remove(&self, key: &Key) {
        if let Some(folder) = &self.0 {
            // If it stays, it is replaced.
            let _ = fs::remove_file(folder.join(key.file_name()));
        }
    }
}

fn digest(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

fn seal(binary: &[u8], key: &Key) -> Vec<u8> {
    let mut bytes = [MAGIC.as_slice(), &key.0, binary].concat();
    let end = digest(&bytes);
    bytes.extend(end);
    bytes
}

fn unseal(bytes: &[u8], key: &Key) -> Option<Vec<u8>> {
    let (content, end) = bytes.split_last_chunk::<32>()?;
    let binary = content.strip_prefix(MAGIC)?.strip_prefix(&key.0)?;
    (digest(content) == *end && !binary.is_empty()).then(|| binary.to_vec())
}

fn write(folder: &Path, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
    // What is loaded from here runs: for the user alone.
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let temporary = folder.join(format!(".{}-{count}", std::process::id()));
    let result =
        fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary).and_then(|mut file| {
            file.write_all(bytes)?;
            file.sync_all()?;
            fs::rename(&temporary, path)
        });
    if result.is_err() {
        // Nothing may be there.
        let _ = fs::remove_file(&temporary);
    }
    result
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn what_is_stored_is_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(&folder.path().join("deep/er"));
        let (one, other) = (Key::of(&["a", "bc"]), Key::of(&["ab", "c"]));
        assert_ne!(one, other);
        assert_eq!(cache.load(&one), None);
        cache.store(&one, b"first");
        cache.store(&one, b"second");
        assert_eq!(cache.load(&one).as_deref(), Some(b"second".as_slice()));
        assert_eq!(cache.load(&other), None);
        assert_eq!(fs::read_dir(folder.path().join("deep/er")).unwrap().count(), 1);
        cache.remove(&one);
        assert_eq!(cache.load(&one), None);
    }

    #[test]
    fn a_damaged_file_is_not_there() {
        let folder = tempfile::tempdir().unwrap();
        let (cache, key) = (Cache::at(folder.path()), Key::of(&["x"]));
        cache.store(&key, b"a binary");
        let path = folder.path().join(key.file_name());
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x40;
            fs::write(&path, &bytes).unwrap();
            assert_eq!(cache.load(&key), None, "byte {at}");
            fs::write(&path, &whole[..at]).unwrap();
            assert_eq!(cache.load(&key), None, "{at} bytes");
        }
        // Another program's file under this name.
        fs::write(&path, seal(b"a binary", &Key::of(&["y"]))).unwrap();
        assert_eq!(cache.load(&key), None);
        cache.store(&key, b"a binary");
        assert_eq!(cache.load(&key).as_deref(), Some(b"a binary".as_slice()));
    }
}
