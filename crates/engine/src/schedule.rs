//! Which sequences take part in a step, and with how many tokens.
//!
//! Admission is optimistic: a request starts when its present tokens fit beside what the running ones have yet to compute,
//! with one block to spare for each of them; what answers grow to is not set aside. When blocks run out nevertheless, the
//! sequence that is last in order (worst priority, then latest arrival) gives its blocks away and waits again, with all its
//! tokens: it is computed anew, from what the prefix cache still has of it. The first in order never gives way, and no
//! request is accepted that does not fit an empty cache, so there is always progress and no sequence runs out of memory.
//!
//! A step holds, within its limit of tokens: each generating sequence's newest token; drafts; then pending tokens of prompts,
//! as many as the load allows beside generating sequences, in order of priority and service. A sequence whose next block
//! another one computes in the same step waits for it and takes it over.

use std::collections::HashSet;
use std::time::Instant;

use qwen_ir::Phase;
use qwen_runtime::StepResult;

use crate::constraint::GRAMMAR_MEMORY;
use crate::engine::Engine;
use crate::queue::Waiting;
use crate::sequence::Sequence;
use crate::{FinishReason, Output};

/// Rows of logits that a step may have in any case, and beside one for each sequence: log-probabilities of prompts.
const MOST_ROWS: usize = 64;
const LEAST_PROMPT_ROWS: usize = 16;

/// Rows of logits that a step has at most, guesses aside.
pub(crate) const fn most_rows(max_sequences: usize) -> usize {
    let least = max_sequences + LEAST_PROMPT_ROWS;
    if least > MOST_ROWS { least } else { MOST_ROWS }
}

/// A sequence's part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Member {
    /// Index among the running ones.
    pub(crate) at: usize,
    /// Pending tokens that are computed; drafts come on top.
    pub(crate) tokens: usize,
}

/// What is computed together.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) phase: Phase,
    pub(crate) result: StepResult,
    pub(crate) members: Vec<Member>,
}

/// Place in the order in which sequences keep their blocks.
fn order(sequence: &Sequence) -> (i32, u64) {
    (sequence.priority, sequence.id.0)
}

impl Engine {
    /// Starts waiting requests while there is room for them.
    pub(crate) fn admit(&mut self) {
        let max_sequences = self.loaded.model.options().max_sequences as usize;
        loop {
            let Some(next) = self.waiting.peek() else { return };
            let fits = self.running.len() < max_sequences && self.fits(next);
            if !fits && !self.running.is_empty() {
                // A request of better priority takes the place of the last one.
                let is_better = self.running.last().is_some_and(|last| next.priority < last.priority);
                if !is_better {
                    return;
                }
                self.preempt(self.running.len() - 1);
                self.sweep();
                continue;
            }
            let Some(mut sequence) = self.waiting.pop() else { return };
            let found = self.blocks.take_over(&mut sequence);
            if sequence.started.is_none() {
                sequence.started = Some(Instant::now());
                sequence.cached_tokens = found.min(sequence.prompt_len);
                self.stats.prompt_tokens += sequence.prompt_len as u64;
                self.stats.prefix_query_tokens += sequence.prompt_len as u64;
                self.stats.prefix_hit_tokens += sequence.cached_tokens as u64;
            }
            let at = self.running.partition_point(|other| order(other) < order(&sequence));
            self.running.insert(at, sequence);
        }
    }

    fn fits(&self, next: &Sequence) -> bool {
        let of = |sequence: &Sequence| self.blocks.for_tokens(sequence.tokens.len() + 1);
        let owed: usize = self.running.iter().map(|running| of(running).saturating_sub(running.kv.blocks.len())).sum();
        let (found, idle) = self.blocks.find(next);
        let wanted = of(next) - found;
        // What it takes over is not free for others any more.
        let free = self.blocks.free(&self.loaded.model).saturating_sub(idle);
        let grammars = self.running.iter().filter(|running| running.constraint.is_some()).count() as u64;
        let has_grammar_room =
            next.constraint.is_none() || (grammars + 1) * GRAMMAR_MEMORY <= self.options.grammar_memory;
        has_grammar_room && owed + wanted + self.running.len() <= free
    }

