//! What an instruction asks of a machine at the sizes of a step, whatever device computes it.
//!
//! In: an instruction, the bytes of its weights as the device holds them, a batch. Out: a [`Cost`]. It is what a perfect
//! implementation could not avoid: each weight and each cached token read once, each product computed once. Softmax, norms and
//! other element-wise work are not counted, nor is what a device packs or pads.

use std::ops::AddAssign;
use std::time::Duration;

use qwen_ir::program::{Instruction, Operand, Place};
use qwen_ir::{Attention, Compute, Dim, MlaAttention, MlaForm, Op, Symbol};

use crate::batch::Batch;

/// Bytes and operations; an operation is a multiplication or an addition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// Weights read, in the device's form of them.
    pub weight_bytes: u64,
    /// Keys and values read or written.
    pub cache_bytes: u64,
    /// Inputs and results between instructions.
    pub activation_bytes: u64,
    /// Operations of the mathematics.
    pub operations: u64,
    /// Operations on int8 that the chosen form of products takes: twice the mathematics' with two terms.
    pub int8_operations: u64,
    /// Operations on bfloat16.
    pub bf16_operations: u64,
    /// Operations on float32.
    pub f32_operations: u64,
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        self.weight_bytes += other.weight_bytes;
        self.cache_bytes += other.cache_bytes;
        self.activation_bytes += other.activation_bytes;
        self.operations += other.operations;
        self.int8_operations += other.int8_operations;
        self.bf16_operations += other.bf16_operations;
        self.f32_operations += other.f32_operations;
    }
}

/// Is told of each instruction of a step, once it is complete.
pub trait StepObserver {
    /// An instruction, what it asks for, and how long it took.
    fn completed(&mut self, instruction: &Instruction, cost: &Cost, time: Duration);
}

/// What the cost of an instruction depends on besides itself.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes<'a> {
    pub(crate) batch: &'a Batch,
    /// By [`Symbol`].
    pub(crate) symbols: &'a [i64; 5],
}

impl Sizes<'_> {
    fn dim(&self, dim: Dim) -> u64 {
        match dim {
            Dim::Const(n) => n,
            Dim::Symbol(symbol) => u64::try_from(self.symbols[symbol as usize]).unwrap_or(0),
        }
    }

    fn tokens(&self) -> u64 {
        self.dim(Dim::Symbol(Symbol::Tokens))
    }

    /// Values of an operand.
    fn elements(&self, operand: &Operand) -> u64 {
        operand.shape.iter().fold(1, |n: u64, dim| n.saturating_mul(self.dim(*dim)))
    }

    /// Context length and new tokens of each sequence.
    fn sequences(&self) -> impl Iterator<Item = (u64, u64)> {
        let starts = &self.batch.query_start;
        self.batch.context_len.iter().zip(starts.windows(2)).map(|(context, start)| {
            (u64::try_from(*context).unwrap_or(0), u64::try_from(start[1] - start[0]).unwrap_or(0))
        })
    }

    /// Pairs of query token and token that it sees.
    fn pairs(&self, window: u64) -> u64 {
        let seen = |position: u64| if window == 0 { position } else { position.min(window) };
        self.sequences().map(|(context, new)| (context - new + 1..=context).map(seen).sum::<u64>()).sum()
    }

    /// Cached tokens that are read, by sequences that don't share any.
    fn context(&self, window: u64) -> u64 {
        let seen = |context: u64, new: u64| if window == 0 { context } else { context.min(window + new) };
        self.sequences().map(|(context, new)| seen(context, new)).sum()
    }
}

/// `weights` holds the bytes of each input that is a weight or a table, 0 for the others.
pub(crate) fn cost(instruction: &Instruction, weights: &[u64], sizes: &Sizes<'_>) -> Cost {
    let mut cost = Cost::default();
    for operand in instruction.inputs.iter().chain(&instruction.outputs) {
        if matches!(operand.place, Place::Arena { .. } | Place::Input { .. } | Place::Result) {
            cost.activation_bytes += operand.dtype.bytes_for(sizes.elements(operand)).unwrap_or(0);
        }
    }
    let all_weights: u64 = weights.iter().sum();
    cost.weight_bytes = all_weights;
    match &instruction.op {
        Op::Embed => {
            let rows = instruction.inputs.get(1).and_then(|table| table.shape.first()).map_or(1, |dim| sizes.dim(*dim));
            cost.weight_bytes = all_weights / rows.max(1) * sizes.tokens().min(rows);
        }
        Op::Gemm { .. } => {
            let rows = instruction.inputs.first().and_then(|x| x.shape.first()).map_or(0, |dim| sizes.dim(*dim));
            products(&mut cost, instruction, rows, 1);
        }
        Op::GroupedGemm { num_experts, top_k, .. } => {
            let (experts, chosen) = (u64::from(*num_experts).max(1), u64::from(*top_k));
            products(&mut cost, instruction, sizes.tokens() * chosen, experts);
            cost.weight_bytes = (all_weights as f64 * touched_share(experts, chosen, sizes.tokens())) as u64;
        }
        Op::Attention { attention, .. } => self_attention(&mut cost, instruction, attention, sizes),
        Op::MlaAttention { attention, .. } => latent_attention(&mut cost, instruction, attention, sizes),
        Op::KvAppend { .. } => {
            cost.cache_bytes = instruction.outputs.first().map_or(0, |cache| {
                let values = instruction.inputs.iter().take(2).map(|x| sizes.elements(x)).sum();
                cache.dtype.bytes_for(values).unwrap_or(0)
            });
        }
        _ => {}
    }
    cost
}

