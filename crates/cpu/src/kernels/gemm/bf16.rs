//! Products of bfloat16 pairs: rows of bfloat16 weights in place, times activations rounded to bfloat16.
//!
//! Shape and tiles are those of [`super::float`]. One output: lane `j` of its sums adds inputs `2j + 1` and then `2j` of each 32, each
//! with a fused multiply-add. This is what `vdpbf16ps` does with a register of pairs, so processors without it give the same bits by
//! multiply-adds of f32. The exception are numbers below 2^-126, which the instruction takes for zero. Many tokens are bound by the
//! multiply pipes: 24 instructions of 32 products for 10 loads.

use super::float::{Lanes, Panel, Products};
use crate::isa::Isa;
use crate::kernels::simd::{Kernel, LANES, Simd, dispatch};

/// Rounds a row to bfloat16, ties to even.
pub(super) fn round(isa: Isa, row: &[f32], rounded: &mut [u16]) {
    dispatch(isa, Round { row, rounded });
}

struct Round<'a> {
    row: &'a [f32],
    rounded: &'a mut [u16],
}

impl Kernel for Round<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (whole, rest) = self.row.as_chunks::<LANES>();
        let (rounded, behind) = self.rounded.as_chunks_mut::<LANES>();
        for (values, rounded) in whole.iter().zip(rounded) {
            // SAFETY: sixteen values each.
            unsafe { s.store_bf16(rounded.as_mut_ptr(), s.load(values.as_ptr())) };
        }
        let (mut values, mut last) = ([0.0; LANES], [0; LANES]);
        values[..rest.len()].copy_from_slice(rest);
        // SAFETY: as above.
        unsafe { s.store_bf16(last.as_mut_ptr(), s.load(values.as_ptr())) };
        behind.copy_from_slice(&last[..behind.len()]);
    }
}

/// Computes a panel with bfloat16 weights and activations.
///
/// # Safety
/// `tokens(i)` is valid for `k` reads of bfloat16 for each `i < num_tokens`.
pub(super) unsafe fn panel(panel: Panel<'_>) {
    #[cfg(target_arch = "x86_64")]
    if panel.isa >= Isa::Avx512 && crate::isa::has_avx512_bf16() {
        // SAFETY: the instructions are there; the caller's promise.
        return unsafe { avx512::run(panel) };
    }
    dispatch(panel.isa, Pairs(panel));
}

struct Pairs<'a>(Panel<'a>);

impl Kernel for Pairs<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: the promise of `panel`'s caller.
        unsafe { self.0.rows(Fused(s)) };
    }
}

/// Pairs by two multiply-adds of f32.
#[derive(Clone, Copy)]
struct Fused<S>(S);

impl<S: Simd> Products for Fused<S> {
    const STEP: usize = 2 * LANES;
    const WEIGHT_BYTES: usize = 2;
    const INPUT_BYTES: usize = 2;
    type Simd = S;
    type Weights = [S::V; 2];
    type Inputs = [S::V; 2];

    #[inline(always)]
    fn simd(self) -> S {
        self.0
    }
    #[inline(always)]
    unsafe fn weights(self, p: *const u8) -> [S::V; 2] {
        // SAFETY: the caller's promise, here and below.
        unsafe { self.0.load_bf16_pairs(p.cast()) }
    }
    #[inline(always)]
    unsafe fn inputs(self, p: *const u8) -> [S::V; 2] {
        // SAFETY: as above.
        unsafe { self.0.load_bf16_pairs(p.cast()) }
    }
    #[inline(always)]
    fn add(self, sums: S::V, weights: [S::V; 2], inputs: [S::V; 2]) -> S::V {
        self.0.fma(weights[0], inputs[0], self.0.fma(weights[1], inputs[1], sums))
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use super::{LANES, Lanes, Panel, Products};
    use crate::kernels::simd::Avx512;

    /// Proof that the processor has AVX-512 F, BW, VL, DQ and BF16.
    #[derive(Clone, Copy)]
    struct Avx512Bf16(Avx512);

    /// # Safety
    /// The processor has the instructions; the panel is as [`super::panel`] asks.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    pub(super) unsafe fn run(panel: Panel<'_>) {
        // SAFETY: the caller's promise.
        unsafe { panel.rows(Avx512Bf16(Avx512::assume())) };
    }

    impl Products for Avx512Bf16 {
        const STEP: usize = 2 * LANES;
        const WEIGHT_BYTES: usize = 2;
        const INPUT_BYTES: usize = 2;
        type Simd = Avx512;
        type Weights = __m512i;
        type Inputs = __m512i;

        #[inline(always)]
        fn simd(self) -> Avx512 {
            self.0
        }
        #[inline(always)]
        unsafe fn weights(self, p: *const u8) -> __m512i {
            // SAFETY: the caller's promise, here and below.
            unsafe { _mm512_loadu_si512(p.cast()) }
        }
        #[inline(always)]
        unsafe fn inputs(self, p: *const u8) -> __m512i {
            // SAFETY: as above.
            unsafe { _mm512_loadu_si512(p.cast()) }
        }
        #[inline(always)]
        fn add(self, sums: Lanes<Self>, weights: __m512i, inputs: __m512i) -> Lanes<Self> {
            // SAFETY: the token; any bits are bfloat16 values.
            unsafe {
                let weights = std::mem::transmute::<__m512i, __m512bh>(weights);
                let inputs = std::mem::transmute::<__m512i, __m512bh>(inputs);
                self.0.wrap(_mm512_dpbf16_ps(self.0.unwrap(sums), weights, inputs))
            }
        }
    }
}
