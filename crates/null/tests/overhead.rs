//! The host's own time stays small. The limits are for any build on any machine; figures come from the example `overhead`.

mod support;

use qwen_engine::SamplingParams;
use std::time::Duration;

#[test]
fn a_launch_and_a_step_cost_little() {
    let launch = support::launch_ns();
    let sampling = SamplingParams { temperature: 0.0, max_tokens: 400, ignore_eos: true, ..SamplingParams::default() };
    let step = support::step(&sampling);
    let replayed = support::replay_ns();
    println!("{launch:.0} ns a launch, {replayed:.0?} replayed, {step:?} a step");
    assert!(replayed.iter().all(|ns| *ns < 20_000.0), "{replayed:?} ns a launch of a replayed list");
    assert!(launch < 20_000.0, "{launch} ns a launch");
    assert!(step < Duration::from_millis(20), "{step:?} a step");
}
