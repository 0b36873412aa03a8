//! A case, and what became of it.

use serde::{Deserialize, Serialize};

use crate::execute::OpCase;
use crate::suite::Subject;

/// Why a check did not pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// The plugin says that it does not have this, in the way that the ABI provides for.
    Unsupported(String),
    /// The plugin is wrong.
    Failed(String),
}

pub(crate) type Checked = Result<(), Trouble>;

pub(crate) fn failed<T>(message: impl Into<String>) -> Result<T, Trouble> {
    Err(Trouble::Failed(message.into()))
}
pub(crate) fn unsupported<T>(message: impl Into<String>) -> Result<T, Trouble> {
    Err(Trouble::Unsupported(message.into()))
}
/// Fails unless a condition holds.
pub(crate) fn ensure(holds: bool, message: impl FnOnce() -> String) -> Checked {
    if holds { Ok(()) } else { Err(Trouble::Failed(message())) }
}

impl From<qwen_hal::HalError> for Trouble {
    fn from(error: qwen_hal::HalError) -> Self {
        Self::Failed(error.to_string())
    }
}
impl From<qwen_hal::LaunchError> for Trouble {
    fn from(error: qwen_hal::LaunchError) -> Self {
        Self::Failed(error.to_string())
    }
}

/// What is run.
#[derive(Debug)]
pub(crate) enum Body {
    /// Functions of the table.
    Function(fn(&Subject) -> Checked),
    /// An op against its oracle.
    Op(Box<OpCase>),
    /// The variants of an op against each other.
    Variants(Box<OpCase>),
    /// At least one case of this op kind must be supported.
    Coverage(u32),
}

/// One thing that is tested.
#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) level: u32,
    pub(crate) body: Body,
}

/// What became of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// As the contract says.
    Passed,
    /// Not as the contract says; the message tells expected and found.
    Failed,
    /// The plugin says that it does not have this.
    Unsupported,
}

/// A case with its outcome, as reports print it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Name, `level/group/what`.
    pub name: String,
    /// Level.
    pub level: u32,
    /// Outcome.
    pub outcome: Outcome,
    /// What was expected and found, or why it is not supported; empty for a pass.
    pub message: String,
    /// Normalised mean square error: sum of squared differences over sum of squares. Of the worst output.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub nmse: Option<f64>,
    /// Largest difference over the largest magnitude of the output. Of the worst output.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub max_abs: Option<f64>,
    /// Limit on `nmse`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub limit_nmse: Option<f64>,
    /// Limit on `max_abs`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub limit_max_abs: Option<f64>,
    /// Kernel that the plan names.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub kernel: Option<String>,
    /// Hash of the outputs' bits, if the plan claims to be deterministic.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub bits: Option<String>,
    /// Milliseconds that the case took.
    pub milliseconds: f64,
}

impl Record {
    pub(crate) fn new(name: impl Into<String>, level: u32, outcome: Outcome, message: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            level,
            outcome,
            message: message.into(),
            nmse: None,
            max_abs: None,
            limit_nmse: None,
            limit_max_abs: None,
            kernel: None,
            bits: None,
            milliseconds: 0.0,
        }
    }
}
