//! The incremental parser: known answers of each family, and the same pieces however the text is cut.

use proptest::prelude::*;
use qwen_server::answer::{AnswerParser, ParserOptions, Thinking, ToolFormat, Whole};

/// An answer that was cut for its length.
const CUT: Option<&str> = Some("");

fn parse<'a>(options: &ParserOptions, cut: Option<&str>, parts: impl IntoIterator<Item = &'a str>) -> Whole {
    let (mut parser, mut pieces) = (AnswerParser::new(options.clone()), Vec::new());
    for part in parts {
        parser.push(part, &mut pieces);
    }
    parser.finish(cut, &mut pieces);
    let mut whole = Whole::default();
    pieces.iter().for_each(|piece| whole.add(piece));
    whole
}

fn options(thinking: Thinking, tools: Option<ToolFormat>) -> ParserOptions {
    ParserOptions { thinking, tools, names: vec!["f".into(), "g".into()] }
}

fn check(
    thinking: Thinking,
    tools: Option<ToolFormat>,
    text: &str,
    reasoning: &str,
    content: &str,
    calls: &[(&str, &str)],
) {
    let found = parse(&options(thinking, tools), None, [text]);
    let calls = calls.iter().map(|(name, arguments)| ((*name).to_owned(), (*arguments).to_owned())).collect();
    let expected = Whole { reasoning: reasoning.into(), content: content.into(), calls };
    assert_eq!(found, expected, "{text:?}");
}

#[test]
fn thinking() {
    use Thinking::{IfOpened, Inside, Off};
    check(Off, None, "<think>a</think>b ", "", "<think>a</think>b ", &[]);
    check(IfOpened, None, "<think>\na\n\nb\n</think>\n\nc\n", "a\n\nb", "c\n", &[]);
    check(IfOpened, None, "\n<think></think>c", "", "c", &[]);
    check(IfOpened, None, "  plain <think>", "", "  plain <think>", &[]);
    check(IfOpened, None, "<thin", "", "<thin", &[]);
    check(IfOpened, None, "a</think>b", "", "a</think>b", &[]);
    check(Inside, None, "a</think>b", "a", "b", &[]);
    check(Inside, None, "never ends </thin", "never ends </thin", "", &[]);
    check(Inside, None, "a</think> \n ", "a", "", &[]);
}

#[test]
fn hermes() {
    let hermes = |text: &str, content: &str, calls: &[(&str, &str)]| {
        check(Thinking::IfOpened, Some(ToolFormat::Hermes), text, "", content, calls);
    };
    hermes("hello <b> \n", "hello <b> \n", &[]);
    hermes(
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"</tool_call>\"}}\n</tool_call>",
        "",
        &[("f", "{\"a\": \"</tool_call>\"}")],
    );
    hermes(
        "Let me see.\n\n<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>\n<tool_call>{\"name\": \"h\"}</tool_call>\n",
        "Let me see.",
        &[("f", "{}"), ("h", "{}")],
    );
    // Ended by itself: within the arguments a call, before the name none.
    hermes("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1", "", &[("f", "{\"a\": 1")]);
    hermes("<tool_call>{\"nam", "<tool_call>{\"nam", &[]);
    // No call after all: nothing is lost.
    hermes("<tool_call> is a tag", "<tool_call> is a tag", &[]);
    hermes("<tool_call>{\"x\": 1}</tool_call>", "<tool_call>{\"x\": 1}</tool_call>", &[]);
    hermes("<tool_call>{\"name\": \"f\"}", "", &[("f", "{}")]);
    check(
        Thinking::IfOpened,
        Some(ToolFormat::Hermes),
        "<think>shall I <tool_call>?</think><tool_call>{\"name\": \"f\"}</tool_call>done",
        "shall I <tool_call>?",
        "done",
        &[("f", "{}")],
    );
}

#[test]
fn llama() {
    let llama = |text: &str, content: &str, calls: &[(&str, &str)]| {
        check(Thinking::Off, Some(ToolFormat::Llama3), text, "", content, calls);
    };
    llama("{\"name\": \"f\", \"parameters\": {\"a\": 1}}", "", &[("f", "{\"a\": 1}")]);
    llama(
        "{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {}}",
        "",
        &[("f", "{}"), ("g", "{}")],
    );
    llama("<|python_tag|>{\"name\": \"g\", \"parameters\": {}}", "", &[("g", "{}")]);
    llama("{\"name\": \"Bob\", \"age\": 3} is JSON", "{\"name\": \"Bob\", \"age\": 3} is JSON", &[]);
    llama("It is {\"name\": \"f\", \"parameters\": {}}", "It is {\"name\": \"f\", \"parameters\": {}}", &[]);
}

