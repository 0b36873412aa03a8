//! Element by element: gated activations, sums and products, functions, conversions, copies.
//!
//! Shape: [T, C] with row strides; a vector at a time, the tail of a row through a partial vector. In place allowed except
//! for `cast` between sizes. Bound: memory traffic, or the exponential (about 20 instructions a vector) in cache.

use std::ops::Range;

use qwen_formats::{DType, blocks};

use super::error::{KernelError, same};
use super::math;
use super::rows::for_rows;
use super::simd::storage::{Bf16, F16, F32, Storage};
use super::simd::{Kernel, LANES, Simd, dispatch};
use crate::isa::Isa;
use crate::matrix::{Matrix, MatrixMut};
use crate::parallel::Parallel;

#[cfg(test)]
mod tests;

/// A gate's activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// x / (1 + e^-x).
    Silu,
    /// Gelu, tanh form.
    GeluTanh,
}

/// A function of one operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unary {
    /// x / (1 + e^-x).
    Silu,
    /// Gelu, tanh form.
    GeluTanh,
    /// 1 / (1 + e^-x).
    Sigmoid,
}

/// A function of two operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Binary {
    /// a + b.
    Add,
    /// a b.
    Mul,
}

/// What is done to a pair of vectors; unary functions ignore the second.
#[derive(Clone, Copy)]
enum Function {
    Unary(Unary),
    Binary(Binary),
    Glu(Activation),
}

impl Function {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, a: S::V, b: S::V) -> S::V {
        match self {
            Self::Unary(Unary::Silu) => math::silu(s, a),
            Self::Unary(Unary::GeluTanh) => math::gelu_tanh(s, a),
            Self::Unary(Unary::Sigmoid) => math::sigmoid(s, a),
            Self::Binary(Binary::Add) => s.add(a, b),
            Self::Binary(Binary::Mul) => s.mul(a, b),
            Self::Glu(Activation::Silu) => s.mul(math::silu(s, a), b),
            Self::Glu(Activation::GeluTanh) => s.mul(math::gelu_tanh(s, a), b),
        }
    }
}

/// y = act(a) b.
///
/// # Errors
/// If sizes disagree.
pub fn glu(
    isa: Isa,
    parallel: &dyn Parallel,
    activation: Activation,
    a: Matrix<'_, f32>,
    b: Matrix<'_, f32>,
    out: MatrixMut<'_, f32>,
) -> Result<(), KernelError> {
    same("glu", "second operand's columns", b.cols, a.cols)?;
    elementwise("glu", isa, parallel, Function::Glu(activation), a, b, out)
}

/// y = a (op) b, where b has the shape of a or one column.
///
/// # Errors
/// If sizes disagree.
pub fn binary(
    isa: Isa,
    parallel: &dyn Parallel,
    function: Binary,
    a: Matrix<'_, f32>,
    b: Matrix<'_, f32>,
    out: MatrixMut<'_, f32>,
) -> Result<(), KernelError> {
    if b.cols != 1 {
        same("binary", "second operand's columns", b.cols, a.cols)?;
    }
    elementwise("binary", isa, parallel, Function::Binary(function), a, b, out)
}

/// y = f(x).
///
/// # Errors
/// If sizes disagree.
pub fn unary(
    isa: Isa,
    parallel: &dyn Parallel,
    function: Unary,
    x: Matrix<'_, f32>,
    out: MatrixMut<'_, f32>,
) -> Result<(), KernelError> {
    elementwise("unary", isa, parallel, Function::Unary(function), x, x, out)
}

fn elementwise(
    op: &'static str,
    isa: Isa,
    parallel: &dyn Parallel,
    function: Function,
    a: Matrix<'_, f32>,
    b: Matrix<'_, f32>,
    out: MatrixMut<'_, f32>,
) -> Result<(), KernelError> {
    same(op, "second operand's rows", b.rows, a.rows)?;
    same(op, "output rows", out.rows, a.rows)?;
    same(op, "output columns", out.cols, a.cols)?;
    for_rows(parallel, a.rows, a.cols, &|rows| dispatch(isa, Elementwise { function, a, b, out, rows }));
    Ok(())
}

struct Elementwise<'a> {
    function: Function,
    a: Matrix<'a, f32>,
    b: Matrix<'a, f32>,
    out: MatrixMut<'a, f32>,
    rows: Range<usize>,
}

impl Kernel for Elementwise<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.a.cols;
        let broadcast = self.b.cols == 1 && cols != 1;
        for row in self.rows {
            let (a, b, out) = (self.a.row_ptr(row), self.b.row_ptr(row), self.out.row_ptr(row));
            // SAFETY: a row of b has at least one value, as cols > 1.
            let single = if broadcast { s.splat(unsafe { *b }) } else { s.splat(0.0) };
            for i in (0..cols).step_by(LANES) {
                // SAFETY: at most cols - i values of each row; rows are this task's own.
                unsafe {
                    let x = F32::load_up_to(s, a.add(i).cast(), cols - i);
                    let y = if broadcast { single } else { F32::load_up_to(s, b.add(i).cast(), cols - i) };
                    F32::store_up_to(s, out.add(i).cast(), cols - i, self.function.apply(s, x, y));
                }
            }
        }
    }
}

