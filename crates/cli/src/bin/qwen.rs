//! The program `qwen`.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use qwen_cli::commands::{chat::Chat, devices::Devices, generate::Generate, models::Models, tokenize::Tokenize};
use qwen_cli::entry;

const EXAMPLES: &str = "\
Examples:
  qwen chat
  qwen generate --chat --prompt \"Why is the sky blue?\"
  qwen models inspect smollm2

RUST_LOG=debug logs to standard error; NO_COLOR=1 turns colour off.";

/// Runs language models on this machine
#[derive(Debug, Parser)]
#[command(name = "qwen", version, max_term_width = 100, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Chat(Chat),
    Generate(Generate),
    Models(Models),
    Tokenize(Tokenize),
    Devices(Devices),
}

fn main() -> ExitCode {
    entry::main(|cli: Cli| match cli.command {
        Command::Chat(command) => command.run(),
        Command::Generate(command) => command.run(),
        Command::Models(command) => command.run(),
        Command::Tokenize(command) => command.run(),
        Command::Devices(command) => command.run(),
    })
}
