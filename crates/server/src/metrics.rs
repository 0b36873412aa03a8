//! Figures for Prometheus: names of vLLM where the meaning is the same, `qwen:` where it is our own.
//!
//! What requests experience is counted here; what the engine knows is read from it when somebody asks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use qwen_engine::{Distance, FinishReason, InstanceReport, RequestTimings, SamplingParams, Trust};

use crate::recent::Recent;
use crate::{DeviceReport, Server};

/// Seconds to a first token.
const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
/// Seconds between tokens.
const BETWEEN: &[f64] =
    &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
/// Seconds of a request.
const LATENCY: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
/// Tokens of a request.
const TOKENS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0, 100000.0,
];
const SMALL: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    finished_reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Status {
    path: String,
    status: u16,
}

fn histogram(bounds: &'static [f64]) -> Histogram {
    Histogram::new(bounds.iter().copied())
}

/// Declares the histograms once: field, name, help, bounds.
macro_rules! histograms {
    ($($field:ident $name:literal $help:literal $bounds:expr;)*) => {
        #[derive(Debug)]
        struct Histograms { $($field: Histogram,)* }
        impl Histograms {
            fn new() -> Self {
                Self { $($field: histogram($bounds),)* }
            }
            fn register(&self, registry: &mut Registry) {
                $(registry.register($name, $help, self.$field.clone());)*
            }
        }
    };
}

histograms! {
    first_token "vllm:time_to_first_token_seconds" "Arrival to first token" FIRST_TOKEN;
    between "vllm:inter_token_latency_seconds" "Between two tokens of an answer" BETWEEN;
    per_token "vllm:request_time_per_output_token_seconds" "Mean time per token after the first" BETWEEN;
    latency "vllm:e2e_request_latency_seconds" "Arrival to end" LATENCY;
    queue "vllm:request_queue_time_seconds" "Waiting to start" LATENCY;
    prefill "vllm:request_prefill_time_seconds" "Start to first token" LATENCY;
    decode "vllm:request_decode_time_seconds" "First to last token" LATENCY;
    inference "vllm:request_inference_time_seconds" "Start to last token" LATENCY;
    prompt "vllm:request_prompt_tokens" "Prompt tokens of a request" TOKENS;
    generation "vllm:request_generation_tokens" "Tokens of an answer" TOKENS;
    computed "vllm:request_prefill_kv_computed_tokens" "Prompt tokens that the prefix cache did not have" TOKENS;
    n "vllm:request_params_n" "Answers per prompt" SMALL;
    max_tokens "vllm:request_params_max_tokens" "Most tokens that an answer may have" TOKENS;
}

