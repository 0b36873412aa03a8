//! Packed groups into AVX-512 registers: one [`Source`] per quantised type. The layout of planes is in [`super::form`].

use std::arch::x86_64::*;

use qwen_formats::DType;

use super::form::LEVELS;
use super::wide::{RUNS, WideGroup};

/// A group of 32 inputs of sixteen rows.
pub(super) struct Group {
    /// Codes plus [`Source::OFFSET`], unsigned.
    pub(super) codes: [__m512i; RUNS],
    pub(super) scale: [__m512; 2],
    /// Minima for codes minus the type's centre.
    pub(super) min: [__m512; 2],
}

/// A quantised type. Methods need AVX-512 F, BW, VL, DQ and are inlined into functions that have it.
pub(super) trait Source {
    /// Bytes of a packed block.
    const BLOCK_BYTES: usize;
    /// Groups of 32 in a block.
    const GROUPS: usize;
    /// Scales of a group.
    const HALVES: usize;
    const HAS_MIN: bool;
    /// What is added to codes: 8 or 128.
    const OFFSET: u8 = 128;

    /// # Safety
    /// A whole packed block at `block`; `group` below [`GROUPS`](Self::GROUPS).
    unsafe fn load(block: *const u8, group: usize) -> Group;
}

/// Unpacks whole packed blocks.
///
/// # Safety
/// The processor has AVX-512 F, BW, VL, DQ. `packed` holds as many whole blocks as `wide` asks for.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn unpack<S: Source>(packed: &[u8], wide: &mut [WideGroup]) {
    let blocks = packed.chunks_exact(S::BLOCK_BYTES).zip(wide.chunks_exact_mut(S::GROUPS));
    for (block, wide) in blocks {
        for (i, wide) in wide.iter_mut().enumerate() {
            // SAFETY: a whole block; the wide group is aligned to 64 bytes.
            unsafe {
                let group = S::load(block.as_ptr(), i);
                for (to, codes) in wide.codes.iter_mut().zip(group.codes) {
                    let codes = if S::OFFSET == 128 {
                        codes
                    } else {
                        _mm512_add_epi8(codes, _mm512_set1_epi8((128 - S::OFFSET).cast_signed()))
                    };
                    _mm512_store_si512(to.as_mut_ptr().cast(), codes);
                }
                for half in 0..S::HALVES {
                    _mm512_store_ps(wide.scale[half].as_mut_ptr(), group.scale[half]);
                    _mm512_store_ps(wide.min[half].as_mut_ptr(), group.min[half]);
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn nibbles(p: *const u8) -> [__m512i; RUNS] {
    // SAFETY: 256 bytes by the caller's promise, here and below.
    unsafe {
        let mask = _mm512_set1_epi8(15);
        let mut codes = [mask; RUNS];
        for i in 0..4 {
            let v = _mm512_loadu_si512(p.add(64 * i).cast());
            codes[i] = _mm512_and_si512(v, mask);
            codes[i + 4] = _mm512_and_si512(_mm512_srli_epi16::<4>(v), mask);
        }
        codes
    }
}

/// Fields of `plane`, moved to bit `TO`, masked.
macro_rules! field {
    ($v:expr, $mask:expr, $from:literal, $to:literal) => {
        if $to >= $from {
            _mm512_and_si512(_mm512_slli_epi16::<{ if $to >= $from { $to - $from } else { 0 } }>($v), $mask)
        } else {
            _mm512_and_si512(_mm512_srli_epi16::<{ if $from > $to { $from - $to } else { 0 } }>($v), $mask)
        }
    };
}

/// A two-bit plane (128 bytes), each field at bit `$to`.
macro_rules! two_bits {
    ($p:expr, $to:literal) => {{
        let p = $p;
        let mask = _mm512_set1_epi8(3 << $to);
        let (a, b) = (_mm512_loadu_si512(p.cast()), _mm512_loadu_si512(p.add(64).cast()));
        [
            field!(a, mask, 0, $to),
            field!(a, mask, 2, $to),
            field!(a, mask, 4, $to),
            field!(a, mask, 6, $to),
            field!(b, mask, 0, $to),
            field!(b, mask, 2, $to),
            field!(b, mask, 4, $to),
            field!(b, mask, 6, $to),
        ]
    }};
}

/// A one-bit plane (64 bytes), each bit at bit `$to`.
macro_rules! one_bit {
    ($p:expr, $to:literal) => {{
        let mask = _mm512_set1_epi8(1 << $to);
        let v = _mm512_loadu_si512($p.cast());
        [
            field!(v, mask, 0, $to),
            field!(v, mask, 1, $to),
            field!(v, mask, 2, $to),
            field!(v, mask, 3, $to),
            field!(v, mask, 4, $to),
            field!(v, mask, 5, $to),
            field!(v, mask, 6, $to),
            field!(v, mask, 7, $to),
        ]
    }};
}

/// Low and high bits together, plus a constant.
#[inline(always)]
unsafe fn join(low: [__m512i; RUNS], high: [__m512i; RUNS], add: i8) -> [__m512i; RUNS] {
    let mut codes = low;
    for i in 0..RUNS {
        // SAFETY: inlined where the instructions are.
        codes[i] = unsafe { _mm512_add_epi8(_mm512_or_si512(low[i], high[i]), _mm512_set1_epi8(add)) };
    }
    codes
}

#[inline(always)]
unsafe fn levels(codes: [__m512i; RUNS]) -> [__m512i; RUNS] {
    const TABLE: [u8; 16] = {
        let mut table = [0; 16];
        let mut i = 0;
        while i < 16 {
            table[i] = LEVELS[i].cast_unsigned() ^ 0x80;
            i += 1;
        }
        table
    };
    // SAFETY: sixteen bytes; instructions as above.
    unsafe {
        let table = _mm512_broadcast_i32x4(_mm_loadu_si128(TABLE.as_ptr().cast()));
        let mut out = codes;
        for i in 0..RUNS {
            out[i] = _mm512_shuffle_epi8(table, codes[i]);
        }
        out
    }
}

#[inline(always)]
unsafe fn half(p: *const u8) -> __m512 {
    // SAFETY: 32 bytes.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
}

#[inline(always)]
unsafe fn bytes(p: *const u8) -> __m512i {
    // SAFETY: 16 bytes.
    unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())) }
}

#[inline(always)]
unsafe fn single(codes: [__m512i; RUNS], scale: __m512) -> Group {
    // SAFETY: instructions as above.
    let zero = unsafe { _mm512_setzero_ps() };
    Group { codes, scale: [scale, zero], min: [zero, zero] }
}

/// centre * scale + min.
#[inline(always)]
unsafe fn with_min(codes: [__m512i; RUNS], centre: f32, scale: __m512, min: __m512) -> Group {
    // SAFETY: instructions as above.
    unsafe {
        let zero = _mm512_setzero_ps();
        Group { codes, scale: [scale, zero], min: [_mm512_fmadd_ps(_mm512_set1_ps(centre), scale, min), zero] }
    }
}

macro_rules! source {
    ($name:ident, $bytes:literal, $groups:literal, $halves:literal, $min:literal, $offset:literal, |$p:ident, $g:ident| $body:expr) => {
        pub(super) struct $name;
        impl Source for $name {
            const BLOCK_BYTES: usize = 16 * $bytes;
            const GROUPS: usize = $groups;
            const HALVES: usize = $halves;
            const HAS_MIN: bool = $min;
            const OFFSET: u8 = $offset;
            #[inline(always)]
            unsafe fn load($p: *const u8, $g: usize) -> Group {
                let _ = $g;
                // SAFETY: a whole block by the caller's promise; instructions where it is inlined.
                unsafe { $body }
            }
        }
    };
}

source!(Q4_0, 18, 1, 1, false, 8, |p, g| single(nibbles(p.add(32)), half(p)));
source!(Q4_1, 20, 1, 1, true, 8, |p, g| with_min(nibbles(p.add(64)), 8.0, half(p), half(p.add(32))));
source!(Q5_0, 22, 1, 1, false, 128, |p, g| {
    single(join(nibbles(p.add(32)), one_bit!(p.add(32 + 256), 4), 112), half(p))
});
source!(Q5_1, 24, 1, 1, true, 128, |p, g| {
    with_min(join(nibbles(p.add(64)), one_bit!(p.add(64 + 256), 4), 112), 16.0, half(p), half(p.add(32)))
});
source!(Q8_0, 34, 1, 1, false, 128, |p, g| {
    let mut codes = [_mm512_setzero_si512(); RUNS];
    for (i, codes) in codes.iter_mut().enumerate() {
        *codes = _mm512_loadu_si512(p.add(32 + 64 * i).cast());
    }
    single(codes, half(p))
});
source!(Iq4Nl, 18, 1, 1, false, 128, |p, g| single(levels(nibbles(p.add(32))), half(p)));
source!(Iq4Xs, 136, 8, 1, false, 128, |p, g| {
    let low = shifted(bytes(p.add(64 + 16 * (g / 2))), 4 * (g % 2), 15);
    let high = shifted(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.add(32).cast())), 2 * g, 3);
    single(levels(nibbles(p.add(128 + 256 * g))), minus_32(half(p), low, high))
});
source!(Q4K, 144, 8, 1, true, 8, |p, g| {
    let (scale, min) = six_bit_scales(p, g);
    with_min(nibbles(p.add(256 + 256 * g)), 8.0, scale, min)
});
source!(Q5K, 176, 8, 1, true, 128, |p, g| {
    let (scale, min) = six_bit_scales(p, g);
    let q = p.add(256 + 320 * g);
    with_min(join(nibbles(q), one_bit!(q.add(256), 4), 112), 16.0, scale, min)
});
source!(Q6K, 210, 8, 2, false, 128, |p, g| {
    let q = p.add(288 + 384 * g);
    let codes = join(nibbles(q), two_bits!(q.add(256), 4), 96);
    let (d, zero) = (half(p), _mm512_setzero_ps());
    let mut scale = [zero; 2];
    for (i, scale) in scale.iter_mut().enumerate() {
        let stored = _mm512_cvtepi8_epi32(_mm_loadu_si128(p.add(32 + 16 * (2 * g + i)).cast()));
        *scale = _mm512_mul_ps(d, _mm512_cvtepi32_ps(stored));
    }
    Group { codes, scale, min: [zero, zero] }
});
source!(Q2K, 84, 8, 2, true, 128, |p, g| {
    let low = two_bits!(p.add(320 + 128 * g), 0);
    let codes = join(low, low, 126);
    let (d, dmin, zero) = (half(p), half(p.add(32)), _mm512_setzero_ps());
    let (mut scale, mut min) = ([zero; 2], [zero; 2]);
    for i in 0..2 {
        let packed = bytes(p.add(64 + 16 * (2 * g + i)));
        scale[i] = _mm512_mul_ps(d, _mm512_cvtepi32_ps(shifted(packed, 0, 15)));
        let product = _mm512_mul_ps(dmin, _mm512_cvtepi32_ps(shifted(packed, 4, 15)));
        min[i] = _mm512_fmsub_ps(_mm512_set1_ps(2.0), scale[i], product);
    }
    Group { codes, scale, min }
});
source!(Q3K, 110, 8, 2, false, 128, |p, g| {
    let q = p.add(224 + 192 * g);
    let codes = join(two_bits!(q, 0), one_bit!(q.add(128), 2), 124);
    let (d, zero) = (half(p), _mm512_setzero_ps());
    let mut scale = [zero; 2];
    for (i, scale) in scale.iter_mut().enumerate() {
        let group = 2 * g + i;
        let low = shifted(bytes(p.add(32 + 16 * (group % 8))), 4 * (group / 8), 15);
        let high = shifted(bytes(p.add(32 + 16 * (8 + group % 4))), 2 * (group / 4), 3);
        *scale = minus_32(d, low, high);
    }
    Group { codes, scale, min: [zero, zero] }
});

