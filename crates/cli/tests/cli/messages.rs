//! What people see: help, and the sentence that every failure ends in.

use crate::common::{qwen, qwen_bench, qwen_eval, transcript};

#[test]
fn help_of_every_command() {
    insta::assert_snapshot!("help_qwen", transcript(qwen().arg("--help")));
    for command in ["chat", "generate", "models", "tokenize", "devices"] {
        insta::assert_snapshot!(format!("help_qwen_{command}"), transcript(qwen().args([command, "--help"])));
    }
    insta::assert_snapshot!("help_qwen_eval", transcript(qwen_eval().arg("--help")));
    insta::assert_snapshot!("help_qwen_devices_explain", transcript(qwen().args(["devices", "explain", "--help"])));
    for command in ["list", "fetch", "inspect", "synth"] {
        let help = transcript(qwen().args(["models", command, "--help"]));
        insta::assert_snapshot!(format!("help_qwen_models_{command}"), help);
    }
    for command in ["logits", "compare", "kl"] {
        insta::assert_snapshot!(format!("help_qwen_eval_{command}"), transcript(qwen_eval().args([command, "--help"])));
    }
}

#[test]
fn help_of_the_bench() {
    insta::assert_snapshot!("help_qwen_bench", transcript(qwen_bench().arg("--help")));
    insta::assert_snapshot!("help_qwen_bench_throughput", transcript(qwen_bench().args(["throughput", "--help"])));
    insta::assert_snapshot!("help_qwen_bench_kernels", transcript(qwen_bench().args(["kernels", "--help"])));
}

#[test]
fn benches_that_cannot_be() {
    let bench = |arguments: &[&str]| {
        transcript(qwen_bench().args(["throughput", "--model", "models/qwen2", "--no-limits"]).args(arguments))
    };
    insta::assert_snapshot!("bench_nothing", bench(&["--prompt", "0", "--generate", "0"]));
    insta::assert_snapshot!("bench_batch", bench(&["--batch", "0"]));
    insta::assert_snapshot!("bench_depth", bench(&["--prompt", "0", "--generate", "4", "--depth", "300"]));
    insta::assert_snapshot!("bench_long", bench(&["--prompt", "100000", "--generate", "0"]));
}

#[test]
fn made_up_models_that_cannot_be() {
    let synth = |arguments: &[&str]| transcript(qwen().args(["models", "synth"]).args(arguments));
    let arch = "deepseek-r1-distill-qwen-1.5b";
    insta::assert_snapshot!("synth_layers", synth(&["--arch", arch, "--layers", "29", "--output", "x.gguf"]));
    insta::assert_snapshot!("synth_output", synth(&["--arch", arch, "--output", "absent/x.gguf"]));
    insta::assert_snapshot!("synth_quant", synth(&["--arch", arch, "--quant", "Q4_0", "--output", "x.gguf"]));
}

#[test]
fn wrong_usage() {
    insta::assert_snapshot!("usage_no_text", transcript(qwen().args(["tokenize"])));
    insta::assert_snapshot!("usage_unknown_command", transcript(qwen().args(["genrate"])));
}

#[test]
fn wrong_values() {
    let generate =
        |arguments: &[&str]| transcript(qwen().args(["generate", "--model", "models/qwen2"]).args(arguments));
    insta::assert_snapshot!("value_precision", generate(&["--precision", "double", "--prompt", "a"]));
    insta::assert_snapshot!("value_pass", generate(&["--dump-ir", "after:magic"]));
    insta::assert_snapshot!("value_temperature", generate(&["--temperature", "-1", "--prompt", "a"]));
    insta::assert_snapshot!("value_top_p", generate(&["--top-p", "2", "--prompt", "a"]));
    insta::assert_snapshot!("value_max_seq_len", generate(&["--max-seq-len", "100000", "--prompt", "a"]));
    insta::assert_snapshot!("value_long_prompt", generate(&["--max-seq-len", "3", "--prompt", "a long text"]));
    insta::assert_snapshot!("value_empty_prompt", generate(&["--prompt", ""]));
    let logits = |tokens: &str| {
        transcript(qwen_eval().args(["logits", "--model", "models/qwen2", "--output", "x", "--tokens", tokens]))
    };
    insta::assert_snapshot!("value_tokens", logits("1,two,3"));
    insta::assert_snapshot!("value_token_range", logits("1,320"));
}

