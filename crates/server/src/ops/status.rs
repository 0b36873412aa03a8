//! `/status`: everything that the page shows, in one answer.
//!
//! Counters only grow, so whoever looks on takes differences. The map of the cache is made by the engine between two steps; an
//! engine whose step takes longer than [`MAP_WAIT`] has none this time.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use qwen_engine::{EngineStats, Fleet, KvMap, KvState};
use serde::Serialize;
use utoipa::ToSchema;

use crate::ops::health::{Readiness, readiness};
use crate::recent::Percentiles;
use crate::{DeviceReport, DispatchReport, ServedModel, Server};

/// Longest wait for the end of a step.
const MAP_WAIT: Duration = Duration::from_millis(250);

/// Everything that can be watched.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Status {
    version: &'static str,
    /// `ready`, `degraded`, `loading`, `warming`, `draining`, `stalled` or `quarantined`.
    status: &'static str,
    /// Whether `/docs` exists.
    docs: bool,
    /// The model; null while it is loaded.
    model: Option<ModelStatus>,
    /// Arrival to first token, in seconds.
    time_to_first_token: Percentiles,
    /// Mean time per token after the first, in seconds.
    time_per_output_token: Percentiles,
    /// One for each engine.
    instances: Vec<Instance>,
    /// Why which kernels compute the model; null until it is looked up.
    dispatch: Option<Vec<DispatchReport>>,
}

/// The model.
#[derive(Debug, Serialize, ToSchema)]
struct ModelStatus {
    /// Names that requests may use.
    names: Vec<String>,
    /// Most tokens of prompt and answer.
    max_model_len: u32,
    /// Whether it thinks before it answers.
    thinks: bool,
    /// Whether a request can switch that off.
    thinking_switch: bool,
    /// Whether it gives vectors of texts.
    embeddings: bool,
}

/// An engine and its device.
#[derive(Debug, Serialize, ToSchema)]
struct Instance {
    /// The device.
    device: DeviceReport,
    /// Requests that take part in steps.
    running: usize,
    /// Requests that wait to start.
    waiting: usize,
    /// Most requests of a step.
    max_sequences: usize,
    /// Hardware load index: 0.6 x compute + 0.4 x bandwidth, 0 to 1.
    hli: f64,
    /// Share of the device's compute that recent steps used, 0 to 1.
    compute_utilisation: f64,
    /// Share of its memory bandwidth, 0 to 1.
    bandwidth_utilisation: f64,
    /// Steps since the start.
    steps: u64,
    /// Prompt tokens of requests that have started.
    prompt_tokens: u64,
    /// Generated tokens.
    generated_tokens: u64,
    /// Prompt tokens that were looked up in the prefix cache.
    prefix_query_tokens: u64,
    /// Of these, tokens that were found.
    prefix_hit_tokens: u64,
    /// Times that a request gave its memory away to be computed again later.
    preemptions: u64,
    /// Requests that ended by an error.
    errors: u64,
    /// Steps that the device failed to compute.
    device_errors: u64,
    /// Rows of logits that held NaN or an infinity.
    corrupted: u64,
    cache: CacheStatus,
}

/// The KV cache.
#[derive(Debug, Serialize, ToSchema)]
struct CacheStatus {
    /// Tokens of a block.
    block_size: u32,
    /// Blocks.
    blocks: u32,
    /// Blocks that requests hold.
    used: u32,
    /// Blocks that the prefix cache keeps for nobody in particular.
    cached: u32,
    /// Where they lie; null if the engine was busy for too long.
    map: Option<CacheMap>,
}

