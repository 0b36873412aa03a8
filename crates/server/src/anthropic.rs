//! `POST /v1/messages` and `/v1/messages/count_tokens`: the protocol of Anthropic, translated into a chat request.

mod document;
mod input;
mod stream;

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use qwen_engine::FinishReason;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::error::{ApiError, Words};
use crate::gate::RequestId;
use crate::generation::{Tokens, collect, start};
use crate::input::body::Body;
use crate::input::parameters::{Handling, Parameters, Row};
use crate::input::sampling::SamplingFields;
use crate::keys::Client;
use crate::openai::chat::{ChatFields, Prepared, prepare};
use crate::openai::new_id;
use crate::{Server, gate, sse};
use document::{AnthropicErrorDetail, MessageEvent, MessageObject};
use stream::MessageStream;

/// A request.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(crate) struct MessagesFields {
    model: Option<String>,
    /// Most tokens of the answer, thinking included.
    #[schema(required = true)]
    max_tokens: Option<u64>,
    /// `user` and `assistant` in turn; content is a text or a list of blocks.
    #[schema(value_type = Vec<Object>, required = true)]
    messages: Value,
    /// A text or a list of text blocks.
    #[schema(value_type = Option<Object>)]
    system: Option<Value>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    stop_sequences: Option<Vec<String>>,
    stream: bool,
    /// `{"name", "description", "input_schema"}`.
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Value>,
    /// `{"type": "auto" | "any" | "tool" | "none", "name"}`.
    #[schema(value_type = Option<Object>)]
    tool_choice: Option<Map<String, Value>>,
    /// `{"type": "enabled" | "disabled"}`.
    #[schema(value_type = Option<Object>)]
    thinking: Option<Value>,
    /// The same seed gives the same answer.
    seed: Option<i64>,
}

const FIELDS: &[Row] = &[
    ("model", Handling::Used),
    ("max_tokens", Handling::Used),
    ("messages", Handling::Used),
    ("system", Handling::Used),
    ("temperature", Handling::Used),
    ("top_p", Handling::Used),
    ("top_k", Handling::Used),
    ("stop_sequences", Handling::Used),
    ("stream", Handling::Used),
    ("tools", Handling::Used),
    ("tool_choice", Handling::Used),
    ("thinking", Handling::Used),
    ("seed", Handling::Used),
    ("metadata", Handling::NoEffect("a label of the caller")),
    ("service_tier", Handling::NoEffect("there is one tier")),
    ("context_management", Handling::Refused("a prompt is never cut silently")),
    ("mcp_servers", Handling::Refused("this server calls no others")),
    ("container", Handling::Refused("this server runs no code")),
];

/// Names of a chat's parameters in this protocol.
const WORDS: Words = &[
    ("stop", "stop_sequences"),
    ("function.name", "name"),
    ("function.description", "description"),
    ("function.parameters", "input_schema"),
    ("function.strict", "strict"),
    ("{type: function, function: {name}}", "{type: tool, name}"),
];

/// Parameters of the endpoint.
#[derive(Debug)]
pub(crate) struct MessagesParameters;

impl Parameters for MessagesParameters {
    const ENDPOINT: &'static str = "/v1/messages";
    const TABLES: &'static [&'static [Row]] = &[FIELDS];
}

/// Body of an error in this protocol.
#[derive(Debug, Deserialize, ToSchema)]
#[allow(dead_code, reason = "for the document; made by crate::error")]
pub(crate) struct AnthropicError {
    /// `error`.
    #[serde(rename = "type")]
    kind: String,
    error: AnthropicErrorDetail,
}

/// Tokens of a prompt.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TokenCount {
    input_tokens: usize,
}

fn usage(tokens: Tokens) -> Value {
    json!({
        "input_tokens": tokens.prompt - tokens.cached.min(tokens.prompt),
        "cache_read_input_tokens": tokens.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": tokens.completion,
    })
}

fn stop_reason(finish: &FinishReason, has_calls: bool) -> &'static str {
    match finish {
        FinishReason::Length => "max_tokens",
        FinishReason::StopText(_) => "stop_sequence",
        _ if has_calls => "tool_use",
        _ => "end_turn",
    }
}

fn stop_sequence(finish: &FinishReason) -> Value {
    match finish {
        FinishReason::StopText(text) => text.as_str().into(),
        _ => Value::Null,
    }
}

