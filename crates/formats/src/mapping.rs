//! A file mapped read-only into memory: the only unsafe code of the crate.
//!
//! A mapping is a window on a file that others can still change. If another process truncates the file while it is
//! mapped, touching the lost pages raises SIGBUS and ends this process; if it writes into the file, the bytes change
//! under us. No mapping can prevent either, so: replace a model by renaming a new file over it (the old mapping then keeps
//! the old file), never by writing into it. Headers are parsed from the mapping once, into owned memory; tensor
//! bytes are only ever read as numbers, so changed bytes give wrong numbers, not memory errors.

use std::fs::File;
use std::ops::{Deref, Range};
use std::path::Path;

use memmap2::Mmap;

use crate::FormatError;

/// The bytes of one file, mapped read-only. Shared as `Arc<Mapping>`, so it can outlive the checkpoint.
#[derive(Debug)]
pub struct Mapping {
    map: Mmap,
}

impl Mapping {
    /// Maps a regular file. Anything else (directory, pipe, device) is refused before it is opened.
    pub fn open(path: &Path) -> Result<Self, FormatError> {
        let metadata = std::fs::metadata(path).map_err(FormatError::io(path, "open the file"))?;
        if !metadata.is_file() {
            return Err(FormatError::Unrecognised {
                path: path.to_path_buf(),
                expected: "a regular file",
                found: "a directory, pipe or device".into(),
            });
        }
        let file = File::open(path).map_err(FormatError::io(path, "open the file"))?;
        // SAFETY: the mapping is read-only and private to this object. Its bytes are read as plain data, so a change by
        // another process can give wrong numbers but no invalid Rust value; truncation is documented above.
        let map = unsafe { Mmap::map(&file) }.map_err(FormatError::io(path, "map the file"))?;
        Ok(Self { map })
    }

    /// Has the system bring the pages of `range` to memory now, so that reading them later waits for nothing. A hint: never
    /// fails, does nothing where the system can't (Linux before 5.14, other systems).
    pub fn populate(&self, range: Range<usize>) {
        let range = range.start..range.end.min(self.map.len());
        if range.is_empty() {
            return;
        }
        #[cfg(target_os = "linux")]
        // A refused hint costs time later, not correctness.
        drop(self.map.advise_range(memmap2::Advice::PopulateRead, range.start, range.len()));
    }

    /// Tells the system that the whole pages inside `range` will not be needed soon, so that they stop counting as
    /// resident. Reading them again brings them back from the file. A hint: never fails, does nothing off Unix.
    pub fn release(&self, range: Range<usize>) {
        let range = whole_pages(range.start..range.end.min(self.map.len()), page_size());
        if range.is_empty() {
            return;
        }
        #[cfg(unix)]
        {
            // SAFETY: the map is backed by a file and never written, so dropping its pages loses nothing: the next read
            // faults the same bytes in again. The range lies inside the map.
            let advised = unsafe {
                self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len())
            };
            // A refused hint costs memory, not correctness.
            drop(advised);
        }
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

/// The largest range of whole pages inside `range` (a page shared with a neighbour stays).
fn whole_pages(range: Range<usize>, page: usize) -> Range<usize> {
    let start = range.start.checked_next_multiple_of(page).unwrap_or(range.end);
    start..range.end / page * page
}

fn page_size() -> usize {
    #[cfg(unix)]
    {
        // SAFETY: sysconf reads a constant of the system and touches no memory of ours.
        let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        usize::try_from(size).ok().filter(|size| size.is_power_of_two()).unwrap_or(1 << 16)
    }
    #[cfg(not(unix))]
    {
        1 << 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_pages_never_leave_the_range() {
        assert_eq!(whole_pages(1..4096, 4096), 4096..4096);
        assert_eq!(whole_pages(0..8192, 4096), 0..8192);
        assert_eq!(whole_pages(100..13000, 4096), 4096..12288);
        assert!(whole_pages(5000..6000, 4096).is_empty());
        assert!(whole_pages(usize::MAX - 5..usize::MAX, 4096).is_empty());
    }

    #[test]
    fn released_pages_read_the_same_again() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> = (0..100_000u32).map(|i| (i % 251) as u8).collect();
        std::fs::write(file.path(), &bytes).unwrap();
        let mapping = Mapping::open(file.path()).unwrap();
        assert_eq!(&mapping[..], &bytes[..]);
        mapping.release(10..90_000);
        mapping.release(50_000..usize::MAX);
        mapping.populate(10..70_000);
        mapping.populate(90_000..usize::MAX);
        assert_eq!(&mapping[..], &bytes[..]);
    }

    #[test]
    fn a_directory_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        assert!(matches!(Mapping::open(directory.path()), Err(FormatError::Unrecognised { .. })));
    }
}
