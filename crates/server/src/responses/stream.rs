//! Named events of `/v1/responses`: items open, grow and close one after another.

use serde_json::{Value, json};

use super::{Head, call_item, message_item, reasoning_item, text_part};
use crate::answer::Piece;
use crate::error::ApiError;
use crate::generation::{Event, Tokens};
use crate::openai::new_id;
use crate::sse::{Dialect, Frames};

/// The item that grows.
#[derive(Debug)]
enum Open {
    Reasoning { id: String, text: String },
    Message { id: String, text: String },
    Call { id: String, call_id: String, name: String, arguments: String },
}

/// Events of one response.
#[derive(Debug)]
pub(super) struct ResponseStream {
    head: Head,
    output: Vec<Value>,
    open: Option<Open>,
    sequence: u64,
    cut: bool,
}

impl ResponseStream {
    pub(super) const fn new(head: Head) -> Self {
        Self { head, output: Vec::new(), open: None, sequence: 0, cut: false }
    }

    fn send(&mut self, name: &str, mut value: Value, out: &mut Frames) {
        value["type"] = name.into();
        value["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        out.named(name, &value);
    }

    fn open(&mut self, open: Open, out: &mut Frames) {
        self.close("completed", out);
        let index = self.output.len();
        let (item, part) = match &open {
            Open::Reasoning { id, .. } => {
                let mut item = reasoning_item(id, "", "in_progress");
                item["content"] = json!([]);
                (item, Some(json!({ "type": "reasoning_text", "text": "" })))
            }
            Open::Message { id, .. } => {
                let mut item = message_item(id, "", "in_progress");
                item["content"] = json!([]);
                (item, Some(text_part("")))
            }
            Open::Call { id, call_id, name, .. } => (call_item(id, call_id, name, "", "in_progress"), None),
        };
        let id = item["id"].clone();
        self.send("response.output_item.added", json!({ "output_index": index, "item": item }), out);
        if let Some(part) = part {
            let value = json!({ "item_id": id, "output_index": index, "content_index": 0, "part": part });
            self.send("response.content_part.added", value, out);
        }
        self.open = Some(open);
    }

    fn close(&mut self, status: &str, out: &mut Frames) {
        let index = self.output.len();
        let Some(open) = self.open.take() else { return };
        let item = match open {
            Open::Reasoning { id, text } => {
                let place = json!({ "item_id": id, "output_index": index, "content_index": 0 });
                self.send("response.reasoning_text.done", with(&place, "text", text.as_str().into()), out);
                let part = json!({ "type": "reasoning_text", "text": text });
                self.send("response.content_part.done", with(&place, "part", part), out);
                reasoning_item(&id, &text, status)
            }
            Open::Message { id, text } => {
                let place = json!({ "item_id": id, "output_index": index, "content_index": 0 });
                let done = with(&with(&place, "text", text.as_str().into()), "logprobs", json!([]));
                self.send("response.output_text.done", done, out);
                self.send("response.content_part.done", with(&place, "part", text_part(&text)), out);
                message_item(&id, &text, status)
            }
            Open::Call { id, call_id, name, arguments } => {
                let done = json!({ "item_id": id, "output_index": index, "name": name, "arguments": arguments });
                self.send("response.function_call_arguments.done", done, out);
                call_item(&id, &call_id, &name, &arguments, status)
            }
        };
        self.send("response.output_item.done", json!({ "output_index": index, "item": item }), out);
        self.output.push(item);
    }

    fn grow(&mut self, piece: &Piece, out: &mut Frames) {
        match piece {
            Piece::Reasoning(_) if !matches!(self.open, Some(Open::Reasoning { .. })) => {
                self.open(Open::Reasoning { id: new_id("rs_"), text: String::new() }, out);
            }
            Piece::Content(_) if !matches!(self.open, Some(Open::Message { .. })) => {
                self.open(Open::Message { id: new_id("msg_"), text: String::new() }, out);
            }
            Piece::CallBegin { name, .. } => {
                let (id, call_id) = (new_id("fc_"), new_id("call_"));
                self.open(Open::Call { id, call_id, name: name.clone(), arguments: String::new() }, out);
                return;
            }
            _ => {}
        }
        let index = self.output.len();
        let place = |id: &str| json!({ "item_id": id, "output_index": index });
        let (name, value) = match (&mut self.open, piece) {
            (Some(Open::Reasoning { id, text }), Piece::Reasoning(delta)) => {
                text.push_str(delta);
                let value = with(&with(&place(id), "content_index", 0.into()), "delta", delta.as_str().into());
                ("response.reasoning_text.delta", value)
            }
            (Some(Open::Message { id, text }), Piece::Content(delta)) => {
                text.push_str(delta);
                let value = with(&with(&place(id), "content_index", 0.into()), "delta", delta.as_str().into());
                ("response.output_text.delta", with(&value, "logprobs", json!([])))
            }
            (Some(Open::Call { id, arguments, .. }), Piece::CallArguments { text, .. }) => {
                arguments.push_str(text);
                ("response.function_call_arguments.delta", with(&place(id), "delta", text.as_str().into()))
            }
            _ => return,
        };
        self.send(name, value, out);
    }
}

fn with(value: &Value, name: &str, entry: Value) -> Value {
    let mut value = value.clone();
    value[name] = entry;
    value
}

impl Dialect for ResponseStream {
    fn begin(&mut self, out: &mut Frames) {
        let response = self.head.object("in_progress", &[], None, None);
        self.send("response.created", json!({ "response": response }), out);
        self.send("response.in_progress", json!({ "response": response }), out);
    }

    fn event(&mut self, event: Event, _tokens: Tokens, out: &mut Frames) {
        for piece in &event.pieces {
            self.grow(piece, out);
        }
        self.cut |= event.finish == Some(qwen_engine::FinishReason::Length);
    }

    fn error(&mut self, error: &ApiError, out: &mut Frames) {
        self.close("incomplete", out);
        let mut response = self.head.object("failed", &self.output, None, None);
        let code = error.code.unwrap_or("server_error");
        response["error"] = json!({ "code": code, "message": error.message });
        self.send("response.failed", json!({ "response": response }), out);
    }

    fn end(&mut self, tokens: Tokens, out: &mut Frames) {
        if self.open.is_none() && self.output.is_empty() {
            self.open(Open::Message { id: new_id("msg_"), text: String::new() }, out);
        }
        let (name, status, reason) = match self.cut {
            true => ("response.incomplete", "incomplete", Some("max_output_tokens")),
            false => ("response.completed", "completed", None),
        };
        self.close(status, out);
        let response = self.head.object(status, &self.output, Some(tokens), reason);
        self.send(name, json!({ "response": response }), out);
    }
}
