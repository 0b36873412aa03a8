//! Reading a description: arrays walked with the stride that their elements state, shapes brought into the few forms that kernels take.

use std::marker::PhantomData;

use qwen_hal_abi::ops::{QHAL_DTYPE_F32, QHAL_DTYPE_NONE, dtype_block, op_name};
use qwen_hal_abi::{QHAL_QUANT_BLOCK_SCALE, QHAL_QUANT_NONE, qhal_attr, qhal_epilogue, qhal_op_desc, qhal_tensor_desc};
use qwen_hal_plugin::element;

use super::types;
use crate::failure::Failure;

/// More operands, attributes or epilogues than this are a mistake.
const MAX_ITEMS: u32 = 64;
/// Kernels count rows, columns and strides in 32 bits.
pub(super) const MAX_DIM: usize = i32::MAX as usize;

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
    /// The symbol and what it is multiplied with.
    pub(super) const fn symbol(self) -> Option<(u32, usize)> {
        match self.symbol {
            Some(symbol) => Some((symbol, self.factor)),
            None => None,
        }
    }
    /// The value of a launch.
    pub(super) fn value(self, symbols: &[i64]) -> Result<usize, Failure> {
        let Some(symbol) = self.symbol else { return Ok(self.factor) };
        let value = symbols.get(symbol as usize).and_then(|value| usize::try_from(*value).ok());
        let value = value.and_then(|value| value.checked_mul(self.factor)).filter(|value| *value <= self.max);
        value.ok_or_else(|| {
            Failure::out_of_range(format!("symbol {symbol} is missing, or its size is not within 0..={}", self.max))
        })
    }
    fn times(self, n: usize) -> Option<Self> {
        let max = self.max.checked_mul(n).filter(|max| *max <= MAX_DIM)?;
        let (factor, expected) = (self.factor.checked_mul(n)?, self.expected.checked_mul(n)?);
        Some(Self { factor, symbol: self.symbol, max, expected })
    }
    fn same_as(self, other: Self) -> bool {
        self.factor == other.factor && self.symbol == other.symbol
    }
}

/// A matrix operand with a row stride. Vectors are one row, three dimensions are joined into rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mat {
    pub(super) place: Place,
    pub(super) dtype: u32,
    pub(super) rows: Extent,
    pub(super) cols: Extent,
    /// Elements from row to row, 0 for as many as a row has at the launch.
    stride: usize,
}

impl Mat {
    pub(super) const fn fixed_cols(&self) -> usize {
        self.cols.max
    }
    /// Elements from row to row at a launch.
    pub(super) fn stride(&self, symbols: &[i64]) -> Result<usize, Failure> {
        if self.stride == 0 { self.cols.value(symbols) } else { Ok(self.stride) }
    }
    pub(super) fn is_dense(&self) -> bool {
        self.stride == 0 || self.cols.as_fixed() == Some(self.stride)
    }
    /// Bytes from the first element to the end of the last.
    pub(super) fn bytes(&self, symbols: &[i64]) -> Result<u64, Failure> {
        let (rows, cols, stride) = (self.rows.value(symbols)?, self.cols.value(symbols)?, self.stride(symbols)?);
        let (block_len, block_bytes) = types::block(self.dtype);
        let values = match rows.checked_sub(1) {
            None => Some(0),
            Some(steps) => steps.checked_mul(stride).and_then(|n| n.checked_add(cols)),
        };
        let bytes = values.and_then(|values| (values / block_len).checked_mul(block_bytes));
        bytes.map(|bytes| bytes as u64).ok_or_else(|| Failure::invalid("a matrix beyond the address space"))
    }
    /// Bytes of the values at the expected sizes.
    pub(super) fn expected_bytes(&self) -> f64 {
        let (block_len, block_bytes) = types::block(self.dtype);
        self.rows.expected as f64 * self.cols.expected as f64 * block_bytes as f64 / block_len as f64
    }
}

/// A dense operand of one dimension.
#[derive(Debug, Clone, Copy)]
pub(super) struct Vector {
    pub(super) place: Place,
    pub(super) dtype: u32,
    pub(super) len: Extent,
}

