//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::chat_stream::{ChatChunk, ChatStream};
use super::logprobs::{ChatLogprobs, prompt_logprobs};
use super::usage::{StreamOptions, Usage};
use super::{new_id, now};
use crate::answer::{Force, ParserOptions, Thinking, forced_calls, free_calls};
use crate::error::{ApiError, ErrorBody};
use crate::gate::RequestId;
use crate::generation::{Answer, Job, StopReason, collect, finish_name, start};
use crate::input::body::Body;
use crate::input::parameters::{Handling, Parameters, Row, check_object};
use crate::input::sampling::{MAX_TOP_LOGPROBS, OTHERS, SAMPLING, SamplingFields, max_tokens};
use crate::input::structured::{STRUCTURED, after_thinking, grammar};
use crate::keys::Client;
use crate::prompt::{Conversation, Purpose, messages, schemas, thinking_kwargs, tokenizer, tools};
use crate::{ServedModel, Server, gate, sse};

/// What only this endpoint has.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(crate) struct ChatFields {
    /// Name of the model; left out: the one that is served.
    pub(crate) model: Option<String>,
    /// The conversation.
    #[schema(value_type = Vec<Message>, required = true)]
    pub(crate) messages: Value,
    /// Most tokens of the answer, thinking included. Default: all that the context has room for.
    pub(crate) max_completion_tokens: Option<u64>,
    /// The same by its old name.
    pub(crate) max_tokens: Option<u64>,
    /// Log-probabilities of the answer's tokens.
    pub(crate) logprobs: bool,
    /// And of so many best tokens at each place.
    #[schema(minimum = 0, maximum = 20)]
    pub(crate) top_logprobs: Option<u32>,
    /// Log-probabilities of the prompt's tokens and so many best ones.
    #[schema(minimum = 0, maximum = 20)]
    pub(crate) prompt_logprobs: Option<i64>,
    /// Answer piece by piece.
    pub(crate) stream: bool,
    /// What the stream tells besides.
    pub(crate) stream_options: Option<StreamOptions>,
    /// Functions that the model may call.
    #[schema(value_type = Option<Vec<Tool>>)]
    pub(crate) tools: Option<Value>,
    /// `none`, `auto`, `required`, or a function by name.
    #[schema(value_type = Option<ToolChoice>)]
    pub(crate) tool_choice: Option<Value>,
    /// Whether an answer may hold several calls.
    pub(crate) parallel_tool_calls: Option<bool>,
    /// `none` and `minimal` switch thinking off, others on.
    pub(crate) reasoning_effort: Option<String>,
    /// Whether to think, as Qwen's API has it.
    pub(crate) enable_thinking: Option<bool>,
    /// Whether to think, as DeepSeek's API has it: `{"type": "enabled"}` or `disabled`.
    #[schema(value_type = Option<Object>)]
    pub(crate) thinking: Option<Value>,
    /// Variables for the chat template.
    #[schema(value_type = Option<Object>)]
    pub(crate) chat_template_kwargs: Option<Map<String, Value>>,
    /// Begin an answer after the messages.
    pub(crate) add_generation_prompt: Option<bool>,
    /// Go on with the last message instead.
    pub(crate) continue_final_message: bool,
}

/// A message.
#[derive(Debug, Deserialize, ToSchema)]
#[allow(dead_code, reason = "for the document; messages are read by crate::prompt")]
pub(crate) struct Message {
    /// `system`, `developer`, `user`, `assistant` or `tool`.
    role: String,
    /// A text, or a list of parts of type text.
    #[schema(value_type = Option<Content>)]
    content: Option<Value>,
    /// Name of the speaker.
    name: Option<String>,
    /// Thinking of an earlier answer.
    reasoning_content: Option<String>,
    /// Calls of an earlier answer.
    #[schema(value_type = Option<Vec<ToolCall>>)]
    tool_calls: Option<Value>,
    /// Which call a tool's message answers.
    tool_call_id: Option<String>,
}

/// A text, or parts.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "for the document")]
pub(crate) enum Content {
    /// A text.
    Text(String),
    /// Parts of type text.
    Parts(Vec<Part>),
}

