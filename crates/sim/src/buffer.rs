//! Buffers: a place in the modelled memory, and real bytes that only this plugin can reach. New memory holds garbage.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use qwen_hal_abi::*;
use qwen_hal_plugin::{Failure, answer, guard};

use crate::device::{DEVICES, Device};
use crate::inner::InnerBuffer;
use crate::registry::Registry;

pub(crate) static BUFFERS: Registry<Buffer> = Registry::new("buffer");

/// What new memory holds: as a float32 a NaN, as an integer a large negative number.
const GARBAGE: u8 = 0xf5;
/// Larger buffers keep what the system gave: filling them would make them real memory at once.
const MOST_GARBAGE: u64 = 256 << 20;
/// Least alignment of the real bytes: what the kernels inside want.
const LINE: u64 = 64;

/// What a `qhal_buffer` stands for.
pub(crate) struct Buffer {
    pub(crate) device: Arc<Device>,
    pub(crate) inner: InnerBuffer,
    pub(crate) size: u64,
    /// Modelled address, or for reserved buffers the address of each page that is backed, by offset.
    pages: Mutex<BTreeMap<u64, u64>>,
    reserved: bool,
}

impl Buffer {
    fn alloc(device: Arc<Device>, desc: &qhal_buffer_desc, reserve: bool) -> Result<Self, Failure> {
        if desc.size == 0 || !(desc.alignment == 0 || desc.alignment.is_power_of_two()) {
            return Err(Failure::invalid(format!(
                "{} bytes with an alignment of {}, expected at least one byte and a power of two",
                desc.size, desc.alignment
            )));
        }
        device.alive()?;
        let alignment = desc.alignment.max(LINE);
        if reserve {
            let inner = device.inner.reserve(desc.size, alignment)?;
            return Ok(Self { device, inner, size: desc.size, pages: Mutex::default(), reserved: true });
        }
        let address = device.take(desc.size, false)?;
        let inner = device.inner.alloc(desc.size, alignment).inspect_err(|_| device.allocator().give_back(address))?;
        let buffer =
            Self { device, inner, size: desc.size, pages: Mutex::new(BTreeMap::from([(0, address)])), reserved: false };
        if desc.size <= MOST_GARBAGE {
            let start = buffer.inner.address(0, desc.size)?;
            // SAFETY: the whole buffer, which nobody else knows of yet.
            unsafe { start.write_bytes(GARBAGE, desc.size as usize) };
        }
        Ok(buffer)
    }

    /// The first byte of a range that lies within the buffer and is backed.
    pub(crate) fn range(&self, offset: u64, size: u64) -> Result<*mut u8, Failure> {
        if offset.checked_add(size).is_none_or(|end| end > self.size) {
            return Err(Failure::out_of_range(format!("{size} bytes at {offset}, the buffer has {}", self.size)));
        }
        if self.reserved && size > 0 {
            let page = self.device.model.page();
            let pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
            let (first, last) = (offset / page, (offset + size - 1) / page);
            if pages.range(first * page..=last * page).count() as u64 != last - first + 1 {
                return Err(Failure::out_of_range(format!("{size} bytes at {offset} are reserved, not backed")));
            }
        }
        self.inner.address(offset, size)
    }

    fn back(&self, offset: u64, size: u64, commit: bool) -> Result<(), Failure> {
        let page = self.device.model.page();
        let end = self.size.next_multiple_of(page);
        let aligned = offset.is_multiple_of(page) && size.is_multiple_of(page);
        if !self.reserved || !aligned || offset.checked_add(size).is_none_or(|until| until > end) {
            return Err(Failure::out_of_range(format!(
                "{size} bytes at {offset}, expected pages of {page} within {end} of a reserved buffer"
            )));
        }
        let mut pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        let mut taken = Vec::new();
        for at in (offset..offset + size).step_by(page as usize) {
            match (commit, pages.contains_key(&at)) {
                (true, false) => match self.device.take(page, true) {
                    Ok(address) => taken.push((at, address)),
                    Err(failure) => {
                        taken.iter().for_each(|(_, address)| self.device.allocator().give_back(*address));
                        return Err(failure);
                    }
                },
                (false, true) => {
                    if let Some(address) = pages.remove(&at) {
                        self.device.allocator().give_back(address);
                    }
                }
                _ => {}
            }
        }
        self.device.inner.back(&self.inner, offset, size, commit)?;
        pages.extend(taken);
        Ok(())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let pages = std::mem::take(self.pages.get_mut().unwrap_or_else(PoisonError::into_inner));
        let mut allocator = self.device.allocator();
        pages.values().for_each(|address| allocator.give_back(*address));
    }
}

