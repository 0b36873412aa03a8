//! Every op kind once through the ABI, against plain f64 loops: that operands, attributes and sizes reach the kernels as the op
//! vocabulary says. Numerical depth is tested beside the kernels.

mod common;

use common::{Random, bytes_of, close, device, run, try_run, values_of};
use qwen_hal::abi::ops;
use qwen_hal::{Dim, LaunchError, OpDesc, PlanOptions, TensorDesc};

const T: Dim = Dim::symbol(0, 1, 9);
const I32: u32 = ops::QHAL_DTYPE_I32;

fn f32s(dims: &[Dim]) -> TensorDesc {
    TensorDesc::f32(dims)
}
fn i32s(dims: &[Dim]) -> TensorDesc {
    TensorDesc::new(I32, dims)
}
fn n(n: i64) -> Dim {
    Dim::Fixed(n)
}
fn some<T: Copy>(values: &[T]) -> Option<Vec<u8>> {
    Some(bytes_of(values))
}
fn floats(bytes: &[u8], count: usize) -> Vec<f32> {
    values_of(&bytes[..count * 4])
}
fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}
fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|v| f64::from(*v)).collect()
}

#[test]
fn embed_and_gather_rows() {
    let table = Random(1).f32s(20 * 32);
    let op = OpDesc::new(ops::QHAL_OP_EMBED).input(i32s(&[T])).input(f32s(&[n(20), n(32)])).output(f32s(&[T, n(32)]));
    let out = run(&op, &[some(&[3_i32, 19, -1, 20]), some(&table)], &[4]);
    let mut expected = [&table[96..128], &table[608..640], &[0.0; 64][..]].concat();
    assert_eq!(floats(&out[0], 128), expected);
    let op =
        OpDesc::new(ops::QHAL_OP_GATHER_ROWS).input(f32s(&[n(20), n(32)])).input(i32s(&[T])).output(f32s(&[T, n(32)]));
    let out = run(&op, &[some(&table), some(&[3_i32, 19, -1, 20])], &[4]);
    assert_eq!(floats(&out[0], 128), expected);
    // A quantised table.
    let q8: Vec<u8> =
        (0..20_u8).flat_map(|row| [0x00, 0x3c].into_iter().chain((0..32).map(move |i| row + i))).collect();
    let op = OpDesc::new(ops::QHAL_OP_EMBED)
        .input(i32s(&[T]))
        .input(TensorDesc::new(8, &[n(20), n(32)]))
        .output(f32s(&[T, n(32)]));
    let out = run(&op, &[some(&[7_i32]), Some(q8)], &[1]);
    expected = (7..39).map(|v| v as f32).collect();
    assert_eq!(floats(&out[0], 32), expected);
}

#[test]
fn norm_over_columns_of_a_wider_matrix() {
    // Two heads of 8 in a matrix of 24 columns, only the first 16 of which are normed.
    let (x, w) = (Random(2).f32s(3 * 24), Random(3).f32s(8));
    let narrow = f32s(&[n(3), n(16)]).with_row_stride(24);
    let op = OpDesc::new(ops::QHAL_OP_NORM)
        .attr_int(ops::QHAL_ATTR_AXIS, 8)
        .attr_real(ops::QHAL_ATTR_EPS, 1e-5)
        .input(narrow)
        .input(f32s(&[n(8)]))
        .output(f32s(&[n(3), n(16)]));
    let out = run(&op, &[some(&x), some(&w)], &[]);
    let mut expected = Vec::new();
    for row in 0..3 {
        for head in 0..2 {
            let group = wide(&x[row * 24 + head * 8..][..8]);
            let mean = group.iter().map(|v| v * v).sum::<f64>() / 8.0;
            expected.extend(group.iter().zip(&w).map(|(v, w)| v / (mean + 1e-5).sqrt() * f64::from(*w)));
        }
    }
    close(&floats(&out[0], 48), &expected, 1e-5, "norm");
}

