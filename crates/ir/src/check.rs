//! An independent check of the memory plan and of lowering. It shares no code with either: it plays the program through
//! byte by byte, remembers who wrote each byte last, and compares that with what the graph says each operand should read.

use std::collections::{BTreeMap, HashMap};

use crate::passes::DeviceModel;
use crate::program::{ArenaPool, Instruction, Operand, Place, Program};
use crate::{Graph, IrError, Node, Op, SymbolBounds, ValueId};

/// Plays `program` with every symbol at its largest size in `sizes` and checks that
/// - instructions are the computing nodes of `graph`, in order;
/// - every byte that an operand reads was last written by the node that defines it;
/// - results overlap neither each other nor an operand, unless they take its very place and the device allows it;
/// - places are aligned and within their pool.
///
/// # Errors
/// The first violation, with the instruction.
pub fn check(graph: &Graph, program: &Program, device: &dyn DeviceModel, sizes: &SymbolBounds) -> Result<(), IrError> {
    let computes =
        |node: &&Node| !matches!(node.op, Op::Input { .. } | Op::Weight(_) | Op::Const { .. } | Op::Columns { .. });
    let nodes: Vec<&Node> = graph.body.nodes.iter().map(|id| graph.node(*id)).filter(computes).collect();
    if nodes.len() != program.instructions.len() {
        return Err(fault(format!("{} instructions for {} nodes", program.instructions.len(), nodes.len())));
    }
    let mut views = HashMap::new();
    for node in graph.body.nodes.iter().map(|id| graph.node(*id)) {
        if let (Op::Columns { .. }, [input], [output]) = (&node.op, node.inputs.as_slice(), node.outputs.as_slice()) {
            let owner = *views.get(input).unwrap_or(input);
            views.insert(*output, owner);
        }
    }
    let mut player = Player { pools: Default::default(), views, sizes, program, alignment: device.arena_alignment() };
    for (node, instruction) in nodes.into_iter().zip(&program.instructions) {
        player.step(node, instruction, device)?;
    }
    Ok(())
}

fn fault(what: String) -> IrError {
    IrError::Pass { pass: "check", what }
}

/// Who wrote which bytes last: first byte -> (end, value). Ranges don't overlap.
#[derive(Default)]
struct Writers(BTreeMap<u64, (u64, ValueId)>);

impl Writers {
    fn write(&mut self, start: u64, end: u64, value: ValueId) {
        let touched: Vec<(u64, u64, ValueId)> =
            self.0.range(..end).filter(|(_, (e, _))| *e > start).map(|(s, (e, v))| (*s, *e, *v)).collect();
        for (s, e, owner) in touched {
            self.0.remove(&s);
            if s < start {
                self.0.insert(s, (start, owner));
            }
            if e > end {
                self.0.insert(end, (e, owner));
            }
        }
        self.0.insert(start, (end, value));
    }
    /// Whether all bytes were last written by `value`.
    fn all_by(&self, start: u64, end: u64, value: ValueId) -> bool {
        let mut at = start;
        for (s, (e, owner)) in self.0.range(..end).filter(|(_, (e, _))| *e > start) {
            if *s > at || *owner != value {
                return false;
            }
            at = *e;
        }
        at >= end
    }
}

/// Bytes in a pool.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Range {
    pool: ArenaPool,
    start: u64,
    end: u64,
}

impl Range {
    fn overlaps(self, other: Self) -> bool {
        self.pool == other.pool && self.start < other.end && other.start < self.end
    }
}

struct Player<'a> {
    pools: [Writers; 3],
    views: HashMap<ValueId, ValueId>,
    sizes: &'a SymbolBounds,
    program: &'a Program,
    alignment: u64,
}

