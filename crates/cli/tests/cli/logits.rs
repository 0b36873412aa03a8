//! `qwen-eval logits` and `qwen generate` against the reference of every fixture, in float32.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use qwen_formats::Checkpoint;
use serde_json::Value;

use crate::common::{fixtures, qwen, qwen_eval, stdout};

/// Largest difference of a logit that float32 in another order of operations explains.
const TOLERANCE: f32 = 1e-3;
/// Tokens of the reference's ids that its greedy continuation begins with.
const GREEDY_PROMPT: usize = 16;

/// A model and the file with its reference, relative to the fixtures.
struct Case {
    model: String,
    reference: PathBuf,
}

impl Case {
    fn has_latent_attention(&self) -> bool {
        self.model.contains("deepseek")
    }
}

fn cases() -> Vec<Case> {
    let folder = fixtures();
    let mut cases: Vec<Case> = std::fs::read_dir(folder.join("models"))
        .unwrap()
        .map(|entry| {
            let model = format!("models/{}", entry.unwrap().file_name().to_str().unwrap());
            Case { reference: folder.join(&model).join("reference.safetensors"), model }
        })
        .collect();
    let index: BTreeMap<String, String> =
        serde_json::from_slice(&std::fs::read(folder.join("gguf/index.json")).unwrap()).unwrap();
    cases.extend(
        index.iter().map(|(file, reference)| Case { model: format!("gguf/{file}"), reference: folder.join(reference) }),
    );
    assert!(cases.len() > 30);
    cases
}

fn read_i32(path: &Path, name: &str) -> Vec<i32> {
    let checkpoint = Checkpoint::open(path).unwrap();
    let (chunks, _) = checkpoint.tensor(name).unwrap().data.as_chunks::<4>();
    chunks.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect()
}

fn read_logits(path: &Path) -> (Vec<u64>, Vec<f32>) {
    let checkpoint = Checkpoint::open(path).unwrap();
    let view = checkpoint.tensor("logits").unwrap();
    let (chunks, _) = view.data.as_chunks::<4>();
    (view.shape.to_vec(), chunks.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

fn joined(ids: &[i32]) -> String {
    ids.iter().map(i32::to_string).collect::<Vec<_>>().join(",")
}

/// Largest difference from the reference, or what the program said.
fn difference(case: &Case, arguments: &[&str]) -> Result<f32, String> {
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("logits.safetensors");
    let tokens = joined(&read_i32(&case.reference, "input_ids"));
    let mut command = qwen_eval();
    command.args(["logits", "--model", &case.model, "--precision", "exact", "--tokens", &tokens, "--output"]);
    let told = command.arg(&output).args(arguments).output().unwrap();
    if !told.status.success() {
        return Err(String::from_utf8_lossy(&told.stderr).into_owned());
    }
    let (expected, found) = (read_logits(&case.reference), read_logits(&output));
    assert_eq!(expected.0, found.0, "{}", case.model);
    let differences = expected.1.iter().zip(&found.1).map(|(a, b)| (a - b).abs());
    Ok(differences.fold(0.0, |a, b| if b > a || b.is_nan() { b } else { a }))
}

fn check(arguments: &[&str], wanted: impl Fn(&Case) -> bool) {
    let mut wrong = Vec::new();
    for case in cases().into_iter().filter(wanted) {
        match difference(&case, arguments) {
            Ok(difference) if difference <= TOLERANCE => {}
            other => wrong.push(format!("{} {other:?}", case.model)),
        }
    }
    assert!(wrong.is_empty(), "{arguments:?}: {wrong:#?}");
}

#[test]
fn one_prompt() {
    check(&[], |_| true);
}

#[test]
fn a_prompt_in_small_pieces() {
    check(&["--prefill-chunk-size", "7", "--threads", "1"], |_| true);
}

#[test]
fn token_by_token() {
    check(&["--decode"], |_| true);
}

#[test]
fn both_forms_of_latent_attention() {
    for form in ["expanded", "absorbed"] {
        check(&["--mla-form", form], Case::has_latent_attention);
        check(&["--mla-form", form, "--decode"], Case::has_latent_attention);
    }
}

/// A prompt of ids can't be given as text, so the continuation is that of one token after another.
#[test]
fn greedy_continuations() {
    let mut wrong = Vec::new();
    for case in cases() {
        let mut ids = read_i32(&case.reference, "input_ids");
        ids.truncate(GREEDY_PROMPT);
        let greedy = read_i32(&case.reference, "greedy");
        let directory = tempfile::tempdir().unwrap();
        let output = directory.path().join("logits.safetensors");
        let tokens = joined(&[&ids[..], &greedy[..greedy.len() - 1]].concat());
        let mut command = qwen_eval();
        command.args(["logits", "--model", &case.model, "--precision", "exact", "--tokens", &tokens, "--output"]);
        let told = command.arg(&output).arg("--decode").output().unwrap();
        if !told.status.success() {
            wrong.push(format!("{}: {}", case.model, String::from_utf8_lossy(&told.stderr)));
            continue;
        }
        let (shape, logits) = read_logits(&output);
        let rows: Vec<&[f32]> = logits.chunks_exact(usize::try_from(shape[1]).unwrap()).collect();
        let found: Vec<i32> = rows[GREEDY_PROMPT - 1..].iter().map(|row| best(row)).collect();
        if found != greedy {
            wrong.push(format!("{}: {found:?}, expected {greedy:?}", case.model));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn best(row: &[f32]) -> i32 {
    let at = row.iter().enumerate().reduce(|a, b| if b.1 > a.1 { b } else { a }).unwrap().0;
    i32::try_from(at).unwrap()
}

/// The engine's own loop, with sampling and cache, agrees with the logits of the same text.
#[test]
fn generation_takes_the_best_token_of_those_logits() {
    let text = stdout(qwen().args([
        "generate",
        "--model",
        "models/qwen3",
        "--prompt",
        "Some words to begin with",
        "--precision",
        "exact",
        "--max-tokens",
        "12",
        "--ignore-eos",
        "--json",
        "--logprobs",
        "2",
    ]));
    let answer: Value = serde_json::from_str(&text).unwrap();
    let tokens: Vec<i32> =
        answer["tokens"].as_array().unwrap().iter().map(|id| i32::try_from(id.as_i64().unwrap()).unwrap()).collect();
    let prompt =
        stdout(qwen().args(["tokenize", "--model", "models/qwen3", "--text", "Some words to begin with", "--json"]));
    let prompt: Value = serde_json::from_str(&prompt).unwrap();
    let mut ids: Vec<i32> =
        prompt["ids"].as_array().unwrap().iter().map(|id| i32::try_from(id.as_i64().unwrap()).unwrap()).collect();
    let start = ids.len() - 1;
    ids.extend(&tokens[..tokens.len() - 1]);
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("logits.safetensors");
    let mut command = qwen_eval();
    command.args(["logits", "--model", "models/qwen3", "--precision", "exact", "--tokens", &joined(&ids), "--output"]);
    stdout(command.arg(&output));
    let (shape, logits) = read_logits(&output);
    let found: Vec<i32> = logits.chunks_exact(usize::try_from(shape[1]).unwrap()).skip(start).map(best).collect();
    assert_eq!(found, tokens);
    let logprobs = answer["logprobs"].as_array().unwrap();
    assert_eq!(logprobs.len(), 12);
    assert!(logprobs.iter().all(|entry| entry["id"] == entry["top"][0]["id"] && entry["top"][1]["logprob"].is_f64()));
}
