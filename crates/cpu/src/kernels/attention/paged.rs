//! Keys and values in the paged cache, in two ways.
//!
//! - [`InPlace`], for few rows (decode): a tile's keys are turned as they are cached ([key_dim][TILE] of two bytes, 64 shuffles
//!   for 16 positions by 32 elements), values read where they lie; both are converted where they are used, once for all query
//!   heads of the group. Meanwhile the next tile is asked for. Bound: bytes of the cache, at about ten cycles of work a line.
//! - [`Staged`], for many rows: both are converted into scratch once a tile. Bound: the rows' multiply-adds.

#![expect(clippy::needless_range_loop, reason = "indices of register tiles; counted loops unroll")]

use std::marker::PhantomData;
use std::ops::Range;

use super::flash::{KeyValues, TILE, TileMemory};
use super::micro::{Listed, RowSource, Strided};
use crate::kernels::cache::CacheView;
use crate::kernels::simd::storage::{F32, Storage};
use crate::kernels::simd::{HALVES, Kernel, LANES, Simd};

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

/// Where the keys and values of a tile lie.
#[derive(Clone, Copy)]
pub(crate) struct Places {
    /// Position of the first place.
    start: usize,
    pub(crate) keys: [*const u8; TILE],
    pub(crate) values: [*const u8; TILE],
}

impl Places {
    pub(crate) const NONE: Self =
        Self { start: usize::MAX, keys: [std::ptr::null(); TILE], values: [std::ptr::null(); TILE] };
}

/// Those of the tile at hand and of the one after it.
pub(crate) struct Addresses {
    both: [Places; 2],
    now: usize,
}

impl Addresses {
    pub(crate) const NONE: Self = Self { both: [Places::NONE; 2], now: 0 };

    /// Room for a tile.
    pub(crate) fn room(&mut self) -> &mut Places {
        &mut self.both[self.now]
    }

    fn now(&self) -> &Places {
        &self.both[self.now]
    }

    fn next(&self) -> &Places {
        &self.both[self.now ^ 1]
    }

    /// Goes to the tile at `start`, of which `places` are used; positions before `until` follow.
    #[inline(always)]
    fn go<T: Storage>(&mut self, paged: &Paged<'_, T>, start: usize, places: Range<usize>, until: usize) {
        self.now ^= 1;
        if self.both[self.now].start != start {
            paged.list(start, places.clone(), self.room());
        }
        let after = start + TILE;
        let followers = after.max(until).min(after + TILE) - after;
        let (known, next) = (self.now, self.now ^ 1);
        if followers > 0 {
            paged.list(after, 0..followers, &mut self.both[next]);
        } else {
            self.both[next] = Places { start: usize::MAX, ..self.both[known] };
        }
    }
}

/// Asks for the keys and values of a head in the tile to come while the tile at hand is worked on: asked for in bursts, lines
/// would wait for each other, and the work for them. So each step asks for its part, by pairs of lines, as some processors
/// fetch them: the turning of keys for the keys of even places, products with keys for the values of three places in four,
/// products with values for the rest.
#[derive(Clone, Copy)]
struct Ahead {
    keys: *const *const u8,
    values: *const *const u8,
    /// Bytes from the listed addresses to the head's.
    key: usize,
    value: usize,
}

impl Ahead {
    /// The pair of lines `at` bytes into the keys of a place.
    ///
    /// # Safety
    /// The list has the place.
    #[inline(always)]
    unsafe fn key<S: Simd>(self, s: S, place: usize, at: usize) {
        // SAFETY: the caller's promise.
        let line = unsafe { *self.keys.add(place) }.wrapping_add(self.key + at);
        s.prefetch(line);
        s.prefetch(line.wrapping_add(LINE));
    }

    /// The same of values.
    ///
    /// # Safety
    /// The list has the place.
    #[inline(always)]
    unsafe fn value<S: Simd>(self, s: S, place: usize, at: usize) {
        // SAFETY: the caller's promise.
        let line = unsafe { *self.values.add(place) }.wrapping_add(self.value + at);
        s.prefetch(line);
        s.prefetch(line.wrapping_add(LINE));
    }

    /// Before square `square` of vector `group` is turned.
    ///
    /// # Safety
    /// Both lists have a tile.
    #[inline(always)]
    unsafe fn turn<S: Simd>(self, s: S, group: usize, square: usize) {
        let first = group * LANES + square % 2 * (LANES / 2);
        for place in (first..first + LANES / 2).step_by(2) {
            // SAFETY: the caller's promise.
            unsafe { self.key(s, place, square / 2 * 2 * LINE) };
        }
    }
}