/// A description under inspection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Desc<'a> {
    raw: &'a qhal_op_desc,
    life: PhantomData<&'a qhal_op_desc>,
}

impl Desc<'_> {
    /// A description that the host passed.
    ///
    /// # Safety
    /// `raw` is null or a description whose arrays have the stated lengths, valid for the life of the result.
    pub(super) unsafe fn new(raw: *const qhal_op_desc) -> Result<Self, Failure> {
        // SAFETY: by the caller's promise.
        let raw = unsafe { crate::failure::sized_ref(raw)? };
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
        Failure::unsupported(format!("{}: {what}", op_name(self.raw.op_kind)))
    }
    fn refuse_at(&self, place: Place, what: impl std::fmt::Display) -> Failure {
        let failure = self.refuse(format!("{place}: {what}"));
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
    /// An integer attribute that must be there.
    pub(super) fn int(&self, key: u32, what: &str) -> Result<i64, Failure> {
        let value = self.attr(key).and_then(|attr| attr.as_int());
        value.ok_or_else(|| self.refuse(format!("integer attribute {what} is missing")))
    }
    /// An integer attribute with a default.
    pub(super) fn int_or(&self, key: u32, what: &str, default: i64) -> Result<i64, Failure> {
        if self.attr(key).is_some() { self.int(key, what) } else { Ok(default) }
    }
    /// A size within `min..=max`, with a default if it may be left out.
    pub(super) fn size(
        &self,
        key: u32,
        what: &str,
        default: Option<i64>,
        (min, max): (usize, usize),
    ) -> Result<usize, Failure> {
        let value = default.map_or_else(|| self.int(key, what), |default| self.int_or(key, what, default))?;
        let size = usize::try_from(value).ok().filter(|n| (min..=max).contains(n));
        size.ok_or_else(|| self.refuse(format!("{what} is {value}, expected {min}..={max}")))
    }
    /// One of the codes `0..names`, with a default if it may be left out.
    pub(super) fn code(&self, key: u32, what: &str, default: Option<i64>, codes: usize) -> Result<i32, Failure> {
        self.size(key, what, default, (0, codes - 1)).map(|code| code as i32)
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
        let block = tensor.block.map(|n| n as usize);
        match tensor.quant_scheme {
            QHAL_QUANT_NONE => Ok(None),
            QHAL_QUANT_BLOCK_SCALE if block.iter().all(|n| (1..=MAX_DIM).contains(n)) => Ok(Some(block)),
            other => Err(self.refuse_at(place, format!("quantisation scheme {other} with blocks of {block:?}"))),
        }
    }

    fn extent(&self, place: Place, tensor: &qhal_tensor_desc, i: usize) -> Result<Extent, Failure> {
        let (dim, max, symbol) = (tensor.dims[i], tensor.dim_max[i], tensor.dim_symbol[i]);
        let largest = if symbol == 0 { dim } else { max };
        if !(0..=MAX_DIM as i64).contains(&largest) || !(0..=largest).contains(&dim) || symbol > self.raw.num_symbols {
            return Err(self.refuse_at(place, format!("dimension {i} is {dim} of at most {max}, symbol {symbol}")));
        }
        let (dim, max) = (dim as usize, largest as usize);
        Ok(match symbol.checked_sub(1) {
            None => Extent::fixed(dim),
            symbol => Extent { factor: 1, symbol, max, expected: dim },
        })
    }

    /// A matrix: two dimensions, or three of which the first two are joined, or one as a single row.
    pub(super) fn mat(&self, place: Place, accepted: &[u32]) -> Result<Mat, Failure> {
        let tensor = self.tensor(place)?;
        let dtype = tensor.dtype;
        let Some((block_len, _)) = dtype_block(dtype).filter(|_| accepted.contains(&dtype)) else {
            return Err(self.refuse_at(place, format!("{} is not among the types that it takes", types::name(dtype))));
        };
        if tensor.layout_id != 0 {
            return Err(self.refuse_at(place, format!("layout {}, expected 0", tensor.layout_id)));
        }
        let rank = tensor.rank as usize;
        if rank == 0 || rank > 3 {
            return Err(self.refuse_at(place, format!("{rank} dimensions, expected 1 to 3")));
        }
        let cols = self.extent(place, &tensor, rank - 1)?;
        let rows = match rank {
            1 => Some(Extent::fixed(1)),
            2 => Some(self.extent(place, &tensor, 0)?),
            _ => self.joined_rows(place, &tensor)?,
        };
        // One row needs no stride; with more, an output's rows must be apart and blocks are contiguous.
        let stride = if rank == 1 { Ok(0) } else { usize::try_from(tensor.strides[rank - 2]) };
        let stride = match stride {
            Ok(0) => cols.as_fixed().unwrap_or(0),
            Ok(stride) if stride <= MAX_DIM => stride,
            _ => return Err(self.refuse_at(place, "a stride that is negative or too large")),
        };
        let fits = stride == 0 || stride == cols.max || (stride > cols.max && block_len == 1);
        let single = rows.is_some_and(|rows| rows.max <= 1);
        match rows {
            Some(rows) if (fits || single) && tensor.strides[rank - 1] == 1 => {
                if !cols.max.is_multiple_of(block_len as usize) {
                    return Err(self.refuse_at(place, format!("{} columns, expected whole blocks", cols.max)));
                }
                let stride = if stride == 0 { 0 } else { stride.max(cols.max) };
                Ok(Mat { place, dtype, rows, cols, stride })
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
    pub(super) fn mat_fixed(&self, place: Place, accepted: &[u32]) -> Result<Mat, Failure> {
        let mat = self.mat(place, accepted)?;
        if mat.cols.as_fixed().is_none_or(|cols| cols == 0) {
            return Err(self.refuse_at(place, "rows of a width that is not fixed, or 0"));
        }
        Ok(mat)
    }

    /// A matrix of f32 with rows of a fixed width.
    pub(super) fn f32(&self, place: Place) -> Result<Mat, Failure> {
        self.mat_fixed(place, &[QHAL_DTYPE_F32])
    }

    /// A dense vector.
    pub(super) fn vector(&self, place: Place, dtype: u32) -> Result<Vector, Failure> {
        let mat = self.mat(place, &[dtype])?;
        let dense = mat.rows.max <= 1 || mat.is_dense();
        let len = match mat.cols.as_fixed() {
            Some(cols) if dense => mat.rows.times(cols),
            None if mat.rows.as_fixed() == Some(1) => Some(mat.cols),
            _ => None,
        };
        let len = len.ok_or_else(|| self.refuse_at(place, "not a dense vector"))?;
        Ok(Vector { place, dtype, len })
    }

    /// A dense operand of `count` values of f32, whatever its dimensions.
    pub(super) fn values(&self, place: Place, count: Option<usize>) -> Result<Vector, Failure> {
        let vector = self.vector(place, QHAL_DTYPE_F32)?;
        match (vector.len.as_fixed(), count) {
            (Some(found), Some(expected)) => {
                self.expect(&format!("number of values of {place}"), found, expected).map(|()| vector)
            }
            _ => Err(self.refuse(format!("{place} has a variable or too large size"))),
        }
    }

    /// Refuses two extents that could differ.
    pub(super) fn same(&self, what: &str, a: Extent, b: Extent) -> Result<(), Failure> {
        if a.same_as(b) {
            return Ok(());
        }
        Err(self.refuse(format!("{what} differ: at most {} and {}", a.max, b.max)))
    }

    /// Refuses two matrices of different shape.
    pub(super) fn same_shape(&self, a: &Mat, b: &Mat) -> Result<(), Failure> {
        self.same("rows", a.rows, b.rows)?;
        self.same("columns", a.cols, b.cols)
    }

    /// Refuses a size other than the expected one.
    pub(super) fn expect(&self, what: &str, found: usize, expected: usize) -> Result<(), Failure> {
        if found == expected { Ok(()) } else { Err(self.refuse(format!("{what} is {found}, expected {expected}"))) }
    }
}
