//! Streams: in-order queues, copies and fills.
//!
//! A stream has three words of memory that kernels write when the data says something wrong, such as a slot behind the cache. They are
//! read when the host waits; then the failure is the stream's.

pub(crate) mod event;

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use opencl3::command_queue::{
    CommandQueue, enqueue_copy_buffer, enqueue_fill_buffer, enqueue_marker_with_wait_list, enqueue_read_buffer,
    enqueue_write_buffer, finish,
};
use opencl3::event::Event as Marker;
use opencl3::memory::{Buffer as Memory, CL_MEM_READ_WRITE, ClMem};
use opencl3::types::{CL_BLOCKING, CL_NON_BLOCKING, cl_event, cl_mem};
use qwen_hal_abi::{
    QHAL_NOT_READY, QHAL_OK, qhal_copy_desc, qhal_device, qhal_error, qhal_slice, qhal_stream, qhal_stream_desc,
};

use crate::buffer::{of_slice, unit_of};
use crate::device::Device;
use crate::failure::{Failure, guard, reported, sized_ref};
use crate::unit::Unit;

/// Bytes of a fault: code, index, value, nothing.
const FAULT_BYTES: usize = 16;

/// Words that kernels report faults in.
pub(crate) struct Faults(Memory<u8>);

impl Faults {
    fn new(unit: &Unit, queue: &CommandQueue) -> Result<Self, Failure> {
        // SAFETY: no host memory is given.
        let memory = unsafe { Memory::create(&unit.context, CL_MEM_READ_WRITE, FAULT_BYTES, std::ptr::null_mut()) };
        let faults = Self(memory.map_err(|error| reported("clCreateBuffer", error))?);
        let zero = [0_u8; FAULT_BYTES];
        // SAFETY: a blocking write within the buffer.
        let written = unsafe {
            let zero = zero.as_ptr().cast();
            enqueue_write_buffer(queue.get(), faults.memory(), CL_BLOCKING, 0, FAULT_BYTES, zero, 0, std::ptr::null())
        };
        done("clEnqueueWriteBuffer", written)?;
        Ok(faults)
    }

    pub(crate) fn memory(&self) -> cl_mem {
        self.0.get()
    }

    /// The fault, if there is one. Waits for the queue.
    fn read(&self, queue: &CommandQueue) -> Result<(), Failure> {
        let mut bytes = [0_u8; FAULT_BYTES];
        // SAFETY: a blocking read within the buffer.
        let read = unsafe {
            let to = bytes.as_mut_ptr().cast();
            enqueue_read_buffer(queue.get(), self.memory(), CL_BLOCKING, 0, FAULT_BYTES, to, 0, std::ptr::null())
        };
        done("clEnqueueReadBuffer", read)?;
        let word = |at: usize| i32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let (index, value) = (word(4), word(8));
        let what = match word(0) {
            0 => return Ok(()),
            1 => format!("kv_append: slot {value} of token {index} is behind the cache"),
            2 => format!("attention: query row {index} needs position or block {value}, which the cache does not have"),
            3 => format!("grouped_gemm: sorted row {index} names row {value}, which x does not have"),
            4 => format!("grouped_gemm: offset {value} of the end of experts is not the number of rows"),
            5 => format!("dispatch: pair {index} names expert {value}, which does not exist"),
            6 => format!("combine: token {index} names sorted row {value}, which x does not have"),
            code => format!("a kernel reports fault {code} at {index}: {value}"),
        };
        Err(Failure::out_of_range(what))
    }
}

/// Gives the event of a command back at once; its failure becomes ours.
pub(crate) fn done(call: &str, result: Result<cl_event, i32>) -> Result<(), Failure> {
    result.map(|event| drop(Marker::new(event))).map_err(|error| reported(call, error))
}

