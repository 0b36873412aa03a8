//! Scratch memory: typed pieces of the caller's bytes, and pieces that threads take apart.

use std::marker::PhantomData;
use std::mem::{align_of, size_of};

/// Pieces begin at multiples of this.
pub(super) const ALIGN: usize = 64;

/// Bytes that `count` values take as a piece.
pub(super) const fn piece_bytes<T>(count: usize) -> usize {
    count.saturating_mul(size_of::<T>()).saturating_add(ALIGN - 1) / ALIGN * ALIGN
}

/// Plain data: any bytes are a value.
///
/// # Safety
/// Implemented only for such types.
pub(super) unsafe trait Plain: Copy {}
// SAFETY: every bit pattern is a value.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}
// SAFETY: arrays of the above without padding.
unsafe impl Plain for super::wide::WideGroup {}

/// Cuts typed pieces off the front of a workspace.
pub(super) struct Cutter<'a> {
    rest: &'a mut [u8],
}

impl<'a> Cutter<'a> {
    pub(super) fn new(workspace: &'a mut [u8]) -> Self {
        let skip = workspace.as_ptr().align_offset(ALIGN).min(workspace.len());
        Self { rest: &mut workspace[skip..] }
    }

    /// The next `count` values, content unspecified; `None` if too few bytes are left.
    pub(super) fn take<T: Plain>(&mut self, count: usize) -> Option<&'a mut [T]> {
        const { assert!(align_of::<T>() <= ALIGN) };
        let (piece, rest) = std::mem::take(&mut self.rest).split_at_mut_checked(piece_bytes::<T>(count))?;
        self.rest = rest;
        // SAFETY: aligned (pieces are multiples of ALIGN from an aligned start), long enough, and any bytes are values.
        Some(unsafe { std::slice::from_raw_parts_mut(piece.as_mut_ptr().cast(), count) })
    }
}

/// A slice of which threads take disjoint ranges.
#[derive(Clone, Copy)]
pub(super) struct SharedMut<'a, T> {
    ptr: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: ranges are disjoint by the duty of `range`'s callers.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    pub(super) fn new(slice: &'a mut [T]) -> Self {
        Self { ptr: slice.as_mut_ptr(), len: slice.len(), life: PhantomData }
    }

    /// `count` values from `first` on.
    ///
    /// # Safety
    /// No other live reference covers the range.
    pub(super) unsafe fn range(&self, first: usize, count: usize) -> &'a mut [T] {
        assert!(first <= self.len && count <= self.len - first, "{count} from {first} of {}", self.len);
        // SAFETY: within the slice; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(first), count) }
    }

    /// Everything.
    ///
    /// # Safety
    /// No range is in use any more, nor will be.
    pub(super) unsafe fn whole(self) -> &'a [T] {
        // SAFETY: the slice that it was made of; shared by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
}
