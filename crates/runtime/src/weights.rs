//! Weights in device memory.
//!
//! In: the weight declarations of a graph and the checkpoint that they name. Out: slices, either the checkpoint's own pages
//! (mapped, no copy) or the packed form that a plan asks for. Invariants:
//! - a weight is materialised once per form, whatever the number of plans that use it;
//! - once a packed form exists, the pages of the file behind it are released, so that a weight is not held twice;
//! - what a compiled file holds in the wanted form is mapped, like a weight that is taken as stored;
//! - sizes and types are checked against the declaration before a byte is read.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use qwen_formats::{Checkpoint, DType, Mapping, TensorInfo, blocks};
use qwen_hal::abi::{QHAL_FEATURE_IMPORT_HOST, QHAL_USAGE_WEIGHT};
use qwen_hal::{Buffer, BufferDesc, Device, HostOwner, Plan, Scope, Slice, Stream};
use qwen_ir::{Graph, Transform, WeightDecl, WeightId, WeightSource};

use crate::RuntimeError;

mod compiled;
mod part;

/// Identity of a weight: declaration and index of the source.
pub type WeightKey = (WeightId, u32);

/// All weights of a model on one device.
#[derive(Debug)]
pub struct WeightStore {
    checkpoint: Arc<Checkpoint>,
    decls: Vec<WeightDecl>,
    stored: HashMap<WeightKey, Stored>,
    packed: HashMap<(WeightKey, u32), Slice>,
    slab: Slab,
}

/// Bytes of a slab. Packed weights lie one after the other in the order in which a step reads them: few large allocations get
/// large pages, and reading ahead of a weight's end reads the next weight.
const SLAB_BYTES: u64 = 32 << 20;
/// Where a weight may begin in a slab, at least.
const SLAB_ALIGN: u64 = 256;

/// Where a weight comes to lie.
enum Place {
    /// In an allocation of its own.
    Alone,
    /// At the beginning of a new slab.
    Begins,
    /// At this offset of the slab that is being filled.
    At(u64),
}

/// How full the slab is that is being filled; none is there at first.
#[derive(Debug, Default)]
struct Filling {
    used: Option<u64>,
}

impl Filling {
    fn place(&mut self, device: &Device, bytes: u64) -> Place {
        if bytes > SLAB_BYTES {
            return Place::Alone;
        }
        let alignment = SLAB_ALIGN.max(device.caps().buffer_alignment);
        let first = self.used.map(|used| used.next_multiple_of(alignment)).filter(|first| first + bytes <= SLAB_BYTES);
        self.used = Some(first.unwrap_or(0) + bytes);
        first.map_or(Place::Begins, Place::At)
    }
}

/// The slab that is being filled; full ones live on in their slices.
#[derive(Debug, Default)]
struct Slab {
    buffer: Option<Buffer>,
    filling: Filling,
}

impl Slab {
    /// So many bytes of device memory, in the slab or, if larger, of their own.
    fn take(&mut self, device: &Device, bytes: u64) -> Result<Slice, RuntimeError> {
        let new = |bytes| device.alloc(&BufferDesc::new(bytes, QHAL_USAGE_WEIGHT, Scope::Persistent, "packed weights"));
        match (self.filling.place(device, bytes), &self.buffer) {
            (Place::At(first), Some(buffer)) => Ok(buffer.slice(first, bytes)?),
            (Place::Alone, _) => Ok(new(bytes)?.whole()),
            (Place::Begins | Place::At(_), _) => Ok(self.buffer.insert(new(SLAB_BYTES)?).slice(0, bytes)?),
        }
    }
}

/// What weights would take on a device, by the rules by which a store takes it.
#[derive(Debug, Default)]
pub(crate) struct Footprint {
    seen: HashSet<(WeightKey, Option<u32>)>,
    filling: Filling,
    bytes: u64,
}

