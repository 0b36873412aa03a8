//! Requests in flight, step by step.
//!
//! A step: end what was cancelled or is late, start what fits ([`crate::schedule`]), compute, choose tokens
//! ([`crate::compute`]), hand complete blocks to the prefix cache. Waiting requests are in [`crate::queue`], running ones in
//! order of who keeps their blocks the longest. Invariant: every request that was taken gets exactly one output with a finish
//! reason.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use qwen_hal::ComputePool;
use qwen_ir::Phase;
use qwen_models::tokenizer::Tokenizer;
use qwen_runtime::{Batch, LogitRows, Model, RuntimeError, SequenceKv, StepResult};

use crate::blocks::Blocks;
use crate::guard::{Guard, GuardOptions};
use crate::handle::About;
use crate::kv_map::{KvMap, KvState};
use crate::load_meter::{DeviceRates, LoadMeter};
use crate::prepare::{Prepared, Preparer};
use crate::queue::{Queue, Waiting};
use crate::schedule::most_rows;
use crate::sequence::{Facts, Sequence};
use crate::speculate::Speculation;
use crate::stats::{EngineStats, PoolStats};
use crate::{EngineError, FinishReason, Limits, LoadedModel, Output, Request, RequestId, Scratch};

/// Between two looks at the pools of memory while there is work.
const SURVEY_INTERVAL: Duration = Duration::from_secs(1);

/// Choices of an engine.
#[derive(Clone)]
pub struct EngineOptions {
    /// Keep blocks of prompts and answers for requests that begin alike.
    pub prefix_cache: bool,
    /// Guess tokens by prompt lookup; the answers are the same.
    pub speculation: Option<Speculation>,
    /// Longest time between two tokens of an answer while prompts are computed; by default twice what it takes without them.
    pub tpot_target: Option<Duration>,
    /// What the device does at most, for its load; by default the best that steps reached.
    pub rates: Option<DeviceRates>,
    /// Bytes for grammars of running requests; those beyond wait.
    pub grammar_memory: u64,
    /// Threads to choose tokens on; by default the engine's own.
    pub pool: Option<Arc<dyn ComputePool>>,
    /// Check now and then what the device computes.
    pub guard: Option<GuardOptions>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            prefix_cache: true,
            speculation: None,
            tpot_target: None,
            rates: None,
            grammar_memory: 1 << 30,
            pool: None,
            guard: None,
        }
    }
}

impl std::fmt::Debug for EngineOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineOptions")
            .field("prefix_cache", &self.prefix_cache)
            .field("speculation", &self.speculation)
            .field("tpot_target", &self.tpot_target)
            .field("rates", &self.rates)
            .field("guard", &self.guard)
            .finish_non_exhaustive()
    }
}

/// Generates text for several requests at once.
pub struct Engine {
    pub(crate) loaded: LoadedModel,
    pub(crate) options: EngineOptions,
    pub(crate) preparer: Preparer,
    pub(crate) waiting: Queue<Box<Sequence>>,
    /// In order of priority, then arrival.
    #[expect(clippy::vec_box, reason = "sequences are large and move between lists")]
    pub(crate) running: Vec<Box<Sequence>>,
    pub(crate) blocks: Blocks,
    pub(crate) meter: LoadMeter,
    pub(crate) guard: Guard,
    /// Of the part that was computed last.
    pub(crate) rows: Vec<f32>,
    pub(crate) scratch: Mutex<Vec<Scratch>>,
    pub(crate) stats: EngineStats,
    cancelled: HashSet<RequestId>,
    /// When the pools of memory were looked at.
    surveyed: Option<Instant>,
    /// Whether a waiting request has a deadline, or did.
    watches_deadlines: bool,
    next_id: u64,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("model", &self.loaded.model)
            .field("waiting", &self.waiting.len())
            .field("running", &self.running.len())
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// An engine without requests and with the default choices.
    #[must_use]
    pub fn new(loaded: LoadedModel) -> Self {
        Self::with_options(loaded, EngineOptions::default())
    }

