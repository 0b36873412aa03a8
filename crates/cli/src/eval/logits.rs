//! `qwen-eval logits`: tokens in, a file with their logits out. The debugging door for numerical questions.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use qwen_engine::MlaForm;

use super::logits_file::Logits;
use crate::arguments::{ModelArgument, RuntimeArguments};
use crate::error::CliError;
use crate::model::{self, Wish};

const EXAMPLES: &str = "\
Examples:
  qwen-eval logits --tokens 1,2,3 --output logits.safetensors
  qwen-eval logits --model DeepSeek-V2-Lite.gguf --tokens 100000,5726 --output mla.safetensors \\
      --precision exact --decode --mla-form absorbed

The file has one tensor, logits [tokens, vocabulary], float32: for each token the model's
prediction of the next one, computed exactly as `qwen generate` computes it with the same options.";

/// Write the logits of some tokens to a file
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct LogitsCommand {
    #[command(flatten)]
    model: ModelArgument,
    /// Ids of tokens, with commas between them
    #[arg(long, value_name = "IDS", value_delimiter = ',', required = true, value_parser = token_id)]
    tokens: Vec<u32>,
    /// The file to write
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
    /// One token at a time through the cache, as generated tokens are computed, not as one prompt
    #[arg(long)]
    decode: bool,
    /// Form of latent attention [default: expanded for prompts, absorbed for generated tokens]
    #[arg(long, value_enum)]
    mla_form: Option<Form>,
    #[command(flatten)]
    runtime: RuntimeArguments,
}

/// Form of latent attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Form {
    /// Keys and values are built from the latent
    Expanded,
    /// Queries are taken into the space of the latent
    Absorbed,
}

fn token_id(text: &str) -> Result<u32, String> {
    text.trim().parse().map_err(|_| "expected whole numbers with commas between them".to_owned())
}

impl LogitsCommand {
    /// Runs the command.
    ///
    /// # Errors
    /// If the model can't be loaded, a token does not exist, or the file can't be written.
    pub fn run(self) -> Result<(), CliError> {
        let mla_form = self.mla_form.map(|form| match form {
            Form::Expanded => MlaForm::Expanded,
            Form::Absorbed => MlaForm::Absorbed,
        });
        let wish = Wish { tokens: Some(self.tokens.len()), mla_form, ..Wish::default() };
        let mut engine = model::load(&self.model.model, &self.runtime, &wish)?;
        let vocab_size = engine.loaded().model.vocab_size();
        let mut values = Vec::with_capacity(self.tokens.len().saturating_mul(vocab_size));
        engine.logits(&self.tokens, self.decode, &mut |row| values.extend_from_slice(row))?;
        if let Some(at) = values.iter().position(|logit| !logit.is_finite()) {
            let row = at / vocab_size.max(1);
            tracing::warn!("{} is a logit after token {row}: the checkpoint or the device is damaged", values[at]);
        }
        Logits { rows: self.tokens.len(), vocab_size, values }.write(&self.output)
    }
}
