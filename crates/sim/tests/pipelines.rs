//! Models whose layers are divided among simulated chips, stage after stage: the bits of one device under every cut of the work, and what
//! is seen when a stage is lost. Everything here is simulated.

mod common;

use std::time::Duration;

use common::{GROUP_CHIP, ask, cpu, exact, faulty_instance, fleet, greedy, load, logits, open};
use proptest::prelude::*;
use qwen_engine::{Engine, Instance, LoadOptions, Placement, Policy, Pooling, Request, SamplingParams};

/// Model, and the numbers of stages that its layers are divided into.
const MODELS: &[(&str, &[usize])] = &[
    ("models/qwen2", &[2]),
    ("models/llama", &[2]),
    ("models/qwen3", &[2]),
    ("models/qwen3_moe", &[2]),
    ("models/qwen2_moe", &[2, 3, 4]),
    ("models/qwen2_window", &[2, 3, 4]),
    ("models/deepseek_v2", &[2]),
    ("models/deepseek_v3", &[2]),
    // The CPU computes what the chip has no types for.
    ("models/deepseek_v3_fp8", &[2]),
    ("gguf/llama.gguf", &[2]),
    ("gguf/llama-tied-bf16.gguf", &[2]),
    ("gguf/qwen3moe.gguf", &[2]),
    ("gguf/qwen2moe.gguf", &[2]),
    ("gguf/deepseek2-v3-split.gguf", &[2]),
];

/// So many stages of so many ranks; the options are the second device's.
fn group(stages: usize, ranks: usize, options: &[(&str, &str)]) -> Placement {
    common::group(0, stages * ranks, options).with_stages(stages)
}

/// With micro-batches from so many tokens on.
fn micro(tokens: u32, placement: Placement) -> Placement {
    Placement { micro_batch_tokens: tokens, ..placement }
}

#[test]
fn stages_give_the_bits_of_one_device() {
    let tokens: Vec<u32> = (1..40).collect();
    for (path, counts) in MODELS {
        for policy in [Policy::Exact, Policy::Balanced] {
            let options = LoadOptions { policy, ..exact() };
            let mut alone = load(path, group(1, 1, &[]), &options).unwrap();
            let expected = [false, true].map(|decode| logits(&mut alone, &tokens, decode));
            let said = greedy(&mut alone, &tokens, 8);
            let memory = alone.loaded().model.memory();
            for stages in *counts {
                // Whole steps, and micro-batches that cut the prompt.
                for tokens_of_micro in [1000, 3] {
                    let placement = micro(tokens_of_micro, group(*stages, 1, &[("delay_us", "20")]));
                    let mut engine = load(path, placement, &options).unwrap();
                    let model = &engine.loaded().model;
                    let told: u32 = model.stages().iter().map(|stage| stage.layers).sum();
                    assert_eq!((model.stages().len(), model.devices().count(), model.ranks()), (*stages, *stages, 1));
                    assert_eq!(told, if path.contains("qwen2_") { 4 } else { 2 }, "{path}");
                    // Each layer's cache is on one device, and none is held twice.
                    assert_eq!(model.block_bytes(), alone.loaded().model.block_bytes());
                    assert_eq!(model.memory().kv.limit, memory.kv.limit);
                    let found = [false, true].map(|decode| logits(&mut engine, &tokens, decode));
                    assert_eq!(found, expected, "{path}, {policy:?}, {stages} stages, {tokens_of_micro}");
                    assert_eq!(greedy(&mut engine, &tokens, 8), said, "{path}, {policy:?}, {stages} stages");
                }
            }
        }
    }
}

#[test]
fn stages_of_several_ranks_give_the_bits_of_one_stage_of_them() {
    let tokens: Vec<u32> = (1..40).collect();
    for path in ["models/qwen2", "models/qwen2_moe", "models/deepseek_v3"] {
        for policy in [Policy::Exact, Policy::Balanced] {
            let options = LoadOptions { policy, ..exact() };
            let mut flat = load(path, group(1, 2, &[]), &options).unwrap();
            let expected = logits(&mut flat, &tokens, false);
            for least in [1000, 5] {
                let mut deep = load(path, micro(least, group(2, 2, &[("delay_us", "20")])), &options).unwrap();
                assert_eq!((deep.loaded().model.ranks(), deep.loaded().model.stages().len()), (2, 2));
                assert_eq!(logits(&mut deep, &tokens, false), expected, "{path}, {policy:?}");
            }
        }
    }
}

