//! What a launch asks of a chip: operations and bytes, at the sizes of the launch.
//!
//! What every implementation has to do, as in the cost of instructions of the runtime: weights and cached tokens are read once,
//! products computed once, inputs and results of everything else cross memory. Lengths of contexts are read from the operands.

use qwen_hal_abi::ops;

use crate::desc::{Desc, Tensor};

/// Reads the integers of an input, for ops whose work depends on data.
pub(crate) type Integers<'a> = &'a dyn Fn(usize) -> Vec<i32>;

/// (operations, bytes) of a launch.
pub(crate) fn work(desc: &Desc, symbols: &[i64], integers: Integers<'_>) -> (f64, f64) {
    let bytes = |tensors: &[Tensor]| tensors.iter().filter(|t| !t.is_absent()).map(|t| t.bytes(symbols)).sum::<u64>();
    let all = (bytes(&desc.inputs) + bytes(&desc.outputs)) as f64;
    let input = |i: usize| desc.inputs.get(i);
    let input_bytes = |i: usize| input(i).map_or(0, |tensor| tensor.bytes(symbols)) as f64;
    let output_bytes = bytes(&desc.outputs) as f64;
    match desc.kind {
        ops::QHAL_OP_EMBED => (0.0, 2.0 * output_bytes),
        ops::QHAL_OP_GATHER_ROWS => (0.0, 2.0 * output_bytes),
        ops::QHAL_OP_GEMM => (products(desc, symbols, 1.0), all),
        ops::QHAL_OP_GROUPED_GEMM => {
            let experts =
                desc.weights().first().and_then(|w| input(*w)?.dims.first()).map_or(1, |d| d.at(symbols)).max(1);
            let rows = desc.outputs.first().map_or(0, |out| out.rows(symbols));
            let weights: f64 = desc.weights().into_iter().map(input_bytes).sum();
            let touched = rows.min(experts) as f64 / experts as f64;
            (products(desc, symbols, experts as f64), all - weights * (1.0 - touched))
        }
        ops::QHAL_OP_KV_APPEND => (0.0, 2.0 * (input_bytes(0) + input_bytes(1))),
        ops::QHAL_OP_ATTENTION => {
            let (heads, kv_heads) = (desc.size(ops::QHAL_ATTR_NUM_HEADS), desc.size(ops::QHAL_ATTR_NUM_KV_HEADS));
            let width = desc.size(ops::QHAL_ATTR_HEAD_DIM) + desc.size(ops::QHAL_ATTR_VALUE_DIM);
            let (pairs, context) = pairs(&integers(2), &integers(3), desc.size(ops::QHAL_ATTR_WINDOW));
            let token = (kv_heads * width) as f64 * element_bytes(input(1));
            (2.0 * (heads * width) as f64 * pairs, context * token + input_bytes(0) + output_bytes)
        }
        ops::QHAL_OP_MLA_ATTENTION => {
            let size = |key| desc.size(key);
            let (heads, latent, rope) =
                (size(ops::QHAL_ATTR_NUM_HEADS), size(ops::QHAL_ATTR_LATENT_DIM), size(ops::QHAL_ATTR_ROPE_DIM));
            let (nope, value) = (size(ops::QHAL_ATTR_NOPE_DIM), size(ops::QHAL_ATTR_VALUE_DIM));
            let (pairs, context) = pairs(&integers(3), &integers(4), 0);
            let absorbed = desc.int(ops::QHAL_ATTR_FORM) == Some(ops::QHAL_MLA_ABSORBED);
            let tokens = input(0).map_or(0, |q| q.rows(symbols)) as f64;
            let (projected, pair) = if absorbed { (tokens, 2 * latent + rope) } else { (context, nope + rope + value) };
            let operations = 2.0 * heads as f64 * (projected * ((nope + value) * latent) as f64 + pairs * pair as f64);
            let token = (latent + rope) as f64 * element_bytes(input(2));
            (operations, context * token + input_bytes(0) + input_bytes(1) + output_bytes)
        }
        // A few operations a value: memory bounds them on every chip.
        _ => (4.0 * desc.outputs.first().map_or(0, |out| out.elements(symbols)) as f64, all),
    }
}

fn element_bytes(tensor: Option<&Tensor>) -> f64 {
    tensor
        .and_then(|tensor| ops::dtype_block(tensor.dtype))
        .map_or(0.0, |(values, bytes)| f64::from(bytes) / f64::from(values))
}

fn products(desc: &Desc, symbols: &[i64], experts: f64) -> f64 {
    let rows = desc.outputs.first().map_or(0, |out| out.rows(symbols)) as f64;
    let elements: u64 = desc.weights().iter().filter_map(|w| desc.inputs.get(*w)).map(|w| w.elements(symbols)).sum();
    2.0 * rows * elements as f64 / experts
}

/// Pairs of query and token that it sees, and cached tokens that are read, from starts of queries and lengths of contexts.
fn pairs(starts: &[i32], contexts: &[i32], window: u64) -> (f64, f64) {
    let (mut pairs, mut tokens) = (0.0, 0.0);
    for (context, start) in contexts.iter().zip(starts.windows(2)) {
        let (context, new) = (f64::from(*context), f64::from(start[1] - start[0]));
        let most = if window == 0 { f64::MAX } else { window as f64 };
        // The mean of what the first and the last of the new tokens see.
        pairs += new * ((context - new + 1.0).min(most) + context.min(most)) / 2.0;
        tokens += context.min(most + new);
    }
    (pairs, tokens)
}
