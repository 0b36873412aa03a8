//! A config and a checkpoint's tensors in, the model's graph out: one template per kind of layer, weights bound to tensors.

use qwen_formats::DType;
use qwen_ir::{
    Activation, Attention, BinaryFunction, Body, BodyBuilder, Dim, Epilogue, GemmType, Graph, GrowthPattern, Linear,
    MlaAttention, Op, Rope, Route, StateDecl, StateId, StateLayout, Symbol, Template, TemplateId, TensorType, ValueId,
    WeightId, inputs,
};

use super::config::{FeedForward, LayerKind, MlaConfig, ModelConfig, MoeConfig};
use super::error::ModelError;
use super::tensors::TensorIndex;
use super::weights::{LinearWeights, Weights};

/// Tokens of a cache block, unless the engine changes the state's growth.
pub const CACHE_BLOCK_TOKENS: u32 = 16;

/// Builds the graph of a model.
///
/// Every tensor of the checkpoint is used, apart from those known to be of no use (layers for multi-token prediction, a stored
/// copy of a tied head, stored rotary tables).
///
/// # Errors
/// If tensors are missing, left over, or of a wrong shape or type.
pub fn build_graph(config: &ModelConfig, tensors: &TensorIndex) -> Result<Graph, ModelError> {
    config.validate()?;
    let mut graph = Graph::new(config.family.name);
    let mut weights = Weights::new(config, tensors);
    let model = ModelWeights::declare(config, &mut weights, &mut graph)?;
    weights.finish()?;
    let state = graph.add_state(cache(config));
    let body = build_body(config, &model, state, &mut graph)?;
    graph.body = body;
    Ok(graph)
}

fn cache(config: &ModelConfig) -> StateDecl {
    let layout = match config.mla {
        Some(mla) => StateLayout::Joined { latent_dim: mla.kv_lora_rank, rope_dim: mla.qk_rope_head_dim },
        None => StateLayout::Split {
            num_key_value_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            value_dim: config.head_dim,
        },
    };
    StateDecl {
        name: "kv".to_owned(),
        dtype: DType::F32,
        layout,
        growth: GrowthPattern::PerBlock { tokens: CACHE_BLOCK_TOKENS },
        first_layer: 0,
        layers: config.num_hidden_layers,
    }
}

/// Declarations of a model.
struct ModelWeights {
    token_embd: WeightId,
    output_norm: WeightId,
    lm_head: LinearWeights,
    attn_norm: WeightId,
    ffn_norm: WeightId,
    attention: AttentionWeights,
    dense: Option<GatedWeights>,
    moe: Option<MoeWeights>,
}

enum AttentionWeights {
    Grouped {
        q: LinearWeights,
        k: LinearWeights,
        v: LinearWeights,
        norms: Option<[WeightId; 2]>,
        output: LinearWeights,
    },
    Latent {
        query: QueryWeights,
        kv_a: LinearWeights,
        kv_a_norm: WeightId,
        kv_b: WeightId,
        output: LinearWeights,
    },
}

enum QueryWeights {
    Direct(LinearWeights),
    LowRank { a: LinearWeights, norm: WeightId, b: LinearWeights },
}

/// down(silu(gate x) * up x).
struct GatedWeights {
    gate: LinearWeights,
    up: LinearWeights,
    down: LinearWeights,
}

struct MoeWeights {
    router: LinearWeights,
    correction_bias: Option<WeightId>,
    experts: [LinearWeights; 3],
    shared: Option<GatedWeights>,
    shared_gate: Option<LinearWeights>,
}

