//! AVX-512 with VNNI: integer products.
//!
//! `vpdpbusd` multiplies 4 inputs of 16 rows: the weight codes, unsigned, are the first operand; four int8 activations, broadcast
//! from memory, the second. Codes are stored with an offset; the accumulator starts at minus the offset times the sum of
//! the activations' codes, so the integer sum is exact.
//!
//! [`tile`] takes a run of weights at a time for all tokens, so that the dot products that follow each other are independent: one
//! token after the other each waits for its own last. With 16 tokens the 16 float accumulators leave the registers once a group.
//! Per token and group 8 dot products, 1 conversion, 1 product, 1 or 2 fused multiply-adds: bound by the two multiply pipes
//! (10 or 11 of 512 bits per 512 products). One token ([`gemv`], straight from the packed form): bound by reading weights.

use std::arch::x86_64::*;

use qwen_formats::DType;

use super::activations::Format;
use super::exact::exact_entry;
use super::few::few_rows_entry;
use super::sources::{gemv_entry, unpack_entry};
use super::unroll::unroll;
use super::vector::Vector;
use super::wide::{Ask, RUNS, WideGroup};

/// Calls a `tile` with the format, halves, minima and width as constants, turned so one at a time; the rest are its arguments.
macro_rules! tile_of {
    ($tile:ident, $format:expr, $halves:expr, $has_min:expr, $width:expr, $arguments:tt) => {
        match ($halves, $format.subs) {
            (1, 1) => tile_of!(@ $tile, $has_min, $width, $arguments, 1, 1),
            (1, _) => tile_of!(@ $tile, $has_min, $width, $arguments, 1, 2),
            _ => tile_of!(@ $tile, $has_min, $width, $arguments, 2, 2),
        }
    };
    (@ $tile:ident, $has_min:expr, $width:expr, $arguments:tt, $h:literal, $s:literal) => {
        if $has_min {
            tile_of!(@@ $tile, $width, $arguments, $h, $s, true)
        } else {
            tile_of!(@@ $tile, $width, $arguments, $h, $s, false)
        }
    };
    (@@ $tile:ident, $width:expr, $arguments:tt, $h:literal, $s:literal, $m:literal) => {
        match $width {
            1 => $tile::<$h, $s, $m, 1> $arguments,
            2 => $tile::<$h, $s, $m, 2> $arguments,
            4 => $tile::<$h, $s, $m, 4> $arguments,
            8 => $tile::<$h, $s, $m, 8> $arguments,
            12 => $tile::<$h, $s, $m, 12> $arguments,
            _ => $tile::<$h, $s, $m, 16> $arguments,
        }
    };
}
pub(super) use tile_of;

/// Adds a stretch of a panel times a tile; the vector twin of [`super::scalar::tile`].
///
/// # Safety
/// The processor has AVX-512 F, BW, VL, DQ, VNNI. `words` holds `wide.len()` groups of a tile of `W` rows, `acc` W x 16.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn tile<const HALVES: usize, const SUBS: usize, const MIN: bool, const W: usize>(
    wide: &[WideGroup],
    words: &[u32],
    ask: Ask,
    acc: &mut [f32],
) {
    let runs = RUNS / SUBS;
    let sub_words = W * (runs + 3);
    assert!(words.len() >= wide.len() * SUBS * sub_words && acc.len() >= W * 16);
    let acc = acc.as_mut_ptr();
    let mut at = words.as_ptr().cast::<i32>();
    // SAFETY: the assertion covers all that is read and written below; instructions by the caller's promise.
    unsafe {
        let mut y = [_mm512_setzero_ps(); W];
        for (t, y) in y.iter_mut().enumerate() {
            *y = _mm512_loadu_ps(acc.add(16 * t));
        }
        for (i, group) in wide.iter().enumerate() {
            ask.group(i);
            for sub in 0..SUBS {
                let half = if HALVES == 2 { sub } else { 0 };
                let scale = _mm512_load_ps(group.scale[half].as_ptr());
                let min = _mm512_load_ps(group.min[half].as_ptr());
                let meta = at.add(W * runs);
                let mut sums = [_mm512_setzero_si512(); W];
                unroll!(t < W, {
                    sums[t] = _mm512_set1_epi32(*meta.add(2 * W + t));
                });
                for run in 0..runs {
                    let codes = _mm512_load_si512(group.codes[sub * runs + run].as_ptr().cast());
                    unroll!(t < W, {
                        sums[t] = _mm512_dpbusd_epi32(sums[t], codes, _mm512_set1_epi32(*at.add(t * runs + run)));
                    });
                }
                unroll!(t < W, {
                    let scale = _mm512_mul_ps(scale, _mm512_set1_ps(*meta.add(t).cast::<f32>()));
                    y[t] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(sums[t]), y[t]);
                    if MIN {
                        y[t] = _mm512_fmadd_ps(min, _mm512_set1_ps(*meta.add(W + t).cast::<f32>()), y[t]);
                    }
                });
                at = at.add(sub_words);
            }
        }
        for (t, y) in y.into_iter().enumerate() {
            _mm512_storeu_ps(acc.add(16 * t), y);
        }
    }
}

