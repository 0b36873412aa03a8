//! Config values by name, from either dialect: a JSON object or GGUF metadata in, checked numbers out.

use qwen_formats::GgufMetadata;
use qwen_formats::gguf;
use serde_json::{Map, Value};

use super::error::{ModelError, quoted};

/// Names of one config value: the first one present counts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Key {
    /// Keys of `config.json`.
    pub(super) hf: &'static [&'static str],
    /// Keys of GGUF metadata, without the architecture in front.
    pub(super) gguf: &'static [&'static str],
}

/// A number for a message: no hundred zeros.
fn spell(value: f64) -> String {
    if value == 0.0 || (1e-4..1e7).contains(&value.abs()) { value.to_string() } else { format!("{value:e}") }
}

/// A JSON value for a message.
pub(super) fn describe_json(value: &Value) -> String {
    Scalar::from_json(value).map_or_else(|| "null".to_owned(), |scalar| scalar.describe())
}

/// Where values come from.
#[derive(Debug, Clone, Copy)]
pub(super) enum Source<'a> {
    /// `config.json`, or an object within.
    HuggingFace(&'a Map<String, Value>),
    /// GGUF metadata.
    Gguf {
        /// All pairs.
        metadata: &'a GgufMetadata,
        /// Prefix of the keys.
        architecture: &'a str,
    },
}

/// A value of either dialect.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Scalar {
    Integer(i128),
    Float(f64),
    Flag(bool),
    Text(String),
    /// Anything else, described.
    Other(String),
}

impl Scalar {
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Integer(value) => value.to_string(),
            Self::Float(value) => spell(*value),
            Self::Flag(value) => value.to_string(),
            Self::Text(text) => quoted(text),
            Self::Other(what) => what.clone(),
        }
    }

    fn from_json(value: &Value) -> Option<Self> {
        Some(match value {
            Value::Null => return None,
            Value::Bool(flag) => Self::Flag(*flag),
            Value::String(text) => Self::Text(text.clone()),
            Value::Array(items) => Self::Other(format!("a list of {}", items.len())),
            Value::Object(_) => Self::Other("an object".to_owned()),
            Value::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
                (Some(value), ..) => Self::Integer(value.into()),
                (_, Some(value), _) => Self::Integer(value.into()),
                (.., Some(value)) => Self::Float(value),
                _ => Self::Other(quoted(&number.to_string())),
            },
        })
    }

    fn from_gguf(value: &gguf::Value) -> Self {
        if let Some(value) = value.as_integer() {
            return Self::Integer(value);
        }
        match value {
            gguf::Value::F32(value) => Self::Float(f64::from(*value)),
            gguf::Value::F64(value) => Self::Float(*value),
            gguf::Value::Bool(value) => Self::Flag(*value),
            gguf::Value::String(bytes) => Self::Text(String::from_utf8_lossy(bytes).into_owned()),
            _ => Self::Other(value.describe()),
        }
    }
}

impl<'a> Source<'a> {
    /// Name of a key in messages: the one present, else the first.
    pub(super) fn name(&self, key: &Key) -> String {
        let found = self.find(key).map(|(name, _)| name);
        found.unwrap_or_else(|| match self {
            Self::HuggingFace(_) => key.hf.first().copied().unwrap_or("(no key)").to_owned(),
            Self::Gguf { architecture, .. } => {
                format!("{architecture}.{}", key.gguf.first().copied().unwrap_or("(no key)"))
            }
        })
    }

    fn find(&self, key: &Key) -> Option<(String, Scalar)> {
        match self {
            Self::HuggingFace(map) => {
                key.hf.iter().find_map(|name| Some(((*name).to_owned(), Scalar::from_json(map.get(*name)?)?)))
            }
            Self::Gguf { metadata, architecture } => key.gguf.iter().find_map(|name| {
                let name = format!("{architecture}.{name}");
                let value = metadata.value(&name)?;
                // Some writers repeat one number for every layer.
                let scalar = match (Scalar::from_gguf(value), metadata.get::<Vec<i64>>(&name)) {
                    (Scalar::Other(_), Ok(Some(list))) if !list.is_empty() => match list.as_slice() {
                        [first, rest @ ..] if rest.iter().all(|n| n == first) => Scalar::Integer((*first).into()),
                        _ => Scalar::Other("different numbers per layer".to_owned()),
                    },
                    (scalar, _) => scalar,
                };
                Some((name, scalar))
            }),
        }
    }

