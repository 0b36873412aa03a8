//! Parameters of sampling that all endpoints share: ranges, defaults, and what becomes of them in the engine.

use std::hash::{BuildHasher, RandomState};
use std::time::Instant;

use qwen_engine::SamplingParams;
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::body::OneOrMany;
use super::parameters::{Handling, Row};
use crate::Server;
use crate::error::ApiError;

/// Most stop texts, and the longest of them in bytes.
pub const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;
/// Most entries of `logit_bias`, and of lists of token ids.
const MAX_TOKEN_LIST: usize = 4096;
/// Most best tokens at a position.
pub const MAX_TOP_LOGPROBS: u32 = 20;

/// How tokens are chosen.
#[derive(Debug, Clone, Default, Deserialize, ToSchema)]
#[serde(default)]
pub struct SamplingFields {
    /// 0 = always the most probable token. Default: the model's `generation_config.json`, else 1.
    #[schema(minimum = 0, maximum = 2)]
    pub temperature: Option<f32>,
    /// Only the most probable tokens that together reach this probability.
    #[schema(minimum = 0, maximum = 1)]
    pub top_p: Option<f32>,
    /// Only so many most probable tokens; 0 or -1 = all.
    #[schema(minimum = -1)]
    pub top_k: Option<i64>,
    /// Only tokens at least so probable relative to the most probable one.
    #[schema(minimum = 0, maximum = 1)]
    pub min_p: Option<f32>,
    /// Divides (or multiplies) logits of tokens that occurred; 1 = off.
    #[schema(minimum = 0.01, maximum = 100)]
    pub repetition_penalty: Option<f32>,
    /// Subtracted for each occurrence in the answer.
    #[schema(minimum = -2, maximum = 2)]
    pub frequency_penalty: Option<f32>,
    /// Subtracted once for tokens that occurred in the answer.
    #[schema(minimum = -2, maximum = 2)]
    pub presence_penalty: Option<f32>,
    /// The same seed gives the same answer. With `n`, choice i has seed + i.
    pub seed: Option<i64>,
    /// Text or texts that end the answer; they are cut off.
    #[schema(value_type = Option<StringOrStrings>)]
    pub stop: Option<OneOrMany<String>>,
    /// Tokens that end the answer.
    pub stop_token_ids: Option<Vec<u32>>,
    /// Go on after the token that ends a text.
    pub ignore_eos: Option<bool>,
    /// The answer does not end before so many tokens.
    pub min_tokens: Option<u32>,
    /// Token id (as text) to a number from -100 to 100 that is added to its logit.
    #[schema(value_type = Option<std::collections::BTreeMap<String, f32>>)]
    pub logit_bias: Option<serde_json::Map<String, Value>>,
    /// Answers per prompt.
    #[schema(minimum = 1, maximum = 128)]
    pub n: Option<u32>,
    /// Lower runs earlier. Refused unless the server was started with `--allow_priority`.
    pub priority: Option<i32>,
    /// Requests share cached prefixes only with those of the same key and the same salt.
    pub cache_salt: Option<String>,
    /// Add the ids of the answer's tokens (`token_ids`) to each choice.
    pub return_token_ids: Option<bool>,
}

/// A text, or several.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum StringOrStrings {
    /// One.
    One(String),
    /// Several.
    Many(Vec<String>),
}

/// Fate of each.
pub const SAMPLING: &[Row] = &[
    ("temperature", Handling::Used),
    ("top_p", Handling::Used),
    ("top_k", Handling::Used),
    ("min_p", Handling::Used),
    ("repetition_penalty", Handling::Used),
    ("frequency_penalty", Handling::Used),
    ("presence_penalty", Handling::Used),
    ("seed", Handling::Used),
    ("stop", Handling::Used),
    ("stop_token_ids", Handling::Used),
    ("ignore_eos", Handling::Used),
    ("min_tokens", Handling::Used),
    ("logit_bias", Handling::Used),
    ("n", Handling::Used),
    ("priority", Handling::Used),
    ("cache_salt", Handling::Used),
    ("return_token_ids", Handling::Used),
];

