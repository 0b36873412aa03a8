//! Taking a plugin in: manifest, table, stubs for what is missing, initialisation.

use std::mem::{MaybeUninit, offset_of};
use std::sync::Arc;

use qwen_hal_abi::{
    LinkedPlugin, QHAL_ABI_MAJOR, QHAL_ABI_MINOR, QHAL_CPU_NEON, QHAL_UNIMPLEMENTED, qhal_buffer, qhal_buffer_desc,
    qhal_copy_desc, qhal_device, qhal_device_caps, qhal_device_id, qhal_device_info, qhal_error, qhal_event,
    qhal_health, qhal_import_desc, qhal_kv, qhal_launch_args, qhal_link, qhal_manifest, qhal_op_desc, qhal_plan,
    qhal_plan_info, qhal_plan_opts, qhal_plugin_api, qhal_plugin_manifest_fn, qhal_plugin_query_fn, qhal_slice,
    qhal_status, qhal_stream, qhal_stream_desc, qhal_support,
};
use std::ffi::c_void;
use std::ptr::NonNull;

use crate::device::{Device, DeviceInfo};
use crate::error::HalError;
use crate::host::Host;
use crate::text::{as_str, copy_text};

/// Largest `struct_size` that is believed.
const MAX_STRUCT: u32 = 1 << 16;
/// Most devices of a plugin that are believed.
const MAX_DEVICES: u32 = 4096;

/// Calls a function of the table; a status other than OK becomes a [`crate::CallError`].
macro_rules! call {
    ($plugin:expr, $op:expr, $entry:ident($($arg:expr),* $(,)?)) => {{
        let plugin: &$crate::plugin::Plugin = $plugin;
        let mut err = ::qwen_hal_abi::qhal_error::default();
        let status = match plugin.table().$entry {
            // SAFETY: the entry came from the plugin's own table; handles are alive (their owners are borrowed) and pointers
            // to structs are valid for the call.
            Some(entry) => unsafe { entry($($arg,)* &raw mut err) },
            None => ::qwen_hal_abi::QHAL_UNIMPLEMENTED,
        };
        if status == ::qwen_hal_abi::QHAL_OK {
            Ok(())
        } else {
            Err($crate::error::CallError::new(plugin.name_arc(), stringify!($entry), $op, status, &err))
        }
    }};
}
pub(crate) use call;

/// A struct of the other side, cut or zero-filled to our version of it.
///
/// # Safety
/// `source` is null or readable for the `struct_size` bytes that its first field states, and all-zero bytes are a value of T.
pub(crate) unsafe fn copy_struct<T>(source: *const T) -> Result<T, String> {
    if source.is_null() {
        return Err("a null pointer".into());
    }
    if !source.addr().is_multiple_of(align_of::<T>()) {
        return Err("a misaligned pointer".into());
    }
    // SAFETY: every growable struct starts with its size.
    let size = unsafe { source.cast::<u32>().read() };
    if !(8..=MAX_STRUCT).contains(&size) {
        return Err(format!("struct_size {size}"));
    }
    let mut own = MaybeUninit::<T>::zeroed();
    let n = (size as usize).min(size_of::<T>());
    // SAFETY: `n` bytes are readable at the source and writable here; the rest is zero, which is a value.
    unsafe {
        std::ptr::copy_nonoverlapping(source.cast::<u8>(), own.as_mut_ptr().cast::<u8>(), n);
        Ok(own.assume_init())
    }
}

/// Facts that a plugin states about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// Short name.
    pub name: String,
    /// Vendor, for people.
    pub vendor: String,
    /// Version of the plugin.
    pub version: String,
    /// Build identity.
    pub build_id: String,
    /// ABI (major, minor) that it was built with.
    pub abi: (u32, u32),
    /// Oldest host minor that it accepts.
    pub min_host_minor: u32,
    /// `QHAL_KIND_*`.
    pub kind: u32,
    /// Rank among plugins for the same device.
    pub score: u32,
}

/// An initialised plugin. Shut down when the last handle that came from it is gone.
#[derive(Debug)]
pub struct Plugin {
    table: qhal_plugin_api,
    name: Arc<str>,
    manifest: Manifest,
    host: Host,
}

impl Plugin {
    /// Takes in a plugin that is part of the program.
    ///
    /// # Errors
    /// [`HalError::Refused`] if versions do not fit, [`HalError::Contract`] if its data is unusable, or what its
    /// initialisation reports.
    pub fn linked(plugin: &LinkedPlugin, host: &Host) -> Result<Arc<Self>, HalError> {
        // SAFETY: whoever made the `LinkedPlugin` vouched for its functions.
        unsafe { Self::from_query(plugin.manifest(), plugin.query(), host, &[]) }
    }

