//! What every request passes first: an id, the host check, the key; and what every response gets: the id, security headers,
//! a line in the log.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::header::{AUTHORIZATION, HOST};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::Server;
use crate::error::{ApiError, Kind, anthropic_shape};
use crate::openai::new_id;
use crate::trace::Trace;

/// Id of a request, in logs and in the response, the address of this machine that it came in by, and its span.
#[derive(Debug, Clone)]
pub(crate) struct RequestId {
    pub(crate) id: String,
    pub(crate) by: Option<IpAddr>,
    pub(crate) trace: Trace,
}

/// The address of this machine that a connection came in by.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LocalAddress(pub(crate) IpAddr);

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const IGNORED: HeaderName = HeaderName::from_static("x-ignored-parameters");

/// Paths that need no key: whether the server lives, and the page, which asks for the key.
const OPEN: &[&str] = &[
    "/livez",
    "/readyz",
    "/health",
    "/health/live",
    "/health/ready",
    "/ping",
    "/v2/health/live",
    "/v2/health/ready",
    "/",
    "/web/{*path}",
];

/// Paths of the Anthropic protocol: whoever refuses a request to them does so in its shape.
const ANTHROPIC: &[&str] = &["/v1/messages", "/v1/messages/count_tokens"];

/// Headers of every response. The page is our own, so it may run nothing but what comes with it.
const HEADERS: &[(&str, &str)] =
    &[("x-content-type-options", "nosniff"), ("x-frame-options", "DENY"), ("referrer-policy", "no-referrer")];

/// Middleware around all routes.
pub(crate) async fn pass(State(server): State<Arc<Server>>, mut request: Request, next: Next) -> Response {
    let begun = Instant::now();
    let id = request_id(request.headers());
    let method = request.method().clone();
    let path = request.extensions().get::<MatchedPath>().map_or("unknown", MatchedPath::as_str).to_owned();
    let span = server.tracing.begin(&method, &path, request.headers(), &id);
    let trace = Some(span.id()).filter(|id| !id.is_empty()).unwrap_or_else(|| trace_id(request.headers()));
    let (mut response, name) = match identify(&server, &request, &path) {
        Ok(client) => {
            let name = client.name.clone();
            let by = request.extensions().get::<LocalAddress>().map(|address| address.0);
            request.extensions_mut().insert(RequestId { id: id.clone(), by, trace: span.clone() });
            request.extensions_mut().insert(client);
            (next.run(request).await, name)
        }
        Err(error) => (error.into_response(), String::new()),
    };
    if ANTHROPIC.contains(&path.as_str()) {
        anthropic_shape(&mut response);
    }
    let status = response.status().as_u16();
    let headers = response.headers_mut();
    if let Ok(value) = HeaderValue::from_str(&id) {
        headers.insert(REQUEST_ID, value);
    }
    for (header, value) in HEADERS {
        headers.entry(*header).or_insert(HeaderValue::from_static(value));
    }
    server.metrics.answered(&path, status);
    let seconds = begun.elapsed().as_secs_f64();
    // Monitors ask every few seconds; that is no news.
    let quiet = method == Method::GET && status < 400;
    let code = response.extensions().get::<ApiError>().and_then(|error| error.code).unwrap_or("");
    span.answered(status, code);
    if quiet {
        tracing::debug!(request_id = id, client = name, %method, path, status, seconds, "answered");
    } else {
        tracing::info!(request_id = id, client = name, %method, path, status, code, seconds, trace, "answered");
    }
    response
}

fn identify(server: &Server, request: &Request, path: &str) -> Result<Arc<crate::Client>, ApiError> {
    let headers = request.headers();
    let named = headers.get(HOST).map(|host| host.to_str().unwrap_or_default());
    // HTTP/2 has the host in the request's target.
    let host = named.or_else(|| request.uri().authority().map(axum::http::uri::Authority::as_str)).unwrap_or_default();
    if !server.config.allows_host(host) {
        let message =
            "the Host header names another machine; use localhost, or start the server with --allowed_hosts NAME";
        return Err(ApiError::new(Kind::Forbidden, message).code("host_not_allowed"));
    }
    if OPEN.contains(&path) {
        return server.keys.identify(key(headers)).or_else(|_| crate::Keys::default().identify(None));
    }
    server.keys.identify(key(headers))
}

