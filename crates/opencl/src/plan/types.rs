//! Types of values, and how kernels take them.

use qwen_hal_abi::ops::*;

/// A type that weights and tables may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WeightType {
    /// `QHAL_DTYPE_*`, or the code of GGUF.
    pub(crate) dtype: u32,
    /// As in `kernels/weights.cl`.
    pub(crate) name: &'static str,
    /// Bytes of the pieces that a block is taken apart into when it is packed.
    pub(crate) unit_bytes: usize,
}

const fn weight(dtype: u32, name: &'static str, unit_bytes: usize) -> WeightType {
    WeightType { dtype, name, unit_bytes }
}

/// Every type that `kernels/weights.cl` decodes.
pub(crate) const WEIGHTS: [WeightType; 17] = [
    weight(QHAL_DTYPE_F32, "F32", 4),
    weight(QHAL_DTYPE_F16, "F16", 2),
    weight(QHAL_DTYPE_BF16, "BF16", 2),
    weight(QHAL_DTYPE_F8_E4M3, "F8_E4M3", 1),
    weight(QHAL_DTYPE_F8_E5M2, "F8_E5M2", 1),
    weight(2, "Q4_0", 2),
    weight(3, "Q4_1", 2),
    weight(6, "Q5_0", 2),
    weight(7, "Q5_1", 2),
    weight(8, "Q8_0", 2),
    weight(10, "Q2_K", 2),
    weight(11, "Q3_K", 2),
    weight(12, "Q4_K", 2),
    weight(13, "Q5_K", 2),
    weight(14, "Q6_K", 2),
    weight(20, "IQ4_NL", 2),
    weight(23, "IQ4_XS", 2),
];

/// Types that kernels read value by value.
pub(super) const FLOATS: [u32; 3] = [QHAL_DTYPE_F32, QHAL_DTYPE_F16, QHAL_DTYPE_BF16];
/// And those that a cast reads.
pub(super) const ALL_FLOATS: [u32; 5] =
    [QHAL_DTYPE_F32, QHAL_DTYPE_F16, QHAL_DTYPE_BF16, QHAL_DTYPE_F8_E4M3, QHAL_DTYPE_F8_E5M2];

/// Values and bytes of a block; of unknown codes none are ever accepted.
pub(super) fn block(dtype: u32) -> (usize, usize) {
    dtype_block(dtype).map_or((1, 1), |(len, bytes)| (len as usize, bytes as usize))
}

/// How kernels take a weight of this type.
pub(super) fn weight_type(dtype: u32) -> Option<&'static WeightType> {
    WEIGHTS.iter().find(|weight| weight.dtype == dtype)
}

/// Name of a type for people.
pub(super) fn name(dtype: u32) -> String {
    match (dtype, weight_type(dtype)) {
        (_, Some(weight)) => weight.name.to_lowercase(),
        (QHAL_DTYPE_I8, _) => "i8".into(),
        (QHAL_DTYPE_I32, _) => "i32".into(),
        (QHAL_DTYPE_I64, _) => "i64".into(),
        (QHAL_DTYPE_U8, _) => "u8".into(),
        (QHAL_DTYPE_NONE, _) => "none".into(),
        (code, _) => format!("code {code}"),
    }
}
