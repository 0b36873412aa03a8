//! Stability: checks, and where needed adds, what keeps numbers finite at the chosen precision. In: a graph with forms of
//! products and cache types. Out: the same graph, with a report in which every finding names its rule.
//!
//! Accumulators are not among the rules: reductions are f32 by the op vocabulary, and sums of products are the precision pass's.

use super::roles::{Role, segment_roles};
use super::{PassName, Report};
use crate::{Compute, DType, Graph, IrError, Node, NodeId, Op};

/// What a rule found at a node.
#[derive(Debug)]
enum Finding {
    /// Nothing to do.
    Holds,
    /// Something was changed.
    Changed(String),
    /// Nothing was changed, but a reader should know.
    Note(String),
}

/// One rule.
#[derive(Debug)]
pub struct Rule {
    /// Name in reports.
    pub name: &'static str,
    /// Why it exists.
    pub reason: &'static str,
    /// None where it doesn't apply.
    apply: fn(&mut Graph, NodeId) -> Result<Option<Finding>, IrError>,
}

/// All rules.
pub const RULES: &[Rule] = &[
    Rule {
        name: "router-f32",
        reason: "a rounded router logit can choose another expert, which no tolerance covers",
        apply: router_f32,
    },
    Rule {
        name: "norm-epsilon-floor",
        reason: "a row of zeros divides by the square root of epsilon; below 1e-12 the f32 result overflows for small rows",
        apply: epsilon_floor,
    },
    Rule { name: "table-finite", reason: "an infinity in a table reaches every token", apply: table_finite },
    Rule {
        name: "attention-scale",
        reason: "scores are scaled before the softmax; a scale of zero or infinity makes every row uniform or NaN",
        apply: attention_scale,
    },
    Rule {
        name: "f16-cache-range",
        reason: "half precision ends at 65504; projections with biases are where large keys and values were seen",
        apply: cache_range,
    },
    Rule {
        name: "head-f32-result",
        reason: "logits are compared and exponentiated; half precision can't separate close ones",
        apply: head_result,
    },
];

/// Smallest epsilon of a norm: its root's inverse, 1e6, times any f32 activation below 1e32 is finite.
const EPSILON_FLOOR: f64 = 1e-12;

/// Runs the pass.
///
/// # Errors
/// If a rule is broken and can't be repaired.
pub fn run(graph: &mut Graph) -> Result<Report, IrError> {
    let mut report = Report::new(PassName::Stability);
    let ids: Vec<NodeId> = graph.body_ids().flat_map(|b| graph.body_of(b).nodes.clone()).collect();
    for rule in RULES {
        let mut holds = 0;
        for id in &ids {
            let origin = graph.node(*id).attributes.origin.clone();
            match (rule.apply)(graph, *id)? {
                None => {}
                Some(Finding::Holds) => holds += 1,
                Some(Finding::Changed(what)) => {
                    report.changes += 1;
                    report.notes.push(format!("{}: {origin}: {what} ({})", rule.name, rule.reason));
                }
                Some(Finding::Note(what)) => report.notes.push(format!("{}: {origin}: {what}", rule.name)),
            }
        }
        if holds > 0 {
            report.notes.push(format!("{}: holds at {holds} nodes", rule.name));
        }
    }
    Ok(report)
}

fn broken(rule: &str, node: &Node, what: &str) -> IrError {
    IrError::Pass {
        pass: "stability",
        what: format!("{rule}: {} ({}): {what}", node.op.name(), node.attributes.origin),
    }
}

fn router_f32(graph: &mut Graph, id: NodeId) -> Result<Option<Finding>, IrError> {
    let Op::Route { .. } = graph.node(id).op else { return Ok(None) };
    let Some(logits) = graph.node(id).inputs.first().map(|v| graph.root(*v).0) else { return Ok(None) };
    let Some((router, _)) = graph.definition(logits) else { return Ok(None) };
    let compute = &mut graph.node_mut(router).attributes.compute;
    if compute.iter().all(|c| *c == Compute::F32) {
        return Ok(Some(Finding::Holds));
    }
    compute.iter_mut().for_each(|c| *c = Compute::F32);
    Ok(Some(Finding::Changed("products set to f32".to_owned())))
}

fn epsilon_floor(graph: &mut Graph, id: NodeId) -> Result<Option<Finding>, IrError> {
    let node = graph.node_mut(id);
    let Op::Norm { eps, .. } = &mut node.op else { return Ok(None) };
    if *eps >= EPSILON_FLOOR {
        return Ok(Some(Finding::Holds));
    }
    let before = std::mem::replace(eps, EPSILON_FLOOR);
    Ok(Some(Finding::Changed(format!("epsilon {before} raised to {EPSILON_FLOOR}"))))
}