impl ModelWeights {
    fn declare(config: &ModelConfig, weights: &mut Weights<'_>, graph: &mut Graph) -> Result<Self, ModelError> {
        let (vocabulary, hidden) = (u64::from(config.vocab_size), u64::from(config.hidden_size));
        let token_embd = weights.table(graph, "token_embd", [vocabulary, hidden])?;
        let all: Vec<u32> = (0..config.num_hidden_layers).collect();
        let attn_norm = weights.vector(graph, "attn_norm", hidden, Some(&all))?;
        let attention = match config.mla {
            None => Self::grouped(config, weights, graph, &all)?,
            Some(mla) => Self::latent(config, mla, weights, graph, &all)?,
        };
        let ffn_norm = weights.vector(graph, "ffn_norm", hidden, Some(&all))?;
        let of_kind = |wanted| -> Vec<u32> {
            let layers = (0_u32..).zip(&config.layers);
            layers.filter(|(_, layer)| layer.feed_forward == wanted).map(|(index, _)| index).collect()
        };
        let (dense_layers, moe_layers) = (of_kind(FeedForward::Dense), of_kind(FeedForward::Moe));
        let dense = match dense_layers.as_slice() {
            [] => None,
            layers => {
                let sizes = (hidden, u64::from(config.intermediate_size));
                Some(gated(weights, graph, ["ffn_gate", "ffn_up", "ffn_down"], sizes, config.mlp_bias, layers)?)
            }
        };
        let moe = match (moe_layers.as_slice(), config.moe) {
            ([], _) | (_, None) => None,
            (layers, Some(moe)) => Some(MoeWeights::declare(moe, hidden, weights, graph, layers)?),
        };
        let output_norm = weights.vector(graph, "output_norm", hidden, None)?;
        let lm_head = if config.tie_word_embeddings {
            LinearWeights { weight: token_embd, scale: None, bias: None }
        } else {
            weights.linear(graph, "output", (vocabulary, hidden), false, None)?
        };
        Ok(Self { token_embd, output_norm, lm_head, attn_norm, ffn_norm, attention, dense, moe })
    }

    fn grouped(
        config: &ModelConfig,
        weights: &mut Weights<'_>,
        graph: &mut Graph,
        layers: &[u32],
    ) -> Result<AttentionWeights, ModelError> {
        let [hidden, heads, key_value_heads, head_dim] =
            [config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim]
                .map(u64::from);
        let (wide, narrow) = (heads * head_dim, key_value_heads * head_dim);
        let bias = config.attention_bias;
        let some = Some(layers);
        let norms = if config.qk_norm {
            let q = weights.vector(graph, "attn_q_norm", head_dim, some)?;
            Some([q, weights.vector(graph, "attn_k_norm", head_dim, some)?])
        } else {
            None
        };
        Ok(AttentionWeights::Grouped {
            q: weights.linear(graph, "attn_q", (wide, hidden), bias.query, some)?,
            k: weights.linear(graph, "attn_k", (narrow, hidden), bias.key, some)?,
            v: weights.linear(graph, "attn_v", (narrow, hidden), bias.value, some)?,
            norms,
            output: weights.linear(graph, "attn_output", (hidden, wide), bias.output, some)?,
        })
    }

    fn latent(
        config: &ModelConfig,
        mla: MlaConfig,
        weights: &mut Weights<'_>,
        graph: &mut Graph,
        layers: &[u32],
    ) -> Result<AttentionWeights, ModelError> {
        let [hidden, heads, latent, rank] =
            [config.hidden_size, config.num_attention_heads, mla.kv_lora_rank, mla.q_lora_rank].map(u64::from);
        let [nope, rope, value] = [mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim].map(u64::from);
        let (bias, some) = (config.attention_bias, Some(layers));
        let query_width = heads * (nope + rope);
        let query = if rank == 0 {
            QueryWeights::Direct(weights.linear(graph, "attn_q", (query_width, hidden), false, some)?)
        } else {
            QueryWeights::LowRank {
                a: weights.linear(graph, "attn_q_a", (rank, hidden), bias.query, some)?,
                norm: weights.vector(graph, "attn_q_a_norm", rank, some)?,
                b: weights.linear(graph, "attn_q_b", (query_width, rank), false, some)?,
            }
        };
        Ok(AttentionWeights::Latent {
            query,
            kv_a: weights.linear(graph, "attn_kv_a", (latent + rope, hidden), bias.key, some)?,
            kv_a_norm: weights.vector(graph, "attn_kv_a_norm", latent, some)?,
            kv_b: weights.kv_b(graph, layers)?,
            output: weights.linear(graph, "attn_output", (hidden, heads * value), bias.output, some)?,
        })
    }
}

