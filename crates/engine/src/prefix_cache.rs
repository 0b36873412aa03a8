//! The prefix cache: blocks of the KV cache whose contents may be of use to a request that begins with the same tokens.
//!
//! A radix tree whose edges are whole blocks: a node is one block of tokens after all the blocks above it, so a path from a
//! root is a prefix, and what a block holds is a function of its path alone. In: tokens of sequences, blocks that were
//! computed. Out: the longest known path, blocks to give back. Invariants:
//! - each [`Namespace`] (client and salt) has a root of its own: what one client sent can't be felt by another, not even in
//!   time;
//! - the cache owns the block of every node; a sequence only borrows ([`PrefixCache::borrow`], [`PrefixCache::give_back`]);
//! - whoever borrows a node borrows everything above it, so a node that nobody borrows has no borrowed node below it, and
//!   every such node can be evicted, leaves first;
//! - of what can be evicted, what was not used for the longest time goes first, and of one path the end before the beginning.

use std::collections::{BTreeSet, HashMap};

use qwen_runtime::kv_pool::BlockHandle;

use crate::ClientKey;

/// Who may share blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Namespace {
    pub(crate) client: ClientKey,
    pub(crate) salt: u64,
}

/// A node of the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NodeId(u32);

/// Where a path goes on: below a node, or at the root of a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Place {
    Root(Namespace),
    Below(NodeId),
}

#[derive(Debug)]
struct Node {
    parent: Place,
    tokens: Box<[u32]>,
    block: BlockHandle,
    children: HashMap<Box<[u32]>, NodeId>,
    borrowers: u32,
    /// When it was last given back: a number that only grows.
    last_used: u64,
}

/// Blocks by what they hold.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    block_size: usize,
    nodes: Vec<Option<Node>>,
    vacant: Vec<u32>,
    roots: HashMap<Namespace, HashMap<Box<[u32]>, NodeId>>,
    /// Leaves that nobody borrows, the longest unused first.
    leaves: BTreeSet<(u64, NodeId)>,
    /// Nodes that nobody borrows.
    idle: u32,
    clock: u64,
}

impl PrefixCache {
    pub(crate) fn new(block_size: u32) -> Self {
        Self {
            block_size: block_size.max(1) as usize,
            nodes: Vec::new(),
            vacant: Vec::new(),
            roots: HashMap::new(),
            leaves: BTreeSet::new(),
            idle: 0,
            clock: 0,
        }
    }

    /// Blocks that could be evicted now.
    pub(crate) const fn idle_blocks(&self) -> u32 {
        self.idle
    }

    /// Where these blocks lie in the pool.
    pub(crate) fn idle(&self) -> impl Iterator<Item = u32> {
        self.nodes.iter().flatten().filter(|node| node.borrowers == 0).map(|node| node.block.index())
    }

