//! Tokenizers from a `tokenizer.json`.
//!
//! The library's own reader is not used for the whole document: it panics on some malformed ones.
//! Each part is read by itself, the model is checked before it is built, and parts of kinds that
//! the families here do not use are refused by name.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{self, DeserializeOwned, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;
use tokenizers::AddedToken;
use tokenizers::models::bpe::Vocab;

use super::alphabet::Alphabet;
use super::gguf::{BpeOptions, build_bpe, split_merge};
use super::vocabulary::{Kind, Vocabulary};
use super::{Added, Parts, Pipeline, Tokenizer, TokenizerError};

const NORMALIZERS: &[&str] = &["Sequence", "NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "Strip", "Lowercase"];
const PRE_TOKENIZERS: &[&str] =
    &["Sequence", "Split", "ByteLevel", "Digits", "Metaspace", "Punctuation", "Whitespace", "WhitespaceSplit"];
/// Of these, those that leave something out, or put something else in its place.
const LEAVE_OUT: &[&str] = &["Metaspace", "Whitespace", "WhitespaceSplit"];
const POST_PROCESSORS: &[&str] =
    &["Sequence", "ByteLevel", "TemplateProcessing", "BertProcessing", "RobertaProcessing"];

#[derive(Deserialize)]
struct Document<'a> {
    #[serde(default)]
    added_tokens: Vec<AddedEntry>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(borrow)]
    model: &'a RawValue,
}

/// An added token as `tokenizer.json` and `tokenizer_config.json` write it.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct AddedEntry {
    #[serde(default)]
    pub(super) id: u32,
    pub(super) content: String,
    #[serde(default)]
    pub(super) single_word: bool,
    #[serde(default)]
    pub(super) lstrip: bool,
    #[serde(default)]
    pub(super) rstrip: bool,
    #[serde(default)]
    pub(super) normalized: Option<bool>,
    #[serde(default)]
    pub(super) special: bool,
}

impl AddedEntry {
    fn token(&self) -> AddedToken {
        AddedToken::from(self.content.clone(), self.special)
            .single_word(self.single_word)
            .lstrip(self.lstrip)
            .rstrip(self.rstrip)
            .normalized(self.normalized.unwrap_or(!self.special))
    }
}

#[derive(Deserialize)]
struct ModelKind {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
}

#[derive(Deserialize)]
struct BpeModel {
    vocab: Vocab,
    merges: Vec<Merge>,
    #[serde(default)]
    unk_token: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
}

/// A merge: a list of two tokens, or in older files one string with a space.
struct Merge(String, String);

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MergeVisitor;
        impl<'de> Visitor<'de> for MergeVisitor {
            type Value = Merge;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("two tokens, as a list or with a space between")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Merge, E> {
                let (left, right) =
                    split_merge(0, Some(text)).map_err(|_| E::invalid_value(de::Unexpected::Str(text), &self))?;
                Ok(Merge(left, right))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Merge, A::Error> {
                let left = list.next_element()?.ok_or_else(|| de::Error::invalid_length(0, &self))?;
                let right = list.next_element()?.ok_or_else(|| de::Error::invalid_length(1, &self))?;
                if list.next_element::<de::IgnoredAny>()?.is_some() {
                    return Err(de::Error::invalid_length(3, &self));
                }
                Ok(Merge(left, right))
            }
        }
        deserializer.deserialize_any(MergeVisitor)
    }
}

