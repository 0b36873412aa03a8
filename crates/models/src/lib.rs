//! Model families as data, tokenizers, chat templates, model sources, and checkpoints by chance.

#![forbid(unsafe_code)]

pub mod chat_template;
pub mod family;
pub mod files;
pub mod hub;
pub mod synth;
pub mod tokenizer;
