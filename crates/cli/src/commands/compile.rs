//! `qwen-compile`: a model in, one file with its weights in a device's own form out.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::Parser;
use qwen_engine::{Compiled, EngineError};
use qwen_formats::Checkpoint;

use crate::console::{Progress, bytes, print_json, printable, stdout};
use crate::error::CliError;
use crate::output::write_whole;
use crate::plugins::DeviceName;
use crate::{model, plugins};

const EXAMPLES: &str = "\
Examples:
  qwen-compile --target cpu --model Qwen2.5-7B-Instruct-Q4_K_M.gguf --output qwen2.5-7b.cpu.gguf
  qwen-compile --model Qwen/Qwen2.5-0.5B-Instruct-GGUF:qwen2.5-0.5b-instruct-q4_k_m.gguf --output small.gguf
  qwen generate --model small.gguf --prompt \"Hello\"

The file is used like any model, by these programs alone, and gives the same answers: weights are mapped as they are
instead of being packed at each start. It holds all that the source holds; after an update of the program it may have
to be made again, which the program then says.";

/// Brings a model's weights into the form that a device computes with, as one file
#[derive(Debug, Parser)]
#[command(name = "qwen-compile", version, max_term_width = 100, after_help = EXAMPLES)]
pub struct Compile {
    /// Device to compile for, as `qwen devices` lists them
    #[arg(long, value_name = "NAME[:MODEL][:N]", default_value = "cpu")]
    target: DeviceName,
    /// A plugin's library, beside those of the usual places (may be repeated)
    #[arg(long = "plugin", value_name = "FILE")]
    plugins: Vec<PathBuf>,
    /// A GGUF file, or a hub name of one
    #[arg(long, short, value_name = "MODEL")]
    model: String,
    /// The file to write; one that is there is replaced
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
    /// Threads to compute with [default: all that the process may use, or QWEN_THREADS]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Compile {
    /// Runs the command.
    ///
    /// # Errors
    /// If the model can't be compiled, or the file can't be written.
    pub fn run(self) -> Result<(), CliError> {
        let source = model::resolve(&self.model)?;
        refuse_own_source(&source, &self.output)?;
        let device = plugins::open(&self.target, &self.plugins, self.threads)?;
        let compiled = write_whole(&self.output, |file, partial| {
            let progress = Progress::bytes("compiling");
            let mut out = BufWriter::with_capacity(1 << 20, file);
            let compiled =
                qwen_engine::compile(&source, device, &mut out, &mut |done, total| progress.set(done, total));
            let failed = CliError::file(partial, "write");
            let compiled = match compiled {
                Err(EngineError::Output(error)) => return Err(failed(error)),
                other => other?,
            };
            out.flush().map_err(failed)?;
            Ok(compiled)
        })?;
        self.tell(&compiled)
    }

    fn tell(&self, compiled: &Compiled) -> Result<(), CliError> {
        let path = self.output.display().to_string();
        let file_bytes = std::fs::metadata(&self.output).map_err(CliError::file(&self.output, "read"))?.len();
        let Compiled { packed, packed_bytes, stored, stored_bytes } = *compiled;
        if self.json {
            return print_json(&serde_json::json!({
                "path": path, "target": self.target.to_string(), "bytes": file_bytes,
                "packed": packed, "packed_bytes": packed_bytes, "stored": stored, "stored_bytes": stored_bytes,
            }));
        }
        let mut out = stdout();
        writeln!(out, "{}", printable(&path))?;
        writeln!(out, "  packed   {packed} weights, {}", bytes(packed_bytes))?;
        writeln!(out, "  as is    {stored} tensors, {}", bytes(stored_bytes))?;
        Ok(())
    }
}

/// The source is read while the file is written, and is worth more than what is made of it.
fn refuse_own_source(source: &Path, output: &Path) -> Result<(), CliError> {
    let Ok(output) = output.canonicalize() else { return Ok(()) };
    let checkpoint = Checkpoint::open(source)?;
    let same = checkpoint.shard_paths().iter().any(|path| path.canonicalize().is_ok_and(|path| path == output));
    if same {
        let found = "the model itself";
        return Err(CliError::input("--output", "another file than the model", found, "choose another name"));
    }
    Ok(())
}
