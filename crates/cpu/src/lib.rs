//! The CPU backend: kernels behind the same C ABI that every plugin speaks.
//!
//! In: a host table (threads, log) and op descriptions. Out: a [`qwen_hal_abi::qhal_plugin_api`]. Invariants:
//! - a result's bits depend on its row's inputs and the kernel variant only, never on batch, chunking or thread count;
//! - vector code is chosen at run time ([`isa::Isa`]), each variant has a scalar twin and an oracle test;
//! - a launch allocates nothing.

mod api;
pub mod isa;
pub mod kernels;
pub mod matrix;
pub mod parallel;
mod plan;
pub mod probe;

pub use api::{PLUGIN, manifest, query};
