//! Products: every weight type, every form of the products, segments, biases, epilogues.

use half::{bf16, f16};
use qwen_formats::{DType, blocks};
use qwen_hal::abi::ops::*;
use qwen_hal::{OpDesc, TensorDesc};

use super::{Build, T, by_rows, f, n, reals, wide};
use crate::case::{Body, Case};
use crate::execute::{Expected, Operand};
use crate::limits::{FLOAT, product};
use crate::oracle;
use crate::random::Random;

/// Weight types and their names.
pub(super) const TYPES: [(u32, &str); 17] = [
    (QHAL_DTYPE_F32, "f32"),
    (QHAL_DTYPE_F16, "f16"),
    (QHAL_DTYPE_BF16, "bf16"),
    (QHAL_DTYPE_F8_E4M3, "f8_e4m3"),
    (QHAL_DTYPE_F8_E5M2, "f8_e5m2"),
    (2, "q4_0"),
    (3, "q4_1"),
    (6, "q5_0"),
    (7, "q5_1"),
    (8, "q8_0"),
    (10, "q2_k"),
    (11, "q3_k"),
    (12, "q4_k"),
    (13, "q5_k"),
    (14, "q6_k"),
    (20, "iq4_nl"),
    (23, "iq4_xs"),
];

/// Where the f16 fields of a block lie. Everything else in a block may be any bits.
const fn half_fields(dtype: u32) -> &'static [usize] {
    match dtype {
        2 | 6 | 8 | 20 | 23 => &[0],
        3 | 7 | 12 | 13 => &[0, 2],
        10 => &[80, 82],
        11 => &[108],
        14 => &[208],
        _ => &[],
    }
}

/// Random values of a type: their bytes and what they mean.
pub(super) struct Weight {
    pub(super) bytes: Vec<u8>,
    pub(super) values: Vec<f32>,
}

impl Weight {
    /// `count` values, whole blocks.
    pub(super) fn new(random: &mut Random, dtype: u32, count: usize) -> Self {
        let (block_len, block_bytes) = dtype_block(dtype).unwrap_or((1, 4));
        let blocks = count / block_len as usize;
        let bytes: Vec<u8> = match dtype {
            QHAL_DTYPE_F32 => random.f32s(count).iter().flat_map(|x| x.to_le_bytes()).collect(),
            QHAL_DTYPE_F16 => random.f32s(count).iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
            QHAL_DTYPE_BF16 => random.f32s(count).iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
            // Below 2, so that no NaN and no infinity is among them.
            QHAL_DTYPE_F8_E4M3 | QHAL_DTYPE_F8_E5M2 => random.bytes(count).iter().map(|byte| byte & 0xbf).collect(),
            _ => {
                let mut bytes = random.bytes(blocks * block_bytes as usize);
                for block in bytes.chunks_mut(block_bytes as usize) {
                    for field in half_fields(dtype) {
                        // 0.004 to 0.008.
                        let scale = 0x1c00 + (random.next() & 0x3ff) as u16;
                        block[*field..][..2].copy_from_slice(&scale.to_le_bytes());
                    }
                }
                bytes
            }
        };
        let mut values = vec![0.0; count];
        if let Some(dtype) = DType::from_code(dtype) {
            // Whole blocks of a known type decode.
            let _ = blocks::dequantize(dtype, &bytes, &mut values);
        }
        Self { bytes, values }
    }
}