/// `count` bits up, masked.
#[inline(always)]
unsafe fn shifted(v: __m512i, count: usize, mask: i32) -> __m512i {
    // SAFETY: instructions as above.
    unsafe { _mm512_and_si512(_mm512_srl_epi32(v, _mm_cvtsi32_si128(count as i32)), _mm512_set1_epi32(mask)) }
}

/// d times a six-bit scale whose zero is 32.
#[inline(always)]
unsafe fn minus_32(d: __m512, low: __m512i, high: __m512i) -> __m512 {
    // SAFETY: instructions as above.
    unsafe {
        let stored = _mm512_or_si512(low, _mm512_slli_epi32::<4>(high));
        _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_sub_epi32(stored, _mm512_set1_epi32(32))))
    }
}

/// Scale and (negative) minimum of Q4_K and Q5_K.
#[inline(always)]
unsafe fn six_bit_scales(p: *const u8, g: usize) -> (__m512, __m512) {
    // SAFETY: the header has 256 bytes.
    unsafe {
        let packed = p.add(64);
        let six = _mm512_set1_epi32(63);
        let (scale, min) = if g < 4 {
            let scale = _mm512_and_si512(bytes(packed.add(16 * g)), six);
            (scale, _mm512_and_si512(bytes(packed.add(16 * (g + 4))), six))
        } else {
            let both = bytes(packed.add(16 * (g + 4)));
            let scale_high = shifted(bytes(packed.add(16 * (g - 4))), 6, 3);
            let min_high = shifted(bytes(packed.add(16 * g)), 6, 3);
            (
                _mm512_or_si512(shifted(both, 0, 15), _mm512_slli_epi32::<4>(scale_high)),
                _mm512_or_si512(shifted(both, 4, 15), _mm512_slli_epi32::<4>(min_high)),
            )
        };
        let scale = _mm512_mul_ps(half(p), _mm512_cvtepi32_ps(scale));
        let min = _mm512_mul_ps(half(p.add(32)), _mm512_cvtepi32_ps(min));
        (scale, _mm512_sub_ps(_mm512_set1_ps(-0.0), min))
    }
}

