//! Products of quantised weights with f32 activations, straight from the packed form.
//!
//! Shape: a panel of sixteen outputs times tiles of up to sixteen rows. A tile of `width` rows holds, for each group of 32 inputs,
//! `[width][32]` values and `[2][width]` sums of 16 values each, which minima multiply.
//!
//! One output: the codes of a group (of 16 inputs, if a scale holds for so many), as f32, times the values, in order, each with a
//! fused multiply-add from 0; that sum times the scale is added to the output with another, then, for types with minima,
//! the minimum times the sums of values. Scales and codes are exact, so a product of a weight is rounded no more often than if it had
//! been widened first. [`scalar_tile`] is the reference of [`tile`].
//!
//! One row is bound by widening codes (3 or 4 operations for 16 weights), which is near what memory gives; many rows by
//! multiply-adds, with a fifth for widening.

use super::activations::tree_sum;
use super::form::{Form, PANEL};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::sources::Source;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::vector::Vector;
use super::wide::{GROUP, WideGroup};
use crate::isa::Isa;

/// Words of a group of one row.
const GROUP_WORDS: usize = GROUP + 2;

/// Words of one row of `k` inputs.
pub(super) const fn row_words(k: usize) -> usize {
    k / GROUP * GROUP_WORDS
}

/// Fills a tile of `width` rows, of which `rows` exist.
pub(super) fn fill_tile(rows: &[&[f32]], width: usize, tile: &mut [f32]) {
    if rows.len() < width {
        tile.fill(0.0);
    }
    for (slot, row) in rows.iter().enumerate() {
        for (values, words) in row.as_chunks::<GROUP>().0.iter().zip(tile.chunks_exact_mut(GROUP_WORDS * width)) {
            words[slot * GROUP..][..GROUP].copy_from_slice(values);
            for (half, values) in values.chunks_exact(GROUP / 2).enumerate() {
                words[width * (GROUP + half) + slot] = tree_sum(values);
            }
        }
    }
}

/// Adds the products of a packed panel with a tile of `width` rows to `acc`, sixteen a row. `wide` is scratch of at least one block.
pub(super) fn multiply(
    isa: Isa,
    form: Form,
    panel: &[u8],
    width: usize,
    words: &[f32],
    wide: &mut [WideGroup],
    acc: &mut [f32],
) {
    // SAFETY: the instructions were detected; the panel is whole blocks.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        match isa {
            Isa::Amx | Isa::Avx512 => return super::avx512::exact(form.dtype, panel, width, words, acc),
            Isa::Avx2 => return super::avx2::exact(form.dtype, panel, width, words, acc),
            Isa::Neon | Isa::Scalar => {}
        }
    }
    #[cfg(target_arch = "aarch64")]
    if isa == Isa::Neon {
        return super::neon::exact(form.dtype, panel, width, words, acc);
    }
    let _ = isa;
    let wide = &mut wide[..form.groups()];
    let blocks = panel.chunks_exact(form.packed_block_bytes());
    for (block, words) in blocks.zip(words.chunks_exact(form.groups() * GROUP_WORDS * width)) {
        form.unpack(block, wide);
        scalar_tile(form.halves, form.has_min, width, wide, words, acc);
    }
}

/// Adds the products of unpacked groups and a tile to `acc`, sixteen a row.
fn scalar_tile(halves: usize, has_min: bool, width: usize, wide: &[WideGroup], words: &[f32], acc: &mut [f32]) {
    for (group, words) in wide.iter().zip(words.chunks_exact(GROUP_WORDS * width)) {
        let (values, sums) = words.split_at(GROUP * width);
        for (slot, (acc, values)) in
            acc.as_chunks_mut::<PANEL>().0.iter_mut().zip(values.as_chunks::<GROUP>().0).enumerate()
        {
            for (half, values) in values.chunks_exact(GROUP / halves).enumerate() {
                for (row, acc) in acc.iter_mut().enumerate() {
                    let mut sum = 0.0_f32;
                    for (input, value) in values.iter().enumerate() {
                        let input = half * (GROUP / halves) + input;
                        let code = i16::from(group.codes[input / 4][row][input % 4]) - 128;
                        sum = f32::from(code).mul_add(*value, sum);
                    }
                    *acc = group.scale[half][row].mul_add(sum, *acc);
                    if has_min {
                        for part in (half..2).step_by(halves) {
                            *acc = group.min[half][row].mul_add(sums[part * width + slot], *acc);
                        }
                    }
                }
            }
        }
    }
}

