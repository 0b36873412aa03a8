//! Models end to end on simulated chips, against the CPU.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::chip;
use qwen_engine::{Engine, LoadOptions, LoadedModel, Placement, Policy, Request, SamplingParams};
use qwen_hal::{Device, Host, Plugin, Pool};

/// Chips of three vendors: with and without virtual memory, with demands on alignment from 1 to 128 bytes.
const CHIPS: [&str; 4] = ["ascend910b", "mlu370", "dcu-z100", "br100"];

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(path)
}

fn cpu() -> Device {
    let host = Host::new(Arc::new(Pool::new(Some(2))));
    Plugin::linked(&qwen_cpu::PLUGIN, &host).unwrap().open(0, &[]).unwrap()
}

fn load(path: &Path, placement: impl Into<Placement>, policy: Policy) -> Engine {
    let options = LoadOptions { policy, max_seq_len: Some(128), ..LoadOptions::default() };
    Engine::new(LoadedModel::load(path, placement, &options, &mut |_| {}).unwrap())
}

fn logits(engine: &mut Engine, tokens: &[u32], decode: bool) -> Vec<Vec<f32>> {
    let mut rows = Vec::new();
    engine.logits(tokens, decode, &mut |row| rows.push(row.to_vec())).unwrap();
    rows
}

fn greedy(engine: &mut Engine, tokens: &[u32], count: u32) -> Vec<u32> {
    let sampling =
        SamplingParams { temperature: 0.0, max_tokens: count, ignore_eos: true, ..SamplingParams::default() };
    engine.submit(Request::new(tokens.to_vec(), sampling)).unwrap();
    let mut said = Vec::new();
    while engine.has_work() {
        said.extend(engine.step().iter().filter_map(|output| output.token));
    }
    said
}

/// Mean divergence of rows of logits, in nats.
fn divergence(a: &[Vec<f32>], b: &[Vec<f32>]) -> f64 {
    let log_sum = |row: &[f32]| {
        let most = row.iter().copied().fold(f32::MIN, f32::max);
        f64::from(most) + row.iter().map(|x| f64::from(x - most).exp()).sum::<f64>().ln()
    };
    let row = |a: &[f32], b: &[f32]| {
        let (norm_a, norm_b) = (log_sum(a), log_sum(b));
        a.iter().zip(b).fold(0.0, |sum, (a, b)| {
            let (a, b) = (f64::from(*a) - norm_a, f64::from(*b) - norm_b);
            sum + a.exp() * (a - b)
        })
    };
    a.iter().zip(b).map(|(a, b)| row(a, b)).sum::<f64>() / a.len() as f64
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
        let mut exact = load(&path, cpu(), Policy::Exact);
        let (expected, said) = (logits(&mut exact, &tokens, false), greedy(&mut exact, &tokens, 8));
        for name in CHIPS {
            let placement = Placement::from(chip(name, &[("delay_us", "20")])).with_fallback(cpu());
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
    let mut exact = load(&path, cpu(), Policy::Exact);
    let expected = logits(&mut exact, &tokens, false);
    for name in CHIPS {
        let run = |seed: &str| {
            let device = chip(name, &[("seed", seed), ("delay_us", "200")]);
            let mut engine = load(&path, Placement::from(device).with_fallback(cpu()), Policy::Balanced);
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
