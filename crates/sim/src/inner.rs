//! The backend that computes: the CPU's function table, opened inside as a host would. The simulator's own rounding, checks and
//! time go around it.

use std::ptr::{null, null_mut};
use std::sync::OnceLock;

use qwen_hal_abi::*;
use qwen_hal_plugin::Failure;

/// What the host lends, and the CPU's table that was queried with it.
#[derive(Clone, Copy)]
pub(crate) struct Cpu {
    pub(crate) host: &'static qhal_host_api,
    table: &'static qhal_plugin_api,
}

// SAFETY: the ABI lets any thread call both tables; they live as long as the process.
unsafe impl Send for Cpu {}
// SAFETY: as above.
unsafe impl Sync for Cpu {}

static CPU: OnceLock<Cpu> = OnceLock::new();

/// Calls an entry of the CPU's table.
macro_rules! call {
    ($cpu:expr, $entry:ident($($argument:expr),*)) => {{
        let mut err = qhal_error::default();
        match $cpu.table.$entry {
            // SAFETY: handles are the CPU's own and alive, pointers are valid for the call.
            Some(entry) => match unsafe { entry($($argument,)* &raw mut err) } {
                QHAL_OK => Ok(()),
                code => Err(Failure::of(code, &err)),
            },
            None => Err(Failure::unsupported(concat!("the CPU backend has no ", stringify!($entry)))),
        }
    }};
}

/// Remembers the host; false if it is unusable.
///
/// # Safety
/// `host` is null or a table that stays valid for the life of the process.
pub(crate) unsafe fn adopt(major: u32, minor: u32, host: *const qhal_host_api) -> bool {
    // SAFETY: by the caller's promise.
    let (table, host) = unsafe { ((qwen_cpu::PLUGIN.query())(major, minor, host).as_ref(), host.as_ref()) };
    match (table, host) {
        (Some(table), Some(host)) => {
            // The first host stays: the CPU's own devices follow the latest, which is the same one in a program.
            let _ = CPU.set(Cpu { host, table });
            true
        }
        _ => false,
    }
}

/// The CPU of the host.
pub(crate) fn cpu() -> Result<Cpu, Failure> {
    CPU.get().copied().ok_or_else(|| Failure::invalid("query the plugin before anything else"))
}

impl Cpu {
    pub(crate) fn init(self) -> Result<(), Failure> {
        call!(self, plugin_init(null(), 0))
    }

    /// Runs a body for each index on the host's pool.
    pub(crate) fn parallel_for(self, tasks: usize, body: &(dyn Fn(usize) + Sync)) {
        unsafe extern "C" fn task(user: qhal_user, index: u64) {
            // SAFETY: `user` is the body of the call that waits for this task; a panic must not cross.
            let body = unsafe { *user.cast::<&(dyn Fn(usize) + Sync)>() };
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(index as usize))).is_err() {
                // Its share of the result stays unwritten; hook and log have told why.
            }
        }
        match self.host.parallel_for {
            Some(run) if tasks > 1 => {
                let user: qhal_user = (&raw const body).cast_mut().cast();
                // SAFETY: the host's function returns when all tasks are done, so the body outlives them.
                unsafe { run(self.host.context, tasks as u64, task, user) };
            }
            _ => (0..tasks).for_each(body),
        }
    }
}

/// An open device of the CPU.
pub(crate) struct InnerDevice {
    pub(crate) cpu: Cpu,
    raw: *mut qhal_device,
}
// SAFETY: the ABI lets any thread use a device.
unsafe impl Send for InnerDevice {}
// SAFETY: as above.
unsafe impl Sync for InnerDevice {}

impl InnerDevice {
    pub(crate) fn open() -> Result<Self, Failure> {
        let cpu = cpu()?;
        let mut raw = null_mut();
        call!(cpu, device_open(0, null(), 0, &raw mut raw))?;
        Ok(Self { cpu, raw })
    }

    pub(crate) fn stream(&self) -> Result<InnerStream, Failure> {
        let name = qhal_str { data: null(), len: 0 };
        let desc = qhal_stream_desc { struct_size: size_of::<qhal_stream_desc>() as u32, priority: 0, name };
        let mut raw = null_mut();
        call!(self.cpu, stream_create(self.raw, &raw const desc, &raw mut raw))?;
        Ok(InnerStream { cpu: self.cpu, raw })
    }

    fn desc(size: u64, alignment: u64) -> qhal_buffer_desc {
        qhal_buffer_desc {
            struct_size: size_of::<qhal_buffer_desc>() as u32,
            memory: QHAL_MEMORY_DEVICE,
            size,
            alignment,
            usage: QHAL_USAGE_STAGING,
            scope: QHAL_SCOPE_PERSISTENT,
            growth_hint: 0,
            numa_node: u32::MAX,
            reserved: 0,
            name: qhal_str { data: null(), len: 0 },
        }
    }

    pub(crate) fn alloc(&self, size: u64, alignment: u64) -> Result<InnerBuffer, Failure> {
        let desc = Self::desc(size, alignment);
        let mut raw = null_mut();
        call!(self.cpu, buffer_alloc(self.raw, &raw const desc, &raw mut raw))?;
        Ok(InnerBuffer { cpu: self.cpu, raw, size })
    }

