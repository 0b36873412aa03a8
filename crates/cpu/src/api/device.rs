//! The one device: the cores and the memory of the host.

use std::ffi::c_void;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use qwen_formats::DType;
use qwen_hal_abi::{
    QHAL_CAPS_BUFFER_ALIGNMENT, QHAL_CAPS_CACHE_BYTES, QHAL_CAPS_COMPUTE_UNITS, QHAL_CAPS_MAX_ALLOCATION,
    QHAL_CAPS_MEMORY_TOTAL, QHAL_CAPS_VECTOR_WIDTH, QHAL_CAPS_VMM_GRANULARITY, QHAL_DTYPE_CAN_ACCUMULATE,
    QHAL_DTYPE_CAN_COMPUTE, QHAL_DTYPE_CAN_CONVERT, QHAL_DTYPE_CAN_STORE, QHAL_EXT_CMDLIST, QHAL_EXT_VARIANTS,
    QHAL_EXT_VMM, QHAL_FEATURE_CMDLIST, QHAL_FEATURE_EVENTS, QHAL_FEATURE_IMPORT_HOST, QHAL_FEATURE_INLINE,
    QHAL_FEATURE_MAP, QHAL_FEATURE_UNIFIED, QHAL_FEATURE_VMM, QHAL_HEALTH_OK, QHAL_KIND_CPU, qhal_device,
    qhal_device_caps, qhal_device_id, qhal_device_info, qhal_dtype_caps, qhal_error, qhal_health, qhal_kv, qhal_link,
};

use super::buffer::VMM;
use super::cmdlist::CMDLIST;
use super::host::HostPool;
use super::memory::page_size;
use super::{Failure, guard, sized, write_text};
use crate::isa::{Isa, has_avx512_bf16, has_neon_dot, has_neon_i8mm};
use crate::plan::entry::VARIANTS;

/// What outlives the device's handle, because buffers count in it.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// Bytes of allocated buffers.
    pub(super) used: AtomicU64,
}

/// What a `qhal_device` is.
#[derive(Debug)]
pub(crate) struct Device {
    pub(super) shared: Arc<Shared>,
    pub(super) pool: HostPool,
    pub(crate) isa: Isa,
}

impl Device {
    /// The device of a handle.
    ///
    /// # Safety
    /// The handle is null or open.
    pub(crate) unsafe fn of<'a>(device: *mut qhal_device) -> Result<&'a Self, Failure> {
        // SAFETY: by the caller's promise; handles of this plugin are `Device`s.
        unsafe { device.cast::<Self>().as_ref() }.ok_or_else(|| Failure::invalid("no device, expected an open one"))
    }

    /// The host's pool.
    pub(crate) const fn pool(&self) -> &HostPool {
        &self.pool
    }

    pub(super) fn memory_total(&self) -> u64 {
        machine().memory_total
    }
}

/// Facts of the machine, read once.
struct Machine {
    name: String,
    memory_total: u64,
    cache_bytes: [u64; 4],
}

fn machine() -> &'static Machine {
    static MACHINE: OnceLock<Machine> = OnceLock::new();
    MACHINE.get_or_init(|| Machine {
        name: processor_name(),
        memory_total: meminfo("MemTotal:").unwrap_or(u64::MAX).min(cgroup_memory_limit().unwrap_or(u64::MAX)),
        cache_bytes: cache_bytes(),
    })
}

fn processor_name() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    named.map_or_else(|| format!("{} processor", std::env::consts::ARCH), |(_, name)| name.trim().to_owned())
}

fn meminfo(key: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The tightest limit of the cgroups that the process is in, v2 or v1.
fn cgroup_memory_limit() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let limits = groups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            list if list.split(',').any(|c| c == "memory") => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            _ => return None,
        };
        let path = Path::new(path.trim_start_matches('/'));
        // Within a container the path may be the host's, of which only the root is visible.
        let along = path.ancestors().map(|part| Path::new(root).join(part).join(file));
        along.filter_map(|file| fs::read_to_string(file).ok()?.trim().parse::<u64>().ok()).min()
    });
    limits.min()
}

