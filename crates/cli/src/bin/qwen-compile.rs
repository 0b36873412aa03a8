//! The program `qwen-compile`.

use std::process::ExitCode;

use qwen_cli::commands::compile::Compile;
use qwen_cli::entry;

fn main() -> ExitCode {
    entry::main(|command: Compile| command.run())
}
