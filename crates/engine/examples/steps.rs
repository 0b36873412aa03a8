//! Prints where the time of a step goes: planning, the model, choosing tokens, the rest; greedy and sampled, with and without
//! guesses and grammars.
//!
//! `cargo run --release -p qwen-engine --example steps -- MODEL.gguf`
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a measurement")]

use std::path::Path;
use std::sync::Arc;

use qwen_engine::{
    Constraint, Engine, EngineOptions, Grammar, LoadOptions, LoadedModel, Request, SamplingParams, Speculation,
};
use qwen_hal::{Host, Plugin, Pool};

fn main() {
    let path = std::env::args().nth(1).unwrap();
    let greedy = SamplingParams { temperature: 0.0, max_tokens: 48, ignore_eos: true, ..SamplingParams::default() };
    let sampled = SamplingParams { temperature: 0.8, top_p: 0.95, ..greedy.clone() };
    let few = SamplingParams { top_k: 20, ..sampled.clone() };
    let full = SamplingParams { temperature: 1.0, ..greedy.clone() };
    let logprobs = SamplingParams { logprobs: Some(5), ..sampled.clone() };
    let json = Constraint { grammar: Grammar::JsonObject, after: None };
    let cases: [(&str, SamplingParams, Option<Constraint>, bool); 7] = [
        ("greedy", greedy.clone(), None, false),
        ("top-p", sampled.clone(), None, false),
        ("top-k 20, top-p", few, None, false),
        ("all tokens", full, None, false),
        ("top-p, 5 logprobs", logprobs, None, false),
        ("greedy, guesses", greedy, None, true),
        ("top-p, JSON", sampled, Some(json), false),
    ];
    println!(
        "{:20} {:>3} {:>8} {:>9} {:>6} {:>6} {:>6} {:>6} {:>7} {:>6}",
        "case", "n", "tokens/s", "step ms", "model", "plan", "choose", "rest", "overhead", "masks"
    );
    for batch in [1, 32] {
        for (name, sampling, constraint, guesses) in &cases {
            measure(&path, batch, name, sampling, constraint.as_ref(), *guesses);
        }
    }
}

fn measure(
    path: &str,
    batch: u32,
    name: &str,
    sampling: &SamplingParams,
    constraint: Option<&Constraint>,
    guesses: bool,
) {
    let pool = Arc::new(Pool::new(None));
    let host = Host::new(pool.clone());
    let device = Plugin::linked(&qwen_cpu::PLUGIN, &host).unwrap().open(0, &[]).unwrap();
    let load = LoadOptions {
        max_sequences: batch,
        max_seq_len: Some(256),
        max_cached_tokens: Some(256 * u64::from(batch)),
        ..LoadOptions::default()
    };
    let speculation = guesses.then(Speculation::default);
    let options = EngineOptions { speculation, pool: Some(pool), ..EngineOptions::default() };
    let loaded = LoadedModel::load(Path::new(path), device, &load, &mut |_| {}).unwrap();
    let mut engine = Engine::with_options(loaded, options);
    for i in 0..batch {
        let prompt: Vec<u32> = (0..24).map(|k| 1000 + (k * 37 + i * 11) % 400).collect();
        let request = Request::new(prompt, SamplingParams { seed: u64::from(i), ..sampling.clone() });
        engine.submit(Request { constraint: constraint.cloned(), ..request }).unwrap();
    }
    // Prompts are not looked at.
    while engine.stats().generated_tokens < u64::from(batch) * 2 {
        engine.step();
    }
    let before = engine.stats();
    while engine.has_work() {
        engine.step();
    }
    let after = engine.stats();
    let steps = (after.steps - before.steps) as f64;
    let of = |f: fn(&qwen_engine::EngineStats) -> f64| (f(&after) - f(&before)) / steps * 1e3;
    let (step, model) = (of(|s| s.step_seconds), of(|s| s.forward_seconds));
    let (plan, choose) = (of(|s| s.plan_seconds), of(|s| s.sample_seconds));
    let rate = (after.generated_tokens - before.generated_tokens) as f64 / (after.step_seconds - before.step_seconds);
    println!(
        "{name:20} {batch:>3} {rate:>8.0} {step:>9.3} {model:>6.3} {plan:>6.3} {choose:>6.3} {:>6.3} {:>7.2}% {:>6.3} {:.2}",
        step - model - plan - choose,
        100.0 * (step - model) / step,
        of(|s| s.mask_seconds),
        after.hli,
    );
}
