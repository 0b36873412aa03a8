use super::*;
use crate::kernels::testing::{Random, Threads, bits};
use crate::parallel::Serial;

/// The choice, step by step in f64; scores are rounded to f32 so that ties are those of the kernel.
fn oracle(args: &RouteArgs, logits: &[f32], bias: Option<&[f32]>) -> (Vec<i32>, Vec<f64>) {
    let experts = logits.len();
    let logits: Vec<f64> = logits.iter().map(|&x| if x.is_nan() { f64::NEG_INFINITY } else { x.into() }).collect();
    let scores: Vec<f64> = match args.score {
        Score::Sigmoid => logits.iter().map(|&x| 1.0 / (1.0 + (-x).exp())).collect(),
        Score::Softmax => {
            let best = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = logits.iter().map(|x| (x - best).exp()).sum();
            logits.iter().map(|x| (x - best).exp() / sum).collect()
        }
    };
    let choice: Vec<f64> = (0..experts).map(|i| scores[i] + bias.map_or(0.0, |b| f64::from(b[i]))).collect();
    let size = experts / args.num_groups;
    let mut groups: Vec<(usize, f64)> = choice
        .chunks(size)
        .map(|group| {
            let mut sorted = group.to_vec();
            sorted.sort_by(|a, b| b.total_cmp(a));
            match args.group_score {
                GroupScore::Max => sorted[0],
                GroupScore::Top2Sum => sorted[0] + sorted.get(1).copied().unwrap_or(0.0),
            }
        })
        .enumerate()
        .collect();
    groups.sort_by(|a, b| b.1.total_cmp(&a.1));
    let allowed: Vec<usize> = groups[..args.topk_group].iter().map(|g| g.0).collect();
    let mut candidates: Vec<usize> = (0..experts).filter(|i| allowed.contains(&(i / size))).collect();
    candidates.sort_by(|&a, &b| choice[b].total_cmp(&choice[a]));
    candidates.truncate(args.top_k);
    let sum: f64 = candidates.iter().map(|&i| scores[i]).sum();
    let divisor = if args.renormalise { sum + 1e-20 } else { 1.0 };
    let weights = candidates.iter().map(|&i| scores[i] / divisor * f64::from(args.scale)).collect();
    (candidates.iter().map(|&i| i as i32).collect(), weights)
}

fn run(isa: Isa, args: &RouteArgs, logits: &[f32], bias: Option<&[f32]>, rows: usize) -> (Vec<i32>, Vec<f32>) {
    let mut ids = vec![-1; rows * args.top_k];
    let mut weights = vec![0.0; rows * args.top_k];
    route(
        isa,
        &Threads(2),
        args,
        Matrix::dense(logits, rows, logits.len() / rows),
        bias,
        MatrixMut::dense(&mut ids, rows, args.top_k),
        MatrixMut::dense(&mut weights, rows, args.top_k),
    )
    .unwrap();
    (ids, weights)
}

#[test]
fn chooses_as_the_oracle_does() {
    let mut random = Random::new(7);
    for score in [Score::Softmax, Score::Sigmoid] {
        for group_score in [GroupScore::Max, GroupScore::Top2Sum] {
            for (experts, top_k, num_groups, topk_group, renormalise) in [
                (4, 2, 1, 1, true),
                (16, 4, 4, 2, true),
                (60, 4, 1, 1, false),
                (256, 8, 8, 4, true),
                (6, 6, 3, 3, false),
            ] {
                let args = RouteArgs { score, top_k, num_groups, topk_group, group_score, renormalise, scale: 2.5 };
                let rows = 50;
                let logits = random.values(rows * experts, 4.0);
                let bias = random.values(experts, 0.3);
                for bias in [None, Some(bias.as_slice())] {
                    let (ids, weights) = run(Isa::Scalar, &args, &logits, bias, rows);
                    for row in 0..rows {
                        let (expected, wide) = oracle(&args, &logits[row * experts..][..experts], bias);
                        assert_eq!(ids[row * top_k..][..top_k], expected);
                        for (found, expected) in weights[row * top_k..].iter().zip(wide) {
                            assert!((f64::from(*found) - expected).abs() < 1e-5);
                        }
                    }
                    for isa in Isa::available() {
                        let other = run(isa, &args, &logits, bias, rows);
                        assert_eq!((&ids, bits(&weights)), (&other.0, bits(&other.1)));
                    }
                }
            }
        }
    }
}

