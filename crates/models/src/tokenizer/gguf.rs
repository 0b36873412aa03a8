//! Tokenizers from GGUF metadata: `tokenizer.ggml.*`.

use qwen_formats::GgufMetadata;
use qwen_formats::gguf::StringArray;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::prepend::Prepend;
use tokenizers::normalizers::replace::Replace;
use tokenizers::normalizers::utils::Sequence;
use tokenizers::{AddedToken, NormalizerWrapper};

use super::alphabet::{Alphabet, SPACE_MARK};
use super::pre_tokenizer::PreTokenizerRule;
use super::vocabulary::{Kind, Vocabulary, longest};
use super::{Added, Parts, Pipeline, Tokenizer, TokenizerError, sentencepiece};

/// Control tokens that end an answer in the families read here, beside those that the file names:
/// files often name only one of a model's several.
const ANSWER_ENDS: &[&str] = &[
    "<|endoftext|>",
    "<|im_end|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<\u{FF5C}end\u{2581}of\u{2581}sentence\u{FF5C}>",
    "<|EOT|>",
];

/// Values of `tokenizer.ggml.token_type`.
mod token_type {
    pub(super) const NORMAL: i32 = 1;
    pub(super) const UNKNOWN: i32 = 2;
    pub(super) const CONTROL: i32 = 3;
    pub(super) const USER_DEFINED: i32 = 4;
    pub(super) const UNUSED: i32 = 5;
}

/// What a GGUF file says about its tokenizer.
#[derive(Debug, Clone)]
#[expect(missing_docs, reason = "each field is the `tokenizer.ggml.` key of that name")]
pub struct GgufVocabulary<'a> {
    pub model: &'a str,
    pub pre: Option<&'a str>,
    pub tokens: &'a StringArray,
    pub token_type: Option<Vec<i32>>,
    pub scores: Option<Vec<f32>>,
    pub merges: Option<&'a StringArray>,
    pub bos_token_id: Option<u32>,
    pub eos_token_id: Option<u32>,
    pub eot_token_id: Option<u32>,
    pub eom_token_id: Option<u32>,
    pub unknown_token_id: Option<u32>,
    pub add_bos_token: Option<bool>,
    pub add_eos_token: Option<bool>,
    pub add_space_prefix: Option<bool>,
}

impl<'a> GgufVocabulary<'a> {
    /// Reads the keys; those that must exist do.
    pub fn from_metadata(metadata: &'a GgufMetadata) -> Result<Self, TokenizerError> {
        Ok(Self {
            model: metadata.require("tokenizer.ggml.model")?,
            pre: metadata.get("tokenizer.ggml.pre")?,
            tokens: metadata.require("tokenizer.ggml.tokens")?,
            token_type: metadata.get("tokenizer.ggml.token_type")?,
            scores: metadata.get("tokenizer.ggml.scores")?,
            merges: metadata.get("tokenizer.ggml.merges")?,
            bos_token_id: metadata.get("tokenizer.ggml.bos_token_id")?,
            eos_token_id: metadata.get("tokenizer.ggml.eos_token_id")?,
            eot_token_id: metadata.get("tokenizer.ggml.eot_token_id")?,
            eom_token_id: metadata.get("tokenizer.ggml.eom_token_id")?,
            unknown_token_id: metadata.get("tokenizer.ggml.unknown_token_id")?,
            add_bos_token: metadata.get("tokenizer.ggml.add_bos_token")?,
            add_eos_token: metadata.get("tokenizer.ggml.add_eos_token")?,
            add_space_prefix: metadata.get("tokenizer.ggml.add_space_prefix")?,
        })
    }

    /// Builds the tokenizer.
    pub fn build(&self) -> Result<Tokenizer, TokenizerError> {
        self.check_lengths()?;
        match self.model {
            "gpt2" => self.build_byte_level(),
            "llama" => self.build_sentencepiece(),
            other => Err(TokenizerError::Unsupported {
                what: "model (tokenizer.ggml.model)",
                found: other.to_owned(),
                supported: "gpt2 (byte-level BPE), llama (SentencePiece BPE)".to_owned(),
            }),
        }
    }

