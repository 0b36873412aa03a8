//! Conformance of a device plugin.
//!
//! In: a plugin, through the C ABI alone. Out: a [`Report`] with a record for each case. Invariants:
//! - what is right is decided by float64 loops written here ([`oracle`]), never by another backend;
//! - every written range has guard bytes around it, every output and workspace begins as poison, and inputs are compared
//!   after the launch;
//! - a claim is tested as a claim: support, determinism, independence of company;
//! - a crash or hang of the plugin is the failure of the case that was running ([`children`]).
//!
//! | level | what |
//! |---|---|
//! | 0 | manifest, devices, memory, copies, streams, events, refusals, threads, honesty of `op_supports` |
//! | 1 | ops of dense Llama and Qwen models |
//! | 2 | experts and latent attention |
//! | 3 | command lists, collectives, regions |
//!
//! Weights are decoded by `qwen-formats`, which has reference tests of its own.

mod case;
pub mod children;
mod execute;
mod functions;
mod honesty;
mod limits;
mod ops;
pub mod oracle;
mod random;
mod raw;
mod report;
mod suite;

pub use case::{Outcome, Record};
pub use report::{Report, Summary};
pub use suite::{Selection, Subject, case_names, run, run_with_threads};
