//! In-order queues and the markers between them.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use qwen_hal_abi::{
    QHAL_NOT_READY, QHAL_UNIMPLEMENTED, qhal_copy_desc, qhal_event, qhal_slice, qhal_stream, qhal_stream_desc,
};

use crate::buffer::Slice;
use crate::collectives::Communicator;
use crate::device::{Dead, DeviceInner};
use crate::error::{CallError, HalError};
use crate::plugin::{Plugin, call};
use crate::text::as_str;

/// No side of a copy.
pub(crate) const NO_SLICE: qhal_slice = qhal_slice { buffer: std::ptr::null_mut(), offset: 0, size: 0 };
/// Bytes of host memory that stand in for a missing `fill`.
const FILL_CHUNK: usize = 64 << 10;

/// An in-order queue, used by one thread at a time. An error sticks: later work fails with it, and so does [`Stream::wait`].
pub struct Stream {
    pub(crate) device: Arc<DeviceInner>,
    pub(crate) raw: NonNull<qhal_stream>,
    /// Work was enqueued and not waited for. Also makes the type `!Sync`, as the ABI demands.
    busy: Cell<bool>,
    /// Communicators of pending work.
    comms: RefCell<Vec<Communicator>>,
}

// SAFETY: the ABI lets a stream move between threads as long as one uses it at a time, and the type is not Sync.
unsafe impl Send for Stream {}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream")
            .field("plugin", &self.device.plugin.name())
            .field("busy", &self.busy)
            .finish_non_exhaustive()
    }
}

impl Stream {
    pub(crate) fn create(device: &Arc<DeviceInner>, name: &str) -> Result<Self, HalError> {
        let desc =
            qhal_stream_desc { struct_size: size_of::<qhal_stream_desc>() as u32, priority: 0, name: as_str(name) };
        let mut raw = std::ptr::null_mut();
        call!(&device.plugin, "", stream_create(device.raw.as_ptr(), &raw const desc, &raw mut raw))?;
        let raw = NonNull::new(raw)
            .ok_or_else(|| device.plugin.contract("stream_create", "a stream", "null with status OK"))?;
        Ok(Self { device: Arc::clone(device), raw, busy: Cell::new(false), comms: RefCell::default() })
    }

    fn plugin(&self) -> &Plugin {
        &self.device.plugin
    }

    /// The plugin's handle, for tools that test a plugin below the safe handles; alive as long as this. What they enqueue they wait for.
    #[must_use]
    pub const fn raw_handle(&self) -> *mut qhal_stream {
        self.raw.as_ptr()
    }

    /// To be called before work is enqueued.
    pub(crate) fn mark_busy(&self) {
        if !self.device.inline && !self.busy.replace(true) {
            self.device.stream_busy();
        }
    }

    fn mark_idle(&self) {
        if self.busy.replace(false) {
            self.comms.borrow_mut().clear();
            self.device.stream_idle();
        }
    }

    /// Keeps a communicator until the work that was enqueued is done.
    pub(crate) fn keep(&self, comm: &Communicator) {
        let mut comms = self.comms.borrow_mut();
        if self.busy.get() && !comms.contains(comm) {
            comms.push(comm.clone());
        }
    }

    /// Waits until everything enqueued is done.
    ///
    /// # Errors
    /// The first error of the stream.
    pub fn wait(&self) -> Result<(), HalError> {
        if self.wait_ns(u64::MAX)? {
            return Ok(());
        }
        Err(self.plugin().contract("stream_wait", "to wait without a limit", "NOT_READY"))
    }

