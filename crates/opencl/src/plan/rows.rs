//! Ops on rows: embed, gather rows, norm, rope, glu, binary, unary, cast, copy, softmax.

use qwen_hal_abi::ops;

use super::desc::{Desc, In, MAX_DIM, Mat, Out};
use super::recipe::{Arg, Count, Recipe};
use super::types;
use crate::failure::Failure;
use crate::program::Kernels;
use crate::unit::Unit;

/// Work-items of a group that go along a row of vectors, as in `kernels/rows.cl`.
const VECTORS: usize = 16;
/// Those that go along a row of elements.
const ELEMENTS: usize = 64;
/// Those of `rope`.
const PAIRS: usize = 4;
/// Those of `embed`.
const BLOCKS: usize = 8;
/// Most heads and elements of a head; larger attributes are mistakes.
pub(super) const MAX_SIZE: usize = 1 << 20;

/// One work-item a vector of each row of `out`.
fn by_vector(unit: &Unit, out: &Mat) -> [Count; 3] {
    [Count::groups(out.fixed_cols(), unit.facts.tiling.vector, VECTORS), Count::of(out.rows), Count::fixed(1)]
}

/// One work-item an element of each row of `out`.
fn by_element(out: &Mat) -> [Count; 3] {
    [Count::groups(out.fixed_cols(), 1, ELEMENTS), Count::of(out.rows), Count::fixed(1)]
}

/// A group of work-items for each of `groups` parts of each row of `out`.
pub(super) fn by_group(unit: &Unit, groups: usize, out: &Mat) -> [Count; 3] {
    [Count::fixed(groups * unit.facts.tiling.lanes), Count::of(out.rows), Count::fixed(1)]
}

pub(super) fn embed(desc: &Desc<'_>, unit: &Unit) -> Result<Recipe, Failure> {
    desc.operands(2, 1)?;
    let tables = types::WEIGHTS.map(|weight| weight.dtype);
    let (ids, table, out) =
        (desc.vector(In(0), ops::QHAL_DTYPE_I32)?, desc.mat_fixed(In(1), &tables)?, desc.f32(Out(0))?);
    desc.same("ids and output rows", ids.len, out.rows)?;
    desc.same("columns", table.cols, out.cols)?;
    let (Some(rows), true, None) = (table.rows.as_fixed(), table.is_dense(), desc.scale_block(In(1))?) else {
        return Err(desc.refuse("a table that is not fixed, dense and without separate scales"));
    };
    let weight = types::weight_type(table.dtype).ok_or_else(|| desc.refuse("the type of the table"))?;
    let blocks = table.fixed_cols() / types::block(table.dtype).0;
    let bytes = table.bytes(&[])?;
    let global = [Count::groups(blocks, 1, BLOCKS), Count::of(out.rows), Count::fixed(1)];
    let args =
        vec![Arg::vector(&ids), Arg::mat(&table), Arg::mat(&out), Arg::int(blocks), Arg::int(rows), Arg::Stride(out)];
    let read = table.expected_bytes() / rows.max(1) as f64 * out.rows.expected as f64;
    Ok(Recipe::new(format!("embed.{}", types::name(table.dtype)))
        .with_vector(&ids)
        .with_bytes(table.place, bytes, read)
        .with(&out)
        .step(Kernels::weights(unit, weight.name, false, unit.facts.tiling.cut), "embed", args, global, BLOCKS))
}

pub(super) fn gather_rows(desc: &Desc<'_>, unit: &Unit) -> Result<Recipe, Failure> {
    desc.operands(2, 1)?;
    let (x, rows, out) = (desc.f32(In(0))?, desc.vector(In(1), ops::QHAL_DTYPE_I32)?, desc.f32(Out(0))?);
    desc.same("row numbers and output rows", rows.len, out.rows)?;
    desc.same("columns", x.cols, out.cols)?;
    let args = vec![
        Arg::mat(&x),
        Arg::vector(&rows),
        Arg::mat(&out),
        Arg::int(out.fixed_cols()),
        Arg::Size(x.rows),
        Arg::Stride(x),
        Arg::Stride(out),
    ];
    let global = by_vector(unit, &out);
    Ok(Recipe::new("gather_rows").with(&x).with_vector(&rows).with(&out).step(
        Kernels::rows(unit),
        "gather_rows",
        args,
        global,
        VECTORS,
    ))
}

