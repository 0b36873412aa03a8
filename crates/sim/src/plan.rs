//! Plans: the backend's plan inside, what the chip demands around it, and the modelled time of a launch.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use qwen_hal_abi::ops;
use qwen_hal_abi::*;
use qwen_hal_plugin::{Failure, answer, guard, sized, write_text};

use crate::buffer::Slice;
use crate::clock;
use crate::desc::Desc;
use crate::device::{DEVICES, Device, device_lost, work};
use crate::inner::InnerPlan;
use crate::narrow::Narrow;
use crate::registry::Registry;
use crate::stream::{Command, STREAMS, Worker};

pub(crate) static PLANS: Registry<Plan> = Registry::new("plan");

/// Most operands of a launch, workspace not counted.
const MAX_OPERANDS: usize = 24;
/// Most symbols of a launch.
const MAX_SYMBOLS: usize = 8;

/// Who computes.
enum Engine {
    /// The backend inside: float32 and integer products, and everything that is no product.
    Inner(InnerPlan),
    /// Products whose factors or sums are rounded.
    Narrow(Box<Narrow>),
}

/// What a `qhal_plan` stands for.
pub(crate) struct Plan {
    device: Arc<Device>,
    desc: Desc,
    engine: Engine,
    info: qhal_plan_info,
}

const NO_INFO: qhal_plan_info = qhal_plan_info {
    struct_size: size_of::<qhal_plan_info>() as u32,
    flags: 0,
    in_place: 0,
    workspace_bytes: 0,
    workspace_alignment: 1,
    packed_bytes: [0; QHAL_MAX_PACKED],
    packed_layout: [0; QHAL_MAX_PACKED],
    flops: 0.0,
    bytes_read: 0.0,
    bytes_written: 0.0,
    kernel: [0; 64],
    content_hash: 0,
};

impl Plan {
    /// Plans an op, or says why not.
    ///
    /// # Safety
    /// `raw` is null or a description.
    unsafe fn new(
        device: &Arc<Device>,
        raw: *const qhal_op_desc,
        opts: *const qhal_plan_opts,
    ) -> Result<Self, Failure> {
        device.alive()?;
        // SAFETY: by the caller's promise.
        let desc = unsafe { Desc::read(raw) }?;
        let operands = desc.inputs.len() + desc.outputs.len();
        if operands > MAX_OPERANDS || desc.symbols.len() > MAX_SYMBOLS {
            return Err(Failure::unsupported(format!("{operands} operands, expected at most {MAX_OPERANDS}")));
        }
        let alignment = device.model.alignment();
        let mut info = NO_INFO;
        let engine = if Narrow::is_meant(&desc) {
            device.model.check(&desc)?;
            let narrow = Narrow::new(&desc, device.model)?;
            info = narrow.info(info);
            Engine::Narrow(Box::new(narrow))
        } else {
            // Unknown mathematics is told first, then what the chip lacks.
            let inner = device.inner.plan(raw, opts, &mut info)?;
            device.model.check(&desc)?;
            Engine::Inner(inner)
        };
        // SAFETY: the host passes null or wishes.
        if let Some(wishes) = unsafe { opts.as_ref() } {
            let missing = wishes.required_flags & !info.flags;
            if missing != 0 || (wishes.max_workspace != 0 && info.workspace_bytes > wishes.max_workspace) {
                return Err(Failure::unsupported(format!("a plan without flags {missing:#x} or with less workspace")));
            }
        }
        info.workspace_alignment = info.workspace_alignment.max(alignment).max(64);
        let end = info.kernel.iter().position(|byte| *byte == 0).unwrap_or(0);
        let kernel = String::from_utf8_lossy(&info.kernel[..end]).into_owned();
        write_text(&mut info.kernel, &format!("{}/{kernel}", device.model.chip.name));
        Ok(Self { device: Arc::clone(device), desc, engine, info })
    }
}

/// Operands of a launch, ready for the worker.
struct Operands {
    slices: [Option<Slice>; MAX_OPERANDS],
    inputs: usize,
    outputs: usize,
    workspace: Option<Slice>,
    symbols: [i64; MAX_SYMBOLS],
}

