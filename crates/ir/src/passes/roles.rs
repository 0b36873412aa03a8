//! What the parts of a model are called, as far as passes care: the role of a weight, read from its declared name.

use crate::{Graph, Node, WeightId};

/// Role of a linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are the field's own")]
pub enum Role {
    Query,
    Key,
    Value,
    AttentionOutput,
    QueryA,
    QueryB,
    KeyValueA,
    KeyValueB,
    Gate,
    Up,
    Down,
    Router,
    GateExperts,
    UpExperts,
    DownExperts,
    GateShared,
    UpShared,
    DownShared,
    SharedGate,
    Head,
    Other,
}

/// Declared names (without layer and `.weight`) of each role.
const NAMES: &[(&str, Role)] = &[
    ("attn_q", Role::Query),
    ("attn_k", Role::Key),
    ("attn_v", Role::Value),
    ("attn_output", Role::AttentionOutput),
    ("attn_q_a", Role::QueryA),
    ("attn_q_b", Role::QueryB),
    ("attn_kv_a_mqa", Role::KeyValueA),
    ("attn_kv_a", Role::KeyValueA),
    ("attn_kv_b", Role::KeyValueB),
    ("ffn_gate", Role::Gate),
    ("ffn_up", Role::Up),
    ("ffn_down", Role::Down),
    ("ffn_gate_inp", Role::Router),
    ("ffn_gate_exps", Role::GateExperts),
    ("ffn_up_exps", Role::UpExperts),
    ("ffn_down_exps", Role::DownExperts),
    ("ffn_gate_shexp", Role::GateShared),
    ("ffn_up_shexp", Role::UpShared),
    ("ffn_down_shexp", Role::DownShared),
    ("ffn_gate_inp_shexp", Role::SharedGate),
    ("output", Role::Head),
    ("token_embd", Role::Head),
];

impl Role {
    /// Role of a declared weight name or of an origin.
    #[must_use]
    pub fn of(name: &str) -> Self {
        let stem = name.strip_suffix(".weight").unwrap_or(name);
        let stem = stem.rsplit(['.', ' ', '/']).next().unwrap_or(stem);
        NAMES.iter().find(|(known, _)| *known == stem).map_or(Self::Other, |(_, role)| *role)
    }
    /// Name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        NAMES.iter().find(|(_, role)| *role == self).map_or("other", |(name, _)| name)
    }
}

/// Role of each segment of a linear layer: by its weight's name, else by the node's origin.
pub(crate) fn segment_roles(graph: &Graph, node: &Node) -> Vec<Role> {
    let of_weight = |id: WeightId| Role::of(&graph.weight(id).name);
    let weights = graph.segment_weights(node);
    let roles = weights.into_iter().map(|weight| match weight.map_or(Role::Other, of_weight) {
        Role::Other => Role::of(&node.attributes.origin),
        role => role,
    });
    roles.collect()
}
