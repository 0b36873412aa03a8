//! What scheduling must not change: tokens and log-probabilities of a request alone, among 31 others, cached or not,
//! preempted or not, guessed or not. And what it must bring about: caching, fairness, priority.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod support;

use std::collections::HashMap;
use std::time::Duration;

use proptest::prelude::*;
use qwen_engine::{
    ClientKey, Engine, EngineOptions, FinishReason, LoadOptions, LoadedModel, Output, Request, RequestId,
    SamplingParams, Speculation,
};
use support::{cpu, fixture, greedy, reference};

/// One dense model, one with experts, one with latent attention, one with 4-bit weights, one with a window.
const MODELS: [(&str, &str); 5] = [
    ("models/llama", "models/llama/reference.safetensors"),
    ("models/qwen3_moe", "models/qwen3_moe/reference.safetensors"),
    ("models/deepseek_v3", "models/deepseek_v3/reference.safetensors"),
    ("gguf/llama-q4_k.gguf", "gguf/llama-q4_k.reference.safetensors"),
    ("models/qwen2_window", "models/qwen2_window/reference.safetensors"),
];

const SPECULATION: Speculation = Speculation { max_draft: 4, min_match: 1, max_step_tokens: 24 };

fn engine(path: &str, sequences: u32, blocks: u64, options: EngineOptions) -> Engine {
    let load = LoadOptions {
        prefill_chunk_size: 40,
        max_sequences: sequences,
        max_seq_len: Some(96),
        max_cached_tokens: Some(blocks * 16),
        ..LoadOptions::default()
    };
    Engine::with_options(LoadedModel::load(&fixture(path), cpu(2), &load, &mut |_| {}).unwrap(), options)
}

/// The reference's tokens, again and again, and never quite the same.
fn text(path: &str) -> Vec<u32> {
    let ids = reference(path).input_ids;
    (0..96).map(|i| ids[(i + i / ids.len() * 5) % ids.len()]).collect()
}

fn plain() -> EngineOptions {
    EngineOptions { prefix_cache: false, ..EngineOptions::default() }
}

/// Tokens and the bits of their log-probabilities, by request.
type Answers = HashMap<RequestId, Vec<(u32, Vec<u32>)>>;

fn take(answers: &mut Answers, outputs: Vec<Output>) {
    for output in outputs {
        assert!(
            !matches!(&output.finish, Some(FinishReason::Logits(_) | FinishReason::Error(_) | FinishReason::Device(_))),
            "{output:?}"
        );
        let Some(token) = output.token else { continue };
        let logprobs = output.logprobs.unwrap();
        let bits = std::iter::once(&logprobs.chosen).chain(&logprobs.top).map(|t| t.logprob.to_bits()).collect();
        answers.entry(output.id).or_default().push((token, bits));
    }
}

/// Answers in order of the requests, all submitted at once.
fn answers(engine: &mut Engine, requests: Vec<Request>) -> Vec<Vec<(u32, Vec<u32>)>> {
    let ids: Vec<_> = requests.into_iter().map(|request| engine.submit(request).unwrap()).collect();
    let mut found = Answers::new();
    let mut steps = 0;
    while engine.has_work() {
        take(&mut found, engine.step());
        steps += 1;
        assert!(steps < 20_000, "the engine makes no progress");
    }
    assert_eq!(engine.stats().blocks_used, 0, "every block is given back");
    ids.iter().map(|id| found.remove(id).unwrap_or_default()).collect()
}

fn sampled(prompt: &[u32], seed: u64, max_tokens: u32) -> Request {
    let temperature = if seed.is_multiple_of(2) { 0.9 } else { 0.0 };
    let sampling = SamplingParams { temperature, seed, logprobs: Some(2), ..greedy(max_tokens) };
    Request::new(prompt.to_vec(), sampling)
}

/// 32 requests: prompts that share beginnings of several lengths, and some that share none.
fn crowd(ids: &[u32]) -> Vec<Request> {
    let prompt = |i: usize| match i % 4 {
        0 => ids[..40].to_vec(),
        1 => [&ids[..32 + i % 5], &ids[i % 7..8 + i % 7]].concat(),
        2 => ids[i % 9..i % 9 + 5 + i].to_vec(),
        _ => ids[..1 + i].to_vec(),
    };
    (0..32).map(|i| sampled(&prompt(i), i as u64, 20 + (i as u32 * 7) % 35)).collect()
}

