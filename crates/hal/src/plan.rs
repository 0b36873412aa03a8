//! Planned ops: what the device answers, and launches that check their operands without allocating.

use std::ptr::NonNull;
use std::sync::{Arc, PoisonError, RwLockReadGuard};

use qwen_hal_abi::{
    QHAL_MAX_PACKED, QHAL_SUPPORT_EMULATED, QHAL_SUPPORT_NATIVE, QHAL_SUPPORT_NO, QHAL_SUPPORT_TUNED, qhal_launch_args,
    qhal_plan, qhal_plan_info, qhal_plan_opts, qhal_slice, qhal_support,
};

use crate::buffer::{Buffer, BufferInner, Slice};
use crate::device::{Dead, DeviceInner, Zeroed};
use crate::error::{HalError, LaunchError, PlanError};
use crate::op::OpDesc;
use crate::operand::{Operand, columns_apart};
use crate::plugin::{Plugin, call};
use crate::stream::{NO_SLICE, Stream};
use crate::text::fixed_text;

/// More workspace or packed bytes than this are not believed.
const MAX_BYTES: u64 = 1 << 48;
/// Stricter alignments than this are not believed.
const MAX_ALIGNMENT: u64 = 1 << 30;

/// How well a device has an op.
#[derive(Debug, Clone, PartialEq)]
pub enum Support {
    /// Not at all.
    No {
        /// The plugin's words.
        reason: String,
    },
    /// Correct, but not in the device's own way.
    Emulated(Estimate),
    /// Yes.
    Native(Estimate),
    /// Yes, with parameters chosen by measurement.
    Tuned(Estimate),
}

/// Cost at the expected dimensions, as far as the device knows.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Estimate {
    /// Nanoseconds.
    pub ns: Option<f64>,
    /// Bytes moved.
    pub bytes: Option<f64>,
}

impl Support {
    /// Whether a plan can be made.
    #[must_use]
    pub const fn is_supported(&self) -> bool {
        !matches!(self, Self::No { .. })
    }

    pub(crate) fn ask(device: &Arc<DeviceInner>, op: &OpDesc) -> Result<Self, PlanError> {
        let plugin = &*device.plugin;
        let symbols = op.check(plugin.name_arc())?;
        let desc = op.raw(symbols.len());
        let mut raw = qhal_support::zeroed();
        raw.struct_size = size_of::<qhal_support>() as u32;
        call!(plugin, op.name(), op_supports(device.raw.as_ptr(), &raw const desc, &raw mut raw))?;
        Ok(Self::read(plugin, "op_supports", &raw)?)
    }

    /// What a plugin answered.
    pub(crate) fn read(plugin: &Plugin, call: &'static str, raw: &qhal_support) -> Result<Self, HalError> {
        let known = |value: f64| (value.is_finite() && value > 0.0).then_some(value);
        let estimate = Estimate { ns: known(raw.estimated_ns), bytes: known(raw.estimated_bytes) };
        Ok(match raw.level {
            QHAL_SUPPORT_NO => Self::No { reason: fixed_text(&raw.reason) },
            QHAL_SUPPORT_EMULATED => Self::Emulated(estimate),
            QHAL_SUPPORT_NATIVE => Self::Native(estimate),
            QHAL_SUPPORT_TUNED => Self::Tuned(estimate),
            other => return Err(plugin.contract(call, "a level of QHAL_SUPPORT_*", other.to_string())),
        })
    }
}

/// Wishes for a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PlanOptions {
    /// `QHAL_PLAN_*` bits that the plan must have.
    pub required_flags: u32,
    /// Most bytes of workspace, 0 no limit.
    pub max_workspace: u64,
}

/// What a plan needs and promises.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanInfo {
    /// `QHAL_PLAN_*` bits.
    pub flags: u32,
    /// Bit n: output 0 may be the very slice of input n.
    pub in_place: u64,
    /// Bytes of workspace at the largest dimensions.
    pub workspace_bytes: u64,
    /// Alignment of the workspace.
    pub workspace_alignment: u64,
    /// Bytes of the packed form per input, 0 = taken as it is. As long as the inputs.
    pub packed_bytes: Vec<u64>,
    /// Identity of the packed form per input.
    pub packed_layout: Vec<u32>,
    /// Operations at the expected dimensions.
    pub flops: f64,
    /// Bytes read at the expected dimensions.
    pub bytes_read: f64,
    /// Bytes written at the expected dimensions.
    pub bytes_written: f64,
    /// Kernel chosen.
    pub kernel: String,
    /// Identity for the tuning store.
    pub content_hash: u64,
}

