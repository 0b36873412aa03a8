//! The pool of KV-cache blocks: which blocks exist, which are free, who may use them.
//!
//! In: wishes for blocks. Out: [`BlockHandle`]s and, when the pool must grow, how many blocks to back with memory. Invariants:
//! - a block is free or has at least one owner, never both; a handle of a freed block is refused (generation counter);
//! - blocks `0..committed` are backed; the pool grows in steps (doubling at first, then by an eighth of the limit), and never
//!   beyond its limit;
//! - the lowest free block is handed out first, so that used blocks stay dense and the tail can be given back.
//!
//! The pool holds no memory itself: [`crate::kv_memory::KvMemory`] backs the blocks of every layer.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::RuntimeError;

/// One block, as long as its generation is current.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockHandle {
    index: u32,
    generation: u32,
}

impl BlockHandle {
    /// Index in the cache buffers and block tables.
    #[must_use]
    pub const fn index(self) -> u32 {
        self.index
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Block {
    generation: u32,
    owners: u32,
}

/// What a pool holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvPoolStats {
    /// Most blocks there can be.
    pub limit: u32,
    /// Blocks backed with memory.
    pub committed: u32,
    /// Blocks with an owner.
    pub used: u32,
    /// Most blocks that ever had an owner at the same time.
    pub high_water: u32,
    /// Longest run of free blocks among the committed ones.
    pub largest_free_run: u32,
}

/// Blocks of tokens.
#[derive(Debug)]
pub struct KvPool {
    blocks: Vec<Block>,
    free: BinaryHeap<Reverse<u32>>,
    limit: u32,
    first_step: u32,
    used: u32,
    high_water: u32,
}

impl KvPool {
    /// A pool of at most `limit` blocks that backs at least `first_step` of them when it first grows.
    #[must_use]
    pub fn new(limit: u32, first_step: u32) -> Self {
        Self {
            blocks: Vec::new(),
            free: BinaryHeap::new(),
            limit,
            first_step: first_step.clamp(1, limit.max(1)),
            used: 0,
            high_water: 0,
        }
    }

    /// Most blocks there can be.
    #[must_use]
    pub const fn limit(&self) -> u32 {
        self.limit
    }

    /// Blocks that can still be handed out, once the pool has grown for them.
    #[must_use]
    pub const fn available(&self) -> u32 {
        self.limit - self.used
    }

    /// Blocks that should be backed before `wanted` more can be allocated: none, or the new total.
    #[must_use]
    pub fn growth_for(&self, wanted: u32) -> Option<u32> {
        let committed = self.blocks.len() as u32;
        let needed = self.used.saturating_add(wanted).min(self.limit);
        if needed <= committed {
            return None;
        }
        let step = committed.max(self.first_step).min((self.limit / 8).max(self.first_step));
        Some(committed.saturating_add(step).max(needed).min(self.limit))
    }

    /// Blocks `0..total` are backed now.
    pub fn committed(&mut self, total: u32) {
        for index in self.blocks.len() as u32..total.min(self.limit) {
            self.blocks.push(Block::default());
            self.free.push(Reverse(index));
        }
    }

    /// The lowest free block.
    ///
    /// # Errors
    /// [`RuntimeError::KvExhausted`] if no committed block is free.
    pub fn allocate(&mut self) -> Result<BlockHandle, RuntimeError> {
        let Some(Reverse(index)) = self.free.pop() else {
            return Err(RuntimeError::KvExhausted { wanted: 1, free: 0, limit: self.limit });
        };
        let block = &mut self.blocks[index as usize];
        block.owners = 1;
        self.used += 1;
        self.high_water = self.high_water.max(self.used);
        Ok(BlockHandle { index, generation: block.generation })
    }

    /// One more owner of a block.
    ///
    /// # Errors
    /// [`RuntimeError::StaleBlock`] if the block was freed since.
    pub fn retain(&mut self, handle: BlockHandle) -> Result<(), RuntimeError> {
        self.checked(handle)?.owners += 1;
        Ok(())
    }

    /// One owner less; the last one frees the block. Returns whether it is free now.
    ///
    /// # Errors
    /// [`RuntimeError::StaleBlock`] if the block was freed before.
    pub fn release(&mut self, handle: BlockHandle) -> Result<bool, RuntimeError> {
        let block = self.checked(handle)?;
        block.owners -= 1;
        if block.owners > 0 {
            return Ok(false);
        }
        block.generation = block.generation.wrapping_add(1);
        self.used -= 1;
        self.free.push(Reverse(handle.index));
        Ok(true)
    }

    /// Owners of a block, none if the handle is stale.
    #[must_use]
    pub fn owners(&self, handle: BlockHandle) -> Option<u32> {
        let block = self.blocks.get(handle.index as usize)?;
        (block.owners > 0 && block.generation == handle.generation).then_some(block.owners)
    }

