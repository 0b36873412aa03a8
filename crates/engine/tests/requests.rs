//! What becomes of requests when memory is short, a step fails, or somebody else computes in between.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod support;

use std::sync::Arc;

use qwen_engine::{Engine, EngineError, FinishReason, LoadOptions, LoadedModel, Output, Request};
use qwen_formats::Checkpoint;
use qwen_models::family::{ModelInfo, TensorIndex, build_graph, read_config};
use qwen_runtime::{Model, ModelOptions, RuntimeError, SequenceKv};
use support::{cpu, engine, exact, fixture, greedy, logits, reference, run};

const MODEL: &str = "models/llama";

/// A model with exactly these limits: loading through [`LoadedModel::load`] makes the cache hold at least one sequence.
fn loaded(options: ModelOptions) -> LoadedModel {
    let checkpoint = Arc::new(Checkpoint::open(&fixture(MODEL)).unwrap());
    let config = read_config(&checkpoint).unwrap();
    let graph = build_graph(&config, &TensorIndex::from(&*checkpoint)).unwrap();
    let info = ModelInfo::new(&config, &graph);
    let model = Model::load(graph, &checkpoint, cpu(1), options, &mut |_, _| {}).unwrap();
    LoadedModel { config, info, tokenizer: None, chat_template: None, model }
}

fn small(max_cached_tokens: u64) -> ModelOptions {
    ModelOptions {
        max_seq_len: 128,
        max_sequences: 2,
        max_step_tokens: 64,
        max_cached_tokens,
        ..ModelOptions::default()
    }
}

fn request(tokens: usize, max_tokens: u32) -> Request {
    let ids = reference(&format!("{MODEL}/reference.safetensors")).input_ids;
    Request::new(ids[..tokens].to_vec(), greedy(max_tokens))
}

fn used(engine: &Engine) -> u32 {
    engine.stats().blocks_used
}

#[test]
fn blocks_are_reserved_all_or_none_and_all_given_back() {
    let mut model = loaded(small(64)).model;
    let (limit, block_size) = (model.cache_blocks(), model.block_size());
    let (mut one, mut other) = (SequenceKv::default(), SequenceKv::default());
    model.reserve(&mut one, (limit - 1) * block_size).unwrap();
    let error = model.reserve(&mut other, 2 * block_size).unwrap_err();
    assert!(matches!(error, RuntimeError::KvExhausted { wanted: 2, free: 1, .. }), "{error}");
    assert!(other.blocks.is_empty());
    model.reserve(&mut other, block_size).unwrap();
    assert_eq!(model.memory().kv.used, limit);

    let mut stale = SequenceKv { blocks: vec![one.blocks[0]], len: 0 };
    model.release(&mut stale).unwrap();
    assert!(matches!(model.release(&mut one), Err(RuntimeError::StaleBlock { .. })));
    model.release(&mut other).unwrap();
    assert_eq!(model.memory().kv.used, 0, "a stale block does not keep the others");
    model.reserve(&mut other, limit * block_size).unwrap();
}

#[test]
fn a_request_that_could_never_start_is_refused() {
    let mut engine = Engine::new(loaded(small(1)));
    let model = &engine.loaded().model;
    let room = model.cache_blocks() * model.block_size();
    assert!(room < 128, "the cache is smaller than the context: {room}");
    let error = engine.submit(request(8, 120)).unwrap_err();
    assert!(matches!(error, EngineError::CacheSize { tokens: 128, .. }), "{error}");
    assert!(!engine.has_work());
    assert_eq!(run(&mut engine, vec![request(8, room - 8)])[0].len() as u32, room - 8);
}

#[test]
fn a_cache_that_somebody_else_fills_ends_requests_and_not_the_engine() {
    let mut loaded = loaded(small(64));
    let mut hog = SequenceKv::default();
    let (limit, block_size) = (loaded.model.cache_blocks(), loaded.model.block_size());
    loaded.model.reserve(&mut hog, (limit - 1) * block_size).unwrap();
    let mut engine = Engine::new(loaded);
    let failed = |output: &Output| matches!(&output.finish, Some(FinishReason::Device(text)) if text.contains("KV"));
    for _ in 0..=limit {
        let ids: Vec<_> = (0..3).map(|_| engine.submit(request(4, 20)).unwrap()).collect();
        let mut outputs = Vec::new();
        while engine.has_work() {
            outputs.extend(engine.step());
        }
        // One block is free, which is too little for the answers: each fails when it needs another one, and only then.
        for id in ids {
            let own: Vec<_> = outputs.iter().filter(|output| output.id == id).collect();
            assert!(failed(own.last().unwrap()), "{own:?}");
            assert_eq!(own.len() as u32, block_size - 4 + 2);
        }
        assert_eq!(used(&engine), limit - 1);
    }
    assert_eq!(run(&mut engine, vec![request(4, 4)])[0].len(), 4);
    assert_eq!(used(&engine), limit - 1);
}

#[test]
fn logits_in_between_do_not_touch_requests() {
    let ids = reference(&format!("{MODEL}/reference.safetensors")).input_ids;
    let options = LoadOptions { prefill_chunk_size: 8, ..exact() };
    let mut engine = engine(MODEL, &options, 1);
    let alone = run(&mut engine, vec![request(20, 6)]).remove(0);
    let expected = logits(&mut engine, &ids[..24], false);
    let id = engine.submit(request(20, 6)).unwrap();
    let mut tokens = Vec::new();
    while engine.has_work() {
        tokens.extend(engine.step().into_iter().filter_map(|output| output.token));
        let held = used(&engine);
        assert!(logits(&mut engine, &ids[..24], false) == expected);
        assert_eq!(used(&engine), held);
    }
    assert_eq!(tokens, alone);
    assert!(!engine.cancel(id), "a request that has ended is not in flight");
}

#[test]
fn a_cancelled_request_ends_once_wherever_it_is() {
    let options = LoadOptions { max_sequences: 2, prefill_chunk_size: 8, ..exact() };
    let mut engine = engine(MODEL, &options, 1);
    let ids: Vec<_> = (0..4).map(|_| engine.submit(request(20, 6)).unwrap()).collect();
    engine.step();
    assert!(used(&engine) > 0);
    // One in the middle of its prompt, one that waits; the second call changes nothing.
    for id in [ids[0], ids[3], ids[0]] {
        assert!(engine.cancel(id));
    }
    let mut ends = Vec::new();
    while engine.has_work() {
        let outputs = engine.step();
        assert!(outputs.is_sorted_by_key(|output| output.id));
        ends.extend(outputs.into_iter().filter_map(|output| Some((output.id, output.finish?))));
    }
    ends.sort_by_key(|(id, _)| *id);
    let reasons = [FinishReason::Cancelled, FinishReason::Length, FinishReason::Length, FinishReason::Cancelled];
    assert_eq!(ends, ids.into_iter().zip(reasons).collect::<Vec<_>>());
    assert_eq!(used(&engine), 0);
}

#[test]
fn every_bucket_sees_buffers_that_another_made_grow() {
    let ids = reference(&format!("{MODEL}/reference.safetensors")).input_ids;
    let (short, other, long) = (&ids[..4], &ids[5..9], &ids[..40]);
    let fresh = |tokens| logits(&mut engine(MODEL, &exact(), 1), tokens, false);
    let mut engine = engine(MODEL, &exact(), 1);
    // The long text takes another bucket and moves the inputs; the bucket of the short ones was bound to the old place.
    for tokens in [short, long, other, long, short] {
        assert!(logits(&mut engine, tokens, false) == fresh(tokens), "{} tokens", tokens.len());
    }
}
