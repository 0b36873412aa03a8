//! A request's body: bytes of a stranger to typed data, with every size bounded before it costs anything.
//!
//! In: the body as it arrives. Out: [`Body`], or an error that names the parameter. Bounds: bytes, time to arrive, depth of
//! nesting, number of values and of names (checked on the bytes, before they are parsed).

use std::fmt;
use std::sync::Arc;

use axum::extract::{FromRequest, Request};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::{DeserializeOwned, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::parameters::{MOST_SHOWN, Parameters, check};
use crate::Server;
use crate::error::{ApiError, Kind};
use crate::work::apart;

/// Deepest nesting of arrays and objects. Schemas of tools come to some twenty.
pub const MAX_DEPTH: usize = 64;
/// Most values (commas and colons, counted outside of texts): a value takes some 32 bytes and more as data, and up to 0.3
/// microseconds to read. Lists of token ids come to 256 prompts of 2,000.
pub const MAX_VALUES: usize = 1 << 19;
/// Most names over all objects: one costs some ten times what a value does. Conversations have two to four a message.
pub const MAX_NAMES: usize = 1 << 17;
/// Most entries of one object. The largest that anybody has a use for is `logit_bias`, of 4,096.
pub const MAX_ENTRIES: u32 = 1 << 13;
/// Names of an object with too many entries that its error tells.
const NAMES_TOLD: usize = 3;

/// A parsed body and the names of parameters that nobody knows.
#[derive(Debug)]
pub struct Body<P> {
    /// As it came, without nulls and unknown parameters at the top.
    pub value: Value,
    /// Unknown parameters.
    pub unknown: Vec<String>,
    endpoint: std::marker::PhantomData<P>,
}

impl<P> Body<P> {
    /// Reads typed data out of the body. Fields that `T` does not have are left to other types.
    ///
    /// # Errors
    /// If a field has another type than it must; the error names it.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, ApiError> {
        read(&self.value)
    }
}

/// As [`Body::read`], of any value.
///
/// # Errors
/// As [`Body::read`].
pub fn read<T: DeserializeOwned>(value: &Value) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let path = error.path().to_string();
        let message = in_words(&error.inner().to_string());
        match path.as_str() {
            "." | "" => ApiError::new(Kind::Invalid, message),
            _ => ApiError::invalid(path.clone(), format!("{path}: {message}")),
        }
    })
}

/// What types are called in messages.
const TYPES: &[(&[&str], &str)] = &[
    (&["u8", "u16", "u32", "u64", "usize"], "a whole number of 0 or more"),
    (&["i8", "i16", "i32", "i64", "isize"], "a whole number"),
    (&["f32", "f64"], "a number"),
];

/// A message about a type as people speak of it.
fn in_words(message: &str) -> String {
    let Some((before, name)) = message.rsplit_once("expected ") else { return message.to_owned() };
    match TYPES.iter().find(|(names, _)| names.contains(&name)) {
        Some((_, words)) => format!("{before}expected {words}"),
        None => message.to_owned(),
    }
}

impl<P: Parameters> FromRequest<Arc<Server>> for Body<P> {
    type Rejection = ApiError;

    async fn from_request(request: Request, server: &Arc<Server>) -> Result<Self, ApiError> {
        let bytes = receive(request, server).await?;
        let (value, unknown) = if bytes.len() <= AT_ONCE {
            examine::<P>(&bytes)?
        } else {
            let examine: fn(&[u8]) -> _ = examine::<P>;
            apart(bytes.len(), move || examine(&bytes)).await?
        };
        if let Some(first) = unknown.first() {
            let count = unknown.len();
            tracing::debug!(endpoint = P::ENDPOINT, count, first, "unknown parameters are ignored");
        }
        Ok(Self { value, unknown, endpoint: std::marker::PhantomData })
    }
}

/// Bytes of a body that is read on the thread of its connection; a larger one would hold up the streams of others.
const AT_ONCE: usize = 256 << 10;

/// The checked value, and the parameters that nobody knows.
fn examine<P: Parameters>(bytes: &[u8]) -> Result<(Value, Vec<String>), ApiError> {
    let Value::Object(mut body) = parse(bytes)? else {
        return Err(ApiError::new(Kind::Invalid, "the body must be a JSON object; see /openapi.json"));
    };
    let unknown = check::<P>(&mut body)?;
    Ok((Value::Object(body), unknown))
}

