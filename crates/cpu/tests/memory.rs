//! Memory, streams, events and refusals, through the host's side of the ABI only.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Random, alloc, bytes_of, device, download, upload};
use qwen_hal::abi::ops;
use qwen_hal::abi::{
    QHAL_FEATURE_EVENTS, QHAL_FEATURE_IMPORT_HOST, QHAL_FEATURE_INLINE, QHAL_FEATURE_MAP, QHAL_FEATURE_UNIFIED,
    QHAL_FEATURE_VMM, QHAL_HEALTH_OK, QHAL_USAGE_KV, QHAL_USAGE_WEIGHT,
};
use qwen_hal::{
    BufferDesc, Dim, HalError, Host, HostOwner, LaunchArgs, LaunchError, OpDesc, PlanOptions, Plugin, Scope,
    SerialPool, TensorDesc,
};

#[test]
fn facts_are_plausible() {
    let caps = device().caps();
    assert!(caps.has(
        QHAL_FEATURE_UNIFIED
            | QHAL_FEATURE_MAP
            | QHAL_FEATURE_IMPORT_HOST
            | QHAL_FEATURE_EVENTS
            | QHAL_FEATURE_VMM
            | QHAL_FEATURE_INLINE
    ));
    assert!(caps.memory_total.unwrap() > 64 << 20);
    assert!(caps.compute_units.unwrap() >= 1);
    assert!(caps.vmm_granularity.unwrap() >= 4096);
    assert!(caps.dtypes.iter().any(|d| d.dtype == ops::QHAL_DTYPE_F32));
    let info = device().info();
    assert!(info.fingerprint.starts_with("cpu-") && !info.name.is_empty());
    assert_eq!(device().plugin().name(), "cpu");
}

#[test]
fn block_geometry_of_the_abi_is_that_of_the_formats() {
    for dtype in qwen_formats::DType::ALL {
        if let Some((len, bytes)) = ops::dtype_block(dtype.code()) {
            assert_eq!((len as usize, bytes as usize), (dtype.block_len(), dtype.block_bytes()), "{dtype}");
        }
    }
}

#[test]
fn copies_and_fills_round_trip() {
    let stream = device().stream("s").unwrap();
    for size in [1_u64, 63, 4096, 300 << 10, 5 << 20] {
        let data: Vec<u8> = (0..size).map(|i| (i * 7 % 251) as u8).collect();
        let (a, b) = (upload(&stream, &data), alloc(size));
        assert!(download(&stream, &b, 0, size).iter().all(|byte| *byte == 0), "new memory is zero");
        stream.copy(&a.whole(), &b.whole()).unwrap();
        assert_eq!(download(&stream, &b, 0, size), data);
    }
    let b = alloc(64);
    stream.fill(&b.slice(4, 16).unwrap(), &[1, 2, 3, 4]).unwrap();
    assert_eq!(download(&stream, &b, 0, 24)[..24], [&[0; 4][..], &[1, 2, 3, 4].repeat(4), &[0; 4]].concat()[..]);
    stream.wait().unwrap();
    assert!(stream.poll().unwrap());
}

#[test]
fn wrong_arguments_are_refused_with_what_was_expected() {
    let stream = device().stream("s").unwrap();
    let a = alloc(64);
    let text = |e: HalError| e.to_string();
    assert!(text(a.slice(60, 8).unwrap_err()).contains("64 bytes"));
    assert!(text(a.slice(u64::MAX, 2).unwrap_err()).contains("within"));
    assert!(text(stream.copy(&a.slice(0, 8).unwrap(), &a.slice(4, 8).unwrap()).unwrap_err()).contains("overlap"));
    assert!(text(stream.copy(&a.slice(0, 8).unwrap(), &a.slice(16, 4).unwrap()).unwrap_err()).contains("8 bytes"));
    assert!(text(stream.copy_to_host(&a.whole(), &mut [0; 3]).unwrap_err()).contains("64 bytes"));
    assert!(text(stream.fill(&a.whole(), &[0; 3]).unwrap_err()).contains("1, 2, 4, 8 or 16"));
    assert!(text(stream.fill(&a.slice(0, 6).unwrap(), &[0; 4]).unwrap_err()).contains("divides"));
    let mut desc = BufferDesc::new(0, 0, Scope::Temporary, "none");
    assert!(text(device().alloc(&desc).unwrap_err()).contains("at least one byte"));
    desc.size = 64;
    desc.alignment = 48;
    assert!(text(device().alloc(&desc).unwrap_err()).contains("power of two"));
    assert!(text(a.commit(0, 4096).unwrap_err()).contains("reserved"));
    assert!(text(device().plugin().open(1, &[]).unwrap_err()).contains("below 1"));
}

