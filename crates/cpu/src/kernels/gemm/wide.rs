//! The unpacked form that all quantised types share: one byte a code, f32 scales and minima, sixteen rows.
//!
//! Vector variants unpack a stretch of a panel into it once for many tokens; the scalar variant works on it alone.

use super::form::PANEL;

/// Inputs of a group.
pub(super) const GROUP: usize = 32;
/// Runs of 4 inputs in a group.
pub(super) const RUNS: usize = GROUP / 4;

/// A group of 32 inputs of sixteen rows. Row `r`, input `i`: value = scale * (code - zero) + min, where scale and min are those
/// of half `i / 16` for types with two scales and of half 0 for the rest, and zero is what the instruction set unpacks with: 128
/// (scalar, AVX-512), the type's own offset (AVX2, where that is less), or 0 with signed codes (AMX, NEON, else AVX2).
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct WideGroup {
    /// By run, row, input.
    pub(super) codes: [[[u8; 4]; PANEL]; RUNS],
    pub(super) scale: [[f32; PANEL]; 2],
    pub(super) min: [[f32; PANEL]; 2],
}

impl WideGroup {
    #[cfg(test)]
    pub(super) const ZERO: Self =
        Self { codes: [[[0; 4]; PANEL]; RUNS], scale: [[0.0; PANEL]; 2], min: [[0.0; PANEL]; 2] };
}

/// Tiles of rounded activations that follow each other, over a stretch of groups.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tiles<'a> {
    /// Rows of a tile.
    pub(super) width: usize,
    /// How many.
    pub(super) count: usize,
    /// From the first word of the first tile on.
    pub(super) words: &'a [u32],
    /// From tile to tile.
    pub(super) stride: usize,
}

/// Some packed groups of a panel that tiles are multiplied with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stretch<'a> {
    /// Whole packed blocks.
    pub(super) packed: &'a [u8],
    /// Those of its groups that the tile has; absent: all.
    pub(super) set: Option<&'a [u32]>,
    /// Sums begin here, instead of with those of the stretch before.
    pub(super) begins: bool,
    /// Asked for by the tile's first rows, then by the next.
    pub(super) ask: Ask,
}

/// Stretches of consecutive panels, all of which one tile is multiplied with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stretches<'a> {
    pub(super) panels: Panels<'a>,
    /// Bytes of a stretch, the last of a panel being the rest.
    pub(super) stretch_bytes: usize,
    /// Those of a panel's groups that the tile has, if the panel is one stretch; absent: all.
    pub(super) set: Option<&'a [u32]>,
    /// Sums begin with each panel, instead of going on from those that are there.
    pub(super) begins: bool,
    pub(super) asks: Asks,
}

/// Consecutive packed panels, or a piece of one, and where their sums go.
#[derive(Debug, Clone, Copy)]
pub(super) struct Panels<'a> {
    /// Whole packed blocks.
    pub(super) bytes: &'a [u8],
    pub(super) panel_bytes: usize,
    /// Sums from panel to panel, at least sixteen a row.
    pub(super) stride: usize,
}

/// What is asked for while a stretch is multiplied: something behind it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asks {
    /// Bytes from the stretch's end.
    pub(super) offset: usize,
    /// Bytes with each group.
    pub(super) group_bytes: usize,
}

impl Asks {
    /// What follows a stretch. Behind the last of a panel is the next panel; behind the last of a weight may be anything, which does
    /// no harm.
    #[inline(always)]
    pub(super) const fn behind(self, packed: &[u8]) -> Ask {
        let next = packed.as_ptr().wrapping_add(packed.len()).wrapping_add(self.offset);
        Ask { next, group_bytes: self.group_bytes }
    }
}

/// Memory that is asked for while tiles are multiplied, a share with each group: all at once would fill the processor's buffers of
/// outstanding lines, and the tiles' own loads would wait behind them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ask {
    /// Where the packed groups lie that are unpacked next. Any address will do.
    pub(super) next: *const u8,
    /// Bytes of a packed group; 0 asks for nothing.
    pub(super) group_bytes: usize,
}

impl Ask {
    pub(super) const NOTHING: Self = Self { next: std::ptr::null(), group_bytes: 0 };

    /// Asks for a group's lines.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn group(self, group: usize) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let first = self.next.wrapping_add(group * self.group_bytes);
        for line in (0..self.group_bytes).step_by(64) {
            // SAFETY: asking reads nothing, so any address will do.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(line).cast()) };
        }
    }
}
