//! Experts: route, dispatch, grouped gemm, combine.

use qwen_hal::abi::ops::*;
use qwen_hal::{OpDesc, TensorDesc};

use super::gemm::Weight;
use super::{Build, T, by_rows, f, i, ints, n, reals, wide};
use crate::case::Case;
use crate::execute::{Expected, Operand, bytes_of_ints};
use crate::limits::{ELEMENTWISE, FLOAT, product};
use crate::oracle;
use crate::random::Random;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = routes();
    cases.push(dispatch());
    for (dtype, name) in [
        (QHAL_DTYPE_F32, "f32"),
        (QHAL_DTYPE_F16, "f16"),
        (QHAL_DTYPE_BF16, "bf16"),
        (8, "q8_0"),
        (12, "q4_k"),
        (14, "q6_k"),
    ] {
        cases.push(grouped(dtype, QHAL_COMPUTE_F32, true, &format!("grouped_gemm/{name}.f32.gathered")));
        cases.push(grouped(dtype, QHAL_COMPUTE_F32, false, &format!("grouped_gemm/{name}.f32.sorted")));
    }
    cases.push(grouped(8, QHAL_COMPUTE_I8_G32, true, "grouped_gemm/q8_0.i8_g32.gathered"));
    cases.push(grouped(12, QHAL_COMPUTE_I8X2_G32, true, "grouped_gemm/q4_k.i8x2_g32.gathered"));
    cases.extend([combine(true), combine(false)]);
    cases
}

fn routes() -> Vec<Case> {
    let plain = oracle::Route {
        sigmoid: false,
        top_k: 4,
        groups: 1,
        top_groups: 1,
        top2_sum: false,
        renormalise: false,
        scale: 1.0,
    };
    let list = [
        ("softmax", plain, false),
        ("softmax_renormalised", oracle::Route { renormalise: true, top_k: 2, ..plain }, false),
        // Logits are whole numbers, so that experts and groups tie: the lower index is taken.
        ("ties", oracle::Route { groups: 4, top_groups: 2, ..plain }, false),
        ("softmax_groups_by_max", oracle::Route { groups: 4, top_groups: 2, scale: 3.0, ..plain }, false),
        (
            "sigmoid_groups_by_top2_sum_with_bias",
            oracle::Route {
                sigmoid: true,
                groups: 4,
                top_groups: 2,
                top2_sum: true,
                renormalise: true,
                scale: 2.5,
                ..plain
            },
            true,
        ),
    ];
    let mut cases = Vec::new();
    for (name, args, biased) in list {
        let (rows, experts) = (8, 32);
        let mut random = Random::new(101);
        let whole = |x: f32| if name == "ties" { x.round() } else { x };
        let logits: Vec<f32> = random.f32s(rows * experts).iter().map(|x| whole(x * 4.0)).collect();
        let bias = random.f32s(experts);
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        for row in logits.chunks(experts) {
            let wide_bias = wide(&bias);
            let (chosen, values) = oracle::route(&wide(row), biased.then_some(wide_bias.as_slice()), args);
            ids.extend(chosen.iter().map(|id| *id as i32));
            weights.extend(values);
        }
        let build = Build::new(OpDesc::new(QHAL_OP_ROUTE))
            .code(QHAL_ATTR_SCORE, if args.sigmoid { QHAL_SCORE_SIGMOID } else { QHAL_SCORE_SOFTMAX })
            .int(QHAL_ATTR_TOP_K, args.top_k)
            .int(QHAL_ATTR_NUM_GROUPS, args.groups)
            .int(QHAL_ATTR_TOPK_GROUP, args.top_groups)
            .code(QHAL_ATTR_GROUP_SCORE, if args.top2_sum { QHAL_GROUP_SCORE_TOP2_SUM } else { QHAL_GROUP_SCORE_MAX })
            .int(QHAL_ATTR_RENORMALISE, usize::from(args.renormalise))
            .real(QHAL_ATTR_SCALE, args.scale)
            .input(f(&[T, n(experts)]), reals(&logits));
        let build = if biased { build.input(f(&[n(experts)]), reals(&bias)) } else { build.absent() };
        let build = build.output(i(&[T, n(args.top_k)])).output(f(&[T, n(args.top_k)]));
        let expected = vec![Expected::Exact(bytes_of_ints(&ids)), Expected::Real(weights)];
        cases.push(by_rows(build.case(2, format!("route/{name}"), &[rows as i64], expected, ELEMENTWISE)));
    }
    cases
}

