//! Blocks of a request as messages of a chat.

use serde_json::{Map, Value, json};

use crate::error::ApiError;

/// Messages of system text and conversation.
pub(super) fn messages(system: Option<&Value>, list: &Value) -> Result<Vec<Value>, ApiError> {
    let mut messages = Vec::new();
    if let Some(system) = system {
        messages.push(json!({ "role": "system", "content": text("system", system)? }));
    }
    let list = list.as_array().filter(|list| !list.is_empty());
    let list = list.ok_or_else(|| ApiError::invalid("messages", "messages: expected a list of messages"))?;
    for (i, message) in list.iter().enumerate() {
        let at = format!("messages[{i}]");
        let role = message.get("role").and_then(Value::as_str).unwrap_or_default();
        let content = message.get("content").unwrap_or(&Value::Null);
        match (role, content) {
            ("user" | "assistant" | "system", Value::String(text)) => {
                messages.push(json!({ "role": role, "content": text }));
            }
            ("user", Value::Array(blocks)) => user(&at, blocks, &mut messages)?,
            ("assistant", Value::Array(blocks)) => messages.push(assistant(&at, blocks)?),
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
fn user(at: &str, blocks: &[Value], messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let mut texts = Vec::new();
    for (i, block) in blocks.iter().enumerate() {
        let at = format!("{at}.content[{i}]");
        match kind(block) {
            "text" => texts.push(entry(&at, block, "text")?.to_owned()),
            "tool_result" => {
                let content = match block.get("content") {
                    None | Some(Value::Null) => String::new(),
                    Some(content) => text(&format!("{at}.content"), content)?,
                };
                let id = entry(&at, block, "tool_use_id")?;
                messages.push(json!({ "role": "tool", "tool_call_id": id, "content": content }));
            }
            other => return Err(unsupported(&at, "text or tool_result", other)),
        }
    }
    if !texts.is_empty() {
        messages.push(json!({ "role": "user", "content": texts.join("\n") }));
    }
    Ok(())
}

fn assistant(at: &str, blocks: &[Value]) -> Result<Value, ApiError> {
    let (mut texts, mut thoughts, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for (i, block) in blocks.iter().enumerate() {
        let at = format!("{at}.content[{i}]");
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

fn text(at: &str, content: &Value) -> Result<String, ApiError> {
    crate::prompt::content_text(at, content)
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
    let several = choice.get("disable_parallel_tool_use").and_then(Value::as_bool).map(|disabled| !disabled);
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
        let found = messages(Some(&json!([{ "type": "text", "text": "s" }])), &list).unwrap();
        let roles: Vec<&str> = found.iter().map(|message| message["role"].as_str().unwrap()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool", "user"]);
        assert_eq!(found[2]["tool_calls"][0]["function"]["arguments"], "{\"q\":1}");
        assert_eq!(found[2]["reasoning_content"], "t");
        let image = json!([{ "role": "user", "content": [{ "type": "image", "source": { "url": "http://x" } }] }]);
        assert!(messages(None, &image).unwrap_err().message.contains("image"));
    }
}
