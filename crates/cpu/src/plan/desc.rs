//! Reading a description: arrays walked with the stride that their elements state, shapes brought into the few forms that
//! kernels take. Allocates nothing unless it refuses.

use std::marker::PhantomData;

use qwen_formats::DType;
use qwen_hal_abi::ops::{QHAL_DTYPE_NONE, op_name};
use qwen_hal_abi::{
    QHAL_MAX_RANK, QHAL_QUANT_BLOCK_SCALE, QHAL_QUANT_NONE, qhal_attr, qhal_epilogue, qhal_op_desc, qhal_tensor_desc,
};

use crate::api::{Failure, element};

/// More operands, attributes or epilogues than this are a mistake.
const MAX_ITEMS: u32 = 64;
/// Dimensions above this cannot be memory.
const MAX_DIM: i64 = 1 << 40;

/// Which operand of an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    In(usize),
    Out(usize),
}
pub(super) use Place::{In, Out};

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            In(i) => write!(f, "input {i}"),
            Out(i) => write!(f, "output {i}"),
        }
    }
}

/// A number of rows, columns or values: fixed, or a factor times a symbol of the launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    factor: usize,
    symbol: Option<u32>,
    /// Largest value, the factor included.
    pub(super) max: usize,
    /// The value that estimates are made for.
    pub(super) expected: usize,
}

impl Extent {
    pub(super) const fn fixed(n: usize) -> Self {
        Self { factor: n, symbol: None, max: n, expected: n }
    }
    pub(super) const fn as_fixed(self) -> Option<usize> {
        if self.symbol.is_none() { Some(self.factor) } else { None }
    }
    /// What the launch's symbol is multiplied with, and its index; `None` for a fixed size.
    pub(super) fn symbol(self) -> Option<(usize, u32)> {
        self.symbol.map(|symbol| (self.factor.max(1), symbol))
    }
    /// The value of a launch; `None` if a symbol is missing or outside the planned range.
    pub(super) fn value(self, symbols: &[i64]) -> Option<usize> {
        let Some(symbol) = self.symbol else { return Some(self.factor) };
        let value = usize::try_from(*symbols.get(symbol as usize)?).ok()?.checked_mul(self.factor)?;
        (value <= self.max).then_some(value)
    }
    fn times(self, n: usize) -> Option<Self> {
        Some(Self {
            factor: self.factor.checked_mul(n)?,
            symbol: self.symbol,
            max: self.max.checked_mul(n)?,
            expected: self.expected.checked_mul(n)?,
        })
    }
    /// Whether both always have the same value.
    pub(super) fn same_as(self, other: Self) -> bool {
        self.factor == other.factor && self.symbol == other.symbol
    }
}

/// A matrix operand with a row stride. Vectors are one row, three dimensions are joined into rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mat {
    pub(super) place: Place,
    pub(super) dtype: DType,
    pub(super) rows: Extent,
    pub(super) cols: Extent,
    /// Elements from row to row, 0 for as many as a row has at the launch.
    pub(super) stride: usize,
}

impl Mat {
    pub(super) const fn fixed_cols(&self) -> usize {
        self.cols.max
    }
    /// Bytes of the values at the expected sizes.
    pub(super) fn expected_bytes(&self) -> f64 {
        let values = self.rows.expected as f64 * self.cols.expected as f64;
        values * self.dtype.block_bytes() as f64 / self.dtype.block_len() as f64
    }
}

/// A dense operand of one dimension.
#[derive(Debug, Clone, Copy)]
pub(super) struct Vector {
    pub(super) place: Place,
    pub(super) len: Extent,
}

/// A description under inspection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Desc<'a> {
    raw: &'a qhal_op_desc,
    life: PhantomData<&'a qhal_op_desc>,
}

