//! Names of config values in both dialects, the same for all families.

use super::fields::Key;

macro_rules! keys {
    ($($name:ident = [$($hf:literal),*] [$($gguf:literal),*];)+) => {
        $(pub(super) const $name: Key = Key { hf: &[$($hf),*], gguf: &[$($gguf),*] };)+
    };
}

keys! {
    VOCAB_SIZE = ["vocab_size"] ["vocab_size"];
    HIDDEN_SIZE = ["hidden_size"] ["embedding_length"];
    NUM_HIDDEN_LAYERS = ["num_hidden_layers"] ["block_count"];
    NUM_ATTENTION_HEADS = ["num_attention_heads"] ["attention.head_count"];
    NUM_KEY_VALUE_HEADS = ["num_key_value_heads"] ["attention.head_count_kv"];
    HEAD_DIM = ["head_dim"] ["attention.key_length"];
    VALUE_DIM = [] ["attention.value_length"];
    INTERMEDIATE_SIZE = ["intermediate_size"] ["feed_forward_length"];
    MAX_POSITION_EMBEDDINGS = ["max_position_embeddings"] ["context_length"];
    RMS_NORM_EPS = ["rms_norm_eps"] ["attention.layer_norm_rms_epsilon"];
    TIE_WORD_EMBEDDINGS = ["tie_word_embeddings"] [];
    ATTENTION_BIAS = ["attention_bias"] [];
    QKV_BIAS = ["qkv_bias"] [];
    MLP_BIAS = ["mlp_bias"] [];
    HIDDEN_ACT = ["hidden_act"] [];
    BOS_TOKEN_ID = ["bos_token_id"] [];
    NUM_NEXTN_PREDICT_LAYERS = ["num_nextn_predict_layers"] ["nextn_predict_layers"];

    USE_SLIDING_WINDOW = ["use_sliding_window"] [];
    SLIDING_WINDOW = ["sliding_window"] ["attention.sliding_window"];
    MAX_WINDOW_LAYERS = ["max_window_layers"] [];

    ROPE_THETA = ["rope_theta"] ["rope.freq_base"];
    ROTARY_DIM = [] ["rope.dimension_count"];
    PARTIAL_ROTARY_FACTOR = ["partial_rotary_factor"] [];
    ROPE_INTERLEAVE = ["rope_interleave"] [];
    ROPE_TYPE = ["rope_type", "type"] ["rope.scaling.type"];
    ROPE_FACTOR = ["factor"] ["rope.scaling.factor", "rope.scale_linear"];
    ORIGINAL_CONTEXT = ["original_max_position_embeddings"] ["rope.scaling.original_context_length"];
    LOW_FREQ_FACTOR = ["low_freq_factor"] [];
    HIGH_FREQ_FACTOR = ["high_freq_factor"] [];
    BETA_FAST = ["beta_fast"] ["rope.scaling.yarn_beta_fast"];
    BETA_SLOW = ["beta_slow"] ["rope.scaling.yarn_beta_slow"];
    ATTENTION_FACTOR = ["attention_factor"] ["rope.scaling.attn_factor"];
    EXT_FACTOR = [] ["rope.scaling.yarn_ext_factor"];
    MSCALE = ["mscale"] [];
    MSCALE_ALL_DIM = ["mscale_all_dim"] [];
    YARN_LOG_MULTIPLIER = [] ["rope.scaling.yarn_log_multiplier"];
    TRUNCATE = ["truncate"] [];

    NUM_EXPERTS = ["num_experts", "n_routed_experts", "num_local_experts"] ["expert_count"];
    NUM_EXPERTS_PER_TOK = ["num_experts_per_tok"] ["expert_used_count"];
    MOE_INTERMEDIATE_SIZE = ["moe_intermediate_size"] ["expert_feed_forward_length"];
    SHARED_INTERMEDIATE_SIZE = ["shared_expert_intermediate_size"] ["expert_shared_feed_forward_length"];
    NUM_SHARED_EXPERTS = ["n_shared_experts"] ["expert_shared_count"];
    DECODER_SPARSE_STEP = ["decoder_sparse_step"] [];
    FIRST_K_DENSE_REPLACE = ["first_k_dense_replace"] ["leading_dense_block_count"];
    MOE_LAYER_FREQ = ["moe_layer_freq"] [];
    NORM_TOPK_PROB = ["norm_topk_prob"] ["expert_weights_norm"];
    ROUTED_SCALING_FACTOR = ["routed_scaling_factor"] ["expert_weights_scale"];
    SCORING_FUNC = ["scoring_func"] [];
    TOPK_METHOD = ["topk_method"] [];
    GATING_FUNC = [] ["expert_gating_func"];
    NUM_GROUPS = ["n_group"] ["expert_group_count"];
    TOPK_GROUP = ["topk_group"] ["expert_group_used_count"];

    Q_LORA_RANK = ["q_lora_rank"] ["attention.q_lora_rank"];
    KV_LORA_RANK = ["kv_lora_rank"] ["attention.kv_lora_rank"];
    QK_NOPE_HEAD_DIM = ["qk_nope_head_dim"] [];
    QK_ROPE_HEAD_DIM = ["qk_rope_head_dim"] ["rope.dimension_count"];
    V_HEAD_DIM = ["v_head_dim"] ["attention.value_length_mla", "attention.value_length"];
    QK_HEAD_DIM = [] ["attention.key_length_mla", "attention.key_length"];

    QUANT_METHOD = ["quant_method"] [];
    QUANT_FORMAT = ["fmt"] [];
    ACTIVATION_SCHEME = ["activation_scheme"] [];
}

/// Values that change the mathematics in ways that no family here knows: refused unless absent, zero or false.
pub(super) const REFUSED: &[Key] = &[
    Key { hf: &["attn_logit_softcapping"], gguf: &["attn_logit_softcapping"] },
    Key { hf: &["final_logit_softcapping"], gguf: &["final_logit_softcapping"] },
    Key { hf: &["logit_softcapping"], gguf: &["router_logit_softcapping"] },
    Key { hf: &["index_topk"], gguf: &["attention.indexer.top_k"] },
    Key { hf: &["alibi"], gguf: &["attention.max_alibi_bias"] },
    Key { hf: &["logit_scale"], gguf: &["logit_scale"] },
    Key { hf: &["residual_multiplier"], gguf: &["residual_scale"] },
    Key { hf: &["embedding_multiplier"], gguf: &["embedding_scale"] },
    Key { hf: &["attention_multiplier"], gguf: &["attention.scale"] },
    Key { hf: &["clip_qkv"], gguf: &["attention.clamp_kqv"] },
];
