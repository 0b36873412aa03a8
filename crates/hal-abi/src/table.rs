//! The function tables: what a plugin offers, what the host offers, and the extensions.

use core::ffi::c_void;

use crate::{
    qhal_buffer, qhal_buffer_desc, qhal_copy_desc, qhal_device, qhal_device_caps, qhal_device_id, qhal_device_info,
    qhal_error, qhal_event, qhal_health, qhal_import_desc, qhal_kv, qhal_launch_args, qhal_link, qhal_manifest,
    qhal_op_desc, qhal_plan, qhal_plan_info, qhal_plan_opts, qhal_slice, qhal_status, qhal_str, qhal_stream,
    qhal_stream_desc, qhal_support, qhal_user, qhal_variant,
};

/// Exported as `qhal_plugin_manifest`: static data, no side effects, no driver call.
pub type qhal_plugin_manifest_fn = unsafe extern "C" fn() -> *const qhal_manifest;
/// Exported as `qhal_plugin_query`: (host major, host minor, host table) to table, or null when the plugin declines.
/// The host table stays valid for the life of the process.
pub type qhal_plugin_query_fn = unsafe extern "C" fn(u32, u32, *const qhal_host_api) -> *const qhal_plugin_api;

/// The two entry points of a plugin that is linked into the program instead of being loaded.
#[derive(Debug, Clone, Copy)]
pub struct LinkedPlugin {
    manifest: qhal_plugin_manifest_fn,
    query: qhal_plugin_query_fn,
}

impl LinkedPlugin {
    /// Vouches for two entry points, so that safe code may use them.
    ///
    /// # Safety
    /// Both functions keep the rules of this ABI.
    #[must_use]
    pub const unsafe fn new(manifest: qhal_plugin_manifest_fn, query: qhal_plugin_query_fn) -> Self {
        Self { manifest, query }
    }
    /// The manifest entry point.
    #[must_use]
    pub const fn manifest(&self) -> qhal_plugin_manifest_fn {
        self.manifest
    }
    /// The query entry point.
    #[must_use]
    pub const fn query(&self) -> qhal_plugin_query_fn {
        self.query
    }
}

/// Body of a parallel loop: (user, task index).
pub type qhal_task_fn = unsafe extern "C" fn(qhal_user, u64);

/// What the host offers to a plugin.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_host_api {
    /// Size of this struct.
    pub struct_size: u32,
    /// Most tasks that run at the same time in `parallel_for`, the caller's thread included.
    pub num_threads: u32,
    /// First argument of every function below.
    pub context: *mut c_void,
    /// (context, level 1 error .. 5 trace, target, text).
    pub log: Option<unsafe extern "C" fn(*mut c_void, u32, qhal_str, qhal_str)>,
    /// (context, bytes, alignment) to memory or null.
    pub host_alloc: Option<unsafe extern "C" fn(*mut c_void, u64, u64) -> *mut c_void>,
    /// (context, memory, bytes, alignment).
    pub host_free: Option<unsafe extern "C" fn(*mut c_void, *mut c_void, u64, u64)>,
    /// (context, tasks, body, user): runs the body once for each task on the host's compute pool, returns when all are
    /// done; what they wrote is visible to the caller. The body must not panic or call `parallel_for`.
    pub parallel_for: Option<unsafe extern "C" fn(*mut c_void, u64, qhal_task_fn, qhal_user)>,
    /// (context, key, out, capacity) to the value's length, -1 if there is none.
    pub tuning_get: Option<unsafe extern "C" fn(*mut c_void, qhal_str, *mut u8, u64) -> i64>,
    /// (context, key, value).
    pub tuning_put: Option<unsafe extern "C" fn(*mut c_void, qhal_str, qhal_str)>,
    /// (context, name) to a token.
    pub trace_begin: Option<unsafe extern "C" fn(*mut c_void, qhal_str) -> u64>,
    /// (context, token).
    pub trace_end: Option<unsafe extern "C" fn(*mut c_void, u64)>,
    /// Monotonic clock.
    pub monotonic_ns: Option<unsafe extern "C" fn(*mut c_void) -> u64>,
    /// Seed for whatever the plugin randomises.
    pub random_seed: Option<unsafe extern "C" fn(*mut c_void) -> u64>,
}

