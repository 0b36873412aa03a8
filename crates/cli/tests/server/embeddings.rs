//! `/v1/embeddings`.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::client::{MODEL, Server};

const PATH: &str = "/v1/embeddings";
/// Of the fixture.
const HIDDEN: usize = 64;

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
}

fn vectors(reply: &Value) -> Vec<Vec<f32>> {
    let data = reply["data"].as_array().unwrap();
    assert!(data.iter().enumerate().all(|(i, item)| item["object"] == "embedding" && item["index"] == i), "{reply}");
    data.iter().map(|item| numbers(&item["embedding"])).collect()
}

fn length(vector: &[f32]) -> f64 {
    vector.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt()
}

#[test]
fn texts_of_every_form() {
    let server = Server::start(&[]);
    let ids = server.ok("/tokenize", &json!({ "prompt": "hello world" }))["tokens"].clone();
    let reply = server.ok(PATH, &json!({ "input": "hello world", "model": MODEL }));
    assert_eq!((&reply["object"], &reply["model"]), (&json!("list"), &json!(MODEL)));
    let count = ids.as_array().unwrap().len();
    assert_eq!(reply["usage"], json!({ "prompt_tokens": count, "total_tokens": count }));
    let text = vectors(&reply).remove(0);
    assert_eq!(text.len(), HIDDEN);
    assert!((length(&text) - 1.0).abs() < 1e-6);
    assert_eq!(vectors(&server.ok(PATH, &json!({ "input": ids })))[0], text);
    let several = vectors(&server.ok(PATH, &json!({ "input": ["other", "hello world", "中文"] })));
    assert_eq!((several.len(), &several[1]), (3, &text));
    assert_ne!(several[0], text);
    assert_eq!(vectors(&server.ok(PATH, &json!({ "input": [ids, [5, 6, 7]] })))[0], text);
    assert_eq!(server.figure("qwen:embeddings_total"), 7.0);
    assert_eq!(server.figure("vllm:generation_tokens_total"), 0.0);
}

#[test]
fn forms_and_sizes_of_vectors() {
    let server = Server::start(&["--pooling", "mean"]);
    let ask = |more: Value| {
        let mut body = json!({ "input": "some text" });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.ok(PATH, &body)["data"][0]["embedding"].clone()
    };
    let whole = numbers(&ask(json!({})));
    let bytes = STANDARD.decode(ask(json!({ "encoding_format": "base64" })).as_str().unwrap()).unwrap();
    let read: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(read, whole);
    let short = numbers(&ask(json!({ "dimensions": 8 })));
    assert!((length(&short) - 1.0).abs() < 1e-6);
    let scale = length(&whole[..8]);
    let expected: Vec<f32> = whole[..8].iter().map(|value| (f64::from(*value) / scale) as f32).collect();
    assert!(
        short.len() == 8 && short.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-6),
        "{short:?} {expected:?}"
    );
    let last = Server::start(&["--pooling", "last"]);
    assert_ne!(vectors(&last.ok(PATH, &json!({ "input": "some text" })))[0], whole);
}

#[test]
fn many_texts_are_the_same_as_each_alone() {
    let server = Server::start(&["--max_queue", "80"]);
    let texts: Vec<String> = (0..150).map(|i| format!("text number {i} {}", "and more ".repeat(i % 7))).collect();
    let found = vectors(&server.ok(PATH, &json!({ "input": texts })));
    assert_eq!(found.len(), texts.len());
    for at in [0, 63, 64, 149] {
        assert_eq!(vectors(&server.ok(PATH, &json!({ "input": texts[at] })))[0], found[at], "{at}");
    }
    assert_eq!(server.figure("vllm:num_requests_running") + server.figure("vllm:num_requests_waiting"), 0.0);
}

#[test]
fn what_can_not_be_done_is_refused_by_name() {
    let server = Server::start(&[]);
    let long: Vec<u32> = vec![5; 257];
    for (body, param) in [
        (json!({}), "input"),
        (json!({ "input": "" }), "input"),
        (json!({ "input": [] }), "input"),
        (json!({ "input": [[]] }), "input"),
        (json!({ "input": ["a", ""] }), "input[1]"),
        (json!({ "input": [[1], [2, -1]] }), "input[1]"),
        (json!({ "input": ["a", 1] }), "input[1]"),
        (json!({ "input": [1, "a"] }), "input"),
        (json!({ "input": [-1] }), "input"),
        (json!({ "input": [320] }), "input"),
        (json!({ "input": { "text": "a" } }), "input"),
        (json!({ "input": long }), "input"),
        (json!({ "input": vec!["a"; 2049] }), "input"),
        (json!({ "input": "a", "dimensions": 0 }), "dimensions"),
        (json!({ "input": "a", "dimensions": HIDDEN + 1 }), "dimensions"),
        (json!({ "input": "a", "dimensions": -1 }), "dimensions"),
        (json!({ "input": "a", "encoding_format": "int8" }), "encoding_format"),
        (json!({ "input": "a", "truncate_prompt_tokens": 4 }), "truncate_prompt_tokens"),
        (json!({ "input": "a", "normalize": false }), "normalize"),
        (json!({ "input": "a", "priority": 3 }), "priority"),
        (json!({ "input": "a", "stream": true }), "stream"),
        (json!({ "input": "a", "pooling": "mean" }), "pooling"),
    ] {
        let (status, _, name, message) = server.refused(PATH, &body);
        assert_eq!((status, name.as_str()), (400, param), "{body}: {message}");
    }
    // One text of many that is too long is found before any is computed.
    let mut texts = vec![json!([5, 6]); 100];
    texts.push(json!(long));
    let (status, _, param, message) = server.refused(PATH, &json!({ "input": texts }));
    assert_eq!((status, param.as_str()), (400, "input[100]"));
    assert!(message.starts_with("input[100]: the text has 257 tokens") && !message.contains("answer"), "{message}");
    assert_eq!(server.figure("qwen:steps_total"), 0.0);
    assert_eq!(server.refused(PATH, &json!({ "input": "a", "model": "other" })).0, 404);
    let may = Server::start(&["--allow_priority"]);
    let reply = may.post(PATH, &json!({ "input": "a", "priority": 3, "stream": false }));
    assert_eq!((reply.status, reply.header("x-ignored-parameters")), (200, None));
    let without = Server::start(&["--pooling", "none"]);
    let (status, code, _, message) = without.refused(PATH, &json!({ "input": "a" }));
    assert_eq!((status, code.as_str()), (501, "not_implemented"));
    assert!(message.contains("--pooling"), "{message}");
}
