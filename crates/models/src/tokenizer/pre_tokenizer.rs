//! How each family cuts text into pieces before merging, by its GGUF name (`tokenizer.ggml.pre`).
//!
//! A GGUF file names the rule only; the rule itself is a fact about the family. The expressions
//! are those of the families' published `tokenizer.json` files; the names are the ones that
//! llama.cpp's converter writes. Expressions apply one after another, each cutting the pieces of
//! the one before; text between matches stays as pieces of its own.

use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior};

use super::TokenizerError;

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK_V3_WORDS: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
/// Letters with case, as one version of Unicode had them: scripts without case are left to the
/// other expressions.
const DEEPSEEK_LLM_WORDS: &str = "\\s?[A-Za-z\u{B5}\u{C0}-\u{D6}\u{D8}-\u{F6}\u{F8}-\u{1BA}\u{1BC}-\u{1BF}\u{1C4}-\u{293}\
     \u{295}-\u{2AF}\u{370}-\u{373}\u{376}\u{377}\u{37B}-\u{37D}\u{37F}\u{386}\
     \u{388}-\u{38A}\u{38C}\u{38E}-\u{3A1}\u{3A3}-\u{3F5}\u{3F7}-\u{481}\u{48A}-\u{52F}\
     \u{531}-\u{556}\u{10A0}-\u{10C5}\u{13A0}-\u{13F5}\u{13F8}-\u{13FD}\u{1C90}-\u{1CBA}\
     \u{1CBD}-\u{1CBF}\u{1D00}-\u{1D2B}\u{1D6B}-\u{1D77}\u{1D79}-\u{1D9A}\
     \u{1E00}-\u{1F15}\u{1F18}-\u{1F1D}\u{1F20}-\u{1F45}\u{1F48}-\u{1F4D}\
     \u{1F50}-\u{1F57}\u{1F59}\u{1F5B}\u{1F5D}\u{1F5F}-\u{1F7D}\u{1F80}-\u{1FB4}\
     \u{1FB6}-\u{1FBC}\u{1FBE}\u{1FC2}-\u{1FC4}\u{1FC6}-\u{1FCC}\u{1FD0}-\u{1FD3}\
     \u{1FD6}-\u{1FDB}\u{1FE0}-\u{1FEC}\u{1FF2}-\u{1FF4}\u{1FF6}-\u{1FFC}\u{2102}\u{2107}\
     \u{210A}-\u{2113}\u{2115}\u{2119}-\u{211D}\u{2124}\u{2126}\u{2128}\u{212A}-\u{212D}\
     \u{212F}-\u{2134}\u{2139}\u{213C}-\u{213F}\u{2145}-\u{2149}\u{214E}\u{2183}\u{2184}\
     \u{2C00}-\u{2C7B}\u{2C7E}-\u{2CE4}\u{2CEB}-\u{2CEE}\u{2CF2}\u{2CF3}\u{A640}-\u{A66D}\
     \u{A680}-\u{A69B}\u{A722}-\u{A76F}\u{A771}-\u{A787}\u{A78B}-\u{A78E}\
     \u{AB70}-\u{ABBF}\u{FB00}-\u{FB06}\u{FB13}-\u{FB17}\u{FF21}-\u{FF3A}\
     \u{FF41}-\u{FF5A}\u{10400}-\u{1044F}\u{104B0}-\u{104D3}\u{104D8}-\u{104FB}\
     \u{10C80}-\u{10CB2}\u{10CC0}-\u{10CF2}\u{118A0}-\u{118DF}\u{1E900}-\u{1E943}]+";
const DEEPSEEK_LLM_PUNCTUATION: &str =
    "\\s?[!-/:-~\u{FF01}-\u{FF0F}\u{FF1A}-\u{FF5E}\u{2018}-\u{201F}\u{3000}-\u{3002}]+";
/// Han, and with it everything from U+0800 on, and Hangul.
const DEEPSEEK_EAST_ASIAN: &str = "[\u{4E00}-\u{9FA5}\u{800}-\u{4E00}\u{AC00}-\u{D7FF}]+";

/// What belongs to a name of `tokenizer.ggml.pre`.
#[derive(Debug, Clone, Copy)]
pub(super) struct PreTokenizerRule {
    /// The names of this rule.
    names: &'static [&'static str],
    /// Expressions, in order.
    expressions: &'static [&'static str],
    /// Text is put into Unicode normal form C first.
    compose: bool,
    /// A piece that is a token as it stands is not merged from its bytes.
    pub(super) ignore_merges: bool,
    /// Text begins with the BOS token unless the file says otherwise.
    pub(super) add_bos: bool,
}

const PLAIN: PreTokenizerRule =
    PreTokenizerRule { names: &[], expressions: &[], compose: false, ignore_merges: false, add_bos: false };

