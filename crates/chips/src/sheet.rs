//! The sheet of a chip, as its TOML file states it. Units: bytes, bytes per second, operations per second (a multiply-add is
//! two), nanoseconds, watts.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::dispatch::Dispatch;

/// Everything that is known of a chip.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Chip {
    /// Version of the form of sheets: 1.
    pub format: u32,
    /// Short name, as in `sim:NAME`: lower-case letters, digits, `_` and `-`.
    pub name: String,
    /// Other names of the same sheet.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// Name for people.
    pub title: String,
    /// Who makes it.
    pub vendor: String,
    /// What it is.
    pub kind: Kind,
    /// Whether this project has run on one.
    pub status: Status,
    /// Name of the plugin that serves it, as in `libhal_NAME.so`.
    pub plugin: String,
    /// Beginnings of device names and fingerprints by which a device is recognised as this chip. The longest match of all sheets counts.
    #[serde(default)]
    pub matches: Vec<String>,
    /// Where figures come from, by the name that they refer to.
    #[serde(default)]
    pub sources: BTreeMap<String, Source>,
    /// Memory and its levels.
    #[serde(default)]
    pub memory: Memory,
    /// Compute units, tiles, dtypes and their rates.
    #[serde(default)]
    pub compute: Compute,
    /// What addresses and sizes must be multiples of.
    #[serde(default)]
    pub alignment: Alignment,
    /// How the vendor's allocator behaves.
    #[serde(default)]
    pub allocator: Allocator,
    /// Links to other chips and to the host.
    #[serde(default)]
    pub links: Vec<Link>,
    /// What a launch costs.
    #[serde(default)]
    pub launch: Launch,
    /// How exactly it computes.
    #[serde(default)]
    pub accuracy: Accuracy,
    /// Settings that field experience recommends.
    #[serde(default)]
    pub preferences: Preferences,
    /// Which kernels it wants.
    #[serde(default)]
    pub dispatch: Dispatch,
    /// Known faults of chip, driver or library, that a user or a plugin must know.
    #[serde(default)]
    pub faults: Vec<Fault>,
    /// Assumptions for the simulator where no fact is known.
    #[serde(default)]
    pub simulation: Simulation,
}

/// Kind of chip.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Cores of the host.
    Cpu,
    /// A graphics processor, or one that is programmed like one.
    Gpu,
    /// A neural-network accelerator.
    Npu,
}

/// Whether this project has run on the chip.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Nobody has run this project on it.
    Untested,
    /// This project has run on it; figures of speed are still the profile's, not the sheet's.
    Measured,
}

impl Status {
    /// As it is shown: `UNTESTED` or `measured`.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Untested => "UNTESTED",
            Self::Measured => "measured",
        }
    }
}

/// Where figures come from.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// What it is: a title, a document, a file of a public repository.
    pub title: String,
    /// How far it is trusted.
    pub trust: Trust,
}

/// How far a figure is trusted, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Trust {
    /// The vendor's own document, header, slides or launch.
    DataSheet,
    /// Someone else's table or article.
    ThirdParty,
    /// A user's report.
    FieldReport,
    /// Derived from other figures, or a usual value; not stated anywhere.
    Estimate,
}

impl Trust {
    /// In words.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::DataSheet => "data sheet",
            Self::ThirdParty => "third party",
            Self::FieldReport => "field report",
            Self::Estimate => "estimate",
        }
    }
}

/// A number and where it comes from.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Figure {
    /// The number, in the unit of its field.
    pub value: f64,
    /// Name of an entry of `sources`.
    pub source: String,
    /// If it is trusted otherwise than its source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trust: Option<Trust>,
}

/// Memory of a chip.
#[derive(Debug, Clone, PartialEq, Default, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// What it is made of: `HBM2E`, `GDDR6`, …
    #[serde(skip_serializing_if = "Option::is_none")]
    pub technology: Option<String>,
    /// Bytes of device memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity: Option<Figure>,
    /// Bytes that a program can have of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usable: Option<Figure>,
    /// Bytes per second, device memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Figure>,
    /// Levels between device memory and registers, outermost first.
    #[serde(default)]
    pub levels: Vec<MemoryLevel>,
}

