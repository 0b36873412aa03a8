//! Sixteen lanes in one AVX-512 register.

use std::arch::x86_64::*;

use super::avx2::{E4M3_UNIT, e4m3_halves, e5m2_halves};
use super::{Kernel, LANES, Simd};

/// Proof that the processor has AVX-512 F, BW, VL and DQ.
#[derive(Debug, Clone, Copy)]
pub struct Avx512(());

/// A register; a value exists only where a token does.
#[derive(Debug, Clone, Copy)]
pub struct Register(__m512);

pub(super) fn supported() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
}

/// # Safety
/// [`supported`] is true.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
#[inline(never)]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512(()))
}

impl Avx512 {
    /// The token, for a kernel that is written for this instruction set alone.
    ///
    /// # Safety
    /// The processor has AVX-512 F, BW, VL and DQ.
    #[inline(always)]
    #[must_use]
    pub const unsafe fn assume() -> Self {
        Self(())
    }

    /// A register as a vector.
    #[inline(always)]
    #[must_use]
    pub const fn wrap(self, x: __m512) -> Register {
        Register(x)
    }

    /// A vector as a register.
    #[inline(always)]
    #[must_use]
    pub const fn unwrap(self, x: Register) -> __m512 {
        x.0
    }
}

#[inline(always)]
const fn mask(n: usize) -> u16 {
    if n >= LANES { u16::MAX } else { (1 << n) - 1 }
}

/// Four transpositions of 8 x 8 two-byte values, one a 128-bit lane.
#[inline(always)]
unsafe fn turn_eight(r: [__m512i; 8]) -> [__m512i; 8] {
    // SAFETY: called with a token.
    unsafe {
        let mut t = r;
        for i in 0..4 {
            t[2 * i] = _mm512_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
            t[2 * i + 1] = _mm512_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
        }
        let mut u = t;
        for i in 0..2 {
            for j in 0..2 {
                u[4 * i + 2 * j] = _mm512_unpacklo_epi32(t[4 * i + j], t[4 * i + j + 2]);
                u[4 * i + 2 * j + 1] = _mm512_unpackhi_epi32(t[4 * i + j], t[4 * i + j + 2]);
            }
        }
        let mut v = u;
        for j in 0..4 {
            v[2 * j] = _mm512_unpacklo_epi64(u[j], u[j + 4]);
            v[2 * j + 1] = _mm512_unpackhi_epi64(u[j], u[j + 4]);
        }
        v
    }
}

impl Simd for Avx512 {
    type V = Register;
    const TILE_ROWS: usize = 6;
    const TILE_VECTORS: usize = 4;