impl Operands {
    /// Checks what a launch was given against what was planned.
    ///
    /// # Safety
    /// `args` is null or arguments whose arrays have the stated lengths.
    unsafe fn read(plan: &Plan, args: *const qhal_launch_args) -> Result<Self, Failure> {
        // SAFETY: by the caller's promise.
        let args = unsafe { args.as_ref() }.filter(|args| args.struct_size as usize >= size_of::<qhal_launch_args>());
        let args = args.ok_or_else(|| Failure::invalid("no launch arguments, or of an unknown size"))?;
        let desc = &plan.desc;
        let planned = [desc.inputs.len(), desc.outputs.len(), desc.symbols.len()];
        let given = [args.num_inputs, args.num_outputs, args.num_symbols].map(|n| n as usize);
        let nulls = [args.inputs.is_null(), args.outputs.is_null(), args.symbol_values.is_null()];
        if planned != given || nulls.iter().zip(planned).any(|(null, n)| *null && n > 0) {
            return Err(Failure::invalid(format!(
                "{} inputs, {} outputs, {} symbols: expected {planned:?}",
                given[0], given[1], given[2]
            )));
        }
        let mut symbols = [0; MAX_SYMBOLS];
        for (i, ((least, most), symbol)) in desc.symbols.iter().zip(&mut symbols).enumerate() {
            // SAFETY: within the stated length.
            *symbol = unsafe { *args.symbol_values.add(i) };
            if *symbol < *least || *symbol > *most {
                return Err(Failure::out_of_range(format!("symbol {i} is {symbol}, expected {least}..={most}")));
            }
        }
        let alignment = plan.device.model.alignment();
        let mut slices = [const { None }; MAX_OPERANDS];
        let both = desc.inputs.iter().chain(&desc.outputs);
        for (i, (tensor, place)) in both.zip(&mut slices).enumerate() {
            // SAFETY: within the stated lengths.
            let raw = unsafe {
                match i.checked_sub(planned[0]) {
                    None => &*args.inputs.add(i),
                    Some(output) => &*args.outputs.add(output),
                }
            };
            if tensor.is_absent() {
                continue;
            }
            let packed = if i < planned[0] { plan.info.packed_bytes.get(i).copied().unwrap_or(0) } else { 0 };
            let bytes = if packed > 0 { packed } else { tensor.extent(&symbols) };
            let slice = Slice::of(raw).map_err(|failure| failure.about(format!("operand {i}")))?;
            slice.address(bytes)?;
            if !slice.offset.is_multiple_of(alignment) {
                return Err(Failure::invalid(format!(
                    "operand {i} begins at {}, expected a multiple of {alignment} on {}",
                    slice.offset, plan.device.model.chip.name
                )));
            }
            *place = Some(slice);
        }
        let workspace = match plan.info.workspace_bytes {
            0 => None,
            bytes => {
                let slice = Slice::of(&args.workspace)?;
                slice.address(bytes)?;
                Some(slice)
            }
        };
        Ok(Self { slices, inputs: planned[0], outputs: planned[1], workspace, symbols })
    }
}

/// A launch on its way.
pub(crate) struct Launch {
    plan: Arc<Plan>,
    operands: Operands,
}

const NO_SLICE: qhal_slice = qhal_slice { buffer: std::ptr::null_mut(), offset: 0, size: 0 };

impl Launch {
    /// A launch that the host asked for.
    ///
    /// # Safety
    /// `args` is null or arguments whose arrays have the stated lengths.
    pub(crate) unsafe fn new(plan: *mut qhal_plan, args: *const qhal_launch_args) -> Result<Self, Failure> {
        let plan = PLANS.get(plan)?;
        // SAFETY: by the caller's promise.
        let operands = unsafe { Operands::read(&plan, args) }?;
        Ok(Self { plan, operands })
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.plan.device
    }

    /// `QHAL_PLAN_*` bits.
    pub(crate) fn flags(&self) -> u32 {
        self.plan.info.flags
    }

    pub(crate) fn run(&self, worker: &mut Worker) -> Result<(), Failure> {
        let device = &self.plan.device;
        let count = begin_launch(device)?;
        let symbols = &self.operands.symbols[..self.plan.desc.symbols.len()];
        match &self.plan.engine {
            Engine::Inner(plan) => self.launch_inner(plan, worker)?,
            Engine::Narrow(narrow) => narrow.run(device.inner.cpu, symbols, &|i| {
                let slice = self.operands.slices.get(i)?.as_ref()?;
                slice.address(slice.size).ok()
            })?,
        }
        let integers = |i: usize| self.integers(i, symbols);
        let (operations, bytes) = clock::work(&self.plan.desc, symbols, &integers);
        work(device, device.model.unit(&self.plan.desc), operations, bytes);
        if device.settings.nan == Some(count) {
            self.poison(symbols)?;
        }
        if device.settings.flip.is_some_and(|every| count.is_multiple_of(every)) {
            self.flip(worker, symbols)?;
        }
        Ok(())
    }

