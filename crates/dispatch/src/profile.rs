//! A device's profile: what it says of itself, and what was measured. A few hundred bytes of JSON.

use std::collections::BTreeMap;

use qwen_hal::Device;
use qwen_hal::abi::QHAL_KIND_SIMULATED;
use serde::{Deserialize, Serialize};

/// Version of the form. A profile of another version is measured anew.
pub(crate) const FORMAT: u32 = 2;

/// Where the figures of a profile come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// Timed on the device.
    Measured,
    /// The device is simulated: figures are the model's, from a data sheet.
    Simulated,
}

impl Origin {
    /// As it is shown.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::Simulated => "simulated",
        }
    }
}

/// Bandwidth at a size of the data.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
pub struct Level {
    /// Bytes that are read over and over.
    pub working_set: u64,
    /// Bytes read per second.
    pub bandwidth: f64,
}

/// Rate of products in a form.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
pub struct Rate {
    /// Operations per second, a multiplication and an addition counting as two.
    pub operations: f64,
}

/// What a device can do.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub struct HardwareProfile {
    /// Version of the form.
    pub format: u32,
    /// Where the figures come from.
    pub origin: Origin,
    /// Plugin and its version.
    pub plugin: String,
    /// Version of the plugin.
    pub plugin_version: String,
    /// The device's name for caches; results or speed may differ between fingerprints.
    pub fingerprint: String,
    /// The device's name for people.
    pub name: String,
    /// Driver and firmware.
    pub driver: String,
    /// Threads of the host's pool, on which a CPU computes.
    pub threads: usize,
    /// Bytes of memory.
    pub memory_bytes: Option<u64>,
    /// Bytes that operands are aligned to.
    pub alignment: u64,
    /// Tile of the matrix unit: rows, columns, depth.
    pub matrix_tile: Option<[u32; 3]>,
    /// Reads by kernels, smallest working set first; the last is memory.
    pub levels: Vec<Level>,
    /// Bytes per second that are copied within the device.
    pub copy_bandwidth: Option<f64>,
    /// Bytes per second from the host.
    pub upload_bandwidth: Option<f64>,
    /// Bytes per second to the host.
    pub download_bandwidth: Option<f64>,
    /// Rates of large products by form, as `q4_0.i8_g32`.
    pub rates: BTreeMap<String, Rate>,
    /// Nanoseconds of one launch among many.
    pub launch_ns: Option<f64>,
    /// Nanoseconds of a launch that is waited for.
    pub barrier_ns: Option<f64>,
    /// Milliseconds that measuring took.
    pub milliseconds: u64,
    /// Variants that were measured as fastest, by the identity of a plan.
    #[serde(default)]
    pub variants: BTreeMap<String, String>,
}

impl HardwareProfile {
    /// A profile of a device with no figure yet.
    #[must_use]
    pub fn empty(device: &Device, threads: usize) -> Self {
        let (info, caps, manifest) = (device.info(), device.caps(), device.plugin().manifest());
        Self {
            format: FORMAT,
            origin: if info.kind == QHAL_KIND_SIMULATED { Origin::Simulated } else { Origin::Measured },
            plugin: manifest.name.clone(),
            plugin_version: manifest.version.clone(),
            fingerprint: info.fingerprint.clone(),
            name: info.name.clone(),
            driver: info.driver.clone(),
            threads,
            memory_bytes: caps.memory_total,
            alignment: caps.buffer_alignment,
            matrix_tile: caps.matrix_tile,
            levels: Vec::new(),
            copy_bandwidth: None,
            upload_bandwidth: None,
            download_bandwidth: None,
            rates: BTreeMap::new(),
            launch_ns: None,
            barrier_ns: None,
            milliseconds: 0,
            variants: BTreeMap::new(),
        }
    }

    /// Whether it is of this device as it is now: same plugin, fingerprint, driver, threads.
    #[must_use]
    pub fn is_of(&self, device: &Device, threads: usize) -> bool {
        let (info, manifest) = (device.info(), device.plugin().manifest());
        self.format == FORMAT
            && self.plugin == manifest.name
            && self.plugin_version == manifest.version
            && self.fingerprint == info.fingerprint
            && self.name == info.name
            && self.driver == info.driver
            && self.threads == threads
    }

    /// Bytes per second that kernels read from memory.
    #[must_use]
    pub fn bandwidth(&self) -> Option<f64> {
        self.levels.last().map(|level| level.bandwidth)
    }

    /// The largest rate of products in operations per second.
    #[must_use]
    pub fn best_rate(&self) -> Option<f64> {
        self.rates.values().map(|rate| rate.operations).max_by(f64::total_cmp)
    }

    /// Figures to four digits, as whole numbers: more is noise.
    pub(crate) fn round(&mut self) {
        let others = [
            &mut self.copy_bandwidth,
            &mut self.upload_bandwidth,
            &mut self.download_bandwidth,
            &mut self.launch_ns,
            &mut self.barrier_ns,
        ];
        let levels = self.levels.iter_mut().map(|level| &mut level.bandwidth);
        let rates = self.rates.values_mut().map(|rate| &mut rate.operations);
        for figure in levels.chain(rates).chain(others.into_iter().flatten()) {
            let unit = 10_f64.powf(figure.abs().log10().floor() - 3.0).max(1.0);
            *figure = ((*figure / unit).round() * unit).round().max(1.0);
        }
    }

    /// Whether every number is one that a measurement can give; a cached file may hold anything.
    #[must_use]
    pub(crate) fn is_sane(&self) -> bool {
        let figures = self.levels.iter().map(|level| level.bandwidth);
        let figures = figures.chain(self.rates.values().map(|rate| rate.operations));
        let others =
            [self.copy_bandwidth, self.upload_bandwidth, self.download_bandwidth, self.launch_ns, self.barrier_ns];
        let mut all = figures.chain(others.into_iter().flatten());
        self.levels.len() <= 16
            && self.rates.len() <= 64
            && self.variants.len() <= 100_000
            && all.all(|figure| figure.is_finite() && figure > 0.0 && figure < 1e19)
    }
}
