//! Attention of some query rows over one split of a sequence, by online softmax.
//!
//! Cached positions are taken in tiles of [`TILE`] and splits of [`SPLIT`] at fixed absolute positions. A split starts from
//! nothing and updates maximum, sum and weighted values once a tile; splits are merged in order. Which rows share a tile, who
//! computes which split and where blocks lie therefore never shows in a row's bits: prefill in large tiles and decode with
//! splits on several threads agree exactly. A position that a row may not see takes no part, not even as a zero.
//!
//! Layout in scratch: a tile's keys turned ([key_dim][TILE], in f32 or as cached, so that a vector is 16 positions), its values [TILE][value_dim
//! padded to 16] unless they are read where they are cached, scores [SCORE_ROWS][TILE], and per row maximum, sum and output.

#![expect(clippy::needless_range_loop, reason = "indices of register tiles; counted loops unroll")]

use std::ops::Range;

use super::micro::{RowSource, TileRows, multiply};
use super::paged::Addresses;
use crate::kernels::math::exp_bounded;
use crate::kernels::simd::{Kernel, LANES, Simd};

/// Positions of a tile.
pub(crate) const TILE: usize = 64;
/// Positions of a split.
pub(crate) const SPLIT: usize = 256;
/// Rows whose scores are kept at a time.
pub(super) const SCORE_ROWS: usize = 48;
/// Vectors of a tile's positions.
const TILE_VECTORS: usize = TILE / LANES;

/// Query rows: `tokens` consecutive tokens of one sequence by `heads` heads that share keys and values, token by token; and
/// the same of further key/value heads. A state's rows are ordered so: key/value head, token, head.
#[derive(Clone, Copy)]
pub(crate) struct Queries {
    /// First head of the first token.
    pub(crate) ptr: *const f32,
    /// Values from token to token.
    pub(crate) token_stride: usize,
    /// Values from head to head.
    pub(crate) head_stride: usize,
    /// Values from key/value head to key/value head.
    pub(crate) group_stride: usize,
    pub(crate) key_value_heads: usize,
    pub(crate) tokens: usize,
    /// Heads of a key/value head.
    pub(crate) heads: usize,
    /// Position of the first token.
    pub(crate) position: usize,
    /// Positions that a token sees, 0 for all.
    pub(crate) window: usize,
}

impl Queries {
    /// Rows of a key/value head.
    #[inline(always)]
    pub(crate) fn head_rows(&self) -> usize {
        self.tokens * self.heads
    }
    /// Rows of all.
    #[inline(always)]
    pub(crate) fn rows(&self) -> usize {
        self.key_value_heads * self.head_rows()
    }
    /// Token and query head of a row, counted from the first.
    #[inline(always)]
    pub(crate) fn place(&self, row: usize, group: usize) -> (usize, usize) {
        let (head, i) = (row / self.head_rows(), row % self.head_rows());
        (i / self.heads, head * group + i % self.heads)
    }
    /// The rows of one key/value head.
    #[inline(always)]
    pub(super) fn of_head(&self, head: usize) -> Self {
        Self { ptr: self.ptr.wrapping_add(head * self.group_stride), key_value_heads: 1, ..*self }
    }
    /// The rows of one key/value head from row `i` on.
    #[inline(always)]
    pub(super) fn walk(&self, i: usize) -> Walk<'_> {
        let (token, head) = (i / self.heads, i % self.heads);
        Walk { queries: self, token: self.ptr.wrapping_add(token * self.token_stride), head }
    }
    /// Positions that token `t` sees.
    #[inline(always)]
    pub(crate) fn seen(&self, t: usize) -> Range<usize> {
        let end = self.position + t + 1;
        let start = if self.window == 0 { 0 } else { end.saturating_sub(self.window) };
        start..end
    }
    /// Positions that any row sees.
    #[inline(always)]
    pub(crate) fn all_seen(&self) -> Range<usize> {
        self.seen(0).start..self.seen(self.tokens - 1).end
    }
    /// Places in the tile at `start` that row `i` sees.
    #[inline(always)]
    pub(super) fn places(&self, i: usize, start: usize) -> Range<usize> {
        self.places_of(i / self.heads, start)
    }
    /// Places in the tile at `start` that token `t` sees.
    #[inline(always)]
    pub(super) fn places_of(&self, t: usize, start: usize) -> Range<usize> {
        let seen = self.seen(t);
        seen.start.max(start).min(start + TILE) - start..seen.end.max(start).min(start + TILE) - start
    }
}