pub(super) fn norm(desc: &Desc<'_>, unit: &Unit) -> Result<Recipe, Failure> {
    desc.operands(2, 1)?;
    let (x, weight, out) = (desc.f32(In(0))?, desc.mat_fixed(In(1), &types::FLOATS)?, desc.f32(Out(0))?);
    desc.same_shape(&x, &out)?;
    let axis = desc.size(ops::QHAL_ATTR_AXIS, "AXIS", None, (1, MAX_DIM))?;
    let eps = desc.real_or(ops::QHAL_ATTR_EPS, "EPS", None)?;
    if !x.fixed_cols().is_multiple_of(axis) || weight.rows.as_fixed() != Some(1) || weight.fixed_cols() != axis {
        let (cols, found) = (x.fixed_cols(), weight.fixed_cols());
        return Err(desc.refuse(format!("AXIS {axis} for {cols} columns and {found} weights")));
    }
    let args = vec![
        Arg::mat(&x),
        Arg::mat(&weight),
        Arg::mat(&out),
        Arg::int(axis),
        Arg::Stride(x),
        Arg::Stride(out),
        Arg::Int(weight.dtype as i32),
        Arg::Real(eps),
    ];
    let global = by_group(unit, x.fixed_cols() / axis, &out);
    let recipe = Recipe::new("norm").with(&x).with(&weight).with(&out).in_place(0).flops(values(&out, 4.0));
    Ok(recipe.step(Kernels::rows(unit), "norm", args, global, unit.facts.tiling.lanes))
}

/// Operations of an op that does so many for each value of a result.
fn values(out: &Mat, each: f64) -> f64 {
    out.rows.expected as f64 * out.cols.expected as f64 * each
}

pub(super) fn rope(desc: &Desc<'_>, unit: &Unit) -> Result<Recipe, Failure> {
    desc.operands(3, 1)?;
    let (x, out) = (desc.f32(In(0))?, desc.f32(Out(0))?);
    let (positions, inv_freq) = (desc.vector(In(1), ops::QHAL_DTYPE_I32)?, desc.vector(In(2), ops::QHAL_DTYPE_F32)?);
    let heads = desc.size(ops::QHAL_ATTR_NUM_HEADS, "NUM_HEADS", None, (1, MAX_SIZE))?;
    let head_dim = desc.size(ops::QHAL_ATTR_HEAD_DIM, "HEAD_DIM", None, (1, MAX_SIZE))?;
    let offset = desc.size(ops::QHAL_ATTR_ROTARY_OFFSET, "ROTARY_OFFSET", Some(0), (0, MAX_SIZE))?;
    let dim = desc.size(ops::QHAL_ATTR_ROTARY_DIM, "ROTARY_DIM", None, (1, MAX_SIZE))?;
    let style = desc.code(ops::QHAL_ATTR_STYLE, "STYLE", Some(ops::QHAL_ROPE_HALF), 2)?;
    let factor = desc.real_or(ops::QHAL_ATTR_ATTENTION_FACTOR, "ATTENTION_FACTOR", Some(1.0))?;
    desc.expect("columns", x.fixed_cols(), heads * head_dim)?;
    if !dim.is_multiple_of(2) || offset + dim > head_dim {
        return Err(desc.refuse(format!("{dim} rotated elements from {offset} of a head of {head_dim}")));
    }
    desc.same_shape(&x, &out)?;
    desc.same("positions and rows", positions.len, x.rows)?;
    match inv_freq.len.as_fixed() {
        Some(n) => desc.expect("number of frequencies", n, dim / 2)?,
        None => return Err(desc.refuse("frequencies of variable number")),
    }
    let args = vec![
        Arg::mat(&x),
        Arg::vector(&positions),
        Arg::vector(&inv_freq),
        Arg::mat(&out),
        Arg::int(heads),
        Arg::int(head_dim),
        Arg::Stride(x),
        Arg::Stride(out),
        Arg::int(offset),
        Arg::int(dim / 2),
        Arg::Int(style),
        Arg::Real(factor),
    ];
    let vector = unit.facts.tiling.vector;
    let vectors = (dim / 2).div_ceil(vector) + (head_dim - dim).div_ceil(vector);
    let global = [Count::groups(vectors, 1, PAIRS), Count::of(out.rows), Count::fixed(1)];
    let recipe = Recipe::new("rope").with(&x).with_vector(&positions).with_vector(&inv_freq).with(&out).in_place(0);
    Ok(recipe.flops(values(&out, 4.0)).step(Kernels::rows(unit), "rope", args, global, PAIRS))
}

pub(super) fn glu(desc: &Desc<'_>, unit: &Unit) -> Result<Recipe, Failure> {
    desc.operands(2, 1)?;
    let function = desc.code(ops::QHAL_ATTR_FUNCTION, "FUNCTION", None, 2)?;
    let (a, b, out) = (desc.f32(In(0))?, desc.f32(In(1))?, desc.f32(Out(0))?);
    desc.same_shape(&a, &b)?;
    desc.same_shape(&a, &out)?;
    let args = vec![
        Arg::mat(&a),
        Arg::mat(&b),
        Arg::mat(&out),
        Arg::int(out.fixed_cols()),
        Arg::Stride(a),
        Arg::Stride(b),
        Arg::Stride(out),
        Arg::Int(function),
    ];
    let recipe = Recipe::new("glu").with(&a).with(&b).with(&out).in_place(0).in_place(1).flops(values(&out, 12.0));
    Ok(recipe.step(Kernels::rows(unit), "glu", args, by_vector(unit, &out), VECTORS))
}

