//! Fuse: joins nodes that a device does as one. In: a canonical graph. Out: fewer nodes, the same function.
//!
//! [`PATTERNS`] is the whole list. A pattern fires where the inner result has no other reader and the device supports the
//! joined node for every layer. The joined node's origin keeps the name of the pattern and the origin of what it took in;
//! [`unfuse`] restores the separate nodes from it.

use std::collections::HashMap;

use super::{DeviceModel, PassName, Report, supported};
use crate::{Attributes, BinaryFunction, BodyId, Epilogue, Graph, IrError, Node, NodeId, Op, ValueId};

/// A joined node that would replace `outer`.
#[derive(Debug)]
pub struct Candidate {
    op: Op,
    inputs: Vec<ValueId>,
    /// The node whose work and attributes it continues.
    inner: NodeId,
}

/// One way to join two nodes.
#[derive(Debug)]
pub struct Pattern {
    /// Name in reports and origins.
    pub name: &'static str,
    /// What it does, for reports.
    pub summary: &'static str,
    find: fn(&Graph, &[u32], &Node) -> Option<Candidate>,
}

/// All patterns, tried in this order.
pub const PATTERNS: &[Pattern] = &[
    Pattern { name: "glu", summary: "glu of a layer's two segments becomes its epilogue", find: find_glu },
    Pattern { name: "residual", summary: "sum with a layer's result becomes its epilogue", find: find_residual },
    Pattern { name: "addend", summary: "sum with combined experts becomes their addend", find: find_addend },
];

/// Runs the pass.
///
/// # Errors
/// If a joined node doesn't fit, which means that the graph was invalid.
pub fn run(graph: &mut Graph, device: &dyn DeviceModel) -> Result<Report, IrError> {
    let mut report = Report::new(PassName::Fuse);
    split_unsupported(graph, device, &mut report)?;
    for pattern in PATTERNS {
        let mut refused = 0;
        let mut fired = 0;
        for body in graph.body_ids() {
            for outer in graph.body_of(body).nodes.clone() {
                let uses = graph.uses();
                let Some(candidate) = (pattern.find)(graph, &uses, graph.node(outer)) else { continue };
                // A node of the main body runs once, one of a layer every time.
                if !graph.body_of(body).nodes.contains(&candidate.inner) {
                    continue;
                }
                if fuse(graph, body, outer, candidate, pattern.name, device)? {
                    fired += 1;
                } else {
                    refused += 1;
                }
            }
        }
        if fired + refused > 0 {
            report.notes.push(format!(
                "{}: {fired} joined, {refused} not supported by the device ({})",
                pattern.name, pattern.summary
            ));
        }
        report.changes += fired;
    }
    graph.remove_dead();
    Ok(report)
}

/// Takes apart what the builder joined and the device can't do as one.
fn split_unsupported(graph: &mut Graph, device: &dyn DeviceModel, report: &mut Report) -> Result<(), IrError> {
    for body in graph.body_ids() {
        let mut order = Vec::new();
        for id in graph.body_of(body).nodes.clone() {
            let node = graph.node(id);
            let joined = match &node.op {
                Op::Gemm { epilogue, .. } | Op::GroupedGemm { epilogue, .. } => *epilogue != Epilogue::None,
                Op::Combine { addend } => *addend,
                _ => false,
            };
            let origin = node.attributes.origin.clone();
            if joined
                && !supported(graph, body, id, device)?
                && let Some(nodes) = separate(graph, id, &origin, &origin)?
            {
                order.extend(nodes);
                report.changes += 1;
                report.notes.push(format!("{origin}: taken apart, the device can't do it as one"));
            } else {
                order.push(id);
            }
        }
        graph.body_of_mut(body).nodes = order;
    }
    Ok(())
}

