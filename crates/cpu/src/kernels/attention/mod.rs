//! Causal attention over the paged cache.
//!
//! Shape: q [T, heads * head_dim] of S sequences, cache blocks [kv heads, block_size, head_dim] keys then values in F32, F16 or
//! BF16, out [T, heads * value_dim]. Flash attention in f32: [`flash`] has the order of operations that makes a row's bits
//! independent of everything but its own query and cached positions, [`micro`] the register tile, [`paged`] the cache's
//! layout, [`schedule`] the sharing out over threads. [`paired`] is the same over caches that hold pairs of bfloat16, with
//! products of pairs ([`pairs`]) or of f32. Bound: in decode the bytes of cached keys and values (each is read
//! once for all query heads of its group), in prefill 2 T context heads (head_dim + value_dim) multiply-adds.

pub(crate) mod flash;
pub(crate) mod micro;
pub(crate) mod paged;
mod paired;
mod pairs;
pub(crate) mod schedule;

#[cfg(test)]
pub(crate) mod oracle;
#[cfg(test)]
mod tests;

use super::cache::{CacheView, in_pairs};
use super::error::{KernelError, same};
use super::simd::LANES;
use super::simd::Simd;
use super::simd::storage::with_storage;
use crate::isa::Isa;
use crate::matrix::{Matrix, MatrixMut};
use crate::parallel::Parallel;
use qwen_formats::DType;

use flash::{AttendSplit, Dims, Scratch};
use paged::{Geometry, InPlace, Paged, Staged};
use paired::{AttendPairs, PairedCache, Widened};
use pairs::HasPairs;
use schedule::{Problem, Sizes, Source, Task};

pub use schedule::Sequences;

const OP: &str = "attention";
/// Most query rows of a task: their state and scores stay in the second-level cache.
const MAX_ROWS: usize = 96;
/// Up to so many rows values are converted where they are used.
const IN_PLACE_ROWS: usize = 12;
/// Positions of a tile and of a split, as reports name them.
pub(crate) const TILING: (usize, usize) = (flash::TILE, flash::SPLIT);

/// How products are formed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Products {
    /// Of f32.
    F32,
    /// Of pairs of bfloat16: queries, times the scale, and softmax weights are rounded. For caches in pairs.
    Bf16,
}

/// Attributes of attention.
#[derive(Debug, Clone, Copy)]
pub struct AttentionArgs {
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads, a divisor of the query heads.
    pub num_key_value_heads: usize,
    /// Elements of a query or key head.
    pub head_dim: usize,
    /// Elements of a value head.
    pub value_dim: usize,
    /// Tokens of a cache block.
    pub block_size: usize,
    /// Factor on scores.
    pub scale: f32,
    /// Positions that a query sees, 0 for all.
    pub window: usize,
    /// How products are formed.
    pub products: Products,
}

/// Largest sizes of a step, for its workspace.
#[derive(Debug, Clone, Copy)]
pub struct StepLimits {
    /// Threads of the pool.
    pub threads: usize,
    /// Sequences.
    pub sequences: usize,
    /// Query tokens.
    pub tokens: usize,
    /// Cached tokens of a sequence.
    pub max_context: usize,
}

impl AttentionArgs {
    /// Query tokens of a sequence up to which values are converted where they are used.
    pub(crate) const fn in_place_tokens(&self) -> usize {
        if !self.value_dim.is_multiple_of(LANES) || self.num_key_value_heads == 0 {
            return 0;
        }
        IN_PLACE_ROWS / (self.num_heads / self.num_key_value_heads)
    }
    /// Whether a cache of a type can be multiplied in pairs.
    pub(crate) const fn has_pairs(&self, cache: DType) -> bool {
        in_pairs(cache, self.block_size, self.head_dim, self.value_dim)
    }
    /// Values of scratch beside that of all.
    fn extra(&self) -> usize {
        if self.products == Products::Bf16 { MAX_ROWS * paired::query_len(self.head_dim) } else { 0 }
    }
    const fn dims(&self) -> Dims {
        Dims { key_dim: self.head_dim, value_dim: self.value_dim, scale: self.scale }
    }
}

/// Bytes of workspace that [`attention`] makes good use of in steps within the limits.
#[must_use]
pub fn attention_workspace_bytes(args: &AttentionArgs, limits: &StepLimits) -> usize {
    let sizes = Sizes {
        threads: limits.threads.max(1),
        sequences: limits.sequences,
        tokens: limits.tokens,
        max_context: limits.max_context,
        heads: args.num_heads,
    };
    schedule::workspace_bytes(&sizes, &args.dims(), MAX_ROWS, args.extra())
}