fn cache_bytes() -> [u64; 4] {
    let mut bytes = [0; 4];
    for index in 0..8 {
        let folder = format!("/sys/devices/system/cpu/cpu0/cache/index{index}");
        let read = |name: &str| fs::read_to_string(format!("{folder}/{name}")).ok();
        let (Some(level), Some(kind), Some(size)) = (read("level"), read("type"), read("size")) else { continue };
        let level = level.trim().parse::<usize>().ok().and_then(|level| bytes.get_mut(level.wrapping_sub(1)));
        let size = size.trim().strip_suffix('K').and_then(|k| k.parse::<u64>().ok());
        if let (Some(level), Some(size), false) = (level, size, kind.trim() == "Instruction") {
            *level = size * 1024;
        }
    }
    bytes
}

/// What the device can do with each dtype. Arithmetic is in f32; weights of every storable type are multiplied.
fn dtype_caps() -> &'static [qhal_dtype_caps] {
    static TABLE: OnceLock<Vec<qhal_dtype_caps>> = OnceLock::new();
    TABLE.get_or_init(|| {
        let stored = DType::ALL.into_iter().filter(|dtype| !matches!(dtype, DType::F64 | DType::I16 | DType::BOOL));
        let entry = |dtype: DType| qhal_dtype_caps {
            struct_size: size_of::<qhal_dtype_caps>() as u32,
            dtype: dtype.code(),
            bits: QHAL_DTYPE_CAN_STORE
                | match dtype {
                    DType::F32 => QHAL_DTYPE_CAN_CONVERT | QHAL_DTYPE_CAN_COMPUTE | QHAL_DTYPE_CAN_ACCUMULATE,
                    DType::BF16 if has_avx512_bf16() => QHAL_DTYPE_CAN_CONVERT | QHAL_DTYPE_CAN_COMPUTE,
                    _ if dtype.is_float() || dtype.is_block_quantised() => QHAL_DTYPE_CAN_CONVERT,
                    _ => 0,
                },
            peak_source: 0,
            peak_ops: 0.0,
        };
        stored.map(entry).collect()
    })
}

pub(super) unsafe extern "C" fn init(_options: *const qhal_kv, _count: u32, err: *mut qhal_error) -> i32 {
    // SAFETY: the host passes null or a record.
    unsafe { guard(err, || check_environment().and_then(|()| HostPool::current().map(drop))) }
}

fn check_environment() -> Result<(), Failure> {
    let refused =
        |found| Failure::invalid(format!("QWEN_CPU_ISA: expected scalar, neon, avx2 or avx512, found {found:?}"));
    Isa::limit().map(drop).map_err(refused)
}

pub(super) unsafe extern "C" fn shutdown(err: *mut qhal_error) -> i32 {
    // SAFETY: the host passes null or a record.
    unsafe { guard(err, || Ok(())) }
}

