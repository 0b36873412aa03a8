//! Blocks of a request as messages of a chat.

use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::input::parameters::{Handling, Row, check_object, check_returned};
use crate::prompt::content_text;

const CACHE: Row = ("cache_control", Handling::NoEffect("the prefix cache finds equal prefixes by itself"));

/// Entries of a message.
const MESSAGE: &[Row] = &[("role", Handling::Used), ("content", Handling::Used)];

/// Kinds of blocks and their entries.
const BLOCKS: &[(&str, &[Row])] = &[
    (
        "text",
        &[
            ("type", Handling::Used),
            ("text", Handling::Used),
            ("citations", Handling::NoEffect("models read the text")),
            CACHE,
        ],
    ),
    (
        "tool_result",
        &[
            ("type", Handling::Used),
            ("tool_use_id", Handling::Used),
            ("content", Handling::Used),
            ("is_error", Handling::NoEffect("templates know no errors; the content tells")),
            CACHE,
        ],
    ),
    (
        "tool_use",
        &[
            ("type", Handling::Used),
            ("id", Handling::Used),
            ("name", Handling::Used),
            ("input", Handling::Used),
            ("caller", Handling::NoEffect("models are the only callers here")),
            CACHE,
        ],
    ),
    (
        "thinking",
        &[
            ("type", Handling::Used),
            ("thinking", Handling::Used),
            ("signature", Handling::NoEffect("thinking is not signed here")),
        ],
    ),
    ("redacted_thinking", &[("type", Handling::Used), ("data", Handling::NoEffect("nobody here can read it"))]),
];

/// Entries of a tool.
const TOOL: &[Row] = &[
    ("type", Handling::Used),
    ("name", Handling::Used),
    ("description", Handling::Used),
    ("input_schema", Handling::Used),
    ("strict", Handling::Used),
    ("eager_input_streaming", Handling::NoEffect("arguments are always sent as they come")),
    ("defer_loading", Handling::Refused("the model is shown all tools")),
    ("input_examples", Handling::Refused("put them into the description")),
    ("allowed_callers", Handling::RefusedUnless("[\"direct\"]", "models are the only callers here")),
    CACHE,
];

/// Entries of a choice of tools.
const TOOL_CHOICE: &[Row] =
    &[("type", Handling::Used), ("name", Handling::Used), ("disable_parallel_tool_use", Handling::Used)];

/// Messages of system text and conversation. Entries of blocks that nobody knows are added to `unknown`.
pub(super) fn messages(
    system: Option<&Value>,
    list: &Value,
    unknown: &mut Vec<String>,
) -> Result<Vec<Value>, ApiError> {
    let mut messages = Vec::new();
    if let Some(system) = system {
        messages.push(json!({ "role": "system", "content": content_text("system", system, unknown)? }));
    }
    let list = list.as_array().filter(|list| !list.is_empty());
    let list = list.ok_or_else(|| ApiError::invalid("messages", "messages: expected a list of messages"))?;
    for (i, message) in list.iter().enumerate() {
        let at = format!("messages[{i}]");
        if let Some(entries) = message.as_object() {
            check_returned(&at, entries, MESSAGE, unknown)?;
        }
        let role = message.get("role").and_then(Value::as_str).unwrap_or_default();
        let content = message.get("content").unwrap_or(&Value::Null);
        match (role, content) {
            ("user" | "assistant" | "system", Value::String(text)) => {
                messages.push(json!({ "role": role, "content": text }));
            }
            ("user", Value::Array(blocks)) => user(&at, blocks, &mut messages, unknown)?,
            ("assistant", Value::Array(blocks)) => messages.push(assistant(&at, blocks, unknown)?),
            ("user" | "assistant", _) => {
                let param = format!("{at}.content");
                return Err(ApiError::invalid(param.clone(), format!("{param}: expected a text or a list of blocks")));
            }
            _ => {
                let param = format!("{at}.role");
                return Err(ApiError::invalid(param.clone(), format!("{param}: expected user or assistant")));
            }
        }
    }
    Ok(messages)
}

