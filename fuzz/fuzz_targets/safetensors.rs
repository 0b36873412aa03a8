//! Fuzz target of [`qwen_fuzz::safetensors`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| qwen_fuzz::safetensors(bytes));
