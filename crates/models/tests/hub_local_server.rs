//! Fetching from a hub, played by a server on this machine in both layouts.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use qwen_models::hub::{
    Client, DownloadOptions, HubError, HubSource, HuggingFace, ModelScope, Progress, Wanted, fetch_repository,
    list_cached,
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// What was asked: path with query, and headers.
#[derive(Clone, Debug)]
struct Request {
    path: String,
    headers: HashMap<String, String>,
}

/// What is answered.
#[derive(Clone, Default)]
struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    /// The connection ends after so many bytes of the body.
    cut: Option<usize>,
}

impl Reply {
    fn body(body: impl Into<Vec<u8>>) -> Self {
        Self { status: 200, body: body.into(), ..Self::default() }
    }

    fn status(status: u16) -> Self {
        Self { status, ..Self::default() }
    }

    fn header(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    fn cut(mut self, at: usize) -> Self {
        self.cut = Some(at);
        self
    }

    /// The part of `body` that the request asks for.
    fn ranged(request: &Request, body: &[u8]) -> Self {
        let range = request
            .headers
            .get("range")
            .and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
        match range {
            None => Self::body(body),
            Some(start) if start >= body.len() => Self::status(416),
            Some(start) => Self { status: 206, body: body[start..].to_vec(), ..Self::default() }
                .header("content-range", format!("bytes {start}-{}/{}", body.len() - 1, body.len())),
        }
    }
}

/// A server that answers as `answer` says until the test ends.
struct Server {
    address: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    fn start(answer: impl Fn(&Request, usize) -> Reply + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::<Request>::new()));
        let log = Arc::clone(&requests);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let Some(request) = read_request(&stream) else { continue };
                let earlier = log.lock().unwrap().iter().filter(|earlier| earlier.path == request.path).count();
                log.lock().unwrap().push(request.clone());
                write_reply(stream, &answer(&request, earlier));
            }
        });
        Self { address, requests }
    }

    fn paths(&self) -> Vec<String> {
        self.requests.lock().unwrap().iter().map(|request| request.path.clone()).collect()
    }

    fn header(&self, path: &str, header: &str) -> Vec<Option<String>> {
        let requests = self.requests.lock().unwrap();
        requests
            .iter()
            .filter(|request| request.path == path)
            .map(|request| request.headers.get(header).cloned())
            .collect()
    }
}

fn read_request(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let path = lines.next()?.split(' ').nth(1)?.to_owned();
    let headers = lines.take_while(|line| !line.is_empty()).filter_map(|line| {
        let (name, value) = line.split_once(':')?;
        Some((name.to_ascii_lowercase(), value.trim().to_owned()))
    });
    Some(Request { path, headers: headers.collect() })
}

fn write_reply(mut stream: TcpStream, reply: &Reply) {
    let mut head =
        format!("HTTP/1.1 {} x\r\ncontent-length: {}\r\nconnection: close\r\n", reply.status, reply.body.len());
    for (name, value) in &reply.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    let body = &reply.body[..reply.cut.unwrap_or(reply.body.len())];
    // The client may have gone away already.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn weights() -> Vec<u8> {
    (0..100_000u32).flat_map(u32::to_le_bytes).collect()
}

fn hugging_face_list(files: &[(&str, u64, Option<String>)]) -> Reply {
    let siblings = files.iter().map(|(path, size, digest)| match digest {
        None => json!({"rfilename": path, "size": size}),
        Some(digest) => json!({"rfilename": path, "size": size, "lfs": {"sha256": digest, "size": size}}),
    });
    Reply::body(json!({"sha": "abc123", "siblings": siblings.collect::<Vec<Value>>()}).to_string())
}

fn one_file_list() -> Reply {
    let weights = weights();
    hugging_face_list(&[("model.gguf", weights.len() as u64, Some(sha256(&weights)))])
}

const LIST: &str = "/api/models/o/m/revision/main?blobs=true";
const FILE: &str = "/o/m/resolve/abc123/model.gguf";

