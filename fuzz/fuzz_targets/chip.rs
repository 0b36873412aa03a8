//! Fuzz target of [`qwen_fuzz::chip`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| qwen_fuzz::chip(bytes));