#[test]
fn alone_and_among_31_others_cached_preempted_and_guessed_are_the_same() {
    for (path, reference_path) in MODELS {
        let ids = text(reference_path);
        let requests = crowd(&ids);
        let mut alone = engine(path, 1, 12, plain());
        let expected: Vec<_> = requests.iter().map(|r| answers(&mut alone, vec![r.clone()]).remove(0)).collect();
        for (sequences, blocks, guess) in [(32, 400, false), (32, 400, true), (12, 6, false), (12, 6, true)] {
            let speculation = guess.then_some(SPECULATION);
            // Without a target prompts are cut by measured times, and who gives way would depend on the machine.
            let tpot_target = Some(Duration::from_secs(3600));
            let options = EngineOptions { speculation, tpot_target, ..EngineOptions::default() };
            let mut engine = engine(path, sequences, blocks, options);
            for round in 0..2 {
                let found = answers(&mut engine, requests.clone());
                for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    assert!(found == expected, "{path}, {blocks} blocks, guesses {guess}, round {round}, request {i}");
                }
            }
            let stats = engine.stats();
            assert!(stats.prefix_hit_tokens > 0, "{path}: nothing was cached");
            // With guesses, answers may end before room is short.
            if !guess {
                assert_eq!(stats.preemptions > 0, blocks == 6, "{path}: {stats:?}");
            }
            assert_eq!(stats.accepted_tokens > 0, guess, "{path}: {stats:?}");
        }
    }
}

#[test]
fn a_second_request_finds_the_first_ones_blocks() {
    let ids = text(MODELS[0].1);
    let mut engine = engine(MODELS[0].0, 4, 40, EngineOptions::default());
    let timings = |engine: &mut Engine, request: Request| {
        engine.submit(request).unwrap();
        let mut last = None;
        while engine.has_work() {
            last = engine.step().into_iter().filter_map(|output| output.timings).next_back().or(last);
        }
        last.unwrap()
    };
    assert_eq!(timings(&mut engine, sampled(&ids[..40], 1, 4)).cached_tokens, 0);
    assert_eq!(timings(&mut engine, sampled(&ids[..40], 1, 4)).cached_tokens, 32);
    // The last token is computed even if all blocks are known.
    assert_eq!(timings(&mut engine, sampled(&ids[..32], 1, 4)).cached_tokens, 16);
    let salted = Request { cache_salt: 1, ..sampled(&ids[..40], 1, 4) };
    assert_eq!(timings(&mut engine, salted).cached_tokens, 0);
    let other = Request { client: ClientKey(1), ..sampled(&ids[..40], 1, 4) };
    assert_eq!(timings(&mut engine, other).cached_tokens, 0);
    engine.clear_prefix_cache().unwrap();
    assert_eq!((engine.stats().blocks_cached, engine.loaded().model.free_blocks()), (0, engine.stats().blocks_total));
}

#[test]
fn equal_prompts_are_computed_once() {
    let ids = text(MODELS[0].1);
    let mut engine = engine(MODELS[0].0, 8, 100, EngineOptions::default());
    let requests: Vec<_> = (0..8).map(|seed| sampled(&ids[..39], seed, 1)).collect();
    answers(&mut engine, requests);
    // The first computes 39 tokens, the others what follows the last whole block.
    assert_eq!(engine.stats().computed_tokens, 39 + 7 * 7);
}

#[test]
fn an_answer_goes_on_from_where_another_engine_left_it() {
    for (path, reference_path) in MODELS {
        let ids = text(reference_path);
        for seed in [4, 5] {
            let request = sampled(&ids[..20], seed, 16);
            let mut engine = engine(path, 2, 12, EngineOptions::default());
            let whole = answers(&mut engine, vec![request.clone()]).remove(0);
            for cut in [1, 9, 15] {
                let resume = whole[..cut].iter().map(|(token, _)| *token).collect();
                let rest = answers(&mut engine, vec![Request { resume, ..request.clone() }]).remove(0);
                assert!(rest == whole[cut..], "{path} after {cut}");
            }
        }
    }
}

#[test]
fn prompt_logprobs_are_those_of_the_model_and_an_answer_may_be_empty() {
    let ids = text(MODELS[0].1);
    let mut engine = engine(MODELS[0].0, 2, 40, EngineOptions::default());
    let mut expected = Vec::new();
    let mut position = 0;
    let sink = &mut |row: &[f32]| {
        position += 1;
        if position < 90 {
            expected.push(Some(qwen_engine::logprobs(row, ids[position], 3)));
        }
    };
    engine.logits(&ids[..90], false, sink).unwrap();
    expected.insert(0, None);
    for max_tokens in [0, 3] {
        let request = Request { prompt_logprobs: Some(3), ..sampled(&ids[..90], 1, max_tokens) };
        engine.submit(request).unwrap();
        let mut outputs = Vec::new();
        while engine.has_work() {
            outputs.extend(engine.step());
        }
        assert_eq!(outputs.len(), max_tokens.max(1) as usize);
        assert_eq!(outputs.iter().filter_map(|output| output.token).count(), max_tokens as usize);
        assert!(outputs[0].prompt_logprobs.as_ref().unwrap() == &expected);
        assert_eq!(outputs.last().unwrap().finish, Some(FinishReason::Length));
    }
}

/// Requests in order of their first tokens.
fn order_of_starts(engine: &mut Engine) -> Vec<RequestId> {
    let mut order = Vec::new();
    while engine.has_work() {
        for output in engine.step() {
            if output.token.is_some() && !order.contains(&output.id) {
                order.push(output.id);
            }
        }
    }
    order
}

