//! The expanded form: keys and values of one head and tile, made from the tile's latents and shared by a task's rows.
//!
//! Scratch of its own: the latents turned [latent][TILE], the values turned [value padded][TILE], some weight rows in f32.
//! Keys come out of the register tile as attention reads them ([nope][TILE]), below them the rotary keys as cached; values
//! are turned once more. Bound: 2 TILE (nope + value) latent multiply-adds a tile.

use std::marker::PhantomData;
use std::ops::Range;

use super::{EXPANDED_ROWS, KvB, MlaArgs, Problem};
use crate::kernels::attention::flash::{AttendSplit, KeyValues, Scratch, TILE, TileMemory};
use crate::kernels::attention::micro::{Strided, TILE_ROWS, TileRows, multiply};
use crate::kernels::attention::paged::{Paged, Turn};
use crate::kernels::attention::schedule::{Source, Task};
use crate::kernels::simd::storage::{F32, Storage, with_storage};
use crate::kernels::simd::{Kernel, LANES, Simd};

pub(super) struct Expanded<'a> {
    pub(super) args: &'a MlaArgs,
    pub(super) kv_b: KvB<'a>,
}

impl Expanded<'_> {
    pub(super) const fn extra_values(args: &MlaArgs) -> usize {
        (args.latent_dim + args.value_dim.next_multiple_of(LANES)) * TILE
            + TILE_ROWS * args.latent_dim.next_multiple_of(LANES)
    }
}

impl Source for Expanded<'_> {
    fn max_rows(&self) -> usize {
        EXPANDED_ROWS
    }

    fn extra(&self) -> usize {
        Self::extra_values(self.args)
    }

    #[inline(always)]
    unsafe fn attend<S: Simd>(
        &self,
        s: S,
        p: &Problem<'_>,
        task: &Task<'_>,
        split: usize,
        until: usize,
        scratch: &Scratch,
    ) {
        let source = Heads { args: self.args, kv_b: self.kv_b, problem: p, task };
        // SAFETY: the caller's promise.
        s.enter(unsafe { AttendSplit::new(&task.queries, source, &p.dims, split, until, scratch) });
    }
}

/// The heads of a task over one sequence.
struct Heads<'a> {
    args: &'a MlaArgs,
    kv_b: KvB<'a>,
    problem: &'a Problem<'a>,
    task: &'a Task<'a>,
}

impl KeyValues for Heads<'_> {
    type Keys = Strided<F32>;
    type Values = Strided<F32>;
    const SEPARATE: bool = false;

    #[inline(always)]
    unsafe fn load_keys<S: Simd>(
        &self,
        s: S,
        head: usize,
        start: usize,
        places: Range<usize>,
        memory: &mut TileMemory<'_>,
    ) -> Self::Keys {
        let (args, p) = (self.args, self.problem);
        let padded = args.value_dim.next_multiple_of(LANES);
        let latents = memory.extra;
        let values = latents.wrapping_add(args.latent_dim * TILE);
        let weights = values.wrapping_add(padded * TILE);
        with_storage!(p.cache.dtype, T => {
            let mut rows = [std::ptr::null(); TILE];
            Paged::<T>::new(&p.cache, self.task.blocks, &p.geometry, 0).addresses(
                0, start, places.clone(), &mut rows, &mut memory.addresses.room().values,
            );
            // SAFETY: the caller's promise; rows hold the latent, then the rotary key.
            unsafe {
                s.enter(Turn::<T>::new(&rows, places.clone(), args.latent_dim, latents));
                for place in places.clone() {
                    rows[place] = rows[place].add(args.latent_dim * T::BYTES);
                }
                let rotary = memory.keys.add(args.nope_dim * TILE);
                s.enter(Turn::<T>::new(&rows, places.clone(), args.rope_dim, rotary));
            }
        }, ());
        let head = (self.task.key_value_head + head) * (args.nope_dim + args.value_dim);
        let vectors = places.start / LANES..places.end.div_ceil(LANES);
        with_storage!(self.kv_b.dtype, W => {
            let row_bytes = args.latent_dim * W::BYTES;
            let weight = self.kv_b.bytes[head * row_bytes..].as_ptr();
            let expand = |rows: usize, weight: *const u8, out: *mut f32| Expand::<W> {
                weight, rows, latent_dim: args.latent_dim, latents, converted: weights, vectors: vectors.clone(), out,
                storage: PhantomData,
            };
            s.enter(expand(args.nope_dim, weight, memory.keys));
            s.enter(expand(args.value_dim, weight.wrapping_add(args.nope_dim * row_bytes), values));
        }, ());
        s.enter(TurnValues { values, padded, vectors, out: memory.values });
        Strided::new(memory.keys.cast_const().cast(), TILE)
    }

    /// They were made along with the keys.
    #[inline(always)]
    unsafe fn load_values<S: Simd>(
        &self,
        _: S,
        _: usize,
        _: usize,
        _: Range<usize>,
        memory: &mut TileMemory<'_>,
    ) -> Self::Values {
        Strided::new(memory.values.cast_const().cast(), self.args.value_dim.next_multiple_of(LANES))
    }
}

/// Weight rows times turned latents; made by [`Heads::load`] alone.
struct Expand<W> {
    weight: *const u8,
    rows: usize,
    latent_dim: usize,
    /// [latent][TILE].
    latents: *const f32,
    /// Room for some weight rows in f32.
    converted: *mut f32,
    vectors: Range<usize>,
    /// [rows][TILE].
    out: *mut f32,
    storage: PhantomData<W>,
}

impl<W: Storage> Kernel for Expand<W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let padded = self.latent_dim.next_multiple_of(LANES);
        let latents = Strided::<F32>::new(self.latents.cast(), TILE);
        let mut row = 0;
        while row < self.rows {
            let n = S::TILE_ROWS.min(self.rows - row);
            let mut tile = TileRows { n, ..TileRows::EMPTY };
            // SAFETY: weight rows, their room and the output are as large as `Heads::load` made them.
            unsafe {
                for i in 0..n {
                    let converted = self.converted.add(i * padded);
                    for d in (0..self.latent_dim).step_by(LANES) {
                        let at = ((row + i) * self.latent_dim + d) * W::BYTES;
                        s.store(converted.add(d), W::load_up_to(s, self.weight.add(at), self.latent_dim - d));
                    }
                    tile.a[i] = converted;
                    tile.c[i] = self.out.add((row + i) * TILE);
                }
                multiply::<S, _, false>(s, &tile, latents, 0..self.latent_dim, self.vectors.clone());
            }
            row += n;
        }
    }
}

/// [padded][TILE] to [TILE][padded]; made by [`Heads::load`] alone.
struct TurnValues {
    values: *const f32,
    padded: usize,
    vectors: Range<usize>,
    out: *mut f32,
}

impl Kernel for TurnValues {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for vector in self.vectors {
            let first = vector * LANES;
            for d in (0..self.padded).step_by(LANES) {
                let mut square = [s.splat(0.0); LANES];
                // SAFETY: both hold `padded` by TILE values.
                unsafe {
                    for (i, row) in square.iter_mut().enumerate() {
                        *row = s.load(self.values.add((d + i) * TILE + first));
                    }
                    for (i, row) in s.transpose(square).into_iter().enumerate() {
                        s.store(self.out.add((first + i) * self.padded + d), row);
                    }
                }
            }
        }
    }
}
