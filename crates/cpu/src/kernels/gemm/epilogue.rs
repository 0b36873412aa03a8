//! From accumulators to the output: bias, then a gated unit or an addend.

use super::form::PANEL;
use super::{Activation, Epilogue};
use crate::isa::Isa;
use crate::kernels::math;
use crate::kernels::simd::{Kernel, Simd, dispatch};
use crate::matrix::MatrixMut;

/// Up to sixteen columns of some rows of the output.
pub(super) struct Store<'a> {
    /// Rows of sixteen, and those of the second segment of a gated unit.
    pub(super) acc: [&'a [f32]; 2],
    /// Biases of the panel's columns.
    pub(super) bias: [Option<&'a [f32]>; 2],
    pub(super) first_row: usize,
    pub(super) rows: usize,
    pub(super) first_col: usize,
    pub(super) cols: usize,
    pub(super) out: MatrixMut<'a, f32>,
    pub(super) epilogue: Epilogue<'a>,
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
        let bias0 = self.bias(s, 0);
        let bias1 = self.bias(s, 1);
        for row in 0..self.rows {
            let mut y = self.acc(s, 0, row, bias0);
            let at = self.first_row + row;
            match self.epilogue {
                Epilogue::None => {}
                Epilogue::Glu(activation) => {
                    let gate = match activation {
                        Activation::Silu => math::silu(s, y),
                        Activation::GeluTanh => math::gelu_tanh(s, y),
                    };
                    y = s.mul(gate, self.acc(s, 1, row, bias1));
                }
                Epilogue::Add(addend) => {
                    // SAFETY: within the addend by the promise of `store`.
                    y = s.add(y, unsafe { load(s, addend.row_ptr(at).add(self.first_col), self.cols) });
                }
            }
            // SAFETY: within the output and ours by the promise of `store`.
            unsafe {
                let to = self.out.row_ptr(at).add(self.first_col);
                if self.cols == PANEL {
                    s.store(to, y);
                } else {
                    s.store_partial(to, self.cols, y);
                }
            }
        }
    }
}

impl Store<'_> {
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

#[inline(always)]
unsafe fn load<S: Simd>(s: S, p: *const f32, cols: usize) -> S::V {
    // SAFETY: the caller's promise.
    unsafe { if cols == PANEL { s.load(p) } else { s.load_partial(p, cols, 0.0) } }
}
