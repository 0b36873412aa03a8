//! `op_supports` and `plan_create` say the same, whatever is asked and in whatever order.

use qwen_hal::abi::ops::*;
use qwen_hal::{Dim, OpDesc, PlanError, PlanOptions, TensorDesc};

use crate::case::{Body, Case, Checked, ensure, failed};
use crate::random::Random;
use crate::suite::Subject;

const DESCRIPTIONS: usize = 4000;

pub(crate) fn cases() -> Vec<Case> {
    let make = |(name, check): (&str, fn(&Subject) -> Checked)| Case {
        name: format!("0/honesty/{name}"),
        level: 0,
        body: Body::Function(check),
    };
    vec![
        make(("random_descriptions", random_descriptions)),
        make(("unknown_mathematics", unknown_mathematics)),
        make(("order_of_questions", order_of_questions)),
    ]
}

fn dim(random: &mut Random) -> Dim {
    let size = random.pick(&[0, 1, 2, 3, 16, 32, 33, 64, 256]);
    if random.below(3) == 0 { Dim::symbol(random.below(2) as u32, 1, 64) } else { Dim::Fixed(size) }
}

fn tensor(random: &mut Random) -> TensorDesc {
    let dtype = random.pick(&[0, 0, 0, 0, 1, 2, 8, 12, 14, 24, 26, 26, 27, 30, 100, 102]);
    let dims: Vec<Dim> = (0..=random.below(3)).map(|_| dim(random)).collect();
    let tensor = TensorDesc::new(dtype, &dims);
    match random.below(8) {
        0 => TensorDesc::none(),
        1 => tensor.with_row_stride(300),
        2 => tensor.with_block_scale(16, 16),
        _ => tensor,
    }
}

/// Anything at all.
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
        op = op.attr_int(key, random.pick(&[-1, 0, 1, 2, 3, 8, 16, 64, i64::MAX]));
    }
    if random.below(4) == 0 {
        op = op.epilogue(random.below(4) as u32, None, random.below(3) as u32);
    }
    op
}

/// Common ops with one thing changed.
fn nearly_right(random: &mut Random) -> OpDesc {
    let (t, h) = (Dim::symbol(0, 1, 64), random.pick(&[16_i64, 32, 64, 256]));
    let x = TensorDesc::f32(&[t, h.into()]);
    let op = match random.below(5) {
        0 => OpDesc::new(QHAL_OP_NORM)
            .attr_int(QHAL_ATTR_AXIS, 16)
            .attr_real(QHAL_ATTR_EPS, 1e-6)
            .input(x)
            .input(TensorDesc::new(random.pick(&[0, 1, 30, 26]), &[16.into()]))
            .output(x),
        1 => OpDesc::new(QHAL_OP_GEMM)
            .compute(1 + random.below(6) as u32)
            .input(x)
            .input(TensorDesc::new(random.pick(&[0, 1, 2, 8, 12, 20, 24, 30, 100]), &[64.into(), h.into()]))
            .output(TensorDesc::f32(&[t, 64.into()])),
        2 => OpDesc::new(QHAL_OP_SOFTMAX).input(x).output(x),
        3 => OpDesc::new(QHAL_OP_GLU).attr_int(QHAL_ATTR_FUNCTION, random.below(3) as i64).input(x).input(x).output(x),
        _ => OpDesc::new(QHAL_OP_ROUTE)
            .attr_int(QHAL_ATTR_SCORE, random.below(3) as i64)
            .attr_int(QHAL_ATTR_TOP_K, 4)
            .attr_int(QHAL_ATTR_NUM_GROUPS, random.pick(&[0, 1, 4, 5]))
            .attr_int(QHAL_ATTR_TOPK_GROUP, random.pick(&[0, 1, 2, 9]))
            .input(x)
            .input(TensorDesc::none())
            .output(TensorDesc::new(QHAL_DTYPE_I32, &[t, 4.into()]))
            .output(TensorDesc::f32(&[t, 4.into()])),
    };
    match random.below(6) {
        0 => op.input(tensor(random)),
        1 => op.output(tensor(random)),
        2 => op.attr_int(1 + random.below(31) as u32, random.below(5) as i64),
        _ => op,
    }
}

fn describe(op: &OpDesc) -> String {
    let tensors = |tensors: &[TensorDesc]| {
        let one = |t: &TensorDesc| {
            format!("dtype {} {:?}", t.raw().dtype as i32, &t.raw().dims[..t.raw().rank.min(8) as usize])
        };
        tensors.iter().map(one).collect::<Vec<_>>().join(", ")
    };
    format!("{} ({}) -> ({})", op.name(), tensors(op.inputs()), tensors(op.outputs()))
}

