//! A plugin that accepts every op and computes nothing: what is left of a step is the host's own time.
//!
//! In: descriptions and launches. Out: OK. Memory is real and zeroed, copies and fills are done, so that a model is loaded and
//! stepped through as on any device; launches only return. Its answers are nonsense, and it fails conformance on
//! purpose: every value is wrong. It claims determinism because doing nothing is the same each time.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::c_void;
use std::ptr::NonNull;

use qwen_hal_abi::*;
use qwen_hal_plugin::cmdlist::{self, Command, Commands};
use qwen_hal_plugin::{Failure, Static, guard, static_text, write_text};

/// Buffers begin at multiples of this.
const ALIGNMENT: u64 = 64;
/// One device.
const DEVICES: u32 = 1;

const FEATURES: u64 = QHAL_FEATURE_INLINE
    | QHAL_FEATURE_IMPORT_HOST
    | QHAL_FEATURE_UNIFIED
    | QHAL_FEATURE_CMDLIST
    | QHAL_FEATURE_COLLECTIVES;

type Error = *mut qhal_error;

struct Buffer {
    bytes: NonNull<u8>,
    size: u64,
    /// Absent for imported memory, which stays its owner's.
    layout: Option<Layout>,
}

static MANIFEST: Static<qhal_manifest> = Static(qhal_manifest {
    struct_size: size_of::<qhal_manifest>() as u32,
    abi_major: QHAL_ABI_MAJOR,
    abi_minor: QHAL_ABI_MINOR,
    min_host_minor: 1,
    name: static_text("null"),
    vendor: static_text("qwen-inference"),
    version: static_text(env!("CARGO_PKG_VERSION")),
    build_id: static_text(concat!("null-", env!("CARGO_PKG_VERSION"))),
    kind: QHAL_KIND_NULL,
    sanitizer: 0,
    cpu_features: 0,
    score: 0,
    reserved: 0,
});

/// The manifest.
// SAFETY: the name is the ABI's, and no other symbol of this library has it.
#[unsafe(no_mangle)]
pub extern "C" fn qhal_plugin_manifest() -> *const qhal_manifest {
    &raw const MANIFEST.0
}

/// The table, or null for a host of another major version.
///
/// # Safety
/// As the ABI says; the host's table is not used.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub const unsafe extern "C" fn qhal_plugin_query(
    major: u32,
    _minor: u32,
    _host: *const qhal_host_api,
) -> *const qhal_plugin_api {
    if major == QHAL_ABI_MAJOR { &raw const TABLE.0 } else { std::ptr::null() }
}

/// The plugin linked into a program, for tests and measurements.
// SAFETY: both functions keep the rules of the ABI.
pub const PLUGIN: LinkedPlugin = unsafe { LinkedPlugin::new(qhal_plugin_manifest, qhal_plugin_query) };

static TABLE: Static<qhal_plugin_api> = Static(qhal_plugin_api {
    struct_size: size_of::<qhal_plugin_api>() as u32,
    abi_minor: QHAL_ABI_MINOR,
    plugin_init: Some(init),
    plugin_shutdown: Some(shutdown),
    device_count: Some(device_count),
    device_info: Some(device_info),
    device_open: Some(device_open),
    device_close: Some(device_close),
    device_caps: Some(device_caps),
    device_health: None,
    device_link: None,
    query_extension: Some(query_extension),
    buffer_alloc: Some(buffer_alloc),
    buffer_import: Some(buffer_import),
    buffer_free: Some(buffer_free),
    buffer_map: None,
    buffer_unmap: None,
    stream_create: Some(stream_create),
    stream_destroy: Some(stream_destroy),
    stream_wait: Some(stream_wait),
    copy: Some(copy),
    fill: None,
    event_create: None,
    event_destroy: None,
    event_record: None,
    stream_wait_event: None,
    event_wait: None,
    op_supports: Some(op_supports),
    plan_create: Some(plan_create),
    plan_prepack: None,
    plan_launch: Some(plan_launch),
    plan_destroy: Some(plan_destroy),
});