#[test]
fn rope_in_both_styles() {
    let x = Random(4).f32s(2 * 16);
    let inv_freq = [1.0_f32, 0.1];
    for style in [ops::QHAL_ROPE_HALF, ops::QHAL_ROPE_INTERLEAVED] {
        let op = OpDesc::new(ops::QHAL_OP_ROPE)
            .attr_int(ops::QHAL_ATTR_NUM_HEADS, 2)
            .attr_int(ops::QHAL_ATTR_HEAD_DIM, 8)
            .attr_int(ops::QHAL_ATTR_ROTARY_OFFSET, 4)
            .attr_int(ops::QHAL_ATTR_ROTARY_DIM, 4)
            .attr_int(ops::QHAL_ATTR_STYLE, style)
            .attr_real(ops::QHAL_ATTR_ATTENTION_FACTOR, 1.5)
            .input(f32s(&[T, n(16)]))
            .input(i32s(&[T]))
            .input(f32s(&[n(2)]))
            .output(f32s(&[T, n(16)]));
        let out = run(&op, &[some(&x), some(&[5_i32, 1000]), some(&inv_freq)], &[2]);
        let mut expected = wide(&x);
        for (row, position) in [(0, 5.0), (1, 1000.0)] {
            for head in 0..2 {
                for (pair, freq) in inv_freq.iter().enumerate() {
                    let at = row * 16 + head * 8 + 4;
                    let (i, j) = if style == ops::QHAL_ROPE_HALF {
                        (at + pair, at + pair + 2)
                    } else {
                        (at + 2 * pair, at + 2 * pair + 1)
                    };
                    let angle = f64::from((position * f64::from(*freq)) as f32);
                    let (a, b) = (expected[i], expected[j]);
                    expected[i] = 1.5 * (a * angle.cos() - b * angle.sin());
                    expected[j] = 1.5 * (b * angle.cos() + a * angle.sin());
                }
            }
        }
        close(&floats(&out[0], 32), &expected, 1e-4, "rope");
    }
}

#[test]
fn element_wise_ops() {
    let (a, b) = (Random(5).f32s(3 * 20), Random(6).f32s(3 * 20));
    let matrix = f32s(&[T, n(20)]);
    let two = |kind, function| {
        let op =
            OpDesc::new(kind).attr_int(ops::QHAL_ATTR_FUNCTION, function).input(matrix).input(matrix).output(matrix);
        floats(&run(&op, &[some(&a), some(&b)], &[3])[0], 60)
    };
    let pairs = || a.iter().zip(&b).map(|(a, b)| (f64::from(*a), f64::from(*b)));
    let expected: Vec<f64> = pairs().map(|(a, b)| silu(a) * b).collect();
    close(&two(ops::QHAL_OP_GLU, ops::QHAL_ACT_SILU), &expected, 1e-5, "glu");
    let expected: Vec<f64> = pairs().map(|(a, b)| a + b).collect();
    close(&two(ops::QHAL_OP_BINARY, ops::QHAL_BINARY_ADD), &expected, 1e-6, "add");
    let op = OpDesc::new(ops::QHAL_OP_BINARY)
        .attr_int(ops::QHAL_ATTR_FUNCTION, ops::QHAL_BINARY_MUL)
        .attr_int(ops::QHAL_ATTR_BROADCAST, 1)
        .input(matrix)
        .input(f32s(&[T, n(1)]))
        .output(matrix);
    let out = run(&op, &[some(&a), some(&b[..3])], &[3]);
    let expected: Vec<f64> = a.iter().enumerate().map(|(i, a)| f64::from(*a) * f64::from(b[i / 20])).collect();
    close(&floats(&out[0], 60), &expected, 1e-6, "mul");
    let op = OpDesc::new(ops::QHAL_OP_UNARY)
        .attr_int(ops::QHAL_ATTR_FUNCTION, ops::QHAL_UNARY_SIGMOID)
        .input(matrix)
        .output(matrix);
    let expected: Vec<f64> = a.iter().map(|a| 1.0 / (1.0 + (-f64::from(*a)).exp())).collect();
    close(&floats(&run(&op, &[some(&a)], &[3])[0], 60), &expected, 1e-5, "sigmoid");
    let op = OpDesc::new(ops::QHAL_OP_COPY).input(matrix).output(matrix);
    assert_eq!(floats(&run(&op, &[some(&a)], &[3])[0], 60), a);
    let op = OpDesc::new(ops::QHAL_OP_SOFTMAX).input(matrix).output(matrix);
    let expected: Vec<f64> = a
        .chunks(20)
        .flat_map(|row| {
            let sum: f64 = row.iter().map(|v| f64::from(*v).exp()).sum();
            row.iter().map(move |v| f64::from(*v).exp() / sum)
        })
        .collect();
    close(&floats(&run(&op, &[some(&a)], &[3])[0], 60), &expected, 1e-6, "softmax");
}

