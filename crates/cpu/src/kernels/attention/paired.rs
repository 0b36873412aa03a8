//! Attention over a cache in pairs ([`in_pairs`](crate::kernels::cache::in_pairs)), in two ways.
//!
//! - [`AttendPairs`]: products of bfloat16 pairs. Queries, times the scale, and softmax weights are rounded to bfloat16, products
//!   are summed in f32 ([`super::pairs`]), two elements of a head or two positions at a time. Keys and values are read where
//!   they are cached, whatever the number of rows: a vector of keys is a pair of elements of sixteen positions, a vector of
//!   values a pair of positions by sixteen columns. Pairs of positions are fixed: an even one and the next. Of a pair that a row
//!   sees half of, the other half's value is replaced by zero. The sum of weights is that of the rounded ones, so that rounding
//!   all of them up alike changes nothing. Powers of two are summed instead of e, whose logarithm is part of the scale.
//!   Bound: in decode the bytes of the cache, in prefill products of pairs and a quarter as much for the softmax.
//! - [`Widened`]: products of f32, as over any other cache.

#![expect(clippy::needless_range_loop, reason = "indices of register tiles; counted loops unroll")]

use std::ops::Range;

use super::flash::{
    Blocks, Dims, KeyValues, Queries, SCORE_ROWS, SPLIT, Scratch, State, TILE, TileMemory, mask, run_of,
};
use super::micro::RowSource;
use super::paged::Geometry;
use super::pairs::{Lanes, PairKernel, Pairs};
use crate::kernels::cache::CacheView;
use crate::kernels::math::power_of_two;
use crate::kernels::simd::{LANES, Simd};

/// Vectors of a tile's positions.
const GROUPS: usize = TILE / LANES;
/// Bytes of a vector of pairs.
const VECTOR: usize = LANES * 4;
/// Values that are rounded at a time.
const ROUNDED: usize = 2 * LANES;
/// Up to so many rows of a head the next tile is asked for: with more the products take longer than the memory.
const AHEAD_ROWS: usize = 12;

/// Values in scratch of a row's rounded query, at most.
pub(super) const fn query_len(key_dim: usize) -> usize {
    key_dim.next_multiple_of(ROUNDED)
}

/// One sequence's keys and values in pairs, from one head on.
#[derive(Clone, Copy)]
pub(super) struct PairedCache<'a> {
    pub(super) cache: &'a CacheView<'a>,
    /// Block of each `block_size` positions.
    pub(super) blocks: &'a [i32],
    pub(super) geometry: &'a Geometry,
    pub(super) first_head: usize,
}

/// Where the sixteens of positions of a tile lie.
#[derive(Clone, Copy)]
struct Groups {
    keys: [*const u8; GROUPS],
    values: [*const u8; GROUPS],
}

impl Groups {
    /// The same for a head that lies so many bytes after.
    #[inline(always)]
    fn after(&self, keys: usize, values: usize) -> Self {
        let mut groups = *self;
        for i in 0..GROUPS {
            groups.keys[i] = groups.keys[i].wrapping_add(keys);
            groups.values[i] = groups.values[i].wrapping_add(values);
        }
        groups
    }
}

impl PairedCache<'_> {
    /// Bytes from head to head of keys and of values.
    #[inline(always)]
    const fn strides(&self) -> (usize, usize) {
        (self.geometry.key[1] * 2, self.geometry.value[1] * 2)
    }

    /// The first head's `groups` of the tile at `start`. Others get the address of one of them.
    #[inline(always)]
    fn locate(&self, start: usize, groups: Range<usize>) -> Groups {
        let (g, head) = (self.geometry, self.first_head);
        let mut found = Groups { keys: [std::ptr::null(); GROUPS], values: [std::ptr::null(); GROUPS] };
        for i in 0..GROUPS {
            let position = start + i.clamp(groups.start, groups.end - 1) * LANES;
            let (index, place) = (position / g.block_size, position % g.block_size);
            // The op's entry checked every block of a visible position.
            let block = self.cache.block(self.blocks[index] as usize);
            found.keys[i] = block.wrapping_add((g.key[0] + head * g.key[1] + place * g.key[2]) * 2);
            found.values[i] = block.wrapping_add((g.value[0] + head * g.value[1] + place * g.value[2]) * 2);
        }
        found
    }
}

