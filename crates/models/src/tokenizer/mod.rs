//! Text to token ids and back.
//!
//! In: a `tokenizer.json` (with the small JSON files beside it) or the `tokenizer.ggml.*` metadata
//! of a GGUF file; then text. Out: ids, the bytes of each id, text. Cutting text into pieces and
//! merging them is done by the parts of the Hugging Face `tokenizers` library, so that ids equal
//! those of the model's own tokenizer.
//!
//! Invariants:
//! * Ids given out are below [`Tokenizer::vocab_size`].
//! * [`Tokenizer::decode`] of ids equals the concatenation of what a [`StreamDecoder`] gives for
//!   the same ids, however they are cut into calls; no part of it ends within a character.
//! * For a byte-level vocabulary with all 256 bytes and without a normalizer, the concatenation of
//!   [`Tokenizer::token_bytes`] over [`Tokenizer::encode_bytes`] of any bytes is those bytes. (With
//!   a normalizer, as Qwen's NFC, it is the bytes of the normalized text.) A character whose bytes
//!   the vocabulary lacks has no id and is left out, as in the Hugging Face library.
//! * Any file gives a tokenizer or a [`TokenizerError`], never a panic.

mod alphabet;
mod checkpoint;
mod error;
mod gguf;
mod json;
mod pre_tokenizer;
mod sentencepiece;
mod stream;
mod vocabulary;

use std::collections::BTreeSet;
use std::path::Path;

use ahash::AHashMap;
use tokenizers::models::bpe::BPE;
use tokenizers::{
    AddedToken, AddedVocabulary, Model, NormalizerWrapper, OffsetType, PreTokenizer, PreTokenizerWrapper,
};

pub use error::TokenizerError;
pub use gguf::GgufVocabulary;
pub use stream::{StreamDecoder, StreamOptions};

use alphabet::Alphabet;
pub(crate) use alphabet::char_of_byte;
use vocabulary::{AddedIds, Kind, Vocabulary};

/// How to read a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Put in the tokens that the model wants at the beginning or end of a text (BOS, EOS).
    pub add_special: bool,
    /// Read the text of a special token as that token. Without it such text is plain text: the
    /// right choice for what users write.
    pub parse_special: bool,
}

impl EncodeOptions {
    /// A prompt written by hand: BOS is added, markup is read.
    pub const PROMPT: Self = Self { add_special: true, parse_special: true };
    /// The output of a chat template: it holds its own BOS, markup is read.
    pub const TEMPLATE: Self = Self { add_special: false, parse_special: true };
    /// Nothing but the text.
    pub const LITERAL: Self = Self { add_special: false, parse_special: false };
}

/// What happens to text before it is merged.
#[derive(Debug)]
struct Pipeline {
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
}

/// A token outside the merging model.
#[derive(Debug)]
struct Added {
    id: u32,
    token: AddedToken,
}

/// The parts that a tokenizer is made of, whichever file they came from.
struct Parts {
    vocabulary: Vocabulary,
    model: BPE,
    alphabet: Alphabet,
    start: Pipeline,
    /// For text that goes on after a byte that is no text: nothing is put before it.
    middle: Option<Pipeline>,
    /// Cutting a text into pieces leaves nothing of it out.
    cuts_only: bool,
    added: Vec<Added>,
}

/// A tokenizer.
pub struct Tokenizer {
    vocabulary: Vocabulary,
    model: BPE,
    alphabet: Alphabet,
    start: Pipeline,
    middle: Option<Pipeline>,
    /// Finds added tokens where markup is read.
    parsing: AddedVocabulary,
    /// Finds added tokens where text is literal: without the special ones.
    literal: AddedVocabulary,
    /// Ids before and after a text.
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    bos: Option<u32>,
    eos: BTreeSet<u32>,
    bound: Option<Bound>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("alphabet", &self.alphabet)
            .field("bos", &self.bos)
            .field("eos", &self.eos)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads a `tokenizer.json` alone. What other files say (stop tokens, whether to add BOS) is
    /// unknown then; see [`Tokenizer::from_checkpoint_dir`].
    pub fn from_json_file(path: &Path) -> Result<Self, TokenizerError> {
        let bytes = crate::files::read_file(path, crate::files::MAX_TOKENIZER_BYTES)
            .map_err(|source| TokenizerError::Read { path: path.to_owned(), source })?;
        Self::from_json_bytes(&bytes)
    }

    /// Reads the contents of a `tokenizer.json`.
    pub fn from_json_bytes(bytes: &[u8]) -> Result<Self, TokenizerError> {
        json::read(bytes, &[])
    }

