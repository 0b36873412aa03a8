//! What the passes ask a device, answered by the device's own `op_supports` and `plan_create`.

use std::cell::RefCell;
use std::collections::HashMap;

use qwen_hal::{Device, PlanInfo, PlanOptions};
use qwen_ir::passes::DeviceModel;
use qwen_ir::program::Instruction;
use qwen_ir::{Phase, StateDecl, SymbolBounds};

use crate::arenas;
use crate::describe::{Context, describe};

/// A device as the passes see it.
#[derive(Debug)]
pub struct HalDeviceModel<'a> {
    device: &'a Device,
    bounds: SymbolBounds,
    phase: Phase,
    states: &'a [StateDecl],
    /// By description: layers ask the same questions, and start-up time counts.
    plans: RefCell<HashMap<String, Option<PlanInfo>>>,
}

impl<'a> HalDeviceModel<'a> {
    /// For steps of the given kind and sizes.
    #[must_use]
    pub fn new(device: &'a Device, bounds: SymbolBounds, phase: Phase, states: &'a [StateDecl]) -> Self {
        Self { device, bounds, phase, states, plans: RefCell::default() }
    }

    fn context(&self) -> Context<'_> {
        Context { bounds: self.bounds, phase: self.phase, states: self.states }
    }

    /// What a plan of the instruction would be like, none if there can't be one.
    fn plan<T>(&self, instruction: &Instruction, read: impl FnOnce(&PlanInfo) -> T) -> Option<T> {
        let described = describe(instruction, &self.context());
        let mut plans = self.plans.borrow_mut();
        let answer = plans.entry(format!("{:?}", described.desc)).or_insert_with(|| {
            let plan = self.device.plan(&described.desc, &PlanOptions::default()).ok()?;
            Some(plan.info().clone())
        });
        answer.as_ref().map(read)
    }
}

impl DeviceModel for HalDeviceModel<'_> {
    fn supports(&self, instruction: &Instruction) -> bool {
        let described = describe(instruction, &self.context());
        self.device.op_supports(&described.desc).is_ok_and(|support| support.is_supported())
    }

    fn in_place(&self, instruction: &Instruction, operand: usize) -> bool {
        let announced = self.plan(instruction, |info| info.in_place.checked_shr(operand as u32).unwrap_or(0) & 1 == 1);
        announced.unwrap_or(false)
    }

    fn tiling(&self, instruction: &Instruction) -> Option<String> {
        self.plan(instruction, |info| info.kernel.clone())
    }

    fn arena_alignment(&self) -> u64 {
        arenas::alignment(self.device)
    }
}