    /// Whether a block has an owner.
    #[must_use]
    pub fn is_used(&self, index: u32) -> bool {
        self.blocks.get(index as usize).is_some_and(|block| block.owners > 0)
    }

    /// Figures for reports; looks at every block.
    #[must_use]
    pub fn stats(&self) -> KvPoolStats {
        let mut largest = 0;
        let mut run = 0;
        for block in &self.blocks {
            run = if block.owners == 0 { run + 1 } else { 0 };
            largest = largest.max(run);
        }
        KvPoolStats {
            limit: self.limit,
            committed: self.blocks.len() as u32,
            used: self.used,
            high_water: self.high_water,
            largest_free_run: largest,
        }
    }

    fn checked(&mut self, handle: BlockHandle) -> Result<&mut Block, RuntimeError> {
        match self.blocks.get_mut(handle.index as usize) {
            Some(block) if block.owners > 0 && block.generation == handle.generation => Ok(block),
            _ => Err(RuntimeError::StaleBlock { index: handle.index, generation: handle.generation }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn grow(pool: &mut KvPool, wanted: u32) {
        if let Some(total) = pool.growth_for(wanted) {
            pool.committed(total);
        }
    }

    #[test]
    fn grows_in_steps_up_to_the_limit() {
        let mut pool = KvPool::new(100, 4);
        let mut totals = Vec::new();
        for _ in 0..100 {
            if let Some(total) = pool.growth_for(1) {
                totals.push(total);
                pool.committed(total);
            }
            pool.allocate().unwrap();
        }
        assert_eq!(totals, [4, 8, 16, 28, 40, 52, 64, 76, 88, 100]);
        assert_eq!(pool.growth_for(1), None);
        let error = pool.allocate().unwrap_err();
        assert!(error.to_string().contains("100"), "{error}");
    }

    #[test]
    fn a_stale_handle_is_refused() {
        let mut pool = KvPool::new(4, 4);
        grow(&mut pool, 1);
        let first = pool.allocate().unwrap();
        assert!(pool.release(first).unwrap());
        assert!(pool.release(first).is_err());
        let again = pool.allocate().unwrap();
        assert_eq!(again.index(), first.index());
        assert!(pool.retain(first).is_err());
        assert_eq!(pool.owners(again), Some(1));
        assert_eq!(pool.owners(first), None);
    }

    proptest! {
        /// What is available can be had: growing for it backs enough blocks, and never more than the limit.
        #[test]
        fn growth_backs_what_is_available(
            limit in 0u32..200,
            first_step in 0u32..20,
            wishes in proptest::collection::vec(0u32..80, 0..12),
        ) {
            let mut pool = KvPool::new(limit, first_step);
            for wanted in wishes {
                let wanted = wanted.min(pool.available());
                grow(&mut pool, wanted);
                for _ in 0..wanted {
                    prop_assert!(pool.allocate().is_ok());
                }
                let stats = pool.stats();
                prop_assert!(stats.used <= stats.committed && stats.committed <= limit);
                prop_assert_eq!(pool.available(), limit - stats.used);
            }
        }

        /// Against a model: a map from block to owners.
        #[test]
        fn no_block_has_two_lives(ops in proptest::collection::vec((0u8..3, any::<prop::sample::Index>()), 1..400)) {
            let mut pool = KvPool::new(24, 3);
            let mut live: Vec<BlockHandle> = Vec::new();
            let mut owners: HashMap<u32, u32> = HashMap::new();
            for (op, pick) in ops {
                match op {
                    0 => {
                        grow(&mut pool, 1);
                        match pool.allocate() {
                            Ok(handle) => {
                                prop_assert!(owners.insert(handle.index(), 1).is_none(), "block handed out twice");
                                live.push(handle);
                            }
                            Err(_) => prop_assert_eq!(owners.len(), 24),
                        }
                    }
                    1 if !live.is_empty() => {
                        let handle = live[pick.index(live.len())];
                        pool.retain(handle).unwrap();
                        live.push(handle);
                        *owners.get_mut(&handle.index()).unwrap() += 1;
                    }
                    _ if !live.is_empty() => {
                        let handle = live.swap_remove(pick.index(live.len()));
                        let freed = pool.release(handle).unwrap();
                        let count = owners.get_mut(&handle.index()).unwrap();
                        *count -= 1;
                        prop_assert_eq!(freed, *count == 0);
                        if freed {
                            owners.remove(&handle.index());
                        }
                    }
                    _ => {}
                }
                prop_assert_eq!(pool.stats().used as usize, owners.len());
            }
        }
    }
}
