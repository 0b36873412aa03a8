//! Products with rounded factors or sums, which the backend inside does not have: written for clarity, in a fixed order.
//!
//! Factors are float32, or bfloat16 (to nearest even, or cut off where the chip does that). The matrix unit multiplies a tile's depth
//! of them exactly, adds those in float32, and adds the result to the accumulator. An accumulator in half precision rounds at
//! each of these steps; with a span, it is added to a float32 sum and begun anew after so many products.

use half::{bf16, f16};
use qwen_formats::{DType, blocks};
use qwen_hal_abi::ops;
use qwen_hal_abi::*;
use qwen_hal_plugin::{Failure, write_text};

use crate::desc::{Desc, Tensor};
use crate::inner::Cpu;
use crate::model::Model;
use crate::plan::narrow_sums;

/// Depth of the matrix unit where the sheet states none.
const ASSUMED_DEPTH: u32 = 16;
/// Lanes of a float32 sum: fixed, so that the order is.
const LANES: usize = 16;
/// Columns of a task.
const COLUMNS: usize = 32;
/// Identity of the packed form: float32 values, rounded as factors are.
const LAYOUT: u32 = 0x0051_0000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Factors {
    F32,
    Bf16 { truncate: bool },
}

impl Factors {
    fn round(self, x: f32) -> f32 {
        match self {
            Self::F32 => x,
            Self::Bf16 { truncate: false } => bf16::from_f32(x).to_f32(),
            Self::Bf16 { truncate: true } => f32::from_bits(x.to_bits() & 0xffff_0000),
        }
    }
    const fn layout(self) -> u32 {
        LAYOUT
            | match self {
                Self::F32 => 0,
                Self::Bf16 { truncate } => 1 + truncate as u32,
            }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sums {
    F32,
    /// Products after which the accumulator is added to a float32 sum; 0 = never.
    F16 {
        span: usize,
    },
}

#[derive(Debug, Clone)]
struct Segment {
    input: usize,
    bias: Option<usize>,
    dtype: DType,
    n: usize,
}

#[derive(Debug, Clone, Copy)]
enum End {
    Nothing,
    Glu { gelu: bool },
    Add { input: usize },
}

/// A planned product.
#[derive(Debug, Clone)]
pub(crate) struct Narrow {
    x: Tensor,
    out: Tensor,
    addend: Option<Tensor>,
    segments: Vec<Segment>,
    k: usize,
    factors: Factors,
    sums: Sums,
    depth: usize,
    end: End,
    flops: f64,
}

impl Narrow {
    /// Whether a product is computed here: sums in half precision, or all factors in bfloat16.
    pub(crate) fn is_meant(desc: &Desc) -> bool {
        let bf16 = desc.kind == ops::QHAL_OP_GEMM && desc.compute == ops::QHAL_COMPUTE_BF16;
        desc.is_product() && (narrow_sums(desc.accumulate) || bf16)
    }

    pub(crate) fn new(desc: &Desc, model: &Model) -> Result<Self, Failure> {
        let refuse = |what: &str| Failure::unsupported(format!("{}: {what}", ops::op_name(desc.kind)));
        let f32_matrix = |tensor: Option<&Tensor>| {
            let tensor = tensor.filter(|t| t.dtype == ops::QHAL_DTYPE_F32 && t.dims.len() == 2);
            tensor.cloned().ok_or_else(|| refuse("expected matrices of f32 as input, result and addend"))
        };
        if desc.kind != ops::QHAL_OP_GEMM || desc.outputs.len() != 1 {
            return Err(refuse("rounded sums are simulated for plain products only"));
        }
        let (x, out) = (f32_matrix(desc.inputs.first())?, f32_matrix(desc.outputs.first())?);
        let expected = desc.expected();
        let k = usize::try_from(x.columns(&expected)).unwrap_or(0);
        let computes = desc.computes();
        let first = *computes.first().ok_or_else(|| refuse("expected a weight"))?;
        let factors = match first {
            ops::QHAL_COMPUTE_F32 => Factors::F32,
            ops::QHAL_COMPUTE_BF16 => Factors::Bf16 { truncate: model.chip.accuracy.truncates_bf16 },
            _ => return Err(refuse("integer products are not summed in half precision")),
        };
        if computes.iter().any(|compute| *compute != first) {
            return Err(refuse("segments of different forms"));
        }
        let span = desc.int(ops::QHAL_ATTR_ACCUMULATE_SPAN);
        let sums = match (narrow_sums(desc.accumulate), span) {
            (false, None) => Sums::F32,
            (true, None) => Sums::F16 { span: 0 },
            (true, Some(span)) if (1..=1 << 20).contains(&span) => Sums::F16 { span: span as usize },
            _ => return Err(refuse("a span without sums in half precision, or of less than one product")),
        };
        let weights = desc.weights();
        let mut segments = Vec::new();
        for input in &weights {
            let weight = desc.inputs.get(*input).ok_or_else(|| refuse("expected a weight"))?;
            let dtype = DType::from_code(weight.dtype).filter(|d| d.is_float() || d.is_block_quantised());
            let plain = weight.dims.len() == 2 && weight.quant_scheme == QHAL_QUANT_NONE;
            let fits = weight.columns(&expected) as usize == k && k > 0;
            match dtype.filter(|dtype| plain && fits && k.is_multiple_of(dtype.block_len())) {
                Some(dtype) => {
                    let n = weight.rows(&expected) as usize;
                    segments.push(Segment { input: *input, bias: None, dtype, n });
                }
                None => return Err(refuse("expected weights [N, K] of a float or block type")),
            }
        }
        let mut next = weights.last().map_or(1, |last| last + 1);
        if desc.int(ops::QHAL_ATTR_HAS_BIAS) == Some(1) {
            for segment in &mut segments {
                let bias = desc.inputs.get(next).ok_or_else(|| refuse("expected a bias for each weight"))?;
                if !bias.is_absent() {
                    if bias.dtype != ops::QHAL_DTYPE_F32 || bias.elements(&expected) as usize != segment.n {
                        return Err(refuse("expected biases [N] of f32"));
                    }
                    segment.bias = Some(next);
                }
                next += 1;
            }
        }
        let (end, addend) = match desc.epilogues.as_slice() {
            [] => (End::Nothing, None),
            [(ops::QHAL_EPILOGUE_GLU, _, param)] if segments.len() == 2 && segments[0].n == segments[1].n => {
                let gelu = match i64::from(*param) {
                    ops::QHAL_ACT_SILU => false,
                    ops::QHAL_ACT_GELU_TANH => true,
                    _ => return Err(refuse("expected silu or gelu")),
                };
                (End::Glu { gelu }, None)
            }
            [(ops::QHAL_EPILOGUE_ADD, input, _)] if *input as usize == next => {
                next += 1;
                (End::Add { input: *input as usize }, Some(f32_matrix(desc.inputs.get(*input as usize))?))
            }
            _ => return Err(refuse("these epilogues")),
        };
        let columns: usize = match end {
            End::Glu { .. } => segments[0].n,
            _ => segments.iter().map(|segment| segment.n).sum(),
        };
        let same_rows = |tensor: &Tensor| tensor.dims.first() == x.dims.first();
        let wide = |tensor: &Tensor| tensor.columns(&expected) as usize == columns;
        if next != desc.inputs.len()
            || !wide(&out)
            || !same_rows(&out)
            || !addend.iter().all(|a| wide(a) && same_rows(a))
        {
            return Err(refuse("operands that do not fit each other"));
        }
        let depth = model.chip.compute.tiles.first().map_or(ASSUMED_DEPTH, |tile| tile.shape[2]).max(1) as usize;
        let total: usize = segments.iter().map(|segment| segment.n).sum();
        let flops = 2.0 * x.rows(&expected) as f64 * (k * total) as f64;
        Ok(Self { x, out, addend, segments, k, factors, sums, depth, end, flops })
    }

    pub(crate) fn info(&self, mut info: qhal_plan_info) -> qhal_plan_info {
        // Not capture-safe: a launch takes memory of the host while it runs.
        info.flags = QHAL_PLAN_DETERMINISTIC | QHAL_PLAN_BATCH_INVARIANT | QHAL_PLAN_NEEDS_PREPACK;
        for segment in &self.segments {
            if let (Some(bytes), Some(layout)) =
                (info.packed_bytes.get_mut(segment.input), info.packed_layout.get_mut(segment.input))
            {
                (*bytes, *layout) = (4 * (segment.n * self.k) as u64, self.factors.layout());
            }
        }
        if let End::Add { input } = self.end {
            info.in_place = 1 << input;
        }
        info.flops = self.flops;
        let factors = if self.factors == Factors::F32 { "f32" } else { "bf16" };
        let sums = match self.sums {
            Sums::F32 => "f32".to_owned(),
            Sums::F16 { span: 0 } => "f16".to_owned(),
            Sums::F16 { span } => format!("f16/{span}"),
        };
        write_text(&mut info.kernel, &format!("gemm.{factors}.sums_{sums}"));
        info
    }

    /// Unpacks a weight to float32, rounded as factors are.
    pub(crate) fn pack(&self, input: usize, from: &[u8], to: &mut [u8]) -> Result<(), Failure> {
        let segment = self.segments.iter().find(|segment| segment.input == input);
        let segment = segment.ok_or_else(|| Failure::invalid(format!("input {input} is no weight")))?;
        let stored = segment.dtype.bytes_for((segment.n * self.k) as u64).and_then(|bytes| usize::try_from(bytes).ok());
        let stored = stored.and_then(|bytes| from.get(..bytes));
        let from = stored.ok_or_else(|| Failure::out_of_range("a weight that is too short"))?;
        let mut values = vec![0.0; segment.n * self.k];
        blocks::dequantize(segment.dtype, from, &mut values).map_err(|error| Failure::invalid(error.to_string()))?;
        for (to, value) in to.chunks_exact_mut(4).zip(values) {
            to.copy_from_slice(&self.factors.round(value).to_le_bytes());
        }
        Ok(())
    }

    fn dot(&self, x: &[f32], w: &[f32]) -> f32 {
        match self.sums {
            Sums::F32 => {
                let mut lanes = [0.0_f32; LANES];
                for (x, w) in x.chunks(LANES).zip(w.chunks(LANES)) {
                    for (lane, (x, w)) in lanes.iter_mut().zip(x.iter().zip(w)) {
                        *lane += x * w;
                    }
                }
                lanes.iter().sum()
            }
            Sums::F16 { span } => {
                let (mut sum, mut accumulator, mut done) = (0.0_f32, 0.0_f32, 0);
                for (x, w) in x.chunks(self.depth).zip(w.chunks(self.depth)) {
                    let tile: f32 = x.iter().zip(w).map(|(x, w)| x * w).sum();
                    accumulator = f16::from_f32(accumulator + tile).to_f32();
                    done += x.len();
                    if span > 0 && done >= span {
                        sum += accumulator;
                        (accumulator, done) = (0.0, 0);
                    }
                }
                sum + accumulator
            }
        }
    }

    /// Computes; `operand` gives the first byte of an operand, inputs then outputs, whose ranges were checked.
    pub(crate) fn run(
        &self,
        cpu: Cpu,
        symbols: &[i64],
        operand: &dyn Fn(usize) -> Option<*mut u8>,
    ) -> Result<(), Failure> {
        let at = |i: usize| operand(i).ok_or_else(|| Failure::invalid(format!("operand {i} is missing")));
        let rows = self.x.rows(symbols) as usize;
        let stride = self.x.row_stride(symbols) as usize;
        let from = at(0)?.cast::<f32>();
        let mut x = vec![0.0_f32; rows * self.k];
        for (row, to) in x.chunks_exact_mut(self.k).enumerate() {
            // SAFETY: row `row` of the input; alignment is not assumed.
            to.iter_mut().enumerate().for_each(|(i, to)| unsafe {
                *to = self.factors.round(from.add(row * stride + i).read_unaligned());
            });
        }
        let mut parts = Vec::with_capacity(self.segments.len());
        for segment in &self.segments {
            // SAFETY: the packed form of the weight: buffers begin at multiples of 64, and so does every operand.
            let weight = unsafe { std::slice::from_raw_parts(at(segment.input)?.cast::<f32>(), segment.n * self.k) };
            let bias = match segment.bias {
                // SAFETY: N values of f32, as described.
                Some(input) => Some(unsafe { std::slice::from_raw_parts(at(input)?.cast::<f32>(), segment.n) }),
                None => None,
            };
            parts.push((weight, bias));
        }
        let inputs = self.inputs();
        let out = Out { at: at(inputs)?.cast(), stride: self.out.row_stride(symbols) as usize };
        let addend = match (self.end, &self.addend) {
            (End::Add { input }, Some(tensor)) => {
                Some(Out { at: at(input)?.cast(), stride: tensor.row_stride(symbols) as usize })
            }
            _ => None,
        };
        let columns: Vec<(usize, usize)> = match self.end {
            End::Glu { .. } => (0..self.segments[0].n).map(|column| (0, column)).collect(),
            _ => self.segments.iter().enumerate().flat_map(|(s, part)| (0..part.n).map(move |n| (s, n))).collect(),
        };
        let value = |x: &[f32], segment: usize, n: usize| {
            let (weight, bias) = parts[segment];
            self.dot(x, &weight[n * self.k..][..self.k]) + bias.map_or(0.0, |bias| bias[n])
        };
        let body = |task: usize| {
            let first = task * COLUMNS;
            for (column, (segment, n)) in columns.iter().enumerate().skip(first).take(COLUMNS) {
                for (row, x) in x.chunks_exact(self.k).enumerate() {
                    let y = value(x, *segment, *n);
                    let y = match (self.end, &addend) {
                        (End::Glu { gelu }, _) => activation(y, gelu) * value(x, 1, *n),
                        (End::Add { .. }, Some(addend)) => y + addend.read(row, column),
                        _ => y,
                    };
                    out.write(row, column, y);
                }
            }
        };
        cpu.parallel_for(columns.len().div_ceil(COLUMNS), &body);
        Ok(())
    }

    /// Number of inputs: the first output's place among the operands.
    fn inputs(&self) -> usize {
        let last = self.segments.iter().flat_map(|segment| [Some(segment.input), segment.bias]).flatten().max();
        let last = if let End::Add { input } = self.end { Some(input) } else { last };
        last.map_or(1, |last| last + 1)
    }
}

fn activation(x: f32, gelu: bool) -> f32 {
    let x = f64::from(x);
    let y = match gelu {
        false => x / (1.0 + (-x).exp()),
        true => 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x)).tanh()),
    };
    y as f32
}

/// Rows of float32 that tasks write different columns of.
struct Out {
    at: *mut f32,
    stride: usize,
}
// SAFETY: tasks touch different elements.
unsafe impl Sync for Out {}

impl Out {
    fn read(&self, row: usize, column: usize) -> f32 {
        // SAFETY: within the operand, whose extent was checked.
        unsafe { self.at.add(row * self.stride + column).read_unaligned() }
    }
    fn write(&self, row: usize, column: usize, value: f32) {
        // SAFETY: as above, and no other task has this element.
        unsafe { self.at.add(row * self.stride + column).write_unaligned(value) }
    }
}
