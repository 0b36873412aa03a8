//! Choice of experts.
//!
//! Shape: logits [T, E], `bias [E]` or none; ids, weights [T, k], best first. All in f32, a token at a time, scores in arrays on
//! the stack. k passes find the best that is left, so equal scores go to the lower index. A logit or a biased score that is NaN
//! or +inf makes the token's weights NaN: ids stay valid, and the damage reaches the answer instead of hiding in it.
//! Bound: T E k comparisons, small beside the experts.

use std::ops::Range;

use super::error::{KernelError, same};
use super::math::sigmoid;
use super::rows::for_rows;
use super::simd::{Kernel, LANES, Simd, dispatch};
use super::softmax::softmax_row;
use crate::isa::Isa;
use crate::matrix::{Matrix, MatrixMut};
use crate::parallel::Parallel;

#[cfg(test)]
mod tests;

const OP: &str = "route";
/// Most experts.
pub const MAX_EXPERTS: usize = 1024;

/// How logits become scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Score {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each.
    Sigmoid,
}

/// How a group of experts is judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupScore {
    /// By its best.
    Max,
    /// By the sum of its two best.
    Top2Sum,
}

/// Attributes of the choice.
#[derive(Debug, Clone, Copy)]
pub struct RouteArgs {
    /// How logits become scores.
    pub score: Score,
    /// Experts a token.
    pub top_k: usize,
    /// Groups of equal size, 1 for none.
    pub num_groups: usize,
    /// Groups that may be chosen from.
    pub topk_group: usize,
    /// How a group is judged.
    pub group_score: GroupScore,
    /// Weights are divided by their sum + 1e-20.
    pub renormalise: bool,
    /// Factor on weights.
    pub scale: f32,
}

/// Chooses the experts of each row of `logits`.
///
/// # Errors
/// If sizes disagree, or the groups don't hold enough experts.
pub fn route(
    isa: Isa,
    parallel: &dyn Parallel,
    args: &RouteArgs,
    logits: Matrix<'_, f32>,
    bias: Option<&[f32]>,
    ids: MatrixMut<'_, i32>,
    weights: MatrixMut<'_, f32>,
) -> Result<(), KernelError> {
    let experts = logits.cols;
    let shape = |what, expected, found| Err(KernelError::Shape { op: OP, what, expected, found });
    if experts > MAX_EXPERTS {
        return shape("experts", MAX_EXPERTS, experts);
    }
    if args.num_groups == 0 || !experts.is_multiple_of(args.num_groups) {
        return shape("groups", experts, args.num_groups);
    }
    if args.topk_group == 0 || args.topk_group > args.num_groups {
        return shape("chosen groups", args.num_groups, args.topk_group);
    }
    let allowed = experts / args.num_groups * args.topk_group;
    if args.top_k > allowed {
        return shape("experts a token", allowed, args.top_k);
    }
    if let Some(bias) = bias {
        same(OP, "bias", bias.len(), experts)?;
    }
    for (rows, cols) in [(ids.rows, ids.cols), (weights.rows, weights.cols)] {
        same(OP, "output rows", rows, logits.rows)?;
        same(OP, "output columns", cols, args.top_k)?;
    }
    for_rows(parallel, logits.rows, experts * (args.top_k + 8), &|rows| {
        dispatch(isa, Route { args, logits, bias, ids, weights, rows });
    });
    Ok(())
}

struct Route<'a> {
    args: &'a RouteArgs,
    logits: Matrix<'a, f32>,
    bias: Option<&'a [f32]>,
    ids: MatrixMut<'a, i32>,
    weights: MatrixMut<'a, f32>,
    rows: Range<usize>,
}

