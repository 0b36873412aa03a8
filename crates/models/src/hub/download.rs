//! Files from a hub to the disk: resumable, checked, whole or not at all.
//!
//! A file is written as `NAME.part` and renamed once its length and SHA-256 are those that the hub
//! lists. An interrupted download goes on where it stopped.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest, Sha256};
use ureq::http::{StatusCode, header};

use super::http::{Answer, Client, check_status};
use super::spec::is_path;
use super::{HubError, HubSource, RemoteFile};

/// How far a download is.
#[derive(Debug, Clone, Copy)]
pub struct Progress<'a> {
    /// The file.
    pub file: &'a str,
    /// Bytes of it that are here.
    pub done: u64,
    /// Its length, where known.
    pub total: Option<u64>,
}

/// What a download is told and shown.
pub struct DownloadOptions<'a> {
    /// How often a request is tried again in a row without any byte arriving.
    pub retries: u32,
    /// Pause before the first new try; it doubles with each.
    pub retry_delay: Duration,
    /// Bytes free on the disk of a folder.
    pub available_space: &'a dyn Fn(&Path) -> io::Result<u64>,
    /// Called as bytes arrive.
    pub progress: &'a mut dyn FnMut(Progress<'_>),
}

impl std::fmt::Debug for DownloadOptions<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("DownloadOptions").field("retries", &self.retries).finish_non_exhaustive()
    }
}

impl<'a> DownloadOptions<'a> {
    /// Five tries, the real disk.
    pub fn new(progress: &'a mut dyn FnMut(Progress<'_>)) -> Self {
        Self { retries: 5, retry_delay: Duration::from_millis(500), available_space: &available_space, progress }
    }
}

/// Bytes that an ordinary user may still write on the disk of `dir`.
pub fn available_space(dir: &Path) -> io::Result<u64> {
    let disk = rustix::fs::statvfs(dir)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}

/// Fetches `files` of a repository into `dir`. Files that are there with the listed length stay.
pub fn download(
    client: &Client,
    source: &dyn HubSource,
    repo: &str,
    revision: &str,
    files: &[RemoteFile],
    dir: &Path,
    options: &mut DownloadOptions<'_>,
) -> Result<(), HubError> {
    for file in files {
        if !is_path(&file.path) {
            return Err(HubError::HostileName { repo: repo.to_owned(), name: file.path.clone() });
        }
    }
    fs::create_dir_all(dir).map_err(HubError::io(dir, "create the folder"))?;
    let missing: Vec<&RemoteFile> = files.iter().filter(|file| !is_complete(dir, file)).collect();
    check_space(dir, &missing, options)?;
    for file in missing {
        let target = dir.join(&file.path);
        let url = source.file_url(repo, revision, &file.path);
        fetch(&Fetch { client, url: &url, token: source.token(), file, target: &target }, options)?;
    }
    Ok(())
}

fn is_complete(dir: &Path, file: &RemoteFile) -> bool {
    let found = fs::metadata(dir.join(&file.path)).ok().filter(fs::Metadata::is_file);
    found.is_some_and(|found| file.size.is_none_or(|size| size == found.len()))
}

fn check_space(dir: &Path, missing: &[&RemoteFile], options: &DownloadOptions<'_>) -> Result<(), HubError> {
    let remaining = |file: &&RemoteFile| {
        let here = fs::metadata(part_of(&dir.join(&file.path))).map_or(0, |part| part.len());
        file.size.unwrap_or(0).saturating_sub(here)
    };
    require_space(dir, missing.iter().map(remaining).fold(0, u64::saturating_add), options)
}

/// Refuses to begin what the disk cannot hold.
pub(super) fn require_space(dir: &Path, needed: u64, options: &DownloadOptions<'_>) -> Result<(), HubError> {
    let available = (options.available_space)(dir).map_err(HubError::io(dir, "read the free space"))?;
    if needed > available {
        return Err(HubError::DiskFull { path: dir.to_owned(), needed, available });
    }
    Ok(())
}

/// One file on its way.
struct Fetch<'a> {
    client: &'a Client,
    url: &'a str,
    token: Option<&'a str>,
    file: &'a RemoteFile,
    target: &'a Path,
}

