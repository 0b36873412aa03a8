//! One description for every family and both dialects: what [`super::build_graph`] needs to know of a model.

use qwen_ir::{GroupScore, RouterScore};

use super::error::ModelError;
use super::rope::RopeConfig;
use super::table::Family;

/// Bounds of config values. They keep all later arithmetic on sizes within 64 bits, and refuse a hostile config before
/// anything is allocated for it; each is several times what any published model has.
pub(super) mod limits {
    pub(crate) const LAYERS: u32 = 4096;
    pub(crate) const WIDTH: u32 = 1 << 20;
    pub(crate) const HEADS: u32 = 1 << 14;
    pub(crate) const HEAD_DIM: u32 = 1 << 14;
    pub(crate) const VOCABULARY: u32 = 1 << 26;
    pub(crate) const EXPERTS: u32 = 1 << 14;
    pub(crate) const CONTEXT: u32 = 1 << 30;
    pub(crate) const TOKEN_ID: u32 = i32::MAX as u32;
}

/// The naming scheme and the conventions of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// `config.json` and safetensors.
    HuggingFace,
    /// GGUF.
    Gguf,
}

/// A model, in standard terms.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Entry of the table of families.
    pub family: &'static Family,
    /// Where the config came from.
    pub dialect: Dialect,
    /// Rows of the embedding; may exceed the tokenizer's vocabulary.
    pub vocab_size: u32,
    /// Width of the residual stream.
    pub hidden_size: u32,
    /// Layers, without those for multi-token prediction.
    pub num_hidden_layers: u32,
    /// Query heads.
    pub num_attention_heads: u32,
    /// Key/value heads (of latent attention: as many as query heads).
    pub num_key_value_heads: u32,
    /// Elements of a query, key and value head (of latent attention: see `mla`).
    pub head_dim: u32,
    /// Width of dense feed-forward layers.
    pub intermediate_size: u32,
    /// Longest context that the model was made for.
    pub max_position_embeddings: u32,
    /// Added to the mean square in norms.
    pub rms_norm_eps: f64,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Query and key are normalised per head.
    pub qk_norm: bool,
    /// Which projections of the attention have a bias.
    pub attention_bias: AttentionBias,
    /// Dense feed-forward layers have biases.
    pub mlp_bias: bool,
    /// The output head is the embedding.
    pub tie_word_embeddings: bool,
    /// One entry per layer.
    pub layers: Vec<LayerKind>,
    /// Experts, if any layer has them.
    pub moe: Option<MoeConfig>,
    /// Latent attention.
    pub mla: Option<MlaConfig>,
    /// 8-bit float weights with scales per block.
    pub block_scale: Option<BlockScale>,
    /// Layers for multi-token prediction, which are skipped.
    pub num_nextn_predict_layers: u32,
    /// Token put in front of a text.
    pub bos_token_id: Option<u32>,
    /// Tokens that end an answer.
    pub eos_token_ids: Vec<u32>,
}

/// Which projections of the attention have a bias. Latent attention uses `query` for the down-projection of the query,
/// `key` and `value` for that of the latent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(missing_docs, reason = "named after the projection")]
pub struct AttentionBias {
    pub query: bool,
    pub key: bool,
    pub value: bool,
    pub output: bool,
}

/// What kind of layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LayerKind {
    /// Feed-forward part.
    pub feed_forward: FeedForward,
    /// Sliding window in tokens, 0 = none.
    pub window: u32,
}

impl LayerKind {
    /// Name of its template.
    #[must_use]
    pub fn name(self) -> String {
        let feed_forward = match self.feed_forward {
            FeedForward::Dense => "dense",
            FeedForward::Moe => "moe",
        };
        if self.window == 0 { feed_forward.to_owned() } else { format!("{feed_forward}_window{}", self.window) }
    }
}

/// Feed-forward part of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FeedForward {
    /// One network for all tokens.
    Dense,
    /// Experts.
    Moe,
}

/// Mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MoeConfig {
    /// Experts.
    pub num_experts: u32,
    /// Experts per token.
    pub top_k: u32,
    /// Width of an expert.
    pub moe_intermediate_size: u32,
    /// Width of the expert that every token passes, 0 = none.
    pub shared_intermediate_size: u32,
    /// The shared expert's result is multiplied by the sigmoid of a learned gate.
    pub shared_gate: bool,
    /// Score function.
    pub score: RouterScore,
    /// Groups of experts, 1 = none.
    pub num_groups: u32,
    /// Groups that may be chosen from.
    pub topk_group: u32,
    /// Rank of groups.
    pub group_score: GroupScore,
    /// Weights are divided by their sum.
    pub renormalise: bool,
    /// Factor on the weights.
    pub scale: f64,
    /// A learned bias is added to the scores for the choice.
    pub correction_bias: bool,
}

