//! The unpacked form that all quantised types share: one byte a code, f32 scales and minima, sixteen rows.
//!
//! Vector variants unpack a stretch of a panel into it once for many tokens; the scalar variant works on it alone.

use super::form::PANEL;

/// Inputs of a group.
pub(super) const GROUP: usize = 32;
/// Runs of 4 inputs in a group.
pub(super) const RUNS: usize = GROUP / 4;

/// A group of 32 inputs of sixteen rows. Row `r`, input `i`: value = scale * (code - 128) + min, where scale and min are those
/// of half `i / 16` for types with two scales and of half 0 for the rest.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct WideGroup {
    /// By run, row, input.
    pub(super) codes: [[[u8; 4]; PANEL]; RUNS],
    pub(super) scale: [[f32; PANEL]; 2],
    pub(super) min: [[f32; PANEL]; 2],
}

impl WideGroup {
    pub(super) const ZERO: Self =
        Self { codes: [[[0; 4]; PANEL]; RUNS], scale: [[0.0; PANEL]; 2], min: [[0.0; PANEL]; 2] };
}
