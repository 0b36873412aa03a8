//! Rows: embed, gather rows, norm, rope, glu, binary, unary, cast, copy, softmax.

use half::{bf16, f16};
use qwen_hal::OpDesc;
use qwen_hal::TensorDesc;
use qwen_hal::abi::ops::*;

use super::gemm::{TYPES, Weight};
use super::{Build, T, by_rows, f, i, ints, n, reals, wide};
use crate::case::Case;
use crate::execute::{Expected, Operand, bytes_of};
use crate::limits::{CAST, ELEMENTWISE, EXACT, FLOAT, ROPE};
use crate::oracle;
use crate::random::Random;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = lookups();
    cases.extend(norms());
    cases.extend(ropes());
    cases.extend(elementwise());
    cases.extend(casts());
    cases
}

fn lookups() -> Vec<Case> {
    let mut cases = Vec::new();
    // Outside of the table: a row of zeros.
    let ids = [3, 19, -1, 20, 0, i32::MAX, i32::MIN];
    let rows = ids.len() as i64;
    let pick = |table: &[f32], width: usize| -> Vec<f32> {
        let row = |id: &i32| match usize::try_from(*id).ok().filter(|id| *id < 20) {
            Some(id) => table[id * width..][..width].to_vec(),
            None => vec![0.0; width],
        };
        ids.iter().flat_map(row).collect()
    };
    for (dtype, name) in TYPES {
        let width = 256;
        let table = Weight::new(&mut Random::new(u64::from(dtype)), dtype, 20 * width);
        let build = Build::new(OpDesc::new(QHAL_OP_EMBED))
            .input(i(&[T]), ints(&ids))
            .input(TensorDesc::new(dtype, &[n(20), n(width)]), Operand::Bytes(table.bytes.clone()))
            .output(f(&[T, n(width)]));
        // A type's value may be formed by one multiplication and one addition, fused or not.
        let expected = vec![Expected::Real(wide(&pick(&table.values, width)))];
        cases.push(by_rows(build.case(1, format!("embed/{name}"), &[rows], expected, ELEMENTWISE)));
    }
    let x = Random::new(5).f32s(20 * 24);
    let build = Build::new(OpDesc::new(QHAL_OP_GATHER_ROWS))
        .input(f(&[n(20), n(24)]), reals(&x))
        .input(i(&[T]), ints(&ids))
        .output(f(&[T, n(24)]));
    let expected = vec![Expected::Exact(bytes_of(&pick(&x, 24)))];
    cases.push(build.case(1, "gather_rows/f32", &[rows], expected, EXACT));
    cases
}

fn norms() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut random = Random::new(11);
    for (cols, axis, dtype, name) in [
        (896, 896, QHAL_DTYPE_F32, "row_f32"),
        (130, 130, QHAL_DTYPE_F32, "row_of_130"),
        (64, 64, QHAL_DTYPE_F16, "row_f16"),
        (64, 64, QHAL_DTYPE_BF16, "row_bf16"),
        (96, 16, QHAL_DTYPE_F32, "heads"),
    ] {
        let x = random.f32s(7 * cols);
        let w = Weight::new(&mut random, dtype, axis);
        let eps = 1e-5;
        let build = Build::new(OpDesc::new(QHAL_OP_NORM))
            .int(QHAL_ATTR_AXIS, axis)
            .real(QHAL_ATTR_EPS, eps)
            .input(f(&[T, n(cols)]), reals(&x))
            .input(TensorDesc::new(dtype, &[n(axis)]), Operand::Bytes(w.bytes.clone()))
            .output(f(&[T, n(cols)]));
        let expected = vec![Expected::Real(oracle::rms_norm(&wide(&x), &wide(&w.values), eps))];
        cases.push(by_rows(build.case(1, format!("norm/{name}"), &[7], expected, FLOAT)));
    }
    // Columns of a wider matrix, and values so small that epsilon counts.
    let (x, w) = (random.f32s(6 * 48).iter().map(|v| v * 1e-3).collect::<Vec<_>>(), random.f32s(32));
    let build = Build::new(OpDesc::new(QHAL_OP_NORM))
        .int(QHAL_ATTR_AXIS, 32)
        .real(QHAL_ATTR_EPS, 1e-6)
        .input(f(&[T, n(32)]).with_row_stride(48), reals(&x[..5 * 48 + 32]))
        .input(f(&[n(32)]), reals(&w))
        .output(f(&[T, n(32)]));
    let narrow: Vec<f64> = x.chunks(48).flat_map(|row| wide(&row[..32])).collect();
    let expected = vec![Expected::Real(oracle::rms_norm(&narrow, &wide(&w), 1e-6))];
    cases.push(by_rows(build.case(1, "norm/strided", &[6], expected, FLOAT)));
    cases
}

