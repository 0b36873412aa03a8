use proptest::prelude::*;

use super::*;
use crate::test_support::GgufBuilder;

fn small() -> GgufBuilder {
    GgufBuilder::new()
        .string("general.architecture", "llama")
        .u32("llama.block_count", 2)
        .f32("llama.rope.freq_base", 10000.0)
        .bool("tokenizer.ggml.add_bos_token", true)
        .strings("tokenizer.ggml.tokens", ["<s>", "a", "", "é"])
        .f32s("tokenizer.ggml.scores", &[0.0, -1.0, -2.0, -3.0])
        .i32s("tokenizer.ggml.token_type", &[3, 1, 1, 1])
        .tensor("blk.0.attn_q.weight", DType::Q4_0, &[2, 32], &[7; 36])
        .tensor("output_norm.weight", DType::F32, &[3], &[1; 12])
}

fn message(builder: &GgufBuilder) -> String {
    parse_gguf_bytes(&builder.build()).unwrap_err().to_string()
}

#[test]
fn a_small_file_reads_back() {
    let bytes = small().build();
    let header = parse_gguf_bytes(&bytes).unwrap();
    assert_eq!(header.version, 3);
    let metadata = &header.metadata;
    assert_eq!(metadata.str("general.architecture").unwrap(), "llama");
    assert_eq!(metadata.u32("llama.block_count").unwrap(), 2);
    assert_eq!(metadata.u64("llama.block_count").unwrap(), 2);
    assert_eq!(metadata.f32("llama.rope.freq_base").unwrap(), 10000.0);
    assert!(metadata.bool("tokenizer.ggml.add_bos_token").unwrap());
    let tokens = metadata.strings("tokenizer.ggml.tokens").unwrap();
    assert_eq!(tokens.iter().collect::<Vec<_>>(), [&b"<s>"[..], b"a", b"", "é".as_bytes()]);
    assert_eq!((tokens.get_str(3), tokens.get(4)), (Some("é"), None));
    assert_eq!(metadata.f32s("tokenizer.ggml.scores").unwrap(), [0.0, -1.0, -2.0, -3.0]);
    assert_eq!(metadata.u32s("tokenizer.ggml.token_type").unwrap(), [3, 1, 1, 1]);
    let [matrix, norm] = &header.tensors[..] else { panic!("two tensors") };
    assert_eq!((matrix.shape.as_slice(), matrix.bytes, matrix.dtype), (&[2, 32][..], 36, DType::Q4_0));
    assert_eq!(matrix.offset % 32, 0);
    assert_eq!(norm.offset, matrix.offset + 64);
    assert_eq!(norm.offset + norm.bytes, bytes.len() as u64);
}

#[test]
fn metadata_errors_name_key_and_types() {
    let header = parse_gguf_bytes(&small().i32("negative", -1).string("bytes", [0xFF, 0xFE]).build()).unwrap();
    let metadata = &header.metadata;
    assert_eq!(
        metadata.u32("llama.context_length").unwrap_err().to_string(),
        "bytes.gguf: metadata key llama.context_length is missing: expected an integer that fits u32; convert the \
         model again with a newer converter"
    );
    assert_eq!(
        metadata.u32("general.architecture").unwrap_err().to_string(),
        "bytes.gguf: metadata key general.architecture: expected an integer that fits u32, found string \"llama\"; \
         convert the model again"
    );
    assert!(metadata.u32("negative").unwrap_err().to_string().contains("found i32 -1"));
    assert!(metadata.str("tokenizer.ggml.tokens").unwrap_err().to_string().contains("array of 4 strings"));
    assert_eq!(metadata.get::<u32>("absent").unwrap(), None);
    assert!(metadata.get::<bool>("negative").is_err());
    assert!(metadata.str("bytes").is_err());
    assert_eq!(metadata.bytes("bytes").unwrap(), [0xFF, 0xFE]);
}

#[test]
fn a_vocabulary_without_tensors_is_valid() {
    let header = parse_gguf_bytes(&GgufBuilder::new().strings("tokenizer.ggml.tokens", ["a"]).build()).unwrap();
    assert!(header.tensors.is_empty());
    assert!(parse_gguf_bytes(&GgufBuilder::new().version(2).build()).is_ok());
}

#[test]
fn versions_and_foreign_files_are_refused_by_name() {
    assert!(message(&small().version(1)).contains("GGUF version 1"));
    assert!(message(&small().version(3u32.swap_bytes())).contains("big-endian GGUF version 3"));
    assert!(message(&small().version(77)).contains("GGUF version 77"));
    let foreign = parse_gguf_bytes(b"GGML....").unwrap_err().to_string();
    assert_eq!(foreign, "bytes.gguf: not a model checkpoint: expected the magic bytes \"GGUF\", found \"GGML\"");
}

