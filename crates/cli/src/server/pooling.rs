//! How a model's texts become vectors: what the user says, else what the model says, else the last token.
//!
//! What a model says and is not built is refused: vectors made another way look like vectors, and are of no use for a search.

use std::io::ErrorKind;
use std::path::Path;

use qwen_engine::Pooling;
use qwen_formats::Checkpoint;
use qwen_models::files::{MAX_DESCRIPTION_BYTES, read_file};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::CliError;

/// What comes after what, of sentence-transformers, beside a checkpoint in Hugging Face layout.
const MODULES: &str = "modules.json";
/// Its pooling.
const POOLING: &str = "1_Pooling/config.json";

/// A step from text to vector.
#[derive(Debug, Deserialize)]
struct Module {
    /// A class of Python, such as `sentence_transformers.models.Transformer`.
    #[serde(rename = "type")]
    class: String,
    /// Folder of what it needs.
    #[serde(default)]
    path: String,
}

/// The pooling that is wanted of a model; none: no embeddings.
///
/// # Errors
/// If the name is unknown, or the model says something that is not built.
pub(super) fn of_model(wanted: &str, path: &Path) -> Result<Option<Pooling>, CliError> {
    match wanted {
        "none" => Ok(None),
        "last" => Ok(Some(Pooling::Last)),
        "mean" => Ok(Some(Pooling::Mean)),
        "auto" => match said_by(path) {
            Ok(said) => Ok(Some(said.unwrap_or_default())),
            Err(found) => {
                let help = "give --pooling last or mean if the model suits it, or none to serve answers only";
                Err(CliError::input(path.display().to_string(), "pooling by the last token or the mean", found, help))
            }
        },
        name => {
            Err(CliError::input("--pooling", "auto, last, mean or none", name, "leave it out to have the model say it"))
        }
    }
}

/// What the model says; an error is what was found that is not built, or can't be read.
fn said_by(path: &Path) -> Result<Option<Pooling>, String> {
    modules(&described::<Vec<Module>>(path, MODULES)?.unwrap_or_default())?;
    if let Some(config) = described::<Map<String, Value>>(path, POOLING)? {
        return pooling(&config);
    }
    // What is wrong with the file is told by loading it.
    let Ok(checkpoint) = Checkpoint::open(path) else { return Ok(None) };
    let metadata = checkpoint.metadata();
    let architecture = metadata.and_then(|metadata| metadata.str("general.architecture").ok());
    let said =
        metadata.zip(architecture).and_then(|(metadata, name)| metadata.u32(&format!("{name}.pooling_type")).ok());
    match said {
        None | Some(0) => Ok(None),
        Some(1) => Ok(Some(Pooling::Mean)),
        Some(3) => Ok(Some(Pooling::Last)),
        Some(2) => Err("pooling by the first token (cls)".to_owned()),
        Some(4) => Err("a ranking model".to_owned()),
        Some(other) => Err(format!("the unknown pooling_type {other}")),
    }
}

/// A description beside the model, if there is one.
fn described<T: DeserializeOwned>(path: &Path, name: &str) -> Result<Option<T>, String> {
    match read_file(&path.join(name), MAX_DESCRIPTION_BYTES) {
        Ok(text) => {
            serde_json::from_slice(&text).map(Some).map_err(|error| format!("{name} of another form ({error})"))
        }
        // The latter is so beside a GGUF file.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        Err(error) => Err(format!("{name} that can't be read ({error})")),
    }
}

/// Looks whether the steps are those that are built: vectors always get length 1, so that one may be there or not.
fn modules(modules: &[Module]) -> Result<(), String> {
    for Module { class, path } in modules {
        match class.rsplit('.').next().unwrap_or_default() {
            "Pooling" if !["", "1_Pooling"].contains(&path.trim_end_matches('/')) => {
                return Err(format!("a pooling in {path} instead of 1_Pooling"));
            }
            "Transformer" | "Pooling" | "Normalize" => {}
            other => return Err(format!("the module {other} in {MODULES}")),
        }
    }
    Ok(())
}

