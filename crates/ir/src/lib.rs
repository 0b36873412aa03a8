//! Qwen-IR: a hardware-independent graph for LLM inference, its text form, verifier and passes.
