//! Choices against their definitions, in float64 and with sorted lists.

use super::*;

fn sampler(params: SamplingParams) -> Sampler {
    Sampler::new(params, &[])
}
fn frequencies(params: &SamplingParams, logits: &[f32], n: u64) -> Vec<f64> {
    let mut counts = vec![0u32; logits.len()];
    for seed in 0..n {
        let mut s = sampler(SamplingParams { seed, ..params.clone() });
        counts[s.sample(logits, &[], None, &mut Scratch::default()).unwrap().id as usize] += 1;
    }
    counts.into_iter().map(|c| f64::from(c) / n as f64).collect()
}

#[test]
fn greedy_takes_the_first_of_equals() {
    let mut s = sampler(SamplingParams { temperature: 0.0, ..Default::default() });
    assert_eq!(s.sample(&[1.0, 3.0, 3.0, 2.0], &[], None, &mut Scratch::default()).unwrap().id, 1);
    assert_eq!(s.sample(&[1.0, 3.0, 3.0, 2.0], &[1, 2], None, &mut Scratch::default()).unwrap().id, 3);
}

#[test]
fn draws_follow_the_distribution() {
    let logits = [0.0f32, 1.0, 2.0];
    let sum: f64 = logits.iter().map(|l| f64::from(*l / 0.7).exp()).sum();
    let params = SamplingParams { temperature: 0.7, ..Default::default() };
    for (found, logit) in frequencies(&params, &logits, 20_000).into_iter().zip(logits) {
        let expected = f64::from(logit / 0.7).exp() / sum;
        assert!((found - expected).abs() < 0.015, "{found} {expected}");
    }
}

#[test]
fn filters_cut_the_tail() {
    let logits = [0.0f32, 1.0, 2.0, 3.0];
    let cases = [
        (SamplingParams { top_k: 2, ..Default::default() }, [false, false, true, true]),
        (SamplingParams { top_p: 0.6, ..Default::default() }, [false, false, false, true]),
        (SamplingParams { top_p: 0.7, ..Default::default() }, [false, false, true, true]),
        (SamplingParams { min_p: 0.1, ..Default::default() }, [false, true, true, true]),
    ];
    for (params, possible) in cases {
        let found = frequencies(&params, &logits, 2000);
        let found: Vec<bool> = found.into_iter().map(|f| f > 0.0).collect();
        assert_eq!(found, possible, "{params:?}");
    }
}

#[test]
fn penalties_apply_as_documented() {
    let params = SamplingParams {
        temperature: 0.0,
        repetition_penalty: 2.0,
        frequency_penalty: 0.5,
        presence_penalty: 0.25,
        ..Default::default()
    };
    let mut s = Sampler::new(params, &[0]);
    // Token 0 is in the prompt: 4.0 / 2 = 2.0 < 3.0.
    assert_eq!(s.sample(&[4.0, 3.0, 1.0], &[], None, &mut Scratch::default()).unwrap().id, 1);
    // Token 1 is in the answer now: 3.0 / 2 - 0.5 - 0.25 = 0.75 < 1.0; token 0: -4 * 2.
    assert_eq!(s.sample(&[-4.0, 3.0, 1.0], &[], None, &mut Scratch::default()).unwrap().id, 2);
}

