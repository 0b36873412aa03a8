//! Structs that cross the boundary. Units are bytes, nanoseconds, bytes per second and operations per second.

use core::ffi::c_void;

use crate::{QHAL_MAX_RANK, qhal_attr, qhal_buffer, qhal_slice, qhal_str};

/// Static facts of a plugin; reading them has no side effect.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_manifest {
    /// Size of this struct.
    pub struct_size: u32,
    /// ABI major that the plugin was built with.
    pub abi_major: u32,
    /// ABI minor that the plugin was built with.
    pub abi_minor: u32,
    /// Oldest host minor that the plugin accepts.
    pub min_host_minor: u32,
    /// Short name, used in `--device name:index`.
    pub name: qhal_str,
    /// Vendor, for people.
    pub vendor: qhal_str,
    /// Version of the plugin (semver).
    pub version: qhal_str,
    /// Build identity, for caches and reports.
    pub build_id: qhal_str,
    /// `QHAL_KIND_*`.
    pub kind: u32,
    /// 0 none, 1 address, 2 thread, 3 memory sanitizer.
    pub sanitizer: u32,
    /// CPU features that must be present before the plugin may be used (`QHAL_CPU_*`).
    pub cpu_features: u64,
    /// Rank among plugins that serve the same device; higher wins.
    pub score: u32,
    /// Zero.
    pub reserved: u32,
}

/// `cpu_features`: x86-64 AVX2, FMA and F16C.
pub const QHAL_CPU_AVX2: u64 = 1 << 0;
/// `cpu_features`: x86-64 AVX-512 F, BW, VL and DQ.
pub const QHAL_CPU_AVX512: u64 = 1 << 1;
/// `cpu_features`: AArch64 Advanced SIMD.
pub const QHAL_CPU_NEON: u64 = 1 << 2;

/// Runs on the host's cores.
pub const QHAL_KIND_CPU: u32 = 1;
/// A graphics processor.
pub const QHAL_KIND_GPU: u32 = 2;
/// A neural-network accelerator.
pub const QHAL_KIND_NPU: u32 = 3;
/// Figures are modelled, results computed on the host.
pub const QHAL_KIND_SIMULATED: u32 = 4;
/// Computes nothing.
pub const QHAL_KIND_NULL: u32 = 5;

/// Identity of a device. It is a field of [`qhal_device_info`], so it cannot grow within a major version.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_device_id {
    /// Size of this struct.
    pub struct_size: u32,
    /// Index in the plugin.
    pub index: u32,
    /// Stable unique id, zero where there is none.
    pub uuid: [u8; 16],
    /// PCI domain, bus, device, function in bits 32.., 16.., 8.., 0..; `u64::MAX` if none.
    pub bus_address: u64,
}

/// What can be told of a device without opening it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_device_info {
    /// Size of this struct.
    pub struct_size: u32,
    /// `QHAL_KIND_*`.
    pub kind: u32,
    /// Identity.
    pub id: qhal_device_id,
    /// Name for people, zero-terminated.
    pub name: [u8; 64],
    /// Name for caches: changes when results or speed may change. Zero-terminated. What comes before a colon, if there is one, is
    /// the device's model, several names with slashes between them: the host chooses by it among devices of different models.
    pub fingerprint: [u8; 64],
    /// Driver and firmware version, zero-terminated.
    pub driver: [u8; 64],
    /// Memory in bytes, 0 unknown.
    pub memory_total: u64,
}

