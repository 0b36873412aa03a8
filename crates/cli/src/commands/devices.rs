//! `qwen devices`: what there is to compute on, and which plugins were found.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, Subcommand};
use qwen_chips::{Catalogue, Chip, Dtype, DtypeSheet, Figure};
use qwen_dispatch::{HardwareProfile, bandwidth_text};
use qwen_formats::DType;
use qwen_hal::abi;
use qwen_hal::loader::{Candidate, LoadError, Source};
use qwen_hal::{Device, Plugin, available_threads};
use serde::Serialize;

use super::explain::Explain;
use crate::console::{DIM, NAME, bytes, print_json, stdout};
use crate::dispatch;
use crate::error::{CliError, sentence};
use crate::plugins;

const EXAMPLES: &str = "\
Examples:
  qwen devices
  qwen devices --json
  QWEN_CPU_ISA=avx2 qwen devices
  qwen devices --plugin ./libhal_example.so
  qwen devices --refresh
  qwen devices explain --model smollm2 --seq 65536

Plugins are libraries libhal_NAME.so. They are looked for, in this order, in what --plugin names, in
the folders and files of QWEN_HAL_PATH, in ../lib/qwen/plugins seen from this program, and in
/usr/lib/qwen/plugins; never in the current directory. Each is tried out in a process of its own
first, for at most QWEN_HAL_PROBE_SECONDS (20): one that crashes or hangs is told here and not used.
A device is measured the first time it is seen, in about a second, and again when its driver, its
firmware or this program's version changes. Figures are measured, or declared (by the device, or by
the sheet of its chip), or simulated; a chip that nobody ran this on is UNTESTED.";

