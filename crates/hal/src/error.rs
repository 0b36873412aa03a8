//! What can go wrong, split by moment: opening and memory ([`HalError`]), planning ([`PlanError`]), launching
//! ([`LaunchError`]). Each names the plugin, and the op where there is one, and says what was expected and what was found.

use std::fmt;
use std::sync::Arc;

use qwen_hal_abi::{
    QHAL_ABORTED, QHAL_ALREADY_EXISTS, QHAL_CANCELLED, QHAL_DATA_LOSS, QHAL_DEADLINE_EXCEEDED, QHAL_DEVICE_LOST,
    QHAL_ERROR_DEVICE_LOST, QHAL_ERROR_OUT_OF_MEMORY, QHAL_ERROR_RETRYABLE, QHAL_ERROR_STICKY,
    QHAL_FAILED_PRECONDITION, QHAL_INTERNAL, QHAL_INVALID_ARGUMENT, QHAL_NOT_FOUND, QHAL_NOT_READY, QHAL_OK,
    QHAL_OUT_OF_RANGE, QHAL_PERMISSION_DENIED, QHAL_RESOURCE_EXHAUSTED, QHAL_UNAVAILABLE, QHAL_UNIMPLEMENTED,
    qhal_error, qhal_status,
};

use crate::text::fixed_text;

/// A status other than OK, as a plugin returned it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallError {
    /// Name of the plugin.
    pub plugin: Arc<str>,
    /// Function of the table, `plan_launch` for instance.
    pub call: &'static str,
    /// Op that it was about, empty if none.
    pub op: &'static str,
    /// Status code.
    pub code: qhal_status,
    /// `QHAL_ERROR_*` bits.
    pub flags: u32,
    /// Operand that it is about.
    pub operand: Option<u32>,
    /// Code of the vendor's runtime, 0 if none.
    pub vendor_code: i64,
    /// The plugin's words.
    pub message: String,
}

impl CallError {
    pub(crate) fn new(
        plugin: &Arc<str>,
        call: &'static str,
        op: &'static str,
        code: qhal_status,
        e: &qhal_error,
    ) -> Self {
        Self {
            plugin: Arc::clone(plugin),
            call,
            op,
            code,
            flags: e.flags,
            operand: (e.op_index != u32::MAX).then_some(e.op_index),
            vendor_code: e.vendor_code,
            message: fixed_text(&e.message),
        }
    }

    /// The plugin has no such function, op, type or shape.
    #[must_use]
    pub const fn is_unsupported(&self) -> bool {
        self.code == QHAL_UNIMPLEMENTED
    }
    /// Memory or another bounded resource is used up.
    #[must_use]
    pub const fn is_out_of_memory(&self) -> bool {
        self.code == QHAL_RESOURCE_EXHAUSTED || self.flags & QHAL_ERROR_OUT_OF_MEMORY != 0
    }
    /// The device must be opened anew.
    #[must_use]
    pub const fn is_device_lost(&self) -> bool {
        self.code == QHAL_DEVICE_LOST || self.flags & QHAL_ERROR_DEVICE_LOST != 0
    }
    /// The same call may succeed later.
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        self.code == QHAL_UNAVAILABLE || self.code == QHAL_ABORTED || self.flags & QHAL_ERROR_RETRYABLE != 0
    }
    /// Later work on the same stream fails as well.
    #[must_use]
    pub const fn is_sticky(&self) -> bool {
        self.flags & QHAL_ERROR_STICKY != 0
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "plugin {}: {}", self.plugin, self.call)?;
        if !self.op.is_empty() {
            write!(f, " ({})", self.op)?;
        }
        if let Some(operand) = self.operand {
            write!(f, ", operand {operand}")?;
        }
        let message = if self.message.is_empty() { "no details given" } else { self.message.as_str() };
        write!(f, ": {message} [{}", status_name(self.code))?;
        if self.vendor_code != 0 {
            write!(f, ", vendor code {}", self.vendor_code)?;
        }
        f.write_str("]")
    }
}

impl std::error::Error for CallError {}

