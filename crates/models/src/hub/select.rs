//! Which files of a repository make a model.

use super::{HubError, RemoteFile};

/// Small files of a model in the Hugging Face layout.
const SMALL_FILES: &[&str] = &[
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "model.safetensors.index.json",
    // How texts become vectors, of sentence-transformers.
    "modules.json",
    "1_Pooling/config.json",
];

/// What is taken where a repository has several quantisations and none was named.
const PREFERRED: &[&str] = &["Q4_K_M", "Q8_0", "Q4_0"];

/// The files to fetch, and what to open of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selection {
    /// The files.
    pub files: Vec<RemoteFile>,
    /// The file to open; `None` is the folder.
    pub entry: Option<String>,
}

/// Chooses from `files`: the file or quantisation `wanted`, else weights in safetensors with what
/// belongs to them, else one GGUF model.
pub fn select_files(repo: &str, files: &[RemoteFile], wanted: Option<&str>) -> Result<Selection, HubError> {
    let models = gguf_models(files);
    if let Some(wanted) = wanted {
        return named(repo, files, &models, wanted);
    }
    let weights: Vec<_> = files.iter().filter(|file| is_weights(&file.path)).collect();
    if !weights.is_empty() {
        let small = files.iter().filter(|file| SMALL_FILES.contains(&file.path.as_str()));
        return Ok(Selection { files: small.chain(weights).cloned().collect(), entry: None });
    }
    match &models[..] {
        [] => Err(HubError::NothingFits {
            repo: repo.to_owned(),
            wanted: "model in safetensors or GGUF".to_owned(),
            found: list(files.iter().map(|file| file.path.as_str())),
        }),
        [model] => Ok(selection(model)),
        _ => {
            let preferred = PREFERRED.iter().find_map(|name| {
                let mut fitting = models.iter().filter(|model| has_quantisation(model, name));
                fitting.next().filter(|_| fitting.next().is_none())
            });
            preferred
                .map(|model| selection(model))
                .ok_or_else(|| nothing(repo, "default among its GGUF models", &models))
        }
    }
}

/// The parts of one GGUF model, in order.
type Model<'a> = Vec<&'a RemoteFile>;

fn named(repo: &str, files: &[RemoteFile], models: &[Model<'_>], wanted: &str) -> Result<Selection, HubError> {
    if let Some(model) = models.iter().find(|model| model.iter().any(|file| file.path == wanted)) {
        return Ok(selection(model));
    }
    if let Some(file) = files.iter().find(|file| file.path == wanted) {
        return Ok(selection(&vec![file]));
    }
    let fitting: Vec<_> = models.iter().filter(|model| has_quantisation(model, wanted)).collect();
    match fitting[..] {
        [model] => Ok(selection(model)),
        [] => Err(nothing(repo, &format!("file or quantisation `{wanted}`"), models)),
        _ => {
            let fitting: Vec<Model<'_>> = fitting.into_iter().cloned().collect();
            Err(nothing(repo, &format!("single model that `{wanted}` means"), &fitting))
        }
    }
}

fn selection(model: &Model<'_>) -> Selection {
    Selection { files: model.iter().copied().cloned().collect(), entry: model.first().map(|file| file.path.clone()) }
}

fn nothing(repo: &str, wanted: &str, models: &[Model<'_>]) -> HubError {
    let names = models.iter().filter_map(|model| model.first()).map(|file| file.path.as_str());
    HubError::NothingFits { repo: repo.to_owned(), wanted: wanted.to_owned(), found: list(names) }
}

/// Some names in a sentence.
fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    const SHOWN: usize = 12;
    let names: Vec<_> = names.collect();
    let mut text = names.iter().take(SHOWN).copied().collect::<Vec<_>>().join(", ");
    if names.is_empty() {
        text.push_str("none");
    } else if names.len() > SHOWN {
        text.push_str(&format!(" and {} more", names.len() - SHOWN));
    }
    text
}

/// Weights at the top level, not the copies that some publishers add.
fn is_weights(path: &str) -> bool {
    path.ends_with(".safetensors") && !path.contains('/') && !path.starts_with("consolidated")
}

/// GGUF models; the parts of a split one together.
fn gguf_models(files: &[RemoteFile]) -> Vec<Model<'_>> {
    let mut models: Vec<(&str, Model<'_>)> = Vec::new();
    for file in files.iter().filter(|file| is_gguf_model(&file.path)) {
        let key = split_stem(&file.path).unwrap_or(&file.path);
        match models.iter_mut().find(|(other, _)| *other == key) {
            Some((_, parts)) => parts.push(file),
            None => models.push((key, vec![file])),
        }
    }
    for (_, parts) in &mut models {
        parts.sort_by(|a, b| a.path.cmp(&b.path));
    }
    models.into_iter().map(|(_, parts)| parts).collect()
}

/// Files for pictures and for quantisers lie beside the models.
fn is_gguf_model(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase();
    name.ends_with(".gguf") && !name.starts_with("mmproj") && !name.contains("imatrix")
}

/// What the parts of a split file have in common: the name before `-00001-of-00005.gguf`.
fn split_stem(path: &str) -> Option<&str> {
    let (stem, total) = path.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, number) = stem.rsplit_once('-')?;
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    (digits(number) && digits(total)).then_some(stem)
}

