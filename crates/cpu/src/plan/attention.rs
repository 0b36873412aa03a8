//! Ops on the paged cache: kv append, attention, latent attention.

use qwen_formats::DType;
use qwen_hal_abi::ops;

use super::Facts;
use super::dense::MAX_SIZE;
use super::desc::{Desc, Extent, In, Mat, Out, Place, Vector};
use super::launch::Launch;
use crate::api::Failure;
use crate::kernels::attention::{self, AttentionArgs, Products, Sequences, StepLimits};
use crate::kernels::cache::{CacheView, CacheViewMut};
use crate::kernels::kv_append::{self, KvAppendArgs};
use crate::kernels::mla::{self, KvB, MlaArgs, MlaForm};

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

/// Operands that say which query rows and cached positions belong to which sequence.
#[derive(Debug, Clone)]
struct Paging {
    query_start: Vector,
    context_len: Vector,
    block_table: Mat,
}

impl Paging {
    /// Operands `first..first + 3`.
    fn parse(desc: &Desc<'_>, first: usize) -> Result<Self, Failure> {
        let paging = Self {
            query_start: desc.vector(In(first), DType::I32)?,
            context_len: desc.vector(In(first + 1), DType::I32)?,
            block_table: desc.mat(In(first + 2), &[DType::I32])?,
        };
        desc.same("query_start and context_len", paging.query_start.len, paging.context_len.len)?;
        desc.same("rows of block_table and context_len", paging.block_table.rows, paging.context_len.len)?;
        Ok(paging)
    }

    fn limits(&self, threads: usize, tokens: usize, block_size: usize) -> StepLimits {
        let max_context = self.block_table.cols.max.saturating_mul(block_size);
        StepLimits { threads, sequences: self.context_len.len.max, tokens, max_context }
    }

    fn bind<'a>(&self, launch: &Launch<'a>) -> Result<Sequences<'a>, Failure> {
        Ok(Sequences {
            query_start: launch.vector_and_end(&self.query_start)?,
            context_len: launch.vector(&self.context_len)?,
            block_table: launch.mat(&self.block_table)?,
        })
    }
}

/// A window in tokens, 0 for none.
fn parse_window(desc: &Desc<'_>) -> Result<usize, Failure> {
    let window = desc.int_or(ops::QHAL_ATTR_WINDOW, "WINDOW", 0)?;
    usize::try_from(window).map_err(|_| desc.refuse(format!("WINDOW {window}, expected 0 or more")))
}

#[derive(Debug, Clone)]
pub(crate) struct Attention {
    q: Mat,
    cache: Mat,
    paging: Paging,
    args: AttentionArgs,
    out: Mat,
    workspace: usize,
}

