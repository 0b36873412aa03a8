//! Devices: facts from the sheet, state from what the simulator did with it, memory from its allocator.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use qwen_chips::Dtype;
use qwen_hal_abi::*;
use qwen_hal_plugin::{Failure, answer, guard, sized, write_text};

use crate::allocator::Allocator;
use crate::buffer::VMM;
use crate::cmdlist::CMDLIST;
use crate::collective::COLLECTIVES;
use crate::inner::{self, InnerDevice};
use crate::machine::{Slot, slot};
use crate::model::{Model, models};
use crate::registry::Registry;
use crate::settings::Settings;

pub(crate) static DEVICES: Registry<Device> = Registry::new("device");

/// What a `qhal_device` stands for.
pub(crate) struct Device {
    pub(crate) model: &'static Model,
    pub(crate) index: u32,
    pub(crate) settings: Settings,
    pub(crate) inner: InnerDevice,
    allocator: Mutex<Allocator>,
    pub(crate) counters: Counters,
    opened: Instant,
}

/// What happened on a device.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) allocations: AtomicU64,
    pub(crate) launches: AtomicU64,
    /// Modelled nanoseconds of work.
    pub(crate) busy_ns: AtomicU64,
    pub(crate) hanging: AtomicBool,
    pub(crate) lost: AtomicBool,
    pub(crate) streams: AtomicU64,
    last_error: AtomicU64,
}

impl Device {
    pub(crate) fn allocator(&self) -> MutexGuard<'_, Allocator> {
        self.allocator.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses everything once the device is lost.
    pub(crate) fn alive(&self) -> Result<(), Failure> {
        if self.counters.lost.load(Ordering::Acquire) { Err(device_lost()) } else { Ok(()) }
    }

    /// Adds modelled time.
    pub(crate) fn add_time(&self, ns: f64) {
        self.counters.busy_ns.fetch_add(ns as u64, Ordering::Relaxed);
    }

    pub(crate) fn failed(&self, failure: &Failure) {
        self.counters.last_error.store(failure.code.cast_unsigned().into(), Ordering::Relaxed);
    }

    /// Takes so many bytes of the modelled memory, or a page of virtual memory; the address is the modelled one.
    pub(crate) fn take(&self, bytes: u64, page: bool) -> Result<u64, Failure> {
        self.alive()?;
        let count = 1 + self.counters.allocations.fetch_add(1, Ordering::Relaxed);
        if self.settings.oom == Some(count) {
            return Err(Failure::out_of_memory(format!("allocation {count} finds no memory (injected fault)")));
        }
        let mut allocator = self.allocator();
        let piece = if page { allocator.take_page(bytes) } else { allocator.take(bytes) };
        piece.map(|piece| piece.address).ok_or_else(|| {
            Failure::out_of_memory(format!(
                "{bytes} bytes wanted, {} of {} free, the largest piece has {} (simulated {})",
                allocator.free(),
                allocator.capacity(),
                allocator.largest(),
                self.model.chip.name
            ))
        })
    }
}

fn devices_of_a_model() -> Result<usize, Failure> {
    Ok(Settings::from_environment()?.devices as usize)
}

/// The model of a device number, and the number among the devices of that model.
fn model_of(index: u32) -> Result<(&'static Model, u32), Failure> {
    let (models, of_a_model) = (models()?, devices_of_a_model()?);
    let (model, number) = (index as usize / of_a_model, index as usize % of_a_model);
    let known = models.len() * of_a_model;
    let model = models.get(model);
    model
        .map(|model| (model, number as u32))
        .ok_or_else(|| Failure::out_of_range(format!("device index: expected below {known}, found {index}")))
}

/// Where a device is plugged in, if the settings describe a machine.
fn slot_of(index: u32) -> Result<Option<Slot>, Failure> {
    let settings = Settings::from_environment()?;
    let index = u64::from(index);
    Ok(slot(&settings, (index / settings.devices) as usize, index % settings.devices))
}

/// What a device that was lost answers to everything.
pub(crate) fn device_lost() -> Failure {
    Failure::lost("the simulated device is lost (injected fault): close it and open it anew")
}

pub(crate) unsafe extern "C" fn init(_: *const qhal_kv, _: u32, err: *mut qhal_error) -> qhal_status {
    // SAFETY: the host passes null or a record.
    unsafe {
        guard(err, || {
            Settings::from_environment()?;
            models()?;
            inner::cpu()?.init()
        })
    }
}

pub(crate) unsafe extern "C" fn shutdown(err: *mut qhal_error) -> qhal_status {
    // SAFETY: the host passes null or a record.
    unsafe { guard(err, || Ok(())) }
}

pub(crate) unsafe extern "C" fn count(out: *mut u32, err: *mut qhal_error) -> qhal_status {
    // SAFETY: the host passes room for the answer.
    unsafe { guard(err, || answer(out, (models()?.len() * devices_of_a_model()?) as u32)) }
}

