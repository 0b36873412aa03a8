//! Who holds which blocks of the KV cache: sequences, and the prefix cache for whoever comes next.
//!
//! In: sequences that need room, that computed something, that end. Out: their block tables. Invariants:
//! - every block of the model's pool that is in use belongs to one sequence or to the prefix cache, never to both;
//! - what the prefix cache keeps for nobody counts as free: it is evicted when a sequence needs the room;
//! - a cached block was computed exactly as the sequence that takes it over would compute it: for a model whose form depends on
//!   the phase, only blocks of prompts are cached, since an answer's tokens come from the other form.

use qwen_runtime::{Model, RuntimeError, SequenceKv};

use crate::kv_map::KvMap;
use crate::prefix_cache::{Place, PrefixCache};
use crate::sequence::Sequence;

#[derive(Debug)]
pub(crate) struct Blocks {
    cache: Option<PrefixCache>,
    size: usize,
}

impl Blocks {
    pub(crate) fn new(block_size: u32, with_prefix_cache: bool) -> Self {
        let cache = with_prefix_cache.then(|| PrefixCache::new(block_size));
        Self { cache, size: block_size.max(1) as usize }
    }

    /// Blocks for so many tokens.
    pub(crate) const fn for_tokens(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.size)
    }

    /// Blocks that nobody holds but whose contents are kept.
    pub(crate) fn cached(&self) -> u32 {
        self.cache.as_ref().map_or(0, PrefixCache::idle_blocks)
    }

    /// A picture of all blocks.
    pub(crate) fn map(&self, model: &Model) -> KvMap {
        KvMap::new(model.kv_pool(), self.cache.iter().flat_map(PrefixCache::idle))
    }

    /// Blocks that sequences can still get.
    pub(crate) fn free(&self, model: &Model) -> usize {
        (model.free_blocks() + self.cached()) as usize
    }

    fn place(sequence: &Sequence) -> Place {
        sequence.path.last().map_or(Place::Root(sequence.namespace), |id| Place::Below(*id))
    }

    /// Blocks that a sequence without any would find, and how many of them count as free now. The last token of a sequence is
    /// never found: its logits are wanted.
    pub(crate) fn find(&self, sequence: &Sequence) -> (usize, usize) {
        let Some(cache) = self.cache.as_ref().filter(|_| !sequence.wants_every_row()) else { return (0, 0) };
        let path = cache.find(Self::place(sequence), &sequence.tokens[..sequence.tokens.len() - 1]);
        (path.len(), cache.idle_of(&path) as usize)
    }

    /// Takes over what is known of the tokens that a sequence has to compute next. It may be called as long as the sequence
    /// holds nothing but cached blocks. Returns the tokens that were found.
    pub(crate) fn take_over(&mut self, sequence: &mut Sequence) -> usize {
        let held = sequence.path.len();
        let Some(cache) = self.cache.as_mut().filter(|_| !sequence.wants_every_row()) else { return 0 };
        if sequence.kv.blocks.len() != held || sequence.kv.len as usize != held * self.size {
            return 0;
        }
        let rest = &sequence.tokens[held * self.size..sequence.tokens.len() - 1];
        let path = cache.find(Self::place(sequence), rest);
        cache.borrow(&path);
        sequence.kv.blocks.extend(path.iter().filter_map(|id| cache.block(*id)));
        sequence.path.extend_from_slice(&path);
        sequence.kv.len += (path.len() * self.size) as u32;
        path.len() * self.size
    }

    /// The block of tokens that a sequence is in or computes next, if its tokens are all there, and whether the sequence
    /// could still take it over from another one.
    pub(crate) fn current<'a>(&self, sequence: &'a Sequence) -> Option<(Place, &'a [u32], bool)> {
        let held = sequence.path.len() * self.size;
        let is_whole = held + self.size < sequence.tokens.len() && (sequence.kv.len as usize) < held + self.size;
        let is_open = sequence.kv.blocks.len() == sequence.path.len() && !sequence.wants_every_row();
        let is_shared = self.cache.is_some() && is_whole;
        is_shared.then(|| (Self::place(sequence), &sequence.tokens[held..held + self.size], is_open))
    }

    /// Room for so many more tokens; false if there is none even after evicting everything that nobody holds.
    pub(crate) fn reserve(
        &mut self,
        model: &mut Model,
        sequence: &mut SequenceKv,
        tokens: usize,
    ) -> Result<bool, RuntimeError> {
        let wanted = self.for_tokens(sequence.len as usize + tokens).saturating_sub(sequence.blocks.len());
        if wanted > self.free(model) {
            return Ok(false);
        }
        while (model.free_blocks() as usize) < wanted {
            let Some(block) = self.cache.as_mut().and_then(PrefixCache::evict) else { return Ok(false) };
            model.release(&mut SequenceKv { blocks: vec![block], len: 0 })?;
        }
        model.reserve(sequence, tokens as u32)?;
        Ok(true)
    }

    /// Hands the complete blocks of a sequence to the prefix cache; the sequence goes on borrowing them.
    pub(crate) fn share(
        &mut self,
        model: &mut Model,
        sequence: &mut Sequence,
        prompts_only: bool,
    ) -> Result<(), RuntimeError> {
        let Some(cache) = self.cache.as_mut() else { return Ok(()) };
        let limit = sequence.kv.len as usize;
        let limit = if prompts_only { limit.min(sequence.prompt_len) } else { limit };
        while (sequence.path.len() + 1) * self.size <= limit {
            let at = sequence.path.len();
            let own = sequence.kv.blocks[at];
            let tokens = &sequence.tokens[at * self.size..(at + 1) * self.size];
            let id = cache.insert(Self::place(sequence), tokens, own);
            sequence.path.push(id);
            if let Some(shared) = cache.block(id).filter(|shared| *shared != own) {
                // Another sequence computed the same: the same bits, so one copy is enough.
                sequence.kv.blocks[at] = shared;
                model.release(&mut SequenceKv { blocks: vec![own], len: 0 })?;
            }
        }
        Ok(())
    }

    /// Takes everything from a sequence; what is cached stays for others, and for the sequence itself if it comes back.
    pub(crate) fn release(&mut self, model: &mut Model, sequence: &mut Sequence) -> Result<(), RuntimeError> {
        let path = std::mem::take(&mut sequence.path);
        if let Some(cache) = &mut self.cache {
            cache.give_back(&path);
        }
        sequence.kv.blocks.drain(..path.len());
        model.release(&mut sequence.kv)
    }

    /// Forgets everything that nobody holds.
    pub(crate) fn clear(&mut self, model: &mut Model) -> Result<(), RuntimeError> {
        while let Some(block) = self.cache.as_mut().and_then(PrefixCache::evict) {
            model.release(&mut SequenceKv { blocks: vec![block], len: 0 })?;
        }
        Ok(())
    }
}
