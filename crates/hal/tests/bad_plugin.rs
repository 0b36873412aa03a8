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
    BufferDesc, CallError, Collective, Communicator, Device, Dim, Exchange, HalError, Host, LaunchArgs, LaunchError,
    OpDesc, Patches, PlanError, PlanOptions, Plugin, Reduction, Scope, SerialPool, Support, TensorDesc,
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

thread_local! {
    /// Tables of extensions that the plugin answers with: command lists, collectives.
    static LISTS: std::cell::Cell<*const qhal_cmdlist_api> = const { std::cell::Cell::new(null()) };
    static COLLECTIVES: std::cell::Cell<*const qhal_collectives_api> = const { std::cell::Cell::new(null()) };
    /// What was destroyed, in order.
    static DESTROYED: std::cell::RefCell<Vec<&'static str>> = const { std::cell::RefCell::new(Vec::new()) };
}

unsafe extern "C" fn extension(_: *mut qhal_device, id: u32, _: u32, out: *mut *const c_void, _: Error) -> i32 {
    unsafe { *out = if id == QHAL_EXT_CMDLIST { LISTS.get().cast() } else { COLLECTIVES.get().cast() } };
    QHAL_OK
}
unsafe extern "C" fn claims(_: *mut qhal_device, out: *mut qhal_device_caps, _: Error) -> i32 {
    unsafe { (*out).features = QHAL_FEATURE_CMDLIST | QHAL_FEATURE_COLLECTIVES };
    QHAL_OK
}
unsafe extern "C" fn safe_plan(
    _: *mut qhal_device,
    _: *const qhal_op_desc,
    _: *const qhal_plan_opts,
    out: *mut *mut qhal_plan,
    info: *mut qhal_plan_info,
    _: Error,
) -> i32 {
    unsafe {
        *out = handle();
        (*info).flags = QHAL_PLAN_CAPTURE_SAFE;
    }
    QHAL_OK
}
unsafe extern "C" fn begin(_: *mut qhal_device, out: *mut *mut qhal_cmdlist, _: Error) -> i32 {
    unsafe { *out = handle() };
    QHAL_OK
}
unsafe extern "C" fn record(_: *mut qhal_cmdlist, _: *mut qhal_plan, _: *const qhal_launch_args, _: Error) -> i32 {
    QHAL_OK
}
unsafe extern "C" fn ok_list(_: *mut qhal_cmdlist, _: Error) -> i32 {
    QHAL_OK
}
unsafe extern "C" fn replay(_: *mut qhal_cmdlist, _: *mut qhal_stream, _: *const qhal_patch, _: u32, _: Error) -> i32 {
    QHAL_OK
}
unsafe extern "C" fn destroy_list(_: *mut qhal_cmdlist, _: Error) -> i32 {
    DESTROYED.with_borrow_mut(|seen| seen.push("list"));
    QHAL_OK
}
unsafe extern "C" fn destroy_plan(_: *mut qhal_plan, _: Error) -> i32 {
    DESTROYED.with_borrow_mut(|seen| seen.push("plan"));
    QHAL_OK
}
unsafe extern "C" fn free_buffer(_: *mut qhal_buffer, _: Error) -> i32 {
    DESTROYED.with_borrow_mut(|seen| seen.push("buffer"));
    QHAL_OK
}
unsafe extern "C" fn join(_: *const qhal_comm_desc, out: *mut *mut qhal_comm, _: Error) -> i32 {
    unsafe { *out = handle() };
    QHAL_OK
}
unsafe extern "C" fn part_ways(_: *mut qhal_comm, _: Error) -> i32 {
    DESTROYED.with_borrow_mut(|seen| seen.push("communicator"));
    QHAL_OK
}
unsafe extern "C" fn exchange(
    _: *mut qhal_comm,
    _: u32,
    _: *mut qhal_stream,
    _: *const qhal_collective_desc,
    _: Error,
) -> i32 {
    QHAL_OK
}