#[test]
fn more_memory_than_the_machine_has_is_refused() {
    let total = device().caps().memory_total.unwrap();
    let error = device().alloc(&BufferDesc::new(total + 1, 0, Scope::Persistent, "huge")).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    assert!(error.to_string().contains(&total.to_string()));
    let error = device().reserve(&BufferDesc::new(1 << 62, 0, Scope::Dynamic, "huge")).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
}

#[test]
fn alignment_is_kept() {
    let stream = device().stream("s").unwrap();
    for alignment in [64, 4096, 1 << 21] {
        let mut desc = BufferDesc::new(100, 0, Scope::Temporary, "aligned");
        desc.alignment = alignment;
        let buffer = device().alloc(&desc).unwrap();
        stream.fill(&buffer.whole(), &[1]).unwrap();
    }
}

#[test]
fn used_memory_is_counted() {
    let host = Host::new(Arc::new(SerialPool));
    let device = Plugin::linked(&qwen_cpu::PLUGIN, &host).unwrap().open(0, &[]).unwrap();
    let used = || device.health().unwrap().memory_used.unwrap();
    let before = used();
    let buffer = device.alloc(&BufferDesc::new(1 << 20, 0, Scope::Persistent, "counted")).unwrap();
    assert_eq!(used() - before, 1 << 20);
    assert_eq!(device.health().unwrap().state, QHAL_HEALTH_OK);
    drop(buffer);
    assert_eq!(used(), before);
}

#[test]
fn imported_memory_is_read_in_place_never_written_and_kept_alive() {
    let stream = device().stream("s").unwrap();
    let owner: Arc<Vec<u8>> = Arc::new((0..=255).collect());
    let weak = Arc::downgrade(&owner);
    let imported: HostOwner = owner;
    let buffer = device().import_host(imported, QHAL_USAGE_WEIGHT, "file").unwrap();
    assert!(!buffer.is_writable());
    let slice = buffer.slice(100, 100).unwrap();
    drop(buffer);
    assert_eq!(download(&stream, slice.buffer(), 100, 3), [100, 101, 102]);
    let refused = stream.copy_from_host(&[0; 100], &slice).unwrap_err();
    assert!(refused.to_string().contains("read-only"), "{refused}");
    drop(slice);
    assert!(weak.upgrade().is_none());
}

