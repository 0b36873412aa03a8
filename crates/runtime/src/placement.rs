//! Which device computes which instruction.
//!
//! In: devices, perhaps another that helps out, and lowered programs. Out: the side of each instruction and what has to be copied
//! between them. Where a model's layers are divided into stages, each stage is a side; an instruction goes to the helper only if the
//! devices refuse it, with the device's own words as the reason. Invariants:
//! - all instructions that read or write one layer's cache are on one side, because the inner order of a cache is its device's own; so
//!   caches never cross;
//! - all sides hold temporaries at the same places, and a value is copied to a side once before it is read there;
//! - a stage takes over from the one before it, when it begins, all that it or a later one reads: in between it needs nothing of another
//!   stage, which may be at another step's work by then;
//! - the number of copies of a step is known when a model is loaded, and more than the budget is refused with the reasons.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use qwen_hal::Device;
use qwen_ir::passes::Compiled;
use qwen_ir::program::{ArenaPool, Instruction, Operand, Place, Program};
use qwen_ir::{Dim, Op, Phase, StateDecl, StateId};

use crate::RuntimeError;
use crate::describe::{Context, describe, misaligned};
use crate::group::is_exchange;
use crate::stages::Stages;

/// Copies between a device and the one that helps out that a step may need, unless the caller says otherwise: four for each of 64 layers.
pub const MAX_CROSSINGS: u32 = 256;
/// Fewest tokens of a micro-batch, unless the caller says otherwise. Each reads a stage's weights anew, so it must have enough products
/// to do with them.
pub const MICRO_BATCH_TOKENS: u32 = 128;

/// Where a model computes.
#[derive(Debug, Clone)]
pub struct Placement {
    /// The device.
    pub device: Device,
    /// Those that compute the model together with the device.
    pub peers: Vec<Device>,
    /// Stages that the model's layers are divided into, each with as many of the devices, in order: those of one stage have parts of the same
    /// layers, as ranks. It divides the number of devices.
    pub stages: usize,
    /// Fewest tokens of a step that a stage computes while other stages are at others of the same step.
    pub micro_batch_tokens: u32,
    /// Computes what the device refuses; none: then such a model is refused.
    pub fallback: Option<Device>,
    /// Most copies between a device and the fallback in a step.
    pub max_crossings: u32,
}

impl From<Device> for Placement {
    fn from(device: Device) -> Self {
        Self {
            device,
            peers: Vec::new(),
            stages: 1,
            micro_batch_tokens: MICRO_BATCH_TOKENS,
            fallback: None,
            max_crossings: MAX_CROSSINGS,
        }
    }
}

impl Placement {
    /// With a device that computes what the first one refuses.
    #[must_use]
    pub fn with_fallback(mut self, fallback: Device) -> Self {
        self.fallback = Some(fallback);
        self
    }

    /// With further devices that compute the same model together with the first one.
    #[must_use]
    pub fn with_peers(mut self, peers: Vec<Device>) -> Self {
        self.peers = peers;
        self
    }

    /// With the layers divided into stages.
    #[must_use]
    pub const fn with_stages(mut self, stages: usize) -> Self {
        self.stages = stages;
        self
    }

    /// The devices of the group, in order; one alone is the only one.
    pub fn members(&self) -> impl Iterator<Item = &Device> {
        std::iter::once(&self.device).chain(&self.peers)
    }

    /// Name for people of so many devices of a group.
    #[must_use]
    pub fn title<'a>(devices: impl IntoIterator<Item = &'a Device>) -> String {
        let mut names = devices.into_iter().map(|device| device.info().name.as_str());
        let first = names.next().unwrap_or_default();
        match names.count() {
            0 => first.to_owned(),
            others => format!("{} x {first}", others + 1),
        }
    }
}

/// Index of a device among those that compute one rank's part: the stages' own in order, then the one that helps out.
pub(crate) type Side = usize;
/// The device of the first stage; mostly the only one.
pub(crate) const MAIN: Side = 0;

/// Instructions of one kind that are not computed on the model's device, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fallback {
    /// Kind of op.
    pub op: &'static str,
    /// The device's words.
    pub reason: String,
    /// Instructions of a step.
    pub instructions: usize,
    /// The first of them.
    pub origin: String,
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let more = self.instructions - 1;
        write!(f, "{} ({}", self.op, self.origin)?;
        if more > 0 {
            write!(f, " and {more} more")?;
        }
        write!(f, "): {}", self.reason)
    }
}

