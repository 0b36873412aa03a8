use proptest::prelude::*;

use super::*;
use crate::test_support::{raw_safetensors, safetensors};

fn small() -> Vec<u8> {
    safetensors(&[
        ("b", "BF16", &[2, 3], &[1; 12]),
        ("a", "F32", &[], &[2; 4]),
        ("empty", "I64", &[0, 5], &[]),
        ("c", "F8_E4M3", &[5], &[3; 5]),
    ])
}

fn message(json: &str, data: &[u8]) -> String {
    parse_safetensors_bytes(&raw_safetensors(json, data)).unwrap_err().to_string()
}

#[test]
fn a_small_file_reads_back() {
    let bytes = small();
    let tensors = parse_safetensors_bytes(&bytes).unwrap().tensors;
    let names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "c", "empty"]);
    let b = &tensors[1];
    assert_eq!((b.dtype, b.shape.as_slice(), b.bytes), (DType::BF16, &[2, 3][..], 12));
    let start = b.offset as usize;
    assert_eq!(bytes[start..start + 12], [1; 12]);
    assert_eq!(tensors[3].elements(), 0);
}

#[test]
fn the_safetensors_crate_agrees() {
    let values: Vec<u8> = (0..48).collect();
    let view = ::safetensors::tensor::TensorView::new(::safetensors::Dtype::F32, vec![3, 4], &values).unwrap();
    let extra = std::collections::HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let bytes = ::safetensors::serialize([("w", view)], Some(extra)).unwrap();
    let header = parse_safetensors_bytes(&bytes).unwrap();
    assert_eq!(header.metadata, [("format".to_owned(), "pt".to_owned())]);
    assert_eq!(header.tensors[0].shape, [3, 4]);
    assert_eq!(&bytes[header.tensors[0].offset as usize..], values);
    ::safetensors::SafeTensors::deserialize(&small()).unwrap();
}

