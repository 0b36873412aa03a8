//! The protocol of OpenAI, with the additions of vLLM that clients rely on.

pub(crate) mod chat;
pub(crate) mod chat_stream;
pub(crate) mod completions;
pub(crate) mod embeddings;
pub(crate) mod logprobs;
pub(crate) mod models;
pub(crate) mod tokenize;
pub(crate) mod usage;

use std::time::{SystemTime, UNIX_EPOCH};

/// An id that nobody else has: prefix and 128 random bits.
pub(crate) fn new_id(prefix: &str) -> String {
    format!("{prefix}{:032x}", rand::random::<u128>())
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