/// The thirty functions of a plugin. The last argument `err` of each may be null. Mandatory entries are marked (M); the
/// others may be null and are then refused or emulated by the host.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_plugin_api {
    /// Size of this struct.
    pub struct_size: u32,
    /// ABI minor that the table was built with.
    pub abi_minor: u32,
    /// (M) Once, before anything else.
    pub plugin_init: Option<unsafe extern "C" fn(*const qhal_kv, u32, *mut qhal_error) -> qhal_status>,
    /// (M) Once, after all devices are closed.
    pub plugin_shutdown: Option<unsafe extern "C" fn(*mut qhal_error) -> qhal_status>,
    /// (M) How many devices.
    pub device_count: Option<unsafe extern "C" fn(*mut u32, *mut qhal_error) -> qhal_status>,
    /// (M) Cheap facts; creates no context.
    pub device_info: Option<unsafe extern "C" fn(u32, *mut qhal_device_info, *mut qhal_error) -> qhal_status>,
    /// (M) Opens a device.
    pub device_open:
        Option<unsafe extern "C" fn(u32, *const qhal_kv, u32, *mut *mut qhal_device, *mut qhal_error) -> qhal_status>,
    /// (M) Closes it; every child is gone by then.
    pub device_close: Option<unsafe extern "C" fn(*mut qhal_device, *mut qhal_error) -> qhal_status>,
    /// (M) Constant facts.
    pub device_caps:
        Option<unsafe extern "C" fn(*mut qhal_device, *mut qhal_device_caps, *mut qhal_error) -> qhal_status>,
    /// State now; never blocks; any thread, during work.
    pub device_health: Option<unsafe extern "C" fn(*mut qhal_device, *mut qhal_health, *mut qhal_error) -> qhal_status>,
    /// Link to a peer.
    pub device_link: Option<
        unsafe extern "C" fn(*mut qhal_device, *const qhal_device_id, *mut qhal_link, *mut qhal_error) -> qhal_status,
    >,
    /// Extension table by id (`QHAL_EXT_*`) and least version; the device may be null.
    pub query_extension:
        Option<unsafe extern "C" fn(*mut qhal_device, u32, u32, *mut *const c_void, *mut qhal_error) -> qhal_status>,
    /// (M) Memory of undefined content.
    pub buffer_alloc: Option<
        unsafe extern "C" fn(
            *mut qhal_device,
            *const qhal_buffer_desc,
            *mut *mut qhal_buffer,
            *mut qhal_error,
        ) -> qhal_status,
    >,
    /// Wraps existing memory.
    pub buffer_import: Option<
        unsafe extern "C" fn(
            *mut qhal_device,
            *const qhal_import_desc,
            *mut *mut qhal_buffer,
            *mut qhal_error,
        ) -> qhal_status,
    >,
    /// (M) The caller has proved that it is idle.
    pub buffer_free: Option<unsafe extern "C" fn(*mut qhal_buffer, *mut qhal_error) -> qhal_status>,
    /// (buffer, offset, length, access) to a host address.
    pub buffer_map:
        Option<unsafe extern "C" fn(*mut qhal_buffer, u64, u64, u32, *mut *mut c_void, *mut qhal_error) -> qhal_status>,
    /// Ends the mapping.
    pub buffer_unmap: Option<unsafe extern "C" fn(*mut qhal_buffer, *mut qhal_error) -> qhal_status>,
    /// (M) A queue.
    pub stream_create: Option<
        unsafe extern "C" fn(
            *mut qhal_device,
            *const qhal_stream_desc,
            *mut *mut qhal_stream,
            *mut qhal_error,
        ) -> qhal_status,
    >,
    /// (M) Destroys an idle queue.
    pub stream_destroy: Option<unsafe extern "C" fn(*mut qhal_stream, *mut qhal_error) -> qhal_status>,
    /// (M) Waits up to so many nanoseconds, 0 polls; OK, NOT_READY, or the stream's first error.
    pub stream_wait: Option<unsafe extern "C" fn(*mut qhal_stream, u64, *mut qhal_error) -> qhal_status>,
    /// (M) Enqueues a copy.
    pub copy: Option<unsafe extern "C" fn(*mut qhal_stream, *const qhal_copy_desc, *mut qhal_error) -> qhal_status>,
    /// Enqueues a fill with a pattern of 1, 2, 4, 8 or 16 bytes.
    pub fill:
        Option<unsafe extern "C" fn(*mut qhal_stream, qhal_slice, *const c_void, u32, *mut qhal_error) -> qhal_status>,
    /// A marker.
    pub event_create:
        Option<unsafe extern "C" fn(*mut qhal_device, u32, *mut *mut qhal_event, *mut qhal_error) -> qhal_status>,
    /// Destroys it.
    pub event_destroy: Option<unsafe extern "C" fn(*mut qhal_event, *mut qhal_error) -> qhal_status>,
    /// Marks the work enqueued so far.
    pub event_record: Option<unsafe extern "C" fn(*mut qhal_stream, *mut qhal_event, *mut qhal_error) -> qhal_status>,
    /// Later work on the stream waits for the event and inherits its failure.
    pub stream_wait_event:
        Option<unsafe extern "C" fn(*mut qhal_stream, *mut qhal_event, *mut qhal_error) -> qhal_status>,
    /// The host waits; as `stream_wait`.
    pub event_wait: Option<unsafe extern "C" fn(*mut qhal_event, u64, *mut qhal_error) -> qhal_status>,
    /// (M) Pure and fast; allocates nothing on the device. OK with level NO and a reason if `plan_create` would refuse.
    pub op_supports: Option<
        unsafe extern "C" fn(*mut qhal_device, *const qhal_op_desc, *mut qhal_support, *mut qhal_error) -> qhal_status,
    >,
    /// (M) Prepares an op for ranges of shapes.
    pub plan_create: Option<
        unsafe extern "C" fn(
            *mut qhal_device,
            *const qhal_op_desc,
            *const qhal_plan_opts,
            *mut *mut qhal_plan,
            *mut qhal_plan_info,
            *mut qhal_error,
        ) -> qhal_status,
    >,
    /// One-time layout of a weight: (plan, stream, input index, source as in the file, target of `packed_bytes`).
    pub plan_prepack: Option<
        unsafe extern "C" fn(
            *mut qhal_plan,
            *mut qhal_stream,
            u32,
            qhal_slice,
            qhal_slice,
            *mut qhal_error,
        ) -> qhal_status,
    >,
    /// (M) Enqueues the op.
    pub plan_launch: Option<
        unsafe extern "C" fn(*mut qhal_plan, *mut qhal_stream, *const qhal_launch_args, *mut qhal_error) -> qhal_status,
    >,
    /// (M) Destroys an idle plan.
    pub plan_destroy: Option<unsafe extern "C" fn(*mut qhal_plan, *mut qhal_error) -> qhal_status>,
}

