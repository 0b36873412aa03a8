//! What answers of `/v1/messages` look like, whole and as events. For the document alone: the values are made by [`super`] and
//! [`super::stream`], and tests hold them against it.
#![allow(dead_code, reason = "for the document")]

use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

/// A message, whole or as it begins.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct MessageObject {
    id: String,
    /// `message`.
    #[serde(rename = "type")]
    kind: String,
    /// `assistant`.
    role: String,
    model: String,
    content: Vec<ContentBlock>,
    /// `end_turn`, `max_tokens`, `stop_sequence` or `tool_use`; null as it begins.
    stop_reason: Option<String>,
    /// The stop text that ended it.
    stop_sequence: Option<String>,
    usage: MessageUsage,
}

/// Tokens of a message.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct MessageUsage {
    /// Of the prompt, but for those found in the prefix cache.
    input_tokens: u64,
    /// Found in the prefix cache.
    cache_read_input_tokens: u64,
    /// Always 0.
    cache_creation_input_tokens: u64,
    output_tokens: u64,
}

/// A part of a message.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum ContentBlock {
    /// Thinking.
    Thinking {
        thinking: String,
        /// Always empty.
        signature: String,
    },
    /// Text.
    Text { text: String },
    /// A call of a function.
    ToolUse {
        id: String,
        name: String,
        /// Arguments; in a stream empty, they follow as texts.
        input: Value,
    },
}

/// More of a block.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type")]
pub(crate) enum BlockDelta {
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: String },
    #[serde(rename = "signature_delta")]
    Signature {
        /// Always empty.
        signature: String,
    },
    #[serde(rename = "text_delta")]
    Text { text: String },
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: String },
}

/// How a message ended.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct MessageEnd {
    /// `end_turn`, `max_tokens`, `stop_sequence` or `tool_use`.
    stop_reason: String,
    /// The stop text that ended it.
    stop_sequence: Option<String>,
}

/// What went wrong.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct AnthropicErrorDetail {
    /// Kind of error.
    #[serde(rename = "type")]
    kind: String,
    /// One sentence for people.
    message: String,
}

/// An event of a message; its name is `type`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum MessageEvent {
    MessageStart {
        message: MessageObject,
    },
    ContentBlockStart {
        index: usize,
        content_block: ContentBlock,
    },
    ContentBlockDelta {
        index: usize,
        delta: BlockDelta,
    },
    ContentBlockStop {
        index: usize,
    },
    MessageDelta {
        delta: MessageEnd,
        usage: MessageUsage,
    },
    MessageStop,
    /// The answer ended by an error; nothing follows.
    Error {
        error: AnthropicErrorDetail,
    },
}