/// Query rows one after the other, without a division for each.
pub(super) struct Walk<'a> {
    queries: &'a Queries,
    /// First head of the token.
    token: *const f32,
    head: usize,
}

impl Walk<'_> {
    #[inline(always)]
    pub(super) fn next(&mut self) -> *const f32 {
        if self.head == self.queries.heads {
            (self.token, self.head) = (self.token.wrapping_add(self.queries.token_stride), 0);
        }
        self.head += 1;
        self.token.wrapping_add((self.head - 1) * self.queries.head_stride)
    }
}

/// What is fixed for all rows of an op.
#[derive(Clone, Copy)]
pub(crate) struct Dims {
    pub(crate) key_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) scale: f32,
}

impl Dims {
    /// Values of an output row in scratch.
    #[inline(always)]
    pub(crate) const fn padded(&self) -> usize {
        self.value_dim.next_multiple_of(LANES)
    }
}

/// Running maximum, sum and output of rows.
#[derive(Clone, Copy)]
pub(crate) struct State {
    pub(crate) max: *mut f32,
    pub(crate) sum: *mut f32,
    pub(crate) out: *mut f32,
}

/// A task's scratch memory.
#[derive(Clone, Copy)]
pub(crate) struct Scratch {
    keys: *mut f32,
    values: *mut f32,
    pub(super) scores: *mut f32,
    /// Of the split at hand.
    pub(crate) part: State,
    /// Of all splits so far.
    pub(crate) total: State,
    /// For the source of keys and values.
    pub(crate) extra: *mut f32,
}

impl Scratch {
    /// Values needed for `rows` query rows and `extra` values of the source's own.
    pub(crate) const fn len(dims: &Dims, rows: usize, extra: usize) -> usize {
        let state = rows.next_multiple_of(LANES) * (2 + dims.padded());
        (dims.key_dim + dims.padded() + SCORE_ROWS) * TILE + 2 * state + extra.next_multiple_of(LANES)
    }

    /// Cuts scratch memory up.
    pub(crate) fn new(memory: *mut f32, dims: &Dims, rows: usize) -> Self {
        let mut next = memory;
        let mut take = |len: usize| {
            let start = next;
            next = next.wrapping_add(len);
            start
        };
        let rows = rows.next_multiple_of(LANES);
        Self {
            keys: take(dims.key_dim * TILE),
            values: take(dims.padded() * TILE),
            scores: take(SCORE_ROWS * TILE),
            part: State { max: take(rows), sum: take(rows), out: take(rows * dims.padded()) },
            total: State { max: take(rows), sum: take(rows), out: take(rows * dims.padded()) },
            extra: take(0),
        }
    }
}

/// Scratch that a source fills for a tile.
pub(crate) struct TileMemory<'a> {
    /// [key_dim][TILE]; places outside the asked range are zero or untouched by readers.
    pub(crate) keys: *mut f32,
    /// [TILE][padded], if the source wants it.
    pub(crate) values: *mut f32,
    /// Where the tile is cached.
    pub(crate) addresses: &'a mut Addresses,
    /// End of the positions that are attended over next.
    pub(crate) until: usize,
    /// The source's own.
    pub(crate) extra: *mut f32,
}

/// Where a sequence's keys and values come from.
pub(crate) trait KeyValues {
    /// How turned keys are read.
    type Keys: RowSource;
    /// How values are read.
    type Values: RowSource;
    /// Whether keys of several heads may be loaded, one after the other, before values.
    const SEPARATE: bool;
    /// Provides `places` of the keys of the tile at position `start` of a key/value head, turned. Heads are counted from the
    /// task's first, which comes first.
    ///
    /// # Safety
    /// The positions are cached; `memory` has room.
    unsafe fn load_keys<S: Simd>(
        &self,
        s: S,
        head: usize,
        start: usize,
        places: Range<usize>,
        memory: &mut TileMemory<'_>,
    ) -> Self::Keys;
    /// The values that belong to keys loaded before.
    ///
    /// # Safety
    /// As [`Self::load_keys`].
    unsafe fn load_values<S: Simd>(
        &self,
        s: S,
        head: usize,
        start: usize,
        places: Range<usize>,
        memory: &mut TileMemory<'_>,
    ) -> Self::Values;
}

