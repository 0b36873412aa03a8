//! One step: which tokens of which sequences are computed together.
//!
//! In: sequences with their cache blocks and the tokens to compute. Out: the integer inputs of a program. Invariant: every
//! slot and block-table entry lies within the blocks that the sequence owns.

use crate::RuntimeError;
use crate::kv_pool::BlockHandle;

/// Which logits of a sequence's tokens are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitRows {
    /// None: more of the prompt follows.
    None,
    /// Of the last token.
    Last,
    /// Of every token.
    All,
}

/// Cache of one sequence.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SequenceKv {
    /// Blocks in order of position.
    pub blocks: Vec<BlockHandle>,
    /// Tokens whose keys and values are in the cache.
    pub len: u32,
}

/// A step under construction.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    pub(crate) block_size: u32,
    pub(crate) token_ids: Vec<i32>,
    pub(crate) positions: Vec<i32>,
    pub(crate) slots: Vec<i32>,
    pub(crate) query_start: Vec<i32>,
    pub(crate) context_len: Vec<i32>,
    pub(crate) tables: Vec<Vec<i32>>,
    pub(crate) logit_rows: Vec<i32>,
}

impl Batch {
    /// An empty step for a cache with blocks of so many tokens.
    #[must_use]
    pub fn new(block_size: u32) -> Self {
        Self { block_size, query_start: vec![0], ..Self::default() }
    }

    /// Adds the next tokens of a sequence; all of them or none.
    ///
    /// # Errors
    /// [`RuntimeError::Step`] if there is no token, a token is not an id, or the sequence has too few blocks.
    pub fn push(&mut self, sequence: &SequenceKv, tokens: &[u32], rows: LogitRows) -> Result<(), RuntimeError> {
        let step = |what, expected: String, found: String| RuntimeError::Step { what, expected, found };
        let end = u64::from(sequence.len) + tokens.len() as u64;
        let room = sequence.blocks.len() as u64 * u64::from(self.block_size);
        if tokens.is_empty() {
            return Err(step("tokens", "at least one".into(), "none".into()));
        }
        if end > room || end > i32::MAX as u64 {
            return Err(step("cache blocks", format!("room for {end} tokens"), format!("room for {room}")));
        }
        let first_row = self.token_ids.len();
        let positions = sequence.len..end as u32;
        let number = |what, value: u64| {
            i32::try_from(value).map_err(|_| step(what, "a number below 2^31".into(), value.to_string()))
        };
        let token_ids = tokens.iter().map(|token| number("token", u64::from(*token))).collect::<Result<Vec<_>, _>>()?;
        let slot = |position: u32| {
            let block = sequence.blocks[(position / self.block_size) as usize].index();
            number("slot", u64::from(block) * u64::from(self.block_size) + u64::from(position % self.block_size))
        };
        let slots = positions.clone().map(slot).collect::<Result<Vec<_>, _>>()?;
        self.token_ids.extend(token_ids);
        self.slots.extend(slots);
        self.positions.extend(positions.map(|position| position as i32));
        let last_row = self.token_ids.len();
        match rows {
            LogitRows::None => {}
            LogitRows::Last => self.logit_rows.push(last_row as i32 - 1),
            LogitRows::All => self.logit_rows.extend((first_row..last_row).map(|row| row as i32)),
        }
        self.query_start.push(last_row as i32);
        self.context_len.push(end as i32);
        let used = end.div_ceil(u64::from(self.block_size)) as usize;
        self.tables.push(sequence.blocks[..used].iter().map(|block| block.index() as i32).collect());
        Ok(())
    }

    /// The step in so many parts, of about as many tokens each and in order; none if it would be one. What is cut may be a sequence: then
    /// its later tokens are in the next part, to be computed after these.
    pub(crate) fn parts(&self, parts: usize) -> Vec<Self> {
        let tokens = self.tokens();
        let parts = parts.min(tokens);
        if parts < 2 {
            return Vec::new();
        }
        (0..parts).map(|part| self.part(tokens * part / parts, tokens * (part + 1) / parts)).collect()
    }

    /// Tokens from one row to another.
    fn part(&self, first: usize, end: usize) -> Self {
        let mut part = Self::new(self.block_size);
        for (i, bounds) in self.query_start.windows(2).enumerate() {
            let (from, to) = ((bounds[0] as usize).max(first), (bounds[1] as usize).min(end));
            if from >= to {
                continue;
            }
            part.query_start.push((to - first) as i32);
            // The context ends with the last token of the part.
            let context = self.positions[to - 1] + 1;
            part.context_len.push(context);
            let blocks = (context as usize).div_ceil(self.block_size.max(1) as usize);
            part.tables.push(self.tables[i][..blocks].to_vec());
        }
        part.token_ids.extend_from_slice(&self.token_ids[first..end]);
        part.positions.extend_from_slice(&self.positions[first..end]);
        part.slots.extend_from_slice(&self.slots[first..end]);
        let rows = self.logit_rows.iter().map(|row| *row as usize).filter(|row| (first..end).contains(row));
        part.logit_rows.extend(rows.map(|row| (row - first) as i32));
        part
    }