/// `Authorization: Bearer KEY`, or Anthropic's `x-api-key`.
fn key(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok()).and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    bearer.or_else(|| headers.get("x-api-key").and_then(|value| value.to_str().ok()).map(str::trim))
}

/// The client's id if it is a plain word, else a new one: what is echoed and logged must not be able to mean anything.
fn request_id(headers: &HeaderMap) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
    let given = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok());
    match given.filter(|id| (1..=128).contains(&id.len()) && id.chars().all(plain)) {
        Some(id) => id.to_owned(),
        None => new_id("req_"),
    }
}

/// The trace of W3C's `traceparent`: version, trace, parent, flags.
fn trace_id(headers: &HeaderMap) -> String {
    let parent = headers.get("traceparent").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let trace = parent.split('-').nth(1).unwrap_or_default();
    let sound = trace.len() == 32 && trace.chars().all(|c| c.is_ascii_hexdigit());
    if sound { trace.to_owned() } else { String::new() }
}

/// Most unknown parameters that an answer names.
const MOST_NAMED: usize = 32;

/// Names the parameters that nobody knew.
pub(crate) fn tell_unknown(mut response: Response, unknown: &[String]) -> Response {
    let plain = |name: &String| {
        let name: String =
            name.chars().take(64).map(|c| if c.is_ascii_graphic() && c != ',' { c } else { '?' }).collect();
        name
    };
    let mut names: Vec<String> = unknown.iter().take(MOST_NAMED).map(plain).collect();
    if let Some(more @ 1..) = unknown.len().checked_sub(MOST_NAMED) {
        names.push(format!("and {more} more"));
    }
    if let (false, Ok(value)) = (names.is_empty(), HeaderValue::from_str(&names.join(", "))) {
        response.headers_mut().insert(IGNORED, value);
    }
    response
}

/// Middleware of `/admin`: keys of administrators alone.
pub(crate) async fn admin(State(server): State<Arc<Server>>, request: Request, next: Next) -> Response {
    let allowed = request.extensions().get::<Arc<crate::Client>>().is_some_and(|client| client.admin);
    if !server.config.admin || !allowed {
        let message = "this key may not administrate; use one with admin = true";
        return ApiError::new(Kind::Forbidden, message).into_response();
    }
    next.run(request).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())])
    }

    #[test]
    fn ids_of_clients_are_plain_words() {
        assert_eq!(request_id(&headers("x-request-id", "abc-1.2:3_")), "abc-1.2:3_");
        for wrong in ["a b", "<x>", "a,b", "\u{e9}", &"x".repeat(129)] {
            assert!(request_id(&headers("x-request-id", wrong)).starts_with("req_"), "{wrong}");
        }
    }

    #[test]
    fn keys_in_both_headers() {
        assert_eq!(key(&headers("authorization", "Bearer abc")), Some("abc"));
        assert_eq!(key(&headers("authorization", "bearer  abc ")), Some("abc"));
        assert_eq!(key(&headers("authorization", "Basic abc")), None);
        assert_eq!(key(&headers("x-api-key", "abc")), Some("abc"));
    }

    #[test]
    fn unknown_parameters_cannot_write_headers() {
        let told = tell_unknown(Response::default(), &["a\r\nset-cookie: x".into(), "b,c".into()]);
        assert_eq!(told.headers()[&IGNORED], "a??set-cookie:?x, b?c");
        let many: Vec<String> = (0..1000).map(|number| format!("p{number}")).collect();
        let told = tell_unknown(Response::default(), &many);
        let value = told.headers()[&IGNORED].to_str().unwrap();
        assert!(value.starts_with("p0, p1, ") && value.ends_with("p31, and 968 more"), "{value}");
    }
}
