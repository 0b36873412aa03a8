//! Errors of the runtime.

use std::fmt;

use qwen_formats::FormatError;
use qwen_hal::{HalError, LaunchError, PlanError};
use qwen_ir::IrError;

/// Why a model can't be loaded or a step can't be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeError {
    /// The checkpoint.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The graph or a pass.
    #[error(transparent)]
    Ir(#[from] IrError),
    /// Memory, streams, devices.
    #[error(transparent)]
    Hal(#[from] HalError),
    /// An op can't be planned.
    #[error("{origin}: {source}")]
    Plan {
        /// Layer and part.
        origin: String,
        /// What the device says.
        source: Box<PlanError>,
    },
    /// An op failed.
    #[error("{origin}: {source}")]
    Launch {
        /// Layer and part.
        origin: String,
        /// What the device says.
        source: Box<LaunchError>,
    },
    /// Too much of a model is computed on another device.
    #[error(
        "{device} does not compute all of this model, and {fallback} in its stead would cost {crossings} copies between them in \
         each step, but at most {limit} are allowed; raise --max-crossings or choose another device. Refused were: {reasons}"
    )]
    Crossings {
        /// The model's device.
        device: String,
        /// The device that would help out.
        fallback: String,
        /// Copies in a step.
        crossings: usize,
        /// Most that are allowed.
        limit: u32,
        /// Ops that the device refuses, with its words.
        reasons: String,
    },
    /// A device that has no part in a model.
    #[error("{device} computes nothing of this model; choose another device. Refused were: {reasons}")]
    Idle {
        /// The model's device.
        device: String,
        /// Ops that the device refuses, with its words.
        reasons: String,
    },
    /// Devices that can't compute one model together.
    #[error("{devices} can't compute one model together: {reason}; {help}")]
    Group {
        /// The devices.
        devices: String,
        /// Why.
        reason: String,
        /// What to do.
        help: &'static str,
    },
    /// A compiled model, and devices that hold parts of its weights.
    #[error(
        "{path} is compiled: it holds weights packed whole, and each of {ranks} tensor-parallel devices wants a part of them; load the file \
         that it was compiled from, or divide the layers instead (--pipeline-parallel-size)"
    )]
    Packed {
        /// The file.
        path: String,
        /// Devices that share each weight.
        ranks: usize,
    },
    /// A device of a group failed, and with it the step.
    #[error("{device}, {place}: {source}")]
    Member {
        /// Its name.
        device: String,
        /// Its place in the group.
        place: String,
        /// What happened.
        source: Box<Self>,
    },
    /// The cache is full.
    #[error(
        "the KV cache is full: {wanted} more blocks wanted, {free} of {limit} free; \
         raise --max-seq-len or run fewer sequences"
    )]
    KvExhausted {
        /// Blocks wanted.
        wanted: u32,
        /// Blocks free.
        free: u32,
        /// Blocks in all.
        limit: u32,
    },
    /// A freed block is used.
    #[error("block {index} (generation {generation}) of the KV cache was freed already: a defect of the caller")]
    StaleBlock {
        /// Block.
        index: u32,
        /// Generation of the handle.
        generation: u32,
    },
    /// A weight does not have the bytes that the graph says.
    #[error("weight {name}: expected {expected}, found {found}")]
    Weight {
        /// Tensor.
        name: String,
        /// What the graph says.
        expected: String,
        /// What the checkpoint has.
        found: String,
    },
    /// A compiled model without the form of a weight that is wanted.
    #[error(
        "weight {name}: the file was compiled for {made_for}, but this device, {device}, wants {wanted}; \
         compile the model again with qwen-compile"
    )]
    Form {
        /// Weight, with its layer.
        name: String,
        /// Backend and forms that are there.
        made_for: String,
        /// This device's backend.
        device: String,
        /// Form that it wants.
        wanted: String,
    },
    /// A model that can't be compiled.
    #[error("{path}: expected a GGUF file to compile, found {found}; {help}")]
    Source {
        /// The model.
        path: String,
        /// What it is.
        found: &'static str,
        /// What to do.
        help: &'static str,
    },
    /// An output that can't be written.
    #[error("cannot write: {0}")]
    Output(#[from] std::io::Error),
    /// A step breaks the rules of its inputs.
    #[error("step: {what}: expected {expected}, found {found}")]
    Step {
        /// Which input.
        what: &'static str,
        /// Rule.
        expected: String,
        /// Value.
        found: String,
    },
    /// Memory that is needed is not there.
    #[error("{what} needs {needed}, but {available} is available")]
    Memory {
        /// For what.
        what: String,
        /// Bytes needed.
        needed: Bytes,
        /// Bytes available.
        available: Bytes,
    },
    /// A device without room for its part of a model.
    #[error(
        "no room for {part}: {needed} needed ({weights} for weights, {cache} for {what}, {temporaries} for temporaries), but {available} \
         is available on the device; take more or larger devices, or a smaller cache"
    )]
    Room {
        /// Its part.
        part: String,
        /// Bytes in all.
        needed: Bytes,
        /// Bytes of weights, in the device's forms.
        weights: Bytes,
        /// Bytes of the cache.
        cache: Bytes,
        /// The cache in words.
        what: String,
        /// Bytes of temporaries.
        temporaries: Bytes,
        /// Bytes available.
        available: Bytes,
    },
}

/// A number of bytes that prints with a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u64); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];
        let (unit, size) = UNITS.into_iter().find(|(_, size)| self.0 >= *size).unwrap_or(("B", 1));
        if size == 1 { write!(f, "{} B", self.0) } else { write!(f, "{:.1} {unit}", self.0 as f64 / size as f64) }
    }
}