/// A prepared op. Any thread may launch it.
pub struct Plan {
    pub(crate) device: Arc<DeviceInner>,
    pub(crate) raw: NonNull<qhal_plan>,
    pub(crate) op: &'static str,
    inputs: Vec<Operand>,
    outputs: Vec<Operand>,
    symbols: Vec<(i64, i64)>,
    info: PlanInfo,
    pub(crate) preferred: bool,
}

// SAFETY: the ABI lets any thread use a plan handle; the rest is Send and Sync by itself.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

impl std::fmt::Debug for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plan").field("op", &self.op).field("info", &self.info).finish_non_exhaustive()
    }
}

impl Plan {
    /// A plan, of the variant of this name if one is named.
    pub(crate) fn create(
        device: &Arc<DeviceInner>,
        op: &OpDesc,
        options: &PlanOptions,
        variant: Option<&str>,
    ) -> Result<Self, PlanError> {
        let plugin = &*device.plugin;
        let symbols = op.check(plugin.name_arc())?;
        let desc = op.raw(symbols.len());
        let opts = qhal_plan_opts {
            struct_size: size_of::<qhal_plan_opts>() as u32,
            required_flags: options.required_flags,
            max_workspace: options.max_workspace,
        };
        let mut info = qhal_plan_info::zeroed();
        info.struct_size = size_of::<qhal_plan_info>() as u32;
        let mut raw = std::ptr::null_mut();
        match variant {
            None => call!(
                plugin,
                op.name(),
                plan_create(device.raw.as_ptr(), &raw const desc, &raw const opts, &raw mut raw, &raw mut info)
            )?,
            Some(name) => device.plan_create_as(op.name(), &desc, &opts, name, &mut raw, &mut info)?,
        }
        let raw = NonNull::new(raw).ok_or_else(|| plugin.contract("plan_create", "a plan", "null with status OK"))?;
        let packed = |i: usize| info.packed_bytes.get(i).copied().unwrap_or(0);
        let alignment = device.caps.buffer_alignment;
        let inputs = op.inputs().iter().enumerate().map(|(i, t)| Operand::new(t.raw(), packed(i), alignment)).collect();
        let outputs = op.outputs().iter().map(|t| Operand::new(t.raw(), 0, alignment)).collect();
        // From here on the plan is destroyed on every way out.
        let plan = Self {
            device: Arc::clone(device),
            raw,
            op: op.name(),
            inputs,
            outputs,
            symbols,
            info: read_info(&info, op.inputs().len()),
            preferred: false,
        };
        plan.check_info(&info, options)?;
        Ok(plan)
    }

    fn check_info(&self, raw: &qhal_plan_info, options: &PlanOptions) -> Result<(), HalError> {
        let contract = |expected: String, found: String| self.device.plugin.contract("plan_create", expected, found);
        let missing = options.required_flags & !raw.flags;
        if missing != 0 {
            return Err(contract("the required flags or a refusal".into(), format!("a plan without {missing:#x}")));
        }
        let limit = if options.max_workspace == 0 { MAX_BYTES } else { options.max_workspace };
        if raw.workspace_bytes > limit {
            return Err(contract(format!("at most {limit} bytes of workspace"), raw.workspace_bytes.to_string()));
        }
        let alignment = raw.workspace_alignment;
        if alignment > MAX_ALIGNMENT || (alignment != 0 && !alignment.is_power_of_two()) {
            return Err(contract("a power of two as workspace alignment".into(), alignment.to_string()));
        }
        for (i, bytes) in raw.packed_bytes.iter().enumerate().filter(|(_, bytes)| **bytes != 0) {
            let is_input = self.inputs.get(i).is_some_and(|input| !input.is_absent());
            if !is_input || *bytes > MAX_BYTES {
                return Err(contract(
                    format!("a packed form of at most {MAX_BYTES} bytes of an input"),
                    format!("{bytes} bytes of input {i}"),
                ));
            }
        }
        Ok(())
    }