const fn lists() -> qhal_cmdlist_api {
    qhal_cmdlist_api {
        struct_size: size_of::<qhal_cmdlist_api>() as u32,
        version: 1,
        begin: Some(begin),
        record_launch: Some(record),
        record_copy: None,
        end: Some(ok_list),
        replay: Some(replay),
        destroy: Some(destroy_list),
    }
}
const fn collectives() -> qhal_collectives_api {
    qhal_collectives_api {
        struct_size: size_of::<qhal_collectives_api>() as u32,
        version: 1,
        comm_create: Some(join),
        comm_destroy: Some(part_ways),
        supports: None,
        enqueue: Some(exchange),
    }
}

/// A device whose work is done when somebody waits, with these tables.
fn extended(lists: *const qhal_cmdlist_api, collectives: *const qhal_collectives_api) -> Device {
    LISTS.set(lists);
    COLLECTIVES.set(collectives);
    DESTROYED.take();
    device(|t| {
        t.query_extension = Some(extension);
        t.device_caps = Some(claims);
        t.plan_create = Some(safe_plan);
        t.plan_destroy = Some(destroy_plan);
        t.buffer_free = Some(free_buffer);
    })
}

fn launched(device: &Device) -> (Arc<qwen_hal::Plan>, LaunchArgs) {
    let plan = device.plan(&op(), &PlanOptions::default()).unwrap();
    // Buffers of this plugin have one handle, so that operands must be apart in one.
    let buffer = device.alloc(&BufferDesc::new(256, 0, Scope::Temporary, "xy")).unwrap();
    let mut args = LaunchArgs::new(&plan);
    args.set_input(0, &buffer.slice(0, 128).unwrap()).set_output(0, &buffer.slice(128, 128).unwrap());
    (Arc::new(plan), args)
}

const SUM: Collective =
    Collective { exchange: Exchange::AllReduce(Reduction::Sum), dtype: ops::QHAL_DTYPE_F32, count: 16 };

#[test]
fn tables_of_extensions_are_checked_and_completed() {
    // Not claimed, claimed and refused, claimed and absent.
    let error = device(|t| t.query_extension = Some(extension)).record().unwrap_err();
    assert!(error.to_string().contains("a device with command lists"), "{error}");
    let error = device(|t| t.device_caps = Some(claims)).record().unwrap_err();
    assert!(error.call_error().unwrap().is_unsupported(), "{error}");
    contract(extended(null(), null()).record().unwrap_err(), "null pointer");
    contract(Communicator::new(&[extended(null(), null())], None).unwrap_err(), "null pointer");
    // Holes answer as missing functions do.
    let holes = qhal_cmdlist_api { begin: None, ..lists() };
    let error = extended(&raw const holes, null()).record().unwrap_err();
    assert!(error.to_string().contains("cmdlist.begin is not part of this plugin"), "{error}");
    let (whole, together) = (lists(), collectives());
    let device = extended(&raw const whole, &raw const together);
    let (_, args) = launched(&device);
    let mut recorder = device.record().unwrap();
    let buffer = device.alloc(&BufferDesc::new(128, 0, Scope::Temporary, "c")).unwrap();
    let (half, other) = (buffer.slice(0, 64).unwrap(), buffer.slice(64, 64).unwrap());
    let error = recorder.copy(&half, &other).unwrap_err();
    assert!(error.call_error().unwrap().is_unsupported(), "{error}");
    let comm = Communicator::new(std::slice::from_ref(&device), None).unwrap();
    assert!(comm.supports(&SUM).unwrap_err().call_error().unwrap().is_unsupported());
    // A table that ends early, as one of an older version would.
    let mut short = lists();
    short.struct_size = offset_of!(qhal_cmdlist_api, replay) as u32;
    let device = extended(&raw const short, null());
    let mut list = device.record().unwrap().finish().unwrap();
    let error = list.replay(&device.stream("s").unwrap(), &Patches::new()).unwrap_err();
    assert!(error.to_string().contains("cmdlist.replay is not part of this plugin"), "{error}");
    drop(args);
    // Null with status OK.
    unsafe extern "C" fn nothing(_: *mut qhal_device, _: *mut *mut qhal_cmdlist, _: Error) -> i32 {
        QHAL_OK
    }
    unsafe extern "C" fn nobody(_: *const qhal_comm_desc, _: *mut *mut qhal_comm, _: Error) -> i32 {
        QHAL_OK
    }
    let (empty, alone) = (
        qhal_cmdlist_api { begin: Some(nothing), ..lists() },
        qhal_collectives_api { comm_create: Some(nobody), ..collectives() },
    );
    let device = extended(&raw const empty, &raw const alone);
    contract(device.record().unwrap_err(), "null");
    contract(Communicator::new(&[device], None).unwrap_err(), "null");
}

