//! What a server tells of its device: how it is, and why which kernels were chosen for it.

use std::path::PathBuf;
use std::sync::Arc;

use qwen_engine::{LoadOptions, Placement};
use qwen_hal::{Device, abi};
use qwen_server::{DeviceReport, DispatchProbe, DispatchReport};

use crate::dispatch::{self, Choosers};
use crate::error::{CliError, sentence};

/// Names of `QHAL_KIND_*`.
const KINDS: &[(u32, &str)] = &[
    (abi::QHAL_KIND_CPU, "cpu"),
    (abi::QHAL_KIND_GPU, "gpu"),
    (abi::QHAL_KIND_NPU, "npu"),
    (abi::QHAL_KIND_SIMULATED, "simulated"),
    (abi::QHAL_KIND_NULL, "null"),
];
/// Names of `QHAL_HEALTH_*`.
const STATES: &[(u32, &str)] = &[
    (abi::QHAL_HEALTH_OK, "ok"),
    (abi::QHAL_HEALTH_DEGRADED, "degraded"),
    (abi::QHAL_HEALTH_THROTTLED, "degraded"),
    (abi::QHAL_HEALTH_UNRESPONSIVE, "lost"),
    (abi::QHAL_HEALTH_LOST, "lost"),
];

fn name_of(names: &[(u32, &'static str)], number: u32) -> String {
    names.iter().find(|(known, _)| *known == number).map_or("unknown", |(_, name)| name).to_owned()
}

/// State of a device now; what it does not tell is none.
pub(super) fn device_report(name: &str, device: &Device) -> DeviceReport {
    let info = device.info();
    let report = DeviceReport {
        name: name.to_owned(),
        title: info.name.clone(),
        kind: name_of(KINDS, info.kind),
        status: "unknown".into(),
        ..DeviceReport::default()
    };
    let Ok(health) = device.health() else { return report };
    let errors = [health.memory_errors_corrected, health.memory_errors_uncorrected, health.link_errors];
    let memory = health.memory_used.zip(info.memory_total.filter(|total| *total > 0));
    DeviceReport {
        status: name_of(STATES, health.state),
        temperature: health.temperature,
        compute_util: health.utilisation.map(|share| share * 100.0),
        memory_util: memory.map(|(used, total)| used as f64 / total as f64 * 100.0),
        error_count: errors.into_iter().flatten().sum(),
        ..report
    }
}

/// Tells the decisions of dispatch when it is asked; nothing is measured for it.
pub(super) fn dispatch_probe(name: String, path: PathBuf, placement: Placement, options: LoadOptions) -> DispatchProbe {
    Arc::new(move || {
        decisions(&name, &path, &placement, &options).unwrap_or_else(|error| {
            tracing::warn!(error = sentence(&error), "the decisions of dispatch can't be told");
            Vec::new()
        })
    })
}

fn decisions(
    name: &str,
    path: &std::path::Path,
    placement: &Placement,
    options: &LoadOptions,
) -> Result<Vec<DispatchReport>, CliError> {
    let catalogue = dispatch::catalogue()?;
    let planned = qwen_engine::explain(path, placement.clone(), options)?;
    let choosers = Choosers::known(&catalogue, placement, &planned);
    let mut reports: Vec<DispatchReport> = Vec::new();
    for counted in dispatch::decisions(&choosers, &planned.ops, None) {
        let mut lines = Vec::from(counted.decision.lines());
        lines.extend(counted.refused.map(|reason| format!("not on this device: {reason}")));
        let same = |report: &&mut DispatchReport| report.op == counted.decision.op && report.lines == lines;
        match reports.iter_mut().find(same) {
            Some(report) => report.instructions += counted.instructions,
            None => reports.push(DispatchReport {
                device: name.to_owned(),
                op: counted.decision.op,
                instructions: counted.instructions,
                lines,
            }),
        }
    }
    Ok(reports)
}
