//! Items of a request as messages of a chat.

use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::input::parameters::{Handling, Row, check_object, check_returned};
use crate::prompt::content_text;

/// Roles of messages; what tools say is an item of its own kind.
const ROLES: &[&str] = &["user", "assistant", "system", "developer"];

/// Kinds of items and their entries. Clients send items of earlier responses back as they got them.
const ITEMS: &[(&str, &[Row])] = &[
    (
        "message",
        &[
            ("type", Handling::Used),
            ("role", Handling::Used),
            ("content", Handling::Used),
            ("id", LABEL),
            ("status", LABEL),
            ("phase", LABEL),
        ],
    ),
    (
        "function_call",
        &[
            ("type", Handling::Used),
            ("call_id", Handling::Used),
            ("name", Handling::Used),
            ("arguments", Handling::Used),
            ("parsed_arguments", Handling::NoEffect("the arguments again")),
            ("id", LABEL),
            ("status", LABEL),
        ],
    ),
    (
        "function_call_output",
        &[
            ("type", Handling::Used),
            ("call_id", Handling::Used),
            ("output", Handling::Used),
            ("id", LABEL),
            ("status", LABEL),
        ],
    ),
    (
        "reasoning",
        &[
            ("type", Handling::Used),
            ("id", LABEL),
            ("status", LABEL),
            ("summary", NOT_SHOWN),
            ("content", NOT_SHOWN),
            ("encrypted_content", NOT_SHOWN),
        ],
    ),
];
const LABEL: Handling = Handling::NoEffect("a label of the item");
const NOT_SHOWN: Handling = Handling::NoEffect("thinking of earlier turns is not shown to models again");

/// Entries of a tool.
const TOOL: &[Row] = &[
    ("type", Handling::Used),
    ("name", Handling::Used),
    ("description", Handling::Used),
    ("parameters", Handling::Used),
    ("strict", Handling::Used),
    ("defer_loading", Handling::Refused("the model is shown all tools")),
];

/// Messages of instructions and input. A call belongs to the assistant's message before it, as templates want it. Entries of items
/// that nobody knows are added to `unknown`.
pub(super) fn messages(
    instructions: Option<&str>,
    input: &Value,
    unknown: &mut Vec<String>,
) -> Result<Vec<Value>, ApiError> {
    let mut messages: Vec<Value> =
        instructions.map(|text| json!({ "role": "system", "content": text })).into_iter().collect();
    match input {
        Value::String(text) => messages.push(json!({ "role": "user", "content": text })),
        Value::Array(items) if !items.is_empty() => {
            for (i, item) in items.iter().enumerate() {
                add(&format!("input[{i}]"), item, &mut messages, unknown)?;
            }
        }
        _ => return Err(ApiError::invalid("input", "input: expected a text or a list of items")),
    }
    Ok(messages)
}

