//! From roles to tensors: finds the tensors of every weight by name, checks their shapes and types, and keeps the account
//! of which ones are used.

use std::collections::BTreeSet;

use qwen_formats::DType;
use qwen_ir::{Graph, Transform, WeightDecl, WeightId, WeightSource};

use super::config::{BlockScale, Dialect, ModelConfig};
use super::error::ModelError;
use super::table::IGNORED_SUFFIXES;
use super::tensors::{TensorIndex, TensorSpec};

/// What a weight is used for, and so which storage types it may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    /// Operand of a product: floats, blocks, or 8-bit floats with block scales.
    Matrix,
    /// A table to look rows up in: floats or blocks.
    Table,
    /// Norm weight or bias: becomes f32.
    Vector,
    /// Up-projection of the latent: a plain float, other types become f32.
    Latent,
}

/// A linear layer's declarations.
#[derive(Debug, Clone, Copy)]
pub(super) struct LinearWeights {
    pub(super) weight: WeightId,
    pub(super) scale: Option<WeightId>,
    pub(super) bias: Option<WeightId>,
}

/// Layers that have a weight; `None` for a weight outside of the layers.
type Layers<'a> = Option<&'a [u32]>;

/// Declares weights in a graph.
#[derive(Debug)]
pub(super) struct Weights<'a> {
    config: &'a ModelConfig,
    tensors: &'a TensorIndex,
    used: BTreeSet<String>,
}

impl<'a> Weights<'a> {
    pub(super) const fn new(config: &'a ModelConfig, tensors: &'a TensorIndex) -> Self {
        Self { config, tensors, used: BTreeSet::new() }
    }

