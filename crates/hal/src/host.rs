//! What the host lends to plugins: threads, log, memory, clock, a store for tuning results.
//!
//! In: a compute pool. Out: a table that stays valid for the life of the process, because plugins are never unloaded.

use std::alloc::Layout;
use std::collections::HashMap;
use std::ffi::c_void;
use std::hash::{BuildHasher, Hasher};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use qwen_hal_abi::{qhal_host_api, qhal_str, qhal_task_fn, qhal_user};

use crate::text::copy_text;

/// Runs the tasks of kernels.
pub trait ComputePool: Send + Sync {
    /// Most tasks that run at the same time, the caller's thread included.
    fn threads(&self) -> usize;
    /// Calls `body(i)` once for each `i < tasks`, on any thread, in any order; returns when all are done.
    fn run(&self, tasks: usize, body: &(dyn Fn(usize) + Sync));
}

/// Runs tasks one after the other on the caller's thread.
#[derive(Debug, Clone, Copy, Default)]
pub struct SerialPool;

impl ComputePool for SerialPool {
    fn threads(&self) -> usize {
        1
    }
    fn run(&self, tasks: usize, body: &(dyn Fn(usize) + Sync)) {
        (0..tasks).for_each(body);
    }
}

/// Entries, key bytes and value bytes that plugins may store: a defective plugin must not fill the memory.
const TUNING_ENTRIES: usize = 1 << 16;
const TUNING_KEY: u64 = 4096;
const TUNING_VALUE: u64 = 1 << 20;

struct Context {
    pool: Arc<dyn ComputePool>,
    start: Instant,
    tuning: Mutex<HashMap<Vec<u8>, Vec<u8>>>,
}

/// The host as plugins see it. Cheap to copy; what it refers to lives until the process ends.
#[derive(Clone, Copy)]
pub struct Host {
    api: &'static qhal_host_api,
    context: &'static Context,
}

// SAFETY: the table is constant and its functions may be called from any thread; the context is Sync.
unsafe impl Send for Host {}
// SAFETY: as above.
unsafe impl Sync for Host {}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host").field("threads", &self.threads()).finish_non_exhaustive()
    }
}

impl Host {
    /// A host whose kernels run on `pool`. A process makes one; its memory is never given back.
    #[must_use]
    pub fn new(pool: Arc<dyn ComputePool>) -> Self {
        let num_threads = u32::try_from(pool.threads()).unwrap_or(u32::MAX).max(1);
        let context: &'static Context =
            Box::leak(Box::new(Context { pool, start: Instant::now(), tuning: Mutex::default() }));
        let api = Box::leak(Box::new(qhal_host_api {
            struct_size: size_of::<qhal_host_api>() as u32,
            num_threads,
            context: std::ptr::from_ref(context).cast_mut().cast(),
            log: Some(log),
            host_alloc: Some(host_alloc),
            host_free: Some(host_free),
            parallel_for: Some(parallel_for),
            tuning_get: Some(tuning_get),
            tuning_put: Some(tuning_put),
            trace_begin: Some(trace_begin),
            trace_end: Some(trace_end),
            monotonic_ns: Some(monotonic_ns),
            random_seed: Some(random_seed),
        }));
        Self { api, context }
    }

    /// The table for plugins.
    #[must_use]
    pub const fn api(&self) -> &'static qhal_host_api {
        self.api
    }

    /// Threads of the compute pool.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.context.pool.threads()
    }

    /// The compute pool.
    #[must_use]
    pub fn pool(&self) -> &Arc<dyn ComputePool> {
        &self.context.pool
    }
}

/// The context behind the first argument of every function of the table.
///
/// # Safety
/// `context` is the `context` field of a table made by [`Host::new`].
unsafe fn context<'a>(context: *mut c_void) -> &'a Context {
    // SAFETY: leaked in `Host::new`, so valid for ever, and only ever shared.
    unsafe { &*context.cast::<Context>() }
}

unsafe extern "C" fn log(_context: *mut c_void, level: u32, target: qhal_str, text: qhal_str) {
    // SAFETY: strings passed by a plugin are readable for the call.
    let (target, text) = unsafe { (copy_text(target), copy_text(text)) };
    match level {
        1 => tracing::error!(target: "qwen_hal::plugin", plugin_target = %target, "{text}"),
        2 => tracing::warn!(target: "qwen_hal::plugin", plugin_target = %target, "{text}"),
        3 => tracing::info!(target: "qwen_hal::plugin", plugin_target = %target, "{text}"),
        4 => tracing::debug!(target: "qwen_hal::plugin", plugin_target = %target, "{text}"),
        _ => tracing::trace!(target: "qwen_hal::plugin", plugin_target = %target, "{text}"),
    }
}

fn layout(bytes: u64, align: u64) -> Option<Layout> {
    let layout = Layout::from_size_align(usize::try_from(bytes).ok()?, usize::try_from(align.max(1)).ok()?).ok()?;
    (layout.size() > 0).then_some(layout)
}

