//! The families: one entry per architecture, data only. A new family is an entry here, not code elsewhere.

use qwen_ir::RopeStyle;

/// What distinguishes an architecture from the common decoder.
#[derive(Debug, PartialEq, Eq)]
pub struct Family {
    /// Short name.
    pub name: &'static str,
    /// `architectures` and `model_type` of `config.json`.
    pub hf: (&'static str, &'static str),
    /// `general.architecture` of GGUF.
    pub gguf: &'static str,
    /// GGUF files of this architecture with another `expert_gating_func` (0 if absent) belong to another entry.
    pub gguf_gating: Option<&'static [u32]>,
    /// Form of attention.
    pub attention: AttentionForm,
    /// Query and key are normalised per head.
    pub qk_norm: bool,
    /// Which projections of the attention have a bias.
    pub attention_bias: BiasRule,
    /// The dense feed-forward layers have biases if the config (GGUF: the file) says so.
    pub mlp_bias: bool,
    /// Pairing of rotated elements in `config.json` checkpoints and in GGUF, whose converter reorders rows of some.
    pub rope_style: (RopeStyle, RopeStyle),
    /// Which layers have a sliding window.
    pub window: WindowRule,
    /// Experts.
    pub experts: Option<ExpertRule>,
    /// Names of tensors by role.
    pub weights: &'static [&'static [WeightName]],
}

/// Form of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionForm {
    /// Multi-head, with groups of query heads on a key/value head.
    Grouped,
    /// Multi-head latent attention.
    Latent,
}

/// Which projections of the attention have a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BiasRule {
    /// Query, key and value.
    QueryKeyValue,
    /// Query, key and value unless `qkv_bias` is false.
    QueryKeyValueUnless,
    /// All (latent attention: those on the hidden state) if `attention_bias`.
    AllIf,
}

/// Which layers have a sliding window; a list `layer_types` in the config comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WindowRule {
    /// None.
    Never,
    /// `max_window_layers` and later, if `use_sliding_window`.
    FromMaxWindowLayers,
    /// All, if `use_sliding_window`.
    All,
    /// Those in `layer_types`; without the list versions of the transformers library differ.
    Listed,
}

/// Experts of a family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertRule {
    /// Which layers have experts.
    pub layers: ExpertLayers,
    /// Experts that every token passes.
    pub shared: SharedExpert,
    /// How experts are chosen.
    pub gating: Gating,
    /// Whether weights are divided by their sum if the config (GGUF: the file) doesn't say.
    pub renormalise: (bool, bool),
}

/// Which layers have experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertLayers {
    /// Every `decoder_sparse_step`-th, `mlp_only_layers` excepted.
    SparseStep,
    /// From `first_k_dense_replace`, every `moe_layer_freq`-th.
    AfterDense,
}

/// Experts that every token passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SharedExpert {
    /// None.
    None,
    /// One, times the sigmoid of a learned gate.
    Gated,
    /// One as wide as `n_shared_experts` experts.
    Plain,
}

/// How experts are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gating {
    /// Softmax, best k of all.
    Softmax,
    /// Softmax, best k of the groups with the best member (`topk_method`).
    SoftmaxGroups,
    /// Sigmoid plus a correction bias, best k of the groups with the best two members.
    SigmoidGroups,
}

/// Names of a tensor. `{layer}`, `{expert}` are numbers, `{part}` is `weight` or `bias`.
#[derive(Debug, PartialEq, Eq)]
pub struct WeightName {
    /// Name in this program, that of GGUF where it has one: passes tell linear layers apart by it.
    pub role: &'static str,
    /// Names in Hugging Face checkpoints; the first one present counts.
    pub hf: &'static [&'static str],
    /// Name in GGUF files.
    pub gguf: &'static str,
}

