//! What is promised of the default model, on the real one, fetched as a first run fetches it.

use serde_json::Value;

use crate::common::{qwen, qwen_eval, stdout};

fn json(command: &mut std::process::Command) -> Value {
    serde_json::from_str(&stdout(command)).unwrap()
}

#[test]
fn it_answers_and_holds_its_weights_once() {
    stdout(qwen().args(["models", "fetch", "smollm2"]));
    let inspected = json(qwen().args(["models", "inspect", "smollm2", "--json"]));
    let file_bytes = inspected["file_bytes"].as_u64().unwrap();
    let arguments = ["generate", "--prompt", "The capital of France is", "--max-tokens", "8", "--json"];
    let answer = json(qwen().args(arguments));
    assert!(answer["text"].as_str().unwrap().contains("Paris"), "{answer}");
    // The cache of a few tokens is far below a megabyte.
    let limit = file_bytes + file_bytes * 15 / 100 + 100_000_000;
    let peak = answer["peak_rss_bytes"].as_u64().unwrap();
    assert!(peak <= limit, "peak {peak}, limit {limit}");
}

#[test]
fn the_default_precision_stays_within_the_limit_on_divergence() {
    stdout(qwen().args(["models", "fetch", "smollm2"]));
    // The portable kernels are hundreds of times slower than the others; that they agree bit for bit is tested elsewhere.
    let portable = std::env::var("QWEN_CPU_ISA").is_ok_and(|isa| isa == "scalar");
    let tokens = if portable { 64 } else { 512 };
    let found = json(qwen_eval().args(["kl", "--file", "../README.md", "--tokens", &tokens.to_string(), "--json"]));
    assert_eq!(found["tokens"], tokens);
    let mean = found["kl_mean"].as_f64().unwrap();
    assert!(mean <= 0.002, "{found}");
    assert!(portable || found["top1_agreement"].as_f64().unwrap() >= 0.97, "{found}");
}