/// Multi-head latent attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MlaConfig {
    /// Elements of the query's latent, 0 = the query is projected directly.
    pub q_lora_rank: u32,
    /// Elements of the latent of key and value.
    pub kv_lora_rank: u32,
    /// Elements of a head without rotation.
    pub qk_nope_head_dim: u32,
    /// Rotated elements of a head.
    pub qk_rope_head_dim: u32,
    /// Elements of a value head.
    pub v_head_dim: u32,
    /// Added to the mean square in the norms of the latents.
    pub norm_eps: f64,
}

/// Block of a weight that shares a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockScale {
    /// Outputs.
    pub rows: u32,
    /// Inputs.
    pub columns: u32,
}

impl BlockScale {
    /// The only size in use.
    pub const STANDARD: Self = Self { rows: 128, columns: 128 };
}

impl ModelConfig {
    /// Factor on attention scores.
    #[must_use]
    pub fn softmax_scale(&self) -> f64 {
        match self.mla {
            Some(mla) => f64::from(mla.qk_nope_head_dim + mla.qk_rope_head_dim).powf(-0.5) * self.rope.softmax_factor(),
            None => f64::from(self.head_dim).powf(-0.5),
        }
    }

    /// Checks what single values can't show. Reading calls it; call it again after changing a config.
    ///
    /// # Errors
    /// If values contradict each other.
    pub fn validate(&self) -> Result<(), ModelError> {
        let heads = self.num_attention_heads;
        if self.num_key_value_heads == 0 || !heads.is_multiple_of(self.num_key_value_heads) {
            let expected = format!("a divisor of the {heads} attention heads");
            return Err(ModelError::invalid("num_key_value_heads", expected, self.num_key_value_heads.to_string()));
        }
        if self.layers.len() != self.num_hidden_layers as usize {
            let expected = format!("{} layers", self.num_hidden_layers);
            return Err(ModelError::invalid("layer_types", expected, self.layers.len().to_string()));
        }
        let rotatable = self.mla.map_or(self.head_dim, |mla| mla.qk_rope_head_dim);
        let rotary_dim = self.rope.rotary_dim;
        if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) || rotary_dim > rotatable {
            let expected = format!("an even number of rotated elements up to {rotatable}");
            return Err(ModelError::invalid("head_dim", expected, rotary_dim.to_string()));
        }
        if let Some(divisors) = &self.rope.divisors {
            let wanted = rotary_dim as usize / 2;
            if divisors.len() != wanted || !divisors.iter().all(|d| d.is_finite() && *d > 0.0) {
                let expected = format!("{wanted} positive numbers");
                let found = format!("{} numbers, some of them not positive or too many", divisors.len());
                return Err(ModelError::invalid("rope_freqs.weight", expected, found));
            }
        }
        self.moe.map_or(Ok(()), |moe| moe.validate())
    }
}

impl MoeConfig {
    fn validate(&self) -> Result<(), ModelError> {
        if self.num_groups == 0 || !self.num_experts.is_multiple_of(self.num_groups) {
            let expected = format!("a divisor of the {} experts", self.num_experts);
            return Err(ModelError::invalid("n_group", expected, self.num_groups.to_string()));
        }
        if self.topk_group == 0 || self.topk_group > self.num_groups {
            let expected = format!("an integer from 1 to the {} groups", self.num_groups);
            return Err(ModelError::invalid("topk_group", expected, self.topk_group.to_string()));
        }
        let members = self.num_experts / self.num_groups;
        if members < 2 && self.num_groups > 1 && self.group_score == GroupScore::Top2Sum {
            return Err(ModelError::invalid("n_group", "groups of two experts or more", self.num_groups.to_string()));
        }
        let available = members * self.topk_group;
        if self.top_k == 0 || self.top_k > available {
            let expected = format!("an integer from 1 to the {available} experts that can be chosen from");
            return Err(ModelError::invalid("num_experts_per_tok", expected, self.top_k.to_string()));
        }
        Ok(())
    }
}
