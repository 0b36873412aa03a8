//! Products of plain floats: rows of weights in place, or widened before, times rows of activations.
//!
//! One output adds up in sixteen lanes, each in the order of the inputs with fused multiply-adds; the lanes are then added 8, 4, 2, 1
//! apart. Which lane an input is added to is the matter of [`Products`]: lane `j` takes inputs `j`, `j + 16`, ... of f32, f16 and
//! bfloat16 weights that are widened on the way, and pairs of inputs in [`super::bf16`]. The pattern is the same for every tile shape.
//!
//! Register plan: a tile of 4 weight rows x 6 tokens on AVX-512 (24 accumulators, 4 weight vectors, 1 activation vector), 2 x
//! 3 pairs on AVX2, 2 x 2 fours on NEON. Many tokens are bound by fused multiply-adds (24 for 10 loads) and, where inputs are many, by
//! the second-level cache. One token goes row by row and is bound by reading weights; the chain of dependent multiply-adds overlaps
//! with the next row's.

use std::marker::PhantomData;

use qwen_formats::DType;

use super::form::PANEL;
use super::unroll::unroll;
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
}

/// Up to sixteen outputs of several tokens.
pub(super) struct Panel<'a> {
    pub(super) isa: Isa,
    /// Rows of weights, one after the other; at most 16 are used.
    pub(super) weights: &'a [u8],
    /// Inputs.
    pub(super) k: usize,
    /// Addresses of rows of `k` activations.
    pub(super) tokens: &'a dyn Fn(usize) -> *const u8,
    pub(super) num_tokens: usize,
    /// Sixteen for each token.
    pub(super) acc: &'a mut [f32],
}

/// Computes a panel with f32 activations.
///
/// # Safety
/// `tokens(i)` is valid for `k` reads of f32 for each `i < num_tokens`.
pub(super) unsafe fn panel(plain: Plain, panel: Panel<'_>) {
    dispatch(panel.isa, WidenedPanel(plain, panel));
}

struct WidenedPanel<'a>(Plain, Panel<'a>);

impl Kernel for WidenedPanel<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: `tokens` by the promise of `panel`'s caller.
        unsafe {
            match self.0 {
                Plain::F32 => self.1.rows(Widened::<S, F32>(s, PhantomData)),
                Plain::F16 => self.1.rows(Widened::<S, F16>(s, PhantomData)),
                Plain::Bf16 => self.1.rows(Widened::<S, Bf16>(s, PhantomData)),
            }
        }
    }
}

/// How some inputs of a row are multiplied and added up.
pub(super) trait Products: Copy {
    /// Inputs that are taken at a time; their bytes are at most [`MOST_BYTES`].
    const STEP: usize;
    /// Bytes of a weight.
    const WEIGHT_BYTES: usize;
    /// Bytes of an activation.
    const INPUT_BYTES: usize;
    /// What adds up.
    type Simd: Simd;
    type Weights: Copy;
    type Inputs: Copy;

    fn simd(self) -> Self::Simd;
    /// # Safety
    /// [`STEP`](Self::STEP) readable weights at `p`.
    unsafe fn weights(self, p: *const u8) -> Self::Weights;
    /// # Safety
    /// As many activations.
    unsafe fn inputs(self, p: *const u8) -> Self::Inputs;
    fn add(self, sums: Lanes<Self>, weights: Self::Weights, inputs: Self::Inputs) -> Lanes<Self>;
}

/// Sixteen sums.
pub(super) type Lanes<P> = <<P as Products>::Simd as Simd>::V;

/// Most bytes of a step's weights or activations.
const MOST_BYTES: usize = 4 * LANES;

/// Weights of a type as f32, times f32.
struct Widened<S, L>(S, PhantomData<L>);

impl<S: Copy, L> Clone for Widened<S, L> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<S: Copy, L> Copy for Widened<S, L> {}

impl<S: Simd, L: Load> Products for Widened<S, L> {
    const STEP: usize = LANES;
    const WEIGHT_BYTES: usize = L::BYTES;
    const INPUT_BYTES: usize = 4;
    type Simd = S;
    type Weights = S::V;
    type Inputs = S::V;

    #[inline(always)]
    fn simd(self) -> S {
        self.0
    }
    #[inline(always)]
    unsafe fn weights(self, p: *const u8) -> S::V {
        // SAFETY: the caller's promise, here and below.
        unsafe { L::load(self.0, p) }
    }
    #[inline(always)]
    unsafe fn inputs(self, p: *const u8) -> S::V {
        // SAFETY: as above.
        unsafe { self.0.load(p.cast()) }
    }
    #[inline(always)]
    fn add(self, sums: S::V, weights: S::V, inputs: S::V) -> S::V {
        self.0.fma(weights, inputs, sums)
    }
}

/// Loads sixteen weights.
trait Load {
    const BYTES: usize;
    /// # Safety
    /// 16 readable weights at `p`.
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::V;
}

struct F32;
struct F16;
struct Bf16;

impl Load for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { s.load(p.cast()) }
    }
}
impl Load for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { s.load_f16(p.cast()) }
    }
}
impl Load for Bf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { s.load_bf16(p.cast()) }
    }
}

