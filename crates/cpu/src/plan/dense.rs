//! Ops on rows: embed, gather rows, norm, rope, glu, binary, unary, cast, copy, softmax.

use qwen_formats::DType;
use qwen_hal_abi::ops;

use super::Facts;
use super::desc::{Desc, In, Mat, Out, Vector};
use super::gemm::packed_layout;
use super::launch::Launch;
use crate::api::Failure;
use crate::kernels::elementwise::{self, Activation, FloatMatrix, FloatMatrixMut};
use crate::kernels::gemm::WeightLayout;
use crate::kernels::rope::{MAX_PAIRS, RopeArgs, RopeStyle};
use crate::kernels::{dispatch, norm, rope, softmax};
use crate::parallel::Parallel;

/// Most heads and elements of a head; larger attributes are mistakes.
pub(super) const MAX_SIZE: usize = 1 << 20;
const NORM_WEIGHTS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Facts of an op that reads `inputs` and does `flops` operations per value of `out`.
fn row_facts(kernel: &str, inputs: &[&Mat], out: &Mat, flops: f64) -> Facts {
    let read = inputs.iter().map(|mat| mat.expected_bytes()).sum();
    let values = out.rows.expected as f64 * out.cols.expected as f64;
    Facts::new(kernel).traffic(values * flops, read, out.expected_bytes())
}

/// Refuses two matrices of different shape.
pub(super) fn same_shape(desc: &Desc<'_>, a: &Mat, b: &Mat) -> Result<(), Failure> {
    desc.same("rows", a.rows, b.rows)?;
    desc.same("columns", a.cols, b.cols)
}

/// The input of a lookup that is its table.
const TABLE: usize = 1;

#[derive(Debug, Clone)]
pub(crate) struct Embed {
    ids: Vector,
    table: Mat,
    /// The layout of the product that the table is a weight of.
    packed: Option<WeightLayout>,
    out: Mat,
}

impl Embed {
    pub(super) fn parse(desc: &Desc<'_>) -> Result<Self, Failure> {
        desc.operands(2, 1)?;
        let tables = DType::ALL.map(|dtype| {
            let decodes = dtype != DType::F64 && (dtype.is_float() || dtype.is_block_quantised());
            if decodes { dtype } else { DType::F32 }
        });
        let tied = desc.flag(ops::QHAL_ATTR_TIED, "TIED", false)?;
        let table = desc.mat_fixed(In(1), &tables)?;
        let layout = || WeightLayout::for_dtype(table.dtype, table.rows.as_fixed()?, table.fixed_cols(), None).ok();
        let packed = Some(tied).filter(|tied| *tied).and_then(|_| layout()).filter(|layout| layout.packed_bytes() > 0);
        let op = Self { ids: desc.vector(In(0), DType::I32)?, table, packed, out: desc.f32(Out(0))? };
        desc.same("ids and output rows", op.ids.len, op.out.rows)?;
        desc.same("columns", op.table.cols, op.out.cols)?;
        if op.table.rows.as_fixed().is_none()
            || op.table.stride != op.table.fixed_cols()
            || desc.scale_block(In(1))?.is_some()
        {
            return Err(desc.refuse("a table that is not fixed, dense and without separate scales"));
        }
        Ok(op)
    }
    pub(super) fn facts(&self) -> Facts {
        let row = self.table.expected_bytes() / self.table.rows.expected.max(1) as f64;
        let read = row * self.ids.len.expected as f64;
        let mut facts = Facts::new(format!("embed.{}", self.table.dtype)).traffic(0.0, read, self.out.expected_bytes());
        if let Some(layout) = &self.packed {
            facts.packed[TABLE] = (layout.packed_bytes(), packed_layout(layout));
        }
        facts
    }

    /// Bytes before and after packing.
    pub(super) fn packing(&self, input: usize) -> Result<(usize, usize), Failure> {
        let packed = self.packed.filter(|_| input == TABLE);
        let layout = packed.ok_or_else(|| {
            Failure::invalid("an operand that is not packed, expected a table with packed_bytes").at(input)
        })?;
        Ok((layout.source_bytes(), layout.packed_bytes()))
    }