#[test]
fn types_are_refused_by_name() {
    let with_type = |code| message(&GgufBuilder::new().raw_tensor(b"t", &[256], code, 0));
    assert!(with_type(4).contains("type q4_2 (id 4), which was removed"));
    assert!(with_type(38).contains("iq4_nl_8_8"));
    assert!(with_type(16).contains("type iq2_xxs (id 16), which is not supported"));
    assert!(with_type(43).contains("expected a tensor type id between 0 and 42, found 43"));
    assert!(with_type(DType::F8E4M3.code()).contains("found 100"));
    for code in 0..=60 {
        let known = DType::from_code(code).is_some();
        let named = removed_type(code).is_some() || unsupported_type(code).is_some();
        assert_eq!(code <= 42, known || named, "{code}");
        assert!(!(known && named), "{code}");
    }
}

#[test]
fn truncated_data_says_what_is_missing() {
    let bytes = small().build();
    let text = parse_gguf_bytes(&bytes[..bytes.len() - 1]).unwrap_err().to_string();
    let (end, length) = (bytes.len(), bytes.len() - 1);
    let start = end - 12;
    assert_eq!(
        text,
        format!(
            "bytes.gguf: truncated: tensor output_norm.weight needs bytes {start}..{end} but the file has {length}; \
             download it again"
        )
    );
}

#[test]
fn impossible_shapes_are_refused() {
    let with_shape = |dims: &[u64], dtype: DType| message(&GgufBuilder::new().raw_tensor(b"t", dims, dtype.code(), 0));
    assert!(with_shape(&[0, 4], DType::F32).contains("dimensions above zero"));
    assert!(with_shape(&[33], DType::Q4_0).contains("a multiple of 32 for q4_0, found [33]"));
    assert!(with_shape(&[16, 2], DType::Q4_0).contains("a multiple of 32"));
    assert!(with_shape(&[1 << 63, 2], DType::F32).contains("fits in 64 bits"));
    assert!(with_shape(&[1 << 62], DType::F32).contains("fits in 64 bits"));
    assert!(with_shape(&[(1 << 61) - 1], DType::F32).contains("truncated"));
    assert!(with_shape(&[1, 1, 1, 1, 1], DType::F32).contains("at most 4 dimensions, found 5"));
}

#[test]
fn places_are_checked() {
    let at = |offset| GgufBuilder::new().tensor("a", DType::F32, &[16], &[0; 64]).raw_tensor(b"b", &[8], 0, offset);
    assert!(message(&at(32)).contains("tensor b"));
    assert!(message(&at(0)).contains("which ends at"));
    assert!(message(&at(8)).contains("an offset that is a multiple of 32, found 8"));
    assert!(message(&at(64)).contains("truncated: tensor b"));
    assert!(message(&at(u64::MAX - 31)).contains("truncated: tensor b"));
    assert!(message(&at(1 << 63)).contains("truncated: tensor b"));
}

#[test]
fn alignment_is_a_power_of_two() {
    let wide = GgufBuilder::new().alignment(256).tensor("a", DType::U8, &[3], &[1, 2, 3]);
    // U8 has no GGUF id, so the entry is written by hand as I8.
    assert!(parse_gguf_bytes(&wide.build()).is_err());
    let wide = GgufBuilder::new().alignment(256).tensor("a", DType::I8, &[3], &[1, 2, 3]);
    assert_eq!(parse_gguf_bytes(&wide.build()).unwrap().tensors[0].offset, 256);
    for bad in [0, 3, 48] {
        assert!(message(&small().u32("general.alignment", bad)).contains("expected a power of two"), "{bad}");
    }
    assert!(message(&small().string("general.alignment", "x")).contains("found string \"x\""));
}

#[test]
fn duplicates_and_bad_names_are_refused() {
    assert!(message(&small().u32("llama.block_count", 3)).contains("\"llama.block_count\" occurs twice"));
    let twice = small().tensor("output_norm.weight", DType::F32, &[1], &[0; 4]);
    assert!(message(&twice).contains("tensor \"output_norm.weight\" occurs twice"));
    let long = GgufBuilder::new().raw_tensor(&[b'x'; 65], &[1], 0, 0);
    assert!(message(&long).contains("a name of at most 64 bytes, found 65"));
    let escape = GgufBuilder::new().raw_tensor(b"a\x1b[2Jb", &[0], 0, 0);
    assert!(message(&escape).contains(r"tensor a\u{1b}[2Jb"));
    assert!(message(&GgufBuilder::new().raw_tensor(b"", &[1], 0, 0)).contains("at least one byte"));
    assert!(message(&GgufBuilder::new().raw_key(&[0xFF], 0, &[1])).contains("UTF-8 name"));
}

