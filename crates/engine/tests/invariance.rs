//! A result does not depend on company: the same bits alone, in a batch, cut into chunks, on any number of threads.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod support;

use proptest::prelude::*;
use qwen_engine::{Engine, LoadOptions, LoadedModel, Policy, Request, SamplingParams};
use support::{cpu, engine, fixture, greedy, logits, reference, run};

/// One dense model, one with experts, one with latent attention, one with 4-bit weights, one with a window.
const MODELS: [(&str, &str); 5] = [
    ("models/llama", "models/llama/reference.safetensors"),
    ("models/qwen3_moe", "models/qwen3_moe/reference.safetensors"),
    ("models/deepseek_v3", "models/deepseek_v3/reference.safetensors"),
    ("gguf/llama-q4_k.gguf", "gguf/llama-q4_k.reference.safetensors"),
    ("models/qwen2_window", "models/qwen2_window/reference.safetensors"),
];

fn options(policy: Policy, chunk: u32) -> LoadOptions {
    LoadOptions {
        policy,
        prefill_chunk_size: chunk,
        max_sequences: 9,
        max_seq_len: Some(128),
        max_cached_tokens: Some(9 * 128),
        ..LoadOptions::default()
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn chunks_and_threads_do_not_change_a_bit() {
    for (path, reference_path) in MODELS {
        let ids = reference(reference_path).input_ids;
        let ids = &ids[..ids.len().min(40)];
        for policy in [Policy::Balanced, Policy::Exact] {
            let expected = bits(&logits(&mut engine(path, &options(policy, 64), 1), ids, false));
            for (chunk, threads) in [(64, 2), (17, 1), (9, 3)] {
                let found = bits(&logits(&mut engine(path, &options(policy, chunk), threads), ids, false));
                assert!(found == expected, "{path} {policy:?}: chunks of {chunk} on {threads} threads");
            }
        }
    }
}

#[test]
fn a_cached_prefix_and_a_prompt_give_the_same_bits_where_the_form_is_one() {
    for (path, reference_path) in MODELS.into_iter().filter(|(path, _)| !path.contains("deepseek")) {
        let ids = reference(reference_path).input_ids;
        let ids = &ids[..24];
        let mut engine = engine(path, &options(Policy::Balanced, 64), 2);
        assert!(bits(&logits(&mut engine, ids, false)) == bits(&logits(&mut engine, ids, true)), "{path}");
    }
}

fn request(ids: &[u32], seed: u64) -> Request {
    let sampling = SamplingParams { temperature: 0.8, seed, logprobs: Some(2), ..greedy(12) };
    Request::new(ids.to_vec(), sampling)
}

/// Tokens and the bits of their log-probabilities, for one request among others.
fn generate(engine: &mut Engine, requests: Vec<Request>, which: usize) -> Vec<(u32, Vec<u32>)> {
    let ids: Vec<_> = requests.into_iter().map(|request| engine.submit(request).unwrap()).collect();
    let mut tokens = Vec::new();
    while engine.has_work() {
        for output in engine.step() {
            if output.id == ids[which] {
                let logprobs = output.logprobs.unwrap();
                let mut found = vec![logprobs.chosen.logprob.to_bits()];
                found.extend(logprobs.top.iter().map(|t| t.logprob.to_bits()));
                tokens.push((output.token.unwrap(), found));
            }
        }
    }
    tokens
}

#[test]
fn alone_and_in_a_batch_of_nine_are_the_same() {
    for (path, reference_path) in MODELS {
        let ids = reference(reference_path).input_ids;
        let mut engine = engine(path, &options(Policy::Balanced, 32), 2);
        let alone = generate(&mut engine, vec![request(&ids[..16], 7)], 0);
        assert_eq!(alone.len(), 12);
        for which in [0, 5] {
            let others = (0..8).map(|i| request(&ids[i..i + 3 + 2 * i], i as u64));
            let mut requests: Vec<_> = others.collect();
            requests.insert(which, request(&ids[..16], 7));
            assert!(generate(&mut engine, requests, which) == alone, "{path} at {which}");
        }
    }
}

#[test]
fn requests_that_wait_for_blocks_finish_with_the_same_tokens() {
    let (path, reference_path) = MODELS[0];
    let ids = reference(reference_path).input_ids;
    let small = LoadOptions { max_cached_tokens: Some(64), max_seq_len: Some(64), ..options(Policy::Balanced, 16) };
    let mut engine = engine(path, &small, 2);
    let requests: Vec<_> = (0..7).map(|i| request(&ids[i..i + 20], 3)).collect();
    let alone: Vec<_> = requests.iter().map(|r| run(&mut engine, vec![r.clone()]).remove(0)).collect();
    assert_eq!(run(&mut engine, requests), alone);
    assert_eq!(engine.stats().blocks_used, 0, "all blocks are given back");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]
    /// Any mix of lengths, seeds and cancellations leaves every other request's tokens as they are alone.
    #[test]
    fn company_does_not_matter(
        lengths in proptest::collection::vec(1usize..30, 1..9),
        cancelled in any::<prop::sample::Index>(),
        after in 0usize..8,
    ) {
        let loaded =
            LoadedModel::load(&fixture("models/qwen3"), cpu(2), &options(Policy::Balanced, 24), &mut |_| {}).unwrap();
        let ids = reference("models/qwen3/reference.safetensors").input_ids;
        let mut engine = Engine::new(loaded);
        let requests: Vec<_> =
            lengths.iter().enumerate().map(|(i, n)| request(&ids[i..i + n], i as u64)).collect();
        let alone: Vec<_> = requests.iter().map(|r| run(&mut engine, vec![r.clone()]).remove(0)).collect();
        let cancelled = cancelled.index(requests.len());
        let submitted: Vec<_> = requests.into_iter().map(|r| engine.submit(r).unwrap()).collect();
        let mut tokens = vec![Vec::new(); submitted.len()];
        let mut steps = 0;
        while engine.has_work() {
            if steps == after {
                engine.cancel(submitted[cancelled]);
            }
            for output in engine.step() {
                let at = submitted.iter().position(|id| *id == output.id).unwrap();
                tokens[at].extend(output.token);
            }
            steps += 1;
        }
        for (i, (found, alone)) in tokens.iter().zip(&alone).enumerate() {
            if i == cancelled {
                prop_assert!(alone.starts_with(found));
            } else {
                prop_assert_eq!(found, alone);
            }
        }
        prop_assert_eq!(engine.stats().blocks_used, 0);
    }
}
