//! What an answer must look like: the parameters of three dialects, one constraint of the engine.
//!
//! `response_format` of OpenAI, `structured_outputs` of vLLM (and its older `guided_*`), `grammar` and `json_schema` of
//! llama-server. At most one may be given. Grammars are compiled by the engine within its own budget.

use qwen_engine::{Constraint, Grammar, is_gbnf};
use serde_json::{Map, Value};

use super::parameters::{Handling, Row, check_object};
use crate::error::ApiError;

/// Longest source of a grammar, schema or expression in bytes.
const MAX_SOURCE: usize = 256 << 10;
/// Most texts of a choice.
const MAX_CHOICES: usize = 4096;

/// Fate of each.
pub const STRUCTURED: &[Row] = &[
    ("response_format", Handling::Used),
    ("structured_outputs", Handling::Used),
    ("guided_json", Handling::Used),
    ("guided_regex", Handling::Used),
    ("guided_choice", Handling::Used),
    ("guided_grammar", Handling::Used),
    ("json_schema", Handling::Used),
    ("grammar", Handling::Used),
    ("guided_decoding_backend", Handling::NoEffect("there is one")),
    ("guided_whitespace_pattern", Handling::Refused("white space is as the grammar allows")),
    ("structural_tag", Handling::Refused("use tools with tool_choice, or a grammar")),
];

/// Entries of `response_format`, by its type.
const FORMAT_JSON_OBJECT: &[Row] = &[("type", Handling::Used), ("schema", Handling::Used)];
const FORMAT_JSON_SCHEMA: &[Row] = &[("type", Handling::Used), ("json_schema", Handling::Used)];
const FORMAT_REGEX: &[Row] = &[("type", Handling::Used), ("pattern", Handling::Used)];
const FORMAT_GRAMMAR: &[Row] =
    &[("type", Handling::Used), ("grammar", Handling::Used), ("syntax", Handling::Refused("the grammar itself tells"))];
const FORMAT_TEXT: &[Row] = &[("type", Handling::Used)];

/// What describes a schema: the entries of `json_schema`, or of the format itself in the Responses protocol.
const DESCRIBED_SCHEMA: &[Row] = &[
    ("schema", Handling::Used),
    ("json_schema", Handling::Used),
    ("strict", Handling::NoEffect("the schema always holds")),
    ("type", Handling::NoEffect("known already")),
    ("name", Handling::NoEffect("a label of the caller")),
    ("description", Handling::NoEffect("models are not shown the schema; say it in the prompt")),
];

/// Entries of `structured_outputs`.
const OUTPUTS: &[Row] = &[
    ("json", Handling::Used),
    ("regex", Handling::Used),
    ("choice", Handling::Used),
    ("grammar", Handling::Used),
    ("json_object", Handling::Used),
    ("disable_fallback", Handling::NoEffect("there is one backend")),
    ("disable_any_whitespace", Handling::Refused("white space is as the grammar allows")),
    ("disable_additional_properties", Handling::Refused("write additionalProperties: false into the schema")),
    ("whitespace_pattern", Handling::Refused("white space is as the grammar allows")),
    ("structural_tag", Handling::Refused("use tools with tool_choice, or a grammar")),
];

