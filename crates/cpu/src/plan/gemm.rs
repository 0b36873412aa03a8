//! Products with weights: gemm and grouped gemm.

use qwen_formats::DType;
use qwen_hal_abi::{QHAL_MAX_PACKED, ops};

use super::Facts;
use super::desc::{Desc, Extent, In, Mat, Out, Place, Vector};
use super::launch::Launch;
use crate::api::Failure;
use crate::kernels::gemm::{self, Activation, Compute, Epilogue, MAX_SEGMENTS, Segment, Way, WeightLayout};
use crate::parallel::Parallel;

/// Version of the packed forms.
const LAYOUT: u32 = 1 << 16;
/// The identity of a weight's packed form: equal ones are the same bytes.
pub(super) const fn packed_layout(layout: &WeightLayout) -> u32 {
    LAYOUT | layout.dtype().code()
}

/// Most experts of a grouped weight.
const MAX_EXPERTS: usize = 1 << 16;

/// One weight of the op, or one per expert.
#[derive(Debug, Clone)]
struct Weight {
    input: usize,
    layout: WeightLayout,
    compute: Compute,
    scales: Option<usize>,
    bias: Option<usize>,
}

#[derive(Debug, Clone, Copy)]
enum End {
    Nothing,
    Glu(Activation),
    Add(Mat),
}

/// Experts of a grouped product.
#[derive(Debug, Clone)]
struct Groups {
    experts: usize,
    offsets: Vector,
    rows: Option<Vector>,
}

#[derive(Debug, Clone)]
pub(crate) struct Gemm {
    x: Mat,
    weights: Vec<Weight>,
    groups: Option<Groups>,
    end: End,
    out: Mat,
    workspace: usize,
}

impl Gemm {
    pub(super) fn parse(desc: &Desc<'_>, grouped: bool, threads: usize, way: Way) -> Result<Self, Failure> {
        let (x, out) = (desc.f32(In(0))?, desc.f32(Out(0))?);
        let groups = if grouped { Some(parse_groups(desc, &x, &out)?) } else { None };
        let mut next = if grouped { 3 } else { 1 };
        let weights = parse_weights(desc, x.fixed_cols(), groups.as_ref(), &mut next)?;
        let end = parse_end(desc, &weights, &out, &mut next)?;
        desc.operands(next, 1)?;
        if !grouped {
            desc.same("rows", x.rows, out.rows)?;
        }
        let columns = match end {
            End::Glu(_) => weights.first().map_or(0, |weight| weight.layout.n()),
            _ => weights.iter().map(|weight| weight.layout.n()).sum(),
        };
        desc.expect("output columns", out.fixed_cols(), columns)?;
        if out.rows.max > i32::MAX as usize || x.rows.max > i32::MAX as usize {
            return Err(desc.refuse(format!("{} rows, expected at most {}", out.rows.max, i32::MAX)));
        }
        let experts = groups.as_ref().map_or(1, |groups| groups.experts);
        let pairs: Vec<_> = weights.iter().map(|weight| (weight.layout, weight.compute)).collect();
        let workspace = gemm::workspace_bytes_of(way, out.rows.max, experts, &pairs, threads);
        Ok(Self { x, weights, groups, end, out, workspace })
    }

    const fn experts(&self) -> usize {
        match &self.groups {
            Some(groups) => groups.experts,
            None => 1,
        }
    }

    pub(super) fn facts(&self) -> Facts {
        let types: Vec<_> = self.weights.iter().map(|weight| weight.layout.dtype().name()).collect();
        let same = types.windows(2).all(|pair| pair[0] == pair[1]);
        let types = if same { types.first().copied().unwrap_or_default().to_owned() } else { types.join("+") };
        let mut facts = Facts::new(format!("{}.{types}", if self.groups.is_some() { "grouped_gemm" } else { "gemm" }));
        facts.workspace_bytes = self.workspace;
        let rows = self.out.rows.expected as f64;
        // A row meets one expert, so no more experts than rows are read.
        let touched = self.experts().min(self.out.rows.expected.max(1)) as f64;
        let (mut flops, mut read) = (0.0, self.x.expected_bytes());
        for weight in &self.weights {
            flops += 2.0 * rows * weight.layout.n() as f64 * weight.layout.k() as f64;
            read += touched * (weight.layout.source_bytes() + 4 * weight.layout.num_scales()) as f64;
            if let Some(slot) = facts.packed.get_mut(weight.input) {
                let bytes = weight.layout.packed_bytes() * self.experts();
                *slot = if bytes > 0 { (bytes, packed_layout(&weight.layout)) } else { (0, 0) };
            }
        }
        if let End::Add(addend) = &self.end {
            read += addend.expected_bytes();
            if let In(i) = addend.place {
                facts = facts.in_place(i);
            }
        }
        facts.traffic(flops, read, self.out.expected_bytes())
    }

