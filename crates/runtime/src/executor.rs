//! A program made ready for a device: plans, operands, and the walk over them.
//!
//! Everything that does not change from step to step is bound once: plans, weights, tables, arena ranges. A step copies its
//! integer inputs to the device, sets the symbols and launches the list. Operands are bound anew only when a buffer moved.
//! Where a second device helps out, each instruction has a side, and values are copied between the sides as
//! [`crate::placement`] decided.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Instant;

use qwen_hal::abi::{QHAL_PLAN_BATCH_INVARIANT, QHAL_PLAN_DETERMINISTIC, QHAL_USAGE_ACTIVATION, QHAL_USAGE_STAGING};
use qwen_hal::{Buffer, BufferDesc, Device, LaunchArgs, Plan, PlanOptions, Scope, Slice, Stream};
use qwen_ir::program::{Instruction, Operand, Place, Program};
use qwen_ir::{Dim, Phase, StateDecl, Symbol, inputs};

use crate::RuntimeError;
use crate::arenas::Arenas;
use crate::batch::Batch;
use crate::cost::{self, Cost, Sizes, StepObserver};
use crate::describe::{Context, Described, describe};
use crate::group::{Member, is_exchange};
use crate::kv_memory::KvMemory;
use crate::placement::{self, Assignment, FALLBACK, MAIN, Side};
use crate::weights::{WeightKey, WeightStore};

/// Where an operand of a launch comes from.
#[derive(Debug)]
enum Source {
    /// The same at every step.
    Fixed(Slice),
    /// Place and byte offset; bound when buffers move.
    Moving(Place, u64),
    Absent,
}

/// What an instruction has the device do.
enum Work {
    /// An op.
    Plan { plan: Arc<Plan>, args: LaunchArgs, symbols: Vec<Symbol> },
    /// The sum over the ranks of a group of so many rows of values.
    AllReduce { member: Member, rows: Vec<Dim>, columns: u64, from: Option<Slice>, to: Option<Slice> },
}

struct Launch {
    side: Side,
    work: Work,
    inputs: Vec<Source>,
    outputs: Vec<Source>,
    origin: String,
}

impl Launch {
    fn start(&mut self, values: &[i64; 5], stream: &Stream) -> Result<(), RuntimeError> {
        let started = match &mut self.work {
            Work::Plan { plan, args, symbols } => {
                for (i, symbol) in symbols.iter().enumerate() {
                    args.set_symbol(i, values[*symbol as usize]);
                }
                plan.launch(stream, args)
            }
            Work::AllReduce { member, rows, columns, from, to } => {
                let (Some(from), Some(to)) = (from, to) else { return Err(no_buffer("an exchange")) };
                let count = placement::elements(rows, *columns, values);
                let bytes = count.saturating_mul(4);
                member.all_reduce(stream, count, &from.slice(0, bytes)?, &to.slice(0, bytes)?)
            }
        };
        started.map_err(|source| RuntimeError::Launch { origin: self.origin.clone(), source: Box::new(source) })
    }

    /// Makes an operand be where it is now.
    fn bind(&mut self, program: &Program, on: &DeviceSide, workspace: Option<&Slice>) -> Result<(), RuntimeError> {
        for (i, source) in self.inputs.iter().enumerate() {
            let slice = resolve(source, program, on)?;
            match (&mut self.work, slice) {
                (Work::Plan { args, .. }, Some(slice)) => {
                    args.set_input(i, &slice);
                }
                (Work::Plan { args, .. }, None) => {
                    args.clear_input(i);
                }
                (Work::AllReduce { from, .. }, slice) => *from = slice,
            }
        }
        for (i, source) in self.outputs.iter().enumerate() {
            let slice = resolve(source, program, on)?;
            match (&mut self.work, slice) {
                (Work::Plan { args, .. }, Some(slice)) => {
                    args.set_output(i, &slice);
                }
                (Work::Plan { .. }, None) => {}
                (Work::AllReduce { to, .. }, slice) => *to = slice,
            }
        }
        if let (Work::Plan { args, .. }, Some(workspace)) = (&mut self.work, workspace) {
            args.set_workspace(workspace);
        }
        Ok(())
    }

    /// Bytes of each input that stays the same from step to step.
    fn weight_bytes(&self) -> Vec<u64> {
        let bytes = |source: &Source| if let Source::Fixed(slice) = source { slice.size() } else { 0 };
        self.inputs.iter().map(bytes).collect()
    }
}

