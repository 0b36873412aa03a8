//! Writes keys and values of a step's tokens into the paged cache, rounded to its dtype.
//!
//! Shape: k [T, heads * head_dim], v [T, heads * value_dim], `slots [T]` (block * block_size + index; negative: skip). A task is
//! one head's keys or values over all tokens: two tokens with one slot (a caller's mistake) still write in order, from one
//! thread. Bound: memory traffic of k and v; of caches in pairs a token writes a pair, or half of one, to each line of its
//! sixteen positions, lines that its attention reads next.

use std::marker::PhantomData;

use super::cache::{CacheViewMut, check_block, in_pairs};
use super::error::{KernelError, same};
use super::rows::TASK_VALUES;
use super::simd::storage::{F32, Storage, with_storage};
use super::simd::{Kernel, LANES, Simd, dispatch};
use crate::isa::Isa;
use crate::matrix::Matrix;
use crate::parallel::Parallel;

#[cfg(test)]
mod tests;

const OP: &str = "kv_append";

/// Attributes of the cache.
#[derive(Debug, Clone, Copy)]
pub struct KvAppendArgs {
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Elements of a key head.
    pub head_dim: usize,
    /// Elements of a value head.
    pub value_dim: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// A block is `[block_size, head_dim + value_dim]`; there is one head.
    pub joined: bool,
}

/// Writes each row of `keys` and `values` at its slot.
///
/// # Errors
/// If sizes disagree, or a slot lies beyond the cache; nothing is written then.
pub fn kv_append(
    isa: Isa,
    parallel: &dyn Parallel,
    args: &KvAppendArgs,
    keys: Matrix<'_, f32>,
    values: Matrix<'_, f32>,
    slots: &[i32],
    cache: CacheViewMut<'_>,
) -> Result<(), KernelError> {
    let heads = args.num_key_value_heads;
    same(OP, "columns of k", keys.cols, heads * args.head_dim)?;
    same(OP, "columns of v", values.cols, heads * args.value_dim)?;
    same(OP, "rows of v", values.rows, keys.rows)?;
    same(OP, "slots", slots.len(), keys.rows)?;
    if args.joined {
        same(OP, "heads of a joined cache", heads, 1)?;
    }
    check_block(OP, cache.dtype, cache.block_bytes, args.block_size, keys.cols + values.cols)?;
    let limit = cache.num_blocks.saturating_mul(args.block_size);
    if let Some(index) = slots.iter().position(|&slot| usize::try_from(slot).is_ok_and(|slot| slot >= limit)) {
        let (found, high) = (i64::from(slots[index]), limit as i64);
        return Err(KernelError::Index { op: OP, what: "slots", index, found, low: i64::MIN, high });
    }
    let pairs = !args.joined && in_pairs(cache.dtype, args.block_size, args.head_dim, args.value_dim);
    let task = |i: usize| {
        let (source, head, width, is_value) =
            if i < heads { (keys, i, args.head_dim, false) } else { (values, i - heads, args.value_dim, true) };
        if pairs {
            let start = if is_value {
                (heads * args.head_dim + head * width) * args.block_size
            } else {
                head * width * args.block_size
            };
            let append = AppendPairs {
                source,
                column: head * width,
                width,
                slots,
                cache,
                block_size: args.block_size,
                start,
                is_value,
            };
            return dispatch(isa, append);
        }
        let (start, stride) = match (args.joined, is_value) {
            (true, false) => (0, args.head_dim + args.value_dim),
            (true, true) => (args.head_dim, args.head_dim + args.value_dim),
            (false, false) => (head * args.block_size * width, width),
            (false, true) => (heads * args.block_size * args.head_dim + head * args.block_size * width, width),
        };
        with_storage!(cache.dtype, T => {
            dispatch(isa, Append::<T> {
                source, column: head * width, width, slots, cache,
                block_size: args.block_size, start, stride, storage: PhantomData,
            });
        }, ());
    };
    if keys.rows * (keys.cols + values.cols) < 2 * TASK_VALUES {
        (0..2 * heads).for_each(task);
    } else {
        parallel.run(2 * heads, &task);
    }
    Ok(())
}

/// One head's keys or values.
struct Append<'a, T> {
    source: Matrix<'a, f32>,
    column: usize,
    width: usize,
    slots: &'a [i32],
    cache: CacheViewMut<'a>,
    block_size: usize,
    /// First value of the head in a block.
    start: usize,
    /// Values from token to token.
    stride: usize,
    storage: PhantomData<T>,
}

impl<T: Storage> Kernel for Append<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (row, &slot) in self.slots.iter().enumerate() {
            let Ok(slot) = usize::try_from(slot) else { continue };
            let offset = self.start + slot % self.block_size * self.stride;
            let block = self.cache.block(slot / self.block_size);
            for i in (0..self.width).step_by(LANES) {
                let n = self.width - i;
                // SAFETY: slots and block size were checked; no other task writes this head's place in a block.
                unsafe {
                    let x = F32::load_up_to(s, self.source.row_ptr(row).add(self.column + i).cast(), n);
                    T::store_up_to(s, block.add((offset + i) * T::BYTES), n, x);
                }
            }
        }
    }
}

/// One head's keys or values, in pairs.
struct AppendPairs<'a> {
    source: Matrix<'a, f32>,
    column: usize,
    width: usize,
    slots: &'a [i32],
    cache: CacheViewMut<'a>,
    block_size: usize,
    /// First value of the head in a block.
    start: usize,
    is_value: bool,
}

impl Kernel for AppendPairs<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (row, &slot) in self.slots.iter().enumerate() {
            let Ok(slot) = usize::try_from(slot) else { continue };
            let (group, place) = (slot % self.block_size / LANES, slot % LANES);
            let start = self.start + group * LANES * self.width;
            let head = self.cache.block(slot / self.block_size).wrapping_add(start * 2).cast::<u16>();
            for i in (0..self.width).step_by(LANES) {
                let n = (self.width - i).min(LANES);
                let mut rounded = [0u16; LANES];
                // SAFETY: slots and block size were checked; no other task writes this head's place in a block.
                unsafe {
                    let x = F32::load_up_to(s, self.source.row_ptr(row).add(self.column + i).cast(), n);
                    s.store_bf16(rounded.as_mut_ptr(), x);
                    if self.is_value {
                        let pairs = head.add((place / 2 * self.width + i) * 2 + place % 2);
                        for (d, x) in rounded.iter().enumerate() {
                            pairs.add(2 * d).write_unaligned(*x);
                        }
                    } else {
                        let pairs = head.add((i / 2 * LANES + place) * 2).cast::<[u16; 2]>();
                        for (k, pair) in rounded.as_chunks::<2>().0.iter().enumerate().take(n / 2) {
                            pairs.add(k * LANES).write_unaligned(*pair);
                        }
                    }
                }
            }
        }
    }
}