/// A range of a living buffer.
#[derive(Clone)]
pub(crate) struct Slice {
    pub(crate) buffer: Arc<Buffer>,
    pub(crate) offset: u64,
    pub(crate) size: u64,
}

impl Slice {
    pub(crate) fn of(slice: &qhal_slice) -> Result<Self, Failure> {
        Ok(Self { buffer: BUFFERS.get(slice.buffer)?, offset: slice.offset, size: slice.size })
    }

    /// The first byte, if so many bytes are there.
    pub(crate) fn address(&self, bytes: u64) -> Result<*mut u8, Failure> {
        if self.size < bytes {
            return Err(Failure::out_of_range(format!("a slice of {} bytes, expected {bytes}", self.size)));
        }
        self.buffer.range(self.offset, bytes)
    }

    /// As the backend inside sees it.
    pub(crate) fn inner(&self) -> qhal_slice {
        qhal_slice { buffer: self.buffer.inner.raw, offset: self.offset, size: self.size }
    }
}

unsafe fn create(
    device: *mut qhal_device,
    desc: *const qhal_buffer_desc,
    out: *mut *mut qhal_buffer,
    reserve: bool,
) -> Result<(), Failure> {
    let device = DEVICES.get(device)?;
    // SAFETY: the host passes a description and room for the answer.
    unsafe {
        let desc = desc.as_ref().ok_or_else(|| Failure::invalid("no description, expected one"))?;
        let buffer = Buffer::alloc(Arc::clone(&device), desc, reserve).inspect_err(|failure| device.failed(failure))?;
        answer(out, BUFFERS.insert(Arc::new(buffer)))
    }
}

pub(crate) unsafe extern "C" fn alloc(
    device: *mut qhal_device,
    desc: *const qhal_buffer_desc,
    out: *mut *mut qhal_buffer,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes a description and room for the answer.
    unsafe { guard(err, || create(device, desc, out, false)) }
}

pub(crate) unsafe extern "C" fn free(buffer: *mut qhal_buffer, err: *mut qhal_error) -> qhal_status {
    // SAFETY: the host passes null or a record.
    unsafe { guard(err, || if buffer.is_null() { Ok(()) } else { BUFFERS.remove(buffer).map(drop) }) }
}

pub(crate) unsafe extern "C" fn map(
    _: *mut qhal_buffer,
    _: u64,
    _: u64,
    _: u32,
    _: *mut *mut c_void,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes null or a record.
    unsafe {
        guard(err, || {
            Err(Failure::unsupported("a simulated device has an address space of its own: copy instead of mapping"))
        })
    }
}

pub(crate) unsafe extern "C" fn import(
    _: *mut qhal_device,
    _: *const qhal_import_desc,
    _: *mut *mut qhal_buffer,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes null or a record.
    unsafe {
        guard(err, || {
            Err(Failure::unsupported("a simulated device has an address space of its own: copy instead of importing"))
        })
    }
}

unsafe extern "C" fn reserve(
    device: *mut qhal_device,
    desc: *const qhal_buffer_desc,
    out: *mut *mut qhal_buffer,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes a description and room for the answer.
    unsafe { guard(err, || create(device, desc, out, true)) }
}

unsafe extern "C" fn commit(buffer: *mut qhal_buffer, offset: u64, size: u64, err: *mut qhal_error) -> qhal_status {
    // SAFETY: the host passes null or a record.
    unsafe { guard(err, || BUFFERS.get(buffer)?.back(offset, size, true)) }
}

unsafe extern "C" fn decommit(buffer: *mut qhal_buffer, offset: u64, size: u64, err: *mut qhal_error) -> qhal_status {
    // SAFETY: the host passes null or a record.
    unsafe { guard(err, || BUFFERS.get(buffer)?.back(offset, size, false)) }
}

/// The `vmm` extension.
pub(crate) static VMM: qhal_vmm_api = qhal_vmm_api {
    struct_size: size_of::<qhal_vmm_api>() as u32,
    version: 1,
    reserve: Some(reserve),
    commit: Some(commit),
    decommit: Some(decommit),
};