#[test]
fn cast_rounds_to_nearest_even() {
    let x = [1.0_f32, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -2.5];
    let op = OpDesc::new(ops::QHAL_OP_CAST)
        .input(f32s(&[n(1), n(4)]))
        .output(TensorDesc::new(ops::QHAL_DTYPE_BF16, &[n(1), n(4)]));
    let out: Vec<u16> = values_of(&run(&op, &[some(&x)], &[])[0]);
    assert_eq!(out, [0x3f80, 0x3f80, 0x3f82, 0xc020]);
    let op = OpDesc::new(ops::QHAL_OP_CAST)
        .input(TensorDesc::new(ops::QHAL_DTYPE_BF16, &[n(1), n(4)]))
        .output(f32s(&[n(1), n(4)]));
    assert_eq!(floats(&run(&op, &[some(&out)], &[])[0], 4), [1.0, 1.0, 1.015_625, -2.5]);
}

/// x W^T for row-major operands.
fn product(x: &[f64], w: &[f64], k: usize) -> Vec<f64> {
    let row = |x: &[f64]| -> Vec<f64> { w.chunks(k).map(|w| x.iter().zip(w).map(|(x, w)| x * w).sum()).collect() };
    x.chunks(k).flat_map(row).collect()
}

#[test]
fn gemm_with_segments_bias_and_addend() {
    let (k, rows) = (32, 5);
    let mut random = Random(7);
    let (x, w0, w1) = (random.f32s(rows * k), random.f32s(24 * k), random.f32s(8 * k));
    let (bias, addend) = (random.f32s(8), random.f32s(rows * 32));
    let op = OpDesc::new(ops::QHAL_OP_GEMM)
        .attr_int(ops::QHAL_ATTR_SEGMENTS, 2)
        .attr_int(ops::QHAL_ATTR_HAS_BIAS, 1)
        .input(f32s(&[T, n(32)]))
        .input(f32s(&[n(24), n(32)]))
        .input(f32s(&[n(8), n(32)]))
        .input(TensorDesc::none())
        .input(f32s(&[n(8)]))
        .input(f32s(&[T, n(32)]))
        .epilogue(ops::QHAL_EPILOGUE_ADD, Some(5), 0)
        .output(f32s(&[T, n(32)]));
    let inputs = [some(&x), some(&w0), some(&w1), None, some(&bias), some(&addend)];
    let out = run(&op, &inputs, &[rows as i64]);
    let (y0, y1) = (product(&wide(&x), &wide(&w0), k), product(&wide(&x), &wide(&w1), k));
    let mut expected = Vec::new();
    for row in 0..rows {
        let y1 = y1[row * 8..][..8].iter().zip(&bias).map(|(y, b)| y + f64::from(*b));
        let y = y0[row * 24..][..24].iter().copied().chain(y1);
        expected.extend(y.zip(&addend[row * 32..]).map(|(y, a)| y + f64::from(*a)));
    }
    close(&floats(&out[0], rows * 32), &expected, 1e-5, "gemm");
}

