//! Node kinds and their typed attributes. Operand order, shapes and formulas are those of the op vocabulary of the C ABI
//! (`qwen_hal_abi::ops`); this enum is its typed form.

use crate::{StateId, TemplateId, WeightId};

/// What a linear layer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GemmType {
    /// One weight.
    Plain,
    /// Query, key and value projections of one input.
    FusedQkv,
    /// Gate and up projections of one input.
    FusedGateUp,
    /// Experts.
    MoeGrouped,
    /// The output head.
    LmHead,
}

/// What is done to a linear layer's result while it is at hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// Nothing.
    None,
    /// out = act(segment 0) * segment 1.
    Glu(Activation),
    /// out = result + last operand.
    Add,
}

/// Activation function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// x * sigmoid(x).
    Silu,
    /// Gelu, tanh form.
    GeluTanh,
    /// 1 / (1 + exp(-x)).
    Sigmoid,
}

/// Element-wise function of two operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BinaryFunction {
    /// a + b.
    Add,
    /// a * b.
    Mul,
}

/// Which elements a rotary embedding pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// (i, i + d/2).
    Half,
    /// (2i, 2i + 1).
    Interleaved,
}

/// Form of multi-head latent attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MlaForm {
    /// Keys and values are built from the latent: fewer operations for many query tokens.
    Expanded,
    /// Up-projections are applied to the query and the result: fewer bytes for one query token.
    Absorbed,
}

/// Score function of a router.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RouterScore {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid per expert.
    Sigmoid,
}

/// How a router ranks groups of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupScore {
    /// By the best member.
    Max,
    /// By the sum of the two best members.
    Top2Sum,
}

/// Attributes of [`Op::Route`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Route {
    /// Score function.
    pub score: RouterScore,
    /// Experts in all.
    pub num_experts: u32,
    /// Experts per token.
    pub top_k: u32,
    /// Groups, 1 = none.
    pub num_groups: u32,
    /// Groups that may be chosen from.
    pub topk_group: u32,
    /// Rank of groups.
    pub group_score: GroupScore,
    /// Weights are divided by their sum.
    pub renormalise: bool,
    /// Factor on the weights.
    pub scale: f64,
}

/// Attributes of [`Op::Attention`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// Query heads.
    pub num_heads: u32,
    /// Key/value heads.
    pub num_key_value_heads: u32,
    /// Elements of a query or key head.
    pub head_dim: u32,
    /// Elements of a value head.
    pub value_dim: u32,
    /// Factor on scores.
    pub scale: f64,
    /// Sliding window in tokens, 0 = none.
    pub window: u32,
}

/// Attributes of [`Op::MlaAttention`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MlaAttention {
    /// Query heads.
    pub num_heads: u32,
    /// Non-rotary elements of a query head.
    pub nope_dim: u32,
    /// Rotary elements of a query head.
    pub rope_dim: u32,
    /// Elements of a value head.
    pub value_dim: u32,
    /// Elements of the latent.
    pub latent_dim: u32,
    /// Factor on scores.
    pub scale: f64,
    /// Set by the specialise pass.
    pub form: Option<MlaForm>,
}

/// Attributes of [`Op::Rope`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Heads in a row.
    pub num_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// First rotated element of a head.
    pub rotary_offset: u32,
    /// Rotated elements.
    pub rotary_dim: u32,
    /// Pairing.
    pub style: RopeStyle,
    /// Factor on cos and sin.
    pub attention_factor: f64,
}

