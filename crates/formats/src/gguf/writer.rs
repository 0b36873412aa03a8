//! Writes GGUF v3: keys and tensor descriptions first, then data in pieces, so that a file may be larger than memory.

use std::io::{self, Read, Write};

use super::{ALIGNMENT_KEY, Array, DEFAULT_ALIGNMENT, Value};
use crate::DType;

/// Codes of value types.
mod kind {
    pub(super) const U8: u32 = 0;
    pub(super) const I8: u32 = 1;
    pub(super) const U16: u32 = 2;
    pub(super) const I16: u32 = 3;
    pub(super) const U32: u32 = 4;
    pub(super) const I32: u32 = 5;
    pub(super) const F32: u32 = 6;
    pub(super) const BOOL: u32 = 7;
    pub(super) const STRING: u32 = 8;
    pub(super) const ARRAY: u32 = 9;
    pub(super) const U64: u32 = 10;
    pub(super) const I64: u32 = 11;
    pub(super) const F64: u32 = 12;
}

/// A tensor whose data is to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorPlan {
    /// Name.
    pub name: String,
    /// Storage type.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Vec<u64>,
    /// Bytes of its data.
    pub bytes: u64,
}

/// A file under construction.
#[derive(Debug, Clone)]
pub struct GgufWriter {
    keys: Vec<u8>,
    key_count: u64,
    tensors: Vec<TensorPlan>,
    alignment: u32,
}

impl Default for GgufWriter {
    fn default() -> Self {
        Self { keys: Vec::new(), key_count: 0, tensors: Vec::new(), alignment: DEFAULT_ALIGNMENT as u32 }
    }
}

impl GgufWriter {
    /// A file without keys and tensors.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A file whose tensors start at multiples of `alignment`, a power of two, counted from its beginning; the key says so.
    #[must_use]
    pub fn aligned(alignment: u32) -> Self {
        let alignment = alignment.max(1).next_power_of_two();
        let mut writer = Self { alignment, ..Self::default() };
        writer.u32(ALIGNMENT_KEY, alignment);
        writer
    }

    fn key(&mut self, key: &str, kind: u32) -> &mut Vec<u8> {
        put_string(&mut self.keys, key);
        self.keys.extend(kind.to_le_bytes());
        self.key_count += 1;
        &mut self.keys
    }

    /// Adds a key with a number.
    pub fn u32(&mut self, key: &str, value: u32) {
        self.key(key, kind::U32).extend(value.to_le_bytes());
    }
    /// Adds a key with a number.
    pub fn f32(&mut self, key: &str, value: f32) {
        self.key(key, kind::F32).extend(value.to_le_bytes());
    }
    /// Adds a key with a truth value.
    pub fn bool(&mut self, key: &str, value: bool) {
        self.key(key, kind::BOOL).push(u8::from(value));
    }
    /// Adds a key with a text.
    pub fn string(&mut self, key: &str, value: &str) {
        put_string(self.key(key, kind::STRING), value);
    }
    /// Adds a key with a list of texts.
    pub fn strings<S: AsRef<str>>(&mut self, key: &str, values: &[S]) {
        let out = self.key(key, kind::ARRAY);
        out.extend(kind::STRING.to_le_bytes());
        out.extend((values.len() as u64).to_le_bytes());
        for value in values {
            put_string(out, value.as_ref());
        }
    }
    /// Adds a key with a list of numbers.
    pub fn i32s(&mut self, key: &str, values: &[i32]) {
        let out = self.key(key, kind::ARRAY);
        out.extend(kind::I32.to_le_bytes());
        out.extend((values.len() as u64).to_le_bytes());
        out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }

    /// Adds a key with any value, as it was read.
    pub fn value(&mut self, key: &str, value: &Value) {
        macro_rules! scalar {
            ($kind:ident, $value:expr) => {
                self.key(key, kind::$kind).extend($value.to_le_bytes())
            };
        }
        match value {
            Value::U8(value) => scalar!(U8, value),
            Value::I8(value) => scalar!(I8, value),
            Value::U16(value) => scalar!(U16, value),
            Value::I16(value) => scalar!(I16, value),
            Value::U32(value) => scalar!(U32, value),
            Value::I32(value) => scalar!(I32, value),
            Value::U64(value) => scalar!(U64, value),
            Value::I64(value) => scalar!(I64, value),
            Value::F32(value) => scalar!(F32, value),
            Value::F64(value) => scalar!(F64, value),
            Value::Bool(value) => self.bool(key, *value),
            Value::String(bytes) => put_string(self.key(key, kind::STRING), bytes),
            Value::Array(array) => put_array(self.key(key, kind::ARRAY), array),
        }
    }

