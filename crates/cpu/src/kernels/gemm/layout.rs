//! How a weight matrix lies in memory, and bringing it there.

use qwen_formats::DType;

use super::OP;
use super::form::{Form, PANEL};
use super::workspace::SharedMut;
use crate::kernels::error::{KernelError, same};
use crate::parallel::Parallel;

/// A weight matrix in memory: block-quantised types have a packed form of the file's size (rows padded to 16), plain floats
/// are used where the file is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightLayout {
    dtype: DType,
    n: usize,
    k: usize,
    block: Option<[usize; 2]>,
    row_bytes: usize,
    source_bytes: usize,
    packed_bytes: usize,
}

impl WeightLayout {
    /// The layout of a matrix of `n` outputs and `k` inputs, row-major in the file, with f32 scales per `block` of rows x
    /// columns if given.
    pub fn for_dtype(dtype: DType, n: usize, k: usize, block: Option<[usize; 2]>) -> Result<Self, KernelError> {
        let form = Form::of(dtype);
        let [rows, cols] = block.unwrap_or([1, 1]);
        let plain = matches!(dtype, DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 | DType::F8E5M2);
        if !plain && form.is_none() {
            return Err(KernelError::Type { op: OP, what: "weight", found: dtype });
        }
        if form.is_some() && block.is_some() {
            return Err(KernelError::Type { op: OP, what: "weight with separate scales", found: dtype });
        }
        for (what, size) in [("outputs", n), ("inputs", k), ("block rows", rows), ("block columns", cols)] {
            if size == 0 {
                return Err(KernelError::Shape { op: OP, what, expected: 1, found: 0 });
            }
        }
        let whole = k - k % dtype.block_len();
        same(OP, "inputs, in whole blocks of the weight's type", k, whole)?;
        let row_bytes = (k / dtype.block_len()).checked_mul(dtype.block_bytes());
        let bytes = |rows: usize| row_bytes.and_then(|bytes| bytes.checked_mul(rows));
        let padded = n.checked_next_multiple_of(PANEL).and_then(bytes);
        let (Some(row_bytes), Some(source_bytes), Some(padded)) = (row_bytes, bytes(n), padded) else {
            return Err(KernelError::Shape { op: OP, what: "outputs", expected: isize::MAX as usize / k, found: n });
        };
        let packed_bytes = if form.is_some() { padded } else { 0 };
        Ok(Self { dtype, n, k, block, row_bytes, source_bytes, packed_bytes })
    }

    /// Storage type of the file.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Outputs.
    #[must_use]
    pub const fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    #[must_use]
    pub const fn k(&self) -> usize {
        self.k
    }

    /// Rows and columns that share a separate scale.
    #[must_use]
    pub const fn block(&self) -> Option<[usize; 2]> {
        self.block
    }

    /// Bytes in the file.
    #[must_use]
    pub const fn source_bytes(&self) -> usize {
        self.source_bytes
    }

    /// Bytes of the packed form; 0 if the file's own layout is used in place.
    #[must_use]
    pub const fn packed_bytes(&self) -> usize {
        self.packed_bytes
    }

    /// Bytes that [`gemm`](super::gemm) reads: packed, or the file's.
    #[must_use]
    pub const fn weight_bytes(&self) -> usize {
        if self.packed_bytes > 0 { self.packed_bytes } else { self.source_bytes }
    }

    /// Separate scales: one per block of rows and columns.
    #[must_use]
    pub const fn num_scales(&self) -> usize {
        match self.block {
            Some([rows, cols]) => self.n.div_ceil(rows) * self.k.div_ceil(cols),
            None => 0,
        }
    }

    /// Panels of sixteen outputs.
    pub(super) const fn panels(&self) -> usize {
        self.n.div_ceil(PANEL)
    }

    pub(super) const fn form(&self) -> Option<Form> {
        Form::of(self.dtype)
    }

    /// Bytes of a row in the file.
    pub(super) const fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// The values of row `row` of a packed matrix, bit for bit those of the file's row.
    ///
    /// # Errors
    /// If the type has no packed form, sizes disagree, or there is no such row.
    pub fn packed_row(&self, packed: &[u8], row: usize, values: &mut [f32]) -> Result<(), KernelError> {
        let form = self.form().ok_or(KernelError::Type { op: OP, what: "packed table", found: self.dtype })?;
        same(OP, "bytes of the weight's packed form", packed.len(), self.packed_bytes)?;
        same(OP, "values of a row", values.len(), self.k)?;
        if row >= self.n {
            let (found, high) = (i64::try_from(row).unwrap_or(i64::MAX), self.n as i64);
            return Err(KernelError::Index { op: OP, what: "row", index: 0, found, low: 0, high });
        }
        let panel_bytes = self.row_bytes * PANEL;
        form.decode_row(&packed[row / PANEL * panel_bytes..][..panel_bytes], row % PANEL, values);
        Ok(())
    }

    /// Brings the file's bytes into the packed form, on all threads.
    ///
    /// Experts are packed one by one, into consecutive [`packed_bytes`](Self::packed_bytes).
    pub fn pack(&self, parallel: &dyn Parallel, source: &[u8], packed: &mut [u8]) -> Result<(), KernelError> {
        same(OP, "bytes of the weight's file form", source.len(), self.source_bytes)?;
        same(OP, "bytes of the weight's packed form", packed.len(), self.packed_bytes)?;
        let Some(form) = self.form() else {
            return Ok(());
        };
        let panel_bytes = self.row_bytes() * PANEL;
        let tasks = self.panels().min(parallel.threads() * 8).max(1);
        let share = self.panels().div_ceil(tasks);
        let target = SharedMut::new(packed);
        parallel.run(tasks, &|task| {
            for panel in (task * share..(task + 1) * share).take_while(|&panel| panel < self.panels()) {
                let rows = &source[panel * panel_bytes..source.len().min((panel + 1) * panel_bytes)];
                // SAFETY: panels are disjoint and each belongs to one task.
                let packed = unsafe { target.range(panel * panel_bytes, panel_bytes) };
                form.pack_panel(rows, self.row_bytes(), packed);
            }
        });
        Ok(())
    }
}
