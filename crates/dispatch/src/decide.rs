//! Dispatch: three levels, one table. The library that serves the device, the family of kernels for its bandwidth, the tiling for
//! a shape.
//!
//! What a backend tells of its own plans is what runs, and counts. Where it tells nothing, the chip's sheet decides by the measured
//! bandwidth, or by the declared one if nothing was measured. No chip is known by name here.

use qwen_chips::{Chip, Variable};
use qwen_hal::{Device, Variant};
use serde::Serialize;

use crate::profile::HardwareProfile;

/// A planned op, as far as dispatch looks at it.
#[derive(Debug, Clone, Default)]
pub struct OpShape<'a> {
    /// Name of the op.
    pub op: &'a str,
    /// Kernel that the plan names.
    pub kernel: &'a str,
    /// What the plan tells of its variants.
    pub variants: &'a [Variant],
    /// By index of the plan's symbols, which variable each is; `None` for those that no tiling depends on.
    pub symbols: &'a [Option<Variable>],
    /// Values of variables: sizes of the op, and of the step where they are known.
    pub values: &'a [(Variable, u64)],
    /// The plan was made of a variant that was measured as fastest.
    pub tuned: bool,
}

impl OpShape<'_> {
    fn value(&self, variable: Variable) -> Option<u64> {
        self.values.iter().find(|(known, _)| *known == variable).map(|(_, value)| *value)
    }
}

/// Where a choice of kernel comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChosenBy {
    /// The backend's plan says so.
    Backend,
    /// A variant that was measured as fastest.
    Tuning,
    /// The chip's sheet.
    Sheet,
    /// Nobody: the backend tells nothing and the sheet has no entry.
    Default,
}

/// What was chosen for an op and sizes, and why.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Decision {
    /// The op.
    pub op: String,
    /// Top level: the library of kernels.
    pub library: String,
    /// Top level: what the library was chosen for.
    pub capability: String,
    /// Middle level: bytes per second of the device's memory; none if unknown.
    pub bandwidth: Option<f64>,
    /// `measured`, `simulated` or `declared`.
    pub bandwidth_origin: Option<&'static str>,
    /// Middle level: the family of kernels.
    pub family: String,
    /// Bottom level: the variable that decided.
    pub variable: Option<&'static str>,
    /// Its smallest value of this decision.
    pub min: Option<u64>,
    /// Its largest.
    pub max: Option<u64>,
    /// Bottom level: the tiling.
    pub tiling: String,
    /// Where family and tiling come from.
    pub chosen_by: ChosenBy,
    /// The chip's own strength that is used, in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strength: Option<String>,
}

impl Decision {
    /// The three lines of `QWEN_DEBUG_DISPATCH=1`.
    #[must_use]
    pub fn lines(&self) -> [String; 3] {
        let bandwidth = self.bandwidth.map_or_else(|| "unknown".to_owned(), bandwidth_text);
        let condition = match (self.variable, self.min, self.max) {
            (Some(variable), Some(min), Some(max)) if min == max => format!("{variable}={min}"),
            (Some(variable), Some(min), Some(max)) => format!("{variable}={min}..{max}"),
            _ => "any shape".to_owned(),
        };
        [
            format!("[DISPATCH] Top-level: selected {} backend for {}", self.library, self.capability),
            format!("[DISPATCH] Mid-level: memory bandwidth {bandwidth} -> {}", self.family),
            format!("[DISPATCH] Bottom-level: {condition} -> tiling_config={}", self.tiling),
        ]
    }
}

/// A bandwidth as people read it: `2.1 TB/s`, `19.8 GB/s`.
#[must_use]
pub fn bandwidth_text(bytes_per_second: f64) -> String {
    if bytes_per_second >= 1e12 {
        format!("{:.1} TB/s", bytes_per_second / 1e12)
    } else {
        format!("{:.1} GB/s", bytes_per_second / 1e9)
    }
}

/// The table of one device.
#[derive(Debug, Clone)]
pub struct Chooser<'a> {
    chip: Option<&'a Chip>,
    library: String,
    capability: String,
    bandwidth: Option<(f64, &'static str)>,
}

