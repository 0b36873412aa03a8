//! An open device: its facts, its state, and what is made from it.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use qwen_hal_abi::{
    QHAL_CAPS_BANDWIDTH, QHAL_CAPS_BUFFER_ALIGNMENT, QHAL_CAPS_CACHE_BYTES, QHAL_CAPS_COMPUTE_UNITS,
    QHAL_CAPS_MATRIX_TILE, QHAL_CAPS_MAX_ALLOCATION, QHAL_CAPS_MEMORY_TOTAL, QHAL_CAPS_NUMA_NODE,
    QHAL_CAPS_SCRATCH_BYTES, QHAL_CAPS_VECTOR_WIDTH, QHAL_CAPS_VMM_GRANULARITY, QHAL_EXT_VMM, QHAL_FEATURE_INLINE,
    QHAL_FEATURE_VMM, QHAL_HEALTH_LOST, QHAL_HEALTH_OK, QHAL_LINK_ISOLATED, QHAL_LINK_SAME, qhal_buffer,
    qhal_buffer_desc, qhal_cmdlist, qhal_cmdlist_api, qhal_device, qhal_device_caps, qhal_device_id, qhal_device_info,
    qhal_dtype_caps, qhal_event, qhal_health, qhal_kv, qhal_link, qhal_plan, qhal_variants_api, qhal_vmm_api,
};

use crate::buffer::{Buffer, BufferDesc, HostOwner};
use crate::cmdlist::Recorder;
use crate::error::{HalError, PlanError};
use crate::op::OpDesc;
use crate::plan::{Plan, PlanOptions, Support};
use crate::plugin::{Plugin, call, call_extension, copy_struct, extension};
use crate::stream::{Event, Stream};
use crate::text::{as_str, fixed_text};

/// Most entries of a dtype table that are believed.
const MAX_DTYPES: u32 = 1024;

/// All-zero bytes, with `struct_size` to be set by the caller.
pub(crate) trait Zeroed: Copy {
    /// A value of zeros.
    fn zeroed() -> Self {
        // SAFETY: implemented only for C structs of integers, floats, pointers and arrays of these.
        unsafe { MaybeUninit::zeroed().assume_init() }
    }
}
impl Zeroed for qhal_device_info {}
impl Zeroed for qhal_device_caps {}
impl Zeroed for qwen_hal_abi::qhal_plan_info {}
impl Zeroed for qwen_hal_abi::qhal_support {}
impl Zeroed for qwen_hal_abi::qhal_variant {}

/// What can be told of a device without opening it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// `QHAL_KIND_*`.
    pub kind: u32,
    /// Index in the plugin.
    pub index: u32,
    /// Stable unique id, if there is one.
    pub uuid: Option<[u8; 16]>,
    /// PCI address, if there is one.
    pub bus_address: Option<u64>,
    /// Name for people.
    pub name: String,
    /// Name for caches.
    pub fingerprint: String,
    /// Driver and firmware version.
    pub driver: String,
    /// Memory in bytes, if known.
    pub memory_total: Option<u64>,
}

impl DeviceInfo {
    pub(crate) fn empty_raw() -> qhal_device_info {
        let mut raw = qhal_device_info::zeroed();
        raw.struct_size = size_of::<qhal_device_info>() as u32;
        raw.id.struct_size = size_of::<qhal_device_id>() as u32;
        raw.id.bus_address = u64::MAX;
        raw
    }
    /// Names of the device's model, by which a user chooses among the devices of a plugin: what the fingerprint has before a
    /// colon, with slashes between names; none if it has no colon.
    pub fn models(&self) -> impl Iterator<Item = &str> {
        let names = self.fingerprint.split_once(':').map_or("", |(names, _)| names);
        names.split('/').filter(|name| !name.is_empty())
    }

    /// The first name of the device's model.
    #[must_use]
    pub fn model(&self) -> Option<&str> {
        self.models().next()
    }

    pub(crate) fn from_raw(raw: &qhal_device_info) -> Self {
        Self {
            kind: raw.kind,
            index: raw.id.index,
            uuid: (raw.id.uuid != [0; 16]).then_some(raw.id.uuid),
            bus_address: (raw.id.bus_address != u64::MAX).then_some(raw.id.bus_address),
            name: fixed_text(&raw.name),
            fingerprint: fixed_text(&raw.fingerprint),
            driver: fixed_text(&raw.driver),
            memory_total: (raw.memory_total != 0).then_some(raw.memory_total),
        }
    }
}