#[test]
fn penalties_do_not_depend_on_the_order_of_a_map() {
    let params = SamplingParams {
        repetition_penalty: 1.3,
        frequency_penalty: 0.4,
        presence_penalty: 0.2,
        logit_bias: vec![(3, 0.5), (3, 0.25)],
        ..Default::default()
    };
    let prompt: Vec<u32> = (0..40).map(|i| i * 7 % 50).collect();
    let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
    // Written once more without maps: bits of the penalised logits after every token.
    let expected = |answer: &[u32]| -> Vec<u32> {
        let penalised = logits.iter().zip(0u32..).map(|(logit, id)| {
            let mut l = if id == 3 { logit + 0.5 + 0.25 } else { *logit };
            let count = answer.iter().filter(|a| **a == id).count();
            if count > 0 || prompt.contains(&id) {
                l = if l > 0.0 { l / 1.3 } else { l * 1.3 };
            }
            if count > 0 { l - 0.4 * count as f32 - 0.2 } else { l }
        });
        penalised.map(f32::to_bits).collect()
    };
    // Each sampler's maps have an order of their own.
    let run = || {
        let mut s = Sampler::new(params.clone(), &prompt);
        let mut answer = Vec::new();
        for _ in 0..60 {
            let mut changed = Vec::new();
            assert!(s.change(&logits, &[], None, &mut changed));
            assert_eq!(changed.iter().map(|l| l.to_bits()).collect::<Vec<_>>(), expected(&answer));
            answer.push(s.sample(&logits, &[], None, &mut Scratch::default()).unwrap().id);
        }
        answer
    };
    assert_eq!(run(), run());
}

#[test]
fn the_same_seed_gives_the_same_tokens_and_another_seed_others() {
    let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.37).sin()).collect();
    let run = |seed| {
        let mut s = sampler(SamplingParams { seed, ..Default::default() });
        (0..40).map(|_| s.sample(&logits, &[], None, &mut Scratch::default()).unwrap().id).collect::<Vec<_>>()
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
}

#[test]
fn broken_logits_are_an_error() {
    let mut s = sampler(SamplingParams::default());
    assert!(s.sample(&[0.0, f32::NAN], &[], None, &mut Scratch::default()).is_err());
    assert!(s.sample(&[f32::INFINITY, 0.0], &[], None, &mut Scratch::default()).is_err());
    assert!(s.sample(&[f32::NEG_INFINITY; 2], &[], None, &mut Scratch::default()).is_err());
    assert!(s.sample(&[1.0, 2.0], &[0, 1], None, &mut Scratch::default()).is_err());
}

#[test]
fn logprobs_are_those_of_the_model() {
    let found = logprobs(&[0.0, 1.0, 2.0, 1.0], 0, 3);
    let sum = 1.0f64 + 2.0 * 1f64.exp() + 2f64.exp();
    assert!((f64::from(found.chosen.logprob) + sum.ln()).abs() < 1e-6);
    assert_eq!(found.top.iter().map(|t| t.id).collect::<Vec<_>>(), [2, 1, 3]);
    assert!((f64::from(found.top[0].logprob) - (2.0 - sum.ln())).abs() < 1e-6);
}

#[test]
fn parameters_out_of_range_are_named() {
    let check = |params: SamplingParams| params.validate(10).unwrap_err().to_string();
    assert!(check(SamplingParams { top_p: 0.0, ..Default::default() }).contains("top_p"));
    assert!(check(SamplingParams { temperature: f32::NAN, ..Default::default() }).contains("temperature"));
    assert!(check(SamplingParams { logit_bias: vec![(10, 1.0)], ..Default::default() }).contains("10"));
    assert!(check(SamplingParams { stop: vec![String::new()], ..Default::default() }).contains("stop"));
    SamplingParams::default().validate(10).unwrap();
}

fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut generator = ChaCha8Rng::seed_from_u64(seed);
    (0..n).map(|_| (generator.next_u64() >> 40) as f32 / (1 << 20) as f32 - 8.0).collect()
}

#[test]
fn exp_is_close_and_ends_at_zero() {
    let worst = (0..870_000).map(|i| {
        let x = -(i as f32) / 10_000.0;
        let exact = f64::from(x).exp();
        (f64::from(exp(x)) - exact).abs() / exact
    });
    let worst = worst.fold(0.0, f64::max);
    assert!(worst < 2e-7, "{worst:e}");
    assert_eq!([exp(0.0), exp(-100.0), exp(f32::NEG_INFINITY)], [1.0, 0.0, 0.0]);
}

