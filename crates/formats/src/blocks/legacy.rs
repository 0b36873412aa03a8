//! The 32-value blocks: one f16 scale, sometimes an f16 minimum, and codes of 4, 5 or 8 bits.
//!
//! Four-bit codes are stored as 16 bytes: low nibbles are values 0..16, high nibbles values 16..32. Five-bit codes
//! keep their top bits in a little-endian u32, bit `e` for value `e`.

use super::{NO_MIN, f16_at};

/// Bytes: d, qs[16].
pub(super) fn q4_0(block: &[u8], codes: &mut [i8], scales: &mut [f32], mins: &mut [f32]) {
    scales[0] = f16_at(block, 0);
    mins[0] = NO_MIN;
    nibbles(&block[2..18], codes);
    codes.iter_mut().for_each(|code| *code -= 8);
}

/// Bytes: d, m, qs[16].
pub(super) fn q4_1(block: &[u8], codes: &mut [i8], scales: &mut [f32], mins: &mut [f32]) {
    scales[0] = f16_at(block, 0);
    mins[0] = f16_at(block, 2);
    nibbles(&block[4..20], codes);
}

/// Bytes: d, qh[4], qs[16].
pub(super) fn q5_0(block: &[u8], codes: &mut [i8], scales: &mut [f32], mins: &mut [f32]) {
    scales[0] = f16_at(block, 0);
    mins[0] = NO_MIN;
    nibbles(&block[6..22], codes);
    add_fifth_bits([block[2], block[3], block[4], block[5]], codes);
    codes.iter_mut().for_each(|code| *code -= 16);
}

/// Bytes: d, m, qh[4], qs[16].
pub(super) fn q5_1(block: &[u8], codes: &mut [i8], scales: &mut [f32], mins: &mut [f32]) {
    scales[0] = f16_at(block, 0);
    mins[0] = f16_at(block, 2);
    nibbles(&block[8..24], codes);
    add_fifth_bits([block[4], block[5], block[6], block[7]], codes);
}

/// Bytes: d, qs[32].
pub(super) fn q8_0(block: &[u8], codes: &mut [i8], scales: &mut [f32], mins: &mut [f32]) {
    scales[0] = f16_at(block, 0);
    mins[0] = NO_MIN;
    for (code, &byte) in codes.iter_mut().zip(&block[2..34]) {
        *code = byte.cast_signed();
    }
}

/// Low nibbles of `bytes` into the first half of `codes`, high nibbles into the second.
pub(super) fn nibbles(bytes: &[u8], codes: &mut [i8]) {
    let (low, high) = codes.split_at_mut(bytes.len());
    for ((low, high), &byte) in low.iter_mut().zip(high).zip(bytes) {
        *low = (byte & 15).cast_signed();
        *high = (byte >> 4).cast_signed();
    }
}

fn add_fifth_bits(bits: [u8; 4], codes: &mut [i8]) {
    let bits = u32::from_le_bytes(bits);
    for (element, code) in codes.iter_mut().enumerate() {
        *code |= i8::from(bits >> element & 1 == 1) << 4;
    }
}
