//! `qwen chat`: a conversation.
//!
//! In: lines of a terminal, or of a pipe (one message each). Out: answers as they come. Ctrl-C ends an answer, not the
//! program; what there was of the answer stays in the conversation.

use std::hash::{BuildHasher, RandomState};
use std::io::{BufRead, IsTerminal};
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;
use qwen_engine::{Engine, FinishReason, Request, SamplingParams};
use qwen_models::chat_template::{ChatTemplate, TemplateInput};
use qwen_models::tokenizer::EncodeOptions;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use serde_json::{Value, json};

use crate::answer;
use crate::arguments::{ModelArgument, RuntimeArguments, SamplingArguments};
use crate::console::{self, print_notice, print_text};
use crate::error::{CliError, sentence};
use crate::generation_config::GenerationConfig;
use crate::model::{self, Wish};

const EXAMPLES: &str = "\
Examples:
  qwen chat
  qwen chat --model Qwen2.5-7B-Instruct-Q4_K_M.gguf --system \"Answer in one sentence.\"
  qwen chat --temperature 0 --seed 1
  printf 'Hello\\nWhat did I say?\\n' | qwen chat

Ctrl-C stops an answer; at the prompt, Ctrl-C twice or Ctrl-D leaves. /help lists the commands.
From a pipe each line is a message or a command; answers go to standard output, notices to
standard error. Sampling that is not given comes from the model's generation_config.json, else
the temperature is 0.7; without --seed it is drawn anew.";

const HELP: &str = "\
/clear           forget the conversation
/system TEXT     forget the conversation and set the system message (without TEXT: show it)
/regenerate      answer the last message again
/exit            leave (or Ctrl-D)
/help            show this
";

/// Temperature where neither the user nor the model asks for one.
const DEFAULT_TEMPERATURE: f32 = 0.7;
/// Exit code of a program that a Ctrl-C ended.
const INTERRUPTED: i32 = 130;

/// Whether an answer is being computed, and whether it is to end.
static ANSWERING: AtomicBool = AtomicBool::new(false);
static STOP: AtomicBool = AtomicBool::new(false);

/// Talk with a model
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Chat {
    #[command(flatten)]
    model: ModelArgument,
    /// The system message
    #[arg(long, short, value_name = "TEXT")]
    system: Option<String>,
    /// Most tokens of an answer [default: what the context has room for]
    #[arg(long, short = 'n', value_name = "N")]
    max_tokens: Option<u32>,
    #[command(flatten)]
    sampling: SamplingArguments,
    #[command(flatten)]
    runtime: RuntimeArguments,
}

/// A message as chat templates want it.
pub(super) fn message(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}

/// The chat template of a loaded model.
pub(super) fn template_of<'a>(engine: &'a Engine, model: &str) -> Result<&'a ChatTemplate, CliError> {
    engine.loaded().chat_template.as_ref().ok_or_else(|| {
        CliError::input(
            model,
            "a chat template",
            "none: it is no chat model",
            "continue plain text with `qwen generate`",
        )
    })
}

impl Chat {
    /// Runs the command.
    ///
    /// # Errors
    /// If the model can't be loaded, the terminal fails, or (from a pipe) a message can't be answered.
    pub fn run(self) -> Result<(), CliError> {
        ctrlc::set_handler(on_interrupt)?;
        let path = model::resolve(&self.model.model)?;
        let engine = model::load(&self.model.model, &self.runtime, &Wish::default())?;
        template_of(&engine, &self.model.model)?;
        let base = SamplingParams { temperature: DEFAULT_TEMPERATURE, ..SamplingParams::default() };
        let defaults = SamplingParams {
            seed: RandomState::new().hash_one(std::process::id()),
            max_tokens: self.max_tokens.unwrap_or(u32::MAX),
            ..GenerationConfig::read(&path).over(base)
        };
        let sampling = answer::sampling(defaults, &self.sampling);
        let mut conversation =
            Conversation { engine, model: self.model.model, sampling, system: self.system, messages: Vec::new() };
        if std::io::stdin().is_terminal() { conversation.talk() } else { conversation.answer_lines() }
    }
}

/// Called on Ctrl-C, on a thread of its own.
#[expect(clippy::exit, reason = "nothing is being answered, so Ctrl-C means what it means to any program")]
fn on_interrupt() {
    if ANSWERING.load(Ordering::SeqCst) {
        STOP.store(true, Ordering::SeqCst);
    } else {
        std::process::exit(INTERRUPTED);
    }
}

struct Conversation {
    engine: Engine,
    model: String,
    sampling: SamplingParams,
    system: Option<String>,
    messages: Vec<Value>,
}

/// What to do after a line.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Answer,
    Nothing,
    Leave,
}

