//! The backend as a plugin: manifest, query, and the function table.
//!
//! In: calls through the C ABI. Out: statuses. Each entry is guarded, so a panic becomes INTERNAL and never crosses the
//! boundary. What happens behind an entry is in the module of its object: [`device`], [`buffer`], [`stream`], and
//! [`crate::plan`].

mod buffer;
mod cmdlist;
mod device;
mod host;
mod memory;
mod stream;
mod table;

use qwen_hal_abi::{
    LinkedPlugin, QHAL_ABI_MAJOR, QHAL_ABI_MINOR, QHAL_KIND_CPU, qhal_host_api, qhal_manifest, qhal_plugin_api,
};
use qwen_hal_plugin::{Static, static_text};

pub(crate) use buffer::of_slice as buffer_of_slice;
pub(crate) use device::Device;
pub(crate) use memory::LINE;
pub(crate) use qwen_hal_plugin::{Failure, caught, element, guard, sized, write_text};
pub(crate) use stream::Stream;

/// The backend, for `qwen_hal::Plugin::linked`.
// SAFETY: both functions keep the rules of the ABI.
pub const PLUGIN: LinkedPlugin = unsafe { LinkedPlugin::new(manifest, query) };

static MANIFEST: Static<qhal_manifest> = Static(qhal_manifest {
    struct_size: size_of::<qhal_manifest>() as u32,
    abi_major: QHAL_ABI_MAJOR,
    abi_minor: QHAL_ABI_MINOR,
    min_host_minor: 1,
    name: static_text("cpu"),
    vendor: static_text("qwen-inference"),
    version: static_text(env!("CARGO_PKG_VERSION")),
    build_id: static_text(concat!(env!("CARGO_PKG_NAME"), "-", env!("CARGO_PKG_VERSION"))),
    kind: QHAL_KIND_CPU,
    sanitizer: 0,
    cpu_features: 0,
    score: 1,
    reserved: 0,
});

/// The plugin's manifest.
#[must_use]
pub extern "C" fn manifest() -> *const qhal_manifest {
    &raw const MANIFEST.0
}

/// The plugin's table, or null if the host is of another major version or lends no compute pool.
///
/// # Safety
/// `host` is null or a table that stays valid for the life of the process.
#[must_use]
pub unsafe extern "C" fn query(major: u32, _minor: u32, host: *const qhal_host_api) -> *const qhal_plugin_api {
    if major != QHAL_ABI_MAJOR {
        return std::ptr::null();
    }
    // SAFETY: by the caller's promise.
    if unsafe { host::adopt(host) } { &raw const table::TABLE } else { std::ptr::null() }
}
