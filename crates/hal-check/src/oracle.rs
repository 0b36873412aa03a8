//! What is right, in float64 loops written for clarity.

/// x / (1 + exp(-x)).
#[must_use]
pub fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}
/// 1 / (1 + exp(-x)).
#[must_use]
pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
/// Gelu, tanh form.
#[must_use]
pub fn gelu(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
    0.5 * x * (1.0 + inner.tanh())
}
/// Dot product.
#[must_use]
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
/// x W^T: `x` is rows of `k`, `w` is rows of `k`.
#[must_use]
pub fn product(x: &[f64], w: &[f64], k: usize) -> Vec<f64> {
    x.chunks(k).flat_map(|x| w.chunks(k).map(|w| dot(x, w)).collect::<Vec<_>>()).collect()
}
/// exp(x) over its sum.
#[must_use]
pub fn softmax(x: &[f64]) -> Vec<f64> {
    let largest = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exps: Vec<f64> = x.iter().map(|x| (x - largest).exp()).collect();
    let sum: f64 = exps.iter().sum();
    exps.into_iter().map(|e| e / sum).collect()
}
/// x / sqrt(mean(x^2) + eps) * w over each group of `w.len()` values.
#[must_use]
pub fn rms_norm(x: &[f64], w: &[f64], eps: f64) -> Vec<f64> {
    x.chunks(w.len())
        .flat_map(|group| {
            let mean = dot(group, group) / group.len() as f64;
            group.iter().zip(w).map(move |(x, w)| x / (mean + eps).sqrt() * w).collect::<Vec<_>>()
        })
        .collect()
}

/// Geometry of a rotation.
#[derive(Debug, Clone, Copy)]
pub struct Rope {
    /// Elements of a head.
    pub head_dim: usize,
    /// First rotated element.
    pub offset: usize,
    /// Pairs (2i, 2i + 1) instead of (i, i + n).
    pub interleaved: bool,
    /// Factor on cosine and sine.
    pub factor: f64,
}
/// Rotates every head of a row in place; `inv_freq` has one value for each pair.
pub fn rope(row: &mut [f64], position: i32, inv_freq: &[f32], args: Rope) {
    let pairs = inv_freq.len();
    for head in row.chunks_mut(args.head_dim) {
        for (pair, frequency) in inv_freq.iter().enumerate() {
            let (i, j) = if args.interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + pairs) };
            let angle = f64::from(position) * f64::from(*frequency);
            let (a, b) = (head[args.offset + i], head[args.offset + j]);
            head[args.offset + i] = args.factor * (a * angle.cos() - b * angle.sin());
            head[args.offset + j] = args.factor * (b * angle.cos() + a * angle.sin());
        }
    }
}

/// One query over keys and values: softmax of scaled products, weighted sum of values.
#[must_use]
pub fn attend(query: &[f64], keys: &[Vec<f64>], values: &[Vec<f64>], scale: f64) -> Vec<f64> {
    let scores: Vec<f64> = keys.iter().map(|key| dot(query, key) * scale).collect();
    let weights = softmax(&scores);
    let width = values.first().map_or(0, Vec::len);
    (0..width).map(|i| weights.iter().zip(values).map(|(weight, value)| weight * value[i]).sum()).collect()
}

/// How experts are chosen.
#[derive(Debug, Clone, Copy)]
pub struct Route {
    /// Sigmoid per expert instead of softmax over all.
    pub sigmoid: bool,
    /// Experts per token.
    pub top_k: usize,
    /// Groups of experts.
    pub groups: usize,
    /// Groups that may be chosen from.
    pub top_groups: usize,
    /// A group's score is the sum of its two best, not its best.
    pub top2_sum: bool,
    /// Weights are divided by their sum.
    pub renormalise: bool,
    /// Factor on weights.
    pub scale: f64,
}
/// Experts of a token, best first, and their weights.
#[must_use]
pub fn route(logits: &[f64], bias: Option<&[f64]>, args: Route) -> (Vec<usize>, Vec<f64>) {
    let scores = if args.sigmoid { logits.iter().map(|x| sigmoid(*x)).collect() } else { softmax(logits) };
    let chosen_by: Vec<f64> =
        scores.iter().enumerate().map(|(i, score)| score + bias.map_or(0.0, |bias| bias[i])).collect();
    let best = |candidates: Vec<usize>, value: &dyn Fn(usize) -> f64, n: usize| {
        let mut order = candidates;
        // Stable, so that the lower index wins a tie.
        order.sort_by(|a, b| value(*b).total_cmp(&value(*a)));
        order.truncate(n);
        order
    };
    let size = logits.len() / args.groups;
    let group_score = |group: usize| {
        let top = best((group * size..(group + 1) * size).collect(), &|i| chosen_by[i], 2);
        if args.top2_sum { top.iter().map(|i| chosen_by[*i]).sum() } else { chosen_by[top[0]] }
    };
    let groups = best((0..args.groups).collect(), &group_score, args.top_groups);
    let allowed: Vec<usize> = (0..logits.len()).filter(|i| groups.contains(&(i / size))).collect();
    let ids = best(allowed, &|i| chosen_by[i], args.top_k);
    let sum: f64 = ids.iter().map(|i| scores[*i]).sum::<f64>() + 1e-20;
    let weight = |i: &usize| scores[*i] / if args.renormalise { sum } else { 1.0 } * args.scale;
    let weights = ids.iter().map(weight).collect();
    (ids, weights)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The oracles against closed forms.
    #[test]
    fn closed_forms() {
        assert_eq!(softmax(&[0.0, 0.0]), [0.5, 0.5]);
        assert!((silu(1.0) - 0.731_058_578_630_004_9).abs() < 1e-15);
        assert!((gelu(1.0) - 0.841_191_990_607_477_7).abs() < 1e-12);
        assert_eq!(rms_norm(&[3.0, 4.0], &[1.0, 2.0], 0.0), [3.0 / 12.5_f64.sqrt(), 8.0 / 12.5_f64.sqrt()]);
        assert_eq!(product(&[1.0, 2.0], &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0], 2), [1.0, 2.0, 3.0]);
        let mut row = [1.0, 0.0];
        rope(
            &mut row,
            1,
            &[std::f32::consts::FRAC_PI_2],
            Rope { head_dim: 2, offset: 0, interleaved: true, factor: 2.0 },
        );
        assert!(row[0].abs() < 1e-6 && (row[1] - 2.0).abs() < 1e-12);
        // Equal keys: the mean of the values.
        let even = attend(&[1.0], &[vec![2.0], vec![2.0]], &[vec![1.0], vec![3.0]], 0.5);
        assert!((even[0] - 2.0).abs() < 1e-15);
    }

    #[test]
    fn routing_by_hand() {
        let args =
            Route { sigmoid: true, top_k: 2, groups: 2, top_groups: 1, top2_sum: true, renormalise: true, scale: 2.0 };
        // The second group wins by the sum of its two best though the first has the best expert.
        let (ids, weights) = route(&[4.0, -9.0, 2.0, 2.0], None, args);
        assert_eq!((ids, weights), (vec![2, 3], vec![1.0, 1.0]));
        // A bias chooses, but does not weigh.
        let (ids, weights) = route(&[0.0, 0.0], Some(&[0.0, 1.0]), Route { top_k: 1, groups: 1, ..args });
        assert_eq!((ids, weights), (vec![1], vec![2.0]));
    }
}
