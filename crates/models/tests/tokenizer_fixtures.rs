//! Every family's fixture tokenizer, from `tokenizer.json` and from GGUF, gives the ids that the
//! Hugging Face tokenizers library gives (`fixtures/make_tokenizers.py`).

#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

use std::collections::BTreeMap;
use std::path::PathBuf;

use proptest::prelude::*;
use qwen_models::hub::{Builtin, DownloadOptions, Progress, cache_dir, fetch_builtin};
use qwen_models::tokenizer::{EncodeOptions, StreamDecoder, StreamOptions, Tokenizer};
use serde::Deserialize;

#[derive(Deserialize)]
struct Sample {
    text: String,
    ids: Vec<u32>,
    with_special: Option<Vec<u32>>,
    literal: Option<Vec<u32>>,
    literal_gguf: Option<Vec<u32>>,
    decoded: Option<String>,
}

struct Fixture {
    name: String,
    dir: PathBuf,
    samples: BTreeMap<String, Sample>,
}

fn fixtures() -> Vec<Fixture> {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/tokenizers"));
    let mut fixtures: Vec<Fixture> = std::fs::read_dir(&root)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|dir| dir.join("expected.json").exists())
        .map(|dir| Fixture {
            name: dir.file_name().unwrap().to_string_lossy().into_owned(),
            samples: serde_json::from_slice(&std::fs::read(dir.join("expected.json")).unwrap()).unwrap(),
            dir,
        })
        .collect();
    fixtures.sort_by(|a, b| a.name.cmp(&b.name));
    assert!(fixtures.len() >= 9, "fixtures of all families");
    fixtures
}

fn from_gguf(fixture: &Fixture) -> Tokenizer {
    let checkpoint = qwen_formats::Checkpoint::open(&fixture.dir.join("vocab.gguf")).unwrap();
    Tokenizer::from_gguf(checkpoint.metadata().unwrap()).unwrap()
}

