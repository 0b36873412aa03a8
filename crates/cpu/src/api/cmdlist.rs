//! The extension `cmdlist`. A replay does what the launches one by one would do, by the thread that asks for it.

use qwen_hal_abi::{qhal_cmdlist_api, qhal_device, qhal_slice, qhal_stream};
use qwen_hal_plugin::array;
use qwen_hal_plugin::cmdlist::{Command, Commands, check_capture_safe, table};

use super::buffer::of_slice;
use super::device::Device;
use super::stream::{self, Stream};
use super::{Failure, caught};
use crate::plan::{FLAGS, entry};

/// The `cmdlist` extension.
pub(super) static CMDLIST: qhal_cmdlist_api = table::<Cpu>();

struct Cpu;

/// Refuses a slice that does not lie within a buffer; one without a buffer is an absent operand.
unsafe fn within(slice: &qhal_slice, write: bool) -> Result<(), Failure> {
    if slice.buffer.is_null() {
        return Ok(());
    }
    // SAFETY: the host passes living buffers.
    unsafe { of_slice(slice) }?.range(slice.offset, slice.size, write).map(drop)
}

impl Commands for Cpu {
    unsafe fn device(device: *mut qhal_device) -> Result<(), Failure> {
        // SAFETY: the host passes null or an open device.
        unsafe { Device::of(device) }.map(drop)
    }

    unsafe fn check(command: &Command<'_>) -> Result<(), Failure> {
        match command {
            // SAFETY: the host passes living handles and arrays of the stated lengths.
            Command::Launch { plan, args } => unsafe {
                entry::check(*plan)?;
                check_capture_safe(FLAGS)?;
                array(args.inputs, args.num_inputs)?.iter().try_for_each(|slice| within(slice, false))?;
                array(args.outputs, args.num_outputs)?.iter().try_for_each(|slice| within(slice, true))?;
                within(&args.workspace, true)
            },
            // SAFETY: as above.
            Command::Copy(desc) => unsafe { stream::Copy::of(desc) }.map(drop),
        }
    }

    /// What does not fit is found while a launch runs; then the list has begun, and the stream has failed.
    unsafe fn enqueue(stream: *mut qhal_stream, command: &Command<'_>) -> Result<(), Failure> {
        // SAFETY: the host passes living handles, the stream from one thread at a time.
        unsafe {
            let stream = Stream::of(stream)?;
            stream.check()?;
            let done = caught(|| match command {
                Command::Launch { plan, args } => entry::compute(*plan, args, stream),
                Command::Copy(desc) => stream::Copy::of(desc).map(|copy| copy.run(&stream.pool)),
            });
            done.map_err(|failure| stream.stick(failure))
        }
    }
}
