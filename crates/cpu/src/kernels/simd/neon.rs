//! Sixteen lanes in four NEON registers, which every 64-bit Arm processor has. UNTESTED on hardware: bits are proven under
//! emulation, speed is not known.

use std::arch::aarch64::*;
use std::arch::asm;

use super::{Kernel, LANES, Simd};

/// Needs what the architecture always has.
#[derive(Debug, Clone, Copy)]
pub struct Neon(());

/// Four registers: lanes 0..4, 4..8, 8..12, 12..16.
#[derive(Debug, Clone, Copy)]
pub struct Quad([float32x4_t; 4]);

#[inline(never)]
pub(super) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Neon(()))
}

/// An operation on all four. A macro, because a closure might not be inlined.
macro_rules! each {
    ($op:ident, $($operand:ident),+) => {
        // SAFETY: part of the architecture.
        unsafe { Quad([$op($($operand.0[0]),+), $op($($operand.0[1]),+), $op($($operand.0[2]),+), $op($($operand.0[3]),+)]) }
    };
}

/// a if a > b, else b. The instruction for maxima treats NaN otherwise.
#[inline(always)]
unsafe fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: part of the architecture, here and below.
    unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
}

/// a if a < b, else b.
#[inline(always)]
unsafe fn min(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: as above.
    unsafe { vbslq_f32(vcltq_f32(a, b), a, b) }
}

/// a b + c.
#[inline(always)]
unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
    // SAFETY: as above.
    unsafe { vfmaq_f32(c, a, b) }
}

/// 2^n for whole n in the normal range.
#[inline(always)]
unsafe fn power(n: int32x4_t) -> float32x4_t {
    // SAFETY: as above.
    unsafe { vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127)))) }
}

#[inline(always)]
unsafe fn scale(x: float32x4_t, n: float32x4_t) -> float32x4_t {
    // SAFETY: as above.
    unsafe {
        let n = vcvtq_s32_f32(n);
        let half = vshrq_n_s32::<1>(n);
        vmulq_f32(vmulq_f32(x, power(half)), power(vsubq_s32(n, half)))
    }
}

/// bfloat16 bits of four floats.
#[inline(always)]
unsafe fn round_bf16(x: float32x4_t) -> uint16x4_t {
    // SAFETY: as above.
    unsafe {
        let bits = vreinterpretq_u32_f32(x);
        let upper = vshrq_n_u32::<16>(bits);
        let odd = vandq_u32(upper, vdupq_n_u32(1));
        let rounded = vshrq_n_u32::<16>(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))));
        let quiet = vorrq_u32(upper, vdupq_n_u32(0x40));
        vmovn_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet))
    }
}

/// A 4 x 4 transposition.
#[inline(always)]
unsafe fn transpose4(r: [float32x4_t; 4]) -> [float32x4_t; 4] {
    // SAFETY: as above.
    unsafe {
        let wide = |x: float32x4_t| vreinterpretq_f64_f32(x);
        let narrow = |x: float64x2_t| vreinterpretq_f32_f64(x);
        let (a, b) = (wide(vtrn1q_f32(r[0], r[1])), wide(vtrn2q_f32(r[0], r[1])));
        let (c, d) = (wide(vtrn1q_f32(r[2], r[3])), wide(vtrn2q_f32(r[2], r[3])));
        [narrow(vtrn1q_f64(a, c)), narrow(vtrn1q_f64(b, d)), narrow(vtrn2q_f64(a, c)), narrow(vtrn2q_f64(b, d))]
    }
}

impl Simd for Neon {
    type V = Quad;
    const TILE_ROWS: usize = 6;
    const TILE_VECTORS: usize = 1;

