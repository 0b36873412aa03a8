//! What the host lends: its compute pool, as the kernels see it.

use std::any::Any;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

use qwen_hal_abi::{qhal_host_api, qhal_task_fn, qhal_user};

use super::Failure;
use crate::parallel::Parallel;

/// The table of the latest query; devices opened afterwards use it.
static HOST: AtomicPtr<qhal_host_api> = AtomicPtr::new(std::ptr::null_mut());

type ParallelFor = unsafe extern "C" fn(*mut c_void, u64, qhal_task_fn, qhal_user);

/// Remembers the host's table; false if it is unusable.
///
/// # Safety
/// `host` is null or a table that stays valid for the life of the process.
pub(crate) unsafe fn adopt(host: *const qhal_host_api) -> bool {
    // SAFETY: by the caller's promise; every version of the table has at least the size field.
    let usable = !host.is_null() && unsafe { (*host).struct_size } as usize >= size_of::<qhal_host_api>();
    // SAFETY: as above, and large enough for the field.
    if !usable || unsafe { (*host).parallel_for }.is_none() {
        return false;
    }
    HOST.store(host.cast_mut(), Ordering::Release);
    true
}

/// The host's compute pool.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostPool {
    context: *mut c_void,
    threads: usize,
    parallel_for: ParallelFor,
}

// SAFETY: the ABI lets any thread call the host's functions.
unsafe impl Send for HostPool {}
// SAFETY: as above.
unsafe impl Sync for HostPool {}

impl HostPool {
    /// The pool of the host that asked last.
    pub(crate) fn current() -> Result<Self, Failure> {
        // SAFETY: only `adopt` stores here, tables that live for ever.
        let host = unsafe { HOST.load(Ordering::Acquire).as_ref() };
        let host = host.ok_or_else(|| Failure::invalid("query the plugin before opening a device"))?;
        let parallel_for = host.parallel_for.ok_or_else(|| Failure::invalid("the host lends no parallel_for"))?;
        Ok(Self { context: host.context, threads: host.num_threads.max(1) as usize, parallel_for })
    }
}

/// A loop body on its way through the C ABI.
struct Job<'a> {
    body: &'a (dyn Fn(usize) + Sync),
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

unsafe extern "C" fn task(user: qhal_user, index: u64) {
    // SAFETY: `user` is the job of the `run` that is waiting for this task.
    let job = unsafe { &*user.cast::<Job<'_>>() };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (job.body)(index as usize))) {
        job.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
    }
}

impl Parallel for HostPool {
    fn threads(&self) -> usize {
        self.threads
    }

    fn run(&self, tasks: usize, body: &(dyn Fn(usize) + Sync)) {
        if tasks <= 1 {
            return (0..tasks).for_each(body);
        }
        let job = Job { body, panic: Mutex::new(None) };
        let user: qhal_user = (&raw const job).cast_mut().cast();
        // SAFETY: the function came from the host's table; it returns when all tasks are done, so the job outlives them.
        unsafe { (self.parallel_for)(self.context, tasks as u64, task, user) };
        if let Some(panic) = job.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(panic);
        }
    }
}
