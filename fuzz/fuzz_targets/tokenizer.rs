//! Fuzz target of [`qwen_fuzz::tokenizer`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| qwen_fuzz::tokenizer(bytes));
