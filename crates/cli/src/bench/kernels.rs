//! `qwen-bench kernels`: times the variants of each kernel. Is the one that is chosen the fastest?

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use qwen_dispatch::{Budget, Case, Coefficients, Report, Sample, cases, confirm, fit, time_variants};
use qwen_hal::Device;
use serde::Serialize;

use crate::console::{DIM, NAME, Progress, print_json, stdout};
use crate::dispatch;
use crate::error::CliError;
use crate::model;
use crate::plugins::{self, DeviceName};

const EXAMPLES: &str = "\
Examples:
  qwen-bench kernels
  qwen-bench kernels --assert --json
  qwen-bench kernels --filter q4_0 --seconds 1
  qwen-bench kernels --model smollm2 --tune    # times the model's own plans, keeps the fastest

Variants take turns, with weights that are in no cache. --assert fails if a chosen variant is more
than 10% slower than the fastest, and again in three more measurements of these two. --tune writes the fastest variants into the
device's profile, from which every program takes them; --forget takes them out.";

/// Time the variants of kernels, and check or tune the choice
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Kernels {
    /// Time the products of this model instead of usual shapes
    #[arg(long, short, value_name = "MODEL")]
    model: Option<String>,
    /// Only cases whose name contains this text
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Seconds for a case, all its variants together
    #[arg(long, value_name = "S", default_value_t = 0.4)]
    seconds: f64,
    /// Fail if a chosen variant is more than 10% slower than the fastest
    #[arg(long)]
    assert: bool,
    /// Keep the fastest variants in the device's profile
    #[arg(long, requires = "model", conflicts_with = "assert")]
    tune: bool,
    /// Forget the variants that were kept, and stop
    #[arg(long, conflicts_with_all = ["tune", "assert", "model"])]
    forget: bool,
    /// Device to compute on, as `qwen devices` lists them: the CPU, or a plugin's
    #[arg(long, value_name = "NAME[:MODEL][:N]", default_value = "cpu")]
    device: DeviceName,
    /// A plugin's library, beside those of the usual places (may be repeated)
    #[arg(long = "plugin", value_name = "FILE")]
    plugins: Vec<PathBuf>,
    /// Threads to compute with [default: all that the process may use, or QWEN_THREADS]
    #[arg(long, short, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// A chosen variant may be slower than the fastest by so much.
const ALLOWED: f64 = 1.10;
/// So often a loss must be found again, between the two alone, before it is one.
const CONFIRMATIONS: usize = 3;
/// A variant is kept only if it is faster by so much: less is within what a machine's speed drifts.
const WORTH_KEEPING: f64 = 1.05;

/// What `--json` prints: raw timings, and a cost of each kernel fitted to them.
#[derive(Debug, Serialize)]
struct Answer {
    device: String,
    name: String,
    fingerprint: String,
    threads: usize,
    allowed_loss: f64,
    cases: Vec<Report>,
    costs: BTreeMap<String, Coefficients>,
    slower: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kept: Option<usize>,
}

impl Kernels {
    /// Runs the command.
    ///
    /// # Errors
    /// If a device fails; with `--assert`, if a chosen variant is too slow.
    pub fn run(self) -> Result<(), CliError> {
        if !(0.01..=600.0).contains(&self.seconds) {
            return Err(CliError::input("--seconds", "0.01 to 600", self.seconds.to_string(), "choose another time"));
        }
        let device = plugins::open(&self.device, &self.plugins, self.threads)?;
        let mut profile = dispatch::profile(&device, false)?;
        // What is compared is the backend's own choice, not an earlier tuning.
        device.prefer([]);
        if self.forget {
            if let Some(profile) = &mut profile {
                profile.variants.clear();
                dispatch::profiles().store(&device, profile)?;
            }
            return Ok(());
        }
        let budget = Budget { time: Duration::from_secs_f64(self.seconds), ..Budget::default() };
        let cases = self.cases(&device)?;
        let progress = Progress::steps("timing");
        let mut reports = Vec::new();
        for (i, case) in cases.iter().enumerate() {
            progress.set(i as u64, cases.len() as u64);
            let Some(mut report) = time_variants(&device, case, profile.as_ref(), &budget)? else { continue };
            for _ in 0..CONFIRMATIONS {
                if self.assert && report.loss() > ALLOWED {
                    confirm(&device, case, &mut report, &budget)?;
                }
            }
            reports.push(report);
        }
        drop(progress);
        let kept = match (&mut profile, self.tune) {
            (Some(profile), true) => {
                profile.variants = fastest(&reports);
                dispatch::profiles().store(&device, profile)?;
                Some(profile.variants.len())
            }
            _ => None,
        };
        let slow = |report: &&Report| report.loss() > ALLOWED;
        let info = device.info();
        let answer = Answer {
            device: self.device.to_string(),
            name: info.name.clone(),
            fingerprint: info.fingerprint.clone(),
            threads: dispatch::threads(&device),
            allowed_loss: ALLOWED - 1.0,
            slower: reports.iter().filter(slow).map(|report| report.case.clone()).collect(),
            costs: costs(&reports),
            cases: reports,
            kept,
        };
        if self.json {
            print_json(&answer)?;
        } else {
            print(&answer)?;
        }
        if self.assert && !answer.slower.is_empty() {
            let (n, of) = (answer.slower.len(), answer.cases.len());
            return Err(CliError::input(
                "the chosen variants",
                "none more than 10% slower than the fastest",
                format!("{n} of {of}: {}", answer.slower.join(", ")),
                "tune with --model M --tune, or change the backend's choice",
            ));
        }
        Ok(())
    }

    fn cases(&self, device: &Device) -> Result<Vec<Case>, CliError> {
        let mut all = match &self.model {
            None => cases(),
            Some(model) => of_model(model, device)?,
        };
        if let Some(filter) = &self.filter {
            all.retain(|case| case.name.contains(filter.as_str()));
        }
        Ok(all)
    }
}

/// The products of a model at the sizes that its plans choose by: one row, and the largest of each range.
fn of_model(model: &str, device: &Device) -> Result<Vec<Case>, CliError> {
    let path = model::resolve(model)?;
    let planned = qwen_engine::explain(&path, device.clone(), &qwen_engine::LoadOptions::default())?.ops;
    let mut cases: Vec<Case> = Vec::new();
    for op in planned.iter().filter(|op| op.op == "gemm" && op.symbols.len() == 1) {
        let (depth, width, bucket) = (op.depth.unwrap_or(0), op.width.unwrap_or(0), i64::from(op.bucket));
        // A plan takes one variant at all sizes: a single row, as in decoding, and as many as it is for.
        for rows in [1, bucket].into_iter().filter(|rows| *rows > 1 || bucket <= 16) {
            let name = format!("{} {rows}x{depth}x{width} of {bucket}", op.kernel);
            cases.push(Case { name, op: op.desc.clone(), symbols: vec![rows] });
        }
    }
    Ok(cases)
}

/// Variants that are worth keeping, by plan: faster over all sizes of a plan that were timed, and slower at none.
fn fastest(reports: &[Report]) -> BTreeMap<String, String> {
    let mut by_plan: BTreeMap<&str, Vec<&Report>> = BTreeMap::new();
    for report in reports {
        by_plan.entry(&report.plan).or_default().push(report);
    }
    let best = |reports: &Vec<&Report>| {
        let names = reports.iter().flat_map(|report| &report.timings).map(|timing| timing.variant.as_str());
        // Time over that of the usual choice, at each size.
        let ratios = |name: &str| -> Option<Vec<f64>> {
            reports.iter().map(|report| Some(report.of(name)?.to_chosen)).collect()
        };
        let gain = |ratios: &[f64]| ratios.len() as f64 / ratios.iter().sum::<f64>();
        let worth = names.filter_map(|name| Some((name, ratios(name)?)));
        let worth =
            worth.filter(|(_, ratios)| ratios.iter().all(|ratio| *ratio < 1.02) && gain(ratios) > WORTH_KEEPING);
        worth.max_by(|a, b| gain(&a.1).total_cmp(&gain(&b.1))).map(|(name, _)| name.to_owned())
    };
    by_plan.into_iter().filter_map(|(plan, reports)| Some((plan.to_owned(), best(&reports)?))).collect()
}

/// A cost for each kernel that was timed at three sizes or more.
fn costs(reports: &[Report]) -> BTreeMap<String, Coefficients> {
    let mut samples: BTreeMap<String, Vec<Sample>> = BTreeMap::new();
    for report in reports {
        let form = report.case.split(' ').next().unwrap_or_default();
        for timing in &report.timings {
            let (bytes, operations) = (report.bytes, report.operations);
            let sample = Sample { bytes, operations, seconds: timing.seconds };
            samples.entry(format!("{form}.{}", timing.kernel)).or_default().push(sample);
        }
    }
    let enough = samples.into_iter().filter(|(_, samples)| samples.len() >= 3);
    enough.filter_map(|(kernel, samples)| Some((kernel, fit(&samples)?))).collect()
}

fn print(answer: &Answer) -> Result<(), CliError> {
    let mut out = stdout();
    writeln!(out, "{NAME}{}{NAME:#}  {}, {} threads", answer.device, answer.name, answer.threads)?;
    for report in &answer.cases {
        let Some(best) = report.best() else { continue };
        let rate = report.operations / best.seconds / 1e9;
        let bandwidth = report.bytes / best.seconds / 1e9;
        let mark = if report.loss() > ALLOWED { "  slower than the best" } else { "" };
        writeln!(out, "{}  {DIM}{rate:.0} GFLOP/s, {bandwidth:.1} GB/s{DIM:#}{mark}", report.case)?;
        for timing in &report.timings {
            let chosen = if timing.chosen { "*" } else { " " };
            let (micros, ratio) = (timing.seconds * 1e6, timing.to_chosen / best.to_chosen);
            writeln!(out, "  {chosen} {:<20} {micros:>10.1} us  {ratio:>5.2} x  {}", timing.variant, timing.kernel)?;
        }
    }
    if let Some(kept) = answer.kept {
        writeln!(out, "{kept} variants kept in the device's profile")?;
    }
    Ok(())
}