fn fetch_from(
    source: &dyn HubSource,
    file: Option<&str>,
    cache: &Path,
    space: u64,
) -> Result<std::path::PathBuf, HubError> {
    let mut seen = Vec::new();
    let mut progress = |progress: Progress<'_>| seen.push((progress.file.to_owned(), progress.done, progress.total));
    let available = move |_: &Path| Ok(space);
    let mut options = DownloadOptions {
        retries: 3,
        retry_delay: Duration::ZERO,
        available_space: &available,
        ..DownloadOptions::new(&mut progress)
    };
    let wanted = Wanted { repo: "o/m", revision: None, file, refresh: false };
    fetch_repository(&Client::new(), source, &wanted, cache, &mut options)
}

fn fetch(server: &Server, cache: &Path) -> Result<std::path::PathBuf, HubError> {
    fetch_from(&HuggingFace::new(&server.address, Some("secret".to_owned())), None, cache, 1 << 30)
}

fn refusal(server: &Server, cache: &Path) -> String {
    fetch(server, cache).unwrap_err().to_string()
}

#[test]
fn a_folder_in_the_hugging_face_layout() {
    let weights = weights();
    let sizes = [("config.json", 2), ("sub/other.bin", 9), ("tokenizer.json", 4)];
    let listed = weights.clone();
    let server = Server::start(move |request, _| match request.path.as_str() {
        LIST => {
            let mut files: Vec<_> = sizes.iter().map(|&(path, size)| (path, size, None)).collect();
            files.push(("model.safetensors", listed.len() as u64, Some(sha256(&listed))));
            hugging_face_list(&files)
        }
        "/o/m/resolve/abc123/config.json" => Reply::body("{}"),
        "/o/m/resolve/abc123/tokenizer.json" => Reply::body("null"),
        "/o/m/resolve/abc123/model.safetensors" => Reply::body(listed.clone()),
        _ => Reply::status(404),
    });
    let cache = tempfile::tempdir().unwrap();
    let path = fetch(&server, cache.path()).unwrap();
    assert_eq!(path, cache.path().join("hub/huggingface/o--m/abc123"));
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights);
    assert_eq!(fs::read(path.join("config.json")).unwrap(), b"{}");
    assert!(!path.join("sub").exists(), "only what belongs to the model is fetched");
    let asked = server.paths().len();
    assert_eq!(fetch(&server, cache.path()).unwrap(), path);
    assert_eq!(server.paths().len(), asked, "the second time, nothing is asked");
    let cached = list_cached(cache.path());
    assert_eq!(cached.len(), 1);
    assert_eq!((cached[0].name.as_str(), cached[0].bytes()), ("o/m@main", weights.len() as u64 + 6));
    assert_eq!(cached[0].path(cache.path()), path);
}

#[test]
fn a_file_in_the_modelscope_layout() {
    let weights = weights();
    let body = weights.clone();
    let server = Server::start(move |request, _| match request.path.as_str() {
        "/api/v1/models/o/m/repo/files?Revision=master&Recursive=true" => Reply::body(
            json!({"Code": 200, "Data": {"Files": [
                {"Path": "q", "Type": "tree"},
                {"Path": "q/m 1-Q8_0.gguf", "Type": "blob", "Size": body.len(), "Sha256": sha256(&body)},
                {"Path": "q/m-Q4_0.gguf", "Type": "blob", "Size": 1, "Sha256": ""},
            ]}})
            .to_string(),
        ),
        "/api/v1/models/o/m/repo?Revision=master&FilePath=q%2Fm%201-Q8_0.gguf" => Reply::body(body.clone()),
        _ => Reply::body(json!({"Code": 404, "Message": "not here"}).to_string()),
    });
    let cache = tempfile::tempdir().unwrap();
    let source = ModelScope::new(&server.address);
    let path = fetch_from(&source, Some("Q8_0"), cache.path(), 1 << 30).unwrap();
    assert_eq!(path, cache.path().join("hub/modelscope/o--m/master/q/m 1-Q8_0.gguf"));
    assert_eq!(fs::read(&path).unwrap(), weights);
    let wanted = Wanted { repo: "o/none", revision: None, file: None, refresh: false };
    let mut progress = |_: Progress<'_>| {};
    let mut options = DownloadOptions::new(&mut progress);
    let error = fetch_repository(&Client::new(), &source, &wanted, cache.path(), &mut options).unwrap_err().to_string();
    assert!(error.contains("expected a list of files in `Data`, found not here"), "{error}");
}

