//! Model families as data, tokenizers, chat templates and model sources.
