//! An analytic cost of kernels: time = call + bytes * per_byte + operations * per_operation, with coefficients that are not negative,
//! fitted to timings. It says which kernel will be near the fastest for sizes that were not timed.

use serde::{Deserialize, Serialize};

/// One timing.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
pub struct Sample {
    /// Bytes of a launch.
    pub bytes: f64,
    /// Operations of a launch.
    pub operations: f64,
    /// Seconds of a launch.
    pub seconds: f64,
}

/// What a kernel costs.
#[derive(Debug, Clone, Copy, PartialEq, Default, Deserialize, Serialize)]
pub struct Coefficients {
    /// Seconds of a launch by itself.
    pub call: f64,
    /// Seconds of a byte.
    pub per_byte: f64,
    /// Seconds of an operation.
    pub per_operation: f64,
    /// Middle of the relative differences between fit and timings.
    pub error: f64,
}

impl Coefficients {
    /// Seconds of a launch.
    #[must_use]
    pub fn seconds(&self, bytes: f64, operations: f64) -> f64 {
        self.call + self.per_byte * bytes + self.per_operation * operations
    }
}

/// Fits relative differences by least squares, over every choice of coefficients that are zero: with three of them that is exact. `None`
/// without samples.
#[must_use]
pub fn fit(samples: &[Sample]) -> Option<Coefficients> {
    let usable: Vec<&Sample> =
        samples.iter().filter(|sample| sample.seconds > 0.0 && sample.seconds.is_finite()).collect();
    if usable.is_empty() {
        return None;
    }
    // Columns are of different size by many orders; scaled they are not.
    let scale = |value: fn(&Sample) -> f64| usable.iter().map(|s| value(s).abs()).fold(0.0, f64::max).max(1e-300);
    let scales = [1.0, scale(|s| s.bytes), scale(|s| s.operations)];
    // A relative difference: every row is divided by its time.
    let rows: Vec<[f64; 3]> = usable
        .iter()
        .map(|s| [1.0, s.bytes / scales[1], s.operations / scales[2]].map(|value| value / s.seconds))
        .collect();
    let best = (1..8_u8).filter_map(|columns| solve(&rows, columns)).min_by(|a, b| a.1.total_cmp(&b.1));
    let (x, _) = best?;
    let mut fitted =
        Coefficients { call: x[0], per_byte: x[1] / scales[1], per_operation: x[2] / scales[2], error: 0.0 };
    let difference = |s: &&Sample| (fitted.seconds(s.bytes, s.operations) / s.seconds - 1.0).abs();
    let mut errors: Vec<f64> = usable.iter().map(difference).collect();
    errors.sort_by(f64::total_cmp);
    fitted.error = errors[errors.len() / 2];
    Some(fitted)
}

/// Least squares of `rows * x = 1` over the columns whose bit is set; `None` if one would be negative or they depend on each other.
fn solve(rows: &[[f64; 3]], columns: u8) -> Option<([f64; 3], f64)> {
    let used: Vec<usize> = (0..3).filter(|column| columns & (1 << column) != 0).collect();
    let n = used.len();
    let mut matrix = [[0.0_f64; 4]; 3];
    for row in rows {
        for (i, &a) in used.iter().enumerate() {
            for (j, &b) in used.iter().enumerate() {
                matrix[i][j] += row[a] * row[b];
            }
            matrix[i][3] += row[a];
        }
    }
    for i in 0..n {
        let pivot = (i..n).max_by(|a, b| matrix[*a][i].abs().total_cmp(&matrix[*b][i].abs()))?;
        matrix.swap(i, pivot);
        if matrix[i][i].abs() < 1e-12 {
            return None;
        }
        for other in 0..n {
            if other != i {
                let factor = matrix[other][i] / matrix[i][i];
                let own = matrix[i];
                matrix[other].iter_mut().zip(own).for_each(|(to, from)| *to -= factor * from);
            }
        }
    }
    let mut x = [0.0; 3];
    for (i, &column) in used.iter().enumerate() {
        x[column] = matrix[i][3] / matrix[i][i];
    }
    if x.iter().any(|value| *value < 0.0 || !value.is_finite()) {
        return None;
    }
    let residual = |row: &[f64; 3]| (row[0] * x[0] + row[1] * x[1] + row[2] * x[2] - 1.0).powi(2);
    Some((x, rows.iter().map(residual).sum()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(bytes: f64, operations: f64, truth: &Coefficients) -> Sample {
        Sample { bytes, operations, seconds: truth.seconds(bytes, operations) }
    }

    #[test]
    fn what_times_were_made_of_is_found() {
        let truth = Coefficients { call: 2e-6, per_byte: 5e-11, per_operation: 1e-12, error: 0.0 };
        let sizes = [(1e3, 1e4), (1e6, 1e6), (1e8, 1e7), (1e6, 1e10), (1e7, 1e9), (5e4, 1e8)];
        let samples: Vec<Sample> =
            sizes.iter().map(|(bytes, operations)| sample(*bytes, *operations, &truth)).collect();
        let found = fit(&samples).unwrap();
        for (found, truth) in [(found.call, 2e-6), (found.per_byte, 5e-11), (found.per_operation, 1e-12)] {
            assert!((found / truth - 1.0).abs() < 1e-6, "{found} for {truth}");
        }
        assert!(found.error < 1e-9);
    }

    #[test]
    fn coefficients_are_never_negative() {
        let truth = Coefficients { call: 0.0, per_byte: 1e-10, per_operation: 0.0, error: 0.0 };
        let mut samples: Vec<Sample> = (1..9).map(|n| sample(f64::from(n) * 1e6, f64::from(n * n), &truth)).collect();
        samples[3].seconds *= 0.9;
        samples[6].seconds *= 1.1;
        let found = fit(&samples).unwrap();
        assert!(found.call >= 0.0 && found.per_byte > 0.0 && found.per_operation >= 0.0);
        assert_eq!(fit(&[]), None);
    }
}
