//! Buffers: allocation, and import of host memory on devices that read it where it lies.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use opencl3::memory::{Buffer as Memory, CL_MEM_READ_ONLY, CL_MEM_READ_WRITE, CL_MEM_USE_HOST_PTR, ClMem};
use opencl3::types::cl_mem;
use qwen_hal_abi::{
    QHAL_ACCESS_WRITE, QHAL_IMPORT_HOST, qhal_buffer, qhal_buffer_desc, qhal_device, qhal_error, qhal_import_desc,
    qhal_slice,
};

use crate::device::Device;
use crate::failure::{Failure, guard, reported, sized_ref};
use crate::unit::Unit;

/// What a `qhal_buffer` is.
pub(crate) struct Buffer {
    pub(crate) unit: Arc<Unit>,
    memory: Memory<u8>,
    size: u64,
    writable: bool,
    /// Bytes that this buffer counts for in the device's use.
    counted: u64,
}

// SAFETY: a memory object without an owner thread; who may write it when is the host's duty.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    fn create(unit: &Arc<Unit>, desc: &qhal_buffer_desc) -> Result<Self, Failure> {
        let limit = unit.facts.max_allocation;
        let size = usize::try_from(desc.size).ok().filter(|_| (1..=limit).contains(&desc.size));
        let Some(size) = size else {
            let message = format!("a buffer of {} bytes, expected 1 to {limit} on this device", desc.size);
            return Err(if desc.size == 0 { Failure::invalid(message) } else { Failure::out_of_memory(message) });
        };
        // SAFETY: no host memory is given.
        let memory = unsafe { Memory::create(&unit.context, CL_MEM_READ_WRITE, size, std::ptr::null_mut()) };
        let memory = memory.map_err(|error| reported("clCreateBuffer", error))?;
        unit.used.fetch_add(desc.size, Ordering::Relaxed);
        Ok(Self { unit: Arc::clone(unit), memory, size: desc.size, writable: true, counted: desc.size })
    }

    /// # Safety
    /// The host keeps the range valid and, if it is read-only, unchanged until the buffer is freed.
    unsafe fn import(unit: &Arc<Unit>, desc: &qhal_import_desc) -> Result<Self, Failure> {
        if desc.kind != QHAL_IMPORT_HOST || !unit.facts.unified {
            return Err(Failure::unsupported("import: only of host memory, on a device that reads it where it lies"));
        }
        let size = usize::try_from(desc.size).ok().filter(|size| *size > 0 && !desc.host.is_null());
        let size = size.ok_or_else(|| Failure::invalid("import: expected an address and at least one byte"))?;
        let writable = desc.access & QHAL_ACCESS_WRITE != 0;
        let flags = CL_MEM_USE_HOST_PTR | if writable { CL_MEM_READ_WRITE } else { CL_MEM_READ_ONLY };
        // SAFETY: by the caller's promise.
        let memory = unsafe { Memory::create(&unit.context, flags, size, desc.host.cast::<c_void>()) };
        let memory = memory.map_err(|error| reported("clCreateBuffer", error))?;
        Ok(Self { unit: Arc::clone(unit), memory, size: desc.size, writable, counted: 0 })
    }

    pub(crate) fn memory(&self) -> cl_mem {
        self.memory.get()
    }

    /// Refuses a range that does not lie within the buffer, or may not be written.
    pub(crate) fn check(&self, offset: u64, size: u64, write: bool) -> Result<(), Failure> {
        if write && !self.writable {
            return Err(Failure::invalid("the buffer is read-only, expected a writable one"));
        }
        if offset.checked_add(size).is_none_or(|end| end > self.size) {
            let has = self.size;
            return Err(Failure::out_of_range(format!("{size} bytes at {offset}, the buffer has {has}")));
        }
        Ok(())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.unit.used.fetch_sub(self.counted, Ordering::Relaxed);
    }
}

/// The device of a slice's buffer.
///
/// # Safety
/// The buffer is null or alive.
pub(crate) unsafe fn unit_of<'a>(slice: &qhal_slice) -> Result<&'a Arc<Unit>, Failure> {
    // SAFETY: by the caller's promise; handles of this plugin are `Buffer`s.
    let buffer = unsafe { slice.buffer.cast::<Buffer>().as_ref() };
    buffer.map(|buffer| &buffer.unit).ok_or_else(|| Failure::invalid("no buffer, expected one"))
}

/// The buffer of a slice of which `bytes` are used, on the given device.
///
/// # Safety
/// The slice's buffer is null or alive.
pub(crate) unsafe fn of_slice<'a>(
    slice: &qhal_slice,
    bytes: u64,
    write: bool,
    unit: &Arc<Unit>,
) -> Result<&'a Buffer, Failure> {
    // SAFETY: by the caller's promise; handles of this plugin are `Buffer`s.
    let buffer = unsafe { slice.buffer.cast::<Buffer>().as_ref() };
    let buffer = buffer.ok_or_else(|| Failure::invalid("no buffer, expected one"))?;
    if slice.size < bytes {
        return Err(Failure::out_of_range(format!("a slice of {} bytes, expected {bytes}", slice.size)));
    }
    if !Arc::ptr_eq(&buffer.unit, unit) {
        return Err(Failure::invalid("a buffer of another device, expected one of the stream's"));
    }
    buffer.check(slice.offset, bytes, write)?;
    Ok(buffer)
}

pub(super) unsafe extern "C" fn alloc(
    device: *mut qhal_device,
    desc: *const qhal_buffer_desc,
    out: *mut *mut qhal_buffer,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: the host passes an open device, a description, room for the answer, and null or a record.
    unsafe {
        guard(err, || {
            let device = Device::of(device)?;
            let buffer = Buffer::create(&device.unit, sized_ref(desc)?)?;
            *out = Box::into_raw(Box::new(buffer)).cast();
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn import(
    device: *mut qhal_device,
    desc: *const qhal_import_desc,
    out: *mut *mut qhal_buffer,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: as `alloc`; the host keeps imported memory.
    unsafe {
        guard(err, || {
            let device = Device::of(device)?;
            let buffer = Buffer::import(&device.unit, sized_ref(desc)?)?;
            *out = Box::into_raw(Box::new(buffer)).cast();
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn free(buffer: *mut qhal_buffer, err: *mut qhal_error) -> i32 {
    // SAFETY: the host passes a buffer of ours, once, when nobody uses it.
    unsafe {
        guard(err, || {
            if !buffer.is_null() {
                drop(Box::from_raw(buffer.cast::<Buffer>()));
            }
            Ok(())
        })
    }
}
