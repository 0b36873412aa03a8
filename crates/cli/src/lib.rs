//! The command-line programs: qwen and qwen-eval.
