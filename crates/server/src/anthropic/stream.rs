//! Named events of `/v1/messages`: blocks open, grow and close one after another.

use serde_json::{Value, json};

use super::{stop_reason, stop_sequence, usage};
use crate::answer::Piece;
use crate::error::ApiError;
use crate::generation::{Event, Tokens};
use crate::openai::new_id;
use crate::sse::{Dialect, Frames};
use qwen_engine::FinishReason;

/// Kind of the block that grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
    Call,
}

/// Events of one message.
#[derive(Debug)]
pub(super) struct MessageStream {
    id: String,
    model: String,
    open: Option<Block>,
    index: usize,
    has_calls: bool,
    begun: bool,
    finish: Option<FinishReason>,
}

impl MessageStream {
    pub(super) const fn new(id: String, model: String) -> Self {
        Self { id, model, open: None, index: 0, has_calls: false, begun: false, finish: None }
    }

    fn close(&mut self, out: &mut Frames) {
        if let Some(block) = self.open.take() {
            if block == Block::Thinking {
                self.delta(&json!({ "type": "signature_delta", "signature": "" }), out);
            }
            out.named("content_block_stop", &json!({ "type": "content_block_stop", "index": self.index }));
            self.index += 1;
        }
    }

    fn open(&mut self, block: Block, content: &Value, out: &mut Frames) {
        self.close(out);
        let event = json!({ "type": "content_block_start", "index": self.index, "content_block": content });
        out.named("content_block_start", &event);
        self.open = Some(block);
    }

    fn delta(&self, delta: &Value, out: &mut Frames) {
        let event = json!({ "type": "content_block_delta", "index": self.index, "delta": delta });
        out.named("content_block_delta", &event);
    }

    /// The message begins when the tokens of its prompt are known.
    fn start(&mut self, tokens: Tokens, out: &mut Frames) {
        if std::mem::replace(&mut self.begun, true) {
            return;
        }
        let message = json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": null,
            "stop_sequence": null,
            "usage": usage(Tokens { completion: 0, ..tokens }),
        });
        out.named("message_start", &json!({ "type": "message_start", "message": message }));
    }
}

impl Dialect for MessageStream {
    fn event(&mut self, event: Event, tokens: Tokens, out: &mut Frames) {
        self.start(tokens, out);
        for piece in event.pieces {
            match piece {
                Piece::Reasoning(text) => {
                    if self.open != Some(Block::Thinking) {
                        let block = json!({ "type": "thinking", "thinking": "", "signature": "" });
                        self.open(Block::Thinking, &block, out);
                    }
                    self.delta(&json!({ "type": "thinking_delta", "thinking": text }), out);
                }
                Piece::Content(text) => {
                    if self.open != Some(Block::Text) {
                        self.open(Block::Text, &json!({ "type": "text", "text": "" }), out);
                    }
                    self.delta(&json!({ "type": "text_delta", "text": text }), out);
                }
                Piece::CallBegin { name, .. } => {
                    self.has_calls = true;
                    let block = json!({ "type": "tool_use", "id": new_id("toolu_"), "name": name, "input": {} });
                    self.open(Block::Call, &block, out);
                }
                Piece::CallArguments { text, .. } => {
                    self.delta(&json!({ "type": "input_json_delta", "partial_json": text }), out);
                }
            }
        }
        self.finish = event.finish.or(self.finish.take());
    }

    fn error(&mut self, error: &ApiError, out: &mut Frames) {
        out.named("error", &error.anthropic_body());
    }

    fn end(&mut self, tokens: Tokens, out: &mut Frames) {
        self.start(tokens, out);
        self.close(out);
        let finish = self.finish.take().unwrap_or(FinishReason::EndOfText);
        let delta = json!({
            "stop_reason": stop_reason(&finish, self.has_calls),
            "stop_sequence": stop_sequence(&finish),
        });
        out.named("message_delta", &json!({ "type": "message_delta", "delta": delta, "usage": usage(tokens) }));
        out.named("message_stop", &json!({ "type": "message_stop" }));
    }
}