impl Footprint {
    /// Adds a weight as input `input` of a plan wants it, if it is not there in that form.
    ///
    /// # Errors
    /// If there is no such weight.
    pub(crate) fn add(
        &mut self,
        store: &WeightStore,
        device: &Device,
        key: WeightKey,
        (plan, input): (&Plan, usize),
    ) -> Result<(), RuntimeError> {
        let form = packed_form(plan, input);
        if !self.seen.insert((key, form.map(|(_, layout)| layout))) {
            return Ok(());
        }
        let bytes = match form {
            Some((bytes, _)) => bytes,
            None => {
                let (decl, source) = store.source(key)?;
                store.wanted_bytes(decl, source)?
            }
        };
        let taken = match self.filling.place(device, bytes) {
            Place::Alone => bytes,
            Place::Begins => SLAB_BYTES,
            Place::At(_) => 0,
        };
        self.bytes = self.bytes.saturating_add(taken);
        Ok(())
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Bytes and identity of the packed form that a plan wants of an input; none if it takes it as it is stored.
fn packed_form(plan: &Plan, input: usize) -> Option<(u64, u32)> {
    let info = plan.info();
    let form = info.packed_bytes.get(input).copied().zip(info.packed_layout.get(input).copied());
    form.filter(|(bytes, _)| *bytes > 0)
}

/// A weight as it is declared.
#[derive(Debug)]
struct Stored {
    slice: Slice,
    /// Whether it takes memory besides the pages of the file.
    owned: bool,
}

/// A range of a mapped file as the owner of a buffer.
struct MappedRange {
    mapping: Arc<Mapping>,
    range: Range<usize>,
}

impl AsRef<[u8]> for MappedRange {
    fn as_ref(&self) -> &[u8] {
        self.mapping.get(self.range.clone()).unwrap_or(&[])
    }
}

/// Values in an aligned allocation of their own.
struct Owned {
    words: Vec<u64>,
    len: usize,
}

impl Owned {
    fn zeroed(len: usize) -> Self {
        Self { words: vec![0; len.div_ceil(8)], len }
    }
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len]
    }
}

impl AsRef<[u8]> for Owned {
    fn as_ref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }
}

/// Host bytes of a weight before they go to the device.
enum Material {
    Mapped(MappedRange),
    Owned(Owned),
}

impl WeightStore {
    /// A store for the weights of a graph.
    #[must_use]
    pub fn new(checkpoint: Arc<Checkpoint>, graph: &Graph) -> Self {
        Self {
            checkpoint,
            decls: graph.weights.clone(),
            stored: HashMap::new(),
            packed: HashMap::new(),
            slab: Slab::default(),
        }
    }

    /// The weight as the graph declares it.
    ///
    /// # Errors
    /// If the checkpoint does not hold what the declaration says, or memory is short.
    pub fn stored(&mut self, device: &Device, stream: &Stream, key: WeightKey) -> Result<Slice, RuntimeError> {
        if let Some(stored) = self.stored.get(&key) {
            return Ok(stored.slice.clone());
        }
        let (owner, name, converted) = self.on_host(device, key)?;
        let imported = device.caps().has(QHAL_FEATURE_IMPORT_HOST);
        let slice = match imported {
            true => to_device(device, stream, owner, name)?,
            false => {
                // An allocator is asked for few, large pieces.
                let bytes = (*owner).as_ref();
                let slice = self.slab.take(device, bytes.len() as u64)?;
                stream.copy_from_host(bytes, &slice)?;
                self.release(key)?;
                slice
            }
        };
        self.stored.insert(key, Stored { slice: slice.clone(), owned: converted || !imported });
        Ok(slice)
    }

    /// Bytes of a weight in host memory, its name, and whether they are not the file's own.
    fn on_host(&self, device: &Device, key: WeightKey) -> Result<(HostOwner, String, bool), RuntimeError> {
        self.check_present(device, key)?;
        let (decl, source) = self.source(key)?;
        let (owner, converted): (HostOwner, bool) = match self.materialise(decl, source)? {
            Material::Mapped(range) => (Arc::new(range), false),
            Material::Owned(bytes) => (Arc::new(bytes), true),
        };
        Ok((owner, decl.name.clone(), converted))
    }