unsafe extern "C" fn host_alloc(_context: *mut c_void, bytes: u64, align: u64) -> *mut c_void {
    // SAFETY: the layout's size is not zero.
    layout(bytes, align).map_or(std::ptr::null_mut(), |layout| unsafe { std::alloc::alloc(layout) }.cast())
}

unsafe extern "C" fn host_free(_context: *mut c_void, memory: *mut c_void, bytes: u64, align: u64) {
    if let (false, Some(layout)) = (memory.is_null(), layout(bytes, align)) {
        // SAFETY: by the contract, `memory` came from `host_alloc` with the same size and alignment.
        unsafe { std::alloc::dealloc(memory.cast(), layout) };
    }
}

/// A plugin's user pointer on its way to other threads.
struct User(qhal_user);
// SAFETY: the contract of `parallel_for` says that the body is called from several threads with this pointer.
unsafe impl Sync for User {}
impl User {
    const fn get(&self) -> qhal_user {
        self.0
    }
}

unsafe extern "C" fn parallel_for(ctx: *mut c_void, tasks: u64, body: qhal_task_fn, user: qhal_user) {
    // SAFETY: `ctx` is ours.
    let context = unsafe { context(ctx) };
    let user = User(user);
    // SAFETY: the plugin's body accepts its own pointer and any index below `tasks`.
    let task = |i: usize| unsafe { body(user.get(), i as u64) };
    context.pool.run(usize::try_from(tasks).unwrap_or(usize::MAX), &task);
}

/// The bytes of a key or value.
///
/// # Safety
/// Unless `data` is null, `len` bytes are readable.
unsafe fn bytes<'a>(text: qhal_str, limit: u64) -> Option<&'a [u8]> {
    if text.data.is_null() || text.len == 0 {
        return Some(&[]);
    }
    // SAFETY: readable by the caller's promise.
    (text.len <= limit).then(|| unsafe { std::slice::from_raw_parts(text.data, text.len as usize) })
}

unsafe extern "C" fn tuning_get(ctx: *mut c_void, key: qhal_str, out: *mut u8, capacity: u64) -> i64 {
    // SAFETY: `ctx` is ours, the key is readable for the call.
    let (context, key) = unsafe { (context(ctx), bytes(key, TUNING_KEY)) };
    let tuning = context.tuning.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(value) = key.and_then(|key| tuning.get(key)) else { return -1 };
    if !out.is_null() {
        let n = value.len().min(usize::try_from(capacity).unwrap_or(usize::MAX));
        // SAFETY: `out` has room for `capacity` bytes, the source for its length.
        unsafe { std::ptr::copy_nonoverlapping(value.as_ptr(), out, n) };
    }
    i64::try_from(value.len()).unwrap_or(i64::MAX)
}

unsafe extern "C" fn tuning_put(ctx: *mut c_void, key: qhal_str, value: qhal_str) {
    // SAFETY: `ctx` is ours, key and value are readable for the call.
    let (context, key, value) = unsafe { (context(ctx), bytes(key, TUNING_KEY), bytes(value, TUNING_VALUE)) };
    if let (Some(key), Some(value)) = (key, value) {
        let mut tuning = context.tuning.lock().unwrap_or_else(PoisonError::into_inner);
        if tuning.len() < TUNING_ENTRIES || tuning.contains_key(key) {
            tuning.insert(key.to_vec(), value.to_vec());
        }
    }
}

unsafe extern "C" fn trace_begin(ctx: *mut c_void, name: qhal_str) -> u64 {
    if !tracing::enabled!(target: "qwen_hal::plugin", tracing::Level::TRACE) {
        return 0;
    }
    // SAFETY: `ctx` is ours, the name is readable for the call.
    let (now, name) = unsafe { (monotonic_ns(ctx), copy_text(name)) };
    tracing::trace!(target: "qwen_hal::plugin", token = now, "{name} begins");
    now
}

unsafe extern "C" fn trace_end(ctx: *mut c_void, token: u64) {
    if token != 0 && tracing::enabled!(target: "qwen_hal::plugin", tracing::Level::TRACE) {
        // SAFETY: `ctx` is ours.
        let elapsed = unsafe { monotonic_ns(ctx) }.saturating_sub(token);
        tracing::trace!(target: "qwen_hal::plugin", token, elapsed_ns = elapsed, "ends");
    }
}

unsafe extern "C" fn monotonic_ns(ctx: *mut c_void) -> u64 {
    // SAFETY: `ctx` is ours.
    let elapsed = unsafe { context(ctx) }.start.elapsed();
    // Never zero, which means "no token".
    u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX).max(1)
}

unsafe extern "C" fn random_seed(_context: *mut c_void) -> u64 {
    std::hash::RandomState::new().build_hasher().finish()
}