    /// Name patterns of a role in the dialect at hand.
    fn patterns(&self, role: &str) -> Result<&'static [&'static str], ModelError> {
        let name = self.config.family.weight_name(role).ok_or_else(|| {
            ModelError::unsupported("weight", role.to_owned(), format!("those of a {} model", self.config.family.name))
        })?;
        Ok(match self.config.dialect {
            Dialect::HuggingFace => name.hf,
            Dialect::Gguf => std::slice::from_ref(&name.gguf),
        })
    }

    /// The first pattern of the role that the checkpoint follows in this layer, or else the first pattern.
    fn pattern(&self, role: &str, part: &str, layer: Option<u32>) -> Result<&'static str, ModelError> {
        let patterns = self.patterns(role)?;
        let followed = patterns.iter().find(|pattern| self.tensors.contains(&expand(pattern, part, layer, 0)));
        let chosen = followed.or_else(|| patterns.first()).copied();
        chosen.ok_or_else(|| ModelError::unsupported("weight", role.to_owned(), "GGUF files only"))
    }

    /// Whether the checkpoint has the tensor of a role (the first expert's, if there is one per expert).
    pub(super) fn has(&self, role: &str, layer: u32) -> Result<bool, ModelError> {
        let patterns = self.patterns(role)?;
        Ok(patterns.iter().any(|pattern| self.tensors.contains(&expand(pattern, "weight", Some(layer), 0))))
    }

    /// Looks a tensor up and counts it as used.
    fn take(&mut self, name: &str, shape: &[u64]) -> Result<&'a TensorSpec, ModelError> {
        let Some(spec) = self.tensors.get(name) else {
            return Err(ModelError::MissingTensor { name: name.to_owned(), expected: shape.to_vec() });
        };
        // Writers drop the outermost dimension of one: the bytes are the same.
        if spec.shape != shape && !(shape.first() == Some(&1) && shape.get(1..) == Some(&spec.shape)) {
            let (expected, found) = (shape.to_vec(), spec.shape.clone());
            return Err(ModelError::WrongShape { name: name.to_owned(), expected, found });
        }
        self.used.insert(name.to_owned());
        Ok(spec)
    }

    /// Counts tensors of a role as used if they are there.
    fn ignore(&mut self, role: &str, layers: &[u32]) -> Result<(), ModelError> {
        for layer in layers {
            self.used.insert(expand(self.pattern(role, "weight", Some(*layer))?, "weight", Some(*layer), 0));
        }
        Ok(())
    }

    fn declare(
        graph: &mut Graph,
        name: String,
        shape: &[u64],
        sources: Vec<(u32, WeightSource)>,
        layers: Layers<'_>,
    ) -> WeightId {
        let first_layer = layers.and_then(|layers| layers.first()).copied();
        let mut dense = Vec::with_capacity(sources.len());
        for (layer, source) in sources {
            // Layers of another kind in between have no such weight, but sources are indexed by layer.
            while first_layer.is_some_and(|first| dense.len() < (layer - first) as usize) {
                let absent = WeightSource { dtype: source.dtype, tensors: Vec::new(), transform: Transform::AsStored };
                dense.push(absent);
            }
            dense.push(source);
        }
        graph.add_weight(WeightDecl { name, shape: shape.to_vec(), sources: dense, first_layer, slice: None })
    }

    /// A linear layer [out, in] with an optional bias.
    pub(super) fn linear(
        &mut self,
        graph: &mut Graph,
        role: &str,
        (outputs, inputs): (u64, u64),
        bias: bool,
        layers: Layers<'_>,
    ) -> Result<LinearWeights, ModelError> {
        let (weight, scale) = self.weight(graph, role, Use::Matrix, &[outputs, inputs], layers)?;
        let bias = bias.then(|| self.vector_part(graph, role, "bias", outputs, layers)).transpose()?;
        Ok(LinearWeights { weight, scale, bias })
    }

    /// A table of rows.
    pub(super) fn table(&mut self, graph: &mut Graph, role: &str, shape: [u64; 2]) -> Result<WeightId, ModelError> {
        Ok(self.weight(graph, role, Use::Table, &shape, None)?.0)
    }

    /// Norm weights.
    pub(super) fn vector(
        &mut self,
        graph: &mut Graph,
        role: &str,
        length: u64,
        layers: Layers<'_>,
    ) -> Result<WeightId, ModelError> {
        self.vector_part(graph, role, "weight", length, layers)
    }

    fn vector_part(
        &mut self,
        graph: &mut Graph,
        role: &str,
        part: &str,
        length: u64,
        layers: Layers<'_>,
    ) -> Result<WeightId, ModelError> {
        let mut sources = Vec::new();
        for layer in each(layers) {
            let name = expand(self.pattern(role, part, layer)?, part, layer, 0);
            let spec = self.take(&name, &[length])?;
            sources.push((layer.unwrap_or(0), plain(name, spec, Use::Vector)?));
        }
        Ok(Self::declare(graph, format!("{role}.{part}"), &[length], sources, layers))
    }

    /// A weight that is one tensor per layer, with its block scales.
    fn weight(
        &mut self,
        graph: &mut Graph,
        role: &str,
        wanted: Use,
        shape: &[u64],
        layers: Layers<'_>,
    ) -> Result<(WeightId, Option<WeightId>), ModelError> {
        let mut sources = Vec::new();
        let mut scales = Vec::new();
        for layer in each(layers) {
            let name = expand(self.pattern(role, "weight", layer)?, "weight", layer, 0);
            let spec = self.take(&name, shape)?;
            let scale = self.block_scale(&name, spec, shape)?;
            // Scales of a latent weight are applied when it is loaded; a table has nowhere to apply them.
            let latent = wanted == Use::Latent && scale.is_some();
            let mut source = plain(name, spec, if latent { Use::Matrix } else { wanted })?;
            if wanted == Use::Latent
                && let Some(scale) = &scale
            {
                source.dtype = DType::F32;
                source.transform = Transform::ToF32;
                source.tensors.extend(scale.tensors.iter().cloned());
            } else if let Some(scale) = scale {
                scales.push((layer.unwrap_or(0), scale));
            }
            sources.push((layer.unwrap_or(0), source));
        }
        let scale = self.declare_scale(graph, role, shape, &sources, scales, layers)?;
        Ok((Self::declare(graph, format!("{role}.weight"), shape, sources, layers), scale))
    }

    /// The scales of an 8-bit float weight.
    fn block_scale(
        &mut self,
        name: &str,
        spec: &TensorSpec,
        shape: &[u64],
    ) -> Result<Option<WeightSource>, ModelError> {
        if spec.dtype != DType::F8E4M3 {
            return Ok(None);
        }
        let Some(block) = self.config.block_scale else {
            let expected = "a type without separate scales (the config has no quantization_config)";
            return Err(ModelError::WrongType { name: name.to_owned(), expected, found: spec.dtype });
        };
        let scale_name = format!("{name}_scale_inv");
        let scale = self.take(&scale_name, &scale_shape(shape, block))?;
        Ok(Some(plain(scale_name, scale, Use::Vector)?))
    }

    fn declare_scale(
        &self,
        graph: &mut Graph,
        role: &str,
        shape: &[u64],
        sources: &[(u32, WeightSource)],
        scales: Vec<(u32, WeightSource)>,
        layers: Layers<'_>,
    ) -> Result<Option<WeightId>, ModelError> {
        let (Some(block), false) = (self.config.block_scale, scales.is_empty()) else { return Ok(None) };
        if let Some((_, source)) = sources.iter().find(|(_, source)| source.dtype != DType::F8E4M3) {
            let name = source.tensors.first().cloned().unwrap_or_default();
            let expected = "f8_e4m3 as in the other layers";
            return Err(ModelError::WrongType { name, expected, found: source.dtype });
        }
        let name = format!("{role}.scale");
        Ok(Some(Self::declare(graph, name, &scale_shape(shape, block), scales, layers)))
    }

    /// The up-projection of the latent, which GGUF files may hold in two parts.
    pub(super) fn kv_b(&mut self, graph: &mut Graph, layers: &[u32]) -> Result<WeightId, ModelError> {
        let config = self.config;
        let Some(mla) = config.mla else {
            return Err(ModelError::unsupported("weight", "attn_kv_b", "models with latent attention"));
        };
        let [heads, nope, value, latent] =
            [config.num_attention_heads, mla.qk_nope_head_dim, mla.v_head_dim, mla.kv_lora_rank].map(u64::from);
        let shape = [heads * (nope + value), latent];
        let first = layers.first().copied().unwrap_or(0);
        let split = config.dialect == Dialect::Gguf && self.has("attn_k_b", first)?;
        if split && !self.has("attn_kv_b", first)? {
            let mut sources = Vec::with_capacity(layers.len());
            for layer in layers {
                let [k, v] = ["attn_k_b", "attn_v_b"].map(|role| self.pattern(role, "weight", Some(*layer)));
                let (k, v) = (expand(k?, "weight", Some(*layer), 0), expand(v?, "weight", Some(*layer), 0));
                self.take(&k, &[heads, latent, nope])?;
                self.take(&v, &[heads, value, latent])?;
                let transform = Transform::MergeKvB { num_heads: heads, nope_dim: nope, value_dim: value };
                sources.push((*layer, WeightSource { dtype: DType::F32, tensors: vec![k, v], transform }));
            }
            return Ok(Self::declare(graph, "attn_kv_b.weight".to_owned(), &shape, sources, Some(layers)));
        }
        if split {
            // Some writers store both forms.
            self.ignore("attn_k_b", layers)?;
            self.ignore("attn_v_b", layers)?;
        }
        Ok(self.weight(graph, "attn_kv_b", Use::Latent, &shape, Some(layers))?.0)
    }

    /// Gate, up and down projections of all experts: [E, out, in] each.
    pub(super) fn experts(
        &mut self,
        graph: &mut Graph,
        (experts, hidden, width): (u64, u64, u64),
        layers: &[u32],
    ) -> Result<[LinearWeights; 3], ModelError> {
        let (inward, outward) = ([experts, width, hidden], [experts, hidden, width]);
        let first = layers.first().copied().unwrap_or(0);
        let fused = self.has("ffn_gate_up_exps", first)?;
        let mut gate_or_up = |role, first_row| {
            let part = fused.then_some(("ffn_gate_up_exps", first_row));
            self.stacked(graph, role, part, &inward, layers)
        };
        let (gate, up) = (gate_or_up("ffn_gate_exps", 0)?, gate_or_up("ffn_up_exps", width)?);
        let down = self.stacked(graph, "ffn_down_exps", None, &outward, layers)?;
        Ok([gate, up, down])
    }

    fn stacked(
        &mut self,
        graph: &mut Graph,
        role: &str,
        fused: Option<(&str, u64)>,
        shape: &[u64; 3],
        layers: &[u32],
    ) -> Result<LinearWeights, ModelError> {
        let mut sources = Vec::new();
        let mut scales = Vec::new();
        for layer in layers {
            let (source, scale) = match fused {
                Some((fused_role, first)) => self.expert_rows(fused_role, first, shape, *layer)?,
                None => self.expert_stack(role, shape, *layer)?,
            };
            sources.push((*layer, source));
            scales.extend(scale.map(|scale| (*layer, scale)));
        }
        let scale = self.declare_scale(graph, role, shape, &sources, scales, Some(layers))?;
        let weight = Self::declare(graph, format!("{role}.weight"), shape, sources, Some(layers));
        Ok(LinearWeights { weight, scale, bias: None })
    }

    /// Part of the rows of every expert in a fused tensor.
    fn expert_rows(
        &mut self,
        role: &str,
        first: u64,
        &[experts, rows, columns]: &[u64; 3],
        layer: u32,
    ) -> Result<(WeightSource, Option<WeightSource>), ModelError> {
        let whole = [experts, 2 * rows, columns];
        let name = expand(self.pattern(role, "weight", Some(layer))?, "weight", Some(layer), 0);
        let spec = self.take(&name, &whole)?;
        let scale = match self.block_scale(&name, spec, &whole)? {
            None => None,
            Some(scale) if scale.dtype == DType::F32 && scale.transform == Transform::AsStored => {
                let block = u64::from(self.config.block_scale.map_or(1, |block| block.rows));
                if !rows.is_multiple_of(block) {
                    let supported = format!("a multiple of {block} in fused 8-bit experts");
                    return Err(ModelError::unsupported("moe_intermediate_size", rows.to_string(), supported));
                }
                Some(WeightSource { transform: Transform::ExpertRows { first: first / block }, ..scale })
            }
            Some(_) => return Err(not_f32_scale(format!("{name}_scale_inv"), self.tensors)),
        };
        let source = plain(name, spec, Use::Matrix)?;
        Ok((WeightSource { transform: Transform::ExpertRows { first }, ..source }, scale))
    }

    /// One tensor of all experts, or one tensor per expert.
    fn expert_stack(
        &mut self,
        role: &str,
        shape: &[u64; 3],
        layer: u32,
    ) -> Result<(WeightSource, Option<WeightSource>), ModelError> {
        let pattern = self.pattern(role, "weight", Some(layer))?;
        if !pattern.contains("{expert}") {
            let name = expand(pattern, "weight", Some(layer), 0);
            let spec = self.take(&name, shape)?;
            let scale = self.block_scale(&name, spec, shape)?;
            return Ok((plain(name, spec, Use::Matrix)?, scale));
        }
        let [experts, rows, columns] = *shape;
        let mut names = Vec::new();
        let mut scale_names = Vec::new();
        let mut dtype = None;
        for expert in 0..experts {
            let name = expand(pattern, "weight", Some(layer), expert);
            let spec = self.take(&name, &[rows, columns])?;
            if *dtype.get_or_insert(spec.dtype) != spec.dtype {
                let expected = "the same as that of the layer's first expert";
                return Err(ModelError::WrongType { name, expected, found: spec.dtype });
            }
            if let Some(scale) = self.block_scale(&name, spec, &[rows, columns])? {
                if scale.transform != Transform::AsStored {
                    return Err(not_f32_scale(format!("{name}_scale_inv"), self.tensors));
                }
                scale_names.extend(scale.tensors);
            }
            // The type check is per tensor: it names the one that fails.
            names.extend(plain(name, spec, Use::Matrix)?.tensors);
        }
        let stack = |dtype, tensors| WeightSource { dtype, tensors, transform: Transform::Stack };
        let scale = (!scale_names.is_empty()).then(|| stack(DType::F32, scale_names));
        Ok((stack(dtype.unwrap_or(DType::F32), names), scale))
    }

    /// Refuses tensors that nothing used.
    pub(super) fn finish(self) -> Result<(), ModelError> {
        let mut surplus = self.tensors.iter().filter(|(name, _)| !self.used.contains(*name) && !self.ignorable(name));
        let Some((name, spec)) = surplus.next() else { return Ok(()) };
        Err(ModelError::SurplusTensor {
            name: name.to_owned(),
            shape: spec.shape.clone(),
            family: self.config.family.name,
            others: surplus.count(),
        })
    }

    fn ignorable(&self, name: &str) -> bool {
        if IGNORED_SUFFIXES.iter().any(|suffix| name.ends_with(suffix)) {
            return true;
        }
        let (prefix, divisors) = match self.config.dialect {
            Dialect::HuggingFace => ("model.layers.", false),
            Dialect::Gguf => ("blk.", name == "rope_freqs.weight" && self.config.rope.divisors.is_some()),
        };
        // Tied heads that a writer stored all the same.
        let head = self.config.tie_word_embeddings && name == "lm_head.weight";
        let layer = name.strip_prefix(prefix).and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
        let first = self.config.num_hidden_layers;
        let extra = first..first.saturating_add(self.config.num_nextn_predict_layers);
        divisors || head || layer.is_some_and(|layer| extra.contains(&layer))
    }
}