/// Fate of parameters of other servers, at every endpoint that generates.
pub const OTHERS: &[Row] = &[
    ("user", Handling::NoEffect("a label of the caller")),
    ("metadata", Handling::NoEffect("a label of the caller")),
    ("safety_identifier", Handling::NoEffect("a label of the caller")),
    ("service_tier", Handling::NoEffect("there is one tier")),
    ("prompt_cache_key", Handling::NoEffect("the prefix cache finds equal prefixes by itself")),
    ("prompt_cache_retention", Handling::NoEffect("the prefix cache keeps what there is room for")),
    (
        "skip_special_tokens",
        Handling::RefusedUnless("true", "markup of the model is never part of the text; ask for token ids"),
    ),
    ("spaces_between_special_tokens", Handling::NoEffect("no spaces are ever put in")),
    ("use_beam_search", Handling::Refused("answers are sampled; there is no beam search")),
    ("length_penalty", Handling::Refused("it belongs to beam search, which does not exist here")),
    ("include_stop_str_in_output", Handling::Refused("a stop text is always cut off; append it yourself")),
    ("bad_words", Handling::Refused("use logit_bias with -100 for the tokens")),
    ("allowed_token_ids", Handling::Refused("use logit_bias, or structured_outputs with choice")),
    ("truncate_prompt_tokens", Handling::Refused("a prompt is never cut silently; shorten it yourself")),
    ("thinking_token_budget", Handling::Refused("thinking ends by itself, or is switched off with enable_thinking")),
    ("kv_transfer_params", Handling::Refused("there is no transfer of caches between servers")),
    ("logits_processors", Handling::Refused("code from clients is never run")),
    ("vllm_xargs", Handling::Refused("it is for extensions of another server")),
    ("lora_request", Handling::Refused("there are no adapters")),
    ("typical_p", Handling::Refused("use top_p, top_k or min_p")),
    ("tfs_z", Handling::Refused("use top_p, top_k or min_p")),
    ("mirostat", Handling::Refused("use temperature, top_p or min_p")),
    ("dry_multiplier", Handling::Refused("use repetition_penalty or frequency_penalty")),
    ("xtc_probability", Handling::Refused("use temperature, top_p or min_p")),
    ("dynatemp_range", Handling::Refused("use temperature")),
];

impl SamplingFields {
    /// Answers per prompt.
    ///
    /// # Errors
    /// If there are none, or more than the server allows.
    pub fn choices(&self, server: &Server) -> Result<u32, ApiError> {
        let (n, limit) = (self.n.unwrap_or(1), server.config.max_n);
        match n {
            0 => Err(ApiError::invalid("n", format!("n: expected 1 to {limit}, found 0"))),
            n if n > limit => Err(ApiError::invalid(
                "n",
                format!("n: expected 1 to {limit}, found {n}; send several requests, or start the server with --max_n"),
            )),
            n => Ok(n),
        }
    }

    /// The engine's parameters. `max_tokens` and log-probabilities are the endpoint's matter.
    ///
    /// # Errors
    /// If one is out of range.
    pub fn resolve(&self, server: &Server) -> Result<SamplingParams, ApiError> {
        let base = &server.model()?.defaults;
        priority(self.priority, server)?;
        Ok(SamplingParams {
            temperature: temperature(in_range("temperature", self.temperature, 0.0, 2.0)?.unwrap_or(base.temperature)),
            top_p: in_range("top_p", self.top_p, f32::MIN_POSITIVE, 1.0)?.unwrap_or(base.top_p),
            top_k: self.top_k.map_or(Ok(base.top_k), top_k)?,
            min_p: in_range("min_p", self.min_p, 0.0, 1.0)?.unwrap_or(base.min_p),
            repetition_penalty: in_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)?
                .unwrap_or(base.repetition_penalty),
            frequency_penalty: in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?
                .unwrap_or(base.frequency_penalty),
            presence_penalty: in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)?
                .unwrap_or(base.presence_penalty),
            seed: self.seed.map_or_else(fresh_seed, i64::cast_unsigned),
            logit_bias: self.logit_bias.as_ref().map_or(Ok(Vec::new()), |map| logit_bias(map, server))?,
            min_tokens: self.min_tokens.unwrap_or(0),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            stop: self.stop.clone().map_or(Ok(Vec::new()), stops)?,
            stop_token_ids: token_ids("stop_token_ids", self.stop_token_ids.as_deref().unwrap_or_default())?,
            ..base.clone()
        })
    }

    /// A number for the salt of the prefix cache.
    #[must_use]
    pub fn salt(&self) -> u64 {
        use sha2::{Digest, Sha256};
        self.cache_salt.as_deref().filter(|salt| !salt.is_empty()).map_or(0, |salt| {
            let digest = Sha256::digest(salt.as_bytes());
            digest.iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte))
        })
    }
}

/// Whose turn it is, if clients may say that.
///
/// # Errors
/// If they may not.
pub fn priority(asked: Option<i32>, server: &Server) -> Result<i32, ApiError> {
    match asked.unwrap_or(0) {
        0 => Ok(0),
        priority if server.config.allow_priority => Ok(priority),
        _ => {
            let why = "priority: this server gives none to clients; start it with --allow_priority";
            Err(ApiError::unsupported("priority", why))
        }
    }
}

/// As vLLM: a temperature that would turn logits into infinities is raised to one that does not.
fn temperature(value: f32) -> f32 {
    if value > 1e-5 && value < 0.01 { 0.01 } else { value }
}

fn in_range(name: &'static str, value: Option<f32>, low: f32, high: f32) -> Result<Option<f32>, ApiError> {
    match value {
        Some(number) if !(number >= low && number <= high) => {
            let low = if low == f32::MIN_POSITIVE { "more than 0".into() } else { low.to_string() };
            Err(ApiError::invalid(name, format!("{name}: expected {low} to {high}, found {number}")))
        }
        value => Ok(value),
    }
}

