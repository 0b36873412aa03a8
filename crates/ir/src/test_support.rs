//! Small models for tests: one with grouped-query attention, one with experts, one with latent attention and block scales.

use crate::*;

/// Sizes of the small models.
pub const HIDDEN: u32 = 64;
const HEADS: u32 = 4;
const KV_HEADS: u32 = 2;
const HEAD_DIM: u32 = 16;
const INTER: u32 = 96;
const VOCAB: u64 = 128;
const EXPERTS: u32 = 8;
const TOP_K: u32 = 2;

/// A weight of `layers` layers from `first`; outside of layers if `layers` is none.
pub fn weight(graph: &mut Graph, name: &str, shape: &[u64], dtypes: &[DType], first: Option<u32>) -> WeightId {
    let sources = dtypes.iter().enumerate().map(|(i, dtype)| WeightSource {
        dtype: *dtype,
        tensors: vec![format!("blk.{i}.{name}")],
        transform: Transform::AsStored,
    });
    let sources = sources.collect();
    graph.add_weight(WeightDecl {
        name: name.to_owned(),
        shape: shape.to_vec(),
        sources,
        first_layer: first,
        slice: None,
    })
}

fn kv_state(graph: &mut Graph, layout: StateLayout, layers: u32) -> StateId {
    let growth = GrowthPattern::PerBlock { tokens: 16 };
    graph.add_state(StateDecl { name: "kv".into(), dtype: DType::F32, layout, growth, first_layer: 0, layers })
}

struct Common {
    positions: ValueId,
    slots: ValueId,
    paging: [ValueId; 3],
    table: ValueId,
}

fn hidden_type() -> TensorType {
    TensorType::new(DType::F32, [Dim::Symbol(Symbol::Tokens), Dim::Const(u64::from(HIDDEN))])
}

/// Bounds that the small models are compiled for.
#[must_use]
pub fn bounds() -> SymbolBounds {
    SymbolBounds::default()
        .with(Symbol::Tokens, 1, 32)
        .with(Symbol::Sequences, 1, 4)
        .with(Symbol::Rows, 1, 4)
        .with(Symbol::Blocks, 1, 8)
        .with(Symbol::CacheBlocks, 1, 32)
}

/// Builds the main body around `layers` runs of a template that `layer` makes.
fn model(
    mut graph: Graph,
    layers: u32,
    layer: impl FnOnce(&mut Graph, &Common) -> Result<Body, IrError>,
) -> Result<Graph, IrError> {
    let embedding = weight(&mut graph, "token_embd.weight", &[VOCAB, u64::from(HIDDEN)], &[DType::Q8_0], None);
    let norm = weight(&mut graph, "output_norm.weight", &[u64::from(HIDDEN)], &[DType::F32], None);
    let mut main = BodyBuilder::new(&mut graph, &[]);
    main.origin("inputs");
    let ids = main.input(inputs::TOKEN_IDS)?;
    let table = main.weight(embedding)?;
    let common = Common {
        positions: main.input(inputs::POSITIONS)?,
        slots: main.input(inputs::SLOTS)?,
        paging: [main.input(inputs::QUERY_START)?, main.input(inputs::CONTEXT_LEN)?, main.input(inputs::BLOCK_TABLE)?],
        table: main.constant((0..8).map(|i| 10000_f32.powf(-(i as f32) / 8.0)).collect())?,
    };
    let x = main.origin("token_embd").embed(ids, table)?;
    let body = layer(main.graph, &common)?;
    let template = main.graph.add_template(Template { name: "layer".into(), body });
    let x = main.origin("layers").layers(template, 0, layers, x)?;
    let rows = main.origin("output").input(inputs::LOGIT_ROWS)?;
    let x = main.gather_rows(x, rows)?;
    let w = main.weight(norm)?;
    let x = main.origin("output_norm").norm(x, w, 1e-5, HIDDEN)?;
    // A tied head: the table once more.
    let w = main.origin("output").weight(embedding)?;
    let logits = main.gemm(GemmType::LmHead, x, &[Linear { weight: w, scale: None, bias: None }])?;
    let body = main.finish(vec![logits]);
    graph.body = body;
    Ok(graph)
}

