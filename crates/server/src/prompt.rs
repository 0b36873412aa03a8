//! From a conversation in the form of the chat protocol to the tokens of a prompt.
//!
//! Other protocols are translated into that form first, so checks and the template's use are here alone.

use qwen_models::chat_template::{TemplateError, TemplateInput};
use qwen_models::tokenizer::{EncodeOptions, Tokenizer};
use serde_json::{Map, Value, json};
use std::sync::Arc;

use crate::ServedModel;
use crate::answer::Thinking;
use crate::error::{ApiError, Kind};
use crate::input::parameters::{Handling, Row, check_object, check_returned};
use crate::work::{ENCODING, apart};

/// Most messages of a conversation.
const MAX_MESSAGES: usize = 10_000;
/// Most tools of a request.
const MAX_TOOLS: usize = 512;

/// Entries of a message. Clients send answers back as they got them, so what answers of other servers hold is here.
const MESSAGE: &[Row] = &[
    ("role", Handling::Used),
    ("content", Handling::Used),
    ("name", Handling::Used),
    ("tool_call_id", Handling::Used),
    ("tool_calls", Handling::Used),
    ("reasoning_content", Handling::Used),
    ("reasoning", Handling::Used),
    ("reasoning_details", Handling::NoEffect("thinking is reasoning_content")),
    ("thinking_blocks", Handling::NoEffect("thinking is reasoning_content")),
    ("refusal", Handling::NoEffect("models are not shown refusals of earlier answers")),
    ("annotations", Handling::NoEffect("models read the content")),
    ("parsed", Handling::NoEffect("the content again")),
    ("id", Handling::NoEffect("a label of the answer")),
    ("cache_control", Handling::NoEffect("the prefix cache finds equal prefixes by itself")),
    ("provider_specific_fields", Handling::NoEffect("a label of the caller's library")),
    ("function_call", Handling::Refused("it is of an old protocol; use tool_calls")),
    ("audio", Handling::Refused("this model reads text only")),
    ("images", Handling::Refused("this model reads text only")),
    ("prefix", Handling::Refused("use continue_final_message")),
    ("partial", Handling::Refused("use continue_final_message")),
];

/// Entries of a part of a content.
const PART: &[Row] = &[
    ("type", Handling::Used),
    ("text", Handling::Used),
    ("refusal", Handling::NoEffect("models are not shown refusals of earlier answers")),
    ("annotations", Handling::NoEffect("models read the text")),
    ("citations", Handling::NoEffect("models read the text")),
    ("logprobs", Handling::NoEffect("they are of an earlier answer")),
    ("cache_control", Handling::NoEffect("the prefix cache finds equal prefixes by itself")),
];

/// Entries of an earlier call, and of its function.
const TOOL_CALL: &[Row] = &[
    ("id", Handling::Used),
    ("type", Handling::Used),
    ("function", Handling::Used),
    ("index", Handling::NoEffect("calls are in the order of the list")),
    ("provider_specific_fields", Handling::NoEffect("a label of the caller's library")),
];
const CALLED: &[Row] = &[
    ("name", Handling::Used),
    ("arguments", Handling::Used),
    ("parsed_arguments", Handling::NoEffect("the arguments again")),
];

/// Entries of a tool, and of its function.
const TOOL: &[Row] = &[
    ("type", Handling::Used),
    ("function", Handling::Used),
    ("cache_control", Handling::NoEffect("the prefix cache finds equal prefixes by itself")),
];
const FUNCTION: &[Row] = &[
    ("name", Handling::Used),
    ("description", Handling::Used),
    ("parameters", Handling::Used),
    ("strict", Handling::Used),
    ("return", Handling::Used),
    ("cache_control", Handling::NoEffect("the prefix cache finds equal prefixes by itself")),
];

/// A conversation whose form has been checked.
#[derive(Debug, Clone, Default)]
pub(crate) struct Conversation {
    /// Messages for the template.
    pub messages: Vec<Value>,
    /// Tools for the template.
    pub tools: Vec<Value>,
    /// Further variables.
    pub kwargs: Map<String, Value>,
    /// The last message is an answer that goes on.
    pub continue_final: bool,
    /// Begin an answer.
    pub add_generation_prompt: bool,
}