/// Sixteens of positions that hold `places`.
#[inline(always)]
const fn groups_of(places: &Range<usize>) -> Range<usize> {
    places.start / LANES..places.end.div_ceil(LANES)
}

/// The right side of products: vectors of pairs.
trait Columns: Copy {
    /// Pairs that follow each other at one distance.
    const RUN: usize;
    /// Whether the next tile should be asked for.
    const AHEAD: bool;
    /// Bytes from pair to pair within a run.
    fn stride(self) -> usize;
    /// Where vector `vector` of pair `k` lies, and the same of the next tile.
    ///
    /// # Safety
    /// There are such.
    unsafe fn at(self, k: usize, vector: usize) -> [*const u8; 2];
}

/// Keys: pairs of elements by positions.
#[derive(Clone, Copy)]
struct Keys<'a, const AHEAD: bool> {
    now: &'a [*const u8; GROUPS],
    next: &'a [*const u8; GROUPS],
}

impl<const AHEAD: bool> Columns for Keys<'_, AHEAD> {
    const RUN: usize = usize::MAX >> 1;
    const AHEAD: bool = AHEAD;

    #[inline(always)]
    fn stride(self) -> usize {
        VECTOR
    }
    #[inline(always)]
    unsafe fn at(self, k: usize, vector: usize) -> [*const u8; 2] {
        // SAFETY: the caller's promise; unchecked, for a branch here would cost the loop its registers.
        let [now, next] = unsafe { [*self.now.get_unchecked(vector), *self.next.get_unchecked(vector)] };
        [now.wrapping_add(k * VECTOR), next.wrapping_add(k * VECTOR)]
    }
}

/// Values: pairs of positions by columns.
#[derive(Clone, Copy)]
struct Values<'a, const AHEAD: bool> {
    now: &'a [*const u8; GROUPS],
    next: &'a [*const u8; GROUPS],
    /// Bytes from pair to pair.
    stride: usize,
}

impl<const AHEAD: bool> Columns for Values<'_, AHEAD> {
    const RUN: usize = LANES / 2;
    const AHEAD: bool = AHEAD;

    #[inline(always)]
    fn stride(self) -> usize {
        self.stride
    }
    #[inline(always)]
    unsafe fn at(self, k: usize, vector: usize) -> [*const u8; 2] {
        let (group, at) = (k / Self::RUN, k % Self::RUN * self.stride + vector * VECTOR);
        // SAFETY: as for keys.
        let [now, next] = unsafe { [*self.now.get_unchecked(group), *self.next.get_unchecked(group)] };
        [now.wrapping_add(at), next.wrapping_add(at)]
    }
}

/// Rows of a register tile: they follow each other.
#[derive(Clone, Copy)]
struct PairRows<'a> {
    n: usize,
    /// The first, rounded, indexed by pair; bytes from row to row.
    a: (*const u8, usize),
    /// The first of C, values from row to row.
    c: (*mut f32, usize),
    /// On what C holds, when the product is added to it.
    factors: &'a [f32],
}

/// C = A B (or C = factors C + A B if `ADD`) over the given places, two of which are a pair, and vectors of columns.
///
/// # Safety
/// Rows of A and B are readable over the places, C writable over the columns.
#[inline(always)]
unsafe fn multiply<P: Pairs, B: Columns, const ADD: bool>(
    p: P,
    rows: &PairRows<'_>,
    b: B,
    places: &Range<usize>,
    vectors: &Range<usize>,
) {
    let mut vector = vectors.start;
    // SAFETY: the caller's promise, for each tile.
    unsafe {
        if <P::Simd as Simd>::TILE_VECTORS == 4 {
            while vector + 4 <= vectors.end {
                any_rows::<P, B, ADD, 4>(p, rows, b, places, vector);
                vector += 4;
            }
            while vector + 2 <= vectors.end {
                any_rows::<P, B, ADD, 2>(p, rows, b, places, vector);
                vector += 2;
            }
        }
        while vector < vectors.end {
            any_rows::<P, B, ADD, 1>(p, rows, b, places, vector);
            vector += 1;
        }
    }
}

