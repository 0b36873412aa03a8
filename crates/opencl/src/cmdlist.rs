//! The extension `cmdlist`: recorded commands are enqueued one after the other, as single launches are. The command buffers of
//! `cl_khr_command_buffer` are not used: few runtimes have them, and none of them can change arguments.

use qwen_hal_abi::{qhal_cmdlist_api, qhal_device, qhal_stream};
use qwen_hal_plugin::cmdlist::{Command, Commands, table};

use crate::device::Device;
use crate::failure::Failure;
use crate::plan::entry;
use crate::stream;

/// The `cmdlist` extension.
pub(crate) static CMDLIST: qhal_cmdlist_api = table::<OpenCl>();

struct OpenCl;

impl Commands for OpenCl {
    unsafe fn device(device: *mut qhal_device) -> Result<(), Failure> {
        // SAFETY: the host passes null or an open device.
        unsafe { Device::of(device) }.map(drop)
    }

    unsafe fn check(command: &Command<'_>) -> Result<(), Failure> {
        // SAFETY: the host passes living handles and arrays of the stated lengths.
        unsafe {
            match command {
                Command::Launch { plan, args } => entry::check(*plan, *args),
                Command::Copy(desc) => stream::check_copy(desc),
            }
        }
    }

    unsafe fn enqueue(stream: *mut qhal_stream, command: &Command<'_>) -> Result<(), Failure> {
        // SAFETY: as above, and the stream is used by this thread alone.
        unsafe {
            match command {
                Command::Launch { plan, args } => entry::enqueue_launch(*plan, stream, *args),
                Command::Copy(desc) => stream::enqueue_copy_desc(stream, desc),
            }
        }
    }
}
