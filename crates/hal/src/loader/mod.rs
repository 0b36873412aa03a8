//! Finding, checking and opening plugins that are shared objects.
//!
//! In: places to look. Out: a [`Candidate`] for each library found, with the reason if it is refused. A candidate is loaded
//! in four steps, each of which can refuse: its manifest file is read, a self test runs in a child process, the library is
//! opened, both manifests are compared. Invariants:
//! - the current directory is never searched;
//! - nothing of a library runs in this process before its self test passed in another;
//! - a library is never closed.
//!
//! Places, in order: paths that were named, `QWEN_HAL_PATH`, `../lib/qwen/plugins` seen from the folder of the program,
//! `/usr/lib/qwen/plugins`. Of two plugins with one name the higher score is used, then the earlier place.

mod library;
mod probe;
mod sidecar;

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub use probe::{Prober, end_of, run_probe, wait as wait_for_child};
pub use sidecar::Sidecar;

use crate::error::HalError;
use crate::host::Host;
use crate::plugin::Plugin;

/// Folder of plugins below the prefix that the program is installed in.
const BESIDE: &str = "../lib/qwen/plugins";
/// Folder of plugins of the system.
const SYSTEM: &str = "/usr/lib/qwen/plugins";
/// Environment variable with folders and files, separated as in `PATH`.
pub const PATH_VARIABLE: &str = "QWEN_HAL_PATH";

/// Why a library is not used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// An entry of the search path depends on the current directory.
    #[error("{PATH_VARIABLE}: expected absolute paths, found {:?}; plugins are not searched from the current directory", path.display().to_string())]
    Relative {
        /// The entry.
        path: PathBuf,
    },
    /// A place that was named and cannot be read.
    #[error("{}: {message}; check the path", path.display())]
    Missing {
        /// The place.
        path: PathBuf,
        /// What the system said.
        message: String,
    },
    /// The manifest file is wrong.
    #[error("{}: {what}; docs/hal.md lists the keys", path.display())]
    Sidecar {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The library is for another machine.
    #[error("{}: expected {expected}, found {found}; use the build for this machine", path.display())]
    Platform {
        /// The manifest file.
        path: PathBuf,
        /// This machine.
        expected: String,
        /// What the manifest says.
        found: String,
    },
    /// Another plugin of the name is used.
    #[error("{}: not used, {} has the same name and comes first", path.display(), by.display())]
    Shadowed {
        /// The library.
        path: PathBuf,
        /// The one that is used.
        by: PathBuf,
    },
    /// The dynamic linker does not take it.
    #[error("{}: the dynamic linker refuses it: {message}; is the vendor's runtime installed?", path.display())]
    Open {
        /// The library.
        path: PathBuf,
        /// What the linker said.
        message: String,
    },
    /// It is not a plugin.
    #[error("{}: expected the symbol {symbol}, found none; it is not a plugin", path.display())]
    Symbol {
        /// The library.
        path: PathBuf,
        /// The absent symbol.
        symbol: &'static str,
    },
    /// The manifest file and the library contradict each other.
    #[error("{}: {what} is {library}, its manifest file says {sidecar}; install both from one release", path.display())]
    Disagrees {
        /// The library.
        path: PathBuf,
        /// Which fact.
        what: &'static str,
        /// The file's value.
        sidecar: String,
        /// The library's value.
        library: String,
    },
    /// The child process of the self test died.
    #[error("{}: crashed in its self test, in {stage} ({how}); it is not used, report it to its maker", path.display())]
    Crashed {
        /// The library.
        path: PathBuf,
        /// Which calls.
        stage: String,
        /// How the process ended.
        how: String,
    },
    /// The child process of the self test did not end.
    #[error("{}: hung in its self test, in {stage}, for {} s; it is not used, report it to its maker", path.display(), limit.as_secs_f32())]
    Hung {
        /// The library.
        path: PathBuf,
        /// Which calls.
        stage: String,
        /// How long it was given.
        limit: Duration,
    },
    /// The self test failed in an orderly way.
    #[error("{}: self test failed in {stage}: {message}", path.display())]
    SelfTest {
        /// The library.
        path: PathBuf,
        /// Which calls.
        stage: String,
        /// What was wrong.
        message: String,
    },
    /// The plugin is refused or broke the contract.
    #[error(transparent)]
    Hal(#[from] HalError),
}

/// Which of the places a library was found in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// Named by path.
    Named,
    /// `QWEN_HAL_PATH`.
    Environment,
    /// Beside the program.
    Program,
    /// The system's folder.
    System,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Named => "named",
            Self::Environment => PATH_VARIABLE,
            Self::Program => "beside the program",
            Self::System => "system",
        })
    }
}

/// Where to look for plugins, and how they are tried out.
#[derive(Debug, Clone, Default)]
pub struct Loader {
    places: Vec<(Source, PathBuf)>,
    prober: Option<Prober>,
}

impl Loader {
    /// Looks nowhere, and trusts what it is told to load.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a library or a folder by path.
    #[must_use]
    pub fn named(mut self, path: impl Into<PathBuf>) -> Self {
        self.places.push((Source::Named, path.into()));
        self
    }

