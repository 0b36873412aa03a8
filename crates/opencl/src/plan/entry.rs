//! The table's functions for ops and plans.

use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};

use opencl3::command_queue::enqueue_nd_range_kernel;
use opencl3::kernel::{Kernel, set_kernel_arg};
use opencl3::types::cl_mem;
use qwen_hal_abi::{
    QHAL_MAX_PACKED, QHAL_PLAN_BATCH_INVARIANT, QHAL_PLAN_CAPTURE_SAFE, QHAL_PLAN_DETERMINISTIC,
    QHAL_PLAN_NEEDS_PREPACK, QHAL_SUPPORT_NATIVE, QHAL_SUPPORT_NO, QHAL_UNIMPLEMENTED, qhal_device, qhal_error,
    qhal_launch_args, qhal_op_desc, qhal_plan, qhal_plan_info, qhal_plan_opts, qhal_slice, qhal_stream, qhal_support,
};
use qwen_hal_plugin::array;
use qwen_hal_plugin::cmdlist::check_capture_safe;

use super::desc::{Desc, Place};
use super::recipe::{Arg, Packed, Recipe, Step};
use super::variants::Choice;
use crate::buffer::{Buffer, of_slice};
use crate::device::Device;
use crate::failure::{Failure, guard, reported, sized, sized_ref, write_text};
use crate::stream::{Stream, done};
use crate::unit::{Cut, Unit};

/// Flags of every plan: rows are independent, and orders of summation are fixed by shapes.
const FLAGS: u32 = QHAL_PLAN_DETERMINISTIC | QHAL_PLAN_BATCH_INVARIANT | QHAL_PLAN_CAPTURE_SAFE;
/// Work-items of a group of `pack`.
const PACKERS: usize = 64;

/// A kernel object; its arguments are state, so one launch at a time sets them and enqueues.
struct Shared(Mutex<Kernel>);
// SAFETY: a kernel object may be used by any thread, one at a time, which the lock sees to.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// What a `qhal_plan` is.
pub(super) struct Plan {
    unit: Arc<Unit>,
    recipe: Recipe,
    /// One for each step.
    kernels: Vec<Shared>,
    /// One for each packed weight.
    packers: Vec<Shared>,
}

impl Plan {
    fn new(unit: &Arc<Unit>, recipe: Recipe) -> Result<Self, Failure> {
        let kernel = |kernels, name: &str| {
            unit.programs.get(unit, kernels)?.kernel(name).map(|kernel| Shared(Mutex::new(kernel)))
        };
        let kernels = recipe.steps.iter().map(|step| kernel(&step.kernels, &step.name)).collect::<Result<_, _>>()?;
        let packers = recipe.packed.iter().map(|packed| kernel(&packed.kernels, "pack")).collect::<Result<_, _>>()?;
        Ok(Self { unit: Arc::clone(unit), recipe, kernels, packers })
    }

    /// Its device, and how it is cut if it could be cut otherwise.
    pub(super) fn choice(&self) -> (&Unit, Option<Choice>) {
        (&self.unit, self.recipe.choice)
    }

    fn info(&self) -> qhal_plan_info {
        let recipe = &self.recipe;
        let mut kernel = [0; 64];
        write_text(&mut kernel, &format!("{}.{}", recipe.kernel, self.unit.facts.tiling.name));
        let mut hasher = std::hash::DefaultHasher::new();
        (format!("{recipe:?}"), &self.unit.facts.fingerprint).hash(&mut hasher);
        let (mut packed_bytes, mut packed_layout) = ([0; QHAL_MAX_PACKED], [0; QHAL_MAX_PACKED]);
        for packed in &recipe.packed {
            packed_bytes[packed.input] = packed.packed_bytes();
            packed_layout[packed.input] = packed.layout;
        }
        qhal_plan_info {
            struct_size: size_of::<qhal_plan_info>() as u32,
            flags: FLAGS | if recipe.packed.is_empty() { 0 } else { QHAL_PLAN_NEEDS_PREPACK },
            in_place: recipe.in_place,
            workspace_bytes: recipe.workspace_bytes,
            workspace_alignment: 64,
            packed_bytes,
            packed_layout,
            flops: recipe.flops,
            bytes_read: recipe.bytes_read,
            bytes_written: recipe.bytes_written,
            kernel,
            content_hash: hasher.finish(),
        }
    }
}

pub(super) unsafe fn plan_of<'a>(plan: *mut qhal_plan) -> Result<&'a Plan, Failure> {
    // SAFETY: the host passes null or a living plan of ours.
    unsafe { plan.cast::<Plan>().as_ref() }.ok_or_else(|| Failure::invalid("no plan, expected one"))
}