/// What a `qhal_stream` is. Used by one thread at a time.
pub(crate) struct Stream {
    pub(crate) unit: Arc<Unit>,
    pub(crate) queue: CommandQueue,
    pub(crate) faults: Faults,
    failure: RefCell<Option<Failure>>,
    /// Commands were enqueued since the queue was last seen empty.
    busy: Cell<bool>,
    /// Among them some that may report a fault.
    doubtful: Cell<bool>,
    /// Behind everything that was enqueued, for polling.
    marker: RefCell<Option<Marker>>,
}

impl Stream {
    /// The stream of a handle.
    ///
    /// # Safety
    /// The handle is null or alive, and no other thread uses it.
    pub(crate) unsafe fn of<'a>(stream: *mut qhal_stream) -> Result<&'a Self, Failure> {
        // SAFETY: by the caller's promise; handles of this plugin are `Stream`s.
        unsafe { stream.cast::<Self>().as_ref() }.ok_or_else(|| Failure::invalid("no stream, expected one"))
    }

    fn new(unit: &Arc<Unit>) -> Result<Self, Failure> {
        let queue = unit.queue()?;
        let faults = Faults::new(unit, &queue)?;
        Ok(Self {
            unit: Arc::clone(unit),
            queue,
            faults,
            failure: RefCell::default(),
            busy: Cell::new(false),
            doubtful: Cell::new(false),
            marker: RefCell::default(),
        })
    }

    /// The first failure of the stream, if there was one.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        match &*self.failure.borrow() {
            Some(failure) => Err(failure.clone()),
            None => Ok(()),
        }
    }

    /// Makes a failure of enqueued work the stream's own.
    fn stick(&self, failure: Failure) -> Failure {
        let failure = failure.sticky();
        self.failure.borrow_mut().get_or_insert(failure).clone()
    }

    /// To be called when a command is enqueued.
    pub(crate) fn enqueued(&self, doubtful: bool) {
        self.busy.set(true);
        self.doubtful.set(self.doubtful.get() || doubtful);
        self.marker.borrow_mut().take();
    }

    /// Waits until everything is done, at most so long; false if something is left.
    fn wait(&self, timeout_ns: u64) -> Result<bool, Failure> {
        self.check()?;
        if !self.busy.get() {
            return Ok(true);
        }
        if timeout_ns == u64::MAX {
            finish(self.queue.get()).map_err(|error| self.stick(reported("clFinish", error)))?;
        } else {
            let mut marker = self.marker.borrow_mut();
            let marker = match &*marker {
                Some(marker) => marker,
                None => marker.insert(mark(&self.queue)?),
            };
            if !wait_for(marker, timeout_ns).map_err(|failure| self.stick(failure))? {
                return Ok(false);
            }
        }
        self.busy.set(false);
        if self.doubtful.replace(false) {
            self.faults.read(&self.queue).map_err(|failure| self.stick(failure))?;
        }
        Ok(true)
    }
}

/// A marker behind everything enqueued, on its way to the device.
fn mark(queue: &CommandQueue) -> Result<Marker, Failure> {
    // SAFETY: no events to wait for.
    let event = unsafe { enqueue_marker_with_wait_list(queue.get(), 0, std::ptr::null()) };
    let marker = Marker::new(event.map_err(|error| reported("clEnqueueMarkerWithWaitList", error))?);
    queue.flush().map_err(|error| reported("clFlush", error))?;
    Ok(marker)
}

/// Whether a marker is reached within so many nanoseconds.
fn wait_for(marker: &Marker, timeout_ns: u64) -> Result<bool, Failure> {
    if timeout_ns == u64::MAX {
        return marker.wait().map(|()| true).map_err(|error| reported("clWaitForEvents", error));
    }
    // OpenCL has no wait with a limit.
    const PAUSE: Duration = Duration::from_micros(50);
    let start = Instant::now();
    loop {
        let status = marker.command_execution_status().map_err(|error| reported("clGetEventInfo", error))?.0;
        match status {
            ..0 => return Err(reported("the commands of a stream", status)),
            0 => return Ok(true),
            _ if start.elapsed() >= Duration::from_nanos(timeout_ns) => return Ok(false),
            _ => std::thread::sleep(PAUSE),
        }
    }
}

