//! `qwen-compile`: what it writes gives the same bits as its source, and what is wrong with it is told in one sentence.

use std::path::{Path, PathBuf};

use qwen_formats::Checkpoint;
use qwen_models::synth::{self, Experts, Latent, Mix, SHAPES, Shape};
use serde_json::Value;

use crate::common::{fixtures, qwen, qwen_bench, qwen_compile, qwen_eval, stdout, transcript};

fn compile(model: &Path, output: &Path) -> Value {
    let mut command = qwen_compile();
    command.args(["--target", "cpu", "--json", "--model"]).arg(model).arg("--output").arg(output);
    serde_json::from_str(&stdout(&mut command)).unwrap()
}

/// Bytes of the logits of a few tokens.
fn logits(model: &Path, arguments: &[&str]) -> Vec<u8> {
    let scratch = tempfile::tempdir().unwrap();
    let output = scratch.path().join("logits.safetensors");
    let mut command = qwen_eval();
    command.args(["logits", "--tokens", "1,5,9,200,17,3,3,250", "--threads", "2", "--model"]).arg(model);
    stdout(command.args(arguments).arg("--output").arg(&output));
    let checkpoint = Checkpoint::open(&output).unwrap();
    checkpoint.tensor("logits").unwrap().data.to_vec()
}

/// A shape with the structure of another and sizes that a test can afford.
fn small(shape: &Shape) -> Shape {
    let experts = shape.experts.map(|experts| Experts { count: 16, chosen: 2, feed_forward: 96, ..experts });
    let latent = shape.latent.map(|latent| Latent { query_rank: 64, rank: 64, nope_dim: 32, value_dim: 32, ..latent });
    let head_dim = if latent.is_some() { 96 } else { 32 };
    let kv_heads = if latent.is_some() { 4 } else { 2 };
    // Rows that are no whole panels.
    let (hidden, feed_forward, vocabulary) = (256, 328, 300);
    let small = Shape { hidden, heads: 4, kv_heads, head_dim, feed_forward, vocabulary, experts, latent, ..*shape };
    small.with_layers(5.min(shape.layers))
}

fn made_up(shape: &Shape, mix: &str, folder: &Path) -> PathBuf {
    let mut bytes = Vec::new();
    synth::write(&small(shape), Mix::named(mix).unwrap(), 1, &mut bytes, &mut |_, _| {}).unwrap();
    let path = folder.join(format!("{}.{mix}.gguf", shape.name));
    std::fs::write(&path, bytes).unwrap();
    path
}

fn quantised(folder: &Path) -> PathBuf {
    let shape = SHAPES.iter().find(|shape| shape.tied).unwrap();
    made_up(shape, "q4_0", folder)
}

fn fixture_models() -> Vec<PathBuf> {
    let index = std::fs::read(fixtures().join("gguf/index.json")).unwrap();
    let index: std::collections::BTreeMap<String, String> = serde_json::from_slice(&index).unwrap();
    index.keys().map(|name| fixtures().join("gguf").join(name)).collect()
}

fn check_same_bits(model: &Path, scratch: &Path) -> Value {
    let output = scratch.join("compiled.gguf");
    let report = compile(model, &output);
    let latent = model.to_string_lossy().contains("deepseek");
    let forms: &[&[&str]] =
        if latent { &[&[], &["--mla-form", "expanded"], &["--mla-form", "absorbed"]] } else { &[&[]] };
    for form in forms {
        for precision in ["fast", "balanced", "exact"] {
            for more in [&[][..], &["--decode"], &["--prefill-chunk-size", "3"]] {
                let arguments = [&["--precision", precision], *form, more].concat();
                let same = logits(model, &arguments) == logits(&output, &arguments);
                assert!(same, "{} differs with {arguments:?}", model.display());
            }
        }
    }
    report
}

#[test]
fn every_fixture_gives_the_same_bits() {
    let scratch = tempfile::tempdir().unwrap();
    for model in fixture_models() {
        check_same_bits(&model, scratch.path());
    }
}

