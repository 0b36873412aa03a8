//! `qwen-eval compare` with devices: a model, two devices in, how far the second is from the first out.
//!
//! End to end: divergence of the logits over a text, and whether greedy continuation says the same. Per op: results of every
//! instruction of one step, with the same inputs on both.

use std::io::Write;

use clap::Args;
use qwen_engine::{Engine, OpDifference, Placement, Request, SamplingParams};
use qwen_models::tokenizer::EncodeOptions;
use serde::Serialize;

use super::compare::{not_a_number, print_summary};
use super::metrics::{Comparison, Summary};
use crate::answer;
use crate::arguments::{DeviceArguments, KvCacheDtype, ModelArgument, Precision, RuntimeArguments};
use crate::console::{NAME, print_json, stdout};
use crate::error::CliError;
use crate::model::{self, Wish};
use crate::plugins::{self, DeviceList};

/// Text where the user gives neither tokens nor a text.
const TEXT: &str = "The capital of France is Paris. Water boils at one hundred degrees, and light travels three hundred \
                    thousand kilometres in a second; def add(a, b): return a + b. One, two, three, four, five, six, seven.";
/// Ids of a model without a tokenizer.
const IDS: usize = 32;

/// What is compared on devices.
#[derive(Debug, Args)]
#[command(next_help_heading = "Devices")]
pub struct OnDevices {
    #[command(flatten)]
    model: ModelArgument,
    /// Tokens to compute, with commas between them [default: a short text's]
    #[arg(long, value_name = "IDS", value_delimiter = ',', conflicts_with = "text")]
    tokens: Vec<u32>,
    /// Text to compute
    #[arg(long, value_name = "TEXT")]
    text: Option<String>,
    /// Tokens to generate greedily on both, after half of the text
    #[arg(long, value_name = "N", default_value_t = 32)]
    generate: u32,
    /// How exactly a computes
    #[arg(long, value_enum, default_value_t = Precision::Exact)]
    precision_a: Precision,
    /// How exactly b computes
    #[arg(long, value_enum, default_value_t = Precision::Balanced)]
    precision_b: Precision,
    /// Compare every instruction of a step too, with the same inputs on both devices
    #[arg(long)]
    per_op: bool,
    /// Of a side that names several devices: those that compute every layer together
    #[arg(long, alias = "tensor_parallel_size", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    tensor_parallel_size: u32,
    /// Of a side that names several devices: stages that the layers are divided into
    #[arg(long, alias = "pipeline_parallel_size", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pipeline_parallel_size: u32,
    /// A plugin's library, beside those of the usual places (may be repeated)
    #[arg(long = "plugin", value_name = "FILE")]
    plugins: Vec<std::path::PathBuf>,
    /// Threads to compute with [default: all that the process may use, or QWEN_THREADS]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report<'a> {
    model: &'a str,
    a: Side,
    b: Side,
    #[serde(flatten)]
    summary: Summary,
    greedy: Greedy,
    #[serde(skip_serializing_if = "Option::is_none")]
    ops: Option<Vec<OpLine>>,
}

#[derive(Debug, Serialize)]
struct Side {
    device: String,
    name: String,
    precision: Precision,
    /// Ops that the device refused and the CPU computed.
    computed_by_cpu: Vec<String>,
    /// Values copied between them in a step.
    crossings: usize,
}

/// Greedy continuation on both.
#[derive(Debug, Serialize)]
struct Greedy {
    tokens: u32,
    equal: bool,
    divergence: Option<Divergence>,
}

/// Where the two say different things first.
#[derive(Debug, Serialize)]
struct Divergence {
    /// Tokens generated before.
    after: usize,
    token_a: u32,
    token_b: u32,
    /// By how much a prefers its own token to b's, in logits.
    gap_a: f64,
    /// By how much b prefers its own.
    gap_b: f64,
    /// Largest difference of two logits of that position.
    max_abs_difference: f64,
    /// Whether the differences of logits there are as large as the gaps.
    explained: bool,
}

/// An instruction, as `--json` prints it.
#[derive(Debug, Serialize)]
struct OpLine {
    op: &'static str,
    origin: String,
    kernel: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
    values: u64,
    nmse: f64,
    max_abs: f64,
    differing_integers: u64,
}

impl OnDevices {
    /// Compares `b` with `a`.
    ///
    /// # Errors
    /// If a device or the model can't be used, or the tokens do not fit it.
    pub fn run(&self, a: &DeviceList, b: &DeviceList, json: bool) -> Result<(), CliError> {
        self.check(a, b)?;
        let mut reference = self.load(a, self.precision_a)?;
        let mut judged = self.load(b, self.precision_b)?;
        let tokens = self.tokens(&reference)?;
        let summary = compare(&mut reference, &mut judged, &tokens)?;
        let greedy = self.greedy(&mut reference, &mut judged, &tokens)?;
        let report = Report {
            model: &self.model.model,
            a: Side::new(a, &reference, self.precision_a),
            b: Side::new(b, &judged, self.precision_b),
            summary,
            greedy,
            ops: None,
        };
        drop((reference, judged));
        let ops = if self.per_op { Some(self.ops(a, b, &tokens)?) } else { None };
        if json {
            let ops = ops.map(|ops| ops.into_iter().map(OpLine::from).collect());
            return print_json(&Report { ops, ..report });
        }
        report.print()?;
        ops.map_or(Ok(()), |ops| print_ops(&ops))
    }

