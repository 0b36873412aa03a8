//! Expand: writes out the layers. In: a graph with `layers` nodes. Out: a graph whose main body is flat, without templates;
//! nodes of layers know theirs ([`Attributes::layer`](crate::Attributes)), inputs and tables of templates exist once. A step that
//! gives hidden states loses its head here: after precision was decided, so that both kinds of step want the same forms of weights.

use std::collections::HashMap;

use super::{PassName, Report};
use crate::program::StepResult;
use crate::{GemmType, Graph, IrError, Node, NodeId, Op, TemplateId, ValueId, WeightId};

/// Runs the pass.
///
/// # Errors
/// If a layer lacks a weight or a state.
pub fn run(graph: &Graph, result: StepResult) -> Result<(Graph, Report), IrError> {
    let mut expander = Expander { source: graph, flat: graph.clone(), hoisted: HashMap::new(), layers: 0 };
    let mut map = HashMap::new();
    expander.flat.body.nodes.clear();
    expander.flat.templates.clear();
    for id in &graph.body.nodes {
        let node = graph.node(*id);
        if let Op::Layers { template, first, count } = &node.op {
            let mut arguments: Vec<ValueId> = node.inputs.iter().map(|v| *map.get(v).unwrap_or(v)).collect();
            for layer in *first..first.saturating_add(*count) {
                let hidden = expander.layer(*template, layer, &arguments, &map)?;
                if let Some(first) = arguments.first_mut() {
                    *first = hidden;
                }
            }
            if let (Some(output), Some(hidden)) = (node.outputs.first(), arguments.first()) {
                map.insert(*output, *hidden);
            }
        } else {
            expander.flat.body.nodes.push(*id);
            let copy = expander.flat.node_mut(*id);
            copy.inputs.iter_mut().for_each(|v| *v = *map.get(v).unwrap_or(v));
            resolve_compute(graph, node, None, copy)?;
        }
    }
    let Expander { mut flat, layers, .. } = expander;
    flat.body.results.iter_mut().for_each(|v| *v = *map.get(v).unwrap_or(v));
    if result == StepResult::Hidden {
        drop_head(&mut flat)?;
    }
    let notes = vec![format!("{layers} layers, {} nodes", flat.body.nodes.len())];
    Ok((flat, Report { pass: PassName::Expand, changes: layers, notes }))
}

/// Makes the head's input the result.
fn drop_head(graph: &mut Graph) -> Result<(), IrError> {
    let head = graph.body.results.first().and_then(|logits| graph.definition(*logits)).map(|(_, node)| node);
    let head = head.filter(|node| matches!(node.op, Op::Gemm { gemm_type: GemmType::LmHead, .. }));
    let hidden = head.and_then(|head| head.inputs.first()).copied().ok_or_else(|| IrError::Pass {
        pass: "expand",
        what: "hidden states are asked of a graph whose result is not computed by a head".to_owned(),
    })?;
    graph.body.results = vec![hidden];
    graph.remove_dead();
    Ok(())
}

struct Expander<'g> {
    source: &'g Graph,
    flat: Graph,
    /// Inputs and tables of templates that are in the flat body already.
    hoisted: HashMap<NodeId, Vec<ValueId>>,
    layers: usize,
}