/// Figures of the server.
#[derive(Debug)]
pub(crate) struct Metrics {
    histograms: Histograms,
    finished: Family<Reason, Counter>,
    responses: Family<Status, Counter>,
    /// Arrival to first token, for people who look on.
    pub(crate) recent_first: Recent,
    /// Mean time per token after the first, likewise.
    pub(crate) recent_per_token: Recent,
    abandoned: AtomicU64,
    embeddings: AtomicU64,
    connections: AtomicU64,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        Self {
            histograms: Histograms::new(),
            finished: Family::default(),
            responses: Family::default(),
            recent_first: Recent::default(),
            recent_per_token: Recent::default(),
            abandoned: AtomicU64::new(0),
            embeddings: AtomicU64::new(0),
            connections: AtomicU64::new(0),
        }
    }

    pub(crate) fn started(&self, sampling: &SamplingParams, n: u32) {
        self.histograms.n.observe(f64::from(n));
        self.histograms.max_tokens.observe(f64::from(sampling.max_tokens));
    }

    pub(crate) fn first_token(&self, since_arrival: Duration) {
        self.histograms.first_token.observe(since_arrival.as_secs_f64());
        self.recent_first.add(since_arrival);
    }

    pub(crate) fn next_token(&self, since_last: Duration) {
        self.histograms.between.observe(since_last.as_secs_f64());
    }

    pub(crate) fn finished(&self, finish: &FinishReason, timings: &RequestTimings, latency: Duration) {
        self.ended(finish, timings);
        let h = &self.histograms;
        h.latency.observe(latency.as_secs_f64());
        h.decode.observe(timings.decode.as_secs_f64());
        h.generation.observe(timings.generated_tokens as f64);
        if timings.generated_tokens > 1 {
            let mean = timings.decode.as_secs_f64() / (timings.generated_tokens - 1) as f64;
            h.per_token.observe(mean);
            self.recent_per_token.add(Duration::from_secs_f64(mean));
        }
    }

    /// A text that was to become a vector, with the latency of the whole request if it was its last.
    pub(crate) fn embedded(
        &self,
        is_vector: bool,
        finish: &FinishReason,
        timings: &RequestTimings,
        latency: Option<Duration>,
    ) {
        self.ended(finish, timings);
        self.embeddings.fetch_add(u64::from(is_vector), Ordering::Relaxed);
        if let Some(latency) = latency {
            self.histograms.latency.observe(latency.as_secs_f64());
        }
    }

    /// What answers and vectors have in common.
    fn ended(&self, finish: &FinishReason, timings: &RequestTimings) {
        self.finished.get_or_create(&Reason { finished_reason: finish.name().into() }).inc();
        let h = &self.histograms;
        h.queue.observe(timings.queue.as_secs_f64());
        h.prefill.observe(timings.prefill.as_secs_f64());
        h.inference.observe((timings.prefill + timings.decode).as_secs_f64());
        h.prompt.observe(timings.prompt_tokens as f64);
        h.computed.observe(timings.prompt_tokens.saturating_sub(timings.cached_tokens) as f64);
    }

    /// Answers whose client went away.
    pub(crate) fn abandoned(&self, answers: u64) {
        self.abandoned.fetch_add(answers, Ordering::Relaxed);
    }

    pub(crate) fn answered(&self, path: &str, status: u16) {
        self.responses.get_or_create(&Status { path: path.to_owned(), status }).inc();
    }

    pub(crate) fn connections(&self, change: i64) {
        self.connections.fetch_add(change.cast_unsigned(), Ordering::Relaxed);
    }
}

