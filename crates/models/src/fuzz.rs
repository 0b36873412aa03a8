//! Entry points for fuzzing: any bytes give a value or an error, never a panic.

use serde_json::Value;

use crate::chat_template::{ChatTemplate, Limits, TemplateInput, TemplateSource};
use crate::tokenizer::{EncodeOptions, Tokenizer};

/// Bytes as a `tokenizer.json`; a tokenizer that comes of them must round-trip its own ids.
pub fn tokenizer_json(bytes: &[u8]) {
    let Ok(tokenizer) = Tokenizer::from_json_bytes(bytes) else { return };
    for text in ["", " Hello,\n wörld 123 <s>", "\u{0}中文🤖"] {
        for options in [EncodeOptions::PROMPT, EncodeOptions::LITERAL] {
            let Ok(ids) = tokenizer.encode(text, options) else { continue };
            assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()), "{text:?} gives unknown ids");
            let _ = tokenizer.decode(&ids, false);
        }
    }
    let _ = tokenizer.encode_bytes(b"a\xFFb", EncodeOptions::LITERAL);
}

/// A template, a zero byte, and messages as JSON.
pub fn template(bytes: &[u8]) {
    let mut parts = bytes.splitn(2, |&byte| byte == 0);
    let Some(Ok(source)) = parts.next().map(std::str::from_utf8) else { return };
    let messages = parts.next().and_then(|messages| serde_json::from_slice::<Vec<Value>>(messages).ok());
    let default = [serde_json::json!({"role": "user", "content": "Hi"})];
    let source = TemplateSource { default: source.to_owned(), ..TemplateSource::default() };
    let limits = Limits { fuel: 20_000, output_bytes: 1 << 20, ..Limits::default() };
    let Ok(template) = ChatTemplate::with_limits(&source, limits) else { return };
    let messages = messages.as_deref().unwrap_or(&default);
    let input = TemplateInput { messages, add_generation_prompt: true, now: Some(0), ..TemplateInput::default() };
    if let Ok(text) = template.render(&input) {
        assert!(text.len() <= limits.output_bytes, "the output has {} bytes", text.len());
    }
}
