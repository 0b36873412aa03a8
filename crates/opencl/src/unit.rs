//! The devices of this machine that can be used, found once; and what is shared by all handles of one: context, programs.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use opencl3::command_queue::{CommandQueue, create_command_queue};
use opencl3::context::Context;
use opencl3::device::{
    CL_DEVICE_TYPE_ACCELERATOR, CL_DEVICE_TYPE_ALL, CL_DEVICE_TYPE_CPU, CL_DEVICE_TYPE_CUSTOM, CL_DEVICE_TYPE_GPU,
    Device,
};
use opencl3::error_codes::ClError;
use opencl3::platform::Platform;
use qwen_hal_abi::{QHAL_KIND_CPU, QHAL_KIND_GPU, QHAL_KIND_NPU};
use sha2::{Digest, Sha256};

use crate::failure::{Failure, reported};
use crate::host;
use crate::program::Programs;

/// What a device says of itself, within what can be believed.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    pub(crate) name: String,
    /// Version of the device and of its driver.
    pub(crate) driver: String,
    /// Changes when results or speed may change.
    pub(crate) fingerprint: String,
    pub(crate) kind: u32,
    pub(crate) memory_total: u64,
    pub(crate) max_allocation: u64,
    pub(crate) compute_units: u32,
    pub(crate) cache_bytes: u64,
    pub(crate) scratch_bytes: u64,
    /// Host memory is read where it lies.
    pub(crate) unified: bool,
    /// Work-items of a work-group at most.
    pub(crate) max_group: usize,
    pub(crate) tiling: Tiling,
}

/// How work is cut for a kind of device. None of it changes a result of products; `vector` and `lanes` are in the order of sums of
/// a row (norm, softmax, attention), which is why these two are never tuned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tiling {
    pub(crate) name: &'static str,
    /// Values of an explicit vector.
    pub(crate) vector: usize,
    /// Work-items that share a row.
    pub(crate) lanes: usize,
    /// How products are cut unless another way was measured as faster.
    pub(crate) cut: Cut,
}

/// How a product is cut. No bit of its result depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Rows of x that share a load of weights.
    pub(crate) rows: usize,
    /// Work-items that share the inner dimension: the size of a work-group.
    pub(crate) split: usize,
}

impl Cut {
    /// Every way to cut that is worth a try on a device, `own` first.
    pub(crate) fn all(own: Self, max_group: usize) -> impl Iterator<Item = Self> {
        let others = [4, 8, 16].into_iter().flat_map(|rows| [1, 4, 16].map(|split| Self { rows, split }));
        std::iter::once(own).chain(others.filter(move |cut| *cut != own && cut.split <= max_group))
    }

    /// Its name as a variant.
    pub(crate) fn name(self) -> String {
        format!("rows{}-split{}", self.rows, self.split)
    }
}

/// Cores with vector registers: a work-item is a thread's work, its vectors are the processor's.
const WIDE: Tiling = Tiling { name: "wide", vector: 16, lanes: 1, cut: Cut { rows: 8, split: 1 } };
/// Processors of many small threads: a row is shared, and rows of weights in chunks.
const SHARED: Tiling = Tiling { name: "shared", vector: 4, lanes: 64, cut: Cut { rows: 4, split: 16 } };
/// `wide` or `shared`: another way to cut work than the kind of device suggests.
const TILING_VARIABLE: &str = "QWEN_OPENCL_TILING";

impl Tiling {
    fn of(kind: u32, max_group: usize) -> Self {
        match std::env::var(TILING_VARIABLE).as_deref() {
            Ok("wide") => WIDE,
            Ok("shared") if max_group >= SHARED.lanes => SHARED,
            _ if kind == QHAL_KIND_GPU && max_group >= SHARED.lanes => SHARED,
            _ => WIDE,
        }
    }

    /// As options of a build.
    pub(crate) fn defines(self) -> String {
        format!("-DV={} -DLANES={}", self.vector, self.lanes)
    }
}

/// A device that was found.
pub(crate) struct Found {
    device: Device,
    pub(crate) facts: Facts,
    unit: Mutex<Option<Arc<Unit>>>,
}

/// What all open handles of a device share.
pub(crate) struct Unit {
    pub(crate) device: Device,
    pub(crate) context: Context,
    pub(crate) facts: Facts,
    pub(crate) programs: Programs,
    /// Bytes of allocated buffers.
    pub(crate) used: AtomicU64,
}

impl Unit {
    /// An in-order queue.
    pub(crate) fn queue(&self) -> Result<CommandQueue, Failure> {
        // SAFETY: the device is of this context. The call of OpenCL 1.2 is used, which later versions keep.
        let queue = unsafe { create_command_queue(self.context.get(), self.device.id(), 0) };
        queue.map(|queue| CommandQueue::new(queue, 3)).map_err(|error| reported("clCreateCommandQueue", error))
    }
}

impl Found {
    /// The shared part, made when the device is first opened and kept.
    pub(crate) fn unit(&self) -> Result<Arc<Unit>, Failure> {
        let mut unit = self.unit.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(unit) = &*unit {
            return Ok(Arc::clone(unit));
        }
        let context = Context::from_device(&self.device).map_err(|error| reported("clCreateContext", error))?;
        let made = Arc::new(Unit {
            device: self.device,
            context,
            facts: self.facts.clone(),
            programs: Programs::default(),
            used: AtomicU64::new(0),
        });
        *unit = Some(Arc::clone(&made));
        Ok(made)
    }
}

