//! The paged cache: blocks of a fixed number of tokens, in memory that belongs to the runtime.
//!
//! A block is either keys of all heads followed by values of all heads, or, joined (latent attention), `[block_size, head_dim +
//! value_dim]`. Keys are `[heads, block_size, head_dim]` and values `[heads, block_size, value_dim]`, or, where [`in_pairs`] says
//! so, both by sixteen positions in the order in which products of bfloat16 pairs read them: keys `[heads, block_size / 16,
//! head_dim / 2, 16 positions, 2 elements]`, values `[heads, block_size / 16, 8, value_dim, 2 positions]`. A row of either is a
//! vector of pairs, so attention neither turns keys nor interleaves values, and the sixteen positions lie in one piece.

use std::marker::PhantomData;

use qwen_formats::DType;

use super::error::KernelError;
use super::simd::LANES;

/// A cache for reading.
#[derive(Debug, Clone, Copy)]
pub struct CacheView<'a> {
    /// First block.
    pub(crate) ptr: *const u8,
    /// F32, F16 or BF16.
    pub dtype: DType,
    /// Bytes from block to block.
    pub block_bytes: usize,
    /// Blocks.
    pub num_blocks: usize,
    life: PhantomData<&'a [u8]>,
}

/// A cache for writing.
#[derive(Debug, Clone, Copy)]
pub struct CacheViewMut<'a> {
    ptr: *mut u8,
    /// F32, F16 or BF16.
    pub dtype: DType,
    /// Bytes from block to block.
    pub block_bytes: usize,
    /// Blocks.
    pub num_blocks: usize,
    life: PhantomData<&'a mut [u8]>,
}

// SAFETY: plain memory; a launch reads it or writes disjoint parts of it.
unsafe impl Send for CacheView<'_> {}
// SAFETY: as above.
unsafe impl Sync for CacheView<'_> {}
// SAFETY: as above.
unsafe impl Send for CacheViewMut<'_> {}
// SAFETY: as above.
unsafe impl Sync for CacheViewMut<'_> {}

impl<'a> CacheView<'a> {
    /// A cache over bytes; blocks that don't fit in whole are left out.
    #[must_use]
    pub fn new(bytes: &'a [u8], dtype: DType, block_bytes: usize) -> Self {
        let num_blocks = bytes.len().checked_div(block_bytes).unwrap_or(0);
        Self { ptr: bytes.as_ptr(), dtype, block_bytes, num_blocks, life: PhantomData }
    }

    /// A cache over raw memory.
    ///
    /// # Safety
    /// `ptr` is valid for reads of `num_blocks * block_bytes` bytes for `'a`, and nobody writes them meanwhile.
    #[must_use]
    pub const unsafe fn from_raw(ptr: *const u8, dtype: DType, block_bytes: usize, num_blocks: usize) -> Self {
        Self { ptr, dtype, block_bytes, num_blocks, life: PhantomData }
    }

    /// Address of block `i`.
    #[inline(always)]
    pub(crate) fn block(&self, i: usize) -> *const u8 {
        debug_assert!(i < self.num_blocks);
        self.ptr.wrapping_add(i * self.block_bytes)
    }
}

impl<'a> CacheViewMut<'a> {
    /// A cache over bytes; blocks that don't fit in whole are left out.
    #[must_use]
    pub fn new(bytes: &'a mut [u8], dtype: DType, block_bytes: usize) -> Self {
        let num_blocks = bytes.len().checked_div(block_bytes).unwrap_or(0);
        Self { ptr: bytes.as_mut_ptr(), dtype, block_bytes, num_blocks, life: PhantomData }
    }

    /// A cache over raw memory.
    ///
    /// # Safety
    /// `ptr` is valid for reads and writes of `num_blocks * block_bytes` bytes for `'a`; nobody else uses them meanwhile.
    #[must_use]
    pub const unsafe fn from_raw(ptr: *mut u8, dtype: DType, block_bytes: usize, num_blocks: usize) -> Self {
        Self { ptr, dtype, block_bytes, num_blocks, life: PhantomData }
    }

    /// Address of block `i`.
    #[inline(always)]
    pub(crate) fn block(&self, i: usize) -> *mut u8 {
        debug_assert!(i < self.num_blocks);
        self.ptr.wrapping_add(i * self.block_bytes)
    }
}

/// Whether a cache that isn't joined holds pairs.
pub(crate) const fn in_pairs(dtype: DType, block_size: usize, head_dim: usize, value_dim: usize) -> bool {
    matches!(dtype, DType::BF16)
        && block_size > 0
        && block_size.is_multiple_of(LANES)
        && head_dim.is_multiple_of(2)
        && value_dim.is_multiple_of(LANES)
}

/// Refuses a block too small for `tokens` tokens of `values` cached values.
pub(crate) fn check_block(
    op: &'static str,
    dtype: DType,
    block_bytes: usize,
    tokens: usize,
    values: usize,
) -> Result<(), KernelError> {
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err(KernelError::Type { op, what: "cache", found: dtype });
    }
    let expected = tokens.saturating_mul(values).saturating_mul(dtype.block_bytes());
    if tokens == 0 || block_bytes < expected {
        return Err(KernelError::Shape { op, what: "bytes of a cache block", expected, found: block_bytes });
    }
    Ok(())
}
