//! One device's part of a model, and a step of a group.
//!
//! Every rank has the same instructions in the same order. A step enqueues each instruction to all ranks before the next one, so
//! that no rank's queue is full of work behind an exchange that another rank's part has not been enqueued for.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use qwen_formats::{Checkpoint, DType};
use qwen_hal::abi::{QHAL_ABORTED, QHAL_DEADLINE_EXCEEDED};
use qwen_ir::Graph;
use qwen_ir::passes::{Shard, shard};

use super::ProgramKey;
use crate::RuntimeError;
use crate::arenas::Arenas;
use crate::batch::Batch;
use crate::cost::StepObserver;
use crate::executor::{DeviceSide, Executor, StepBuffers};
use crate::group::Member;
use crate::kv_memory::KvMemory;
use crate::placement::{MAIN, Placement};
use crate::weights::WeightStore;

/// A device's part of a model; all of it if it is alone.
pub(super) struct Rank {
    /// The device, and the one that computes what it refuses if there is something.
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
        block_size: u32,
    ) -> Result<Vec<Self>, RuntimeError> {
        if placement.peers.is_empty() {
            return Ok(vec![Self::new(graph.clone(), checkpoint, placement, None, None, block_size)?]);
        }
        let devices: Vec<_> = placement.ranks().cloned().collect();
        if checkpoint.packed().is_some() {
            let names: Vec<&str> = devices.iter().map(|device| device.info().name.as_str()).collect();
            return Err(RuntimeError::Group {
                devices: names.join(" and "),
                reason: format!("{} is compiled, for a device that has the whole model", checkpoint.path().display()),
                help: "load the file that it was compiled from",
            });
        }
        let ranks = u32::try_from(devices.len()).unwrap_or(u32::MAX);
        let parts = (0..ranks).map(|rank| {
            let shard = Shard { rank, ranks };
            let mut part = graph.clone();
            shard::run(&mut part, Some(shard))?;
            Ok((part, shard))
        });
        // What can't be split is refused before the devices are joined.
        let parts = parts.collect::<Result<Vec<_>, RuntimeError>>()?;
        let members = Member::join(&devices)?;
        let of_each = parts.into_iter().zip(members).zip(devices);
        let rank = |(((graph, shard), member), device)| {
            let alone = Placement { device, peers: Vec::new(), ..placement.clone() };
            Self::new(graph, checkpoint, &alone, Some(shard), Some(member), block_size)
        };
        of_each.map(rank).collect()
    }

    fn new(
        graph: Graph,
        checkpoint: &Arc<Checkpoint>,
        placement: &Placement,
        shard: Option<Shard>,
        mut member: Option<Member>,
        block_size: u32,
    ) -> Result<Self, RuntimeError> {
        let side = |device: qwen_hal::Device| {
            Ok(DeviceSide {
                stream: device.stream("model")?,
                weights: WeightStore::new(Arc::clone(checkpoint), &graph),
                arenas: Arenas::default(),
                // What it holds is known when the model is planned.
                kv: KvMemory::reserve(&device, &graph, DType::F32, block_size, 0, &|_| false)?,
                buffers: StepBuffers::new(),
                // Exchanges are the device's own, never the helper's.
                member: member.take(),
                device,
            })
        };
        let sides = placement.devices().into_iter().map(side).collect::<Result<Vec<_>, RuntimeError>>()?;
        Ok(Self { sides, graph, shard, executors: HashMap::new() })
    }

    /// Says which rank failed.
    fn blame(&self, at: usize, ranks: usize, source: RuntimeError) -> RuntimeError {
        let device = self.sides[MAIN].device.info().name.clone();
        RuntimeError::Rank { rank: at, ranks, device, source: Box::new(source) }
    }
}