/// Every usable device, in the order of platforms. No library, no platform and no device are the same: none.
pub(crate) fn found() -> &'static [Found] {
    static FOUND: OnceLock<Vec<Found>> = OnceLock::new();
    FOUND.get_or_init(|| {
        let platforms = opencl3::platform::get_platforms().unwrap_or_else(|error| {
            host::info(&format!("no OpenCL platform: {error}"));
            Vec::new()
        });
        platforms.iter().flat_map(devices).collect()
    })
}

fn devices(platform: &Platform) -> Vec<Found> {
    let ids = platform.get_devices(CL_DEVICE_TYPE_ALL).unwrap_or_default();
    let usable = |id| {
        let device = Device::new(id);
        match inspect(platform, &device) {
            Ok(Ok(facts)) => return Some(Found { device, facts, unit: Mutex::default() }),
            Ok(Err(reason)) => host::warn(&format!("an OpenCL device is left out: {reason}")),
            Err(error) => host::warn(&format!("an OpenCL device does not answer: {error}")),
        }
        None
    };
    ids.into_iter().filter_map(usable).collect()
}

/// "OpenCL 1.2 ..." as (1, 2).
fn version(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.strip_prefix("OpenCL ")?.split(' ').next()?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// What a device says, or why it cannot be used.
fn inspect(platform: &Platform, device: &Device) -> Result<Result<Facts, String>, ClError> {
    let name = device.name()?.trim_matches(['\0', ' ']).to_owned();
    let (version_text, driver) = (device.version()?, device.driver_version()?);
    let refuse = |reason: &str| Ok(Err(format!("{name:?}: {reason}")));
    if version(&version_text).is_none_or(|version| version < (1, 2)) {
        return refuse(&format!("version {version_text:?}, expected OpenCL 1.2 or later"));
    }
    if !device.available()? || !device.compiler_available()? {
        return refuse("it is not available, or has no compiler");
    }
    if !device.endian_little()? {
        return refuse("its byte order is not little-endian, as weights are");
    }
    let kind = match device.dev_type()? {
        kind if kind & CL_DEVICE_TYPE_CUSTOM != 0 => return refuse("a custom device, which runs no programs"),
        kind if kind & CL_DEVICE_TYPE_GPU != 0 => QHAL_KIND_GPU,
        kind if kind & CL_DEVICE_TYPE_ACCELERATOR != 0 => QHAL_KIND_NPU,
        kind if kind & CL_DEVICE_TYPE_CPU != 0 => QHAL_KIND_CPU,
        _ => QHAL_KIND_GPU,
    };
    let max_group = device.max_work_group_size()?;
    let (memory_total, scratch_bytes) = (device.global_mem_size()?, device.local_mem_size()?);
    if memory_total == 0 || scratch_bytes < MIN_SCRATCH {
        return refuse(&format!("{memory_total} bytes of memory and {scratch_bytes} of local memory"));
    }
    let mut hash = Sha256::new();
    for part in [&platform.name()?, &platform.version()?, &name, &version_text, &driver] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let identity: String = hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    Ok(Ok(Facts {
        driver: format!("{} {}", version_text.trim_matches(['\0', ' ']), driver.trim_matches(['\0', ' '])),
        fingerprint: format!("opencl-{identity}-{}", env!("CARGO_PKG_VERSION")),
        kind,
        memory_total,
        max_allocation: device.max_mem_alloc_size()?.clamp(1, memory_total),
        compute_units: device.max_compute_units()?.max(1),
        cache_bytes: device.global_mem_cache_size()?,
        scratch_bytes,
        unified: device.host_unified_memory()?,
        max_group,
        tiling: Tiling::of(kind, max_group),
        name: if name.is_empty() { "an OpenCL device without a name".into() } else { name },
    }))
}

/// Local memory that kernels use at most: what OpenCL 1.2 promises.
const MIN_SCRATCH: u64 = 32 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_to_cut_are_different_and_fit_the_device() {
        let all = |own, most| Cut::all(own, most).map(Cut::name).collect::<Vec<_>>();
        let wide = all(WIDE.cut, 4096);
        assert_eq!((wide[0].as_str(), wide.len()), ("rows8-split1", 9));
        assert_eq!(wide.iter().collect::<std::collections::BTreeSet<_>>().len(), 9);
        assert_eq!(all(WIDE.cut, 1), ["rows8-split1", "rows4-split1", "rows16-split1"]);
        assert_eq!(all(SHARED.cut, 64)[0], "rows4-split16");
    }

    #[test]
    fn versions_are_read() {
        assert_eq!(version("OpenCL 3.0 PoCL HSTR: pthread"), Some((3, 0)));
        assert_eq!(version("OpenCL 1.2"), Some((1, 2)));
        for odd in ["", "OpenCL", "OpenCL x.y", "Vulkan 1.2", "OpenCL 1"] {
            assert_eq!(version(odd), None, "{odd:?}");
        }
    }
}