/// What a device can do with one dtype.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DtypeCaps {
    /// `QHAL_DTYPE_*` code.
    pub dtype: u32,
    /// `QHAL_DTYPE_CAN_*` bits.
    pub bits: u32,
    /// Peak operations per second, if known.
    pub peak_ops: Option<f64>,
    /// 1 declared, 2 measured.
    pub peak_source: u32,
}

/// Constant facts of an open device; `None` is unknown.
#[derive(Debug, Clone, PartialEq)]
pub struct Caps {
    /// Memory in bytes.
    pub memory_total: Option<u64>,
    /// Largest single allocation.
    pub max_allocation: Option<u64>,
    /// Alignment of slices beyond the natural one.
    pub buffer_alignment: u64,
    /// Granularity of commits.
    pub vmm_granularity: Option<u64>,
    /// Cores, compute units or clusters.
    pub compute_units: Option<u32>,
    /// Bytes of a vector register, or threads of a warp.
    pub vector_width: Option<u32>,
    /// Rows, columns, depth of the matrix unit's tile.
    pub matrix_tile: Option<[u32; 3]>,
    /// NUMA node.
    pub numa_node: Option<u32>,
    /// Cache bytes per level, 0 where there is none.
    pub cache_bytes: Option<[u64; 4]>,
    /// Scratch memory per compute unit.
    pub scratch_bytes: Option<u64>,
    /// `QHAL_FEATURE_*` bits.
    pub features: u64,
    /// Peak memory bandwidth in bytes per second.
    pub bandwidth: Option<f64>,
    /// 0 unknown, 1 declared, 2 measured.
    pub bandwidth_source: u32,
    /// `QHAL_CAPS_*` bits of fields that are estimates.
    pub estimated_fields: u64,
    /// What it can do with each dtype.
    pub dtypes: Vec<DtypeCaps>,
}

impl Caps {
    /// Whether all of these `QHAL_FEATURE_*` bits are set.
    #[must_use]
    pub const fn has(&self, features: u64) -> bool {
        self.features & features == features
    }

    fn read(plugin: &Plugin, device: NonNull<qhal_device>) -> Result<Self, HalError> {
        let mut raw = qhal_device_caps::zeroed();
        raw.struct_size = size_of::<qhal_device_caps>() as u32;
        call!(plugin, "", device_caps(device.as_ptr(), &raw mut raw))?;
        let valid = |bit: u64| raw.valid_fields & bit != 0;
        let buffer_alignment = if valid(QHAL_CAPS_BUFFER_ALIGNMENT) { raw.buffer_alignment.max(1) } else { 1 };
        let vmm_granularity = valid(QHAL_CAPS_VMM_GRANULARITY).then_some(raw.vmm_granularity);
        for (what, value) in [("buffer_alignment", buffer_alignment), ("vmm_granularity", vmm_granularity.unwrap_or(1))]
        {
            if !value.is_power_of_two() {
                return Err(plugin.contract("device_caps", format!("a power of two as {what}"), value.to_string()));
            }
        }
        // SAFETY: the plugin's table is readable while the device is open.
        let dtypes = unsafe { read_dtypes(plugin, raw.dtypes, raw.num_dtypes) }?;
        Ok(Self {
            memory_total: valid(QHAL_CAPS_MEMORY_TOTAL).then_some(raw.memory_total),
            max_allocation: valid(QHAL_CAPS_MAX_ALLOCATION).then_some(raw.max_allocation),
            buffer_alignment,
            vmm_granularity,
            compute_units: valid(QHAL_CAPS_COMPUTE_UNITS).then_some(raw.compute_units),
            vector_width: valid(QHAL_CAPS_VECTOR_WIDTH).then_some(raw.vector_width),
            matrix_tile: valid(QHAL_CAPS_MATRIX_TILE).then_some(raw.matrix_tile),
            numa_node: (valid(QHAL_CAPS_NUMA_NODE) && raw.numa_node != u32::MAX).then_some(raw.numa_node),
            cache_bytes: valid(QHAL_CAPS_CACHE_BYTES).then_some(raw.cache_bytes),
            scratch_bytes: valid(QHAL_CAPS_SCRATCH_BYTES).then_some(raw.scratch_bytes),
            features: raw.features,
            bandwidth: (valid(QHAL_CAPS_BANDWIDTH) && raw.bandwidth.is_finite()).then_some(raw.bandwidth),
            bandwidth_source: raw.bandwidth_source,
            estimated_fields: raw.estimated_fields,
            dtypes,
        })
    }
}

