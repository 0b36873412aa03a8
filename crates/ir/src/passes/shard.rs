//! Shard: one device's part of a model that a group of devices computes together.
//!
//! In: the graph of a model, a rank and the number of ranks. Out: the same graph with the rank's heads, columns and slices of weights. How
//! every value lies on the ranks is followed from op to op ([`Spread`]): projections of queries, keys, values, gates and ups are
//! cut by their outputs, so their results are split; a linear layer over a split value is cut by its inputs, so its results have to be
//! summed; a sum is exchanged (`all_reduce`) where somebody needs the whole of it, which is once after attention and once
//! after the feed-forward part. Embedding, norms, routers and the cache of latent attention are the same on every rank. The head is cut by
//! its outputs and the logits stay split: who reads them puts them together.
//!
//! Invariants: all ranks have the same ops in the same order, so that their exchanges meet; what can't be cut into equal parts is
//! refused with the arithmetic. Runs before projections are joined.

use std::collections::{HashMap, HashSet};

use super::roles::{Role, segment_roles};
use super::{PassName, Report};
use crate::{BinaryFunction, BodyId, Graph, IrError, Node, NodeId, Op, StateLayout, ValueId, WeightId, WeightSlice};

/// Rows or columns that share a scale in block-scaled weights.
const SCALE_BLOCK: u64 = super::lower::BLOCK_SCALE.0 as u64;

/// Which device of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shard {
    /// Its number, from 0.
    pub rank: u32,
    /// Devices of the group.
    pub ranks: u32,
}

/// How a value lies on the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spread {
    /// The same on each.
    Whole,
    /// Each has its columns.
    Split,
    /// Each has an addend of it.
    Partial,
}

/// How a linear layer is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cut {
    /// Not at all.
    None,
    /// By its outputs: so many parts, of which the rank has a run.
    Outputs { first: u64, count: u64, parts: u64 },
    /// By its inputs.
    Inputs,
}

/// Heads of a body's attention, over all ranks.
#[derive(Debug, Clone, Copy)]
struct Heads {
    query: u64,
    /// None for latent attention, whose cache is whole on every rank.
    key_value: Option<u64>,
}

/// Runs the pass.
///
/// # Errors
/// If something can't be cut into equal parts, or an op needs more of a value than a rank has.
pub fn run(graph: &mut Graph, shard: Option<Shard>) -> Result<Report, IrError> {
    let mut report = Report::new(PassName::Shard);
    let Some(shard) = shard else {
        report.notes.push("one device: nothing is cut".to_owned());
        return Ok(report);
    };
    if shard.ranks < 2 || shard.rank >= shard.ranks {
        return Err(fault(format!("rank {} of a group of {}; expected two devices or more", shard.rank, shard.ranks)));
    }
    if graph.weights.iter().any(|decl| decl.slice.is_some()) {
        return Err(fault("the graph is one device's part already".to_owned()));
    }
    let tables = tables(graph);
    let mut sharder = Sharder {
        shard,
        tables,
        graph,
        spread: HashMap::new(),
        copies: HashMap::new(),
        reduced: HashMap::new(),
        out: Vec::new(),
        heads: None,
        sliced: HashSet::new(),
        exchanges: 0,
        notes: Vec::new(),
    };
    let ids: Vec<BodyId> = sharder.graph.body_ids().collect();
    for id in ids {
        sharder.body(id)?;
    }
    let Sharder { sliced, exchanges, notes, .. } = sharder;
    report.changes = sliced.len() + exchanges;
    report.notes.push(format!(
        "rank {} of {}: {} weights cut, {exchanges} exchanges in all templates",
        shard.rank,
        shard.ranks,
        sliced.len()
    ));
    report.notes.extend(notes);
    Ok(report)
}

/// Weights that rows are looked up in: they stay whole, whoever else uses them.
fn tables(graph: &Graph) -> HashSet<WeightId> {
    let embeds = graph.nodes.iter().filter(|node| matches!(node.op, Op::Embed)).flat_map(|node| &node.inputs);
    embeds.filter_map(|value| weight_of(graph, *value)).collect()
}

fn weight_of(graph: &Graph, value: ValueId) -> Option<WeightId> {
    match graph.definition(value)?.1.op {
        Op::Weight(id) => Some(id),
        _ => None,
    }
}

