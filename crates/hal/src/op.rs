//! Descriptions of ops, built and checked in safe Rust, valid for a plugin as long as they are borrowed.

use std::sync::Arc;

use qwen_hal_abi::ops::{QHAL_COMPUTE_F32, QHAL_DTYPE_F32, QHAL_DTYPE_NONE, dtype_block, op_name};
use qwen_hal_abi::{
    QHAL_MAX_RANK, QHAL_PHASE_DECODE, QHAL_PHASE_MIXED, QHAL_PHASE_PREFILL, QHAL_QUANT_BLOCK_SCALE, QHAL_QUANT_NONE,
    QHAL_TOLERANCE_EXACT, QHAL_TOLERANCE_LOOSE, QHAL_TOLERANCE_NORMAL, QHAL_TOLERANCE_STATISTICAL,
    QHAL_TOLERANCE_TIGHT, qhal_attr, qhal_epilogue, qhal_op_desc, qhal_tensor_desc,
};

use crate::error::PlanError;

/// A dimension of an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dim {
    /// The same at every launch.
    Fixed(i64),
    /// Given at launch as value number `index`, within `min..=max`.
    Symbol {
        /// Which value of the launch.
        index: u32,
        /// Smallest value.
        min: i64,
        /// Largest value.
        max: i64,
        /// What the plan is tuned for.
        expected: i64,
    },
}

impl Dim {
    /// A symbol that is planned for its largest value.
    #[must_use]
    pub const fn symbol(index: u32, min: i64, max: i64) -> Self {
        Self::Symbol { index, min, max, expected: max }
    }
}

impl From<i64> for Dim {
    fn from(n: i64) -> Self {
        Self::Fixed(n)
    }
}
impl From<i32> for Dim {
    fn from(n: i32) -> Self {
        Self::Fixed(n.into())
    }
}
impl From<usize> for Dim {
    fn from(n: usize) -> Self {
        // Out of range for an i64 is out of range for the check that follows.
        Self::Fixed(i64::try_from(n).unwrap_or(-1))
    }
}

/// An operand. Dense at the sizes of each launch unless strides are given.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct TensorDesc(qhal_tensor_desc);

impl TensorDesc {
    /// A tensor of a `QHAL_DTYPE_*` type. More than eight dimensions are refused when the op is used.
    #[must_use]
    pub fn new(dtype: u32, dims: &[Dim]) -> Self {
        let mut raw = qhal_tensor_desc {
            struct_size: size_of::<qhal_tensor_desc>() as u32,
            dtype,
            rank: u32::try_from(dims.len()).unwrap_or(u32::MAX),
            quant_scheme: QHAL_QUANT_NONE,
            dims: [0; QHAL_MAX_RANK],
            strides: [0; QHAL_MAX_RANK],
            dim_min: [0; QHAL_MAX_RANK],
            dim_max: [0; QHAL_MAX_RANK],
            dim_symbol: [0; QHAL_MAX_RANK],
            layout_id: 0,
            flags: 0,
            block: [0; 2],
        };
        let mut stride = 1_i64;
        for (i, dim) in dims.iter().enumerate().take(QHAL_MAX_RANK).rev() {
            (raw.dims[i], raw.dim_min[i], raw.dim_max[i], raw.dim_symbol[i]) = match *dim {
                Dim::Fixed(n) => (n, n, n, 0),
                Dim::Symbol { index, min, max, expected } => (expected, min, max, index.saturating_add(1)),
            };
            // 0, dense at the sizes of the launch, where an inner dimension is a symbol.
            raw.strides[i] = stride;
            stride = match *dim {
                Dim::Fixed(n) => stride.saturating_mul(n.max(0)),
                Dim::Symbol { .. } => 0,
            };
        }
        Self(raw)
    }

    /// A tensor of float32.
    #[must_use]
    pub fn f32(dims: &[Dim]) -> Self {
        Self::new(QHAL_DTYPE_F32, dims)
    }

    /// An absent optional operand.
    #[must_use]
    pub fn none() -> Self {
        Self::new(QHAL_DTYPE_NONE, &[])
    }

    /// Elements from one index of the outermost dimension to the next.
    #[must_use]
    pub const fn with_row_stride(mut self, elements: i64) -> Self {
        self.0.strides[0] = elements;
        self
    }

