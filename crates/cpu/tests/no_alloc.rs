//! A launch allocates nothing: neither the host's side, nor the backend, nor the pool.

#![expect(clippy::unwrap_used, reason = "helpers are part of the test")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Random, alloc, device, packed, upload};
use qwen_hal::abi::ops;
use qwen_hal::{Buffer, Dim, LaunchArgs, OpDesc, Plan, PlanOptions, Stream, TensorDesc};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn bind(stream: &Stream, op: &OpDesc, inputs: &[Buffer]) -> (Plan, LaunchArgs) {
    let plan = device().plan(op, &PlanOptions::default()).unwrap();
    let mut args = LaunchArgs::new(&plan);
    for (i, input) in inputs.iter().enumerate() {
        args.set_input(i, &packed(&plan, stream, i, input).whole());
    }
    args.set_output(0, &alloc(plan.output_bytes(0)).whole());
    args.set_workspace(&alloc(plan.info().workspace_bytes.max(64)).whole());
    (plan, args)
}

// One test in this file: the counter belongs to the process.
#[test]
fn launches_allocate_nothing() {
    let stream = device().stream("s").unwrap();
    let mut random = Random(3);
    let t = Dim::symbol(0, 1, 64);
    let x = upload(&stream, &random.f32s(64 * 256));
    let norm = OpDesc::new(ops::QHAL_OP_NORM)
        .attr_int(ops::QHAL_ATTR_AXIS, 256)
        .attr_real(ops::QHAL_ATTR_EPS, 1e-6)
        .input(TensorDesc::f32(&[t, 256.into()]))
        .input(TensorDesc::f32(&[256.into()]))
        .output(TensorDesc::f32(&[t, 256.into()]));
    let gemm = OpDesc::new(ops::QHAL_OP_GEMM)
        .compute(ops::QHAL_COMPUTE_I8_G32)
        .input(TensorDesc::f32(&[t, 256.into()]))
        .input(TensorDesc::new(8, &[256.into(), 256.into()]))
        .output(TensorDesc::f32(&[t, 256.into()]));
    let (s, b) = (Dim::symbol(1, 1, 4), Dim::symbol(2, 1, 8));
    let attention = OpDesc::new(ops::QHAL_OP_ATTENTION)
        .attr_int(ops::QHAL_ATTR_NUM_HEADS, 4)
        .attr_int(ops::QHAL_ATTR_NUM_KV_HEADS, 2)
        .attr_int(ops::QHAL_ATTR_HEAD_DIM, 64)
        .attr_int(ops::QHAL_ATTR_VALUE_DIM, 64)
        .attr_int(ops::QHAL_ATTR_BLOCK_SIZE, 16)
        .attr_real(ops::QHAL_ATTR_SCALE, 0.125)
        .input(TensorDesc::f32(&[t, 256.into()]))
        .input(TensorDesc::f32(&[8.into(), (16 * 2 * 128).into()]))
        .input(TensorDesc::new(ops::QHAL_DTYPE_I32, &[s]))
        .input(TensorDesc::new(ops::QHAL_DTYPE_I32, &[s]))
        .input(TensorDesc::new(ops::QHAL_DTYPE_I32, &[s, b]))
        .output(TensorDesc::f32(&[t, 256.into()]));
    let weights = upload(&stream, &vec![0_u8; 256 * 256 / 32 * 34]);
    let cache = upload(&stream, &random.f32s(8 * 16 * 2 * 128));
    let paging =
        [upload(&stream, &[0_i32, 64]), upload(&stream, &[100_i32]), upload(&stream, &[0_i32, 1, 2, 3, 4, 5, 6, 7])];
    let [start, len, table] = paging;
    let scale = upload(&stream, &random.f32s(256));
    let mut launches = [
        bind(&stream, &norm, &[x.clone(), scale]),
        bind(&stream, &gemm, &[x.clone(), weights]),
        bind(&stream, &attention, &[x, cache, start, len, table]),
    ];
    let mut run = |rows: i64| {
        for (plan, args) in &mut launches {
            args.set_symbol(0, rows).set_symbol(1, 1).set_symbol(2, 8);
            plan.launch(&stream, args).unwrap();
        }
    };
    run(64);
    // Threads of the pool and of the test harness may allocate once, when they first run; a launch would every time.
    let rounds = (0..10).map(|_| {
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        (0..10).for_each(|_| run(64));
        ALLOCATIONS.load(Ordering::Relaxed) - before
    });
    assert_eq!(rounds.min(), Some(0));
}
