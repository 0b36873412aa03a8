//! The 256-value super-blocks: f16 scales of scales, small integer scales per group, codes of 2 to 6 bits.
//!
//! Codes lie in eight runs of 32 values. A "run" `r` below is values `32 r .. 32 r + 32`.

use super::{NO_MIN, f16_at};

const RUN: usize = 32;

/// Bytes: scales[16] (scale low, minimum high nibble), qs[64], d, dmin.
pub(super) fn q2_k(block: &[u8], codes: &mut [i8], scales: &mut [f32], mins: &mut [f32]) {
    let (d, dmin) = (f16_at(block, 80), f16_at(block, 82));
    for ((scale, min), &packed) in scales.iter_mut().zip(mins).zip(&block[..16]) {
        *scale = d * f32::from(packed & 15);
        *min = -(dmin * f32::from(packed >> 4));
    }
    two_bit_codes(&block[16..80], codes);
}

/// Bytes: hmask[32], qs[64], scales[12], d.
pub(super) fn q3_k(block: &[u8], codes: &mut [i8], scales: &mut [f32], mins: &mut [f32]) {
    let d = f16_at(block, 108);
    let packed = &block[96..108];
    for (group, (scale, min)) in scales.iter_mut().zip(mins).enumerate() {
        let low = packed[group % 8] >> (4 * (group / 8)) & 15;
        let high = packed[8 + group % 4] >> (2 * (group / 4)) & 3;
        *scale = d * f32::from((low | high << 4).cast_signed() - 32);
        *min = NO_MIN;
    }
    two_bit_codes(&block[32..96], codes);
    for (run, codes) in codes.chunks_exact_mut(RUN).enumerate() {
        for (code, &mask) in codes.iter_mut().zip(&block[..32]) {
            // The stored bit is inverted: set means nothing is subtracted.
            *code -= i8::from(mask >> run & 1 == 0) << 2;
        }
    }
}

/// Bytes: d, dmin, scales[12], qs[128].
pub(super) fn q4_k(block: &[u8], codes: &mut [i8], scales: &mut [f32], mins: &mut [f32]) {
    six_bit_scales(block, scales, mins);
    nibble_runs(&block[16..144], codes);
}

/// Bytes: d, dmin, scales[12], qh[32], qs[128].
pub(super) fn q5_k(block: &[u8], codes: &mut [i8], scales: &mut [f32], mins: &mut [f32]) {
    six_bit_scales(block, scales, mins);
    nibble_runs(&block[48..176], codes);
    for (run, codes) in codes.chunks_exact_mut(RUN).enumerate() {
        for (code, &high) in codes.iter_mut().zip(&block[16..48]) {
            *code |= (high >> run & 1).cast_signed() << 4;
        }
    }
}

/// Bytes: ql[128], qh[64], scales[16] (signed), d.
pub(super) fn q6_k(block: &[u8], codes: &mut [i8], scales: &mut [f32], mins: &mut [f32]) {
    let d = f16_at(block, 208);
    for ((scale, min), &stored) in scales.iter_mut().zip(mins).zip(&block[192..208]) {
        *scale = d * f32::from(stored.cast_signed());
        *min = NO_MIN;
    }
    for (run, codes) in codes.chunks_exact_mut(RUN).enumerate() {
        // Each half of 128 values has 64 bytes of low nibbles (two runs low, then the same bytes high) and 32 of top bits.
        let (half, quarter) = (run / 4, run % 4);
        let low = &block[64 * half + 32 * (quarter % 2)..][..RUN];
        let high = &block[128 + 32 * half..][..RUN];
        for ((code, &low), &high) in codes.iter_mut().zip(low).zip(high) {
            let low = low >> (4 * (quarter / 2)) & 15;
            let high = high >> (2 * quarter) & 3;
            *code = (low | high << 4).cast_signed() - 32;
        }
    }
}

/// Two-bit codes: each half of 128 values has 32 bytes, read at shifts 0, 2, 4, 6 for its four runs.
fn two_bit_codes(bytes: &[u8], codes: &mut [i8]) {
    for (run, codes) in codes.chunks_exact_mut(RUN).enumerate() {
        for (code, &byte) in codes.iter_mut().zip(&bytes[32 * (run / 4)..][..RUN]) {
            *code = (byte >> (2 * (run % 4)) & 3).cast_signed();
        }
    }
}

/// Four-bit codes: 32 bytes for each two runs, low nibbles first.
fn nibble_runs(bytes: &[u8], codes: &mut [i8]) {
    for (codes, bytes) in codes.chunks_exact_mut(2 * RUN).zip(bytes.chunks_exact(RUN)) {
        super::legacy::nibbles(bytes, codes);
    }
}

/// Eight scales and minima of six bits in twelve bytes, after d and dmin.
fn six_bit_scales(block: &[u8], scales: &mut [f32], mins: &mut [f32]) {
    let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
    let packed = &block[4..16];
    for (group, (scale, min)) in scales.iter_mut().zip(mins).enumerate() {
        let (scale_bits, min_bits) = if group < 4 {
            (packed[group] & 63, packed[group + 4] & 63)
        } else {
            (packed[group + 4] & 15 | packed[group - 4] >> 6 << 4, packed[group + 4] >> 4 | packed[group] >> 6 << 4)
        };
        *scale = d * f32::from(scale_bits);
        *min = -(dmin * f32::from(min_bits));
    }
}
