//! What the host makes of plugins that lie: null handles with status OK, text without an end, absurd counts, tables with holes.
//! Each misbehaviour is one function of an otherwise working table.
#![expect(
    clippy::undocumented_unsafe_blocks,
    clippy::unwrap_used,
    clippy::needless_pass_by_value,
    reason = "the plugin's functions write only to records that the host passes; helpers are part of tests"
)]

use std::ffi::c_void;
use std::mem::{offset_of, zeroed};
use std::ptr::null;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use qwen_hal::abi::*;
use qwen_hal::{
    BufferDesc, CallError, Device, Dim, HalError, Host, LaunchArgs, LaunchError, OpDesc, PlanError, PlanOptions,
    Plugin, Scope, SerialPool, Support, TensorDesc,
};

type Error = *mut qhal_error;

/// Handles are addresses of nothing; this plugin never follows them.
fn handle<T>() -> *mut T {
    std::ptr::dangling_mut::<u64>().cast()
}

static NAME: &str = "bad";

fn manifest_value() -> qhal_manifest {
    let text = qhal_str { data: NAME.as_ptr(), len: 3 };
    qhal_manifest {
        struct_size: size_of::<qhal_manifest>() as u32,
        abi_major: QHAL_ABI_MAJOR,
        abi_minor: QHAL_ABI_MINOR,
        min_host_minor: 0,
        name: text,
        vendor: qhal_str { data: null(), len: 99 },
        version: text,
        build_id: text,
        kind: QHAL_KIND_NULL,
        sanitizer: 0,
        cpu_features: 0,
        score: 0,
        reserved: 0,
    }
}

extern "C" fn manifest() -> *const qhal_manifest {
    Box::leak(Box::new(manifest_value()))
}

unsafe extern "C" fn init(_: *const qhal_kv, _: u32, _: Error) -> i32 {
    QHAL_OK
}
unsafe extern "C" fn shutdown(_: Error) -> i32 {
    QHAL_OK
}
unsafe extern "C" fn count(out: *mut u32, _: Error) -> i32 {
    unsafe { *out = 1 };
    QHAL_OK
}
unsafe extern "C" fn info(_: u32, out: *mut qhal_device_info, _: Error) -> i32 {
    unsafe { (*out).name = [b'n'; 64] };
    QHAL_OK
}
unsafe extern "C" fn open(_: u32, _: *const qhal_kv, _: u32, out: *mut *mut qhal_device, _: Error) -> i32 {
    unsafe { *out = handle() };
    QHAL_OK
}
unsafe extern "C" fn ok_device(_: *mut qhal_device, _: Error) -> i32 {
    QHAL_OK
}
unsafe extern "C" fn caps(_: *mut qhal_device, _: *mut qhal_device_caps, _: Error) -> i32 {
    QHAL_OK
}
unsafe extern "C" fn alloc(
    _: *mut qhal_device,
    _: *const qhal_buffer_desc,
    out: *mut *mut qhal_buffer,
    _: Error,
) -> i32 {
    unsafe { *out = handle() };
    QHAL_OK
}
unsafe extern "C" fn free(_: *mut qhal_buffer, _: Error) -> i32 {
    QHAL_OK
}
unsafe extern "C" fn stream(
    _: *mut qhal_device,
    _: *const qhal_stream_desc,
    out: *mut *mut qhal_stream,
    _: Error,
) -> i32 {
    unsafe { *out = handle() };
    QHAL_OK
}
unsafe extern "C" fn ok_stream(_: *mut qhal_stream, _: Error) -> i32 {
    QHAL_OK
}
unsafe extern "C" fn wait(_: *mut qhal_stream, _: u64, _: Error) -> i32 {
    QHAL_OK
}
unsafe extern "C" fn copy(_: *mut qhal_stream, _: *const qhal_copy_desc, _: Error) -> i32 {
    QHAL_OK
}
unsafe extern "C" fn supports(_: *mut qhal_device, _: *const qhal_op_desc, out: *mut qhal_support, _: Error) -> i32 {
    unsafe { (*out).level = QHAL_SUPPORT_NATIVE };
    QHAL_OK
}
unsafe extern "C" fn plan(
    _: *mut qhal_device,
    _: *const qhal_op_desc,
    _: *const qhal_plan_opts,
    out: *mut *mut qhal_plan,
    _: *mut qhal_plan_info,
    _: Error,
) -> i32 {
    unsafe { *out = handle() };
    QHAL_OK
}
unsafe extern "C" fn launch(_: *mut qhal_plan, _: *mut qhal_stream, _: *const qhal_launch_args, _: Error) -> i32 {
    QHAL_OK
}
unsafe extern "C" fn ok_plan(_: *mut qhal_plan, _: Error) -> i32 {
    QHAL_OK
}

