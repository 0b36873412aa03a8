//! What an entry of the table reports when it does not succeed.

use std::any::Any;
use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};

use qwen_hal_abi::{
    QHAL_ERROR_OUT_OF_MEMORY, QHAL_ERROR_STICKY, QHAL_INTERNAL, QHAL_INVALID_ARGUMENT, QHAL_OK, QHAL_OUT_OF_RANGE,
    QHAL_RESOURCE_EXHAUSTED, QHAL_UNIMPLEMENTED, qhal_error, qhal_status,
};

/// A status other than OK, with its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) code: qhal_status,
    pub(crate) flags: u32,
    pub(crate) operand: Option<u32>,
    pub(crate) message: Cow<'static, str>,
}

impl Failure {
    pub(crate) fn new(code: qhal_status, message: impl Into<Cow<'static, str>>) -> Self {
        Self { code, flags: 0, operand: None, message: message.into() }
    }
    pub(crate) fn invalid(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(QHAL_INVALID_ARGUMENT, message)
    }
    pub(crate) fn unsupported(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(QHAL_UNIMPLEMENTED, message)
    }
    pub(crate) fn out_of_range(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(QHAL_OUT_OF_RANGE, message)
    }
    pub(crate) fn out_of_memory(message: impl Into<Cow<'static, str>>) -> Self {
        Self { flags: QHAL_ERROR_OUT_OF_MEMORY, ..Self::new(QHAL_RESOURCE_EXHAUSTED, message) }
    }
    pub(crate) fn at(mut self, operand: usize) -> Self {
        self.operand = u32::try_from(operand).ok();
        self
    }
    /// The same, as later work of the stream reports it.
    pub(crate) fn sticky(mut self) -> Self {
        self.flags |= QHAL_ERROR_STICKY;
        self
    }
    pub(crate) fn panic(payload: &(dyn Any + Send)) -> Self {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
        Self::new(QHAL_INTERNAL, format!("panic in the CPU backend: {text}"))
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
        err.code = self.code;
        err.flags = self.flags;
        err.op_index = self.operand.unwrap_or(u32::MAX);
        err.vendor_code = 0;
        err.message.fill(0);
        let mut end = self.message.len().min(err.message.len() - 1);
        while !self.message.is_char_boundary(end) {
            end -= 1;
        }
        for (to, from) in err.message.iter_mut().zip(self.message.as_bytes().iter().take(end)) {
            *to = *from;
        }
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