fn gated(
    weights: &mut Weights<'_>,
    graph: &mut Graph,
    [gate, up, down]: [&str; 3],
    (hidden, width): (u64, u64),
    bias: bool,
    layers: &[u32],
) -> Result<GatedWeights, ModelError> {
    Ok(GatedWeights {
        gate: weights.linear(graph, gate, (width, hidden), bias, Some(layers))?,
        up: weights.linear(graph, up, (width, hidden), bias, Some(layers))?,
        down: weights.linear(graph, down, (hidden, width), bias, Some(layers))?,
    })
}

impl MoeWeights {
    fn declare(
        moe: MoeConfig,
        hidden: u64,
        weights: &mut Weights<'_>,
        graph: &mut Graph,
        layers: &[u32],
    ) -> Result<Self, ModelError> {
        let experts = u64::from(moe.num_experts);
        let router = weights.linear(graph, "ffn_gate_inp", (experts, hidden), false, Some(layers))?;
        let correction_bias =
            if moe.correction_bias { Some(weights.vector(graph, "exp_probs_b", experts, Some(layers))?) } else { None };
        let sizes = (experts, hidden, u64::from(moe.moe_intermediate_size));
        let experts = weights.experts(graph, sizes, layers)?;
        let mut shared = None;
        let mut shared_gate = None;
        if moe.shared_intermediate_size > 0 {
            let roles = ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"];
            let sizes = (hidden, u64::from(moe.shared_intermediate_size));
            shared = Some(gated(weights, graph, roles, sizes, false, layers)?);
            if moe.shared_gate {
                shared_gate = Some(weights.linear(graph, "ffn_gate_inp_shexp", (1, hidden), false, Some(layers))?);
            }
        }
        Ok(Self { router, correction_bias, experts, shared, shared_gate })
    }
}

/// Values of the main body that layers read.
struct Shared {
    positions: ValueId,
    slots: ValueId,
    paging: [ValueId; 3],
    inv_freq: ValueId,
}

fn build_body(
    config: &ModelConfig,
    model: &ModelWeights,
    state: StateId,
    graph: &mut Graph,
) -> Result<Body, ModelError> {
    let mut main = BodyBuilder::new(graph, &[]);
    main.origin("inputs");
    let ids = main.input(inputs::TOKEN_IDS)?;
    let shared = Shared {
        positions: main.input(inputs::POSITIONS)?,
        slots: main.input(inputs::SLOTS)?,
        paging: [main.input(inputs::QUERY_START)?, main.input(inputs::CONTEXT_LEN)?, main.input(inputs::BLOCK_TABLE)?],
        inv_freq: main.origin("rope").constant(config.rope.inverse_frequencies())?,
    };
    let table = main.origin("token_embd").weight(model.token_embd)?;
    let mut x = main.embed(ids, table)?;

    let mut templates: Vec<(LayerKind, TemplateId)> = Vec::new();
    let mut first = 0;
    for run in config.layers.chunk_by(|a, b| a == b) {
        let Some(kind) = run.first().copied() else { continue };
        let known = templates.iter().find(|(known, _)| *known == kind).map(|(_, id)| *id);
        let template = match known {
            Some(id) => id,
            None => {
                let body = LayerBuilder::build(config, model, state, &shared, kind, main.graph)?;
                let id = main.graph.add_template(Template { name: kind.name(), body });
                templates.push((kind, id));
                id
            }
        };
        x = main.origin("layers").layers(template, first, run.len() as u32, x)?;
        first += run.len() as u32;
    }

    let rows = main.origin("inputs").input(inputs::LOGIT_ROWS)?;
    x = main.origin("logit_rows").gather_rows(x, rows)?;
    let norm = main.origin("output_norm").weight(model.output_norm)?;
    x = main.norm(x, norm, config.rms_norm_eps, config.hidden_size)?;
    main.origin("output");
    let head = if config.tie_word_embeddings {
        Linear { weight: table, scale: None, bias: None }
    } else {
        operands(&mut main, &model.lm_head)?
    };
    let logits = main.gemm(GemmType::LmHead, x, &[head])?;
    Ok(main.finish(vec![logits]))
}