pub(crate) unsafe extern "C" fn op_supports(
    device: *mut qhal_device,
    desc: *const qhal_op_desc,
    out: *mut qhal_support,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: the host passes an open device, a description, and a record of the size that it states.
    unsafe {
        guard(err, || {
            let device = Device::of(device)?;
            let out = sized(out)?;
            (out.level, out.estimated_ns, out.estimated_bytes) = (QHAL_SUPPORT_NATIVE, 0.0, 0.0);
            out.reason.fill(0);
            match super::parse(&Desc::new(desc)?, &device.unit, device.unit.facts.tiling.cut) {
                Ok(recipe) => {
                    out.estimated_bytes = recipe.bytes_read + recipe.bytes_written;
                    Ok(())
                }
                Err(failure) if failure.code == QHAL_UNIMPLEMENTED => {
                    out.level = QHAL_SUPPORT_NO;
                    write_text(&mut out.reason, &failure.message);
                    Ok(())
                }
                Err(failure) => Err(failure),
            }
        })
    }
}

pub(crate) unsafe extern "C" fn create(
    device: *mut qhal_device,
    desc: *const qhal_op_desc,
    opts: *const qhal_plan_opts,
    out: *mut *mut qhal_plan,
    info: *mut qhal_plan_info,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: as `op_supports`; `opts` may be null.
    unsafe {
        guard(err, || {
            let unit = &Device::of(device)?.unit;
            create_by(unit, desc, opts, unit.facts.tiling.cut, out, info)
        })
    }
}

/// Makes a plan whose products are cut so.
///
/// # Safety
/// As `plan_create`.
pub(super) unsafe fn create_by(
    unit: &Arc<Unit>,
    desc: *const qhal_op_desc,
    opts: *const qhal_plan_opts,
    cut: Cut,
    out: *mut *mut qhal_plan,
    info: *mut qhal_plan_info,
) -> Result<(), Failure> {
    // SAFETY: by the caller's promise.
    unsafe {
        let recipe = super::parse(&Desc::new(desc)?, unit, cut)?;
        if let Some(opts) = opts.as_ref() {
            check_wishes(&recipe, opts)?;
        }
        let info = sized(info)?;
        let plan = Plan::new(unit, recipe)?;
        let answer = plan.info();
        *info = qhal_plan_info { struct_size: info.struct_size, ..answer };
        *out = Box::into_raw(Box::new(plan)).cast();
        Ok(())
    }
}

fn check_wishes(recipe: &Recipe, opts: &qhal_plan_opts) -> Result<(), Failure> {
    let have = FLAGS | if recipe.packed.is_empty() { 0 } else { QHAL_PLAN_NEEDS_PREPACK };
    let missing = opts.required_flags & !have;
    if missing != 0 {
        return Err(Failure::unsupported(format!("plan flags {missing:#x} are required, the plan has {have:#x}")));
    }
    if opts.max_workspace != 0 && recipe.workspace_bytes > opts.max_workspace {
        let (have, limit) = (recipe.workspace_bytes, opts.max_workspace);
        return Err(Failure::unsupported(format!("{have} bytes of workspace are needed, at most {limit} are allowed")));
    }
    Ok(())
}

/// Arguments and sizes of a launch.
struct Launch<'a> {
    inputs: &'a [qhal_slice],
    outputs: &'a [qhal_slice],
    workspace: &'a qhal_slice,
    symbols: &'a [i64],
}

impl<'a> Launch<'a> {
    /// # Safety
    /// `args` is null or valid for `'a` with its arrays.
    unsafe fn new(args: *const qhal_launch_args) -> Result<Self, Failure> {
        // SAFETY: by the caller's promise.
        unsafe {
            let args: &'a qhal_launch_args = sized_ref(args)?;
            Ok(Self {
                inputs: array(args.inputs, args.num_inputs)?,
                outputs: array(args.outputs, args.num_outputs)?,
                workspace: &args.workspace,
                symbols: array(args.symbol_values, args.num_symbols)?,
            })
        }
    }

