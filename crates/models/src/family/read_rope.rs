//! The rotary part of a config: `rope_theta` with `rope_scaling`, `rope_parameters`, or the keys of GGUF.

use qwen_ir::RopeStyle;
use serde_json::{Map, Value};

use super::config::{MlaConfig, limits};
use super::error::{ModelError, quoted};
use super::fields::Source;
use super::keys;
use super::rope::{RopeConfig, RopeScaling, yarn_mscale};
use super::table::Family;

const SUPPORTED: &str = "default, linear, llama3, yarn";
const DEFAULT_THETA: f64 = 10_000.0;
const MAX_FACTOR: f64 = 1e6;

pub(super) fn read_rope(
    family: &Family,
    source: &Source<'_>,
    mla: Option<&MlaConfig>,
    head_dim: u32,
    max_position_embeddings: u32,
) -> Result<RopeConfig, ModelError> {
    let rotatable = mla.map_or(head_dim, |mla| mla.qk_rope_head_dim);
    let rotary_dim = source.integer(&keys::ROTARY_DIM, 1, limits::HEAD_DIM)?.unwrap_or(rotatable);
    let (theta, scaling) = match source {
        Source::HuggingFace(map) => read_hf(map, source, max_position_embeddings)?,
        Source::Gguf { .. } => read_gguf(source, mla, max_position_embeddings)?,
    };
    let style = match source {
        Source::HuggingFace(_) => family.rope_style.0,
        Source::Gguf { .. } => family.rope_style.1,
    };
    let style = match source.flag(&keys::ROPE_INTERLEAVE)? {
        Some(false) if mla.is_some() => RopeStyle::Half,
        _ => style,
    };
    Ok(RopeConfig { theta, rotary_dim, style, scaling, divisors: None })
}

/// The object that holds the rule, in either spelling. One per layer type is accepted if they are all alike.
fn scaling_object<'a>(source: &Source<'a>) -> Result<Option<&'a Map<String, Value>>, ModelError> {
    for name in ["rope_scaling", "rope_parameters"] {
        let Some(object) = source.object(name)?.filter(|object| !object.is_empty()) else { continue };
        if !object.values().any(Value::is_object) {
            return Ok(Some(object));
        }
        let mut parts = object.values().filter_map(Value::as_object);
        let first = parts.next();
        if object.values().all(Value::is_object) && parts.all(|part| Some(part) == first) {
            return Ok(first);
        }
        let supported = "one rotary embedding for all layers";
        return Err(ModelError::unsupported(name, "(different ones per layer type)", supported));
    }
    Ok(None)
}

fn read_hf(
    map: &Map<String, Value>,
    source: &Source<'_>,
    max_position_embeddings: u32,
) -> Result<(f64, RopeScaling), ModelError> {
    let empty = Map::new();
    let object = scaling_object(source)?;
    let rope = Source::HuggingFace(object.unwrap_or(&empty));
    for place in [source, &rope] {
        let part = place.float(&keys::PARTIAL_ROTARY_FACTOR, 0.0, 1.0)?.unwrap_or(1.0);
        if part != 1.0 {
            return Err(ModelError::unsupported("partial_rotary_factor", part.to_string(), "1"));
        }
    }
    let theta = match rope.float(&keys::ROPE_THETA, 1.0 + 1e-6, 1e15)? {
        Some(theta) => theta,
        None => source.float(&keys::ROPE_THETA, 1.0 + 1e-6, 1e15)?.unwrap_or(DEFAULT_THETA),
    };
    let kind = match rope.text(&keys::ROPE_TYPE)? {
        Some(kind) => kind,
        None => {
            refuse_rule_without_type(object.unwrap_or(&empty))?;
            "default".to_owned()
        }
    };
    let context = || -> Result<u32, ModelError> {
        let outer = Source::HuggingFace(map).integer(&keys::ORIGINAL_CONTEXT, 1, limits::CONTEXT)?;
        let inner = rope.integer(&keys::ORIGINAL_CONTEXT, 1, limits::CONTEXT)?;
        Ok(outer.or(inner).unwrap_or(max_position_embeddings))
    };
    let factor = || rope.number(&keys::ROPE_FACTOR, 1e-3, MAX_FACTOR);
    let scaling = match kind.as_str() {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: factor()? },
        "llama3" => {
            let low_freq_factor = rope.number(&keys::LOW_FREQ_FACTOR, 1e-3, MAX_FACTOR)?;
            let high_freq_factor = rope.number(&keys::HIGH_FREQ_FACTOR, 1e-3, MAX_FACTOR)?;
            if high_freq_factor <= low_freq_factor {
                let expected = format!("more than low_freq_factor ({low_freq_factor})");
                return Err(ModelError::invalid("high_freq_factor", expected, high_freq_factor.to_string()));
            }
            RopeScaling::Llama3 {
                factor: factor()?,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: context()?,
            }
        }
        "yarn" => read_hf_yarn(&rope, context()?, max_position_embeddings)?,
        other => return Err(ModelError::unsupported("rope_type", quoted(other), SUPPORTED)),
    };
    Ok((theta, scaling))
}

