//! `POST /v1/embeddings`: refused. The engine computes logits and keeps no hidden states, and a vector made of anything else
//! would look right and be wrong.

use axum::Json;

use crate::error::{ApiError, ErrorBody, Kind};

/// Embed texts (not possible with the models served here)
#[utoipa::path(
    post,
    path = "/v1/embeddings",
    tag = "OpenAI",
    responses(
        (status = "4XX", description = "The request is refused", body = ErrorBody),
        (status = 501, description = "This server does not compute embeddings", body = ErrorBody),
    )
)]
pub(crate) async fn embeddings() -> Result<Json<()>, ApiError> {
    let message = "this server does not compute embeddings: its engine gives logits, not hidden states; \
                   use a server with an embedding model for this endpoint";
    Err(ApiError::new(Kind::NotImplemented, message))
}
