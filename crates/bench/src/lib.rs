//! Measures what a model does on a device, against what the device could do.
//!
//! In: a loaded model and a [`Workload`]. Out: rates as [`Spread`]s, and what each instruction took ([`Breakdown`]). Three main
//! types: [`Bench`] (runs steps of a model as the engine does), [`Limits`] (measured by a function that the caller gives, for this
//! crate names no device), [`Spread`]. Invariants:
//! - nothing is timed that has not run before in the same form;
//! - steps are those of the engine: the same batches, chunks and caches, without sampling;
//! - a rate is tokens over wall-clock time, all sequences together.
#![forbid(unsafe_code)]

mod breakdown;
mod limits;
mod spread;
mod steps;

pub use breakdown::{Breakdown, Line};
pub use limits::Limits;
pub use spread::Spread;
pub use steps::{Bench, LENGTH, Measured, Workload};
