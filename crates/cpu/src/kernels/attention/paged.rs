//! Keys and values in the paged cache.

#![expect(clippy::needless_range_loop, reason = "indices of register tiles; counted loops unroll")]

use std::marker::PhantomData;
use std::ops::Range;

use super::flash::{KeyValues, TILE, TileMemory};
use super::micro::{Listed, Strided};
use crate::kernels::cache::CacheView;
use crate::kernels::simd::storage::{F32, Storage};
use crate::kernels::simd::{Kernel, LANES, Simd};

/// Bytes of a cache line.
const LINE: usize = 64;

/// Where a head's keys and values lie in a block, in values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Geometry {
    pub(crate) block_size: usize,
    /// First key of head 0, from head to head, from token to token.
    pub(crate) key: [usize; 3],
    /// The same of values.
    pub(crate) value: [usize; 3],
    pub(crate) key_dim: usize,
    pub(crate) value_dim: usize,
    /// Cached values of a token.
    pub(crate) token_values: usize,
}

impl Geometry {
    /// Keys of all heads, then values of all heads.
    pub(crate) const fn separate(heads: usize, block_size: usize, key_dim: usize, value_dim: usize) -> Self {
        Self {
            block_size,
            key: [0, block_size * key_dim, key_dim],
            value: [heads * block_size * key_dim, block_size * value_dim, value_dim],
            key_dim,
            value_dim,
            token_values: heads * (key_dim + value_dim),
        }
    }

    /// One row a token, of which the first `value_dim` elements are also the values.
    pub(crate) const fn joined(block_size: usize, key_dim: usize, value_dim: usize) -> Self {
        let row = [0, 0, key_dim];
        Self { block_size, key: row, value: row, key_dim, value_dim, token_values: key_dim }
    }
}

/// The cache lines of a tile to come, asked for in portions while the tile at hand is turned: with few rows there is too
/// little work on a tile to hide the way from memory, and asked for all at once the lines would wait for each other.
pub(crate) struct Ahead<'a> {
    cache: &'a CacheView<'a>,
    /// The tile's blocks.
    blocks: &'a [i32],
    lines_per_block: usize,
    /// Next line of those of the blocks together, and the end of this head's share.
    line: usize,
    end: usize,
    portion: usize,
}

impl<'a> Ahead<'a> {
    /// The share of head `head` of `heads`, in `portions`.
    #[inline(always)]
    fn new<T>(paged: &Paged<'a, T>, start: usize, head: usize, portions: usize) -> Self {
        let (size, blocks) = (paged.geometry.block_size, paged.blocks);
        let first = (start / size).min(blocks.len());
        let blocks = &blocks[first..(start + TILE).div_ceil(size).clamp(first, blocks.len())];
        let lines_per_block = paged.cache.block_bytes / LINE;
        let lines = blocks.len() * lines_per_block;
        let (line, end) = (lines * head / paged.heads, lines * (head + 1) / paged.heads);
        let portion = (end - line).div_ceil(portions.max(1));
        Self { cache: paged.cache, blocks, lines_per_block, line, end, portion }
    }

    /// Asks for the next portion.
    #[inline(always)]
    fn step<S: Simd>(&mut self, s: S) {
        let stop = self.end.min(self.line + self.portion);
        while self.line < stop {
            let (index, first) = (self.line / self.lines_per_block, self.line % self.lines_per_block);
            // An address to prefetch need not exist: entries beyond the sequence may hold anything.
            let offset = (self.blocks[index] as usize).wrapping_mul(self.cache.block_bytes);
            let block = self.cache.ptr.wrapping_add(offset);
            let n = (stop - self.line).min(self.lines_per_block - first);
            for line in first..first + n {
                s.prefetch(block.wrapping_add(line * LINE));
            }
            self.line += n;
        }
    }
}

/// One sequence's blocks, from one head on.
#[derive(Clone, Copy)]
pub(crate) struct Paged<'a, T> {
    cache: &'a CacheView<'a>,
    /// Block of each `block_size` positions.
    blocks: &'a [i32],
    geometry: &'a Geometry,
    first_head: usize,
    /// Heads that are read.
    heads: usize,
    storage: PhantomData<T>,
}

