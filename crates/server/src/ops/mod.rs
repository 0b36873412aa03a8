//! What operators ask: health, figures, a picture of everything for the page, version, administration.

pub(crate) mod admin;
pub(crate) mod health;
pub(crate) mod status;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use crate::error::{ApiError, ErrorBody, Kind};
use crate::{Server, metrics};

/// Version.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Version {
    version: &'static str,
}

/// Version of the program
#[utoipa::path(
    get,
    path = "/version",
    tag = "Operations",
    responses(
        (status = 200, description = "Version", body = Version),
        (status = "4XX", description = "The request is refused", body = ErrorBody),
    )
)]
pub(crate) async fn version() -> Json<Version> {
    Json(Version { version: env!("CARGO_PKG_VERSION") })
}

/// Figures for Prometheus
#[utoipa::path(
    get,
    path = "/metrics",
    tag = "Operations",
    responses(
        (status = 200, description = "Figures", body = String, content_type = "application/openmetrics-text"),
        (status = "4XX", description = "The request is refused", body = ErrorBody),
        (status = 500, description = "The figures can't be written", body = ErrorBody),
    )
)]
pub(crate) async fn figures(State(server): State<Arc<Server>>) -> Result<Response, ApiError> {
    let text = metrics::render(&server).map_err(|_| ApiError::new(Kind::Internal, "the figures can't be written"))?;
    let kind = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    Ok(([(CONTENT_TYPE, kind)], text).into_response())
}

/// Load, as vLLM tells it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Load {
    /// Requests that the engine works on or keeps waiting.
    server_load: usize,
}

/// Requests at work
#[utoipa::path(
    get,
    path = "/load",
    tag = "Operations",
    responses(
        (status = 200, description = "Load", body = Load),
        (status = "4XX", description = "The request is refused", body = ErrorBody),
        (status = 503, description = "The model is being loaded", body = ErrorBody),
    )
)]
pub(crate) async fn load(State(server): State<Arc<Server>>) -> Result<Json<Load>, ApiError> {
    Ok(Json(Load { server_load: server.model()?.engine.progress().in_flight }))
}
