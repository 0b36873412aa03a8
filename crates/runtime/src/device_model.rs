//! What the passes ask a device, answered by the device's own `op_supports` and `plan_create`.

use std::cell::RefCell;
use std::collections::HashMap;

use qwen_hal::abi::ops::QHAL_DTYPE_F16;
use qwen_hal::abi::{QHAL_DTYPE_CAN_ACCUMULATE, QHAL_DTYPE_CAN_MATRIX};
use qwen_hal::{Device, DtypeCaps, PlanInfo, PlanOptions};
use qwen_ir::passes::DeviceModel;
use qwen_ir::program::Instruction;
use qwen_ir::{Phase, StateDecl, Sums, SymbolBounds};

use crate::arenas;
use crate::describe::{Context, describe, misaligned};
use crate::group::is_exchange;

/// A device as the passes see it, and the one that computes what it refuses.
#[derive(Debug)]
pub struct HalDeviceModel<'a> {
    device: &'a Device,
    fallback: Option<&'a Device>,
    twin: Option<&'a Device>,
    bounds: SymbolBounds,
    phase: Phase,
    states: &'a [StateDecl],
    /// By description: layers ask the same questions, and start-up time counts.
    plans: RefCell<HashMap<String, Option<PlanOf>>>,
}

/// A plan, and the name of the plugin that it is of if that is not the device's own.
#[derive(Debug)]
struct PlanOf {
    info: PlanInfo,
    fallback: Option<String>,
}

impl<'a> HalDeviceModel<'a> {
    /// For steps of the given kind and sizes.
    #[must_use]
    pub fn new(device: &'a Device, bounds: SymbolBounds, phase: Phase, states: &'a [StateDecl]) -> Self {
        Self { device, fallback: None, twin: None, bounds, phase, states, plans: RefCell::default() }
    }

    /// With a device that computes what the first one refuses.
    #[must_use]
    pub const fn with_fallback(mut self, fallback: Option<&'a Device>) -> Self {
        self.fallback = fallback;
        self
    }

    /// With a device that computes every instruction as well, in the same memory plan: only what both do in place is in place.
    #[must_use]
    pub const fn with_twin(mut self, twin: Option<&'a Device>) -> Self {
        self.twin = twin;
        self
    }

    fn context(&self) -> Context<'_> {
        Context { bounds: self.bounds, phase: self.phase, states: self.states, tied: &[] }
    }

    /// What a plan of the instruction would be like, none if there can't be one.
    fn plan<T>(&self, instruction: &Instruction, read: impl FnOnce(&PlanOf) -> T) -> Option<T> {
        let described = describe(instruction, &self.context());
        let mut plans = self.plans.borrow_mut();
        let answer = plans.entry(format!("{:?}", described.desc)).or_insert_with(|| {
            let plan =
                |device: &Device| Some(device.plan(&described.desc, &PlanOptions::default()).ok()?.info().clone());
            if let Some(mut info) = plan(self.device).filter(|_| misaligned(instruction, self.device).is_none()) {
                info.in_place &= self.twin.and_then(plan).map_or(u64::MAX, |twin| twin.in_place);
                return Some(PlanOf { info, fallback: None });
            }
            let fallback = self.fallback?;
            Some(PlanOf { info: plan(fallback)?, fallback: Some(fallback.plugin().name().to_owned()) })
        });
        answer.as_ref().map(read)
    }

    fn supported_by(&self, device: &Device, instruction: &Instruction) -> bool {
        // An exchange is no op of the device's; whether it has exchanges was asked when the group was made.
        if is_exchange(&instruction.op) {
            return true;
        }
        if misaligned(instruction, device).is_some() {
            return false;
        }
        let described = describe(instruction, &self.context());
        device.op_supports(&described.desc).is_ok_and(|support| support.is_supported())
    }
}

impl DeviceModel for HalDeviceModel<'_> {
    fn supports(&self, instruction: &Instruction) -> bool {
        self.supported_by(self.device, instruction)
    }

    fn delegates(&self, instruction: &Instruction) -> bool {
        self.fallback.is_some_and(|fallback| self.supported_by(fallback, instruction))
    }

    fn in_place(&self, instruction: &Instruction, operand: usize) -> bool {
        if is_exchange(&instruction.op) {
            return operand == 0;
        }
        let of = |plan: &PlanOf| plan.info.in_place.checked_shr(operand as u32).unwrap_or(0) & 1 == 1;
        self.plan(instruction, of).unwrap_or(false)
    }

    fn tiling(&self, instruction: &Instruction) -> Option<String> {
        if is_exchange(&instruction.op) {
            return None;
        }
        self.plan(instruction, |plan| match &plan.fallback {
            None => plan.info.kernel.clone(),
            Some(plugin) => format!("{plugin}:{}", plan.info.kernel),
        })
    }

    fn operand_alignment(&self) -> u64 {
        self.device.caps().buffer_alignment
    }

    fn sums(&self) -> (Sums, u32) {
        let caps = self.device.caps();
        // A matrix unit that sums in half precision says so of the type.
        let own = |dtype: &DtypeCaps| {
            let bits = QHAL_DTYPE_CAN_MATRIX | QHAL_DTYPE_CAN_ACCUMULATE;
            dtype.dtype == QHAL_DTYPE_F16 && dtype.bits & bits == bits
        };
        let depth = caps.matrix_tile.map_or(1, |tile| tile[2]).max(1);
        (if caps.dtypes.iter().any(own) { Sums::F16 { span: 0 } } else { Sums::F32 }, depth)
    }

    fn arena_alignment(&self) -> u64 {
        self.fallback.map_or(1, arenas::alignment).max(arenas::alignment(self.device))
    }
}
