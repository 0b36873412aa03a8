//! A description as the simulator looks at it: a copy of what it needs, with sizes at the values of a launch.

use qwen_hal_abi::ops::{self, dtype_block};
use qwen_hal_abi::*;
use qwen_hal_plugin::{Failure, element};

/// Most operands, attributes or symbols that are believed.
const MAX_ITEMS: u32 = 64;

/// Dimensions and type of an operand.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tensor {
    pub(crate) dtype: u32,
    pub(crate) quant_scheme: u32,
    pub(crate) dims: Vec<Dim>,
    strides: Vec<u64>,
}

/// A dimension: fixed, or the value of a symbol within its range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Dim {
    pub(crate) expected: u64,
    symbol: Option<usize>,
}

impl Dim {
    pub(crate) fn at(self, symbols: &[i64]) -> u64 {
        let value = |symbol: usize| symbols.get(symbol).and_then(|value| u64::try_from(*value).ok()).unwrap_or(0);
        self.symbol.map_or(self.expected, value)
    }
}

impl Tensor {
    fn read(raw: &qhal_tensor_desc) -> Self {
        let rank = (raw.rank as usize).min(QHAL_MAX_RANK);
        let dim = |i: usize| Dim {
            expected: u64::try_from(raw.dims[i]).unwrap_or(0),
            symbol: raw.dim_symbol[i].checked_sub(1).map(|symbol| symbol as usize),
        };
        Self {
            dtype: raw.dtype,
            quant_scheme: raw.quant_scheme,
            dims: (0..rank).map(dim).collect(),
            strides: raw.strides[..rank].iter().map(|stride| u64::try_from(*stride).unwrap_or(0)).collect(),
        }
    }

    pub(crate) const fn is_absent(&self) -> bool {
        self.dtype == ops::QHAL_DTYPE_NONE
    }

    /// Values at these sizes.
    pub(crate) fn elements(&self, symbols: &[i64]) -> u64 {
        self.dims.iter().fold(1, |n: u64, dim| n.saturating_mul(dim.at(symbols)))
    }

    /// Bytes of the values alone, without gaps between rows.
    pub(crate) fn bytes(&self, symbols: &[i64]) -> u64 {
        let (values, bytes) = dtype_block(self.dtype).unwrap_or((1, 1));
        self.elements(symbols).div_ceil(u64::from(values)).saturating_mul(u64::from(bytes))
    }

    /// Bytes from the first value to the end of the last.
    pub(crate) fn extent(&self, symbols: &[i64]) -> u64 {
        let (values, bytes) = dtype_block(self.dtype).unwrap_or((1, 1));
        let (mut last, mut inner) = (0_u64, 1_u64);
        for (dim, stride) in self.dims.iter().zip(&self.strides).rev() {
            let n = dim.at(symbols);
            if n == 0 {
                return 0;
            }
            let stride = if *stride == 0 { inner } else { *stride };
            last = last.saturating_add((n - 1).saturating_mul(stride));
            inner = stride.saturating_mul(n);
        }
        last.saturating_add(1).div_ceil(u64::from(values)).saturating_mul(u64::from(bytes))
    }

    /// Size of the innermost dimension at these sizes.
    pub(crate) fn columns(&self, symbols: &[i64]) -> u64 {
        self.dims.last().map_or(1, |dim| dim.at(symbols))
    }

    /// Rows, the outer dimensions joined.
    pub(crate) fn rows(&self, symbols: &[i64]) -> u64 {
        let outer = self.dims.split_last().map_or(&[][..], |(_, outer)| outer);
        outer.iter().fold(1, |n: u64, dim| n.saturating_mul(dim.at(symbols)))
    }

    /// Values from row to row.
    pub(crate) fn row_stride(&self, symbols: &[i64]) -> u64 {
        match self.strides.len().checked_sub(2).and_then(|i| self.strides.get(i)) {
            Some(stride) if *stride > 0 => *stride,
            _ => self.columns(symbols),
        }
    }
}

/// An op.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Desc {
    pub(crate) kind: u32,
    pub(crate) compute: u32,
    pub(crate) accumulate: u32,
    pub(crate) inputs: Vec<Tensor>,
    pub(crate) outputs: Vec<Tensor>,
    pub(crate) attrs: Vec<qhal_attr>,
    pub(crate) epilogues: Vec<(u32, u32, u32)>,
    /// Smallest and largest value of each symbol.
    pub(crate) symbols: Vec<(i64, i64)>,
}

