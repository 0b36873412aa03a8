//! Models end to end on simulated chips, against the CPU.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::path::{Path, PathBuf};

use common::{chip, cpu, divergence, fixture, greedy, logits};
use qwen_engine::{Engine, LoadOptions, LoadedModel, Placement, Policy};

/// Chips of three vendors: with and without virtual memory, with demands on alignment from 1 to 128 bytes.
const CHIPS: [&str; 4] = ["ascend910b", "mlu370", "dcu-z100", "br100"];

fn load(path: &Path, placement: impl Into<Placement>, policy: Policy) -> Engine {
    let options = LoadOptions { policy, max_seq_len: Some(128), ..LoadOptions::default() };
    Engine::new(LoadedModel::load(path, placement, &options, &mut |_| {}).unwrap())
}

/// Folders and files of every family.
fn models() -> Vec<PathBuf> {
    let folders = std::fs::read_dir(fixture("models")).unwrap().map(|entry| entry.unwrap().path());
    let files = ["llama-q4_k.gguf", "llama-q8_0.gguf", "llama-bf16.gguf", "qwen2moe.gguf"];
    let mut paths: Vec<PathBuf> = folders.chain(files.map(|file| fixture("gguf").join(file))).collect();
    paths.sort();
    paths
}

#[test]
fn every_family_runs_on_every_one_of_these_chips() {
    let tokens: Vec<u32> = (1..25).collect();
    for path in models() {
        let mut exact = load(&path, cpu(2), Policy::Exact);
        let (expected, said) = (logits(&mut exact, &tokens, false), greedy(&mut exact, &tokens, 8));
        for name in CHIPS {
            let placement = Placement::from(chip(name, &[("delay_us", "20")])).with_fallback(cpu(2));
            let mut engine = load(&path, placement, Policy::Exact);
            let model = &engine.loaded().model;
            let refused: Vec<String> = model.fallbacks().iter().map(ToString::to_string).collect();
            let crossings = model.crossings();
            let found = logits(&mut engine, &tokens, false);
            let kl = divergence(&expected, &found);
            println!("{} on {name}: KL {kl:.1e}, {crossings} copies {refused:?}", path.display());
            assert!((-1e-9..=1e-9).contains(&kl), "{} on {name}: KL {kl}", path.display());
            assert_eq!(greedy(&mut engine, &tokens, 8), said, "{} on {name}", path.display());
        }
    }
}

#[test]
fn the_default_precision_keeps_the_limit_and_does_not_depend_on_chance() {
    let tokens: Vec<u32> = (1..25).collect();
    let path = fixture("gguf/llama-q4_k.gguf");
    let mut exact = load(&path, cpu(2), Policy::Exact);
    let expected = logits(&mut exact, &tokens, false);
    for name in CHIPS {
        let run = |seed: &str| {
            let device = chip(name, &[("seed", seed), ("delay_us", "200")]);
            let mut engine = load(&path, Placement::from(device).with_fallback(cpu(2)), Policy::Balanced);
            (logits(&mut engine, &tokens, false), logits(&mut engine, &tokens, true))
        };
        let (prompt, decoded) = run("1");
        assert_eq!(prompt, decoded, "{name}");
        assert_eq!(run("2").0, prompt, "{name}");
        let kl = divergence(&expected, &prompt);
        println!("{name}: KL {kl:.1e}");
        assert!(kl < 0.002, "{name}: KL {kl}");
    }
}