    /// Takes in a plugin by its entry points, with options for its initialisation.
    ///
    /// # Errors
    /// As [`Plugin::linked`].
    ///
    /// # Safety
    /// The functions follow the ABI in what memory they touch; their answers need not be right.
    pub unsafe fn from_query(
        manifest: qhal_plugin_manifest_fn,
        query: qhal_plugin_query_fn,
        host: &Host,
        options: &[(&str, &str)],
    ) -> Result<Arc<Self>, HalError> {
        // SAFETY: by the caller's promise.
        let manifest = unsafe { read_manifest(manifest()) }?;
        let name: Arc<str> = manifest.name.as_str().into();
        // SAFETY: by the caller's promise; the host table is never freed.
        let table = unsafe { query(QHAL_ABI_MAJOR, QHAL_ABI_MINOR, host.api()) };
        if table.is_null() {
            return Err(HalError::Refused {
                plugin: name,
                expected: format!("a table for ABI {QHAL_ABI_MAJOR}.{QHAL_ABI_MINOR}"),
                found: "that the plugin declines this host".into(),
            });
        }
        // SAFETY: the plugin's table states its size; absent functions are null, which is `None`.
        let mut table = unsafe { copy_struct(table) }.map_err(|found| HalError::Contract {
            plugin: Arc::clone(&name),
            call: "qhal_plugin_query",
            expected: "a function table".into(),
            found,
        })?;
        table.struct_size = size_of::<qhal_plugin_api>() as u32;
        check_mandatory(&table, &name)?;
        fill_stubs(&mut table);
        let plugin = Self { table, name, manifest, host: *host };
        let options: Vec<qhal_kv> =
            options.iter().map(|(key, value)| qhal_kv { key: as_str(key), value: as_str(value) }).collect();
        let count = u32::try_from(options.len()).unwrap_or(u32::MAX);
        if let Err(error) = call!(&plugin, "", plugin_init(options.as_ptr(), count)) {
            // What was not initialised is not shut down.
            std::mem::forget(plugin);
            return Err(error.into());
        }
        tracing::debug!(plugin = %plugin.name, version = %plugin.manifest.version, "plugin initialised");
        Ok(Arc::new(plugin))
    }

    /// Short name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
    pub(crate) const fn name_arc(&self) -> &Arc<str> {
        &self.name
    }
    pub(crate) const fn table(&self) -> &qhal_plugin_api {
        &self.table
    }
    /// The table with stubs in its holes, for tools that test a plugin below the safe handles.
    #[must_use]
    pub const fn raw_table(&self) -> &qhal_plugin_api {
        &self.table
    }
    /// Facts that the plugin states about itself.
    #[must_use]
    pub const fn manifest(&self) -> &Manifest {
        &self.manifest
    }
    /// The host that it was given.
    #[must_use]
    pub const fn host(&self) -> &Host {
        &self.host
    }

    /// Number of devices.
    ///
    /// # Errors
    /// What the plugin reports.
    pub fn device_count(&self) -> Result<u32, HalError> {
        let mut count = 0;
        call!(self, "", device_count(&raw mut count))?;
        if count > MAX_DEVICES {
            return Err(self.contract("device_count", format!("at most {MAX_DEVICES} devices"), count.to_string()));
        }
        Ok(count)
    }

    /// Facts of a device that need no context.
    ///
    /// # Errors
    /// What the plugin reports.
    pub fn device_info(&self, index: u32) -> Result<DeviceInfo, HalError> {
        let mut raw = DeviceInfo::empty_raw();
        call!(self, "", device_info(index, &raw mut raw))?;
        Ok(DeviceInfo::from_raw(&raw))
    }

    /// Opens a device.
    ///
    /// # Errors
    /// What the plugin reports, or [`HalError::Contract`] if its answer is unusable.
    pub fn open(self: &Arc<Self>, index: u32, options: &[(&str, &str)]) -> Result<Device, HalError> {
        Device::open(self, index, options)
    }

    pub(crate) fn contract(
        &self,
        call: &'static str,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> HalError {
        HalError::Contract { plugin: Arc::clone(&self.name), call, expected: expected.into(), found: found.into() }
    }

    pub(crate) fn argument(
        &self,
        call: &'static str,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> HalError {
        HalError::Argument { plugin: Arc::clone(&self.name), call, expected: expected.into(), found: found.into() }
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        if let Err(error) = call!(&*self, "", plugin_shutdown()) {
            tracing::warn!(%error, "plugin did not shut down cleanly");
        }
    }
}