    /// Reads a Hugging Face folder: `tokenizer.json`, and from `tokenizer_config.json`,
    /// `special_tokens_map.json`, `generation_config.json` and `config.json`, where they exist,
    /// the special tokens and the stop tokens.
    pub fn from_checkpoint_dir(dir: &Path) -> Result<Self, TokenizerError> {
        checkpoint::read(dir)
    }

    /// Builds a tokenizer from the metadata of a GGUF file.
    pub fn from_gguf(metadata: &qwen_formats::GgufMetadata) -> Result<Self, TokenizerError> {
        GgufVocabulary::from_metadata(metadata)?.build()
    }

    fn from_parts(parts: Parts) -> Result<Self, TokenizerError> {
        let bound = Bound::new(&parts);
        let Parts { vocabulary, model, alphabet, start, middle, added, .. } = parts;
        let ids: AHashMap<&str, u32> = added.iter().map(|added| (added.token.content.as_str(), added.id)).collect();
        let ids = AddedIds { added: &ids, vocabulary_size: vocabulary.len() };
        let find = |literal: bool| {
            let mut found = AddedVocabulary::new();
            let tokens = added.iter().map(|added| &added.token).filter(|token| !(literal && token.special)).cloned();
            found
                .add_tokens(tokens, &ids, start.normalizer.as_ref())
                .map_err(TokenizerError::library("list of added tokens"))?;
            Ok::<_, TokenizerError>(found)
        };
        let (parsing, literal) = (find(false)?, find(true)?);
        Ok(Self {
            parsing,
            literal,
            vocabulary,
            model,
            alphabet,
            start,
            middle,
            prefix: Vec::new(),
            suffix: Vec::new(),
            bos: None,
            eos: BTreeSet::new(),
            bound,
        })
    }

    /// The ids of a text.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::with_capacity(text.len() / 4 + 2);
        self.framed(&mut ids, options, |ids| self.encode_run(text, &self.start, options, ids))?;
        Ok(ids)
    }

    /// Tokens that a text has at least, told by its bytes alone, which is far cheaper than encoding it; 0 if nothing is known.
    #[must_use]
    pub fn least_tokens(&self, text: &str) -> usize {
        let Some(bound) = &self.bound else { return 0 };
        let kept = text.bytes().filter(|byte| bound.kept[usize::from(*byte)]).count();
        kept.div_ceil(bound.most)
    }

    /// The ids of bytes that need not be valid UTF-8. Runs of valid UTF-8 are encoded as text; each
    /// byte outside them becomes the token of that single byte.
    pub fn encode_bytes(&self, bytes: &[u8], options: EncodeOptions) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::with_capacity(bytes.len() / 4 + 2);
        self.framed(&mut ids, options, |ids| {
            let mut offset = 0;
            for chunk in bytes.utf8_chunks() {
                let middle = self.middle.as_ref().filter(|_| offset > 0);
                self.encode_run(chunk.valid(), middle.unwrap_or(&self.start), options, ids)?;
                offset += chunk.valid().len();
                for &byte in chunk.invalid() {
                    let id = self.model.token_to_id(&self.alphabet.token_of_byte(byte));
                    ids.push(id.ok_or(TokenizerError::ByteNotInVocabulary { byte, offset })?);
                    offset += 1;
                }
            }
            Ok(())
        })?;
        Ok(ids)
    }

    /// Puts the tokens of the beginning and the end around what `fill` adds.
    fn framed(
        &self,
        ids: &mut Vec<u32>,
        options: EncodeOptions,
        fill: impl FnOnce(&mut Vec<u32>) -> Result<(), TokenizerError>,
    ) -> Result<(), TokenizerError> {
        if options.add_special {
            ids.extend(&self.prefix);
        }
        fill(ids)?;
        if options.add_special {
            ids.extend(&self.suffix);
        }
        Ok(())
    }

    fn encode_run(
        &self,
        text: &str,
        pipeline: &Pipeline,
        options: EncodeOptions,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let added = if options.parse_special { &self.parsing } else { &self.literal };
        let mut pieces = added.extract_and_normalize(pipeline.normalizer.as_ref(), text);
        if let Some(pre_tokenizer) = &pipeline.pre_tokenizer {
            pre_tokenizer.pre_tokenize(&mut pieces).map_err(TokenizerError::library("pre-tokenizer"))?;
        }
        pieces
            .tokenize(|piece| self.model.tokenize(piece.get()))
            .and_then(|()| pieces.into_encoding(None, 0, OffsetType::None))
            .map(|encoding| ids.extend_from_slice(encoding.get_ids()))
            .map_err(TokenizerError::library("model"))
    }

    /// The text of ids; unknown ids have none. Bytes that are no valid UTF-8 become U+FFFD.
    #[must_use]
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut decoder = StreamDecoder::new(StreamOptions { skip_special, start_of_text: true });
        let mut text: String = ids.iter().map(|&id| decoder.push(self, id)).collect();
        text.push_str(&decoder.finish());
        text
    }

    /// The bytes that a token stands for: often a part of a character, and for a special token its
    /// own text. Empty for an id without a token.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        match self.vocabulary.get(id) {
            None => Vec::new(),
            Some((text, Kind::Normal)) => self.alphabet.bytes_of(text),
            Some((text, _)) => text.as_bytes().to_vec(),
        }
    }

    /// The text of a token as the vocabulary writes it.
    #[must_use]
    pub fn id_to_token(&self, id: u32) -> Option<&str> {
        self.vocabulary.get(id).map(|(text, _)| text)
    }

    /// The id of a token as the vocabulary writes it.
    #[must_use]
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.parsing.token_to_id(token, &self.model)
    }

    /// One more than the largest id. A model's logits may be longer: rows without a token.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.len()
    }

    /// The token of the beginning of a text, if the model has one.
    #[must_use]
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The tokens that end an answer.
    #[must_use]
    pub fn eos_ids(&self) -> &BTreeSet<u32> {
        &self.eos
    }

    /// Whether encoding with [`EncodeOptions::add_special`] begins with BOS. A chat template that
    /// writes BOS itself must then be encoded without.
    #[must_use]
    pub fn adds_bos(&self) -> bool {
        self.bos.is_some_and(|bos| self.prefix.first() == Some(&bos))
    }

    /// Whether a token is markup of the model, not text.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        matches!(self.vocabulary.get(id), Some((_, Kind::Control)))
    }

    /// Takes the named ids as beginning and end, after checking that they exist.
    fn set_frame(&mut self, prefix: Vec<u32>, suffix: Vec<u32>) -> Result<(), TokenizerError> {
        for &id in prefix.iter().chain(&suffix) {
            self.check_id("a token put around the text", id)?;
        }
        (self.prefix, self.suffix) = (prefix, suffix);
        Ok(())
    }

    fn check_id(&self, what: &str, id: u32) -> Result<u32, TokenizerError> {
        match self.vocabulary.get(id) {
            Some(_) => Ok(id),
            None => Err(TokenizerError::Inconsistent(format!(
                "{what} has id {id}, but the vocabulary has {} tokens",
                self.vocab_size()
            ))),
        }
    }
}