    /// Output rows that decide which path is taken; `None` if it is each expert's own number of rows.
    pub(super) const fn deciding_rows(&self) -> Option<Extent> {
        if self.groups.is_some() { None } else { Some(self.out.rows) }
    }

    /// Whether activations are rounded to int8, and rows of a block.
    pub(super) fn blocks(&self, way: Way) -> (Option<usize>, usize) {
        let pairs: Vec<_> = self.weights.iter().map(|weight| (weight.layout, weight.compute)).collect();
        let rounded = pairs.iter().find_map(|(layout, compute)| gemm::rounded_subgroups(layout, *compute));
        (rounded, gemm::block_rows(way, &pairs))
    }

    /// Whether activations are rounded to bfloat16.
    pub(super) fn rounds_to_bf16(&self) -> bool {
        self.weights.iter().any(|weight| gemm::rounds_to_bf16(&weight.layout, weight.compute))
    }

    fn weight(&self, input: usize) -> Result<&Weight, Failure> {
        let packed = self.weights.iter().find(|weight| weight.input == input && weight.layout.packed_bytes() > 0);
        packed.ok_or_else(|| {
            Failure::invalid("an operand that is not packed, expected a weight with packed_bytes").at(input)
        })
    }

    /// Bytes before and after packing.
    pub(super) fn packing(&self, input: usize) -> Result<(usize, usize), Failure> {
        let layout = self.weight(input)?.layout;
        Ok((layout.source_bytes() * self.experts(), layout.packed_bytes() * self.experts()))
    }

    /// Packs a weight, expert by expert.
    pub(super) fn pack(
        &self,
        input: usize,
        parallel: &dyn Parallel,
        source: &[u8],
        target: &mut [u8],
    ) -> Result<(), Failure> {
        let layout = self.weight(input)?.layout;
        let experts = source.chunks_exact(layout.source_bytes()).zip(target.chunks_exact_mut(layout.packed_bytes()));
        for (source, target) in experts {
            layout.pack(parallel, source, target)?;
        }
        Ok(())
    }

    pub(super) fn launch(&self, launch: &Launch<'_>) -> Result<(), Failure> {
        let Some(first) = self.weights.first() else { return Ok(()) };
        let empty = Segment { weight: &[], layout: first.layout, scales: None, bias: None, compute: first.compute };
        let mut segments = [empty; MAX_SEGMENTS];
        for (segment, weight) in segments.iter_mut().zip(&self.weights) {
            *segment = self.segment(launch, weight)?;
        }
        let segments = segments.get(..self.weights.len()).unwrap_or_default();
        let epilogue = match &self.end {
            End::Nothing => Epilogue::None,
            End::Glu(activation) => Epilogue::Glu(*activation),
            End::Add(addend) => Epilogue::Add(launch.mat(addend)?),
        };
        let (x, out, workspace) = (launch.mat(&self.x)?, launch.mat_mut(&self.out)?, launch.workspace(self.workspace)?);
        let (way, parallel) = (launch.way, launch.parallel);
        match &self.groups {
            None => gemm::gemm(way, parallel, x, segments, out, epilogue, workspace)?,
            Some(groups) => {
                let offsets = launch.vector(&groups.offsets)?;
                let rows = groups.rows.as_ref().map(|rows| launch.vector(rows)).transpose()?;
                gemm::grouped_gemm(way, parallel, x, offsets, rows, segments, out, epilogue, workspace)?;
            }
        }
        Ok(())
    }

    fn segment<'a>(&self, launch: &Launch<'a>, weight: &Weight) -> Result<Segment<'a>, Failure> {
        let (layout, experts) = (weight.layout, self.experts());
        let values =
            |input: Option<usize>, count: usize| input.map(|i| launch.slice(In(i), count * experts)).transpose();
        Ok(Segment {
            weight: launch.slice(In(weight.input), layout.weight_bytes() * experts)?,
            layout,
            scales: values(weight.scales, layout.num_scales())?,
            bias: values(weight.bias, layout.n())?,
            compute: weight.compute,
        })
    }
}

fn parse_groups(desc: &Desc<'_>, x: &Mat, out: &Mat) -> Result<Groups, Failure> {
    let offsets = desc.vector(In(1), DType::I32)?;
    let experts = offsets.len.as_fixed().and_then(|len| len.checked_sub(1)).filter(|n| (1..=MAX_EXPERTS).contains(n));
    let experts =
        experts.ok_or_else(|| desc.refuse(format!("{} offsets, expected one more than experts", offsets.len.max)))?;
    let rows = if desc.is_absent(In(2))? { None } else { Some(desc.vector(In(2), DType::I32)?) };
    match &rows {
        Some(rows) => desc.same("row numbers and output rows", rows.len, out.rows)?,
        None => desc.same("rows", x.rows, out.rows)?,
    }
    Ok(Groups { experts, offsets, rows })
}

