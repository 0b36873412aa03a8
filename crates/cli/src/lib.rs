//! The command-line programs: qwen, qwen-server, qwen-compile, qwen-eval, qwen-bench and qwen-hal-check.
//!
//! In: arguments, files, a terminal or pipes. Out: text for people, JSON for programs (`--json`), an exit code. The
//! binaries only wire; everything that is worth a test is here. Invariants: standard output carries results alone;
//! progress, warnings and errors go to standard error; every failure is one sentence; nothing panics on input.

#![forbid(unsafe_code)]

pub mod answer;
pub mod arguments;
pub mod bench;
pub mod commands;
pub mod console;
pub mod dispatch;
pub mod entry;
pub mod error;
pub mod eval;
pub mod generation_config;
pub mod hal_check;
pub mod memory;
pub mod model;
pub mod output;
pub mod plugins;
pub mod server;