    /// The weight in the form that input `input` of a plan wants.
    ///
    /// # Errors
    /// As [`WeightStore::stored`].
    pub fn for_plan(
        &mut self,
        device: &Device,
        stream: &Stream,
        key: WeightKey,
        plan: &Plan,
        input: usize,
    ) -> Result<Slice, RuntimeError> {
        let Some((bytes, layout)) = packed_form(plan, input) else { return self.stored(device, stream, key) };
        if let Some(slice) = self.packed.get(&(key, layout)) {
            return Ok(slice.clone());
        }
        let slice = match self.compiled(device, stream, key, layout, bytes)? {
            Some(slice) => slice,
            None => {
                let slice = self.slab.take(device, bytes)?;
                self.pack(device, stream, key, (plan, input), &slice)?;
                slice
            }
        };
        self.packed.insert((key, layout), slice.clone());
        Ok(slice)
    }

    /// Packs the weight as input `input` of a plan wants it; its stored form is let go, unless a plan uses it.
    ///
    /// # Errors
    /// As [`WeightStore::stored`], or if the device can't pack it.
    pub(crate) fn pack(
        &mut self,
        device: &Device,
        stream: &Stream,
        key: WeightKey,
        (plan, input): (&Plan, usize),
        target: &Slice,
    ) -> Result<(), RuntimeError> {
        let raw = match self.stored.get(&key) {
            Some(stored) => stored.slice.clone(),
            // Nobody else uses the stored form yet; who does later maps it again.
            None => {
                let (owner, name, _) = self.on_host(device, key)?;
                to_device(device, stream, owner, name)?
            }
        };
        plan.prepack(stream, input, &raw, target).map_err(|source| RuntimeError::Launch {
            origin: format!("packing {}", self.name(key)),
            source: Box::new(source),
        })?;
        stream.wait()?;
        drop(raw);
        self.release(key)
    }

    /// Bytes of packed weights.
    #[must_use]
    pub fn packed_bytes(&self) -> u64 {
        self.packed.values().map(Slice::size).sum()
    }
    /// Bytes of weights that had to be copied or converted.
    #[must_use]
    pub fn owned_bytes(&self) -> u64 {
        self.stored.values().filter(|stored| stored.owned).map(|stored| stored.slice.size()).sum()
    }

    pub(crate) fn source(&self, key: WeightKey) -> Result<(&WeightDecl, &WeightSource), RuntimeError> {
        let decl = self.decls.get(key.0.index());
        decl.and_then(|decl| Some((decl, decl.sources.get(key.1 as usize)?))).ok_or_else(|| RuntimeError::Weight {
            name: format!("{key:?}"),
            expected: "a declared weight".into(),
            found: "none".into(),
        })
    }

    /// Bytes of a weight as declared.
    pub(crate) fn bytes(&self, key: WeightKey) -> Option<u64> {
        let (decl, source) = self.source(key).ok()?;
        self.wanted_bytes(decl, source).ok()
    }

    pub(crate) fn name(&self, key: WeightKey) -> &str {
        self.decls.get(key.0.index()).map_or("a weight", |decl| &decl.name)
    }

    /// Brings the pages of files that weights are read from as they are to memory.
    pub(crate) fn populate(&self) {
        let mapped = self.stored.iter().filter(|(_, stored)| !stored.owned);
        for (_, source) in mapped.filter_map(|(key, _)| self.source(*key).ok()) {
            for info in source.tensors.iter().filter_map(|name| self.checkpoint.info(name)) {
                self.checkpoint.populate(info);
            }
        }
    }

