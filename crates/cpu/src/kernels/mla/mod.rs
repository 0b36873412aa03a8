//! Multi-head latent attention over a joined cache: per token a latent and a rotary key, shared by all heads.
//!
//! Shape: q [T, heads * (nope + rope)], kv_b [heads * (nope + value), latent], cache blocks [block_size, latent + rope], out [T,
//! heads * value]. Two forms, equal but for rounding, both on the tiles and splits of [`super::attention`]:
//!
//! - [`absorbed`]: each query goes through W_k once and meets the cached rows themselves; W_v is applied to the weighted
//!   latent. Reads the cache once for all heads: right for decode.
//! - [`expanded`]: keys and values of a tile are made from its latents, per head, and shared by a task's query rows. Fewer
//!   operations once a few hundred rows share them: right for prefill.

mod absorbed;
mod expanded;

#[cfg(test)]
mod tests;

use qwen_formats::DType;

use super::attention::schedule::{self, Problem, Sizes};
use super::attention::{Cached, Sequences, StepLimits};
use super::cache::CacheView;
use super::error::{KernelError, same};
use super::simd::LANES;
use crate::isa::Isa;
use crate::matrix::{Matrix, MatrixMut};
use crate::parallel::Parallel;

use super::attention::flash::Dims;
use super::attention::paged::Geometry;
use absorbed::Absorbed;
use expanded::Expanded;

const OP: &str = "mla_attention";
/// Most query rows of a task in absorbed form: their state is long.
const ABSORBED_ROWS: usize = 64;
/// Tokens that go through the absorbed form at a time: bounds the workspace.
const ABSORBED_TOKENS: usize = 64;
/// Query tokens of a task in expanded form: they share the expansion.
const EXPANDED_ROWS: usize = 256;

/// Where the up-projections are applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MlaForm {
    /// To the cached latents.
    Expanded,
    /// To the query and the result.
    Absorbed,
}

/// Attributes of latent attention.
#[derive(Debug, Clone, Copy)]
pub struct MlaArgs {
    /// Query heads.
    pub num_heads: usize,
    /// Elements of a query head without rotation.
    pub nope_dim: usize,
    /// Rotated elements of a query head.
    pub rope_dim: usize,
    /// Elements of a value head.
    pub value_dim: usize,
    /// Elements of the latent.
    pub latent_dim: usize,
    /// Tokens of a cache block.
    pub block_size: usize,
    /// Factor on scores.
    pub scale: f32,
    /// Positions that a query sees, 0 for all.
    pub window: usize,
    /// Where the up-projections are applied.
    pub form: MlaForm,
}

/// The up-projection of latents: dense rows of `latent_dim` values, per head the key rows, then the value rows.
#[derive(Debug, Clone, Copy)]
pub struct KvB<'a> {
    /// F32, F16 or BF16.
    pub dtype: DType,
    /// The values.
    pub bytes: &'a [u8],
}

impl MlaArgs {
    const fn query_dim(&self) -> usize {
        self.nope_dim + self.rope_dim
    }

    const fn geometry(&self) -> Geometry {
        Geometry::joined(self.block_size, self.latent_dim + self.rope_dim, self.latent_dim)
    }

    /// Values of an absorbed query head: the latent part is padded to whole vectors.
    const fn absorbed_stride(&self) -> usize {
        self.latent_dim.next_multiple_of(LANES) + self.rope_dim
    }

    const fn dims(&self) -> Dims {
        match self.form {
            MlaForm::Expanded => Dims { key_dim: self.query_dim(), value_dim: self.value_dim, scale: self.scale },
            MlaForm::Absorbed => {
                Dims { key_dim: self.latent_dim + self.rope_dim, value_dim: self.latent_dim, scale: self.scale }
            }
        }
    }

    /// Values of workspace before that of the schedule.
    const fn absorbed_values(&self, tokens: usize, threads: usize) -> usize {
        let tokens = if tokens < ABSORBED_TOKENS { tokens } else { ABSORBED_TOKENS };
        let staged = if self.latent_dim.is_multiple_of(LANES) { 0 } else { self.nope_dim };
        tokens * self.num_heads * (self.absorbed_stride() + self.latent_dim)
            + threads * staged * self.latent_dim.next_multiple_of(LANES)
            + LANES
    }
}

/// Bytes of workspace that [`mla_attention`] makes good use of in steps within the limits.
#[must_use]
pub fn mla_workspace_bytes(args: &MlaArgs, limits: &StepLimits) -> usize {
    let threads = limits.threads.max(1);
    let (sequences, max_context) = (limits.sequences, limits.max_context);
    let sizes = |tokens| Sizes { threads, sequences, tokens, max_context, heads: args.num_heads };
    match args.form {
        MlaForm::Expanded => {
            let extra = Expanded::extra_values(args);
            schedule::workspace_bytes(&sizes(limits.tokens), &args.dims(), EXPANDED_ROWS, extra)
        }
        MlaForm::Absorbed => {
            let tokens = limits.tokens.min(ABSORBED_TOKENS);
            args.absorbed_values(tokens, threads) * 4
                + schedule::workspace_bytes(&sizes(tokens), &args.dims(), ABSORBED_ROWS, 0)
        }
    }
}

/// Attends each query row over the positions of its sequence up to its own. Rows of no sequence become zero.
///
/// # Errors
/// If sizes disagree, an index tensor leads outside what it indexes, a dtype isn't a 32- or 16-bit float, or the workspace
/// is smaller than the least that [`mla_workspace_bytes`] gives.
#[expect(clippy::too_many_arguments, reason = "the operands of the op")]
pub fn mla_attention(
    isa: Isa,
    parallel: &dyn Parallel,
    args: &MlaArgs,
    q: Matrix<'_, f32>,
    kv_b: KvB<'_>,
    cache: CacheView<'_>,
    sequences: &Sequences<'_>,
    out: MatrixMut<'_, f32>,
    workspace: &mut [u8],
) -> Result<(), KernelError> {
    same(OP, "columns of q", q.cols, args.num_heads * args.query_dim())?;
    same(OP, "output columns", out.cols, args.num_heads * args.value_dim)?;
    same(OP, "output rows", out.rows, q.rows)?;
    if !matches!(kv_b.dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err(KernelError::Type { op: OP, what: "kv_b", found: kv_b.dtype });
    }
    let rows = args.num_heads * (args.nope_dim + args.value_dim);
    same(OP, "bytes of kv_b", kv_b.bytes.len(), rows * args.latent_dim * kv_b.dtype.block_bytes())?;
    if args.num_heads == 0 || args.latent_dim == 0 {
        return Err(KernelError::Shape { op: OP, what: "heads and latent elements", expected: 1, found: 0 });
    }
    let geometry = args.geometry();
    schedule::check(OP, sequences, q.rows, &cache, &geometry, args.window)?;
    let problem = Problem {
        op: OP,
        q,
        head_stride: args.query_dim(),
        out,
        sequences: *sequences,
        first_row: 0,
        cache,
        geometry,
        key_value_heads: args.num_heads,
        group: 1,
        dims: args.dims(),
        window: args.window,
    };
    match args.form {
        MlaForm::Expanded => schedule::run(isa, parallel, &problem, &Expanded { args, kv_b }, workspace),
        MlaForm::Absorbed => Absorbed { isa, parallel, args, kv_b, problem }.run(workspace),
    }
}