/// Whether a quantisation stands in the name, or in the folder's, as a word.
fn has_quantisation(model: &Model<'_>, wanted: &str) -> bool {
    let Some(path) = model.first().map(|file| file.path.to_ascii_lowercase()) else { return false };
    let wanted = wanted.to_ascii_lowercase();
    let is_word = |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric() || *byte == b'_');
    path.match_indices(&wanted).any(|(at, _)| {
        let bytes = path.as_bytes();
        !is_word(at.checked_sub(1).and_then(|before| bytes.get(before))) && !is_word(bytes.get(at + wanted.len()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(paths: &[&str]) -> Vec<RemoteFile> {
        paths.iter().map(|&path| RemoteFile { path: path.to_owned(), size: None, sha256: None }).collect()
    }

    fn chosen(paths: &[&str], wanted: Option<&str>) -> Result<(Vec<String>, Option<String>), String> {
        select_files("a/b", &files(paths), wanted)
            .map(|selection| (selection.files.into_iter().map(|file| file.path).collect(), selection.entry))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn safetensors_with_what_belongs_to_them() {
        let paths = [
            "README.md",
            "config.json",
            "tokenizer.json",
            "model-1.safetensors",
            "consolidated.safetensors",
            "pytorch_model.bin",
            "original/x.safetensors",
            "modules.json",
            "1_Pooling/config.json",
            "2_Dense/config.json",
        ];
        let expected =
            ["config.json", "tokenizer.json", "modules.json", "1_Pooling/config.json", "model-1.safetensors"];
        let expected = expected.map(str::to_owned).to_vec();
        assert_eq!(chosen(&paths, None), Ok((expected, None)));
    }

    #[test]
    fn one_gguf_by_quantisation_by_name_or_by_default() {
        let paths = [
            "m-Q4_K_M.gguf",
            "m-Q4_K_S.gguf",
            "m-IQ4_K_M.gguf",
            "mmproj-f16.gguf",
            "big/m-Q8_0-00002-of-00002.gguf",
            "big/m-Q8_0-00001-of-00002.gguf",
        ];
        let one = |path: &str| Ok((vec![path.to_owned()], Some(path.to_owned())));
        assert_eq!(chosen(&paths, None), one("m-Q4_K_M.gguf"));
        assert_eq!(chosen(&paths, Some("q4_k_s")), one("m-Q4_K_S.gguf"));
        assert_eq!(chosen(&paths, Some("m-IQ4_K_M.gguf")), one("m-IQ4_K_M.gguf"));
        let split = ["big/m-Q8_0-00001-of-00002.gguf", "big/m-Q8_0-00002-of-00002.gguf"].map(str::to_owned);
        assert_eq!(chosen(&paths, Some("Q8_0")), Ok((split.to_vec(), Some(split[0].clone()))));
        let error = chosen(&paths, Some("Q2_K")).unwrap_err();
        assert!(
            error.starts_with("a/b has no file or quantisation `Q2_K`; it has m-Q4_K_M.gguf, m-Q4_K_S.gguf"),
            "{error}"
        );
        assert!(chosen(&["a-F16.gguf", "b-F16.gguf"], None).unwrap_err().contains("a-F16.gguf, b-F16.gguf"));
        assert!(chosen(&["pytorch_model.bin"], None).unwrap_err().contains("no model in safetensors or GGUF"));
    }
}
