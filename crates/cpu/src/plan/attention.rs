//! Ops on the paged cache: kv append, attention, latent attention.

use qwen_formats::DType;
use qwen_hal_abi::ops;

use super::Facts;
use super::dense::MAX_SIZE;
use super::desc::{Desc, In, Mat, Out, Place, Vector};
use super::launch::Launch;
use crate::api::Failure;
use crate::kernels::cache::{CacheView, CacheViewMut};
use crate::kernels::kv_append::{self, KvAppendArgs};

/// Types of a cache.
const CACHE: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// A paged cache: rows are blocks.
fn parse_cache(desc: &Desc<'_>, place: Place, block_size: usize, values: usize) -> Result<Mat, Failure> {
    let cache = desc.mat_fixed(place, &CACHE)?;
    let expected =
        block_size.checked_mul(values).ok_or_else(|| desc.refuse("a cache block beyond the address space"))?;
    desc.expect("elements of a cache block", cache.fixed_cols(), expected)?;
    Ok(cache)
}

/// Bytes from block to block, and blocks.
fn block_geometry(launch: &Launch<'_>, cache: &Mat) -> Result<(usize, usize), Failure> {
    Ok((cache.stride * cache.dtype.block_bytes(), launch.extent(cache.rows)?))
}

#[derive(Debug, Clone)]
pub(crate) struct KvAppend {
    keys: Mat,
    values: Mat,
    slots: Vector,
    args: KvAppendArgs,
    cache: Mat,
}

impl KvAppend {
    pub(super) fn parse(desc: &Desc<'_>) -> Result<Self, Failure> {
        desc.operands(3, 1)?;
        let args = KvAppendArgs {
            num_key_value_heads: desc.size(ops::QHAL_ATTR_NUM_KV_HEADS, "NUM_KV_HEADS", MAX_SIZE)?,
            head_dim: desc.size(ops::QHAL_ATTR_HEAD_DIM, "HEAD_DIM", MAX_SIZE)?,
            value_dim: desc.size(ops::QHAL_ATTR_VALUE_DIM, "VALUE_DIM", MAX_SIZE)?,
            block_size: desc.size(ops::QHAL_ATTR_BLOCK_SIZE, "BLOCK_SIZE", MAX_SIZE)?,
            joined: desc.flag(ops::QHAL_ATTR_JOINED, "JOINED", false)?,
        };
        let (keys, values, slots) = (desc.f32(In(0))?, desc.f32(In(1))?, desc.vector(In(2), DType::I32)?);
        let heads = args.num_key_value_heads;
        desc.expect("columns of k", keys.fixed_cols(), heads * args.head_dim)?;
        desc.expect("columns of v", values.fixed_cols(), heads * args.value_dim)?;
        desc.same("rows of k and v", keys.rows, values.rows)?;
        desc.same("rows and slots", keys.rows, slots.len)?;
        if args.joined {
            desc.expect("heads of a joined cache", heads, 1)?;
        }
        let cache = parse_cache(desc, Out(0), args.block_size, heads * (args.head_dim + args.value_dim))?;
        Ok(Self { keys, values, slots, args, cache })
    }
    pub(super) fn facts(&self) -> Facts {
        let read = self.keys.expected_bytes() + self.values.expected_bytes();
        let written = read * self.cache.dtype.block_bytes() as f64 / 4.0;
        Facts::new(format!("kv_append.{}", self.cache.dtype)).traffic(0.0, read, written)
    }
    pub(super) fn launch(&self, launch: &Launch<'_>) -> Result<(), Failure> {
        let (keys, values, slots) = (launch.mat(&self.keys)?, launch.mat(&self.values)?, launch.vector(&self.slots)?);
        let cache = cache_mut(launch, &self.cache)?;
        Ok(kv_append::kv_append(launch.isa, launch.parallel, &self.args, keys, values, slots, cache)?)
    }
}

fn cache_mut<'a>(launch: &Launch<'a>, cache: &Mat) -> Result<CacheViewMut<'a>, Failure> {
    let (block_bytes, blocks) = block_geometry(launch, cache)?;
    let at = launch.address(cache, true)?;
    // SAFETY: the blocks lie within a living, writable buffer that nobody else uses meanwhile.
    Ok(unsafe { CacheViewMut::from_raw(at, cache.dtype, block_bytes, blocks) })
}

fn cache_ref<'a>(launch: &Launch<'a>, cache: &Mat) -> Result<CacheView<'a>, Failure> {
    let (block_bytes, blocks) = block_geometry(launch, cache)?;
    let at = launch.address(cache, false)?;
    // SAFETY: the blocks lie within a living buffer that nobody writes meanwhile.
    Ok(unsafe { CacheView::from_raw(at, cache.dtype, block_bytes, blocks) })
}
