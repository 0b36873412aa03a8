//! Fuzz target of [`qwen_fuzz::gguf`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| qwen_fuzz::gguf(bytes));
