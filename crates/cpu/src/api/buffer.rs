//! Buffers: allocation, import, mapping, and the `vmm` extension.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use qwen_hal_abi::{
    QHAL_ACCESS_WRITE, QHAL_IMPORT_HOST, qhal_buffer, qhal_buffer_desc, qhal_import_desc, qhal_slice, qhal_vmm_api,
};

use super::device::{Device, Shared};
use super::memory::{Memory, page_size};
use super::{Failure, guard};

/// What a `qhal_buffer` is.
#[derive(Debug)]
pub(crate) struct Buffer {
    memory: Memory,
    size: u64,
    writable: bool,
    /// Address space of the `vmm` extension.
    reserved: bool,
    /// Bytes that this buffer counts for in the device's use.
    counted: u64,
    shared: Arc<Shared>,
}

// SAFETY: a range of memory without an owner thread; who may write it when is the host's duty.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    fn create(device: &Device, desc: &qhal_buffer_desc, reserve: bool) -> Result<Self, Failure> {
        let total = device.memory_total();
        if !reserve && desc.size > total {
            return Err(Failure::out_of_memory(format!("{} bytes wanted, the machine has {total}", desc.size)));
        }
        let memory = if reserve {
            Memory::reserve(desc.size, desc.alignment)
        } else {
            Memory::alloc(desc.size, desc.alignment)
        }?;
        let counted = if reserve { 0 } else { desc.size };
        let shared = Arc::clone(&device.shared);
        shared.used.fetch_add(counted, Ordering::Relaxed);
        Ok(Self { memory, size: desc.size, writable: true, reserved: reserve, counted, shared })
    }

    fn import(device: &Device, desc: &qhal_import_desc) -> Result<Self, Failure> {
        if desc.kind != QHAL_IMPORT_HOST {
            return Err(Failure::unsupported("only host memory (QHAL_IMPORT_HOST) can be imported"));
        }
        let ptr = NonNull::new(desc.host.cast::<u8>()).ok_or_else(|| Failure::invalid("host address is null"))?;
        if desc.size == 0 || desc.size > isize::MAX as u64 {
            return Err(Failure::invalid(format!("a range of {} bytes, expected 1..={}", desc.size, isize::MAX)));
        }
        Ok(Self {
            memory: Memory::Borrowed { ptr },
            size: desc.size,
            writable: desc.access & QHAL_ACCESS_WRITE != 0,
            reserved: false,
            counted: 0,
            shared: Arc::clone(&device.shared),
        })
    }

    /// The first byte of a range that lies within the buffer.
    pub(crate) fn range(&self, offset: u64, size: u64, write: bool) -> Result<NonNull<u8>, Failure> {
        if write && !self.writable {
            return Err(Failure::invalid("the buffer is read-only, expected a writable one"));
        }
        if offset.checked_add(size).is_none_or(|end| end > self.size) {
            let size_of = self.size;
            return Err(Failure::out_of_range(format!("{size} bytes at {offset}, the buffer has {size_of}")));
        }
        // SAFETY: `offset` is at most the size of the memory.
        Ok(unsafe { self.memory.ptr().add(offset as usize) })
    }

    /// Pages of the `vmm` extension, checked.
    fn pages(&self, offset: u64, size: u64) -> Result<(usize, usize), Failure> {
        let page = page_size() as u64;
        if !self.reserved {
            return Err(Failure::invalid("an allocated buffer, expected a reserved one"));
        }
        let aligned = offset.is_multiple_of(page) && size.is_multiple_of(page);
        // The mapping is whole pages, so a range may reach to the end of the last one.
        let end = self.size.next_multiple_of(page);
        if !aligned || offset.checked_add(size).is_none_or(|until| until > end) {
            return Err(Failure::out_of_range(format!(
                "{size} bytes at {offset}, expected pages of {page} within {end}"
            )));
        }
        Ok((offset as usize, size as usize))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.shared.used.fetch_sub(self.counted, Ordering::Relaxed);
    }
}