    /// Elements from one index to the next, per dimension.
    #[must_use]
    pub fn with_strides(mut self, strides: &[i64]) -> Self {
        for (to, from) in self.0.strides.iter_mut().zip(strides) {
            *to = *from;
        }
        self
    }

    /// The next operand holds f32 scales, one per block of rows x columns.
    #[must_use]
    pub const fn with_block_scale(mut self, rows: u32, columns: u32) -> Self {
        self.0.quant_scheme = QHAL_QUANT_BLOCK_SCALE;
        self.0.block = [rows, columns];
        self
    }

    /// Whether it stands for an absent operand.
    #[must_use]
    pub const fn is_none(&self) -> bool {
        self.0.dtype == QHAL_DTYPE_NONE
    }
    /// As plugins see it.
    #[must_use]
    pub const fn raw(&self) -> &qhal_tensor_desc {
        &self.0
    }
}

/// What a step consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Many tokens of one or several prompts.
    Prefill,
    /// One token per sequence.
    Decode,
    /// Both.
    Mixed,
}

/// How far a result may be from the definition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tolerance {
    /// Not at all.
    Exact,
    /// float32 rounding.
    Tight,
    /// Half-precision rounding.
    Normal,
    /// 8-bit rounding.
    Loose,
    /// Judged by distributions only.
    Statistical,
}

/// Description of one op: kind, operands, attributes. Built step by step, checked when it is used.
#[derive(Debug, Clone)]
pub struct OpDesc {
    kind: u32,
    phase: Phase,
    compute: u32,
    accumulate: u32,
    tolerance: Tolerance,
    inputs: Vec<TensorDesc>,
    outputs: Vec<TensorDesc>,
    attrs: Vec<qhal_attr>,
    epilogues: Vec<qhal_epilogue>,
}

impl OpDesc {
    /// An op of a `QHAL_OP_*` kind, computed in float32.
    #[must_use]
    pub const fn new(kind: u32) -> Self {
        Self {
            kind,
            phase: Phase::Mixed,
            compute: QHAL_COMPUTE_F32,
            accumulate: QHAL_DTYPE_F32,
            tolerance: Tolerance::Tight,
            inputs: Vec::new(),
            outputs: Vec::new(),
            attrs: Vec::new(),
            epilogues: Vec::new(),
        }
    }
    /// Adds an operand that is read.
    #[must_use]
    pub fn input(mut self, tensor: TensorDesc) -> Self {
        self.inputs.push(tensor);
        self
    }
    /// Adds an operand that is written.
    #[must_use]
    pub fn output(mut self, tensor: TensorDesc) -> Self {
        self.outputs.push(tensor);
        self
    }
    /// Adds an integer attribute (`QHAL_ATTR_*`).
    #[must_use]
    pub fn attr_int(mut self, key: u32, value: i64) -> Self {
        self.attrs.push(qhal_attr::int(key, value));
        self
    }
    /// Adds a real attribute (`QHAL_ATTR_*`).
    #[must_use]
    pub fn attr_real(mut self, key: u32, value: f64) -> Self {
        self.attrs.push(qhal_attr::real(key, value));
        self
    }
    /// Adds an epilogue (`QHAL_EPILOGUE_*`) that reads operand `input`, if any.
    #[must_use]
    pub fn epilogue(mut self, kind: u32, input: Option<u32>, param: u32) -> Self {
        self.epilogues.push(qhal_epilogue {
            struct_size: size_of::<qhal_epilogue>() as u32,
            kind,
            input: input.unwrap_or(u32::MAX),
            param,
        });
        self
    }
    /// Sets the form of the products (`QHAL_COMPUTE_*`).
    #[must_use]
    pub const fn compute(mut self, compute: u32) -> Self {
        self.compute = compute;
        self
    }
    /// Type of the accumulators of products, a `QHAL_DTYPE_*` code; float32 unless said.
    #[must_use]
    pub const fn accumulate(mut self, dtype: u32) -> Self {
        self.accumulate = dtype;
        self
    }
    /// Sets the tolerance.
    #[must_use]
    pub const fn tolerance(mut self, tolerance: Tolerance) -> Self {
        self.tolerance = tolerance;
        self
    }
    /// Sets the phase.
    #[must_use]
    pub const fn phase(mut self, phase: Phase) -> Self {
        self.phase = phase;
        self
    }