const fn weight(role: &'static str, hf: &'static [&'static str], gguf: &'static str) -> WeightName {
    WeightName { role, hf, gguf }
}

const COMMON: &[WeightName] = &[
    weight("token_embd", &["model.embed_tokens.{part}"], "token_embd.{part}"),
    weight("output_norm", &["model.norm.{part}"], "output_norm.{part}"),
    weight("output", &["lm_head.{part}"], "output.{part}"),
    weight("attn_norm", &["model.layers.{layer}.input_layernorm.{part}"], "blk.{layer}.attn_norm.{part}"),
    weight("ffn_norm", &["model.layers.{layer}.post_attention_layernorm.{part}"], "blk.{layer}.ffn_norm.{part}"),
    weight("attn_output", &["model.layers.{layer}.self_attn.o_proj.{part}"], "blk.{layer}.attn_output.{part}"),
    weight("ffn_gate", &["model.layers.{layer}.mlp.gate_proj.{part}"], "blk.{layer}.ffn_gate.{part}"),
    weight("ffn_up", &["model.layers.{layer}.mlp.up_proj.{part}"], "blk.{layer}.ffn_up.{part}"),
    weight("ffn_down", &["model.layers.{layer}.mlp.down_proj.{part}"], "blk.{layer}.ffn_down.{part}"),
];

const GROUPED: &[WeightName] = &[
    weight("attn_q", &["model.layers.{layer}.self_attn.q_proj.{part}"], "blk.{layer}.attn_q.{part}"),
    weight("attn_k", &["model.layers.{layer}.self_attn.k_proj.{part}"], "blk.{layer}.attn_k.{part}"),
    weight("attn_v", &["model.layers.{layer}.self_attn.v_proj.{part}"], "blk.{layer}.attn_v.{part}"),
    weight("attn_q_norm", &["model.layers.{layer}.self_attn.q_norm.{part}"], "blk.{layer}.attn_q_norm.{part}"),
    weight("attn_k_norm", &["model.layers.{layer}.self_attn.k_norm.{part}"], "blk.{layer}.attn_k_norm.{part}"),
];

const LATENT: &[WeightName] = &[
    weight("attn_q", &["model.layers.{layer}.self_attn.q_proj.{part}"], "blk.{layer}.attn_q.{part}"),
    weight("attn_q_a", &["model.layers.{layer}.self_attn.q_a_proj.{part}"], "blk.{layer}.attn_q_a.{part}"),
    weight(
        "attn_q_a_norm",
        &["model.layers.{layer}.self_attn.q_a_layernorm.{part}"],
        "blk.{layer}.attn_q_a_norm.{part}",
    ),
    weight("attn_q_b", &["model.layers.{layer}.self_attn.q_b_proj.{part}"], "blk.{layer}.attn_q_b.{part}"),
    weight(
        "attn_kv_a",
        &["model.layers.{layer}.self_attn.kv_a_proj_with_mqa.{part}"],
        "blk.{layer}.attn_kv_a_mqa.{part}",
    ),
    weight(
        "attn_kv_a_norm",
        &["model.layers.{layer}.self_attn.kv_a_layernorm.{part}"],
        "blk.{layer}.attn_kv_a_norm.{part}",
    ),
    weight("attn_kv_b", &["model.layers.{layer}.self_attn.kv_b_proj.{part}"], "blk.{layer}.attn_kv_b.{part}"),
    weight("attn_k_b", &[], "blk.{layer}.attn_k_b.{part}"),
    weight("attn_v_b", &[], "blk.{layer}.attn_v_b.{part}"),
];

const EXPERTS: &[WeightName] = &[
    weight("ffn_gate_inp", &["model.layers.{layer}.mlp.gate.{part}"], "blk.{layer}.ffn_gate_inp.{part}"),
    weight("exp_probs_b", &["model.layers.{layer}.mlp.gate.e_score_correction_bias"], "blk.{layer}.exp_probs_b.bias"),
    weight(
        "ffn_gate_exps",
        &["model.layers.{layer}.mlp.experts.{expert}.gate_proj.{part}"],
        "blk.{layer}.ffn_gate_exps.{part}",
    ),
    weight(
        "ffn_up_exps",
        &["model.layers.{layer}.mlp.experts.{expert}.up_proj.{part}"],
        "blk.{layer}.ffn_up_exps.{part}",
    ),
    weight(
        "ffn_gate_up_exps",
        &["model.layers.{layer}.mlp.experts.gate_up_proj"],
        "blk.{layer}.ffn_gate_up_exps.{part}",
    ),
    weight(
        "ffn_down_exps",
        &["model.layers.{layer}.mlp.experts.{expert}.down_proj.{part}", "model.layers.{layer}.mlp.experts.down_proj"],
        "blk.{layer}.ffn_down_exps.{part}",
    ),
];

const SHARED: &[WeightName] = &[
    weight(
        "ffn_gate_shexp",
        &[
            "model.layers.{layer}.mlp.shared_experts.gate_proj.{part}",
            "model.layers.{layer}.mlp.shared_expert.gate_proj.{part}",
        ],
        "blk.{layer}.ffn_gate_shexp.{part}",
    ),
    weight(
        "ffn_up_shexp",
        &[
            "model.layers.{layer}.mlp.shared_experts.up_proj.{part}",
            "model.layers.{layer}.mlp.shared_expert.up_proj.{part}",
        ],
        "blk.{layer}.ffn_up_shexp.{part}",
    ),
    weight(
        "ffn_down_shexp",
        &[
            "model.layers.{layer}.mlp.shared_experts.down_proj.{part}",
            "model.layers.{layer}.mlp.shared_expert.down_proj.{part}",
        ],
        "blk.{layer}.ffn_down_shexp.{part}",
    ),
    weight(
        "ffn_gate_inp_shexp",
        &["model.layers.{layer}.mlp.shared_expert_gate.{part}"],
        "blk.{layer}.ffn_gate_inp_shexp.{part}",
    ),
];

/// Tensors that some writers store although they are computed or unused.
pub(super) const IGNORED_SUFFIXES: &[&str] =
    &[".rotary_emb.inv_freq", ".self_attn.bias", ".self_attn.masked_bias", ".attn.bias", ".attn.masked_bias"];

/// What most families share.
const DENSE: Family = Family {
    name: "",
    hf: ("", ""),
    gguf: "",
    gguf_gating: None,
    attention: AttentionForm::Grouped,
    qk_norm: false,
    attention_bias: BiasRule::AllIf,
    mlp_bias: false,
    rope_style: (RopeStyle::Half, RopeStyle::Half),
    window: WindowRule::Never,
    experts: None,
    weights: &[COMMON, GROUPED],
};

const QWEN_EXPERTS: ExpertRule = ExpertRule {
    layers: ExpertLayers::SparseStep,
    shared: SharedExpert::None,
    gating: Gating::Softmax,
    renormalise: (false, true),
};

/// What DeepSeek-V2 and V3 share.
const DEEPSEEK: Family = Family {
    attention: AttentionForm::Latent,
    rope_style: (RopeStyle::Interleaved, RopeStyle::Interleaved),
    weights: &[COMMON, LATENT, EXPERTS, SHARED],
    ..DENSE
};

/// All families.
pub static FAMILIES: [Family; 7] = [
    Family {
        name: "llama",
        hf: ("LlamaForCausalLM", "llama"),
        gguf: "llama",
        mlp_bias: true,
        rope_style: (RopeStyle::Half, RopeStyle::Interleaved),
        ..DENSE
    },
    Family {
        name: "qwen2",
        hf: ("Qwen2ForCausalLM", "qwen2"),
        gguf: "qwen2",
        attention_bias: BiasRule::QueryKeyValue,
        window: WindowRule::FromMaxWindowLayers,
        ..DENSE
    },
    Family {
        name: "qwen3",
        hf: ("Qwen3ForCausalLM", "qwen3"),
        gguf: "qwen3",
        qk_norm: true,
        window: WindowRule::FromMaxWindowLayers,
        ..DENSE
    },
    Family {
        name: "qwen2_moe",
        hf: ("Qwen2MoeForCausalLM", "qwen2_moe"),
        gguf: "qwen2moe",
        attention_bias: BiasRule::QueryKeyValueUnless,
        window: WindowRule::Listed,
        experts: Some(ExpertRule { shared: SharedExpert::Gated, renormalise: (false, false), ..QWEN_EXPERTS }),
        weights: &[COMMON, GROUPED, EXPERTS, SHARED],
        ..DENSE
    },
    Family {
        name: "qwen3_moe",
        hf: ("Qwen3MoeForCausalLM", "qwen3_moe"),
        gguf: "qwen3moe",
        qk_norm: true,
        window: WindowRule::All,
        experts: Some(QWEN_EXPERTS),
        weights: &[COMMON, GROUPED, EXPERTS],
        ..DENSE
    },
    Family {
        name: "deepseek_v2",
        hf: ("DeepseekV2ForCausalLM", "deepseek_v2"),
        gguf: "deepseek2",
        gguf_gating: Some(&[0, 1]),
        mlp_bias: true,
        experts: Some(ExpertRule {
            layers: ExpertLayers::AfterDense,
            shared: SharedExpert::Plain,
            gating: Gating::SoftmaxGroups,
            renormalise: (false, false),
        }),
        ..DEEPSEEK
    },
    Family {
        name: "deepseek_v3",
        hf: ("DeepseekV3ForCausalLM", "deepseek_v3"),
        gguf: "deepseek2",
        gguf_gating: Some(&[2]),
        experts: Some(ExpertRule {
            layers: ExpertLayers::AfterDense,
            shared: SharedExpert::Plain,
            gating: Gating::SigmoidGroups,
            renormalise: (true, false),
        }),
        ..DEEPSEEK
    },
];

impl Family {
    /// The names of a role.
    #[must_use]
    pub fn weight_name(&self, role: &str) -> Option<&'static WeightName> {
        self.weights.iter().flat_map(|names| names.iter()).find(|name| name.role == role)
    }
}
