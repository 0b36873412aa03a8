//! The program `qwen-server`.

use std::process::ExitCode;

fn main() -> ExitCode {
    qwen_cli::server::main()
}
