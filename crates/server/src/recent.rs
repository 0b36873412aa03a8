//! What answers experienced lately: percentiles over the last two minutes, for people who look on. Monitors use the histograms
//! of `/metrics`, which forget nothing.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use utoipa::ToSchema;

/// How long a sample counts.
const WINDOW: Duration = Duration::from_secs(120);
/// Most samples that are kept; the oldest go first.
const MOST: usize = 4096;

/// Samples of the last two minutes.
#[derive(Debug, Default)]
pub(crate) struct Recent(Mutex<VecDeque<(Instant, Duration)>>);

/// Seconds by nearest rank; null without samples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, ToSchema)]
pub(crate) struct Percentiles {
    /// Samples of the last two minutes.
    samples: usize,
    /// Half took no longer.
    p50: Option<f64>,
    /// Nine of ten took no longer.
    p90: Option<f64>,
    /// 99 of 100 took no longer.
    p99: Option<f64>,
}

impl Recent {
    pub(crate) fn add(&self, value: Duration) {
        self.add_at(Instant::now(), value);
    }

    fn add_at(&self, now: Instant, value: Duration) {
        let mut samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if samples.len() == MOST {
            samples.pop_front();
        }
        samples.push_back((now, value));
    }

    pub(crate) fn percentiles(&self) -> Percentiles {
        self.percentiles_at(Instant::now())
    }

    fn percentiles_at(&self, now: Instant) -> Percentiles {
        let mut samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while samples.front().is_some_and(|(time, _)| now.saturating_duration_since(*time) > WINDOW) {
            samples.pop_front();
        }
        let mut values: Vec<Duration> = samples.iter().map(|(_, value)| *value).collect();
        drop(samples);
        values.sort_unstable();
        let rank = |percent: usize| {
            let rank = (values.len() * percent).div_ceil(100);
            values.get(rank.checked_sub(1)?).map(Duration::as_secs_f64)
        };
        Percentiles { samples: values.len(), p50: rank(50), p90: rank(90), p99: rank(99) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(p: Percentiles) -> (usize, [Option<f64>; 3]) {
        (p.samples, [p.p50, p.p90, p.p99])
    }

    #[test]
    fn nearest_rank() {
        let recent = Recent::default();
        assert_eq!(all(recent.percentiles()), (0, [None; 3]));
        let now = Instant::now();
        for seconds in (1..=100).rev() {
            recent.add_at(now, Duration::from_secs(seconds));
        }
        assert_eq!(all(recent.percentiles_at(now)), (100, [50.0, 90.0, 99.0].map(Some)));
    }

    #[test]
    fn old_samples_and_too_many_of_them_are_forgotten() {
        let recent = Recent::default();
        let begin = Instant::now();
        recent.add_at(begin, Duration::from_secs(9));
        recent.add_at(begin + WINDOW, Duration::from_secs(1));
        assert_eq!(recent.percentiles_at(begin + WINDOW).samples, 2);
        assert_eq!(all(recent.percentiles_at(begin + WINDOW + Duration::from_secs(1))), (1, [Some(1.0); 3]));
        for _ in 0..2 * MOST {
            recent.add_at(begin + WINDOW, Duration::from_secs(2));
        }
        assert_eq!(recent.percentiles_at(begin + WINDOW).samples, MOST);
    }
}
