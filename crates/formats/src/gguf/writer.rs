//! Writes GGUF v3: keys and tensor descriptions first, then data in pieces, so that a file may be larger than memory.

use std::io::{self, Write};

use super::DEFAULT_ALIGNMENT;
use crate::DType;

/// Codes of value types.
mod kind {
    pub(super) const U32: u32 = 4;
    pub(super) const I32: u32 = 5;
    pub(super) const F32: u32 = 6;
    pub(super) const BOOL: u32 = 7;
    pub(super) const STRING: u32 = 8;
    pub(super) const ARRAY: u32 = 9;
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
#[derive(Debug, Clone, Default)]
pub struct GgufWriter {
    keys: Vec<u8>,
    key_count: u64,
    tensors: Vec<TensorPlan>,
}

impl GgufWriter {
    /// A file without keys and tensors.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
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
        pad(out, header.len() as u64)?;
        for tensor in &self.tensors {
            let mut counted = Counted { out, bytes: 0 };
            data(tensor, &mut counted)?;
            let written = counted.bytes;
            if written != tensor.bytes {
                let text = format!("{}: expected {} bytes, got {written}", tensor.name, tensor.bytes);
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            pad(out, written)?;
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
            offset = offset.saturating_add(tensor.bytes.next_multiple_of(DEFAULT_ALIGNMENT));
        }
        header
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

fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn pad(out: &mut dyn Write, written: u64) -> io::Result<()> {
    let missing = written.next_multiple_of(DEFAULT_ALIGNMENT) - written;
    out.write_all(&[0; DEFAULT_ALIGNMENT as usize][..missing as usize])
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
    fn a_tensor_gets_all_its_bytes() {
        let mut writer = GgufWriter::new();
        assert!(writer.tensor("a", DType::F32, &[3]));
        let error = writer.write(&mut Vec::new(), &mut |_, out| out.write_all(&[0; 8])).unwrap_err().to_string();
        assert_eq!(error, "a: expected 12 bytes, got 8");
    }
}