/// A table with every mandatory function.
fn table() -> qhal_plugin_api {
    qhal_plugin_api {
        struct_size: size_of::<qhal_plugin_api>() as u32,
        abi_minor: QHAL_ABI_MINOR,
        plugin_init: Some(init),
        plugin_shutdown: Some(shutdown),
        device_count: Some(count),
        device_info: Some(info),
        device_open: Some(open),
        device_close: Some(ok_device),
        device_caps: Some(caps),
        buffer_alloc: Some(alloc),
        buffer_free: Some(free),
        stream_create: Some(stream),
        stream_destroy: Some(ok_stream),
        stream_wait: Some(wait),
        copy: Some(copy),
        op_supports: Some(supports),
        plan_create: Some(plan),
        plan_launch: Some(launch),
        plan_destroy: Some(ok_plan),
        // SAFETY: all functions null.
        ..unsafe { zeroed() }
    }
}

thread_local! {
    /// What the next query of this thread answers.
    static TABLE: std::cell::Cell<*const qhal_plugin_api> = const { std::cell::Cell::new(null()) };
}

unsafe extern "C" fn query(_: u32, _: u32, _: *const qhal_host_api) -> *const qhal_plugin_api {
    TABLE.get()
}

fn take_in(table: *const qhal_plugin_api, manifest: qhal_plugin_manifest_fn) -> Result<Arc<Plugin>, HalError> {
    TABLE.set(table);
    // SAFETY: the functions touch only memory that they are given.
    unsafe { Plugin::from_query(manifest, query, &Host::new(Arc::new(SerialPool)), &[]) }
}

fn plugin(change: impl FnOnce(&mut qhal_plugin_api)) -> Arc<Plugin> {
    let mut table = table();
    change(&mut table);
    take_in(&raw const table, manifest).unwrap()
}

fn device(change: impl FnOnce(&mut qhal_plugin_api)) -> Device {
    plugin(change).open(0, &[]).unwrap()
}

fn op() -> OpDesc {
    let x = TensorDesc::f32(&[Dim::symbol(0, 1, 4), 8.into()]);
    OpDesc::new(ops::QHAL_OP_SOFTMAX).input(x).output(x)
}

fn contract(error: HalError, part: &str) {
    assert!(matches!(error, HalError::Contract { .. }), "{error}");
    assert!(error.to_string().contains(part), "{error}");
}

