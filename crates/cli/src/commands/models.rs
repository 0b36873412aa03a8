//! `qwen models`: what there is, how to get more, and what is in it.

use std::io::Write;
use std::path::Path;

use clap::{Args, Subcommand};
use qwen_models::hub::{self, Builtin};
use serde::Serialize;

use super::inspect::Inspect;
use super::synth::Synth;
use crate::console::{DIM, NAME, bytes, print_json, printable, stdout};
use crate::error::CliError;
use crate::model;

const EXAMPLES: &str = "\
Examples:
  qwen models list
  qwen models fetch Qwen/Qwen2.5-0.5B-Instruct
  qwen models fetch Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M
  qwen models inspect smollm2 --context 8192

Fetched models lie in QWEN_CACHE, else in qwen-inference in the user's cache folder.";

const NAMES: &str = "\
A name is owner/name[@revision][:file or quantisation], after hf: or ms: to choose the hub.

Examples:
  qwen models fetch Qwen/Qwen2.5-0.5B-Instruct
  qwen models fetch ms:Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M

QWEN_HUB=modelscope changes the default hub. QWEN_HUB_ENDPOINT or HF_ENDPOINT is the address of
Hugging Face, MODELSCOPE_ENDPOINT that of ModelScope; HF_TOKEN gives access to closed
repositories. An interrupted download goes on where it stopped.";

/// List, fetch, inspect or make up models
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Models {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    List(List),
    Fetch(Fetch),
    Inspect(Inspect),
    Synth(Synth),
}

impl Models {
    /// Runs the command.
    ///
    /// # Errors
    /// If there is no such model, or it can't be fetched or read.
    pub fn run(self) -> Result<(), CliError> {
        match self.command {
            Command::List(command) => command.run(),
            Command::Fetch(command) => command.run(),
            Command::Inspect(command) => command.run(),
            Command::Synth(command) => command.run(),
        }
    }
}

/// List the models that are here, and those known by a short name
#[derive(Debug, Args)]
struct List {
    /// Print a JSON list
    #[arg(long)]
    json: bool,
}

/// A model of the list; path and bytes are null while it isn't fetched.
#[derive(Debug, Serialize)]
struct Entry {
    name: String,
    source: String,
    path: Option<String>,
    bytes: Option<u64>,
}

impl Entry {
    fn builtin(name: &str, builtin: Builtin, cache: &Path) -> Self {
        let path = hub::builtin_path(builtin, cache);
        let bytes = std::fs::metadata(&path).ok().map(|file| file.len());
        let path = bytes.is_some().then(|| path.display().to_string());
        Self { name: name.to_owned(), source: "built in".to_owned(), path, bytes }
    }
}

impl List {
    fn run(self) -> Result<(), CliError> {
        let cache = hub::cache_dir();
        let mut entries = vec![Entry::builtin("smollm2", Builtin::SmolLm2, &cache)];
        entries.extend(hub::list_cached(&cache).into_iter().map(|cached| Entry {
            path: Some(cached.path(&cache).display().to_string()),
            bytes: Some(cached.bytes()),
            name: cached.name,
            source: cached.source,
        }));
        if self.json {
            return print_json(&entries);
        }
        let mut out = stdout();
        for Entry { name, source, path, bytes: size } in &entries {
            let size = size.map_or_else(|| "not fetched".to_owned(), bytes);
            let path = printable(path.as_deref().unwrap_or("fetched when used"));
            writeln!(out, "{NAME}{:<48}{NAME:#} {source:<12} {size:>12}  {DIM}{path}{DIM:#}", printable(name))?;
        }
        Ok(())
    }
}

/// Fetch a model into the cache and print where it is
#[derive(Debug, Args)]
#[command(after_help = NAMES)]
struct Fetch {
    /// A hub name, or `smollm2`
    #[arg(value_name = "MODEL")]
    model: String,
    /// Ask the hub again although the model is in the cache
    #[arg(long)]
    refresh: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Fetch {
    fn run(self) -> Result<(), CliError> {
        let path = model::fetch(&self.model, self.refresh)?.display().to_string();
        if self.json {
            return print_json(&serde_json::json!({ "name": self.model, "path": path }));
        }
        writeln!(stdout(), "{}", printable(&path))?;
        Ok(())
    }
}
