//! Where settings come from: the command line, else the environment, else a file, else the defaults.
//!
//! The options of the command line are the one list of settings. What the environment and the file say is put into words of
//! the command line that were not given there, so all three are checked by the same parser and told in the same words. Names
//! may be written with hyphens or underscores, and by the aliases below.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::Path;

use clap::{ArgAction, Command};
use toml::{Table, Value};

use crate::error::CliError;

/// Variables of the environment begin so: `QWEN_SERVER_MAX_BATCH_SIZE`.
pub(super) const PREFIX: &str = "QWEN_SERVER_";
/// The option that names the file.
const CONFIG: &str = "config";

/// Names of other servers for our settings.
const ALIASES: &[(&str, &str)] = &[
    ("max-model-len", "max-seq-len"),
    ("ctx-size", "max-seq-len"),
    ("max-num-seqs", "max-batch-size"),
    ("parallel", "max-batch-size"),
    ("max-num-batched-tokens", "prefill-chunk-size"),
    ("chunked-prefill-size", "prefill-chunk-size"),
    ("ssl-certfile", "tls-certificate"),
    ("ssl-keyfile", "tls-key"),
    ("alias", "served-model-name"),
    ("reasoning-format", "reasoning-parser"),
];

/// Where a setting comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// The command line.
    CommandLine,
    /// The environment.
    Environment,
    /// The file.
    File,
}

impl Source {
    /// For people.
    #[must_use]
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::CommandLine => "command line",
            Self::Environment => "environment",
            Self::File => "configuration file",
        }
    }
}

/// Words for the parser, and where each setting comes from.
#[derive(Debug, Default)]
pub(super) struct Layered {
    /// Words, the program's name first.
    pub(super) words: Vec<OsString>,
    /// Setting to source.
    pub(super) sources: BTreeMap<String, Source>,
}

/// A name as the parser knows it.
fn canonical(name: &str) -> String {
    let name = name.to_lowercase().replace('_', "-");
    ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, ours)| (*ours).to_owned())
}

/// Puts the layers together.
///
/// # Errors
/// If the file can't be read, or names a setting that does not exist.
pub(super) fn layer(
    command: &Command,
    words: impl IntoIterator<Item = OsString>,
    environment: impl IntoIterator<Item = (String, String)>,
) -> Result<Layered, CliError> {
    let mut layered = Layered::default();
    for word in words {
        let (word, name) = normalised(word);
        let name = name.or_else(|| named_short(command, &word));
        layered.words.push(word);
        if let Some(name) = name {
            layered.sources.insert(name, Source::CommandLine);
        }
    }
    let mut settings = BTreeMap::new();
    for (variable, value) in environment {
        let Some(name) = variable.strip_prefix(PREFIX) else { continue };
        let name = canonical(name);
        known(command, &name, &variable)?;
        settings.insert(name, (Source::Environment, vec![value]));
    }
    if let Some(path) = config_path(&layered.words, &settings) {
        for (name, values) in read(command, Path::new(&path))? {
            settings.entry(name).or_insert((Source::File, values));
        }
    }
    for (name, (source, values)) in settings {
        if layered.sources.contains_key(&name) {
            continue;
        }
        for value in &values {
            layered.words.push(format!("--{name}={value}").into());
        }
        if !values.is_empty() {
            layered.sources.insert(name, source);
        }
    }
    Ok(layered)
}

/// A word with its name as the parser knows it, and that name if it is an option.
fn normalised(word: OsString) -> (OsString, Option<String>) {
    let Some(text) = word.to_str().filter(|text| text.len() > 2 && text.starts_with("--")) else {
        return (word, None);
    };
    let (name, value) = match text[2..].split_once('=') {
        Some((name, value)) => (canonical(name), Some(value)),
        None => (canonical(&text[2..]), None),
    };
    let word = value.map_or_else(|| format!("--{name}"), |value| format!("--{name}={value}"));
    (word.into(), Some(name))
}

/// The name of the option that a word such as `-t`, `-t4` or `-t=4` gives. The word stays as it is: the parser knows it, and
/// only what else is set must be told that it was given.
fn named_short(command: &Command, word: &OsStr) -> Option<String> {
    let text = word.to_string_lossy();
    // Of `--name` it is a hyphen, which no option has.
    let short = text.strip_prefix('-')?.chars().next()?;
    let mut options = command.get_arguments().filter(|argument| argument.get_action().takes_values());
    options.find(|argument| argument.get_short() == Some(short))?.get_long().map(str::to_owned)
}

fn config_path(words: &[OsString], settings: &BTreeMap<String, (Source, Vec<String>)>) -> Option<String> {
    let option = format!("--{CONFIG}");
    let mut words = words.iter().filter_map(|word| word.to_str());
    while let Some(word) = words.next() {
        if word == option {
            return words.next().map(str::to_owned);
        }
        if let Some(path) = word.strip_prefix(&option).and_then(|rest| rest.strip_prefix('=')) {
            return Some(path.to_owned());
        }
    }
    settings.get(CONFIG).and_then(|(_, values)| values.first().cloned())
}

