//! One type over every container: a path in, mapped files and checked tensor places out.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::quote;
use crate::gguf::Packed;
use crate::{DType, FormatError, GgufMetadata, Mapping, TensorInfo, TensorView, gguf, safetensors};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const INDEX_SUFFIX: &str = ".safetensors.index.json";

/// The container that a checkpoint came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Container {
    /// GGUF, one file or several.
    Gguf,
    /// Safetensors, one file or several with an index.
    Safetensors,
}

/// An opened checkpoint: its files mapped read-only, its tensors checked and sorted by name.
///
/// Cheap to keep: nothing but headers is copied, and tensor bytes become resident only when read. See
/// [`Mapping`] for what happens when somebody changes a file that is mapped.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    container: Container,
    shard_paths: Vec<PathBuf>,
    mappings: Vec<Arc<Mapping>>,
    /// Sorted by name, names unique.
    tensors: Vec<TensorInfo>,
    metadata: Option<GgufMetadata>,
    packed: Option<Packed>,
}

impl Checkpoint {
    /// Opens a GGUF file (the first one, if split), a safetensors file, an index file, or a directory with
    /// `model.safetensors` or `model.safetensors.index.json`. Files are recognised by content, not by name.
    pub fn open(path: &Path) -> Result<Self, FormatError> {
        if path.is_dir() {
            return Self::open_directory(path);
        }
        if path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.ends_with(INDEX_SUFFIX)) {
            return Self::open_index(path, path);
        }
        Self::open_file(path, path)
    }

    fn open_directory(path: &Path) -> Result<Self, FormatError> {
        let (single, index) = (path.join(SINGLE), path.join(INDEX));
        if single.exists() {
            Self::open_file(path, &single)
        } else if index.exists() {
            Self::open_index(path, &index)
        } else {
            Err(FormatError::Unrecognised {
                path: path.to_path_buf(),
                expected: "model.safetensors or model.safetensors.index.json in the directory",
                found: "neither (pass a .gguf file by its own path)".into(),
            })
        }
    }

    fn open_index(path: &Path, index: &Path) -> Result<Self, FormatError> {
        let shards = safetensors::open_shards(index)?;
        Self::assemble(path, Container::Safetensors, shards.paths, shards.mappings, shards.tensors, (None, None))
    }

    fn open_file(path: &Path, file: &Path) -> Result<Self, FormatError> {
        let mapping = Mapping::open(file)?;
        match recognise(file, &mapping)? {
            Container::Gguf => {
                let mut shards = gguf::open_shards(file, mapping)?;
                let packed = gguf::take_packed(file, &mut shards.metadata, &mut shards.tensors)?;
                let facts = (Some(shards.metadata), packed);
                Self::assemble(path, Container::Gguf, shards.paths, shards.mappings, shards.tensors, facts)
            }
            Container::Safetensors => {
                let tensors = safetensors::parse(file, &mapping, 0)?.tensors;
                let (paths, mappings) = (vec![file.to_path_buf()], vec![Arc::new(mapping)]);
                Self::assemble(path, Container::Safetensors, paths, mappings, tensors, (None, None))
            }
        }
    }

    /// Sorts, and refuses a tensor that two files hold.
    fn assemble(
        path: &Path,
        container: Container,
        shard_paths: Vec<PathBuf>,
        mappings: Vec<Arc<Mapping>>,
        mut tensors: Vec<TensorInfo>,
        (metadata, packed): (Option<GgufMetadata>, Option<Packed>),
    ) -> Result<Self, FormatError> {
        tensors.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        if let Some([first, ..]) = tensors.windows(2).find(|pair| matches!(pair, [a, b] if a.name == b.name)) {
            let name = quote(first.name.as_bytes());
            return Err(FormatError::Duplicate { path: path.to_path_buf(), what: "tensor", name });
        }
        Ok(Self { path: path.to_path_buf(), container, shard_paths, mappings, tensors, metadata, packed })
    }

    /// The path given to [`open`](Self::open).
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// GGUF or safetensors.
    pub const fn container(&self) -> Container {
        self.container
    }

    /// The files, in the order of [`TensorInfo::shard`].
    pub fn shard_paths(&self) -> &[PathBuf] {
        &self.shard_paths
    }

    /// All tensors, sorted by name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.tensors.iter()
    }

    /// What a compiled model holds besides tensors; `None` for every other checkpoint.
    pub const fn packed(&self) -> Option<&Packed> {
        self.packed.as_ref()
    }

    /// Name, type and shape (outermost first) of all tensors of the model. For a compiled one these are the tensors of its source,
    /// also those whose values are here in a device's own form alone.
    pub fn declared(&self) -> impl Iterator<Item = (&str, DType, &[u64])> {
        let absent = self.packed.iter().flat_map(Packed::absent);
        let stored = self.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.dtype, tensor.shape.as_slice()));
        stored.chain(absent.map(|tensor| (tensor.name.as_str(), tensor.dtype, tensor.shape.as_slice())))
    }

    /// The tensor of that name.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        let place = self.tensors.binary_search_by(|tensor| tensor.name.as_str().cmp(name)).ok()?;
        self.tensors.get(place)
    }

    /// Type, shape and bytes of the tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.view(self.info(name)?)
    }

    /// The view of an info; `None` if the info is not from this checkpoint and does not fit it.
    pub fn view<'a>(&'a self, info: &'a TensorInfo) -> Option<TensorView<'a>> {
        let data = self.mappings.get(info.shard)?.get(byte_range(info)?)?;
        Some(TensorView { dtype: info.dtype, shape: &info.shape, data })
    }

    /// Metadata of a GGUF; `None` for safetensors.
    pub const fn metadata(&self) -> Option<&GgufMetadata> {
        self.metadata.as_ref()
    }

    /// Bytes of all tensors together.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.bytes).sum()
    }

    /// Bytes of all files together.
    pub fn file_bytes(&self) -> u64 {
        self.mappings.iter().map(|mapping| mapping.len() as u64).sum()
    }

    /// The mapped bytes of a file, to share with whoever needs them longer than the checkpoint.
    pub fn mapping(&self, shard: usize) -> Option<Arc<Mapping>> {
        self.mappings.get(shard).cloned()
    }

    /// Stops the whole pages of a tensor from counting as resident, once its values live elsewhere. A hint: the tensor
    /// stays readable, and nothing happens where the system has no such hint.
    pub fn release(&self, info: &TensorInfo) {
        if let (Some(mapping), Some(range)) = (self.mappings.get(info.shard), byte_range(info)) {
            mapping.release(range);
        }
    }

    /// Brings a tensor's pages to memory; see [`Mapping::populate`].
    pub fn populate(&self, info: &TensorInfo) {
        if let (Some(mapping), Some(range)) = (self.mappings.get(info.shard), byte_range(info)) {
            mapping.populate(range);
        }
    }
}