/// Families, experts, latent attention, tied tables, biases, with quantised weights.
#[test]
fn made_up_models_give_the_same_bits() {
    let scratch = tempfile::tempdir().unwrap();
    for (index, shape) in SHAPES.iter().enumerate() {
        let mix = ["q4_k_m", "q4_0", "q8_0"][index % 3];
        let report = check_same_bits(&made_up(shape, mix, scratch.path()), scratch.path());
        assert!(report["packed"].as_u64().unwrap() > 20, "{}: {report}", shape.name);
    }
}

#[test]
fn the_same_source_gives_the_same_bytes() {
    let scratch = tempfile::tempdir().unwrap();
    let model = quantised(scratch.path());
    let bytes = |threads: &str| {
        let output = scratch.path().join("out.gguf");
        stdout(qwen_compile().args(["--threads", threads, "--model"]).arg(&model).arg("--output").arg(&output));
        std::fs::read(output).unwrap()
    };
    assert!(bytes("1") == bytes("3"));
}

/// A table that is looked up and multiplied is there twice; every other weight once.
#[test]
fn weights_are_held_in_the_forms_that_are_used() {
    let scratch = tempfile::tempdir().unwrap();
    let (model, output) = (quantised(scratch.path()), scratch.path().join("out.gguf"));
    compile(&model, &output);
    let (source, compiled) = (Checkpoint::open(&model).unwrap(), Checkpoint::open(&output).unwrap());
    let packed = compiled.packed().unwrap();
    assert_eq!(packed.backend(), "cpu");
    assert!(compiled.info("token_embd.weight").is_some());
    let table = source.info("token_embd.weight").unwrap();
    assert!(packed.weights().iter().any(|weight| weight.shape == table.shape && weight.dtype == table.dtype));
    let quantised = source.tensors().filter(|tensor| tensor.dtype.is_block_quantised()).count();
    assert_eq!(packed.weights().len(), quantised);
    assert!(compiled.info("blk.0.attn_q.weight").is_none());
    assert!(packed.absent_tensor("blk.0.attn_q.weight").is_some());
    let mut declared: Vec<_> = compiled.declared().collect();
    declared.sort_unstable();
    assert!(declared.into_iter().eq(source.declared()));
}

#[test]
fn other_programs_take_it_like_any_model() {
    let scratch = tempfile::tempdir().unwrap();
    let (model, output) = (quantised(scratch.path()), scratch.path().join("out.gguf"));
    compile(&model, &output);
    let both = |run: &dyn Fn(&Path) -> String| (run(&model), run(&output));
    let (source, compiled) = both(&|model| {
        stdout(
            qwen().args(["generate", "--prompt", "Hello", "--max-tokens", "8", "--ignore-eos", "--model"]).arg(model),
        )
    });
    assert_eq!(source, compiled);
    let (source, compiled) = both(&|model| stdout(qwen().args(["tokenize", "--text", "a b", "--model"]).arg(model)));
    assert_eq!(source, compiled);
    let (source, compiled) = both(&|model| stdout(qwen().args(["models", "inspect", "--json"]).arg(model)));
    let [source, compiled] = [source, compiled].map(|text| serde_json::from_str::<Value>(&text).unwrap());
    for key in ["architecture", "parameters", "weight_bytes", "quantization", "cache"] {
        assert_eq!(source[key], compiled[key], "{key}");
    }
    let mut bench = qwen_bench();
    bench.args(["throughput", "--no-limits", "--prompt", "4", "--generate", "2", "--json", "--model"]);
    stdout(bench.arg(&output));
}

#[test]
fn what_cannot_be_compiled() {
    let scratch = tempfile::tempdir().unwrap();
    let (model, output) = (quantised(scratch.path()), scratch.path().join("out.gguf"));
    compile(&model, &output);
    let told = |model: &Path, output: &Path| {
        let text = transcript(qwen_compile().arg("--model").arg(model).arg("--output").arg(output));
        text.replace(scratch.path().to_str().unwrap(), "DIR")
    };
    let other = scratch.path().join("other.gguf");
    insta::assert_snapshot!("compile_safetensors", told(Path::new("models/qwen2"), &other));
    insta::assert_snapshot!("compile_compiled", told(&output, &other));
    insta::assert_snapshot!("compile_itself", told(&model, &model));
    insta::assert_snapshot!("compile_folder", told(&model, &scratch.path().join("absent/x.gguf")));
    assert!(!other.exists() && std::fs::read_dir(scratch.path()).unwrap().count() == 2);
}