#[test]
fn manifests_are_checked() {
    unsafe extern "C" fn none() -> *const qhal_manifest {
        null()
    }
    contract(take_in(&table(), none).unwrap_err(), "null");
    unsafe extern "C" fn nameless() -> *const qhal_manifest {
        Box::leak(Box::new(qhal_manifest { name: qhal_str { data: null(), len: 0 }, ..manifest_value() }))
    }
    contract(take_in(&table(), nameless).unwrap_err(), "no name");
    unsafe extern "C" fn tiny() -> *const qhal_manifest {
        Box::leak(Box::new(qhal_manifest { struct_size: 3, ..manifest_value() }))
    }
    contract(take_in(&table(), tiny).unwrap_err(), "struct_size 3");
    unsafe extern "C" fn other_major() -> *const qhal_manifest {
        Box::leak(Box::new(qhal_manifest { abi_major: QHAL_ABI_MAJOR + 1, ..manifest_value() }))
    }
    unsafe extern "C" fn too_new() -> *const qhal_manifest {
        Box::leak(Box::new(qhal_manifest { min_host_minor: QHAL_ABI_MINOR + 1, ..manifest_value() }))
    }
    unsafe extern "C" fn odd_cpu() -> *const qhal_manifest {
        Box::leak(Box::new(qhal_manifest { cpu_features: 1 << 63, ..manifest_value() }))
    }
    for (manifest, part) in [(other_major as _, "major"), (too_new as _, "newer"), (odd_cpu as _, "CPU features")] {
        let error = take_in(&table(), manifest).unwrap_err();
        assert!(matches!(error, HalError::Refused { .. }) && error.to_string().contains(part), "{error}");
    }
    let plugin = plugin(|_| {});
    assert_eq!((plugin.name(), plugin.manifest().vendor.as_str()), ("bad", ""));
}

#[test]
fn tables_are_checked_and_completed() {
    assert!(matches!(take_in(null(), manifest).unwrap_err(), HalError::Refused { .. }));
    let mut broken = table();
    (broken.buffer_free, broken.plan_launch) = (None, None);
    contract(take_in(&raw const broken, manifest).unwrap_err(), "buffer_free, plan_launch");
    // A table of an older version ends early: what lies behind its size is not read.
    let mut short = table();
    short.struct_size = offset_of!(qhal_plugin_api, plan_destroy) as u32;
    contract(take_in(&raw const short, manifest).unwrap_err(), "plan_destroy");
    let mut silly = table();
    silly.struct_size = u32::MAX;
    contract(take_in(&raw const silly, manifest).unwrap_err(), "struct_size");

    let device = device(|_| {});
    let error = device.health().unwrap_err();
    assert!(error.call_error().unwrap().is_unsupported());
    assert!(error.to_string().contains("device_health is not part of this plugin"), "{error}");
    assert!(device.event().unwrap_err().call_error().unwrap().is_unsupported());
    // Filling is done with copies where the plugin cannot.
    let buffer = device.alloc(&BufferDesc::new(64, 0, Scope::Temporary, "b")).unwrap();
    device.stream("s").unwrap().fill(&buffer.whole(), &[1, 2]).unwrap();
}

#[test]
fn a_failed_start_is_reported_and_not_shut_down() {
    unsafe extern "C" fn fail(_: *const qhal_kv, _: u32, err: Error) -> i32 {
        unsafe { (*err).message = [b'x'; QHAL_ERROR_TEXT] };
        QHAL_UNAVAILABLE
    }
    unsafe extern "C" fn abort(_: Error) -> i32 {
        std::process::abort()
    }
    let mut table = table();
    table.plugin_init = Some(fail);
    table.plugin_shutdown = Some(abort);
    let error = take_in(&raw const table, manifest).unwrap_err();
    let HalError::Call(call) = &error else { panic!("{error}") };
    assert!(call.is_retryable() && call.message == "x".repeat(QHAL_ERROR_TEXT), "{error}");
}

#[test]
fn null_handles_with_status_ok_are_refused() {
    unsafe extern "C" fn no_device(_: u32, _: *const qhal_kv, _: u32, _: *mut *mut qhal_device, _: Error) -> i32 {
        QHAL_OK
    }
    contract(plugin(|t| t.device_open = Some(no_device)).open(0, &[]).unwrap_err(), "null");
    unsafe extern "C" fn no_buffer(
        _: *mut qhal_device,
        _: *const qhal_buffer_desc,
        _: *mut *mut qhal_buffer,
        _: Error,
    ) -> i32 {
        QHAL_OK
    }
    let desc = BufferDesc::new(64, 0, Scope::Temporary, "b");
    contract(device(|t| t.buffer_alloc = Some(no_buffer)).alloc(&desc).unwrap_err(), "null");
    unsafe extern "C" fn no_stream(
        _: *mut qhal_device,
        _: *const qhal_stream_desc,
        _: *mut *mut qhal_stream,
        _: Error,
    ) -> i32 {
        QHAL_OK
    }
    contract(device(|t| t.stream_create = Some(no_stream)).stream("s").unwrap_err(), "null");
    unsafe extern "C" fn no_plan(
        _: *mut qhal_device,
        _: *const qhal_op_desc,
        _: *const qhal_plan_opts,
        _: *mut *mut qhal_plan,
        _: *mut qhal_plan_info,
        _: Error,
    ) -> i32 {
        QHAL_OK
    }
    let error = device(|t| t.plan_create = Some(no_plan)).plan(&op(), &PlanOptions::default()).unwrap_err();
    assert!(matches!(&error, PlanError::Hal(HalError::Contract { .. })), "{error}");
}

