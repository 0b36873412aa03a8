//! Which addresses of a device's memory are taken, as three kinds of allocator would have it. Numbers only: no memory.
//!
//! - *buddy*: powers of two, halved until a piece fits, joined again with the neighbour that it was halved from;
//! - *slab*: sizes up to [`SLAB`] come from slabs of equal pieces, one class per power of two; a slab goes back when it is empty;
//! - *best-fit*: the smallest gap that is large enough, joined with both neighbours when it comes back.
//!
//! Fragmentation is what these rules make of the sizes asked for; nothing of it is invented.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use qwen_chips::AllocatorKind;

/// Largest size that comes from a slab, and bytes of a slab.
const SLAB: u64 = 2 << 20;

/// A range of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) address: u64,
    /// What was taken, rounding included.
    pub(crate) bytes: u64,
}

/// Gaps by address and by size.
#[derive(Debug, Default)]
struct Gaps {
    by_address: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
}

impl Gaps {
    fn insert(&mut self, address: u64, bytes: u64) {
        self.by_address.insert(address, bytes);
        self.by_size.insert((bytes, address));
    }
    fn remove(&mut self, address: u64) -> Option<u64> {
        let bytes = self.by_address.remove(&address)?;
        self.by_size.remove(&(bytes, address));
        Some(bytes)
    }
    fn best(&self, bytes: u64) -> Option<(u64, u64)> {
        self.by_size.range((bytes, 0)..).next().map(|(size, address)| (*address, *size))
    }
    fn join(&mut self, mut address: u64, mut bytes: u64) {
        if let Some(next) = self.remove(address + bytes) {
            bytes += next;
        }
        let before = self.by_address.range(..address).next_back().map(|(start, size)| (*start, *size));
        if let Some((start, size)) = before.filter(|(start, size)| start + size == address) {
            self.remove(start);
            (address, bytes) = (start, bytes + size);
        }
        self.insert(address, bytes);
    }
}

/// A slab and its free pieces.
#[derive(Debug)]
struct Slab {
    class: u64,
    free: BTreeSet<u64>,
}

/// Taken and free addresses of one device.
#[derive(Debug)]
pub(crate) struct Allocator {
    kind: AllocatorKind,
    granularity: u64,
    padding: u64,
    capacity: u64,
    gaps: Gaps,
    /// Taken by callers: address to (bytes taken, bytes asked for).
    taken: HashMap<u64, (u64, u64)>,
    slabs: BTreeMap<u64, Slab>,
    used: u64,
    asked: u64,
}

impl Allocator {
    pub(crate) fn new(kind: AllocatorKind, capacity: u64, granularity: u64, padding: u64) -> Self {
        let granularity = granularity.max(1).next_power_of_two();
        let mut gaps = Gaps::default();
        let whole = capacity / granularity * granularity;
        match kind {
            // The largest powers of two that fit, aligned to themselves.
            AllocatorKind::Buddy => {
                let mut address = 0;
                while whole - address >= granularity {
                    let bytes = 1 << (whole - address).ilog2();
                    gaps.insert(address, bytes);
                    address += bytes;
                }
            }
            AllocatorKind::Slab | AllocatorKind::BestFit if whole > 0 => gaps.insert(0, whole),
            AllocatorKind::Slab | AllocatorKind::BestFit => {}
        }
        Self {
            kind,
            granularity,
            padding,
            capacity: whole,
            gaps,
            taken: HashMap::new(),
            slabs: BTreeMap::new(),
            used: 0,
            asked: 0,
        }
    }

