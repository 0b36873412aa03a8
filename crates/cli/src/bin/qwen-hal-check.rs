//! The program `qwen-hal-check`.

use std::process::ExitCode;

use qwen_cli::{entry, hal_check};

fn main() -> ExitCode {
    if hal_check::run_as_child() {
        return ExitCode::SUCCESS;
    }
    entry::main(|command: hal_check::HalCheck| command.run())
}
