//! Canonicalise: says everything once. In: a graph as built. Out: the same function with
//! - inputs and tables once, at the front of the main body, weights once per body;
//! - no columns of columns, no conversion of what is converted already, no node that nobody reads;
//! - projections of one input (query, key, value; gate, up) joined into one linear layer with several segments, whose
//!   results are columns. Each segment keeps its own weight, so storage types may differ.

use std::collections::HashMap;

use super::roles::{Role, segment_roles};
use super::{DeviceModel, PassName, Report, supported};
use crate::{BodyId, DType, Epilogue, GemmType, Graph, IrError, NodeId, Op, ValueId, WeightId};

/// Projections that are joined if they read the same input, in the order of segments.
const SIBLINGS: &[(&[Role], GemmType)] = &[
    (&[Role::Query, Role::Key, Role::Value], GemmType::FusedQkv),
    (&[Role::QueryA, Role::KeyValueA], GemmType::FusedQkv),
    (&[Role::Query, Role::KeyValueA], GemmType::FusedQkv),
    (&[Role::Gate, Role::Up], GemmType::FusedGateUp),
    (&[Role::GateShared, Role::UpShared], GemmType::FusedGateUp),
    (&[Role::GateExperts, Role::UpExperts], GemmType::MoeGrouped),
];

/// Runs the pass.
///
/// # Errors
/// If a node that it makes doesn't fit, which means that the graph was invalid.
pub fn run(graph: &mut Graph, device: &dyn DeviceModel) -> Result<Report, IrError> {
    let mut report = Report::new(PassName::Canonicalise);
    let sources = fold_sources(graph);
    let views = fold_views(graph);
    for body in graph.body_ids() {
        for (roles, gemm_type) in SIBLINGS {
            while let Some(note) = join_siblings(graph, body, roles, *gemm_type, device)? {
                report.notes.push(note);
                report.changes += 1;
            }
        }
    }
    let views = views + fold_views(graph);
    let dead = graph.remove_dead();
    report.changes += sources + views + dead;
    report
        .notes
        .push(format!("{sources} repeated sources, {views} views and conversions, {dead} unread nodes removed"));
    Ok(report)
}