    fn check_lengths(&self) -> Result<(), TokenizerError> {
        let tokens = self.tokens.len();
        let lengths =
            [("token_type", self.token_type.as_ref().map(Vec::len)), ("scores", self.scores.as_ref().map(Vec::len))];
        for (what, length) in lengths {
            if let Some(length) = length.filter(|&length| length != tokens) {
                return Err(TokenizerError::Inconsistent(format!(
                    "tokenizer.ggml.tokens has {tokens} entries, tokenizer.ggml.{what} has {length}"
                )));
            }
        }
        if u32::try_from(tokens).is_err() || tokens == 0 {
            return Err(TokenizerError::Inconsistent(format!("tokenizer.ggml.tokens has {tokens} entries")));
        }
        Ok(())
    }

    fn build_byte_level(&self) -> Result<Tokenizer, TokenizerError> {
        let rule = PreTokenizerRule::named(self.pre.unwrap_or("default"))?;
        let Table { vocabulary, vocab, added, .. } = self.table()?;
        let merges = self.merges.ok_or(TokenizerError::Missing("tokenizer.ggml.merges"))?;
        let merges = (0..merges.len()).map(|rank| split_merge(rank, merges.get_str(rank))).collect::<Result<_, _>>()?;
        let model = build_bpe(vocab, merges, BpeOptions { ignore_merges: rule.ignore_merges, unknown: None })?;
        let start = Pipeline { normalizer: rule.normalizer(), pre_tokenizer: Some(rule.pre_tokenizer()?) };
        let parts =
            Parts { vocabulary, model, alphabet: Alphabet::ByteLevel, start, middle: None, cuts_only: true, added };
        self.finish(Tokenizer::from_parts(parts)?, rule.add_bos)
    }

    fn build_sentencepiece(&self) -> Result<Tokenizer, TokenizerError> {
        let add_space_prefix = self.add_space_prefix.unwrap_or(true);
        let Table { vocabulary, vocab, added, mergeable } = self.table()?;
        let scores = self.scores.as_ref().ok_or(TokenizerError::Missing("tokenizer.ggml.scores"))?;
        let mergeable: Vec<_> = mergeable
            .into_iter()
            .filter_map(|id| Some((id, self.tokens.get_str(id as usize)?, *scores.get(id as usize)?)))
            .collect();
        let merges = sentencepiece::merges(&mergeable, &vocab)?;
        let unknown = self.unknown_token().filter(|text| vocab.contains_key(*text)).map(str::to_owned);
        let model = build_bpe(vocab, merges, BpeOptions { ignore_merges: false, unknown: Some(unknown) })?;
        let parts = Parts {
            vocabulary,
            model,
            alphabet: Alphabet::SentencePiece { strip_leading_space: add_space_prefix },
            start: space_pipeline(add_space_prefix)?,
            middle: Some(space_pipeline(false)?),
            cuts_only: false,
            added,
        };
        self.finish(Tokenizer::from_parts(parts)?, true)
    }

    /// The token for text that nothing else covers.
    fn unknown_token(&self) -> Option<&str> {
        let by_type = || {
            let types = self.token_type.as_ref()?;
            types.iter().position(|&token_type| token_type == token_type::UNKNOWN)
        };
        let id = self.unknown_token_id.map(|id| id as usize).or_else(by_type)?;
        self.tokens.get_str(id)
    }

    /// Sorts the tokens by what they are for.
    fn table(&self) -> Result<Table, TokenizerError> {
        let mut table = Table {
            vocabulary: Vocabulary::with_capacity(self.tokens.len()),
            vocab: Vocab::with_capacity(self.tokens.len()),
            added: Vec::new(),
            mergeable: Vec::new(),
        };
        for (id, bytes) in (0u32..).zip(self.tokens.iter()) {
            // A token that is no UTF-8 cannot be matched by text; it keeps its place.
            let Ok(text) = std::str::from_utf8(bytes) else {
                table.vocabulary.push("", Kind::Hole);
                continue;
            };
            let token_type = self.token_type.as_ref().and_then(|types| types.get(id as usize).copied());
            match token_type.unwrap_or(token_type::NORMAL) {
                token_type::UNUSED => table.vocabulary.push(text, Kind::Hole),
                token_type::CONTROL => table.add(id, text, true),
                token_type::UNKNOWN => {
                    table.vocab.insert(text.to_owned(), id);
                    table.add(id, text, true);
                }
                token_type::USER_DEFINED => {
                    table.vocab.insert(text.to_owned(), id);
                    table.add(id, text, false);
                }
                _ => {
                    table.vocabulary.push(text, Kind::Normal);
                    table.vocab.insert(text.to_owned(), id);
                    table.mergeable.push(id);
                }
            }
        }
        Ok(table)
    }

