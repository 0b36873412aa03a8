//! The arena.

use qwen_formats::DType;

use crate::{
    Compute, GrowthPattern, IrError, MemoryScope, NodeId, Op, Phase, Sensitivity, StateId, Sums, SymbolBounds,
    TemplateId, TensorType, Tolerance, ValueId, WeightId,
};

/// Names of the inputs of every model graph.
pub mod inputs {
    /// Token ids, i32 `[T]`.
    pub const TOKEN_IDS: &str = "token_ids";
    /// Positions, i32 `[T]`.
    pub const POSITIONS: &str = "positions";
    /// Cache slot of each token, i32 `[T]`.
    pub const SLOTS: &str = "slots";
    /// First row of each sequence, i32 `[S + 1]` (declared as `[S]`: the buffer holds one more).
    pub const QUERY_START: &str = "query_start";
    /// Cached tokens of each sequence, this step's included, i32 `[S]`.
    pub const CONTEXT_LEN: &str = "context_len";
    /// Blocks of each sequence, i32 `[S, B]`.
    pub const BLOCK_TABLE: &str = "block_table";
    /// Rows whose logits are wanted, i32 `[R]`.
    pub const LOGIT_ROWS: &str = "logit_rows";
    /// All of them, in the order of [`Program::inputs`](crate::program::Program::inputs).
    pub const ALL: [&str; 7] = [TOKEN_IDS, POSITIONS, SLOTS, QUERY_START, CONTEXT_LEN, BLOCK_TABLE, LOGIT_ROWS];
}

/// A value: the output of one node, or the parameter of a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value {
    /// Element type and shape.
    pub ty: TensorType,
    /// How long it lives.
    pub scope: MemoryScope,
    /// Node that defines it; none for the parameter of a template.
    pub def: Option<NodeId>,
}

/// What passes have decided about a node.
#[derive(Debug, Clone, PartialEq)]
pub struct Attributes {
    /// Error class.
    pub tolerance: Tolerance,
    /// Effect of an error on the logits.
    pub sensitivity: Sensitivity,
    /// Form of products per segment, empty until the precision pass.
    pub compute: Vec<Compute>,
    /// How products are summed.
    pub sums: Sums,
    /// Set by the specialise pass.
    pub phase: Option<Phase>,
    /// Kernel or tile strategy, set by the tile pass.
    pub tiling: Option<String>,
    /// Layer that the node computes, set by the expand pass; none outside of layers.
    pub layer: Option<u32>,
    /// Where the node comes from: a part of the model, or the pass that made it.
    pub origin: String,
}

/// One operation.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// Kind.
    pub op: Op,
    /// Operands.
    pub inputs: Vec<ValueId>,
    /// Results.
    pub outputs: Vec<ValueId>,
    /// Decisions.
    pub attributes: Attributes,
}

/// How the bytes of a weight are made from tensors of the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Transform {
    /// The tensor as it is.
    AsStored,
    /// Tensors stacked along a new outermost axis (experts stored one by one).
    Stack,
    /// Rows `first ..` of the tensor, as many as the shape says (parts of a fused tensor).
    Rows {
        /// First row of the 2-D tensor (outer dimensions flattened).
        first: u64,
    },
    /// For each of the outermost `experts` blocks, rows `first..first + rows` (parts of fused 3-D expert tensors).
    ExpertRows {
        /// First row within an expert.
        first: u64,
    },
    /// Latent attention stored as k `[heads, latent, nope]` and v `[heads, value, latent]`: becomes
    /// `[heads * (nope + value), latent]` f32.
    MergeKvB {
        /// Query heads.
        num_heads: u64,
        /// Non-rotary elements of a head.
        nope_dim: u64,
        /// Elements of a value head.
        value_dim: u64,
    },
    /// Dequantised to f32. A second tensor holds scales of an 8-bit float matrix, one per 128 x 128 block.
    ToF32,
}

/// Where the weight of one layer comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightSource {
    /// Storage type after the transform.
    pub dtype: DType,
    /// Tensors of the checkpoint; none if the layer, between others that have it, has no such weight.
    pub tensors: Vec<String>,
    /// What is done to them.
    pub transform: Transform,
}

/// The part of a weight that one device of a group holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WeightSlice {
    /// Dimension that is cut, outermost first.
    pub axis: u32,
    /// First index that is held; the declared shape says how many are.
    pub first: u64,
    /// Size of that dimension in the whole weight.
    pub of: u64,
}

/// A weight, or one per layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightDecl {
    /// Role, e.g. `attn_q.weight`.
    pub name: String,
    /// Shape, outermost first.
    pub shape: Vec<u64>,
    /// One per layer that uses it (index = layer - `first_layer`), or a single one.
    pub sources: Vec<WeightSource>,
    /// First layer that has one; none for a weight outside of the layers.
    pub first_layer: Option<u32>,
    /// Which part of the transformed tensors it is; none: all.
    pub slice: Option<WeightSlice>,
}

