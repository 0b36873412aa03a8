//! Which path leads where.

use std::sync::Arc;

use axum::http::{HeaderName, HeaderValue, Method};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Router, middleware};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowOrigin, CorsLayer};
use utoipa_swagger_ui::SwaggerUi;

use crate::error::{ApiError, Kind};
use crate::{Server, anthropic, assets, gate, openai, openapi, ops, responses};

/// All routes with what is around them.
pub(crate) fn router(server: &Arc<Server>) -> Router {
    let openai = Router::new()
        .route("/v1/chat/completions", post(openai::chat::chat))
        .route("/v1/completions", post(openai::completions::completions))
        .route("/v1/embeddings", post(openai::embeddings::embeddings))
        .route("/v1/models", get(openai::models::list))
        .route("/v1/models/{*id}", get(openai::models::card))
        .route("/v1/responses", post(responses::respond))
        .route("/tokenize", post(openai::tokenize::tokenize))
        .route("/detokenize", post(openai::tokenize::detokenize));
    let anthropic = Router::new()
        .route("/v1/messages", post(anthropic::messages))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens));
    let operations = Router::new()
        .route("/livez", get(ops::health::live))
        .route("/health/live", get(ops::health::live))
        .route("/v2/health/live", get(ops::health::live))
        .route("/ping", get(ops::health::ready))
        .route("/readyz", get(ops::health::ready))
        .route("/health", get(ops::health::ready))
        .route("/health/ready", get(ops::health::ready))
        .route("/v2/health/ready", get(ops::health::ready))
        .route("/healthz", get(ops::health::healthz))
        .route("/metrics", get(ops::figures))
        .route("/version", get(ops::version))
        .route("/load", get(ops::load))
        .route("/status", get(ops::status::status));
    let mut all = Router::new()
        .merge(openai)
        .merge(anthropic)
        .merge(operations)
        .route("/", get(assets::start_page))
        .route("/web/{*path}", get(assets::by_name));
    if server.config.admin {
        let admin = Router::new()
            .route("/admin/drain", post(ops::admin::drain))
            .route("/admin/cancel", post(ops::admin::cancel))
            .layer(middleware::from_fn_with_state(Arc::clone(server), gate::admin));
        all = all.merge(admin);
    }
    if server.config.docs {
        all = all.merge(SwaggerUi::new("/docs").url("/openapi.json", openapi::document()));
    }
    all.fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(CatchPanicLayer::custom(defect))
        .layer(middleware::from_fn_with_state(Arc::clone(server), gate::pass))
        .layer(cors(&server.config.allowed_origins))
        .with_state(Arc::clone(server))
}

async fn unknown_path() -> ApiError {
    ApiError::new(Kind::NotFound, "there is no such path; /openapi.json lists them")
}

async fn wrong_method() -> ApiError {
    ApiError::new(Kind::Method, "this path exists for another method; /openapi.json lists them")
}

/// A handler panicked: a defect of ours, whose text is for the log.
#[expect(clippy::needless_pass_by_value, reason = "the layer's signature")]
fn defect(panic: Box<dyn std::any::Any + Send>) -> Response {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    tracing::error!(panic = text.unwrap_or("no message"), "a handler panicked");
    ApiError::new(Kind::Internal, "a defect in this server; please report it with the request's id").into_response()
}

/// Pages of other origins may read answers only where the operator said so.
fn cors(origins: &[String]) -> CorsLayer {
    if origins.is_empty() {
        return CorsLayer::new();
    }
    let allowed = if origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        AllowOrigin::list(origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok()))
    };
    let headers = ["authorization", "content-type", "x-api-key", "anthropic-version", "x-request-id"];
    CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST])
        .allow_headers(headers.map(HeaderName::from_static))
        .expose_headers(["x-request-id", "x-ignored-parameters", "retry-after"].map(HeaderName::from_static))
}