#[test]
fn reserved_memory_is_usable_where_it_is_committed() {
    let stream = device().stream("s").unwrap();
    let page = device().caps().vmm_granularity.unwrap();
    let mut desc = BufferDesc::new(1 << 40, QHAL_USAGE_KV, Scope::Dynamic, "kv");
    desc.growth_hint = 1 << 30;
    let buffer = device().reserve(&desc).unwrap();
    let slice = |from: u64, pages: u64| buffer.slice(from * page, pages * page).unwrap();
    assert!(stream.fill(&slice(0, 1), &[1]).unwrap_err().to_string().contains("committed"));
    buffer.commit(0, 2 * page).unwrap();
    buffer.commit(4 * page, page).unwrap();
    assert_eq!(buffer.committed_bytes(), 3 * page);
    assert!(download(&stream, &buffer, 0, page).iter().all(|b| *b == 0));
    stream.fill(&slice(0, 2), &[7]).unwrap();
    stream.fill(&slice(4, 1), &[8]).unwrap();
    assert!(stream.fill(&slice(1, 2), &[9]).is_err(), "half committed");
    buffer.commit(0, 5 * page).unwrap();
    assert_eq!(download(&stream, &buffer, page, 1), [7], "committing again keeps the content");
    buffer.decommit(page, 2 * page).unwrap();
    assert_eq!(buffer.committed_bytes(), 3 * page);
    assert!(stream.fill(&slice(0, 2), &[9]).is_err());
    buffer.commit(page, page).unwrap();
    assert_eq!(download(&stream, &buffer, page, 1), [0], "decommitted content is lost");
    assert!(buffer.commit(1, page).unwrap_err().to_string().contains("steps of"));
    assert!(buffer.commit(1 << 40, page).is_err());
}

#[test]
fn events_order_streams() {
    let (a, b) = (device().stream("a").unwrap(), device().stream("b").unwrap());
    let event = device().event().unwrap();
    a.record(&event).unwrap();
    b.wait_event(&event).unwrap();
    assert!(event.wait_for(Duration::from_secs(1)).unwrap());
    assert!(b.wait_for(Duration::ZERO).unwrap());
}

fn dispatch_op() -> OpDesc {
    let (pairs, count) = (TensorDesc::new(ops::QHAL_DTYPE_I32, &[2.into(), 2.into()]), 4);
    OpDesc::new(ops::QHAL_OP_DISPATCH)
        .attr_int(ops::QHAL_ATTR_NUM_EXPERTS, 4)
        .input(pairs)
        .output(TensorDesc::new(ops::QHAL_DTYPE_I32, &[Dim::Fixed(count + 1)]))
        .output(pairs)
        .output(pairs)
}

#[test]
fn wrong_data_fails_the_stream_and_those_that_wait_for_it() {
    let (stream, other) = (device().stream("s").unwrap(), device().stream("o").unwrap());
    let plan = device().plan(&dispatch_op(), &PlanOptions::default()).unwrap();
    let ids = upload(&stream, &[0_i32, 1, 2, 99]);
    let outputs = [alloc(20), alloc(16), alloc(16)];
    let mut args = LaunchArgs::new(&plan);
    args.set_input(0, &ids.whole());
    for (o, buffer) in outputs.iter().enumerate() {
        args.set_output(o, &buffer.whole());
    }
    let error = plan.launch(&stream, &args).unwrap_err();
    assert!(error.to_string().contains("ids[3] is 99"), "{error}");
    assert!(error.call_error().unwrap().is_sticky());
    // Everything on the stream reports the first failure from now on.
    assert!(stream.wait().unwrap_err().to_string().contains("ids[3] is 99"));
    assert!(stream.fill(&ids.whole(), &[0]).unwrap_err().to_string().contains("ids[3] is 99"));
    let event = device().event().unwrap();
    stream.record(&event).unwrap();
    other.wait_event(&event).unwrap();
    assert!(other.wait().unwrap_err().to_string().contains("ids[3] is 99"));
    assert!(event.wait_for(Duration::ZERO).is_err());
    // A fresh stream works.
    let fresh = device().stream("f").unwrap();
    fresh.copy_from_host(&bytes_of(&[0_i32, 1, 2, 3]), &ids.whole()).unwrap();
    plan.launch(&fresh, &args).unwrap();
    fresh.wait().unwrap();
}

fn softmax_op() -> OpDesc {
    let matrix = TensorDesc::f32(&[Dim::symbol(0, 1, 8), 16.into()]);
    OpDesc::new(ops::QHAL_OP_SOFTMAX).input(matrix).output(matrix)
}

