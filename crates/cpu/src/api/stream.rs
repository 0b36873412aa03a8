//! Streams and events. Work is done by the thread that enqueues it, so a stream is only a memory of its first failure.

use std::cell::RefCell;
use std::ffi::c_void;
use std::ptr::NonNull;

use qwen_hal_abi::{qhal_copy_desc, qhal_device, qhal_error, qhal_event, qhal_slice, qhal_stream, qhal_stream_desc};

use super::buffer::of_slice;
use super::device::Device;
use super::host::HostPool;
use super::{Failure, guard};
use crate::parallel::Parallel;

/// What a `qhal_stream` is. Used by one thread at a time.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) pool: HostPool,
    failure: RefCell<Option<Failure>>,
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

    /// The first failure of the stream, if there was one.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        match &*self.failure.borrow() {
            Some(failure) => Err(failure.clone()),
            None => Ok(()),
        }
    }

    /// Makes a failure of work that had begun the stream's own.
    pub(crate) fn stick(&self, failure: Failure) -> Failure {
        let failure = failure.sticky();
        self.failure.borrow_mut().get_or_insert(failure).clone()
    }
}

/// What a `qhal_event` is: the failure of the stream at the moment of recording.
#[derive(Debug, Default)]
struct Event {
    failure: RefCell<Option<Failure>>,
}

unsafe fn event_of<'a>(event: *mut qhal_event) -> Result<&'a Event, Failure> {
    // SAFETY: the host passes null or a living event of ours, from one thread at a time.
    unsafe { event.cast::<Event>().as_ref() }.ok_or_else(|| Failure::invalid("no event, expected one"))
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
            let stream = Stream { pool: Device::of(device)?.pool, failure: RefCell::default() };
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

pub(super) unsafe extern "C" fn wait(stream: *mut qhal_stream, _timeout_ns: u64, err: *mut qhal_error) -> i32 {
    // SAFETY: the host passes a stream of ours.
    unsafe { guard(err, || Stream::of(stream)?.check()) }
}

/// One side of a copy: the first byte, with the whole range checked if it is a buffer's.
unsafe fn side(slice: &qhal_slice, host: *mut c_void, extent: u64, write: bool) -> Result<NonNull<u8>, Failure> {
    match NonNull::new(host.cast::<u8>()) {
        Some(_) if !slice.buffer.is_null() => {
            Err(Failure::invalid("a side with a slice and a host address, expected one"))
        }
        Some(host) => Ok(host),
        None if slice.size < extent => {
            Err(Failure::out_of_range(format!("a slice of {} bytes, expected {extent}", slice.size)))
        }
        // SAFETY: the host passes a living buffer.
        None => unsafe { of_slice(slice) }?.range(slice.offset, extent, write),
    }
}

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

/// A copy whose ranges were checked.
pub(super) struct Copy<'a> {
    desc: &'a qhal_copy_desc,
    src: NonNull<u8>,
    dst: NonNull<u8>,
    empty: bool,
}

impl<'a> Copy<'a> {
    /// # Safety
    /// Buffers are null or alive.
    pub(super) unsafe fn of(desc: &'a qhal_copy_desc) -> Result<Self, Failure> {
        let (read, written) = (extent(desc, desc.src_pitch)?, extent(desc, desc.dst_pitch)?);
        // SAFETY: by the caller's promise.
        unsafe {
            let src = side(&desc.src, desc.src_host.cast_mut(), read, false)?;
            let dst = side(&desc.dst, desc.dst_host, written, true)?;
            Ok(Self { desc, src, dst, empty: read == 0 })
        }
    }

    /// # Safety
    /// Buffers and host ranges are alive, and nobody else uses them meanwhile.
    pub(super) unsafe fn run(&self, parallel: &dyn Parallel) {
        let Self { desc, src, dst, empty } = self;
        if !*empty && desc.rows == 1 {
            // SAFETY: both sides have the row; the caller's promise.
            return unsafe { move_bytes(parallel, *src, *dst, desc.row_bytes as usize) };
        }
        for row in 0..if *empty { 0 } else { desc.rows } {
            // SAFETY: both extents lie within their sides.
            unsafe {
                let from = src.add((row * desc.src_pitch) as usize);
                let to = dst.add((row * desc.dst_pitch) as usize);
                from.copy_to(to, desc.row_bytes as usize);
            }
        }
    }
}

