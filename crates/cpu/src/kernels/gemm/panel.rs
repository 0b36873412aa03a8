//! One panel of sixteen outputs for a block of rows: chooses the kernel and feeds it.

use super::activations::{Format, MAX_WIDTH, Seconds, groups_in, padded_rows, rows_together, tile_width, tiles};
use super::bf16;
use super::epilogue::{AddSeconds, add_seconds};
use super::exact;
use super::experts::Block;
use super::f8;
use super::float::{self, Plain};
use super::form::{Form, PANEL};
use super::way::{Path, Way};
use super::wide::{Ask, Asks, GROUP, Panels, Stretches, Tiles, WideGroup};
use super::widen::{self, Scales};
use super::{Compute, Segment, WeightLayout};
use crate::isa::Isa;

/// Most groups that are unpacked at a time: 13.5 KiB, which stay in the first-level cache beside a tile's activations.
pub(super) const CHUNK: usize = 18;

/// Rows from which on a step takes long enough to ask for weights: processors that don't always ask ([`Path::FewRows`]) read ahead
/// well enough by themselves as long as reading is all they do.
const ASKING_ROWS: usize = 5;

/// Accumulators from panel to panel of a run: those of first terms, and as many of second ones.
pub(super) const fn run_stride(rows: usize) -> usize {
    2 * PANEL * padded_rows(rows)
}

/// How a weight meets its activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// f32 products, weights read in place.
    InPlace(Plain),
    /// Products of bfloat16 pairs, weights read in place.
    Bf16,
    /// f32 products, straight from the packed form.
    Exact(Form),
    /// f32 products, the panel widened to f32 before.
    Widened,
    /// Integer products.
    Rounded(Form, Format, Seconds),
}

impl Mode {
    pub(super) const fn of(layout: &WeightLayout, compute: Compute) -> Self {
        let Some(form) = layout.form() else {
            return match (Plain::of(layout.dtype()), layout.block()) {
                (Some(Plain::Bf16), None) if matches!(compute, Compute::Bf16) => Self::Bf16,
                (Some(plain), None) => Self::InPlace(plain),
                _ => Self::Widened,
            };
        };
        let (group, seconds) = match compute {
            Compute::F32 | Compute::Bf16 => return Self::Exact(form),
            Compute::I8G32 => (32, Seconds::None),
            Compute::I8G16 => (16, Seconds::None),
            Compute::I8X2G32 => (32, Seconds::All),
            Compute::I8SG32 => (32, Seconds::Spiked),
        };
        let subs = if group == 16 || form.halves == 2 { 2 } else { 1 };
        Self::Rounded(form, Format { group, subs }, seconds)
    }
}

/// Rounded activations of some rows.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Terms<'a> {
    /// Tiles.
    pub(super) words: &'a [u32],
    /// How many rows.
    pub(super) count: usize,
    /// Groups of a row: all, or those with second terms.
    pub(super) groups: usize,
}

/// Which rows and groups of a block have second terms.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spiked<'a> {
    /// Rows of the block, in order: those of the second terms.
    pub(super) rows: &'a [u32],
    /// Set of groups, those that any of the rows has.
    pub(super) groups: &'a [u32],
}

/// A thread's scratch.
pub(super) struct Worker<'a> {
    /// Accumulators of one or two panels, sixteen for each row and each second term.
    pub(super) acc: [&'a mut [f32]; 2],
    /// Twice [`CHUNK`] groups, if any weight is quantised: a stretch, and those of its groups that have second terms.
    pub(super) wide: &'a mut [WideGroup],
    /// A panel as f32, if any weight is widened.
    pub(super) values: &'a mut [f32],
}

/// A block's rows as a segment wants them.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) mode: Mode,
    /// First terms, and second terms; empty for f32 products.
    pub(super) terms: [Terms<'a>; 2],
    /// Rows as bfloat16, where the weight wants them so.
    pub(super) bf16: &'a [u16],
    /// Rows as tiles of f32 values, where the weight wants them so.
    pub(super) floats: &'a [f32],
    /// Where second terms are; absent: everywhere.
    pub(super) spiked: Option<Spiked<'a>>,
}