/// Show the devices to compute on, and the plugins found
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub struct Devices {
    #[command(subcommand)]
    command: Option<DevicesCommand>,
    /// A plugin's library, or a folder of plugins (may be repeated)
    #[arg(long = "plugin", value_name = "FILE")]
    plugins: Vec<PathBuf>,
    /// Measure again what was measured before
    #[arg(long)]
    refresh: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum DevicesCommand {
    Explain(Explain),
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Answer {
    devices: Vec<Report>,
    plugins: Vec<PluginReport>,
}

/// A library that was found, whether it is used or not.
#[derive(Debug, Serialize)]
struct PluginReport {
    name: String,
    path: String,
    source: String,
    /// `loaded` or `refused`.
    status: &'static str,
    version: Option<String>,
    vendor: Option<String>,
    /// ABI that it was built with.
    abi: Option<String>,
    /// Why it is refused, or what is wrong with its devices.
    errors: Vec<String>,
}

/// A device, as `--json` prints it. Unknown values are null.
#[derive(Debug, Serialize)]
struct Report {
    /// What `--device` takes.
    device: String,
    plugin: String,
    plugin_version: String,
    index: u32,
    kind: &'static str,
    name: String,
    fingerprint: String,
    compute_units: Option<u32>,
    threads: Option<usize>,
    instruction_set: Option<&'static str>,
    vector_bytes: Option<u32>,
    memory_total_bytes: Option<u64>,
    memory_free_bytes: Option<u64>,
    max_allocation_bytes: Option<u64>,
    cache_bytes: Option<Vec<u64>>,
    features: Vec<&'static str>,
    dtypes: Vec<DtypeReport>,
    /// The sheet of its chip.
    chip: Option<ChipReport>,
    /// Declared by the device itself, bytes per second.
    declared_bandwidth: Option<f64>,
    profile: Option<HardwareProfile>,
    /// Why there is no profile.
    profile_error: Option<String>,
}

/// What the sheet of a chip says.
#[derive(Debug, Serialize)]
struct ChipReport {
    name: String,
    title: String,
    /// `measured` or `UNTESTED`.
    status: &'static str,
    bandwidth: Option<Declared>,
    memory: Option<Declared>,
    rates: BTreeMap<&'static str, Declared>,
    faults: Vec<String>,
}

/// A figure of a sheet.
#[derive(Debug, Clone, Serialize)]
struct Declared {
    value: f64,
    trust: &'static str,
    source: String,
}

impl ChipReport {
    fn new(chip: &Chip) -> Self {
        let figure = |figure: &Figure| Declared {
            value: figure.value,
            trust: chip.trust(figure).label(),
            source: chip.sources.get(&figure.source).map(|source| source.title.clone()).unwrap_or_default(),
        };
        let rate = |(dtype, sheet): (&Dtype, &DtypeSheet)| Some((dtype.name(), figure(sheet.rate.as_ref()?)));
        Self {
            name: chip.name.clone(),
            title: chip.title.clone(),
            status: chip.status.label(),
            bandwidth: chip.memory.bandwidth.as_ref().map(figure),
            memory: chip.memory.usable.as_ref().or(chip.memory.capacity.as_ref()).map(figure),
            rates: chip.compute.dtypes.iter().filter_map(rate).collect(),
            faults: chip.faults.iter().map(|fault| fault.summary.clone()).collect(),
        }
    }
}

#[derive(Debug, Serialize)]
struct DtypeReport {
    name: String,
    can: Vec<&'static str>,
}

const FEATURES: &[(u64, &str)] = &[
    (abi::QHAL_FEATURE_ASYNC_COPY, "async_copy"),
    (abi::QHAL_FEATURE_EVENTS, "events"),
    (abi::QHAL_FEATURE_EVENT_TIMING, "event_timing"),
    (abi::QHAL_FEATURE_PINNED, "pinned"),
    (abi::QHAL_FEATURE_MAP, "map"),
    (abi::QHAL_FEATURE_IMPORT_HOST, "import_host"),
    (abi::QHAL_FEATURE_IMPORT_DMABUF, "import_dmabuf"),
    (abi::QHAL_FEATURE_P2P, "p2p"),
    (abi::QHAL_FEATURE_CMDLIST, "cmdlist"),
    (abi::QHAL_FEATURE_VMM, "vmm"),
    (abi::QHAL_FEATURE_COLLECTIVES, "collectives"),
    (abi::QHAL_FEATURE_REGION, "region"),
    (abi::QHAL_FEATURE_PARTITION, "partition"),
    (abi::QHAL_FEATURE_UNIFIED, "unified"),
    (abi::QHAL_FEATURE_INLINE, "inline"),
];

const ABILITIES: &[(u32, &str)] = &[
    (abi::QHAL_DTYPE_CAN_STORE, "store"),
    (abi::QHAL_DTYPE_CAN_CONVERT, "convert"),
    (abi::QHAL_DTYPE_CAN_COMPUTE, "compute"),
    (abi::QHAL_DTYPE_CAN_ACCUMULATE, "accumulate"),
    (abi::QHAL_DTYPE_CAN_MATRIX, "matrix"),
];

impl Devices {
    /// Runs the command.
    ///
    /// # Errors
    /// If the CPU can't be opened, or a plugin that was named is refused.
    pub fn run(self) -> Result<(), CliError> {
        if let Some(DevicesCommand::Explain(explain)) = self.command {
            return explain.run();
        }
        let catalogue = dispatch::catalogue()?;
        let host = plugins::host(None);
        let report = |device: &Device| Report::new(device, &catalogue, self.refresh);
        let mut answer = Answer { devices: vec![report(&plugins::cpu(&host)?.open(0, &[])?)], plugins: Vec::new() };
        let loader = plugins::loader(&self.plugins)?;
        let mut refused = None;
        for candidate in loader.candidates() {
            let report = match loader.load(&candidate, &host) {
                Ok(plugin) => answer.add(&candidate, &plugin, &report),
                Err(error) => {
                    let report = PluginReport::new(&candidate, None, vec![sentence(&error)]);
                    // Who names a plugin wants it; others are there or not.
                    let wanted = candidate.source == Source::Named && !matches!(error, LoadError::Shadowed { .. });
                    refused = refused.or(Some(error).filter(|_| wanted));
                    report
                }
            };
            answer.plugins.push(report);
        }
        if self.json {
            print_json(&answer)?;
        } else {
            answer.devices.iter().try_for_each(print_report)?;
            answer.plugins.iter().try_for_each(print_plugin)?;
        }
        refused.map_or(Ok(()), |error| Err(error.into()))
    }
}

impl Answer {
    /// Adds the devices of a plugin; one that can't be opened does not hide the others.
    fn add(&mut self, candidate: &Candidate, plugin: &Arc<Plugin>, report: &dyn Fn(&Device) -> Report) -> PluginReport {
        let mut errors = Vec::new();
        let count = plugin.device_count().unwrap_or_else(|error| {
            errors.push(sentence(&error));
            0
        });
        for index in 0..count {
            match plugin.open(index, &[]).map_err(CliError::from) {
                Ok(device) => self.devices.push(report(&device)),
                Err(error) => errors.push(sentence(&error)),
            }
        }
        PluginReport::new(candidate, Some(plugin), errors)
    }
}

impl PluginReport {
    fn new(candidate: &Candidate, plugin: Option<&Arc<Plugin>>, errors: Vec<String>) -> Self {
        let manifest = plugin.map(|plugin| plugin.manifest());
        Self {
            name: manifest.map_or_else(|| candidate.name().to_owned(), |manifest| manifest.name.clone()),
            path: candidate.path.display().to_string(),
            source: candidate.source.to_string(),
            status: if plugin.is_some() { "loaded" } else { "refused" },
            version: manifest.map(|manifest| manifest.version.clone()),
            vendor: manifest.map(|manifest| manifest.vendor.clone()),
            abi: manifest.map(|manifest| format!("{}.{}", manifest.abi.0, manifest.abi.1)),
            errors,
        }
    }
}

impl Report {
    /// A device that fails while it is measured is shown without figures.
    fn new(device: &Device, catalogue: &Catalogue, refresh: bool) -> Self {
        let (profile, profile_error) = match dispatch::profile(device, refresh) {
            Ok(profile) => (profile, None),
            Err(error) => (None, Some(sentence(&error))),
        };
        let (info, caps, manifest) = (device.info(), device.caps(), device.plugin().manifest());
        // Of the backend that is part of this program; what a plugin computes with is its own.
        let is_cpu = manifest.name == plugins::CPU;
        let caches = |levels: [u64; 4]| levels.into_iter().filter(|size| *size > 0).collect();
        let dtype = |entry: &qwen_hal::DtypeCaps| DtypeReport {
            name: DType::from_code(entry.dtype).map_or_else(|| format!("code {}", entry.dtype), |d| d.to_string()),
            can: ABILITIES.iter().filter(|(bit, _)| entry.bits & bit != 0).map(|(_, name)| *name).collect(),
        };
        Self {
            device: device.label(),
            plugin: manifest.name.clone(),
            plugin_version: manifest.version.clone(),
            index: info.index,
            kind: plugins::kind_name(info.kind),
            name: info.name.clone(),
            fingerprint: info.fingerprint.clone(),
            compute_units: caps.compute_units,
            threads: is_cpu.then(available_threads),
            instruction_set: is_cpu.then(|| qwen_cpu::isa::Isa::current().name()),
            vector_bytes: caps.vector_width,
            memory_total_bytes: caps.memory_total,
            // Optional: a plugin need not know.
            memory_free_bytes: device.health().ok().and_then(|health| health.memory_free),
            max_allocation_bytes: caps.max_allocation,
            cache_bytes: caps.cache_bytes.map(caches),
            features: FEATURES.iter().filter(|(bit, _)| caps.has(*bit)).map(|(_, name)| *name).collect(),
            dtypes: caps.dtypes.iter().map(dtype).collect(),
            chip: dispatch::chip_of(catalogue, device).map(ChipReport::new),
            declared_bandwidth: caps.bandwidth.filter(|bandwidth| *bandwidth > 0.0),
            profile,
            profile_error,
        }
    }
}

fn print_report(report: &Report) -> Result<(), CliError> {
    let mut out = stdout();
    writeln!(out, "{NAME}{}{NAME:#}  {}", report.device, report.name)?;
    let mut line = |name: &str, value: Option<String>| match value {
        Some(value) => writeln!(out, "  {name:<16}{value}"),
        None => Ok(()),
    };
    line("kind", Some(report.kind.to_owned()))?;
    line("cores", report.compute_units.map(|n| n.to_string()))?;
    line("threads", report.threads.map(|n| n.to_string()))?;
    line("instruction set", report.instruction_set.map(str::to_owned))?;
    let memory = |total| match report.memory_free_bytes {
        Some(free) => format!("{}, {} free", bytes(total), bytes(free)),
        None => bytes(total),
    };
    line("memory", report.memory_total_bytes.map(memory))?;
    let caches = |sizes: &Vec<u64>| sizes.iter().map(|size| bytes(*size)).collect::<Vec<_>>().join(", ");
    line("caches", report.cache_bytes.as_ref().map(caches))?;
    let able = |ability: &str| {
        let names: Vec<&str> =
            report.dtypes.iter().filter(|d| d.can.contains(&ability)).map(|d| d.name.as_str()).collect();
        (!names.is_empty()).then(|| names.join(" "))
    };
    line("computes in", able("compute"))?;
    line("stores", able("store"))?;
    line("features", Some(report.features.join(" ")))?;
    let chip = report.chip.as_ref();
    line("chip", chip.map(|chip| format!("{}, {}", chip.title, chip.status)))?;
    for (name, value) in figures(report) {
        line(&name, Some(value))?;
    }
    line("not measured", report.profile_error.clone())?;
    for fault in chip.map_or(&[][..], |chip| &chip.faults) {
        line("known fault", Some(fault.clone()))?;
    }
    Ok(())
}

/// Figures of speed, measured or simulated ones beside those that are declared.
fn figures(report: &Report) -> Vec<(String, String)> {
    let chip = report.chip.as_ref();
    let declared = |figure: Option<&Declared>, unit: fn(f64) -> String| {
        figure.map(|figure| format!("{} declared ({})", unit(figure.value), figure.trust))
    };
    let own = report.declared_bandwidth.map(|value| format!("{} declared (device)", bandwidth_text(value)));
    let sheet = declared(chip.and_then(|chip| chip.bandwidth.as_ref()), bandwidth_text);
    let profile = report.profile.as_ref();
    let origin = profile.map_or("measured", |profile| profile.origin.label());
    let found = |value: Option<f64>, unit: fn(f64) -> String| value.map(|value| format!("{} {origin}", unit(value)));
    let join = |parts: [Option<String>; 3]| parts.into_iter().flatten().collect::<Vec<_>>().join(", ");
    let mut figures = vec![(
        "reads memory".to_owned(),
        join([found(profile.and_then(HardwareProfile::bandwidth), bandwidth_text), own, sheet]),
    )];
    let Some(profile) = profile else {
        for (dtype, rate) in chip.into_iter().flat_map(|chip| &chip.rates) {
            figures.extend(declared(Some(rate), operations).map(|text| (format!("computes {dtype}"), text)));
        }
        return figures.into_iter().filter(|(_, text)| !text.is_empty()).collect();
    };
    let caches = profile.levels.split_last().map_or(&[][..], |(_, caches)| caches);
    figures.extend(caches.iter().map(|level| {
        (
            format!("reads {}", bytes(level.working_set)),
            join([found(Some(level.bandwidth), bandwidth_text), None, None]),
        )
    }));
    let copies = [
        ("copies", profile.copy_bandwidth),
        ("from host", profile.upload_bandwidth),
        ("to host", profile.download_bandwidth),
    ];
    figures.extend(copies.map(|(name, value)| (name.to_owned(), join([found(value, bandwidth_text), None, None]))));
    for (form, rate) in &profile.rates {
        figures.push((form.clone(), join([found(Some(rate.operations), operations), None, None])));
    }
    for (dtype, rate) in chip.into_iter().flat_map(|chip| &chip.rates) {
        figures.extend(declared(Some(rate), operations).map(|text| (format!("computes {dtype}"), text)));
    }
    let times = [("launch", profile.launch_ns), ("launch and wait", profile.barrier_ns)];
    figures.extend(times.map(|(name, value)| (name.to_owned(), join([found(value, microseconds), None, None]))));
    figures.into_iter().filter(|(_, text)| !text.is_empty()).collect()
}

fn operations(per_second: f64) -> String {
    if per_second >= 1e12 {
        format!("{:.1} TOP/s", per_second / 1e12)
    } else {
        format!("{:.0} GOP/s", per_second / 1e9)
    }
}

fn microseconds(nanoseconds: f64) -> String {
    format!("{:.1} us", nanoseconds / 1e3)
}

fn print_plugin(report: &PluginReport) -> Result<(), CliError> {
    let mut out = stdout();
    let version = report.version.as_ref().map(|version| format!(" {version}")).unwrap_or_default();
    writeln!(out, "plugin {NAME}{}{NAME:#}{version}: {}, {DIM}{}{DIM:#}", report.name, report.status, report.path)?;
    report.errors.iter().try_for_each(|error| writeln!(out, "  {error}"))?;
    Ok(())
}