/// Asynchronous copies.
pub const QHAL_FEATURE_ASYNC_COPY: u64 = 1 << 0;
/// Events.
pub const QHAL_FEATURE_EVENTS: u64 = 1 << 1;
/// Time between events.
pub const QHAL_FEATURE_EVENT_TIMING: u64 = 1 << 2;
/// Page-locked host memory.
pub const QHAL_FEATURE_PINNED: u64 = 1 << 3;
/// Buffers can be mapped.
pub const QHAL_FEATURE_MAP: u64 = 1 << 4;
/// Host memory can be imported without a copy.
pub const QHAL_FEATURE_IMPORT_HOST: u64 = 1 << 5;
/// dma-buf descriptors can be imported.
pub const QHAL_FEATURE_IMPORT_DMABUF: u64 = 1 << 6;
/// Devices can copy to each other.
pub const QHAL_FEATURE_P2P: u64 = 1 << 7;
/// Extension `cmdlist`.
pub const QHAL_FEATURE_CMDLIST: u64 = 1 << 8;
/// Extension `vmm`.
pub const QHAL_FEATURE_VMM: u64 = 1 << 9;
/// Extension `collectives`.
pub const QHAL_FEATURE_COLLECTIVES: u64 = 1 << 10;
/// Extension `region`; reserved, not to be set.
pub const QHAL_FEATURE_REGION: u64 = 1 << 11;
/// Extension `partition`.
pub const QHAL_FEATURE_PARTITION: u64 = 1 << 12;
/// Kernels read and write host memory directly; no staging is needed.
pub const QHAL_FEATURE_UNIFIED: u64 = 1 << 13;
/// Work of a stream is complete when the call that enqueued it returns.
pub const QHAL_FEATURE_INLINE: u64 = 1 << 14;

/// Values of the type can be stored.
pub const QHAL_DTYPE_CAN_STORE: u32 = 1;
/// Values can be converted to and from f32.
pub const QHAL_DTYPE_CAN_CONVERT: u32 = 2;
/// Arithmetic exists.
pub const QHAL_DTYPE_CAN_COMPUTE: u32 = 4;
/// Can be an accumulator.
pub const QHAL_DTYPE_CAN_ACCUMULATE: u32 = 8;
/// The matrix unit takes it.
pub const QHAL_DTYPE_CAN_MATRIX: u32 = 16;

/// What a device can do with one dtype.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct qhal_dtype_caps {
    /// Size of this struct.
    pub struct_size: u32,
    /// Code of [`crate::ops`].
    pub dtype: u32,
    /// `QHAL_DTYPE_CAN_*` bits.
    pub bits: u32,
    /// 0 unknown, 1 declared by a data sheet, 2 measured.
    pub peak_source: u32,
    /// Peak operations per second (a multiply-add is two), 0 unknown.
    pub peak_ops: f64,
}

/// Constant facts of an open device. A field counts only if its bit is in `valid_fields`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_device_caps {
    /// Size of this struct.
    pub struct_size: u32,
    /// `QHAL_KIND_*`.
    pub kind: u32,
    /// `QHAL_CAPS_*` bits of the fields that hold a value.
    pub valid_fields: u64,
    /// `QHAL_CAPS_*` bits of the fields that are estimates.
    pub estimated_fields: u64,
    /// Memory in bytes.
    pub memory_total: u64,
    /// Largest single allocation.
    pub max_allocation: u64,
    /// Alignment that every slice's offset needs beyond the natural one (the element's size; 1 for block formats).
    pub buffer_alignment: u64,
    /// Granularity of `vmm` commits.
    pub vmm_granularity: u64,
    /// Cores, compute units or clusters.
    pub compute_units: u32,
    /// Bytes of a vector register, or threads of a warp.
    pub vector_width: u32,
    /// Tile of the matrix unit: rows, columns, depth; zero where there is none.
    pub matrix_tile: [u32; 3],
    /// NUMA node, `u32::MAX` unknown.
    pub numa_node: u32,
    /// Cache bytes per level, 0 where there is none.
    pub cache_bytes: [u64; 4],
    /// Scratch memory per compute unit.
    pub scratch_bytes: u64,
    /// `QHAL_FEATURE_*`.
    pub features: u64,
    /// Peak memory bandwidth in bytes per second.
    pub bandwidth: f64,
    /// 0 unknown, 1 declared, 2 measured.
    pub bandwidth_source: u32,
    /// Entries of `dtypes`.
    pub num_dtypes: u32,
    /// Table of dtypes, valid as long as the device is open.
    pub dtypes: *const qhal_dtype_caps,
}
/// `memory_total` holds a value.
pub const QHAL_CAPS_MEMORY_TOTAL: u64 = 1 << 0;
/// `max_allocation` holds a value.
pub const QHAL_CAPS_MAX_ALLOCATION: u64 = 1 << 1;
/// `buffer_alignment` holds a value.
pub const QHAL_CAPS_BUFFER_ALIGNMENT: u64 = 1 << 2;
/// `vmm_granularity` holds a value.
pub const QHAL_CAPS_VMM_GRANULARITY: u64 = 1 << 3;
/// `compute_units` holds a value.
pub const QHAL_CAPS_COMPUTE_UNITS: u64 = 1 << 4;
/// `vector_width` holds a value.
pub const QHAL_CAPS_VECTOR_WIDTH: u64 = 1 << 5;
/// `matrix_tile` holds a value.
pub const QHAL_CAPS_MATRIX_TILE: u64 = 1 << 6;
/// `numa_node` holds a value.
pub const QHAL_CAPS_NUMA_NODE: u64 = 1 << 7;
/// `cache_bytes` holds a value.
pub const QHAL_CAPS_CACHE_BYTES: u64 = 1 << 8;
/// `scratch_bytes` holds a value.
pub const QHAL_CAPS_SCRATCH_BYTES: u64 = 1 << 9;
/// `bandwidth` holds a value.
pub const QHAL_CAPS_BANDWIDTH: u64 = 1 << 10;

