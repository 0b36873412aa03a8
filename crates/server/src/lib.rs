//! HTTP in front of the engine: the OpenAI and Anthropic protocols, operations, limits.
//!
//! In: a [`Config`], and a function that loads a [`ServedModel`]. Out: a server that answers until it is told to stop
//! ([`serve`]). Invariants:
//! - whatever a client sends is bounded in bytes, depth, count and time before it costs anything, and ends in an answer or an
//!   error that says what was expected, what was found, what to do;
//! - no parameter is ignored without a word: it is used, or documented as without effect, or refused by name, or (unknown
//!   ones) told in a response header;
//! - streams and whole answers come from the same parser of the model's text;
//! - a client that goes away frees what its request holds within a step of the engine;
//! - nothing of a prompt or an answer is logged.
//!
//! The crate knows no chip and prints nothing.
#![forbid(unsafe_code)]

pub mod answer;
pub mod config;
pub mod error;
pub mod input;

mod anthropic;
mod assets;
mod gate;
mod generation;
mod keys;
mod life;
mod metrics;
mod openai;
mod openapi;
mod ops;
mod prompt;
mod recent;
mod responses;
mod router;
mod serve;
mod sse;
mod tls;
mod trace;
mod warmup;
mod work;

use std::sync::{Arc, OnceLock};

use qwen_engine::{Fleet, Pooling, SamplingParams};

use crate::answer::{Thinking, ToolFormat};
use crate::error::{ApiError, Kind};

pub use config::Config;
pub use keys::{Client, KeyEntry, KeyError, Keys};
pub use life::{Life, State};
pub use openapi::document as openapi_document;
pub use serve::{Loading, ServeError, Stage, serve};
pub use tls::TlsError;

/// State of a device, as far as it is known.
#[derive(Debug, Clone, Default, serde::Serialize, utoipa::ToSchema)]
pub struct DeviceReport {
    /// Name, as `--device` takes it.
    pub name: String,
    /// What it calls itself.
    pub title: String,
    /// `cpu`, `gpu`, `npu`, `simulated` or `null`: figures of a simulated one are modelled, a null one computes nothing.
    pub kind: String,
    /// What the device says of itself: `ok`, `degraded`, `throttled`, `unresponsive`, `lost`, or `unknown` if it says nothing.
    pub status: String,
    /// NUMA node that it is at; null if nobody knows, as for the next.
    pub numa_node: Option<u32>,
    /// PCI addresses from the root complex down to it.
    pub pci: Option<String>,
    /// How far its results are trusted: `healthy`, `suspect` (being tested), `quarantined` (gets no requests) or `retested` (on
    /// probation).
    pub trust: String,
    /// Why its results were in doubt the last time.
    pub reason: Option<String>,
    /// Degrees Celsius.
    pub temperature: Option<f64>,
    /// Percent of its compute in use, as the device says.
    pub compute_util: Option<f64>,
    /// Percent of its memory in use.
    pub memory_util: Option<f64>,
    /// Watts, as the device says.
    pub power: Option<f64>,
    /// Errors since the program started: steps that failed or were wrong, failed tests, and memory errors that the device
    /// could not correct.
    pub error_count: u64,
    /// When it was last opened anew, in UTC; null if it was not since the program started.
    pub last_reset_time: Option<String>,
    /// Percent of its compute that the last steps needed at least.
    pub step_compute_util: f64,
    /// Percent of its memory bandwidth that the last steps needed at least.
    pub step_bandwidth_util: f64,
    /// Hardware load index, 0 to 1: 0.6 x compute + 0.4 x bandwidth, of steps.
    pub hli: f64,
    /// What steps are compared with.
    pub rates: String,
    /// Requests at work or waiting.
    pub in_flight: usize,
    /// Times that it came into quarantine.
    pub quarantines: u64,
    /// Tests by known answers.
    pub known_answer_tests: u64,
    /// Of a group that computes the model together: its devices, as `--device` names them. Left out for a device alone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<MemberReport>,
}

/// A device of a group.
#[derive(Debug, Clone, PartialEq, serde::Serialize, utoipa::ToSchema)]
pub struct MemberReport {
    /// Name, as `--device` takes it.
    pub name: String,
    /// What the device says of itself, as of a device alone.
    pub status: String,
    /// Degrees Celsius.
    pub temperature: Option<f64>,
    /// Percent of its memory in use.
    pub memory_util: Option<f64>,
}

/// Asks the devices how they are.
pub type DeviceProbe = Arc<dyn Fn() -> Vec<DeviceReport> + Send + Sync>;

