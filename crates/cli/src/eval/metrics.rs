//! How far one model's predictions are from another's.
//!
//! In: rows of logits of both, the reference first. Out: Kullback-Leibler divergence KL(reference || other) in nats, agreement
//! of the most probable token, largest difference of logits. All sums are in float64; ties go to the lower token.

use serde::Serialize;

/// Collects rows.
#[derive(Debug, Clone, Default)]
pub struct Comparison {
    divergences: Vec<f64>,
    agreements: u64,
    max_abs_difference: f64,
}

/// What a comparison found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Rows.
    pub tokens: u64,
    /// Mean KL divergence in nats.
    pub kl_mean: f64,
    /// Its standard error, 0 for fewer than two rows.
    pub kl_standard_error: f64,
    /// Median.
    pub kl_p50: f64,
    /// 90th percentile.
    pub kl_p90: f64,
    /// 99th percentile.
    pub kl_p99: f64,
    /// Largest.
    pub kl_max: f64,
    /// Share of rows whose most probable token is the same.
    pub top1_agreement: f64,
    /// Its standard error.
    pub top1_standard_error: f64,
    /// Largest difference of two logits.
    pub max_abs_difference: f64,
}

impl Comparison {
    /// Takes one row of each.
    ///
    /// # Errors
    /// The index of a logit that is no number, or infinite in one row only.
    pub fn push(&mut self, reference: &[f32], other: &[f32]) -> Result<(), usize> {
        let usable =
            |a: f32, b: f32| if a.is_finite() || b.is_finite() { a.is_finite() && b.is_finite() } else { a == b };
        if let Some(at) = reference.iter().zip(other).position(|(a, b)| !usable(*a, *b)) {
            return Err(at);
        }
        let (norm_a, norm_b) = (log_sum_exp(reference), log_sum_exp(other));
        let mut divergence = 0.0;
        for (a, b) in reference.iter().zip(other).filter(|(a, _)| a.is_finite()) {
            let (a, b) = (f64::from(*a), f64::from(*b));
            divergence += (a - norm_a).exp() * ((a - norm_a) - (b - norm_b));
            self.max_abs_difference = self.max_abs_difference.max((a - b).abs());
        }
        // Rounding can bring it below zero, which no divergence is.
        self.divergences.push(divergence.max(0.0));
        self.agreements += u64::from(best(reference) == best(other));
        Ok(())
    }

    /// Rows so far.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.divergences.len()
    }

    /// The figures; `None` without a row.
    #[must_use]
    pub fn summary(&self) -> Option<Summary> {
        let n = self.divergences.len();
        if n == 0 {
            return None;
        }
        let count = n as f64;
        let mean = self.divergences.iter().sum::<f64>() / count;
        let squares: f64 = self.divergences.iter().map(|d| (d - mean).powi(2)).sum();
        let standard_error = if n > 1 { (squares / (count - 1.0) / count).sqrt() } else { 0.0 };
        let mut sorted = self.divergences.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let share = self.agreements as f64 / count;
        Some(Summary {
            tokens: n as u64,
            kl_mean: mean,
            kl_standard_error: standard_error,
            kl_p50: percentile(&sorted, 0.50),
            kl_p90: percentile(&sorted, 0.90),
            kl_p99: percentile(&sorted, 0.99),
            kl_max: percentile(&sorted, 1.0),
            top1_agreement: share,
            top1_standard_error: (share * (1.0 - share) / count).sqrt(),
            max_abs_difference: self.max_abs_difference,
        })
    }
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let top = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    top + logits.iter().map(|l| (f64::from(*l) - top).exp()).sum::<f64>().ln()
}

fn best(logits: &[f32]) -> Option<usize> {
    let better = |a: (usize, f32), b: (usize, f32)| if b.1 > a.1 { b } else { a };
    logits.iter().copied().enumerate().reduce(better).map(|(i, _)| i)
}

/// The smallest value that at least this share of the sorted values does not exceed.
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_divergence_computed_by_hand() {
        // p = (1/2, 1/2), q = (1/4, 3/4): KL = ln 2 - (ln 3) / 2.
        let mut comparison = Comparison::default();
        comparison.push(&[0.0, 0.0], &[0.0, 3f32.ln()]).unwrap();
        let summary = comparison.summary().unwrap();
        assert!((summary.kl_mean - (2f64.ln() - 3f64.ln() / 2.0)).abs() < 1e-7);
        assert_eq!(summary.top1_agreement, 0.0);
        assert!((summary.max_abs_difference - 3f64.ln()).abs() < 1e-6);
    }

    #[test]
    fn percentiles_are_values_of_the_sample() {
        let sorted: Vec<f64> = (1..=10).map(f64::from).collect();
        assert_eq!(percentile(&sorted, 0.5), 5.0);
        assert_eq!(percentile(&sorted, 0.9), 9.0);
        assert_eq!(percentile(&sorted, 0.99), 10.0);
        assert_eq!(percentile(&sorted, 0.0), 1.0);
    }

    #[test]
    fn what_is_no_number_is_refused() {
        let mut comparison = Comparison::default();
        assert_eq!(comparison.push(&[0.0, f32::NAN], &[0.0, 1.0]), Err(1));
        assert_eq!(comparison.push(&[0.0, f32::NAN], &[0.0, f32::NAN]), Err(1));
        assert_eq!(comparison.push(&[0.0, f32::NEG_INFINITY], &[0.0, 1.0]), Err(1));
        comparison.push(&[0.0, f32::NEG_INFINITY], &[0.0, f32::NEG_INFINITY]).unwrap();
        assert_eq!(comparison.tokens(), 1);
        assert!(Comparison::default().summary().is_none());
    }

    proptest! {
        /// Adding a constant to all logits changes nothing; other rows diverge.
        #[test]
        fn only_the_distribution_counts(
            row in proptest::collection::vec(-20.0f32..20.0, 2..40),
            shift in -5.0f32..5.0,
        ) {
            let moved: Vec<f32> = row.iter().map(|l| l + shift).collect();
            let mut comparison = Comparison::default();
            comparison.push(&row, &moved).unwrap();
            let mut other = row.clone();
            other[0] += 1.0;
            let mut different = Comparison::default();
            different.push(&row, &other).unwrap();
            prop_assert!(comparison.summary().unwrap().kl_mean < 1e-5);
            prop_assert!(different.summary().unwrap().kl_mean >= 0.0);
            prop_assert!((different.summary().unwrap().max_abs_difference - 1.0).abs() < 1e-5);
        }
    }
}
