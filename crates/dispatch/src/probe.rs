//! Measuring a device through the HAL: short loops of copies and launches, bounded in time, medians of repetitions.

use std::time::{Duration, Instant};

use qwen_hal::abi::QHAL_USAGE_STAGING;
use qwen_hal::{BufferDesc, Device, PlanOptions, Scope, Stream};

use crate::case::{Case, Operands, forms, reading_forms};
use crate::error::DispatchError;
use crate::profile::{HardwareProfile, Level, Origin, Rate};

/// How long it may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeOptions {
    /// Time for each figure. There are about fifteen.
    pub each: Duration,
    /// Most bytes of device memory that are used at a time.
    pub memory: u64,
}

impl Default for ProbeOptions {
    fn default() -> Self {
        Self { each: Duration::from_millis(40), memory: 384 << 20 }
    }
}

/// Rows of the product whose rate is measured, and its sides.
const ROWS: i64 = 256;
const SIDE: i64 = 1024;
/// Depth of the product with one row that reads memory.
const DEPTH: i64 = 4096;
/// Launches between two looks at the clock.
const LAUNCHES: u32 = 64;

/// Measures a device; the figures of a simulated one are those that it declares. A figure whose op or copy the device does not have
/// is left out.
///
/// # Errors
/// If the device fails at something that it has.
pub fn measure(device: &Device, threads: usize, options: &ProbeOptions) -> Result<HardwareProfile, DispatchError> {
    let start = Instant::now();
    let mut profile = HardwareProfile::empty(device, threads);
    if profile.origin == Origin::Simulated {
        declared(device, &mut profile);
        return Ok(profile);
    }
    let stream = device.stream("probe")?;
    let memory = device.caps().memory_total.map_or(options.memory, |total| options.memory.min(total / 8));
    let probe = Probe { device, stream: &stream, each: options.each, memory };
    profile.levels = probe.levels()?;
    let copies = probe.copies()?.map(Some);
    [profile.upload_bandwidth, profile.download_bandwidth, profile.copy_bandwidth] = copies;
    for (name, dtype, compute, form) in forms() {
        let case = Case::gemm((name, dtype, compute, form), ROWS, ROWS, SIDE, SIDE);
        if let Some(seconds) = probe.time(&case, 1)? {
            let operations = 2.0 * ROWS as f64 * SIDE as f64 * SIDE as f64 / seconds;
            profile.rates.insert(format!("{name}.{form}"), Rate { operations });
        }
    }
    profile.launch_ns = probe.time(&Case::smallest(), LAUNCHES)?.map(|seconds| seconds * 1e9);
    profile.barrier_ns = probe.time(&Case::smallest(), 1)?.map(|seconds| seconds * 1e9);
    profile.milliseconds = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
    profile.round();
    Ok(profile)
}

/// What a simulated device says of itself.
fn declared(device: &Device, profile: &mut HardwareProfile) {
    let caps = device.caps();
    if let Some(bandwidth) = caps.bandwidth.filter(|bandwidth| *bandwidth > 0.0) {
        profile.levels.push(Level { working_set: caps.memory_total.unwrap_or(0), bandwidth });
    }
    for dtype in &caps.dtypes {
        if let Some(operations) = dtype.peak_ops {
            profile.rates.insert(dtype_name(dtype.dtype), Rate { operations });
        }
    }
}

/// Name of a plain type for the table of rates.
fn dtype_name(code: u32) -> String {
    use qwen_chips::Dtype;
    let known = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::I8, Dtype::F8E4m3, Dtype::F8E5m2, Dtype::I32];
    let known = known.into_iter().find(|dtype| dtype.code() == Some(code));
    known.map_or_else(|| format!("code_{code}"), |dtype| dtype.name().to_owned())
}

struct Probe<'a> {
    device: &'a Device,
    stream: &'a Stream,
    each: Duration,
    memory: u64,
}

