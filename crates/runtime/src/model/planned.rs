//! What would be planned for a model, without loading its weights: for reports on dispatch, and for tuning.
//!
//! Programs, sides and copies come from the functions that loading calls, so that what is told is what would run.

use std::collections::HashMap;
use std::sync::Arc;

use qwen_formats::Checkpoint;
use qwen_hal::abi::{QHAL_PLAN_BATCH_INVARIANT, QHAL_PLAN_DETERMINISTIC};
use qwen_hal::{Device, OpDesc, PlanError, PlanOptions, Variant};
use qwen_ir::program::{Instruction, Operand};
use qwen_ir::{Dim, Graph, Phase, Symbol};

use super::{Model, ModelOptions};
use crate::RuntimeError;
use crate::describe::{Context, describe, tied};
use crate::group::is_exchange;
use crate::placement::{Decided, Fallback, Placement};
use crate::stages::Stage;

/// What [`Model::explain`] tells.
#[derive(Debug)]
pub struct Explained {
    /// Longest context that the plans are for.
    pub max_seq_len: u32,
    /// Plans for every size of step.
    pub ops: Vec<PlannedOp>,
    /// Every size of step.
    pub steps: Vec<PlannedStep>,
    /// The layers of each stage.
    pub stages: Vec<Stage>,
    /// What the device refuses and the one that helps out computes.
    pub fallbacks: Vec<Fallback>,
    /// Why the model would not be loaded with this placement.
    pub refused: Option<RuntimeError>,
}

/// A kind and size of step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedStep {
    /// Kind.
    pub phase: Phase,
    /// Most tokens.
    pub bucket: u32,
    /// Values that are copied between a device and the one that helps out.
    pub crossings: usize,
    /// Sums that are exchanged between the devices of a group.
    pub exchanges: usize,
}

/// A plan of a device, and what it is for.
#[derive(Debug, Clone)]
pub struct PlannedOp {
    /// Name of the op.
    pub op: &'static str,
    /// Kind of step.
    pub phase: Phase,
    /// Most tokens of the steps that it is for.
    pub bucket: u32,
    /// Instructions of a step that share it.
    pub instructions: usize,
    /// Where the first of them comes from.
    pub origin: String,
    /// Kernel that the plan names; empty if no device has the op.
    pub kernel: String,
    /// Why the model's own device does not compute it.
    pub refused: Option<String>,
    /// The device that helps out computes it: everything else here is that device's.
    pub on_fallback: bool,
    /// Which kernels it takes for which sizes, and which others there are.
    pub variants: Vec<Variant>,
    /// It was planned with a variant that was preferred.
    pub preferred: bool,
    /// What each symbol of a launch is, in order.
    pub symbols: Vec<Symbol>,
    /// Values of a row that is read.
    pub depth: Option<u64>,
    /// Values of a row that is written.
    pub width: Option<u64>,
    /// The description.
    pub desc: OpDesc,
}

impl Model {
    /// Plans everything that loading the model would plan, for each bucket of step sizes.
    ///
    /// # Errors
    /// If a pass or a plan fails; that nobody has an op is told in its entry, that the placement is refused in the answer.
    pub fn explain(
        graph: Graph,
        checkpoint: &Arc<Checkpoint>,
        placement: impl Into<Placement>,
        options: ModelOptions,
    ) -> Result<Explained, RuntimeError> {
        let placement = placement.into();
        let max_seq_len = options.max_seq_len;
        let model = Self::unprepared(graph, checkpoint, &placement, options)?;
        let programs = model.programs()?;
        let decided = Decided::new(&placement, &placement.device, &model.stages, &programs)?;
        let refused = decided.check(&placement, &model.stages, &programs).err();
        let (mut ops, mut steps): (Vec<PlannedOp>, Vec<PlannedStep>) = (Vec::new(), Vec::new());
        for ((phase, bucket, compiled), (assignment, refusals)) in
            programs.iter().zip(decided.assignments.iter().zip(&decided.refusals))
        {
            let (phase, bucket) = (*phase, *bucket);
            let mut exchanges = 0;
            let tied =
                |helper: bool| tied(&compiled.program, |i| (assignment.side(i) == model.stages.fallback()) == helper);
            let tied = [tied(false), tied(true)];
            let mut known: HashMap<(bool, String), usize> = HashMap::new();
            for (i, instruction) in compiled.program.instructions.iter().enumerate() {
                if is_exchange(&instruction.op) {
                    exchanges += 1;
                    continue;
                }
                // All stages plan alike.
                let helper = placement.fallback.as_ref().filter(|_| assignment.side(i) == model.stages.fallback());
                let context = Context {
                    bounds: compiled.program.bounds,
                    phase,
                    states: &compiled.graph.states,
                    tied: &tied[usize::from(helper.is_some())],
                };
                let described = describe(instruction, &context);
                let next = ops.len();
                let at = *known.entry((helper.is_some(), format!("{:?}", described.desc))).or_insert(next);
                if let Some(planned) = ops.get_mut(at) {
                    planned.instructions += 1;
                    continue;
                }
                let device = helper.unwrap_or(&placement.device);
                let mut planned = plan(device, instruction, described.desc, described.symbols, phase, bucket)?;
                if helper.is_some() {
                    planned.on_fallback = planned.refused.is_none();
                    planned.refused = refusals.get(i).cloned().flatten();
                }
                ops.push(planned);
            }
            steps.push(PlannedStep { phase, bucket, crossings: assignment.transfers.len(), exchanges });
        }
        let stages = model.stages.all().to_vec();
        Ok(Explained { max_seq_len, ops, steps, stages, fallbacks: decided.fallbacks, refused })
    }
}

fn plan(
    device: &Device,
    instruction: &Instruction,
    desc: OpDesc,
    symbols: Vec<Symbol>,
    phase: Phase,
    bucket: u32,
) -> Result<PlannedOp, RuntimeError> {
    let row = |operand: Option<&Operand>| operand?.shape.last().copied().and_then(Dim::constant);
    let mut planned = PlannedOp {
        op: instruction.op.name(),
        phase,
        bucket,
        instructions: 1,
        origin: instruction.origin.clone(),
        kernel: String::new(),
        refused: None,
        on_fallback: false,
        variants: Vec::new(),
        preferred: false,
        symbols,
        depth: row(instruction.inputs.first()),
        width: row(instruction.outputs.first()),
        desc,
    };
    let options = PlanOptions { required_flags: QHAL_PLAN_DETERMINISTIC | QHAL_PLAN_BATCH_INVARIANT, max_workspace: 0 };
    match device.plan(&planned.desc, &options) {
        Ok(plan) => {
            planned.kernel.clone_from(&plan.info().kernel);
            planned.variants = plan.variants()?;
            planned.preferred = plan.is_preferred();
        }
        Err(PlanError::Unsupported(error)) => planned.refused = Some(error.message),
        Err(source) => {
            return Err(RuntimeError::Plan { origin: instruction.origin.clone(), source: Box::new(source) });
        }
    }
    Ok(planned)
}
