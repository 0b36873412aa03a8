//! Root-mean-square norm over groups of a row: y = x / sqrt(mean(x^2) + eps) * w.
//!
//! Shape: x, out [T, C], `w [AXIS]` with AXIS a divisor of C; in place allowed. Per group two passes, both in L1: squares into
//! four vector accumulators in turn (vector i of the group into accumulator i mod 4), added as (0 + 1) + (2 + 3) and then
//! lane-wise, so the order is fixed by AXIS alone; then the scaled product. Bound: memory traffic of x and out.

use std::marker::PhantomData;
use std::ops::Range;

use qwen_formats::DType;

use super::error::{KernelError, same};
use super::rows::for_rows;
use super::simd::storage::{F32, Storage, with_storage};
use super::simd::{Kernel, LANES, Simd, dispatch};
use crate::isa::Isa;
use crate::matrix::{Matrix, MatrixMut};
use crate::parallel::Parallel;

#[cfg(test)]
mod tests;

const OP: &str = "norm";

/// The weight of a norm: dense values of a 32- or 16-bit float type.
#[derive(Debug, Clone, Copy)]
pub struct NormWeight<'a> {
    /// Storage type: F32, F16 or BF16.
    pub dtype: DType,
    /// The values, one for each element of a group.
    pub bytes: &'a [u8],
}

/// Norms every group of `axis` consecutive elements of each row. `out` may be `x`.
///
/// # Errors
/// If sizes disagree or the weight isn't a supported float.
pub fn rms_norm(
    isa: Isa,
    parallel: &dyn Parallel,
    x: Matrix<'_, f32>,
    weight: NormWeight<'_>,
    axis: usize,
    eps: f32,
    out: MatrixMut<'_, f32>,
) -> Result<(), KernelError> {
    same(OP, "output rows", out.rows, x.rows)?;
    same(OP, "output columns", out.cols, x.cols)?;
    if axis == 0 || !x.cols.is_multiple_of(axis) {
        return Err(KernelError::Shape { op: OP, what: "axis", expected: x.cols, found: axis });
    }
    with_storage!(weight.dtype, W => {
        same(OP, "weight bytes", weight.bytes.len(), axis * W::BYTES)?;
        for_rows(parallel, x.rows, x.cols, &|rows| {
            dispatch(isa, Norm::<W> { x, out, rows, weight: weight.bytes, axis, eps, storage: PhantomData });
        });
        Ok(())
    }, Err(KernelError::Type { op: OP, what: "weight", found: weight.dtype }))
}

struct Norm<'a, W> {
    x: Matrix<'a, f32>,
    out: MatrixMut<'a, f32>,
    rows: Range<usize>,
    weight: &'a [u8],
    axis: usize,
    eps: f32,
    storage: PhantomData<W>,
}

impl<W: Storage> Kernel for Norm<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in self.rows {
            for group in 0..self.x.cols / self.axis {
                let start = group * self.axis;
                // SAFETY: the group lies in the row, the weight has `axis` values; rows are this task's own.
                unsafe {
                    let x = self.x.row_ptr(row).add(start);
                    let out = self.out.row_ptr(row).add(start);
                    norm_group::<S, W>(s, x, self.weight.as_ptr(), self.axis, self.eps, out);
                }
            }
        }
    }
}

/// # Safety
/// `x` and `out` have `len` values, `weight` as many of its type; `out` may be `x`.
#[inline(always)]
unsafe fn norm_group<S: Simd, W: Storage>(s: S, x: *const f32, weight: *const u8, len: usize, eps: f32, out: *mut f32) {
    let mut sums = [s.splat(0.0); 4];
    for i in 0..len.div_ceil(LANES) {
        // SAFETY: `load_up_to` stays below `len`.
        let v = unsafe { F32::load_up_to(s, x.add(i * LANES).cast(), len - i * LANES) };
        sums[i % 4] = s.fma(v, v, sums[i % 4]);
    }
    let sum = s.reduce_add(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])));
    let factor = s.splat(1.0 / (sum / len as f32 + eps).sqrt());
    for i in 0..len.div_ceil(LANES) {
        let n = len - i * LANES;
        // SAFETY: as above.
        unsafe {
            let v = F32::load_up_to(s, x.add(i * LANES).cast(), n);
            let w = W::load_up_to(s, weight.add(i * LANES * W::BYTES), n);
            F32::store_up_to(s, out.add(i * LANES).cast(), n, s.mul(s.mul(v, factor), w));
        }
    }
}