/// A prompt.
#[derive(Debug, Clone)]
pub(crate) struct Prompt {
    /// Tokens.
    pub tokens: Vec<u32>,
    /// What the answer begins with.
    pub thinking: Thinking,
}

/// The tokenizer of the model.
///
/// # Errors
/// If it has none.
pub(crate) fn tokenizer(model: &ServedModel) -> Result<Arc<Tokenizer>, ApiError> {
    let none = || {
        let message = "this model has no tokenizer, so it can only be given token ids at /v1/completions";
        ApiError::new(Kind::NotImplemented, message)
    };
    model.engine.about().tokenizer.clone().ok_or_else(none)
}

/// Tokens of a text, computed where it blocks nobody.
///
/// # Errors
/// If the text can't be encoded.
pub(crate) async fn encode(model: &ServedModel, text: String, options: EncodeOptions) -> Result<Vec<u32>, ApiError> {
    let (tokenizer, size) = (tokenizer(model)?, ENCODING * text.len());
    let encode =
        move || tokenizer.encode(&text, options).map_err(|error| ApiError::new(Kind::Invalid, error.to_string()));
    apart(size, encode).await
}

/// What a prompt is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To be computed, so that it has to fit the context.
    Compute,
    /// To be counted or shown.
    Tell,
}

/// Refuses a text that can't fit the context, whatever its tokens are: that is cheaper than finding them.
fn check_length(tokenizer: &Tokenizer, text: &str, param: &str, context: u32) -> Result<(), ApiError> {
    let least = tokenizer.least_tokens(text);
    if least <= context as usize {
        return Ok(());
    }
    let message = format!(
        "{param}: a text of {} bytes has at least {least} tokens, but the context has room for {context} in all; shorten it or \
         start the server with a larger --max_seq_len",
        text.len()
    );
    Err(ApiError::invalid(param, message).code("context_length_exceeded"))
}

/// Token ids of what may be a text, texts, token ids, or lists of token ids; `param` names it in errors.
///
/// # Errors
/// If it is something else, or there are none of them or more than `limit`.
pub(crate) async fn prompts(
    model: &ServedModel,
    param: &str,
    value: &Value,
    limit: usize,
    options: EncodeOptions,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let wrong = |param: &str, message: &str| ApiError::invalid(param, format!("{param}: expected {message}"));
    let ids = |param: &str, list: &[Value]| -> Result<Vec<u32>, ApiError> {
        let ids: Option<_> = list.iter().map(|id| id.as_u64()?.try_into().ok()).collect();
        ids.ok_or_else(|| wrong(param, "token ids that are whole numbers from 0"))
    };
    let context = model.engine.about().limits.max_seq_len;
    let encode = async |param: &str, text: &String| {
        check_length(&*tokenizer(model)?, text, param, context)?;
        encode(model, text.clone(), options).await
    };
    let list = match value {
        Value::String(text) => return Ok(vec![encode(param, text).await?]),
        Value::Array(list) if list.first().is_some_and(Value::is_number) => return Ok(vec![ids(param, list)?]),
        Value::Array(list) if !list.is_empty() => list,
        _ => return Err(wrong(param, "a text, a list of texts, token ids, or a list of lists of token ids")),
    };
    if list.len() > limit {
        return Err(wrong(param, &format!("at most {limit} texts, found {}; send several requests", list.len())));
    }
    let mut prompts = Vec::with_capacity(list.len());
    for (i, prompt) in list.iter().enumerate() {
        prompts.push(match prompt {
            Value::String(text) => encode(param, text).await.map_err(|error| error.of_one(param, i))?,
            Value::Array(list) => ids(&format!("{param}[{i}]"), list)?,
            _ => return Err(wrong(&format!("{param}[{i}]"), "a text or a list of token ids")),
        });
    }
    Ok(prompts)
}

