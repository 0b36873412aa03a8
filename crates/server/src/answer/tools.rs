//! The forms in which model families write calls of tools, and grammars that force a call.

use serde_json::{Value, json};

/// DeepSeek's markup; bars and low lines are not those of ASCII.
pub(super) const DEEPSEEK_CALLS_BEGIN: &str = "<｜tool▁calls▁begin｜>";
pub(super) const DEEPSEEK_CALLS_END: &str = "<｜tool▁calls▁end｜>";
pub(super) const DEEPSEEK_CALL_BEGIN: &str = "<｜tool▁call▁begin｜>";
pub(super) const DEEPSEEK_CALL_END: &str = "<｜tool▁call▁end｜>";
pub(super) const DEEPSEEK_SEPARATOR: &str = "<｜tool▁sep｜>";

/// How a family writes calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3.
    Hermes,
    /// `{"name": …, "parameters": {…}}`, several separated by `;`: Llama 3.1 and 3.2.
    Llama3,
    /// Kind, name and a fenced block: DeepSeek V3, and R1 of May 2025.
    DeepSeekV3,
    /// Name and JSON without a fence: DeepSeek V3.1.
    DeepSeekV31,
}

/// Name, form, and what the chat template of such a model holds; the first row that fits counts.
const FORMATS: &[(&str, ToolFormat, &[&str])] = &[
    ("deepseek_v3", ToolFormat::DeepSeekV3, &[DEEPSEEK_CALLS_BEGIN, "```json"]),
    ("deepseek_v31", ToolFormat::DeepSeekV31, &[DEEPSEEK_CALLS_BEGIN]),
    ("hermes", ToolFormat::Hermes, &["<tool_call>", "arguments"]),
    ("llama3_json", ToolFormat::Llama3, &["<|start_header_id|>", "\"parameters\""]),
];

/// Templates with one of these write calls in a form that is not known here, though they may look like another.
const FOREIGN: &[&str] = &["<function=", "[TOOL_CALLS]"];

impl ToolFormat {
    /// By the name that `--tool_call_parser` takes.
    #[must_use]
    pub fn by_name(name: &str) -> Option<Self> {
        FORMATS.iter().find(|(known, ..)| *known == name).map(|(_, format, _)| *format)
    }

    /// Names that [`ToolFormat::by_name`] knows.
    #[must_use]
    pub fn names() -> Vec<&'static str> {
        FORMATS.iter().map(|(name, ..)| *name).collect()
    }

    /// Name for `--tool_call_parser`.
    #[must_use]
    pub fn name(self) -> &'static str {
        FORMATS.iter().find(|(_, format, _)| *format == self).map_or("", |(name, ..)| name)
    }

    /// The form that a chat template asks models to write, told by what it `mentions`.
    #[must_use]
    pub fn detect(mentions: impl Fn(&str) -> bool) -> Option<Self> {
        if FOREIGN.iter().any(|text| mentions(text)) {
            return None;
        }
        let fits = |texts: &[&str]| texts.iter().all(|text| mentions(text));
        FORMATS.iter().find(|(_, _, texts)| fits(texts)).map(|(_, format, _)| *format)
    }

    /// Markup that begins calls.
    #[must_use]
    pub const fn marker(self) -> &'static str {
        match self {
            Self::Hermes => "<tool_call>",
            Self::Llama3 => "<|python_tag|>",
            Self::DeepSeekV3 | Self::DeepSeekV31 => DEEPSEEK_CALLS_BEGIN,
        }
    }

    /// Markup that may be tokens of the model.
    const fn markup(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &["<tool_call>", "</tool_call>"],
            Self::Llama3 => &["<|python_tag|>"],
            Self::DeepSeekV3 | Self::DeepSeekV31 => {
                &[DEEPSEEK_CALLS_BEGIN, DEEPSEEK_CALLS_END, DEEPSEEK_CALL_BEGIN, DEEPSEEK_CALL_END, DEEPSEEK_SEPARATOR]
            }
        }
    }

    /// What is written before and after all calls, between two, before and after the arguments of one.
    fn layout(self, name: &str) -> Layout {
        let quoted = Value::from(name).to_string();
        let (begin, end, between, before, after) = match self {
            Self::Hermes => (
                "",
                "",
                "\n",
                format!("<tool_call>\n{{\"name\": {quoted}, \"arguments\": "),
                "}\n</tool_call>".to_owned(),
            ),
            Self::Llama3 => ("", "", "; ", format!("{{\"name\": {quoted}, \"parameters\": "), "}".to_owned()),
            Self::DeepSeekV3 => (
                DEEPSEEK_CALLS_BEGIN,
                DEEPSEEK_CALLS_END,
                "\n",
                format!("{DEEPSEEK_CALL_BEGIN}function{DEEPSEEK_SEPARATOR}{name}\n```json\n"),
                format!("\n```{DEEPSEEK_CALL_END}"),
            ),
            Self::DeepSeekV31 => (
                DEEPSEEK_CALLS_BEGIN,
                DEEPSEEK_CALLS_END,
                "",
                format!("{DEEPSEEK_CALL_BEGIN}{name}{DEEPSEEK_SEPARATOR}"),
                DEEPSEEK_CALL_END.to_owned(),
            ),
        };
        Layout { begin, end, between, before, after }
    }
}