    /// Adds the usual places: `variable` is the value of `QWEN_HAL_PATH`, `program` the path of the running program.
    #[must_use]
    pub fn usual(mut self, variable: Option<&OsStr>, program: Option<&Path>) -> Self {
        let entries = variable.into_iter().flat_map(std::env::split_paths);
        // An empty entry means the current directory elsewhere; here it means nothing.
        let entries = entries.filter(|entry| !entry.as_os_str().is_empty());
        self.places.extend(entries.map(|entry| (Source::Environment, entry)));
        if let Some(folder) = program.and_then(Path::parent) {
            self.places.push((Source::Program, folder.join(BESIDE)));
        }
        self.places.push((Source::System, SYSTEM.into()));
        self
    }

    /// Tries each library out in a child process first.
    #[must_use]
    pub fn with_prober(mut self, prober: Prober) -> Self {
        self.prober = Some(prober);
        self
    }

    /// Every library in these places, none of them opened.
    #[must_use]
    pub fn candidates(&self) -> Vec<Candidate> {
        let mut candidates: Vec<Candidate> = Vec::new();
        for (source, place) in &self.places {
            for candidate in look(*source, place) {
                let known = |other: &Candidate| other.path.canonicalize().ok() == candidate.path.canonicalize().ok();
                if !candidates.iter().any(|other| other.path == candidate.path || known(other)) {
                    candidates.push(candidate);
                }
            }
        }
        shadow(&mut candidates);
        candidates
    }

    /// Loads a candidate.
    ///
    /// # Errors
    /// Why it is not used; also kept in the log.
    pub fn load(&self, candidate: &Candidate, host: &Host) -> Result<Arc<Plugin>, LoadError> {
        let result = self.try_load(candidate, host);
        match &result {
            Ok(plugin) => tracing::info!(plugin = plugin.name(), path = %candidate.path.display(), "plugin loaded"),
            Err(error) => tracing::info!(%error, "plugin refused"),
        }
        result
    }

    fn try_load(&self, candidate: &Candidate, host: &Host) -> Result<Arc<Plugin>, LoadError> {
        if let Some(error) = &candidate.refused {
            return Err(error.clone());
        }
        if let Some(prober) = &self.prober {
            prober.probe(&candidate.path)?;
        }
        let library = library::Library::open(&candidate.path)?;
        if let Some(sidecar) = &candidate.sidecar {
            sidecar.agrees(&candidate.path, &library.manifest()?)?;
        }
        Ok(library.plugin(host)?)
    }
}

/// A library that may be a plugin.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// The library.
    pub path: PathBuf,
    /// Where it was found.
    pub source: Source,
    /// Its manifest file, if there is one.
    pub sidecar: Option<Sidecar>,
    /// Why it is not even opened.
    pub refused: Option<LoadError>,
}

impl Candidate {
    fn new(source: Source, path: PathBuf) -> Self {
        match Sidecar::read(&path) {
            Ok(sidecar) => Self { path, source, sidecar, refused: None },
            Err(error) => Self { path, source, sidecar: None, refused: Some(error) },
        }
    }

    /// Name of the plugin: the manifest file's, or else what the library's own name says.
    #[must_use]
    pub fn name(&self) -> &str {
        let of_file = || {
            let stem = self.path.file_stem().and_then(OsStr::to_str).unwrap_or("");
            stem.strip_prefix("libhal_").unwrap_or(stem)
        };
        self.sidecar.as_ref().map_or_else(of_file, |sidecar| &sidecar.name)
    }
}

/// Libraries of one place: the file itself, or `libhal_*.so` of a folder in order of their names.
fn look(source: Source, place: &Path) -> Vec<Candidate> {
    let refuse =
        |error: LoadError| vec![Candidate { path: place.to_owned(), source, sidecar: None, refused: Some(error) }];
    if source == Source::Environment && !place.is_absolute() {
        return refuse(LoadError::Relative { path: place.to_owned() });
    }
    let entries = match std::fs::metadata(place) {
        Ok(meta) if meta.is_dir() => std::fs::read_dir(place),
        Ok(_) => return vec![Candidate::new(source, place.to_owned())],
        Err(error) => Err(error),
    };
    match entries {
        Ok(entries) => {
            let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
            let mut paths: Vec<PathBuf> = paths.filter(|path| is_library(path)).collect();
            paths.sort();
            paths.into_iter().map(|path| Candidate::new(source, path)).collect()
        }
        // Folders that nobody named need not exist.
        Err(_) if source >= Source::Program => Vec::new(),
        Err(error) => refuse(LoadError::Missing { path: place.to_owned(), message: error.to_string() }),
    }
}

fn is_library(path: &Path) -> bool {
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or("");
    name.starts_with("libhal_") && path.extension().is_some_and(|extension| extension == "so")
}

/// Of several candidates with one name, all but the best are refused.
fn shadow(candidates: &mut [Candidate]) {
    let score = |candidate: &Candidate| candidate.sidecar.as_ref().map_or(0, |sidecar| sidecar.score);
    for i in 0..candidates.len() {
        let winner = candidates
            .iter()
            .filter(|other| other.refused.is_none() && other.name() == candidates[i].name())
            // The last of equals wins, so the order is turned round.
            .rev()
            .max_by_key(|other| (other.source == Source::Named, score(other)))
            .map(|winner| winner.path.clone());
        if let Some(by) = winner.filter(|by| candidates[i].refused.is_none() && *by != candidates[i].path) {
            candidates[i].refused = Some(LoadError::Shadowed { path: candidates[i].path.clone(), by });
        }
    }
}
