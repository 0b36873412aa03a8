//! `qwen generate`: a prompt in, its continuation out.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::{ArgGroup, Args};
use qwen_engine::{Engine, Logprobs, PassName, Request, SamplingParams, TokenLogprob};
use qwen_hal::Device;
use qwen_models::chat_template::TemplateInput;
use qwen_models::tokenizer::{EncodeOptions, Tokenizer};
use serde::Serialize;

use crate::answer::{self, Answer};
use crate::arguments::{ModelArgument, Precision, RuntimeArguments, SamplingArguments};
use crate::console::{is_terminal, print_json, print_text, printable};
use crate::error::CliError;
use crate::memory::peak_resident_bytes;
use crate::model::{self, Wish};

const EXAMPLES: &str = "\
Examples:
  qwen generate --prompt \"The capital of France is\" --max-tokens 16
  qwen generate --chat --prompt \"Why is the sky blue?\" --temperature 0.7 --seed 42
  qwen generate --model DeepSeek-R1-Distill-Qwen-1.5B.gguf --prompt-file question.txt --json
  echo \"def fibonacci(n):\" | qwen generate --prompt-file - --stop $'\\n\\n\\n'

The prompt is continued as it is, unless --chat makes it a message by the model's chat template.
Without a temperature the most probable token is taken each time, and any choice by chance follows
--seed (0 if not given): the same command gives the same text.";

/// Continue a text
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
#[command(group(ArgGroup::new("source").args(["prompt", "prompt_file", "dump_ir"]).required(true).multiple(true)))]
pub struct Generate {
    #[command(flatten)]
    model: ModelArgument,
    /// The text to continue
    #[arg(long, short, value_name = "TEXT", allow_hyphen_values = true, conflicts_with = "prompt_file")]
    prompt: Option<String>,
    /// A file with the text to continue, - for standard input
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// Most tokens of the answer
    #[arg(long, short = 'n', value_name = "N", default_value_t = 256)]
    max_tokens: u32,
    /// Make the prompt a message to the model, by its chat template
    #[arg(long)]
    chat: bool,
    /// The system message of --chat
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    #[command(flatten)]
    sampling: SamplingArguments,
    /// Tell the log-probability of each token and of so many best ones (with --json)
    #[arg(long, value_name = "N", requires = "json", value_parser = clap::value_parser!(u32).range(0..=100))]
    logprobs: Option<u32>,
    #[command(flatten)]
    runtime: RuntimeArguments,
    /// Print one JSON object when the answer is complete
    #[arg(long)]
    json: bool,
    /// Print the model's graph after a pass instead of an answer: after:canonicalise, after:fuse, …
    #[arg(long, value_name = "after:PASS", value_parser = parse_dump)]
    dump_ir: Option<PassName>,
}