fn top_k(value: i64) -> Result<u32, ApiError> {
    match value {
        -1 => Ok(0),
        value => u32::try_from(value)
            .map_err(|_| ApiError::invalid("top_k", format!("top_k: expected -1, 0 or more, found {value}"))),
    }
}

/// A request without a seed gets one that nobody can foresee.
fn fresh_seed() -> u64 {
    RandomState::new().hash_one(Instant::now())
}

fn logit_bias(map: &serde_json::Map<String, Value>, server: &Server) -> Result<Vec<(u32, f32)>, ApiError> {
    let wrong = |message: String| ApiError::invalid("logit_bias", message);
    if map.len() > MAX_TOKEN_LIST {
        return Err(wrong(format!("logit_bias: expected at most {MAX_TOKEN_LIST} entries, found {}", map.len())));
    }
    let vocab_size = server.model()?.engine.about().limits.vocab_size;
    map.iter()
        .map(|(key, value)| {
            let id = key.parse::<u32>().ok().filter(|id| *id < vocab_size).ok_or_else(|| {
                wrong(format!("logit_bias: expected token ids below {vocab_size} as keys, found {key:?}"))
            })?;
            let bias = value.as_f64().filter(|bias| (-100.0..=100.0).contains(bias)).ok_or_else(|| {
                wrong(format!("logit_bias: expected numbers from -100 to 100, found {value} for token {id}"))
            })?;
            Ok((id, bias as f32))
        })
        .collect()
}

/// Stop texts within their bounds.
///
/// # Errors
/// If there are too many, or one is empty or too long.
pub fn stops(stops: OneOrMany<String>) -> Result<Vec<String>, ApiError> {
    let stops = stops.into_vec();
    if stops.len() > MAX_STOPS {
        return Err(ApiError::invalid(
            "stop",
            format!("stop: expected at most {MAX_STOPS} texts, found {}", stops.len()),
        ));
    }
    match stops.iter().find(|stop| stop.is_empty() || stop.len() > MAX_STOP_BYTES) {
        Some(stop) => Err(ApiError::invalid(
            "stop",
            format!("stop: expected texts of 1 to {MAX_STOP_BYTES} bytes, found one of {}", stop.len()),
        )),
        None => Ok(stops),
    }
}

fn token_ids(name: &'static str, ids: &[u32]) -> Result<Vec<u32>, ApiError> {
    if ids.len() > MAX_TOKEN_LIST {
        let message = format!("{name}: expected at most {MAX_TOKEN_LIST} ids, found {}", ids.len());
        return Err(ApiError::invalid(name, message));
    }
    Ok(ids.to_vec())
}

/// `max_tokens` within what the context has room for; absent: all that there is room for.
///
/// # Errors
/// If prompt and answer can't both fit.
pub fn max_tokens(asked: Option<u64>, param: &'static str, prompt: usize, context: u32) -> Result<u32, ApiError> {
    let room = u64::from(context).saturating_sub(prompt as u64);
    let wrong = |message: String| ApiError::invalid(param, message).code("context_length_exceeded");
    match asked {
        _ if room == 0 => Err(wrong(format!(
            "the prompt has {prompt} tokens, but the context has room for {context} in all, one of them for the answer; \
             shorten the prompt or start the server with a larger --max_seq_len"
        ))),
        None => Ok(u32::try_from(room).unwrap_or(u32::MAX)),
        Some(asked) if asked > room => Err(wrong(format!(
            "{param}: the prompt has {prompt} tokens and the answer may have {asked}, but the context has room for \
             {context} in all; ask for at most {room}, or leave it out"
        ))),
        Some(asked) => Ok(u32::try_from(asked).unwrap_or(u32::MAX)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_context_bounds_the_answer() {
        assert_eq!(max_tokens(None, "max_tokens", 10, 100).unwrap(), 90);
        assert_eq!(max_tokens(Some(90), "max_tokens", 10, 100).unwrap(), 90);
        for (asked, prompt) in [(Some(91), 10), (Some(u64::MAX), 10), (None, 100), (Some(1), 1000)] {
            let error = max_tokens(asked, "max_tokens", prompt, 100).unwrap_err();
            assert_eq!(error.code, Some("context_length_exceeded"));
            assert!(error.message.contains("100"), "{}", error.message);
        }
    }

    #[test]
    fn ranges() {
        assert!(in_range("top_p", Some(0.0), f32::MIN_POSITIVE, 1.0).unwrap_err().message.contains("more than 0"));
        assert!(in_range("t", Some(f32::NAN), 0.0, 2.0).is_err());
        assert_eq!(top_k(-1).unwrap(), 0);
        assert!(top_k(-2).is_err() && top_k(i64::MAX).is_err());
        assert_eq!((temperature(1e-3), temperature(0.0), temperature(0.5)), (0.01, 0.0, 0.5));
        assert!(stops(OneOrMany::Many(vec!["a".into(); MAX_STOPS + 1])).is_err());
        assert!(stops(OneOrMany::One(String::new())).is_err());
        assert!(stops(OneOrMany::One("x".repeat(MAX_STOP_BYTES + 1))).is_err());
    }
}