/// The same for any vector register, from a packed panel.
///
/// # Safety
/// The caller has the vector's instructions. `panel` is whole packed blocks.
#[inline(always)]
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[expect(clippy::needless_range_loop, reason = "registers by number: an iterator would move them through memory")]
pub(super) unsafe fn tile<V: Vector, S: Source, const W: usize>(panel: &[u8], words: &[f32], acc: &mut [f32]) {
    let groups = panel.len() / S::BLOCK_BYTES * S::GROUPS;
    assert!(words.len() >= groups * GROUP_WORDS * W && acc.len() >= W * PANEL);
    for part in 0..PANEL / V::ROWS {
        let acc = acc.as_mut_ptr().wrapping_add(part * V::ROWS);
        let mut at = words.as_ptr();
        // SAFETY: lengths were checked; instructions by the caller's promise.
        unsafe {
            let mut y = [V::splat(0.0); W];
            for t in 0..W {
                y[t] = V::load_float(acc.add(PANEL * t));
            }
            for group in 0..groups {
                let block = panel.as_ptr().add(group / S::GROUPS * S::BLOCK_BYTES);
                let weights = S::load::<V>(block, group % S::GROUPS, part);
                let runs = weights.codes.len() / S::HALVES;
                for half in 0..S::HALVES {
                    let mut sums = [V::splat(0.0); W];
                    for run in half * runs..(half + 1) * runs {
                        let codes = S::with_zero_at::<V, 0>(weights.codes[run]).signed_bytes_to_floats();
                        for i in 0..4 {
                            for t in 0..W {
                                sums[t] = V::fma(codes[i], V::splat(*at.add(GROUP * t + 4 * run + i)), sums[t]);
                            }
                        }
                    }
                    for t in 0..W {
                        y[t] = V::fma(weights.scale[half], sums[t], y[t]);
                        if S::HAS_MIN {
                            for part in (half..2).step_by(S::HALVES) {
                                let sum = V::splat(*at.add(W * (GROUP + part) + t));
                                y[t] = V::fma(weights.min[half], sum, y[t]);
                            }
                        }
                    }
                }
                at = at.add(GROUP_WORDS * W);
            }
            for t in 0..W {
                V::store_float(y[t], acc.add(PANEL * t));
            }
        }
    }
}

/// The entry point `exact` of an instruction set, by type.
macro_rules! exact_entry {
    ($vector:ty, $features:literal) => {
        #[target_feature(enable = $features)]
        unsafe fn exact_source<S: $crate::kernels::gemm::sources::Source, const W: usize>(
            panel: &[u8],
            words: &[f32],
            acc: &mut [f32],
        ) {
            // SAFETY: the instructions are enabled here; whole blocks by the caller's promise.
            unsafe { $crate::kernels::gemm::exact::tile::<$vector, S, W>(panel, words, acc) }
        }

        /// Adds the products of a panel of a type with a tile of `width` rows of f32 values to `acc`.
        ///
        /// # Safety
        /// The processor has the instructions; `panel` is whole packed blocks.
        pub(super) unsafe fn exact(dtype: DType, panel: &[u8], width: usize, words: &[f32], acc: &mut [f32]) {
            macro_rules! call {
                ($source:ident) => {{
                    type S = $crate::kernels::gemm::sources::$source;
                    match width {
                        1 => exact_source::<S, 1>(panel, words, acc),
                        2 => exact_source::<S, 2>(panel, words, acc),
                        4 => exact_source::<S, 4>(panel, words, acc),
                        8 => exact_source::<S, 8>(panel, words, acc),
                        12 => exact_source::<S, 12>(panel, words, acc),
                        _ => exact_source::<S, 16>(panel, words, acc),
                    }
                }};
            }
            // SAFETY: the caller's promise.
            unsafe { $crate::kernels::gemm::sources::with_source!(dtype, call) }
        }
    };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) use exact_entry;
