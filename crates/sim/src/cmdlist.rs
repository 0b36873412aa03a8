//! The extension `cmdlist`: a replay enqueues the commands one after the other, as single launches are, with the stream's pauses between
//! them. The modelled clock counts the launch time of each, as no sheet says what a chip saves by a list.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use qwen_hal_abi::*;
use qwen_hal_plugin::cmdlist::{self, CommandList};
use qwen_hal_plugin::{Failure, answer, guard};

use crate::device::{DEVICES, Device};
use crate::plan::Launch;
use crate::registry::Registry;
use crate::stream::{Command, Copy, STREAMS};

static LISTS: Registry<List> = Registry::new("command list");

/// What a `qhal_cmdlist` stands for.
struct List {
    device: Arc<Device>,
    commands: Mutex<CommandList>,
}

impl List {
    fn commands(&self) -> MutexGuard<'_, CommandList> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The command, ready for a worker; none if there is nothing to do.
    unsafe fn command(&self, command: &cmdlist::Command<'_>) -> Result<Option<Command>, Failure> {
        // SAFETY: the host passes living handles and arrays of the stated lengths.
        unsafe {
            match command {
                cmdlist::Command::Launch { plan, args } => {
                    let launch = Launch::new(*plan, *args)?;
                    cmdlist::check_capture_safe(launch.flags())?;
                    if !Arc::ptr_eq(launch.device(), &self.device) {
                        return Err(Failure::invalid("a plan of another device, expected one of the list's"));
                    }
                    Ok(Some(Command::Launch(launch)))
                }
                cmdlist::Command::Copy(desc) => Ok(Copy::new(desc)?.map(Command::Copy)),
            }
        }
    }
}

unsafe extern "C" fn begin(device: *mut qhal_device, out: *mut *mut qhal_cmdlist, err: *mut qhal_error) -> qhal_status {
    // SAFETY: the host passes room for the answer.
    unsafe {
        guard(err, || {
            let device = DEVICES.get(device)?;
            device.alive()?;
            answer(out, LISTS.insert(Arc::new(List { device, commands: Mutex::default() })))
        })
    }
}

unsafe extern "C" fn record_launch(
    list: *mut qhal_cmdlist,
    plan: *mut qhal_plan,
    args: *const qhal_launch_args,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes arguments.
    unsafe {
        guard(err, || {
            let list = LISTS.get(list)?;
            list.commands().launch(plan, args, &mut |command| list.command(command).map(drop))
        })
    }
}

unsafe extern "C" fn record_copy(
    list: *mut qhal_cmdlist,
    desc: *const qhal_copy_desc,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes a description.
    unsafe {
        guard(err, || {
            let list = LISTS.get(list)?;
            list.commands().copy(desc, &mut |command| list.command(command).map(drop))
        })
    }
}

unsafe extern "C" fn end(list: *mut qhal_cmdlist, err: *mut qhal_error) -> qhal_status {
    // SAFETY: the host passes null or a record.
    unsafe { guard(err, || LISTS.get(list)?.commands().end()) }
}

unsafe extern "C" fn replay(
    list: *mut qhal_cmdlist,
    stream: *mut qhal_stream,
    patches: *const qhal_patch,
    count: u32,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes patches.
    unsafe {
        guard(err, || {
            let (list, stream) = (LISTS.get(list)?, STREAMS.get(stream)?);
            if !Arc::ptr_eq(&stream.device, &list.device) {
                return Err(Failure::invalid("a stream of another device, expected one of the list's"));
            }
            let mut enqueue = |command: &cmdlist::Command<'_>| match list.command(command)? {
                Some(command) => stream.enqueue(command),
                None => Ok(()),
            };
            list.commands().replay(patches, count, &mut |command| list.command(command).map(drop), &mut enqueue)
        })
    }
}

unsafe extern "C" fn destroy(list: *mut qhal_cmdlist, err: *mut qhal_error) -> qhal_status {
    // SAFETY: the host passes null or a record; what was enqueued does not need the list.
    unsafe { guard(err, || if list.is_null() { Ok(()) } else { LISTS.remove(list).map(drop) }) }
}

/// The `cmdlist` extension.
pub(crate) static CMDLIST: qhal_cmdlist_api = qhal_cmdlist_api {
    struct_size: size_of::<qhal_cmdlist_api>() as u32,
    version: 1,
    begin: Some(begin),
    record_launch: Some(record_launch),
    record_copy: Some(record_copy),
    end: Some(end),
    replay: Some(replay),
    destroy: Some(destroy),
};
