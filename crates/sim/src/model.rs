//! A chip as the simulator plays it: what it can do, what it demands, and how long things would take, from its sheet.
//!
//! A figure that the sheet does not have is an assumption of the sheet's `simulation` table, or one of those below; whatever is
//! made of it is simulated like the rest.

use std::path::Path;
use std::sync::OnceLock;

use qwen_chips::{Ability, AllocatorKind, Catalogue, Chip, Dtype, LinkKind};
use qwen_hal_abi::ops::{self, op_name};
use qwen_hal_abi::*;
use qwen_hal_plugin::Failure;

use crate::desc::Desc;

/// Bytes of device memory where the sheet states none.
const ASSUMED_MEMORY: u64 = 16 << 30;
/// Bytes per second of device memory where the sheet states none.
const ASSUMED_BANDWIDTH: f64 = 500e9;
/// Operations per second in half precision where the sheet states none.
const ASSUMED_RATE: f64 = 50e12;
/// What float32 is of the rate in half precision where the sheet does not say: vector units beside a matrix unit.
const F32_SHARE: f64 = 1.0 / 16.0;
/// Granularity of virtual memory where the sheet states none.
const ASSUMED_PAGE: u64 = 2 << 20;

/// Types that have a code of their own.
const NAMED: [Dtype; 7] = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::F8E4m3, Dtype::F8E5m2, Dtype::I32, Dtype::I8];
/// Environment variable with a folder of sheets beside the built-in ones.
const FOLDER_VARIABLE: &str = "QWEN_CHIPS";

/// A chip.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) chip: &'static Chip,
    dtypes: Vec<qhal_dtype_caps>,
}

impl Model {
    pub(crate) fn new(chip: &'static Chip) -> Self {
        let caps = chip.compute.dtypes.iter().filter_map(|(dtype, sheet)| {
            let code = dtype.code().filter(|_| !sheet.can.is_empty())?;
            Some(qhal_dtype_caps {
                struct_size: size_of::<qhal_dtype_caps>() as u32,
                dtype: code,
                bits: sheet.can.iter().fold(0, |bits, ability| bits | ability.bit()),
                peak_source: u32::from(sheet.rate.is_some()),
                peak_ops: sheet.rate.as_ref().map_or(0.0, |figure| figure.value),
            })
        });
        Self { chip, dtypes: caps.collect() }
    }

    pub(crate) fn dtypes(&self) -> &[qhal_dtype_caps] {
        &self.dtypes
    }

    pub(crate) fn memory(&self) -> u64 {
        self.chip.memory_bytes().unwrap_or(ASSUMED_MEMORY)
    }

    pub(crate) fn bandwidth(&self) -> f64 {
        self.chip.bandwidth().unwrap_or(ASSUMED_BANDWIDTH)
    }

    /// What an operand must begin at a multiple of.
    pub(crate) fn alignment(&self) -> u64 {
        self.chip.required_alignment().max(1).next_power_of_two()
    }

    pub(crate) const fn has_virtual_memory(&self) -> bool {
        matches!(self.chip.allocator.virtual_memory, Some(true))
    }

    /// Granularity of virtual memory.
    pub(crate) fn page(&self) -> u64 {
        let page = self.chip.allocator.large_granularity.as_ref().map_or(ASSUMED_PAGE, |figure| figure.value as u64);
        page.next_power_of_two().max(4096)
    }

    pub(crate) fn allocator(&self) -> (AllocatorKind, u64, u64) {
        let padding = self.chip.allocator.padding.as_ref().map_or(0, |figure| figure.value as u64);
        (self.chip.allocator_kind().0, self.chip.allocation_granularity().0, padding)
    }

    fn rate(&self, dtype: Dtype) -> f64 {
        let half = self.chip.rate(Dtype::F16).or_else(|| self.chip.rate(Dtype::Bf16)).unwrap_or(ASSUMED_RATE);
        self.chip.rate(dtype).unwrap_or(match dtype {
            Dtype::F32 => half * F32_SHARE,
            Dtype::I8 => 2.0 * half,
            _ => half,
        })
    }

    /// Operations per second that a good kernel reaches.
    pub(crate) fn reached(&self, dtype: Dtype) -> f64 {
        self.rate(dtype) * self.chip.simulation.compute_efficiency.clamp(0.01, 1.0)
    }

    /// Bytes per second that a good kernel reaches.
    pub(crate) fn streamed(&self) -> f64 {
        self.bandwidth() * self.chip.simulation.bandwidth_efficiency.clamp(0.01, 1.0)
    }

    /// Bytes per second and nanoseconds of the way between host and device.
    pub(crate) fn host_link(&self) -> (f64, f64) {
        let simulation = &self.chip.simulation;
        let fact = self.chip.link(LinkKind::Pcie).and_then(|link| link.bandwidth.as_ref());
        (fact.map_or(simulation.host_bandwidth, |figure| figure.value), simulation.copy_latency_ns)
    }

    /// Class, bytes per second and nanoseconds of the best link to another of these chips; none if there are no links.
    pub(crate) fn peer_link(&self) -> Option<(u32, f64, f64)> {
        let of = |kind, class| {
            let link = self.chip.link(kind)?;
            let peers = f64::from(link.peers.unwrap_or(1).max(1));
            // A figure counts all links of a chip; one peer has its share of them.
            let bandwidth = link.bandwidth.as_ref().map(|figure| figure.value / peers);
            let latency = link.latency_ns.as_ref().map_or(self.chip.simulation.link_latency_ns, |figure| figure.value);
            Some((class, bandwidth.unwrap_or(self.chip.simulation.host_bandwidth), latency))
        };
        of(LinkKind::Fabric, QHAL_LINK_FABRIC).or_else(|| of(LinkKind::OnPackage, QHAL_LINK_ON_PACKAGE))
    }

