//! One part of a step: the model computes it, then each sequence takes its rows, of logits or of hidden states.
//!
//! While the model computes, a thread beside it finds out which tokens the grammars of the part allow next: that depends on
//! the tokens that are there already. Afterwards sequences choose their tokens on the threads of the compute pool, each by
//! itself, so the order in which they do so does not matter.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use qwen_runtime::{Batch, LogitRows, RuntimeError, StepResult};

use crate::constraint::ConstraintState;
use crate::engine::Engine;
use crate::load_meter::StepLoad;
use crate::queue::Waiting;
use crate::schedule::{Member, Part};
use crate::sequence::{Facts, Sequence};
use crate::{FinishReason, Output, Scratch};

/// Values of rows from which on choosing tokens is worth waking other threads for.
const WORTH_THREADS: usize = 1 << 16;

/// A sequence with its rows.
struct Job<'a> {
    sequence: &'a mut Sequence,
    member: Member,
    rows: Range<usize>,
    outputs: Vec<Output>,
    accepted: usize,
}

impl Engine {
    pub(crate) fn compute(&mut self, part: &Part, outputs: &mut Vec<Output>) {
        let start = Instant::now();
        match self.forward(part) {
            Ok(rows) => {
                if let Err(reason) = self.check_step(part, &rows, start.elapsed().as_secs_f64()) {
                    return self.distrust(&reason, outputs);
                }
                let start = Instant::now();
                self.choose(part, rows, outputs);
                self.stats.sample_seconds += start.elapsed().as_secs_f64();
            }
            Err(error) => {
                self.stats.device_errors += 1;
                for member in &part.members {
                    let sequence = &mut self.running[member.at];
                    outputs.push(sequence.ended(FinishReason::Device(error.to_string())));
                    sequence.is_ended = true;
                }
            }
        }
    }

    /// Computes the rows of a part, and says which are each member's.
    fn forward(&mut self, part: &Part) -> Result<Vec<Range<usize>>, RuntimeError> {
        let mut batch = Batch::new(self.loaded.model.block_size());
        let mut rows = Vec::with_capacity(part.members.len());
        let (mut load, mut with_draft) = (StepLoad::default(), Vec::new());
        for member in &part.members {
            let sequence = &self.running[member.at];
            let start = sequence.kv.len as usize;
            let tokens = &sequence.tokens[start..start + member.tokens];
            let wanted = if sequence.wants_every_row() || !sequence.draft.is_empty() {
                LogitRows::All
            } else if member.tokens == sequence.pending() && sequence.wants_last_row() {
                LogitRows::Last
            } else {
                LogitRows::None
            };
            let first = batch.rows();
            if sequence.draft.is_empty() {
                batch.push(&sequence.kv, tokens, wanted)?;
            } else {
                with_draft.clear();
                with_draft.extend_from_slice(tokens);
                with_draft.extend_from_slice(&sequence.draft);
                batch.push(&sequence.kv, &with_draft, wanted)?;
            }
            rows.push(first..batch.rows());
            let is_answer = sequence.is_generating();
            let tokens = (member.tokens + sequence.draft.len()) as u32;
            *(if is_answer { &mut load.decode_tokens } else { &mut load.prompt_tokens }) += tokens;
        }
        let mut masks: Vec<&mut ConstraintState> = Vec::new();
        let mut members = part.members.iter().zip(&rows).peekable();
        for (at, sequence) in self.running.iter_mut().enumerate() {
            let Some((_, rows)) = members.next_if(|(member, _)| member.at == at) else { continue };
            masks.extend(sequence.constraint.as_deref_mut().filter(|_| !rows.is_empty()));
        }
        let cost = if self.meter.wants_cost() {
            let total = |costs: Vec<qwen_runtime::Cost>| {
                costs.into_iter().fold(qwen_runtime::Cost::default(), |mut sum, cost| {
                    sum += cost;
                    sum
                })
            };
            self.loaded.model.step_cost(part.result, part.phase, &batch).ok().map(total)
        } else {
            None
        };
        let start = Instant::now();
        let (model, rows_out) = (&mut self.loaded.model, &mut self.rows);
        let result = if masks.is_empty() {
            model.compute(part.result, part.phase, &batch, rows_out)
        } else {
            std::thread::scope(|scope| {
                scope.spawn(|| masks.iter_mut().for_each(|mask| mask.prepare()));
                model.compute(part.result, part.phase, &batch, rows_out)
            })
        };
        let seconds = start.elapsed().as_secs_f64();
        for mask in masks {
            self.stats.mask_seconds += mask.take_mask_time().as_secs_f64();
        }
        result?;
        self.stats.forward_seconds += seconds;
        self.stats.count_step(batch.tokens() as u32, batch.sequences() as u32);
        self.meter.observe(StepLoad { seconds, ..load }, cost);
        Ok(rows)
    }

