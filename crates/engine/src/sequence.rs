//! One request on its way: its tokens, its part of the cache, and everything that choosing its next token depends on.
//!
//! In: rows of logits. Out: [`Output`]s. Invariants:
//! - `tokens` is prompt, then answer; those below `kv.len` have keys and values in the cache, the others are pending;
//! - the first `path.len()` blocks belong to the prefix cache, the others to the sequence alone;
//! - nothing here depends on other sequences, so sequences can choose their tokens at the same time on different threads.

use std::sync::Arc;
use std::time::{Duration, Instant};

use qwen_models::tokenizer::{StreamDecoder, StreamOptions, Tokenizer};
use qwen_runtime::SequenceKv;

use crate::constraint::ConstraintState;
use crate::pooling::{Pooled, Pooling};
use crate::prefix_cache::{Namespace, NodeId};
use crate::queue::Waiting;
use crate::speculate::Drafter;
use crate::{
    ClientKey, EngineError, FinishReason, Logprobs, Output, Request, RequestId, RequestTimings, Sampler, Scratch,
    StopWatch,
};

/// What every sequence of a model shares.
#[derive(Debug)]
pub(crate) struct Facts {
    pub(crate) tokenizer: Option<Arc<Tokenizer>>,
    /// Tokens that end an answer, in order.
    pub(crate) eos: Vec<u32>,
}

/// Log-probabilities of a prompt, as far as they are known.
#[derive(Debug)]
struct PromptLogprobs {
    top: usize,
    /// By position; the first one stays empty.
    found: Vec<Option<Logprobs>>,
}

#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: RequestId,
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_len: usize,
    pub(crate) max_len: usize,
    pub(crate) kv: SequenceKv,
    pub(crate) path: Vec<NodeId>,
    pub(crate) namespace: Namespace,
    pub(crate) priority: i32,
    pub(crate) deadline: Option<Instant>,
    /// Preempted in the step that is being planned.
    pub(crate) is_out: bool,
    /// Its last output was given; it leaves with the step.
    pub(crate) is_ended: bool,
    pub(crate) constraint: Option<Box<ConstraintState>>,
    pub(crate) drafter: Drafter,
    /// Tokens guessed for the step that is being computed.
    pub(crate) draft: Vec<u32>,
    pub(crate) cached_tokens: usize,
    pub(crate) preemptions: u32,
    pub(crate) started: Option<Instant>,
    sampler: Sampler,
    decoder: StreamDecoder,
    stop: StopWatch,
    prompt_logprobs: Option<PromptLogprobs>,
    embedding: Option<Pooled>,
    arrived: Instant,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

impl Waiting for Sequence {
    fn priority(&self) -> i32 {
        self.priority
    }
    fn client(&self) -> ClientKey {
        self.namespace.client
    }
    fn arrival(&self) -> u64 {
        self.id.0
    }
}

impl Sequence {
    /// A sequence for a checked request; its id is set when it is queued.
    pub(crate) fn new(
        request: Request,
        max_len: usize,
        constraint: Option<Box<ConstraintState>>,
        facts: &Facts,
    ) -> Result<Self, EngineError> {
        let Request { prompt, sampling, resume, .. } = request;
        let prompt_len = prompt.len();
        let found = || std::iter::repeat_with(|| None).take(prompt_len).collect();
        let mut sequence = Self {
            id: RequestId(0),
            prompt_len,
            max_len,
            kv: SequenceKv::default(),
            path: Vec::new(),
            namespace: Namespace { client: request.client, salt: request.cache_salt },
            priority: request.priority,
            deadline: request.deadline,
            is_out: false,
            is_ended: false,
            constraint,
            drafter: Drafter::new(),
            draft: Vec::new(),
            cached_tokens: 0,
            preemptions: 0,
            decoder: StreamDecoder::new(StreamOptions { skip_special: sampling.skip_special, start_of_text: false }),
            stop: StopWatch::new(&sampling.stop),
            sampler: Sampler::new(sampling, &prompt),
            tokens: prompt,
            embedding: request.embed.map(Pooled::new),
            prompt_logprobs: request.prompt_logprobs.map(|top| PromptLogprobs { top: top as usize, found: found() }),
            arrived: Instant::now(),
            started: None,
            first_token: None,
            last_token: None,
        };
        for token in resume {
            sequence.sampler.replay(token);
            sequence.tokens.push(token);
            sequence.text_of(token, facts);
            if let Some(constraint) = &mut sequence.constraint {
                constraint.accept(token).map_err(|reason| EngineError::Grammar { reason })?;
            }
        }
        Ok(sequence)
    }

    fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }
    /// Tokens that are not in the cache yet.
    pub(crate) fn pending(&self) -> usize {
        self.tokens.len() - self.kv.len as usize
    }
    /// Whether its prompt is in the cache.
    pub(crate) fn is_decoding(&self) -> bool {
        self.kv.len as usize >= self.prompt_len
    }
    /// Whether a step has only its newest token to compute.
    pub(crate) fn is_generating(&self) -> bool {
        self.is_decoding() && self.pending() == 1 && self.generated() > 0
    }
    /// Whether the logits of each token of its prompt are wanted.
    pub(crate) fn wants_prompt_logprobs(&self) -> bool {
        self.prompt_logprobs.is_some() && !self.is_decoding()
    }
    /// Whether a row of each token that is computed next is wanted, so that none may come from a cache.
    pub(crate) fn wants_every_row(&self) -> bool {
        self.wants_prompt_logprobs() || self.embedding.as_ref().is_some_and(|pooled| pooled.pooling == Pooling::Mean)
    }
    /// Whether the row of its last token is wanted.
    pub(crate) const fn wants_last_row(&self) -> bool {
        self.embeds() || !self.ends_with_prompt()
    }
    /// Whether it ends with a vector of its prompt.
    pub(crate) const fn embeds(&self) -> bool {
        self.embedding.is_some()
    }
    /// Tokens that it may still come to.
    pub(crate) fn room(&self) -> usize {
        self.max_len - self.tokens.len()
    }

    fn timings(&self) -> RequestTimings {
        let between = |a: Option<Instant>, b: Option<Instant>| match (a, b) {
            (Some(a), Some(b)) => b.saturating_duration_since(a),
            _ => Duration::ZERO,
        };
        RequestTimings {
            prompt_tokens: self.prompt_len,
            cached_tokens: self.cached_tokens,
            generated_tokens: self.generated(),
            preemptions: self.preemptions,
            queue: between(Some(self.arrived), self.started),
            prefill: between(self.started, self.first_token),
            decode: between(self.first_token, self.last_token),
        }
    }

    /// Takes the rows of prompt tokens from position `start` on.
    pub(crate) fn take_prompt_rows<'a>(&mut self, start: usize, rows: impl Iterator<Item = &'a [f32]>) {
        if let Some(pooled) = &mut self.embedding {
            return (start..).zip(rows).for_each(|(position, row)| pooled.take(position, row));
        }
        let Some(wanted) = &mut self.prompt_logprobs else { return };
        // The logits at a position are those of the token after it.
        for (position, row) in (start + 1..self.prompt_len).zip(rows) {
            if wanted.found[position].is_none() {
                wanted.found[position] = Some(crate::logprobs(row, self.tokens[position], wanted.top));
            }
        }
    }

    /// Whether the request ends with its prompt.
    pub(crate) const fn ends_with_prompt(&self) -> bool {
        self.max_len == self.prompt_len
    }

    /// The last output of a request that ends without a token.
    pub(crate) fn ended(&mut self, reason: FinishReason) -> Output {
        Output {
            id: self.id,
            token: None,
            text: String::new(),
            logprobs: None,
            prompt_logprobs: self.prompt_logprobs.take().map(|wanted| wanted.found),
            embedding: None,
            finish: Some(reason),
            timings: Some(self.timings()),
        }
    }

    /// The output of a request whose prompt was computed to its end for a vector of it.
    pub(crate) fn embedded(&mut self) -> Output {
        let now = Instant::now();
        (self.first_token, self.last_token) = (Some(now), Some(now));
        let vector = self.embedding.take().map(Pooled::finish).unwrap_or_default();
        match vector.iter().find(|value| !value.is_finite()) {
            Some(value) => self.ended(FinishReason::Logits(format!(
                "the model gave {value} in a hidden state: the checkpoint or the device is damaged"
            ))),
            None => Output { embedding: Some(vector), ..self.ended(FinishReason::EndOfText) },
        }
    }

    fn text_of(&mut self, token: u32, facts: &Facts) -> crate::Released {
        let piece = facts.tokenizer.as_ref().map(|tokenizer| self.decoder.push(tokenizer, token));
        self.stop.push(&piece.unwrap_or_default())
    }

    /// Chooses the next token from its logits and says what that means.
    pub(crate) fn advance(&mut self, row: &[f32], facts: &Facts, scratch: &mut Scratch) -> Output {
        let params = self.sampler.params();
        let (ignore_eos, min_tokens) = (params.ignore_eos, params.min_tokens as usize);
        let is_early = !ignore_eos && self.generated() < min_tokens && self.constraint.is_none();
        let forbidden: &[u32] = if is_early { &facts.eos } else { &[] };
        let mask = match self.constraint.as_deref_mut().map(ConstraintState::mask) {
            None => None,
            Some(Ok(mask)) => mask,
            Some(Err(reason)) => return self.ended(FinishReason::Grammar(reason)),
        };
        let sampled = match self.sampler.sample(row, forbidden, mask, scratch) {
            Ok(sampled) => sampled,
            Err(error @ EngineError::NonFinite { .. }) => return self.ended(FinishReason::Logits(error.to_string())),
            Err(error) => return self.ended(FinishReason::Error(error.to_string())),
        };
        let now = Instant::now();
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
        self.tokens.push(sampled.id);
        let is_complete = match self.constraint.as_deref_mut().map(|constraint| constraint.accept(sampled.id)) {
            None => false,
            Some(Ok(is_complete)) => is_complete,
            Some(Err(reason)) => return self.ended(FinishReason::Grammar(reason)),
        };
        let params = self.sampler.params();
        let is_eos = !ignore_eos && facts.eos.binary_search(&sampled.id).is_ok();
        let is_stop = !is_eos && params.stop_token_ids.contains(&sampled.id);
        let mut finish = if is_eos {
            Some(FinishReason::EndOfText)
        } else if is_stop {
            Some(FinishReason::StopToken(sampled.id))
        } else if is_complete {
            Some(FinishReason::EndOfText)
        } else if self.tokens.len() >= self.max_len {
            Some(FinishReason::Length)
        } else {
            None
        };
        let mut released = if is_eos || is_stop { self.stop.push("") } else { self.text_of(sampled.id, facts) };
        if released.stopped.is_none() && finish.is_some() {
            let tail = self.decoder.finish();
            let last = self.stop.push(&tail);
            released.text.push_str(&last.text);
            released.stopped = last.stopped;
            if released.stopped.is_none() {
                released.text.push_str(&self.stop.finish());
            }
        }
        if let Some(at) = released.stopped {
            let params = self.sampler.params();
            let stop = params.stop.get(at).cloned().unwrap_or_default();
            if params.include_stop {
                released.text.push_str(&stop);
            }
            finish = Some(FinishReason::StopText(stop));
        }
        Output {
            id: self.id,
            token: Some(sampled.id),
            text: released.text,
            logprobs: sampled.logprobs,
            prompt_logprobs: self.prompt_logprobs.take().map(|wanted| wanted.found),
            embedding: None,
            timings: finish.as_ref().map(|_| self.timings()),
            finish,
        }
    }
}