pub(super) unsafe extern "C" fn count(out: *mut u32, err: *mut qhal_error) -> i32 {
    // SAFETY: the host passes room for the answer.
    unsafe {
        guard(err, || {
            *out = 1;
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn info(index: u32, out: *mut qhal_device_info, err: *mut qhal_error) -> i32 {
    // SAFETY: the host passes a record of the size that it states.
    unsafe {
        guard(err, || {
            if index != 0 {
                return Err(Failure::invalid(format!("device {index}, expected 0: the CPU is one device")));
            }
            let out = sized(out)?;
            let isa = Isa::current();
            out.kind = QHAL_KIND_CPU;
            out.id = qhal_device_id {
                struct_size: size_of::<qhal_device_id>() as u32,
                index: 0,
                uuid: [0; 16],
                bus_address: u64::MAX,
            };
            write_text(&mut out.name, &machine().name);
            let more = match isa {
                Isa::Neon if has_neon_i8mm() => "+i8mm",
                Isa::Neon if has_neon_dot() => "+dotprod",
                _ if has_avx512_bf16() => "+bf16",
                _ => "",
            };
            write_text(
                &mut out.fingerprint,
                &format!("cpu-{}-{}{more}-{}", std::env::consts::ARCH, isa.name(), env!("CARGO_PKG_VERSION")),
            );
            write_text(&mut out.driver, std::env::consts::OS);
            out.memory_total = machine().memory_total;
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn open(
    index: u32,
    _options: *const qhal_kv,
    _count: u32,
    out: *mut *mut qhal_device,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: the host passes room for the answer.
    unsafe {
        guard(err, || {
            if index != 0 {
                return Err(Failure::invalid(format!("device {index}, expected 0: the CPU is one device")));
            }
            let device = Device { shared: Arc::default(), pool: HostPool::current()?, isa: Isa::current() };
            *out = Box::into_raw(Box::new(device)).cast();
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn close(device: *mut qhal_device, err: *mut qhal_error) -> i32 {
    // SAFETY: the host passes a device of ours, once, after its children.
    unsafe {
        guard(err, || {
            if !device.is_null() {
                drop(Box::from_raw(device.cast::<Device>()));
            }
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn caps(
    device: *mut qhal_device,
    out: *mut qhal_device_caps,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: the host passes an open device and a record of the size that it states.
    unsafe {
        guard(err, || {
            let device = Device::of(device)?;
            let out = sized(out)?;
            let machine = machine();
            out.valid_fields = QHAL_CAPS_MEMORY_TOTAL
                | QHAL_CAPS_MAX_ALLOCATION
                | QHAL_CAPS_BUFFER_ALIGNMENT
                | QHAL_CAPS_VMM_GRANULARITY
                | QHAL_CAPS_COMPUTE_UNITS
                | QHAL_CAPS_VECTOR_WIDTH
                | QHAL_CAPS_CACHE_BYTES;
            out.kind = QHAL_KIND_CPU;
            out.estimated_fields = 0;
            out.memory_total = machine.memory_total;
            out.max_allocation = machine.memory_total;
            out.buffer_alignment = 1;
            out.vmm_granularity = page_size() as u64;
            out.compute_units = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
            out.vector_width = match device.isa {
                Isa::Avx512 | Isa::Amx => 64,
                Isa::Avx2 => 32,
                Isa::Scalar | Isa::Neon => 16,
            };
            out.cache_bytes = machine.cache_bytes;
            out.features = QHAL_FEATURE_UNIFIED
                | QHAL_FEATURE_MAP
                | QHAL_FEATURE_IMPORT_HOST
                | QHAL_FEATURE_EVENTS
                | QHAL_FEATURE_VMM
                | QHAL_FEATURE_CMDLIST
                | QHAL_FEATURE_INLINE;
            out.num_dtypes = dtype_caps().len() as u32;
            out.dtypes = dtype_caps().as_ptr();
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn health(device: *mut qhal_device, out: *mut qhal_health, err: *mut qhal_error) -> i32 {
    // SAFETY: the host passes an open device and a record of the size that it states.
    unsafe {
        guard(err, || {
            let device = Device::of(device)?;
            let out = sized(out)?;
            out.state = QHAL_HEALTH_OK;
            out.memory_used = device.shared.used.load(Ordering::Relaxed);
            out.valid_fields = 1 << 1;
            if let Some(free) = meminfo("MemAvailable:") {
                out.memory_free = free;
                out.valid_fields |= 1 << 0;
            }
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn link(
    _device: *mut qhal_device,
    _peer: *const qhal_device_id,
    _out: *mut qhal_link,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: the host passes null or a record.
    unsafe { guard(err, || Err(Failure::unsupported("the CPU knows of no links to other devices"))) }
}

pub(super) unsafe extern "C" fn extension(
    _device: *mut qhal_device,
    id: u32,
    version: u32,
    out: *mut *const c_void,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: the host passes room for the answer.
    unsafe {
        guard(err, || {
            *out = match id {
                QHAL_EXT_VMM if version <= VMM.version => (&raw const VMM).cast(),
                QHAL_EXT_VARIANTS if version <= VARIANTS.version => (&raw const VARIANTS).cast(),
                QHAL_EXT_CMDLIST if version <= CMDLIST.version => (&raw const CMDLIST).cast(),
                _ => {
                    return Err(Failure::unsupported(format!(
                        "extension {id} version {version}, the CPU has vmm ({QHAL_EXT_VMM}), command lists \
                         ({QHAL_EXT_CMDLIST}) and variants ({QHAL_EXT_VARIANTS}), all in version 1"
                    )));
                }
            };
            Ok(())
        })
    }
}
