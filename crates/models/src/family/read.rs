//! `config.json` or GGUF metadata in, a [`ModelConfig`] out.
//!
//! Unknown keys are ignored; known keys with values that change the mathematics beyond what is implemented are refused by name.

use std::path::Path;

use qwen_formats::{Checkpoint, Container, GgufMetadata, blocks};
use qwen_ir::{GroupScore, RouterScore};
use serde_json::{Map, Value};

use super::config::{
    AttentionBias, BlockScale, Dialect, FeedForward, LayerKind, MlaConfig, ModelConfig, MoeConfig, limits,
};
use super::error::{ModelError, quoted};
use super::fields::{Key, Scalar, Source, describe_json};
use super::keys;
use super::read_rope::read_rope;
use super::table::{
    AttentionForm, BiasRule, ExpertLayers, ExpertRule, FAMILIES, Family, Gating, SharedExpert, WindowRule,
};
use super::tensors::TensorIndex;
use crate::files::read_text_file;

/// Largest JSON file that is read; published ones have a few kilobytes.
const MAX_JSON_BYTES: u64 = 4 << 20;
/// Epsilon of the norms of latents. The published implementations leave it at the default of their norm class, whatever
/// `rms_norm_eps` says.
const LATENT_NORM_EPS: f64 = 1e-6;

/// Reads the config of an opened checkpoint: GGUF metadata, or `config.json` and `generation_config.json` beside the
/// safetensors files.
///
/// # Errors
/// If the config can't be read or describes a model that is not supported. Messages name the file.
pub fn read_config(checkpoint: &Checkpoint) -> Result<ModelConfig, ModelError> {
    let path = checkpoint.path();
    if let (Container::Gguf, Some(metadata)) = (checkpoint.container(), checkpoint.metadata()) {
        let tensors = TensorIndex::from(checkpoint);
        return from_gguf(metadata, &tensors, rope_divisors(checkpoint)?).map_err(ModelError::in_file(path));
    }
    let directory = if path.is_dir() { path } else { path.parent().unwrap_or_else(|| Path::new(".")) };
    let config = directory.join("config.json");
    let mut model = from_hf(&read_json(&config)?).map_err(ModelError::in_file(&config))?;
    let generation = directory.join("generation_config.json");
    if generation.exists() {
        add_generation_config(&mut model, &read_json(&generation)?).map_err(ModelError::in_file(&generation))?;
    }
    Ok(model)
}

fn read_json(path: &Path) -> Result<String, ModelError> {
    let io = |source| ModelError::Io { path: path.to_path_buf(), source };
    read_text_file(path, MAX_JSON_BYTES).map_err(io)
}

/// The divisors that a GGUF file stores in place of a scaling rule.
fn rope_divisors(checkpoint: &Checkpoint) -> Result<Option<Vec<f32>>, ModelError> {
    let Some(view) = checkpoint.tensor("rope_freqs.weight") else { return Ok(None) };
    if view.elements() > limits::HEAD_DIM as usize {
        let expected = format!("at most {} numbers", limits::HEAD_DIM);
        return Err(ModelError::invalid("rope_freqs.weight", expected, view.elements().to_string()));
    }
    let mut values = vec![0.0; view.elements()];
    blocks::dequantize(view.dtype, view.data, &mut values)?;
    Ok(Some(values))
}

/// Reads the text of a `config.json`.
///
/// # Errors
/// If it is no JSON object or describes a model that is not supported.
pub fn from_hf(text: &str) -> Result<ModelConfig, ModelError> {
    let map = parse_object(text)?;
    let source = Source::HuggingFace(&map);
    let family = find_hf(&map)?;
    if map.get("text_config").is_some_and(Value::is_object) {
        return Err(ModelError::unsupported("text_config", "(a model with several parts)", "text-only models"));
    }
    let quantization = read_quantization(&source)?;
    let mut config = read_common(family, &source, Dialect::HuggingFace, None)?;
    config.block_scale = quantization;
    config.bos_token_id = source.integer(&keys::BOS_TOKEN_ID, 0, limits::TOKEN_ID)?;
    config.eos_token_ids = token_ids(&map, "eos_token_id")?;
    config.validate()?;
    Ok(config)
}

