//! AVX-512: rounding of activations, sixteen runs of 16 values at a time.
//!
//! Largest magnitudes and sums are taken over 16 values in the order 8, 4, 2, 1 apart, for sixteen vectors at once: each step
//! shuffles pairs of vectors together, so that 15 operations and 30 shuffles give sixteen results in one register, which is also
//! where scales are computed. Bound by shuffles.

use std::arch::x86_64::*;

use super::activations::{Format, MAX_CODE, ROUND, SECOND, TINY, Term};
use super::wide::{GROUP, RUNS};

/// Vectors of a batch.
const BATCH: usize = 16;
/// Where the reduction wants a vector so that results come out in order.
const PLACE: [usize; BATCH] = [0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15];

/// Sixteen vectors to one register of their reductions by an operation.
macro_rules! reduce {
    ($add:ident, $v:expr) => {{
        let v = $v;
        let mut eight = [_mm512_setzero_ps(); 8];
        for i in 0..8 {
            let low = _mm512_shuffle_f32x4::<0x44>(v[i], v[i + 8]);
            let high = _mm512_shuffle_f32x4::<0xee>(v[i], v[i + 8]);
            eight[i] = $add(low, high);
        }
        let mut four = [_mm512_setzero_ps(); 4];
        for i in 0..4 {
            let low = _mm512_shuffle_f32x4::<0x88>(eight[i], eight[i + 4]);
            let high = _mm512_shuffle_f32x4::<0xdd>(eight[i], eight[i + 4]);
            four[i] = $add(low, high);
        }
        let mut two = [_mm512_setzero_ps(); 2];
        for i in 0..2 {
            let (a, b) = (_mm512_castps_pd(four[i]), _mm512_castps_pd(four[i + 2]));
            let low = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            let high = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
            two[i] = $add(low, high);
        }
        $add(_mm512_shuffle_ps::<0x88>(two[0], two[1]), _mm512_shuffle_ps::<0xdd>(two[0], two[1]))
    }};
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn add_int(a: __m512, b: __m512) -> __m512 {
    _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn max_int(a: __m512, b: __m512) -> __m512 {
    _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn lanes(x: __m512) -> [f32; BATCH] {
    let mut lanes = [0.0; BATCH];
    // SAFETY: sixteen places.
    unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), x) };
    lanes
}

/// Neighbouring lanes swapped.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn swapped(x: __m512) -> __m512 {
    _mm512_permute_ps::<0xb1>(x)
}

/// Rounds one row into its slot of a tile; the vector twin of [`super::activations::round_row`].
///
/// # Safety
/// The processor has AVX-512 F, BW, VL, DQ.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn round_row(format: Format, term: Term, row: &[f32], slot: usize, width: usize, tile: &mut [u32]) {
    let batch = match (format.subs, term) {
        (1, Term::First) => round_batch::<1, false>,
        (1, Term::Second) => round_batch::<1, true>,
        (_, Term::First) => round_batch::<2, false>,
        (_, Term::Second) => round_batch::<2, true>,
    };
    let (batches, rest) = row.as_chunks::<{ BATCH * 16 }>();
    let words = &mut tile.chunks_mut(BATCH * 16 / GROUP * format.group_words() * width);
    for (values, words) in batches.iter().zip(&mut *words) {
        // SAFETY: the instructions are enabled here.
        unsafe { batch(format.group == GROUP, values, words, slot, width) };
    }
    if let Some(words) = words.next() {
        let mut values = [0.0; BATCH * 16];
        for (to, value) in values.iter_mut().zip(rest) {
            *to = *value;
        }
        // SAFETY: as above.
        unsafe { batch(format.group == GROUP, &values, words, slot, width) };
    }
}

