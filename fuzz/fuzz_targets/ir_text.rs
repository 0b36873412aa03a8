//! Fuzz target of [`qwen_fuzz::ir_text`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| qwen_fuzz::ir_text(bytes));
