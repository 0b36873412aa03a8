//! From a lowered instruction to the description that a device plans from.
//!
//! One function per group of ops; each mirrors one entry of the op vocabulary ([`qwen_hal::abi::ops`]). Symbols are numbered
//! anew for each op, in order of first use, because a description lists only the symbols that it needs.

use qwen_hal::abi::ops;
use qwen_hal::{Device, Dim as HalDim, OpDesc, Phase as HalPhase, TensorDesc, Tolerance as HalTolerance};
use qwen_ir::program::{Instruction, Operand, Place, Program};
use qwen_ir::{
    Activation, BinaryFunction, Compute, Dim, Epilogue, GemmType, GroupScore, GrowthPattern, MlaForm, Op, Phase, Rope,
    RopeStyle, Route, RouterScore, StateDecl, StateId, StateLayout, Sums, Symbol, SymbolBounds, Tolerance,
};

use crate::weights::WeightKey;

/// A description and the symbols that its launches give values for, in order.
#[derive(Debug)]
pub struct Described {
    /// For the device.
    pub desc: OpDesc,
    /// Which symbol each value is.
    pub symbols: Vec<Symbol>,
}

/// What is the same for all instructions of a program.
#[derive(Debug, Clone, Copy)]
pub struct Context<'a> {
    /// Ranges of the symbols.
    pub bounds: SymbolBounds,
    /// Kind of step.
    pub phase: Phase,
    /// Caches of the model.
    pub states: &'a [StateDecl],
    /// Weights of products that are tables of rows too.
    pub tied: &'a [WeightKey],
}

impl Context<'_> {
    /// Tokens of a block, and whether a block has the joined layout.
    fn cache(&self, state: StateId) -> (i64, Option<StateLayout>) {
        let decl = self.states.get(state.index());
        let tokens = match decl.map(|decl| decl.growth) {
            Some(GrowthPattern::PerBlock { tokens }) => i64::from(tokens),
            _ => 1,
        };
        (tokens, decl.map(|decl| decl.layout))
    }
}

/// The weights that an instruction reads, and the numbers of its inputs that they are.
pub(crate) fn weights_of(instruction: &Instruction) -> impl Iterator<Item = (WeightKey, usize)> {
    let weight = |(input, operand): (usize, &Operand)| match operand.place {
        Place::Weight { id, source } => Some(((id, source), input)),
        _ => None,
    };
    instruction.inputs.iter().enumerate().filter_map(weight)
}

/// Tables of rows that are the weights of products too, among the instructions that `on` accepts by their number.
#[must_use]
pub(crate) fn tied(program: &Program, on: impl Fn(usize) -> bool) -> Vec<WeightKey> {
    let weights = |wanted: fn(&Op) -> bool| {
        let instructions = program.instructions.iter().enumerate().filter(|(i, one)| wanted(&one.op) && on(*i));
        instructions.flat_map(|(_, one)| weights_of(one).map(|(key, _)| key)).collect::<Vec<WeightKey>>()
    };
    let products = weights(|op| matches!(op, Op::Gemm { .. }));
    weights(|op| matches!(op, Op::Embed)).into_iter().filter(|table| products.contains(table)).collect()
}

/// Describes an instruction.
#[must_use]
pub fn describe(instruction: &Instruction, context: &Context<'_>) -> Described {
    let mut symbols = Vec::new();
    let mut desc = OpDesc::new(kind(&instruction.op))
        .phase(match context.phase {
            Phase::Prefill => HalPhase::Prefill,
            Phase::Decode => HalPhase::Decode,
            Phase::Mixed => HalPhase::Mixed,
        })
        .tolerance(match instruction.tolerance {
            Tolerance::Exact => HalTolerance::Exact,
            Tolerance::Tight => HalTolerance::Tight,
            Tolerance::Normal => HalTolerance::Normal,
            Tolerance::Loose => HalTolerance::Loose,
            Tolerance::Statistical => HalTolerance::Statistical,
        });
    for operand in &instruction.inputs {
        desc = desc.input(tensor(operand, &context.bounds, &mut symbols));
    }
    for operand in &instruction.outputs {
        desc = desc.output(tensor(operand, &context.bounds, &mut symbols));
    }
    desc = attributes(desc, instruction, context);
    Described { desc, symbols }
}

/// Why a device can't read or write an operand where it begins, if there is such a one. Whole values are placed as the device
/// wants; columns of a value begin where they begin.
#[must_use]
pub fn misaligned(instruction: &Instruction, device: &Device) -> Option<String> {
    let alignment = device.caps().buffer_alignment;
    let operands = instruction.inputs.iter().chain(&instruction.outputs);
    let offset = operands.map(|operand| operand.byte_offset).find(|offset| !offset.is_multiple_of(alignment))?;
    Some(format!("an operand begins {offset} bytes into a row, expected a multiple of {alignment}"))
}