fn gemm(compute: u32) -> OpDesc {
    OpDesc::new(QHAL_OP_GEMM).compute(compute)
}

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (dtype, name) in TYPES {
        let quantised = half_fields(dtype).len() > usize::from(dtype <= 1);
        for (compute, form) in [
            (QHAL_COMPUTE_F32, "f32"),
            (QHAL_COMPUTE_BF16, "bf16"),
            (QHAL_COMPUTE_I8_G32, "i8_g32"),
            (QHAL_COMPUTE_I8_G16, "i8_g16"),
            (QHAL_COMPUTE_I8X2_G32, "i8x2_g32"),
            (QHAL_COMPUTE_I8S_G32, "i8s_g32"),
        ] {
            // Rounded activations are a matter of quantised weights, bfloat16 ones of plain weights.
            let fits = match compute {
                QHAL_COMPUTE_F32 => true,
                QHAL_COMPUTE_BF16 => dtype == QHAL_DTYPE_BF16,
                _ => quantised,
            };
            if fits {
                cases.push(plain(dtype, compute, &format!("gemm/{name}.{form}"), (9, 48, 512)));
            }
        }
    }
    // Sizes around tiles, and one row as in decoding.
    for (rows, outputs, inputs) in [(1, 48, 256), (2, 1, 32), (8, 17, 96), (9, 130, 64), (3, 64, 1056)] {
        let name = format!("gemm/q8_0.f32.{rows}x{outputs}x{inputs}");
        cases.push(plain(8, QHAL_COMPUTE_F32, &name, (rows, outputs, inputs)));
        let name = format!("gemm/f32.f32.{rows}x{outputs}x{inputs}");
        cases.push(plain(QHAL_DTYPE_F32, QHAL_COMPUTE_F32, &name, (rows, outputs, inputs)));
    }
    cases.push(segments_and_bias());
    cases.push(with_glu());
    cases.push(with_addend());
    cases.push(with_block_scales());
    for (dtype, compute, form) in [(8, QHAL_COMPUTE_F32, "q8_0.f32"), (2, QHAL_COMPUTE_I8_G32, "q4_0.i8_g32")] {
        for rows in [1, 9] {
            let name = format!("variants/{form}.{rows}");
            cases.push(variants(plain(dtype, compute, &name, (rows, 40, 1056))));
        }
    }
    cases
}

/// The case as one of variants.
fn variants(case: Case) -> Case {
    let body = match case.body {
        Body::Op(op) => Body::Variants(op),
        other => other,
    };
    Case { body, ..case }
}

fn plain(dtype: u32, compute: u32, name: &str, (rows, outputs, inputs): (usize, usize, usize)) -> Case {
    let mut random = Random::new(u64::from(dtype) * 10 + u64::from(compute));
    let x = random.f32s(rows * inputs);
    let w = Weight::new(&mut random, dtype, outputs * inputs);
    let build = Build::new(gemm(compute))
        .input(f(&[T, n(inputs)]), reals(&x))
        .input(TensorDesc::new(dtype, &[n(outputs), n(inputs)]), Operand::Bytes(w.bytes.clone()))
        .output(f(&[T, n(outputs)]));
    let expected = vec![Expected::Real(oracle::product(&wide(&x), &wide(&w.values), inputs))];
    by_rows(build.case(1, name, &[rows as i64], expected, product(compute)))
}

/// Queries, keys and values of one input: three weights of three types, biases on two of them.
fn segments_and_bias() -> Case {
    let mut random = Random::new(71);
    let (rows, k) = (6, 256);
    let x = random.f32s(rows * k);
    let parts = [(QHAL_DTYPE_F16, 32), (8_u32, 16), (12_u32, 16)];
    let weights = parts.map(|(dtype, outputs)| Weight::new(&mut random, dtype, outputs * k));
    let (first, third) = (random.f32s(32), random.f32s(16));
    let mut build = Build::new(gemm(QHAL_COMPUTE_F32))
        .int(QHAL_ATTR_SEGMENTS, 3)
        .int(QHAL_ATTR_HAS_BIAS, 1)
        .code(QHAL_ATTR_GEMM_TYPE, QHAL_GEMM_FUSED_QKV)
        .input(f(&[T, n(k)]), reals(&x));
    for ((dtype, outputs), weight) in parts.iter().zip(&weights) {
        build = build.input(TensorDesc::new(*dtype, &[n(*outputs), n(k)]), Operand::Bytes(weight.bytes.clone()));
    }
    let build = build.input(f(&[n(32)]), reals(&first)).absent().input(f(&[n(16)]), reals(&third));
    let products = weights.map(|weight| oracle::product(&wide(&x), &wide(&weight.values), k));
    let mut expected = Vec::new();
    for row in 0..rows {
        for ((part, (_, outputs)), bias) in products.iter().zip(parts).zip([Some(&first), None, Some(&third)]) {
            let values = part[row * outputs..][..outputs].iter().enumerate();
            expected.extend(values.map(|(at, y)| y + bias.map_or(0.0, |bias| f64::from(bias[at]))));
        }
    }
    let build = build.output(f(&[T, n(64)]));
    by_rows(build.case(1, "gemm/segments_and_bias", &[rows as i64], vec![Expected::Real(expected)], FLOAT))
}

