//! Tile: records which kernel or tile strategy the device will use. In: a flat graph with forms of products. Out:
//! [`Attributes::tiling`](crate::Attributes) where the device names one, `dynamic` otherwise: it decides at launch, from the
//! sizes.

use super::{DeviceModel, PassName, Report};
use crate::{Graph, IrError, Op};

/// Runs the pass.
///
/// # Errors
/// If a node can't be described, or the device has no kernel for it.
pub fn run(graph: &mut Graph, device: &dyn DeviceModel) -> Result<Report, IrError> {
    let mut report = Report::new(PassName::Tile);
    let mut strategies: Vec<(String, usize)> = Vec::new();
    for id in graph.body.nodes.clone() {
        let node = graph.node(id);
        if node.op.is_source() || matches!(node.op, Op::Columns { .. }) {
            continue;
        }
        let instruction = super::lower::describe(graph, id, node.attributes.layer)?;
        if !device.supports(&instruction) && !device.delegates(&instruction) {
            let found = instruction.inputs.iter().map(|o| o.dtype.name()).collect::<Vec<_>>().join(", ");
            let what = format!(
                "{} ({}): the device has no kernel for operands of {found}; use another device or convert the weights",
                node.op.name(),
                node.attributes.origin
            );
            return Err(IrError::Pass { pass: "tile", what });
        }
        let strategy = device.tiling(&instruction).unwrap_or_else(|| "dynamic".to_owned());
        match strategies.iter_mut().find(|(name, _)| *name == strategy) {
            Some((_, count)) => *count += 1,
            None => strategies.push((strategy.clone(), 1)),
        }
        graph.node_mut(id).attributes.tiling = Some(strategy);
        report.changes += 1;
    }
    strategies.sort();
    report.notes.extend(strategies.iter().map(|(name, count)| format!("{name}: {count} nodes")));
    Ok(report)
}
