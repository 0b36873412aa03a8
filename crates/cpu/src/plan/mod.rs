//! Plans: a description becomes a typed op once; a launch binds operands and calls the kernel.
//!
//! In: descriptions, then launches. Out: what the table answers. Invariants:
//! - one function, [`Op::parse`], decides what is supported; `op_supports` and `plan_create` both ask it, so they agree;
//! - a launch allocates nothing, checks the bounds of each operand, and reads sizes only from symbols within their ranges;
//! - all kernels run on the host's pool.
//!
//! | file | ops |
//! |---|---|
//! | `dense` | embed, gather rows, norm, rope, glu, binary, unary, cast, copy, softmax |
//! | `gemm` | gemm, grouped gemm |
//! | `attention` | kv append, attention, latent attention |
//! | `moe` | route, dispatch, combine |

mod attention;
mod dense;
mod desc;
pub(crate) mod entry;
mod gemm;
mod launch;
mod moe;
mod variants;

use std::sync::OnceLock;

use qwen_hal_abi::ops as op;
use qwen_hal_abi::{QHAL_MAX_PACKED, QHAL_PLAN_BATCH_INVARIANT, QHAL_PLAN_CAPTURE_SAFE, QHAL_PLAN_DETERMINISTIC};

use crate::api::Failure;
use crate::kernels::error::KernelError;
use crate::kernels::gemm::Way;
use crate::parallel::Parallel;
use desc::Desc;
use launch::Launch;

/// What a plan needs and promises, as far as it depends on the op.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    /// Bit n: output 0 may be input n.
    in_place: u64,
    workspace_bytes: usize,
    /// (bytes, layout) per input.
    packed: [(usize, u32); QHAL_MAX_PACKED],
    flops: f64,
    bytes_read: f64,
    bytes_written: f64,
    /// Kernel without the instruction set.
    kernel: String,
}

impl Facts {
    fn new(kernel: impl Into<String>) -> Self {
        Self {
            in_place: 0,
            workspace_bytes: 0,
            packed: [(0, 0); QHAL_MAX_PACKED],
            flops: 0.0,
            bytes_read: 0.0,
            bytes_written: 0.0,
            kernel: kernel.into(),
        }
    }
    /// Output 0 may be input `i`.
    const fn in_place(mut self, i: usize) -> Self {
        self.in_place |= 1 << i;
        self
    }
    const fn traffic(mut self, flops: f64, bytes_read: f64, bytes_written: f64) -> Self {
        (self.flops, self.bytes_read, self.bytes_written) = (flops, bytes_read, bytes_written);
        self
    }
}

/// Flags of every plan: rows are independent, and orders of summation are fixed by shapes.
pub(crate) const FLAGS: u32 = QHAL_PLAN_DETERMINISTIC | QHAL_PLAN_BATCH_INVARIANT | QHAL_PLAN_CAPTURE_SAFE;

/// A planned op.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    Embed(dense::Embed),
    GatherRows(dense::GatherRows),
    Norm(dense::Norm),
    Rope(dense::Rope),
    Glu(dense::Glu),
    Binary(dense::Binary),
    Unary(dense::Unary),
    Cast(dense::Cast),
    Copy(dense::Copy),
    Softmax(dense::Softmax),
    Gemm(gemm::Gemm),
    KvAppend(attention::KvAppend),
    Attention(attention::Attention),
    MlaAttention(attention::MlaAttention),
    Route(moe::Route),
    Dispatch(moe::Dispatch),
    Combine(moe::Combine),
}

