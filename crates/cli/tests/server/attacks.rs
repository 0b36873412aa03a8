//! What a hostile client may send: each gets an error of the 4xx kind before anything is computed for it, and the server goes on.
//! How long that takes is measured by `benches/server/run attack`, where nothing else runs.

use std::io::{ErrorKind, Write};

use serde_json::{Value, json};

use crate::client::{Server, read_reply};

const CHAT: &str = "/v1/chat/completions";

fn with(more: Value) -> String {
    let mut body = json!({ "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 4 });
    let Value::Object(more) = more else { panic!("expected an object") };
    body.as_object_mut().unwrap().extend(more);
    body.to_string()
}

#[test]
fn huge_and_broken_values() {
    let server = Server::start(&[]);
    let nested = |n: usize| format!("{{\"messages\":{}1{}}}", "[".repeat(n), "]".repeat(n));
    let many_messages: Vec<Value> = (0..20_000).map(|_| json!({ "role": "user", "content": "" })).collect();
    let biased: serde_json::Map<String, Value> = (0..5000).map(|i| (i.to_string(), json!(1))).collect();
    let unknown: serde_json::Map<String, Value> = (0..100_000).map(|i| (format!("x{i}"), json!(i))).collect();
    let bodies: Vec<(&str, String, u16)> = vec![
        ("max_tokens", with(json!({ "max_tokens": u64::MAX })), 400),
        (
            "max_tokens over 64 bits",
            with(json!({})).replace("\"max_tokens\":4", "\"max_tokens\":99999999999999999999999"),
            400,
        ),
        ("negative max_tokens", with(json!({ "max_tokens": -1 })), 400),
        ("n", with(json!({ "n": 5_000_000 })), 400),
        ("n over 32 bits", with(json!({ "n": 1u64 << 40 })), 400),
        ("top_logprobs", with(json!({ "logprobs": true, "top_logprobs": 4_000_000_000u32 })), 400),
        ("logit_bias", with(json!({ "logit_bias": biased })), 400),
        ("stop", with(json!({ "stop": vec!["x"; 100_000] })), 400),
        ("long stop", with(json!({ "stop": "x".repeat(1_000_000) })), 400),
        ("NaN", with(json!({})).replace("\"max_tokens\":4", "\"temperature\":NaN"), 400),
        ("infinity", with(json!({})).replace("\"max_tokens\":4", "\"temperature\":1e999"), 400),
        ("deep JSON", nested(100_000), 400),
        ("unclosed JSON", "[".repeat(1_000_000), 400),
        ("many messages", with(json!({ "messages": many_messages })), 400),
        ("unknown parameters", with(json!(unknown)), 400),
        ("unknown entries of a message", with(json!({ "messages": [unknown] })), 400),
        ("path traversal", with(json!({ "model": "../../../../etc/passwd" })), 404),
        ("header injection", with(json!({ "model": "a\r\nSet-Cookie: x=1" })), 404),
        (
            "image URL",
            with(
                json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "http://169.254.169.254/" } }] }] }),
            ),
            400,
        ),
        ("template", with(json!({ "chat_template": "{% for i in range(10**9) %}x{% endfor %}" })), 400),
        ("template by kwargs", with(json!({ "chat_template_kwargs": { "chat_template": "{{ 1 }}" } })), 400),
        ("duplicate keys", "{\"messages\":1,\"messages\":2}".into(), 400),
        ("no object", "[]".into(), 400),
        ("empty", String::new(), 400),
        ("UTF-16", "\u{feff}{}".into(), 400),
        ("long prompt", with(json!({ "messages": [{ "role": "user", "content": "word ".repeat(200_000) }] })), 400),
    ];
    for (name, body, status) in bodies {
        let reply = server.request("POST", CHAT, &[], &body);
        assert_eq!(reply.status, status, "{name}: {}", reply.body);
        assert!(
            reply.json()["error"]["message"].as_str().is_some_and(|text| !text.is_empty() && text.len() < 2000),
            "{name}"
        );
        assert!(!reply.headers.iter().any(|(header, _)| header == "set-cookie"), "{name}");
    }
    for ids in [json!([u32::MAX]), json!([1e9]), json!(["a", 1])] {
        assert_eq!(server.post("/v1/completions", &json!({ "prompt": ids, "max_tokens": 1 })).status, 400, "{ids}");
        assert_eq!(server.post("/v1/embeddings", &json!({ "input": ids })).status, 400, "{ids}");
    }
    // Nothing of this came as far as the model.
    let work = ["qwen:steps_total", "qwen:computed_tokens_total", "vllm:prompt_tokens_total"];
    assert_eq!(work.map(|name| server.figure(name)), [0.0; 3]);
    assert_eq!(server.post(CHAT, &serde_json::from_str(&with(json!({}))).unwrap()).status, 200);
}

