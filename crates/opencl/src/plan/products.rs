//! Products with weights: gemm and grouped gemm.
//!
//! Weights are packed into panels (`kernels/vector.cl`); one kernel a weight, and one of two numbers of rows that share a load of
//! weights, by the rows of the launch. A gated product is two: the first leaves its result in the output, the second multiplies.

use qwen_hal_abi::{QHAL_MAX_PACKED, ops};

use super::desc::{Desc, Extent, In, MAX_DIM, Mat, Out, Vector};
use super::recipe::{Arg, Count, Packed, Recipe, Step};
use super::types::{self, WeightType};
use super::variants::Choice;
use crate::failure::Failure;
use crate::program::Kernels;
use crate::unit::{Cut, Unit};

/// Version of the packed form; with the dtype it is the layout's identity.
const LAYOUT: u32 = 1 << 16;
/// Most experts of a grouped weight.
const MAX_EXPERTS: usize = 1 << 16;
/// Most weights that share x.
const MAX_SEGMENTS: usize = 8;
/// Rows of a launch up to which a row goes by itself: a tile of more would be mostly empty.
const FEW_ROWS: usize = 2;
/// Types that may have separate scales.
const SCALED: [u32; 2] = [ops::QHAL_DTYPE_F8_E4M3, ops::QHAL_DTYPE_F8_E5M2];

/// One weight of the op, or one per expert.
struct Weight {
    mat: Mat,
    kind: &'static WeightType,
    input: usize,
    n: usize,
    /// Block and values of separate scales.
    scales: Option<([usize; 2], Vector)>,
    bias: Option<Vector>,
}

/// What happens to a result in the end, as in `kernels/vector.cl`.
#[derive(Clone, Copy)]
enum End {
    Nothing,
    /// The first result is left for the second, which multiplies it with its activation.
    Glu(i32),
    Add(Mat),
}

/// Experts of a grouped product.
struct Groups {
    experts: usize,
    offsets: Vector,
    rows: Option<Vector>,
}

pub(super) fn gemm(desc: &Desc<'_>, unit: &Unit, cut: Cut) -> Result<Recipe, Failure> {
    let (x, out) = (desc.f32(In(0))?, desc.f32(Out(0))?);
    let mut next = 1;
    let weights = parse_weights(desc, x.fixed_cols(), 1, &mut next)?;
    let end = parse_end(desc, &weights, &out, &mut next)?;
    desc.operands(next, 1)?;
    desc.same("rows", x.rows, out.rows)?;
    let recipe = recipe(desc, (unit, cut), (&x, &out), &weights, &end, None)?;
    Ok(match end {
        End::Add(addend) => recipe.with(&addend).in_place(next - 1),
        _ => recipe,
    })
}

pub(super) fn grouped_gemm(desc: &Desc<'_>, unit: &Unit, cut: Cut) -> Result<Recipe, Failure> {
    let (x, out) = (desc.f32(In(0))?, desc.f32(Out(0))?);
    let offsets = desc.vector(In(1), ops::QHAL_DTYPE_I32)?;
    let experts = offsets.len.as_fixed().and_then(|len| len.checked_sub(1)).filter(|n| (1..=MAX_EXPERTS).contains(n));
    let experts =
        experts.ok_or_else(|| desc.refuse(format!("{} offsets, expected one more than experts", offsets.len.max)))?;
    let rows = if desc.is_absent(In(2))? { None } else { Some(desc.vector(In(2), ops::QHAL_DTYPE_I32)?) };
    match &rows {
        Some(rows) => desc.same("row numbers and output rows", rows.len, out.rows)?,
        None => desc.same("rows", x.rows, out.rows)?,
    }
    let mut next = 3;
    let weights = parse_weights(desc, x.fixed_cols(), experts, &mut next)?;
    let end = parse_end(desc, &weights, &out, &mut next)?;
    desc.operands(next, 1)?;
    if matches!(end, End::Add(_)) {
        return Err(desc.refuse("the ADD epilogue, expected none or GLU"));
    }
    let groups = Groups { experts, offsets, rows };
    let recipe = recipe(desc, (unit, cut), (&x, &out), &weights, &end, Some(&groups))?.with_vector(&groups.offsets);
    Ok(match &groups.rows {
        Some(rows) => recipe.with_vector(rows),
        None => recipe,
    })
}

const fn take(next: &mut usize) -> usize {
    *next += 1;
    *next - 1
}