/// A segment's panel and the rows that it meets.
pub(super) struct Job<'a> {
    pub(super) way: Way,
    pub(super) segment: &'a Segment<'a>,
    pub(super) panel: usize,
    pub(super) block: Block,
    pub(super) rows: Rows<'a>,
    /// Address of the activations of the block's `i`-th row.
    pub(super) tokens: &'a dyn Fn(usize) -> *const f32,
}

impl Job<'_> {
    /// The panel's bytes: whole packed blocks, or up to sixteen rows of the file.
    fn panel_bytes(&self) -> &[u8] {
        self.bytes_of_panels(1)
    }

    /// Bytes of so many panels from this one on.
    fn bytes_of_panels(&self, panels: usize) -> &[u8] {
        let layout = &self.segment.layout;
        let expert = &self.segment.weight[self.block.expert * layout.weight_bytes()..][..layout.weight_bytes()];
        let bytes = PANEL * layout.row_bytes();
        &expert[self.panel * bytes..expert.len().min((self.panel + panels) * bytes)]
    }

    /// Computes the panel into the accumulators of one side, from one of them on.
    ///
    /// # Safety
    /// `tokens` gives addresses of whole rows for all rows of the block.
    pub(super) unsafe fn run(&self, worker: &mut Worker<'_>, side: usize, from: usize) {
        let Worker { acc, wide, values } = worker;
        let acc = &mut acc[side][from..];
        match self.rows.mode {
            Mode::InPlace(plain) => {
                // SAFETY: the caller's promise.
                unsafe { self.float(plain, self.panel_bytes(), acc) };
            }
            Mode::Bf16 => {
                let k = self.segment.layout.k();
                let token = |i: usize| self.rows.bf16[i * k..][..k].as_ptr().cast();
                // SAFETY: a slice of a row's values.
                unsafe { bf16::panel(self.float_panel(self.panel_bytes(), &token, acc)) };
            }
            Mode::Exact(form) => self.exact(form, wide, acc),
            Mode::Widened if self.block.rows == 1 && self.takes_bytes() => {
                // SAFETY: the caller's promise.
                let inputs = unsafe { std::slice::from_raw_parts((self.tokens)(0), self.segment.layout.k()) };
                self.bytes_times_one_row(inputs, acc);
            }
            Mode::Widened => {
                let bytes = self.widen(values);
                // SAFETY: the caller's promise.
                unsafe { self.float(Plain::F32, bytes, acc) };
            }
            Mode::Rounded(form, format, _) => self.rounded(form, format, wide, acc),
        }
    }

    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn float(&self, plain: Plain, weights: &[u8], acc: &mut [f32]) {
        let token = |i: usize| (self.tokens)(i).cast();
        // SAFETY: the caller's promise.
        unsafe { float::panel(plain, self.float_panel(weights, &token, acc)) };
    }

    fn float_panel<'p>(
        &self,
        weights: &'p [u8],
        tokens: &'p dyn Fn(usize) -> *const u8,
        acc: &'p mut [f32],
    ) -> float::Panel<'p> {
        let (isa, k, num_tokens) = (self.way.isa, self.segment.layout.k(), self.block.rows);
        float::Panel { isa, weights, k, tokens, num_tokens, acc }
    }

    /// f32 products of packed weights.
    fn exact(&self, form: Form, wide: &mut [WideGroup], acc: &mut [f32]) {
        let row_words = exact::row_words(self.segment.layout.k());
        acc[..padded_rows(self.block.rows) * PANEL].fill(0.0);
        for (row, width) in tiles(self.block.rows) {
            let words = &self.rows.floats[row * row_words..][..width * row_words];
            exact::multiply(
                self.way.isa,
                form,
                self.panel_bytes(),
                width,
                words,
                wide,
                &mut acc[row * PANEL..][..width * PANEL],
            );
        }
    }

    /// The panel's rows as f32, as bytes; separate scales are multiplied in.
    fn widen<'v>(&self, values: &'v mut [f32]) -> &'v [u8] {
        let layout = &self.segment.layout;
        let (k, first) = (layout.k(), self.panel * PANEL);
        let rows = PANEL.min(layout.n() - first);
        let values = &mut values[..rows * k];
        let lines = self.panel_bytes().chunks_exact(layout.row_bytes()).zip(values.chunks_exact_mut(k));
        for (row, (bytes, values)) in (first..).zip(lines) {
            widen::row(self.way.isa, layout.dtype(), bytes, self.scales(row), values);
        }
        let bytes = rows * k * size_of::<f32>();
        // SAFETY: the bytes of f32 values, at most the slice.
        unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), bytes) }
    }

    /// Whether one row is multiplied straight from bytes.
    fn takes_bytes(&self) -> bool {
        let layout = &self.segment.layout;
        f8::takes(layout.dtype(), layout.k(), layout.block().map_or(usize::MAX, |[_, columns]| columns))
    }

    /// The products of 8-bit floats with a block's only row.
    fn bytes_times_one_row(&self, inputs: &[f32], acc: &mut [f32]) {
        let (layout, first) = (&self.segment.layout, self.panel * PANEL);
        let rows = self.panel_bytes().chunks_exact(layout.row_bytes());
        for (row, (weights, acc)) in (first..).zip(rows.zip(acc)) {
            let scales = self.scales(row).unwrap_or(Scales { values: &[1.0], columns: usize::MAX });
            *acc = f8::multiply(self.way.isa, layout.dtype(), f8::Row { weights, scales, inputs });
        }
    }

    /// Separate scales of a row.
    fn scales(&self, row: usize) -> Option<Scales<'_>> {
        let layout = &self.segment.layout;
        let ([block_rows, columns], scales) = (layout.block()?, self.segment.scales?);
        let scales = &scales[self.block.expert * layout.num_scales()..][..layout.num_scales()];
        let per_row = layout.k().div_ceil(columns);
        Some(Scales { values: &scales[row / block_rows * per_row..][..per_row], columns })
    }

    fn rounded(&self, form: Form, format: Format, wide: &mut [WideGroup], acc: &mut [f32]) {
        let path = self.way.path(self.block.rows, format.subs);
        if !matches!(path, Path::Vectors | Path::Tiles) {
            return self.packed(form, format, path, 1, acc);
        }
        let [firsts, seconds] = self.rows.terms.map(|terms| padded_rows(terms.count) * PANEL);
        let both = &mut acc[..firsts + seconds];
        both.fill(0.0);
        let (first_acc, second_acc) = both.split_at_mut(firsts);
        self.by_stretches(form, format, path, wide, first_acc, second_acc);
        self.add_seconds(1, acc);
    }

    /// Adds the sums of second terms to those of first ones, of consecutive panels.
    fn add_seconds(&self, panels: usize, acc: &mut [f32]) {
        let [first, second] = self.rows.terms;
        if second.count > 0 {
            let rows = self.rows.spiked.map(|spiked| spiked.rows);
            let firsts = padded_rows(first.count) * PANEL;
            let stride = run_stride(self.block.rows);
            add_seconds(self.way.isa, AddSeconds { acc, stride, panels, firsts, count: second.count, rows });
        }
    }

    /// Unpacks the panel by stretches, each multiplied with all rows.
    fn by_stretches(
        &self,
        form: Form,
        format: Format,
        path: Path,
        wide: &mut [WideGroup],
        acc: &mut [f32],
        second_acc: &mut [f32],
    ) {
        let mut products = Products::new(self.way.isa, form, path);
        let (wide, with_seconds) = wide.split_at_mut(CHUNK);
        let mut seconds_done = 0;
        let mut first_group = 0;
        for packed in self.panel_bytes().chunks(self.stretch_bytes(form)) {
            let groups = packed.len() / form.packed_block_bytes() * form.groups();
            let wide = &mut wide[..groups];
            products.unpack(packed, wide);
            // Behind the last stretch of a panel is the next panel; behind the last of a weight may be anything, which does no harm.
            let group_bytes = form.packed_block_bytes() / form.groups();
            let ask = Ask { next: packed.as_ptr().wrapping_add(packed.len()), group_bytes };
            self.tiles(&mut products, format, self.rows.terms[0], first_group, wide, ask, acc);
            if self.rows.terms[1].count > 0 {
                let wide = match self.rows.spiked {
                    None => &*wide,
                    Some(spiked) => gather(spiked.groups, first_group, wide, with_seconds),
                };
                self.tiles(&mut products, format, self.rows.terms[1], seconds_done, wide, Ask::NOTHING, second_acc);
                seconds_done += wide.len();
            }
            first_group += groups;
        }
    }

    /// Bytes of a stretch of the panel. Stretches are of nearly the same length: a short one would cost more than its share.
    fn stretch_bytes(&self, form: Form) -> usize {
        let blocks = self.panel_bytes().len() / form.packed_block_bytes();
        let stretches = blocks.div_ceil(CHUNK / form.groups());
        blocks.div_ceil(stretches.max(1)).max(1) * form.packed_block_bytes()
    }

    /// All tiles times unpacked groups, from the tiles' `first_group` on. The first tile asks for what is unpacked next.
    #[expect(clippy::too_many_arguments, reason = "one stretch of a panel")]
    fn tiles(
        &self,
        products: &mut Products,
        format: Format,
        terms: Terms<'_>,
        first_group: usize,
        wide: &[WideGroup],
        mut ask: Ask,
        acc: &mut [f32],
    ) {
        let group_words = format.group_words();
        let row_words = terms.groups * group_words;
        let full = terms.count / MAX_WIDTH;
        let rest = tile_width(terms.count % MAX_WIDTH);
        for (row, width, count) in [(0, MAX_WIDTH, full), (full * MAX_WIDTH, rest, 1)] {
            if width * count == 0 {
                continue;
            }
            let words = &terms.words[row * row_words + first_group * group_words * width..];
            let tiles = Tiles { width, count, words, stride: width * row_words };
            products.multiply(format, tiles, wide, ask, &mut acc[row * PANEL..][..count * width * PANEL]);
            ask = Ask::NOTHING;
        }
    }

    /// Whether consecutive panels are computed by one call of [`run_of_panels`](Self::run_of_panels).
    pub(super) fn takes_runs(&self) -> bool {
        let Mode::Rounded(_, format, _) = self.rows.mode else { return false };
        let path = self.way.path(self.block.rows, format.subs);
        self.block.rows <= MAX_WIDTH && !matches!(path, Path::Vectors | Path::Tiles)
    }

    /// Computes so many panels from this one on into the accumulators of one side, [`run_stride`] from panel to
    /// panel. Between two panels nothing keeps the processor from reading on.
    pub(super) fn run_of_panels(&self, worker: &mut Worker<'_>, side: usize, panels: usize) {
        let Mode::Rounded(form, format, _) = self.rows.mode else { return };
        let path = self.way.path(self.block.rows, format.subs);
        self.packed(form, format, path, panels, &mut *worker.acc[side]);
    }

    /// The products of a block's rows with consecutive panels, straight from the packed form: for [`Path::OneRow`] and
    /// [`Path::FewRows`], which vector instruction sets alone have.
    fn packed(&self, form: Form, format: Format, path: Path, panels: usize, acc: &mut [f32]) {
        let panel_bytes = PANEL * self.segment.layout.row_bytes();
        let stride = run_stride(self.block.rows);
        let run = Panels { bytes: self.bytes_of_panels(panels), panel_bytes, stride };
        let [first, second] = self.rows.terms;
        match path {
            Path::OneRow { ahead } => {
                self.one_row(form, format, ahead, run, acc);
                if self.rows.spiked.is_none() {
                    return;
                }
            }
            Path::FewRows { ahead } => {
                self.few_rows(form, format, ahead || self.block.rows >= ASKING_ROWS, first, run, acc);
            }
            Path::Vectors | Path::Tiles => {}
        }
        // Their sums lie behind those of the first terms.
        if second.count > 0 {
            self.few_rows(form, format, false, second, run, &mut acc[padded_rows(first.count) * PANEL..]);
        }
        self.add_seconds(panels, acc);
    }

    /// The products of a block's only row with panels straight from the packed form; second terms too, if they are everywhere.
    fn one_row(&self, form: Form, format: Format, ahead: bool, panels: Panels<'_>, acc: &mut [f32]) {
        let [first, second] = self.rows.terms;
        let words = [first.words, if self.rows.spiked.is_none() { second.words } else { &[] }];
        let dtype = form.dtype;
        // SAFETY: the instructions were detected; panels are whole blocks and the words one row over their inputs.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            match (self.way.isa >= Isa::Avx512, ahead) {
                (true, true) => super::avx512::gemv::<{ crate::isa::AHEAD }>(dtype, format, panels, words, acc),
                (true, false) => super::avx512::gemv::<0>(dtype, format, panels, words, acc),
                (false, _) => super::avx2::gemv::<0>(dtype, format, panels, words, acc),
            }
        }
        // SAFETY: as above.
        #[cfg(target_arch = "aarch64")]
        unsafe {
            super::neon::gemv(dtype, format, panels, words, acc);
        }
        let _ = (dtype, format, ahead, panels, words, acc);
    }

    /// The products of some terms with panels straight from the packed form, for vector instruction sets: by stretches if what comes
    /// next is asked for, each by all tiles.
    fn few_rows(&self, form: Form, format: Format, asks: bool, terms: Terms<'_>, panels: Panels<'_>, acc: &mut [f32]) {
        let group_words = format.group_words();
        let all = terms.groups == self.segment.layout.k() / GROUP;
        let set = self.rows.spiked.map(|spiked| spiked.groups).filter(|_| !all);
        let stretch_bytes = if asks { self.stretch_bytes(form) } else { panels.panel_bytes };
        let passes: usize = tiles(terms.count).map(|(_, width)| width / rows_together(width)).sum();
        let group_bytes = (form.packed_block_bytes() / form.groups()).div_ceil(passes.max(1));
        let next = Asks { offset: 0, group_bytes: if asks { group_bytes } else { 0 } };
        if terms.count <= MAX_WIDTH {
            let run = Stretches { panels, stretch_bytes, set, begins: true, asks: next };
            return self.few_rows_tile(form, format, run, tile_width(terms.count), terms.words, acc);
        }
        let panel_acc = acc.chunks_mut(panels.stride);
        for (panel, acc) in panels.bytes.chunks_exact(panels.panel_bytes).zip(panel_acc) {
            let mut group = 0;
            for packed in panel.chunks(stretch_bytes) {
                let groups = packed.len() / form.packed_block_bytes() * form.groups();
                let mut asks = next;
                for (row, width) in tiles(terms.count) {
                    let words = &terms.words[(row * terms.groups + group * width) * group_words..];
                    let acc = &mut acc[row * PANEL..][..width * PANEL];
                    let piece = Panels { bytes: packed, panel_bytes: packed.len(), stride: acc.len() };
                    let stretch =
                        Stretches { panels: piece, stretch_bytes: packed.len(), set, begins: group == 0, asks };
                    self.few_rows_tile(form, format, stretch, width, words, acc);
                    asks.offset += width / rows_together(width) * groups * group_bytes;
                }
                group += groups;
            }
        }
    }

    /// One tile of [`few_rows`](Self::few_rows) times stretches.
    fn few_rows_tile(
        &self,
        form: Form,
        format: Format,
        stretches: Stretches<'_>,
        width: usize,
        words: &[u32],
        acc: &mut [f32],
    ) {
        let dtype = form.dtype;
        // SAFETY: the instructions were detected; stretches are whole blocks.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            if self.way.isa >= Isa::Avx512 {
                super::avx512::few_rows(dtype, format, stretches, width, words, acc);
            } else {
                super::avx2::few_rows(dtype, format, stretches, width, words, acc);
            }
        }
        // SAFETY: as above.
        #[cfg(target_arch = "aarch64")]
        unsafe {
            super::neon::few_rows(dtype, format, stretches, width, words, acc);
        }
        let _ = (dtype, format, stretches, width, words, acc);
    }
}