/// A decision of dispatch, taken when the model was planned.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, utoipa::ToSchema)]
pub struct DispatchReport {
    /// Name of the device.
    pub device: String,
    /// Kind of op.
    pub op: String,
    /// Instructions of all plans that it holds for.
    pub instructions: usize,
    /// The three levels, as the log tells them: library, family of kernels, tiling.
    pub lines: Vec<String>,
}

/// Tells the decisions of dispatch; may take a second.
pub type DispatchProbe = Arc<dyn Fn() -> Vec<DispatchReport> + Send + Sync>;

/// A model that is served.
pub struct ServedModel {
    /// Names that requests may use; answers carry the first.
    pub names: Vec<String>,
    /// The way to its engines.
    pub engine: Fleet,
    /// Sampling where a request says nothing.
    pub defaults: SamplingParams,
    /// How it writes calls of tools.
    pub tool_format: Option<ToolFormat>,
    /// How it thinks.
    pub thinking: ThinkingStyle,
    /// How texts become vectors; none: it was loaded without that.
    pub pooling: Option<Pooling>,
    /// Its devices.
    pub devices: DeviceProbe,
    /// Why which kernels compute it.
    pub dispatch: DispatchProbe,
    /// When it was loaded, in seconds since 1970.
    pub created: u64,
}

impl std::fmt::Debug for ServedModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServedModel").field("names", &self.names).field("engine", &self.engine).finish_non_exhaustive()
    }
}

/// How a model thinks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ThinkingStyle {
    /// Whether it thinks at all.
    pub thinks: bool,
    /// Whether every answer begins within thinking, whatever the prompt's end looks like.
    pub always_inside: bool,
    /// Whether the template can switch it off (`enable_thinking`).
    pub switch: bool,
}

impl ThinkingStyle {
    /// What the answer to a prompt begins with.
    #[must_use]
    pub fn of_prompt(self, prompt: &str) -> Thinking {
        let end = prompt.trim_end();
        if !self.thinks || end.ends_with(answer::THINK_END) {
            Thinking::Off
        } else if self.always_inside || end.ends_with(answer::THINK_BEGIN) {
            Thinking::Inside
        } else {
            Thinking::IfOpened
        }
    }
}

/// Everything that handlers share.
#[derive(Debug)]
pub struct Server {
    /// Limits and choices.
    pub config: Config,
    /// Where the server is in its life.
    pub life: Life,
    pub(crate) keys: Keys,
    pub(crate) metrics: metrics::Metrics,
    pub(crate) tracing: trace::Tracing,
    model: OnceLock<ServedModel>,
    /// Looked up when somebody asks first.
    dispatch: tokio::sync::OnceCell<Vec<DispatchReport>>,
}

impl Server {
    pub(crate) fn new(config: Config, keys: Keys, tracing: trace::Tracing) -> Self {
        let metrics = metrics::Metrics::new();
        let (model, dispatch) = (OnceLock::new(), tokio::sync::OnceCell::new());
        Self { config, life: Life::new(), keys, metrics, tracing, model, dispatch }
    }

    /// The model, once it is loaded.
    ///
    /// # Errors
    /// If it is loading still.
    pub fn model(&self) -> Result<&ServedModel, ApiError> {
        let loading = || ApiError::new(Kind::Unavailable, "the model is being loaded; try again later").retry_after(5);
        self.model.get().ok_or_else(loading)
    }

    /// The model for new work.
    ///
    /// # Errors
    /// If the server is not ready, or does not serve a model of that name.
    pub fn admit(&self, name: Option<&str>) -> Result<&ServedModel, ApiError> {
        let model = self.model()?;
        match self.life.state() {
            State::Ready => {}
            State::Draining => {
                let message = "the server is shutting down and takes no new requests";
                return Err(ApiError::new(Kind::Unavailable, message).code("draining").retry_after(10));
            }
            _ => {
                let message = "the model is being warmed up; try again later";
                return Err(ApiError::new(Kind::Unavailable, message).retry_after(2));
            }
        }
        match name {
            None => Ok(model),
            Some(name) if model.names.iter().any(|known| known == name) => Ok(model),
            Some(name) => Err(unknown_model(name, model)),
        }
    }
}

/// A name that is not served.
pub(crate) fn unknown_model(name: &str, model: &ServedModel) -> ApiError {
    let shown: String = name.chars().take(200).collect();
    let message = format!("the model {shown:?} does not exist here; this server has: {}", model.names.join(", "));
    ApiError { param: Some("model".into()), ..ApiError::new(Kind::NotFound, message).code("model_not_found") }
}
