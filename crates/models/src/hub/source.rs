//! Hubs: how each lists the files of a repository and where it serves them.

use serde::Deserialize;

use super::HubError;
use super::http::{Client, encode};

/// A file of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteFile {
    /// Its path in the repository.
    pub path: String,
    /// Its length in bytes, where the hub says.
    pub size: Option<u64>,
    /// Its SHA-256 in hexadecimal, where the hub says.
    pub sha256: Option<String>,
}

/// The files of one revision of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    /// What the revision is called for good: a commit where the hub names it.
    pub revision: String,
    /// Its files.
    pub files: Vec<RemoteFile>,
}

/// A place that serves models.
pub trait HubSource: std::fmt::Debug + Send + Sync {
    /// A short name, used in the cache.
    fn name(&self) -> &'static str;

    /// The branch that is meant where none is named.
    fn default_revision(&self) -> &'static str;

    /// The files of a revision.
    fn list_files(&self, client: &Client, repo: &str, revision: &str) -> Result<Listing, HubError>;

    /// Where a file is served. `path` is a path from the listing.
    fn file_url(&self, repo: &str, revision: &str, path: &str) -> String;

    /// A token to send with requests to this hub, and to no other host.
    fn token(&self) -> Option<&str>;
}

/// Repositories in the layout of huggingface.co.
#[derive(Clone)]
pub struct HuggingFace {
    endpoint: String,
    token: Option<String>,
}

impl std::fmt::Debug for HuggingFace {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The token stays out of logs.
        formatter.debug_struct("HuggingFace").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

impl HuggingFace {
    /// A hub at `endpoint`.
    #[must_use]
    pub fn new(endpoint: &str, token: Option<String>) -> Self {
        Self { endpoint: endpoint.trim_end_matches('/').to_owned(), token }
    }

    /// As the environment says: `QWEN_HUB_ENDPOINT` or `HF_ENDPOINT`, and `HF_TOKEN`.
    #[must_use]
    pub fn from_env() -> Self {
        let endpoint = endpoint(&["QWEN_HUB_ENDPOINT", "HF_ENDPOINT"], "https://huggingface.co");
        Self::new(&endpoint, std::env::var("HF_TOKEN").ok().filter(|token| !token.is_empty()))
    }
}

#[derive(Deserialize)]
struct HuggingFaceAnswer {
    sha: Option<String>,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
    size: Option<u64>,
}

impl HubSource for HuggingFace {
    fn name(&self) -> &'static str {
        "huggingface"
    }

    fn default_revision(&self) -> &'static str {
        "main"
    }

    fn list_files(&self, client: &Client, repo: &str, revision: &str) -> Result<Listing, HubError> {
        let url = format!("{}/api/models/{repo}/revision/{}?blobs=true", self.endpoint, encode(revision, ""));
        let answer: HuggingFaceAnswer = client.json(&url, self.token())?;
        let files = answer.siblings.into_iter().map(|sibling| {
            let (lfs_size, sha256) = sibling.lfs.map_or((None, None), |lfs| (lfs.size, lfs.sha256));
            RemoteFile { path: sibling.rfilename, size: sibling.size.or(lfs_size), sha256 }
        });
        Ok(Listing { revision: answer.sha.unwrap_or_else(|| revision.to_owned()), files: files.collect() })
    }

    fn file_url(&self, repo: &str, revision: &str, path: &str) -> String {
        format!("{}/{repo}/resolve/{}/{}", self.endpoint, encode(revision, ""), encode(path, "/"))
    }

    fn token(&self) -> Option<&str> {
        self.token.as_deref()
    }
}

/// Repositories in the layout of modelscope.cn.
#[derive(Debug, Clone)]
pub struct ModelScope {
    endpoint: String,
}

impl ModelScope {
    /// A hub at `endpoint`.
    #[must_use]
    pub fn new(endpoint: &str) -> Self {
        Self { endpoint: endpoint.trim_end_matches('/').to_owned() }
    }

    /// As the environment says: `MODELSCOPE_ENDPOINT`.
    #[must_use]
    pub fn from_env() -> Self {
        Self::new(&endpoint(&["MODELSCOPE_ENDPOINT"], "https://modelscope.cn"))
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ModelScopeAnswer {
    data: Option<ModelScopeData>,
    message: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ModelScopeData {
    #[serde(default)]
    files: Vec<ModelScopeFile>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ModelScopeFile {
    path: String,
    #[serde(rename = "Type")]
    kind: Option<String>,
    size: Option<u64>,
    sha256: Option<String>,
}

impl HubSource for ModelScope {
    fn name(&self) -> &'static str {
        "modelscope"
    }

    fn default_revision(&self) -> &'static str {
        "master"
    }

    fn list_files(&self, client: &Client, repo: &str, revision: &str) -> Result<Listing, HubError> {
        let revision_query = encode(revision, "");
        let url = format!("{}/api/v1/models/{repo}/repo/files?Revision={revision_query}&Recursive=true", self.endpoint);
        let answer: ModelScopeAnswer = client.json(&url, None)?;
        let data = answer.data.ok_or_else(|| HubError::Answer {
            url,
            expected: "a list of files in `Data`",
            found: answer.message.unwrap_or_else(|| "none".to_owned()),
        })?;
        let files = data.files.into_iter().filter(|file| file.kind.as_deref() != Some("tree"));
        let files = files.map(|file| RemoteFile {
            path: file.path,
            size: file.size,
            sha256: file.sha256.filter(|digest| !digest.is_empty()),
        });
        Ok(Listing { revision: revision.to_owned(), files: files.collect() })
    }

    fn file_url(&self, repo: &str, revision: &str, path: &str) -> String {
        let (revision, path) = (encode(revision, ""), encode(path, ""));
        format!("{}/api/v1/models/{repo}/repo?Revision={revision}&FilePath={path}", self.endpoint)
    }

    fn token(&self) -> Option<&str> {
        None
    }
}

/// The first of these variables that is set.
fn endpoint(variables: &[&str], default: &str) -> String {
    let set = |variable: &&str| std::env::var(variable).ok().filter(|value| !value.is_empty());
    variables.iter().find_map(set).unwrap_or_else(|| default.to_owned())
}