fn byte_range(info: &TensorInfo) -> Option<std::ops::Range<usize>> {
    let start = usize::try_from(info.offset).ok()?;
    let end = start.checked_add(usize::try_from(info.bytes).ok()?)?;
    Some(start..end)
}

/// Tells containers apart by their first bytes. No safetensors header can be long enough to start with "GGUF".
fn recognise(path: &Path, bytes: &[u8]) -> Result<Container, FormatError> {
    let has_extension = |wanted: &str| path.extension().is_some_and(|extension| extension == wanted);
    if bytes.starts_with(&gguf::MAGIC) || has_extension("gguf") {
        return Ok(Container::Gguf);
    }
    if bytes.get(8) == Some(&b'{') || has_extension("safetensors") {
        return Ok(Container::Safetensors);
    }
    const ZIP: &[u8] = b"PK\x03\x04";
    const PICKLE: &[u8] = &[0x80, 0x02];
    if bytes.starts_with(ZIP) || bytes.starts_with(PICKLE) {
        return Err(FormatError::Unsupported {
            path: path.to_path_buf(),
            what: "the file".into(),
            found: "Python pickle".into(),
            help: "a pickle can run code when loaded; convert it to safetensors offline",
        });
    }
    Err(FormatError::Unrecognised {
        path: path.to_path_buf(),
        expected: "a GGUF or safetensors file",
        found: format!("a file that starts with {}", quote(bytes.get(..8).unwrap_or(bytes))),
    })
}