impl Conversation {
    /// The prompt by the model's template.
    ///
    /// # Errors
    /// If the model has no template, it refuses the conversation, or the prompt can't fit the context where it has to.
    pub(crate) async fn render(self, model: &ServedModel, purpose: Purpose) -> Result<Prompt, ApiError> {
        let template = model.engine.about().chat_template.clone().ok_or_else(|| {
            let message = "this model has no chat template; use /v1/completions with a prompt";
            ApiError::new(Kind::NotImplemented, message)
        })?;
        let tokenizer = tokenizer(model)?;
        let style = model.thinking;
        let context = model.engine.about().limits.max_seq_len;
        let text_bytes = |message: &Value| message["content"].as_str().map_or(0, str::len);
        let size = ENCODING * self.messages.iter().map(text_bytes).sum::<usize>();
        apart(size, move || {
            let input = TemplateInput {
                messages: &self.messages,
                tools: (!self.tools.is_empty()).then_some(self.tools.as_slice()),
                add_generation_prompt: self.add_generation_prompt,
                kwargs: Some(&self.kwargs),
                now: None,
            };
            let mut text = template.render(&input).map_err(|error| {
                let param = match error {
                    TemplateError::Reserved(_) => "chat_template_kwargs",
                    _ => "messages",
                };
                ApiError::invalid(param, error.to_string()).code("chat_template_failed")
            })?;
            if self.continue_final {
                cut_after_last(&mut text, self.messages.last())?;
            }
            if purpose == Purpose::Compute {
                check_length(&tokenizer, &text, "messages", context)?;
            }
            let tokens = tokenizer
                .encode(&text, EncodeOptions::TEMPLATE)
                .map_err(|error| ApiError::invalid("messages", error.to_string()))?;
            Ok(Prompt { thinking: style.of_prompt(&text), tokens })
        })
        .await
    }
}

/// Cuts what the template puts after the last message, so that the answer goes on within it.
fn cut_after_last(text: &mut String, last: Option<&Value>) -> Result<(), ApiError> {
    let content = last.and_then(|message| message["content"].as_str()).unwrap_or_default().trim_end();
    match text.rfind(content) {
        Some(at) if !content.is_empty() => {
            text.truncate(at + content.len());
            Ok(())
        }
        _ => Err(ApiError::invalid(
            "continue_final_message",
            "continue_final_message: the last message's content is empty, or the template does not write it as it is",
        )),
    }
}

/// Checks messages and brings them into the form that templates know. Their entries that nobody knows are added to `unknown`.
///
/// # Errors
/// If one has a form that is not understood; the error names it.
pub(crate) fn messages(list: &Value, unknown: &mut Vec<String>) -> Result<Vec<Value>, ApiError> {
    let list = list.as_array().filter(|list| (1..=MAX_MESSAGES).contains(&list.len())).ok_or_else(|| {
        ApiError::invalid("messages", format!("messages: expected a list of 1 to {MAX_MESSAGES} messages"))
    })?;
    let read = |(i, message)| self::message(&format!("messages[{i}]"), message, unknown);
    list.iter().enumerate().map(read).collect()
}

fn message(at: &str, message: &Value, unknown: &mut Vec<String>) -> Result<Value, ApiError> {
    let wrong = |field: &str, expected: &str| {
        let param = format!("{at}.{field}");
        ApiError::invalid(param.clone(), format!("{param}: expected {expected}"))
    };
    let Some(entries) = message.as_object() else {
        return Err(ApiError::invalid(at, format!("{at}: expected an object with role and content")));
    };
    check_returned(at, entries, MESSAGE, unknown)?;
    let role = match entries.get("role").and_then(Value::as_str) {
        Some("developer") => "system",
        Some(role @ ("system" | "user" | "assistant" | "tool")) => role,
        Some("function") => return Err(wrong("role", "tool, with tool_call_id; function is of an old protocol")),
        _ => return Err(wrong("role", "system, developer, user, assistant or tool")),
    };
    let mut out = Map::new();
    out.insert("role".into(), role.into());
    let content = match entries.get("content") {
        None | Some(Value::Null) if role == "assistant" => String::new(),
        None | Some(Value::Null) => return Err(wrong("content", "a text or a list of parts")),
        Some(content) => content_text(&format!("{at}.content"), content, unknown)?,
    };
    out.insert("content".into(), content.into());
    let names = [
        ("reasoning", "reasoning_content"),
        ("reasoning_content", "reasoning_content"),
        ("name", "name"),
        ("tool_call_id", "tool_call_id"),
    ];
    for (theirs, ours) in names {
        match entries.get(theirs) {
            None | Some(Value::Null) => {}
            Some(Value::String(text)) if text.is_empty() && ours == "reasoning_content" => {}
            Some(Value::String(text)) => {
                out.insert(ours.into(), text.as_str().into());
            }
            Some(_) => return Err(wrong(theirs, "a text")),
        }
    }
    match entries.get("tool_calls") {
        None | Some(Value::Null) => {}
        Some(Value::Array(calls)) => {
            let sound = |call: &Value| {
                call.pointer("/function/name").is_some_and(Value::is_string)
                    && call.pointer("/function/arguments").is_none_or(|text| text.is_string() || text.is_object())
            };
            if !calls.iter().all(sound) {
                return Err(wrong("tool_calls", "calls with function.name and function.arguments, a JSON text"));
            }
            for (i, call) in calls.iter().enumerate() {
                check_call(&format!("{at}.tool_calls[{i}]"), call, unknown)?;
            }
            if !calls.is_empty() {
                out.insert("tool_calls".into(), Value::Array(calls.clone()));
            }
        }
        Some(_) => return Err(wrong("tool_calls", "a list")),
    }
    Ok(Value::Object(out))
}

