//! y = x W^T for several weights that share x, and the same per expert.
//!
//! In: activations f32, weights in any stored type (packed by [`WeightLayout::pack`] if the type has a packed form, else the
//! file's bytes), optional bias and scales. Out: f32, with an epilogue. See `QHAL_OP_GEMM` and `QHAL_OP_GROUPED_GEMM`.
//!
//! Invariants:
//! - one float accumulator (or one vector of lanes) per output, inputs in order, the same pattern for every tile: bits of a row
//!   depend neither on other rows nor on threads nor on the instruction set;
//! - a NaN or an infinity in a row of x makes that row's results NaN (in integer modes) or what f32 arithmetic gives;
//! - no allocation; scratch is the caller's, [`workspace_bytes`] says how much.
//!
//! | file | what |
//! |---|---|
//! | `layout`, `form` | weights in memory: sizes, packing, unpacking |
//! | `activations` | rounding of x to int8 tiles |
//! | `driver` | sharing work over threads, from panel to output |
//! | `scalar`, `neon`, `avx2`, `avx512`, `amx` | integer products |
//! | `vector`, `sources`, `few` | unpacking, products of one row and of a few rows for any vector register |
//! | `exact` | products of quantised weights with f32 |
//! | `float`, `bf16` | products of plain floats: with f32, and of bfloat16 pairs |
//! | `widen`, `f8` | 8-bit floats: widened, and multiplied with one row as they are |
//! | `epilogue` | bias, GLU, residual |

mod activations;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx2_round;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_round;
mod bf16;
mod driver;
mod epilogue;
mod exact;
mod experts;
mod f8;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod few;
mod float;
mod form;
mod layout;
#[cfg(target_arch = "aarch64")]
mod neon;
mod panel;
mod scalar;
pub(super) mod shares;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod sources;
mod unroll;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod vector;
mod way;
mod wide;
mod widen;
mod workspace;

pub use layout::WeightLayout;
pub(crate) use way::Path;
pub use way::Way;

use qwen_hal_abi::ops;

use crate::isa::Isa;
use crate::kernels::error::KernelError;
use crate::matrix::{Matrix, MatrixMut};
use crate::parallel::Parallel;

/// Name in errors.
const OP: &str = "gemm";

/// Most weights that share an input in one call.
pub const MAX_SEGMENTS: usize = 16;

/// How products are formed. Plain floats know two forms: bfloat16 weights with [`Compute::Bf16`], and f32 for all else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Compute {
    /// f32 products of exact weights.
    F32,
    /// Activations rounded to int8, one scale per 32 inputs.
    I8G32,
    /// The same, one scale per 16.
    I8G16,
    /// Two int8 terms per 32 inputs, about 16 bits.
    I8X2G32,
    /// As `I8X2G32` for groups with a spike, else as `I8G32`.
    I8SG32,
    /// Activations rounded to bfloat16, for bfloat16 weights; as F32 for others, which is more exact.
    Bf16,
}

impl Compute {
    /// From `QHAL_COMPUTE_*`.
    #[must_use]
    pub const fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            ops::QHAL_COMPUTE_F32 => Self::F32,
            ops::QHAL_COMPUTE_I8_G32 => Self::I8G32,
            ops::QHAL_COMPUTE_I8_G16 => Self::I8G16,
            ops::QHAL_COMPUTE_I8X2_G32 => Self::I8X2G32,
            ops::QHAL_COMPUTE_I8S_G32 => Self::I8SG32,
            ops::QHAL_COMPUTE_BF16 => Self::Bf16,
            _ => return None,
        })
    }
}

/// The function of a gated unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// x / (1 + e^-x).
    Silu,
    /// Gelu, tanh form.
    GeluTanh,
}

impl Activation {
    /// From `QHAL_ACT_*`.
    #[must_use]
    pub const fn from_code(code: i64) -> Option<Self> {
        Some(match code {
            ops::QHAL_ACT_SILU => Self::Silu,
            ops::QHAL_ACT_GELU_TANH => Self::GeluTanh,
            _ => return None,
        })
    }
}