/// Computes a step on every rank; `out` is [rows, width] afterwards.
pub(super) fn run(
    ranks: &mut [Rank],
    key: ProgramKey,
    batch: &Batch,
    width: usize,
    out: &mut Vec<f32>,
    observer: Option<&mut dyn StepObserver>,
) -> Result<(), RuntimeError> {
    let launched = launch(ranks, key, batch, observer);
    // Ranks whose parts were enqueued end, well or not, before anything else is asked of them.
    let waited: Vec<_> = ranks.iter().map(|rank| Executor::wait(&rank.sides)).collect();
    let count = ranks.len();
    let mut failed: Vec<(usize, RuntimeError)> = Vec::new();
    let values = match launched {
        Ok(values) => values,
        Err((at, error)) => {
            failed.push((at, error));
            [0; 5]
        }
    };
    failed.extend(waited.into_iter().enumerate().filter_map(|(at, waited)| Some((at, waited.err()?))));
    if let Some((at, error)) = first_cause(failed) {
        return Err(ranks[at].blame(at, count, error));
    }
    if batch.rows() == 0 {
        out.clear();
        return Ok(());
    }
    read(ranks, key, &values, width, out)
}

/// Enqueues a step; gives the values of the symbols, or who failed.
fn launch(
    ranks: &mut [Rank],
    key: ProgramKey,
    batch: &Batch,
    mut observer: Option<&mut dyn StepObserver>,
) -> Result<[i64; 5], (usize, RuntimeError)> {
    let mut at_work: Vec<(&mut Executor, &mut Vec<DeviceSide>, usize)> = Vec::with_capacity(ranks.len());
    for (at, rank) in ranks.iter_mut().enumerate() {
        let Rank { sides, executors, .. } = rank;
        let missing =
            || RuntimeError::Step { what: "program", expected: "one of this size".into(), found: "none".into() };
        at_work.push((executors.get_mut(&key).ok_or_else(|| (at, missing()))?, sides, 0));
    }
    let mut values = [0; 5];
    for (at, (executor, sides, _)) in at_work.iter_mut().enumerate() {
        values = executor.begin(batch, sides).map_err(|error| (at, error))?;
    }
    let instructions = at_work.first().map_or(0, |(executor, ..)| executor.launches());
    for i in 0..instructions {
        let start = Instant::now();
        for (at, (executor, sides, crossed)) in at_work.iter_mut().enumerate() {
            *crossed = executor.launch_next(i, *crossed, &values, sides).map_err(|error| (at, error))?;
        }
        let Some(observer) = observer.as_deref_mut() else { continue };
        for (at, (_, sides, _)) in at_work.iter().enumerate() {
            Executor::wait(sides).map_err(|error| (at, error))?;
        }
        let time = start.elapsed();
        if let Some((instruction, cost)) = at_work.first().and_then(|(first, ..)| first.cost_of(i, batch, &values)) {
            observer.completed(instruction, &cost, time);
        }
    }
    Ok(values)
}

/// The failure that the others follow from: not that somebody else did not come.
fn first_cause(mut failed: Vec<(usize, RuntimeError)>) -> Option<(usize, RuntimeError)> {
    let follows = |error: &RuntimeError| {
        let call = match error {
            RuntimeError::Hal(error) => error.call_error(),
            RuntimeError::Launch { source, .. } => source.call_error(),
            _ => None,
        };
        call.is_some_and(|call| [QHAL_ABORTED, QHAL_DEADLINE_EXCEEDED].contains(&call.code))
    };
    let at = failed.iter().position(|(_, error)| !follows(error)).unwrap_or(0);
    (at < failed.len()).then(|| failed.swap_remove(at))
}

/// Puts the columns of a result together that the ranks have; where each has all of them, the first rank's are taken.
fn read(
    ranks: &[Rank],
    key: ProgramKey,
    values: &[i64; 5],
    width: usize,
    out: &mut Vec<f32>,
) -> Result<(), RuntimeError> {
    let mut part = Vec::new();
    let mut first = 0;
    for (at, rank) in ranks.iter().enumerate() {
        let Some(executor) = rank.executors.get(&key) else { continue };
        let own = executor.program().result_width as usize;
        let blame = |error| rank.blame(at, ranks.len(), error);
        if own == width {
            return executor.read(values, &rank.sides, out).map_err(blame);
        }
        executor.read(values, &rank.sides, &mut part).map_err(blame)?;
        out.resize(part.len() / own.max(1) * width, 0.0);
        for (row, part) in out.chunks_exact_mut(width).zip(part.chunks_exact(own)) {
            row[first..first + own].copy_from_slice(part);
        }
        first += own;
    }
    Ok(())
}