/// Writes a refusal and gives its code.
///
/// # Safety
/// `err` is null or a record of the size that it states.
unsafe fn refuse(err: Error, code: qhal_status, message: &'static str) -> qhal_status {
    // SAFETY: by the caller's promise.
    unsafe { guard(err, || Err(Failure::new(code, message))) }
}

/// Handles of what has no state: not null, never followed.
const fn handle<T>() -> *mut T {
    NonNull::<u64>::dangling().as_ptr().cast()
}

const unsafe extern "C" fn init(_: *const qhal_kv, _: u32, _: Error) -> qhal_status {
    QHAL_OK
}
const unsafe extern "C" fn shutdown(_: Error) -> qhal_status {
    QHAL_OK
}
unsafe extern "C" fn device_count(out: *mut u32, _: Error) -> qhal_status {
    // SAFETY: the host passes room for the answer.
    unsafe { *out = DEVICES };
    QHAL_OK
}
unsafe extern "C" fn device_info(index: u32, out: *mut qhal_device_info, err: Error) -> qhal_status {
    if index >= DEVICES {
        // SAFETY: the host passes null or a record.
        return unsafe { refuse(err, QHAL_OUT_OF_RANGE, "device index: expected 0") };
    }
    // SAFETY: the host passes a record.
    let out = unsafe { &mut *out };
    (out.kind, out.id.index) = (QHAL_KIND_NULL, index);
    write_text(&mut out.name, "Null (computes nothing)");
    write_text(&mut out.fingerprint, "null");
    QHAL_OK
}
unsafe extern "C" fn device_open(
    index: u32,
    _: *const qhal_kv,
    _: u32,
    out: *mut *mut qhal_device,
    err: Error,
) -> qhal_status {
    if index >= DEVICES {
        // SAFETY: the host passes null or a record.
        return unsafe { refuse(err, QHAL_OUT_OF_RANGE, "device index: expected 0") };
    }
    // SAFETY: the host passes room for the answer.
    unsafe { *out = handle() };
    QHAL_OK
}
const unsafe extern "C" fn device_close(_: *mut qhal_device, _: Error) -> qhal_status {
    QHAL_OK
}
unsafe extern "C" fn device_caps(_: *mut qhal_device, out: *mut qhal_device_caps, _: Error) -> qhal_status {
    // SAFETY: the host passes a record.
    let out = unsafe { &mut *out };
    (out.kind, out.features) = (QHAL_KIND_NULL, FEATURES);
    (out.valid_fields, out.buffer_alignment) = (QHAL_CAPS_BUFFER_ALIGNMENT, 1);
    QHAL_OK
}

unsafe extern "C" fn buffer_alloc(
    device: *mut qhal_device,
    desc: *const qhal_buffer_desc,
    out: *mut *mut qhal_buffer,
    err: Error,
) -> qhal_status {
    // SAFETY: the host passes a description.
    let desc = unsafe { &*desc };
    let layout = usize::try_from(desc.size).ok().zip(usize::try_from(desc.alignment.max(ALIGNMENT)).ok());
    let layout = layout.and_then(|(size, alignment)| Layout::from_size_align(size, alignment).ok());
    let Some(layout) = layout.filter(|layout| layout.size() > 0 && !device.is_null()) else {
        // SAFETY: the host passes null or a record.
        return unsafe { refuse(err, QHAL_INVALID_ARGUMENT, "buffer: expected a device, a size and an alignment") };
    };
    // SAFETY: the size is not 0.
    let Some(bytes) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
        // SAFETY: the host passes null or a record.
        return unsafe { refuse(err, QHAL_RESOURCE_EXHAUSTED, "no memory for the buffer") };
    };
    let buffer = Buffer { bytes, size: desc.size, layout: Some(layout) };
    // SAFETY: the host passes room for the answer.
    unsafe { *out = Box::into_raw(Box::new(buffer)).cast() };
    QHAL_OK
}