/// A part of a message.
#[derive(Debug, Deserialize, ToSchema)]
#[allow(dead_code, reason = "for the document")]
pub(crate) struct Part {
    /// `text`.
    #[serde(rename = "type")]
    kind: String,
    /// Text.
    text: String,
}

/// A function.
#[derive(Debug, Deserialize, ToSchema)]
#[allow(dead_code, reason = "for the document")]
pub(crate) struct Tool {
    /// `function`.
    #[serde(rename = "type")]
    kind: String,
    /// The function.
    function: ToolFunction,
}

/// A function's description.
#[derive(Debug, Deserialize, ToSchema)]
#[allow(dead_code, reason = "for the document")]
pub(crate) struct ToolFunction {
    /// Name.
    name: String,
    /// What it does.
    description: Option<String>,
    /// JSON schema of its arguments.
    #[schema(value_type = Option<Object>)]
    parameters: Option<Value>,
    /// Arguments follow the schema whenever the model calls; without it, where a call is forced.
    strict: Option<bool>,
}

/// A word, or a function by name.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "for the document")]
pub(crate) enum ToolChoice {
    /// `none`, `auto` or `required`.
    Word(String),
    /// `{"type": "function", "function": {"name": …}}`.
    #[schema(value_type = Object)]
    Named(Value),
}

const CHAT: &[Row] = &[
    ("model", Handling::Used),
    ("messages", Handling::Used),
    ("max_completion_tokens", Handling::Used),
    ("max_tokens", Handling::Used),
    ("logprobs", Handling::Used),
    ("top_logprobs", Handling::Used),
    ("prompt_logprobs", Handling::Used),
    ("stream", Handling::Used),
    ("stream_options", Handling::Used),
    ("tools", Handling::Used),
    ("tool_choice", Handling::Used),
    ("parallel_tool_calls", Handling::Used),
    ("reasoning_effort", Handling::Used),
    ("enable_thinking", Handling::Used),
    ("thinking", Handling::Used),
    ("chat_template_kwargs", Handling::Used),
    ("add_generation_prompt", Handling::Used),
    ("continue_final_message", Handling::Used),
    (
        "include_reasoning",
        Handling::RefusedUnless("true", "thinking is always sent, apart from the content; leave it out"),
    ),
    ("request_id", Handling::NoEffect("send the header X-Request-Id instead")),
    ("store", Handling::Refused("nothing is stored")),
    ("modalities", Handling::RefusedUnless("[\"text\"]", "answers are text; leave it out")),
    ("audio", Handling::Refused("answers are text")),
    ("prediction", Handling::Refused("drafts come from the prompt itself")),
    ("verbosity", Handling::RefusedUnless("\"medium\"", "say it in the prompt")),
    ("web_search_options", Handling::Refused("this server fetches nothing")),
    ("functions", Handling::Refused("use tools")),
    ("function_call", Handling::Refused("use tool_choice")),
    ("chat_template", Handling::Refused("only the model's own template is run")),
    ("mm_processor_kwargs", Handling::Refused("this model reads text only")),
    ("documents", Handling::Refused("put them into a message")),
    ("echo", Handling::Refused("use /v1/completions")),
    ("add_special_tokens", Handling::Refused("the chat template writes them")),
    ("best_of", Handling::Refused("use n")),
    ("suffix", Handling::Refused("use messages")),
];

/// Entries of `tool_choice`, of its function, and of `thinking`.
const TOOL_CHOICE: &[Row] = &[("type", Handling::Used), ("function", Handling::Used), ("name", Handling::Used)];
const CHOSEN: &[Row] = &[("name", Handling::Used)];
const THINKING: &[Row] = &[
    ("type", Handling::Used),
    (
        "budget_tokens",
        Handling::NoEffect("its clients must send it; thinking ends by itself, or with the answer's tokens"),
    ),
    ("display", Handling::RefusedUnless("\"summarized\"", "thinking is always sent as it is; leave it out")),
];

/// Parameters of the endpoint.
#[derive(Debug)]
pub(crate) struct ChatParameters;