impl Panel<'_> {
    /// All outputs of all tokens.
    ///
    /// # Safety
    /// `tokens(i)` is valid for reads of `k` activations for each `i < num_tokens`.
    #[inline(always)]
    pub(super) unsafe fn rows<P: Products>(self, p: P) {
        // SAFETY: the caller's promise.
        unsafe {
            if self.num_tokens == 1 {
                // Memory likes one stream of weights much better than several at once.
                self.tiles::<P, 1, 1>(p);
            } else if self.isa >= Isa::Avx512 {
                self.tiles::<P, 4, 6>(p);
            } else if self.isa == Isa::Neon {
                self.tiles::<P, 2, 2>(p);
            } else {
                self.tiles::<P, 2, 3>(p);
            }
        }
    }

    #[inline(always)]
    unsafe fn tiles<P: Products, const R: usize, const C: usize>(mut self, p: P) {
        let row_bytes = self.k * P::WEIGHT_BYTES;
        let rows = (self.weights.len() / row_bytes).min(PANEL);
        for first_row in (0..rows).step_by(R) {
            // Rows beyond the last repeat it: their results are not used.
            let weights: [&[u8]; R] =
                std::array::from_fn(|i| &self.weights[row_bytes * (first_row + i).min(rows - 1)..][..row_bytes]);
            let mut token = 0;
            // SAFETY: there are so many tokens.
            unsafe {
                while token + C <= self.num_tokens {
                    self.tile::<P, R, C>(p, weights, first_row, token);
                    token += C;
                }
                while token + 2 <= self.num_tokens {
                    self.tile::<P, R, 2>(p, weights, first_row, token);
                    token += 2;
                }
                if token < self.num_tokens {
                    self.tile::<P, R, 1>(p, weights, first_row, token);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn tile<P: Products, const R: usize, const C: usize>(
        &mut self,
        p: P,
        weights: [&[u8]; R],
        first_row: usize,
        first_token: usize,
    ) {
        const { assert!(P::STEP * P::WEIGHT_BYTES <= MOST_BYTES && P::STEP * P::INPUT_BYTES <= MOST_BYTES) };
        const { assert!(R <= 4 && PANEL.is_multiple_of(R)) };
        let (mut inputs, mut rows) = ([std::ptr::null(); C], [std::ptr::null(); R]);
        for (j, input) in inputs.iter_mut().enumerate() {
            *input = (self.tokens)(first_token + j);
        }
        for (row, weights) in rows.iter_mut().zip(weights) {
            *row = weights.as_ptr();
        }
        let mut sums = [[p.simd().splat(0.0); C]; R];
        let whole = self.k / P::STEP * P::STEP;
        for at in (0..whole).step_by(P::STEP) {
            // SAFETY: a step's inputs from `at` on are within each row.
            unsafe { step(p, &mut sums, rows, inputs, at) };
        }
        if whole < self.k {
            let (mut last_weights, mut last_inputs) = ([[0; MOST_BYTES]; R], [[0; MOST_BYTES]; C]);
            let rest = self.k - whole;
            for i in 0..R {
                last_weights[i][..rest * P::WEIGHT_BYTES].copy_from_slice(&weights[i][whole * P::WEIGHT_BYTES..]);
                rows[i] = last_weights[i].as_ptr();
            }
            for j in 0..C {
                // SAFETY: so many activations remain of the row.
                let values =
                    unsafe { std::slice::from_raw_parts(inputs[j].add(whole * P::INPUT_BYTES), rest * P::INPUT_BYTES) };
                last_inputs[j][..values.len()].copy_from_slice(values);
                inputs[j] = last_inputs[j].as_ptr();
            }
            // SAFETY: the buffers hold a step.
            unsafe { step(p, &mut sums, rows, inputs, 0) };
        }
        let s = p.simd();
        unroll!(j < C, {
            let outputs = &mut self.acc[(first_token + j) * PANEL + first_row..];
            if R == 1 {
                outputs[0] = s.reduce_add(sums[0][j]);
            } else {
                let four = s.reduce_add_four([sums[0][j], sums[1 % R][j], sums[2 % R][j], sums[3 % R][j]]);
                outputs[..R].copy_from_slice(&four[..R]);
            }
        });
    }
}

/// Adds the products of a step from input `at` on. Not a closure, which would not have the caller's instructions.
///
/// # Safety
/// A step is readable from there in each row.
#[inline(always)]
unsafe fn step<P: Products, const R: usize, const C: usize>(
    p: P,
    sums: &mut [[Lanes<P>; C]; R],
    rows: [*const u8; R],
    inputs: [*const u8; C],
    at: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut w = [p.weights(rows[0].add(at * P::WEIGHT_BYTES)); R];
        for i in 1..R {
            w[i] = p.weights(rows[i].add(at * P::WEIGHT_BYTES));
        }
        for j in 0..C {
            let x = p.inputs(inputs[j].add(at * P::INPUT_BYTES));
            for i in 0..R {
                sums[i][j] = p.add(sums[i][j], w[i], x);
            }
        }
    }
}
