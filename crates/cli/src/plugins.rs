//! Backends: the CPU, which is part of the program, and plugins, which are looked for and loaded by name.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use qwen_hal::loader::{Candidate, Loader, PATH_VARIABLE, Prober, run_probe};
use qwen_hal::{Device, Host, Plugin, Pool};

use crate::error::CliError;

/// The one backend that is linked in.
pub const CPU: &str = "cpu";
/// First argument of this program as the child of a self test; the library's path follows.
pub const PROBE_ARGUMENT: &str = "--hal-probe";
/// Seconds that a plugin's self test may take.
const LIMIT_VARIABLE: &str = "QWEN_HAL_PROBE_SECONDS";

/// A device by name: `cpu`, `sim`, `sim:1`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceName {
    /// The plugin.
    pub plugin: String,
    /// Index of the device in the plugin.
    pub index: u32,
}

impl Default for DeviceName {
    fn default() -> Self {
        Self { plugin: CPU.to_owned(), index: 0 }
    }
}

impl std::str::FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (plugin, index) = match text.split_once(':') {
            None => (text, Some(0)),
            Some((plugin, index)) => (plugin, index.parse().ok()),
        };
        match index {
            Some(index) if !plugin.is_empty() => Ok(Self { plugin: plugin.to_owned(), index }),
            _ => Err("expected NAME or NAME:N, such as cpu or cpu:0".into()),
        }
    }
}

impl std::fmt::Display for DeviceName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.plugin, self.index)
    }
}

/// What this program lends to plugins.
#[must_use]
pub fn host(threads: Option<u32>) -> Host {
    Host::new(Arc::new(Pool::new(threads.map(|n| n as usize))))
}

/// The CPU as a plugin.
///
/// # Errors
/// If it can't be initialised.
pub fn cpu(host: &Host) -> Result<Arc<Plugin>, CliError> {
    Ok(Plugin::linked(&qwen_cpu::PLUGIN, host)?)
}

/// Where plugins are looked for: libraries that were named, then the usual places.
#[must_use]
pub fn places(named: &[PathBuf]) -> Loader {
    let loader = named.iter().fold(Loader::new(), Loader::named);
    loader.usual(std::env::var_os(PATH_VARIABLE).as_deref(), std::env::current_exe().ok().as_deref())
}

/// As [`places`]; each library is tried out in a child process before it is loaded.
///
/// # Errors
/// If `QWEN_HAL_PROBE_SECONDS` is not a number of seconds.
pub fn loader(named: &[PathBuf]) -> Result<Loader, CliError> {
    let loader = places(named);
    let Ok(program) = std::env::current_exe() else { return Ok(loader) };
    let mut prober = Prober::new(program, &[PROBE_ARGUMENT]);
    if let Ok(limit) = std::env::var(LIMIT_VARIABLE) {
        let seconds = limit.parse().ok().filter(|seconds| (0.01..=3600.0).contains(seconds));
        let seconds = seconds.ok_or_else(|| {
            CliError::input(LIMIT_VARIABLE, "seconds from 0.01 to 3600", limit, "set it anew or unset it")
        })?;
        prober.limit = Duration::from_secs_f64(seconds);
    }
    Ok(loader.with_prober(prober))
}

/// The child's part of a self test, if this program was started as one: its exit status.
#[must_use]
pub fn probe_child() -> Option<bool> {
    let mut arguments = std::env::args_os().skip(1);
    let (first, path) = (arguments.next()?, arguments.next()?);
    (first == PROBE_ARGUMENT).then(|| run_probe(Path::new(&path)))
}

/// The plugin of this name.
///
/// # Errors
/// If there is none, or why it is not used.
pub fn find(name: &str, loader: &Loader, host: &Host) -> Result<Arc<Plugin>, CliError> {
    if name == CPU {
        return cpu(host);
    }
    let candidates = loader.candidates();
    let of_name = |candidate: &&Candidate| candidate.name() == name;
    let usable = candidates.iter().filter(of_name).find(|candidate| candidate.refused.is_none());
    if let Some(candidate) = usable.or_else(|| candidates.iter().find(of_name)) {
        return Ok(loader.load(candidate, host)?);
    }
    let known: Vec<&str> = std::iter::once(CPU).chain(candidates.iter().map(Candidate::name)).collect();
    Err(CliError::input(
        format!("device {name}"),
        format!("one of: {}", known.join(", ")),
        "no plugin of that name",
        format!("run `qwen devices`, or put libhal_{name}.so into a folder of {PATH_VARIABLE}"),
    ))
}

/// Opens a device by name.
///
/// # Errors
/// If there is none, or it can't be opened.
pub fn open(name: &DeviceName, named: &[PathBuf], threads: Option<u32>) -> Result<Device, CliError> {
    let host = host(threads);
    // Without a plugin nothing is looked for.
    let plugin = if name.plugin == CPU { cpu(&host)? } else { find(&name.plugin, &loader(named)?, &host)? };
    let device = plugin.open(name.index, &[])?;
    crate::dispatch::use_tuned_variants(&device);
    Ok(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices() {
        let parse = |text: &str| text.parse::<DeviceName>().map(|name| name.to_string());
        assert_eq!(parse("cpu").unwrap(), "cpu:0");
        assert_eq!(parse("sim:3").unwrap(), "sim:3");
        for wrong in ["", ":1", "sim:", "sim:x", "sim:-1", "sim:1:2"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
