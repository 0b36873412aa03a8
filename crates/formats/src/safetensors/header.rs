//! The JSON of a safetensors header, read in one pass so that duplicate names are seen and not silently merged.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::{MAX_DIMENSIONS, MAX_TENSORS};

/// One tensor as the header states it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Entry {
    pub(super) dtype: String,
    #[serde(deserialize_with = "bounded_shape")]
    pub(super) shape: Vec<u64>,
    pub(super) data_offsets: (u64, u64),
}

/// The whole header, both lists sorted and free of duplicates.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) metadata: Vec<(String, String)>,
    pub(super) entries: Vec<(String, Entry)>,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut metadata: Option<Vec<(String, String)>> = None;
        let mut entries = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if entries.len() == MAX_TENSORS {
                return Err(A::Error::custom(format_args!("more than {MAX_TENSORS} tensors")));
            }
            if name != "__metadata__" {
                entries.push((name, map.next_value::<Entry>()?));
            } else if metadata.replace(map.next_value::<UniqueMap>()?.0).is_some() {
                return Err(A::Error::custom("__metadata__ occurs twice"));
            }
        }
        sort_unique(&mut entries).map_err(A::Error::custom)?;
        Ok(Header { metadata: metadata.unwrap_or_default(), entries })
    }
}

/// Stops at [`MAX_DIMENSIONS`]: a dimension takes two bytes of text but eight in memory.
fn bounded_shape<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u64>, D::Error> {
    struct ShapeVisitor;

    impl<'de> Visitor<'de> for ShapeVisitor {
        type Value = Vec<u64>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "an array of at most {MAX_DIMENSIONS} dimensions")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Vec<u64>, A::Error> {
            let mut shape = Vec::new();
            while let Some(dimension) = sequence.next_element()? {
                if shape.len() == MAX_DIMENSIONS {
                    return Err(A::Error::invalid_length(MAX_DIMENSIONS + 1, &self));
                }
                shape.push(dimension);
            }
            Ok(shape)
        }
    }

    deserializer.deserialize_seq(ShapeVisitor)
}

/// A JSON object of strings as sorted pairs; duplicate keys are an error.
#[derive(Debug)]
pub(super) struct UniqueMap(pub(super) Vec<(String, String)>);

impl<'de> Deserialize<'de> for UniqueMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PairsVisitor;

        impl<'de> Visitor<'de> for PairsVisitor {
            type Value = UniqueMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueMap, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                sort_unique(&mut pairs).map_err(A::Error::custom)?;
                Ok(UniqueMap(pairs))
            }
        }

        deserializer.deserialize_map(PairsVisitor)
    }
}

fn sort_unique<T>(pairs: &mut [(String, T)]) -> Result<(), String> {
    pairs.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    match pairs.windows(2).find(|pair| matches!(pair, [a, b] if a.0 == b.0)) {
        Some([(name, _), ..]) => Err(format!("{} occurs twice", crate::error::quote(name.as_bytes()))),
        _ => Ok(()),
    }
}