/// Weight nodes of a linear layer.
fn operands(builder: &mut BodyBuilder<'_>, linear: &LinearWeights) -> Result<Linear, ModelError> {
    let weight = builder.weight(linear.weight)?;
    let scale = linear.scale.map(|id| builder.weight(id)).transpose()?;
    let bias = linear.bias.map(|id| builder.weight(id)).transpose()?;
    Ok(Linear { weight, scale, bias })
}

/// Builds the body of a template.
struct LayerBuilder<'a, 'g> {
    config: &'a ModelConfig,
    model: &'a ModelWeights,
    state: StateId,
    shared: &'a Shared,
    builder: BodyBuilder<'g>,
}

impl LayerBuilder<'_, '_> {
    fn build(
        config: &ModelConfig,
        model: &ModelWeights,
        state: StateId,
        shared: &Shared,
        kind: LayerKind,
        graph: &mut Graph,
    ) -> Result<Body, ModelError> {
        let hidden = Dim::Const(u64::from(config.hidden_size));
        let ty = TensorType::new(DType::F32, [Dim::Symbol(Symbol::Tokens), hidden]);
        let builder = BodyBuilder::new(graph, &[ty]);
        let x = builder.param(0);
        let mut layer = LayerBuilder { config, model, state, shared, builder };

        let normed = layer.norm("attn_norm", model.attn_norm, x)?;
        let attention = layer.attention(kind, normed)?;
        let x = layer.add("attn_residual", x, attention)?;
        let normed = layer.norm("ffn_norm", model.ffn_norm, x)?;
        let output = match (kind.feed_forward, &model.dense, &model.moe, config.moe) {
            (FeedForward::Dense, Some(dense), ..) => {
                layer.gated(["ffn_gate", "ffn_up", "ffn_act", "ffn_down"], dense, normed)?
            }
            (FeedForward::Moe, _, Some(weights), Some(moe)) => layer.experts(moe, weights, normed)?,
            _ => return Err(ModelError::invalid("layer_types", "layers with weights", kind.name())),
        };
        let x = layer.add("ffn_residual", x, output)?;

        Ok(layer.builder.finish(vec![x]))
    }

    fn norm(&mut self, origin: &str, weight: WeightId, x: ValueId) -> Result<ValueId, ModelError> {
        let weight = self.builder.origin(origin).weight(weight)?;
        Ok(self.builder.norm(x, weight, self.config.rms_norm_eps, self.config.hidden_size)?)
    }

    fn add(&mut self, origin: &str, x: ValueId, y: ValueId) -> Result<ValueId, ModelError> {
        Ok(self.builder.origin(origin).binary(BinaryFunction::Add, x, y)?)
    }

    fn linear(&mut self, origin: &str, weights: &LinearWeights, x: ValueId) -> Result<ValueId, ModelError> {
        self.builder.origin(origin);
        let linear = operands(&mut self.builder, weights)?;
        Ok(self.builder.gemm(GemmType::Plain, x, &[linear])?)
    }

    fn attention(&mut self, kind: LayerKind, x: ValueId) -> Result<ValueId, ModelError> {
        match &self.model.attention {
            AttentionWeights::Grouped { q, k, v, norms, output } => {
                let (q, k, v) =
                    (self.linear("attn_q", q, x)?, self.linear("attn_k", k, x)?, self.linear("attn_v", v, x)?);
                let (q, k) = match norms {
                    Some([q_norm, k_norm]) => {
                        (self.head_norm("attn_q_norm", *q_norm, q)?, self.head_norm("attn_k_norm", *k_norm, k)?)
                    }
                    None => (q, k),
                };
                let y = self.grouped_attention(kind, q, k, v)?;
                self.linear("attn_output", output, y)
            }
            AttentionWeights::Latent { query, kv_a, kv_a_norm, kv_b, output } => {
                let Some(mla) = self.config.mla else {
                    return Err(ModelError::invalid("kv_lora_rank", "a latent", "none"));
                };
                let q = self.latent_query(mla, query, x)?;
                let joined = self.linear("attn_kv_a", kv_a, x)?;
                let y = self.latent_attention(mla, q, joined, *kv_a_norm, *kv_b)?;
                self.linear("attn_output", output, y)
            }
        }
    }