    /// Adds a tensor, sizes outermost first. Returns whether its rows are whole blocks of the type; if not, it is not added.
    #[must_use]
    pub fn tensor(&mut self, name: &str, dtype: DType, shape: &[u64]) -> bool {
        let rows = shape.iter().rev().skip(1).try_fold(1, |n: u64, size| n.checked_mul(*size));
        let row = dtype.bytes_for(shape.last().copied().unwrap_or(1));
        let bytes = rows.zip(row).and_then(|(rows, row)| rows.checked_mul(row));
        let Some(bytes) = bytes else { return false };
        self.tensors.push(TensorPlan { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes });
        true
    }

    /// The tensors, in the order of the file.
    #[must_use]
    pub fn tensors(&self) -> &[TensorPlan] {
        &self.tensors
    }

    /// Writes the file. `data` writes the bytes of each tensor, as many as [`TensorPlan::bytes`] says.
    ///
    /// # Errors
    /// If the output can't be written, or a tensor got another number of bytes.
    pub fn write(
        &self,
        out: &mut dyn Write,
        data: &mut dyn FnMut(&TensorPlan, &mut dyn Write) -> io::Result<()>,
    ) -> io::Result<()> {
        let header = self.header();
        out.write_all(&header)?;
        self.pad(out, header.len() as u64)?;
        for tensor in &self.tensors {
            let mut counted = Counted { out, bytes: 0 };
            data(tensor, &mut counted)?;
            let written = counted.bytes;
            if written != tensor.bytes {
                let text = format!("{}: expected {} bytes, got {written}", tensor.name, tensor.bytes);
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            self.pad(out, written)?;
        }
        out.flush()
    }

    fn header(&self) -> Vec<u8> {
        let mut header = b"GGUF".to_vec();
        header.extend(3_u32.to_le_bytes());
        header.extend((self.tensors.len() as u64).to_le_bytes());
        header.extend(self.key_count.to_le_bytes());
        header.extend(&self.keys);
        let mut offset = 0_u64;
        for tensor in &self.tensors {
            put_string(&mut header, &tensor.name);
            header.extend((tensor.shape.len() as u32).to_le_bytes());
            header.extend(tensor.shape.iter().rev().flat_map(|size| size.to_le_bytes()));
            header.extend(tensor.dtype.code().to_le_bytes());
            header.extend(offset.to_le_bytes());
            offset = offset.saturating_add(tensor.bytes.next_multiple_of(u64::from(self.alignment)));
        }
        header
    }

    fn pad(&self, out: &mut dyn Write, written: u64) -> io::Result<()> {
        let missing = written.next_multiple_of(u64::from(self.alignment)) - written;
        io::copy(&mut io::repeat(0).take(missing), out).map(drop)
    }
}

struct Counted<'a> {
    out: &'a mut dyn Write,
    bytes: u64,
}

impl Write for Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

fn put_string(out: &mut Vec<u8>, text: impl AsRef<[u8]>) {
    let bytes = text.as_ref();
    out.extend((bytes.len() as u64).to_le_bytes());
    out.extend(bytes);
}

