//! What a launch needs to know of an operand: how many bytes it covers at these sizes, and whether two of them share any.

use qwen_hal_abi::ops::{QHAL_DTYPE_NONE, dtype_block};
use qwen_hal_abi::{QHAL_MAX_RANK, qhal_slice, qhal_tensor_desc};

use crate::op::extent_bytes;

/// Bytes from the first to the last element.
#[derive(Debug, Clone, Copy)]
enum Size {
    /// The same at every launch.
    Fixed(u64),
    /// `base + step * value` of one symbol, 0 if that is 0: the usual case, an outermost dimension that varies.
    Linear { base: i64, step: i64, symbol: usize },
    /// Anything else, worked out from the description.
    General,
}

/// An operand of a plan.
#[derive(Debug, Clone)]
pub(crate) struct Operand {
    pub(crate) tensor: qhal_tensor_desc,
    size: Size,
    /// What the offset must be a multiple of.
    pub(crate) alignment: u64,
    /// Bytes from row to row, 0 if there is one row.
    pub(crate) pitch: u64,
    /// Bytes of a row as far as it is used.
    row: u64,
}

impl Operand {
    /// `packed` is the size of the form that launches take instead of the described one, 0 if there is none.
    pub(crate) fn new(tensor: &qhal_tensor_desc, packed: u64, device_alignment: u64) -> Self {
        let rank = (tensor.rank as usize).min(QHAL_MAX_RANK);
        let (block_len, block_bytes) = dtype_block(tensor.dtype).unwrap_or((1, 1));
        let natural = if block_len == 1 { u64::from(block_bytes) } else { 1 };
        // Rows are what the outermost stride steps over; only then is "a column range of a wider matrix" meaningful.
        let rows = rank >= 2 && block_len == 1 && packed == 0 && tensor.strides[0] > 0;
        let bytes = |elements: i64| u64::try_from(elements).unwrap_or(0).saturating_mul(u64::from(block_bytes));
        let mut inner = *tensor;
        inner.strides.rotate_left(1);
        let inner_dims = tensor.dim_max.get(1..rank).unwrap_or_default();
        Self {
            tensor: *tensor,
            size: if packed > 0 { Size::Fixed(packed) } else { Size::new(tensor, rank) },
            alignment: natural.max(device_alignment),
            pitch: if rows { bytes(tensor.strides[0]) } else { 0 },
            row: if rows { extent_bytes(&inner, inner_dims).unwrap_or(u64::MAX) } else { 0 },
        }
    }

    /// Whether it stands for an absent optional operand.
    pub(crate) const fn is_absent(&self) -> bool {
        self.tensor.dtype == QHAL_DTYPE_NONE
    }

    /// Bytes at these values, which are within the planned ranges.
    pub(crate) fn bytes(&self, symbols: &[i64]) -> u64 {
        match self.size {
            Size::Fixed(bytes) => bytes,
            Size::Linear { base, step, symbol } => match symbols.get(symbol) {
                Some(0) => 0,
                // The largest dimensions were checked when the op was described, so nothing overflows.
                Some(value) => base.wrapping_add(step.wrapping_mul(*value)).cast_unsigned(),
                None => u64::MAX,
            },
            Size::General => general_bytes(&self.tensor, |symbol| symbols.get(symbol).copied()),
        }
    }

    /// Bytes at the largest values.
    pub(crate) fn max_bytes(&self) -> u64 {
        let rank = (self.tensor.rank as usize).min(QHAL_MAX_RANK);
        match self.size {
            Size::Fixed(bytes) => bytes,
            _ => extent_bytes(&self.tensor, &self.tensor.dim_max[..rank]).unwrap_or(u64::MAX),
        }
    }
}

impl Size {
    fn new(tensor: &qhal_tensor_desc, rank: usize) -> Self {
        let mut symbols = tensor.dim_symbol.iter().take(rank).enumerate().filter(|(_, symbol)| **symbol != 0);
        let Some((at, symbol)) = symbols.next() else {
            return extent_bytes(tensor, &tensor.dims[..rank]).map_or(Self::General, Self::Fixed);
        };
        let bytes_at = |value: i64| {
            let mut dims = tensor.dims;
            dims[at] = value;
            extent_bytes(tensor, &dims[..rank]).and_then(|bytes| i64::try_from(bytes).ok())
        };
        // With one symbol the size is linear in it: two values give base and step.
        match (symbols.next(), bytes_at(1), bytes_at(2)) {
            (None, Some(one), Some(two)) => {
                Self::Linear { base: 2 * one - two, step: two - one, symbol: *symbol as usize - 1 }
            }
            _ => Self::General,
        }
    }
}

