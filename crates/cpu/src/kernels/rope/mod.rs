//! Rotary position embedding.
//!
//! Shape: x, out [T, NUM_HEADS * HEAD_DIM], `positions [T]`, inv_freq [ROTARY_DIM / 2]; in place allowed. Cosines and sines of
//! a token are computed once, into arrays on the stack, and shared by its heads. Pairs (a, b) become
//! (a cos - b sin, b cos + a sin), each as one product and one fused multiply-add. Bound: memory traffic of x and out.

use std::ops::Range;

use super::error::{KernelError, same};
use super::math::sin_cos;
use super::rows::for_rows;
use super::simd::storage::{F32, Storage};
use super::simd::{Kernel, LANES, Simd, dispatch};
use crate::isa::Isa;
use crate::matrix::{Matrix, MatrixMut};
use crate::parallel::Parallel;

#[cfg(test)]
mod tests;

const OP: &str = "rope";
/// Most pairs of a head.
pub const MAX_PAIRS: usize = 512;

/// Which elements form a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// i and i + ROTARY_DIM / 2.
    Half,
    /// 2i and 2i + 1.
    Interleaved,
}

/// Attributes of a rotation.
#[derive(Debug, Clone, Copy)]
pub struct RopeArgs {
    /// Heads of a row.
    pub num_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// First rotated element of a head.
    pub rotary_offset: usize,
    /// Rotated elements of a head.
    pub rotary_dim: usize,
    /// Which elements form a pair.
    pub style: RopeStyle,
    /// Factor on cosine and sine.
    pub attention_factor: f32,
}

/// Rotates every head of each row by position * `inv_freq`. `out` may be `x`.
///
/// # Errors
/// If sizes disagree.
pub fn rope(
    isa: Isa,
    parallel: &dyn Parallel,
    args: &RopeArgs,
    x: Matrix<'_, f32>,
    positions: &[i32],
    inv_freq: &[f32],
    out: MatrixMut<'_, f32>,
) -> Result<(), KernelError> {
    same(OP, "columns", x.cols, args.num_heads * args.head_dim)?;
    same(OP, "output columns", out.cols, x.cols)?;
    same(OP, "output rows", out.rows, x.rows)?;
    same(OP, "positions", positions.len(), x.rows)?;
    same(OP, "frequencies", inv_freq.len(), args.rotary_dim / 2)?;
    let end = args.rotary_offset.saturating_add(args.rotary_dim);
    if !args.rotary_dim.is_multiple_of(2) || end > args.head_dim || inv_freq.len() > MAX_PAIRS {
        let expected = (args.head_dim.saturating_sub(args.rotary_offset) & !1).min(2 * MAX_PAIRS);
        return Err(KernelError::Shape { op: OP, what: "rotary_dim", expected, found: args.rotary_dim });
    }
    for_rows(parallel, x.rows, x.cols, &|rows| {
        dispatch(isa, Rope { args, x, positions, inv_freq, out, rows });
    });
    Ok(())
}

struct Rope<'a> {
    args: &'a RopeArgs,
    x: Matrix<'a, f32>,
    positions: &'a [i32],
    inv_freq: &'a [f32],
    out: MatrixMut<'a, f32>,
    rows: Range<usize>,
}

impl Kernel for Rope<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let pairs = self.inv_freq.len();
        let (mut cosines, mut sines) = ([0.0f32; MAX_PAIRS], [0.0f32; MAX_PAIRS]);
        for row in self.rows {
            let position = s.splat(self.positions[row] as f32);
            let factor = s.splat(self.args.attention_factor);
            for first in (0..pairs).step_by(LANES) {
                let n = (pairs - first).min(LANES);
                // SAFETY: n frequencies from `first` on.
                let freq = unsafe { F32::load_up_to(s, self.inv_freq.as_ptr().add(first).cast(), n) };
                let (sine, cosine) = sin_cos(s, s.mul(position, freq));
                let sine = s.to_array(s.mul(s.of(sine), factor));
                let cosine = s.to_array(s.mul(s.of(cosine), factor));
                sines[first..first + n].copy_from_slice(&sine[..n]);
                cosines[first..first + n].copy_from_slice(&cosine[..n]);
            }
            for head in 0..self.args.num_heads {
                let start = head * self.args.head_dim;
                // SAFETY: the head lies in the row; rows are this task's own.
                unsafe {
                    let (x, out) = (self.x.row_ptr(row).add(start), self.out.row_ptr(row).add(start));
                    copy_rest(self.args, x, out);
                    let (x, out) = (x.add(self.args.rotary_offset), out.add(self.args.rotary_offset));
                    match self.args.style {
                        RopeStyle::Half => rotate_half(s, x, &cosines[..pairs], &sines[..pairs], out),
                        RopeStyle::Interleaved => rotate_interleaved(x, &cosines[..pairs], &sines[..pairs], out),
                    }
                }
            }
        }
    }
}

/// Copies the elements of a head that aren't rotated.
///
/// # Safety
/// `x` and `out` have `head_dim` values.
#[inline(always)]
unsafe fn copy_rest(args: &RopeArgs, x: *const f32, out: *mut f32) {
    if std::ptr::eq(x, out) {
        return;
    }
    let end = args.rotary_offset + args.rotary_dim;
    // SAFETY: both ranges lie in the head.
    unsafe {
        std::ptr::copy(x, out, args.rotary_offset);
        std::ptr::copy(x.add(end), out.add(end), args.head_dim - end);
    }
}

/// # Safety
/// `x` and `out` have twice as many values as there are cosines and sines.
#[inline(always)]
unsafe fn rotate_half<S: Simd>(s: S, x: *const f32, cosines: &[f32], sines: &[f32], out: *mut f32) {
    let half = cosines.len();
    for i in (0..half).step_by(LANES) {
        let n = half - i;
        // SAFETY: i + n is within each half.
        unsafe {
            let a = F32::load_up_to(s, x.add(i).cast(), n);
            let b = F32::load_up_to(s, x.add(half + i).cast(), n);
            let cosine = F32::load_up_to(s, cosines.as_ptr().add(i).cast(), n);
            let sine = F32::load_up_to(s, sines.as_ptr().add(i).cast(), n);
            let minus = s.sub(s.splat(0.0), s.mul(b, sine));
            F32::store_up_to(s, out.add(i).cast(), n, s.fma(a, cosine, minus));
            F32::store_up_to(s, out.add(half + i).cast(), n, s.fma(b, cosine, s.mul(a, sine)));
        }
    }
}

/// # Safety
/// As [`rotate_half`].
#[inline(always)]
unsafe fn rotate_interleaved(x: *const f32, cosines: &[f32], sines: &[f32], out: *mut f32) {
    for i in 0..cosines.len() {
        let (cosine, sine) = (cosines[i], sines[i]);
        // SAFETY: 2 i + 1 is within the values.
        unsafe {
            let (a, b) = (*x.add(2 * i), *x.add(2 * i + 1));
            *out.add(2 * i) = a.mul_add(cosine, -(b * sine));
            *out.add(2 * i + 1) = b.mul_add(cosine, a * sine);
        }
    }
}
