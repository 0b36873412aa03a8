//! Requests in flight.
//!
//! Each step computes one token of every sequence that is generating and fills the rest of the step with prompt tokens, in
//! order of arrival. A sequence starts when the blocks that it may come to need are free, so that it can always finish.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use qwen_ir::Phase;
use qwen_models::tokenizer::{StreamDecoder, StreamOptions, Tokenizer};
use qwen_runtime::{Batch, LogitRows, Model, RuntimeError, SequenceKv};

use crate::handle::About;
use crate::stats::EngineStats;
use crate::{
    EngineError, FinishReason, Limits, LoadedModel, Output, Request, RequestId, RequestTimings, Sampler, StopWatch,
};

/// Checks requests and makes them ready, on any thread.
#[derive(Debug, Clone)]
pub struct Preparer {
    limits: Limits,
}

/// A request that was checked.
#[derive(Debug)]
pub struct Prepared {
    request: Request,
    most_tokens: usize,
    sampler: Sampler,
}

impl Preparer {
    /// Checks a request.
    ///
    /// # Errors
    /// If a parameter or token is out of range, or the request could never be computed.
    pub fn prepare(&self, request: Request) -> Result<Prepared, EngineError> {
        self.limits.check(&request)?;
        let unsupported = |name, found: &str| EngineError::Parameter {
            name,
            expected: "nothing: this engine does not compute it".into(),
            found: found.into(),
        };
        if request.constraint.is_some() {
            return Err(unsupported("constraint", "a grammar"));
        }
        if request.prompt_logprobs.is_some() {
            return Err(unsupported("prompt_logprobs", "a number"));
        }
        if !request.resume.is_empty() {
            return Err(unsupported("resume", "tokens"));
        }
        let sampler = Sampler::new(request.sampling.clone(), &request.prompt);
        Ok(Prepared { most_tokens: self.limits.most_tokens(&request), sampler, request })
    }
}

struct Sequence {
    id: RequestId,
    /// Prompt, then answer.
    tokens: Vec<u32>,
    prompt_len: usize,
    max_len: usize,
    kv: SequenceKv,
    blocks: u32,
    sampler: Sampler,
    decoder: StreamDecoder,
    stop: StopWatch,
    arrived: Instant,
    deadline: Option<Instant>,
    started: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    cancelled: bool,
}

impl Sequence {
    fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }
    /// Tokens that are not in the cache yet.
    fn pending(&self) -> usize {
        self.tokens.len() - self.kv.len as usize
    }
    fn is_decoding(&self) -> bool {
        self.kv.len as usize >= self.prompt_len
    }
    fn timings(&self) -> RequestTimings {
        let between = |a: Option<Instant>, b: Option<Instant>| match (a, b) {
            (Some(a), Some(b)) => b.saturating_duration_since(a),
            _ => Duration::ZERO,
        };
        RequestTimings {
            prompt_tokens: self.prompt_len,
            cached_tokens: 0,
            generated_tokens: self.generated(),
            preemptions: 0,
            queue: between(Some(self.arrived), self.started),
            prefill: between(self.started, self.first_token),
            decode: between(self.first_token, self.last_token),
        }
    }
}

