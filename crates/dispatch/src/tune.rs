//! Timing the variants of an op: is the one that is chosen the fastest?
//!
//! Candidates take turns. One counts as faster than the chosen one only by so much as both of two comparisons say: of times of the same
//! round, in the middle of rounds, which a machine whose speed drifts does not change, and of the fastest samples, which other processes
//! that take the processor away do not change. Weights are read from memory, as in a model, where other layers have pushed them out of the caches. Those
//! that are far behind drop out; it ends early when the best one is as fast as the device's limits allow. The fastest of many is also
//! the luckiest of many, so a loss is believed only if it is found again between these two alone ([`confirm`]).

use std::time::{Duration, Instant};

use qwen_hal::{Device, Plan, PlanOptions, Stream, Variant};
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
    /// Its time over that of the chosen one: in the middle of rounds, or of the fastest samples, whichever is more.
    pub to_chosen: f64,
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
    /// Time of the chosen one over that of the fastest, measured again between the two.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub again: Vec<f64>,
}

impl Report {
    /// Time of the chosen variant over that of the fastest one, the least of all measurements; 1 if it is that.
    #[must_use]
    pub fn loss(&self) -> f64 {
        let first = self.best().map_or(1.0, |best| 1.0 / best.to_chosen);
        self.again.iter().copied().fold(first, f64::min).max(1.0)
    }

    /// The times of a variant at these sizes.
    #[must_use]
    pub fn of(&self, variant: &str) -> Option<&Timing> {
        self.timings.iter().find(|timing| timing.variant == variant || timing.also.iter().any(|also| also == variant))
    }

    /// The fastest.
    #[must_use]
    pub fn best(&self) -> Option<&Timing> {
        self.timings.iter().min_by(|a, b| a.to_chosen.total_cmp(&b.to_chosen))
    }
}

/// Slower than the best by this factor in the fastest of its first samples: not measured any more.
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
    /// By round; none where it dropped out.
    times: Vec<Option<f64>>,
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
        middle(self.times.iter().copied().flatten().collect())
    }
    fn fastest(&self) -> f64 {
        fastest(&self.times)
    }
}

fn fastest(times: &[Option<f64>]) -> f64 {
    times.iter().copied().flatten().fold(f64::INFINITY, f64::min)
}

/// The middle of values; infinite if there is none.
fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::INFINITY)
}

/// How much slower times are than others, at the least faster: by rounds and by the fastest.
fn relation(times: &[Option<f64>], to: &[Option<f64>]) -> f64 {
    let by_rounds = middle(times.iter().zip(to).filter_map(|(own, to)| Some((*own)? / (*to)?)).collect());
    by_rounds.max(fastest(times) / fastest(to))
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
    time_some(device, case, profile, budget, &|_| true)
}

/// Measures the chosen variant of a report and the fastest one again, these two alone, and adds what it finds to the report.
///
/// # Errors
/// If the device fails.
pub fn confirm(device: &Device, case: &Case, report: &mut Report, budget: &Budget) -> Result<(), DispatchError> {
    let Some(fastest) = report.best().filter(|best| !best.chosen).map(|best| best.variant.clone()) else {
        return Ok(());
    };
    let wanted = |variant: &Variant| variant.chosen || variant.name == fastest;
    if let Some(again) = time_some(device, case, None, budget, &wanted)? {
        report.again.extend(again.of(&fastest).map(|timing| 1.0 / timing.to_chosen));
    }
    Ok(())
}

/// As [`time_variants`], among some of the variants.
fn time_some(
    device: &Device,
    case: &Case,
    profile: Option<&HardwareProfile>,
    budget: &Budget,
    wanted: &dyn Fn(&Variant) -> bool,
) -> Result<Option<Report>, DispatchError> {
    let options = PlanOptions::default();
    let plan = match device.plan(&case.op, &options) {
        Ok(plan) => plan,
        Err(qwen_hal::PlanError::Unsupported(_)) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let stream = device.stream("kernels")?;
    let held = |variant: &Variant| {
        let value = variant.symbol.and_then(|symbol| case.symbols.get(symbol as usize).copied());
        value.is_none_or(|value| (variant.min..=variant.max).contains(&value))
    };
    let variants: Vec<_> = plan.variants()?.into_iter().filter(held).filter(wanted).collect();
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
        let best = candidates.iter().map(Candidate::fastest).fold(f64::INFINITY, f64::min);
        if round >= budget.least && roofline.is_some_and(|limit| best <= AT_THE_LIMIT * limit) {
            break;
        }
        for candidate in &mut candidates {
            let hopeless = round >= 2 && !candidate.chosen && candidate.fastest() > HOPELESS * best;
            let time = if hopeless { None } else { Some(candidate.sample(&stream)?) };
            candidate.times.push(time);
        }
        round += 1;
    }
    let chosen = candidates.iter().find(|candidate| candidate.chosen).map_or(&[][..], |chosen| &chosen.times);
    let timing = |candidate: &Candidate| Timing {
        variant: candidate.name.clone(),
        also: candidate.also.clone(),
        kernel: candidate.kernel.clone(),
        chosen: candidate.chosen,
        seconds: candidate.middle(),
        to_chosen: relation(&candidate.times, chosen),
        fastest: candidate.fastest(),
        samples: candidate.times.iter().flatten().count(),
    };
    Ok(Some(Report {
        case: case.name.clone(),
        op: plan.op().to_owned(),
        plan: format!("{:016x}", info.content_hash),
        operations,
        bytes,
        roofline,
        timings: candidates.iter().map(timing).collect(),
        again: Vec::new(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timing(variant: &str, to_chosen: f64) -> Timing {
        let kernel = format!("kernel.{variant}");
        let (chosen, also, seconds) = (to_chosen == 1.0, Vec::new(), to_chosen * 1e-3);
        Timing { variant: variant.into(), also, kernel, chosen, seconds, to_chosen, fastest: seconds, samples: 9 }
    }

    /// A machine that slows down by half, with a burst in one round: the relation is that of the variants.
    #[test]
    fn drift_and_bursts_do_not_count() {
        let speed = |round: i32| 1.0 + f64::from(round) / 20.0;
        let chosen: Vec<Option<f64>> = (0..11).map(|round| Some(speed(round))).collect();
        let mut other: Vec<Option<f64>> = (0..11).map(|round| Some(0.9 * speed(round))).collect();
        other[4] = Some(30.0);
        assert!((relation(&other, &chosen) - 0.9).abs() < 1e-12);
        // Only rounds that both took part in.
        other[5..].fill(None);
        assert!((relation(&other, &chosen) - 0.9).abs() < 1e-12);
        assert!(relation(&other[5..], &chosen[5..]).is_infinite());
        // The processor was taken away from the chosen one in most rounds: that makes no other one faster.
        let chosen = [Some(1.0), Some(9.0), Some(9.0), Some(9.0)];
        assert!((relation(&[Some(1.0); 4], &chosen) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn a_loss_counts_if_it_is_found_again() {
        let mut report = Report {
            case: "case".into(),
            op: "gemm".into(),
            plan: "0".into(),
            operations: 1.0,
            bytes: 1.0,
            roofline: None,
            timings: vec![timing("a", 1.0), timing("b", 0.8), timing("c", 1.2)],
            again: Vec::new(),
        };
        assert_eq!(report.best().map(|best| best.variant.as_str()), Some("b"));
        assert!((report.loss() - 1.25).abs() < 1e-12);
        report.again = vec![1.3, 1.04];
        assert!((report.loss() - 1.04).abs() < 1e-12);
        report.again = vec![0.7];
        assert!((report.loss() - 1.0).abs() < 1e-12);
    }
}