/// Checks the entries of an earlier call, and of the function within.
fn check_call(at: &str, call: &Value, unknown: &mut Vec<String>) -> Result<(), ApiError> {
    if let Some(entries) = call.as_object() {
        check_returned(at, entries, TOOL_CALL, unknown)?;
    }
    match call["function"].as_object() {
        Some(entries) => check_returned(&format!("{at}.function"), entries, CALLED, unknown),
        None => Ok(()),
    }
}

/// Content as one text. Nothing is ever fetched: parts that are no text are refused.
pub(crate) fn content_text(at: &str, content: &Value, unknown: &mut Vec<String>) -> Result<String, ApiError> {
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => {
            let mut texts = Vec::with_capacity(parts.len());
            for (i, part) in parts.iter().enumerate() {
                let kind = part.get("type").and_then(Value::as_str).unwrap_or("nothing");
                let text = part.get("text").and_then(Value::as_str);
                if let ("text" | "input_text" | "output_text" | "refusal", Some(entries)) = (kind, part.as_object()) {
                    check_returned(&format!("{at}[{i}]"), entries, PART, unknown)?;
                }
                match (kind, text) {
                    ("text" | "input_text" | "output_text", Some(text)) => texts.push(text),
                    ("refusal", _) => {}
                    _ => {
                        let shown: String = kind.chars().take(40).collect();
                        let param = format!("{at}[{i}]");
                        let message =
                            format!("{param}: expected a part of type text, found {shown}: this model reads text only");
                        return Err(ApiError::unsupported(param, message));
                    }
                }
            }
            Ok(texts.join("\n"))
        }
        _ => Err(ApiError::invalid(at, format!("{at}: expected a text or a list of parts"))),
    }
}

/// Checks tools: functions with a name and a schema.
///
/// # Errors
/// If one is of another kind or form.
pub(crate) fn tools(list: &Value) -> Result<Vec<Value>, ApiError> {
    let list = list.as_array().filter(|list| list.len() <= MAX_TOOLS).ok_or_else(|| {
        ApiError::invalid("tools", format!("tools: expected a list of at most {MAX_TOOLS} functions"))
    })?;
    for (i, tool) in list.iter().enumerate() {
        let wrong = |what: &str| Err(ApiError::invalid(format!("tools[{i}]"), format!("tools[{i}]: expected {what}")));
        if tool["type"] != "function" {
            return wrong("type function; this server runs no tools of its own");
        }
        if let Some(entries) = tool.as_object() {
            check_object(&format!("tools[{i}]"), entries, TOOL)?;
        }
        if let Some(entries) = tool["function"].as_object() {
            check_object(&format!("tools[{i}].function"), entries, FUNCTION)?;
        }
        let name = tool.pointer("/function/name").and_then(Value::as_str).unwrap_or_default();
        let sound = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        if name.is_empty() || name.len() > 128 || !name.chars().all(sound) {
            return wrong("function.name of 1 to 128 letters, digits, _, - and .");
        }
        if tool.pointer("/function/parameters").is_some_and(|schema| !schema.is_object() && !schema.is_null()) {
            return wrong("function.parameters to be a JSON schema");
        }
        if tool.pointer("/function/description").is_some_and(|text| !text.is_string() && !text.is_null()) {
            return wrong("function.description to be a text");
        }
        if tool.pointer("/function/strict").is_some_and(|strict| !strict.is_boolean() && !strict.is_null()) {
            return wrong("function.strict to be true or false");
        }
    }
    Ok(list.clone())
}

