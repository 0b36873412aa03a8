//! Which rows belong to which expert, and their places among the rounded activations.

use super::Groups;
use super::activations::padded_rows;

/// An expert that has rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Active {
    pub(super) expert: usize,
    /// First sorted row.
    pub(super) first_row: usize,
    pub(super) rows: usize,
    /// First row among the rounded, padded ones.
    pub(super) first_slot: usize,
}

/// Experts with rows, in order. The offsets have been checked.
pub(super) fn active<'a>(groups: &Groups<'a>) -> impl Iterator<Item = Active> + Clone + use<'a> {
    let mut slot = 0;
    groups.offsets.windows(2).enumerate().filter_map(move |(expert, ends)| {
        let (first_row, end) = (ends[0] as usize, ends[1] as usize);
        let rows = end - first_row;
        let first_slot = slot;
        slot += padded_rows(rows);
        (rows > 0).then_some(Active { expert, first_row, rows, first_slot })
    })
}

/// The most slots that `rows` rows of `experts` experts may take: three beyond the rows of each expert that has some.
pub(super) const fn max_slots(rows: usize, experts: usize) -> usize {
    let active = if rows < experts { rows } else { experts };
    rows.saturating_add(3 * active)
}

/// Some rows of one expert.
#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    pub(super) expert: usize,
    pub(super) first_row: usize,
    pub(super) rows: usize,
    pub(super) first_slot: usize,
}

/// Blocks of at most `size` rows, a multiple of the tile width, expert by expert.
pub(super) fn blocks<'a>(groups: &Groups<'a>, size: usize) -> impl Iterator<Item = Block> + Clone + use<'a> {
    active(groups).flat_map(move |active| {
        (0..active.rows).step_by(size).map(move |inner| Block {
            expert: active.expert,
            first_row: active.first_row + inner,
            rows: size.min(active.rows - inner),
            first_slot: active.first_slot + inner,
        })
    })
}