/// Q8_0 rows with scale 1/64 and the codes that they hold.
fn q8_0(random: &mut Random, values: usize) -> (Vec<u8>, Vec<f64>) {
    let (mut bytes, mut exact) = (Vec::new(), Vec::new());
    for _ in 0..values / 32 {
        bytes.extend([0x00, 0x24]);
        for _ in 0..32 {
            let code = random.below(255) as i64 - 127;
            bytes.push(code as i8 as u8);
            exact.push(code as f64 / 64.0);
        }
    }
    (bytes, exact)
}

#[test]
fn gemm_with_packed_weights_and_gate() {
    let (k, rows, width) = (64, 4, 16);
    let mut random = Random(8);
    let x = random.f32s(rows * k);
    let ((gate, gate_exact), (up, up_exact)) = (q8_0(&mut random, width * k), q8_0(&mut random, width * k));
    let weight = TensorDesc::new(8, &[n(16), n(64)]);
    let op = OpDesc::new(ops::QHAL_OP_GEMM)
        .attr_int(ops::QHAL_ATTR_SEGMENTS, 2)
        .input(f32s(&[T, n(64)]))
        .input(weight)
        .input(weight)
        .epilogue(ops::QHAL_EPILOGUE_GLU, None, ops::QHAL_ACT_SILU as u32)
        .output(f32s(&[T, n(16)]));
    let plan = device().plan(&op, &PlanOptions::default()).unwrap();
    assert!(plan.info().packed_bytes[1] > 0 && plan.info().kernel.starts_with("gemm.q8_0."), "{:?}", plan.info());
    let out = run(&op, &[some(&x), Some(gate), Some(up)], &[rows as i64]);
    let (y0, y1) = (product(&wide(&x), &gate_exact, k), product(&wide(&x), &up_exact, k));
    let expected: Vec<f64> = y0.iter().zip(&y1).map(|(g, u)| silu(*g) * u).collect();
    close(&floats(&out[0], rows * width), &expected, 1e-4, "gate");
}

#[test]
fn gemm_with_block_scales() {
    let (k, rows) = (32, 3);
    let mut random = Random(9);
    let (x, scales) = (random.f32s(rows * k), [0.5_f32, 2.0, 1.0, 4.0]);
    // 1.0 is 0x38 in E4M3, 2.0 is 0x40.
    let codes: Vec<u8> = (0..16 * k).map(|i| if i % 3 == 0 { 0x40 } else { 0x38 }).collect();
    let op = OpDesc::new(ops::QHAL_OP_GEMM)
        .input(f32s(&[T, n(32)]))
        .input(TensorDesc::new(ops::QHAL_DTYPE_F8_E4M3, &[n(16), n(32)]).with_block_scale(8, 16))
        .input(f32s(&[n(2), n(2)]))
        .output(f32s(&[T, n(16)]));
    let out = run(&op, &[some(&x), Some(codes), some(&scales)], &[rows as i64]);
    let w: Vec<f64> = (0..16 * k)
        .map(|i| (if i % 3 == 0 { 2.0 } else { 1.0 }) * f64::from(scales[i / k / 8 * 2 + i % k / 16]))
        .collect();
    close(&floats(&out[0], rows * 16), &product(&wide(&x), &w, k), 1e-5, "block scales");
}

