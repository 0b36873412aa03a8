//! Sequences, batches, sampling: turns a runtime that computes logits into one that generates text.
//!
//! In: token ids and [`SamplingParams`] ([`Request`]). Out: one [`Output`] per token. Three main types: [`LoadedModel`]
//! (files, tokenizer, template), [`Engine`] (requests in flight), [`Sampler`]. Invariants:
//! - the tokens of a request depend on the request alone: not on what else runs, on how its prompt was cut into steps, on
//!   what was cached, guessed or preempted, or on the number of threads;
//! - a request that was accepted can't run out of cache: it gives way to earlier ones and is computed again, and what can
//!   never fit is refused at once, with the arithmetic;
//! - prompt tokens and generated tokens of a model whose form depends on the phase are never computed in one step.
//!
//! The crate knows no protocol and no chip.
#![forbid(unsafe_code)]

mod blocks;
mod compute;
pub mod constraint;
mod engine;
mod error;
mod fleet;
mod gbnf;
mod guard;
mod handle;
mod kv_map;
mod lark;
mod load;
mod load_meter;
mod pooling;
mod prefix_cache;
mod prepare;
mod queue;
mod request;
mod sampling;
mod schedule;
mod sequence;
mod speculate;
mod stats;
mod stop;
mod topology;

pub use engine::{Engine, EngineOptions};
pub use error::EngineError;
pub use fleet::{
    Build, Epoch, Fleet, FleetError, FleetOptions, FleetOutputs, GroupMember, Instance, InstanceReport, Trust,
};
pub use gbnf::{GbnfError, gbnf_to_lark, is_gbnf};
pub use guard::{GuardOptions, KnownAnswer, is_no_room};
pub use handle::{About, EngineHandle, Outputs, Progress, SubmitError};
pub use kv_map::{KvMap, KvState};
pub use load::{DEFAULT_SEQ_LEN, LoadOptions, LoadStage, LoadedModel, compile, explain, op_differences};
pub use load_meter::{DeviceRates, HLI_MERGE, HLI_SPLIT};
pub use pooling::Pooling;
pub use prepare::{Prepared, Preparer};
pub use qwen_hal::work_in_background;
pub use qwen_ir::{MlaForm, Phase, Symbol};
pub use qwen_runtime::{
    Bytes, Compiled, Explained, Fallback, KvDType, MAX_CROSSINGS, MemoryReport, OpDifference, PassName, Placement,
    PlannedOp, PlannedStep, Policy, Stage,
};
pub use request::{
    ClientKey, Constraint, FinishReason, Grammar, Limits, MAX_LOGPROBS, Output, Request, RequestId, RequestTimings,
};
pub use sampling::{Logprobs, Sampled, Sampler, SamplingParams, Scratch, TokenLogprob, logprobs};
pub use speculate::Speculation;
pub use stats::{EngineStats, PoolStats, STEP_TOKENS_BOUNDS};
pub use stop::{Released, StopWatch};
pub use topology::{Distance, Place, Topology};
