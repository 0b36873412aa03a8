//! Log-probabilities in the shapes of both APIs.

use qwen_engine::{Logprobs, TokenLogprob};
use qwen_models::tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::generation::Token;

/// Of a chat answer: an entry for each token of the content; thinking and the token that ended the answer have none.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
pub(crate) struct ChatLogprobs {
    /// Entries.
    pub(crate) content: Vec<ChatEntry>,
    /// Always null.
    refusal: Option<Vec<ChatEntry>>,
}

/// A token and its best rivals.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct ChatEntry {
    #[serde(flatten)]
    chosen: ChatToken,
    /// Best first.
    top_logprobs: Vec<ChatToken>,
}

/// A token with its log-probability under the model, before temperature and penalties.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct ChatToken {
    /// Its text; parts of a character are shown as U+FFFD.
    token: String,
    /// Natural logarithm; -9999 for an impossible one.
    logprob: f32,
    /// UTF-8 bytes: a character may be spread over tokens.
    bytes: Vec<u8>,
}

fn chat_token(tokenizer: &Tokenizer, token: TokenLogprob) -> ChatToken {
    let bytes = tokenizer.token_bytes(token.id);
    ChatToken { token: String::from_utf8_lossy(&bytes).into_owned(), logprob: token.logprob, bytes }
}

impl ChatLogprobs {
    /// Adds a token, if it belongs to the content.
    pub(crate) fn add(&mut self, tokenizer: &Tokenizer, token: &Token) {
        let Some(logprobs) = token.logprobs.as_ref().filter(|_| !token.thinking && !token.end) else { return };
        self.content.push(ChatEntry {
            chosen: chat_token(tokenizer, logprobs.chosen),
            top_logprobs: logprobs.top.iter().map(|top| chat_token(tokenizer, *top)).collect(),
        });
    }

    /// Takes what there is, for a chunk.
    pub(crate) fn take(&mut self) -> Option<Self> {
        (!self.content.is_empty()).then(|| std::mem::take(self))
    }
}

/// Of a completion: four lists of the same length.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
pub(crate) struct CompletionLogprobs {
    /// Tokens as texts.
    tokens: Vec<String>,
    /// Log-probability of each; null for the first token of a prompt.
    token_logprobs: Vec<Option<f32>>,
    /// Best tokens with their log-probabilities; null for the first token of a prompt.
    #[schema(value_type = Vec<Option<Object>>)]
    top_logprobs: Vec<Option<Value>>,
    /// Where each token begins in the text, in characters.
    text_offset: Vec<usize>,
    #[serde(skip)]
    offset: usize,
}

impl CompletionLogprobs {
    /// Adds a token; without log-probabilities it is the first of a prompt.
    pub(crate) fn add(&mut self, tokenizer: Option<&Tokenizer>, id: u32, logprobs: Option<&Logprobs>) {
        let text = |id: u32| match tokenizer {
            Some(tokenizer) => String::from_utf8_lossy(&tokenizer.token_bytes(id)).into_owned(),
            None => format!("token_id:{id}"),
        };
        let token = text(id);
        self.text_offset.push(self.offset);
        self.offset += token.chars().count();
        self.tokens.push(token);
        self.token_logprobs.push(logprobs.map(|logprobs| logprobs.chosen.logprob));
        self.top_logprobs.push(logprobs.map(|logprobs| {
            let mut best = Map::new();
            for top in logprobs.top.iter().chain([&logprobs.chosen]) {
                // Tokens of different bytes may look the same; the better one counts.
                best.entry(text(top.id)).or_insert_with(|| json!(top.logprob));
            }
            Value::Object(best)
        }));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Takes what there is, for a chunk; offsets go on.
    pub(crate) fn take(&mut self) -> Option<Self> {
        if self.is_empty() {
            return None;
        }
        let offset = self.offset;
        Some(std::mem::replace(self, Self { offset, ..Self::default() }))
    }
}

/// `prompt_logprobs` as vLLM gives it: for each token a map from id to its log-probability, rank and text.
pub(crate) fn prompt_logprobs(tokenizer: Option<&Tokenizer>, prompt: &[Option<Logprobs>]) -> Value {
    let entry = |token: &TokenLogprob, rank: Option<usize>| {
        let text = tokenizer.map(|tokenizer| String::from_utf8_lossy(&tokenizer.token_bytes(token.id)).into_owned());
        json!({ "logprob": token.logprob, "rank": rank, "decoded_token": text })
    };
    let position = |logprobs: &Option<Logprobs>| {
        logprobs.as_ref().map(|logprobs| {
            let mut map = Map::new();
            for (rank, top) in (1..).zip(&logprobs.top) {
                map.insert(top.id.to_string(), entry(top, Some(rank)));
            }
            map.entry(logprobs.chosen.id.to_string()).or_insert_with(|| entry(&logprobs.chosen, None));
            Value::Object(map)
        })
    };
    prompt.iter().map(position).map(|value| value.unwrap_or(Value::Null)).collect()
}
