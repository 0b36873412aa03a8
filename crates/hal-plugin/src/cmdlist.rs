//! Command lists: what was recorded, and replays of it through the plugin's own launches and copies.
//!
//! A plugin says how a command is checked and enqueued ([`Commands`]) and gets the whole table ([`table`]), or keeps a [`CommandList`]
//! itself. Recorded arguments are copied; patches are put in for one replay and taken out again. A replay
//! allocates nothing, unless it has more patches than any before.

use std::marker::PhantomData;

use qwen_hal_abi::*;

use crate::{Failure, answer, array, element, guard, sized_ref};

/// A command with the arguments that it has now.
#[derive(Debug)]
pub enum Command<'a> {
    /// A launch of a plan.
    Launch {
        /// The plan.
        plan: *mut qhal_plan,
        /// Its arguments.
        args: &'a qhal_launch_args,
    },
    /// A copy within the device.
    Copy(&'a qhal_copy_desc),
}

/// A command as it was recorded.
#[derive(Debug)]
enum Recorded {
    Launch {
        plan: *mut qhal_plan,
        inputs: Vec<qhal_slice>,
        outputs: Vec<qhal_slice>,
        workspace: qhal_slice,
        symbols: Vec<i64>,
    },
    Copy(qhal_copy_desc),
}

impl Recorded {
    fn with<R>(&self, use_it: impl FnOnce(&Command<'_>) -> R) -> R {
        match self {
            Self::Launch { plan, inputs, outputs, workspace, symbols } => {
                let args = qhal_launch_args {
                    struct_size: size_of::<qhal_launch_args>() as u32,
                    num_inputs: inputs.len() as u32,
                    num_outputs: outputs.len() as u32,
                    num_symbols: symbols.len() as u32,
                    inputs: inputs.as_ptr(),
                    outputs: outputs.as_ptr(),
                    workspace: *workspace,
                    symbol_values: symbols.as_ptr(),
                };
                use_it(&Command::Launch { plan: *plan, args: &args })
            }
            Self::Copy(desc) => use_it(&Command::Copy(desc)),
        }
    }

    fn slice(&mut self, kind: u32, index: usize) -> Option<&mut qhal_slice> {
        let slice = match (self, kind) {
            (Self::Launch { inputs, .. }, QHAL_PATCH_INPUT) => inputs.get_mut(index),
            (Self::Launch { outputs, .. }, QHAL_PATCH_OUTPUT) => outputs.get_mut(index),
            (Self::Launch { workspace, .. }, QHAL_PATCH_WORKSPACE) if index == 0 => Some(workspace),
            (Self::Copy(qhal_copy_desc { src, .. }), QHAL_PATCH_INPUT) if index == 0 => Some(src),
            (Self::Copy(qhal_copy_desc { dst, .. }), QHAL_PATCH_OUTPUT) if index == 0 => Some(dst),
            _ => None,
        };
        slice.filter(|slice| !slice.buffer.is_null())
    }

    /// Puts a patch in; it then holds what was there before.
    fn exchange(&mut self, patch: &mut qhal_patch) -> bool {
        let index = patch.index as usize;
        if let (Self::Launch { symbols, .. }, QHAL_PATCH_SYMBOL) = (&mut *self, patch.kind) {
            let Some(symbol) = symbols.get_mut(index) else { return false };
            std::mem::swap(symbol, &mut patch.value);
            return true;
        }
        match self.slice(patch.kind, index) {
            Some(slice) if !patch.slice.buffer.is_null() => {
                std::mem::swap(slice, &mut patch.slice);
                true
            }
            _ => false,
        }
    }
}

/// Commands in order.
#[derive(Debug, Default)]
pub struct CommandList {
    commands: Vec<Recorded>,
    ended: bool,
    /// What the current replay took out.
    exchanged: Vec<qhal_patch>,
}

// SAFETY: handles are passed on to the plugin that made them, by one thread at a time.
unsafe impl Send for CommandList {}

impl CommandList {
    fn taking(&self) -> Result<(), Failure> {
        if self.ended { Err(precondition("a list that takes commands", "one that has ended")) } else { Ok(()) }
    }