#[test]
fn a_cut_connection_is_resumed() {
    let body = weights();
    let sent = body.clone();
    let server = Server::start(move |request, earlier| match request.path.as_str() {
        LIST => one_file_list(),
        _ if earlier == 0 => Reply::ranged(request, &sent).cut(100_000),
        _ if earlier == 1 => Reply::ranged(request, &sent).cut(0),
        _ => Reply::ranged(request, &sent),
    });
    let cache = tempfile::tempdir().unwrap();
    let path = fetch(&server, cache.path()).unwrap();
    assert_eq!(fs::read(&path).unwrap(), body);
    let ranges = server.header(FILE, "range");
    assert_eq!(ranges.len(), 3);
    assert_eq!(ranges[0], None);
    let resumed: usize =
        ranges[1].as_ref().unwrap().strip_prefix("bytes=").unwrap().trim_end_matches('-').parse().unwrap();
    assert!((1..=100_000).contains(&resumed), "{ranges:?}");
    assert_eq!(ranges[1], ranges[2]);
    assert!(!path.with_extension("gguf.part").exists());
}

#[test]
fn a_download_goes_on_in_the_next_run_and_without_ranges_begins_again() {
    for ranges in [true, false] {
        let body = weights();
        let sent = body.clone();
        let server = Server::start(move |request, _| match request.path.as_str() {
            LIST => one_file_list(),
            _ if ranges => Reply::ranged(request, &sent),
            _ => Reply::body(sent.clone()),
        });
        let cache = tempfile::tempdir().unwrap();
        let dir = cache.path().join("hub/huggingface/o--m/abc123");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("model.gguf.part"), &body[..1234]).unwrap();
        assert_eq!(fs::read(fetch(&server, cache.path()).unwrap()).unwrap(), body);
        assert_eq!(server.header(FILE, "range"), [Some("bytes=1234-".to_owned())]);
    }
}

#[test]
fn a_part_that_is_already_whole_or_too_long() {
    for (length, requests) in [(400_000, 1), (400_004, 2)] {
        let body = weights();
        let sent = body.clone();
        let server = Server::start(move |request, _| match request.path.as_str() {
            LIST => one_file_list(),
            _ => Reply::ranged(request, &sent),
        });
        let cache = tempfile::tempdir().unwrap();
        let dir = cache.path().join("hub/huggingface/o--m/abc123");
        fs::create_dir_all(&dir).unwrap();
        let mut part = body.clone();
        part.resize(length, 0);
        fs::write(dir.join("model.gguf.part"), part).unwrap();
        assert_eq!(fs::read(fetch(&server, cache.path()).unwrap()).unwrap(), body);
        assert_eq!(server.header(FILE, "range").len(), requests);
    }
}

#[test]
fn wrong_contents_are_discarded() {
    let mut body = weights();
    body[77] ^= 1;
    let server = Server::start(move |request, _| match request.path.as_str() {
        LIST => one_file_list(),
        _ => Reply::body(body.clone()),
    });
    let cache = tempfile::tempdir().unwrap();
    let error = refusal(&server, cache.path());
    assert!(error.starts_with(&format!("model.gguf: expected SHA-256 {}", sha256(&weights()))), "{error}");
    let dir = cache.path().join("hub/huggingface/o--m/abc123");
    assert_eq!(fs::read_dir(dir).unwrap().count(), 0, "neither the file nor a part is left");
}

#[test]
fn more_than_was_listed_is_discarded() {
    let server = Server::start(move |request, _| match request.path.as_str() {
        LIST => hugging_face_list(&[("model.gguf", 10, None)]),
        _ => Reply::body("0123456789extra"),
    });
    let cache = tempfile::tempdir().unwrap();
    assert!(refusal(&server, cache.path()).contains("model.gguf: expected 10 bytes, received 15"));
}

