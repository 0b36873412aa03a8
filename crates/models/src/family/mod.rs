//! Model families as data.
//!
//! In: the config of a checkpoint (`config.json` or GGUF metadata) and the names, types and shapes of its tensors. Out: a
//! [`ModelConfig`] in neutral terms, and from it a [`qwen_ir::Graph`] whose weights are bound to tensors.
//!
//! - An architecture is one entry of [`FAMILIES`]: names of keys and tensors, and which features of the common decoder it
//!   uses. There is no code per model.
//! - Whatever the text of a config is, reading returns a [`ModelConfig`] or a [`ModelError`]; sizes are bounded before
//!   anything is allocated for them, and a graph is built only if every tensor has its place, shape and type.
//! - What is not implemented is refused by name, with what was found and what is supported.
//!
//! ```no_run
//! use qwen_models::family::{TensorIndex, build_graph, read_config};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let checkpoint = qwen_formats::Checkpoint::open(std::path::Path::new("model.gguf"))?;
//! let config = read_config(&checkpoint)?;
//! let graph = build_graph(&config, &TensorIndex::from(&checkpoint))?;
//! # Ok(())
//! # }
//! ```

mod build;
mod config;
mod error;
mod fields;
mod info;
mod keys;
mod read;
mod read_rope;
mod rope;
mod table;
mod tensors;
mod weights;

pub use build::{CACHE_BLOCK_TOKENS, build_graph};
pub use config::{AttentionBias, BlockScale, Dialect, FeedForward, LayerKind, MlaConfig, ModelConfig, MoeConfig};
pub use error::ModelError;
pub use info::ModelInfo;
pub use read::{add_generation_config, from_gguf, from_hf, read_config};
pub use rope::{RopeConfig, RopeScaling};
pub use table::{
    AttentionForm, BiasRule, ExpertLayers, ExpertRule, FAMILIES, Family, Gating, SharedExpert, WeightName, WindowRule,
};
pub use tensors::{TensorIndex, TensorSpec};