/// Turned keys as they were cached.
#[derive(Clone, Copy)]
pub(crate) struct TurnedKeys<T> {
    keys: Strided<T>,
    ahead: Ahead,
}

impl<T: Storage> RowSource for TurnedKeys<T> {
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, k: usize, column: usize) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { self.keys.load(s, k, column) }
    }
    #[inline(always)]
    unsafe fn ahead<S: Simd>(self, s: S, k: usize, column: usize) {
        if column == 0 && k % 4 != 3 {
            // SAFETY: the lists have a tile.
            unsafe { self.ahead.value(s, k % TILE, k / TILE * 2 * LINE) };
        }
    }
}

/// Values where they are cached.
#[derive(Clone, Copy)]
pub(crate) struct CachedValues<T> {
    values: Listed<T>,
    ahead: Ahead,
}

impl<T: Storage> RowSource for CachedValues<T> {
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, k: usize, column: usize) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { self.values.load(s, k, column) }
    }
    #[inline(always)]
    unsafe fn ahead<S: Simd>(self, s: S, k: usize, column: usize) {
        let at = column * T::BYTES;
        if at.is_multiple_of(2 * LINE) {
            // SAFETY: the lists have a tile.
            unsafe {
                if k % 2 == 1 {
                    self.ahead.key(s, k, at);
                } else if k % 4 == 2 {
                    self.ahead.value(s, k + 1, at);
                }
            }
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
    storage: PhantomData<T>,
}

impl<'a, T: Storage> Paged<'a, T> {
    #[inline(always)]
    pub(crate) fn new(cache: &'a CacheView<'a>, blocks: &'a [i32], geometry: &'a Geometry, first_head: usize) -> Self {
        Self { cache, blocks, geometry, first_head, storage: PhantomData }
    }

    /// Bytes from head 0 to a head's keys and values.
    #[inline(always)]
    fn offsets(&self, head: usize) -> (usize, usize) {
        let head = self.first_head + head;
        (head * self.geometry.key[1] * T::BYTES, head * self.geometry.value[1] * T::BYTES)
    }

    /// Lists a tile of head 0. Places that aren't used get the address of one that is.
    #[inline(always)]
    fn list(&self, start: usize, places: Range<usize>, list: &mut Places) {
        let first = places.start;
        list.start = start;
        self.locate(0, start, places.clone(), &mut list.keys, &mut list.values);
        if places.len() < TILE {
            for place in (0..first).chain(places.end..TILE) {
                list.keys[place] = list.keys[first];
                list.values[place] = list.values[first];
            }
        }
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
        self.locate(self.first_head + head, start, places, keys, values);
    }

    #[inline(always)]
    fn locate(
        &self,
        head: usize,
        start: usize,
        places: Range<usize>,
        keys: &mut [*const u8; TILE],
        values: &mut [*const u8; TILE],
    ) {
        let g = self.geometry;
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
    storage: PhantomData<T>,
}

impl<'a, T: Storage> Turn<'a, T> {
    /// # Safety
    /// The listed rows of `places` are readable, `turned` has [dim][TILE] places.
    #[inline(always)]
    pub(crate) unsafe fn new(rows: &'a [*const u8; TILE], places: Range<usize>, dim: usize, turned: *mut f32) -> Self {
        Self { rows, places, dim, turned, storage: PhantomData }
    }
}

impl<T: Storage> Kernel for Turn<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for group in self.places.start / LANES..self.places.end.div_ceil(LANES) {
            let first = group * LANES;
            let whole = self.places.start <= first && first + LANES <= self.places.end;
            let mut d = 0;
            // SAFETY: the promise of `new`; a whole group's addresses are all set.
            unsafe {
                if whole {
                    let rows = self.rows.as_ptr().add(first);
                    while d + LANES <= self.dim {
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

/// Turns two-byte elements as they are: element d of place p goes to `[d][p]`. Vectors of 16 places that hold none of `places`
/// are left alone.
struct TurnHalves<'a> {
    rows: &'a [*const u8; TILE],
    ahead: Ahead,
    places: Range<usize>,
    dim: usize,
    turned: *mut u16,
}

impl Kernel for TurnHalves<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for group in self.places.start / LANES..self.places.end.div_ceil(LANES) {
            let rows = &self.rows[group * LANES..][..LANES];
            let turned = self.turned.wrapping_add(group * LANES);
            let mut d = 0;
            // SAFETY: made by `InPlace::load` alone: all listed rows are readable, there is room for [dim][TILE].
            unsafe {
                while d < self.dim && self.dim >= HALVES {
                    // The last square may overlap the one before.
                    let first = d.min(self.dim - HALVES);
                    self.ahead.turn(s, group, d / HALVES);
                    s.turn_halves(rows.as_ptr(), self.ahead.key + first * 2, turned.add(first * TILE), TILE);
                    d += HALVES;
                }
                while d < self.dim {
                    for (i, row) in rows.iter().enumerate() {
                        *turned.add(d * TILE + i) = row.add(self.ahead.key + d * 2).cast::<u16>().read_unaligned();
                    }
                    d += 1;
                }
            }
        }
    }
}

/// Keys are turned as they are, values read where they are cached: right for few rows. The elements of a value row are a
/// multiple of 16.
pub(crate) struct InPlace<'a, T>(pub(crate) Paged<'a, T>);

impl<T: Storage> InPlace<'_, T> {
    #[inline(always)]
    fn ahead(&self, head: usize, addresses: &Addresses) -> Ahead {
        let ((key, value), next) = (self.0.offsets(head), addresses.next());
        Ahead { keys: next.keys.as_ptr(), values: next.values.as_ptr(), key, value }
    }
}

impl<T: Storage> KeyValues for InPlace<'_, T> {
    type Keys = TurnedKeys<T>;
    type Values = CachedValues<T>;
    const SEPARATE: bool = true;

    #[inline(always)]
    unsafe fn load_keys<S: Simd>(
        &self,
        s: S,
        head: usize,
        start: usize,
        places: Range<usize>,
        memory: &mut TileMemory<'_>,
    ) -> Self::Keys {
        if head == 0 {
            memory.addresses.go(&self.0, start, places.clone(), memory.until);
        }
        let (ahead, dim) = (self.ahead(head, memory.addresses), self.0.geometry.key_dim);
        let now = memory.addresses.now();
        if T::BYTES == 2 {
            s.enter(TurnHalves { rows: &now.keys, ahead, places, dim, turned: memory.keys.cast() });
        } else {
            let rows = now.keys.map(|row| row.wrapping_add(ahead.key));
            // SAFETY: the caller's promise.
            unsafe { s.enter(Turn::<T>::new(&rows, places, dim, memory.keys)) };
        }
        TurnedKeys { keys: Strided::new(memory.keys.cast_const().cast(), TILE), ahead }
    }

    #[inline(always)]
    unsafe fn load_values<S: Simd>(
        &self,
        _: S,
        head: usize,
        _: usize,
        _: Range<usize>,
        memory: &mut TileMemory<'_>,
    ) -> Self::Values {
        let ahead = self.ahead(head, memory.addresses);
        CachedValues { values: Listed::new(memory.addresses.now().values.as_ptr(), ahead.value), ahead }
    }
}

