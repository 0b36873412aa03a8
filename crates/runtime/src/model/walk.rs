//! A step of a group.
//!
//! A step goes through the stages one after the other. It is cut into micro-batches where they are large enough, and then different stages
//! compute different ones at the same time, in waves: each micro-batch goes through the stages in order, each stage takes the micro-batches
//! in order, so that a later part of a prompt finds the cache that an earlier one has filled. What a stage leaves for the next goes through
//! host memory between two waves. The cut is not seen in a result, as that of a prompt into chunks is not.
//!
//! Within a stage each instruction is enqueued to all ranks before the next one, so that no rank's queue is full of work behind an
//! exchange that another rank's part has not been enqueued for.

use std::time::Instant;

use qwen_hal::abi::{QHAL_ABORTED, QHAL_DEADLINE_EXCEEDED};

use super::ProgramKey;
use super::rank::Rank;
use crate::RuntimeError;
use crate::batch::Batch;
use crate::cost::StepObserver;
use crate::executor::{DeviceSide, Executor, Failed};
use crate::placement::MAIN;

/// A failure, and the rank that it happened to.
type OfRank = (usize, Failed);

/// Computes a step; `out` is [rows, width] afterwards. A micro-batch has so many tokens at least.
pub(super) fn run(
    ranks: &mut [Rank],
    key: ProgramKey,
    batch: &Batch,
    micro_batch_tokens: u32,
    width: usize,
    out: &mut Vec<f32>,
    observer: Option<&mut dyn StepObserver>,
) -> Result<(), RuntimeError> {
    let stages = ranks.first().and_then(|rank| rank.executors.get(&key)).map_or(1, Executor::stages);
    // The one that helps out has one place for the values of all stages. Who observes wants the cost of whole steps.
    let is_whole = observer.is_some() || ranks.iter().any(|rank| rank.sides.len() > stages);
    let most = batch.tokens() / micro_batch_tokens.max(1) as usize;
    let cut = if is_whole { Vec::new() } else { batch.parts(most.min(stages)) };
    let parts = if cut.is_empty() { std::slice::from_ref(batch) } else { cut.as_slice() };
    out.resize(batch.rows() * width, 0.0);
    let walked = Walk::new(ranks, key, parts).and_then(|mut walk| walk.run(stages, width, out, observer));
    let Err(failed) = walked else { return Ok(()) };
    // Whatever was enqueued ends, well or not, before anything else is asked of the devices.
    let mut all = vec![failed];
    for (at, rank) in ranks.iter().enumerate() {
        for (side, on) in rank.sides.iter().enumerate() {
            all.extend(on.stream.wait().err().map(|error| (at, (side, error.into()))));
        }
    }
    let (at, (side, error)) = first_cause(all);
    Err(ranks[at].blame(side, ranks.len(), stages, error))
}

/// Which stage computes which part at the same time, wave by wave; later stages come first, as their part is ahead.
fn waves(stages: usize, parts: usize) -> impl Iterator<Item = Vec<(usize, usize)>> {
    (0..stages + parts.saturating_sub(1)).map(move |wave| {
        let part = |stage: usize| wave.checked_sub(stage).filter(|part| *part < parts);
        (0..stages).rev().filter_map(|stage| Some((stage, part(stage)?))).collect()
    })
}

/// A step on its way.
struct Walk<'a> {
    /// By rank.
    work: Vec<(&'a mut Executor, &'a mut Vec<DeviceSide>)>,
    parts: &'a [Batch],
    /// By part, the values of the symbols.
    values: Vec<[i64; 5]>,
    /// Columns of one rank's result.
    columns: Vec<f32>,
}

impl<'a> Walk<'a> {
    fn new(ranks: &'a mut [Rank], key: ProgramKey, parts: &'a [Batch]) -> Result<Self, OfRank> {
        let mut walk = Self { work: Vec::with_capacity(ranks.len()), parts, values: Vec::new(), columns: Vec::new() };
        for (at, rank) in ranks.iter_mut().enumerate() {
            let Rank { sides, executors, .. } = rank;
            let missing =
                || RuntimeError::Step { what: "program", expected: "one of this size".into(), found: "none".into() };
            let executor = executors.get_mut(&key).ok_or_else(|| (at, (MAIN, missing())))?;
            walk.values = executor.expect(parts, sides).map_err(|failed| (at, failed))?;
            walk.work.push((executor, sides));
        }
        Ok(walk)
    }