fn parse_weights(desc: &Desc<'_>, k: usize, experts: usize, next: &mut usize) -> Result<Vec<Weight>, Failure> {
    let segments = desc.size(ops::QHAL_ATTR_SEGMENTS, "SEGMENTS", Some(1), (1, MAX_SEGMENTS))?;
    let dtypes = types::WEIGHTS.map(|weight| weight.dtype);
    let mut weights = Vec::with_capacity(segments);
    for segment in 0..segments {
        let input = take(next);
        let mat = desc.mat_fixed(In(input), &dtypes)?;
        let kind = types::weight_type(mat.dtype).ok_or_else(|| desc.refuse("the type of a weight"))?;
        desc.expect("inputs of a weight", mat.fixed_cols(), k)?;
        let rows = mat.rows.as_fixed().filter(|rows| mat.is_dense() && *rows > 0 && rows.is_multiple_of(experts));
        let n = rows.ok_or_else(|| {
            desc.refuse(format!("weight {segment} is not fixed, dense and whole for {experts} experts"))
        })? / experts;
        if input >= QHAL_MAX_PACKED {
            return Err(desc.refuse(format!("a weight as input {input}, expected one below {QHAL_MAX_PACKED}")));
        }
        let scales = match desc.scale_block(In(input))? {
            None => None,
            Some(_) if !SCALED.contains(&mat.dtype) => {
                return Err(
                    desc.refuse(format!("separate scales of {}, expected 8-bit floats", types::name(mat.dtype)))
                );
            }
            Some(block) => {
                let count = n.div_ceil(block[0]) * k.div_ceil(block[1]);
                Some((block, desc.values(In(take(next)), count.checked_mul(experts))?))
            }
        };
        let key = ops::QHAL_ATTR_SEGMENT_COMPUTE + segment as u32;
        let compute = desc.int_or(key, "SEGMENT_COMPUTE", i64::from(desc.compute()))?;
        if compute != i64::from(ops::QHAL_COMPUTE_F32) {
            return Err(
                desc.refuse(format!("form {compute} of products, expected float32 ({})", ops::QHAL_COMPUTE_F32))
            );
        }
        weights.push(Weight { mat, kind, input, n, scales, bias: None });
    }
    if desc.code(ops::QHAL_ATTR_HAS_BIAS, "HAS_BIAS", Some(0), 2)? == 1 {
        for weight in &mut weights {
            let input = take(next);
            if !desc.is_absent(In(input))? {
                weight.bias = Some(desc.values(In(input), weight.n.checked_mul(experts))?);
            }
        }
    }
    Ok(weights)
}

fn parse_end(desc: &Desc<'_>, weights: &[Weight], out: &Mat, next: &mut usize) -> Result<End, Failure> {
    let sizes: Vec<usize> = weights.iter().map(|weight| weight.n).collect();
    let (end, columns) = match desc.epilogue()? {
        None => (End::Nothing, sizes.iter().sum()),
        Some(epilogue) => match epilogue.kind {
            ops::QHAL_EPILOGUE_GLU => {
                if sizes.len() != 2 || sizes.first() != sizes.last() {
                    return Err(desc.refuse(format!("the GLU epilogue on outputs {sizes:?}, expected two equal ones")));
                }
                let function = match i64::from(epilogue.param) {
                    code @ (ops::QHAL_ACT_SILU | ops::QHAL_ACT_GELU_TANH) => code as i32,
                    other => return Err(desc.refuse(format!("activation {other}"))),
                };
                (End::Glu(function), sizes[0])
            }
            ops::QHAL_EPILOGUE_ADD => {
                let input = take(next);
                desc.expect("operand of the ADD epilogue", epilogue.input as usize, input)?;
                let addend = desc.f32(In(input))?;
                desc.same_shape(&addend, out)?;
                (End::Add(addend), sizes.iter().sum())
            }
            other => return Err(desc.refuse(format!("epilogue {other}"))),
        },
    };
    desc.expect("output columns", out.fixed_cols(), columns)?;
    Ok(end)
}

fn recipe(
    desc: &Desc<'_>,
    (unit, cut): (&Unit, Cut),
    (x, out): (&Mat, &Mat),
    weights: &[Weight],
    end: &End,
    groups: Option<&Groups>,
) -> Result<Recipe, Failure> {
    let experts = groups.map_or(1, |groups| groups.experts);
    let mut names: Vec<String> = weights.iter().map(|weight| types::name(weight.mat.dtype)).collect();
    names.dedup();
    let op = if groups.is_some() { "grouped_gemm" } else { "gemm" };
    let mut recipe = Recipe::new(format!("{op}.{}", names.join("+"))).with(x).with(out);
    let rows = out.rows.expected as f64;
    // A row meets one expert, so no more experts than rows are read.
    let touched = experts.min(out.rows.expected.max(1)) as f64 / experts as f64;
    recipe.choice = Some(Choice { cut, rows: out.rows, few: few_rows(groups) });
    let mut column = 0;
    for (i, weight) in weights.iter().enumerate() {
        let kernels = Kernels::weights(unit, weight.kind.name, weight.scales.is_some(), cut);
        let packed = packed(desc, x.fixed_cols(), weight, experts, kernels.clone())?;
        let place = weight.mat.place;
        recipe = recipe.with_bytes(place, packed.packed_bytes(), weight.mat.expected_bytes() * touched);
        for values in weight.scales.iter().map(|(_, scales)| scales).chain(&weight.bias) {
            recipe = recipe.with_vector(values);
        }
        recipe.flops += 2.0 * rows * weight.n as f64 * x.fixed_cols() as f64;
        recipe.packed.push(packed);
        recipe.steps.extend(steps((unit, cut), (x, out), (weight, kernels), column, (end, i), groups));
        if !matches!(end, End::Glu(_)) {
            column += weight.n;
        }
    }
    Ok(recipe)
}