/// Those groups of a stretch that are in a set, one behind the other.
fn gather<'w>(set: &[u32], first_group: usize, wide: &'w [WideGroup], to: &'w mut [WideGroup]) -> &'w [WideGroup] {
    let mut count = 0;
    for (to, group) in to.iter_mut().zip(groups_in(set, first_group..first_group + wide.len())) {
        *to = wide[group - first_group];
        count += 1;
    }
    if count == wide.len() { wide } else { &to[..count] }
}

/// Unpacking and multiplying with the best instructions for a number of rows.
struct Products {
    isa: Isa,
    form: Form,
    /// Codes are unpacked as signed bytes, for tile registers.
    #[cfg(target_arch = "x86_64")]
    registers: Option<super::amx::Registers>,
}

impl Products {
    fn new(isa: Isa, form: Form, path: Path) -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let registers = (path == Path::Tiles).then(super::amx::Registers::new);
            Self { isa, form, registers }
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
            if self.registers.is_some() {
                // SAFETY: the instructions were detected.
                return unsafe { super::avx512::unpack::<0>(dtype, packed, wide) };
            }
            if self.isa >= Isa::Avx512 {
                // SAFETY: the instructions were detected.
                return unsafe { super::avx512::unpack::<128>(dtype, packed, wide) };
            }
            if self.isa == Isa::Avx2 {
                // SAFETY: the instructions were detected.
                return unsafe { super::avx2::unpack::<{ super::sources::OWN }>(dtype, packed, wide) };
            }
        }
        #[cfg(target_arch = "aarch64")]
        if self.isa == Isa::Neon {
            return super::neon::unpack(self.form.dtype, packed, wide);
        }
        self.form.unpack(packed, wide);
    }

    fn multiply(&mut self, format: Format, tiles: Tiles<'_>, wide: &[WideGroup], mut ask: Ask, acc: &mut [f32]) {
        let (halves, has_min) = (self.form.halves, self.form.has_min);
        #[cfg(target_arch = "x86_64")]
        if let Some(registers) = &mut self.registers {
            // SAFETY: the instructions were detected; lengths are checked inside.
            return unsafe { super::amx::multiply(registers, format, (halves, has_min), wide, tiles, ask, acc) };
        }
        let width = tiles.width;
        for (tile, acc) in acc.chunks_exact_mut(width * PANEL).enumerate() {
            let words = &tiles.words[tile * tiles.stride..][..wide.len() * format.group_words() * width];
            self.multiply_one(format, width, wide, words, ask, acc);
            ask = Ask::NOTHING;
        }
    }

    fn multiply_one(&self, format: Format, width: usize, wide: &[WideGroup], words: &[u32], ask: Ask, acc: &mut [f32]) {
        let (halves, has_min) = (self.form.halves, self.form.has_min);
        #[cfg(target_arch = "x86_64")]
        {
            if self.isa >= Isa::Avx512 {
                // SAFETY: the instructions were detected; lengths are checked inside.
                return unsafe { super::avx512::multiply(format, halves, has_min, width, wide, words, ask, acc) };
            }
            for group in 0..wide.len() {
                ask.group(group);
            }
            if self.isa == Isa::Avx2 {
                // SAFETY: as above.
                return unsafe { super::avx2::multiply(self.form.dtype, format, width, wide, words, acc) };
            }
        }
        #[cfg(target_arch = "aarch64")]
        if self.isa == Isa::Neon {
            return super::neon::multiply(format, halves, has_min, width, wide, words, acc);
        }
        let _ = ask;
        super::scalar::tile(format, halves, has_min, width, wide, words, acc);
    }
}
