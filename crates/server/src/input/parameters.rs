//! What happens to each parameter of a request: a table per endpoint, so that nothing is ignored without a word.
//!
//! A parameter is used, or accepted because it changes nothing here (metadata of the caller), or refused by name. One that is
//! in no table is unknown: clients of other servers send many such, so it is not refused, but told in the response header
//! `x-ignored-parameters` and in the log. Objects within a body have tables too. What the table of one that the caller writes does not hold is
//! refused ([`check_object`]), because nobody sends it to be on the safe side; what comes back as it was got, such as an earlier answer,
//! may hold anything, and that is told as unknown parameters are ([`check_returned`]).

use serde_json::{Map, Value};

use crate::error::ApiError;

/// What happens to a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Handling {
    /// It does what it says.
    Used,
    /// It changes nothing, for this reason.
    NoEffect(&'static str),
    /// It is refused, for this reason, unless it asks for nothing (null, false, empty).
    Refused(&'static str),
    /// It is refused, for the second reason, unless it is the first, in JSON: what is done anyhow.
    RefusedUnless(&'static str, &'static str),
}

/// A parameter and its fate.
pub type Row = (&'static str, Handling);

/// Tables of an endpoint.
pub trait Parameters {
    /// Name for messages.
    const ENDPOINT: &'static str;
    /// Its tables.
    const TABLES: &'static [&'static [Row]];

    /// What happens to a parameter; `None` if it is unknown.
    fn handling(name: &str) -> Option<Handling> {
        Self::TABLES.iter().copied().flatten().find(|(known, _)| *known == name).map(|(_, handling)| *handling)
    }
}

/// Longest list of unknown names that is told: a response must not grow with what a client sends.
const MOST_UNKNOWN: usize = 16;
/// Most characters of an unknown name that are told.
pub(super) const MOST_SHOWN: usize = 120;

/// Takes out what asks for nothing and what is unknown, refuses what must be refused, and returns the names that are unknown.
///
/// # Errors
/// If a parameter is refused.
pub fn check<P: Parameters>(body: &mut Map<String, Value>) -> Result<Vec<String>, ApiError> {
    body.retain(|_, value| !value.is_null());
    let (mut unknown, mut checked) = (Vec::new(), Ok(()));
    body.retain(|name, value| {
        let handling = P::handling(name);
        match handling {
            Some(handling) if checked.is_ok() => checked = handling.check(name, value),
            None if unknown.len() < MOST_UNKNOWN => unknown.push(name.clone()),
            _ => {}
        }
        handling.is_some()
    });
    checked.map(|()| unknown)
}

/// Refuses entries of an object within a body that its table refuses or does not hold; `at` names the object.
///
/// # Errors
/// If there is one; the error names it.
pub fn check_object(at: &str, object: &Map<String, Value>, table: &[Row]) -> Result<(), ApiError> {
    check_entries(at, object, table, |shown| {
        let used = table.iter().filter(|(_, handling)| *handling == Handling::Used).map(|(known, _)| *known);
        let expected = used.collect::<Vec<_>>().join(", ");
        let message = format!("{shown} is unknown: expected {expected} here; leave it out");
        Err(ApiError::unsupported(shown, message))
    })
}

/// Refuses entries of an object that the table refuses. What it does not hold is told; `at` names the object.
///
/// # Errors
/// If there is one that is refused; the error names it.
pub fn check_returned(
    at: &str,
    object: &Map<String, Value>,
    table: &[Row],
    unknown: &mut Vec<String>,
) -> Result<(), ApiError> {
    check_entries(at, object, table, |shown| {
        if unknown.len() < MOST_UNKNOWN {
            unknown.push(shown);
        }
        Ok(())
    })
}

/// What becomes of each entry, and by `others` of those that the table does not hold.
fn check_entries(
    at: &str,
    object: &Map<String, Value>,
    table: &[Row],
    mut others: impl FnMut(String) -> Result<(), ApiError>,
) -> Result<(), ApiError> {
    object.iter().filter(|(_, value)| !value.is_null()).try_for_each(|(name, value)| {
        let param = format!("{at}.{name}");
        match table.iter().find(|(known, _)| known == name) {
            Some((_, handling)) => handling.check(&param, value),
            None => others(param.chars().take(MOST_SHOWN).collect()),
        }
    })
}

impl Handling {
    /// What becomes of a value.
    fn check(self, param: &str, value: &Value) -> Result<(), ApiError> {
        match self {
            Self::Refused(why) if !asks_for_nothing(value) => Err(why),
            Self::RefusedUnless(harmless, why) if serde_json::from_str(harmless).ok().as_ref() != Some(value) => {
                Err(why)
            }
            _ => Ok(()),
        }
        .map_err(|why| ApiError::unsupported(param, format!("{param} is not supported: {why}")))
    }
}

fn asks_for_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(entries) => entries.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    struct Sample;
    impl Parameters for Sample {
        const ENDPOINT: &'static str = "sample";
        const TABLES: &'static [&'static [Row]] =
            &[&[("a", Handling::Used), ("b", Handling::NoEffect("none"))], &[("c", Handling::Refused("no reason"))]];
    }

    fn checked(body: &Value) -> Result<Vec<String>, ApiError> {
        check::<Sample>(&mut body.as_object().unwrap().clone())
    }

    #[test]
    fn each_parameter_has_its_fate() {
        assert_eq!(checked(&json!({"a": 1, "b": 2, "d": 3, "e": null})).unwrap(), ["d"]);
        assert!(checked(&json!({"c": false})).unwrap().is_empty());
        let error = checked(&json!({"c": 1})).unwrap_err();
        assert_eq!((error.param.as_deref(), error.code), (Some("c"), Some("unsupported_parameter")));
        assert!(error.message.contains("no reason"));
    }

    #[test]
    fn entries_of_objects_have_their_fate_too() {
        const TABLE: &[Row] =
            &[("a", Handling::Used), ("b", Handling::NoEffect("none")), ("c", Handling::Refused("why"))];
        let checked = |object: Value| check_object("x[0]", object.as_object().unwrap(), TABLE);
        assert!(checked(json!({"a": 1, "b": 2, "c": false, "d": null})).is_ok());
        for (object, param, word) in
            [(json!({"c": 1}), "x[0].c", "why"), (json!({"a": 1, "d": 0}), "x[0].d", "expected a")]
        {
            let error = checked(object).unwrap_err();
            assert_eq!((error.param.as_deref(), error.code), (Some(param), Some("unsupported_parameter")));
            assert!(error.message.contains(word), "{}", error.message);
        }
        assert!(checked(json!({ "x".repeat(10_000): 1 })).unwrap_err().message.len() < 300);
    }

    #[test]
    fn what_comes_back_may_hold_more() {
        const TABLE: &[Row] = &[("a", Handling::Used), ("c", Handling::Refused("why"))];
        let mut unknown = Vec::new();
        let mut checked = |object: Value| check_returned("x[0]", object.as_object().unwrap(), TABLE, &mut unknown);
        assert!(checked(json!({"a": 1, "c": false, "d": 1, "e": null})).is_ok());
        assert_eq!(checked(json!({"c": 1})).unwrap_err().param.as_deref(), Some("x[0].c"));
        assert!(checked((0..100).map(|i| (format!("y{i}"), json!(1))).collect()).is_ok());
        assert_eq!((unknown[0].as_str(), unknown.len()), ("x[0].d", MOST_UNKNOWN));
    }

    #[test]
    fn what_is_done_anyhow_is_no_wish() {
        const TABLE: &[Row] = &[("a", Handling::RefusedUnless("[\"direct\"]", "why"))];
        let checked = |value: Value| check_object("x", json!({ "a": value }).as_object().unwrap(), TABLE);
        assert!(checked(json!(["direct"])).is_ok() && checked(Value::Null).is_ok());
        for other in [json!([]), json!("direct"), json!(["direct", "code"]), json!(false)] {
            assert!(checked(other).unwrap_err().message.contains("x.a is not supported: why"));
        }
    }

    #[test]
    fn unknown_names_are_few() {
        let many: Map<String, Value> = (0..100).map(|i| (format!("x{i}"), json!(1))).collect();
        assert_eq!(checked(&Value::Object(many)).unwrap().len(), MOST_UNKNOWN);
    }
}
