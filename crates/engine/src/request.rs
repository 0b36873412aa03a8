//! What is asked of the engine and what it answers: plain data and the check of a request against a model's limits.
//!
//! In: a [`Request`] of whoever asks. Out: [`Output`]s, one for each token, the last one with a [`FinishReason`]. Invariant: a
//! request that passed [`Limits::check`] can be computed to its end on an otherwise empty engine; one that can't is refused
//! here, with the arithmetic, before anything is allocated for it.

use std::time::{Duration, Instant};

use crate::pooling::Pooling;
use crate::{EngineError, Logprobs, SamplingParams};

/// Identity of a request within an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Who asks: requests of different keys share the engine fairly and never see each other's cached prefixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ClientKey(pub u64);

/// What an answer must look like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Grammar {
    /// Any JSON object.
    JsonObject,
    /// JSON that a JSON schema allows; the schema's text.
    JsonSchema(String),
    /// A text that matches a regular expression as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text of a grammar in llguidance's Lark dialect.
    Lark(String),
    /// A text of a grammar in llama.cpp's GBNF.
    Gbnf(String),
}

/// A grammar for an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Constraint {
    /// What the answer must look like.
    pub grammar: Grammar,
    /// Text that the answer must have come to before the grammar begins (`</think>`); none: it begins with the answer.
    pub after: Option<String>,
}

/// What is to be continued, and how.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Request {
    /// Tokens.
    pub prompt: Vec<u32>,
    /// How to choose tokens and when to stop.
    pub sampling: SamplingParams,
    /// Log-probabilities of the prompt's tokens and so many best ones at each position; with it, `max_tokens` may be 0.
    pub prompt_logprobs: Option<u32>,
    /// A vector of the prompt, made so of its hidden states, instead of an answer: with it, `max_tokens` is 0.
    pub embed: Option<Pooling>,
    /// What the answer must look like.
    pub constraint: Option<Constraint>,
    /// Lower runs earlier; requests of equal priority share fairly.
    pub priority: i32,
    /// When the answer is of no use any more: it ends then, wherever it is.
    pub deadline: Option<Instant>,
    /// Who asks.
    pub client: ClientKey,
    /// Requests of one client share cached prefixes only if this is equal too.
    pub cache_salt: u64,
    /// Tokens of the answer that exist already (of an engine whose device was lost): they count as generated, but are not
    /// handed out again, and what follows is what would have followed there.
    pub resume: Vec<u32>,
}

impl Request {
    /// A request without extras.
    #[must_use]
    pub fn new(prompt: Vec<u32>, sampling: SamplingParams) -> Self {
        Self { prompt, sampling, ..Self::default() }
    }
}

/// Why an answer ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishReason {
    /// An end-of-text token of the model.
    EndOfText,
    /// One of the request's stop tokens.
    StopToken(u32),
    /// One of the request's stop texts.
    StopText(String),
    /// The limit of tokens, or the end of the context.
    Length,
    /// The request was cancelled.
    Cancelled,
    /// The request's deadline passed.
    Deadline,
    /// A logit was no number: the checkpoint or the device is damaged; the text says which.
    Logits(String),
    /// The request's grammar can't be gone on with: it allows nothing, or takes more than its budget; the text is the reason, and
    /// may quote the answer.
    Grammar(String),
    /// Something else went wrong; the text says what.
    Error(String),
    /// The device failed; the text is what it said. Another device can go on from the tokens so far ([`Request::resume`]).
    Device(String),
}

impl FinishReason {
    /// Name as in the OpenAI API.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::EndOfText | Self::StopToken(_) | Self::StopText(_) => "stop",
            Self::Length => "length",
            Self::Cancelled | Self::Deadline => "abort",
            Self::Logits(_) | Self::Grammar(_) | Self::Error(_) | Self::Device(_) => "error",
        }
    }
}

/// What a step gave one request: one token. A step may give a request several outputs.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    /// Whose.
    pub id: RequestId,
    /// The new token; none if the request ended without one.
    pub token: Option<u32>,
    /// Text that is certain now: complete characters that can't be part of a stop text.
    pub text: String,
    /// If asked for.
    pub logprobs: Option<Logprobs>,
    /// If asked for, with the first output: an entry for each prompt token, none for the first.
    pub prompt_logprobs: Option<Vec<Option<Logprobs>>>,
    /// If asked for: a value for each dimension of the model, of no particular length.
    pub embedding: Option<Vec<f32>>,
    /// Set once, with the last output of a request.
    pub finish: Option<FinishReason>,
    /// Set together with `finish`.
    pub timings: Option<RequestTimings>,
}

impl Output {
    /// The last output of a request of which nothing more is known.
    pub(crate) const fn end(id: RequestId, finish: FinishReason) -> Self {
        Self {
            id,
            token: None,
            text: String::new(),
            logprobs: None,
            prompt_logprobs: None,
            embedding: None,
            finish: Some(finish),
            timings: None,
        }
    }
}