/// A cache or a scratch memory.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct MemoryLevel {
    /// The vendor's name.
    pub name: String,
    /// Whose it is.
    pub scope: Scope,
    /// Bytes, of one instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Figure>,
    /// Bytes per second, of one instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Figure>,
}

/// Who shares a memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// The whole device.
    Device,
    /// A cluster of units.
    Cluster,
    /// One compute unit.
    Unit,
}

/// What computes.
#[derive(Debug, Clone, PartialEq, Default, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Compute {
    /// Compute units: cores, clusters, multiprocessors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub units: Option<Figure>,
    /// What a unit is called.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit_name: Option<String>,
    /// Threads of a warp or wavefront; absent where there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warp: Option<Figure>,
    /// Watts of a board at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power: Option<Figure>,
    /// Tiles of the matrix unit.
    #[serde(default)]
    pub tiles: Vec<Tile>,
    /// Element types.
    #[serde(default)]
    pub dtypes: BTreeMap<Dtype, DtypeSheet>,
}

/// What the matrix unit multiplies at once: `m` x `k` by `k` x `n`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Tile {
    /// Element type of the factors.
    pub dtype: Dtype,
    /// Rows, columns, depth.
    pub shape: [u32; 3],
    /// Name of an entry of `sources`.
    pub source: String,
    /// If it is trusted otherwise than its source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trust: Option<Trust>,
}

/// Element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    /// IEEE double precision.
    F64,
    /// IEEE single precision.
    F32,
    /// Products of float32 rounded to 10 or 11 bits (TF32, HF32, TF32+).
    Tf32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 8-bit float, 4 exponent bits.
    F8E4m3,
    /// 8-bit float, 5 exponent bits.
    F8E5m2,
    /// 32-bit integer.
    I32,
    /// 16-bit integer.
    I16,
    /// 8-bit integer.
    I8,
    /// 4-bit integer.
    I4,
}

impl Dtype {
    /// Code in the plugin interface; `None` for what exists inside a product only, or as a part of block formats.
    #[must_use]
    pub const fn code(self) -> Option<u32> {
        use qwen_hal_abi::ops;
        Some(match self {
            Self::F32 => ops::QHAL_DTYPE_F32,
            Self::F16 => ops::QHAL_DTYPE_F16,
            Self::Bf16 => ops::QHAL_DTYPE_BF16,
            Self::F8E4m3 => ops::QHAL_DTYPE_F8_E4M3,
            Self::F8E5m2 => ops::QHAL_DTYPE_F8_E5M2,
            Self::I32 => ops::QHAL_DTYPE_I32,
            Self::I8 => ops::QHAL_DTYPE_I8,
            Self::F64 | Self::Tf32 | Self::I16 | Self::I4 => return None,
        })
    }

    /// As sheets write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::Tf32 => "tf32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F8E4m3 => "f8_e4m3",
            Self::F8E5m2 => "f8_e5m2",
            Self::I32 => "i32",
            Self::I16 => "i16",
            Self::I8 => "i8",
            Self::I4 => "i4",
        }
    }
}

/// What can be done with an element type. A type that a sheet does not list is not known to be there.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct DtypeSheet {
    /// Abilities; empty says that the chip is known not to have the type.
    pub can: Vec<Ability>,
    /// Dense peak in operations per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<Figure>,
    /// Type that products of it are summed in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accumulate: Option<Dtype>,
    /// What else must be known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// What a chip can do with values of a type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Ability {
    /// Hold them in memory.
    Store,
    /// Convert them to and from float32.
    Convert,
    /// Compute with them.
    Compute,
    /// Sum in them.
    Accumulate,
    /// Multiply them in the matrix unit.
    Matrix,
}