/// The body for each vector of a batch. A loop would not be unrolled, and its vectors would live in memory.
macro_rules! unroll {
    ($i:ident, $body:block) => {
        unroll!(@ $i $body 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $i:ident $body:block $($n:literal)*) => {
        $({
            const $i: usize = $n;
            $body
        })*
    };
}

/// Rounds 256 values, of which there are as many as `words` has groups for; `wide` if 32 share a scale.
///
/// # Safety
/// The processor has AVX-512 F, BW, VL, DQ.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn round_batch<const SUBS: usize, const SECOND_TERM: bool>(
    wide: bool,
    values: &[f32; BATCH * 16],
    words: &mut [u32],
    slot: usize,
    width: usize,
) {
    let runs = RUNS / SUBS;
    let sub_words = width * (runs + 3);
    let group_words = SUBS * sub_words;
    let groups = words.len() / group_words;
    let units = Units::of::<SUBS, SECOND_TERM>(wide, values);
    let mut sums = [_mm512_setzero_ps(); BATCH];
    let (round, limit) = (_mm512_set1_ps(ROUND), _mm512_set1_epi32(MAX_CODE as i32));
    unroll!(I, {
        let used = 0u16.wrapping_sub(units.used >> I & 1);
        // SAFETY: sixteen of the values.
        let x = unsafe { _mm512_loadu_ps(values.as_ptr().add(16 * I)) };
        let exact = _mm512_mul_ps(x, _mm512_set1_ps(units.inverse[I]));
        let codes = if SECOND_TERM {
            let rounded = _mm512_sub_ps(_mm512_add_ps(exact, round), round);
            let rest = _mm512_mul_ps(_mm512_sub_ps(exact, rounded), _mm512_set1_ps(SECOND));
            let second = _mm512_min_epi32(_mm512_maskz_cvtps_epi32(used, rest), limit);
            _mm512_max_epi32(second, _mm512_set1_epi32(-(MAX_CODE as i32)))
        } else {
            _mm512_maskz_cvtps_epi32(used, exact)
        };
        let inner = if SUBS == 1 { 8 * slot + 4 * (I % 2) } else { I % 2 * sub_words + 4 * slot };
        if I / 2 < groups {
            let to = &mut words[I / 2 * group_words + inner..][..4];
            // SAFETY: four words.
            unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), _mm512_cvtsepi32_epi8(codes)) };
        }
        sums[PLACE[I]] = _mm512_castsi512_ps(codes);
    });
    let mut total = reduce!(add_int, sums);
    if SUBS == 1 {
        total = add_int(total, swapped(total));
    }
    let offset = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32::<7>(_mm512_castps_si512(total)));
    let offset = lanes(_mm512_castsi512_ps(offset));
    for (i, words) in words.chunks_exact_mut(sub_words).enumerate().take(BATCH / 2 * SUBS) {
        let lane = 2 / SUBS * i;
        let meta = &mut words[width * runs..];
        meta[slot] = units.scale[lane].to_bits();
        meta[width + slot] = units.sum[lane].to_bits();
        meta[2 * width + slot] = offset[lane].to_bits();
    }
}

/// What sixteen runs of 16 values are divided by, and their sums.
struct Units {
    /// Unit of the codes.
    scale: [f32; BATCH],
    inverse: [f32; BATCH],
    sum: [f32; BATCH],
    /// A bit a run: codes are not all zero.
    used: u16,
}

impl Units {
    #[inline]
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
    fn of<const SUBS: usize, const SECOND_TERM: bool>(wide: bool, values: &[f32; BATCH * 16]) -> Self {
        let absolute = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fff_ffff));
        let mut x = [_mm512_setzero_ps(); BATCH];
        let mut magnitudes = x;
        unroll!(I, {
            // SAFETY: sixteen of the values.
            let values = unsafe { _mm512_loadu_ps(values.as_ptr().add(16 * I)) };
            x[PLACE[I]] = values;
            magnitudes[PLACE[I]] = _mm512_and_ps(values, absolute);
        });
        let mut largest = reduce!(max_int, magnitudes);
        let mut sum = if SECOND_TERM { _mm512_setzero_ps() } else { reduce!(_mm512_add_ps, x) };
        if wide {
            largest = max_int(largest, swapped(largest));
        }
        if SUBS == 1 {
            sum = _mm512_add_ps(sum, swapped(sum));
        }
        let infinity = _mm512_set1_epi32(f32::INFINITY.to_bits().cast_signed());
        let bad = _mm512_cmpge_epi32_mask(_mm512_castps_si512(largest), infinity);
        let small = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(largest, _mm512_set1_ps(TINY));
        let used = !(bad | small);
        let limit = _mm512_set1_ps(MAX_CODE);
        let mut scale = _mm512_maskz_div_ps(used, largest, limit);
        if SECOND_TERM {
            scale = _mm512_div_ps(scale, _mm512_set1_ps(SECOND));
        }
        scale = _mm512_mask_mov_ps(scale, bad, _mm512_set1_ps(f32::NAN));
        Self { scale: lanes(scale), inverse: lanes(_mm512_maskz_div_ps(used, limit, largest)), sum: lanes(sum), used }
    }
}
