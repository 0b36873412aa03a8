//! A program made ready for a device: plans, operands, and the walk over them.
//!
//! Everything that does not change from step to step is bound once: plans, weights, tables, arena ranges. A step copies its
//! integer inputs to the device, sets the symbols and launches the list. Operands are bound anew only when a buffer moved.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Instant;

use qwen_hal::abi::{QHAL_PLAN_BATCH_INVARIANT, QHAL_PLAN_DETERMINISTIC, QHAL_USAGE_ACTIVATION, QHAL_USAGE_STAGING};
use qwen_hal::{Buffer, BufferDesc, Device, LaunchArgs, Plan, PlanOptions, Scope, Slice, Stream};
use qwen_ir::program::{Instruction, Operand, Place, Program};
use qwen_ir::{Phase, StateDecl, Symbol, inputs};

use crate::RuntimeError;
use crate::arenas::Arenas;
use crate::batch::Batch;
use crate::cost::{self, Cost, Sizes, StepObserver};
use crate::describe::{Context, Described, describe};
use crate::kv_memory::KvMemory;
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

struct Launch {
    plan: Arc<Plan>,
    args: LaunchArgs,
    inputs: Vec<Source>,
    outputs: Vec<Source>,
    symbols: Vec<Symbol>,
    origin: String,
}