/// Checks a manifest and copies it.
///
/// # Safety
/// As [`copy_struct`], and its strings are readable.
pub(crate) unsafe fn read_manifest(raw: *const qhal_manifest) -> Result<Manifest, HalError> {
    let contract = |found: String| HalError::Contract {
        plugin: "?".into(),
        call: "qhal_plugin_manifest",
        expected: "a manifest with a name".into(),
        found,
    };
    // SAFETY: by the caller's promise; zero is a value of every field.
    let raw = unsafe { copy_struct(raw) }.map_err(contract)?;
    // SAFETY: by the caller's promise.
    let [name, vendor, version, build_id] =
        [raw.name, raw.vendor, raw.version, raw.build_id].map(|text| unsafe { copy_text(text) });
    if name.is_empty() {
        return Err(contract("no name".into()));
    }
    check_versions(&name, raw.abi_major, raw.min_host_minor, raw.cpu_features)?;
    Ok(Manifest {
        vendor,
        version,
        build_id,
        abi: (raw.abi_major, raw.abi_minor),
        min_host_minor: raw.min_host_minor,
        kind: raw.kind,
        score: raw.score,
        name,
    })
}

/// Whether this host and machine may use a plugin. The minor that it was built with does not matter: what it needs does.
pub(crate) fn check_versions(
    name: &str,
    abi_major: u32,
    min_host_minor: u32,
    cpu_features_needed: u64,
) -> Result<(), HalError> {
    let refused = |expected: String, found: String| HalError::Refused { plugin: name.into(), expected, found };
    if abi_major != QHAL_ABI_MAJOR {
        return Err(refused(format!("ABI major {QHAL_ABI_MAJOR}"), format!("{abi_major}")));
    }
    if min_host_minor > QHAL_ABI_MINOR {
        return Err(refused(
            format!("a plugin that accepts host minor {QHAL_ABI_MINOR}"),
            format!("one that needs {min_host_minor} or newer"),
        ));
    }
    let missing = cpu_features_needed & !cpu_features();
    if missing != 0 {
        return Err(refused(
            format!("CPU features within {:#x} (QHAL_CPU_*)", cpu_features()),
            format!("that it also needs {missing:#x}"),
        ));
    }
    Ok(())
}

/// `QHAL_CPU_*` bits of this machine.
fn cpu_features() -> u64 {
    let mut bits = 0;
    #[cfg(target_arch = "x86_64")]
    {
        use qwen_hal_abi::{QHAL_CPU_AVX2, QHAL_CPU_AVX512};
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            bits |= QHAL_CPU_AVX2;
        }
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
        {
            bits |= QHAL_CPU_AVX512;
        }
    }
    if cfg!(target_arch = "aarch64") {
        bits |= QHAL_CPU_NEON;
    }
    bits
}

/// Refuses a table that lacks what bring-up needs.
fn check_mandatory(table: &qhal_plugin_api, plugin: &Arc<str>) -> Result<(), HalError> {
    macro_rules! missing {
        ($($field:ident),* $(,)?) => {
            [$((stringify!($field), table.$field.is_none(), offset_of!(qhal_plugin_api, $field))),*]
        };
    }
    let absent: Vec<&str> = missing!(
        plugin_init,
        plugin_shutdown,
        device_count,
        device_info,
        device_open,
        device_close,
        device_caps,
        buffer_alloc,
        buffer_free,
        stream_create,
        stream_destroy,
        stream_wait,
        copy,
        op_supports,
        plan_create,
        plan_launch,
        plan_destroy,
    )
    .into_iter()
    .filter_map(|(name, missing, _)| missing.then_some(name))
    .collect();
    if absent.is_empty() {
        return Ok(());
    }
    Err(HalError::Contract {
        plugin: Arc::clone(plugin),
        call: "qhal_plugin_query",
        expected: "every mandatory function".into(),
        found: format!("none for {}", absent.join(", ")),
    })
}

