//! The table's functions for the plugin and its devices.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use qwen_hal_abi::ops::{self, dtype_block};
use qwen_hal_abi::{
    QHAL_CAPS_BUFFER_ALIGNMENT, QHAL_CAPS_CACHE_BYTES, QHAL_CAPS_COMPUTE_UNITS, QHAL_CAPS_MAX_ALLOCATION,
    QHAL_CAPS_MEMORY_TOTAL, QHAL_CAPS_SCRATCH_BYTES, QHAL_CAPS_VECTOR_WIDTH, QHAL_DTYPE_CAN_ACCUMULATE,
    QHAL_DTYPE_CAN_COMPUTE, QHAL_DTYPE_CAN_CONVERT, QHAL_DTYPE_CAN_STORE, QHAL_EXT_CMDLIST, QHAL_EXT_VARIANTS,
    QHAL_FEATURE_ASYNC_COPY, QHAL_FEATURE_CMDLIST, QHAL_FEATURE_EVENTS, QHAL_FEATURE_IMPORT_HOST, QHAL_FEATURE_UNIFIED,
    QHAL_HEALTH_OK, qhal_device, qhal_device_caps, qhal_device_id, qhal_device_info, qhal_dtype_caps, qhal_error,
    qhal_health, qhal_kv,
};

use crate::cmdlist::CMDLIST;
use crate::failure::{Failure, guard, sized, write_text};
use crate::plan::types;
use crate::plan::variants::VARIANTS;
use crate::unit::{Found, Unit, found};

/// What a `qhal_device` is.
pub(crate) struct Device {
    pub(crate) unit: Arc<Unit>,
    dtypes: Vec<qhal_dtype_caps>,
}

impl Device {
    /// The device of a handle.
    ///
    /// # Safety
    /// The handle is null or open.
    pub(crate) unsafe fn of<'a>(device: *mut qhal_device) -> Result<&'a Self, Failure> {
        // SAFETY: by the caller's promise; handles of this plugin are `Device`s.
        unsafe { device.cast::<Self>().as_ref() }.ok_or_else(|| Failure::invalid("no device, expected an open one"))
    }
}

fn at(index: u32) -> Result<&'static Found, Failure> {
    let found = found();
    found.get(index as usize).ok_or_else(|| {
        Failure::out_of_range(format!("device {index}, expected one below {}: see `qwen devices`", found.len()))
    })
}