/// Works as it should.
pub const QHAL_HEALTH_OK: u32 = 1;
/// Works with errors.
pub const QHAL_HEALTH_DEGRADED: u32 = 2;
/// Works slower than it could.
pub const QHAL_HEALTH_THROTTLED: u32 = 3;
/// Does not answer.
pub const QHAL_HEALTH_UNRESPONSIVE: u32 = 4;
/// Gone.
pub const QHAL_HEALTH_LOST: u32 = 5;

/// State of a device at a moment. A field counts only if its bit is in `valid_fields` (bit n = n-th field after it).
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct qhal_health {
    /// Size of this struct.
    pub struct_size: u32,
    /// `QHAL_HEALTH_*`.
    pub state: u32,
    /// Which of the following fields hold a value.
    pub valid_fields: u64,
    /// Bit 0: free memory in bytes.
    pub memory_free: u64,
    /// Bit 1: used memory in bytes.
    pub memory_used: u64,
    /// Bit 2: memory held by the driver or allocator but unused.
    pub memory_reserved: u64,
    /// Bit 3: utilisation of compute, 0..1.
    pub utilisation: f64,
    /// Bit 4: degrees Celsius.
    pub temperature: f64,
    /// Bit 5: watts.
    pub power: f64,
    /// Bit 6: reasons for throttling, vendor-defined bits.
    pub throttle_reasons: u64,
    /// Bit 7: corrected memory errors.
    pub memory_errors_corrected: u64,
    /// Bit 8: uncorrected memory errors.
    pub memory_errors_uncorrected: u64,
    /// Bit 9: link errors.
    pub link_errors: u64,
    /// Bit 10: host time of the last sign of progress.
    pub heartbeat_ns: u64,
    /// Bit 11: last sticky error.
    pub last_error: i64,
}

/// A directed link between two devices.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct qhal_link {
    /// Size of this struct.
    pub struct_size: u32,
    /// `QHAL_LINK_*`.
    pub class: u32,
    /// Bit 0 copy, 1 load/store, 2 coherent, 3 atomics.
    pub flags: u32,
    /// Hops.
    pub hops: u32,
    /// Bytes per second, 0 unknown.
    pub bandwidth: f64,
    /// Nanoseconds, 0 unknown.
    pub latency_ns: f64,
}
/// The same device.
pub const QHAL_LINK_SAME: u32 = 1;
/// Dies of one package.
pub const QHAL_LINK_ON_PACKAGE: u32 = 2;
/// The vendor's fabric.
pub const QHAL_LINK_FABRIC: u32 = 3;
/// PCIe below one root.
pub const QHAL_LINK_PCIE_SAME_ROOT: u32 = 4;
/// PCIe across roots.
pub const QHAL_LINK_PCIE_CROSS_ROOT: u32 = 5;
/// Through host memory.
pub const QHAL_LINK_HOST_STAGED: u32 = 6;
/// Through a network.
pub const QHAL_LINK_NETWORK: u32 = 7;
/// No way.
pub const QHAL_LINK_ISOLATED: u32 = 8;

/// In device memory.
pub const QHAL_MEMORY_DEVICE: u32 = 1;
/// The host can map it.
pub const QHAL_MEMORY_HOST_VISIBLE: u32 = 2;
/// No flush is needed.
pub const QHAL_MEMORY_HOST_COHERENT: u32 = 4;
/// Cached on the host.
pub const QHAL_MEMORY_HOST_CACHED: u32 = 8;
/// One memory for host and device.
pub const QHAL_MEMORY_UNIFIED: u32 = 16;
/// Page-locked host memory.
pub const QHAL_MEMORY_PINNED: u32 = 32;

