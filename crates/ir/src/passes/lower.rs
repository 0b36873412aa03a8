//! Lower: makes the program. In: a flat graph and the places of its temporaries. Out: one instruction per node that
//! computes, operands in the order of the C ABI's op vocabulary, views resolved to strided operands.

use std::collections::HashMap;

use super::plan_memory::MemoryPlan;
use super::{PassName, Report};
use crate::program::{ArenaPool, Instruction, Operand, Place, Program, StepResult};
use crate::{
    Compute, DType, Dim, Graph, GrowthPattern, IrError, MemoryScope, Node, NodeId, Op, StateId, Symbol, TensorType,
    ValueId, inputs,
};

/// Rows and columns that share a scale in block-scaled weights.
pub const BLOCK_SCALE: (u32, u32) = (128, 128);

/// Runs the pass.
///
/// # Errors
/// If a value has no place, or the result is not computed by a node of its own.
pub fn run(graph: &Graph, plan: &MemoryPlan, result: StepResult) -> Result<(Program, Report), IrError> {
    let value = *graph.body.results.first().ok_or_else(|| fault("the graph has no result".to_owned()))?;
    let (root, _) = graph.root(value);
    let computed = graph.definition(root).is_some_and(|(_, node)| !node.op.is_source());
    if root != value || !computed {
        return Err(fault("the result has to be computed by a node, not be a source or columns of a value".to_owned()));
    }
    let mut lowering = Lowering::new(graph, Some(plan), value);
    lowering.collect_sources();
    let mut instructions = Vec::new();
    for id in &graph.body.nodes {
        let node = graph.node(*id);
        if node.op.is_source() || matches!(node.op, Op::Columns { .. }) {
            continue;
        }
        instructions.push(lowering.instruction(*id, node.attributes.layer)?);
    }
    let ty = &graph.value(value).ty;
    let result_width =
        ty.columns().ok_or_else(|| fault(format!("a result [R, width] with a constant width, found {ty}")))?;
    let program = Program {
        name: graph.name.clone(),
        bounds: graph.bounds,
        inputs: lowering.inputs,
        constants: lowering.constants,
        instructions,
        arena_bytes: plan.arena_bytes,
        result,
        result_width,
    };
    let notes = vec![format!("{} instructions, {} tables", program.instructions.len(), program.constants.len())];
    Ok((program, Report { pass: PassName::Lower, changes: 0, notes }))
}

/// The instruction of a node as a question to a device: everything but real places. In a template, `layer` says whose
/// weights are meant.
///
/// # Errors
/// If the layer lacks a weight or state.
pub fn describe(graph: &Graph, id: NodeId, layer: Option<u32>) -> Result<Instruction, IrError> {
    Lowering::new(graph, None, ValueId(u32::MAX)).instruction(id, layer)
}

/// Value of each operand that [`describe`] lists; none for states and absent ones.
pub(crate) fn operand_order(graph: &Graph, id: NodeId) -> Vec<Option<ValueId>> {
    order(graph.node(id)).into_iter().map(|slot| if let Slot::Value(v) = slot { Some(v) } else { None }).collect()
}

/// An operand before it has a place.
#[derive(Debug, Clone, Copy)]
enum Slot {
    Value(ValueId),
    /// A weight that is followed by its scales.
    Scaled(ValueId),
    State(StateId),
    Absent,
}

/// Operands read, in the order of the vocabulary.
fn order(node: &Node) -> Vec<Slot> {
    let mut rest = node.inputs.iter().copied();
    let mut slots = Vec::with_capacity(node.inputs.len() + 2);
    match &node.op {
        Op::Gemm { biases, scales, .. } => {
            slots.extend(rest.next().map(Slot::Value));
            weights(&mut slots, &mut rest, scales);
            if biases.contains(&true) {
                for bias in biases {
                    let value = if *bias { rest.next() } else { None };
                    slots.push(value.map_or(Slot::Absent, Slot::Value));
                }
            }
        }
        Op::GroupedGemm { gather, scales, .. } => {
            slots.extend(rest.by_ref().take(2).map(Slot::Value));
            let rows = if *gather { rest.next() } else { None };
            slots.push(rows.map_or(Slot::Absent, Slot::Value));
            weights(&mut slots, &mut rest, scales);
        }
        Op::Attention { state, .. } => {
            slots.extend(rest.next().map(Slot::Value));
            slots.push(Slot::State(*state));
        }
        Op::MlaAttention { state, .. } => {
            slots.extend(rest.by_ref().take(2).map(Slot::Value));
            slots.push(Slot::State(*state));
        }
        _ => {}
    }
    slots.extend(rest.map(Slot::Value));
    if matches!(node.op, Op::Route { bias: false, .. } | Op::Combine { addend: false }) {
        slots.push(Slot::Absent);
    }
    slots
}