pub(super) unsafe extern "C" fn init(_options: *const qhal_kv, _count: u32, err: *mut qhal_error) -> i32 {
    // SAFETY: the host passes null or a record.
    unsafe {
        guard(err, || {
            found();
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn shutdown(err: *mut qhal_error) -> i32 {
    // SAFETY: the host passes null or a record.
    unsafe { guard(err, || Ok(())) }
}

pub(super) unsafe extern "C" fn count(out: *mut u32, err: *mut qhal_error) -> i32 {
    // SAFETY: the host passes room for the answer.
    unsafe {
        guard(err, || {
            *out = found().len() as u32;
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn info(index: u32, out: *mut qhal_device_info, err: *mut qhal_error) -> i32 {
    // SAFETY: the host passes a record of the size that it states.
    unsafe {
        guard(err, || {
            let facts = &at(index)?.facts;
            let out = sized(out)?;
            out.kind = facts.kind;
            out.id = qhal_device_id {
                struct_size: size_of::<qhal_device_id>() as u32,
                index,
                uuid: [0; 16],
                bus_address: u64::MAX,
            };
            write_text(&mut out.name, &facts.name);
            write_text(&mut out.fingerprint, &facts.fingerprint);
            write_text(&mut out.driver, &facts.driver);
            out.memory_total = facts.memory_total;
            Ok(())
        })
    }
}

/// Arithmetic is in f32; weights of every type of the table are converted to it.
fn dtype_caps() -> Vec<qhal_dtype_caps> {
    let entry = |dtype: u32, bits: u32| qhal_dtype_caps {
        struct_size: size_of::<qhal_dtype_caps>() as u32,
        dtype,
        bits: QHAL_DTYPE_CAN_STORE | bits,
        peak_source: 0,
        peak_ops: 0.0,
    };
    let f32 = QHAL_DTYPE_CAN_CONVERT | QHAL_DTYPE_CAN_COMPUTE | QHAL_DTYPE_CAN_ACCUMULATE;
    let weights = types::WEIGHTS.iter().filter(|weight| dtype_block(weight.dtype).is_some());
    let weights = weights.map(|weight| match weight.dtype {
        ops::QHAL_DTYPE_F32 => entry(weight.dtype, f32),
        dtype => entry(dtype, QHAL_DTYPE_CAN_CONVERT),
    });
    weights.chain([entry(ops::QHAL_DTYPE_I32, 0)]).collect()
}

pub(super) unsafe extern "C" fn open(
    index: u32,
    _options: *const qhal_kv,
    _count: u32,
    out: *mut *mut qhal_device,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: the host passes room for the answer.
    unsafe {
        guard(err, || {
            let device = Device { unit: at(index)?.unit()?, dtypes: dtype_caps() };
            *out = Box::into_raw(Box::new(device)).cast();
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn close(device: *mut qhal_device, err: *mut qhal_error) -> i32 {
    // SAFETY: the host passes a device of ours, once, after its children.
    unsafe {
        guard(err, || {
            if !device.is_null() {
                drop(Box::from_raw(device.cast::<Device>()));
            }
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn caps(
    device: *mut qhal_device,
    out: *mut qhal_device_caps,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: the host passes an open device and a record of the size that it states.
    unsafe {
        guard(err, || {
            let device = Device::of(device)?;
            let facts = &device.unit.facts;
            let out = sized(out)?;
            out.valid_fields = QHAL_CAPS_MEMORY_TOTAL
                | QHAL_CAPS_MAX_ALLOCATION
                | QHAL_CAPS_BUFFER_ALIGNMENT
                | QHAL_CAPS_COMPUTE_UNITS
                | QHAL_CAPS_VECTOR_WIDTH
                | QHAL_CAPS_SCRATCH_BYTES
                | if facts.cache_bytes > 0 { QHAL_CAPS_CACHE_BYTES } else { 0 };
            out.estimated_fields = 0;
            out.kind = facts.kind;
            out.memory_total = facts.memory_total;
            out.max_allocation = facts.max_allocation;
            // Kernels take a buffer and an offset, so no slice needs more than its elements do.
            out.buffer_alignment = 1;
            out.compute_units = facts.compute_units;
            out.vector_width = (facts.tiling.vector * 4) as u32;
            // OpenCL tells of one level, the one before memory.
            out.cache_bytes = [0, 0, 0, facts.cache_bytes];
            out.scratch_bytes = facts.scratch_bytes;
            out.features = QHAL_FEATURE_ASYNC_COPY
                | QHAL_FEATURE_EVENTS
                | QHAL_FEATURE_CMDLIST
                | if facts.unified { QHAL_FEATURE_UNIFIED | QHAL_FEATURE_IMPORT_HOST } else { 0 };
            out.num_dtypes = device.dtypes.len() as u32;
            out.dtypes = device.dtypes.as_ptr();
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn health(device: *mut qhal_device, out: *mut qhal_health, err: *mut qhal_error) -> i32 {
    // SAFETY: the host passes an open device and a record of the size that it states.
    unsafe {
        guard(err, || {
            let device = Device::of(device)?;
            let out = sized(out)?;
            out.state = QHAL_HEALTH_OK;
            out.memory_used = device.unit.used.load(Ordering::Relaxed);
            out.valid_fields = 1 << 1;
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn extension(
    _device: *mut qhal_device,
    id: u32,
    version: u32,
    out: *mut *const c_void,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: the host passes room for the answer.
    unsafe {
        guard(err, || {
            *out = match id {
                QHAL_EXT_VARIANTS if version <= VARIANTS.version => (&raw const VARIANTS).cast(),
                QHAL_EXT_CMDLIST if version <= CMDLIST.version => (&raw const CMDLIST).cast(),
                _ => {
                    return Err(Failure::unsupported(format!(
                        "extension {id} version {version}, the OpenCL backend has command lists ({QHAL_EXT_CMDLIST}) and \
                         variants ({QHAL_EXT_VARIANTS}), both in version 1"
                    )));
                }
            };
            Ok(())
        })
    }
}
