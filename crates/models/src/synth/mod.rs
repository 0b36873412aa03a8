//! Checkpoints of real shapes with weights by chance, for measuring models that are not here.
//!
//! In: a [`Shape`] of the table, a [`Mix`] of storage types, a seed. Out: a GGUF file with the tensors, types and keys of a converted
//! checkpoint, readable by whatever reads those. The same arguments give the same bytes. Weights have the spread that keeps
//! activations near 1, so logits are finite; what the model says means nothing. The tokenizer is a byte-level BPE of the
//! model's vocabulary size.

mod blocks;
mod mixes;
mod shapes;
mod vocabulary;
mod write;

pub use mixes::{MIXES, Mix};
pub use shapes::{Experts, Latent, RopeScaling, SHAPES, Shape};
pub use write::{SynthError, write};
