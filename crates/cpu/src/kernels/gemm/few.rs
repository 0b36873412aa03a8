//! Products of a few rows straight from the packed form, for any vector register.
//!
//! Shape: a stretch of a panel of sixteen outputs, all its groups of 32 inputs or a set of them, times one tile of `W` rows. Each
//! group is unpacked into registers and meets there as many rows as registers suffice for, all of the tile or one half after the
//! other ([`super::activations::rows_together`]). Against [`super::panel`]'s way of unpacking a stretch into memory for all rows, nothing is written but
//! the sums, and a stretch takes half the place in the first-level cache; unpacking four-bit codes 8 rows at a time costs 3% of the
//! products, and with 64 rows as much as unpacking them once.
//!
//! The stretch that follows is asked for while a stretch is multiplied, each step of each pass over it asking for its share, so that
//! it has arrived when its turn comes: reading memory and multiplying go on at the same time. Bound: the larger of reading
//! the weights and of `W` x (8 integer products, 1 conversion, 2 or 3 float products) a group; sums of both kinds never leave the
//! registers, since a store of 512 bits takes as long as two products on processors with pipes of 256.
//!
//! Bits: the operations on each output, in order, are those of [`super::scalar::tile`].

#![expect(clippy::needless_range_loop, reason = "registers by number: an iterator would move them through memory")]

use super::activations::groups_in;
use super::sources::Source;
use super::vector::Vector;
use super::wide::{RUNS, Stretch};

