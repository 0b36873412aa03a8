//! Safetensors in several files: reads `model.safetensors.index.json` and checks that files and index agree.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;

use super::header::UniqueMap;
use super::{MAX_JSON, invalid, parse, parse_json};
use crate::error::quote;
use crate::{FormatError, Mapping, TensorInfo};

/// Which file holds which tensor.
#[derive(Debug)]
#[non_exhaustive]
pub struct SafetensorsIndex {
    /// Plain file names, sorted, without repetition.
    pub files: Vec<String>,
    /// `(tensor, index into files)`, sorted by tensor.
    pub tensors: Vec<(String, usize)>,
}

#[derive(Deserialize)]
struct IndexJson {
    weight_map: UniqueMap,
}

/// Parses the text of an index file.
pub fn parse_safetensors_index(bytes: &[u8]) -> Result<SafetensorsIndex, FormatError> {
    parse_index(Path::new("bytes.safetensors.index.json"), bytes)
}

fn parse_index(path: &Path, bytes: &[u8]) -> Result<SafetensorsIndex, FormatError> {
    let IndexJson { weight_map: UniqueMap(pairs) } = parse_json(path, bytes, 0, "index")?;
    let mut names: Vec<&str> = pairs.iter().map(|(_, file)| file.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let files: Vec<String> = names.into_iter().map(str::to_owned).collect();
    if let Some(file) = files.iter().find(|file| !is_plain_name(file)) {
        let expected = "plain file names that end in .safetensors";
        return Err(invalid(path, "weight_map", 0, expected, quote(file.as_bytes())));
    }
    let tensors = pairs
        .into_iter()
        .map(|(tensor, file)| {
            let place = files.binary_search(&file).unwrap_or_default();
            (tensor, place)
        })
        .collect();
    Ok(SafetensorsIndex { files, tensors })
}

/// A name without a directory part: an index must not reach outside its own directory.
fn is_plain_name(name: &str) -> bool {
    name.ends_with(".safetensors")
        && !name.starts_with('.')
        && !name.contains(['/', '\\', ':', '\0'])
        && !name.contains("..")
        && !name.contains(char::is_control)
}

/// All files of one sharded checkpoint.
pub(crate) struct Shards {
    pub(crate) paths: Vec<PathBuf>,
    pub(crate) mappings: Vec<Arc<Mapping>>,
    pub(crate) tensors: Vec<TensorInfo>,
}

/// Opens every file that the index at `path` names.
pub(crate) fn open_shards(path: &Path) -> Result<Shards, FormatError> {
    let text = Mapping::open(path)?;
    if text.len() as u64 > MAX_JSON {
        let expected = format!("an index of at most {MAX_JSON} bytes");
        return Err(invalid(path, "index", 0, expected, text.len().to_string()));
    }
    let index = parse_index(path, &text)?;
    let mut shards = Shards { paths: Vec::new(), mappings: Vec::new(), tensors: Vec::new() };
    for (number, name) in index.files.iter().enumerate() {
        let file = path.with_file_name(name);
        if !file.exists() {
            return Err(FormatError::MissingShard { path: path.to_path_buf(), shard: name.clone() });
        }
        let mapping = Mapping::open(&file)?;
        let header = parse(&file, &mapping, number)?;
        check_against_index(&file, &index, number, &header.tensors)?;
        shards.tensors.extend(header.tensors);
        shards.paths.push(file);
        shards.mappings.push(Arc::new(mapping));
    }
    Ok(shards)
}

/// Both lists are sorted by name, so the first difference names the missing or surplus tensor.
fn check_against_index(
    file: &Path,
    index: &SafetensorsIndex,
    number: usize,
    tensors: &[TensorInfo],
) -> Result<(), FormatError> {
    let mut expected = index.tensors.iter().filter(|(_, place)| *place == number).map(|(name, _)| name.as_str());
    let mut found = tensors.iter().map(|tensor| tensor.name.as_str());
    loop {
        let difference = match (expected.next(), found.next()) {
            (None, None) => return Ok(()),
            (Some(expected), Some(found)) if expected == found => continue,
            (Some(expected), Some(found)) if expected > found => surplus(found),
            (None, Some(found)) => surplus(found),
            (Some(expected), _) => (format!("tensor {}", quote(expected.as_bytes())), "no such tensor".into()),
        };
        return Err(FormatError::ShardMismatch {
            path: file.to_path_buf(),
            what: "comparison with the index".into(),
            expected: difference.0,
            found: difference.1,
        });
    }
}

fn surplus(name: &str) -> (String, String) {
    ("only tensors that the index lists here".into(), format!("tensor {}", quote(name.as_bytes())))
}
