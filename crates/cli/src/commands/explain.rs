//! `qwen devices explain`: which kernels a device takes for a model, and why, before anything runs.

use std::io::Write;

use clap::Args;
use qwen_dispatch::{Chooser, bandwidth_text};
use serde::Serialize;

use crate::arguments::{ModelArgument, RuntimeArguments};
use crate::console::{DIM, NAME, grouped, print_json, printable, stdout};
use crate::dispatch::{self, Counted, StepSize};
use crate::error::CliError;
use crate::model::{self, Wish};
use crate::plugins;

const EXAMPLES: &str = "\
Examples:
  qwen devices explain --model smollm2
  qwen devices explain --model M.gguf --seq 65536 --json
  QWEN_DEBUG_DISPATCH=1 qwen generate --prompt Hello --max-tokens 1

Nothing is loaded or computed; the device is measured if it has no profile yet. Decisions are what
the backend's plans tell of themselves, or, where they tell nothing, what the chip's sheet says.";

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
    chip: Option<&'a str>,
    bandwidth: Option<f64>,
    bandwidth_origin: Option<&'static str>,
    decisions: Vec<Counted>,
}

impl Explain {
    /// Runs the command.
    ///
    /// # Errors
    /// If the model can't be planned or the device not be measured.
    pub fn run(self) -> Result<(), CliError> {
        let path = model::resolve(&self.model.model)?;
        let device =
            plugins::open(&self.runtime.place.device, &self.runtime.place.plugins, self.runtime.place.threads)?;
        let mut options = model::options(&self.runtime, &Wish::default());
        options.max_seq_len = self.seq.or(options.max_seq_len);
        let planned = qwen_engine::explain(&path, device.clone(), &options)?;
        let (seq_len, planned) = (u64::from(planned.max_seq_len), planned.ops);
        let catalogue = dispatch::catalogue()?;
        let chip = dispatch::chip_of(&catalogue, &device);
        let profile = dispatch::profile(&device, false)?;
        let chooser = Chooser::new(&device, chip, profile.as_ref());
        let chunk = u64::from(self.runtime.prefill_chunk_size).min(seq_len);
        let steps =
            [StepSize { step: "prefill", tokens: chunk, seq_len }, StepSize { step: "decode", tokens: 1, seq_len }];
        let decisions: Vec<Counted> =
            steps.into_iter().flat_map(|size| dispatch::decisions(&chooser, &planned, Some(size))).collect();
        let first = decisions.first().map(|counted| &counted.decision);
        let answer = Answer {
            model: &self.model.model,
            device: self.runtime.place.device.to_string(),
            chip: chip.map(|chip| chip.name.as_str()),
            bandwidth: first.and_then(|decision| decision.bandwidth),
            bandwidth_origin: first.and_then(|decision| decision.bandwidth_origin),
            decisions,
        };
        if self.json { print_json(&answer) } else { print(&answer) }
    }
}

fn print(answer: &Answer<'_>) -> Result<(), CliError> {
    let mut out = stdout();
    let Some(first) = answer.decisions.first().map(|counted| &counted.decision) else { return Ok(()) };
    let bandwidth = match (first.bandwidth, first.bandwidth_origin) {
        (Some(bandwidth), Some(origin)) => format!("{}, {origin}", bandwidth_text(bandwidth)),
        _ => "unknown".into(),
    };
    let (library, capability) = (&first.library, printable(&first.capability));
    writeln!(out, "{NAME}{}{NAME:#}  {library} for {capability}, memory bandwidth {bandwidth}", answer.device)?;
    let mut current = None;
    for counted in &answer.decisions {
        if counted.size != current {
            current = counted.size;
            if let Some(size) = counted.size {
                let (tokens, context) = (grouped(size.tokens), grouped(size.seq_len));
                writeln!(out, "{NAME}{}{NAME:#}  tokens {tokens}, context {context}", size.step)?;
            }
        }
        let decision = &counted.decision;
        let chosen = match &counted.refused {
            Some(reason) => format!("not on this device: {}", printable(reason)),
            None => format!("{:<18} {}", printable(&decision.family), printable(&decision.tiling)),
        };
        let by = format!("{:?}", decision.chosen_by).to_lowercase();
        writeln!(out, "  {:<14} {:>4} x  {chosen}  {DIM}{by}{DIM:#}", decision.op, counted.instructions)?;
        if let Some(strength) = &decision.strength {
            writeln!(out, "  {:<14}         {DIM}{}{DIM:#}", "", printable(strength))?;
        }
    }
    Ok(())
}
