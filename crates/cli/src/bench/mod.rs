//! The commands of `qwen-bench`, one file each.

pub mod kernels;
mod limits;
pub mod throughput;
