//! Errors as clients see them: one sentence, a status, and the body that their library expects.
//!
//! Handlers speak of [`ApiError`] alone. It becomes the body of the OpenAI protocol; routes of the Anthropic protocol get the
//! same error in their own shape from [`anthropic_shape`], whoever raised it.

use axum::Json;
use axum::http::header::{CONTENT_LENGTH, RETRY_AFTER};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use qwen_engine::{EngineError, FinishReason, SubmitError};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

/// What kind of failure: decides status and type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The request is wrong; it would be refused again.
    Invalid,
    /// No key, or an unknown one.
    Unauthorized,
    /// A key that may not do this, or a host that is not ours.
    Forbidden,
    /// No such model or path.
    NotFound,
    /// The path exists for another method.
    Method,
    /// The client was too slow to send its request.
    SlowClient,
    /// The body is too large.
    TooLarge,
    /// The body is not declared as JSON.
    MediaType,
    /// Too many requests of this key, or in all.
    Busy,
    /// A defect of the server, or of the model.
    Internal,
    /// Understood, but not possible with this model or program.
    NotImplemented,
    /// Loading, draining, or the device is lost.
    Unavailable,
    /// The server's own deadline for a request passed.
    Deadline,
}

impl Kind {
    /// Status, `type` in the OpenAI protocol, `type` in the Anthropic protocol, `code` unless a better one is known.
    const fn row(self) -> (StatusCode, &'static str, &'static str, Option<&'static str>) {
        use StatusCode as S;
        const INVALID: &str = "invalid_request_error";
        match self {
            Self::Invalid => (S::BAD_REQUEST, INVALID, INVALID, None),
            Self::Unauthorized => {
                (S::UNAUTHORIZED, "authentication_error", "authentication_error", Some("invalid_api_key"))
            }
            Self::Forbidden => (S::FORBIDDEN, "permission_error", "permission_error", Some("forbidden")),
            Self::NotFound => (S::NOT_FOUND, "not_found_error", "not_found_error", Some("not_found")),
            Self::Method => (S::METHOD_NOT_ALLOWED, INVALID, INVALID, Some("method_not_allowed")),
            Self::SlowClient => (S::REQUEST_TIMEOUT, INVALID, INVALID, Some("slow_request")),
            Self::TooLarge => (S::PAYLOAD_TOO_LARGE, INVALID, "request_too_large", Some("request_too_large")),
            Self::MediaType => (S::UNSUPPORTED_MEDIA_TYPE, INVALID, INVALID, Some("unsupported_media_type")),
            Self::Busy => (S::TOO_MANY_REQUESTS, "rate_limit_error", "rate_limit_error", Some("rate_limit_exceeded")),
            Self::Internal => (S::INTERNAL_SERVER_ERROR, "server_error", "api_error", Some("internal_error")),
            Self::NotImplemented => (S::NOT_IMPLEMENTED, "not_implemented_error", "api_error", Some("not_implemented")),
            Self::Unavailable => {
                (S::SERVICE_UNAVAILABLE, "service_unavailable", "overloaded_error", Some("unavailable"))
            }
            Self::Deadline => (S::GATEWAY_TIMEOUT, "timeout_error", "timeout_error", Some("request_timeout")),
        }
    }
}

/// A refused or failed request.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// Kind.
    pub kind: Kind,
    /// What was expected, what was found, what to do.
    pub message: String,
    /// The parameter that it is about.
    pub param: Option<String>,
    /// A stable word for programs.
    pub code: Option<&'static str>,
    /// Seconds after which trying again makes sense.
    pub retry_after: Option<u64>,
}

/// Body of every error.
#[derive(Debug, Serialize, ToSchema)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorDetail,
}

/// What went wrong.
#[derive(Debug, Serialize, ToSchema)]
pub struct ErrorDetail {
    /// One sentence for people.
    pub message: String,
    /// Kind of error.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The parameter that it is about.
    pub param: Option<String>,
    /// A stable word for programs.
    pub code: Option<&'static str>,
}