/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn any_rows<P: Pairs, B: Columns, const ADD: bool, const C: usize>(
    p: P,
    rows: &PairRows<'_>,
    b: B,
    places: &Range<usize>,
    vector: usize,
) {
    match rows.n {
        1 => p.enter(Tile::<B, ADD, 1, C> { rows, b, places, vector }),
        n if P::TILE_ROWS == 1 || n == 0 => {}
        2 => p.enter(Tile::<B, ADD, 2, C> { rows, b, places, vector }),
        3 => p.enter(Tile::<B, ADD, 3, C> { rows, b, places, vector }),
        4 => p.enter(Tile::<B, ADD, 4, C> { rows, b, places, vector }),
        5 => p.enter(Tile::<B, ADD, 5, C> { rows, b, places, vector }),
        _ if P::TILE_ROWS > 5 => p.enter(Tile::<B, ADD, 6, C> { rows, b, places, vector }),
        _ => {}
    }
}

/// A register tile; made by [`any_rows`] alone.
struct Tile<'a, B, const ADD: bool, const R: usize, const C: usize> {
    rows: &'a PairRows<'a>,
    b: B,
    places: &'a Range<usize>,
    vector: usize,
}

impl<B: Columns, const ADD: bool, const R: usize, const C: usize> PairKernel for Tile<'_, B, ADD, R, C> {
    #[inline(always)]
    fn run<P: Pairs>(self, p: P) {
        let (s, rows, from, to) = (p.simd(), self.rows, self.places.start, self.places.end);
        let mut sums = [[s.splat(0.0); C]; R];
        // SAFETY: the promise of `multiply`'s caller.
        unsafe {
            if ADD {
                for r in 0..R {
                    let factor = s.splat(*rows.factors.get_unchecked(r));
                    for c in 0..C {
                        sums[r][c] = s.mul(s.load(self.result(r, c)), factor);
                    }
                }
            }
            if !from.is_multiple_of(2) {
                self.half(p, from / 2, true, &mut sums);
            }
            let (mut k, end) = (from.div_ceil(2), to / 2);
            while k < end {
                let stop = end.min((k / B::RUN + 1) * B::RUN);
                let (mut now, mut next) = ([std::ptr::null(); C], [std::ptr::null(); C]);
                for c in 0..C {
                    [now[c], next[c]] = self.b.at(k, self.vector + c);
                }
                let mut offset = 0;
                for k in k..stop {
                    let mut b = [p.ones(); C];
                    for c in 0..C {
                        if B::AHEAD {
                            s.prefetch(next[c].wrapping_add(offset));
                        }
                        b[c] = p.load(now[c].wrapping_add(offset));
                    }
                    for r in 0..R {
                        let a = p.broadcast(rows.a.0.wrapping_add(r * rows.a.1), k);
                        for c in 0..C {
                            sums[r][c] = p.add(sums[r][c], a, b[c]);
                        }
                    }
                    offset += self.b.stride();
                }
                k = stop;
            }
            if !to.is_multiple_of(2) {
                self.half(p, to / 2, false, &mut sums);
            }
            for r in 0..R {
                for c in 0..C {
                    s.store(self.result(r, c), sums[r][c]);
                }
            }
        }
    }
}