impl Parameters for ChatParameters {
    const ENDPOINT: &'static str = "/v1/chat/completions";
    const TABLES: &'static [&'static [Row]] = &[CHAT, SAMPLING, STRUCTURED, OTHERS];
}

/// Body of a request.
#[derive(Debug, ToSchema)]
#[allow(dead_code, reason = "for the document; the parts are read one by one")]
pub(crate) struct ChatRequest {
    #[schema(inline)]
    #[serde(flatten)]
    chat: ChatFields,
    #[schema(inline)]
    #[serde(flatten)]
    sampling: SamplingFields,
    /// `{"type": "text" | "json_object" | "json_schema", …}`.
    #[schema(value_type = Option<Object>)]
    response_format: Option<Value>,
    /// One of json, regex, choice, grammar, json_object.
    #[schema(value_type = Option<Object>)]
    structured_outputs: Option<Value>,
}

/// A whole answer.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatResponse {
    id: String,
    /// `chat.completion`.
    object: &'static str,
    /// Seconds since 1970.
    created: u64,
    model: String,
    choices: Vec<ChatChoice>,
    usage: Usage,
    system_fingerprint: Option<String>,
    /// If asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<Option<Object>>>)]
    prompt_logprobs: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Vec<u32>>,
}

/// An answer.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatChoice {
    index: usize,
    message: AnswerMessage,
    logprobs: Option<ChatLogprobs>,
    /// `stop`, `length` or `tool_calls`.
    finish_reason: &'static str,
    /// The stop text or stop token that ended the answer.
    stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

/// The message of an answer.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AnswerMessage {
    /// `assistant`.
    role: &'static str,
    /// Null where there are only calls.
    content: Option<String>,
    refusal: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
}

/// A call of a function.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ToolCall {
    id: String,
    /// `function`.
    #[serde(rename = "type")]
    kind: &'static str,
    function: CalledFunction,
}

/// Which function, and with what.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct CalledFunction {
    name: String,
    /// A JSON text.
    arguments: String,
}

/// What a request comes to: used by the other chat protocols too.
pub(crate) struct Prepared {
    pub(crate) job: Job,
    pub(crate) name: String,
    /// Entries of the conversation that nobody knows.
    pub(crate) unknown: Vec<String>,
}

