//! What a device can do, measured; which kernels are chosen for what, and why; whether the choice is the fastest.
//!
//! In: an open device, the sheet of its chip, planned ops. Out: a [`HardwareProfile`] (measured once through the HAL, cached),
//! [`Decision`]s (three levels: library, family, tiling) and [`Timing`]s of variants. Everything goes through the plugin
//! interface, and nothing is decided by a chip's name. Nothing is measured on a request's path: a profile is measured when
//! somebody asks for it, variants when somebody tunes.

#![forbid(unsafe_code)]

mod cache;
mod case;
mod decide;
mod error;
mod fit;
mod probe;
mod profile;
mod tune;

pub use cache::ProfileCache;
pub use case::{Case, cases};
pub use decide::{Chooser, Decision, OpShape, bandwidth_text};
pub use error::DispatchError;
pub use fit::{Coefficients, Sample, fit};
pub use probe::{ProbeOptions, measure};
pub use profile::{HardwareProfile, Level, Origin, Rate};
pub use tune::{Budget, Report, Timing, confirm, time_variants};