fn linear(
    body: &mut BodyBuilder<'_>,
    name: &str,
    shape: &[u64],
    dtypes: &[DType],
    bias: bool,
) -> Result<Linear, IrError> {
    let rows = shape[shape.len() - 2];
    let id = weight(body.graph, &format!("{name}.weight"), shape, dtypes, Some(0));
    let weight_value = body.origin(name).weight(id)?;
    let bias = if bias {
        let id = weight(body.graph, &format!("{name}.bias"), &[rows], &vec![DType::F32; dtypes.len()], Some(0));
        Some(body.weight(id)?)
    } else {
        None
    };
    Ok(Linear { weight: weight_value, scale: None, bias })
}

fn project(
    body: &mut BodyBuilder<'_>,
    name: &str,
    x: ValueId,
    shape: [u64; 2],
    dtypes: &[DType],
    bias: bool,
) -> Result<ValueId, IrError> {
    let linear = linear(body, name, &shape, dtypes, bias)?;
    body.gemm(GemmType::Plain, x, &[linear])
}

fn norm(body: &mut BodyBuilder<'_>, name: &str, x: ValueId, layers: usize) -> Result<ValueId, IrError> {
    let id = weight(body.graph, &format!("{name}.weight"), &[u64::from(HIDDEN)], &vec![DType::F32; layers], Some(0));
    let w = body.origin(name).weight(id)?;
    body.norm(x, w, 1e-5, HIDDEN)
}

fn attention(
    body: &mut BodyBuilder<'_>,
    common: &Common,
    state: StateId,
    h: ValueId,
    dtypes: &[DType],
) -> Result<ValueId, IrError> {
    let (h64, q, kv) = (u64::from(HIDDEN), u64::from(HEADS * HEAD_DIM), u64::from(KV_HEADS * HEAD_DIM));
    let x = norm(body, "attn_norm", h, dtypes.len())?;
    let query = project(body, "attn_q", x, [q, h64], dtypes, true)?;
    let key = project(body, "attn_k", x, [kv, h64], dtypes, false)?;
    let value = project(body, "attn_v", x, [kv, h64], dtypes, true)?;
    let rope = |num_heads| Rope {
        num_heads,
        head_dim: HEAD_DIM,
        rotary_offset: 0,
        rotary_dim: HEAD_DIM,
        style: RopeStyle::Half,
        attention_factor: 1.0,
    };
    let query = body.origin("rope").rope(query, common.positions, common.table, rope(HEADS))?;
    let key = body.rope(key, common.positions, common.table, rope(KV_HEADS))?;
    body.origin("kv_append").kv_append(state, key, value, common.slots)?;
    let attention = Attention {
        num_heads: HEADS,
        num_key_value_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        value_dim: HEAD_DIM,
        scale: 0.25,
        window: 0,
    };
    let y = body.origin("attention").attention(state, attention, query, common.paging)?;
    let y = project(body, "attn_output", y, [h64, q], dtypes, false)?;
    body.origin("attn_residual").binary(BinaryFunction::Add, h, y)
}

fn mlp(body: &mut BodyBuilder<'_>, h: ValueId, dtypes: &[DType]) -> Result<ValueId, IrError> {
    let (h64, i64) = (u64::from(HIDDEN), u64::from(INTER));
    let x = norm(body, "ffn_norm", h, dtypes.len())?;
    let gate = project(body, "ffn_gate", x, [i64, h64], dtypes, false)?;
    let up = project(body, "ffn_up", x, [i64, h64], dtypes, false)?;
    let y = body.origin("ffn_act").glu(Activation::Silu, gate, up)?;
    let y = project(body, "ffn_down", y, [h64, i64], dtypes, false)?;
    body.origin("ffn_residual").binary(BinaryFunction::Add, y, h)
}