impl<'a> Chooser<'a> {
    /// From what a device says of itself, the sheet of its chip, and its profile, as far as there are any.
    #[must_use]
    pub fn new(device: &Device, chip: Option<&'a Chip>, profile: Option<&HardwareProfile>) -> Self {
        let info = device.info();
        let own = || if info.fingerprint.is_empty() { info.name.clone() } else { info.fingerprint.clone() };
        let sheet = chip.map(|chip| &chip.dispatch);
        Self {
            chip,
            library: sheet
                .and_then(|sheet| sheet.library.clone())
                .unwrap_or_else(|| device.plugin().manifest().name.clone()),
            capability: sheet.and_then(|sheet| sheet.capability.clone()).unwrap_or_else(own),
            bandwidth: Self::known_bandwidth(device, chip, profile),
        }
    }

    /// The same for a chip that is not at hand: everything is from its sheet.
    #[must_use]
    pub fn of_sheet(chip: &'a Chip) -> Self {
        Self {
            chip: Some(chip),
            library: chip.dispatch.library.clone().unwrap_or_else(|| chip.plugin.clone()),
            capability: chip.dispatch.capability.clone().unwrap_or_else(|| chip.title.clone()),
            bandwidth: chip.bandwidth().map(|bandwidth| (bandwidth, "declared")),
        }
    }

    /// Bytes per second of the device's memory, and where the figure is from.
    #[must_use]
    pub const fn bandwidth(&self) -> Option<(f64, &'static str)> {
        self.bandwidth
    }

    fn known_bandwidth(
        device: &Device,
        chip: Option<&Chip>,
        profile: Option<&HardwareProfile>,
    ) -> Option<(f64, &'static str)> {
        let measured = profile.and_then(|profile| Some((profile.bandwidth()?, profile.origin.label())));
        let declared = || device.caps().bandwidth.filter(|bandwidth| *bandwidth > 0.0).or_else(|| chip?.bandwidth());
        measured.or_else(|| declared().map(|bandwidth| (bandwidth, "declared")))
    }

    /// The decisions for an op: one for the sizes given, or, where a size that decides is not given, one for each of its ranges.
    #[must_use]
    pub fn decide(&self, shape: &OpShape<'_>) -> Vec<Decision> {
        let chosen: Vec<&Variant> = shape.variants.iter().filter(|variant| variant.chosen).collect();
        if chosen.is_empty() {
            return vec![self.by_sheet(shape)];
        }
        let mut decisions = Vec::new();
        for variant in chosen {
            let variable = variant.symbol.and_then(|symbol| shape.symbols.get(symbol as usize).copied().flatten());
            let range = (u64::try_from(variant.min).unwrap_or(0), u64::try_from(variant.max).unwrap_or(u64::MAX));
            let mut decision = self.decision(shape, &variant.family, &format!("{}.{}", shape.op, variant.tiling));
            decision.chosen_by = if shape.tuned { ChosenBy::Tuning } else { ChosenBy::Backend };
            if let Some(variable) = variable {
                let given = shape.value(variable);
                if given.is_some_and(|value| !(range.0..=range.1).contains(&value)) {
                    continue;
                }
                (decision.variable, decision.min, decision.max) =
                    (Some(variable.name()), given.or(Some(range.0)), given.or(Some(range.1)));
            } else if let Some(length) = shape.value(Variable::SeqLen) {
                // What the context's length does not decide holds for it.
                (decision.variable, decision.min, decision.max) =
                    (Some(Variable::SeqLen.name()), Some(length), Some(length));
            }
            decisions.push(decision);
        }
        decisions
    }

    fn by_sheet(&self, shape: &OpShape<'_>) -> Decision {
        let sheet = self.chip.map(|chip| &chip.dispatch);
        let family = sheet.and_then(|sheet| sheet.family(self.bandwidth?.0)).map(|family| family.name.as_str());
        let tiling = sheet.and_then(|sheet| sheet.tiling(shape.op, family, |variable| shape.value(variable)));
        let own = if shape.kernel.is_empty() { "default" } else { shape.kernel };
        let mut decision = self.decision(shape, family.unwrap_or("default"), tiling.map_or(own, |tiling| &tiling.name));
        if let Some(tiling) = tiling {
            decision.chosen_by = ChosenBy::Sheet;
            decision.strength.clone_from(&tiling.strength);
        }
        let deciding = tiling.and_then(|tiling| tiling.when.keys().next().copied());
        let variable = deciding.into_iter().chain([Variable::SeqLen, Variable::Tokens]);
        let mut known = variable.filter_map(|variable| Some((variable, shape.value(variable)?)));
        if let Some((variable, value)) = known.next() {
            (decision.variable, decision.min, decision.max) = (Some(variable.name()), Some(value), Some(value));
        }
        decision
    }

