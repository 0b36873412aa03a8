//! Ops with operands made up for them, to be timed: what a launch costs depends on sizes and types, not on values.

use qwen_hal::abi::ops::{self, dtype_block};
use qwen_hal::abi::{QHAL_USAGE_ACTIVATION, QHAL_USAGE_WORKSPACE};
use qwen_hal::{Buffer, BufferDesc, Device, Dim, LaunchArgs, OpDesc, Plan, Scope, Slice, Stream, TensorDesc};

use crate::error::DispatchError;

/// A byte that is harmless wherever it stands: no type makes a NaN, an infinity or a subnormal number of it.
const BYTE: u8 = 0x2c;
/// Weights are read from so many bytes at least, so that they are not in a cache when they are read again.
const COLD_BYTES: u64 = 64 << 20;
/// Copies of a weight at most.
const MOST_COPIES: u64 = 64;

/// An op to be timed, and values of its symbols.
#[derive(Debug, Clone)]
pub struct Case {
    /// What it is, for people: `gemm.q4_0 1x2048x2048`.
    pub name: String,
    /// The op.
    pub op: OpDesc,
    /// Values of a launch.
    pub symbols: Vec<i64>,
}

/// The form of a product: storage type, its code, form of the multiplication.
const FORMS: [(&str, u32, u32, &str); 4] = [
    ("q4_0", 2, ops::QHAL_COMPUTE_I8_G32, "i8_g32"),
    ("q8_0", 8, ops::QHAL_COMPUTE_I8_G32, "i8_g32"),
    ("bf16", ops::QHAL_DTYPE_BF16, ops::QHAL_COMPUTE_F32, "f32"),
    ("f32", ops::QHAL_DTYPE_F32, ops::QHAL_COMPUTE_F32, "f32"),
];

impl Case {
    /// y = x W^T for `rows` of up to `most` rows.
    #[must_use]
    pub fn gemm(storage: (&str, u32, u32, &str), rows: i64, most: i64, depth: i64, width: i64) -> Self {
        let (name, dtype, compute, form) = storage;
        let tokens = Dim::Symbol { index: 0, min: 1, max: most, expected: rows };
        let op = OpDesc::new(ops::QHAL_OP_GEMM)
            .compute(compute)
            .input(TensorDesc::f32(&[tokens, depth.into()]))
            .input(TensorDesc::new(dtype, &[width.into(), depth.into()]))
            .output(TensorDesc::f32(&[tokens, width.into()]));
        Self { name: format!("gemm.{name}.{form} {rows}x{depth}x{width}"), op, symbols: vec![rows] }
    }

    /// A launch that does next to nothing.
    #[must_use]
    pub fn smallest() -> Self {
        let x = TensorDesc::f32(&[1.into(), 16.into()]);
        Self { name: "softmax 1x16".into(), op: OpDesc::new(ops::QHAL_OP_SOFTMAX).input(x).output(x), symbols: vec![] }
    }
}

/// Forms of products that are worth a rate: (name, storage, compute, form).
pub(crate) const fn forms() -> [(&'static str, u32, u32, &'static str); 4] {
    FORMS
}

/// Forms that read memory fastest on the devices known so far: the least unpacking, and none.
pub(crate) fn reading_forms() -> impl Iterator<Item = (&'static str, u32, u32, &'static str)> {
    FORMS.into_iter().filter(|form| matches!(form.0, "q8_0" | "f32"))
}

/// Ops of decoding and of prompts in the shapes of small and middle-sized models, for every form of products.
#[must_use]
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for form in FORMS {
        for (depth, width) in [(576, 1536), (2048, 2048)] {
            for rows in [1, 4, 8, 16, 64, 256] {
                cases.push(Case::gemm(form, rows, 512, depth, width));
            }
        }
    }
    cases
}

/// Memory for the operands of a case, weights in several copies that take turns. Plans with the same packed forms share it.
pub(crate) struct Operands {
    /// By copy, by input.
    inputs: Vec<Vec<Slice>>,
    outputs: Vec<Slice>,
    packed: Vec<(u64, u32)>,
    _buffers: Vec<Buffer>,
}

/// Writes [`BYTE`] all over a buffer, by copies of some MiB: a device need not have fills.
fn fill(stream: &Stream, buffer: &Buffer) -> Result<(), DispatchError> {
    const PIECE: u64 = 4 << 20;
    let bytes = [BYTE; 4096].repeat((buffer.size().min(PIECE)).div_ceil(4096) as usize);
    for offset in (0..buffer.size()).step_by(PIECE as usize) {
        let size = PIECE.min(buffer.size() - offset);
        stream.copy_from_host(&bytes[..size as usize], &buffer.slice(offset, size)?)?;
    }
    Ok(())
}