/// Calls a function of an extension's table; a hole answers as the stubs of the plugin's table do.
macro_rules! call_extension {
    ($plugin:expr, $op:expr, $name:literal, $table:expr, $entry:ident($($arg:expr),* $(,)?)) => {{
        let plugin: &$crate::plugin::Plugin = $plugin;
        let mut err = ::qwen_hal_abi::qhal_error::default();
        let status = match $table.$entry {
            // SAFETY: the entry came from the plugin's own table; handles are alive (their owners are borrowed) and pointers
            // to structs are valid for the call.
            Some(entry) => unsafe { entry($($arg,)* &raw mut err) },
            // SAFETY: a record of ours.
            None => unsafe { $crate::plugin::refuse(&raw mut err, $name) },
        };
        if status == ::qwen_hal_abi::QHAL_OK {
            Ok(())
        } else {
            Err($crate::error::CallError::new(plugin.name_arc(), $name, $op, status, &err))
        }
    }};
}
pub(crate) use call_extension;

/// An extension's table, cut or filled with holes to our version of it.
///
/// # Safety
/// T is the table of this extension: integers and functions.
pub(crate) unsafe fn extension<T>(
    plugin: &Plugin,
    device: NonNull<qhal_device>,
    id: u32,
    name: &str,
) -> Result<T, HalError> {
    let mut table: *const c_void = std::ptr::null();
    call!(plugin, "", query_extension(device.as_ptr(), id, 1, &raw mut table))?;
    // SAFETY: an extension table states its size; null functions are `None`.
    unsafe { copy_struct(table.cast::<T>()) }
        .map_err(|found| plugin.contract("query_extension", format!("the table of {name}"), found))
}

/// Answer of a stub.
///
/// # Safety
/// `err` is null or writable.
pub(crate) unsafe fn refuse(err: *mut qhal_error, name: &str) -> qhal_status {
    // SAFETY: by the caller's promise.
    if let Some(err) = unsafe { err.as_mut() } {
        err.code = QHAL_UNIMPLEMENTED;
        let text = [name.as_bytes(), b" is not part of this plugin"].concat();
        for (to, from) in err.message.iter_mut().zip(text.iter().chain(std::iter::once(&0))) {
            *to = *from;
        }
    }
    QHAL_UNIMPLEMENTED
}

/// Puts a refusing stub wherever the table has nothing.
fn fill_stubs(table: &mut qhal_plugin_api) {
    macro_rules! stubs {
        ($($field:ident($($arg:ty),*);)*) => {$(
            if table.$field.is_none() {
                unsafe extern "C" fn stub($(_: $arg,)* err: *mut qhal_error) -> qhal_status {
                    // SAFETY: the host passes null or its own record.
                    unsafe { refuse(err, stringify!($field)) }
                }
                table.$field = Some(stub);
            }
        )*};
    }
    stubs! {
        plugin_init(*const qhal_kv, u32);
        plugin_shutdown();
        device_count(*mut u32);
        device_info(u32, *mut qhal_device_info);
        device_open(u32, *const qhal_kv, u32, *mut *mut qhal_device);
        device_close(*mut qhal_device);
        device_caps(*mut qhal_device, *mut qhal_device_caps);
        device_health(*mut qhal_device, *mut qhal_health);
        device_link(*mut qhal_device, *const qhal_device_id, *mut qhal_link);
        query_extension(*mut qhal_device, u32, u32, *mut *const c_void);
        buffer_alloc(*mut qhal_device, *const qhal_buffer_desc, *mut *mut qhal_buffer);
        buffer_import(*mut qhal_device, *const qhal_import_desc, *mut *mut qhal_buffer);
        buffer_free(*mut qhal_buffer);
        buffer_map(*mut qhal_buffer, u64, u64, u32, *mut *mut c_void);
        buffer_unmap(*mut qhal_buffer);
        stream_create(*mut qhal_device, *const qhal_stream_desc, *mut *mut qhal_stream);
        stream_destroy(*mut qhal_stream);
        stream_wait(*mut qhal_stream, u64);
        copy(*mut qhal_stream, *const qhal_copy_desc);
        fill(*mut qhal_stream, qhal_slice, *const c_void, u32);
        event_create(*mut qhal_device, u32, *mut *mut qhal_event);
        event_destroy(*mut qhal_event);
        event_record(*mut qhal_stream, *mut qhal_event);
        stream_wait_event(*mut qhal_stream, *mut qhal_event);
        event_wait(*mut qhal_event, u64);
        op_supports(*mut qhal_device, *const qhal_op_desc, *mut qhal_support);
        plan_create(*mut qhal_device, *const qhal_op_desc, *const qhal_plan_opts, *mut *mut qhal_plan, *mut qhal_plan_info);
        plan_prepack(*mut qhal_plan, *mut qhal_stream, u32, qhal_slice, qhal_slice);
        plan_launch(*mut qhal_plan, *mut qhal_stream, *const qhal_launch_args);
        plan_destroy(*mut qhal_plan);
    }
}
