//! Host memory behind buffers: small pieces from the allocator, large ones mapped (backed when touched, in huge pages where the
//! system has them), address space that is backed step by step, and borrowed ranges.

use std::alloc::Layout;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::OnceLock;

use super::Failure;

/// Cache line, and so the least alignment of a buffer.
pub(crate) const LINE: usize = 64;
/// From this size on memory is mapped.
const MAPPED: usize = 256 << 10;
/// Size and alignment of a huge page.
const HUGE: usize = 2 << 20;
/// Stricter alignments than this are refused.
const MAX_ALIGNMENT: u64 = 1 << 30;

/// A piece of memory and how it is given back.
#[derive(Debug)]
pub(crate) enum Memory {
    /// From the allocator.
    Heap { ptr: NonNull<u8>, layout: Layout },
    /// An anonymous mapping; `ptr` lies within it, aligned.
    Mapped { base: NonNull<c_void>, mapped: usize, ptr: NonNull<u8> },
    /// Somebody else's.
    Borrowed { ptr: NonNull<u8> },
}

/// Bytes of a page.
pub(crate) fn page_size() -> usize {
    static PAGE: OnceLock<usize> = OnceLock::new();
    // SAFETY: asks for a constant of the system.
    *PAGE.get_or_init(|| usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096).max(4096))
}

impl Memory {
    /// Zeroed memory.
    pub(crate) fn alloc(size: u64, alignment: u64) -> Result<Self, Failure> {
        let (size, alignment) = checked(size, alignment)?;
        if size < MAPPED && alignment <= page_size() {
            let layout = Layout::from_size_align(size, alignment).map_err(|e| Failure::invalid(e.to_string()))?;
            // SAFETY: the size is not zero.
            let ptr = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) });
            let ptr = ptr.ok_or_else(|| Failure::out_of_memory(format!("the system has no {size} bytes left")))?;
            return Ok(Self::Heap { ptr, layout });
        }
        let alignment = if size >= HUGE { alignment.max(HUGE) } else { alignment };
        let memory = Self::map(size, alignment, libc::PROT_READ | libc::PROT_WRITE)?;
        memory.advise_huge(size);
        Ok(memory)
    }

    /// Addresses without memory.
    pub(crate) fn reserve(size: u64, alignment: u64) -> Result<Self, Failure> {
        let (size, alignment) = checked(size, alignment)?;
        Self::map(size, if size >= HUGE { alignment.max(HUGE) } else { alignment }, libc::PROT_NONE)
    }

    fn map(size: usize, alignment: usize, protection: i32) -> Result<Self, Failure> {
        let full = || Failure::out_of_memory(format!("the system has no {size} bytes of address space or memory left"));
        let slack = if alignment > page_size() { alignment } else { 0 };
        let mapped = size.checked_next_multiple_of(page_size()).and_then(|n| n.checked_add(slack)).ok_or_else(full)?;
        let mut flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        if protection == libc::PROT_NONE {
            flags |= libc::MAP_NORESERVE;
        }
        // SAFETY: a new anonymous mapping touches nothing that exists.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), mapped, protection, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(full());
        }
        let base = NonNull::new(base).ok_or_else(full)?;
        let skip = base.cast::<u8>().as_ptr().align_offset(alignment);
        // SAFETY: `skip` is below the slack, so the address lies within the mapping.
        let ptr = unsafe { base.cast::<u8>().add(skip) };
        Ok(Self::Mapped { base, mapped, ptr })
    }

    /// A wish, so failure does not matter.
    fn advise_huge(&self, size: usize) {
        #[cfg(target_os = "linux")]
        if size >= HUGE {
            // SAFETY: the range is ours; the advice changes no content.
            unsafe { libc::madvise(self.ptr().as_ptr().cast(), size / HUGE * HUGE, libc::MADV_HUGEPAGE) };
        }
        #[cfg(not(target_os = "linux"))]
        let _ = size;
    }

    /// First byte.
    pub(crate) const fn ptr(&self) -> NonNull<u8> {
        match self {
            Self::Heap { ptr, .. } | Self::Mapped { ptr, .. } | Self::Borrowed { ptr } => *ptr,
        }
    }

    /// Backs pages of a reserved range with zeroed memory; pages that are backed already keep their content.
    ///
    /// # Safety
    /// `offset` and `size` are multiples of the page size within the range.
    pub(crate) unsafe fn commit(&self, offset: usize, size: usize) -> Result<(), Failure> {
        // SAFETY: within the mapping by the caller's promise.
        let at = unsafe { self.ptr().add(offset) }.cast::<c_void>();
        // SAFETY: the pages are ours.
        if unsafe { libc::mprotect(at.as_ptr(), size, libc::PROT_READ | libc::PROT_WRITE) } != 0 {
            return Err(Failure::out_of_memory(format!("the system refuses {size} bytes: {}", last_error())));
        }
        #[cfg(target_os = "linux")]
        if size >= HUGE {
            // SAFETY: the pages are ours; the advice changes no content.
            unsafe { libc::madvise(at.as_ptr(), size, libc::MADV_HUGEPAGE) };
        }
        Ok(())
    }

    /// Gives pages of a reserved range back.
    ///
    /// # Safety
    /// As [`Memory::commit`], and nobody uses them.
    pub(crate) unsafe fn decommit(&self, offset: usize, size: usize) -> Result<(), Failure> {
        // SAFETY: within the mapping by the caller's promise.
        let at = unsafe { self.ptr().add(offset) }.cast::<c_void>().as_ptr();
        // SAFETY: the pages are ours and unused. An anonymous private page reads as zero after this.
        let done = unsafe {
            libc::madvise(at, size, libc::MADV_DONTNEED) == 0 && libc::mprotect(at, size, libc::PROT_NONE) == 0
        };
        if done { Ok(()) } else { Err(Failure::invalid(format!("the system keeps {size} bytes: {}", last_error()))) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        match self {
            // SAFETY: allocated with this layout, and nobody uses it any more.
            Self::Heap { ptr, layout } => unsafe { std::alloc::dealloc(ptr.as_ptr(), *layout) },
            Self::Mapped { base, mapped, .. } => {
                // SAFETY: mapped with this length, and nobody uses it any more.
                unsafe { libc::munmap(base.as_ptr(), *mapped) };
            }
            Self::Borrowed { .. } => {}
        }
    }
}

fn checked(size: u64, alignment: u64) -> Result<(usize, usize), Failure> {
    let alignment = alignment.max(LINE as u64);
    if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
        return Err(Failure::invalid(format!("alignment {alignment}, expected a power of two up to {MAX_ALIGNMENT}")));
    }
    match usize::try_from(size) {
        Ok(0) => Err(Failure::invalid("a buffer of 0 bytes, expected at least 1")),
        Ok(size) if size <= isize::MAX as usize => Ok((size, alignment as usize)),
        _ => Err(Failure::out_of_memory(format!("{size} bytes, expected at most {}", isize::MAX))),
    }
}

fn last_error() -> std::io::Error {
    std::io::Error::last_os_error()
}