    /// Takes its blocks from a running sequence; [`Engine::sweep`] moves it to the waiting ones.
    fn preempt(&mut self, at: usize) {
        let sequence = &mut self.running[at];
        sequence.preemptions += 1;
        sequence.is_out = true;
        sequence.draft.clear();
        self.stats.preemptions += 1;
        if let Err(error) = self.blocks.release(&mut self.loaded.model, sequence) {
            tracing::error!(%error, "blocks of a sequence that is preempted");
        }
    }

    /// Moves what was preempted to the waiting ones.
    pub(crate) fn sweep(&mut self) {
        if self.running.iter().all(|sequence| !sequence.is_out) {
            return;
        }
        let (out, kept) = std::mem::take(&mut self.running).into_iter().partition(|sequence| sequence.is_out);
        self.running = kept;
        let out: Vec<Box<Sequence>> = out;
        for mut sequence in out {
            sequence.is_out = false;
            self.waiting.push(sequence);
        }
    }

    /// Room for tokens of a running sequence; takes it from those behind it, or from itself, if there is none. False if the
    /// sequence is out.
    fn make_room(&mut self, at: usize, tokens: usize, outputs: &mut Vec<Output>) -> bool {
        loop {
            let sequence = &mut self.running[at];
            if sequence.is_out {
                return false;
            }
            let error = match self.blocks.reserve(&mut self.loaded.model, &mut sequence.kv, tokens) {
                Ok(true) => return true,
                Ok(false) => None,
                Err(error) => Some(error),
            };
            if error.is_none() && !sequence.draft.is_empty() {
                // Drafts are the first to go.
                let draft = std::mem::take(&mut sequence.draft);
                return self.make_room(at, tokens - draft.len(), outputs);
            }
            let holds = |sequence: &Sequence| !sequence.is_out && !sequence.kv.blocks.is_empty();
            match (error, self.running.iter().rposition(|other| holds(other))) {
                (None, Some(last)) if last > at => self.preempt(last),
                (None, first)
                    if first.is_some_and(|first| first < at) || self.running[..at].iter().any(|s| holds(s)) =>
                {
                    self.preempt(at);
                    return false;
                }
                // Alone and without room: somebody else holds blocks of this cache.
                (error, _) => {
                    self.stats.device_errors += u64::from(error.is_some());
                    let wanted = self.blocks.for_tokens(tokens) as u32;
                    let (free, limit) = (self.loaded.model.free_blocks(), self.loaded.model.cache_blocks());
                    let error = error.unwrap_or(qwen_runtime::RuntimeError::KvExhausted { wanted, free, limit });
                    let sequence = &mut self.running[at];
                    outputs.push(sequence.ended(FinishReason::Device(error.to_string())));
                    sequence.is_ended = true;
                    return false;
                }
            }
        }
    }

    /// Chooses what the next step computes, and makes room for it.
    pub(crate) fn plan(&mut self, outputs: &mut Vec<Output>) -> Vec<Part> {
        let options = self.loaded.model.options();
        let (max_sequences, most) = (options.max_sequences as usize, options.max_step_tokens as usize);
        let is_split = self.loaded.model.phase_matters();
        let generating: Vec<usize> = (0..self.running.len()).filter(|at| self.running[*at].is_generating()).collect();
        self.draft(&generating, if is_split { max_sequences } else { most });
        let mut decoding = Vec::new();
        for at in generating {
            let tokens = 1 + self.running[at].draft.len();
            if self.make_room(at, tokens, outputs) {
                decoding.push(Member { at, tokens: 1 });
            }
        }
        let drafted: usize = decoding.iter().map(|member| self.running[member.at].draft.len()).sum();
        let decode_tokens = decoding.len() + drafted;
        if is_split {
            self.recompute_answers(&mut decoding, max_sequences.saturating_sub(decode_tokens), outputs);
        }
        let left = if is_split { most } else { most.saturating_sub(decode_tokens) };
        let pending = self.waiting.len() + self.running.len() - decoding.len();
        let waiting = pending as f64 / decoding.len().max(1) as f64;
        let budget = self.meter.prompt_budget(decode_tokens as u32, waiting, left as u32) as usize;
        if budget > 0 {
            self.stats.prefill_budget = budget as u32;
        }
        let mut prompts = self.prompts(budget, is_split, outputs);
        let is_in = |member: &Member| !self.running[member.at].is_out && !self.running[member.at].is_ended;
        decoding.retain(is_in);
        prompts.retain(is_in);
        // A program gives one result: texts to embed are computed beside the others, not together with them.
        let (embedding, prompts): (Vec<_>, Vec<_>) =
            prompts.into_iter().partition(|member| self.running[member.at].embeds());
        let part = |phase, result, mut members: Vec<Member>| {
            members.sort_unstable_by_key(|member| member.at);
            Part { phase, result, members }
        };
        let mut parts = if is_split {
            vec![
                part(Phase::Decode, StepResult::Logits, decoding),
                part(Phase::Prefill, StepResult::Logits, prompts),
                part(Phase::Prefill, StepResult::Hidden, embedding),
            ]
        } else {
            decoding.extend(prompts);
            vec![part(Phase::Mixed, StepResult::Logits, decoding), part(Phase::Mixed, StepResult::Hidden, embedding)]
        };
        parts.retain(|part| !part.members.is_empty());
        parts
    }