impl Ability {
    /// `QHAL_DTYPE_CAN_*` bit.
    #[must_use]
    pub const fn bit(self) -> u32 {
        match self {
            Self::Store => qwen_hal_abi::QHAL_DTYPE_CAN_STORE,
            Self::Convert => qwen_hal_abi::QHAL_DTYPE_CAN_CONVERT,
            Self::Compute => qwen_hal_abi::QHAL_DTYPE_CAN_COMPUTE,
            Self::Accumulate => qwen_hal_abi::QHAL_DTYPE_CAN_ACCUMULATE,
            Self::Matrix => qwen_hal_abi::QHAL_DTYPE_CAN_MATRIX,
        }
    }
}

/// What addresses and sizes must be, or had better be, multiples of. Bytes, except the last two.
#[derive(Debug, Clone, PartialEq, Default, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Alignment {
    /// Of every operand; less is refused or wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub required: Option<Figure>,
    /// Of a buffer, for full speed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred: Option<Figure>,
    /// Of a row of a matrix.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub row_pitch: Option<Figure>,
    /// Elements: what depth and width of a product in half precision should be multiples of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gemm_f16: Option<Figure>,
    /// Elements: the same in int8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gemm_i8: Option<Figure>,
}

/// How the vendor's allocator behaves.
#[derive(Debug, Clone, PartialEq, Default, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Allocator {
    /// Its algorithm, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<AllocatorKind>,
    /// Where `kind` was said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind_source: Option<String>,
    /// Bytes that sizes are rounded up to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub granularity: Option<Figure>,
    /// Bytes that large sizes are rounded up to, pages for instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub large_granularity: Option<Figure>,
    /// Bytes added to each allocation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub padding: Option<Figure>,
    /// Nanoseconds of one allocation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub call_ns: Option<Figure>,
    /// Whether virtual memory can be reserved and backed by steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_memory: Option<bool>,
}

/// Algorithm of an allocator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum AllocatorKind {
    /// Powers of two, halved and joined.
    Buddy,
    /// Pools of equal pieces per class of sizes.
    Slab,
    /// The smallest gap that is large enough.
    BestFit,
}

/// A link of a chip.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// What it joins.
    pub kind: LinkKind,
    /// The vendor's name.
    pub name: String,
    /// Chips that are reached, this one not counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peers: Option<u32>,
    /// Bytes per second of one chip over all its links of this kind, as the source counts them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Figure>,
    /// Nanoseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_ns: Option<Figure>,
}

/// What a link joins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum LinkKind {
    /// Dies of a package or chips of a card.
    OnPackage,
    /// Chips, over the vendor's own links.
    Fabric,
    /// Chip and host.
    Pcie,
}

/// What a launch costs.
#[derive(Debug, Clone, PartialEq, Default, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Launch {
    /// Nanoseconds of one launch on a warm device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overhead_ns: Option<Figure>,
    /// Nanoseconds that the first launch of a process takes: compilation, search for plans.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_ns: Option<Figure>,
}

/// How exactly a chip computes.
#[derive(Debug, Clone, PartialEq, Default, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Accuracy {
    /// Largest difference that a softmax on it may have from float64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub softmax: Option<Figure>,
    /// Largest difference (norm of the vector) that a layer norm on it has shown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub norm: Option<Figure>,
    /// Conversion to bfloat16 cuts off instead of rounding to nearest even.
    #[serde(default)]
    pub truncates_bf16: bool,
}

/// Settings that field experience recommends.
#[derive(Debug, Clone, PartialEq, Default, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Preferences {
    /// Element type of the cache of keys and values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_cache: Option<Dtype>,
    /// Tokens of a prompt that are computed at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_chunk: Option<Figure>,
    /// Environment variables that must be set before the vendor's runtime is loaded.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
}

/// A known fault.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// What happens, and what to do about it.
    pub summary: String,
    /// Versions of driver or toolkit that it was seen with; empty if not stated.
    #[serde(default)]
    pub versions: String,
    /// Name of an entry of `sources`.
    pub source: String,
}

