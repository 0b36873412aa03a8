//! What a server tells of its devices' kernels: why which were chosen.

use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use qwen_engine::{Engine, Fleet, LoadOptions, Placement};
use qwen_server::{DispatchProbe, DispatchReport};

use crate::dispatch::{self, Choosers};
use crate::error::{CliError, sentence};

/// A device whose engine does not come to it in so long has no decisions to tell.
const WAIT: Duration = Duration::from_secs(10);

/// Tells the decisions of dispatch when it is asked, once for each type of device; nothing is measured for it.
pub(super) fn dispatch_probe(fleet: Fleet, path: PathBuf, options: LoadOptions) -> DispatchProbe {
    Arc::new(move || {
        let (mut reports, mut known) = (Vec::new(), Vec::new());
        for (at, instance) in fleet.instances().into_iter().enumerate() {
            if known.contains(&instance.title) {
                continue;
            }
            // A device that were kept here could not be opened anew.
            let Some(placement) = placement_of(&fleet, at) else { continue };
            known.push(instance.title);
            match decisions(&instance.name, &path, &placement, &options) {
                Ok(decisions) => reports.extend(decisions),
                Err(error) => tracing::warn!(error = sentence(&error), "the decisions of dispatch can't be told"),
            }
        }
        reports
    })
}

/// Where a device or group computes, without the one that helps out.
fn placement_of(fleet: &Fleet, at: usize) -> Option<Placement> {
    let (sender, receiver) = mpsc::channel();
    // Whoever waited too long has gone.
    let tell = move |engine: &mut Engine| {
        let _ = sender.send(Placement { fallback: None, ..engine.loaded().model.placement().clone() });
    };
    fleet.call(at, tell).ok().and_then(|()| receiver.recv_timeout(WAIT).ok())
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
