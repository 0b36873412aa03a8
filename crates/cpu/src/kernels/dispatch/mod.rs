//! Moving rows about: sorting by expert and back, selecting rows, looking up embeddings.
//!
//! - [`dispatch_experts`]: ids [T, k] to offsets [E + 1], rows and slots [T, k]; a counting sort, stable, two passes.
//! - [`combine`]: x [T k, H] sorted, slots and weights [T, k] to [T, H]; choices are added in their order.
//! - [`gather_rows`], [`embed`]: rows of a matrix, or of a table of any dtype, by index; out of range gives zeros.
//!
//! Indices come with the data: each is checked before it is used. Bound: memory traffic of the rows.

use std::ops::Range;

use qwen_formats::{DType, blocks};

use super::error::{KernelError, same};
use super::gemm::WeightLayout;
use super::rows::for_rows;
use super::simd::storage::{F32, Storage};
use super::simd::{Kernel, LANES, Simd, dispatch};
use crate::isa::Isa;
use crate::matrix::{Matrix, MatrixMut};
use crate::parallel::Parallel;

#[cfg(test)]
mod tests;

/// Sorts (token, choice) pairs by expert, stable. `ids` is [T, k] row by row; `offsets` has a place for each expert and one
/// more; `rows` gets the token of each sorted row and `slots` the sorted row of each pair.
///
/// # Errors
/// If sizes disagree, or an id names no expert.
pub fn dispatch_experts(
    ids: &[i32],
    top_k: usize,
    offsets: &mut [i32],
    rows: &mut [i32],
    slots: &mut [i32],
) -> Result<(), KernelError> {
    const OP: &str = "dispatch";
    same(OP, "rows", rows.len(), ids.len())?;
    same(OP, "slots", slots.len(), ids.len())?;
    let (Some(experts), true) = (offsets.len().checked_sub(1), top_k > 0 && ids.len().is_multiple_of(top_k.max(1)))
    else {
        return Err(KernelError::Shape { op: OP, what: "ids", expected: top_k, found: ids.len() });
    };
    if let Some(index) = ids.iter().position(|&id| usize::try_from(id).map_or(true, |id| id >= experts)) {
        let found = i64::from(ids[index]);
        return Err(KernelError::Index { op: OP, what: "ids", index, found, low: 0, high: experts as i64 });
    }
    offsets.fill(0);
    for &id in ids {
        offsets[id as usize + 1] += 1;
    }
    for expert in 0..experts {
        offsets[expert + 1] += offsets[expert];
    }
    // Each start serves as the cursor of its expert and ends where the next begins; shifting by one restores the starts.
    for (pair, &id) in ids.iter().enumerate() {
        let slot = offsets[id as usize];
        offsets[id as usize] += 1;
        rows[slot as usize] = (pair / top_k) as i32;
        slots[pair] = slot;
    }
    offsets.copy_within(0..experts, 1);
    offsets[0] = 0;
    Ok(())
}

/// `y[t] = sum over j of weights[t, j] x[slots[t, j]]`, in order of j, plus the addend. `out` may be the addend.
///
/// # Errors
/// If sizes disagree, or a slot names no row.
pub fn combine(
    isa: Isa,
    parallel: &dyn Parallel,
    x: Matrix<'_, f32>,
    slots: Matrix<'_, i32>,
    weights: Matrix<'_, f32>,
    addend: Option<Matrix<'_, f32>>,
    out: MatrixMut<'_, f32>,
) -> Result<(), KernelError> {
    const OP: &str = "combine";
    same(OP, "columns", x.cols, out.cols)?;
    same(OP, "rows of slots", slots.rows, out.rows)?;
    same(OP, "rows of weights", weights.rows, out.rows)?;
    same(OP, "columns of weights", weights.cols, slots.cols)?;
    if let Some(addend) = addend {
        same(OP, "rows of the addend", addend.rows, out.rows)?;
        same(OP, "columns of the addend", addend.cols, out.cols)?;
    }
    for token in 0..slots.rows {
        for (j, &slot) in slots.row(token).iter().enumerate() {
            if usize::try_from(slot).map_or(true, |slot| slot >= x.rows) {
                let (index, found) = (token * slots.cols + j, i64::from(slot));
                return Err(KernelError::Index { op: OP, what: "slots", index, found, low: 0, high: x.rows as i64 });
            }
        }
    }
    for_rows(parallel, out.rows, out.cols * (slots.cols + 1), &|rows| {
        dispatch(isa, Combine { x, slots, weights, addend, out, rows });
    });
    Ok(())
}

struct Combine<'a> {
    x: Matrix<'a, f32>,
    slots: Matrix<'a, i32>,
    weights: Matrix<'a, f32>,
    addend: Option<Matrix<'a, f32>>,
    out: MatrixMut<'a, f32>,
    rows: Range<usize>,
}