impl<'a, T: Storage> Paged<'a, T> {
    #[inline(always)]
    pub(crate) fn new(
        cache: &'a CacheView<'a>,
        blocks: &'a [i32],
        geometry: &'a Geometry,
        first_head: usize,
        heads: usize,
    ) -> Self {
        Self { cache, blocks, geometry, first_head, heads, storage: PhantomData }
    }

    /// Whether all of a block is read.
    #[inline(always)]
    fn reads_all(&self) -> bool {
        self.heads * (self.geometry.key_dim + self.geometry.value_dim) >= self.geometry.token_values
    }

    /// Addresses of keys and values of the given places of a tile; the others are left alone.
    #[inline(always)]
    pub(crate) fn addresses(
        &self,
        head: usize,
        start: usize,
        places: Range<usize>,
        keys: &mut [*const u8; TILE],
        values: &mut [*const u8; TILE],
    ) {
        let (g, head) = (self.geometry, self.first_head + head);
        let mut place = places.start;
        while place < places.end {
            let (index, first) = ((start + place) / g.block_size, (start + place) % g.block_size);
            let n = (g.block_size - first).min(places.end - place);
            // The op's entry checked every block of a visible position.
            let block = self.cache.block(self.blocks[index] as usize);
            let key = (g.key[0] + head * g.key[1] + first * g.key[2]) * T::BYTES;
            let value = (g.value[0] + head * g.value[1] + first * g.value[2]) * T::BYTES;
            for i in 0..n {
                keys[place + i] = block.wrapping_add(key + i * g.key[2] * T::BYTES);
                values[place + i] = block.wrapping_add(value + i * g.value[2] * T::BYTES);
            }
            place += n;
        }
    }
}

/// Turns the first `dim` elements of listed rows: element d of place p goes to `[d][p]`. Vectors of 16 places that hold
/// none of `places` are left alone, other missing places become zero.
pub(crate) struct Turn<'a, T> {
    rows: &'a [*const u8; TILE],
    places: Range<usize>,
    dim: usize,
    turned: *mut f32,
    ahead: Option<Ahead<'a>>,
    storage: PhantomData<T>,
}

impl<'a, T: Storage> Turn<'a, T> {
    /// # Safety
    /// The listed rows of `places` are readable, `turned` has [dim][TILE] places.
    #[inline(always)]
    pub(crate) unsafe fn new(rows: &'a [*const u8; TILE], places: Range<usize>, dim: usize, turned: *mut f32) -> Self {
        Self { rows, places, dim, turned, ahead: None, storage: PhantomData }
    }

    /// Asks for a tile to come meanwhile.
    #[inline(always)]
    fn with_ahead(self, ahead: Option<Ahead<'a>>) -> Self {
        Self { ahead, ..self }
    }
}

impl<T: Storage> Kernel for Turn<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        for group in self.places.start / LANES..self.places.end.div_ceil(LANES) {
            let first = group * LANES;
            let whole = self.places.start <= first && first + LANES <= self.places.end;
            let mut d = 0;
            // SAFETY: the promise of `new`; a whole group's addresses are all set.
            unsafe {
                if whole {
                    let rows = self.rows.as_ptr().add(first);
                    while d + LANES <= self.dim {
                        if let Some(ahead) = &mut self.ahead {
                            ahead.step(s);
                        }
                        turn_square::<S, T>(s, rows, d, self.turned.add(d * TILE + first));
                        d += LANES;
                    }
                }
                while d < self.dim {
                    self.turn_part(s, first, d);
                    d += LANES;
                }
            }
        }
    }
}

