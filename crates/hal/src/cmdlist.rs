//! The extension `cmdlist`: launches and copies recorded once, and enqueued together as often as wanted.
//!
//! Arguments are checked when they are recorded; a replay checks again what a patch changed, and whether reserved memory is still
//! committed. A list keeps the plans and buffers that it names alive, and is given back when no work is pending.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::{Arc, PoisonError};

use qwen_hal_abi::{
    QHAL_EXT_CMDLIST, QHAL_FEATURE_CMDLIST, QHAL_PATCH_INPUT, QHAL_PATCH_OUTPUT, QHAL_PATCH_SYMBOL,
    QHAL_PATCH_WORKSPACE, QHAL_PLAN_CAPTURE_SAFE, qhal_cmdlist, qhal_cmdlist_api, qhal_patch,
};

use crate::buffer::Slice;
use crate::device::{Dead, DeviceInner};
use crate::error::{HalError, LaunchError};
use crate::plan::{LaunchArgs, Place, Plan};
use crate::plugin::{call_extension, extension};
use crate::stream::{NO_SLICE, Stream, check_copy, device_copy};

/// Most commands of a list.
const MAX_COMMANDS: usize = 1 << 20;

/// A command as it was recorded, and as the current replay has it.
#[expect(clippy::large_enum_variant, reason = "nearly all commands are launches")]
#[derive(Debug)]
enum Command {
    Launch { plan: Arc<Plan>, args: LaunchArgs, patched: LaunchArgs },
    Copy { sides: [Slice; 2], patched: [Slice; 2] },
}

impl Command {
    fn name(&self) -> &'static str {
        match self {
            Self::Launch { plan, .. } => plan.op(),
            Self::Copy { .. } => "copy",
        }
    }

    /// Whether it uses memory that could have been given back since it was recorded.
    fn uses_reserved(&self) -> bool {
        match self {
            Self::Launch { patched, .. } => patched.uses_reserved(),
            Self::Copy { patched, .. } => patched.iter().any(|side| side.buffer.0.is_reserved()),
        }
    }

    fn patch(&mut self, patch: &Patch) -> bool {
        match (self, patch.place, &patch.slice) {
            (Self::Launch { patched, .. }, place, slice) => patched.patch(place, slice.as_ref(), patch.value),
            (Self::Copy { patched: [src, _], .. }, Place::Input(0), Some(slice)) => {
                src.clone_from(slice);
                true
            }
            (Self::Copy { patched: [_, dst], .. }, Place::Output(0), Some(slice)) => {
                dst.clone_from(slice);
                true
            }
            _ => false,
        }
    }

    fn restore(&mut self, place: Place) {
        match self {
            Self::Launch { args, patched, .. } => patched.restore(place, args),
            Self::Copy { sides, patched } => patched.clone_from(sides),
        }
    }

    fn check(&self, device: &Arc<DeviceInner>) -> Result<(), LaunchError> {
        match self {
            Self::Launch { plan, patched, .. } => plan.check(patched),
            // The bytes of a copy are those that were recorded.
            Self::Copy { sides, patched } => {
                let same = patched.iter().all(|side| side.size == sides[0].size);
                if !same {
                    let [src, dst] = patched.each_ref().map(|side| side.size);
                    let expected = format!("two slices of {} bytes", sides[0].size);
                    return Err(refusal(device, "copy", "patch".into(), expected, format!("{src} and {dst}")));
                }
                check_copy(device, &patched[0], &patched[1]).map_err(|error| told(device, error))
            }
        }
    }
}

fn refusal(device: &DeviceInner, op: &'static str, what: String, expected: String, found: String) -> LaunchError {
    LaunchError::Argument { plugin: Arc::clone(device.plugin.name_arc()), op, what, expected, found }
}

/// A refusal of a copy as one of a launch.
fn told(device: &DeviceInner, error: HalError) -> LaunchError {
    match error {
        HalError::Call(error) => error.into(),
        HalError::Argument { expected, found, .. } => refusal(device, "copy", "slice".into(), expected, found),
        other => refusal(device, "copy", "slice".into(), "a copy within the device".into(), other.to_string()),
    }
}

/// A list that takes commands. Used by one thread at a time.
pub struct Recorder {
    list: CommandList,
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorder").field("list", &self.list).finish()
    }
}

