//! The commands of `qwen`, one file each.

pub mod chat;
pub mod devices;
pub mod generate;
pub mod inspect;
pub mod models;
pub mod synth;
pub mod tokenize;