    /// Tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.token_ids.len()
    }
    /// Sequences.
    #[must_use]
    pub fn sequences(&self) -> usize {
        self.context_len.len()
    }
    /// Rows of logits.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.logit_rows.len()
    }
    /// Columns of the block table: the most blocks of a sequence.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.tables.iter().map(Vec::len).max().unwrap_or(0)
    }
    /// The block table, dense, padded with 0; padding is never read.
    pub(crate) fn block_table(&self, out: &mut Vec<i32>) {
        let columns = self.blocks();
        out.clear();
        for table in &self.tables {
            out.extend_from_slice(table);
            out.resize(out.len() + columns - table.len(), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_pool::KvPool;

    #[test]
    fn slots_and_tables_follow_the_blocks() {
        let mut pool = KvPool::new(8, 8);
        pool.committed(8);
        let handles: Vec<_> = (0..5).map(|_| pool.allocate().unwrap()).collect();
        let a = SequenceKv { blocks: vec![handles[3], handles[1]], len: 3 };
        let b = SequenceKv { blocks: vec![handles[2]], len: 0 };
        let mut batch = Batch::new(4);
        batch.push(&a, &[10, 11], LogitRows::Last).unwrap();
        batch.push(&b, &[20, 21, 22], LogitRows::All).unwrap();
        assert_eq!(batch.positions, [3, 4, 0, 1, 2]);
        assert_eq!(batch.slots, [15, 4, 8, 9, 10]);
        assert_eq!(batch.query_start, [0, 2, 5]);
        assert_eq!(batch.context_len, [5, 3]);
        assert_eq!(batch.logit_rows, [1, 2, 3, 4]);
        let mut table = Vec::new();
        batch.block_table(&mut table);
        assert_eq!(table, [3, 1, 2, 0]);
    }

    #[test]
    fn parts_of_a_step_are_steps_of_the_same_tokens() {
        let mut pool = KvPool::new(8, 8);
        pool.committed(8);
        let handles: Vec<_> = (0..5).map(|_| pool.allocate().unwrap()).collect();
        let a = SequenceKv { blocks: vec![handles[3], handles[1]], len: 3 };
        let b = SequenceKv { blocks: vec![handles[2], handles[4]], len: 0 };
        let mut batch = Batch::new(4);
        batch.push(&a, &[10], LogitRows::Last).unwrap();
        batch.push(&b, &[20, 21, 22, 23, 24], LogitRows::All).unwrap();
        let parts = batch.parts(2);
        // The same as if the second sequence had been cut by hand.
        let mut first = Batch::new(4);
        first.push(&a, &[10], LogitRows::Last).unwrap();
        first.push(&b, &[20, 21], LogitRows::All).unwrap();
        let mut second = Batch::new(4);
        second.push(&SequenceKv { len: 2, ..b }, &[22, 23, 24], LogitRows::All).unwrap();
        for (part, wanted) in parts.iter().zip([first, second]) {
            assert_eq!(format!("{part:?}"), format!("{wanted:?}"));
        }
        assert_eq!((parts.len(), batch.parts(1).len(), batch.parts(9).len()), (2, 0, 6));
    }

    #[test]
    fn a_sequence_without_room_is_refused() {
        let mut batch = Batch::new(4);
        assert!(batch.push(&SequenceKv::default(), &[1], LogitRows::Last).is_err());
        assert!(batch.push(&SequenceKv::default(), &[], LogitRows::Last).is_err());
        assert_eq!(batch.sequences(), 0);
    }

    #[test]
    fn a_refused_sequence_leaves_nothing_behind() {
        let mut pool = KvPool::new(1, 1);
        pool.committed(1);
        let sequence = SequenceKv { blocks: vec![pool.allocate().unwrap()], len: 0 };
        let mut batch = Batch::new(4);
        let error = batch.push(&sequence, &[1, 1 << 31], LogitRows::All).unwrap_err().to_string();
        assert!(error.contains("token") && error.contains("2147483648"), "{error}");
        assert!(batch.push(&sequence, &[1; 5], LogitRows::All).unwrap_err().to_string().contains("room for 5"));
        assert_eq!((batch.tokens(), batch.slots.len(), batch.rows(), batch.sequences()), (0, 0, 0, 0));
        batch.push(&sequence, &[1; 4], LogitRows::All).unwrap();
        assert_eq!(batch.query_start, [0, 4]);
    }
}
