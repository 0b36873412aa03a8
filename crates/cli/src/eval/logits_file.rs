//! Files with logits: safetensors with a tensor `logits`, [rows, vocabulary], float32.

use std::collections::HashMap;
use std::path::Path;

use qwen_formats::{Checkpoint, DType};
use safetensors::tensor::{Dtype, TensorView};

use crate::error::CliError;

/// Name of the tensor.
pub const TENSOR: &str = "logits";

/// Logits read from a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Logits {
    /// Tokens.
    pub rows: usize,
    /// Logits of a token.
    pub vocab_size: usize,
    /// Row by row.
    pub values: Vec<f32>,
}

impl Logits {
    /// Reads a file.
    ///
    /// # Errors
    /// If it is no safetensors file, or its tensor has not the right form.
    pub fn read(path: &Path) -> Result<Self, CliError> {
        let wrong = |expected: &str, found: String| {
            let what = format!("{}: tensor {TENSOR}", path.display());
            CliError::input(what, expected, found, "write the file with `qwen-eval logits`")
        };
        let checkpoint = Checkpoint::open(path)?;
        let view = checkpoint.tensor(TENSOR).ok_or_else(|| {
            let names: Vec<&str> = checkpoint.tensors().map(|tensor| tensor.name.as_str()).take(5).collect();
            wrong("a tensor of that name", if names.is_empty() { "none".into() } else { names.join(", ") })
        })?;
        if view.dtype != DType::F32 {
            return Err(wrong("type f32", format!("type {}", view.dtype)));
        }
        let &[rows, vocab_size] = view.shape else {
            return Err(wrong("2 dimensions, [tokens, vocabulary]", format!("shape {:?}", view.shape)));
        };
        let (chunks, _) = view.data.as_chunks::<4>();
        let values = chunks.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        Ok(Self { rows: rows as usize, vocab_size: vocab_size as usize, values })
    }

    /// Writes a file.
    ///
    /// # Errors
    /// If it can't be written, or `values` are not `rows` times `vocab_size`.
    pub fn write(&self, path: &Path) -> Result<(), CliError> {
        let refused = |error: safetensors::SafeTensorError| {
            CliError::file(path, "write")(match error {
                safetensors::SafeTensorError::IoError(error) => error,
                other => std::io::Error::other(other),
            })
        };
        let bytes: Vec<u8> = self.values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let view = TensorView::new(Dtype::F32, vec![self.rows, self.vocab_size], &bytes).map_err(refused)?;
        safetensors::serialize_to_file([(TENSOR, view)], None::<HashMap<String, String>>, path).map_err(refused)
    }

    /// The rows.
    pub fn iter(&self) -> impl Iterator<Item = &[f32]> {
        self.values.chunks_exact(self.vocab_size.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("logits.safetensors");
        let logits = Logits { rows: 2, vocab_size: 3, values: vec![1.0, -2.5, f32::MIN_POSITIVE, 0.0, -0.0, 3.0e38] };
        logits.write(&path).unwrap();
        assert_eq!(Logits::read(&path).unwrap(), logits);
        assert_eq!(logits.iter().count(), 2);
    }

    #[test]
    fn values_that_do_not_fill_the_shape_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let logits = Logits { rows: 2, vocab_size: 3, values: vec![1.0] };
        assert!(logits.write(&directory.path().join("x")).is_err());
    }
}
