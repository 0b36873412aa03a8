//! GGUF headers: bytes of a whole file in, metadata and tensor places out. Tensor data is never touched.
//!
//! Little-endian versions 2 and 3. Limits that hold for every file that parses: keys and tensor names are unique and
//! UTF-8, at most 4 dimensions, none zero, rows are whole blocks, tensors start at multiples of a power-of-two alignment, lie
//! inside the file and do not overlap. A file without tensors (a vocabulary) is valid.

mod metadata;
mod packed;
mod split;
mod value;
mod writer;

use std::path::Path;

pub use metadata::{FromValue, GgufMetadata};
pub use packed::{AbsentTensor, PACKED_ALIGNMENT, Packed, PackedWeight, packed_tensor_name, take_packed};
pub(crate) use split::open_shards;
pub use value::{Array, StringArray, Value};
pub use writer::{GgufWriter, TensorPlan};

use crate::error::{plain, quote};
use crate::reader::Reader;
use crate::tensor::refuse_overlap;
use crate::{DType, FormatError, TensorInfo};

pub(crate) const MAGIC: [u8; 4] = *b"GGUF";
/// Where tensors start.
pub const ALIGNMENT_KEY: &str = "general.alignment";
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_DIMENSIONS: u32 = 4;
/// Longest tensor name the format allows, in bytes.
const MAX_NAME: usize = 64;
/// Length (8), one byte of text, value type (4), one byte of value.
const MIN_KEY_VALUE_BYTES: u64 = 14;
/// Length (8), one byte of text, dimension count (4), type (4), offset (8).
const MIN_TENSOR_BYTES: u64 = 25;
/// Far above any real model: bounds the bookkeeping for a hostile file of minimal entries to about 10 MB.
const MAX_TENSORS: u64 = 1 << 16;
const MAX_KEYS: u64 = 1 << 13;

/// The header of one GGUF file.
#[derive(Debug)]
#[non_exhaustive]
pub struct GgufHeader {
    /// Format version, 2 or 3.
    pub version: u32,
    /// All key-value pairs.
    pub metadata: GgufMetadata,
    /// Tensors in file order.
    pub tensors: Vec<TensorInfo>,
}

/// Parses the header of a GGUF file given as bytes (all of them: tensor places are checked against their length).
pub fn parse_gguf_bytes(bytes: &[u8]) -> Result<GgufHeader, FormatError> {
    parse(Path::new("bytes.gguf"), bytes, 0)
}

/// As [`parse_gguf_bytes`], for shard number `shard` with a name for messages.
pub(crate) fn parse(path: &Path, bytes: &[u8], shard: usize) -> Result<GgufHeader, FormatError> {
    let mut reader = Reader::new(path, bytes);
    let version = parse_version(&mut reader)?;
    let tensor_count = reader.u64(&"tensor count")?;
    let key_count = reader.u64(&"key count")?;
    refuse_above(&reader, tensor_count, MAX_TENSORS, "tensor count")?;
    refuse_above(&reader, key_count, MAX_KEYS, "key count")?;
    let key_count = reader.bounded_count(key_count, MIN_KEY_VALUE_BYTES, &"key-value section")?;
    let metadata = parse_metadata(&mut reader, key_count)?;
    let alignment = alignment(&reader, &metadata)?;
    let tensor_count = reader.bounded_count(tensor_count, MIN_TENSOR_BYTES, &"tensor section")?;
    let mut tensors = Vec::new();
    for number in 0..tensor_count {
        tensors.push(parse_tensor(&mut reader, number, alignment, shard)?);
    }
    place_tensors(&reader, &mut tensors, alignment)?;
    refuse_duplicates(path, &tensors)?;
    refuse_overlap(path, &tensors)?;
    Ok(GgufHeader { version, metadata, tensors })
}

