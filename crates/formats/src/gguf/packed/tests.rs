use super::*;
use crate::gguf::{GgufHeader, parse_gguf_bytes};

fn weight(name: &str, source: u32, layout: u32, bytes: u64) -> PackedWeight {
    let (dtype, shape) = (DType::Q4_0, vec![3, 32]);
    PackedWeight { weight: name.into(), source, layout, dtype, shape, offset: 0, bytes }
}

fn described() -> Packed {
    let weights = vec![weight("q", 0, 7, 100), weight("k", 1, 7, 5000), weight("k", 0, 7, 60), weight("k", 0, 3, 61)];
    let absent = |name: &str| AbsentTensor { name: name.into(), dtype: DType::Q4_0, shape: vec![3, 32] };
    Packed::new("sim", weights, vec![absent("z"), absent("a")])
}

/// A compiled file; `edit` adds or contradicts keys.
fn file(packed: &Packed, edit: impl FnOnce(&mut GgufMetadata)) -> Vec<u8> {
    let mut source = GgufMetadata::new(Path::new("source.gguf"));
    source.insert(ARCHITECTURE_KEY.into(), Value::String((*b"llama").into()));
    source.insert("llama.block_count".into(), Value::U32(2));
    source.insert("split.count".into(), Value::U16(3));
    let mut keys = GgufWriter::new();
    packed.put(&mut keys, &source);
    let mut plain = Vec::new();
    keys.write(&mut plain, &mut |_, _| Ok(())).unwrap();
    let mut metadata = parse_gguf_bytes(&plain).unwrap().metadata;
    edit(&mut metadata);
    let mut writer = GgufWriter::aligned(PACKED_ALIGNMENT);
    metadata.iter().for_each(|(key, value)| writer.value(key, value));
    for (index, weight) in packed.weights().iter().enumerate() {
        assert!(writer.tensor(&packed_tensor_name(index), DType::I8, &[weight.bytes]));
    }
    assert!(writer.tensor("norm", DType::F32, &[4]));
    let mut bytes = Vec::new();
    writer.write(&mut bytes, &mut |tensor, out| out.write_all(&vec![1; tensor.bytes as usize])).unwrap();
    bytes
}

fn read(bytes: &[u8]) -> Result<(GgufHeader, Packed), String> {
    let mut header = parse_gguf_bytes(bytes).unwrap();
    let packed = take_packed(Path::new("x.gguf"), &mut header.metadata, &mut header.tensors);
    packed.map(|packed| (header, packed.unwrap())).map_err(|error| error.to_string())
}

#[test]
fn what_is_written_reads_back() {
    let (header, packed) = read(&file(&described(), |_| {})).unwrap();
    assert_eq!(header.metadata.str(ARCHITECTURE_KEY).unwrap(), "llama");
    assert_eq!(header.metadata.u32("llama.block_count").unwrap(), 2);
    assert!(!header.metadata.contains("split.count"));
    let names: Vec<&str> = header.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["norm"]);
    assert_eq!(packed.backend(), "sim");
    assert_eq!(packed.absent(), described().absent());
    assert!(packed.absent_tensor("a").is_some() && packed.absent_tensor("norm").is_none());
    for (weight, wanted) in packed.weights().iter().zip(described().weights()) {
        assert_eq!(PackedWeight { offset: 0, ..weight.clone() }, *wanted);
        assert!(weight.offset.is_multiple_of(u64::from(PACKED_ALIGNMENT)));
    }
    let forms = |name, source| packed.forms(name, source).map(|weight| weight.layout).collect::<Vec<_>>();
    assert_eq!(forms("k", 0), [3, 7]);
    assert_eq!(forms("k", 1), [7]);
    assert!(forms("k", 2).is_empty() && forms("l", 0).is_empty());
}

#[test]
fn other_files_are_left_alone() {
    let mut writer = GgufWriter::new();
    writer.string(ARCHITECTURE_KEY, "llama");
    assert!(writer.tensor("packed.0", DType::I8, &[4]));
    let mut bytes = Vec::new();
    writer.write(&mut bytes, &mut |_, out| out.write_all(&[0; 4])).unwrap();
    let mut header = parse_gguf_bytes(&bytes).unwrap();
    let packed = take_packed(Path::new("x.gguf"), &mut header.metadata, &mut header.tensors).unwrap();
    assert!(packed.is_none() && header.tensors.len() == 1);
}

#[test]
fn contradictions_are_told() {
    let told = |key: &str, value: Value| {
        let bytes = file(&described(), |metadata| drop(metadata.insert(key.to_owned(), value)));
        read(&bytes).unwrap_err()
    };
    let numbers = |values: &[u32]| Value::Array(Array::U32(values.to_vec()));
    let sizes = |values: &[u64]| Value::Array(Array::U64(values.to_vec()));
    let names = |names: &[&str]| Value::Array(Array::String(names.iter().collect()));
    let cases = [
        (VERSION_KEY, Value::U32(2), "version 2 of the format where this program has 1"),
        (VERSION_KEY, Value::Bool(true), "expected an integer"),
        (BACKEND, Value::U32(2), "expected a UTF-8 string"),
        ("qwen.packed.weight.sources", numbers(&[0, 1, 0]), "expected 4 numbers, one per name, found 3"),
        ("qwen.packed.weight.layouts", numbers(&[7; 4]), "packed weight \"k\" occurs twice"),
        ("qwen.packed.weight.types", numbers(&[2, 2, 2, 9]), "the code of a storage type, found 9"),
        ("qwen.packed.weight.ranks", numbers(&[2, 2, 2, 5]), "at most 4 sizes"),
        ("qwen.packed.weight.ranks", numbers(&[2, 2, 2, 4]), "4 of 2"),
        ("qwen.packed.weight.sizes", sizes(&[3, 32, 3, 32, 3, 32, 3, 33]), "whole blocks of q4_0, found [3, 33]"),
        ("qwen.packed.weight.sizes", sizes(&[3, 32, 3, 32, 3, 32, u64::MAX, 32]), "whole blocks of q4_0"),
        ("qwen.packed.weight.sizes", sizes(&[3, 32, 3, 32, 3, 32, 0, 32]), "sizes above zero"),
        ("qwen.packed.absent.sizes", sizes(&[3, 32, 3, 32, 1]), "1 more"),
        ("qwen.packed.absent.names", names(&["a", "a"]), "tensor \"a\" occurs twice"),
        ("qwen.packed.absent.names", names(&["a", "norm"]), "tensor \"norm\" occurs twice"),
        ("qwen.packed.absent.names", names(&["a", ""]), "a UTF-8 name"),
    ];
    for (key, value, expected) in cases {
        let found = told(key, value);
        assert!(found.contains(expected), "{key}: {found}");
    }
    let mut more = described();
    more.weights.push(weight("v", 0, 7, 9));
    let mut bytes = file(&more, |_| {});
    let at = bytes.windows(8).position(|text| text == b"packed.4").unwrap();
    bytes[at + 7] = b'5';
    assert!(read(&bytes).unwrap_err().contains("tensor packed.4: expected a list of bytes"));
}
