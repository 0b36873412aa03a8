//! Traces for OpenTelemetry: a span for each request that asks for work, with its waiting, prefill and decoding below it, sent
//! to a collector by OTLP over HTTP.
//!
//! Spans go into a bounded queue of the SDK and are sent by a thread of its own; what does not fit, or can't be delivered, is
//! dropped. So no request ever waits for a collector, and the end of the server waits for [`LAST_SPANS`] at most. A span holds
//! names, counts and times, nothing of a prompt or an answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use axum::http::{HeaderMap, Method, Uri};
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{Span as _, SpanKind, Status, TraceContextExt, Tracer, TracerProvider};
use opentelemetry::{Context, KeyValue};
use opentelemetry_http::{Bytes, HeaderExtractor, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use qwen_engine::{FinishReason, RequestTimings};

use crate::generation::Tokens;
use crate::{Config, ServeError};

/// Time for the last spans when the server ends.
const LAST_SPANS: Duration = Duration::from_secs(2);
/// Time for one delivery.
const DELIVERY: Duration = Duration::from_secs(5);
/// Parts of a request (answers, vectors) that have spans of their own: a request of 2,048 texts would fill the queue alone.
const PARTS: usize = 64;

/// Where spans go.
#[derive(Debug, Default)]
pub(crate) struct Tracing(Option<(SdkTracerProvider, SdkTracer)>);

/// The span of a request; it ends when its last clone is dropped.
#[derive(Debug, Clone, Default)]
pub(crate) struct Trace(Option<Arc<Own>>);

#[derive(Debug)]
struct Own {
    tracer: SdkTracer,
    context: Context,
    /// Parts that ended.
    parts: AtomicUsize,
}

impl Config {
    /// A collector's URL as it may be shown: scheme, host and port. The rest may hold passwords.
    #[must_use]
    pub fn shown_endpoint(url: &str) -> String {
        url.parse::<Uri>().ok().and_then(|uri| origin(&uri)).unwrap_or_else(|| "(no URL of http or https)".to_owned())
    }
}

/// Scheme, host and port of a URL of http or https.
fn origin(uri: &Uri) -> Option<String> {
    let scheme = uri.scheme_str().filter(|scheme| ["http", "https"].contains(scheme))?;
    let host = uri.host()?;
    Some(uri.port_u16().map_or_else(|| format!("{scheme}://{host}"), |port| format!("{scheme}://{host}:{port}")))
}

/// When a part of a request came to the engine. Its times are counted back from its end, because it may have waited for other
/// parts before the engine saw it; it can't be older than its request.
fn arrived(request: SystemTime, end: SystemTime, timings: &RequestTimings) -> SystemTime {
    end.checked_sub(timings.queue + timings.prefill + timings.decode).map_or(request, |arrival| arrival.max(request))
}

impl Tracing {
    /// Sends spans to this URL; without one, nothing is made.
    ///
    /// # Errors
    /// If it is no URL of http or https, or a variable of the SDK has a value that it can't use.
    pub(crate) fn new(endpoint: Option<&str>) -> Result<Self, ServeError> {
        let Some(endpoint) = endpoint else { return Ok(Self::default()) };
        // Looked at here, because the exporter's own error would repeat the URL with its password.
        if endpoint.parse::<Uri>().ok().and_then(|uri| origin(&uri)).is_none() {
            return Err(ServeError::Traces);
        }
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(Delivery::new())
            .with_endpoint(endpoint)
            .build()
            .map_err(|error| ServeError::Exporter(error.to_string()))?;
        let resource = Resource::builder();
        // The environment's name comes first, as the specification has it.
        let resource = match std::env::var_os("OTEL_SERVICE_NAME") {
            Some(_) => resource,
            None => resource.with_service_name("qwen-server"),
        };
        let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
        let provider = SdkTracerProvider::builder()
            .with_resource(resource.with_attribute(version).build())
            .with_batch_exporter(exporter)
            .build();
        let tracer = provider.tracer("qwen-server");
        Ok(Self(Some((provider, tracer))))
    }

    /// The span of a request, below that of its `traceparent` if it has one. Requests that only look have none: monitors ask
    /// every few seconds.
    pub(crate) fn begin(&self, method: &Method, path: &str, headers: &HeaderMap, id: &str) -> Trace {
        let Some((_, tracer)) = self.0.as_ref().filter(|_| *method == Method::POST) else { return Trace::default() };
        let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), &HeaderExtractor(headers));
        let attributes = [
            KeyValue::new("http.request.method", method.to_string()),
            KeyValue::new("http.route", path.to_owned()),
            KeyValue::new("qwen.request_id", id.to_owned()),
        ];
        let span =
            tracer.span_builder(format!("{method} {path}")).with_kind(SpanKind::Server).with_attributes(attributes);
        let span = span.start_with_context(tracer, &parent);
        let context = parent.with_span(span);
        Trace(Some(Arc::new(Own { tracer: tracer.clone(), context, parts: AtomicUsize::new(0) })))
    }

    /// Sends what is left, for [`LAST_SPANS`] at most.
    pub(crate) async fn finish(&self) {
        let Some((provider, _)) = self.0.clone() else { return };
        // The SDK's limit does not hold for all that it does there, such as joining its thread.
        let ended = tokio::task::spawn_blocking(move || provider.shutdown_with_timeout(LAST_SPANS));
        if !matches!(tokio::time::timeout(LAST_SPANS, ended).await, Ok(Ok(Ok(())))) {
            tracing::warn!("the last spans were not delivered");
        }
    }
}

