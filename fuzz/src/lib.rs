//! What is fuzzed: one function per parser of untrusted input.
//!
//! In: any bytes. Out: nothing, or a panic, which is a bug. A function goes on as far as the bytes allow and asserts what
//! the parser promises of everything it accepts. The programs in `fuzz_targets/` hand these functions to libFuzzer; the
//! test `replay` feeds them every file that fuzzing has kept.
#![forbid(unsafe_code)]

use qwen_engine::gbnf_to_lark;
use qwen_formats::TensorInfo;
use qwen_formats::gguf::{GgufHeader, PACKED_ALIGNMENT, parse_gguf_bytes, take_packed};
use qwen_formats::safetensors::{parse_safetensors_bytes, parse_safetensors_index};
use qwen_models::chat_template::{ChatTemplate, Limits, TemplateInput, TemplateSource};
use qwen_models::family::{ModelConfig, TensorIndex, add_generation_config, build_graph, from_gguf, from_hf};
use qwen_models::tokenizer::{EncodeOptions, StreamDecoder, StreamOptions, Tokenizer};
use serde_json::{Value, json};

/// A name, as in `fuzz_targets/`, `corpus/` and `artifacts/`, and its function.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: &[Target] = &[
    ("gguf", gguf),
    ("safetensors", safetensors),
    ("config", config),
    ("tokenizer", tokenizer),
    ("chat_template", chat_template),
    ("ir_text", ir_text),
    ("chip", chip),
    ("gbnf", gbnf),
];

/// Text with what tokenizers treat specially: markup, runs of spaces, digits, marks, scripts without spaces.
const TEXT: &str =
    "<|im_start|>user\n  Hello,\tworld! It's 12345.67 €\r\n\r\n你好世界 ﬁ e\u{301} 👩🏽‍💻 مرحبا <s></s>    end";

/// The sheet of a chip.
pub fn chip(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let chip = match qwen_chips::parse("sheet", text) {
        Ok(chip) => chip,
        Err(error) => {
            assert!(!error.to_string().contains('\n'), "{error:?} is more than a sentence");
            return;
        }
    };
    for figure in [&chip.memory.capacity, &chip.memory.usable, &chip.memory.bandwidth].into_iter().flatten() {
        assert!(figure.value.is_finite() && figure.value > 0.0, "{figure:?}");
        assert!(chip.sources.contains_key(&figure.source), "{figure:?}");
    }
    assert!(chip.allocation_granularity().0.is_power_of_two() && chip.required_alignment().is_power_of_two());
    for bandwidth in [0.0, 1e9, 1.5e12, 1e15] {
        let family = chip.dispatch.family(bandwidth).map(|family| family.name.as_str());
        for tiling in &chip.dispatch.tilings {
            let found = chip.dispatch.tiling(&tiling.op, family, |_| Some(4096));
            assert!(found.is_none_or(|found| found.op == tiling.op));
        }
    }
}

/// A GGUF file: header, metadata, places of tensors.
pub fn gguf(bytes: &[u8]) {
    let Ok(mut header) = parse_gguf_bytes(bytes) else { return };
    for (key, value) in header.metadata.iter() {
        assert!(header.metadata.contains(key));
        drop(value.describe());
        drop(header.metadata.strings(key));
        drop(header.metadata.f32s(key));
        drop(header.metadata.i32s(key));
        drop(header.metadata.u32s(key));
    }
    check_places(&header.tensors, bytes.len());
    packed(&mut header, bytes.len());
}

/// What a compiled model adds to a GGUF file.
fn packed(header: &mut GgufHeader, length: usize) {
    let before = header.tensors.len();
    let path = std::path::Path::new("bytes.gguf");
    let Ok(Some(packed)) = take_packed(path, &mut header.metadata, &mut header.tensors) else { return };
    assert_eq!(packed.weights().len() + header.tensors.len(), before);
    for weight in packed.weights() {
        let end = weight.offset.checked_add(weight.bytes);
        assert!(end.is_some_and(|end| end <= length as u64), "{weight:?} is outside a file of {length} bytes");
        assert!(weight.offset.is_multiple_of(u64::from(PACKED_ALIGNMENT)), "{weight:?}");
        assert_eq!(packed.forms(&weight.weight, weight.source).filter(|form| form.layout == weight.layout).count(), 1);
    }
    for tensor in packed.absent() {
        assert_eq!(packed.absent_tensor(&tensor.name), Some(tensor));
        assert!(header.tensors.iter().all(|stored| stored.name != tensor.name), "{tensor:?} is there twice");
    }
}

/// A safetensors file, and the index of a sharded one.
pub fn safetensors(bytes: &[u8]) {
    if let Ok(header) = parse_safetensors_bytes(bytes) {
        check_places(&header.tensors, bytes.len());
    }
    drop(parse_safetensors_index(bytes));
}

fn check_places(tensors: &[TensorInfo], length: usize) {
    for tensor in tensors {
        let end = tensor.offset.checked_add(tensor.bytes);
        assert!(end.is_some_and(|end| end <= length as u64), "{tensor:?} is outside a file of {length} bytes");
        let elements = tensor.shape.iter().try_fold(1_u64, |product, dim| product.checked_mul(*dim));
        assert_eq!(elements.and_then(|elements| tensor.dtype.bytes_for(elements)), Some(tensor.bytes), "{tensor:?}");
    }
}