/// Share of the experts that so many tokens are expected to choose, if every choice is as likely.
fn touched_share(experts: u64, chosen: u64, tokens: u64) -> f64 {
    let missed = 1.0 - chosen.min(experts) as f64 / experts as f64;
    1.0 - missed.powf(tokens as f64)
}

fn products(cost: &mut Cost, instruction: &Instruction, rows: u64, experts: u64) {
    let is_weight = |operand: &&Operand| matches!(operand.place, Place::Weight { .. }) && operand.shape.len() > 1;
    // Scales follow their weight; a weight is as wide as the input.
    let width = instruction.inputs.first().and_then(|x| x.shape.last()).copied();
    let segments = instruction.inputs.iter().skip(1).filter(is_weight).filter(|w| w.shape.last().copied() == width);
    for (segment, compute) in segments.zip(&instruction.compute) {
        let elements = segment.shape.iter().fold(1, |n: u64, dim| n.saturating_mul(dim.constant().unwrap_or(1)));
        let operations = 2 * rows * (elements / experts);
        cost.operations += operations;
        match compute {
            Compute::F32 => cost.f32_operations += operations,
            Compute::Bf16 => cost.bf16_operations += operations,
            Compute::I8G32 | Compute::I8G16 | Compute::I8sG32 => cost.int8_operations += operations,
            Compute::I8x2G32 => cost.int8_operations += 2 * operations,
        }
    }
}

/// Bytes of the cache for one token of one layer.
fn cached_token(instruction: &Instruction, values: u64) -> u64 {
    let cache = instruction.inputs.iter().find(|operand| matches!(operand.place, Place::State { .. }));
    cache.and_then(|cache| cache.dtype.bytes_for(values)).unwrap_or(0)
}

fn self_attention(cost: &mut Cost, instruction: &Instruction, attention: &Attention, sizes: &Sizes<'_>) {
    let width = u64::from(attention.head_dim) + u64::from(attention.value_dim);
    let window = u64::from(attention.window);
    let token = cached_token(instruction, u64::from(attention.num_key_value_heads) * width);
    cost.cache_bytes = sizes.context(window) * token;
    cost.operations = 2 * u64::from(attention.num_heads) * width * sizes.pairs(window);
    match instruction.compute.first() {
        Some(Compute::Bf16) => cost.bf16_operations = cost.operations,
        _ => cost.f32_operations = cost.operations,
    }
}

fn latent_attention(cost: &mut Cost, instruction: &Instruction, attention: &MlaAttention, sizes: &Sizes<'_>) {
    let heads = u64::from(attention.num_heads);
    let [nope, rope, value, latent] =
        [attention.nope_dim, attention.rope_dim, attention.value_dim, attention.latent_dim].map(u64::from);
    cost.cache_bytes = sizes.context(0) * cached_token(instruction, latent + rope);
    let (projected, pair) = match attention.form {
        Some(MlaForm::Absorbed) => (sizes.tokens(), latent + rope + latent),
        Some(MlaForm::Expanded) | None => (sizes.context(0), nope + rope + value),
    };
    cost.operations = 2 * heads * (projected * (nope + value) * latent + pair * sizes.pairs(0));
    cost.f32_operations = cost.operations;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::{LogitRows, SequenceKv};
    use crate::kv_pool::KvPool;

    fn batch() -> Batch {
        let mut pool = KvPool::new(8, 8);
        pool.committed(8);
        let blocks: Vec<_> = (0..4).map(|_| pool.allocate().unwrap()).collect();
        let mut batch = Batch::new(4);
        let old = SequenceKv { blocks: blocks[..3].to_vec(), len: 9 };
        batch.push(&old, &[1], LogitRows::Last).unwrap();
        let new = SequenceKv { blocks: blocks[3..].to_vec(), len: 0 };
        batch.push(&new, &[1, 2, 3], LogitRows::Last).unwrap();
        batch
    }

    #[test]
    fn pairs_and_context_follow_the_mask() {
        let batch = batch();
        let symbols = [4, 2, 2, 3, 8];
        let sizes = Sizes { batch: &batch, symbols: &symbols };
        assert_eq!(sizes.tokens(), 4);
        assert_eq!(sizes.pairs(0), 10 + (1 + 2 + 3));
        assert_eq!(sizes.pairs(2), 2 + (1 + 2 + 2));
        assert_eq!(sizes.context(0), 13);
        assert_eq!(sizes.context(2), 3 + 3);
    }

    #[test]
    fn experts_that_are_touched() {
        assert!((touched_share(8, 2, 1) - 0.25).abs() < 1e-12);
        assert!((touched_share(8, 8, 1) - 1.0).abs() < 1e-12);
        assert!(touched_share(8, 2, 100) > 0.999);
    }
}
