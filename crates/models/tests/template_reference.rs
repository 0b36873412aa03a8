//! Templates with the features of real models' templates render as Jinja2 renders them in the
//! environment of the Hugging Face library (`templates/make.py`).

use std::collections::BTreeMap;
use std::path::Path;

use qwen_models::chat_template::{ChatTemplate, SpecialTokens, TemplateInput};
use serde::Deserialize;
use serde_json::{Map, Value};

#[derive(Deserialize)]
struct Case {
    template: String,
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    #[serde(default)]
    add_generation_prompt: bool,
    kwargs: Option<Map<String, Value>>,
    now: i64,
}

#[test]
fn templates_render_as_jinja2_renders_them() {
    let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/templates"));
    let cases: BTreeMap<String, Case> =
        serde_json::from_slice(&std::fs::read(dir.join("cases.json")).unwrap()).unwrap();
    for (name, case) in cases {
        let source = std::fs::read_to_string(dir.join(format!("{}.jinja", case.template))).unwrap();
        let expected = std::fs::read_to_string(dir.join(format!("expected/{name}.txt"))).unwrap();
        let special = SpecialTokens { bos: Some("<s>".into()), eos: Some("</s>".into()), ..SpecialTokens::default() };
        let template = ChatTemplate::new(&source, special).unwrap_or_else(|error| panic!("{name}: {error}"));
        let rendered = template.render(&TemplateInput {
            messages: &case.messages,
            tools: case.tools.as_deref(),
            add_generation_prompt: case.add_generation_prompt,
            kwargs: case.kwargs.as_ref(),
            now: Some(case.now),
        });
        match expected.strip_prefix("refused: ") {
            Some(words) => {
                let error = rendered.unwrap_err().to_string();
                assert_eq!(error, format!("the chat template refused the conversation: {words}"), "{name}");
            }
            None => assert_eq!(rendered.unwrap_or_else(|error| panic!("{name}: {error}")), expected, "{name}"),
        }
    }
}
