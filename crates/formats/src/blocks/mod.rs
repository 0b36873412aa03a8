//! Decoding of stored values: bytes of any [`DType`] in, float32 or integer codes with scales out.
//!
//! Every block type decodes to groups in which `value = scale * code + min`, with codes that fit i8.
//! [`decode_groups`] gives those parts to kernels; [`dequantize`] does the multiplication and addition, each rounded once to
//! float32, which makes it equal bit for bit to the reference (the `gguf` Python package). Types without a minimum
//! have -0.0 there: adding it changes no value, not even the sign of a zero.

mod float;
mod iq4;
mod k_quants;
mod legacy;
mod quantize;

pub use float::{dequantize_fp8_block, f8_e4m3_to_f32, f8_e5m2_to_f32};
pub use quantize::quantize;

use crate::{DType, FormatError};

/// The longest block of any type, in values.
pub const MAX_BLOCK_LEN: usize = 256;
/// The most groups in a block of any type.
pub const MAX_GROUPS: usize = 16;
/// The minimum of types that have none: the only float whose addition is the identity for both zeros.
const NO_MIN: f32 = -0.0;

/// Splits one block into codes, scales and minima. All lengths are checked by the caller.
type Decode = fn(block: &[u8], codes: &mut [i8], scales: &mut [f32], mins: &mut [f32]);

fn decoder(dtype: DType) -> Option<Decode> {
    Some(match dtype {
        DType::Q4_0 => legacy::q4_0,
        DType::Q4_1 => legacy::q4_1,
        DType::Q5_0 => legacy::q5_0,
        DType::Q5_1 => legacy::q5_1,
        DType::Q8_0 => legacy::q8_0,
        DType::Q2_K => k_quants::q2_k,
        DType::Q3_K => k_quants::q3_k,
        DType::Q4_K => k_quants::q4_k,
        DType::Q5_K => k_quants::q5_k,
        DType::Q6_K => k_quants::q6_k,
        DType::IQ4_NL => iq4::iq4_nl,
        DType::IQ4_XS => iq4::iq4_xs,
        _ => return None,
    })
}

/// Decodes `bytes` (whole blocks) into `out`, which has one place per value.
///
/// Works for every block type and every float type (F64 is rounded). Integers and bools are refused.
pub fn dequantize(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<(), FormatError> {
    let expected = dtype.bytes_for(out.len() as u64).and_then(|bytes| usize::try_from(bytes).ok());
    if expected != Some(bytes.len()) {
        return Err(length_error(
            dtype,
            "values",
            bytes.len() / dtype.block_bytes().max(1) * dtype.block_len(),
            out.len(),
        ));
    }
    let Some(decode) = decoder(dtype) else {
        return float::dequantize(dtype, bytes, out);
    };
    let (block_len, group_len) = (dtype.block_len(), dtype.group_len());
    let groups = block_len / group_len;
    let (mut codes, mut scales, mut mins) = ([0; MAX_BLOCK_LEN], [0.0; MAX_GROUPS], [0.0; MAX_GROUPS]);
    for (block, values) in bytes.chunks_exact(dtype.block_bytes()).zip(out.chunks_exact_mut(block_len)) {
        decode(block, &mut codes[..block_len], &mut scales[..groups], &mut mins[..groups]);
        let parts = codes.chunks_exact(group_len).zip(scales.iter().zip(&mins));
        for (values, (codes, (&scale, &min))) in values.chunks_exact_mut(group_len).zip(parts) {
            for (value, &code) in values.iter_mut().zip(codes) {
                *value = scale * f32::from(code) + min;
            }
        }
    }
    Ok(())
}

/// Splits one block into integer codes in natural order, and a scale and minimum per group of
/// [`DType::group_len`] values, so that `value = scale * code + min`.
///
/// `codes` has [`DType::block_len`] places, `scales` and `mins` one per group.
pub fn decode_groups(
    dtype: DType,
    block: &[u8],
    codes: &mut [i8],
    scales: &mut [f32],
    mins: &mut [f32],
) -> Result<(), FormatError> {
    let decode =
        decoder(dtype).ok_or(FormatError::UnsupportedType { dtype, action: "split into integer codes and scales" })?;
    let groups = dtype.block_len() / dtype.group_len();
    let lengths = [
        ("block bytes", dtype.block_bytes(), block.len()),
        ("codes", dtype.block_len(), codes.len()),
        ("scales", groups, scales.len()),
        ("minima", groups, mins.len()),
    ];
    for (what, expected, found) in lengths {
        if expected != found {
            return Err(length_error(dtype, what, expected, found));
        }
    }
    decode(block, codes, scales, mins);
    Ok(())
}

const fn length_error(dtype: DType, what: &'static str, expected: usize, found: usize) -> FormatError {
    FormatError::BlockLength { dtype, what, expected, found }
}

/// The binary16 at byte `at`.
fn f16_at(block: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

#[cfg(test)]
mod tests;
