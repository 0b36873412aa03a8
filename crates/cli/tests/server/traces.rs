//! Spans, as a collector receives them.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use serde_json::json;

use crate::client::{MODEL, Server};

const CHAT: &str = "/v1/chat/completions";
const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// Takes deliveries until the test ends; gives what was delivered to which path.
fn collector() -> (String, Receiver<(String, ExportTraceServiceRequest)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (sender, received) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let sender = sender.clone();
            std::thread::spawn(move || deliveries(stream.unwrap(), |path, body| drop(sender.send((path, body)))));
        }
    });
    (url, received)
}

fn deliveries(mut stream: TcpStream, mut take: impl FnMut(String, ExportTraceServiceRequest)) {
    let mut bytes = Vec::new();
    loop {
        let head = loop {
            if let Some(at) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
                break String::from_utf8(bytes.drain(..at + 4).collect()).unwrap();
            }
            if !more(&mut stream, &mut bytes) {
                return;
            }
        };
        let lines: Vec<String> = head.lines().map(str::to_lowercase).collect();
        assert!(lines.iter().any(|line| line == "content-type: application/x-protobuf"), "{head}");
        let length = lines.iter().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok()).unwrap();
        while bytes.len() < length {
            assert!(more(&mut stream, &mut bytes), "the body ended early");
        }
        let body: Vec<u8> = bytes.drain(..length).collect();
        let path = head.split(' ').nth(1).unwrap().to_owned();
        take(path, ExportTraceServiceRequest::decode(body.as_slice()).unwrap());
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
    }
}

fn more(stream: &mut TcpStream, bytes: &mut Vec<u8>) -> bool {
    let mut buffer = [0; 4096];
    let count = stream.read(&mut buffer).unwrap_or(0);
    bytes.extend_from_slice(&buffer[..count]);
    count > 0
}

fn attributes(list: &[KeyValue]) -> BTreeMap<String, String> {
    let text = |value: &KeyValue| match value.value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(Any::StringValue(text)) => text.clone(),
        Some(Any::IntValue(number)) => number.to_string(),
        other => panic!("{other:?}"),
    };
    list.iter().map(|value| (value.key.clone(), text(value))).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn a_request_is_a_span_with_its_phases() {
    let (url, received) = collector();
    let mut server = Server::start_with(&["--otlp_endpoint", &url], &[("OTEL_SERVICE_NAME", "mine")]);
    let body =
        json!({ "messages": [{ "role": "user", "content": "secret words" }], "max_tokens": 5, "ignore_eos": true });
    let reply = server.request("POST", CHAT, &[("traceparent", PARENT), ("x-request-id", "first")], &body.to_string());
    assert_eq!(reply.status, 200);
    let unsampled = PARENT.replace("-01", "-00");
    assert_eq!(server.request("POST", CHAT, &[("traceparent", &unsampled)], &body.to_string()).status, 200);
    assert_eq!(server.request("POST", CHAT, &[("x-request-id", "wrong")], "{}").status, 400);
    server.ok("/v1/embeddings", &json!({ "input": ["a", "b"] }));
    server.get("/metrics");
    // The end of the server delivers what is left.
    server.signal("-TERM");
    assert_eq!(server.wait(), Some(0));
    let (mut spans, mut services): (Vec<Span>, Vec<String>) = (Vec::new(), Vec::new());
    for (path, delivery) in received.try_iter() {
        assert_eq!(path, "/v1/traces");
        for resource in delivery.resource_spans {
            services.push(attributes(&resource.resource.unwrap().attributes)["service.name"].clone());
            spans.extend(resource.scope_spans.into_iter().flat_map(|scope| scope.spans));
        }
    }
    assert!(!services.is_empty() && services.iter().all(|name| name == "mine"), "{services:?}");
    assert!(!format!("{spans:?}").contains("secret words"), "nothing of a prompt is told");
    let named = |name: &str| -> Vec<&Span> { spans.iter().filter(|span| span.name == name).collect() };
    let chats = named(&format!("POST {CHAT}"));
    assert_eq!(chats.len(), 2, "the one that was not sampled has no span: {spans:#?}");
    let of = |id: &str| *chats.iter().find(|span| attributes(&span.attributes)["qwen.request_id"] == id).unwrap();
    let (first, wrong) = (of("first"), of("wrong"));
    assert_eq!(
        (hex(&first.trace_id), hex(&first.parent_span_id)),
        ("0af7651916cd43dd8448eb211c80319c".into(), "b7ad6b7169203331".into())
    );
    assert!(wrong.parent_span_id.is_empty() && attributes(&wrong.attributes)["http.response.status_code"] == "400");
    let told = attributes(&first.attributes);
    for (name, value) in [
        ("http.route", CHAT),
        ("http.response.status_code", "200"),
        ("gen_ai.request.model", MODEL),
        ("gen_ai.usage.output_tokens", "5"),
    ] {
        assert_eq!(told[name], value, "{told:?}");
    }
    assert_eq!(first.events.iter().map(|event| event.name.as_str()).collect::<Vec<_>>(), ["answer ended"]);
    let below = |parent: &Span| -> Vec<&Span> {
        spans.iter().filter(|span| span.parent_span_id == parent.span_id && span.trace_id == parent.trace_id).collect()
    };
    let phases = below(first);
    assert_eq!(phases.iter().map(|span| span.name.as_str()).collect::<Vec<_>>(), ["queue", "prefill", "decode"]);
    assert_eq!(attributes(&phases[2].attributes)["qwen.tokens"], "5");
    let mut end = phases[0].start_time_unix_nano;
    for phase in &phases {
        assert_eq!(phase.start_time_unix_nano, end, "one begins where the other ended");
        end = phase.end_time_unix_nano;
    }
    assert!(below(wrong).is_empty());
    let vectors = named("POST /v1/embeddings")[0];
    let phases: Vec<&str> = below(vectors).iter().map(|span| span.name.as_str()).collect();
    assert_eq!(phases.iter().filter(|name| **name == "prefill").count(), 2, "{phases:?}");
    assert!(!phases.contains(&"decode") && !spans.iter().any(|span| span.name.contains("/metrics")));
}

#[test]
fn a_collector_that_is_gone_or_silent_holds_nobody_up() {
    // It takes connections and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    for url in [url.as_str(), "http://127.0.0.1:1"] {
        let environment = [("OTEL_EXPORTER_OTLP_ENDPOINT", url), ("OTEL_BSP_SCHEDULE_DELAY", "1")];
        let mut server = Server::start_with(&[], &environment);
        for _ in 0..3 {
            server.ok("/v1/completions", &json!({ "prompt": "a", "max_tokens": 2 }));
        }
        server.signal("-TERM");
        assert_eq!(server.wait(), Some(0), "{url}");
    }
    drop(silent);
    let mut wrong = std::process::Command::new(env!("CARGO_BIN_EXE_qwen-server"));
    let wrong = wrong.args(["--port", "0", "--otlp_endpoint", "no url", "--model", "none"]).output().unwrap();
    let told = String::from_utf8(wrong.stderr).unwrap();
    assert!(!wrong.status.success() && told.contains("--otlp_endpoint"), "{told}");
}
