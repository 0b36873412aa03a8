//! Chunks of `/v1/chat/completions`.

use std::sync::Arc;

use qwen_models::tokenizer::Tokenizer;
use serde::Serialize;
use utoipa::ToSchema;

use super::logprobs::ChatLogprobs;
use super::usage::{StreamOptions, Usage};
use super::{new_id, now};
use crate::answer::Piece;
use crate::error::ApiError;
use crate::generation::{Event, StopReason, Tokens, finish_name};
use crate::sse::{Dialect, Frames};

#[derive(Debug, Default)]
struct Choice {
    begun: bool,
    has_calls: bool,
    logprobs: ChatLogprobs,
}

/// Chunks of one response.
#[derive(Debug)]
pub(crate) struct ChatStream {
    id: String,
    created: u64,
    model: String,
    choices: Vec<Choice>,
    options: StreamOptions,
    logprobs: bool,
    alias: bool,
    tokenizer: Arc<Tokenizer>,
}

/// A chunk of an answer.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatChunk<'a> {
    id: &'a str,
    /// `chat.completion.chunk`.
    object: &'static str,
    /// Seconds since 1970.
    created: u64,
    model: &'a str,
    /// One; none in the last chunk, if usage was asked for.
    choices: Vec<ChunkChoice<'a>>,
    system_fingerprint: Option<&'static str>,
    /// Absent unless usage was asked for, null until it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
}

/// What a chunk adds to an answer.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChunkChoice<'a> {
    index: usize,
    delta: ChatDelta<'a>,
    logprobs: Option<ChatLogprobs>,
    /// `stop`, `length` or `tool_calls`; null in chunks but the last.
    finish_reason: Option<&'static str>,
    /// The stop text or stop token that ended the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<StopReason>,
}

/// What a chunk adds to the message.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct ChatDelta<'a> {
    /// `assistant`, in the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallDelta<'a>>,
}

/// A call that begins, or more of its arguments.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct CallDelta<'a> {
    /// Which call of the message.
    index: usize,
    /// Where the call begins.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    /// `function`, where the call begins.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: FunctionDelta<'a>,
}

/// Which function, and more of the text of its arguments.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct FunctionDelta<'a> {
    /// Where the call begins.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

/// A part that does not end the answer.
const fn chunk(index: usize, delta: ChatDelta<'_>, logprobs: Option<ChatLogprobs>) -> ChunkChoice<'_> {
    ChunkChoice { index, delta, logprobs, finish_reason: None, stop_reason: None }
}

impl ChatStream {
    pub(crate) fn new(
        model: String,
        n: usize,
        options: StreamOptions,
        logprobs: bool,
        alias: bool,
        tokenizer: Arc<Tokenizer>,
    ) -> Self {
        let choices = std::iter::repeat_with(Choice::default).take(n).collect();
        Self { id: new_id("chatcmpl-"), created: now(), model, choices, options, logprobs, alias, tokenizer }
    }

    fn send(&self, choices: Vec<ChunkChoice<'_>>, usage: Option<Option<Usage>>, out: &mut Frames) {
        out.data(&ChatChunk {
            id: &self.id,
            object: "chat.completion.chunk",
            created: self.created,
            model: &self.model,
            choices,
            system_fingerprint: None,
            usage,
        });
    }

    /// Usage of a chunk that is not the last.
    fn running_usage(&self, tokens: Tokens) -> Option<Option<Usage>> {
        match self.options {
            StreamOptions { continuous_usage_stats: true, include_usage: true, .. } => Some(Some(tokens.into())),
            StreamOptions { include_usage: true, .. } => Some(None),
            _ => None,
        }
    }

    fn delta<'a>(&self, piece: &'a Piece) -> ChatDelta<'a> {
        let none = ChatDelta::default();
        match piece {
            Piece::Reasoning(text) => {
                ChatDelta { reasoning_content: Some(text), reasoning: self.alias.then_some(text), ..none }
            }
            Piece::Content(text) => ChatDelta { content: Some(text), ..none },
            Piece::CallBegin { index, name } => {
                let function = FunctionDelta { name: Some(name), arguments: "" };
                let call = CallDelta { index: *index, id: Some(new_id("call_")), kind: Some("function"), function };
                ChatDelta { tool_calls: vec![call], ..none }
            }
            Piece::CallArguments { index, text } => {
                let function = FunctionDelta { name: None, arguments: text };
                ChatDelta { tool_calls: vec![CallDelta { index: *index, id: None, kind: None, function }], ..none }
            }
        }
    }
}

impl Dialect for ChatStream {
    fn event(&mut self, event: Event, tokens: Tokens, out: &mut Frames) {
        let at = event.choice;
        if let Some(token) = event.token.as_ref().filter(|_| self.logprobs) {
            self.choices[at].logprobs.add(&self.tokenizer, token);
        }
        let usage = self.running_usage(tokens);
        // The role comes with the first token, not before: clients take the first chunk for its time.
        let speaks = !event.pieces.is_empty() || event.finish.is_some();
        if speaks && !std::mem::replace(&mut self.choices[at].begun, true) {
            let first = ChatDelta { role: Some("assistant"), content: Some(""), ..ChatDelta::default() };
            self.send(vec![chunk(at, first, None)], usage, out);
        }
        for piece in &event.pieces {
            self.choices[at].has_calls |= matches!(piece, Piece::CallBegin { .. });
            let logprobs = self.choices[at].logprobs.take();
            let delta = self.delta(piece);
            self.send(vec![chunk(at, delta, logprobs)], usage, out);
        }
        if let Some(finish) = &event.finish {
            let logprobs = self.choices[at].logprobs.take();
            let last = ChunkChoice {
                finish_reason: Some(finish_name(finish, self.choices[at].has_calls)),
                stop_reason: StopReason::of(finish),
                ..chunk(at, ChatDelta::default(), logprobs)
            };
            self.send(vec![last], usage, out);
        }
    }

    fn error(&mut self, error: &ApiError, out: &mut Frames) {
        out.data(&error.body());
        out.done();
    }

    fn end(&mut self, tokens: Tokens, out: &mut Frames) {
        if self.options.include_usage {
            self.send(Vec::new(), Some(Some(tokens.into())), out);
        }
        out.done();
    }
}