    fn release(&self, key: WeightKey) -> Result<(), RuntimeError> {
        let (_, source) = self.source(key)?;
        for name in &source.tensors {
            if let Some(info) = self.checkpoint.info(name) {
                self.checkpoint.release(info);
            }
        }
        Ok(())
    }

    fn materialise(&self, decl: &WeightDecl, source: &WeightSource) -> Result<Material, RuntimeError> {
        if let Some(slice) = decl.slice {
            return self.part(decl, source, slice);
        }
        let wanted = self.wanted_bytes(decl, source)?;
        match &source.transform {
            Transform::AsStored => {
                let info = self.tensor(source, 0)?;
                check_size(info, source.dtype, wanted)?;
                self.range(info, 0, wanted, source.dtype)
            }
            Transform::Rows { first } => {
                let info = self.tensor(source, 0)?;
                let row = self.row_bytes(decl, source)?;
                let start = first.checked_mul(row).unwrap_or(u64::MAX);
                let end = start.saturating_add(wanted);
                if info.dtype != source.dtype || end > info.bytes {
                    return Err(mismatch(info, source.dtype, end));
                }
                self.range(info, start, wanted, source.dtype)
            }
            Transform::Stack => self.stack(decl, source, wanted).map(Material::Owned),
            Transform::ExpertRows { first } => self.expert_rows(decl, source, *first, wanted).map(Material::Owned),
            Transform::ToF32 => self.to_f32(decl, source, wanted).map(Material::Owned),
            Transform::MergeKvB { num_heads, nope_dim, value_dim } => {
                let sizes = [*num_heads, *nope_dim, *value_dim];
                self.merge_kv_b(decl, source, sizes, wanted).map(Material::Owned)
            }
        }
    }

    /// Bytes of the weight in its declared type; also a bound on what is allocated for it.
    fn wanted_bytes(&self, decl: &WeightDecl, source: &WeightSource) -> Result<u64, RuntimeError> {
        let elements = decl.shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
        elements.and_then(|n| source.dtype.bytes_for(n)).ok_or_else(|| RuntimeError::Weight {
            name: decl.name.clone(),
            expected: "a size below 2^64 bytes".into(),
            found: format!("{:?} of {}", decl.shape, source.dtype.name()),
        })
    }

    fn row_bytes(&self, decl: &WeightDecl, source: &WeightSource) -> Result<u64, RuntimeError> {
        let columns = decl.shape.last().copied().unwrap_or(1);
        source.dtype.bytes_for(columns).ok_or_else(|| RuntimeError::Weight {
            name: decl.name.clone(),
            expected: format!("rows of whole blocks of {}", source.dtype.name()),
            found: format!("{columns} columns"),
        })
    }

    fn tensor(&self, source: &WeightSource, i: usize) -> Result<&TensorInfo, RuntimeError> {
        let name = source.tensors.get(i).map_or("", String::as_str);
        self.checkpoint.info(name).ok_or_else(|| RuntimeError::Weight {
            name: name.to_owned(),
            expected: "a tensor of that name".into(),
            found: format!("none in {}", self.checkpoint.path().display()),
        })
    }

    /// Bytes of a tensor; copied only if the file does not align them for the type.
    fn range(&self, info: &TensorInfo, start: u64, len: u64, dtype: DType) -> Result<Material, RuntimeError> {
        let mapping = self.checkpoint.mapping(info.shard).ok_or_else(|| mismatch(info, dtype, len))?;
        let begin = info.offset.checked_add(start);
        let range =
            begin.and_then(|begin| Some(usize::try_from(begin).ok()?..usize::try_from(begin.checked_add(len)?).ok()?));
        let range = range.ok_or_else(|| mismatch(info, dtype, len))?;
        let bytes = mapping.get(range.clone()).ok_or_else(|| mismatch(info, dtype, len))?;
        if range_is_aligned(bytes, dtype) {
            return Ok(Material::Mapped(MappedRange { mapping, range }));
        }
        let mut owned = Owned::zeroed(bytes.len());
        owned.bytes_mut().copy_from_slice(bytes);
        Ok(Material::Owned(owned))
    }

