//! The program `qwen-eval`.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use qwen_cli::entry;
use qwen_cli::eval::{compare::Compare, kl::Kl, logits::LogitsCommand};

const EXAMPLES: &str = "\
Examples:
  qwen-eval logits --tokens 1,2,3 --output logits.safetensors
  qwen-eval compare --a exact.safetensors --b logits.safetensors
  qwen-eval kl --file corpus.txt";

/// Measures how close one computation of a model is to another
#[derive(Debug, Parser)]
#[command(name = "qwen-eval", version, max_term_width = 100, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Logits(LogitsCommand),
    Compare(Compare),
    Kl(Kl),
}

fn main() -> ExitCode {
    entry::main(|cli: Cli| match cli.command {
        Command::Logits(command) => command.run(),
        Command::Compare(command) => command.run(),
        Command::Kl(command) => command.run(),
    })
}
