//! `GET /v1/models`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use serde::Serialize;
use utoipa::ToSchema;

use crate::error::{ApiError, ErrorBody};
use crate::{Server, unknown_model};

/// All names that are served.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelList {
    /// `list`.
    object: &'static str,
    data: Vec<ModelCard>,
}

/// A name that is served.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelCard {
    id: String,
    /// `model`.
    object: &'static str,
    /// When it was loaded, in seconds since 1970.
    created: u64,
    owned_by: &'static str,
    /// The first name of the same model.
    root: String,
    /// Always null: there are no adapters.
    parent: Option<String>,
    /// Most tokens of prompt and answer.
    max_model_len: u32,
}

fn cards(server: &Server) -> Result<Vec<ModelCard>, ApiError> {
    let model = server.model()?;
    let card = |name: &String| ModelCard {
        id: name.clone(),
        object: "model",
        created: model.created,
        owned_by: "qwen-inference",
        root: model.names.first().cloned().unwrap_or_default(),
        parent: None,
        max_model_len: model.engine.about().limits.max_seq_len,
    };
    Ok(model.names.iter().map(card).collect())
}

/// List models
#[utoipa::path(
    get,
    path = "/v1/models",
    tag = "OpenAI",
    responses(
        (status = 200, description = "Names that are served", body = ModelList),
        (status = "4XX", description = "The request is refused", body = ErrorBody),
        (status = 503, description = "The model is being loaded", body = ErrorBody),
    )
)]
pub(crate) async fn list(State(server): State<Arc<Server>>) -> Result<Json<ModelList>, ApiError> {
    Ok(Json(ModelList { object: "list", data: cards(&server)? }))
}

/// Describe a model; names may hold slashes
#[utoipa::path(
    get,
    path = "/v1/models/{id}",
    tag = "OpenAI",
    params(("id" = String, Path, description = "Name of the model")),
    responses(
        (status = 200, description = "The model", body = ModelCard),
        (status = "4XX", description = "There is no such model", body = ErrorBody),
        (status = 503, description = "The model is being loaded", body = ErrorBody),
    )
)]
pub(crate) async fn card(
    State(server): State<Arc<Server>>,
    Path(name): Path<String>,
) -> Result<Json<ModelCard>, ApiError> {
    let found = cards(&server)?.into_iter().find(|card| card.id == name);
    found.map(Json).ok_or_else(|| server.model().map_or_else(|error| error, |model| unknown_model(&name, model)))
}
