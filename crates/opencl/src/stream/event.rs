//! Events: a marker in a queue, and the faults of the stream as they were there.

use std::cell::RefCell;
use std::sync::Arc;

use opencl3::command_queue::{CommandQueue, enqueue_barrier_with_wait_list, enqueue_copy_buffer};
use opencl3::event::Event as Marker;
use qwen_hal_abi::{QHAL_NOT_READY, QHAL_OK, qhal_device, qhal_error, qhal_event, qhal_stream};

use super::{FAULT_BYTES, Faults, Stream, done, mark, wait_for};
use crate::device::Device;
use crate::failure::{Failure, guard};
use crate::program::{Kernels, launch_single};
use crate::unit::Unit;

/// What was recorded last.
struct Record {
    marker: Marker,
    /// Work before the marker may have reported a fault; then it is in the event's own words.
    doubtful: bool,
    /// The stream had failed already.
    failure: Option<Failure>,
}

/// What a `qhal_event` is. Used by one thread at a time.
struct Event {
    unit: Arc<Unit>,
    /// For reading the faults, whatever stream they came from.
    queue: CommandQueue,
    faults: Faults,
    record: RefCell<Option<Record>>,
}

unsafe fn event_of<'a>(event: *mut qhal_event) -> Result<&'a Event, Failure> {
    // SAFETY: the host passes null or a living event of ours, from one thread at a time.
    unsafe { event.cast::<Event>().as_ref() }.ok_or_else(|| Failure::invalid("no event, expected one"))
}

pub(crate) unsafe extern "C" fn create(
    device: *mut qhal_device,
    _flags: u32,
    out: *mut *mut qhal_event,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: the host passes an open device and room for the answer.
    unsafe {
        guard(err, || {
            let unit = &Device::of(device)?.unit;
            let queue = unit.queue()?;
            let faults = Faults::new(unit, &queue)?;
            let event = Event { unit: Arc::clone(unit), queue, faults, record: RefCell::default() };
            *out = Box::into_raw(Box::new(event)).cast();
            Ok(())
        })
    }
}

pub(crate) unsafe extern "C" fn destroy(event: *mut qhal_event, err: *mut qhal_error) -> i32 {
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

pub(crate) unsafe extern "C" fn record(stream: *mut qhal_stream, event: *mut qhal_event, err: *mut qhal_error) -> i32 {
    // SAFETY: the host passes a stream and an event of ours.
    unsafe {
        guard(err, || {
            let (stream, event) = (Stream::of(stream)?, event_of(event)?);
            let doubtful = stream.doubtful.get();
            if doubtful {
                let (from, to) = (stream.faults.memory(), event.faults.memory());
                let copied = enqueue_copy_buffer(stream.queue.get(), from, to, 0, 0, FAULT_BYTES, 0, std::ptr::null());
                done("clEnqueueCopyBuffer", copied)?;
            }
            let failure = stream.check().err();
            stream.enqueued(false);
            event.record.replace(Some(Record { marker: mark(&stream.queue)?, doubtful, failure }));
            Ok(())
        })
    }
}

/// Later work of the stream waits for the event, and fails if what was before the event failed.
pub(crate) unsafe extern "C" fn wait_on_stream(
    stream: *mut qhal_stream,
    event: *mut qhal_event,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: the host passes a stream and an event of ours.
    unsafe {
        guard(err, || {
            let (stream, event) = (Stream::of(stream)?, event_of(event)?);
            let record = event.record.borrow();
            let Some(record) = &*record else { return Ok(()) };
            if let Some(failure) = &record.failure {
                stream.stick(failure.clone());
                return Ok(());
            }
            let marker = record.marker.get();
            let waited = enqueue_barrier_with_wait_list(stream.queue.get(), 1, &raw const marker);
            done("clEnqueueBarrierWithWaitList", waited)?;
            if record.doubtful {
                let kernel = event.unit.programs.get(&event.unit, &Kernels::rows(&event.unit))?.kernel("inherit")?;
                launch_single(&stream.queue, &kernel, &[event.faults.memory(), stream.faults.memory()])?;
            }
            stream.enqueued(record.doubtful);
            Ok(())
        })
    }
}

pub(crate) unsafe extern "C" fn wait(event: *mut qhal_event, timeout_ns: u64, err: *mut qhal_error) -> i32 {
    let mut ready = true;
    // SAFETY: the host passes an event of ours.
    let status = unsafe {
        guard(err, || {
            let event = event_of(event)?;
            let record = event.record.borrow();
            let Some(record) = &*record else { return Ok(()) };
            if let Some(failure) = &record.failure {
                return Err(failure.clone());
            }
            ready = wait_for(&record.marker, timeout_ns)?;
            if ready && record.doubtful { event.faults.read(&event.queue) } else { Ok(()) }
        })
    };
    if status == QHAL_OK && !ready { QHAL_NOT_READY } else { status }
}