fn kind(op: &Op) -> u32 {
    match op {
        Op::Embed => ops::QHAL_OP_EMBED,
        Op::GatherRows => ops::QHAL_OP_GATHER_ROWS,
        Op::Gemm { .. } => ops::QHAL_OP_GEMM,
        Op::GroupedGemm { .. } => ops::QHAL_OP_GROUPED_GEMM,
        Op::Norm { .. } => ops::QHAL_OP_NORM,
        Op::Rope(_) => ops::QHAL_OP_ROPE,
        Op::Glu(_) => ops::QHAL_OP_GLU,
        Op::Binary(_) => ops::QHAL_OP_BINARY,
        Op::Unary(_) => ops::QHAL_OP_UNARY,
        Op::Cast => ops::QHAL_OP_CAST,
        Op::KvAppend { .. } => ops::QHAL_OP_KV_APPEND,
        Op::Attention { .. } => ops::QHAL_OP_ATTENTION,
        Op::MlaAttention { .. } => ops::QHAL_OP_MLA_ATTENTION,
        Op::Route { .. } => ops::QHAL_OP_ROUTE,
        Op::Dispatch { .. } => ops::QHAL_OP_DISPATCH,
        Op::Combine { .. } => ops::QHAL_OP_COMBINE,
        Op::Softmax => ops::QHAL_OP_SOFTMAX,
        // Sources, views and layers are not instructions; an unknown kind is refused by every device.
        _ => 0,
    }
}

fn tensor(operand: &Operand, bounds: &SymbolBounds, symbols: &mut Vec<Symbol>) -> TensorDesc {
    if operand.place == Place::Absent {
        return TensorDesc::none();
    }
    let dims: Vec<HalDim> = operand
        .shape
        .iter()
        .map(|dim| match dim {
            Dim::Const(n) => HalDim::Fixed(i64::try_from(*n).unwrap_or(-1)),
            Dim::Symbol(symbol) => {
                let index = symbols.iter().position(|s| s == symbol).unwrap_or_else(|| {
                    symbols.push(*symbol);
                    symbols.len() - 1
                });
                let range = bounds.get(*symbol);
                let bound = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
                HalDim::symbol(index as u32, bound(range.min), bound(range.max))
            }
        })
        .collect();
    let mut desc = TensorDesc::new(operand.dtype.code(), &dims);
    let stride = i64::try_from(operand.row_stride).unwrap_or(i64::MAX);
    let plain = !operand.dtype.is_block_quantised();
    match operand.shape.as_slice() {
        [_, Dim::Const(_)] if plain => desc = desc.with_row_stride(stride),
        // Rows of experts may be columns of wider ones too. Weights of experts are dense.
        [Dim::Symbol(_), Dim::Const(inner), Dim::Const(_)] if plain => {
            let outer = i64::try_from(*inner).unwrap_or(i64::MAX).saturating_mul(stride);
            desc = desc.with_strides(&[outer, stride, 1]);
        }
        _ => {}
    }
    if let Some((rows, columns)) = operand.block_scale {
        desc = desc.with_block_scale(rows, columns);
    }
    desc
}

const fn activation(f: Activation) -> i64 {
    match f {
        Activation::Silu => ops::QHAL_ACT_SILU,
        Activation::GeluTanh => ops::QHAL_ACT_GELU_TANH,
        Activation::Sigmoid => ops::QHAL_UNARY_SIGMOID,
    }
}

const fn compute_code(compute: Compute) -> u32 {
    match compute {
        Compute::F32 => ops::QHAL_COMPUTE_F32,
        Compute::I8G32 => ops::QHAL_COMPUTE_I8_G32,
        Compute::I8G16 => ops::QHAL_COMPUTE_I8_G16,
        Compute::I8x2G32 => ops::QHAL_COMPUTE_I8X2_G32,
        Compute::I8sG32 => ops::QHAL_COMPUTE_I8S_G32,
        Compute::Bf16 => ops::QHAL_COMPUTE_BF16,
    }
}

fn int(value: impl Into<i64>) -> i64 {
    value.into()
}