struct Layout {
    begin: &'static str,
    end: &'static str,
    between: &'static str,
    before: String,
    after: String,
}

/// Which calls an answer must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Force {
    /// At least one call of any tool.
    Any,
    /// One call of this tool.
    Named(String),
}

/// A grammar (llguidance's Lark) of answers that are calls and nothing else, in the model's own form, with arguments as the
/// tools' schemas want them. `tools` are name and schema.
#[must_use]
pub fn forced_calls(format: ToolFormat, tools: &[(String, Value)], force: &Force, parallel: bool) -> String {
    let chosen: Vec<&(String, Value)> = match force {
        Force::Any => tools.iter().collect(),
        Force::Named(wanted) => tools.iter().filter(|(name, _)| name == wanted).collect(),
    };
    let layout = format.layout("");
    let several = parallel && *force == Force::Any;
    let repeat = if several { format!(" ({} call)*", literal(layout.between)) } else { String::new() };
    let start = format!("start: {} call{repeat} {}\n", literal(layout.begin), literal(layout.end));
    start + &calls(format, &chosen, "", &[])
}

/// A grammar of answers that may hold calls: any text, and calls in the model's own form, with arguments as the tools' schemas
/// want them; null allows any object. Without `parallel`, an answer ends after one call. `is_token` tells which markup is a
/// token of the model that no text contains.
#[must_use]
pub fn free_calls(
    format: ToolFormat,
    tools: &[(String, Value)],
    parallel: bool,
    is_token: impl Fn(&str) -> bool,
) -> String {
    let tokens: Vec<&str> = format.markup().iter().copied().filter(|text| is_token(text)).collect();
    let marker = format.marker();
    // Text is read up to the first marker; what follows can only be a call.
    let trigger = if tokens.contains(&marker) {
        format!("trigger: text {marker}\n")
    } else {
        format!("trigger[lazy]: TEXT {}\n", literal(marker))
    };
    let layout = format.layout("");
    let more = if parallel { format!(" ({} call)*", written(layout.between, &tokens)) } else { String::new() };
    let chosen: Vec<&(String, Value)> = tools.iter().collect();
    let (start, cut) = match format {
        ToolFormat::Hermes if parallel => (format!("start: (trigger call)* text\n{trigger}"), marker),
        ToolFormat::Hermes => (format!("start: text | trigger call SPACE\nSPACE: /\\s*/\n{trigger}"), marker),
        ToolFormat::DeepSeekV3 | ToolFormat::DeepSeekV31 => {
            let end = written(layout.end, &tokens);
            (format!("start: text | trigger call{more} {end}\n{trigger}"), "")
        }
        // Without a marker an answer that begins like a call is one.
        ToolFormat::Llama3 => {
            let tag = if tokens.contains(&marker) { format!("{marker}? ") } else { String::new() };
            (format!("start: OTHER | {tag}call{more}\nOTHER: /\\s*([^\\s{{](.|\\n)*)?/\n"), "")
        }
    };
    format!("{start}text: TEXT\nTEXT: /(.|\\n)*/\n{}", calls(format, &chosen, cut, &tokens))
}