#[test]
fn better_priority_goes_first_and_takes_the_place_of_worse() {
    let ids = text(MODELS[0].1);
    let mut engine = engine(MODELS[0].0, 2, 40, EngineOptions::default());
    let low: Vec<_> = (0..3).map(|i| engine.submit(sampled(&ids[i..i + 20], 1, 20)).unwrap()).collect();
    engine.step();
    let urgent = Request { priority: -1, ..sampled(&ids[9..30], 1, 4) };
    let urgent = engine.submit(urgent).unwrap();
    assert!(engine.step().iter().any(|output| output.id == urgent), "it does not wait for a place");
    assert_eq!(engine.stats().preemptions, 1);
    assert_eq!(order_of_starts(&mut engine).last(), Some(&low[2]));
}

#[test]
fn a_client_that_floods_does_not_delay_another() {
    let ids = text(MODELS[0].1);
    let mut engine = engine(MODELS[0].0, 1, 40, EngineOptions::default());
    let of = |client| Request { client: ClientKey(client), ..sampled(&ids[..20], 1, 4) };
    let flood: Vec<_> = (0..10).map(|_| engine.submit(of(1)).unwrap()).collect();
    let other: Vec<_> = (0..3).map(|_| engine.submit(of(2)).unwrap()).collect();
    let order = order_of_starts(&mut engine);
    let at = |id: &RequestId| order.iter().position(|other| other == id).unwrap();
    assert!(at(&other[0]) <= 1 && at(&other[1]) <= 3 && at(&other[2]) <= 5, "{order:?}");
    assert!(flood.windows(2).all(|pair| at(&pair[0]) < at(&pair[1])), "one client's requests keep their order");
}

#[derive(Debug, Clone)]
struct Plan {
    prompt: usize,
    offset: usize,
    max_tokens: u32,
    seed: u64,
    client: u64,
    priority: i32,
    at_step: usize,
    cancel_after: Option<usize>,
}

fn plan() -> impl Strategy<Value = Plan> {
    let cancel = proptest::option::weighted(0.2, 0usize..12);
    (1usize..46, 0usize..3, 1u32..30, 0u64..4, 0u64..3, -1i32..2, 0usize..20, cancel).prop_map(
        |(prompt, offset, max_tokens, seed, client, priority, at_step, cancel_after)| Plan {
            prompt,
            offset,
            max_tokens,
            seed,
            client,
            priority,
            at_step,
            cancel_after,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    /// Arrivals, priorities, clients, cancels and few blocks, in any mix: every request ends once, every block comes back,
    /// and each answer is the one that the request gets alone, or the beginning of it if it was cancelled.
    #[test]
    fn whatever_happens_answers_are_the_same(
        plans in proptest::collection::vec(plan(), 1..14),
        blocks in 6u64..20,
        sequences in 1u32..9,
        guess in any::<bool>(),
        model in 0usize..5,
    ) {
        let (path, reference_path) = MODELS[model];
        let ids = text(reference_path);
        let request = |plan: &Plan| Request {
            client: ClientKey(plan.client),
            priority: plan.priority,
            ..sampled(&ids[plan.offset..plan.offset + plan.prompt], plan.seed, plan.max_tokens)
        };
        let mut alone = engine(path, 1, 6, plain());
        let expected: Vec<_> = plans.iter().map(|p| answers(&mut alone, vec![request(p)]).remove(0)).collect();
        let speculation = guess.then_some(SPECULATION);
        let mut engine = engine(path, sequences, blocks, EngineOptions { speculation, ..EngineOptions::default() });
        let mut ids: Vec<Option<RequestId>> = vec![None; plans.len()];
        let mut ends: HashMap<RequestId, usize> = HashMap::new();
        let mut found = Answers::new();
        let mut step = 0;
        while step < 21 || engine.has_work() {
            for (plan, id) in plans.iter().zip(&mut ids) {
                if plan.at_step == step {
                    *id = Some(engine.submit(request(plan)).unwrap());
                }
                if let (Some(id), Some(after)) = (&id, plan.cancel_after)
                    && plan.at_step + after == step
                {
                    engine.cancel(*id);
                }
            }
            let outputs = engine.step();
            for output in outputs.iter().filter(|output| output.finish.is_some()) {
                *ends.entry(output.id).or_default() += 1;
            }
            take(&mut found, outputs);
            step += 1;
            prop_assert!(step < 20_000, "the engine makes no progress");
        }
        for ((plan, id), expected) in plans.iter().zip(ids).zip(&expected) {
            let id = id.unwrap();
            prop_assert_eq!(ends.get(&id), Some(&1));
            let found = found.remove(&id).unwrap_or_default();
            if plan.cancel_after.is_some() {
                prop_assert!(expected.starts_with(&found));
            } else {
                prop_assert!(found == *expected, "{:?}", plan);
            }
        }
        prop_assert_eq!(engine.stats().blocks_used, 0);
        engine.clear_prefix_cache().unwrap();
        prop_assert_eq!(engine.loaded().model.free_blocks(), engine.stats().blocks_total);
    }
}