/// Generates text for several requests at once.
pub struct Engine {
    loaded: LoadedModel,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    promised_blocks: u32,
    next_id: u64,
    logits: Vec<f32>,
    stats: EngineStats,
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
    /// An engine without requests.
    #[must_use]
    pub fn new(loaded: LoadedModel) -> Self {
        Self {
            loaded,
            waiting: VecDeque::new(),
            running: Vec::new(),
            promised_blocks: 0,
            next_id: 1,
            logits: Vec::new(),
            stats: EngineStats::default(),
        }
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
    pub fn vocab_size(&self) -> usize {
        let model = self.loaded.model.vocab_size();
        self.loaded.tokenizer.as_ref().map_or(model, |t| t.vocab_size().min(model))
    }
    /// Whether a request waits or runs.
    #[must_use]
    pub fn has_work(&self) -> bool {
        !self.waiting.is_empty() || !self.running.is_empty()
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
    /// What requests can ask for.
    #[must_use]
    pub fn limits(&self) -> Limits {
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Limits {
            vocab_size: number(self.vocab_size()),
            model_vocab_size: number(self.loaded.model.vocab_size()),
            max_seq_len: self.loaded.model.options().max_seq_len,
            block_size: self.loaded.model.block_size(),
            cache_blocks: self.loaded.model.cache_blocks(),
        }
    }
    /// Checks requests and makes them ready, on any thread.
    #[must_use]
    pub fn preparer(&self) -> Preparer {
        Preparer { limits: self.limits() }
    }
    /// Figures, as of the last step.
    #[must_use]
    pub fn stats(&self) -> EngineStats {
        let kv = self.loaded.model.memory().kv;
        EngineStats {
            waiting: self.waiting.len(),
            running: self.running.len(),
            max_sequences: self.loaded.model.options().max_sequences as usize,
            block_size: self.loaded.model.block_size(),
            blocks_total: kv.limit,
            blocks_used: kv.used,
            ..self.stats
        }
    }

    /// Takes a request.
    ///
    /// # Errors
    /// If a parameter or token is out of range, or the request could never be computed.
    pub fn submit(&mut self, request: Request) -> Result<RequestId, EngineError> {
        let prepared = self.preparer().prepare(request)?;
        let id = RequestId(self.next_id);
        self.enqueue(prepared, id);
        Ok(id)
    }

    /// Takes a request that was prepared for this engine, under an id that no request of it has.
    pub(crate) fn enqueue(&mut self, prepared: Prepared, id: RequestId) {
        let Prepared { request, most_tokens, sampler } = prepared;
        self.next_id = self.next_id.max(id.0 + 1);
        let stop = StopWatch::new(&request.sampling.stop);
        self.waiting.push_back(Sequence {
            id,
            prompt_len: request.prompt.len(),
            sampler,
            tokens: request.prompt,
            max_len: most_tokens,
            kv: SequenceKv::default(),
            blocks: (most_tokens as u32).div_ceil(self.loaded.model.block_size()),
            decoder: StreamDecoder::new(StreamOptions {
                skip_special: request.sampling.skip_special,
                start_of_text: false,
            }),
            stop,
            arrived: Instant::now(),
            deadline: request.deadline,
            started: None,
            first_token: None,
            last_token: None,
            cancelled: false,
        });
    }

    /// Ends a request at the next step. Returns whether it was in flight.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        let mut all = self.waiting.iter_mut().chain(&mut self.running);
        all.find(|sequence| sequence.id == id).map(|sequence| sequence.cancelled = true).is_some()
    }

    /// Computes one step. Outputs come in order of arrival of their requests. If the device fails, every running request ends
    /// with [`FinishReason::Device`].
    pub fn step(&mut self) -> Vec<Output> {
        let begin = Instant::now();
        let mut outputs = Vec::new();
        self.drop_ended(begin, &mut outputs);
        self.admit();
        if let Err(error) = self.compute(&mut outputs) {
            self.stats.device_errors += 1;
            let reason = FinishReason::Device(error.to_string());
            outputs.retain(|output| output.finish.is_some());
            for sequence in std::mem::take(&mut self.running) {
                if outputs.iter().all(|output| output.id != sequence.id) {
                    outputs.push(ended(&sequence, reason.clone()));
                }
                self.retire(sequence);
            }
        }
        outputs.sort_by_key(|output| output.id);
        for output in &outputs {
            self.stats.generated_tokens += u64::from(output.token.is_some());
            if let Some(reason) = &output.finish {
                self.stats.count_finish(reason);
            }
        }
        self.stats.last_step_seconds = begin.elapsed().as_secs_f64();
        self.stats.step_seconds += self.stats.last_step_seconds;
        outputs
    }

    /// Ends what was cancelled or is late.
    fn drop_ended(&mut self, now: Instant, outputs: &mut Vec<Output>) {
        let reason = |s: &Sequence| match s.deadline {
            _ if s.cancelled => Some(FinishReason::Cancelled),
            Some(deadline) if deadline <= now => Some(FinishReason::Deadline),
            _ => None,
        };
        self.waiting.retain(|sequence| {
            outputs.extend(reason(sequence).map(|reason| ended(sequence, reason)));
            reason(sequence).is_none()
        });
        for at in (0..self.running.len()).rev() {
            if let Some(reason) = reason(&self.running[at]) {
                let sequence = self.running.remove(at);
                outputs.push(ended(&sequence, reason));
                self.retire(sequence);
            }
        }
    }

    /// Starts waiting requests while their blocks are free. A request never waits behind nothing: what was accepted fits an
    /// empty cache.
    fn admit(&mut self) {
        let options = self.loaded.model.options();
        let limit = self.loaded.model.cache_blocks();
        while self.running.len() < options.max_sequences as usize {
            let Some(sequence) = self.waiting.front() else { return };
            if sequence.blocks > limit - self.promised_blocks {
                return;
            }
            self.promised_blocks += sequence.blocks;
            self.running.extend(self.waiting.pop_front());
        }
    }

    fn compute(&mut self, outputs: &mut Vec<Output>) -> Result<(), EngineError> {
        let budget = self.loaded.model.options().max_step_tokens as usize;
        // What each running sequence computes in this step: (index, tokens).
        let decoding: Vec<(usize, usize)> =
            (0..self.running.len()).filter(|i| self.running[*i].is_decoding()).map(|i| (i, 1)).collect();
        let mut left = budget.saturating_sub(if self.loaded.model.phase_matters() { 0 } else { decoding.len() });
        let mut prefilling = Vec::new();
        for (i, sequence) in self.running.iter().enumerate().filter(|(_, s)| !s.is_decoding()) {
            let tokens = sequence.pending().min(left);
            if tokens == 0 {
                break;
            }
            left -= tokens;
            prefilling.push((i, tokens));
        }
        let mut parts: Vec<(Phase, Vec<(usize, usize)>)> = Vec::new();
        if self.loaded.model.phase_matters() {
            parts.push((Phase::Decode, decoding));
            parts.push((Phase::Prefill, prefilling));
        } else {
            let mut all = decoding;
            all.extend(prefilling);
            all.sort_unstable();
            parts.push((Phase::Mixed, all));
        }
        let mut finished = Vec::new();
        for (phase, members) in parts {
            if !members.is_empty() {
                self.forward(phase, &members, outputs, &mut finished)?;
            }
        }
        finished.sort_unstable();
        for at in finished.into_iter().rev() {
            let sequence = self.running.remove(at);
            self.retire(sequence);
        }
        Ok(())
    }

    fn forward(
        &mut self,
        phase: Phase,
        members: &[(usize, usize)],
        outputs: &mut Vec<Output>,
        finished: &mut Vec<usize>,
    ) -> Result<(), EngineError> {
        let now = Instant::now();
        let mut batch = Batch::new(self.loaded.model.block_size());
        for (i, tokens) in members {
            let sequence = &mut self.running[*i];
            sequence.started.get_or_insert(now);
            self.loaded.model.reserve(&mut sequence.kv, *tokens as u32)?;
            let start = sequence.kv.len as usize;
            let rows = if *tokens == sequence.pending() { LogitRows::Last } else { LogitRows::None };
            batch.push(&sequence.kv, &sequence.tokens[start..start + tokens], rows)?;
        }
        self.logits.clear();
        self.loaded.model.forward(phase, &batch, &mut self.logits)?;
        self.stats.count_step(batch.tokens() as u32, batch.sequences() as u32);
        let width = self.loaded.model.vocab_size();
        let vocab_size = self.vocab_size();
        let mut rows = self.logits.chunks_exact(width.max(1));
        for (i, tokens) in members {
            let sequence = &mut self.running[*i];
            let complete = *tokens == sequence.pending();
            sequence.kv.len += *tokens as u32;
            if !complete {
                continue;
            }
            let Some(row) = rows.next() else { continue };
            let output = advance(sequence, &self.loaded, &row[..vocab_size.min(row.len())]);
            if output.finish.is_some() {
                finished.push(*i);
            }
            outputs.push(output);
        }
        Ok(())
    }

    fn retire(&mut self, mut sequence: Sequence) {
        self.promised_blocks -= sequence.blocks;
        if let Err(error) = self.loaded.model.release(&mut sequence.kv) {
            tracing::error!(%error, "a block of a sequence");
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
            return Err(EngineError::ContextLength { prompt: tokens.len(), max_seq_len });
        }
        let mut kv = SequenceKv::default();
        let result = each_chunk(&mut self.loaded.model, &mut kv, tokens, decode, &mut self.logits, sink);
        let released = self.loaded.model.release(&mut kv);
        Ok(result.and(released)?)
    }
}

fn each_chunk(
    model: &mut Model,
    kv: &mut SequenceKv,
    tokens: &[u32],
    decode: bool,
    logits: &mut Vec<f32>,
    sink: &mut dyn FnMut(&[f32]),
) -> Result<(), RuntimeError> {
    let (phase, chunk) =
        if decode { (Phase::Decode, 1) } else { (Phase::Prefill, model.options().max_step_tokens as usize) };
    for part in tokens.chunks(chunk.max(1)) {
        model.reserve(kv, part.len() as u32)?;
        let mut batch = Batch::new(model.block_size());
        batch.push(kv, part, LogitRows::All)?;
        logits.clear();
        model.forward(phase, &batch, logits)?;
        kv.len += part.len() as u32;
        logits.chunks_exact(model.vocab_size().max(1)).for_each(&mut *sink);
    }
    Ok(())
}

/// Chooses the next token of a sequence and says what that means.
fn advance(sequence: &mut Sequence, loaded: &LoadedModel, row: &[f32]) -> Output {
    let params = sequence.sampler.params();
    let is_end = |id: u32| {
        loaded.config.eos_token_ids.contains(&id)
            || loaded.tokenizer.as_ref().is_some_and(|tokenizer| tokenizer.eos_ids().contains(&id))
    };
    let mut forbidden = Vec::new();
    if !params.ignore_eos && sequence.generated() < params.min_tokens as usize {
        forbidden.extend(loaded.config.eos_token_ids.iter().copied());
        forbidden.extend(loaded.tokenizer.iter().flat_map(|tokenizer| tokenizer.eos_ids().iter().copied()));
    }
    let sampled = match sequence.sampler.sample(row, &forbidden, None, &mut crate::sampling::Scratch::default()) {
        Ok(sampled) => sampled,
        Err(error) => return ended(sequence, FinishReason::Error(error.to_string())),
    };
    let now = Instant::now();
    sequence.first_token.get_or_insert(now);
    sequence.last_token = Some(now);
    sequence.tokens.push(sampled.id);
    let params = sequence.sampler.params();
    let mut finish = if !params.ignore_eos && is_end(sampled.id) {
        Some(FinishReason::EndOfText)
    } else if params.stop_token_ids.contains(&sampled.id) {
        Some(FinishReason::StopToken(sampled.id))
    } else if sequence.tokens.len() >= sequence.max_len {
        Some(FinishReason::Length)
    } else {
        None
    };
    let ends_without_text = matches!(finish, Some(FinishReason::EndOfText | FinishReason::StopToken(_)));
    let piece = match &loaded.tokenizer {
        Some(tokenizer) if !ends_without_text => sequence.decoder.push(tokenizer, sampled.id),
        _ => String::new(),
    };
    let mut released = sequence.stop.push(&piece);
    if released.stopped.is_none() && finish.is_some() {
        let tail = sequence.decoder.finish();
        let last = sequence.stop.push(&tail);
        released.text.push_str(&last.text);
        released.stopped = last.stopped;
        if released.stopped.is_none() {
            released.text.push_str(&sequence.stop.finish());
        }
    }
    if let Some(at) = released.stopped {
        let stop = sequence.sampler.params().stop.get(at).cloned().unwrap_or_default();
        if sequence.sampler.params().include_stop {
            released.text.push_str(&stop);
        }
        finish = Some(FinishReason::StopText(stop));
    }
    let timings = finish.as_ref().map(|_| sequence.timings());
    Output {
        id: sequence.id,
        token: Some(sampled.id),
        text: released.text,
        logprobs: sampled.logprobs,
        prompt_logprobs: None,
        finish,
        timings,
    }
}

/// The last output of a request that ends without a token.
fn ended(sequence: &Sequence, reason: FinishReason) -> Output {
    Output {
        id: sequence.id,
        token: None,
        text: String::new(),
        logprobs: None,
        prompt_logprobs: None,
        finish: Some(reason),
        timings: Some(sequence.timings()),
    }
}
