//! Sixteen lanes in two AVX2 registers: lanes 0..8 and 8..16.

use std::arch::x86_64::*;

use super::{Kernel, LANES, Simd};

/// Proof that the processor has AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub struct Avx2(());

/// Two registers; a value exists only where a token does.
#[derive(Debug, Clone, Copy)]
pub struct Pair(__m256, __m256);

pub(super) fn supported() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// # Safety
/// [`supported`] is true.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline(never)]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2(()))
}

/// An operation on both halves. A macro, because a closure would not be inlined into code that has the instructions.
macro_rules! both {
    ($op:ident, $a:ident, $b:ident) => {
        // SAFETY: the token proves the instructions.
        unsafe { Pair($op($a.0, $b.0), $op($a.1, $b.1)) }
    };
}

/// What half-precision values with the exponents and mantissas of E4M3 are to be multiplied with.
pub(super) const E4M3_UNIT: f32 = 256.0;

/// Sixteen E4M3 values at `p` as half-precision ones: exponent and mantissa where those are, which divides by [`E4M3_UNIT`], also
/// subnormal values. The largest magnitude is NaN.
///
/// # Safety
/// The processor has AVX2; `p` is valid for 16 reads.
#[inline(always)]
pub(super) unsafe fn e4m3_halves(p: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
        let all = _mm256_set1_epi16(0x7f);
        let magnitude = _mm256_and_si256(bytes, all);
        let sign = _mm256_slli_epi16::<8>(_mm256_andnot_si256(all, bytes));
        let is_nan = _mm256_cmpeq_epi16(magnitude, all);
        let shifted = _mm256_slli_epi16::<7>(magnitude);
        _mm256_or_si256(sign, _mm256_blendv_epi8(shifted, _mm256_set1_epi16(0x7e00), is_nan))
    }
}

/// Sixteen E5M2 values at `p` as half-precision ones: their upper bytes.
///
/// # Safety
/// As [`e4m3_halves`].
#[inline(always)]
pub(super) unsafe fn e5m2_halves(p: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()))) }
}

/// Sixteen half-precision values as floats.
#[inline(always)]
unsafe fn both_halves(halves: __m256i) -> Pair {
    // SAFETY: called with a token.
    unsafe {
        let upper = _mm256_extracti128_si256::<1>(halves);
        Pair(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(upper))
    }
}

/// bfloat16 bits of eight floats, in the low halves of 32-bit lanes.
#[inline(always)]
unsafe fn round_bf16(x: __m256) -> __m256i {
    // SAFETY: called with a token.
    unsafe {
        let bits = _mm256_castps_si256(x);
        let upper = _mm256_srli_epi32::<16>(bits);
        let odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
        let quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
        _mm256_blendv_epi8(_mm256_srli_epi32::<16>(rounded), quiet, nan)
    }
}

/// An 8 x 8 transposition.
#[inline(always)]
unsafe fn transpose8(r: [__m256; 8]) -> [__m256; 8] {
    // SAFETY: called with a token.
    unsafe {
        let t0 = _mm256_unpacklo_ps(r[0], r[1]);
        let t1 = _mm256_unpackhi_ps(r[0], r[1]);
        let t2 = _mm256_unpacklo_ps(r[2], r[3]);
        let t3 = _mm256_unpackhi_ps(r[2], r[3]);
        let t4 = _mm256_unpacklo_ps(r[4], r[5]);
        let t5 = _mm256_unpackhi_ps(r[4], r[5]);
        let t6 = _mm256_unpacklo_ps(r[6], r[7]);
        let t7 = _mm256_unpackhi_ps(r[6], r[7]);
        let s0 = _mm256_shuffle_ps::<0x44>(t0, t2);
        let s1 = _mm256_shuffle_ps::<0xee>(t0, t2);
        let s2 = _mm256_shuffle_ps::<0x44>(t1, t3);
        let s3 = _mm256_shuffle_ps::<0xee>(t1, t3);
        let s4 = _mm256_shuffle_ps::<0x44>(t4, t6);
        let s5 = _mm256_shuffle_ps::<0xee>(t4, t6);
        let s6 = _mm256_shuffle_ps::<0x44>(t5, t7);
        let s7 = _mm256_shuffle_ps::<0xee>(t5, t7);
        [
            _mm256_permute2f128_ps::<0x20>(s0, s4),
            _mm256_permute2f128_ps::<0x20>(s1, s5),
            _mm256_permute2f128_ps::<0x20>(s2, s6),
            _mm256_permute2f128_ps::<0x20>(s3, s7),
            _mm256_permute2f128_ps::<0x31>(s0, s4),
            _mm256_permute2f128_ps::<0x31>(s1, s5),
            _mm256_permute2f128_ps::<0x31>(s2, s6),
            _mm256_permute2f128_ps::<0x31>(s3, s7),
        ]
    }
}

