//! A picture of the KV cache: which blocks are held, kept for reuse, free, in the order of their memory.
//!
//! In: the pool and the prefix cache. Out: runs of blocks of the same state, whose lengths add up to the pool. It looks at every
//! block, so it is made when somebody asks, not after each step.

use qwen_runtime::kv_pool::KvPool;

/// State of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvState {
    /// Nobody has it.
    Free,
    /// Requests hold it.
    Used,
    /// Nobody holds it, but the prefix cache keeps its contents; it is given away when needed.
    Cached,
}

impl KvState {
    /// Name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Used => "used",
            Self::Cached => "cached",
        }
    }
}

/// Blocks in the order of their memory.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KvMap {
    /// State and length of each run.
    pub runs: Vec<(KvState, u32)>,
    /// Blocks that have memory behind them; the others get it when they are needed first.
    pub backed: u32,
}

impl KvMap {
    /// Of a pool whose blocks `idle` are kept by the prefix cache alone.
    pub(crate) fn new(pool: &KvPool, idle: impl Iterator<Item = u32>) -> Self {
        let state = |used: bool| if used { KvState::Used } else { KvState::Free };
        let mut states: Vec<KvState> = (0..pool.limit()).map(|index| state(pool.is_used(index))).collect();
        for index in idle {
            states[index as usize] = KvState::Cached;
        }
        let runs = states.chunk_by(|a, b| a == b).map(|run| (run[0], run.len() as u32)).collect();
        Self { runs, backed: pool.stats().committed }
    }

    /// Blocks of a state.
    #[must_use]
    pub fn count(&self, state: KvState) -> u32 {
        self.runs.iter().filter(|(found, _)| *found == state).map(|(_, length)| length).sum()
    }

    /// Longest run of free blocks.
    #[must_use]
    pub fn largest_free_run(&self) -> u32 {
        let free = self.runs.iter().filter(|(state, _)| *state == KvState::Free);
        free.map(|(_, length)| *length).max().unwrap_or(0)
    }

    /// Share of the free blocks that lie outside the longest run of them, 0 to 1.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        let free = self.count(KvState::Free);
        if free == 0 { 0.0 } else { 1.0 - f64::from(self.largest_free_run()) / f64::from(free) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_in_the_order_of_memory() {
        let mut pool = KvPool::new(10, 4);
        pool.committed(6);
        let blocks: Vec<_> = (0..5).map(|_| pool.allocate().unwrap()).collect();
        pool.release(blocks[1]).unwrap();
        let map = KvMap::new(&pool, [3].into_iter());
        let expected = [(1, KvState::Used), (1, KvState::Free), (1, KvState::Used), (1, KvState::Cached)];
        assert_eq!(map.runs[..4], expected.map(|(length, state)| (state, length)));
        assert_eq!(map.runs[4..], [(KvState::Used, 1), (KvState::Free, 5)]);
        let counts = [KvState::Free, KvState::Used, KvState::Cached].map(|state| map.count(state));
        assert_eq!((counts, map.backed, map.largest_free_run()), ([6, 3, 1], 6, 5));
        assert!((map.fragmentation() - 1.0 / 6.0).abs() < 1e-12);
    }

    #[test]
    fn a_full_pool_has_no_fragments() {
        let mut pool = KvPool::new(2, 2);
        pool.committed(2);
        for _ in 0..2 {
            pool.allocate().unwrap();
        }
        let map = KvMap::new(&pool, std::iter::empty());
        assert_eq!((map.runs.as_slice(), map.fragmentation()), (&[(KvState::Used, 2)][..], 0.0));
        assert_eq!(KvMap::default().fragmentation(), 0.0);
    }
}