impl<B: Columns, const ADD: bool, const R: usize, const C: usize> Tile<'_, B, ADD, R, C> {
    /// Where the tile's vector `c` of row `r` belongs.
    #[inline(always)]
    const fn result(&self, r: usize, c: usize) -> *mut f32 {
        self.rows.c.0.wrapping_add(r * self.rows.c.1 + (self.vector + c) * LANES)
    }

    /// Adds one half of pair `k`.
    ///
    /// # Safety
    /// As [`multiply`].
    #[inline(always)]
    unsafe fn half<P: Pairs>(&self, p: P, k: usize, second: bool, sums: &mut [[Lanes<P>; C]; R]) {
        let rows = self.rows;
        for c in 0..C {
            // SAFETY: the caller's promise.
            unsafe {
                let b = p.load_half(self.b.at(k, self.vector + c)[0], second);
                for r in 0..R {
                    let a = p.broadcast(rows.a.0.wrapping_add(r * rows.a.1), k);
                    sums[r][c] = p.add(sums[r][c], a, b);
                }
            }
        }
    }
}

/// Attends `queries` over the part of `split` that they see; the result replaces `scratch.part`.
pub(super) struct AttendPairs<'a> {
    queries: &'a Queries,
    cache: PairedCache<'a>,
    dims: &'a Dims,
    split: usize,
    /// End of the positions that the caller attends over, this split and those that follow.
    until: usize,
    scratch: &'a Scratch,
}

impl<'a> AttendPairs<'a> {
    /// # Safety
    /// Queries are readable, the positions they see in the split are cached, and scratch has room for the rows, and in `extra`
    /// [`query_len`] values for each.
    #[inline(always)]
    pub(super) unsafe fn new(
        queries: &'a Queries,
        cache: PairedCache<'a>,
        dims: &'a Dims,
        split: usize,
        until: usize,
        scratch: &'a Scratch,
    ) -> Self {
        Self { queries, cache, dims, split, until, scratch }
    }
}

impl PairKernel for AttendPairs<'_> {
    #[inline(always)]
    fn run<P: Pairs>(self, p: P) {
        // SAFETY: the promise of `new`.
        unsafe {
            if self.queries.head_rows() <= AHEAD_ROWS { self.attend::<P, true>(p) } else { self.attend::<P, false>(p) }
        }
    }
}