/// Copies a dtype table, walking with the stride that its elements state.
///
/// # Safety
/// Unless null, `table` points to `count` elements of the size that the first one states.
unsafe fn read_dtypes(plugin: &Plugin, table: *const qhal_dtype_caps, count: u32) -> Result<Vec<DtypeCaps>, HalError> {
    if count == 0 {
        return Ok(Vec::new());
    }
    let contract =
        |found: String| plugin.contract("device_caps", format!("a table of at most {MAX_DTYPES} dtypes"), found);
    if count > MAX_DTYPES {
        return Err(contract(format!("{count} entries")));
    }
    if table.is_null() || !table.is_aligned() {
        return Err(contract("a null or misaligned pointer".into()));
    }
    // SAFETY: at least one element.
    let stride = unsafe { table.cast::<u32>().read() } as usize;
    if stride < 8 || !stride.is_multiple_of(align_of::<qhal_dtype_caps>()) {
        return Err(contract(format!("elements of {stride} bytes")));
    }
    let mut dtypes = Vec::with_capacity(count as usize);
    for i in 0..count as usize {
        // SAFETY: element `i` of the plugin's table; zeros are a value.
        let raw =
            unsafe { copy_struct(table.cast::<u8>().add(i * stride).cast::<qhal_dtype_caps>()) }.map_err(contract)?;
        dtypes.push(DtypeCaps {
            dtype: raw.dtype,
            bits: raw.bits,
            peak_ops: (raw.peak_ops.is_finite() && raw.peak_ops > 0.0).then_some(raw.peak_ops),
            peak_source: raw.peak_source,
        });
    }
    Ok(dtypes)
}

/// The way from one device to another; `None` is unknown.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// `QHAL_LINK_*`.
    pub class: u32,
    /// Bit 0 copy, 1 load/store, 2 coherent, 3 atomics.
    pub flags: u32,
    /// Hops.
    pub hops: u32,
    /// Bytes per second.
    pub bandwidth: Option<f64>,
    /// Nanoseconds.
    pub latency_ns: Option<f64>,
}

/// State of a device at a moment; `None` is unknown.
#[derive(Debug, Clone, PartialEq)]
pub struct Health {
    /// `QHAL_HEALTH_*`.
    pub state: u32,
    /// Free memory in bytes.
    pub memory_free: Option<u64>,
    /// Used memory in bytes.
    pub memory_used: Option<u64>,
    /// Memory held by the allocator but unused.
    pub memory_reserved: Option<u64>,
    /// Utilisation of compute, 0..1.
    pub utilisation: Option<f64>,
    /// Degrees Celsius.
    pub temperature: Option<f64>,
    /// Watts.
    pub power: Option<f64>,
    /// Vendor-defined bits.
    pub throttle_reasons: Option<u64>,
    /// Corrected memory errors.
    pub memory_errors_corrected: Option<u64>,
    /// Uncorrected memory errors.
    pub memory_errors_uncorrected: Option<u64>,
    /// Link errors.
    pub link_errors: Option<u64>,
    /// Host time of the last sign of progress.
    pub heartbeat_ns: Option<u64>,
    /// Last sticky error.
    pub last_error: Option<i64>,
}

/// Something whose destruction has to wait until no work is pending.
pub(crate) enum Dead {
    Buffer { raw: NonNull<qhal_buffer>, _owner: Option<HostOwner> },
    Plan(NonNull<qhal_plan>),
    Event(NonNull<qhal_event>),
    CommandList(NonNull<qhal_cmdlist>, qhal_cmdlist_api),
}

/// The one owner of a plugin's device object.
pub(crate) struct DeviceInner {
    pub(crate) plugin: Arc<Plugin>,
    pub(crate) raw: NonNull<qhal_device>,
    pub(crate) info: DeviceInfo,
    pub(crate) caps: Caps,
    /// Calls that enqueue return when the work is done.
    pub(crate) inline: bool,
    vmm: Option<qhal_vmm_api>,
    /// Asked for when a variant is first wanted.
    pub(crate) variants: OnceLock<Option<qhal_variants_api>>,
    /// Asked for when a list is first recorded.
    pub(crate) cmdlist: OnceLock<Result<qhal_cmdlist_api, HalError>>,
    /// Variants that are preferred, by the identity of a plan.
    preferred: RwLock<HashMap<u64, String>>,
    /// Held for reading while a launch uses reserved memory, for writing while such memory is given back.
    pub(crate) gate: RwLock<()>,
    /// Streams with work that was not waited for.
    busy: AtomicUsize,
    dead: Mutex<Vec<Dead>>,
}

