//! `POST /v1/responses`, stateless: the newer protocol of OpenAI, translated into a chat request.
//!
//! Nothing is stored, so there is no earlier response to refer to; a client sends the whole conversation.

mod document;
mod input;
mod stream;

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::error::{ApiError, ErrorBody, Words};
use crate::gate::RequestId;
use crate::generation::{Tokens, collect, start};
use crate::input::body::Body;
use crate::input::parameters::{Handling, Parameters, Row, check_object};
use crate::input::sampling::{OTHERS, SAMPLING, SamplingFields};
use crate::keys::Client;
use crate::openai::chat::{ChatFields, prepare};
use crate::openai::{new_id, now};
use crate::{Server, gate, sse};
use document::{ResponseEvent, ResponseObject};
use stream::ResponseStream;

/// A request.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(crate) struct ResponsesFields {
    model: Option<String>,
    /// A text, or a list of items: messages, calls and their outputs.
    #[schema(value_type = Object, required = true)]
    input: Value,
    /// A system message before the input.
    instructions: Option<String>,
    /// Most tokens of the answer, thinking included.
    max_output_tokens: Option<u64>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    /// Functions: `{"type": "function", "name", "description", "parameters"}`.
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Value>,
    /// `none`, `auto`, `required`, or `{"type": "function", "name"}`.
    #[schema(value_type = Option<Object>)]
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    /// `{"format": …}` as `response_format` of a chat.
    #[schema(value_type = Option<Object>)]
    text: Option<Map<String, Value>>,
    /// `{"effort": "none" | "low" | …}`.
    #[schema(value_type = Option<Object>)]
    reasoning: Option<Map<String, Value>>,
    /// Answer piece by piece.
    stream: bool,
    /// `disabled`: a prompt is never cut silently.
    truncation: Option<String>,
    /// Returned as it came.
    #[schema(value_type = Option<Object>)]
    metadata: Option<Value>,
    /// Whether to think, as Qwen's API has it.
    enable_thinking: Option<bool>,
    /// Variables for the chat template.
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Map<String, Value>>,
}

/// Names of a chat's parameters in this protocol.
const WORDS: Words = &[
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("messages", "input"),
    ("response_format.json_schema.schema", "text.format.schema"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("function.name", "name"),
    ("function.description", "description"),
    ("function.parameters", "parameters"),
    ("function.strict", "strict"),
    ("{type: function, function: {name}}", "{type: function, name}"),
];

/// Entries of `text` and of `reasoning`.
const TEXT: &[Row] =
    &[("format", Handling::Used), ("verbosity", Handling::RefusedUnless("\"medium\"", "say it in the prompt"))];
const REASONING: &[Row] = &[
    ("effort", Handling::Used),
    ("summary", Handling::NoEffect("thinking is sent whole")),
    ("generate_summary", Handling::NoEffect("thinking is sent whole")),
];

const FIELDS: &[Row] = &[
    ("model", Handling::Used),
    ("input", Handling::Used),
    ("instructions", Handling::Used),
    ("max_output_tokens", Handling::Used),
    ("tools", Handling::Used),
    ("tool_choice", Handling::Used),
    ("parallel_tool_calls", Handling::Used),
    ("text", Handling::Used),
    ("reasoning", Handling::Used),
    ("stream", Handling::Used),
    ("truncation", Handling::Used),
    ("metadata", Handling::Used),
    ("chat_template_kwargs", Handling::Used),
    ("enable_thinking", Handling::Used),
    ("store", Handling::NoEffect("nothing is stored; the response says store: false")),
    ("include", Handling::NoEffect("what there is, is sent; nothing is encrypted")),
    ("stream_options", Handling::NoEffect("usage is in the last event")),
    ("previous_response_id", Handling::Refused("nothing is stored; send the whole conversation as input")),
    ("conversation", Handling::Refused("nothing is stored; send the whole conversation as input")),
    ("background", Handling::Refused("nothing is stored; use stream")),
    ("prompt", Handling::Refused("there are no stored prompts; use instructions and input")),
    ("max_tool_calls", Handling::Refused("this server runs no tools of its own")),
    ("n", Handling::RefusedUnless("1", "use /v1/chat/completions, or send several requests")),
    ("return_token_ids", Handling::Refused("use /v1/chat/completions")),
    ("top_logprobs", Handling::Refused("use /v1/chat/completions")),
];

/// Parameters of the endpoint.
#[derive(Debug)]
pub(crate) struct ResponsesParameters;

impl Parameters for ResponsesParameters {
    const ENDPOINT: &'static str = "/v1/responses";
    const TABLES: &'static [&'static [Row]] = &[FIELDS, SAMPLING, OTHERS];
}

/// What every form of a response repeats.
#[derive(Debug, Clone)]
pub(crate) struct Head {
    id: String,
    created: u64,
    model: String,
    fields: Value,
}

impl Head {
    /// A response in a state.
    fn object(&self, status: &str, output: &[Value], tokens: Option<Tokens>, reason: Option<&str>) -> Value {
        let usage = tokens.map(|tokens| {
            json!({
                "input_tokens": tokens.prompt,
                "input_tokens_details": { "cached_tokens": tokens.cached },
                "output_tokens": tokens.completion,
                "output_tokens_details": { "reasoning_tokens": tokens.reasoning },
                "total_tokens": tokens.prompt + tokens.completion,
            })
        });
        let mut object = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": null,
            "incomplete_details": reason.map(|reason| json!({ "reason": reason })),
            "model": self.model,
            "output": output,
            "previous_response_id": null,
            "store": false,
            "usage": usage,
        });
        if let (Some(object), Some(fields)) = (object.as_object_mut(), self.fields.as_object()) {
            object.extend(fields.clone());
        }
        object
    }
}