/// A value that is copied from one side to another.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Transfer {
    /// Instruction before which it happens.
    pub(crate) before: usize,
    pub(crate) from: Side,
    pub(crate) to: Side,
    pub(crate) pool: ArenaPool,
    pub(crate) offset: u64,
    /// All dimensions but the innermost.
    pub(crate) rows: Vec<Dim>,
    pub(crate) row_bytes: u64,
}

impl Transfer {
    /// Of the value that an operand is columns of: whole rows.
    fn new(before: usize, (from, to): (Side, Side), (pool, offset): (ArenaPool, u64), operand: &Operand) -> Self {
        let (rows, row) = match operand.shape.split_last() {
            Some((Dim::Const(_), rows)) => (rows.to_vec(), operand.row_stride),
            _ => (operand.shape.clone(), 1),
        };
        let row_bytes = operand.dtype.bytes_for(row).unwrap_or(u64::MAX);
        Self { before, from, to, pool, offset, rows, row_bytes }
    }

    /// Bytes at these values of the symbols.
    pub(crate) fn bytes(&self, symbols: &[i64; 5]) -> u64 {
        elements(&self.rows, self.row_bytes, symbols)
    }
}

/// So many rows of so much each, at these values of the symbols.
pub(crate) fn elements(rows: &[Dim], each: u64, symbols: &[i64; 5]) -> u64 {
    let rows = rows.iter().map(|dim| match dim {
        Dim::Const(n) => *n,
        Dim::Symbol(symbol) => u64::try_from(symbols[*symbol as usize]).unwrap_or(0),
    });
    rows.fold(each, u64::saturating_mul)
}

/// A stage of a program.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Part {
    /// Its first instruction.
    pub(crate) first: usize,
    /// What it takes over from the stage before.
    pub(crate) takes: Vec<Transfer>,
}

/// What is decided of one program.
#[derive(Debug, Clone)]
pub(crate) struct Assignment {
    /// Side of each instruction; empty: all on the first.
    sides: Vec<Side>,
    /// Copies within stages.
    pub(crate) transfers: Vec<Transfer>,
    /// By stage.
    pub(crate) parts: Vec<Part>,
}

impl Default for Assignment {
    fn default() -> Self {
        Self::of(Vec::new())
    }
}

impl Assignment {
    /// These sides in one stage, without copies between them.
    pub(crate) fn of(sides: Vec<Side>) -> Self {
        Self { sides, transfers: Vec::new(), parts: vec![Part { first: 0, takes: Vec::new() }] }
    }

    pub(crate) fn side(&self, instruction: usize) -> Side {
        self.sides.get(instruction).copied().unwrap_or(MAIN)
    }

    /// Whether an operand is used on a side.
    pub(crate) fn uses(&self, program: &Program, side: Side, place: impl Fn(&Place) -> bool) -> bool {
        program.instructions.iter().enumerate().any(|(i, instruction)| {
            self.side(i) == side && instruction.inputs.iter().chain(&instruction.outputs).any(|o| place(&o.place))
        })
    }
}

/// A program of a model: kind of step, most tokens, instructions.
pub(crate) type Step = (Phase, u32, Compiled);

/// What is decided of all programs of a model.
#[derive(Debug, Default)]
pub(crate) struct Decided {
    /// By program.
    pub(crate) assignments: Vec<Assignment>,
    /// By program, why the device does not compute each instruction; empty: it computes all.
    pub(crate) refusals: Vec<Vec<Option<String>>>,
    /// By state, whether the one that helps out holds it.
    moved: Vec<bool>,
    /// What is not computed on the device; what only steps of some sizes refuse too.
    pub(crate) fallbacks: Vec<Fallback>,
}

impl Decided {
    /// Asks a device that another one may help; where none does, everything is computed by the stages' own. All of them are of its type.
    pub(crate) fn new(
        placement: &Placement,
        device: &Device,
        stages: &Stages,
        programs: &[Step],
    ) -> Result<Self, RuntimeError> {
        let states = states(programs);
        let mut planner = Planner::new(device, states);
        if placement.fallback.is_some() {
            for (phase, _, compiled) in programs {
                planner.look_at(&compiled.program, *phase)?;
            }
        }
        let moved = (0..states.len()).map(|i| planner.moves(StateId(i as u32))).collect();
        let mut decided = Self { moved, ..Self::default() };
        for (phase, _, compiled) in programs {
            let refusals = match &placement.fallback {
                Some(_) => planner.refusals(&compiled.program, *phase)?,
                None => Vec::new(),
            };
            let (assignment, found) = assign(&compiled.program, stages, &refusals);
            for new in found {
                if !decided.fallbacks.iter().any(|known| (known.op, &known.reason) == (new.op, &new.reason)) {
                    decided.fallbacks.push(new);
                }
            }
            decided.assignments.push(assignment);
            decided.refusals.push(refusals);
        }
        Ok(decided)
    }

