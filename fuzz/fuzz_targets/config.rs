//! Fuzz target of [`qwen_fuzz::config`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| qwen_fuzz::config(bytes));