    /// Types that products can be summed in: those that the sheet calls accumulators, and those that a matrix type is summed in.
    fn accumulates(&self, dtype: Dtype) -> bool {
        let summed = |sheet: &qwen_chips::DtypeSheet| sheet.accumulate == Some(dtype) && !sheet.can.is_empty();
        self.chip.can(dtype, Ability::Accumulate) || self.chip.compute.dtypes.values().any(summed)
    }

    /// Refuses what the chip does not have.
    pub(crate) fn check(&self, desc: &Desc) -> Result<(), Failure> {
        let name = op_name(desc.kind);
        let refuse = |what: String| Err(Failure::unsupported(format!("{name}: {what}")));
        for tensor in desc.inputs.iter().chain(&desc.outputs).filter(|tensor| !tensor.is_absent()) {
            let dtype = NAMED.into_iter().find(|dtype| dtype.code() == Some(tensor.dtype));
            // Block formats are unpacked by the plugin, whatever the chip; a plain type has to be one that it knows of.
            if let Some(dtype) =
                dtype.filter(|dtype| self.chip.compute.dtypes.get(dtype).is_some_and(|s| s.can.is_empty()))
            {
                return refuse(format!("the chip has no {}", dtype.name()));
            }
        }
        if desc.kind == ops::QHAL_OP_ATTENTION && desc.compute == ops::QHAL_COMPUTE_BF16 {
            if !self.chip.can(Dtype::Bf16, Ability::Compute) && !self.chip.can(Dtype::Bf16, Ability::Matrix) {
                return refuse("the chip does not multiply in bf16".to_owned());
            }
            if self.chip.accuracy.truncates_bf16 || !self.accumulates(Dtype::F32) {
                return refuse(
                    "bf16 that is truncated, or not summed in f32, is simulated for plain products only".to_owned(),
                );
            }
        }
        if !desc.is_product() {
            return Ok(());
        }
        match desc.accumulate {
            ops::QHAL_DTYPE_F32 if self.accumulates(Dtype::F32) => {}
            ops::QHAL_DTYPE_F16 if self.accumulates(Dtype::F16) => {}
            ops::QHAL_DTYPE_F32 => return refuse("the chip does not sum in f32".to_owned()),
            other => return refuse(format!("the chip does not sum in type {other}")),
        }
        for (weight, compute) in desc.weights().into_iter().zip(desc.computes()) {
            let (dtype, demanded) = match compute {
                ops::QHAL_COMPUTE_F32 => (Dtype::F32, None),
                ops::QHAL_COMPUTE_BF16 => (Dtype::Bf16, self.chip.alignment.gemm_f16.as_ref()),
                _ => (Dtype::I8, self.chip.alignment.gemm_i8.as_ref()),
            };
            if !self.chip.can(dtype, Ability::Compute) && !self.chip.can(dtype, Ability::Matrix) {
                return refuse(format!("the chip does not multiply in {}", dtype.name()));
            }
            let tile = demanded.map_or(1, |figure| figure.value as u64).max(1);
            let sizes =
                desc.inputs.get(weight).map(|w| w.dims.iter().rev().take(2).map(|d| d.expected).collect::<Vec<_>>());
            if let Some(size) = sizes.unwrap_or_default().iter().find(|size| !size.is_multiple_of(tile)) {
                return refuse(format!(
                    "size {size} must be divisible by {tile} for the matrix unit in {}",
                    dtype.name()
                ));
            }
        }
        Ok(())
    }

    /// Type in which most of an op's work is done.
    pub(crate) fn unit(&self, desc: &Desc) -> Dtype {
        if desc.kind == ops::QHAL_OP_ATTENTION {
            return if desc.compute == ops::QHAL_COMPUTE_BF16 { Dtype::Bf16 } else { Dtype::F32 };
        }
        match desc.computes().first() {
            Some(&ops::QHAL_COMPUTE_BF16) => Dtype::Bf16,
            Some(&ops::QHAL_COMPUTE_F32) | None => Dtype::F32,
            Some(_) => Dtype::I8,
        }
    }

    /// Nanoseconds that a launch of so many operations and bytes would take: the roofline, and the launch itself.
    pub(crate) fn launch_ns(&self, unit: Dtype, operations: f64, bytes: f64) -> f64 {
        let compute = operations / self.reached(unit);
        let memory = bytes / self.streamed();
        self.chip.launch_ns().0 + compute.max(memory) * 1e9
    }
}

/// Chips that are simulated, in order of their names: those with a sheet that is not about the host or a way to program.
pub(crate) fn models() -> Result<&'static [Model], Failure> {
    static MODELS: OnceLock<Result<Vec<Model>, String>> = OnceLock::new();
    let read = || {
        let catalogue = match std::env::var_os(FOLDER_VARIABLE).filter(|folder| !folder.is_empty()) {
            Some(folder) => Catalogue::with_folder(Path::new(&folder)),
            None => Catalogue::built_in(),
        };
        // Models live as long as the plugin, which is never unloaded.
        let catalogue: &'static Catalogue = Box::leak(Box::new(catalogue.map_err(|error| error.to_string())?));
        let simulated = catalogue.all().iter().filter(|chip| !GENERIC.contains(&chip.plugin.as_str()));
        Ok(simulated.map(Model::new).collect())
    };
    match MODELS.get_or_init(read) {
        Ok(models) => Ok(models),
        Err(what) => Err(Failure::invalid(format!("{FOLDER_VARIABLE}: {what}"))),
    }
}

/// Plugins whose sheets are of no chip.
const GENERIC: [&str; 3] = ["cpu", "opencl", "cuda"];