#[test]
fn vectors_of_texts_have_the_bits_of_one_device() {
    let options = LoadOptions { embeddings: true, ..exact() };
    let vectors = |placement: Placement| {
        let mut engine = load("models/qwen2_window", placement, &options).unwrap();
        [Pooling::Last, Pooling::Mean].map(|pooling| {
            let sampling = SamplingParams { max_tokens: 0, ..SamplingParams::default() };
            let request = Request { embed: Some(pooling), ..Request::new((1..40).collect(), sampling) };
            engine.submit(request).unwrap();
            let mut vectors = Vec::new();
            while engine.has_work() {
                vectors.extend(engine.step().into_iter().filter_map(|output| output.embedding));
            }
            assert_eq!(vectors.len(), 1);
            vectors
        })
    };
    assert_eq!(vectors(micro(3, group(4, 1, &[]))), vectors(group(1, 1, &[])));
}

/// A stage holds the weights of its layers and nothing else.
#[test]
fn weights_are_held_once() {
    let bytes = |placement: Placement| {
        let engine = load("models/qwen2_window", placement, &exact()).unwrap();
        let memory = engine.loaded().model.memory();
        memory.weights_packed + memory.weights_owned
    };
    let (one, four) = (bytes(group(1, 1, &[])), bytes(group(4, 1, &[])));
    assert_eq!(one, four);
    // What stages are told to hold: a table that is the head too is held where ids go in and where logits come out.
    for (path, table) in [("models/qwen2_window", 0), ("models/qwen2", 320 * 64 * 4)] {
        let engine = load(path, group(2, 1, &[]), &exact()).unwrap();
        let (info, model) = (&engine.loaded().info, &engine.loaded().model);
        let cache = model.block_bytes() * u64::from(model.cache_blocks());
        let told: u64 = model.stages().iter().map(|stage| stage.bytes).sum();
        assert_eq!(told, info.weight_bytes + cache + table, "{path}");
    }
}

#[test]
fn layers_go_where_the_memory_is() {
    let plugin = common::plugin();
    let sized = |bytes: [&str; 2]| {
        let [first, second] =
            [0, 1].map(|at| open(&plugin, GROUP_CHIP, at, &[("memory", bytes[at]), ("delay_us", "0")]));
        let placement = Placement::from(first).with_fallback(cpu(1)).with_peers(vec![second]).with_stages(2);
        let engine = load("models/qwen2_window", placement, &exact()).unwrap();
        engine.loaded().model.stages().iter().map(|stage| stage.layers).collect::<Vec<_>>()
    };
    assert_eq!(sized(["2147483648", "2147483648"]), [2, 2]);
    assert_eq!(sized(["6442450944", "2147483648"]), [3, 1]);
    assert_eq!(sized(["2147483648", "6442450944"]), [1, 3]);
}