/// Checks everything and makes the prompt.
pub(crate) async fn prepare(
    server: &Server,
    fields: &ChatFields,
    sampling: &SamplingFields,
    body: &Value,
    request_id: &RequestId,
) -> Result<Prepared, ApiError> {
    let model = server.admit(fields.model.as_deref())?;
    let n = sampling.choices(server)?;
    let mut params = sampling.resolve(server)?;
    params.logprobs = top_logprobs(fields)?;
    if fields.stream_options.is_some() && !fields.stream {
        return Err(ApiError::invalid("stream_options", "stream_options: expected stream: true with it"));
    }
    let tools = match fields.tools.as_ref().filter(|tools| !tools.is_null()) {
        Some(list) => tools(list)?,
        None => Vec::new(),
    };
    let choice = ToolUse::read(fields, &tools)?;
    let format = match choice {
        ToolUse::None => None,
        _ => Some(model.tool_format.ok_or_else(|| {
            let message = "tools: no form of calls is known for this model's template; start the server with \
                           --tool_call_parser, or send tool_choice: none";
            ApiError::unsupported("tools", message)
        })?),
    };
    if let (ToolUse::None, false, Some(format)) = (&choice, tools.is_empty(), model.tool_format) {
        // The model must not call what it is not shown.
        let tokenizer = tokenizer(model)?;
        params.logit_bias.extend(tokenizer.token_to_id(format.marker()).map(|id| (id, -100.0)));
    }
    let mut unknown = Vec::new();
    let conversation = Conversation {
        messages: messages(&fields.messages, &mut unknown)?,
        tools: if choice == ToolUse::None { Vec::new() } else { tools.clone() },
        kwargs: kwargs(model, fields)?,
        continue_final: fields.continue_final_message,
        add_generation_prompt: fields.add_generation_prompt.unwrap_or(!fields.continue_final_message),
    };
    if conversation.continue_final && conversation.add_generation_prompt {
        let message = "continue_final_message: expected add_generation_prompt: false with it";
        return Err(ApiError::invalid("continue_final_message", message));
    }
    let prompt = conversation.render(model, Purpose::Compute).await?;
    let asked = fields.max_completion_tokens.or(fields.max_tokens);
    let param = if fields.max_completion_tokens.is_some() { "max_completion_tokens" } else { "max_tokens" };
    if asked == Some(0) {
        return Err(ApiError::invalid(param, format!("{param}: expected at least 1, found 0")));
    }
    let context = model.engine.about().limits.max_seq_len;
    params.max_tokens = max_tokens(asked, param, prompt.tokens.len(), context)?;
    let structured = grammar(body)?;
    let is_structured = structured.is_some();
    let (grammar_param, mut grammar) = match structured {
        Some((param, grammar)) => (param, Some(grammar)),
        None => ("tools", None),
    };
    let force = match &choice {
        ToolUse::Required => Some(Force::Any),
        ToolUse::Named(name) => Some(Force::Named(name.clone())),
        _ => None,
    };
    if let (Some(force), Some(format)) = (force, format) {
        if grammar.is_some() {
            let message = "tool_choice: a forced call can't be combined with structured output; use one of them";
            return Err(ApiError::invalid("tool_choice", message));
        }
        let parallel = fields.parallel_tool_calls.unwrap_or(true);
        let source = forced_calls(format, &schemas(&tools), &force, parallel);
        grammar = Some(qwen_engine::Grammar::Lark(source));
    }
    // What is bound by a form of its own can't hold calls.
    if let (ToolUse::Auto, Some(format), None) = (&choice, format, &grammar) {
        let parallel = fields.parallel_tool_calls.unwrap_or(true);
        let is_strict = |tool: &Value| tool["function"]["strict"] == true;
        if !parallel || tools.iter().any(is_strict) {
            let tokenizer = tokenizer(model)?;
            let is_token = |text: &str| tokenizer.token_to_id(text).is_some_and(|id| tokenizer.is_special(id));
            let bound = tools
                .iter()
                .zip(schemas(&tools))
                .map(|(tool, (name, schema))| (name, if is_strict(tool) { schema } else { Value::Null }));
            let source = free_calls(format, &bound.collect::<Vec<_>>(), parallel, is_token);
            grammar = Some(qwen_engine::Grammar::Lark(source));
        }
    }
    let inside = prompt.thinking == Thinking::Inside;
    Ok(Prepared {
        name: model.names.first().cloned().unwrap_or_default(),
        unknown,
        job: Job {
            embed: None,
            prompt_param: "messages",
            grammar_param,
            words: &[],
            n,
            sampling: params,
            prompt_logprobs: prompt_logprobs_count(fields.prompt_logprobs, fields.stream)?,
            constraint: grammar.map(|grammar| after_thinking(grammar, inside)),
            priority: sampling.priority.unwrap_or(0),
            salt: sampling.salt(),
            parser: ParserOptions {
                thinking: prompt.thinking,
                // What is bound by a form of its own is that, whatever it looks like.
                tools: format.filter(|_| !is_structured),
                names: schemas(&tools).into_iter().map(|(name, _)| name).collect(),
            },
            request_id: request_id.clone(),
            prompts: vec![prompt.tokens],
        },
    })
}

fn top_logprobs(fields: &ChatFields) -> Result<Option<u32>, ApiError> {
    match (fields.logprobs, fields.top_logprobs.unwrap_or(0)) {
        (false, 0) => Ok(None),
        (false, _) => Err(ApiError::invalid("top_logprobs", "top_logprobs: expected logprobs: true with it")),
        (true, n) if n > MAX_TOP_LOGPROBS => Err(ApiError::invalid(
            "top_logprobs",
            format!("top_logprobs: expected at most {MAX_TOP_LOGPROBS}, found {n}"),
        )),
        (true, n) => Ok(Some(n)),
    }
}

