//! Indices, symbols, dimensions, types.

use std::fmt;

use qwen_formats::DType;

macro_rules! index {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u32);
        impl $name {
            /// As an index into the arena.
            #[must_use]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }
    };
}
index!(
    /// A value of a graph.
    ValueId
);
index!(
    /// A node of a graph.
    NodeId
);
index!(
    /// A weight declaration of a graph.
    WeightId
);
index!(
    /// A state declaration of a graph.
    StateId
);
index!(
    /// A template body of a graph.
    TemplateId
);

/// The run-time sizes that shapes may depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Symbol {
    /// Tokens of the step, over all its sequences.
    Tokens = 0,
    /// Sequences of the step.
    Sequences = 1,
    /// Rows whose logits are wanted.
    Rows = 2,
    /// Columns of the block table.
    Blocks = 3,
    /// Blocks of the cache.
    CacheBlocks = 4,
}

impl Symbol {
    /// All symbols, by index.
    pub const ALL: [Self; 5] = [Self::Tokens, Self::Sequences, Self::Rows, Self::Blocks, Self::CacheBlocks];

    /// Name in the text form.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tokens => "T",
            Self::Sequences => "S",
            Self::Rows => "R",
            Self::Blocks => "B",
            Self::CacheBlocks => "N",
        }
    }
    /// The symbol of a name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|s| s.name() == name)
    }
}

/// Inclusive range of a symbol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Smallest value.
    pub min: u64,
    /// Largest value.
    pub max: u64,
}

/// Bounds of every symbol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SymbolBounds(pub [Bounds; 5]);

impl SymbolBounds {
    /// Bounds of one symbol.
    #[must_use]
    pub const fn get(&self, symbol: Symbol) -> Bounds {
        self.0[symbol as usize]
    }
    /// The same with other bounds of one symbol.
    #[must_use]
    pub const fn with(mut self, symbol: Symbol, min: u64, max: u64) -> Self {
        self.0[symbol as usize] = Bounds { min, max };
        self
    }
}

impl Default for SymbolBounds {
    fn default() -> Self {
        Self([Bounds { min: 1, max: u32::MAX as u64 }; 5])
    }
}

/// A dimension: a constant or a symbol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dim {
    /// Fixed.
    Const(u64),
    /// Known at launch.
    Symbol(Symbol),
}

impl Dim {
    /// Largest value within the bounds.
    #[must_use]
    pub const fn max(self, bounds: &SymbolBounds) -> u64 {
        match self {
            Self::Const(n) => n,
            Self::Symbol(s) => bounds.get(s).max,
        }
    }
    /// The constant, if it is one.
    #[must_use]
    pub const fn constant(self) -> Option<u64> {
        match self {
            Self::Const(n) => Some(n),
            Self::Symbol(_) => None,
        }
    }
}

impl From<u64> for Dim {
    fn from(n: u64) -> Self {
        Self::Const(n)
    }
}
impl From<Symbol> for Dim {
    fn from(s: Symbol) -> Self {
        Self::Symbol(s)
    }
}
impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Const(n) => write!(f, "{n}"),
            Self::Symbol(s) => f.write_str(s.name()),
        }
    }
}

/// Element type and shape, outermost dimension first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorType {
    /// Storage type of an element. Of a weight with several storage types over the layers: that of layer 0.
    pub dtype: DType,
    /// Sizes.
    pub shape: Vec<Dim>,
}

impl TensorType {
    /// A type.
    #[must_use]
    pub fn new(dtype: DType, shape: impl IntoIterator<Item = Dim>) -> Self {
        Self { dtype, shape: shape.into_iter().collect() }
    }
    /// Last dimension as a constant; rows of activations always have one.
    #[must_use]
    pub fn columns(&self) -> Option<u64> {
        self.shape.last().and_then(|d| d.constant())
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.dtype.name())?;
        for (i, dim) in self.shape.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            write!(f, "{comma}{dim}")?;
        }
        f.write_str("]")
    }
}

/// How long a value lives, and so which pool holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemoryScope {
    /// As long as the model: weights, tables.
    Persistent,
    /// Grows with requests: the KV cache.
    Dynamic,
    /// Within one step: activations.
    Temporary,
}

/// How dynamic memory grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GrowthPattern {
    /// Never.
    Fixed,
    /// By blocks of so many tokens.
    PerBlock {
        /// Tokens of a block.
        tokens: u32,
    },
}

/// How far a result may be from the exact one; the limits are in [`Tolerance::nmse`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tolerance {
    /// Data movement: bit-equal.
    Exact,
    /// float32 rounding.
    Tight,
    /// Half-precision rounding.
    Normal,
    /// 8-bit rounding of activations.
    Loose,
    /// Judged on the distribution of logits only.
    Statistical,
}

impl Tolerance {
    /// All classes, strictest first.
    pub const ALL: [Self; 5] = [Self::Exact, Self::Tight, Self::Normal, Self::Loose, Self::Statistical];

