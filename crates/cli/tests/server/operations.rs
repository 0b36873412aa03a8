//! Health, figures, keys, hosts, settings, logs, the end.

use serde_json::{Value, json};

use crate::client::{MODEL, Server};

const CHAT: &str = "/v1/chat/completions";

fn chat(max_tokens: u32) -> Value {
    json!({ "messages": [{ "role": "user", "content": "hi" }], "max_tokens": max_tokens, "ignore_eos": true })
}

#[test]
fn health_models_and_figures() {
    let server = Server::start(&["--warmup", "--warmup_tokens", "4"]);
    assert_eq!(server.get("/livez").body, "ok");
    for path in ["/readyz", "/health", "/health/ready", "/v2/health/ready", "/ping"] {
        assert_eq!((server.get(path).status, &server.get(path).json()["status"]), (200, &json!("ready")), "{path}");
    }
    let health = server.get("/healthz").json();
    assert_eq!(health["status"], "ok");
    for name in ["temperature", "compute_util", "memory_util", "error_count", "last_reset_time"] {
        assert!(health["cpu_0"].get(name).is_some(), "{health}");
    }
    let models = server.get("/v1/models").json();
    assert_eq!((&models["data"][0]["id"], &models["data"][0]["max_model_len"]), (&json!(MODEL), &json!(256)));
    assert_eq!(server.get("/v1/models/tiny").status, 200);
    assert_eq!(server.get("/v1/models/org/other").status, 404);
    let before = server.figure("vllm:generation_tokens_total");
    server.ok(CHAT, &chat(5));
    assert_eq!(server.figure("vllm:generation_tokens_total") - before, 5.0);
    assert_eq!(server.figure("vllm:request_success_total"), 1.0);
    assert_eq!(server.figure("vllm:e2e_request_latency_seconds_count"), 1.0);
    assert_eq!(server.figure("vllm:num_requests_running"), 0.0);
    let figures = server.get("/metrics");
    assert!(figures.header("content-type").unwrap().starts_with("application/openmetrics-text"));
    assert!(figures.body.contains("qwen:hli") && figures.body.ends_with("# EOF\n"));
    // An idle server's cache is free, in one piece but for what is kept for reuse.
    let [free, largest, share] =
        ["qwen:kv_free_bytes", "qwen:kv_largest_free_bytes", "qwen:kv_fragmentation"].map(|name| server.figure(name));
    assert!(largest > 0.0 && largest <= free && (0.0..1.0).contains(&share), "{free} {largest} {share}");
    assert!(server.figure("qwen:kv_backed_bytes") > 0.0 && server.figure("qwen:activations_bytes") > 0.0);
    assert_eq!(server.get("/version").json()["version"], env!("CARGO_PKG_VERSION"));
}

/// A JSON value with the types of its leaves instead of their values.
fn shape(value: &Value) -> Value {
    match value {
        Value::Null => "null".into(),
        Value::Bool(_) => "bool".into(),
        Value::Number(_) => "number".into(),
        Value::String(_) => "text".into(),
        Value::Array(all) => Value::Array(all.first().map(shape).into_iter().collect()),
        Value::Object(map) => map.iter().map(|(name, value)| (name.clone(), shape(value))).collect(),
    }
}

#[test]
fn everything_that_the_page_shows() {
    let server = Server::start(&[]);
    let first = server.get("/status").json();
    assert_eq!(first["status"], "ready");
    assert_eq!(first["time_to_first_token"]["p50"], Value::Null);
    server.ok(CHAT, &chat(40));
    // The decisions are looked up beside the first question for them.
    let status = loop {
        let status = server.get("/status").json();
        if !status["dispatch"].is_null() {
            break status;
        }
    };
    insta::assert_snapshot!("status", serde_json::to_string_pretty(&shape(&status)).unwrap());
    let instance = &status["instances"][0];
    assert_eq!((&instance["generated_tokens"], &status["time_to_first_token"]["samples"]), (&json!(40), &json!(1)));
    assert_eq!((&instance["device"]["kind"], &instance["device"]["status"]), (&json!("cpu"), &json!("ok")));
    let cache = &instance["cache"];
    let runs = cache["map"]["runs"].as_array().unwrap();
    let blocks = |state: &str| -> u64 {
        runs.iter().filter(|run| state.is_empty() || run[0] == state).map(|run| run[1].as_u64().unwrap()).sum()
    };
    assert_eq!((json!(blocks("")), json!(blocks("used"))), (cache["blocks"].clone(), json!(0)));
    assert!(blocks("cached") > 0 && json!(blocks("cached")) == cache["cached"], "{cache}");
    assert!(status["dispatch"][0]["lines"][0].as_str().unwrap().starts_with("[DISPATCH] Top-level: "), "{status}");
}

#[test]
fn documents_and_pages_come_from_the_binary() {
    let server = Server::start(&[]);
    assert!(server.get("/").body.contains("qwen-server"));
    assert!(server.get("/").header("content-security-policy").is_some());
    assert_eq!(server.get("/web/../Cargo.toml").status, 404);
    let document = server.get("/openapi.json").json();
    for path in [CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/healthz"] {
        assert!(document["paths"].get(path).is_some(), "{path}");
    }
    assert!(document["paths"].get("/status").is_some());
    let page = server.get("/").body;
    let mut named = page.split("\"/web/").skip(1).filter_map(|rest| rest.split('"').next()).peekable();
    assert!(named.peek().is_some());
    for name in named {
        let file = server.get(&format!("/web/{name}"));
        let kind = file.header("content-type").unwrap().split(';').next().unwrap();
        assert!(["text/css", "text/javascript", "image/svg+xml"].contains(&kind), "{name} is {kind}");
        assert!(!file.header("content-security-policy").unwrap().contains("unsafe"), "{name}");
    }
    assert!(matches!(server.get("/docs/").status, 200 | 303 | 307));
    assert_eq!(server.get("/status").json()["docs"], true);
    let bare = Server::start(&["--docs=false"]);
    assert_eq!((bare.get("/openapi.json").status, bare.get("/docs/").status), (404, 404));
    assert_eq!(bare.get("/status").json()["docs"], false);
}