fn fuse(
    graph: &mut Graph,
    body: BodyId,
    outer: NodeId,
    candidate: Candidate,
    pattern: &str,
    device: &dyn DeviceModel,
) -> Result<bool, IrError> {
    let inner = graph.node(candidate.inner).attributes.clone();
    let outer_attributes = &graph.node(outer).attributes;
    let origin = format!("{} | {pattern}: {}", inner.origin, outer_attributes.origin);
    let sensitivity = inner.sensitivity.max(outer_attributes.sensitivity);
    let tolerance = inner.tolerance;
    let joined = graph.add_node(candidate.op, candidate.inputs, &origin)?;
    graph.node_mut(joined).attributes = Attributes { tolerance, sensitivity, origin, ..inner };
    if !supported(graph, body, joined, device)? {
        return Ok(false);
    }
    let (old, new) = (graph.node(outer).outputs.clone(), graph.node(joined).outputs.clone());
    for id in &mut graph.body_of_mut(body).nodes {
        if *id == outer {
            *id = joined;
        }
    }
    graph.replace_uses(&old.into_iter().zip(new).collect());
    graph.remove_dead();
    Ok(true)
}

/// The node that defines a value, if nobody else reads it.
fn only_reader<'g>(graph: &'g Graph, uses: &[u32], value: ValueId) -> Option<(NodeId, &'g Node)> {
    graph.definition(value).filter(|_| uses.get(value.index()) == Some(&1))
}

fn find_glu(graph: &Graph, uses: &[u32], node: &Node) -> Option<Candidate> {
    let (Op::Glu(activation), [a, b]) = (&node.op, node.inputs.as_slice()) else { return None };
    let (_, first) = only_reader(graph, uses, *a)?;
    let (_, second) = only_reader(graph, uses, *b)?;
    let (Op::Columns { offset: 0, width }, Op::Columns { offset, width: other }) = (&first.op, &second.op) else {
        return None;
    };
    let wide = *first.inputs.first()?;
    if width != other || offset != width || second.inputs != first.inputs || uses.get(wide.index()) != Some(&2) {
        return None;
    }
    let (inner, layer) = graph.definition(wide)?;
    let mut op = layer.op.clone();
    match &mut op {
        Op::Gemm { scales, epilogue, .. } | Op::GroupedGemm { scales, epilogue, .. }
            if scales.len() == 2
                && *epilogue == Epilogue::None
                && graph.value(wide).ty.columns() == Some(u64::from(*width) * 2) =>
        {
            *epilogue = Epilogue::Glu(*activation);
        }
        _ => return None,
    }
    // The columns must be the segments.
    let weight =
        *layer.inputs.get(if let Op::GroupedGemm { gather, .. } = op { 2 + usize::from(gather) } else { 1 })?;
    let shape = &graph.value(weight).ty.shape;
    let rows = shape.len().checked_sub(2).and_then(|i| shape.get(i)).and_then(|d| d.constant());
    (rows == Some(u64::from(*width))).then(|| Candidate { op, inputs: layer.inputs.clone(), inner })
}

/// Operands of a sum of two values of one type: (a value that nobody else reads, the other).
fn sum<'g>(
    graph: &'g Graph,
    uses: &[u32],
    node: &Node,
    accept: impl Fn(&Node) -> bool,
) -> Option<(NodeId, &'g Node, ValueId)> {
    let (Op::Binary(BinaryFunction::Add), [a, b]) = (&node.op, node.inputs.as_slice()) else { return None };
    if a == b || graph.value(*a).ty != graph.value(*b).ty {
        return None;
    }
    [(*b, *a), (*a, *b)].into_iter().find_map(|(value, other)| {
        only_reader(graph, uses, value).filter(|(_, node)| accept(node)).map(|(id, node)| (id, node, other))
    })
}

fn find_residual(graph: &Graph, uses: &[u32], node: &Node) -> Option<Candidate> {
    let plain = |node: &Node| matches!(node.op, Op::Gemm { epilogue: Epilogue::None, .. });
    let (inner, layer, residual) = sum(graph, uses, node, plain)?;
    let mut op = layer.op.clone();
    if let Op::Gemm { epilogue, .. } = &mut op {
        *epilogue = Epilogue::Add;
    }
    let inputs = layer.inputs.iter().copied().chain([residual]).collect();
    Some(Candidate { op, inputs, inner })
}

