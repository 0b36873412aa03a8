//! `qwen-bench throughput`: what it tells, not how fast it is.

use serde_json::Value;

use crate::common::{qwen_bench, stdout};

/// Runs a small bench; limits, which take seconds, only where they are the point.
fn bench(arguments: &[&str]) -> Value {
    let mut command = qwen_bench();
    command.args(["throughput", "--model", "models/qwen2", "--repetitions", "2", "--json"]);
    serde_json::from_str(&stdout(command.args(arguments))).unwrap()
}

fn positive(value: &Value) -> f64 {
    let number = value.as_f64().unwrap();
    assert!(number.is_finite() && number > 0.0, "{value}");
    number
}

#[test]
fn rates_limits_and_memory() {
    let report = bench(&["--prompt", "24", "--generate", "3", "--depth", "17", "--batch", "2", "--threads", "2"]);
    for part in ["prefill", "decode"] {
        let rates = &report[part]["tokens_per_second"];
        let [median, min, max] = ["median", "min", "max"].map(|name| positive(&rates[name]));
        assert!(min <= median && median <= max);
        assert_eq!(rates["samples"].as_array().unwrap().len(), 2);
        for name in ["limit_tokens_per_second", "share_of_limit", "bytes_per_step", "operations_per_step"] {
            positive(&report[part][name]);
        }
        assert!(report[part].get("breakdown").is_none());
    }
    // 48 tokens are one step of a prompt, of which there are two.
    assert_eq!((&report["prefill"]["steps"], &report["decode"]["steps"]), (&1.into(), &3.into()));
    for name in ["read_bytes_per_second", "int8_operations_per_second", "f32_operations_per_second"] {
        positive(&report["limits"][name]);
    }
    assert!(!report["limits"]["measured"].as_array().unwrap().is_empty());
    assert!(report["peak_rss_bytes"].is_u64() || report["peak_rss_bytes"].is_null());
    assert_eq!((&report["batch"], &report["depth"], &report["threads"]), (&2.into(), &17.into(), &2.into()));
}

#[test]
fn nothing_leaves_a_part_out() {
    let prefill = bench(&["--no-limits", "--prompt", "8", "--generate", "0"]);
    assert!(prefill.get("decode").is_none() && prefill["prefill"].is_object());
    assert!(prefill["limits"].is_null() && prefill["prefill"]["share_of_limit"].is_null());
    let decode = bench(&["--no-limits", "--prompt", "0", "--generate", "2"]);
    assert!(decode.get("prefill").is_none() && decode["decode"].is_object());
}

/// Every instruction has a time, in a model with experts and in one with latent attention too.
#[test]
fn breakdowns_name_what_is_computed() {
    for model in ["models/qwen2", "gguf/qwen3moe.gguf", "gguf/deepseek2-v3-split.gguf"] {
        let arguments = ["--no-limits", "--breakdown", "--prompt", "20", "--generate", "2", "--repetitions", "1"];
        let mut command = qwen_bench();
        command.args(["throughput", "--model", model, "--json"]).args(arguments);
        let report: Value = serde_json::from_str(&stdout(&mut command)).unwrap();
        for part in ["prefill", "decode"] {
            let lines = report[part]["breakdown"].as_array().unwrap();
            let shares: f64 = lines.iter().map(|line| positive(&line["share_of_time"])).sum();
            assert!((shares - 1.0).abs() < 1e-6);
            let products = lines.iter().filter(|line| line["op"] == "gemm");
            assert!(products.clone().count() > 2);
            assert!(products.clone().all(|line| line["bytes"].as_f64() > Some(0.0)));
            let attention = lines.iter().find(|line| line["op"].as_str().unwrap().ends_with("attention")).unwrap();
            positive(&attention["operations"]);
            positive(&attention["bytes"]);
        }
    }
}

#[test]
fn people_get_a_table() {
    let mut command = qwen_bench();
    command.args(["throughput", "--model", "models/qwen2", "--no-limits", "--breakdown", "--repetitions", "1"]);
    let text = stdout(command.args(["--prompt", "8", "--generate", "2"]));
    for part in ["prefill 8", "decode 2", "tokens/s", "attention", "memory"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}
