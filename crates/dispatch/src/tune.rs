//! Timing the variants of an op: is the one that is chosen the fastest?
//!
//! Candidates take turns, so that a machine whose speed drifts treats them alike. Weights are read from memory, as in a model, where
//! other layers have pushed them out of the caches. Those that are far behind drop out; it ends early when the best one is as fast as
//! the device's limits allow.

use std::time::{Duration, Instant};

use qwen_hal::{Device, Plan, PlanOptions, Stream};
use serde::{Deserialize, Serialize};

use crate::case::{Bound, Case, Operands};
use crate::error::DispatchError;
use crate::profile::HardwareProfile;

/// How long a case may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// All candidates together.
    pub time: Duration,
    /// One sample: as many launches as fit.
    pub sample: Duration,
    /// Samples of each candidate at least.
    pub least: usize,
}

impl Default for Budget {
    fn default() -> Self {
        Self { time: Duration::from_millis(400), sample: Duration::from_millis(2), least: 5 }
    }
}

/// Times of one variant.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub struct Timing {
    /// Name of the variant.
    pub variant: String,
    /// Others that are the same kernel at these sizes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<String>,
    /// Family and tiling of its kernel at these sizes.
    pub kernel: String,
    /// The backend takes it.
    pub chosen: bool,
    /// Seconds of one launch, the middle of all samples.
    pub seconds: f64,
    /// The smallest.
    pub fastest: f64,
    /// Samples.
    pub samples: usize,
}

/// What came out for a case.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub struct Report {
    /// The case.
    pub case: String,
    /// Name of the op.
    pub op: String,
    /// Identity of the plan, for the profile's table.
    pub plan: String,
    /// Operations of a launch.
    pub operations: f64,
    /// Bytes of a launch.
    pub bytes: f64,
    /// Seconds that the device's limits allow at best, where they are known.
    pub roofline: Option<f64>,
    /// Variants, the chosen one first.
    pub timings: Vec<Timing>,
}

impl Report {
    /// Time of the chosen variant over that of the fastest one; 1 if it is that.
    #[must_use]
    pub fn loss(&self) -> f64 {
        let best = self.best().map_or(f64::INFINITY, |best| best.seconds);
        self.timings.iter().find(|timing| timing.chosen).map_or(1.0, |chosen| (chosen.seconds / best).max(1.0))
    }

    /// The times of a variant at these sizes.
    #[must_use]
    pub fn of(&self, variant: &str) -> Option<&Timing> {
        self.timings.iter().find(|timing| timing.variant == variant || timing.also.iter().any(|also| also == variant))
    }

    /// The fastest.
    #[must_use]
    pub fn best(&self) -> Option<&Timing> {
        self.timings.iter().min_by(|a, b| a.seconds.total_cmp(&b.seconds))
    }
}

/// Slower than the best by this factor after the first samples: not measured any more.
const HOPELESS: f64 = 1.5;
/// As near to the roofline as that, nothing is left to find.
const AT_THE_LIMIT: f64 = 1.03;

struct Candidate {
    name: String,
    also: Vec<String>,
    kernel: String,
    chosen: bool,
    plan: Plan,
    bound: Bound,
    launches: u32,
    times: Vec<f64>,
}

impl Candidate {
    fn sample(&mut self, stream: &Stream) -> Result<f64, DispatchError> {
        let start = Instant::now();
        for _ in 0..self.launches {
            self.bound.launch(&self.plan, stream)?;
        }
        stream.wait()?;
        Ok(start.elapsed().as_secs_f64() / f64::from(self.launches))
    }

    fn middle(&self) -> f64 {
        let mut times = self.times.clone();
        times.sort_by(f64::total_cmp);
        times.get(times.len() / 2).copied().unwrap_or(f64::INFINITY)
    }
}

/// Times every variant that a device has for a case; `None` if it does not have the op or has no choice.
///
/// # Errors
/// If the device fails.
pub fn time_variants(
    device: &Device,
    case: &Case,
    profile: Option<&HardwareProfile>,
    budget: &Budget,
) -> Result<Option<Report>, DispatchError> {
    let options = PlanOptions::default();
    let plan = match device.plan(&case.op, &options) {
        Ok(plan) => plan,
        Err(qwen_hal::PlanError::Unsupported(_)) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let stream = device.stream("kernels")?;
    let held = |variant: &qwen_hal::Variant| {
        let value = variant.symbol.and_then(|symbol| case.symbols.get(symbol as usize).copied());
        value.is_none_or(|value| (variant.min..=variant.max).contains(&value))
    };
    let variants: Vec<_> = plan.variants()?.into_iter().filter(held).collect();
    let mut candidates: Vec<Candidate> = Vec::new();
    let mut operands: Vec<Operands> = Vec::new();
    for variant in variants {
        let kernel = format!("{}.{}", variant.family, variant.tiling);
        // At these sizes two variants may be one and the same kernel.
        if let Some(other) = candidates.iter_mut().find(|other| other.kernel == kernel) {
            other.also.push(variant.name);
            continue;
        }
        let own = device.plan_as(&case.op, &options, &variant.name)?;
        let place = match operands.iter().position(|operands| operands.serve(&own)) {
            Some(place) => place,
            None => {
                operands.push(Operands::new(device, &stream, case, &own, true)?);
                operands.len() - 1
            }
        };
        let bound = operands[place].bind(device, case, &own)?;
        let (name, chosen, also) = (variant.name, variant.chosen, Vec::new());
        candidates.push(Candidate { name, also, kernel, chosen, plan: own, bound, launches: 1, times: Vec::new() });
    }
    if candidates.len() < 2 {
        return Ok(None);
    }
    let info = plan.info();
    let (operations, bytes) = (info.flops, info.bytes_read + info.bytes_written);
    let roofline = profile.and_then(|profile| {
        let read = bytes / profile.bandwidth()?;
        let computed = profile.best_rate().map_or(0.0, |rate| operations / rate);
        Some(read.max(computed))
    });
    // Once to bring code and memory there, once to learn how many launches make a sample.
    for candidate in &mut candidates {
        candidate.sample(&stream)?;
        let once = candidate.sample(&stream)?.max(1e-7);
        candidate.launches = (budget.sample.as_secs_f64() / once).clamp(1.0, 10_000.0) as u32;
    }
    let start = Instant::now();
    let mut round = 0;
    while round < budget.least || start.elapsed() < budget.time {
        let best = candidates.iter().map(Candidate::middle).fold(f64::INFINITY, f64::min);
        if round >= budget.least && roofline.is_some_and(|limit| best <= AT_THE_LIMIT * limit) {
            break;
        }
        for candidate in &mut candidates {
            if round >= 2 && !candidate.chosen && candidate.middle() > HOPELESS * best {
                continue;
            }
            let time = candidate.sample(&stream)?;
            candidate.times.push(time);
        }
        round += 1;
    }
    let timing = |candidate: &Candidate| Timing {
        variant: candidate.name.clone(),
        also: candidate.also.clone(),
        kernel: candidate.kernel.clone(),
        chosen: candidate.chosen,
        seconds: candidate.middle(),
        fastest: candidate.times.iter().copied().fold(f64::INFINITY, f64::min),
        samples: candidate.times.len(),
    };
    Ok(Some(Report {
        case: case.name.clone(),
        op: plan.op().to_owned(),
        plan: format!("{:016x}", info.content_hash),
        operations,
        bytes,
        roofline,
        timings: candidates.iter().map(timing).collect(),
    }))
}