impl<'a> Desc<'a> {
    /// A description that the host passed.
    ///
    /// # Safety
    /// `raw` is null or a description whose arrays have the stated lengths, valid for `'a`.
    pub(super) unsafe fn new(raw: *const qhal_op_desc) -> Result<Self, Failure> {
        // SAFETY: by the caller's promise.
        let raw = unsafe { raw.as_ref() }.ok_or_else(|| Failure::invalid("no description, expected one"))?;
        if (raw.struct_size as usize) < size_of::<qhal_op_desc>() {
            return Err(Failure::invalid(format!("a description of {} bytes, expected more", raw.struct_size)));
        }
        let arrays = [
            (raw.num_inputs, raw.inputs.is_null()),
            (raw.num_outputs, raw.outputs.is_null()),
            (raw.num_attrs, raw.attrs.is_null()),
            (raw.num_epilogues, raw.epilogues.is_null()),
        ];
        if arrays.iter().any(|(count, null)| *count > MAX_ITEMS || (*count > 0 && *null)) {
            return Err(Failure::invalid(format!("a null array, or more than {MAX_ITEMS} elements")));
        }
        if !raw.next.is_null() {
            return Err(Failure::unsupported("an extension of the description, this version has none"));
        }
        Ok(Self { raw, life: PhantomData })
    }