impl WeightDecl {
    /// Shape of the weight that this is a part of.
    #[must_use]
    pub fn whole_shape(&self) -> Vec<u64> {
        let mut shape = self.shape.clone();
        if let Some(slice) = self.slice
            && let Some(dim) = shape.get_mut(slice.axis as usize)
        {
            *dim = slice.of;
        }
        shape
    }
}

/// Layout of a cache block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StateLayout {
    /// Keys, then values, per head.
    Split {
        /// Heads.
        num_key_value_heads: u32,
        /// Elements of a key.
        head_dim: u32,
        /// Elements of a value.
        value_dim: u32,
    },
    /// One row per token: latent, then rotary key.
    Joined {
        /// Elements of the latent.
        latent_dim: u32,
        /// Elements of the rotary key.
        rope_dim: u32,
    },
}

impl StateLayout {
    /// Elements per token.
    #[must_use]
    pub const fn elements_per_token(self) -> u64 {
        match self {
            Self::Split { num_key_value_heads, head_dim, value_dim } => {
                (num_key_value_heads as u64).saturating_mul(head_dim as u64 + value_dim as u64)
            }
            Self::Joined { latent_dim, rope_dim } => latent_dim as u64 + rope_dim as u64,
        }
    }
}

/// A cache, one per layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateDecl {
    /// Name, e.g. `kv`.
    pub name: String,
    /// Storage type; f32 until the precision pass decides.
    pub dtype: DType,
    /// Layout of a block.
    pub layout: StateLayout,
    /// Growth.
    pub growth: GrowthPattern,
    /// First layer that has one.
    pub first_layer: u32,
    /// Layers.
    pub layers: u32,
}

/// Nodes in execution order, with parameters and results.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Body {
    /// Values given by the caller (a template: the hidden state first, then values of the enclosing body that it reads).
    pub params: Vec<ValueId>,
    /// Order of execution.
    pub nodes: Vec<NodeId>,
    /// What it hands back.
    pub results: Vec<ValueId>,
}

/// A layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    /// Name.
    pub name: String,
    /// Its nodes. It may read values of the main body that are defined before its first use.
    pub body: Body,
}

/// A model.
#[derive(Debug, Clone, PartialEq)]
pub struct Graph {
    /// Name of the model.
    pub name: String,
    /// Bounds of the symbols.
    pub bounds: SymbolBounds,
    /// All values.
    pub values: Vec<Value>,
    /// All nodes.
    pub nodes: Vec<Node>,
    /// All weights.
    pub weights: Vec<WeightDecl>,
    /// All states.
    pub states: Vec<StateDecl>,
    /// Layers.
    pub templates: Vec<Template>,
    /// The whole; its only result are the logits, f32 `[R, vocab]`.
    pub body: Body,
}

impl Graph {
    /// An empty graph.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            bounds: SymbolBounds::default(),
            values: Vec::new(),
            nodes: Vec::new(),
            weights: Vec::new(),
            states: Vec::new(),
            templates: Vec::new(),
            body: Body::default(),
        }
    }

    /// A value.
    #[must_use]
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }
    /// A node.
    #[must_use]
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }
    /// A node to change.
    pub fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id.index()]
    }
    /// A weight.
    #[must_use]
    pub fn weight(&self, id: WeightId) -> &WeightDecl {
        &self.weights[id.index()]
    }
    /// A state.
    #[must_use]
    pub fn state(&self, id: StateId) -> &StateDecl {
        &self.states[id.index()]
    }
    /// A template.
    #[must_use]
    pub fn template(&self, id: TemplateId) -> &Template {
        &self.templates[id.index()]
    }

    /// Declares a weight.
    pub fn add_weight(&mut self, decl: WeightDecl) -> WeightId {
        self.weights.push(decl);
        WeightId(self.weights.len() as u32 - 1)
    }
    /// Declares a state.
    pub fn add_state(&mut self, decl: StateDecl) -> StateId {
        self.states.push(decl);
        StateId(self.states.len() as u32 - 1)
    }
    /// Adds a template.
    pub fn add_template(&mut self, template: Template) -> TemplateId {
        self.templates.push(template);
        TemplateId(self.templates.len() as u32 - 1)
    }
    /// Adds a value without a definition.
    pub fn add_value(&mut self, ty: TensorType, scope: MemoryScope, def: Option<NodeId>) -> ValueId {
        self.values.push(Value { ty, scope, def });
        ValueId(self.values.len() as u32 - 1)
    }
    /// Adds a node and its result values; the types follow from the op and its operands.
    ///
    /// # Errors
    /// If operands do not fit the op.
    pub fn add_node(&mut self, op: Op, inputs: Vec<ValueId>, origin: &str) -> Result<NodeId, IrError> {
        let results = crate::build::result_types(self, &op, &inputs)?;
        let id = NodeId(self.nodes.len() as u32);
        let scope = if op.is_source() && !matches!(op, Op::Input { .. }) {
            MemoryScope::Persistent
        } else {
            MemoryScope::Temporary
        };
        let outputs = results.into_iter().map(|ty| self.add_value(ty, scope, Some(id))).collect();
        let attributes = crate::build::default_attributes(&op, origin);
        self.nodes.push(Node { op, inputs, outputs, attributes });
        Ok(id)
    }
}
