//! Every reply that a test gets is held against the OpenAPI document: a status that is not documented, or a body of another form than is
//! described, fails the test that met it.

use std::sync::LazyLock;

use serde_json::{Value, json};

use crate::client::Reply;

static DOCUMENT: LazyLock<Value> = LazyLock::new(|| serde_json::to_value(qwen_server::openapi_document()).unwrap());

/// Panics if a reply to an operation of the document is not as it says.
pub(crate) fn check(method: &str, path: &str, reply: &Reply) {
    let Some(responses) = responses(method, path) else { return };
    // What is no HTTP to take is refused before there is an operation, by a status alone.
    if reply.status == 431 && reply.body.is_empty() {
        return;
    }
    let class = format!("{}XX", reply.status / 100);
    let documented = [reply.status.to_string(), class].into_iter().find_map(|status| responses.get(status));
    let documented =
        documented.unwrap_or_else(|| panic!("{method} {path}: status {} is not documented: {reply:?}", reply.status));
    let kind = reply.header("content-type").and_then(|kind| kind.split(';').next()).unwrap_or_default();
    let content = documented["content"].as_object().and_then(|content| content.get(kind));
    let content = content.unwrap_or_else(|| panic!("{method} {path}: {kind} is not documented: {reply:?}"));
    let fault = match kind {
        "application/json" => fault(&reply.json(), &content["schema"], ""),
        "text/event-stream" => reply.events().iter().find_map(|event| event_fault(event, &content["itemSchema"])),
        _ => None,
    };
    assert_eq!(fault, None, "{method} {path}: the document says otherwise: {}", reply.body);
}

/// The responses of the operation that a request is of.
fn responses(method: &str, path: &str) -> Option<&'static Value> {
    let path = path.split('?').next()?;
    let same = |template: &str| {
        let (wanted, found) = (template.split('/'), path.split('/'));
        wanted.clone().count() == found.clone().count()
            && wanted.zip(found).all(|(wanted, found)| wanted == found || wanted.starts_with('{'))
    };
    let paths = DOCUMENT["paths"].as_object()?;
    let (_, operations) = paths.iter().find(|(template, _)| same(template))?;
    Some(&operations.get(method.to_lowercase())?["responses"])
}

/// Where an event of a stream, its name and data, is not of a schema.
fn event_fault((name, data): &(String, String), schema: &Value) -> Option<String> {
    let event = match name.as_str() {
        "" => json!({ "data": data }),
        name => json!({ "event": name, "data": data }),
    };
    let kind = serde_json::from_str::<Value>(data).ok().and_then(|data| data["type"].as_str().map(str::to_owned));
    if !name.is_empty() && kind.as_ref() != Some(name) {
        return Some(format!("the event {name} has data of the type {kind:?}"));
    }
    fault(&event, schema, "event")
}

/// Where a value is not of a schema, and why: of JSON Schema, what the document uses to describe replies. Texts that are said to hold JSON
/// are read, and what objects hold besides is a fault too: it should be in the document.
fn fault(value: &Value, schema: &Value, at: &str) -> Option<String> {
    fault_of(value, schema, at, false)
}