/// The grammar that a request asks for, and the parameter that does.
///
/// # Errors
/// If it asks for two, or in a form that is not understood.
pub fn grammar(body: &Value) -> Result<Option<(&'static str, Grammar)>, ApiError> {
    let mut found: Option<(&'static str, Grammar)> = None;
    let mut take = |name: &'static str, grammar: Option<Grammar>| {
        let Some(grammar) = grammar else { return Ok(()) };
        if let Some((other, _)) = &found {
            let message = format!("{name}: only one form of structured output is possible, but {other} is given too");
            return Err(ApiError::invalid(name, message));
        }
        found = Some((name, grammar));
        Ok(())
    };
    let field = |name: &str| body.get(name).filter(|value| !value.is_null());
    if let Some(format) = field("response_format") {
        take("response_format", response_format(format)?)?;
    }
    if let Some(outputs) = field("structured_outputs") {
        take("structured_outputs", structured_outputs(outputs)?)?;
    }
    type Reader = fn(&'static str, &Value) -> Result<Grammar, ApiError>;
    let readers: [(&'static str, Reader); 6] = [
        ("guided_json", schema),
        ("guided_regex", regex),
        ("guided_choice", choice),
        ("guided_grammar", written),
        ("json_schema", schema),
        ("grammar", written),
    ];
    for (name, read) in readers {
        if let Some(value) = field(name) {
            take(name, Some(read(name, value)?))?;
        }
    }
    Ok(found)
}

/// As a constraint that begins after the thinking, if the model thinks first.
#[must_use]
pub fn after_thinking(grammar: Grammar, thinks: bool) -> Constraint {
    Constraint { grammar, after: thinks.then(|| crate::answer::THINK_END.to_owned()) }
}

/// `response_format`, and `text.format` of the Responses protocol.
///
/// # Errors
/// If it is not understood.
pub fn response_format(format: &Value) -> Result<Option<Grammar>, ApiError> {
    const NAME: &str = "response_format";
    let format = object(NAME, format)?;
    match format.get("type").and_then(Value::as_str) {
        Some("text") => check_object(NAME, format, FORMAT_TEXT).map(|()| None),
        Some("json_object") => {
            check_object(NAME, format, FORMAT_JSON_OBJECT)?;
            let found = format.get("schema").filter(|schema| !schema.is_null());
            found.map_or(Ok(Grammar::JsonObject), |found| schema("response_format.schema", found)).map(Some)
        }
        Some("json_schema") => {
            // The Responses protocol has the schema's entries at the top.
            let described = match format.get("json_schema") {
                Some(inner) => {
                    check_object(NAME, format, FORMAT_JSON_SCHEMA)?;
                    let inner = object("response_format.json_schema", inner)?;
                    check_object("response_format.json_schema", inner, DESCRIBED_SCHEMA).map(|()| inner)?
                }
                None => check_object(NAME, format, DESCRIBED_SCHEMA).map(|()| format)?,
            };
            let found = described.get("schema").or_else(|| described.get("json_schema"));
            let found = found.ok_or_else(|| {
                ApiError::invalid(NAME, "response_format.json_schema.schema: expected a JSON schema, found nothing")
            })?;
            schema("response_format.json_schema.schema", found).map(Some)
        }
        Some("regex") => {
            check_object(NAME, format, FORMAT_REGEX)?;
            regex(NAME, format.get("pattern").unwrap_or(&Value::Null)).map(Some)
        }
        Some("grammar") => {
            check_object(NAME, format, FORMAT_GRAMMAR)?;
            written(NAME, format.get("grammar").unwrap_or(&Value::Null)).map(Some)
        }
        other => {
            let found = other.unwrap_or("nothing");
            let message = format!("response_format.type: expected text, json_object or json_schema, found {found}");
            Err(ApiError::invalid(NAME, message))
        }
    }
}

fn structured_outputs(outputs: &Value) -> Result<Option<Grammar>, ApiError> {
    const NAME: &str = "structured_outputs";
    let outputs = object(NAME, outputs)?;
    check_object(NAME, outputs, OUTPUTS)?;
    let asks = |name: &str| OUTPUTS.iter().any(|(known, handling)| *known == name && *handling == Handling::Used);
    let mut given = outputs.iter().filter(|(name, value)| !value.is_null() && asks(name));
    let Some((kind, value)) = given.next() else { return Ok(None) };
    if given.next().is_some() {
        return Err(ApiError::invalid(NAME, "structured_outputs: expected one entry, found several"));
    }
    match kind.as_str() {
        "json" => schema(NAME, value).map(Some),
        "regex" => regex(NAME, value).map(Some),
        "choice" => choice(NAME, value).map(Some),
        "grammar" => written(NAME, value).map(Some),
        _ => match value.as_bool() {
            Some(wanted) => Ok(wanted.then_some(Grammar::JsonObject)),
            None => Err(ApiError::invalid(NAME, "structured_outputs.json_object: expected true or false")),
        },
    }
}

fn object<'a>(name: &'static str, value: &'a Value) -> Result<&'a Map<String, Value>, ApiError> {
    value
        .as_object()
        .ok_or_else(|| ApiError::invalid(name, format!("{name}: expected an object, found {}", kind(value))))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn bounded(name: &'static str, source: String) -> Result<String, ApiError> {
    if source.len() > MAX_SOURCE {
        let message = format!("{name}: expected at most {MAX_SOURCE} bytes, found {}", source.len());
        return Err(ApiError::invalid(name, message));
    }
    Ok(source)
}

fn text(name: &'static str, value: &Value) -> Result<String, ApiError> {
    match value.as_str() {
        Some(text) if !text.is_empty() => bounded(name, text.to_owned()),
        _ => Err(ApiError::invalid(name, format!("{name}: expected a text, found {}", kind(value)))),
    }
}

/// A schema as an object, a boolean, or the text of one.
fn schema(name: &'static str, value: &Value) -> Result<Grammar, ApiError> {
    let source = match value {
        Value::Object(_) | Value::Bool(_) => value.to_string(),
        Value::String(source) => source.clone(),
        other => return Err(ApiError::invalid(name, format!("{name}: expected a JSON schema, found {}", kind(other)))),
    };
    bounded(name, source).map(Grammar::JsonSchema)
}

fn regex(name: &'static str, value: &Value) -> Result<Grammar, ApiError> {
    text(name, value).map(Grammar::Regex)
}

fn choice(name: &'static str, value: &Value) -> Result<Grammar, ApiError> {
    let items = value.as_array().filter(|items| (1..=MAX_CHOICES).contains(&items.len()));
    let items =
        items.ok_or_else(|| ApiError::invalid(name, format!("{name}: expected a list of 1 to {MAX_CHOICES} texts")))?;
    let texts: Option<Vec<String>> =
        items.iter().map(|item| item.as_str().filter(|text| !text.is_empty()).map(str::to_owned)).collect();
    let texts = texts.ok_or_else(|| ApiError::invalid(name, format!("{name}: expected texts that are not empty")))?;
    let bytes: usize = texts.iter().map(String::len).sum();
    if bytes > MAX_SOURCE {
        return Err(ApiError::invalid(name, format!("{name}: expected at most {MAX_SOURCE} bytes, found {bytes}")));
    }
    Ok(Grammar::Choice(texts))
}

/// A grammar in Lark form or in GBNF, told apart by how its first rule is written.
fn written(name: &'static str, value: &Value) -> Result<Grammar, ApiError> {
    let source = text(name, value)?;
    Ok(if is_gbnf(&source) { Grammar::Gbnf(source) } else { Grammar::Lark(source) })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_dialect_gives_the_same_constraint() {
        let schema = json!({"type": "object"});
        let expected = Grammar::JsonSchema(schema.to_string());
        let grammar = |body: &Value| super::grammar(body).unwrap().map(|(_, grammar)| grammar);
        let name = |body: &Value| super::grammar(body).unwrap().map(|(name, _)| name);
        for body in [
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}),
            json!({"response_format": {"type": "json_schema", "name": "x", "schema": schema}}),
            json!({"structured_outputs": {"json": schema}}),
            json!({"guided_json": schema}),
            json!({"guided_json": schema.to_string()}),
            json!({"json_schema": schema}),
        ] {
            assert_eq!(grammar(&body), Some(expected.clone()), "{body}");
            assert_eq!(name(&body), body.as_object().unwrap().keys().next().map(String::as_str));
        }
        let llama_server = json!({"response_format": {"type": "json_object", "schema": schema}});
        assert_eq!(grammar(&llama_server), Some(expected));
        assert_eq!(grammar(&json!({"response_format": {"type": "text"}})), None);
        assert_eq!(grammar(&json!({"guided_choice": ["a"]})), Some(Grammar::Choice(vec!["a".into()])));
        assert_eq!(grammar(&json!({"guided_regex": "a+"})), Some(Grammar::Regex("a+".into())));
        let gbnf = "# llama.cpp's\nroot ::= \"a\"";
        assert_eq!(grammar(&json!({"grammar": gbnf})), Some(Grammar::Gbnf(gbnf.into())));
        let lark = "start: \"::=\"";
        assert_eq!(grammar(&json!({"guided_grammar": lark})), Some(Grammar::Lark(lark.into())));
    }

    #[test]
    fn what_is_not_understood_is_named() {
        for (body, param) in [
            (json!({"response_format": {"type": "xml"}}), "response_format"),
            (json!({"response_format": "json"}), "response_format"),
            (json!({"response_format": {"type": "json_schema", "json_schema": {}}}), "response_format"),
            (json!({"response_format": {"type": "json_object", "scheme": {}}}), "response_format.scheme"),
            (json!({"response_format": {"type": "text", "pattern": "a"}}), "response_format.pattern"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}}),
                "response_format.json_schema.x",
            ),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "schema": {}}}),
                "response_format.schema",
            ),
            (json!({"structured_outputs": {"json": {}, "x": 1}}), "structured_outputs.x"),
            (json!({"structured_outputs": {"json_object": 1}}), "structured_outputs"),
            (json!({"guided_json": {}, "guided_regex": "a"}), "guided_regex"),
            (json!({"guided_choice": []}), "guided_choice"),
            (json!({"guided_choice": [1]}), "guided_choice"),
            (json!({"structured_outputs": {"structural_tag": {"a": 1}}}), "structured_outputs.structural_tag"),
            (json!({"structured_outputs": {"regex": "a", "json": {}}}), "structured_outputs"),
            (json!({"guided_regex": "a".repeat(MAX_SOURCE + 1)}), "guided_regex"),
        ] {
            assert_eq!(grammar(&body).unwrap_err().param.as_deref(), Some(param), "{body}");
        }
    }
}
