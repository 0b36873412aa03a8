//! The register tile under both forms of attention: C = A B, up to six rows by four vectors of columns at a time.
//!
//! A's values are broadcast one by one, B's rows are vectors, read through [`RowSource`] so that they may be scratch, cached
//! values of another type or rows scattered over cache blocks. Each element of C is one chain of fused multiply-adds over
//! ascending k, so the shape of the tile never shows in a result. Registers (AVX-512): 24 accumulators, 4 of B, 1 of A;
//! AVX2: 12 for one column of vectors, 2, 1. Bound: multiply-adds once two rows share B.

#![expect(clippy::needless_range_loop, reason = "indices of register tiles; counted loops unroll")]

use std::marker::PhantomData;
use std::ops::Range;

use crate::kernels::simd::storage::Storage;
use crate::kernels::simd::{Kernel, LANES, Simd};

/// Most rows of a register tile.
pub(crate) const TILE_ROWS: usize = 6;

/// Where B's rows lie.
pub(crate) trait RowSource: Copy {
    /// Sixteen values of row `k` from `column` on.
    ///
    /// # Safety
    /// They are readable.
    unsafe fn load<S: Simd>(self, s: S, k: usize, column: usize) -> S::V;
    /// Called before the loads of row `k` from `column` on: the place to ask for what is needed later.
    ///
    /// # Safety
    /// They are readable.
    #[inline(always)]
    unsafe fn ahead<S: Simd>(self, _: S, _k: usize, _column: usize) {}
}

/// Rows a fixed distance apart.
#[derive(Clone, Copy)]
pub(crate) struct Strided<T> {
    ptr: *const u8,
    /// In bytes.
    stride: usize,
    storage: PhantomData<T>,
}

impl<T: Storage> Strided<T> {
    /// Rows `stride` values apart.
    #[inline(always)]
    pub(crate) fn new(ptr: *const u8, stride: usize) -> Self {
        Self { ptr, stride: stride * T::BYTES, storage: PhantomData }
    }
}

impl<T: Storage> RowSource for Strided<T> {
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, k: usize, column: usize) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { T::load(s, self.ptr.add(k * self.stride + column * T::BYTES)) }
    }
}

/// Rows at some distance from listed addresses.
#[derive(Clone, Copy)]
pub(crate) struct Listed<T> {
    rows: *const *const u8,
    /// In bytes.
    offset: usize,
    storage: PhantomData<T>,
}

impl<T: Storage> Listed<T> {
    #[inline(always)]
    pub(crate) fn new(rows: *const *const u8, offset: usize) -> Self {
        Self { rows, offset, storage: PhantomData }
    }
}

impl<T: Storage> RowSource for Listed<T> {
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, k: usize, column: usize) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { T::load(s, (*self.rows.add(k)).add(self.offset + column * T::BYTES)) }
    }
}

/// Up to [`TILE_ROWS`] rows of A and C.
#[derive(Clone, Copy)]
pub(crate) struct TileRows {
    /// Rows that count.
    pub(crate) n: usize,
    /// Rows of A, indexed by k.
    pub(crate) a: [*const f32; TILE_ROWS],
    /// Rows of C.
    pub(crate) c: [*mut f32; TILE_ROWS],
    /// Factors on what C holds, when the product is added to it.
    pub(crate) factors: [f32; TILE_ROWS],
}

impl TileRows {
    /// No rows.
    pub(crate) const EMPTY: Self = Self {
        n: 0,
        a: [std::ptr::null(); TILE_ROWS],
        c: [std::ptr::null_mut(); TILE_ROWS],
        factors: [0.0; TILE_ROWS],
    };
}