fn packed(desc: &Desc<'_>, k: usize, weight: &Weight, experts: usize, kernels: Kernels) -> Result<Packed, Failure> {
    let (block_len, block_bytes) = types::block(weight.mat.dtype);
    let packed = Packed {
        input: weight.input,
        layout: LAYOUT | weight.mat.dtype,
        kernels,
        experts,
        rows: weight.n,
        units: k / block_len * (block_bytes / weight.kind.unit_bytes),
        unit_bytes: weight.kind.unit_bytes,
    };
    let bytes = [experts, packed.panels() * super::recipe::PANEL, packed.units, packed.unit_bytes];
    let bytes = bytes.iter().try_fold(1_usize, |bytes, n| bytes.checked_mul(*n));
    if packed.units > MAX_DIM || bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
        return Err(desc.refuse("a weight larger than the address space"));
    }
    Ok(packed)
}

/// Rows of a launch up to which rows go by themselves.
fn few_rows(groups: Option<&Groups>) -> usize {
    groups.map_or(FEW_ROWS, |groups| FEW_ROWS * groups.experts)
}

/// A weight's runs: rows by themselves in small launches, tiles in others.
fn steps(
    (unit, cut): (&Unit, Cut),
    (x, out): (&Mat, &Mat),
    (weight, kernels): (&Weight, Kernels),
    column: usize,
    (end, segment): (&End, usize),
    groups: Option<&Groups>,
) -> Vec<Step> {
    let behind = column as u64 * 4;
    let (end_code, function, addend) = match end {
        End::Add(addend) => (1, 0, Some(addend)),
        End::Glu(function) if segment == 1 => (2, *function, None),
        _ => (0, 0, None),
    };
    let (block, scales) =
        weight.scales.as_ref().map_or(([1, 1], Arg::Absent), |(block, scales)| (*block, Arg::vector(scales)));
    let bias = weight.bias.as_ref().map_or(Arg::Absent, Arg::vector);
    let mut args = vec![Arg::mat(x), Arg::mat(&weight.mat), scales, bias];
    match groups {
        None => args.push(addend.map_or(Arg::Absent, |addend| Arg::Operand(addend.place, behind))),
        Some(groups) => {
            args.push(Arg::vector(&groups.offsets));
            args.push(groups.rows.as_ref().map_or(Arg::Absent, Arg::vector));
        }
    }
    args.extend([
        Arg::Operand(out.place, behind),
        Arg::Size(out.rows),
        Arg::int(x.fixed_cols()),
        Arg::int(weight.n),
        Arg::Stride(*x),
        Arg::Stride(*out),
    ]);
    if groups.is_none() {
        args.push(addend.map_or(Arg::Int(0), |addend| Arg::Stride(*addend)));
    }
    args.extend([
        Arg::flag(weight.bias.is_some()),
        Arg::Int(end_code),
        Arg::Int(function),
        Arg::int(block[0]),
        Arg::int(block[1]),
    ]);
    if let Some(groups) = groups {
        args.extend([Arg::int(groups.experts), Arg::flag(groups.rows.is_some()), Arg::Size(x.rows), Arg::Faults]);
    }
    let few = few_rows(groups);
    let along = Count { times: cut.split, ..Count::each(Extent::fixed(weight.n), unit.facts.tiling.vector) };
    let step = |rows: usize, when: std::ops::RangeInclusive<usize>| Step {
        kernels: kernels.clone(),
        name: format!("{}{rows}", if groups.is_some() { "grouped" } else { "gemm" }),
        args: args.clone(),
        // Each expert may begin a tile of its own.
        global: [
            along,
            Count { more: if rows == 1 { 0 } else { groups.map_or(0, |g| g.experts) }, ..Count::each(out.rows, rows) },
            Count::fixed(1),
        ],
        local: cut.split,
        when: Some((out.rows, when)),
    };
    let mut steps = vec![step(1, 1..=few)];
    if out.rows.max > few {
        steps.push(step(cut.rows, few + 1..=usize::MAX));
    }
    steps
}
