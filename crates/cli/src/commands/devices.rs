//! `qwen devices`: what there is to compute on.

use std::io::Write;

use clap::Args;
use qwen_formats::DType;
use qwen_hal::abi;
use qwen_hal::{Device, available_threads};
use serde::Serialize;

use crate::console::{NAME, bytes, print_json, stdout};
use crate::error::CliError;
use crate::model;

const EXAMPLES: &str = "\
Examples:
  qwen devices
  qwen devices --json
  QWEN_CPU_ISA=avx2 qwen devices

Values are what the device declares; nothing is measured here.";

/// Show the devices to compute on
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Devices {
    /// Print a JSON list
    #[arg(long)]
    json: bool,
}

/// A device, as `--json` prints it. Unknown values are null.
#[derive(Debug, Serialize)]
struct Report {
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

const fn kind_name(kind: u32) -> &'static str {
    match kind {
        abi::QHAL_KIND_CPU => "cpu",
        abi::QHAL_KIND_GPU => "gpu",
        abi::QHAL_KIND_NPU => "npu",
        abi::QHAL_KIND_SIMULATED => "simulated",
        abi::QHAL_KIND_NULL => "null",
        _ => "unknown",
    }
}

impl Devices {
    /// Runs the command.
    ///
    /// # Errors
    /// If a device can't be opened.
    pub fn run(self) -> Result<(), CliError> {
        let reports = [Report::new(&model::cpu(None)?)?];
        if self.json { print_json(&reports) } else { reports.iter().try_for_each(print_report) }
    }
}

impl Report {
    fn new(device: &Device) -> Result<Self, CliError> {
        let (info, caps, manifest) = (device.info(), device.caps(), device.plugin().manifest());
        let is_cpu = info.kind == abi::QHAL_KIND_CPU;
        let caches = |levels: [u64; 4]| levels.into_iter().filter(|size| *size > 0).collect();
        let dtype = |entry: &qwen_hal::DtypeCaps| DtypeReport {
            name: DType::from_code(entry.dtype).map_or_else(|| format!("code {}", entry.dtype), |d| d.to_string()),
            can: ABILITIES.iter().filter(|(bit, _)| entry.bits & bit != 0).map(|(_, name)| *name).collect(),
        };
        Ok(Self {
            plugin: manifest.name.clone(),
            plugin_version: manifest.version.clone(),
            index: info.index,
            kind: kind_name(info.kind),
            name: info.name.clone(),
            fingerprint: info.fingerprint.clone(),
            compute_units: caps.compute_units,
            threads: is_cpu.then(available_threads),
            instruction_set: is_cpu.then(|| qwen_cpu::isa::Isa::current().name()),
            vector_bytes: caps.vector_width,
            memory_total_bytes: caps.memory_total,
            memory_free_bytes: device.health()?.memory_free,
            max_allocation_bytes: caps.max_allocation,
            cache_bytes: caps.cache_bytes.map(caches),
            features: FEATURES.iter().filter(|(bit, _)| caps.has(*bit)).map(|(_, name)| *name).collect(),
            dtypes: caps.dtypes.iter().map(dtype).collect(),
        })
    }
}

fn print_report(report: &Report) -> Result<(), CliError> {
    let mut out = stdout();
    writeln!(out, "{NAME}{}:{}{NAME:#}  {}", report.plugin, report.index, report.name)?;
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
    Ok(())
}
