//! The CPU as a device that lacks things: ops by kind, mapped weights, virtual memory, alignment to the byte.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use qwen_hal::abi::{
    LinkedPlugin, QHAL_CAPS_BUFFER_ALIGNMENT, QHAL_FEATURE_IMPORT_HOST, QHAL_FEATURE_VMM, QHAL_SUPPORT_NO,
    QHAL_UNIMPLEMENTED, qhal_device, qhal_device_caps, qhal_error, qhal_host_api, qhal_op_desc, qhal_plan,
    qhal_plan_info, qhal_plan_opts, qhal_plugin_api, qhal_status, qhal_support,
};
use qwen_hal::{Device, Host, Plugin, Pool};

/// Bit n: op kind n is refused.
static REFUSED: AtomicU32 = AtomicU32::new(0);
/// Alignment of operands.
static ALIGNMENT: AtomicU64 = AtomicU64::new(1);
static CPU: OnceLock<qhal_plugin_api> = OnceLock::new();
static TABLE: OnceLock<qhal_plugin_api> = OnceLock::new();

/// One picky device at a time; its wishes are those of the process.
static TURN: Mutex<()> = Mutex::new(());

fn cpu_table() -> &'static qhal_plugin_api {
    CPU.get().unwrap()
}

unsafe extern "C" fn query(major: u32, minor: u32, host: *const qhal_host_api) -> *const qhal_plugin_api {
    // SAFETY: the host's own arguments are passed on.
    let cpu = unsafe { *(qwen_cpu::PLUGIN.query())(major, minor, host) };
    CPU.get_or_init(|| cpu);
    TABLE.get_or_init(|| qhal_plugin_api {
        device_caps: Some(device_caps),
        query_extension: None,
        buffer_import: None,
        op_supports: Some(op_supports),
        plan_create: Some(plan_create),
        ..cpu
    })
}

unsafe extern "C" fn device_caps(
    device: *mut qhal_device,
    out: *mut qhal_device_caps,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host's own arguments are passed on; the answer is a record of the host.
    unsafe {
        let status = cpu_table().device_caps.unwrap()(device, out, err);
        (*out).features &= !(QHAL_FEATURE_IMPORT_HOST | QHAL_FEATURE_VMM);
        (*out).buffer_alignment = ALIGNMENT.load(Ordering::Relaxed);
        (*out).valid_fields |= QHAL_CAPS_BUFFER_ALIGNMENT;
        status
    }
}

fn is_refused(kind: u32) -> bool {
    REFUSED.load(Ordering::Relaxed) >> kind & 1 == 1
}

unsafe extern "C" fn op_supports(
    device: *mut qhal_device,
    desc: *const qhal_op_desc,
    out: *mut qhal_support,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host's own arguments are passed on; the answer is a record of the host.
    unsafe {
        if !is_refused((*desc).op_kind) {
            return cpu_table().op_supports.unwrap()(device, desc, out, err);
        }
        (*out).level = QHAL_SUPPORT_NO;
        (&mut (*out).reason)[..12].copy_from_slice(b"out of sorts");
    }
    0
}

unsafe extern "C" fn plan_create(
    device: *mut qhal_device,
    desc: *const qhal_op_desc,
    opts: *const qhal_plan_opts,
    out: *mut *mut qhal_plan,
    info: *mut qhal_plan_info,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host's own arguments are passed on.
    unsafe {
        match is_refused((*desc).op_kind) {
            true => QHAL_UNIMPLEMENTED,
            false => cpu_table().plan_create.unwrap()(device, desc, opts, out, info, err),
        }
    }
}

/// A device that refuses these kinds of op, as long as the guard lives.
pub(crate) fn device(refused: &[u32], alignment: u64) -> (Device, MutexGuard<'static, ()>) {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    REFUSED.store(refused.iter().fold(0, |bits, kind| bits | 1 << kind), Ordering::Relaxed);
    ALIGNMENT.store(alignment, Ordering::Relaxed);
    // SAFETY: the table is the CPU's, with entries that keep the rules.
    let plugin = unsafe { LinkedPlugin::new(qwen_cpu::PLUGIN.manifest(), query) };
    let host = Host::new(Arc::new(Pool::new(Some(2))));
    (Plugin::linked(&plugin, &host).unwrap().open(0, &[]).unwrap(), turn)
}