/// Two layers of grouped-query attention with biases on q and v, and a gated feed-forward; the second layer's weights are
/// stored in another type.
///
/// # Errors
/// Never.
pub fn dense() -> Result<Graph, IrError> {
    model(Graph::new("dense"), 2, |graph, common| {
        let layout = StateLayout::Split { num_key_value_heads: KV_HEADS, head_dim: HEAD_DIM, value_dim: HEAD_DIM };
        let state = kv_state(graph, layout, 2);
        let dtypes = [DType::Q4_0, DType::BF16];
        let mut body = BodyBuilder::new(graph, &[hidden_type()]);
        let h = body.param(0);
        let h = attention(&mut body, common, state, h, &dtypes)?;
        let h = mlp(&mut body, h, &dtypes)?;
        Ok(body.finish(vec![h]))
    })
}

/// One layer with experts and a shared expert.
///
/// # Errors
/// Never.
pub fn experts() -> Result<Graph, IrError> {
    model(Graph::new("experts"), 1, |graph, common| {
        let layout = StateLayout::Split { num_key_value_heads: KV_HEADS, head_dim: HEAD_DIM, value_dim: HEAD_DIM };
        let state = kv_state(graph, layout, 1);
        let dtypes = [DType::Q4_0];
        let mut body = BodyBuilder::new(graph, &[hidden_type()]);
        let h = body.param(0);
        let h = attention(&mut body, common, state, h, &dtypes)?;
        let x = norm(&mut body, "ffn_norm", h, 1)?;
        let (h64, i64, e) = (u64::from(HIDDEN), u64::from(INTER), u64::from(EXPERTS));
        let logits = project(&mut body, "ffn_gate_inp", x, [e, h64], &[DType::F32], false)?;
        let route = Route {
            score: RouterScore::Softmax,
            num_experts: EXPERTS,
            top_k: TOP_K,
            num_groups: 1,
            topk_group: 1,
            group_score: GroupScore::Max,
            renormalise: true,
            scale: 1.0,
        };
        let (ids, weights) = body.origin("route").route(route, logits, None)?;
        let [offsets, rows, slots] = body.origin("dispatch").dispatch(EXPERTS, ids)?;
        let gate = linear(&mut body, "ffn_gate_exps", &[e, i64, h64], &dtypes, false)?;
        let up = linear(&mut body, "ffn_up_exps", &[e, i64, h64], &dtypes, false)?;
        let gate = body.origin("ffn_gate_exps").grouped_gemm((EXPERTS, TOP_K), x, offsets, Some(rows), &[gate])?;
        let up = body.origin("ffn_up_exps").grouped_gemm((EXPERTS, TOP_K), x, offsets, Some(rows), &[up])?;
        let y = body.origin("ffn_act_exps").glu(Activation::Silu, gate, up)?;
        let down = linear(&mut body, "ffn_down_exps", &[e, h64, i64], &dtypes, false)?;
        let y = body.grouped_gemm((EXPERTS, TOP_K), y, offsets, None, &[down])?;
        let y = body.origin("combine").combine(y, slots, weights, None)?;
        let gate = project(&mut body, "ffn_gate_shexp", x, [i64, h64], &dtypes, false)?;
        let up = project(&mut body, "ffn_up_shexp", x, [i64, h64], &dtypes, false)?;
        let shared = body.origin("ffn_act_shexp").glu(Activation::Silu, gate, up)?;
        let shared = project(&mut body, "ffn_down_shexp", shared, [h64, i64], &dtypes, false)?;
        let scale = project(&mut body, "ffn_gate_inp_shexp", x, [1, h64], &[DType::F32], false)?;
        let scale = body.unary(Activation::Sigmoid, scale)?;
        let shared = body.origin("shared_gate").binary(BinaryFunction::Mul, shared, scale)?;
        let y = body.origin("shared_sum").binary(BinaryFunction::Add, y, shared)?;
        let h = body.origin("ffn_residual").binary(BinaryFunction::Add, h, y)?;
        Ok(body.finish(vec![h]))
    })
}