    /// Waits at most so long; false if work is left.
    ///
    /// # Errors
    /// The first error of the stream.
    pub fn wait_for(&self, limit: Duration) -> Result<bool, HalError> {
        // u64::MAX stands for "no limit".
        self.wait_ns(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX).min(u64::MAX - 1))
    }

    /// Whether everything enqueued is done.
    ///
    /// # Errors
    /// The first error of the stream.
    pub fn poll(&self) -> Result<bool, HalError> {
        self.wait_ns(0)
    }

    fn wait_ns(&self, limit: u64) -> Result<bool, HalError> {
        match call!(self.plugin(), "", stream_wait(self.raw.as_ptr(), limit)) {
            Err(e) if e.code == QHAL_NOT_READY => Ok(false),
            // A failed stream does nothing any more.
            done => {
                self.mark_idle();
                done.map(|()| true).map_err(Into::into)
            }
        }
    }

    fn check(&self, call: &'static str, slice: &Slice, write: bool) -> Result<(), HalError> {
        check_slice(&self.device, call, slice, write)
    }

    fn enqueue_copy(&self, desc: &qhal_copy_desc) -> Result<(), CallError> {
        let _gate = self.device.gate.read().unwrap_or_else(PoisonError::into_inner);
        self.mark_busy();
        call!(self.plugin(), "", copy(self.raw.as_ptr(), std::ptr::from_ref(desc)))
    }

    /// Copies within the device, in order with other work of the stream.
    ///
    /// # Errors
    /// [`HalError::Argument`] if the sizes differ, the ranges overlap or the target is read-only; else what the plugin reports.
    pub fn copy(&self, src: &Slice, dst: &Slice) -> Result<(), HalError> {
        check_copy(&self.device, src, dst)?;
        if src.size == 0 {
            return Ok(());
        }
        Ok(self.enqueue_copy(&device_copy(src, dst))?)
    }

    /// Copies to host memory and waits for it, and so for all work enqueued before.
    ///
    /// # Errors
    /// [`HalError::Argument`] if the sizes differ; else what the plugin reports.
    pub fn copy_to_host(&self, src: &Slice, dst: &mut [u8]) -> Result<(), HalError> {
        self.check("copy", src, false)?;
        self.same_size(src.size, dst.len())?;
        if dst.is_empty() {
            return Ok(());
        }
        let desc = qhal_copy_desc { src: src.raw(), dst_host: dst.as_mut_ptr().cast(), ..one_row(src.size) };
        self.enqueue_copy(&desc)?;
        self.finish_host_copy()
    }

    /// Copies from host memory and waits for it, and so for all work enqueued before.
    ///
    /// # Errors
    /// [`HalError::Argument`] if the sizes differ or the target is read-only; else what the plugin reports.
    pub fn copy_from_host(&self, src: &[u8], dst: &Slice) -> Result<(), HalError> {
        self.check("copy", dst, true)?;
        self.same_size(dst.size, src.len())?;
        if src.is_empty() {
            return Ok(());
        }
        let desc = qhal_copy_desc { dst: dst.raw(), src_host: src.as_ptr().cast(), ..one_row(dst.size) };
        self.enqueue_copy(&desc)?;
        self.finish_host_copy()
    }

    fn same_size(&self, device: u64, host: usize) -> Result<(), HalError> {
        if device == host as u64 {
            return Ok(());
        }
        Err(self.plugin().argument("copy", format!("{device} bytes on the host"), host.to_string()))
    }

    /// Host memory is only borrowed for the call, so the copy must be over before it returns.
    fn finish_host_copy(&self) -> Result<(), HalError> {
        if self.device.inline { Ok(()) } else { self.wait() }
    }

    /// Fills with a pattern of 1, 2, 4, 8 or 16 bytes.
    ///
    /// # Errors
    /// [`HalError::Argument`] for another length, or a size that is no multiple of it; else what the plugin reports.
    pub fn fill(&self, dst: &Slice, pattern: &[u8]) -> Result<(), HalError> {
        self.check("fill", dst, true)?;
        if !matches!(pattern.len(), 1 | 2 | 4 | 8 | 16) || !dst.size.is_multiple_of(pattern.len() as u64) {
            return Err(self.plugin().argument(
                "fill",
                "a pattern of 1, 2, 4, 8 or 16 bytes that divides the size",
                format!("{} bytes for {}", pattern.len(), dst.size),
            ));
        }
        if dst.size == 0 {
            return Ok(());
        }
        let result = {
            let _gate = self.device.gate.read().unwrap_or_else(PoisonError::into_inner);
            self.mark_busy();
            let bytes = pattern.as_ptr().cast::<c_void>();
            call!(self.plugin(), "", fill(self.raw.as_ptr(), dst.raw(), bytes, pattern.len() as u32))
        };
        match result {
            Err(e) if e.code == QHAL_UNIMPLEMENTED => self.fill_by_copies(dst, pattern),
            other => Ok(other?),
        }
    }

    fn fill_by_copies(&self, dst: &Slice, pattern: &[u8]) -> Result<(), HalError> {
        let chunk: Vec<u8> = pattern.iter().copied().cycle().take(FILL_CHUNK.min(dst.size as usize)).collect();
        let mut done = 0;
        while done < dst.size {
            let n = (dst.size - done).min(chunk.len() as u64);
            self.copy_from_host(chunk.get(..n as usize).unwrap_or_default(), &dst.slice(done, n)?)?;
            done += n;
        }
        Ok(())
    }

    /// Marks the work enqueued so far.
    ///
    /// # Errors
    /// What the plugin reports.
    pub fn record(&self, event: &Event) -> Result<(), HalError> {
        self.same_device(event)?;
        self.mark_busy();
        Ok(call!(self.plugin(), "", event_record(self.raw.as_ptr(), event.raw.as_ptr()))?)
    }

    /// Later work of this stream waits for the event and inherits its failure.
    ///
    /// # Errors
    /// What the plugin reports.
    pub fn wait_event(&self, event: &Event) -> Result<(), HalError> {
        self.same_device(event)?;
        self.mark_busy();
        Ok(call!(self.plugin(), "", stream_wait_event(self.raw.as_ptr(), event.raw.as_ptr()))?)
    }

    fn same_device(&self, event: &Event) -> Result<(), HalError> {
        if Arc::ptr_eq(&event.device, &self.device) {
            return Ok(());
        }
        Err(self.plugin().argument("event", "an event of the stream's device", "one of another device"))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.busy.get()
            && let Err(error) = self.wait()
        {
            tracing::warn!(%error, "a stream was dropped with an error that nobody asked for");
        }
        if let Err(error) = call!(self.plugin(), "", stream_destroy(self.raw.as_ptr())) {
            tracing::warn!(%error, "stream was not destroyed cleanly");
        }
        self.mark_idle();
    }
}

