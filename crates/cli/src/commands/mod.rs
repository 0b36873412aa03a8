//! The commands of `qwen`, one file each, and that of `qwen-compile`.

pub mod chat;
pub mod compile;
pub mod devices;
pub mod explain;
pub mod generate;
pub mod inspect;
pub mod models;
pub mod synth;
pub mod tokenize;