// SAFETY: the ABI lets any thread use a device handle; dead handles are only destroyed.
unsafe impl Send for DeviceInner {}
// SAFETY: as above; `dead` is behind a lock.
unsafe impl Sync for DeviceInner {}

impl DeviceInner {
    pub(crate) fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Acquire) != 0
    }

    pub(crate) fn stream_busy(&self) {
        self.busy.fetch_add(1, Ordering::AcqRel);
    }

    /// A stream has no pending work any more; what waited for that is destroyed.
    pub(crate) fn stream_idle(&self) {
        if self.busy.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.bury();
        }
    }

    /// Destroys at once, or as soon as nothing is pending.
    pub(crate) fn retire(&self, dead: Dead) {
        if !self.is_busy() {
            return self.destroy(&dead);
        }
        self.dead.lock().unwrap_or_else(PoisonError::into_inner).push(dead);
        if !self.is_busy() {
            self.bury();
        }
    }

    fn bury(&self) {
        let dead = std::mem::take(&mut *self.dead.lock().unwrap_or_else(PoisonError::into_inner));
        dead.iter().for_each(|dead| self.destroy(dead));
    }

    fn destroy(&self, dead: &Dead) {
        let plugin = &*self.plugin;
        let result = match dead {
            Dead::Buffer { raw, .. } => call!(plugin, "", buffer_free(raw.as_ptr())),
            Dead::Plan(raw) => call!(plugin, "", plan_destroy(raw.as_ptr())),
            Dead::Event(raw) => call!(plugin, "", event_destroy(raw.as_ptr())),
            Dead::CommandList(raw, table) => {
                call_extension!(plugin, "", "cmdlist.destroy", table, destroy(raw.as_ptr()))
            }
        };
        if let Err(error) = result {
            tracing::warn!(%error, "the plugin did not take an object back");
        }
    }

    fn vmm(&self, call: &'static str) -> Result<&qhal_vmm_api, HalError> {
        self.vmm.as_ref().ok_or_else(|| self.plugin.argument(call, "a device with the vmm extension", "one without"))
    }

    pub(crate) fn vmm_reserve(&self, desc: &qhal_buffer_desc, out: &mut *mut qhal_buffer) -> Result<(), HalError> {
        let table = self.vmm("vmm.reserve")?;
        Ok(call_extension!(&self.plugin, "", "vmm.reserve", table, reserve(self.raw.as_ptr(), desc, out))?)
    }

    pub(crate) fn vmm_commit(&self, buffer: NonNull<qhal_buffer>, offset: u64, size: u64) -> Result<(), HalError> {
        let table = self.vmm("vmm.commit")?;
        Ok(call_extension!(&self.plugin, "", "vmm.commit", table, commit(buffer.as_ptr(), offset, size))?)
    }

    pub(crate) fn vmm_decommit(&self, buffer: NonNull<qhal_buffer>, offset: u64, size: u64) -> Result<(), HalError> {
        // The range was checked, and the gate keeps launches out.
        let table = self.vmm("vmm.decommit")?;
        Ok(call_extension!(&self.plugin, "", "vmm.decommit", table, decommit(buffer.as_ptr(), offset, size))?)
    }
}

impl Drop for DeviceInner {
    fn drop(&mut self) {
        // Streams hold their device, so none is left and nothing is pending.
        self.bury();
        if let Err(error) = call!(&self.plugin, "", device_close(self.raw.as_ptr())) {
            tracing::warn!(%error, "device did not close cleanly");
        }
    }
}

/// An open device. Clones share it; it closes when the last handle that came from it is gone.
#[derive(Clone)]
pub struct Device(pub(crate) Arc<DeviceInner>);

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device")
            .field("plugin", &self.0.plugin.name())
            .field("info", &self.0.info)
            .finish_non_exhaustive()
    }
}

