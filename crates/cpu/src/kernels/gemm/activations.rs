//! Rounding activations to int8: rows of f32 in, tiles of codes with scales out.
//!
//! A tile holds `width` rows. For each group of 32 inputs and each of its 1 or 2 subgroups (2 if scales of activations or of
//! weights hold for 16 inputs) it has, in 32-bit words:
//!
//! ```text
//! codes   [width][8 / subgroups]  4 int8 codes a word, the operand of one integer dot product
//! scale   [width] f32   unit of the codes
//! sum     [width] f32   sum of the values themselves, unrounded: what minima of weights multiply; 0 in a second term
//! offset  [width] i32   -128 times the sum of codes: where sums begin against weight codes that are stored plus 128, or, shifted
//!                       down, plus a smaller power of two
//! ```
//!
//! A value in two terms is `scale * first + scale / 256 * second`: the second holds the rounding error of the first. Second terms
//! are rows of tiles of their own, multiplied like any row, whose products are added to those of the first at the end. Where only
//! groups with a spike have them, tiles hold only those groups: few, and mostly the same ones in all rows of a block, since spikes
//! sit in a few channels. A row that has none in a group which another row has is zero there, which changes none of its bits.
//! All arithmetic is IEEE in a fixed order, per row. A group with a NaN or an infinity gets scale NaN, so its row's results are
//! NaN.

use qwen_hal_abi::ops::QHAL_SPIKE_SHARE;

use super::wide::{GROUP, RUNS};
use crate::isa::Isa;
use crate::kernels::simd::{Kernel, LANES, Simd, dispatch};

/// Rows of the widest tile.
pub(super) const MAX_WIDTH: usize = 16;

/// A form of rounded activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Format {
    /// Inputs that share a scale: 16 or 32.
    pub(super) group: usize,
    /// Subgroups of 32 inputs: 1 or 2.
    pub(super) subs: usize,
}

impl Format {
    /// Number of formats, for [`index`](Self::index).
    pub(super) const COUNT: usize = 4;

    /// A dense number of the format.
    pub(super) const fn index(self) -> usize {
        (self.group / 16 - 1) * 2 + self.subs - 1
    }

    /// Words of a group of 32 inputs of one row.
    pub(super) const fn group_words(self) -> usize {
        RUNS + 3 * self.subs
    }

    /// Words of one row of `k` inputs.
    pub(super) const fn row_words(self, k: usize) -> usize {
        k / GROUP * self.group_words()
    }
}

/// Which part of the values a tile holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Term {
    First,
    Second,
}

/// Which groups have a second term.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seconds {
    None,
    /// Those with a spike.
    Spiked,
    All,
}

/// Words of a set of groups of 32 inputs, a bit each.
pub(super) const fn set_words(k: usize) -> usize {
    k.div_ceil(32 * GROUP)
}

/// How many groups are in a set.
pub(super) fn count_groups(set: &[u32]) -> usize {
    set.iter().map(|word| word.count_ones() as usize).sum()
}

/// The groups of a set that lie in a range.
#[inline(always)]
pub(super) fn groups_in(set: &[u32], range: std::ops::Range<usize>) -> impl Iterator<Item = usize> {
    let mut next = range.start;
    std::iter::from_fn(move || {
        while next < range.end {
            let rest = set.get(next / 32).map_or(0, |word| word >> (next % 32));
            if rest == 0 {
                next = (next / 32 + 1) * 32;
                continue;
            }
            next += rest.trailing_zeros() as usize + 1;
            return (next <= range.end).then_some(next - 1);
        }
        None
    })
}

/// Rows of the tile that begins with `rows` rows left; rows beyond are zeros.
pub(super) const fn tile_width(rows: usize) -> usize {
    match rows {
        0..=2 => rows,
        3..=4 => 4,
        5..=8 => 8,
        9..=12 => 12,
        _ => MAX_WIDTH,
    }
}

/// Most rows whose sums, of integers and of floats, stay in 32 registers.
const MOST_TOGETHER: usize = 12;

/// Rows of a tile that meet a group of weights together.
pub(super) const fn rows_together(width: usize) -> usize {
    if width > MOST_TOGETHER { width / 2 } else { width }
}

/// Rows that the tiles of `rows` rows take.
pub(super) const fn padded_rows(rows: usize) -> usize {
    rows / MAX_WIDTH * MAX_WIDTH + tile_width(rows % MAX_WIDTH)
}

