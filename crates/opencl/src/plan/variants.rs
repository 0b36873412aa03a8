//! The extension `variants`: how a plan cuts its products, at which sizes, and which other ways there are.

use qwen_hal_abi::{
    QHAL_VARIANT_CHOSEN, qhal_device, qhal_error, qhal_op_desc, qhal_plan, qhal_plan_info, qhal_plan_opts, qhal_str,
    qhal_variant, qhal_variants_api,
};
use qwen_hal_plugin::array;

use super::desc::Extent;
use super::entry::{create_by, plan_of};
use crate::device::Device;
use crate::failure::{Failure, guard, sized, write_text};
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
    range: Option<(u32, i64, i64)>,
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
    fn raw(&self, unit: &Unit, chosen: bool) -> qhal_variant {
        let (symbol, min, max) = self.range.unwrap_or((u32::MAX, 0, i64::MAX));
        let mut raw = qhal_variant {
            struct_size: size_of::<qhal_variant>() as u32,
            flags: if chosen { QHAL_VARIANT_CHOSEN } else { 0 },
            symbol,
            reserved: 0,
            min,
            max,
            family: [0; 32],
            tiling: [0; 64],
            name: [0; 32],
        };
        write_text(&mut raw.family, if self.tile == 1 { "panels_by_row" } else { "panels_by_tile" });
        write_text(&mut raw.tiling, &format!("{}x{}_group{}", self.tile, unit.facts.tiling.vector, self.cut.split));
        write_text(&mut raw.name, &self.cut.name());
        raw
    }
}

unsafe extern "C" fn variant(plan: *mut qhal_plan, index: u32, out: *mut qhal_variant, err: *mut qhal_error) -> i32 {
    // SAFETY: the host passes a plan of ours and a record of the size that it states.
    unsafe {
        guard(err, || {
            let (unit, choice) = plan_of(plan)?.choice();
            let out = sized(out)?;
            let variants = choice.map(|choice| choice.variants(unit.facts.max_group)).unwrap_or_default();
            let variant = variants.get(index as usize);
            let variant = variant.ok_or_else(|| Failure::out_of_range(format!("of {} variants", variants.len())))?;
            let chosen = choice.is_some_and(|choice| choice.cut == variant.cut);
            *out = qhal_variant { struct_size: out.struct_size, ..variant.raw(unit, chosen) };
            Ok(())
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
            let name = array(name.data, u32::try_from(name.len).unwrap_or(u32::MAX))?;
            let cuts: Vec<Cut> = Cut::all(unit.facts.tiling.cut, unit.facts.max_group).collect();
            let cut = cuts.iter().find(|cut| cut.name().as_bytes() == name).copied().ok_or_else(|| {
                let names: Vec<String> = cuts.iter().map(|cut| cut.name()).collect();
                let found = String::from_utf8_lossy(name);
                Failure::unsupported(format!("variant {found:?}, expected one of {}", names.join(", ")))
            })?;
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