    /// Packs the table.
    pub(super) fn pack(&self, parallel: &dyn Parallel, source: &[u8], target: &mut [u8]) -> Result<(), Failure> {
        Ok(self.packed.map_or(Ok(()), |layout| layout.pack(parallel, source, target))?)
    }
    pub(super) fn launch(&self, launch: &Launch<'_>) -> Result<(), Failure> {
        let (rows, cols) = (self.table.rows.max, self.table.fixed_cols());
        let bytes = self.table.dtype.bytes_for(cols as u64).and_then(|row| row.checked_mul(rows as u64));
        let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX);
        let (dtype, packed) = (self.table.dtype, self.packed);
        let bytes = launch.slice(self.table.place, packed.map_or(bytes, |layout| layout.packed_bytes()))?;
        let table = dispatch::Table { dtype, bytes, rows, cols, packed };
        Ok(dispatch::embed(launch.parallel, launch.vector(&self.ids)?, table, launch.mat_mut(&self.out)?)?)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct GatherRows {
    x: Mat,
    rows: Vector,
    out: Mat,
}

impl GatherRows {
    pub(super) fn parse(desc: &Desc<'_>) -> Result<Self, Failure> {
        desc.operands(2, 1)?;
        let op = Self { x: desc.f32(In(0))?, rows: desc.vector(In(1), DType::I32)?, out: desc.f32(Out(0))? };
        desc.same("row numbers and output rows", op.rows.len, op.out.rows)?;
        desc.same("columns", op.x.cols, op.out.cols)?;
        Ok(op)
    }
    pub(super) fn facts(&self) -> Facts {
        row_facts("gather_rows", &[&self.out], &self.out, 0.0)
    }
    pub(super) fn launch(&self, launch: &Launch<'_>) -> Result<(), Failure> {
        let (x, rows, out) = (launch.mat(&self.x)?, launch.vector(&self.rows)?, launch.mat_mut(&self.out)?);
        Ok(dispatch::gather_rows(launch.parallel, x, rows, out)?)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Norm {
    x: Mat,
    weight: Mat,
    axis: usize,
    eps: f32,
    out: Mat,
}

impl Norm {
    pub(super) fn parse(desc: &Desc<'_>) -> Result<Self, Failure> {
        desc.operands(2, 1)?;
        let (x, weight, out) = (desc.f32(In(0))?, desc.mat_fixed(In(1), &NORM_WEIGHTS)?, desc.f32(Out(0))?);
        same_shape(desc, &x, &out)?;
        let axis = desc.size(ops::QHAL_ATTR_AXIS, "AXIS", usize::MAX)?;
        if !x.fixed_cols().is_multiple_of(axis) || weight.rows.as_fixed() != Some(1) || weight.fixed_cols() != axis {
            let (cols, found) = (x.fixed_cols(), weight.fixed_cols());
            return Err(desc.refuse(format!("AXIS {axis} for {cols} columns and {found} weights")));
        }
        Ok(Self { x, weight, axis, eps: desc.real_or(ops::QHAL_ATTR_EPS, "EPS", None)?, out })
    }
    pub(super) fn facts(&self) -> Facts {
        row_facts("norm", &[&self.x, &self.weight], &self.out, 4.0).in_place(0)
    }
    pub(super) fn launch(&self, launch: &Launch<'_>) -> Result<(), Failure> {
        // Typed, so that the address is checked for the alignment of its elements.
        let bytes = launch.byte_mat(&self.weight)?.row(0);
        let weight = norm::NormWeight { dtype: self.weight.dtype, bytes };
        let (x, out) = (launch.mat(&self.x)?, launch.mat_mut(&self.out)?);
        Ok(norm::rms_norm(launch.isa, launch.parallel, x, weight, self.axis, self.eps, out)?)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Rope {
    x: Mat,
    positions: Vector,
    inv_freq: Vector,
    args: RopeArgs,
    out: Mat,
}

impl Rope {
    pub(super) fn parse(desc: &Desc<'_>) -> Result<Self, Failure> {
        desc.operands(3, 1)?;
        let x = desc.f32(In(0))?;
        let args = RopeArgs {
            num_heads: desc.size(ops::QHAL_ATTR_NUM_HEADS, "NUM_HEADS", MAX_SIZE)?,
            head_dim: desc.size(ops::QHAL_ATTR_HEAD_DIM, "HEAD_DIM", MAX_SIZE)?,
            rotary_offset: match desc.int_or(ops::QHAL_ATTR_ROTARY_OFFSET, "ROTARY_OFFSET", 0)? {
                0 => 0,
                _ => desc.size(ops::QHAL_ATTR_ROTARY_OFFSET, "ROTARY_OFFSET", MAX_SIZE)?,
            },
            rotary_dim: desc.size(ops::QHAL_ATTR_ROTARY_DIM, "ROTARY_DIM", 2 * MAX_PAIRS)?,
            style: match desc.int_or(ops::QHAL_ATTR_STYLE, "STYLE", ops::QHAL_ROPE_HALF)? {
                ops::QHAL_ROPE_HALF => RopeStyle::Half,
                ops::QHAL_ROPE_INTERLEAVED => RopeStyle::Interleaved,
                other => return Err(desc.refuse(format!("STYLE {other}"))),
            },
            attention_factor: desc.real_or(ops::QHAL_ATTR_ATTENTION_FACTOR, "ATTENTION_FACTOR", Some(1.0))?,
        };
        desc.expect("columns", x.fixed_cols(), args.num_heads * args.head_dim)?;
        if !args.rotary_dim.is_multiple_of(2) || args.rotary_offset + args.rotary_dim > args.head_dim {
            let (offset, dim, head) = (args.rotary_offset, args.rotary_dim, args.head_dim);
            return Err(desc.refuse(format!("{dim} rotated elements from {offset} of a head of {head}")));
        }
        let op = Self {
            x,
            positions: desc.vector(In(1), DType::I32)?,
            inv_freq: desc.vector(In(2), DType::F32)?,
            args,
            out: desc.f32(Out(0))?,
        };
        same_shape(desc, &op.x, &op.out)?;
        desc.same("positions and rows", op.positions.len, op.x.rows)?;
        match op.inv_freq.len.as_fixed() {
            Some(n) => desc.expect("number of frequencies", n, op.args.rotary_dim / 2)?,
            None => return Err(desc.refuse("frequencies of variable number")),
        }
        Ok(op)
    }
    pub(super) fn facts(&self) -> Facts {
        row_facts("rope", &[&self.x], &self.out, 4.0).in_place(0)
    }
    pub(super) fn launch(&self, launch: &Launch<'_>) -> Result<(), Failure> {
        let (positions, inv_freq) = (launch.vector(&self.positions)?, launch.vector(&self.inv_freq)?);
        let (x, out) = (launch.mat(&self.x)?, launch.mat_mut(&self.out)?);
        Ok(rope::rope(launch.isa, launch.parallel, &self.args, x, positions, inv_freq, out)?)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Glu {
    a: Mat,
    b: Mat,
    activation: Activation,
    out: Mat,
}

impl Glu {
    pub(super) fn parse(desc: &Desc<'_>) -> Result<Self, Failure> {
        desc.operands(2, 1)?;
        let activation = match desc.int(ops::QHAL_ATTR_FUNCTION, "FUNCTION")? {
            ops::QHAL_ACT_SILU => Activation::Silu,
            ops::QHAL_ACT_GELU_TANH => Activation::GeluTanh,
            other => return Err(desc.refuse(format!("FUNCTION {other}"))),
        };
        let op = Self { a: desc.f32(In(0))?, b: desc.f32(In(1))?, activation, out: desc.f32(Out(0))? };
        same_shape(desc, &op.a, &op.b)?;
        same_shape(desc, &op.a, &op.out)?;
        Ok(op)
    }
    pub(super) fn facts(&self) -> Facts {
        row_facts("glu", &[&self.a, &self.b], &self.out, 12.0).in_place(0).in_place(1)
    }
    pub(super) fn launch(&self, launch: &Launch<'_>) -> Result<(), Failure> {
        let (a, b, out) = (launch.mat(&self.a)?, launch.mat(&self.b)?, launch.mat_mut(&self.out)?);
        Ok(elementwise::glu(launch.isa, launch.parallel, self.activation, a, b, out)?)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Binary {
    a: Mat,
    b: Mat,
    function: elementwise::Binary,
    out: Mat,
}

impl Binary {
    pub(super) fn parse(desc: &Desc<'_>) -> Result<Self, Failure> {
        desc.operands(2, 1)?;
        let function = match desc.int(ops::QHAL_ATTR_FUNCTION, "FUNCTION")? {
            ops::QHAL_BINARY_ADD => elementwise::Binary::Add,
            ops::QHAL_BINARY_MUL => elementwise::Binary::Mul,
            other => return Err(desc.refuse(format!("FUNCTION {other}"))),
        };
        let op = Self { a: desc.f32(In(0))?, b: desc.f32(In(1))?, function, out: desc.f32(Out(0))? };
        same_shape(desc, &op.a, &op.out)?;
        desc.same("rows", op.a.rows, op.b.rows)?;
        let columns = if desc.flag(ops::QHAL_ATTR_BROADCAST, "BROADCAST", false)? { 1 } else { op.a.fixed_cols() };
        desc.expect("columns of the second operand", op.b.fixed_cols(), columns)?;
        Ok(op)
    }
    pub(super) fn facts(&self) -> Facts {
        let facts = row_facts("binary", &[&self.a, &self.b], &self.out, 1.0).in_place(0);
        if self.b.fixed_cols() == self.a.fixed_cols() { facts.in_place(1) } else { facts }
    }
    pub(super) fn launch(&self, launch: &Launch<'_>) -> Result<(), Failure> {
        let (a, b, out) = (launch.mat(&self.a)?, launch.mat(&self.b)?, launch.mat_mut(&self.out)?);
        Ok(elementwise::binary(launch.isa, launch.parallel, self.function, a, b, out)?)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Unary {
    x: Mat,
    function: elementwise::Unary,
    out: Mat,
}

impl Unary {
    pub(super) fn parse(desc: &Desc<'_>) -> Result<Self, Failure> {
        desc.operands(1, 1)?;
        let function = match desc.int(ops::QHAL_ATTR_FUNCTION, "FUNCTION")? {
            ops::QHAL_ACT_SILU => elementwise::Unary::Silu,
            ops::QHAL_ACT_GELU_TANH => elementwise::Unary::GeluTanh,
            ops::QHAL_UNARY_SIGMOID => elementwise::Unary::Sigmoid,
            other => return Err(desc.refuse(format!("FUNCTION {other}"))),
        };
        let op = Self { x: desc.f32(In(0))?, function, out: desc.f32(Out(0))? };
        same_shape(desc, &op.x, &op.out)?;
        Ok(op)
    }
    pub(super) fn facts(&self) -> Facts {
        row_facts("unary", &[&self.x], &self.out, 10.0).in_place(0)
    }
    pub(super) fn launch(&self, launch: &Launch<'_>) -> Result<(), Failure> {
        let (x, out) = (launch.mat(&self.x)?, launch.mat_mut(&self.out)?);
        Ok(elementwise::unary(launch.isa, launch.parallel, self.function, x, out)?)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Cast {
    x: Mat,
    out: Mat,
}

impl Cast {
    pub(super) fn parse(desc: &Desc<'_>) -> Result<Self, Failure> {
        desc.operands(1, 1)?;
        let from = [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2];
        let op = Self {
            x: desc.mat_fixed(In(0), &from)?,
            out: desc.mat_fixed(Out(0), &[DType::F32, DType::F16, DType::BF16])?,
        };
        same_shape(desc, &op.x, &op.out)?;
        Ok(op)
    }
    pub(super) fn facts(&self) -> Facts {
        let facts = row_facts(&format!("cast.{}.{}", self.x.dtype, self.out.dtype), &[&self.x], &self.out, 1.0);
        if self.x.dtype.block_bytes() == self.out.dtype.block_bytes() { facts.in_place(0) } else { facts }
    }
    pub(super) fn launch(&self, launch: &Launch<'_>) -> Result<(), Failure> {
        let x = match self.x.dtype {
            DType::F16 => FloatMatrix::F16(launch.mat(&self.x)?),
            DType::BF16 => FloatMatrix::Bf16(launch.mat(&self.x)?),
            DType::F8E4M3 => FloatMatrix::F8E4M3(launch.mat(&self.x)?),
            DType::F8E5M2 => FloatMatrix::F8E5M2(launch.mat(&self.x)?),
            _ => FloatMatrix::F32(launch.mat(&self.x)?),
        };
        let out = match self.out.dtype {
            DType::F16 => FloatMatrixMut::F16(launch.mat_mut(&self.out)?),
            DType::BF16 => FloatMatrixMut::Bf16(launch.mat_mut(&self.out)?),
            _ => FloatMatrixMut::F32(launch.mat_mut(&self.out)?),
        };
        Ok(elementwise::cast(launch.isa, launch.parallel, x, out)?)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Copy {
    x: Mat,
    out: Mat,
}

impl Copy {
    pub(super) fn parse(desc: &Desc<'_>) -> Result<Self, Failure> {
        desc.operands(1, 1)?;
        let x = desc.mat_fixed(In(0), &DType::ALL)?;
        let out = desc.mat_fixed(Out(0), &[x.dtype])?;
        if x.dtype.is_block_quantised() {
            return Err(desc.refuse("block-quantised values"));
        }
        same_shape(desc, &x, &out)?;
        Ok(Self { x, out })
    }
    pub(super) fn facts(&self) -> Facts {
        row_facts("copy", &[&self.x], &self.out, 0.0).in_place(0)
    }
    pub(super) fn launch(&self, launch: &Launch<'_>) -> Result<(), Failure> {
        Ok(elementwise::copy(launch.parallel, launch.byte_mat(&self.x)?, launch.byte_mat_mut(&self.out)?)?)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Softmax {
    x: Mat,
    out: Mat,
}

impl Softmax {
    pub(super) fn parse(desc: &Desc<'_>) -> Result<Self, Failure> {
        desc.operands(1, 1)?;
        let op = Self { x: desc.f32(In(0))?, out: desc.f32(Out(0))? };
        same_shape(desc, &op.x, &op.out)?;
        Ok(op)
    }
    pub(super) fn facts(&self) -> Facts {
        row_facts("softmax", &[&self.x], &self.out, 12.0).in_place(0)
    }
    pub(super) fn launch(&self, launch: &Launch<'_>) -> Result<(), Failure> {
        Ok(softmax::softmax(launch.isa, launch.parallel, launch.mat(&self.x)?, launch.mat_mut(&self.out)?)?)
    }
}
