//! Ops of expert layers: route, dispatch, combine.

use qwen_hal_abi::ops;

use super::desc::{Desc, In, Out};
use super::recipe::{Arg, Count, Recipe};
use super::rows::by_group;
use crate::failure::Failure;
use crate::program::Kernels;
use crate::unit::Unit;

/// Most experts, as in `kernels/experts.cl`.
const MAX_EXPERTS: usize = 1024;
/// Work-items of a group of `combine`.
const VECTORS: usize = 16;

pub(super) fn route(desc: &Desc<'_>, unit: &Unit) -> Result<Recipe, Failure> {
    desc.operands(2, 2)?;
    let logits = desc.f32(In(0))?;
    let experts = logits.fixed_cols();
    let sigmoid = desc.code(ops::QHAL_ATTR_SCORE, "SCORE", None, 2)?;
    let top_k = desc.size(ops::QHAL_ATTR_TOP_K, "TOP_K", None, (1, MAX_EXPERTS))?;
    let groups = desc.size(ops::QHAL_ATTR_NUM_GROUPS, "NUM_GROUPS", Some(1), (1, MAX_EXPERTS))?;
    let top_groups = desc.size(ops::QHAL_ATTR_TOPK_GROUP, "TOPK_GROUP", Some(1), (1, groups))?;
    let top2_sum = desc.code(ops::QHAL_ATTR_GROUP_SCORE, "GROUP_SCORE", Some(ops::QHAL_GROUP_SCORE_MAX), 2)?;
    let renormalise = desc.code(ops::QHAL_ATTR_RENORMALISE, "RENORMALISE", Some(0), 2)?;
    let scale = desc.real_or(ops::QHAL_ATTR_SCALE, "SCALE", Some(1.0))?;
    if experts > MAX_EXPERTS || !experts.is_multiple_of(groups) || top_k > experts / groups * top_groups {
        return Err(desc.refuse(format!(
            "{top_k} of {experts} experts from {top_groups} of {groups} groups, at most {MAX_EXPERTS}"
        )));
    }
    let bias = if desc.is_absent(In(1))? { None } else { Some(desc.values(In(1), Some(experts))?) };
    let (ids, weights) = (desc.mat_fixed(Out(0), &[ops::QHAL_DTYPE_I32])?, desc.f32(Out(1))?);
    for out in [&ids, &weights] {
        desc.same("rows", out.rows, logits.rows)?;
        desc.expect("experts a token", out.fixed_cols(), top_k)?;
    }
    let args = vec![
        Arg::mat(&logits),
        bias.as_ref().map_or(Arg::Absent, Arg::vector),
        Arg::mat(&ids),
        Arg::mat(&weights),
        Arg::int(experts),
        Arg::int(top_k),
        Arg::int(groups),
        Arg::int(top_groups),
        Arg::Int(top2_sum),
        Arg::Int(sigmoid),
        Arg::Int(renormalise),
        Arg::flag(bias.is_some()),
        Arg::Stride(logits),
        Arg::Stride(ids),
        Arg::Stride(weights),
        Arg::Real(scale),
    ];
    let mut recipe = Recipe::new("route").with(&logits).with(&ids).with(&weights);
    if let Some(bias) = &bias {
        recipe = recipe.with_vector(bias);
    }
    recipe.flops = logits.rows.expected as f64 * (experts * top_k) as f64;
    let lanes = unit.facts.tiling.lanes;
    Ok(recipe.step(Kernels::experts(unit), "route", args, by_group(unit, 1, &ids), lanes))
}

pub(super) fn dispatch(desc: &Desc<'_>, unit: &Unit) -> Result<Recipe, Failure> {
    desc.operands(1, 3)?;
    let vector = |place| desc.vector(place, ops::QHAL_DTYPE_I32);
    let top_k = desc.mat_fixed(In(0), &[ops::QHAL_DTYPE_I32])?.fixed_cols();
    let (ids, offsets, rows, slots) = (vector(In(0))?, vector(Out(0))?, vector(Out(1))?, vector(Out(2))?);
    desc.same("ids and rows", ids.len, rows.len)?;
    desc.same("ids and slots", ids.len, slots.len)?;
    let experts = desc.size(ops::QHAL_ATTR_NUM_EXPERTS, "NUM_EXPERTS", None, (1, MAX_EXPERTS))?;
    if offsets.len.as_fixed() != Some(experts + 1) {
        return Err(desc.refuse(format!("{} offsets for {experts} experts, expected one more", offsets.len.max)));
    }
    let args = vec![
        Arg::vector(&ids),
        Arg::vector(&offsets),
        Arg::vector(&rows),
        Arg::vector(&slots),
        Arg::Size(ids.len),
        Arg::int(top_k),
        Arg::int(experts),
        Arg::Faults,
    ];
    let lanes = unit.facts.tiling.lanes;
    let global = [Count::fixed(lanes), Count::fixed(1), Count::fixed(1)];
    let recipe = Recipe::new("dispatch").with_vector(&ids).with_vector(&offsets).with_vector(&rows).with_vector(&slots);
    Ok(recipe.step(Kernels::experts(unit), "dispatch", args, global, lanes))
}

pub(super) fn combine(desc: &Desc<'_>, unit: &Unit) -> Result<Recipe, Failure> {
    desc.operands(4, 1)?;
    let (x, slots, weights) = (desc.f32(In(0))?, desc.mat_fixed(In(1), &[ops::QHAL_DTYPE_I32])?, desc.f32(In(2))?);
    let addend = if desc.is_absent(In(3))? { None } else { Some(desc.f32(In(3))?) };
    let out = desc.f32(Out(0))?;
    desc.same("columns", x.cols, out.cols)?;
    desc.same_shape(&slots, &weights)?;
    desc.same("rows", slots.rows, out.rows)?;
    let top_k = slots.fixed_cols();
    let args = vec![
        Arg::mat(&x),
        Arg::mat(&slots),
        Arg::mat(&weights),
        Arg::optional(addend.as_ref()),
        Arg::mat(&out),
        Arg::int(out.fixed_cols()),
        Arg::int(top_k),
        Arg::Size(x.rows),
        Arg::Stride(x),
        Arg::Stride(slots),
        Arg::Stride(weights),
        addend.map_or(Arg::Int(0), Arg::Stride),
        Arg::Stride(out),
        Arg::flag(addend.is_some()),
        Arg::Faults,
    ];
    let mut recipe = Recipe::new("combine").with(&x).with(&slots).with(&weights).with(&out);
    if let Some(addend) = &addend {
        desc.same_shape(addend, &out)?;
        recipe = recipe.with(addend).in_place(3);
    }
    recipe.flops = 2.0 * out.rows.expected as f64 * (out.fixed_cols() * top_k) as f64;
    let vector = unit.facts.tiling.vector;
    let global = [Count::groups(out.fixed_cols(), vector, VECTORS), Count::of(out.rows), Count::fixed(1)];
    Ok(recipe.step(Kernels::experts(unit), "combine", args, global, VECTORS))
}
