//! Standard output and error as people and programs want them: colour and progress on a terminal only (and no colour where
//! `NO_COLOR` is set), plain text otherwise.

use std::io::{IsTerminal, Write};

use anstyle::{AnsiColor, Style};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::error::CliError;

/// Names of things.
pub const NAME: Style = Style::new().bold();
/// What is said beside the point.
pub const DIM: Style = Style::new().dimmed();
/// The prompt of a conversation.
pub const PROMPT: Style = AnsiColor::Cyan.on_default().bold();

/// Standard output; styles are taken out where they are not wanted.
#[must_use]
pub fn stdout() -> anstream::AutoStream<std::io::StdoutLock<'static>> {
    anstream::AutoStream::auto(std::io::stdout().lock())
}

/// Writes a value as one JSON document.
///
/// # Errors
/// If standard output can't be written.
pub fn print_json(value: &impl Serialize) -> Result<(), CliError> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Writes text as it is, without giving meaning to what is in it.
///
/// # Errors
/// If standard output can't be written.
pub fn print_text(text: &str) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Something the program says besides its results: on a terminal beside them, otherwise on standard error.
///
/// # Errors
/// If the stream can't be written.
pub fn print_notice(text: &str) -> Result<(), CliError> {
    if is_terminal() {
        return print_text(text);
    }
    Ok(std::io::stderr().lock().write_all(text.as_bytes())?)
}

/// Text of a model or file that goes to a terminal: control characters but newline and tab are shown as escapes, so that
/// it can't move the cursor or change the window's title.
#[must_use]
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() && !matches!(character, '\n' | '\t') {
            shown.extend(character.escape_default());
        } else {
            shown.push(character);
        }
    }
    shown
}

/// Whether standard output is a terminal.
#[must_use]
pub fn is_terminal() -> bool {
    std::io::stdout().is_terminal()
}

/// A progress bar on standard error; it draws nothing where that is no terminal.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar for bytes.
    #[must_use]
    pub fn bytes(what: &str) -> Self {
        Self::new(what, "{msg} [{bar:30}] {bytes}/{total_bytes} {eta}")
    }

    /// A bar for steps.
    #[must_use]
    pub fn steps(what: &str) -> Self {
        Self::new(what, "{msg} [{bar:30}] {percent}%")
    }

    fn new(what: &str, template: &str) -> Self {
        let target =
            if std::io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(0), target);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(what.to_owned());
        Self(bar)
    }

    /// So much of a file's bytes is here.
    pub fn file(&self, name: &str, done: u64, total: u64) {
        self.0.set_message(printable(name));
        self.set(done, total);
    }

    /// So much of so much is done.
    pub fn set(&self, done: u64, total: u64) {
        self.0.set_length(total);
        self.0.set_position(done);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// A number of bytes for people.
#[must_use]
pub fn bytes(n: u64) -> String {
    let mut value = n as f64;
    let mut unit = "B";
    for larger in ["KiB", "MiB", "GiB", "TiB", "PiB"] {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = larger;
    }
    if unit == "B" { format!("{n} B") } else { format!("{value:.1} {unit}") }
}

/// A number with its thousands apart.
#[must_use]
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_for_people() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(u64::MAX), "16384.0 PiB");
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1_234_567), "1,234,567");
    }

    #[test]
    fn a_model_cannot_steer_the_terminal() {
        assert_eq!(printable("a\u{1b}]0;x\u{7}\nb\tc中"), "a\\u{1b}]0;x\\u{7}\nb\tc中");
    }
}
