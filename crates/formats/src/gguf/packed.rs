//! Compiled models: a GGUF file whose weights are in the form that a device computes with.
//!
//! `packed.N` are tensors of bytes, one per weight and form, in the order in which a step reads them; arrays of keys say of
//! each which weight of the model it is, in which form, and what it was made of. Tensors that are needed as they are keep name and
//! type. The source's other tensors are described without data, because a model is recognised by all of its tensors. The
//! architecture is set aside, so that programs that do not know the format say so instead of missing weights.
//!
//! What is promised of a file that was accepted: every packed weight lies inside it, aligned to [`PACKED_ALIGNMENT`]; types,
//! ranks and sizes are whole blocks that fit 64 bits. What the bytes mean to a device is not known here.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::{Array, GgufMetadata, GgufWriter, MAX_DIMENSIONS, MAX_TENSORS, Value, tensor_bytes};
use crate::error::quote;
use crate::{DType, FormatError, TensorInfo};

/// Where packed weights start in a file: on a page of their own, so that they can be mapped.
pub const PACKED_ALIGNMENT: u32 = 4096;

const VERSION: u32 = 1;
const ARCHITECTURE_KEY: &str = "general.architecture";
/// Stands in for the architecture.
const ARCHITECTURE: &str = "qwen-compiled";
const VERSION_KEY: &str = "qwen.packed.version";
const SOURCE_ARCHITECTURE: &str = "qwen.packed.architecture";
const BACKEND: &str = "qwen.packed.backend";
const WEIGHT: &str = "qwen.packed.weight";
const ABSENT: &str = "qwen.packed.absent";

/// A weight in a device's own form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedWeight {
    /// Name of the weight in the model's graph, e.g. `attn_q.weight`.
    pub weight: String,
    /// Which of the weight's sources: the layer, counted from the first one that has it.
    pub source: u32,
    /// Identity of the form, as the device states it.
    pub layout: u32,
    /// Storage type before packing.
    pub dtype: DType,
    /// Shape, outermost dimension first.
    pub shape: Vec<u64>,
    /// First byte, counted from the start of the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl PackedWeight {
    fn key(&self) -> (&str, u32, u32) {
        (&self.weight, self.source, self.layout)
    }
}

/// A tensor of the source that the file does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AbsentTensor {
    /// Name as the source spells it.
    pub name: String,
    /// Storage type in the source.
    pub dtype: DType,
    /// Shape, outermost dimension first.
    pub shape: Vec<u64>,
}

/// What a compiled file holds besides tensors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Packed {
    backend: String,
    /// As in the file.
    weights: Vec<PackedWeight>,
    /// Indices of `weights`, sorted by weight, source and layout.
    order: Vec<usize>,
    /// Sorted by name.
    absent: Vec<AbsentTensor>,
}

/// Name of the tensor that holds packed weight `index`.
#[must_use]
pub fn packed_tensor_name(index: usize) -> String {
    format!("packed.{index}")
}

impl Packed {
    /// A description to be written; [`PackedWeight::offset`] is not part of it.
    #[must_use]
    pub fn new(backend: &str, weights: Vec<PackedWeight>, mut absent: Vec<AbsentTensor>) -> Self {
        absent.sort_by(|a, b| a.name.cmp(&b.name));
        let mut order: Vec<usize> = (0..weights.len()).collect();
        order.sort_by_key(|index| weights.get(*index).map(PackedWeight::key));
        Self { backend: backend.to_owned(), weights, order, absent }
    }

    /// Name of the backend whose forms these are.
    #[must_use]
    pub fn backend(&self) -> &str {
        &self.backend
    }
    /// Packed weights, in the order of the file.
    #[must_use]
    pub fn weights(&self) -> &[PackedWeight] {
        &self.weights
    }
    /// Tensors of the source that the file does not hold, sorted by name.
    #[must_use]
    pub fn absent(&self) -> &[AbsentTensor] {
        &self.absent
    }
    /// The tensor of that name, if it is one that the file does not hold.
    #[must_use]
    pub fn absent_tensor(&self, name: &str) -> Option<&AbsentTensor> {
        let at = self.absent.binary_search_by(|tensor| tensor.name.as_str().cmp(name)).ok()?;
        self.absent.get(at)
    }
    /// The forms of a weight that are here, sorted by layout.
    pub fn forms(&self, weight: &str, source: u32) -> impl Iterator<Item = &PackedWeight> {
        let start = self.order.partition_point(|index| {
            self.weights.get(*index).is_some_and(|entry| (entry.weight.as_str(), entry.source) < (weight, source))
        });
        let rest = self.order.get(start..).unwrap_or_default().iter().filter_map(|index| self.weights.get(*index));
        rest.take_while(move |entry| entry.weight == weight && entry.source == source)
    }