impl State {
    /// Nothing seen yet.
    ///
    /// # Safety
    /// There is room for `rows` rows.
    #[inline(always)]
    pub(crate) unsafe fn clear(&self, rows: usize, padded: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            std::slice::from_raw_parts_mut(self.max, rows).fill(f32::NEG_INFINITY);
            std::slice::from_raw_parts_mut(self.sum, rows).fill(0.0);
            std::slice::from_raw_parts_mut(self.out, rows * padded).fill(0.0);
        }
    }

    /// The state of row `i`.
    #[inline(always)]
    pub(crate) fn row(&self, i: usize, padded: usize) -> Self {
        Self { max: self.max.wrapping_add(i), sum: self.sum.wrapping_add(i), out: self.out.wrapping_add(i * padded) }
    }
}

/// Attends `queries` over the part of `split` that they see; the result replaces `scratch.part`.
pub(crate) struct AttendSplit<'a, K> {
    queries: &'a Queries,
    source: K,
    dims: &'a Dims,
    split: usize,
    /// End of the positions that the caller attends over, this split and those that follow.
    until: usize,
    scratch: &'a Scratch,
}

impl<'a, K: KeyValues> AttendSplit<'a, K> {
    /// # Safety
    /// Queries are readable, the positions they see in the split are cached, and scratch has room for the rows.
    #[inline(always)]
    pub(crate) unsafe fn new(
        queries: &'a Queries,
        source: K,
        dims: &'a Dims,
        split: usize,
        until: usize,
        scratch: &'a Scratch,
    ) -> Self {
        Self { queries, source, dims, split, until, scratch }
    }
}

impl<K: KeyValues> Kernel for AttendSplit<'_, K> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (queries, scratch, dims, source) = (self.queries, self.scratch, self.dims, &self.source);
        let (rows, all_rows, padded) = (queries.head_rows(), queries.rows(), dims.padded());
        let seen = queries.all_seen();
        let (from, to) = (seen.start.max(self.split * SPLIT), seen.end.min((self.split + 1) * SPLIT));
        let mut addresses = Addresses::NONE;
        let mut memory = TileMemory {
            keys: scratch.keys,
            values: scratch.values,
            addresses: &mut addresses,
            until: self.until,
            extra: scratch.extra,
        };
        let mut factors = [1.0f32; SCORE_ROWS];
        let factors = factors.as_mut_ptr();
        let together = K::SEPARATE && queries.tokens == 1 && all_rows <= SCORE_ROWS;
        // SAFETY: the promise of `new`; bands have at most SCORE_ROWS rows.
        unsafe {
            scratch.part.clear(all_rows, padded);
            let mut start = from / TILE * TILE;
            while start < to {
                let places = from.max(start) - start..to.min(start + TILE) - start;
                let vectors = places.start / LANES..places.end.div_ceil(LANES);
                let band = |head: usize, rows: Range<usize>, row: usize| Band {
                    queries: queries.of_head(head),
                    start,
                    scores: scratch.scores.add(row * TILE),
                    factors: factors.add(row),
                    state: scratch.part.row(head * queries.head_rows() + rows.start, padded),
                    rows,
                };
                // Heads within a tile: the cache is read in the order in which it lies.
                if together {
                    // One token's rows all see the same: their softmax is done at once, so that heads don't wait for it.
                    for head in 0..queries.key_value_heads {
                        let keys = source.load_keys(s, head, start, places.clone(), &mut memory);
                        band(head, 0..rows, head * rows).score(s, keys, dims.key_dim, &vectors);
                    }
                    let one = Queries { key_value_heads: 1, heads: all_rows, ..*queries };
                    Band { queries: one, ..band(0, 0..all_rows, 0) }.soften(s, dims.scale);
                    for head in 0..queries.key_value_heads {
                        let values = source.load_values(s, head, start, places.clone(), &mut memory);
                        band(head, 0..rows, head * rows).weigh(s, values, padded);
                    }
                } else {
                    for head in 0..queries.key_value_heads {
                        let keys = source.load_keys(s, head, start, places.clone(), &mut memory);
                        let values = source.load_values(s, head, start, places.clone(), &mut memory);
                        for first in (0..rows).step_by(SCORE_ROWS) {
                            let band = band(head, first..rows.min(first + SCORE_ROWS), 0);
                            band.score(s, keys, dims.key_dim, &vectors);
                            band.soften(s, dims.scale);
                            band.weigh(s, values, padded);
                        }
                    }
                }
                start += TILE;
            }
        }
    }
}