/// `prompt_logprobs` within its bounds; -1, all of the vocabulary, is refused: it would take gigabytes.
pub(crate) fn prompt_logprobs_count(asked: Option<i64>, stream: bool) -> Result<Option<u32>, ApiError> {
    const NAME: &str = "prompt_logprobs";
    match asked {
        None => Ok(None),
        Some(_) if stream => Err(ApiError::unsupported(NAME, "prompt_logprobs: expected stream: false with it")),
        Some(n) => match u32::try_from(n).ok().filter(|n| *n <= MAX_TOP_LOGPROBS) {
            Some(n) => Ok(Some(n)),
            None => Err(ApiError::invalid(NAME, format!("{NAME}: expected 0 to {MAX_TOP_LOGPROBS}, found {n}"))),
        },
    }
}

/// What may be done with tools.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ToolUse {
    None,
    Auto,
    Required,
    Named(String),
}

impl ToolUse {
    fn read(fields: &ChatFields, tools: &[Value]) -> Result<Self, ApiError> {
        const NAME: &str = "tool_choice";
        let wrong = |message: String| Err(ApiError::invalid(NAME, message));
        let choice = match fields.tool_choice.as_ref() {
            None | Some(Value::Null) if tools.is_empty() => Self::None,
            None | Some(Value::Null) => Self::Auto,
            Some(Value::String(word)) => match word.as_str() {
                "none" => Self::None,
                "auto" if tools.is_empty() => Self::None,
                "auto" => Self::Auto,
                "required" => Self::Required,
                _ => return wrong(format!("tool_choice: expected none, auto, required or a function, found {word:?}")),
            },
            Some(named) => {
                if let Some(entries) = named.as_object() {
                    check_object(NAME, entries, TOOL_CHOICE)?;
                }
                if let Some(entries) = named["function"].as_object() {
                    check_object("tool_choice.function", entries, CHOSEN)?;
                }
                match named.pointer("/function/name").or_else(|| named.get("name")).and_then(Value::as_str) {
                    Some(name) => Self::Named(name.to_owned()),
                    None => return wrong("tool_choice: expected {type: function, function: {name}}".to_owned()),
                }
            }
        };
        match &choice {
            Self::Required | Self::Named(_) if tools.is_empty() => {
                wrong("tool_choice: expected tools with it".to_owned())
            }
            Self::Named(name) if schemas(tools).iter().all(|(known, _)| known != name) => {
                wrong(format!("tool_choice: expected a function of tools, found {name:?}"))
            }
            _ => Ok(choice),
        }
    }
}

/// Variables for the template, and the switches of three dialects for thinking.
fn kwargs(model: &ServedModel, fields: &ChatFields) -> Result<Map<String, Value>, ApiError> {
    let mut kwargs = fields.chat_template_kwargs.clone().unwrap_or_default();
    if let Some(effort) = &fields.reasoning_effort {
        let wanted = match effort.as_str() {
            "none" | "minimal" => false,
            "low" | "medium" | "high" | "xhigh" => true,
            _ => {
                let message =
                    format!("reasoning_effort: expected none, minimal, low, medium, high or xhigh, found {effort:?}");
                return Err(ApiError::invalid("reasoning_effort", message));
            }
        };
        thinking_kwargs(model, "reasoning_effort", wanted, &mut kwargs)?;
    }
    if let Some(wanted) = fields.enable_thinking {
        thinking_kwargs(model, "enable_thinking", wanted, &mut kwargs)?;
    }
    if let Some(thinking) = &fields.thinking {
        if let Some(entries) = thinking.as_object() {
            check_object("thinking", entries, THINKING)?;
        }
        let wanted = match thinking.get("type").and_then(Value::as_str) {
            Some("enabled" | "adaptive") => true,
            Some("disabled") => false,
            _ => return Err(ApiError::invalid("thinking", "thinking.type: expected enabled or disabled")),
        };
        thinking_kwargs(model, "thinking", wanted, &mut kwargs)?;
    }
    Ok(kwargs)
}

