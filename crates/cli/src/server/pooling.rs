//! How a model's texts become vectors: what the user says, else what the model says, else the last token.

use std::path::Path;

use qwen_engine::Pooling;
use qwen_formats::Checkpoint;
use qwen_models::files::{MAX_DESCRIPTION_BYTES, read_file};
use serde::Deserialize;

use crate::error::CliError;

/// Pooling of sentence-transformers, beside a checkpoint in Hugging Face layout.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct SentenceTransformers {
    pooling_mode_mean_tokens: bool,
    pooling_mode_lasttoken: bool,
    pooling_mode_cls_token: bool,
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

/// What the model says; an error is the name of a pooling that is not built.
fn said_by(path: &Path) -> Result<Option<Pooling>, &'static str> {
    let text = read_file(&path.join("1_Pooling/config.json"), MAX_DESCRIPTION_BYTES).unwrap_or_default();
    if let Ok(said) = serde_json::from_slice::<SentenceTransformers>(&text) {
        return match said {
            SentenceTransformers { pooling_mode_mean_tokens: true, .. } => Ok(Some(Pooling::Mean)),
            SentenceTransformers { pooling_mode_lasttoken: true, .. } => Ok(Some(Pooling::Last)),
            SentenceTransformers { pooling_mode_cls_token: true, .. } => Err("pooling by the first token (cls)"),
            _ => Ok(None),
        };
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
        Some(2) => Err("pooling by the first token (cls)"),
        Some(_) => Err("a ranking model"),
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
        let gguf = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/gguf/llama.gguf");
        assert_eq!(of_model("auto", Path::new(gguf)).unwrap(), Some(Pooling::Last));
    }
}
