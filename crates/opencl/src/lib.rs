//! A backend for OpenCL 1.2 and later, as a plugin: `libhal_opencl.so`.
//!
//! In: calls through the C ABI. Out: statuses; results in buffers of the device. `libOpenCL` is opened when the plugin is initialised;
//! without it, or without a device, there are 0 devices. Each entry is guarded, so a panic becomes INTERNAL and never crosses the
//! boundary.
//!
//! A description becomes a `Recipe`: which kernels run with which arguments and sizes, as data. `op_supports` stops
//! there; `plan_create` builds the programs (kept in [`program`], on disk in [`cache`]); a launch binds and enqueues. Kernels are in
//! `kernels/*.cl`. Products are in float32; each value of a result is summed in an order that depends on its inner dimension only, so
//! bits do not depend on other rows, nor on how many work-items share a row of weights.

mod buffer;
mod cache;
mod cmdlist;
mod device;
mod failure;
mod host;
mod plan;
mod program;
#[cfg(test)]
mod seeded;
mod stream;
mod unit;

use qwen_hal_abi::{
    LinkedPlugin, QHAL_ABI_MAJOR, QHAL_ABI_MINOR, QHAL_KIND_GPU, qhal_host_api, qhal_manifest, qhal_plugin_api,
};
use qwen_hal_plugin::{Static, static_text};

static MANIFEST: Static<qhal_manifest> = Static(qhal_manifest {
    struct_size: size_of::<qhal_manifest>() as u32,
    abi_major: QHAL_ABI_MAJOR,
    abi_minor: QHAL_ABI_MINOR,
    min_host_minor: 1,
    name: static_text("opencl"),
    vendor: static_text("qwen-inference"),
    version: static_text(env!("CARGO_PKG_VERSION")),
    build_id: static_text(concat!("opencl-", env!("CARGO_PKG_VERSION"))),
    // What most OpenCL devices are; each device says its own kind.
    kind: QHAL_KIND_GPU,
    sanitizer: 0,
    cpu_features: 0,
    score: 1,
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
/// `host` is null or a table that stays valid for the life of the process.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qhal_plugin_query(
    major: u32,
    _minor: u32,
    host: *const qhal_host_api,
) -> *const qhal_plugin_api {
    if major != QHAL_ABI_MAJOR {
        return std::ptr::null();
    }
    // SAFETY: by the caller's promise.
    unsafe { host::adopt(host) };
    &raw const TABLE.0
}

/// The plugin linked into a program, for tests.
// SAFETY: both functions keep the rules of the ABI.
pub const PLUGIN: LinkedPlugin = unsafe { LinkedPlugin::new(qhal_plugin_manifest, qhal_plugin_query) };

static TABLE: Static<qhal_plugin_api> = Static(qhal_plugin_api {
    struct_size: size_of::<qhal_plugin_api>() as u32,
    abi_minor: QHAL_ABI_MINOR,
    plugin_init: Some(device::init),
    plugin_shutdown: Some(device::shutdown),
    device_count: Some(device::count),
    device_info: Some(device::info),
    device_open: Some(device::open),
    device_close: Some(device::close),
    device_caps: Some(device::caps),
    device_health: Some(device::health),
    device_link: None,
    query_extension: Some(device::extension),
    buffer_alloc: Some(buffer::alloc),
    buffer_import: Some(buffer::import),
    buffer_free: Some(buffer::free),
    buffer_map: None,
    buffer_unmap: None,
    stream_create: Some(stream::create),
    stream_destroy: Some(stream::destroy),
    stream_wait: Some(stream::wait),
    copy: Some(stream::copy),
    fill: Some(stream::fill),
    event_create: Some(stream::event::create),
    event_destroy: Some(stream::event::destroy),
    event_record: Some(stream::event::record),
    stream_wait_event: Some(stream::event::wait_on_stream),
    event_wait: Some(stream::event::wait),
    op_supports: Some(plan::entry::op_supports),
    plan_create: Some(plan::entry::create),
    plan_prepack: Some(plan::entry::prepack),
    plan_launch: Some(plan::entry::launch),
    plan_destroy: Some(plan::entry::destroy),
});