unsafe extern "C" fn buffer_import(
    _: *mut qhal_device,
    desc: *const qhal_import_desc,
    out: *mut *mut qhal_buffer,
    err: Error,
) -> qhal_status {
    // SAFETY: the host passes a description.
    let desc = unsafe { &*desc };
    let (Some(bytes), QHAL_IMPORT_HOST) = (NonNull::new(desc.host.cast::<u8>()), desc.kind) else {
        // SAFETY: the host passes null or a record.
        return unsafe { refuse(err, QHAL_UNIMPLEMENTED, "only host memory can be imported") };
    };
    let buffer = Buffer { bytes, size: desc.size, layout: None };
    // SAFETY: the host passes room for the answer.
    unsafe { *out = Box::into_raw(Box::new(buffer)).cast() };
    QHAL_OK
}

unsafe extern "C" fn buffer_free(buffer: *mut qhal_buffer, _: Error) -> qhal_status {
    if !buffer.is_null() {
        // SAFETY: the host passes a buffer of ours, once.
        let buffer = unsafe { Box::from_raw(buffer.cast::<Buffer>()) };
        if let Some(layout) = buffer.layout {
            // SAFETY: allocated with this layout.
            unsafe { dealloc(buffer.bytes.as_ptr(), layout) };
        }
    }
    QHAL_OK
}

unsafe extern "C" fn stream_create(
    device: *mut qhal_device,
    _: *const qhal_stream_desc,
    out: *mut *mut qhal_stream,
    err: Error,
) -> qhal_status {
    if device.is_null() {
        // SAFETY: the host passes null or a record.
        return unsafe { refuse(err, QHAL_INVALID_ARGUMENT, "device: expected an open one, found null") };
    }
    // SAFETY: the host passes room for the answer.
    unsafe { *out = handle() };
    QHAL_OK
}
const unsafe extern "C" fn stream_destroy(_: *mut qhal_stream, _: Error) -> qhal_status {
    QHAL_OK
}
unsafe extern "C" fn stream_wait(stream: *mut qhal_stream, _: u64, err: Error) -> qhal_status {
    if stream.is_null() {
        // SAFETY: the host passes null or a record.
        return unsafe { refuse(err, QHAL_INVALID_ARGUMENT, "stream: expected one, found null") };
    }
    QHAL_OK
}

/// The first byte of one side of a copy, if the range lies within its buffer.
///
/// # Safety
/// The slice's buffer is null or ours.
unsafe fn side(slice: &qhal_slice, host: *mut c_void, extent: u64) -> Option<*mut u8> {
    if !host.is_null() {
        return Some(host.cast());
    }
    // SAFETY: by the caller's promise.
    let buffer = unsafe { slice.buffer.cast::<Buffer>().as_ref() }?;
    let within = slice.size >= extent && slice.offset.checked_add(extent).is_some_and(|end| end <= buffer.size);
    // SAFETY: within the buffer.
    within.then(|| unsafe { buffer.bytes.as_ptr().add(slice.offset as usize) })
}

unsafe extern "C" fn copy(stream: *mut qhal_stream, desc: *const qhal_copy_desc, err: Error) -> qhal_status {
    // SAFETY: the host passes a description.
    let desc = unsafe { &*desc };
    let extent = |pitch: u64| (desc.rows.checked_sub(1)?).checked_mul(pitch)?.checked_add(desc.row_bytes);
    if desc.rows == 0 || desc.row_bytes == 0 {
        return QHAL_OK;
    }
    let (from, to) = (extent(desc.src_pitch), extent(desc.dst_pitch));
    // SAFETY: the host passes buffers of ours and host ranges that are valid for the copy.
    let sides = unsafe {
        let from = from.and_then(|extent| side(&desc.src, desc.src_host.cast_mut(), extent));
        from.zip(to.and_then(|extent| side(&desc.dst, desc.dst_host, extent)))
    };
    let Some((from, to)) = sides.filter(|_| !stream.is_null()) else {
        // SAFETY: the host passes null or a record.
        return unsafe { refuse(err, QHAL_OUT_OF_RANGE, "copy: expected a stream, and ranges within their buffers") };
    };
    for row in 0..desc.rows {
        let (from_at, to_at) = ((row * desc.src_pitch) as usize, (row * desc.dst_pitch) as usize);
        // SAFETY: the extents were checked.
        unsafe { from.add(from_at).copy_to(to.add(to_at), desc.row_bytes as usize) };
    }
    QHAL_OK
}

