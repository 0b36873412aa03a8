//! What the OpenCL runtime reports, as the plugin reports it.

use opencl3::error_codes::ClError;
use opencl3::error_codes::{
    CL_DEVICE_NOT_AVAILABLE, CL_INVALID_BUFFER_SIZE, CL_MEM_OBJECT_ALLOCATION_FAILURE, CL_OUT_OF_HOST_MEMORY,
    CL_OUT_OF_RESOURCES,
};
use qwen_hal_abi::{
    QHAL_ERROR_DEVICE_LOST, QHAL_ERROR_OUT_OF_MEMORY, QHAL_INTERNAL, QHAL_RESOURCE_EXHAUSTED, QHAL_UNAVAILABLE,
};
pub(crate) use qwen_hal_plugin::{Failure, guard, sized, sized_ref, write_text};

/// An error of the OpenCL runtime in a call.
pub(crate) fn reported(call: &str, error: impl Into<ClError>) -> Failure {
    let error = error.into();
    let (code, flags) = match error.0 {
        CL_MEM_OBJECT_ALLOCATION_FAILURE | CL_OUT_OF_RESOURCES | CL_OUT_OF_HOST_MEMORY | CL_INVALID_BUFFER_SIZE => {
            (QHAL_RESOURCE_EXHAUSTED, QHAL_ERROR_OUT_OF_MEMORY)
        }
        CL_DEVICE_NOT_AVAILABLE => (QHAL_UNAVAILABLE, QHAL_ERROR_DEVICE_LOST),
        _ => (QHAL_INTERNAL, 0),
    };
    let message = format!("{call}: the OpenCL runtime reports {error} ({})", error.0);
    Failure { flags, vendor_code: i64::from(error.0), ..Failure::new(code, message) }
}
