//! A cursor over untrusted bytes: every read is bounded, every failure says what was being read and where.

use std::fmt::Display;
use std::path::Path;

use crate::FormatError;

/// Reads little-endian fields one after another; never allocates.
#[derive(Clone, Copy)]
pub(crate) struct Reader<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Reader<'a> {
    pub(crate) const fn new(path: &'a Path, bytes: &'a [u8]) -> Self {
        Self { path, bytes, position: 0 }
    }

    pub(crate) const fn path(&self) -> &'a Path {
        self.path
    }

    pub(crate) const fn position(&self) -> u64 {
        self.position as u64
    }

    pub(crate) const fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    pub(crate) const fn remaining(&self) -> u64 {
        (self.bytes.len() - self.position) as u64
    }

    pub(crate) fn truncated(&self, what: &dyn Display, needed: u64) -> FormatError {
        FormatError::Truncated {
            path: self.path.to_path_buf(),
            what: what.to_string(),
            start: self.position(),
            end: self.position().saturating_add(needed),
            length: self.len(),
        }
    }

    pub(crate) fn take(&mut self, count: u64, what: &dyn Display) -> Result<&'a [u8], FormatError> {
        let taken = usize::try_from(count).ok().and_then(|count| {
            let end = self.position.checked_add(count)?;
            let taken = self.bytes.get(self.position..end)?;
            self.position = end;
            Some(taken)
        });
        taken.ok_or_else(|| self.truncated(what, count))
    }

    pub(crate) fn array<const N: usize>(&mut self, what: &dyn Display) -> Result<[u8; N], FormatError> {
        let bytes = self.take(N as u64, what)?;
        bytes.first_chunk().copied().ok_or_else(|| self.truncated(what, N as u64))
    }

    pub(crate) fn u32(&mut self, what: &dyn Display) -> Result<u32, FormatError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn u64(&mut self, what: &dyn Display) -> Result<u64, FormatError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A u64 length and that many bytes.
    pub(crate) fn string(&mut self, what: &dyn Display) -> Result<&'a [u8], FormatError> {
        let length = self.u64(what)?;
        self.take(length, what)
    }

    /// A count of items of at least `item_bytes` each, refused before anything is allocated if they cannot fit.
    pub(crate) fn bounded_count(&self, count: u64, item_bytes: u64, what: &dyn Display) -> Result<usize, FormatError> {
        let needed = count.saturating_mul(item_bytes);
        match usize::try_from(count) {
            Ok(fits) if needed <= self.remaining() => Ok(fits),
            _ => Err(self.truncated(what, needed)),
        }
    }
}
