//! What unpacking and one-row products need of a vector register: 4 codes of each of some rows. Methods are inlined into
//! functions that have the instructions; all are unsafe for want of them, and pointers must be valid for what is read.

use super::wide::RUNS;

/// A register of [`ROWS`](Self::ROWS) 32-bit lanes, one per output row.
pub(super) trait Vector: Copy {
    /// As many f32 lanes.
    type Float: Copy;
    /// Rows of a register.
    const ROWS: usize;

    /// Asks for the cache line at `p`, which may be any address.
    unsafe fn prefetch(p: *const u8);
    unsafe fn load(p: *const u8) -> Self;
    unsafe fn store(self, p: *mut u8);
    /// Every byte `x`.
    unsafe fn splat8(x: u8) -> Self;
    /// Every lane `x`.
    unsafe fn splat32(x: i32) -> Self;
    unsafe fn and(self, other: Self) -> Self;
    unsafe fn or(self, other: Self) -> Self;
    /// Sums of bytes, wrapping.
    unsafe fn add8(self, other: Self) -> Self;
    unsafe fn add32(self, other: Self) -> Self;
    /// 16-bit lanes up by N bits.
    unsafe fn up16<const N: u32>(self) -> Self;
    /// 16-bit lanes down by N bits.
    unsafe fn down16<const N: u32>(self) -> Self;
    /// 32-bit lanes up by N bits.
    unsafe fn up32<const N: u32>(self) -> Self;
    /// 32-bit lanes down.
    unsafe fn down32(self, count: usize) -> Self;
    /// Bytes 0..16 replaced by entries of a table.
    unsafe fn lookup(self, table: &[u8; 16]) -> Self;
    /// One unsigned byte a row, widened.
    unsafe fn bytes(p: *const u8) -> Self;
    /// One signed byte a row, widened.
    unsafe fn signed_bytes(p: *const u8) -> Self;
    /// One unsigned 16-bit number a row, widened.
    unsafe fn halves(p: *const u8) -> Self;

    /// The four bytes of each lane, signed, as numbers.
    unsafe fn signed_bytes_to_floats(self) -> [Self::Float; 4];

    /// One half-precision number a row.
    unsafe fn half(p: *const u8) -> Self::Float;
    unsafe fn splat(x: f32) -> Self::Float;
    unsafe fn load_float(p: *const f32) -> Self::Float;
    unsafe fn store_float(x: Self::Float, p: *mut f32);
    unsafe fn to_float(self) -> Self::Float;
    unsafe fn mul(a: Self::Float, b: Self::Float) -> Self::Float;
    unsafe fn add(a: Self::Float, b: Self::Float) -> Self::Float;
    unsafe fn sub(a: Self::Float, b: Self::Float) -> Self::Float;
    /// a b + c, rounded once.
    unsafe fn fma(a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float;

    /// Where the sum of products of codes plus OFFSET begins, from -128 times the sum of the activations' codes.
    unsafe fn begin<const OFFSET: u8>(offset: *const i32) -> Self;
    /// `sum` plus the products of the runs with their words of four int8 activations at `x`.
    unsafe fn dot<const OFFSET: u8, const COUNT: usize>(sum: Self, codes: [Self; COUNT], x: *const i32) -> Self;

    /// The same a run at a time: a part of a sum is opened, takes up to [`together`](Self::together) runs, and is closed.
    #[inline(always)]
    unsafe fn open<const OFFSET: u8>(sum: Self) -> Self {
        sum
    }
    /// `part` plus the products of a run with its word at `x`.
    #[inline(always)]
    unsafe fn step<const OFFSET: u8>(part: Self, codes: Self, x: *const i32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self::dot::<OFFSET, 1>(part, [codes], x) }
    }
    /// The sum that the part was opened for, with the part's products.
    #[inline(always)]
    unsafe fn close<const OFFSET: u8>(_sum: Self, part: Self) -> Self {
        part
    }
    /// Runs that a part may take.
    #[inline(always)]
    fn together<const OFFSET: u8>() -> usize {
        RUNS
    }
}

/// A group of 32 inputs of [`Vector::ROWS`] rows.
pub(super) struct Group<V: Vector> {
    /// Codes plus the source's offset, unsigned.
    pub(super) codes: [V; RUNS],
    pub(super) scale: [V::Float; 2],
    /// Minima for codes minus the type's centre.
    pub(super) min: [V::Float; 2],
}
