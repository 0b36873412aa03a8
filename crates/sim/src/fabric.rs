//! How long an exchange between chips would take: rings and trees over the slowest of the links between neighbours, from bandwidth and
//! latency alone. A step takes the latency plus its bytes by the bandwidth; links are full duplex; a rank sends on one link at a time.

use qwen_hal_abi::*;

/// The slowest link of a communicator.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Wire {
    /// Bytes per second.
    pub(crate) bandwidth: f64,
    pub(crate) latency_ns: f64,
}

impl Wire {
    fn step(self, bytes: f64) -> f64 {
        self.latency_ns + bytes / self.bandwidth.max(1.0) * 1e9
    }

    /// Nanoseconds of a collective between so many ranks, whose parts have so many bytes.
    pub(crate) fn nanoseconds(self, kind: u32, ranks: usize, bytes: f64) -> f64 {
        let (n, steps) = (ranks as f64, ranks as f64 - 1.0);
        let levels = f64::from(ranks.next_power_of_two().trailing_zeros());
        match kind {
            QHAL_COLLECTIVE_SEND | QHAL_COLLECTIVE_RECV => self.step(bytes),
            _ if ranks < 2 => 0.0,
            // A ring moves a share twice around; a tree the whole up and down.
            QHAL_COLLECTIVE_ALL_REDUCE => (2.0 * steps * self.step(bytes / n)).min(2.0 * levels * self.step(bytes)),
            // A chain passes shares on as they come; a tree the whole level by level.
            QHAL_COLLECTIVE_BROADCAST => {
                (self.step(bytes) + (steps - 1.0) * self.step(bytes / n)).min(levels * self.step(bytes))
            }
            // A part for each other rank, one step each.
            _ => steps * self.step(bytes),
        }
    }

    /// Bytes that a rank sends.
    pub(crate) fn sent(kind: u32, ranks: usize, bytes: f64) -> f64 {
        let (n, steps) = (ranks as f64, ranks as f64 - 1.0);
        match kind {
            QHAL_COLLECTIVE_SEND => bytes,
            QHAL_COLLECTIVE_RECV => 0.0,
            QHAL_COLLECTIVE_ALL_REDUCE => 2.0 * steps / n * bytes,
            QHAL_COLLECTIVE_BROADCAST => {
                if ranks < 2 {
                    0.0
                } else {
                    bytes
                }
            }
            _ => steps * bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A byte a nanosecond.
    const FREE: Wire = Wire { bandwidth: 1e9, latency_ns: 0.0 };

    #[test]
    fn rings_are_bound_by_bandwidth_and_trees_by_latency() {
        let all_reduce = |wire: Wire, ranks, bytes| wire.nanoseconds(QHAL_COLLECTIVE_ALL_REDUCE, ranks, bytes);
        // 2 (n - 1) / n of the bytes cross each link.
        for (ranks, share) in [(1, 0.0), (2, 1.0), (3, 4.0 / 3.0), (4, 1.5), (8, 1.75)] {
            assert!((all_reduce(FREE, ranks, 1e6) - share * 1e6).abs() < 1e-3, "{ranks}");
        }
        // With nothing to move, a tree has fewer steps: 2 x 3 instead of 2 x 7.
        let slow = Wire { latency_ns: 1000.0, ..FREE };
        assert!((all_reduce(slow, 8, 8.0) - 6.0 * 1008.0).abs() < 1e-6);
        assert!((all_reduce(slow, 8, 8e6) - 14.0 * (1000.0 + 1e6)).abs() < 1e-3);
    }

    #[test]
    fn other_kinds_move_what_they_must() {
        let at = |kind, ranks| FREE.nanoseconds(kind, ranks, 1e6);
        assert!((at(QHAL_COLLECTIVE_ALL_GATHER, 4) - 3e6).abs() < 1e-3);
        assert!((at(QHAL_COLLECTIVE_ALL_TO_ALL, 8) - 7e6).abs() < 1e-3);
        assert!((at(QHAL_COLLECTIVE_BROADCAST, 2) - 1e6).abs() < 1e-3);
        assert!((at(QHAL_COLLECTIVE_BROADCAST, 4) - 1.5e6).abs() < 1e-3);
        assert!((at(QHAL_COLLECTIVE_SEND, 8) - 1e6).abs() < 1e-3);
        assert!((Wire::sent(QHAL_COLLECTIVE_ALL_REDUCE, 4, 1e6) - 1.5e6).abs() < 1e-3);
    }
}