    /// Refuses sizes of groups where no group is named, and what is not told of groups.
    fn check(&self, a: &DeviceList, b: &DeviceList) -> Result<(), CliError> {
        let has_group = [a, b].iter().any(|side| side.each().count() > 1);
        if self.per_op && has_group {
            let help = "leave it out, or name one device";
            return Err(CliError::input("--per-op", "one device in --a and in --b", "a group", help));
        }
        if !has_group && (self.tensor_parallel_size, self.pipeline_parallel_size) != (1, 1) {
            let help = "name all of the group's devices, as sim:ascend910b:0,1";
            return Err(CliError::input("the size of a group", "several devices in --a or --b", "one in each", help));
        }
        Ok(())
    }

    fn arguments(&self, device: &DeviceList, precision: Precision) -> RuntimeArguments {
        let size = |of_group: u32| if device.each().count() > 1 { of_group } else { 1 };
        RuntimeArguments {
            place: DeviceArguments {
                device: device.clone(),
                tensor_parallel_size: size(self.tensor_parallel_size),
                pipeline_parallel_size: size(self.pipeline_parallel_size),
                plugins: self.plugins.clone(),
                max_crossings: u32::MAX,
                threads: self.threads,
            },
            precision,
            kv_cache_dtype: KvCacheDtype::Auto,
            max_seq_len: None,
            prefill_chunk_size: 512,
        }
    }

    fn load(&self, device: &DeviceList, precision: Precision) -> Result<Engine, CliError> {
        model::load(&self.model.model, &self.arguments(device, precision), &Wish::default())
    }

    fn tokens(&self, engine: &Engine) -> Result<Vec<u32>, CliError> {
        if !self.tokens.is_empty() {
            return Ok(self.tokens.clone());
        }
        let vocab_size = engine.loaded().model.vocab_size().max(1);
        let longest = engine.loaded().model.options().max_seq_len.saturating_sub(self.generate).max(1) as usize;
        let mut tokens = match engine.tokenizer() {
            Some(tokenizer) => {
                tokenizer.encode_bytes(self.text.as_deref().unwrap_or(TEXT).as_bytes(), EncodeOptions::PROMPT)?
            }
            None => (0..IDS).map(|i| (i * 7919 % vocab_size) as u32).collect(),
        };
        tokens.truncate(longest);
        Ok(tokens)
    }

    fn greedy(&self, a: &mut Engine, b: &mut Engine, tokens: &[u32]) -> Result<Greedy, CliError> {
        let prompt = tokens.get(..tokens.len().div_ceil(2)).unwrap_or_default();
        let said_a = continuation(a, prompt, self.generate)?;
        let said_b = continuation(b, prompt, self.generate)?;
        let differs = said_a.iter().zip(&said_b).position(|(a, b)| a != b);
        let divergence = match differs {
            None => None,
            Some(after) => {
                let text: Vec<u32> = prompt.iter().chain(&said_a[..after]).copied().collect();
                let (row_a, row_b) = (last_row(a, &text)?, last_row(b, &text)?);
                let (token_a, token_b) = (said_a[after], said_b[after]);
                let gap =
                    |row: &[f32], own: u32, other: u32| f64::from(row[own as usize]) - f64::from(row[other as usize]);
                let max_abs_difference =
                    row_a.iter().zip(&row_b).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
                let (gap_a, gap_b) = (gap(&row_a, token_a, token_b), gap(&row_b, token_b, token_a));
                // Each of the two logits may have moved by the largest difference.
                let explained = gap_a + gap_b <= 2.0 * max_abs_difference && gap_a <= TOLERANCE;
                Some(Divergence { after, token_a, token_b, gap_a, gap_b, max_abs_difference, explained })
            }
        };
        Ok(Greedy { tokens: self.generate, equal: divergence.is_none(), divergence })
    }

    fn ops(&self, a: &DeviceList, b: &DeviceList, tokens: &[u32]) -> Result<Vec<OpDifference>, CliError> {
        let path = model::resolve(&self.model.model)?;
        let open = |name: &DeviceList| plugins::open(name.only()?, &self.plugins, self.threads);
        let options = model::options(&self.arguments(b, self.precision_b), &Wish::default());
        Ok(qwen_engine::op_differences(&path, open(a)?, open(b)?, &options, tokens)?)
    }
}

/// A gap of logits that another order of roundings may close: tokens that are this close are as good as each other.
const TOLERANCE: f64 = 0.25;

