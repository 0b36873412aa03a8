//! `qwen devices explain`: which kernels a device takes for a model, what another one computes for it, and why, before anything runs.

use std::io::Write;

use clap::Args;
use qwen_dispatch::bandwidth_text;
use qwen_engine::{EngineError, Fallback, Placement};
use qwen_hal::Device;
use serde::Serialize;

use crate::arguments::{ModelArgument, RuntimeArguments};
use crate::console::{DIM, NAME, bytes, grouped, print_json, printable, stdout};
use crate::dispatch::{self, Choosers, Counted, StepSize};
use crate::error::{CliError, sentence};
use crate::model::{self, Wish};
use crate::plugins;

const EXAMPLES: &str = "\
Examples:
  qwen devices explain --model smollm2
  qwen devices explain --model M.gguf --seq 65536 --json
  qwen devices explain --model M.gguf --device opencl:0
  QWEN_DEBUG_DISPATCH=1 qwen generate --prompt Hello --max-tokens 1

Nothing is loaded or computed; a device is measured if it has no profile yet. Decisions are what
the backend's plans tell of themselves, or, where they tell nothing, what the chip's sheet says.
What the device refuses, the CPU computes, as it would when the model is run.";

/// Show which kernels a device takes for a model, and why
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Explain {
    #[command(flatten)]
    model: ModelArgument,
    /// Tokens of the context [default: --max-seq-len, or the model's own, at most 4096]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    seq: Option<u32>,
    #[command(flatten)]
    runtime: RuntimeArguments,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Answer<'a> {
    model: &'a str,
    device: String,
    /// Devices that compute the model together, stage by stage and in order of rank; empty for one alone.
    members: Vec<String>,
    /// Of stages, the layers of each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    stages: Vec<Layers>,
    chip: Option<&'a str>,
    bandwidth: Option<f64>,
    bandwidth_origin: Option<&'static str>,
    /// The device that computes what the first one refuses, if it refuses something.
    fallback: Option<String>,
    computed_by_fallback: Vec<Delegated>,
    steps: Vec<Step>,
    /// Most values that a step may copy between the two.
    max_crossings: u32,
    /// Why the model would not be loaded so.
    refused: Option<String>,
    decisions: Vec<Counted>,
}

/// The layers of a stage.
#[derive(Debug, Serialize)]
struct Layers {
    devices: Vec<String>,
    first_layer: u32,
    layers: u32,
    /// The same for people.
    #[serde(skip)]
    span: String,
    /// Weights as they are stored, and the cache.
    bytes: u64,
}

/// A step, and the values that it copies between devices.
#[derive(Debug, Serialize)]
struct Step {
    #[serde(flatten)]
    size: StepSize,
    crossings: usize,
    /// Sums that the devices of a group exchange.
    exchanges: usize,
}

/// Instructions of one kind that the device refuses for one reason.
#[derive(Debug, Serialize)]
struct Delegated {
    op: &'static str,
    instructions: usize,
    origin: String,
    reason: String,
}

impl From<Fallback> for Delegated {
    fn from(Fallback { op, reason, instructions, origin }: Fallback) -> Self {
        Self { op, instructions, origin, reason }
    }
}

impl Explain {
    /// Runs the command.
    ///
    /// # Errors
    /// If the model can't be planned or a device not be measured.
    pub fn run(self) -> Result<(), CliError> {
        let path = model::resolve(&self.model.model)?;
        let placement = plugins::place(&self.runtime.place, model::file_bytes(&path))?;
        let mut options = model::options(&self.runtime, &Wish::default());
        options.max_seq_len = self.seq.or(options.max_seq_len);
        let planned = qwen_engine::explain(&path, placement.clone(), &options).map_err(|error| match error {
            // The error names what was given.
            EngineError::Parameter { name: "max-seq-len", expected, found } if self.seq.is_some() => {
                EngineError::Parameter { name: "--seq", expected, found }
            }
            other => other,
        })?;
        let seq_len = u64::from(planned.max_seq_len);
        let catalogue = dispatch::catalogue()?;
        let choosers = Choosers::new(&catalogue, &placement, &planned)?;
        let chunk = u64::from(self.runtime.prefill_chunk_size).min(seq_len);
        let sizes =
            [StepSize { step: "prefill", tokens: chunk, seq_len }, StepSize { step: "decode", tokens: 1, seq_len }];
        let decisions: Vec<Counted> =
            sizes.into_iter().flat_map(|size| dispatch::decisions(&choosers, &planned.ops, Some(size))).collect();
        let step = |size| {
            let (crossings, exchanges) = dispatch::transfers(&planned, size);
            Step { size, crossings, exchanges }
        };
        let groups = self.runtime.place.groups()?;
        let members = groups.first().map(plugins::Group::members).unwrap_or_default();
        let ranks = (members.len() / planned.stages.len().max(1)).max(1);
        let stages = planned.stages.iter().zip(members.chunks(ranks)).map(|(stage, devices)| Layers {
            devices: devices.to_vec(),
            first_layer: stage.first_layer,
            layers: stage.layers,
            span: stage.span(),
            bytes: stage.bytes,
        });
        let stages = if planned.stages.len() > 1 { stages.collect() } else { Vec::new() };
        let (bandwidth, bandwidth_origin) = choosers.own().bandwidth().unzip();
        let answer = Answer {
            model: &self.model.model,
            device: self.device(&placement),
            members,
            stages,
            chip: dispatch::chip_of(&catalogue, &placement.device).map(|chip| chip.name.as_str()),
            bandwidth,
            bandwidth_origin,
            fallback: placement.fallback.filter(|_| !planned.fallbacks.is_empty()).as_ref().map(Device::label),
            steps: sizes.map(step).into(),
            max_crossings: placement.max_crossings,
            refused: planned.refused.map(|error| sentence(&error)),
            computed_by_fallback: planned.fallbacks.into_iter().map(Delegated::from).collect(),
            decisions,
        };
        if self.json { print_json(&answer) } else { print(&answer) }
    }