#[test]
fn experts_from_routing_to_their_sum() {
    let (tokens, experts, top_k, k, width) = (5_usize, 4_usize, 2_usize, 32_usize, 16_usize);
    let mut random = Random(10);
    let (logits, x) = (random.f32s(tokens * experts), random.f32s(tokens * k));
    let (w, addend) = (random.f32s(experts * width * k), random.f32s(tokens * width));
    let pairs = [T, n(2)];
    let op = OpDesc::new(ops::QHAL_OP_ROUTE)
        .attr_int(ops::QHAL_ATTR_SCORE, ops::QHAL_SCORE_SOFTMAX)
        .attr_int(ops::QHAL_ATTR_TOP_K, 2)
        .attr_int(ops::QHAL_ATTR_RENORMALISE, 1)
        .attr_real(ops::QHAL_ATTR_SCALE, 2.0)
        .input(f32s(&[T, n(4)]))
        .input(TensorDesc::none())
        .output(i32s(&pairs))
        .output(f32s(&pairs));
    let routed = run(&op, &[some(&logits), None], &[5]);
    let (ids, weights): (Vec<i32>, Vec<f32>) = (values_of(&routed[0][..40]), floats(&routed[1], 10));
    let mut expected_weights = Vec::new();
    for (row, ids) in logits.chunks(experts).zip(ids.chunks(top_k)) {
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
        assert_eq!(ids, [order[0] as i32, order[1] as i32]);
        let exp = |i: usize| f64::from(row[i]).exp();
        let sum = exp(order[0]) + exp(order[1]);
        expected_weights.extend(order[..2].iter().map(|i| 2.0 * exp(*i) / sum));
    }
    close(&weights, &expected_weights, 1e-5, "weights");

    let op = OpDesc::new(ops::QHAL_OP_DISPATCH)
        .attr_int(ops::QHAL_ATTR_NUM_EXPERTS, 4)
        .input(i32s(&pairs))
        .output(i32s(&[n(5)]))
        .output(i32s(&pairs))
        .output(i32s(&pairs));
    let sorted = run(&op, &[some(&ids)], &[5]);
    let (offsets, rows, slots): (Vec<i32>, Vec<i32>, Vec<i32>) =
        (values_of(&sorted[0]), values_of(&sorted[1][..40]), values_of(&sorted[2][..40]));

    let op = OpDesc::new(ops::QHAL_OP_GROUPED_GEMM)
        .input(f32s(&[T, n(32)]))
        .input(i32s(&[n(5)]))
        .input(i32s(&pairs))
        .input(f32s(&[n(4), n(16), n(32)]))
        .output(f32s(&[T, n(2), n(16)]));
    let out = run(&op, &[some(&x), some(&offsets), some(&rows), some(&w)], &[5]);
    let y = floats(&out[0], tokens * top_k * width);

    let op = OpDesc::new(ops::QHAL_OP_COMBINE)
        .input(f32s(&[T, n(2), n(16)]))
        .input(i32s(&pairs))
        .input(f32s(&pairs))
        .input(f32s(&[T, n(16)]))
        .output(f32s(&[T, n(16)]));
    let out = run(&op, &[some(&y), some(&slots), some(&weights), some(&addend)], &[5]);
    let mut expected = wide(&addend);
    for (pair, (id, weight)) in ids.iter().zip(&weights).enumerate() {
        let token = pair / top_k;
        let matrix = wide(&w[*id as usize * width * k..][..width * k]);
        let y = product(&wide(&x[token * k..][..k]), &matrix, k);
        for (sum, y) in expected[token * width..].iter_mut().zip(y) {
            *sum += f64::from(*weight) * y;
        }
    }
    close(&floats(&out[0], tokens * width), &expected, 1e-4, "experts");
}