    fn vmm(&self) -> Result<&'static qhal_vmm_api, Failure> {
        let mut table = null();
        call!(self.cpu, query_extension(self.raw, QHAL_EXT_VMM, 1, &raw mut table))?;
        // SAFETY: the CPU's table of this extension, which is constant.
        unsafe { table.cast::<qhal_vmm_api>().as_ref() }.ok_or_else(|| Failure::unsupported("no virtual memory"))
    }

    pub(crate) fn reserve(&self, size: u64, alignment: u64) -> Result<InnerBuffer, Failure> {
        let desc = Self::desc(size, alignment);
        let (mut raw, mut err) = (null_mut(), qhal_error::default());
        let reserve = self.vmm()?.reserve.ok_or_else(|| Failure::unsupported("no virtual memory"))?;
        // SAFETY: the device is open, pointers are valid for the call.
        match unsafe { reserve(self.raw, &raw const desc, &raw mut raw, &raw mut err) } {
            QHAL_OK => Ok(InnerBuffer { cpu: self.cpu, raw, size }),
            code => Err(Failure::of(code, &err)),
        }
    }

    /// Backs a range of a reserved buffer with zeroed memory, or gives it back.
    pub(crate) fn back(&self, buffer: &InnerBuffer, offset: u64, size: u64, commit: bool) -> Result<(), Failure> {
        let vmm = self.vmm()?;
        let entry = if commit { vmm.commit } else { vmm.decommit };
        let entry = entry.ok_or_else(|| Failure::unsupported("no virtual memory"))?;
        let mut err = qhal_error::default();
        // SAFETY: the buffer is alive and reserved; the range was checked.
        match unsafe { entry(buffer.raw, offset, size, &raw mut err) } {
            QHAL_OK => Ok(()),
            code => Err(Failure::of(code, &err)),
        }
    }

    /// Level and reason.
    pub(crate) fn supports(&self, desc: *const qhal_op_desc) -> Result<qhal_support, Failure> {
        let mut out = qhal_support {
            struct_size: size_of::<qhal_support>() as u32,
            level: QHAL_SUPPORT_NO,
            estimated_ns: 0.0,
            estimated_bytes: 0.0,
            reason: [0; 128],
        };
        call!(self.cpu, op_supports(self.raw, desc, &raw mut out))?;
        Ok(out)
    }

    pub(crate) fn plan(
        &self,
        desc: *const qhal_op_desc,
        opts: *const qhal_plan_opts,
        info: &mut qhal_plan_info,
    ) -> Result<InnerPlan, Failure> {
        let mut raw = null_mut();
        call!(self.cpu, plan_create(self.raw, desc, opts, &raw mut raw, &raw mut *info))?;
        Ok(InnerPlan { cpu: self.cpu, raw })
    }
}

impl Drop for InnerDevice {
    fn drop(&mut self) {
        let _ = call!(self.cpu, device_close(self.raw));
    }
}

/// Memory of the CPU.
pub(crate) struct InnerBuffer {
    cpu: Cpu,
    pub(crate) raw: *mut qhal_buffer,
    size: u64,
}
// SAFETY: the ABI lets any thread use a buffer.
unsafe impl Send for InnerBuffer {}
// SAFETY: as above.
unsafe impl Sync for InnerBuffer {}

impl InnerBuffer {
    /// The first byte of a range, which has to be backed where it is used.
    pub(crate) fn address(&self, offset: u64, size: u64) -> Result<*mut u8, Failure> {
        if offset.checked_add(size).is_none_or(|end| end > self.size) {
            return Err(Failure::out_of_range(format!("{size} bytes at {offset}, the buffer has {}", self.size)));
        }
        let mut address = null_mut();
        call!(self.cpu, buffer_map(self.raw, offset, size, QHAL_ACCESS_READ | QHAL_ACCESS_WRITE, &raw mut address))?;
        Ok(address.cast())
    }
}

impl Drop for InnerBuffer {
    fn drop(&mut self) {
        let _ = call!(self.cpu, buffer_free(self.raw));
    }
}

/// A stream of the CPU, for one worker.
pub(crate) struct InnerStream {
    cpu: Cpu,
    raw: *mut qhal_stream,
}
// SAFETY: a stream may move between threads that use it one at a time; it is not Sync.
unsafe impl Send for InnerStream {}

impl Drop for InnerStream {
    fn drop(&mut self) {
        let _ = call!(self.cpu, stream_destroy(self.raw));
    }
}

/// A plan of the CPU.
pub(crate) struct InnerPlan {
    cpu: Cpu,
    raw: *mut qhal_plan,
}
// SAFETY: the ABI lets any thread use a plan.
unsafe impl Send for InnerPlan {}
// SAFETY: as above.
unsafe impl Sync for InnerPlan {}

impl InnerPlan {
    pub(crate) fn prepack(
        &self,
        stream: &InnerStream,
        input: u32,
        src: qhal_slice,
        dst: qhal_slice,
    ) -> Result<(), Failure> {
        call!(self.cpu, plan_prepack(self.raw, stream.raw, input, src, dst))
    }

    pub(crate) fn launch(&self, stream: &InnerStream, args: &qhal_launch_args) -> Result<(), Failure> {
        call!(self.cpu, plan_launch(self.raw, stream.raw, &raw const *args))
    }
}

impl Drop for InnerPlan {
    fn drop(&mut self) {
        let _ = call!(self.cpu, plan_destroy(self.raw));
    }
}