/// All figures in the text form of OpenMetrics. Those of engines carry the number of the engine, which is that of its device.
pub(crate) fn render(server: &Server) -> Result<String, std::fmt::Error> {
    let metrics = &server.metrics;
    let model = server.model().ok();
    let name = model.and_then(|model| model.names.first().cloned()).unwrap_or_default();
    let mut registry = Registry::default();
    let labels = [("model_name".into(), name.into())];
    let registry_of_model = registry.sub_registry_with_labels(labels.into_iter());
    metrics.histograms.register(registry_of_model);
    registry_of_model.register("vllm:request_success", "Answers by how they ended", metrics.finished.clone());
    registry_of_model.register("qwen:http_responses", "Responses by path and status", metrics.responses.clone());
    let snapshot = Snapshot {
        instances: model.map(|model| model.engine.instances()).unwrap_or_default(),
        moved: model.map_or(0, |model| model.engine.moved()),
        routed: model.map(|model| model.engine.routed()).unwrap_or_default(),
        stalled: model.map_or(0.0, |model| model.engine.progress().stalled.as_secs_f64()),
        abandoned: metrics.abandoned.load(Ordering::Relaxed),
        embeddings: metrics.embeddings.load(Ordering::Relaxed),
        connections: metrics.connections.load(Ordering::Relaxed),
        devices: model.map(|model| (model.devices)()).unwrap_or_default(),
    };
    registry_of_model.register_collector(Box::new(snapshot));
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

#[derive(Debug)]
struct Snapshot {
    instances: Vec<InstanceReport>,
    moved: u64,
    routed: [u64; Distance::NAMES.len()],
    stalled: f64,
    abandoned: u64,
    embeddings: u64,
    connections: u64,
    devices: Vec<DeviceReport>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeviceLabel {
    device: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MemberLabel {
    device: String,
    member: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EngineLabel {
    engine: usize,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TrustLabel {
    device: String,
    trust: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DistanceLabel {
    distance: &'static str,
}

type Gauges<L> = Family<L, Gauge<f64, AtomicU64>>;
/// Name, help, value.
type Figure<T> = (&'static str, &'static str, fn(&T) -> f64);

/// What engines hold now.
const ENGINE_GAUGES: &[Figure<InstanceReport>] = &[
    ("vllm:num_requests_running", "Requests that take part in steps", |i| i.stats.running as f64),
    ("vllm:num_requests_waiting", "Requests that wait to start", |i| i.stats.waiting as f64),
    ("vllm:kv_cache_usage_perc", "Share of the cache's blocks in use, 0 to 1", |i| i.stats.kv_utilisation()),
    ("qwen:requests_in_flight", "Requests that the engine has taken and not ended", |i| i.in_flight as f64),
    ("qwen:kv_blocks", "Blocks of the cache", |i| i.stats.blocks_total.into()),
    ("qwen:kv_blocks_used", "Blocks that requests hold", |i| i.stats.blocks_used.into()),
    ("qwen:kv_blocks_cached", "Free blocks that hold reusable prefixes", |i| i.stats.blocks_cached.into()),
    ("qwen:kv_free_bytes", "Memory of the cache's blocks that nobody has", |i| i.stats.memory.kv_free as f64),
    ("qwen:kv_largest_free_bytes", "Longest run of such blocks", |i| i.stats.memory.kv_largest_free as f64),
    ("qwen:kv_fragmentation", "Share of the cache's free memory outside its longest run, 0 to 1", |i| {
        i.stats.memory.kv_fragmentation()
    }),
    ("qwen:kv_backed_bytes", "Memory behind the cache's blocks", |i| i.stats.memory.kv_backed as f64),
    ("qwen:weights_bytes", "Memory of packed and copied weights", |i| i.stats.memory.weights as f64),
    ("qwen:activations_bytes", "Memory of activations and workspace", |i| i.stats.memory.activations as f64),
    ("qwen:step_buffers_bytes", "Memory of inputs and results of steps", |i| i.stats.memory.step_buffers as f64),
    ("qwen:hli", "Hardware load index: 0.6 x compute + 0.4 x bandwidth, each 0 to 1", |i| i.stats.hli),
    ("qwen:compute_utilisation", "Share of the device's compute in use, 0 to 1", |i| i.stats.compute_utilisation),
    ("qwen:bandwidth_utilisation", "Share of the memory bandwidth in use, 0 to 1", |i| i.stats.bandwidth_utilisation),
    ("qwen:prefill_budget_tokens", "Prompt tokens that a step takes beside answers", |i| i.stats.prefill_budget.into()),
    ("qwen:last_step_seconds", "Duration of the last step", |i| i.stats.last_step_seconds),
    ("qwen:last_step_tokens", "Tokens of the last step", |i| i.stats.last_step_tokens.into()),
];

/// What engines have counted.
const ENGINE_COUNTERS: &[Figure<InstanceReport>] = &[
    ("vllm:prompt_tokens", "Prompt tokens of requests that started", |i| i.stats.prompt_tokens as f64),
    ("vllm:generation_tokens", "Generated tokens", |i| i.stats.generated_tokens as f64),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", |i| {
        i.stats.prefix_query_tokens as f64
    }),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", |i| i.stats.prefix_hit_tokens as f64),
    ("vllm:num_preemptions", "Requests that gave their memory away", |i| i.stats.preemptions as f64),
    ("vllm:spec_decode_num_drafts", "Drafts by prompt lookup", |i| i.stats.drafts as f64),
    ("vllm:spec_decode_num_draft_tokens", "Tokens of drafts", |i| i.stats.draft_tokens as f64),
    ("vllm:spec_decode_num_accepted_tokens", "Tokens of drafts that the model chose too", |i| {
        i.stats.accepted_tokens as f64
    }),
    ("vllm:corrupted_requests", "Rows of logits with NaN or infinity", |i| i.stats.corrupted as f64),
    ("qwen:device_errors", "Steps that the device failed to compute", |i| i.stats.device_errors as f64),
    ("qwen:guard_checks", "Steps of which a row was computed twice", |i| i.stats.guard_checks as f64),
    ("qwen:guard_mismatches", "Of these, steps that were not equal", |i| i.stats.guard_mismatches as f64),
    ("qwen:guard_seconds", "Time of these checks", |i| i.stats.guard_seconds),
    ("qwen:known_answer_tests", "Tests of the device by known answers", |i| i.tests as f64),
    ("qwen:known_answer_failures", "Of these, tests that failed", |i| i.failed_tests as f64),
    ("qwen:quarantines", "Times that the device came into quarantine", |i| i.quarantines as f64),
    ("qwen:steps", "Steps", |i| i.stats.steps as f64),
    ("qwen:computed_tokens", "Tokens computed in steps", |i| i.stats.computed_tokens as f64),
    ("qwen:step_seconds", "Time of steps", |i| i.stats.step_seconds),
    ("qwen:plan_seconds", "Time of planning steps", |i| i.stats.plan_seconds),
    ("qwen:forward_seconds", "Time of the model", |i| i.stats.forward_seconds),
    ("qwen:sample_seconds", "Time of choosing tokens", |i| i.stats.sample_seconds),
    ("qwen:mask_seconds", "Time of grammars", |i| i.stats.mask_seconds),
];

impl prometheus_client::collector::Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        for (name, help, value) in ENGINE_GAUGES {
            let gauges = Gauges::default();
            for (engine, instance) in self.instances.iter().enumerate() {
                gauges.get_or_create(&EngineLabel { engine }).set(value(instance));
            }
            gauges.encode(encoder.encode_descriptor(name, help, None, gauges.metric_type())?)?;
        }
        for (name, help, value) in ENGINE_COUNTERS {
            let counters: Family<EngineLabel, Counter<f64, AtomicU64>> = Family::default();
            for (engine, instance) in self.instances.iter().enumerate() {
                counters.get_or_create(&EngineLabel { engine }).inc_by(value(instance));
            }
            counters.encode(encoder.encode_descriptor(name, help, None, counters.metric_type())?)?;
        }
        let gauges = [
            ("qwen:stalled_seconds", "Time since the last step while there is work", self.stalled),
            ("qwen:http_connections", "Open connections", self.connections as f64),
        ];
        for (name, help, value) in gauges {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        let counters = [
            ("qwen:abandoned", "Answers whose client went away", self.abandoned),
            ("qwen:embeddings", "Texts whose vector was computed", self.embeddings),
            ("qwen:reexecuted_requests", "Requests that went on after their device failed", self.moved),
        ];
        for (name, help, value) in counters {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
        }
        let routed: Family<DistanceLabel, Counter> = Family::default();
        for (distance, count) in Distance::NAMES.into_iter().zip(self.routed) {
            routed.get_or_create(&DistanceLabel { distance }).inc_by(count);
        }
        let help = "Requests by how far their device is from the interface that they came in on";
        routed.encode(encoder.encode_descriptor("qwen:routed_requests", help, None, routed.metric_type())?)?;
        self.encode_devices(&mut encoder)
    }
}

impl Snapshot {
    fn encode_devices(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        type Figure = fn(&DeviceReport) -> Option<f64>;
        let figures: [(&str, &str, Figure); 4] = [
            ("qwen:device_temperature_celsius", "Temperature of a device", |d| d.temperature),
            ("qwen:device_compute_percent", "Compute of a device in use", |d| d.compute_util),
            ("qwen:device_memory_percent", "Memory of a device in use", |d| d.memory_util),
            ("qwen:device_power_watts", "Power of a device", |d| d.power),
        ];
        for (name, help, figure) in figures {
            let family = Gauges::default();
            for device in &self.devices {
                if let Some(value) = figure(device) {
                    family.get_or_create(&DeviceLabel { device: device.name.clone() }).set(value);
                }
            }
            family.encode(encoder.encode_descriptor(name, help, None, family.metric_type())?)?;
        }
        let memory = Gauges::default();
        for (device, member) in self.devices.iter().flat_map(|device| device.members.iter().map(move |m| (device, m))) {
            let label = MemberLabel { device: device.name.clone(), member: member.name.clone() };
            if let Some(percent) = member.memory_util {
                memory.get_or_create(&label).set(percent);
            }
        }
        let (name, help) = ("qwen:member_memory_percent", "Memory of a group's device in use");
        memory.encode(encoder.encode_descriptor(name, help, None, memory.metric_type())?)?;
        let faults: Family<DeviceLabel, Counter> = Family::default();
        for device in &self.devices {
            faults.get_or_create(&DeviceLabel { device: device.name.clone() }).inc_by(device.error_count);
        }
        let help = "Failed and wrong steps, failed tests and memory errors of a device";
        faults.encode(encoder.encode_descriptor("qwen:device_faults", help, None, faults.metric_type())?)?;
        let states = Gauges::default();
        for instance in &self.instances {
            for trust in Trust::ALL {
                let label = TrustLabel { device: instance.name.clone(), trust: trust.name() };
                states.get_or_create(&label).set(f64::from(u8::from(instance.trust == trust)));
            }
        }
        let help = "How far a device is trusted: 1 for the state that it is in";
        states.encode(encoder.encode_descriptor("qwen:device_trust", help, None, states.metric_type())?)
    }
}