#[test]
fn absurd_facts_are_refused() {
    unsafe extern "C" fn many(out: *mut u32, _: Error) -> i32 {
        unsafe { *out = u32::MAX };
        QHAL_OK
    }
    contract(plugin(|t| t.device_count = Some(many)).device_count().unwrap_err(), "at most");
    unsafe extern "C" fn endless(_: *mut qhal_device, out: *mut qhal_device_caps, _: Error) -> i32 {
        unsafe { (*out).num_dtypes = u32::MAX };
        QHAL_OK
    }
    contract(plugin(|t| t.device_caps = Some(endless)).open(0, &[]).unwrap_err(), "entries");
    unsafe extern "C" fn no_table(_: *mut qhal_device, out: *mut qhal_device_caps, _: Error) -> i32 {
        unsafe { (*out).num_dtypes = 3 };
        QHAL_OK
    }
    contract(plugin(|t| t.device_caps = Some(no_table)).open(0, &[]).unwrap_err(), "null");
    unsafe extern "C" fn crooked(_: *mut qhal_device, out: *mut qhal_device_caps, _: Error) -> i32 {
        unsafe {
            (*out).valid_fields = QHAL_CAPS_BUFFER_ALIGNMENT;
            (*out).buffer_alignment = 48;
        }
        QHAL_OK
    }
    contract(plugin(|t| t.device_caps = Some(crooked)).open(0, &[]).unwrap_err(), "power of two");
    unsafe extern "C" fn promised(_: *mut qhal_device, out: *mut qhal_device_caps, _: Error) -> i32 {
        unsafe { (*out).features = QHAL_FEATURE_VMM };
        QHAL_OK
    }
    unsafe extern "C" fn nothing(_: *mut qhal_device, _: u32, _: u32, _: *mut *const c_void, _: Error) -> i32 {
        QHAL_OK
    }
    let vmm = plugin(|t| {
        t.device_caps = Some(promised);
        t.query_extension = Some(nothing);
    });
    contract(vmm.open(0, &[]).unwrap_err(), "vmm");
    unsafe extern "C" fn ill(_: *mut qhal_device, out: *mut qhal_health, _: Error) -> i32 {
        unsafe { (*out).state = 77 };
        QHAL_OK
    }
    contract(device(|t| t.device_health = Some(ill)).health().unwrap_err(), "77");
    // A name without an end is cut at the end of its array.
    assert_eq!(device(|_| {}).info().name, "n".repeat(64));
}

