//! Limits and choices of a server, as plain data; where they come from is the program's matter.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Limits and choices. The defaults are those of `qwen-server`.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where to listen.
    pub address: SocketAddr,
    /// Hosts that requests may name, without port; none: any. See [`Config::allows_host`].
    pub allowed_hosts: Vec<String>,
    /// Origins of web pages that may read answers; `*` for any.
    pub allowed_origins: Vec<String>,
    /// Certificates and key in PEM form: HTTPS instead of HTTP.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Most bytes of a body.
    pub max_body_bytes: usize,
    /// Most bytes of a request's line and headers.
    pub max_header_bytes: usize,
    /// Most connections at a time.
    pub max_connections: usize,
    /// Time for the headers of a request to arrive, and for an idle connection.
    pub header_timeout: Duration,
    /// Time for a body to arrive.
    pub body_timeout: Duration,
    /// Time for an answer; none: as long as it takes.
    pub request_timeout: Option<Duration>,
    /// Time for requests in flight to end when the server stops.
    pub shutdown_timeout: Duration,
    /// An engine with work that has not finished a step for so long is not ready.
    pub stall_timeout: Duration,
    /// Between two comments that keep a silent stream open.
    pub ping_interval: Duration,
    /// Most answers of one request.
    pub max_n: u32,
    /// Most prompts of one request.
    pub max_prompts: usize,
    /// Whether clients may choose priorities.
    pub allow_priority: bool,
    /// Whether `reasoning` is sent beside `reasoning_content`.
    pub reasoning_alias: bool,
    /// Whether `/admin` exists.
    pub admin: bool,
    /// Whether `/openapi.json` and `/docs` exist.
    pub docs: bool,
    /// Where spans go by OTLP over HTTP (`http://HOST:4318/v1/traces`); none: nowhere.
    pub otlp_endpoint: Option<String>,
    /// Prompt of the warm-up; none: no warm-up.
    pub warmup: Option<Warmup>,
}

/// What is computed before the server is ready.
#[derive(Debug, Clone)]
pub struct Warmup {
    /// Text.
    pub prompt: String,
    /// Tokens to generate.
    pub tokens: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            address: SocketAddr::from(([127, 0, 0, 1], 8000)),
            allowed_hosts: Vec::new(),
            allowed_origins: Vec::new(),
            tls: None,
            max_body_bytes: 16 << 20,
            max_header_bytes: 32 << 10,
            max_connections: 4096,
            header_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(30),
            request_timeout: Some(Duration::from_secs(3600)),
            shutdown_timeout: Duration::from_secs(30),
            stall_timeout: Duration::from_secs(30),
            ping_interval: Duration::from_secs(15),
            max_n: 16,
            max_prompts: 256,
            allow_priority: false,
            reasoning_alias: false,
            admin: false,
            docs: true,
            otlp_endpoint: None,
            warmup: None,
        }
    }
}

impl Config {
    /// Whether a request for this host is meant for this server. On a loopback address a foreign name means that a web page
    /// had its own name resolved to this machine, so only local names are right there.
    #[must_use]
    pub fn allows_host(&self, host: &str) -> bool {
        let name = host_name(host);
        if self.allowed_hosts.iter().any(|allowed| allowed == "*" || allowed.eq_ignore_ascii_case(name)) {
            return true;
        }
        if !self.allowed_hosts.is_empty() || self.address.ip().is_loopback() {
            return name.eq_ignore_ascii_case("localhost")
                || name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
        }
        true
    }
}

/// A host without its port and the brackets of IPv6.
fn host_name(host: &str) -> &str {
    match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts() {
        let local = Config::default();
        for right in ["localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST"] {
            assert!(local.allows_host(right), "{right}");
        }
        for wrong in ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "192.168.0.1"] {
            assert!(!local.allows_host(wrong), "{wrong}");
        }
        let open = Config { address: ([0, 0, 0, 0], 8000).into(), ..Config::default() };
        assert!(open.allows_host("anything"));
        let named = Config { allowed_hosts: vec!["ai.example".into()], ..open };
        assert!(named.allows_host("AI.example:443") && named.allows_host("localhost") && !named.allows_host("x"));
    }
}