#[test]
fn deepseek() {
    let v3 = "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": \"}\"}\n```<｜tool▁call▁end｜>\n\
              <｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    let calls = [("f", "{\"a\": \"}\"}"), ("g", "{}")];
    check(Thinking::Inside, Some(ToolFormat::DeepSeekV3), &format!("t</think>{v3}"), "t", "Hm.", &calls);
    let v31 =
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    check(Thinking::Off, Some(ToolFormat::DeepSeekV31), v31, "", "", &[("f", "{\"a\": 1}")]);
    let broken = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\nno JSON <｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    check(Thinking::Off, Some(ToolFormat::DeepSeekV3), broken, "", "", &[("f", "no JSON")]);
}

/// An answer with calls in each form, its content without them, and for each call what is there as soon as it has arguments.
const CALLING: &[(ToolFormat, &str, &str, &[&str])] = &[
    (
        ToolFormat::Hermes,
        "Let me see: 1 < 2.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"<b>\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\"}\n</tool_call>",
        "Let me see: 1 < 2.",
        &["\"arguments\": {", "\"name\": \"g\"}"],
    ),
    (
        ToolFormat::Hermes,
        "<tool_call>{\"arguments\": {\"a\": 1}, \"name\": \"f\"}</tool_call>",
        "",
        &["\"name\": \"f\""],
    ),
    (
        ToolFormat::Llama3,
        "{\"type\": \"function\", \"name\": \"f\", \"parameters\": {\"a\": 1}}; {\"name\": \"g\", \"parameters\": {}}",
        "",
        &["\"parameters\": {", "\"name\": \"g\", \"parameters\": {"],
    ),
    (
        ToolFormat::Llama3,
        "Well,<|python_tag|>{\"name\": \"g\", \"parameters\": {\"a\": [1]}}",
        "Well,",
        &["\"parameters\": {"],
    ),
    (
        ToolFormat::DeepSeekV3,
        "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Hm.",
        &["f\n```json\n{", "g\n```json\n{"],
    ),
    (
        ToolFormat::DeepSeekV31,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>no JSON<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        &["<｜tool▁sep｜>n"],
    ),
    (
        ToolFormat::DeepSeekV31,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        &["<｜tool▁sep｜><｜tool▁call▁end｜>"],
    ),
];

/// A text less what of it may become this markup.
fn less_overlap<'a>(text: &'a str, marker: &str) -> &'a str {
    let most = (1..marker.len()).rev().filter(|n| marker.is_char_boundary(*n)).find(|n| text.ends_with(&marker[..*n]));
    &text[..text.len() - most.unwrap_or(0)]
}

#[test]
fn a_call_that_was_cut_is_no_content() {
    for (format, text, content, begun) in CALLING {
        let options = options(Thinking::Off, Some(*format));
        let whole = parse(&options, None, [*text]);
        assert_eq!(whole.content.trim_end(), *content, "{text}");
        assert_eq!(whole.calls.len(), begun.len(), "{text}");
        let certain: Vec<usize> = begun.iter().map(|part| text.find(part).unwrap() + part.len()).collect();
        for end in (0..=text.len()).filter(|end| text.is_char_boundary(*end)) {
            let cut = &text[..end];
            let found = parse(&options, CUT, [cut]);
            // An object without markup is one of the answer until it names a tool.
            let is_plain = text.starts_with('{') && end < text.find("\"f\"").unwrap() + 3;
            let begins = text.find(format.marker()).map_or(text.len(), |at| at + format.marker().len());
            let expected = match (is_plain, end < begins && !text.starts_with('{')) {
                (true, _) => cut,
                (false, true) => less_overlap(cut, format.marker()),
                (false, false) => content,
            };
            assert_eq!(found.content.trim_end(), expected.trim_end(), "{cut:?}: {found:?}");
            assert_eq!(found.calls.len(), certain.iter().filter(|at| **at <= end).count(), "{cut:?}: {found:?}");
            // What there is of calls is the beginning of what they would have become.
            for ((name, arguments), (whole_name, whole_arguments)) in found.calls.iter().zip(&whole.calls) {
                assert_eq!(name, whole_name);
                assert!(!arguments.is_empty() && whole_arguments.starts_with(arguments.as_str()), "{cut:?}: {found:?}");
            }
        }
    }
    // Thinking's markup likewise; what is certain stays.
    let thinking = |text| parse(&options(Thinking::IfOpened, None), CUT, [text]);
    assert_eq!(thinking("<thin"), Whole::default());
    assert_eq!(thinking("<think>a</thi").reasoning, "a");
    assert_eq!(thinking(" a <thin").content, " a <thin");
    // Without markup, an object that names no tool is an answer, whatever its entries.
    let llama = options(Thinking::Off, Some(ToolFormat::Llama3));
    for text in [
        "{\"items\": [1, 2",
        "{\"name\": \"Bob\", \"age\": ",
        "{\"name\": \"Bo",
        "{\"id\": 7, \"type\": \"book\", \"parameters\": {\"a\"",
        "{",
    ] {
        assert_eq!(parse(&llama, CUT, [text]).content, text);
    }
    assert_eq!(parse(&llama, CUT, ["{\"name\": \"f\", \"para"]), Whole::default());
}

