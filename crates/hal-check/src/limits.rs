//! How far a result may be from the float64 oracle: the one table.
//!
//! `nmse` is the sum of squared differences over the sum of squares, `max_abs` the largest difference over the largest
//! magnitude. Limits are for the arithmetic that the description asks for; a device that computes in less says so by
//! refusing that form.

use qwen_hal::abi::ops::*;

/// Limits of one op.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Limit {
    pub(crate) nmse: f64,
    pub(crate) max_abs: f64,
}

/// Data movement: the bits themselves.
pub(crate) const EXACT: Limit = Limit { nmse: 0.0, max_abs: 0.0 };
/// float32 products and sums in any order: the customary limit for ops that accumulate in f32.
pub(crate) const FLOAT: Limit = Limit { nmse: 1e-9, max_abs: 1e-4 };
/// Elementwise functions by approximation, a few units in the last place of f32.
pub(crate) const ELEMENTWISE: Limit = Limit { nmse: 1e-11, max_abs: 1e-5 };
/// Angles are rounded to f32 before sine and cosine: at position 1000 that is 6e-5 of a radian.
pub(crate) const ROPE: Limit = Limit { nmse: 1e-8, max_abs: 2e-4 };
/// Scores, softmax and sums over the cache.
pub(crate) const ATTENTION: Limit = Limit { nmse: 1e-8, max_abs: 2e-4 };
/// The same with queries and weights rounded to bfloat16: scores are off by some thousandths of their size, and weights with them.
pub(crate) const ATTENTION_BF16: Limit = Limit { nmse: 1e-4, max_abs: 2e-2 };
/// Conversion to f16: half a unit of 11 bits. The oracle rounds, so only double rounding may differ.
pub(crate) const CAST: Limit = EXACT;

/// Products by the form that they are asked for in.
pub(crate) const fn product(compute: u32) -> Limit {
    match compute {
        // 127 levels: 1/127/sqrt(12) of the largest activation of 32.
        QHAL_COMPUTE_I8_G32 | QHAL_COMPUTE_I8_G16 | QHAL_COMPUTE_I8S_G32 => Limit { nmse: 2e-4, max_abs: 5e-2 },
        // About 15 bits.
        QHAL_COMPUTE_I8X2_G32 => Limit { nmse: 1e-8, max_abs: 5e-4 },
        // 8 bits of mantissa on activations, and on weights where the unit wants that.
        QHAL_COMPUTE_BF16 => Limit { nmse: 2e-5, max_abs: 1e-2 },
        _ => FLOAT,
    }
}