/// Rules for one call of any of the tools, without the text `cut` at its beginning.
fn calls(format: ToolFormat, tools: &[&(String, Value)], cut: &str, tokens: &[&str]) -> String {
    let names: Vec<String> = (0..tools.len()).map(|i| format!("call_{i}")).collect();
    let mut grammar = format!("call: {}\n", names.join(" | "));
    for (i, (name, schema)) in tools.iter().enumerate() {
        let Layout { before, after, .. } = format.layout(name);
        let before = before.strip_prefix(cut).unwrap_or(&before);
        let schema = if schema.is_object() { schema.clone() } else { json!({ "type": "object" }) };
        let (before, after) = (written(before, tokens), written(&after, tokens));
        grammar.push_str(&format!("call_{i}: {before} arguments_{i} {after}\narguments_{i}: %json {schema}\n"));
    }
    grammar
}

/// A text in which some markup is a token of its own, as the grammar writes it.
fn written(text: &str, tokens: &[&str]) -> String {
    let first = tokens.iter().filter_map(|token| text.find(token).map(|at| (at, *token))).min();
    match first {
        None => literal(text),
        Some((at, token)) => {
            format!("{} {token} {}", literal(&text[..at]), written(&text[at + token.len()..], tokens))
        }
    }
}

/// A text as the grammar writes it; nothing for an empty one.
fn literal(text: &str) -> String {
    if text.is_empty() { String::new() } else { Value::from(text).to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_are_told_apart() {
        let detect = |template: &str| ToolFormat::detect(|text| template.contains(text));
        assert_eq!(detect("<tool_call>{\"name\": x, \"arguments\": y}</tool_call>"), Some(ToolFormat::Hermes));
        assert_eq!(detect("<|start_header_id|> {\"name\": x, \"parameters\": y}"), Some(ToolFormat::Llama3));
        assert_eq!(detect("<｜tool▁calls▁begin｜> ```json"), Some(ToolFormat::DeepSeekV3));
        assert_eq!(detect("<｜tool▁calls▁begin｜>"), Some(ToolFormat::DeepSeekV31));
        assert_eq!(detect("<tool_call><function=x> arguments"), None);
        assert_eq!(detect("plain"), None);
        for name in ToolFormat::names() {
            assert_eq!(ToolFormat::by_name(name).map(ToolFormat::name), Some(name));
        }
    }

    #[test]
    fn a_forced_call_has_the_models_own_form() {
        let tools = [("f".to_owned(), json!({"type": "object"})), ("g".to_owned(), Value::Null)];
        let any = forced_calls(ToolFormat::Hermes, &tools, &Force::Any, true);
        assert!(any.starts_with("start:  call (\"\\n\" call)* \ncall: call_0 | call_1\n"), "{any}");
        assert!(
            any.contains(r#"call_0: "<tool_call>\n{\"name\": \"f\", \"arguments\": " arguments_0 "}\n</tool_call>""#)
        );
        assert!(any.contains("arguments_1: %json {\"type\":\"object\"}"));
        let named = forced_calls(ToolFormat::DeepSeekV3, &tools, &Force::Named("g".into()), true);
        assert!(!named.contains("call_1") && !named.contains(")*"), "{named}");
    }

    #[test]
    fn markup_that_is_a_token_is_written_as_one() {
        let tools = [("f".to_owned(), Value::Null)];
        let plain = free_calls(ToolFormat::DeepSeekV31, &tools, true, |_| false);
        assert!(plain.contains("trigger[lazy]: TEXT \"<｜tool▁calls▁begin｜>\""), "{plain}");
        let tokens = free_calls(ToolFormat::DeepSeekV31, &tools, true, |text| text != DEEPSEEK_CALLS_END);
        assert!(tokens.contains("trigger: text <｜tool▁calls▁begin｜>\n"), "{tokens}");
        assert!(tokens.contains("call_0:  <｜tool▁call▁begin｜> \"f\" <｜tool▁sep｜>  arguments_0"), "{tokens}");
        assert!(tokens.contains("\"<｜tool▁calls▁end｜>\"\n"), "{tokens}");
        let one = free_calls(ToolFormat::Hermes, &tools, false, |_| false);
        assert!(one.starts_with("start: text | trigger call SPACE\n") && one.contains("call_0: \"\\n{"), "{one}");
    }
}
