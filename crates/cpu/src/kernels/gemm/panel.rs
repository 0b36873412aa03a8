//! One panel of sixteen outputs for a block of rows: chooses the kernel and feeds it.

use qwen_formats::blocks;

use super::activations::{Format, padded_rows, tile_width};
use super::experts::Block;
use super::float::{self, Plain};
use super::form::{Form, PANEL};
use super::way::{Path, Way};
use super::wide::{GROUP, WideGroup};
use super::{Compute, Segment, WeightLayout};
use crate::isa::Isa;

/// Groups that are unpacked at a time: 12 KiB, which stay in the first-level cache beside a tile's activations. A multiple of the
/// groups of every type's block.
pub(super) const CHUNK: usize = 16;

/// How a weight meets its activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// f32 products, weights read in place.
    InPlace(Plain),
    /// f32 products, the panel widened to f32 before.
    Widened,
    /// Integer products.
    Rounded(Form, Format),
}

impl Mode {
    pub(super) const fn of(layout: &WeightLayout, compute: Compute) -> Self {
        let Some(form) = layout.form() else {
            return match (Plain::of(layout.dtype()), layout.block()) {
                (Some(plain), None) => Self::InPlace(plain),
                _ => Self::Widened,
            };
        };
        let (group, terms, spikes) = match compute {
            Compute::F32 | Compute::Bf16 => return Self::Widened,
            Compute::I8G32 => (32, 1, false),
            Compute::I8G16 => (16, 1, false),
            Compute::I8X2G32 => (32, 2, false),
            Compute::I8SG32 => (32, 2, true),
        };
        let subs = if group == 16 || form.halves == 2 { 2 } else { 1 };
        Self::Rounded(form, Format { group, subs, terms, spikes })
    }
}

/// A thread's scratch.
pub(super) struct Worker<'a> {
    /// Accumulators of one or two panels, sixteen for each row.
    pub(super) acc: [&'a mut [f32]; 2],
    /// [`CHUNK`] groups, if any weight is quantised.
    pub(super) wide: &'a mut [WideGroup],
    /// A panel as f32, if any weight is widened.
    pub(super) values: &'a mut [f32],
}

/// A segment's panel and the rows that it meets.
pub(super) struct Job<'a> {
    pub(super) way: Way,
    pub(super) segment: &'a Segment<'a>,
    pub(super) panel: usize,
    pub(super) block: Block,
    /// Rounded activations of the block's rows, empty for f32 products.
    pub(super) words: &'a [u32],
    /// For a format with spikes, by row, at the first of a tile: whether the tile has second terms. Else empty.
    pub(super) spiked: &'a [u32],
    /// Address of the activations of the block's `i`-th row.
    pub(super) tokens: &'a dyn Fn(usize) -> *const f32,
}