    fn head_norm(&mut self, origin: &str, weight: WeightId, x: ValueId) -> Result<ValueId, ModelError> {
        let weight = self.builder.origin(origin).weight(weight)?;
        Ok(self.builder.norm(x, weight, self.config.rms_norm_eps, self.config.head_dim)?)
    }

    fn rope(
        &mut self,
        origin: &str,
        x: ValueId,
        num_heads: u32,
        head_dim: u32,
        rotary_offset: u32,
    ) -> Result<ValueId, ModelError> {
        let rope = Rope {
            num_heads,
            head_dim,
            rotary_offset,
            rotary_dim: self.config.rope.rotary_dim,
            style: self.config.rope.style,
            attention_factor: self.config.rope.attention_factor(),
        };
        Ok(self.builder.origin(origin).rope(x, self.shared.positions, self.shared.inv_freq, rope)?)
    }

    fn grouped_attention(
        &mut self,
        kind: LayerKind,
        q: ValueId,
        k: ValueId,
        v: ValueId,
    ) -> Result<ValueId, ModelError> {
        let (heads, key_value_heads, head_dim) =
            (self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim);
        let q = self.rope("attn_q_rope", q, heads, head_dim, 0)?;
        let k = self.rope("attn_k_rope", k, key_value_heads, head_dim, 0)?;
        self.builder.origin("kv_append").kv_append(self.state, k, v, self.shared.slots)?;
        let attention = Attention {
            num_heads: heads,
            num_key_value_heads: key_value_heads,
            head_dim,
            value_dim: head_dim,
            scale: self.config.softmax_scale(),
            window: kind.window,
        };
        Ok(self.builder.origin("attn").attention(self.state, attention, q, self.shared.paging)?)
    }

    fn latent_query(&mut self, mla: MlaConfig, query: &QueryWeights, x: ValueId) -> Result<ValueId, ModelError> {
        let q = match query {
            QueryWeights::Direct(q) => self.linear("attn_q", q, x)?,
            QueryWeights::LowRank { a, norm, b } => {
                let latent = self.linear("attn_q_a", a, x)?;
                let norm = self.builder.origin("attn_q_a_norm").weight(*norm)?;
                let latent = self.builder.norm(latent, norm, mla.norm_eps, mla.q_lora_rank)?;
                self.linear("attn_q_b", b, latent)?
            }
        };
        let head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim;
        self.rope("attn_q_rope", q, self.config.num_attention_heads, head_dim, mla.qk_nope_head_dim)
    }

    fn latent_attention(
        &mut self,
        mla: MlaConfig,
        q: ValueId,
        joined: ValueId,
        kv_a_norm: WeightId,
        kv_b: WeightId,
    ) -> Result<ValueId, ModelError> {
        let latent = self.builder.origin("attn_kv_a").columns(joined, 0, mla.kv_lora_rank)?;
        let k_rope = self.builder.columns(joined, mla.kv_lora_rank, mla.qk_rope_head_dim)?;
        let norm = self.builder.origin("attn_kv_a_norm").weight(kv_a_norm)?;
        let latent = self.builder.norm(latent, norm, mla.norm_eps, mla.kv_lora_rank)?;
        let k_rope = self.rope("attn_k_rope", k_rope, 1, mla.qk_rope_head_dim, 0)?;
        self.builder.origin("kv_append").kv_append(self.state, latent, k_rope, self.shared.slots)?;
        let attention = MlaAttention {
            num_heads: self.config.num_attention_heads,
            nope_dim: mla.qk_nope_head_dim,
            rope_dim: mla.qk_rope_head_dim,
            value_dim: mla.v_head_dim,
            latent_dim: mla.kv_lora_rank,
            scale: self.config.softmax_scale(),
            form: None,
        };
        let kv_b = self.builder.origin("attn_kv_b").weight(kv_b)?;
        Ok(self.builder.origin("attn").mla_attention(self.state, attention, q, kv_b, self.shared.paging)?)
    }

