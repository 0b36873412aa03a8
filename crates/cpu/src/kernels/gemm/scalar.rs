//! The reference of the integer products: one tile of rows against a stretch of a panel.
//!
//! For row `r`, output `n`: `acc += scale_w * scale_a * isum` (the product of scales rounded first, then one fused
//! multiply-add), then, for types with minima, `acc += min_w * sum_a` (fused); groups in order. Every other variant does exactly
//! this, so results are the same bits.

use super::activations::Format;
use super::form::PANEL;
use super::wide::{RUNS, WideGroup};

/// Adds the products of `wide` groups and a tile's words (from the same group on) to `acc`, sixteen a row.
pub(super) fn tile(
    format: Format,
    halves: usize,
    has_min: bool,
    width: usize,
    wide: &[WideGroup],
    words: &[u32],
    acc: &mut [f32],
) {
    let subs = format.subs;
    let runs = RUNS / subs;
    let sub_words = width * (runs + 3);
    for (group, words) in wide.iter().zip(words.chunks_exact(subs * sub_words)) {
        for (sub, words) in words.chunks_exact(sub_words).enumerate() {
            let half = if halves == 2 { sub } else { 0 };
            let (scale, min) = (&group.scale[half], &group.min[half]);
            let weights = &group.codes[sub * runs..(sub + 1) * runs];
            let (codes, meta) = words.split_at(width * runs);
            for (slot, acc) in acc.as_chunks_mut::<PANEL>().0.iter_mut().enumerate().take(width) {
                let mut sums = [0; PANEL];
                for (weights, &word) in weights.iter().zip(&codes[slot * runs..][..runs]) {
                    add_products(weights, word, &mut sums);
                }
                let scale_a = f32::from_bits(meta[slot]);
                let sum_a = f32::from_bits(meta[width + slot]);
                for (row, acc) in acc.iter_mut().enumerate() {
                    *acc = (scale[row] * scale_a).mul_add(sums[row] as f32, *acc);
                    if has_min {
                        *acc = min[row].mul_add(sum_a, *acc);
                    }
                }
            }
        }
    }
}

/// Adds the products of four inputs of sixteen rows.
fn add_products(weights: &[[u8; 4]; PANEL], word: u32, sums: &mut [i32; PANEL]) {
    let codes = word.to_le_bytes().map(|byte| i32::from(byte.cast_signed()));
    for (sum, weights) in sums.iter_mut().zip(weights) {
        for (&weight, code) in weights.iter().zip(codes) {
            *sum += (i32::from(weight) - 128) * code;
        }
    }
}
