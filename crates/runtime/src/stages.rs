//! Stages of a group: which device computes which layers, one after the other.
//!
//! In: a graph, what its caches take, and the memory of each stage. Out: a run of layers for each stage. The embedding goes with the first
//! layer, final norm and head with the last. Runs are chosen so that the stage with the largest share of its device's memory has as
//! small a share as can be: where all devices have the same, bytes are as even as layers allow. Which layers are where is decided before
//! anything is loaded, from the graph alone, and never shows in a result.

use std::collections::HashSet;
use std::fmt;

use qwen_ir::{Graph, Op};

use crate::placement::Side;

/// The layers of one stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stage {
    /// The first of them.
    pub first_layer: u32,
    /// How many there are.
    pub layers: u32,
    /// Bytes of its weights as they are stored and of its caches at their limit, over all ranks.
    pub bytes: u64,
}

impl Stage {
    /// Its layers for people.
    #[must_use]
    pub fn span(&self) -> String {
        let (first, last) = (self.first_layer, self.first_layer + self.layers.saturating_sub(1));
        if first == last { format!("layer {first}") } else { format!("layers {first} to {last}") }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.span(), crate::Bytes(self.bytes))
    }
}

/// All stages of a group, in order; a device alone is one stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stages(Vec<Stage>);

impl Stages {
    /// Divides the layers among devices with so much memory each; none if there are fewer layers than stages.
    pub(crate) fn new(graph: &Graph, cache_bytes: &dyn Fn(u32) -> u64, memory: &[Option<u64>]) -> Option<Self> {
        let mut sizes = layer_bytes(graph);
        for (layer, size) in (0..).zip(&mut sizes) {
            *size = size.saturating_add(cache_bytes(layer));
        }
        // Where one does not tell, all count alike.
        let known: Option<Vec<u64>> = memory.iter().map(|bytes| bytes.filter(|bytes| *bytes > 0)).collect();
        let firsts = cut(&sizes, &known.unwrap_or_else(|| vec![1; memory.len()]))?;
        let ends = firsts.iter().skip(1).copied().chain([sizes.len()]);
        let stage = |(first, end): (&usize, usize)| Stage {
            first_layer: *first as u32,
            layers: (end - first) as u32,
            bytes: sizes[*first..end].iter().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes)),
        };
        Some(Self(firsts.iter().zip(ends).map(stage).collect()))
    }

    pub(crate) const fn count(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn all(&self) -> &[Stage] {
        &self.0
    }

    /// The stage that has a layer.
    pub(crate) fn of_layer(&self, layer: u32) -> Side {
        self.0.iter().rposition(|stage| stage.first_layer <= layer).unwrap_or(0)
    }

    /// The device that computes what the stages' own refuse comes after these.
    pub(crate) const fn fallback(&self) -> Side {
        self.count()
    }
}

/// Layers of a model.
pub(crate) fn layers(graph: &Graph) -> u32 {
    let ends = graph.body.nodes.iter().filter_map(|id| match &graph.node(*id).op {
        Op::Layers { first, count, .. } => Some(first.saturating_add(*count)),
        _ => None,
    });
    ends.max().unwrap_or(0)
}

/// Bytes of each layer's weights as they are stored. What the main body reads counts with the layer that it is computed beside; a table
/// that is the head too is held at both ends.
fn layer_bytes(graph: &Graph) -> Vec<u64> {
    let mut sizes = vec![0_u64; layers(graph) as usize];
    let mut add = |layer: usize, bytes: u64| {
        if let Some(size) = sizes.get_mut(layer) {
            *size = size.saturating_add(bytes);
        }
    };
    let bytes_of = |decl: &qwen_ir::WeightDecl, source: usize| {
        let elements = decl.shape.iter().fold(1_u64, |product, dim| product.saturating_mul(*dim));
        let source = decl.sources.get(source).filter(|source| !source.tensors.is_empty());
        source.and_then(|source| source.dtype.bytes_for(elements)).unwrap_or(0)
    };
    for decl in &graph.weights {
        let Some(first) = decl.first_layer else { continue };
        for source in 0..decl.sources.len() {
            add(first as usize + source, bytes_of(decl, source));
        }
    }
    let last = layers(graph).saturating_sub(1) as usize;
    let (mut at, mut counted) = (0, HashSet::new());
    for node in graph.body.nodes.iter().map(|id| graph.node(*id)) {
        if matches!(node.op, Op::Layers { .. }) {
            at = last;
            continue;
        }
        for value in &node.inputs {
            if let Some((_, Op::Weight(id))) = graph.definition(*value).map(|(id, node)| (id, &node.op))
                && counted.insert((*id, at))
            {
                add(at, bytes_of(graph.weight(*id), 0));
            }
        }
    }
    sizes
}

