//! `POST /v1/embeddings`: a vector for each text, of length 1.
//!
//! Texts go through the engine's scheduler like prompts, so batching, cancelling and memory are its matter. How hidden states
//! become a vector belongs to the model ([`ServedModel::pooling`](crate::ServedModel::pooling)).

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use qwen_models::tokenizer::EncodeOptions;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::completions::Prompt;
use crate::error::{ApiError, ErrorBody, Kind};
use crate::gate::RequestId;
use crate::generation::{Job, collect, start_at};
use crate::input::body::Body;
use crate::input::parameters::{Handling, Parameters, Row};
use crate::input::sampling::priority;
use crate::keys::Client;
use crate::prompt::prompts;
use crate::{Server, gate};

/// Most texts of a request, as the protocol has it.
pub(crate) const MAX_INPUTS: usize = 2048;

/// Body of a request.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(crate) struct EmbeddingRequest {
    /// Name of the model; left out: the one that is served.
    model: Option<String>,
    /// A text, texts, token ids, or lists of token ids; at most 2048.
    #[schema(value_type = Prompt, required = true)]
    input: Value,
    /// Numbers, or their bytes (float32, little end first) in Base64.
    encoding_format: EncodingFormat,
    /// Only so many of the first values, brought back to length 1: for models that were trained for it.
    #[schema(minimum = 1)]
    dimensions: Option<u32>,
    /// Put in the tokens that the model wants at the beginning of a text.
    #[schema(default = true)]
    add_special_tokens: Option<bool>,
    /// Lower runs earlier. Refused unless the server was started with `--allow_priority`.
    priority: Option<i32>,
}

/// Form of vectors.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum EncodingFormat {
    /// A list of numbers.
    #[default]
    Float,
    /// Base64.
    Base64,
}

/// Parameters of the endpoint.
#[derive(Debug)]
pub(crate) struct EmbeddingParameters;

const EMBEDDINGS: &[Row] = &[
    ("model", Handling::Used),
    ("input", Handling::Used),
    ("encoding_format", Handling::Used),
    ("dimensions", Handling::Used),
    ("add_special_tokens", Handling::Used),
    ("priority", Handling::Used),
    ("user", Handling::NoEffect("a label of the caller")),
    ("request_id", Handling::NoEffect("send the header X-Request-Id instead")),
    ("normalize", Handling::RefusedUnless("true", "vectors always have length 1")),
    ("truncate_prompt_tokens", Handling::Refused("a text is never cut silently; shorten it yourself")),
    ("messages", Handling::Refused("give texts as input")),
    ("stream", Handling::Refused("vectors come whole; leave it out")),
    ("stream_options", Handling::Refused("vectors come whole; leave it out")),
    ("pooling", Handling::Refused("the server's --pooling decides how vectors are made")),
    ("pooling_type", Handling::Refused("the server's --pooling decides how vectors are made")),
    ("task", Handling::Refused("write the instruction into the text as the model's card says")),
    ("input_type", Handling::Refused("write the instruction into the text as the model's card says")),
    ("cache_salt", Handling::Refused("use a key of your own: keys never share cached prefixes")),
];

impl Parameters for EmbeddingParameters {
    const ENDPOINT: &'static str = "/v1/embeddings";
    const TABLES: &'static [&'static [Row]] = &[EMBEDDINGS];
}

/// Vectors in the order of the texts.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EmbeddingResponse {
    /// `list`.
    object: &'static str,
    data: Vec<Embedding>,
    model: String,
    usage: EmbeddingUsage,
}

/// The vector of a text.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Embedding {
    /// `embedding`.
    object: &'static str,
    /// Number of the text.
    index: usize,
    embedding: Vector,
}

/// A vector in the form that was asked for.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Vector {
    /// Numbers.
    Float(Vec<f32>),
    /// Base64 of their bytes.
    Base64(String),
}