/// Bytes from which on all threads copy, each in pieces of this size: a core alone does not use up what memory gives.
const PIECE: usize = 256 << 10;

/// Copies bytes, also between ranges that overlap.
///
/// # Safety
/// `from` is valid for reading and `to` for writing `bytes`, and nobody else uses them meanwhile.
unsafe fn move_bytes(parallel: &dyn Parallel, from: NonNull<u8>, to: NonNull<u8>, bytes: usize) {
    let (source, target) = (from.addr().get(), to.addr().get());
    if bytes < 2 * PIECE || source.abs_diff(target) < bytes {
        // SAFETY: the caller's promise.
        return unsafe { from.copy_to(to, bytes) };
    }
    let (from, to) = (SendPtr(from), SendPtr(to));
    parallel.run(bytes.div_ceil(PIECE), &|piece| {
        let at = piece * PIECE;
        // SAFETY: within both ranges, which do not overlap; pieces do not either.
        unsafe { from.get().add(at).copy_to_nonoverlapping(to.get().add(at), PIECE.min(bytes - at)) };
    });
}

/// An address that threads share.
struct SendPtr(NonNull<u8>);
// SAFETY: only an address; what it is used for is the user's promise.
unsafe impl Sync for SendPtr {}
impl SendPtr {
    const fn get(&self) -> NonNull<u8> {
        self.0
    }
}

pub(super) unsafe extern "C" fn copy(
    stream: *mut qhal_stream,
    desc: *const qhal_copy_desc,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: the host passes a stream of ours, a description, and host ranges that are valid for the copy.
    unsafe {
        guard(err, || {
            let stream = Stream::of(stream)?;
            stream.check()?;
            Copy::of(&*desc).map(|copy| copy.run(&stream.pool))
        })
    }
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
            Stream::of(stream)?.check()?;
            if !matches!(length, 1 | 2 | 4 | 8 | 16) || !dst.size.is_multiple_of(u64::from(length)) || pattern.is_null()
            {
                return Err(Failure::invalid(format!("a pattern of {length} bytes for {}", dst.size)));
            }
            let to = of_slice(&dst)?.range(dst.offset, dst.size, true)?.as_ptr();
            let pattern = std::slice::from_raw_parts(pattern.cast::<u8>(), length as usize);
            if let Some(first) = pattern.first().filter(|first| pattern.iter().all(|byte| byte == *first)) {
                to.write_bytes(*first, dst.size as usize);
                return Ok(());
            }
            for at in (0..dst.size as usize).step_by(length as usize) {
                to.add(at).copy_from_nonoverlapping(pattern.as_ptr(), length as usize);
            }
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn event_create(
    device: *mut qhal_device,
    _flags: u32,
    out: *mut *mut qhal_event,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: the host passes an open device and room for the answer.
    unsafe {
        guard(err, || {
            Device::of(device)?;
            *out = Box::into_raw(Box::<Event>::default()).cast();
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn event_destroy(event: *mut qhal_event, err: *mut qhal_error) -> i32 {
    // SAFETY: the host passes an event of ours, once.
    unsafe {
        guard(err, || {
            if !event.is_null() {
                drop(Box::from_raw(event.cast::<Event>()));
            }
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn event_record(
    stream: *mut qhal_stream,
    event: *mut qhal_event,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: the host passes a stream and an event of ours.
    unsafe {
        guard(err, || {
            let failure = Stream::of(stream)?.check().err();
            event_of(event)?.failure.replace(failure);
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn wait_event(
    stream: *mut qhal_stream,
    event: *mut qhal_event,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: the host passes a stream and an event of ours.
    unsafe {
        guard(err, || {
            let (stream, event) = (Stream::of(stream)?, event_of(event)?);
            if let Some(failure) = &*event.failure.borrow() {
                stream.stick(failure.clone());
            }
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn event_wait(event: *mut qhal_event, _timeout_ns: u64, err: *mut qhal_error) -> i32 {
    // SAFETY: the host passes an event of ours.
    unsafe {
        guard(err, || match &*event_of(event)?.failure.borrow() {
            Some(failure) => Err(failure.clone()),
            None => Ok(()),
        })
    }
}