#[test]
fn the_cpu_takes_stages_too() {
    let tokens: Vec<u32> = (1..40).collect();
    let mut alone = load("models/qwen2_moe", cpu(1), &exact()).unwrap();
    let expected = logits(&mut alone, &tokens, false);
    for least in [1000, 3] {
        let placement = Placement::from(cpu(1)).with_peers(vec![cpu(1), cpu(1)]).with_stages(3);
        let mut engine = load("models/qwen2_moe", micro(least, placement), &exact()).unwrap();
        assert_eq!(logits(&mut engine, &tokens, false), expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]

    /// Chunks, micro-batches, company, cache and pauses of devices are not seen in a token.
    #[test]
    fn the_cut_of_the_work_is_not_seen(
        stages in 1usize..5,
        chunk in 1u32..40,
        least in 1u32..20,
        sequences in 1u32..5,
        seed in 0u64..100,
        lengths in proptest::collection::vec(1u32..40, 1..5),
    ) {
        const MODEL: &str = "models/qwen2_window";
        let sampling =
            SamplingParams { temperature: 0.9, seed: 5, max_tokens: 6, ignore_eos: true, ..SamplingParams::default() };
        let ask = |engine: &mut Engine, lengths: &[u32]| {
            let request = |length: &u32| Request::new((3..3 + length).collect(), sampling.clone());
            let ids: Vec<_> = lengths.iter().map(|length| engine.submit(request(length)).unwrap()).collect();
            let mut tokens = vec![Vec::new(); ids.len()];
            while engine.has_work() {
                for output in engine.step() {
                    let at = ids.iter().position(|id| *id == output.id).unwrap();
                    tokens[at].extend(output.token);
                }
            }
            tokens
        };
        let mut alone = load(MODEL, group(1, 1, &[]), &exact()).unwrap();
        let expected: Vec<Vec<u32>> = lengths.iter().map(|length| ask(&mut alone, &[*length]).remove(0)).collect();
        let options = LoadOptions {
            prefill_chunk_size: chunk, max_sequences: sequences, max_cached_tokens: Some(512), ..exact()
        };
        let seed = seed.to_string();
        let placement = micro(least, group(stages, 1, &[("delay_us", "30"), ("seed", &seed)]));
        let mut engine = load(MODEL, placement, &options).unwrap();
        // The second time prompts are in the prefix cache.
        for _ in 0..2 {
            prop_assert_eq!(&ask(&mut engine, &lengths), &expected);
        }
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let refused = |path: &str, placement: Placement| load(path, placement, &exact()).unwrap_err();
    let shallow = refused("models/qwen2", group(3, 1, &[]));
    assert!(shallow.contains("2 layers can't be divided into 3 stages"), "{shallow}");
    assert!(shallow.contains("sim:ascend910b3:0 and sim:ascend910b3:1 and"), "{shallow}");
    let odd = refused("models/qwen2", group(1, 3, &[]).with_stages(2));
    assert!(odd.contains("3 devices are not 2 stages of as many each"), "{odd}");
    let heads = refused("models/qwen2", group(2, 3, &[]));
    assert!(heads.contains("4 query heads can't be split evenly among 3 devices"), "{heads}");
    let plugin = common::plugin();
    let mixed = Placement::from(open(&plugin, GROUP_CHIP, 0, &[])).with_peers(vec![open(&plugin, "mlu370", 0, &[])]);
    let mixed = refused("models/qwen2", mixed.with_stages(2));
    assert!(mixed.contains("sim:mlu370:0 is of another type than sim:ascend910b3:0"), "{mixed}");
    // The first stage has room for its layers, the second has not.
    let small = refused("models/qwen2", group(2, 1, &[("memory", "65536")]));
    let told = "sim:ascend910b3:1, stage 1 of 2: no room for layer 1: ";
    assert!(small.starts_with(told) && small.contains("but 64.0 KiB is available"), "{small}");
    // Its cache has, its weights have not; nothing was taken of the first, which has room for both.
    let plugin = common::plugin();
    let roomy = open(&plugin, GROUP_CHIP, 0, &[("oom", "1")]);
    let tight = open(&plugin, GROUP_CHIP, 1, &[("memory", "33554432")]);
    let tight = refused("models/qwen2", Placement::from(roomy).with_peers(vec![tight]).with_stages(2));
    assert!(tight.contains("stage 1 of 2: no room for layer 1: ") && tight.contains("32.0 MiB for weights"), "{tight}");
    // As a device alone, and a rank.
    let alone = refused("models/qwen2", open(&plugin, GROUP_CHIP, 0, &[("memory", "65536")]).into());
    assert!(alone.starts_with("no room for layers 0 to 1: "), "{alone}");
    let rank = refused("models/qwen2", group(1, 2, &[("memory", "65536")]));
    assert!(rank.starts_with("sim:ascend910b3:1, rank 1 of 2: no room for a part in 2 of layers 0 to 1: "), "{rank}");
}

#[test]
fn a_failure_names_the_device_and_its_stage() {
    let mut engine = load("models/qwen2", group(2, 1, &[("lost", "30"), ("delay_us", "0")]), &exact()).unwrap();
    let tokens: Vec<u32> = (1..20).collect();
    let error = std::iter::repeat_with(|| engine.logits(&tokens, false, &mut |_| {})).take(50).find_map(Result::err);
    let error = error.unwrap().to_string();
    assert!(error.starts_with("sim:ascend910b3:1, stage 1 of 2: "), "{error}");
}

/// Stages whose second device is opened with these settings the first time, and without faults afterwards; one stage is a device alone.
fn instance(name: &str, stages: usize, faults: Option<(&'static str, String)>) -> Instance {
    faulty_instance(name, faults, move |settings| micro(4, group(stages, 1, settings)))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]

    /// Wherever a stage is lost, requests go on on one device of its type, or on other stages, with the same tokens.
    #[test]
    fn a_lost_stage_is_not_seen(at in 1u64..700, others in 1usize..3) {
        let fleet = fleet(vec![instance("a", 2, Some(("lost", at.to_string()))), instance("b", others, None)]);
        prop_assert_eq!(ask(&fleet), ask(&self::fleet(vec![instance("alone", 1, None)])));
    }
}

#[test]
fn a_group_of_stages_is_told_as_one_device_and_comes_back() {
    let fleet = fleet(vec![instance("a", 2, Some(("lost", "200".into()))), instance("b", 1, None)]);
    let before = fleet.instances();
    assert_eq!(before.iter().map(|instance| instance.members.len()).collect::<Vec<_>>(), [2, 0]);
    let expected = ask(&self::fleet(vec![instance("alone", 1, None)]));
    while fleet.moved() == 0 {
        assert_eq!(ask(&fleet), expected);
    }
    let start = std::time::Instant::now();
    while !fleet.instances()[0].trust.is_usable() {
        assert!(start.elapsed() < Duration::from_secs(300), "the group did not come back");
        std::thread::yield_now();
    }
    let back = &fleet.instances()[0];
    assert!(back.last_reset.is_some() && back.reason.contains("sim:ascend910b3:1"), "{back:?}");
    assert_eq!(ask(&fleet), expected);
}
