//! What a person wants to know of a model before loading it.

use std::collections::BTreeMap;

use qwen_formats::DType;
use qwen_ir::Graph;

use super::config::ModelConfig;

/// Sizes of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelInfo {
    /// Name of the family.
    pub family: &'static str,
    /// Numbers in the weights, those of tied heads counted once.
    pub parameters: u64,
    /// Numbers that take part in one token: all but those of experts that are not chosen.
    pub active_parameters: u64,
    /// Bytes of the weights in memory.
    pub weight_bytes: u64,
    /// Bytes by storage type, largest first.
    pub storage: Vec<(DType, u64)>,
    /// Elements of the cache per token, over all layers.
    pub cache_elements_per_token: u64,
    /// Longest context that the model was made for.
    pub max_position_embeddings: u64,
}

impl ModelInfo {
    /// Reads the sizes off a graph.
    #[must_use]
    pub fn new(config: &ModelConfig, graph: &Graph) -> Self {
        let mut storage: BTreeMap<DType, u64> = BTreeMap::new();
        let (mut parameters, mut idle) = (0_u64, 0_u64);
        for decl in &graph.weights {
            let elements = decl.shape.iter().fold(1_u64, |product, dim| product.saturating_mul(*dim));
            let mut layers = 0_u64;
            for source in decl.sources.iter().filter(|source| !source.tensors.is_empty()) {
                let bytes = storage.entry(source.dtype).or_default();
                *bytes = bytes.saturating_add(source.dtype.bytes_for(elements).unwrap_or(0));
                layers += 1;
            }
            // Scales belong to the storage, not to the model.
            if !decl.name.ends_with(".scale") {
                parameters = parameters.saturating_add(elements.saturating_mul(layers));
            }
            if let Some(moe) = config.moe.filter(|_| decl.name.ends_with("_exps.weight")) {
                let unchosen = u64::from(moe.num_experts - moe.top_k.min(moe.num_experts));
                let per_expert = elements / u64::from(moe.num_experts.max(1));
                idle = idle.saturating_add(per_expert.saturating_mul(unchosen).saturating_mul(layers));
            }
        }
        let mut storage: Vec<_> = storage.into_iter().collect();
        storage.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        let cache = |state: &qwen_ir::StateDecl| state.layout.elements_per_token() * u64::from(state.layers);
        Self {
            family: config.family.name,
            parameters,
            active_parameters: parameters.saturating_sub(idle),
            weight_bytes: storage.iter().fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes)),
            storage,
            cache_elements_per_token: graph.states.iter().map(cache).sum(),
            max_position_embeddings: config.max_position_embeddings.into(),
        }
    }

    /// Mean bits of storage per parameter.
    #[must_use]
    pub fn bits_per_parameter(&self) -> f64 {
        self.weight_bytes as f64 * 8.0 / self.parameters.max(1) as f64
    }

    /// Storage types in words, e.g. `q4_1 93%, q6_k 7%`; types below 1% are left out unless nothing else is there.
    #[must_use]
    pub fn quantization(&self) -> String {
        let total = self.weight_bytes.max(1) as f64;
        let share = |(dtype, bytes): &(DType, u64)| (*dtype, *bytes as f64 / total * 100.0);
        let shares: Vec<_> = self.storage.iter().map(share).collect();
        let large = shares.iter().filter(|(_, percent)| *percent >= 1.0);
        let words: Vec<_> = large.map(|(dtype, percent)| format!("{dtype} {percent:.0}%")).collect();
        match (words.as_slice(), shares.first()) {
            ([_], Some((dtype, _))) | ([], Some((dtype, _))) => dtype.to_string(),
            _ => words.join(", "),
        }
    }

    /// Bytes of the cache per token, if it is stored in that type; `None` if a token isn't whole blocks of it.
    #[must_use]
    pub const fn cache_bytes_per_token(&self, dtype: DType) -> Option<u64> {
        dtype.bytes_for(self.cache_elements_per_token)
    }

    /// Bytes of weights and of the cache for so many tokens. Activations come on top.
    #[must_use]
    pub fn memory_for_context(&self, tokens: u64, cache: DType) -> Option<u64> {
        self.cache_bytes_per_token(cache)?.checked_mul(tokens)?.checked_add(self.weight_bytes)
    }
}
