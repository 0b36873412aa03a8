//! An op run once, with guards around what it writes, poison in it, and its inputs compared afterwards; and all checks of a
//! case made from such runs.

use half::{bf16, f16};
use qwen_hal::abi::ops::{QHAL_DTYPE_BF16, QHAL_DTYPE_F16, dtype_block};
use qwen_hal::abi::{
    QHAL_PLAN_BATCH_INVARIANT, QHAL_PLAN_DETERMINISTIC, QHAL_USAGE_ACTIVATION, QHAL_USAGE_WORKSPACE, qhal_tensor_desc,
};
use qwen_hal::{Buffer, BufferDesc, Device, LaunchArgs, OpDesc, Plan, PlanError, PlanOptions, Scope, Stream};

use crate::case::{Trouble, ensure, failed, unsupported};
use crate::limits::Limit;

/// Bytes before and after each written range, and what they hold.
const GUARD: u64 = 256;
const GUARD_BYTE: u8 = 0xa5;
/// All bits set: NaN in every float type, -1 in integers.
pub(crate) const NAN: u8 = 0xff;
/// Another content that no result may depend on.
const OTHER: u8 = 0x33;

/// What an op reads.
#[derive(Debug, Clone)]
pub(crate) enum Operand {
    Absent,
    Bytes(Vec<u8>),
    /// Output 0 of another op, whose layout is the device's own: a cache.
    Made(Box<Made>),
}

/// An op that makes an operand.
#[derive(Debug, Clone)]
pub(crate) struct Made {
    pub(crate) op: OpDesc,
    pub(crate) inputs: Vec<Operand>,
    pub(crate) symbols: Vec<i64>,
}

/// What an output should be.
#[derive(Debug, Clone)]
pub(crate) enum Expected {
    /// Values of the output's float type.
    Real(Vec<f64>),
    /// The bits themselves.
    Exact(Vec<u8>),
}

/// The same rows in other company: these inputs must give the same bits as that part of output 0.
#[derive(Debug, Clone)]
pub(crate) struct Company {
    pub(crate) inputs: Vec<Operand>,
    pub(crate) symbols: Vec<i64>,
    pub(crate) at: std::ops::Range<usize>,
}

/// An op with its inputs and what should come out.
#[derive(Debug, Clone)]
pub(crate) struct OpCase {
    pub(crate) op: OpDesc,
    pub(crate) inputs: Vec<Operand>,
    pub(crate) symbols: Vec<i64>,
    pub(crate) expected: Vec<Expected>,
    pub(crate) limit: Limit,
    pub(crate) company: Vec<Company>,
}

/// Results and errors of a case.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    pub(crate) nmse: Option<f64>,
    pub(crate) max_abs: Option<f64>,
    pub(crate) kernel: String,
    pub(crate) bits: Option<u64>,
}