/// Tokens of all texts.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EmbeddingUsage {
    prompt_tokens: u64,
    total_tokens: u64,
}

/// Embed texts
#[utoipa::path(
    post,
    path = "/v1/embeddings",
    tag = "OpenAI",
    request_body = EmbeddingRequest,
    responses(
        (status = 200, description = "The vectors", body = EmbeddingResponse),
        (status = "4XX", description = "The request is refused", body = ErrorBody),
        (status = "5XX", description = "The server can't answer now, or was started without embeddings", body = ErrorBody),
    )
)]
pub(crate) async fn embeddings(
    State(server): State<Arc<Server>>,
    Extension(client): Extension<Arc<Client>>,
    Extension(request_id): Extension<RequestId>,
    body: Body<EmbeddingParameters>,
) -> Result<Response, ApiError> {
    let request: EmbeddingRequest = body.read()?;
    let model = server.admit(request.model.as_deref())?;
    let pooling = model.pooling.ok_or_else(|| {
        let message = "this server was started without embeddings (--pooling none)";
        ApiError::new(Kind::NotImplemented, message)
    })?;
    let hidden_size = model.engine.about().limits.hidden_size;
    let dimensions = request.dimensions.unwrap_or(hidden_size);
    if !(1..=hidden_size).contains(&dimensions) {
        let message =
            format!("dimensions: expected 1 to {hidden_size}, the size of this model's vectors, found {dimensions}");
        return Err(ApiError::invalid("dimensions", message));
    }
    let priority = priority(request.priority, &server)?;
    // Before the texts are tokenised, which may be a lot of work.
    let place = client.begin()?;
    let options = EncodeOptions { add_special: request.add_special_tokens.unwrap_or(true), ..EncodeOptions::PROMPT };
    let texts = prompts(model, "input", &request.input, MAX_INPUTS, options).await?;
    let name = model.names.first().cloned().unwrap_or_default();
    let job = Job::embed(texts, pooling, priority, request_id);
    let running = start_at(place, &server, &client, job).await?;
    let (answers, tokens) = collect(running).await?;
    let vectors = answers.into_iter().map(|answer| {
        let mut vector = answer.embedding.unwrap_or_default();
        vector.truncate(dimensions as usize);
        normalise(&mut vector);
        request.encoding_format.encode(vector)
    });
    let data = vectors.enumerate().map(|(index, embedding)| Embedding { object: "embedding", index, embedding });
    let usage = EmbeddingUsage { prompt_tokens: tokens.prompt, total_tokens: tokens.prompt };
    let response = Json(EmbeddingResponse { object: "list", data: data.collect(), model: name, usage });
    Ok(gate::tell_unknown(response.into_response(), &body.unknown))
}

/// Brings a vector to length 1; one of zeros stays as it is.
fn normalise(vector: &mut [f32]) {
    let length = vector.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
    }
}

impl EncodingFormat {
    fn encode(self, vector: Vec<f32>) -> Vector {
        match self {
            Self::Float => Vector::Float(vector),
            Self::Base64 => {
                let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
                Vector::Base64(STANDARD.encode(bytes))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_have_length_one() {
        let mut vector = [3.0, -4.0];
        normalise(&mut vector);
        assert_eq!(vector, [0.6, -0.8]);
        let mut huge = [1e30, 1e30];
        normalise(&mut huge);
        assert!((huge[0] - 0.5_f32.sqrt()).abs() < 1e-6, "squares of large values overflow in single precision");
        let mut zeros = [0.0; 3];
        normalise(&mut zeros);
        assert_eq!(zeros, [0.0; 3]);
    }

    #[test]
    fn base64_is_of_little_endian_bytes() {
        let Vector::Base64(text) = EncodingFormat::Base64.encode(vec![1.0, -2.5]) else { panic!("a text") };
        assert_eq!(STANDARD.decode(text).unwrap(), [0, 0, 0x80, 0x3f, 0, 0, 0x20, 0xc0]);
    }
}