async fn receive(request: Request, server: &Arc<Server>) -> Result<Vec<u8>, ApiError> {
    let headers = request.headers();
    let is_json = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).is_some_and(is_json_type);
    if !is_json {
        return Err(ApiError::new(Kind::MediaType, "expected the header Content-Type: application/json"));
    }
    let limit = server.config.max_body_bytes;
    let too_large =
        || ApiError::new(Kind::TooLarge, format!("the body is larger than {limit} bytes, the limit of this server"));
    let declared = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|length| length > limit as u64) {
        return Err(too_large());
    }
    let collect = Limited::new(request.into_body(), limit).collect();
    match tokio::time::timeout(server.config.body_timeout, collect).await {
        Ok(Ok(body)) => Ok(body.to_bytes().into()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large()),
        Ok(Err(_)) => Err(ApiError::new(Kind::Invalid, "the body ended before it was complete")),
        Err(_) => {
            let seconds = server.config.body_timeout.as_secs_f64();
            Err(ApiError::new(Kind::SlowClient, format!("the body did not arrive within {seconds} s")))
        }
    }
}

/// `application/json`, with or without parameters, or a type that is JSON underneath.
fn is_json_type(value: &str) -> bool {
    let essence = value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json"))
}

/// Parses JSON whose nesting and size are bounded.
///
/// # Errors
/// If it is no JSON, or over a bound.
pub fn parse(bytes: &[u8]) -> Result<Value, ApiError> {
    within_bounds(bytes)?;
    serde_json::from_slice(bytes)
        .map_err(|error| ApiError::new(Kind::Invalid, format!("the body is no valid JSON: {error}")))
}

/// Looks at the bytes alone, so that what is refused has cost nothing but that.
fn within_bounds(bytes: &[u8]) -> Result<(), ApiError> {
    let too_large = |message: String| Err(ApiError::new(Kind::Invalid, message).code("json_too_large"));
    let (mut values, mut names, mut in_text, mut escaped) = (0, 0, false, false);
    // Where each bracket that is open stands, and the names directly in it.
    let mut open: Vec<(usize, u32)> = Vec::with_capacity(MAX_DEPTH);
    for (at, byte) in bytes.iter().enumerate() {
        if in_text {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_text = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_text = true,
            b'[' | b'{' if open.len() == MAX_DEPTH => {
                let message = format!("the JSON is nested deeper than {MAX_DEPTH} levels; flatten it");
                return Err(ApiError::new(Kind::Invalid, message).code("json_too_deep"));
            }
            b'[' | b'{' => open.push((at, 0)),
            b']' | b'}' => {
                open.pop();
            }
            b',' => values += 1,
            b':' => {
                (values, names) = (values + 1, names + 1);
                if let Some((begin, entries)) = open.last_mut() {
                    *entries += 1;
                    if *entries > MAX_ENTRIES {
                        let some = first_names(bytes.get(*begin..).unwrap_or_default()).join(", ");
                        return too_large(format!(
                            "the JSON has an object of more than {MAX_ENTRIES} entries ({some}, …); send less"
                        ));
                    }
                }
            }
            _ => {}
        }
        if values > MAX_VALUES {
            return too_large(format!("the JSON has more than {MAX_VALUES} values; send less"));
        }
        if names > MAX_NAMES {
            return too_large(format!("the JSON has more than {MAX_NAMES} names of entries; send less"));
        }
    }
    Ok(())
}

/// The first names of the object that these bytes begin with, each as far as it can be told.
fn first_names(bytes: &[u8]) -> Vec<String> {
    struct Names<'a>(&'a mut Vec<String>);
    impl<'de> Visitor<'de> for Names<'_> {
        type Value = ();

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
            while self.0.len() < NAMES_TOLD
                && let Some((name, IgnoredAny)) = entries.next_entry::<String, IgnoredAny>()?
            {
                self.0.push(name.chars().take(MOST_SHOWN).collect());
            }
            Ok(())
        }
    }
    let mut names = Vec::new();
    // The rest of the object is not read, which is an error to the reader and none here.
    let _ = serde_json::Deserializer::from_slice(bytes).deserialize_map(Names(&mut names));
    names
}