    /// Adds the keys of a compiled file, and those of its source that it keeps.
    pub fn put(&self, writer: &mut GgufWriter, source: &GgufMetadata) {
        let replaced = |key: &str| {
            [super::ALIGNMENT_KEY, ARCHITECTURE_KEY].contains(&key)
                || ["split.", "qwen.packed."].iter().any(|prefix| key.starts_with(prefix))
        };
        for (key, value) in source.iter().filter(|(key, _)| !replaced(key)) {
            writer.value(key, value);
        }
        writer.string(ARCHITECTURE_KEY, ARCHITECTURE);
        if let Some(value) = source.value(ARCHITECTURE_KEY) {
            writer.value(SOURCE_ARCHITECTURE, value);
        }
        writer.u32(VERSION_KEY, VERSION);
        writer.string(BACKEND, &self.backend);
        let mut numbers = |key: &str, values: Vec<u32>| {
            writer.value(&format!("{WEIGHT}.{key}"), &Value::Array(Array::U32(values)));
        };
        numbers("sources", self.weights.iter().map(|weight| weight.source).collect());
        numbers("layouts", self.weights.iter().map(|weight| weight.layout).collect());
        let weights = self.weights.iter().map(|entry| (entry.weight.as_str(), entry.dtype, entry.shape.as_slice()));
        put_descriptions(writer, WEIGHT, weights);
        let absent = self.absent.iter().map(|tensor| (tensor.name.as_str(), tensor.dtype, tensor.shape.as_slice()));
        put_descriptions(writer, ABSENT, absent);
    }
}

fn put_descriptions<'a>(
    writer: &mut GgufWriter,
    prefix: &str,
    entries: impl Iterator<Item = (&'a str, DType, &'a [u64])> + Clone,
) {
    let names: Vec<&str> = entries.clone().map(|(name, ..)| name).collect();
    writer.strings(&format!("{prefix}.names"), &names);
    let mut put = |key: &str, array| writer.value(&format!("{prefix}.{key}"), &Value::Array(array));
    put("types", Array::U32(entries.clone().map(|(_, dtype, _)| dtype.code()).collect()));
    put("ranks", Array::U32(entries.clone().map(|(.., shape)| shape.len() as u32).collect()));
    put("sizes", Array::U64(entries.flat_map(|(.., shape)| shape.iter().copied()).collect()));
}

/// Takes what a compiled file holds besides tensors out of its tensors, and puts its architecture back in its place; `None` for any
/// other file, which is left as it is.
///
/// # Errors
/// If the file was compiled by another version, or contradicts itself.
pub fn take_packed(
    path: &Path,
    metadata: &mut GgufMetadata,
    tensors: &mut Vec<TensorInfo>,
) -> Result<Option<Packed>, FormatError> {
    let marked = metadata.get::<&str>(ARCHITECTURE_KEY).is_ok_and(|name| name == Some(ARCHITECTURE));
    if !marked && !metadata.contains(VERSION_KEY) {
        return Ok(None);
    }
    let version = metadata.u32(VERSION_KEY)?;
    if version != VERSION {
        return Err(FormatError::Unsupported {
            path: path.to_path_buf(),
            what: "the compiled model".into(),
            found: format!("version {version} of the format where this program has {VERSION}"),
            help: "compile the model again",
        });
    }
    let reader = Keys { path, metadata };
    let names = reader.descriptions(WEIGHT)?;
    let [sources, layouts] =
        [reader.numbers(WEIGHT, "sources", names.len()), reader.numbers(WEIGHT, "layouts", names.len())];
    let (sources, layouts) = (sources?, layouts?);
    let absent = reader.descriptions(ABSENT)?;
    let backend = metadata.str(BACKEND)?.to_owned();
    let places = take_places(path, tensors, names.len())?;
    let weights = names.into_iter().zip(sources).zip(layouts).zip(places);
    let weights: Vec<PackedWeight> = weights
        .map(|(((described, source), layout), place)| {
            let AbsentTensor { name, dtype, shape } = described;
            PackedWeight { weight: name, source, layout, dtype, shape, offset: place.offset, bytes: place.bytes }
        })
        .collect();
    let packed = Packed::new(&backend, weights, absent);
    reader.check_names(&packed, tensors)?;
    if let Some(value) = metadata.value(SOURCE_ARCHITECTURE).cloned() {
        metadata.insert(ARCHITECTURE_KEY.to_owned(), value);
    }
    Ok(Some(packed))
}