    /// `QHAL_OP_*`.
    #[must_use]
    pub const fn kind(&self) -> u32 {
        self.kind
    }
    /// Name of the kind.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        op_name(self.kind)
    }
    /// Operands that are read.
    #[must_use]
    pub fn inputs(&self) -> &[TensorDesc] {
        &self.inputs
    }
    /// Operands that are written.
    #[must_use]
    pub fn outputs(&self) -> &[TensorDesc] {
        &self.outputs
    }

    /// As plugins see it; valid as long as `self` is borrowed and not changed.
    pub(crate) fn raw(&self, num_symbols: usize) -> qhal_op_desc {
        qhal_op_desc {
            struct_size: size_of::<qhal_op_desc>() as u32,
            op_kind: self.kind,
            op_version: 1,
            phase: match self.phase {
                Phase::Prefill => QHAL_PHASE_PREFILL,
                Phase::Decode => QHAL_PHASE_DECODE,
                Phase::Mixed => QHAL_PHASE_MIXED,
            },
            compute: self.compute,
            accumulate: self.accumulate,
            tolerance: match self.tolerance {
                Tolerance::Exact => QHAL_TOLERANCE_EXACT,
                Tolerance::Tight => QHAL_TOLERANCE_TIGHT,
                Tolerance::Normal => QHAL_TOLERANCE_NORMAL,
                Tolerance::Loose => QHAL_TOLERANCE_LOOSE,
                Tolerance::Statistical => QHAL_TOLERANCE_STATISTICAL,
            },
            num_inputs: self.inputs.len() as u32,
            num_outputs: self.outputs.len() as u32,
            num_attrs: self.attrs.len() as u32,
            num_epilogues: self.epilogues.len() as u32,
            num_symbols: num_symbols as u32,
            inputs: self.inputs.as_ptr().cast(),
            outputs: self.outputs.as_ptr().cast(),
            attrs: self.attrs.as_ptr(),
            epilogues: self.epilogues.as_ptr(),
            next: std::ptr::null(),
        }
    }

    /// Checks what needs no knowledge of the kind, and gives the range of each symbol.
    pub(crate) fn check(&self, plugin: &Arc<str>) -> Result<Vec<(i64, i64)>, PlanError> {
        let invalid = |what: String, expected: String, found: String| PlanError::Invalid {
            plugin: Arc::clone(plugin),
            op: self.name(),
            what,
            expected,
            found,
        };
        for (what, count) in [("inputs", self.inputs.len()), ("outputs", self.outputs.len())] {
            if count > MAX_OPERANDS {
                return Err(invalid(what.into(), format!("at most {MAX_OPERANDS}"), count.to_string()));
            }
        }
        let mut symbols: Vec<Option<(i64, i64)>> = Vec::new();
        let inputs = self.inputs.iter().enumerate().map(|(i, t)| ("input", i, t));
        let outputs = self.outputs.iter().enumerate().map(|(i, t)| ("output", i, t));
        for (role, i, tensor) in inputs.chain(outputs) {
            check_tensor(&tensor.0, role == "output", &mut symbols)
                .map_err(|(expected, found)| invalid(format!("{role} {i}"), expected, found))?;
        }
        if let Some(e) = self.epilogues.iter().find(|e| e.input != u32::MAX && e.input as usize >= self.inputs.len()) {
            return Err(invalid(
                "epilogue".into(),
                format!("an operand below {}", self.inputs.len()),
                e.input.to_string(),
            ));
        }
        symbols
            .iter()
            .enumerate()
            .map(|(i, range)| {
                range.ok_or_else(|| invalid(format!("symbol {i}"), "a dimension that uses it".into(), "none".into()))
            })
            .collect()
    }
}

/// Most operands of one side; more would not fit the masks of a plan.
const MAX_OPERANDS: usize = 64;
/// Most symbols of an op.
const MAX_SYMBOLS: u32 = 32;