impl Kernel for Combine<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.out.cols;
        for row in self.rows {
            let (slots, weights) = (self.slots.row(row), self.weights.row(row));
            for i in (0..cols).step_by(LANES) {
                let n = cols - i;
                let mut sum = s.splat(0.0);
                for (&slot, &weight) in slots.iter().zip(weights) {
                    // SAFETY: slots were checked; at most n values from column i on.
                    let x = unsafe { F32::load_up_to(s, self.x.row_ptr(slot as usize).add(i).cast(), n) };
                    sum = s.fma(s.splat(weight), x, sum);
                }
                // SAFETY: as above; rows are this task's own.
                unsafe {
                    if let Some(addend) = &self.addend {
                        sum = s.add(sum, F32::load_up_to(s, addend.row_ptr(row).add(i).cast(), n));
                    }
                    F32::store_up_to(s, self.out.row_ptr(row).add(i).cast(), n, sum);
                }
            }
        }
    }
}

/// Selects rows; an index outside the matrix gives zeros.
///
/// # Errors
/// If sizes disagree.
pub fn gather_rows(
    parallel: &dyn Parallel,
    x: Matrix<'_, f32>,
    rows: &[i32],
    out: MatrixMut<'_, f32>,
) -> Result<(), KernelError> {
    const OP: &str = "gather_rows";
    same(OP, "output rows", out.rows, rows.len())?;
    same(OP, "output columns", out.cols, x.cols)?;
    for_rows(parallel, out.rows, out.cols, &|range| {
        for row in range {
            // SAFETY: rows are this task's own; x isn't the output.
            let out = unsafe { out.row_mut(row) };
            match usize::try_from(rows[row]) {
                Ok(source) if source < x.rows => out.copy_from_slice(x.row(source)),
                _ => out.fill(0.0),
            }
        }
    });
    Ok(())
}

/// A table of rows of any dtype that `formats` decodes.
#[derive(Debug, Clone, Copy)]
pub struct Table<'a> {
    /// Storage type.
    pub dtype: DType,
    /// Rows, one after the other.
    pub bytes: &'a [u8],
    /// Number of rows.
    pub rows: usize,
    /// Values of a row.
    pub cols: usize,
    /// The layout if the bytes are packed as a product's weight.
    pub packed: Option<WeightLayout>,
}

impl Table<'_> {
    /// Bytes that it should have, and those of a row if rows lie one after the other.
    fn sizes(&self, op: &'static str) -> Result<(usize, usize), KernelError> {
        let row_bytes = self.dtype.bytes_for(self.cols as u64).and_then(|bytes| usize::try_from(bytes).ok());
        let Some(row_bytes) = row_bytes else {
            let expected = self.cols.next_multiple_of(self.dtype.block_len().max(1));
            return Err(KernelError::Shape { op, what: "table columns", expected, found: self.cols });
        };
        let Some(layout) = self.packed else { return Ok((row_bytes.saturating_mul(self.rows), row_bytes)) };
        same(op, "rows of the packed table", layout.n(), self.rows)?;
        same(op, "columns of the packed table", layout.k(), self.cols)?;
        Ok((layout.packed_bytes(), row_bytes))
    }

    /// The values of a row that is there; sizes were checked.
    fn row(&self, row: usize, row_bytes: usize, values: &mut [f32]) -> bool {
        match self.packed {
            Some(layout) => layout.packed_row(self.bytes, row, values).is_ok(),
            None => blocks::dequantize(self.dtype, &self.bytes[row * row_bytes..(row + 1) * row_bytes], values).is_ok(),
        }
    }
}

/// Copies rows of a table as f32; an id outside it gives zeros.
///
/// # Errors
/// If sizes disagree, or the table isn't of floats.
pub fn embed(
    parallel: &dyn Parallel,
    ids: &[i32],
    table: Table<'_>,
    out: MatrixMut<'_, f32>,
) -> Result<(), KernelError> {
    const OP: &str = "embed";
    same(OP, "output rows", out.rows, ids.len())?;
    same(OP, "output columns", out.cols, table.cols)?;
    if !table.dtype.is_float() && !table.dtype.is_block_quantised() {
        return Err(KernelError::Type { op: OP, what: "table", found: table.dtype });
    }
    let (bytes, row_bytes) = table.sizes(OP)?;
    same(OP, "table bytes", table.bytes.len(), bytes)?;
    for_rows(parallel, out.rows, out.cols, &|range| {
        for row in range {
            // SAFETY: rows are this task's own.
            let out = unsafe { out.row_mut(row) };
            let id = usize::try_from(ids[row]).unwrap_or(usize::MAX);
            // Type and size were checked, so decoding can't fail; if it did, zeros would show.
            if id >= table.rows || !table.row(id, row_bytes, out) {
                out.fill(0.0);
            }
        }
    });
    Ok(())
}