/// Reads a document; `more` are added tokens that another file lists.
pub(super) fn read(bytes: &[u8], more: &[AddedEntry]) -> Result<Tokenizer, TokenizerError> {
    let document: Document<'_> = serde_json::from_slice(bytes).map_err(TokenizerError::json("tokenizer.json"))?;
    let model = read_model(document.model.get())?;
    let alphabet = alphabet(&document, &model)?;
    check_kinds("normalizer", &document.normalizer, "normalizers", NORMALIZERS)?;
    check_kinds("pre-tokenizer", &document.pre_tokenizer, "pretokenizers", PRE_TOKENIZERS)?;
    let start = pipeline(document.normalizer.clone(), document.pre_tokenizer.clone())?;
    let leaves_out =
        |part: &Value| kind_of(part).is_some_and(|kind| LEAVE_OUT.contains(&kind)) || part["behavior"] == "Removed";
    let cuts_only = !any_part(&document.pre_tokenizer, &leaves_out);
    let middle = if alphabet == Alphabet::ByteLevel {
        None
    } else {
        Some(pipeline(without_prefix(document.normalizer), without_prefix(document.pre_tokenizer))?)
    };
    let mut added = document.added_tokens;
    let new = more.iter().filter(|entry| !added.iter().any(|known| known.content == entry.content));
    let new: Vec<_> = new.cloned().collect();
    added.extend(new);
    let vocabulary = vocabulary(&model.vocab, &added)?;
    let added = added.iter().map(|entry| Added { id: entry.id, token: entry.token() }).collect();
    let unknown = model.byte_fallback.then(|| model.unk_token.filter(|token| model.vocab.contains_key(token)));
    let merges = model.merges.into_iter().map(|Merge(left, right)| (left, right)).collect();
    let model = build_bpe(model.vocab, merges, BpeOptions { ignore_merges: model.ignore_merges, unknown })?;
    let mut tokenizer = Tokenizer::from_parts(Parts { vocabulary, model, alphabet, start, middle, cuts_only, added })?;
    let (prefix, suffix) = frame(&document.post_processor)?;
    tokenizer.bos = prefix.first().copied();
    tokenizer.set_frame(prefix, suffix)?;
    Ok(tokenizer)
}

fn read_model(text: &str) -> Result<BpeModel, TokenizerError> {
    let kind: ModelKind = serde_json::from_str(text).map_err(TokenizerError::json("tokenizer.json: model"))?;
    let unsupported = |what, found: String, supported: &str| {
        Err(TokenizerError::Unsupported { what, found, supported: supported.to_owned() })
    };
    match kind {
        ModelKind { kind: Some(kind), .. } if kind != "BPE" => unsupported("model", kind, "BPE"),
        ModelKind { continuing_subword_prefix: Some(prefix), .. } if !prefix.is_empty() => {
            unsupported("continuing_subword_prefix", prefix, "none")
        }
        ModelKind { end_of_word_suffix: Some(suffix), .. } if !suffix.is_empty() => {
            unsupported("end_of_word_suffix", suffix, "none")
        }
        _ => serde_json::from_str(text).map_err(TokenizerError::json("tokenizer.json: model")),
    }
}

/// All tokens by id: those of the model and the added ones, which may be among them.
fn vocabulary(vocab: &Vocab, added: &[AddedEntry]) -> Result<Vocabulary, TokenizerError> {
    let mut tokens: BTreeMap<u32, (&str, Kind)> = BTreeMap::new();
    for (text, &id) in vocab {
        if let Some((other, _)) = tokens.insert(id, (text, Kind::Normal)) {
            return Err(TokenizerError::Inconsistent(format!("tokens {other:?} and {text:?} have the same id {id}")));
        }
    }
    for entry in added {
        let kind = if entry.special { Kind::Control } else { Kind::UserDefined };
        match tokens.insert(entry.id, (&entry.content, kind)) {
            Some((other, _)) if other != entry.content => {
                return Err(TokenizerError::Inconsistent(format!(
                    "tokens {other:?} and {:?} have the same id {}",
                    entry.content, entry.id
                )));
            }
            _ => {}
        }
    }
    Vocabulary::from_ids(tokens.into_iter().map(|(id, (text, kind))| (id, text, kind)).collect())
}

/// Whether tokens are written byte by byte or as SentencePiece does.
fn alphabet(document: &Document<'_>, model: &BpeModel) -> Result<Alphabet, TokenizerError> {
    let parts = [&document.pre_tokenizer, &document.decoder, &document.normalizer];
    if parts.iter().any(|part| any_part(part, &|part| kind_of(part) == Some("ByteLevel"))) {
        return Ok(Alphabet::ByteLevel);
    }
    if model.byte_fallback || any_part(&document.pre_tokenizer, &|part| kind_of(part) == Some("Metaspace")) {
        let strip_leading_space = any_part(&document.decoder, &|part| {
            let metaspace = || part.get("prepend_scheme").and_then(Value::as_str).unwrap_or("always") != "never";
            match kind_of(part) {
                Some("Strip") => part.get("start").and_then(Value::as_u64).is_some_and(|start| start > 0),
                Some("Metaspace") => metaspace(),
                _ => false,
            }
        });
        return Ok(Alphabet::SentencePiece { strip_leading_space });
    }
    Err(TokenizerError::Unsupported {
        what: "alphabet",
        found: "neither byte-level nor byte fallback".to_owned(),
        supported: "ByteLevel, byte_fallback, Metaspace".to_owned(),
    })
}

