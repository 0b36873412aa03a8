//! HTTP for hubs: GET with bounded redirects, whose credentials stay with their host.

use std::io::Read;
use std::time::Duration;

use serde::de::DeserializeOwned;
use ureq::http::{Response, Uri, header};
use ureq::{Agent, Body};

use super::HubError;

const REDIRECTS: usize = 8;
/// A list of 100,000 files is some 20 MB.
const LARGEST_JSON: u64 = 64 << 20;

/// A client for hubs.
#[derive(Debug, Clone)]
pub struct Client {
    agent: Agent,
    /// For hosts on this machine, which no proxy should see.
    local: Agent,
}

impl Default for Client {
    fn default() -> Self {
        Self::new()
    }
}

/// An answer, and what was said on the way to it.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) response: Response<Body>,
    /// SHA-256 of the file, where a redirect named it.
    pub(super) linked_sha256: Option<String>,
}

impl Client {
    /// A client with time limits for connecting and for silence, and none for whole files.
    #[must_use]
    pub fn new() -> Self {
        let config = || {
            Agent::config_builder()
                .max_redirects(0)
                .max_redirects_will_error(false)
                .http_status_as_error(false)
                .timeout_connect(Some(Duration::from_secs(20)))
                .timeout_recv_response(Some(Duration::from_secs(60)))
                .timeout_per_read(Some(Duration::from_secs(60)))
                .user_agent(concat!("qwen-inference/", env!("CARGO_PKG_VERSION")))
        };
        Self { agent: config().build().into(), local: config().proxy(None).build().into() }
    }

    /// Fetches a file from `offset` on.
    pub(super) fn get(&self, url: &str, token: Option<&str>, offset: u64) -> Result<Answer, HubError> {
        let network = |url: &str, message: String| HubError::Network { url: url.to_owned(), message };
        let mut current: Uri = url.parse().map_err(|_| network(url, "not a valid address".to_owned()))?;
        let first_host = current.authority().cloned();
        let mut linked_sha256 = None;
        for _ in 0..=REDIRECTS {
            let is_local = matches!(current.host(), Some("localhost" | "127.0.0.1" | "[::1]"));
            let mut request = if is_local { &self.local } else { &self.agent }.get(&current);
            if let Some(token) = token.filter(|_| current.authority() == first_host.as_ref()) {
                request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
            }
            if offset > 0 {
                request = request.header(header::RANGE, format!("bytes={offset}-"));
            }
            let response = request.call().map_err(|error| network(url, error.to_string()))?;
            linked_sha256 = linked_sha256.or_else(|| linked_digest(&response));
            if !response.status().is_redirection() {
                return Ok(Answer { response, linked_sha256 });
            }
            let location = response.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
            let next = location.and_then(|location| resolve(&current, location));
            current = next.ok_or_else(|| network(url, "it redirects to no valid address".to_owned()))?;
        }
        Err(network(url, format!("it redirects more than {REDIRECTS} times")))
    }

    /// Fetches a JSON document.
    pub(super) fn json<T: DeserializeOwned>(&self, url: &str, token: Option<&str>) -> Result<T, HubError> {
        let answer = self.get(url, token, 0)?;
        check_status(url, &answer.response)?;
        let mut bytes = Vec::new();
        let reader = answer.response.into_body().into_reader().take(LARGEST_JSON);
        { reader }
            .read_to_end(&mut bytes)
            .map_err(|error| HubError::Network { url: url.to_owned(), message: error.to_string() })?;
        serde_json::from_slice(&bytes).map_err(|error| HubError::Answer {
            url: url.to_owned(),
            expected: "a list of files as JSON",
            found: error.to_string(),
        })
    }
}

pub(super) fn check_status(url: &str, response: &Response<Body>) -> Result<(), HubError> {
    if response.status().is_success() {
        return Ok(());
    }
    Err(HubError::Status { url: url.to_owned(), status: response.status().as_u16() })
}

/// The digest that Hugging Face sends with the redirect to a large file; small files have another
/// kind of tag.
fn linked_digest(response: &Response<Body>) -> Option<String> {
    let tag = response.headers().get("x-linked-etag")?.to_str().ok()?;
    let digest = tag.trim_start_matches("W/").trim_matches('"');
    let is_digest = digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_digest.then(|| digest.to_ascii_lowercase())
}

/// The address that a redirect means; none where it would leave encryption.
fn resolve(from: &Uri, location: &str) -> Option<Uri> {
    let next: Uri = if location.starts_with('/') {
        format!("{}://{}{location}", from.scheme_str()?, from.authority()?).parse().ok()?
    } else {
        location.parse().ok()?
    };
    match (from.scheme_str(), next.scheme_str()?) {
        (_, "https") | (Some("http"), "http") => Some(next),
        _ => None,
    }
}

/// Percent-encodes what is not plain in an address; `keep` are characters left as they are.
pub(super) fn encode(text: &str, keep: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        let character = char::from(byte);
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~') || keep.contains(character) {
            encoded.push(character);
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}