async fn prepared(server: &Server, fields: &MessagesFields, request_id: &RequestId) -> Result<Prepared, ApiError> {
    let mut unknown = Vec::new();
    let (choice, parallel) = input::tool_choice(fields.tool_choice.as_ref())?;
    let chat = ChatFields {
        model: fields.model.clone(),
        messages: Value::Array(input::messages(fields.system.as_ref(), &fields.messages, &mut unknown)?),
        max_tokens: fields.max_tokens,
        tools: fields.tools.as_ref().map(input::tools).transpose()?,
        tool_choice: choice,
        parallel_tool_calls: parallel,
        thinking: fields.thinking.clone(),
        stream: fields.stream,
        ..ChatFields::default()
    };
    let sampling = SamplingFields {
        temperature: fields.temperature,
        top_p: fields.top_p,
        top_k: fields.top_k,
        seed: fields.seed,
        stop: fields.stop_sequences.clone().map(crate::input::body::OneOrMany::Many),
        ..SamplingFields::default()
    };
    let prepared = prepare(server, &chat, &sampling, &json!({}), request_id).await;
    let mut prepared = prepared.map_err(|error| error.in_words(WORDS))?;
    prepared.job.words = WORDS;
    prepared.unknown.extend(unknown);
    Ok(prepared)
}

/// Answer a conversation
#[utoipa::path(
    post,
    path = "/v1/messages",
    tag = "Anthropic",
    request_body = MessagesFields,
    responses(
        (status = 200, description = "The message; with `stream` a stream of named events", content(
            (MessageObject = "application/json"),
            (MessageEvent = "text/event-stream"),
        )),
        (status = "4XX", description = "The request is refused", body = AnthropicError),
        (status = "5XX", description = "The server can't answer now", body = AnthropicError),
    )
)]
pub(crate) async fn messages(
    State(server): State<Arc<Server>>,
    Extension(client): Extension<Arc<Client>>,
    Extension(request_id): Extension<RequestId>,
    body: Body<MessagesParameters>,
) -> Result<Response, ApiError> {
    let fields: MessagesFields = body.read()?;
    if fields.max_tokens.is_none() {
        return Err(ApiError::invalid("max_tokens", "max_tokens: this protocol wants it; expected a number of tokens"));
    }
    let prepared = prepared(&server, &fields, &request_id).await?;
    let id = new_id("msg_");
    let running = start(&server, &client, prepared.job).await?;
    let response = if fields.stream {
        sse::response(running, MessageStream::new(id, prepared.name), server.config.ping_interval)
    } else {
        let (answers, tokens) = collect(running).await?;
        let answer = answers.into_iter().next().unwrap_or_default();
        let finish = answer.finish.unwrap_or(FinishReason::EndOfText);
        let whole = answer.whole;
        let mut content = Vec::new();
        if !whole.reasoning.is_empty() {
            content.push(json!({ "type": "thinking", "thinking": whole.reasoning, "signature": "" }));
        }
        if !whole.content.is_empty() {
            content.push(json!({ "type": "text", "text": whole.content }));
        }
        for (name, arguments) in &whole.calls {
            // Arguments that were cut off are no JSON; an object is what clients can read.
            let input = serde_json::from_str::<Value>(arguments).unwrap_or_else(|_| json!({}));
            content.push(json!({ "type": "tool_use", "id": new_id("toolu_"), "name": name, "input": input }));
        }
        Json(json!({
            "id": id,
            "type": "message",
            "role": "assistant",
            "model": prepared.name,
            "content": content,
            "stop_reason": stop_reason(&finish, !whole.calls.is_empty()),
            "stop_sequence": stop_sequence(&finish),
            "usage": usage(tokens),
        }))
        .into_response()
    };
    Ok(gate::tell_unknown(response, &[body.unknown, prepared.unknown].concat()))
}

/// Count the tokens of a prompt
#[utoipa::path(
    post,
    path = "/v1/messages/count_tokens",
    tag = "Anthropic",
    request_body = MessagesFields,
    responses(
        (status = 200, description = "Tokens of the prompt", body = TokenCount),
        (status = "4XX", description = "The request is refused", body = AnthropicError),
        (status = "5XX", description = "The server can't answer now", body = AnthropicError),
    )
)]
pub(crate) async fn count_tokens(
    State(server): State<Arc<Server>>,
    Extension(request_id): Extension<RequestId>,
    body: Body<MessagesParameters>,
) -> Result<Response, ApiError> {
    let fields: MessagesFields = body.read()?;
    let prepared = prepared(&server, &fields, &request_id).await?;
    let input_tokens = prepared.job.prompts.iter().map(Vec::len).sum();
    let unknown = [body.unknown, prepared.unknown].concat();
    Ok(gate::tell_unknown(Json(TokenCount { input_tokens }).into_response(), &unknown))
}