pub(super) fn binary(desc: &Desc<'_>, unit: &Unit) -> Result<Recipe, Failure> {
    desc.operands(2, 1)?;
    let function = desc.code(ops::QHAL_ATTR_FUNCTION, "FUNCTION", None, 2)?;
    let (a, b, out) = (desc.f32(In(0))?, desc.f32(In(1))?, desc.f32(Out(0))?);
    desc.same_shape(&a, &out)?;
    desc.same("rows", a.rows, b.rows)?;
    let broadcast = desc.code(ops::QHAL_ATTR_BROADCAST, "BROADCAST", Some(0), 2)?;
    let columns = if broadcast == 1 { 1 } else { a.fixed_cols() };
    desc.expect("columns of the second operand", b.fixed_cols(), columns)?;
    let args = vec![
        Arg::mat(&a),
        Arg::mat(&b),
        Arg::mat(&out),
        Arg::int(out.fixed_cols()),
        Arg::Stride(a),
        Arg::Stride(b),
        Arg::Stride(out),
        Arg::Int(function),
        Arg::Int(broadcast),
    ];
    let recipe = Recipe::new("binary").with(&a).with(&b).with(&out).in_place(0).flops(values(&out, 1.0));
    let recipe = if broadcast == 0 { recipe.in_place(1) } else { recipe };
    Ok(recipe.step(Kernels::rows(unit), "binary", args, by_vector(unit, &out), VECTORS))
}

pub(super) fn unary(desc: &Desc<'_>, unit: &Unit) -> Result<Recipe, Failure> {
    desc.operands(1, 1)?;
    let function = desc.code(ops::QHAL_ATTR_FUNCTION, "FUNCTION", None, 3)?;
    let (x, out) = (desc.f32(In(0))?, desc.f32(Out(0))?);
    desc.same_shape(&x, &out)?;
    let args = vec![
        Arg::mat(&x),
        Arg::mat(&out),
        Arg::int(out.fixed_cols()),
        Arg::Stride(x),
        Arg::Stride(out),
        Arg::Int(function),
    ];
    let recipe = Recipe::new("unary").with(&x).with(&out).in_place(0).flops(values(&out, 10.0));
    Ok(recipe.step(Kernels::rows(unit), "unary", args, by_vector(unit, &out), VECTORS))
}

pub(super) fn cast(desc: &Desc<'_>, unit: &Unit) -> Result<Recipe, Failure> {
    desc.operands(1, 1)?;
    let (x, out) = (desc.mat_fixed(In(0), &types::ALL_FLOATS)?, desc.mat_fixed(Out(0), &types::FLOATS)?);
    desc.same_shape(&x, &out)?;
    let args = vec![
        Arg::mat(&x),
        Arg::mat(&out),
        Arg::int(out.fixed_cols()),
        Arg::Stride(x),
        Arg::Stride(out),
        Arg::Int(x.dtype as i32),
        Arg::Int(out.dtype as i32),
    ];
    let recipe = Recipe::new(format!("cast.{}.{}", types::name(x.dtype), types::name(out.dtype)));
    let recipe = recipe.with(&x).with(&out).flops(values(&out, 1.0));
    let same_size = types::block(x.dtype) == types::block(out.dtype);
    let recipe = if same_size { recipe.in_place(0) } else { recipe };
    Ok(recipe.step(Kernels::rows(unit), "cast", args, by_element(&out), ELEMENTS))
}

pub(super) fn copy(desc: &Desc<'_>, unit: &Unit) -> Result<Recipe, Failure> {
    desc.operands(1, 1)?;
    let plain = [
        ops::QHAL_DTYPE_I8,
        ops::QHAL_DTYPE_I32,
        ops::QHAL_DTYPE_I64,
        ops::QHAL_DTYPE_U8,
        ops::QHAL_DTYPE_F32,
        ops::QHAL_DTYPE_F16,
        ops::QHAL_DTYPE_BF16,
        ops::QHAL_DTYPE_F8_E4M3,
        ops::QHAL_DTYPE_F8_E5M2,
    ];
    let x = desc.mat_fixed(In(0), &plain)?;
    let out = desc.mat_fixed(Out(0), &[x.dtype])?;
    desc.same_shape(&x, &out)?;
    let args = vec![
        Arg::mat(&x),
        Arg::mat(&out),
        Arg::int(out.fixed_cols()),
        Arg::Stride(x),
        Arg::Stride(out),
        Arg::int(types::block(x.dtype).1),
    ];
    let recipe = Recipe::new("copy").with(&x).with(&out).in_place(0);
    Ok(recipe.step(Kernels::rows(unit), "copy", args, by_element(&out), ELEMENTS))
}

pub(super) fn softmax(desc: &Desc<'_>, unit: &Unit) -> Result<Recipe, Failure> {
    desc.operands(1, 1)?;
    let (x, out) = (desc.f32(In(0))?, desc.f32(Out(0))?);
    desc.same_shape(&x, &out)?;
    let args = vec![Arg::mat(&x), Arg::mat(&out), Arg::int(out.fixed_cols()), Arg::Stride(x), Arg::Stride(out)];
    let recipe = Recipe::new("softmax").with(&x).with(&out).in_place(0).flops(values(&out, 12.0));
    Ok(recipe.step(Kernels::rows(unit), "softmax", args, by_group(unit, 1, &out), unit.facts.tiling.lanes))
}