fn read(command: &Command, path: &Path) -> Result<Vec<(String, Vec<String>)>, CliError> {
    let text = std::fs::read_to_string(path).map_err(CliError::file(path, "read"))?;
    let shown = path.display().to_string();
    let wrong = |expected: &str, found: String| CliError::input(&shown, expected, found, "see docs/qwen-server.md");
    let table: Table = toml::from_str(&text).map_err(|error| wrong("a TOML file", error.to_string()))?;
    let mut settings = Vec::new();
    for (key, value) in table {
        let name = canonical(&key);
        known(command, &name, &format!("{shown}: {key}"))?;
        let scalar = |value: &Value| match value {
            Value::String(text) => Some(text.clone()),
            Value::Integer(number) => Some(number.to_string()),
            Value::Float(number) => Some(number.to_string()),
            Value::Boolean(truth) => Some(truth.to_string()),
            _ => None,
        };
        let values = match &value {
            Value::Array(items) => items.iter().map(scalar).collect(),
            value => scalar(value).map(|value| vec![value]),
        };
        let values =
            values.ok_or_else(|| wrong("text, numbers, true, false or a list of them", format!("{key} = {value}")))?;
        settings.push((name, values));
    }
    Ok(settings)
}

fn known(command: &Command, name: &str, shown: &str) -> Result<(), CliError> {
    let takes_value = |action: &ArgAction| matches!(action, ArgAction::Set | ArgAction::Append);
    let exists =
        command.get_arguments().any(|argument| argument.get_long() == Some(name) && takes_value(argument.get_action()));
    if exists {
        return Ok(());
    }
    Err(CliError::input(
        shown,
        "a setting of qwen-server",
        "a name that it does not have",
        "`qwen-server --help` lists them",
    ))
}

#[cfg(test)]
mod tests {
    use clap::Arg;

    use super::*;

    fn command() -> Command {
        let option = |name: &'static str| Arg::new(name).long(name).action(ArgAction::Append);
        Command::new("x").args(["port", "max-seq-len", "config", "origins"].map(option))
    }

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(Into::into).collect()
    }

    fn text(layered: &Layered) -> String {
        layered.words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_command_line_comes_first_then_the_environment_then_the_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "port = 1\nmax_model_len = 2\norigins = [\"a\", \"b\"]\n").unwrap();
        let line = format!("x --config={}", file.path().display());
        let layered = layer(&command(), words(&line), []).unwrap();
        assert!(text(&layered).ends_with("--max-seq-len=2 --origins=a --origins=b --port=1"), "{layered:?}");
        let environment = || [("QWEN_SERVER_PORT".into(), "5".into()), ("PORT".into(), "9".into())];
        let layered = layer(&command(), words(&line), environment()).unwrap();
        assert!(text(&layered).ends_with("--port=5"), "{layered:?}");
        assert_eq!(layered.sources["port"], Source::Environment);
        let layered = layer(&command(), words(&format!("{line} --port 7 --max_seq_len=8")), environment()).unwrap();
        assert!(text(&layered).ends_with("--port 7 --max-seq-len=8 --origins=a --origins=b"), "{layered:?}");
        assert_eq!(layered.sources["max-seq-len"], Source::CommandLine);
    }

    #[test]
    fn short_options_are_of_the_command_line() {
        let command = || {
            // As the program does: the parser's own options join then.
            let mut command = super::super::options::command();
            command.build();
            command
        };
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "threads = 8").unwrap();
        for given in ["-t 4", "-t4", "-t=4"] {
            let line = format!("x {given} --config {}", file.path().display());
            let layered = layer(&command(), words(&line), [("QWEN_SERVER_PORT".into(), "5".into())]).unwrap();
            assert_eq!(layered.sources["threads"], Source::CommandLine, "{given}");
            assert_eq!(layered.sources["port"], Source::Environment);
            let matches = command().try_get_matches_from(&layered.words).unwrap();
            assert_eq!(matches.get_one::<u32>("threads"), Some(&4), "{given}");
        }
        let line = format!("x --config {}", file.path().display());
        assert_eq!(layer(&command(), words(&line), []).unwrap().sources["threads"], Source::File);
    }

    #[test]
    fn names_that_do_not_exist_are_told() {
        let error = layer(&command(), words("x"), [("QWEN_SERVER_PROT".into(), "1".into())]).unwrap_err();
        assert!(error.to_string().contains("QWEN_SERVER_PROT"), "{error}");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "prot = 1").unwrap();
        let line = format!("x --config {}", file.path().display());
        assert!(layer(&command(), words(&line), []).unwrap_err().to_string().contains("prot"));
        std::fs::write(file.path(), "port = {a = 1}").unwrap();
        assert!(layer(&command(), words(&line), []).unwrap_err().to_string().contains("port"));
    }
}
