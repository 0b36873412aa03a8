//! What a device plans for a model, without loading its weights: for reports on dispatch, and for tuning.

use std::collections::HashMap;
use std::sync::Arc;

use qwen_formats::Checkpoint;
use qwen_hal::abi::{QHAL_PLAN_BATCH_INVARIANT, QHAL_PLAN_DETERMINISTIC};
use qwen_hal::{Device, OpDesc, PlanError, PlanOptions, Variant};
use qwen_ir::program::{Instruction, Operand};
use qwen_ir::{Dim, Graph, Phase, Symbol};

use super::{Model, ModelOptions};
use crate::RuntimeError;
use crate::describe::{Context, describe};

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
    /// Kernel that the plan names; empty if the device does not have the op.
    pub kernel: String,
    /// Why the device does not have the op.
    pub refused: Option<String>,
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
    /// If a pass or a plan fails; that a device does not have an op is told in its entry.
    pub fn explain(
        graph: Graph,
        checkpoint: &Arc<Checkpoint>,
        device: Device,
        options: ModelOptions,
    ) -> Result<Vec<PlannedOp>, RuntimeError> {
        let model = Self::unprepared(graph, checkpoint, &device.into(), options)?;
        let mut planned: Vec<PlannedOp> = Vec::new();
        for (phase, bucket, compiled) in model.programs()? {
            let context = Context { bounds: compiled.program.bounds, phase, states: &compiled.graph.states };
            let mut known: HashMap<String, usize> = HashMap::new();
            for instruction in &compiled.program.instructions {
                let described = describe(instruction, &context);
                let next = planned.len();
                let at = *known.entry(format!("{:?}", described.desc)).or_insert(next);
                if let Some(planned) = planned.get_mut(at) {
                    planned.instructions += 1;
                    continue;
                }
                planned.push(plan(model.device(), instruction, described.desc, described.symbols, phase, bucket)?);
            }
        }
        Ok(planned)
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
