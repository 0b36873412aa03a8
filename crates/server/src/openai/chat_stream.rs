//! Chunks of `/v1/chat/completions`.

use std::sync::Arc;

use qwen_models::tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::{Map, Value, json};

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

#[derive(Debug, Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<ChunkChoice>,
    system_fingerprint: Option<&'static str>,
    /// Absent unless usage was asked for, null until it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
}

#[derive(Debug, Serialize)]
struct ChunkChoice {
    index: usize,
    delta: Value,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<StopReason>,
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

    fn send(&self, choices: Vec<ChunkChoice>, usage: Option<Option<Usage>>, out: &mut Frames) {
        out.data(&Chunk {
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

    fn delta(&self, piece: &Piece) -> Value {
        match piece {
            Piece::Reasoning(text) if self.alias => json!({ "reasoning_content": text, "reasoning": text }),
            Piece::Reasoning(text) => json!({ "reasoning_content": text }),
            Piece::Content(text) => json!({ "content": text }),
            Piece::CallBegin { index, name } => json!({ "tool_calls": [{
                "index": index,
                "id": new_id("call_"),
                "type": "function",
                "function": { "name": name, "arguments": "" },
            }] }),
            Piece::CallArguments { index, text } => {
                json!({ "tool_calls": [{ "index": index, "function": { "arguments": text } }] })
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
        let chunk = |delta: Value, logprobs: Option<ChatLogprobs>| ChunkChoice {
            index: at,
            delta,
            logprobs,
            finish_reason: None,
            stop_reason: None,
        };
        // The role comes with the first token, not before: clients take the first chunk for its time.
        let speaks = !event.pieces.is_empty() || event.finish.is_some();
        if speaks && !std::mem::replace(&mut self.choices[at].begun, true) {
            self.send(vec![chunk(json!({ "role": "assistant", "content": "" }), None)], usage, out);
        }
        for piece in &event.pieces {
            self.choices[at].has_calls |= matches!(piece, Piece::CallBegin { .. });
            let logprobs = self.choices[at].logprobs.take();
            let delta = self.delta(piece);
            self.send(vec![chunk(delta, logprobs)], usage, out);
        }
        if let Some(finish) = &event.finish {
            let logprobs = self.choices[at].logprobs.take();
            let last = ChunkChoice {
                finish_reason: Some(finish_name(finish, self.choices[at].has_calls)),
                stop_reason: StopReason::of(finish),
                ..chunk(Value::Object(Map::new()), logprobs)
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
