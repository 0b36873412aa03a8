//! Writers of small checkpoints for tests: valid files, and the pieces to make invalid ones. Not a stable interface.

use crate::DType;

/// Writes a GGUF file piece by piece; counts may be overridden to lie.
#[derive(Clone, Debug)]
pub struct GgufBuilder {
    version: u32,
    alignment: usize,
    keys: Vec<u8>,
    key_count: u64,
    infos: Vec<u8>,
    tensor_count: u64,
    data: Vec<u8>,
}

impl Default for GgufBuilder {
    fn default() -> Self {
        Self::new()
    }
}

impl GgufBuilder {
    /// Version 3, no keys, no tensors, alignment 32.
    pub const fn new() -> Self {
        Self {
            version: 3,
            alignment: 32,
            keys: Vec::new(),
            key_count: 0,
            infos: Vec::new(),
            tensor_count: 0,
            data: Vec::new(),
        }
    }

    /// Another format version.
    #[must_use]
    pub const fn version(mut self, version: u32) -> Self {
        self.version = version;
        self
    }

    /// Another alignment, for what is added after; also writes the key.
    #[must_use]
    pub fn alignment(mut self, alignment: u32) -> Self {
        self.alignment = alignment.max(1) as usize;
        self.u32("general.alignment", alignment)
    }

    /// A key with a value type and the bytes of the value, unchecked.
    #[must_use]
    pub fn raw_key(mut self, key: &[u8], kind: u32, value: &[u8]) -> Self {
        put_string(&mut self.keys, key);
        self.keys.extend_from_slice(&kind.to_le_bytes());
        self.keys.extend_from_slice(value);
        self.key_count += 1;
        self
    }

    /// A u16.
    #[must_use]
    pub fn u16(self, key: &str, value: u16) -> Self {
        self.raw_key(key.as_bytes(), 2, &value.to_le_bytes())
    }

    /// A u32.
    #[must_use]
    pub fn u32(self, key: &str, value: u32) -> Self {
        self.raw_key(key.as_bytes(), 4, &value.to_le_bytes())
    }

    /// An i32.
    #[must_use]
    pub fn i32(self, key: &str, value: i32) -> Self {
        self.raw_key(key.as_bytes(), 5, &value.to_le_bytes())
    }

    /// A float.
    #[must_use]
    pub fn f32(self, key: &str, value: f32) -> Self {
        self.raw_key(key.as_bytes(), 6, &value.to_le_bytes())
    }

    /// A bool.
    #[must_use]
    pub fn bool(self, key: &str, value: bool) -> Self {
        self.raw_key(key.as_bytes(), 7, &[u8::from(value)])
    }

    /// A string.
    #[must_use]
    pub fn string(self, key: &str, value: impl AsRef<[u8]>) -> Self {
        let mut bytes = Vec::new();
        put_string(&mut bytes, value.as_ref());
        self.raw_key(key.as_bytes(), 8, &bytes)
    }

    /// An array of strings.
    #[must_use]
    pub fn strings<S: AsRef<[u8]>>(self, key: &str, values: impl IntoIterator<Item = S>) -> Self {
        let (mut items, mut count) = (Vec::new(), 0u64);
        for value in values {
            put_string(&mut items, value.as_ref());
            count += 1;
        }
        self.array(key, 8, count, &items)
    }

    /// An array of f32.
    #[must_use]
    pub fn f32s(self, key: &str, values: &[f32]) -> Self {
        let items: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.array(key, 6, values.len() as u64, &items)
    }

    /// An array of i32.
    #[must_use]
    pub fn i32s(self, key: &str, values: &[i32]) -> Self {
        let items: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.array(key, 5, values.len() as u64, &items)
    }

    /// An array with an element type, a count and the bytes of the items, unchecked.
    #[must_use]
    pub fn array(self, key: &str, kind: u32, count: u64, items: &[u8]) -> Self {
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend_from_slice(&count.to_le_bytes());
        bytes.extend_from_slice(items);
        self.raw_key(key.as_bytes(), 9, &bytes)
    }

    /// A tensor, shape outermost first as in the rest of the crate, placed behind the tensors before it.
    #[must_use]
    pub fn tensor(mut self, name: &str, dtype: DType, shape: &[u64], data: &[u8]) -> Self {
        let padded = self.data.len().next_multiple_of(self.alignment);
        self.data.resize(padded, 0);
        let dimensions: Vec<u64> = shape.iter().rev().copied().collect();
        self = self.raw_tensor(name.as_bytes(), &dimensions, dtype.code(), padded as u64);
        self.data.extend_from_slice(data);
        self
    }

    /// A tensor entry as stored (contiguous dimension first) without data, unchecked.
    #[must_use]
    pub fn raw_tensor(mut self, name: &[u8], dimensions: &[u64], code: u32, offset: u64) -> Self {
        put_string(&mut self.infos, name);
        self.infos.extend_from_slice(&u32::try_from(dimensions.len()).unwrap_or(u32::MAX).to_le_bytes());
        for dimension in dimensions {
            self.infos.extend_from_slice(&dimension.to_le_bytes());
        }
        self.infos.extend_from_slice(&code.to_le_bytes());
        self.infos.extend_from_slice(&offset.to_le_bytes());
        self.tensor_count += 1;
        self
    }

    /// Counts other than those of what was added.
    #[must_use]
    pub const fn counts(mut self, tensors: u64, keys: u64) -> Self {
        self.tensor_count = tensors;
        self.key_count = keys;
        self
    }

    /// The bytes of the file.
    pub fn build(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend_from_slice(&self.version.to_le_bytes());
        file.extend_from_slice(&self.tensor_count.to_le_bytes());
        file.extend_from_slice(&self.key_count.to_le_bytes());
        file.extend_from_slice(&self.keys);
        file.extend_from_slice(&self.infos);
        if !self.data.is_empty() {
            file.resize(file.len().next_multiple_of(self.alignment), 0);
            file.extend_from_slice(&self.data);
        }
        file
    }
}

fn put_string(out: &mut Vec<u8>, string: &[u8]) {
    out.extend_from_slice(&(string.len() as u64).to_le_bytes());
    out.extend_from_slice(string);
}

/// A safetensors file: the length of `json`, `json`, `data`. Nothing is checked.
pub fn raw_safetensors(json: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(json.as_bytes());
    file.extend_from_slice(data);
    file
}

/// A safetensors file of `(name, type as safetensors spells it, shape, data)`, placed one after another.
pub fn safetensors(tensors: &[(&str, &str, &[u64], &[u8])]) -> Vec<u8> {
    let mut entries = serde_json::Map::new();
    let mut data = Vec::new();
    for &(name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        entries.insert(name.to_owned(), serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets }));
        data.extend_from_slice(bytes);
    }
    raw_safetensors(&serde_json::Value::Object(entries).to_string(), &data)
}