    /// Guesses for generating sequences, within what a step may hold of them.
    fn draft(&mut self, generating: &[usize], most: usize) {
        let Some(options) = self.options.speculation else { return };
        let mut left = (options.max_step_tokens as usize).min(most).saturating_sub(generating.len());
        for (done, at) in generating.iter().enumerate() {
            let sequence = &mut self.running[*at];
            // Each gets its share of what is left; its last token needs no guess after it.
            let share = (left / (generating.len() - done)).min(sequence.room().saturating_sub(1));
            let Sequence { drafter, draft, tokens, constraint, .. } = &mut **sequence;
            draft.clear();
            draft.extend_from_slice(drafter.draft(&options, tokens, share));
            if let Some(constraint) = constraint.as_mut().filter(|_| !draft.is_empty()) {
                draft.truncate(constraint.possible(draft));
            }
            left -= draft.len();
        }
    }

    /// Answers that were preempted, by the form that answers are computed by.
    fn recompute_answers(&mut self, decoding: &mut Vec<Member>, mut left: usize, outputs: &mut Vec<Output>) {
        for at in 0..self.running.len() {
            let sequence = &self.running[at];
            if sequence.is_out || sequence.is_ended || !sequence.is_decoding() || sequence.is_generating() {
                continue;
            }
            let tokens = sequence.pending().min(left);
            if tokens > 0 && self.make_room(at, tokens, outputs) {
                left -= tokens;
                decoding.push(Member { at, tokens });
            }
        }
    }

    fn prompts(&mut self, mut budget: usize, is_split: bool, outputs: &mut Vec<Output>) -> Vec<Member> {
        let is_prompt = |sequence: &Sequence| {
            let is_pending = if is_split { !sequence.is_decoding() } else { !sequence.is_generating() };
            is_pending && !sequence.is_out && !sequence.is_ended
        };
        let mut turns: Vec<usize> = (0..self.running.len()).filter(|at| is_prompt(&self.running[*at])).collect();
        turns.sort_by_key(|at| {
            let sequence = &self.running[*at];
            (sequence.priority, self.waiting.served(sequence.client()), sequence.id)
        });
        // Every other sequence may take a row.
        let others = self.running.len().saturating_sub(1);
        let mut rows = most_rows(self.loaded.model.options().max_sequences as usize).saturating_sub(others);
        let (mut members, mut computed) = (Vec::new(), HashSet::new());
        for sequence in turns.iter().map(|at| &self.running[*at]) {
            if let Some((place, block, false)) = self.blocks.current(sequence) {
                computed.insert((place, block.to_vec()));
            }
        }
        for at in turns {
            let sequence = &mut self.running[at];
            if budget == 0 || sequence.is_out {
                continue;
            }
            if !sequence.is_decoding() {
                // Another one may have computed what comes next since the last step.
                self.blocks.take_over(sequence);
            }
            let end = if is_split { sequence.prompt_len } else { sequence.tokens.len() };
            let mut tokens = (end - sequence.kv.len as usize).min(budget);
            let takes_rows = sequence.wants_prompt_logprobs();
            if takes_rows {
                tokens = tokens.min(rows);
            }
            // A block that another one is at is worth waiting for.
            if let Some((place, block, true)) = self.blocks.current(sequence)
                && !computed.insert((place, block.to_vec()))
            {
                continue;
            }
            if tokens > 0 && self.make_room(at, tokens, outputs) {
                budget -= tokens;
                rows -= if takes_rows { tokens } else { 0 };
                members.push(Member { at, tokens });
            }
        }
        members
    }
}