impl Player<'_> {
    /// Bytes from the first to the last element of an operand; none if it is elsewhere or empty.
    fn range(&self, operand: &Operand) -> Result<Option<Range>, IrError> {
        let Place::Arena { pool, offset } = operand.place else { return Ok(None) };
        let too_large = || fault(format!("an operand in {pool:?} overflows"));
        let sizes: Vec<u64> = operand.shape.iter().map(|d| d.max(self.sizes)).collect();
        if sizes.contains(&0) {
            return Ok(None);
        }
        // A vector is one dense row.
        let (rows, columns, stride) = match sizes.split_last() {
            Some((columns, outer)) if !outer.is_empty() => {
                let rows = outer.iter().try_fold(1_u64, |n, d| n.checked_mul(*d)).ok_or_else(too_large)?;
                (rows, *columns, operand.row_stride)
            }
            Some((columns, _)) => (1, *columns, *columns),
            None => (1, 1, 1),
        };
        let elements = (rows - 1).checked_mul(stride).and_then(|n| n.checked_add(columns)).ok_or_else(too_large)?;
        let bytes = operand.dtype.bytes_for(elements).ok_or_else(too_large)?;
        let start = offset.checked_add(operand.byte_offset).ok_or_else(too_large)?;
        let end = start.checked_add(bytes).ok_or_else(too_large)?;
        let size = self.program.arena_bytes.get(pool as usize).copied().unwrap_or(0);
        if offset % self.alignment != 0 || end > size {
            return Err(fault(format!("{pool:?} {start}..{end} is misaligned or beyond the pool's {size} bytes")));
        }
        Ok(Some(Range { pool, start, end }))
    }

    fn step(&mut self, node: &Node, instruction: &Instruction, device: &dyn DeviceModel) -> Result<(), IrError> {
        let complain = |what: &str| fault(format!("{} ({}): {what}", instruction.op.name(), instruction.origin));
        if instruction.op != node.op {
            return Err(complain("the instruction is not that of the node"));
        }
        // States are no values; absent operands have none. The rest are the node's operands, and only the order of biases
        // and caches differs between the forms.
        let listed: Vec<(usize, &Operand)> = instruction
            .inputs
            .iter()
            .enumerate()
            .filter(|(_, o)| !matches!(o.place, Place::State { .. } | Place::Absent))
            .collect();
        if listed.len() != node.inputs.len() {
            return Err(complain("the instruction has another number of operands"));
        }
        let mut read = Vec::new();
        for ((at, operand), value) in listed.into_iter().zip(&node.inputs) {
            let Some(range) = self.range(operand)? else { continue };
            let owner = *self.views.get(value).unwrap_or(value);
            if !self.pools[range.pool as usize].all_by(range.start, range.end, owner) {
                return Err(complain(&format!("operand {at} reads bytes that its definition didn't write last")));
            }
            read.push((at, range));
        }
        let mut written: Vec<Range> = Vec::new();
        for (i, (operand, value)) in instruction.outputs.iter().zip(&node.outputs).enumerate() {
            let Some(range) = self.range(operand)? else { continue };
            let clash = |(at, other): &&(usize, Range)| {
                range.overlaps(*other) && !(i == 0 && range == *other && device.in_place(instruction, *at))
            };
            if let Some((at, _)) = read.iter().find(clash) {
                return Err(complain(&format!("result {i} overlaps operand {at}")));
            }
            if written.iter().any(|other| range.overlaps(*other)) {
                return Err(complain(&format!("result {i} overlaps another result")));
            }
            self.pools[range.pool as usize].write(range.start, range.end, *value);
            written.push(range);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::{CompileOptions, PermissiveDevice, compile};
    use crate::{Phase, test_support};

    #[test]
    fn moved_places_are_found() {
        let graph = test_support::dense().unwrap();
        let options = CompileOptions::new(Phase::Mixed, test_support::bounds());
        let compiled = compile(&graph, &options, &PermissiveDevice).unwrap();
        let bounds = compiled.graph.bounds;
        check(&compiled.graph, &compiled.program, &PermissiveDevice, &bounds).unwrap();
        let mut found = 0;
        for i in 0..compiled.program.instructions.len() {
            let mut program = compiled.program.clone();
            let Some(Place::Arena { offset, .. }) = program.instructions[i].outputs.first_mut().map(|o| &mut o.place)
            else {
                continue;
            };
            *offset += 64;
            assert!(check(&compiled.graph, &program, &PermissiveDevice, &bounds).is_err(), "instruction {i}");
            found += 1;
        }
        assert!(found > 10);
    }
}