    fn slice(&self, place: Place) -> Result<&'a qhal_slice, Failure> {
        let slice = match place {
            Place::In(i) => self.inputs.get(i),
            Place::Out(i) => self.outputs.get(i),
        };
        slice.ok_or_else(|| Failure::invalid(format!("{place} is missing")))
    }

    /// Refuses operands that do not hold what the op reads and writes.
    ///
    /// # Safety
    /// Buffers of all slices are null or alive.
    unsafe fn check(&self, plan: &Plan) -> Result<(), Failure> {
        for need in plan.recipe.needs(self.symbols) {
            let (place, bytes) = need?;
            // SAFETY: by the caller's promise.
            let buffer = unsafe { of_slice(self.slice(place)?, bytes, matches!(place, Place::Out(_)), &plan.unit) };
            buffer.map_err(|failure| {
                let failure = failure.about(place);
                if let Place::In(i) = place { failure.at(i) } else { failure }
            })?;
        }
        if plan.recipe.workspace_bytes > 0 {
            // SAFETY: by the caller's promise.
            let buffer = unsafe { of_slice(self.workspace, plan.recipe.workspace_bytes, true, &plan.unit) };
            buffer.map_err(|failure| failure.about("workspace"))?;
        }
        Ok(())
    }
}

/// Sets arguments one after the other.
struct Setter<'a> {
    kernel: &'a Kernel,
    next: u32,
}

impl Setter<'_> {
    fn set<T>(&mut self, value: &T) -> Result<(), Failure> {
        // SAFETY: the value is read during the call; a wrong size is refused by the runtime.
        let set =
            unsafe { set_kernel_arg(self.kernel.get(), self.next, size_of::<T>(), std::ptr::from_ref(value).cast()) };
        self.next += 1;
        set.map_err(|error| reported("clSetKernelArg", error))
    }
    fn buffer(&mut self, memory: cl_mem, at: u64) -> Result<(), Failure> {
        self.set(&memory)?;
        self.set(&at)
    }
    /// # Safety
    /// The slice was checked.
    unsafe fn slice(&mut self, slice: &qhal_slice, behind: u64) -> Result<(), Failure> {
        // SAFETY: by the caller's promise, a living buffer of ours.
        let buffer = unsafe { &*slice.buffer.cast::<Buffer>() };
        self.buffer(buffer.memory(), slice.offset + behind)
    }

    /// # Safety
    /// The launch was checked against the recipe that the argument is of.
    unsafe fn arg(&mut self, arg: &Arg, launch: &Launch<'_>, stream: &Stream) -> Result<(), Failure> {
        // A size is at most 2^31 - 1: descriptions with larger ones were refused.
        let int = |n: usize| n as i32;
        match arg {
            // SAFETY: by the caller's promise.
            Arg::Operand(place, behind) => unsafe { self.slice(launch.slice(*place)?, *behind) },
            // SAFETY: as above.
            Arg::Workspace(behind) => unsafe { self.slice(launch.workspace, *behind) },
            Arg::Absent => self.buffer(stream.faults.memory(), 0),
            Arg::Int(value) => self.set(value),
            Arg::Real(value) => self.set(value),
            Arg::Size(extent) => self.set(&int(extent.value(launch.symbols)?)),
            Arg::Stride(mat) => self.set(&int(mat.stride(launch.symbols)?)),
            Arg::Faults => self.set(&stream.faults.memory()),
        }
    }
}

/// Enqueues a kernel whose arguments are set.
///
/// # Safety
/// Its arguments hold what it reads and writes over these sizes.
unsafe fn enqueue(stream: &Stream, kernel: &Kernel, global: [usize; 3], local: usize) -> Result<(), Failure> {
    let local = [local, 1, 1];
    // SAFETY: by the caller's promise; three dimensions.
    let event = unsafe {
        let (none, queue) = (std::ptr::null(), stream.queue.get());
        enqueue_nd_range_kernel(queue, kernel.get(), 3, none, global.as_ptr(), local.as_ptr(), 0, std::ptr::null())
    };
    done("clEnqueueNDRangeKernel", event)
}

/// # Safety
/// The launch was checked against the recipe that the step is of.
unsafe fn run(stream: &Stream, step: &Step, kernel: &Shared, launch: &Launch<'_>) -> Result<(), Failure> {
    if let Some((size, when)) = &step.when
        && !when.contains(&size.value(launch.symbols)?)
    {
        return Ok(());
    }
    let mut global = [0; 3];
    for (global, count) in global.iter_mut().zip(&step.global) {
        *global = count.value(launch.symbols)?;
    }
    if global.contains(&0) {
        return Ok(());
    }
    let kernel = kernel.0.lock().unwrap_or_else(PoisonError::into_inner);
    let mut setter = Setter { kernel: &kernel, next: 0 };
    for arg in &step.args {
        // SAFETY: by the caller's promise.
        unsafe { setter.arg(arg, launch, stream)? };
    }
    let doubtful = step.args.iter().any(|arg| matches!(arg, Arg::Faults));
    stream.enqueued(doubtful);
    // SAFETY: operands were checked for the sizes of the launch.
    unsafe { enqueue(stream, &kernel, global, step.local) }
}

