//! Elementary functions with the same bits on every instruction set, and 16-bit float conversions.
//!
//! [`exp`] and what is built on it take a vector of any [`Simd`] token; the `_f32` forms take one value and give the bits
//! that a lane would get.

use super::simd::{LANES, Scalar, Simd};

/// Below, exp rounds to zero.
const EXP_LOWEST: f32 = -104.0;
/// Above, exp overflows.
const EXP_HIGHEST: f32 = 89.0;
/// Added and taken away, rounds to a whole number (1.5 * 2^23).
const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts; the first has few enough bits that its product with an exponent is exact.
const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;
/// (exp(r) - 1 - r) / r^2 on |r| <= ln(2)/2, highest power first (the coefficients of the Cephes library's expf).
const EXP_COEFFICIENTS: [f32; 6] = [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5e-1];

/// e^x within 2 units in the last place; subnormal results are kept, NaN stays NaN.
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    // The constant comes first: a NaN in x passes.
    exp_bounded(s, s.min(s.splat(EXP_HIGHEST), x))
}

/// [`exp`] where x is at most [`EXP_HIGHEST`] or NaN, as differences to a maximum are: the same bits for less.
#[inline(always)]
pub(crate) fn exp_bounded<S: Simd>(s: S, x: S::V) -> S::V {
    let x = s.max(s.splat(EXP_LOWEST), x);
    let round = s.splat(ROUND);
    let n = s.sub(s.fma(x, s.splat(std::f32::consts::LOG2_E), round), round);
    let r = s.fma(n, s.splat(-LN_2_HIGH), x);
    let r = s.fma(n, s.splat(-LN_2_LOW), r);
    let mut p = s.splat(EXP_COEFFICIENTS[0]);
    p = s.fma(p, r, s.splat(EXP_COEFFICIENTS[1]));
    p = s.fma(p, r, s.splat(EXP_COEFFICIENTS[2]));
    p = s.fma(p, r, s.splat(EXP_COEFFICIENTS[3]));
    p = s.fma(p, r, s.splat(EXP_COEFFICIENTS[4]));
    p = s.fma(p, r, s.splat(EXP_COEFFICIENTS[5]));
    let y = s.add(s.fma(p, s.mul(r, r), r), s.splat(1.0));
    s.scale_by_power(y, n)
}

/// (2^f - 1) / f on |f| <= 1/2, highest power first: the least relative error of 2^f that four coefficients have, 2.8e-6.
const POWER_COEFFICIENTS: [f32; 4] = [9.582_853e-3, 5.590_642_5e-2, 2.402_409_9e-1, 6.931_242e-1];

/// 2^x for x in -126..=126 within 3e-6 of it, exactly where x is a whole number: for what is rounded to bfloat16 then. NaN stays
/// NaN.
#[inline(always)]
pub(crate) fn power_of_two<S: Simd>(s: S, x: S::V) -> S::V {
    let round = s.splat(ROUND);
    let n = s.sub(s.add(x, round), round);
    let f = s.sub(x, n);
    let mut p = s.splat(POWER_COEFFICIENTS[0]);
    p = s.fma(p, f, s.splat(POWER_COEFFICIENTS[1]));
    p = s.fma(p, f, s.splat(POWER_COEFFICIENTS[2]));
    p = s.fma(p, f, s.splat(POWER_COEFFICIENTS[3]));
    s.scale_by_power(s.fma(p, f, s.splat(1.0)), n)
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub fn sigmoid<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.splat(0.0), x))))
}

/// x / (1 + e^-x); -0 for x below about -88, where e^-x overflows.
#[inline(always)]
pub fn silu<S: Simd>(s: S, x: S::V) -> S::V {
    s.div(x, s.add(s.splat(1.0), exp(s, s.sub(s.splat(0.0), x))))
}

/// Gelu, tanh form: 0.5 x (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3).
#[inline(always)]
pub fn gelu_tanh<S: Simd>(s: S, x: S::V) -> S::V {
    const MINUS_TWO_SQRT_2_OVER_PI: f32 = -1.595_769;
    let cube = s.mul(s.mul(x, x), x);
    let u = s.fma(cube, s.splat(0.044_715), x);
    s.div(x, s.add(s.splat(1.0), exp(s, s.mul(u, s.splat(MINUS_TWO_SQRT_2_OVER_PI)))))
}

/// pi/2 in three parts of 24 bits each.
const HALF_PI: [f32; 3] = [1.570_796_4, -4.371_139e-8, -1.715_124_5e-15];
/// (sin(r) - r) / r^3 and (cos(r) - 1 + r^2/2) / r^4 in powers of r^2 on |r| <= pi/4, highest first (the coefficients of
/// the Cephes library's sinf and cosf).
const SIN_COEFFICIENTS: [f32; 3] = [-1.951_529_6e-4, 8.332_161e-3, -1.666_665_5e-1];
const COS_COEFFICIENTS: [f32; 3] = [2.443_315_7e-5, -1.388_731_6e-3, 4.166_664_6e-2];
/// Beyond, the three parts of pi/2 no longer suffice.
const REDUCIBLE: f32 = 1e6;