impl Device {
    pub(crate) fn open(plugin: &Arc<Plugin>, index: u32, options: &[(&str, &str)]) -> Result<Self, HalError> {
        let count = plugin.device_count()?;
        if index >= count {
            return Err(plugin.argument("device_open", format!("an index below {count}"), index.to_string()));
        }
        let info = plugin.device_info(index)?;
        let options: Vec<qhal_kv> =
            options.iter().map(|(key, value)| qhal_kv { key: as_str(key), value: as_str(value) }).collect();
        let num_options = u32::try_from(options.len()).unwrap_or(u32::MAX);
        let mut raw = std::ptr::null_mut();
        call!(plugin, "", device_open(index, options.as_ptr(), num_options, &raw mut raw))?;
        let raw = NonNull::new(raw).ok_or_else(|| plugin.contract("device_open", "a device", "null with status OK"))?;
        let facts = Caps::read(plugin, raw).and_then(|caps| {
            // SAFETY: the table of this extension.
            let vmm = || unsafe { extension(plugin, raw, QHAL_EXT_VMM, "vmm") };
            let vmm = if caps.has(QHAL_FEATURE_VMM) { Some(vmm()?) } else { None };
            Ok((caps, vmm))
        });
        let (caps, vmm) = match facts {
            Ok(facts) => facts,
            Err(error) => {
                // The device would leak otherwise; its own failure to close adds nothing to the report.
                let _ = call!(plugin, "", device_close(raw.as_ptr()));
                return Err(error);
            }
        };
        Ok(Self(Arc::new(DeviceInner {
            plugin: Arc::clone(plugin),
            raw,
            info,
            inline: caps.has(QHAL_FEATURE_INLINE),
            caps,
            vmm,
            variants: OnceLock::new(),
            cmdlist: OnceLock::new(),
            preferred: RwLock::default(),
            gate: RwLock::new(()),
            busy: AtomicUsize::new(0),
            dead: Mutex::default(),
        })))
    }

    /// The plugin's handle, for tools that test a plugin below the safe handles; open as long as this.
    #[must_use]
    pub fn raw_handle(&self) -> *mut qhal_device {
        self.0.raw.as_ptr()
    }
    /// The plugin that it belongs to.
    #[must_use]
    pub fn plugin(&self) -> &Arc<Plugin> {
        &self.0.plugin
    }
    /// Short name: plugin, model where the plugin tells one, and the number among the plugin's devices or those of the model.
    #[must_use]
    pub fn label(&self) -> String {
        let (plugin, info) = (self.plugin(), self.info());
        let Some(model) = info.model() else { return format!("{}:{}", plugin.name(), info.index) };
        let same = |index: &u32| plugin.device_info(*index).is_ok_and(|other| other.model() == Some(model));
        format!("{}:{model}:{}", plugin.name(), (0..info.index).filter(same).count())
    }