/// Parameters of a rule that isn't named would be left out in silence.
fn refuse_rule_without_type(object: &Map<String, Value>) -> Result<(), ModelError> {
    let known = [keys::ROPE_THETA.hf, keys::PARTIAL_ROTARY_FACTOR.hf, keys::ROPE_TYPE.hf].concat();
    match object.keys().find(|key| !known.contains(&key.as_str())) {
        Some(key) => {
            Err(ModelError::invalid("rope_type", format!("one of {SUPPORTED}"), format!("none beside {}", quoted(key))))
        }
        None => Ok(()),
    }
}

fn read_hf_yarn(rope: &Source<'_>, context: u32, max_position_embeddings: u32) -> Result<RopeScaling, ModelError> {
    let factor = rope.float(&keys::ROPE_FACTOR, 1e-3, MAX_FACTOR)?;
    let factor = factor.unwrap_or_else(|| f64::from(max_position_embeddings) / f64::from(context));
    let mscale = rope.float(&keys::MSCALE, 0.0, MAX_FACTOR)?.unwrap_or(0.0);
    let mscale_all_dim = rope.float(&keys::MSCALE_ALL_DIM, 0.0, MAX_FACTOR)?.unwrap_or(0.0);
    let attention_factor = match rope.float(&keys::ATTENTION_FACTOR, 1e-3, MAX_FACTOR)? {
        Some(given) => given,
        None if mscale != 0.0 && mscale_all_dim != 0.0 => {
            yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
        }
        None => yarn_mscale(factor, 1.0),
    };
    Ok(RopeScaling::Yarn {
        factor,
        original_max_position_embeddings: context,
        beta_fast: nonzero(rope.float(&keys::BETA_FAST, 0.0, MAX_FACTOR)?, 32.0),
        beta_slow: nonzero(rope.float(&keys::BETA_SLOW, 0.0, MAX_FACTOR)?, 1.0),
        truncate: rope.flag(&keys::TRUNCATE)?.unwrap_or(true),
        attention_factor,
        mscale_all_dim,
    })
}

/// Zero stands for the default, as in the transformers library.
fn nonzero(value: Option<f64>, default: f64) -> f64 {
    value.filter(|value| *value > 0.0).unwrap_or(default)
}

fn read_gguf(
    source: &Source<'_>,
    mla: Option<&MlaConfig>,
    max_position_embeddings: u32,
) -> Result<(f64, RopeScaling), ModelError> {
    let theta = source.float(&keys::ROPE_THETA, 1.0 + 1e-6, 1e15)?.unwrap_or(DEFAULT_THETA);
    let factor = nonzero(source.float(&keys::ROPE_FACTOR, 0.0, MAX_FACTOR)?, 1.0);
    // A factor without a type is linear: the oldest files know no other.
    let kind = source.text(&keys::ROPE_TYPE)?.unwrap_or_else(|| "linear".to_owned());
    let scaling = match kind.as_str() {
        "none" => RopeScaling::None,
        "linear" if factor == 1.0 => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor },
        "yarn" => {
            let mix = source.float(&keys::EXT_FACTOR, -MAX_FACTOR, MAX_FACTOR)?.unwrap_or(1.0);
            // Negative means unset.
            if mix >= 0.0 && mix != 1.0 {
                return Err(ModelError::unsupported(source.name(&keys::EXT_FACTOR), mix.to_string(), "1"));
            }
            let context = source.integer(&keys::ORIGINAL_CONTEXT, 0, limits::CONTEXT)?.filter(|context| *context > 0);
            let multiplier = source.float(&keys::YARN_LOG_MULTIPLIER, 0.0, MAX_FACTOR)?.unwrap_or(0.0);
            let given = nonzero(source.float(&keys::ATTENTION_FACTOR, 0.0, MAX_FACTOR)?, 1.0);
            // The multiplier is 0.1 mscale_all_dim of latent attention, whose models all have an equal mscale: the two cancel
            // in cos and sin.
            let (mscale_all_dim, own) = match mla {
                Some(_) if multiplier > 0.0 => (10.0 * multiplier, 1.0),
                _ => (0.0, yarn_mscale(factor, 1.0)),
            };
            RopeScaling::Yarn {
                factor,
                original_max_position_embeddings: context.unwrap_or(max_position_embeddings),
                beta_fast: nonzero(source.float(&keys::BETA_FAST, -1.0, MAX_FACTOR)?, 32.0),
                beta_slow: nonzero(source.float(&keys::BETA_SLOW, -1.0, MAX_FACTOR)?, 1.0),
                truncate: true,
                attention_factor: given * own,
                mscale_all_dim,
            }
        }
        other => {
            let what = source.name(&keys::ROPE_TYPE);
            return Err(ModelError::unsupported(what, quoted(other), "none, linear, yarn"));
        }
    };
    Ok((theta, scaling))
}