pub(super) unsafe extern "C" fn create(
    device: *mut qhal_device,
    _desc: *const qhal_stream_desc,
    out: *mut *mut qhal_stream,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: the host passes an open device, room for the answer, and null or a record.
    unsafe {
        guard(err, || {
            let stream = Stream::new(&Device::of(device)?.unit)?;
            *out = Box::into_raw(Box::new(stream)).cast();
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn destroy(stream: *mut qhal_stream, err: *mut qhal_error) -> i32 {
    // SAFETY: the host passes a stream of ours, once.
    unsafe {
        guard(err, || {
            if !stream.is_null() {
                drop(Box::from_raw(stream.cast::<Stream>()));
            }
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn wait(stream: *mut qhal_stream, timeout_ns: u64, err: *mut qhal_error) -> i32 {
    let mut ready = true;
    // SAFETY: the host passes a stream of ours.
    let status = unsafe {
        guard(err, || {
            ready = Stream::of(stream)?.wait(timeout_ns)?;
            Ok(())
        })
    };
    if status == QHAL_OK && !ready { QHAL_NOT_READY } else { status }
}

/// One side of a copy.
enum Side {
    Device(cl_mem, u64),
    Host(*mut c_void),
}

impl Side {
    /// # Safety
    /// The slice's buffer is null or alive.
    unsafe fn new(
        slice: &qhal_slice,
        host: *mut c_void,
        extent: u64,
        write: bool,
        unit: &Arc<Unit>,
    ) -> Result<Self, Failure> {
        match (host.is_null(), slice.buffer.is_null()) {
            (false, false) => Err(Failure::invalid("a side with a slice and a host address, expected one")),
            (false, true) => Ok(Self::Host(host)),
            // SAFETY: by the caller's promise.
            _ => Ok(Self::Device(unsafe { of_slice(slice, extent, write, unit)? }.memory(), slice.offset)),
        }
    }
}

/// Bytes from the first to the last of a copy's side.
fn extent(desc: &qhal_copy_desc, pitch: u64) -> Result<u64, Failure> {
    if desc.rows == 0 || desc.row_bytes == 0 {
        return Ok(0);
    }
    if desc.rows > 1 && pitch < desc.row_bytes {
        return Err(Failure::invalid(format!("a pitch of {pitch} bytes, expected at least {}", desc.row_bytes)));
    }
    let steps = (desc.rows - 1).checked_mul(pitch).and_then(|n| n.checked_add(desc.row_bytes));
    steps.filter(|n| *n <= isize::MAX as u64).ok_or_else(|| Failure::invalid("a copy beyond the address space"))
}

/// Enqueues a copy of consecutive bytes.
///
/// # Safety
/// Both sides hold that many bytes at these offsets, host memory until the copy is done.
unsafe fn copy_run(
    stream: &Stream,
    (src, from): (&Side, u64),
    (dst, to): (&Side, u64),
    bytes: u64,
) -> Result<(), Failure> {
    let (queue, bytes, none) = (stream.queue.get(), bytes as usize, std::ptr::null());
    // SAFETY: by the caller's promise.
    unsafe {
        match (src, dst) {
            (Side::Host(host), Side::Device(memory, at)) => {
                let host = host.byte_add(from as usize);
                let event =
                    enqueue_write_buffer(queue, *memory, CL_NON_BLOCKING, (at + to) as usize, bytes, host, 0, none);
                done("clEnqueueWriteBuffer", event)
            }
            (Side::Device(memory, at), Side::Host(host)) => {
                let host = host.byte_add(to as usize);
                let event =
                    enqueue_read_buffer(queue, *memory, CL_NON_BLOCKING, (at + from) as usize, bytes, host, 0, none);
                done("clEnqueueReadBuffer", event)
            }
            (Side::Device(src, at), Side::Device(dst, dst_at)) => {
                let (from, to) = ((at + from) as usize, (dst_at + to) as usize);
                done("clEnqueueCopyBuffer", enqueue_copy_buffer(queue, *src, *dst, from, to, bytes, 0, none))
            }
            (Side::Host(_), Side::Host(_)) => Err(Failure::invalid("a copy from host to host, expected a buffer")),
        }
    }
}

/// Refuses a copy within a device that cannot be.
///
/// # Safety
/// Buffers are null or alive.
pub(crate) unsafe fn check_copy(desc: &qhal_copy_desc) -> Result<(), Failure> {
    // SAFETY: by the caller's promise.
    let unit = unsafe { unit_of(&desc.src) }?;
    let (read, written) = (extent(desc, desc.src_pitch)?, extent(desc, desc.dst_pitch)?);
    // SAFETY: as above.
    unsafe {
        of_slice(&desc.src, read, false, unit)?;
        of_slice(&desc.dst, written, true, unit)?;
    }
    Ok(())
}

/// Enqueues a copy.
///
/// # Safety
/// The stream is used by this thread; buffers are alive, host ranges valid until the copy is done.
pub(crate) unsafe fn enqueue_copy_desc(stream: *mut qhal_stream, desc: &qhal_copy_desc) -> Result<(), Failure> {
    // SAFETY: by the caller's promise.
    unsafe {
        let stream = Stream::of(stream)?;
        stream.check()?;
        let (read, written) = (extent(desc, desc.src_pitch)?, extent(desc, desc.dst_pitch)?);
        let src = Side::new(&desc.src, desc.src_host.cast_mut(), read, false, &stream.unit)?;
        let dst = Side::new(&desc.dst, desc.dst_host, written, true, &stream.unit)?;
        if read == 0 {
            return Ok(());
        }
        stream.enqueued(false);
        if desc.rows == 1 || (desc.src_pitch == desc.row_bytes && desc.dst_pitch == desc.row_bytes) {
            return copy_run(stream, (&src, 0), (&dst, 0), desc.rows * desc.row_bytes);
        }
        (0..desc.rows).try_for_each(|row| {
            copy_run(stream, (&src, row * desc.src_pitch), (&dst, row * desc.dst_pitch), desc.row_bytes)
        })
    }
}

pub(super) unsafe extern "C" fn copy(
    stream: *mut qhal_stream,
    desc: *const qhal_copy_desc,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: the host passes a stream of ours, a description, and host ranges that are valid until the copy is done.
    unsafe { guard(err, || enqueue_copy_desc(stream, sized_ref(desc)?)) }
}

pub(super) unsafe extern "C" fn fill(
    stream: *mut qhal_stream,
    dst: qhal_slice,
    pattern: *const c_void,
    length: u32,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: the host passes a stream and a buffer of ours and `length` readable bytes.
    unsafe {
        guard(err, || {
            let stream = Stream::of(stream)?;
            stream.check()?;
            let size = u64::from(length);
            if !matches!(length, 1 | 2 | 4 | 8 | 16) || !dst.size.is_multiple_of(size) || pattern.is_null() {
                return Err(Failure::invalid(format!("a pattern of {length} bytes for {}", dst.size)));
            }
            if !dst.offset.is_multiple_of(size) {
                return Err(Failure::invalid(format!("a fill at {}, expected a multiple of {length}", dst.offset)));
            }
            let memory = of_slice(&dst, dst.size, true, &stream.unit)?.memory();
            if dst.size == 0 {
                return Ok(());
            }
            stream.enqueued(false);
            let (at, bytes) = (dst.offset as usize, dst.size as usize);
            let queue = stream.queue.get();
            let event = enqueue_fill_buffer(queue, memory, pattern, length as usize, at, bytes, 0, std::ptr::null());
            done("clEnqueueFillBuffer", event)
        })
    }
}
