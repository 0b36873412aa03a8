//! Rounding activations to int8: rows of f32 in, tiles of codes with scales out.
//!
//! A tile holds `width` rows. For each group of 32 inputs and each of its 1 or 2 subgroups (2 if scales of activations or of
//! weights hold for 16 inputs) it has, in 32-bit words:
//!
//! ```text
//! codes   [width][terms][8 / subgroups]  4 int8 codes a word, the operand of one integer dot product
//! scale   [width] f32   unit of the last term
//! sum     [width] f32   sum of the values themselves, unrounded: what minima of weights multiply
//! offset  [width] i32   -128 times the sum of codes: start of accumulation against weight codes stored plus 128
//! ```
//!
//! A format with spikes decides by tile: two terms if any of its rows has a spike, else one, packed as if the format had one.
//! Second terms of a row without spikes are zero, so that its results are those of one term whatever its company: units differ
//! by a power of two, and so exactly.
//!
//! With two terms a value is `scale * (256 * first + second)`: the second holds the rounding error of the first. All
//! arithmetic is IEEE in a fixed order, per row. A group with a NaN or an infinity gets scale NaN, so its row's results are
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
    /// int8 terms: 1 or 2.
    pub(super) terms: usize,
    /// Whether only rows with spikes have a second term.
    pub(super) spikes: bool,
}

impl Format {
    /// Number of formats, for [`index`](Self::index).
    pub(super) const COUNT: usize = 16;

    /// A dense number of the format.
    pub(super) const fn index(self) -> usize {
        self.spikes as usize * 8 + (self.group / 16 - 1) * 4 + (self.subs - 1) * 2 + self.terms - 1
    }

    /// The format of a tile that has second terms or not.
    pub(super) const fn of_tile(self, spiked: bool) -> Self {
        if self.spikes && !spiked { Self { terms: 1, spikes: false, ..self } } else { Self { spikes: false, ..self } }
    }

    /// Words of a group of 32 inputs of one row.
    pub(super) const fn group_words(self) -> usize {
        RUNS * self.terms + 3 * self.subs
    }

    /// Words that a row takes together with what [`round_tile`] tells of its tile.
    pub(super) const fn slot_words(self, k: usize) -> usize {
        self.row_words(k) + self.spikes as usize
    }

    /// Words of one row of `k` inputs.
    pub(super) const fn row_words(self, k: usize) -> usize {
        k / GROUP * self.group_words()
    }
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

/// Rows that the tiles of `rows` rows take.
pub(super) const fn padded_rows(rows: usize) -> usize {
    rows / MAX_WIDTH * MAX_WIDTH + tile_width(rows % MAX_WIDTH)
}

/// Fills a tile of `width` rows, of which `rows` exist. Whether one of them has a spike, if the format asks.
pub(super) fn round_tile(isa: Isa, format: Format, rows: &[&[f32]], width: usize, tile: &mut [u32]) -> bool {
    debug_assert!(rows.len() <= width && width <= MAX_WIDTH);
    let mut spikes = [false; MAX_WIDTH];
    if format.spikes {
        for (spike, row) in spikes.iter_mut().zip(rows) {
            *spike = dispatch(isa, Spike { row });
        }
    }
    let spiked = spikes.contains(&true);
    let asks = format.spikes;
    let format = format.of_tile(spiked);
    if rows.len() < width {
        tile.fill(0);
    }
    for (slot, row) in rows.iter().enumerate() {
        let second = !asks || spikes[slot];
        #[cfg(target_arch = "x86_64")]
        {
            if isa >= Isa::Avx512 {
                // SAFETY: the instruction set was detected.
                unsafe { super::avx512_round::round_row(format, second, row, slot, width, tile) };
                continue;
            }
            if isa == Isa::Avx2 {
                // SAFETY: the instruction set was detected.
                unsafe { super::avx2::round_row(format, second, row, slot, width, tile) };
                continue;
            }
        }
        let _ = isa;
        round_row(format, second, row, slot, width, tile);
    }
    spiked
}

/// Whether one value has a large share of a row's energy. A row with a NaN has none.
struct Spike<'a> {
    row: &'a [f32],
}