fn weights(slots: &mut Vec<Slot>, rest: &mut impl Iterator<Item = ValueId>, scales: &[bool]) {
    for scaled in scales {
        slots.extend(rest.next().map(if *scaled { Slot::Scaled } else { Slot::Value }));
        if *scaled {
            slots.extend(rest.next().map(Slot::Value));
        }
    }
}

struct Lowering<'g> {
    graph: &'g Graph,
    /// None for a question to a device.
    plan: Option<&'g MemoryPlan>,
    result: ValueId,
    inputs: Vec<&'static str>,
    constants: Vec<Vec<f32>>,
    constant_of: HashMap<NodeId, u32>,
}

impl<'g> Lowering<'g> {
    fn new(graph: &'g Graph, plan: Option<&'g MemoryPlan>, result: ValueId) -> Self {
        Self { graph, plan, result, inputs: Vec::new(), constants: Vec::new(), constant_of: HashMap::new() }
    }

    /// Names of the inputs that are read, and the tables.
    fn collect_sources(&mut self) {
        for id in &self.graph.body.nodes {
            match &self.graph.node(*id).op {
                Op::Input { name } if !self.inputs.contains(name) => self.inputs.push(name),
                Op::Const { data } => {
                    self.constant_of.insert(*id, self.constants.len() as u32);
                    self.constants.push(data.clone());
                }
                _ => {}
            }
        }
        self.inputs.sort_by_key(|name| inputs::ALL.iter().position(|n| n == name));
    }

    fn instruction(&self, id: NodeId, layer: Option<u32>) -> Result<Instruction, IrError> {
        let node = self.graph.node(id);
        let mut operands = Vec::with_capacity(node.inputs.len() + 2);
        for slot in order(node) {
            operands.push(match slot {
                Slot::Value(value) => self.operand(value, layer)?,
                Slot::Scaled(value) => Operand { block_scale: Some(BLOCK_SCALE), ..self.operand(value, layer)? },
                Slot::State(state) => self.state(state, layer)?,
                Slot::Absent => absent(),
            });
        }
        let mut outputs = Vec::with_capacity(node.outputs.len().max(1));
        for value in &node.outputs {
            outputs.push(self.operand(*value, layer)?);
        }
        if let Op::KvAppend { state } = &node.op {
            outputs.push(self.state(*state, layer)?);
        }
        let weights = self.graph.segment_weights(node);
        let mut compute = node.attributes.compute.clone();
        if !matches!(node.op, Op::Attention { .. }) {
            compute.resize(weights.len(), Compute::F32);
        }
        for (compute, weight) in compute.iter_mut().zip(weights) {
            if let Some(weight) = weight {
                *compute = compute.over(self.graph.weight_source(weight, layer)?.1.dtype);
            }
        }
        Ok(Instruction {
            op: node.op.clone(),
            inputs: operands,
            outputs,
            compute,
            sums: node.attributes.sums,
            tolerance: node.attributes.tolerance,
            layer,
            origin: layer.map_or_else(
                || node.attributes.origin.clone(),
                |layer| format!("layer {layer} {}", node.attributes.origin),
            ),
        })
    }

    fn operand(&self, value: ValueId, layer: Option<u32>) -> Result<Operand, IrError> {
        let (root, column) = self.graph.root(value);
        let TensorType { mut dtype, shape } = self.graph.value(value).ty.clone();
        let place = self.place(root, layer)?;
        if let (Place::Weight { id, source }, None) = (place, self.plan) {
            dtype = self.graph.weight(id).sources.get(source as usize).map_or(dtype, |s| s.dtype);
        }
        let row_stride = self.graph.value(root).ty.columns().unwrap_or(1);
        let byte_offset = column.saturating_mul(dtype.block_bytes() as u64);
        Ok(Operand { place, byte_offset, dtype, shape, row_stride, block_scale: None })
    }