/// The buffer of a slice.
///
/// # Safety
/// The slice's buffer is null or alive.
pub(crate) unsafe fn of_slice<'a>(slice: &qhal_slice) -> Result<&'a Buffer, Failure> {
    // SAFETY: by the caller's promise; handles of this plugin are `Buffer`s.
    unsafe { slice.buffer.cast::<Buffer>().as_ref() }.ok_or_else(|| Failure::invalid("no buffer, expected one"))
}

pub(super) unsafe extern "C" fn alloc(
    device: *mut qwen_hal_abi::qhal_device,
    desc: *const qhal_buffer_desc,
    out: *mut *mut qhal_buffer,
    err: *mut qwen_hal_abi::qhal_error,
) -> i32 {
    // SAFETY: the host passes an open device, a description, room for the answer, and null or a record.
    unsafe {
        guard(err, || {
            let buffer = Buffer::create(Device::of(device)?, &*desc, false)?;
            *out = Box::into_raw(Box::new(buffer)).cast();
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn import(
    device: *mut qwen_hal_abi::qhal_device,
    desc: *const qhal_import_desc,
    out: *mut *mut qhal_buffer,
    err: *mut qwen_hal_abi::qhal_error,
) -> i32 {
    // SAFETY: as `alloc`.
    unsafe {
        guard(err, || {
            let buffer = Buffer::import(Device::of(device)?, &*desc)?;
            *out = Box::into_raw(Box::new(buffer)).cast();
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn free(buffer: *mut qhal_buffer, err: *mut qwen_hal_abi::qhal_error) -> i32 {
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

pub(super) unsafe extern "C" fn map(
    buffer: *mut qhal_buffer,
    offset: u64,
    size: u64,
    access: u32,
    out: *mut *mut c_void,
    err: *mut qwen_hal_abi::qhal_error,
) -> i32 {
    // SAFETY: the host passes a buffer of ours and room for the answer.
    unsafe {
        guard(err, || {
            let buffer = of_slice(&qhal_slice { buffer, offset, size })?;
            *out = buffer.range(offset, size, access & QHAL_ACCESS_WRITE != 0)?.as_ptr().cast();
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn unmap(_buffer: *mut qhal_buffer, err: *mut qwen_hal_abi::qhal_error) -> i32 {
    // SAFETY: the host passes null or a record.
    unsafe { guard(err, || Ok(())) }
}

unsafe extern "C" fn reserve(
    device: *mut qwen_hal_abi::qhal_device,
    desc: *const qhal_buffer_desc,
    out: *mut *mut qhal_buffer,
    err: *mut qwen_hal_abi::qhal_error,
) -> i32 {
    // SAFETY: as `alloc`.
    unsafe {
        guard(err, || {
            let buffer = Buffer::create(Device::of(device)?, &*desc, true)?;
            *out = Box::into_raw(Box::new(buffer)).cast();
            Ok(())
        })
    }
}

unsafe extern "C" fn commit(
    buffer: *mut qhal_buffer,
    offset: u64,
    size: u64,
    err: *mut qwen_hal_abi::qhal_error,
) -> i32 {
    // SAFETY: the host passes a buffer of ours; the pages are checked.
    unsafe {
        guard(err, || {
            let buffer = of_slice(&qhal_slice { buffer, offset, size })?;
            let (offset, size) = buffer.pages(offset, size)?;
            buffer.memory.commit(offset, size)
        })
    }
}

unsafe extern "C" fn decommit(
    buffer: *mut qhal_buffer,
    offset: u64,
    size: u64,
    err: *mut qwen_hal_abi::qhal_error,
) -> i32 {
    // SAFETY: the host passes a buffer of ours of which nobody uses these pages; they are checked.
    unsafe {
        guard(err, || {
            let buffer = of_slice(&qhal_slice { buffer, offset, size })?;
            let (offset, size) = buffer.pages(offset, size)?;
            buffer.memory.decommit(offset, size)
        })
    }
}

/// The `vmm` extension.
pub(super) static VMM: qhal_vmm_api = qhal_vmm_api {
    struct_size: size_of::<qhal_vmm_api>() as u32,
    version: 1,
    reserve: Some(reserve),
    commit: Some(commit),
    decommit: Some(decommit),
};
