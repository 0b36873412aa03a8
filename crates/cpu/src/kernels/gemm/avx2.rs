//! AVX2 twins: integer products in pieces of eight rows, rounding of activations.
//!
//! There is no exact unsigned x signed byte product with 32-bit sums; `vpmaddubsw` adds pairs in 16 bits. Codes are made signed,
//! their magnitude multiplies activations that carry the sign: at most 2 x 128 x 127 a pair, which fits. `vpmaddwd` with ones
//! then adds pairs of pairs. Five instructions per run of 4 inputs x 8 rows: bound by the integer pipes.

use std::arch::x86_64::*;

use qwen_formats::DType;

use super::activations::{self, Format, Term};
use super::few::few_rows_entry;
use super::form::PANEL;
use super::sources::{gemv_entry, unpack_entry};
use super::vector::Vector;
use super::wide::{RUNS, WideGroup};

/// The scalar code, compiled for AVX2.
///
/// # Safety
/// The processor has AVX2, FMA, F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn round_row(format: Format, term: Term, row: &[f32], slot: usize, width: usize, tile: &mut [u32]) {
    activations::round_row(format, term, row, slot, width, tile);
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
        match format.subs {
            1 => tile::<1>(halves, has_min, width, wide, words, acc),
            _ => tile::<2>(halves, has_min, width, wide, words, acc),
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<const SUBS: usize>(
    halves: usize,
    has_min: bool,
    width: usize,
    wide: &[WideGroup],
    words: &[u32],
    acc: &mut [f32],
) {
    let runs = RUNS / SUBS;
    let sub_words = width * (runs + 3);
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
                    let meta = at.add(width * runs);
                    for t in 0..width {
                        let mut sum = _mm256_setzero_si256();
                        for run in 0..runs {
                            let x = _mm256_set1_epi32(*at.add(t * runs + run));
                            let x = _mm256_sign_epi8(x, codes[run]);
                            let pairs = _mm256_maddubs_epi16(magnitudes[run], x);
                            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
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

/// Eight rows.
#[derive(Clone, Copy)]
struct Rows8(__m256i);

unpack_entry!(Rows8, "avx2,fma,f16c");
few_rows_entry!(Rows8, "avx2,fma,f16c");
gemv_entry!(Rows8, "avx2,fma,f16c");

/// A method's body. SAFETY: the trait's callers have the instructions and valid pointers.
macro_rules! vector {
    ($($body:tt)*) => {
        // SAFETY: as said.
        unsafe { $($body)* }
    };
}

impl Vector for Rows8 {
    type Float = __m256;
    const ROWS: usize = 8;

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        vector!(_mm_prefetch::<_MM_HINT_T0>(p.cast()));
    }
    #[inline(always)]
    unsafe fn load(p: *const u8) -> Self {
        vector!(Self(_mm256_loadu_si256(p.cast())))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut u8) {
        vector!(_mm256_storeu_si256(p.cast(), self.0));
    }
    #[inline(always)]
    unsafe fn splat8(x: u8) -> Self {
        vector!(Self(_mm256_set1_epi8(x.cast_signed())))
    }
    #[inline(always)]
    unsafe fn splat32(x: i32) -> Self {
        vector!(Self(_mm256_set1_epi32(x)))
    }
    #[inline(always)]
    unsafe fn and(self, other: Self) -> Self {
        vector!(Self(_mm256_and_si256(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn or(self, other: Self) -> Self {
        vector!(Self(_mm256_or_si256(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn add8(self, other: Self) -> Self {
        vector!(Self(_mm256_add_epi8(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn add32(self, other: Self) -> Self {
        vector!(Self(_mm256_add_epi32(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn up16<const N: u32>(self) -> Self {
        vector!(Self(_mm256_sll_epi16(self.0, _mm_cvtsi32_si128(N as i32))))
    }
    #[inline(always)]
    unsafe fn down16<const N: u32>(self) -> Self {
        vector!(Self(_mm256_srl_epi16(self.0, _mm_cvtsi32_si128(N as i32))))
    }
    #[inline(always)]
    unsafe fn up32<const N: u32>(self) -> Self {
        vector!(Self(_mm256_sll_epi32(self.0, _mm_cvtsi32_si128(N as i32))))
    }
    #[inline(always)]
    unsafe fn down32(self, count: usize) -> Self {
        vector!(Self(_mm256_srl_epi32(self.0, _mm_cvtsi32_si128(count as i32))))
    }
    #[inline(always)]
    unsafe fn lookup(self, table: &[u8; 16]) -> Self {
        vector!(Self(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())), self.0)))
    }
    #[inline(always)]
    unsafe fn bytes(p: *const u8) -> Self {
        vector!(Self(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()))))
    }
    #[inline(always)]
    unsafe fn signed_bytes(p: *const u8) -> Self {
        vector!(Self(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))))
    }
    #[inline(always)]
    unsafe fn halves(p: *const u8) -> Self {
        vector!(Self(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()))))
    }
    #[inline(always)]
    unsafe fn half(p: *const u8) -> __m256 {
        vector!(_mm256_cvtph_ps(_mm_loadu_si128(p.cast())))
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        vector!(_mm256_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load_float(p: *const f32) -> __m256 {
        vector!(_mm256_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn store_float(x: __m256, p: *mut f32) {
        vector!(_mm256_storeu_ps(p, x));
    }
    #[inline(always)]
    unsafe fn to_float(self) -> __m256 {
        vector!(_mm256_cvtepi32_ps(self.0))
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        vector!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        vector!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        vector!(_mm256_sub_ps(a, b))
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        vector!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    unsafe fn begin<const OFFSET: u8>(offset: *const i32) -> Self {
        // SAFETY: as said; the stored number is a multiple of 128. Codes with offset 128 are made signed instead.
        unsafe { Self(_mm256_set1_epi32(if OFFSET == 128 { 0 } else { *offset >> (7 - OFFSET.trailing_zeros()) })) }
    }
    #[inline(always)]
    unsafe fn dot<const OFFSET: u8, const COUNT: usize>(sum: Self, codes: [Self; COUNT], x: *const i32) -> Self {
        vector! {
            let ones = _mm256_set1_epi16(1);
            if OFFSET == 8 {
                // Codes are below 16: eight pairs add up to at most 8 x 2 x 15 x 127, which fits 16 bits.
                let mut pairs = _mm256_setzero_si256();
                for (run, codes) in codes.into_iter().enumerate() {
                    let products = _mm256_maddubs_epi16(codes.0, _mm256_set1_epi32(*x.add(run)));
                    pairs = _mm256_add_epi16(pairs, products);
                }
                return Self(_mm256_add_epi32(sum.0, _mm256_madd_epi16(pairs, ones)));
            }
            let mut sum = sum.0;
            for (run, codes) in codes.into_iter().enumerate() {
                let codes = _mm256_xor_si256(codes.0, _mm256_set1_epi8(-128));
                let x = _mm256_sign_epi8(_mm256_set1_epi32(*x.add(run)), codes);
                let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), x);
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
            }
            Self(sum)
        }
    }
}