/// What can be said of a number of tokens without finding them.
#[derive(Debug)]
struct Bound {
    /// Most bytes of a text that one token stands for.
    most: usize,
    /// Bytes that no text loses on its way to tokens.
    kept: [bool; 256],
}

/// How many times as short as a text its composed form can be, in UTF-8: the largest growth by decomposition, of U+0390
/// (<https://www.unicode.org/faq/normalization.html>).
const MOST_COMPOSED: usize = 3;

impl Bound {
    /// None where bytes can be left out: by a normalizer, by cutting, or because markup takes spaces around it.
    fn new(parts: &Parts) -> Option<Self> {
        let takes_spaces = |added: &Added| added.token.lstrip || added.token.rstrip;
        if parts.alphabet != Alphabet::ByteLevel || !parts.cuts_only || parts.added.iter().any(takes_spaces) {
            return None;
        }
        let mut kept = [false; 256];
        for (byte, kept) in (0..=u8::MAX).zip(&mut kept) {
            *kept = parts.model.token_to_id(&parts.alphabet.token_of_byte(byte)).is_some();
        }
        let factor = match &parts.start.normalizer {
            None => 1,
            // What is composed has other bytes.
            Some(NormalizerWrapper::NFC(_)) if kept == [true; 256] => MOST_COMPOSED,
            Some(_) => return None,
        };
        let tokens = (0..u32::try_from(parts.vocabulary.len()).ok()?).filter_map(|id| parts.vocabulary.get(id));
        let longest = tokens.fold(0, |longest, (text, kind)| match kind {
            // The text of a token is at least as long as what it stands for.
            _ if text.len() <= longest => longest,
            Kind::Normal => longest.max(parts.alphabet.bytes_of(text).len()),
            _ => text.len(),
        });
        (longest > 0).then_some(Self { most: longest * factor, kept })
    }
}
