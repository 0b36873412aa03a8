//! Files with logits: safetensors with a tensor `logits`, [rows, vocabulary], float32.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use qwen_formats::{Checkpoint, DType};
use serde_json::json;

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
        self.write_to(path).map_err(CliError::file(path, "write"))
    }

    /// Writes in place: a new file in place of the old one would take the place of a device, too.
    fn write_to(&self, path: &Path) -> io::Result<()> {
        let (expected, found) = (self.rows.saturating_mul(self.vocab_size), self.values.len());
        if expected != found {
            return Err(io::Error::other(format!("expected {expected} values, found {found}")));
        }
        let shape = [self.rows, self.vocab_size];
        let tensor = json!({"dtype": "F32", "shape": shape, "data_offsets": [0, self.values.len() * size_of::<f32>()]});
        let mut header = json!({TENSOR: tensor}).to_string();
        // Data begin at a multiple of 8.
        header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
        let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        for value in &self.values {
            file.write_all(&value.to_le_bytes())?;
        }
        file.flush()
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

    #[cfg(unix)]
    #[test]
    fn a_device_is_written_to_and_not_replaced() {
        use std::os::unix::fs::FileTypeExt;
        let logits = Logits { rows: 1, vocab_size: 1, values: vec![1.0] };
        // A link, so that a mistake harms nothing.
        let directory = tempfile::tempdir().unwrap();
        let link = directory.path().join("full");
        std::os::unix::fs::symlink("/dev/full", &link).unwrap();
        assert!(logits.write(&link).unwrap_err().to_string().contains("cannot write"));
        assert!(std::fs::metadata(&link).unwrap().file_type().is_char_device());
    }

    #[test]
    fn values_that_do_not_fill_the_shape_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let logits = Logits { rows: 2, vocab_size: 3, values: vec![1.0] };
        assert!(logits.write(&directory.path().join("x")).is_err());
    }
}
