//! What can go wrong.

use std::path::PathBuf;

use qwen_hal::{HalError, LaunchError, PlanError};

/// Why something could not be measured or kept.
#[derive(Debug, thiserror::Error)]
pub enum DispatchError {
    /// The device.
    #[error(transparent)]
    Hal(#[from] HalError),
    /// A plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A launch.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The cache.
    #[error("{}: {what}", path.display())]
    Cache {
        /// File.
        path: PathBuf,
        /// What happened to it.
        what: String,
    },
}
