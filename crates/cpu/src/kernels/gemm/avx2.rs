//! AVX2 twins: integer products in pieces of eight rows, rounding of activations.
//!
//! There is no exact unsigned x signed byte product with 32-bit sums; `vpmaddubsw` adds pairs in 16 bits. Codes are made signed,
//! their magnitude multiplies activations that carry the sign: at most 2 x 128 x 127 a pair, which fits. `vpmaddwd` with ones
//! then adds pairs of pairs. Five instructions per run of 4 inputs x 8 rows: bound by the integer pipes.

use std::arch::x86_64::*;

use super::activations::{self, Format};
use super::form::{Form, PANEL};
use super::wide::{RUNS, WideGroup};

/// Unpacks whole packed blocks: the scalar code, compiled for AVX2.
///
/// # Safety
/// The processor has AVX2, FMA, F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn unpack(form: Form, packed: &[u8], wide: &mut [WideGroup]) {
    form.unpack(packed, wide);
}

/// The scalar code, compiled for AVX2.
///
/// # Safety
/// The processor has AVX2, FMA, F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn round_row(format: Format, row: &[f32], slot: usize, width: usize, tile: &mut [u32]) {
    activations::round_row(format, row, slot, width, tile);
}

/// Adds a stretch of a panel times a tile of `width` rows to `acc`.
///
/// # Safety
/// The processor has AVX2, FMA.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn multiply(
    format: Format,
    halves: usize,
    has_min: bool,
    width: usize,
    wide: &[WideGroup],
    words: &[u32],
    acc: &mut [f32],
) {
    // SAFETY: the caller's promise.
    unsafe {
        match (format.subs, format.terms) {
            (1, 1) => tile::<1, 1>(halves, has_min, width, wide, words, acc),
            (1, _) => tile::<1, 2>(halves, has_min, width, wide, words, acc),
            (_, 1) => tile::<2, 1>(halves, has_min, width, wide, words, acc),
            _ => tile::<2, 2>(halves, has_min, width, wide, words, acc),
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<const SUBS: usize, const TERMS: usize>(
    halves: usize,
    has_min: bool,
    width: usize,
    wide: &[WideGroup],
    words: &[u32],
    acc: &mut [f32],
) {
    let runs = RUNS / SUBS;
    let sub_words = width * (runs * TERMS + 3);
    assert!(words.len() >= wide.len() * SUBS * sub_words && acc.len() >= width * PANEL);
    let acc = acc.as_mut_ptr();
    let top = _mm256_set1_epi8(-128);
    let ones = _mm256_set1_epi16(1);
    for rows in [0, 8] {
        let mut at = words.as_ptr().cast::<i32>();
        for group in wide {
            for sub in 0..SUBS {
                let half = if halves == 2 { sub } else { 0 };
                // SAFETY: the assertion covers all that is read and written in this block.
                unsafe {
                    let scale = _mm256_load_ps(group.scale[half].as_ptr().add(rows));
                    let min = _mm256_load_ps(group.min[half].as_ptr().add(rows));
                    let mut codes = [top; RUNS];
                    let mut magnitudes = [top; RUNS];
                    for run in 0..runs {
                        let stored = _mm256_load_si256(group.codes[sub * runs + run].as_ptr().add(rows).cast());
                        codes[run] = _mm256_xor_si256(stored, top);
                        magnitudes[run] = _mm256_abs_epi8(codes[run]);
                    }
                    let meta = at.add(width * runs * TERMS);
                    for t in 0..width {
                        let mut sum = _mm256_setzero_si256();
                        for term in 0..TERMS {
                            sum = _mm256_slli_epi32::<8>(sum);
                            for run in 0..runs {
                                let x = _mm256_set1_epi32(*at.add((t * TERMS + term) * runs + run));
                                let x = _mm256_sign_epi8(x, codes[run]);
                                let pairs = _mm256_maddubs_epi16(magnitudes[run], x);
                                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
                            }
                        }
                        let y = acc.add(t * PANEL + rows);
                        let scale = _mm256_mul_ps(scale, _mm256_set1_ps(*meta.add(t).cast::<f32>()));
                        let mut sum = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(sum), _mm256_loadu_ps(y));
                        if has_min {
                            sum = _mm256_fmadd_ps(min, _mm256_set1_ps(*meta.add(width + t).cast::<f32>()), sum);
                        }
                        _mm256_storeu_ps(y, sum);
                    }
                    at = at.add(sub_words);
                }
            }
        }
    }
}