    pub(super) const fn kind(&self) -> u32 {
        self.raw.op_kind
    }
    pub(super) const fn version(&self) -> u32 {
        self.raw.op_version
    }
    pub(super) const fn compute(&self) -> u32 {
        self.raw.compute
    }
    pub(super) const fn accumulate(&self) -> u32 {
        self.raw.accumulate
    }
    pub(super) const fn name(&self) -> &'static str {
        op_name(self.raw.op_kind)
    }
    pub(super) const fn num_symbols(&self) -> u32 {
        self.raw.num_symbols
    }

    /// Refuses another number of operands.
    pub(super) fn operands(&self, inputs: usize, outputs: usize) -> Result<(), Failure> {
        let found = (self.raw.num_inputs as usize, self.raw.num_outputs as usize);
        if found == (inputs, outputs) {
            return Ok(());
        }
        Err(self.refuse(format!("{} inputs and {} outputs, expected {inputs} and {outputs}", found.0, found.1)))
    }

    /// Refuses epilogues, for kinds that have none.
    pub(super) fn no_epilogues(&self) -> Result<(), Failure> {
        if self.raw.num_epilogues == 0 { Ok(()) } else { Err(self.refuse("epilogues, expected none")) }
    }

    pub(super) fn epilogue(&self) -> Result<Option<qhal_epilogue>, Failure> {
        match self.raw.num_epilogues {
            0 => Ok(None),
            // SAFETY: there is one element.
            1 => Ok(Some(unsafe { element(self.raw.epilogues, 0) })),
            n => Err(self.refuse(format!("{n} epilogues, expected at most 1"))),
        }
    }

    pub(super) fn refuse(&self, what: impl std::fmt::Display) -> Failure {
        Failure::unsupported(format!("{}: {what}", self.name()))
    }
    fn refuse_at(&self, place: Place, what: impl std::fmt::Display) -> Failure {
        let failure = Failure::unsupported(format!("{}: {place}: {what}", self.name()));
        match place {
            In(i) => failure.at(i),
            Out(_) => failure,
        }
    }

    fn attr(&self, key: u32) -> Option<qhal_attr> {
        let attrs: &[qhal_attr] = match self.raw.num_attrs {
            0 => &[],
            // SAFETY: frozen structs, so the array is a plain one; it has the stated length and is not null.
            n => unsafe { std::slice::from_raw_parts(self.raw.attrs, n as usize) },
        };
        attrs.iter().find(|attr| attr.key == key).copied()
    }
    pub(super) fn has_attr(&self, key: u32) -> bool {
        self.attr(key).is_some()
    }
    /// An integer attribute that must be there.
    pub(super) fn int(&self, key: u32, what: &str) -> Result<i64, Failure> {
        let value = self.attr(key).and_then(|attr| attr.as_int());
        value.ok_or_else(|| self.refuse(format!("integer attribute {what} is missing")))
    }
    /// An integer attribute with a default.
    pub(super) fn int_or(&self, key: u32, what: &str, default: i64) -> Result<i64, Failure> {
        if self.has_attr(key) { self.int(key, what) } else { Ok(default) }
    }
    /// A size that must be there and lie in `1..=max`.
    pub(super) fn size(&self, key: u32, what: &str, max: usize) -> Result<usize, Failure> {
        let value = self.int(key, what)?;
        let size = usize::try_from(value).ok().filter(|n| (1..=max).contains(n));
        size.ok_or_else(|| self.refuse(format!("{what} is {value}, expected 1..={max}")))
    }
    /// A switch with a default.
    pub(super) fn flag(&self, key: u32, what: &str, default: bool) -> Result<bool, Failure> {
        match self.int_or(key, what, i64::from(default))? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(self.refuse(format!("{what} is {other}, expected 0 or 1"))),
        }
    }
    /// A finite real attribute with a default.
    pub(super) fn real_or(&self, key: u32, what: &str, default: Option<f64>) -> Result<f32, Failure> {
        let value = match self.attr(key) {
            Some(attr) => attr.as_real(),
            None => default,
        };
        let value = value.filter(|value| value.is_finite());
        value
            .map(|value| value as f32)
            .ok_or_else(|| self.refuse(format!("real attribute {what} is missing or not finite")))
    }

    fn tensor(&self, place: Place) -> Result<qhal_tensor_desc, Failure> {
        let (array, count, i) = match place {
            In(i) => (self.raw.inputs, self.raw.num_inputs, i),
            Out(i) => (self.raw.outputs, self.raw.num_outputs, i),
        };
        if i >= count as usize {
            return Err(self.refuse(format!("{place} is missing")));
        }
        // SAFETY: within the stated length.
        Ok(unsafe { element(array, i) })
    }

    /// Whether an optional operand is described as absent.
    pub(super) fn is_absent(&self, place: Place) -> Result<bool, Failure> {
        Ok(self.tensor(place)?.dtype == QHAL_DTYPE_NONE)
    }

    /// Block of the separate scales of a weight, if it has any.
    pub(super) fn scale_block(&self, place: Place) -> Result<Option<[usize; 2]>, Failure> {
        let tensor = self.tensor(place)?;
        match tensor.quant_scheme {
            QHAL_QUANT_NONE => Ok(None),
            QHAL_QUANT_BLOCK_SCALE => Ok(Some(tensor.block.map(|n| n as usize))),
            other => Err(self.refuse_at(place, format!("quantisation scheme {other}"))),
        }
    }

    fn extent(&self, place: Place, tensor: &qhal_tensor_desc, i: usize) -> Result<Extent, Failure> {
        let (dim, max, symbol) = (tensor.dims[i], tensor.dim_max[i], tensor.dim_symbol[i]);
        let largest = if symbol == 0 { dim } else { max };
        if !(0..=MAX_DIM).contains(&largest) || !(0..=largest).contains(&dim) || symbol > self.num_symbols() {
            return Err(self.refuse_at(place, format!("dimension {i} is {dim} of at most {max}, symbol {symbol}")));
        }
        let (dim, max) = (dim as usize, largest as usize);
        Ok(match symbol.checked_sub(1) {
            None => Extent::fixed(dim),
            symbol => Extent { factor: 1, symbol, max, expected: dim },
        })
    }

    /// A matrix: two dimensions, or three of which the first two are joined, or one as a single row.
    pub(super) fn mat(&self, place: Place, accepted: &[DType]) -> Result<Mat, Failure> {
        let tensor = self.tensor(place)?;
        let dtype = DType::from_code(tensor.dtype).filter(|dtype| accepted.contains(dtype));
        let Some(dtype) = dtype else {
            let known =
                DType::from_code(tensor.dtype).map_or_else(|| tensor.dtype.to_string(), |dtype| dtype.to_string());
            return Err(self.refuse_at(place, format!("dtype {known} is not among those that it takes")));
        };
        if tensor.layout_id != 0 {
            return Err(self.refuse_at(place, format!("layout {}, expected 0", tensor.layout_id)));
        }
        let rank = tensor.rank as usize;
        if rank == 0 || rank > 3.min(QHAL_MAX_RANK) {
            return Err(self.refuse_at(place, format!("{rank} dimensions, expected 1 to 3")));
        }
        let cols = self.extent(place, &tensor, rank - 1)?;
        let stride = |i: usize| usize::try_from(tensor.strides[i]).ok();
        let rows = match rank {
            1 => Some(Extent::fixed(1)),
            2 => Some(self.extent(place, &tensor, 0)?),
            _ => self.joined_rows(place, &tensor)?,
        };
        // One row needs no stride; with more, an output's rows must be apart and blocks are contiguous.
        let row_stride = match if rank == 1 { Some(0) } else { stride(rank - 2) } {
            Some(0) => Some(cols.as_fixed().unwrap_or(0)),
            given => given,
        };
        let dense = |stride: usize| stride == 0 || stride == cols.max;
        let valid = |stride: usize| dense(stride) || (stride > cols.max && dtype.block_len() == 1);
        match (rows, row_stride) {
            (Some(rows), Some(row_stride)) if rows.max <= 1 || valid(row_stride) => {
                let block_rows_whole = cols.max.is_multiple_of(dtype.block_len());
                if !block_rows_whole || tensor.strides[rank - 1] != 1 {
                    return Err(self.refuse_at(place, "rows that are not dense whole blocks"));
                }
                let row_stride = if row_stride == 0 { 0 } else { row_stride.max(cols.max) };
                Ok(Mat { place, dtype, rows, cols, stride: row_stride })
            }
            _ => Err(self.refuse_at(place, format!("strides {:?} for these dimensions", &tensor.strides[..rank]))),
        }
    }

    /// [a, b, cols] as a * b rows, if they are evenly spaced.
    fn joined_rows(&self, place: Place, tensor: &qhal_tensor_desc) -> Result<Option<Extent>, Failure> {
        let (outer, inner) = (self.extent(place, tensor, 0)?, self.extent(place, tensor, 1)?);
        let Some(count) = inner.as_fixed() else { return Ok(None) };
        let inner_stride = if tensor.strides[1] == 0 { tensor.dims[2] } else { tensor.strides[1] };
        let even = i64::try_from(count).ok().and_then(|count| inner_stride.checked_mul(count));
        let is_even = tensor.strides[0] == 0 || even == Some(tensor.strides[0]);
        Ok(if outer.max <= 1 || is_even { outer.times(count) } else { None })
    }

    /// A matrix whose rows have a fixed width.
    pub(super) fn mat_fixed(&self, place: Place, accepted: &[DType]) -> Result<Mat, Failure> {
        let mat = self.mat(place, accepted)?;
        if mat.cols.as_fixed().is_none_or(|cols| cols == 0) {
            return Err(self.refuse_at(place, "rows of a width that is not fixed, or 0"));
        }
        Ok(mat)
    }

    /// A matrix of f32 with rows of a fixed width.
    pub(super) fn f32(&self, place: Place) -> Result<Mat, Failure> {
        self.mat_fixed(place, &[DType::F32])
    }

    /// A dense vector.
    pub(super) fn vector(&self, place: Place, dtype: DType) -> Result<Vector, Failure> {
        let mat = self.mat(place, &[dtype])?;
        let dense = mat.rows.max <= 1 || mat.cols.as_fixed() == Some(mat.stride);
        let len = match mat.cols.as_fixed() {
            Some(cols) if dense => mat.rows.times(cols),
            None if mat.rows.as_fixed() == Some(1) => Some(mat.cols),
            _ => None,
        };
        let len = len.ok_or_else(|| self.refuse_at(place, "not a dense vector"))?;
        Ok(Vector { place, len })
    }

    /// Refuses two extents that could differ.
    pub(super) fn same(&self, what: &str, a: Extent, b: Extent) -> Result<(), Failure> {
        if a.same_as(b) {
            return Ok(());
        }
        Err(self.refuse(format!("{what} differ: at most {} and {}", a.max, b.max)))
    }

    /// Refuses a size other than the expected one.
    pub(super) fn expect(&self, what: &str, found: usize, expected: usize) -> Result<(), Failure> {
        if found == expected { Ok(()) } else { Err(self.refuse(format!("{what} is {found}, expected {expected}"))) }
    }
}