    /// Identity and names.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.0.info
    }
    /// Constant facts.
    #[must_use]
    pub fn caps(&self) -> &Caps {
        &self.0.caps
    }

    /// The way to another device of the same plugin.
    ///
    /// # Errors
    /// What the plugin reports, `UNIMPLEMENTED` if it knows nothing of links.
    pub fn link(&self, peer: &DeviceInfo) -> Result<Link, HalError> {
        let id = qhal_device_id {
            struct_size: size_of::<qhal_device_id>() as u32,
            index: peer.index,
            uuid: peer.uuid.unwrap_or_default(),
            bus_address: peer.bus_address.unwrap_or(u64::MAX),
        };
        let mut raw = qhal_link { struct_size: size_of::<qhal_link>() as u32, ..Default::default() };
        call!(&self.0.plugin, "", device_link(self.0.raw.as_ptr(), &raw const id, &raw mut raw))?;
        if !(QHAL_LINK_SAME..=QHAL_LINK_ISOLATED).contains(&raw.class) {
            return Err(self.0.plugin.contract("device_link", "a class of QHAL_LINK_*", raw.class.to_string()));
        }
        let known = |value: f64| (value.is_finite() && value > 0.0).then_some(value);
        let (bandwidth, latency_ns) = (known(raw.bandwidth), known(raw.latency_ns));
        Ok(Link { class: raw.class, flags: raw.flags, hops: raw.hops, bandwidth, latency_ns })
    }

    /// State now. Never blocks; any thread, during work.
    ///
    /// # Errors
    /// What the plugin reports.
    pub fn health(&self) -> Result<Health, HalError> {
        let mut raw = qhal_health { struct_size: size_of::<qhal_health>() as u32, ..Default::default() };
        call!(&self.0.plugin, "", device_health(self.0.raw.as_ptr(), &raw mut raw))?;
        if !(QHAL_HEALTH_OK..=QHAL_HEALTH_LOST).contains(&raw.state) {
            return Err(self.0.plugin.contract("device_health", "a state of QHAL_HEALTH_*", raw.state.to_string()));
        }
        let valid = |bit: u32| raw.valid_fields & (1 << bit) != 0;
        let real = |bit: u32, value: f64| (valid(bit) && value.is_finite()).then_some(value);
        let count = |bit: u32, value: u64| valid(bit).then_some(value);
        Ok(Health {
            state: raw.state,
            memory_free: count(0, raw.memory_free),
            memory_used: count(1, raw.memory_used),
            memory_reserved: count(2, raw.memory_reserved),
            utilisation: real(3, raw.utilisation),
            temperature: real(4, raw.temperature),
            power: real(5, raw.power),
            throttle_reasons: count(6, raw.throttle_reasons),
            memory_errors_corrected: count(7, raw.memory_errors_corrected),
            memory_errors_uncorrected: count(8, raw.memory_errors_uncorrected),
            link_errors: count(9, raw.link_errors),
            heartbeat_ns: count(10, raw.heartbeat_ns),
            last_error: valid(11).then_some(raw.last_error),
        })
    }

    /// Memory of undefined content.
    ///
    /// # Errors
    /// [`HalError::Argument`] for a size of 0 or a wrong alignment; else what the plugin reports.
    pub fn alloc(&self, desc: &BufferDesc) -> Result<Buffer, HalError> {
        Buffer::alloc(&self.0, desc, false)
    }

    /// Address space without memory; [`Buffer::commit`] backs it.
    ///
    /// # Errors
    /// As [`Device::alloc`]; also if the device has no vmm extension.
    pub fn reserve(&self, desc: &BufferDesc) -> Result<Buffer, HalError> {
        Buffer::alloc(&self.0, desc, true)
    }

    /// Makes host memory a read-only buffer without a copy, and keeps its owner alive.
    ///
    /// # Errors
    /// What the plugin reports, UNIMPLEMENTED if it needs copies.
    pub fn import_host(&self, owner: HostOwner, usage: u32, name: &str) -> Result<Buffer, HalError> {
        Buffer::import(&self.0, owner, usage, name)
    }

    /// A queue.
    ///
    /// # Errors
    /// What the plugin reports.
    pub fn stream(&self, name: &str) -> Result<Stream, HalError> {
        Stream::create(&self.0, name)
    }

    /// A marker.
    ///
    /// # Errors
    /// What the plugin reports.
    pub fn event(&self) -> Result<Event, HalError> {
        Event::create(&self.0)
    }

    /// Begins a list of launches that can be enqueued together.
    ///
    /// # Errors
    /// [`HalError::Argument`] if the device has no command lists; else what the plugin reports.
    pub fn record(&self) -> Result<Recorder, HalError> {
        Recorder::begin(&self.0)
    }

    /// Whether [`Device::plan`] would succeed, and how well.
    ///
    /// # Errors
    /// [`PlanError::Invalid`] if the description contradicts itself; else what the plugin reports.
    pub fn op_supports(&self, op: &OpDesc) -> Result<Support, PlanError> {
        Support::ask(&self.0, op)
    }

    /// Prepares an op for ranges of shapes.
    ///
    /// # Errors
    /// [`PlanError::Invalid`] if the description contradicts itself, [`PlanError::Unsupported`] if the device does not have
    /// it; else what the plugin reports.
    pub fn plan(&self, op: &OpDesc, options: &PlanOptions) -> Result<Plan, PlanError> {
        let plan = Plan::create(&self.0, op, options, None)?;
        let preferred = self.0.preferred.read().unwrap_or_else(PoisonError::into_inner);
        let Some(name) = preferred.get(&plan.info().content_hash) else { return Ok(plan) };
        // A preference may be of another version of the plugin; then the plugin's own choice stands.
        Ok(match Plan::create(&self.0, op, options, Some(name)) {
            Ok(mut plan) => {
                plan.preferred = true;
                plan
            }
            Err(_) => plan,
        })
    }

    /// From now on [`Device::plan`] takes these variants for plans of these identities (`content_hash` of what it would plan
    /// otherwise). Replaces earlier preferences.
    pub fn prefer(&self, variants: impl IntoIterator<Item = (u64, String)>) {
        *self.0.preferred.write().unwrap_or_else(PoisonError::into_inner) = variants.into_iter().collect();
    }

    /// As [`Device::plan`], with the variant of this name (of [`Plan::variants`]) wherever it applies.
    ///
    /// # Errors
    /// As [`Device::plan`]; [`PlanError::Unsupported`] if the op has no such variant, or the device no variants at all.
    pub fn plan_as(&self, op: &OpDesc, options: &PlanOptions, variant: &str) -> Result<Plan, PlanError> {
        Plan::create(&self.0, op, options, Some(variant))
    }
}
