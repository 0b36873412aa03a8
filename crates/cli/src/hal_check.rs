//! `qwen-hal-check`: conformance of a plugin, with nothing but this program and the plugin's library.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{ArgGroup, Parser};
use qwen_hal::loader::Loader;
use qwen_hal::{Host, Plugin};
use qwen_hal_check::children::{Children, child, parse_arguments};
use qwen_hal_check::{Outcome, Record, Report, Selection, Subject, case_names};
use serde_json::json;

use crate::console::{is_terminal, print_json, print_text};
use crate::error::{CliError, sentence};
use crate::plugins::{self, DeviceName};

const EXAMPLES: &str = "\
Examples:
  qwen-hal-check --plugin ./libhal_example.so --level 0
  qwen-hal-check --device cpu
  qwen-hal-check --device cpu --level 1 --case gemm/q4_k --verbose
  qwen-hal-check --plugin ./libhal_example.so --html > report.html
  qwen-hal-check --list --level 2

Levels: 0 memory, streams, events, refusals, threads; 1 ops of dense models; 2 experts and latent
attention; 3 command lists and collectives, where a device claims them. Each level has those below it.

What is right is a float64 computation; every limit is in docs/hal.md. The cases run in a process of
their own: when the plugin crashes or hangs, the case that was running has failed and the next one
follows in a new process. Exit code 0 if no case failed. A case is unsupported, not failed, when the
plugin says so itself; but every kind of op of a level must be there in at least one form.";

/// First argument of this program as the child that runs the cases.
const CHILD: &str = "--hal-check-child";

/// Checks that a plugin does what the interface says
#[derive(Debug, Parser)]
#[command(name = "qwen-hal-check", version, max_term_width = 100, after_help = EXAMPLES)]
#[command(group = ArgGroup::new("subject").args(["plugin", "device", "list"]).required(true).multiple(true))]
pub struct HalCheck {
    /// The plugin's library
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,
    /// A device by name, as `qwen devices` lists them; with --plugin one of that plugin
    #[arg(long, value_name = "NAME[:MODEL][:N]")]
    device: Option<DeviceName>,
    /// Highest level
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(0..=3))]
    level: u32,
    /// Only cases whose name contains this
    #[arg(long, value_name = "TEXT")]
    case: Option<String>,
    /// Threads that the host lends to the plugin
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: u32,
    /// Seconds that one case may take
    #[arg(long, value_name = "S", default_value_t = 60.0, value_parser = seconds)]
    limit: f64,
    /// Show passed cases too
    #[arg(long)]
    verbose: bool,
    /// Print one JSON object: `summary` and a record for each of `cases`; with --list their names and levels
    #[arg(long, conflicts_with = "html")]
    json: bool,
    /// Print a page
    #[arg(long)]
    html: bool,
    /// List the cases instead; they are the same for every plugin
    #[arg(long, conflicts_with_all = ["plugin", "device", "html", "verbose", "threads", "limit"])]
    list: bool,
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.1..=86400.0).contains(seconds));
    seconds.ok_or_else(|| "expected seconds from 0.1 to 86400".to_owned())
}

impl HalCheck {
    /// Runs the command.
    ///
    /// # Errors
    /// If the plugin can't be loaded, or a case failed.
    pub fn run(self) -> Result<(), CliError> {
        let selection = Selection { filter: self.case.clone(), ..Selection::level(self.level) };
        let names = case_names(&selection);
        if names.is_empty() {
            let filter = self.case.unwrap_or_default();
            return Err(CliError::input("--case", "part of a case's name", filter, "see --list"));
        }
        if self.list {
            if self.json {
                let case = |(name, level): &(String, u32)| json!({ "name": name, "level": level });
                return print_json(&json!({ "cases": names.iter().map(case).collect::<Vec<_>>() }));
            }
            return print_text(&names.iter().map(|(name, _)| format!("{name}\n")).collect::<String>());
        }
        let program = std::env::current_exe().map_err(CliError::file("this program", "find"))?;
        let plugin = self.plugin.clone().unwrap_or_default();
        let device = self.device.as_ref().map(ToString::to_string).unwrap_or_default();
        let children = Children {
            program,
            arguments: vec![CHILD.into(), plugin.into(), device.into()],
            limit: Duration::from_secs_f64(self.limit),
        };
        let mut done = 0;
        let mut progress = |record: &Record| {
            done += 1;
            if is_terminal() && !self.json && !self.html {
                let failed = if record.outcome == Outcome::Failed { " FAILED" } else { "" };
                // Where it cannot be shown it need not be.
                let _ = write!(std::io::stderr(), "\r\x1b[K{done}/{} {}{failed}", names.len(), record.name);
            }
        };
        let ran = children.run(&selection, self.threads as usize, &mut progress);
        if is_terminal() && !self.json && !self.html {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
        let ran = ran.map_err(CliError::Uncheckable)?;
        let report = Report::new(ran.plugin, ran.device, self.level, self.case, ran.records);
        if self.json {
            print_json(&report)?;
        } else if self.html {
            print_text(&report.html())?;
        } else {
            print_text(&report.text(self.verbose))?;
        }
        match report.summary.failed {
            0 => Ok(()),
            failed => Err(CliError::Conformance { failed, of: report.cases.len() }),
        }
    }
}

/// Runs the cases and prints them for the parent, if this program was started as a child.
#[must_use]
pub fn run_as_child() -> bool {
    let arguments: Vec<String> = std::env::args_os().skip(1).map(|text| text.to_string_lossy().into_owned()).collect();
    let [first, plugin, device, rest @ ..] = arguments.as_slice() else { return false };
    if first != CHILD {
        return false;
    }
    if let Some((selection, threads)) = parse_arguments(rest) {
        child(subject(plugin, device, threads).map_err(|error| sentence(&error)), &selection);
    }
    true
}

/// The device to check. Nothing is tried out before: this is the process that may die.
fn subject(plugin: &str, device: &str, threads: usize) -> Result<Subject, CliError> {
    let host = plugins::host(u32::try_from(threads).ok());
    if device.is_empty() {
        return Ok(Subject::new(&load(plugin, &host)?, 0)?);
    }
    let name: DeviceName =
        device.parse().map_err(|found| CliError::input("--device", "NAME or NAME:N", found, "see `qwen devices`"))?;
    let loaded = if plugin.is_empty() {
        plugins::find(&name.plugin, &plugins::places(&[]), &host)?
    } else {
        load(plugin, &host)?
    };
    if loaded.name() != name.plugin {
        let expected = format!("a device of {plugin}, whose name is {}", loaded.name());
        return Err(CliError::input("--device", expected, device, "leave one of the two out, or name its device"));
    }
    Ok(Subject::new(&loaded, name.index_in(&loaded)?)?)
}

fn load(plugin: &str, host: &Host) -> Result<Arc<Plugin>, CliError> {
    let loader = Loader::new().named(plugin);
    let candidates = loader.candidates();
    let Some(candidate) = candidates.first() else {
        return Err(CliError::input(plugin, "a plugin's library", "a folder without any", "name a libhal_*.so"));
    };
    Ok(loader.load(candidate, host)?)
}