fn part_of(target: &Path) -> PathBuf {
    let mut name = target.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

fn fetch(fetch: &Fetch<'_>, options: &mut DownloadOptions<'_>) -> Result<(), HubError> {
    if let Some(folder) = fetch.target.parent() {
        fs::create_dir_all(folder).map_err(HubError::io(folder, "create the folder"))?;
    }
    let path = part_of(fetch.target);
    let mut part = Part::open(&path)?;
    let mut failures = 0;
    loop {
        let before = part.length;
        match attempt(fetch, &mut part, options) {
            Ok(digest) => return part.finish(fetch.target, &fetch.file.path, digest.as_deref()),
            Err(error) if error.is_transient() => {
                failures = if part.length > before { 1 } else { failures + 1 };
                if failures > options.retries {
                    return Err(error);
                }
                std::thread::sleep(options.retry_delay.saturating_mul(1 << (failures - 1).min(6)));
            }
            Err(error) => {
                if matches!(error, HubError::WrongSize { .. }) {
                    part.discard();
                }
                return Err(error);
            }
        }
    }
}

/// Asks for the rest of the file and writes it; gives the digest that the hub named.
fn attempt(fetch: &Fetch<'_>, part: &mut Part, options: &mut DownloadOptions<'_>) -> Result<Option<String>, HubError> {
    let Fetch { client, url, token, file, .. } = *fetch;
    let Answer { response, linked_sha256 } = client.get(url, token, part.length)?;
    let digest = file.sha256.clone().or(linked_sha256);
    if part.length > 0 && response.status() == StatusCode::RANGE_NOT_SATISFIABLE {
        // Nothing is left to send; if the part is not the whole file, it is from another version.
        if file.size != Some(part.length) {
            part.restart()?;
            return Err(HubError::Network { url: url.to_owned(), message: "the part on disk is of no use".to_owned() });
        }
        return Ok(digest);
    }
    check_status(url, &response)?;
    let start =
        response.headers().get(header::CONTENT_RANGE).and_then(|range| range.to_str().ok()).and_then(range_start);
    if response.status() != StatusCode::PARTIAL_CONTENT || start != Some(part.length) {
        part.restart()?;
        if response.status() == StatusCode::PARTIAL_CONTENT && start != Some(0) {
            return Err(HubError::Network {
                url: url.to_owned(),
                message: "it sent another part than asked for".to_owned(),
            });
        }
    }
    let announced = response.body().content_length().map(|length| length.saturating_add(part.length));
    let total = file.size.or(announced);
    let mut body = response.into_body().into_reader();
    let mut buffer = vec![0; 256 << 10];
    loop {
        (options.progress)(Progress { file: &file.path, done: part.length, total });
        let read = match body.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) => return Err(HubError::Network { url: url.to_owned(), message: error.to_string() }),
        };
        part.write(buffer.get(..read).unwrap_or_default())?;
        if let Some(expected) = total.filter(|&total| part.length > total) {
            return Err(HubError::WrongSize { name: file.path.clone(), expected, found: part.length });
        }
    }
    match total {
        Some(total) if part.length < total => Err(HubError::Network {
            url: url.to_owned(),
            message: format!("it stopped after {} of {total} bytes", part.length),
        }),
        _ => Ok(digest),
    }
}

/// The first byte of `bytes A-B/TOTAL`.
fn range_start(range: &str) -> Option<u64> {
    range.strip_prefix("bytes ")?.split('-').next()?.trim().parse().ok()
}

/// The beginning of a file on disk, with its digest so far.
pub(super) struct Part {
    path: PathBuf,
    file: File,
    length: u64,
    hasher: Sha256,
}

impl Part {
    /// Opens what an earlier download left, or begins.
    fn open(path: &Path) -> Result<Self, HubError> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(path);
        let mut file = file.map_err(HubError::io(path, "open"))?;
        lock(&file, path)?;
        let mut hasher = Sha256::new();
        let length = io::copy(&mut file, &mut hasher).map_err(HubError::io(path, "read"))?;
        Ok(Self { path: path.to_owned(), file, length, hasher })
    }

    /// Begins anew.
    pub(super) fn create(path: &Path) -> Result<Self, HubError> {
        let mut part = Self::open(path)?;
        part.restart()?;
        Ok(part)
    }

    fn restart(&mut self) -> Result<(), HubError> {
        self.file
            .set_len(0)
            .and_then(|()| self.file.seek(SeekFrom::Start(0)))
            .map_err(HubError::io(&self.path, "begin again"))?;
        self.hasher.reset();
        self.length = 0;
        Ok(())
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        self.file.write_all(bytes).map_err(HubError::io(&self.path, "write"))?;
        self.hasher.update(bytes);
        self.length += bytes.len() as u64;
        Ok(())
    }

    pub(super) const fn len(&self) -> u64 {
        self.length
    }

    /// Gives the whole file its name, if it has the expected digest. `name` is for messages.
    pub(super) fn finish(mut self, target: &Path, name: &str, sha256: Option<&str>) -> Result<(), HubError> {
        let found = hex(&self.hasher.finalize_reset());
        if let Some(expected) = sha256.filter(|expected| !expected.eq_ignore_ascii_case(&found)) {
            self.discard();
            return Err(HubError::WrongChecksum { name: name.to_owned(), expected: expected.to_owned(), found });
        }
        self.file.sync_all().map_err(HubError::io(&self.path, "write"))?;
        fs::rename(&self.path, target).map_err(HubError::io(target, "rename the finished file"))
    }

    /// Removes a file that is of no use. Whether that succeeds changes nothing: the next download
    /// checks it again.
    pub(super) fn discard(self) {
        let _ = fs::remove_file(&self.path);
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // Closing is not enough: a child process that is just being started holds a copy of the
        // handle for a moment. If unlocking fails, closing does it later.
        let _ = self.file.unlock();
    }
}

/// Takes the part for this process alone.
fn lock(file: &File, path: &Path) -> Result<(), HubError> {
    const ACTION: &str = "lock (another process is fetching it)";
    file.try_lock().map_err(|error| HubError::io(path, ACTION)(error.into()))?;
    // Between opening and locking, another process may have finished the file and given it its
    // name; what is locked then is no part any more.
    let same = |named: fs::Metadata| {
        let opened = file.metadata()?;
        if (named.dev(), named.ino()) == (opened.dev(), opened.ino()) {
            Ok(())
        } else {
            Err(io::ErrorKind::WouldBlock.into())
        }
    };
    fs::metadata(path).and_then(same).map_err(HubError::io(path, ACTION))
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
