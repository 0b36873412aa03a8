//! `POST /v1/completions`: plain continuation, and scoring of texts (`echo` with `logprobs`).

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use qwen_engine::Logprobs;
use qwen_models::tokenizer::{EncodeOptions, Tokenizer};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::chat::prompt_logprobs_count;
use super::logprobs::{CompletionLogprobs, prompt_logprobs};
use super::usage::{StreamOptions, Usage};
use super::{new_id, now};
use crate::answer::ParserOptions;
use crate::error::{ApiError, ErrorBody};
use crate::gate::RequestId;
use crate::generation::{Answer, Event, Job, StopReason, Tokens, collect, start};
use crate::input::body::Body;
use crate::input::parameters::{Handling, Parameters, Row};
use crate::input::sampling::{MAX_TOP_LOGPROBS, OTHERS, SAMPLING, SamplingFields, max_tokens};
use crate::input::structured::{STRUCTURED, after_thinking, grammar};
use crate::keys::Client;
use crate::prompt::prompts;
use crate::sse::{self, Dialect, Frames};
use crate::{Server, gate};

/// Tokens of an answer where nothing is said, as the protocol has it.
const DEFAULT_MAX_TOKENS: u64 = 16;

/// What only this endpoint has.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(crate) struct CompletionFields {
    /// Name of the model; left out: the one that is served.
    model: Option<String>,
    /// A text, texts, token ids, or lists of token ids.
    #[schema(value_type = Prompt, required = true)]
    prompt: Value,
    /// Most tokens of the answer; 0 only with `echo` or `prompt_logprobs`.
    #[schema(default = 16)]
    max_tokens: Option<u64>,
    /// Log-probabilities of the tokens and so many best ones.
    #[schema(minimum = 0, maximum = 20)]
    logprobs: Option<u32>,
    /// Log-probabilities of the prompt's tokens and so many best ones.
    #[schema(minimum = 0, maximum = 20)]
    prompt_logprobs: Option<i64>,
    /// Begin the answer with the prompt.
    echo: bool,
    /// Answer piece by piece.
    stream: bool,
    /// What the stream tells besides.
    stream_options: Option<StreamOptions>,
    /// Must equal `n`.
    best_of: Option<u32>,
    /// Put in the tokens that the model wants at the beginning of a text.
    #[schema(default = true)]
    add_special_tokens: Option<bool>,
}

/// A prompt.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "for the document; prompts are read by `crate::prompt::prompts`")]
pub(crate) enum Prompt {
    /// A text.
    Text(String),
    /// Texts.
    Texts(Vec<String>),
    /// Token ids.
    Tokens(Vec<u32>),
    /// Lists of token ids.
    TokenLists(Vec<Vec<u32>>),
}

const COMPLETIONS: &[Row] = &[
    ("model", Handling::Used),
    ("prompt", Handling::Used),
    ("max_tokens", Handling::Used),
    ("logprobs", Handling::Used),
    ("prompt_logprobs", Handling::Used),
    ("echo", Handling::Used),
    ("stream", Handling::Used),
    ("stream_options", Handling::Used),
    ("best_of", Handling::Used),
    ("add_special_tokens", Handling::Used),
    ("request_id", Handling::NoEffect("send the header X-Request-Id instead")),
    ("suffix", Handling::Refused("the models served here continue texts; they do not fill gaps")),
    ("prompt_embeds", Handling::Refused("prompts are texts or token ids")),
    ("max_completion_tokens", Handling::Refused("it is called max_tokens here")),
    ("messages", Handling::Refused("use /v1/chat/completions")),
    ("tools", Handling::Refused("use /v1/chat/completions")),
];

/// Parameters of the endpoint.
#[derive(Debug)]
pub(crate) struct CompletionParameters;

impl Parameters for CompletionParameters {
    const ENDPOINT: &'static str = "/v1/completions";
    const TABLES: &'static [&'static [Row]] = &[COMPLETIONS, SAMPLING, STRUCTURED, OTHERS];
}

/// Body of a request.
#[derive(Debug, ToSchema)]
#[allow(dead_code, reason = "for the document; the parts are read one by one")]
pub(crate) struct CompletionRequest {
    #[schema(inline)]
    #[serde(flatten)]
    completion: CompletionFields,
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

/// A whole answer, and a chunk of one.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct CompletionResponse {
    id: String,
    /// `text_completion`.
    object: &'static str,
    /// Seconds since 1970.
    created: u64,
    model: String,
    choices: Vec<CompletionChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
    system_fingerprint: Option<String>,
}

/// An answer.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct CompletionChoice {
    /// prompt x n + number of the answer.
    index: usize,
    text: String,
    logprobs: Option<CompletionLogprobs>,
    /// `stop` or `length`; null in chunks but the last.
    finish_reason: Option<&'static str>,
    /// The stop text or stop token that ended the answer.
    stop_reason: Option<StopReason>,
    /// If asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<Option<Object>>>)]
    prompt_logprobs: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