    /// What the plan needs and promises.
    #[must_use]
    pub const fn info(&self) -> &PlanInfo {
        &self.info
    }
    /// The plugin's handle, for tools that test a plugin below the safe handles; alive as long as this.
    #[must_use]
    pub const fn raw_handle(&self) -> *mut qhal_plan {
        self.raw.as_ptr()
    }
    /// Whether it was planned with a variant of [`crate::Device::prefer`].
    #[must_use]
    pub const fn is_preferred(&self) -> bool {
        self.preferred
    }
    /// Name of the op.
    #[must_use]
    pub const fn op(&self) -> &'static str {
        self.op
    }
    /// Number of operands that are read.
    #[must_use]
    pub fn num_inputs(&self) -> usize {
        self.inputs.len()
    }
    /// Number of operands that are written.
    #[must_use]
    pub fn num_outputs(&self) -> usize {
        self.outputs.len()
    }
    /// Smallest and largest value of each symbol.
    #[must_use]
    pub fn symbols(&self) -> &[(i64, i64)] {
        &self.symbols
    }
    /// Bytes that input `i` must have at the largest values; 0 if it is absent or does not exist.
    #[must_use]
    pub fn input_bytes(&self, i: usize) -> u64 {
        present(self.inputs.get(i)).map_or(0, Operand::max_bytes)
    }
    /// Bytes that output `i` must have at the largest values; 0 if it does not exist.
    #[must_use]
    pub fn output_bytes(&self, i: usize) -> u64 {
        present(self.outputs.get(i)).map_or(0, Operand::max_bytes)
    }

    /// Lays weight `input` out as the plan wants it: from `src`, as in the file, to `dst` of `packed_bytes`.
    ///
    /// # Errors
    /// [`LaunchError::Argument`] if the plan does not pack this input or a slice does not fit; else what the plugin reports.
    pub fn prepack(&self, stream: &Stream, input: usize, src: &Slice, dst: &Slice) -> Result<(), LaunchError> {
        let packed = self.info.packed_bytes.get(input).copied().unwrap_or(0);
        let (Some(operand), true) = (self.inputs.get(input), packed > 0) else {
            let expected = "an input with packed_bytes".to_owned();
            return Err(self.argument(Role::Input.at(input), expected, "one that is taken as it is".into()));
        };
        self.check_stream(stream)?;
        let unpacked = Operand::new(&operand.tensor, 0, 1);
        let source = unpacked.max_bytes();
        let (src_slice, dst_slice) = (src.raw(), dst.raw());
        self.check_slice(Role::Source, 0, &src.buffer.0, &src_slice, source, unpacked.alignment, false)?;
        let alignment = self.info.workspace_alignment.max(self.device.caps.buffer_alignment);
        self.check_slice(Role::Target, 0, &dst.buffer.0, &dst_slice, packed, alignment, true)?;
        let _gate = self.gate(src.buffer.0.is_reserved() || dst.buffer.0.is_reserved());
        stream.mark_busy();
        Ok(call!(
            &self.device.plugin,
            self.op,
            plan_prepack(self.raw.as_ptr(), stream.raw.as_ptr(), input as u32, src_slice, dst_slice)
        )?)
    }

    /// Enqueues the op. Allocates nothing and does not wait.
    ///
    /// # Errors
    /// [`LaunchError::Argument`] if an operand or value does not fit the plan; else what the plugin reports.
    pub fn launch(&self, stream: &Stream, args: &LaunchArgs) -> Result<(), LaunchError> {
        self.check_stream(stream)?;
        // Taken before the ranges are checked, so that what was committed then is still committed when it is used.
        let _gate = self.gate(args.uses_reserved());
        self.check(args)?;
        let raw = args.raw();
        stream.mark_busy();
        Ok(call!(&self.device.plugin, self.op, plan_launch(self.raw.as_ptr(), stream.raw.as_ptr(), &raw const raw))?)
    }

    /// Refuses operands and values that do not fit the plan.
    pub(crate) fn check(&self, args: &LaunchArgs) -> Result<(), LaunchError> {
        self.check_symbols(&args.symbols)?;
        self.check_operands(args)
    }

    fn gate(&self, needed: bool) -> Option<RwLockReadGuard<'_, ()>> {
        needed.then(|| self.device.gate.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn check_stream(&self, stream: &Stream) -> Result<(), LaunchError> {
        if Arc::ptr_eq(&stream.device, &self.device) {
            return Ok(());
        }
        Err(self.argument("stream".into(), "one of the plan's device".into(), "one of another device".into()))
    }

    fn check_symbols(&self, values: &[i64]) -> Result<(), LaunchError> {
        if values.len() != self.symbols.len() {
            return Err(self.argument("symbols".into(), self.symbols.len().to_string(), values.len().to_string()));
        }
        for (i, (value, (min, max))) in values.iter().zip(&self.symbols).enumerate() {
            if value < min || value > max {
                return Err(self.argument(format!("symbol {i}"), format!("{min}..={max}"), value.to_string()));
            }
        }
        Ok(())
    }

    fn check_operands(&self, args: &LaunchArgs) -> Result<(), LaunchError> {
        self.check_side(Role::Input, &self.inputs, &args.inputs, &args.symbols)?;
        self.check_side(Role::Output, &self.outputs, &args.outputs, &args.symbols)?;
        let (slice, owner) = &args.workspace;
        if self.info.workspace_bytes > 0 {
            let Some(owner) = owner else {
                return Err(self.argument(
                    "workspace".into(),
                    format!("{} bytes", self.info.workspace_bytes),
                    "none".into(),
                ));
            };
            let alignment = self.info.workspace_alignment;
            self.check_slice(Role::Workspace, 0, &owner.0, slice, self.info.workspace_bytes, alignment, true)?;
        }
        self.check_overlaps(args)
    }

    fn check_side(&self, role: Role, operands: &[Operand], given: &Side, symbols: &[i64]) -> Result<(), LaunchError> {
        if operands.len() != given.slices.len() {
            let what = format!("number of {}s", role.name());
            return Err(self.argument(what, operands.len().to_string(), given.slices.len().to_string()));
        }
        for (i, (operand, (slice, owner))) in operands.iter().zip(given.slices.iter().zip(&given.owners)).enumerate() {
            match owner {
                Some(owner) if !operand.is_absent() => {
                    let write = matches!(role, Role::Output);
                    self.check_slice(role, i, &owner.0, slice, operand.bytes(symbols), operand.alignment, write)?;
                }
                None if operand.is_absent() => {}
                Some(_) => return Err(self.argument(role.at(i), "none, as planned".into(), "a slice".into())),
                None => return Err(self.argument(role.at(i), "a slice".into(), "none".into())),
            }
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "one check for every kind of slice")]
    fn check_slice(
        &self,
        role: Role,
        index: usize,
        owner: &BufferInner,
        slice: &qhal_slice,
        bytes: u64,
        alignment: u64,
        write: bool,
    ) -> Result<(), LaunchError> {
        if !Arc::ptr_eq(&owner.device, &self.device) {
            return Err(self.argument(
                role.at(index),
                "a buffer of the plan's device".into(),
                "one of another device".into(),
            ));
        }
        if slice.size < bytes {
            return Err(self.argument(role.at(index), format!("{bytes} bytes"), slice.size.to_string()));
        }
        if slice.offset & alignment.saturating_sub(1) != 0 {
            let expected = format!("an offset that is a multiple of {alignment}");
            return Err(self.argument(role.at(index), expected, slice.offset.to_string()));
        }
        match owner.fault(slice.offset, bytes, write) {
            None => Ok(()),
            Some((expected, found)) => Err(self.argument(role.at(index), expected, found)),
        }
    }

    /// No output or workspace may share bytes with another operand, but for the in-place pairs that the plan announced.
    fn check_overlaps(&self, args: &LaunchArgs) -> Result<(), LaunchError> {
        let range = |operand: &Operand, slice: &qhal_slice| (slice.offset, slice.offset + operand.bytes(&args.symbols));
        let meet = |a: (u64, u64), b: (u64, u64)| a.0 < b.1 && b.0 < a.1;
        let (inputs, outputs) =
            (self.inputs.iter().zip(&args.inputs.slices), self.outputs.iter().zip(&args.outputs.slices));
        let workspace = &args.workspace.0;
        let scratch = (workspace.offset, workspace.offset + self.info.workspace_bytes);
        let in_scratch = |operand: &Operand, slice: &qhal_slice| {
            self.info.workspace_bytes > 0 && slice.buffer == workspace.buffer && meet(range(operand, slice), scratch)
        };
        for (i, (operand, slice)) in inputs.clone().enumerate() {
            if in_scratch(operand, slice) {
                return Err(self.shared(Role::Input.at(i), "the workspace".into()));
            }
        }
        for (o, (out_operand, out)) in outputs.clone().enumerate() {
            if in_scratch(out_operand, out) {
                return Err(self.shared(Role::Output.at(o), "the workspace".into()));
            }
            let collide = |operand: &Operand, slice: &qhal_slice| {
                slice.buffer == out.buffer
                    && meet(range(operand, slice), range(out_operand, out))
                    && !columns_apart(operand, slice, out_operand, out)
            };
            for (i, (operand, slice)) in inputs.clone().enumerate() {
                let in_place = o == 0
                    && self.info.in_place.checked_shr(i as u32).unwrap_or(0) & 1 == 1
                    && slice.offset == out.offset
                    && operand.pitch == out_operand.pitch;
                if !in_place && collide(operand, slice) {
                    return Err(self.shared(Role::Output.at(o), format!("bytes of input {i}")));
                }
            }
            for (p, (operand, slice)) in outputs.clone().enumerate().take(o) {
                if collide(operand, slice) {
                    return Err(self.shared(Role::Output.at(o), format!("bytes of output {p}")));
                }
            }
        }
        Ok(())
    }

    #[cold]
    fn shared(&self, what: String, found: String) -> LaunchError {
        self.argument(what, "memory of its own".into(), found)
    }

    #[cold]
    pub(crate) fn argument(&self, what: String, expected: String, found: String) -> LaunchError {
        LaunchError::Argument { plugin: Arc::clone(self.device.plugin.name_arc()), op: self.op, what, expected, found }
    }
}

