//! The forms of `--model`.

use std::path::{Path, PathBuf};

use super::HubError;

/// The hubs that are known by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hub {
    /// The layout of huggingface.co and its mirrors.
    HuggingFace,
    /// The layout of modelscope.cn.
    ModelScope,
}

/// Where a model is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSpec {
    /// A GGUF file; of a split one, its first part.
    LocalGguf(PathBuf),
    /// A folder in the Hugging Face layout.
    LocalDir(PathBuf),
    /// A repository on a hub.
    Hub {
        /// Which hub; `None` is the default one (`QWEN_HUB`, else Hugging Face).
        source: Option<Hub>,
        /// `owner/name`.
        repo: String,
        /// A branch, tag or commit; `None` is the hub's default branch.
        revision: Option<String>,
        /// A file of the repository, or a quantisation such as `Q4_K_M`.
        file: Option<String>,
    },
    /// A model that this program knows by name.
    Builtin(Builtin),
}

/// Models known by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Builtin {
    /// SmolLM2-135M-Instruct, the default.
    SmolLm2,
}

impl ModelSpec {
    /// Reads what the user wrote. What exists on disk is meant before a hub.
    pub fn parse(name: &str) -> Result<Self, HubError> {
        let refuse = |reason: &str| Err(HubError::Name { name: name.to_owned(), reason: reason.to_owned() });
        if name == "smollm2" {
            return Ok(Self::Builtin(Builtin::SmolLm2));
        }
        let path = Path::new(name);
        if path.is_dir() {
            return Ok(Self::LocalDir(path.to_owned()));
        }
        if path.is_file() {
            return Ok(Self::LocalGguf(path.to_owned()));
        }
        let (source, rest) = if let Some(rest) = name.strip_prefix("hf:") {
            (Some(Hub::HuggingFace), rest)
        } else if let Some(rest) = name.strip_prefix("ms:").or_else(|| name.strip_prefix("modelscope:")) {
            (Some(Hub::ModelScope), rest)
        } else {
            (None, name)
        };
        let looks_local = source.is_none()
            && (path.is_absolute() || name.starts_with('.') || name.starts_with('~') || name.contains('\\'));
        if looks_local {
            return refuse("no such file or folder");
        }
        let (rest, file) = split(rest, ':');
        let (repo, revision) = split(rest, '@');
        match repo.split('/').collect::<Vec<_>>()[..] {
            [owner, model] if is_name(owner) && is_name(model) => {}
            _ => return refuse("no such file or folder, and not of the form owner/name"),
        }
        if revision.is_some_and(|revision| !is_path(revision)) {
            return refuse("the revision is no branch, tag or commit");
        }
        if file.is_some_and(|file| !is_path(file)) {
            return refuse("the file is no plain relative path");
        }
        Ok(Self::Hub {
            source,
            repo: repo.to_owned(),
            revision: revision.map(str::to_owned),
            file: file.map(str::to_owned),
        })
    }
}

fn split(text: &str, at: char) -> (&str, Option<&str>) {
    text.split_once(at).map_or((text, None), |(before, after)| (before, Some(after)))
}

/// A part of a repository's name.
fn is_name(name: &str) -> bool {
    let allowed = |character: char| character.is_ascii_alphanumeric() || matches!(character, '.' | '_' | '-');
    !name.is_empty() && name.len() <= 96 && !name.starts_with('.') && name.chars().all(allowed)
}

/// A relative path of plain parts: nothing in it leaves its folder, on any system.
pub(super) fn is_path(path: &str) -> bool {
    let part = |part: &str| {
        let plain = |character: char| {
            !character.is_control() && !matches!(character, '\\' | ':' | '*' | '?' | '"' | '<' | '>' | '|')
        };
        !part.is_empty() && part != "." && part != ".." && part.len() <= 255 && part.chars().all(plain)
    };
    path.len() <= 1024 && path.split('/').all(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(source: Option<Hub>, repo: &str, revision: Option<&str>, file: Option<&str>) -> ModelSpec {
        ModelSpec::Hub {
            source,
            repo: repo.to_owned(),
            revision: revision.map(str::to_owned),
            file: file.map(str::to_owned),
        }
    }

    #[test]
    fn forms_of_a_name() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("m.gguf");
        std::fs::write(&file, "x").unwrap();
        let parse = |name: &str| ModelSpec::parse(name).unwrap();
        assert_eq!(parse("smollm2"), ModelSpec::Builtin(Builtin::SmolLm2));
        assert_eq!(parse(file.to_str().unwrap()), ModelSpec::LocalGguf(file.clone()));
        assert_eq!(parse(dir.path().to_str().unwrap()), ModelSpec::LocalDir(dir.path().to_owned()));
        assert_eq!(parse("Qwen/Qwen3-0.6B"), hub(None, "Qwen/Qwen3-0.6B", None, None));
        assert_eq!(parse("hf:a/b@v1.0:Q4_K_M"), hub(Some(Hub::HuggingFace), "a/b", Some("v1.0"), Some("Q4_K_M")));
        assert_eq!(parse("ms:a/b:x/y.gguf"), hub(Some(Hub::ModelScope), "a/b", None, Some("x/y.gguf")));
        assert_eq!(parse("a/b@refs/pr/1"), hub(None, "a/b", Some("refs/pr/1"), None));
    }

    #[test]
    fn what_is_no_name_is_refused() {
        for name in [
            "",
            "qwen",
            "./none.gguf",
            "/none/model",
            "a/b/c",
            "../a/b",
            "a/..",
            "a b/c",
            "a/b@../x",
            "a/b:../../x",
            "a/b:/x",
            "a/b:",
            "hf:a",
        ] {
            let error = ModelSpec::parse(name).unwrap_err().to_string();
            assert!(error.contains(&format!("`{name}` names no model")), "{error}");
        }
    }
}