    /// Largest normalised mean squared error of an op of this class.
    #[must_use]
    pub const fn nmse(self) -> f64 {
        match self {
            Self::Exact => 0.0,
            // 32-bit accumulation over a few thousand terms: relative error about 1e-6 in the worst of them.
            Self::Tight => 1e-10,
            // bfloat16 operands: relative rounding 2^-9, squared.
            Self::Normal => 4e-6,
            // int8 in groups of 32: step 1/127 of the largest, uniform error, about 1.7e-5 of the mean square for normal data.
            Self::Loose => 2e-4,
            Self::Statistical => f64::INFINITY,
        }
    }
    /// Name in the text form.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Tight => "tight",
            Self::Normal => "normal",
            Self::Loose => "loose",
            Self::Statistical => "statistical",
        }
    }
}

/// How much the logits suffer from an error here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Sensitivity {
    /// Experts' gate and up projections, query and key.
    Low,
    /// Most projections.
    Normal,
    /// Value, down and head projections; norms, routers, rotary tables.
    High,
}

impl Sensitivity {
    /// All degrees.
    pub const ALL: [Self; 3] = [Self::Low, Self::Normal, Self::High];
    /// Name in the text form.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::Normal => "normal",
            Self::High => "high",
        }
    }
}

/// Which steps a graph serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Tokens of prompts.
    Prefill,
    /// One generated token per sequence.
    Decode,
    /// Both together.
    Mixed,
}

impl Phase {
    /// All phases.
    pub const ALL: [Self; 3] = [Self::Prefill, Self::Decode, Self::Mixed];
    /// Name in the text form.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Mixed => "mixed",
        }
    }
}

/// In which type a device sums the products of a linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Sums {
    /// float32.
    #[default]
    F32,
    /// Half precision; after `span` products the sum is added to one in float32 and begun anew, never if 0.
    F16 {
        /// Products.
        span: u32,
    },
}

impl Sums {
    /// Longest span.
    pub const MAX_SPAN: u32 = 1 << 20;

    /// Largest normalised mean square error that summing so many products brings, if the unit adds `depth` of them at a time: every
    /// rounding is half a unit in the last place off, all in one direction.
    #[must_use]
    pub fn error(self, products: u64, depth: u32) -> f64 {
        let Self::F16 { span } = self else { return 0.0 };
        let summed = if span == 0 { products } else { products.min(u64::from(span)) };
        let roundings = summed.div_ceil(u64::from(depth.max(1)));
        (roundings as f64 * f64::from(f32::EPSILON) * 4096.0).powi(2)
    }
}

impl fmt::Display for Sums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F32 => f.write_str("f32"),
            Self::F16 { span: 0 } => f.write_str("f16"),
            Self::F16 { span } => write!(f, "f16/{span}"),
        }
    }
}

impl std::str::FromStr for Sums {
    type Err = ();
    fn from_str(text: &str) -> Result<Self, ()> {
        match text.split_once('/') {
            None if text == "f32" => Ok(Self::F32),
            None if text == "f16" => Ok(Self::F16 { span: 0 }),
            Some(("f16", span)) => match span.parse() {
                Ok(span) if (1..=Self::MAX_SPAN).contains(&span) => Ok(Self::F16 { span }),
                _ => Err(()),
            },
            _ => Err(()),
        }
    }
}

/// In which form a linear layer multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Compute {
    /// Products of f32 values.
    F32,
    /// int8 activations, one scale per 32 inputs.
    I8G32,
    /// int8 activations, one scale per 16 inputs.
    I8G16,
    /// Activations as a sum of two int8 terms per 32 inputs.
    I8x2G32,
    /// int8 activations per 32 inputs; a second term for groups with a spike, a value with a large share of its row's energy.
    I8sG32,
    /// bfloat16 activations.
    Bf16,
}

impl Compute {
    /// All forms.
    pub const ALL: [Self; 6] = [Self::F32, Self::I8G32, Self::I8G16, Self::I8x2G32, Self::I8sG32, Self::Bf16];

    /// The error class that results of this form fall into.
    #[must_use]
    pub const fn tolerance(self) -> Tolerance {
        match self {
            Self::F32 => Tolerance::Tight,
            // The second term holds the rounding error of the first: about 2^-14 of the largest in a group.
            Self::I8x2G32 | Self::Bf16 => Tolerance::Normal,
            Self::I8G32 | Self::I8G16 | Self::I8sG32 => Tolerance::Loose,
        }
    }
    /// This form for a weight of a storage type: a layer may store as floats what others have quantised, and there integer
    /// products make no sense; nor do bfloat16 products of quantised weights.
    #[must_use]
    pub const fn over(self, dtype: DType) -> Self {
        let integer = matches!(self, Self::I8G32 | Self::I8G16 | Self::I8x2G32 | Self::I8sG32);
        if integer == dtype.is_block_quantised() { self } else { Self::F32 }
    }
    /// Name in the text form.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::I8G32 => "i8g32",
            Self::I8G16 => "i8g16",
            Self::I8x2G32 => "i8x2g32",
            Self::I8sG32 => "i8sg32",
            Self::Bf16 => "bf16",
        }
    }
}
