//! A program made ready for a device: plans, operands, and the walk over them.
//!
//! Everything that does not change from step to step is bound once: plans, weights, tables, arena ranges. A step copies its
//! integer inputs to the device, sets the symbols and launches the list. Operands are bound anew only when a buffer moved.
//! Where several devices compute, as stages or because one helps out, each instruction has a side, and values are copied between the
//! sides as [`crate::placement`] decided.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
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
use crate::describe::{Context, Described, describe, tied, weights_of};
use crate::group::{Member, is_exchange};
use crate::kv_memory::KvMemory;
use crate::placement::{self, Assignment, MAIN, Side, Step, Transfer};
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
    workspace_bytes: Vec<u64>,
    bound: Vec<Option<(u64, u64)>>,
    /// By input of the program, whether each side reads it.
    readers: Vec<Vec<bool>>,
    /// Side of the result.
    result: Side,
    /// Host memory that values cross in.
    crossing: Vec<u8>,
    /// By stage, what it takes over, on its way.
    carried: Vec<Vec<Vec<u8>>>,
    plans: usize,
}

/// A failure, and the side that it happened on.
pub(crate) type Failed = (Side, RuntimeError);

/// Names the side of failures.
fn on<E: Into<RuntimeError>>(side: Side) -> impl Fn(E) -> Failed {
    move |error| (side, error.into())
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

/// Instructions in the order in which their weights are packed: while a weight is packed, memory holds it twice, so those that are at
/// least half as large as the largest go first, when memory holds little else; the rest as the file has them.
pub(crate) fn weights_in_order(program: &Program, assignment: &Assignment, sides: &[DeviceSide]) -> Vec<usize> {
    let bytes = |i: usize| {
        let weights = sides.get(assignment.side(i)).map(|side| &side.weights);
        let keys = program.instructions.get(i).into_iter().flat_map(weights_of);
        keys.filter_map(|(key, _)| weights?.bytes(key)).max().unwrap_or(0)
    };
    let sizes: Vec<u64> = (0..program.instructions.len()).map(bytes).collect();
    let largest = sizes.iter().copied().max().unwrap_or(0);
    let (first, rest): (Vec<usize>, Vec<usize>) = (0..sizes.len()).partition(|i| sizes[*i] > largest / 2);
    [first, rest].concat()
}

impl Executor {
    /// Plans every instruction and brings its weights into the form that the plan wants. Equal instructions share a plan.
    /// `sides` holds the device of each stage and, if the assignment uses it, the one that helps out.
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
    ) -> Result<Self, Failed> {
        let mut at = MAIN;
        Self::planned(program, assignment, phase, states, sides, progress, &mut at).map_err(|error| (at, error))
    }

    /// `at` is the side that is planned for.
    fn planned(
        program: Program,
        assignment: Assignment,
        phase: Phase,
        states: &[StateDecl],
        sides: &mut [DeviceSide],
        progress: &mut dyn FnMut(usize, usize),
        at: &mut Side,
    ) -> Result<Self, RuntimeError> {
        let tied: Vec<_> = (0..sides.len()).map(|side| tied(&program, |i| assignment.side(i) == side)).collect();
        let mut constants: HashMap<(Side, u32), Slice> = HashMap::new();
        let mut plans: Vec<Plans> = sides.iter().map(|_| Plans::default()).collect();
        let mut launches = Vec::with_capacity(program.instructions.len());
        let mut workspace_bytes = vec![0; sides.len()];
        for (done, i) in weights_in_order(&program, &assignment, sides).into_iter().enumerate() {
            let Some(instruction) = program.instructions.get(i) else { continue };
            let side = assignment.side(i);
            *at = side;
            let on = sides.get_mut(side).ok_or_else(|| no_buffer("another device"))?;
            if is_exchange(&instruction.op) {
                launches.push((i, exchange(instruction, side, on)?));
                progress(done + 1, program.instructions.len());
                continue;
            }
            let context = Context { bounds: program.bounds, phase, states, tied: &tied[side] };
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
            let launch = Launch {
                side,
                work: Work::Plan { args: LaunchArgs::new(&plan), plan, symbols: described.symbols },
                inputs,
                outputs,
                origin: instruction.origin.clone(),
            };
            launches.push((i, launch));
            progress(done + 1, program.instructions.len());
        }
        launches.sort_by_key(|(i, _)| *i);
        let launches: Vec<Launch> = launches.into_iter().map(|(_, launch)| launch).collect();
        let of_sides = |place: &dyn Fn(&Place) -> bool| {
            (0..sides.len()).map(|side| assignment.uses(&program, side, place)).collect::<Vec<bool>>()
        };
        let inputs = (0..program.inputs.len() as u32)
            .map(|wanted| of_sides(&|place| matches!(place, Place::Input { index } if *index == wanted)));
        let readers = inputs.collect();
        let result = of_sides(&|place| *place == Place::Result).into_iter().position(|uses| uses).unwrap_or(MAIN);
        let carried = assignment.parts.iter().map(|part| vec![Vec::new(); part.takes.len()]).collect();
        let plans = plans.iter().map(|plans| plans.shared.len()).sum();
        tracing::debug!(instructions = launches.len(), plans, ?workspace_bytes, "planned");
        Ok(Self {
            program,
            assignment,
            launches,
            workspace_bytes,
            bound: vec![None; sides.len()],
            readers,
            result,
            crossing: Vec::new(),
            carried,
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
    pub(crate) fn workspace_bytes(&self, side: Side) -> u64 {
        self.workspace_bytes.get(side).copied().unwrap_or(0)
    }
    /// Values that a step copies between devices within stages.
    #[must_use]
    pub const fn crossings(&self) -> usize {
        self.assignment.transfers.len()
    }
    /// Stages.
    #[must_use]
    pub(crate) const fn stages(&self) -> usize {
        self.assignment.parts.len()
    }
    /// The instructions of a stage.
    pub(crate) fn instructions(&self, stage: usize) -> Range<usize> {
        let first = |stage: usize| self.assignment.parts.get(stage).map_or(self.launches.len(), |part| part.first);
        first(stage)..first(stage + 1)
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
        // What is there from the last step is written over: nothing is cleared first.
        result.resize(batch.rows() * self.program.result_width as usize, 0.0);
        self.read(sides, result)
    }

    /// Waits for everything that was launched.
    pub(crate) fn wait(sides: &[DeviceSide]) -> Result<(), RuntimeError> {
        sides.iter().try_for_each(|side| Ok(side.stream.wait()?))
    }

    /// The side of the result.
    pub(crate) const fn result_side(&self) -> Side {
        self.result
    }

    /// Brings rows of the result to the host.
    pub(crate) fn read(&self, sides: &[DeviceSide], result: &mut [f32]) -> Result<(), RuntimeError> {
        let last = &sides[self.result];
        let buffer = last.buffers.result.as_ref().ok_or_else(|| no_buffer("the result"))?;
        let slice = buffer.slice(0, 4 * result.len() as u64)?;
        last.stream.copy_to_host(&slice, bytemuck::cast_slice_mut(result))?;
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
        self.upload(batch, sides, &|_| true).map_err(|(_, error)| error)?;
        // A step whose result nobody wants still computes one row of it: programs have no way around its end.
        self.reserve_result(values[Symbol::Rows as usize] as u64, sides)?;
        for (side, on) in sides.iter().enumerate() {
            self.bind(side, on)?;
        }
        Ok(values)
    }

    /// Makes room for the results of parts of a step; gives the values of the symbols of each.
    pub(crate) fn expect(&self, parts: &[Batch], sides: &mut [DeviceSide]) -> Result<Vec<[i64; 5]>, Failed> {
        let values = parts.iter().map(|part| self.symbol_values(part, sides)).collect::<Result<Vec<_>, _>>();
        let values = values.map_err(on(MAIN))?;
        // Now, while nothing runs: a buffer that moves must not be in use.
        let rows = values.iter().map(|values| values[Symbol::Rows as usize]).max().unwrap_or(1);
        self.reserve_result(rows as u64, sides).map_err(on(self.result))?;
        Ok(values)
    }

    /// Brings what a stage needs for a part of a step to its devices: inputs, and what the stage before has left. Nothing of this stage runs.
    pub(crate) fn enter(
        &mut self,
        stage: usize,
        batch: &Batch,
        values: &[i64; 5],
        sides: &mut [DeviceSide],
    ) -> Result<(), Failed> {
        // The stage's own, and the one that helps out.
        let (stages, all) = (self.stages(), sides.len());
        let here = |side: Side| side == stage || side >= stages;
        self.upload(batch, sides, &here)?;
        if let (Some(part), Some(memory)) = (self.assignment.parts.get(stage), self.carried.get(stage)) {
            for (take, memory) in part.takes.iter().zip(memory) {
                put(take, values, sides, memory)?;
            }
        }
        for side in (0..all).filter(|side| here(*side)) {
            self.bind(side, &sides[side]).map_err(on(side))?;
        }
        Ok(())
    }

    /// Waits for a stage and takes what the next one needs of it to the host, so that the stage can begin something else.
    pub(crate) fn leave(&mut self, stage: usize, values: &[i64; 5], sides: &[DeviceSide]) -> Result<(), Failed> {
        let Some(next) = self.assignment.parts.get(stage + 1) else { return Ok(()) };
        let Some(memory) = self.carried.get_mut(stage + 1) else { return Ok(()) };
        next.takes.iter().zip(memory).try_for_each(|(take, memory)| get(take, values, sides, memory))
    }

    /// Launches one instruction of a step that was begun.
    pub(crate) fn launch_one(&mut self, i: usize, values: &[i64; 5], sides: &[DeviceSide]) -> Result<(), Failed> {
        let launch = self.launches.get_mut(i).ok_or_else(|| (MAIN, no_buffer("an instruction")))?;
        launch.start(values, &sides[launch.side].stream).map_err(on(launch.side))
    }

    /// Launches one instruction and the copies before it.
    pub(crate) fn launch_next(&mut self, i: usize, values: &[i64; 5], sides: &[DeviceSide]) -> Result<(), Failed> {
        cross(&self.assignment, i, values, sides, &mut self.crossing)?;
        self.launch_one(i, values, sides)
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
        (0..self.launches.len()).try_for_each(|i| self.launch_next(i, values, sides).map_err(|(_, error)| error))
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
        for (i, (launch, instruction)) in self.launches.iter_mut().zip(&self.program.instructions).enumerate() {
            let start = Instant::now();
            cross(&self.assignment, i, values, sides, &mut self.crossing).map_err(|(_, error)| error)?;
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

    /// Brings the inputs to those of the wanted sides that read them.
    fn upload(&self, batch: &Batch, sides: &mut [DeviceSide], wanted: &dyn Fn(Side) -> bool) -> Result<(), Failed> {
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
                    let error = RuntimeError::Step {
                        what: "input",
                        expected: "one of the known inputs".into(),
                        found: other.to_owned(),
                    };
                    return Err((MAIN, error));
                }
            };
            let bytes: &[u8] = bytemuck::cast_slice(values);
            let readers = sides.iter_mut().zip(readers).enumerate();
            for (side, (at, _)) in readers.filter(|(side, (_, reads))| **reads && wanted(*side)) {
                at.take_input(name, bytes).map_err(on(side))?;
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

/// Copies the values that instruction `at` needs from other sides.
fn cross(
    assignment: &Assignment,
    at: usize,
    values: &[i64; 5],
    sides: &[DeviceSide],
    memory: &mut Vec<u8>,
) -> Result<(), Failed> {
    let first = assignment.transfers.partition_point(|transfer| transfer.before < at);
    for transfer in assignment.transfers.iter().skip(first).take_while(|transfer| transfer.before == at) {
        get(transfer, values, sides, memory)?;
        put(transfer, values, sides, memory)?;
    }
    Ok(())
}

/// Brings a value to the host.
fn get(transfer: &Transfer, values: &[i64; 5], sides: &[DeviceSide], memory: &mut Vec<u8>) -> Result<(), Failed> {
    let bytes = transfer.bytes(values);
    memory.resize(usize::try_from(bytes).unwrap_or(usize::MAX), 0);
    let from = &sides[transfer.from];
    let slice = from.temporary(transfer, bytes).map_err(on(transfer.from))?;
    from.stream.copy_to_host(&slice, memory).map_err(on(transfer.from))
}

/// Brings a value from the host to where it is read.
fn put(transfer: &Transfer, values: &[i64; 5], sides: &[DeviceSide], memory: &[u8]) -> Result<(), Failed> {
    let to = &sides[transfer.to];
    let slice = to.temporary(transfer, transfer.bytes(values)).map_err(on(transfer.to))?;
    to.stream.copy_from_host(memory, &slice).map_err(on(transfer.to))
}

impl DeviceSide {
    fn temporary(&self, transfer: &Transfer, bytes: u64) -> Result<Slice, RuntimeError> {
        let rest = self.arenas.slice(transfer.pool, transfer.offset).ok_or_else(|| no_buffer("an operand"))?;
        Ok(rest.slice(0, bytes)?)
    }

    fn take_input(&mut self, name: &'static str, bytes: &[u8]) -> Result<(), RuntimeError> {
        self.buffers.ensure_input(&self.device, name, bytes.len() as u64)?;
        let buffer = self.buffers.inputs.get(name).ok_or_else(|| no_buffer(name))?;
        Ok(self.stream.copy_from_host(bytes, &buffer.slice(0, bytes.len() as u64)?)?)
    }
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

/// What is done with an instruction and its plan.
pub(crate) type Visit<'a> = dyn FnMut(&Instruction, &Arc<Plan>) -> Result<(), RuntimeError> + 'a;

/// Plans those instructions of a program that are listed, in that order, without loading it. `tied` are the tables of rows that are the
/// weights of products too.
pub(crate) fn plans_of(
    (phase, _, compiled): &Step,
    device: &Device,
    listed: &[usize],
    tied: &[WeightKey],
    visit: &mut Visit<'_>,
) -> Result<(), RuntimeError> {
    let program = &compiled.program;
    let context = Context { bounds: program.bounds, phase: *phase, states: &compiled.graph.states, tied };
    let mut plans = Plans::default();
    for instruction in listed.iter().filter_map(|i| program.instructions.get(*i)) {
        if !is_exchange(&instruction.op) {
            let (_, plan) = plans.of(instruction, &context, device)?;
            visit(instruction, &plan)?;
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
