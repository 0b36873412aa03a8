//! Model families as data, tokenizers, chat templates and model sources.

#![forbid(unsafe_code)]

pub mod chat_template;
pub mod family;
pub mod files;
pub mod hub;
pub mod tokenizer;