unsafe extern "C" fn op_supports(
    _: *mut qhal_device,
    _: *const qhal_op_desc,
    out: *mut qhal_support,
    _: Error,
) -> qhal_status {
    // SAFETY: the host passes a record.
    unsafe { (*out).level = QHAL_SUPPORT_NATIVE };
    QHAL_OK
}

unsafe extern "C" fn plan_create(
    _: *mut qhal_device,
    _: *const qhal_op_desc,
    _: *const qhal_plan_opts,
    out: *mut *mut qhal_plan,
    info: *mut qhal_plan_info,
    _: Error,
) -> qhal_status {
    // SAFETY: the host passes a record and room for the answer.
    let info = unsafe {
        *out = handle();
        &mut *info
    };
    info.flags = QHAL_PLAN_DETERMINISTIC | QHAL_PLAN_BATCH_INVARIANT | QHAL_PLAN_CAPTURE_SAFE;
    // Whatever shares memory, nothing is written.
    info.in_place = u64::MAX;
    write_text(&mut info.kernel, "nothing");
    QHAL_OK
}
const unsafe extern "C" fn plan_launch(
    _: *mut qhal_plan,
    _: *mut qhal_stream,
    _: *const qhal_launch_args,
    _: Error,
) -> qhal_status {
    QHAL_OK
}
const unsafe extern "C" fn plan_destroy(_: *mut qhal_plan, _: Error) -> qhal_status {
    QHAL_OK
}

/// Lists are recorded and replayed for what the recording and replaying costs.
struct Nothing;

impl Commands for Nothing {
    unsafe fn device(_: *mut qhal_device) -> Result<(), Failure> {
        Ok(())
    }
    unsafe fn check(_: &Command<'_>) -> Result<(), Failure> {
        Ok(())
    }
    unsafe fn enqueue(_: *mut qhal_stream, _: &Command<'_>) -> Result<(), Failure> {
        Ok(())
    }
}

static CMDLIST: qhal_cmdlist_api = cmdlist::table::<Nothing>();

/// Collectives move nothing and wait for nobody.
static COLLECTIVES: qhal_collectives_api = qhal_collectives_api {
    struct_size: size_of::<qhal_collectives_api>() as u32,
    version: 1,
    comm_create: Some(comm_create),
    comm_destroy: Some(comm_destroy),
    supports: Some(collective_supports),
    enqueue: Some(collective_enqueue),
};

unsafe extern "C" fn comm_create(_: *const qhal_comm_desc, out: *mut *mut qhal_comm, _: Error) -> qhal_status {
    // SAFETY: the host passes room for the answer.
    unsafe { *out = handle() };
    QHAL_OK
}
const unsafe extern "C" fn comm_destroy(_: *mut qhal_comm, _: Error) -> qhal_status {
    QHAL_OK
}
unsafe extern "C" fn collective_supports(
    _: *mut qhal_comm,
    _: *const qhal_collective_desc,
    out: *mut qhal_support,
    _: Error,
) -> qhal_status {
    // SAFETY: the host passes a record.
    unsafe { (*out).level = QHAL_SUPPORT_NATIVE };
    QHAL_OK
}
const unsafe extern "C" fn collective_enqueue(
    _: *mut qhal_comm,
    _: u32,
    _: *mut qhal_stream,
    _: *const qhal_collective_desc,
    _: Error,
) -> qhal_status {
    QHAL_OK
}

unsafe extern "C" fn query_extension(
    _: *mut qhal_device,
    id: u32,
    version: u32,
    out: *mut *const c_void,
    err: Error,
) -> qhal_status {
    let table: *const c_void = match id {
        QHAL_EXT_CMDLIST if version <= CMDLIST.version => (&raw const CMDLIST).cast(),
        QHAL_EXT_COLLECTIVES if version <= COLLECTIVES.version => (&raw const COLLECTIVES).cast(),
        // SAFETY: the host passes null or a record.
        _ => return unsafe { refuse(err, QHAL_UNIMPLEMENTED, "only command lists and collectives, in version 1") },
    };
    // SAFETY: the host passes room for the answer.
    unsafe { *out = table };
    QHAL_OK
}
