//! `qwen-eval kl`: a text in, how far one precision's predictions are from another's out.
//!
//! The text is cut into windows that start anew, so memory is that of two engines and one window's logits.

use std::path::PathBuf;

use clap::Args;
use qwen_models::tokenizer::{EncodeOptions, Tokenizer};
use serde::Serialize;

use super::compare::{not_a_number, print_summary};
use super::metrics::{Comparison, Summary};
use crate::arguments::{DeviceArguments, KvCacheDtype, ModelArgument, Precision, RuntimeArguments};
use crate::commands::tokenize::read_file;
use crate::console::{Progress, print_json};
use crate::error::CliError;
use crate::model::{self, Wish};

const EXAMPLES: &str = "\
Examples:
  qwen-eval kl --file corpus.txt
  qwen-eval kl --model model.gguf --file corpus.txt --precision-b fast --tokens 10000 --json

Every window is computed as one prompt, by both. The divergence is that of b from a, in nats
a token; its standard error takes tokens as independent, which they are not quite.";

/// Compare two precisions of a model over a text
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Kl {
    #[command(flatten)]
    model: ModelArgument,
    /// The text, - for standard input
    #[arg(long, value_name = "FILE")]
    file: PathBuf,
    /// The reference
    #[arg(long, value_enum, value_name = "PRECISION", default_value_t = Precision::Exact)]
    precision_a: Precision,
    /// The precision to judge
    #[arg(long, value_enum, value_name = "PRECISION", default_value_t = Precision::Balanced)]
    precision_b: Precision,
    /// How it stores keys and values; the reference stores them as suits its precision
    #[arg(long, value_enum, value_name = "TYPE", default_value_t = KvCacheDtype::Auto)]
    kv_cache_dtype_b: KvCacheDtype,
    /// Stop after so many tokens [default: all of the text]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    tokens: Option<u32>,
    /// Tokens of a window
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(2..=65536))]
    window: u32,
    #[command(flatten)]
    place: DeviceArguments,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    model: &'a str,
    precision_a: Precision,
    precision_b: Precision,
    window: u32,
    #[serde(flatten)]
    summary: Summary,
}

impl Kl {
    /// Runs the command.
    ///
    /// # Errors
    /// If the model can't be loaded or the text is too short.
    pub fn run(self) -> Result<(), CliError> {
        let text = read_file(&self.file)?;
        let mut reference =
            model::load(&self.model.model, &self.runtime(self.precision_a, KvCacheDtype::Auto), &Wish::default())?;
        let mut judged =
            model::load(&self.model.model, &self.runtime(self.precision_b, self.kv_cache_dtype_b), &Wish::default())?;
        let tokenizer = model::tokenizer_of(&reference, &self.model.model)?;
        let windows = self.windows(&tokenizer, &text)?;
        let mut comparison = Comparison::default();
        let progress = Progress::steps("comparing");
        let vocab_size = reference.loaded().model.vocab_size().max(1);
        let mut rows = Vec::new();
        for (at, window) in windows.iter().enumerate() {
            progress.set(at as u64, windows.len() as u64);
            rows.clear();
            reference.logits(window, false, &mut |row| rows.extend_from_slice(row))?;
            let mut expected = rows.chunks_exact(vocab_size);
            let mut wrong = None;
            judged.logits(window, false, &mut |row| {
                if let Err(token) = comparison.push(expected.next().unwrap_or_default(), row) {
                    wrong.get_or_insert((comparison.tokens(), token));
                }
            })?;
            if let Some((row, token)) = wrong {
                return Err(not_a_number("logits", row, token));
            }
        }
        drop(progress);
        let summary = comparison.summary().ok_or_else(|| self.too_short())?;
        if self.json { self.print(summary) } else { print_summary(&summary) }
    }

    fn print(&self, summary: Summary) -> Result<(), CliError> {
        print_json(&Report {
            model: &self.model.model,
            precision_a: self.precision_a,
            precision_b: self.precision_b,
            window: self.window,
            summary,
        })
    }

    fn runtime(&self, precision: Precision, kv_cache_dtype: KvCacheDtype) -> RuntimeArguments {
        RuntimeArguments {
            place: self.place.clone(),
            precision,
            kv_cache_dtype,
            max_seq_len: Some(self.window),
            prefill_chunk_size: 512,
        }
    }

    /// The text's tokens in windows; each begins with BOS where the model wants one.
    fn windows(&self, tokenizer: &Tokenizer, text: &[u8]) -> Result<Vec<Vec<u32>>, CliError> {
        let mut ids = tokenizer.encode_bytes(text, EncodeOptions::LITERAL)?;
        if let Some(most) = self.tokens {
            ids.truncate(most as usize);
        }
        let bos = tokenizer.bos().filter(|_| tokenizer.adds_bos());
        let room = self.window as usize - usize::from(bos.is_some());
        Ok(ids.chunks(room).map(|part| bos.into_iter().chain(part.iter().copied()).collect()).collect())
    }

    fn too_short(&self) -> CliError {
        CliError::input(self.file.display().to_string(), "a text of at least one token", "none", "give a longer text")
    }
}
