//! What an entry of the table reports when it does not succeed.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use qwen_hal_abi::*;

/// A status other than OK, with its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) code: qhal_status,
    pub(crate) flags: u32,
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn new(code: qhal_status, message: impl Into<String>) -> Self {
        Self { code, flags: 0, message: message.into() }
    }
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(QHAL_INVALID_ARGUMENT, message)
    }
    pub(crate) fn unsupported(message: impl Into<String>) -> Self {
        Self::new(QHAL_UNIMPLEMENTED, message)
    }
    pub(crate) fn out_of_range(message: impl Into<String>) -> Self {
        Self::new(QHAL_OUT_OF_RANGE, message)
    }
    pub(crate) fn out_of_memory(message: impl Into<String>) -> Self {
        Self { flags: QHAL_ERROR_OUT_OF_MEMORY, ..Self::new(QHAL_RESOURCE_EXHAUSTED, message) }
    }
    pub(crate) fn lost() -> Self {
        let message = "the simulated device is lost (injected fault): close it and open it anew";
        Self { flags: QHAL_ERROR_DEVICE_LOST, ..Self::new(QHAL_DEVICE_LOST, message) }
    }
    /// The same, as later work of the stream reports it.
    pub(crate) fn sticky(mut self) -> Self {
        self.flags |= QHAL_ERROR_STICKY;
        self
    }

    /// What another plugin's function answered.
    pub(crate) fn of(code: qhal_status, err: &qhal_error) -> Self {
        let end = err.message.iter().position(|byte| *byte == 0).unwrap_or(err.message.len());
        let message = String::from_utf8_lossy(&err.message[..end]).into_owned();
        Self { code, flags: err.flags, message }
    }

    fn panic(payload: &(dyn Any + Send)) -> Self {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
        Self::new(QHAL_INTERNAL, format!("panic in the simulator: {text}"))
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
        (err.code, err.flags, err.op_index, err.vendor_code) = (self.code, self.flags, u32::MAX, 0);
        write_text(&mut err.message, &self.message);
    }
}

/// Zero-terminated text, cut at a character if it is too long.
pub(crate) fn write_text<const N: usize>(to: &mut [u8; N], text: &str) {
    to.fill(0);
    let mut end = text.len().min(N - 1);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    to.iter_mut().zip(text.as_bytes().iter().take(end)).for_each(|(to, from)| *to = *from);
}

/// Runs what may panic.
pub(crate) fn caught<T>(body: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| Err(Failure::panic(&*payload)))
}

/// Runs the body of an entry: a failure is written to `err`, a panic becomes INTERNAL.
///
/// # Safety
/// `err` is null or a record of the size that it states.
pub(crate) unsafe fn guard(err: *mut qhal_error, body: impl FnOnce() -> Result<(), Failure>) -> qhal_status {
    match caught(body) {
        Ok(()) => QHAL_OK,
        Err(failure) => {
            // SAFETY: by the caller's promise.
            unsafe { failure.report(err) };
            failure.code
        }
    }
}