fn each(layers: Layers<'_>) -> impl Iterator<Item = Option<u32>> {
    let outside = layers.is_none().then_some(None);
    outside.into_iter().chain(layers.unwrap_or_default().iter().copied().map(Some))
}

fn expand(pattern: &str, part: &str, layer: Option<u32>, expert: u64) -> String {
    let name = pattern.replace("{part}", part);
    let name = layer.map_or_else(|| name.clone(), |layer| name.replace("{layer}", &layer.to_string()));
    if name.contains("{expert}") { name.replace("{expert}", &expert.to_string()) } else { name }
}

/// Shape of the scales of a weight: blocks of the last two dimensions.
fn scale_shape(shape: &[u64], block: BlockScale) -> Vec<u64> {
    let sizes = [u64::from(block.columns), u64::from(block.rows)].into_iter().chain(std::iter::repeat(1));
    let mut scales: Vec<u64> = shape.iter().rev().zip(sizes).map(|(n, size)| n.div_ceil(size)).collect();
    scales.reverse();
    scales
}

fn not_f32_scale(name: String, tensors: &TensorIndex) -> ModelError {
    let found = tensors.get(&name).map_or(DType::F32, |spec| spec.dtype);
    ModelError::WrongType { name, expected: "f32 (scales of experts)", found }
}

/// A source of one tensor, if its type will do.
fn plain(name: String, spec: &TensorSpec, wanted: Use) -> Result<WeightSource, ModelError> {
    let dtype = spec.dtype;
    let float = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    let block = dtype.is_block_quantised();
    let (fits, expected) = match wanted {
        Use::Matrix => (float || block || dtype == DType::F8E4M3, "f32, f16, bf16, f8_e4m3 or a block type"),
        Use::Table | Use::Latent => (float || block, "f32, f16, bf16 or a block type"),
        Use::Vector => (float, "f32, f16 or bf16"),
    };
    if !fits {
        return Err(ModelError::WrongType { name, expected, found: dtype });
    }
    let convert = match wanted {
        Use::Vector => dtype != DType::F32,
        Use::Latent => !float,
        Use::Matrix | Use::Table => false,
    };
    let (dtype, transform) = if convert { (DType::F32, Transform::ToF32) } else { (dtype, Transform::AsStored) };
    Ok(WeightSource { dtype, tensors: vec![name], transform })
}
