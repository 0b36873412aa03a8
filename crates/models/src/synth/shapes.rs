//! Shapes of published models, from their configs. A new one is an entry here.

/// Sizes and constants of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// Name on the command line.
    pub name: &'static str,
    /// `general.architecture`.
    pub architecture: &'static str,
    /// Layers.
    pub layers: u32,
    /// Width of the hidden state.
    pub hidden: u32,
    /// Query heads.
    pub heads: u32,
    /// Key/value heads.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Width of a dense feed-forward layer.
    pub feed_forward: u32,
    /// Tokens.
    pub vocabulary: u32,
    /// Longest context.
    pub context: u32,
    /// Base of the rotary embedding.
    pub rope_theta: f32,
    /// How the rotary embedding reaches longer contexts.
    pub rope_scaling: RopeScaling,
    /// Epsilon of norms.
    pub epsilon: f32,
    /// The embedding is the output head too.
    pub tied: bool,
    /// Experts.
    pub experts: Option<Experts>,
    /// Latent attention.
    pub latent: Option<Latent>,
    /// `tokenizer.ggml.pre`.
    pub pre_tokenizer: &'static str,
}

/// How the rotary embedding reaches longer contexts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Llama 3: low frequencies divided by a factor, written as a table of divisors.
    Llama3 {
        /// The factor.
        factor: f32,
    },
    /// YaRN.
    Yarn {
        /// The factor.
        factor: f32,
    },
}

/// Experts of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experts {
    /// In all.
    pub count: u32,
    /// For each token.
    pub chosen: u32,
    /// Width of an expert.
    pub feed_forward: u32,
    /// Experts that every token passes.
    pub shared: u32,
    /// First layers that have none.
    pub dense_layers: u32,
    /// Groups, and how many may be chosen from.
    pub groups: (u32, u32),
    /// Factor on the router's weights.
    pub scale: f32,
}

/// Latent attention of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latent {
    /// Elements of the query's latent.
    pub query_rank: u32,
    /// Elements of the latent of keys and values.
    pub rank: u32,
    /// Elements of a query head that are not rotated.
    pub nope_dim: u32,
    /// Elements of a query head that are rotated.
    pub rope_dim: u32,
    /// Elements of a value head.
    pub value_dim: u32,
}

const QWEN2: Shape = Shape {
    name: "",
    architecture: "qwen2",
    layers: 0,
    hidden: 0,
    heads: 0,
    kv_heads: 0,
    head_dim: 128,
    feed_forward: 0,
    vocabulary: 151_936,
    context: 32_768,
    rope_theta: 1e6,
    rope_scaling: RopeScaling::None,
    epsilon: 1e-6,
    tied: true,
    experts: None,
    latent: None,
    pre_tokenizer: "qwen2",
};

const QWEN2_LARGE: Shape = Shape { vocabulary: 152_064, tied: false, ..QWEN2 };

/// Made of Qwen2.5-Math.
const DISTILL_MATH: Shape =
    Shape { context: 131_072, rope_theta: 1e4, tied: false, pre_tokenizer: "deepseek-r1-qwen", ..QWEN2 };

/// Made of Qwen2.5.
const DISTILL_QWEN: Shape = Shape { context: 131_072, epsilon: 1e-5, pre_tokenizer: "deepseek-r1-qwen", ..QWEN2_LARGE };

const LLAMA3: Shape = Shape {
    architecture: "llama",
    kv_heads: 8,
    vocabulary: 128_256,
    context: 131_072,
    rope_theta: 5e5,
    rope_scaling: RopeScaling::Llama3 { factor: 8.0 },
    epsilon: 1e-5,
    tied: false,
    pre_tokenizer: "llama-bpe",
    ..QWEN2
};

const QWEN3: Shape = Shape { architecture: "qwen3", kv_heads: 8, context: 40_960, ..QWEN2 };

const QWEN3_MOE: Shape =
    Shape { architecture: "qwen3moe", kv_heads: 4, tied: false, experts: Some(QWEN3_EXPERTS), ..QWEN3 };

const QWEN3_EXPERTS: Experts =
    Experts { count: 128, chosen: 8, feed_forward: 768, shared: 0, dense_layers: 0, groups: (1, 1), scale: 1.0 };

const DEEPSEEK_V3: Shape = Shape {
    name: "deepseek-v3",
    architecture: "deepseek2",
    layers: 61,
    hidden: 7168,
    heads: 128,
    kv_heads: 128,
    head_dim: 192,
    feed_forward: 18_432,
    vocabulary: 129_280,
    context: 163_840,
    rope_theta: 1e4,
    rope_scaling: RopeScaling::Yarn { factor: 40.0 },
    epsilon: 1e-6,
    tied: false,
    experts: Some(Experts {
        count: 256,
        chosen: 8,
        feed_forward: 2048,
        shared: 1,
        dense_layers: 3,
        groups: (8, 4),
        scale: 2.5,
    }),
    latent: Some(Latent { query_rank: 1536, rank: 512, nope_dim: 128, rope_dim: 64, value_dim: 128 }),
    pre_tokenizer: "deepseek-v3",
};