/// Where each run begins when things of these sizes are put into as many runs as there are capacities, none of them empty, so that the
/// fullest is as empty as can be; none if there are too few things.
fn cut(sizes: &[u64], capacities: &[u64]) -> Option<Vec<usize>> {
    if capacities.len() == 1 {
        // One takes whatever there is.
        return Some(vec![0]);
    }
    let mut sums = vec![0_u128];
    for size in sizes {
        sums.push(sums[sums.len() - 1] + u128::from(*size));
    }
    let share = |from: usize, to: usize, capacity: u64| (sums[to] - sums[from]) as f64 / capacity as f64;
    // Of the first `to` things in the runs so far: the fullest one's share, and where the last one begins.
    let mut rows: Vec<Vec<Option<(f64, usize)>>> = Vec::new();
    for (run, capacity) in capacities.iter().enumerate() {
        let fullest = |to: usize| {
            let begins = |from: usize| match rows.last() {
                None => (from == 0).then_some(0.0),
                Some(before) => before[from].map(|(share, _)| share),
            };
            let choices = (run..to).filter_map(|from| Some((begins(from)?.max(share(from, to, *capacity)), from)));
            choices.min_by(|(a, _), (b, _)| a.total_cmp(b))
        };
        let row = (0..=sizes.len()).map(fullest).collect();
        rows.push(row);
    }
    let mut end = sizes.len();
    let mut firsts = Vec::with_capacity(rows.len());
    for row in rows.iter().rev() {
        let (_, first) = row[end]?;
        firsts.push(first);
        end = first;
    }
    firsts.reverse();
    Some(firsts)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn runs_are_as_even_as_their_sizes_allow() {
        assert_eq!(cut(&[1, 1, 1, 1], &[1, 1]), Some(vec![0, 2]));
        assert_eq!(cut(&[5, 1, 1, 1, 5], &[1, 1]), Some(vec![0, 2]));
        // A head as large as two layers.
        assert_eq!(cut(&[1, 1, 1, 1, 3], &[1, 1, 1]), Some(vec![0, 2, 4]));
        assert_eq!(cut(&[1, 1, 1, 1, 1, 1], &[2, 1]), Some(vec![0, 4]));
        assert_eq!(cut(&[1, 1], &[1, 1]), Some(vec![0, 1]));
        assert_eq!(cut(&[1, 1], &[1, 1, 1]), None);
        assert_eq!((cut(&[], &[1]), cut(&[], &[1, 1])), (Some(vec![0]), None));
    }

    proptest! {
        /// Against every way to cut.
        #[test]
        fn no_other_cut_has_an_emptier_fullest_run(
            sizes in proptest::collection::vec(0u64..9, 1..8),
            capacities in proptest::collection::vec(1u64..5, 1..4),
        ) {
            let fullest = |firsts: &[usize]| {
                let ends = firsts.iter().skip(1).copied().chain([sizes.len()]);
                let share = |((first, end), capacity): ((&usize, usize), &u64)| {
                    sizes[*first..end].iter().sum::<u64>() as f64 / *capacity as f64
                };
                firsts.iter().zip(ends).zip(&capacities).map(share).fold(0.0, f64::max)
            };
            let mut all = vec![vec![0]];
            for _ in 1..capacities.len() {
                let longer = all.iter().flat_map(|firsts: &Vec<usize>| {
                    let next = firsts[firsts.len() - 1] + 1..sizes.len();
                    next.map(|first| [firsts.as_slice(), &[first]].concat())
                });
                all = longer.collect();
            }
            let best = all.iter().map(|firsts| fullest(firsts)).min_by(f64::total_cmp);
            let found = cut(&sizes, &capacities);
            prop_assert_eq!(found.as_deref().map(fullest), best);
            prop_assert!(found.is_none_or(|firsts| firsts.windows(2).all(|pair| pair[0] < pair[1])));
        }
    }
}