/// One layer of latent attention with block-scaled weights.
///
/// # Errors
/// Never.
pub fn latent() -> Result<Graph, IrError> {
    model(Graph::new("latent"), 1, |graph, common| {
        let (latent_dim, rope_dim, nope_dim, value_dim) = (32, 16, 8, 12);
        let state = kv_state(graph, StateLayout::Joined { latent_dim, rope_dim }, 1);
        let h64 = u64::from(HIDDEN);
        let mut body = BodyBuilder::new(graph, &[hidden_type()]);
        let h = body.param(0);
        let x = norm(&mut body, "attn_norm", h, 1)?;
        let width = u64::from(HEADS * (nope_dim + rope_dim));
        let mut scaled = linear(&mut body, "attn_q", &[width, h64], &[DType::F8E4M3], false)?;
        let scale = weight(body.graph, "attn_q.scale", &[1, 1], &[DType::F32], Some(0));
        scaled.scale = Some(body.weight(scale)?);
        let q = body.gemm(GemmType::Plain, x, &[scaled])?;
        let kv_width = u64::from(latent_dim + rope_dim);
        let kv = project(&mut body, "attn_kv_a_mqa", x, [kv_width, h64], &[DType::BF16], false)?;
        let latent = body.origin("kv_latent").columns(kv, 0, latent_dim)?;
        let rotary = body.origin("kv_rotary").columns(kv, latent_dim, rope_dim)?;
        let id = weight(body.graph, "attn_kv_a_norm.weight", &[u64::from(latent_dim)], &[DType::F32], Some(0));
        let w = body.origin("attn_kv_a_norm").weight(id)?;
        let latent = body.norm(latent, w, 1e-6, latent_dim)?;
        let rope = |num_heads, head_dim, rotary_offset| Rope {
            num_heads,
            head_dim,
            rotary_offset,
            rotary_dim: rope_dim,
            style: RopeStyle::Interleaved,
            attention_factor: 1.0,
        };
        body.origin("rope");
        let rotary = body.rope(rotary, common.positions, common.table, rope(1, rope_dim, 0))?;
        let q = body.rope(q, common.positions, common.table, rope(HEADS, nope_dim + rope_dim, nope_dim))?;
        body.origin("kv_append").kv_append(state, latent, rotary, common.slots)?;
        let kv_b = [u64::from(HEADS * (nope_dim + value_dim)), u64::from(latent_dim)];
        let kv_b = weight(body.graph, "attn_kv_b.weight", &kv_b, &[DType::BF16], Some(0));
        let kv_b = body.origin("attention").weight(kv_b)?;
        let attention =
            MlaAttention { num_heads: HEADS, nope_dim, rope_dim, value_dim, latent_dim, scale: 0.2, form: None };
        let y = body.mla_attention(state, attention, q, kv_b, common.paging)?;
        let y = project(&mut body, "attn_output", y, [h64, u64::from(HEADS * value_dim)], &[DType::BF16], false)?;
        let h = body.origin("attn_residual").binary(BinaryFunction::Add, h, y)?;
        let h = mlp(&mut body, h, &[DType::BF16])?;
        Ok(body.finish(vec![h]))
    })
}

/// All small models.
///
/// # Errors
/// Never.
pub fn all() -> Result<Vec<Graph>, IrError> {
    Ok(vec![dense()?, experts()?, latent()?])
}

/// Reads arbitrary bytes as a text, and judges, compiles and prints what can be read. Must not panic.
pub fn fuzz_text(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(graph) = parse::parse(text) else { return };
    if verify(&graph).is_err() {
        return;
    }
    let printed = text::print(&graph);
    assert_eq!(parse::parse(&printed).map(|again| text::print(&again)), Ok(printed));
    let layers: u64 = graph
        .body
        .nodes
        .iter()
        .map(|id| match graph.node(*id).op {
            Op::Layers { count, .. } => u64::from(count),
            _ => 0,
        })
        .sum();
    if layers > 64 {
        return;
    }
    // A part of it may be refused.
    drop(passes::shard::run(&mut graph.clone(), Some(passes::Shard { rank: 1, ranks: 2 })));
    let options = passes::CompileOptions { verify: true, ..passes::CompileOptions::new(Phase::Mixed, bounds()) };
    // A valid graph may still not compile, but never to a program that breaks the check.
    let compiled = passes::compile(&graph, &options, &passes::PermissiveDevice);
    assert!(!matches!(compiled, Err(IrError::Pass { pass: "check", .. })), "{compiled:?}");
}