impl Job<'_> {
    /// The panel's bytes: whole packed blocks, or up to sixteen rows of the file.
    fn panel_bytes(&self) -> &[u8] {
        let layout = &self.segment.layout;
        let expert = &self.segment.weight[self.block.expert * layout.weight_bytes()..][..layout.weight_bytes()];
        let bytes = PANEL * layout.row_bytes();
        &expert[self.panel * bytes..expert.len().min((self.panel + 1) * bytes)]
    }

    /// Computes the panel into the accumulators of one side.
    ///
    /// # Safety
    /// `tokens` gives addresses of whole rows for all rows of the block.
    pub(super) unsafe fn run(&self, worker: &mut Worker<'_>, side: usize) {
        let Worker { acc, wide, values } = worker;
        let acc = &mut *acc[side];
        match Mode::of(&self.segment.layout, self.segment.compute) {
            Mode::InPlace(plain) => {
                // SAFETY: the caller's promise.
                unsafe { self.float(plain, self.panel_bytes(), acc) };
            }
            Mode::Widened => {
                let bytes = self.widen(values);
                // SAFETY: the caller's promise.
                unsafe { self.float(Plain::F32, bytes, acc) };
            }
            Mode::Rounded(form, format) => {
                acc[..padded_rows(self.block.rows) * PANEL].fill(0.0);
                self.rounded(form, format, wide, acc);
            }
        }
    }

    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn float(&self, plain: Plain, weights: &[u8], acc: &mut [f32]) {
        let panel = float::Panel {
            isa: self.way.isa,
            plain,
            weights,
            k: self.segment.layout.k(),
            tokens: self.tokens,
            num_tokens: self.block.rows,
            acc,
        };
        // SAFETY: the caller's promise.
        unsafe { float::panel(panel) };
    }

    /// The panel's rows as f32, as bytes.
    fn widen<'v>(&self, values: &'v mut [f32]) -> &'v [u8] {
        let layout = &self.segment.layout;
        let k = layout.k();
        let rows = PANEL.min(layout.n() - self.panel * PANEL);
        let values = &mut values[..PANEL * k];
        if let Some(form) = layout.form() {
            form.values(self.panel_bytes(), values);
        } else {
            let decoded = blocks::dequantize(layout.dtype(), self.panel_bytes(), &mut values[..rows * k]);
            debug_assert!(decoded.is_ok(), "{decoded:?}");
            self.scale(values);
        }
        let bytes = rows * k * size_of::<f32>();
        // SAFETY: the bytes of f32 values, at most the slice.
        unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), bytes) }
    }

    /// Multiplies separate scales in.
    fn scale(&self, values: &mut [f32]) {
        let layout = &self.segment.layout;
        if let (Some([block_rows, block_cols]), Some(scales)) = (layout.block(), self.segment.scales) {
            let scales = &scales[self.block.expert * layout.num_scales()..][..layout.num_scales()];
            let per_row = layout.k().div_ceil(block_cols);
            let first = self.panel * PANEL;
            for (row, values) in (first..layout.n()).zip(values.chunks_exact_mut(layout.k())) {
                let scales = &scales[row / block_rows * per_row..][..per_row];
                for (values, scale) in values.chunks_mut(block_cols).zip(scales) {
                    values.iter_mut().for_each(|value| *value *= scale);
                }
            }
        }
    }

    fn rounded(&self, form: Form, format: Format, wide: &mut [WideGroup], acc: &mut [f32]) {
        let panel = self.panel_bytes();
        let tile_format = |row: usize| format.of_tile(self.spiked.get(row).is_some_and(|&spiked| spiked != 0));
        let path = self.way.path(self.block.rows);
        #[cfg(target_arch = "x86_64")]
        if let Path::OneRow { ahead } = path
            && let Some(acc) = acc.first_chunk_mut()
        {
            // SAFETY: the instructions were detected; the panel is whole blocks and the words one row over its inputs.
            unsafe {
                let format = tile_format(0);
                if self.way.isa >= Isa::Avx512 && ahead {
                    super::avx512::gemv::<{ crate::isa::AHEAD }>(form.dtype, format, panel, self.words, acc);
                } else if self.way.isa >= Isa::Avx512 {
                    super::avx512::gemv::<0>(form.dtype, format, panel, self.words, acc);
                } else {
                    super::avx2::gemv::<0>(form.dtype, format, panel, self.words, acc);
                }
            }
            return;
        }
        #[cfg(target_arch = "aarch64")]
        if let Path::OneRow { .. } = path
            && let Some(acc) = acc.first_chunk_mut()
        {
            // SAFETY: the panel is whole blocks and the words one row over its inputs.
            return unsafe { super::neon::gemv(form.dtype, tile_format(0), panel, self.words, acc) };
        }
        let k = self.segment.layout.k();
        let row_words = format.row_words(k);
        let mut products = Products::new(self.way.isa, form, path);
        let chunk_bytes = CHUNK / form.groups() * form.packed_block_bytes();
        for (i, packed) in panel.chunks(chunk_bytes).enumerate() {
            let groups = packed.len() / form.packed_block_bytes() * form.groups();
            debug_assert!((i * CHUNK + groups) * GROUP <= k);
            let wide = &mut wide[..groups];
            products.unpack(packed, wide);
            products.ask_for(packed.as_ptr().wrapping_add(packed.len()), chunk_bytes);
            let mut row = 0;
            while row < self.block.rows {
                let width = tile_width(self.block.rows - row);
                let format = tile_format(row);
                let group_words = format.group_words();
                let first = row * row_words + i * CHUNK * group_words * width;
                let words = &self.words[first..first + groups * group_words * width];
                products.multiply(format, width, wide, words, &mut acc[row * PANEL..][..width * PANEL]);
                row += width;
            }
        }
    }
}

