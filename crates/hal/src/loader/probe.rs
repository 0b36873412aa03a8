//! The self test of a plugin in a process of its own, so that a crash or a hang is a report and not the end of the host.
//!
//! In: the path of a library. Out: nothing, or where and how it failed. The child prints each stage before it enters it;
//! the parent reads along, so that it knows which call did not return.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use qwen_hal_abi::QHAL_USAGE_STAGING;

use super::{LoadError, library};
use crate::buffer::{BufferDesc, Scope};
use crate::host::{Host, SerialPool};

/// What lines of the child begin with; a plugin may print others.
const MARK: &str = "qhal-probe ";
/// Bytes that are copied there and back.
const BYTES: usize = 4096;
/// Output beyond this is not read: the child finds the pipe closed.
const MAX_OUTPUT: u64 = 1 << 20;

/// How the self test is started: a program that calls [`run_probe`] when it is given these arguments and a path.
#[derive(Debug, Clone)]
pub struct Prober {
    /// Program, usually this one again.
    pub program: PathBuf,
    /// Arguments before the library's path.
    pub arguments: Vec<OsString>,
    /// Environment variables to set.
    pub environment: Vec<(OsString, OsString)>,
    /// How long the whole self test may take.
    pub limit: Duration,
}

impl Prober {
    /// The usual limit: drivers take seconds to make a first context.
    pub const LIMIT: Duration = Duration::from_secs(20);

    /// A self test by a program with these arguments, within [`Prober::LIMIT`].
    #[must_use]
    pub fn new(program: PathBuf, arguments: &[&str]) -> Self {
        let arguments = arguments.iter().map(OsString::from).collect();
        Self { program, arguments, environment: Vec::new(), limit: Self::LIMIT }
    }

    /// Runs the self test of a library in a child process.
    ///
    /// # Errors
    /// [`LoadError::Crashed`], [`LoadError::Hung`] or [`LoadError::SelfTest`].
    pub fn probe(&self, path: &Path) -> Result<(), LoadError> {
        let failed = |stage: &str, message: String| LoadError::SelfTest {
            path: path.to_owned(),
            stage: stage.to_owned(),
            message,
        };
        let child = Command::new(&self.program)
            .args(&self.arguments)
            .arg(path)
            .envs(self.environment.iter().map(|(key, value)| (key, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let mut child = child.map_err(|error| failed("start", format!("{}: {error}", self.program.display())))?;
        let progress = Arc::new(Mutex::new(Progress::default()));
        let reader = child.stdout.take().map(|output| {
            let progress = Arc::clone(&progress);
            std::thread::spawn(move || read_progress(output, &progress))
        });
        let status = wait(&mut child, self.limit);
        if status.is_some() {
            // A grandchild may hold the pipe open for ever; what the child wrote is there within moments.
            let deadline = Instant::now() + Duration::from_millis(500);
            while reader.as_ref().is_some_and(|reader| !reader.is_finished()) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let Progress { stage, verdict } = progress.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match (status, verdict) {
            (None, _) => Err(LoadError::Hung { path: path.to_owned(), stage, limit: self.limit }),
            (Some(status), Some(Ok(()))) if status.success() => Ok(()),
            (Some(_), Some(Err(message))) => Err(failed(&stage, message)),
            (Some(status), _) => Err(LoadError::Crashed { path: path.to_owned(), stage, how: end_of(status) }),
        }
    }
}

/// How a process ended, in words.
#[must_use]
pub fn end_of(status: ExitStatus) -> String {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        let name = match signal {
            4 => "illegal instruction",
            6 => "abort",
            7 => "bus error",
            8 => "arithmetic error",
            9 => "killed, perhaps for lack of memory",
            11 => "segmentation fault",
            _ => "signal",
        };
        return format!("signal {signal}, {name}");
    }
    status.code().map_or_else(|| "no exit status".to_owned(), |code| format!("exit status {code}"))
}

/// Waits for a child up to a limit, then kills it. `None` if it had to be killed.
pub fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let deadline = Instant::now() + limit;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(2)),
            _ => {
                // Already gone if this fails; reaped in either case.
                let _ = child.kill();
                let _ = child.wait();
                return None;
            }
        }
    }
}

#[derive(Debug, Clone, Default)]
struct Progress {
    stage: String,
    verdict: Option<Result<(), String>>,
}

fn read_progress(output: impl Read, progress: &Mutex<Progress>) {
    let lines = BufReader::new(output.take(MAX_OUTPUT)).split(b'\n').map_while(Result::ok);
    for line in lines {
        let line = String::from_utf8_lossy(&line);
        // A plugin may have printed the beginning of a line.
        let Some((_, said)) = line.split_once(MARK) else { continue };
        let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
        match said.split_once(' ').unwrap_or((said, "")) {
            ("stage", stage) => stage.clone_into(&mut progress.stage),
            ("ok", _) => progress.verdict = Some(Ok(())),
            ("failed", message) => progress.verdict = Some(Err(message.to_owned())),
            _ => {}
        }
    }
}

fn say(what: &str, text: &str) {
    let mut out = std::io::stdout();
    // Without a reader there is nobody to tell.
    let _ = writeln!(out, "\n{MARK}{what} {}", text.replace('\n', " ")).and_then(|()| out.flush());
}

/// The child's part: loads the library, uses its first device a little, and reports on standard output. True if all is well.
#[must_use]
pub fn run_probe(path: &Path) -> bool {
    match self_test(path) {
        Ok(()) => say("ok", ""),
        Err(message) => {
            say("failed", &message);
            return false;
        }
    }
    true
}

fn self_test(path: &Path) -> Result<(), String> {
    let stage = |name: &str| say("stage", name);
    stage("dlopen");
    let library = library::Library::open(path).map_err(|error| error.to_string())?;
    stage("qhal_plugin_manifest");
    library.manifest().map_err(|error| error.to_string())?;
    stage("qhal_plugin_query, plugin_init");
    let plugin = library.plugin(&Host::new(Arc::new(SerialPool))).map_err(|error| error.to_string())?;
    stage("device_count");
    let count = plugin.device_count().map_err(|error| error.to_string())?;
    // No device is no fault: the driver may be there without the card.
    if count == 0 {
        return Ok(());
    }
    stage("device_info");
    plugin.device_info(0).map_err(|error| error.to_string())?;
    stage("device_open, device_caps");
    let device = plugin.open(0, &[]).map_err(|error| error.to_string())?;
    stage("stream_create");
    let stream = device.stream("self test").map_err(|error| error.to_string())?;
    stage("buffer_alloc");
    let desc = BufferDesc::new(BYTES as u64, QHAL_USAGE_STAGING, Scope::Temporary, "self test");
    let buffer = device.alloc(&desc).map_err(|error| error.to_string())?;
    stage("copy, stream_wait");
    let sent: Vec<u8> = (0..BYTES).map(|i| (i * 7 % 251) as u8).collect();
    let mut received = vec![0; BYTES];
    stream.copy_from_host(&sent, &buffer.whole()).map_err(|error| error.to_string())?;
    stream.copy_to_host(&buffer.whole(), &mut received).map_err(|error| error.to_string())?;
    if sent != received {
        return Err(format!("copy: expected {BYTES} bytes back as they were sent, found others"));
    }
    stage("buffer_free, stream_destroy, device_close, plugin_shutdown");
    drop((buffer, stream, device, plugin));
    Ok(())
}