/// Sine and cosine of each lane, within 1e-7; angles beyond a million go through f64.
#[inline(always)]
pub fn sin_cos<S: Simd>(s: S, x: S::V) -> ([f32; LANES], [f32; LANES]) {
    let round = s.splat(ROUND);
    let n = s.sub(s.fma(x, s.splat(std::f32::consts::FRAC_2_PI), round), round);
    // Exact in the first step: both terms are multiples of one small unit and nearly cancel.
    let r = s.fma(n, s.splat(-HALF_PI[0]), x);
    let r = s.fma(n, s.splat(-HALF_PI[1]), r);
    let r = s.fma(n, s.splat(-HALF_PI[2]), r);
    let r2 = s.mul(r, r);
    let p = s.fma(s.splat(SIN_COEFFICIENTS[0]), r2, s.splat(SIN_COEFFICIENTS[1]));
    let p = s.fma(p, r2, s.splat(SIN_COEFFICIENTS[2]));
    let sine = s.to_array(s.fma(s.mul(p, r2), r, r));
    let p = s.fma(s.splat(COS_COEFFICIENTS[0]), r2, s.splat(COS_COEFFICIENTS[1]));
    let p = s.fma(p, r2, s.splat(COS_COEFFICIENTS[2]));
    let cosine = s.to_array(s.fma(s.mul(p, r2), r2, s.fma(r2, s.splat(-0.5), s.splat(1.0))));
    let (x, n) = (s.to_array(x), s.to_array(n));
    let (mut sines, mut cosines) = ([0.0; LANES], [0.0; LANES]);
    // Quarter turns by choice and sign bits, without a branch for each lane: neighbouring angles have nothing in common.
    for i in 0..LANES {
        let quarter = n[i] as i32 as u32;
        let (a, b) = if quarter & 1 == 0 { (sine[i], cosine[i]) } else { (cosine[i], sine[i]) };
        sines[i] = f32::from_bits(a.to_bits() ^ (quarter & 2) << 30);
        cosines[i] = f32::from_bits(b.to_bits() ^ (quarter.wrapping_add(1) & 2) << 30);
    }
    // False for what is no number, too.
    let reducible = x.map(|x| x.abs() <= REDUCIBLE);
    if reducible != [true; LANES] {
        for i in (0..LANES).filter(|&i| !reducible[i]) {
            let (sine, cosine) = f64::from(x[i]).sin_cos();
            (sines[i], cosines[i]) = (sine as f32, cosine as f32);
        }
    }
    (sines, cosines)
}

/// [`exp`] of one value.
#[must_use]
pub fn exp_f32(x: f32) -> f32 {
    exp(Scalar, [x; 16])[0]
}

/// [`sigmoid`] of one value.
#[must_use]
pub fn sigmoid_f32(x: f32) -> f32 {
    sigmoid(Scalar, [x; 16])[0]
}

/// [`silu`] of one value.
#[must_use]
pub fn silu_f32(x: f32) -> f32 {
    silu(Scalar, [x; 16])[0]
}

/// [`gelu_tanh`] of one value.
#[must_use]
pub fn gelu_tanh_f32(x: f32) -> f32 {
    gelu_tanh(Scalar, [x; 16])[0]
}

/// Half precision to single; a signalling NaN becomes quiet, as the processor does it.
#[inline]
#[must_use]
pub const fn f16_to_f32(half: u16) -> f32 {
    let sign = ((half & 0x8000) as u32) << 16;
    let magnitude = (half & 0x7fff) as u32;
    let bits = if magnitude >= 0x7c00 {
        let quiet = if magnitude > 0x7c00 { 0x0040_0000 } else { 0 };
        ((magnitude << 13) + (224 << 23)) | quiet
    } else if magnitude >= 0x0400 {
        (magnitude << 13) + (112 << 23)
    } else {
        // Subnormal: the mantissa counts units of 2^-24; both conversion and product are exact.
        (magnitude as f32 * 5.960_464_5e-8).to_bits()
    };
    f32::from_bits(sign | bits)
}

/// Single precision to half, nearest even.
#[inline]
#[must_use]
pub const fn f32_to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return sign | 0x7e00 | ((magnitude >> 13) & 0x1ff) as u16;
    }
    if magnitude >= 0x4780_0000 {
        return sign | 0x7c00;
    }
    if magnitude < 0x3880_0000 {
        // Subnormal: adding 0.5 aligns the mantissa to units of 2^-24 and rounds.
        let aligned = f32::from_bits(magnitude) + 0.5;
        return sign | (aligned.to_bits() - 0x3f00_0000) as u16;
    }
    let odd = (magnitude >> 13) & 1;
    sign | ((magnitude - (112 << 23) + 0xfff + odd) >> 13) as u16
}

/// bfloat16 to single precision.
#[inline]
#[must_use]
pub const fn bf16_to_f32(brain: u16) -> f32 {
    f32::from_bits((brain as u32) << 16)
}

