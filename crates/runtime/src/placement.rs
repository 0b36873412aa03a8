//! Which device computes which instruction.
//!
//! In: a device, perhaps another that helps out, and lowered programs. Out: the side of each instruction and what has to be copied
//! between them. An instruction goes to the helper only if the device itself refuses it, with the device's own words as the
//! reason. Invariants:
//! - all instructions that read or write one cache are on one side, because the inner order of a cache is its device's own; so
//!   caches never cross;
//! - both sides hold temporaries at the same places, and a value is copied to a side once before it is read there;
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

/// Copies between devices that a step may need, unless the caller says otherwise: four for each of 64 layers.
pub const MAX_CROSSINGS: u32 = 256;

/// Where a model computes.
#[derive(Debug, Clone)]
pub struct Placement {
    /// The device.
    pub device: Device,
    /// Those that compute the model together with the device, as the further ranks of a group.
    pub peers: Vec<Device>,
    /// Computes what the device refuses; none: then such a model is refused.
    pub fallback: Option<Device>,
    /// Most copies between the two in a step.
    pub max_crossings: u32,
}

impl From<Device> for Placement {
    fn from(device: Device) -> Self {
        Self { device, peers: Vec::new(), fallback: None, max_crossings: MAX_CROSSINGS }
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

    /// The devices of the group, in order of rank; one alone is the only rank.
    pub fn ranks(&self) -> impl Iterator<Item = &Device> {
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

    /// The device and the one that helps out, in the order of [`Side`].
    pub(crate) fn devices(&self) -> Vec<Device> {
        self.of_rank(&self.device)
    }

    /// The device of a rank and the one that helps out.
    pub(crate) fn of_rank(&self, device: &Device) -> Vec<Device> {
        std::iter::once(device).chain(&self.fallback).cloned().collect()
    }
}

/// Index of a device: 0 the model's own, 1 the one that helps out.
pub(crate) type Side = usize;
/// The model's own device.
pub(crate) const MAIN: Side = 0;
/// The device that helps out.
pub(crate) const FALLBACK: Side = 1;

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

/// A value that is copied from one side to the other.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Transfer {
    /// Instruction before which it happens.
    pub(crate) before: usize,
    pub(crate) to: Side,
    pub(crate) pool: ArenaPool,
    pub(crate) offset: u64,
    /// All dimensions but the innermost.
    pub(crate) rows: Vec<Dim>,
    pub(crate) row_bytes: u64,
}

impl Transfer {
    pub(crate) const fn from(&self) -> Side {
        1 - self.to
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

/// What is decided of one program.
#[derive(Debug, Clone, Default)]
pub(crate) struct Assignment {
    /// Side of each instruction; empty: all on the model's own.
    sides: Vec<Side>,
    pub(crate) transfers: Vec<Transfer>,
}

impl Assignment {
    /// These sides, without copies between them.
    pub(crate) const fn of(sides: Vec<Side>) -> Self {
        Self { sides, transfers: Vec::new() }
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
    /// By state.
    pub(crate) state_sides: Vec<Side>,
    /// What is not computed on the device; what only steps of some sizes refuse too.
    pub(crate) fallbacks: Vec<Fallback>,
}

impl Decided {
    /// Asks a device that another one may help.
    pub(crate) fn new(device: &Device, programs: &[Step]) -> Result<Self, RuntimeError> {
        let states = states(programs);
        let mut planner = Planner::new(device, states);
        for (phase, _, compiled) in programs {
            planner.look_at(&compiled.program, *phase)?;
        }
        let state_sides = (0..states.len()).map(|i| planner.state_side(StateId(i as u32))).collect();
        let mut decided = Self { state_sides, ..Self::default() };
        for (phase, _, compiled) in programs {
            let refusals = planner.refusals(&compiled.program, *phase)?;
            let (assignment, found) = assign(&compiled.program, &refusals);
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

    /// Everything on the device, as where nothing helps it.
    pub(crate) fn alone(programs: &[Step]) -> Self {
        Self {
            assignments: vec![Assignment::default(); programs.len()],
            refusals: vec![Vec::new(); programs.len()],
            state_sides: vec![MAIN; states(programs).len()],
            fallbacks: Vec::new(),
        }
    }

    /// Values that a step copies between the devices at most.
    pub(crate) fn crossings(&self) -> usize {
        self.assignments.iter().map(|assignment| assignment.transfers.len()).max().unwrap_or(0)
    }

    /// Refuses a device that computes nothing, and more copies than allowed.
    pub(crate) fn check(&self, placement: &Placement, programs: &[Step]) -> Result<(), RuntimeError> {
        let device = || placement.device.info().name.clone();
        let reasons = || self.fallbacks.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        let idle =
            |(assignment, (_, _, compiled)): (&Assignment, &Step)| !assignment.uses(&compiled.program, MAIN, |_| true);
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
        let context = Context { bounds: program.bounds, phase, states: self.states };
        for instruction in &program.instructions {
            let Some(state) = state_of(&instruction.op) else { continue };
            if let Some(reason) = self.refusal(instruction, &context)? {
                self.moved.entry(state).or_insert_with(|| (instruction.op.name(), reason));
            }
        }
        Ok(())
    }

    /// Side of a cache.
    pub(crate) fn state_side(&self, state: StateId) -> Side {
        if self.moved.contains_key(&state) { FALLBACK } else { MAIN }
    }

    /// Why the device does not compute each instruction of a program.
    pub(crate) fn refusals(&mut self, program: &Program, phase: Phase) -> Result<Vec<Option<String>>, RuntimeError> {
        let context = Context { bounds: program.bounds, phase, states: self.states };
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
fn assign(program: &Program, refusals: &[Option<String>]) -> (Assignment, Vec<Fallback>) {
    let mut fallbacks: BTreeMap<(&'static str, &str), Fallback> = BTreeMap::new();
    for (instruction, reason) in program.instructions.iter().zip(refusals) {
        let Some(reason) = reason else { continue };
        let op = instruction.op.name();
        let first = || Fallback { op, reason: reason.clone(), instructions: 0, origin: instruction.origin.clone() };
        fallbacks.entry((op, reason)).or_insert_with(first).instructions += 1;
    }
    if fallbacks.is_empty() {
        return (Assignment::default(), Vec::new());
    }
    let sides: Vec<Side> = refusals.iter().map(|reason| if reason.is_some() { FALLBACK } else { MAIN }).collect();
    let transfers = transfers(program, &sides);
    (Assignment { sides, transfers }, fallbacks.into_values().collect())
}

const fn state_of(op: &Op) -> Option<StateId> {
    match op {
        Op::KvAppend { state } | Op::Attention { state, .. } | Op::MlaAttention { state, .. } => Some(*state),
        _ => None,
    }
}

/// Copies that make every temporary be where it is read. A place stands for the value that was written there last.
fn transfers(program: &Program, sides: &[Side]) -> Vec<Transfer> {
    let mut valid: HashMap<(ArenaPool, u64), [bool; 2]> = HashMap::new();
    let mut transfers = Vec::new();
    for (before, (instruction, side)) in program.instructions.iter().zip(sides).enumerate() {
        for operand in &instruction.inputs {
            let Place::Arena { pool, offset } = operand.place else { continue };
            let Some(at) = valid.get_mut(&(pool, offset)).filter(|at| !at[*side]) else { continue };
            at[*side] = true;
            transfers.push(Transfer { before, to: *side, pool, offset, ..whole(operand) });
        }
        for operand in &instruction.outputs {
            if let Place::Arena { pool, offset } = operand.place {
                let mut at = [false; 2];
                at[*side] = true;
                valid.insert((pool, offset), at);
            }
        }
    }
    transfers
}

/// The value that an operand is columns of: whole rows.
fn whole(operand: &Operand) -> Transfer {
    let (rows, row) = match operand.shape.split_last() {
        Some((Dim::Const(_), rows)) => (rows.to_vec(), operand.row_stride),
        _ => (operand.shape.clone(), 1),
    };
    let row_bytes = operand.dtype.bytes_for(row).unwrap_or(u64::MAX);
    Transfer { before: 0, to: MAIN, pool: ArenaPool::Temporary, offset: 0, rows, row_bytes }
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
        transfers(&program(steps), sides).into_iter().map(|t| (t.before, t.to, t.offset)).collect()
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
        let transfer = transfers(&program(&[(&[], 0), (&[0], 64)]), &[0, 1]).remove(0);
        assert_eq!(transfer.bytes(&[3, 0, 0, 0, 0]), 3 * 16 * 4);
        assert_eq!((transfer.from(), transfer.to), (MAIN, FALLBACK));
    }
}