/// One weight, or one per expert.
#[derive(Debug, Clone, Copy)]
pub struct Segment<'a> {
    /// [`WeightLayout::weight_bytes`] bytes, times experts.
    pub weight: &'a [u8],
    /// How they lie.
    pub layout: WeightLayout,
    /// [`WeightLayout::num_scales`] separate scales, times experts.
    pub scales: Option<&'a [f32]>,
    /// One value per output, times experts.
    pub bias: Option<&'a [f32]>,
    /// How products are formed.
    pub compute: Compute,
}

/// What is done to the result before it is written.
#[derive(Debug, Clone, Copy)]
pub enum Epilogue<'a> {
    /// Nothing.
    None,
    /// out = act(y_0) * y_1 for exactly two segments of equal size.
    Glu(Activation),
    /// out = y + addend, which may be the output's own memory.
    Add(Matrix<'a, f32>),
}

/// Rows of x, expert by expert.
#[derive(Debug, Clone, Copy)]
pub struct Groups<'a> {
    /// First sorted row of each expert, and the end.
    pub offsets: &'a [i32],
    /// Row of x for each sorted row; absent: the same.
    pub rows: Option<&'a [i32]>,
}

/// Bytes of workspace for at most `rows` rows (sorted rows, with experts) of these weights on `threads` threads.
#[must_use]
pub fn workspace_bytes(rows: usize, experts: usize, segments: &[(WeightLayout, Compute)], threads: usize) -> usize {
    workspace_bytes_of(Isa::current().into(), rows, experts, segments, threads)
}

/// The same for a way of computing.
#[must_use]
pub fn workspace_bytes_of(
    way: Way,
    rows: usize,
    experts: usize,
    segments: &[(WeightLayout, Compute)],
    threads: usize,
) -> usize {
    driver::Scratch::of(way, rows, experts, segments.iter().copied(), threads).bytes()
}

/// How many scales of sums 32 inputs have, if activations are rounded to int8 for a weight.
#[must_use]
pub fn rounded_subgroups(layout: &WeightLayout, compute: Compute) -> Option<usize> {
    match panel::Mode::of(layout, compute) {
        panel::Mode::Rounded(_, format, _) => Some(format.subs),
        _ => None,
    }
}

/// Whether activations are rounded to bfloat16 for a weight.
#[must_use]
pub fn rounds_to_bf16(layout: &WeightLayout, compute: Compute) -> bool {
    panel::Mode::of(layout, compute) == panel::Mode::Bf16
}

/// Rows of a block of these weights.
#[must_use]
pub fn block_rows(way: Way, segments: &[(WeightLayout, Compute)]) -> usize {
    driver::Scratch::of(way, 1, 1, segments.iter().copied(), 1).block
}

/// Multiplies all rows of `x` with each segment's weight.
///
/// # Errors
/// Operands that don't fit each other, or a workspace that is too small.
pub fn gemm(
    way: impl Into<Way>,
    parallel: &dyn Parallel,
    x: Matrix<'_, f32>,
    segments: &[Segment<'_>],
    out: MatrixMut<'_, f32>,
    epilogue: Epilogue<'_>,
    workspace: &mut [u8],
) -> Result<(), KernelError> {
    let rows = i32::try_from(x.rows).map_err(|_| KernelError::Shape {
        op: OP,
        what: "rows",
        expected: i32::MAX as usize,
        found: x.rows,
    })?;
    let groups = Groups { offsets: &[0, rows], rows: None };
    driver::Problem { way: way.into(), x, groups, segments, out, epilogue }.run(parallel, workspace)
}

/// Multiplies the rows of each expert with its weights; weights of experts without rows are not touched.
///
/// # Errors
/// Operands that don't fit each other, offsets that fall or exceed the output's rows, row numbers outside `x`, or a workspace
/// that is too small.
#[expect(clippy::too_many_arguments, reason = "the op's operands")]
pub fn grouped_gemm(
    way: impl Into<Way>,
    parallel: &dyn Parallel,
    x: Matrix<'_, f32>,
    offsets: &[i32],
    rows: Option<&[i32]>,
    segments: &[Segment<'_>],
    out: MatrixMut<'_, f32>,
    epilogue: Epilogue<'_>,
    workspace: &mut [u8],
) -> Result<(), KernelError> {
    let groups = Groups { offsets, rows };
    driver::Problem { way: way.into(), x, groups, segments, out, epilogue }.run(parallel, workspace)
}

#[cfg(test)]
mod tests;