/// First row and width of each tile of `rows` rows.
pub(super) fn tiles(rows: usize) -> impl Iterator<Item = (usize, usize)> + Clone {
    (0..rows).step_by(MAX_WIDTH).map(move |row| (row, tile_width(rows - row)))
}

/// Fills a tile of `width` rows, of which `rows` exist, with one term of their values.
pub(super) fn round_tile(isa: Isa, format: Format, term: Term, rows: &[&[f32]], width: usize, tile: &mut [u32]) {
    debug_assert!(rows.len() <= width && width <= MAX_WIDTH);
    if rows.len() < width {
        tile.fill(0);
    }
    for (slot, row) in rows.iter().enumerate() {
        round_slot(isa, format, term, row, slot, width, tile);
    }
}

/// One row of a tile.
fn round_slot(isa: Isa, format: Format, term: Term, row: &[f32], slot: usize, width: usize, tile: &mut [u32]) {
    #[cfg(target_arch = "x86_64")]
    {
        if isa >= Isa::Avx512 {
            // SAFETY: the instruction set was detected.
            return unsafe { super::avx512_round::round_row(format, term, row, slot, width, tile) };
        }
        if isa == Isa::Avx2 {
            // SAFETY: the instruction set was detected.
            return unsafe { super::avx2_round::round_row(format, term, row, slot, width, tile) };
        }
    }
    let _ = isa;
    round_row(format, term, row, slot, width, tile);
}

/// Groups that [`round_spikes`] takes together: as many as the vector variants round at once.
const GATHERED: usize = 8;

/// One row of a tile that holds the second terms of the groups in `union` alone, one behind the other: `row` has the values and
/// the set of its own groups with a spike. The others, those that another row of the tile has a spike in, are zero, and all of them
/// without a row.
pub(super) fn round_spikes(
    isa: Isa,
    format: Format,
    row: Option<(&[f32], &[u32])>,
    union: &[u32],
    slot: usize,
    width: usize,
    tile: &mut [u32],
) {
    let group_words = format.group_words() * width;
    let mut groups = groups_in(union, 0..32 * union.len());
    for words in tile.chunks_mut(GATHERED * group_words) {
        let mut gathered = [[0.0; GROUP]; GATHERED];
        for (to, group) in gathered.iter_mut().zip(&mut groups) {
            let values = row.filter(|(_, set)| set[group / 32] >> (group % 32) & 1 == 1);
            if let Some((values, _)) = values {
                *to = values.as_chunks().0[group];
            }
        }
        let values = &gathered.as_flattened()[..words.len() / group_words * GROUP];
        round_slot(isa, format, Term::Second, values, slot, width, words);
    }
}

/// Finds the groups with a value that has a large share of the row's energy. Whether there is one. A row with a NaN has none.
pub(super) fn find_spikes(isa: Isa, row: &[f32], set: &mut [u32]) -> bool {
    dispatch(isa, Spikes { row, set })
}

struct Spikes<'a> {
    row: &'a [f32],
    set: &'a mut [u32],
}

impl Kernel for Spikes<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let (mut largest, mut sum) = (s.splat(0.0), s.splat(0.0));
        let vectors = self.row.as_chunks::<LANES>().0;
        for values in vectors {
            // SAFETY: sixteen values.
            let x = unsafe { s.load(values.as_ptr()) };
            let square = s.mul(x, x);
            largest = s.max(largest, square);
            sum = s.add(sum, square);
        }
        let limit = QHAL_SPIKE_SHARE * s.reduce_add(sum);
        self.set.fill(0);
        if s.reduce_max(largest) <= limit || limit.is_nan() {
            return false;
        }
        let mut found = false;
        for (group, values) in vectors.chunks_exact(GROUP / LANES).enumerate() {
            let mut largest = s.splat(0.0);
            for values in values {
                // SAFETY: sixteen values.
                let x = unsafe { s.load(values.as_ptr()) };
                largest = s.max(largest, s.mul(x, x));
            }
            if s.reduce_max(largest) > limit {
                self.set[group / 32] |= 1 << (group % 32);
                found = true;
            }
        }
        found
    }
}

/// Added and taken away, rounds to a whole number (1.5 * 2^23).
pub(super) const ROUND: f32 = 12_582_912.0;
/// Below, a group's values are taken as zero: 127 divided by them might overflow.
pub(super) const TINY: f32 = 1e-30;
/// Largest code.
pub(super) const MAX_CODE: f32 = 127.0;
/// Units of the second term in one of the first.
pub(super) const SECOND: f32 = 256.0;

