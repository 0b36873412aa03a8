//! A template is a part of an untrusted file: whatever it does ends, soon, with one sentence.

#![expect(clippy::panic, reason = "a helper of a test fails the test")]

use proptest::prelude::*;
use qwen_models::chat_template::{ChatTemplate, Limits, SpecialTokens, TemplateError, TemplateInput, TemplateSource};
use serde_json::{Map, json};

fn render(source: &str) -> Result<String, TemplateError> {
    let messages = [json!({"role": "user", "content": "Hi"})];
    ChatTemplate::new(source, SpecialTokens::default())?
        .render(&TemplateInput { messages: &messages, ..TemplateInput::default() })
}

fn refusal(source: &str) -> String {
    let error = match render(source) {
        Ok(text) => panic!("{source:?} rendered {} bytes", text.len()),
        Err(error) => error.to_string(),
    };
    assert!(!error.contains('\n'), "one sentence: {error:?}");
    error
}

#[test]
fn endless_work_ends() {
    let loops = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}";
    assert_eq!(refusal(loops), "the chat template did not finish within 2000000 steps");
    let recursive = "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}";
    refusal(recursive);
    refusal("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}");
    refusal("{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}");
    refusal("{{ range(10 ** 12) | list }}");
    refusal("{% include 'default' %}");
    refusal("{% extends 'default' %}");
    refusal("{% import 'default' as x %}{{ x }}");
}

#[test]
fn output_that_doubles_ends() {
    let doubling = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(100) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}";
    refusal(doubling);
    refusal("{{ 'a' * 10 ** 10 }}");
    refusal("{{ ('a' * 10 ** 6) | replace('a', 'a' * 10 ** 6) }}");
    refusal(
        "{% set ns = namespace(x=[0]) %}{% for i in range(100) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    );
    refusal(
        "{% set ns = namespace(x=[0]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    );
    refusal(
        "{% set ns = namespace(x=[0]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    );
    let source = TemplateSource {
        default: "{% for i in range(1000) %}0123456789{% endfor %}".into(),
        ..TemplateSource::default()
    };
    let limits = Limits { output_bytes: 1000, ..Limits::default() };
    let error = ChatTemplate::with_limits(&source, limits).unwrap().render(&TemplateInput::default()).unwrap_err();
    assert_eq!(error.to_string(), "the chat template wrote more than 1000 bytes");
}

#[test]
fn time_is_bounded_too() {
    let default = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}".into();
    let source = TemplateSource { default, ..TemplateSource::default() };
    let limits = Limits { fuel: 1 << 40, time: std::time::Duration::from_millis(1), ..Limits::default() };
    let rendered =
        ChatTemplate::with_limits(&source, limits).and_then(|template| template.render(&TemplateInput::default()));
    assert_eq!(rendered.unwrap_err().to_string(), "the chat template did not finish within 0.001 s");
}

#[test]
fn deep_values_do_not_overflow_the_stack() {
    let nested = "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% for j in range(50) %}{% set ns.x = [ns.x] %}{% endfor %}{% endfor %}";
    // Whether it ends by its steps or not, it ends.
    let _ = render(nested);
    refusal(&format!("{nested}{{{{ ns.x }}}}"));
    refusal(&format!("{nested}{{{{ ns.x | tojson }}}}"));
    refusal(&format!("{{{{ {}1{} }}}}", "(".repeat(60_000), ")".repeat(60_000)));
    refusal(&"{% if true %}".repeat(10_000));
    let _ = render(&format!("{{{{ {}1 }}}}", "not ".repeat(30_000)));
    let _ = render(&format!("{{{{ 1{} }}}}", " + 1".repeat(30_000)));
}

#[test]
fn broken_templates_say_where() {
    assert_eq!(
        refusal("line\n{% for x in %}"),
        "the chat template is not valid at line 2: syntax error: unexpected end of block"
    );
    assert_eq!(refusal("a\n\n{{ messages.nothing.more }}"), "the chat template failed at line 3: undefined value");
    assert_eq!(
        refusal("{{ raise_exception('Roles must alternate.') }}"),
        "the chat template refused the conversation: Roles must alternate."
    );
    assert_eq!(
        refusal("{% macro f() %}{{ raise_exception('within') }}{% endmacro %}{{ f() }}"),
        "the chat template refused the conversation: within"
    );
    assert!(refusal(&"x".repeat((128 << 10) + 1)).contains("at most 131072"));
    refusal("{{ strftime_now('%Q%!') }}");
    refusal("{{ 'x' | nofilter }}");
    refusal("{{ nofunction() }}");
}

#[test]
fn extra_variables_never_replace_the_conversation() {
    let template = ChatTemplate::new("{{ messages[0].content }}{{ extra }}", SpecialTokens::default()).unwrap();
    let messages = [json!({"role": "user", "content": "Hi"})];
    let with = |name: &str| {
        let kwargs = Map::from_iter([(name.to_owned(), json!("!"))]);
        template.render(&TemplateInput { messages: &messages, kwargs: Some(&kwargs), ..TemplateInput::default() })
    };
    assert_eq!(with("extra").unwrap(), "Hi!");
    for name in ["messages", "tools", "add_generation_prompt", "bos_token", "chat_template", "raise_exception"] {
        assert_eq!(with(name).unwrap_err().to_string(), format!("chat_template_kwargs must not set `{name}`"));
    }
}

#[test]
fn content_parts_become_text_and_arguments_objects() {
    let messages = [
        json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
        json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\"x\": 1}"}}]}),
    ];
    let render = |source: &str| {
        ChatTemplate::new(source, SpecialTokens::default())
            .unwrap()
            .render(&TemplateInput { messages: &messages, ..TemplateInput::default() })
            .unwrap()
    };
    assert_eq!(render("{{ messages[0].content }}"), "a\nb");
    assert_eq!(render("{{ messages[1].tool_calls[0].function.arguments.x }}"), "1");
    // A template that joins texts gets the text.
    assert_eq!(render("{{ 'call ' + messages[1].tool_calls[0].function.arguments }}"), "call {\"x\": 1}");
}