#[test]
fn absurd_plans_are_refused_and_destroyed() {
    static DESTROYED: AtomicU32 = AtomicU32::new(0);
    unsafe extern "C" fn destroy(_: *mut qhal_plan, _: Error) -> i32 {
        DESTROYED.fetch_add(1, Ordering::SeqCst);
        QHAL_OK
    }
    macro_rules! planner {
        ($info:ident, $change:expr) => {{
            unsafe extern "C" fn create(
                _: *mut qhal_device,
                _: *const qhal_op_desc,
                _: *const qhal_plan_opts,
                out: *mut *mut qhal_plan,
                $info: *mut qhal_plan_info,
                _: Error,
            ) -> i32 {
                unsafe {
                    *out = handle();
                    let $info = &mut *$info;
                    $change;
                }
                QHAL_OK
            }
            device(|t| {
                t.plan_create = Some(create);
                t.plan_destroy = Some(destroy);
            })
        }};
    }
    let refused = [
        planner!(info, info.workspace_bytes = u64::MAX),
        planner!(info, info.workspace_alignment = 3),
        planner!(info, info.packed_bytes[0] = u64::MAX),
        planner!(info, info.packed_bytes[7] = 64),
    ];
    for (i, device) in refused.iter().enumerate() {
        let error = device.plan(&op(), &PlanOptions::default()).unwrap_err();
        assert!(matches!(&error, PlanError::Hal(HalError::Contract { .. })), "{i}: {error}");
        assert_eq!(DESTROYED.load(Ordering::SeqCst), i as u32 + 1);
    }
    let lax = planner!(info, info.flags = 0);
    let wishes = PlanOptions { required_flags: QHAL_PLAN_DETERMINISTIC, max_workspace: 0 };
    assert!(lax.plan(&op(), &wishes).unwrap_err().to_string().contains("required flags"));
    let odd = planner!(info, (info.kernel, info.flops, info.in_place) = ([b'k'; 64], f64::NAN, u64::MAX));
    let plan = odd.plan(&op(), &PlanOptions::default()).unwrap();
    assert_eq!((plan.info().kernel.len(), plan.info().flops), (64, 0.0));
}

#[test]
fn odd_answers_about_support_are_refused() {
    unsafe extern "C" fn odd(_: *mut qhal_device, _: *const qhal_op_desc, out: *mut qhal_support, _: Error) -> i32 {
        unsafe { (*out).level = 9 };
        QHAL_OK
    }
    assert!(device(|t| t.op_supports = Some(odd)).op_supports(&op()).is_err());
    unsafe extern "C" fn no(_: *mut qhal_device, _: *const qhal_op_desc, out: *mut qhal_support, _: Error) -> i32 {
        unsafe { ((*out).level, (*out).reason) = (QHAL_SUPPORT_NO, [0xff; 128]) };
        QHAL_OK
    }
    let Support::No { reason } = device(|t| t.op_supports = Some(no)).op_supports(&op()).unwrap() else { panic!() };
    assert_eq!(reason.chars().count(), 128);
}

#[test]
fn errors_say_plugin_call_op_and_code() {
    unsafe extern "C" fn fail(_: *mut qhal_plan, _: *mut qhal_stream, _: *const qhal_launch_args, err: Error) -> i32 {
        unsafe {
            (*err).op_index = 1;
            (*err).vendor_code = -7;
            (*err).flags = QHAL_ERROR_DEVICE_LOST | QHAL_ERROR_STICKY;
            (&mut (*err).message)[..5].copy_from_slice(b"burnt");
        }
        12345
    }
    let device = device(|t| t.plan_launch = Some(fail));
    let plan = device.plan(&op(), &PlanOptions::default()).unwrap();
    let buffer = device.alloc(&BufferDesc::new(256, 0, Scope::Temporary, "b")).unwrap();
    let mut args = LaunchArgs::new(&plan);
    args.set_input(0, &buffer.slice(0, 128).unwrap()).set_output(0, &buffer.slice(128, 128).unwrap());
    let LaunchError::Failed(error) = plan.launch(&device.stream("s").unwrap(), &args).unwrap_err() else { panic!() };
    assert!(error.is_device_lost() && error.is_sticky());
    let CallError { operand: Some(1), vendor_code: -7, code: 12345, .. } = &error else { panic!("{error:?}") };
    let text = "plugin bad: plan_launch (softmax), operand 1: burnt [UNKNOWN, vendor code -7]";
    assert_eq!(error.to_string(), text);
}

