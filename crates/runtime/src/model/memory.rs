//! Whether each device has room for its part of a model, before anything is taken on any of them.
//!
//! On a device with memory of its own everything counts that loading takes: weights in the forms that plans want, the cache at its limit,
//! temporaries. The host's memory is another matter: weights are mapped there, and what is free is a guess of the system's, so the cache
//! alone is refused.

use qwen_formats::DType;
use qwen_hal::Device;
use qwen_hal::abi::QHAL_FEATURE_IMPORT_HOST;
use qwen_ir::StateId;
use qwen_ir::program::ArenaPool;

use super::Model;
use crate::describe::{tied, weights_of};
use crate::executor::{Failed, plans_of, weights_in_order};
use crate::placement::{Decided, Side, Step};
use crate::weights::Footprint;
use crate::{Bytes, RuntimeError, arenas, kv_memory};

/// Type of the caches of programs.
pub(super) fn kv_dtype(programs: &[Step]) -> DType {
    let states = programs.first().map(|(_, _, compiled)| compiled.graph.states.as_slice()).unwrap_or_default();
    states.first().map_or(DType::F32, |state| state.dtype)
}

/// Bytes of a device's memory that nobody has, where it tells.
fn free(device: &Device) -> Option<u64> {
    device.health().ok().and_then(|health| health.memory_free)
}

impl Model {
    /// Refuses what can't fit.
    pub(super) fn check_memory(&self, rank: usize, programs: &[Step], decided: &Decided) -> Result<(), Failed> {
        (0..self.ranks[rank].sides.len())
            .try_for_each(|side| self.check_side(rank, side, programs, decided).map_err(|error| (side, error)))
    }

    /// Refuses a cache that can't fit by itself; `held` says what of it is on the side.
    pub(super) fn check_cache(
        &self,
        rank: usize,
        side: Side,
        kv_dtype: DType,
        held: &dyn Fn(StateId, u32) -> bool,
    ) -> Result<(), RuntimeError> {
        let needed = self.cache_bytes(rank, kv_dtype, held);
        match free(&self.ranks[rank].sides[side].device) {
            Some(available) if needed > available => {
                let (needed, available) = (Bytes(needed), Bytes(available));
                Err(RuntimeError::Memory { what: self.cache_text(), needed, available })
            }
            _ => Ok(()),
        }
    }

    fn cache_bytes(&self, rank: usize, kv_dtype: DType, held: &dyn Fn(StateId, u32) -> bool) -> u64 {
        let block = kv_memory::bytes_per_block(&self.ranks[rank].graph, kv_dtype, self.block_size, held);
        block.saturating_mul(u64::from(self.kv_pool.limit()))
    }

    fn cache_text(&self) -> String {
        let (tokens, blocks, size) = (self.options.max_cached_tokens, self.kv_pool.limit(), self.block_size);
        format!("a KV cache of {tokens} tokens ({blocks} blocks of {size})")
    }

    fn check_side(&self, rank: usize, side: Side, programs: &[Step], decided: &Decided) -> Result<(), RuntimeError> {
        let device = &self.ranks[rank].sides[side].device;
        let held = |state, layer| decided.holder(&self.stages, state, layer) == side;
        let kv_dtype = kv_dtype(programs);
        if device.caps().has(QHAL_FEATURE_IMPORT_HOST) {
            return self.check_cache(rank, side, kv_dtype, &held);
        }
        let Some(available) = free(device) else { return Ok(()) };
        let (cache, what) = (self.cache_bytes(rank, kv_dtype, &held), self.cache_text());
        let (weights, temporaries) = self.weights_and_temporaries(rank, side, programs, decided)?;
        let needed = cache.saturating_add(weights).saturating_add(temporaries);
        if needed <= available {
            return Ok(());
        }
        let part = match (self.stages.all().get(side), self.ranks.len()) {
            (Some(stage), 1) => stage.span(),
            (Some(stage), ranks) => format!("a part in {ranks} of {}", stage.span()),
            (None, _) => "what other devices refuse".to_owned(),
        };
        let [needed, weights, cache, temporaries, available] =
            [needed, weights, cache, temporaries, available].map(Bytes);
        Err(RuntimeError::Room { part, needed, weights, cache, what, temporaries, available })
    }

    fn weights_and_temporaries(
        &self,
        rank: usize,
        side: Side,
        programs: &[Step],
        decided: &Decided,
    ) -> Result<(u64, u64), RuntimeError> {
        let on = &self.ranks[rank].sides[side];
        let (mut weights, mut workspace, mut pools) = (Footprint::default(), 0, [0; ArenaPool::ALL.len()]);
        for (step, assignment) in programs.iter().zip(&decided.assignments) {
            let program = &step.2.program;
            let mut listed = weights_in_order(program, assignment, &self.ranks[rank].sides);
            listed.retain(|i| assignment.side(*i) == side);
            let tied = tied(program, |i| assignment.side(i) == side);
            plans_of(step, &on.device, &listed, &tied, &mut |instruction, plan| {
                workspace = workspace.max(plan.info().workspace_bytes);
                weights_of(instruction)
                    .try_for_each(|(key, input)| weights.add(&on.weights, &on.device, key, (plan, input)))
            })?;
            for (pool, bytes) in ArenaPool::ALL.into_iter().zip(&mut pools) {
                *bytes = arenas::taken(pool, step.2.program.arena_bytes[pool as usize]).max(*bytes);
            }
        }
        Ok((weights.bytes(), pools.into_iter().fold(workspace, u64::saturating_add)))
    }
}
