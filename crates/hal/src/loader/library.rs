//! One shared object: opened once, never closed.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use libloading::os::unix::{Library as Dl, RTLD_LOCAL, RTLD_NOW};
use qwen_hal_abi::{qhal_plugin_manifest_fn, qhal_plugin_query_fn};

use super::LoadError;
use crate::error::HalError;
use crate::host::Host;
use crate::plugin::{Manifest, Plugin, read_manifest};

/// Plugins of this process by path, so that none is initialised twice while it is in use.
static PLUGINS: Mutex<Option<HashMap<PathBuf, Weak<Plugin>>>> = Mutex::new(None);

/// An open library with the two symbols of a plugin.
#[derive(Debug)]
pub(super) struct Library {
    path: PathBuf,
    manifest: qhal_plugin_manifest_fn,
    query: qhal_plugin_query_fn,
}

impl Library {
    /// Opens a library. Its initialisers run, so it may do anything.
    pub(super) fn open(path: &Path) -> Result<Self, LoadError> {
        let refused = |message: String| LoadError::Open { path: path.to_owned(), message };
        // An absolute path: a bare name would be looked up in the linker's own places.
        let path = path.canonicalize().map_err(|error| refused(error.to_string()))?;
        // SAFETY: the initialisers of a plugin are trusted as the plugin is; the self test ran them elsewhere before.
        let library = unsafe { Dl::open(Some(&path), RTLD_NOW | RTLD_LOCAL) };
        let library = library.map_err(|error| refused(error.to_string()))?;
        let absent = |symbol: &'static str| LoadError::Symbol { path: path.clone(), symbol };
        // SAFETY: by the ABI, a symbol of this name has this type.
        let manifest = unsafe { library.get::<qhal_plugin_manifest_fn>("qhal_plugin_manifest") }.map(|symbol| *symbol);
        // SAFETY: as above.
        let query = unsafe { library.get::<qhal_plugin_query_fn>("qhal_plugin_query") }.map(|symbol| *symbol);
        let found = Self {
            manifest: manifest.map_err(|_| absent("qhal_plugin_manifest"))?,
            query: query.map_err(|_| absent("qhal_plugin_query"))?,
            path,
        };
        // Never closed: thread-local destructors and callbacks of the plugin may outlive every handle.
        std::mem::forget(library);
        Ok(found)
    }

    /// What the library says about itself.
    pub(super) fn manifest(&self) -> Result<Manifest, HalError> {
        // SAFETY: by the ABI, the function has no side effects and returns static data.
        unsafe { read_manifest((self.manifest)()) }
    }

    /// The plugin, initialised once as long as it is in use.
    pub(super) fn plugin(&self, host: &Host) -> Result<Arc<Plugin>, HalError> {
        let mut plugins = PLUGINS.lock().unwrap_or_else(PoisonError::into_inner);
        let plugins = plugins.get_or_insert_default();
        if let Some(plugin) = plugins.get(&self.path).and_then(Weak::upgrade) {
            return Ok(plugin);
        }
        // SAFETY: the symbols are those of a plugin, which by the ABI touches only what it is given.
        let plugin = unsafe { Plugin::from_query(self.manifest, self.query, host, &[]) }?;
        plugins.insert(self.path.clone(), Arc::downgrade(&plugin));
        Ok(plugin)
    }
}
