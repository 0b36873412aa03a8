//! Small steps that passes are made of: counting uses, replacing values, following views, dropping what nobody reads.

use std::collections::HashMap;

use crate::{Body, Graph, NodeId, Op, TemplateId, ValueId};

/// One of the bodies of a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BodyId {
    /// [`Graph::body`].
    Main,
    /// The body of a template.
    Template(TemplateId),
}

impl Graph {
    /// All bodies, the main one first.
    pub fn body_ids(&self) -> impl Iterator<Item = BodyId> + use<> {
        let templates = (0..self.templates.len() as u32).map(|i| BodyId::Template(TemplateId(i)));
        [BodyId::Main].into_iter().chain(templates)
    }
    /// A body.
    #[must_use]
    pub fn body_of(&self, id: BodyId) -> &Body {
        match id {
            BodyId::Main => &self.body,
            BodyId::Template(id) => &self.template(id).body,
        }
    }
    /// A body to change.
    pub fn body_of_mut(&mut self, id: BodyId) -> &mut Body {
        match id {
            BodyId::Main => &mut self.body,
            BodyId::Template(id) => &mut self.templates[id.index()].body,
        }
    }
    /// Layers that run a template, in order, without repetition.
    #[must_use]
    pub fn layers_of(&self, wanted: TemplateId) -> Vec<u32> {
        let mut layers = Vec::new();
        for id in &self.body.nodes {
            if let Op::Layers { template, first, count } = &self.node(*id).op
                && *template == wanted
            {
                layers.extend(*first..first.saturating_add(*count));
            }
        }
        layers.sort_unstable();
        layers.dedup();
        layers
    }
    /// The node that defines a value, unless it is a parameter.
    #[must_use]
    pub fn definition(&self, value: ValueId) -> Option<(NodeId, &crate::Node)> {
        self.value(value).def.map(|id| (id, self.node(id)))
    }
    /// The value whose memory a value lives in, and the first column there: views are followed to what they show.
    #[must_use]
    pub fn root(&self, mut value: ValueId) -> (ValueId, u64) {
        let mut column = 0_u64;
        while let Some((_, node)) = self.definition(value) {
            let (Op::Columns { offset, .. }, [input]) = (&node.op, node.inputs.as_slice()) else { break };
            column = column.saturating_add(u64::from(*offset));
            value = *input;
        }
        (value, column)
    }
    /// How often each value is read, by nodes and as a result, over all bodies.
    #[must_use]
    pub fn uses(&self) -> Vec<u32> {
        let mut uses = vec![0_u32; self.values.len()];
        for body in self.body_ids().map(|id| self.body_of(id)) {
            let operands = body.nodes.iter().flat_map(|id| &self.node(*id).inputs);
            for value in operands.chain(&body.results) {
                uses[value.index()] += 1;
            }
        }
        uses
    }
    /// Reads other values instead, in all bodies.
    pub(crate) fn replace_uses(&mut self, map: &HashMap<ValueId, ValueId>) {
        if map.is_empty() {
            return;
        }
        let resolve = |value: &mut ValueId| {
            while let Some(other) = map.get(value) {
                *value = *other;
            }
        };
        for node in &mut self.nodes {
            node.inputs.iter_mut().for_each(resolve);
        }
        for id in self.body_ids() {
            self.body_of_mut(id).results.iter_mut().for_each(resolve);
        }
    }
    /// Removes nodes whose results nobody reads, and that write no state. Gives their number.
    pub(crate) fn remove_dead(&mut self) -> usize {
        let mut removed = 0;
        loop {
            let uses = self.uses();
            let mut again = false;
            for id in self.body_ids() {
                let mut nodes = std::mem::take(&mut self.body_of_mut(id).nodes);
                let before = nodes.len();
                nodes.retain(|id| {
                    let node = self.node(*id);
                    matches!(node.op, Op::KvAppend { .. }) || node.outputs.iter().any(|v| uses[v.index()] > 0)
                });
                removed += before - nodes.len();
                again |= nodes.len() < before;
                self.body_of_mut(id).nodes = nodes;
            }
            if !again {
                return removed;
            }
        }
    }
}
