//! `qwen models synth`: a checkpoint of a real shape with weights by chance.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;

use clap::Args;
use clap::builder::PossibleValuesParser;
use qwen_models::synth::{self, MIXES, Mix, SHAPES, Shape, SynthError};

use crate::console::{Progress, print_json, printable, stdout};
use crate::error::CliError;
use crate::output::write_whole;

const EXAMPLES: &str = "\
Examples:
  qwen models synth --arch deepseek-r1-distill-qwen-1.5b --quant q4_0 --output model.gguf
  qwen models synth --arch deepseek-v3 --layers 4 --quant q4_k_m --output model.gguf

For measuring only: sizes, types and names are those of the model, what it says means nothing.";

/// Write a model of a real shape with weights by chance, to measure with
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Synth {
    /// Whose shape
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(SHAPES.iter().map(|shape| shape.name)))]
    arch: String,
    /// Storage types, mixed as the usual quantiser does
    #[arg(long, value_name = "MIX", default_value = "q4_0", value_parser = PossibleValuesParser::new(MIXES.iter().map(|mix| mix.name)))]
    quant: String,
    /// The GGUF file to write; one that is there is replaced
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
    /// Fewer layers than the model has
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    layers: Option<u32>,
    /// Seed of the random numbers
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Synth {
    /// Runs the command.
    ///
    /// # Errors
    /// If the file can't be written.
    pub fn run(self) -> Result<(), CliError> {
        let unknown = |what: &str| CliError::input(what, "a name of the list", "another", "see --help");
        let shape = *Shape::named(&self.arch).ok_or_else(|| unknown("--arch"))?;
        let mix = Mix::named(&self.quant).ok_or_else(|| unknown("--quant"))?;
        let layers = self.layers.unwrap_or(shape.layers);
        if layers > shape.layers {
            let most = format!("at most {}", shape.layers);
            return Err(CliError::input("--layers", most, layers.to_string(), "leave it out for all of them"));
        }
        let shape = shape.with_layers(layers);
        write_whole(&self.output, |file, partial| {
            write(&shape, mix, self.seed, file).map_err(|error| match error {
                SynthError::Io(error) => CliError::file(partial, "write")(error),
                other => CliError::input("--arch", "a shape that the types fit", other.to_string(), "try another mix"),
            })
        })?;
        let bytes = std::fs::metadata(&self.output).map_err(CliError::file(&self.output, "read"))?.len();
        let path = self.output.display().to_string();
        if self.json {
            return print_json(&serde_json::json!({
                "path": path, "arch": shape.name, "quant": mix.name, "layers": layers, "seed": self.seed, "bytes": bytes,
            }));
        }
        writeln!(stdout(), "{}", printable(&path))?;
        Ok(())
    }
}

fn write(shape: &Shape, mix: &Mix, seed: u64, file: File) -> Result<(), SynthError> {
    let progress = Progress::bytes("writing");
    let mut out = BufWriter::with_capacity(1 << 20, file);
    synth::write(shape, mix, seed, &mut out, &mut |done, total| progress.set(done, total))?;
    Ok(out.flush()?)
}
