//! End-to-end tests: the real programs on the fixtures.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail like tests")]

mod common;
mod compile;
mod default_model;
mod dispatch;
mod generate;
mod hostile;
mod logits;
mod messages;
mod on_devices;
mod plugins;
mod synth;
mod throughput;
mod tokenize;