/// Continue a text
#[utoipa::path(
    post,
    path = "/v1/completions",
    tag = "OpenAI",
    request_body = CompletionRequest,
    responses(
        (status = 200, description = "The answer; with `stream` a stream of chunks", content(
            (CompletionResponse = "application/json"),
            (CompletionResponse = "text/event-stream"),
        )),
        (status = "4XX", description = "The request is refused", body = ErrorBody),
        (status = "5XX", description = "The server can't answer now", body = ErrorBody),
    )
)]
pub(crate) async fn completions(
    State(server): State<Arc<Server>>,
    Extension(client): Extension<Arc<Client>>,
    Extension(request_id): Extension<RequestId>,
    body: Body<CompletionParameters>,
) -> Result<Response, ApiError> {
    let fields: CompletionFields = body.read()?;
    let sampling: SamplingFields = body.read()?;
    let model = server.admit(fields.model.as_deref())?;
    let n = sampling.choices(&server)?;
    if let Some(best_of) = fields.best_of.filter(|best_of| *best_of != n) {
        let message = format!("best_of: expected {n}, the same as n, found {best_of}; all answers are returned");
        return Err(ApiError::unsupported("best_of", message));
    }
    if fields.stream_options.is_some() && !fields.stream {
        return Err(ApiError::invalid("stream_options", "stream_options: expected stream: true with it"));
    }
    let mut params = sampling.resolve(&server)?;
    if let Some(n) = fields.logprobs.filter(|n| *n > MAX_TOP_LOGPROBS) {
        let message = format!("logprobs: expected at most {MAX_TOP_LOGPROBS}, found {n}");
        return Err(ApiError::invalid("logprobs", message));
    }
    params.logprobs = fields.logprobs;
    let asked_prompt = prompt_logprobs_count(fields.prompt_logprobs, fields.stream)?;
    let options = EncodeOptions { add_special: fields.add_special_tokens.unwrap_or(true), ..EncodeOptions::PROMPT };
    let prompts = prompts(model, "prompt", &fields.prompt, server.config.max_prompts, options).await?;
    let context = model.engine.about().limits.max_seq_len;
    let asked = fields.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS);
    let scoring = fields.echo || asked_prompt.is_some();
    if asked == 0 && !scoring {
        let message = "max_tokens: expected at least 1, or 0 with echo or prompt_logprobs, found 0";
        return Err(ApiError::invalid("max_tokens", message));
    }
    let (at, longest) = prompts.iter().map(Vec::len).enumerate().max_by_key(|(_, tokens)| *tokens).unwrap_or((0, 0));
    let of_one = |error: ApiError| if prompts.len() > 1 { error.of_one("prompt", at) } else { error };
    params.max_tokens = match asked {
        0 => 0,
        // The protocol's default is no wish of the client's: it gives way to the context.
        _ if fields.max_tokens.is_none() => {
            max_tokens(None, "max_tokens", longest, context).map_err(of_one)?.min(asked as u32)
        }
        asked => max_tokens(Some(asked), "max_tokens", longest, context).map_err(of_one)?,
    };
    let echoed = if fields.echo { fields.logprobs.or((asked == 0).then_some(0)) } else { None };
    let (grammar_param, grammar) = grammar(&body.value)?.unzip();
    let job = Job {
        n,
        sampling: params,
        prompt_logprobs: asked_prompt.max(echoed),
        constraint: grammar.map(|grammar| after_thinking(grammar, false)),
        priority: sampling.priority.unwrap_or(0),
        salt: sampling.salt(),
        parser: ParserOptions::default(),
        request_id,
        prompts,
        embed: None,
        prompt_param: "prompt",
        grammar_param: grammar_param.unwrap_or("response_format"),
        words: &[],
    };
    let tokenizer = model.engine.about().tokenizer.clone();
    let echo = fields.echo.then(|| job.prompts.clone());
    let shape = Shape {
        n: n as usize,
        logprobs: fields.logprobs,
        asked_prompt,
        return_token_ids: sampling.return_token_ids.unwrap_or(false),
        echo,
        tokenizer,
    };
    let head = CompletionResponse {
        id: new_id("cmpl-"),
        object: "text_completion",
        created: now(),
        model: model.names.first().cloned().unwrap_or_default(),
        choices: Vec::new(),
        usage: None,
        system_fingerprint: None,
    };
    let choices = job.prompts.len() * n as usize;
    let running = start(&server, &client, job).await?;
    let response = if fields.stream {
        let options = fields.stream_options.unwrap_or_default();
        let states = std::iter::repeat_with(ChoiceState::default).take(choices).collect();
        let stream = CompletionStream { head, shape, options, states };
        sse::response(running, stream, server.config.ping_interval)
    } else {
        let (answers, tokens) = collect(running).await?;
        let choices = answers.into_iter().enumerate().map(|(index, answer)| shape.whole(index, answer)).collect();
        Json(CompletionResponse { choices, usage: Some(Some(tokens.into())), ..head }).into_response()
    };
    Ok(gate::tell_unknown(response, &body.unknown))
}