    fn decision(&self, shape: &OpShape<'_>, family: &str, tiling: &str) -> Decision {
        Decision {
            op: shape.op.to_owned(),
            library: self.library.clone(),
            capability: self.capability.clone(),
            bandwidth: self.bandwidth.map(|(bandwidth, _)| bandwidth),
            bandwidth_origin: self.bandwidth.map(|(_, origin)| origin),
            family: family.to_owned(),
            variable: None,
            min: None,
            max: None,
            tiling: tiling.to_owned(),
            chosen_by: ChosenBy::Default,
            strength: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chip(name: &str) -> &'static Chip {
        Chip::by_name(name).unwrap()
    }

    /// The example of the specification: a measured bandwidth of 2.1 TB/s and a context of 64 Ki tokens.
    #[test]
    fn the_lines_are_those_of_the_specification() {
        let mut chooser = Chooser::of_sheet(chip("ascend910b"));
        chooser.bandwidth = Some((2.1e12, "measured"));
        let values = [(Variable::SeqLen, 65536)];
        let decisions = chooser.decide(&OpShape { op: "attention", values: &values, ..OpShape::default() });
        assert_eq!(
            decisions[0].lines(),
            [
                "[DISPATCH] Top-level: selected CANN backend for Ascend910B_v2",
                "[DISPATCH] Mid-level: memory bandwidth 2.1 TB/s -> high_bw_kernel",
                "[DISPATCH] Bottom-level: seq_len=65536 -> tiling_config=block_sparse_v2",
            ]
        );
        assert_eq!(decisions[0].chosen_by, ChosenBy::Sheet);
    }

    #[test]
    fn what_a_plan_tells_counts_before_the_sheet() {
        let variant = |name: &str, min, max, chosen| Variant {
            name: name.into(),
            family: format!("{name}_family"),
            tiling: format!("{name}_tile"),
            symbol: Some(0),
            min,
            max,
            chosen,
        };
        let variants = [variant("a", 1, 1, true), variant("b", 2, 64, true), variant("c", 1, 1, false)];
        let chooser = Chooser::of_sheet(chip("ascend910b"));
        let mut shape =
            OpShape { op: "gemm", variants: &variants, symbols: &[Some(Variable::Tokens)], ..OpShape::default() };
        let lines = |shape: &OpShape<'_>| {
            chooser.decide(shape).iter().map(|decision| decision.lines()[2].clone()).collect::<Vec<_>>()
        };
        assert_eq!(
            lines(&shape),
            [
                "[DISPATCH] Bottom-level: tokens=1 -> tiling_config=gemm.a_tile",
                "[DISPATCH] Bottom-level: tokens=2..64 -> tiling_config=gemm.b_tile"
            ]
        );
        shape.values = &[(Variable::Tokens, 7)];
        assert_eq!(lines(&shape), ["[DISPATCH] Bottom-level: tokens=7 -> tiling_config=gemm.b_tile"]);
    }

    #[test]
    fn without_an_entry_the_default_is_named() {
        let mut chooser = Chooser::of_sheet(chip("opencl"));
        chooser.bandwidth = None;
        let decision = chooser.decide(&OpShape { op: "rope", ..OpShape::default() }).remove(0);
        assert_eq!(decision.chosen_by, ChosenBy::Default);
        assert_eq!(decision.lines()[1], "[DISPATCH] Mid-level: memory bandwidth unknown -> default");
        assert_eq!(decision.lines()[2], "[DISPATCH] Bottom-level: any shape -> tiling_config=default");
        assert_eq!(bandwidth_text(19.84e9), "19.8 GB/s");
    }
}