/// Two sequences of 3 and 1 query tokens with 5 and 2 cached ones, blocks of 4 tokens, 2 key/value heads, 4 query heads.
#[test]
fn appended_keys_and_values_are_attended() {
    let (heads, kv_heads, dim, block, blocks) = (4_usize, 2_usize, 8_usize, 4_usize, 6_usize);
    let mut random = Random(11);
    let positions = [(0_usize, 5_usize), (1, 2)];
    let table = [4_i32, 1, 2, 0];
    let total: usize = positions.iter().map(|(_, len)| len).sum();
    let (k, v) = (random.f32s(total * kv_heads * dim), random.f32s(total * kv_heads * dim));
    let slot = |s: usize, p: usize| table[s * 2 + p / block] * block as i32 + (p % block) as i32;
    let slots: Vec<i32> = positions.iter().flat_map(|(s, len)| (0..*len).map(|p| slot(*s, p))).collect();
    let cache = f32s(&[Dim::symbol(1, 1, 6), n((block * kv_heads * 2 * dim) as i64)]);
    let op = OpDesc::new(ops::QHAL_OP_KV_APPEND)
        .attr_int(ops::QHAL_ATTR_NUM_KV_HEADS, kv_heads as i64)
        .attr_int(ops::QHAL_ATTR_HEAD_DIM, dim as i64)
        .attr_int(ops::QHAL_ATTR_VALUE_DIM, dim as i64)
        .attr_int(ops::QHAL_ATTR_BLOCK_SIZE, block as i64)
        .input(f32s(&[T, n(16)]))
        .input(f32s(&[T, n(16)]))
        .input(i32s(&[T]))
        .output(cache);
    let written = run(&op, &[some(&k), some(&v), some(&slots)], &[total as i64, blocks as i64]);
    let beyond = try_run(&op, &[some(&k), some(&v), some(&slots)], &[total as i64, 4]).unwrap_err();
    assert!(matches!(&beyond, LaunchError::Failed(e) if e.message.contains("slots")), "{beyond}");

    let q = random.f32s(4 * heads * dim);
    let (sequences, columns) = (Dim::symbol(1, 1, 4), Dim::symbol(2, 1, 8));
    let op = OpDesc::new(ops::QHAL_OP_ATTENTION)
        .attr_int(ops::QHAL_ATTR_NUM_HEADS, heads as i64)
        .attr_int(ops::QHAL_ATTR_NUM_KV_HEADS, kv_heads as i64)
        .attr_int(ops::QHAL_ATTR_HEAD_DIM, dim as i64)
        .attr_int(ops::QHAL_ATTR_VALUE_DIM, dim as i64)
        .attr_int(ops::QHAL_ATTR_BLOCK_SIZE, block as i64)
        .attr_real(ops::QHAL_ATTR_SCALE, 0.25)
        .input(f32s(&[T, n(32)]))
        .input(f32s(&[n(6), n((block * kv_heads * 2 * dim) as i64)]))
        .input(i32s(&[sequences]))
        .input(i32s(&[sequences]))
        .input(i32s(&[sequences, columns]))
        .output(f32s(&[T, n(32)]));
    let inputs = [some(&q), Some(written[0].clone()), some(&[0_i32, 3, 4]), some(&[5_i32, 2]), some(&table)];
    let out = run(&op, &inputs, &[4, 2, 2]);
    let mut expected = Vec::new();
    for (row, (sequence, position)) in [(0, 2), (0, 3), (0, 4), (1, 1)].into_iter().enumerate() {
        let first = if sequence == 0 { 0 } else { 5 };
        for head in 0..heads {
            let kv = |data: &[f32], p: usize| wide(&data[((first + p) * kv_heads + head / 2) * dim..][..dim]);
            let q = wide(&q[(row * heads + head) * dim..][..dim]);
            let score = |p: usize| (q.iter().zip(kv(&k, p)).map(|(q, k)| q * k).sum::<f64>() * 0.25).exp();
            let sum: f64 = (0..=position).map(score).sum();
            for i in 0..dim {
                expected.push((0..=position).map(|p| score(p) / sum * kv(&v, p)[i]).sum());
            }
        }
    }
    close(&floats(&out[0], 4 * heads * dim), &expected, 1e-5, "attention");
}

#[test]
fn results_do_not_depend_on_company() {
    let mut random = Random(12);
    let (weights, _) = q8_0(&mut random, 48 * 64);
    let x = random.f32s(9 * 64);
    for compute in [ops::QHAL_COMPUTE_F32, ops::QHAL_COMPUTE_I8_G32, ops::QHAL_COMPUTE_I8X2_G32] {
        let op = OpDesc::new(ops::QHAL_OP_GEMM)
            .compute(compute)
            .input(f32s(&[T, n(64)]))
            .input(TensorDesc::new(8, &[n(48), n(64)]))
            .output(f32s(&[T, n(48)]));
        let together = run(&op, &[some(&x), Some(weights.clone())], &[9]);
        for row in 0..9 {
            let alone = run(&op, &[some(&x[row * 64..][..64]), Some(weights.clone())], &[1]);
            assert_eq!(alone[0][..192], together[0][row * 192..][..192], "row {row}");
        }
    }
}

