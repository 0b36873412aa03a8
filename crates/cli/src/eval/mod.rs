//! The commands of `qwen-eval`, one file each.

pub mod compare;
pub mod devices;
pub mod kl;
pub mod logits;
pub mod logits_file;
pub mod metrics;