/// A program on a device.
pub struct Executor {
    program: Program,
    assignment: Assignment,
    launches: Vec<Launch>,
    /// By side.
    workspace_bytes: [u64; 2],
    bound: [Option<(u64, u64)>; 2],
    /// Sides that read each input of the program.
    readers: Vec<[bool; 2]>,
    /// Side of the result.
    result: Side,
    /// Host memory that values cross in.
    crossing: Vec<u8>,
    plans: usize,
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor").field("launches", &self.launches.len()).field("plans", &self.plans).finish()
    }
}

/// Buffers that a step fills from the host and reads back.
#[derive(Debug)]
pub(crate) struct StepBuffers {
    inputs: HashMap<&'static str, Buffer>,
    result: Option<Buffer>,
    epoch: u64,
    table: Vec<i32>,
}

impl StepBuffers {
    pub(crate) fn new() -> Self {
        Self { inputs: HashMap::new(), result: None, epoch: 0, table: Vec::new() }
    }

    pub(crate) const fn result_buffer(&self) -> Option<&Buffer> {
        self.result.as_ref()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.inputs.values().chain(&self.result).map(Buffer::size).sum()
    }

    fn ensure_input(&mut self, device: &Device, name: &'static str, bytes: u64) -> Result<(), RuntimeError> {
        if self.inputs.get(name).map_or(0, Buffer::size) < bytes {
            // Doubling bounds how often a growing block table moves.
            let bytes = bytes.next_power_of_two().max(64);
            let desc = BufferDesc::new(bytes, QHAL_USAGE_STAGING, Scope::Temporary, name);
            self.inputs.insert(name, device.alloc(&desc)?);
            self.epoch += 1;
        }
        Ok(())
    }

    fn ensure_result(&mut self, device: &Device, bytes: u64) -> Result<(), RuntimeError> {
        if self.result.as_ref().map_or(0, Buffer::size) < bytes {
            let desc = BufferDesc::new(bytes, QHAL_USAGE_ACTIVATION, Scope::Temporary, "result");
            self.result = Some(device.alloc(&desc)?);
            self.epoch += 1;
        }
        Ok(())
    }
}

/// A device of a model and what the model has on it.
#[derive(Debug)]
pub(crate) struct DeviceSide {
    pub(crate) device: Device,
    pub(crate) stream: Stream,
    pub(crate) weights: WeightStore,
    pub(crate) arenas: Arenas,
    pub(crate) kv: KvMemory,
    pub(crate) buffers: StepBuffers,
    /// Its place in a group, if it computes a part of the model.
    pub(crate) member: Option<Member>,
}