/// Names of a chat's parameters, and what they are called in another protocol; longer ones come before those that they begin with.
pub type Words = &'static [(&'static str, &'static str)];

/// Replaces the first place where a name stands by itself.
fn replace_word(text: &str, name: &str, by: &str) -> String {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let stands_alone = |at: usize| {
        let (before, after) = (&text[..at], &text[at + name.len()..]);
        !before.ends_with(|c| is_part(c) || c == '.') && !after.starts_with(is_part)
    };
    match text.match_indices(name).find(|(at, _)| stands_alone(*at)) {
        Some((at, _)) => format!("{}{by}{}", &text[..at], &text[at + name.len()..]),
        None => text.to_owned(),
    }
}

impl ApiError {
    /// An error of a kind.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// A parameter that can't be as it is.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(Kind::Invalid, message) }
    }

    /// A parameter that is understood, but that this server can't honour.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code: Some("unsupported_parameter"), ..Self::invalid(param, message) }
    }

    /// An error about one of several texts of a parameter: the number tells which.
    #[must_use]
    pub fn of_one(self, param: &str, index: usize) -> Self {
        let param = format!("{param}[{index}]");
        Self { message: format!("{param}: {}", self.message), param: Some(param), ..self }
    }

    /// The same in the words of another protocol.
    #[must_use]
    pub fn in_words(mut self, words: Words) -> Self {
        let mut is_renamed = false;
        for (ours, theirs) in words {
            let rest = self.param.as_deref().and_then(|param| param.strip_prefix(ours));
            let rest = rest.filter(|rest| !is_renamed && (rest.is_empty() || rest.starts_with(['.', '['])));
            // Other words than the parameter's own are told by what no prose has.
            if rest.is_some() || ours.contains(['.', '{']) {
                self.message = replace_word(&self.message, ours, theirs);
            }
            if let Some(rest) = rest {
                self.param = Some(format!("{theirs}{rest}"));
                is_renamed = true;
            }
        }
        self
    }

    /// With a code for programs.
    #[must_use]
    pub const fn code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// With the time after which trying again makes sense.
    #[must_use]
    pub const fn retry_after(mut self, seconds: u64) -> Self {
        self.retry_after = Some(seconds);
        self
    }

    /// Status of the response.
    #[must_use]
    pub const fn status(&self) -> StatusCode {
        self.kind.row().0
    }

    /// Body in the OpenAI protocol.
    #[must_use]
    pub fn body(&self) -> ErrorBody {
        let (_, kind, _, code) = self.kind.row();
        let code = self.code.or(code);
        ErrorBody { error: ErrorDetail { message: self.message.clone(), kind, param: self.param.clone(), code } }
    }

    /// Body in the Anthropic protocol.
    #[must_use]
    pub fn anthropic_body(&self) -> Value {
        json!({ "type": "error", "error": { "type": self.kind.row().2, "message": self.message } })
    }

    /// What the end of an answer means, if it means failure.
    #[must_use]
    pub fn of_finish(finish: &FinishReason) -> Option<Self> {
        match finish {
            FinishReason::EndOfText | FinishReason::StopToken(_) | FinishReason::StopText(_) | FinishReason::Length => {
                None
            }
            FinishReason::Cancelled => {
                let message = "the request was cancelled: the server ends, or who runs it cancelled all requests";
                Some(Self::new(Kind::Unavailable, message).retry_after(10))
            }
            FinishReason::Deadline => Some(Self::new(
                Kind::Deadline,
                "the request took longer than this server allows (--request_timeout); ask for fewer tokens",
            )),
            FinishReason::Grammar(reason) => {
                let message = format!(
                    "{reason}: expected a grammar or schema that some text fulfils, found one that can't be gone on with; \
                     look for a reference to itself that has no end"
                );
                Some(Self::invalid("response_format", message).code("invalid_grammar"))
            }
            FinishReason::Logits(reason) | FinishReason::Error(reason) => {
                Some(Self::new(Kind::Internal, format!("the answer ended: {reason}")))
            }
            FinishReason::Device(reason) => {
                Some(Self::new(Kind::Unavailable, format!("the device failed: {reason}")).retry_after(1))
            }
            // A reason that this version does not know is no success.
            #[allow(unreachable_patterns)]
            _ => Some(Self::new(Kind::Internal, "the answer ended for a reason unknown to the server")),
        }
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let message = error.to_string();
        match error {
            EngineError::Parameter { name, .. } => Self::invalid(name, message),
            EngineError::TokenRange { .. } => Self::invalid("prompt", message),
            EngineError::EmptyPrompt => Self::invalid("prompt", message),
            EngineError::ContextLength { .. } | EngineError::CacheSize { .. } => {
                Self::invalid("prompt", message).code("context_length_exceeded")
            }
            EngineError::Grammar { .. } => Self::invalid("response_format", message).code("invalid_grammar"),
            EngineError::Runtime(_) | EngineError::NonFinite { .. } => Self::new(Kind::Internal, message),
            _ => Self::new(Kind::Invalid, message),
        }
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        let message = error.to_string();
        match error {
            SubmitError::Refused(error) => error.into(),
            SubmitError::Overloaded { .. } | SubmitError::CompilersBusy { .. } => {
                Self::new(Kind::Busy, message).code("server_overloaded").retry_after(1)
            }
            SubmitError::Draining => Self::new(Kind::Unavailable, message).code("draining").retry_after(5),
            _ => Self::new(Kind::Unavailable, message).retry_after(5),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status(), Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        response.extensions_mut().insert(self);
        response
    }
}