impl AttendPairs<'_> {
    /// # Safety
    /// The promise of [`Self::new`].
    #[inline(always)]
    unsafe fn attend<P: Pairs, const AHEAD: bool>(&self, p: P) {
        let (s, queries, scratch, dims) = (p.simd(), self.queries, self.scratch, self.dims);
        let (rows, all_rows, value_dim) = (queries.head_rows(), queries.rows(), dims.value_dim);
        let seen = queries.all_seen();
        let (from, to) = (seen.start.max(self.split * SPLIT), seen.end.min((self.split + 1) * SPLIT));
        let rounded = Rounded { ptr: scratch.extra.cast(), stride: query_len(dims.key_dim) * P::ROUNDED };
        let mut factors = [1.0f32; SCORE_ROWS];
        let factors = factors.as_mut_ptr();
        let together = queries.tokens == 1 && all_rows <= SCORE_ROWS;
        let (key_stride, value_stride) = self.cache.strides();
        let (elements, columns) = (0..dims.key_dim, 0..value_dim / LANES);
        // SAFETY: the caller's promise; bands have at most SCORE_ROWS rows.
        unsafe {
            scratch.part.clear(all_rows, value_dim);
            for head in 0..queries.key_value_heads {
                rounded.fill(p, &queries.of_head(head), head * rows, dims);
            }
            let mut start = from / TILE * TILE;
            let mut located = None;
            while start < to {
                let places = from.max(start) - start..to.min(start + TILE) - start;
                let groups = groups_of(&places);
                let now = match located {
                    Some(located) => located,
                    None => self.cache.locate(start, groups.clone()),
                };
                let after = start + TILE;
                let next = if AHEAD && after < self.until {
                    let next = self.cache.locate(after, groups_of(&(0..self.until.min(after + TILE) - after)));
                    located = Some(next);
                    next
                } else {
                    now
                };
                let band = |head: usize, rows: Range<usize>, row: usize| PairBand {
                    queries: queries.of_head(head),
                    start,
                    rounded: rounded.row(head * queries.head_rows() + rows.start),
                    scores: scratch.scores.add(row * TILE),
                    factors: factors.add(row),
                    state: scratch.part.row(head * queries.head_rows() + rows.start, value_dim),
                    rows,
                };
                // Heads within a tile: the cache is read in the order in which it lies.
                if together {
                    // One token's rows all see the same: their softmax is done at once, so that heads don't wait for it.
                    for head in 0..queries.key_value_heads {
                        let (now, next) = (now.after(head * key_stride, 0), next.after(head * key_stride, 0));
                        let keys = Keys::<AHEAD> { now: &now.keys, next: &next.keys };
                        band(head, 0..rows, head * rows).score(p, keys, &elements, &groups);
                    }
                    let one = Queries { key_value_heads: 1, heads: all_rows, ..*queries };
                    PairBand { queries: one, ..band(0, 0..all_rows, 0) }.soften(p);
                    for head in 0..queries.key_value_heads {
                        let (now, next) = (now.after(0, head * value_stride), next.after(0, head * value_stride));
                        let values = Values::<AHEAD> { now: &now.values, next: &next.values, stride: value_dim * 4 };
                        band(head, 0..rows, head * rows).weigh(p, values, &columns);
                    }
                } else {
                    for head in 0..queries.key_value_heads {
                        let now = now.after(head * key_stride, head * value_stride);
                        let next = next.after(head * key_stride, head * value_stride);
                        let keys = Keys::<AHEAD> { now: &now.keys, next: &next.keys };
                        let values = Values::<AHEAD> { now: &now.values, next: &next.values, stride: value_dim * 4 };
                        for first in (0..rows).step_by(SCORE_ROWS) {
                            let band = band(head, first..rows.min(first + SCORE_ROWS), 0);
                            band.score(p, keys, &elements, &groups);
                            band.soften(p);
                            band.weigh(p, values, &columns);
                        }
                    }
                }
                start = after;
            }
            // Maxima leave as splits' merging wants them, as exponents of e.
            for first in (0..all_rows).step_by(LANES) {
                let (n, max) = ((all_rows - first).min(LANES), scratch.part.max.add(first));
                let x = s.mul(s.load_partial(max, n, 0.0), s.splat(std::f32::consts::LN_2));
                s.store_partial(max, n, x);
            }
        }
    }
}

/// Rounded queries in scratch.
#[derive(Clone, Copy)]
struct Rounded {
    ptr: *mut u8,
    /// Bytes from row to row.
    stride: usize,
}

impl Rounded {
    #[inline(always)]
    const fn row(self, i: usize) -> Self {
        Self { ptr: self.ptr.wrapping_add(i * self.stride), ..self }
    }

    /// Rounds a head's queries, times the scale, to rows from `first` on.
    ///
    /// # Safety
    /// Queries are readable, there is room.
    #[inline(always)]
    unsafe fn fill<P: Pairs>(self, p: P, queries: &Queries, first: usize, dims: &Dims) {
        let s = p.simd();
        let scale = s.splat(dims.scale * std::f32::consts::LOG2_E);
        let mut query = queries.walk(0);
        for row in 0..queries.head_rows() {
            let (from, to) = (query.next(), self.row(first + row).ptr);
            for d in (0..dims.key_dim).step_by(ROUNDED) {
                let left = dims.key_dim - d;
                // SAFETY: the caller's promise.
                unsafe {
                    let at = from.add(d);
                    let x = if left >= ROUNDED {
                        [s.load(at), s.load(at.add(LANES))]
                    } else {
                        let second = s.load_partial(at.wrapping_add(LANES), left.saturating_sub(LANES), 0.0);
                        [s.load_partial(at, left.min(LANES), 0.0), second]
                    };
                    p.round(to.add(d * P::ROUNDED), [s.mul(x[0], scale), s.mul(x[1], scale)]);
                }
            }
        }
    }
}

