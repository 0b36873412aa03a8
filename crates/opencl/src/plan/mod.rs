//! Ops: descriptions to recipes, recipes to plans, launches.
//!
//! | module | ops |
//! |---|---|
//! | [`rows`] | embed, gather rows, norm, rope, glu, binary, unary, cast, copy, softmax |
//! | [`products`] | gemm, grouped gemm |
//! | [`attention`] | kv append, attention, latent attention |
//! | [`experts`] | route, dispatch, combine |

mod attention;
mod desc;
pub(crate) mod entry;
mod experts;
mod products;
mod recipe;
mod rows;
pub(crate) mod types;
pub(crate) mod variants;

use qwen_hal_abi::ops as op;

use crate::failure::Failure;
use crate::unit::{Cut, Unit};
use desc::Desc;
use recipe::Recipe;

/// Understands a description, or says why not. Products are cut as `cut` says.
fn parse(desc: &Desc<'_>, unit: &Unit, cut: Cut) -> Result<Recipe, Failure> {
    if desc.version() > 1 {
        return Err(desc.refuse(format!("version {} of the op, expected 1", desc.version())));
    }
    if !matches!(desc.kind(), op::QHAL_OP_GEMM | op::QHAL_OP_GROUPED_GEMM) {
        desc.no_epilogues()?;
    } else if desc.accumulate() != op::QHAL_DTYPE_F32 {
        return Err(desc.refuse(format!("sums in type {}, expected f32", desc.accumulate())));
    }
    match desc.kind() {
        op::QHAL_OP_EMBED => rows::embed(desc, unit),
        op::QHAL_OP_GATHER_ROWS => rows::gather_rows(desc, unit),
        op::QHAL_OP_NORM => rows::norm(desc, unit),
        op::QHAL_OP_ROPE => rows::rope(desc, unit),
        op::QHAL_OP_GLU => rows::glu(desc, unit),
        op::QHAL_OP_BINARY => rows::binary(desc, unit),
        op::QHAL_OP_UNARY => rows::unary(desc, unit),
        op::QHAL_OP_CAST => rows::cast(desc, unit),
        op::QHAL_OP_COPY => rows::copy(desc, unit),
        op::QHAL_OP_SOFTMAX => rows::softmax(desc, unit),
        op::QHAL_OP_GEMM => products::gemm(desc, unit, cut),
        op::QHAL_OP_GROUPED_GEMM => products::grouped_gemm(desc, unit, cut),
        op::QHAL_OP_KV_APPEND => attention::kv_append(desc, unit),
        op::QHAL_OP_ATTENTION => attention::attention(desc, unit),
        op::QHAL_OP_MLA_ATTENTION => attention::mla_attention(desc, unit),
        op::QHAL_OP_ROUTE => experts::route(desc, unit),
        op::QHAL_OP_DISPATCH => experts::dispatch(desc, unit),
        op::QHAL_OP_COMBINE => experts::combine(desc, unit),
        other => Err(Failure::unsupported(format!("op kind {other} is unknown to the OpenCL backend"))),
    }
}