    fn launch_inner(&self, plan: &InnerPlan, worker: &Worker) -> Result<(), Failure> {
        let slices = self.operands.slices.each_ref().map(|slice| slice.as_ref().map_or(NO_SLICE, Slice::inner));
        let (inputs, rest) = slices.split_at(self.operands.inputs);
        let args = qhal_launch_args {
            struct_size: size_of::<qhal_launch_args>() as u32,
            num_inputs: self.operands.inputs as u32,
            num_outputs: self.operands.outputs as u32,
            num_symbols: self.plan.desc.symbols.len() as u32,
            inputs: inputs.as_ptr(),
            outputs: rest.as_ptr(),
            workspace: self.operands.workspace.as_ref().map_or(NO_SLICE, Slice::inner),
            symbol_values: self.operands.symbols.as_ptr(),
        };
        plan.launch(&worker.inner, &args)
    }

    /// Integers of an input, and the one behind them that starts of queries have.
    fn integers(&self, i: usize, symbols: &[i64]) -> Vec<i32> {
        let of = || {
            let (tensor, slice) = (self.plan.desc.inputs.get(i)?, self.operands.slices.get(i)?.as_ref()?);
            let count = (tensor.elements(symbols) + 1).min(slice.size / 4);
            let at = slice.address(4 * count).ok()?.cast::<i32>();
            // SAFETY: so many bytes are there, and work on the stream is in order.
            Some((0..count as usize).map(|i| unsafe { at.add(i).read_unaligned() }).collect())
        };
        of().unwrap_or_default()
    }

    /// The first value of the first output becomes one whose bits are all set: of floats, no number.
    fn poison(&self, symbols: &[i64]) -> Result<(), Failure> {
        let output = self.plan.desc.outputs.first().zip(self.operands.slices[self.operands.inputs].as_ref());
        let Some((tensor, slice)) = output else { return Ok(()) };
        let bytes = tensor.extent(symbols).min(slice.size).min(4);
        // SAFETY: within the output, which this stream is writing.
        unsafe { slice.address(bytes)?.write_bytes(0xff, bytes as usize) };
        Ok(())
    }

    /// One bit of the first output becomes another.
    fn flip(&self, worker: &mut Worker, symbols: &[i64]) -> Result<(), Failure> {
        let output = self.plan.desc.outputs.first().zip(self.operands.slices[self.operands.inputs].as_ref());
        let Some((tensor, slice)) = output else { return Ok(()) };
        let bytes = tensor.extent(symbols).min(slice.size);
        if bytes > 0 {
            let (at, bit) = (worker.random.below(bytes), worker.random.below(8));
            // SAFETY: within the output, which this stream is writing.
            unsafe { *slice.address(bytes)?.add(at as usize) ^= 1 << bit };
        }
        Ok(())
    }
}

/// Counts a launch or collective, and lets the faults happen that are set for it.
pub(crate) fn begin_launch(device: &Device) -> Result<u64, Failure> {
    let count = 1 + device.counters.launches.fetch_add(1, Ordering::Relaxed);
    if device.settings.lost == Some(count) {
        device.counters.lost.store(true, Ordering::Release);
        return Err(device_lost());
    }
    if device.settings.hang == Some(count) {
        hang(device)?;
    }
    Ok(count)
}

/// A launch that does not end: until the watchdog, or the loss of the device.
fn hang(device: &Device) -> Result<(), Failure> {
    device.counters.hanging.store(true, Ordering::Release);
    std::thread::sleep(Duration::from_millis(device.settings.watchdog_ms));
    device.counters.hanging.store(false, Ordering::Release);
    let limit = device.settings.watchdog_ms;
    Err(Failure::new(QHAL_DEADLINE_EXCEEDED, format!("a launch did not end in {limit} ms (injected fault)")))
}

/// A weight to be brought into the form of a plan.
pub(crate) struct Prepack {
    plan: Arc<Plan>,
    input: u32,
    src: Slice,
    dst: Slice,
}

impl Prepack {
    pub(crate) fn run(&self, worker: &Worker) -> Result<(), Failure> {
        match &self.plan.engine {
            Engine::Inner(plan) => plan.prepack(&worker.inner, self.input, self.src.inner(), self.dst.inner())?,
            Engine::Narrow(narrow) => {
                let from = self.src.address(self.src.size)?;
                let to = self.dst.address(self.dst.size)?;
                // SAFETY: both ranges are there, and nobody else uses them meanwhile.
                unsafe {
                    let from = std::slice::from_raw_parts(from, self.src.size as usize);
                    let to = std::slice::from_raw_parts_mut(to, self.dst.size as usize);
                    narrow.pack(self.input as usize, from, to)?;
                }
            }
        }
        work(&self.plan.device, qwen_chips::Dtype::F32, 0.0, (self.src.size + self.dst.size) as f64);
        Ok(())
    }
}

