//! The settings of `qwen-server`, and what becomes of them.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Command, CommandFactory, Parser, ValueEnum};
use qwen_server::config::Warmup;
use qwen_server::{Config, Keys};
use serde::Deserialize;

use super::traces::endpoint;
use crate::arguments::{ModelArgument, RuntimeArguments};
use crate::error::CliError;

const EXAMPLES: &str = "\
Examples:
  qwen-server
  qwen-server --model Qwen2.5-7B-Instruct-Q4_K_M.gguf --max_batch_size 32 --max_seq_len 8192
  qwen-server --host 0.0.0.0 --api_keys_file keys.toml --ssl_certfile cert.pem --ssl_keyfile key.pem
  QWEN_SERVER_PORT=9000 qwen-server --config server.toml

Names are written with hyphens or underscores alike. A setting comes from the command line, else from
the environment (QWEN_SERVER_NAME), else from the file of --config, else it is the default; what is
not the default is told at the start with its source. docs/qwen-server.md has all of it.";

/// Form of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum LogFormat {
    /// One JSON object a line
    Json,
    /// Lines for people
    Text,
}

/// How the KV pool takes memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum MemoryPoolMode {
    /// Blocks of the KV cache are taken as they are needed
    Balanced,
    /// Not supported yet
    LargeFirst,
    /// Not supported yet
    Compact,
}