fn general_bytes(tensor: &qhal_tensor_desc, value: impl Fn(usize) -> Option<i64>) -> u64 {
    let rank = (tensor.rank as usize).min(QHAL_MAX_RANK);
    let mut dims = tensor.dims;
    for (dim, symbol) in dims.iter_mut().zip(tensor.dim_symbol) {
        if let Some(value) = symbol.checked_sub(1).and_then(|symbol| value(symbol as usize)) {
            *dim = value;
        }
    }
    // The largest dimensions were checked when the op was described, so this is never u64::MAX.
    extent_bytes(tensor, &dims[..rank]).unwrap_or(u64::MAX)
}

/// Whether two operands are disjoint column ranges of one wider matrix.
pub(crate) const fn columns_apart(a: &Operand, a_slice: &qhal_slice, b: &Operand, b_slice: &qhal_slice) -> bool {
    if a.pitch == 0 || a.pitch != b.pitch {
        return false;
    }
    let pitch = a.pitch;
    // Column of b counted from a's first: b's must lie behind a's row and end before a's next one.
    let (a_start, b_start) = (a_slice.offset % pitch, b_slice.offset % pitch);
    let ahead = (b_start + pitch - a_start) % pitch;
    a.row <= ahead && b.row <= pitch - ahead
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::{Dim, TensorDesc};

    proptest::proptest! {
        #[test]
        fn column_ranges_are_told_apart_as_if_by_looking_at_each_element(
            (pitch, a_at, b_at) in (1..24_i64, 0..60_u64, 0..60_u64),
            (a_rows, a_cols, b_rows, b_cols) in (1..4_i64, 1..24_i64, 1..4_i64, 1..24_i64),
        ) {
            let operand = |rows: i64, cols: i64| {
                let tensor = TensorDesc::f32(&[rows.into(), cols.into()]).with_row_stride(pitch.max(cols));
                Operand::new(tensor.raw(), 0, 1)
            };
            let slice = |at: u64| qhal_slice { buffer: std::ptr::null_mut(), offset: at * 4, size: 0 };
            let elements = |at: u64, rows: i64, cols: i64| -> Vec<i64> {
                (0..rows).flat_map(|row| (0..cols).map(move |col| at as i64 + row * pitch.max(cols) + col)).collect()
            };
            let (a, b) = (operand(a_rows, a_cols), operand(b_rows, b_cols));
            if columns_apart(&a, &slice(a_at), &b, &slice(b_at)) {
                let taken = elements(a_at, a_rows, a_cols);
                assert!(elements(b_at, b_rows, b_cols).iter().all(|element| !taken.contains(element)));
            }
        }
    }

    #[test]
    fn neighbouring_columns_of_one_matrix_are_apart() {
        let operand =
            |cols: i64| Operand::new(TensorDesc::f32(&[4.into(), cols.into()]).with_row_stride(48).raw(), 0, 1);
        let slice = |column: u64| qhal_slice { buffer: std::ptr::null_mut(), offset: 4096 + column * 4, size: 0 };
        assert!(columns_apart(&operand(32), &slice(0), &operand(16), &slice(32)));
        assert!(columns_apart(&operand(16), &slice(32), &operand(32), &slice(0)));
        assert!(!columns_apart(&operand(33), &slice(0), &operand(16), &slice(32)));
        assert!(!columns_apart(&operand(16), &slice(33), &operand(32), &slice(0)));
    }

    proptest::proptest! {
        #[test]
        fn sizes_at_launch_are_those_of_the_description(
            dims in proptest::collection::vec((0..4_i64, 0..3_usize), 1..4), values in [0..6_i64, 0..6_i64], wide in 0..9_i64,
        ) {
            let dim = |(n, kind): (i64, usize)| if kind == 0 { n.into() } else { Dim::symbol(kind as u32 - 1, 0, 5) };
            let shape: Vec<Dim> = dims.iter().map(|d| dim(*d)).collect();
            let mut tensor = TensorDesc::f32(&shape);
            if dims.len() == 2 && dims[1].1 == 0 {
                tensor = tensor.with_row_stride(dims[1].0.max(1) + wide);
            }
            let operand = Operand::new(tensor.raw(), 0, 1);
            let expected = general_bytes(tensor.raw(), |symbol| values.get(symbol).copied());
            assert_eq!(operand.bytes(&values), expected);
        }
    }
}
