//! Prints what the host itself costs: nanoseconds of a launch, and of a decoding step of a model of 30 layers.
//!
//! `cargo run --release -p qwen-null --example overhead`
#![allow(clippy::print_stdout, reason = "a measurement")]

#[path = "../tests/support/mod.rs"]
mod support;

use qwen_engine::SamplingParams;

fn main() {
    let sampling = SamplingParams { temperature: 0.0, max_tokens: 400, ignore_eos: true, ..SamplingParams::default() };
    let (launch, step) = (support::launch_ns(), support::step(&sampling));
    println!("launch of one op: {launch:.0} ns");
    let [replayed, patched] = support::replay_ns();
    println!("launch of a replayed list: {replayed:.0} ns, with a value patched: {patched:.0} ns");
    println!(
        "decoding step of one sequence, {} layers, vocabulary {}: {:.3} ms",
        support::LAYERS,
        support::VOCABULARY,
        step.as_secs_f64() * 1e3
    );
}
