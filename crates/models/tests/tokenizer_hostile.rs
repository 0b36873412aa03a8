//! Whatever a tokenizer file holds, it gives a tokenizer or one sentence.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a helper of a test fails the test")]

use std::path::PathBuf;

use proptest::prelude::*;
use qwen_formats::GgufMetadata;
use qwen_formats::gguf::{Array, StringArray, Value as GgufValue};
use qwen_models::tokenizer::{EncodeOptions, Tokenizer, TokenizerError};
use serde_json::{Value, json};

fn small() -> Value {
    json!({
        "added_tokens": [{"id": 6, "content": "<s>", "special": true}],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [6], "tokens": ["<s>"]}}},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "Ġ": 3, "abab": 4, "<": 5}, "merges": [["a", "b"], ["ab", "ab"]]},
    })
}

fn read(document: &Value) -> Result<Tokenizer, TokenizerError> {
    Tokenizer::from_json_bytes(document.to_string().as_bytes())
}

/// The refusal of the small tokenizer with one part replaced.
fn refusal(pointer: &str, part: Value) -> String {
    let mut document = small();
    *document.pointer_mut(pointer).unwrap() = part;
    let error = read(&document).expect_err(pointer).to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

#[test]
fn the_small_tokenizer_works() {
    let tokenizer = read(&small()).unwrap();
    assert_eq!(tokenizer.encode("abab a<s>", EncodeOptions::PROMPT).unwrap(), [6, 4, 3, 0, 6]);
    assert_eq!(tokenizer.encode("b<s>", EncodeOptions::LITERAL).unwrap(), [1, 5]);
    assert_eq!(tokenizer.decode(&[6, 4, 3, 0, 99], true), "abab a");
    assert_eq!((tokenizer.bos(), tokenizer.vocab_size()), (Some(6), 7));
    let error = tokenizer.encode_bytes(b"ab\xFF", EncodeOptions::LITERAL).unwrap_err().to_string();
    assert!(error.starts_with("byte 0xFF at offset 2 is not valid UTF-8"), "{error}");
    let mut old = small();
    *old.pointer_mut("/model/merges").unwrap() = json!(["a b", "ab ab"]);
    assert_eq!(read(&old).unwrap().encode("abab", EncodeOptions::LITERAL).unwrap(), [4]);
}

#[test]
fn each_contradiction_is_named() {
    assert!(refusal("/model/type", json!("Unigram")).contains("model `Unigram` is not supported; supported: BPE"));
    assert!(refusal("/model/merges", json!([["a", "x"]])).contains("merges"));
    let long = "a".repeat(100);
    assert!(refusal("/model/merges", json!([[long, "b"]])).contains("not in the vocabulary"));
    assert!(refusal("/model/merges", json!([["a"]])).contains("two tokens"));
    assert!(refusal("/model/merges", json!(["ab"])).contains("two tokens"));
    assert!(refusal("/model/vocab", json!({"a": 0, "b": 0})).contains("have the same id 0"));
    assert!(refusal("/model/vocab", json!({"a": 0, "b": 4_000_000_000u32})).contains("far beyond"));
    assert!(refusal("/model/vocab", json!({"a": -1})).contains("tokenizer.json: model"));
    assert!(refusal("/added_tokens/0/id", json!(2)).contains("have the same id 2"));
    assert!(refusal("/post_processor/special_tokens/<s>/ids", json!([77])).contains("has id 77"));
    assert!(refusal("/post_processor/special_tokens", json!({})).contains("\"<s>\""));
    assert!(refusal("/post_processor/type", json!("Other")).contains("post-processor `Other` is not supported"));
    assert!(
        refusal("/normalizer", json!({"type": "Precompiled", "precompiled_charsmap": ""})).contains("`Precompiled`")
    );
    let nested = json!({"type": "Sequence", "pretokenizers": [{"type": "UnicodeScripts"}]});
    assert!(refusal("/pre_tokenizer", nested).contains("`UnicodeScripts`"));
    let expression = json!({"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": false});
    assert!(refusal("/pre_tokenizer", json!({"type": "Sequence", "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true}, expression]})).contains("pre_tokenizer"));
    assert!(Tokenizer::from_json_bytes(&b"[".repeat(100_000)).is_err());
}

#[test]
fn gguf_metadata_of_every_wrong_kind() {
    let strings = |list: &[&str]| GgufValue::Array(Array::String(list.iter().collect::<StringArray>()));
    let good: Vec<(&str, GgufValue)> = vec![
        ("tokenizer.ggml.model", GgufValue::String(b"gpt2".to_vec().into())),
        ("tokenizer.ggml.pre", GgufValue::String(b"smollm".to_vec().into())),
        ("tokenizer.ggml.tokens", strings(&["a", "b", "ab", "<s>"])),
        ("tokenizer.ggml.token_type", GgufValue::Array(Array::I32(vec![1, 1, 1, 3]))),
        ("tokenizer.ggml.merges", strings(&["a b"])),
        ("tokenizer.ggml.bos_token_id", GgufValue::U32(3)),
    ];
    let build = |key: &str, value: Option<GgufValue>| {
        let mut metadata = GgufMetadata::new(&PathBuf::from("test.gguf"));
        for (name, good) in &good {
            if *name != key {
                metadata.insert((*name).to_owned(), good.clone());
            }
        }
        if let Some(value) = value {
            metadata.insert(key.to_owned(), value);
        }
        Tokenizer::from_gguf(&metadata)
    };
    assert_eq!(build("", None).unwrap().encode("ab<s>", EncodeOptions::TEMPLATE).unwrap(), [2, 3]);
    let text = |value: &str| Some(GgufValue::String(value.as_bytes().to_vec().into()));
    for (key, value, expected) in [
        ("tokenizer.ggml.model", text("bert"), "`bert` is not supported"),
        ("tokenizer.ggml.model", None, "tokenizer.ggml.model"),
        ("tokenizer.ggml.model", text("llama"), "the tokenizer has no tokenizer.ggml.scores"),
        ("tokenizer.ggml.pre", text("mystery"), "`mystery` is not supported"),
        ("tokenizer.ggml.tokens", Some(strings(&[])), "0 entries"),
        ("tokenizer.ggml.tokens", Some(GgufValue::U32(1)), "tokenizer.ggml.tokens"),
        (
            "tokenizer.ggml.token_type",
            Some(GgufValue::Array(Array::I32(vec![1]))),
            "has 4 entries, tokenizer.ggml.token_type has 1",
        ),
        ("tokenizer.ggml.merges", Some(strings(&["ab"])), "two tokens with a space between"),
        ("tokenizer.ggml.merges", Some(strings(&["a c"])), "merges"),
        ("tokenizer.ggml.merges", None, "tokenizer.ggml.merges"),
        (
            "tokenizer.ggml.bos_token_id",
            Some(GgufValue::U32(4)),
            "tokenizer.ggml.bos_token_id has id 4, but the vocabulary has 4 tokens",
        ),
        ("tokenizer.ggml.eot_token_id", Some(GgufValue::U32(u32::MAX)), "tokenizer.ggml.eot_token_id"),
    ] {
        let error = build(key, value).expect_err(key).to_string();
        assert!(error.contains(expected), "{key}: {error}");
    }
}

#[test]
fn folders_without_a_tokenizer_say_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let error = || Tokenizer::from_checkpoint_dir(dir.path()).unwrap_err().to_string();
    assert!(error().ends_with("holds no tokenizer.json"), "{}", error());
    std::fs::write(dir.path().join("tokenizer.model"), "x").unwrap();
    assert!(error().contains("convert it"), "{}", error());
    std::fs::write(dir.path().join("tokenizer.json"), small().to_string()).unwrap();
    std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": [4, 5], "bos_token_id": 6}"#)
        .unwrap();
    std::fs::write(
        dir.path().join("tokenizer_config.json"),
        r#"{"eos_token": {"content": "ab"}, "add_bos_token": false, "bos_token": "<s>"}"#,
    )
    .unwrap();
    let tokenizer = Tokenizer::from_checkpoint_dir(dir.path()).unwrap();
    assert_eq!(tokenizer.eos_ids().iter().copied().collect::<Vec<_>>(), [2, 4, 5]);
    assert_eq!(
        tokenizer.encode("a", EncodeOptions::PROMPT).unwrap(),
        [0],
        "the configuration overrides tokenizer.json"
    );
    std::fs::write(dir.path().join("generation_config.json"), "[").unwrap();
    assert!(error().contains("generation_config.json"));
}

#[test]
fn long_runs_take_no_long_time_and_come_back() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/tokenizers");
    for family in ["smollm", "llama-bpe", "deepseek-llm", "deepseek-coder", "deepseek-v3", "llama-spm", "gpt2"] {
        let tokenizer = Tokenizer::from_checkpoint_dir(&PathBuf::from(root).join(family)).unwrap();
        for unit in [" ", "a", "\n", "中", " \t\r\n", "'", "1", "\u{3000}", ".", "e\u{301}"] {
            let text = unit.repeat(30_000);
            let ids = tokenizer.encode(&text, EncodeOptions::LITERAL).unwrap();
            assert!(tokenizer.decode(&ids, false) == text, "{family}: runs of {unit:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Any byte changed, or the end cut off.
    #[test]
    fn a_damaged_file_gives_an_error_or_a_tokenizer(at in 0usize..1000, byte: u8, cut: bool) {
        let mut bytes = small().to_string().into_bytes();
        let at = at % bytes.len();
        if cut { bytes.truncate(at) } else { bytes[at] = byte }
        let Ok(tokenizer) = Tokenizer::from_json_bytes(&bytes) else { return Ok(()) };
        for text in ["", " Hello,\n wörld 123 <s>", "\u{0}中文🤖"] {
            for options in [EncodeOptions::PROMPT, EncodeOptions::LITERAL] {
                let Ok(ids) = tokenizer.encode(text, options) else { continue };
                prop_assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()), "{text:?} gives unknown ids");
                drop(tokenizer.decode(&ids, false));
            }
        }
    }
}