#[test]
fn recordings_and_patches_are_checked_by_the_host() {
    let (whole, together) = (lists(), collectives());
    let device = extended(&raw const whole, &raw const together);
    let (plan, args) = launched(&device);
    let words = |error: LaunchError| {
        assert!(matches!(error, LaunchError::Argument { .. }), "{error}");
        error.to_string()
    };
    let mut recorder = device.record().unwrap();
    let mut wrong = args.clone();
    wrong.set_symbol(0, 5);
    assert!(words(recorder.launch(&plan, &wrong).unwrap_err()).contains("1..=4"));
    assert_eq!(recorder.launch(&plan, &args).unwrap(), 0);
    let mut list = recorder.finish().unwrap();
    let stream = device.stream("s").unwrap();
    let mut refused = |patches: &Patches| words(list.replay(&stream, patches).unwrap_err());
    assert!(refused(Patches::new().symbol(0, 0, 5)).contains("1..=4"));
    assert!(refused(Patches::new().symbol(0, 1, 1)).contains("a symbol"));
    assert!(refused(Patches::new().symbol(1, 0, 1)).contains("below 1"));
    let small = device.alloc(&BufferDesc::new(4, 0, Scope::Temporary, "small")).unwrap();
    assert!(refused(Patches::new().input(0, 0, &small.whole())).contains("128 bytes"));
    list.replay(&stream, &Patches::new()).unwrap();
    // A plan that may not be recorded, and devices apart.
    let unsafe_plan = device_with_unsafe_plan();
    let error = words(device.record().unwrap().launch(&plan_of(&unsafe_plan), &args).unwrap_err());
    assert!(error.contains("another device"), "{error}");
    LISTS.set(&raw const whole);
    let error = words(unsafe_plan.record().unwrap().launch(&plan_of(&unsafe_plan), &args).unwrap_err());
    assert!(error.contains("QHAL_PLAN_CAPTURE_SAFE"), "{error}");
}

fn device_with_unsafe_plan() -> Device {
    device(|t| {
        t.query_extension = Some(extension);
        t.device_caps = Some(claims);
    })
}
fn plan_of(device: &Device) -> Arc<qwen_hal::Plan> {
    Arc::new(device.plan(&op(), &PlanOptions::default()).unwrap())
}

