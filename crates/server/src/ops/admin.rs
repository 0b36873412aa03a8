//! `/admin`: off unless the server was started with `--admin`, and for keys of administrators alone.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use crate::life::State as Stage;
use crate::{Server, error::ApiError};

/// Take no new requests; those in flight are finished
#[utoipa::path(
    post,
    path = "/admin/drain",
    tag = "Administration",
    responses(
        (status = 200, description = "Draining", body = Object),
        (status = "4XX", description = "The request is refused", body = crate::error::ErrorBody),
        (status = 503, description = "The model is being loaded", body = crate::error::ErrorBody),
    )
)]
pub(crate) async fn drain(State(server): State<Arc<Server>>) -> Result<Json<Value>, ApiError> {
    server.model()?.engine.drain();
    server.life.advance(Stage::Draining);
    Ok(Json(json!({ "status": "draining", "active": server.life.active() })))
}

/// Cancel every request in flight
#[utoipa::path(
    post,
    path = "/admin/cancel",
    tag = "Administration",
    responses(
        (status = 200, description = "Cancelled", body = Object),
        (status = "4XX", description = "The request is refused", body = crate::error::ErrorBody),
        (status = 503, description = "The model is being loaded", body = crate::error::ErrorBody),
    )
)]
pub(crate) async fn cancel(State(server): State<Arc<Server>>) -> Result<Json<Value>, ApiError> {
    let model = server.model()?;
    let cancelled = model.engine.progress().in_flight;
    model.engine.cancel_all();
    Ok(Json(json!({ "cancelled": cancelled })))
}