    #[inline(always)]
    fn splat(self, x: f32) -> Register {
        // SAFETY: the token proves the instructions (also below).
        Register(unsafe { _mm512_set1_ps(x) })
    }
    #[inline(always)]
    fn of(self, x: [f32; LANES]) -> Register {
        // SAFETY: sixteen values.
        Register(unsafe { _mm512_loadu_ps(x.as_ptr()) })
    }
    #[inline(always)]
    fn to_array(self, x: Register) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        // SAFETY: sixteen values.
        unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), x.0) };
        lanes
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Register {
        // SAFETY: the caller's promise.
        Register(unsafe { _mm512_loadu_ps(p) })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, x: Register) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_ps(p, x.0) };
    }
    #[inline(always)]
    unsafe fn store_streaming(self, p: *mut f32, x: Register) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_stream_ps(p, x.0) };
    }
    #[inline(always)]
    unsafe fn load_partial(self, p: *const f32, n: usize, fill: f32) -> Register {
        // SAFETY: masked lanes are not read.
        Register(unsafe { _mm512_mask_loadu_ps(_mm512_set1_ps(fill), mask(n), p) })
    }
    #[inline(always)]
    unsafe fn store_partial(self, p: *mut f32, n: usize, x: Register) {
        // SAFETY: masked lanes are not written.
        unsafe { _mm512_mask_storeu_ps(p, mask(n), x.0) };
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Register {
        // SAFETY: the caller's promise.
        Register(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) })
    }
    #[inline(always)]
    unsafe fn load_e4m3(self, p: *const u8) -> Register {
        // SAFETY: the caller's promise; AVX-512 includes AVX2.
        unsafe { Register(_mm512_mul_ps(_mm512_cvtph_ps(e4m3_halves(p)), _mm512_set1_ps(E4M3_UNIT))) }
    }
    #[inline(always)]
    unsafe fn load_e5m2(self, p: *const u8) -> Register {
        // SAFETY: as above.
        unsafe { Register(_mm512_cvtph_ps(e5m2_halves(p))) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, x: Register) {
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x.0)) };
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> Register {
        // SAFETY: the caller's promise.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            Register(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, p: *const u16) -> [Register; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let pairs = _mm512_loadu_si512(p.cast());
            let second = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32.cast_signed()));
            [_mm512_slli_epi32::<16>(pairs), second].map(|x| Register(_mm512_castsi512_ps(x)))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, x: Register) {
        // The bfloat16 instruction would flush subnormals, so the rounding is done on integers.
        // SAFETY: the caller's promise.
        unsafe {
            let bits = _mm512_castps_si512(x.0);
            let upper = _mm512_srli_epi32::<16>(bits);
            let odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x.0, x.0);
            let quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
            let halves = _mm512_mask_blend_epi32(nan, _mm512_srli_epi32::<16>(rounded), quiet);
            _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(halves));
        }
    }
    #[inline(always)]
    fn add(self, a: Register, b: Register) -> Register {
        // SAFETY: the token.
        Register(unsafe { _mm512_add_ps(a.0, b.0) })
    }
    #[inline(always)]
    fn sub(self, a: Register, b: Register) -> Register {
        // SAFETY: the token.
        Register(unsafe { _mm512_sub_ps(a.0, b.0) })
    }
    #[inline(always)]
    fn mul(self, a: Register, b: Register) -> Register {
        // SAFETY: the token.
        Register(unsafe { _mm512_mul_ps(a.0, b.0) })
    }
    #[inline(always)]
    fn div(self, a: Register, b: Register) -> Register {
        // SAFETY: the token.
        Register(unsafe { _mm512_div_ps(a.0, b.0) })
    }
    #[inline(always)]
    fn fma(self, a: Register, b: Register, c: Register) -> Register {
        // SAFETY: the token.
        Register(unsafe { _mm512_fmadd_ps(a.0, b.0, c.0) })
    }
    #[inline(always)]
    fn max(self, a: Register, b: Register) -> Register {
        // SAFETY: the token.
        Register(unsafe { _mm512_max_ps(a.0, b.0) })
    }
    #[inline(always)]
    fn min(self, a: Register, b: Register) -> Register {
        // SAFETY: the token.
        Register(unsafe { _mm512_min_ps(a.0, b.0) })
    }
    #[inline(always)]
    fn scale_by_power(self, x: Register, n: Register) -> Register {
        // SAFETY: the token.
        Register(unsafe { _mm512_scalef_ps(x.0, n.0) })
    }
    #[inline(always)]
    fn reduce_add(self, x: Register) -> f32 {
        // SAFETY: the token.
        unsafe {
            let eight = _mm256_add_ps(_mm512_castps512_ps256(x.0), _mm512_extractf32x8_ps::<1>(x.0));
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
    #[inline(always)]
    fn reduce_add_four(self, x: [Register; 4]) -> [f32; 4] {
        // Four vectors become one in two steps, so that few lanes are added in vain.
        // SAFETY: the token; four values are written.
        unsafe {
            let low = |a: Register, b: Register| _mm512_shuffle_f32x4::<0x44>(a.0, b.0);
            let high = |a: Register, b: Register| _mm512_shuffle_f32x4::<0xee>(a.0, b.0);
            let first = _mm512_add_ps(low(x[0], x[1]), high(x[0], x[1]));
            let second = _mm512_add_ps(low(x[2], x[3]), high(x[2], x[3]));
            let even = _mm512_shuffle_f32x4::<0x88>(first, second);
            let fours = _mm512_add_ps(even, _mm512_shuffle_f32x4::<0xdd>(first, second));
            let pairs = _mm512_add_ps(fours, _mm512_permute_ps::<0x4e>(fours));
            let sums = _mm512_add_ps(pairs, _mm512_permute_ps::<0xb1>(pairs));
            let order = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
            let mut all = [0.0; 4];
            _mm_storeu_ps(all.as_mut_ptr(), _mm512_castps512_ps128(_mm512_permutexvar_ps(order, sums)));
            all
        }
    }
    #[inline(always)]
    fn reduce_max(self, x: Register) -> f32 {
        // SAFETY: the token.
        unsafe {
            let eight = _mm256_max_ps(_mm512_castps512_ps256(x.0), _mm512_extractf32x8_ps::<1>(x.0));
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
    fn transpose(self, r: [Register; LANES]) -> [Register; LANES] {
        // Pairs, quads, then 128-bit lanes twice.
        // SAFETY: the token.
        unsafe {
            let mut t = r;
            for i in 0..8 {
                t[2 * i].0 = _mm512_unpacklo_ps(r[2 * i].0, r[2 * i + 1].0);
                t[2 * i + 1].0 = _mm512_unpackhi_ps(r[2 * i].0, r[2 * i + 1].0);
            }
            let mut u = t;
            for i in 0..4 {
                for j in 0..2 {
                    let (a, b) = (_mm512_castps_pd(t[4 * i + j].0), _mm512_castps_pd(t[4 * i + j + 2].0));
                    u[4 * i + 2 * j].0 = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                    u[4 * i + 2 * j + 1].0 = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
                }
            }
            let mut v = u;
            for i in 0..4 {
                for h in 0..2 {
                    let (a, b) = (u[8 * h + i].0, u[8 * h + i + 4].0);
                    v[8 * h + i].0 = _mm512_shuffle_f32x4::<0x88>(a, b);
                    v[8 * h + i + 4].0 = _mm512_shuffle_f32x4::<0xdd>(a, b);
                }
            }
            let mut w = v;
            for i in 0..8 {
                w[i].0 = _mm512_shuffle_f32x4::<0x88>(v[i].0, v[i + 8].0);
                w[i + 8].0 = _mm512_shuffle_f32x4::<0xdd>(v[i].0, v[i + 8].0);
            }
            w
        }
    }
    #[inline(always)]
    unsafe fn turn_halves(self, rows: *const *const u8, offset: usize, turned: *mut u16, stride: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let load = |i: usize| _mm512_loadu_si512((*rows.add(i)).add(offset).cast());
            let a = turn_eight([load(0), load(1), load(2), load(3), load(4), load(5), load(6), load(7)]);
            let b = turn_eight([load(8), load(9), load(10), load(11), load(12), load(13), load(14), load(15)]);
            // Lane l of a[j] and b[j] is column 8 l + j of either half of the rows.
            let (first, second) =
                (_mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15));
            for j in 0..8 {
                for (pair, order) in [first, second].into_iter().enumerate() {
                    let columns = _mm512_permutex2var_epi64(a[j], order, b[j]);
                    let at = turned.add((pair * 16 + j) * stride);
                    _mm256_storeu_si256(at.cast(), _mm512_castsi512_si256(columns));
                    _mm256_storeu_si256(at.add(8 * stride).cast(), _mm512_extracti64x4_epi64::<1>(columns));
                }
            }
        }
    }
}