pub(crate) unsafe extern "C" fn info(index: u32, out: *mut qhal_device_info, err: *mut qhal_error) -> qhal_status {
    // SAFETY: the host passes a record.
    unsafe {
        guard(err, || {
            let (model, _) = model_of(index)?;
            let out = sized(out)?;
            let chip = model.chip;
            out.kind = QHAL_KIND_SIMULATED;
            out.id.index = index;
            out.id.bus_address = slot_of(index)?.map_or(u64::MAX, |slot| slot.address);
            // The word counts more than the end of a long title.
            let mark = " (simulated)";
            let mut title = chip.title.as_str();
            while title.len() + mark.len() >= out.name.len() {
                title = title.char_indices().next_back().map_or("", |(last, _)| &title[..last]);
            }
            write_text(&mut out.name, &format!("{}{mark}", title.trim_end()));
            let names: Vec<&str> = std::iter::once(&chip.name).chain(&chip.aliases).map(String::as_str).collect();
            let version = env!("CARGO_PKG_VERSION");
            write_text(&mut out.fingerprint, &format!("{}:sim-{version}", names.join("/")));
            write_text(&mut out.driver, &format!("simulated, {version}"));
            out.memory_total = model.memory();
            Ok(())
        })
    }
}

pub(crate) unsafe extern "C" fn open(
    index: u32,
    options: *const qhal_kv,
    count: u32,
    out: *mut *mut qhal_device,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes options and room for the answer.
    unsafe {
        guard(err, || {
            let (model, number) = model_of(index)?;
            let settings = Settings::of_device(number)?.with_options(options, count)?;
            let (kind, granularity, padding) = model.allocator();
            let capacity = settings.memory.unwrap_or_else(|| model.memory());
            let device = Device {
                model,
                index,
                inner: InnerDevice::open()?,
                allocator: Mutex::new(Allocator::new(kind, capacity, granularity, padding)),
                settings,
                counters: Counters::default(),
                opened: Instant::now(),
            };
            answer(out, DEVICES.insert(Arc::new(device)))
        })
    }
}

pub(crate) unsafe extern "C" fn close(device: *mut qhal_device, err: *mut qhal_error) -> qhal_status {
    // SAFETY: the host passes null or a record.
    unsafe { guard(err, || if device.is_null() { Ok(()) } else { DEVICES.remove(device).map(drop) }) }
}

pub(crate) unsafe extern "C" fn caps(
    device: *mut qhal_device,
    out: *mut qhal_device_caps,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes a record.
    unsafe {
        guard(err, || {
            let device = DEVICES.get(device)?;
            let out = sized(out)?;
            let (model, chip) = (device.model, device.model.chip);
            out.kind = QHAL_KIND_SIMULATED;
            out.memory_total = device.allocator().capacity();
            out.max_allocation = out.memory_total;
            out.buffer_alignment = model.alignment();
            out.valid_fields = QHAL_CAPS_MEMORY_TOTAL | QHAL_CAPS_MAX_ALLOCATION | QHAL_CAPS_BUFFER_ALIGNMENT;
            if let Some(units) = &chip.compute.units {
                out.compute_units = units.value as u32;
                out.valid_fields |= QHAL_CAPS_COMPUTE_UNITS;
            }
            if let Some(warp) = &chip.compute.warp {
                out.vector_width = warp.value as u32;
                out.valid_fields |= QHAL_CAPS_VECTOR_WIDTH;
            }
            if let Some(tile) = chip.compute.tiles.first() {
                out.matrix_tile = tile.shape;
                out.valid_fields |= QHAL_CAPS_MATRIX_TILE;
            }
            if let Some(bandwidth) = chip.bandwidth() {
                (out.bandwidth, out.bandwidth_source) = (bandwidth, 1);
                out.valid_fields |= QHAL_CAPS_BANDWIDTH;
            }
            out.features = QHAL_FEATURE_ASYNC_COPY
                | QHAL_FEATURE_EVENTS
                | QHAL_FEATURE_P2P
                | QHAL_FEATURE_CMDLIST
                | QHAL_FEATURE_COLLECTIVES;
            if model.has_virtual_memory() {
                out.features |= QHAL_FEATURE_VMM;
                out.vmm_granularity = model.page();
                out.valid_fields |= QHAL_CAPS_VMM_GRANULARITY;
            }
            if let Some(slot) = slot_of(device.index)? {
                out.numa_node = slot.node;
                out.valid_fields |= QHAL_CAPS_NUMA_NODE;
            }
            // Nothing that a sheet says has been measured.
            out.estimated_fields = out.valid_fields;
            out.num_dtypes = model.dtypes().len() as u32;
            out.dtypes = model.dtypes().as_ptr();
            Ok(())
        })
    }
}