impl Trace {
    /// The trace as the log names it; empty without one.
    pub(crate) fn id(&self) -> String {
        self.0.as_ref().map(|own| own.context.span().span_context().trace_id().to_string()).unwrap_or_default()
    }

    /// The response's status is known.
    pub(crate) fn answered(&self, status: u16, code: &'static str) {
        let Some(own) = self.0.as_deref() else { return };
        let span = own.context.span();
        span.set_attribute(KeyValue::new("http.response.status_code", i64::from(status)));
        if !code.is_empty() {
            span.set_attribute(KeyValue::new("error.type", code));
        }
        if status >= 500 {
            span.set_status(Status::error(code));
        }
    }

    /// An answer, or the vector of a text, of a request that came at `request` has ended just now: where its time went, for the
    /// first [`PARTS`] of a request.
    pub(crate) fn ended(&self, answer: usize, request: SystemTime, finish: &FinishReason, timings: &RequestTimings) {
        let Some(own) = self.0.as_deref() else { return };
        if own.parts.fetch_add(1, Ordering::Relaxed) < PARTS {
            own.phases(answer, arrived(request, SystemTime::now(), timings), timings);
        }
        let span = own.context.span();
        // Its name alone: the reason may quote what was generated.
        if let FinishReason::Logits(_) | FinishReason::Error(_) | FinishReason::Device(_) = finish {
            span.set_status(Status::error(finish.name()));
        }
        let attributes =
            vec![count("qwen.answer", answer), KeyValue::new("gen_ai.response.finish_reason", finish.name())];
        span.add_event("answer ended", attributes);
    }

    /// Nothing more comes.
    pub(crate) fn finished(&self, model: &str, tokens: Tokens, abandoned: usize) {
        let Some(own) = self.0.as_deref() else { return };
        let span = own.context.span();
        span.set_attributes([
            KeyValue::new("gen_ai.request.model", model.to_owned()),
            count("gen_ai.usage.input_tokens", tokens.prompt),
            count("gen_ai.usage.output_tokens", tokens.completion),
        ]);
        if abandoned > 0 {
            span.add_event("the client went away", vec![count("qwen.abandoned", abandoned)]);
        }
    }
}

impl Own {
    /// A span for each phase that a part reached.
    fn phases(&self, answer: usize, arrival: SystemTime, timings: &RequestTimings) {
        let started = arrival + timings.queue;
        let first = started + timings.prefill;
        let computed = timings.prompt_tokens.saturating_sub(timings.cached_tokens);
        let phases = [
            ("queue", arrival, started, vec![KeyValue::new("qwen.preemptions", i64::from(timings.preemptions))]),
            (
                "prefill",
                started,
                first,
                vec![count("qwen.computed_tokens", computed), count("qwen.cached_tokens", timings.cached_tokens)],
            ),
            ("decode", first, first + timings.decode, vec![count("qwen.tokens", timings.generated_tokens)]),
        ];
        let reached = if timings.prefill.is_zero() { 1 } else { 2 + usize::from(timings.generated_tokens > 0) };
        for (name, from, to, mut attributes) in phases.into_iter().take(reached) {
            attributes.push(count("qwen.answer", answer));
            let span = self.tracer.span_builder(name).with_start_time(from).with_attributes(attributes);
            span.start_with_context(&self.tracer, &self.context).end_with_timestamp(to);
        }
    }
}

