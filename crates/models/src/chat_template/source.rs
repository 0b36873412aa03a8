//! Where a model's template lies, and the special tokens that it may write.

use std::path::Path;

use qwen_formats::GgufMetadata;
use qwen_formats::gguf::StringArray;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::TemplateError;

/// The texts of the special tokens that templates use as variables.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// `bos_token`.
    pub bos: Option<String>,
    /// `eos_token`.
    pub eos: Option<String>,
    /// `unk_token`.
    pub unk: Option<String>,
    /// `pad_token`.
    pub pad: Option<String>,
}

/// The template that a model carries, not compiled.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TemplateSource {
    /// The template for conversations.
    pub default: String,
    /// A second one for conversations with tools, which some models have.
    pub tool_use: Option<String>,
    /// Special tokens.
    pub special: SpecialTokens,
}

impl TemplateSource {
    /// What a GGUF file carries: `tokenizer.chat_template`, `tokenizer.chat_template.tool_use`.
    pub fn from_gguf(metadata: &GgufMetadata) -> Result<Option<Self>, TemplateError> {
        let Some(default) = metadata.get::<&str>("tokenizer.chat_template")? else { return Ok(None) };
        let tokens: Option<&StringArray> = metadata.get("tokenizer.ggml.tokens")?;
        let text = |key: &str| -> Result<Option<String>, TemplateError> {
            let id: Option<u32> = metadata.get(key)?;
            Ok(id.and_then(|id| tokens?.get_str(usize::try_from(id).ok()?)).map(str::to_owned))
        };
        let special = SpecialTokens {
            bos: text("tokenizer.ggml.bos_token_id")?,
            eos: text("tokenizer.ggml.eos_token_id")?,
            unk: text("tokenizer.ggml.unknown_token_id")?,
            pad: text("tokenizer.ggml.padding_token_id")?,
        };
        let tool_use = metadata.get::<&str>("tokenizer.chat_template.tool_use")?.map(str::to_owned);
        Ok(Some(Self { default: default.to_owned(), tool_use, special }))
    }

    /// What a Hugging Face folder carries. A `chat_template.jinja` counts before
    /// `tokenizer_config.json`, as in the library that writes both.
    pub fn from_checkpoint_dir(dir: &Path) -> Result<Option<Self>, TemplateError> {
        let config: TokenizerConfig = read_json(&dir.join("tokenizer_config.json"))?.unwrap_or_default();
        let (mut default, mut tool_use) = match config.chat_template {
            None => (None, None),
            Some(Templates::One(text)) => (Some(text), None),
            Some(Templates::Named(list)) => {
                let find =
                    |name: &str| list.iter().find(|entry| entry.name == name).map(|entry| entry.template.clone());
                (find("default").or_else(|| list.first().map(|entry| entry.template.clone())), find("tool_use"))
            }
        };
        default = read_text(&dir.join("chat_template.jinja"))?.or(default);
        tool_use = read_text(&dir.join("additional_chat_templates/tool_use.jinja"))?.or(tool_use);
        let text = |token: Option<TokenText>| token.map(TokenText::into_text);
        let special = SpecialTokens {
            bos: text(config.bos_token),
            eos: text(config.eos_token),
            unk: text(config.unk_token),
            pad: text(config.pad_token),
        };
        Ok(default.map(|default| Self { default, tool_use, special }))
    }
}

#[derive(Default, Deserialize)]
struct TokenizerConfig {
    #[serde(default)]
    chat_template: Option<Templates>,
    #[serde(default)]
    bos_token: Option<TokenText>,
    #[serde(default)]
    eos_token: Option<TokenText>,
    #[serde(default)]
    unk_token: Option<TokenText>,
    #[serde(default)]
    pad_token: Option<TokenText>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TokenText {
    Plain(String),
    Entry { content: String },
}

impl TokenText {
    fn into_text(self) -> String {
        match self {
            Self::Plain(text) | Self::Entry { content: text } => text,
        }
    }
}

fn read_text(path: &Path) -> Result<Option<String>, TemplateError> {
    match crate::files::read_text_file(path, crate::files::MAX_DESCRIPTION_BYTES) {
        Ok(text) => Ok(Some(text)),
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TemplateError::Read { path: path.to_owned(), source }),
    }
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, TemplateError> {
    let Some(text) = read_text(path)? else { return Ok(None) };
    serde_json::from_str(&text).map(Some).map_err(|source| TemplateError::Json { path: path.to_owned(), source })
}

/// The template with the tags `generation` and `endgeneration`, which mark answers for training,
/// as a condition that always holds.
pub(super) fn without_generation_blocks(template: &str) -> String {
    let mut result = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        result.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 2);
        let inner = tag.trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+']).trim();
        match inner {
            "generation" => result.push_str(&tag.replace(inner, "if true")),
            "endgeneration" => result.push_str(&tag.replace(inner, "endif")),
            _ => result.push_str(tag),
        }
        rest = after;
    }
    result.push_str(rest);
    result
}

#[cfg(test)]
mod tests {
    use super::without_generation_blocks;

    #[test]
    fn generation_tags_become_conditions() {
        let template = "a{%- generation -%}b{% endgeneration %}{% if generation %}c{% endif %}{%";
        assert_eq!(
            without_generation_blocks(template),
            "a{%- if true -%}b{% endif %}{% if generation %}c{% endif %}{%"
        );
    }
}