impl Recorder {
    pub(crate) fn begin(device: &Arc<DeviceInner>) -> Result<Self, HalError> {
        let plugin = &*device.plugin;
        if !device.caps.has(QHAL_FEATURE_CMDLIST) {
            return Err(plugin.argument("cmdlist.begin", "a device with command lists", "one without"));
        }
        // SAFETY: the table of this extension.
        let table =
            device.cmdlist.get_or_init(|| unsafe { extension(plugin, device.raw, QHAL_EXT_CMDLIST, "cmdlist") });
        let table: qhal_cmdlist_api = table.clone()?;
        let mut raw = std::ptr::null_mut();
        call_extension!(plugin, "", "cmdlist.begin", table, begin(device.raw.as_ptr(), &raw mut raw))?;
        let raw = NonNull::new(raw).ok_or_else(|| plugin.contract("cmdlist.begin", "a list", "null with status OK"))?;
        let device = Arc::clone(device);
        Ok(Self { list: CommandList { device, table, raw, commands: Vec::new(), not_sync: PhantomData } })
    }

    /// Adds a launch; its number for patches. The plan and the buffers are kept as long as the list.
    ///
    /// # Errors
    /// [`LaunchError::Argument`] if the plan is not capture-safe, or an operand or value does not fit it; else what the plugin reports.
    pub fn launch(&mut self, plan: &Arc<Plan>, args: &LaunchArgs) -> Result<usize, LaunchError> {
        let CommandList { device, table, raw, commands, .. } = &mut self.list;
        if !Arc::ptr_eq(&plan.device, device) {
            return Err(plan.argument(
                "plan".into(),
                "one of the list's device".into(),
                "one of another device".into(),
            ));
        }
        if plan.info().flags & QHAL_PLAN_CAPTURE_SAFE == 0 {
            let found = "one that may not be recorded: launch it by itself".into();
            return Err(plan.argument("plan".into(), "a plan with QHAL_PLAN_CAPTURE_SAFE".into(), found));
        }
        room(device, commands.len())?;
        plan.check(args)?;
        let raw_args = args.raw();
        call_extension!(
            &device.plugin,
            plan.op(),
            "cmdlist.record_launch",
            table,
            record_launch(raw.as_ptr(), plan.raw.as_ptr(), &raw const raw_args)
        )?;
        commands.push(Command::Launch { plan: Arc::clone(plan), args: args.clone(), patched: args.clone() });
        Ok(commands.len() - 1)
    }

    /// Adds a copy within the device; its number for patches.
    ///
    /// # Errors
    /// [`LaunchError::Argument`] as [`Stream::copy`] refuses it, and for no bytes; else what the plugin reports.
    pub fn copy(&mut self, src: &Slice, dst: &Slice) -> Result<usize, LaunchError> {
        let CommandList { device, table, raw, commands, .. } = &mut self.list;
        room(device, commands.len())?;
        check_copy(device, src, dst).map_err(|error| told(device, error))?;
        if src.size == 0 {
            return Err(refusal(device, "copy", "size".into(), "at least one byte".into(), "0".into()));
        }
        let desc = device_copy(src, dst);
        call_extension!(
            &device.plugin,
            "copy",
            "cmdlist.record_copy",
            table,
            record_copy(raw.as_ptr(), &raw const desc)
        )?;
        let sides = [src.clone(), dst.clone()];
        commands.push(Command::Copy { patched: sides.clone(), sides });
        Ok(commands.len() - 1)
    }

    /// The list, which takes no more commands and can be replayed.
    ///
    /// # Errors
    /// What the plugin reports.
    pub fn finish(self) -> Result<CommandList, HalError> {
        let CommandList { device, table, raw, .. } = &self.list;
        call_extension!(&device.plugin, "", "cmdlist.end", table, end(raw.as_ptr()))?;
        Ok(self.list)
    }
}

fn room(device: &DeviceInner, commands: usize) -> Result<(), LaunchError> {
    if commands < MAX_COMMANDS {
        return Ok(());
    }
    let expected = format!("at most {MAX_COMMANDS} commands");
    Err(refusal(device, "cmdlist", "number of commands".into(), expected, "one more".into()))
}

/// A recorded list. Used by one thread at a time.
pub struct CommandList {
    device: Arc<DeviceInner>,
    table: qhal_cmdlist_api,
    raw: NonNull<qhal_cmdlist>,
    commands: Vec<Command>,
    not_sync: PhantomData<Cell<()>>,
}

// SAFETY: the ABI lets a list move between threads as long as one uses it at a time, and the type is not Sync.
unsafe impl Send for CommandList {}

impl std::fmt::Debug for CommandList {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CommandList")
            .field("plugin", &self.device.plugin.name())
            .field("commands", &self.commands.len())
            .finish_non_exhaustive()
    }
}