    fn place(&self, root: ValueId, layer: Option<u32>) -> Result<Place, IrError> {
        if let Some((id, node)) = self.graph.definition(root) {
            match &node.op {
                Op::Weight(id) => {
                    let layer = if self.plan.is_some() { node.attributes.layer } else { layer };
                    return Ok(Place::Weight { id: *id, source: self.graph.weight_source(*id, layer)?.0 });
                }
                Op::Const { .. } => {
                    return Ok(Place::Constant { index: self.constant_of.get(&id).copied().unwrap_or(0) });
                }
                Op::Input { name } => {
                    let index = self.inputs.iter().position(|n| n == name).unwrap_or(0) as u32;
                    return Ok(Place::Input { index });
                }
                _ => {}
            }
        }
        let Some(plan) = self.plan else { return Ok(Place::Arena { pool: ArenaPool::Temporary, offset: 0 }) };
        if root == self.result {
            return Ok(Place::Result);
        }
        let (pool, offset) = plan.places.get(root.index()).copied().flatten().ok_or_else(|| {
            fault(format!("value {} ({}) has no place in the memory plan", root.0, self.graph.value(root).ty))
        })?;
        debug_assert_eq!(self.graph.value(root).scope, MemoryScope::Temporary);
        Ok(Place::Arena { pool, offset })
    }

    fn state(&self, id: StateId, layer: Option<u32>) -> Result<Operand, IrError> {
        let decl = self.graph.state(id);
        let index = layer.map_or(Some(0), |layer| layer.checked_sub(decl.first_layer));
        let index = index.filter(|i| *i < decl.layers).ok_or_else(|| {
            fault(format!(
                "state {} has layers {}..{}, not {}",
                decl.name,
                decl.first_layer,
                u64::from(decl.first_layer) + u64::from(decl.layers),
                layer.unwrap_or(0)
            ))
        })?;
        let tokens = match decl.growth {
            GrowthPattern::PerBlock { tokens } => tokens,
            GrowthPattern::Fixed => 1,
        };
        let elements = decl.layout.elements_per_token().saturating_mul(u64::from(tokens));
        Ok(Operand {
            place: Place::State { id, layer: index },
            byte_offset: 0,
            dtype: decl.dtype,
            shape: vec![Dim::Symbol(Symbol::CacheBlocks), Dim::Const(elements)],
            row_stride: elements,
            block_scale: None,
        })
    }
}

fn absent() -> Operand {
    Operand {
        place: Place::Absent,
        byte_offset: 0,
        dtype: DType::F32,
        shape: Vec::new(),
        row_stride: 0,
        block_scale: None,
    }
}

fn fault(what: String) -> IrError {
    IrError::Pass { pass: "lower", what }
}

#[cfg(test)]
mod tests {
    use crate::passes::{CompileOptions, PermissiveDevice, compile};
    use crate::program::Place;
    use crate::{Op, Phase, test_support};

    #[test]
    fn operands_follow_the_vocabulary() {
        let options = CompileOptions::new(Phase::Mixed, test_support::bounds());
        for graph in test_support::all().unwrap() {
            let compiled = compile(&graph, &options, &PermissiveDevice).unwrap();
            for instruction in &compiled.program.instructions {
                let place = |i: usize| instruction.inputs[i].place;
                match &instruction.op {
                    Op::KvAppend { .. } => {
                        assert_eq!(instruction.inputs.len(), 3);
                        assert!(matches!(instruction.outputs[0].place, Place::State { .. }));
                    }
                    Op::Attention { .. } => {
                        assert_eq!(instruction.inputs.len(), 5);
                        assert!(matches!(place(1), Place::State { .. }), "{instruction:?}");
                    }
                    Op::MlaAttention { .. } => {
                        assert_eq!(instruction.inputs.len(), 6);
                        assert!(matches!(place(1), Place::Weight { .. }), "{instruction:?}");
                        assert!(matches!(place(2), Place::State { .. }), "{instruction:?}");
                    }
                    Op::Route { .. } => assert_eq!(place(1), Place::Absent),
                    Op::Combine { .. } => assert_eq!(instruction.inputs.len(), 4),
                    Op::Columns { .. } | Op::Layers { .. } => panic!("{instruction:?}"),
                    _ => {}
                }
            }
            let last = compiled.program.instructions.last().unwrap();
            assert_eq!(last.outputs[0].place, Place::Result);
        }
    }
}
