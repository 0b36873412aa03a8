use half::f16;
use proptest::prelude::*;

use super::*;

const BLOCK_TYPES: [DType; 12] = [
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
    DType::IQ4_NL,
    DType::IQ4_XS,
];

fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / dtype.block_bytes() * dtype.block_len()];
    dequantize(dtype, bytes, &mut values).unwrap();
    values
}

fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; values.len() / dtype.block_len() * dtype.block_bytes()];
    quantize(dtype, values, &mut bytes).unwrap();
    bytes
}

#[test]
fn every_quantised_type_has_a_decoder() {
    for dtype in DType::ALL {
        assert_eq!(decoder(dtype).is_some(), dtype.is_block_quantised(), "{dtype}");
        assert!(dtype.block_len() <= MAX_BLOCK_LEN);
        assert!(dtype.block_len() / dtype.group_len() <= MAX_GROUPS || !dtype.is_block_quantised());
    }
}

#[test]
fn q4_0_by_hand() {
    let mut block = f16::from_f32(0.5).to_le_bytes().to_vec();
    block.extend((0u8..16).map(|code| code | (15 - code) << 4));
    let expected: Vec<f32> = (0..16).chain((0..16).rev()).map(|code| 0.5 * (code as f32 - 8.0)).collect();
    assert_eq!(decode(DType::Q4_0, &block), expected);
}

#[test]
fn zero_times_a_negative_scale_keeps_its_sign() {
    let mut block = f16::from_f32(-2.0).to_le_bytes().to_vec();
    block.extend([0u8; 32]);
    assert!(decode(DType::Q8_0, &block).iter().all(|value| value.to_bits() == (-0.0f32).to_bits()));
}

#[test]
fn e4m3_is_the_finite_variant() {
    assert_eq!(f8_e4m3_to_f32(0x7E), 448.0);
    assert!(f8_e4m3_to_f32(0x7F).is_nan());
    assert!(f8_e4m3_to_f32(0xFF).is_nan());
    assert_eq!(f8_e4m3_to_f32(0x38), 1.0);
    assert_eq!(f8_e4m3_to_f32(0x01), 1.0 / 512.0);
    assert_eq!(f8_e4m3_to_f32(0x80).to_bits(), (-0.0f32).to_bits());
    assert_eq!((0..=255u8).filter(|&byte| f8_e4m3_to_f32(byte).is_nan()).count(), 2);
    // Positive codes are in order.
    assert!((0..0x7E).all(|byte| f8_e4m3_to_f32(byte) < f8_e4m3_to_f32(byte + 1)));
}

#[test]
fn e5m2_has_infinities() {
    assert_eq!(f8_e5m2_to_f32(0x3C), 1.0);
    assert_eq!(f8_e5m2_to_f32(0x7B), 57344.0);
    assert_eq!(f8_e5m2_to_f32(0x7C), f32::INFINITY);
    assert_eq!(f8_e5m2_to_f32(0xFC), f32::NEG_INFINITY);
    assert!(f8_e5m2_to_f32(0x7D).is_nan());
}

#[test]
fn fp8_blocks_with_partial_edges() {
    let (rows, cols) = (3, 5);
    let weights = [0x38; 15];
    let scales = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    let mut out = [0.0; 15];
    dequantize_fp8_block(&weights, &scales, rows, cols, 2, 2, &mut out).unwrap();
    assert_eq!(out, [1.0, 1.0, 2.0, 2.0, 3.0, 1.0, 1.0, 2.0, 2.0, 3.0, 4.0, 4.0, 5.0, 5.0, 6.0]);
    let wrong = dequantize_fp8_block(&weights, &scales[..5], rows, cols, 2, 2, &mut out).unwrap_err();
    assert_eq!(wrong.to_string(), "f8_e4m3: scales: expected 6, found 5; pass whole blocks");
    assert!(dequantize_fp8_block(&weights, &scales, usize::MAX, 2, 2, 2, &mut out).is_err());
    dequantize_fp8_block(&[], &[], 0, 0, 128, 128, &mut []).unwrap();
}

#[test]
fn wrong_lengths_and_types_are_errors() {
    let message = dequantize(DType::Q4_0, &[0; 18], &mut [0.0; 31]).unwrap_err().to_string();
    assert_eq!(message, "q4_0: values: expected 32, found 31; pass whole blocks");
    assert!(dequantize(DType::Q4_0, &[0; 17], &mut [0.0; 32]).is_err());
    assert!(dequantize(DType::I64, &[0; 8], &mut [0.0; 1]).is_err());
    assert!(decode_groups(DType::F32, &[0; 4], &mut [0], &mut [0.0], &mut [0.0]).is_err());
    assert!(decode_groups(DType::Q8_0, &[0; 34], &mut [0; 32], &mut [0.0; 1], &mut []).is_err());
    assert!(quantize(DType::Q8_0, &[0.0; 33], &mut [0; 34]).is_err());
    assert!(quantize(DType::Q6_K, &[0.0; 256], &mut [0; 210]).is_err());
}

proptest! {
    #[test]
    fn groups_recombine_to_the_values(bytes in proptest::collection::vec(any::<u8>(), 210)) {
        for dtype in BLOCK_TYPES {
            let block = &bytes[..dtype.block_bytes()];
            let (len, groups) = (dtype.block_len(), dtype.block_len() / dtype.group_len());
            let (mut codes, mut scales, mut mins) = (vec![0; len], vec![0.0; groups], vec![0.0; groups]);
            decode_groups(dtype, block, &mut codes, &mut scales, &mut mins).unwrap();
            let values = decode(dtype, block);
            for (place, value) in values.iter().enumerate() {
                let group = place / dtype.group_len();
                let recombined = scales[group] * f32::from(codes[place]) + mins[group];
                prop_assert!(recombined.to_bits() == value.to_bits() || recombined.is_nan() && value.is_nan());
            }
        }
    }

    #[test]
    fn quantised_values_come_back_within_half_a_step(values in proptest::collection::vec(-8.0f32..8.0, 64)) {
        // Half a step of the largest magnitude, and the rounding of the scale to f16; Q4_0 clips its positive end.
        for (dtype, steps) in [(DType::Q8_0, 127.0), (DType::Q4_1, 7.5), (DType::Q4_0, 4.0)] {
            let back = decode(dtype, &encode(dtype, &values));
            for (block, back) in values.chunks(32).zip(back.chunks(32)) {
                let largest = block.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
                for (value, back) in block.iter().zip(back) {
                    prop_assert!((value - back).abs() <= largest * (0.5 / steps + 0.002) + 1e-6, "{dtype} {value} {back}");
                }
            }
        }
    }

    #[test]
    fn halves_round_trip(bits in proptest::collection::vec(any::<u16>(), 0..300)) {
        let bytes: Vec<u8> = bits.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        for dtype in [DType::F16, DType::BF16] {
            let values = decode(dtype, &bytes);
            for ((stored, value), back) in bits.iter().zip(&values).zip(encode(dtype, &values).chunks(2)) {
                prop_assert!(value.is_nan() || back == stored.to_le_bytes());
            }
        }
    }
}