/// What precedes a stop text is of the answer unless markup would have gone on with that text.
#[test]
fn a_stop_text_takes_nothing_but_itself() {
    let cut = |format, stop, text: &str| parse(&options(Thinking::IfOpened, format), Some(stop), [text]);
    let hermes = Some(ToolFormat::Hermes);
    let v3 = Some(ToolFormat::DeepSeekV3);
    for (format, stop, text, content) in [
        (hermes, " b", "if a <", "if a <"),
        (hermes, "tool_call>", "if a <", "if a"),
        (hermes, "tool", "if a <", "if a"),
        (hermes, "tool_call> or", "if a <", "if a"),
        (hermes, "tools", "if a <", "if a <"),
        (None, "x", "<thin", "<thin"),
        (None, "k", "<thin", ""),
        (None, "x", "  ", "  "),
        (hermes, "x", "<tool_call>{\"name\": \"f\"}</tool", "</tool"),
        (hermes, "_call>", "<tool_call>{\"name\": \"f\"}</tool", ""),
        (v3, "x", "a <｜tool", "a <｜tool"),
        (v3, "▁calls", "a <｜tool", "a"),
        (v3, "x", "<｜tool▁calls▁begin｜><｜tool", "<｜tool"),
        (v3, "▁call▁b", "<｜tool▁calls▁begin｜><｜tool", ""),
    ] {
        assert_eq!(cut(format, stop, text).content, content, "{text:?} before {stop:?}");
    }
    let thoughts = |stop| cut(None, stop, "<think>is a </").reasoning;
    assert_eq!((thoughts("b").as_str(), thoughts("think").as_str()), ("is a </", "is a"));
}

/// Words that make the parser change its mind.
const WORDS: &[&str] = &[
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "{\"name\": \"f\", \"arguments\": {\"a\": [1, \"}\"]}}",
    "{\"name\": \"x\"}",
    "{\"arguments\": {}, \"name\": \"g\"}",
    "{\"name\": \"f\", \"arguments\": \"{}\"",
    "{",
    "}",
    "\"",
    "\\",
    ";",
    " ",
    "\n",
    "<",
    "text",
    "中",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "function",
    "f\n",
    "```json\n",
    "```",
    "<|python_tag|>",
    "0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn cutting_does_not_matter(
        words in proptest::collection::vec(proptest::sample::select(WORDS), 0..24),
        cut in proptest::sample::select(&[None, CUT, Some("x"), Some("tool")][..]),
        cuts in proptest::collection::vec(0usize..400, 0..40),
        thinking in proptest::sample::select(&[Thinking::Off, Thinking::IfOpened, Thinking::Inside][..]),
        tools in proptest::sample::select(&[
            None,
            Some(ToolFormat::Hermes),
            Some(ToolFormat::Llama3),
            Some(ToolFormat::DeepSeekV3),
            Some(ToolFormat::DeepSeekV31),
        ][..]),
    ) {
        let text = words.concat();
        let options = options(thinking, tools);
        let whole = parse(&options, cut, [text.as_str()]);
        let mut ends: Vec<usize> = cuts.into_iter().filter(|at| text.is_char_boundary(*at)).collect();
        ends.extend([0, text.len()]);
        ends.sort_unstable();
        let parts = ends.windows(2).map(|pair| &text[pair[0]..pair[1]]);
        prop_assert_eq!(&parse(&options, cut, parts), &whole, "{:?}", text);
        let single: Vec<String> = text.chars().map(String::from).collect();
        prop_assert_eq!(&parse(&options, cut, single.iter().map(String::as_str)), &whole, "{:?}", text);
        // Without tools nothing but thinking's markup and the white space at its edges is lost.
        if tools.is_none() && thinking == Thinking::Off {
            prop_assert_eq!(whole.content, text);
        }
    }
}
