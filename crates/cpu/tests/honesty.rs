//! `op_supports` says exactly what `plan_create` does: random descriptions, right ones broken in one place and plain noise.

mod common;

use common::{Random, device};
use qwen_hal::abi::{QHAL_UNIMPLEMENTED, ops};
use qwen_hal::{Dim, OpDesc, PlanError, PlanOptions, TensorDesc};

fn pick<T: Copy>(random: &mut Random, from: &[T]) -> T {
    from[random.below(from.len() as u64) as usize]
}

fn dim(random: &mut Random) -> Dim {
    let size = pick(random, &[0, 1, 2, 3, 16, 32, 33, 64, 256]);
    if random.below(3) == 0 { Dim::symbol(random.below(2) as u32, 1, 64) } else { Dim::Fixed(size) }
}

fn tensor(random: &mut Random) -> TensorDesc {
    let dtype = pick(random, &[0, 0, 0, 0, 1, 2, 8, 12, 14, 24, 26, 26, 27, 30, 100, 102]);
    let rank = 1 + random.below(3) as usize;
    let dims: Vec<Dim> = (0..rank).map(|_| dim(random)).collect();
    let tensor = TensorDesc::new(dtype, &dims);
    match random.below(8) {
        0 => TensorDesc::none(),
        1 => tensor.with_row_stride(300),
        2 => tensor.with_block_scale(16, 16),
        _ => tensor,
    }
}

fn noise(random: &mut Random) -> OpDesc {
    let mut op = OpDesc::new(random.below(21) as u32).compute(random.below(7) as u32);
    for _ in 0..random.below(6) {
        op = op.input(tensor(random));
    }
    for _ in 0..random.below(4) {
        op = op.output(tensor(random));
    }
    for _ in 0..random.below(8) {
        let key = 1 + random.below(31) as u32;
        op = op.attr_int(key, pick(random, &[-1, 0, 1, 2, 3, 8, 16, 64, i64::MAX]));
    }
    if random.below(4) == 0 {
        op = op.epilogue(random.below(4) as u32, None, random.below(3) as u32);
    }
    op
}

/// A right op of each common kind with one random change.
fn nearly_right(random: &mut Random) -> OpDesc {
    let (t, h) = (Dim::symbol(0, 1, 64), pick(random, &[16_i64, 32, 64]));
    let x = TensorDesc::f32(&[t, h.into()]);
    let op = match random.below(5) {
        0 => OpDesc::new(ops::QHAL_OP_NORM)
            .attr_int(ops::QHAL_ATTR_AXIS, 16)
            .attr_real(ops::QHAL_ATTR_EPS, 1e-6)
            .input(x)
            .input(TensorDesc::new(pick(random, &[0, 1, 30, 26]), &[16.into()]))
            .output(x),
        1 => OpDesc::new(ops::QHAL_OP_GEMM)
            .compute(1 + random.below(6) as u32)
            .input(x)
            .input(TensorDesc::new(pick(random, &[0, 1, 2, 8, 20, 24, 30, 100]), &[64.into(), h.into()]))
            .output(TensorDesc::f32(&[t, 64.into()])),
        2 => OpDesc::new(ops::QHAL_OP_SOFTMAX).input(x).output(x),
        3 => OpDesc::new(ops::QHAL_OP_GLU)
            .attr_int(ops::QHAL_ATTR_FUNCTION, random.below(3) as i64)
            .input(x)
            .input(x)
            .output(x),
        _ => OpDesc::new(ops::QHAL_OP_ROUTE)
            .attr_int(ops::QHAL_ATTR_SCORE, random.below(3) as i64)
            .attr_int(ops::QHAL_ATTR_TOP_K, 4)
            .attr_int(ops::QHAL_ATTR_NUM_GROUPS, pick(random, &[0, 1, 4, 5]))
            .attr_int(ops::QHAL_ATTR_TOPK_GROUP, pick(random, &[0, 1, 2, 9]))
            .input(x)
            .input(TensorDesc::none())
            .output(TensorDesc::new(26, &[t, 4.into()]))
            .output(TensorDesc::f32(&[t, 4.into()])),
    };
    match random.below(6) {
        0 => op.input(tensor(random)),
        1 => op.output(tensor(random)),
        2 => op.attr_int(1 + random.below(31) as u32, random.below(5) as i64),
        _ => op,
    }
}

#[test]
fn supported_means_planned_and_unsupported_means_unimplemented() {
    let mut random = Random(42);
    let (mut supported, mut refused) = (0, 0);
    for i in 0..20_000 {
        let op = if i % 2 == 0 { noise(&mut random) } else { nearly_right(&mut random) };
        let plan = device().plan(&op, &PlanOptions::default());
        match device().op_supports(&op) {
            Err(PlanError::Invalid { .. }) => assert!(matches!(plan, Err(PlanError::Invalid { .. }))),
            Err(error) => panic!("{error} for {op:?}"),
            Ok(support) if support.is_supported() => {
                plan.unwrap_or_else(|error| panic!("claimed but refused: {error} for {op:?}"));
                supported += 1;
            }
            Ok(support) => {
                let Err(PlanError::Unsupported(error)) = plan else { panic!("{support:?}, but {plan:?} for {op:?}") };
                assert_eq!(error.code, QHAL_UNIMPLEMENTED);
                assert!(!error.message.is_empty());
                refused += 1;
            }
        }
    }
    assert!(supported > 1000 && refused > 1000, "{supported} supported, {refused} refused");
}

#[test]
fn wishes_that_cannot_be_met_are_refused() {
    let x = TensorDesc::f32(&[Dim::Fixed(4), Dim::Fixed(64)]);
    let op = OpDesc::new(ops::QHAL_OP_GEMM)
        .compute(ops::QHAL_COMPUTE_I8_G32)
        .input(x)
        .input(TensorDesc::new(8, &[64.into(), 64.into()]))
        .output(x);
    let plan = |options: PlanOptions| device().plan(&op, &options);
    let info = plan(PlanOptions::default()).unwrap().info().clone();
    assert!(info.workspace_bytes > 1 && info.kernel.starts_with("gemm.q8_0."));
    plan(PlanOptions { max_workspace: info.workspace_bytes, ..Default::default() }).unwrap();
    let refused = plan(PlanOptions { max_workspace: 1, ..Default::default() }).unwrap_err();
    assert!(matches!(&refused, PlanError::Unsupported(e) if e.message.contains("workspace")), "{refused}");
    assert!(plan(PlanOptions { required_flags: info.flags, ..Default::default() }).is_ok());
    assert!(plan(PlanOptions { required_flags: 1 << 31, ..Default::default() }).is_err());
}
