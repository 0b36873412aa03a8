//! Plan memory: gives every temporary value its place in one of the pools. In: a flat graph. Out: offsets that hold for every
//! size up to the bounds' maxima, because a smaller step uses a prefix of each place.
//!
//! A value lives from the node that writes it to the last node that reads it or a view of it. Where the device allows, a
//! result takes the place of an operand that dies. Places are chosen largest first, each in the tightest gap among those
//! alive at the same time. `check` proves the outcome in another way.

use super::{DeviceModel, PassName, Report};
use crate::program::ArenaPool;
use crate::{Graph, IrError, MemoryScope, NodeId, Op, ValueId};

/// Places of temporaries.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemoryPlan {
    /// Pool and first byte of each value that has a place of its own; indexed by value.
    pub places: Vec<Option<(ArenaPool, u64)>>,
    /// Bytes of each pool.
    pub arena_bytes: [u64; 3],
    /// Most bytes alive at once in each pool: no plan can do with less.
    pub peak_live_bytes: [u64; 3],
    /// Results that took an operand's place.
    pub in_place: usize,
}

/// Whether the op vocabulary lets output 0 take the place of operand `operand` (an index into the operands of an
/// instruction with `operands` of them).
#[must_use]
pub fn vocabulary_in_place(op: &Op, operand: usize, operands: usize) -> bool {
    match op {
        Op::Norm { .. } | Op::Rope(_) | Op::Unary(_) | Op::Softmax | Op::AllReduce { .. } => operand == 0,
        Op::Glu(_) | Op::Binary(_) => operand <= 1,
        Op::Gemm { epilogue: crate::Epilogue::Add, .. } => operand + 1 == operands,
        _ => false,
    }
}

/// A piece of memory that one value after the other lives in.
#[derive(Debug)]
struct Buffer {
    pool: ArenaPool,
    bytes: u64,
    first: usize,
    last: usize,
    offset: u64,
}

/// Runs the pass.
///
/// # Errors
/// If sizes overflow at the maxima of the bounds.
pub fn run(graph: &Graph, device: &dyn DeviceModel) -> Result<(MemoryPlan, Report), IrError> {
    let lifetimes = lifetimes(graph)?;
    let pools = pools(graph);
    let (mut buffers, owner, in_place) = assign(graph, device, &lifetimes, &pools)?;
    let mut report = Report { changes: buffers.len(), ..Report::new(PassName::PlanMemory) };
    let (mut arena_bytes, mut peak_live_bytes) = ([0; 3], [0; 3]);
    for pool in ArenaPool::ALL {
        let at = pool as usize;
        peak_live_bytes[at] = peak(&buffers, pool, graph.body.nodes.len());
        arena_bytes[at] = place(&mut buffers, pool, device.arena_alignment())?;
        if peak_live_bytes[at] > 0 {
            let ratio = arena_bytes[at] as f64 / peak_live_bytes[at] as f64;
            let (arena, peak) = (arena_bytes[at], peak_live_bytes[at]);
            report.notes.push(format!("{pool:?} pool: {arena} bytes, peak of live bytes {peak}, ratio {ratio:.3}"));
        }
    }
    report.notes.push(format!("{} places, {in_place} results in place", buffers.len()));
    let of = |buffer: &Option<usize>| buffer.and_then(|b| buffers.get(b)).map(|b| (b.pool, b.offset));
    let places = owner.iter().map(of).collect();
    Ok((MemoryPlan { places, arena_bytes, peak_live_bytes, in_place }, report))
}

/// Pool of each value.
fn pools(graph: &Graph) -> Vec<ArenaPool> {
    let mut pools = vec![ArenaPool::Temporary; graph.values.len()];
    for id in &graph.body.nodes {
        let node = graph.node(*id);
        match &node.op {
            Op::Route { .. } | Op::Dispatch { .. } => {
                node.outputs.iter().for_each(|v| pools[v.index()] = ArenaPool::Router);
                if let Some(logits) = node.inputs.first() {
                    pools[graph.root(*logits).0.index()] = ArenaPool::Router;
                }
            }
            // Rows sorted by expert: results of grouped linear layers and what is made of them before they are combined.
            _ => {
                for value in &node.outputs {
                    if graph.value(*value).ty.shape.len() == 3 {
                        pools[value.index()] = ArenaPool::Expert;
                    }
                }
            }
        }
    }
    pools
}

/// First and last step of each value that needs a place.
fn lifetimes(graph: &Graph) -> Result<Vec<Option<(usize, usize)>>, IrError> {
    let mut lifetimes = vec![None; graph.values.len()];
    let result = graph.body.results.first().map(|v| graph.root(*v).0);
    for (step, id) in graph.body.nodes.iter().enumerate() {
        let node = graph.node(*id);
        for value in &node.inputs {
            let root = graph.root(*value).0;
            if let Some((_, last)) = &mut lifetimes[root.index()] {
                *last = step;
            }
        }
        if node.op.is_source() || matches!(node.op, Op::Columns { .. }) {
            continue;
        }
        if matches!(node.op, Op::Layers { .. }) {
            return Err(fault("layers have to be expanded before memory is planned".to_owned()));
        }
        for value in &node.outputs {
            if Some(*value) != result && graph.value(*value).scope == MemoryScope::Temporary {
                lifetimes[value.index()] = Some((step, step));
            }
        }
    }
    Ok(lifetimes)
}

type Assignment = (Vec<Buffer>, Vec<Option<usize>>, usize);

