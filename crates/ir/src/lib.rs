//! Qwen-IR: a hardware-independent graph for LLM inference, its text form, verifier and passes.
//!
//! In: what [`qwen-models`](../qwen_models/index.html) builds from a checkpoint's config. Out: a [`program::Program`], the flat list of
//! instructions that the runtime executes on a device.
//!
//! - A [`Graph`] is an arena: [`ValueId`], [`NodeId`] are indices, values have one definition, nodes are listed in execution
//!   order in a [`Body`]. Layers are stored once, as a template body with a per-layer table of weights.
//! - Every value has a [`MemoryScope`], every op a [`Tolerance`]; what a pass decides (precision, tiling, phase) is an
//!   attribute that is empty until then.
//! - Shapes are affine in a few [`Symbol`]s with bounds: no sequence length, batch or chunk size rebuilds a graph.
//! - State (the KV cache) is named, and read and written through explicit operands only by `kv_append` and attention.
//!
//! - [`passes::compile`] runs the passes, [`verify()`] keeps the invariants after each, [`check::check`] proves the outcome in
//!   another way; [`text`] and [`parse`] are the two directions of the text form.
//!
//! The crate knows no device and no file format beyond the names of storage types.
#![forbid(unsafe_code)]

mod build;
pub mod check;
mod error;
mod graph;
mod lexer;
mod op;
pub mod parse;
pub mod passes;
pub mod program;
mod rewrite;
#[doc(hidden)]
pub mod test_support;
pub mod text;
mod types;
mod verify;

pub use build::{BodyBuilder, Linear};
pub use error::IrError;
pub use graph::*;
pub use op::*;
pub use qwen_formats::DType;
pub use rewrite::BodyId;
pub use types::*;
pub use verify::verify;
