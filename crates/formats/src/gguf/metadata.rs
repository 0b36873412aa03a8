//! GGUF metadata as a typed map whose errors name the file, the key, the type asked for and what is there.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::value::{Array, StringArray, Value};
use crate::FormatError;

/// Key-value pairs of a GGUF file.
///
/// [`get`](Self::get) reads an optional key, [`require`](Self::require) a needed one; the named methods are `require` for
/// the common types. Integers convert between widths when the value fits; floats convert between widths.
#[derive(Clone, Debug)]
pub struct GgufMetadata {
    path: PathBuf,
    values: BTreeMap<String, Value>,
}

impl GgufMetadata {
    /// No keys yet; `path` is for messages. For tests and converters: reading a file builds it by itself.
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_path_buf(), values: BTreeMap::new() }
    }

    /// Adds a value; gives back the one it replaces.
    pub fn insert(&mut self, key: String, value: Value) -> Option<Value> {
        self.values.insert(key, value)
    }

    /// The file that the keys came from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// All pairs, sorted by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Whether the key exists.
    pub fn contains(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    /// The value of a key, whatever its type.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// An optional key: `None` if absent, an error if present with another type.
    pub fn get<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>, FormatError> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        T::from_value(value).map(Some).ok_or_else(|| FormatError::WrongType {
            path: self.path.clone(),
            key: key.to_owned(),
            expected: T::EXPECTED,
            found: value.describe(),
        })
    }

    /// A needed key.
    pub fn require<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T, FormatError> {
        self.get(key)?.ok_or_else(|| FormatError::MissingKey {
            path: self.path.clone(),
            key: key.to_owned(),
            expected: T::EXPECTED,
        })
    }

    /// A needed integer that fits u32.
    pub fn u32(&self, key: &str) -> Result<u32, FormatError> {
        self.require(key)
    }

    /// A needed integer that fits u64.
    pub fn u64(&self, key: &str) -> Result<u64, FormatError> {
        self.require(key)
    }

    /// A needed integer that fits i64.
    pub fn i64(&self, key: &str) -> Result<i64, FormatError> {
        self.require(key)
    }

    /// A needed float.
    pub fn f32(&self, key: &str) -> Result<f32, FormatError> {
        self.require(key)
    }

    /// A needed bool.
    pub fn bool(&self, key: &str) -> Result<bool, FormatError> {
        self.require(key)
    }

    /// A needed UTF-8 string.
    pub fn str(&self, key: &str) -> Result<&str, FormatError> {
        self.require(key)
    }

    /// A needed string as stored, UTF-8 or not.
    pub fn bytes(&self, key: &str) -> Result<&[u8], FormatError> {
        self.require(key)
    }

    /// A needed array of strings.
    pub fn strings(&self, key: &str) -> Result<&StringArray, FormatError> {
        self.require(key)
    }

    /// A needed array of floats.
    pub fn f32s(&self, key: &str) -> Result<Vec<f32>, FormatError> {
        self.require(key)
    }

    /// A needed array of integers that fit i32.
    pub fn i32s(&self, key: &str) -> Result<Vec<i32>, FormatError> {
        self.require(key)
    }

    /// A needed array of integers that fit u32.
    pub fn u32s(&self, key: &str) -> Result<Vec<u32>, FormatError> {
        self.require(key)
    }
}

/// A Rust type that a metadata [`Value`] can be read as.
pub trait FromValue<'a>: Sized {
    /// The type in words, for messages.
    const EXPECTED: &'static str;

    /// The value, or `None` if it is of another type or does not fit.
    fn from_value(value: &'a Value) -> Option<Self>;
}

macro_rules! integers {
    ($($type:ty => $scalar:literal, $array:literal);+ $(;)?) => {$(
        impl FromValue<'_> for $type {
            const EXPECTED: &'static str = $scalar;

            fn from_value(value: &Value) -> Option<Self> {
                Self::try_from(value.as_integer()?).ok()
            }
        }

        impl FromValue<'_> for Vec<$type> {
            const EXPECTED: &'static str = $array;

            fn from_value(value: &Value) -> Option<Self> {
                fn convert<S: Copy, T: TryFrom<S>>(values: &[S]) -> Option<Vec<T>> {
                    values.iter().map(|&value| T::try_from(value).ok()).collect()
                }
                let Value::Array(array) = value else { return None };
                match array {
                    Array::U8(values) => convert(values),
                    Array::I8(values) => convert(values),
                    Array::U16(values) => convert(values),
                    Array::I16(values) => convert(values),
                    Array::U32(values) => convert(values),
                    Array::I32(values) => convert(values),
                    Array::U64(values) => convert(values),
                    Array::I64(values) => convert(values),
                    _ => None,
                }
            }
        }
    )+};
}

integers! {
    u16 => "an integer that fits u16", "an array of integers that fit u16";
    u32 => "an integer that fits u32", "an array of integers that fit u32";
    u64 => "an integer that fits u64", "an array of integers that fit u64";
    i32 => "an integer that fits i32", "an array of integers that fit i32";
    i64 => "an integer that fits i64", "an array of integers that fit i64";
}

impl FromValue<'_> for f32 {
    const EXPECTED: &'static str = "a float";

    fn from_value(value: &Value) -> Option<Self> {
        match *value {
            Value::F32(value) => Some(value),
            Value::F64(value) => Some(narrow(value)),
            _ => None,
        }
    }
}

impl FromValue<'_> for f64 {
    const EXPECTED: &'static str = "a float";

    fn from_value(value: &Value) -> Option<Self> {
        match *value {
            Value::F32(value) => Some(value.into()),
            Value::F64(value) => Some(value),
            _ => None,
        }
    }
}

impl FromValue<'_> for Vec<f32> {
    const EXPECTED: &'static str = "an array of floats";

    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Array(Array::F32(values)) => Some(values.clone()),
            Value::Array(Array::F64(values)) => Some(values.iter().copied().map(narrow).collect()),
            _ => None,
        }
    }
}

/// Rounds to the nearest f32.
const fn narrow(value: f64) -> f32 {
    value as f32
}

impl FromValue<'_> for bool {
    const EXPECTED: &'static str = "a bool";

    fn from_value(value: &Value) -> Option<Self> {
        match *value {
            Value::Bool(value) => Some(value),
            _ => None,
        }
    }
}

impl FromValue<'_> for Vec<bool> {
    const EXPECTED: &'static str = "an array of bools";

    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Array(Array::Bool(values)) => Some(values.clone()),
            _ => None,
        }
    }
}

impl<'a> FromValue<'a> for &'a str {
    const EXPECTED: &'static str = "a UTF-8 string";

    fn from_value(value: &'a Value) -> Option<Self> {
        std::str::from_utf8(FromValue::from_value(value)?).ok()
    }
}

impl<'a> FromValue<'a> for &'a [u8] {
    const EXPECTED: &'static str = "a string";

    fn from_value(value: &'a Value) -> Option<Self> {
        match value {
            Value::String(bytes) => Some(bytes),
            _ => None,
        }
    }
}

impl<'a> FromValue<'a> for &'a StringArray {
    const EXPECTED: &'static str = "an array of strings";

    fn from_value(value: &'a Value) -> Option<Self> {
        match value {
            Value::Array(Array::String(strings)) => Some(strings),
            _ => None,
        }
    }
}