impl CommandList {
    /// Number of commands.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.commands.len()
    }
    /// Whether nothing was recorded.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }

    /// Enqueues the commands in order, with what this replay has otherwise than recorded. Allocates nothing and does not wait.
    ///
    /// # Errors
    /// [`LaunchError::Argument`] if a patch does not fit, then nothing was enqueued; else what the plugin reports.
    pub fn replay(&mut self, stream: &Stream, patches: &Patches) -> Result<(), LaunchError> {
        if !Arc::ptr_eq(&stream.device, &self.device) {
            let found = "one of another device".into();
            return Err(refusal(&self.device, "cmdlist", "stream".into(), "one of the list's device".into(), found));
        }
        let result = self.enqueue(stream, patches);
        for patch in &patches.entries {
            if let Some(command) = self.commands.get_mut(patch.command) {
                command.restore(patch.place);
            }
        }
        result
    }

    fn enqueue(&mut self, stream: &Stream, patches: &Patches) -> Result<(), LaunchError> {
        for patch in &patches.entries {
            let count = self.commands.len();
            let Some(command) = self.commands.get_mut(patch.command) else {
                let expected = format!("a command below {count}");
                return Err(refusal(
                    &self.device,
                    "cmdlist",
                    "patch".into(),
                    expected,
                    format!("command {}", patch.command),
                ));
            };
            if !command.patch(patch) {
                let what = format!("patch of command {}", patch.command);
                let expected = "an operand that was recorded, or a symbol".into();
                return Err(refusal(&self.device, command.name(), what, expected, format!("{:?}", patch.place)));
            }
        }
        let reserved = self.commands.iter().any(Command::uses_reserved);
        let _gate = reserved.then(|| self.device.gate.read().unwrap_or_else(PoisonError::into_inner));
        let mut patched = patches.entries.iter().map(|patch| patch.command).peekable();
        for (at, command) in self.commands.iter().enumerate() {
            let mut changed = false;
            while patched.next_if_eq(&at).is_some() {
                changed = true;
            }
            if changed || (reserved && command.uses_reserved()) {
                command.check(&self.device)?;
            }
        }
        stream.mark_busy();
        Ok(call_extension!(
            &self.device.plugin,
            "",
            "cmdlist.replay",
            self.table,
            replay(self.raw.as_ptr(), stream.raw.as_ptr(), patches.raw.as_ptr(), patches.raw.len() as u32)
        )?)
    }
}

impl Drop for CommandList {
    fn drop(&mut self) {
        self.device.retire(Dead::CommandList(self.raw, self.table));
    }
}

#[derive(Debug, Clone)]
struct Patch {
    command: usize,
    place: Place,
    slice: Option<Slice>,
    value: i64,
}

/// What replays have otherwise than recorded: built once and changed in place, like [`LaunchArgs`].
#[derive(Debug, Clone, Default)]
pub struct Patches {
    /// Sorted by command and place.
    entries: Vec<Patch>,
    /// The same as plugins see them.
    raw: Vec<qhal_patch>,
}

// SAFETY: the raw handles are only passed on together with their owners, which are Send and Sync.
unsafe impl Send for Patches {}
// SAFETY: as above.
unsafe impl Sync for Patches {}

impl Patches {
    /// None.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
    /// Another slice for an operand that is read, or for the source of a copy (0).
    pub fn input(&mut self, command: usize, i: usize, slice: &Slice) -> &mut Self {
        self.set(command, Place::Input(i), Some(slice), 0)
    }
    /// Another slice for an operand that is written, or for the target of a copy (0).
    pub fn output(&mut self, command: usize, i: usize, slice: &Slice) -> &mut Self {
        self.set(command, Place::Output(i), Some(slice), 0)
    }
    /// Another workspace.
    pub fn workspace(&mut self, command: usize, slice: &Slice) -> &mut Self {
        self.set(command, Place::Workspace, Some(slice), 0)
    }
    /// Another value of a symbol.
    pub fn symbol(&mut self, command: usize, i: usize, value: i64) -> &mut Self {
        self.set(command, Place::Symbol(i), None, value)
    }
    /// Forgets all.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.raw.clear();
    }

    fn set(&mut self, command: usize, place: Place, slice: Option<&Slice>, value: i64) -> &mut Self {
        let (kind, index) = match place {
            Place::Input(i) => (QHAL_PATCH_INPUT, i),
            Place::Output(i) => (QHAL_PATCH_OUTPUT, i),
            Place::Workspace => (QHAL_PATCH_WORKSPACE, 0),
            Place::Symbol(i) => (QHAL_PATCH_SYMBOL, i),
        };
        let raw = qhal_patch {
            struct_size: size_of::<qhal_patch>() as u32,
            command: u32::try_from(command).unwrap_or(u32::MAX),
            kind,
            index: u32::try_from(index).unwrap_or(u32::MAX),
            slice: slice.map_or(NO_SLICE, Slice::raw),
            value,
        };
        let patch = Patch { command, place, slice: slice.cloned(), value };
        match self.entries.binary_search_by_key(&(command, place), |entry| (entry.command, entry.place)) {
            Ok(at) => (self.entries[at], self.raw[at]) = (patch, raw),
            Err(at) => {
                self.entries.insert(at, patch);
                self.raw.insert(at, raw);
            }
        }
        self
    }
}
