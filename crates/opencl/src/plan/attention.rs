//! Ops on the paged cache: kv append, attention, latent attention.

use qwen_hal_abi::ops;

use super::desc::{Desc, In, MAX_DIM, Mat, Out, Place, Vector};
use super::recipe::{Arg, Count, Recipe};
use super::rows::{MAX_SIZE, by_group};
use super::types;
use crate::failure::Failure;
use crate::program::Kernels;
use crate::unit::Unit;

/// Work-items of a group of `kv_append`, and of the projections of latent attention, as in `kernels/attention.cl`.
const VECTORS: usize = 8;
const PROJECTED: usize = 8;
/// Longest head that a work-item keeps a result of.
const MAX_HEAD: usize = 1 << 12;

/// A paged cache: rows are blocks.
fn parse_cache(desc: &Desc<'_>, place: Place, block_size: usize, values: usize) -> Result<Mat, Failure> {
    let cache = desc.mat_fixed(place, &types::FLOATS)?;
    let expected = block_size.checked_mul(values).filter(|n| *n <= MAX_DIM);
    let expected = expected.ok_or_else(|| desc.refuse("a cache block beyond 2^31 elements"))?;
    desc.expect("elements of a cache block", cache.fixed_cols(), expected)?;
    Ok(cache)
}

fn cache_option(cache: &Mat) -> String {
    format!("-DCACHE={}", cache.dtype)
}

pub(super) fn kv_append(desc: &Desc<'_>, unit: &Unit) -> Result<Recipe, Failure> {
    desc.operands(3, 1)?;
    let size = |key, what| desc.size(key, what, None, (1, MAX_SIZE));
    let heads = size(ops::QHAL_ATTR_NUM_KV_HEADS, "NUM_KV_HEADS")?;
    let head_dim = size(ops::QHAL_ATTR_HEAD_DIM, "HEAD_DIM")?;
    let value_dim = size(ops::QHAL_ATTR_VALUE_DIM, "VALUE_DIM")?;
    let block_size = size(ops::QHAL_ATTR_BLOCK_SIZE, "BLOCK_SIZE")?;
    let joined = desc.code(ops::QHAL_ATTR_JOINED, "JOINED", Some(0), 2)? == 1;
    let (keys, values, slots) = (desc.f32(In(0))?, desc.f32(In(1))?, desc.vector(In(2), ops::QHAL_DTYPE_I32)?);
    desc.expect("columns of k", keys.fixed_cols(), heads * head_dim)?;
    desc.expect("columns of v", values.fixed_cols(), heads * value_dim)?;
    desc.same("rows of k and v", keys.rows, values.rows)?;
    desc.same("rows and slots", keys.rows, slots.len)?;
    if joined {
        desc.expect("heads of a joined cache", heads, 1)?;
    }
    let cache = parse_cache(desc, Out(0), block_size, heads * (head_dim + value_dim))?;
    let args = vec![
        Arg::mat(&keys),
        Arg::mat(&values),
        Arg::vector(&slots),
        Arg::mat(&cache),
        Arg::int(heads),
        Arg::int(head_dim),
        Arg::int(value_dim),
        Arg::int(block_size),
        Arg::Stride(keys),
        Arg::Stride(values),
        Arg::flag(joined),
        Arg::Size(cache.rows),
        Arg::Stride(cache),
        Arg::Int(cache.dtype as i32),
        Arg::Faults,
    ];
    let elements = heads * (head_dim + value_dim);
    let vector = unit.facts.tiling.vector;
    let vectors = heads * (head_dim.div_ceil(vector) + value_dim.div_ceil(vector));
    let global = [Count::groups(vectors, 1, VECTORS), Count::of(keys.rows), Count::fixed(1)];
    let mut recipe = Recipe::new(format!("kv_append.{}", types::name(cache.dtype)));
    recipe = recipe.with(&keys).with(&values).with_vector(&slots).with(&cache);
    // A few tokens of the cache are written, not all of it.
    recipe.bytes_written = (keys.rows.expected * elements * types::block(cache.dtype).1) as f64;
    Ok(recipe.step(Kernels::rows(unit), "kv_append", args, global, VECTORS))
}

/// Operands that say which query rows and cached positions belong to which sequence.
struct Paging {
    query_start: Vector,
    context_len: Vector,
    block_table: Mat,
}

impl Paging {
    /// Operands `first..first + 3`.
    fn parse(desc: &Desc<'_>, first: usize) -> Result<Self, Failure> {
        let paging = Self {
            query_start: desc.vector(In(first), ops::QHAL_DTYPE_I32)?,
            context_len: desc.vector(In(first + 1), ops::QHAL_DTYPE_I32)?,
            block_table: desc.mat(In(first + 2), &[ops::QHAL_DTYPE_I32])?,
        };
        desc.same("query_start and context_len", paging.query_start.len, paging.context_len.len)?;
        desc.same("rows of block_table and context_len", paging.block_table.rows, paging.context_len.len)?;
        Ok(paging)
    }