/// Bytes from the first element to the end of the last at these dimensions; `None` if that overflows or cuts a block.
pub(crate) fn extent_bytes(raw: &qhal_tensor_desc, dims: &[i64]) -> Option<u64> {
    let (block_len, block_bytes) = dtype_block(raw.dtype)?;
    if dims.contains(&0) {
        return Some(0);
    }
    let (mut last, mut inner) = (0_u64, 1_u64);
    for (dim, stride) in dims.iter().zip(raw.strides).rev() {
        let dim = u64::try_from(*dim).ok()?;
        let stride = if stride == 0 { inner } else { u64::try_from(stride).ok()? };
        last = last.checked_add((dim - 1).checked_mul(stride)?)?;
        inner = stride.checked_mul(dim)?;
    }
    let elements = last.checked_add(1)?;
    if !elements.is_multiple_of(u64::from(block_len)) {
        return None;
    }
    (elements / u64::from(block_len)).checked_mul(u64::from(block_bytes)).filter(|bytes| *bytes < 1 << 62)
}

fn check_tensor(
    raw: &qhal_tensor_desc,
    output: bool,
    symbols: &mut Vec<Option<(i64, i64)>>,
) -> Result<(), (String, String)> {
    if raw.dtype == QHAL_DTYPE_NONE {
        return if output { Err(("an output".into(), "an absent operand".into())) } else { Ok(()) };
    }
    let Some((block_len, _)) = dtype_block(raw.dtype) else {
        return Err(("a QHAL_DTYPE_* code".into(), raw.dtype.to_string()));
    };
    let rank = raw.rank as usize;
    if rank == 0 || rank > QHAL_MAX_RANK {
        return Err((format!("1 to {QHAL_MAX_RANK} dimensions"), raw.rank.to_string()));
    }
    if raw.quant_scheme == QHAL_QUANT_BLOCK_SCALE && raw.block.contains(&0) {
        return Err(("blocks of at least one row and column".into(), format!("{:?}", raw.block)));
    }
    let mut inner = 1_i64;
    for i in (0..rank).rev() {
        let (dim, min, max) = (raw.dims[i], raw.dim_min[i], raw.dim_max[i]);
        let stride = if raw.strides[i] == 0 { inner } else { raw.strides[i] };
        if min < 0 || min > dim || dim > max {
            return Err((format!("0 <= min <= expected <= max in dimension {i}"), format!("{min}, {dim}, {max}")));
        }
        if i == rank - 1 && stride != 1 {
            return Err(("an innermost stride of 1".into(), stride.to_string()));
        }
        // A dimension of at most one index may have any stride.
        if max > 1 && (stride < inner || (block_len > 1 && stride != inner)) {
            return Err((format!("a stride of {inner} or more in dimension {i}"), stride.to_string()));
        }
        let span = stride.max(inner).checked_mul(max.max(1));
        inner = span.ok_or_else(|| (format!("a size below 2^63 in dimension {i}"), format!("{max} x {stride}")))?;
        if raw.dim_symbol[i] != 0 {
            record_symbol(raw.dim_symbol[i] - 1, (min, max), symbols)?;
        }
    }
    let last = raw.dim_max[rank - 1];
    if last % i64::from(block_len) != 0 || (block_len > 1 && raw.dim_symbol[rank - 1] != 0) {
        return Err((format!("fixed rows of whole blocks of {block_len}"), last.to_string()));
    }
    if extent_bytes(raw, &raw.dim_max[..rank]).is_none() {
        return Err(("a tensor below 2^62 bytes".into(), format!("{:?}", &raw.dim_max[..rank])));
    }
    Ok(())
}

fn record_symbol(index: u32, range: (i64, i64), symbols: &mut Vec<Option<(i64, i64)>>) -> Result<(), (String, String)> {
    if index >= MAX_SYMBOLS {
        return Err((format!("at most {MAX_SYMBOLS} symbols"), format!("index {index}")));
    }
    let index = index as usize;
    if symbols.len() <= index {
        symbols.resize(index + 1, None);
    }
    match symbols.get_mut(index) {
        Some(Some(known)) if *known != range => {
            Err((format!("one range for symbol {index}"), format!("{known:?} and {range:?}")))
        }
        Some(slot) => {
            *slot = Some(range);
            Ok(())
        }
        None => Ok(()),
    }
}
