//! Tokenizers of a Hugging Face folder: `tokenizer.json` and the small files beside it.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::json::{self, AddedEntry};
use super::{Tokenizer, TokenizerError};
use crate::files::{MAX_DESCRIPTION_BYTES, MAX_TOKENIZER_BYTES, read_file};

#[derive(Default, Deserialize)]
struct TokenizerConfig {
    #[serde(default)]
    tokenizer_class: Option<String>,
    #[serde(default)]
    add_bos_token: Option<bool>,
    #[serde(default)]
    add_eos_token: Option<bool>,
    #[serde(default)]
    bos_token: Option<TokenText>,
    #[serde(default)]
    eos_token: Option<TokenText>,
    #[serde(default)]
    added_tokens_decoder: BTreeMap<String, AddedEntry>,
}

#[derive(Default, Deserialize)]
struct SpecialTokensMap {
    #[serde(default)]
    bos_token: Option<TokenText>,
    #[serde(default)]
    eos_token: Option<TokenText>,
}

/// What `generation_config.json` and `config.json` say.
#[derive(Default, Deserialize)]
struct ModelConfig {
    #[serde(default)]
    bos_token_id: Option<Ids>,
    #[serde(default)]
    eos_token_id: Option<Ids>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TokenText {
    Plain(String),
    Entry { content: String },
}

impl TokenText {
    fn text(&self) -> &str {
        match self {
            Self::Plain(text) | Self::Entry { content: text } => text,
        }
    }
}

/// One id or several.
#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(u32),
    Several(Vec<u32>),
}

impl Ids {
    fn as_slice(&self) -> &[u32] {
        match self {
            Self::One(id) => std::slice::from_ref(id),
            Self::Several(ids) => ids,
        }
    }
}

/// Reads the tokenizer of a folder.
pub(super) fn read(dir: &Path) -> Result<Tokenizer, TokenizerError> {
    let path = dir.join("tokenizer.json");
    if !path.exists() {
        let has_sentencepiece = dir.join("tokenizer.model").exists();
        return Err(TokenizerError::NoTokenizer { dir: dir.to_owned(), has_sentencepiece });
    }
    let bytes =
        read_file(&path, MAX_TOKENIZER_BYTES).map_err(|source| TokenizerError::Read { path: path.clone(), source })?;
    let config: TokenizerConfig = read_json(dir, "tokenizer_config.json")?.unwrap_or_default();
    let map: SpecialTokensMap = read_json(dir, "special_tokens_map.json")?.unwrap_or_default();
    let generation: Option<ModelConfig> = read_json(dir, "generation_config.json")?;
    // `config.json` repeats the stop tokens, in old checkpoints not all: it counts where the better
    // source is missing.
    let model = match generation {
        Some(generation) if generation.eos_token_id.is_some() => generation,
        _ => read_json(dir, "config.json")?.unwrap_or_default(),
    };
    let mut tokenizer = json::read(&bytes, &more_added(&config)?)?;
    set_special(&mut tokenizer, &config, &map, &model)?;
    Ok(tokenizer)
}

fn set_special(
    tokenizer: &mut Tokenizer,
    config: &TokenizerConfig,
    map: &SpecialTokensMap,
    model: &ModelConfig,
) -> Result<(), TokenizerError> {
    let id = |tokenizer: &Tokenizer, first: &Option<TokenText>, second: &Option<TokenText>| {
        let text = first.as_ref().or(second.as_ref())?;
        tokenizer.token_to_id(text.text())
    };
    let bos = id(tokenizer, &config.bos_token, &map.bos_token);
    let eos = id(tokenizer, &config.eos_token, &map.eos_token);
    let bos_of_model = || model.bos_token_id.as_ref()?.as_slice().first().copied();
    tokenizer.bos = bos.or(tokenizer.bos).or_else(bos_of_model);
    tokenizer.eos.extend(eos);
    tokenizer.eos.extend(model.eos_token_id.iter().flat_map(|ids| ids.as_slice()));

    // Tokenizers of this class put BOS before a text whatever `tokenizer.json` says.
    let adds_bos = config.tokenizer_class.as_ref().is_some_and(|class| class.starts_with("LlamaTokenizer"));
    let mut prefix = tokenizer.prefix.clone();
    let mut suffix = tokenizer.suffix.clone();
    if let Some(add) = config.add_bos_token.or(adds_bos.then_some(true)).filter(|&add| !add || bos.is_some()) {
        prefix = bos.filter(|_| add).into_iter().collect();
    }
    if let Some(add) = config.add_eos_token.filter(|&add| !add || eos.is_some()) {
        suffix = eos.filter(|_| add).into_iter().collect();
    }
    tokenizer.set_frame(prefix, suffix)
}

/// Added tokens that only `tokenizer_config.json` lists.
fn more_added(config: &TokenizerConfig) -> Result<Vec<AddedEntry>, TokenizerError> {
    let entries = config.added_tokens_decoder.iter().map(|(id, entry)| {
        let id = id.parse().map_err(|_| {
            TokenizerError::Inconsistent(format!(
                "tokenizer_config.json lists an added token under {id:?}, which is no id"
            ))
        })?;
        Ok(AddedEntry { id, ..entry.clone() })
    });
    entries.collect()
}

/// Reads a file that may be missing.
fn read_json<T: DeserializeOwned>(dir: &Path, name: &str) -> Result<Option<T>, TokenizerError> {
    let path = dir.join(name);
    let bytes = match read_file(&path, MAX_DESCRIPTION_BYTES) {
        Ok(bytes) => bytes,
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(TokenizerError::Read { path, source }),
    };
    serde_json::from_slice(&bytes).map(Some).map_err(TokenizerError::json(&path.display().to_string()))
}