/// Name and schema of each tool.
pub(crate) fn schemas(tools: &[Value]) -> Vec<(String, Value)> {
    let text = |tool: &Value| tool.pointer("/function/name").and_then(Value::as_str).unwrap_or_default().to_owned();
    tools.iter().map(|tool| (text(tool), tool["function"]["parameters"].clone())).collect()
}

/// A wish to switch thinking on or off, as the template's variables.
///
/// # Errors
/// If the model can't do that.
pub(crate) fn thinking_kwargs(
    model: &ServedModel,
    param: &str,
    wanted: bool,
    kwargs: &mut Map<String, Value>,
) -> Result<(), ApiError> {
    let style = model.thinking;
    match (wanted, style.thinks, style.switch) {
        (_, _, true) => {
            kwargs.insert("enable_thinking".into(), json!(wanted));
            Ok(())
        }
        (false, false, _) | (true, true, _) => Ok(()),
        (false, true, _) => {
            Err(ApiError::unsupported(param, format!("{param}: this model always thinks; its template has no switch")))
        }
        (true, false, _) => {
            Err(ApiError::unsupported(param, format!("{param}: this model does not think; leave it out")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers as libraries hand them back: LiteLLM's, those of a Gemini-compatible server, LangChain's parts, OpenAI's own.
    #[test]
    fn histories_come_back_as_they_were_got() {
        let history = json!([
            { "role": "system", "content": [{ "type": "text", "text": "Be brief.", "cache_control": { "type": "ephemeral" } }] },
            { "role": "user", "content": [{ "type": "text", "text": "Weather?", "index": 0, "id": "lc_1" }] },
            {
                "role": "assistant", "content": "", "refusal": null, "annotations": [], "audio": null, "function_call": null,
                "reasoning_content": "hm", "provider_specific_fields": { "citations": null },
                "thinking_blocks": [{ "type": "thinking", "thinking": "hm", "signature": "x" }],
                "tool_calls": [{
                    "id": "c1", "type": "function", "index": 0, "extra_content": { "google": { "thought_signature": "x" } },
                    "function": { "name": "f", "arguments": "{}", "hint": 1 },
                }],
            },
            { "role": "tool", "tool_call_id": "c1", "name": "f", "content": "sunny", "artifact": {} },
        ]);
        let mut unknown = Vec::new();
        let found = messages(&history, &mut unknown).unwrap();
        let contents: Vec<&str> = found.iter().map(|message| message["content"].as_str().unwrap()).collect();
        assert_eq!(contents, ["Be brief.", "Weather?", "", "sunny"]);
        let expected = [
            "messages[1].content[0].id",
            "messages[1].content[0].index",
            "messages[2].tool_calls[0].extra_content",
            "messages[2].tool_calls[0].function.hint",
            "messages[3].artifact",
        ];
        unknown.sort();
        assert_eq!(unknown, expected);
        let refused = json!([{ "role": "assistant", "content": "a", "audio": { "id": "x" } }]);
        assert_eq!(messages(&refused, &mut unknown).unwrap_err().param.as_deref(), Some("messages[0].audio"));
    }

    #[test]
    fn tools_are_as_libraries_write_them_and_nothing_else() {
        let tool = json!([{ "type": "function", "cache_control": {}, "function": {
            "name": "f", "description": "d", "parameters": { "type": "object" }, "return": { "type": "string" },
            "cache_control": { "type": "ephemeral" },
        } }]);
        assert!(tools(&tool).is_ok());
        let wrong = json!([{ "type": "function", "function": { "name": "f", "params": {} } }]);
        assert_eq!(tools(&wrong).unwrap_err().param.as_deref(), Some("tools[0].function.params"));
    }
}
