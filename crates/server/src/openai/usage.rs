//! Tokens as the protocol counts them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::generation::Tokens;

/// Tokens of a request.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(crate) struct Usage {
    /// Of the prompts, each counted once.
    prompt_tokens: u64,
    /// Of all answers, thinking and markup included.
    completion_tokens: u64,
    /// Sum.
    total_tokens: u64,
    /// More on the prompts.
    prompt_tokens_details: PromptDetails,
    /// More on the answers.
    completion_tokens_details: CompletionDetails,
}

#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(crate) struct PromptDetails {
    /// Found in the prefix cache.
    cached_tokens: u64,
}

#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(crate) struct CompletionDetails {
    /// Thinking.
    reasoning_tokens: u64,
}

impl From<Tokens> for Usage {
    fn from(tokens: Tokens) -> Self {
        Self {
            prompt_tokens: tokens.prompt,
            completion_tokens: tokens.completion,
            total_tokens: tokens.prompt + tokens.completion,
            prompt_tokens_details: PromptDetails { cached_tokens: tokens.cached },
            completion_tokens_details: CompletionDetails { reasoning_tokens: tokens.reasoning },
        }
    }
}

/// What a stream tells besides text.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct StreamOptions {
    /// A last chunk with `usage` and no choices.
    pub(crate) include_usage: bool,
    /// Running usage in every chunk.
    pub(crate) continuous_usage_stats: bool,
    /// Accepted; nothing is put in to hide lengths.
    pub(crate) include_obfuscation: bool,
}