    /// Lets each sequence take its rows, on as many threads as there are.
    fn choose(&mut self, part: &Part, rows: Vec<Range<usize>>, outputs: &mut Vec<Output>) {
        let mut jobs = Vec::with_capacity(part.members.len());
        let mut members = part.members.iter().zip(rows).peekable();
        for (at, sequence) in self.running.iter_mut().enumerate() {
            let Some((member, rows)) = members.next_if(|(member, _)| member.at == at) else { continue };
            let job = Job { sequence, member: *member, rows, outputs: Vec::new(), accepted: 0 };
            jobs.push(Mutex::new(job));
        }
        let width = self.loaded.model.width(part.result).max(1);
        let (values, scratch, facts) = (&self.rows, &self.scratch, &*self.preparer.facts);
        let used = match part.result {
            StepResult::Logits => width.min(self.preparer.limits.vocab_size as usize),
            StepResult::Hidden => width,
        };
        let row = |i: usize| &values[i * width..i * width + used];
        let run = |i: usize| {
            let mut own = scratch.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
            jobs[i].lock().unwrap_or_else(PoisonError::into_inner).run(&row, facts, &mut own);
            scratch.lock().unwrap_or_else(PoisonError::into_inner).push(own);
        };
        match &self.options.pool {
            Some(pool) if jobs.len() > 1 && values.len() >= WORTH_THREADS => pool.run(jobs.len(), &run),
            _ => (0..jobs.len()).for_each(run),
        }
        let speculation = self.options.speculation.unwrap_or_default();
        for job in jobs {
            let Job { sequence, member, outputs: own, accepted, .. } =
                job.into_inner().unwrap_or_else(PoisonError::into_inner);
            let drafted = sequence.draft.len();
            self.stats.drafts += u64::from(drafted > 0);
            self.stats.draft_tokens += drafted as u64;
            self.stats.accepted_tokens += accepted as u64;
            sequence.drafter.learn(&speculation, drafted, accepted);
            sequence.draft.clear();
            self.waiting.charge(sequence.client(), (member.tokens + drafted) as u64);
            self.stats.corrupted +=
                own.iter().filter(|output| matches!(output.finish, Some(FinishReason::Logits(_)))).count() as u64;
            outputs.extend(own);
        }
        let prompts_only = self.loaded.model.phase_matters();
        for member in &part.members {
            let sequence = &mut self.running[member.at];
            if let Err(error) = self.blocks.share(&mut self.loaded.model, sequence, prompts_only) {
                tracing::error!(%error, "blocks for the prefix cache");
            }
        }
    }
}

impl Job<'_> {
    fn run<'a>(&mut self, row: &impl Fn(usize) -> &'a [f32], facts: &Facts, scratch: &mut Scratch) {
        let sequence = &mut *self.sequence;
        let start = sequence.kv.len as usize;
        let is_complete = self.member.tokens == sequence.pending();
        if sequence.wants_every_row() || (is_complete && sequence.embeds()) {
            // Of a prompt that is pooled by its last token, this is the one row.
            let first = start + self.member.tokens - self.rows.len();
            sequence.take_prompt_rows(first, self.rows.clone().map(row));
        }
        sequence.kv.len += self.member.tokens as u32;
        if !is_complete {
            return;
        }
        if sequence.embeds() {
            self.outputs.push(sequence.embedded());
            sequence.is_ended = true;
            return;
        }
        if sequence.ends_with_prompt() {
            self.outputs.push(sequence.ended(FinishReason::Length));
            sequence.is_ended = true;
            return;
        }
        // The rows of drafts, if there are any, follow that of the last token.
        let first = self.rows.end - 1 - sequence.draft.len();
        for i in 0..=sequence.draft.len() {
            let output = sequence.advance(row(first + i), facts, scratch);
            let (token, has_ended) = (output.token, output.finish.is_some());
            self.outputs.push(output);
            if has_ended {
                sequence.is_ended = true;
                return;
            }
            if i == sequence.draft.len() || token != Some(sequence.draft[i]) {
                return;
            }
            sequence.kv.len += 1;
            self.accepted += 1;
        }
    }
}