/// Puts an error into the Anthropic protocol's shape.
pub fn anthropic_shape(response: &mut Response) {
    if let Some(error) = response.extensions().get::<ApiError>() {
        *response.body_mut() = Json(error.anthropic_body()).into_response().into_body();
        response.headers_mut().remove(CONTENT_LENGTH);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A grammar that is wrong is the client's to change; one that has no thread is to be sent again.
    #[test]
    fn grammars_are_refused_or_asked_for_again() {
        let of = |error: EngineError| ApiError::from(SubmitError::from(error)).into_response();
        let wrong = of(EngineError::Grammar { reason: "compiling it takes longer than it may".into() });
        assert_eq!(wrong.status(), StatusCode::BAD_REQUEST);
        let busy = of(EngineError::CompilersBusy { at_once: 8 });
        assert_eq!(busy.status(), StatusCode::TOO_MANY_REQUESTS);
        assert!(busy.headers().contains_key(RETRY_AFTER));
    }

    #[test]
    fn errors_are_told_in_the_words_of_a_protocol() {
        const WORDS: Words = &[
            ("format.json_schema.schema", "text.format.schema"),
            ("format", "text.format"),
            ("stop", "stop_sequences"),
            ("function.name", "name"),
        ];
        let told = |param: &str, message: &str| {
            let error = ApiError::invalid(param, message).in_words(WORDS);
            (error.param.unwrap(), error.message)
        };
        for (param, message, their_param, their_message) in [
            ("format", "format.type: expected x", "text.format", "text.format.type: expected x"),
            ("format.x", "format.x: expected format", "text.format.x", "text.format.x: expected format"),
            (
                "format",
                "format.json_schema.schema: expected a schema",
                "text.format",
                "text.format.schema: expected a schema",
            ),
            ("stop", "stop: at most 3", "stop_sequences", "stop_sequences: at most 3"),
            ("formats", "formats: stop", "formats", "formats: stop"),
            ("tools[0]", "tools[0]: expected function.name", "tools[0]", "tools[0]: expected name"),
            ("tools[0]", "tools[0]: expected function.names", "tools[0]", "tools[0]: expected function.names"),
        ] {
            assert_eq!(told(param, message), (their_param.to_owned(), their_message.to_owned()));
        }
    }
}