/// Experts of 7 tokens, two each; one expert has none.
const IDS: [i32; 14] = [3, 0, 3, 1, 0, 3, 5, 3, 1, 0, 4, 5, 3, 4];
const EXPERTS: usize = 6;

/// Offsets per expert, token of each sorted row, sorted row of each pair.
fn sorted() -> (Vec<i32>, Vec<i32>, Vec<i32>) {
    let mut order: Vec<usize> = (0..IDS.len()).collect();
    order.sort_by_key(|pair| IDS[*pair]);
    let offsets = (0..=EXPERTS as i32).map(|expert| IDS.iter().filter(|id| **id < expert).count() as i32).collect();
    let mut slots = vec![0; IDS.len()];
    for (row, pair) in order.iter().enumerate() {
        slots[*pair] = row as i32;
    }
    (offsets, order.iter().map(|pair| (pair / 2) as i32).collect(), slots)
}

fn dispatch() -> Case {
    let (offsets, rows, slots) = sorted();
    let pairs = [T, n(2)];
    let build = Build::new(OpDesc::new(QHAL_OP_DISPATCH))
        .int(QHAL_ATTR_NUM_EXPERTS, EXPERTS)
        .input(i(&pairs), ints(&IDS))
        .output(i(&[n(EXPERTS + 1)]))
        .output(i(&pairs))
        .output(i(&pairs));
    let expected = [offsets, rows, slots].map(|values| Expected::Exact(bytes_of_ints(&values))).into();
    build.case(2, "dispatch/pairs", &[7], expected, FLOAT)
}

fn grouped(dtype: u32, compute: u32, gathered: bool, name: &str) -> Case {
    let (offsets, rows, _) = sorted();
    let (k, outputs) = (256, 24);
    let mut random = Random::new(111 + u64::from(dtype));
    let x = random.f32s(if gathered { 7 } else { 14 } * k);
    let w = Weight::new(&mut random, dtype, EXPERTS * outputs * k);
    let mut expected = Vec::new();
    for (row, token) in rows.iter().enumerate() {
        let expert = (0..EXPERTS).rfind(|expert| offsets[*expert] <= row as i32).unwrap_or(0);
        let source = if gathered { *token as usize } else { row };
        let weight = wide(&w.values[expert * outputs * k..][..outputs * k]);
        expected.extend(oracle::product(&wide(&x[source * k..][..k]), &weight, k));
    }
    let build = Build::new(OpDesc::new(QHAL_OP_GROUPED_GEMM).compute(compute));
    let build =
        if gathered { build.input(f(&[T, n(k)]), reals(&x)) } else { build.input(f(&[T, n(2), n(k)]), reals(&x)) };
    let build = build.input(i(&[n(EXPERTS + 1)]), ints(&offsets));
    let build = if gathered { build.input(i(&[T, n(2)]), ints(&rows)) } else { build.absent() };
    let build = build
        .input(TensorDesc::new(dtype, &[n(EXPERTS), n(outputs), n(k)]), Operand::Bytes(w.bytes.clone()))
        .output(f(&[T, n(2), n(outputs)]));
    build.case(2, name, &[7], vec![Expected::Real(expected)], product(compute))
}

fn combine(with_addend: bool) -> Case {
    let (_, _, slots) = sorted();
    let width = 40;
    let mut random = Random::new(121);
    let (x, weights, addend) = (random.f32s(14 * width), random.f32s(14), random.f32s(7 * width));
    let mut expected = if with_addend { wide(&addend) } else { vec![0.0; 7 * width] };
    for (pair, (slot, weight)) in slots.iter().zip(&weights).enumerate() {
        let row = &x[*slot as usize * width..][..width];
        for (sum, value) in expected[pair / 2 * width..].iter_mut().zip(row) {
            *sum += f64::from(*weight) * f64::from(*value);
        }
    }
    let build = Build::new(OpDesc::new(QHAL_OP_COMBINE))
        .input(f(&[T, n(2), n(width)]), reals(&x))
        .input(i(&[T, n(2)]), ints(&slots))
        .input(f(&[T, n(2)]), reals(&weights));
    let build = if with_addend { build.input(f(&[T, n(width)]), reals(&addend)) } else { build.absent() };
    let build = build.output(f(&[T, n(width)]));
    let name = if with_addend { "combine/with_addend" } else { "combine/alone" };
    build.case(2, name, &[7], vec![Expected::Real(expected)], ELEMENTWISE)
}
