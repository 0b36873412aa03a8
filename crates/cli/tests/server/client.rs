//! A server process and a plain HTTP client: tests see every byte.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use serde_json::Value;

use crate::contract;

/// Name that the fixture is served by.
pub(crate) const MODEL: &str = "tiny";

/// A running server; it is killed when dropped.
pub(crate) struct Server {
    child: Child,
    pub(crate) address: String,
    log: Mutex<Receiver<String>>,
}

/// A response.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// Data of server-sent events, with the event's name where it has one.
    pub(crate) fn events(&self) -> Vec<(String, String)> {
        let mut events = Vec::new();
        for frame in self.body.split("\n\n").filter(|frame| !frame.is_empty() && !frame.starts_with(':')) {
            let mut name = String::new();
            for line in frame.lines() {
                if let Some(found) = line.strip_prefix("event: ") {
                    name = found.to_owned();
                }
                if let Some(data) = line.strip_prefix("data: ") {
                    events.push((name.clone(), data.to_owned()));
                }
            }
        }
        events
    }

    /// Chunks of a stream in the OpenAI protocol, checked to end as it must.
    pub(crate) fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(events.pop().map(|(_, data)| data).as_deref(), Some("[DONE]"), "{}", self.body);
        events.iter().map(|(_, data)| serde_json::from_str(data).unwrap()).collect()
    }
}

impl Server {
    /// The fixture with the given further arguments.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        Self::start_with(arguments, &[])
    }

    /// As [`Server::start`], with variables of the environment.
    pub(crate) fn start_with(arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let fixture = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/qwen3");
        let mut command = Command::new(env!("CARGO_BIN_EXE_qwen-server"));
        command.args(["--served-model-name", MODEL, "--port", "0", "--threads", "1", "--warmup=false"]);
        command.arg("--model").arg(fixture).args(arguments);
        let names: Vec<String> = std::env::vars().map(|(name, _)| name).collect();
        for name in names.iter().filter(|name| name.starts_with("QWEN_SERVER_") || *name == "RUST_LOG") {
            command.env_remove(name);
        }
        command.envs(environment.iter().copied()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let (sender, log) = mpsc::channel();
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let mut server = Self { child, address: String::new(), log: Mutex::new(log) };
        let ready = server.wait_for("ready on ");
        let (_, url) = ready.split_once("://").unwrap();
        server.address = url.split(' ').next().unwrap().to_owned();
        server
    }

    /// Waits for a line of the log that holds a text.
    pub(crate) fn wait_for(&self, text: &str) -> String {
        let mut seen = Vec::new();
        loop {
            match self.log.lock().unwrap().recv_timeout(Duration::from_secs(60)) {
                Ok(line) if line.contains(text) => return line,
                Ok(line) => seen.push(line),
                Err(error) => panic!("no line with {text:?} ({error}): {seen:#?}"),
            }
        }
    }

    pub(crate) fn connect(&self) -> TcpStream {
        connect(&self.address)
    }

    /// As [`Server::ok`], by another of the addresses that the server listens on.
    pub(crate) fn ok_at(&self, host: &str, path: &str, body: &Value) -> Value {
        let (_, port) = self.address.rsplit_once(':').unwrap();
        let mut stream = connect(&format!("{host}:{port}"));
        stream.write_all(self.text("POST", path, &[], &body.to_string()).as_bytes()).unwrap();
        let reply = read_reply(&mut stream);
        assert_eq!(reply.status, 200, "{host}: {}", reply.body);
        reply.json()
    }

    /// Sends a request as it is and reads the response to its end.
    pub(crate) fn raw(&self, request: &[u8]) -> Reply {
        let mut stream = self.connect();
        // A server that refuses early closes before everything is written.
        let _ = stream.write_all(request);
        read_reply(&mut stream)
    }

    /// Sends a request; its response must be as the OpenAPI document says.
    pub(crate) fn request(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Reply {
        let reply = self.raw(self.text(method, path, headers, body).as_bytes());
        contract::check(method, path, &reply);
        reply
    }

    /// The text of a request.
    pub(crate) fn text(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> String {
        let mut text = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n");
        if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
            text.push_str(&format!("Host: {}\r\n", self.address));
        }
        if method == "POST" && !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-type")) {
            text.push_str("Content-Type: application/json\r\n");
        }
        for (name, value) in headers {
            text.push_str(&format!("{name}: {value}\r\n"));
        }
        text.push_str(&format!("Content-Length: {}\r\n\r\n{body}", body.len()));
        text
    }

    pub(crate) fn get(&self, path: &str) -> Reply {
        self.request("GET", path, &[], "")
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Reply {
        self.request("POST", path, &[], &body.to_string())
    }

    /// As [`Server::post`], for what must succeed.
    pub(crate) fn ok(&self, path: &str, body: &Value) -> Value {
        let reply = self.post(path, body);
        assert_eq!(reply.status, 200, "{body}: {}", reply.body);
        reply.json()
    }

    /// The error of what must be refused: status, code, parameter, message.
    pub(crate) fn refused(&self, path: &str, body: &Value) -> (u16, String, String, String) {
        let reply = self.post(path, body);
        let error = reply.json()["error"].clone();
        let text = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
        (reply.status, text("code"), text("param"), text("message"))
    }

    /// A figure of `/metrics`.
    pub(crate) fn figure(&self, name: &str) -> f64 {
        let figures = self.get("/metrics").body;
        let line = figures.lines().find(|line| line.starts_with(name) && !line.starts_with('#'));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or_else(|| panic!("no {name}: {figures}"))
    }

    pub(crate) fn signal(&self, signal: &str) {
        let status = Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    /// The exit code, when the process ends by itself.
    pub(crate) fn wait(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

/// Reads a response until the connection ends.
pub(crate) fn read_reply(stream: &mut TcpStream) -> Reply {
    let mut bytes = Vec::new();
    // A reset after the response is the server's way to refuse the rest of a body.
    let _ = stream.read_to_end(&mut bytes);
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n");
    let end = end.unwrap_or_else(|| panic!("no response: {:?}", String::from_utf8_lossy(&bytes)));
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
    let mut lines = head.lines();
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
        .collect();
    let chunked = headers.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked");
    let rest = &bytes[end + 4..];
    let body = if chunked { unchunked(rest) } else { rest.to_vec() };
    Reply { status, headers, body: String::from_utf8(body).unwrap() }
}

fn unchunked(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = bytes.windows(2).position(|window| window == b"\r\n") {
        let length = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap(), 16).unwrap();
        if length == 0 || bytes.len() < end + 2 + length {
            break;
        }
        body.extend_from_slice(&bytes[end + 2..end + 2 + length]);
        bytes = &bytes[end + 2 + length + 2..];
    }
    body
}