    fn gated(&mut self, origins: [&str; 4], weights: &GatedWeights, x: ValueId) -> Result<ValueId, ModelError> {
        let [gate_origin, up_origin, act_origin, down_origin] = origins;
        let gate = self.linear(gate_origin, &weights.gate, x)?;
        let up = self.linear(up_origin, &weights.up, x)?;
        let act = self.builder.origin(act_origin).glu(Activation::Silu, gate, up)?;
        self.linear(down_origin, &weights.down, act)
    }

    fn experts(&mut self, moe: MoeConfig, weights: &MoeWeights, x: ValueId) -> Result<ValueId, ModelError> {
        let logits = self.linear("ffn_gate_inp", &weights.router, x)?;
        let bias = weights.correction_bias.map(|id| self.builder.origin("exp_probs_b").weight(id)).transpose()?;
        let route = Route {
            score: moe.score,
            num_experts: moe.num_experts,
            top_k: moe.top_k,
            num_groups: moe.num_groups,
            topk_group: moe.topk_group,
            group_score: moe.group_score,
            renormalise: moe.renormalise,
            scale: moe.scale,
        };
        let (ids, factors) = self.builder.origin("route").route(route, logits, bias)?;
        let [offsets, rows, slots] = self.builder.origin("dispatch").dispatch(moe.num_experts, ids)?;
        let y = self.routed(moe, &weights.experts, x, offsets, rows)?;
        let shared = weights.shared.as_ref().map(|shared| self.shared_expert(shared, weights.shared_gate, x));
        let shared = shared.transpose()?;
        Ok(self.builder.origin("combine").combine(y, slots, factors, shared)?)
    }

    /// Results of the chosen experts, sorted by expert.
    fn routed(
        &mut self,
        moe: MoeConfig,
        [gate, up, down]: &[LinearWeights; 3],
        x: ValueId,
        offsets: ValueId,
        rows: ValueId,
    ) -> Result<ValueId, ModelError> {
        let sizes = (moe.num_experts, moe.top_k);
        self.builder.origin("ffn_gate_up_exps");
        let mut operands_in = vec![x, offsets, rows];
        let mut scales = Vec::with_capacity(2);
        for weights in [gate, up] {
            let linear = operands(&mut self.builder, weights)?;
            operands_in.push(linear.weight);
            operands_in.extend(linear.scale);
            scales.push(linear.scale.is_some());
        }
        // Both at once: rows are gathered once, and sorted rows have no element-wise op of their own.
        let op = Op::GroupedGemm {
            num_experts: sizes.0,
            top_k: sizes.1,
            gather: true,
            scales,
            epilogue: Epilogue::Glu(Activation::Silu),
        };
        let outputs = self.builder.node(op, operands_in)?;
        let Some(act) = outputs.first().copied() else {
            return Err(ModelError::invalid("num_experts", "experts with a result", "none"));
        };
        self.builder.origin("ffn_down_exps");
        let down = operands(&mut self.builder, down)?;
        Ok(self.builder.grouped_gemm(sizes, act, offsets, None, &[down])?)
    }

    fn shared_expert(
        &mut self,
        weights: &GatedWeights,
        gate: Option<LinearWeights>,
        x: ValueId,
    ) -> Result<ValueId, ModelError> {
        let origins = ["ffn_gate_shexp", "ffn_up_shexp", "ffn_act_shexp", "ffn_down_shexp"];
        let y = self.gated(origins, weights, x)?;
        let Some(gate) = gate else { return Ok(y) };
        let logit = self.linear("ffn_gate_inp_shexp", &gate, x)?;
        let factor = self.builder.unary(Activation::Sigmoid, logit)?;
        Ok(self.builder.binary(BinaryFunction::Mul, y, factor)?)
    }
}