/// Weights.
pub const QHAL_USAGE_WEIGHT: u32 = 1;
/// Cache of keys and values.
pub const QHAL_USAGE_KV: u32 = 2;
/// Activations.
pub const QHAL_USAGE_ACTIVATION: u32 = 4;
/// Workspace of plans.
pub const QHAL_USAGE_WORKSPACE: u32 = 8;
/// Copies to and from the host.
pub const QHAL_USAGE_STAGING: u32 = 16;
/// Can be handed to another process or device.
pub const QHAL_USAGE_EXPORTABLE: u32 = 32;

/// Lives as long as the model.
pub const QHAL_SCOPE_PERSISTENT: u32 = 1;
/// Grows with requests.
pub const QHAL_SCOPE_DYNAMIC: u32 = 2;
/// Lives within one step.
pub const QHAL_SCOPE_TEMPORARY: u32 = 3;

/// Wanted memory.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_buffer_desc {
    /// Size of this struct.
    pub struct_size: u32,
    /// `QHAL_MEMORY_*` bits.
    pub memory: u32,
    /// Bytes.
    pub size: u64,
    /// Power of two; 0 = the device's own.
    pub alignment: u64,
    /// `QHAL_USAGE_*` bits.
    pub usage: u32,
    /// `QHAL_SCOPE_*`.
    pub scope: u32,
    /// Expected final size in bytes for what grows, 0 unknown.
    pub growth_hint: u64,
    /// Preferred NUMA node, `u32::MAX` any.
    pub numa_node: u32,
    /// Zero.
    pub reserved: u32,
    /// For reports.
    pub name: qhal_str,
}

/// Import of a host range; the host keeps it valid and, if read-only, unchanged until the buffer is freed.
pub const QHAL_IMPORT_HOST: u32 = 1;
/// Import of a dma-buf descriptor.
pub const QHAL_IMPORT_DMABUF: u32 = 2;
/// Import of a peer's buffer.
pub const QHAL_IMPORT_PEER: u32 = 3;

/// Memory that exists already.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_import_desc {
    /// Size of this struct.
    pub struct_size: u32,
    /// `QHAL_IMPORT_*`.
    pub kind: u32,
    /// Host address, for [`QHAL_IMPORT_HOST`].
    pub host: *mut c_void,
    /// Descriptor, for [`QHAL_IMPORT_DMABUF`].
    pub fd: i64,
    /// Buffer of another device, for [`QHAL_IMPORT_PEER`].
    pub peer: *mut qhal_buffer,
    /// Bytes.
    pub size: u64,
    /// `QHAL_ACCESS_*` bits.
    pub access: u32,
    /// `QHAL_USAGE_*` bits.
    pub usage: u32,
    /// For reports.
    pub name: qhal_str,
}
/// May be read.
pub const QHAL_ACCESS_READ: u32 = 1;
/// May be written.
pub const QHAL_ACCESS_WRITE: u32 = 2;

/// Wanted queue.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_stream_desc {
    /// Size of this struct.
    pub struct_size: u32,
    /// 0 normal, positive more urgent.
    pub priority: i32,
    /// For reports.
    pub name: qhal_str,
}

/// A copy of `rows` runs of `row_bytes`. One row is a plain copy. A side is a slice, or host memory if its buffer is null.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_copy_desc {
    /// Size of this struct.
    pub struct_size: u32,
    /// Zero.
    pub flags: u32,
    /// Target, unless `dst_host` is set.
    pub dst: qhal_slice,
    /// Source, unless `src_host` is set.
    pub src: qhal_slice,
    /// Host target or null; must stay valid until the copy is done.
    pub dst_host: *mut c_void,
    /// Host source or null; must stay valid until the copy is done.
    pub src_host: *const c_void,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// Rows.
    pub rows: u64,
    /// Bytes from row to row in the target.
    pub dst_pitch: u64,
    /// Bytes from row to row in the source.
    pub src_pitch: u64,
}

