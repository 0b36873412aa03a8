//! `qwen tokenize` against the ids of the models' own tokenizers.

use std::io::Write;
use std::process::Stdio;

use serde_json::Value;

use crate::common;

/// Of the samples of each tokenizer every so many; all of them are tested where the tokenizer is.
const EVERY: usize = 9;

fn ids(arguments: &[&str]) -> Value {
    let text = common::stdout(common::qwen().args(["tokenize", "--json"]).args(arguments));
    let value: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(value["ids"].as_array().unwrap().len(), value["tokens"].as_array().unwrap().len());
    value["ids"].clone()
}

#[test]
fn ids_of_every_tokenizer() {
    for entry in std::fs::read_dir(common::fixtures().join("tokenizers")).unwrap() {
        let directory = entry.unwrap().path();
        let expected = std::fs::read(directory.join("expected.json")).unwrap();
        let expected: serde_json::Map<String, Value> = serde_json::from_slice(&expected).unwrap();
        let folder = directory.to_str().unwrap();
        let gguf = format!("{folder}/vocab.gguf");
        for (name, sample) in expected.iter().step_by(EVERY) {
            let text = format!("--text={}", sample["text"].as_str().unwrap());
            // Linux refuses arguments with a zero byte.
            if text.contains('\0') {
                continue;
            }
            if let Some(literal) = sample.get("literal") {
                let literal_gguf = sample.get("literal_gguf").unwrap_or(literal);
                assert_eq!(&ids(&["--model", folder, &text, "--no-special"]), literal, "{folder} {name}");
                assert_eq!(&ids(&["--model", &gguf, &text, "--no-special"]), literal_gguf, "{gguf} {name}");
            }
            if let Some(with_special) = sample.get("with_special") {
                assert_eq!(&ids(&["--model", folder, &text]), with_special, "{folder} {name}");
                assert_eq!(&ids(&["--model", &gguf, &text]), with_special, "{gguf} {name}");
            }
        }
    }
}

#[test]
fn bytes_that_are_no_text_have_tokens() {
    let mut child = common::qwen()
        .args(["tokenize", "--model", "tokenizers/gpt2/tokenizer.json", "--file", "-", "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"a\xff\xfe\0b").unwrap();
    let output = child.wait_with_output().unwrap();
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(value["tokens"], serde_json::json!(["a", "ÿ", "þ", "Ā", "b"]));
}

#[test]
fn lines_for_people() {
    let mut command = common::qwen();
    command.args(["tokenize", "--model", "tokenizers/smollm", "--text", "Grüße,\n世界 <|im_end|>"]);
    insta::assert_snapshot!(common::transcript(&mut command));
}
