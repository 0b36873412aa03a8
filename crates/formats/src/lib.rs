//! Model file formats: GGUF and safetensors containers, quantised block formats. Hostile bytes in, typed views out.
//!
//! - [`Checkpoint`] opens a GGUF file (single or split), a safetensors file or a sharded safetensors directory, maps
//!   it read-only and lists its tensors as [`TensorInfo`]; [`TensorView`] borrows a tensor's bytes without a copy.
//! - [`DType`] names every storage type and knows how many bytes a block of it takes.
//! - [`blocks`] turns the bytes of any [`DType`] into float32, or into integer codes with a scale per group.
//!
//! Invariants: whatever the bytes are, opening returns a [`Checkpoint`] or a [`FormatError`], never a panic, and
//! allocates no more than a small multiple of the bytes that the headers really occupy. Every [`TensorInfo`] of an
//! opened checkpoint lies inside its file and has exactly the bytes that its shape and type ask for. The crate does not
//! interpret tensor names or model configurations.
//!
//! ```no_run
//! use std::path::Path;
//! use qwen_formats::{Checkpoint, blocks};
//!
//! # fn main() -> Result<(), qwen_formats::FormatError> {
//! let checkpoint = Checkpoint::open(Path::new("model.gguf"))?;
//! if let Some(view) = checkpoint.tensor("output_norm.weight") {
//!     let mut values = vec![0.0; view.elements()];
//!     blocks::dequantize(view.dtype, view.data, &mut values)?;
//! }
//! # Ok(())
//! # }
//! ```

pub mod blocks;
mod checkpoint;
mod dtype;
mod error;
pub mod gguf;
mod mapping;
mod reader;
pub mod safetensors;
mod tensor;
#[doc(hidden)]
pub mod test_support;

pub use checkpoint::{Checkpoint, Container};
pub use dtype::DType;
pub use error::FormatError;
pub use gguf::GgufMetadata;
pub use mapping::Mapping;
pub use tensor::{TensorInfo, TensorView};
