//! Why a kernel refused its operands. Sizes that a plan fixes are checked as well as contents that come with the data.

use qwen_formats::DType;
use thiserror::Error;

/// A refused launch. Nothing was read or written out of bounds; the output's content is unspecified.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum KernelError {
    /// An operand's size doesn't fit the others.
    #[error("{op}: {what} is {found}, expected {expected}; plan the operands with the op's shape rules")]
    Shape {
        /// Op.
        op: &'static str,
        /// Which size.
        what: &'static str,
        /// What the other operands ask for.
        expected: usize,
        /// What was given.
        found: usize,
    },
    /// A number in a buffer points outside what it indexes.
    #[error("{op}: {what}[{index}] is {found}, expected a value in {low}..{high}; check the step's index tensors")]
    Index {
        /// Op.
        op: &'static str,
        /// Which buffer.
        what: &'static str,
        /// Place in it.
        index: usize,
        /// The number.
        found: i64,
        /// Lowest allowed.
        low: i64,
        /// One past the highest allowed.
        high: i64,
    },
    /// The scratch memory is too small.
    #[error("{op}: workspace has {found} bytes, expected at least {expected}; ask the op for its workspace size")]
    Workspace {
        /// Op.
        op: &'static str,
        /// Bytes needed.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// A storage type that the kernel doesn't read or write.
    #[error("{op}: {what} has dtype {found}, which this kernel does not handle; convert it first")]
    Type {
        /// Op.
        op: &'static str,
        /// Which operand.
        what: &'static str,
        /// Its type.
        found: DType,
    },
}

/// `found == expected`, or a [`KernelError::Shape`].
pub(crate) fn same(op: &'static str, what: &'static str, found: usize, expected: usize) -> Result<(), KernelError> {
    if found == expected { Ok(()) } else { Err(KernelError::Shape { op, what, expected, found }) }
}