/// Serves a model over HTTP by the protocols of OpenAI and Anthropic
#[derive(Debug, Parser)]
#[command(name = "qwen-server", version, max_term_width = 100, after_help = EXAMPLES)]
pub(super) struct Options {
    #[command(flatten)]
    pub(super) model: ModelArgument,
    /// Names that requests may use, the first one in answers [default: the model's name, without folders and endings]
    #[arg(long, value_name = "NAME", num_args = 1.., help_heading = "Model")]
    pub(super) served_model_name: Vec<String>,
    /// Form in which the model writes calls of tools: auto, none, hermes, deepseek_v3, deepseek_v31, llama3_json
    #[arg(long, value_name = "NAME", default_value = "auto", help_heading = "Model")]
    pub(super) tool_call_parser: String,
    /// How the model thinks: auto, none, qwen3 (if it writes <think>), deepseek_r1 (always first)
    #[arg(long, value_name = "NAME", default_value = "auto", help_heading = "Model")]
    pub(super) reasoning_parser: String,
    /// How texts become vectors at /v1/embeddings: auto (what the model says, else last), last, mean, none (no embeddings)
    #[arg(long, value_name = "NAME", default_value = "auto", help_heading = "Model")]
    pub(super) pooling: String,
    #[command(flatten)]
    pub(super) runtime: RuntimeArguments,
    /// Most requests that are computed together
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096), help_heading = "Runtime")]
    pub(super) max_batch_size: u32,
    /// Tokens that the KV cache holds over all requests [default: four requests of the longest context]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Runtime")]
    pub(super) kv_cache_tokens: Option<u64>,
    /// Most requests in flight, waiting ones included; more are refused with 429
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..), help_heading = "Runtime")]
    pub(super) max_queue: u32,
    /// Look after silent corruption: known-answer tests of each device, and steps computed twice now and then
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", default_value_t = true, action = clap::ArgAction::Set, help_heading = "Devices")]
    pub(super) guard: bool,
    /// Seconds between two known-answer tests of a device, at least 1
    #[arg(long, value_name = "S", default_value_t = 60.0, value_parser = seconds, help_heading = "Devices")]
    pub(super) guard_interval: f64,
    /// Folder with `sys` and `proc` of the machine that tells how near devices are to network interfaces [default: /]
    #[arg(long, value_name = "DIR", help_heading = "Devices")]
    pub(super) topology: Option<PathBuf>,
    /// How the KV pool takes memory
    #[arg(long, value_enum, default_value_t = MemoryPoolMode::Balanced, help_heading = "Runtime")]
    pub(super) memory_pool_mode: MemoryPoolMode,
    /// Attention without a matrix of scores; there is no other
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", default_value_t = true, action = clap::ArgAction::Set, help_heading = "Runtime")]
    pub(super) enable_flash_attn: bool,
    /// Compute something before the server is ready, so that the first request is as quick as the others
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", default_value_t = true, action = clap::ArgAction::Set, help_heading = "Warm-up")]
    pub(super) warmup: bool,
    /// Text to compute
    #[arg(long, value_name = "TEXT", default_value = "Hello", help_heading = "Warm-up")]
    pub(super) warmup_prompt: String,
    /// Tokens to generate
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096), help_heading = "Warm-up")]
    pub(super) warmup_tokens: u32,
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", help_heading = "Network")]
    pub(super) host: IpAddr,
    /// Port to listen on, 0 = any that is free
    #[arg(long, short, value_name = "N", default_value_t = 8000, help_heading = "Network")]
    pub(super) port: u16,
    /// Hosts that requests may name; * = any [default: local names on a local address, else any]
    #[arg(long, value_name = "NAME", num_args = 1.., help_heading = "Network")]
    pub(super) allowed_hosts: Vec<String>,
    /// Origins whose web pages may read answers, such as https://chat.example; * = any [default: none]
    #[arg(long, value_name = "ORIGIN", num_args = 1.., help_heading = "Network")]
    pub(super) allowed_origins: Vec<String>,
    /// Certificates in PEM form: HTTPS instead of HTTP
    #[arg(long, value_name = "FILE", requires = "tls_key", help_heading = "Network")]
    pub(super) tls_certificate: Option<PathBuf>,
    /// Private key in PEM form
    #[arg(long, value_name = "FILE", requires = "tls_certificate", help_heading = "Network")]
    pub(super) tls_key: Option<PathBuf>,
    /// A key that clients must send (may be repeated); better in the environment than here, where others see it
    #[arg(long, value_name = "KEY", help_heading = "Access")]
    pub(super) api_key: Vec<String>,
    /// Hashed keys with limits, in TOML
    #[arg(long, value_name = "FILE", help_heading = "Access")]
    pub(super) api_keys_file: Option<PathBuf>,
    /// Let clients choose priorities
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", default_value_t = false, action = clap::ArgAction::Set, help_heading = "Access")]
    pub(super) allow_priority: bool,
    /// Offer /admin to keys of administrators
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", default_value_t = false, action = clap::ArgAction::Set, help_heading = "Access")]
    pub(super) admin: bool,
    /// Offer /docs and /openapi.json
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", default_value_t = true, action = clap::ArgAction::Set, help_heading = "Access")]
    pub(super) docs: bool,
    /// Most bytes of a body
    #[arg(long, value_name = "N", default_value_t = 16 << 20, help_heading = "Limits")]
    pub(super) max_body_bytes: usize,
    /// Most bytes of a request's headers
    #[arg(long, value_name = "N", default_value_t = 32 << 10, help_heading = "Limits")]
    pub(super) max_header_bytes: usize,
    /// Most connections at a time
    #[arg(long, value_name = "N", default_value_t = 4096, help_heading = "Limits")]
    pub(super) max_connections: usize,
    /// Most answers of a request (n)
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=128), help_heading = "Limits")]
    pub(super) max_n: u32,
    /// Seconds for headers to arrive
    #[arg(long, value_name = "S", default_value_t = 15.0, value_parser = seconds, help_heading = "Limits")]
    pub(super) header_timeout: f64,
    /// Seconds for a body to arrive
    #[arg(long, value_name = "S", default_value_t = 30.0, value_parser = seconds, help_heading = "Limits")]
    pub(super) body_timeout: f64,
    /// Seconds for an answer, 0 = as long as it takes
    #[arg(long, value_name = "S", default_value_t = 3600.0, value_parser = seconds, help_heading = "Limits")]
    pub(super) request_timeout: f64,
    /// Seconds for requests in flight to end when the server stops
    #[arg(long, value_name = "S", default_value_t = 30.0, value_parser = seconds, help_heading = "Limits")]
    pub(super) shutdown_timeout: f64,
    /// Seconds without a step, while there is work, after which the server is not ready
    #[arg(long, value_name = "S", default_value_t = 30.0, value_parser = seconds, help_heading = "Limits")]
    pub(super) stall_timeout: f64,
    /// Send `reasoning` beside `reasoning_content`, as newer clients of vLLM want it
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", default_value_t = false, action = clap::ArgAction::Set, help_heading = "Protocol")]
    pub(super) reasoning_alias: bool,
    /// Form of the log on standard error
    #[arg(long, value_enum, default_value_t = LogFormat::Text, help_heading = "Log")]
    pub(super) log_format: LogFormat,
    /// Send a span of each request to this OpenTelemetry collector, by OTLP over HTTP, such as http://127.0.0.1:4318
    /// [default: OTEL_EXPORTER_OTLP_ENDPOINT, else nowhere]
    #[arg(long, value_name = "URL", help_heading = "Log")]
    pub(super) otlp_endpoint: Option<String>,
    /// Settings in TOML, by the names of these options
    #[arg(long, value_name = "FILE", help_heading = "Settings")]
    pub(super) config: Option<PathBuf>,
}

