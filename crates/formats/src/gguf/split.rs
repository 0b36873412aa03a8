//! GGUF in several files: finds `…-00002-of-00005.gguf` beside the first part and checks that the parts agree.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{GgufHeader, GgufMetadata, parse};
use crate::{FormatError, Mapping, TensorInfo};

const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSOR_COUNT: &str = "split.tensors.count";

/// All files of one GGUF checkpoint.
pub(crate) struct Shards {
    pub(crate) paths: Vec<PathBuf>,
    pub(crate) mappings: Vec<Arc<Mapping>>,
    /// Metadata of the first file: it alone describes the model.
    pub(crate) metadata: GgufMetadata,
    pub(crate) tensors: Vec<TensorInfo>,
}

/// Parses `first` (already mapped from `path`) and, if it is the first part of several, its siblings.
pub(crate) fn open_shards(path: &Path, first: Mapping) -> Result<Shards, FormatError> {
    let GgufHeader { metadata, tensors, .. } = parse(path, &first, 0)?;
    let count = metadata.get::<u16>(COUNT)?.unwrap_or(1);
    let number = metadata.get::<u16>(NUMBER)?.unwrap_or(0);
    let mut shards = Shards { paths: vec![path.to_path_buf()], mappings: vec![Arc::new(first)], metadata, tensors };
    if count <= 1 {
        return Ok(shards);
    }
    if number != 0 {
        return Err(mismatch(
            path,
            "part number",
            "part 1 to be opened",
            format!("part {} of {count}", u32::from(number) + 1),
        ));
    }
    let prefix = shard_prefix(path, count)?;
    for index in 1..count {
        let name = shard_name(&prefix, index, count);
        open_sibling(&mut shards, path, &path.with_file_name(&name), &name, index, count)?;
    }
    check_tensor_count(&shards, path)?;
    Ok(shards)
}

fn open_sibling(
    shards: &mut Shards,
    first: &Path,
    path: &Path,
    name: &str,
    index: u16,
    count: u16,
) -> Result<(), FormatError> {
    if !path.exists() {
        return Err(FormatError::MissingShard { path: first.to_path_buf(), shard: name.to_owned() });
    }
    let mapping = Mapping::open(path)?;
    let header = parse(path, &mapping, usize::from(index))?;
    for (key, expected) in [(NUMBER, index), (COUNT, count)] {
        let found = header.metadata.require::<u16>(key)?;
        if found != expected {
            return Err(mismatch(path, format!("metadata key {key}"), expected.to_string(), found.to_string()));
        }
    }
    shards.tensors.extend(header.tensors);
    shards.paths.push(path.to_path_buf());
    shards.mappings.push(Arc::new(mapping));
    Ok(())
}

fn check_tensor_count(shards: &Shards, path: &Path) -> Result<(), FormatError> {
    let Some(expected) = shards.metadata.get::<u64>(TENSOR_COUNT)? else { return Ok(()) };
    let found = shards.tensors.len() as u64;
    if expected == found {
        return Ok(());
    }
    let what = format!("metadata key {TENSOR_COUNT}");
    Err(mismatch(path, what, format!("{found} tensors, as the parts have"), expected.to_string()))
}

fn shard_name(prefix: &str, index: u16, count: u16) -> String {
    format!("{prefix}-{:05}-of-{count:05}.gguf", u32::from(index) + 1)
}

/// `model` for `model-00001-of-00005.gguf`.
fn shard_prefix(path: &Path, count: u16) -> Result<String, FormatError> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let suffix = shard_name("", 0, count);
    name.strip_suffix(&suffix).map(str::to_owned).ok_or_else(|| {
        mismatch(path, "file name", format!("a name that ends in {suffix}, beside its {} siblings", count - 1), name)
    })
}

fn mismatch(
    path: &Path,
    what: impl Into<String>,
    expected: impl Into<String>,
    found: impl Into<String>,
) -> FormatError {
    FormatError::ShardMismatch {
        path: path.to_path_buf(),
        what: what.into(),
        expected: expected.into(),
        found: found.into(),
    }
}