fn table_finite(graph: &mut Graph, id: NodeId) -> Result<Option<Finding>, IrError> {
    let node = graph.node(id);
    let Op::Const { data } = &node.op else { return Ok(None) };
    match data.iter().position(|x| !x.is_finite()) {
        None => Ok(Some(Finding::Holds)),
        Some(i) => Err(broken("table-finite", node, &format!("element {i} is not finite; check the rotary settings"))),
    }
}

fn attention_scale(graph: &mut Graph, id: NodeId) -> Result<Option<Finding>, IrError> {
    let node = graph.node(id);
    let scale = match &node.op {
        Op::Attention { attention, .. } => attention.scale,
        Op::MlaAttention { attention, .. } => attention.scale,
        _ => return Ok(None),
    };
    if scale.is_finite() && scale > 0.0 {
        Ok(Some(Finding::Holds))
    } else {
        Err(broken("attention-scale", node, &format!("a finite scale above 0 is needed, found {scale}")))
    }
}

fn cache_range(graph: &mut Graph, id: NodeId) -> Result<Option<Finding>, IrError> {
    let Op::KvAppend { state } = graph.node(id).op else { return Ok(None) };
    if graph.state(state).dtype != DType::F16 {
        return Ok(Some(Finding::Holds));
    }
    let biased = graph.node(id).inputs.iter().take(2).any(|v| reaches_bias(graph, *v));
    Ok(Some(if biased {
        Finding::Note(
            "keys or values come from a projection with a bias; --kv-cache-dtype bf16 if they overflow".to_owned(),
        )
    } else {
        Finding::Holds
    }))
}

/// Whether a value comes from a projection with a bias, through views, norms and rotations.
fn reaches_bias(graph: &Graph, value: crate::ValueId) -> bool {
    let Some((_, node)) = graph.definition(value) else { return false };
    match &node.op {
        Op::Columns { .. } | Op::Rope(_) => node.inputs.first().is_some_and(|v| reaches_bias(graph, *v)),
        Op::Gemm { biases, .. } => biases.contains(&true),
        _ => false,
    }
}

fn head_result(graph: &mut Graph, id: NodeId) -> Result<Option<Finding>, IrError> {
    let node = graph.node(id);
    if !segment_roles(graph, node).contains(&Role::Head) {
        return Ok(None);
    }
    match node.outputs.first().map(|v| graph.value(*v).ty.dtype) {
        Some(DType::F32) => Ok(Some(Finding::Holds)),
        other => Err(broken("head-f32-result", node, &format!("the result has to be f32, found {other:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ValueId, test_support};

    fn nodes(graph: &Graph, name: &str) -> Vec<NodeId> {
        let all = graph.body_ids().flat_map(|b| graph.body_of(b).nodes.clone());
        all.filter(|id| graph.node(*id).op.name() == name).collect()
    }

    #[test]
    fn small_epsilons_are_raised_and_named() {
        let mut graph = test_support::dense().unwrap();
        let norm = nodes(&graph, "norm")[0];
        graph.node_mut(norm).op = Op::Norm { eps: 0.0, axis: test_support::HIDDEN };
        let report = run(&mut graph).unwrap();
        assert_eq!(report.changes, 1);
        assert!(report.notes.iter().any(|n| n.starts_with("norm-epsilon-floor: ")), "{report}");
        assert_eq!(graph.node(norm).op, Op::Norm { eps: EPSILON_FLOOR, axis: test_support::HIDDEN });
    }

    #[test]
    fn routers_multiply_in_f32() {
        let mut graph = test_support::experts().unwrap();
        let logits: ValueId = graph.node(nodes(&graph, "route")[0]).inputs[0];
        let router = graph.definition(logits).unwrap().0;
        graph.node_mut(router).attributes.compute = vec![Compute::I8G32];
        assert_eq!(run(&mut graph).unwrap().changes, 1);
        assert_eq!(graph.node(router).attributes.compute, [Compute::F32]);
    }

    #[test]
    fn impossible_scales_and_tables_are_refused() {
        let mut graph = test_support::dense().unwrap();
        let attention = nodes(&graph, "attention")[0];
        if let Op::Attention { attention, .. } = &mut graph.node_mut(attention).op {
            attention.scale = 0.0;
        }
        assert!(run(&mut graph).unwrap_err().to_string().contains("attention-scale"));
        let mut graph = test_support::dense().unwrap();
        let table = nodes(&graph, "const")[0];
        graph.node_mut(table).op = Op::Const { data: vec![f32::INFINITY; 8] };
        assert!(run(&mut graph).unwrap_err().to_string().contains("table-finite"));
    }
}