    fn needs(&self, recipe: Recipe) -> Recipe {
        recipe.with_longer(&self.query_start, 1).with_vector(&self.context_len).with(&self.block_table)
    }

    /// Cached positions that sequences have at the expected sizes, one and all.
    fn context(&self, block_size: usize) -> (f64, f64) {
        let one = self.block_table.cols.expected as f64 * block_size as f64;
        (one, one * self.context_len.len.expected as f64)
    }
}

/// What the kernel `attention` is called with.
struct Call<'a> {
    q: Arg,
    q_stride: Arg,
    cache: &'a Mat,
    paging: &'a Paging,
    out: Arg,
    out_stride: Arg,
    heads: usize,
    kv_heads: usize,
    block_size: usize,
    joined: bool,
    window: usize,
    scale: f32,
}

impl Call<'_> {
    fn args(&self) -> Vec<Arg> {
        let paging = self.paging;
        vec![
            self.q,
            Arg::mat(self.cache),
            Arg::vector(&paging.query_start),
            Arg::vector(&paging.context_len),
            Arg::mat(&paging.block_table),
            self.out,
            self.q_stride,
            self.out_stride,
            Arg::Size(paging.context_len.len),
            Arg::Stride(paging.block_table),
            Arg::Size(paging.block_table.cols),
            Arg::int(self.heads / self.kv_heads),
            Arg::int(self.block_size),
            Arg::Size(self.cache.rows),
            Arg::Stride(*self.cache),
            Arg::flag(self.joined),
            Arg::int(self.kv_heads),
            Arg::int(self.window),
            Arg::Real(self.scale),
            Arg::Faults,
        ]
    }
}

/// A window in tokens, 0 for none.
fn window(desc: &Desc<'_>) -> Result<usize, Failure> {
    desc.size(ops::QHAL_ATTR_WINDOW, "WINDOW", Some(0), (0, MAX_DIM))
}

/// Positions are counted in 32 bits.
fn check_context(desc: &Desc<'_>, paging: &Paging, block_size: usize) -> Result<(), Failure> {
    let most = paging.block_table.cols.max.checked_mul(block_size).filter(|n| *n <= MAX_DIM);
    most.map(|_| ()).ok_or_else(|| desc.refuse("a block table of more than 2^31 positions"))
}

pub(super) fn attention(desc: &Desc<'_>, unit: &Unit) -> Result<Recipe, Failure> {
    desc.operands(5, 1)?;
    if desc.compute() != ops::QHAL_COMPUTE_F32 {
        let form = desc.compute();
        return Err(desc.refuse(format!("form {form} of products, expected float32 ({})", ops::QHAL_COMPUTE_F32)));
    }
    let size = |key, what, max| desc.size(key, what, None, (1, max));
    let heads = size(ops::QHAL_ATTR_NUM_HEADS, "NUM_HEADS", MAX_SIZE)?;
    let kv_heads = size(ops::QHAL_ATTR_NUM_KV_HEADS, "NUM_KV_HEADS", MAX_SIZE)?;
    let head_dim = size(ops::QHAL_ATTR_HEAD_DIM, "HEAD_DIM", MAX_HEAD)?;
    let value_dim = size(ops::QHAL_ATTR_VALUE_DIM, "VALUE_DIM", MAX_HEAD)?;
    let block_size = size(ops::QHAL_ATTR_BLOCK_SIZE, "BLOCK_SIZE", MAX_SIZE)?;
    let (scale, window) = (desc.real_or(ops::QHAL_ATTR_SCALE, "SCALE", None)?, window(desc)?);
    let (q, out) = (desc.f32(In(0))?, desc.f32(Out(0))?);
    if !heads.is_multiple_of(kv_heads) {
        return Err(desc.refuse(format!("{heads} query heads for {kv_heads} key/value heads")));
    }
    desc.expect("columns of q", q.fixed_cols(), heads * head_dim)?;
    desc.expect("output columns", out.fixed_cols(), heads * value_dim)?;
    desc.same("rows", q.rows, out.rows)?;
    let cache = parse_cache(desc, In(1), block_size, kv_heads * (head_dim + value_dim))?;
    let paging = Paging::parse(desc, 2)?;
    check_context(desc, &paging, block_size)?;
    let call = Call {
        q: Arg::mat(&q),
        q_stride: Arg::Stride(q),
        cache: &cache,
        paging: &paging,
        out: Arg::mat(&out),
        out_stride: Arg::Stride(out),
        heads,
        kv_heads,
        block_size,
        joined: false,
        window,
        scale,
    };
    let (context, all) = paging.context(block_size);
    let width = (head_dim + value_dim) as f64;
    let mut recipe = Recipe::new(format!("attention.{}", types::name(cache.dtype)));
    recipe = paging.needs(recipe.with(&q).with(&cache)).with(&out);
    recipe.flops = 2.0 * q.rows.expected as f64 * context * heads as f64 * width;
    recipe.bytes_read = q.expected_bytes() + all * kv_heads as f64 * width * types::block(cache.dtype).1 as f64;
    let options = format!("{} -DKEY_DIM={head_dim} -DVALUE_DIM={value_dim}", cache_option(&cache));
    let kernels = Kernels::attention(unit, &options);
    Ok(recipe.step(kernels, "attention", call.args(), by_group(unit, heads, &out), unit.facts.tiling.lanes))
}

