//! What answers of `/v1/responses` look like, whole and as events. For the document alone: the values are made by [`super`] and
//! [`super::stream`], and tests hold them against it.
#![allow(dead_code, reason = "for the document")]

use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

/// A response, whole or at work.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ResponseObject {
    id: String,
    /// `response`.
    object: String,
    /// Seconds since 1970.
    created_at: u64,
    /// `in_progress`, `completed`, `incomplete` or `failed`.
    status: String,
    /// Why it failed.
    error: Option<ResponseError>,
    /// Why it is incomplete.
    incomplete_details: Option<IncompleteDetails>,
    model: String,
    output: Vec<OutputItem>,
    /// Always null: nothing is stored.
    previous_response_id: Option<String>,
    /// Always false.
    store: bool,
    /// Null until it has ended.
    usage: Option<ResponseUsage>,
    instructions: Option<String>,
    max_output_tokens: Option<u64>,
    /// As it came.
    metadata: Value,
    parallel_tool_calls: bool,
    reasoning: ReasoningSettings,
    temperature: f32,
    #[schema(value_type = Object)]
    text: Value,
    /// As it came.
    tool_choice: Value,
    /// As they came.
    #[schema(value_type = Vec<Object>)]
    tools: Value,
    top_p: f32,
    /// `disabled`.
    truncation: String,
}

/// Why a response failed.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ResponseError {
    code: String,
    message: String,
}

/// Why a response is incomplete.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct IncompleteDetails {
    /// `max_output_tokens`.
    reason: String,
}

/// How the model was asked to think.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ReasoningSettings {
    effort: Option<String>,
    /// Always null: thinking is sent whole.
    summary: Option<String>,
}

/// Tokens of a response.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ResponseUsage {
    input_tokens: u64,
    input_tokens_details: InputDetails,
    output_tokens: u64,
    output_tokens_details: OutputDetails,
    total_tokens: u64,
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct InputDetails {
    /// Found in the prefix cache.
    cached_tokens: u64,
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct OutputDetails {
    /// Thinking.
    reasoning_tokens: u64,
}

/// A part of a response. `status` is `in_progress`, `completed` or `incomplete`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum OutputItem {
    /// Thinking.
    Reasoning {
        id: String,
        /// Always empty: thinking is sent whole.
        #[schema(value_type = Vec<Object>)]
        summary: Vec<Value>,
        content: Vec<OutputPart>,
        status: String,
    },
    /// Text.
    Message {
        id: String,
        status: String,
        /// `assistant`.
        role: String,
        content: Vec<OutputPart>,
    },
    /// A call of a function.
    FunctionCall {
        id: String,
        call_id: String,
        name: String,
        /// A JSON text.
        arguments: String,
        status: String,
    },
}

/// A part of an item.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum OutputPart {
    /// Thinking.
    ReasoningText { text: String },
    /// Text.
    OutputText {
        text: String,
        /// Always empty.
        #[schema(value_type = Vec<Object>)]
        annotations: Vec<Value>,
        /// Always empty.
        #[schema(value_type = Vec<Object>)]
        logprobs: Vec<Value>,
    },
}

/// An event of a response; its name is `type`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type")]
pub(crate) enum ResponseEvent {
    #[serde(rename = "response.created")]
    Created { sequence_number: u64, response: ResponseObject },
    #[serde(rename = "response.in_progress")]
    InProgress { sequence_number: u64, response: ResponseObject },
    #[serde(rename = "response.output_item.added")]
    ItemAdded { sequence_number: u64, output_index: usize, item: OutputItem },
    #[serde(rename = "response.content_part.added")]
    PartAdded { sequence_number: u64, item_id: String, output_index: usize, content_index: usize, part: OutputPart },
    #[serde(rename = "response.reasoning_text.delta")]
    ReasoningDelta { sequence_number: u64, item_id: String, output_index: usize, content_index: usize, delta: String },
    #[serde(rename = "response.reasoning_text.done")]
    ReasoningDone { sequence_number: u64, item_id: String, output_index: usize, content_index: usize, text: String },
    #[serde(rename = "response.output_text.delta")]
    TextDelta {
        sequence_number: u64,
        item_id: String,
        output_index: usize,
        content_index: usize,
        delta: String,
        /// Always empty.
        #[schema(value_type = Vec<Object>)]
        logprobs: Vec<Value>,
    },
    #[serde(rename = "response.output_text.done")]
    TextDone {
        sequence_number: u64,
        item_id: String,
        output_index: usize,
        content_index: usize,
        text: String,
        /// Always empty.
        #[schema(value_type = Vec<Object>)]
        logprobs: Vec<Value>,
    },
    #[serde(rename = "response.function_call_arguments.delta")]
    ArgumentsDelta { sequence_number: u64, item_id: String, output_index: usize, delta: String },
    #[serde(rename = "response.function_call_arguments.done")]
    ArgumentsDone { sequence_number: u64, item_id: String, output_index: usize, name: String, arguments: String },
    #[serde(rename = "response.content_part.done")]
    PartDone { sequence_number: u64, item_id: String, output_index: usize, content_index: usize, part: OutputPart },
    #[serde(rename = "response.output_item.done")]
    ItemDone { sequence_number: u64, output_index: usize, item: OutputItem },
    #[serde(rename = "response.completed")]
    Completed { sequence_number: u64, response: ResponseObject },
    #[serde(rename = "response.incomplete")]
    Incomplete { sequence_number: u64, response: ResponseObject },
    #[serde(rename = "response.failed")]
    Failed { sequence_number: u64, response: ResponseObject },
}