    fn run(
        &mut self,
        stages: usize,
        width: usize,
        out: &mut [f32],
        mut observer: Option<&mut dyn StepObserver>,
    ) -> Result<(), OfRank> {
        let mut rest = out;
        for wave in waves(stages, self.parts.len()) {
            for (stage, part) in &wave {
                self.launch(*stage, *part, &mut observer)?;
            }
            self.wait()?;
            for (stage, part) in wave {
                for (at, (executor, sides)) in self.work.iter_mut().enumerate() {
                    executor.leave(stage, &self.values[part], sides).map_err(|failed| (at, failed))?;
                }
                if stage + 1 == stages {
                    let (rows, others) = std::mem::take(&mut rest).split_at_mut(self.parts[part].rows() * width);
                    self.read(width, rows)?;
                    rest = others;
                }
            }
        }
        Ok(())
    }

    /// Enqueues a stage's instructions.
    fn launch(
        &mut self,
        stage: usize,
        part: usize,
        observer: &mut Option<&mut dyn StepObserver>,
    ) -> Result<(), OfRank> {
        let (batch, values) = (&self.parts[part], self.values[part]);
        for (at, (executor, sides)) in self.work.iter_mut().enumerate() {
            executor.enter(stage, batch, &values, sides).map_err(|failed| (at, failed))?;
        }
        for i in self.work.first().map_or(0..0, |(executor, _)| executor.instructions(stage)) {
            let start = Instant::now();
            for (at, (executor, sides)) in self.work.iter_mut().enumerate() {
                executor.launch_next(i, &values, sides).map_err(|failed| (at, failed))?;
            }
            let Some(observer) = observer.as_deref_mut() else { continue };
            self.wait()?;
            let time = start.elapsed();
            if let Some((instruction, cost)) =
                self.work.first().and_then(|(executor, _)| executor.cost_of(i, batch, &values))
            {
                observer.completed(instruction, &cost, time);
            }
        }
        Ok(())
    }

    /// Waits for everything that was enqueued.
    fn wait(&self) -> Result<(), OfRank> {
        let sides = self
            .work
            .iter()
            .enumerate()
            .flat_map(|(at, (_, sides))| sides.iter().enumerate().map(move |(side, on)| (at, side, on)));
        for (at, side, on) in sides {
            on.stream.wait().map_err(|error| (at, (side, error.into())))?;
        }
        Ok(())
    }

    /// Puts the columns of a result together that the ranks have; where each has all of them, the first rank's are taken.
    fn read(&mut self, width: usize, out: &mut [f32]) -> Result<(), OfRank> {
        let rows = out.len() / width.max(1);
        let mut first = 0;
        for (at, (executor, sides)) in self.work.iter().enumerate() {
            let blame = |error| (at, (executor.result_side(), error));
            let own = executor.program().result_width as usize;
            if own == width {
                return executor.read(sides, out).map_err(blame);
            }
            self.columns.resize(rows * own, 0.0);
            executor.read(sides, &mut self.columns).map_err(blame)?;
            for (row, part) in out.chunks_exact_mut(width.max(1)).zip(self.columns.chunks_exact(own.max(1))) {
                row[first..first + own].copy_from_slice(part);
            }
            first += own;
        }
        Ok(())
    }
}

/// The failure that the others follow from. There is one at least.
fn first_cause(mut failed: Vec<OfRank>) -> OfRank {
    let call = |error: &RuntimeError| match error {
        RuntimeError::Hal(error) => error.call_error().map(|call| call.code),
        RuntimeError::Launch { source, .. } => source.call_error().map(|call| call.code),
        _ => None,
    };
    // That somebody else has left or did not come follows from something; a time that ran out may be what it follows from.
    let follows = |(_, (_, error)): &OfRank| match call(error) {
        Some(QHAL_ABORTED) => 2,
        Some(QHAL_DEADLINE_EXCEEDED) => 1,
        _ => 0,
    };
    let at = failed.iter().enumerate().min_by_key(|(_, failed)| follows(failed)).map_or(0, |(at, _)| at);
    failed.swap_remove(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_work_at_the_same_time_and_take_parts_in_order() {
        let told = |stages, parts| waves(stages, parts).collect::<Vec<_>>();
        assert_eq!(told(1, 1), [vec![(0, 0)]]);
        assert_eq!(told(3, 1), [vec![(0, 0)], vec![(1, 0)], vec![(2, 0)]]);
        assert_eq!(told(2, 2), [vec![(0, 0)], vec![(1, 0), (0, 1)], vec![(1, 1)]]);
        for (stages, parts) in [(2, 5), (4, 3), (5, 5)] {
            let waves = told(stages, parts);
            let when = |stage, part| waves.iter().position(|wave| wave.contains(&(stage, part))).unwrap();
            for (stage, part) in (0..stages).flat_map(|stage| (0..parts).map(move |part| (stage, part))) {
                assert!(stage == 0 || when(stage - 1, part) < when(stage, part));
                assert!(part == 0 || when(stage, part - 1) < when(stage, part));
            }
            assert_eq!(waves.iter().map(Vec::len).sum::<usize>(), stages * parts);
            assert_eq!(waves.len(), stages + parts - 1);
        }
    }
}