/// At most [`SCORE_ROWS`] rows of a key/value head over a tile; made by [`AttendSplit`] alone.
struct Band {
    queries: Queries,
    rows: Range<usize>,
    /// Position of the tile.
    start: usize,
    /// Of the first row, as the following.
    scores: *mut f32,
    factors: *mut f32,
    state: State,
}

impl Band {
    /// Products with keys.
    ///
    /// # Safety
    /// Queries are readable, scores are the band's own, `keys` holds `vectors`.
    #[inline(always)]
    unsafe fn score<S: Simd, K: RowSource>(&self, s: S, keys: K, key_dim: usize, vectors: &Range<usize>) {
        let mut row = self.rows.start;
        while row < self.rows.end {
            let n = run_of(&self.queries, row..self.rows.end, self.start, false);
            if !self.queries.places(row, self.start).is_empty() {
                let mut blocks = Blocks::new(row, n, S::TILE_ROWS);
                while let Some((first, n)) = blocks.next() {
                    let mut tile = TileRows { n, ..TileRows::EMPTY };
                    let mut query = self.queries.walk(first);
                    // SAFETY: the caller's promise.
                    unsafe {
                        for i in 0..n {
                            tile.a[i] = query.next();
                            tile.c[i] = self.scores.add((first + i - self.rows.start) * TILE);
                        }
                        multiply::<S, _, false>(s, &tile, keys, 0..key_dim, vectors.clone());
                    }
                }
            }
            row += n;
        }
    }

    /// Scores to weights.
    ///
    /// # Safety
    /// Scores, factors and state are the band's own.
    #[inline(always)]
    unsafe fn soften<S: Simd>(&self, s: S, scale: f32) {
        let (queries, start) = (&self.queries, self.start);
        let mut row = self.rows.start;
        while row < self.rows.end {
            let n = run_of(queries, row..self.rows.end, start, false);
            if !queries.places(row, start).is_empty() {
                let offset = row - self.rows.start;
                // SAFETY: the caller's promise.
                let factors = unsafe { std::slice::from_raw_parts_mut(self.factors.add(offset), n) };
                let (scores, state) = (self.scores.wrapping_add(offset * TILE), self.state.row(offset, 0));
                s.enter(SoftmaxRows { queries, rows: row..row + n, start, scores, scale, state, factors });
            }
            row += n;
        }
    }

    /// Adds weighted values.
    ///
    /// # Safety
    /// As [`Self::soften`]; `values` holds the places that the rows see.
    #[inline(always)]
    unsafe fn weigh<S: Simd, V: RowSource>(&self, s: S, values: V, padded: usize) {
        let mut row = self.rows.start;
        while row < self.rows.end {
            let n = run_of(&self.queries, row..self.rows.end, self.start, true);
            let depth = self.queries.places(row, self.start);
            if !depth.is_empty() {
                let mut blocks = Blocks::new(row, n, S::TILE_ROWS);
                while let Some((first, n)) = blocks.next() {
                    let mut tile = TileRows { n, ..TileRows::EMPTY };
                    // SAFETY: the caller's promise.
                    unsafe {
                        for i in 0..n {
                            let offset = first + i - self.rows.start;
                            tile.a[i] = self.scores.add(offset * TILE);
                            tile.c[i] = self.state.out.add(offset * padded);
                            tile.factors[i] = *self.factors.add(offset);
                        }
                        multiply::<S, _, true>(s, &tile, values, depth.clone(), 0..padded / LANES);
                    }
                }
            }
            row += n;
        }
    }
}

/// How many rows from the first on see the same places of a tile (`exact`), or agree in seeing any.
#[inline(always)]
pub(super) fn run_of(queries: &Queries, rows: Range<usize>, start: usize, exact: bool) -> usize {
    let first = queries.places(rows.start, start);
    let last = queries.places(rows.end - 1, start);
    // What a token sees moves forward with it, so tokens in between see what both ends see.
    if first == last || (!exact && !first.is_empty() && !last.is_empty()) {
        return rows.len();
    }
    let mut n = queries.heads - rows.start % queries.heads;
    while rows.start + n < rows.end {
        let next = queries.places(rows.start + n, start);
        let alike = if exact { next == first } else { next.is_empty() == first.is_empty() };
        if !alike {
            break;
        }
        n += queries.heads;
    }
    n.min(rows.end - rows.start)
}