fn parse_version(reader: &mut Reader<'_>) -> Result<u32, FormatError> {
    let magic: [u8; 4] = reader.array(&"magic bytes")?;
    if magic != MAGIC {
        return Err(FormatError::Unrecognised {
            path: reader.path().to_path_buf(),
            expected: "the magic bytes \"GGUF\"",
            found: quote(&magic),
        });
    }
    let version = reader.u32(&"version")?;
    let unsupported = |found: String, help| FormatError::Unsupported {
        path: reader.path().to_path_buf(),
        what: "the header".into(),
        found,
        help,
    };
    match version {
        2 | 3 => Ok(version),
        1 => Err(unsupported("GGUF version 1".into(), "convert the model again with a newer converter")),
        _ if matches!(version.swap_bytes(), 1..=3) => {
            Err(unsupported(format!("big-endian GGUF version {}", version.swap_bytes()), "convert it to little-endian"))
        }
        _ => Err(unsupported(
            format!("GGUF version {version}"),
            "this program reads versions 2 and 3; if the file is not damaged, update the program",
        )),
    }
}

fn refuse_above(reader: &Reader<'_>, count: u64, limit: u64, what: &str) -> Result<(), FormatError> {
    if count <= limit {
        return Ok(());
    }
    Err(invalid(reader, what, format!("at most {limit}"), count.to_string()))
}

fn invalid(
    reader: &Reader<'_>,
    what: impl Into<String>,
    expected: impl Into<String>,
    found: impl Into<String>,
) -> FormatError {
    FormatError::Invalid {
        path: reader.path().to_path_buf(),
        what: what.into(),
        offset: reader.position(),
        expected: expected.into(),
        found: found.into(),
    }
}

fn parse_metadata(reader: &mut Reader<'_>, count: usize) -> Result<GgufMetadata, FormatError> {
    let mut metadata = GgufMetadata::new(reader.path());
    for number in 0..count {
        let key = parse_name(reader, &format_args!("key {number} of {count}"))?;
        let value = value::parse(reader, &key)?;
        if metadata.insert(key.clone(), value).is_some() {
            let path = reader.path().to_path_buf();
            return Err(FormatError::Duplicate { path, what: "metadata key", name: quote(key.as_bytes()) });
        }
    }
    Ok(metadata)
}

fn parse_name(reader: &mut Reader<'_>, what: &dyn std::fmt::Display) -> Result<String, FormatError> {
    let bytes = reader.string(what)?;
    match std::str::from_utf8(bytes) {
        Ok(name) if !name.is_empty() => Ok(name.to_owned()),
        _ => Err(invalid(reader, what.to_string(), "a UTF-8 name of at least one byte", quote(bytes))),
    }
}

fn alignment(reader: &Reader<'_>, metadata: &GgufMetadata) -> Result<u64, FormatError> {
    let alignment = metadata.get::<u64>(ALIGNMENT_KEY)?.unwrap_or(DEFAULT_ALIGNMENT);
    if alignment.is_power_of_two() {
        return Ok(alignment);
    }
    Err(invalid(reader, "metadata key general.alignment", "a power of two", alignment.to_string()))
}

fn parse_tensor(
    reader: &mut Reader<'_>,
    number: usize,
    alignment: u64,
    shard: usize,
) -> Result<TensorInfo, FormatError> {
    let name = parse_name(reader, &format_args!("name of tensor {number}"))?;
    let label = format!("tensor {}", plain(&name));
    if name.len() > MAX_NAME {
        return Err(invalid(reader, label, format!("a name of at most {MAX_NAME} bytes"), name.len().to_string()));
    }
    let dimensions = reader.u32(&label)?;
    if dimensions > MAX_DIMENSIONS {
        return Err(invalid(reader, label, "at most 4 dimensions", dimensions.to_string()));
    }
    let mut shape = Vec::with_capacity(dimensions as usize);
    for _ in 0..dimensions {
        shape.push(reader.u64(&label)?);
    }
    let dtype = parse_type(reader, &label)?;
    let offset = reader.u64(&label)?;
    if !offset.is_multiple_of(alignment) {
        return Err(invalid(reader, label, format!("an offset that is a multiple of {alignment}"), offset.to_string()));
    }
    let bytes = tensor_bytes(dtype, &shape).ok_or_else(|| {
        let expected = match dtype.block_len() {
            1 => "dimensions above zero whose product fits in 64 bits".into(),
            block => format!("dimensions above zero, the first a multiple of {block} for {dtype}"),
        };
        invalid(reader, label, expected, format!("{shape:?}"))
    })?;
    // The file lists the contiguous dimension first.
    shape.reverse();
    Ok(TensorInfo { name, dtype, shape, shard, offset, bytes })
}