fn attributes(desc: OpDesc, instruction: &Instruction, context: &Context<'_>) -> OpDesc {
    match &instruction.op {
        Op::Embed => match weights_of(instruction).any(|(table, _)| context.tied.contains(&table)) {
            true => desc.attr_int(ops::QHAL_ATTR_TIED, 1),
            false => desc,
        },
        Op::Gemm { gemm_type, biases, scales, epilogue } => {
            let desc = desc
                .attr_int(ops::QHAL_ATTR_SEGMENTS, scales.len() as i64)
                .attr_int(ops::QHAL_ATTR_HAS_BIAS, int(biases.contains(&true)))
                .attr_int(ops::QHAL_ATTR_GEMM_TYPE, gemm_code(*gemm_type));
            linear(desc, instruction, *epilogue)
        }
        Op::GroupedGemm { num_experts, top_k, scales, epilogue, .. } => {
            let desc = desc
                .attr_int(ops::QHAL_ATTR_SEGMENTS, scales.len() as i64)
                .attr_int(ops::QHAL_ATTR_GEMM_TYPE, ops::QHAL_GEMM_MOE_GROUPED)
                .attr_int(ops::QHAL_ATTR_NUM_EXPERTS, int(*num_experts))
                .attr_int(ops::QHAL_ATTR_TOP_K, int(*top_k));
            linear(desc, instruction, *epilogue)
        }
        Op::Norm { eps, axis } => desc.attr_real(ops::QHAL_ATTR_EPS, *eps).attr_int(ops::QHAL_ATTR_AXIS, int(*axis)),
        Op::Rope(rope) => rotation(desc, rope),
        Op::Glu(f) | Op::Unary(f) => desc.attr_int(ops::QHAL_ATTR_FUNCTION, activation(*f)),
        Op::Binary(f) => {
            let broadcast = instruction.inputs.get(1).and_then(|b| b.shape.last()) == Some(&Dim::Const(1))
                && instruction.inputs.first().and_then(|a| a.shape.last()) != Some(&Dim::Const(1));
            let function = match f {
                BinaryFunction::Add => ops::QHAL_BINARY_ADD,
                BinaryFunction::Mul => ops::QHAL_BINARY_MUL,
            };
            desc.attr_int(ops::QHAL_ATTR_FUNCTION, function).attr_int(ops::QHAL_ATTR_BROADCAST, int(broadcast))
        }
        Op::KvAppend { state } => append(desc, instruction, context.cache(*state)),
        Op::Attention { attention: a, state } => desc
            .compute(compute_code(instruction.compute.first().copied().unwrap_or(Compute::F32)))
            .attr_int(ops::QHAL_ATTR_NUM_HEADS, int(a.num_heads))
            .attr_int(ops::QHAL_ATTR_NUM_KV_HEADS, int(a.num_key_value_heads))
            .attr_int(ops::QHAL_ATTR_HEAD_DIM, int(a.head_dim))
            .attr_int(ops::QHAL_ATTR_VALUE_DIM, int(a.value_dim))
            .attr_int(ops::QHAL_ATTR_BLOCK_SIZE, context.cache(*state).0)
            .attr_real(ops::QHAL_ATTR_SCALE, a.scale)
            .attr_int(ops::QHAL_ATTR_WINDOW, int(a.window)),
        Op::MlaAttention { attention: a, state } => desc
            .attr_int(ops::QHAL_ATTR_NUM_HEADS, int(a.num_heads))
            .attr_int(ops::QHAL_ATTR_NOPE_DIM, int(a.nope_dim))
            .attr_int(ops::QHAL_ATTR_ROPE_DIM, int(a.rope_dim))
            .attr_int(ops::QHAL_ATTR_VALUE_DIM, int(a.value_dim))
            .attr_int(ops::QHAL_ATTR_LATENT_DIM, int(a.latent_dim))
            .attr_int(ops::QHAL_ATTR_BLOCK_SIZE, context.cache(*state).0)
            .attr_real(ops::QHAL_ATTR_SCALE, a.scale)
            .attr_int(
                ops::QHAL_ATTR_FORM,
                match a.form {
                    Some(MlaForm::Absorbed) => ops::QHAL_MLA_ABSORBED,
                    Some(MlaForm::Expanded) | None => ops::QHAL_MLA_EXPANDED,
                },
            ),
        Op::Route { route, .. } => routing(desc, route),
        Op::Dispatch { num_experts } => desc.attr_int(ops::QHAL_ATTR_NUM_EXPERTS, int(*num_experts)),
        _ => desc,
    }
}