/// # Safety
/// Both slices hold what is packed.
unsafe fn pack(
    stream: &Stream,
    packed: &Packed,
    kernel: &Shared,
    src: &qhal_slice,
    dst: &qhal_slice,
) -> Result<(), Failure> {
    let kernel = kernel.0.lock().unwrap_or_else(PoisonError::into_inner);
    let mut setter = Setter { kernel: &kernel, next: 0 };
    // SAFETY: by the caller's promise.
    unsafe {
        setter.slice(src, 0)?;
        setter.slice(dst, 0)?;
        setter.set(&(packed.rows as i32))?;
        setter.set(&(packed.units as i32))?;
        stream.enqueued(false);
        enqueue(stream, &kernel, [packed.units.next_multiple_of(PACKERS), packed.panels(), packed.experts], PACKERS)
    }
}

/// A stream of the plan's device.
///
/// # Safety
/// As [`Stream::of`].
unsafe fn stream_of<'a>(stream: *mut qhal_stream, plan: &Plan) -> Result<&'a Stream, Failure> {
    // SAFETY: by the caller's promise.
    let stream = unsafe { Stream::of(stream)? };
    stream.check()?;
    if Arc::ptr_eq(&stream.unit, &plan.unit) {
        Ok(stream)
    } else {
        Err(Failure::invalid("a stream of another device, expected one of the plan's"))
    }
}

pub(crate) unsafe extern "C" fn prepack(
    plan: *mut qhal_plan,
    stream: *mut qhal_stream,
    input: u32,
    src: qhal_slice,
    dst: qhal_slice,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: the host passes a plan and a stream of ours and living buffers that nobody else uses meanwhile.
    unsafe {
        guard(err, || {
            let plan = plan_of(plan)?;
            let stream = stream_of(stream, plan)?;
            let mut packed = plan.recipe.packed.iter().zip(&plan.packers);
            let (packed, kernel) = packed.find(|(packed, _)| packed.input == input as usize).ok_or_else(|| {
                Failure::invalid("an operand that is not packed, expected a weight").at(input as usize)
            })?;
            of_slice(&src, packed.source_bytes(), false, &plan.unit).map_err(|failure| failure.about("source"))?;
            of_slice(&dst, packed.packed_bytes(), true, &plan.unit).map_err(|failure| failure.about("target"))?;
            pack(stream, packed, kernel, &src, &dst)
        })
    }
}

pub(crate) unsafe extern "C" fn launch(
    plan: *mut qhal_plan,
    stream: *mut qhal_stream,
    args: *const qhal_launch_args,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: the host passes a plan and a stream of ours, arguments, and living buffers that nobody else uses meanwhile.
    unsafe { guard(err, || enqueue_launch(plan, stream, args)) }
}

/// Checks a launch and enqueues its kernels.
///
/// # Safety
/// Living handles of ours, arguments with arrays of the stated lengths, living buffers that nobody else uses meanwhile.
pub(crate) unsafe fn enqueue_launch(
    plan: *mut qhal_plan,
    stream: *mut qhal_stream,
    args: *const qhal_launch_args,
) -> Result<(), Failure> {
    // SAFETY: by the caller's promise.
    unsafe {
        let plan = plan_of(plan)?;
        let stream = stream_of(stream, plan)?;
        let launch = Launch::new(args)?;
        launch.check(plan)?;
        let mut steps = plan.recipe.steps.iter().zip(&plan.kernels);
        steps.try_for_each(|(step, kernel)| run(stream, step, kernel, &launch))
    }
}

/// Refuses a launch that cannot be recorded.
///
/// # Safety
/// As [`enqueue_launch`], without a stream.
pub(crate) unsafe fn check(plan: *mut qhal_plan, args: *const qhal_launch_args) -> Result<(), Failure> {
    // SAFETY: by the caller's promise.
    unsafe {
        let plan = plan_of(plan)?;
        check_capture_safe(FLAGS)?;
        Launch::new(args)?.check(plan)
    }
}

pub(crate) unsafe extern "C" fn destroy(plan: *mut qhal_plan, err: *mut qhal_error) -> i32 {
    // SAFETY: the host passes a plan of ours, once.
    unsafe {
        guard(err, || {
            if !plan.is_null() {
                drop(Box::from_raw(plan.cast::<Plan>()));
            }
            Ok(())
        })
    }
}
