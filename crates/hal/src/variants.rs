//! The extension `variants`: which kernels a plan takes for which sizes, and plans that take others.

use qwen_hal_abi::{
    QHAL_EXT_VARIANTS, QHAL_OK, QHAL_OUT_OF_RANGE, QHAL_UNIMPLEMENTED, QHAL_VARIANT_CHOSEN, qhal_error, qhal_op_desc,
    qhal_plan, qhal_plan_info, qhal_plan_opts, qhal_variant, qhal_variants_api,
};

use crate::device::{DeviceInner, Zeroed};
use crate::error::{CallError, HalError};
use crate::plan::Plan;
use crate::plugin::extension;
use crate::text::{as_str, fixed_text};

/// More variants of one plan are not believed.
const MAX_VARIANTS: u32 = 256;

/// A way to compute launches of some sizes. Results are the same bits whichever is taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variant {
    /// What [`crate::Device::plan_as`] takes to get it.
    pub name: String,
    /// Family of kernels.
    pub family: String,
    /// Tiling within the family.
    pub tiling: String,
    /// Index of the symbol whose value decides; `None` if it holds for every launch.
    pub symbol: Option<u32>,
    /// Smallest value of the symbol.
    pub min: i64,
    /// Largest value of the symbol.
    pub max: i64,
    /// The plan takes it.
    pub chosen: bool,
}

impl DeviceInner {
    fn variants(&self) -> Option<&qhal_variants_api> {
        let read = || {
            // SAFETY: the table of this extension.
            match unsafe { extension(&self.plugin, self.raw, QHAL_EXT_VARIANTS, "variants") } {
                Err(error @ HalError::Contract { .. }) => {
                    tracing::warn!(%error, "no table of variants");
                    None
                }
                table => table.ok(),
            }
        };
        self.variants.get_or_init(read).as_ref()
    }

    pub(crate) fn plan_create_as(
        &self,
        op: &'static str,
        desc: &qhal_op_desc,
        opts: &qhal_plan_opts,
        name: &str,
        plan: &mut *mut qhal_plan,
        info: &mut qhal_plan_info,
    ) -> Result<(), CallError> {
        let mut err = qhal_error::default();
        let status = match self.variants().and_then(|table| table.plan_create_as) {
            // SAFETY: the device is open, the pointers are valid for the call.
            Some(create) => unsafe { create(self.raw.as_ptr(), desc, opts, as_str(name), plan, info, &raw mut err) },
            None => QHAL_UNIMPLEMENTED,
        };
        if status == QHAL_OK {
            return Ok(());
        }
        Err(CallError::new(self.plugin.name_arc(), "plan_create_as", op, status, &err))
    }
}

impl Plan {
    /// Which kernels the plan takes, and which others it could take; empty if the device does not tell.
    ///
    /// # Errors
    /// What the plugin reports, or a table that cannot be.
    pub fn variants(&self) -> Result<Vec<Variant>, HalError> {
        let plugin = &*self.device.plugin;
        let Some(ask) = self.device.variants().and_then(|table| table.plan_variant) else { return Ok(Vec::new()) };
        let mut variants = Vec::new();
        for index in 0..=MAX_VARIANTS {
            let mut raw = qhal_variant::zeroed();
            raw.struct_size = size_of::<qhal_variant>() as u32;
            let mut err = qhal_error::default();
            // SAFETY: the plan is alive, the pointers are valid for the call.
            let status = unsafe { ask(self.raw.as_ptr(), index, &raw mut raw, &raw mut err) };
            match status {
                QHAL_OK => {}
                QHAL_OUT_OF_RANGE | QHAL_UNIMPLEMENTED => return Ok(variants),
                other => return Err(CallError::new(plugin.name_arc(), "plan_variant", self.op, other, &err).into()),
            }
            let symbol = (raw.symbol != u32::MAX).then_some(raw.symbol);
            if symbol.is_some_and(|symbol| symbol as usize >= self.symbols().len()) || raw.min > raw.max {
                let found = format!("symbol {} in {}..={}", raw.symbol, raw.min, raw.max);
                return Err(plugin.contract("plan_variant", "a symbol of the plan and a range", found));
            }
            variants.push(Variant {
                name: fixed_text(&raw.name),
                family: fixed_text(&raw.family),
                tiling: fixed_text(&raw.tiling),
                symbol,
                min: raw.min,
                max: raw.max,
                chosen: raw.flags & QHAL_VARIANT_CHOSEN != 0,
            });
        }
        Err(plugin.contract("plan_variant", format!("at most {MAX_VARIANTS} variants"), "more"))
    }
}