impl Attention {
    /// Rows of queries, and tokens of a sequence up to which values are read where they are cached.
    pub(super) const fn deciding_rows(&self) -> (Extent, usize) {
        (self.q.rows, self.args.in_place_tokens())
    }
    /// How products of a cache in pairs are formed.
    pub(super) fn pairs(&self) -> Option<Products> {
        self.args.has_pairs(self.cache.dtype).then_some(self.args.products)
    }
    pub(super) fn parse(desc: &Desc<'_>, threads: usize) -> Result<Self, Failure> {
        desc.operands(5, 1)?;
        let args = AttentionArgs {
            num_heads: desc.size(ops::QHAL_ATTR_NUM_HEADS, "NUM_HEADS", MAX_SIZE)?,
            num_key_value_heads: desc.size(ops::QHAL_ATTR_NUM_KV_HEADS, "NUM_KV_HEADS", MAX_SIZE)?,
            head_dim: desc.size(ops::QHAL_ATTR_HEAD_DIM, "HEAD_DIM", MAX_SIZE)?,
            value_dim: desc.size(ops::QHAL_ATTR_VALUE_DIM, "VALUE_DIM", MAX_SIZE)?,
            block_size: desc.size(ops::QHAL_ATTR_BLOCK_SIZE, "BLOCK_SIZE", MAX_SIZE)?,
            scale: desc.real_or(ops::QHAL_ATTR_SCALE, "SCALE", None)?,
            window: parse_window(desc)?,
            products: match desc.compute() {
                ops::QHAL_COMPUTE_F32 => Products::F32,
                ops::QHAL_COMPUTE_BF16 => Products::Bf16,
                other => return Err(desc.refuse(format!("form {other} of products"))),
            },
        };
        let (q, out) = (desc.f32(In(0))?, desc.f32(Out(0))?);
        let heads = args.num_key_value_heads;
        if !args.num_heads.is_multiple_of(heads) {
            return Err(desc.refuse(format!("{} query heads for {heads} key/value heads", args.num_heads)));
        }
        desc.expect("columns of q", q.fixed_cols(), args.num_heads * args.head_dim)?;
        desc.expect("output columns", out.fixed_cols(), args.num_heads * args.value_dim)?;
        desc.same("rows", q.rows, out.rows)?;
        let cache = parse_cache(desc, In(1), args.block_size, heads * (args.head_dim + args.value_dim))?;
        if args.products == Products::Bf16 && !args.has_pairs(cache.dtype) {
            return Err(desc.refuse(
                "products of bfloat16 need a bfloat16 cache with blocks of a multiple of 16 tokens, keys of an even number of \
                 elements and values of a multiple of 16",
            ));
        }
        let paging = Paging::parse(desc, 2)?;
        let limits = paging.limits(threads, q.rows.max, args.block_size);
        let workspace = attention::attention_workspace_bytes(&args, &limits);
        Ok(Self { q, cache, paging, args, out, workspace })
    }
    pub(super) fn facts(&self) -> Facts {
        let args = &self.args;
        let context = self.paging.block_table.cols.expected as f64 * args.block_size as f64;
        let width = (args.head_dim + args.value_dim) as f64;
        let flops = 2.0 * self.q.rows.expected as f64 * context * args.num_heads as f64 * width;
        let cached = self.paging.context_len.len.expected as f64 * context * args.num_key_value_heads as f64 * width;
        let read = self.q.expected_bytes() + cached * self.cache.dtype.block_bytes() as f64;
        let form = if args.products == Products::Bf16 { ".pairs" } else { "" };
        let mut facts =
            Facts::new(format!("attention.{}{form}", self.cache.dtype)).traffic(flops, read, self.out.expected_bytes());
        facts.workspace_bytes = self.workspace;
        facts
    }
    pub(super) fn launch(&self, launch: &Launch<'_>) -> Result<(), Failure> {
        let (cache, sequences) = (cache_ref(launch, &self.cache)?, self.paging.bind(launch)?);
        let (q, out) = (launch.mat(&self.q)?, launch.mat_mut(&self.out)?);
        let (isa, parallel, workspace) = (launch.isa, launch.parallel, launch.workspace(self.workspace)?);
        Ok(attention::attention(isa, parallel, &self.args, q, cache, &sequences, out, workspace)?)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct MlaAttention {
    q: Mat,
    kv_b: Mat,
    cache: Mat,
    paging: Paging,
    args: MlaArgs,
    out: Mat,
    workspace: usize,
}

impl MlaAttention {
    pub(super) fn parse(desc: &Desc<'_>, threads: usize) -> Result<Self, Failure> {
        desc.operands(6, 1)?;
        let args = MlaArgs {
            num_heads: desc.size(ops::QHAL_ATTR_NUM_HEADS, "NUM_HEADS", MAX_SIZE)?,
            nope_dim: desc.size(ops::QHAL_ATTR_NOPE_DIM, "NOPE_DIM", MAX_SIZE)?,
            rope_dim: desc.size(ops::QHAL_ATTR_ROPE_DIM, "ROPE_DIM", MAX_SIZE)?,
            value_dim: desc.size(ops::QHAL_ATTR_VALUE_DIM, "VALUE_DIM", MAX_SIZE)?,
            latent_dim: desc.size(ops::QHAL_ATTR_LATENT_DIM, "LATENT_DIM", MAX_SIZE)?,
            block_size: desc.size(ops::QHAL_ATTR_BLOCK_SIZE, "BLOCK_SIZE", MAX_SIZE)?,
            scale: desc.real_or(ops::QHAL_ATTR_SCALE, "SCALE", None)?,
            window: parse_window(desc)?,
            form: match desc.int_or(ops::QHAL_ATTR_FORM, "FORM", ops::QHAL_MLA_EXPANDED)? {
                ops::QHAL_MLA_EXPANDED => MlaForm::Expanded,
                ops::QHAL_MLA_ABSORBED => MlaForm::Absorbed,
                other => return Err(desc.refuse(format!("FORM {other}"))),
            },
        };
        let (q, kv_b, out) = (desc.f32(In(0))?, desc.mat_fixed(In(1), &CACHE)?, desc.f32(Out(0))?);
        let heads = args.num_heads;
        desc.expect("columns of q", q.fixed_cols(), heads * (args.nope_dim + args.rope_dim))?;
        desc.expect("output columns", out.fixed_cols(), heads * args.value_dim)?;
        desc.same("rows", q.rows, out.rows)?;
        desc.expect("columns of kv_b", kv_b.fixed_cols(), args.latent_dim)?;
        let rows = heads * (args.nope_dim + args.value_dim);
        if kv_b.rows.as_fixed() != Some(rows) || kv_b.stride != args.latent_dim || desc.scale_block(In(1))?.is_some() {
            return Err(desc.refuse(format!("kv_b is not {rows} dense rows without separate scales")));
        }
        let cache = parse_cache(desc, In(2), args.block_size, args.latent_dim + args.rope_dim)?;
        let paging = Paging::parse(desc, 3)?;
        let workspace = mla::mla_workspace_bytes(&args, &paging.limits(threads, q.rows.max, args.block_size));
        Ok(Self { q, kv_b, cache, paging, args, out, workspace })
    }
    pub(super) fn facts(&self) -> Facts {
        let args = &self.args;
        let context = self.paging.block_table.cols.expected as f64 * args.block_size as f64;
        let width = match args.form {
            MlaForm::Expanded => args.nope_dim + args.rope_dim + args.value_dim,
            MlaForm::Absorbed => 2 * args.latent_dim + args.rope_dim,
        };
        let flops = 2.0 * self.q.rows.expected as f64 * context * (args.num_heads * width) as f64;
        let values = self.paging.context_len.len.expected as f64 * context * (args.latent_dim + args.rope_dim) as f64;
        let read =
            self.q.expected_bytes() + self.kv_b.expected_bytes() + values * self.cache.dtype.block_bytes() as f64;
        let form = if args.form == MlaForm::Expanded { "expanded" } else { "absorbed" };
        let mut facts = Facts::new(format!("mla_attention.{form}.{}", self.cache.dtype));
        facts.workspace_bytes = self.workspace;
        facts.traffic(flops, read, self.out.expected_bytes())
    }
    pub(super) fn launch(&self, launch: &Launch<'_>) -> Result<(), Failure> {
        let bytes = self.kv_b.rows.max * self.kv_b.stride * self.kv_b.dtype.block_bytes();
        let kv_b = KvB { dtype: self.kv_b.dtype, bytes: launch.slice(self.kv_b.place, bytes)? };
        let (cache, sequences) = (cache_ref(launch, &self.cache)?, self.paging.bind(launch)?);
        let (q, out) = (launch.mat(&self.q)?, launch.mat_mut(&self.out)?);
        let (isa, parallel, workspace) = (launch.isa, launch.parallel, launch.workspace(self.workspace)?);
        Ok(mla::mla_attention(isa, parallel, &self.args, q, kv_b, cache, &sequences, out, workspace)?)
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