    /// An engine without requests.
    #[must_use]
    pub fn with_options(loaded: LoadedModel, options: EngineOptions) -> Self {
        let mut eos: Vec<u32> = loaded.config.eos_token_ids.clone();
        eos.extend(loaded.tokenizer.iter().flat_map(|tokenizer| tokenizer.eos_ids().iter().copied()));
        eos.sort_unstable();
        eos.dedup();
        let limits = limits(&loaded);
        eos.retain(|id| *id < limits.vocab_size);
        let facts = Facts { tokenizer: loaded.tokenizer.clone(), eos };
        let mut engine = Self {
            preparer: Preparer::new(limits, Arc::new(facts)),
            waiting: Queue::new(),
            running: Vec::new(),
            blocks: Blocks::new(limits.block_size, options.prefix_cache),
            meter: LoadMeter::new(options.rates, options.tpot_target),
            guard: Guard::new(options.guard),
            rows: Vec::new(),
            scratch: Mutex::default(),
            stats: EngineStats::default(),
            cancelled: HashSet::new(),
            surveyed: None,
            watches_deadlines: false,
            next_id: 1,
            options,
            loaded,
        };
        engine.survey(Instant::now());
        engine
    }

    /// Config, tokenizer, template, memory.
    #[must_use]
    pub const fn loaded(&self) -> &LoadedModel {
        &self.loaded
    }
    /// Text to ids and back.
    #[must_use]
    pub const fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        self.loaded.tokenizer.as_ref()
    }
    /// Tokens that can be chosen: those of the model that the tokenizer knows too.
    #[must_use]
    pub const fn vocab_size(&self) -> usize {
        self.preparer.limits.vocab_size as usize
    }
    /// What requests can ask for.
    #[must_use]
    pub const fn limits(&self) -> Limits {
        self.preparer.limits
    }
    /// Checks requests and makes them ready, on any thread.
    #[must_use]
    pub fn preparer(&self) -> Preparer {
        self.preparer.clone()
    }
    /// Whether a request waits or runs.
    #[must_use]
    pub const fn has_work(&self) -> bool {
        self.waiting.len() > 0 || !self.running.is_empty()
    }

    /// Config, tokenizer, template and limits, for an engine that moves to another thread; it gives its template away.
    pub(crate) fn about(&mut self) -> About {
        About {
            config: self.loaded.config.clone(),
            info: self.loaded.info.clone(),
            tokenizer: self.loaded.tokenizer.clone(),
            chat_template: self.loaded.chat_template.take().map(Arc::new),
            limits: self.limits(),
        }
    }

    /// Figures, as of the last step.
    #[must_use]
    pub fn stats(&self) -> EngineStats {
        let model = &self.loaded.model;
        let cached = self.blocks.cached();
        EngineStats {
            waiting: self.waiting.len(),
            running: self.running.len(),
            max_sequences: model.options().max_sequences as usize,
            max_step_tokens: model.options().max_step_tokens as usize,
            max_step_rows: most_rows(model.options().max_sequences as usize),
            block_size: model.block_size(),
            blocks_total: model.cache_blocks(),
            blocks_used: model.cache_blocks() - model.free_blocks() - cached,
            blocks_cached: cached,
            compute_utilisation: self.meter.compute_utilisation(),
            bandwidth_utilisation: self.meter.bandwidth_utilisation(),
            hli: self.meter.hli(),
            ..self.stats
        }
    }

    /// Which blocks of the KV cache are held, kept, free; looks at each of them.
    #[must_use]
    pub fn kv_map(&self) -> KvMap {
        self.blocks.map(&self.loaded.model)
    }

    /// Takes a request.
    ///
    /// # Errors
    /// If a parameter or token is out of range, its grammar is refused, or the request could never be computed.
    pub fn submit(&mut self, request: Request) -> Result<RequestId, EngineError> {
        let prepared = self.preparer.prepare(request)?;
        let id = RequestId(self.next_id);
        self.enqueue(prepared, id);
        Ok(id)
    }

    /// Takes a request that was prepared for this engine, under an id that no request of it has.
    pub(crate) fn enqueue(&mut self, prepared: Prepared, id: RequestId) {
        let mut sequence = prepared.sequence;
        self.next_id = self.next_id.max(id.0 + 1);
        sequence.id = id;
        self.watches_deadlines |= sequence.deadline.is_some();
        self.waiting.open(sequence.client());
        self.waiting.push(sequence);
    }

    /// Ends a request at the next step. Returns whether it was in flight.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        let is_there = self.running.iter().any(|sequence| sequence.id == id) || self.waiting.any(|s| s.id == id);
        if is_there {
            self.cancelled.insert(id);
        }
        is_there
    }

    /// Ends every request at the next step.
    pub fn cancel_all(&mut self) {
        self.cancelled.extend(self.running.iter().map(|sequence| sequence.id));
        self.waiting.each(|sequence| {
            self.cancelled.insert(sequence.id);
        });
    }

    /// Forgets what the prefix cache keeps for nobody.
    ///
    /// # Errors
    /// If the pool of blocks is damaged.
    pub fn clear_prefix_cache(&mut self) -> Result<(), EngineError> {
        Ok(self.blocks.clear(&mut self.loaded.model)?)
    }

    /// Computes one step. Outputs come in order of arrival of their requests, those of one request in order of its tokens. If
    /// the device fails, every request of the step ends with [`FinishReason::Device`]; if the guard finds it wrong, every request.
    pub fn step(&mut self) -> Vec<Output> {
        let begin = Instant::now();
        let mut outputs = Vec::new();
        self.drop_ended(begin, &mut outputs);
        self.admit();
        let parts = self.plan(&mut outputs);
        self.stats.plan_seconds += begin.elapsed().as_secs_f64();
        for part in parts {
            if !self.guard.is_tainted() {
                self.compute(&part, &mut outputs);
            }
        }
        self.retire();
        self.sweep();
        self.forget_tainted();
        // Stable: the tokens of one request stay in order.
        outputs.sort_by_key(|output| output.id);
        for output in &outputs {
            self.stats.generated_tokens += u64::from(output.token.is_some());
            if let Some(reason) = &output.finish {
                self.stats.count_finish(reason);
            }
        }
        self.survey(begin);
        self.stats.last_step_seconds = begin.elapsed().as_secs_f64();
        self.stats.step_seconds += self.stats.last_step_seconds;
        outputs
    }

    /// Looks at the pools of memory, if that is due: it looks at every block.
    fn survey(&mut self, now: Instant) {
        let is_due = |last: Instant| now.saturating_duration_since(last) >= SURVEY_INTERVAL;
        if self.has_work() && !self.surveyed.is_none_or(is_due) {
            return;
        }
        self.surveyed = Some(now);
        let (memory, map) = (self.loaded.model.memory(), self.kv_map());
        let block = self.loaded.model.block_bytes();
        self.stats.memory = PoolStats {
            weights: memory.weights_packed + memory.weights_owned,
            activations: memory.arenas.iter().sum(),
            step_buffers: memory.step_buffers,
            kv_backed: memory.kv_committed,
            kv_free: block * u64::from(map.count(KvState::Free)),
            kv_largest_free: block * u64::from(map.largest_free_run()),
        };
    }

    /// Ends what was cancelled or is late.
    fn drop_ended(&mut self, now: Instant, outputs: &mut Vec<Output>) {
        if self.cancelled.is_empty() && !self.watches_deadlines {
            return;
        }
        let cancelled = std::mem::take(&mut self.cancelled);
        let reason = |sequence: &Sequence| match sequence.deadline {
            _ if cancelled.contains(&sequence.id) => Some(FinishReason::Cancelled),
            Some(deadline) if deadline <= now => Some(FinishReason::Deadline),
            _ => None,
        };
        for mut sequence in self.waiting.take_if(|sequence| reason(sequence).is_some()) {
            if let Some(reason) = reason(&sequence) {
                outputs.push(sequence.ended(reason));
            }
            self.waiting.close(sequence.client());
        }
        for sequence in &mut self.running {
            if let Some(reason) = reason(sequence) {
                outputs.push(sequence.ended(reason));
                sequence.is_ended = true;
            }
        }
        self.retire();
        self.watches_deadlines =
            self.running.iter().any(|s| s.deadline.is_some()) || self.waiting.any(|s| s.deadline.is_some());
    }

    /// Lets the sequences go that have ended.
    fn retire(&mut self) {
        if self.running.iter().all(|sequence| !sequence.is_ended) {
            return;
        }
        let (ended, kept): (Vec<_>, Vec<_>) = std::mem::take(&mut self.running).into_iter().partition(|s| s.is_ended);
        self.running = kept;
        for mut sequence in ended {
            if let Err(error) = self.blocks.release(&mut self.loaded.model, &mut sequence) {
                tracing::error!(%error, "blocks of a sequence that has ended");
            }
            self.waiting.close(sequence.client());
        }
    }

    /// Logits of every position of a text, row by row, computed exactly as generation computes them: as a prompt, or, if
    /// `decode`, token by token through the cache. Requests in flight are not touched; the text is computed in blocks of the
    /// cache that they do not use yet.
    ///
    /// # Errors
    /// If a token is out of range, the text does not fit the context or what is free of the cache, or the device fails.
    pub fn logits(&mut self, tokens: &[u32], decode: bool, sink: &mut dyn FnMut(&[f32])) -> Result<(), EngineError> {
        self.limits().check_tokens(tokens)?;
        let max_seq_len = self.loaded.model.options().max_seq_len;
        if tokens.len() > max_seq_len as usize {
            return Err(EngineError::ContextLength {
                what: "prompt",
                prompt: tokens.len(),
                answer: false,
                max_seq_len,
            });
        }
        let mut kv = SequenceKv::default();
        let model = &mut self.loaded.model;
        let result = each_chunk(model, &mut self.blocks, &mut kv, tokens, decode, &mut self.rows, sink);
        let released = self.loaded.model.release(&mut kv);
        Ok(result.and(released)?)
    }
}