/// Results of tools are messages of their own, before the text beside them.
fn user(at: &str, blocks: &[Value], messages: &mut Vec<Value>, unknown: &mut Vec<String>) -> Result<(), ApiError> {
    let mut texts = Vec::new();
    for (i, block) in blocks.iter().enumerate() {
        let at = format!("{at}.content[{i}]");
        check_block(&at, block, unknown)?;
        match kind(block) {
            "text" => texts.push(entry(&at, block, "text")?.to_owned()),
            "tool_result" => {
                let content = match block.get("content") {
                    None | Some(Value::Null) => String::new(),
                    Some(content) => content_text(&format!("{at}.content"), content, unknown)?,
                };
                let id = entry(&at, block, "tool_use_id")?;
                messages.push(json!({ "role": "tool", "tool_call_id": id, "content": content }));
            }
            other => return Err(unsupported(&at, "text or tool_result", other)),
        }
    }
    if blocks.is_empty() {
        let param = format!("{at}.content");
        return Err(ApiError::invalid(param.clone(), format!("{param}: expected at least one block, found none")));
    }
    if !texts.is_empty() {
        messages.push(json!({ "role": "user", "content": texts.join("\n") }));
    }
    Ok(())
}

fn assistant(at: &str, blocks: &[Value], unknown: &mut Vec<String>) -> Result<Value, ApiError> {
    let (mut texts, mut thoughts, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for (i, block) in blocks.iter().enumerate() {
        let at = format!("{at}.content[{i}]");
        check_block(&at, block, unknown)?;
        match kind(block) {
            "text" => texts.push(entry(&at, block, "text")?),
            "thinking" => thoughts.push(entry(&at, block, "thinking")?),
            "redacted_thinking" => {}
            "tool_use" => calls.push(json!({
                "id": entry(&at, block, "id")?,
                "type": "function",
                "function": {
                    "name": entry(&at, block, "name")?,
                    "arguments": block.get("input").unwrap_or(&json!({})).to_string(),
                },
            })),
            other => return Err(unsupported(&at, "text, thinking or tool_use", other)),
        }
    }
    let mut message = json!({ "role": "assistant", "content": texts.join("\n") });
    if !thoughts.is_empty() {
        message["reasoning_content"] = thoughts.join("\n").into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = Value::Array(calls);
    }
    Ok(message)
}

/// Blocks of other kinds are refused by who reads them.
fn check_block(at: &str, block: &Value, unknown: &mut Vec<String>) -> Result<(), ApiError> {
    match (BLOCKS.iter().find(|(known, _)| *known == kind(block)), block.as_object()) {
        (Some((_, table)), Some(entries)) => check_returned(at, entries, table, unknown),
        _ => Ok(()),
    }
}

fn kind(block: &Value) -> &str {
    block.get("type").and_then(Value::as_str).unwrap_or("nothing")
}

fn unsupported(at: &str, expected: &str, found: &str) -> ApiError {
    let shown: String = found.chars().take(40).collect();
    ApiError::unsupported(at, format!("{at}: expected a block of type {expected}, found {shown}"))
}

fn entry<'a>(at: &str, block: &'a Value, name: &str) -> Result<&'a str, ApiError> {
    let found = block.get(name).and_then(Value::as_str);
    found.ok_or_else(|| ApiError::invalid(format!("{at}.{name}"), format!("{at}.{name}: expected a text")))
}

/// Tools in the form of a chat.
pub(super) fn tools(list: &Value) -> Result<Value, ApiError> {
    let items = list.as_array().ok_or_else(|| ApiError::invalid("tools", "tools: expected a list"))?;
    let tool = |(i, tool): (usize, &Value)| {
        if tool.get("type").and_then(Value::as_str).is_some_and(|kind| kind != "custom") {
            let param = format!("tools[{i}].type");
            let message = format!("{param}: expected custom; this server runs no tools of its own");
            return Err(ApiError::unsupported(param, message));
        }
        if let Some(entries) = tool.as_object() {
            check_object(&format!("tools[{i}]"), entries, TOOL)?;
        }
        let mut function = Map::new();
        let names =
            [("name", "name"), ("description", "description"), ("input_schema", "parameters"), ("strict", "strict")];
        for (theirs, ours) in names {
            if let Some(value) = tool.get(theirs) {
                function.insert(ours.into(), value.clone());
            }
        }
        Ok(json!({ "type": "function", "function": function }))
    };
    items.iter().enumerate().map(tool).collect::<Result<Vec<_>, _>>().map(Value::Array)
}