fn present(operand: Option<&Operand>) -> Option<&Operand> {
    operand.filter(|operand| !operand.is_absent())
}

impl Drop for Plan {
    fn drop(&mut self) {
        self.device.retire(Dead::Plan(self.raw));
    }
}

fn read_info(raw: &qhal_plan_info, num_inputs: usize) -> PlanInfo {
    let sane = |value: f64| if value.is_finite() && value >= 0.0 { value } else { 0.0 };
    let padding = num_inputs.saturating_sub(QHAL_MAX_PACKED);
    PlanInfo {
        flags: raw.flags,
        in_place: raw.in_place,
        workspace_bytes: raw.workspace_bytes,
        workspace_alignment: raw.workspace_alignment.max(1),
        packed_bytes: raw
            .packed_bytes
            .iter()
            .copied()
            .take(num_inputs)
            .chain(std::iter::repeat_n(0, padding))
            .collect(),
        packed_layout: raw
            .packed_layout
            .iter()
            .copied()
            .take(num_inputs)
            .chain(std::iter::repeat_n(0, padding))
            .collect(),
        flops: sane(raw.flops),
        bytes_read: sane(raw.bytes_read),
        bytes_written: sane(raw.bytes_written),
        kernel: fixed_text(&raw.kernel),
        content_hash: raw.content_hash,
    }
}