    /// The value, if present and not null.
    pub(super) fn scalar(&self, key: &Key) -> Option<Scalar> {
        self.find(key).map(|(_, value)| value)
    }

    fn wrong(&self, key: &Key, expected: impl Into<String>, found: &Scalar) -> ModelError {
        ModelError::invalid(self.name(key), expected, found.describe())
    }

    fn missing(&self, key: &Key, expected: impl Into<String>) -> ModelError {
        ModelError::MissingKey { key: self.name(key), expected: expected.into() }
    }

    /// An integer within the range.
    pub(super) fn integer(&self, key: &Key, min: u32, max: u32) -> Result<Option<u32>, ModelError> {
        let Some(value) = self.scalar(key) else { return Ok(None) };
        let integer = match value {
            Scalar::Integer(integer) => Some(integer),
            // Written by tools that keep all numbers as floats.
            Scalar::Float(float) if float.fract() == 0.0 && float.abs() < 1e15 => Some(float as i128),
            _ => None,
        };
        integer
            .and_then(|integer| u32::try_from(integer).ok())
            .filter(|integer| (min..=max).contains(integer))
            .map(Some)
            .ok_or_else(|| self.wrong(key, format!("an integer from {min} to {max}"), &value))
    }

    /// A needed integer from 1.
    pub(super) fn count(&self, key: &Key, max: u32) -> Result<u32, ModelError> {
        self.integer(key, 1, max)?.ok_or_else(|| self.missing(key, format!("an integer from 1 to {max}")))
    }

    /// A finite number within the range.
    pub(super) fn float(&self, key: &Key, min: f64, max: f64) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.scalar(key) else { return Ok(None) };
        let float = match value {
            Scalar::Integer(integer) => Some(integer as f64),
            Scalar::Float(float) => Some(float),
            _ => None,
        };
        // NaN is in no range.
        float
            .filter(|float| (min..=max).contains(float))
            .map(Some)
            .ok_or_else(|| self.wrong(key, format!("a number from {} to {}", spell(min), spell(max)), &value))
    }

    /// A needed number.
    pub(super) fn number(&self, key: &Key, min: f64, max: f64) -> Result<f64, ModelError> {
        self.float(key, min, max)?
            .ok_or_else(|| self.missing(key, format!("a number from {} to {}", spell(min), spell(max))))
    }

    /// A truth value.
    pub(super) fn flag(&self, key: &Key) -> Result<Option<bool>, ModelError> {
        match self.scalar(key) {
            None => Ok(None),
            Some(Scalar::Flag(flag)) => Ok(Some(flag)),
            Some(other) => Err(self.wrong(key, "true or false", &other)),
        }
    }

    /// A text.
    pub(super) fn text(&self, key: &Key) -> Result<Option<String>, ModelError> {
        match self.scalar(key) {
            None => Ok(None),
            Some(Scalar::Text(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(key, "a text", &other)),
        }
    }

    /// An object of `config.json`; GGUF has none.
    pub(super) fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, ModelError> {
        let Self::HuggingFace(map) = self else { return Ok(None) };
        match map.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(object)) => Ok(Some(object)),
            Some(other) => Err(ModelError::invalid(name, "an object", describe_json(other))),
        }
    }

    /// A list of `config.json`; GGUF has none.
    pub(super) fn list(&self, name: &str) -> Result<Option<&'a [Value]>, ModelError> {
        let Self::HuggingFace(map) = self else { return Ok(None) };
        match map.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(ModelError::invalid(name, "a list", describe_json(other))),
        }
    }
}