fn put_array(out: &mut Vec<u8>, array: &Array) {
    macro_rules! items {
        ($kind:ident, $values:expr) => {{
            out.extend(kind::$kind.to_le_bytes());
            out.extend(($values.len() as u64).to_le_bytes());
            out.extend($values.iter().flat_map(|value| value.to_le_bytes()));
        }};
    }
    match array {
        Array::U8(values) => items!(U8, values),
        Array::I8(values) => items!(I8, values),
        Array::U16(values) => items!(U16, values),
        Array::I16(values) => items!(I16, values),
        Array::U32(values) => items!(U32, values),
        Array::I32(values) => items!(I32, values),
        Array::U64(values) => items!(U64, values),
        Array::I64(values) => items!(I64, values),
        Array::F32(values) => items!(F32, values),
        Array::F64(values) => items!(F64, values),
        Array::Bool(values) => {
            out.extend(kind::BOOL.to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            out.extend(values.iter().map(|value| u8::from(*value)));
        }
        Array::String(values) => {
            out.extend(kind::STRING.to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| put_string(out, value));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::parse_gguf_bytes;

    #[test]
    fn what_is_written_reads_back() {
        let mut writer = GgufWriter::new();
        writer.string("general.architecture", "llama");
        writer.u32("llama.block_count", 3);
        writer.f32("llama.eps", 0.5);
        writer.bool("flag", true);
        writer.strings("names", &["a", "", "ß"]);
        writer.i32s("types", &[1, -2]);
        assert!(writer.tensor("a", DType::F32, &[3]));
        assert!(writer.tensor("b", DType::Q4_0, &[2, 3, 64]));
        // As many values as two blocks, but rows of half a block.
        assert!(!writer.tensor("c", DType::Q4_0, &[4, 16]));
        let mut bytes = Vec::new();
        let mut fill = 0_u8;
        writer
            .write(&mut bytes, &mut |tensor, out| {
                fill += 1;
                out.write_all(&vec![fill; tensor.bytes as usize])
            })
            .unwrap();
        let header = parse_gguf_bytes(&bytes).unwrap();
        assert_eq!(header.metadata.u32("llama.block_count").unwrap(), 3);
        assert_eq!(header.metadata.f32("llama.eps").unwrap(), 0.5);
        assert!(header.metadata.bool("flag").unwrap());
        assert_eq!(header.metadata.strings("names").unwrap().get_str(2), Some("ß"));
        assert_eq!(header.metadata.i32s("types").unwrap(), [1, -2]);
        assert_eq!(header.tensors.len(), 2);
        for (tensor, fill) in header.tensors.iter().zip([1, 2]) {
            let range = tensor.offset as usize..(tensor.offset + tensor.bytes) as usize;
            assert!(bytes[range].iter().all(|byte| *byte == fill), "{}", tensor.name);
        }
        assert_eq!(header.tensors[1].shape, [2, 3, 64]);
    }

    #[test]
    fn any_value_reads_back_and_tensors_start_where_they_should() {
        let values = [
            Value::U8(1),
            Value::I8(-1),
            Value::U16(2),
            Value::I16(-2),
            Value::U32(3),
            Value::I32(-3),
            Value::U64(4),
            Value::I64(-4),
            Value::F32(0.5),
            Value::F64(0.25),
            Value::Bool(true),
            Value::String((*b"not UTF-8: \xFF").into()),
            Value::Array(Array::U8(vec![1])),
            Value::Array(Array::I8(vec![-1])),
            Value::Array(Array::U16(vec![2])),
            Value::Array(Array::I16(vec![-2])),
            Value::Array(Array::U32(vec![3])),
            Value::Array(Array::I32(vec![-3])),
            Value::Array(Array::U64(vec![4, 5])),
            Value::Array(Array::I64(vec![-4])),
            Value::Array(Array::F32(vec![0.5])),
            Value::Array(Array::F64(vec![0.25])),
            Value::Array(Array::Bool(vec![true, false])),
            Value::Array(Array::String([&b"a"[..], b"", b"\xFF"].into_iter().collect())),
        ];
        let mut writer = GgufWriter::aligned(4096);
        for (i, value) in values.iter().enumerate() {
            writer.value(&format!("key {i}"), value);
        }
        assert!(writer.tensor("a", DType::I8, &[5]) && writer.tensor("b", DType::F32, &[3]));
        let mut bytes = Vec::new();
        writer.write(&mut bytes, &mut |tensor, out| out.write_all(&vec![7; tensor.bytes as usize])).unwrap();
        let header = parse_gguf_bytes(&bytes).unwrap();
        for (i, value) in values.iter().enumerate() {
            assert_eq!(header.metadata.value(&format!("key {i}")), Some(value));
        }
        for tensor in &header.tensors {
            assert!(tensor.offset.is_multiple_of(4096));
            assert!(bytes[tensor.offset as usize..][..tensor.bytes as usize].iter().all(|byte| *byte == 7));
        }
    }

    #[test]
    fn a_tensor_gets_all_its_bytes() {
        let mut writer = GgufWriter::new();
        assert!(writer.tensor("a", DType::F32, &[3]));
        let error = writer.write(&mut Vec::new(), &mut |_, out| out.write_all(&[0; 8])).unwrap_err().to_string();
        assert_eq!(error, "a: expected 12 bytes, got 8");
    }
}