/// Two transpositions of 8 x 8 two-byte values, one a 128-bit lane.
#[inline(always)]
unsafe fn turn_eight(r: [__m256i; 8]) -> [__m256i; 8] {
    // SAFETY: called with a token.
    unsafe {
        let mut t = r;
        for i in 0..4 {
            t[2 * i] = _mm256_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
            t[2 * i + 1] = _mm256_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
        }
        let mut u = t;
        for i in 0..2 {
            for j in 0..2 {
                u[4 * i + 2 * j] = _mm256_unpacklo_epi32(t[4 * i + j], t[4 * i + j + 2]);
                u[4 * i + 2 * j + 1] = _mm256_unpackhi_epi32(t[4 * i + j], t[4 * i + j + 2]);
            }
        }
        let mut v = u;
        for j in 0..4 {
            v[2 * j] = _mm256_unpacklo_epi64(u[j], u[j + 4]);
            v[2 * j + 1] = _mm256_unpackhi_epi64(u[j], u[j + 4]);
        }
        v
    }
}

/// 2^n for whole n in the normal range.
#[inline(always)]
unsafe fn power(n: __m256i) -> __m256 {
    // SAFETY: called with a token.
    unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127)))) }
}

#[inline(always)]
unsafe fn scale(x: __m256, n: __m256) -> __m256 {
    // SAFETY: called with a token.
    unsafe {
        let n = _mm256_cvttps_epi32(n);
        let half = _mm256_srai_epi32::<1>(n);
        _mm256_mul_ps(_mm256_mul_ps(x, power(half)), power(_mm256_sub_epi32(n, half)))
    }
}

impl Simd for Avx2 {
    type V = Pair;
    const TILE_ROWS: usize = 6;
    const TILE_VECTORS: usize = 1;