/// Calls a macro with the [`Source`] of a type.
macro_rules! with_source {
    ($dtype:expr, $call:ident) => {
        match $dtype {
            DType::Q4_0 => $call!(Q4_0),
            DType::Q4_1 => $call!(Q4_1),
            DType::Q5_0 => $call!(Q5_0),
            DType::Q5_1 => $call!(Q5_1),
            DType::Q8_0 => $call!(Q8_0),
            DType::Q2_K => $call!(Q2K),
            DType::Q3_K => $call!(Q3K),
            DType::Q4_K => $call!(Q4K),
            DType::Q5_K => $call!(Q5K),
            DType::Q6_K => $call!(Q6K),
            DType::IQ4_NL => $call!(Iq4Nl),
            DType::IQ4_XS => $call!(Iq4Xs),
            _ => debug_assert!(false, "{:?} has no packed form", $dtype),
        }
    };
}
pub(super) use with_source;

/// [`unpack`] by type.
///
/// # Safety
/// As [`unpack`].
pub(super) unsafe fn unpack_any(dtype: DType, packed: &[u8], wide: &mut [WideGroup]) {
    macro_rules! unpack_source {
        ($source:ident) => {
            unpack::<$source>(packed, wide)
        };
    }
    // SAFETY: the caller's promise.
    unsafe { with_source!(dtype, unpack_source) }
}