/// Extension id of [`qhal_vmm_api`].
pub const QHAL_EXT_VMM: u32 = 1;
/// Extension id of [`crate::qhal_cmdlist_api`].
pub const QHAL_EXT_CMDLIST: u32 = 2;
/// Extension id of [`crate::qhal_collectives_api`].
pub const QHAL_EXT_COLLECTIVES: u32 = 3;
/// Extension id of regions: sub-graphs planned as one. Reserved; no table is defined, and nothing may be claimed.
pub const QHAL_EXT_REGION: u32 = 4;
/// Extension id of profiling.
pub const QHAL_EXT_PROFILING: u32 = 5;
/// Extension id of partitions.
pub const QHAL_EXT_PARTITION: u32 = 6;
/// Extension id of [`qhal_variants_api`].
pub const QHAL_EXT_VARIANTS: u32 = 7;

/// Extension `vmm`: address space first, memory later. A reserved buffer is used like any other where it is committed,
/// and freed with `buffer_free`. Offsets and lengths are multiples of `vmm_granularity`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_vmm_api {
    /// Size of this struct.
    pub struct_size: u32,
    /// Version of the extension.
    pub version: u32,
    /// Reserves `desc.size` bytes of addresses.
    pub reserve: Option<
        unsafe extern "C" fn(
            *mut qhal_device,
            *const qhal_buffer_desc,
            *mut *mut qhal_buffer,
            *mut qhal_error,
        ) -> qhal_status,
    >,
    /// Backs (offset, length) with zeroed memory.
    pub commit: Option<unsafe extern "C" fn(*mut qhal_buffer, u64, u64, *mut qhal_error) -> qhal_status>,
    /// Gives the memory of (offset, length) back.
    pub decommit: Option<unsafe extern "C" fn(*mut qhal_buffer, u64, u64, *mut qhal_error) -> qhal_status>,
}

/// Extension `variants`: which kernels a plan takes for which sizes, which others it could take, and plans that take those.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_variants_api {
    /// Size of this struct.
    pub struct_size: u32,
    /// Version of the extension.
    pub version: u32,
    /// Variant number `index` of a plan: those that are taken first, then those that could be. OUT_OF_RANGE behind the last.
    pub plan_variant:
        Option<unsafe extern "C" fn(*mut qhal_plan, u32, *mut qhal_variant, *mut qhal_error) -> qhal_status>,
    /// As `plan_create`, with the variant of this name wherever it applies; UNIMPLEMENTED if the op has no such variant.
    pub plan_create_as: Option<
        unsafe extern "C" fn(
            *mut qhal_device,
            *const qhal_op_desc,
            *const qhal_plan_opts,
            qhal_str,
            *mut *mut qhal_plan,
            *mut qhal_plan_info,
            *mut qhal_error,
        ) -> qhal_status,
    >,
}
