//! AVX2 twins: integer products in pieces of eight outputs.
//!
//! `vpmaddubsw` multiplies unsigned codes with int8 activations and adds pairs in 16 bits. Codes of up to six bits stay unsigned, with
//! their type's own offset, and several runs of 4 inputs fit 16 bits before `vpmaddwd` with ones widens them ([`together`]); the sum
//! begins at minus the offset times the sum of the activations. Codes that need all eight bits are made signed: their magnitudes
//! multiply activations that carry the sign, at most 2 x 128 x 127 a pair, and each run is widened by itself.
//!
//! [`tile`] takes a run of sixteen outputs at a time for four rows, so that a load of activations serves two registers of codes and one
//! of codes four rows. Per row, group and eight outputs 8 products, 8 sums, and about 6 operations to widen and scale: 22 for 256
//! products, on four vector pipes (AMD Zen 3; other processors have three).

#![expect(clippy::needless_range_loop, reason = "registers by number: an iterator would move them through memory")]

use std::arch::x86_64::*;

use qwen_formats::DType;

use super::activations::Format;
use super::exact::exact_entry;
use super::few::few_rows_entry;
use super::form::PANEL;
use super::sources::{Source, gemv_entry, unpack_entry, with_source};
use super::vector::Vector;
use super::wide::{RUNS, WideGroup};

/// Largest sum of two products of a code below twice `offset` and an activation.
const fn largest_pair(offset: u8) -> usize {
    2 * 127 * (2 * offset as usize - 1)
}

/// Runs whose products add up to 16 bits: as many as fit, a power of two and at most a group's.
const fn together(offset: u8) -> usize {
    let mut runs = RUNS;
    while runs > 1 && runs * largest_pair(offset) > i16::MAX as usize {
        runs /= 2;
    }
    runs
}
const _: () =
    assert!(together(8) == 8 && together(16) == 4 && together(32) == 2 && largest_pair(32) <= i16::MAX as usize);

/// Adds a stretch of a panel times a tile of `width` rows to `acc`. Codes are unpacked with [`OWN`](super::sources::OWN).
///
/// # Safety
/// The processor has AVX2, FMA.
pub(super) unsafe fn multiply(
    dtype: DType,
    format: Format,
    width: usize,
    wide: &[WideGroup],
    words: &[u32],
    acc: &mut [f32],
) {
    macro_rules! call {
        ($source:ident) => {
            if super::sources::$source::HALVES == 1 && format.subs == 1 {
                rows::<super::sources::$source, 1>(width, wide, words, acc)
            } else {
                rows::<super::sources::$source, 2>(width, wide, words, acc)
            }
        };
    }
    // SAFETY: the caller's promise.
    unsafe { with_source!(dtype, call) }
}

/// A tile four rows at a time.
///
/// # Safety
/// The processor has AVX2, FMA.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn rows<S: Source, const SUBS: usize>(width: usize, wide: &[WideGroup], words: &[u32], acc: &mut [f32]) {
    let sub_words = width * (RUNS / SUBS + 3);
    assert!(width <= 2 || width.is_multiple_of(4), "tiles of {width} rows");
    assert!(words.len() >= wide.len() * SUBS * sub_words && acc.len() >= width * PANEL);
    let mut at = words.as_ptr().cast::<i32>();
    let acc = acc.as_mut_ptr();
    for group in wide {
        for sub in 0..SUBS {
            // SAFETY: the assertions cover all that is read and written in this block; instructions by the caller's promise.
            unsafe {
                match width {
                    1 => tile::<S, SUBS, 1>(group, sub, at, width, 0, acc),
                    2 => tile::<S, SUBS, 2>(group, sub, at, width, 0, acc),
                    _ => {
                        for first in (0..width).step_by(4) {
                            tile::<S, SUBS, 4>(group, sub, at, width, first, acc);
                        }
                    }
                }
                at = at.add(sub_words);
            }
        }
    }
}