fn parse_dump(text: &str) -> Result<PassName, String> {
    let named = |name: &str| PassName::ALL.into_iter().find(|pass| pass.name() == name);
    text.strip_prefix("after:").and_then(named).ok_or_else(|| {
        let names: Vec<&str> = PassName::ALL.iter().map(|pass| pass.name()).collect();
        format!("expected after: and one of {}", names.join(", "))
    })
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report<'a> {
    model: &'a str,
    architecture: &'a str,
    precision: Precision,
    /// What it was computed on; several are a group.
    devices: Vec<String>,
    prompt_tokens: usize,
    text: &'a str,
    tokens: &'a [u32],
    finish_reason: &'static str,
    seed: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<TokenReport>>,
    timings: Timings,
    peak_rss_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct TokenReport {
    #[serde(flatten)]
    chosen: Candidate,
    top: Vec<Candidate>,
}

#[derive(Debug, Serialize)]
struct Candidate {
    id: u32,
    /// Bytes as text: a token may be a part of a character.
    text: String,
    logprob: f32,
}

/// Milliseconds and tokens per second.
#[derive(Debug, Serialize)]
struct Timings {
    /// From the start of the program until the model was ready.
    load_ms: f64,
    /// From the request to its first token.
    time_to_first_token_ms: f64,
    /// From the start of the program to the first token.
    start_to_first_token_ms: f64,
    prefill_ms: f64,
    prefill_tokens_per_second: f64,
    decode_ms: f64,
    decode_tokens_per_second: f64,
    /// From the start of the program to the end of the answer.
    total_ms: f64,
}

impl Generate {
    /// Runs the command.
    ///
    /// # Errors
    /// If the model can't be loaded or the prompt can't be continued.
    pub fn run(self) -> Result<(), CliError> {
        let prompt = match (&self.prompt, &self.prompt_file) {
            (Some(text), _) => text.clone().into_bytes(),
            (None, Some(path)) => super::tokenize::read_file(path)?,
            (None, None) => Vec::new(),
        };
        let wish = Wish { dump_after: self.dump_ir, ..Wish::default() };
        let mut engine = model::load(&self.model.model, &self.runtime, &wish)?;
        if self.dump_ir.is_some() {
            return print_text(engine.loaded().model.dump().unwrap_or_default());
        }
        let loaded = crate::entry::since_start();
        let tokenizer = model::tokenizer_of(&engine, &self.model.model)?;
        let prompt = self.encode(&engine, &tokenizer, &prompt)?;
        let defaults = SamplingParams {
            temperature: 0.0,
            max_tokens: self.max_tokens,
            logprobs: self.logprobs,
            ..SamplingParams::default()
        };
        let sampling = answer::sampling(defaults, &self.sampling);
        let request = Request::new(prompt, sampling);
        if self.json {
            self.print_report(&mut engine, &tokenizer, request, loaded)
        } else {
            print_stream(&mut engine, request)
        }
    }

    fn encode(&self, engine: &Engine, tokenizer: &Tokenizer, prompt: &[u8]) -> Result<Vec<u32>, CliError> {
        if !self.chat {
            return Ok(tokenizer.encode_bytes(prompt, EncodeOptions::PROMPT)?);
        }
        let text = String::from_utf8_lossy(prompt);
        let mut messages = Vec::new();
        if let Some(system) = &self.system {
            messages.push(super::chat::message("system", system));
        }
        messages.push(super::chat::message("user", text.trim_end_matches('\n')));
        let template = super::chat::template_of(engine, &self.model.model)?;
        let input = TemplateInput { messages: &messages, add_generation_prompt: true, ..TemplateInput::default() };
        Ok(tokenizer.encode(&template.render(&input)?, EncodeOptions::TEMPLATE)?)
    }

    fn print_report(
        &self,
        engine: &mut Engine,
        tokenizer: &Tokenizer,
        request: Request,
        loaded: Duration,
    ) -> Result<(), CliError> {
        let (prompt_tokens, seed) = (request.prompt.len(), request.sampling.seed);
        let answer = answer::run(engine, request, &AtomicBool::new(false), &mut |_| Ok(()))?;
        let logprobs = self.logprobs.map(|_| answer.logprobs.iter().map(|l| token_report(tokenizer, l)).collect());
        print_json(&Report {
            model: &self.model.model,
            architecture: engine.loaded().info.family,
            precision: self.runtime.precision,
            devices: engine.loaded().model.devices().map(Device::label).collect(),
            prompt_tokens,
            text: &answer.text,
            tokens: &answer.tokens,
            finish_reason: answer.finish.name(),
            seed,
            logprobs,
            timings: Timings::new(&answer, loaded),
            peak_rss_bytes: peak_resident_bytes(),
        })
    }
}

impl Timings {
    fn new(answer: &Answer, loaded: Duration) -> Self {
        let ms = |time: Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
        let rate = |rate: f64| (rate * 1e3).round() / 1e3;
        let timings = &answer.timings;
        Self {
            load_ms: ms(loaded),
            time_to_first_token_ms: ms(answer.time_to_first_token),
            start_to_first_token_ms: ms(answer.start_to_first_token),
            prefill_ms: ms(timings.prefill),
            prefill_tokens_per_second: rate(timings.prefill_rate()),
            decode_ms: ms(timings.decode),
            decode_tokens_per_second: rate(timings.decode_rate()),
            total_ms: ms(crate::entry::since_start()),
        }
    }
}

fn token_report(tokenizer: &Tokenizer, logprobs: &Logprobs) -> TokenReport {
    let candidate = |token: &TokenLogprob| Candidate {
        id: token.id,
        text: String::from_utf8_lossy(&tokenizer.token_bytes(token.id)).into_owned(),
        logprob: token.logprob,
    };
    TokenReport { chosen: candidate(&logprobs.chosen), top: logprobs.top.iter().map(candidate).collect() }
}

/// Text as it comes. It ends in a newline, so that a prompt of the shell begins on its own line.
fn print_stream(engine: &mut Engine, request: Request) -> Result<(), CliError> {
    let terminal = is_terminal();
    let mut show = |text: &str| if terminal { print_text(&printable(text)) } else { print_text(text) };
    let answer = answer::run(engine, request, &AtomicBool::new(false), &mut show)?;
    if answer.text.ends_with('\n') { Ok(()) } else { print_text("\n") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_are_named() {
        assert_eq!(parse_dump("after:fuse"), Ok(PassName::Fuse));
        for wrong in ["fuse", "after:", "after:magic", "before:fuse"] {
            assert!(parse_dump(wrong).unwrap_err().contains("canonicalise, "));
        }
    }
}
