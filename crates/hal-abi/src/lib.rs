//! The C ABI between the runtime and a device plugin: plain data and constants, no behaviour.
//!
//! A plugin exports two symbols, [`qhal_plugin_manifest_fn`] and [`qhal_plugin_query_fn`]. The second returns a
//! [`qhal_plugin_api`]: a size-first table of thirty functions. The rules that both sides rely on:
//!
//! 1. **Layout.** Only fixed-width integers, `f64`, pointers and arrays of these cross. Every struct starts with
//!    `struct_size`, except four frozen small ones: [`qhal_str`], [`qhal_kv`], [`qhal_attr`], [`qhal_slice`]. Arrays of
//!    growable structs are walked with the stride that the elements' `struct_size` states.
//! 2. **Versions.** Same major; `min_host_minor <= host minor`. New fields and functions go to the end. A table entry
//!    beyond `struct_size`, or null, is replaced by the host with a stub that answers [`QHAL_UNIMPLEMENTED`].
//! 3. **Memory** is (buffer, offset, size), never a bare device pointer.
//! 4. **Ops** are described ([`qhal_op_desc`]), asked for ([`qhal_plugin_api::op_supports`]), planned for ranges of shapes
//!    ([`qhal_plugin_api::plan_create`]) and launched with values ([`qhal_plugin_api::plan_launch`]). A launch allocates
//!    nothing and does not wait. Data-dependent lengths are device buffers.
//! 5. **Ownership.** Whoever created it destroys it, children before parents.
//! 6. **Errors** are a status code plus a caller-owned [`qhal_error`]. A failed asynchronous launch sticks to its stream.
//! 7. **Threads.** Devices, plans, buffers: any thread. A stream or event: one thread at a time.
//! 8. **Determinism.** Same plan, inputs and values give the same bits; plan flags say if a row's result is
//!    also independent of the other rows.
//! 9. **Extensions** are tables of their own, asked for by id and version, where a device's features say that they are there:
//!    [`qhal_vmm_api`], [`qhal_variants_api`], [`qhal_cmdlist_api`], [`qhal_collectives_api`].
//!
//! The op vocabulary (operands, attributes, formulas) is in [`ops`].
#![expect(non_camel_case_types, reason = "type names are the names of the C header")]
#![no_std]

use core::ffi::c_void;

mod extensions;
pub mod ops;
mod status;
mod structs;
mod table;

pub use extensions::*;
pub use status::*;
pub use structs::*;
pub use table::*;

/// Major version: both sides must have the same.
pub const QHAL_ABI_MAJOR: u32 = 0;
/// Minor version of this header.
///
/// | minor | what it added |
/// |---|---|
/// | 1 | the first that was published |
/// | 2 | the tables of command lists and collectives |
pub const QHAL_ABI_MINOR: u32 = 2;

/// Most dimensions of a tensor.
pub const QHAL_MAX_RANK: usize = 8;
/// Bytes of text in a [`qhal_error`], terminating zero included.
pub const QHAL_ERROR_TEXT: usize = 208;

/// Opaque device, owned by the plugin.
#[repr(C)]
#[derive(Debug)]
pub struct qhal_device {
    _opaque: [u8; 0],
}
/// Opaque memory object, owned by the plugin.
#[repr(C)]
#[derive(Debug)]
pub struct qhal_buffer {
    _opaque: [u8; 0],
}
/// Opaque in-order queue, owned by the plugin.
#[repr(C)]
#[derive(Debug)]
pub struct qhal_stream {
    _opaque: [u8; 0],
}
/// Opaque marker in a stream, owned by the plugin.
#[repr(C)]
#[derive(Debug)]
pub struct qhal_event {
    _opaque: [u8; 0],
}
/// Opaque prepared op, owned by the plugin.
#[repr(C)]
#[derive(Debug)]
pub struct qhal_plan {
    _opaque: [u8; 0],
}

/// A borrowed, not zero-terminated UTF-8 string. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_str {
    /// First byte; may be null when `len` is 0.
    pub data: *const u8,
    /// Length in bytes.
    pub len: u64,
}

/// An option. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_kv {
    /// Name.
    pub key: qhal_str,
    /// Value as text.
    pub value: qhal_str,
}

/// A typed attribute of an op. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct qhal_attr {
    /// One of the `QHAL_ATTR_*` keys of [`ops`].
    pub key: u32,
    /// [`QHAL_ATTR_TYPE_I64`] or [`QHAL_ATTR_TYPE_F64`].
    pub value_type: u32,
    /// The bits of the i64 or f64.
    pub bits: u64,
}
/// `bits` holds an i64.
pub const QHAL_ATTR_TYPE_I64: u32 = 0;
/// `bits` holds an f64.
pub const QHAL_ATTR_TYPE_F64: u32 = 1;

impl qhal_attr {
    /// An integer attribute.
    #[must_use]
    pub const fn int(key: u32, value: i64) -> Self {
        Self { key, value_type: QHAL_ATTR_TYPE_I64, bits: value.cast_unsigned() }
    }
    /// A real attribute.
    #[must_use]
    pub const fn real(key: u32, value: f64) -> Self {
        Self { key, value_type: QHAL_ATTR_TYPE_F64, bits: value.to_bits() }
    }
    /// The value as an integer, if it is one.
    #[must_use]
    pub const fn as_int(&self) -> Option<i64> {
        if self.value_type == QHAL_ATTR_TYPE_I64 { Some(self.bits.cast_signed()) } else { None }
    }
    /// The value as a real number, if it is one.
    #[must_use]
    pub const fn as_real(&self) -> Option<f64> {
        if self.value_type == QHAL_ATTR_TYPE_F64 { Some(f64::from_bits(self.bits)) } else { None }
    }
}

/// A range of a buffer. A null buffer stands for an absent optional operand. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct qhal_slice {
    /// The memory object.
    pub buffer: *mut qhal_buffer,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}

/// Untyped user data of a callback.
pub type qhal_user = *mut c_void;