/// Adds what `generation_config.json` says: its end-of-text tokens come first, being those of the chat format.
///
/// # Errors
/// If it is no JSON object or its token ids are none.
pub fn add_generation_config(config: &mut ModelConfig, text: &str) -> Result<(), ModelError> {
    let mut ids = token_ids(&parse_object(text)?, "eos_token_id")?;
    for id in &config.eos_token_ids {
        if !ids.contains(id) {
            ids.push(*id);
        }
    }
    config.eos_token_ids = ids;
    Ok(())
}

/// Reads GGUF metadata. The tensors tell what metadata leaves open: tied heads, biases, widths of experts. `rope_divisors` are
/// the values of `rope_freqs.weight`, if there is one.
///
/// # Errors
/// If a key is missing or wrong, or the model is not supported.
pub fn from_gguf(
    metadata: &GgufMetadata,
    tensors: &TensorIndex,
    rope_divisors: Option<Vec<f32>>,
) -> Result<ModelConfig, ModelError> {
    let architecture = metadata.str("general.architecture")?;
    let source = Source::Gguf { metadata, architecture };
    let family = find_gguf(architecture, &source)?;
    let mut config = read_common(family, &source, Dialect::Gguf, Some(tensors))?;
    config.rope.divisors = rope_divisors;
    let token = |key: &str| metadata.get::<u32>(key);
    config.bos_token_id = token("tokenizer.ggml.bos_token_id")?;
    for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        let id = token(&format!("tokenizer.ggml.{key}"))?;
        config.eos_token_ids.extend(id.filter(|id| !config.eos_token_ids.contains(id)));
    }
    config.validate()?;
    Ok(config)
}

fn parse_object(text: &str) -> Result<Map<String, Value>, ModelError> {
    match serde_json::from_str(text) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(ModelError::Json { found: "another JSON value".to_owned() }),
        Err(error) => Err(ModelError::Json { found: format!("an error: {error}") }),
    }
}

fn find_hf(map: &Map<String, Value>) -> Result<&'static Family, ModelError> {
    let supported = || FAMILIES.iter().map(|family| family.hf.0).collect::<Vec<_>>().join(", ");
    let architecture = map.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
    let model_type = map.get("model_type").and_then(Value::as_str);
    let family = match (architecture, model_type) {
        (Some(name), _) => FAMILIES.iter().find(|family| family.hf.0 == name),
        (None, Some(name)) => FAMILIES.iter().find(|family| family.hf.1 == name),
        (None, None) => {
            return Err(ModelError::MissingKey { key: "architectures".to_owned(), expected: supported() });
        }
    };
    let found = architecture.or(model_type).unwrap_or_default();
    family.ok_or_else(|| ModelError::unsupported("architecture", quoted(found), supported()))
}

