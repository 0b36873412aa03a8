//! Health: does the process live, does it get on, how are the devices.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::life::State as Stage;
use crate::{DeviceReport, Server};

/// Whether new requests are taken, and why not.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Readiness {
    /// `ready`, `degraded` (some device is out of order), `loading`, `warming`, `draining`, `stalled`, or `quarantined` (every
    /// device is out of order).
    pub(super) status: &'static str,
    /// Steps of the engine since the start.
    steps: u64,
    /// Requests that it has taken and not ended.
    in_flight: usize,
    /// Seconds since the last step, while there is work.
    stalled_seconds: f64,
}

/// Looks at more than a socket: an engine with work that makes no steps is not ready, nor is one without a device in order.
pub(super) fn readiness(server: &Server) -> Readiness {
    let Ok(model) = server.model() else {
        return Readiness { status: server.life.state().name(), steps: 0, in_flight: 0, stalled_seconds: 0.0 };
    };
    let progress = model.engine.progress();
    let status = match server.life.state() {
        Stage::Ready if !model.engine.is_usable() => "quarantined",
        Stage::Ready if progress.stalled > server.config.stall_timeout => "stalled",
        Stage::Ready if model.engine.is_degraded() => "degraded",
        state => state.name(),
    };
    Readiness {
        status,
        steps: progress.steps,
        in_flight: progress.in_flight,
        stalled_seconds: progress.stalled.as_secs_f64(),
    }
}

/// Whether the process lives
#[utoipa::path(
    get,
    path = "/livez",
    tag = "Operations",
    responses((status = 200, description = "It lives", body = String, content_type = "text/plain"))
)]
pub(crate) async fn live() -> &'static str {
    "ok"
}

/// Whether new requests are taken and the engine gets on
#[utoipa::path(
    get,
    path = "/readyz",
    tag = "Operations",
    responses(
        (status = 200, description = "Ready", body = Readiness),
        (status = 503, description = "Not ready: loading, warming, draining, stalled or quarantined", body = Readiness),
    )
)]
pub(crate) async fn ready(State(server): State<Arc<Server>>) -> Response {
    let readiness = readiness(&server);
    let status = if is_ready(&readiness) { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(readiness)).into_response()
}

/// Whether requests are taken: some devices out of order are no reason to refuse them.
fn is_ready(readiness: &Readiness) -> bool {
    matches!(readiness.status, "ready" | "degraded")
}

/// The state of each device
#[utoipa::path(
    get,
    path = "/healthz",
    tag = "Operations",
    responses(
        (status = 200, description = "`status`, and an entry `NAME_N` for each device", body = Healthz),
        (status = "4XX", description = "The request is refused", body = crate::error::ErrorBody),
        (status = 503, description = "The same, but not ready", body = Healthz),
    )
)]
pub(crate) async fn healthz(State(server): State<Arc<Server>>) -> Response {
    let readiness = readiness(&server);
    let ready = is_ready(&readiness);
    let mut body = Map::new();
    body.insert("status".into(), if readiness.status == "ready" { "ok" } else { readiness.status }.into());
    let devices = server.model().map(|model| (model.devices)()).unwrap_or_default();
    for device in devices {
        let key = device.name.replace(':', "_");
        body.insert(key, serde_json::to_value(device).unwrap_or(Value::Null));
    }
    body.insert("engine".into(), json!(readiness));
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(Value::Object(body))).into_response()
}

/// Answer of `/healthz`.
#[derive(Debug, Serialize, ToSchema)]
#[allow(dead_code, reason = "for the document; the names of devices are not known before")]
pub(crate) struct Healthz {
    /// `ok`, or why not.
    status: String,
    /// The engine.
    engine: Readiness,
    /// Devices by name, as `cpu_0`.
    #[serde(flatten)]
    devices: std::collections::BTreeMap<String, DeviceReport>,
}