fn ropes() -> Vec<Case> {
    let mut cases = Vec::new();
    let positions = [0, 1, 5, 77, 1000];
    for (style, style_name) in [(QHAL_ROPE_HALF, "half"), (QHAL_ROPE_INTERLEAVED, "interleaved")] {
        for (head_dim, offset, dim, name) in [(64, 0, 64, "whole"), (48, 16, 32, "partial")] {
            let heads = 3;
            let cols = heads * head_dim;
            let x = Random::new(21).f32s(positions.len() * cols);
            let inv_freq: Vec<f32> = (0..dim / 2).map(|i| 10000_f32.powf(-2.0 * i as f32 / dim as f32)).collect();
            let mut expected = wide(&x);
            let args = oracle::Rope { head_dim, offset, interleaved: style == QHAL_ROPE_INTERLEAVED, factor: 1.25 };
            for (row, position) in expected.chunks_mut(cols).zip(positions) {
                oracle::rope(row, position, &inv_freq, args);
            }
            let build = Build::new(OpDesc::new(QHAL_OP_ROPE))
                .int(QHAL_ATTR_NUM_HEADS, heads)
                .int(QHAL_ATTR_HEAD_DIM, head_dim)
                .int(QHAL_ATTR_ROTARY_OFFSET, offset)
                .int(QHAL_ATTR_ROTARY_DIM, dim)
                .code(QHAL_ATTR_STYLE, style)
                .real(QHAL_ATTR_ATTENTION_FACTOR, 1.25)
                .input(f(&[T, n(cols)]), reals(&x))
                .input(i(&[T]), ints(&positions))
                .input(f(&[n(dim / 2)]), reals(&inv_freq))
                .output(f(&[T, n(cols)]));
            let expected = vec![Expected::Real(expected)];
            cases.push(by_rows(build.case(1, format!("rope/{style_name}_{name}"), &[5], expected, ROPE)));
        }
    }
    cases
}