    /// The device by the name that was given, or, where it was chosen, by the one that it has.
    fn device(&self, placement: &Placement) -> String {
        let named = &self.runtime.place.device;
        let chosen = named.only().is_ok_and(|name| name.plugin == plugins::AUTO);
        if chosen { placement.device.label() } else { named.to_string() }
    }
}

fn print(answer: &Answer<'_>) -> Result<(), CliError> {
    let mut out = stdout();
    let mut told = false;
    for (device, on_fallback) in [(Some(&answer.device), false), (answer.fallback.as_ref(), true)] {
        let first = answer.decisions.iter().find(|counted| counted.on_fallback == on_fallback);
        let Some((device, decision)) = device.zip(first.map(|counted| &counted.decision)) else { continue };
        let bandwidth = match (decision.bandwidth, decision.bandwidth_origin) {
            (Some(bandwidth), Some(origin)) => format!("{}, {origin}", bandwidth_text(bandwidth)),
            _ => "unknown".into(),
        };
        let (library, capability) = (&decision.library, printable(&decision.capability));
        let role = if told { "; computes what is refused" } else { "" };
        writeln!(out, "{NAME}{device}{NAME:#}  {library} for {capability}, memory bandwidth {bandwidth}{role}")?;
        told = true;
    }
    for (at, stage) in answer.stages.iter().enumerate() {
        let (devices, span, size) = (stage.devices.join(", "), &stage.span, bytes(stage.bytes));
        writeln!(out, "{NAME}stage {at}{NAME:#}  {devices}, {span}, {size} of weights and cache")?;
    }
    for step in &answer.steps {
        let (tokens, context) = (grouped(step.size.tokens), grouped(step.size.seq_len));
        let copies = match (&answer.fallback, step.crossings) {
            (None, _) => String::new(),
            (Some(_), n) => format!(", {n} copies between devices of at most {}", answer.max_crossings),
        };
        let sums = match step.exchanges {
            0 => String::new(),
            n => {
                let ranks = answer.members.len() / answer.stages.len().max(1);
                format!(", {n} sums exchanged between {ranks} devices")
            }
        };
        writeln!(out, "{NAME}{}{NAME:#}  tokens {tokens}, context {context}{copies}{sums}", step.size.step)?;
        for counted in answer.decisions.iter().filter(|counted| counted.size == Some(step.size)) {
            print_decision(&mut out, counted, answer.fallback.as_deref())?;
        }
    }
    for Delegated { op, instructions, origin, reason } in &answer.computed_by_fallback {
        writeln!(out, "refused  {op} ({origin}, {instructions} of a step): {}", printable(reason))?;
    }
    if let Some(refused) = &answer.refused {
        writeln!(out, "would not be loaded: {}", printable(refused))?;
    }
    Ok(())
}

fn print_decision(out: &mut impl Write, counted: &Counted, fallback: Option<&str>) -> Result<(), CliError> {
    let decision = &counted.decision;
    let chosen = match &counted.refused {
        Some(reason) if !counted.on_fallback => format!("computed by no device: {}", printable(reason)),
        _ => format!("{:<18} {}", printable(&decision.family), printable(&decision.tiling)),
    };
    let by = format!("{:?}", decision.chosen_by).to_lowercase();
    let place = fallback.filter(|_| counted.on_fallback).map(|device| format!(", on {device}")).unwrap_or_default();
    writeln!(out, "  {:<14} {:>4} x  {chosen}  {DIM}{by}{DIM:#}{place}", decision.op, counted.instructions)?;
    if let Some(strength) = &decision.strength {
        writeln!(out, "  {:<14}         {DIM}{}{DIM:#}", "", printable(strength))?;
    }
    Ok(())
}