#[test]
fn memory_is_given_back_only_when_nothing_is_pending() {
    static FREED: AtomicU32 = AtomicU32::new(0);
    unsafe extern "C" fn count(_: *mut qhal_buffer, _: Error) -> i32 {
        FREED.fetch_add(1, Ordering::SeqCst);
        QHAL_OK
    }
    // This device is not inline: enqueued work counts as pending until the stream was waited for.
    let device = device(|t| t.buffer_free = Some(count));
    let alloc = || device.alloc(&BufferDesc::new(256, 0, Scope::Temporary, "b")).unwrap();
    let stream = device.stream("s").unwrap();
    let (a, b) = (alloc(), alloc());
    stream.copy(&a.slice(0, 64).unwrap(), &b.slice(0, 64).unwrap()).unwrap();
    drop((a, b));
    assert_eq!(FREED.load(Ordering::SeqCst), 0);
    stream.wait().unwrap();
    assert_eq!(FREED.load(Ordering::SeqCst), 2);
    drop(alloc());
    assert_eq!(FREED.load(Ordering::SeqCst), 3);
    // What is still pending when the stream goes is waited for and then given back.
    let (a, b) = (alloc(), alloc());
    stream.copy(&a.whole(), &b.whole()).unwrap();
    drop((a, b, stream));
    assert_eq!(FREED.load(Ordering::SeqCst), 5);
}

#[test]
fn a_stream_that_is_never_ready_does_not_hang_the_host() {
    unsafe extern "C" fn never(_: *mut qhal_stream, _: u64, _: Error) -> i32 {
        QHAL_NOT_READY
    }
    let device = device(|t| t.stream_wait = Some(never));
    let stream = device.stream("s").unwrap();
    assert!(!stream.poll().unwrap());
    contract(stream.wait().unwrap_err(), "NOT_READY");
}

#[test]
fn descriptions_that_contradict_themselves_reach_no_plugin() {
    unsafe extern "C" fn abort(_: *mut qhal_device, _: *const qhal_op_desc, _: *mut qhal_support, _: Error) -> i32 {
        std::process::abort()
    }
    let device = device(|t| t.op_supports = Some(abort));
    let f32 = |dims: &[Dim]| TensorDesc::f32(dims);
    let bad = [
        (f32(&[]), "1 to 8 dimensions"),
        (f32(&[Dim::Fixed(1); 9]), "1 to 8 dimensions"),
        (f32(&[Dim::Fixed(-1)]), "min <= expected"),
        (f32(&[Dim::Symbol { index: 0, min: 5, max: 4, expected: 4 }]), "min <= expected"),
        (f32(&[Dim::symbol(77, 1, 2)]), "at most 32 symbols"),
        (f32(&[Dim::Fixed(1 << 40), Dim::Fixed(1 << 40)]), "2^6"),
        (f32(&[4.into(), 8.into()]).with_row_stride(7), "stride of 8 or more"),
        (f32(&[4.into(), 8.into()]).with_strides(&[8, 2]), "innermost stride of 1"),
        (TensorDesc::new(55, &[4.into()]), "QHAL_DTYPE"),
        (TensorDesc::new(2, &[4.into(), 33.into()]), "whole blocks of 32"),
        (TensorDesc::new(2, &[4.into(), 64.into()]).with_row_stride(96), "stride of 64"),
    ];
    for (tensor, part) in bad {
        let error = device.op_supports(&op().input(tensor)).unwrap_err();
        assert!(matches!(error, PlanError::Invalid { .. }) && error.to_string().contains(part), "{part}: {error}");
    }
    let ranges = op().input(f32(&[Dim::symbol(0, 1, 5)]));
    assert!(device.op_supports(&ranges).unwrap_err().to_string().contains("one range for symbol 0"));
    let gap = op().input(f32(&[Dim::symbol(2, 1, 5)]));
    assert!(device.op_supports(&gap).unwrap_err().to_string().contains("symbol 1"));
    let absent = op().output(TensorDesc::none());
    assert!(device.op_supports(&absent).unwrap_err().to_string().contains("absent"));
    let epilogue = op().epilogue(1, Some(9), 0);
    assert!(device.op_supports(&epilogue).unwrap_err().to_string().contains("epilogue"));
}