    /// Sets what stands around a text and what ends an answer.
    fn finish(&self, mut tokenizer: Tokenizer, add_bos_by_default: bool) -> Result<Tokenizer, TokenizerError> {
        let check =
            |tokenizer: &Tokenizer, what, id: Option<u32>| id.map(|id| tokenizer.check_id(what, id)).transpose();
        tokenizer.bos = check(&tokenizer, "tokenizer.ggml.bos_token_id", self.bos_token_id)?;
        let eos = check(&tokenizer, "tokenizer.ggml.eos_token_id", self.eos_token_id)?;
        let add_bos = self.add_bos_token.unwrap_or(add_bos_by_default);
        let prefix = tokenizer.bos.filter(|_| add_bos).into_iter().collect();
        let suffix = eos.filter(|_| self.add_eos_token.unwrap_or(false)).into_iter().collect();
        tokenizer.set_frame(prefix, suffix)?;
        tokenizer.eos.extend(eos);
        tokenizer.eos.extend(check(&tokenizer, "tokenizer.ggml.eot_token_id", self.eot_token_id)?);
        tokenizer.eos.extend(check(&tokenizer, "tokenizer.ggml.eom_token_id", self.eom_token_id)?);
        let ends = ANSWER_ENDS.iter().filter_map(|text| tokenizer.token_to_id(text));
        let ends: Vec<u32> = ends.filter(|&id| tokenizer.is_special(id)).collect();
        tokenizer.eos.extend(ends);
        Ok(tokenizer)
    }
}

/// The tokens of a file, sorted by what they are for.
struct Table {
    vocabulary: Vocabulary,
    /// Tokens that merging can give.
    vocab: Vocab,
    added: Vec<Added>,
    /// Ids of ordinary tokens.
    mergeable: Vec<u32>,
}

impl Table {
    fn add(&mut self, id: u32, text: &str, special: bool) {
        self.vocabulary.push(text, if special { Kind::Control } else { Kind::UserDefined });
        self.added.push(Added { id, token: AddedToken::from(text, special).normalized(false) });
    }
}

/// Spaces as SentencePiece writes them, with one before the text or not.
fn space_pipeline(prefix: bool) -> Result<Pipeline, TokenizerError> {
    let mark = SPACE_MARK.to_string();
    let replace = Replace::new(" ", mark.clone()).map_err(TokenizerError::library("space normalizer"))?;
    let mut steps = vec![NormalizerWrapper::Replace(replace)];
    if prefix {
        steps.insert(0, NormalizerWrapper::Prepend(Prepend::new(mark)));
    }
    Ok(Pipeline { normalizer: Some(NormalizerWrapper::Sequence(Sequence::new(steps))), pre_tokenizer: None })
}

/// A merge is written as its two tokens with a space between.
pub(super) fn split_merge(rank: usize, merge: Option<&str>) -> Result<(String, String), TokenizerError> {
    let pair = merge.and_then(|merge| merge.split_once(' '));
    let (left, right) = pair.ok_or_else(|| {
        TokenizerError::Inconsistent(format!("merge {rank} is {merge:?}; expected two tokens with a space between"))
    })?;
    Ok((left.to_owned(), right.to_owned()))
}

/// How a BPE model treats what its merges do not cover.
pub(super) struct BpeOptions {
    pub(super) ignore_merges: bool,
    /// `Some` for SentencePiece: bytes have tokens, and there may be one for the unknown.
    pub(super) unknown: Option<Option<String>>,
}

/// Builds the library's model. Merges are checked first: the library takes their lengths on trust.
pub(super) fn build_bpe(vocab: Vocab, merges: Merges, options: BpeOptions) -> Result<BPE, TokenizerError> {
    let longest = longest(&vocab);
    if let Some((left, right)) = merges.iter().find(|(left, right)| left.len() + right.len() > longest) {
        return Err(TokenizerError::Inconsistent(format!(
            "the merge of {left:?} and {right:?} gives a token that is not in the vocabulary"
        )));
    }
    let mut builder = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(options.ignore_merges);
    if let Some(unknown) = options.unknown {
        builder = builder.byte_fallback(true).fuse_unk(true);
        if let Some(token) = unknown {
            builder = builder.unk_token(token);
        }
    }
    builder.build().map_err(TokenizerError::library("list of merges"))
}