/// What answers must hold.
struct Shape {
    n: usize,
    logprobs: Option<u32>,
    asked_prompt: Option<u32>,
    return_token_ids: bool,
    /// Prompts to begin with.
    echo: Option<Vec<Vec<u32>>>,
    tokenizer: Option<Arc<Tokenizer>>,
}

impl Shape {
    fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_deref()
    }

    fn prompt(&self, index: usize) -> Option<&[u32]> {
        self.echo.as_ref().and_then(|prompts| prompts.get(index / self.n.max(1))).map(Vec::as_slice)
    }

    fn prompt_text(&self, index: usize) -> String {
        match (self.tokenizer(), self.prompt(index)) {
            (Some(tokenizer), Some(prompt)) => tokenizer.decode(prompt, true),
            _ => String::new(),
        }
    }

    /// Entries of the echoed prompt; a request for fewer best tokens than were computed gets fewer.
    fn add_prompt(&self, index: usize, computed: Option<&[Option<Logprobs>]>, into: &mut CompletionLogprobs) {
        let keep = self.logprobs.unwrap_or(0) as usize;
        for (at, id) in self.prompt(index).unwrap_or_default().iter().enumerate() {
            let mut entry = computed.and_then(|computed| computed.get(at).cloned().flatten());
            if let Some(entry) = &mut entry {
                entry.top.truncate(keep);
            }
            into.add(self.tokenizer(), *id, entry.as_ref());
        }
    }

    fn whole(&self, index: usize, answer: Answer) -> CompletionChoice {
        let computed = answer.prompt_logprobs.as_deref();
        let logprobs = self.logprobs.map(|_| {
            let mut logprobs = CompletionLogprobs::default();
            self.add_prompt(index, computed, &mut logprobs);
            for token in answer.tokens.iter().filter(|token| !token.end) {
                logprobs.add(self.tokenizer(), token.id, token.logprobs.as_ref());
            }
            logprobs
        });
        let prompt = self.asked_prompt.and(computed);
        let finish = answer.finish.unwrap_or(qwen_engine::FinishReason::Length);
        CompletionChoice {
            index,
            text: self.prompt_text(index) + &answer.text,
            logprobs,
            finish_reason: Some(finish.name()),
            stop_reason: StopReason::of(&finish),
            prompt_logprobs: prompt.map(|prompt| prompt_logprobs(self.tokenizer(), prompt)),
            token_ids: self.return_token_ids.then(|| answer.tokens.iter().map(|token| token.id).collect()),
        }
    }
}

#[derive(Default)]
struct ChoiceState {
    begun: bool,
    logprobs: CompletionLogprobs,
    ids: Vec<u32>,
}

struct CompletionStream {
    head: CompletionResponse,
    shape: Shape,
    options: StreamOptions,
    states: Vec<ChoiceState>,
}

impl Dialect for CompletionStream {
    fn event(&mut self, event: Event, tokens: Tokens, out: &mut Frames) {
        let index = event.choice;
        let mut text = event.text;
        let state = &mut self.states[index];
        if !std::mem::replace(&mut state.begun, true) && self.shape.echo.is_some() {
            text.insert_str(0, &self.shape.prompt_text(index));
            if self.shape.logprobs.is_some() {
                self.shape.add_prompt(index, event.prompt_logprobs.as_deref(), &mut state.logprobs);
            }
        }
        if let Some(token) = &event.token {
            if self.shape.logprobs.is_some() && !token.end {
                state.logprobs.add(self.shape.tokenizer(), token.id, token.logprobs.as_ref());
            }
            if self.shape.return_token_ids {
                state.ids.push(token.id);
            }
        }
        if text.is_empty() && event.finish.is_none() {
            return;
        }
        let choice = CompletionChoice {
            index,
            text,
            logprobs: state.logprobs.take(),
            finish_reason: event.finish.as_ref().map(qwen_engine::FinishReason::name),
            stop_reason: event.finish.as_ref().and_then(StopReason::of),
            prompt_logprobs: None,
            token_ids: self.shape.return_token_ids.then(|| std::mem::take(&mut state.ids)),
        };
        let usage = match self.options {
            StreamOptions { include_usage: true, continuous_usage_stats: true, .. } => Some(Some(tokens.into())),
            StreamOptions { include_usage: true, .. } => Some(None),
            _ => None,
        };
        out.data(&CompletionResponse { choices: vec![choice], usage, ..self.head.clone() });
    }

    fn error(&mut self, error: &ApiError, out: &mut Frames) {
        out.data(&error.body());
        out.done();
    }

    fn end(&mut self, tokens: Tokens, out: &mut Frames) {
        if self.options.include_usage {
            out.data(&CompletionResponse { usage: Some(Some(tokens.into())), ..self.head.clone() });
        }
        out.done();
    }
}