const PLAIN: RouteArgs = RouteArgs {
    score: Score::Softmax,
    top_k: 3,
    num_groups: 1,
    topk_group: 1,
    group_score: GroupScore::Max,
    renormalise: true,
    scale: 1.0,
};

#[test]
fn ties_go_to_the_lower_index() {
    let (ids, _) = run(Isa::current(), &PLAIN, &[1.0, 2.0, 2.0, 1.0, 2.0, 2.0], None, 1);
    assert_eq!(ids, [1, 2, 4]);
    let groups = RouteArgs { top_k: 1, num_groups: 3, topk_group: 1, ..PLAIN };
    let (ids, _) = run(Isa::current(), &groups, &[1.0, 0.0, 1.0, 0.0, 1.0, 0.0], None, 1);
    assert_eq!(ids, [0]);
}

#[test]
fn a_negative_choice_in_an_allowed_group_beats_any_other_group() {
    let args = RouteArgs { score: Score::Sigmoid, top_k: 2, num_groups: 2, topk_group: 1, ..PLAIN };
    let bias = [3.0, -9.0, 0.0, 0.0];
    let (ids, _) = run(Isa::current(), &args, &[0.0, 0.0, 1.0, 1.0], Some(&bias), 1);
    assert_eq!(ids, [0, 1]);
}

#[test]
fn damaged_logits_give_valid_ids_and_nan_weights() {
    for score in [Score::Softmax, Score::Sigmoid] {
        let args = RouteArgs { score, ..PLAIN };
        let (ids, weights) = run(Isa::current(), &args, &[f32::NAN, 0.5, f32::NAN, 0.1, 0.2], None, 1);
        assert_eq!(ids, [1, 4, 3]);
        assert!(weights.iter().all(|w| w.is_nan()));
        let (ids, weights) = run(Isa::current(), &args, &[f32::NAN; 5], None, 1);
        assert_eq!(ids, [0, 1, 2]);
        assert!(weights.iter().all(|w| w.is_nan()));
        let (ids, weights) = run(Isa::current(), &args, &[f32::INFINITY; 5], Some(&[f32::NAN; 5]), 1);
        assert!(ids.iter().all(|&id| (0..5).contains(&id)));
        assert!(weights.iter().all(|w| w.is_nan()));
        let bias = [0.0, f32::NAN, 0.0, 0.0, 0.0];
        let (_, weights) = run(Isa::current(), &args, &[0.3; 5], Some(&bias), 1);
        assert!(weights.iter().all(|w| w.is_nan()));
        let logits = [f32::NEG_INFINITY, 0.5, 0.1, 0.1, f32::NAN, 0.5, 0.1, 0.1, 0.2, 0.3];
        let (_, weights) = run(Isa::current(), &args, &logits, None, 2);
        assert!(weights[..3].iter().all(|w| w.is_nan()) && weights[3..].iter().all(|w| w.is_finite()));
        let (_, weights) = run(Isa::current(), &args, &logits[..4], None, 1);
        assert!(weights.iter().all(|w| w.is_finite()));
    }
}

#[test]
fn refuses_impossible_choices() {
    let mut ids = [0; 3];
    let mut weights = [0.0; 3];
    let logits = vec![0.0; 2048];
    let mut refused = |args: RouteArgs, experts| {
        let ids = MatrixMut::dense(&mut ids, 1, 3);
        let weights = MatrixMut::dense(&mut weights, 1, 3);
        route(Isa::Scalar, &Serial, &args, Matrix::dense(&logits, 1, experts), None, ids, weights).is_err()
    };
    assert!(!refused(PLAIN, 8));
    assert!(refused(PLAIN, 2));
    assert!(refused(PLAIN, 2048));
    assert!(refused(RouteArgs { num_groups: 0, ..PLAIN }, 8));
    assert!(refused(RouteArgs { num_groups: 3, ..PLAIN }, 8));
    assert!(refused(RouteArgs { num_groups: 4, topk_group: 5, ..PLAIN }, 8));
    assert!(refused(RouteArgs { num_groups: 4, topk_group: 1, ..PLAIN }, 8));
    assert!(refused(RouteArgs { top_k: 2, ..PLAIN }, 8));
}