fn rotation(desc: OpDesc, rope: &Rope) -> OpDesc {
    desc.attr_int(ops::QHAL_ATTR_NUM_HEADS, int(rope.num_heads))
        .attr_int(ops::QHAL_ATTR_HEAD_DIM, int(rope.head_dim))
        .attr_int(ops::QHAL_ATTR_ROTARY_OFFSET, int(rope.rotary_offset))
        .attr_int(ops::QHAL_ATTR_ROTARY_DIM, int(rope.rotary_dim))
        .attr_int(
            ops::QHAL_ATTR_STYLE,
            match rope.style {
                RopeStyle::Half => ops::QHAL_ROPE_HALF,
                RopeStyle::Interleaved => ops::QHAL_ROPE_INTERLEAVED,
            },
        )
        .attr_real(ops::QHAL_ATTR_ATTENTION_FACTOR, rope.attention_factor)
}

fn routing(desc: OpDesc, route: &Route) -> OpDesc {
    desc.attr_int(
        ops::QHAL_ATTR_SCORE,
        match route.score {
            RouterScore::Softmax => ops::QHAL_SCORE_SOFTMAX,
            RouterScore::Sigmoid => ops::QHAL_SCORE_SIGMOID,
        },
    )
    .attr_int(ops::QHAL_ATTR_NUM_EXPERTS, int(route.num_experts))
    .attr_int(ops::QHAL_ATTR_TOP_K, int(route.top_k))
    .attr_int(ops::QHAL_ATTR_NUM_GROUPS, int(route.num_groups))
    .attr_int(ops::QHAL_ATTR_TOPK_GROUP, int(route.topk_group))
    .attr_int(
        ops::QHAL_ATTR_GROUP_SCORE,
        match route.group_score {
            GroupScore::Max => ops::QHAL_GROUP_SCORE_MAX,
            GroupScore::Top2Sum => ops::QHAL_GROUP_SCORE_TOP2_SUM,
        },
    )
    .attr_int(ops::QHAL_ATTR_RENORMALISE, int(route.renormalise))
    .attr_real(ops::QHAL_ATTR_SCALE, route.scale)
}

const fn gemm_code(gemm_type: GemmType) -> i64 {
    match gemm_type {
        GemmType::Plain => ops::QHAL_GEMM_PLAIN,
        GemmType::FusedQkv => ops::QHAL_GEMM_FUSED_QKV,
        GemmType::FusedGateUp => ops::QHAL_GEMM_FUSED_GATE_UP,
        GemmType::MoeGrouped => ops::QHAL_GEMM_MOE_GROUPED,
        GemmType::LmHead => ops::QHAL_GEMM_LM_HEAD,
    }
}

fn linear(mut desc: OpDesc, instruction: &Instruction, epilogue: Epilogue) -> OpDesc {
    desc = match instruction.sums {
        Sums::F32 => desc,
        Sums::F16 { span: 0 } => desc.accumulate(ops::QHAL_DTYPE_F16),
        Sums::F16 { span } => {
            desc.accumulate(ops::QHAL_DTYPE_F16).attr_int(ops::QHAL_ATTR_ACCUMULATE_SPAN, i64::from(span))
        }
    };
    let first = instruction.compute.first().copied().unwrap_or(Compute::F32);
    desc = desc.compute(compute_code(first));
    for (i, compute) in instruction.compute.iter().enumerate() {
        if *compute != first {
            desc = desc.attr_int(ops::QHAL_ATTR_SEGMENT_COMPUTE + i as u32, i64::from(compute_code(*compute)));
        }
    }
    match epilogue {
        Epilogue::None => desc,
        Epilogue::Glu(f) => desc.epilogue(ops::QHAL_EPILOGUE_GLU, None, activation(f) as u32),
        Epilogue::Add => {
            desc.epilogue(ops::QHAL_EPILOGUE_ADD, Some(instruction.inputs.len().saturating_sub(1) as u32), 0)
        }
    }
}

fn append(desc: OpDesc, instruction: &Instruction, (block_size, layout): (i64, Option<StateLayout>)) -> OpDesc {
    let width = |i: usize| {
        let dim = instruction.inputs.get(i).and_then(|operand| operand.shape.last());
        dim.and_then(|dim| dim.constant()).map_or(0, |n| n as i64)
    };
    let (heads, joined) = match layout {
        Some(StateLayout::Split { num_key_value_heads, .. }) => (i64::from(num_key_value_heads), 0),
        _ => (1, 1),
    };
    desc.attr_int(ops::QHAL_ATTR_NUM_KV_HEADS, heads)
        .attr_int(ops::QHAL_ATTR_HEAD_DIM, width(0) / heads.max(1))
        .attr_int(ops::QHAL_ATTR_VALUE_DIM, width(1) / heads.max(1))
        .attr_int(ops::QHAL_ATTR_BLOCK_SIZE, block_size)
        .attr_int(ops::QHAL_ATTR_JOINED, joined)
}