/// Products of `COUNT` rows of a tile, from row `first` on, with some groups of a panel, added to `acc` or stored there. The tile's
/// words begin with the stretch's first group, and are those of the groups in its set alone.
///
/// # Safety
/// The caller has the vector's instructions. `stretch` is whole packed blocks.
#[inline(always)]
pub(super) unsafe fn tile<V: Vector, S: Source, const SUBS: usize, const W: usize, const COUNT: usize>(
    stretch: Stretch<'_>,
    first: usize,
    words: &[u32],
    acc: &mut [f32],
) {
    let runs = RUNS / SUBS;
    let sub_words = W * (runs + 3);
    let Stretch { packed, set, begins, ask } = stretch;
    let groups = packed.len() / S::BLOCK_BYTES * S::GROUPS;
    let count = set.map_or(groups, |set| groups_in(set, 0..groups).count());
    assert!(words.len() >= count * SUBS * sub_words && first + COUNT <= W && acc.len() >= W * 16);
    let asked = ask.next.wrapping_add(first / COUNT * groups * ask.group_bytes);
    for part in 0..16 / V::ROWS {
        let acc = acc.as_mut_ptr().wrapping_add(16 * first + part * V::ROWS);
        let mut at = words.as_ptr().cast::<i32>().wrapping_add(first * runs);
        let to_meta = W * runs + first - first * runs;
        let ask_bytes = if part == 0 { ask.group_bytes } else { 0 };
        // SAFETY: lengths were checked; instructions by the caller's promise.
        unsafe {
            let mut y = [V::splat(0.0); COUNT];
            if !begins {
                for t in 0..COUNT {
                    y[t] = V::load_float(acc.add(16 * t));
                }
            }
            let (mut all, mut listed) = (0..groups, set.map(|set| groups_in(set, 0..groups)));
            // A closure for the body would not have the caller's instructions.
            while let Some(group) = listed.as_mut().map_or_else(|| all.next(), Iterator::next) {
                for line in (0..ask_bytes).step_by(64) {
                    V::prefetch(asked.wrapping_add(group * ask_bytes + line));
                }
                let block = packed.as_ptr().add(group / S::GROUPS * S::BLOCK_BYTES);
                let weights = S::load::<V>(block, group % S::GROUPS, part);
                for sub in 0..SUBS {
                    let half = if S::HALVES == 2 { sub } else { 0 };
                    let meta = at.wrapping_add(to_meta);
                    let mut sums = [V::splat32(0); COUNT];
                    for t in 0..COUNT {
                        sums[t] = S::begin::<V>(meta.add(2 * W + t));
                    }
                    let together = S::together::<V>();
                    for from in (0..runs).step_by(together) {
                        let mut parts = sums;
                        for t in 0..COUNT {
                            parts[t] = S::open(sums[t]);
                        }
                        for run in from..runs.min(from + together) {
                            for t in 0..COUNT {
                                parts[t] = S::step(parts[t], weights.codes[sub * runs + run], at.add(t * runs + run));
                            }
                        }
                        for t in 0..COUNT {
                            sums[t] = S::close(sums[t], parts[t]);
                        }
                    }
                    for t in 0..COUNT {
                        let scale = V::mul(weights.scale[half], V::splat(*meta.add(t).cast::<f32>()));
                        y[t] = V::fma(scale, sums[t].to_float(), y[t]);
                        if S::HAS_MIN {
                            y[t] = V::fma(weights.min[half], V::splat(*meta.add(W + t).cast::<f32>()), y[t]);
                        }
                    }
                    at = at.wrapping_add(sub_words);
                }
            }
            for t in 0..COUNT {
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
            const COUNT: usize,
        >(
            stretches: $crate::kernels::gemm::wide::Stretches<'_>,
            words: &[u32],
            acc: &mut [f32],
        ) {
            use $crate::kernels::gemm::wide::{RUNS, Stretch};
            let $crate::kernels::gemm::wide::Stretches { panels, stretch_bytes, set, begins, asks } = stretches;
            let group_words = W * (RUNS + 3 * SUBS);
            for (panel, acc) in panels.bytes.chunks_exact(panels.panel_bytes).zip(acc.chunks_mut(panels.stride)) {
                let mut group = 0;
                for packed in panel.chunks(stretch_bytes) {
                    let stretch = Stretch { packed, set, begins: begins && group == 0, ask: asks.behind(packed) };
                    let words = &words[group * group_words..];
                    for first in (0..W).step_by(COUNT) {
                        // SAFETY: the instructions are enabled here; whole blocks by the caller's promise.
                        unsafe {
                            $crate::kernels::gemm::few::tile::<$vector, S, SUBS, W, COUNT>(stretch, first, words, acc);
                        }
                    }
                    group += packed.len() / S::BLOCK_BYTES * S::GROUPS;
                }
            }
        }

        /// Adds the products of stretches of panels of a type with a tile of `width` rows to `acc`.
        ///
        /// # Safety
        /// The processor has the instructions; stretches are whole packed blocks.
        pub(super) unsafe fn few_rows(
            dtype: DType,
            format: Format,
            stretches: $crate::kernels::gemm::wide::Stretches<'_>,
            width: usize,
            words: &[u32],
            acc: &mut [f32],
        ) {
            macro_rules! call {
                ($source:ident) => {{
                    type S = $crate::kernels::gemm::sources::$source;
                    let one_scale = <S as $crate::kernels::gemm::sources::Source>::HALVES == 1 && format.subs == 1;
                    match (one_scale, width) {
                        (true, 1) => few_rows_source::<S, 1, 1, 1>(stretches, words, acc),
                        (true, 2) => few_rows_source::<S, 1, 2, 2>(stretches, words, acc),
                        (true, 4) => few_rows_source::<S, 1, 4, 4>(stretches, words, acc),
                        (true, 8) => few_rows_source::<S, 1, 8, 8>(stretches, words, acc),
                        (true, 12) => few_rows_source::<S, 1, 12, 12>(stretches, words, acc),
                        (true, _) => few_rows_source::<S, 1, 16, 8>(stretches, words, acc),
                        (false, 1) => few_rows_source::<S, 2, 1, 1>(stretches, words, acc),
                        (false, 2) => few_rows_source::<S, 2, 2, 2>(stretches, words, acc),
                        (false, 4) => few_rows_source::<S, 2, 4, 4>(stretches, words, acc),
                        (false, 8) => few_rows_source::<S, 2, 8, 8>(stretches, words, acc),
                        (false, 12) => few_rows_source::<S, 2, 12, 12>(stretches, words, acc),
                        (false, _) => few_rows_source::<S, 2, 16, 8>(stretches, words, acc),
                    }
                }};
            }
            // SAFETY: the caller's promise.
            unsafe { $crate::kernels::gemm::sources::with_source!(dtype, call) }
        }
    };
}
pub(super) use few_rows_entry;