#[test]
fn places_are_checked() {
    let one = |offsets: &str| format!(r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":{offsets}}}}}"#);
    assert!(parse_safetensors_bytes(&raw_safetensors(&one("[0,4]"), &[0; 4])).is_ok());
    assert!(message(&one("[0,4]"), &[0; 3]).contains("truncated: tensor \"a\" needs bytes 61..65 but the file has 64"));
    assert!(message(&one("[0,4]"), &[0; 5]).contains("cover all 5 bytes of data, found tensors of 4 bytes"));
    assert!(message(&one("[1,5]"), &[0; 5]).contains("cover all 5 bytes"));
    assert!(
        message(&one("[4,0]"), &[0; 4]).contains("expected 4 bytes for shape [4] of u8, found data_offsets [4, 0]")
    );
    assert!(message(&one("[0,5]"), &[0; 5]).contains("expected 4 bytes"));
    assert!(message(&one("[9223372036854775808,9223372036854775812]"), &[0; 4]).contains("truncated"));
    assert!(message(&one("[18446744073709551611,18446744073709551615]"), &[0; 4]).contains("truncated"));
    assert!(message(&one("[-1,3]"), &[0; 4]).contains("JSON"));
    assert!(message(&one("[0,18446744073709551616]"), &[0; 4]).contains("JSON"));
}

#[test]
fn overlap_is_refused() {
    let json =
        r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#;
    assert!(message(json, &[0; 8]).contains("expected bytes after tensor a"));
}

#[test]
fn shapes_that_overflow_are_refused() {
    let with_shape =
        |shape: &str| message(&format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":[0,4]}}}}"#), &[0; 4]);
    assert!(with_shape("[9223372036854775808,2]").contains("fits in 64 bits"));
    assert!(with_shape("[4611686018427387904]").contains("fits in 64 bits"));
    assert!(with_shape("[0]").contains("expected 0 bytes"));
    assert!(with_shape("[-1]").contains("JSON"));
    assert!(with_shape(&format!("[1{}]", ",1".repeat(16))).contains("invalid length 17"));
    assert!(with_shape("[1.5]").contains("JSON"));
}

#[test]
fn headers_are_bounded() {
    assert!(parse_safetensors_bytes(&[1, 0, 0]).unwrap_err().to_string().contains("truncated: header length"));
    for length in [100_000_001, 1 << 63, u64::MAX] {
        let bytes = [&length.to_le_bytes()[..], b"{}"].concat();
        assert!(parse_safetensors_bytes(&bytes).unwrap_err().to_string().contains("at most 100000000 bytes"));
    }
    let bytes = [&99u64.to_le_bytes()[..], b"{}"].concat();
    assert!(parse_safetensors_bytes(&bytes).unwrap_err().to_string().contains("truncated: header needs bytes 8..107"));
}

#[test]
fn duplicates_are_refused() {
    let entry = r#"{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    assert!(message(&format!(r#"{{"a":{entry},"a":{entry}}}"#), &[0; 1]).contains("occurs twice"));
    assert!(message(r#"{"__metadata__":{},"__metadata__":{}}"#, &[]).contains("occurs twice"));
    assert!(message(r#"{"__metadata__":{"k":"1","k":"2"}}"#, &[]).contains("occurs twice"));
    let field = r#"{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}"#;
    assert!(message(field, &[0; 1]).contains("duplicate field"));
}

#[test]
fn strange_json_is_refused() {
    for json in ["", "[]", "null", "{", r#"{"a":1}"#, r#"{"__metadata__":{"k":1}}"#, "{} x", r#"{"a":{"dtype":"U8"}}"#]
    {
        assert!(message(json, &[]).contains("expected JSON that describes tensors"), "{json}");
    }
    assert!(message(&format!(r#"{{"a":{}"#, "[".repeat(100_000)), &[]).contains("JSON"));
    assert!(message(&format!(r#"{{"a":{{"{}":1}}}}"#, "x".repeat(100_000)), &[]).len() < 400);
    let spaces = raw_safetensors("{}     ", &[]);
    assert!(parse_safetensors_bytes(&spaces).unwrap().tensors.is_empty());
}

#[test]
fn unknown_types_are_refused_by_name() {
    let text = message(r#"{"w":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}"#, &[0; 1]);
    assert_eq!(
        text,
        "bytes.safetensors: tensor \"w\" uses type \"F4\", which is not supported; convert the tensor to F32, F16, \
         BF16 or F8_E4M3"
    );
}

#[test]
fn an_index_names_plain_files_only() {
    let index = parse_safetensors_index(
        br#"{"metadata":{"total_size":1},"weight_map":{"b":"2.safetensors","a":"1.safetensors","c":"1.safetensors"}}"#,
    )
    .unwrap();
    assert_eq!(index.files, ["1.safetensors", "2.safetensors"]);
    assert_eq!(index.tensors, [("a".to_owned(), 0), ("b".to_owned(), 1), ("c".to_owned(), 0)]);
    for name in
        ["../x.safetensors", "/x.safetensors", "a/b.safetensors", ".safetensors", "x.bin", "", r"a\\b.safetensors"]
    {
        let json = format!(r#"{{"weight_map":{{"t":"{name}"}}}}"#);
        let text = parse_safetensors_index(json.as_bytes()).unwrap_err().to_string();
        assert!(text.contains("expected plain file names"), "{name}: {text}");
    }
    assert!(parse_safetensors_index(br#"{"weight_map":{"a":"1.safetensors","a":"2.safetensors"}}"#).is_err());
    assert!(parse_safetensors_index(b"{}").unwrap_err().to_string().contains("weight_map"));
}

#[test]
fn truncation_anywhere_is_an_error() {
    let bytes = small();
    for length in 0..bytes.len() {
        assert!(parse_safetensors_bytes(&bytes[..length]).is_err(), "{length}");
    }
}

proptest! {
    #[test]
    fn flipped_bits_never_panic(flips in proptest::collection::vec((any::<proptest::sample::Index>(), 0..8u32), 1..6)) {
        let mut bytes = small();
        for (place, bit) in flips {
            let place = place.index(bytes.len());
            bytes[place] ^= 1 << bit;
        }
        if let Ok(header) = parse_safetensors_bytes(&bytes) {
            for tensor in header.tensors {
                prop_assert!(tensor.end() <= bytes.len() as u64);
                prop_assert_eq!(tensor.dtype.bytes_for(tensor.elements()), Some(tensor.bytes));
            }
        }
    }

    #[test]
    fn accepted_files_are_accepted_by_the_safetensors_crate(
        flips in proptest::collection::vec((any::<proptest::sample::Index>(), 0..8u32), 0..4)
    ) {
        let mut bytes = small();
        for (place, bit) in flips {
            let place = place.index(bytes.len());
            bytes[place] ^= 1 << bit;
        }
        if parse_safetensors_bytes(&bytes).is_ok() {
            prop_assert!(::safetensors::SafeTensors::deserialize(&bytes).is_ok());
        }
    }
}
