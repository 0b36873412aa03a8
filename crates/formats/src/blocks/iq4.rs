//! Non-linear four-bit blocks: codes are indices into a table of 16 levels, spaced like a normal distribution.

use super::{NO_MIN, f16_at, legacy};

/// The levels of IQ4_NL and IQ4_XS.
const LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Bytes: d, qs[16].
pub(super) fn iq4_nl(block: &[u8], codes: &mut [i8], scales: &mut [f32], mins: &mut [f32]) {
    scales[0] = f16_at(block, 0);
    mins[0] = NO_MIN;
    levels(&block[2..18], codes);
}

/// Bytes: d, scales_h (u16), scales_l[4], qs[128]; eight groups of 32.
pub(super) fn iq4_xs(block: &[u8], codes: &mut [i8], scales: &mut [f32], mins: &mut [f32]) {
    let d = f16_at(block, 0);
    let scales_high = u16::from_le_bytes([block[2], block[3]]);
    for (group, (scale, min)) in scales.iter_mut().zip(mins).enumerate() {
        let low = i16::from(block[4 + group / 2] >> (4 * (group % 2)) & 15);
        let high = (scales_high >> (2 * group) & 3).cast_signed();
        *scale = d * f32::from((low | high << 4) - 32);
        *min = NO_MIN;
    }
    for (codes, bytes) in codes.chunks_exact_mut(32).zip(block[8..136].chunks_exact(16)) {
        levels(bytes, codes);
    }
}

fn levels(bytes: &[u8], codes: &mut [i8]) {
    legacy::nibbles(bytes, codes);
    for code in codes {
        *code = LEVELS[usize::from(code.cast_unsigned() & 15)];
    }
}