/// Elements `d..d + 16` of sixteen rows.
///
/// # Safety
/// They are readable; `turned` has sixteen rows of TILE places, of which the first sixteen are written.
#[inline(always)]
unsafe fn turn_square<S: Simd, T: Storage>(s: S, rows: *const *const u8, d: usize, turned: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        let row = |i: usize| (*rows.add(i)).add(d * T::BYTES);
        let square = s.transpose([
            T::load(s, row(0)),
            T::load(s, row(1)),
            T::load(s, row(2)),
            T::load(s, row(3)),
            T::load(s, row(4)),
            T::load(s, row(5)),
            T::load(s, row(6)),
            T::load(s, row(7)),
            T::load(s, row(8)),
            T::load(s, row(9)),
            T::load(s, row(10)),
            T::load(s, row(11)),
            T::load(s, row(12)),
            T::load(s, row(13)),
            T::load(s, row(14)),
            T::load(s, row(15)),
        ]);
        for i in 0..LANES {
            s.store(turned.add(i * TILE), square[i]);
        }
    }
}

impl<T: Storage> Turn<'_, T> {
    /// A square of which places or elements are missing: they become zero, rows beyond the last element stay as they are.
    ///
    /// # Safety
    /// As [`Self::new`].
    #[inline(always)]
    unsafe fn turn_part<S: Simd>(&self, s: S, first: usize, d: usize) {
        let n = (self.dim - d).min(LANES);
        let mut square = [s.splat(0.0); LANES];
        // SAFETY: the caller's promise; n elements from d on.
        unsafe {
            for i in 0..LANES {
                if self.places.contains(&(first + i)) {
                    square[i] = T::load_up_to(s, self.rows[first + i].add(d * T::BYTES), n);
                }
            }
            let square = s.transpose(square);
            for i in 0..n {
                s.store(self.turned.add((d + i) * TILE + first), square[i]);
            }
        }
    }
}

/// Values are read where they are cached: right for few rows. Their number a row is a multiple of 16.
pub(crate) struct InPlace<'a, T>(pub(crate) Paged<'a, T>);

impl<T: Storage> KeyValues for InPlace<'_, T> {
    type Values = Listed<T>;

    #[inline(always)]
    unsafe fn load<S: Simd>(
        &self,
        s: S,
        head: usize,
        start: usize,
        places: Range<usize>,
        memory: TileMemory<'_>,
    ) -> Self::Values {
        let mut keys = [std::ptr::null(); TILE];
        self.0.addresses(head, start, places.clone(), &mut keys, memory.addresses);
        let squares = TILE / LANES * (self.0.geometry.key_dim / LANES);
        let ahead = self.0.reads_all().then(|| Ahead::new(&self.0, start + TILE, head, squares));
        // SAFETY: the caller's promise.
        unsafe { s.enter(Turn::<T>::new(&keys, places, self.0.geometry.key_dim, memory.keys).with_ahead(ahead)) };
        Listed::new(memory.addresses.as_ptr())
    }
}

/// Values are converted into scratch once a tile: right for many rows, and for any number of values.
pub(crate) struct Staged<'a, T>(pub(crate) Paged<'a, T>);

impl<T: Storage> KeyValues for Staged<'_, T> {
    type Values = Strided<F32>;

    #[inline(always)]
    unsafe fn load<S: Simd>(
        &self,
        s: S,
        head: usize,
        start: usize,
        places: Range<usize>,
        memory: TileMemory<'_>,
    ) -> Self::Values {
        let mut keys = [std::ptr::null(); TILE];
        self.0.addresses(head, start, places.clone(), &mut keys, memory.addresses);
        let dim = self.0.geometry.value_dim;
        let padded = dim.next_multiple_of(LANES);
        // SAFETY: the caller's promise.
        unsafe {
            s.enter(Turn::<T>::new(&keys, places.clone(), self.0.geometry.key_dim, memory.keys));
            for place in places.start..places.end {
                for d in (0..dim).step_by(LANES) {
                    let x = T::load_up_to(s, memory.addresses[place].add(d * T::BYTES), dim - d);
                    s.store(memory.values.add(place * padded + d), x);
                }
            }
        }
        Strided::new(memory.values.cast_const().cast(), padded)
    }
}