#[derive(Debug, Clone, Copy)]
enum Role {
    Input,
    Output,
    Workspace,
    Source,
    Target,
}

impl Role {
    const fn name(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Output => "output",
            Self::Workspace => "workspace",
            Self::Source => "prepack source",
            Self::Target => "prepack target",
        }
    }
    fn at(self, index: usize) -> String {
        match self {
            Self::Input | Self::Output => format!("{} {index}", self.name()),
            _ => self.name().to_owned(),
        }
    }
}

/// What of a launch can be patched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    Input(usize),
    Output(usize),
    Workspace,
    Symbol(usize),
}

/// Operands of one side, as plugins see them, beside what keeps them alive.
#[derive(Debug, Clone, Default)]
struct Side {
    slices: Vec<qhal_slice>,
    owners: Vec<Option<Buffer>>,
}

impl Side {
    fn new(n: usize) -> Self {
        Self { slices: vec![NO_SLICE; n], owners: vec![None; n] }
    }
    fn set(&mut self, i: usize, slice: Option<&Slice>) {
        // Beyond the planned number the operand is kept, so that the launch can refuse the wrong count.
        if i >= self.slices.len() {
            self.slices.resize(i + 1, NO_SLICE);
            self.owners.resize(i + 1, None);
        }
        if let (Some(to), Some(owner)) = (self.slices.get_mut(i), self.owners.get_mut(i)) {
            *to = slice.map_or(NO_SLICE, Slice::raw);
            match slice {
                // The common case of moving within a buffer costs no reference count.
                Some(slice) if owner.as_ref() == Some(&slice.buffer) => {}
                slice => *owner = slice.map(|slice| slice.buffer.clone()),
            }
        }
    }
}

