//! Keys and values in the paged cache.

#![expect(clippy::needless_range_loop, reason = "indices of register tiles; counted loops unroll")]

use std::marker::PhantomData;
use std::ops::Range;

use super::flash::{KeyValues, TILE, TileMemory};
use super::micro::{Listed, Strided};
use crate::kernels::cache::CacheView;
use crate::kernels::simd::storage::{F32, Storage};
use crate::kernels::simd::{Kernel, LANES, Simd};

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

/// One sequence's blocks of one head.
#[derive(Clone, Copy)]
pub(crate) struct Paged<'a, T> {
    cache: &'a CacheView<'a>,
    /// Block of each `block_size` positions.
    blocks: &'a [i32],
    geometry: &'a Geometry,
    head: usize,
    storage: PhantomData<T>,
}

impl<'a, T: Storage> Paged<'a, T> {
    #[inline(always)]
    pub(crate) fn new(cache: &'a CacheView<'a>, blocks: &'a [i32], geometry: &'a Geometry, head: usize) -> Self {
        Self { cache, blocks, geometry, head, storage: PhantomData }
    }

    /// Addresses of keys and values of the given places of a tile; the others are left alone.
    #[inline(always)]
    pub(crate) fn addresses(
        &self,
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
            let key = (g.key[0] + self.head * g.key[1] + first * g.key[2]) * T::BYTES;
            let value = (g.value[0] + self.head * g.value[1] + first * g.value[2]) * T::BYTES;
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
        let places = self.places;
        for group in places.start / LANES..places.end.div_ceil(LANES) {
            let first = group * LANES;
            let whole = places.start <= first && first + LANES <= places.end;
            for d in (0..self.dim).step_by(LANES) {
                let n = (self.dim - d).min(LANES);
                let mut square = [s.splat(0.0); LANES];
                // SAFETY: the promise of `new`; n elements from d on.
                unsafe {
                    if whole && n == LANES {
                        for i in 0..LANES {
                            square[i] = T::load(s, self.rows[first + i].add(d * T::BYTES));
                        }
                    } else {
                        for i in 0..LANES {
                            if places.contains(&(first + i)) {
                                square[i] = T::load_up_to(s, self.rows[first + i].add(d * T::BYTES), n);
                            }
                        }
                    }
                    let square = s.transpose(square);
                    if n == LANES {
                        for i in 0..LANES {
                            s.store(self.turned.add((d + i) * TILE + first), square[i]);
                        }
                    } else {
                        for i in 0..n {
                            s.store(self.turned.add((d + i) * TILE + first), square[i]);
                        }
                    }
                }
            }
        }
    }
}

/// Values are read where they are cached: right for few rows. Their number a row is a multiple of 16.
pub(crate) struct InPlace<'a, T>(pub(crate) Paged<'a, T>);

impl<T: Storage> KeyValues for InPlace<'_, T> {
    type Values = Listed<T>;

    #[inline(always)]
    unsafe fn load<S: Simd>(&self, s: S, start: usize, places: Range<usize>, memory: TileMemory<'_>) -> Self::Values {
        let mut keys = [std::ptr::null(); TILE];
        self.0.addresses(start, places.clone(), &mut keys, memory.addresses);
        // SAFETY: the caller's promise.
        unsafe { s.enter(Turn::<T>::new(&keys, places, self.0.geometry.key_dim, memory.keys)) };
        Listed::new(memory.addresses.as_ptr())
    }
}

/// Values are converted into scratch once a tile: right for many rows, and for any number of values.
pub(crate) struct Staged<'a, T>(pub(crate) Paged<'a, T>);

impl<T: Storage> KeyValues for Staged<'_, T> {
    type Values = Strided<F32>;

    #[inline(always)]
    unsafe fn load<S: Simd>(&self, s: S, start: usize, places: Range<usize>, memory: TileMemory<'_>) -> Self::Values {
        let mut keys = [std::ptr::null(); TILE];
        self.0.addresses(start, places.clone(), &mut keys, memory.addresses);
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
