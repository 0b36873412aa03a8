//! The cheap quantisers, with the reference's rounding: for tests, synthetic models and repacking.

use half::{bf16, f16};

use super::length_error;
use crate::{DType, FormatError};

const BLOCK: usize = 32;

/// Encodes `values` (whole blocks) into `out`: F32, F16, BF16, Q8_0, Q4_0 or Q4_1.
pub fn quantize(dtype: DType, values: &[f32], out: &mut [u8]) -> Result<(), FormatError> {
    let encode: fn(&[f32], &mut [u8]) = match dtype {
        DType::F32 => |values, out| out.copy_from_slice(&values[0].to_le_bytes()),
        DType::F16 => |values, out| out.copy_from_slice(&f16::from_f32(values[0]).to_le_bytes()),
        DType::BF16 => |values, out| out.copy_from_slice(&bf16::from_f32(values[0]).to_le_bytes()),
        DType::Q8_0 => q8_0,
        DType::Q4_0 => q4_0,
        DType::Q4_1 => q4_1,
        _ => return Err(FormatError::UnsupportedType { dtype, action: "encoded from float32" }),
    };
    let blocks = out.len() / dtype.block_bytes();
    if out.len() != blocks * dtype.block_bytes() || blocks * dtype.block_len() != values.len() {
        return Err(length_error(dtype, "values", blocks * dtype.block_len(), values.len()));
    }
    for (values, out) in values.chunks_exact(dtype.block_len()).zip(out.chunks_exact_mut(dtype.block_bytes())) {
        encode(values, out);
    }
    Ok(())
}

fn q8_0(values: &[f32], out: &mut [u8]) {
    let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    let scale = largest / 127.0;
    let inverse = inverse(scale);
    put_f16(&mut out[..2], scale);
    for (code, value) in out[2..].iter_mut().zip(values) {
        *code = ((value * inverse).round() as i8).cast_unsigned();
    }
}

fn q4_0(values: &[f32], out: &mut [u8]) {
    // The value of largest magnitude, with its sign, maps to code -8: the only one without a positive twin.
    let extreme =
        values.iter().fold(0.0f32, |extreme, &value| if value.abs() > extreme.abs() { value } else { extreme });
    let scale = extreme / -8.0;
    let inverse = inverse(scale);
    put_f16(&mut out[..2], scale);
    put_nibbles(&mut out[2..], values, |value| value * inverse + 8.5);
}

fn q4_1(values: &[f32], out: &mut [u8]) {
    let min = values.iter().copied().fold(f32::INFINITY, f32::min);
    let max = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scale = (max - min) / 15.0;
    let inverse = inverse(scale);
    put_f16(&mut out[..2], scale);
    put_f16(&mut out[2..4], min);
    put_nibbles(&mut out[4..], values, |value| (value - min) * inverse + 0.5);
}

fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

fn put_f16(out: &mut [u8], value: f32) {
    out.copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

/// Truncates to codes 0..=15; values 0..16 go into low nibbles, 16..32 into high ones.
fn put_nibbles(out: &mut [u8], values: &[f32], code: impl Fn(f32) -> f32) {
    let (low, high) = values.split_at(BLOCK / 2);
    for ((byte, &low), &high) in out.iter_mut().zip(low).zip(high) {
        let nibble = |value| (code(value) as u8).min(15);
        *byte = nibble(low) | nibble(high) << 4;
    }
}
