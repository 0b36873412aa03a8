//! Keys of clients: who may ask, and how much.
//!
//! Keys are kept as SHA-256 and compared in constant time with every entry. (A key is long and random, so a quick hash is
//! right; a password would want a slow one.) Limits of a key: requests and tokens per minute, requests at a time. They are
//! buckets that fill steadily; tokens are taken when they are known, so a bucket may be overdrawn once.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use serde::Deserialize;
use sha2::{Digest, Sha256};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

use crate::error::{ApiError, Kind};

/// A file of keys that can't be used.
#[derive(Debug, thiserror::Error)]
#[error("key {name:?}: {problem}")]
pub struct KeyError {
    /// Which.
    name: String,
    /// What is wrong and what to do.
    problem: String,
}

/// An entry of a file of keys.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyEntry {
    /// Name for logs and metrics.
    pub name: String,
    /// SHA-256 of the key in hexadecimal digits.
    pub sha256: String,
    /// Requests per minute.
    #[serde(default)]
    pub requests_per_minute: Option<u32>,
    /// Tokens per minute, prompt and answer.
    #[serde(default)]
    pub tokens_per_minute: Option<u32>,
    /// Requests at a time.
    #[serde(default)]
    pub max_concurrent: Option<u32>,
    /// Whether it may use `/admin`.
    #[serde(default)]
    pub admin: bool,
}

struct Bucket {
    per_minute: f64,
    level: f64,
    filled: Instant,
}

impl Bucket {
    fn new(per_minute: u32) -> Self {
        let per_minute = f64::from(per_minute.max(1));
        Self { per_minute, level: per_minute, filled: Instant::now() }
    }

    /// Fills up to now; seconds until something can be taken, 0 if it can.
    fn wait(&mut self, now: Instant, need: f64) -> f64 {
        let passed = now.saturating_duration_since(self.filled).as_secs_f64();
        self.filled = now;
        self.level = (self.level + passed * self.per_minute / 60.0).min(self.per_minute);
        ((need - self.level) * 60.0 / self.per_minute).max(0.0)
    }
}

/// What a client has used.
struct Usage {
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
    concurrent: u32,
}

/// Who asks.
pub struct Client {
    /// Name for logs.
    pub name: String,
    /// Number for the engine: fairness and cached prefixes go by it.
    pub number: u64,
    /// Whether it may use `/admin`.
    pub admin: bool,
    hash: [u8; 32],
    max_concurrent: Option<u32>,
    usage: Mutex<Usage>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("name", &self.name).finish_non_exhaustive()
    }
}

/// All keys.
#[derive(Debug)]
pub struct Keys {
    clients: Vec<Arc<Client>>,
    anyone: Arc<Client>,
}

impl Default for Keys {
    fn default() -> Self {
        Self { clients: Vec::new(), anyone: Arc::new(client("anyone".into(), 0, [0; 32], None)) }
    }
}

fn client(name: String, number: u64, hash: [u8; 32], entry: Option<&KeyEntry>) -> Client {
    let bucket = |limit: Option<u32>| limit.map(Bucket::new);
    Client {
        name,
        number,
        admin: entry.is_none_or(|entry| entry.admin),
        hash,
        max_concurrent: entry.and_then(|entry| entry.max_concurrent),
        usage: Mutex::new(Usage {
            requests: bucket(entry.and_then(|entry| entry.requests_per_minute)),
            tokens: bucket(entry.and_then(|entry| entry.tokens_per_minute)),
            concurrent: 0,
        }),
    }
}

impl Keys {
    /// Keys given in the open (as an argument or variable) and entries of a file.
    ///
    /// # Errors
    /// If an entry has no proper hash, or a key is empty or given twice.
    pub fn new(open: &[String], entries: &[KeyEntry]) -> Result<Self, KeyError> {
        let mut clients = Vec::new();
        for (number, key) in (1..).zip(open) {
            let client = Client { admin: true, ..client(format!("key-{number}"), number, hash(key), None) };
            clients.push(Arc::new(client));
        }
        for (number, entry) in (clients.len() as u64 + 1..).zip(entries) {
            let hash = from_hex(&entry.sha256).ok_or_else(|| KeyError {
                name: entry.name.clone(),
                problem: "sha256: expected 64 hexadecimal digits; make them with `printf %s KEY | sha256sum`".into(),
            })?;
            clients.push(Arc::new(client(entry.name.clone(), number, hash, Some(entry))));
        }
        // What an unset variable of a shell makes of a key would let everybody in.
        let empty = hash("");
        for (i, client) in clients.iter().enumerate() {
            let wrong = |problem: String| Err(KeyError { name: client.name.clone(), problem });
            if client.hash == empty {
                return wrong("expected a key, found an empty text (or its hash); was a variable not set?".into());
            }
            if let Some(other) = clients[..i].iter().find(|other| other.hash == client.hash) {
                return wrong(format!("expected a key of its own, found that of {} again; leave one out", other.name));
            }
        }
        Ok(Self { clients, ..Self::default() })
    }

    /// Whether a key is needed at all.
    #[must_use]
    pub fn required(&self) -> bool {
        !self.clients.is_empty()
    }