/// One sequence of 2 query tokens with 5 cached ones; both forms against the definition.
#[test]
fn latent_attention_in_both_forms() {
    let (heads, nope, rope, value, latent, block) = (2_usize, 8_usize, 4_usize, 8_usize, 16_usize, 4_usize);
    let mut random = Random(13);
    let (c, k_rope) = (random.f32s(5 * latent), random.f32s(5 * rope));
    let (kv_b, q) = (random.f32s(heads * (nope + value) * latent), random.f32s(2 * heads * (nope + rope)));
    let slots = [8_i32, 9, 10, 11, 4];
    let append = OpDesc::new(ops::QHAL_OP_KV_APPEND)
        .attr_int(ops::QHAL_ATTR_NUM_KV_HEADS, 1)
        .attr_int(ops::QHAL_ATTR_HEAD_DIM, 16)
        .attr_int(ops::QHAL_ATTR_VALUE_DIM, 4)
        .attr_int(ops::QHAL_ATTR_BLOCK_SIZE, 4)
        .attr_int(ops::QHAL_ATTR_JOINED, 1)
        .input(f32s(&[T, n(16)]))
        .input(f32s(&[T, n(4)]))
        .input(i32s(&[T]))
        .output(f32s(&[n(3), n(80)]));
    let cache = run(&append, &[some(&c), some(&k_rope), some(&slots)], &[5]).remove(0);
    let row = |h: usize, i: usize| wide(&kv_b[(h * (nope + value) + i) * latent..][..latent]);
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mut expected = Vec::new();
    for (token, position) in [3, 4].into_iter().enumerate() {
        for h in 0..heads {
            let q = wide(&q[(token * heads + h) * (nope + rope)..][..nope + rope]);
            let latent_of = |p: usize| wide(&c[p * latent..][..latent]);
            let weight = |p: usize| {
                let key = (0..nope).map(|i| dot(&row(h, i), &latent_of(p)));
                let key: Vec<f64> = key.chain(wide(&k_rope[p * rope..][..rope])).collect();
                (dot(&q, &key) * 0.5).exp()
            };
            let sum: f64 = (0..=position).map(weight).sum();
            for i in 0..value {
                expected.push((0..=position).map(|p| weight(p) / sum * dot(&row(h, nope + i), &latent_of(p))).sum());
            }
        }
    }
    for form in [ops::QHAL_MLA_EXPANDED, ops::QHAL_MLA_ABSORBED] {
        let (sequences, columns) = (Dim::symbol(1, 1, 4), Dim::symbol(2, 1, 8));
        let op = OpDesc::new(ops::QHAL_OP_MLA_ATTENTION)
            .attr_int(ops::QHAL_ATTR_NUM_HEADS, 2)
            .attr_int(ops::QHAL_ATTR_NOPE_DIM, 8)
            .attr_int(ops::QHAL_ATTR_ROPE_DIM, 4)
            .attr_int(ops::QHAL_ATTR_VALUE_DIM, 8)
            .attr_int(ops::QHAL_ATTR_LATENT_DIM, 16)
            .attr_int(ops::QHAL_ATTR_BLOCK_SIZE, block as i64)
            .attr_int(ops::QHAL_ATTR_FORM, form)
            .attr_real(ops::QHAL_ATTR_SCALE, 0.5)
            .input(f32s(&[T, n(24)]))
            .input(f32s(&[n(32), n(16)]))
            .input(f32s(&[n(3), n(80)]))
            .input(i32s(&[sequences]))
            .input(i32s(&[sequences]))
            .input(i32s(&[sequences, columns]))
            .output(f32s(&[T, n(16)]));
        let inputs = [some(&q), some(&kv_b), Some(cache.clone()), some(&[0_i32, 2]), some(&[5_i32]), some(&[2_i32, 1])];
        let out = run(&op, &inputs, &[2, 1, 2]);
        close(&floats(&out[0], 2 * heads * value), &expected, 1e-4, "latent attention");
    }
}