/// Single precision to bfloat16, nearest even.
#[inline]
#[must_use]
pub const fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::kernels::simd::{Kernel, dispatch};

    /// Distance in units in the last place of the true value.
    fn ulps(found: f32, expected: f64) -> f64 {
        let rounded = expected as f32;
        if found == rounded {
            return 0.0;
        }
        let unit = (f32::from_bits(rounded.abs().to_bits() + 1) - rounded.abs()).abs();
        ((f64::from(found) - expected) / f64::from(unit)).abs()
    }

    fn sweep() -> impl Iterator<Item = f32> {
        (-110_000..95_000).map(|i| i as f32 * 0.001 + 0.000_123)
    }

    #[test]
    fn exp_is_within_two_ulps() {
        let worst = sweep().map(|x| ulps(exp_f32(x), f64::from(x).exp())).fold(0.0, f64::max);
        assert!(worst <= 2.0, "{worst} ulp");
    }

    #[test]
    fn exp_of_special_values() {
        assert_eq!(exp_f32(0.0), 1.0);
        assert_eq!(exp_f32(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_f32(f32::INFINITY), f32::INFINITY);
        assert!(exp_f32(f32::NAN).is_nan());
        assert!(silu_f32(f32::NAN).is_nan());
        assert_eq!(silu_f32(-1000.0), 0.0);
    }

    #[test]
    fn activations_follow_their_formulas() {
        for x in sweep().step_by(37) {
            let wide = f64::from(x);
            let close = |found: f32, expected: f64| {
                assert!(
                    (f64::from(found) - expected).abs() <= 1e-6 * expected.abs().max(1e-3),
                    "{x}: {found} {expected}"
                );
            };
            close(sigmoid_f32(x), 1.0 / (1.0 + (-wide).exp()));
            close(silu_f32(x), wide / (1.0 + (-wide).exp()));
            let u = (2.0 / std::f64::consts::PI).sqrt() * (wide + 0.044_715 * wide.powi(3));
            close(gelu_tanh_f32(x), 0.5 * wide * (1.0 + u.tanh()));
        }
    }

    #[test]
    fn sine_and_cosine_hold_at_large_angles() {
        let near_multiples = (0..83_000).map(|n| (f64::from(n) * std::f64::consts::FRAC_PI_2) as f32);
        let spread = (0..100_000).map(|i| i as f32 * 1.310_72 + 0.01);
        for x in near_multiples.chain(spread).chain([999_999.9, 1e7, 2e9, -3.7]) {
            let (sine, cosine) = sin_cos(Scalar, [x; LANES]);
            assert!((f64::from(sine[0]) - f64::from(x).sin()).abs() <= 1e-7, "sin {x}");
            assert!((f64::from(cosine[0]) - f64::from(x).cos()).abs() <= 1e-7, "cos {x}");
        }
        assert!(sin_cos(Scalar, [f32::INFINITY; LANES]).0[0].is_nan());
        assert!(sin_cos(Scalar, [f32::NAN; LANES]).1[0].is_nan());
    }

    /// All functions over a sweep, as bits.
    struct All;

    impl Kernel for All {
        type Output = Vec<u32>;

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Vec<u32> {
            let mut bits = Vec::new();
            let xs: Vec<f32> = sweep().collect();
            for chunk in xs.as_chunks::<LANES>().0 {
                let x = s.of(*chunk);
                for y in [exp(s, x), sigmoid(s, x), silu(s, x), gelu_tanh(s, x)] {
                    bits.extend(s.to_array(y).map(f32::to_bits));
                }
                let (sine, cosine) = sin_cos(s, s.mul(x, s.splat(1000.0)));
                bits.extend(sine.map(f32::to_bits));
                bits.extend(cosine.map(f32::to_bits));
            }
            bits
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let expected = dispatch(Isa::Scalar, All);
        for isa in Isa::available() {
            assert!(dispatch(isa, All) == expected, "{}", isa.name());
        }
    }

    #[test]
    fn half_precision_round_trips_and_rounds_to_even() {
        for half in 0..=u16::MAX {
            let x = f16_to_f32(half);
            let back = f32_to_f16(x);
            if x.is_nan() {
                assert_eq!(back, half | 0x200);
            } else {
                assert_eq!(back, half);
            }
        }
        assert_eq!(f32_to_f16(2049.0), f32_to_f16(2048.0));
        assert_eq!(f32_to_f16(2051.0), f32_to_f16(2052.0));
        assert_eq!(f32_to_f16(65519.0), 0x7bff);
        assert_eq!(f32_to_f16(65520.0), 0x7c00);
        assert_eq!(f32_to_f16(2.980_232_2e-8), 0);
        assert_eq!(f32_to_f16(2.980_232_6e-8), 1);
        assert_eq!(f32_to_bf16(1.003_906_3), 0x3f80);
        assert_eq!(f32_to_bf16(1.011_718_8), 0x3f82);
    }
}