/// One or several of something, as many parameters allow.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(untagged, expecting = "expected one or a list of them, and nothing else in it")]
pub enum OneOrMany<T> {
    /// One.
    One(T),
    /// Several.
    Many(Vec<T>),
}

impl<T> OneOrMany<T> {
    /// As a list.
    pub fn into_vec(self) -> Vec<T> {
        match self {
            Self::One(one) => vec![one],
            Self::Many(many) => many,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nesting_is_bounded_before_parsing() {
        let nested = |n: usize| format!("{}1{}", "[".repeat(n), "]".repeat(n));
        assert!(parse(nested(MAX_DEPTH).as_bytes()).is_ok());
        assert_eq!(parse(nested(MAX_DEPTH + 1).as_bytes()).unwrap_err().code, Some("json_too_deep"));
        let open = "[".repeat(1_000_000);
        assert_eq!(parse(open.as_bytes()).unwrap_err().code, Some("json_too_deep"));
        // Brackets within texts are no nesting.
        assert!(parse(format!("[\"\\\"{}\"]", "[".repeat(1000)).as_bytes()).is_ok());
    }

    #[test]
    fn names_are_bounded_before_parsing() {
        let object = |n: u32| (0..n).map(|i| format!("\"x{i}\":{i}")).collect::<Vec<_>>().join(",");
        let right = format!("{{\"a\":[{{{}}}]}}", object(MAX_ENTRIES));
        assert!(parse(right.as_bytes()).is_ok());
        for wrong in [
            format!("{{{}}}", object(MAX_ENTRIES + 1)),
            format!("{{\"a\":[1,{{{}}}]}}", object(MAX_ENTRIES + 1)),
            // It need not be JSON to its end.
            format!("{{{}", object(MAX_ENTRIES + 1)),
        ] {
            let error = parse(wrong.as_bytes()).unwrap_err();
            assert_eq!(error.code, Some("json_too_large"));
            assert!(error.message.contains("more than 8192 entries (x0, x1, x2, …)"), "{}", error.message);
        }
        let long = format!("{{\"{}\":1,{}}}", "y".repeat(100_000), object(MAX_ENTRIES));
        assert!(parse(long.as_bytes()).unwrap_err().message.len() < 300);
        // Many in each of many objects.
        let many = vec![format!("{{{}}}", object(1024)); 129].join(",");
        assert!(parse(format!("[{many}]").as_bytes()).unwrap_err().message.contains("more than 131072 names"));
        // What is no object at all is told as that.
        for text in ["a:", &":".repeat(20_000), &format!("[{}]", object(MAX_ENTRIES + 1))] {
            assert_eq!(parse(text.as_bytes()).unwrap_err().kind, Kind::Invalid);
        }
    }

    #[test]
    fn numbers_that_json_has_not_are_refused() {
        for text in ["NaN", "{\"a\": Infinity}", "[1e999]", "{\"a\":}", "", "\u{feff}{}"] {
            assert_eq!(parse(text.as_bytes()).unwrap_err().kind, Kind::Invalid, "{text}");
        }
    }

    #[test]
    fn numbers_are_named_as_people_do() {
        #[derive(Debug, Deserialize)]
        #[expect(dead_code, reason = "it is not read")]
        struct Sample {
            #[serde(default)]
            count: Option<u64>,
            #[serde(default)]
            seed: i64,
            #[serde(default)]
            share: f32,
        }
        for (body, told) in [
            (
                serde_json::json!({"count": -1}),
                "count: invalid value: integer `-1`, expected a whole number of 0 or more",
            ),
            (serde_json::json!({"count": 1.5}), "expected a whole number of 0 or more"),
            (serde_json::json!({"seed": "a"}), "seed: invalid type: string \"a\", expected a whole number"),
            (serde_json::json!({"share": []}), "expected a number"),
        ] {
            let message = read::<Sample>(&body).unwrap_err().message;
            assert!(message.ends_with(told), "{message}");
        }
    }

    #[test]
    fn content_types() {
        for right in ["application/json", "Application/JSON; charset=utf-8", "application/merge-patch+json"] {
            assert!(is_json_type(right), "{right}");
        }
        for wrong in ["text/plain", "application/x-www-form-urlencoded", "text/json+json", ""] {
            assert!(!is_json_type(wrong), "{wrong}");
        }
    }
}
