//! AVX2: rounding of activations, a group of 32 values at a time.
//!
//! Four registers of values give the largest magnitude, the codes and both sums; what is reduced across lanes is taken in the order
//! of the scalar twin. Bound by the shuffles of these reductions and by two divisions a scale.

use std::arch::x86_64::*;

use super::activations::{Format, MAX_CODE, ROUND, SECOND, Term, Unit};
use super::wide::{GROUP, RUNS};

/// Rounds one row into its slot of a tile; the vector twin of [`super::activations::round_row`].
///
/// # Safety
/// The processor has AVX2, FMA.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn round_row(format: Format, term: Term, row: &[f32], slot: usize, width: usize, tile: &mut [u32]) {
    let group = match (format.subs, term) {
        (1, Term::First) => round_group::<1, false>,
        (1, Term::Second) => round_group::<1, true>,
        (_, Term::First) => round_group::<2, false>,
        (_, Term::Second) => round_group::<2, true>,
    };
    let group_words = format.group_words() * width;
    for (values, words) in row.as_chunks::<GROUP>().0.iter().zip(tile.chunks_exact_mut(group_words)) {
        // SAFETY: the instructions are enabled here.
        unsafe { group(format.group == GROUP, values, words, slot, width) };
    }
}

/// Rounds 32 values; `one_scale` if they share it.
///
/// # Safety
/// The processor has AVX2, FMA.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn round_group<const SUBS: usize, const SECOND_TERM: bool>(
    one_scale: bool,
    values: &[f32; GROUP],
    words: &mut [u32],
    slot: usize,
    width: usize,
) {
    let runs = RUNS / SUBS;
    let sub_words = width * (runs + 3);
    assert!(words.len() == SUBS * sub_words && slot < width);
    // SAFETY: 32 values.
    let load = |i: usize| unsafe { _mm256_loadu_ps(values.as_ptr().add(8 * i)) };
    let x = [load(0), load(1), load(2), load(3)];
    let largest = largest_of(x[0], x[1], x[2], x[3]);
    let units = if one_scale { [Unit::of(largest[0].max(largest[1])); 2] } else { largest.map(Unit::of) };
    let inverse = [_mm256_set1_ps(units[0].inverse), _mm256_set1_ps(units[1].inverse)];
    let codes = pack(
        codes::<SECOND_TERM>(x[0], inverse[0]),
        codes::<SECOND_TERM>(x[1], inverse[0]),
        codes::<SECOND_TERM>(x[2], inverse[1]),
        codes::<SECOND_TERM>(x[3], inverse[1]),
    );
    let halves = [_mm256_castsi256_si128(codes), _mm256_extracti128_si256::<1>(codes)];
    for (half, codes) in halves.into_iter().enumerate() {
        let at = if SUBS == 1 { slot * RUNS + 4 * half } else { half * sub_words + slot * runs };
        // SAFETY: four words of the slot's codes, within the words that were counted above.
        unsafe { _mm_storeu_si128(words.as_mut_ptr().add(at).cast(), codes) };
    }
    let code_sums = code_sums(codes);
    let sums = if SECOND_TERM { [0.0; 2] } else { tree_sums(x[0], x[1], x[2], x[3]) };
    for sub in 0..SUBS {
        let meta = &mut words[sub * sub_words + width * runs..][..3 * width];
        let (sum, code_sum) =
            if SUBS == 1 { (sums[0] + sums[1], code_sums[0] + code_sums[1]) } else { (sums[sub], code_sums[sub]) };
        meta[slot] = units[sub].of_term(if SECOND_TERM { Term::Second } else { Term::First }).to_bits();
        meta[width + slot] = if SECOND_TERM { 0 } else { sum.to_bits() };
        meta[2 * width + slot] = (-128 * code_sum).cast_unsigned();
    }
}

/// Bits of the largest magnitudes of the first and of the last sixteen values.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn largest_of(a: __m256, b: __m256, c: __m256, d: __m256) -> [u32; 2] {
    let magnitude = _mm256_set1_epi32(0x7fff_ffff);
    let first = _mm256_max_epi32(bits(a, magnitude), bits(b, magnitude));
    let last = _mm256_max_epi32(bits(c, magnitude), bits(d, magnitude));
    let four = _mm256_max_epi32(
        _mm256_permute2x128_si256::<0x20>(first, last),
        _mm256_permute2x128_si256::<0x31>(first, last),
    );
    let two = _mm256_max_epi32(four, _mm256_shuffle_epi32::<0x4e>(four));
    let one = _mm256_max_epi32(two, _mm256_shuffle_epi32::<0xb1>(two));
    [_mm256_extract_epi32::<0>(one).cast_unsigned(), _mm256_extract_epi32::<4>(one).cast_unsigned()]
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn bits(x: __m256, mask: __m256i) -> __m256i {
    _mm256_and_si256(_mm256_castps_si256(x), mask)
}

/// Eight codes, as 32-bit numbers. An inverse of 0 makes them 0 whatever the values.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn codes<const SECOND_TERM: bool>(x: __m256, inverse: __m256) -> __m256i {
    let exact = _mm256_mul_ps(x, inverse);
    let exact = _mm256_and_ps(exact, _mm256_cmp_ps::<_CMP_NEQ_OQ>(inverse, _mm256_setzero_ps()));
    if !SECOND_TERM {
        return _mm256_cvtps_epi32(exact);
    }
    let round = _mm256_set1_ps(ROUND);
    let rounded = _mm256_sub_ps(_mm256_add_ps(exact, round), round);
    let rest = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_sub_ps(exact, rounded), _mm256_set1_ps(SECOND)));
    let limit = MAX_CODE as i32;
    _mm256_max_epi32(_mm256_min_epi32(rest, _mm256_set1_epi32(limit)), _mm256_set1_epi32(-limit))
}

/// Four times eight codes as bytes, in order.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn pack(a: __m256i, b: __m256i, c: __m256i, d: __m256i) -> __m256i {
    let mixed = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
}

/// Sums of the first and of the last sixteen codes.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn code_sums(codes: __m256i) -> [i32; 2] {
    let four = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), codes), _mm256_set1_epi16(1));
    let two = _mm256_add_epi32(four, _mm256_shuffle_epi32::<0x4e>(four));
    let one = _mm256_add_epi32(two, _mm256_shuffle_epi32::<0xb1>(two));
    [_mm256_extract_epi32::<0>(one), _mm256_extract_epi32::<4>(one)]
}

/// Sums of the first and of the last sixteen values: those 8 apart, then 4, 2, 1.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn tree_sums(a: __m256, b: __m256, c: __m256, d: __m256) -> [f32; 2] {
    let (first, last) = (_mm256_add_ps(a, b), _mm256_add_ps(c, d));
    let four = _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(first, last), _mm256_permute2f128_ps::<0x31>(first, last));
    let two = _mm256_add_ps(four, _mm256_permute_ps::<0x4e>(four));
    let one = _mm256_add_ps(two, _mm256_permute_ps::<0xb1>(two));
    [_mm256_cvtss_f32(one), _mm_cvtss_f32(_mm256_extractf128_ps::<1>(one))]
}