#[test]
fn bombs_of_grammars() {
    let server = Server::start(&[]);
    let deep = (0..60)
        .fold(json!({ "type": "string" }), |schema, _| json!({ "type": "object", "properties": { "a": schema } }));
    let wide: serde_json::Map<String, Value> =
        (0..20_000).map(|i| (format!("p{i}"), json!({ "type": "string" }))).collect();
    // Ten choices at once are a thousand; and a thousand as such.
    let objects: Vec<Value> =
        (0..1000).map(|i| json!({ "type": "object", "properties": { format!("k{i}"): {} } })).collect();
    let choices: Vec<Value> = (0..10).map(|i| json!({ "anyOf": objects[2 * i..2 * i + 2] })).collect();
    let bombs = [
        json!({ "guided_regex": "(a{1,1000}){1,1000}{1,1000}" }),
        json!({ "guided_regex": "(((((((a|b)*)*)*)*)*)*)*(" }),
        json!({ "guided_regex": "a{100000000}" }),
        json!({ "guided_json": deep }),
        json!({ "guided_json": { "type": "object", "properties": wide } }),
        json!({ "guided_json": { "$ref": "http://10.0.0.1/schema.json" } }),
        json!({ "guided_json": { "$ref": "#" } }),
        json!({ "guided_json": { "type": "array", "minItems": 1_000_000_000, "items": {} } }),
        json!({ "guided_grammar": "start: start start" }),
        json!({ "guided_grammar": "start: \"a\" ~ 1000000000" }),
        json!({ "guided_grammar": "x".repeat(1_000_000) }),
        json!({ "guided_choice": vec!["x".repeat(1000); 4096] }),
        json!({ "grammar": include_str!("../../../../fuzz/corpus/gbnf/nested_repetitions") }),
        json!({ "guided_json": { "type": "object", "allOf": choices } }),
        json!({ "guided_json": { "anyOf": objects } }),
    ];
    let mut answered = 0.0;
    for bomb in bombs {
        let reply = server.request("POST", CHAT, &[], &with(bomb.clone()));
        let shown: String = bomb.to_string().chars().take(80).collect();
        // Some are harmless to this compiler; then the answer is as short as it was asked to be.
        assert!(reply.status == 400 || reply.status == 200, "{shown}: {} {}", reply.status, reply.body);
        answered += f64::from(u8::from(reply.status == 200));
    }
    assert!(server.figure("vllm:generation_tokens_total") <= 4.0 * answered);
    assert_eq!(server.request("POST", CHAT, &[], &with(json!({}))).status, 200);
}

#[test]
fn bodies_headers_and_lines() {
    let server = Server::start(&["--max_body_bytes", "100000", "--header_timeout", "1", "--body_timeout", "1"]);
    // Declared too large: refused before it is read.
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nConnection: close\r\n",
        server.address
    );
    let declared = server.raw(format!("{head}Content-Length: 100000000\r\n\r\n").as_bytes());
    assert_eq!(declared.status, 413);
    // Not declared: refused when it has become too large.
    let chunk = format!("{:x}\r\n{}\r\n", 150_000, " ".repeat(150_000));
    let chunked = server.raw(format!("{head}Transfer-Encoding: chunked\r\n\r\n{chunk}").as_bytes());
    assert_eq!(chunked.status, 413);
    assert_eq!(server.request("POST", CHAT, &[("Content-Type", "text/plain")], "{}").status, 415);
    assert_eq!(server.request("PUT", CHAT, &[], "{}").status, 405);
    assert_eq!(server.request("GET", "/etc/passwd", &[], "").status, 404);
    let long = "x".repeat(100_000);
    let reply = server.request("GET", "/livez", &[("X-Long", &long)], "");
    assert!((400..500).contains(&reply.status), "{}", reply.status);
    // A body that never comes.
    let mut stream = server.connect();
    stream.write_all(format!("{head}Content-Length: 50\r\n\r\n{{").as_bytes()).unwrap();
    assert_eq!(read_reply(&mut stream).status, 408);
    // Headers that never end: the connection is closed, with or without a word.
    let mut stream = server.connect();
    stream.write_all(b"GET /livez HTTP/1.1\r\nHost: loc").unwrap();
    let mut rest = Vec::new();
    let ended = std::io::Read::read_to_end(&mut stream, &mut rest).map_err(|error| error.kind());
    assert!(!matches!(ended, Err(ErrorKind::WouldBlock | ErrorKind::TimedOut)), "the connection was kept open");
    // Bytes that are no HTTP.
    for garbage in [&b"\x16\x03\x01\x02\x00\x01\x00"[..], b"GET\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"] {
        let mut stream = server.connect();
        stream.write_all(garbage).unwrap();
        let mut rest = Vec::new();
        let _ = std::io::Read::read_to_end(&mut stream, &mut rest);
    }
    assert_eq!(server.get("/livez").status, 200);
}

#[test]
fn ids_can_not_write_into_logs() {
    let server = Server::start(&["--log_format", "json"]);
    let reply = server.request("POST", CHAT, &[("X-Request-Id", "a\",\"level\":\"FAKE")], &with(json!({})));
    assert!(reply.header("x-request-id").unwrap().starts_with("req_"));
    let line = server.wait_for("\"message\":\"answered\"");
    assert!(!line.contains("FAKE"), "{line}");
}