/// Where the time of a request went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RequestTimings {
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Of these, tokens whose keys and values were in the prefix cache when the request started.
    pub cached_tokens: usize,
    /// Generated tokens.
    pub generated_tokens: usize,
    /// How often the request gave its memory away and was computed again.
    pub preemptions: u32,
    /// From arrival to the first step.
    pub queue: Duration,
    /// From the first step to the first token.
    pub prefill: Duration,
    /// From the first to the last token.
    pub decode: Duration,
}

impl RequestTimings {
    /// Prompt tokens per second.
    #[must_use]
    pub fn prefill_rate(&self) -> f64 {
        rate(self.prompt_tokens, self.prefill)
    }
    /// Generated tokens per second after the first.
    #[must_use]
    pub fn decode_rate(&self) -> f64 {
        rate(self.generated_tokens.saturating_sub(1), self.decode)
    }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { tokens as f64 / time.as_secs_f64() }
}

/// What a request can ask of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Tokens that can be chosen: those of the model that the tokenizer knows too.
    pub vocab_size: u32,
    /// Rows of the model's vocabulary; a prompt may hold any of them.
    pub model_vocab_size: u32,
    /// Values of a vector of a text; 0 if the model was loaded without embeddings.
    pub hidden_size: u32,
    /// Most tokens of prompt and answer.
    pub max_seq_len: u32,
    /// Tokens of a block of the KV cache.
    pub block_size: u32,
    /// Blocks of the KV cache.
    pub cache_blocks: u32,
}

/// Most best tokens at a position that log-probabilities are given for.
pub const MAX_LOGPROBS: u32 = 64;

impl Limits {
    /// Most tokens that a request comes to: prompt, and the longest answer that the context has room for.
    #[must_use]
    pub fn most_tokens(&self, request: &Request) -> usize {
        let asked = request.prompt.len().saturating_add(request.sampling.max_tokens as usize);
        asked.min(self.max_seq_len as usize)
    }

    /// Checks everything that does not need the engine.
    ///
    /// # Errors
    /// If a parameter or token is out of range, or the request could never be computed.
    pub fn check(&self, request: &Request) -> Result<(), EngineError> {
        request.sampling.validate(self.vocab_size)?;
        self.check_tokens(&request.prompt)?;
        let parameter = |name, expected: String, found: String| EngineError::Parameter { name, expected, found };
        match request.embed {
            Some(_) => self.check_embedding(request)?,
            None if request.sampling.max_tokens == 0 && request.prompt_logprobs.is_none() => {
                return Err(parameter("max_tokens", "at least 1, or 0 with prompt_logprobs".into(), "0".into()));
            }
            None => {}
        }
        for (name, n) in [("logprobs", request.sampling.logprobs), ("prompt_logprobs", request.prompt_logprobs)] {
            if let Some(n) = n.filter(|n| *n > MAX_LOGPROBS) {
                return Err(parameter(name, format!("at most {MAX_LOGPROBS}"), n.to_string()));
            }
        }
        let max_seq_len = self.max_seq_len;
        if request.prompt.len() + usize::from(request.sampling.max_tokens > 0) > max_seq_len as usize {
            let what = if request.embed.is_some() { "text" } else { "prompt" };
            let answer = request.sampling.max_tokens > 0;
            return Err(EngineError::ContextLength { what, prompt: request.prompt.len(), answer, max_seq_len });
        }
        let tokens = self.most_tokens(request);
        let blocks = (tokens as u32).div_ceil(self.block_size);
        if blocks > self.cache_blocks {
            let (block_size, limit) = (self.block_size, self.cache_blocks);
            let what = if request.embed.is_some() { "the text" } else { "prompt and answer" };
            return Err(EngineError::CacheSize { what, tokens, blocks, block_size, limit });
        }
        if !request.resume.is_empty() {
            self.check_tokens(&request.resume)?;
            if request.prompt.len() + request.resume.len() >= tokens {
                let expected = "fewer tokens than the answer may have";
                return Err(parameter("resume", expected.into(), request.resume.len().to_string()));
            }
        }
        Ok(())
    }

    fn check_embedding(&self, request: &Request) -> Result<(), EngineError> {
        let wrong = |expected: &str, found: &str| {
            Err(EngineError::Parameter { name: "embed", expected: expected.into(), found: found.into() })
        };
        if self.hidden_size == 0 {
            return wrong("a model that was loaded for embeddings", "one that gives logits only");
        }
        let asks_for_an_answer = request.sampling.max_tokens > 0
            || request.prompt_logprobs.is_some()
            || request.constraint.is_some()
            || !request.resume.is_empty();
        if asks_for_an_answer {
            wrong("no answer to be asked for", "max_tokens, a grammar or log-probabilities")
        } else {
            Ok(())
        }
    }

    pub(crate) fn check_tokens(&self, tokens: &[u32]) -> Result<(), EngineError> {
        if tokens.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        let vocab_size = self.model_vocab_size;
        match tokens.iter().find(|id| **id >= vocab_size) {
            Some(id) => Err(EngineError::TokenRange { id: *id, vocab_size }),
            None => Ok(()),
        }
    }
}
