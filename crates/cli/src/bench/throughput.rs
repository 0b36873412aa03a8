//! `qwen-bench throughput`: how many tokens a second a model computes, and how many the machine would allow.

use std::io::Write;
use std::time::Instant;

use clap::Args;
use qwen_bench::{Bench, Breakdown, LENGTH, Limits, Line, Measured, Workload};
use qwen_engine::{EngineError, LoadOptions, LoadStage, LoadedModel, Placement};
use serde::Serialize;

use super::limits;
use crate::arguments::{DeviceArguments, KvCacheDtype, ModelArgument, Precision, RuntimeArguments};
use crate::console::{DIM, NAME, Progress, bytes, print_json, printable, stdout};
use crate::error::CliError;
use crate::memory::{peak_resident_bytes, reset_peak};
use crate::model::{self, Wish};
use crate::plugins;

const EXAMPLES: &str = "\
Examples:
  qwen-bench throughput
  qwen-bench throughput --model M.gguf --prompt 0 --generate 64 --depth 4096 --threads 2
  qwen-bench throughput --model M.gguf --prompt 0 --batch 16 --breakdown
  qwen-bench throughput --model M.gguf --generate 0 --prompt 2048 --precision fast --json

Tokens are chosen by chance: a bench reads no text and samples nothing. Rates are tokens per
second of all sequences together. The limits of the machine are measured in the same process,
before and after.";