static RULES: &[PreTokenizerRule] = &[
    PreTokenizerRule { names: &["smollm"], expressions: &[r"\p{N}", GPT2], ..PLAIN },
    PreTokenizerRule { names: &["gpt-2", "gpt2"], expressions: &[GPT2], ..PLAIN },
    // What files without a known rule were converted with; it fits no family exactly.
    PreTokenizerRule {
        names: &["default"],
        expressions: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
        ..PLAIN
    },
    PreTokenizerRule {
        names: &["llama-bpe", "llama3", "llama-v3"],
        expressions: &[LLAMA3],
        ignore_merges: true,
        add_bos: true,
        ..PLAIN
    },
    PreTokenizerRule { names: &["qwen2", "deepseek-r1-qwen"], expressions: &[QWEN2], compose: true, ..PLAIN },
    PreTokenizerRule {
        names: &["deepseek-llm"],
        expressions: &[r"[\r\n]", DEEPSEEK_LLM_WORDS, DEEPSEEK_LLM_PUNCTUATION, r"\s+$", DEEPSEEK_EAST_ASIAN, r"\p{N}"],
        ..PLAIN
    },
    PreTokenizerRule {
        names: &["deepseek-coder"],
        expressions: &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_EAST_ASIAN, r"\p{N}"],
        ..PLAIN
    },
    PreTokenizerRule {
        names: &["deepseek-v3"],
        expressions: &[r"\p{N}{1,3}", "[\u{4E00}-\u{9FA5}\u{3040}-\u{309F}\u{30A0}-\u{30FF}]+", DEEPSEEK_V3_WORDS],
        ..PLAIN
    },
];

impl PreTokenizerRule {
    /// The rule of a `tokenizer.ggml.pre`.
    pub(super) fn named(name: &str) -> Result<&'static Self, TokenizerError> {
        RULES.iter().find(|rule| rule.names.contains(&name)).ok_or_else(|| TokenizerError::Unsupported {
            what: "pre-tokenizer (tokenizer.ggml.pre)",
            found: name.to_owned(),
            supported: RULES.iter().flat_map(|rule| rule.names).copied().collect::<Vec<_>>().join(", "),
        })
    }

    pub(super) fn normalizer(&self) -> Option<NormalizerWrapper> {
        self.compose.then_some(NormalizerWrapper::NFC(NFC))
    }

    pub(super) fn pre_tokenizer(&self) -> Result<PreTokenizerWrapper, TokenizerError> {
        let mut steps = self
            .expressions
            .iter()
            .map(|&expression| {
                Split::new(SplitPattern::Regex(expression.to_owned()), SplitDelimiterBehavior::Isolated, false)
                    .map(PreTokenizerWrapper::Split)
            })
            .collect::<Result<Vec<_>, _>>()
            .map_err(TokenizerError::library("pre-tokenizer expression"))?;
        steps.push(PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, false, false)));
        Ok(PreTokenizerWrapper::Sequence(Sequence::new(steps)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    /// The pieces of `text`, as they are before the byte alphabet.
    fn pieces(name: &str, text: &str) -> Vec<String> {
        let mut pre_tokenized = PreTokenizedString::from(text);
        PreTokenizerRule::named(name).unwrap().pre_tokenizer().unwrap().pre_tokenize(&mut pre_tokenized).unwrap();
        let splits = pre_tokenized.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.iter().map(|(_, (start, end), _)| text[*start..*end].to_owned()).collect()
    }

    #[test]
    fn digits_are_cut_as_each_family_cuts_them() {
        for (name, expected) in [
            ("smollm", vec!["a", "1", "2", "3", "4", " b"]),
            ("gpt2", vec!["a", "1234", " b"]),
            ("llama-bpe", vec!["a", "123", "4", " b"]),
            ("qwen2", vec!["a", "1", "2", "3", "4", " b"]),
            ("deepseek-llm", vec!["a", "1", "2", "3", "4", " b"]),
            ("deepseek-coder", vec!["a", "1", "2", "3", "4", " b"]),
            ("deepseek-v3", vec!["a", "123", "4", " b"]),
        ] {
            assert_eq!(pieces(name, "a1234 b"), expected, "{name}");
        }
    }

    #[test]
    fn words_spaces_and_scripts() {
        assert_eq!(pieces("qwen2", "I'LL go\n\n  now"), ["I", "'LL", " go", "\n\n", " ", " now"]);
        assert_eq!(pieces("gpt2", "I'LL go  now"), ["I", "'", "LL", " go", " ", " now"]);
        assert_eq!(pieces("deepseek-v3", "值は42です.foo"), ["值は", "42", "です", ".foo"]);
        // The family's class of punctuation holds the ASCII letters, and cuts words at others.
        assert_eq!(
            pieces("deepseek-llm", "word Ünï 中文\nx  "),
            ["word", " Ü", "n", "ï", " ", "中文", "\n", "x", "  "]
        );
        assert_eq!(pieces("deepseek-coder", "let x=1;"), ["let", " x", "=", "1", ";"]);
        assert_eq!(pieces("default", "a+1234"), ["a", "+", "123", "4"]);
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_known_ones() {
        let error = PreTokenizerRule::named("tekken").unwrap_err().to_string();
        assert!(error.contains("`tekken`") && error.contains("deepseek-v3") && error.contains("smollm"), "{error}");
    }

    #[test]
    fn no_piece_is_lost() {
        let text = "Hé\u{301}llo, 世界! \r\n\t 12345 ½ _x' 'S \u{3000}ｗｉｄｅ 🤖🏽 ㅎ\u{D7FF}  ";
        for rule in RULES {
            for name in rule.names {
                assert_eq!(pieces(name, text).concat(), text, "{name}");
            }
        }
    }
}