/// At most [`SCORE_ROWS`] rows of a key/value head over a tile; made by [`AttendPairs`] alone.
struct PairBand {
    queries: Queries,
    rows: Range<usize>,
    /// Position of the tile.
    start: usize,
    /// Of the first row, as the following.
    rounded: Rounded,
    scores: *mut f32,
    factors: *mut f32,
    state: State,
}

impl PairBand {
    /// Products with keys.
    ///
    /// # Safety
    /// Scores are the band's own, `keys` holds `groups`.
    #[inline(always)]
    unsafe fn score<P: Pairs, B: Columns>(&self, p: P, keys: B, elements: &Range<usize>, groups: &Range<usize>) {
        let mut row = self.rows.start;
        while row < self.rows.end {
            let n = run_of(&self.queries, row..self.rows.end, self.start, false);
            if !self.queries.places(row, self.start).is_empty() {
                let mut blocks = Blocks::new(row, n, P::TILE_ROWS);
                while let Some((first, n)) = blocks.next() {
                    let offset = first - self.rows.start;
                    let a = (self.rounded.row(offset).ptr.cast_const(), self.rounded.stride);
                    let c = (self.scores.wrapping_add(offset * TILE), TILE);
                    let tile = PairRows { n, a, c, factors: &[] };
                    // SAFETY: the caller's promise.
                    unsafe { multiply::<P, B, false>(p, &tile, keys, elements, groups) };
                }
            }
            row += n;
        }
    }

    /// Scores to rounded weights.
    ///
    /// # Safety
    /// Scores, factors and state are the band's own.
    #[inline(always)]
    unsafe fn soften<P: Pairs>(&self, p: P) {
        let (queries, start) = (&self.queries, self.start);
        let mut row = self.rows.start;
        while row < self.rows.end {
            let n = run_of(queries, row..self.rows.end, start, false);
            if !queries.places(row, start).is_empty() {
                let offset = row - self.rows.start;
                // SAFETY: the caller's promise.
                let factors = unsafe { std::slice::from_raw_parts_mut(self.factors.add(offset), n) };
                let (scores, state) = (self.scores.wrapping_add(offset * TILE), self.state.row(offset, 0));
                p.enter(SoftmaxPairs { queries, rows: row..row + n, start, scores, state, factors });
            }
            row += n;
        }
    }

    /// Adds weighted values.
    ///
    /// # Safety
    /// As [`Self::soften`]; `values` holds the places that the rows see.
    #[inline(always)]
    unsafe fn weigh<P: Pairs, B: Columns>(&self, p: P, values: B, columns: &Range<usize>) {
        let value_dim = columns.end * LANES;
        let mut row = self.rows.start;
        while row < self.rows.end {
            let n = run_of(&self.queries, row..self.rows.end, self.start, true);
            let places = self.queries.places(row, self.start);
            if !places.is_empty() {
                let mut blocks = Blocks::new(row, n, P::TILE_ROWS);
                while let Some((first, n)) = blocks.next() {
                    let offset = first - self.rows.start;
                    let a = (self.scores.wrapping_add(offset * TILE).cast_const().cast(), TILE * 4);
                    let c = (self.state.out.wrapping_add(offset * value_dim), value_dim);
                    // SAFETY: the caller's promise.
                    unsafe {
                        let factors = std::slice::from_raw_parts(self.factors.add(offset), n);
                        let tile = PairRows { n, a, c, factors };
                        multiply::<P, B, true>(p, &tile, values, &places, columns);
                    }
                }
            }
            row += n;
        }
    }
}

/// Rows over a tile: turns scores, as exponents of two, into rounded weights relative to the maximum so far, in their place,
/// updates maxima and sums, and gives the factors on what was summed before. Sixteen rows at a time, so that no row waits for
/// another's. Made by [`PairBand`] alone.
struct SoftmaxPairs<'a> {
    queries: &'a Queries,
    rows: Range<usize>,
    /// Of the tile.
    start: usize,
    /// [rows][TILE].
    scores: *mut f32,
    /// Of the first row.
    state: State,
    factors: &'a mut [f32],
}

