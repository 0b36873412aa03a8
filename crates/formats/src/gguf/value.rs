//! Metadata values: the thirteen GGUF value types, and arrays that cost no more memory than they take in the file.

use crate::FormatError;
use crate::error::quote;
use crate::reader::Reader;

/// One metadata value.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each variant is the GGUF value type of that name")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    /// Bytes as stored; UTF-8 by convention, not by guarantee.
    String(Box<[u8]>),
    Array(Array),
}

/// An array of values of one type.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each variant is an array of the GGUF value type of that name")]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    String(StringArray),
}

/// Many strings in one allocation. Strings are bytes as stored: UTF-8 by convention, not by guarantee.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StringArray {
    bytes: Vec<u8>,
    /// End of each string in `bytes`; a string starts where the one before it ends.
    ends: Vec<usize>,
}

impl StringArray {
    /// Number of strings.
    pub const fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Bytes of string `index`.
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        let end = *self.ends.get(index)?;
        let start = match index.checked_sub(1) {
            Some(before) => *self.ends.get(before)?,
            None => 0,
        };
        self.bytes.get(start..end)
    }

    /// String `index` if it is UTF-8.
    pub fn get_str(&self, index: usize) -> Option<&str> {
        std::str::from_utf8(self.get(index)?).ok()
    }

    /// All strings as bytes, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        // `get` is always Some here; the empty slice keeps the iterator total.
        (0..self.len()).map(|index| self.get(index).unwrap_or_default())
    }

    fn push(&mut self, string: &[u8]) {
        self.bytes.extend_from_slice(string);
        self.ends.push(self.bytes.len());
    }
}

impl<S: AsRef<[u8]>> FromIterator<S> for StringArray {
    fn from_iter<I: IntoIterator<Item = S>>(strings: I) -> Self {
        let mut array = Self::default();
        strings.into_iter().for_each(|string| array.push(string.as_ref()));
        array
    }
}

impl Value {
    /// Any integer type, widened; `None` for the others.
    pub fn as_integer(&self) -> Option<i128> {
        Some(match *self {
            Self::U8(value) => value.into(),
            Self::I8(value) => value.into(),
            Self::U16(value) => value.into(),
            Self::I16(value) => value.into(),
            Self::U32(value) => value.into(),
            Self::I32(value) => value.into(),
            Self::U64(value) => value.into(),
            Self::I64(value) => value.into(),
            _ => return None,
        })
    }

    /// Type, and the value itself where it is short: for messages.
    pub fn describe(&self) -> String {
        match self {
            Self::U8(value) => format!("u8 {value}"),
            Self::I8(value) => format!("i8 {value}"),
            Self::U16(value) => format!("u16 {value}"),
            Self::I16(value) => format!("i16 {value}"),
            Self::U32(value) => format!("u32 {value}"),
            Self::I32(value) => format!("i32 {value}"),
            Self::U64(value) => format!("u64 {value}"),
            Self::I64(value) => format!("i64 {value}"),
            Self::F32(value) => format!("f32 {value}"),
            Self::F64(value) => format!("f64 {value}"),
            Self::Bool(value) => format!("bool {value}"),
            Self::String(bytes) => format!("string {}", quote(bytes)),
            Self::Array(array) => format!("array of {} {}", array.len(), array.type_name()),
        }
    }
}

impl Array {
    /// Number of elements.
    pub const fn len(&self) -> usize {
        match self {
            Self::U8(values) => values.len(),
            Self::I8(values) => values.len(),
            Self::U16(values) => values.len(),
            Self::I16(values) => values.len(),
            Self::U32(values) => values.len(),
            Self::I32(values) => values.len(),
            Self::U64(values) => values.len(),
            Self::I64(values) => values.len(),
            Self::F32(values) => values.len(),
            Self::F64(values) => values.len(),
            Self::Bool(values) => values.len(),
            Self::String(values) => values.len(),
        }
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Name of the element type.
    pub const fn type_name(&self) -> &'static str {
        match self {
            Self::U8(_) => "u8",
            Self::I8(_) => "i8",
            Self::U16(_) => "u16",
            Self::I16(_) => "i16",
            Self::U32(_) => "u32",
            Self::I32(_) => "i32",
            Self::U64(_) => "u64",
            Self::I64(_) => "i64",
            Self::F32(_) => "f32",
            Self::F64(_) => "f64",
            Self::Bool(_) => "bool",
            Self::String(_) => "strings",
        }
    }
}

const ARRAY: u32 = 9;