    fn data(&self, info: &TensorInfo) -> Result<&[u8], RuntimeError> {
        self.checkpoint.tensor(&info.name).map(|view| view.data).ok_or_else(|| mismatch(info, info.dtype, info.bytes))
    }

    fn stack(&self, decl: &WeightDecl, source: &WeightSource, wanted: u64) -> Result<Owned, RuntimeError> {
        let parts = source.tensors.len() as u64;
        if parts == 0 || !wanted.is_multiple_of(parts) {
            return Err(RuntimeError::Weight {
                name: decl.name.clone(),
                expected: format!("tensors that together have {wanted} bytes"),
                found: format!("{parts} tensors of one size"),
            });
        }
        let part = wanted / parts;
        // All parts are checked before memory is taken: so the files bound what is taken.
        let infos = (0..source.tensors.len()).map(|i| {
            let info = self.tensor(source, i)?;
            check_size(info, source.dtype, part)?;
            Ok(info)
        });
        let infos = infos.collect::<Result<Vec<_>, RuntimeError>>()?;
        let mut owned = Owned::zeroed(wanted as usize);
        for (info, chunk) in infos.into_iter().zip(owned.bytes_mut().chunks_exact_mut(part.max(1) as usize)) {
            chunk.copy_from_slice(self.data(info)?);
            self.checkpoint.release(info);
        }
        Ok(owned)
    }

    fn expert_rows(
        &self,
        decl: &WeightDecl,
        source: &WeightSource,
        first: u64,
        wanted: u64,
    ) -> Result<Owned, RuntimeError> {
        let info = self.tensor(source, 0)?;
        let row = self.row_bytes(decl, source)?;
        let [experts, rows, _] = *decl.shape.as_slice() else { return Err(mismatch(info, source.dtype, wanted)) };
        let stored_rows = info.shape.get(1).copied().unwrap_or(0);
        let fits = info.dtype == source.dtype
            && info.shape.first() == Some(&experts)
            && first.checked_add(rows).is_some_and(|end| end <= stored_rows)
            && experts.checked_mul(stored_rows).and_then(|n| n.checked_mul(row)) == Some(info.bytes);
        if !fits {
            return Err(mismatch(info, source.dtype, wanted));
        }
        let data = self.data(info)?;
        let mut owned = Owned::zeroed(wanted as usize);
        let per_expert = (rows * row) as usize;
        for (expert, chunk) in owned.bytes_mut().chunks_exact_mut(per_expert.max(1)).enumerate() {
            let start = ((expert as u64 * stored_rows + first) * row) as usize;
            chunk.copy_from_slice(&data[start..start + per_expert]);
        }
        Ok(owned)
    }

    fn to_f32(&self, decl: &WeightDecl, source: &WeightSource, wanted: u64) -> Result<Owned, RuntimeError> {
        let info = self.tensor(source, 0)?;
        let elements = wanted / 4;
        if source.dtype != DType::F32 || info.dtype.bytes_for(elements) != Some(info.bytes) {
            return Err(mismatch(info, source.dtype, wanted));
        }
        let mut owned = Owned::zeroed(wanted as usize);
        let values: &mut [f32] = bytemuck::cast_slice_mut(owned.bytes_mut());
        if let Some(scale) = source.tensors.get(1) {
            let scale = self.f32_values(scale)?;
            let [rows, columns] = *decl.shape.as_slice() else { return Err(mismatch(info, source.dtype, wanted)) };
            let (rows, columns) = (rows as usize, columns as usize);
            blocks::dequantize_fp8_block(self.data(info)?, &scale, rows, columns, 128, 128, values)?;
        } else {
            blocks::dequantize(info.dtype, self.data(info)?, values)?;
        }
        Ok(owned)
    }