/// A subgroup of sixteen outputs times `W` rows of a tile, from row `first` on.
///
/// # Safety
/// The processor has AVX2, FMA. `words` are a subgroup of a tile of `width` rows, `acc` its sums; `first + W` is at most `width`.
#[inline(always)]
unsafe fn tile<S: Source, const SUBS: usize, const W: usize>(
    group: &WideGroup,
    sub: usize,
    words: *const i32,
    width: usize,
    first: usize,
    acc: *mut f32,
) {
    let runs = RUNS / SUBS;
    let half = if S::HALVES == 2 { sub } else { 0 };
    let together = S::together::<Rows8>();
    // SAFETY: the caller's promise.
    unsafe {
        let meta = words.add(width * runs + first);
        let mut sums = [[Rows8::splat32(0); 2]; W];
        for t in 0..W {
            sums[t] = [S::begin::<Rows8>(meta.add(2 * width + t)); 2];
        }
        for stage in (0..runs).step_by(together) {
            let mut parts = sums;
            for t in 0..W {
                parts[t] = [S::open(sums[t][0]), S::open(sums[t][1])];
            }
            for run in stage..runs.min(stage + together) {
                let codes = group.codes[sub * runs + run].as_ptr().cast::<u8>();
                let codes = [Rows8::load(codes), Rows8::load(codes.add(32))];
                for t in 0..W {
                    let x = words.add((first + t) * runs + run);
                    parts[t] = if S::OFFSET == 128 {
                        [parts[t][0].step_signed(codes[0], x), parts[t][1].step_signed(codes[1], x)]
                    } else {
                        [S::step(parts[t][0], codes[0], x), S::step(parts[t][1], codes[1], x)]
                    };
                }
            }
            for t in 0..W {
                sums[t] = [S::close(sums[t][0], parts[t][0]), S::close(sums[t][1], parts[t][1])];
            }
        }
        for t in 0..W {
            for part in 0..2 {
                let y = acc.add((first + t) * PANEL + 8 * part);
                let scale = _mm256_load_ps(group.scale[half].as_ptr().add(8 * part));
                let scale = _mm256_mul_ps(scale, _mm256_set1_ps(*meta.add(t).cast::<f32>()));
                let mut sum = _mm256_fmadd_ps(scale, sums[t][part].to_float(), _mm256_loadu_ps(y));
                if S::HAS_MIN {
                    let min = _mm256_load_ps(group.min[half].as_ptr().add(8 * part));
                    sum = _mm256_fmadd_ps(min, _mm256_set1_ps(*meta.add(width + t).cast::<f32>()), sum);
                }
                _mm256_storeu_ps(y, sum);
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
exact_entry!(Rows8, "avx2,fma,f16c");

/// A method's body. SAFETY: the trait's callers have the instructions and valid pointers.
macro_rules! vector {
    ($($body:tt)*) => {
        // SAFETY: as said.
        unsafe { $($body)* }
    };
}

impl Rows8 {
    /// A sum in 32 bits plus the products of signed codes, of which the magnitude multiplies activations that carry the sign.
    #[inline(always)]
    unsafe fn step_signed(self, codes: Self, x: *const i32) -> Self {
        vector! {
            let x = _mm256_sign_epi8(_mm256_set1_epi32(*x), codes.0);
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes.0), x);
            Self(_mm256_add_epi32(self.0, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))))
        }
    }
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
    unsafe fn signed_bytes_to_floats(self) -> [__m256; 4] {
        vector! {
            let first = _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(_mm256_slli_epi32::<24>(self.0)));
            let second = _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(_mm256_slli_epi32::<16>(self.0)));
            let third = _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(_mm256_slli_epi32::<8>(self.0)));
            [first, second, third, _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(self.0))]
        }
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
        let mut sum = sum;
        // SAFETY: as said.
        unsafe {
            for stage in (0..COUNT).step_by(together(OFFSET)) {
                let mut part = Self::open::<OFFSET>(sum);
                for run in stage..COUNT.min(stage + together(OFFSET)) {
                    part = Self::step::<OFFSET>(part, codes[run], x.add(run));
                }
                sum = Self::close::<OFFSET>(sum, part);
            }
        }
        sum
    }
    #[inline(always)]
    unsafe fn open<const OFFSET: u8>(sum: Self) -> Self {
        vector!(if OFFSET == 128 { sum } else { Self(_mm256_setzero_si256()) })
    }
    #[inline(always)]
    unsafe fn step<const OFFSET: u8>(part: Self, codes: Self, x: *const i32) -> Self {
        vector! {
            if OFFSET < 128 {
                return Self(_mm256_add_epi16(part.0, _mm256_maddubs_epi16(codes.0, _mm256_set1_epi32(*x))));
            }
            part.step_signed(Self(_mm256_xor_si256(codes.0, _mm256_set1_epi8(-128))), x)
        }
    }
    #[inline(always)]
    unsafe fn close<const OFFSET: u8>(sum: Self, part: Self) -> Self {
        vector! {
            if OFFSET == 128 { part } else { Self(_mm256_add_epi32(sum.0, _mm256_madd_epi16(part.0, _mm256_set1_epi16(1)))) }
        }
    }
    #[inline(always)]
    fn together<const OFFSET: u8>() -> usize {
        if OFFSET == 128 { RUNS } else { together(OFFSET) }
    }
}
