//! What is particular about a simulated device: its address space, its memory, its time, its faults.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::time::{Duration, Instant};

use common::{buffer, chip, open, plugin};
use qwen_hal::abi::ops::{QHAL_DTYPE_F16, QHAL_OP_GEMM, QHAL_OP_SOFTMAX};
use qwen_hal::abi::{
    QHAL_DEADLINE_EXCEEDED, QHAL_DEVICE_LOST, QHAL_HEALTH_LOST, QHAL_HEALTH_OK, QHAL_HEALTH_UNRESPONSIVE,
    QHAL_LINK_FABRIC, QHAL_LINK_HOST_STAGED, QHAL_LINK_SAME, QHAL_RESOURCE_EXHAUSTED, QHAL_USAGE_STAGING,
};
use qwen_hal::{BufferDesc, Device, Dim, HalError, LaunchArgs, OpDesc, Plan, PlanOptions, Scope, Stream, TensorDesc};

fn code(error: &HalError) -> i32 {
    error.call_error().unwrap().code
}

fn softmax(device: &Device, width: i64) -> Plan {
    let x = TensorDesc::f32(&[Dim::symbol(0, 1, 64), width.into()]);
    device.plan(&OpDesc::new(QHAL_OP_SOFTMAX).input(x).output(x), &PlanOptions::default()).unwrap()
}

fn launch(plan: &Plan, stream: &Stream, memory: &qwen_hal::Buffer, rows: i64) -> Result<(), qwen_hal::LaunchError> {
    let half = memory.size() / 2;
    let mut args = LaunchArgs::new(plan);
    args.set_input(0, &memory.slice(0, half).unwrap()).set_output(0, &memory.slice(half, half).unwrap());
    args.set_symbol(0, rows);
    plan.launch(stream, &args)
}

#[test]
fn memory_is_out_of_reach_and_new_memory_is_garbage() {
    let device = chip("mlu370", &[]);
    let refused = device.import_host(std::sync::Arc::new(vec![0_u8; 64]), QHAL_USAGE_STAGING, "test").unwrap_err();
    assert!(refused.to_string().contains("an address space of its own"), "{refused}");
    let stream = device.stream("test").unwrap();
    let mut found = vec![0; 4096];
    stream.copy_to_host(&buffer(&device, 4096).whole(), &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 0xf5));
}

#[test]
fn work_is_not_done_when_the_call_returns() {
    let device = chip("ascend910b", &[("delay_us", "20000")]);
    let stream = device.stream("test").unwrap();
    let (source, target) = (buffer(&device, 1 << 20), buffer(&device, 1 << 20));
    let mut seen_pending = false;
    for _ in 0..100 {
        stream.copy(&source.whole(), &target.whole()).unwrap();
        seen_pending |= !stream.poll().unwrap();
    }
    assert!(seen_pending);
    stream.wait().unwrap();
}

#[test]
fn results_do_not_depend_on_the_pauses() {
    let run = |seed: &str| {
        let device = chip("br100", &[("seed", seed), ("delay_us", "500")]);
        let stream = device.stream("test").unwrap();
        let plan = softmax(&device, 16);
        let memory = buffer(&device, 2 * 64 * 16 * 4);
        let values: Vec<u8> = (0..64 * 16).flat_map(|i| ((i % 37) as f32 / 7.0).to_le_bytes()).collect();
        stream.copy_from_host(&values, &memory.slice(0, values.len() as u64).unwrap()).unwrap();
        launch(&plan, &stream, &memory, 64).unwrap();
        let mut found = vec![0; values.len()];
        stream.copy_to_host(&memory.slice(values.len() as u64, values.len() as u64).unwrap(), &mut found).unwrap();
        found
    };
    assert_eq!(run("1"), run("2"));
}