/// Both are converted into scratch once a tile: right for many rows, and for any number of values.
pub(crate) struct Staged<'a, T>(pub(crate) Paged<'a, T>);

impl<T: Storage> KeyValues for Staged<'_, T> {
    type Keys = Strided<F32>;
    type Values = Strided<F32>;
    const SEPARATE: bool = true;

    #[inline(always)]
    unsafe fn load_keys<S: Simd>(
        &self,
        s: S,
        head: usize,
        start: usize,
        places: Range<usize>,
        memory: &mut TileMemory<'_>,
    ) -> Self::Keys {
        let Places { keys, values, .. } = memory.addresses.room();
        self.0.addresses(head, start, places.clone(), keys, values);
        // SAFETY: the caller's promise.
        unsafe { s.enter(Turn::<T>::new(keys, places, self.0.geometry.key_dim, memory.keys)) };
        Strided::new(memory.keys.cast_const().cast(), TILE)
    }

    #[inline(always)]
    unsafe fn load_values<S: Simd>(
        &self,
        s: S,
        head: usize,
        start: usize,
        places: Range<usize>,
        memory: &mut TileMemory<'_>,
    ) -> Self::Values {
        let Places { keys, values, .. } = memory.addresses.room();
        self.0.addresses(head, start, places.clone(), keys, values);
        let dim = self.0.geometry.value_dim;
        let padded = dim.next_multiple_of(LANES);
        // SAFETY: the caller's promise.
        unsafe {
            for place in places {
                for d in (0..dim).step_by(LANES) {
                    let x = T::load_up_to(s, values[place].add(d * T::BYTES), dim - d);
                    s.store(memory.values.add(place * padded + d), x);
                }
            }
        }
        Strided::new(memory.values.cast_const().cast(), padded)
    }
}
