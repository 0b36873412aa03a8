//! How far a device is from another one, op by op.
//!
//! In: a model, a reference, a device to judge, some tokens. Out: for every instruction of one step how far the results are apart.
//! Both get the same inputs: what the judged device computed is copied to the reference before each instruction, so that errors
//! do not add up. Caches are each device's own, filled by its own `kv_append`, as their inner order is its own too. An instruction
//! that the judged device refuses is computed by the reference alone; a form that the reference lacks it computes in float32.

use std::sync::Arc;

use qwen_formats::{Checkpoint, DType};
use qwen_hal::{Device, Slice};
use qwen_ir::passes::{Compiled, DeviceModel};
use qwen_ir::program::{Operand, Place, Program, StepResult};
use qwen_ir::{Compute, Dim, Graph, Phase, Sums};

use super::Model;
use crate::batch::{Batch, LogitRows, SequenceKv};
use crate::device_model::HalDeviceModel;
use crate::executor::{DeviceSide, Executor};
use crate::kv_memory::KvMemory;
use crate::placement::{Assignment, MAIN, Placement, Planner, Side};
use crate::{ModelOptions, RuntimeError};

/// The reference helps the judged device out.
const FALLBACK: Side = MAIN + 1;

/// Results of one instruction on both devices.
#[derive(Debug, Clone, PartialEq)]
pub struct OpDifference {
    /// Kind of op.
    pub op: &'static str,
    /// Layer and part.
    pub origin: String,
    /// Kernel of the judged device.
    pub kernel: String,
    /// Why the judged device does not compute it, if it doesn't.
    pub refused: Option<String>,
    /// Float values compared.
    pub values: u64,
    /// Sum of squared differences over the sum of squares of the reference; infinite if that is 0 and the results differ.
    pub nmse: f64,
    /// Largest difference of two floats; infinite if one is no number.
    pub max_abs: f64,
    /// Integers that differ: chosen experts, places in their order.
    pub integers: u64,
}

impl OpDifference {
    fn compare(&mut self, operand: &Operand, symbols: &[i64; 5], reference: &[u8], judged: &[u8], sums: &mut [f64; 2]) {
        let columns = row_of(operand);
        let (stride, offset) = (operand.row_stride as usize, (operand.byte_offset / 4) as usize);
        let rows = rows_of(operand, symbols);
        let words = |bytes: &[u8], i: usize| {
            bytes.get(4 * i..4 * i + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes)
        };
        for i in (0..rows).flat_map(|row| (0..columns).map(move |column| row * stride + offset + column)) {
            let (Some(a), Some(b)) = (words(reference, i), words(judged, i)) else { continue };
            if operand.dtype == DType::I32 {
                self.integers += u64::from(a != b);
            } else if operand.dtype == DType::F32 {
                let (a, b) = (f64::from(f32::from_bits(a)), f64::from(f32::from_bits(b)));
                let difference = if a == b || (a.is_nan() && b.is_nan()) { 0.0 } else { (a - b).abs() };
                let difference = if difference.is_nan() { f64::INFINITY } else { difference };
                self.values += 1;
                self.max_abs = self.max_abs.max(difference);
                sums[0] += difference * difference;
                sums[1] += if a.is_finite() { a * a } else { 0.0 };
            }
        }
    }
}

fn row_of(operand: &Operand) -> usize {
    operand.shape.last().and_then(|dim| dim.constant()).unwrap_or(1) as usize
}

fn rows_of(operand: &Operand, symbols: &[i64; 5]) -> usize {
    let outer = match operand.shape.split_last() {
        Some((Dim::Const(_), outer)) => outer,
        _ => operand.shape.as_slice(),
    };
    let size = |dim: &Dim| match dim {
        Dim::Const(n) => *n as usize,
        Dim::Symbol(symbol) => usize::try_from(symbols[*symbol as usize]).unwrap_or(0),
    };
    outer.iter().map(size).product()
}

/// Bytes of the whole rows that an operand is columns of.
fn extent(operand: &Operand, symbols: &[i64; 5]) -> u64 {
    let row = if row_of(operand) == 1 && operand.row_stride <= 1 { 1 } else { operand.row_stride };
    operand.dtype.bytes_for(row).unwrap_or(0).saturating_mul(rows_of(operand, symbols) as u64)
}

/// Memory of an operand that a step computes, from its first row.
fn memory(operand: &Operand, side: &DeviceSide, bytes: u64) -> Result<Option<Slice>, RuntimeError> {
    let whole = match operand.place {
        Place::Arena { pool, offset } => side.arenas.slice(pool, offset),
        Place::Result => side.buffers.result_buffer().map(qwen_hal::Buffer::whole),
        _ => return Ok(None),
    };
    Ok(whole.map(|slice| slice.slice(0, bytes)).transpose()?)
}

fn download(side: &DeviceSide, slice: &Slice) -> Result<Vec<u8>, RuntimeError> {
    let mut bytes = vec![0; usize::try_from(slice.size()).unwrap_or(usize::MAX)];
    side.stream.copy_to_host(slice, &mut bytes)?;
    Ok(bytes)
}