impl Executor {
    /// Plans every instruction and brings its weights into the form that the plan wants. Equal instructions share a plan.
    /// `sides` holds the model's device and, if the assignment uses it, the one that helps out.
    ///
    /// # Errors
    /// If a device can't do an op, or a weight does not fit.
    pub(crate) fn new(
        program: Program,
        assignment: Assignment,
        phase: Phase,
        states: &[StateDecl],
        sides: &mut [DeviceSide],
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, RuntimeError> {
        let context = Context { bounds: program.bounds, phase, states };
        let mut constants: HashMap<(Side, u32), Slice> = HashMap::new();
        let mut plans = [Plans::default(), Plans::default()];
        let mut launches = Vec::with_capacity(program.instructions.len());
        let mut workspace_bytes = [0; 2];
        for (i, instruction) in program.instructions.iter().enumerate() {
            let side = assignment.side(i);
            let on = sides.get_mut(side).ok_or_else(|| no_buffer("the second device"))?;
            if is_exchange(&instruction.op) {
                launches.push(exchange(instruction, side, on)?);
                progress(i + 1, program.instructions.len());
                continue;
            }
            let (described, plan) = plans[side].of(instruction, &context, &on.device)?;
            workspace_bytes[side] = workspace_bytes[side].max(plan.info().workspace_bytes);
            let mut source = |(input, operand): (usize, &Operand)| {
                Ok(match operand.place {
                    Place::Absent => Source::Absent,
                    Place::Constant { index } => Source::Fixed(match constants.entry((side, index)) {
                        Entry::Occupied(slice) => slice.get().clone(),
                        Entry::Vacant(place) => {
                            let values = program.constants.get(index as usize).ok_or_else(|| no_place(operand))?;
                            place.insert(upload_constant(values, &on.device, &on.stream)?).clone()
                        }
                    }),
                    Place::Weight { id, source } => {
                        Source::Fixed(on.weights.for_plan(&on.device, &on.stream, (id, source), &plan, input)?)
                    }
                    place => Source::Moving(place, operand.byte_offset),
                })
            };
            let mut sources = |operands: &[Operand]| {
                operands.iter().enumerate().map(&mut source).collect::<Result<Vec<_>, RuntimeError>>()
            };
            let inputs = sources(&instruction.inputs)?;
            let outputs = sources(&instruction.outputs)?;
            launches.push(Launch {
                side,
                work: Work::Plan { args: LaunchArgs::new(&plan), plan, symbols: described.symbols },
                inputs,
                outputs,
                origin: instruction.origin.clone(),
            });
            progress(i + 1, program.instructions.len());
        }
        let of_sides =
            |place: &dyn Fn(&Place) -> bool| [MAIN, FALLBACK].map(|side| assignment.uses(&program, side, place));
        let inputs = (0..program.inputs.len() as u32)
            .map(|wanted| of_sides(&|place| matches!(place, Place::Input { index } if *index == wanted)));
        let readers = inputs.collect();
        let result = if of_sides(&|place| *place == Place::Result)[FALLBACK] { FALLBACK } else { MAIN };
        let plans = plans.iter().map(|plans| plans.shared.len()).sum();
        tracing::debug!(instructions = launches.len(), plans, ?workspace_bytes, "planned");
        Ok(Self {
            program,
            assignment,
            launches,
            workspace_bytes,
            bound: [None; 2],
            readers,
            result,
            crossing: Vec::new(),
            plans,
        })
    }

    /// The program.
    #[must_use]
    pub const fn program(&self) -> &Program {
        &self.program
    }
    /// Bytes of workspace that its plans need on a side.
    #[must_use]
    pub(crate) const fn workspace_bytes(&self, side: Side) -> u64 {
        self.workspace_bytes[side]
    }
    /// Values that a step copies between devices.
    #[must_use]
    pub const fn crossings(&self) -> usize {
        self.assignment.transfers.len()
    }
    /// Distinct plans.
    #[must_use]
    pub const fn plans(&self) -> usize {
        self.plans
    }
    /// Launches of a step.
    #[must_use]
    pub fn launches(&self) -> usize {
        self.launches.len()
    }

    /// Computes a step; `result` holds the rows that were wanted afterwards.
    pub(crate) fn run(
        &mut self,
        batch: &Batch,
        sides: &mut [DeviceSide],
        result: &mut Vec<f32>,
        observer: Option<&mut dyn StepObserver>,
    ) -> Result<(), RuntimeError> {
        let values = self.begin(batch, sides)?;
        match observer {
            None => self.launch_all(&values, sides)?,
            Some(observer) => self.launch_observed(batch, &values, sides, observer)?,
        }
        Self::wait(sides)?;
        if batch.rows() == 0 {
            result.clear();
            return Ok(());
        }
        self.read(&values, sides, result)
    }

    /// Waits for everything that was launched.
    pub(crate) fn wait(sides: &[DeviceSide]) -> Result<(), RuntimeError> {
        sides.iter().try_for_each(|side| Ok(side.stream.wait()?))
    }

    /// Brings the rows of the result to the host.
    pub(crate) fn read(
        &self,
        values: &[i64; 5],
        sides: &[DeviceSide],
        result: &mut Vec<f32>,
    ) -> Result<(), RuntimeError> {
        let rows = values[Symbol::Rows as usize] as usize;
        let count = rows * self.program.result_width as usize;
        // What is there from the last step is written over: nothing is cleared first.
        result.resize(count, 0.0);
        let last = &sides[self.result];
        let buffer = last.buffers.result.as_ref().ok_or_else(|| no_buffer("the result"))?;
        let slice = buffer.slice(0, 4 * count as u64)?;
        last.stream.copy_to_host(&slice, bytemuck::cast_slice_mut(result.as_mut_slice()))?;
        Ok(())
    }

    /// Makes room for so many rows of the result.
    pub(crate) fn reserve_result(&self, rows: u64, sides: &mut [DeviceSide]) -> Result<(), RuntimeError> {
        let width = self.program.result_width;
        let bytes = width.checked_mul(4).and_then(|row| row.checked_mul(rows));
        let bytes = bytes.ok_or_else(|| RuntimeError::Step {
            what: "result",
            expected: "a size below 2^64 bytes".into(),
            found: format!("{rows} rows of {width} values"),
        })?;
        let last = sides.get_mut(self.result).ok_or_else(|| no_buffer("the result"))?;
        last.buffers.ensure_result(&last.device, bytes)
    }

    /// Brings the inputs of a step to the devices and makes every operand ready; gives the values of the symbols.
    pub(crate) fn begin(&mut self, batch: &Batch, sides: &mut [DeviceSide]) -> Result<[i64; 5], RuntimeError> {
        let values = self.symbol_values(batch, sides)?;
        self.upload(batch, sides)?;
        // A step whose result nobody wants still computes one row of it: programs have no way around its end.
        self.reserve_result(values[Symbol::Rows as usize] as u64, sides)?;
        for (side, on) in sides.iter().enumerate() {
            self.bind(side, on)?;
        }
        Ok(values)
    }

    /// Launches one instruction of a step that was begun.
    pub(crate) fn launch_one(&mut self, i: usize, values: &[i64; 5], sides: &[DeviceSide]) -> Result<(), RuntimeError> {
        let launch = self.launches.get_mut(i).ok_or_else(|| no_buffer("an instruction"))?;
        launch.start(values, &sides[launch.side].stream)
    }

    /// Launches one instruction and the copies before it, of which `crossed` were made; gives how many were made now.
    pub(crate) fn launch_next(
        &mut self,
        i: usize,
        crossed: usize,
        values: &[i64; 5],
        sides: &[DeviceSide],
    ) -> Result<usize, RuntimeError> {
        let crossed = cross(&self.assignment, crossed, i, values, sides, &mut self.crossing)?;
        self.launch_one(i, values, sides)?;
        Ok(crossed)
    }

    /// Bytes of each weight of an instruction, and what it costs.
    pub(crate) fn cost_of(&self, i: usize, batch: &Batch, values: &[i64; 5]) -> Option<(&Instruction, Cost)> {
        let (launch, instruction) = (self.launches.get(i)?, self.program.instructions.get(i)?);
        Some((instruction, cost::cost(instruction, &launch.weight_bytes(), &Sizes { batch, symbols: values })))
    }

    /// Kernel of an instruction.
    pub(crate) fn kernel(&self, i: usize) -> &str {
        match self.launches.get(i).map(|launch| &launch.work) {
            Some(Work::Plan { plan, .. }) => &plan.info().kernel,
            _ => "",
        }
    }

    fn launch_all(&mut self, values: &[i64; 5], sides: &[DeviceSide]) -> Result<(), RuntimeError> {
        if let ([only], true) = (sides, self.assignment.transfers.is_empty()) {
            return self.launches.iter_mut().try_for_each(|launch| launch.start(values, &only.stream));
        }
        let mut crossed = 0;
        for (i, launch) in self.launches.iter_mut().enumerate() {
            crossed = cross(&self.assignment, crossed, i, values, sides, &mut self.crossing)?;
            launch.start(values, &sides[launch.side].stream)?;
        }
        Ok(())
    }

    /// One instruction after the other: each is waited for before the next. What is copied for it counts as its time.
    fn launch_observed(
        &mut self,
        batch: &Batch,
        values: &[i64; 5],
        sides: &[DeviceSide],
        observer: &mut dyn StepObserver,
    ) -> Result<(), RuntimeError> {
        let sizes = Sizes { batch, symbols: values };
        let mut crossed = 0;
        for (i, (launch, instruction)) in self.launches.iter_mut().zip(&self.program.instructions).enumerate() {
            let start = Instant::now();
            crossed = cross(&self.assignment, crossed, i, values, sides, &mut self.crossing)?;
            let stream = &sides[launch.side].stream;
            launch.start(values, stream)?;
            stream.wait()?;
            let time = start.elapsed();
            observer.completed(instruction, &cost::cost(instruction, &launch.weight_bytes(), &sizes), time);
        }
        Ok(())
    }

    /// What a step asks of a machine, without computing it.
    pub(crate) fn cost(&self, batch: &Batch, sides: &[DeviceSide]) -> Result<Vec<Cost>, RuntimeError> {
        let values = self.symbol_values(batch, sides)?;
        let sizes = Sizes { batch, symbols: &values };
        let both = self.launches.iter().zip(&self.program.instructions);
        Ok(both.map(|(launch, instruction)| cost::cost(instruction, &launch.weight_bytes(), &sizes)).collect())
    }

    fn symbol_values(&self, batch: &Batch, sides: &[DeviceSide]) -> Result<[i64; 5], RuntimeError> {
        let mut values = [0i64; 5];
        values[Symbol::Tokens as usize] = batch.tokens() as i64;
        values[Symbol::Sequences as usize] = batch.sequences() as i64;
        values[Symbol::Rows as usize] = batch.rows().max(1) as i64;
        values[Symbol::Blocks as usize] = batch.blocks() as i64;
        // Sides hold different caches of the same blocks; what all of them have backed is there for every op.
        let committed = sides.iter().filter(|side| side.kv.has_states()).map(|side| side.kv.committed()).min();
        values[Symbol::CacheBlocks as usize] = i64::from(committed.unwrap_or(0));
        for symbol in Symbol::ALL {
            let bounds = self.program.bounds.get(symbol);
            let value = values[symbol as usize] as u64;
            if value < bounds.min || value > bounds.max {
                return Err(RuntimeError::Step {
                    what: symbol.name(),
                    expected: format!("{} to {}", bounds.min, bounds.max),
                    found: value.to_string(),
                });
            }
        }
        Ok(values)
    }

    fn upload(&self, batch: &Batch, sides: &mut [DeviceSide]) -> Result<(), RuntimeError> {
        let mut table = std::mem::take(&mut sides[MAIN].buffers.table);
        batch.block_table(&mut table);
        let no_rows = [0i32];
        for (name, readers) in self.program.inputs.iter().zip(&self.readers) {
            let values: &[i32] = match *name {
                inputs::TOKEN_IDS => &batch.token_ids,
                inputs::POSITIONS => &batch.positions,
                inputs::SLOTS => &batch.slots,
                inputs::QUERY_START => &batch.query_start,
                inputs::CONTEXT_LEN => &batch.context_len,
                inputs::BLOCK_TABLE => &table,
                inputs::LOGIT_ROWS if batch.logit_rows.is_empty() => &no_rows,
                inputs::LOGIT_ROWS => &batch.logit_rows,
                other => {
                    return Err(RuntimeError::Step {
                        what: "input",
                        expected: "one of the known inputs".into(),
                        found: other.to_owned(),
                    });
                }
            };
            let bytes: &[u8] = bytemuck::cast_slice(values);
            for on in sides.iter_mut().zip(readers).filter(|(_, reads)| **reads).map(|(on, _)| on) {
                on.buffers.ensure_input(&on.device, name, bytes.len() as u64)?;
                let buffer = on.buffers.inputs.get(name).ok_or_else(|| no_buffer(name))?;
                on.stream.copy_from_host(bytes, &buffer.slice(0, bytes.len() as u64)?)?;
            }
        }
        sides[MAIN].buffers.table = table;
        Ok(())
    }

    /// Binds moving operands of a side if a buffer moved since the last step.
    fn bind(&mut self, side: Side, on: &DeviceSide) -> Result<(), RuntimeError> {
        let epoch = (on.arenas.epoch(), on.buffers.epoch);
        if self.bound[side] == Some(epoch) {
            return Ok(());
        }
        let workspace = on.arenas.workspace();
        for launch in self.launches.iter_mut().filter(|launch| launch.side == side) {
            launch.bind(&self.program, on, workspace.as_ref())?;
        }
        self.bound[side] = Some(epoch);
        Ok(())
    }
}

/// Copies the values that instruction `at` needs from the other side; `next` is the first copy that was not made yet.
fn cross(
    assignment: &Assignment,
    mut next: usize,
    at: usize,
    values: &[i64; 5],
    sides: &[DeviceSide],
    memory: &mut Vec<u8>,
) -> Result<usize, RuntimeError> {
    while let Some(transfer) = assignment.transfers.get(next).filter(|transfer| transfer.before == at) {
        let (from, to) = (&sides[transfer.from()], &sides[transfer.to]);
        let bytes = transfer.bytes(values);
        let slice = |side: &DeviceSide| {
            let rest = side.arenas.slice(transfer.pool, transfer.offset).ok_or_else(|| no_buffer("an operand"))?;
            Ok::<Slice, RuntimeError>(rest.slice(0, bytes)?)
        };
        memory.resize(usize::try_from(bytes).unwrap_or(usize::MAX), 0);
        from.stream.copy_to_host(&slice(from)?, memory)?;
        to.stream.copy_from_host(memory, &slice(to)?)?;
        next += 1;
    }
    Ok(next)
}

fn resolve(source: &Source, program: &Program, on: &DeviceSide) -> Result<Option<Slice>, RuntimeError> {
    let (place, offset) = match source {
        Source::Absent => return Ok(None),
        Source::Fixed(slice) => return Ok(Some(slice.clone())),
        Source::Moving(place, offset) => (*place, *offset),
    };
    let slice = match place {
        Place::Arena { pool, offset } => on.arenas.slice(pool, offset),
        Place::State { id, layer } => on.kv.slice(id, layer),
        Place::Input { index } => {
            program.inputs.get(index as usize).and_then(|name| on.buffers.inputs.get(name)).map(Buffer::whole)
        }
        Place::Result => on.buffers.result.as_ref().map(Buffer::whole),
        Place::Weight { .. } | Place::Constant { .. } | Place::Absent => None,
    };
    let slice = slice.ok_or_else(|| no_buffer("an operand"))?;
    let rest = slice.size().checked_sub(offset).ok_or_else(|| no_buffer("an operand"))?;
    Ok(Some(slice.slice(offset, rest)?))
}

/// Plans of a program by description. A description prints every field that it is planned from, so its text is its identity.
#[derive(Default)]
struct Plans {
    shared: HashMap<String, Arc<Plan>>,
}

impl Plans {
    fn of(
        &mut self,
        instruction: &Instruction,
        context: &Context<'_>,
        device: &Device,
    ) -> Result<(Described, Arc<Plan>), RuntimeError> {
        let options =
            PlanOptions { required_flags: QHAL_PLAN_DETERMINISTIC | QHAL_PLAN_BATCH_INVARIANT, max_workspace: 0 };
        let described = describe(instruction, context);
        let plan = match self.shared.entry(format!("{:?}", described.desc)) {
            Entry::Occupied(plan) => Arc::clone(plan.get()),
            Entry::Vacant(place) => {
                let plan = device.plan(&described.desc, &options).map_err(|source| RuntimeError::Plan {
                    origin: instruction.origin.clone(),
                    source: Box::new(source),
                })?;
                Arc::clone(place.insert(Arc::new(plan)))
            }
        };
        Ok((described, plan))
    }
}

/// Plans a program without loading it, and tells of each weight that it reads: the plan and the number of its input.
pub(crate) fn weights_of(
    program: &Program,
    phase: Phase,
    states: &[StateDecl],
    device: &Device,
    visit: &mut dyn FnMut(WeightKey, &Arc<Plan>, usize),
) -> Result<(), RuntimeError> {
    let context = Context { bounds: program.bounds, phase, states };
    let mut plans = Plans::default();
    for instruction in program.instructions.iter().filter(|instruction| !is_exchange(&instruction.op)) {
        let (_, plan) = plans.of(instruction, &context, device)?;
        for (input, operand) in instruction.inputs.iter().enumerate() {
            if let Place::Weight { id, source } = operand.place {
                visit((id, source), &plan, input);
            }
        }
    }
    Ok(())
}

/// The launch of an exchange.
fn exchange(instruction: &Instruction, side: Side, on: &DeviceSide) -> Result<Launch, RuntimeError> {
    let sources = |operands: &[Operand]| {
        let source = |operand: &Operand| Source::Moving(operand.place, operand.byte_offset);
        operands.iter().map(source).collect::<Vec<_>>()
    };
    let member = on.member.clone().ok_or_else(|| no_buffer("an exchange of a device that is alone"))?;
    let output = instruction.outputs.first().ok_or_else(|| no_buffer("an exchange without a result"))?;
    let (columns, rows) = match output.shape.split_last() {
        Some((Dim::Const(columns), rows)) => (*columns, rows.to_vec()),
        _ => (1, output.shape.clone()),
    };
    Ok(Launch {
        side,
        work: Work::AllReduce { member, rows, columns, from: None, to: None },
        inputs: sources(&instruction.inputs),
        outputs: sources(&instruction.outputs),
        origin: instruction.origin.clone(),
    })
}

fn upload_constant(values: &[f32], device: &Device, stream: &Stream) -> Result<Slice, RuntimeError> {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    let size = (bytes.len() as u64).max(4);
    let buffer = device.alloc(&BufferDesc::new(size, QHAL_USAGE_ACTIVATION, Scope::Persistent, "constant"))?;
    if !bytes.is_empty() {
        stream.copy_from_host(bytes, &buffer.slice(0, bytes.len() as u64)?)?;
    }
    Ok(buffer.whole())
}

fn no_place(operand: &Operand) -> RuntimeError {
    RuntimeError::Step { what: "operand", expected: "a place".into(), found: format!("{:?}", operand.place) }
}

fn no_buffer(name: &str) -> RuntimeError {
    RuntimeError::Step { what: "buffer", expected: format!("memory for {name}"), found: "none".into() }
}