/// Degrees of an idle board, and what a busy one is above that: round numbers, nothing of a sheet.
const IDLE_DEGREES: f64 = 40.0;
const BUSY_DEGREES: f64 = 35.0;
/// Share of a board's power that it takes when idle.
const IDLE_POWER: f64 = 0.25;

pub(crate) unsafe extern "C" fn health(
    device: *mut qhal_device,
    out: *mut qhal_health,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes a record.
    unsafe {
        guard(err, || {
            let device = DEVICES.get(device)?;
            let out = sized(out)?;
            let counters = &device.counters;
            let flag = |flag: &AtomicBool| flag.load(Ordering::Acquire);
            out.state = match () {
                () if flag(&counters.lost) => QHAL_HEALTH_LOST,
                () if flag(&counters.hanging) => QHAL_HEALTH_UNRESPONSIVE,
                () if device.settings.slow_link > 1 => QHAL_HEALTH_DEGRADED,
                () => QHAL_HEALTH_OK,
            };
            {
                let allocator = device.allocator();
                (out.memory_free, out.memory_used, out.memory_reserved) =
                    (allocator.free(), allocator.used(), allocator.held());
            }
            let busy = counters.busy_ns.load(Ordering::Relaxed) as f64;
            out.utilisation = (busy / device.opened.elapsed().as_nanos() as f64).clamp(0.0, 1.0);
            out.temperature = IDLE_DEGREES + BUSY_DEGREES * out.utilisation;
            out.memory_errors_corrected = 0;
            out.memory_errors_uncorrected = 0;
            out.link_errors = if device.settings.slow_link > 1 { counters.launches.load(Ordering::Relaxed) } else { 0 };
            out.last_error = counters.last_error.load(Ordering::Relaxed).cast_signed();
            out.valid_fields = 0b1011_1001_1111;
            if let Some(power) = &device.model.chip.compute.power {
                out.power = power.value * (IDLE_POWER + (1.0 - IDLE_POWER) * out.utilisation);
                out.valid_fields |= 1 << 5;
            }
            Ok(())
        })
    }
}

/// Class, bytes per second and nanoseconds of the way to a device.
fn way(from: &Device, model: &Model, index: u32) -> (u32, f64, f64) {
    if from.index == index {
        return (QHAL_LINK_SAME, from.model.bandwidth(), 0.0);
    }
    from.model.peer_link().filter(|_| std::ptr::eq(model, from.model)).unwrap_or_else(|| {
        let (bandwidth, latency) = from.model.host_link();
        (QHAL_LINK_HOST_STAGED, bandwidth / 2.0, 2.0 * latency)
    })
}

/// Class, bytes per second and nanoseconds of the way between two open devices.
pub(crate) fn link_between(a: &Device, b: &Device) -> (u32, f64, f64) {
    way(a, b.model, b.index)
}

pub(crate) unsafe extern "C" fn link(
    device: *mut qhal_device,
    peer: *const qhal_device_id,
    out: *mut qhal_link,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes an identity and a record.
    unsafe {
        guard(err, || {
            let device = DEVICES.get(device)?;
            let peer = peer.as_ref().ok_or_else(|| Failure::invalid("no peer, expected one"))?;
            let (model, _) = model_of(peer.index)?;
            let out = sized(out)?;
            out.flags = 1;
            (out.class, out.bandwidth, out.latency_ns) = way(&device, model, peer.index);
            out.hops = match out.class {
                QHAL_LINK_SAME => 0,
                QHAL_LINK_HOST_STAGED => 2,
                _ => 1,
            };
            Ok(())
        })
    }
}

pub(crate) unsafe extern "C" fn extension(
    device: *mut qhal_device,
    id: u32,
    version: u32,
    out: *mut *const c_void,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes room for the answer.
    unsafe {
        guard(err, || {
            let has_vmm = !device.is_null() && DEVICES.get(device)?.model.has_virtual_memory();
            let table: *const c_void = match id {
                QHAL_EXT_VMM if version <= VMM.version && has_vmm => (&raw const VMM).cast(),
                QHAL_EXT_CMDLIST if version <= CMDLIST.version => (&raw const CMDLIST).cast(),
                QHAL_EXT_COLLECTIVES if version <= COLLECTIVES.version => (&raw const COLLECTIVES).cast(),
                _ => {
                    let what = format!("extension {id} version {version}: this simulated chip does not have it");
                    return Err(Failure::unsupported(what));
                }
            };
            answer(out, table)
        })
    }
}

/// Adds modelled time.
pub(crate) fn work(device: &Device, unit: Dtype, operations: f64, bytes: f64) {
    let ns = device.model.launch_ns(unit, operations, bytes);
    device.add_time(ns);
}

/// Adds the modelled time of a copy over a link.
pub(crate) fn transfer(device: &Device, bytes: u64, bandwidth: f64, latency: f64) {
    device.add_time(latency + bytes as f64 / bandwidth.max(1.0) * 1e9);
}