#[test]
fn lying_counts_are_refused_before_allocation() {
    let huge = 1 << 63;
    for (tensors, keys) in [(huge, 0), (0, huge), (u64::MAX, u64::MAX), (1 << 20, 0), (0, 1 << 16), (3, 7)] {
        assert!(parse_gguf_bytes(&small().counts(tensors, keys).build()).is_err(), "{tensors} {keys}");
    }
    for kind in 0..13 {
        for count in [1 << 60, huge - 1, huge, u64::MAX, u64::MAX / 8 + 2] {
            let text = message(&GgufBuilder::new().array("k", kind, count, &[0; 64]));
            assert!(text.contains("truncated") || kind == 9, "{kind} {count}: {text}");
        }
    }
    assert!(message(&GgufBuilder::new().array("k", 9, 1, &[0; 64])).contains("array of arrays"));
    assert!(message(&GgufBuilder::new().array("k", 13, 1, &[0; 64])).contains("between 0 and 12, found 13"));
    let string = GgufBuilder::new().raw_key(b"k", 8, &u64::MAX.to_le_bytes());
    assert!(message(&string).contains("truncated: value of key \"k\""));
}

#[test]
fn bools_are_zero_or_one() {
    assert!(message(&GgufBuilder::new().raw_key(b"k", 7, &[2])).contains("expected a bool of 0 or 1, found 2"));
    assert!(message(&GgufBuilder::new().array("k", 7, 2, &[1, 255])).contains("found 255"));
}

#[test]
fn truncation_anywhere_is_an_error() {
    let bytes = small().build();
    for length in 0..bytes.len() {
        assert!(parse_gguf_bytes(&bytes[..length]).is_err(), "{length}");
    }
}

fn integer_value() -> impl Strategy<Value = (u32, Vec<u8>, i128)> {
    prop_oneof![
        any::<u8>().prop_map(|v| (0, v.to_le_bytes().to_vec(), v.into())),
        any::<i8>().prop_map(|v| (1, v.to_le_bytes().to_vec(), v.into())),
        any::<u16>().prop_map(|v| (2, v.to_le_bytes().to_vec(), v.into())),
        any::<i16>().prop_map(|v| (3, v.to_le_bytes().to_vec(), v.into())),
        any::<u32>().prop_map(|v| (4, v.to_le_bytes().to_vec(), v.into())),
        any::<i32>().prop_map(|v| (5, v.to_le_bytes().to_vec(), v.into())),
        any::<u64>().prop_map(|v| (10, v.to_le_bytes().to_vec(), v.into())),
        any::<i64>().prop_map(|v| (11, v.to_le_bytes().to_vec(), v.into())),
    ]
}

proptest! {
    #[test]
    fn integers_convert_exactly_or_not_at_all((kind, bytes, value) in integer_value()) {
        let metadata = parse_gguf_bytes(&GgufBuilder::new().raw_key(b"k", kind, &bytes).build()).unwrap().metadata;
        prop_assert_eq!(metadata.u32("k").ok(), u32::try_from(value).ok());
        prop_assert_eq!(metadata.u64("k").ok(), u64::try_from(value).ok());
        prop_assert_eq!(metadata.get::<i32>("k").ok().flatten(), i32::try_from(value).ok());
        prop_assert_eq!(metadata.i64("k").ok(), i64::try_from(value).ok());
    }

    #[test]
    fn strings_round_trip(strings in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..20), 0..20)) {
        let bytes = GgufBuilder::new().strings("k", &strings).build();
        let metadata = parse_gguf_bytes(&bytes).unwrap().metadata;
        let read: Vec<Vec<u8>> = metadata.strings("k").unwrap().iter().map(<[u8]>::to_vec).collect();
        prop_assert_eq!(read, strings);
    }

    #[test]
    fn flipped_bits_never_panic(flips in proptest::collection::vec((any::<proptest::sample::Index>(), 0..8u32), 1..6)) {
        let mut bytes = small().build();
        for (place, bit) in flips {
            let place = place.index(bytes.len());
            bytes[place] ^= 1 << bit;
        }
        if let Ok(header) = parse_gguf_bytes(&bytes) {
            for tensor in header.tensors {
                prop_assert!(tensor.end() <= bytes.len() as u64);
                prop_assert_eq!(tensor.dtype.bytes_for(tensor.elements()), Some(tensor.bytes));
            }
        }
    }

    #[test]
    fn noise_after_the_magic_never_panics(noise in proptest::collection::vec(any::<u8>(), 0..200), counts in 0..4u64) {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(counts.to_le_bytes());
        bytes.extend(counts.to_le_bytes());
        bytes.extend(noise);
        drop(parse_gguf_bytes(&bytes));
    }
}