fn add(at: &str, item: &Value, messages: &mut Vec<Value>, unknown: &mut Vec<String>) -> Result<(), ApiError> {
    let text = |name: &str| {
        let found = item.get(name).and_then(Value::as_str);
        found.ok_or_else(|| ApiError::invalid(format!("{at}.{name}"), format!("{at}.{name}: expected a text")))
    };
    let kind = item.get("type").and_then(Value::as_str);
    let table = ITEMS.iter().find(|(known, _)| *known == kind.unwrap_or("message"));
    if let (Some((_, table)), Some(entries)) = (table, item.as_object()) {
        check_returned(at, entries, table, unknown)?;
    }
    match kind {
        None | Some("message") => {
            let role = text("role")?;
            if !ROLES.contains(&role) {
                let param = format!("{at}.role");
                let message = format!("{param}: expected {}, found {role:?}", ROLES.join(", "));
                return Err(ApiError::invalid(param, message));
            }
            let content = item.get("content").unwrap_or(&Value::Null);
            let content = content_text(&format!("{at}.content"), content, unknown)?;
            messages.push(json!({ "role": role, "content": content }));
        }
        Some("function_call") => {
            let call = json!({
                "id": text("call_id")?,
                "type": "function",
                "function": { "name": text("name")?, "arguments": text("arguments")? },
            });
            let last = messages.last_mut().filter(|message| message["role"] == "assistant");
            match last.and_then(Value::as_object_mut) {
                Some(message) => {
                    if let Some(calls) = message.entry("tool_calls").or_insert_with(|| json!([])).as_array_mut() {
                        calls.push(call);
                    }
                }
                None => messages.push(json!({ "role": "assistant", "content": "", "tool_calls": [call] })),
            }
        }
        Some("function_call_output") => {
            let output = item.get("output").unwrap_or(&Value::Null);
            let output = content_text(&format!("{at}.output"), output, unknown)?;
            messages.push(json!({ "role": "tool", "tool_call_id": text("call_id")?, "content": output }));
        }
        // Thinking of earlier turns is not shown to models again.
        Some("reasoning") => {}
        Some(other) => {
            let shown: String = other.chars().take(40).collect();
            let message = format!("{at}.type: expected message, function_call or function_call_output, found {shown}");
            return Err(ApiError::unsupported(format!("{at}.type"), message));
        }
    }
    Ok(())
}

/// Tools with their entries where a chat has them.
pub(super) fn tools(list: &Value) -> Result<Value, ApiError> {
    let items = list.as_array().ok_or_else(|| ApiError::invalid("tools", "tools: expected a list"))?;
    let tool = |(i, tool): (usize, &Value)| {
        if tool["type"] != "function" {
            let message = format!("tools[{i}].type: expected function; this server runs no tools of its own");
            return Err(ApiError::unsupported(format!("tools[{i}].type"), message));
        }
        if let Some(entries) = tool.as_object() {
            check_object(&format!("tools[{i}]"), entries, TOOL)?;
        }
        let names = ["name", "description", "parameters", "strict"];
        let function: Map<String, Value> =
            names.iter().filter_map(|name| Some(((*name).to_owned(), tool.get(*name)?.clone()))).collect();
        Ok(json!({ "type": "function", "function": function }))
    };
    items.iter().enumerate().map(tool).collect::<Result<Vec<_>, _>>().map(Value::Array)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_become_messages() {
        let input = json!([
            { "role": "user", "content": [{ "type": "input_text", "text": "a" }] },
            { "type": "reasoning", "id": "rs_1", "summary": [] },
            { "type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}" },
            { "type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}" },
            { "type": "function_call_output", "call_id": "c1", "output": "1" },
        ]);
        let mut unknown = Vec::new();
        let mut messages = |instructions, input: &Value| super::messages(instructions, input, &mut unknown);
        let found = messages(Some("be brief"), &input).unwrap();
        let roles: Vec<&str> = found.iter().map(|message| message["role"].as_str().unwrap()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool"]);
        assert_eq!(found[2]["tool_calls"].as_array().unwrap().len(), 2);
        assert!(messages(None, &json!([{ "type": "input_image" }])).is_err());
        let role = json!([{ "role": "user", "content": "a" }, { "role": "tool", "content": "a" }]);
        let error = messages(Some("be brief"), &role).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("input[1].role"));
        assert!(error.message.contains("user, assistant, system, developer, found \"tool\""), "{}", error.message);
        assert!(messages(None, &json!([{ "role": "user", "content": [{ "type": "input_image" }] }])).is_err());
        let call = json!({
            "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "n", "caller": { "type": "x" },
        });
        let parts = json!([{ "type": "output_text", "text": "a", "annotations": [], "index": 0 }]);
        let told = json!([{ "role": "assistant", "content": parts, "volume": 3 }, call]);
        assert!(messages(None, &told).is_ok());
        unknown.sort();
        assert_eq!(unknown, ["input[0].content[0].index", "input[0].volume", "input[1].caller", "input[1].namespace"]);
    }
}