/// Elements of an array of growable structs.
///
/// # Safety
/// As [`element`], for all of `count`.
unsafe fn elements<T: Copy>(array: *const T, count: u32) -> Vec<T> {
    // SAFETY: by the caller's promise.
    (0..count as usize).map(|i| unsafe { element(array, i) }).collect()
}

impl Desc {
    /// Copies a description.
    ///
    /// # Safety
    /// `raw` is null or a description whose arrays have the stated lengths.
    pub(crate) unsafe fn read(raw: *const qhal_op_desc) -> Result<Self, Failure> {
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
            (raw.num_symbols, false),
        ];
        if arrays.iter().any(|(count, null)| *count > MAX_ITEMS || (*count > 0 && *null)) {
            return Err(Failure::invalid(format!("a null array, or more than {MAX_ITEMS} elements")));
        }
        // SAFETY: the arrays are there; attributes are frozen, so theirs is a plain one.
        let (inputs, outputs, attrs, epilogues) = unsafe {
            let attrs = match raw.num_attrs {
                0 => Vec::new(),
                n => std::slice::from_raw_parts(raw.attrs, n as usize).to_vec(),
            };
            let epilogues: Vec<qhal_epilogue> = elements(raw.epilogues, raw.num_epilogues);
            let inputs: Vec<qhal_tensor_desc> = elements(raw.inputs, raw.num_inputs);
            let outputs: Vec<qhal_tensor_desc> = elements(raw.outputs, raw.num_outputs);
            (inputs, outputs, attrs, epilogues)
        };
        let mut symbols = vec![(0, i64::MAX); raw.num_symbols as usize];
        for tensor in inputs.iter().chain(&outputs) {
            for i in 0..(tensor.rank as usize).min(QHAL_MAX_RANK) {
                let symbol = tensor.dim_symbol[i].checked_sub(1).and_then(|symbol| symbols.get_mut(symbol as usize));
                if let Some((least, most)) = symbol {
                    *least = (*least).max(tensor.dim_min[i]);
                    *most = (*most).min(tensor.dim_max[i]);
                }
            }
        }
        Ok(Self {
            kind: raw.op_kind,
            compute: raw.compute,
            accumulate: raw.accumulate,
            inputs: inputs.iter().map(Tensor::read).collect(),
            outputs: outputs.iter().map(Tensor::read).collect(),
            attrs,
            epilogues: epilogues.iter().map(|e| (e.kind, e.input, e.param)).collect(),
            symbols,
        })
    }

    /// Expected values of the symbols.
    pub(crate) fn expected(&self) -> Vec<i64> {
        let mut values = vec![0; self.symbols.len()];
        for dim in self.inputs.iter().chain(&self.outputs).flat_map(|tensor| &tensor.dims) {
            if let Some(value) = dim.symbol.and_then(|symbol| values.get_mut(symbol)) {
                *value = dim.expected.cast_signed();
            }
        }
        values
    }

    pub(crate) fn int(&self, key: u32) -> Option<i64> {
        self.attrs.iter().find(|attr| attr.key == key)?.as_int()
    }

    /// An attribute that is a size, 0 if it is missing.
    pub(crate) fn size(&self, key: u32) -> u64 {
        self.int(key).and_then(|value| u64::try_from(value).ok()).unwrap_or(0)
    }

    pub(crate) const fn is_product(&self) -> bool {
        matches!(self.kind, ops::QHAL_OP_GEMM | ops::QHAL_OP_GROUPED_GEMM)
    }

    /// Number of the first weight of a product among the inputs.
    pub(crate) const fn first_weight(&self) -> usize {
        if self.kind == ops::QHAL_OP_GROUPED_GEMM { 3 } else { 1 }
    }

    /// Weights of a product, in order: number of the input.
    pub(crate) fn weights(&self) -> Vec<usize> {
        let mut at = self.first_weight();
        let mut weights = Vec::new();
        for _ in 0..self.int(ops::QHAL_ATTR_SEGMENTS).unwrap_or(1) {
            let Some(weight) = self.inputs.get(at) else { break };
            weights.push(at);
            at += 1 + usize::from(weight.quant_scheme != QHAL_QUANT_NONE);
        }
        weights
    }

    /// Forms of a product, by segment.
    pub(crate) fn computes(&self) -> Vec<u32> {
        let of = |i: u32| self.int(ops::QHAL_ATTR_SEGMENT_COMPUTE + i).and_then(|code| u32::try_from(code).ok());
        (0..self.weights().len() as u32).map(|i| of(i).unwrap_or(self.compute)).collect()
    }
}