/// `in_part`: other schemas may know further names.
fn fault_of(value: &Value, schema: &Value, at: &str, in_part: bool) -> Option<String> {
    if let Some(reference) = schema["$ref"].as_str() {
        return fault_of(value, DOCUMENT.pointer(reference.trim_start_matches('#')).unwrap(), at, in_part);
    }
    let each = |name: &str| schema[name].as_array().into_iter().flatten();
    if let Some(found) = each("allOf").find_map(|part| fault_of(value, part, at, true)) {
        return Some(found);
    }
    if !schema["oneOf"].is_null() && each("oneOf").filter(|part| fault(value, part, at).is_none()).count() != 1 {
        return Some(format!("{at}: {value} is not one of {}", schema["oneOf"]));
    }
    if !schema["anyOf"].is_null() && each("anyOf").all(|part| fault(value, part, at).is_some()) {
        return Some(format!("{at}: {value} is none of {}", schema["anyOf"]));
    }
    if let (Some("application/json"), Some(text)) = (schema["contentMediaType"].as_str(), value.as_str()) {
        let found = match serde_json::from_str(text) {
            Ok(held) => fault(&held, &schema["contentSchema"], at),
            Err(error) => Some(format!("{at}: {text:?} is no JSON: {error}")),
        };
        if found.is_some() {
            return found;
        }
    }
    let types: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one],
        several => several.as_array().into_iter().flatten().filter_map(Value::as_str).collect(),
    };
    let is_of = |kind: &&str| match *kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("a type of JSON: {other}"),
    };
    if !types.is_empty() && !types.iter().any(is_of) {
        return Some(format!("{at}: {value} is no {}", types.join(" or ")));
    }
    if !schema["enum"].is_null() && !each("enum").any(|known| known == value) {
        return Some(format!("{at}: {value} is not among {}", schema["enum"]));
    }
    let outside = |number: f64| {
        schema["minimum"].as_f64().is_some_and(|least| number < least)
            || schema["maximum"].as_f64().is_some_and(|most| number > most)
    };
    if value.as_f64().is_some_and(outside) {
        return Some(format!("{at}: {value} is out of range"));
    }
    match value {
        Value::Array(items) => {
            let first: Vec<&Value> = each("prefixItems").collect();
            let of = |index: usize| first.get(index).copied().unwrap_or(&schema["items"]);
            items.iter().enumerate().find_map(|(index, item)| fault(item, of(index), &format!("{at}[{index}]")))
        }
        Value::Object(entries) => {
            let missing = each("required").filter_map(Value::as_str).find(|name| !entries.contains_key(*name));
            if let Some(name) = missing {
                return Some(format!("{at}: {name} is missing"));
            }
            let is_closed = schema["properties"].is_object() && schema["additionalProperties"].is_null() && !in_part;
            let unknown = entries.keys().find(|name| is_closed && schema["properties"].get(name).is_none());
            if let Some(name) = unknown {
                return Some(format!("{at}: {name} is not in the document"));
            }
            entries.iter().find_map(|(name, entry)| {
                let of = schema["properties"].get(name).unwrap_or(&schema["additionalProperties"]);
                fault(entry, of, &format!("{at}.{name}"))
            })
        }
        _ => None,
    }
}

#[test]
fn what_is_not_of_a_schema_is_found() {
    let schema = json!({
        "type": "object",
        "required": ["a"],
        "properties": {
            "a": { "type": ["integer", "null"], "minimum": 0 },
            "b": { "type": "array", "items": { "oneOf": [{ "type": "string", "enum": ["x"] }, { "type": "null" }] } },
        },
        "additionalProperties": { "type": "number" },
    });
    let found = |value: Value| fault(&value, &schema, "").is_some();
    for right in ["{\"a\":1}", "{\"a\":null,\"b\":[\"x\",null],\"c\":1.5}"] {
        assert!(!found(serde_json::from_str(right).unwrap()), "{right}");
    }
    for wrong in [
        "[]",
        "{}",
        "{\"a\":-1}",
        "{\"a\":1.5}",
        "{\"a\":1,\"b\":[\"y\"]}",
        "{\"a\":1,\"b\":{}}",
        "{\"a\":1,\"c\":\"\"}",
    ] {
        assert!(found(serde_json::from_str(wrong).unwrap()), "{wrong}");
    }
}

#[test]
fn what_is_not_of_a_stream_is_found() {
    let content = |path: &str| {
        let Some(responses) = responses("POST", path) else { panic!("{path} is not in the document") };
        &responses["200"]["content"]["text/event-stream"]
    };
    let found = |path: &str, name: &str, data: &str| {
        event_fault(&(name.to_owned(), data.to_owned()), &content(path)["itemSchema"]).is_some()
    };
    for path in ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"] {
        assert!(content(path)["schema"].is_null() && content(path)["itemSchema"].is_object(), "{path}");
        assert!(found(path, "", "{}") && found(path, "", "") && found(path, "other", "{\"type\":\"other\"}"), "{path}");
        assert!(found(path, "", "{\"object\":\"chat.completion.chunk\"}"), "{path}");
    }
    for path in ["/v1/chat/completions", "/v1/completions"] {
        let error = "{\"error\":{\"message\":\"m\",\"type\":\"t\",\"param\":null,\"code\":null}}";
        assert!(!found(path, "", "[DONE]") && !found(path, "", error) && found(path, "", "[done]"), "{path}");
    }
    assert!(!found("/v1/messages", "message_stop", "{\"type\":\"message_stop\"}"));
    assert!(found("/v1/messages", "ping", "{\"type\":\"message_stop\"}"));
    assert!(found("/v1/messages", "content_block_stop", "{\"type\":\"content_block_stop\"}"));
    let delta = "{\"type\":\"response.function_call_arguments.delta\",\"sequence_number\":1,\"item_id\":\"i\",\"output_index\":0,\"delta\":\"\"}";
    assert!(!found("/v1/responses", "response.function_call_arguments.delta", delta));
}