#[test]
fn launches_that_do_not_fit_the_plan_are_refused_before_anything_happens() {
    let stream = device().stream("s").unwrap();
    let plan = device().plan(&softmax_op(), &PlanOptions::default()).unwrap();
    assert_eq!(plan.symbols(), [(1, 8)]);
    assert_eq!((plan.input_bytes(0), plan.output_bytes(0)), (512, 512));
    let (x, y, small) = (alloc(512), alloc(512), alloc(128));
    let mut args = LaunchArgs::new(&plan);
    args.set_input(0, &x.whole()).set_output(0, &y.whole());
    plan.launch(&stream, &args).unwrap();
    let refused = |args: &LaunchArgs, part: &str| {
        let error = plan.launch(&stream, args).unwrap_err();
        assert!(matches!(error, LaunchError::Argument { .. }), "{error}");
        assert!(error.to_string().contains(part), "{error}");
        stream.wait().unwrap();
    };
    for value in [0, 9, -1, i64::MAX] {
        refused(args.clone().set_symbol(0, value), "1..=8");
    }
    refused(args.clone().set_output(0, &small.whole()), "512 bytes");
    refused(args.clone().clear_input(0), "a slice");
    refused(args.clone().set_input(0, &x.slice(2, 510).unwrap()), "512 bytes");
    refused(args.clone().set_symbol(0, 2).set_input(0, &x.slice(2, 400).unwrap()), "multiple of 4");
    refused(args.clone().set_input(1, &x.whole()), "number of inputs");
    refused(args.clone().set_output(0, &x.slice(0, 512).unwrap()).set_input(0, &small.whole()), "512 bytes");
    plan.launch(&stream, args.clone().set_output(0, &x.whole())).unwrap();
    refused(args.clone().set_symbol(0, 2).set_output(0, &x.slice(64, 128).unwrap()), "bytes of input 0");
    plan.launch(&stream, args.clone().set_symbol(0, 2).set_output(0, &small.whole())).unwrap();
    let host = Host::new(Arc::new(SerialPool));
    let second = Plugin::linked(&qwen_cpu::PLUGIN, &host).unwrap().open(0, &[]).unwrap();
    let foreign = second.alloc(&BufferDesc::new(512, 0, Scope::Temporary, "foreign")).unwrap();
    refused(args.clone().set_input(0, &foreign.whole()), "another device");
    assert!(plan.launch(&second.stream("s").unwrap(), &args).unwrap_err().to_string().contains("another device"));
    let owner: HostOwner = Arc::new(vec![0_u8; 512]);
    let read_only = device().import_host(owner, 0, "file").unwrap();
    refused(args.clone().set_output(0, &read_only.whole()), "read-only");
}

#[test]
fn handles_keep_their_parents_alive() {
    let host = Host::new(Arc::new(SerialPool));
    let device = Plugin::linked(&qwen_cpu::PLUGIN, &host).unwrap().open(0, &[]).unwrap();
    let (stream, plan) = (device.stream("s").unwrap(), device.plan(&softmax_op(), &PlanOptions::default()).unwrap());
    let x = device.alloc(&BufferDesc::new(512, 0, Scope::Temporary, "x")).unwrap();
    drop(device);
    let mut args = LaunchArgs::new(&plan);
    let whole = x.whole();
    args.set_input(0, &whole).set_output(0, &whole);
    drop((x, whole));
    plan.launch(&stream, &args).unwrap();
}

#[test]
fn plans_are_made_from_many_threads_while_one_launches() {
    let stream = device().stream("s").unwrap();
    let plan = device().plan(&softmax_op(), &PlanOptions::default()).unwrap();
    let x = upload(&stream, &Random(1).f32s(128));
    let mut args = LaunchArgs::new(&plan);
    args.set_input(0, &x.whole()).set_output(0, &x.whole());
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| (0..50).for_each(|_| drop(device().plan(&softmax_op(), &PlanOptions::default()).unwrap())));
        }
        (0..200).for_each(|_| plan.launch(&stream, &args).unwrap());
    });
}
