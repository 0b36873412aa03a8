//! Plain floats, and 8-bit floats with a float32 scale per rectangle of the matrix.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::length_error;
use crate::{DType, FormatError};

/// Widens or rounds plain floats. Lengths are checked by the caller.
pub(super) fn dequantize(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<(), FormatError> {
    match dtype {
        DType::F32 => convert(bytes, out, f32::from_le_bytes),
        DType::F64 => convert(bytes, out, |bytes| f64::from_le_bytes(bytes) as f32),
        DType::BF16 => convert(bytes, out, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        DType::F16 => halves(bytes, out),
        DType::F8E4M3 => convert(bytes, out, |[byte]| f8_e4m3_to_f32(byte)),
        DType::F8E5M2 => convert(bytes, out, |[byte]| f8_e5m2_to_f32(byte)),
        _ => return Err(FormatError::UnsupportedType { dtype, action: "decoded to float32" }),
    }
    Ok(())
}

fn convert<const N: usize>(bytes: &[u8], out: &mut [f32], decode: impl Fn([u8; N]) -> f32) {
    let (items, _) = bytes.as_chunks::<N>();
    for (value, &item) in out.iter_mut().zip(items) {
        *value = decode(item);
    }
}

/// Through a small aligned buffer: the bulk conversion uses the machine's instruction, and mapped bytes may be odd.
fn halves(bytes: &[u8], out: &mut [f32]) {
    const CHUNK: usize = 128;
    let mut buffer = [f16::ZERO; CHUNK];
    for (bytes, out) in bytes.chunks(2 * CHUNK).zip(out.chunks_mut(CHUNK)) {
        let (items, _) = bytes.as_chunks::<2>();
        for (half, &item) in buffer.iter_mut().zip(items) {
            *half = f16::from_le_bytes(item);
        }
        if let Some(filled) = buffer.get(..out.len()) {
            filled.convert_to_f32_slice(out);
        }
    }
}

/// One E4M3 ("fn") float: 1 sign, 4 exponent bits with bias 7, 3 mantissa bits; 0x7F and 0xFF are NaN.
pub const fn f8_e4m3_to_f32(byte: u8) -> f32 {
    E4M3[byte as usize]
}

/// One E5M2 float: the upper byte of a binary16.
pub const fn f8_e5m2_to_f32(byte: u8) -> f32 {
    E5M2[byte as usize]
}

static E4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (sign, exponent, mantissa) = (byte as u32 >> 7, byte as u32 >> 3 & 15, byte as u32 & 7);
        let magnitude = match (exponent, mantissa) {
            (0, _) => mantissa as f32 / 512.0,
            (15, 7) => f32::NAN,
            _ => f32::from_bits((exponent + 127 - 7) << 23 | mantissa << 20),
        };
        table[byte] = f32::from_bits(magnitude.to_bits() | sign << 31);
        byte += 1;
    }
    table
};

static E5M2: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = f16::from_bits((byte as u16) << 8).to_f32_const();
        byte += 1;
    }
    table
};

/// Decodes an E4M3 matrix `[rows, cols]` with one scale per `block_rows` x `block_cols` rectangle (DeepSeek FP8):
/// `value = weight * scale_inv[row / block_rows, col / block_cols]`. Rectangles at the edges may be partial.
pub fn dequantize_fp8_block(
    weights: &[u8],
    scale_inv: &[f32],
    rows: usize,
    cols: usize,
    block_rows: usize,
    block_cols: usize,
    out: &mut [f32],
) -> Result<(), FormatError> {
    let dtype = DType::F8E4M3;
    // An overflowing product fits no slice, so it turns into a length error.
    let elements = rows.saturating_mul(cols);
    let (block_rows, block_cols) = (block_rows.max(1), block_cols.max(1));
    let scale_cols = cols.div_ceil(block_cols);
    let scales = rows.div_ceil(block_rows).saturating_mul(scale_cols);
    let lengths =
        [("weights", elements, weights.len()), ("scales", scales, scale_inv.len()), ("values", elements, out.len())];
    for (what, expected, found) in lengths {
        if expected != found {
            return Err(length_error(dtype, what, expected, found));
        }
    }
    if elements == 0 {
        return Ok(());
    }
    for (row, (weights, out)) in weights.chunks_exact(cols).zip(out.chunks_exact_mut(cols)).enumerate() {
        let scales = scale_inv.chunks_exact(scale_cols).nth(row / block_rows).unwrap_or_default();
        for ((weights, out), &scale) in weights.chunks(block_cols).zip(out.chunks_mut(block_cols)).zip(scales) {
            for (value, &weight) in out.iter_mut().zip(weights) {
                *value = f8_e4m3_to_f32(weight) * scale;
            }
        }
    }
    Ok(())
}