    #[inline(always)]
    fn splat(self, x: f32) -> Quad {
        // SAFETY: as above, here and below.
        Quad([unsafe { vdupq_n_f32(x) }; 4])
    }
    #[inline(always)]
    fn of(self, x: [f32; LANES]) -> Quad {
        // SAFETY: sixteen values.
        unsafe { self.load(x.as_ptr()) }
    }
    #[inline(always)]
    fn to_array(self, x: Quad) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        // SAFETY: sixteen values.
        unsafe { self.store(lanes.as_mut_ptr(), x) };
        lanes
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Quad {
        // SAFETY: the caller's promise.
        unsafe { Quad([vld1q_f32(p), vld1q_f32(p.add(4)), vld1q_f32(p.add(8)), vld1q_f32(p.add(12))]) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, x: Quad) {
        // SAFETY: the caller's promise.
        unsafe {
            for (i, x) in x.0.into_iter().enumerate() {
                vst1q_f32(p.add(4 * i), x);
            }
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Quad {
        // SAFETY: the caller's promise.
        unsafe {
            let part = |i: usize| vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p.add(4 * i))));
            Quad([part(0), part(1), part(2), part(3)])
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, x: Quad) {
        // SAFETY: the caller's promise.
        unsafe {
            for (i, x) in x.0.into_iter().enumerate() {
                vst1_u16(p.add(4 * i), vreinterpret_u16_f16(vcvt_f16_f32(x)));
            }
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> Quad {
        // SAFETY: the caller's promise.
        unsafe {
            let part = |i: usize| vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p.add(4 * i))));
            Quad([part(0), part(1), part(2), part(3)])
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, p: *const u16) -> [Quad; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let part = |i: usize| vreinterpretq_u32_u16(vld1q_u16(p.add(8 * i)));
            let first = |i: usize| vreinterpretq_f32_u32(vshlq_n_u32::<16>(part(i)));
            let second = |i: usize| vreinterpretq_f32_u32(vandq_u32(part(i), vdupq_n_u32(0xffff_0000)));
            [Quad([first(0), first(1), first(2), first(3)]), Quad([second(0), second(1), second(2), second(3)])]
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, x: Quad) {
        // SAFETY: the caller's promise.
        unsafe {
            for (i, x) in x.0.into_iter().enumerate() {
                vst1_u16(p.add(4 * i), round_bf16(x));
            }
        }
    }
    #[inline(always)]
    fn add(self, a: Quad, b: Quad) -> Quad {
        each!(vaddq_f32, a, b)
    }
    #[inline(always)]
    fn sub(self, a: Quad, b: Quad) -> Quad {
        each!(vsubq_f32, a, b)
    }
    #[inline(always)]
    fn mul(self, a: Quad, b: Quad) -> Quad {
        each!(vmulq_f32, a, b)
    }
    #[inline(always)]
    fn div(self, a: Quad, b: Quad) -> Quad {
        each!(vdivq_f32, a, b)
    }
    #[inline(always)]
    fn fma(self, a: Quad, b: Quad, c: Quad) -> Quad {
        each!(fma, a, b, c)
    }
    #[inline(always)]
    fn max(self, a: Quad, b: Quad) -> Quad {
        each!(max, a, b)
    }
    #[inline(always)]
    fn min(self, a: Quad, b: Quad) -> Quad {
        each!(min, a, b)
    }
    #[inline(always)]
    fn scale_by_power(self, x: Quad, n: Quad) -> Quad {
        each!(scale, x, n)
    }
    #[inline(always)]
    fn reduce_add(self, x: Quad) -> f32 {
        // SAFETY: as above.
        unsafe {
            let four = vaddq_f32(vaddq_f32(x.0[0], x.0[2]), vaddq_f32(x.0[1], x.0[3]));
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        }
    }
    #[inline(always)]
    fn reduce_max(self, x: Quad) -> f32 {
        // SAFETY: as above.
        unsafe {
            let four = max(max(x.0[0], x.0[2]), max(x.0[1], x.0[3]));
            let two = max(four, vextq_f32::<2>(four, four));
            vgetq_lane_f32::<0>(max(two, vextq_f32::<1>(two, two)))
        }
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        // SAFETY: a prefetch of any address has no effect that a program sees. The intrinsic is not stable.
        unsafe { asm!("prfm pldl2keep, [{}]", in(reg) p, options(readonly, nostack, preserves_flags)) };
    }
    #[inline(always)]
    fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        run(kernel)
    }
    #[inline(always)]
    fn transpose(self, r: [Quad; LANES]) -> [Quad; LANES] {
        let mut out = r;
        for i in 0..4 {
            for j in 0..4 {
                // SAFETY: as above.
                let block =
                    unsafe { transpose4([r[4 * i].0[j], r[4 * i + 1].0[j], r[4 * i + 2].0[j], r[4 * i + 3].0[j]]) };
                for (k, column) in block.into_iter().enumerate() {
                    out[4 * j + k].0[i] = column;
                }
            }
        }
        out
    }
}
