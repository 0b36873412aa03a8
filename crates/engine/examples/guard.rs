//! Prints what the guard costs: the same requests with and without it, in turns, and a known answer alone.
//!
//! `cargo run --release -p qwen-engine --example guard -- MODEL.gguf [TURNS]`
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a measurement")]

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use qwen_engine::{Engine, EngineOptions, GuardOptions, LoadOptions, LoadedModel, Request, SamplingParams};
use qwen_hal::{Host, Plugin, Pool};

fn main() {
    let path = std::env::args().nth(1).unwrap();
    let turns: usize = std::env::args().nth(2).map_or(7, |turns| turns.parse().unwrap());
    for batch in [1, 8, 32] {
        let (mut off, mut on) = (engine(&path, batch, None), engine(&path, batch, Some(GuardOptions::default())));
        // The first turn of each is not looked at.
        run(&mut off, batch);
        run(&mut on, batch);
        let (mut without, mut with) = (Vec::new(), Vec::new());
        let before = on.stats();
        for _ in 0..turns {
            without.push(run(&mut off, batch));
            with.push(run(&mut on, batch));
        }
        let stats = on.stats();
        let (checks, steps) = (stats.guard_checks - before.guard_checks, stats.steps - before.steps);
        let seconds = stats.guard_seconds - before.guard_seconds;
        let share = 100.0 * seconds / (stats.step_seconds - before.step_seconds);
        let (without, with) = (middle(without), middle(with));
        println!(
            "{batch:>2} sequences: {without:.0} tokens/s without, {with:.0} with ({:+.2}%); {checks} checks in {steps} steps of \
             {:.2} ms, {share:.2}% of their time, {:.2} ms each",
            100.0 * (with / without - 1.0),
            1e3 * (stats.step_seconds - before.step_seconds) / steps as f64,
            1e3 * seconds / checks.max(1) as f64,
        );
    }
    let mut alone = engine(&path, 1, None);
    let times: Vec<f64> = (0..turns)
        .map(|_| {
            let start = Instant::now();
            alone.known_answer().unwrap();
            start.elapsed().as_secs_f64()
        })
        .collect();
    println!("a known answer takes {:.1} ms", 1e3 * middle(times));
}

fn engine(path: &str, batch: u32, guard: Option<GuardOptions>) -> Engine {
    let pool = Arc::new(Pool::new(None));
    let device = Plugin::linked(&qwen_cpu::PLUGIN, &Host::new(pool.clone())).unwrap().open(0, &[]).unwrap();
    let load = LoadOptions {
        max_sequences: batch,
        max_seq_len: Some(512),
        max_cached_tokens: Some(512 * u64::from(batch)),
        ..LoadOptions::default()
    };
    let options = EngineOptions { guard, pool: Some(pool), prefix_cache: false, ..EngineOptions::default() };
    Engine::with_options(LoadedModel::load(Path::new(path), device, &load, &mut |_| {}).unwrap(), options)
}

/// Tokens a second of so many answers.
fn run(engine: &mut Engine, batch: u32) -> f64 {
    let sampling = SamplingParams { temperature: 0.0, max_tokens: 256, ignore_eos: true, ..SamplingParams::default() };
    for i in 0..batch {
        let prompt: Vec<u32> = (0..24).map(|k| 1000 + (k * 37 + i * 11) % 400).collect();
        engine.submit(Request::new(prompt, sampling.clone())).unwrap();
    }
    let (start, before) = (Instant::now(), engine.stats().generated_tokens);
    while engine.has_work() {
        engine.step();
    }
    (engine.stats().generated_tokens - before) as f64 / start.elapsed().as_secs_f64()
}

fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
