//! Products of f32 values: rows of weights in place (f32, f16, bfloat16, widened on the way) or widened before.
//!
//! One output is the product of two rows of `k` values. Lane `j` of its accumulator adds inputs `j`, `j + 16`, ... in order with
//! fused multiply-adds; the lanes are then added 8, 4, 2, 1 apart. The pattern is the same for every tile shape.
//!
//! Register plan: a tile of 4 weight rows x 6 tokens on AVX-512 (24 accumulators, 4 weight vectors, 1 activation vector), 2 x
//! 3 pairs on AVX2, 2 x 2 fours on NEON. Many tokens are bound by fused multiply-adds (24 for 10 loads). One token goes row by row and is bound by
//! reading weights; the chain of dependent multiply-adds overlaps with the next row's.

use qwen_formats::DType;

use super::form::PANEL;
use crate::isa::Isa;
use crate::kernels::simd::{Kernel, LANES, Simd, dispatch};

/// A type that the kernel widens on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Plain {
    F32,
    F16,
    Bf16,
}

impl Plain {
    /// The type, if it is one of them.
    pub(super) const fn of(dtype: DType) -> Option<Self> {
        Some(match dtype {
            DType::F32 => Self::F32,
            DType::F16 => Self::F16,
            DType::BF16 => Self::Bf16,
            _ => return None,
        })
    }

    const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// Up to sixteen outputs of several tokens.
pub(super) struct Panel<'a> {
    pub(super) isa: Isa,
    pub(super) plain: Plain,
    /// Rows of weights, one after the other; at most 16 are used.
    pub(super) weights: &'a [u8],
    /// Inputs.
    pub(super) k: usize,
    /// Rows of activations of `k` values.
    pub(super) tokens: &'a dyn Fn(usize) -> *const f32,
    pub(super) num_tokens: usize,
    /// Sixteen for each token.
    pub(super) acc: &'a mut [f32],
}

/// Computes a panel.
///
/// # Safety
/// `tokens(i)` is valid for `k` reads for each `i < num_tokens`.
pub(super) unsafe fn panel(panel: Panel<'_>) {
    dispatch(panel.isa, panel);
}

impl Kernel for Panel<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.plain {
            Plain::F32 => self.rows::<S, F32>(s),
            Plain::F16 => self.rows::<S, F16>(s),
            Plain::Bf16 => self.rows::<S, Bf16>(s),
        }
    }
}

/// Loads sixteen weights.
trait Load {
    /// # Safety
    /// 16 readable weights at `p`.
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::V;
}

struct F32;
struct F16;
struct Bf16;

impl Load for F32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { s.load(p.cast()) }
    }
}
impl Load for F16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { s.load_f16(p.cast()) }
    }
}
impl Load for Bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { s.load_bf16(p.cast()) }
    }
}

impl Panel<'_> {
    #[inline(always)]
    fn rows<S: Simd, L: Load>(self, s: S) {
        if self.num_tokens == 1 {
            // Memory likes one stream of weights much better than several at once.
            self.tiles::<S, L, 1, 1>(s);
        } else if self.isa >= Isa::Avx512 {
            self.tiles::<S, L, 4, 6>(s);
        } else if self.isa == Isa::Neon {
            self.tiles::<S, L, 2, 2>(s);
        } else {
            self.tiles::<S, L, 2, 3>(s);
        }
    }

    #[inline(always)]
    fn tiles<S: Simd, L: Load, const R: usize, const C: usize>(mut self, s: S) {
        let row_bytes = self.k * self.plain.bytes();
        let rows = (self.weights.len() / row_bytes).min(PANEL);
        for first_row in (0..rows).step_by(R) {
            // Rows beyond the last repeat it: their results are not used.
            let weights: [*const u8; R] =
                std::array::from_fn(|i| self.weights[row_bytes * (first_row + i).min(rows - 1)..].as_ptr());
            let mut token = 0;
            while token + C <= self.num_tokens {
                self.tile::<S, L, R, C>(s, weights, first_row, token);
                token += C;
            }
            while token + 2 <= self.num_tokens {
                self.tile::<S, L, R, 2>(s, weights, first_row, token);
                token += 2;
            }
            if token < self.num_tokens {
                self.tile::<S, L, R, 1>(s, weights, first_row, token);
            }
        }
    }

    #[inline(always)]
    fn tile<S: Simd, L: Load, const R: usize, const C: usize>(
        &mut self,
        s: S,
        weights: [*const u8; R],
        first_row: usize,
        first_token: usize,
    ) {
        let bytes = self.plain.bytes();
        let mut acc = [[s.splat(0.0); C]; R];
        let mut tokens = [std::ptr::null(); C];
        for (i, token) in tokens.iter_mut().enumerate() {
            *token = (self.tokens)(first_token + i);
        }
        let whole = self.k / LANES * LANES;
        let mut at = 0;
        while at < whole {
            let mut w = [s.splat(0.0); R];
            for i in 0..R {
                // SAFETY: 16 inputs from `at` on are within the row.
                w[i] = unsafe { L::load(s, weights[i].add(at * bytes)) };
            }
            for j in 0..C {
                // SAFETY: as above.
                let x = unsafe { s.load(tokens[j].add(at)) };
                for i in 0..R {
                    acc[i][j] = s.fma(w[i], x, acc[i][j]);
                }
            }
            at += LANES;
        }
        let rest = self.k - whole;
        if rest > 0 {
            for j in 0..C {
                // SAFETY: `rest` values remain of the row.
                let x = unsafe { s.load_partial(tokens[j].add(whole), rest, 0.0) };
                for i in 0..R {
                    let mut buffer = [0u8; 4 * LANES];
                    // SAFETY: `rest` weights remain of the row and fit the buffer.
                    let w = unsafe {
                        std::ptr::copy_nonoverlapping(weights[i].add(whole * bytes), buffer.as_mut_ptr(), rest * bytes);
                        L::load(s, buffer.as_ptr())
                    };
                    acc[i][j] = s.fma(w, x, acc[i][j]);
                }
            }
        }
        for (i, acc) in acc.into_iter().enumerate() {
            if first_row + i < PANEL {
                for (j, acc) in acc.into_iter().enumerate() {
                    self.acc[(first_token + j) * PANEL + first_row + i] = s.reduce_add(acc);
                }
            }
        }
    }
}
