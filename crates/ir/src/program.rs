//! The lowered form: a flat list of instructions whose operands have a place. The runtime turns each instruction into a
//! plan of a device once, and walks the list at every step.

use qwen_formats::DType;

use crate::{Compute, Dim, Op, StateId, Sums, SymbolBounds, Tolerance, WeightId};

/// What a step gives for each of the rows that are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum StepResult {
    /// Logits of the next token.
    #[default]
    Logits,
    /// The hidden state after the final norm, which the head would take.
    Hidden,
}

/// Pools of temporaries. Each is one buffer whose offsets are planned by lifetime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum ArenaPool {
    /// Activations.
    Temporary = 0,
    /// Router logits, chosen experts, dispatch tables: small, needed at once by every expert, fixed for the longest step.
    Router = 1,
    /// Activations of experts (results of grouped linear layers): large, and sized by how many tokens a step has.
    Expert = 2,
}

impl ArenaPool {
    /// All pools, by index.
    pub const ALL: [Self; 3] = [Self::Temporary, Self::Router, Self::Expert];
}

/// Where an operand is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// In a pool of temporaries, at this byte.
    Arena {
        /// Pool.
        pool: ArenaPool,
        /// First byte.
        offset: u64,
    },
    /// A weight: declaration and index into its sources.
    Weight {
        /// Declaration.
        id: WeightId,
        /// Which of its sources.
        source: u32,
    },
    /// Table `index` of [`Program::constants`].
    Constant {
        /// Index.
        index: u32,
    },
    /// The cache of a layer: declaration and index of the layer within it.
    State {
        /// Declaration.
        id: StateId,
        /// Index of the layer within the declaration.
        layer: u32,
    },
    /// Input `index` of [`Program::inputs`].
    Input {
        /// Index.
        index: u32,
    },
    /// The result of the step ([`Program::result`]).
    Result,
    /// An absent optional operand.
    Absent,
}

/// An operand.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Where it starts.
    pub place: Place,
    /// Byte offset within the place: the first column of a column range.
    pub byte_offset: u64,
    /// Storage type.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Vec<Dim>,
    /// Elements from row to row, a row being the innermost dimension; equals the row if dense. Rows of an operand of three
    /// dimensions are this far apart over both outer ones.
    pub row_stride: u64,
    /// Scales follow: rows and columns of a block.
    pub block_scale: Option<(u32, u32)>,
}

/// One launch.
#[derive(Debug, Clone, PartialEq)]
pub struct Instruction {
    /// Kind with attributes; never a source, `columns` or `layers`.
    pub op: Op,
    /// Operands read, in the order of the C ABI's op vocabulary; states included where the vocabulary lists a cache.
    pub inputs: Vec<Operand>,
    /// Operands written, likewise.
    pub outputs: Vec<Operand>,
    /// Form of products per segment; empty for ops without.
    pub compute: Vec<Compute>,
    /// How products are summed.
    pub sums: Sums,
    /// Error class.
    pub tolerance: Tolerance,
    /// Layer that it is of; none outside of the layers.
    pub layer: Option<u32>,
    /// Layer and part, for reports.
    pub origin: String,
}

/// A whole step.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    /// Name of the model.
    pub name: String,
    /// Bounds that the places were planned for.
    pub bounds: SymbolBounds,
    /// Names of the inputs.
    pub inputs: Vec<&'static str>,
    /// Computed tables.
    pub constants: Vec<Vec<f32>>,
    /// In order.
    pub instructions: Vec<Instruction>,
    /// Bytes of each [`ArenaPool`] at the largest sizes.
    pub arena_bytes: [u64; 3],
    /// What the step gives.
    pub result: StepResult,
    /// Values of a row of the result, which is f32 `[R, width]`: the vocabulary, or the hidden size.
    pub result_width: u64,
}