/// Cuts a run of rows into register tiles of nearly equal height.
pub(super) struct Blocks {
    row: usize,
    end: usize,
    height: usize,
}

impl Blocks {
    #[inline(always)]
    pub(super) fn new(row: usize, n: usize, most: usize) -> Self {
        Self { row, end: row + n, height: n.div_ceil(n.div_ceil(most)) }
    }
    #[inline(always)]
    pub(super) fn next(&mut self) -> Option<(usize, usize)> {
        let n = self.height.min(self.end - self.row);
        let first = self.row;
        self.row += n;
        (n > 0).then_some((first, n))
    }
}

/// `x` where the lane's place is in `places`, else -inf.
#[inline(always)]
pub(super) fn mask<S: Simd>(s: S, x: S::V, first: usize, places: &Range<usize>) -> S::V {
    let mut lanes = s.to_array(x);
    for (i, lane) in lanes.iter_mut().enumerate() {
        if !places.contains(&(first + i)) {
            *lane = f32::NEG_INFINITY;
        }
    }
    s.of(lanes)
}

/// Rows over a tile: turns scores into weights relative to the maximum so far, updates maxima and sums, and gives the factors
/// on what was summed before. Sixteen rows at a time, so that no row waits for another's and nothing depends on a branch
/// that cannot be foreseen. Made by [`attend_rows`] alone.
struct SoftmaxRows<'a> {
    queries: &'a Queries,
    rows: Range<usize>,
    /// Of the tile.
    start: usize,
    /// [rows][TILE].
    scores: *mut f32,
    scale: f32,
    /// Of the first row.
    state: State,
    factors: &'a mut [f32],
}

impl Kernel for SoftmaxRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (scale, heads) = (s.splat(self.scale), self.queries.heads);
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
                    best[i] = scale_row(s, self.scores.add((first + i) * TILE), &places, scale);
                }
                let (max, sum) = (self.state.max.add(first), self.state.sum.add(first));
                let old = s.load_partial(max, n, f32::NEG_INFINITY);
                let new = s.max(s.of(best), old);
                // With nothing but -inf seen, something finite, so that e^-inf is 0 and not NaN.
                let base = s.max(new, s.splat(f32::MIN));
                let factor = weight(s, s.sub(old, base));
                let bases = s.to_array(base);
                let mut sums = [0.0; LANES];
                for i in 0..n {
                    sums[i] = weigh_row(s, self.scores.add((first + i) * TILE), seen[i], s.splat(bases[i]));
                }
                let sums = s.fma(s.load_partial(sum, n, 0.0), factor, s.of(sums));
                s.store_partial(max, n, new);
                s.store_partial(sum, n, sums);
                s.store_partial(factors.as_mut_ptr(), n, factor);
            }
        }
    }
}

/// Scales a row's scores, masks those of places that it doesn't see, and returns the largest.
///
/// # Safety
/// `scores` has a tile.
#[inline(always)]
unsafe fn scale_row<S: Simd>(s: S, scores: *mut f32, places: &Range<usize>, scale: S::V) -> f32 {
    let mut best = s.splat(f32::NEG_INFINITY);
    // SAFETY: the caller's promise.
    unsafe {
        if places.start == 0 && places.end == TILE {
            for v in 0..TILE_VECTORS {
                let x = s.mul(s.load(scores.add(v * LANES)), scale);
                s.store(scores.add(v * LANES), x);
                best = s.max(x, best);
            }
        } else {
            for v in places.start / LANES..places.end.div_ceil(LANES) {
                let mut x = s.mul(s.load(scores.add(v * LANES)), scale);
                if v * LANES < places.start || (v + 1) * LANES > places.end {
                    x = mask(s, x, v * LANES, places);
                }
                s.store(scores.add(v * LANES), x);
                best = s.max(x, best);
            }
        }
    }
    s.reduce_max(best)
}

/// Differences to the maximum below this weigh nothing: less than the last place of any sum.
const WEIGHTLESS: f32 = -60.0;
/// Just above e^[`WEIGHTLESS`], and nothing beside weights that count.
const NOTHING: f32 = 1e-26;

