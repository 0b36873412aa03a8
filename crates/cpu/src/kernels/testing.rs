//! What the kernels' tests share: random operands, several threads, comparison with f64 oracles.

use crate::parallel::Parallel;

/// Runs tasks on `n` threads that take them in turn.
pub(crate) struct Threads(pub(crate) usize);

impl Parallel for Threads {
    fn threads(&self) -> usize {
        self.0
    }
    fn run(&self, tasks: usize, body: &(dyn Fn(usize) + Sync)) {
        let next = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..self.0.min(tasks) {
                scope.spawn(|| {
                    loop {
                        let task = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        if task >= tasks {
                            return;
                        }
                        body(task);
                    }
                });
            }
        });
    }
}

/// A small generator (xorshift64*), so that a failure repeats.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    /// A number in `low..high`.
    pub(crate) fn range(&mut self, low: usize, high: usize) -> usize {
        low + (self.next() >> 33) as usize % (high - low)
    }
    /// A number in -1..1.
    pub(crate) fn value(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
    pub(crate) fn values(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.value() * scale).collect()
    }
    /// Shuffles in place.
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.range(0, i + 1));
        }
    }
}

/// Bits of values, NaNs alike.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() }).collect()
}

/// Fails unless `found` is within `tolerance` of `expected`, relative to the larger of 1 and the value.
#[track_caller]
pub(crate) fn close(found: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let found = f64::from(found);
        let ok =
            (found - expected).abs() <= tolerance * expected.abs().max(1.0) || (found.is_nan() && expected.is_nan());
        assert!(ok, "value {i}: {found}, expected {expected}");
    }
}