    /// Adds a launch.
    ///
    /// # Safety
    /// `args` is null or arguments whose arrays have the stated lengths.
    ///
    /// # Errors
    /// If the list has ended, the arguments cannot be, or `check` refuses them.
    pub unsafe fn launch(
        &mut self,
        plan: *mut qhal_plan,
        args: *const qhal_launch_args,
        check: &mut dyn FnMut(&Command<'_>) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        self.taking()?;
        // SAFETY: by the caller's promise.
        let recorded = unsafe {
            let args = sized_ref(args)?;
            Recorded::Launch {
                plan,
                inputs: array(args.inputs, args.num_inputs)?.to_vec(),
                outputs: array(args.outputs, args.num_outputs)?.to_vec(),
                workspace: args.workspace,
                symbols: array(args.symbol_values, args.num_symbols)?.to_vec(),
            }
        };
        recorded.with(check)?;
        self.commands.push(recorded);
        Ok(())
    }

    /// Adds a copy.
    ///
    /// # Safety
    /// `desc` is null or a description.
    ///
    /// # Errors
    /// If the list has ended, a side is host memory, or `check` refuses it.
    pub unsafe fn copy(
        &mut self,
        desc: *const qhal_copy_desc,
        check: &mut dyn FnMut(&Command<'_>) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        self.taking()?;
        // SAFETY: by the caller's promise.
        let desc = unsafe { sized_ref(desc) }?;
        if !desc.src_host.is_null() || !desc.dst_host.is_null() {
            return Err(Failure::invalid("a copy with host memory, expected one within the device"));
        }
        let recorded = Recorded::Copy(*desc);
        recorded.with(check)?;
        self.commands.push(recorded);
        Ok(())
    }

    /// Takes no more commands.
    ///
    /// # Errors
    /// If it has ended already.
    pub fn end(&mut self) -> Result<(), Failure> {
        self.taking()?;
        self.ended = true;
        Ok(())
    }

    /// Checks the patched commands, then enqueues all in order.
    ///
    /// # Safety
    /// `patches` is null or `count` patches, as large as the first one states.
    ///
    /// # Errors
    /// If the list has not ended, a patch cannot be, or a check or an enqueuing fails.
    pub unsafe fn replay(
        &mut self,
        patches: *const qhal_patch,
        count: u32,
        check: &mut dyn FnMut(&Command<'_>) -> Result<(), Failure>,
        enqueue: &mut dyn FnMut(&Command<'_>) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        if !self.ended {
            return Err(precondition("a list that has ended", "one that still takes commands"));
        }
        if count > 0 && patches.is_null() {
            return Err(Failure::invalid(format!("a null array, expected {count} patches")));
        }
        // What a replay left that ended in a panic.
        self.restore();
        // SAFETY: by the caller's promise.
        let result = (0..count as usize)
            .try_for_each(|i| self.patch(unsafe { element(patches, i) }))
            .and_then(|()| self.check_patched(check))
            .and_then(|()| {
                let mut commands = self.commands.iter().enumerate();
                commands.try_for_each(|(at, command)| command.with(&mut *enqueue).map_err(|failure| failure.at(at)))
            });
        self.restore();
        result
    }

    /// Takes the patches out again, the last first.
    fn restore(&mut self) {
        while let Some(mut patch) = self.exchanged.pop() {
            if let Some(command) = self.commands.get_mut(patch.command as usize) {
                command.exchange(&mut patch);
            }
        }
    }

    fn patch(&mut self, mut patch: qhal_patch) -> Result<(), Failure> {
        let at = patch.command as usize;
        if self.exchanged.last().is_some_and(|before| before.command > patch.command) {
            return Err(Failure::invalid("patches that are not sorted by command"));
        }
        let count = self.commands.len();
        let command = self.commands.get_mut(at);
        let command = command.ok_or_else(|| Failure::out_of_range(format!("command {at}, the list has {count}")))?;
        if !command.exchange(&mut patch) {
            let (kind, index) = (patch.kind, patch.index);
            return Err(Failure::invalid(format!(
                "a patch of kind {kind} and index {index}, expected an operand that was recorded, or a symbol"
            ))
            .at(at));
        }
        self.exchanged.push(patch);
        Ok(())
    }

    fn check_patched(&self, check: &mut dyn FnMut(&Command<'_>) -> Result<(), Failure>) -> Result<(), Failure> {
        let mut last = None;
        for at in self.exchanged.iter().map(|patch| patch.command as usize) {
            if last.replace(at) != Some(at)
                && let Some(command) = self.commands.get(at)
            {
                command.with(&mut *check).map_err(|failure| failure.at(at))?;
            }
        }
        Ok(())
    }
}

fn precondition(expected: &str, found: &str) -> Failure {
    Failure::new(QHAL_FAILED_PRECONDITION, format!("expected {expected}, found {found}"))
}

/// Refuses a plan that may not be recorded.
///
/// # Errors
/// If its flags lack [`QHAL_PLAN_CAPTURE_SAFE`].
pub fn check_capture_safe(flags: u32) -> Result<(), Failure> {
    match flags & QHAL_PLAN_CAPTURE_SAFE {
        0 => Err(precondition("a plan with QHAL_PLAN_CAPTURE_SAFE", "one without")),
        _ => Ok(()),
    }
}

/// How a plugin checks and enqueues commands.
pub trait Commands {
    /// Refuses a device that is not open.
    ///
    /// # Safety
    /// The handle is null or open.
    ///
    /// # Errors
    /// If it is null.
    unsafe fn device(device: *mut qhal_device) -> Result<(), Failure>;

    /// Refuses a plan that may not be recorded, and operands that cannot be.
    ///
    /// # Safety
    /// Handles are null or alive.
    ///
    /// # Errors
    /// What is wrong.
    unsafe fn check(command: &Command<'_>) -> Result<(), Failure>;

    /// Enqueues a command.
    ///
    /// # Safety
    /// As [`Self::check`], and the stream is null or alive, used by this thread.
    ///
    /// # Errors
    /// What is wrong, or the stream's failure.
    unsafe fn enqueue(stream: *mut qhal_stream, command: &Command<'_>) -> Result<(), Failure>;
}

/// The extension `cmdlist` of a plugin whose handles are addresses.
#[must_use]
pub const fn table<C: Commands>() -> qhal_cmdlist_api {
    let _ = PhantomData::<C>;
    qhal_cmdlist_api {
        struct_size: size_of::<qhal_cmdlist_api>() as u32,
        version: 1,
        begin: Some(begin::<C>),
        record_launch: Some(record_launch::<C>),
        record_copy: Some(record_copy::<C>),
        end: Some(end),
        replay: Some(replay::<C>),
        destroy: Some(destroy),
    }
}

/// # Safety
/// The handle is null or a list of ours that no other thread uses.
unsafe fn list_of<'a>(list: *mut qhal_cmdlist) -> Result<&'a mut CommandList, Failure> {
    // SAFETY: by the caller's promise.
    unsafe { list.cast::<CommandList>().as_mut() }.ok_or_else(|| Failure::invalid("no command list, expected one"))
}

unsafe extern "C" fn begin<C: Commands>(
    device: *mut qhal_device,
    out: *mut *mut qhal_cmdlist,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes an open device and room for the answer.
    unsafe {
        guard(err, || {
            C::device(device)?;
            answer(out, Box::into_raw(Box::<CommandList>::default()).cast())
        })
    }
}

unsafe extern "C" fn record_launch<C: Commands>(
    list: *mut qhal_cmdlist,
    plan: *mut qhal_plan,
    args: *const qhal_launch_args,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes handles of ours and arguments.
    unsafe { guard(err, || list_of(list)?.launch(plan, args, &mut |command| C::check(command))) }
}

unsafe extern "C" fn record_copy<C: Commands>(
    list: *mut qhal_cmdlist,
    desc: *const qhal_copy_desc,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes a list of ours and a description.
    unsafe { guard(err, || list_of(list)?.copy(desc, &mut |command| C::check(command))) }
}

unsafe extern "C" fn end(list: *mut qhal_cmdlist, err: *mut qhal_error) -> qhal_status {
    // SAFETY: the host passes a list of ours.
    unsafe { guard(err, || list_of(list)?.end()) }
}

unsafe extern "C" fn replay<C: Commands>(
    list: *mut qhal_cmdlist,
    stream: *mut qhal_stream,
    patches: *const qhal_patch,
    count: u32,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes handles of ours and patches.
    unsafe {
        guard(err, || {
            list_of(list)?
                .replay(patches, count, &mut |command| C::check(command), &mut |command| C::enqueue(stream, command))
        })
    }
}

unsafe extern "C" fn destroy(list: *mut qhal_cmdlist, err: *mut qhal_error) -> qhal_status {
    // SAFETY: the host passes null or a list of ours, once; what it enqueued does not need it.
    unsafe {
        guard(err, || {
            if !list.is_null() {
                drop(Box::from_raw(list.cast::<CommandList>()));
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(offset: u64) -> qhal_slice {
        qhal_slice { buffer: std::ptr::dangling_mut::<u64>().cast(), offset, size: 64 }
    }

    fn patch(command: u32, kind: u32, index: u32, offset: u64, value: i64) -> qhal_patch {
        qhal_patch { struct_size: size_of::<qhal_patch>() as u32, command, kind, index, slice: slice(offset), value }
    }

    /// A launch of one input, one absent input and one output at these offsets, with one symbol.
    fn add(list: &mut CommandList, offset: u64, symbol: i64) -> Result<(), Failure> {
        let inputs = [slice(offset), qhal_slice { buffer: std::ptr::null_mut(), offset: 0, size: 0 }];
        let (output, symbols) = (slice(offset + 1), [symbol]);
        let args = qhal_launch_args {
            struct_size: size_of::<qhal_launch_args>() as u32,
            num_inputs: 2,
            num_outputs: 1,
            num_symbols: 1,
            inputs: inputs.as_ptr(),
            outputs: &raw const output,
            workspace: slice(offset + 2),
            symbol_values: symbols.as_ptr(),
        };
        // SAFETY: arrays of the stated lengths.
        unsafe { list.launch(std::ptr::dangling_mut::<u64>().cast(), &raw const args, &mut |_| Ok(())) }
    }

    /// Offsets and symbols of the launches of a replay.
    fn replayed(list: &mut CommandList, patches: &[qhal_patch]) -> Result<Vec<[i64; 4]>, Failure> {
        let mut seen = Vec::new();
        let mut enqueue = |command: &Command<'_>| {
            let Command::Launch { args, .. } = command else { return Err(Failure::internal("a copy")) };
            // SAFETY: the arrays of `add`.
            let (input, output, symbol) = unsafe { (&*args.inputs, &*args.outputs, *args.symbol_values) };
            seen.push([
                input.offset.cast_signed(),
                output.offset.cast_signed(),
                args.workspace.offset.cast_signed(),
                symbol,
            ]);
            Ok(())
        };
        // SAFETY: an array of its own length.
        let result = unsafe { list.replay(patches.as_ptr(), patches.len() as u32, &mut |_| Ok(()), &mut enqueue) };
        result.map(|()| seen)
    }

    #[test]
    fn patches_hold_for_one_replay() {
        let mut list = CommandList::default();
        add(&mut list, 10, 1).unwrap();
        add(&mut list, 20, 2).unwrap();
        assert_eq!(replayed(&mut list, &[]).unwrap_err().code, QHAL_FAILED_PRECONDITION);
        list.end().unwrap();
        assert_eq!(add(&mut list, 30, 3).unwrap_err().code, QHAL_FAILED_PRECONDITION);
        let recorded = vec![[10, 11, 12, 1], [20, 21, 22, 2]];
        assert_eq!(replayed(&mut list, &[]).unwrap(), recorded);
        let patches = [
            patch(0, QHAL_PATCH_SYMBOL, 0, 0, 9),
            patch(1, QHAL_PATCH_INPUT, 0, 70, 0),
            patch(1, QHAL_PATCH_OUTPUT, 0, 71, 0),
            patch(1, QHAL_PATCH_WORKSPACE, 0, 72, 0),
            // The later of two holds, and what was recorded comes back.
            patch(1, QHAL_PATCH_INPUT, 0, 80, 0),
        ];
        assert_eq!(replayed(&mut list, &patches).unwrap(), [[10, 11, 12, 9], [80, 71, 72, 2]]);
        assert_eq!(replayed(&mut list, &[]).unwrap(), recorded);
    }

    #[test]
    fn patches_that_cannot_be_enqueue_nothing_and_change_nothing() {
        let mut list = CommandList::default();
        add(&mut list, 10, 1).unwrap();
        add(&mut list, 20, 2).unwrap();
        list.end().unwrap();
        let good = patch(0, QHAL_PATCH_INPUT, 0, 70, 0);
        let absent = qhal_patch { slice: qhal_slice { buffer: std::ptr::null_mut(), offset: 0, size: 0 }, ..good };
        for (bad, code) in [
            (patch(2, QHAL_PATCH_INPUT, 0, 0, 0), QHAL_OUT_OF_RANGE),
            (patch(1, QHAL_PATCH_INPUT, 1, 0, 0), QHAL_INVALID_ARGUMENT),
            (patch(1, QHAL_PATCH_INPUT, 2, 0, 0), QHAL_INVALID_ARGUMENT),
            (patch(1, QHAL_PATCH_SYMBOL, 1, 0, 0), QHAL_INVALID_ARGUMENT),
            (patch(1, 99, 0, 0, 0), QHAL_INVALID_ARGUMENT),
            (absent, QHAL_INVALID_ARGUMENT),
        ] {
            assert_eq!(replayed(&mut list, &[good, bad]).unwrap_err().code, code, "{bad:?}");
            assert_eq!(replayed(&mut list, &[]).unwrap(), [[10, 11, 12, 1], [20, 21, 22, 2]]);
        }
        let unsorted = [patch(1, QHAL_PATCH_INPUT, 0, 70, 0), good];
        assert!(replayed(&mut list, &unsorted).unwrap_err().message.contains("sorted"));
        let mut enqueued = 0;
        // SAFETY: an array of one.
        let refused = unsafe {
            let (mut check, mut enqueue) = (
                |_: &Command<'_>| Err(Failure::invalid("no")),
                |_: &Command<'_>| {
                    enqueued += 1;
                    Ok(())
                },
            );
            list.replay(&raw const good, 1, &mut check, &mut enqueue)
        };
        assert_eq!((refused.unwrap_err().operand, enqueued), (Some(0), 0));
    }
}
