//! The part of a weight that one device of a group holds.
//!
//! Rows that lie together in the file are mapped where they are; others are copied out of it, tensor by tensor. What a transform makes of a
//! weight is made whole first.

use std::ops::Range;

use qwen_formats::DType;
use qwen_ir::{Transform, WeightDecl, WeightSlice, WeightSource};

use super::{MappedRange, Material, Owned, WeightStore, check_size, range_is_aligned};
use crate::RuntimeError;

/// Where the bytes of a part lie in those of the whole: runs of one length, one stride apart.
pub(super) struct Runs {
    count: usize,
    stride: usize,
    run: Range<usize>,
}

impl Runs {
    /// Of a part in a weight of the given shape.
    pub(super) fn new(
        decl: &WeightDecl,
        whole: &[u64],
        slice: WeightSlice,
        dtype: DType,
    ) -> Result<Self, RuntimeError> {
        let find = || {
            let axis = slice.axis as usize;
            let count = decl.shape.get(axis)?;
            let product = |dims: &[u64]| dims.iter().try_fold(1_u64, |n, dim| n.checked_mul(*dim));
            let (outer, inner) = (product(whole.get(..axis)?)?, product(whole.get(axis + 1..)?)?);
            let bytes = |n: u64| usize::try_from(dtype.bytes_for(n.checked_mul(inner)?)?).ok();
            let start = bytes(slice.first)?;
            let run = start..start.checked_add(bytes(*count)?)?;
            let stride = bytes(slice.of)?;
            (run.end <= stride).then_some(Self { count: usize::try_from(outer).ok()?, stride, run })
        };
        find().ok_or_else(|| RuntimeError::Weight {
            name: decl.name.clone(),
            expected: format!("a part of whole blocks of {}", dtype.name()),
            found: format!("{:?} of {whole:?}, {slice:?}", decl.shape),
        })
    }

    pub(super) fn copy(&self, from: &[u8], to: &mut [u8]) {
        let rows = from.chunks_exact(self.stride.max(1)).take(self.count);
        for (row, out) in rows.zip(to.chunks_exact_mut(self.run.len().max(1))) {
            out.copy_from_slice(&row[self.run.clone()]);
        }
    }
}

impl WeightStore {
    /// Bytes of a part of a weight.
    pub(super) fn part(
        &self,
        decl: &WeightDecl,
        source: &WeightSource,
        slice: WeightSlice,
    ) -> Result<Material, RuntimeError> {
        let wanted = self.wanted_bytes(decl, source)?;
        let shape = decl.whole_shape();
        if source.transform == Transform::Stack && slice.axis > 0 {
            return self.part_of_stack(decl, source, slice, wanted).map(Material::Owned);
        }
        let runs = Runs::new(decl, &shape, slice, source.dtype)?;
        let whole = WeightDecl {
            name: decl.name.clone(),
            shape,
            sources: Vec::new(),
            first_layer: decl.first_layer,
            slice: None,
        };
        let material = self.materialise(&whole, source)?;
        if let (Material::Mapped(MappedRange { mapping, range }), 1) = (&material, runs.count) {
            let part = range.start + runs.run.start..range.start + runs.run.end;
            if mapping.get(part.clone()).is_some_and(|bytes| range_is_aligned(bytes, source.dtype)) {
                return Ok(Material::Mapped(MappedRange { mapping: mapping.clone(), range: part }));
            }
        }
        let mut owned = Owned::zeroed(wanted as usize);
        match &material {
            Material::Mapped(range) => runs.copy(range.as_ref(), owned.bytes_mut()),
            Material::Owned(whole) => runs.copy(whole.as_ref(), owned.bytes_mut()),
        }
        Ok(Material::Owned(owned))
    }

    /// Of experts that are stored one by one: a part of each.
    fn part_of_stack(
        &self,
        decl: &WeightDecl,
        source: &WeightSource,
        slice: WeightSlice,
        wanted: u64,
    ) -> Result<Owned, RuntimeError> {
        let experts = source.tensors.len();
        let slice = WeightSlice { axis: slice.axis - 1, ..slice };
        let one = WeightDecl {
            name: decl.name.clone(),
            shape: decl.shape.get(1..).unwrap_or_default().to_vec(),
            sources: Vec::new(),
            first_layer: decl.first_layer,
            slice: Some(slice),
        };
        let whole = one.whole_shape();
        let bytes = whole.iter().try_fold(1_u64, |n, dim| n.checked_mul(*dim));
        let bytes = bytes.and_then(|elements| source.dtype.bytes_for(elements)).unwrap_or(u64::MAX);
        let runs = Runs::new(&one, &whole, slice, source.dtype)?;
        if decl.shape.first() != Some(&(experts as u64)) {
            return Err(RuntimeError::Weight {
                name: decl.name.clone(),
                expected: format!("{:?} tensors", decl.shape.first()),
                found: experts.to_string(),
            });
        }
        let infos = (0..experts).map(|i| {
            let info = self.tensor(source, i)?;
            check_size(info, source.dtype, bytes)?;
            Ok(info)
        });
        let infos = infos.collect::<Result<Vec<_>, RuntimeError>>()?;
        let mut owned = Owned::zeroed(wanted as usize);
        let chunk = runs.count * runs.run.len();
        for (info, out) in infos.into_iter().zip(owned.bytes_mut().chunks_exact_mut(chunk.max(1))) {
            runs.copy(self.data(info)?, out);
            self.checkpoint.release(info);
        }
        Ok(owned)
    }
}
