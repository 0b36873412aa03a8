//! `qwen-eval compare`: two files of logits, or two devices and a model in, how far they are apart out.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;

use super::devices::OnDevices;
use super::logits_file::Logits;
use super::metrics::{Comparison, Summary};
use crate::console::{NAME, print_json, stdout};
use crate::error::CliError;
use crate::plugins::DeviceList;

const EXAMPLES: &str = "\
Examples:
  qwen-eval compare --a exact.safetensors --b balanced.safetensors
  qwen-eval compare --a reference.safetensors --b logits.safetensors --json
  qwen-eval compare --a cpu --b opencl:0 --model smollm2 --per-op
  qwen-eval compare --a cpu --b sim:ascend910b:0,1 --pipeline-parallel-size 2 --model smollm2

A file is what exists, or ends in .safetensors; anything else is a device, as for --device.";

/// Compare two files of logits, or a model on two devices
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Compare {
    /// The reference: a safetensors file with a tensor `logits` [tokens, vocabulary], or a device
    #[arg(long, value_name = "FILE|DEVICE")]
    a: String,
    /// The file or device to judge
    #[arg(long, value_name = "FILE|DEVICE")]
    b: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    on_devices: OnDevices,
}

/// What `--a` and `--b` name.
enum Named {
    File(PathBuf),
    Device(DeviceList),
}

impl Named {
    fn new(text: &str) -> Result<Self, CliError> {
        let path = Path::new(text);
        if path.exists() || path.extension().is_some_and(|extension| extension == "safetensors") {
            return Ok(Self::File(path.to_owned()));
        }
        text.parse().map(Self::Device).map_err(|expected| {
            CliError::input(
                "--a and --b",
                format!("a file of logits or a device: {expected}"),
                text,
                "see `qwen devices`",
            )
        })
    }
}

impl Compare {
    /// Runs the command.
    ///
    /// # Errors
    /// If a file can't be read, or the two don't fit each other.
    pub fn run(self) -> Result<(), CliError> {
        let (a, b) = match (Named::new(&self.a)?, Named::new(&self.b)?) {
            (Named::Device(a), Named::Device(b)) => return self.on_devices.run(&a, &b, self.json),
            (Named::File(a), Named::File(b)) => (a, b),
            _ => {
                let found = format!("{} and {}", self.a, self.b);
                return Err(CliError::input("--a and --b", "two files or two devices", found, "name both of one kind"));
            }
        };
        let summary = compare(&a, &b)?;
        if self.json { print_json(&summary) } else { print_summary(&summary) }
    }
}

fn compare(a: &Path, b: &Path) -> Result<Summary, CliError> {
    let (reference, other) = (Logits::read(a)?, Logits::read(b)?);
    let shape = |logits: &Logits| format!("[{}, {}]", logits.rows, logits.vocab_size);
    if shape(&reference) != shape(&other) {
        return Err(CliError::input(
            format!("{}: tensor logits", b.display()),
            format!("shape {}, as in {}", shape(&reference), a.display()),
            format!("shape {}", shape(&other)),
            "compare logits of the same tokens and vocabulary",
        ));
    }
    let mut comparison = Comparison::default();
    for (row, (left, right)) in reference.iter().zip(other.iter()).enumerate() {
        comparison.push(left, right).map_err(|token| not_a_number(&b.display().to_string(), row, token))?;
    }
    comparison.summary().ok_or_else(|| {
        CliError::input(a.display().to_string(), "at least one row of logits", "none", "compute some tokens")
    })
}

/// The error of logits that are not finite.
pub(super) fn not_a_number(what: &str, row: usize, token: usize) -> CliError {
    CliError::input(
        what,
        "finite logits, or infinite ones in both",
        format!("another at row {row}, token {token}"),
        "look for overflow in that computation",
    )
}

/// The figures for people.
pub(super) fn print_summary(s: &Summary) -> Result<(), CliError> {
    let mut out = stdout();
    let mut line = |name: &str, value: String| writeln!(out, "{NAME}{name:<24}{NAME:#}{value}");
    line("tokens", s.tokens.to_string())?;
    line("KL divergence, mean", format!("{:.3e} ± {:.1e} nats", s.kl_mean, s.kl_standard_error))?;
    let percentiles = format!("{:.3e}, {:.3e}, {:.3e}, {:.3e}", s.kl_p50, s.kl_p90, s.kl_p99, s.kl_max);
    line("  50, 90, 99, 100%", percentiles)?;
    line("top-1 agreement", format!("{:.2} ± {:.2}%", 100.0 * s.top1_agreement, 100.0 * s.top1_standard_error))?;
    line("largest difference", format!("{:.3e}", s.max_abs_difference))?;
    Ok(())
}
