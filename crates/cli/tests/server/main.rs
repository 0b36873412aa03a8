//! End-to-end tests of `qwen-server`: the real program on a tiny fixture, spoken to over a socket.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail like tests")]

mod attacks;
mod chat;
mod client;
mod completions;
mod contract;
mod devices;
mod embeddings;
mod operations;
mod protocols;
mod traces;
