//! What a plan tells of the ways it computes in: the path of each range of sizes, for the way that it takes and for the others that this
//! processor has. Ranges come from the functions that launches decide by.

use qwen_hal_abi::qhal_variant;
use qwen_hal_plugin::{VariantRange, variant_record};

use super::desc::Extent;
use super::{Op, Plan};
use crate::kernels::attention::{Products, TILING};
use crate::kernels::gemm::{Path, Way};

/// A way for a range of sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Variant {
    way: String,
    family: &'static str,
    tiling: String,
    range: Option<VariantRange>,
    chosen: bool,
}

impl Variant {
    pub(super) fn record(&self) -> qhal_variant {
        variant_record(&self.way, self.family, &self.tiling, self.range, self.chosen)
    }
}

/// (first row, family, tiling), ascending.
type Steps = Vec<(usize, &'static str, String)>;

impl Plan {
    /// Its own variants, then the others that this processor has.
    pub(super) fn variants(&self) -> &[Variant] {
        self.variants.get_or_init(|| {
            let others = Way::all(self.way.isa.max(crate::isa::Isa::current()));
            let others = others.into_iter().filter(|way| *way != self.way && self.op.differs(self.way, *way));
            let ways = std::iter::once(self.way).chain(others);
            ways.flat_map(|way| self.op.variants(way, way == self.way)).collect()
        })
    }
}

impl Op {
    /// Whether another way is another computation for this op.
    fn differs(&self, own: Way, other: Way) -> bool {
        match self {
            Self::Gemm(gemm) if gemm.blocks(own).0.is_some() => true,
            Self::Gemm(_) => other.ahead == Way::from(other.isa).ahead,
            // Blocks and asking ahead are products' alone.
            _ => other == Way::from(other.isa),
        }
    }

    fn variants(&self, way: Way, chosen: bool) -> Vec<Variant> {
        let isa = way.isa.name();
        let (rows, steps): (Option<Extent>, Steps) = match self {
            Self::Gemm(gemm) => {
                let (rounded, block) = gemm.blocks(way);
                let steps = match (rounded, gemm.deciding_rows().is_some()) {
                    (Some(subgroups), true) => {
                        way.paths(subgroups).into_iter().map(|(rows, path)| step(rows, path, isa, block)).collect()
                    }
                    (Some(_), false) => vec![(1, "int8_by_expert", format!("{isa}_1x16_16x16_block{block}"))],
                    (None, _) if gemm.rounds_to_bf16() => vec![(1, "bf16_products", format!("{isa}_block{block}"))],
                    (None, _) => vec![(1, "f32_products", format!("{isa}_block{block}"))],
                };
                (gemm.deciding_rows(), steps)
            }
            Self::Attention(attention) => {
                let ((rows, in_place), tiling) =
                    (attention.deciding_rows(), format!("{isa}_{}x{}", TILING.0, TILING.1));
                let steps = match (attention.pairs(), in_place) {
                    (Some(Products::Bf16), _) => vec![(1, "flash_pairs", tiling)],
                    (Some(Products::F32), _) => vec![(1, "flash_widened", tiling)],
                    (None, 0) => vec![(1, "flash_staged", tiling)],
                    (None, _) => vec![(1, "flash_in_place", tiling.clone()), (in_place + 1, "flash_staged", tiling)],
                };
                (Some(rows), steps)
            }
            Self::MlaAttention(_) => (None, vec![(1, "flash_latent", format!("{isa}_{}x{}", TILING.0, TILING.1))]),
            _ => (None, vec![(1, "by_row", isa.to_owned())]),
        };
        ranges(rows, steps)
            .into_iter()
            .map(|(range, family, tiling)| Variant { way: way.name(), family, tiling, range, chosen })
            .collect()
    }
}

fn step(rows: usize, path: Path, isa: &str, block: usize) -> (usize, &'static str, String) {
    match path {
        Path::OneRow { ahead: true } => (rows, "int8_stream_ahead", format!("{isa}_1x16")),
        Path::OneRow { ahead: false } => (rows, "int8_stream", format!("{isa}_1x16")),
        Path::FewRows { ahead: true } => (rows, "int8_rows_ahead", format!("{isa}_8x16")),
        Path::FewRows { ahead: false } => (rows, "int8_rows", format!("{isa}_8x16")),
        Path::Vectors => (rows, "int8_vectors", format!("{isa}_16x16_block{block}")),
        Path::Tiles => (rows, "int8_tiles", format!("{isa}_16x16_block{block}")),
    }
}

/// Steps in rows as ranges of the symbol that rows are a multiple of; one without a range if rows are fixed.
fn ranges(rows: Option<Extent>, steps: Steps) -> Vec<(Option<VariantRange>, &'static str, String)> {
    let symbol = rows.and_then(|rows| Some((rows.symbol()?, rows.max)));
    let Some(((factor, symbol), most)) = symbol else {
        // The step that holds the fixed number, or the one with most to say.
        let fixed = rows.and_then(Extent::as_fixed).unwrap_or(usize::MAX).max(1);
        let held = steps.into_iter().rev().find(|(first, ..)| *first <= fixed);
        return held.map(|(_, family, tiling)| (None, family, tiling)).into_iter().collect();
    };
    let most = (most / factor).max(1);
    let firsts: Vec<usize> = steps.iter().map(|(first, ..)| first.div_ceil(factor)).collect();
    let ends = firsts.iter().skip(1).map(|first| first - 1).chain([most]);
    let whole = firsts.iter().copied().zip(ends).zip(steps);
    let held = whole.filter(|((first, end), _)| *first <= most && first <= end);
    held.map(|((first, end), (_, family, tiling))| (Some((symbol, first as i64, end.min(most) as i64)), family, tiling))
        .collect()
}
