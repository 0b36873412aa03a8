//! Status codes and the error record.

use crate::QHAL_ERROR_TEXT;

/// What a call answers: [`QHAL_OK`] or one of the codes below.
pub type qhal_status = i32;

/// Done.
pub const QHAL_OK: qhal_status = 0;
/// Stopped at the caller's wish.
pub const QHAL_CANCELLED: qhal_status = 1;
/// No better code fits.
pub const QHAL_UNKNOWN: qhal_status = 2;
/// An argument is wrong whatever the state.
pub const QHAL_INVALID_ARGUMENT: qhal_status = 3;
/// A time limit passed.
pub const QHAL_DEADLINE_EXCEEDED: qhal_status = 4;
/// Something named does not exist.
pub const QHAL_NOT_FOUND: qhal_status = 5;
/// Something to be created exists.
pub const QHAL_ALREADY_EXISTS: qhal_status = 6;
/// The operating system or the driver refuses.
pub const QHAL_PERMISSION_DENIED: qhal_status = 7;
/// Out of memory or of another bounded resource.
pub const QHAL_RESOURCE_EXHAUSTED: qhal_status = 8;
/// The object is in the wrong state for this call.
pub const QHAL_FAILED_PRECONDITION: qhal_status = 9;
/// Given up because of a conflict; may be tried again.
pub const QHAL_ABORTED: qhal_status = 10;
/// An offset, size or shape is outside of what was planned or allocated.
pub const QHAL_OUT_OF_RANGE: qhal_status = 11;
/// The plugin does not have this function, op, type or shape.
pub const QHAL_UNIMPLEMENTED: qhal_status = 12;
/// A defect of the plugin.
pub const QHAL_INTERNAL: qhal_status = 13;
/// Not possible at the moment.
pub const QHAL_UNAVAILABLE: qhal_status = 14;
/// Data is lost or corrupt.
pub const QHAL_DATA_LOSS: qhal_status = 15;
/// The device is gone; every object of it is dead.
pub const QHAL_DEVICE_LOST: qhal_status = 17;
/// Polled work is still running; not an error.
pub const QHAL_NOT_READY: qhal_status = 18;

/// The same call may succeed later.
pub const QHAL_ERROR_RETRYABLE: u32 = 1;
/// Later work on the same stream will fail as well.
pub const QHAL_ERROR_STICKY: u32 = 2;
/// The device must be opened anew.
pub const QHAL_ERROR_DEVICE_LOST: u32 = 4;
/// The cause is lack of memory.
pub const QHAL_ERROR_OUT_OF_MEMORY: u32 = 8;

/// Details of a failure, in memory of the caller, so that it works when no memory is left.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_error {
    /// Size of this struct.
    pub struct_size: u32,
    /// The status code once more.
    pub code: qhal_status,
    /// `QHAL_ERROR_*` bits.
    pub flags: u32,
    /// Operand or element that the error is about; `u32::MAX` if none.
    pub op_index: u32,
    /// Code of the vendor's runtime, 0 if none.
    pub vendor_code: i64,
    /// Zero-terminated UTF-8: expected, found, what to do.
    pub message: [u8; QHAL_ERROR_TEXT],
}

impl Default for qhal_error {
    fn default() -> Self {
        Self {
            struct_size: size_of::<Self>() as u32,
            code: QHAL_OK,
            flags: 0,
            op_index: u32::MAX,
            vendor_code: 0,
            message: [0; QHAL_ERROR_TEXT],
        }
    }
}
