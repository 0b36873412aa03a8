//! Chips as data: what is known of a chip, with a source for every figure; what it demands; which kernels it wants.
//!
//! In: TOML sheets, the built-in ones of `chips/` and those of a folder of the user. Out: [`Chip`]s, checked. Nothing else in
//! this project knows a chip by name: whatever has to be decided by chip is an entry of its sheet.
//!
//! A sheet holds facts, and a fact that nobody knows is absent. What a simulation needs beyond the facts are assumptions and
//! lie apart, in [`Simulation`].

#![forbid(unsafe_code)]

mod catalogue;
mod check;
mod dispatch;
mod error;
mod sheet;

pub use catalogue::{Catalogue, MAX_SHEET_BYTES, MAX_SHEETS, parse};
pub use dispatch::{Condition, Dispatch, Family, Parameter, Tiling, Variable};
pub use error::ChipError;
pub use sheet::{
    Ability, Accuracy, Alignment, Allocator, AllocatorKind, Chip, Compute, Dtype, DtypeSheet, Fault, Figure, Kind,
    Launch, Link, LinkKind, Memory, MemoryLevel, Preferences, Scope, Simulation, Source, Status, Tile, Trust,
};

#[cfg(test)]
mod tests;