    fn f32_values(&self, name: &str) -> Result<Vec<f32>, RuntimeError> {
        let info = self.checkpoint.info(name).ok_or_else(|| RuntimeError::Weight {
            name: name.to_owned(),
            expected: "a tensor of that name".into(),
            found: "none".into(),
        })?;
        let elements = info.shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
        let elements = elements.filter(|n| info.dtype.bytes_for(*n) == Some(info.bytes));
        let mut values = vec![0.0; elements.ok_or_else(|| mismatch(info, info.dtype, info.bytes))? as usize];
        blocks::dequantize(info.dtype, self.data(info)?, &mut values)?;
        Ok(values)
    }

    fn merge_kv_b(
        &self,
        decl: &WeightDecl,
        source: &WeightSource,
        [heads, nope, value]: [u64; 3],
        wanted: u64,
    ) -> Result<Owned, RuntimeError> {
        let info = self.tensor(source, 0)?;
        let latent = decl.shape.last().copied().unwrap_or(0);
        let k = self.f32_values(&info.name)?;
        let v = self.f32_values(&self.tensor(source, 1)?.name)?;
        let elements = |rows: u64| heads.checked_mul(rows)?.checked_mul(latent).filter(|n| *n > 0);
        let fits = elements(nope) == Some(k.len() as u64)
            && elements(value) == Some(v.len() as u64)
            && (k.len() as u64 + v.len() as u64) * 4 == wanted;
        if !fits {
            return Err(mismatch(info, source.dtype, wanted));
        }
        let mut owned = Owned::zeroed(wanted as usize);
        let out: &mut [f32] = bytemuck::cast_slice_mut(owned.bytes_mut());
        let [heads, nope, value, latent] = [heads, nope, value, latent].map(|n| n as usize);
        for head in 0..heads {
            let rows = &mut out[head * (nope + value) * latent..][..(nope + value) * latent];
            let (keys, values) = rows.split_at_mut(nope * latent);
            let stored = &k[head * latent * nope..][..latent * nope];
            for (i, row) in keys.chunks_exact_mut(latent).enumerate() {
                for (j, x) in row.iter_mut().enumerate() {
                    *x = stored[j * nope + i];
                }
            }
            values.copy_from_slice(&v[head * value * latent..][..value * latent]);
        }
        Ok(owned)
    }
}

/// Host bytes as device memory: where they are if the device can read them there, or else copied.
fn to_device(device: &Device, stream: &Stream, owner: HostOwner, name: String) -> Result<Slice, RuntimeError> {
    if device.caps().has(QHAL_FEATURE_IMPORT_HOST) {
        return Ok(device.import_host(owner, QHAL_USAGE_WEIGHT, &name)?.whole());
    }
    let bytes = (*owner).as_ref();
    let buffer = device.alloc(&BufferDesc::new(bytes.len() as u64, QHAL_USAGE_WEIGHT, Scope::Persistent, name))?;
    stream.copy_from_host(bytes, &buffer.whole())?;
    Ok(buffer.whole())
}

/// Whether values of a type may be read where they lie.
fn range_is_aligned(bytes: &[u8], dtype: DType) -> bool {
    let alignment = if dtype.is_block_quantised() { 2 } else { dtype.block_bytes() };
    (bytes.as_ptr() as usize).is_multiple_of(alignment.max(1))
}

fn check_size(info: &TensorInfo, dtype: DType, wanted: u64) -> Result<(), RuntimeError> {
    if info.dtype == dtype && info.bytes == wanted { Ok(()) } else { Err(mismatch(info, dtype, wanted)) }
}

fn mismatch(info: &TensorInfo, dtype: DType, bytes: u64) -> RuntimeError {
    RuntimeError::Weight {
        name: info.name.clone(),
        expected: format!("{bytes} bytes of {}", dtype.name()),
        found: format!("{} bytes of {} {:?}", info.bytes, info.dtype.name(), info.shape),
    }
}

#[cfg(test)]
mod tests;