    /// The side that holds a layer of a state.
    pub(crate) fn holder(&self, stages: &Stages, state: StateId, layer: u32) -> Side {
        let moved = self.moved.get(state.index()).is_some_and(|moved| *moved);
        if moved { stages.fallback() } else { stages.of_layer(layer) }
    }

    /// Values that a step copies to and from the one that helps out at most.
    pub(crate) fn crossings(&self) -> usize {
        self.assignments.iter().map(|assignment| assignment.transfers.len()).max().unwrap_or(0)
    }

    /// Refuses a device that computes nothing, and more copies than allowed.
    pub(crate) fn check(&self, placement: &Placement, stages: &Stages, programs: &[Step]) -> Result<(), RuntimeError> {
        let device = || placement.device.info().name.clone();
        let reasons = || self.fallbacks.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        let idle = |(assignment, (_, _, compiled)): (&Assignment, &Step)| {
            (0..stages.count()).any(|stage| !assignment.uses(&compiled.program, stage, |_| true))
        };
        if self.assignments.iter().zip(programs).any(idle) {
            return Err(RuntimeError::Idle { device: device(), reasons: reasons() });
        }
        let crossings = self.crossings();
        if crossings > placement.max_crossings as usize {
            return Err(RuntimeError::Crossings {
                device: device(),
                fallback: placement.fallback.as_ref().map(|fallback| fallback.info().name.clone()).unwrap_or_default(),
                crossings,
                limit: placement.max_crossings,
                reasons: reasons(),
            });
        }
        Ok(())
    }
}

/// The states that the programs of a model share.
fn states(programs: &[Step]) -> &[StateDecl] {
    programs.first().map(|(_, _, compiled)| compiled.graph.states.as_slice()).unwrap_or_default()
}

/// Decides for all programs of a model.
pub(crate) struct Planner<'a> {
    device: &'a Device,
    states: &'a [StateDecl],
    /// The device's refusals by description.
    answers: HashMap<String, Option<String>>,
    /// States that the other side holds, with the op that the device refused and its reason.
    moved: HashMap<StateId, (&'static str, String)>,
}

impl<'a> Planner<'a> {
    pub(crate) fn new(device: &'a Device, states: &'a [StateDecl]) -> Self {
        Self { device, states, answers: HashMap::new(), moved: HashMap::new() }
    }

    /// Why the device does not compute an instruction.
    fn refusal(&mut self, instruction: &Instruction, context: &Context<'_>) -> Result<Option<String>, RuntimeError> {
        if is_exchange(&instruction.op) {
            return Ok(None);
        }
        if let Some(reason) = misaligned(instruction, self.device) {
            return Ok(Some(reason));
        }
        let desc = describe(instruction, context).desc;
        let key = format!("{desc:?}");
        if let Some(answer) = self.answers.get(&key) {
            return Ok(answer.clone());
        }
        let support = self
            .device
            .op_supports(&desc)
            .map_err(|source| RuntimeError::Plan { origin: instruction.origin.clone(), source: Box::new(source) })?;
        let answer = match support {
            qwen_hal::Support::No { reason } if reason.is_empty() => Some("no reason given".to_owned()),
            qwen_hal::Support::No { reason } => Some(reason),
            _ => None,
        };
        self.answers.insert(key, answer.clone());
        Ok(answer)
    }

    /// Finds caches that the device can't use in one of the programs; to be called for all of them before [`Planner::refusals`].
    pub(crate) fn look_at(&mut self, program: &Program, phase: Phase) -> Result<(), RuntimeError> {
        let context = Context { bounds: program.bounds, phase, states: self.states, tied: &[] };
        for instruction in &program.instructions {
            let Some(state) = state_of(&instruction.op) else { continue };
            if let Some(reason) = self.refusal(instruction, &context)? {
                self.moved.entry(state).or_insert_with(|| (instruction.op.name(), reason));
            }
        }
        Ok(())
    }

    /// Whether the other side holds a cache.
    fn moves(&self, state: StateId) -> bool {
        self.moved.contains_key(&state)
    }

