//! Products of a few rows straight from the packed form, for any vector register.
//!
//! Shape: a panel of sixteen outputs, all its groups of 32 inputs or a set of them, times one tile of `W` rows. Each group is
//! unpacked into registers once and meets every row there, so weights are read as one stream and nothing is written but the
//! sums. Against [`super::panel`]'s way by stretches, reading memory and multiplying go on at the same time instead of taking
//! turns; with many rows the registers don't suffice and unpacking is paid once per tile. Bound: the larger of reading the
//! weights and of `W` x (8 integer products, 1 conversion, 2 or 3 float products) a group.
//!
//! Bits: the operations on each output, in order, are those of [`super::scalar::tile`].

#![expect(clippy::needless_range_loop, reason = "registers by number: an iterator would move them through memory")]

use super::activations::groups_in;
use super::sources::Source;
use super::vector::Vector;
use super::wide::RUNS;

/// Adds a tile's products with some groups of a panel to `acc`, asking for memory `AHEAD` bytes ahead if that isn't 0. The
/// tile's words are those of the groups in `set` alone; without a set, of all groups.
///
/// # Safety
/// The caller has the vector's instructions. `panel` is whole packed blocks.
#[inline(always)]
pub(super) unsafe fn tile<V: Vector, S: Source, const SUBS: usize, const W: usize, const AHEAD: usize>(
    panel: &[u8],
    set: Option<&[u32]>,
    words: &[u32],
    acc: &mut [f32],
) {
    let runs = RUNS / SUBS;
    let sub_words = W * (runs + 3);
    let groups = panel.len() / S::BLOCK_BYTES * S::GROUPS;
    let count = set.map_or(groups, |set| groups_in(set, 0..groups).count());
    assert!(words.len() >= count * SUBS * sub_words && acc.len() >= W * 16);
    for part in 0..16 / V::ROWS {
        let acc = acc.as_mut_ptr().wrapping_add(part * V::ROWS);
        let mut at = words.as_ptr().cast::<i32>();
        // SAFETY: lengths were checked; instructions by the caller's promise.
        unsafe {
            let mut y = [V::splat(0.0); W];
            for t in 0..W {
                y[t] = V::load_float(acc.add(16 * t));
            }
            let (mut all, mut listed) = (0..groups, set.map(|set| groups_in(set, 0..groups)));
            // A closure for the body would not have the caller's instructions.
            while let Some(group) = listed.as_mut().map_or_else(|| all.next(), Iterator::next) {
                let block = panel.as_ptr().add(group / S::GROUPS * S::BLOCK_BYTES);
                let group = group % S::GROUPS;
                if AHEAD > 0 {
                    let ahead = block.wrapping_add(AHEAD + group * (S::BLOCK_BYTES / S::GROUPS));
                    for line in 0..(S::BLOCK_BYTES / S::GROUPS).div_ceil(64) {
                        V::prefetch(ahead.wrapping_add(64 * line));
                    }
                }
                let weights = S::load::<V>(block, group, part);
                for sub in 0..SUBS {
                    let half = if S::HALVES == 2 { sub } else { 0 };
                    let meta = at.add(W * runs);
                    let mut sums = [V::splat32(0); W];
                    for t in 0..W {
                        sums[t] = S::begin::<V>(meta.add(2 * W + t));
                    }
                    let together = S::together::<V>();
                    for first in (0..runs).step_by(together) {
                        let mut parts = sums;
                        for t in 0..W {
                            parts[t] = S::open(sums[t]);
                        }
                        for run in first..runs.min(first + together) {
                            for t in 0..W {
                                parts[t] = S::step(parts[t], weights.codes[sub * runs + run], at.add(t * runs + run));
                            }
                        }
                        for t in 0..W {
                            sums[t] = S::close(sums[t], parts[t]);
                        }
                    }
                    for t in 0..W {
                        let scale = V::mul(weights.scale[half], V::splat(*meta.add(t).cast::<f32>()));
                        y[t] = V::fma(scale, sums[t].to_float(), y[t]);
                        if S::HAS_MIN {
                            y[t] = V::fma(weights.min[half], V::splat(*meta.add(W + t).cast::<f32>()), y[t]);
                        }
                    }
                    at = at.add(sub_words);
                }
            }
            for t in 0..W {
                V::store_float(y[t], acc.add(16 * t));
            }
        }
    }
}

/// The entry point `few_rows` of an instruction set, by type.
macro_rules! few_rows_entry {
    ($vector:ty, $features:literal) => {
        #[target_feature(enable = $features)]
        unsafe fn few_rows_source<
            S: $crate::kernels::gemm::sources::Source,
            const SUBS: usize,
            const W: usize,
            const AHEAD: usize,
        >(
            panel: &[u8],
            set: Option<&[u32]>,
            words: &[u32],
            acc: &mut [f32],
        ) {
            // SAFETY: the instructions are enabled here; whole blocks by the caller's promise.
            unsafe { $crate::kernels::gemm::few::tile::<$vector, S, SUBS, W, AHEAD>(panel, set, words, acc) }
        }

        /// Adds the products of a panel of a type, or of those of its groups that are in `set`, with a tile of `width` rows to
        /// `acc`, asking for weights `AHEAD` bytes ahead of their use.
        ///
        /// # Safety
        /// The processor has the instructions; `panel` is whole packed blocks.
        pub(super) unsafe fn few_rows<const AHEAD: usize>(
            dtype: DType,
            format: Format,
            panel: &[u8],
            set: Option<&[u32]>,
            width: usize,
            words: &[u32],
            acc: &mut [f32],
        ) {
            macro_rules! call {
                ($source:ident) => {{
                    type S = $crate::kernels::gemm::sources::$source;
                    let one_scale = <S as $crate::kernels::gemm::sources::Source>::HALVES == 1 && format.subs == 1;
                    match (one_scale, width) {
                        (true, 1) => few_rows_source::<S, 1, 1, AHEAD>(panel, set, words, acc),
                        (true, 2) => few_rows_source::<S, 1, 2, AHEAD>(panel, set, words, acc),
                        (true, 4) => few_rows_source::<S, 1, 4, AHEAD>(panel, set, words, acc),
                        (true, 8) => few_rows_source::<S, 1, 8, AHEAD>(panel, set, words, acc),
                        (true, 12) => few_rows_source::<S, 1, 12, AHEAD>(panel, set, words, acc),
                        (true, _) => few_rows_source::<S, 1, 16, AHEAD>(panel, set, words, acc),
                        (false, 1) => few_rows_source::<S, 2, 1, AHEAD>(panel, set, words, acc),
                        (false, 2) => few_rows_source::<S, 2, 2, AHEAD>(panel, set, words, acc),
                        (false, 4) => few_rows_source::<S, 2, 4, AHEAD>(panel, set, words, acc),
                        (false, 8) => few_rows_source::<S, 2, 8, AHEAD>(panel, set, words, acc),
                        (false, 12) => few_rows_source::<S, 2, 12, AHEAD>(panel, set, words, acc),
                        (false, _) => few_rows_source::<S, 2, 16, AHEAD>(panel, set, words, acc),
                    }
                }};
            }
            // SAFETY: the caller's promise.
            unsafe { $crate::kernels::gemm::sources::with_source!(dtype, call) }
        }
    };
}
pub(super) use few_rows_entry;
