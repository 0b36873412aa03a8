//! A plugin that simulates chips: real numbers, computed on the host as the chip would round them, in memory of its own, by
//! asynchronous streams; and time modelled from the chip's data sheet.
//!
//! In: the sheets of `qwen-chips`. Out: devices of each chip, `sim:NAME:0`, `sim:NAME:1`, as many as [`settings`] say. Everything that a device says of
//! itself is called simulated, and nothing here says how fast or how exact a real chip is. Invariants:
//! - memory of a device can be reached by copies alone; handles are numbers ([`registry`]);
//! - what the sheet lacks is refused: types, sums, sizes that the matrix unit does not take, addresses off its alignment;
//! - memory runs out and fragments as that chip's allocator would have it ([`allocator`]);
//! - work is done by a thread of the stream, after pauses by chance ([`stream`]): a missing wait or event shows;
//! - devices of a chip exchange data in order of rank ([`collective`]), and none waits for ever;
//! - the same seed gives the same pauses; results do not depend on them.
//!
//! Products in float32 and int8 and all other ops are the CPU backend's, which is opened inside ([`inner`]); what it does not have,
//! bfloat16 factors and sums in half precision, is written out here ([`narrow`]). Settings and faults: [`settings`].

mod allocator;
mod buffer;
mod clock;
mod cmdlist;
mod collective;
mod desc;
mod device;
mod fabric;
mod inner;
mod machine;
mod model;
mod narrow;
mod plan;
mod registry;
mod settings;
mod stream;

pub use machine::write_machine;
use qwen_hal_abi::*;
use qwen_hal_plugin::{Static, static_text};

static MANIFEST: Static<qhal_manifest> = Static(qhal_manifest {
    struct_size: size_of::<qhal_manifest>() as u32,
    abi_major: QHAL_ABI_MAJOR,
    abi_minor: QHAL_ABI_MINOR,
    min_host_minor: 1,
    name: static_text("sim"),
    vendor: static_text("qwen-inference"),
    version: static_text(env!("CARGO_PKG_VERSION")),
    build_id: static_text(concat!("sim-", env!("CARGO_PKG_VERSION"))),
    kind: QHAL_KIND_SIMULATED,
    sanitizer: 0,
    cpu_features: 0,
    score: 0,
    reserved: 0,
});

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
    device_link: Some(device::link),
    query_extension: Some(device::extension),
    buffer_alloc: Some(buffer::alloc),
    buffer_import: Some(buffer::import),
    buffer_free: Some(buffer::free),
    buffer_map: Some(buffer::map),
    buffer_unmap: None,
    stream_create: Some(stream::create),
    stream_destroy: Some(stream::destroy),
    stream_wait: Some(stream::wait),
    copy: Some(stream::copy),
    fill: Some(stream::fill),
    event_create: Some(stream::event_create),
    event_destroy: Some(stream::event_destroy),
    event_record: Some(stream::event_record),
    stream_wait_event: Some(stream::wait_event),
    event_wait: Some(stream::event_wait),
    op_supports: Some(plan::op_supports),
    plan_create: Some(plan::create),
    plan_prepack: Some(plan::prepack),
    plan_launch: Some(plan::launch),
    plan_destroy: Some(plan::destroy),
});

/// The manifest.
// SAFETY: the name is the ABI's, and no other symbol of this library has it.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn qhal_plugin_manifest() -> *const qhal_manifest {
    &raw const MANIFEST.0
}

/// The table, or null for a host of another major version or one that lends no compute pool.
///
/// # Safety
/// `host` is null or a table that stays valid for the life of the process.
// SAFETY: as above.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn qhal_plugin_query(
    major: u32,
    minor: u32,
    host: *const qhal_host_api,
) -> *const qhal_plugin_api {
    // SAFETY: by the caller's promise.
    match major == QHAL_ABI_MAJOR && unsafe { inner::adopt(major, minor, host) } {
        true => &raw const TABLE.0,
        false => std::ptr::null(),
    }
}

/// The plugin linked into a program, for tests and measurements.
// SAFETY: both functions keep the rules of the ABI.
pub const PLUGIN: LinkedPlugin = unsafe { LinkedPlugin::new(qhal_plugin_manifest, qhal_plugin_query) };
