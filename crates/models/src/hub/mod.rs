//! From a model's name to files on disk.
//!
//! In: what the user wrote after `--model`. Out: a path to open. Repositories on hubs are fetched
//! into a cache and used from there. Invariants: a file in the cache has the length and SHA-256
//! that its hub listed; nothing is written outside the cache, whatever a hub calls its files; a
//! token is sent to its own hub only.

mod builtin;
mod download;
mod error;
mod http;
mod select;
mod source;
mod spec;

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use builtin::{builtin_path, fetch_builtin};
pub use download::{DownloadOptions, Progress, available_space, download};
pub use error::HubError;
pub use http::Client;
pub use select::{Selection, select_files};
pub use source::{HubSource, HuggingFace, Listing, ModelScope, RemoteFile};
pub use spec::{Builtin, Hub, ModelSpec};

/// The folder for fetched models: `QWEN_CACHE`, else `qwen-inference` in the user's cache folder.
#[must_use]
pub fn cache_dir() -> PathBuf {
    let set = |variable: &str| std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("QWEN_CACHE").unwrap_or_else(|| {
        let cache = set("XDG_CACHE_HOME").filter(|path| path.is_absolute());
        let home = || set("HOME").map(|home| home.join(".cache"));
        cache.or_else(home).unwrap_or_else(std::env::temp_dir).join("qwen-inference")
    })
}

/// The hub that is meant, as the environment configures it. `QWEN_HUB=modelscope` changes the
/// default.
#[must_use]
pub fn source_from_env(hub: Option<Hub>) -> Box<dyn HubSource> {
    let default = || match std::env::var("QWEN_HUB").as_deref() {
        Ok("modelscope" | "ms") => Hub::ModelScope,
        _ => Hub::HuggingFace,
    };
    match hub.unwrap_or_else(default) {
        Hub::HuggingFace => Box::new(HuggingFace::from_env()),
        Hub::ModelScope => Box::new(ModelScope::from_env()),
    }
}

/// The path to open for a model, fetched first where it must be.
pub fn resolve(spec: &ModelSpec, cache: &Path, options: &mut DownloadOptions<'_>) -> Result<PathBuf, HubError> {
    match spec {
        ModelSpec::LocalGguf(path) | ModelSpec::LocalDir(path) => Ok(path.clone()),
        ModelSpec::Builtin(builtin) => fetch_builtin(*builtin, cache, options),
        ModelSpec::Hub { source, repo, revision, file } => {
            let source = source_from_env(*source);
            let wanted = Wanted { repo, revision: revision.as_deref(), file: file.as_deref(), refresh: false };
            fetch_repository(&Client::new(), source.as_ref(), &wanted, cache, options)
        }
    }
}

/// What is wanted of a hub.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// `owner/name`.
    pub repo: &'a str,
    /// A branch, tag or commit.
    pub revision: Option<&'a str>,
    /// A file or a quantisation.
    pub file: Option<&'a str>,
    /// Ask the hub again although the cache has an answer.
    pub refresh: bool,
}

/// What the cache holds of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cached {
    /// The name that fetches it, as `owner/name@revision:file`.
    pub name: String,
    /// The hub.
    pub source: String,
    /// What to open, relative to the cache.
    entry: String,
    /// Its files, relative to the cache, with their lengths.
    files: Vec<(String, u64)>,
}

impl Cached {
    /// What to open.
    #[must_use]
    pub fn path(&self, cache: &Path) -> PathBuf {
        cache.join(&self.entry)
    }

    /// Length of all files.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|(_, bytes)| bytes).fold(0, |sum, &bytes| sum.saturating_add(bytes))
    }

    fn is_whole(&self, cache: &Path) -> bool {
        let whole =
            |(path, bytes): &(String, u64)| fs::metadata(cache.join(path)).is_ok_and(|found| found.len() == *bytes);
        self.files.iter().all(whole)
    }
}

/// Fetches a model of a hub, unless the cache has it, and gives the path to open.
pub fn fetch_repository(
    client: &Client,
    source: &dyn HubSource,
    wanted: &Wanted<'_>,
    cache: &Path,
    options: &mut DownloadOptions<'_>,
) -> Result<PathBuf, HubError> {
    let revision = wanted.revision.unwrap_or_else(|| source.default_revision());
    let manifest = manifest_path(cache, source, wanted, revision);
    if let Some(cached) = read_manifest(&manifest).filter(|cached| !wanted.refresh && cached.is_whole(cache)) {
        return Ok(cached.path(cache));
    }
    let listing = source.list_files(client, wanted.repo, revision)?;
    if !spec::is_path(&listing.revision) {
        return Err(HubError::HostileName { repo: wanted.repo.to_owned(), name: listing.revision });
    }
    let selection = select_files(wanted.repo, &listing.files, wanted.file)?;
    let folder = format!("hub/{}/{}/{}", source.name(), flat(wanted.repo), flat(&listing.revision));
    let dir = cache.join(&folder);
    download(client, source, wanted.repo, &listing.revision, &selection.files, &dir, options)?;
    let length = |file: &RemoteFile| {
        let path = dir.join(&file.path);
        let found = fs::metadata(&path).map_err(HubError::io(&path, "look at"))?;
        Ok((format!("{folder}/{}", file.path), found.len()))
    };
    let cached = Cached {
        name: full_name(wanted, revision),
        source: source.name().to_owned(),
        entry: selection.entry.map_or_else(|| folder.clone(), |entry| format!("{folder}/{entry}")),
        files: selection.files.iter().map(length).collect::<Result<_, HubError>>()?,
    };
    write_manifest(&manifest, &cached)?;
    Ok(cached.path(cache))
}

/// The models in a cache.
#[must_use]
pub fn list_cached(cache: &Path) -> Vec<Cached> {
    let entries = fs::read_dir(cache.join("manifests")).into_iter().flatten().flatten();
    let cached = entries.filter_map(|entry| read_manifest(&entry.path()));
    let mut cached: Vec<_> = cached.filter(|cached| cached.is_whole(cache)).collect();
    cached.sort_by(|a, b| a.name.cmp(&b.name));
    cached
}

fn full_name(wanted: &Wanted<'_>, revision: &str) -> String {
    let file = wanted.file.map(|file| format!(":{file}")).unwrap_or_default();
    format!("{}@{revision}{file}", wanted.repo)
}

/// One path component that stands for a name with slashes; different names stay different.
fn flat(name: &str) -> String {
    name.replace('%', "%25").replace('/', "--")
}

fn manifest_path(cache: &Path, source: &dyn HubSource, wanted: &Wanted<'_>, revision: &str) -> PathBuf {
    let name = format!("{}+{}.json", source.name(), http::encode(&full_name(wanted, revision), "@"));
    cache.join("manifests").join(name)
}

fn read_manifest(path: &Path) -> Option<Cached> {
    let cached: Cached = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    let inside = cached.files.iter().map(|(path, _)| path).chain([&cached.entry]).all(|path| spec::is_path(path));
    inside.then_some(cached)
}

fn write_manifest(path: &Path, cached: &Cached) -> Result<(), HubError> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).map_err(HubError::io(folder, "create the folder"))?;
    let text = serde_json::to_vec_pretty(cached).map_err(|error| HubError::io(path, "write")(error.into()))?;
    let part = path.with_extension("json.part");
    fs::write(&part, text).map_err(HubError::io(&part, "write"))?;
    fs::rename(&part, path).map_err(HubError::io(path, "rename the finished file"))
}