impl Expander<'_> {
    /// Appends one layer; gives its hidden state.
    fn layer(
        &mut self,
        template: TemplateId,
        layer: u32,
        arguments: &[ValueId],
        outer: &HashMap<ValueId, ValueId>,
    ) -> Result<ValueId, IrError> {
        let source = self.source;
        let body = &source.template(template).body;
        let mut map: HashMap<ValueId, ValueId> = outer.clone();
        map.extend(body.params.iter().copied().zip(arguments.iter().copied()));
        for id in &body.nodes {
            let node = source.node(*id);
            let shared = matches!(node.op, Op::Input { .. } | Op::Const { .. });
            if shared && let Some(outputs) = self.hoisted.get(id) {
                map.extend(node.outputs.iter().copied().zip(outputs.iter().copied()));
                continue;
            }
            let mut copy = node.clone();
            copy.inputs.iter_mut().for_each(|v| *v = *map.get(v).unwrap_or(v));
            copy.attributes.layer = (!shared).then_some(layer);
            resolve_compute(source, node, Some(layer), &mut copy)?;
            let outputs = self.append(copy, layer)?;
            if shared {
                self.hoisted.insert(*id, outputs.clone());
            }
            map.extend(node.outputs.iter().copied().zip(outputs));
        }
        self.layers += 1;
        let hidden = body.results.first().and_then(|v| map.get(v).or(Some(v)).copied());
        hidden.ok_or_else(|| fault(format!("template {} has no result", source.template(template).name)))
    }

    fn append(&mut self, mut node: Node, layer: u32) -> Result<Vec<ValueId>, IrError> {
        let id = NodeId(self.flat.nodes.len() as u32);
        let mut outputs = Vec::with_capacity(node.outputs.len());
        for output in &node.outputs {
            let mut value = self.flat.value(*output).clone();
            value.def = Some(id);
            if let Op::Weight(weight) = node.op {
                value.ty.dtype = self.flat.weight_source(weight, Some(layer))?.1.dtype;
            }
            self.flat.values.push(value);
            outputs.push(ValueId(self.flat.values.len() as u32 - 1));
        }
        node.outputs.clone_from(&outputs);
        self.flat.nodes.push(node);
        self.flat.body.nodes.push(id);
        Ok(outputs)
    }
}

/// Form of each segment for the storage types of a layer.
fn resolve_compute(graph: &Graph, node: &Node, layer: Option<u32>, copy: &mut Node) -> Result<(), IrError> {
    for (i, weight) in graph.segment_weights(node).into_iter().enumerate() {
        let (Some(weight), Some(compute)) = (weight, copy.attributes.compute.get_mut(i)) else { continue };
        *compute = compute.over(graph.weight_source(weight, layer)?.1.dtype);
    }
    Ok(())
}

fn fault(what: String) -> IrError {
    IrError::Pass { pass: "expand", what }
}

impl Graph {
    /// Source of a weight for a layer, with its index.
    ///
    /// # Errors
    /// If the layer has none.
    pub fn weight_source(&self, id: WeightId, layer: Option<u32>) -> Result<(u32, &crate::WeightSource), IrError> {
        let decl = self.weight(id);
        let index = match (decl.first_layer, layer) {
            (Some(first), Some(layer)) => layer.checked_sub(first),
            _ => Some(0),
        };
        index.and_then(|i| decl.sources.get(i as usize).map(|source| (i, source))).ok_or_else(|| {
            let first = decl.first_layer.unwrap_or(0);
            fault(format!(
                "weight {} has sources for {} layers from {first}, none for {}",
                decl.name,
                decl.sources.len(),
                layer.map_or_else(|| "outside of layers".to_owned(), |l| format!("layer {l}")),
            ))
        })
    }

    /// Weight of each segment of a linear layer; none where the operand is no weight. Empty for other ops.
    #[must_use]
    pub fn segment_weights(&self, node: &Node) -> Vec<Option<WeightId>> {
        let (mut next, scales) = match &node.op {
            Op::Gemm { scales, .. } => (1, scales),
            Op::GroupedGemm { scales, gather, .. } => (2 + usize::from(*gather), scales),
            _ => return Vec::new(),
        };
        let mut weights = Vec::with_capacity(scales.len());
        for scaled in scales {
            let weight = node.inputs.get(next).and_then(|v| self.definition(*v)).and_then(|(_, node)| match node.op {
                Op::Weight(id) => Some(id),
                _ => None,
            });
            weights.push(weight);
            next += 1 + usize::from(*scaled);
        }
        weights
    }
}
