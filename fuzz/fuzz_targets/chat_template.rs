//! Fuzz target of [`qwen_fuzz::chat_template`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| qwen_fuzz::chat_template(bytes));