/// Answer a conversation (stateless)
#[utoipa::path(
    post,
    path = "/v1/responses",
    tag = "OpenAI",
    request_body = ResponsesFields,
    responses(
        (status = 200, description = "The response; with `stream` a stream of named events", content(
            (ResponseObject = "application/json"),
            (ResponseEvent = "text/event-stream"),
        )),
        (status = "4XX", description = "The request is refused", body = ErrorBody),
        (status = "5XX", description = "The server can't answer now", body = ErrorBody),
    )
)]
pub(crate) async fn respond(
    State(server): State<Arc<Server>>,
    Extension(client): Extension<Arc<Client>>,
    Extension(request_id): Extension<RequestId>,
    body: Body<ResponsesParameters>,
) -> Result<Response, ApiError> {
    let fields: ResponsesFields = body.read()?;
    let sampling: SamplingFields = body.read()?;
    let mut unknown = body.unknown;
    let (chat, extra) = translate(&fields, &mut unknown)?;
    let prepared = prepare(&server, &chat, &sampling, &extra, &request_id).await;
    let mut prepared = prepared.map_err(|error| error.in_words(WORDS))?;
    prepared.job.words = WORDS;
    let head = Head {
        id: new_id("resp_"),
        created: now(),
        model: prepared.name,
        fields: json!({
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata.unwrap_or_else(|| json!({})),
            "parallel_tool_calls": fields.parallel_tool_calls.unwrap_or(true),
            "reasoning": { "effort": fields.reasoning.as_ref().and_then(|r| r.get("effort")), "summary": null },
            "temperature": prepared.job.sampling.temperature,
            "text": fields.text.map_or_else(|| json!({ "format": { "type": "text" } }), Value::Object),
            "tool_choice": fields.tool_choice.unwrap_or_else(|| "auto".into()),
            "tools": fields.tools.unwrap_or_else(|| json!([])),
            "top_p": prepared.job.sampling.top_p,
            "truncation": "disabled",
        }),
    };
    let running = start(&server, &client, prepared.job).await?;
    let response = if fields.stream {
        sse::response(running, ResponseStream::new(head), server.config.ping_interval)
    } else {
        let (answers, tokens) = collect(running).await?;
        let mut output = Vec::new();
        let mut cut = false;
        for answer in answers {
            cut |= answer.finish == Some(qwen_engine::FinishReason::Length);
            let state = if cut { "incomplete" } else { "completed" };
            if !answer.whole.reasoning.is_empty() {
                output.push(reasoning_item(&new_id("rs_"), &answer.whole.reasoning, state));
            }
            if !answer.whole.content.is_empty() || answer.whole.calls.is_empty() {
                output.push(message_item(&new_id("msg_"), &answer.whole.content, state));
            }
            for (name, arguments) in &answer.whole.calls {
                output.push(call_item(&new_id("fc_"), &new_id("call_"), name, arguments, state));
            }
        }
        let (status, reason) = if cut { ("incomplete", Some("max_output_tokens")) } else { ("completed", None) };
        Json(head.object(status, &output, Some(tokens), reason)).into_response()
    };
    Ok(gate::tell_unknown(response, &unknown))
}

/// The same as a chat request: its fields, and what is read from the body itself.
fn translate(fields: &ResponsesFields, unknown: &mut Vec<String>) -> Result<(ChatFields, Value), ApiError> {
    if let Some(truncation) = fields.truncation.as_deref().filter(|truncation| *truncation != "disabled") {
        let message = format!("truncation: expected disabled, found {truncation:?}: a prompt is never cut silently");
        return Err(ApiError::unsupported("truncation", message));
    }
    let mut extra = Map::new();
    if let Some(text) = &fields.text {
        check_object("text", text, TEXT)?;
        if let Some(format) = text.get("format") {
            extra.insert("response_format".into(), format.clone());
        }
    }
    let mut effort = None;
    if let Some(reasoning) = &fields.reasoning {
        check_object("reasoning", reasoning, REASONING)?;
        effort = match reasoning.get("effort") {
            None | Some(Value::Null) => None,
            Some(Value::String(effort)) => Some(effort.clone()),
            Some(_) => return Err(ApiError::invalid("reasoning.effort", "reasoning.effort: expected a text")),
        };
    }
    let chat = ChatFields {
        model: fields.model.clone(),
        messages: Value::Array(input::messages(fields.instructions.as_deref(), &fields.input, unknown)?),
        max_completion_tokens: fields.max_output_tokens,
        tools: fields.tools.as_ref().map(input::tools).transpose()?,
        tool_choice: fields.tool_choice.clone(),
        parallel_tool_calls: fields.parallel_tool_calls,
        reasoning_effort: effort,
        enable_thinking: fields.enable_thinking,
        chat_template_kwargs: fields.chat_template_kwargs.clone(),
        stream: fields.stream,
        ..ChatFields::default()
    };
    Ok((chat, Value::Object(extra)))
}

fn reasoning_item(id: &str, text: &str, status: &str) -> Value {
    let content = json!([{ "type": "reasoning_text", "text": text }]);
    json!({ "type": "reasoning", "id": id, "summary": [], "content": content, "status": status })
}

fn text_part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
}

fn message_item(id: &str, text: &str, status: &str) -> Value {
    json!({ "type": "message", "id": id, "status": status, "role": "assistant", "content": [text_part(text)] })
}

fn call_item(id: &str, call_id: &str, name: &str, arguments: &str, status: &str) -> Value {
    json!({
        "type": "function_call", "id": id, "call_id": call_id, "name": name, "arguments": arguments, "status": status,
    })
}
