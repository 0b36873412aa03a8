//! Models on devices that lack things: copied weights, a cache that is allocated whole, ops that the CPU computes instead.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

#[path = "support/picky.rs"]
mod picky;
mod support;

use qwen_engine::{Engine, EngineError, LoadOptions, LoadedModel, Placement, Request};
use qwen_hal::abi::ops;
use support::{cpu, exact, fixture, greedy, logits, reference, run, try_engine};

fn load(path: &str, placement: Placement, options: &LoadOptions) -> Result<Engine, EngineError> {
    LoadedModel::load(&fixture(path), placement, options, &mut |_| {}).map(Engine::new)
}

/// Everything that a model can say of itself is the same bits on both.
fn same_answers(path: &str, engine: &mut Engine, options: &LoadOptions) {
    let mut expected = try_engine(path, options, 2).unwrap();
    let tokens = reference(&format!("{path}/reference.safetensors")).input_ids;
    for decode in [false, true] {
        assert_eq!(logits(engine, &tokens, decode), logits(&mut expected, &tokens, decode), "{path}, decode {decode}");
    }
    let request = || vec![Request::new(tokens[..8].to_vec(), greedy(8))];
    assert_eq!(run(engine, request()), run(&mut expected, request()), "{path}");
}

const MODELS: [&str; 4] = ["models/qwen2", "models/qwen3_moe", "models/deepseek_v3", "models/llama_yarn"];

#[test]
fn a_device_without_mapping_and_virtual_memory_computes_the_same() {
    for path in MODELS {
        let (device, _turn) = picky::device(&[], 1);
        let mut engine = load(path, device.into(), &exact()).unwrap();
        same_answers(path, &mut engine, &exact());
        let memory = engine.loaded().model.memory();
        assert_eq!(memory.kv.limit, engine.loaded().model.cache_blocks());
        assert!(memory.kv_committed > 0 && memory.weights_owned > 0, "{memory:?}");
    }
}

#[test]
fn every_op_can_be_computed_by_the_cpu_instead() {
    for path in MODELS {
        for kind in 1..=ops::QHAL_OP_SOFTMAX {
            let (device, _turn) = picky::device(&[kind], 1);
            let mut engine = load(path, Placement::from(device).with_fallback(cpu(2)), &exact()).unwrap();
            let model = &engine.loaded().model;
            let computed: Vec<_> = model.fallbacks().iter().map(|fallback| fallback.op).collect();
            let caches = [ops::QHAL_OP_KV_APPEND, ops::QHAL_OP_ATTENTION, ops::QHAL_OP_MLA_ATTENTION];
            if caches.contains(&kind) && !computed.is_empty() {
                assert!(computed.contains(&"kv_append") && computed.len() == 2, "one cache, one device: {computed:?}");
            } else {
                assert!(computed.iter().all(|op| *op == ops::op_name(kind)), "{path} {computed:?}");
            }
            assert_eq!(model.crossings() > 0, !computed.is_empty(), "{path} {computed:?}");
            println!("{path}: {} on the CPU, {} copies a step", ops::op_name(kind), model.crossings());
            same_answers(path, &mut engine, &exact());
        }
    }
}

#[test]
fn what_is_refused_is_told_with_the_devices_own_words() {
    let (device, _turn) = picky::device(&[ops::QHAL_OP_NORM, ops::QHAL_OP_ATTENTION], 1);
    let placement = Placement { max_crossings: 3, ..Placement::from(device.clone()).with_fallback(cpu(1)) };
    let error = load("models/qwen3", placement, &exact()).unwrap_err().to_string();
    for part in ["at most 3 are allowed", "norm (layer 0", "more): out of sorts", "it shares its cache with attention"]
    {
        assert!(error.contains(part), "{error}");
    }
    // Without a device that helps out the refusal is the pass's.
    let error = load("models/qwen3", device.into(), &exact()).unwrap_err().to_string();
    assert!(error.contains("the device has no kernel"), "{error}");
}

#[test]
fn a_device_that_computes_nothing_is_refused() {
    let (device, _turn) = picky::device(&(1..=ops::QHAL_OP_SOFTMAX).collect::<Vec<_>>(), 1);
    let placement = Placement::from(device).with_fallback(cpu(1));
    let error = load("models/qwen2", placement, &exact()).unwrap_err().to_string();
    assert!(error.contains("computes nothing of this model") && error.contains("gemm ("), "{error}");
}

#[test]
fn columns_that_a_device_cannot_reach_are_not_made_or_read_by_the_cpu() {
    for path in MODELS {
        let (device, _turn) = picky::device(&[], 256);
        let mut engine = load(path, Placement::from(device).with_fallback(cpu(2)), &exact()).unwrap();
        same_answers(path, &mut engine, &exact());
    }
}
