//! What an entry of the table reports when it does not succeed.

use std::any::Any;
use std::borrow::Cow;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

use qwen_hal_abi::*;

use crate::record::write_text;

/// A status other than OK, with its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The status.
    pub code: qhal_status,
    /// `QHAL_ERROR_*` bits.
    pub flags: u32,
    /// Operand that it is about.
    pub operand: Option<u32>,
    /// The code of the vendor's runtime, 0 if it has none.
    pub vendor_code: i64,
    /// What was expected, what was found, what to do.
    pub message: Cow<'static, str>,
}

impl Failure {
    /// With a status.
    pub fn new(code: qhal_status, message: impl Into<Cow<'static, str>>) -> Self {
        Self { code, flags: 0, operand: None, vendor_code: 0, message: message.into() }
    }
    /// An argument that cannot be.
    pub fn invalid(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(QHAL_INVALID_ARGUMENT, message)
    }
    /// What the plugin does not have.
    pub fn unsupported(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(QHAL_UNIMPLEMENTED, message)
    }
    /// A range beyond a buffer, an index beyond a count.
    pub fn out_of_range(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(QHAL_OUT_OF_RANGE, message)
    }
    /// Memory that is not there.
    pub fn out_of_memory(message: impl Into<Cow<'static, str>>) -> Self {
        Self { flags: QHAL_ERROR_OUT_OF_MEMORY, ..Self::new(QHAL_RESOURCE_EXHAUSTED, message) }
    }
    /// A defect of the plugin or of what it calls.
    pub fn internal(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(QHAL_INTERNAL, message)
    }
    /// A device that answers no more.
    pub fn lost(message: impl Into<Cow<'static, str>>) -> Self {
        Self { flags: QHAL_ERROR_DEVICE_LOST, ..Self::new(QHAL_DEVICE_LOST, message) }
    }
    /// What another table's function answered.
    #[must_use]
    pub fn of(code: qhal_status, err: &qhal_error) -> Self {
        let end = err.message.iter().position(|byte| *byte == 0).unwrap_or(err.message.len());
        let message = String::from_utf8_lossy(&err.message[..end]).into_owned();
        Self { flags: err.flags, ..Self::new(code, message) }
    }
    fn panic(payload: &(dyn Any + Send)) -> Self {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
        Self::internal(format!("panic in the plugin: {text}"))
    }

    /// About an operand.
    #[must_use]
    pub fn at(mut self, operand: usize) -> Self {
        self.operand = u32::try_from(operand).ok();
        self
    }
    /// The same about a named thing.
    #[must_use]
    pub fn about(mut self, what: impl Display) -> Self {
        self.message = format!("{what}: {}", self.message).into();
        self
    }
    /// The same, as later work of the stream reports it.
    #[must_use]
    pub fn sticky(mut self) -> Self {
        self.flags |= QHAL_ERROR_STICKY;
        self
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
        (err.code, err.flags, err.vendor_code) = (self.code, self.flags, self.vendor_code);
        err.op_index = self.operand.unwrap_or(u32::MAX);
        write_text(&mut err.message, &self.message);
    }
}

/// Runs what may panic; that is [`QHAL_INTERNAL`].
///
/// # Errors
/// What the body returns, or its panic.
pub fn caught<T>(body: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| Err(Failure::panic(&*payload)))
}

/// Runs the body of an entry: a failure, or a panic, is written to `err`.
///
/// # Safety
/// `err` is null or a record of the size that it states.
pub unsafe fn guard(err: *mut qhal_error, body: impl FnOnce() -> Result<(), Failure>) -> qhal_status {
    match caught(body) {
        Ok(()) => QHAL_OK,
        Err(failure) => {
            // SAFETY: by the caller's promise.
            unsafe { failure.report(err) };
            failure.code
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(body: impl FnOnce() -> Result<(), Failure>) -> (qhal_status, qhal_error, String) {
        let mut err = qhal_error::default();
        // SAFETY: a record of its own size.
        let status = unsafe { guard(&raw mut err, body) };
        let message = Failure::of(status, &err).message.into_owned();
        (status, err, message)
    }

    #[test]
    fn a_panic_is_a_status_with_its_text() {
        let (status, err, message) = told(|| panic!("index {} of {}", 3, 2));
        assert_eq!((status, err.code), (QHAL_INTERNAL, QHAL_INTERNAL));
        assert_eq!(message, "panic in the plugin: index 3 of 2");
        let (_, _, message) = told(|| std::panic::panic_any(7_u8));
        assert_eq!(message, "panic in the plugin: no message");
    }

    #[test]
    fn a_failure_is_written_whole_and_cut_between_characters() {
        let (status, err, message) = told(|| Err(Failure::out_of_memory("ü".repeat(1000)).at(2).sticky()));
        assert_eq!((status, err.op_index), (QHAL_RESOURCE_EXHAUSTED, 2));
        assert_eq!(err.flags, QHAL_ERROR_OUT_OF_MEMORY | QHAL_ERROR_STICKY);
        assert!(message.len() < err.message.len() && message.chars().all(|c| c == 'ü'), "{message}");
        assert_eq!(err.message.last(), Some(&0));
    }

    #[test]
    fn records_that_are_none_are_left_alone() {
        let mut small = qhal_error { struct_size: 4, code: 77, ..qhal_error::default() };
        // SAFETY: null, and a record that says that it is smaller than it is.
        let statuses =
            unsafe { [std::ptr::null_mut(), &raw mut small].map(|err| guard(err, || Err(Failure::invalid("no")))) };
        assert_eq!((statuses, small.code), ([QHAL_INVALID_ARGUMENT; 2], 77));
    }
}