pub(crate) unsafe extern "C" fn op_supports(
    device: *mut qhal_device,
    raw: *const qhal_op_desc,
    out: *mut qhal_support,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes a description and a record.
    unsafe {
        guard(err, || {
            let device = DEVICES.get(device)?;
            let out = sized(out)?;
            (out.level, out.estimated_ns, out.estimated_bytes) = (QHAL_SUPPORT_NATIVE, 0.0, 0.0);
            out.reason.fill(0);
            match supports(&device, raw) {
                Ok((ns, bytes)) => {
                    (out.estimated_ns, out.estimated_bytes) = (ns, bytes);
                    Ok(())
                }
                Err(failure) if failure.code == QHAL_UNIMPLEMENTED => {
                    out.level = QHAL_SUPPORT_NO;
                    let reason = if failure.message.is_empty() { "unsupported" } else { &failure.message };
                    write_text(&mut out.reason, reason);
                    Ok(())
                }
                Err(failure) => Err(failure),
            }
        })
    }
}

/// Modelled nanoseconds and bytes of an op at its expected sizes, or why there is no plan for it.
///
/// # Safety
/// `raw` is null or a description.
unsafe fn supports(device: &Arc<Device>, raw: *const qhal_op_desc) -> Result<(f64, f64), Failure> {
    device.alive()?;
    // SAFETY: by the caller's promise.
    let desc = unsafe { Desc::read(raw) }?;
    if Narrow::is_meant(&desc)
        || desc.inputs.len() + desc.outputs.len() > MAX_OPERANDS
        || desc.symbols.len() > MAX_SYMBOLS
    {
        // SAFETY: as above.
        unsafe { Plan::new(device, raw, std::ptr::null()) }?;
    } else {
        let support = device.inner.supports(raw)?;
        if support.level == QHAL_SUPPORT_NO {
            let end = support.reason.iter().position(|byte| *byte == 0).unwrap_or(support.reason.len());
            return Err(Failure::unsupported(String::from_utf8_lossy(&support.reason[..end]).into_owned()));
        }
        device.model.check(&desc)?;
    }
    let (operations, bytes) = clock::work(&desc, &desc.expected(), &|_| Vec::new());
    Ok((device.model.launch_ns(device.model.unit(&desc), operations, bytes), bytes))
}

pub(crate) unsafe extern "C" fn create(
    device: *mut qhal_device,
    raw: *const qhal_op_desc,
    opts: *const qhal_plan_opts,
    out: *mut *mut qhal_plan,
    info: *mut qhal_plan_info,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes a description, wishes, and room for the answers.
    unsafe {
        guard(err, || {
            let device = DEVICES.get(device)?;
            let plan = Plan::new(&device, raw, opts)?;
            let info = sized(info)?;
            *info = qhal_plan_info { struct_size: info.struct_size, ..plan.info };
            answer(out, PLANS.insert(Arc::new(plan)))
        })
    }
}

pub(crate) unsafe extern "C" fn prepack(
    plan: *mut qhal_plan,
    stream: *mut qhal_stream,
    input: u32,
    src: qhal_slice,
    dst: qhal_slice,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes null or a record.
    unsafe {
        guard(err, || {
            let (plan, stream) = (PLANS.get(plan)?, STREAMS.get(stream)?);
            let (src, dst) = (Slice::of(&src)?, Slice::of(&dst)?);
            let packed = plan.info.packed_bytes.get(input as usize).copied().unwrap_or(0);
            let stored = plan.desc.inputs.get(input as usize).map_or(0, |tensor| tensor.bytes(&[]));
            if packed == 0 {
                return Err(Failure::invalid(format!(
                    "input {input} is not packed, expected a weight with packed_bytes"
                )));
            }
            src.address(stored)?;
            dst.address(packed)?;
            stream.enqueue(Command::Prepack(Prepack { plan, input, src, dst }))
        })
    }
}

pub(crate) unsafe extern "C" fn launch(
    plan: *mut qhal_plan,
    stream: *mut qhal_stream,
    args: *const qhal_launch_args,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes arguments.
    unsafe {
        guard(err, || {
            let stream = STREAMS.get(stream)?;
            stream.enqueue(Command::Launch(Launch::new(plan, args)?))
        })
    }
}

pub(crate) unsafe extern "C" fn destroy(plan: *mut qhal_plan, err: *mut qhal_error) -> qhal_status {
    // SAFETY: the host passes null or a record.
    unsafe { guard(err, || if plan.is_null() { Ok(()) } else { PLANS.remove(plan).map(drop) }) }
}

/// Whether the form of a product's sums is one that only [`Narrow`] computes.
pub(crate) const fn narrow_sums(accumulate: u32) -> bool {
    accumulate == ops::QHAL_DTYPE_F16
}
