//! Rows of 8-bit floats to f32, times a scale for every so many columns.
//!
//! Every step is exact but the product with the scale, so the bits are those of [`blocks::dequantize`] and one multiplication.
//! Bound: about 12 operations for 16 weights.

use qwen_formats::{DType, blocks};

use crate::isa::Isa;
use crate::kernels::simd::{Kernel, LANES, Simd, dispatch};

/// Scales of a row: one for every `columns` values, the last for what is left.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scales<'a> {
    pub(super) values: &'a [f32],
    pub(super) columns: usize,
}

/// Widens a row of any plain type.
pub(super) fn row(isa: Isa, dtype: DType, bytes: &[u8], scales: Option<Scales<'_>>, values: &mut [f32]) {
    let all = Scales { values: &[1.0], columns: values.len().max(1) };
    let scales = scales.unwrap_or(all);
    match dtype {
        DType::F8E4M3 => dispatch(isa, Row::<true> { bytes, scales, values }),
        DType::F8E5M2 => dispatch(isa, Row::<false> { bytes, scales, values }),
        _ => {
            let decoded = blocks::dequantize(dtype, bytes, values);
            debug_assert!(decoded.is_ok(), "{decoded:?}");
            for (values, scale) in values.chunks_mut(scales.columns).zip(scales.values) {
                values.iter_mut().for_each(|value| *value *= scale);
            }
        }
    }
}

struct Row<'a, const E4M3: bool> {
    bytes: &'a [u8],
    scales: Scales<'a>,
    values: &'a mut [f32],
}

impl<const E4M3: bool> Kernel for Row<'_, E4M3> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let columns = self.scales.columns;
        let parts = self.values.chunks_mut(columns).zip(self.bytes.chunks(columns));
        for ((values, bytes), &scale) in parts.zip(self.scales.values) {
            let (whole, rest) = values.as_chunks_mut::<LANES>();
            let (bytes, last) = bytes.as_chunks::<LANES>();
            let scale = s.splat(scale);
            // SAFETY: sixteen bytes and values each.
            unsafe {
                for (values, bytes) in whole.iter_mut().zip(bytes) {
                    s.store(values.as_mut_ptr(), s.mul(load::<S, E4M3>(s, bytes), scale));
                }
                let mut padded = [0; LANES];
                padded[..last.len()].copy_from_slice(last);
                s.store_partial(rest.as_mut_ptr(), rest.len(), s.mul(load::<S, E4M3>(s, &padded), scale));
            }
        }
    }
}

#[inline(always)]
fn load<S: Simd, const E4M3: bool>(s: S, bytes: &[u8; LANES]) -> S::V {
    // SAFETY: sixteen bytes.
    unsafe { if E4M3 { s.load_e4m3(bytes.as_ptr()) } else { s.load_e5m2(bytes.as_ptr()) } }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_and_scale_has_the_decoders_bits_on_every_instruction_set() {
        for dtype in [DType::F8E4M3, DType::F8E5M2, DType::BF16] {
            // Two rows' worth of every byte, an odd number of values and of columns.
            let len = 2 * 256 + 5;
            let bytes: Vec<u8> = (0..len * dtype.block_bytes()).map(|i| i as u8).collect();
            for columns in [1, 7, 16, 128, 1000] {
                let scales: Vec<f32> = (0..len.div_ceil(columns)).map(|i| 0.37 * i as f32 - 1.9).collect();
                let mut expected = vec![0.0; len];
                blocks::dequantize(dtype, &bytes, &mut expected).unwrap();
                for (values, scale) in expected.chunks_mut(columns).zip(&scales) {
                    values.iter_mut().for_each(|value| *value *= scale);
                }
                for isa in Isa::available() {
                    let mut found = vec![9.0; len];
                    row(isa, dtype, &bytes, Some(Scales { values: &scales, columns }), &mut found);
                    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                        let same = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
                        assert!(same, "{dtype} {i} {} by {columns}: {found} {expected}", isa.name());
                    }
                }
            }
        }
    }

    #[test]
    fn without_scales_values_are_the_decoders() {
        let bytes: Vec<u8> = (0..=255).collect();
        for dtype in [DType::F8E4M3, DType::F8E5M2] {
            let (mut expected, mut found) = ([0.0; 256], [1.0; 256]);
            blocks::dequantize(dtype, &bytes, &mut expected).unwrap();
            row(Isa::current(), dtype, &bytes, None, &mut found);
            assert!(found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()));
        }
    }
}