impl Probe<'_> {
    /// Seconds of one launch among `batch` that are waited for together, the middle of several; `None` if the device does not have the op.
    fn time(&self, case: &Case, batch: u32) -> Result<Option<f64>, DispatchError> {
        let plan = match self.device.plan(&case.op, &PlanOptions::default()) {
            Ok(plan) => plan,
            Err(qwen_hal::PlanError::Unsupported(_)) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let operands = Operands::new(self.device, self.stream, case, &plan, false)?;
        let mut bound = operands.bind(self.device, case, &plan)?;
        let mut once = || {
            for _ in 0..batch {
                bound.launch(&plan, self.stream)?;
            }
            Ok(self.stream.wait()?)
        };
        Ok(Some(self.repeat(&mut once)? / f64::from(batch)))
    }

    /// Seconds of one turn: the middle of as many as fit the time, three at least, after one that does not count.
    fn repeat(&self, once: &mut dyn FnMut() -> Result<(), DispatchError>) -> Result<f64, DispatchError> {
        once()?;
        let (start, mut times) = (Instant::now(), Vec::new());
        while times.len() < 3 || (start.elapsed() < self.each && times.len() < 10_000) {
            let turn = Instant::now();
            once()?;
            times.push(turn.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2].max(1e-9))
    }

    /// Bandwidth of a product with one row, whose weight is half of each cache, then more than caches hold. The best form counts.
    fn levels(&self) -> Result<Vec<Level>, DispatchError> {
        let caches = self.device.caps().cache_bytes.unwrap_or_default();
        let mut sets: Vec<u64> = caches.iter().filter(|bytes| **bytes > 0).map(|bytes| bytes / 2).collect();
        // A level must hold a product of some size, and memory more than any level.
        let last = caches.iter().copied().max().unwrap_or(0);
        sets.retain(|bytes| (128 << 10..=self.memory / 4).contains(bytes));
        sets.push((2 * last).clamp(64 << 20, (self.memory / 2).max(64 << 20)));
        let mut levels = Vec::new();
        for set in sets {
            let mut best: Option<f64> = None;
            for (name, dtype, compute, form) in reading_forms() {
                let (length, bytes) = qwen_hal::abi::ops::dtype_block(dtype).unwrap_or((1, 4));
                let row = DEPTH as u64 / u64::from(length) * u64::from(bytes);
                let width = (set / row / 16 * 16).max(16);
                let case = Case::gemm((name, dtype, compute, form), 1, 1, DEPTH, i64::try_from(width).unwrap_or(16));
                if let Some(seconds) = self.time(&case, 1)? {
                    let bandwidth = (width * row) as f64 / seconds;
                    best = Some(best.map_or(bandwidth, |best| best.max(bandwidth)));
                }
            }
            levels.extend(best.map(|bandwidth| Level { working_set: set, bandwidth }));
        }
        Ok(levels)
    }

    /// Bytes per second from the host, to the host, within the device.
    fn copies(&self) -> Result<[f64; 3], DispatchError> {
        let bytes = (self.memory / 8).max(1 << 20);
        let buffer = |name| self.device.alloc(&BufferDesc::new(bytes, QHAL_USAGE_STAGING, Scope::Temporary, name));
        let (a, b) = (buffer("probe source")?, buffer("probe target")?);
        let mut host = vec![1_u8; usize::try_from(bytes).unwrap_or(0)];
        let rate = |seconds: f64| bytes as f64 / seconds;
        let up = self.repeat(&mut || {
            self.stream.copy_from_host(&host, &a.whole())?;
            Ok(self.stream.wait()?)
        })?;
        let down = self.repeat(&mut || Ok(self.stream.copy_to_host(&a.whole(), &mut host)?))?;
        let within = self.repeat(&mut || {
            self.stream.copy(&a.whole(), &b.whole())?;
            Ok(self.stream.wait()?)
        })?;
        Ok([up, down, within].map(rate))
    }
}
