//! Writes the machine that `QWEN_SIM` describes into a folder, as Linux tells it below `/sys` and `/proc`, for `--topology` of
//! `qwen-server`: `QWEN_SIM=sockets=2,switches=2,devices=8 cargo run -p qwen-sim --example machine -- FOLDER`.

#![expect(clippy::print_stderr, reason = "a tool for the command line")]

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let settings = std::env::var("QWEN_SIM").unwrap_or_default();
    let Some(folder) = std::env::args_os().nth(1) else {
        eprintln!("expected a folder to write to");
        return ExitCode::from(2);
    };
    match hal_sim::write_machine(&settings, Path::new(&folder)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error}", folder.to_string_lossy());
            ExitCode::FAILURE
        }
    }
}