pub(crate) fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
pub(crate) fn bytes_of_ints(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
pub(crate) fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Bytes from the first element to the end of the last at the values of a launch.
fn extent(tensor: &qhal_tensor_desc, symbols: &[i64]) -> u64 {
    let (block_len, block_bytes) = dtype_block(tensor.dtype).unwrap_or((1, 1));
    let (mut last, mut inner) = (0_u64, 1_u64);
    for i in (0..tensor.rank as usize).rev() {
        let dim = match tensor.dim_symbol[i] {
            0 => tensor.dims[i],
            symbol => symbols.get(symbol as usize - 1).copied().unwrap_or(0),
        };
        let (Ok(dim), Ok(stride)) = (u64::try_from(dim), u64::try_from(tensor.strides[i])) else { return 0 };
        if dim == 0 {
            return 0;
        }
        let stride = if stride == 0 { inner } else { stride };
        last += (dim - 1) * stride;
        inner = stride * dim;
    }
    (last + 1) / u64::from(block_len) * u64::from(block_bytes)
}

fn alloc(device: &Device, size: u64, usage: u32) -> Result<Buffer, Trouble> {
    let desc = BufferDesc::new(size.max(1), usage, Scope::Temporary, "check");
    Ok(device.alloc(&desc)?)
}

pub(crate) fn download(stream: &Stream, buffer: &Buffer, offset: u64, size: u64) -> Result<Vec<u8>, Trouble> {
    let mut bytes = vec![0; size as usize];
    stream.copy_to_host(&buffer.slice(offset, size)?, &mut bytes)?;
    Ok(bytes)
}

/// Fills by a copy, so that a defect of `fill` is not a defect of every op.
pub(crate) fn upload(stream: &Stream, buffer: &Buffer, offset: u64, bytes: &[u8]) -> Result<(), Trouble> {
    Ok(stream.copy_from_host(bytes, &buffer.slice(offset, bytes.len() as u64)?)?)
}

/// Memory with guards around a range of poison.
pub(crate) struct Guarded {
    pub(crate) buffer: Buffer,
    pub(crate) size: u64,
    guard: u64,
}

impl Guarded {
    pub(crate) fn new(device: &Device, stream: &Stream, size: u64, poison: u8, usage: u32) -> Result<Self, Trouble> {
        let guard = GUARD.max(device.caps().buffer_alignment);
        let buffer = alloc(device, size + 2 * guard, usage)?;
        let mut bytes = vec![GUARD_BYTE; (size + 2 * guard) as usize];
        bytes[guard as usize..][..size as usize].fill(poison);
        upload(stream, &buffer, 0, &bytes)?;
        Ok(Self { buffer, size, guard })
    }
    pub(crate) fn slice(&self) -> Result<qwen_hal::Slice, Trouble> {
        Ok(self.buffer.slice(self.guard, self.size)?)
    }
    /// The content, if the guards are whole.
    pub(crate) fn read(&self, stream: &Stream, what: &str) -> Result<Vec<u8>, Trouble> {
        let bytes = download(stream, &self.buffer, 0, self.size + 2 * self.guard)?;
        let end = (self.guard + self.size) as usize;
        let (before, behind) = (&bytes[..self.guard as usize], &bytes[end..]);
        if let Some(at) = before.iter().rposition(|byte| *byte != GUARD_BYTE) {
            return failed(format!("guards: {} bytes before {what} were written", before.len() - at));
        }
        if let Some(at) = behind.iter().position(|byte| *byte != GUARD_BYTE) {
            return failed(format!("guards: byte {at} behind the end of {what} was written"));
        }
        Ok(bytes[self.guard as usize..end].to_vec())
    }
}

/// Outputs and plan of one run.
pub(crate) struct Run {
    pub(crate) outputs: Vec<Vec<u8>>,
    pub(crate) flags: u32,
    pub(crate) kernel: String,
}

pub(crate) fn plan(device: &Device, op: &OpDesc) -> Result<Plan, Trouble> {
    let support = match device.op_supports(op) {
        Ok(support) => support,
        Err(error) => return failed(format!("op_supports: {error}")),
    };
    match (device.plan(op, &PlanOptions::default()), support) {
        (Err(PlanError::Unsupported(error)), qwen_hal::Support::No { reason }) => {
            unsupported(if reason.is_empty() { error.message } else { reason })
        }
        (Err(error), qwen_hal::Support::No { .. }) => {
            failed(format!("plan_create: expected UNIMPLEMENTED, as op_supports says no, found: {error}"))
        }
        (Err(error), _) => failed(format!("op_supports claims this op, plan_create refuses it: {error}")),
        (Ok(_), qwen_hal::Support::No { reason }) => {
            failed(format!("op_supports says no ({reason}), plan_create makes a plan"))
        }
        (Ok(plan), _) => Ok(plan),
    }
}

/// Runs an op once.
pub(crate) fn run(
    device: &Device,
    op: &OpDesc,
    inputs: &[Operand],
    symbols: &[i64],
    poison: u8,
) -> Result<Run, Trouble> {
    run_plan(device, &plan(device, op)?, op, inputs, symbols, poison)
}

/// Runs a plan of an op once.
fn run_plan(
    device: &Device,
    plan: &Plan,
    op: &OpDesc,
    inputs: &[Operand],
    symbols: &[i64],
    poison: u8,
) -> Result<Run, Trouble> {
    let stream = device.stream("check")?;
    let mut args = LaunchArgs::new(plan);
    for (i, value) in symbols.iter().enumerate() {
        args.set_symbol(i, *value);
    }
    let mut kept = Vec::new();
    for (i, operand) in inputs.iter().enumerate() {
        let bytes = match operand {
            Operand::Absent => continue,
            Operand::Bytes(bytes) => bytes.clone(),
            Operand::Made(made) => run(device, &made.op, &made.inputs, &made.symbols, poison)?.outputs.swap_remove(0),
        };
        let source = alloc(device, bytes.len() as u64, QHAL_USAGE_ACTIVATION)?;
        upload(&stream, &source, 0, &bytes)?;
        let packed = plan.info().packed_bytes.get(i).copied().unwrap_or(0);
        let (buffer, content) = if packed > 0 {
            let target = Guarded::new(device, &stream, packed, poison, QHAL_USAGE_ACTIVATION)?;
            plan.prepack(&stream, i, &source.slice(0, bytes.len() as u64)?, &target.slice()?)?;
            stream.wait()?;
            let content = target.read(&stream, &format!("the packed form of input {i}"))?;
            args.set_input(i, &target.slice()?);
            (target.buffer, content)
        } else {
            args.set_input(i, &source.slice(0, bytes.len() as u64)?);
            (source, bytes)
        };
        kept.push((i, buffer, if packed > 0 { GUARD.max(device.caps().buffer_alignment) } else { 0 }, content));
    }
    let mut outputs = Vec::new();
    for (o, tensor) in op.outputs().iter().enumerate() {
        let output = Guarded::new(device, &stream, extent(tensor.raw(), symbols), poison, QHAL_USAGE_ACTIVATION)?;
        args.set_output(o, &output.slice()?);
        outputs.push(output);
    }
    let workspace = plan.info().workspace_bytes;
    let workspace = if workspace > 0 {
        let memory = Guarded::new(device, &stream, workspace, poison, QHAL_USAGE_WORKSPACE)?;
        args.set_workspace(&memory.slice()?);
        Some(memory)
    } else {
        None
    };
    plan.launch(&stream, &args)?;
    stream.wait()?;
    if let Some(memory) = workspace {
        memory.read(&stream, "the workspace")?;
    }
    for (i, buffer, offset, content) in kept {
        let after = download(&stream, &buffer, offset, content.len() as u64)?;
        ensure(after == content, || format!("inputs: input {i} was changed by the launch"))?;
    }
    let outputs = outputs.iter().enumerate().map(|(o, output)| output.read(&stream, &format!("output {o}")));
    Ok(Run {
        outputs: outputs.collect::<Result<_, _>>()?,
        flags: plan.info().flags,
        kernel: plan.info().kernel.clone(),
    })
}

/// Values of a float type.
pub(crate) fn decode(dtype: u32, bytes: &[u8]) -> Vec<f64> {
    let halves = || bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    match dtype {
        QHAL_DTYPE_F16 => halves().map(|bits| f16::from_bits(bits).to_f64()).collect(),
        QHAL_DTYPE_BF16 => halves().map(|bits| bf16::from_bits(bits).to_f64()).collect(),
        _ => f32s(bytes).into_iter().map(f64::from).collect(),
    }
}

/// (nmse, max-abs over the largest magnitude); infinite where a value is not finite and the other is.
fn errors(found: &[f64], expected: &[f64]) -> (f64, f64) {
    let (mut difference, mut square, mut largest, mut magnitude) = (0.0_f64, 0.0_f64, 0.0_f64, 0.0_f64);
    for (found, expected) in found.iter().zip(expected) {
        if found.is_nan() {
            return (f64::INFINITY, f64::INFINITY);
        }
        let error = (found - expected).abs();
        difference += error * error;
        square += expected * expected;
        largest = largest.max(error);
        magnitude = magnitude.max(expected.abs());
    }
    let over = |error: f64, of: f64| if error == 0.0 { 0.0 } else { error / of };
    (over(difference, square), over(largest, magnitude))
}

impl OpCase {
    pub(crate) fn check(&self, device: &Device) -> Result<Measured, (Trouble, Measured)> {
        let mut measured = Measured::default();
        match self.check_into(device, &mut measured) {
            Ok(()) => Ok(measured),
            Err(trouble) => Err((trouble, measured)),
        }
    }

    fn check_into(&self, device: &Device, measured: &mut Measured) -> Result<(), Trouble> {
        let first = run(device, &self.op, &self.inputs, &self.symbols, NAN)?;
        measured.kernel.clone_from(&first.kernel);
        self.compare(&first, measured)?;
        let again = run(device, &self.op, &self.inputs, &self.symbols, OTHER)?;
        self.compare(&again, measured)?;
        let cache = self.op.kind() == qwen_hal::abi::ops::QHAL_OP_KV_APPEND;
        if first.flags & QHAL_PLAN_DETERMINISTIC != 0 {
            // What a cache held before stays where nothing is appended.
            ensure(cache || first.outputs == again.outputs, || {
                "repeat: the plan claims to be deterministic, a second launch gave other bits".into()
            })?;
            for _ in 0..2 {
                let third = run(device, &self.op, &self.inputs, &self.symbols, NAN)?;
                ensure(first.outputs == third.outputs, || {
                    "repeat: the plan claims to be deterministic, a later launch gave other bits".into()
                })?;
            }
            measured.bits = Some(hash(&first.outputs));
        }
        if first.flags & QHAL_PLAN_BATCH_INVARIANT != 0 {
            for company in &self.company {
                let other = run(device, &self.op, &company.inputs, &company.symbols, NAN)?;
                let (expected, found) = (first.outputs[0].get(company.at.clone()), other.outputs[0].as_slice());
                ensure(expected == Some(found), || {
                    format!(
                        "company: the plan claims that rows are independent, bytes {:?} have other bits at sizes {:?}",
                        company.at, company.symbols
                    )
                })?;
            }
        }
        Ok(())
    }

    /// Every variant that the plan tells of must be there, be within the limits and give the same bits.
    pub(crate) fn check_variants(&self, device: &Device) -> Result<(), Trouble> {
        let own = plan(device, &self.op)?;
        let variants = own.variants()?;
        let Some(first) = variants.first() else {
            return unsupported("the plugin tells no variants of this op");
        };
        ensure(first.chosen, || format!("the first variant, {}, is not the one that the plan takes", first.name))?;
        let usual = run_plan(device, &own, &self.op, &self.inputs, &self.symbols, NAN)?;
        let mut names: Vec<&str> = variants.iter().map(|variant| variant.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        for name in names {
            let plan = match device.plan_as(&self.op, &PlanOptions::default(), name) {
                Ok(plan) => plan,
                Err(error) => return failed(format!("plan_create_as: {name} is told of, and refused: {error}")),
            };
            let run = run_plan(device, &plan, &self.op, &self.inputs, &self.symbols, OTHER)?;
            self.compare(&run, &mut Measured::default())?;
            ensure(run.outputs == usual.outputs, || format!("the variant {name} gives other bits than the usual one"))?;
        }
        match device.plan_as(&self.op, &PlanOptions::default(), "no such variant") {
            Err(PlanError::Unsupported(_)) => Ok(()),
            Err(error) => failed(format!("plan_create_as: expected UNIMPLEMENTED for an unknown name, found: {error}")),
            Ok(_) => failed("plan_create_as: expected UNIMPLEMENTED for an unknown name, found a plan"),
        }
    }

    fn compare(&self, run: &Run, measured: &mut Measured) -> Result<(), Trouble> {
        for (o, (expected, found)) in self.expected.iter().zip(&run.outputs).enumerate() {
            match expected {
                Expected::Exact(bytes) => {
                    let at = bytes.iter().zip(found).position(|(a, b)| a != b);
                    let at = at.or((bytes.len() != found.len()).then_some(bytes.len().min(found.len())));
                    if let Some(at) = at {
                        return failed(format!("values: output {o} differs from byte {at} of {}", bytes.len()));
                    }
                    measured.nmse.get_or_insert(0.0);
                    measured.max_abs.get_or_insert(0.0);
                }
                Expected::Real(values) => {
                    let dtype = self.op.outputs()[o].raw().dtype;
                    let found = decode(dtype, found);
                    ensure(found.len() == values.len(), || {
                        format!("values: output {o} has {} values, expected {}", found.len(), values.len())
                    })?;
                    let (nmse, max_abs) = errors(&found, values);
                    measured.nmse = Some(measured.nmse.unwrap_or(0.0).max(nmse));
                    measured.max_abs = Some(measured.max_abs.unwrap_or(0.0).max(max_abs));
                    if nmse > self.limit.nmse || max_abs > self.limit.max_abs {
                        let worst = (0..values.len())
                            .max_by(|a, b| (found[*a] - values[*a]).abs().total_cmp(&(found[*b] - values[*b]).abs()))
                            .unwrap_or(0);
                        return failed(format!(
                            "values: output {o}: nmse {nmse:.1e} (limit {:.0e}), max-abs {max_abs:.1e} (limit {:.0e}); \
                             element {worst} is {}, expected {}",
                            self.limit.nmse, self.limit.max_abs, found[worst], values[worst]
                        ));
                    }
                }
            }
        }
        Ok(())
    }
}

fn hash(outputs: &[Vec<u8>]) -> u64 {
    // FNV-1a: the same in every process and version.
    outputs
        .iter()
        .flatten()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}