/// The parser. Of a setting that is given twice the last one counts, but lists go on.
pub(super) fn command() -> Command {
    Options::command().mut_args(|argument| match argument.get_action() {
        ArgAction::Set => {
            let itself = argument.get_id().clone();
            argument.overrides_with(itself)
        }
        _ => argument,
    })
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if (0.0..=1e9).contains(&number) => Ok(number),
        _ => Err("expected seconds from 0 to 1000000000".into()),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KeysFile {
    keys: Vec<qwen_server::KeyEntry>,
}

impl Options {
    /// What the command line can't say of values that exclude each other.
    pub(super) fn check(&self) -> Result<(), CliError> {
        let names = &self.served_model_name;
        let wrong = match names.iter().find(|name| name.trim().is_empty()) {
            Some(empty) => Some(format!("{empty:?}")),
            None => {
                let twice = (1..names.len()).find(|i| names[..*i].contains(&names[*i]));
                twice.map(|i| format!("{:?} twice", names[i]))
            }
        };
        if let Some(found) = wrong {
            let help = "requests choose the model by these names; leave the option out for the model's own";
            return Err(CliError::input("--served_model_name", "different names that are not empty", found, help));
        }
        if !self.enable_flash_attn {
            let help = "leave the option out: results are exact to the same bound with it";
            return Err(CliError::input("--enable_flash_attn", "true", "false, but there is no other attention", help));
        }
        if self.memory_pool_mode != MemoryPoolMode::Balanced {
            let help = "use balanced; the cache is one reservation, so it has no fragments";
            return Err(CliError::input("--memory_pool_mode", "balanced", "a mode that does not exist yet", help));
        }
        Ok(())
    }

    /// Limits and choices of the server.
    pub(super) fn server_config(&self) -> Config {
        let seconds = Duration::from_secs_f64;
        Config {
            address: SocketAddr::new(self.host, self.port),
            allowed_hosts: self.allowed_hosts.clone(),
            allowed_origins: self.allowed_origins.clone(),
            tls: self.tls_certificate.clone().zip(self.tls_key.clone()),
            max_body_bytes: self.max_body_bytes,
            max_header_bytes: self.max_header_bytes,
            max_connections: self.max_connections.max(1),
            header_timeout: seconds(self.header_timeout),
            body_timeout: seconds(self.body_timeout),
            request_timeout: (self.request_timeout > 0.0).then(|| seconds(self.request_timeout)),
            shutdown_timeout: seconds(self.shutdown_timeout),
            stall_timeout: seconds(self.stall_timeout),
            max_n: self.max_n,
            allow_priority: self.allow_priority,
            reasoning_alias: self.reasoning_alias,
            admin: self.admin,
            docs: self.docs,
            otlp_endpoint: endpoint(self.otlp_endpoint.as_deref(), |name| std::env::var(name).ok()),
            warmup: self.warmup.then(|| Warmup { prompt: self.warmup_prompt.clone(), tokens: self.warmup_tokens }),
            ..Config::default()
        }
    }

    /// Keys of clients.
    pub(super) fn keys(&self) -> Result<Keys, CliError> {
        let entries = match &self.api_keys_file {
            None => Vec::new(),
            Some(path) => {
                let text = std::fs::read_to_string(path).map_err(CliError::file(path, "read"))?;
                let wrong = |error: toml::de::Error| {
                    let help = "write an entry as [[keys]] with name and sha256; see docs/qwen-server.md";
                    CliError::input(path.display().to_string(), "a file of keys", error.to_string(), help)
                };
                let keys = toml::from_str::<KeysFile>(&text).map_err(wrong)?.keys;
                if keys.is_empty() {
                    let help = "write one as docs/qwen-server.md says, or leave the file out to let everybody in";
                    return Err(CliError::input(path.display().to_string(), "at least one key", "none", help));
                }
                keys
            }
        };
        let (settings, help) = ("--api_key, --api_keys_file", "mend what they say");
        Keys::new(&self.api_key, &entries)
            .map_err(|error| CliError::input(settings, "keys that can be used", error.to_string(), help))
    }
}

#[cfg(test)]
mod tests {
    use clap::FromArgMatches;

    use super::*;

    #[test]
    fn the_options_are_sound() {
        command().debug_assert();
    }

    fn parsed(line: &str) -> Options {
        Options::from_arg_matches(&command().try_get_matches_from(line.split_whitespace()).unwrap()).unwrap()
    }

    #[test]
    fn lists_go_on_and_of_other_settings_the_last_counts() {
        let options =
            parsed("x --served-model-name a b --port 1 --served-model-name c --port 2 --api-key k --api-key l");
        assert_eq!((options.served_model_name.join(" "), options.port), ("a b c".into(), 2));
        assert_eq!(options.api_key, ["k", "l"]);
        let options = parsed("x --allowed-origins=o --allowed-origins=p --allowed-hosts h i");
        assert_eq!((options.allowed_origins.len(), options.allowed_hosts.len()), (2, 2));
    }

    #[test]
    fn keys_that_keep_nobody_out_are_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "keys = []\n").unwrap();
        for (line, told) in [
            (format!("x --api-keys-file {}", file.path().display()), "at least one key"),
            ("x --api-key=".into(), "an empty text"),
        ] {
            let error = parsed(&line).keys().unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
    }

    #[test]
    fn names_of_the_model_are_different_and_not_empty() {
        let check = |names: &[&str]| {
            let words = ["x"].iter().copied().chain(names.iter().flat_map(|name| ["--served-model-name", name]));
            Options::from_arg_matches(&command().try_get_matches_from(words).unwrap()).unwrap().check()
        };
        check(&["a", "b"]).unwrap();
        for (wrong, found) in
            [(&["a", ""][..], "found \"\""), (&[" "], "found \" \""), (&["a", "b", "a"], "found \"a\" twice")]
        {
            let error = check(wrong).unwrap_err().to_string();
            assert!(error.contains("--served_model_name") && error.contains(found), "{error}");
        }
    }

    #[test]
    fn the_names_of_the_first_users_exist() {
        let line = "x --model m --device cpu --port 1 --host ::1 --max-batch-size 2 --max-seq-len 3 --warmup \
                    --warmup-prompt Hello --warmup-tokens 64 --prefill-chunk-size 4 --kv-cache-dtype f16 \
                    --enable-flash-attn true --memory-pool-mode balanced";
        let options = parsed(line);
        options.check().unwrap();
        let config = options.server_config();
        assert_eq!(config.address.to_string(), "[::1]:1");
        assert_eq!(config.warmup.map(|warmup| (warmup.prompt, warmup.tokens)), Some(("Hello".into(), 64)));
    }
}