    /// Blocks that it owns.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.nodes.len() - self.vacant.len()
    }

    fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(id.0 as usize)?.as_ref()
    }

    fn children(&self, place: Place) -> Option<&HashMap<Box<[u32]>, NodeId>> {
        match place {
            Place::Root(namespace) => self.roots.get(&namespace),
            Place::Below(id) => self.node(id).map(|node| &node.children),
        }
    }

    /// The block of a node.
    pub(crate) fn block(&self, id: NodeId) -> Option<BlockHandle> {
        self.node(id).map(|node| node.block)
    }

    /// The known path that `tokens` begin with, from a place on; whole blocks only.
    pub(crate) fn find(&self, from: Place, tokens: &[u32]) -> Vec<NodeId> {
        let mut place = from;
        let mut path = Vec::new();
        for block in tokens.chunks_exact(self.block_size) {
            let Some(id) = self.children(place).and_then(|children| children.get(block)) else { break };
            path.push(*id);
            place = Place::Below(*id);
        }
        path
    }

    /// Of these nodes, those that nobody borrows.
    pub(crate) fn idle_of(&self, path: &[NodeId]) -> u32 {
        path.iter().filter(|id| self.node(**id).is_some_and(|node| node.borrowers == 0)).count() as u32
    }

    /// Borrows nodes of a path, each below the one before.
    pub(crate) fn borrow(&mut self, path: &[NodeId]) {
        for id in path {
            let Some(node) = self.nodes.get_mut(id.0 as usize).and_then(Option::as_mut) else { continue };
            if node.borrowers == 0 {
                self.idle -= 1;
                self.leaves.remove(&(node.last_used, *id));
            }
            node.borrowers += 1;
        }
    }

    /// Gives borrowed nodes of a path back.
    pub(crate) fn give_back(&mut self, path: &[NodeId]) {
        // From the end, so that the end is evicted before the beginning.
        for id in path.iter().rev() {
            self.clock += 1;
            let Some(node) = self.nodes.get_mut(id.0 as usize).and_then(Option::as_mut) else { continue };
            node.borrowers -= 1;
            if node.borrowers == 0 {
                node.last_used = self.clock;
                self.idle += 1;
                if node.children.is_empty() {
                    self.leaves.insert((node.last_used, *id));
                }
            }
        }
    }

    /// Takes a computed block of `tokens` into the tree, borrowed by whoever computed it. If the same block is there already,
    /// the node is that one, and the caller's block is his to give back.
    pub(crate) fn insert(&mut self, place: Place, tokens: &[u32], block: BlockHandle) -> NodeId {
        if let Some(id) = self.children(place).and_then(|children| children.get(tokens)).copied() {
            self.borrow(&[id]);
            return id;
        }
        let tokens: Box<[u32]> = tokens.into();
        let (children, last_used) = (HashMap::new(), self.clock);
        let node = Node { parent: place, tokens: tokens.clone(), block, children, borrowers: 1, last_used };
        let id = match self.vacant.pop() {
            Some(index) => {
                self.nodes[index as usize] = Some(node);
                NodeId(index)
            }
            None => {
                self.nodes.push(Some(node));
                NodeId(self.nodes.len() as u32 - 1)
            }
        };
        match place {
            Place::Root(namespace) => {
                self.roots.entry(namespace).or_default().insert(tokens, id);
            }
            Place::Below(parent) => {
                if let Some(parent) = self.nodes.get_mut(parent.0 as usize).and_then(Option::as_mut) {
                    parent.children.insert(tokens, id);
                }
            }
        }
        id
    }

    /// Forgets the leaf that was not used for the longest time; its block is the caller's.
    pub(crate) fn evict(&mut self) -> Option<BlockHandle> {
        let (_, id) = self.leaves.pop_first()?;
        let node = self.nodes.get_mut(id.0 as usize)?.take()?;
        self.vacant.push(id.0);
        self.idle -= 1;
        match node.parent {
            Place::Root(namespace) => {
                if let Some(children) = self.roots.get_mut(&namespace) {
                    children.remove(&node.tokens);
                    if children.is_empty() {
                        self.roots.remove(&namespace);
                    }
                }
            }
            Place::Below(parent_id) => {
                if let Some(parent) = self.nodes.get_mut(parent_id.0 as usize).and_then(Option::as_mut) {
                    parent.children.remove(&node.tokens);
                    if parent.children.is_empty() && parent.borrowers == 0 {
                        self.leaves.insert((parent.last_used, parent_id));
                    }
                }
            }
        }
        Some(node.block)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;
    use qwen_runtime::kv_pool::KvPool;

    use super::*;

    fn pool() -> KvPool {
        let mut pool = KvPool::new(512, 512);
        pool.committed(512);
        pool
    }

    fn insert_all(cache: &mut PrefixCache, pool: &mut KvPool, root: Place, tokens: &[u32]) -> Vec<NodeId> {
        let mut place = root;
        let mut path = Vec::new();
        for block in tokens.chunks_exact(4) {
            let handle = pool.allocate().unwrap();
            let id = cache.insert(place, block, handle);
            if cache.block(id) != Some(handle) {
                pool.release(handle).unwrap();
            }
            path.push(id);
            place = Place::Below(id);
        }
        path
    }

    const ROOT: Place = Place::Root(Namespace { client: ClientKey(1), salt: 0 });

    #[test]
    fn finds_the_longest_prefix_of_whole_blocks() {
        let (mut cache, mut pool) = (PrefixCache::new(4), pool());
        let path = insert_all(&mut cache, &mut pool, ROOT, &[1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(cache.find(ROOT, &[1, 2, 3, 4, 5, 6, 7, 8, 9]), path);
        assert_eq!(cache.find(ROOT, &[1, 2, 3, 4, 5, 6, 7]), path[..1]);
        assert_eq!(cache.find(ROOT, &[1, 2, 3, 9]), []);
        assert_eq!(cache.find(Place::Below(path[0]), &[5, 6, 7, 8]), path[1..]);
    }

    #[test]
    fn namespaces_do_not_see_each_other() {
        let (mut cache, mut pool) = (PrefixCache::new(4), pool());
        insert_all(&mut cache, &mut pool, ROOT, &[1, 2, 3, 4]);
        for (client, salt) in [(2, 0), (1, 7)] {
            let other = Place::Root(Namespace { client: ClientKey(client), salt });
            assert_eq!(cache.find(other, &[1, 2, 3, 4]), []);
        }
    }

    #[test]
    fn evicts_the_oldest_leaf_and_never_what_is_borrowed() {
        let (mut cache, mut pool) = (PrefixCache::new(4), pool());
        let old = insert_all(&mut cache, &mut pool, ROOT, &[1, 2, 3, 4, 5, 6, 7, 8]);
        let new = insert_all(&mut cache, &mut pool, ROOT, &[9, 9, 9, 9]);
        assert_eq!((cache.evict(), cache.idle_blocks()), (None, 0));
        let blocks: Vec<_> = [old[1], old[0], new[0]].map(|id| cache.block(id).unwrap()).into();
        cache.give_back(&old);
        cache.give_back(&new);
        assert_eq!(cache.idle_blocks(), 3);
        assert_eq!(std::iter::from_fn(|| cache.evict()).collect::<Vec<_>>(), blocks);
        assert_eq!((cache.idle_blocks(), cache.len()), (0, 0));
    }

    #[test]
    fn a_second_copy_of_a_block_is_given_back() {
        let (mut cache, mut pool) = (PrefixCache::new(4), pool());
        let one = insert_all(&mut cache, &mut pool, ROOT, &[1, 2, 3, 4]);
        let two = insert_all(&mut cache, &mut pool, ROOT, &[1, 2, 3, 4]);
        assert_eq!((one == two, pool.stats().used), (true, 1));
        cache.give_back(&one);
        assert_eq!(cache.evict(), None, "the other one still borrows it");
    }

    proptest! {
        /// Against a model: a set of prefixes. Whatever is borrowed, inserted and evicted, the count of what is idle is
        /// right, blocks are neither lost nor handed out twice, and a path that is found is complete.
        #[test]
        fn blocks_are_conserved(
            ops in proptest::collection::vec((0u8..3, 0u32..3, proptest::collection::vec(0u32..2, 0..5)), 1..120),
        ) {
            let (mut cache, mut pool) = (PrefixCache::new(4), pool());
            let mut borrowed: Vec<(Place, Vec<u32>, Vec<NodeId>)> = Vec::new();
            let mut evicted = HashSet::new();
            for (op, salt, blocks) in ops {
                let root = Place::Root(Namespace { client: ClientKey(0), salt: u64::from(salt) });
                let tokens: Vec<u32> = blocks.iter().flat_map(|b| [*b; 4]).collect();
                match op {
                    0 => {
                        let found = cache.find(root, &tokens);
                        cache.borrow(&found);
                        let place = found.last().map_or(root, |id| Place::Below(*id));
                        let mut path = found.clone();
                        path.extend(insert_all(&mut cache, &mut pool, place, &tokens[found.len() * 4..]));
                        borrowed.push((root, tokens, path));
                    }
                    1 if !borrowed.is_empty() => {
                        let (root, tokens, path) = borrowed.swap_remove(salt as usize % borrowed.len());
                        prop_assert_eq!(cache.find(root, &tokens), path.clone(), "what is borrowed stays");
                        cache.give_back(&path);
                    }
                    _ => {
                        if let Some(block) = cache.evict() {
                            pool.release(block).unwrap();
                            evicted.insert(block);
                        }
                    }
                }
                let held: HashSet<NodeId> = borrowed.iter().flat_map(|(_, _, path)| path.iter().copied()).collect();
                prop_assert_eq!(cache.idle_blocks() as usize, cache.len() - held.len());
                prop_assert_eq!(pool.stats().used as usize, cache.len());
            }
            for (_, _, path) in borrowed {
                cache.give_back(&path);
            }
            while let Some(block) = cache.evict() {
                pool.release(block).unwrap();
            }
            prop_assert_eq!(pool.stats().used, 0);
        }
    }
}