fn elementwise() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut random = Random::new(31);
    let (rows, cols) = (7_usize, 50_usize);
    // Some large ones, where functions saturate.
    let mut values = || -> Vec<f32> {
        let mut values = random.f32s(rows * cols);
        values.iter_mut().step_by(5).for_each(|value| *value *= 40.0);
        values
    };
    let (a, b) = (values(), values());
    let matrix = f(&[T, n(cols)]);
    type Function = fn(f64) -> f64;
    let functions: [(i64, &str, Function); 3] = [
        (QHAL_ACT_SILU, "silu", oracle::silu),
        (QHAL_ACT_GELU_TANH, "gelu_tanh", oracle::gelu),
        (QHAL_UNARY_SIGMOID, "sigmoid", oracle::sigmoid),
    ];
    for (code, name, function) in functions {
        let build = Build::new(OpDesc::new(QHAL_OP_UNARY)).code(QHAL_ATTR_FUNCTION, code);
        let build = build.input(matrix, reals(&a)).output(matrix);
        let expected = wide(&a).into_iter().map(function).collect();
        cases.push(by_rows(build.case(1, format!("unary/{name}"), &[7], vec![Expected::Real(expected)], ELEMENTWISE)));
        if code != QHAL_UNARY_SIGMOID {
            let build = Build::new(OpDesc::new(QHAL_OP_GLU)).code(QHAL_ATTR_FUNCTION, code);
            let build = build.input(matrix, reals(&a)).input(matrix, reals(&b)).output(matrix);
            let expected = wide(&a).into_iter().zip(wide(&b)).map(|(a, b)| function(a) * b).collect();
            let expected = vec![Expected::Real(expected)];
            cases.push(by_rows(build.case(1, format!("glu/{name}"), &[7], expected, ELEMENTWISE)));
        }
    }
    for (code, name) in [(QHAL_BINARY_ADD, "add"), (QHAL_BINARY_MUL, "mul")] {
        for broadcast in [false, true] {
            let other: Vec<f32> = if broadcast { b[..rows].to_vec() } else { b.clone() };
            let apply = |(at, a): (usize, &f32)| {
                let b = other[if broadcast { at / cols } else { at }];
                if code == QHAL_BINARY_ADD { a + b } else { a * b }
            };
            let expected: Vec<f32> = a.iter().enumerate().map(apply).collect();
            let build = Build::new(OpDesc::new(QHAL_OP_BINARY))
                .code(QHAL_ATTR_FUNCTION, code)
                .int(QHAL_ATTR_BROADCAST, usize::from(broadcast))
                .input(matrix, reals(&a))
                .input(f(&[T, n(if broadcast { 1 } else { cols })]), reals(&other))
                .output(matrix);
            let name = format!("binary/{name}{}", if broadcast { "_broadcast" } else { "" });
            let expected = vec![Expected::Real(wide(&expected))];
            cases.push(by_rows(build.case(1, name, &[7], expected, ELEMENTWISE)));
        }
    }
    let build = Build::new(OpDesc::new(QHAL_OP_SOFTMAX)).input(matrix, reals(&a)).output(matrix);
    let expected = wide(&a).chunks(cols).flat_map(oracle::softmax).collect();
    cases.push(by_rows(build.case(1, "softmax/rows", &[7], vec![Expected::Real(expected)], ELEMENTWISE)));
    // A column range of a wider matrix becomes dense.
    let build = Build::new(OpDesc::new(QHAL_OP_COPY))
        .input(f(&[T, n(30)]).with_row_stride(cols as i64), reals(&a[..(rows - 1) * cols + 30]))
        .output(f(&[T, n(30)]));
    let expected: Vec<f32> = a.chunks(cols).flat_map(|row| row[..30].to_vec()).collect();
    cases.push(by_rows(build.case(1, "copy/strided", &[7], vec![Expected::Exact(bytes_of(&expected))], EXACT)));
    cases
}

fn casts() -> Vec<Case> {
    let cols = 40;
    let mut x = Random::new(41).f32s(5 * cols);
    // Halves between two neighbours go to the even one.
    x[..4].copy_from_slice(&[1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 1.0 + 1.0 / 2048.0, 1.0 + 3.0 / 2048.0]);
    let to_f16: Vec<u8> = x.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect();
    let to_bf16: Vec<u8> = x.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
    let mut cases = Vec::new();
    for (dtype, name, bytes) in [(QHAL_DTYPE_F16, "f16", &to_f16), (QHAL_DTYPE_BF16, "bf16", &to_bf16)] {
        let half = TensorDesc::new(dtype, &[T, n(cols)]);
        let back: Vec<f32> =
            bytes
                .chunks_exact(2)
                .map(|b| u16::from_le_bytes([b[0], b[1]]))
                .map(|bits| {
                    if dtype == QHAL_DTYPE_F16 { f16::from_bits(bits).to_f32() } else { bf16::from_bits(bits).to_f32() }
                })
                .collect();
        let down = Build::new(OpDesc::new(QHAL_OP_CAST)).input(f(&[T, n(cols)]), reals(&x)).output(half);
        let expected = vec![Expected::Exact(bytes.clone())];
        cases.push(by_rows(down.case(1, format!("cast/f32_to_{name}"), &[5], expected, CAST)));
        let up =
            Build::new(OpDesc::new(QHAL_OP_CAST)).input(half, Operand::Bytes(bytes.clone())).output(f(&[T, n(cols)]));
        let expected = vec![Expected::Exact(bytes_of(&back))];
        cases.push(by_rows(up.case(1, format!("cast/{name}_to_f32"), &[5], expected, CAST)));
    }
    cases
}