#[test]
fn the_best_are_those_of_a_full_sort() {
    for (len, seed) in [(1, 0), (63, 1), (64, 2), (65, 3), (1000, 4), (5000, 5)] {
        let mut values = noise(len, seed);
        for i in 0..len / 3 {
            // No negative zero, which is ordered otherwise here than below.
            values[i * 2] = (values[i * 2] * 4.0).round() / 4.0 + 0.0;
        }
        if len > 100 {
            values[5..90].fill(f32::NEG_INFINITY);
        }
        let mut sorted: Vec<(u32, f32)> = (0u32..).zip(values.iter().copied()).collect();
        sorted.retain(|(_, value)| *value > f32::NEG_INFINITY);
        sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        for n in [0, 1, 2, 20, 64, 300, len] {
            let mut best = Best::default();
            best.find(&values, n);
            assert!(best.found == sorted[..n.min(sorted.len())], "{n} of {len}");
        }
        assert_eq!(first_equal(&values, largest(&values).unwrap()), sorted.first().map(|(id, _)| *id));
    }
}

/// The definition, in float64 and with sorted lists, over a vocabulary that takes more than one look.
#[test]
fn choices_are_those_of_the_definition() {
    let logits = noise(3000, 9);
    let cases = [
        SamplingParams { top_p: 0.9, temperature: 0.7, ..Default::default() },
        SamplingParams { top_p: 0.999, temperature: 3.0, ..Default::default() },
        SamplingParams { top_k: 40, top_p: 0.8, min_p: 0.02, ..Default::default() },
        SamplingParams { min_p: 0.1, temperature: 1.5, ..Default::default() },
        SamplingParams { temperature: 2.0, ..Default::default() },
    ];
    for params in cases {
        let mut sorted: Vec<(u32, f64)> = (0u32..).zip(logits.iter().map(|l| f64::from(*l))).collect();
        sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let top = sorted[0].1;
        let mut kept: Vec<(u32, f64)> =
            sorted.into_iter().map(|(id, l)| (id, ((l - top) / f64::from(params.temperature)).exp())).collect();
        if params.top_k > 0 {
            kept.truncate(params.top_k as usize);
        }
        if params.top_p < 1.0 {
            let limit = f64::from(params.top_p) * kept.iter().map(|k| k.1).sum::<f64>();
            let mut sum = 0.0;
            let n = kept.iter().position(|k| {
                sum += k.1;
                sum >= limit
            });
            kept.truncate(n.unwrap() + 1);
        }
        kept.retain(|k| k.1 >= f64::from(params.min_p));
        if params.top_k == 0 {
            kept.sort_by_key(|k| k.0);
        }
        let total: f64 = kept.iter().map(|k| k.1).sum();
        for seed in 0..300 {
            let mut s = sampler(SamplingParams { seed, ..params.clone() });
            let mut rest = s.unit() * total;
            let expected = kept.iter().find(|k| {
                rest -= k.1;
                rest < 0.0
            });
            let found = s.sample(&logits, &[], None, &mut Scratch::default()).unwrap().id;
            assert_eq!(found, expected.unwrap().0, "{params:?} {seed}");
        }
    }
}

#[test]
fn only_what_is_allowed_is_chosen() {
    let logits = noise(100, 3);
    let mut allowed = [0u32; 4];
    allowed[1] = 1 << 7 | 1 << 9;
    for temperature in [0.0, 1.0] {
        for seed in 0..20 {
            let mut s = sampler(SamplingParams { temperature, seed, ..Default::default() });
            let id = s.sample(&logits, &[], Some(&allowed), &mut Scratch::default()).unwrap().id;
            assert!(id == 39 || id == 41, "{id}");
            let ids = Some(vec![3, 5]);
            let params = SamplingParams { temperature, seed, allowed_token_ids: ids, ..Default::default() };
            let id = sampler(params).sample(&logits, &[3], None, &mut Scratch::default()).unwrap().id;
            assert_eq!(id, 5);
        }
    }
    let mut s = sampler(SamplingParams::default());
    assert!(s.sample(&logits, &[], Some(&[0; 4]), &mut Scratch::default()).is_err());
}