/// C = A B (or C = factors C + A B if `ADD`) over `k` in `depth` and the given vectors of columns.
///
/// # Safety
/// `rows.a` are readable over `depth`, `b` over `depth` and the columns, `rows.c` writable over the columns.
#[inline(always)]
pub(crate) unsafe fn multiply<S: Simd, B: RowSource, const ADD: bool>(
    s: S,
    rows: &TileRows,
    b: B,
    depth: Range<usize>,
    vectors: Range<usize>,
) {
    let mut vector = vectors.start;
    // SAFETY: the caller's promise, for each tile.
    unsafe {
        if S::TILE_VECTORS == 4 {
            while vector + 4 <= vectors.end {
                any_rows::<S, B, ADD, 4>(s, rows, b, &depth, vector * LANES);
                vector += 4;
            }
            while vector + 2 <= vectors.end {
                any_rows::<S, B, ADD, 2>(s, rows, b, &depth, vector * LANES);
                vector += 2;
            }
        }
        while vector < vectors.end {
            any_rows::<S, B, ADD, 1>(s, rows, b, &depth, vector * LANES);
            vector += 1;
        }
    }
}

/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn any_rows<S: Simd, B: RowSource, const ADD: bool, const C: usize>(
    s: S,
    rows: &TileRows,
    b: B,
    depth: &Range<usize>,
    column: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if S::TILE_ROWS == 1 {
            return tile::<S, B, ADD, 1, C>(s, rows, b, depth, column);
        }
        match rows.n {
            1 => tile::<S, B, ADD, 1, C>(s, rows, b, depth, column),
            2 => tile::<S, B, ADD, 2, C>(s, rows, b, depth, column),
            3 => tile::<S, B, ADD, 3, C>(s, rows, b, depth, column),
            4 => tile::<S, B, ADD, 4, C>(s, rows, b, depth, column),
            5 => tile::<S, B, ADD, 5, C>(s, rows, b, depth, column),
            6 => tile::<S, B, ADD, 6, C>(s, rows, b, depth, column),
            _ => {}
        }
    }
}

/// A register tile, as a function of its own.
struct Tile<'a, B, const ADD: bool, const R: usize, const C: usize> {
    rows: &'a TileRows,
    b: B,
    depth: &'a Range<usize>,
    column: usize,
}

impl<B: RowSource, const ADD: bool, const R: usize, const C: usize> Kernel for Tile<'_, B, ADD, R, C> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: made by `tile` alone, whose caller promises.
        unsafe { tile_body::<S, B, ADD, R, C>(s, self.rows, self.b, self.depth, self.column) };
    }
}

/// # Safety
/// As [`multiply`], with at least `R` rows.
#[inline(always)]
unsafe fn tile<S: Simd, B: RowSource, const ADD: bool, const R: usize, const C: usize>(
    s: S,
    rows: &TileRows,
    b: B,
    depth: &Range<usize>,
    column: usize,
) {
    s.enter(Tile::<B, ADD, R, C> { rows, b, depth, column });
}

/// # Safety
/// As [`multiply`], with at least `R` rows.
#[inline(always)]
unsafe fn tile_body<S: Simd, B: RowSource, const ADD: bool, const R: usize, const C: usize>(
    s: S,
    rows: &TileRows,
    b: B,
    depth: &Range<usize>,
    column: usize,
) {
    let mut sums = [[s.splat(0.0); C]; R];
    // SAFETY: the caller's promise.
    unsafe {
        if ADD {
            for r in 0..R {
                let factor = s.splat(rows.factors[r]);
                for c in 0..C {
                    sums[r][c] = s.mul(s.load(rows.c[r].add(column + c * LANES)), factor);
                }
            }
        }
        for k in depth.start..depth.end {
            b.ahead(s, k, column);
            let mut vectors = [s.splat(0.0); C];
            for c in 0..C {
                vectors[c] = b.load(s, k, column + c * LANES);
            }
            for r in 0..R {
                let value = s.splat(*rows.a[r].add(k));
                for c in 0..C {
                    sums[r][c] = s.fma(value, vectors[c], sums[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                s.store(rows.c[r].add(column + c * LANES), sums[r][c]);
            }
        }
    }
}
