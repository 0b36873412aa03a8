//! What a sheet says about dispatch: library, kernel families by bandwidth, tilings by shape. Rows are tried in order, and the
//! first that holds is taken.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The three levels of one chip.
#[derive(Debug, Clone, PartialEq, Default, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Dispatch {
    /// Top: name of the library of kernels that serves the chip.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub library: Option<String>,
    /// Top: capability that it is chosen for, if the device itself does not state one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capability: Option<String>,
    /// Middle: families by bandwidth.
    #[serde(default)]
    pub families: Vec<Family>,
    /// Bottom: tilings by op and shape.
    #[serde(default)]
    pub tilings: Vec<Tiling>,
}

/// A family of kernels, for a class of bandwidth.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Family {
    /// Its name.
    pub name: String,
    /// Holds from this many bytes per second on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_bandwidth: Option<f64>,
    /// Holds below this many bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub below_bandwidth: Option<f64>,
}

/// A tiling of an op, for a range of shapes.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Tiling {
    /// Name of an op of the vocabulary.
    pub op: String,
    /// Name of the tiling.
    pub name: String,
    /// Only within this family.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub family: Option<String>,
    /// Ranges that all hold; empty holds always.
    #[serde(default)]
    pub when: BTreeMap<Variable, Condition>,
    /// What the kernel is given.
    #[serde(default)]
    pub parameters: BTreeMap<String, Parameter>,
    /// The chip's own strength that this entry stands for, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strength: Option<String>,
}

/// What a tiling depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Variable {
    /// Rows of the step.
    Tokens,
    /// Sequences of the step.
    Sequences,
    /// Tokens of the longest context.
    SeqLen,
    /// Depth of a product.
    Depth,
    /// Width of a product.
    Width,
    /// Experts.
    Experts,
}

impl Variable {
    /// As sheets and reports write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tokens => "tokens",
            Self::Sequences => "sequences",
            Self::SeqLen => "seq_len",
            Self::Depth => "depth",
            Self::Width => "width",
            Self::Experts => "experts",
        }
    }
}

/// Bounds of a variable, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Condition {
    /// Smallest value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min: Option<u64>,
    /// Largest value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<u64>,
}

impl Condition {
    /// Whether a value lies within.
    #[must_use]
    pub fn holds(&self, value: u64) -> bool {
        self.min.is_none_or(|min| value >= min) && self.max.is_none_or(|max| value <= max)
    }
}

/// A parameter of a kernel.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(untagged)]
pub enum Parameter {
    /// A switch.
    Switch(bool),
    /// A whole number.
    Number(i64),
    /// A name.
    Text(String),
}

impl Dispatch {
    /// The family for a device of this bandwidth in bytes per second; `None` where the sheet has none.
    #[must_use]
    pub fn family(&self, bandwidth: f64) -> Option<&Family> {
        self.families.iter().find(|family| {
            family.min_bandwidth.is_none_or(|min| bandwidth >= min)
                && family.below_bandwidth.is_none_or(|limit| bandwidth < limit)
        })
    }

    /// The tiling of an op; `value` tells a variable of the shape, `None` where the op does not have it. A condition on a variable
    /// that the op does not have does not hold.
    pub fn tiling(&self, op: &str, family: Option<&str>, value: impl Fn(Variable) -> Option<u64>) -> Option<&Tiling> {
        self.tilings.iter().find(|tiling| {
            tiling.op == op
                && tiling.family.as_deref().is_none_or(|wanted| family == Some(wanted))
                && tiling
                    .when
                    .iter()
                    .all(|(variable, bounds)| value(*variable).is_some_and(|value| bounds.holds(value)))
        })
    }
}
