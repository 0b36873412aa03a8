//! Vectors of texts: the right ones, the same bits whatever runs beside, and refused where they can't be.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod support;

use proptest::prelude::*;
use qwen_engine::{
    Engine, EngineError, EngineOptions, FinishReason, GuardOptions, LoadOptions, LoadedModel, Pooling, Request,
    SamplingParams,
};
use qwen_formats::Checkpoint;
use support::{cpu, exact, fixture, greedy, max_difference, reference, run, try_engine};

const POOLINGS: [(&str, Pooling); 2] = [("last", Pooling::Last), ("mean", Pooling::Mean)];

fn embed(prompt: &[u32], pooling: Pooling) -> Request {
    let sampling = SamplingParams { max_tokens: 0, ..SamplingParams::default() };
    Request { embed: Some(pooling), ..Request::new(prompt.to_vec(), sampling) }
}

/// Vectors of all requests that ask for one, in order of submission; the others run beside them.
fn vectors(engine: &mut Engine, requests: Vec<Request>) -> Vec<Vec<f32>> {
    let ids: Vec<_> = requests.into_iter().map(|request| engine.submit(request).unwrap()).collect();
    let mut found = vec![Vec::new(); ids.len()];
    while engine.has_work() {
        for output in engine.step() {
            let at = ids.iter().position(|id| *id == output.id).unwrap();
            if let Some(vector) = output.embedding {
                assert_eq!((output.finish, output.token), (Some(FinishReason::EndOfText), None));
                let timings = output.timings.unwrap();
                assert!(timings.prompt_tokens > 0 && timings.generated_tokens == 0 && !timings.prefill.is_zero());
                found[at] = vector;
            }
        }
    }
    assert_eq!(engine.stats().blocks_used, 0, "all blocks are given back");
    found
}

fn normal(vector: &[f32]) -> Vec<f32> {
    let length = vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    vector.iter().map(|x| (f64::from(*x) / length) as f32).collect()
}

