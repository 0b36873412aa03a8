//! Where the time of steps goes: instructions of equal purpose are summed over layers and steps.

use std::collections::HashMap;
use std::time::Duration;

use qwen_ir::program::Instruction;
use qwen_runtime::{Cost, StepObserver};
use serde::Serialize;

use crate::Limits;

/// Time and cost by purpose.
#[derive(Debug, Clone, Default)]
pub struct Breakdown {
    sums: HashMap<(&'static str, String), Sum>,
    steps: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    calls: u64,
    time: Duration,
    cost: Cost,
}

/// What instructions of one purpose took in a step on average.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Line {
    /// Kind of instruction.
    pub op: &'static str,
    /// Part of the model, without the layer.
    pub name: String,
    /// Instructions of a step.
    pub calls: f64,
    /// Wall-clock seconds of a step.
    pub seconds: f64,
    /// Of the whole time.
    pub share_of_time: f64,
    /// Weights and cache read in a step.
    pub bytes: f64,
    /// Inputs and results between instructions.
    pub activation_bytes: f64,
    /// Multiplications and additions of the mathematics.
    pub operations: f64,
    /// What it would take at the machine's limits, of what it took; `None` where it does little but move activations, which
    /// lie in caches.
    pub share_of_limit: Option<f64>,
}

impl StepObserver for Breakdown {
    fn completed(&mut self, instruction: &Instruction, cost: &Cost, time: Duration) {
        let name = purpose(&instruction.origin).to_owned();
        let sum = self.sums.entry((instruction.op.name(), name)).or_default();
        sum.calls += 1;
        sum.time += time;
        sum.cost += *cost;
    }
}

impl Breakdown {
    /// A step is complete.
    pub const fn step(&mut self) {
        self.steps += 1;
    }

    /// Longest first.
    #[must_use]
    pub fn lines(&self, limits: &Limits) -> Vec<Line> {
        let whole: f64 = self.sums.values().map(|sum| sum.time.as_secs_f64()).sum();
        let steps = self.steps.max(1) as f64;
        let line = |((op, name), sum): (&(&'static str, String), &Sum)| {
            let seconds = sum.time.as_secs_f64();
            let least = limits.seconds(&sum.cost);
            let read = sum.cost.weight_bytes + sum.cost.cache_bytes;
            let counts = sum.cost.operations > 0 || read > sum.cost.activation_bytes;
            Line {
                op,
                name: name.clone(),
                calls: sum.calls as f64 / steps,
                seconds: seconds / steps,
                share_of_time: if whole > 0.0 { seconds / whole } else { 0.0 },
                bytes: read as f64 / steps,
                activation_bytes: sum.cost.activation_bytes as f64 / steps,
                operations: sum.cost.operations as f64 / steps,
                share_of_limit: (counts && seconds > 0.0).then(|| least / seconds),
            }
        };
        let mut lines: Vec<Line> = self.sums.iter().map(line).collect();
        lines.sort_by(|a, b| b.seconds.total_cmp(&a.seconds).then_with(|| (a.op, &a.name).cmp(&(b.op, &b.name))));
        lines
    }
}

/// `layer 7 attn_qkv` is for the same as `layer 8 attn_qkv`.
fn purpose(origin: &str) -> &str {
    let layer = origin.strip_prefix("layer ").and_then(|rest| rest.split_once(' '));
    match layer {
        Some((number, part)) if number.bytes().all(|byte| byte.is_ascii_digit()) => part,
        _ => origin,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_summed() {
        assert_eq!(purpose("layer 12 attn_qkv"), "attn_qkv");
        assert_eq!(purpose("head"), "head");
        assert_eq!(purpose("layer norm"), "layer norm");
        assert_eq!(purpose("layer x y"), "layer x y");
    }
}
