//! Safetensors headers: bytes of a whole file in, tensor places out. Tensor data is never touched.
//!
//! For every file that parses: the header is at most 100 MB and inside the file, names are unique, types are known, each
//! tensor has exactly the bytes of its shape, and the tensors cover the data section without gap or overlap. Zero-sized
//! tensors are allowed, as in the format.

mod header;
mod index;

use std::path::Path;

pub(crate) use index::open_shards;
pub use index::{SafetensorsIndex, parse_safetensors_index};

use crate::error::quote;
use crate::reader::Reader;
use crate::tensor::refuse_overlap;
use crate::{DType, FormatError, TensorInfo};
use header::{Entry, Header};

/// Longest JSON that is read at all.
const MAX_JSON: u64 = 100_000_000;
/// Far above any real file: bounds the bookkeeping for a hostile header of minimal entries.
const MAX_TENSORS: usize = 1 << 18;
/// As many dimensions as anybody uses, and more.
const MAX_DIMENSIONS: usize = 16;

/// The header of one safetensors file.
#[derive(Debug)]
#[non_exhaustive]
pub struct SafetensorsHeader {
    /// Free-form `__metadata__`, sorted by key.
    pub metadata: Vec<(String, String)>,
    /// Tensors sorted by name.
    pub tensors: Vec<TensorInfo>,
}

/// Parses the header of a safetensors file given as bytes (all of them: places are checked against their length).
pub fn parse_safetensors_bytes(bytes: &[u8]) -> Result<SafetensorsHeader, FormatError> {
    parse(Path::new("bytes.safetensors"), bytes, 0)
}

/// As [`parse_safetensors_bytes`], for shard number `shard` with a name for messages.
pub(crate) fn parse(path: &Path, bytes: &[u8], shard: usize) -> Result<SafetensorsHeader, FormatError> {
    let mut reader = Reader::new(path, bytes);
    let length = reader.u64(&"header length")?;
    if length > MAX_JSON {
        return Err(invalid(path, "header length", 0, format!("at most {MAX_JSON} bytes"), length.to_string()));
    }
    let json = reader.take(length, &"header")?;
    let Header { metadata, entries } = parse_json(path, json, reader.position() - length, "header")?;
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, entry) in entries {
        tensors.push(place(&reader, name, entry, shard)?);
    }
    refuse_overlap(path, &tensors)?;
    check_cover(&reader, &tensors)?;
    Ok(SafetensorsHeader { metadata, tensors })
}

/// JSON into `T`, with an error that points into the file.
fn parse_json<'a, T: serde::Deserialize<'a>>(
    path: &Path,
    json: &'a [u8],
    start: u64,
    what: &str,
) -> Result<T, FormatError> {
    serde_json::from_slice(json).map_err(|error| {
        // The message can quote the file: keep it short. Columns count bytes from 1.
        let offset = start.saturating_add(offset_of(json, error.line(), error.column()));
        let found = quote(error.to_string().as_bytes());
        invalid(path, what, offset, "JSON that describes tensors", found)
    })
}

fn offset_of(json: &[u8], line: usize, column: usize) -> u64 {
    let line_start: usize =
        json.split_inclusive(|&byte| byte == b'\n').take(line.saturating_sub(1)).map(<[u8]>::len).sum();
    (line_start + column.saturating_sub(1)) as u64
}

fn invalid(
    path: &Path,
    what: impl Into<String>,
    offset: u64,
    expected: impl Into<String>,
    found: impl Into<String>,
) -> FormatError {
    FormatError::Invalid {
        path: path.to_path_buf(),
        what: what.into(),
        offset,
        expected: expected.into(),
        found: found.into(),
    }
}

/// Checks one entry and turns its place within the data section into one within the file.
fn place(reader: &Reader<'_>, name: String, entry: Entry, shard: usize) -> Result<TensorInfo, FormatError> {
    let path = reader.path();
    let data_start = reader.position();
    let label = || format!("tensor {}", quote(name.as_bytes()));
    let dtype = parse_dtype(&entry.dtype).ok_or_else(|| FormatError::Unsupported {
        path: path.to_path_buf(),
        what: label(),
        found: format!("type {}", quote(entry.dtype.as_bytes())),
        help: "convert the tensor to F32, F16, BF16 or F8_E4M3",
    })?;
    let (start, end) = entry.data_offsets;
    let wanted = entry
        .shape
        .iter()
        .try_fold(1u64, |product, &dim| product.checked_mul(dim))
        .and_then(|elements| dtype.bytes_for(elements))
        .ok_or_else(|| {
            invalid(path, label(), data_start, "a shape whose size fits in 64 bits", format!("{:?}", entry.shape))
        })?;
    if end.checked_sub(start) != Some(wanted) {
        let expected = format!("{wanted} bytes for shape {:?} of {dtype}", entry.shape);
        return Err(invalid(path, label(), data_start, expected, format!("data_offsets [{start}, {end}]")));
    }
    if end > reader.remaining() {
        return Err(FormatError::Truncated {
            path: path.to_path_buf(),
            what: label(),
            start: data_start.saturating_add(start),
            end: data_start.saturating_add(end),
            length: reader.len(),
        });
    }
    Ok(TensorInfo { name, dtype, shape: entry.shape, shard, offset: data_start + start, bytes: wanted })
}

fn parse_dtype(name: &str) -> Option<DType> {
    Some(match name {
        "F64" => DType::F64,
        "F32" => DType::F32,
        "F16" => DType::F16,
        "BF16" => DType::BF16,
        "F8_E4M3" => DType::F8E4M3,
        "F8_E5M2" => DType::F8E5M2,
        "I64" => DType::I64,
        "I32" => DType::I32,
        "I16" => DType::I16,
        "I8" => DType::I8,
        "U8" => DType::U8,
        "BOOL" => DType::BOOL,
        _ => return None,
    })
}

/// Tensors inside the data section that do not overlap cover it exactly when their sizes add up to it.
fn check_cover(reader: &Reader<'_>, tensors: &[TensorInfo]) -> Result<(), FormatError> {
    let covered: u64 = tensors.iter().map(|tensor| tensor.bytes).fold(0, u64::saturating_add);
    if covered == reader.remaining() {
        return Ok(());
    }
    let expected = format!("tensors that cover all {} bytes of data", reader.remaining());
    Err(invalid(reader.path(), "header", reader.position(), expected, format!("tensors of {covered} bytes")))
}

#[cfg(test)]
mod tests;
