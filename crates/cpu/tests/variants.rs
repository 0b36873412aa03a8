//! What a plan tells of its ways to compute: ranges without gaps, plans for each by name, and the same bits from all.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

mod common;

use common::{Random, bytes_of, device};
use qwen_hal::abi::{QHAL_USAGE_ACTIVATION, QHAL_USAGE_WORKSPACE, ops};
use qwen_hal::{BufferDesc, Dim, LaunchArgs, OpDesc, Plan, PlanError, PlanOptions, Scope, TensorDesc};

const K: i64 = 512;
const N: i64 = 48;
const MOST: i64 = 300;

fn gemm() -> OpDesc {
    let tokens = Dim::symbol(0, 1, MOST);
    OpDesc::new(ops::QHAL_OP_GEMM)
        .compute(ops::QHAL_COMPUTE_I8_G32)
        .input(TensorDesc::f32(&[tokens, K.into()]))
        .input(TensorDesc::new(2, &[N.into(), K.into()]))
        .output(TensorDesc::f32(&[tokens, N.into()]))
}

/// Results of a launch.
fn run(plan: &Plan, rows: i64, x: &[u8], weight: &[u8]) -> Vec<u8> {
    let device = device();
    let stream = device.stream("test").unwrap();
    let alloc = |bytes: usize, usage| {
        device.alloc(&BufferDesc::new(bytes.max(64) as u64, usage, Scope::Temporary, "test")).unwrap()
    };
    let upload = |bytes: &[u8]| {
        let buffer = alloc(bytes.len(), QHAL_USAGE_ACTIVATION);
        stream.copy_from_host(bytes, &buffer.slice(0, bytes.len() as u64).unwrap()).unwrap();
        buffer
    };
    let (x, source) = (upload(x), upload(weight));
    let packed = alloc(plan.info().packed_bytes[1] as usize, QHAL_USAGE_ACTIVATION);
    plan.prepack(&stream, 1, &source.whole(), &packed.whole()).unwrap();
    let out = alloc((rows * N * 4) as usize, QHAL_USAGE_ACTIVATION);
    let workspace = alloc(plan.info().workspace_bytes as usize, QHAL_USAGE_WORKSPACE);
    let mut args = LaunchArgs::new(plan);
    args.set_input(0, &x.whole()).set_input(1, &packed.whole()).set_output(0, &out.whole());
    args.set_workspace(&workspace.whole()).set_symbol(0, rows);
    plan.launch(&stream, &args).unwrap();
    let mut bytes = vec![0; (rows * N * 4) as usize];
    stream.copy_to_host(&out.slice(0, bytes.len() as u64).unwrap(), &mut bytes).unwrap();
    bytes
}

#[test]
fn chosen_ranges_follow_each_other_and_cover_the_plan() {
    let plan = device().plan(&gemm(), &PlanOptions::default()).unwrap();
    let variants = plan.variants().unwrap();
    let chosen: Vec<_> = variants.iter().filter(|variant| variant.chosen).collect();
    let mut next = 1;
    for variant in &chosen {
        assert_eq!((variant.symbol, variant.min), (Some(0), next), "{variants:?}");
        assert!(!variant.family.is_empty() && !variant.tiling.is_empty());
        next = variant.max + 1;
    }
    assert_eq!(next, MOST + 1);
    assert!(variants.iter().any(|variant| !variant.chosen), "there is something to choose from");
}

#[test]
fn every_variant_gives_the_same_bits() {
    let x = bytes_of(&Random(1).f32s((MOST * K) as usize));
    let weight: Vec<u8> = {
        let mut random = Random(2);
        let block = |random: &mut Random| {
            let mut block = vec![0x00, 0x2c];
            block.extend((0..16).map(|_| random.below(256) as u8));
            block
        };
        (0..N * K / 32).flat_map(|_| block(&mut random)).collect()
    };
    let usual = device().plan(&gemm(), &PlanOptions::default()).unwrap();
    let names: std::collections::BTreeSet<String> =
        usual.variants().unwrap().into_iter().map(|variant| variant.name).collect();
    for rows in [1, 3, 8, 17, MOST] {
        let x = &x[..(rows * K * 4) as usize];
        let expected = run(&usual, rows, x, &weight);
        for name in &names {
            let plan = device().plan_as(&gemm(), &PlanOptions::default(), name).unwrap();
            assert!(plan.variants().unwrap().iter().filter(|variant| variant.chosen).all(|v| v.name == *name));
            assert!(run(&plan, rows, x, &weight) == expected, "{name} at {rows} rows");
        }
    }
}

#[test]
fn unknown_variants_are_refused_by_name() {
    let refused = device().plan_as(&gemm(), &PlanOptions::default(), "fastest").unwrap_err();
    let PlanError::Unsupported(error) = &refused else { panic!("{refused}") };
    assert!(error.message.contains("\"fastest\", expected one of"), "{refused}");
}

#[test]
fn an_op_without_a_choice_of_sizes_has_one_entry_a_variant() {
    let x = TensorDesc::f32(&[Dim::symbol(0, 1, 9), 64.into()]);
    let plan = device().plan(&OpDesc::new(ops::QHAL_OP_SOFTMAX).input(x).output(x), &PlanOptions::default()).unwrap();
    let variants = plan.variants().unwrap();
    assert_eq!(variants.iter().filter(|variant| variant.chosen).count(), 1);
    assert!(variants.iter().all(|variant| variant.symbol.is_none() && variant.family == "by_row"));
}