impl Launch {
    fn start(&mut self, values: &[i64; 5], stream: &Stream) -> Result<(), RuntimeError> {
        for (i, symbol) in self.symbols.iter().enumerate() {
            self.args.set_symbol(i, values[*symbol as usize]);
        }
        self.plan
            .launch(stream, &self.args)
            .map_err(|source| RuntimeError::Launch { origin: self.origin.clone(), source: Box::new(source) })
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
    launches: Vec<Launch>,
    workspace_bytes: u64,
    bound: Option<(u64, u64)>,
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
    logits: Option<Buffer>,
    epoch: u64,
    table: Vec<i32>,
}

impl StepBuffers {
    pub(crate) fn new() -> Self {
        Self { inputs: HashMap::new(), logits: None, epoch: 0, table: Vec::new() }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.inputs.values().chain(&self.logits).map(Buffer::size).sum()
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

    fn ensure_logits(&mut self, device: &Device, bytes: u64) -> Result<(), RuntimeError> {
        if self.logits.as_ref().map_or(0, Buffer::size) < bytes {
            let desc = BufferDesc::new(bytes, QHAL_USAGE_ACTIVATION, Scope::Temporary, "logits");
            self.logits = Some(device.alloc(&desc)?);
            self.epoch += 1;
        }
        Ok(())
    }
}

/// What an executor works with; owned by the model.
pub(crate) struct Resources<'a> {
    pub(crate) device: &'a Device,
    pub(crate) stream: &'a Stream,
    pub(crate) arenas: &'a Arenas,
    pub(crate) kv: &'a KvMemory,
    pub(crate) buffers: &'a mut StepBuffers,
}

impl Executor {
    /// Plans every instruction and brings its weights into the form that the plan wants. Equal instructions share a plan.
    ///
    /// # Errors
    /// If the device can't do an op, or a weight does not fit.
    pub fn new(
        program: Program,
        phase: Phase,
        states: &[StateDecl],
        device: &Device,
        stream: &Stream,
        weights: &mut WeightStore,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, RuntimeError> {
        let context = Context { bounds: program.bounds, phase, states };
        let constants = upload_constants(&program, device, stream)?;
        let mut plans = Plans::default();
        let mut launches = Vec::with_capacity(program.instructions.len());
        let mut workspace_bytes = 0;
        for (i, instruction) in program.instructions.iter().enumerate() {
            let (described, plan) = plans.of(instruction, &context, device)?;
            workspace_bytes = workspace_bytes.max(plan.info().workspace_bytes);
            let mut source = |(input, operand): (usize, &Operand)| {
                Ok(match operand.place {
                    Place::Absent => Source::Absent,
                    Place::Constant { index } => {
                        Source::Fixed(constants.get(index as usize).cloned().ok_or_else(|| no_place(operand))?)
                    }
                    Place::Weight { id, source } => {
                        Source::Fixed(weights.for_plan(device, stream, (id, source), &plan, input)?)
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
                args: LaunchArgs::new(&plan),
                plan,
                inputs,
                outputs,
                symbols: described.symbols,
                origin: instruction.origin.clone(),
            });
            progress(i + 1, program.instructions.len());
        }
        tracing::debug!(instructions = launches.len(), plans = plans.shared.len(), workspace_bytes, "planned");
        Ok(Self { program, launches, workspace_bytes, bound: None, plans: plans.shared.len() })
    }

    /// The program.
    #[must_use]
    pub const fn program(&self) -> &Program {
        &self.program
    }
    /// Bytes of workspace that its plans need.
    #[must_use]
    pub const fn workspace_bytes(&self) -> u64 {
        self.workspace_bytes
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

    /// Computes a step; `logits` holds the logits of its rows afterwards.
    pub(crate) fn run(
        &mut self,
        batch: &Batch,
        resources: &mut Resources<'_>,
        logits: &mut Vec<f32>,
        observer: Option<&mut dyn StepObserver>,
    ) -> Result<(), RuntimeError> {
        let values = self.symbol_values(batch, resources.kv)?;
        self.upload(batch, resources)?;
        // A step whose logits nobody wants still computes one row: programs have no way around the head.
        let rows = values[Symbol::Rows as usize] as usize;
        let vocab = self.program.vocab_size as usize;
        let bytes = self.program.vocab_size.checked_mul(4).and_then(|row| row.checked_mul(rows as u64));
        let bytes = bytes.ok_or_else(|| RuntimeError::Step {
            what: "logits",
            expected: "a size below 2^64 bytes".into(),
            found: format!("{rows} rows of {vocab} values"),
        })?;
        resources.buffers.ensure_logits(resources.device, bytes)?;
        self.bind(resources)?;
        match observer {
            None => self.launch_all(&values, resources)?,
            Some(observer) => self.launch_observed(batch, &values, resources, observer)?,
        }
        resources.stream.wait()?;
        if batch.rows() == 0 {
            logits.clear();
            return Ok(());
        }
        // What is there from the last step is written over: nothing is cleared first.
        logits.resize(rows * vocab, 0.0);
        let buffer = resources.buffers.logits.as_ref().ok_or_else(|| no_buffer("logits"))?;
        resources.stream.copy_to_host(&buffer.slice(0, bytes)?, bytemuck::cast_slice_mut(logits.as_mut_slice()))?;
        Ok(())
    }

    fn launch_all(&mut self, values: &[i64; 5], resources: &Resources<'_>) -> Result<(), RuntimeError> {
        self.launches.iter_mut().try_for_each(|launch| launch.start(values, resources.stream))
    }

    /// One instruction after the other: each is waited for before the next.
    fn launch_observed(
        &mut self,
        batch: &Batch,
        values: &[i64; 5],
        resources: &Resources<'_>,
        observer: &mut dyn StepObserver,
    ) -> Result<(), RuntimeError> {
        let sizes = Sizes { batch, symbols: values };
        for (launch, instruction) in self.launches.iter_mut().zip(&self.program.instructions) {
            let start = Instant::now();
            launch.start(values, resources.stream)?;
            resources.stream.wait()?;
            let time = start.elapsed();
            observer.completed(instruction, &cost::cost(instruction, &launch.weight_bytes(), &sizes), time);
        }
        Ok(())
    }

    /// What a step asks of a machine, without computing it.
    pub(crate) fn cost(&self, batch: &Batch, kv: &KvMemory) -> Result<Vec<Cost>, RuntimeError> {
        let values = self.symbol_values(batch, kv)?;
        let sizes = Sizes { batch, symbols: &values };
        let both = self.launches.iter().zip(&self.program.instructions);
        Ok(both.map(|(launch, instruction)| cost::cost(instruction, &launch.weight_bytes(), &sizes)).collect())
    }

    fn symbol_values(&self, batch: &Batch, kv: &KvMemory) -> Result<[i64; 5], RuntimeError> {
        let mut values = [0i64; 5];
        values[Symbol::Tokens as usize] = batch.tokens() as i64;
        values[Symbol::Sequences as usize] = batch.sequences() as i64;
        values[Symbol::Rows as usize] = batch.rows().max(1) as i64;
        values[Symbol::Blocks as usize] = batch.blocks() as i64;
        values[Symbol::CacheBlocks as usize] = i64::from(kv.committed());
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

    fn upload(&self, batch: &Batch, resources: &mut Resources<'_>) -> Result<(), RuntimeError> {
        let mut table = std::mem::take(&mut resources.buffers.table);
        batch.block_table(&mut table);
        let no_rows = [0i32];
        for name in &self.program.inputs {
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
            resources.buffers.ensure_input(resources.device, name, bytes.len() as u64)?;
            let buffer = resources.buffers.inputs.get(name).ok_or_else(|| no_buffer(name))?;
            resources.stream.copy_from_host(bytes, &buffer.slice(0, bytes.len() as u64)?)?;
        }
        resources.buffers.table = table;
        Ok(())
    }

    /// Binds moving operands if a buffer moved since the last step.
    fn bind(&mut self, resources: &Resources<'_>) -> Result<(), RuntimeError> {
        let epoch = (resources.arenas.epoch(), resources.buffers.epoch);
        if self.bound == Some(epoch) {
            return Ok(());
        }
        let workspace = resources.arenas.workspace();
        for launch in &mut self.launches {
            for (i, source) in launch.inputs.iter().enumerate() {
                match resolve(source, &self.program, resources)? {
                    Some(slice) => launch.args.set_input(i, &slice),
                    None => launch.args.clear_input(i),
                };
            }
            for (i, source) in launch.outputs.iter().enumerate() {
                if let Some(slice) = resolve(source, &self.program, resources)? {
                    launch.args.set_output(i, &slice);
                }
            }
            if let Some(workspace) = &workspace {
                launch.args.set_workspace(workspace);
            }
        }
        self.bound = Some(epoch);
        Ok(())
    }
}

fn resolve(source: &Source, program: &Program, resources: &Resources<'_>) -> Result<Option<Slice>, RuntimeError> {
    let (place, offset) = match source {
        Source::Absent => return Ok(None),
        Source::Fixed(slice) => return Ok(Some(slice.clone())),
        Source::Moving(place, offset) => (*place, *offset),
    };
    let slice = match place {
        Place::Arena { pool, offset } => resources.arenas.slice(pool, offset),
        Place::State { id, layer } => resources.kv.slice(id, layer),
        Place::Input { index } => {
            program.inputs.get(index as usize).and_then(|name| resources.buffers.inputs.get(name)).map(Buffer::whole)
        }
        Place::Logits => resources.buffers.logits.as_ref().map(Buffer::whole),
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
    for instruction in &program.instructions {
        let (_, plan) = plans.of(instruction, &context, device)?;
        for (input, operand) in instruction.inputs.iter().enumerate() {
            if let Place::Weight { id, source } = operand.place {
                visit((id, source), &plan, input);
            }
        }
    }
    Ok(())
}

fn upload_constants(program: &Program, device: &Device, stream: &Stream) -> Result<Vec<Slice>, RuntimeError> {
    program
        .constants
        .iter()
        .map(|values| {
            let bytes: &[u8] = bytemuck::cast_slice(values);
            let size = (bytes.len() as u64).max(4);
            let buffer = device.alloc(&BufferDesc::new(size, QHAL_USAGE_ACTIVATION, Scope::Persistent, "constant"))?;
            if !bytes.is_empty() {
                stream.copy_from_host(bytes, &buffer.slice(0, bytes.len() as u64)?)?;
            }
            Ok(buffer.whole())
        })
        .collect()
}

fn no_place(operand: &Operand) -> RuntimeError {
    RuntimeError::Step { what: "operand", expected: "a place".into(), found: format!("{:?}", operand.place) }
}

fn no_buffer(name: &str) -> RuntimeError {
    RuntimeError::Step { what: "buffer", expected: format!("memory for {name}"), found: "none".into() }
}
