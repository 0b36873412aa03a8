//! The extension `variants`: how a plan cuts its products, at which sizes, and which other ways there are.

use qwen_hal_abi::{
    qhal_device, qhal_error, qhal_op_desc, qhal_plan, qhal_plan_info, qhal_plan_opts, qhal_str, qhal_variant,
    qhal_variants_api,
};
use qwen_hal_plugin::{VariantRange, variant_named, variant_record, write_variant};

use super::desc::Extent;
use super::entry::{create_by, plan_of};
use crate::device::Device;
use crate::failure::guard;
use crate::unit::{Cut, Unit};

/// How a product is cut, and what decides which kernel a launch takes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choice {
    pub(super) cut: Cut,
    pub(super) rows: Extent,
    /// Up to so many rows each goes by itself, and only the group's size matters.
    pub(super) few: usize,
}

/// A way to cut for a range of sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Variant {
    cut: Cut,
    /// Rows of a tile.
    tile: usize,
    /// Symbol, its smallest and its largest value; none: every launch.
    range: Option<VariantRange>,
}

impl Choice {
    /// Its own variants, then those of the other ways that the device has.
    fn variants(&self, max_group: usize) -> Vec<Variant> {
        Cut::all(self.cut, max_group).flat_map(|cut| self.of(cut)).collect()
    }

    fn of(&self, cut: Cut) -> Vec<Variant> {
        let variant = |tile, range| Variant { cut, tile, range };
        let Some((symbol, factor)) = self.rows.symbol() else {
            return vec![variant(if self.rows.max <= self.few { 1 } else { cut.rows }, None)];
        };
        let (few, most) = (self.few / factor.max(1), self.rows.max / factor.max(1));
        let ranges = [(1, 1, few.min(most)), (cut.rows, few + 1, most)];
        let held = ranges.into_iter().filter(|(_, first, last)| first <= last);
        held.map(|(tile, first, last)| variant(tile, Some((symbol, first as i64, last as i64)))).collect()
    }
}

impl Variant {
    fn record(&self, unit: &Unit, is_chosen: bool) -> qhal_variant {
        let family = if self.tile == 1 { "panels_by_row" } else { "panels_by_tile" };
        let tiling = format!("{}x{}_group{}", self.tile, unit.facts.tiling.vector, self.cut.split);
        variant_record(&self.cut.name(), family, &tiling, self.range, is_chosen)
    }
}

unsafe extern "C" fn variant(plan: *mut qhal_plan, index: u32, out: *mut qhal_variant, err: *mut qhal_error) -> i32 {
    // SAFETY: the host passes a plan of ours and a record of the size that it states.
    unsafe {
        guard(err, || {
            let (unit, choice) = plan_of(plan)?.choice();
            let variants = choice.map(|choice| choice.variants(unit.facts.max_group)).unwrap_or_default();
            let is_chosen = |variant: &Variant| choice.is_some_and(|choice| choice.cut == variant.cut);
            write_variant(&variants, index, |variant| variant.record(unit, is_chosen(variant)), out)
        })
    }
}

unsafe extern "C" fn create_as(
    device: *mut qhal_device,
    desc: *const qhal_op_desc,
    opts: *const qhal_plan_opts,
    name: qhal_str,
    out: *mut *mut qhal_plan,
    info: *mut qhal_plan_info,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: as `plan_create`; the name is readable.
    unsafe {
        guard(err, || {
            let unit = &Device::of(device)?.unit;
            let cuts = Cut::all(unit.facts.tiling.cut, unit.facts.max_group);
            let cut = variant_named(cuts, |cut| cut.name(), name)?;
            create_by(unit, desc, opts, cut, out, info)
        })
    }
}

/// The extension.
pub(crate) static VARIANTS: qhal_variants_api = qhal_variants_api {
    struct_size: size_of::<qhal_variants_api>() as u32,
    version: 1,
    plan_variant: Some(variant),
    plan_create_as: Some(create_as),
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_cover_every_launch() {
        let cut = Cut { rows: 8, split: 4 };
        let fixed = |rows| Choice { cut, rows: Extent::fixed(rows), few: 2 };
        assert_eq!(fixed(2).of(cut), [Variant { cut, tile: 1, range: None }]);
        assert_eq!(fixed(3).of(cut), [Variant { cut, tile: 8, range: None }]);
        assert_eq!(fixed(3).variants(64)[0].cut, cut);
    }
}