/// Runs one token; the sentence of a failure, `None` if there is none.
fn sentence(model: &Path) -> Option<String> {
    let mut command = qwen();
    command.args(["generate", "--prompt", "ab", "--max-tokens", "1", "--threads", "1", "--model"]);
    let output = command.arg(model).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    match output.status.code() {
        Some(0) => None,
        Some(1) if text.lines().count() == 1 && !text.contains("defect in this program") => Some(text),
        code => panic!("{}: exit {code:?}: {text}", model.display()),
    }
}

/// Where the values of an array of numbers begin.
fn array_at(bytes: &[u8], key: &str) -> usize {
    let at = bytes.windows(key.len()).position(|text| text == key.as_bytes()).unwrap();
    // Type, type of the items, number of items.
    at + key.len() + 4 + 4 + 8
}

#[test]
fn made_for_another_device() {
    let scratch = tempfile::tempdir().unwrap();
    let (model, output) = (quantised(scratch.path()), scratch.path().join("out.gguf"));
    compile(&model, &output);
    let whole = std::fs::read(&output).unwrap();
    let told = |edit: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = whole.clone();
        edit(&mut bytes);
        std::fs::write(&output, bytes).unwrap();
        sentence(&output).unwrap().replace(scratch.path().to_str().unwrap(), "DIR")
    };
    let at = |key: &str| array_at(&whole, key);
    insta::assert_snapshot!(
        "compiled_backend",
        told(&|bytes| {
            let key = b"qwen.packed.backend";
            let at = bytes.windows(key.len()).position(|text| text == key).unwrap() + key.len() + 4 + 8;
            bytes[at..at + 3].copy_from_slice(b"npu");
        })
    );
    insta::assert_snapshot!(
        "compiled_form",
        told(&|bytes| {
            let at = at("qwen.packed.weight.layouts");
            bytes[at + 2] += 1;
        })
    );
    insta::assert_snapshot!(
        "compiled_type",
        told(&|bytes| {
            let at = at("qwen.packed.weight.types");
            assert_eq!(bytes[at], 2);
            bytes[at] = 20;
        })
    );
    insta::assert_snapshot!(
        "compiled_version",
        told(&|bytes| {
            let key = b"qwen.packed.version";
            let at = bytes.windows(key.len()).position(|text| text == key).unwrap() + key.len() + 4;
            bytes[at] = 9;
        })
    );
    insta::assert_snapshot!(
        "compiled_size",
        told(&|bytes| {
            // One byte less than the form has.
            let at = bytes.windows(8).position(|text| text == b"packed.0").unwrap() + 8 + 4;
            let size = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
            bytes[at..at + 8].copy_from_slice(&(size - 1).to_le_bytes());
        })
    );
}

#[test]
fn damaged_files() {
    let scratch = tempfile::tempdir().unwrap();
    let (model, output) = (quantised(scratch.path()), scratch.path().join("out.gguf"));
    compile(&model, &output);
    let whole = std::fs::read(&output).unwrap();
    for part in 0..24 {
        std::fs::write(&output, &whole[..whole.len() * part / 24]).unwrap();
        assert!(sentence(&output).is_some(), "{part}/24 of a file was accepted");
    }
    // The description of the packed weights, then the places of tensors.
    let start = whole.windows(12).position(|text| text == b"qwen.packed.").unwrap();
    let end = whole.windows(8).rposition(|text| text == b"packed.3").unwrap() + 60;
    for at in (start..end).step_by(31) {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        std::fs::write(&output, bytes).unwrap();
        sentence(&output);
    }
}
