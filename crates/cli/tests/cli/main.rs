//! End-to-end tests: the real programs on the fixtures.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

mod common;
mod generate;
mod logits;
mod messages;
mod tokenize;