/// Blocks in the order of their memory.
#[derive(Debug, Serialize, ToSchema)]
struct CacheMap {
    /// `free`, `used` or `cached`, and how many blocks in a row.
    #[schema(value_type = Vec<(String, u32)>)]
    runs: Vec<(&'static str, u32)>,
    /// Blocks that have memory behind them; the others get it when they are needed first.
    backed: u32,
    /// Longest run of free blocks.
    largest_free_run: u32,
    /// Share of the free blocks that lie outside the longest run of them, 0 to 1.
    fragmentation: f64,
}

impl From<KvMap> for CacheMap {
    fn from(map: KvMap) -> Self {
        let name = |(state, length): &(KvState, u32)| (state.name(), *length);
        Self {
            runs: map.runs.iter().map(name).collect(),
            backed: map.backed,
            largest_free_run: map.largest_free_run(),
            fragmentation: map.fragmentation(),
        }
    }
}

impl Instance {
    fn new(device: DeviceReport, stats: &EngineStats, map: Option<KvMap>) -> Self {
        Self {
            device,
            running: stats.running,
            waiting: stats.waiting,
            max_sequences: stats.max_sequences,
            hli: stats.hli,
            compute_utilisation: stats.compute_utilisation,
            bandwidth_utilisation: stats.bandwidth_utilisation,
            steps: stats.steps,
            prompt_tokens: stats.prompt_tokens,
            generated_tokens: stats.generated_tokens,
            prefix_query_tokens: stats.prefix_query_tokens,
            prefix_hit_tokens: stats.prefix_hit_tokens,
            preemptions: stats.preemptions,
            errors: stats.finished_error,
            device_errors: stats.device_errors,
            corrupted: stats.corrupted,
            cache: CacheStatus {
                block_size: stats.block_size,
                blocks: stats.blocks_total,
                used: stats.blocks_used,
                cached: stats.blocks_cached,
                map: map.map(CacheMap::from),
            },
        }
    }
}

/// Everything that the page shows
#[utoipa::path(
    get,
    path = "/status",
    tag = "Operations",
    responses(
        (status = 200, description = "Devices, load, cache, latencies, dispatch", body = Status),
        (status = "4XX", description = "The request is refused", body = crate::error::ErrorBody),
    )
)]
pub(crate) async fn status(State(server): State<Arc<Server>>) -> Json<Status> {
    let Readiness { status, .. } = readiness(&server);
    let model = server.model().ok();
    let instances = match model {
        Some(model) => instances(model).await,
        None => Vec::new(),
    };
    if model.is_some() && !server.dispatch.initialized() {
        tokio::spawn(look_up_dispatch(Arc::clone(&server)));
    }
    Json(Status {
        version: env!("CARGO_PKG_VERSION"),
        status,
        docs: server.config.docs,
        model: model.map(|model| ModelStatus {
            names: model.names.clone(),
            max_model_len: model.engine.about().limits.max_seq_len,
            thinks: model.thinking.thinks,
            thinking_switch: model.thinking.switch,
            embeddings: model.pooling.is_some(),
        }),
        time_to_first_token: server.metrics.recent_first.percentiles(),
        time_per_output_token: server.metrics.recent_per_token.percentiles(),
        instances,
        dispatch: server.dispatch.get().cloned(),
    })
}

async fn instances(model: &ServedModel) -> Vec<Instance> {
    let mut instances = Vec::new();
    let reports = model.engine.instances().into_iter().zip((model.devices)());
    for (at, (report, device)) in reports.enumerate() {
        let map = map(&model.engine, at).await;
        instances.push(Instance::new(device, &report.stats, map));
    }
    instances
}

/// The map between two steps, if the engine comes to it in time.
async fn map(engine: &Fleet, at: usize) -> Option<KvMap> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    // Whoever waited too long has gone; the map is nobody's then.
    engine.call(at, move |engine| drop(sender.send(engine.kv_map()))).ok()?;
    tokio::time::timeout(MAP_WAIT, receiver).await.ok()?.ok()
}

/// Plans once more, beside the engine, to tell what was decided.
async fn look_up_dispatch(server: Arc<Server>) {
    let Ok(probe) = server.model().map(|model| Arc::clone(&model.dispatch)) else { return };
    let look = || async { tokio::task::spawn_blocking(move || probe()).await.unwrap_or_default() };
    server.dispatch.get_or_init(look).await;
}
