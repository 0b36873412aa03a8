//! What a machine can do at most, and how long it would take for a cost.

use qwen_runtime::Cost;
use serde::Serialize;

/// Rates that were measured, all threads together; `None` where the machine has no such instructions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Limits {
    /// Bytes read from memory per second.
    pub read_bytes_per_second: f64,
    /// Operations on int8 per second by vector instructions, a multiplication and an addition counting as two.
    pub int8_operations_per_second: Option<f64>,
    /// The same by matrix instructions.
    pub int8_matrix_operations_per_second: Option<f64>,
    /// Operations on bfloat16.
    pub bf16_operations_per_second: Option<f64>,
    /// Operations on float32.
    pub f32_operations_per_second: Option<f64>,
}

impl Limits {
    /// The middle of several measurements, each rate by itself; the mean of the two in the middle if they are even in number.
    #[must_use]
    pub fn median(measured: &[Self]) -> Option<Self> {
        let middle = |rate: &dyn Fn(&Self) -> Option<f64>| {
            crate::Spread::of(measured.iter().filter_map(rate).collect()).map(|spread| spread.median)
        };
        Some(Self {
            read_bytes_per_second: middle(&|limits| Some(limits.read_bytes_per_second))?,
            int8_operations_per_second: middle(&|limits| limits.int8_operations_per_second),
            int8_matrix_operations_per_second: middle(&|limits| limits.int8_matrix_operations_per_second),
            bf16_operations_per_second: middle(&|limits| limits.bf16_operations_per_second),
            f32_operations_per_second: middle(&|limits| limits.f32_operations_per_second),
        })
    }

    /// Seconds for reading what has to be read.
    #[must_use]
    pub fn read_seconds(&self, cost: &Cost) -> f64 {
        (cost.weight_bytes + cost.cache_bytes) as f64 / self.read_bytes_per_second
    }

    /// Seconds for multiplying what has to be multiplied. A type without a rate is computed in float32.
    #[must_use]
    pub fn multiply_seconds(&self, cost: &Cost) -> f64 {
        let seconds = |operations: u64, rate: Option<f64>| {
            let rate = rate.or(self.f32_operations_per_second).filter(|rate| *rate > 0.0);
            rate.map_or(0.0, |rate| operations as f64 / rate)
        };
        let int8 = match (self.int8_operations_per_second, self.int8_matrix_operations_per_second) {
            (Some(vector), Some(matrix)) => Some(vector.max(matrix)),
            (vector, matrix) => vector.or(matrix),
        };
        seconds(cost.int8_operations, int8)
            + seconds(cost.bf16_operations, self.bf16_operations_per_second)
            + seconds(cost.f32_operations, self.f32_operations_per_second)
    }

    /// Seconds that an instruction takes at least: reading and multiplying overlap.
    #[must_use]
    pub fn seconds(&self, cost: &Cost) -> f64 {
        self.read_seconds(cost).max(self.multiply_seconds(cost))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(read: f64) -> Limits {
        Limits {
            read_bytes_per_second: read,
            int8_operations_per_second: Some(100.0),
            int8_matrix_operations_per_second: None,
            bf16_operations_per_second: None,
            f32_operations_per_second: Some(10.0),
        }
    }

    #[test]
    fn the_slower_of_reading_and_multiplying() {
        let cost = Cost { weight_bytes: 30, cache_bytes: 10, int8_operations: 100, ..Cost::default() };
        assert_eq!(limits(20.0).seconds(&cost), 2.0);
        assert_eq!(limits(80.0).seconds(&cost), 1.0);
        let matrix = Limits { int8_matrix_operations_per_second: Some(200.0), ..limits(80.0) };
        assert_eq!(matrix.seconds(&cost), 0.5);
        let bf16 = Cost { bf16_operations: 5, f32_operations: 5, ..Cost::default() };
        assert_eq!(limits(20.0).seconds(&bf16), 1.0);
    }

    #[test]
    fn medians_rate_by_rate() {
        let median = Limits::median(&[limits(1.0), limits(5.0), limits(2.0)]).unwrap();
        assert_eq!(median.read_bytes_per_second, 2.0);
        assert_eq!(median.bf16_operations_per_second, None);
        assert_eq!(Limits::median(&[]), None);
    }
}
