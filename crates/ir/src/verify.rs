//! The verifier: what every graph has to keep, checked after every pass.

use std::collections::HashSet;

use crate::build::result_types;
use crate::{
    Body, BodyId, Compute, DType, Graph, IrError, MemoryScope, Node, NodeId, Op, StateId, StateLayout, TensorType,
    Tolerance, ValueId, WeightDecl,
};

/// More layers than any model has; a bound on what a hostile text can make the expand pass do.
pub(crate) const MAX_LAYERS: u32 = 4096;

/// Checks all invariants of a graph.
///
/// - No id dangles; every value is defined once, before its uses, in the body that uses it; a template may also read values
///   of the main body that are defined before its first use.
/// - Types are those that the ops infer. Attributes and tables are finite.
/// - Weights have a shape and sources for every layer that uses them; states cover the layers that use them, fit the
///   attention that reads them, and are appended to before they are read.
/// - Forms of products match segments and stay within the tolerance; data movement is exact.
/// - A layer gives what it takes; the main body gives one matrix of logits.
///
/// # Errors
/// The first invariant that is broken.
pub fn verify(graph: &Graph) -> Result<(), IrError> {
    let verifier = Verifier { graph };
    verifier.declarations()?;
    verifier.ids()?;
    verifier.layers()?;
    let mut main = HashSet::new();
    let mut owners = HashSet::new();
    verifier.body(BodyId::Main, &HashSet::new(), &mut main, &mut owners)?;
    for id in graph.body_ids().skip(1) {
        let BodyId::Template(template) = id else { continue };
        let visible = verifier.visible_to(template, &main);
        verifier.body(id, &visible, &mut HashSet::new(), &mut owners)?;
    }
    verifier.results()
}

struct Verifier<'g> {
    graph: &'g Graph,
}

