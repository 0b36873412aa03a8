//! `qwen generate`, `qwen chat` and `qwen-eval kl`: what comes out, on tiny models.

use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::common::{qwen, qwen_eval, stdout};

/// Runs a command with something on standard input.
/// Standard output and standard error of a command that reads from a pipe.
fn with_input(command: &mut Command, input: &str) -> (String, String) {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
}

fn generate(arguments: &[&str]) -> Value {
    let mut command = qwen();
    command.args(["generate", "--model", "models/llama", "--max-tokens", "10", "--ignore-eos", "--json"]);
    serde_json::from_str(&stdout(command.args(arguments))).unwrap()
}

#[test]
fn one_object_for_programs() {
    let answer = generate(&["--prompt", "Once upon a time"]);
    assert_eq!(answer["tokens"].as_array().unwrap().len(), 10);
    assert_eq!(answer["finish_reason"], "length");
    assert_eq!(answer["precision"], "balanced");
    assert_eq!(answer["architecture"], "llama");
    assert!(answer["prompt_tokens"].as_u64().unwrap() > 4);
    assert!(answer.get("logprobs").is_none());
    let timings = answer["timings"].as_object().unwrap();
    assert!(timings.values().all(Value::is_number));
    for name in
        ["load_ms", "prefill_ms", "prefill_tokens_per_second", "decode_tokens_per_second", "time_to_first_token_ms"]
    {
        assert!(timings.contains_key(name), "{name}");
    }
    assert!(answer["peak_rss_bytes"].is_u64() || !cfg!(target_os = "linux"));
}

#[test]
fn the_same_command_gives_the_same_text() {
    let warm = ["--prompt", "Once", "--temperature", "1.5", "--seed", "7"];
    let first = generate(&warm);
    assert_eq!(first["tokens"], generate(&warm)["tokens"]);
    assert_eq!(first["seed"], 7);
    assert_ne!(first["tokens"], generate(&["--prompt", "Once", "--temperature", "1.5", "--seed", "8"])["tokens"]);
    // With one candidate left, chance has no choice.
    let greedy = generate(&["--prompt", "Once"]);
    assert_eq!(greedy["tokens"], generate(&["--prompt", "Once", "--temperature", "1.5", "--top-k", "1"])["tokens"]);
}

#[test]
fn streamed_text_is_the_text() {
    let arguments = ["generate", "--model", "models/llama", "--max-tokens", "10", "--ignore-eos", "--prompt-file", "-"];
    let (streamed, _) = with_input(qwen().args(arguments), "Once upon a time");
    let text = generate(&["--prompt", "Once upon a time"])["text"].as_str().unwrap().to_owned();
    assert_eq!(streamed.trim_end_matches('\n'), text.trim_end_matches('\n'));
    assert!(streamed.ends_with('\n'));
}

#[test]
fn a_stop_text_is_cut_off() {
    let whole = generate(&["--prompt", "Once upon a time"])["text"].as_str().unwrap().to_owned();
    let stop: String = whole.chars().skip(4).take(1).collect();
    let answer = generate(&["--prompt", "Once upon a time", "--stop", &stop]);
    assert_eq!(answer["finish_reason"], "stop");
    assert_eq!(answer["text"].as_str().unwrap(), whole.split(&stop).next().unwrap());
}

#[test]
fn a_template_makes_a_message_of_the_prompt() {
    let plain = generate(&["--prompt", "Hello"])["prompt_tokens"].as_u64().unwrap();
    let chat = generate(&["--prompt", "Hello", "--chat", "--system", "Be brief."])["prompt_tokens"].as_u64().unwrap();
    assert!(chat > plain + 10, "{chat} and {plain}");
}

#[test]
fn a_conversation_from_a_pipe() {
    let both = |input: &str| {
        let mut command = qwen();
        command.args(["chat", "--model", "models/qwen3", "--temperature", "0", "--max-tokens", "5", "--seed", "1"]);
        with_input(&mut command, input)
    };
    let chat = |input: &str| both(input).0;
    let first = chat("Hello\n");
    let longer = chat("Hello\n\nAnd then?\n");
    assert!(longer.starts_with(&first) && longer.len() > first.len());
    assert_eq!(chat("Hello\n/clear\nHello\n/exit\nHello\n"), format!("{first}{first}"));
    assert_eq!(chat("Hello\n/regenerate\n"), format!("{first}{first}"));
    let notices = |input: &str| {
        let (answers, notices) = both(input);
        assert_eq!(answers, "", "notices are not answers");
        notices
    };
    assert_eq!(notices("/system Be brief.\n/system\n"), "system message: Be brief.\n");
    assert_eq!(
        notices("/nonsense\n/regenerate\n"),
        "no command /nonsense; /help lists them\nthere is no message to answer yet\n"
    );
    assert!(notices("/help\n").contains("/regenerate"));
}

#[test]
fn the_graph_after_a_pass() {
    let graph = |pass: &str| {
        let argument = format!("--dump-ir=after:{pass}");
        stdout(qwen().args(["generate", "--model", "models/deepseek_v3", &argument]))
    };
    let (early, late) = (graph("canonicalise"), graph("precision"));
    assert!(early.lines().count() > 10 && late.lines().count() > 10);
    assert_ne!(early, late);
}

#[test]
fn divergence_of_precisions() {
    let kl = |precision: &str| -> Value {
        serde_json::from_str(&stdout(qwen_eval().args([
            "kl",
            "--model",
            "models/llama",
            "--file",
            "README.md",
            "--tokens",
            "300",
            "--window",
            "64",
            "--precision-b",
            precision,
            "--json",
        ])))
        .unwrap()
    };
    let exact = kl("exact");
    assert_eq!(exact["kl_max"].as_f64(), Some(0.0));
    assert_eq!(exact["top1_agreement"].as_f64(), Some(1.0));
    assert!(exact["tokens"].as_u64().unwrap() >= 300);
    let balanced = kl("balanced");
    assert!(balanced["kl_mean"].as_f64().unwrap() < 0.002, "{balanced}");
}