/// Whatever is wrong with a model: one sentence, exit code 1.
#[test]
fn failures_of_models() {
    let scratch = tempfile::tempdir().unwrap();
    let inspect = |model: &str| {
        let text = transcript(qwen().args(["models", "inspect", model]));
        text.replace(scratch.path().to_str().unwrap(), "DIR")
    };
    let edited = |name: &str, edit: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = std::fs::read(crate::common::fixtures().join("gguf/qwen3.gguf")).unwrap();
        edit(&mut bytes);
        let path = scratch.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    insta::assert_snapshot!("model_missing_file", inspect("models/absent.gguf"));
    insta::assert_snapshot!("model_no_name", inspect("absent"));
    insta::assert_snapshot!(
        "model_truncated",
        inspect(&edited("truncated.gguf", &|bytes| bytes.truncate(bytes.len() / 2)))
    );
    insta::assert_snapshot!("model_no_model", inspect("README.md"));
    insta::assert_snapshot!("model_no_weights", inspect("tokenizers/gpt2"));
    insta::assert_snapshot!("model_vocabulary", inspect("tokenizers/gpt2/vocab.gguf"));
    let renamed = edited("renamed.gguf", &|bytes| {
        for at in 0..bytes.len() - 5 {
            if bytes[at..].starts_with(b"qwen3") {
                bytes[at..at + 5].copy_from_slice(b"rwkv7");
            }
        }
    });
    insta::assert_snapshot!("model_architecture", inspect(&renamed));
    insta::assert_snapshot!("model_shape", inspect(&with_config(scratch.path(), "hidden_size", "64", "128")));
}

/// A copy of a checkpoint whose config says something else.
fn with_config(scratch: &std::path::Path, key: &str, from: &str, to: &str) -> String {
    let source = crate::common::fixtures().join("models/qwen2");
    let target = scratch.join("qwen2");
    std::fs::create_dir(&target).unwrap();
    for name in ["model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(source.join(name), target.join(name)).unwrap();
    }
    let config = std::fs::read_to_string(source.join("config.json")).unwrap();
    let edited = config.replace(&format!("\"{key}\": {from}"), &format!("\"{key}\": {to}"));
    assert_ne!(config, edited);
    std::fs::write(target.join("config.json"), edited).unwrap();
    target.to_str().unwrap().to_owned()
}

/// A program that reads the list gets each model with path and size, or neither.
#[test]
fn models_that_are_here() {
    let cache = tempfile::tempdir().unwrap();
    let list = |arguments: &[&str]| {
        transcript(qwen().args(["models", "list"]).args(arguments).env("QWEN_CACHE", cache.path()))
    };
    insta::assert_snapshot!("models_list", list(&[]));
    insta::assert_snapshot!("models_list_json", list(&["--json"]));
    insta::assert_snapshot!("models_inspect", transcript(qwen().args(["models", "inspect", "models/deepseek_v3"])));
    insta::assert_snapshot!(
        "models_inspect_json",
        transcript(qwen().args(["models", "inspect", "gguf/qwen3moe.gguf", "--json", "--context", "100"]))
    );
}

#[test]
fn failures_of_tokenize() {
    let mut tokenize = qwen();
    insta::assert_snapshot!(
        "tokenize_missing_text",
        transcript(tokenize.args(["tokenize", "--model", "tokenizers/gpt2", "--file", "absent.txt"]))
    );
    insta::assert_snapshot!(
        "tokenize_no_tokenizer",
        transcript(qwen().args(["tokenize", "--model", "models/qwen2/model.safetensors", "--text", "a"]))
    );
    insta::assert_snapshot!(
        "tokenize_wrong_json",
        transcript(qwen().args(["tokenize", "--model", "gguf/index.json", "--text", "a"]))
    );
}

#[test]
fn failures_of_compare() {
    let compare = |a: &str, b: &str| transcript(qwen_eval().args(["compare", "--a", a, "--b", b]));
    insta::assert_snapshot!(
        "compare_shapes",
        compare("gguf/llama-f32.reference.safetensors", "models/llama/reference.safetensors")
    );
    insta::assert_snapshot!("compare_no_tensor", compare("gguf/blocks.safetensors", "gguf/blocks.safetensors"));
    insta::assert_snapshot!("compare_missing", compare("models/llama/reference.safetensors", "absent.safetensors"));
    insta::assert_snapshot!(
        "compare_same",
        compare("models/llama/reference.safetensors", "models/llama/reference.safetensors")
    );
}

#[test]
fn a_closed_pipe_is_no_error() {
    let mut child = qwen()
        .args(["tokenize", "--model", "tokenizers/gpt2", "--file", "README.md"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
}