/// A tensor operand. Dimension `i` is fixed if `dim_symbol[i]` is 0; otherwise its value at launch is
/// `symbol_values[dim_symbol[i] - 1]`, within `dim_min..=dim_max`, and `dims[i]` holds an expected value.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_tensor_desc {
    /// Size of this struct.
    pub struct_size: u32,
    /// `QHAL_DTYPE` code of [`crate::ops`].
    pub dtype: u32,
    /// Number of dimensions.
    pub rank: u32,
    /// `QHAL_QUANT_*`.
    pub quant_scheme: u32,
    /// Sizes, outermost first.
    pub dims: [i64; QHAL_MAX_RANK],
    /// Elements from one index to the next; the innermost is 1. 0 = dense at the sizes of each launch, so that inner
    /// dimensions may be symbols. Block-quantised tensors are dense.
    pub strides: [i64; QHAL_MAX_RANK],
    /// Smallest value of each dimension.
    pub dim_min: [i64; QHAL_MAX_RANK],
    /// Largest value of each dimension.
    pub dim_max: [i64; QHAL_MAX_RANK],
    /// 0, or 1 + index of a symbol.
    pub dim_symbol: [u32; QHAL_MAX_RANK],
    /// 0 = as in the file; otherwise a packed layout that a plan of the same device announced.
    pub layout_id: u32,
    /// Zero.
    pub flags: u32,
    /// Block geometry of a scaled scheme: rows, columns.
    pub block: [u32; 2],
}
/// Plain values, or a block format that is self-contained (all GGUF types).
pub const QHAL_QUANT_NONE: u32 = 0;
/// The next operand holds f32 scales, one per `block` of rows x columns, multiplied.
pub const QHAL_QUANT_BLOCK_SCALE: u32 = 1;

/// Something small done to the result while it is in registers.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_epilogue {
    /// Size of this struct.
    pub struct_size: u32,
    /// `QHAL_EPILOGUE_*` of [`crate::ops`].
    pub kind: u32,
    /// Operand that it reads, `u32::MAX` none.
    pub input: u32,
    /// Kind-specific.
    pub param: u32,
}

/// One op.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_op_desc {
    /// Size of this struct.
    pub struct_size: u32,
    /// `QHAL_OP_*` of [`crate::ops`].
    pub op_kind: u32,
    /// Version of the op's definition.
    pub op_version: u32,
    /// `QHAL_PHASE_*`.
    pub phase: u32,
    /// `QHAL_COMPUTE_*`: the form in which products are formed.
    pub compute: u32,
    /// DType code of accumulators.
    pub accumulate: u32,
    /// `QHAL_TOLERANCE_*`.
    pub tolerance: u32,
    /// Operands read.
    pub num_inputs: u32,
    /// Operands written.
    pub num_outputs: u32,
    /// Attributes.
    pub num_attrs: u32,
    /// Epilogues, in order.
    pub num_epilogues: u32,
    /// Symbols that launches give values for.
    pub num_symbols: u32,
    /// `num_inputs` descriptions.
    pub inputs: *const qhal_tensor_desc,
    /// `num_outputs` descriptions.
    pub outputs: *const qhal_tensor_desc,
    /// `num_attrs` attributes.
    pub attrs: *const qhal_attr,
    /// `num_epilogues` epilogues.
    pub epilogues: *const qhal_epilogue,
    /// Reserved for extensions, null.
    pub next: *const c_void,
}
/// Many tokens of one or several prompts.
pub const QHAL_PHASE_PREFILL: u32 = 1;
/// One token per sequence.
pub const QHAL_PHASE_DECODE: u32 = 2;
/// Both.
pub const QHAL_PHASE_MIXED: u32 = 3;

/// Bit-equal to the definition.
pub const QHAL_TOLERANCE_EXACT: u32 = 1;
/// float32 rounding.
pub const QHAL_TOLERANCE_TIGHT: u32 = 2;
/// Half-precision rounding.
pub const QHAL_TOLERANCE_NORMAL: u32 = 3;
/// 8-bit rounding.
pub const QHAL_TOLERANCE_LOOSE: u32 = 4;
/// Judged by distributions only.
pub const QHAL_TOLERANCE_STATISTICAL: u32 = 5;