fn count(name: &'static str, number: impl TryInto<i64>) -> KeyValue {
    KeyValue::new(name, number.try_into().unwrap_or(i64::MAX))
}

/// Delivers spans, and says once when that stops and when it goes on.
#[derive(Debug)]
struct Delivery {
    agent: ureq::Agent,
    fails: AtomicBool,
}

impl Delivery {
    fn new() -> Self {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(DELIVERY))
            .http_status_as_error(false)
            .max_redirects(0)
            .proxy(None)
            .build();
        Self { agent: config.into(), fails: AtomicBool::new(false) }
    }

    fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, ureq::Error> {
        let (head, body) = request.into_parts();
        let mut response = self.agent.run(Request::from_parts(head, body.as_ref()))?;
        let body = response.body_mut().with_config().limit(1 << 20).read_to_vec()?;
        Ok(response.map(|_| Bytes::from(body)))
    }
}

#[async_trait::async_trait]
impl HttpClient for Delivery {
    /// Blocks: it is called on the SDK's own thread.
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let to = origin(request.uri()).unwrap_or_default();
        let sent = self.send(request);
        let problem = match &sent {
            Ok(response) if response.status().is_success() => None,
            Ok(response) => Some(format!("it answered {}", response.status())),
            // That one repeats the URL.
            Err(ureq::Error::BadUri(_)) => Some("its URL can't be used".to_owned()),
            Err(error) => Some(error.to_string()),
        };
        let failed = self.fails.swap(problem.is_some(), Ordering::Relaxed);
        match problem {
            Some(reason) if !failed => {
                tracing::warn!(to, reason, "spans are dropped: the collector does not take them")
            }
            None if failed => tracing::info!(to, "the collector takes spans again"),
            _ => {}
        }
        Ok(sent?)
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn nothing_is_made_without_a_collector() {
        let tracing = Tracing::new(None).unwrap();
        let trace = tracing.begin(&Method::POST, "/v1/completions", &HeaderMap::new(), "a");
        assert!(trace.0.is_none() && trace.id().is_empty());
    }

    #[test]
    fn what_is_no_url_is_refused_and_passwords_are_not_shown() {
        for wrong in ["no url at all", "ftp://me:secret@a:1/secret", "a:4318", "/secret", "http://me:secret@"] {
            let told = Tracing::new(Some(wrong)).unwrap_err().to_string();
            assert!(told.contains("otlp_endpoint") && !told.contains("secret"), "{told}");
            assert!(!Config::shown_endpoint(wrong).contains("secret"), "{wrong}");
        }
        let shown = Config::shown_endpoint;
        assert_eq!(shown("https://me:secret@a.example:4318/secret/v1?key=secret"), "https://a.example:4318");
        assert_eq!(shown("http://me:1234@[::1]/v1"), "http://[::1]");
    }

    #[test]
    fn times_are_counted_back_from_the_end() {
        let request = SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
        let second = Duration::from_secs(1);
        let timings = RequestTimings { queue: second, prefill: second, decode: second, ..RequestTimings::default() };
        let end = request + 10 * second;
        assert_eq!(arrived(request, end, &timings), request + 7 * second);
        assert_eq!(arrived(request, request + second, &timings), request, "no older than its request");
        let timings = RequestTimings { queue: Duration::from_secs(u64::MAX / 2), ..timings };
        assert_eq!(arrived(request, end, &timings), request);
    }

    #[tokio::test]
    async fn a_trace_goes_on_and_a_collector_that_is_not_there_holds_nobody_up() {
        // A port of this machine that nothing listens on.
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let tracing = Tracing::new(Some(&format!("http://{free}/v1/traces"))).unwrap();
        let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let headers = HeaderMap::from_iter([("traceparent".parse().unwrap(), HeaderValue::from_static(parent))]);
        let trace = tracing.begin(&Method::POST, "/v1/completions", &headers, "a");
        assert_eq!(trace.id(), "0af7651916cd43dd8448eb211c80319c");
        let other = tracing.begin(&Method::POST, "/v1/completions", &HeaderMap::new(), "a");
        assert!(other.id().len() == 32 && other.id() != trace.id());
        assert!(tracing.begin(&Method::GET, "/metrics", &headers, "a").id().is_empty());
        for part in 0..=PARTS {
            trace.ended(part, SystemTime::now(), &FinishReason::Error("secret".into()), &RequestTimings::default());
        }
        drop((trace, other));
        tracing.finish().await;
    }
}