/// A dense operand of `count` values of f32, whatever its dimensions.
fn values(desc: &Desc<'_>, place: Place, count: Option<usize>) -> Result<(), Failure> {
    let vector = desc.vector(place, DType::F32)?;
    match (vector.len.as_fixed(), count) {
        (Some(found), Some(expected)) => desc.expect(&format!("values of {place}"), found, expected),
        _ => Err(desc.refuse(format!("{place} has a variable or too large size"))),
    }
}

fn parse_weights(desc: &Desc<'_>, k: usize, groups: Option<&Groups>, next: &mut usize) -> Result<Vec<Weight>, Failure> {
    let experts = groups.map_or(1, |groups| groups.experts);
    let segments = match desc.int_or(ops::QHAL_ATTR_SEGMENTS, "SEGMENTS", 1)? {
        1 => 1,
        _ => desc.size(ops::QHAL_ATTR_SEGMENTS, "SEGMENTS", MAX_SEGMENTS)?,
    };
    let mut weights = Vec::with_capacity(segments);
    for segment in 0..segments {
        let input = take(next);
        let mat = desc.mat_fixed(In(input), &DType::ALL)?;
        let block = desc.scale_block(In(input))?;
        desc.expect("inputs of a weight", mat.fixed_cols(), k)?;
        let rows = mat.rows.as_fixed().filter(|rows| mat.stride == k && rows.is_multiple_of(experts));
        let n = rows.ok_or_else(|| {
            desc.refuse(format!("weight {segment} is not fixed, dense and whole for {experts} experts"))
        })? / experts;
        let layout = WeightLayout::for_dtype(mat.dtype, n, k, block).map_err(|error| desc.refuse(error))?;
        let in_bytes = |bytes: usize| bytes.checked_mul(experts).filter(|bytes| *bytes <= isize::MAX as usize);
        if in_bytes(layout.source_bytes()).and(in_bytes(layout.packed_bytes())).is_none() {
            return Err(desc.refuse(format!("weight {segment} is larger than the address space")));
        }
        if layout.packed_bytes() > 0 && input >= QHAL_MAX_PACKED {
            return Err(desc.refuse(format!("a packed weight as input {input}, expected one below {QHAL_MAX_PACKED}")));
        }
        let scales = if block.is_some() { Some(take(next)) } else { None };
        if let Some(scales) = scales {
            values(desc, In(scales), layout.num_scales().checked_mul(experts))?;
        }
        let key = ops::QHAL_ATTR_SEGMENT_COMPUTE + segment as u32;
        let code = desc.int_or(key, "SEGMENT_COMPUTE", i64::from(desc.compute()))?;
        let compute = u32::try_from(code).ok().and_then(Compute::from_code);
        let compute = compute.ok_or_else(|| desc.refuse(format!("compute {code}")))?;
        weights.push(Weight { input, layout, compute, scales, bias: None });
    }
    if desc.flag(ops::QHAL_ATTR_HAS_BIAS, "HAS_BIAS", false)? {
        for weight in &mut weights {
            let input = take(next);
            if !desc.is_absent(In(input))? {
                values(desc, In(input), weight.layout.n().checked_mul(experts))?;
                weight.bias = Some(input);
            }
        }
    }
    Ok(weights)
}

const fn take(next: &mut usize) -> usize {
    *next += 1;
    *next - 1
}

fn parse_end(desc: &Desc<'_>, weights: &[Weight], out: &Mat, next: &mut usize) -> Result<End, Failure> {
    let Some(epilogue) = desc.epilogue()? else { return Ok(End::Nothing) };
    match epilogue.kind {
        ops::QHAL_EPILOGUE_GLU => {
            let sizes: Vec<_> = weights.iter().map(|weight| weight.layout.n()).collect();
            if sizes.len() != 2 || sizes.first() != sizes.last() {
                return Err(desc.refuse(format!("the GLU epilogue on outputs {sizes:?}, expected two equal ones")));
            }
            let activation = Activation::from_code(i64::from(epilogue.param));
            Ok(End::Glu(activation.ok_or_else(|| desc.refuse(format!("activation {}", epilogue.param)))?))
        }
        ops::QHAL_EPILOGUE_ADD => {
            let input = take(next);
            desc.expect("operand of the ADD epilogue", epilogue.input as usize, input)?;
            let addend = desc.f32(In(input))?;
            super::dense::same_shape(desc, &addend, out)?;
            Ok(End::Add(addend))
        }
        other => Err(desc.refuse(format!("epilogue {other}"))),
    }
}