/// Takes the tensors `packed.0`, `packed.1`, … out of a list, which must be `count`.
fn take_places(path: &Path, tensors: &mut Vec<TensorInfo>, count: usize) -> Result<Vec<TensorInfo>, FormatError> {
    let wanted: BTreeMap<String, usize> = (0..count).map(|index| (packed_tensor_name(index), index)).collect();
    let mut places: Vec<Option<TensorInfo>> = vec![None; count];
    tensors.retain(|tensor| {
        let place = wanted.get(&tensor.name).and_then(|index| places.get_mut(*index));
        match place {
            Some(place) => *place = Some(tensor.clone()),
            None => return true,
        }
        false
    });
    let places = places.into_iter().enumerate().map(|(index, place)| {
        let what = format!("tensor {}", packed_tensor_name(index));
        let expected = || format!("a list of bytes in this file, at a multiple of {PACKED_ALIGNMENT}");
        let place = place.ok_or_else(|| damaged(path, what.clone(), expected(), "none"))?;
        let fits = place.dtype == DType::I8
            && place.shape.len() == 1
            && place.shard == 0
            && place.offset.is_multiple_of(u64::from(PACKED_ALIGNMENT));
        let found = || format!("{} {:?} at {} of file {}", place.dtype, place.shape, place.offset, place.shard + 1);
        if fits { Ok(place) } else { Err(damaged(path, what, expected(), found())) }
    });
    places.collect()
}

fn damaged(path: &Path, what: impl Into<String>, expected: impl Into<String>, found: impl Into<String>) -> FormatError {
    FormatError::Packed { path: path.to_path_buf(), what: what.into(), expected: expected.into(), found: found.into() }
}

struct Keys<'a> {
    path: &'a Path,
    metadata: &'a GgufMetadata,
}

impl Keys<'_> {
    /// An array of `count` numbers.
    fn numbers(&self, prefix: &str, key: &str, count: usize) -> Result<Vec<u32>, FormatError> {
        let key = format!("{prefix}.{key}");
        let values = self.metadata.u32s(&key)?;
        if values.len() == count {
            return Ok(values);
        }
        let (expected, found) = (format!("{count} numbers, one per name"), values.len().to_string());
        Err(damaged(self.path, format!("metadata key {key}"), expected, found))
    }

    /// Names, types and shapes, as [`put_descriptions`] wrote them.
    fn descriptions(&self, prefix: &str) -> Result<Vec<AbsentTensor>, FormatError> {
        let names = self.metadata.strings(&format!("{prefix}.names"))?;
        if names.len() as u64 > MAX_TENSORS {
            let (what, expected) = (format!("metadata key {prefix}.names"), format!("at most {MAX_TENSORS}"));
            return Err(damaged(self.path, what, expected, names.len().to_string()));
        }
        let types = self.numbers(prefix, "types", names.len())?;
        let ranks = self.numbers(prefix, "ranks", names.len())?;
        let key = format!("{prefix}.sizes");
        let sizes = self.metadata.require::<Vec<u64>>(&key)?;
        let mut left = sizes.as_slice();
        let mut entries = Vec::new();
        for (index, (code, rank)) in types.into_iter().zip(ranks).enumerate() {
            let bytes = names.get(index).unwrap_or_default();
            let what = || format!("{prefix} {}", quote(bytes));
            let name = std::str::from_utf8(bytes).ok().filter(|name| !name.is_empty());
            let name = name.ok_or_else(|| damaged(self.path, what(), "a UTF-8 name", quote(bytes)))?;
            let dtype = DType::from_code(code)
                .ok_or_else(|| damaged(self.path, what(), "the code of a storage type", code.to_string()))?;
            let shape = (rank <= MAX_DIMENSIONS).then(|| left.split_at_checked(rank as usize)).flatten();
            let Some((shape, rest)) = shape else {
                let expected = format!("at most {MAX_DIMENSIONS} sizes out of {key}");
                return Err(damaged(self.path, what(), expected, format!("{rank} of {}", left.len())));
            };
            left = rest;
            let innermost_first: Vec<u64> = shape.iter().rev().copied().collect();
            if tensor_bytes(dtype, &innermost_first).is_none() {
                let expected = format!("sizes above zero that are whole blocks of {dtype}");
                return Err(damaged(self.path, what(), expected, format!("{shape:?}")));
            }
            entries.push(AbsentTensor { name: name.to_owned(), dtype, shape: shape.to_vec() });
        }
        if !left.is_empty() {
            let expected = format!("as many sizes as {prefix}.ranks add up to");
            return Err(damaged(self.path, format!("metadata key {key}"), expected, format!("{} more", left.len())));
        }
        Ok(entries)
    }

    /// Refuses what is described twice.
    fn check_names(&self, packed: &Packed, stored: &[TensorInfo]) -> Result<(), FormatError> {
        let duplicate = |what, name: &str| {
            let name = quote(name.as_bytes());
            Err(FormatError::Duplicate { path: self.path.to_path_buf(), what, name })
        };
        let mut sorted = packed.order.iter().filter_map(|index| packed.weights.get(*index));
        let mut last = sorted.next();
        for weight in sorted {
            if last.is_some_and(|last| last.key() == weight.key()) {
                return duplicate("packed weight", &weight.weight);
            }
            last = Some(weight);
        }
        let mut names: BTreeSet<&str> = stored.iter().map(|tensor| tensor.name.as_str()).collect();
        match packed.absent.iter().find(|tensor| !names.insert(&tensor.name)) {
            Some(tensor) => duplicate("tensor", &tensor.name),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
