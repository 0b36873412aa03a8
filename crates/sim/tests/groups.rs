//! Models on groups of simulated chips that compute them together: against one device, under every cut of the work, and when a
//! member is lost. Everything here is simulated.

mod common;

use std::time::Duration;

use common::{GROUP_CHIP, ask, cpu, divergence, exact, faulty_instance, fleet, greedy, group, load, logits, open};
use proptest::prelude::*;
use qwen_engine::{Instance, LoadOptions, Placement, Policy, Request, SamplingParams};

/// Model, and the sizes of groups that it can be split among.
const MODELS: &[(&str, &[usize])] = &[
    ("models/qwen2", &[2, 4]),
    ("models/llama", &[2, 4]),
    ("models/qwen3", &[2]),
    ("models/qwen3_moe", &[2]),
    ("models/qwen2_moe", &[2]),
    ("models/deepseek_v2", &[2]),
    ("models/deepseek_v3", &[2]),
    ("gguf/llama-q8_0.gguf", &[2]),
    ("gguf/qwen2moe.gguf", &[2]),
    ("gguf/deepseek2-v3-split.gguf", &[2]),
];

#[test]
fn a_group_computes_what_one_device_computes() {
    let tokens: Vec<u32> = (1..25).collect();
    for (path, sizes) in MODELS {
        let mut alone = load(path, cpu(1), &exact()).unwrap();
        let (expected, said) = (logits(&mut alone, &tokens, false), greedy(&mut alone, &tokens, 8));
        for size in *sizes {
            let mut engine = load(path, group(0, *size, &[("delay_us", "20")]), &exact()).unwrap();
            assert_eq!(engine.loaded().model.devices().count(), *size);
            let found = logits(&mut engine, &tokens, false);
            assert_eq!(found[0].len(), expected[0].len(), "{path}: rows are put together");
            let kl = divergence(&expected, &found);
            println!("{path} on {size} simulated devices: KL {kl:.1e}");
            assert!((-1e-9..=1e-9).contains(&kl), "{path} on {size}: KL {kl}");
            assert_eq!(greedy(&mut engine, &tokens, 8), said, "{path} on {size}");
        }
    }
}

#[test]
fn the_cut_of_the_work_is_not_seen_in_a_bit() {
    let tokens: Vec<u32> = (1..40).collect();
    for (path, sizes) in MODELS {
        let size = *sizes.last().unwrap();
        let run = |policy: Policy, chunk: u32, first: usize, delay: &str| {
            let options = LoadOptions { policy, prefill_chunk_size: chunk, ..exact() };
            let mut engine = load(path, group(first, size, &[("delay_us", delay), ("seed", delay)]), &options).unwrap();
            logits(&mut engine, &tokens, false)
        };
        for policy in [Policy::Exact, Policy::Balanced] {
            let whole = run(policy, 512, 0, "0");
            assert_eq!(run(policy, 7, 0, "60"), whole, "{path} in chunks");
            assert_eq!(run(policy, 512, 1, "90"), whole, "{path} on another group");
        }
    }
}