/// Size of a tensor whose contiguous dimension comes first; `None` for zero dimensions, split blocks or overflow.
fn tensor_bytes(dtype: DType, dimensions: &[u64]) -> Option<u64> {
    let row = dimensions.first().copied().unwrap_or(1);
    if !row.is_multiple_of(dtype.block_len() as u64) || dimensions.contains(&0) {
        return None;
    }
    let elements = dimensions.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim))?;
    dtype.bytes_for(elements)
}

fn parse_type(reader: &mut Reader<'_>, label: &str) -> Result<DType, FormatError> {
    let code = reader.u32(&label)?;
    // Codes from 100 are this crate's own and never valid in a file.
    if let Some(dtype) = DType::from_code(code).filter(|_| code < DType::F8E4M3.code()) {
        return Ok(dtype);
    }
    let refused = |found: String, help| FormatError::Unsupported {
        path: reader.path().to_path_buf(),
        what: label.to_owned(),
        found,
        help,
    };
    if let Some(name) = removed_type(code) {
        return Err(refused(
            format!("type {name} (id {code}), which was removed from GGUF"),
            "convert the model again with a newer converter",
        ));
    }
    if let Some(name) = unsupported_type(code) {
        return Err(refused(
            format!("type {name} (id {code})"),
            "choose a file in q4_k_m, q8_0 or another common quantisation",
        ));
    }
    Err(invalid(reader, label, "a tensor type id between 0 and 42", code.to_string()))
}

const fn removed_type(code: u32) -> Option<&'static str> {
    Some(match code {
        4 => "q4_2",
        5 => "q4_3",
        31 => "q4_0_4_4",
        32 => "q4_0_4_8",
        33 => "q4_0_8_8",
        36 => "iq4_nl_4_4",
        37 => "iq4_nl_4_8",
        38 => "iq4_nl_8_8",
        _ => return None,
    })
}

const fn unsupported_type(code: u32) -> Option<&'static str> {
    Some(match code {
        9 => "q8_1",
        15 => "q8_k",
        16 => "iq2_xxs",
        17 => "iq2_xs",
        18 => "iq3_xxs",
        19 => "iq1_s",
        21 => "iq3_s",
        22 => "iq2_s",
        29 => "iq1_m",
        34 => "tq1_0",
        35 => "tq2_0",
        39 => "mxfp4",
        40 => "nvfp4",
        41 => "q1_0",
        42 => "q2_0",
        _ => return None,
    })
}

/// Turns offsets within the data section into offsets within the file, and checks that each tensor ends inside it.
fn place_tensors(reader: &Reader<'_>, tensors: &mut [TensorInfo], alignment: u64) -> Result<(), FormatError> {
    // Saturating: a data section beyond the file is reported for the first tensor below, and fine without tensors.
    let data_start = reader.position().checked_next_multiple_of(alignment).unwrap_or(u64::MAX);
    for tensor in tensors {
        let start = data_start.checked_add(tensor.offset);
        let end = start.and_then(|start| start.checked_add(tensor.bytes));
        match (start, end) {
            (Some(start), Some(end)) if end <= reader.len() => tensor.offset = start,
            _ => {
                return Err(FormatError::Truncated {
                    path: reader.path().to_path_buf(),
                    what: format!("tensor {}", plain(&tensor.name)),
                    start: start.unwrap_or(u64::MAX),
                    end: end.unwrap_or(u64::MAX),
                    length: reader.len(),
                });
            }
        }
    }
    Ok(())
}

fn refuse_duplicates(path: &Path, tensors: &[TensorInfo]) -> Result<(), FormatError> {
    let mut names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair.first() == pair.last()) {
        None => Ok(()),
        Some(pair) => Err(FormatError::Duplicate {
            path: path.to_path_buf(),
            what: "tensor",
            name: pair.first().map_or_else(String::new, |name| quote(name.as_bytes())),
        }),
    }
}

#[cfg(test)]
mod tests;