/// Unpacking and multiplying with the best instructions for a number of rows.
struct Products {
    isa: Isa,
    form: Form,
    /// Codes are unpacked as signed bytes, for tile registers.
    #[cfg(target_arch = "x86_64")]
    tiles: Option<super::amx::Tiles>,
}

impl Products {
    fn new(isa: Isa, form: Form, path: Path) -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let tiles = (path == Path::Tiles).then(super::amx::Tiles::new);
            Self { isa, form, tiles }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = path;
            Self { isa, form }
        }
    }

    fn unpack(&self, packed: &[u8], wide: &mut [WideGroup]) {
        #[cfg(target_arch = "x86_64")]
        {
            let dtype = self.form.dtype;
            if self.tiles.is_some() {
                // SAFETY: the instructions were detected.
                return unsafe { super::avx512::unpack::<0>(dtype, packed, wide) };
            }
            if self.isa >= Isa::Avx512 {
                // SAFETY: the instructions were detected.
                return unsafe { super::avx512::unpack::<128>(dtype, packed, wide) };
            }
            if self.isa == Isa::Avx2 {
                // SAFETY: the instructions were detected.
                return unsafe { super::avx2::unpack::<128>(dtype, packed, wide) };
            }
        }
        #[cfg(target_arch = "aarch64")]
        if self.isa == Isa::Neon {
            return super::neon::unpack(self.form.dtype, packed, wide);
        }
        self.form.unpack(packed, wide);
    }

    /// Asks for the bytes that will be unpacked next, so that they come while this stretch is multiplied. Behind the last of a
    /// panel is the next panel; behind the last of a weight may be anything, which does no harm.
    fn ask_for(&self, next: *const u8, bytes: usize) {
        #[cfg(target_arch = "x86_64")]
        if self.isa != Isa::Scalar {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            for at in (0..bytes).step_by(64) {
                // SAFETY: asking reads nothing, so any address will do.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(at).cast()) };
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (next, bytes);
    }

    fn multiply(&mut self, format: Format, width: usize, wide: &[WideGroup], words: &[u32], acc: &mut [f32]) {
        let (halves, has_min) = (self.form.halves, self.form.has_min);
        #[cfg(target_arch = "x86_64")]
        {
            if let Some(tiles) = &mut self.tiles {
                // SAFETY: the instructions were detected; lengths are checked inside.
                return unsafe { super::amx::multiply(tiles, format, halves, has_min, width, wide, words, acc) };
            }
            if self.isa >= Isa::Avx512 {
                // SAFETY: as above.
                return unsafe { super::avx512::multiply(format, halves, has_min, width, wide, words, acc) };
            }
            if self.isa == Isa::Avx2 {
                // SAFETY: as above.
                return unsafe { super::avx2::multiply(format, halves, has_min, width, wide, words, acc) };
            }
        }
        #[cfg(target_arch = "aarch64")]
        if self.isa == Isa::Neon {
            return super::neon::multiply(format, halves, has_min, width, wide, words, acc);
        }
        super::scalar::tile(format, halves, has_min, width, wide, words, acc);
    }
}