/// Measure prompt and generation rates
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Throughput {
    #[command(flatten)]
    model: ModelArgument,
    /// Prompt tokens of each sequence, 0 = leave prompts out
    #[arg(long, short, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(0..=MOST))]
    prompt: u32,
    /// Tokens that each sequence generates, 0 = leave generation out
    #[arg(long, short = 'n', value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(0..=MOST))]
    generate: u32,
    /// Sequences that are computed together
    #[arg(long, short, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: u32,
    /// Tokens in the cache of each sequence before it generates
    #[arg(long, short, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=MOST))]
    depth: u32,
    /// Timed repetitions, after one that is not timed
    #[arg(long, short, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    #[command(flatten)]
    place: DeviceArguments,
    /// How exactly numbers are computed
    #[arg(long, value_enum, default_value_t = Precision::Balanced)]
    precision: Precision,
    /// How keys and values are stored
    #[arg(long, value_enum, default_value_t = KvCacheDtype::Auto)]
    kv_cache_dtype: KvCacheDtype,
    /// Most prompt tokens that are computed in one step
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    prefill_chunk_size: u32,
    /// Tell what each kind of instruction takes, in one more repetition
    #[arg(long)]
    breakdown: bool,
    /// Don't measure the machine's limits
    #[arg(long)]
    no_limits: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn is_one(count: &usize) -> bool {
    *count == 1
}

/// Longest prompt, answer or context: far over any model's.
const MOST: i64 = 1 << 24;

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report<'a> {
    model: &'a str,
    architecture: &'a str,
    parameters: u64,
    precision: Precision,
    threads: usize,
    device: String,
    /// Devices that computed every layer together; bytes and operations of a step are those of each.
    #[serde(skip_serializing_if = "is_one")]
    tensor_parallel_size: usize,
    /// Stages that the layers were divided into; bytes and operations of a step are those of all.
    #[serde(skip_serializing_if = "is_one")]
    pipeline_parallel_size: usize,
    instruction_set: &'static str,
    #[serde(flatten)]
    workload: Workload,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill: Option<Part>,
    #[serde(skip_serializing_if = "Option::is_none")]
    decode: Option<Part>,
    limits: Option<MeasuredLimits>,
    load_seconds: f64,
    /// Without the memory of the probes; null where the system can't tell.
    peak_rss_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Part {
    #[serde(flatten)]
    measured: Measured,
    /// What the machine would allow.
    limit_tokens_per_second: Option<f64>,
    share_of_limit: Option<f64>,
    /// Weights and cache that a step reads, on average.
    bytes_per_step: u64,
    operations_per_step: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    breakdown: Option<Vec<Line>>,
}

#[derive(Debug, Serialize)]
struct MeasuredLimits {
    #[serde(flatten)]
    median: Limits,
    /// One before and one after.
    measured: Vec<Limits>,
}

impl Throughput {
    /// Runs the command.
    ///
    /// # Errors
    /// If the model can't be loaded or is not made for such contexts.
    pub fn run(self) -> Result<(), CliError> {
        let workload = Workload {
            prompt: self.prompt,
            generate: self.generate,
            batch: self.batch,
            depth: self.depth,
            repetitions: self.repetitions,
        };
        if workload.prompt == 0 && workload.generate == 0 {
            let help = "give --prompt or --generate a number";
            return Err(CliError::input("--prompt and --generate", "something to measure", "0 of both", help));
        }
        let path = model::resolve(&self.model.model)?;
        let placement = plugins::place(&self.place, model::file_bytes(&path))?;
        let threads = self.place.threads.map_or_else(qwen_hal::available_threads, |n| n as usize);
        let (devices, stages) = (placement.members().count(), placement.stages);
        // This machine's limits are not those of several devices.
        let measures_limits = !self.no_limits && devices == 1;
        // The probe's memory must not count as the model's.
        let mut probes: Vec<Limits> = Vec::new();
        if measures_limits && reset_peak() {
            probes.extend(limits::measure(threads));
        }
        let resettable = reset_peak();
        let name = Placement::title(placement.members());
        let start = Instant::now();
        let mut loaded = self.load(&path, placement, &workload)?;
        let load_seconds = start.elapsed().as_secs_f64();
        let mut breakdowns = self.breakdown.then(|| [Breakdown::default(), Breakdown::default()]);
        let [of_prefill, of_decode] = match &mut breakdowns {
            Some([prefill, decode]) => [Some(prefill), Some(decode)],
            None => [None, None],
        };
        let mut bench = Bench::new(&mut loaded, workload)?;
        let prefill = bench.prefill(of_prefill)?;
        let decode = bench.decode(of_decode)?;
        let peak = peak_resident_bytes().filter(|_| resettable || probes.is_empty());
        if measures_limits {
            probes.extend(limits::measure(threads));
        }
        let median = Limits::median(&probes);
        let [of_prefill, of_decode] = breakdowns.map_or([None, None], |both| both.map(Some));
        let part = |measured: Option<Measured>, breakdown: Option<Breakdown>| {
            measured.map(|measured| Part::new(measured, &workload, median.as_ref(), breakdown.as_ref()))
        };
        let report = Report {
            model: &self.model.model,
            architecture: loaded.info.family,
            parameters: loaded.info.parameters,
            precision: self.precision,
            threads,
            device: name,
            tensor_parallel_size: devices / stages.max(1),
            pipeline_parallel_size: stages,
            instruction_set: qwen_cpu::isa::Isa::current().name(),
            workload,
            prefill: part(prefill, of_prefill),
            decode: part(decode, of_decode),
            limits: median.map(|median| MeasuredLimits { median, measured: probes }),
            load_seconds,
            peak_rss_bytes: peak,
        };
        if self.json { print_json(&report) } else { report.print() }
    }

    fn load(&self, path: &std::path::Path, placement: Placement, workload: &Workload) -> Result<LoadedModel, CliError> {
        let runtime = RuntimeArguments {
            place: self.place.clone(),
            precision: self.precision,
            kv_cache_dtype: self.kv_cache_dtype,
            max_seq_len: None,
            prefill_chunk_size: self.prefill_chunk_size,
        };
        let options: LoadOptions = workload.load_options(&model::options(&runtime, &Wish::default()));
        let progress = Progress::steps("loading");
        let mut show = |stage| match stage {
            LoadStage::Opening => {}
            LoadStage::Weights { done, total } => progress.set(done as u64, total as u64),
        };
        LoadedModel::load(path, placement, &options, &mut show).map_err(|error| match error {
            // The bench has no such option: the length follows from others.
            EngineError::Parameter { name: "max-seq-len", expected, found } => {
                EngineError::Parameter { name: LENGTH, expected, found }.into()
            }
            other => other.into(),
        })
    }
}

impl Part {
    fn new(measured: Measured, workload: &Workload, limits: Option<&Limits>, breakdown: Option<&Breakdown>) -> Self {
        let limit = limits.map(|limits| measured.limit(workload, limits)).filter(|limit| *limit > 0.0);
        let step = measured.cost_of_step();
        Self {
            limit_tokens_per_second: limit,
            share_of_limit: limit.map(|limit| measured.tokens_per_second.median / limit),
            bytes_per_step: step.weight_bytes + step.cache_bytes,
            operations_per_step: step.operations,
            breakdown: breakdown.map(|breakdown| breakdown.lines(limits.unwrap_or(&NO_LIMITS))),
            measured,
        }
    }

    fn print(&self, out: &mut impl Write, what: &str) -> Result<(), CliError> {
        let rates = &self.measured.tokens_per_second;
        write!(
            out,
            "{NAME}{what:<10}{NAME:#}{:>10.2} tokens/s   {DIM}{:.2} to {:.2}{DIM:#}",
            rates.median, rates.min, rates.max
        )?;
        if let (Some(limit), Some(share)) = (self.limit_tokens_per_second, self.share_of_limit) {
            write!(out, "   {:.0}% of {limit:.1}, what the machine allows", 100.0 * share)?;
        }
        writeln!(out)?;
        let step = bytes(self.bytes_per_step);
        let operations = self.operations_per_step as f64 / 1e9;
        writeln!(out, "          {DIM}a step reads {step} of weights and cache, {operations:.2} G operations{DIM:#}")?;
        self.breakdown.iter().try_for_each(|lines| print_lines(out, lines))
    }
}

/// Limits that were not measured: whatever is read or multiplied takes no time.
const NO_LIMITS: Limits = Limits {
    read_bytes_per_second: f64::INFINITY,
    int8_operations_per_second: None,
    int8_matrix_operations_per_second: None,
    bf16_operations_per_second: None,
    f32_operations_per_second: None,
};

fn print_lines(out: &mut impl Write, lines: &[Line]) -> Result<(), CliError> {
    let width = lines.iter().map(|line| line.name.chars().count()).max().unwrap_or(0).clamp(4, 48);
    writeln!(
        out,
        "  {DIM}{:<14} {:<width$} {:>6} {:>10} {:>6} {:>11} {:>9} {:>10} {:>9} {:>8}{DIM:#}",
        "op", "part", "calls", "ms/step", "time", "read", "GB/s", "Gop", "Gop/s", "of limit"
    )?;
    for line in lines {
        let limit = line.share_of_limit.map_or_else(|| "-".to_owned(), |share| format!("{:.0}%", 100.0 * share));
        writeln!(
            out,
            "  {:<14} {:<width$} {:>6.1} {:>10.3} {:>5.1}% {:>11} {:>9.1} {:>10.3} {:>9.1} {limit:>8}",
            line.op,
            printable(&line.name),
            line.calls,
            1e3 * line.seconds,
            100.0 * line.share_of_time,
            bytes(line.bytes as u64),
            line.bytes / line.seconds.max(1e-12) / 1e9,
            line.operations / 1e9,
            line.operations / line.seconds.max(1e-12) / 1e9,
        )?;
    }
    Ok(())
}

impl Report<'_> {
    fn print(&self) -> Result<(), CliError> {
        let mut out = stdout();
        let Workload { batch, depth, repetitions, .. } = self.workload;
        writeln!(
            out,
            "{NAME}{}{NAME:#}  {}, {}, {} threads, {}",
            printable(self.model),
            self.architecture,
            self.precision.name(),
            self.threads,
            printable(&self.device)
        )?;
        writeln!(out, "{DIM}batch {batch}, depth {depth}, median of {repetitions}, lowest to highest{DIM:#}")?;
        let of_whom = match (self.tensor_parallel_size, self.pipeline_parallel_size) {
            (1, 1) => None,
            (_, 1) => Some("each device"),
            (1, _) => Some("all stages together"),
            _ => Some("one rank over all stages"),
        };
        if let Some(whom) = of_whom {
            writeln!(
                out,
                "{DIM}what a step reads and computes is told of {whom}; this machine's limits are not theirs{DIM:#}"
            )?;
        }
        if let Some(part) = &self.prefill {
            part.print(&mut out, &format!("prefill {}", self.workload.prompt))?;
        }
        if let Some(part) = &self.decode {
            part.print(&mut out, &format!("decode {}", self.workload.generate))?;
        }
        let rate = |rate: Option<f64>| rate.map_or_else(|| "-".to_owned(), |rate| format!("{:.0}", rate / 1e9));
        if let Some(limits) = self.limits.as_ref().map(|limits| &limits.median) {
            writeln!(
                out,
                "limits    read {:.1} GB/s; Gop/s: int8 {}, bf16 {}, f32 {}",
                limits.read_bytes_per_second / 1e9,
                rate(limits.int8_matrix_operations_per_second.or(limits.int8_operations_per_second)),
                rate(limits.bf16_operations_per_second),
                rate(limits.f32_operations_per_second)
            )?;
        }
        let peak = self.peak_rss_bytes.map_or_else(|| "unknown".to_owned(), bytes);
        writeln!(out, "memory    {peak} at most; loaded in {:.2} s", self.load_seconds)?;
        Ok(())
    }
}