/// e^x for a difference x to the maximum; exactly zero from about [`WEIGHTLESS`] on, so that no step computes with subnormal
/// numbers, which cost processors a hundred times as much. NaN stays NaN.
#[inline(always)]
fn weight<S: Simd>(s: S, x: S::V) -> S::V {
    let weight = exp_bounded(s, s.max(s.splat(WEIGHTLESS), x));
    s.max(s.splat(0.0), s.sub(weight, s.splat(NOTHING)))
}

/// Replaces a row's scores by e^(score - base) and returns their sum.
///
/// # Safety
/// `scores` has a tile.
#[inline(always)]
unsafe fn weigh_row<S: Simd>(s: S, scores: *mut f32, (from, to): (usize, usize), base: S::V) -> f32 {
    let mut sum = s.splat(0.0);
    // SAFETY: the caller's promise.
    unsafe {
        if from == 0 && to == TILE {
            let mut weights = [sum; TILE_VECTORS];
            for v in 0..TILE_VECTORS {
                weights[v] = weight(s, s.sub(s.load(scores.add(v * LANES)), base));
            }
            for v in 0..TILE_VECTORS {
                s.store(scores.add(v * LANES), weights[v]);
                sum = s.add(sum, weights[v]);
            }
        } else {
            for v in from / LANES..to.div_ceil(LANES) {
                let weight = weight(s, s.sub(s.load(scores.add(v * LANES)), base));
                s.store(scores.add(v * LANES), weight);
                sum = s.add(sum, weight);
            }
        }
    }
    s.reduce_add(sum)
}

/// Adds splits' states of rows to their totals.
pub(crate) struct MergeRows {
    total: State,
    part: State,
    rows: usize,
    padded: usize,
}

impl MergeRows {
    /// # Safety
    /// Both states hold `rows` rows of `padded` values.
    pub(crate) unsafe fn new(total: State, part: State, rows: usize, padded: usize) -> Self {
        Self { total, part, rows, padded }
    }
}

impl Kernel for MergeRows {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for first in (0..self.rows).step_by(LANES) {
            let (total, part) = (self.total.row(first, self.padded), self.part.row(first, self.padded));
            // SAFETY: the promise of `new`.
            unsafe { merge(s, total, part, (self.rows - first).min(LANES), self.padded) };
        }
    }
}

/// Adds a split's state of up to sixteen rows to the total. A split that a row doesn't see has sum 0 and changes nothing.
///
/// # Safety
/// Both states hold `n` rows.
#[inline(always)]
unsafe fn merge<S: Simd>(s: S, total: State, part: State, n: usize, padded: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let old = s.load_partial(total.max, n, f32::NEG_INFINITY);
        let added = s.load_partial(part.max, n, f32::NEG_INFINITY);
        let sums = s.load_partial(part.sum, n, 0.0);
        let new = s.max(added, old);
        // As in the softmax of a tile.
        let base = s.max(new, s.splat(f32::MIN));
        let (old_factor, new_factor) = (weight(s, s.sub(old, base)), weight(s, s.sub(added, base)));
        let sum = s.fma(sums, new_factor, s.mul(s.load_partial(total.sum, n, 0.0), old_factor));
        s.store_partial(total.max, n, new);
        s.store_partial(total.sum, n, sum);
        let (old_factors, new_factors, sums) = (s.to_array(old_factor), s.to_array(new_factor), s.to_array(sums));
        for row in 0..n {
            if sums[row] == 0.0 {
                continue;
            }
            let (old_factor, new_factor) = (s.splat(old_factors[row]), s.splat(new_factors[row]));
            let (to, from) = (total.out.add(row * padded), part.out.add(row * padded));
            for i in (0..padded).step_by(LANES) {
                let kept = s.mul(s.load(to.add(i)), old_factor);
                s.store(to.add(i), s.fma(s.load(from.add(i)), new_factor, kept));
            }
        }
    }
}

/// Writes a row's result: the weighted values over the sum of weights.
///
/// # Safety
/// `total` holds a row, `out` has `value_dim` places.
#[inline(always)]
pub(crate) unsafe fn finish_row<S: Simd>(s: S, total: State, value_dim: usize, out: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        let inverse = s.splat(1.0 / *total.sum);
        for i in (0..value_dim).step_by(LANES) {
            let y = s.mul(s.load(total.out.add(i)), inverse);
            if value_dim - i >= LANES {
                s.store(out.add(i), y);
            } else {
                s.store_partial(out.add(i), value_dim - i, y);
            }
        }
    }
}