/// True if supported.
fn agree(subject: &Subject, op: &OpDesc) -> Result<Option<bool>, crate::case::Trouble> {
    let plan = subject.device.plan(op, &PlanOptions::default());
    match (subject.device.op_supports(op), plan) {
        (Err(PlanError::Invalid { .. }), _) => Ok(None),
        (Err(error), _) => failed(format!("op_supports: expected OK and a level, found {error}, for {}", describe(op))),
        (Ok(support), Ok(_)) if support.is_supported() => Ok(Some(true)),
        (Ok(support), Err(error)) if support.is_supported() => {
            failed(format!("claimed, but plan_create refuses: {error}, for {}", describe(op)))
        }
        (Ok(_), Ok(_)) => failed(format!("op_supports says no, but plan_create makes a plan, for {}", describe(op))),
        (Ok(support), Err(PlanError::Unsupported(_))) => {
            let qwen_hal::Support::No { reason } = support else { return Ok(Some(false)) };
            ensure(!reason.is_empty(), || format!("op_supports says no without a reason, for {}", describe(op)))?;
            Ok(Some(false))
        }
        (Ok(_), Err(error)) => {
            failed(format!("op_supports says no, plan_create not UNIMPLEMENTED but: {error}, for {}", describe(op)))
        }
    }
}

fn descriptions() -> Vec<OpDesc> {
    let mut random = Random::new(42);
    let make = |at: usize| if at.is_multiple_of(2) { noise(&mut random) } else { nearly_right(&mut random) };
    (0..DESCRIPTIONS).map(make).collect()
}

fn random_descriptions(subject: &Subject) -> Checked {
    descriptions().iter().try_for_each(|op| agree(subject, op).map(drop))
}

/// The answer depends on nothing but the question.
fn order_of_questions(subject: &Subject) -> Checked {
    let descriptions = descriptions();
    let some = &descriptions[..DESCRIPTIONS / 4];
    let ask = |op: &OpDesc| subject.device.op_supports(op).ok().map(|support| support.is_supported());
    let forwards: Vec<_> = some.iter().map(ask).collect();
    let mut backwards: Vec<_> = some.iter().rev().map(ask).collect();
    backwards.reverse();
    match forwards.iter().zip(&backwards).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(at) => failed(format!("another answer when asked in another order, for {}", describe(&some[at]))),
    }
}

/// Codes that the vocabulary does not have mean mathematics that nobody defined: a claim would be a guess.
fn unknown_mathematics(subject: &Subject) -> Checked {
    let x = TensorDesc::f32(&[Dim::symbol(0, 1, 8), 32.into()]);
    let rope = |style: i64| {
        OpDesc::new(QHAL_OP_ROPE)
            .attr_int(QHAL_ATTR_NUM_HEADS, 2)
            .attr_int(QHAL_ATTR_HEAD_DIM, 16)
            .attr_int(QHAL_ATTR_ROTARY_DIM, 16)
            .attr_int(QHAL_ATTR_STYLE, style)
            .input(x)
            .input(TensorDesc::new(QHAL_DTYPE_I32, &[Dim::symbol(0, 1, 8)]))
            .input(TensorDesc::f32(&[8.into()]))
            .output(x)
    };
    let gemm = || OpDesc::new(QHAL_OP_GEMM).input(x).input(TensorDesc::f32(&[16.into(), 32.into()]));
    let out = TensorDesc::f32(&[Dim::symbol(0, 1, 8), 16.into()]);
    let unknown = [
        ("activation 77", OpDesc::new(QHAL_OP_UNARY).attr_int(QHAL_ATTR_FUNCTION, 77).input(x).output(x)),
        ("gated activation 77", OpDesc::new(QHAL_OP_GLU).attr_int(QHAL_ATTR_FUNCTION, 77).input(x).input(x).output(x)),
        ("binary function 9", OpDesc::new(QHAL_OP_BINARY).attr_int(QHAL_ATTR_FUNCTION, 9).input(x).input(x).output(x)),
        ("rotary style 5", rope(5)),
        ("form 99 of products", gemm().compute(99).output(out)),
        ("sums in type 77", gemm().accumulate(77).output(out)),
        ("epilogue 55", gemm().epilogue(55, None, 0).output(out)),
        ("op kind 4000", OpDesc::new(4000).input(x).output(x)),
    ];
    for (what, op) in unknown {
        if agree(subject, &op)? == Some(true) {
            return failed(format!("{what} is claimed, the vocabulary does not have it"));
        }
    }
    Ok(())
}