#[test]
fn two_templates_and_the_files_they_come_from() {
    let dir = tempfile::tempdir().unwrap();
    let read = || ChatTemplate::from_checkpoint_dir(dir.path()).unwrap();
    assert!(read().is_none());
    let config = json!({
        "bos_token": {"content": "<s>", "special": true}, "eos_token": "</s>", "pad_token": null,
        "chat_template": [
            {"name": "default", "template": "plain{{ bos_token }}{{ pad_token }}"},
            {"name": "tool_use", "template": "tools{{ eos_token }}"},
        ],
    });
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let tools = [json!({})];
    let with_tools = TemplateInput { tools: Some(&tools), ..TemplateInput::default() };
    let template = read().unwrap();
    assert_eq!(template.render(&TemplateInput::default()).unwrap(), "plain<s>");
    assert_eq!(template.render(&with_tools).unwrap(), "tools</s>");
    std::fs::write(dir.path().join("chat_template.jinja"), "own file").unwrap();
    assert_eq!(read().unwrap().render(&TemplateInput::default()).unwrap(), "own file");
    std::fs::write(dir.path().join("tokenizer_config.json"), "{").unwrap();
    let error = ChatTemplate::from_checkpoint_dir(dir.path()).unwrap_err().to_string();
    assert!(error.contains("tokenizer_config.json is not valid"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    /// Text made of pieces of templates either compiles and renders, or is refused; it never panics.
    #[test]
    fn any_source_gives_text_or_an_error(pieces in prop::collection::vec(prop_oneof![
        Just("{% for m in messages %}"), Just("{% endfor %}"), Just("{{ m.content }}"), Just("{% if true %}"),
        Just("{% endif %}"), Just("{% generation %}"), Just("{% endgeneration %}"), Just("{{ messages | tojson(indent=3) }}"),
        Just("{{ [1,[2]] }}"), Just("{{ -1 // 0 }}"), Just("{{ 2 ** 999 }}"), Just("{{ 'é'[1:] }}"), Just("{%"), Just("%}"), Just("{{"), Just("}}"),
        Just("{#"), Just("'"), Just("\n"), Just(" - "), Just("{{ messages[::-1][0]['role'].split('e') }}"), Just("{% set x = x ~ 'a' %}"),
        Just("{{ '{:>99999999}'.format(1) }}"), Just("{{ strftime_now('%Y') | length }}"), Just("{{ messages[0].update }}"),
    ], 0..12)) {
        let _ = render(&pieces.concat());
    }
}
