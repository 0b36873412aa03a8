//! Softmax over each row: e^(x - max) / sum.
//!
//! Shape: x, out [T, C]; in place allowed. Three passes over a row: the maximum, the exponentials and their sum (lane i of
//! every vector together, lanes added at the end, so the order is fixed by C alone), the quotient. NaN counts for nothing in
//! the maximum and spreads over its row. Bound: memory traffic of the three passes, or the exponential in cache.

use std::ops::Range;

use super::error::{KernelError, same};
use super::math::exp;
use super::rows::for_rows;
use super::simd::storage::{F32, Storage};
use super::simd::{Kernel, LANES, Simd, dispatch};
use crate::isa::Isa;
use crate::matrix::{Matrix, MatrixMut};
use crate::parallel::Parallel;

#[cfg(test)]
mod tests;

/// Softmax of each row. `out` may be `x`.
///
/// # Errors
/// If sizes disagree.
pub fn softmax(
    isa: Isa,
    parallel: &dyn Parallel,
    x: Matrix<'_, f32>,
    out: MatrixMut<'_, f32>,
) -> Result<(), KernelError> {
    same("softmax", "output rows", out.rows, x.rows)?;
    same("softmax", "output columns", out.cols, x.cols)?;
    for_rows(parallel, x.rows, x.cols, &|rows| dispatch(isa, Softmax { x, out, rows }));
    Ok(())
}

struct Softmax<'a> {
    x: Matrix<'a, f32>,
    out: MatrixMut<'a, f32>,
    rows: Range<usize>,
}

impl Kernel for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in self.rows {
            // SAFETY: rows have `cols` values and are this task's own.
            unsafe { softmax_row(s, self.x.row_ptr(row), self.x.cols, self.out.row_ptr(row)) };
        }
    }
}

/// # Safety
/// `x` and `out` have `len` values; `out` may be `x`.
#[inline(always)]
pub(super) unsafe fn softmax_row<S: Simd>(s: S, x: *const f32, len: usize, out: *mut f32) {
    let mut best = s.splat(f32::NEG_INFINITY);
    for i in (0..len).step_by(LANES) {
        // SAFETY: at most len - i values.
        let v = unsafe {
            if len - i >= LANES { s.load(x.add(i)) } else { s.load_partial(x.add(i), len - i, f32::NEG_INFINITY) }
        };
        best = s.max(v, best);
    }
    let best = s.splat(s.reduce_max(best));
    let mut sum = s.splat(0.0);
    for i in (0..len).step_by(LANES) {
        // SAFETY: as above; lanes beyond the row become e^-inf = 0, unless the maximum is -inf, when all is NaN anyway.
        unsafe {
            let v =
                if len - i >= LANES { s.load(x.add(i)) } else { s.load_partial(x.add(i), len - i, f32::NEG_INFINITY) };
            let y = exp(s, s.sub(v, best));
            sum = s.add(sum, y);
            F32::store_up_to(s, out.add(i).cast(), len - i, y);
        }
    }
    let sum = s.splat(s.reduce_add(sum));
    for i in (0..len).step_by(LANES) {
        // SAFETY: as above.
        unsafe {
            let y = F32::load_up_to(s, out.add(i).cast::<u8>(), len - i);
            F32::store_up_to(s, out.add(i).cast(), len - i, s.div(y, sum));
        }
    }
}