/// Layers, width of the hidden state, query heads, key/value heads, width of the feed-forward layer.
const fn sized(name: &'static str, like: Shape, [layers, hidden, heads, kv_heads, feed_forward]: [u32; 5]) -> Shape {
    Shape { name, layers, hidden, heads, kv_heads, feed_forward, ..like }
}

/// All shapes.
pub static SHAPES: [Shape; 27] = [
    Shape { head_dim: 64, ..sized("qwen2.5-0.5b", QWEN2, [24, 896, 14, 2, 4864]) },
    sized("qwen2.5-1.5b", QWEN2, [28, 1536, 12, 2, 8960]),
    sized("qwen2.5-3b", QWEN2, [36, 2048, 16, 2, 11_008]),
    sized("qwen2.5-7b", QWEN2_LARGE, [28, 3584, 28, 4, 18_944]),
    sized("qwen2.5-14b", QWEN2_LARGE, [48, 5120, 40, 8, 13_824]),
    sized("qwen2.5-32b", QWEN2_LARGE, [64, 5120, 40, 8, 27_648]),
    sized("qwen2.5-72b", QWEN2_LARGE, [80, 8192, 64, 8, 29_568]),
    sized("deepseek-r1-distill-qwen-1.5b", DISTILL_MATH, [28, 1536, 12, 2, 8960]),
    Shape { vocabulary: 152_064, ..sized("deepseek-r1-distill-qwen-7b", DISTILL_MATH, [28, 3584, 28, 4, 18_944]) },
    sized("deepseek-r1-distill-qwen-14b", DISTILL_QWEN, [48, 5120, 40, 8, 13_824]),
    sized("deepseek-r1-distill-qwen-32b", DISTILL_QWEN, [64, 5120, 40, 8, 27_648]),
    sized("deepseek-r1-distill-llama-8b", LLAMA3, [32, 4096, 32, 8, 14_336]),
    sized("deepseek-r1-distill-llama-70b", LLAMA3, [80, 8192, 64, 8, 28_672]),
    Shape {
        head_dim: 64,
        tied: true,
        rope_scaling: RopeScaling::Llama3 { factor: 32.0 },
        ..sized("llama-3.2-1b", LLAMA3, [16, 2048, 32, 8, 8192])
    },
    Shape {
        tied: true,
        rope_scaling: RopeScaling::Llama3 { factor: 32.0 },
        ..sized("llama-3.2-3b", LLAMA3, [28, 3072, 24, 8, 8192])
    },
    sized("llama-3.1-8b", LLAMA3, [32, 4096, 32, 8, 14_336]),
    sized("llama-3.1-70b", LLAMA3, [80, 8192, 64, 8, 28_672]),
    sized("qwen3-0.6b", QWEN3, [28, 1024, 16, 8, 3072]),
    sized("qwen3-1.7b", QWEN3, [28, 2048, 16, 8, 6144]),
    sized("qwen3-4b", QWEN3, [36, 2560, 32, 8, 9728]),
    Shape { tied: false, ..sized("qwen3-8b", QWEN3, [36, 4096, 32, 8, 12_288]) },
    Shape { tied: false, ..sized("qwen3-14b", QWEN3, [40, 5120, 40, 8, 17_408]) },
    Shape { tied: false, ..sized("qwen3-32b", QWEN3, [64, 5120, 64, 8, 25_600]) },
    sized("qwen3-30b-a3b", QWEN3_MOE, [48, 2048, 32, 4, 6144]),
    Shape {
        experts: Some(Experts { feed_forward: 1536, ..QWEN3_EXPERTS }),
        ..sized("qwen3-235b-a22b", QWEN3_MOE, [94, 4096, 64, 4, 12_288])
    },
    DEEPSEEK_V3,
    Shape { name: "deepseek-r1", ..DEEPSEEK_V3 },
];

impl Shape {
    /// Of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        SHAPES.iter().find(|shape| shape.name == name)
    }

    /// The same with fewer layers; of layers without experts at most as many remain as leave one with.
    #[must_use]
    pub fn with_layers(self, layers: u32) -> Self {
        let dense =
            |experts: Experts| Experts { dense_layers: experts.dense_layers.min(layers.saturating_sub(1)), ..experts };
        Self { layers, experts: self.experts.map(dense), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_heads_divide() {
        for (i, shape) in SHAPES.iter().enumerate() {
            assert!(SHAPES[..i].iter().all(|other| other.name != shape.name), "{}", shape.name);
            assert!(shape.heads.is_multiple_of(shape.kv_heads) && shape.layers > 0, "{}", shape.name);
            assert_eq!(Shape::named(shape.name), Some(shape));
        }
    }

    #[test]
    fn fewer_layers_keep_one_with_experts() {
        let dense = |layers| DEEPSEEK_V3.with_layers(layers).experts.unwrap().dense_layers;
        assert_eq!([1, 2, 4, 61].map(dense), [0, 1, 3, 3]);
    }
}