impl Model {
    /// Computes `tokens` as one prompt on both devices, instruction by instruction with the same inputs.
    ///
    /// # Errors
    /// If the model can't be loaded, or the tokens do not fit one step.
    pub fn op_differences(
        graph: Graph,
        checkpoint: &Arc<Checkpoint>,
        reference: Device,
        judged: Device,
        options: ModelOptions,
        tokens: &[u32],
    ) -> Result<Vec<OpDifference>, RuntimeError> {
        let placement = Placement::from(judged).with_fallback(reference);
        let mut model = Self::unprepared(graph, checkpoint, &placement, options)?;
        let phase = if model.phase_matters { Phase::Prefill } else { Phase::Mixed };
        let reference = model.ranks[0].sides.get(FALLBACK).map(|side| &side.device);
        let compiled = model.compile_beside(0, StepResult::Logits, phase, model.options.max_step_tokens, reference)?;
        let mut pair = Pair::new(&mut model, phase, &compiled)?;
        let mut sequence = SequenceKv::default();
        model.reserve(&mut sequence, u32::try_from(tokens.len()).unwrap_or(u32::MAX))?;
        let mut batch = Batch::new(model.block_size);
        batch.push(&sequence, tokens, LogitRows::All)?;
        pair.run(&compiled.program, &batch, &mut model.ranks[0].sides)
    }
}

/// The program on both devices.
struct Pair {
    judged: Executor,
    reference: Executor,
    refusals: Vec<Option<String>>,
}

impl Pair {
    fn new(model: &mut Model, phase: Phase, compiled: &Compiled) -> Result<Self, RuntimeError> {
        let program = &compiled.program;
        let states = &compiled.graph.states;
        let kv_dtype = states.first().map_or(DType::F32, |state| state.dtype);
        let limit = model.kv_pool.limit();
        for side in [MAIN, FALLBACK] {
            model.check_cache(0, side, kv_dtype, &|_, _| true)?;
            let on = &mut model.ranks[0].sides[side];
            on.kv = KvMemory::reserve(&on.device, &model.graph, kv_dtype, model.block_size, limit, &|_, _| true)?;
        }
        let mut planner = Planner::new(&model.ranks[0].sides[MAIN].device, states);
        planner.look_at(program, phase)?;
        let refusals = planner.refusals(program, phase)?;
        let sides = refusals.iter().map(|refusal| if refusal.is_some() { FALLBACK } else { MAIN }).collect();
        let count = program.instructions.len();
        let (here, there) = (Assignment::of(sides), Assignment::of(vec![FALLBACK; count]));
        let exact = in_forms_of(program, &model.ranks[0].sides[FALLBACK].device, phase, states);
        let sides = &mut model.ranks[0].sides;
        let judged =
            Executor::new(program.clone(), here, phase, states, sides, &mut |_, _| {}).map_err(|(_, error)| error)?;
        let reference =
            Executor::new(exact, there, phase, states, sides, &mut |_, _| {}).map_err(|(_, error)| error)?;
        for (side, on) in sides.iter_mut().enumerate() {
            let workspace = judged.workspace_bytes(side).max(reference.workspace_bytes(side));
            on.arenas.ensure(&on.device, program.arena_bytes, workspace)?;
        }
        Ok(Self { judged, reference, refusals })
    }

    fn run(
        &mut self,
        program: &Program,
        batch: &Batch,
        sides: &mut [DeviceSide],
    ) -> Result<Vec<OpDifference>, RuntimeError> {
        let symbols = self.judged.begin(batch, sides)?;
        self.reference.begin(batch, sides)?;
        let mut differences = Vec::with_capacity(program.instructions.len());
        for (i, instruction) in program.instructions.iter().enumerate() {
            for operand in &instruction.inputs {
                copy_across(operand, &symbols, &sides[MAIN], &sides[FALLBACK])?;
            }
            self.reference.launch_one(i, &symbols, sides).map_err(|(_, error)| error)?;
            let refused = self.refusals.get(i).cloned().flatten();
            let mut difference = OpDifference {
                op: instruction.op.name(),
                origin: instruction.origin.clone(),
                kernel: self.judged.kernel(i).to_owned(),
                refused,
                values: 0,
                nmse: 0.0,
                max_abs: 0.0,
                integers: 0,
            };
            if difference.refused.is_some() {
                for operand in &instruction.outputs {
                    copy_across(operand, &symbols, &sides[FALLBACK], &sides[MAIN])?;
                }
                differences.push(difference);
                continue;
            }
            self.judged.launch_one(i, &symbols, sides).map_err(|(_, error)| error)?;
            let mut sums = [0.0; 2];
            for operand in &instruction.outputs {
                let bytes = extent(operand, &symbols);
                let both = (memory(operand, &sides[FALLBACK], bytes)?, memory(operand, &sides[MAIN], bytes)?);
                let (Some(a), Some(b)) = both else { continue };
                let (a, b) = (download(&sides[FALLBACK], &a)?, download(&sides[MAIN], &b)?);
                difference.compare(operand, &symbols, &a, &b, &mut sums);
            }
            difference.nmse = match sums {
                [error, _] if error <= 0.0 => 0.0,
                [error, square] => error / square,
            };
            differences.push(difference);
        }
        Ok(differences)
    }
}

/// Copies what an operand is a part of, if a step computes it.
fn copy_across(operand: &Operand, symbols: &[i64; 5], from: &DeviceSide, to: &DeviceSide) -> Result<(), RuntimeError> {
    let bytes = extent(operand, symbols);
    let (Some(source), Some(target)) = (memory(operand, from, bytes)?, memory(operand, to, bytes)?) else {
        return Ok(());
    };
    to.stream.copy_from_host(&download(from, &source)?, &target)?;
    Ok(())
}

/// The program with products in float32 where a device lacks their form.
fn in_forms_of(program: &Program, device: &Device, phase: Phase, states: &[qwen_ir::StateDecl]) -> Program {
    let model = HalDeviceModel::new(device, program.bounds, phase, states);
    let mut program = program.clone();
    for instruction in &mut program.instructions {
        if !model.supports(instruction) {
            instruction.compute.iter_mut().for_each(|compute| *compute = Compute::F32);
            instruction.sums = Sums::F32;
        }
    }
    program
}
