//! `qwen tokenize`: a text in, its tokens out.

use std::io::{Read, Write};
use std::path::PathBuf;

use clap::Args;
use qwen_models::tokenizer::{EncodeOptions, Tokenizer};
use serde::Serialize;

use crate::arguments::ModelArgument;
use crate::console::{DIM, print_json, printable, stdout};
use crate::error::CliError;
use crate::model;

const EXAMPLES: &str = "\
Examples:
  qwen tokenize --text \"Hello, world\"
  qwen tokenize --model vocab.gguf --file corpus.txt --no-special --json
  printf 'caf\\303\\251' | qwen tokenize --file -

MODEL may also be a tokenizer.json, or a GGUF file with nothing but a vocabulary.
A file need not be valid UTF-8: each byte that is no part of it becomes the token of that byte,
or an error where the vocabulary has none.";

/// Show the tokens of a text
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Tokenize {
    #[command(flatten)]
    model: ModelArgument,
    #[command(flatten)]
    source: Source,
    /// Nothing but the text: no BOS or EOS, and the text of special tokens is plain text
    #[arg(long)]
    no_special: bool,
    /// Print {"ids": […], "tokens": […]}
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Source {
    /// The text
    #[arg(long, short, value_name = "TEXT", allow_hyphen_values = true)]
    text: Option<String>,
    /// A file with the text, - for standard input
    #[arg(long, short, value_name = "FILE")]
    file: Option<PathBuf>,
}

/// What `--json` prints: ids, and the tokens as the vocabulary writes them.
#[derive(Debug, Serialize)]
struct Tokens<'a> {
    ids: &'a [u32],
    tokens: Vec<&'a str>,
}

impl Tokenize {
    /// Runs the command.
    ///
    /// # Errors
    /// If the tokenizer or the text can't be read.
    pub fn run(self) -> Result<(), CliError> {
        let text = self.source.read()?;
        let tokenizer = model::tokenizer(&self.model.model)?;
        let options = if self.no_special { EncodeOptions::LITERAL } else { EncodeOptions::PROMPT };
        let ids = tokenizer.encode_bytes(&text, options)?;
        if self.json {
            let tokens = ids.iter().map(|&id| tokenizer.id_to_token(id).unwrap_or_default()).collect();
            print_json(&Tokens { ids: &ids, tokens })
        } else {
            print_lines(&tokenizer, &ids)
        }
    }
}

impl Source {
    fn read(&self) -> Result<Vec<u8>, CliError> {
        match (&self.text, &self.file) {
            (Some(text), _) => Ok(text.clone().into_bytes()),
            (None, Some(path)) => read_file(path),
            (None, None) => Ok(Vec::new()),
        }
    }
}

/// Longest text that is read; a device without end must not fill the memory.
const MAX_TEXT_BYTES: u64 = 64 << 20;

/// The bytes of a file or pipe; `-` is standard input.
pub(crate) fn read_file(path: &std::path::Path) -> Result<Vec<u8>, CliError> {
    if path.as_os_str() == "-" {
        return read_text(std::io::stdin().lock(), std::path::Path::new("standard input"), MAX_TEXT_BYTES);
    }
    let file = std::fs::File::open(path).map_err(CliError::file(path, "read"))?;
    read_text(file, path, MAX_TEXT_BYTES)
}

fn read_text(source: impl Read, path: &std::path::Path, limit: u64) -> Result<Vec<u8>, CliError> {
    let mut bytes = Vec::new();
    source.take(limit + 1).read_to_end(&mut bytes).map_err(CliError::file(path, "read"))?;
    if bytes.len() as u64 > limit {
        let expected = format!("at most {limit} bytes of text");
        return Err(CliError::input(path.display().to_string(), expected, "more", "pass a shorter text"));
    }
    Ok(bytes)
}

/// One token a line: its id, and its bytes as text in quotes, with what is no text as escapes.
fn print_lines(tokenizer: &Tokenizer, ids: &[u32]) -> Result<(), CliError> {
    let mut out = std::io::BufWriter::new(stdout());
    for &id in ids {
        let text = quoted(&tokenizer.token_bytes(id));
        let mark = if tokenizer.is_special(id) { "  special" } else { "" };
        writeln!(out, "{id:>8}  {text}{DIM}{mark}{DIM:#}")?;
    }
    writeln!(out, "{DIM}{} tokens{DIM:#}", ids.len())?;
    out.flush()?;
    Ok(())
}

/// Bytes in quotes: valid UTF-8 as text, the rest as `\xHH`.
fn quoted(bytes: &[u8]) -> String {
    let mut text = String::from("\"");
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '"' | '\\' | '\n' | '\t' | '\r' => text.extend(character.escape_default()),
                _ => text.push_str(&printable(character.encode_utf8(&mut [0; 4]))),
            }
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
    }
    text.push('"');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_in_quotes() {
        assert_eq!(quoted("a \"中\"\n".as_bytes()), "\"a \\\"中\\\"\\n\"");
        assert_eq!(quoted(&[0xE4, 0xB8]), "\"\\xe4\\xb8\"");
        assert_eq!(quoted(b"\x1b["), "\"\\u{1b}[\"");
    }

    #[test]
    fn a_text_without_end_is_refused() {
        let name = std::path::Path::new("x");
        assert_eq!(read_text(&b"abcd"[..], name, 4).unwrap(), b"abcd");
        let error = read_text(std::io::repeat(0), name, 4).unwrap_err();
        assert_eq!(error.to_string(), "x: expected at most 4 bytes of text, found more; pass a shorter text");
    }
}
