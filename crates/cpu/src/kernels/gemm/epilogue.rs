//! From accumulators to the output: bias, then a gated unit or an addend.

use super::form::PANEL;
use super::{Activation, Epilogue};
use crate::isa::Isa;
use crate::kernels::math;
use crate::kernels::simd::{Kernel, Simd, dispatch};
use crate::matrix::MatrixMut;

/// The columns of consecutive panels of some rows of the output.
pub(super) struct Store<'a> {
    /// Rows of sixteen of each panel, and those of the second segment of a gated unit.
    pub(super) acc: [&'a [f32]; 2],
    /// Accumulators from panel to panel.
    pub(super) acc_stride: usize,
    /// Biases of the columns.
    pub(super) bias: [Option<&'a [f32]>; 2],
    pub(super) first_row: usize,
    pub(super) rows: usize,
    pub(super) first_col: usize,
    pub(super) cols: usize,
    pub(super) out: MatrixMut<'a, f32>,
    pub(super) epilogue: Epilogue<'a>,
    /// Whole panels without an epilogue are written past the caches.
    pub(super) streaming: bool,
}

/// Bytes of an output from which on it is written past the caches: nobody reads so much of it before it would have left them.
const STREAMING_BYTES: usize = 4 << 20;

/// Whether an output without an epilogue is written past the caches: a large one of several rows, as logits are. Rows of those are
/// often a multiple of 4 KiB apart, so that a panel's columns meet in one set of each cache, and a line would be fetched, written
/// once, and thrown out.
pub(super) fn streams(out: &MatrixMut<'_, f32>) -> bool {
    let aligned = |values: usize| values.is_multiple_of(PANEL);
    let bytes = out.rows.saturating_mul(out.cols).saturating_mul(size_of::<f32>());
    out.rows > 1 && bytes >= STREAMING_BYTES && aligned(out.stride) && out.row_ptr(0).addr().is_multiple_of(4 * PANEL)
}

/// Writes the block.
///
/// # Safety
/// Rows and columns lie within the output (and the addend); nobody else uses this part of it.
pub(super) unsafe fn store(isa: Isa, store: Store<'_>) {
    dispatch(isa, store);
}

impl Kernel for Store<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for first in (0..self.cols).step_by(PANEL) {
            let acc = self.acc.map(|acc| &acc[(first / PANEL * self.acc_stride).min(acc.len())..]);
            let bias = self.bias.map(|bias| bias.map(|bias| &bias[first..]));
            let panel =
                Self { acc, bias, first_col: self.first_col + first, cols: PANEL.min(self.cols - first), ..self };
            if panel.cols == PANEL { panel.each_row::<S, true>(s) } else { panel.each_row::<S, false>(s) }
        }
    }
}

impl Store<'_> {
    /// All rows; `WHOLE` if they have sixteen columns. One loop for each epilogue: most have two instructions a row.
    #[inline(always)]
    fn each_row<S: Simd, const WHOLE: bool>(&self, s: S) {
        let bias = [self.bias(s, 0), self.bias(s, 1)];
        match self.epilogue {
            Epilogue::None if WHOLE && self.streaming => {
                for row in 0..self.rows {
                    let y = self.acc(s, 0, row, bias[0]);
                    // SAFETY: as in `put`; aligned, since rows and panels are.
                    unsafe { s.store_streaming(self.out.row_ptr(self.first_row + row).add(self.first_col), y) };
                }
            }
            Epilogue::None => {
                for row in 0..self.rows {
                    self.put::<S, WHOLE>(s, row, self.acc(s, 0, row, bias[0]));
                }
            }
            Epilogue::Glu(Activation::Silu) => {
                for row in 0..self.rows {
                    let gate = math::silu(s, self.acc(s, 0, row, bias[0]));
                    self.put::<S, WHOLE>(s, row, s.mul(gate, self.acc(s, 1, row, bias[1])));
                }
            }
            Epilogue::Glu(Activation::GeluTanh) => {
                for row in 0..self.rows {
                    let gate = math::gelu_tanh(s, self.acc(s, 0, row, bias[0]));
                    self.put::<S, WHOLE>(s, row, s.mul(gate, self.acc(s, 1, row, bias[1])));
                }
            }
            Epilogue::Add(addend) => {
                for row in 0..self.rows {
                    // SAFETY: within the addend by the promise of `store`.
                    let other = unsafe { load(s, addend.row_ptr(self.first_row + row).add(self.first_col), self.cols) };
                    self.put::<S, WHOLE>(s, row, s.add(self.acc(s, 0, row, bias[0]), other));
                }
            }
        }
    }

    #[inline(always)]
    fn put<S: Simd, const WHOLE: bool>(&self, s: S, row: usize, y: S::V) {
        // SAFETY: within the output and ours by the promise of `store`.
        unsafe {
            let to = self.out.row_ptr(self.first_row + row).add(self.first_col);
            if WHOLE { s.store(to, y) } else { s.store_partial(to, self.cols, y) }
        }
    }

    #[inline(always)]
    fn bias<S: Simd>(&self, s: S, segment: usize) -> Option<S::V> {
        let bias = self.bias[segment]?;
        // SAFETY: reads no more than the slice.
        Some(unsafe { load(s, bias.as_ptr(), bias.len().min(PANEL)) })
    }

    #[inline(always)]
    fn acc<S: Simd>(&self, s: S, segment: usize, row: usize, bias: Option<S::V>) -> S::V {
        let acc = &self.acc[segment][row * PANEL..][..PANEL];
        // SAFETY: sixteen values.
        let y = unsafe { s.load(acc.as_ptr()) };
        match bias {
            Some(bias) => s.add(y, bias),
            None => y,
        }
    }
}

/// Adds second terms' sums, sixteen a row, to those of the rows that they belong to.
pub(super) fn add_seconds(isa: Isa, seconds: AddSeconds<'_>) {
    dispatch(isa, seconds);
}

/// Sums of first terms and behind them those of second ones, of consecutive panels.
pub(super) struct AddSeconds<'a> {
    pub(super) acc: &'a mut [f32],
    /// Accumulators from panel to panel.
    pub(super) stride: usize,
    pub(super) panels: usize,
    /// Accumulators of first terms.
    pub(super) firsts: usize,
    /// Rows of second terms.
    pub(super) count: usize,
    /// The row of each second term; absent: the same.
    pub(super) rows: Option<&'a [u32]>,
}

impl Kernel for AddSeconds<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for acc in self.acc.chunks_mut(self.stride).take(self.panels) {
            let (acc, seconds) = acc.split_at_mut(self.firsts);
            for (i, second) in seconds.as_chunks::<PANEL>().0.iter().enumerate().take(self.count) {
                let row = self.rows.map_or(i, |rows| rows[i] as usize);
                let sums = &mut acc[row * PANEL..][..PANEL];
                // SAFETY: sixteen values each.
                unsafe { s.store(sums.as_mut_ptr(), s.add(s.load(sums.as_ptr()), s.load(second.as_ptr()))) };
            }
        }
    }
}

#[inline(always)]
unsafe fn load<S: Simd>(s: S, p: *const f32, cols: usize) -> S::V {
    // SAFETY: the caller's promise.
    unsafe { if cols == PANEL { s.load(p) } else { s.load_partial(p, cols, 0.0) } }
}
