//! What a config says and no model could mean is refused, not left out in silence.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

use std::path::Path;

use qwen_models::family::from_hf;
use serde_json::{Value, json};

fn edited(fixture: &str, edit: impl FnOnce(&mut Value)) -> Result<(), String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(fixture).join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    edit(&mut config);
    from_hf(&config.to_string()).map(drop).map_err(|error| error.to_string())
}

#[test]
fn a_rotary_rule_without_its_name() {
    for (fixture, name) in [("llama", "rope_type"), ("deepseek_v3", "type")] {
        let error = edited(fixture, |config| {
            config["rope_scaling"].as_object_mut().unwrap().remove(name);
        });
        let error = error.unwrap_err();
        assert!(
            error.starts_with("rope_type: expected one of default, linear, llama3, yarn, found none beside"),
            "{error}"
        );
    }
    for plain in
        [json!(null), json!({}), json!({ "rope_theta": 5000.0 }), json!({ "rope_type": "default", "factor": 2 })]
    {
        edited("llama", |config| config["rope_scaling"] = plain).unwrap();
    }
}

#[test]
fn no_group_to_choose_experts_from() {
    let error = edited("deepseek_v3", |config| config["topk_group"] = json!(0)).unwrap_err();
    assert!(error.starts_with("topk_group: expected an integer from 1 to the 4 groups, found 0"), "{error}");
    // One group or none is no choice.
    for groups in [0, 1] {
        edited("deepseek_v3", |config| {
            config["n_group"] = json!(groups);
            config["topk_group"] = json!(0);
        })
        .unwrap();
    }
}