/// Kind of a node.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Op {
    /// A tensor that the caller gives at each step.
    Input {
        /// Its name, see [`crate::inputs`].
        name: &'static str,
    },
    /// A weight; in a template, the weight of the current layer.
    Weight(WeightId),
    /// A small table computed from the config.
    Const {
        /// f32 values.
        data: Vec<f32>,
    },
    /// ids, table -> rows.
    Embed,
    /// x, rows -> selected rows.
    GatherRows,
    /// x, weights.., (scales after their weight), biases.., residual -> y. `biases` has one flag per segment.
    Gemm {
        /// What for.
        gemm_type: GemmType,
        /// Which segments have a bias; its length is the number of segments.
        biases: Vec<bool>,
        /// Which weights are followed by block scales; its length is the number of segments.
        scales: Vec<bool>,
        /// What follows.
        epilogue: Epilogue,
    },
    /// x, offsets, (rows if `gather`), weights.., (scales after their weight) -> y in sorted order.
    GroupedGemm {
        /// Experts.
        num_experts: u32,
        /// Experts per token.
        top_k: u32,
        /// x has one row per token and is read through `rows`; otherwise one per (token, choice).
        gather: bool,
        /// Which weights are followed by block scales; its length is the number of segments.
        scales: Vec<bool>,
        /// None or Glu.
        epilogue: Epilogue,
    },
    /// x, w -> y: root-mean-square norm over groups of `axis` elements.
    Norm {
        /// Added to the mean square.
        eps: f64,
        /// Elements of a group.
        axis: u32,
    },
    /// x, positions, inv_freq -> y.
    Rope(Rope),
    /// a, b -> act(a) * b.
    Glu(Activation),
    /// a, b -> a (f) b; b may have one column.
    Binary(BinaryFunction),
    /// x -> f(x).
    Unary(Activation),
    /// x -> x in another float type.
    Cast,
    /// k, v, slots -> (state). Writes the cache.
    KvAppend {
        /// The cache.
        state: StateId,
    },
    /// q, query_start, context_len, block_table -> y. Reads the cache.
    Attention {
        /// The cache.
        state: StateId,
        /// Sizes.
        attention: Attention,
    },
    /// q, kv_b, query_start, context_len, block_table -> y. Reads the cache.
    MlaAttention {
        /// The cache.
        state: StateId,
        /// Sizes.
        attention: MlaAttention,
    },
    /// logits, (bias if `bias`) -> ids, weights.
    Route {
        /// Sizes and rule.
        route: Route,
        /// A correction bias follows the logits.
        bias: bool,
    },
    /// ids -> offsets, rows, slots.
    Dispatch {
        /// Experts.
        num_experts: u32,
    },
    /// x, slots, weights, (addend if `addend`) -> y.
    Combine {
        /// An addend follows.
        addend: bool,
    },
    /// x -> columns `offset .. offset + width` of each row, without a copy.
    Columns {
        /// First column.
        offset: u32,
        /// Columns.
        width: u32,
    },
    /// x -> softmax of each row.
    Softmax,
    /// x -> the sum of x over the devices of a group, in order of rank. An exchange, no op of the vocabulary.
    AllReduce {
        /// Devices.
        ranks: u32,
    },
    /// hidden -> hidden after `count` layers of a template, with weights and states `first ..`.
    Layers {
        /// Template.
        template: TemplateId,
        /// First layer.
        first: u32,
        /// Layers.
        count: u32,
    },
}

impl Op {
    /// Name in the text form.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Input { .. } => "input",
            Self::Weight(_) => "weight",
            Self::Const { .. } => "const",
            Self::Embed => "embed",
            Self::GatherRows => "gather_rows",
            Self::Gemm { .. } => "gemm",
            Self::GroupedGemm { .. } => "grouped_gemm",
            Self::Norm { .. } => "norm",
            Self::Rope(_) => "rope",
            Self::Glu(_) => "glu",
            Self::Binary(_) => "binary",
            Self::Unary(_) => "unary",
            Self::Cast => "cast",
            Self::KvAppend { .. } => "kv_append",
            Self::Attention { .. } => "attention",
            Self::MlaAttention { .. } => "mla_attention",
            Self::Route { .. } => "route",
            Self::Dispatch { .. } => "dispatch",
            Self::Combine { .. } => "combine",
            Self::Columns { .. } => "columns",
            Self::Softmax => "softmax",
            Self::AllReduce { .. } => "all_reduce",
            Self::Layers { .. } => "layers",
        }
    }

    /// Whether the node computes nothing at run time.
    #[must_use]
    pub const fn is_source(&self) -> bool {
        matches!(self, Self::Input { .. } | Self::Weight(_) | Self::Const { .. })
    }
}

macro_rules! spelled {
    ($(#[$doc:meta])* $type:ident: $($variant:ident = $name:literal),+) => {
        impl $type {
            /// Name in the text form.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }
            /// The variant of a name.
            #[must_use]
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($name => Some(Self::$variant),)+ _ => None }
            }
        }
    };
}
spelled!(GemmType: Plain = "plain", FusedQkv = "fused_qkv", FusedGateUp = "fused_gate_up", MoeGrouped = "moe_grouped", LmHead = "lm_head");
spelled!(Activation: Silu = "silu", GeluTanh = "gelu_tanh", Sigmoid = "sigmoid");
spelled!(BinaryFunction: Add = "add", Mul = "mul");
spelled!(RopeStyle: Half = "half", Interleaved = "interleaved");
spelled!(MlaForm: Expanded = "expanded", Absorbed = "absorbed");
spelled!(RouterScore: Softmax = "softmax", Sigmoid = "sigmoid");
spelled!(GroupScore: Max = "max", Top2Sum = "top2_sum");