/// Name of a status code as the header spells it.
#[must_use]
pub const fn status_name(code: qhal_status) -> &'static str {
    match code {
        QHAL_OK => "OK",
        QHAL_CANCELLED => "CANCELLED",
        QHAL_INVALID_ARGUMENT => "INVALID_ARGUMENT",
        QHAL_DEADLINE_EXCEEDED => "DEADLINE_EXCEEDED",
        QHAL_NOT_FOUND => "NOT_FOUND",
        QHAL_ALREADY_EXISTS => "ALREADY_EXISTS",
        QHAL_PERMISSION_DENIED => "PERMISSION_DENIED",
        QHAL_RESOURCE_EXHAUSTED => "RESOURCE_EXHAUSTED",
        QHAL_FAILED_PRECONDITION => "FAILED_PRECONDITION",
        QHAL_ABORTED => "ABORTED",
        QHAL_OUT_OF_RANGE => "OUT_OF_RANGE",
        QHAL_UNIMPLEMENTED => "UNIMPLEMENTED",
        QHAL_INTERNAL => "INTERNAL",
        QHAL_UNAVAILABLE => "UNAVAILABLE",
        QHAL_DATA_LOSS => "DATA_LOSS",
        QHAL_DEVICE_LOST => "DEVICE_LOST",
        QHAL_NOT_READY => "NOT_READY",
        _ => "UNKNOWN",
    }
}

/// Plugins, devices, memory, streams.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HalError {
    /// The host does not accept the plugin.
    #[error(
        "plugin {plugin} refused: expected {expected}, found {found}; use a build of the plugin made for this version"
    )]
    Refused {
        /// Name of the plugin, `?` if it could not be read.
        plugin: Arc<str>,
        /// What the host accepts.
        expected: String,
        /// What the plugin says.
        found: String,
    },
    /// The plugin broke the contract.
    #[error(
        "plugin {plugin}: {call} broke the contract: expected {expected}, found {found}; report it to the plugin's maker"
    )]
    Contract {
        /// Name of the plugin.
        plugin: Arc<str>,
        /// Function of the table.
        call: &'static str,
        /// What the contract says.
        expected: String,
        /// What the plugin did.
        found: String,
    },
    /// The caller's argument is wrong.
    #[error("{call} on plugin {plugin}: expected {expected}, found {found}")]
    Argument {
        /// Name of the plugin.
        plugin: Arc<str>,
        /// Function that was asked for.
        call: &'static str,
        /// What is accepted.
        expected: String,
        /// What was given.
        found: String,
    },
    /// The plugin reports a failure.
    #[error(transparent)]
    Call(#[from] CallError),
}

impl HalError {
    /// The plugin's own report, if it made one.
    #[must_use]
    pub const fn call_error(&self) -> Option<&CallError> {
        if let Self::Call(e) = self { Some(e) } else { None }
    }
    /// Memory or another bounded resource is used up.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.call_error().is_some_and(CallError::is_out_of_memory)
    }
}

/// Planning an op.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The description contradicts itself; no device was asked.
    #[error("{op} for plugin {plugin}: {what}: expected {expected}, found {found}")]
    Invalid {
        /// Name of the plugin.
        plugin: Arc<str>,
        /// Op.
        op: &'static str,
        /// Part of the description, `input 2` for instance.
        what: String,
        /// What is accepted.
        expected: String,
        /// What was given.
        found: String,
    },
    /// The device does not have this op in this form: choose another form or another device.
    #[error("unsupported: {0}")]
    Unsupported(CallError),
    /// The device has it, but not now.
    #[error(transparent)]
    Failed(CallError),
    /// The plugin broke the contract.
    #[error(transparent)]
    Hal(HalError),
}

impl From<CallError> for PlanError {
    fn from(e: CallError) -> Self {
        if e.is_unsupported() { Self::Unsupported(e) } else { Self::Failed(e) }
    }
}

impl From<HalError> for PlanError {
    fn from(e: HalError) -> Self {
        match e {
            HalError::Call(e) => e.into(),
            other => Self::Hal(other),
        }
    }
}

/// Launching a plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// An operand or value does not fit the plan; nothing was enqueued.
    #[error("{op} on plugin {plugin}: {what}: expected {expected}, found {found}")]
    Argument {
        /// Name of the plugin.
        plugin: Arc<str>,
        /// Op.
        op: &'static str,
        /// Operand or value, `input 2` for instance.
        what: String,
        /// What the plan accepts.
        expected: String,
        /// What was given.
        found: String,
    },
    /// The plugin reports a failure.
    #[error(transparent)]
    Failed(#[from] CallError),
}

impl LaunchError {
    /// The plugin's own report, if it made one.
    #[must_use]
    pub const fn call_error(&self) -> Option<&CallError> {
        if let Self::Failed(e) = self { Some(e) } else { None }
    }
}