    /// Whose key this is; anybody, if none are needed.
    ///
    /// # Errors
    /// If the key is missing or unknown.
    pub fn identify(&self, key: Option<&str>) -> Result<Arc<Client>, ApiError> {
        if !self.required() {
            return Ok(Arc::clone(&self.anyone));
        }
        let key = key.ok_or_else(|| {
            let message = "this server wants a key: send the header Authorization: Bearer KEY (or x-api-key: KEY)";
            ApiError::new(Kind::Unauthorized, message)
        })?;
        let hash = hash(key);
        let (mut found, mut at) = (Choice::from(0), 0u64);
        for (index, client) in (0u64..).zip(&self.clients) {
            let equal = client.hash.ct_eq(&hash);
            at.conditional_assign(&index, equal);
            found |= equal;
        }
        let client = usize::try_from(at).ok().and_then(|at| self.clients.get(at));
        match client {
            Some(client) if bool::from(found) => Ok(Arc::clone(client)),
            _ => Err(ApiError::new(
                Kind::Unauthorized,
                "the key is not one of this server's; check it for typing errors",
            )),
        }
    }
}

impl Client {
    /// Takes a place for one request.
    ///
    /// # Errors
    /// If one of the key's limits is reached.
    pub fn begin(self: &Arc<Self>) -> Result<Place, ApiError> {
        let now = Instant::now();
        let mut usage = self.usage.lock().unwrap_or_else(PoisonError::into_inner);
        let usage = &mut *usage;
        let busy = |what: String, seconds: f64| {
            Err(ApiError::new(Kind::Busy, what).retry_after((seconds.ceil() as u64).max(1)))
        };
        if let Some(limit) = self.max_concurrent.filter(|limit| usage.concurrent >= *limit) {
            return busy(format!("this key may have {limit} requests at a time; wait for one to end"), 1.0);
        }
        for (bucket, need, what) in [(&mut usage.tokens, 0.0, "tokens"), (&mut usage.requests, 1.0, "requests")] {
            let Some(bucket) = bucket else { continue };
            let seconds = bucket.wait(now, need);
            if seconds > 0.0 {
                let limit = bucket.per_minute;
                return busy(
                    format!("this key may use {limit} {what} per minute; try again in {seconds:.0} s"),
                    seconds,
                );
            }
            bucket.level -= need;
        }
        usage.concurrent += 1;
        Ok(Place(Arc::clone(self)))
    }
}

/// A request's place among those of its key.
#[derive(Debug)]
pub struct Place(Arc<Client>);

impl Place {
    /// Takes used tokens from the key's bucket.
    pub fn charge(&self, tokens: u64) {
        let mut usage = self.0.usage.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(bucket) = &mut usage.tokens {
            bucket.level -= tokens as f64;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut usage = self.0.usage.lock().unwrap_or_else(PoisonError::into_inner);
        usage.concurrent = usage.concurrent.saturating_sub(1);
    }
}

fn hash(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

fn from_hex(text: &str) -> Option<[u8; 32]> {
    let text = text.trim().as_bytes();
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let bytes: Option<Vec<u8>> =
        text.chunks(2).map(|pair| Some((digit(*pair.first()?)? * 16 + digit(*pair.get(1)?)?) as u8)).collect();
    bytes?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(key: &str) -> KeyEntry {
        let sha256 = hash(key).iter().map(|byte| format!("{byte:02x}")).collect();
        KeyEntry {
            name: key.to_uppercase(),
            sha256,
            requests_per_minute: None,
            tokens_per_minute: None,
            max_concurrent: None,
            admin: false,
        }
    }

    #[test]
    fn keys_are_told_apart() {
        let keys = Keys::new(&["open".into()], &[entry("a"), entry("b")]).unwrap();
        let name = |key: &str| keys.identify(Some(key)).map(|client| client.name.clone());
        assert_eq!(
            (name("a").unwrap(), name("b").unwrap(), name("open").unwrap()),
            ("A".into(), "B".into(), "key-1".into())
        );
        for wrong in [None, Some(""), Some("c"), Some("a ")] {
            assert_eq!(keys.identify(wrong).unwrap_err().kind, Kind::Unauthorized, "{wrong:?}");
        }
        assert!(Keys::default().identify(None).is_ok());
        assert!(Keys::new(&[], &[KeyEntry { sha256: "ab".into(), ..entry("x") }]).is_err());
        let refused = |open: &[&str], entries: &[KeyEntry]| {
            let open: Vec<String> = open.iter().map(|key| (*key).to_owned()).collect();
            Keys::new(&open, entries).unwrap_err().to_string()
        };
        assert!(refused(&["a", ""], &[]).starts_with("key \"key-2\": expected a key, found an empty text"));
        assert!(refused(&[], &[entry("")]).contains("was a variable not set?"));
        assert!(refused(&["a"], &[entry("a")]).contains("that of key-1 again"));
    }

    #[test]
    fn limits_of_a_key() {
        let limited = KeyEntry { requests_per_minute: Some(3), max_concurrent: Some(2), ..entry("a") };
        let keys = Keys::new(&[], &[limited]).unwrap();
        let client = keys.identify(Some("a")).unwrap();
        let (first, second) = (client.begin().unwrap(), client.begin().unwrap());
        assert!(client.begin().unwrap_err().message.contains("2 requests at a time"));
        drop(first);
        let third = client.begin().unwrap();
        drop((second, third));
        let error = client.begin().unwrap_err();
        assert!(error.message.contains("3 requests per minute") && error.retry_after.is_some(), "{error}");
        let keys = Keys::new(&[], &[KeyEntry { tokens_per_minute: Some(100), ..entry("a") }]).unwrap();
        let client = keys.identify(Some("a")).unwrap();
        client.begin().unwrap().charge(200);
        assert!(client.begin().unwrap_err().message.contains("100 tokens per minute"));
    }
}