impl PairKernel for SoftmaxPairs<'_> {
    #[inline(always)]
    fn run<P: Pairs>(self, p: P) {
        let (s, heads) = (p.simd(), self.queries.heads);
        let (mut token, mut head) = (self.rows.start / heads, self.rows.start % heads);
        let mut places = self.queries.places_of(token, self.start);
        for (block, factors) in self.factors.chunks_mut(LANES).enumerate() {
            let (first, n) = (block * LANES, factors.len());
            let mut seen = [(0, 0); LANES];
            let mut best = [f32::NEG_INFINITY; LANES];
            // SAFETY: scores and state are of these rows.
            unsafe {
                for i in 0..n {
                    if head == heads {
                        (token, head) = (token + 1, 0);
                        places = self.queries.places_of(token, self.start);
                    }
                    head += 1;
                    seen[i] = (places.start, places.end);
                    best[i] = best_of(s, self.scores.add((first + i) * TILE), &places);
                }
                let (max, sum) = (self.state.max.add(first), self.state.sum.add(first));
                let old = s.load_partial(max, n, f32::NEG_INFINITY);
                let new = s.max(s.of(best), old);
                // With nothing but -inf seen, something finite, so that 2^-inf is 0 and not NaN.
                let base = s.max(new, s.splat(f32::MIN));
                let factor = weight(s, s.sub(old, base));
                let bases = s.to_array(base);
                let (mut added, mut sums) = ([s.splat(0.0); LANES], [0.0; LANES]);
                for i in 0..n {
                    let scores = self.scores.add((first + i) * TILE);
                    added[i] = weigh_row(p, scores, seen[i], s.splat(bases[i]));
                }
                for (four, sums) in added.as_chunks::<4>().0.iter().zip(sums.as_chunks_mut::<4>().0) {
                    *sums = s.reduce_add_four(*four);
                }
                let sums = s.fma(s.load_partial(sum, n, 0.0), factor, s.of(sums));
                s.store_partial(max, n, new);
                s.store_partial(sum, n, sums);
                s.store_partial(factors.as_mut_ptr(), n, factor);
            }
        }
    }
}

/// Vector `v` of a row's scores, -inf where the row doesn't see the place.
///
/// # Safety
/// `scores` has a tile.
#[inline(always)]
unsafe fn visible<S: Simd>(s: S, scores: *const f32, v: usize, places: &Range<usize>) -> S::V {
    let first = v * LANES;
    // SAFETY: the caller's promise.
    let x =
        unsafe { s.load_partial(scores.add(first), places.end.saturating_sub(first).min(LANES), f32::NEG_INFINITY) };
    if first < places.start { mask(s, x, first, places) } else { x }
}

/// The largest of a row's scores.
///
/// # Safety
/// `scores` has a tile.
#[inline(always)]
unsafe fn best_of<S: Simd>(s: S, scores: *const f32, places: &Range<usize>) -> f32 {
    let mut best = s.splat(f32::NEG_INFINITY);
    // SAFETY: the caller's promise.
    unsafe {
        if places.start == 0 && places.end == TILE {
            for v in 0..GROUPS {
                best = s.max(s.load(scores.add(v * LANES)), best);
            }
        } else {
            for v in groups_of(places) {
                best = s.max(visible(s, scores, v, places), best);
            }
        }
    }
    s.reduce_max(best)
}

/// Exponents below this weigh nothing: less than the last place of any sum.
const WEIGHTLESS: f32 = -87.0;
/// Just above 2^[`WEIGHTLESS`], and nothing beside weights that count.
const NOTHING: f32 = 1e-26;

/// 2^x for a difference x to the maximum; exactly zero from about [`WEIGHTLESS`] on. NaN stays NaN.
#[inline(always)]
fn weight<S: Simd>(s: S, x: S::V) -> S::V {
    let weight = power_of_two(s, s.max(s.splat(WEIGHTLESS), x));
    s.max(s.splat(0.0), s.sub(weight, s.splat(NOTHING)))
}

