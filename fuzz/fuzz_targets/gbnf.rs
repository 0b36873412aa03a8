//! Fuzz target of [`qwen_fuzz::gbnf`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| qwen_fuzz::gbnf(bytes));
