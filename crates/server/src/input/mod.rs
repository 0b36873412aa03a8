//! From bytes of a client to typed parameters.

pub mod body;
pub mod parameters;
pub mod sampling;
pub mod structured;