fn with_glu() -> Case {
    let mut random = Random::new(72);
    let (rows, k, outputs) = (5, 256, 24);
    let x = random.f32s(rows * k);
    let [gate, up] = [8, 8].map(|dtype| Weight::new(&mut random, dtype, outputs * k));
    let tensor = TensorDesc::new(8, &[n(outputs), n(k)]);
    let op = gemm(QHAL_COMPUTE_F32).epilogue(QHAL_EPILOGUE_GLU, None, QHAL_ACT_SILU as u32);
    let build = Build::new(op)
        .int(QHAL_ATTR_SEGMENTS, 2)
        .code(QHAL_ATTR_GEMM_TYPE, QHAL_GEMM_FUSED_GATE_UP)
        .input(f(&[T, n(k)]), reals(&x))
        .input(tensor, Operand::Bytes(gate.bytes.clone()))
        .input(tensor, Operand::Bytes(up.bytes.clone()))
        .output(f(&[T, n(outputs)]));
    let y = [gate, up].map(|weight| oracle::product(&wide(&x), &wide(&weight.values), k));
    let expected = y[0].iter().zip(&y[1]).map(|(gate, up)| oracle::silu(*gate) * up).collect();
    by_rows(build.case(1, "gemm/glu_epilogue", &[rows as i64], vec![Expected::Real(expected)], FLOAT))
}

fn with_addend() -> Case {
    let mut random = Random::new(73);
    let (rows, k, outputs) = (5, 256, 40);
    let (x, addend) = (random.f32s(rows * k), random.f32s(rows * outputs));
    let w = Weight::new(&mut random, 14, outputs * k);
    let op = gemm(QHAL_COMPUTE_F32).epilogue(QHAL_EPILOGUE_ADD, Some(2), 0);
    let build = Build::new(op)
        .input(f(&[T, n(k)]), reals(&x))
        .input(TensorDesc::new(14, &[n(outputs), n(k)]), Operand::Bytes(w.bytes.clone()))
        .input(f(&[T, n(outputs)]), reals(&addend))
        .output(f(&[T, n(outputs)]));
    let y = oracle::product(&wide(&x), &wide(&w.values), k);
    let expected = y.iter().zip(&addend).map(|(y, addend)| y + f64::from(*addend)).collect();
    by_rows(build.case(1, "gemm/add_epilogue", &[rows as i64], vec![Expected::Real(expected)], FLOAT))
}

/// float8 weights with a scale per block of 16 rows and 32 columns, as DeepSeek-V3 has them for 128 and 128.
fn with_block_scales() -> Case {
    let mut random = Random::new(74);
    let (rows, k, outputs) = (5, 96, 40);
    let x = random.f32s(rows * k);
    let w = Weight::new(&mut random, QHAL_DTYPE_F8_E4M3, outputs * k);
    let across = k.div_ceil(32);
    let scales: Vec<f32> = random.f32s(outputs.div_ceil(16) * across).iter().map(|s| s.abs() + 0.1).collect();
    let build = Build::new(gemm(QHAL_COMPUTE_F32))
        .input(f(&[T, n(k)]), reals(&x))
        .input(
            TensorDesc::new(QHAL_DTYPE_F8_E4M3, &[n(outputs), n(k)]).with_block_scale(16, 32),
            Operand::Bytes(w.bytes.clone()),
        )
        .input(f(&[n(outputs.div_ceil(16)), n(across)]), reals(&scales))
        .output(f(&[T, n(outputs)]));
    let scaled = w
        .values
        .iter()
        .enumerate()
        .map(|(at, value)| f64::from(*value) * f64::from(scales[at / k / 16 * across + at % k / 32]));
    let expected = oracle::product(&wide(&x), &scaled.collect::<Vec<_>>(), k);
    by_rows(build.case(1, "gemm/f8_e4m3_block_scales", &[rows as i64], vec![Expected::Real(expected)], FLOAT))
}