struct Sharder<'g> {
    shard: Shard,
    graph: &'g mut Graph,
    tables: HashSet<WeightId>,
    /// Values that are not whole.
    spread: HashMap<ValueId, Spread>,
    /// Declarations of parts of tables.
    copies: HashMap<(WeightId, WeightSlice), WeightId>,
    /// Sums that were exchanged.
    reduced: HashMap<ValueId, ValueId>,
    /// The body as it becomes.
    out: Vec<NodeId>,
    heads: Option<Heads>,
    sliced: HashSet<WeightId>,
    exchanges: usize,
    notes: Vec<String>,
}

impl Sharder<'_> {
    fn ranks(&self) -> u64 {
        u64::from(self.shard.ranks)
    }
    fn rank(&self) -> u64 {
        u64::from(self.shard.rank)
    }
    fn spread(&self, value: ValueId) -> Spread {
        self.spread.get(&value).copied().unwrap_or(Spread::Whole)
    }

    /// The rank's share of a number of things that can't be divided further.
    fn share(&self, what: &str, of: u64) -> Result<u64, IrError> {
        if of.is_multiple_of(self.ranks()) {
            return Ok(of / self.ranks());
        }
        Err(fault(format!(
            "{of} {what} can't be split evenly among {} devices; take a group whose size divides {of}",
            self.ranks()
        )))
    }

    fn body(&mut self, id: BodyId) -> Result<(), IrError> {
        let body = self.graph.body_of_mut(id);
        let nodes = std::mem::take(&mut body.nodes);
        let results = body.results.clone();
        self.heads = nodes.iter().find_map(|id| heads(self.graph.node(*id)));
        self.reduced.clear();
        if let Some(heads) = self.heads {
            self.share("query heads", heads.query)?;
        }
        if let Some(key_value) = self.heads.and_then(|heads| heads.key_value) {
            self.states(&nodes, key_value)?;
        }
        for id in nodes {
            self.node(id)?;
        }
        let mut whole = Vec::with_capacity(results.len());
        for value in results {
            // Logits stay split; a layer hands on a whole value.
            let split = id == BodyId::Main && self.spread(value) == Spread::Split;
            whole.push(if split { value } else { self.whole(value, "the result")? });
        }
        let body = self.graph.body_of_mut(id);
        body.nodes = std::mem::take(&mut self.out);
        body.results = whole;
        Ok(())
    }

    /// Key/value heads of a rank: its share, or the one that its query heads read where there are more ranks than heads.
    fn key_value_share(&self, heads: u64) -> Result<(u64, u64), IrError> {
        let (rank, ranks) = (self.rank(), self.ranks());
        if heads.is_multiple_of(ranks) {
            return Ok((rank * (heads / ranks), heads / ranks));
        }
        if heads > 0 && ranks.is_multiple_of(heads) {
            return Ok((rank / (ranks / heads), 1));
        }
        Err(fault(format!(
            "{heads} key/value heads can't be split among {ranks} devices, nor each be held by as many of them; take a group whose size \
             divides {heads}, or a multiple of it"
        )))
    }

    /// Caches hold the rank's heads.
    fn states(&mut self, nodes: &[NodeId], heads: u64) -> Result<(), IrError> {
        let (_, count) = self.key_value_share(heads)?;
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        for id in nodes {
            let Op::Attention { state, .. } = self.graph.node(*id).op else { continue };
            if let StateLayout::Split { num_key_value_heads, .. } = &mut self.graph.states[state.index()].layout {
                *num_key_value_heads = count;
            }
        }
        Ok(())
    }

    fn node(&mut self, id: NodeId) -> Result<(), IrError> {
        let node = self.graph.node(id).clone();
        let spreads: Vec<Spread> = node.inputs.iter().map(|value| self.spread(*value)).collect();
        let first = spreads.first().copied().unwrap_or(Spread::Whole);
        let spread = match &node.op {
            Op::Gemm { .. } | Op::GroupedGemm { .. } => return self.linear(id, &node),
            Op::Rope(rope) if first == Spread::Split => {
                let columns = self.columns(node.inputs.first())?;
                let num_heads = u32::try_from(columns / u64::from(rope.head_dim.max(1))).unwrap_or(u32::MAX);
                self.graph.node_mut(id).op = Op::Rope(crate::Rope { num_heads, ..*rope });
                Spread::Split
            }
            // Groups within a head; a mean over all heads would need the other ranks'.
            Op::Norm { axis, .. } if first == Spread::Split => {
                let columns = self.columns(node.inputs.first())?;
                if !columns.is_multiple_of(u64::from(*axis).max(1)) {
                    let what = format!("a norm over {axis} values, of which a device has {columns}");
                    return Err(self.refuse(&node, &what));
                }
                Spread::Split
            }
            Op::Attention { state, attention } if first == Spread::Split => {
                let num_heads = self.share("query heads", u64::from(attention.num_heads))? as u32;
                let (_, heads) = self.key_value_share(u64::from(attention.num_key_value_heads))?;
                let attention = crate::Attention { num_heads, num_key_value_heads: heads as u32, ..*attention };
                self.graph.node_mut(id).op = Op::Attention { state: *state, attention };
                Spread::Split
            }
            Op::MlaAttention { state, attention } if first == Spread::Split => {
                let num_heads = self.share("query heads", u64::from(attention.num_heads))?;
                let op = crate::MlaAttention { num_heads: num_heads as u32, ..*attention };
                self.graph.node_mut(id).op = Op::MlaAttention { state: *state, attention: op };
                if let Some(kv_b) = node.inputs.get(1) {
                    let rows = u64::from(attention.nope_dim) + u64::from(attention.value_dim);
                    let count = num_heads.saturating_mul(rows);
                    let first = self.rank().saturating_mul(count);
                    self.graph.node_mut(id).inputs[1] = self.cut_weight(*kv_b, 0, first, count)?;
                }
                Spread::Split
            }
            Op::KvAppend { .. } => {
                // Latents are whole, keys and values of heads are split; a sum is neither yet.
                for (at, value) in node.inputs.iter().enumerate().filter(|(at, _)| spreads[*at] == Spread::Partial) {
                    self.graph.node_mut(id).inputs[at] = self.whole(*value, &node.attributes.origin)?;
                }
                Spread::Whole
            }
            Op::Glu(_) | Op::Binary(_) | Op::Unary(_) | Op::Cast if spreads.iter().all(|s| *s == Spread::Split) => {
                Spread::Split
            }
            Op::Binary(BinaryFunction::Add) if spreads.iter().all(|s| *s == Spread::Partial) => Spread::Partial,
            Op::Binary(BinaryFunction::Mul) if spreads == [Spread::Partial, Spread::Whole] => Spread::Partial,
            Op::Combine { addend } if first == Spread::Partial => {
                if *addend && spreads.last() != Some(&Spread::Partial) {
                    let value = operand(&node, 0)?;
                    self.graph.node_mut(id).inputs[0] = self.whole(value, &node.attributes.origin)?;
                    Spread::Whole
                } else {
                    Spread::Partial
                }
            }
            _ => {
                for (at, value) in node.inputs.iter().enumerate() {
                    self.graph.node_mut(id).inputs[at] = self.whole(*value, &node.attributes.origin)?;
                }
                Spread::Whole
            }
        };
        self.finish(id, spread)
    }

    /// Infers the types of a node's results anew and appends it.
    fn finish(&mut self, id: NodeId, spread: Spread) -> Result<(), IrError> {
        let node = self.graph.node(id).clone();
        let types = crate::build::result_types(self.graph, &node.op, &node.inputs)?;
        for (value, ty) in node.outputs.iter().zip(types) {
            self.graph.values[value.index()].ty = ty;
            if spread != Spread::Whole {
                self.spread.insert(*value, spread);
            }
        }
        self.out.push(id);
        Ok(())
    }

    /// The value as every rank needs it.
    fn whole(&mut self, value: ValueId, reader: &str) -> Result<ValueId, IrError> {
        match self.spread(value) {
            Spread::Whole => Ok(value),
            Spread::Split => {
                let of = self.graph.definition(value).map_or("a parameter", |(_, node)| &node.attributes.origin);
                Err(fault(format!(
                    "{reader} needs all of {of}, of which each device has a part; run this model on one device"
                )))
            }
            Spread::Partial => {
                if let Some(whole) = self.reduced.get(&value) {
                    return Ok(*whole);
                }
                let origin = self.graph.definition(value).map_or("sum", |(_, node)| &node.attributes.origin).to_owned();
                let op = Op::AllReduce { ranks: self.shard.ranks };
                let whole = self.append(op, vec![value], &format!("{origin} over ranks"))?;
                self.exchanges += 1;
                self.reduced.insert(value, whole);
                Ok(whole)
            }
        }
    }

    fn append(&mut self, op: Op, inputs: Vec<ValueId>, origin: &str) -> Result<ValueId, IrError> {
        let id = self.graph.add_node(op, inputs, origin)?;
        self.out.push(id);
        self.graph.node(id).outputs.first().copied().ok_or_else(|| fault(format!("{origin} has no result")))
    }

    fn columns(&self, value: Option<&ValueId>) -> Result<u64, IrError> {
        let columns = value.and_then(|value| self.graph.value(*value).ty.columns());
        columns.ok_or_else(|| fault("a split value without a constant number of columns".to_owned()))
    }

    fn refuse(&self, node: &Node, what: &str) -> IrError {
        fault(format!("{} ({}): {what}; run this model on one device", node.op.name(), node.attributes.origin))
    }

    /// How a linear layer over a whole value is cut: by the role of its weight.
    fn cut(&mut self, role: Role, rows: u64) -> Result<Cut, IrError> {
        let (rank, ranks) = (self.rank(), self.ranks());
        let even = |count: u64, parts: u64| Cut::Outputs { first: rank * count, count, parts };
        Ok(match (role, self.heads) {
            (Role::Query | Role::QueryB, Some(heads)) => even(self.share("query heads", heads.query)?, heads.query),
            (Role::Key | Role::Value, Some(Heads { key_value: Some(heads), .. })) => {
                let (first, count) = self.key_value_share(heads)?;
                Cut::Outputs { first, count, parts: heads }
            }
            (Role::Gate | Role::Up, _) => even(self.share("feed-forward columns", rows)?, rows),
            (Role::GateExperts | Role::UpExperts, _) => even(self.share("columns of an expert", rows)?, rows),
            (Role::GateShared | Role::UpShared, _) => even(self.share("columns of the shared expert", rows)?, rows),
            (Role::Head, _) if rows.is_multiple_of(ranks) => even(rows / ranks, rows),
            (Role::Head, _) => {
                self.notes.push(format!("the head is whole on every device: {rows} rows are no multiple of {ranks}"));
                Cut::None
            }
            _ => Cut::None,
        })
    }

    fn linear(&mut self, id: NodeId, node: &Node) -> Result<(), IrError> {
        let x = operand(node, 0)?;
        let x = if self.spread(x) == Spread::Partial { self.whole(x, &node.attributes.origin)? } else { x };
        self.graph.node_mut(id).inputs[0] = x;
        let (scales, weights_at) = match &node.op {
            Op::Gemm { scales, .. } => (scales.clone(), 1),
            Op::GroupedGemm { scales, gather, .. } => (scales.clone(), 2 + usize::from(*gather)),
            _ => return Ok(()),
        };
        let roles = segment_roles(self.graph, node);
        let mut cut = Cut::None;
        let mut at = weights_at;
        for (segment, (scaled, role)) in scales.iter().zip(roles).enumerate() {
            let weight = operand(node, at)?;
            let shape = self.graph.value(weight).ty.shape.clone();
            let axis = shape.len().saturating_sub(2);
            let rows = weight_of(self.graph, weight).map_or(0, |id| self.graph.weight(id).whole_shape()[axis]);
            let wanted = if self.spread(x) == Spread::Split { Cut::Inputs } else { self.cut(role, rows)? };
            if segment > 0 && wanted != cut {
                return Err(self.refuse(node, "segments that are cut differently"));
            }
            cut = wanted;
            let (axis, first, count) = match cut {
                Cut::None => break,
                Cut::Outputs { first, count, parts } => {
                    let of_part = rows / parts.max(1);
                    (axis, first * of_part, count * of_part)
                }
                Cut::Inputs => {
                    let columns = self.columns(Some(&x))?;
                    (axis + 1, self.rank().saturating_mul(columns), columns)
                }
            };
            if scales.len() > 1 && matches!(node.op, Op::Gemm { .. }) {
                return Err(self.refuse(node, "projections that are joined already"));
            }
            self.graph.node_mut(id).inputs[at] = self.cut_weight(weight, axis, first, count)?;
            if *scaled {
                let scale = operand(node, at + 1)?;
                if !first.is_multiple_of(SCALE_BLOCK) || !count.is_multiple_of(SCALE_BLOCK) {
                    let what = format!(
                        "a device's {count} rows or columns from {first} are not whole blocks of {SCALE_BLOCK} that share a scale"
                    );
                    return Err(self.refuse(node, &what));
                }
                let (first, count) = (first / SCALE_BLOCK, count / SCALE_BLOCK);
                self.graph.node_mut(id).inputs[at + 1] = self.cut_weight(scale, axis, first, count)?;
            }
            at += 1 + usize::from(*scaled);
        }
        self.bias(id, cut, weights_at + scales.len() + scales.iter().filter(|scaled| **scaled).count())?;
        let spread = match cut {
            Cut::None => Spread::Whole,
            Cut::Outputs { .. } => Spread::Split,
            Cut::Inputs => Spread::Partial,
        };
        self.finish(id, spread)
    }

    /// A bias goes with the outputs; to a sum over ranks the first one adds it.
    fn bias(&mut self, id: NodeId, cut: Cut, at: usize) -> Result<(), IrError> {
        let node = self.graph.node(id).clone();
        let Op::Gemm { biases, .. } = &node.op else { return Ok(()) };
        if !biases.contains(&true) {
            return Ok(());
        }
        match cut {
            Cut::None => Ok(()),
            Cut::Outputs { first, count, parts } => {
                let bias = operand(&node, at)?;
                let rows = self.columns(Some(&bias))?;
                let rows = weight_of(self.graph, bias).map_or(rows, |id| self.graph.weight(id).whole_shape()[0]);
                let of_part = rows / parts.max(1);
                self.graph.node_mut(id).inputs[at] = self.cut_weight(bias, 0, first * of_part, count * of_part)?;
                Ok(())
            }
            Cut::Inputs => {
                if self.shard.rank > 0 {
                    let node = self.graph.node_mut(id);
                    node.inputs.remove(at);
                    if let Op::Gemm { biases, .. } = &mut node.op {
                        biases.fill(false);
                    }
                }
                Ok(())
            }
        }
    }

    /// A part of a weight; of a table a declaration of its own.
    fn cut_weight(&mut self, value: ValueId, axis: usize, first: u64, count: u64) -> Result<ValueId, IrError> {
        let id = weight_of(self.graph, value).ok_or_else(|| fault("a factor that is no weight".to_owned()))?;
        let decl = self.graph.weight(id).clone();
        let whole = decl.whole_shape();
        let slice = WeightSlice { axis: axis as u32, first, of: whole.get(axis).copied().unwrap_or(0) };
        if count == 0 || first.checked_add(count).is_none_or(|end| end > slice.of) {
            return Err(fault(format!("{}: {count} from {first} of {}", decl.name, slice.of)));
        }
        if axis + 1 == whole.len() {
            for source in decl.sources.iter().filter(|source| !source.tensors.is_empty()) {
                let block = source.dtype.block_len() as u64;
                if !first.is_multiple_of(block) || !count.is_multiple_of(block) {
                    return Err(fault(format!(
                        "{}: {} inputs among {} devices are {count} each, and {} is stored in blocks of {block}, which can't be cut; \
                         take a smaller group, or a file in another storage type",
                        decl.name,
                        slice.of,
                        self.ranks(),
                        source.dtype.name()
                    )));
                }
            }
        }
        let mut shape = whole;
        if let Some(dim) = shape.get_mut(axis) {
            *dim = count;
        }
        self.sliced.insert(id);
        let part = crate::WeightDecl { shape, slice: Some(slice), ..decl };
        if self.tables.contains(&id) {
            let copy = match self.copies.get(&(id, slice)) {
                Some(copy) => *copy,
                None => {
                    let copy = self.graph.add_weight(part);
                    self.copies.insert((id, slice), copy);
                    copy
                }
            };
            let origin = self.graph.definition(value).map_or("", |(_, node)| &node.attributes.origin).to_owned();
            return self.append(Op::Weight(copy), Vec::new(), &origin);
        }
        // Templates share declarations: each cuts them alike.
        if self.graph.weight(id).slice.is_some_and(|known| known != slice) {
            return Err(fault(format!("{} is cut in two ways", part.name)));
        }
        self.graph.weights[id.index()] = part;
        let types = crate::build::result_types(self.graph, &Op::Weight(id), &[])?;
        if let Some(ty) = types.into_iter().next() {
            self.graph.values[value.index()].ty = ty;
        }
        Ok(value)
    }
}

fn operand(node: &Node, at: usize) -> Result<ValueId, IrError> {
    let missing = || fault(format!("{} ({}) without operand {at}", node.op.name(), node.attributes.origin));
    node.inputs.get(at).copied().ok_or_else(missing)
}

fn heads(node: &Node) -> Option<Heads> {
    match &node.op {
        Op::Attention { attention, .. } => Some(Heads {
            query: u64::from(attention.num_heads),
            key_value: Some(u64::from(attention.num_key_value_heads)),
        }),
        Op::MlaAttention { attention, .. } => Some(Heads { query: u64::from(attention.num_heads), key_value: None }),
        _ => None,
    }
}

fn fault(what: String) -> IrError {
    IrError::Pass { pass: "shard", what }
}