    /// Why the device does not compute each instruction of a program.
    pub(crate) fn refusals(&mut self, program: &Program, phase: Phase) -> Result<Vec<Option<String>>, RuntimeError> {
        let context = Context { bounds: program.bounds, phase, states: self.states, tied: &[] };
        let of = |instruction: &Instruction| match state_of(&instruction.op) {
            Some(state) => Ok(self.moved.get(&state).map(|(op, reason)| {
                let same = *op == instruction.op.name();
                if same { reason.clone() } else { format!("it shares its cache with {op}, refused: {reason}") }
            })),
            None => self.refusal(instruction, &context),
        };
        program.instructions.iter().map(of).collect()
    }
}

/// Sides and copies of a program, and what is not computed on the device, by the reasons for each instruction.
fn assign(program: &Program, stages: &Stages, refusals: &[Option<String>]) -> (Assignment, Vec<Fallback>) {
    let mut fallbacks: BTreeMap<(&'static str, &str), Fallback> = BTreeMap::new();
    for (instruction, reason) in program.instructions.iter().zip(refusals) {
        let Some(reason) = reason else { continue };
        let op = instruction.op.name();
        let first = || Fallback { op, reason: reason.clone(), instructions: 0, origin: instruction.origin.clone() };
        fallbacks.entry((op, reason)).or_insert_with(first).instructions += 1;
    }
    if fallbacks.is_empty() && stages.count() == 1 {
        return (Assignment::default(), Vec::new());
    }
    // What is outside of the layers is computed beside the one before it.
    let mut stage = 0;
    let (mut sides, mut firsts) = (Vec::with_capacity(program.instructions.len()), vec![0]);
    for (i, instruction) in program.instructions.iter().enumerate() {
        let at = instruction.layer.map_or(stage, |layer| stages.of_layer(layer).max(stage));
        firsts.extend((stage..at).map(|_| i));
        stage = at;
        let is_refused = refusals.get(i).is_some_and(Option::is_some);
        sides.push(if is_refused { stages.fallback() } else { stage });
    }
    let assignment = transfers(program, sides, &firsts);
    (assignment, fallbacks.into_values().collect())
}

const fn state_of(op: &Op) -> Option<StateId> {
    match op {
        Op::KvAppend { state } | Op::Attention { state, .. } | Op::MlaAttention { state, .. } => Some(*state),
        _ => None,
    }
}

/// Copies that make every temporary be where it is read, for stages that begin at these instructions. A place stands for the value that
/// was written there last.
fn transfers(program: &Program, sides: Vec<Side>, firsts: &[usize]) -> Assignment {
    // The sides where the value of a place is, in the order in which it came there.
    let mut valid: BTreeMap<(ArenaPool, u64), Vec<Side>> = BTreeMap::new();
    let mut transfers = Vec::new();
    let mut parts: Vec<Part> = Vec::with_capacity(firsts.len());
    for (before, (instruction, side)) in program.instructions.iter().zip(&sides).enumerate() {
        while let Some(first) = firsts.get(parts.len()).filter(|first| **first <= before) {
            let to = parts.len();
            // Places whose value nobody reads any more are forgotten.
            valid.retain(|place, _| to == 0 || next_reader(program, *first, *place).is_some());
            let take = |(place, at): (&(ArenaPool, u64), &mut Vec<Side>)| {
                let from = *at.first()?;
                *at = vec![to];
                Some(Transfer::new(*first, (from, to), *place, next_reader(program, *first, *place)?))
            };
            let takes = if to == 0 { Vec::new() } else { valid.iter_mut().filter_map(take).collect() };
            parts.push(Part { first: *first, takes });
        }
        for operand in &instruction.inputs {
            let Place::Arena { pool, offset } = operand.place else { continue };
            let Some(at) = valid.get_mut(&(pool, offset)).filter(|at| !at.contains(side)) else { continue };
            let Some(from) = at.first().copied() else { continue };
            at.push(*side);
            transfers.push(Transfer::new(before, (from, *side), (pool, offset), operand));
        }
        for operand in &instruction.outputs {
            if let Place::Arena { pool, offset } = operand.place {
                valid.insert((pool, offset), vec![*side]);
            }
        }
    }
    Assignment { sides, transfers, parts }
}

/// The first operand from an instruction on that reads the value of a place, if it is read before another is written there.
fn next_reader(program: &Program, from: usize, place: (ArenaPool, u64)) -> Option<&Operand> {
    let here = |operand: &&Operand| operand.place == Place::Arena { pool: place.0, offset: place.1 };
    for instruction in program.instructions.iter().skip(from) {
        if let Some(reader) = instruction.inputs.iter().find(here) {
            return Some(reader);
        }
        if instruction.outputs.iter().any(|operand| here(&operand)) {
            return None;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use qwen_formats::DType;
    use qwen_ir::program::StepResult;
    use qwen_ir::{Sums, Symbol, SymbolBounds, Tolerance};

    use super::*;

    fn operand(place: Place, columns: u64) -> Operand {
        let shape = vec![Dim::Symbol(Symbol::Tokens), Dim::Const(columns)];
        Operand { place, byte_offset: 0, dtype: DType::F32, shape, row_stride: 16, block_scale: None }
    }

    const fn at(offset: u64) -> Place {
        Place::Arena { pool: ArenaPool::Temporary, offset }
    }

    /// Instructions as (places read, place written).
    fn program(steps: &[(&[u64], u64)]) -> Program {
        let instruction = |(reads, write): &(&[u64], u64)| Instruction {
            op: Op::Softmax,
            inputs: reads.iter().map(|offset| operand(at(*offset), 4)).collect(),
            outputs: vec![operand(at(*write), 16)],
            compute: Vec::new(),
            sums: Sums::F32,
            tolerance: Tolerance::Tight,
            layer: None,
            origin: "test".into(),
        };
        Program {
            name: "test".into(),
            bounds: SymbolBounds::default(),
            inputs: Vec::new(),
            constants: Vec::new(),
            instructions: steps.iter().map(instruction).collect(),
            arena_bytes: [1024, 0, 0],
            result: StepResult::Logits,
            result_width: 1,
        }
    }

    fn copies(steps: &[(&[u64], u64)], sides: &[Side]) -> Vec<(usize, Side, u64)> {
        let assignment = transfers(&program(steps), sides.to_vec(), &[0]);
        assignment.transfers.into_iter().map(|t| (t.before, t.to, t.offset)).collect()
    }

    #[test]
    fn a_value_is_copied_once_to_each_side_that_reads_it() {
        let steps: &[(&[u64], u64)] = &[(&[], 0), (&[0], 64), (&[0], 128), (&[64, 128], 192), (&[192, 0], 256)];
        assert_eq!(copies(steps, &[0, 0, 0, 0, 0]), []);
        assert_eq!(copies(steps, &[0, 1, 1, 0, 0]), [(1, 1, 0), (3, 0, 64), (3, 0, 128)]);
        assert_eq!(copies(steps, &[1, 0, 0, 0, 1]), [(1, 0, 0), (4, 1, 192)]);
    }

    #[test]
    fn a_place_that_is_written_anew_is_copied_anew() {
        let steps: &[(&[u64], u64)] = &[(&[], 0), (&[0], 0), (&[0], 0), (&[0], 64)];
        assert_eq!(copies(steps, &[0, 1, 0, 0]), [(1, 1, 0), (2, 0, 0)]);
        assert_eq!(copies(steps, &[0, 1, 1, 0]), [(1, 1, 0), (3, 0, 0)]);
    }

    #[test]
    fn columns_are_copied_with_the_rows_that_they_are_of() {
        let transfer = transfers(&program(&[(&[], 0), (&[0], 64)]), vec![0, 1], &[0]).transfers.remove(0);
        assert_eq!(transfer.bytes(&[3, 0, 0, 0, 0]), 3 * 16 * 4);
        assert_eq!((transfer.from, transfer.to), (0, 1));
    }

    #[test]
    fn a_stage_takes_over_what_is_still_read() {
        // Stages are sides 0, 1, …, then comes the helper. The value at 0 is read by all stages, that at 64 in the first alone.
        let steps: &[(&[u64], u64)] =
            &[(&[], 0), (&[0], 64), (&[64], 128), (&[128], 192), (&[192, 0], 256), (&[256], 0)];
        let takes = |sides: &[Side], firsts: &[usize]| {
            let assignment = transfers(&program(steps), sides.to_vec(), firsts);
            let told = |t: &Transfer| (t.before, t.from, t.to, t.offset);
            let parts: Vec<Vec<_>> =
                assignment.parts.iter().map(|part| part.takes.iter().map(told).collect()).collect();
            (parts, assignment.transfers.iter().map(told).collect::<Vec<_>>())
        };
        assert_eq!(takes(&[0, 0, 0, 1, 1, 1], &[0, 3]), (vec![vec![], vec![(3, 0, 1, 0), (3, 0, 1, 128)]], vec![]));
        // What the helper has made comes from there, and a stage that only hands a value on holds it too.
        assert_eq!(
            takes(&[0, 0, 3, 1, 2, 2], &[0, 3, 4]),
            (vec![vec![], vec![(3, 0, 1, 0), (3, 3, 1, 128)], vec![(4, 1, 2, 0), (4, 1, 2, 192)]], vec![(2, 0, 3, 64)])
        );
    }
}