/// Answer a conversation
#[utoipa::path(
    post,
    path = "/v1/chat/completions",
    tag = "OpenAI",
    request_body = ChatRequest,
    responses(
        (status = 200, description = "The answer; with `stream` a stream of chunks", content(
            (ChatResponse = "application/json"),
            (ChatChunk<'static> = "text/event-stream"),
        )),
        (status = "4XX", description = "The request is refused", body = ErrorBody),
        (status = "5XX", description = "The server can't answer now", body = ErrorBody),
    )
)]
pub(crate) async fn chat(
    State(server): State<Arc<Server>>,
    Extension(client): Extension<Arc<Client>>,
    Extension(request_id): Extension<RequestId>,
    body: Body<ChatParameters>,
) -> Result<Response, ApiError> {
    let fields: ChatFields = body.read()?;
    let sampling: SamplingFields = body.read()?;
    let prepared = prepare(&server, &fields, &sampling, &body.value, &request_id).await?;
    let return_token_ids = sampling.return_token_ids.unwrap_or(false);
    let prompt_ids = return_token_ids.then(|| prepared.job.prompts[0].clone());
    let wants_logprobs = prepared.job.sampling.logprobs.is_some();
    let n = prepared.job.n as usize;
    let model = server.model()?;
    let tokenizer = tokenizer(model)?;
    let running = start(&server, &client, prepared.job).await?;
    let response = if fields.stream {
        let options = fields.stream_options.unwrap_or_default();
        let stream =
            ChatStream::new(prepared.name, n, options, wants_logprobs, server.config.reasoning_alias, tokenizer);
        sse::response(running, stream, server.config.ping_interval)
    } else {
        let (mut answers, tokens) = collect(running).await?;
        let prompt = answers.first_mut().and_then(|answer| answer.prompt_logprobs.take());
        let choice = |(index, answer): (usize, Answer)| {
            let mut logprobs = wants_logprobs.then(ChatLogprobs::default);
            if let Some(logprobs) = &mut logprobs {
                answer.tokens.iter().for_each(|token| logprobs.add(&tokenizer, token));
            }
            let token_ids = return_token_ids.then(|| answer.tokens.iter().map(|token| token.id).collect());
            whole_choice(index, answer, logprobs, token_ids, server.config.reasoning_alias)
        };
        Json(ChatResponse {
            id: new_id("chatcmpl-"),
            object: "chat.completion",
            created: now(),
            model: prepared.name,
            choices: answers.into_iter().enumerate().map(choice).collect(),
            usage: tokens.into(),
            system_fingerprint: None,
            prompt_logprobs: prompt.map(|prompt| prompt_logprobs(Some(&tokenizer), &prompt)),
            prompt_token_ids: prompt_ids,
        })
        .into_response()
    };
    Ok(gate::tell_unknown(response, &[body.unknown, prepared.unknown].concat()))
}

fn whole_choice(
    index: usize,
    answer: Answer,
    logprobs: Option<ChatLogprobs>,
    token_ids: Option<Vec<u32>>,
    alias: bool,
) -> ChatChoice {
    let whole = answer.whole;
    let call = |(name, arguments): (String, String)| ToolCall {
        id: new_id("call_"),
        kind: "function",
        function: CalledFunction { name, arguments },
    };
    let has_calls = !whole.calls.is_empty();
    let only_thinking = whole.content.is_empty() && !whole.reasoning.is_empty();
    let reasoning = (!whole.reasoning.is_empty()).then_some(whole.reasoning);
    let finish = answer.finish.unwrap_or(qwen_engine::FinishReason::EndOfText);
    ChatChoice {
        index,
        message: AnswerMessage {
            role: "assistant",
            content: (!whole.content.is_empty() || !(has_calls || only_thinking)).then_some(whole.content),
            refusal: None,
            reasoning: reasoning.clone().filter(|_| alias),
            reasoning_content: reasoning,
            tool_calls: whole.calls.into_iter().map(call).collect(),
        },
        logprobs,
        finish_reason: finish_name(&finish, has_calls),
        stop_reason: StopReason::of(&finish),
        token_ids,
    }
}