/// What a plan wants its weights to be like.
fn packed_forms(plan: &Plan) -> Vec<(u64, u32)> {
    plan.info().packed_bytes.iter().copied().zip(plan.info().packed_layout.iter().copied()).collect()
}

impl Operands {
    /// `cold`: weights are read from memory, else from wherever one copy of them stays.
    pub(crate) fn new(
        device: &Device,
        stream: &Stream,
        case: &Case,
        plan: &Plan,
        cold: bool,
    ) -> Result<Self, DispatchError> {
        let mut buffers = Vec::new();
        let mut alloc = |bytes: u64| {
            let buffer =
                device.alloc(&BufferDesc::new(bytes.max(64), QHAL_USAGE_ACTIVATION, Scope::Temporary, "kernels"))?;
            buffers.push(buffer.clone());
            Ok::<_, DispatchError>(buffer)
        };
        let packed = packed_forms(plan);
        let is_weight = |input: usize| weight_bytes(case, input) > 0;
        let size = |input: usize| packed[input].0.max(weight_bytes(case, input));
        let weights: u64 = (0..plan.num_inputs()).filter(|input| is_weight(*input)).map(size).sum();
        let copies = if cold && weights > 0 { COLD_BYTES.div_ceil(weights).clamp(1, MOST_COPIES) } else { 1 };
        let mut inputs: Vec<Vec<Slice>> = (0..copies).map(|_| Vec::new()).collect();
        for (input, (packed_bytes, _)) in packed.iter().enumerate() {
            let source = alloc(plan.input_bytes(input))?;
            fill(stream, &source)?;
            for (copy, inputs) in inputs.iter_mut().enumerate() {
                inputs.push(if *packed_bytes > 0 {
                    let target = alloc(*packed_bytes)?.slice(0, *packed_bytes)?;
                    plan.prepack(stream, input, &source.whole(), &target)?;
                    target
                } else if is_weight(input) && copy > 0 {
                    let target = alloc(plan.input_bytes(input))?;
                    fill(stream, &target)?;
                    target.whole()
                } else {
                    source.whole()
                });
            }
        }
        let outputs = (0..plan.num_outputs()).map(|output| Ok(alloc(plan.output_bytes(output))?.whole()));
        let outputs = outputs.collect::<Result<Vec<_>, DispatchError>>()?;
        stream.wait()?;
        Ok(Self { inputs, outputs, packed, _buffers: buffers })
    }

    /// Whether they are what a plan wants.
    pub(crate) fn serve(&self, plan: &Plan) -> bool {
        self.packed == packed_forms(plan)
    }

    /// Arguments of a plan, with a workspace of its own.
    pub(crate) fn bind(&self, device: &Device, case: &Case, plan: &Plan) -> Result<Bound, DispatchError> {
        let bytes = plan.info().workspace_bytes;
        let workspace = match bytes {
            0 => None,
            bytes => Some(device.alloc(&BufferDesc::new(bytes, QHAL_USAGE_WORKSPACE, Scope::Temporary, "kernels"))?),
        };
        let bind = |inputs: &Vec<Slice>| {
            let mut args = LaunchArgs::new(plan);
            for (i, slice) in inputs.iter().enumerate() {
                args.set_input(i, slice);
            }
            for (i, slice) in self.outputs.iter().enumerate() {
                args.set_output(i, slice);
            }
            if let Some(workspace) = &workspace {
                args.set_workspace(&workspace.whole());
            }
            for (i, value) in case.symbols.iter().enumerate() {
                args.set_symbol(i, *value);
            }
            args
        };
        Ok(Bound { args: self.inputs.iter().map(bind).collect(), next: 0 })
    }
}

/// Arguments for launches of a plan, one for each copy of the weights.
pub(crate) struct Bound {
    args: Vec<LaunchArgs>,
    next: usize,
}

impl Bound {
    /// One launch, with the next copy of the weights.
    pub(crate) fn launch(&mut self, plan: &Plan, stream: &Stream) -> Result<(), DispatchError> {
        let args = &self.args[self.next];
        self.next = (self.next + 1) % self.args.len();
        Ok(plan.launch(stream, args)?)
    }
}

/// Bytes of a matrix whose sizes are all fixed, 0 for others: weights are such.
fn weight_bytes(case: &Case, input: usize) -> u64 {
    let Some(tensor) = case.op.inputs().get(input).map(TensorDesc::raw) else { return 0 };
    let dims = tensor.dims.iter().take(tensor.rank as usize);
    let is_fixed = tensor.rank == 2 && tensor.dim_symbol.iter().take(2).all(|symbol| *symbol == 0);
    let Some((length, bytes)) = dtype_block(tensor.dtype).filter(|_| is_fixed) else { return 0 };
    let values = dims.fold(1_u64, |n, dim| n.saturating_mul(u64::try_from(*dim).unwrap_or(0)));
    values / u64::from(length) * u64::from(bytes)
}