impl Verifier<'_> {
    fn fault(&self, what: impl Into<String>) -> IrError {
        IrError::Invalid { graph: self.graph.name.clone(), what: what.into() }
    }
    fn node_fault(&self, node: &Node, what: &str) -> IrError {
        self.fault(format!("{} ({}): {what}", node.op.name(), node.attributes.origin))
    }

    fn declarations(&self) -> Result<(), IrError> {
        for decl in &self.graph.weights {
            self.weight(decl)?;
        }
        for state in &self.graph.states {
            if !matches!(state.dtype, DType::F32 | DType::F16 | DType::BF16 | DType::I8 | DType::F8E4M3) {
                return Err(self.fault(format!("state {} can't be stored as {}", state.name, state.dtype)));
            }
            if state.layers == 0 || state.layers > MAX_LAYERS || state.layout.elements_per_token() == 0 {
                return Err(self.fault(format!("state {} is empty, or has more than {MAX_LAYERS} layers", state.name)));
            }
        }
        Ok(())
    }

    fn weight(&self, decl: &WeightDecl) -> Result<(), IrError> {
        let elements = decl.shape.iter().try_fold(1_u64, |n, dim| n.checked_mul(*dim)).filter(|n| *n > 0);
        if decl.shape.is_empty() || elements.is_none() {
            return Err(self.fault(format!("weight {} has the impossible shape {:?}", decl.name, decl.shape)));
        }
        if let Some(slice) = decl.slice {
            let part = decl.shape.get(slice.axis as usize);
            let end = part.and_then(|part| slice.first.checked_add(*part));
            let whole = decl.whole_shape().iter().try_fold(1_u64, |n, dim| n.checked_mul(*dim));
            if end.is_none_or(|end| end > slice.of) || whole.is_none() {
                return Err(self.fault(format!("weight {} of shape {:?} is no part {slice:?}", decl.name, decl.shape)));
            }
        }
        if decl.sources.iter().all(|source| source.tensors.is_empty()) {
            return Err(self.fault(format!("weight {} has no source with tensors", decl.name)));
        }
        Ok(())
    }

    /// Indices lie within the arena.
    fn ids(&self) -> Result<(), IrError> {
        let graph = self.graph;
        let value = |v: &ValueId| v.index() < graph.values.len();
        for body in std::iter::once(&graph.body).chain(graph.templates.iter().map(|t| &t.body)) {
            if let Some(id) = body.nodes.iter().find(|id| id.index() >= graph.nodes.len()) {
                return Err(self.fault(format!("a body lists node {}, there are {}", id.0, graph.nodes.len())));
            }
            let listed = body.nodes.iter().map(|id| graph.node(*id)).flat_map(|n| n.inputs.iter().chain(&n.outputs));
            if let Some(v) = listed.chain(&body.params).chain(&body.results).find(|v| !value(v)) {
                return Err(self.fault(format!("value {} is used, there are {}", v.0, graph.values.len())));
            }
            for node in body.nodes.iter().map(|id| graph.node(*id)) {
                let known = match &node.op {
                    Op::Weight(id) => id.index() < graph.weights.len(),
                    Op::KvAppend { state } | Op::Attention { state, .. } | Op::MlaAttention { state, .. } => {
                        state.index() < graph.states.len()
                    }
                    Op::Layers { template, .. } => template.index() < graph.templates.len(),
                    _ => true,
                };
                if !known {
                    return Err(self.node_fault(node, "refers to a declaration that doesn't exist"));
                }
            }
        }
        let defined = |v: &crate::Value| v.def.is_none_or(|id| id.index() < graph.nodes.len());
        if graph.values.iter().all(defined) { Ok(()) } else { Err(self.fault("a value's definition doesn't exist")) }
    }

    /// Bounds what a text can make the passes write out.
    fn layers(&self) -> Result<(), IrError> {
        let counts = self.graph.body.nodes.iter().map(|id| match self.graph.node(*id).op {
            Op::Layers { count, .. } => u64::from(count),
            _ => 0,
        });
        let layers = counts.fold(0, u64::saturating_add);
        if layers > u64::from(MAX_LAYERS) {
            return Err(self.fault(format!("{layers} layers; more than {MAX_LAYERS} are no model")));
        }
        let nested = |node: &Node| matches!(node.op, Op::Layers { .. });
        let bodies = self.graph.templates.iter().flat_map(|t| &t.body.nodes);
        if bodies.map(|id| self.graph.node(*id)).any(nested) {
            return Err(self.fault("layers within layers"));
        }
        Ok(())
    }

    /// Values of the main body that are defined before the first use of a template.
    fn visible_to(&self, wanted: crate::TemplateId, main: &HashSet<ValueId>) -> HashSet<ValueId> {
        let mut visible = HashSet::new();
        for id in &self.graph.body.nodes {
            let node = self.graph.node(*id);
            if matches!(node.op, Op::Layers { template, .. } if template == wanted) {
                return visible;
            }
            visible.extend(node.outputs.iter().copied());
        }
        // A template that nothing runs may read anything.
        main.clone()
    }

    fn body(
        &self,
        id: BodyId,
        outer: &HashSet<ValueId>,
        defined: &mut HashSet<ValueId>,
        owners: &mut HashSet<NodeId>,
    ) -> Result<(), IrError> {
        let graph = self.graph;
        let body: &Body = graph.body_of(id);
        let layers = match id {
            BodyId::Main => None,
            BodyId::Template(template) => Some(graph.layers_of(template)),
        };
        for value in &body.params {
            if graph.value(*value).def.is_some() || !defined.insert(*value) {
                return Err(self.fault(format!("parameter {} is defined elsewhere", value.0)));
            }
        }
        let mut appended: HashSet<(StateId, Option<u32>)> = HashSet::new();
        for node_id in &body.nodes {
            let node = graph.node(*node_id);
            if !owners.insert(*node_id) {
                return Err(self.node_fault(node, "is listed twice"));
            }
            if node.inputs.iter().any(|v| !defined.contains(v) && !outer.contains(v)) {
                return Err(self.node_fault(node, "reads a value before its definition, or of another body"));
            }
            self.node(*node_id, node)?;
            self.layered(node, layers.as_deref())?;
            self.state_order(node, &mut appended)?;
            if node.outputs.iter().any(|v| !defined.insert(*v)) {
                return Err(self.node_fault(node, "defines a value that is defined already"));
            }
        }
        if body.results.iter().all(|v| defined.contains(v) || outer.contains(v)) {
            Ok(())
        } else {
            Err(self.fault("a body hands back a value that it doesn't define"))
        }
    }

    fn node(&self, id: NodeId, node: &Node) -> Result<(), IrError> {
        let graph = self.graph;
        if node.outputs.iter().any(|v| graph.value(*v).def != Some(id)) {
            return Err(self.node_fault(node, "has a result that names another definition"));
        }
        if node.outputs.iter().any(|v| graph.value(*v).scope == MemoryScope::Dynamic) {
            return Err(self.node_fault(node, "has a result of dynamic scope; only states are"));
        }
        let mut inferred = result_types(graph, &node.op, &node.inputs)?;
        if let (Op::Weight(weight), Some(layer), Some(ty)) = (&node.op, node.attributes.layer, inferred.first_mut()) {
            ty.dtype = graph.weight_source(*weight, Some(layer))?.1.dtype;
        }
        let found: Vec<&TensorType> = node.outputs.iter().map(|v| &graph.value(*v).ty).collect();
        if !inferred.iter().eq(found.iter().copied()) {
            let list = |types: &[&TensorType]| types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let expected = list(&inferred.iter().collect::<Vec<_>>());
            return Err(self.node_fault(node, &format!("infers {expected}, its results are {}", list(&found))));
        }
        self.attributes(node)
    }

    fn attributes(&self, node: &Node) -> Result<(), IrError> {
        let finite = match &node.op {
            Op::Const { data } => data.iter().all(|x| x.is_finite()),
            Op::Norm { eps, .. } => eps.is_finite() && *eps >= 0.0,
            Op::Rope(rope) => rope.attention_factor.is_finite(),
            Op::Attention { attention, .. } => attention.scale.is_finite(),
            Op::MlaAttention { attention, .. } => attention.scale.is_finite(),
            Op::Route { route, .. } => route.scale.is_finite(),
            _ => true,
        };
        if !finite {
            return Err(self.node_fault(node, "has an attribute that is not finite"));
        }
        let (tolerance, compute) = (node.attributes.tolerance, &node.attributes.compute);
        let moves_data = matches!(node.op, Op::Embed | Op::GatherRows | Op::Columns { .. } | Op::Dispatch { .. });
        if moves_data && tolerance != Tolerance::Exact {
            return Err(self.node_fault(node, "moves data, so its tolerance has to be exact"));
        }
        let attends = matches!(node.op, Op::Attention { .. });
        let segments = if attends { 1 } else { self.graph.segment_weights(node).len() };
        if !compute.is_empty() && compute.len() != segments {
            let what = format!("has {segments} segments and {} forms of products", compute.len());
            return Err(self.node_fault(node, &what));
        }
        if let Some(form) = compute.iter().find(|form| attends && !matches!(form, Compute::F32 | Compute::Bf16)) {
            return Err(
                self.node_fault(node, &format!("attends by products as {}, which only weights have", form.name()))
            );
        }
        if let Some(form) = compute.iter().find(|form| form.tolerance() > tolerance) {
            let what = format!("multiplies as {}, which its tolerance {} rules out", form.name(), tolerance.name());
            return Err(self.node_fault(node, &what));
        }
        Ok(())
    }

    /// Weights and states exist for all layers that run the node.
    fn layered(&self, node: &Node, layers: Option<&[u32]>) -> Result<(), IrError> {
        let graph = self.graph;
        let own = [node.attributes.layer];
        let layers: Vec<Option<u32>> = layers.map_or_else(|| own.to_vec(), |l| l.iter().copied().map(Some).collect());
        match &node.op {
            Op::Weight(id) => layers.iter().try_for_each(|layer| {
                if graph.weight_source(*id, *layer)?.1.tensors.is_empty() {
                    return Err(self.node_fault(node, &format!("reads a weight that layer {layer:?} doesn't have")));
                }
                Ok(())
            }),
            Op::KvAppend { state } | Op::Attention { state, .. } | Op::MlaAttention { state, .. } => {
                let decl = graph.state(*state);
                let inside = |l: u32| l.checked_sub(decl.first_layer).is_some_and(|i| i < decl.layers);
                match layers.iter().flatten().find(|l| !inside(**l)) {
                    Some(layer) => Err(self.node_fault(node, &format!("state {} has no layer {layer}", decl.name))),
                    None => Ok(()),
                }
            }
            Op::Layers { template, first, count } => {
                let params = &graph.template(*template).body.params;
                let same = |(a, b): (&ValueId, &ValueId)| graph.value(*a).ty == graph.value(*b).ty;
                if node.inputs.len() != params.len() || !node.inputs.iter().zip(params).all(same) {
                    return Err(self.node_fault(node, "operands differ from the template's parameters"));
                }
                if *count == 0 || first.checked_add(*count).is_none_or(|end| end > MAX_LAYERS) {
                    return Err(self.node_fault(node, &format!("1 to {MAX_LAYERS} layers expected")));
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn state_order(&self, node: &Node, appended: &mut HashSet<(StateId, Option<u32>)>) -> Result<(), IrError> {
        let layer = node.attributes.layer;
        let layout = |state: StateId| self.graph.state(state).layout;
        let fits = match &node.op {
            Op::KvAppend { state } => {
                return if appended.insert((*state, layer)) {
                    Ok(())
                } else {
                    Err(self.node_fault(node, "appends to a cache of a layer for the second time"))
                };
            }
            Op::Attention { state, attention: a } => {
                let (num_key_value_heads, head_dim, value_dim) = (a.num_key_value_heads, a.head_dim, a.value_dim);
                appended.contains(&(*state, layer))
                    && layout(*state) == StateLayout::Split { num_key_value_heads, head_dim, value_dim }
            }
            Op::MlaAttention { state, attention: a } => {
                appended.contains(&(*state, layer))
                    && layout(*state) == StateLayout::Joined { latent_dim: a.latent_dim, rope_dim: a.rope_dim }
            }
            _ => true,
        };
        if fits {
            Ok(())
        } else {
            Err(self.node_fault(node, "reads a cache of another layout, or one that was not appended to before"))
        }
    }

    fn results(&self) -> Result<(), IrError> {
        let graph = self.graph;
        for template in &graph.templates {
            let types = |values: &[ValueId]| values.first().map(|v| graph.value(*v).ty.clone());
            if template.body.results.len() != 1 || types(&template.body.results) != types(&template.body.params) {
                let what =
                    format!("template {} has to give one value of the type of its first parameter", template.name);
                return Err(self.fault(what));
            }
        }
        match graph.body.results.as_slice() {
            [logits] if graph.body.params.is_empty() => {
                let ty = &graph.value(*logits).ty;
                if ty.dtype == DType::F32 && ty.shape.len() == 2 && ty.columns().is_some() {
                    Ok(())
                } else {
                    Err(self.fault(format!("logits have to be f32 [rows, vocabulary], found {ty}")))
                }
            }
            _ => Err(self.fault("the main body has to have no parameter and one result")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Compute, test_support};

    /// Breaks a good graph and gives the complaint.
    fn complaint(change: impl FnOnce(&mut Graph)) -> String {
        let mut graph = test_support::dense().unwrap();
        verify(&graph).unwrap();
        change(&mut graph);
        verify(&graph).unwrap_err().to_string()
    }
    fn find(graph: &Graph, name: &str) -> NodeId {
        let body = &graph.templates[0].body;
        *body.nodes.iter().find(|id| graph.node(**id).op.name() == name).unwrap()
    }

    #[test]
    fn small_models_are_valid() {
        for graph in test_support::all().unwrap() {
            verify(&graph).unwrap();
        }
    }

    #[test]
    fn broken_graphs_are_refused_by_name() {
        let dangling = complaint(|g| g.body.results = vec![ValueId(9999)]);
        assert!(dangling.contains("value 9999"), "{dangling}");
        let order = complaint(|g| g.templates[0].body.nodes.reverse());
        assert!(order.contains("before its definition"), "{order}");
        let state = complaint(|g| {
            let append = find(g, "kv_append");
            g.templates[0].body.nodes.retain(|id| *id != append);
        });
        assert!(state.contains("not appended"), "{state}");
        let layers = complaint(|g| g.weights[2].sources.truncate(1));
        assert!(layers.contains("none for layer 1"), "{layers}");
        let types = complaint(|g| {
            let rope = find(g, "rope");
            let value = g.node(rope).outputs[0];
            g.values[value.index()].ty.dtype = DType::F16;
        });
        assert!(types.contains("infers"), "{types}");
        let segments = complaint(|g| {
            let gemm = find(g, "gemm");
            g.node_mut(gemm).attributes.compute = vec![Compute::F32; 3];
        });
        assert!(segments.contains("1 segments and 3 forms"), "{segments}");
        let tolerance = complaint(|g| {
            let gemm = find(g, "gemm");
            g.node_mut(gemm).attributes.tolerance = Tolerance::Tight;
            g.node_mut(gemm).attributes.compute = vec![Compute::I8G32];
        });
        assert!(tolerance.contains("rules out"), "{tolerance}");
        let twice = complaint(|g| {
            let gemm = find(g, "gemm");
            g.templates[0].body.nodes.push(gemm);
        });
        assert!(twice.contains("listed twice"), "{twice}");
    }
}