impl Side {
    fn new(device: &DeviceList, engine: &Engine, precision: Precision) -> Self {
        let model = &engine.loaded().model;
        Self {
            device: device.to_string(),
            name: Placement::title(model.devices()),
            precision,
            computed_by_cpu: model.fallbacks().iter().map(ToString::to_string).collect(),
            crossings: model.crossings(),
        }
    }
}

impl From<OpDifference> for OpLine {
    fn from(op: OpDifference) -> Self {
        let OpDifference { op, origin, kernel, refused, values, nmse, max_abs, integers } = op;
        Self { op, origin, kernel, refused, values, nmse, max_abs, differing_integers: integers }
    }
}

fn compare(a: &mut Engine, b: &mut Engine, tokens: &[u32]) -> Result<Summary, CliError> {
    let vocab_size = a.loaded().model.vocab_size().max(1);
    let mut rows = Vec::new();
    a.logits(tokens, false, &mut |row| rows.extend_from_slice(row))?;
    let (mut expected, mut comparison, mut wrong) = (rows.chunks_exact(vocab_size), Comparison::default(), None);
    b.logits(tokens, false, &mut |row| {
        if let Err(token) = comparison.push(expected.next().unwrap_or_default(), row) {
            wrong.get_or_insert((comparison.tokens(), token));
        }
    })?;
    if let Some((row, token)) = wrong {
        return Err(not_a_number("logits of b", row, token));
    }
    comparison.summary().ok_or_else(|| CliError::input("--tokens", "at least one token", "none", "give some text"))
}

fn continuation(engine: &mut Engine, prompt: &[u32], tokens: u32) -> Result<Vec<u32>, CliError> {
    if tokens == 0 {
        return Ok(Vec::new());
    }
    let sampling =
        SamplingParams { temperature: 0.0, max_tokens: tokens, ignore_eos: true, ..SamplingParams::default() };
    let request = Request::new(prompt.to_vec(), sampling);
    Ok(answer::run(engine, request, &std::sync::atomic::AtomicBool::new(false), &mut |_| Ok(()))?.tokens)
}

fn last_row(engine: &mut Engine, tokens: &[u32]) -> Result<Vec<f32>, CliError> {
    let mut last = Vec::new();
    engine.logits(tokens, false, &mut |row| {
        last.clear();
        last.extend_from_slice(row);
    })?;
    Ok(last)
}

impl Report<'_> {
    fn print(&self) -> Result<(), CliError> {
        {
            let mut out = stdout();
            for (what, side) in [("a", &self.a), ("b", &self.b)] {
                writeln!(out, "{NAME}{what:<24}{NAME:#}{}, {}, {}", side.device, side.name, side.precision.name())?;
                for line in &side.computed_by_cpu {
                    writeln!(out, "  on the CPU            {line}")?;
                }
                if side.crossings > 0 {
                    writeln!(out, "  copies in a step      {}", side.crossings)?;
                }
            }
        }
        print_summary(&self.summary)?;
        let mut out = stdout();
        let greedy = match &self.greedy.divergence {
            None => format!("the same {} tokens", self.greedy.tokens),
            Some(d) => format!(
                "differs after {} tokens: {} and {}; gaps {:.4} and {:.4}, logits differ by up to {:.4}{}",
                d.after,
                d.token_a,
                d.token_b,
                d.gap_a,
                d.gap_b,
                d.max_abs_difference,
                if d.explained { ", which explains it" } else { ": NOT explained by the gap" }
            ),
        };
        writeln!(out, "{NAME}{:<24}{NAME:#}{greedy}", "greedy continuation")?;
        Ok(())
    }
}

/// One line for each kind of op: the worst of its instructions.
fn print_ops(ops: &[OpDifference]) -> Result<(), CliError> {
    let mut out = stdout();
    let mut kinds: Vec<(&str, &str)> = Vec::new();
    for op in ops {
        if !kinds.contains(&(op.op, &op.kernel)) {
            kinds.push((op.op, &op.kernel));
        }
    }
    writeln!(out, "{NAME}{:<14}{:>5}  {:>10}  {:>10}  worst at{NAME:#}", "op", "count", "nmse", "max abs")?;
    for (kind, kernel) in kinds {
        let of_kind: Vec<&OpDifference> =
            ops.iter().filter(|op| (op.op, op.kernel.as_str()) == (kind, kernel)).collect();
        let Some(worst) = of_kind.iter().max_by(|a, b| a.nmse.total_cmp(&b.nmse)) else { continue };
        let max_abs = of_kind.iter().map(|op| op.max_abs).fold(0.0, f64::max);
        let integers: u64 = of_kind.iter().map(|op| op.integers).sum();
        let more = match (&worst.refused, integers) {
            (Some(reason), _) => format!(", refused: {reason}"),
            (None, 0) => String::new(),
            (None, n) => format!(", {n} integers differ"),
        };
        let (nmse, count) = (worst.nmse, of_kind.len());
        writeln!(out, "{kind:<14}{count:>5}  {nmse:>10.2e}  {max_abs:>10.2e}  {} ({kernel}){more}", worst.origin)?;
    }
    Ok(())
}