/// Adds a stretch of a panel times a tile of `width` rows to `acc`.
///
/// # Safety
/// As [`tile`].
#[expect(clippy::too_many_arguments, reason = "what a tile is made of")]
pub(super) unsafe fn multiply(
    format: Format,
    halves: usize,
    has_min: bool,
    width: usize,
    wide: &[WideGroup],
    words: &[u32],
    ask: Ask,
    acc: &mut [f32],
) {
    // SAFETY: the caller's promise.
    unsafe { tile_of!(tile, format, halves, has_min, width, (wide, words, ask, acc)) }
}

/// Sixteen rows.
#[derive(Clone, Copy)]
struct Rows16(__m512i);

unpack_entry!(Rows16, "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni");
few_rows_entry!(Rows16, "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni");
gemv_entry!(Rows16, "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni");
exact_entry!(Rows16, "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni");

/// A method's body. SAFETY: the trait's callers have the instructions and valid pointers.
macro_rules! vector {
    ($($body:tt)*) => {
        // SAFETY: as said.
        unsafe { $($body)* }
    };
}

impl Vector for Rows16 {
    type Float = __m512;
    const ROWS: usize = 16;

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        vector!(_mm_prefetch::<_MM_HINT_T0>(p.cast()));
    }
    #[inline(always)]
    unsafe fn load(p: *const u8) -> Self {
        vector!(Self(_mm512_loadu_si512(p.cast())))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut u8) {
        vector!(_mm512_storeu_si512(p.cast(), self.0));
    }
    #[inline(always)]
    unsafe fn splat8(x: u8) -> Self {
        vector!(Self(_mm512_set1_epi8(x.cast_signed())))
    }
    #[inline(always)]
    unsafe fn splat32(x: i32) -> Self {
        vector!(Self(_mm512_set1_epi32(x)))
    }
    #[inline(always)]
    unsafe fn and(self, other: Self) -> Self {
        vector!(Self(_mm512_and_si512(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn or(self, other: Self) -> Self {
        vector!(Self(_mm512_or_si512(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn add8(self, other: Self) -> Self {
        vector!(Self(_mm512_add_epi8(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn add32(self, other: Self) -> Self {
        vector!(Self(_mm512_add_epi32(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn up16<const N: u32>(self) -> Self {
        vector!(Self(_mm512_slli_epi16::<N>(self.0)))
    }
    #[inline(always)]
    unsafe fn down16<const N: u32>(self) -> Self {
        vector!(Self(_mm512_srli_epi16::<N>(self.0)))
    }
    #[inline(always)]
    unsafe fn up32<const N: u32>(self) -> Self {
        vector!(Self(_mm512_slli_epi32::<N>(self.0)))
    }
    #[inline(always)]
    unsafe fn down32(self, count: usize) -> Self {
        vector!(Self(_mm512_srl_epi32(self.0, _mm_cvtsi32_si128(count as i32))))
    }
    #[inline(always)]
    unsafe fn lookup(self, table: &[u8; 16]) -> Self {
        vector!(Self(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), self.0)))
    }
    #[inline(always)]
    unsafe fn bytes(p: *const u8) -> Self {
        vector!(Self(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()))))
    }
    #[inline(always)]
    unsafe fn signed_bytes(p: *const u8) -> Self {
        vector!(Self(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))))
    }
    #[inline(always)]
    unsafe fn halves(p: *const u8) -> Self {
        vector!(Self(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()))))
    }
    #[inline(always)]
    unsafe fn signed_bytes_to_floats(self) -> [__m512; 4] {
        vector! {
            let first = _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(self.0)));
            let second = _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(_mm512_slli_epi32::<16>(self.0)));
            let third = _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(_mm512_slli_epi32::<8>(self.0)));
            [first, second, third, _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(self.0))]
        }
    }
    #[inline(always)]
    unsafe fn half(p: *const u8) -> __m512 {
        vector!(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast())))
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        vector!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load_float(p: *const f32) -> __m512 {
        vector!(_mm512_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn store_float(x: __m512, p: *mut f32) {
        vector!(_mm512_storeu_ps(p, x));
    }
    #[inline(always)]
    unsafe fn to_float(self) -> __m512 {
        vector!(_mm512_cvtepi32_ps(self.0))
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        vector!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        vector!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        vector!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        vector!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    unsafe fn begin<const OFFSET: u8>(offset: *const i32) -> Self {
        // SAFETY: as said; the stored number is a multiple of 128.
        unsafe { Self(_mm512_set1_epi32(*offset >> (7 - OFFSET.trailing_zeros()))) }
    }
    #[inline(always)]
    unsafe fn dot<const OFFSET: u8, const COUNT: usize>(sum: Self, codes: [Self; COUNT], x: *const i32) -> Self {
        // Two chains: integer sums don't depend on their order.
        vector! {
            let mut sums = [sum.0, _mm512_setzero_si512()];
            for (run, codes) in codes.into_iter().enumerate() {
                sums[run % 2] = _mm512_dpbusd_epi32(sums[run % 2], codes.0, _mm512_set1_epi32(*x.add(run)));
            }
            Self(_mm512_add_epi32(sums[0], sums[1]))
        }
    }
}