/// Gives values buffers: of their own, or that of an operand that dies.
fn assign(
    graph: &Graph,
    device: &dyn DeviceModel,
    lifetimes: &[Option<(usize, usize)>],
    pools: &[ArenaPool],
) -> Result<Assignment, IrError> {
    let mut buffers: Vec<Buffer> = Vec::new();
    let mut owner = vec![None; graph.values.len()];
    let mut in_place = 0;
    for (step, id) in graph.body.nodes.iter().enumerate() {
        let mut free = reusable(graph, device, lifetimes, *id, step)?;
        for value in &graph.node(*id).outputs {
            let Some((first, last)) = lifetimes[value.index()] else { continue };
            let bytes = max_bytes(graph, *value)?;
            let taken = free.take().and_then(|operand: ValueId| owner[operand.index()]);
            let pool = pools[value.index()];
            let same = taken.filter(|b: &usize| buffers[*b].bytes == bytes && buffers[*b].pool == pool);
            let buffer = same.unwrap_or(buffers.len());
            if let Some(buffer) = same {
                buffers[buffer].last = last;
                in_place += 1;
            } else {
                buffers.push(Buffer { pool, bytes, first, last, offset: 0 });
            }
            owner[value.index()] = Some(buffer);
        }
    }
    Ok((buffers, owner, in_place))
}

/// The operand whose place output 0 of a node may take: it is dense, dies here, is read once and has the output's shape.
fn reusable(
    graph: &Graph,
    device: &dyn DeviceModel,
    lifetimes: &[Option<(usize, usize)>],
    id: NodeId,
    step: usize,
) -> Result<Option<ValueId>, IrError> {
    let node = graph.node(id);
    let Some(output) = node.outputs.first() else { return Ok(None) };
    let candidate = |value: &ValueId| {
        let dies = lifetimes[value.index()].is_some_and(|(_, last)| last == step);
        let once = node.inputs.iter().filter(|v| graph.root(**v).0 == *value).count() == 1;
        dies && once && graph.value(*value).ty == graph.value(*output).ty
    };
    if node.op.is_source() || !node.inputs.iter().any(candidate) {
        return Ok(None);
    }
    let instruction = super::lower::describe(graph, id, node.attributes.layer)?;
    let operands = super::lower::operand_order(graph, id);
    let found = operands
        .iter()
        .enumerate()
        .find_map(|(i, value)| value.filter(|v| candidate(v) && device.in_place(&instruction, i)));
    Ok(found)
}

/// Bytes of a value at the largest sizes.
pub(crate) fn max_bytes(graph: &Graph, value: ValueId) -> Result<u64, IrError> {
    let ty = &graph.value(value).ty;
    let elements = ty.shape.iter().try_fold(1_u64, |n, dim| n.checked_mul(dim.max(&graph.bounds)));
    elements
        .and_then(|n| ty.dtype.bytes_for(n))
        .ok_or_else(|| fault(format!("{ty} overflows at the largest sizes; lower the bounds of its symbols")))
}

fn peak(buffers: &[Buffer], pool: ArenaPool, steps: usize) -> u64 {
    let mut change = vec![0_i128; steps + 1];
    for buffer in buffers.iter().filter(|b| b.pool == pool) {
        change[buffer.first] += i128::from(buffer.bytes);
        change[buffer.last + 1] -= i128::from(buffer.bytes);
    }
    let mut live = 0_i128;
    let peak = change.into_iter().map(|c| {
        live += c;
        live
    });
    peak.max().and_then(|n| u64::try_from(n).ok()).unwrap_or(0)
}

/// Chooses offsets in one pool, largest first; gives its size.
fn place(buffers: &mut [Buffer], pool: ArenaPool, alignment: u64) -> Result<u64, IrError> {
    let align = |n: u64| n.checked_next_multiple_of(alignment.max(1));
    let too_large = || fault("the arena exceeds 64 bits; lower the bounds of the symbols".to_owned());
    let mut order: Vec<usize> = (0..buffers.len()).filter(|i| buffers[*i].pool == pool).collect();
    order.sort_by_key(|i| (std::cmp::Reverse(buffers[*i].bytes), buffers[*i].first));
    let mut placed: Vec<usize> = Vec::new();
    let mut total = 0;
    for i in order {
        let (bytes, first, last) = (buffers[i].bytes, buffers[i].first, buffers[i].last);
        // `placed` is sorted by offset: the gaps between those alive at the same time are found in one walk.
        let mut best: Option<(u64, u64)> = None;
        let mut end = 0;
        for other in placed.iter().map(|j| &buffers[*j]).filter(|o| o.first <= last && first <= o.last) {
            let start = align(end).ok_or_else(too_large)?;
            if let Some(gap) = other.offset.checked_sub(start)
                && gap >= bytes
                && best.is_none_or(|(size, _)| gap < size)
            {
                best = Some((gap, start));
            }
            end = end.max(other.offset + other.bytes);
        }
        let offset = best.map_or_else(|| align(end), |(_, start)| Some(start)).ok_or_else(too_large)?;
        total = offset.checked_add(bytes).ok_or_else(too_large)?.max(total);
        buffers[i].offset = offset;
        let at = placed.partition_point(|j| buffers[*j].offset <= offset);
        placed.insert(at, i);
    }
    align(total).ok_or_else(too_large)
}

fn fault(what: String) -> IrError {
    IrError::Pass { pass: "plan_memory", what }
}
