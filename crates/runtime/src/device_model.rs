//! What the passes ask a device, answered by the device's own `op_supports` and `plan_create`.

use qwen_hal::{Device, PlanOptions};
use qwen_ir::passes::DeviceModel;
use qwen_ir::program::Instruction;
use qwen_ir::{Phase, StateDecl, SymbolBounds};

use crate::describe::{Context, describe};

/// A device as the passes see it.
#[derive(Debug)]
pub struct HalDeviceModel<'a> {
    device: &'a Device,
    bounds: SymbolBounds,
    phase: Phase,
    states: &'a [StateDecl],
}

impl<'a> HalDeviceModel<'a> {
    /// For steps of the given kind and sizes.
    #[must_use]
    pub const fn new(device: &'a Device, bounds: SymbolBounds, phase: Phase, states: &'a [StateDecl]) -> Self {
        Self { device, bounds, phase, states }
    }

    fn context(&self) -> Context<'_> {
        Context { bounds: self.bounds, phase: self.phase, states: self.states }
    }
}

impl DeviceModel for HalDeviceModel<'_> {
    fn supports(&self, instruction: &Instruction) -> bool {
        let described = describe(instruction, &self.context());
        self.device.op_supports(&described.desc).is_ok_and(|support| support.is_supported())
    }

    fn in_place(&self, instruction: &Instruction, operand: usize) -> bool {
        let described = describe(instruction, &self.context());
        let plan = self.device.plan(&described.desc, &PlanOptions::default());
        plan.is_ok_and(|plan| plan.info().in_place.checked_shr(operand as u32).unwrap_or(0) & 1 == 1)
    }

    fn tiling(&self, instruction: &Instruction) -> Option<String> {
        let described = describe(instruction, &self.context());
        let plan = self.device.plan(&described.desc, &PlanOptions::default()).ok()?;
        Some(plan.info().kernel.clone())
    }

    fn arena_alignment(&self) -> u64 {
        self.device.caps().buffer_alignment.max(64)
    }
}