/// The scalar twin.
#[inline(always)]
pub(super) fn round_row(format: Format, term: Term, row: &[f32], slot: usize, width: usize, tile: &mut [u32]) {
    let group_words = format.group_words() * width;
    for (values, words) in row.as_chunks::<GROUP>().0.iter().zip(tile.chunks_exact_mut(group_words)) {
        round_one_group(format, term, values, slot, width, words);
    }
}

#[inline(always)]
fn round_one_group(format: Format, term: Term, values: &[f32; GROUP], slot: usize, width: usize, words: &mut [u32]) {
    let mut codes = [0i8; GROUP];
    let mut scales = [0.0; 2];
    if format.group == GROUP {
        scales = [round_group(values, &mut codes, term); 2];
    } else {
        let parts = values.chunks_exact(16).zip(codes.chunks_exact_mut(16));
        for ((values, codes), scale) in parts.zip(&mut scales) {
            *scale = round_group(values, codes, term);
        }
    }
    store_group(format, term, values, &codes, scales, slot, width, words);
}

/// What values that share a scale are divided by.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unit {
    /// Unit of the codes; NaN if a value is not finite.
    pub(super) scale: f32,
    /// 0 if all codes are zero.
    pub(super) inverse: f32,
}

impl Unit {
    /// From the bits of the largest magnitude. As integers, magnitudes are ordered with infinities and NaN on top.
    #[inline(always)]
    pub(super) fn of(largest: u32) -> Self {
        if largest >= f32::INFINITY.to_bits() {
            return Self { scale: f32::NAN, inverse: 0.0 };
        }
        let largest = f32::from_bits(largest);
        if largest < TINY {
            return Self { scale: 0.0, inverse: 0.0 };
        }
        Self { scale: largest / MAX_CODE, inverse: MAX_CODE / largest }
    }

    /// Unit of a term's codes.
    #[inline(always)]
    pub(super) fn of_term(self, term: Term) -> f32 {
        match term {
            Term::First => self.scale,
            Term::Second => self.scale / SECOND,
        }
    }
}

/// Codes of one scale's values; returns their unit.
#[inline(always)]
fn round_group(values: &[f32], codes: &mut [i8], term: Term) -> f32 {
    let unit = Unit::of(values.iter().fold(0, |largest, value| (value.to_bits() & 0x7fff_ffff).max(largest)));
    if unit.inverse != 0.0 {
        for (&value, code) in values.iter().zip(codes) {
            let exact = value * unit.inverse;
            let rounded = (exact + ROUND) - ROUND;
            *code = match term {
                Term::First => rounded as i8,
                Term::Second => {
                    let rest = ((exact - rounded) * SECOND + ROUND) - ROUND;
                    (if rest < MAX_CODE { rest } else { MAX_CODE }).max(-MAX_CODE) as i8
                }
            };
        }
    }
    unit.of_term(term)
}

/// Writes a group of one row into a tile's words.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "what a group is made of, and its place")]
fn store_group(
    format: Format,
    term: Term,
    values: &[f32; GROUP],
    codes: &[i8; GROUP],
    scales: [f32; 2],
    slot: usize,
    width: usize,
    words: &mut [u32],
) {
    let runs = RUNS / format.subs;
    for (sub, words) in words.chunks_exact_mut(width * (runs + 3)).enumerate() {
        let inputs = sub * 4 * runs..(sub + 1) * 4 * runs;
        let codes = &codes[inputs.clone()];
        for (word, run) in words[slot * runs..][..runs].iter_mut().zip(codes.as_chunks::<4>().0) {
            *word = u32::from_le_bytes(run.map(i8::cast_unsigned));
        }
        let sum: i32 = codes.iter().map(|&code| i32::from(code)).sum();
        let meta = &mut words[width * runs..];
        meta[slot] = scales[sub].to_bits();
        meta[width + slot] = if term == Term::First { tree_sum(&values[inputs]).to_bits() } else { 0 };
        meta[2 * width + slot] = (-128 * sum).cast_unsigned();
    }
}

/// The sum of 16 or 32 values: for each 16 those 8 apart, then 4, 2, 1.
#[inline(always)]
pub(super) fn tree_sum(values: &[f32]) -> f32 {
    let mut sums = values.as_chunks::<16>().0.iter().map(|chunk| {
        let mut lanes = *chunk;
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
        }
        lanes[0]
    });
    let first = sums.next().unwrap_or(0.0);
    sums.next().map_or(first, |second| first + second)
}