/// Refuses a slice of another device, one beyond its buffer, or one that may not be written.
pub(crate) fn check_slice(
    device: &Arc<DeviceInner>,
    call: &'static str,
    slice: &Slice,
    write: bool,
) -> Result<(), HalError> {
    if !Arc::ptr_eq(&slice.buffer.0.device, device) {
        return Err(device.plugin.argument(call, "a buffer of the stream's device", "one of another device"));
    }
    match slice.buffer.0.fault(slice.offset, slice.size, write) {
        None => Ok(()),
        Some((expected, found)) => Err(device.plugin.argument(call, expected, found)),
    }
}

/// Refuses a copy within a device that cannot be.
pub(crate) fn check_copy(device: &Arc<DeviceInner>, src: &Slice, dst: &Slice) -> Result<(), HalError> {
    check_slice(device, "copy", src, false)?;
    check_slice(device, "copy", dst, true)?;
    if src.size != dst.size {
        let expected = format!("a target of {} bytes", src.size);
        return Err(device.plugin.argument("copy", expected, dst.size.to_string()));
    }
    if src.overlaps(dst) {
        return Err(device.plugin.argument("copy", "ranges that do not overlap", "overlapping ones"));
    }
    Ok(())
}

/// A copy within a device, of all bytes of two slices of one size.
pub(crate) fn device_copy(src: &Slice, dst: &Slice) -> qhal_copy_desc {
    qhal_copy_desc { src: src.raw(), dst: dst.raw(), ..one_row(src.size) }
}

/// A copy of one row; the sides are to be set.
const fn one_row(bytes: u64) -> qhal_copy_desc {
    qhal_copy_desc {
        struct_size: size_of::<qhal_copy_desc>() as u32,
        flags: 0,
        dst: NO_SLICE,
        src: NO_SLICE,
        dst_host: std::ptr::null_mut(),
        src_host: std::ptr::null(),
        row_bytes: bytes,
        rows: 1,
        dst_pitch: bytes,
        src_pitch: bytes,
    }
}

/// A point in a stream, used by one thread at a time.
pub struct Event {
    device: Arc<DeviceInner>,
    raw: NonNull<qhal_event>,
    not_sync: std::marker::PhantomData<Cell<()>>,
}

// SAFETY: as for `Stream`.
unsafe impl Send for Event {}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Event").field("plugin", &self.device.plugin.name()).finish_non_exhaustive()
    }
}

impl Event {
    pub(crate) fn create(device: &Arc<DeviceInner>) -> Result<Self, HalError> {
        let mut raw = std::ptr::null_mut();
        call!(&device.plugin, "", event_create(device.raw.as_ptr(), 0, &raw mut raw))?;
        let raw = NonNull::new(raw)
            .ok_or_else(|| device.plugin.contract("event_create", "an event", "null with status OK"))?;
        Ok(Self { device: Arc::clone(device), raw, not_sync: std::marker::PhantomData })
    }

    /// Waits at most so long; false if the marked work is not done.
    ///
    /// # Errors
    /// The failure of the marked work.
    pub fn wait_for(&self, limit: Duration) -> Result<bool, HalError> {
        let limit = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        match call!(&self.device.plugin, "", event_wait(self.raw.as_ptr(), limit)) {
            Ok(()) => Ok(true),
            Err(e) if e.code == QHAL_NOT_READY => Ok(false),
            Err(e) => Err(e.into()),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.device.retire(Dead::Event(self.raw));
    }
}
