//! What both programs' `main` share: arguments in, an exit code out.
//!
//! 0 = done (also when the reader of the output went away, as `head` does), 1 = failed with one sentence on standard error,
//! 2 = wrong usage. A defect of this program is told in one sentence too, never as a trace.

use std::any::Any;
use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::panic;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anstyle::{AnsiColor, Style};
use clap::Parser;
use tracing_subscriber::EnvFilter;

use crate::error::{CliError, sentence};
use crate::plugins;

const ERROR_STYLE: Style = AnsiColor::Red.on_default().bold();

static START: OnceLock<Instant> = OnceLock::new();

/// Time since the program began.
#[must_use]
pub fn since_start() -> Duration {
    START.get_or_init(Instant::now).elapsed()
}

/// Parses the arguments and runs the command.
pub fn main<C: Parser>(run: impl FnOnce(C) -> Result<(), CliError>) -> ExitCode {
    start(|words| C::try_parse_from(words).map(Ok), |_| watch_log(), run)
}

/// As [`main`], for programs with their own way from words to arguments, and their own log.
pub fn start<C>(
    parse: impl FnOnce(Vec<OsString>) -> Result<Result<C, CliError>, clap::Error>,
    log: impl FnOnce(&C),
    run: impl FnOnce(C) -> Result<(), CliError>,
) -> ExitCode {
    START.get_or_init(Instant::now);
    if let Some(passed) = plugins::probe_child() {
        return if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let arguments = match parse(std::env::args_os().collect()) {
        Ok(Ok(arguments)) => arguments,
        Ok(Err(error)) => {
            tell(&sentence(&error));
            return ExitCode::from(2);
        }
        Err(error) => {
            // A closed pipe is no error; there is nowhere else to tell of another.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(2) } else { ExitCode::SUCCESS };
        }
    };
    log(&arguments);
    panic::set_hook(Box::new(|defect| tracing::debug!("{defect}")));
    match panic::catch_unwind(panic::AssertUnwindSafe(|| run(arguments))) {
        Ok(Ok(()) | Err(CliError::BrokenPipe)) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            tell(&sentence(&error));
            ExitCode::FAILURE
        }
        Err(payload) => {
            let what = panic_text(payload.as_ref());
            tell(&format!("defect in this program, please report it with the command that you ran: {what}"));
            ExitCode::FAILURE
        }
    }
}

fn panic_text(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message").lines().collect::<Vec<_>>().join(" ")
}

fn tell(text: &str) {
    // Nowhere else to tell of a failure to tell.
    let _ = writeln!(anstream::stderr(), "{ERROR_STYLE}error:{ERROR_STYLE:#} {text}");
}

/// `RUST_LOG` chooses what is logged to standard error; warnings by default.
fn watch_log() {
    let filter = EnvFilter::builder().with_default_directive(tracing::Level::WARN.into()).from_env_lossy();
    // Fails only if a logger exists already, which is as well.
    let _ =
        tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colour()).with_writer(std::io::stderr).try_init();
}

/// Whether standard error wants colour.
#[must_use]
pub fn colour() -> bool {
    std::io::stderr().is_terminal() && anstream::stderr().current_choice() != anstream::ColorChoice::Never
}