/// Replaces a row's scores by 2^(score - base), rounded, and returns them added up to one vector.
///
/// # Safety
/// `scores` has a tile.
#[inline(always)]
unsafe fn weigh_row<P: Pairs>(p: P, scores: *mut f32, (from, to): (usize, usize), base: Lanes<P>) -> Lanes<P> {
    let s = p.simd();
    let (mut sum, ones, rounded) = (s.splat(0.0), p.ones(), scores.cast::<u8>());
    // SAFETY: the caller's promise; what is rounded needs no more room than what it is made of.
    unsafe {
        if from == 0 && to == TILE {
            for half in 0..TILE / ROUNDED {
                let at = scores.add(half * ROUNDED);
                let x = [s.sub(s.load(at), base), s.sub(s.load(at.add(LANES)), base)];
                let pairs = p.round(rounded.add(half * ROUNDED * P::ROUNDED), [weight(s, x[0]), weight(s, x[1])]);
                sum = p.add(sum, pairs, ones);
            }
        } else {
            let places = from..to;
            for half in from / ROUNDED..to.div_ceil(ROUNDED) {
                let first = visible(s, scores, 2 * half, &places);
                let second = visible(s, scores, 2 * half + 1, &places);
                let x = [weight(s, s.sub(first, base)), weight(s, s.sub(second, base))];
                sum = p.add(sum, p.round(rounded.add(half * ROUNDED * P::ROUNDED), x), ones);
            }
        }
    }
    sum
}

/// Keys and values in pairs, for products of f32.
pub(super) struct Widened<'a>(pub(super) PairedCache<'a>);

/// Keys, read as rows of elements.
#[derive(Clone, Copy)]
pub(super) struct WidenedKeys(*const *const u8);

impl RowSource for WidenedKeys {
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, k: usize, column: usize) -> S::V {
        // SAFETY: the caller's promise; columns are whole sixteens.
        unsafe { s.load_bf16_pairs((*self.0.add(column / LANES)).add(k / 2 * VECTOR).cast())[k % 2] }
    }
}

/// Values, read as rows of columns.
#[derive(Clone, Copy)]
pub(super) struct WidenedValues {
    groups: *const *const u8,
    /// Bytes from pair to pair.
    stride: usize,
}

impl RowSource for WidenedValues {
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, k: usize, column: usize) -> S::V {
        // SAFETY: the caller's promise.
        unsafe {
            let group = *self.groups.add(k / LANES);
            s.load_bf16_pairs(group.add(k % LANES / 2 * self.stride + column * 4).cast())[k % 2]
        }
    }
}

impl KeyValues for Widened<'_> {
    type Keys = WidenedKeys;
    type Values = WidenedValues;
    const SEPARATE: bool = true;

    #[inline(always)]
    unsafe fn load_keys<S: Simd>(
        &self,
        _: S,
        head: usize,
        start: usize,
        places: Range<usize>,
        memory: &mut TileMemory<'_>,
    ) -> Self::Keys {
        let found = self.0.locate(start, groups_of(&places)).after(head * self.0.strides().0, 0);
        let keys = &mut memory.addresses.room().keys;
        keys[..GROUPS].copy_from_slice(&found.keys);
        WidenedKeys(keys.as_ptr())
    }

    #[inline(always)]
    unsafe fn load_values<S: Simd>(
        &self,
        _: S,
        head: usize,
        start: usize,
        places: Range<usize>,
        memory: &mut TileMemory<'_>,
    ) -> Self::Values {
        let found = self.0.locate(start, groups_of(&places)).after(0, head * self.0.strides().1);
        let values = &mut memory.addresses.room().values;
        values[..GROUPS].copy_from_slice(&found.values);
        WidenedValues { groups: values.as_ptr(), stride: self.0.geometry.value_dim * 4 }
    }
}
