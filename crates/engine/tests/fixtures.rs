//! Every family and every block type against logits that another library computed in float32.

#![expect(clippy::print_stdout, reason = "the differences are worth seeing when a test fails")]

mod support;

use qwen_engine::{LoadOptions, MlaForm, Request};
use support::{exact, fixture, greedy, logits, max_difference, reference, run, try_engine};

/// Largest difference of a logit.
const LIMIT: f32 = 1e-3;

/// Compares prefill, token by token and greedy text; says what differs.
fn check(path: &str, reference_path: &str) -> Vec<String> {
    let reference = reference(reference_path);
    let forms: &[Option<MlaForm>] =
        if path.contains("deepseek") { &[None, Some(MlaForm::Expanded), Some(MlaForm::Absorbed)] } else { &[None] };
    let mut faults = Vec::new();
    for mla_form in forms {
        let options = LoadOptions { mla_form: *mla_form, ..exact() };
        let mut engine = match try_engine(path, &options, 2) {
            Ok(engine) => engine,
            Err(error) => {
                faults.push(format!("{path}: {error}"));
                continue;
            }
        };
        for decode in [false, true] {
            let found = logits(&mut engine, &reference.input_ids, decode);
            let difference = max_difference(&found, &reference.logits);
            println!("{path} form {mla_form:?} decode {decode}: {difference:.2e}");
            if difference.is_nan() || difference > LIMIT {
                faults.push(format!("{path} form {mla_form:?} decode {decode}: largest difference {difference}"));
            }
        }
        if !reference.greedy.is_empty() {
            let sampling = greedy(reference.greedy.len() as u32);
            let request = Request::new(reference.input_ids[..16].to_vec(), sampling);
            let found = run(&mut engine, vec![request]).remove(0);
            if found != reference.greedy {
                faults.push(format!("{path} form {mla_form:?}: greedy {found:?}, not {:?}", reference.greedy));
            }
        }
    }
    faults
}

#[test]
fn every_checkpoint_directory() {
    let mut names: Vec<_> = std::fs::read_dir(fixture("models"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert!(names.len() >= 8, "{names:?}");
    let check = |name| check(&format!("models/{name}"), &format!("models/{name}/reference.safetensors"));
    let faults: Vec<_> = names.into_iter().flat_map(check).collect();
    assert!(faults.is_empty(), "{faults:#?}");
}

#[test]
fn every_gguf_file() {
    let index = std::fs::read_to_string(fixture("gguf/index.json")).unwrap();
    let index: std::collections::BTreeMap<String, String> = serde_json::from_str(&index).unwrap();
    assert!(index.len() >= 20);
    let faults: Vec<_> =
        index.into_iter().flat_map(|(file, reference)| check(&format!("gguf/{file}"), &reference)).collect();
    assert!(faults.is_empty(), "{faults:#?}");
}
