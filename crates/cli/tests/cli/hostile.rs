//! Damaged and hostile models: one sentence and exit code 1, or an answer; never a crash.

use std::path::{Path, PathBuf};

use crate::common::{fixtures, qwen};

/// Runs one token of a model. Returns the sentence, or `None` where it succeeded.
fn sentence(model: &Path) -> Option<String> {
    let mut command = qwen();
    command.args(["generate", "--prompt", "ab", "--max-tokens", "1", "--threads", "1", "--model"]);
    let output = command.arg(model).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    match output.status.code() {
        Some(0) => None,
        Some(1)
            if text.lines().count() == 1 && text.starts_with("error: ") && !text.contains("defect in this program") =>
        {
            Some(text)
        }
        code => panic!("{}: exit {code:?}: {text}", model.display()),
    }
}

fn copy(name: &str, to: &Path, edit: impl FnOnce(&mut Vec<u8>)) -> PathBuf {
    let mut bytes = std::fs::read(fixtures().join(name)).unwrap();
    edit(&mut bytes);
    let path = to.join(Path::new(name).file_name().unwrap());
    std::fs::write(&path, bytes).unwrap();
    path
}

/// A copy of a checkpoint directory.
fn copy_directory(name: &str, to: &Path) -> PathBuf {
    let target = to.join("model");
    std::fs::create_dir_all(&target).unwrap();
    for entry in std::fs::read_dir(fixtures().join(name)).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() != "reference.safetensors" {
            std::fs::copy(entry.path(), target.join(entry.file_name())).unwrap();
        }
    }
    target
}

#[test]
fn truncated_anywhere() {
    let scratch = tempfile::tempdir().unwrap();
    for part in 0..64 {
        let path = copy("gguf/qwen3.gguf", scratch.path(), |bytes| bytes.truncate(bytes.len() * part / 64));
        let text = sentence(&path).unwrap_or_else(|| panic!("{part}/64 of a file was accepted"));
        assert!(text.contains("qwen3.gguf"), "{text}");
    }
    let directory = copy_directory("models/qwen3", scratch.path());
    let whole = std::fs::read(directory.join("model.safetensors")).unwrap();
    for part in 0..64 {
        std::fs::write(directory.join("model.safetensors"), &whole[..whole.len() * part / 64]).unwrap();
        let text = sentence(&directory).unwrap_or_else(|| panic!("{part}/64 of a file was accepted"));
        assert!(text.contains("model.safetensors"), "{text}");
    }
}

#[test]
fn flipped_bits() {
    let scratch = tempfile::tempdir().unwrap();
    // Counts, keys, values and tensor places of a file lie at its beginning.
    for at in (0..24).chain((24..6000).step_by(97)) {
        let path = copy("gguf/qwen3.gguf", scratch.path(), |bytes| bytes[at] ^= 1 << (at % 8));
        sentence(&path);
    }
    let directory = copy_directory("models/deepseek_v3", scratch.path());
    let whole = std::fs::read(directory.join("config.json")).unwrap();
    for at in (0..whole.len()).step_by(29) {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 5);
        std::fs::write(directory.join("config.json"), bytes).unwrap();
        sentence(&directory);
    }
}

#[test]
fn a_shard_that_is_missing() {
    let scratch = tempfile::tempdir().unwrap();
    let directory = copy_directory("models/qwen2_moe", scratch.path());
    assert_eq!(sentence(&directory), None);
    std::fs::remove_file(directory.join("model-00002-of-00003.safetensors")).unwrap();
    assert!(sentence(&directory).unwrap().contains("model-00002-of-00003.safetensors"));
}

#[test]
fn a_template_without_end() {
    let scratch = tempfile::tempdir().unwrap();
    let directory = copy_directory("models/qwen3", scratch.path());
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
    std::fs::write(directory.join("chat_template.jinja"), endless).unwrap();
    let mut command = qwen();
    command.args(["generate", "--chat", "--prompt", "ab", "--max-tokens", "1", "--model"]).arg(&directory);
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("did not finish within"), "{text}");
}
