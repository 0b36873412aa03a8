//! Profiles on disk: one JSON file a device, found by what would change them.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use qwen_hal::Device;

use crate::error::DispatchError;
use crate::probe::{ProbeOptions, measure};
use crate::profile::HardwareProfile;

/// Longer files are not profiles.
const MAX_BYTES: u64 = 16 << 20;

/// A folder of profiles.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProfileCache {
    folder: PathBuf,
}

impl ProfileCache {
    /// In this folder, which is made when something is stored.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// The folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The file for a device with this many threads of the host.
    #[must_use]
    pub fn path(&self, device: &Device, threads: usize) -> PathBuf {
        let (info, manifest) = (device.info(), device.plugin().manifest());
        let mut hasher = DefaultHasher::new();
        (&manifest.version, &info.fingerprint, &info.name, &info.driver, threads).hash(&mut hasher);
        // The name of a plugin is letters, digits, - and _.
        self.folder.join(format!("{}-{}-{:016x}.json", manifest.name, info.index, hasher.finish()))
    }

    /// The stored profile of a device, if it is still of this device. A damaged file counts as none.
    #[must_use]
    pub fn load(&self, device: &Device, threads: usize) -> Option<HardwareProfile> {
        let path = self.path(device, threads);
        let meta = std::fs::metadata(&path).ok().filter(|meta| meta.is_file() && meta.len() <= MAX_BYTES)?;
        let text = std::fs::read_to_string(&path).ok()?;
        let profile: Option<HardwareProfile> = serde_json::from_str(&text)
            .inspect_err(
                |error| tracing::warn!(path = %path.display(), bytes = meta.len(), %error, "no profile, measured anew"),
            )
            .ok();
        profile.filter(|profile| profile.is_of(device, threads) && profile.is_sane())
    }

    /// Stores a profile in place of an older one; a reader sees one or the other.
    ///
    /// # Errors
    /// If the folder or file cannot be written.
    pub fn store(&self, device: &Device, profile: &HardwareProfile) -> Result<PathBuf, DispatchError> {
        let path = self.path(device, profile.threads);
        let failed = |path: &Path, what: String| DispatchError::Cache { path: path.into(), what };
        std::fs::create_dir_all(&self.folder).map_err(|error| failed(&self.folder, error.to_string()))?;
        let text = serde_json::to_string_pretty(profile).map_err(|error| failed(&path, error.to_string()))?;
        let own = path.with_extension(format!("{}.tmp", std::process::id()));
        let written = std::fs::write(&own, text).and_then(|()| std::fs::rename(&own, &path));
        written.map_err(|error| failed(&path, error.to_string()))?;
        Ok(path)
    }

    /// The stored profile, or one measured now and stored. With `refresh` it is measured whatever is stored; variants that were tuned
    /// are kept as long as the device is the same.
    ///
    /// # Errors
    /// If the device fails. That a profile cannot be stored is logged, and no error.
    pub fn load_or_measure(
        &self,
        device: &Device,
        threads: usize,
        refresh: bool,
        options: &ProbeOptions,
    ) -> Result<HardwareProfile, DispatchError> {
        let stored = self.load(device, threads);
        match stored {
            Some(profile) if !refresh => Ok(profile),
            stored => {
                let mut profile = measure(device, threads, options)?;
                profile.variants = stored.map(|stored| stored.variants).unwrap_or_default();
                if let Err(error) = self.store(device, &profile) {
                    tracing::warn!(%error, "the profile is measured again next time");
                }
                Ok(profile)
            }
        }
    }
}