/// Reads a value type and the value.
pub(super) fn parse(reader: &mut Reader<'_>, key: &str) -> Result<Value, FormatError> {
    // Keys of any length occur in hostile files; the label is only built when something is wrong.
    let what = Label(key);
    let kind = reader.u32(&what)?;
    Ok(match kind {
        0 => Value::U8(u8::from_le_bytes(reader.array(&what)?)),
        1 => Value::I8(i8::from_le_bytes(reader.array(&what)?)),
        2 => Value::U16(u16::from_le_bytes(reader.array(&what)?)),
        3 => Value::I16(i16::from_le_bytes(reader.array(&what)?)),
        4 => Value::U32(u32::from_le_bytes(reader.array(&what)?)),
        5 => Value::I32(i32::from_le_bytes(reader.array(&what)?)),
        6 => Value::F32(f32::from_le_bytes(reader.array(&what)?)),
        7 => Value::Bool(parse_bool(reader, &what)?),
        8 => Value::String(reader.string(&what)?.into()),
        ARRAY => Value::Array(parse_array(reader, &what)?),
        10 => Value::U64(u64::from_le_bytes(reader.array(&what)?)),
        11 => Value::I64(i64::from_le_bytes(reader.array(&what)?)),
        12 => Value::F64(f64::from_le_bytes(reader.array(&what)?)),
        _ => return Err(unknown_kind(reader, &what, kind)),
    })
}

fn parse_array(reader: &mut Reader<'_>, what: &Label<'_>) -> Result<Array, FormatError> {
    let kind = reader.u32(what)?;
    let count = reader.u64(what)?;
    Ok(match kind {
        0 => Array::U8(parse_items(reader, count, what, u8::from_le_bytes)?),
        1 => Array::I8(parse_items(reader, count, what, i8::from_le_bytes)?),
        2 => Array::U16(parse_items(reader, count, what, u16::from_le_bytes)?),
        3 => Array::I16(parse_items(reader, count, what, i16::from_le_bytes)?),
        4 => Array::U32(parse_items(reader, count, what, u32::from_le_bytes)?),
        5 => Array::I32(parse_items(reader, count, what, i32::from_le_bytes)?),
        6 => Array::F32(parse_items(reader, count, what, f32::from_le_bytes)?),
        7 => {
            let count = reader.bounded_count(count, 1, what)?;
            Array::Bool((0..count).map(|_| parse_bool(reader, what)).collect::<Result<_, _>>()?)
        }
        8 => Array::String(parse_strings(reader, count, what)?),
        10 => Array::U64(parse_items(reader, count, what, u64::from_le_bytes)?),
        11 => Array::I64(parse_items(reader, count, what, i64::from_le_bytes)?),
        12 => Array::F64(parse_items(reader, count, what, f64::from_le_bytes)?),
        ARRAY => {
            return Err(FormatError::Unsupported {
                path: reader.path().to_path_buf(),
                what: what.to_string(),
                found: "an array of arrays".into(),
                help: "convert the model again without it",
            });
        }
        _ => return Err(unknown_kind(reader, what, kind)),
    })
}

fn parse_items<T, const N: usize>(
    reader: &mut Reader<'_>,
    count: u64,
    what: &Label<'_>,
    decode: fn([u8; N]) -> T,
) -> Result<Vec<T>, FormatError> {
    let bytes = reader.take(count.saturating_mul(N as u64), what)?;
    let (items, _) = bytes.as_chunks::<N>();
    Ok(items.iter().map(|&item| decode(item)).collect())
}

fn parse_strings(reader: &mut Reader<'_>, count: u64, what: &Label<'_>) -> Result<StringArray, FormatError> {
    const LENGTH_BYTES: u64 = 8;
    let count = reader.bounded_count(count, LENGTH_BYTES, what)?;
    // Two walks: the first checks and adds up, so that the second allocates once and exactly.
    let (mut scout, mut total) = (*reader, 0);
    for _ in 0..count {
        total += scout.string(what)?.len();
    }
    let mut strings = StringArray { bytes: Vec::with_capacity(total), ends: Vec::with_capacity(count) };
    for _ in 0..count {
        strings.push(reader.string(what)?);
    }
    Ok(strings)
}

fn parse_bool(reader: &mut Reader<'_>, what: &Label<'_>) -> Result<bool, FormatError> {
    match reader.array(what)? {
        [0] => Ok(false),
        [1] => Ok(true),
        [other] => Err(super::invalid(reader, what.to_string(), "a bool of 0 or 1", other.to_string())),
    }
}

fn unknown_kind(reader: &Reader<'_>, what: &Label<'_>, kind: u32) -> FormatError {
    super::invalid(reader, what.to_string(), "a value type between 0 and 12", kind.to_string())
}

/// Names a key in messages.
struct Label<'a>(&'a str);

impl std::fmt::Display for Label<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "value of key {}", quote(self.0.as_bytes()))
    }
}
