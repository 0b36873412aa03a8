//! `qwen-server`: from settings to a running server.

mod devices;
mod layers;
mod load;
mod options;
mod pooling;
mod traces;
mod watch;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::{ArgMatches, FromArgMatches};
use qwen_server::{Config, ServeError, Stage, serve};
use tracing_subscriber::EnvFilter;

use crate::entry;
use crate::error::CliError;
use layers::{Layered, layer};
use options::{LogFormat, Options};

/// Threads that serve connections. They only move bytes; prompts are rendered and encoded on others.
const CONNECTION_THREADS: usize = 2;
/// Most threads that render and encode.
const WORKERS: usize = 32;

/// The program.
#[must_use]
pub fn main() -> ExitCode {
    entry::start(parse, |(options, _)| watch_log(options.log_format), |(options, settings)| run(options, &settings))
}

/// What was set, where, to what.
type Settings = Vec<String>;

fn parse(words: Vec<OsString>) -> Result<Result<(Options, Settings), CliError>, clap::Error> {
    let mut command = options::command();
    command.build();
    let layered = match layer(&command, words, std::env::vars()) {
        Ok(layered) => layered,
        Err(error) => return Ok(Err(error)),
    };
    let matches = command.try_get_matches_from_mut(&layered.words)?;
    let options = Options::from_arg_matches(&matches)?;
    Ok(Ok((options, settings(&matches, &layered))))
}

/// One line for each setting that is not the default. Keys stay secret, and what else a URL may hold of them.
fn settings(matches: &ArgMatches, layered: &Layered) -> Settings {
    let line = |(name, source): (&String, &layers::Source)| {
        let id = name.replace('-', "_");
        let values = matches.try_get_raw(&id).ok().flatten()?;
        let values: Vec<_> = values.map(|value| value.to_string_lossy().into_owned()).collect();
        let shown = match id.as_str() {
            "api_key" => "(secret)".to_owned(),
            "otlp_endpoint" => values.iter().map(|url| Config::shown_endpoint(url)).collect::<Vec<_>>().join(" "),
            _ => values.join(" "),
        };
        Some(format!("{id} = {shown} ({})", source.name()))
    };
    layered.sources.iter().filter_map(line).collect()
}

/// `RUST_LOG` chooses what is logged to standard error; by default what the server does, and warnings of the rest.
fn watch_log(format: LogFormat) {
    let directives = std::env::var("RUST_LOG").unwrap_or_else(|_| "warn,qwen_server=info".to_owned());
    let builder = tracing_subscriber::fmt().with_env_filter(EnvFilter::new(directives)).with_writer(std::io::stderr);
    // Fails only if a logger exists already, which is as well.
    let _ = match format {
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
        LogFormat::Text => builder.with_ansi(entry::colour()).try_init(),
    };
}

fn tell(text: &str) {
    // Nowhere else to tell of a failure to tell.
    let _ = writeln!(std::io::stderr(), "qwen-server: {text}");
}

fn run(options: Options, settings: &Settings) -> Result<(), CliError> {
    options.check()?;
    settings.iter().for_each(|line| tell(line));
    let keys = options.keys()?;
    let config = options.server_config();
    if !config.address.ip().is_loopback() && !keys.required() {
        tell("warning: others can reach this address and need no key; give --api_keys_file or --host 127.0.0.1");
    }
    let scheme = if config.tls.is_some() { "https" } else { "http" };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(CONNECTION_THREADS)
        .max_blocking_threads(WORKERS)
        .thread_name("http")
        .enable_all()
        .build()
        .map_err(CliError::Runtime)?;
    let name = options.model.model.clone();
    let collector = traces::source(options.otlp_endpoint.as_deref(), |name| std::env::var(name).ok());
    let loading = Box::new(move || load::load(&options).map_err(|error| crate::error::sentence(&error)));
    let stage = |stage: Stage| match stage {
        Stage::Listening(address) => tell(&format!("listening on {scheme}://{address}, loading {name}")),
        Stage::Ready(address, time) => {
            tell(&format!("ready on {scheme}://{address} after {:.1} s", time.as_secs_f64()));
        }
        Stage::Draining(0) => tell("stopping"),
        Stage::Draining(active) => tell(&format!("stopping after {active} requests; a second signal stops at once")),
    };
    let result = runtime.block_on(serve(config, keys, loading, stage));
    // Work that was left to itself must not hold up the end.
    runtime.shutdown_background();
    match result {
        // The server does not know which of three places the URL came from.
        Err(ServeError::Traces) => Err(traces::no_url(collector)),
        result => Ok(result?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_told() {
        let url = "http://me:secret@a:4318/secret?key=secret";
        let words = ["x", "--otlp_endpoint", url, "--api_key", "secret", "--port", "1"].map(OsString::from);
        let (_, told) = parse(words.into()).unwrap().unwrap();
        let told = told.join("\n");
        assert!(told.contains("otlp_endpoint = http://a:4318 (command line)"), "{told}");
        assert!(told.contains("port = 1 (command line)") && !told.contains("me:"), "{told}");
        assert!(told.contains("api_key = (secret)") && told.matches("secret").count() == 1, "{told}");
    }
}
