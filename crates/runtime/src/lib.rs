//! Memory pools, plan cache and executor: runs a lowered graph on a device.
//!
//! In: a graph, its checkpoint, a device. Out: logits of a [`Batch`]. Three main types: [`Model`] (everything of one model on
//! one device), [`Batch`] (what one step computes), [`SequenceKv`] (the cache of one sequence). Invariants:
//! - memory by scope: weights are mapped or packed once ([`weights`]), the cache grows by blocks ([`kv_pool`],
//!   [`kv_memory`]), temporaries live in arenas planned at load ([`arenas`]);
//! - nothing is rebuilt for a shape: a step picks the smallest bucket that holds it ([`Model::forward`]);
//! - a step's result does not depend on the bucket, on how a prompt was cut, or on the other sequences.
//!
//! The crate knows no chip and no request. It does not sample.
#![forbid(unsafe_code)]

pub mod arenas;
mod batch;
mod cost;
pub mod describe;
mod device_model;
mod error;
mod executor;
mod group;
pub mod kv_memory;
pub mod kv_pool;
mod model;
mod placement;
mod stages;
pub mod weights;

pub use batch::{Batch, LogitRows, SequenceKv};
pub use cost::{Cost, StepObserver};
pub use device_model::HalDeviceModel;
pub use error::{Bytes, RuntimeError};
pub use executor::Executor;
pub use model::{Compiled, Explained, MemoryReport, Model, ModelOptions, OpDifference, PlannedOp, PlannedStep};
pub use placement::{Fallback, MAX_CROSSINGS, MICRO_BATCH_TOKENS, Placement};
pub use qwen_ir::passes::{KvDType, PassName, Policy};
pub use qwen_ir::program::StepResult;
pub use stages::Stage;