fn limits(loaded: &LoadedModel) -> Limits {
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let model_vocab_size = loaded.model.vocab_size();
    Limits {
        vocab_size: number(
            loaded.tokenizer.as_ref().map_or(model_vocab_size, |t| t.vocab_size().min(model_vocab_size)),
        ),
        model_vocab_size: number(model_vocab_size),
        hidden_size: number(loaded.model.width(StepResult::Hidden)),
        max_seq_len: loaded.model.options().max_seq_len,
        block_size: loaded.model.block_size(),
        cache_blocks: loaded.model.cache_blocks(),
    }
}

fn each_chunk(
    model: &mut Model,
    blocks: &mut Blocks,
    kv: &mut SequenceKv,
    tokens: &[u32],
    decode: bool,
    logits: &mut Vec<f32>,
    sink: &mut dyn FnMut(&[f32]),
) -> Result<(), RuntimeError> {
    let (phase, chunk) =
        if decode { (Phase::Decode, 1) } else { (Phase::Prefill, model.options().max_step_tokens as usize) };
    for part in tokens.chunks(chunk.max(1)) {
        if !blocks.reserve(model, kv, part.len())? {
            // The model's own message has the numbers.
            model.reserve(kv, part.len() as u32)?;
        }
        let mut batch = Batch::new(model.block_size());
        batch.push(kv, part, LogitRows::All)?;
        model.forward(phase, &batch, logits)?;
        kv.len += part.len() as u32;
        logits.chunks_exact(model.vocab_size().max(1)).for_each(&mut *sink);
    }
    Ok(())
}