/// Both forms are computed as the absorbed one: they are equal but for rounding.
pub(super) fn mla_attention(desc: &Desc<'_>, unit: &Unit) -> Result<Recipe, Failure> {
    desc.operands(6, 1)?;
    let size = |key, what, max| desc.size(key, what, None, (1, max));
    let heads = size(ops::QHAL_ATTR_NUM_HEADS, "NUM_HEADS", MAX_SIZE)?;
    let nope = size(ops::QHAL_ATTR_NOPE_DIM, "NOPE_DIM", MAX_HEAD)?;
    let rope = size(ops::QHAL_ATTR_ROPE_DIM, "ROPE_DIM", MAX_HEAD)?;
    let value_dim = size(ops::QHAL_ATTR_VALUE_DIM, "VALUE_DIM", MAX_HEAD)?;
    let latent = size(ops::QHAL_ATTR_LATENT_DIM, "LATENT_DIM", MAX_HEAD)?;
    let block_size = size(ops::QHAL_ATTR_BLOCK_SIZE, "BLOCK_SIZE", MAX_SIZE)?;
    let (scale, window) = (desc.real_or(ops::QHAL_ATTR_SCALE, "SCALE", None)?, window(desc)?);
    desc.code(ops::QHAL_ATTR_FORM, "FORM", Some(ops::QHAL_MLA_EXPANDED), 2)?;
    let (q, kv_b, out) = (desc.f32(In(0))?, desc.mat_fixed(In(1), &types::FLOATS)?, desc.f32(Out(0))?);
    desc.expect("columns of q", q.fixed_cols(), heads * (nope + rope))?;
    desc.expect("output columns", out.fixed_cols(), heads * value_dim)?;
    desc.same("rows", q.rows, out.rows)?;
    desc.expect("columns of kv_b", kv_b.fixed_cols(), latent)?;
    let kv_rows = heads * (nope + value_dim);
    if kv_b.rows.as_fixed() != Some(kv_rows) || !kv_b.is_dense() || desc.scale_block(In(1))?.is_some() {
        return Err(desc.refuse(format!("kv_b is not {kv_rows} dense rows without separate scales")));
    }
    let cache = parse_cache(desc, In(2), block_size, latent + rope)?;
    let paging = Paging::parse(desc, 3)?;
    check_context(desc, &paging, block_size)?;

    // Workspace: absorbed queries, then weighted latents.
    let (absorbed, weighted) = (heads * (latent + rope), heads * latent);
    if absorbed > MAX_DIM {
        return Err(desc.refuse("more than 2^31 elements of an absorbed query"));
    }
    let behind = (q.rows.max * absorbed * 4) as u64;
    let kernels = Kernels::attention(
        unit,
        &format!(
            "{} -DKEY_DIM={} -DVALUE_DIM={latent} -DNOPE_DIM={nope} -DROPE_DIM={rope} -DLATENT_DIM={latent} \
             -DOUT_DIM={value_dim}",
            cache_option(&cache),
            latent + rope
        ),
    );
    let call = Call {
        q: Arg::Workspace(0),
        q_stride: Arg::int(absorbed),
        cache: &cache,
        paging: &paging,
        out: Arg::Workspace(behind),
        out_stride: Arg::int(weighted),
        heads,
        kv_heads: heads,
        block_size,
        joined: true,
        window,
        scale,
    };
    let kv_type = Arg::Int(kv_b.dtype as i32);
    let absorb = vec![Arg::mat(&q), Arg::mat(&kv_b), Arg::Workspace(0), Arg::Stride(q), kv_type];
    let expand = vec![Arg::Workspace(behind), Arg::mat(&kv_b), Arg::mat(&out), Arg::Stride(out), kv_type];
    let projected = |n: usize, per: usize| [Count::groups(n, per, PROJECTED), Count::fixed(heads), Count::of(out.rows)];
    let (context, all) = paging.context(block_size);
    let mut recipe = Recipe::new(format!("mla_attention.{}", types::name(cache.dtype)));
    recipe = paging.needs(recipe.with(&q).with(&kv_b).with(&cache)).with(&out);
    recipe.workspace_bytes = behind + (q.rows.max * weighted * 4) as u64;
    recipe.flops = 2.0 * q.rows.expected as f64 * context * (heads * (2 * latent + rope)) as f64;
    recipe.bytes_read =
        q.expected_bytes() + kv_b.expected_bytes() + all * (latent + rope) as f64 * types::block(cache.dtype).1 as f64;
    let vector = unit.facts.tiling.vector;
    Ok(recipe
        .step(kernels.clone(), "absorb", absorb, projected(latent, vector), PROJECTED)
        .step(kernels.clone(), "attention", call.args(), by_group(unit, heads, &out), unit.facts.tiling.lanes)
        .step(kernels, "expand", expand, projected(value_dim, 1), PROJECTED))
}