impl Kernel for Spike<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let (mut largest, mut sum) = (s.splat(0.0), s.splat(0.0));
        for values in self.row.as_chunks::<LANES>().0 {
            // SAFETY: sixteen values.
            let x = unsafe { s.load(values.as_ptr()) };
            let square = s.mul(x, x);
            largest = s.max(largest, square);
            sum = s.add(sum, square);
        }
        s.reduce_max(largest) > QHAL_SPIKE_SHARE * s.reduce_add(sum)
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

/// The scalar twin; also compiled for AVX2, where it becomes vector code. Without `second` second terms are zero.
#[inline(always)]
pub(super) fn round_row(format: Format, second: bool, row: &[f32], slot: usize, width: usize, tile: &mut [u32]) {
    let group_words = format.group_words() * width;
    for (values, words) in row.as_chunks::<GROUP>().0.iter().zip(tile.chunks_exact_mut(group_words)) {
        let mut codes = [[0i8; GROUP]; 2];
        let mut scales = [0.0; 2];
        if format.group == GROUP {
            let (first, rest) = codes.split_at_mut(1);
            let scale = round_group(values, &mut first[0], &mut rest[0], format.terms, second);
            scales = [scale, scale];
        } else {
            let (first, rest) = codes.split_at_mut(1);
            let parts = values.chunks_exact(16).zip(first[0].chunks_exact_mut(16).zip(rest[0].chunks_exact_mut(16)));
            for ((values, (first, rest)), scale) in parts.zip(&mut scales) {
                *scale = round_group(values, first, rest, format.terms, second);
            }
        }
        store_group(format, values, &codes, scales, slot, width, words);
    }
}

/// Codes of one scale's values; returns the unit of the last term.
#[inline(always)]
fn round_group(values: &[f32], first: &mut [i8], rest: &mut [i8], terms: usize, second: bool) -> f32 {
    // As integers, magnitudes are ordered with infinities and NaN on top.
    let largest = values.iter().fold(0, |largest, value| (value.to_bits() & 0x7fff_ffff).max(largest));
    if largest >= f32::INFINITY.to_bits() {
        return f32::NAN;
    }
    let largest = f32::from_bits(largest);
    if largest < TINY {
        return 0.0;
    }
    let (scale, inverse) = (largest / MAX_CODE, MAX_CODE / largest);
    for ((&value, first), code) in values.iter().zip(first).zip(rest) {
        let exact = value * inverse;
        let rounded = (exact + ROUND) - ROUND;
        *first = rounded as i8;
        if terms == 2 && second {
            let rest = ((exact - rounded) * SECOND + ROUND) - ROUND;
            *code = (if rest < MAX_CODE { rest } else { MAX_CODE }).max(-MAX_CODE) as i8;
        }
    }
    if terms == 2 { scale / SECOND } else { scale }
}

/// Writes a group of one row into a tile's words.
#[inline(always)]
fn store_group(
    format: Format,
    values: &[f32; GROUP],
    codes: &[[i8; GROUP]; 2],
    scales: [f32; 2],
    slot: usize,
    width: usize,
    words: &mut [u32],
) {
    let (terms, runs) = (format.terms, RUNS / format.subs);
    for (sub, words) in words.chunks_exact_mut(width * (runs * terms + 3)).enumerate() {
        let inputs = sub * 4 * runs..(sub + 1) * 4 * runs;
        let mut offset = 0;
        for (term, codes) in codes.iter().take(terms).enumerate() {
            let codes = &codes[inputs.clone()];
            let to = &mut words[(slot * terms + term) * runs..][..runs];
            for (word, run) in to.iter_mut().zip(codes.as_chunks::<4>().0) {
                *word = u32::from_le_bytes(run.map(i8::cast_unsigned));
            }
            let sum: i32 = codes.iter().map(|&code| i32::from(code)).sum();
            offset = 256 * offset - 128 * sum;
        }
        let meta = &mut words[width * runs * terms..];
        meta[slot] = scales[sub].to_bits();
        meta[width + slot] = tree_sum(&values[inputs]).to_bits();
        meta[2 * width + slot] = offset.cast_unsigned();
    }
}

/// The sum of 16 or 32 values: for each 16 those 8 apart, then 4, 2, 1.
#[inline(always)]
fn tree_sum(values: &[f32]) -> f32 {
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