fn kind_of(part: &Value) -> Option<&str> {
    part.get("type").and_then(Value::as_str)
}

/// Whether a part, or one within it, has a property. (The JSON parser bounds the depth.)
fn any_part(part: &Value, test: &dyn Fn(&Value) -> bool) -> bool {
    match part {
        Value::Object(fields) => test(part) || fields.values().any(|field| any_part(field, test)),
        Value::Array(items) => items.iter().any(|item| any_part(item, test)),
        _ => false,
    }
}

/// Refuses kinds of parts that are not listed.
fn check_kinds(what: &'static str, part: &Value, list: &str, supported: &[&str]) -> Result<(), TokenizerError> {
    if part.is_null() {
        return Ok(());
    }
    let kind = kind_of(part).unwrap_or("without a type");
    if !supported.contains(&kind) {
        return Err(TokenizerError::Unsupported { what, found: kind.to_owned(), supported: supported.join(", ") });
    }
    let parts = part.get(list).and_then(Value::as_array);
    parts.into_iter().flatten().try_for_each(|part| check_kinds(what, part, list, supported))
}

fn pipeline(normalizer: Value, pre_tokenizer: Value) -> Result<Pipeline, TokenizerError> {
    fn part<T: DeserializeOwned>(what: &str, value: Value) -> Result<Option<T>, TokenizerError> {
        serde_json::from_value(value).map_err(TokenizerError::json(what))
    }
    Ok(Pipeline {
        normalizer: part("tokenizer.json: normalizer", normalizer)?,
        pre_tokenizer: part("tokenizer.json: pre_tokenizer", pre_tokenizer)?,
    })
}

/// The part without what puts a space before the text.
fn without_prefix(mut part: Value) -> Value {
    match kind_of(&part) {
        Some("Prepend") => return Value::Null,
        Some("Metaspace") => {
            if let Some(fields) = part.as_object_mut() {
                fields.insert("prepend_scheme".to_owned(), "never".into());
                fields.remove("add_prefix_space");
            }
        }
        Some("Sequence") => {
            for list in ["normalizers", "pretokenizers"] {
                if let Some(parts) = part.get_mut(list).and_then(Value::as_array_mut) {
                    let kept = std::mem::take(parts).into_iter().map(without_prefix);
                    *parts = kept.filter(|part| !part.is_null()).collect();
                }
            }
        }
        _ => {}
    }
    part
}

/// Ids that the post-processor puts before and after a text.
fn frame(part: &Value) -> Result<(Vec<u32>, Vec<u32>), TokenizerError> {
    let (mut prefix, mut suffix) = (Vec::new(), Vec::new());
    match kind_of(part) {
        None | Some("ByteLevel") => {}
        Some("TemplateProcessing") => {
            let mut after = false;
            for piece in part.get("single").and_then(Value::as_array).into_iter().flatten() {
                if let Some(name) = piece.pointer("/SpecialToken/id").and_then(Value::as_str) {
                    let ids = part.get("special_tokens").and_then(|tokens| tokens.get(name)?.get("ids"));
                    let ids = ids.and_then(|ids| Vec::<u32>::deserialize(ids).ok()).ok_or_else(|| {
                        TokenizerError::Inconsistent(format!("the post-processor names {name:?} without its ids"))
                    })?;
                    if after { &mut suffix } else { &mut prefix }.extend(ids);
                } else {
                    after = true;
                }
            }
        }
        Some("BertProcessing" | "RobertaProcessing") => {
            let id = |field: &str| {
                let id = part.get(field).and_then(|pair| pair.get(1)).and_then(Value::as_u64);
                id.and_then(|id| u32::try_from(id).ok())
                    .ok_or(TokenizerError::Missing("post-processor's `cls` or `sep` id"))
            };
            prefix.push(id("cls")?);
            suffix.push(id("sep")?);
        }
        Some("Sequence") => {
            for part in part.get("processors").and_then(Value::as_array).into_iter().flatten() {
                let (before, after) = frame(part)?;
                prefix.splice(0..0, before);
                suffix.extend(after);
            }
        }
        Some(other) => {
            return Err(TokenizerError::Unsupported {
                what: "post-processor",
                found: other.to_owned(),
                supported: POST_PROCESSORS.join(", "),
            });
        }
    }
    Ok((prefix, suffix))
}