#[derive(PartialEq, Eq, Hash)]
enum SourceKey {
    Input(&'static str),
    Table(Vec<u32>),
    Weight(BodyId, WeightId),
}

fn fold_sources(graph: &mut Graph) -> usize {
    let mut first: HashMap<SourceKey, ValueId> = HashMap::new();
    let mut map = HashMap::new();
    let mut front = Vec::new();
    let mut folded = 0;
    for body in graph.body_ids() {
        let nodes = std::mem::take(&mut graph.body_of_mut(body).nodes);
        let mut kept = Vec::with_capacity(nodes.len());
        for id in nodes {
            let node = graph.node(id);
            let key = match &node.op {
                Op::Input { name } => SourceKey::Input(name),
                Op::Const { data } => SourceKey::Table(data.iter().map(|x| x.to_bits()).collect()),
                Op::Weight(weight) => SourceKey::Weight(body, *weight),
                _ => {
                    kept.push(id);
                    continue;
                }
            };
            let everywhere = !matches!(key, SourceKey::Weight(..));
            let Some(output) = node.outputs.first().copied() else { continue };
            if let Some(known) = first.get(&key) {
                map.insert(output, *known);
                folded += 1;
            } else {
                first.insert(key, output);
                if everywhere { front.push(id) } else { kept.push(id) }
            }
        }
        graph.body_of_mut(body).nodes = kept;
    }
    front.append(&mut graph.body.nodes);
    graph.body.nodes = front;
    graph.replace_uses(&map);
    folded
}

fn fold_views(graph: &mut Graph) -> usize {
    let mut folded = 0;
    let mut map = HashMap::new();
    let ids: Vec<NodeId> = graph.body_ids().flat_map(|b| graph.body_of(b).nodes.clone()).collect();
    for id in ids {
        let node = graph.node(id);
        let ([input], [output]) = (node.inputs.as_slice(), node.outputs.as_slice()) else { continue };
        let (input, output) = (*map.get(input).unwrap_or(input), *output);
        let inner = graph.definition(input).map(|(_, node)| (node.op.clone(), node.inputs.first().copied()));
        match node.op {
            Op::Columns { .. } if graph.value(output).ty == graph.value(input).ty => {
                map.insert(output, input);
                folded += 1;
            }
            Op::Columns { offset, width } => {
                if let Some((Op::Columns { offset: outer, .. }, Some(root))) = inner {
                    let node = graph.node_mut(id);
                    node.op = Op::Columns { offset: offset.saturating_add(outer), width };
                    node.inputs = vec![root];
                    folded += 1;
                }
            }
            Op::Cast if graph.value(input).ty.dtype == DType::F32 => {
                map.insert(output, input);
                folded += 1;
            }
            _ => {}
        }
    }
    graph.replace_uses(&map);
    folded
}

/// A linear layer that may be joined: one segment, no epilogue.
fn joinable(graph: &Graph, id: NodeId) -> Option<Role> {
    let node = graph.node(id);
    let (scales, epilogue) = match &node.op {
        Op::Gemm { scales, epilogue, .. } | Op::GroupedGemm { scales, epilogue, .. } => (scales, epilogue),
        _ => return None,
    };
    let first_weight = super::lower::operand_order(graph, id).len();
    let sources = node
        .inputs
        .iter()
        .skip(activations(&node.op))
        .all(|v| graph.definition(*v).is_some_and(|(_, node)| node.op.is_source()));
    let plain = scales.len() == 1 && *epilogue == Epilogue::None && sources && first_weight > 0;
    plain.then(|| segment_roles(graph, node).first().copied().unwrap_or(Role::Other))
}

/// Operands before the first weight.
const fn activations(op: &Op) -> usize {
    match op {
        Op::GroupedGemm { gather: true, .. } => 3,
        Op::GroupedGemm { gather: false, .. } => 2,
        _ => 1,
    }
}

/// Joins the first set of siblings of a body, if there is one; gives a line for the report.
fn join_siblings(
    graph: &mut Graph,
    body: BodyId,
    roles: &[Role],
    gemm_type: GemmType,
    device: &dyn DeviceModel,
) -> Result<Option<String>, IrError> {
    let nodes = graph.body_of(body).nodes.clone();
    for first in &nodes {
        if joinable(graph, *first).is_none_or(|role| !roles.contains(&role)) {
            continue;
        }
        let shared = activations(&graph.node(*first).op);
        let same_input = |id: &NodeId| {
            let (a, b) = (graph.node(*first), graph.node(*id));
            std::mem::discriminant(&a.op) == std::mem::discriminant(&b.op)
                && a.inputs.get(..shared) == b.inputs.get(..shared)
        };
        let mut members = Vec::new();
        for role in roles {
            let member = nodes.iter().find(|id| joinable(graph, **id) == Some(*role) && same_input(id));
            members.extend(member.copied());
        }
        if members.len() < 2 || !members.contains(first) {
            continue;
        }
        if let Some(joined) = join(graph, body, &members, gemm_type, device)? {
            return Ok(Some(joined));
        }
    }
    Ok(None)
}

fn join(
    graph: &mut Graph,
    body: BodyId,
    members: &[NodeId],
    joined_type: GemmType,
    device: &dyn DeviceModel,
) -> Result<Option<String>, IrError> {
    let Some(first) = members.first().map(|id| graph.node(*id)) else { return Ok(None) };
    let shared = activations(&first.op);
    let mut inputs: Vec<ValueId> = first.inputs.iter().take(shared).copied().collect();
    let (mut biases, mut scales, mut bias_values, mut origins) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for id in members {
        let node = graph.node(*id);
        let (scaled, biased) = match &node.op {
            Op::Gemm { scales, biases, .. } => (scales.contains(&true), biases.contains(&true)),
            Op::GroupedGemm { scales, .. } => (scales.contains(&true), false),
            _ => return Ok(None),
        };
        let mut rest = node.inputs.iter().skip(shared).copied();
        inputs.extend(rest.by_ref().take(1 + usize::from(scaled)));
        bias_values.extend(rest);
        scales.push(scaled);
        biases.push(biased);
        origins.push(node.attributes.origin.clone());
    }
    inputs.extend(bias_values);
    let op = match first.op {
        Op::GroupedGemm { num_experts, top_k, gather, .. } => {
            Op::GroupedGemm { num_experts, top_k, gather, scales, epilogue: Epilogue::None }
        }
        _ => Op::Gemm { gemm_type: joined_type, biases, scales, epilogue: Epilogue::None },
    };
    let tolerance = members.iter().map(|id| graph.node(*id).attributes.tolerance).min();
    let sensitivity = members.iter().map(|id| graph.node(*id).attributes.sensitivity).max();
    let origin = origins.join("+");
    let joined = graph.add_node(op, inputs, &origin)?;
    if !supported(graph, body, joined, device)? || !aligned(graph, members, device.operand_alignment()) {
        return Ok(None);
    }
    let attributes = &mut graph.node_mut(joined).attributes;
    attributes.tolerance = tolerance.unwrap_or(attributes.tolerance);
    attributes.sensitivity = sensitivity.unwrap_or(attributes.sensitivity);
    splice(graph, body, members, joined, &origins)?;
    Ok(Some(format!("joined {origin}")))
}

/// Whether the results of all members, side by side, begin where the device can read them.
fn aligned(graph: &Graph, members: &[NodeId], alignment: u64) -> bool {
    let mut column = 0_u64;
    members.iter().filter_map(|id| graph.node(*id).outputs.first()).all(|value| {
        let ty = &graph.value(*value).ty;
        let fits = column.saturating_mul(ty.dtype.block_bytes() as u64).is_multiple_of(alignment.max(1));
        column = column.saturating_add(ty.columns().unwrap_or(0));
        fits
    })
}

/// Puts the joined layer where its first member stands, with the sources that it reads before it and columns after it.
fn splice(
    graph: &mut Graph,
    body: BodyId,
    members: &[NodeId],
    joined: NodeId,
    origins: &[String],
) -> Result<(), IrError> {
    let Some(wide) = graph.node(joined).outputs.first().copied() else { return Ok(()) };
    let mut offset = 0_u32;
    let mut map = HashMap::new();
    let mut views = Vec::new();
    for (id, origin) in members.iter().zip(origins) {
        let Some(output) = graph.node(*id).outputs.first().copied() else { continue };
        let width = graph.value(output).ty.columns().and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
        let view = graph.add_node(Op::Columns { offset, width }, vec![wide], origin)?;
        offset = offset.saturating_add(width);
        map.extend(graph.node(view).outputs.first().map(|v| (output, *v)));
        views.push(view);
    }
    let inputs = &graph.node(joined).inputs;
    let moved: Vec<NodeId> = inputs.iter().filter_map(|v| graph.value(*v).def).collect();
    let nodes = std::mem::take(&mut graph.body_of_mut(body).nodes);
    let is_source = |id: &NodeId| moved.contains(id) && graph.node(*id).op.is_source();
    let sources: Vec<NodeId> = nodes.iter().filter(|id| is_source(id)).copied().collect();
    let mut order = Vec::with_capacity(nodes.len() + views.len());
    let mut placed = false;
    for id in nodes {
        if members.contains(&id) {
            if !placed {
                order.extend(sources.iter().copied().filter(|s| !order.contains(s)).collect::<Vec<_>>());
                order.push(joined);
                order.append(&mut views);
                placed = true;
            }
        } else if !(placed && sources.contains(&id)) {
            order.push(id);
        }
    }
    graph.body_of_mut(body).nodes = order;
    graph.replace_uses(&map);
    Ok(())
}