type Choice = (Option<Value>, Option<bool>);

/// The choice in the form of a chat, and whether several calls are allowed.
pub(super) fn tool_choice(choice: Option<&Map<String, Value>>) -> Result<Choice, ApiError> {
    let Some(choice) = choice else { return Ok((None, None)) };
    check_object("tool_choice", choice, TOOL_CHOICE)?;
    let several = match choice.get("disable_parallel_tool_use") {
        None | Some(Value::Null) => None,
        Some(Value::Bool(disabled)) => Some(!disabled),
        Some(_) => {
            let param = "tool_choice.disable_parallel_tool_use";
            return Err(ApiError::invalid(param, format!("{param}: expected true or false")));
        }
    };
    let wanted = match choice.get("type").and_then(Value::as_str) {
        Some("auto") => "auto".into(),
        Some("any") => "required".into(),
        Some("none") => "none".into(),
        Some("tool") => {
            let name = choice.get("name").and_then(Value::as_str).unwrap_or_default();
            json!({ "type": "function", "function": { "name": name } })
        }
        _ => return Err(ApiError::invalid("tool_choice", "tool_choice.type: expected auto, any, tool or none")),
    };
    Ok((Some(wanted), several))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_become_messages() {
        let list = json!([
            { "role": "user", "content": "a" },
            { "role": "assistant", "content": [
                { "type": "thinking", "thinking": "t", "signature": "" },
                { "type": "text", "text": "b" },
                { "type": "tool_use", "id": "x", "name": "f", "input": { "q": 1 } },
            ] },
            { "role": "user", "content": [
                { "type": "tool_result", "tool_use_id": "x", "content": [{ "type": "text", "text": "1" }] },
                { "type": "text", "text": "go on" },
            ] },
        ]);
        let mut unknown = Vec::new();
        let mut messages = |system: Option<&Value>, list: &Value| super::messages(system, list, &mut unknown);
        let found = messages(Some(&json!([{ "type": "text", "text": "s" }])), &list).unwrap();
        let roles: Vec<&str> = found.iter().map(|message| message["role"].as_str().unwrap()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool", "user"]);
        assert_eq!(found[2]["tool_calls"][0]["function"]["arguments"], "{\"q\":1}");
        assert_eq!(found[2]["reasoning_content"], "t");
        let image = json!([{ "role": "user", "content": [{ "type": "image", "source": { "url": "http://x" } }] }]);
        assert!(messages(None, &image).unwrap_err().message.contains("image"));
        let nothing = json!([{ "role": "user", "content": [] }]);
        assert_eq!(messages(None, &nothing).unwrap_err().param.as_deref(), Some("messages[0].content"));
        let told = json!([{ "role": "assistant", "id": "msg_1", "content": [
            { "type": "text", "text": "a", "index": 0 },
            { "type": "tool_use", "id": "x", "name": "f", "input": {}, "partial_json": "{}" },
        ] }]);
        assert!(messages(None, &told).is_ok());
        unknown.sort();
        let expected = ["messages[0].content[0].index", "messages[0].content[1].partial_json", "messages[0].id"];
        assert_eq!(unknown, expected);
    }

    #[test]
    fn tools_say_who_calls_them_only_as_they_are_called() {
        let with = |callers: Value| tools(&json!([{ "name": "f", "input_schema": {}, "allowed_callers": callers }]));
        assert!(with(json!(["direct"])).is_ok());
        assert_eq!(with(json!(["code"])).unwrap_err().param.as_deref(), Some("tools[0].allowed_callers"));
    }
}