fn check(fixture: &Fixture, source: &str, tokenizer: &Tokenizer, literal: impl Fn(&Sample) -> Option<&Vec<u32>>) {
    for (name, sample) in &fixture.samples {
        let place = format!("{} from {source}, sample {name} {:?}", fixture.name, sample.text);
        let encode = |options| tokenizer.encode(&sample.text, options).unwrap();
        assert_eq!(encode(EncodeOptions::TEMPLATE), sample.ids, "{place}");
        if let Some(expected) = &sample.with_special {
            assert_eq!(&encode(EncodeOptions::PROMPT), expected, "{place}, with special tokens");
        }
        if let Some(expected) = literal(sample) {
            assert_eq!(&encode(EncodeOptions::LITERAL), expected, "{place}, literally");
        }
        let expected = sample.decoded.as_ref().unwrap_or(&sample.text);
        assert_eq!(&tokenizer.decode(&sample.ids, false), expected, "{place}, decoded");
        assert!(sample.ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
        for &id in &sample.ids {
            let token = tokenizer.id_to_token(id).unwrap();
            assert_eq!(tokenizer.token_to_id(token), Some(id), "{place}, token {token:?}");
        }
    }
}

#[test]
fn ids_equal_the_reference_from_json() {
    for fixture in fixtures() {
        let tokenizer = Tokenizer::from_checkpoint_dir(&fixture.dir).unwrap();
        check(&fixture, "tokenizer.json", &tokenizer, |sample| sample.literal.as_ref());
    }
}

#[test]
fn ids_equal_the_reference_from_gguf() {
    for fixture in fixtures() {
        check(&fixture, "GGUF", &from_gguf(&fixture), |sample| {
            sample.literal_gguf.as_ref().or(sample.literal.as_ref())
        });
    }
}

/// The default model's own vocabulary. Its file is not committed; it is fetched as a first run fetches it.
#[test]
fn ids_of_the_default_model_equal_the_reference() {
    let mut progress = |_: Progress<'_>| {};
    let path = fetch_builtin(Builtin::SmolLm2, &cache_dir(), &mut DownloadOptions::new(&mut progress)).unwrap();
    let dir = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/smollm2"));
    let samples = serde_json::from_slice(&std::fs::read(dir.join("expected.json")).unwrap()).unwrap();
    let checkpoint = qwen_formats::Checkpoint::open(&path).unwrap();
    let tokenizer = Tokenizer::from_gguf(checkpoint.metadata().unwrap()).unwrap();
    let fixture = Fixture { name: "smollm2".into(), dir, samples };
    check(&fixture, "GGUF", &tokenizer, |sample| sample.literal_gguf.as_ref().or(sample.literal.as_ref()));
}

#[test]
fn special_tokens_are_the_same_from_both() {
    for fixture in fixtures() {
        let (json, gguf) = (Tokenizer::from_checkpoint_dir(&fixture.dir).unwrap(), from_gguf(&fixture));
        assert_eq!(json.vocab_size(), gguf.vocab_size(), "{}", fixture.name);
        assert_eq!(json.bos(), gguf.bos(), "{}", fixture.name);
        assert_eq!(json.adds_bos(), gguf.adds_bos(), "{}", fixture.name);
        assert!(json.eos_ids().is_subset(gguf.eos_ids()), "{}: {json:?} {gguf:?}", fixture.name);
        for id in 0..u32::try_from(json.vocab_size()).unwrap() {
            assert_eq!(json.id_to_token(id), gguf.id_to_token(id));
            assert_eq!(json.token_bytes(id), gguf.token_bytes(id), "{}: {:?}", fixture.name, json.id_to_token(id));
            assert!(!json.is_special(id) || gguf.is_special(id));
        }
    }
}

#[test]
fn every_single_byte_comes_back() {
    for fixture in fixtures() {
        for tokenizer in [Tokenizer::from_checkpoint_dir(&fixture.dir).unwrap(), from_gguf(&fixture)] {
            for byte in 0..=255u8 {
                // Between two letters, so that no space of the encoding itself is in the way.
                let bytes = [b'a', byte, b'b'];
                assert_eq!(bytes_of(&tokenizer, &bytes), bytes, "{} byte {byte:#x}", fixture.name);
            }
        }
    }
}

/// What the ids of these bytes stand for, without the space that SentencePiece puts before.
fn bytes_of(tokenizer: &Tokenizer, bytes: &[u8]) -> Vec<u8> {
    let ids = tokenizer.encode_bytes(bytes, EncodeOptions::LITERAL).unwrap();
    let found: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).collect();
    let adds_space = tokenizer.token_to_id("▁").is_some() && tokenizer.token_to_id("Ġ").is_none();
    found.strip_prefix(b" ").filter(|_| adds_space).map_or(found.clone(), <[u8]>::to_vec)
}

fn families() -> &'static [(String, Tokenizer)] {
    static FAMILIES: std::sync::OnceLock<Vec<(String, Tokenizer)>> = std::sync::OnceLock::new();
    FAMILIES.get_or_init(|| fixtures().iter().map(|fixture| (fixture.name.clone(), from_gguf(fixture))).collect())
}

/// Families whose text is not composed first: their bytes come back whatever they are.
fn keeps_bytes(name: &str) -> bool {
    !matches!(name, "qwen2" | "deepseek-r1-qwen")
}