#[test]
fn keys_are_asked_for_everywhere_but_health() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys.toml");
    // SHA-256 of "secret".
    let hash = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
    std::fs::write(
        &file,
        format!("[[keys]]\nname = \"a\"\nsha256 = \"{hash}\"\nmax_concurrent = 1\nrequests_per_minute = 2\n"),
    )
    .unwrap();
    let server = Server::start(&["--api_keys_file", file.to_str().unwrap(), "--admin"]);
    for path in ["/livez", "/readyz", "/health", "/"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    for path in ["/v1/models", "/metrics", "/healthz", "/version", "/openapi.json", "/load", "/status"] {
        assert_eq!(server.get(path).status, 401, "{path}");
    }
    let key = ("Authorization", "Bearer secret");
    assert_eq!(server.request("GET", "/v1/models", &[key], "").status, 200);
    assert_eq!(server.request("GET", "/v1/models", &[("x-api-key", "secret")], "").status, 200);
    for wrong in ["Bearer Secret", "Bearer", "Basic secret", "Bearer secret2"] {
        assert_eq!(server.request("GET", "/v1/models", &[("Authorization", wrong)], "").status, 401, "{wrong}");
    }
    assert_eq!(server.request("POST", "/admin/drain", &[key], "").status, 403);
    let ask = || server.request("POST", CHAT, &[key], &chat(1).to_string());
    assert_eq!((ask().status, ask().status), (200, 200));
    let refused = ask();
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (429, &json!("rate_limit_exceeded")));
    assert!(refused.header("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
    // Whoever refuses it: the gate, the router, the handler.
    for (method, headers, status, kind) in [
        ("POST", &[][..], 401, "authentication_error"),
        ("POST", &[("Host", "elsewhere.example")][..], 403, "permission_error"),
        ("PUT", &[key][..], 405, "invalid_request_error"),
        ("POST", &[key, ("Content-Type", "text/plain")][..], 415, "invalid_request_error"),
    ] {
        let shaped = server.request(method, "/v1/messages", headers, "{}");
        assert_eq!((shaped.status, &shaped.json()["type"]), (status, &json!("error")), "{method} {headers:?}");
        assert_eq!(shaped.json()["error"]["type"], kind, "{method} {headers:?}");
        assert!(shaped.header("x-request-id").is_some());
    }
}

#[test]
fn administration_is_off_unless_asked_for() {
    let server = Server::start(&[]);
    assert_eq!(server.post("/admin/drain", &json!({})).status, 404);
    let server = Server::start(&["--admin"]);
    assert_eq!(server.post("/admin/cancel", &json!({})).status, 200);
    assert_eq!(server.post("/admin/drain", &json!({})).status, 200);
    assert_eq!((server.get("/readyz").status, server.post(CHAT, &chat(1)).status), (503, 503));
}

#[test]
fn foreign_hosts_and_origins() {
    let server = Server::start(&[]);
    let host = |name: &str| server.request("GET", "/v1/models", &[("Host", name)], "").status;
    assert_eq!((host("localhost:1"), host("evil.example"), host("127.0.0.1.evil.example")), (200, 403, 403));
    let origin = ("Origin", "https://chat.example");
    let reply = server.request("GET", "/v1/models", &[origin], "");
    assert_eq!(reply.header("access-control-allow-origin"), None);
    let server = Server::start(&["--allowed_origins", "https://chat.example"]);
    let preflight = server.request("OPTIONS", CHAT, &[origin, ("Access-Control-Request-Method", "POST")], "");
    assert_eq!(preflight.header("access-control-allow-origin"), Some("https://chat.example"));
    let other = server.request("GET", "/v1/models", &[("Origin", "https://evil.example")], "");
    assert_ne!(other.header("access-control-allow-origin"), Some("https://evil.example"));
}

#[test]
fn settings_from_three_places() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("server.toml");
    std::fs::write(&file, "max_model_len = 64\nserved_model_name = [\"from-file\"]\nmax-n = 3\n").unwrap();
    let server = Server::start_with(&["--config", file.to_str().unwrap()], &[("QWEN_SERVER_MAX_N", "2")]);
    let card = server.get("/v1/models").json()["data"][0].clone();
    assert_eq!((&card["id"], &card["max_model_len"]), (&json!(MODEL), &json!(64)));
    let mut body = chat(1);
    body["n"] = 3.into();
    assert!(server.refused(CHAT, &body).3.contains("1 to 2"));
}

#[test]
fn requests_have_ids_and_logs_are_json() {
    let server = Server::start(&["--log_format", "json"]);
    let reply = server.request("POST", CHAT, &[("X-Request-Id", "abc-1")], &chat(2).to_string());
    assert_eq!(reply.header("x-request-id"), Some("abc-1"));
    for name in ["generated", "answered"] {
        let line: Value = serde_json::from_str(&server.wait_for(&format!("\"message\":\"{name}\""))).unwrap();
        assert_eq!(line["request_id"], "abc-1", "{line}");
    }
    assert!(server.get("/livez").header("x-request-id").unwrap().starts_with("req_"));
}

#[test]
fn it_stops_when_it_is_told() {
    let mut server = Server::start(&[]);
    server.signal("-TERM");
    assert_eq!(server.wait(), Some(0));
}
