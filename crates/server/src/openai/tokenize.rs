//! `POST /tokenize` and `POST /detokenize`, with the fields of vLLM and of llama-server.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use qwen_models::tokenizer::EncodeOptions;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::error::{ApiError, ErrorBody};
use crate::input::body::Body;
use crate::input::parameters::{Handling, Parameters, Row};
use crate::prompt::{Conversation, Purpose, encode, messages, tokenizer, tools};
use crate::{Server, gate};

/// A text or a conversation.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(crate) struct TokenizeRequest {
    model: Option<String>,
    /// A text.
    prompt: Option<String>,
    /// The same, as llama-server names it.
    content: Option<String>,
    /// A conversation instead.
    #[schema(value_type = Option<Vec<crate::openai::chat::Message>>)]
    messages: Option<Value>,
    /// With tools.
    #[schema(value_type = Option<Vec<crate::openai::chat::Tool>>)]
    tools: Option<Value>,
    /// Variables for the chat template.
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Map<String, Value>>,
    /// Begin an answer after the messages.
    add_generation_prompt: Option<bool>,
    /// Put in the tokens that the model wants at the beginning of a text.
    add_special_tokens: Option<bool>,
    /// The same, as llama-server names it.
    add_special: Option<bool>,
    /// Return the tokens as texts too.
    return_token_strs: bool,
}

/// Tokens.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TokenizeResponse {
    count: usize,
    max_model_len: u32,
    tokens: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_strs: Option<Vec<String>>,
}

/// Tokens.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(crate) struct DetokenizeRequest {
    model: Option<String>,
    #[schema(required = true)]
    tokens: Vec<u32>,
}

/// Their text.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DetokenizeResponse {
    prompt: String,
    /// The same, as llama-server names it.
    content: String,
}

#[derive(Debug)]
pub(crate) struct TokenizeParameters;

impl Parameters for TokenizeParameters {
    const ENDPOINT: &'static str = "/tokenize";
    const TABLES: &'static [&'static [Row]] = &[&[
        ("model", Handling::Used),
        ("prompt", Handling::Used),
        ("content", Handling::Used),
        ("messages", Handling::Used),
        ("tools", Handling::Used),
        ("chat_template_kwargs", Handling::Used),
        ("add_generation_prompt", Handling::Used),
        ("add_special_tokens", Handling::Used),
        ("add_special", Handling::Used),
        ("return_token_strs", Handling::Used),
        ("with_pieces", Handling::Refused("use return_token_strs")),
        ("continue_final_message", Handling::Refused("tokenize the prompt itself")),
        ("chat_template", Handling::Refused("only the model's own template is run")),
    ]];
}

#[derive(Debug)]
pub(crate) struct DetokenizeParameters;

impl Parameters for DetokenizeParameters {
    const ENDPOINT: &'static str = "/detokenize";
    const TABLES: &'static [&'static [Row]] = &[&[("model", Handling::Used), ("tokens", Handling::Used)]];
}

/// Text to tokens
#[utoipa::path(
    post,
    path = "/tokenize",
    tag = "Tokens",
    request_body = TokenizeRequest,
    responses(
        (status = 200, description = "Tokens", body = TokenizeResponse),
        (status = "4XX", description = "The request is refused", body = ErrorBody),
        (status = "5XX", description = "The server can't answer now", body = ErrorBody),
    )
)]
pub(crate) async fn tokenize(
    State(server): State<Arc<Server>>,
    body: Body<TokenizeParameters>,
) -> Result<Response, ApiError> {
    let request: TokenizeRequest = body.read()?;
    let model = server.admit(request.model.as_deref())?;
    let mut unknown = body.unknown;
    let tokens = match (request.messages, request.prompt.or(request.content)) {
        (Some(list), None) => {
            let conversation = Conversation {
                messages: messages(&list, &mut unknown)?,
                tools: request.tools.as_ref().map_or(Ok(Vec::new()), tools)?,
                kwargs: request.chat_template_kwargs.unwrap_or_default(),
                add_generation_prompt: request.add_generation_prompt.unwrap_or(true),
                continue_final: false,
            };
            conversation.render(model, Purpose::Tell).await?.tokens
        }
        (None, Some(text)) => {
            let add_special = request.add_special_tokens.or(request.add_special).unwrap_or(true);
            encode(model, text, EncodeOptions { add_special, ..EncodeOptions::PROMPT }).await?
        }
        _ => return Err(ApiError::invalid("prompt", "expected one of prompt, content and messages")),
    };
    let tokenizer = tokenizer(model)?;
    let text = |id: &u32| String::from_utf8_lossy(&tokenizer.token_bytes(*id)).into_owned();
    let response = Json(TokenizeResponse {
        count: tokens.len(),
        max_model_len: model.engine.about().limits.max_seq_len,
        token_strs: request.return_token_strs.then(|| tokens.iter().map(text).collect()),
        tokens,
    });
    Ok(gate::tell_unknown(response.into_response(), &unknown))
}

/// Tokens to text
#[utoipa::path(
    post,
    path = "/detokenize",
    tag = "Tokens",
    request_body = DetokenizeRequest,
    responses(
        (status = 200, description = "Text", body = DetokenizeResponse),
        (status = "4XX", description = "The request is refused", body = ErrorBody),
        (status = "5XX", description = "The server can't answer now", body = ErrorBody),
    )
)]
pub(crate) async fn detokenize(
    State(server): State<Arc<Server>>,
    body: Body<DetokenizeParameters>,
) -> Result<Response, ApiError> {
    let request: DetokenizeRequest = body.read()?;
    if body.value.get("tokens").is_none() {
        return Err(ApiError::invalid("tokens", "tokens: expected a list of token ids, found nothing"));
    }
    let model = server.admit(request.model.as_deref())?;
    let tokenizer = tokenizer(model)?;
    let size = tokenizer.vocab_size();
    if let Some(id) = request.tokens.iter().find(|id| **id as usize >= size) {
        return Err(ApiError::invalid("tokens", format!("tokens: expected ids below {size}, found {id}")));
    }
    let prompt = tokenizer.decode(&request.tokens, false);
    let response = Json(DetokenizeResponse { content: prompt.clone(), prompt });
    Ok(gate::tell_unknown(response.into_response(), &body.unknown))
}