    /// Takes so many bytes; none if there is no such piece in one.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<Piece> {
        self.take_padded(bytes, self.padding)
    }

    /// Takes a page of virtual memory: what an allocator adds to a piece of its own it does not add to a page.
    pub(crate) fn take_page(&mut self, bytes: u64) -> Option<Piece> {
        self.take_padded(bytes, 0)
    }

    fn take_padded(&mut self, bytes: u64, padding: u64) -> Option<Piece> {
        let wanted = bytes.checked_add(padding)?.checked_next_multiple_of(self.granularity)?;
        let piece = match self.kind {
            AllocatorKind::Buddy => self.halve(wanted.checked_next_power_of_two()?)?,
            AllocatorKind::Slab if wanted <= SLAB / 2 => self.cut_from_slab(wanted.next_power_of_two())?,
            AllocatorKind::Slab => self.cut(wanted.checked_next_multiple_of(SLAB)?)?,
            AllocatorKind::BestFit => self.cut(wanted)?,
        };
        self.used += piece.bytes;
        self.asked += bytes;
        self.taken.insert(piece.address, (piece.bytes, bytes));
        Some(piece)
    }

    /// Gives a piece back.
    pub(crate) fn give_back(&mut self, address: u64) {
        let Some((bytes, asked)) = self.taken.remove(&address) else { return };
        self.used -= bytes;
        self.asked -= asked;
        match self.kind {
            AllocatorKind::Buddy => self.join_buddies(address, bytes),
            AllocatorKind::Slab if bytes <= SLAB / 2 => self.give_to_slab(address),
            AllocatorKind::Slab | AllocatorKind::BestFit => self.gaps.join(address, bytes),
        }
    }

    fn cut(&mut self, bytes: u64) -> Option<Piece> {
        let (address, size) = self.gaps.best(bytes)?;
        self.gaps.remove(address);
        if size > bytes {
            self.gaps.insert(address + bytes, size - bytes);
        }
        Some(Piece { address, bytes })
    }

    fn halve(&mut self, bytes: u64) -> Option<Piece> {
        let (address, mut size) = self.gaps.best(bytes)?;
        self.gaps.remove(address);
        while size > bytes {
            size /= 2;
            self.gaps.insert(address + size, size);
        }
        Some(Piece { address, bytes })
    }

    fn join_buddies(&mut self, mut address: u64, mut bytes: u64) {
        // A neighbour of equal size below the one that both were halved from.
        while bytes.checked_mul(2).is_some_and(|both| both <= self.capacity)
            && self.gaps.by_address.get(&(address ^ bytes)) == Some(&bytes)
            && (address & !bytes) + 2 * bytes <= self.capacity
        {
            self.gaps.remove(address ^ bytes);
            address &= !bytes;
            bytes *= 2;
        }
        self.gaps.insert(address, bytes);
    }

    fn cut_from_slab(&mut self, class: u64) -> Option<Piece> {
        let open = self.slabs.iter_mut().find(|(_, slab)| slab.class == class && !slab.free.is_empty());
        let slab = match open {
            Some((_, slab)) => slab,
            None => {
                let whole = self.cut(SLAB)?;
                let free = (0..SLAB / class).map(|i| whole.address + i * class).collect();
                self.slabs.entry(whole.address).or_insert(Slab { class, free })
            }
        };
        slab.free.pop_first().map(|address| Piece { address, bytes: class })
    }

    fn give_to_slab(&mut self, address: u64) {
        let Some((start, slab)) = self.slabs.range_mut(..=address).next_back() else { return };
        slab.free.insert(address);
        let start = *start;
        if slab.free.len() as u64 == SLAB / slab.class {
            self.slabs.remove(&start);
            self.gaps.join(start, SLAB);
        }
    }

    /// Bytes taken by callers, rounding included.
    pub(crate) const fn used(&self) -> u64 {
        self.used
    }
    /// Bytes that can still be taken, in pieces.
    pub(crate) const fn free(&self) -> u64 {
        self.capacity - self.used
    }
    /// Bytes that rounding and padding took beside what was asked for, and free pieces of slabs, which nothing of another size can
    /// have.
    pub(crate) fn held(&self) -> u64 {
        let in_slabs: u64 = self.slabs.values().map(|slab| slab.free.len() as u64 * slab.class).sum();
        self.used - self.asked + in_slabs
    }
    /// Largest piece that can be had in one.
    pub(crate) fn largest(&self) -> u64 {
        self.gaps.by_size.last().map_or(0, |(bytes, _)| *bytes)
    }
    pub(crate) const fn capacity(&self) -> u64 {
        self.capacity
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KINDS: [AllocatorKind; 3] = [AllocatorKind::Buddy, AllocatorKind::Slab, AllocatorKind::BestFit];

    proptest! {
        /// Against a list of ranges: no byte is taken twice, and everything comes back.
        #[test]
        fn no_byte_is_taken_twice(
            kind in 0..3_usize,
            granularity in 0..12_u32,
            steps in proptest::collection::vec((any::<bool>(), 1..5_000_000_u64, any::<prop::sample::Index>()), 1..200),
        ) {
            let capacity = (96 << 20) + 12_345;
            let mut allocator = Allocator::new(KINDS[kind], capacity, 1 << granularity, 32);
            let empty = allocator.largest();
            let mut taken: Vec<Piece> = Vec::new();
            for (take, bytes, which) in steps {
                if take {
                    let Some(piece) = allocator.take(bytes) else { continue };
                    prop_assert!(piece.bytes >= bytes && piece.address + piece.bytes <= capacity);
                    prop_assert!(piece.address.is_multiple_of(1 << granularity));
                    let apart = |other: &Piece| {
                        piece.address + piece.bytes <= other.address || other.address + other.bytes <= piece.address
                    };
                    prop_assert!(taken.iter().all(apart));
                    taken.push(piece);
                } else if !taken.is_empty() {
                    let piece = taken.swap_remove(which.index(taken.len()));
                    allocator.give_back(piece.address);
                }
                prop_assert_eq!(allocator.used(), taken.iter().map(|piece| piece.bytes).sum::<u64>());
            }
            for piece in taken {
                allocator.give_back(piece.address);
            }
            prop_assert_eq!((allocator.used(), allocator.held(), allocator.largest()), (0, 0, empty));
        }
    }

    #[test]
    fn each_kind_fragments_in_its_own_way() {
        let mut buddy = Allocator::new(AllocatorKind::Buddy, 64 << 20, 512, 0);
        assert_eq!(buddy.take((16 << 20) + 1).map(|piece| piece.bytes), Some(32 << 20));
        assert_eq!((buddy.held(), buddy.take(33 << 20)), ((16 << 20) - 1, None));
        let mut slab = Allocator::new(AllocatorKind::Slab, 4 << 20, 512, 0);
        assert!(slab.take(600).is_some() && slab.take(1 << 20).is_some());
        // Two slabs of different classes: nothing large is left, though most is free.
        assert_eq!(slab.take(3 << 20), None);
        assert!(slab.free() > 2 << 20);
        let mut best = Allocator::new(AllocatorKind::BestFit, 10 << 20, 512, 0);
        let pieces: Vec<Piece> = (0..10).map(|_| best.take(1 << 20).unwrap()).collect();
        pieces.iter().step_by(2).for_each(|piece| best.give_back(piece.address));
        assert_eq!((best.free(), best.largest(), best.take(2 << 20)), (5 << 20, 1 << 20, None));
    }
}