/// Operands and values of launches, built once and changed in place.
#[derive(Debug, Clone)]
pub struct LaunchArgs {
    inputs: Side,
    outputs: Side,
    workspace: (qhal_slice, Option<Buffer>),
    symbols: Vec<i64>,
}

// SAFETY: the raw handles are only passed on together with their owners, which are Send and Sync.
unsafe impl Send for LaunchArgs {}
// SAFETY: as above.
unsafe impl Sync for LaunchArgs {}

impl LaunchArgs {
    /// Room for the operands of a plan, all absent, and its symbols at their largest values.
    #[must_use]
    pub fn new(plan: &Plan) -> Self {
        Self {
            inputs: Side::new(plan.inputs.len()),
            outputs: Side::new(plan.outputs.len()),
            workspace: (NO_SLICE, None),
            symbols: plan.symbols.iter().map(|(_, max)| *max).collect(),
        }
    }
    /// Sets an operand that is read.
    pub fn set_input(&mut self, i: usize, slice: &Slice) -> &mut Self {
        self.inputs.set(i, Some(slice));
        self
    }
    /// Sets an operand that is written.
    pub fn set_output(&mut self, i: usize, slice: &Slice) -> &mut Self {
        self.outputs.set(i, Some(slice));
        self
    }
    /// Makes an optional operand absent.
    pub fn clear_input(&mut self, i: usize) -> &mut Self {
        self.inputs.set(i, None);
        self
    }
    /// Sets the workspace.
    pub fn set_workspace(&mut self, slice: &Slice) -> &mut Self {
        self.workspace = (slice.raw(), Some(slice.buffer.clone()));
        self
    }
    /// Sets a value; values beyond the planned number are ignored.
    pub fn set_symbol(&mut self, i: usize, value: i64) -> &mut Self {
        if let Some(slot) = self.symbols.get_mut(i) {
            *slot = value;
        }
        self
    }

    /// As a plugin sees it; valid as long as this is unchanged.
    #[must_use]
    pub fn raw(&self) -> qhal_launch_args {
        qhal_launch_args {
            struct_size: size_of::<qhal_launch_args>() as u32,
            num_inputs: self.inputs.slices.len() as u32,
            num_outputs: self.outputs.slices.len() as u32,
            num_symbols: self.symbols.len() as u32,
            inputs: self.inputs.slices.as_ptr(),
            outputs: self.outputs.slices.as_ptr(),
            workspace: self.workspace.0,
            symbol_values: self.symbols.as_ptr(),
        }
    }

    /// Sets one place; false if it does not exist or was absent.
    pub(crate) fn patch(&mut self, place: Place, slice: Option<&Slice>, value: i64) -> bool {
        let set = |side: &mut Side, i: usize| {
            let present = side.owners.get(i).is_some_and(Option::is_some) && slice.is_some();
            if present {
                side.set(i, slice);
            }
            present
        };
        match (place, slice) {
            (Place::Input(i), _) => set(&mut self.inputs, i),
            (Place::Output(i), _) => set(&mut self.outputs, i),
            (Place::Workspace, Some(slice)) if self.workspace.1.is_some() => {
                self.set_workspace(slice);
                true
            }
            (Place::Workspace, _) => false,
            (Place::Symbol(i), _) => self.symbols.get_mut(i).map(|symbol| *symbol = value).is_some(),
        }
    }

    /// Makes one place what it is in `other`, arguments of the same plan.
    pub(crate) fn restore(&mut self, place: Place, other: &Self) {
        let copy = |to: &mut Side, from: &Side, i: usize| {
            if let (Some(slice), Some(owner)) = (from.slices.get(i), from.owners.get(i)) {
                (to.slices[i], to.owners[i]) = (*slice, owner.clone());
            }
        };
        match place {
            Place::Input(i) => copy(&mut self.inputs, &other.inputs, i),
            Place::Output(i) => copy(&mut self.outputs, &other.outputs, i),
            Place::Workspace => self.workspace.clone_from(&other.workspace),
            Place::Symbol(i) => {
                if let (Some(to), Some(from)) = (self.symbols.get_mut(i), other.symbols.get(i)) {
                    *to = *from;
                }
            }
        }
    }

    pub(crate) fn uses_reserved(&self) -> bool {
        let sides = self.inputs.owners.iter().chain(&self.outputs.owners);
        sides.chain(std::iter::once(&self.workspace.1)).flatten().any(|owner| owner.0.is_reserved())
    }
}