impl Op {
    /// Understands a description, or says why not.
    fn parse(desc: &Desc<'_>, threads: usize, way: Way) -> Result<Self, Failure> {
        if desc.version() > 1 {
            return Err(desc.refuse(format!("version {} of the op, expected 1", desc.version())));
        }
        if !matches!(desc.kind(), op::QHAL_OP_GEMM | op::QHAL_OP_GROUPED_GEMM) {
            desc.no_epilogues()?;
        } else if desc.accumulate() != op::QHAL_DTYPE_F32 {
            return Err(desc.refuse(format!("sums in type {}, expected f32", desc.accumulate())));
        }
        Ok(match desc.kind() {
            op::QHAL_OP_EMBED => Self::Embed(dense::Embed::parse(desc)?),
            op::QHAL_OP_GATHER_ROWS => Self::GatherRows(dense::GatherRows::parse(desc)?),
            op::QHAL_OP_NORM => Self::Norm(dense::Norm::parse(desc)?),
            op::QHAL_OP_ROPE => Self::Rope(dense::Rope::parse(desc)?),
            op::QHAL_OP_GLU => Self::Glu(dense::Glu::parse(desc)?),
            op::QHAL_OP_BINARY => Self::Binary(dense::Binary::parse(desc)?),
            op::QHAL_OP_UNARY => Self::Unary(dense::Unary::parse(desc)?),
            op::QHAL_OP_CAST => Self::Cast(dense::Cast::parse(desc)?),
            op::QHAL_OP_COPY => Self::Copy(dense::Copy::parse(desc)?),
            op::QHAL_OP_SOFTMAX => Self::Softmax(dense::Softmax::parse(desc)?),
            op::QHAL_OP_GEMM => Self::Gemm(gemm::Gemm::parse(desc, false, threads, way)?),
            op::QHAL_OP_GROUPED_GEMM => Self::Gemm(gemm::Gemm::parse(desc, true, threads, way)?),
            op::QHAL_OP_KV_APPEND => Self::KvAppend(attention::KvAppend::parse(desc)?),
            op::QHAL_OP_ATTENTION => Self::Attention(attention::Attention::parse(desc, threads)?),
            op::QHAL_OP_MLA_ATTENTION => Self::MlaAttention(attention::MlaAttention::parse(desc, threads)?),
            op::QHAL_OP_ROUTE => Self::Route(moe::Route::parse(desc)?),
            op::QHAL_OP_DISPATCH => Self::Dispatch(moe::Dispatch::parse(desc)?),
            op::QHAL_OP_COMBINE => Self::Combine(moe::Combine::parse(desc)?),
            other => return Err(Failure::unsupported(format!("op kind {other} is unknown to the CPU"))),
        })
    }

    /// Bytes of an input before and after packing.
    fn packing(&self, input: usize) -> Result<(usize, usize), Failure> {
        match self {
            Self::Gemm(op) => op.packing(input),
            Self::Embed(op) => op.packing(input),
            _ => Err(Failure::invalid("this op packs nothing").at(input)),
        }
    }

    /// Packs an input.
    fn pack(&self, input: usize, parallel: &dyn Parallel, source: &[u8], target: &mut [u8]) -> Result<(), Failure> {
        match self {
            Self::Gemm(op) => op.pack(input, parallel, source, target),
            Self::Embed(op) => op.pack(parallel, source, target),
            _ => Ok(()),
        }
    }

    fn facts(&self) -> Facts {
        match self {
            Self::Embed(op) => op.facts(),
            Self::GatherRows(op) => op.facts(),
            Self::Norm(op) => op.facts(),
            Self::Rope(op) => op.facts(),
            Self::Glu(op) => op.facts(),
            Self::Binary(op) => op.facts(),
            Self::Unary(op) => op.facts(),
            Self::Cast(op) => op.facts(),
            Self::Copy(op) => op.facts(),
            Self::Softmax(op) => op.facts(),
            Self::Gemm(op) => op.facts(),
            Self::KvAppend(op) => op.facts(),
            Self::Attention(op) => op.facts(),
            Self::MlaAttention(op) => op.facts(),
            Self::Route(op) => op.facts(),
            Self::Dispatch(op) => op.facts(),
            Self::Combine(op) => op.facts(),
        }
    }

    fn launch(&self, launch: &Launch<'_>) -> Result<(), Failure> {
        match self {
            Self::Embed(op) => op.launch(launch),
            Self::GatherRows(op) => op.launch(launch),
            Self::Norm(op) => op.launch(launch),
            Self::Rope(op) => op.launch(launch),
            Self::Glu(op) => op.launch(launch),
            Self::Binary(op) => op.launch(launch),
            Self::Unary(op) => op.launch(launch),
            Self::Cast(op) => op.launch(launch),
            Self::Copy(op) => op.launch(launch),
            Self::Softmax(op) => op.launch(launch),
            Self::Gemm(op) => op.launch(launch),
            Self::KvAppend(op) => op.launch(launch),
            Self::Attention(op) => op.launch(launch),
            Self::MlaAttention(op) => op.launch(launch),
            Self::Route(op) => op.launch(launch),
            Self::Dispatch(op) => op.launch(launch),
            Self::Combine(op) => op.launch(launch),
        }
    }
}

/// What a `qhal_plan` is.
#[derive(Debug)]
pub(crate) struct Plan {
    op: Op,
    way: Way,
    /// What it takes and what it could take.
    variants: OnceLock<Vec<variants::Variant>>,
}

/// A kernel's refusal as the table reports it. What the data says wrongly fails the stream; what the caller says wrongly does not.
impl From<KernelError> for Failure {
    fn from(error: KernelError) -> Self {
        match &error {
            KernelError::Index { .. } => Self::out_of_range(error.to_string()).sticky(),
            KernelError::Shape { .. } | KernelError::Workspace { .. } => Self::invalid(error.to_string()),
            KernelError::Type { .. } => Self::unsupported(error.to_string()),
        }
    }
}
