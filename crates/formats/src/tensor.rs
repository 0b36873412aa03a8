//! Where a tensor lies, and a borrowed look at its bytes.

use crate::error::plain;
use crate::{DType, FormatError};
use std::path::Path;

/// Name, type, shape and place of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name as the file spells it.
    pub name: String,
    /// Storage type.
    pub dtype: DType,
    /// Row-major, outermost dimension first (GGUF stores the reverse). Empty for a scalar.
    pub shape: Vec<u64>,
    /// Index of the file that holds it.
    pub shard: usize,
    /// First byte, counted from the start of that file.
    pub offset: u64,
    /// Length in bytes: exactly what shape and type ask for.
    pub bytes: u64,
}

impl TensorInfo {
    /// Number of values, saturating (an opened checkpoint's shapes never overflow).
    pub fn elements(&self) -> u64 {
        self.shape.iter().fold(1, |product: u64, &dim| product.saturating_mul(dim))
    }

    /// One past the last byte in the file.
    pub(crate) fn end(&self) -> u64 {
        self.offset.saturating_add(self.bytes)
    }
}

/// A tensor's bytes inside a mapped file.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Storage type.
    pub dtype: DType,
    /// Row-major, outermost dimension first.
    pub shape: &'a [u64],
    /// The stored bytes, little-endian, not necessarily aligned for the type.
    pub data: &'a [u8],
}

impl TensorView<'_> {
    /// Number of values.
    pub fn elements(&self) -> usize {
        self.data.len() / self.dtype.block_bytes().max(1) * self.dtype.block_len()
    }
}

/// Refuses tensors that share bytes. Sorts `order` (indices into `tensors`) by place as a by-product.
pub(crate) fn refuse_overlap(path: &Path, tensors: &[TensorInfo]) -> Result<(), FormatError> {
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_unstable_by_key(|tensor| (tensor.offset, tensor.end()));
    for pair in order.windows(2) {
        if let [first, second] = pair
            && second.offset < first.end()
        {
            return Err(FormatError::Invalid {
                path: path.to_path_buf(),
                what: format!("tensor {}", plain(&second.name)),
                offset: second.offset,
                expected: format!("bytes after tensor {}, which ends at {}", plain(&first.name), first.end()),
                found: format!("bytes {}..{}", second.offset, second.end()),
            });
        }
    }
    Ok(())
}