/// Assumptions of the simulator, where no fact is known. They are round numbers to compute with, not figures of the chip.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Simulation {
    /// Algorithm of the allocator.
    pub allocator: AllocatorKind,
    /// Bytes that sizes are rounded up to.
    pub granularity: u64,
    /// Nanoseconds of a launch.
    pub launch_ns: f64,
    /// Nanoseconds before a copy between host and device begins.
    pub copy_latency_ns: f64,
    /// Bytes per second between host and device.
    pub host_bandwidth: f64,
    /// Nanoseconds before data crosses a link between devices.
    pub link_latency_ns: f64,
    /// Share of the peak that a good kernel reaches, 0 to 1: products.
    pub compute_efficiency: f64,
    /// The same: streaming from device memory.
    pub bandwidth_efficiency: f64,
}

impl Default for Simulation {
    fn default() -> Self {
        Self {
            allocator: AllocatorKind::BestFit,
            granularity: 512,
            launch_ns: 10_000.0,
            copy_latency_ns: 10_000.0,
            host_bandwidth: 16e9,
            link_latency_ns: 5_000.0,
            compute_efficiency: 0.6,
            bandwidth_efficiency: 0.8,
        }
    }
}

impl Chip {
    /// How far a figure of this sheet is trusted.
    #[must_use]
    pub fn trust(&self, figure: &Figure) -> Trust {
        let of_source = || self.sources.get(&figure.source).map(|source| source.trust);
        figure.trust.or_else(of_source).unwrap_or(Trust::Estimate)
    }

    /// Peak in operations per second, where it is known.
    #[must_use]
    pub fn rate(&self, dtype: Dtype) -> Option<f64> {
        Some(self.compute.dtypes.get(&dtype)?.rate.as_ref()?.value)
    }

    /// Whether a type is known to have an ability.
    #[must_use]
    pub fn can(&self, dtype: Dtype, ability: Ability) -> bool {
        self.compute.dtypes.get(&dtype).is_some_and(|sheet| sheet.can.contains(&ability))
    }

    /// Bytes of memory that a program can have, where that is known.
    #[must_use]
    pub fn memory_bytes(&self) -> Option<u64> {
        let figure = self.memory.usable.as_ref().or(self.memory.capacity.as_ref())?;
        Some(figure.value as u64)
    }

    /// Bytes per second of device memory, where that is known.
    #[must_use]
    pub fn bandwidth(&self) -> Option<f64> {
        self.memory.bandwidth.as_ref().map(|figure| figure.value)
    }

    /// What addresses of operands must be multiples of, 1 if nothing is known.
    #[must_use]
    pub fn required_alignment(&self) -> u64 {
        self.alignment.required.as_ref().map_or(1, |figure| figure.value as u64)
    }

    /// Algorithm of the allocator, and whether it is a fact (`true`) or an assumption.
    #[must_use]
    pub fn allocator_kind(&self) -> (AllocatorKind, bool) {
        self.allocator.kind.map_or((self.simulation.allocator, false), |kind| (kind, true))
    }

    /// Bytes that sizes are rounded up to, and whether that is a fact (`true`) or an assumption.
    #[must_use]
    pub fn allocation_granularity(&self) -> (u64, bool) {
        let fact = self.allocator.granularity.as_ref();
        fact.map_or((self.simulation.granularity, false), |figure| (figure.value as u64, true))
    }

    /// Nanoseconds of a launch, and whether that is a fact (`true`) or an assumption.
    #[must_use]
    pub fn launch_ns(&self) -> (f64, bool) {
        let fact = self.launch.overhead_ns.as_ref();
        fact.map_or((self.simulation.launch_ns, false), |figure| (figure.value, true))
    }

    /// The first link of a kind.
    #[must_use]
    pub fn link(&self, kind: LinkKind) -> Option<&Link> {
        self.links.iter().find(|link| link.kind == kind)
    }
}
