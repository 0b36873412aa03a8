//! Server-sent events: how events of a generation become a body that grows.

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::HeaderValue;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::Response;
use futures_util::stream;
use serde::Serialize;

use crate::error::ApiError;
use crate::generation::{Event, Running, Tokens};

/// How a protocol tells of a generation while it runs.
pub(crate) trait Dialect: Send + 'static {
    /// Before the first event. Called with the first event, not before.
    fn begin(&mut self, _out: &mut Frames) {}
    /// An event. Errors go to [`Dialect::error`] instead.
    fn event(&mut self, event: Event, tokens: Tokens, out: &mut Frames);
    /// An answer ended by an error; nothing follows.
    fn error(&mut self, error: &ApiError, out: &mut Frames);
    /// Every answer has ended.
    fn end(&mut self, tokens: Tokens, out: &mut Frames);
}

/// Frames to be sent.
#[derive(Debug, Default)]
pub(crate) struct Frames(String);

impl Frames {
    /// `data:` with a value.
    pub(crate) fn data(&mut self, value: &impl Serialize) {
        self.0.push_str("data: ");
        self.json(value);
    }

    /// `event:` and `data:`.
    pub(crate) fn named(&mut self, name: &str, value: &impl Serialize) {
        self.0.push_str("event: ");
        self.0.push_str(name);
        self.0.push_str("\ndata: ");
        self.json(value);
    }

    /// The end of a stream in the OpenAI protocol.
    pub(crate) fn done(&mut self) {
        self.0.push_str("data: [DONE]\n\n");
    }

    fn json(&mut self, value: &impl Serialize) {
        // JSON has no line breaks but escaped ones, so a frame is one line. Our own types always serialise.
        self.0.push_str(&serde_json::to_string(value).unwrap_or_default());
        self.0.push_str("\n\n");
    }
}

struct Stream<D> {
    running: Running,
    dialect: D,
    begun: bool,
    ended: bool,
}

/// A response that grows with the generation; dropping it cancels the generation.
pub(crate) fn response(running: Running, dialect: impl Dialect, ping: std::time::Duration) -> Response {
    let start = Stream { running, dialect, begun: false, ended: false };
    let frames = stream::unfold(start, move |mut state| async move {
        if state.ended {
            return None;
        }
        loop {
            let event = tokio::select! {
                event = state.running.next() => event,
                () = tokio::time::sleep(ping) => {
                    let comment = Bytes::from_static(b": ping\n\n");
                    return Some((Ok::<_, Infallible>(comment), state));
                }
            };
            let mut out = Frames::default();
            if !std::mem::replace(&mut state.begun, true) {
                state.dialect.begin(&mut out);
            }
            let tokens = state.running.tokens();
            match event {
                None => {
                    state.ended = true;
                    state.dialect.end(tokens, &mut out);
                }
                Some(event) => match event.finish.as_ref().and_then(|end| state.running.error_of(event.choice, end)) {
                    Some(error) => {
                        state.ended = true;
                        state.dialect.error(&error, &mut out);
                    }
                    None => state.dialect.event(event, tokens, &mut out),
                },
            }
            if !out.0.is_empty() || state.ended {
                return Some((Ok(Bytes::from(out.0)), state));
            }
        }
    });
    let mut response = Response::new(Body::from_stream(frames));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}