#[test]
fn company_and_cache_are_not_seen_in_a_token() {
    let prompts: [Vec<u32>; 3] = [(1..30).collect(), (60..70).collect(), (1..22).collect()];
    let sampling =
        SamplingParams { temperature: 0.9, seed: 5, max_tokens: 12, ignore_eos: true, ..SamplingParams::default() };
    let options = LoadOptions { max_sequences: 4, ..exact() };
    let alone = prompts.clone().map(|prompt| {
        let mut engine = load(MODELS[0].0, group(0, 2, &[]), &options).unwrap();
        engine.submit(Request::new(prompt, sampling.clone())).unwrap();
        let mut tokens = Vec::new();
        while engine.has_work() {
            tokens.extend(engine.step().iter().filter_map(|output| output.token));
        }
        tokens
    });
    let mut engine = load(MODELS[0].0, group(0, 2, &[]), &options).unwrap();
    // The second time prompts are in the prefix cache.
    for _ in 0..2 {
        let ids = prompts.clone().map(|prompt| engine.submit(Request::new(prompt, sampling.clone())).unwrap());
        let mut tokens: [Vec<u32>; 3] = Default::default();
        while engine.has_work() {
            for output in engine.step() {
                let at = ids.iter().position(|id| *id == output.id).unwrap();
                tokens[at].extend(output.token);
            }
        }
        assert_eq!(tokens, alone);
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let refused = |path: &str, placement: Placement| load(path, placement, &exact()).unwrap_err();
    let odd = refused("models/qwen2", group(0, 3, &[]));
    assert!(odd.contains("4 query heads can't be split evenly among 3 devices"), "{odd}");
    let blocks = refused("gguf/llama-q4_k.gguf", group(0, 2, &[]));
    assert!(blocks.contains("is stored in blocks of"), "{blocks}");
    let scales = refused("models/deepseek_v3_fp8", group(0, 2, &[]));
    assert!(scales.contains("blocks of 128") || scales.contains("split evenly"), "{scales}");
    let host = refused("models/qwen2", Placement::from(cpu(1)).with_peers(vec![cpu(1)]));
    assert!(host.contains("the plugin cpu has no collectives") && host.contains("--tensor-parallel-size"), "{host}");
    let plugin = common::plugin();
    let mixed = Placement::from(open(&plugin, GROUP_CHIP, 0, &[])).with_peers(vec![open(&plugin, "mlu370", 0, &[])]);
    let mixed = refused("models/qwen2", mixed);
    assert!(mixed.contains("is of another type"), "{mixed}");
}

#[test]
fn a_hang_names_the_rank_that_hung() {
    // The others only see that it does not come, or has left.
    let hung = [("hang", "30"), ("watchdog_ms", "50"), ("delay_us", "0")];
    let mut engine = load("models/qwen2", group(0, 2, &hung), &exact()).unwrap();
    let tokens: Vec<u32> = (1..20).collect();
    let error = std::iter::repeat_with(|| engine.logits(&tokens, false, &mut |_| {})).take(50).find_map(Result::err);
    let error = error.unwrap().to_string();
    assert!(error.starts_with("sim:ascend910b3:1, rank 1 of 2: "), "{error}");
    assert!(error.contains("did not end in 50 ms"), "{error}");
}

/// A group whose second member is opened with these settings the first time, and without faults afterwards.
fn instance(first: usize, faults: Option<(&'static str, String)>) -> Instance {
    let name = format!("sim:{GROUP_CHIP}:{},{}", 2 * first, 2 * first + 1);
    faulty_instance(&name, faults, move |settings| group(first, 2, settings))
}

fn undisturbed() -> Vec<(Vec<u32>, String)> {
    ask(&fleet(vec![instance(0, None)]))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]

    /// Wherever a device of a group is lost, the requests go on on the other group with the same tokens.
    #[test]
    fn a_lost_member_is_not_seen(at in 1u64..1500) {
        let fleet = fleet(vec![instance(0, Some(("lost", at.to_string()))), instance(1, None)]);
        prop_assert_eq!(ask(&fleet), undisturbed());
    }
}

#[test]
fn a_group_is_told_as_one_device_with_its_members() {
    let fleet = fleet(vec![instance(0, Some(("lost", "400".into()))), instance(1, None)]);
    let before = fleet.instances();
    assert!(
        before.iter().all(|instance| instance.members.len() == 2 && instance.title.starts_with("2 x ")),
        "{before:?}"
    );
    assert_eq!(ask(&fleet), undisturbed());
    assert!(fleet.moved() > 0);
    let start = std::time::Instant::now();
    while !fleet.instances()[0].trust.is_usable() {
        assert!(start.elapsed() < Duration::from_secs(300), "the group did not come back");
        std::thread::yield_now();
    }
    let back = &fleet.instances()[0];
    assert!(back.last_reset.is_some() && back.quarantines > 0, "{back:?}");
    assert_eq!(ask(&fleet), undisturbed());
}