impl Kernel for Route<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let experts = self.logits.cols;
        let mut scores = [0.0; MAX_EXPERTS];
        let mut choice = [0.0; MAX_EXPERTS];
        for row in self.rows {
            let mut damaged = false;
            for (score, &logit) in scores.iter_mut().zip(self.logits.row(row)) {
                damaged |= is_damaged(logit);
                *score = if logit.is_nan() { f32::NEG_INFINITY } else { logit };
            }
            score_row(s, self.args.score, &mut scores, experts);
            for (i, (choice, &score)) in choice.iter_mut().zip(&scores[..experts]).enumerate() {
                let biased = self.bias.map_or(score, |bias| score + bias[i]);
                damaged |= is_damaged(biased);
                *choice = if biased.is_nan() { f32::NEG_INFINITY } else { biased };
            }
            // SAFETY: rows are this task's own.
            let (ids, weights) = unsafe { (self.ids.row_mut(row), self.weights.row_mut(row)) };
            choose(self.args, &scores[..experts], &choice[..experts], ids, weights);
            if damaged {
                weights.fill(f32::NAN);
            }
        }
    }
}

/// No choice can rest on this value. Minus infinity is none of them: it excludes an expert.
#[inline(always)]
fn is_damaged(value: f32) -> bool {
    value.is_nan() || value == f32::INFINITY
}

/// Logits to scores, in place.
#[inline(always)]
fn score_row<S: Simd>(s: S, score: Score, scores: &mut [f32; MAX_EXPERTS], experts: usize) {
    match score {
        Score::Softmax => {
            if scores[..experts].iter().all(|&x| x == f32::NEG_INFINITY) {
                scores[..experts].fill(0.0);
                return;
            }
            let p = scores.as_mut_ptr();
            // SAFETY: `experts` values, in place.
            unsafe { softmax_row(s, p, experts, p) };
        }
        Score::Sigmoid => {
            for chunk in scores[..experts.next_multiple_of(LANES)].as_chunks_mut::<LANES>().0 {
                *chunk = s.to_array(sigmoid(s, s.of(*chunk)));
            }
        }
    }
}

/// Index of the best that isn't taken, ties to the lower.
fn best(values: &[f32], taken: &[bool]) -> usize {
    let mut best: Option<(usize, f32)> = None;
    for (i, (&value, &taken)) in values.iter().zip(taken).enumerate() {
        if !taken && best.is_none_or(|(_, top)| value > top) {
            best = Some((i, value));
        }
    }
    best.map_or(0, |(i, _)| i)
}

fn choose(args: &RouteArgs, scores: &[f32], choice: &[f32], ids: &mut [i32], weights: &mut [f32]) {
    let mut taken = [false; MAX_EXPERTS];
    let taken = &mut taken[..choice.len()];
    if args.topk_group < args.num_groups {
        exclude_groups(args, choice, taken);
    }
    let mut sum = 0.0;
    for (id, weight) in ids.iter_mut().zip(weights.iter_mut()) {
        let expert = best(choice, taken);
        taken[expert] = true;
        *id = expert as i32;
        *weight = scores[expert];
        sum += scores[expert];
    }
    let divisor = if args.renormalise { sum + 1e-20 } else { 1.0 };
    for weight in weights {
        *weight = *weight / divisor * args.scale;
    }
}

/// Marks the experts of all but the best groups as taken.
fn exclude_groups(args: &RouteArgs, choice: &[f32], taken: &mut [bool]) {
    let size = choice.len() / args.num_groups;
    let mut group_scores = [0.0; MAX_EXPERTS];
    let mut chosen = [false; MAX_EXPERTS];
    let (group_scores, chosen) = (&mut group_scores[..args.num_groups], &mut chosen[..args.num_groups]);
    for (score, group) in group_scores.iter_mut().zip(choice.chunks_exact(size)) {
        let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for &value in group {
            if value > first {
                (first, second) = (value, first);
            } else if value > second {
                second = value;
            }
        }
        *score = match args.group_score {
            GroupScore::Max => first,
            GroupScore::Top2Sum if size > 1 => first + second,
            GroupScore::Top2Sum => first,
        };
        if score.is_nan() {
            *score = f32::NEG_INFINITY;
        }
    }
    for _ in 0..args.topk_group {
        let group = best(group_scores, chosen);
        chosen[group] = true;
    }
    for (i, taken) in taken.iter_mut().enumerate() {
        *taken = !chosen[i / size];
    }
}
