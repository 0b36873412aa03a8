//! The commands of `qwen-bench`, one file each.

mod limits;
pub mod throughput;