/// A random graph: a chain of choices over the values made so far, without layers.
///
/// # Errors
/// Never.
pub fn random(choices: &[u32]) -> Result<Graph, IrError> {
    let mut graph = Graph::new("random");
    let width = 32_u64;
    let table = weight(&mut graph, "token_embd.weight", &[64, width], &[DType::F16], None);
    let square: Vec<WeightId> = ["attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up", "ffn_down"]
        .iter()
        .map(|name| weight(&mut graph, &format!("{name}.weight"), &[width, width], &[DType::Q8_0], None))
        .collect();
    let scale = weight(&mut graph, "norm.weight", &[width], &[DType::F32], None);
    let mut body = BodyBuilder::new(&mut graph, &[]);
    let ids = body.origin("inputs").input(inputs::TOKEN_IDS)?;
    let table_value = body.weight(table)?;
    let mut values = vec![body.origin("embed").embed(ids, table_value)?];
    for (i, choice) in choices.iter().enumerate() {
        let pick = |shift: u32| values[(choice >> shift) as usize % values.len()];
        let (a, b) = (pick(8), pick(16));
        body.origin(format!("step {i}"));
        let value = match choice % 9 {
            0 | 1 => {
                let w = body.weight(square[(choice >> 4) as usize % square.len()])?;
                body.gemm(GemmType::Plain, a, &[Linear { weight: w, scale: None, bias: None }])?
            }
            2 => {
                let w = body.weight(scale)?;
                body.norm(a, w, 1e-6, width as u32)?
            }
            3 => body.glu(Activation::Silu, a, b)?,
            4 => body.binary(BinaryFunction::Add, a, b)?,
            5 => body.binary(BinaryFunction::Mul, a, b)?,
            6 => body.unary(Activation::GeluTanh, a)?,
            7 => {
                let pair = [body.weight(square[3])?, body.weight(square[4])?];
                let pair = pair.map(|weight| Linear { weight, scale: None, bias: None });
                let wide = body.gemm(GemmType::FusedGateUp, a, &pair)?;
                let gate = body.columns(wide, 0, width as u32)?;
                let up = body.columns(wide, width as u32, width as u32)?;
                if choice & 0x1000 == 0 { body.glu(Activation::Silu, gate, up)? } else { up }
            }
            _ => body.node(Op::Softmax, vec![a])?[0],
        };
        values.push(value);
    }
    let rows = body.origin("output").input(inputs::LOGIT_ROWS)?;
    let last = values[values.len() - 1];
    let sum = body.binary(BinaryFunction::Add, last, values[values.len() / 2])?;
    let x = body.gather_rows(sum, rows)?;
    let w = body.weight(table)?;
    let logits = body.gemm(GemmType::LmHead, x, &[Linear { weight: w, scale: None, bias: None }])?;
    let built = body.finish(vec![logits]);
    graph.body = built;
    Ok(graph)
}

/// Whether two graphs compute the same, whatever the order of independent nodes and their origins: results and appended
/// states are compared as expressions.
#[must_use]
pub fn equivalent(a: &Graph, b: &Graph) -> bool {
    expressions(a) == expressions(b)
}

fn expressions(graph: &Graph) -> Vec<u64> {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hashes = vec![0_u64; graph.values.len()];
    let mut effects = Vec::new();
    for body in graph.body_ids().map(|id| graph.body_of(id)) {
        for (i, param) in body.params.iter().enumerate() {
            hashes[param.index()] = i as u64;
        }
        for node in body.nodes.iter().map(|id| graph.node(*id)) {
            let mut operands: Vec<u64> = node.inputs.iter().map(|v| hashes[v.index()]).collect();
            if matches!(node.op, Op::Binary(_)) {
                operands.sort_unstable();
            }
            let mut hasher = DefaultHasher::new();
            format!("{:?}", node.op).hash(&mut hasher);
            operands.hash(&mut hasher);
            for (i, output) in node.outputs.iter().enumerate() {
                i.hash(&mut hasher);
                hashes[output.index()] = hasher.finish();
            }
            if node.outputs.is_empty() {
                effects.push(hasher.finish());
            }
        }
        effects.extend(body.results.iter().map(|v| hashes[v.index()]));
    }
    effects
}