fn byte_strings() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        any::<String>().prop_map(String::into_bytes),
        "[ \t\r\n]{0,12}".prop_map(String::into_bytes),
        "[a-zA-Z0-9'.,!_ ]{0,24}".prop_map(String::into_bytes),
        "[\u{4e00}-\u{4e80}あ-ん가-각🤖-🤙\u{1f3fb}-\u{1f3ff}\u{200d}\u{0300}-\u{0310}]{0,8}"
            .prop_map(String::into_bytes),
        prop::collection::vec(any::<u8>(), 0..6),
    ];
    prop::collection::vec(piece, 0..5).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_come_back(bytes in byte_strings()) {
        for (name, tokenizer) in families().iter().filter(|(name, _)| keeps_bytes(name)) {
            prop_assert_eq!(&bytes_of(tokenizer, &bytes), &bytes, "{}", name);
        }
    }

    #[test]
    fn valid_text_has_the_same_ids_as_bytes(text in any::<String>()) {
        for (name, tokenizer) in families() {
            let options = EncodeOptions::PROMPT;
            prop_assert_eq!(tokenizer.encode(&text, options).unwrap(), tokenizer.encode_bytes(text.as_bytes(), options).unwrap(), "{}", name);
        }
    }

    #[test]
    fn a_stream_equals_the_whole(ids in prop::collection::vec(0u32..1000, 0..40), skip_special: bool) {
        for (name, tokenizer) in families() {
            let mut stream = StreamDecoder::new(StreamOptions { skip_special, start_of_text: true });
            let mut text = String::new();
            let mut bytes = Vec::new();
            for &id in &ids {
                text.push_str(&stream.push(tokenizer, id));
                if !(skip_special && tokenizer.is_special(id)) {
                    bytes.extend(tokenizer.token_bytes(id));
                }
            }
            text.push_str(&stream.finish());
            prop_assert_eq!(&text, &tokenizer.decode(&ids, skip_special), "{}", name);
            let bytes = bytes.strip_prefix(b" ").filter(|_| name == "llama-spm").unwrap_or(&bytes);
            prop_assert_eq!(&text, &String::from_utf8_lossy(bytes), "{}", name);
        }
    }

    #[test]
    fn a_stream_never_ends_within_a_character(text in any::<String>()) {
        for (name, tokenizer) in families().iter().filter(|(name, _)| keeps_bytes(name)) {
            let mut stream = StreamDecoder::new(StreamOptions { skip_special: false, start_of_text: true });
            let mut shown = String::new();
            for id in tokenizer.encode(&text, EncodeOptions::LITERAL).unwrap() {
                shown.push_str(&stream.push(tokenizer, id));
                prop_assert!(text.starts_with(&shown), "{}: {:?} of {:?}", name, shown, text);
            }
            shown.push_str(&stream.finish());
            prop_assert_eq!(&shown, &text, "{}", name);
        }
    }
}

#[test]
fn a_character_cut_off_at_the_end_is_shown_once() {
    let (_, tokenizer) = families().iter().find(|(name, _)| name == "smollm").unwrap();
    let ids = tokenizer.encode_bytes(b"a\xF0\x9F\xA4", EncodeOptions::LITERAL).unwrap();
    let mut stream = StreamDecoder::new(StreamOptions { skip_special: false, start_of_text: true });
    let shown: String = ids.iter().map(|&id| stream.push(tokenizer, id)).collect();
    assert_eq!(shown, "a");
    assert_eq!(stream.finish(), "\u{FFFD}");
    assert_eq!(stream.finish(), "");
    assert_eq!(stream.push(tokenizer, u32::MAX), "");
}

#[test]
fn no_text_has_fewer_tokens_than_its_bytes_allow() {
    let mut bounded = 0;
    for fixture in fixtures() {
        for tokenizer in [Tokenizer::from_checkpoint_dir(&fixture.dir).unwrap(), from_gguf(&fixture)] {
            let token = |id| String::from_utf8(tokenizer.token_bytes(id)).ok();
            let longest = (0..tokenizer.vocab_size() as u32).filter_map(token).max_by_key(String::len).unwrap();
            // The last ones: bytes that vocabularies lack, and what composition makes shorter.
            let texts = [longest.as_str(), "word ", "    ", "\u{4}\u{6}\u{13}", "\u{f1234}", "\u{3b9}\u{308}\u{301}"];
            let samples = fixture.samples.values().map(|sample| sample.text.clone());
            for text in samples.chain(texts.iter().map(|text| text.repeat(50))) {
                for options in [EncodeOptions::TEMPLATE, EncodeOptions::LITERAL] {
                    let (least, found) =
                        (tokenizer.least_tokens(&text), tokenizer.encode(&text, options).unwrap().len());
                    assert!(least <= found, "{}: {least} of {found} in {text:?}", fixture.name);
                }
            }
            bounded += usize::from(tokenizer.least_tokens(&"a".repeat(100_000)) > 0);
        }
    }
    assert!(bounded > 8, "{bounded} vocabularies of bytes");
}