/// Not at all.
pub const QHAL_SUPPORT_NO: u32 = 0;
/// Correct, but not in the device's own way.
pub const QHAL_SUPPORT_EMULATED: u32 = 1;
/// Yes.
pub const QHAL_SUPPORT_NATIVE: u32 = 2;
/// Yes, with parameters chosen by measurement.
pub const QHAL_SUPPORT_TUNED: u32 = 3;

/// Answer of [`crate::qhal_plugin_api::op_supports`].
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_support {
    /// Size of this struct.
    pub struct_size: u32,
    /// `QHAL_SUPPORT_*`.
    pub level: u32,
    /// Estimate at the expected dims, 0 unknown.
    pub estimated_ns: f64,
    /// Bytes moved at the expected dims, 0 unknown.
    pub estimated_bytes: f64,
    /// Why not, zero-terminated.
    pub reason: [u8; 128],
}

/// Wishes for a plan.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_plan_opts {
    /// Size of this struct.
    pub struct_size: u32,
    /// `QHAL_PLAN_*` bits that the plan must have.
    pub required_flags: u32,
    /// Most bytes of workspace, 0 no limit.
    pub max_workspace: u64,
}

/// May be recorded into a command list ([`crate::qhal_cmdlist_api`]).
pub const QHAL_PLAN_CAPTURE_SAFE: u32 = 1;
/// Same inputs, same bits.
pub const QHAL_PLAN_DETERMINISTIC: u32 = 2;
/// A row's bits do not depend on the other rows or their number.
pub const QHAL_PLAN_BATCH_INVARIANT: u32 = 4;
/// At least one input has `packed_bytes`; it must go through `plan_prepack` first.
pub const QHAL_PLAN_NEEDS_PREPACK: u32 = 8;

/// Most operands whose packing a plan can announce.
pub const QHAL_MAX_PACKED: usize = 16;

/// What a plan needs and promises.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_plan_info {
    /// Size of this struct.
    pub struct_size: u32,
    /// `QHAL_PLAN_*` bits.
    pub flags: u32,
    /// Bit n: output 0 may share memory with input n.
    pub in_place: u64,
    /// Bytes of workspace at the largest dims.
    pub workspace_bytes: u64,
    /// Alignment of the workspace.
    pub workspace_alignment: u64,
    /// Bytes of the packed form per input, 0 = takes it as it is.
    pub packed_bytes: [u64; QHAL_MAX_PACKED],
    /// Identity of the packed form per input: equal ids and sources give equal bytes.
    pub packed_layout: [u32; QHAL_MAX_PACKED],
    /// Operations at the expected dims.
    pub flops: f64,
    /// Bytes read at the expected dims.
    pub bytes_read: f64,
    /// Bytes written at the expected dims.
    pub bytes_written: f64,
    /// Kernel chosen, zero-terminated.
    pub kernel: [u8; 64],
    /// Identity for the tuning store.
    pub content_hash: u64,
}

/// The plan takes this variant.
pub const QHAL_VARIANT_CHOSEN: u32 = 1;

/// A way to compute launches of some sizes. Results are the same bits whichever variant is taken.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_variant {
    /// Size of this struct.
    pub struct_size: u32,
    /// `QHAL_VARIANT_*` bits.
    pub flags: u32,
    /// Index of the symbol whose value decides, `u32::MAX` if the variant holds for every launch.
    pub symbol: u32,
    /// Zero.
    pub reserved: u32,
    /// Smallest value of the symbol.
    pub min: i64,
    /// Largest value of the symbol.
    pub max: i64,
    /// Family of kernels, zero-terminated.
    pub family: [u8; 32],
    /// Tiling within the family, zero-terminated.
    pub tiling: [u8; 64],
    /// What [`crate::qhal_variants_api`] is asked with to get it, zero-terminated.
    pub name: [u8; 32],
}

/// Operands and sizes of one launch. Order and number of slices are those of the description.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_launch_args {
    /// Size of this struct.
    pub struct_size: u32,
    /// Entries of `inputs`.
    pub num_inputs: u32,
    /// Entries of `outputs`.
    pub num_outputs: u32,
    /// Entries of `symbol_values`.
    pub num_symbols: u32,
    /// Operands read.
    pub inputs: *const qhal_slice,
    /// Operands written.
    pub outputs: *const qhal_slice,
    /// Workspace.
    pub workspace: qhal_slice,
    /// Value of each symbol.
    pub symbol_values: *const i64,
}