/// A matrix of floats, read-only.
#[derive(Debug, Clone, Copy)]
pub enum FloatMatrix<'a> {
    /// Single precision.
    F32(Matrix<'a, f32>),
    /// Half precision.
    F16(Matrix<'a, u16>),
    /// bfloat16.
    Bf16(Matrix<'a, u16>),
    /// 8-bit float, 4 exponent bits.
    F8E4M3(Matrix<'a, u8>),
    /// 8-bit float, 5 exponent bits.
    F8E5M2(Matrix<'a, u8>),
}

/// A matrix of floats to be written.
#[derive(Debug, Clone, Copy)]
pub enum FloatMatrixMut<'a> {
    /// Single precision.
    F32(MatrixMut<'a, f32>),
    /// Half precision.
    F16(MatrixMut<'a, u16>),
    /// bfloat16.
    Bf16(MatrixMut<'a, u16>),
}

impl FloatMatrix<'_> {
    fn shape(&self) -> (usize, usize) {
        match self {
            Self::F32(m) => (m.rows, m.cols),
            Self::F16(m) | Self::Bf16(m) => (m.rows, m.cols),
            Self::F8E4M3(m) | Self::F8E5M2(m) => (m.rows, m.cols),
        }
    }
}

impl FloatMatrixMut<'_> {
    fn shape(&self) -> (usize, usize) {
        match self {
            Self::F32(m) => (m.rows, m.cols),
            Self::F16(m) | Self::Bf16(m) => (m.rows, m.cols),
        }
    }
}

/// Converts between float types, rounding to nearest even.
///
/// # Errors
/// If sizes disagree.
pub fn cast(isa: Isa, parallel: &dyn Parallel, x: FloatMatrix<'_>, out: FloatMatrixMut<'_>) -> Result<(), KernelError> {
    let (rows, cols) = x.shape();
    same("cast", "output rows", out.shape().0, rows)?;
    same("cast", "output columns", out.shape().1, cols)?;
    for_rows(parallel, rows, cols, &|rows| dispatch(isa, Cast { x, out, rows }));
    Ok(())
}

struct Cast<'a> {
    x: FloatMatrix<'a>,
    out: FloatMatrixMut<'a>,
    rows: Range<usize>,
}

impl Kernel for Cast<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.x.shape().1;
        for row in self.rows {
            for i in (0..cols).step_by(LANES) {
                let n = cols - i;
                // SAFETY: at most n values from column i on; rows are this task's own.
                unsafe {
                    let v = match &self.x {
                        FloatMatrix::F32(m) => F32::load_up_to(s, m.row_ptr(row).add(i).cast(), n),
                        FloatMatrix::F16(m) => F16::load_up_to(s, m.row_ptr(row).add(i).cast(), n),
                        FloatMatrix::Bf16(m) => Bf16::load_up_to(s, m.row_ptr(row).add(i).cast(), n),
                        FloatMatrix::F8E4M3(m) => s.of(decode_f8(DType::F8E4M3, m.row_ptr(row).add(i), n)),
                        FloatMatrix::F8E5M2(m) => s.of(decode_f8(DType::F8E5M2, m.row_ptr(row).add(i), n)),
                    };
                    match &self.out {
                        FloatMatrixMut::F32(m) => F32::store_up_to(s, m.row_ptr(row).add(i).cast(), n, v),
                        FloatMatrixMut::F16(m) => F16::store_up_to(s, m.row_ptr(row).add(i).cast(), n, v),
                        FloatMatrixMut::Bf16(m) => Bf16::store_up_to(s, m.row_ptr(row).add(i).cast(), n, v),
                    }
                }
            }
        }
    }
}

/// Up to sixteen 8-bit floats at `p`.
///
/// # Safety
/// `p` is valid for `min(n, 16)` reads.
unsafe fn decode_f8(dtype: DType, p: *const u8, n: usize) -> [f32; LANES] {
    let n = n.min(LANES);
    let mut lanes = [0.0; LANES];
    // SAFETY: n readable bytes.
    let bytes = unsafe { std::slice::from_raw_parts(p, n) };
    // Sizes agree and the type is a float, so it can't fail; if it did, NaN would show.
    if blocks::dequantize(dtype, bytes, &mut lanes[..n]).is_err() {
        lanes = [f32::NAN; LANES];
    }
    lanes
}

/// Copies rows of `x.cols` bytes. `out` may be `x` or overlap it row by row.
///
/// # Errors
/// If sizes disagree.
pub fn copy(parallel: &dyn Parallel, x: Matrix<'_, u8>, out: MatrixMut<'_, u8>) -> Result<(), KernelError> {
    same("copy", "output rows", out.rows, x.rows)?;
    same("copy", "output columns", out.cols, x.cols)?;
    for_rows(parallel, x.rows, x.cols / 4, &|rows| {
        for row in rows {
            // SAFETY: rows have `cols` bytes and are this task's own; the copy allows overlap.
            unsafe { std::ptr::copy(x.row_ptr(row), out.row_ptr(row), x.cols) };
        }
    });
    Ok(())
}