    #[inline(always)]
    fn splat(self, x: f32) -> Pair {
        // SAFETY: the token proves the instructions (also below).
        let v = unsafe { _mm256_set1_ps(x) };
        Pair(v, v)
    }
    #[inline(always)]
    fn of(self, x: [f32; LANES]) -> Pair {
        // SAFETY: sixteen values.
        unsafe { self.load(x.as_ptr()) }
    }
    #[inline(always)]
    fn to_array(self, x: Pair) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        // SAFETY: sixteen values.
        unsafe { self.store(lanes.as_mut_ptr(), x) };
        lanes
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Pair {
        // SAFETY: the caller's promise.
        unsafe { Pair(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, x: Pair) {
        // SAFETY: the caller's promise.
        unsafe {
            _mm256_storeu_ps(p, x.0);
            _mm256_storeu_ps(p.add(8), x.1);
        }
    }
    #[inline(always)]
    unsafe fn store_streaming(self, p: *mut f32, x: Pair) {
        // SAFETY: the caller's promise.
        unsafe {
            _mm256_stream_ps(p, x.0);
            _mm256_stream_ps(p.add(8), x.1);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Pair {
        // SAFETY: the caller's promise.
        unsafe { Pair(_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast()))) }
    }
    #[inline(always)]
    unsafe fn load_e4m3(self, p: *const u8) -> Pair {
        // SAFETY: the caller's promise.
        unsafe {
            let (values, unit) = (both_halves(e4m3_halves(p)), _mm256_set1_ps(E4M3_UNIT));
            Pair(_mm256_mul_ps(values.0, unit), _mm256_mul_ps(values.1, unit))
        }
    }
    #[inline(always)]
    unsafe fn load_e5m2(self, p: *const u8) -> Pair {
        // SAFETY: the caller's promise.
        unsafe { both_halves(e5m2_halves(p)) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, x: Pair) {
        // SAFETY: the caller's promise.
        unsafe {
            _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x.0));
            _mm_storeu_si128(p.add(8).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x.1));
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> Pair {
        // SAFETY: the caller's promise.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(8).cast()));
            Pair(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, p: *const u16) -> [Pair; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let pairs = [_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(16).cast())];
            let mask = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
            let first = |x| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(x));
            let second = |x| _mm256_castsi256_ps(_mm256_and_si256(x, mask));
            [Pair(first(pairs[0]), first(pairs[1])), Pair(second(pairs[0]), second(pairs[1]))]
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, x: Pair) {
        // SAFETY: the caller's promise.
        unsafe {
            let packed = _mm256_packus_epi32(round_bf16(x.0), round_bf16(x.1));
            _mm256_storeu_si256(p.cast(), _mm256_permute4x64_epi64::<0xd8>(packed));
        }
    }
    #[inline(always)]
    fn add(self, a: Pair, b: Pair) -> Pair {
        both!(_mm256_add_ps, a, b)
    }
    #[inline(always)]
    fn sub(self, a: Pair, b: Pair) -> Pair {
        both!(_mm256_sub_ps, a, b)
    }
    #[inline(always)]
    fn mul(self, a: Pair, b: Pair) -> Pair {
        both!(_mm256_mul_ps, a, b)
    }
    #[inline(always)]
    fn div(self, a: Pair, b: Pair) -> Pair {
        both!(_mm256_div_ps, a, b)
    }
    #[inline(always)]
    fn fma(self, a: Pair, b: Pair, c: Pair) -> Pair {
        // SAFETY: the token.
        unsafe { Pair(_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1)) }
    }
    #[inline(always)]
    fn max(self, a: Pair, b: Pair) -> Pair {
        both!(_mm256_max_ps, a, b)
    }
    #[inline(always)]
    fn min(self, a: Pair, b: Pair) -> Pair {
        both!(_mm256_min_ps, a, b)
    }
    #[inline(always)]
    fn scale_by_power(self, x: Pair, n: Pair) -> Pair {
        // SAFETY: the token.
        unsafe { Pair(scale(x.0, n.0), scale(x.1, n.1)) }
    }
    #[inline(always)]
    fn reduce_add(self, x: Pair) -> f32 {
        // SAFETY: the token.
        unsafe {
            let eight = _mm256_add_ps(x.0, x.1);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
    #[inline(always)]
    fn reduce_max(self, x: Pair) -> f32 {
        // SAFETY: the token.
        unsafe {
            let eight = _mm256_max_ps(x.0, x.1);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        // SAFETY: a prefetch of any address has no effect that a program sees.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) };
    }
    #[inline(always)]
    fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: the token.
        unsafe { run(kernel) }
    }
    #[inline(always)]
    fn transpose(self, r: [Pair; LANES]) -> [Pair; LANES] {
        // SAFETY: the token.
        unsafe {
            let a = transpose8([r[0].0, r[1].0, r[2].0, r[3].0, r[4].0, r[5].0, r[6].0, r[7].0]);
            let b = transpose8([r[0].1, r[1].1, r[2].1, r[3].1, r[4].1, r[5].1, r[6].1, r[7].1]);
            let c = transpose8([r[8].0, r[9].0, r[10].0, r[11].0, r[12].0, r[13].0, r[14].0, r[15].0]);
            let d = transpose8([r[8].1, r[9].1, r[10].1, r[11].1, r[12].1, r[13].1, r[14].1, r[15].1]);
            let mut out = r;
            for i in 0..8 {
                out[i] = Pair(a[i], c[i]);
                out[i + 8] = Pair(b[i], d[i]);
            }
            out
        }
    }
    #[inline(always)]
    unsafe fn turn_halves(self, rows: *const *const u8, offset: usize, turned: *mut u16, stride: usize) {
        for half in 0..2 {
            // SAFETY: the caller's promise.
            unsafe {
                let load = |i: usize| _mm256_loadu_si256((*rows.add(i)).add(offset + half * 32).cast());
                let a = turn_eight([load(0), load(1), load(2), load(3), load(4), load(5), load(6), load(7)]);
                let b = turn_eight([load(8), load(9), load(10), load(11), load(12), load(13), load(14), load(15)]);
                let columns = turned.add(half * 16 * stride);
                for j in 0..8 {
                    let low = _mm256_permute2x128_si256::<0x20>(a[j], b[j]);
                    let high = _mm256_permute2x128_si256::<0x31>(a[j], b[j]);
                    _mm256_storeu_si256(columns.add(j * stride).cast(), low);
                    _mm256_storeu_si256(columns.add((j + 8) * stride).cast(), high);
                }
            }
        }
    }
}
