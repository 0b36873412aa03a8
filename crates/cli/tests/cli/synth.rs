//! `qwen models synth`: a file of a real shape runs.

use serde_json::Value;

use crate::common::{qwen, stdout};

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&stdout(qwen().args(arguments))).unwrap()
}

#[test]
fn a_made_up_model_runs() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("model.gguf");
    let path = path.to_str().unwrap();
    let made = json(&[
        "models",
        "synth",
        "--arch",
        "qwen2.5-0.5b",
        "--layers",
        "1",
        "--quant",
        "q4_0",
        "--output",
        path,
        "--json",
    ]);
    assert_eq!((&made["layers"], &made["path"]), (&1.into(), &path.into()));
    let inspected = json(&["models", "inspect", path, "--json"]);
    assert_eq!(inspected["vocab_size"], 151_936);
    assert_eq!(inspected["hidden_size"], 896);
    assert_eq!(made["bytes"], inspected["file_bytes"]);
    let answer = json(&["generate", "--model", path, "--prompt", "Hi", "--max-tokens", "2", "--ignore-eos", "--json"]);
    assert_eq!(answer["tokens"].as_array().unwrap().len(), 2);
    assert!(!std::path::Path::new(&format!("{path}.partial")).exists());
}
