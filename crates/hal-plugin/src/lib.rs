//! The plugin's side of the C ABI, as far as every plugin in Rust needs it: what an entry of the table reports, and records and arrays
//! that cross the boundary, and command lists ([`cmdlist`]).
//!
//! In: pointers that a host passed. Out: references to records that are large enough, or a [`Failure`]. Invariants: no panic leaves an
//! entry ([`guard`]); a record is written only as far as its owner said that it goes; nothing here knows a device. A plugin in another
//! language needs nothing of this.

pub mod cmdlist;
mod failure;
mod record;
mod variant;

pub use failure::{Failure, caught, guard};
pub use record::{Static, answer, array, element, sized, sized_ref, static_text, write_text};
pub use variant::{VariantRange, variant_named, variant_record, write_variant};