impl Conversation {
    fn talk(&mut self) -> Result<(), CliError> {
        let mut editor = DefaultEditor::new()?;
        let style = console::PROMPT;
        let coloured = anstream::stdout().current_choice() != anstream::ColorChoice::Never;
        let prompt = if coloured { format!("{style}>{style:#} ") } else { "> ".to_owned() };
        print_text(&format!("{}: /help lists the commands, Ctrl-D leaves\n", self.model))?;
        let mut interrupted = false;
        loop {
            match editor.readline(&prompt) {
                Ok(line) => {
                    interrupted = false;
                    // Fails only if history is full or off, which is no reason to stop talking.
                    let _ = editor.add_history_entry(&line);
                    match self.take(&line)? {
                        Next::Leave => return Ok(()),
                        Next::Nothing => {}
                        Next::Answer => self.answer_or_tell()?,
                    }
                }
                Err(ReadlineError::Interrupted) if !interrupted => {
                    interrupted = true;
                    print_text("Ctrl-C again, or Ctrl-D, to leave\n")?;
                }
                Err(ReadlineError::Interrupted | ReadlineError::Eof) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn answer_lines(&mut self) -> Result<(), CliError> {
        for line in std::io::stdin().lock().lines() {
            match self.take(&line.map_err(CliError::file("standard input", "read"))?)? {
                Next::Leave => break,
                Next::Nothing => {}
                Next::Answer => self.answer()?,
            }
        }
        Ok(())
    }

    /// A message, or a command.
    fn take(&mut self, line: &str) -> Result<Next, CliError> {
        let line = line.trim();
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match word {
            "" => Ok(Next::Nothing),
            "/exit" | "/quit" | "/bye" => Ok(Next::Leave),
            "/help" => print_notice(HELP).map(|()| Next::Nothing),
            "/clear" => {
                self.messages.clear();
                Ok(Next::Nothing)
            }
            "/system" if rest.is_empty() => {
                let text = self.system.as_deref().unwrap_or("none, or the template's own");
                print_notice(&format!("system message: {text}\n")).map(|()| Next::Nothing)
            }
            "/system" => {
                self.system = Some(rest.trim().to_owned());
                self.messages.clear();
                Ok(Next::Nothing)
            }
            "/regenerate" => self.forget_answer(),
            _ if word.starts_with('/') && !word.trim_start_matches('/').contains('/') => {
                print_notice(&format!("no command {word}; /help lists them\n")).map(|()| Next::Nothing)
            }
            _ => {
                self.messages.push(message("user", line));
                Ok(Next::Answer)
            }
        }
    }

    fn forget_answer(&mut self) -> Result<Next, CliError> {
        if self.messages.last().is_some_and(|last| last["role"] == "assistant") {
            self.messages.pop();
            // Another answer is wanted, so other random numbers.
            self.sampling.seed = self.sampling.seed.wrapping_add(1);
        }
        match self.messages.is_empty() {
            false => Ok(Next::Answer),
            true => print_notice("there is no message to answer yet\n").map(|()| Next::Nothing),
        }
    }

    /// As [`Self::answer`], but what one message can't have, the next one may: it is told, and the message forgotten.
    fn answer_or_tell(&mut self) -> Result<(), CliError> {
        match self.answer() {
            Err(error @ (CliError::Engine(_) | CliError::Template(_) | CliError::Answer(_))) => {
                self.messages.pop();
                print_notice(&format!("{}\n", sentence(&error)))
            }
            result => result,
        }
    }

    fn answer(&mut self) -> Result<(), CliError> {
        let prompt = self.prompt()?;
        let request = Request::new(prompt, self.sampling.clone());
        STOP.store(false, Ordering::SeqCst);
        ANSWERING.store(true, Ordering::SeqCst);
        let terminal = console::is_terminal();
        let mut show = |text: &str| if terminal { print_text(&console::printable(text)) } else { print_text(text) };
        let result = answer::run(&mut self.engine, request, &STOP, &mut show);
        ANSWERING.store(false, Ordering::SeqCst);
        let answer = result?;
        let note = match answer.finish {
            FinishReason::Cancelled => " [stopped]",
            FinishReason::Length if terminal => " [no room for more]",
            _ => "",
        };
        print_text(&format!("{note}\n"))?;
        self.messages.push(message("assistant", &answer.text));
        Ok(())
    }

    fn prompt(&self) -> Result<Vec<u32>, CliError> {
        let mut messages: Vec<Value> = self.system.iter().map(|text| message("system", text)).collect();
        messages.extend(self.messages.iter().cloned());
        let template = template_of(&self.engine, &self.model)?;
        let text = template.render(&TemplateInput {
            messages: &messages,
            add_generation_prompt: true,
            ..TemplateInput::default()
        })?;
        let tokenizer = model::tokenizer_of(&self.engine, &self.model)?;
        Ok(tokenizer.encode(&text, EncodeOptions::TEMPLATE)?)
    }
}