#[test]
fn the_digest_of_a_redirect_counts_and_the_token_stays_with_its_hub() {
    for good in [true, false] {
        let body = weights();
        let digest = if good { sha256(&body) } else { sha256(b"other") };
        let size = body.len() as u64;
        let storage = Server::start(move |_, _| Reply::body(body.clone()));
        // Another name of this machine: another host.
        let elsewhere = storage.address.replace("127.0.0.1", "localhost");
        let server = Server::start(move |request, _| match request.path.as_str() {
            LIST => hugging_face_list(&[("model.gguf", size, None)]),
            FILE => Reply::status(302).header("location", "/cdn/x").header("x-linked-etag", format!("\"{digest}\"")),
            _ => Reply::status(307).header("location", format!("{elsewhere}/y")),
        });
        let cache = tempfile::tempdir().unwrap();
        let result = fetch(&server, cache.path());
        assert_eq!(result.is_ok(), good, "{result:?}");
        for path in [LIST, "/cdn/x"] {
            assert_eq!(server.header(path, "authorization"), [Some("Bearer secret".to_owned())]);
        }
        assert_eq!(storage.header("/y", "authorization"), [None]);
    }
}

#[test]
fn errors_of_the_hub_are_told() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(|_, _| Reply::status(404));
    let error = refusal(&server, cache.path());
    assert!(
        error.ends_with(
            "/api/models/o/m/revision/main?blobs=true: the hub answered 404: no such model, revision or file"
        ),
        "{error}"
    );
    assert_eq!(server.paths().len(), 1);
    assert!(refusal(&Server::start(|_, _| Reply::status(401)), cache.path()).contains("HF_TOKEN"));
    assert!(
        refusal(&Server::start(|_, _| Reply::body("<html>")), cache.path())
            .contains("expected a list of files as JSON")
    );
    let server = Server::start(|request, _| Reply::status(302).header("location", request.path.as_str()));
    assert!(refusal(&server, cache.path()).contains("it redirects more than 8 times"));
    let server = Server::start(|_, _| Reply::status(302).header("location", "file:///etc/passwd"));
    assert!(refusal(&server, cache.path()).contains("it redirects to no valid address"));
}

#[test]
fn tries_are_bounded() {
    let server = Server::start(|request, _| match request.path.as_str() {
        LIST => one_file_list(),
        _ => Reply::status(503),
    });
    let cache = tempfile::tempdir().unwrap();
    assert!(refusal(&server, cache.path()).contains("the hub answered 503"));
    assert_eq!(server.header(FILE, "range").len(), 4, "once, and three times again");
}

#[test]
fn too_little_room_is_found_before_anything_is_fetched() {
    let server = Server::start(|_, _| one_file_list());
    let cache = tempfile::tempdir().unwrap();
    let source = HuggingFace::new(&server.address, None);
    let error = fetch_from(&source, None, cache.path(), 399_999).unwrap_err().to_string();
    assert!(error.contains("needs 400000 bytes more and the disk has 399999 free"), "{error}");
    assert_eq!(server.paths(), [LIST]);
}

#[test]
fn hostile_names_write_nothing() {
    for name in [
        "../evil.gguf",
        "/tmp/evil.gguf",
        "a/../../evil.gguf",
        "a//b.gguf",
        "C:\\evil.gguf",
        "a\\..\\evil.gguf",
        "./x.gguf",
        "x\u{0}.gguf",
    ] {
        let server = Server::start(move |request, _| match request.path.as_str() {
            LIST => hugging_face_list(&[(name, 4, None)]),
            _ => Reply::body("evil"),
        });
        let cache = tempfile::tempdir().unwrap();
        let error = fetch_from(&HuggingFace::new(&server.address, None), None, cache.path(), 1 << 30).unwrap_err();
        assert!(error.to_string().contains("which is no plain relative path"), "{name:?}: {error}");
        assert_eq!(server.paths(), [LIST], "nothing is fetched");
    }
    let server = Server::start(|_, _| {
        Reply::body(json!({"sha": "../../x", "siblings": [{"rfilename": "m.gguf", "size": 1}]}).to_string())
    });
    assert!(refusal(&server, tempfile::tempdir().unwrap().path()).contains("plain relative path"));
}