#[test]
fn collectives_are_checked_by_the_host() {
    let together = collectives();
    let device = extended(null(), &raw const together);
    let other = device.plugin().open(0, &[]).unwrap();
    let comm = Communicator::new(&[device.clone(), other.clone()], None).unwrap();
    let (stream, foreign) = (device.stream("s").unwrap(), other.stream("o").unwrap());
    let memory = device.alloc(&BufferDesc::new(256, 0, Scope::Temporary, "m")).unwrap();
    let (a, b) = (memory.slice(0, 64).unwrap(), memory.slice(64, 64).unwrap());
    let [whole, short, across, crooked] =
        [(0, 128), (0, 60), (32, 64), (2, 64)].map(|(offset, size)| memory.slice(offset, size).unwrap());
    let try_it = |rank, stream, collective: &Collective, src, dst| comm.enqueue(rank, stream, collective, src, dst);
    let refused = |collective: &Collective, src, dst, part: &str| {
        let error = try_it(0, &stream, collective, src, dst).unwrap_err();
        assert!(matches!(error, LaunchError::Argument { .. }) && error.to_string().contains(part), "{error}");
    };
    let of = |exchange| Collective { exchange, ..SUM };
    refused(&SUM, Some(&a), None, "target: expected 64 bytes, found none");
    refused(&SUM, Some(&a), Some(&short), "expected 64 bytes at a multiple of 4, found 60 at 0");
    refused(&SUM, Some(&a), Some(&across), "memory of its own");
    refused(&SUM, Some(&crooked), Some(&b), "found 64 at 2");
    refused(&Collective { count: 0, ..SUM }, Some(&a), Some(&b), "at least one element");
    refused(&Collective { count: u64::MAX, ..SUM }, Some(&a), Some(&b), "64 bits");
    refused(&Collective { dtype: 2, ..SUM }, Some(&a), Some(&b), "values stand alone");
    refused(&of(Exchange::AllGather), Some(&b), Some(&whole), "memory of its own");
    refused(&of(Exchange::Send { to: 0 }), Some(&a), None, "another rank below 2");
    refused(&of(Exchange::Broadcast { root: 2 }), Some(&a), Some(&b), "below 2");
    for (rank, stream) in [(0, &foreign), (2, &stream)] {
        assert!(matches!(try_it(rank, stream, &SUM, Some(&a), Some(&b)), Err(LaunchError::Argument { .. })));
    }
    // What is right passes: in place, a rank's own part, sides that the exchange does not have.
    for (collective, src, dst) in [
        (SUM, Some(&a), Some(&a)),
        (SUM, Some(&a), Some(&b)),
        (of(Exchange::AllGather), Some(&a), Some(&whole)),
        (of(Exchange::ReduceScatter(Reduction::Max)), Some(&whole), Some(&a)),
        (of(Exchange::Broadcast { root: 1 }), None, Some(&b)),
        (of(Exchange::Send { to: 1 }), Some(&a), None),
        (of(Exchange::Recv { from: 1 }), None, Some(&b)),
    ] {
        try_it(0, &stream, &collective, src, dst).unwrap();
    }
    stream.wait().unwrap();
    let error = Communicator::new(&[], None).unwrap_err();
    assert!(error.to_string().contains("1 to 4096 devices"), "{error}");
}

#[test]
fn what_pending_work_needs_is_kept_and_lists_go_before_their_plans() {
    let (whole, together) = (lists(), collectives());
    let device = extended(&raw const whole, &raw const together);
    let destroyed = || DESTROYED.with_borrow(|seen| seen.clone());
    let (plan, args) = launched(&device);
    let (stream, other) = (device.stream("s").unwrap(), device.stream("o").unwrap());
    let mut recorder = device.record().unwrap();
    recorder.launch(&plan, &args).unwrap();
    let mut list = recorder.finish().unwrap();
    list.replay(&stream, &Patches::new()).unwrap();
    drop((list, plan, args));
    assert!(destroyed().is_empty(), "{:?}", destroyed());
    stream.wait().unwrap();
    assert_eq!(destroyed(), ["list", "plan", "buffer"]);
    // A communicator goes when neither stream has a part of it.
    let memory = device.alloc(&BufferDesc::new(64, 0, Scope::Temporary, "m")).unwrap().whole();
    let comm = Communicator::new(std::slice::from_ref(&device), None).unwrap();
    for stream in [&stream, &other] {
        comm.enqueue(0, stream, &SUM, Some(&memory), Some(&memory)).unwrap();
    }
    drop(comm);
    stream.wait().unwrap();
    assert!(!destroyed().contains(&"communicator"));
    other.wait().unwrap();
    assert_eq!(destroyed().last(), Some(&"communicator"));
}
