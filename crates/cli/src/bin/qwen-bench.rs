//! The program `qwen-bench`.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use qwen_cli::bench::kernels::Kernels;
use qwen_cli::bench::throughput::Throughput;
use qwen_cli::entry;

const EXAMPLES: &str = "\
Examples:
  qwen-bench throughput --model smollm2 --prompt 512 --generate 128
  qwen-bench throughput --prompt 0 --depth 4096 --breakdown --json
  qwen-bench kernels --assert";

/// Measures how fast a model runs on this machine
#[derive(Debug, Parser)]
#[command(name = "qwen-bench", version, max_term_width = 100, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Throughput(Throughput),
    Kernels(Kernels),
}

fn main() -> ExitCode {
    entry::main(|cli: Cli| match cli.command {
        Command::Throughput(command) => command.run(),
        Command::Kernels(command) => command.run(),
    })
}