fn bits(vector: &[f32]) -> Vec<u32> {
    vector.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn they_are_those_of_another_library() {
    let names = std::fs::read_dir(fixture("models")).unwrap().map(|entry| entry.unwrap().path());
    let known: Vec<_> = names.filter(|path| path.join("embeddings.safetensors").exists()).collect();
    assert!(known.len() >= 10, "{known:?}");
    for path in known {
        let name = path.display();
        let file = Checkpoint::open(&path.join("embeddings.safetensors")).unwrap();
        let ids = reference(&format!("models/{}/reference.safetensors", path.file_name().unwrap().display())).input_ids;
        let mut engine = try_engine(path.to_str().unwrap(), &LoadOptions { embeddings: true, ..exact() }, 2).unwrap();
        for (tensor, pooling) in POOLINGS {
            let bytes = file.tensor(tensor).unwrap().data.to_vec();
            let expected: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
            let found = vectors(&mut engine, vec![embed(&ids[..16], pooling), embed(&ids, pooling)]).concat();
            let width = expected.len() / 2;
            assert_eq!(found.len(), expected.len(), "{name}");
            let found: Vec<f32> = found.chunks(width).flat_map(normal).collect();
            let difference = max_difference(&found, &expected);
            assert!(difference < 1e-4, "{name} {tensor}: largest difference {difference}");
        }
    }
}

fn small(chunk: u32) -> LoadOptions {
    LoadOptions {
        prefill_chunk_size: chunk,
        max_sequences: 9,
        max_seq_len: Some(128),
        max_cached_tokens: Some(9 * 128),
        embeddings: true,
        ..LoadOptions::default()
    }
}

#[test]
fn chunks_threads_caches_and_company_do_not_change_a_bit() {
    for path in ["models/llama", "models/deepseek_v3", "models/qwen3_moe", "gguf/llama-q4_k.gguf"] {
        let name = if path.starts_with("models") {
            format!("{path}/reference.safetensors")
        } else {
            "gguf/llama-q4_k.reference.safetensors".into()
        };
        let ids = reference(&name).input_ids;
        for (_, pooling) in POOLINGS {
            let ids: Vec<u32> = ids.iter().copied().cycle().take(40).collect();
            let wanted = embed(&ids, pooling);
            let alone = bits(&vectors(&mut try_engine(path, &small(64), 1).unwrap(), vec![wanted.clone()])[0]);
            assert!(!alone.is_empty());
            for (chunk, threads) in [(9, 2), (17, 1)] {
                let mut engine = try_engine(path, &small(chunk), threads).unwrap();
                // The second time a part of it is cached.
                for _ in 0..2 {
                    let mut company: Vec<_> = (1..4).map(|i| embed(&ids[i..10 * i], POOLINGS[i % 2].1)).collect();
                    company.extend((2..5).map(|i| Request::new(ids[i..3 * i].to_vec(), greedy(5))));
                    company.insert(3, wanted.clone());
                    let found = bits(&vectors(&mut engine, company)[3]);
                    assert!(found == alone, "{path} {pooling:?}: chunks of {chunk} on {threads} threads");
                }
            }
        }
    }
}

#[test]
fn answers_beside_them_are_the_same() {
    let ids = reference("models/qwen3/reference.safetensors").input_ids;
    let mut engine = try_engine("models/qwen3", &small(16), 2).unwrap();
    let answer = || Request::new(ids[..20].to_vec(), greedy(12));
    let alone = run(&mut engine, vec![answer()]).remove(0);
    let beside = vec![embed(&ids[..30], Pooling::Mean), answer(), embed(&ids[3..40], Pooling::Last)];
    assert_eq!(run(&mut engine, beside)[1], alone);
}

#[test]
fn texts_that_give_way_have_the_same_vectors() {
    let ids = reference("models/llama/reference.safetensors").input_ids;
    let tight = LoadOptions { max_seq_len: Some(64), max_cached_tokens: Some(64), max_sequences: 4, ..small(8) };
    let mut engine = try_engine("models/llama", &tight, 1).unwrap();
    for (_, pooling) in POOLINGS {
        let requests: Vec<_> = (0..4).map(|i| embed(&ids[i..i + 40], pooling)).collect();
        let alone: Vec<_> = requests.iter().map(|r| vectors(&mut engine, vec![r.clone()]).remove(0)).collect();
        // One of better priority takes the place of those that are under way.
        for request in &requests[..3] {
            engine.submit(request.clone()).unwrap();
        }
        engine.step();
        let urgent = Request { priority: -1, ..requests[3].clone() };
        engine.submit(urgent).unwrap();
        let mut found: Vec<(u64, Vec<f32>)> = Vec::new();
        while engine.has_work() {
            found.extend(engine.step().into_iter().filter_map(|output| Some((output.id.0, output.embedding?))));
        }
        found.sort_by_key(|(id, _)| *id);
        let found: Vec<_> = found.into_iter().map(|(_, vector)| vector).collect();
        assert!(found == alone, "{pooling:?}");
    }
    assert!(engine.stats().preemptions > 0, "nothing gave way");
}

#[test]
fn a_step_that_is_computed_twice_is_equal() {
    let loaded = LoadedModel::load(&fixture("models/qwen3"), cpu(2), &small(16), &mut |_| {}).unwrap();
    let options = EngineOptions { guard: Some(GuardOptions { share: 2.0 }), ..EngineOptions::default() };
    let mut engine = Engine::with_options(loaded, options);
    let ids = reference("models/qwen3/reference.safetensors").input_ids;
    for (_, pooling) in POOLINGS {
        vectors(&mut engine, vec![embed(&ids[..40], pooling), embed(&ids[..7], pooling)]);
    }
    let stats = engine.stats();
    assert!(stats.guard_checks > 0 && stats.guard_mismatches == 0, "{stats:?}");
}

#[test]
fn what_can_not_be_embedded_is_refused() {
    let ids = reference("models/llama/reference.safetensors").input_ids;
    let mut without = try_engine("models/llama", &exact(), 1).unwrap();
    let error = without.submit(embed(&ids[..4], Pooling::Last)).unwrap_err().to_string();
    assert!(error.contains("loaded for embeddings"), "{error}");
    let mut engine = try_engine("models/llama", &small(16), 1).unwrap();
    let answer = Request { embed: Some(Pooling::Last), ..Request::new(ids[..4].to_vec(), greedy(3)) };
    assert!(matches!(engine.submit(answer), Err(EngineError::Parameter { name: "embed", .. })));
    assert!(matches!(engine.submit(embed(&[], Pooling::Mean)), Err(EngineError::EmptyPrompt)));
    let long: Vec<u32> = ids.iter().copied().cycle().take(129).collect();
    assert!(matches!(engine.submit(embed(&long, Pooling::Mean)), Err(EngineError::ContextLength { .. })));
    assert_eq!(vectors(&mut engine, vec![embed(&long[..128], Pooling::Mean)])[0].len(), 64);
    let id = engine.submit(embed(&long[..128], Pooling::Mean)).unwrap();
    engine.step();
    assert!(engine.cancel(id));
    let ends: Vec<_> = engine.step().into_iter().map(|output| (output.finish, output.embedding)).collect();
    assert_eq!(ends, [(Some(FinishReason::Cancelled), None)]);
    assert_eq!(engine.stats().blocks_used, 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, ..ProptestConfig::default() })]
    /// Any mix of texts gives each its own vector.
    #[test]
    fn company_does_not_matter(lengths in proptest::collection::vec((1usize..40, any::<bool>()), 1..9), chunk in 1u32..40) {
        let ids = reference("models/qwen2/reference.safetensors").input_ids;
        let mut engine = try_engine("models/qwen2", &small(chunk), 1).unwrap();
        let requests: Vec<_> =
            lengths.iter().enumerate().map(|(i, (n, mean))| embed(&ids[i..i + n], POOLINGS[usize::from(*mean)].1)).collect();
        let alone: Vec<_> = requests.iter().map(|r| vectors(&mut engine, vec![r.clone()]).remove(0)).collect();
        engine.clear_prefix_cache().unwrap();
        prop_assert_eq!(vectors(&mut engine, requests), alone);
    }
}