fn find_gguf(architecture: &str, source: &Source<'_>) -> Result<&'static Family, ModelError> {
    let mut candidates = FAMILIES.iter().filter(|family| family.gguf == architecture).peekable();
    if candidates.peek().is_none() {
        let mut supported: Vec<_> = FAMILIES.iter().map(|family| family.gguf).collect();
        supported.dedup();
        return Err(ModelError::unsupported("general.architecture", quoted(architecture), supported.join(", ")));
    }
    let gating = source.integer(&keys::GATING_FUNC, 0, u32::MAX)?.unwrap_or(0);
    candidates.find(|family| family.gguf_gating.is_none_or(|known| known.contains(&gating))).ok_or_else(|| {
        ModelError::unsupported(source.name(&keys::GATING_FUNC), gating.to_string(), "1 (softmax), 2 (sigmoid)")
    })
}

/// One token id, or a list of them.
fn token_ids(map: &Map<String, Value>, key: &str) -> Result<Vec<u32>, ModelError> {
    let items = match map.get(key) {
        None | Some(Value::Null) => &[],
        Some(Value::Array(items)) => items.as_slice(),
        Some(one) => std::slice::from_ref(one),
    };
    let mut ids = Vec::with_capacity(items.len());
    for item in items {
        let id = item.as_u64().filter(|id| *id <= u64::from(limits::TOKEN_ID));
        let Some(id) = id else {
            return Err(ModelError::invalid(key, "token ids", describe_json(item)));
        };
        ids.push(id as u32);
    }
    Ok(ids)
}

fn read_quantization(source: &Source<'_>) -> Result<Option<BlockScale>, ModelError> {
    const SUPPORTED: &str = "none, or fp8 with fmt e4m3, weight_block_size [128, 128], activation_scheme dynamic";
    if let Some(object) = source.object("compression_config")? {
        let found = Source::HuggingFace(object).text(&keys::QUANT_METHOD)?.unwrap_or_default();
        return Err(ModelError::unsupported("compression_config", quoted(&found), SUPPORTED));
    }
    let Some(object) = source.object("quantization_config")? else { return Ok(None) };
    let quantization = Source::HuggingFace(object);
    let check = |key: &Key, wanted: &str, default: &str| {
        let found = quantization.text(key)?.unwrap_or_else(|| default.to_owned());
        if found == wanted {
            return Ok(());
        }
        let what = format!("quantization_config.{}", quantization.name(key));
        Err(ModelError::unsupported(what, quoted(&found), SUPPORTED))
    };
    check(&keys::QUANT_METHOD, "fp8", "")?;
    check(&keys::QUANT_FORMAT, "e4m3", "e4m3")?;
    check(&keys::ACTIVATION_SCHEME, "dynamic", "dynamic")?;
    let block = quantization.list("weight_block_size")?.unwrap_or_default();
    let wanted = [BlockScale::STANDARD.rows, BlockScale::STANDARD.columns];
    if block.len() == wanted.len() && block.iter().zip(wanted).all(|(value, size)| value.as_u64() == Some(size.into()))
    {
        return Ok(Some(BlockScale::STANDARD));
    }
    let found = if block.is_empty() { "(none)".to_owned() } else { quoted(&Value::from(block).to_string()) };
    Err(ModelError::unsupported("quantization_config.weight_block_size", found, SUPPORTED))
}

fn refuse_unknown_mathematics(family: &Family, source: &Source<'_>) -> Result<(), ModelError> {
    for key in keys::REFUSED {
        let harmless = match source.scalar(key) {
            None | Some(Scalar::Flag(false) | Scalar::Integer(0 | 1)) => true,
            Some(Scalar::Float(value)) => value == 0.0 || value == 1.0,
            Some(_) => false,
        };
        if !harmless {
            let found = source.scalar(key).map_or_else(String::new, |value| value.describe());
            return Err(ModelError::unsupported(source.name(key), found, "models without it"));
        }
    }
    let activation = source.text(&keys::HIDDEN_ACT)?.unwrap_or_else(|| "silu".to_owned());
    if !matches!(activation.as_str(), "silu" | "swish") {
        return Err(ModelError::unsupported("hidden_act", quoted(&activation), "silu"));
    }
    let experts = source.integer(&keys::NUM_EXPERTS, 0, u32::MAX)?.unwrap_or(0);
    if family.experts.is_none() && experts > 0 {
        let what = format!("{} in a {} model:", source.name(&keys::NUM_EXPERTS), family.name);
        return Err(ModelError::unsupported(what, experts.to_string(), "experts in qwen2_moe, qwen3_moe, deepseek"));
    }
    Ok(())
}

fn read_common(
    family: &'static Family,
    source: &Source<'_>,
    dialect: Dialect,
    tensors: Option<&TensorIndex>,
) -> Result<ModelConfig, ModelError> {
    refuse_unknown_mathematics(family, source)?;
    let hidden_size = source.count(&keys::HIDDEN_SIZE, limits::WIDTH)?;
    let num_attention_heads = source.count(&keys::NUM_ATTENTION_HEADS, limits::HEADS)?;
    let max_position_embeddings = source.count(&keys::MAX_POSITION_EMBEDDINGS, limits::CONTEXT)?;
    let (num_hidden_layers, num_nextn_predict_layers) = read_depth(source, tensors)?;
    let mla = match family.attention {
        AttentionForm::Grouped => None,
        AttentionForm::Latent => Some(read_mla(source)?),
    };
    let (num_key_value_heads, head_dim) = match mla {
        // The keys describe the cache in some files and the heads in others; the sizes in `mla` say all.
        Some(mla) => (num_attention_heads, mla.qk_nope_head_dim + mla.qk_rope_head_dim),
        None => read_heads(source, hidden_size, num_attention_heads)?,
    };
    let mut layers = read_windows(family, source, num_hidden_layers, max_position_embeddings)?;
    let moe = match family.experts {
        Some(rule) => read_experts(family, rule, source, tensors, &mut layers)?,
        None => None,
    };
    let embedding = tensors.and_then(|tensors| tensors.get("token_embd.weight")).and_then(|spec| spec.shape.first());
    let vocab_size = match embedding.map(|rows| u32::try_from(*rows).ok().filter(|n| *n <= limits::VOCABULARY)) {
        Some(Some(rows)) => rows,
        _ => source.count(&keys::VOCAB_SIZE, limits::VOCABULARY)?,
    };
    let tied = match tensors {
        Some(tensors) => !tensors.contains("output.weight"),
        None => source.flag(&keys::TIE_WORD_EMBEDDINGS)?.unwrap_or(false),
    };
    Ok(ModelConfig {
        family,
        dialect,
        vocab_size,
        hidden_size,
        num_hidden_layers,
        num_attention_heads,
        num_key_value_heads,
        head_dim,
        intermediate_size: source.count(&keys::INTERMEDIATE_SIZE, limits::WIDTH)?,
        max_position_embeddings,
        rms_norm_eps: read_eps(source)?,
        rope: read_rope(family, source, mla.as_ref(), head_dim, max_position_embeddings)?,
        qk_norm: family.qk_norm,
        attention_bias: read_attention_bias(family, source, tensors)?,
        mlp_bias: family.mlp_bias && has_bias(source, tensors, &keys::MLP_BIAS, "ffn_gate")?,
        tie_word_embeddings: tied,
        layers,
        moe,
        mla,
        block_scale: None,
        num_nextn_predict_layers,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
    })
}

fn read_eps(source: &Source<'_>) -> Result<f64, ModelError> {
    // `config.json` may leave it at the default of the transformers library; GGUF always has it.
    match source {
        Source::HuggingFace(_) => Ok(source.float(&keys::RMS_NORM_EPS, 1e-12, 1.0)?.unwrap_or(1e-6)),
        Source::Gguf { .. } => source.number(&keys::RMS_NORM_EPS, 1e-12, 1.0),
    }
}

/// Layers, and layers for multi-token prediction after them.
fn read_depth(source: &Source<'_>, tensors: Option<&TensorIndex>) -> Result<(u32, u32), ModelError> {
    let layers = source.count(&keys::NUM_HIDDEN_LAYERS, limits::LAYERS)?;
    let extra = source.integer(&keys::NUM_NEXTN_PREDICT_LAYERS, 0, limits::LAYERS)?.unwrap_or(0);
    // GGUF counts the extra layers as blocks if it has them.
    let counted = |tensors: &TensorIndex| {
        let first = layers.checked_sub(extra)?;
        tensors.contains(&format!("blk.{first}.nextn.eh_proj.weight")).then_some(first)
    };
    Ok((tensors.filter(|_| extra > 0).and_then(counted).unwrap_or(layers), extra))
}

/// Key/value heads and elements of a head.
fn read_heads(source: &Source<'_>, hidden_size: u32, num_attention_heads: u32) -> Result<(u32, u32), ModelError> {
    let key_value = source.integer(&keys::NUM_KEY_VALUE_HEADS, 1, num_attention_heads)?.unwrap_or(num_attention_heads);
    let head_dim = source.integer(&keys::HEAD_DIM, 1, limits::HEAD_DIM)?;
    let head_dim = head_dim.unwrap_or(hidden_size / num_attention_heads);
    if head_dim == 0 || head_dim > limits::HEAD_DIM {
        let expected = format!("heads of 1 to {} of the {hidden_size} elements", limits::HEAD_DIM);
        return Err(ModelError::invalid(
            source.name(&keys::NUM_ATTENTION_HEADS),
            expected,
            num_attention_heads.to_string(),
        ));
    }
    let value_dim = source.integer(&keys::VALUE_DIM, 1, limits::HEAD_DIM)?.unwrap_or(head_dim);
    if value_dim != head_dim {
        let supported = format!("values as long as keys ({head_dim})");
        return Err(ModelError::unsupported(source.name(&keys::VALUE_DIM), value_dim.to_string(), supported));
    }
    Ok((key_value, head_dim))
}

fn read_mla(source: &Source<'_>) -> Result<MlaConfig, ModelError> {
    let rope = source.count(&keys::QK_ROPE_HEAD_DIM, limits::HEAD_DIM)?;
    let nope = match source {
        Source::HuggingFace(_) => source.count(&keys::QK_NOPE_HEAD_DIM, limits::HEAD_DIM)?,
        Source::Gguf { .. } => {
            let whole = source.count(&keys::QK_HEAD_DIM, limits::HEAD_DIM)?;
            whole.checked_sub(rope).filter(|nope| *nope > 0).ok_or_else(|| {
                let expected = format!("more than the {rope} rotated elements");
                ModelError::invalid(source.name(&keys::QK_HEAD_DIM), expected, whole.to_string())
            })?
        }
    };
    Ok(MlaConfig {
        q_lora_rank: source.integer(&keys::Q_LORA_RANK, 0, limits::WIDTH)?.unwrap_or(0),
        kv_lora_rank: source.count(&keys::KV_LORA_RANK, limits::WIDTH)?,
        qk_nope_head_dim: nope,
        qk_rope_head_dim: rope,
        v_head_dim: source.count(&keys::V_HEAD_DIM, limits::HEAD_DIM)?,
        norm_eps: LATENT_NORM_EPS,
    })
}

/// By the key of `config.json`, or whether the first layer of a GGUF file has one.
fn has_bias(source: &Source<'_>, tensors: Option<&TensorIndex>, key: &Key, role: &str) -> Result<bool, ModelError> {
    match tensors {
        Some(tensors) => Ok(tensors.contains(&format!("blk.0.{role}.bias"))),
        None => Ok(source.flag(key)?.unwrap_or(false)),
    }
}

fn read_attention_bias(
    family: &Family,
    source: &Source<'_>,
    tensors: Option<&TensorIndex>,
) -> Result<AttentionBias, ModelError> {
    let all = |flag| AttentionBias { query: flag, key: flag, value: flag, output: flag };
    Ok(match family.attention_bias {
        BiasRule::QueryKeyValue => AttentionBias { output: false, ..all(true) },
        BiasRule::QueryKeyValueUnless => {
            AttentionBias { output: false, ..all(source.flag(&keys::QKV_BIAS)?.unwrap_or(true)) }
        }
        BiasRule::AllIf if tensors.is_some() => AttentionBias {
            query: has_bias(source, tensors, &keys::ATTENTION_BIAS, "attn_q")?
                || has_bias(source, tensors, &keys::ATTENTION_BIAS, "attn_q_a")?,
            key: has_bias(source, tensors, &keys::ATTENTION_BIAS, "attn_k")?
                || has_bias(source, tensors, &keys::ATTENTION_BIAS, "attn_kv_a_mqa")?,
            value: has_bias(source, tensors, &keys::ATTENTION_BIAS, "attn_v")?,
            output: has_bias(source, tensors, &keys::ATTENTION_BIAS, "attn_output")?,
        },
        BiasRule::AllIf => all(has_bias(source, None, &keys::ATTENTION_BIAS, "")?),
    })
}

/// All layers as dense ones, with their windows.
fn read_windows(
    family: &Family,
    source: &Source<'_>,
    num_hidden_layers: u32,
    max_position_embeddings: u32,
) -> Result<Vec<LayerKind>, ModelError> {
    let kind = |window| LayerKind { feed_forward: FeedForward::Dense, window };
    if matches!(source, Source::Gguf { .. }) {
        let window = source.integer(&keys::SLIDING_WINDOW, 0, u32::MAX)?.unwrap_or(0);
        if window > 0 && window < max_position_embeddings {
            let supported = "GGUF models without a window (the file doesn't say which layers have it)";
            return Err(ModelError::unsupported(source.name(&keys::SLIDING_WINDOW), window.to_string(), supported));
        }
        return Ok(vec![kind(0); num_hidden_layers as usize]);
    }
    let used = family.window != WindowRule::Never && source.flag(&keys::USE_SLIDING_WINDOW)?.unwrap_or(false);
    let window = if used { source.count(&keys::SLIDING_WINDOW, limits::CONTEXT)? } else { 0 };
    if let Some(types) = source.list("layer_types")? {
        return types.iter().map(|layer| listed_window(layer, window).map(kind)).collect();
    }
    let first = match family.window {
        WindowRule::FromMaxWindowLayers if used => {
            source.integer(&keys::MAX_WINDOW_LAYERS, 0, u32::MAX)?.unwrap_or(num_hidden_layers)
        }
        WindowRule::Listed if used => {
            let supported = "a list layer_types that says which layers have a window";
            return Err(ModelError::unsupported("use_sliding_window", "true", supported));
        }
        _ => 0,
    };
    Ok((0..num_hidden_layers).map(|layer| kind(if layer >= first { window } else { 0 })).collect())
}

fn listed_window(layer: &Value, window: u32) -> Result<u32, ModelError> {
    match layer.as_str() {
        Some("full_attention") => Ok(0),
        Some("sliding_attention") if window > 0 => Ok(window),
        Some("sliding_attention") => {
            let expected = "full_attention only, as the model has no window (use_sliding_window)";
            Err(ModelError::invalid("layer_types", expected, "sliding_attention"))
        }
        _ => {
            let found = describe_json(layer);
            Err(ModelError::unsupported("layer_types", found, "full_attention, sliding_attention"))
        }
    }
}

/// Marks the layers with experts, and reads what they are.
fn read_experts(
    family: &Family,
    rule: ExpertRule,
    source: &Source<'_>,
    tensors: Option<&TensorIndex>,
    layers: &mut [LayerKind],
) -> Result<Option<MoeConfig>, ModelError> {
    let num_experts = source.integer(&keys::NUM_EXPERTS, 0, limits::EXPERTS)?.unwrap_or(0);
    if num_experts == 0 {
        return Ok(None);
    }
    mark_expert_layers(rule, source, layers)?;
    let Some(first) = layers.iter().position(|layer| layer.feed_forward == FeedForward::Moe) else { return Ok(None) };
    // Old GGUF files leave widths to the tensors.
    let width = |key: &Key, role: &str| -> Result<u32, ModelError> {
        let stored = tensors.and_then(|tensors| tensors.get(&format!("blk.{first}.{role}.weight")));
        let rows = stored.and_then(|spec| spec.shape.iter().nth_back(1)).and_then(|rows| u32::try_from(*rows).ok());
        match rows.filter(|rows| (1..=limits::WIDTH).contains(rows)) {
            Some(rows) if source.scalar(key).is_none() => Ok(rows),
            _ => source.count(key, limits::WIDTH),
        }
    };
    let moe_intermediate_size = width(&keys::MOE_INTERMEDIATE_SIZE, "ffn_gate_exps")?;
    let shared_intermediate_size = match rule.shared {
        SharedExpert::None => 0,
        SharedExpert::Gated => width(&keys::SHARED_INTERMEDIATE_SIZE, "ffn_gate_shexp")?,
        SharedExpert::Plain => {
            let count = source.integer(&keys::NUM_SHARED_EXPERTS, 0, limits::EXPERTS)?.unwrap_or(0);
            count.checked_mul(moe_intermediate_size).filter(|width| *width <= limits::WIDTH).ok_or_else(|| {
                let expected = format!("shared experts of at most {} elements together", limits::WIDTH);
                ModelError::invalid(source.name(&keys::NUM_SHARED_EXPERTS), expected, count.to_string())
            })?
        }
    };
    let default = if tensors.is_some() { rule.renormalise.1 } else { rule.renormalise.0 };
    let mut moe = MoeConfig {
        num_experts,
        top_k: source.count(&keys::NUM_EXPERTS_PER_TOK, limits::EXPERTS)?,
        moe_intermediate_size,
        shared_intermediate_size,
        shared_gate: rule.shared == SharedExpert::Gated,
        score: RouterScore::Softmax,
        num_groups: 1,
        topk_group: 1,
        group_score: GroupScore::Max,
        renormalise: source.flag(&keys::NORM_TOPK_PROB)?.unwrap_or(default),
        scale: 1.0,
        correction_bias: false,
    };
    read_gating(family, rule.gating, source, &mut moe)?;
    Ok(Some(moe))
}

fn mark_expert_layers(rule: ExpertRule, source: &Source<'_>, layers: &mut [LayerKind]) -> Result<(), ModelError> {
    let first = source.integer(&keys::FIRST_K_DENSE_REPLACE, 0, u32::MAX)?.unwrap_or(0);
    let step = match rule.layers {
        ExpertLayers::SparseStep => source.integer(&keys::DECODER_SPARSE_STEP, 1, u32::MAX)?.unwrap_or(1),
        ExpertLayers::AfterDense => source.integer(&keys::MOE_LAYER_FREQ, 1, u32::MAX)?.unwrap_or(1),
    };
    for (index, layer) in (0_u32..).zip(layers.iter_mut()) {
        let sparse = match rule.layers {
            ExpertLayers::SparseStep => index >= first && (index + 1).is_multiple_of(step),
            ExpertLayers::AfterDense => index >= first && index.is_multiple_of(step),
        };
        if sparse {
            layer.feed_forward = FeedForward::Moe;
        }
    }
    if rule.layers == ExpertLayers::SparseStep {
        for dense in source.list("mlp_only_layers")?.unwrap_or_default() {
            let index = dense
                .as_u64()
                .and_then(|index| usize::try_from(index).ok())
                .ok_or_else(|| ModelError::invalid("mlp_only_layers", "indices of layers", describe_json(dense)))?;
            if let Some(layer) = layers.get_mut(index) {
                layer.feed_forward = FeedForward::Dense;
            }
        }
    }
    Ok(())
}

fn read_gating(family: &Family, gating: Gating, source: &Source<'_>, moe: &mut MoeConfig) -> Result<(), ModelError> {
    let wanted = match gating {
        Gating::Softmax => return Ok(()),
        Gating::SoftmaxGroups => "softmax",
        Gating::SigmoidGroups => "sigmoid",
    };
    let scoring = source.text(&keys::SCORING_FUNC)?.unwrap_or_else(|| wanted.to_owned());
    if scoring != wanted {
        let supported = format!("{wanted} in a {} model", family.name);
        return Err(ModelError::unsupported("scoring_func", quoted(&scoring), supported));
    }
    moe.scale = source.float(&keys::ROUTED_SCALING_FACTOR, 1e-6, 1e6)?.unwrap_or(1.0);
    moe.num_groups = source.integer(&keys::NUM_GROUPS, 0, limits::EXPERTS)?.unwrap_or(1).max(1);
    // Zero stands for "none" where there are no groups to choose from; else the check of the config refuses it.
    moe.topk_group = source.integer(&keys::TOPK_GROUP, 0, limits::EXPERTS)?.unwrap_or(moe.num_groups);
    if moe.num_groups == 1 {
        moe.topk_group = moe.topk_group.max(1);
    }
    let method = source.text(&keys::TOPK_METHOD)?;
    let refuse = |supported: &str| {
        let found = quoted(method.as_deref().unwrap_or_default());
        let supported = format!("{supported} in a {} model", family.name);
        Err(ModelError::unsupported("topk_method", found, supported))
    };
    if gating == Gating::SigmoidGroups {
        moe.score = RouterScore::Sigmoid;
        moe.group_score = GroupScore::Top2Sum;
        moe.correction_bias = true;
        return match method.as_deref() {
            None | Some("noaux_tc") => Ok(()),
            Some(_) => refuse("noaux_tc"),
        };
    }
    // GGUF has no such key: groups are used if there are any.
    match (method.as_deref(), source) {
        (Some("group_limited_greedy"), _) | (None, Source::Gguf { .. }) => {}
        (Some("greedy") | None, _) => (moe.num_groups, moe.topk_group) = (1, 1),
        (Some(_), _) => return refuse("greedy, group_limited_greedy"),
    }
    if moe.renormalise && matches!(source, Source::HuggingFace(_)) {
        // The published code leaves the scale out then, the transformers library ignores the flag.
        return Err(ModelError::unsupported("norm_topk_prob", "true", format!("false in a {} model", family.name)));
    }
    Ok(())
}