fn find_addend(graph: &Graph, uses: &[u32], node: &Node) -> Option<Candidate> {
    let plain = |node: &Node| matches!(node.op, Op::Combine { addend: false });
    let (inner, combine, addend) = sum(graph, uses, node, plain)?;
    let inputs = combine.inputs.iter().copied().chain([addend]).collect();
    Some(Candidate { op: Op::Combine { addend: true }, inputs, inner })
}

/// Restores the separate nodes of everything that [`run`] joined.
///
/// # Errors
/// If a node doesn't fit, which means that the graph was invalid.
pub fn unfuse(graph: &mut Graph) -> Result<usize, IrError> {
    let mut restored = 0;
    for body in graph.body_ids() {
        let mut order = Vec::new();
        for id in graph.body_of(body).nodes.clone() {
            let origins = recorded(&graph.node(id).attributes.origin);
            let nodes = match origins {
                Some((inner, outer)) => separate(graph, id, &inner, &outer)?,
                None => None,
            };
            if let Some(nodes) = nodes {
                order.extend(nodes);
                restored += 1;
            } else {
                order.push(id);
            }
        }
        graph.body_of_mut(body).nodes = order;
    }
    Ok(restored)
}

/// Origins of the inner and the outer node, if a pattern joined them.
fn recorded(origin: &str) -> Option<(String, String)> {
    let (inner, mark) = origin.rsplit_once(" | ")?;
    let (pattern, outer) = mark.split_once(": ")?;
    PATTERNS.iter().any(|p| p.name == pattern).then(|| (inner.to_owned(), outer.to_owned()))
}

/// The nodes that a joined node stands for, none if it isn't one.
fn separate(
    graph: &mut Graph,
    id: NodeId,
    inner_origin: &str,
    outer_origin: &str,
) -> Result<Option<Vec<NodeId>>, IrError> {
    let node = graph.node(id).clone();
    let (mut op, mut inputs) = (node.op.clone(), node.inputs.clone());
    let (outer, operand) = match &mut op {
        Op::Gemm { epilogue, .. } | Op::GroupedGemm { epilogue, .. } => {
            match std::mem::replace(epilogue, Epilogue::None) {
                Epilogue::Glu(activation) => (Op::Glu(activation), None),
                Epilogue::Add => (Op::Binary(BinaryFunction::Add), inputs.pop()),
                Epilogue::None => return Ok(None),
            }
        }
        Op::Combine { addend } if *addend => {
            *addend = false;
            (Op::Binary(BinaryFunction::Add), inputs.pop())
        }
        _ => return Ok(None),
    };
    let inner = graph.add_node(op, inputs, inner_origin)?;
    graph.node_mut(inner).attributes = Attributes { origin: inner_origin.to_owned(), ..node.attributes.clone() };
    let result = first_output(graph, inner)?;
    let mut nodes = vec![inner];
    let operands = if let Some(operand) = operand {
        vec![result, operand]
    } else {
        let width = graph.value(result).ty.columns().and_then(|n| u32::try_from(n / 2).ok()).unwrap_or(0);
        let mut halves = Vec::with_capacity(2);
        for offset in [0, width] {
            let view = graph.add_node(Op::Columns { offset, width }, vec![result], inner_origin)?;
            halves.push(first_output(graph, view)?);
            nodes.push(view);
        }
        halves
    };
    let outer = graph.add_node(outer, operands, outer_origin)?;
    nodes.push(outer);
    for id in &nodes {
        let attributes = &mut graph.node_mut(*id).attributes;
        (attributes.phase, attributes.layer) = (node.attributes.phase, node.attributes.layer);
    }
    let map: HashMap<ValueId, ValueId> = node.outputs.iter().copied().zip([first_output(graph, outer)?]).collect();
    graph.replace_uses(&map);
    Ok(Some(nodes))
}

fn first_output(graph: &Graph, id: NodeId) -> Result<ValueId, IrError> {
    graph.node(id).outputs.first().copied().ok_or_else(|| IrError::Pass {
        pass: "fuse",
        what: format!("a node of {} has no result", graph.node(id).attributes.origin),
    })
}
