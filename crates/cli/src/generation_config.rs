//! What a model's `generation_config.json` says of sampling.

use std::path::Path;

use qwen_engine::SamplingParams;
use qwen_models::files::{MAX_DESCRIPTION_BYTES, read_file};
use serde::Deserialize;

/// The entries that are used.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct GenerationConfig {
    do_sample: Option<bool>,
    temperature: Option<f32>,
    top_k: Option<u32>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
}

impl GenerationConfig {
    /// Of a directory; a file that can't be read says nothing here (loading has told of it).
    #[must_use]
    pub fn read(path: &Path) -> Self {
        let text = read_file(&path.join("generation_config.json"), MAX_DESCRIPTION_BYTES).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// What it says over what holds otherwise.
    #[must_use]
    pub fn over(&self, base: SamplingParams) -> SamplingParams {
        let temperature = match self.do_sample {
            Some(false) => 0.0,
            _ => self.temperature.unwrap_or(base.temperature),
        };
        SamplingParams {
            temperature,
            top_k: self.top_k.unwrap_or(base.top_k),
            top_p: self.top_p.unwrap_or(base.top_p),
            min_p: self.min_p.unwrap_or(base.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(base.repetition_penalty),
            ..base
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_may_ask_for_its_sampling() {
        let over = |text: &str| serde_json::from_str::<GenerationConfig>(text).unwrap().over(SamplingParams::default());
        let sampling = over(r#"{"temperature": 0.6, "top_p": 0.95, "bos_token_id": 1}"#);
        assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k), (0.6, 0.95, 0));
        assert_eq!(over(r#"{"do_sample": false, "temperature": 0.6}"#).temperature, 0.0);
        assert_eq!(over("{}"), SamplingParams::default());
    }
}