/// A `config.json`, or the metadata of a GGUF file, up to a graph over the tensors that the file has.
pub fn config(bytes: &[u8]) {
    if let Ok(header) = parse_gguf_bytes(bytes) {
        let mut tensors = TensorIndex::default();
        for tensor in header.tensors {
            tensors.insert(tensor.name, tensor.dtype, tensor.shape);
        }
        if let Ok(config) = from_gguf(&header.metadata, &tensors, None) {
            check_config(&config, &tensors);
        }
    } else if let Ok(text) = std::str::from_utf8(bytes)
        && let Ok(mut config) = from_hf(text)
    {
        drop(add_generation_config(&mut config, text));
        check_config(&config, &TensorIndex::default());
    }
}

fn check_config(config: &ModelConfig, tensors: &TensorIndex) {
    assert_eq!(config.layers.len(), config.num_hidden_layers as usize);
    assert!(config.softmax_scale().is_finite());
    assert!(config.rope.inverse_frequencies().iter().all(|frequency| frequency.is_finite()));
    drop(build_graph(config, tensors));
}

/// A `tokenizer.json`, or a GGUF file with a vocabulary.
pub fn tokenizer(bytes: &[u8]) {
    let built = match parse_gguf_bytes(bytes) {
        Ok(header) => Tokenizer::from_gguf(&header.metadata),
        Err(_) => Tokenizer::from_json_bytes(bytes),
    };
    let Ok(tokenizer) = built else { return };
    for options in [EncodeOptions::PROMPT, EncodeOptions::TEMPLATE, EncodeOptions::LITERAL] {
        if let Ok(ids) = tokenizer.encode(TEXT, options) {
            assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()), "an id beyond the vocabulary");
            check_stream(&tokenizer, &ids);
        }
    }
    drop(tokenizer.encode_bytes(b"\xff\xe4\xbd ok \x80", EncodeOptions::LITERAL));
    drop(tokenizer.decode(&[0, u32::MAX, tokenizer.vocab_size() as u32], true));
}

/// What is decoded at once equals what comes token by token.
fn check_stream(tokenizer: &Tokenizer, ids: &[u32]) {
    let mut stream = StreamDecoder::new(StreamOptions { skip_special: false, start_of_text: true });
    let mut text: String = ids.iter().map(|id| stream.push(tokenizer, *id)).collect();
    text.push_str(&stream.finish());
    assert_eq!(text, tokenizer.decode(ids, false));
}

/// A chat template and, after a zero byte, messages as JSON; without those, a conversation with tools and tool calls.
pub fn chat_template(bytes: &[u8]) {
    let mut parts = bytes.splitn(2, |byte| *byte == 0);
    let Some(Ok(text)) = parts.next().map(std::str::from_utf8) else { return };
    let messages = parts.next().and_then(|messages| serde_json::from_slice(messages).ok());
    let source = TemplateSource { default: text.to_owned(), ..TemplateSource::default() };
    // Small enough that an endless loop takes milliseconds.
    let limits = Limits { fuel: 20_000, output_bytes: 1 << 20, ..Limits::default() };
    let Ok(template) = ChatTemplate::with_limits(&source, limits) else { return };
    let messages: Vec<Value> = messages.unwrap_or_else(conversation);
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let function = json!({"name": "weather", "description": "Now", "parameters": parameters});
    let tools = [json!({"type": "function", "function": function})];
    let input = TemplateInput {
        messages: &messages,
        tools: Some(&tools),
        add_generation_prompt: true,
        now: Some(1_700_000_000),
        ..TemplateInput::default()
    };
    if let Ok(prompt) = template.render(&input) {
        assert!(prompt.len() <= limits.output_bytes, "a prompt of {} bytes", prompt.len());
    }
}

fn conversation() -> Vec<Value> {
    let call = json!({"name": "weather", "arguments": "{\"city\": \"北京\"}"});
    let calls = json!([{"id": "a", "type": "function", "function": call}]);
    vec![
        json!({"role": "system", "content": "Be brief."}),
        json!({"role": "user", "content": [{"type": "text", "text": "Weather in 北京?"}]}),
        json!({"role": "assistant", "content": "<think>hm</think>", "tool_calls": calls}),
        json!({"role": "tool", "tool_call_id": "a", "content": "sunny"}),
        json!({"role": "user", "content": " Thanks  \n"}),
    ]
}

/// The text form of a graph: read, verified, compiled, printed and read back.
pub fn ir_text(bytes: &[u8]) {
    qwen_ir::test_support::fuzz_text(bytes);
}

/// A grammar in GBNF: rewritten, and no longer than in proportion, or refused in a sentence.
pub fn gbnf(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match gbnf_to_lark(text) {
        Ok(lark) => {
            assert!(lark.lines().any(|line| line.starts_with("start: ")), "there is no start: {lark}");
            assert!(lark.len() <= 100 * text.len() + 100, "{} bytes became {}", text.len(), lark.len());
        }
        Err(error) => assert!(!error.to_string().contains('\n'), "{error:?} is more than a sentence"),
    }
}