#[test]
fn memory_is_as_large_as_the_chips_and_runs_out_with_the_arithmetic() {
    let device = chip("mlu370", &[("memory", "67108864")]);
    assert_eq!(device.caps().memory_total, Some(64 << 20));
    let _large = buffer(&device, 40 << 20);
    let desc = BufferDesc::new(40 << 20, QHAL_USAGE_STAGING, Scope::Temporary, "test");
    let error = device.alloc(&desc).unwrap_err();
    assert_eq!(code(&error), QHAL_RESOURCE_EXHAUSTED);
    for part in ["41943040 bytes wanted", "the largest piece has", "simulated mlu370"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    let health = device.health().unwrap();
    assert_eq!(health.memory_used.unwrap() + health.memory_free.unwrap(), 64 << 20);
}

#[test]
fn virtual_memory_takes_what_is_backed() {
    // A chip that no other test uses: they run side by side and share its memory.
    let device = chip("ascend910b4", &[]);
    let page = device.caps().vmm_granularity.unwrap();
    let used = || device.health().unwrap().memory_used.unwrap();
    let before = used();
    let reserved = device.reserve(&BufferDesc::new(1 << 40, QHAL_USAGE_STAGING, Scope::Dynamic, "test")).unwrap();
    assert_eq!(used(), before);
    reserved.commit(0, 3 * page).unwrap();
    assert!(used() >= before + 3 * page);
    reserved.decommit(page, page).unwrap();
    assert!(used() < before + 3 * page);
    drop(reserved);
    assert_eq!(used(), before);
    assert!(chip("mlu370", &[]).caps().vmm_granularity.is_none());
}

#[test]
fn what_the_sheet_lacks_is_refused_in_words() {
    let refusal = |chip_name: &str, op: &OpDesc| match chip(chip_name, &[]).op_supports(op).unwrap() {
        qwen_hal::Support::No { reason } => reason,
        _ => String::new(),
    };
    let gemm = |k: i64, n: i64, compute: u32| {
        let x = TensorDesc::f32(&[Dim::symbol(0, 1, 8), k.into()]);
        let w = TensorDesc::new(qwen_hal::abi::ops::QHAL_DTYPE_BF16, &[n.into(), k.into()]);
        OpDesc::new(QHAL_OP_GEMM)
            .compute(compute)
            .input(x)
            .input(w)
            .output(TensorDesc::f32(&[Dim::symbol(0, 1, 8), n.into()]))
    };
    let bf16 = qwen_hal::abi::ops::QHAL_COMPUTE_BF16;
    assert_eq!(refusal("ascend910b", &gemm(5120, 64, bf16)), "");
    let odd = refusal("ascend910b", &gemm(5121, 64, bf16));
    assert!(odd.contains("size 5121 must be divisible by 16"), "{odd}");
    let fp8 = gemm(64, 64, qwen_hal::abi::ops::QHAL_COMPUTE_F32).accumulate(QHAL_DTYPE_F16);
    assert!(refusal("ascend910b", &fp8).contains("does not sum in"), "{}", refusal("ascend910b", &fp8));
}

#[test]
fn the_modelled_clock_follows_the_sheet() {
    let busy = |chip_name: &str| {
        let device = chip(chip_name, &[("delay_us", "0")]);
        // Utilisation is a share of the time since the device was opened.
        let start = Instant::now();
        let (source, target) = (buffer(&device, 64 << 20), buffer(&device, 64 << 20));
        let stream = device.stream("test").unwrap();
        for _ in 0..4 {
            stream.copy(&source.whole(), &target.whole()).unwrap();
        }
        stream.wait().unwrap();
        device.health().unwrap().utilisation.unwrap() * start.elapsed().as_secs_f64()
    };
    // 307 GB/s against 1.6 TB/s, and no other test uses the second.
    assert!(busy("mlu370") > 2.0 * busy("ascend910b3"));
}

#[test]
fn the_nth_allocation_fails_once() {
    let device = chip("dcu-z100", &[("oom", "2")]);
    let desc = BufferDesc::new(64, QHAL_USAGE_STAGING, Scope::Temporary, "test");
    let _first = device.alloc(&desc).unwrap();
    let error = device.alloc(&desc).unwrap_err();
    assert!(code(&error) == QHAL_RESOURCE_EXHAUSTED && error.to_string().contains("injected fault"), "{error}");
    device.alloc(&desc).unwrap();
}

#[test]
fn a_hanging_launch_is_ended_by_the_watchdog_and_seen_from_outside() {
    let device = chip("mtt-s4000", &[("hang", "2"), ("watchdog_ms", "300")]);
    let (stream, plan, memory) = (device.stream("test").unwrap(), softmax(&device, 16), buffer(&device, 8192));
    launch(&plan, &stream, &memory, 4).unwrap();
    stream.wait().unwrap();
    launch(&plan, &stream, &memory, 4).unwrap();
    assert!(!stream.wait_for(Duration::from_millis(100)).unwrap());
    assert_eq!(device.health().unwrap().state, QHAL_HEALTH_UNRESPONSIVE);
    let error = stream.wait().unwrap_err();
    assert_eq!(code(&error), QHAL_DEADLINE_EXCEEDED);
    assert_eq!(device.health().unwrap().state, QHAL_HEALTH_OK);
    // The failure sticks to the stream; another one works.
    assert!(stream.wait().is_err());
    let other = device.stream("test").unwrap();
    launch(&plan, &other, &memory, 4).unwrap();
    other.wait().unwrap();
}

#[test]
fn a_lost_device_refuses_everything() {
    let device = chip("gcu-s60", &[("lost", "1")]);
    let (stream, plan, memory) = (device.stream("test").unwrap(), softmax(&device, 16), buffer(&device, 8192));
    launch(&plan, &stream, &memory, 4).unwrap();
    assert_eq!(code(&stream.wait().unwrap_err()), QHAL_DEVICE_LOST);
    assert_eq!(device.health().unwrap().state, QHAL_HEALTH_LOST);
    let desc = BufferDesc::new(64, QHAL_USAGE_STAGING, Scope::Temporary, "test");
    assert_eq!(code(&device.alloc(&desc).unwrap_err()), QHAL_DEVICE_LOST);
    assert_eq!(code(&device.stream("test").unwrap_err()), QHAL_DEVICE_LOST);
}

#[test]
fn flipped_bits_are_silent() {
    let result = |options: &[(&str, &str)]| {
        let device = chip("bi-v100", options);
        let (stream, plan, memory) = (device.stream("test").unwrap(), softmax(&device, 16), buffer(&device, 8192));
        stream.copy_from_host(&[0; 4096], &memory.slice(0, 4096).unwrap()).unwrap();
        launch(&plan, &stream, &memory, 64).unwrap();
        let mut found = vec![0; 4096];
        stream.copy_to_host(&memory.slice(4096, 4096).unwrap(), &mut found).unwrap();
        assert_eq!(device.health().unwrap().state, QHAL_HEALTH_OK);
        found
    };
    let (right, wrong) = (result(&[]), result(&[("flip", "1")]));
    let bits: u32 = right.iter().zip(&wrong).map(|(a, b)| (a ^ b).count_ones()).sum();
    assert_eq!(bits, 1);
}

#[test]
fn chips_have_links_to_their_kind() {
    let plugin = plugin();
    let [a, b, other] =
        [("ascend910b", 0), ("ascend910b", 1), ("mlu370", 0)].map(|(name, n)| open(&plugin, name, n, &[]));
    let link = |peer: &Device| a.link(peer.info()).unwrap();
    assert_eq!((link(&a).class, link(&a).hops), (QHAL_LINK_SAME, 0));
    assert_eq!((link(&b).class, link(&other).class), (QHAL_LINK_FABRIC, QHAL_LINK_HOST_STAGED));
    assert!(link(&b).bandwidth > link(&other).bandwidth, "{:?} {:?}", link(&b), link(&other));
}