/// Attends each query row over the positions of its sequence up to its own. Rows of no sequence become zero.
///
/// # Errors
/// If sizes disagree, an index tensor leads outside what it indexes, or the workspace is smaller than the least that
/// [`attention_workspace_bytes`] gives.
#[expect(clippy::too_many_arguments, reason = "the operands of the op")]
pub fn attention(
    isa: Isa,
    parallel: &dyn Parallel,
    args: &AttentionArgs,
    q: Matrix<'_, f32>,
    cache: CacheView<'_>,
    sequences: &Sequences<'_>,
    out: MatrixMut<'_, f32>,
    workspace: &mut [u8],
) -> Result<(), KernelError> {
    let heads = args.num_key_value_heads;
    if heads == 0 || args.num_heads == 0 || !args.num_heads.is_multiple_of(heads) {
        let (expected, found) = (args.num_heads, heads);
        return Err(KernelError::Shape { op: OP, what: "key/value heads", expected, found });
    }
    same(OP, "columns of q", q.cols, args.num_heads * args.head_dim)?;
    same(OP, "output columns", out.cols, args.num_heads * args.value_dim)?;
    same(OP, "output rows", out.rows, q.rows)?;
    let geometry = Geometry::separate(heads, args.block_size, args.head_dim, args.value_dim);
    schedule::check(OP, sequences, q.rows, &cache, &geometry, args.window)?;
    let problem = Problem {
        op: OP,
        q,
        head_stride: args.head_dim,
        out,
        sequences: *sequences,
        first_row: 0,
        cache,
        geometry,
        key_value_heads: heads,
        group: args.num_heads / heads,
        dims: args.dims(),
        window: args.window,
    };
    let pairs = args.has_pairs(cache.dtype);
    match args.products {
        Products::Bf16 if !pairs => {
            Err(KernelError::Type { op: OP, what: "cache for products of pairs", found: cache.dtype })
        }
        Products::Bf16 => {
            let source = Paired { has: HasPairs::with(isa), extra: args.extra() };
            schedule::run(isa, parallel, &problem, &source, workspace)
        }
        Products::F32 if pairs => schedule::run(isa, parallel, &problem, &PairedF32, workspace),
        Products::F32 => schedule::run(isa, parallel, &problem, &Cached { max_rows: MAX_ROWS }, workspace),
    }
}

impl<'a> PairedCache<'a> {
    #[inline(always)]
    fn of(p: &'a Problem<'a>, task: &Task<'a>) -> Self {
        Self { cache: &p.cache, blocks: task.blocks, geometry: &p.geometry, first_head: task.key_value_head }
    }
}

/// A cache in pairs and products of pairs.
struct Paired {
    has: HasPairs,
    extra: usize,
}

impl Source for Paired {
    fn max_rows(&self) -> usize {
        MAX_ROWS
    }

    fn extra(&self) -> usize {
        self.extra
    }

    #[inline(always)]
    unsafe fn attend<S: Simd>(
        &self,
        s: S,
        p: &Problem<'_>,
        task: &Task<'_>,
        split: usize,
        until: usize,
        scratch: &Scratch,
    ) {
        // SAFETY: the caller's promise; extra scratch is as large as asked.
        let kernel =
            unsafe { AttendPairs::new(&task.queries, PairedCache::of(p, task), &p.dims, split, until, scratch) };
        pairs::enter(s, self.has, kernel);
    }
}

/// A cache in pairs and products of f32.
struct PairedF32;

impl Source for PairedF32 {
    fn max_rows(&self) -> usize {
        MAX_ROWS
    }

    fn extra(&self) -> usize {
        0
    }

    #[inline(always)]
    unsafe fn attend<S: Simd>(
        &self,
        s: S,
        p: &Problem<'_>,
        task: &Task<'_>,
        split: usize,
        until: usize,
        scratch: &Scratch,
    ) {
        let source = Widened(PairedCache::of(p, task));
        // SAFETY: the caller's promise.
        s.enter(unsafe { AttendSplit::new(&task.queries, source, &p.dims, split, until, scratch) });
    }
}

/// Keys and values as they are cached.
pub(crate) struct Cached {
    pub(crate) max_rows: usize,
}

impl Source for Cached {
    fn max_rows(&self) -> usize {
        self.max_rows
    }

    fn extra(&self) -> usize {
        0
    }

    #[inline(always)]
    unsafe fn attend<S: Simd>(
        &self,
        s: S,
        p: &Problem<'_>,
        task: &Task<'_>,
        split: usize,
        until: usize,
        scratch: &Scratch,
    ) {
        let queries = &task.queries;
        let in_place = queries.head_rows() <= IN_PLACE_ROWS && p.dims.value_dim.is_multiple_of(LANES);
        with_storage!(p.cache.dtype, T => {
            let paged = Paged::<T>::new(&p.cache, task.blocks, &p.geometry, task.key_value_head);
            // SAFETY: the caller's promise.
            unsafe {
                if in_place {
                    s.enter(AttendSplit::new(queries, InPlace(paged), &p.dims, split, until, scratch));
                } else {
                    s.enter(AttendSplit::new(queries, Staged(paged), &p.dims, split, until, scratch));
                }
            }
        }, ());
    }
}
