//! What an entry of the table reports when it does not succeed.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use opencl3::error_codes::ClError;
use opencl3::error_codes::{
    CL_DEVICE_NOT_AVAILABLE, CL_INVALID_BUFFER_SIZE, CL_MEM_OBJECT_ALLOCATION_FAILURE, CL_OUT_OF_HOST_MEMORY,
    CL_OUT_OF_RESOURCES,
};
use qwen_hal_abi::{
    QHAL_ERROR_DEVICE_LOST, QHAL_ERROR_OUT_OF_MEMORY, QHAL_ERROR_STICKY, QHAL_INTERNAL, QHAL_INVALID_ARGUMENT, QHAL_OK,
    QHAL_OUT_OF_RANGE, QHAL_RESOURCE_EXHAUSTED, QHAL_UNAVAILABLE, QHAL_UNIMPLEMENTED, qhal_error, qhal_status,
};

/// A status other than OK, with its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) code: qhal_status,
    pub(crate) flags: u32,
    operand: Option<u32>,
    vendor: i32,
    pub(crate) message: Arc<str>,
}

impl Failure {
    fn new(code: qhal_status, message: impl Into<Arc<str>>) -> Self {
        Self { code, flags: 0, operand: None, vendor: 0, message: message.into() }
    }
    pub(crate) fn invalid(message: impl Into<Arc<str>>) -> Self {
        Self::new(QHAL_INVALID_ARGUMENT, message)
    }
    pub(crate) fn unsupported(message: impl Into<Arc<str>>) -> Self {
        Self::new(QHAL_UNIMPLEMENTED, message)
    }
    pub(crate) fn out_of_range(message: impl Into<Arc<str>>) -> Self {
        Self::new(QHAL_OUT_OF_RANGE, message)
    }
    pub(crate) fn out_of_memory(message: impl Into<Arc<str>>) -> Self {
        Self { flags: QHAL_ERROR_OUT_OF_MEMORY, ..Self::new(QHAL_RESOURCE_EXHAUSTED, message) }
    }
    pub(crate) fn internal(message: impl Into<Arc<str>>) -> Self {
        Self::new(QHAL_INTERNAL, message)
    }
    /// An error of the OpenCL runtime in a call.
    pub(crate) fn opencl(call: &str, error: impl Into<ClError>) -> Self {
        let error = error.into();
        let (code, flags) = match error.0 {
            CL_MEM_OBJECT_ALLOCATION_FAILURE | CL_OUT_OF_RESOURCES | CL_OUT_OF_HOST_MEMORY | CL_INVALID_BUFFER_SIZE => {
                (QHAL_RESOURCE_EXHAUSTED, QHAL_ERROR_OUT_OF_MEMORY)
            }
            CL_DEVICE_NOT_AVAILABLE => (QHAL_UNAVAILABLE, QHAL_ERROR_DEVICE_LOST),
            _ => (QHAL_INTERNAL, 0),
        };
        let message = format!("{call}: the OpenCL runtime reports {error} ({})", error.0);
        Self { flags, vendor: error.0, ..Self::new(code, message) }
    }
    pub(crate) fn at(mut self, operand: usize) -> Self {
        self.operand = u32::try_from(operand).ok();
        self
    }
    /// The same about a named thing.
    pub(crate) fn about(mut self, what: impl std::fmt::Display) -> Self {
        self.message = format!("{what}: {}", self.message).into();
        self
    }
    /// The same, as later work of the stream reports it.
    pub(crate) const fn sticky(mut self) -> Self {
        self.flags |= QHAL_ERROR_STICKY;
        self
    }
    fn panic(payload: &(dyn Any + Send)) -> Self {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
        Self::internal(format!("panic in the OpenCL backend: {text}"))
    }

    /// Writes the details where the caller wants them.
    ///
    /// # Safety
    /// `err` is null or a record of the size that it states.
    unsafe fn report(&self, err: *mut qhal_error) {
        // SAFETY: by the caller's promise; a record of an unknown smaller version is left alone.
        let Some(err) = (unsafe { err.as_mut() }).filter(|err| err.struct_size as usize >= size_of::<qhal_error>())
        else {
            return;
        };
        (err.code, err.flags, err.vendor_code) = (self.code, self.flags, i64::from(self.vendor));
        err.op_index = self.operand.unwrap_or(u32::MAX);
        write_text(&mut err.message, &self.message);
    }
}

/// Writes text with a zero behind it, cut between characters if it is too long.
pub(crate) fn write_text<const N: usize>(to: &mut [u8; N], text: &str) {
    to.fill(0);
    let end = text.floor_char_boundary(N - 1);
    for (to, from) in to.iter_mut().zip(text.as_bytes().iter().take(end)) {
        *to = *from;
    }
}

/// Runs the body of an entry: a failure is written to `err`, a panic becomes INTERNAL.
///
/// # Safety
/// `err` is null or a record of the size that it states.
pub(crate) unsafe fn guard(err: *mut qhal_error, body: impl FnOnce() -> Result<(), Failure>) -> qhal_status {
    let result = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| Err(Failure::panic(&*payload)));
    match result {
        Ok(()) => QHAL_OK,
        Err(failure) => {
            // SAFETY: by the caller's promise.
            unsafe { failure.report(err) };
            failure.code
        }
    }
}

/// The caller's record, if it is at least as large as ours.
///
/// # Safety
/// `out` is null or a record of the size that its first field states.
pub(crate) unsafe fn sized<'a, T>(out: *mut T) -> Result<&'a mut T, Failure> {
    // SAFETY: by the caller's promise.
    let size = if out.is_null() { 0 } else { unsafe { out.cast::<u32>().read() } };
    if (size as usize) < size_of::<T>() {
        return Err(Failure::invalid(format!("a record of {size} bytes, expected {} or more", size_of::<T>())));
    }
    // SAFETY: not null and large enough.
    Ok(unsafe { &mut *out })
}

/// The caller's description, if it is at least as large as ours.
///
/// # Safety
/// As [`sized`].
pub(crate) unsafe fn sized_ref<'a, T>(desc: *const T) -> Result<&'a T, Failure> {
    // SAFETY: by the caller's promise.
    let size = if desc.is_null() { 0 } else { unsafe { desc.cast::<u32>().read() } };
    if (size as usize) < size_of::<T>() {
        return Err(Failure::invalid(format!("a description of {size} bytes, expected {} or more", size_of::<T>())));
    }
    // SAFETY: not null and large enough.
    Ok(unsafe { &*desc })
}
