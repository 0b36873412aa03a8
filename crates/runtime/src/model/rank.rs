//! One rank's part of a model: what it has on the device of each stage.
//!
//! A device alone is one rank of one stage. Of a group, the devices of one stage are ranks, each with its part of every layer of the stage
//! (`passes::shard`); a rank goes through all stages. All ranks have the same instructions in the same order.

use std::collections::HashMap;
use std::sync::Arc;

use qwen_formats::{Checkpoint, DType};
use qwen_hal::Device;
use qwen_ir::Graph;
use qwen_ir::passes::{Shard, shard};
use qwen_ir::program::StepResult;

use super::ProgramKey;
use crate::RuntimeError;
use crate::arenas::Arenas;
use crate::executor::{DeviceSide, Executor, Failed, StepBuffers};
use crate::group::{self, Member};
use crate::kv_memory::KvMemory;
use crate::placement::{Assignment, Placement, Side, Step};
use crate::stages::Stages;
use crate::weights::WeightStore;

/// A rank's part of a model; all of it if it is alone.
pub(super) struct Rank {
    /// The device of each stage, and the one that computes what they refuse if there is something.
    pub(super) sides: Vec<DeviceSide>,
    /// What it holds: the weights and caches of its part.
    pub(super) graph: Graph,
    pub(super) shard: Option<Shard>,
    pub(super) executors: HashMap<ProgramKey, Executor>,
}

impl Rank {
    /// The ranks of a placement, before anything is loaded.
    pub(super) fn all(
        graph: &Graph,
        checkpoint: &Arc<Checkpoint>,
        placement: &Placement,
        stages: &Stages,
        block_size: u32,
    ) -> Result<Vec<Self>, RuntimeError> {
        let devices: Vec<Device> = placement.members().cloned().collect();
        group::check_types(&devices)?;
        let ranks = devices.len() / stages.count().max(1);
        let new = |graph: Graph, shard: Option<Shard>, members: Vec<Option<Member>>| {
            let first = shard.map_or(0, |shard| shard.rank as usize);
            let own = devices.iter().skip(first).step_by(ranks).cloned().zip(members);
            let sides = own.chain(placement.fallback.clone().map(|fallback| (fallback, None)));
            Self::new(graph, checkpoint, sides, shard, block_size)
        };
        if ranks < 2 {
            return Ok(vec![new(graph.clone(), None, vec![None; stages.count()])?]);
        }
        if checkpoint.packed().is_some() {
            return Err(RuntimeError::Packed { path: checkpoint.path().display().to_string(), ranks });
        }
        let ranks = u32::try_from(ranks).unwrap_or(u32::MAX);
        let parts = (0..ranks).map(|rank| {
            let shard = Shard { rank, ranks };
            let mut part = graph.clone();
            shard::run(&mut part, Some(shard))?;
            Ok((part, shard))
        });
        // What can't be split is refused before the devices are joined.
        let parts = parts.collect::<Result<Vec<_>, RuntimeError>>()?;
        let teams = devices.chunks(ranks as usize).map(Member::join).collect::<Result<Vec<_>, _>>()?;
        let of_rank = |rank: u32| teams.iter().map(|team| team.get(rank as usize).cloned()).collect();
        parts.into_iter().map(|(graph, shard)| new(graph, Some(shard), of_rank(shard.rank))).collect()
    }

    fn new(
        graph: Graph,
        checkpoint: &Arc<Checkpoint>,
        devices: impl Iterator<Item = (Device, Option<Member>)>,
        shard: Option<Shard>,
        block_size: u32,
    ) -> Result<Self, RuntimeError> {
        let side = |(device, member): (Device, Option<Member>)| {
            Ok(DeviceSide {
                stream: device.stream("model")?,
                weights: WeightStore::new(Arc::clone(checkpoint), &graph),
                arenas: Arenas::default(),
                // What it holds is known when the model is planned.
                kv: KvMemory::reserve(&device, &graph, DType::F32, block_size, 0, &|_, _| false)?,
                buffers: StepBuffers::new(),
                member,
                device,
            })
        };
        let sides = devices.map(side).collect::<Result<Vec<_>, RuntimeError>>()?;
        Ok(Self { sides, graph, shard, executors: HashMap::new() })
    }

    /// Plans programs and takes the memory that they need.
    pub(super) fn plan(
        &mut self,
        programs: Vec<(Step, Assignment)>,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<(), Failed> {
        let total = programs.len();
        let Self { sides, executors, .. } = self;
        for (i, ((phase, tokens, compiled), assignment)) in programs.into_iter().enumerate() {
            let mut part = |done: usize, of: usize| progress(i * of + done, total * of);
            let states = &compiled.graph.states;
            let executor = Executor::new(compiled.program, assignment, phase, states, sides, &mut part)?;
            let arenas = executor.program().arena_bytes;
            for (side, on) in sides.iter_mut().enumerate() {
                let taken = on.arenas.ensure(&on.device, arenas, executor.workspace_bytes(side));
                taken.map_err(|error| (side, error))?;
            }
            let result = executor.program().result;
            if result == StepResult::Hidden {
                // A mean wants every row of a step: what that takes is taken now, not while a request runs.
                let room = executor.reserve_result(u64::from(tokens), sides);
                room.map_err(|error| (executor.result_side(), error))?;
            }
            executors.insert((result, phase, tokens), executor);
        }
        Ok(())
    }

    /// The device that computes what the others refuse, if there is something.
    pub(super) fn fallback(&self, stages: &Stages) -> Option<&DeviceSide> {
        self.sides.get(stages.fallback())
    }

    /// Says which device of a group failed.
    pub(super) fn blame(&self, side: Side, ranks: usize, stages: usize, source: RuntimeError) -> RuntimeError {
        let rank = self.shard.map_or(0, |shard| shard.rank);
        let rank = (ranks > 1).then(|| format!("rank {rank} of {ranks}"));
        let stage = (stages > 1).then(|| format!("stage {side} of {stages}"));
        let place = match (rank, stage) {
            _ if side >= stages => "beside the group".to_owned(),
            (Some(rank), Some(stage)) => format!("{rank} in {stage}"),
            (rank, stage) => rank.or(stage).unwrap_or_default(),
        };
        let device = self.sides.get(side).map(|side| side.device.label()).unwrap_or_default();
        RuntimeError::Member { device, place, source: Box::new(source) }
    }
}