/// The one pooling that a description chooses.
fn pooling(config: &Map<String, Value>) -> Result<Option<Pooling>, String> {
    let chosen = |(key, value): &(&String, &Value)| {
        key.starts_with("pooling_mode_") && !matches!(value, Value::Bool(false) | Value::Null)
    };
    let modes: Vec<&str> = config.iter().filter(chosen).map(|(key, _)| key.as_str()).collect();
    match modes.as_slice() {
        // Newer versions have its name instead.
        [] => match config.get("pooling_mode") {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(mode)) if mode == "mean" => Ok(Some(Pooling::Mean)),
            Some(Value::String(mode)) if mode == "lasttoken" => Ok(Some(Pooling::Last)),
            Some(other) => Err(format!("pooling_mode {other}")),
        },
        ["pooling_mode_mean_tokens"] => Ok(Some(Pooling::Mean)),
        ["pooling_mode_lasttoken"] => Ok(Some(Pooling::Last)),
        ["pooling_mode_cls_token"] => Err("pooling by the first token (pooling_mode_cls_token)".to_owned()),
        [other] => Err((*other).to_owned()),
        several => Err(format!("several poolings ({})", several.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_says_it_then_the_model() {
        let folder = tempfile::tempdir().unwrap();
        let of = |wanted: &str| of_model(wanted, folder.path());
        assert_eq!(of("auto").unwrap(), Some(Pooling::Last));
        assert_eq!(of("none").unwrap(), None);
        assert!(of("max").unwrap_err().to_string().contains("--pooling"));
        std::fs::create_dir(folder.path().join("1_Pooling")).unwrap();
        let say = |text: &str| std::fs::write(folder.path().join("1_Pooling/config.json"), text).unwrap();
        say(r#"{"word_embedding_dimension": 4, "pooling_mode_mean_tokens": true}"#);
        assert_eq!((of("auto").unwrap(), of("last").unwrap()), (Some(Pooling::Mean), Some(Pooling::Last)));
        say(r#"{"pooling_mode_cls_token": true}"#);
        assert!(of("auto").unwrap_err().to_string().contains("first token"));
        for (text, told) in [
            (r#"{"pooling_mode_max_tokens": true}"#, "pooling_mode_max_tokens"),
            (r#"{"pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": true}"#, "several"),
            (r#"{"pooling_mode": "max"}"#, "max"),
            (r#"{"pooling_mode_mean_tokens": tru"#, "1_Pooling/config.json"),
            ("[]", "1_Pooling/config.json"),
        ] {
            say(text);
            let error = of("auto").unwrap_err().to_string();
            assert!(error.contains(told) && error.contains("give --pooling"), "{error}");
            assert_eq!(of("last").unwrap(), Some(Pooling::Last), "the user knows better");
        }
        say(r#"{"pooling_mode_mean_tokens": false, "pooling_mode_lasttoken": true, "include_prompt": true}"#);
        assert_eq!(of("auto").unwrap(), Some(Pooling::Last));
        say(r#"{"pooling_mode": "mean"}"#);
        assert_eq!(of("auto").unwrap(), Some(Pooling::Mean));
        say(r#"{"pooling_mode_mean_tokens": false}"#);
        assert_eq!(of("auto").unwrap(), Some(Pooling::Last), "none is chosen");
        let gguf = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/gguf/llama.gguf");
        assert_eq!(of_model("auto", Path::new(gguf)).unwrap(), Some(Pooling::Last));
    }

    #[test]
    fn modules_that_are_not_built_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let of = |text: &str| {
            std::fs::write(folder.path().join(MODULES), text).unwrap();
            of_model("auto", folder.path()).map_err(|error| error.to_string())
        };
        let built = r#"[
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
        ]"#;
        assert_eq!(of(built), Ok(Some(Pooling::Last)));
        assert!(of(&built.replace("Normalize", "Dense")).unwrap_err().contains("the module Dense"));
        assert!(of(&built.replace("\"1_Pooling\"", "\"2_Pooling\"")).unwrap_err().contains("2_Pooling"));
        assert!(of("[").unwrap_err().contains(MODULES));
    }
}
