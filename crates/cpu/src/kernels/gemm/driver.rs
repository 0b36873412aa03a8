//! The whole op: checks, rounding of activations, panels shared out over threads.
//!
//! Rows of an expert (or all rows) are cut into blocks whose activations fit the second-level cache; an item of work is a block
//! times some consecutive panels. Items of a block are consecutive, so each thread reads its weights as one stream.

use super::activations::{Format, MAX_WIDTH, round_tile, tile_width};
use super::epilogue::{self, Store};
use super::experts::{Block, active, block, max_slots, num_blocks};
use super::form::PANEL;
use super::panel::{CHUNK, Job, Mode, Worker};
use super::shares::Shares;
use super::way::Way;
use super::wide::WideGroup;
use super::workspace::{ALIGN, Cutter, SharedMut, piece_bytes};
use super::{Compute, Epilogue, Groups, MAX_SEGMENTS, OP, Segment, WeightLayout};
use crate::kernels::error::{KernelError, same};
use crate::matrix::{Matrix, MatrixMut};
use crate::parallel::{Parallel, Serial};

/// Most rows of a block.
const MAX_BLOCK: usize = 16 * MAX_WIDTH;
/// Products below which waking another thread costs more than it gains.
const SERIAL_PRODUCTS: usize = 64 << 10;
/// Activations below which rounding them is left to the calling thread.
const SERIAL_ROUNDING: usize = 16 << 10;
/// Items per thread, so that a thread that is held up leaves little to wait for.
const ITEMS_PER_THREAD: usize = 8;

/// Sizes of scratch.
pub(super) struct Scratch {
    k: usize,
    threads: usize,
    slots: usize,
    formats: [Option<Format>; Format::COUNT],
    /// Rows of a block.
    pub(super) block: usize,
    wide_groups: usize,
    values: usize,
}

impl Scratch {
    pub(super) fn of(
        way: Way,
        rows: usize,
        experts: usize,
        segments: impl Iterator<Item = (WeightLayout, Compute)>,
        threads: usize,
    ) -> Self {
        let mut formats = [None; Format::COUNT];
        let (mut k, mut wide_groups, mut values, mut row_bytes) = (0, 0, 0, 1);
        for (layout, compute) in segments {
            k = layout.k();
            match Mode::of(&layout, compute) {
                Mode::Rounded(_, format) => {
                    formats[format.index()] = Some(format);
                    wide_groups = CHUNK;
                    row_bytes = row_bytes.max(4 * format.row_words(k));
                }
                Mode::Widened => {
                    values = PANEL * k;
                    row_bytes = row_bytes.max(4 * k);
                }
                Mode::InPlace(_) => row_bytes = row_bytes.max(4 * k),
            }
        }
        let block = ((way.block_kib << 10) / row_bytes / MAX_WIDTH * MAX_WIDTH).clamp(2 * MAX_WIDTH, MAX_BLOCK);
        Self { k, threads: threads.max(1), slots: max_slots(rows, experts), formats, block, wide_groups, values }
    }

    /// Words of all rows in a format: tiles, then a word a row for what [`round_tile`] tells of a tile.
    const fn words(&self, format: Format) -> usize {
        self.slots * format.slot_words(self.k)
    }

    /// Accumulators of a panel.
    const fn acc(&self) -> usize {
        self.block * PANEL
    }

    pub(super) fn bytes(&self) -> usize {
        let words: usize = self.formats.iter().flatten().map(|f| piece_bytes::<u32>(self.words(*f))).sum();
        let worker = 2 * piece_bytes::<f32>(self.acc())
            + piece_bytes::<WideGroup>(self.wide_groups)
            + piece_bytes::<f32>(self.values);
        ALIGN + words + self.threads * worker
    }
}

/// Operands of a launch.
pub(super) struct Problem<'a> {
    pub(super) way: Way,
    pub(super) x: Matrix<'a, f32>,
    pub(super) groups: Groups<'a>,
    pub(super) segments: &'a [Segment<'a>],
    pub(super) out: MatrixMut<'a, f32>,
    pub(super) epilogue: Epilogue<'a>,
}

/// Rounded activations, by format.
type Words<'a> = [&'a [u32]; Format::COUNT];

impl<'a> Problem<'a> {
    pub(super) fn run(&self, parallel: &dyn Parallel, workspace: &mut [u8]) -> Result<(), KernelError> {
        let rows = self.check()?;
        if rows == 0 {
            return Ok(());
        }
        let segments = self.segments.iter().map(|segment| (segment.layout, segment.compute));
        let scratch = Scratch::of(self.way, rows, self.groups.offsets.len() - 1, segments, parallel.threads());
        let small = KernelError::Workspace { op: OP, expected: scratch.bytes(), found: workspace.len() };
        self.with_scratch(parallel, &scratch, workspace).ok_or(small)
    }

    /// Everything after the checks; `None` if the workspace is too small.
    fn with_scratch(&self, parallel: &dyn Parallel, scratch: &Scratch, workspace: &mut [u8]) -> Option<()> {
        if workspace.len() < scratch.bytes() {
            return None;
        }
        let mut cutter = Cutter::new(workspace);
        let mut words: Words<'_> = [&[]; Format::COUNT];
        for format in scratch.formats.iter().flatten() {
            let piece = cutter.take(scratch.words(*format))?;
            self.round(parallel, *format, scratch.slots, piece);
            words[format.index()] = piece;
        }
        let threads = scratch.threads;
        let acc0 = SharedMut::new(cutter.take(threads * scratch.acc())?);
        let acc1 = SharedMut::new(cutter.take(threads * scratch.acc())?);
        let wide = SharedMut::new(cutter.take(threads * scratch.wide_groups)?);
        let values = SharedMut::new(cutter.take(threads * scratch.values)?);
        let worker = |thread: usize| {
            // SAFETY: each thread number is used by one task, and its ranges are its own.
            unsafe {
                Worker {
                    acc: [
                        acc0.range(thread * scratch.acc(), scratch.acc()),
                        acc1.range(thread * scratch.acc(), scratch.acc()),
                    ],
                    wide: wide.range(thread * scratch.wide_groups, scratch.wide_groups),
                    values: values.range(thread * scratch.values, scratch.values),
                }
            }
        };
        self.multiply(parallel, scratch, &words, &worker);
        Some(())
    }

    fn glu(&self) -> bool {
        matches!(self.epilogue, Epilogue::Glu(_))
    }

    /// Whether the operands fit each other; the number of sorted rows.
    fn check(&self) -> Result<usize, KernelError> {
        let count = self.segments.len();
        let Some(first) = self.segments.first().filter(|_| count <= MAX_SEGMENTS) else {
            return Err(KernelError::Shape { op: OP, what: "segments", expected: MAX_SEGMENTS, found: count });
        };
        let experts = self.groups.offsets.len().saturating_sub(1);
        for segment in self.segments {
            check_segment(segment, self.x.cols, experts)?;
        }
        let total: usize = self.segments.iter().map(|segment| segment.layout.n()).sum();
        let mut cols = total;
        if self.glu() {
            same(OP, "segments of a gated unit", count, 2)?;
            cols = first.layout.n();
            same(OP, "outputs of both segments of a gated unit", total, 2 * cols)?;
        }
        same(OP, "output columns", self.out.cols, cols)?;
        if let Epilogue::Add(addend) = self.epilogue {
            same(OP, "addend columns", addend.cols, cols)?;
            same(OP, "addend rows", addend.rows, self.out.rows)?;
        }
        self.check_groups()
    }

    /// Offsets and row numbers are data of the step: all are looked at.
    fn check_groups(&self) -> Result<usize, KernelError> {
        let mut end = 0;
        for (index, &offset) in self.groups.offsets.iter().enumerate() {
            let high = self.out.rows as i64 + 1;
            if offset < end || i64::from(offset) >= high {
                let (found, low) = (i64::from(offset), i64::from(end));
                return Err(KernelError::Index { op: OP, what: "offsets", index, found, low, high });
            }
            end = offset;
        }
        let end = end as usize;
        match self.groups.rows {
            None if end > self.x.rows => {
                Err(KernelError::Shape { op: OP, what: "input rows", expected: end, found: self.x.rows })
            }
            Some(rows) if rows.len() < end => {
                Err(KernelError::Shape { op: OP, what: "row numbers", expected: end, found: rows.len() })
            }
            Some(rows) => {
                let first = self.groups.offsets.first().map_or(0, |&first| first as usize);
                for (index, &row) in rows.iter().enumerate().take(end).skip(first) {
                    if usize::try_from(row).is_ok_and(|row| row < self.x.rows) {
                        continue;
                    }
                    let (found, high) = (i64::from(row), self.x.rows as i64);
                    return Err(KernelError::Index { op: OP, what: "rows", index, found, low: 0, high });
                }
                Ok(end)
            }
            None => Ok(end),
        }
    }

    /// Row of x that sorted row `row` reads.
    fn source_row(&self, row: usize) -> usize {
        self.groups.rows.map_or(row, |rows| rows[row] as usize)
    }

    /// Fills the words of a format, tiles shared out over threads.
    fn round(&self, parallel: &dyn Parallel, format: Format, slots: usize, words: &mut [u32]) {
        let row_words = format.row_words(self.x.cols);
        let tiles = num_blocks(&self.groups, MAX_WIDTH);
        let threads =
            if tiles * self.x.cols * MAX_WIDTH <= SERIAL_ROUNDING || tiles == 1 { 1 } else { parallel.threads() };
        let words = SharedMut::new(words);
        let body = |thread: usize| {
            let mut index = 0;
            for expert in active(&self.groups) {
                for first in (0..expert.rows).step_by(MAX_WIDTH) {
                    if index % threads == thread {
                        let count = MAX_WIDTH.min(expert.rows - first);
                        let width = tile_width(expert.rows - first);
                        let mut rows = [&[][..]; MAX_WIDTH];
                        for (i, row) in rows.iter_mut().enumerate().take(count) {
                            *row = self.x.row(self.source_row(expert.first_row + first + i));
                        }
                        // SAFETY: each tile is one task's.
                        let tile = unsafe { words.range((expert.first_slot + first) * row_words, width * row_words) };
                        let spiked = round_tile(self.way.isa, format, &rows[..count], width, tile);
                        if format.spikes {
                            let at = slots * row_words + expert.first_slot + first;
                            // SAFETY: behind all tiles, and the tile's own.
                            unsafe { words.range(at, 1) }.fill(spiked.into());
                        }
                    }
                    index += 1;
                }
            }
        };
        if threads == 1 { Serial.run(1, &body) } else { parallel.run(threads, &body) }
    }

    fn multiply<'w>(
        &self,
        parallel: &dyn Parallel,
        scratch: &Scratch,
        words: &Words<'_>,
        worker: &(dyn Fn(usize) -> Worker<'w> + Sync),
    ) {
        let counted = if self.glu() { &self.segments[..1] } else { self.segments };
        let units: usize = counted.iter().map(|segment| segment.layout.panels()).sum();
        let blocks = num_blocks(&self.groups, scratch.block);
        let rows: usize = active(&self.groups).map(|expert| expert.rows).sum();
        let products = rows.saturating_mul(self.x.cols).saturating_mul(units * PANEL);
        let threads = if products <= SERIAL_PRODUCTS { 1 } else { scratch.threads };
        let parts = (threads * ITEMS_PER_THREAD).div_ceil(blocks).min(units);
        let share = units.div_ceil(parts);
        let parts = units.div_ceil(share);
        let shares = Shares::new(blocks * parts, threads);
        let body = |thread: usize| {
            let mut worker = worker(thread);
            while let Some(item) = shares.next(thread) {
                let Some(block) = block(&self.groups, scratch.block, item / parts) else { continue };
                let first = item % parts * share;
                for unit in first..units.min(first + share) {
                    self.unit(unit, block, words, &mut worker);
                }
            }
        };
        if threads == 1 { Serial.run(1, &body) } else { parallel.run(threads, &body) }
    }

    /// One panel of output, of both segments for a gated unit.
    fn unit(&self, unit: usize, block: Block, words: &Words<'_>, worker: &mut Worker<'_>) {
        let (mut panel, mut first_col) = (unit, 0);
        let mut index = 0;
        while !self.glu() && panel >= self.segments[index].layout.panels() {
            panel -= self.segments[index].layout.panels();
            first_col += self.segments[index].layout.n();
            index += 1;
        }
        let used = if self.glu() { &self.segments[..2] } else { &self.segments[index..=index] };
        let first = panel * PANEL;
        let mut bias = [None; 2];
        for (side, segment) in used.iter().enumerate() {
            self.job(segment, panel, block, words, worker, side);
            let n = segment.layout.n();
            bias[side] =
                segment.bias.map(|bias| &bias[block.expert * n + first..block.expert * n + n.min(first + PANEL)]);
        }
        let store = Store {
            acc: [&*worker.acc[0], &*worker.acc[1]],
            bias,
            first_row: block.first_row,
            rows: block.rows,
            first_col: first_col + first,
            cols: PANEL.min(used[0].layout.n() - first),
            out: self.out,
            epilogue: self.epilogue,
        };
        // SAFETY: the columns of the panel and the rows of the block were checked to lie within the output; each pair is
        // one item's.
        unsafe { epilogue::store(self.way.isa, store) };
    }

    fn job(
        &self,
        segment: &Segment<'_>,
        panel: usize,
        block: Block,
        words: &Words<'_>,
        worker: &mut Worker<'_>,
        side: usize,
    ) {
        let (words, spiked): (&[u32], &[u32]) = match Mode::of(&segment.layout, segment.compute) {
            Mode::Rounded(_, format) => {
                let (words, k) = (words[format.index()], segment.layout.k());
                let row_words = format.row_words(k);
                let (words, spiked) = words.split_at(words.len() / format.slot_words(k) * row_words);
                (&words[block.first_slot * row_words..], spiked.get(block.first_slot..).unwrap_or_default())
            }
            _ => (&[], &[]),
        };
        let tokens = |i: usize| self.x.row_ptr(self.source_row(block.first_row + i));
        let job = Job { way: self.way, segment, panel, block, words, spiked, tokens: &tokens };
        // SAFETY: row numbers were checked, and rows have as many values as the weight has inputs.
        unsafe { job.run(worker, side) };
    }
}

/// Sizes of a segment's operands.
fn check_segment(segment: &Segment<'_>, k: usize, experts: usize) -> Result<(), KernelError> {
    let layout = &segment.layout;
    same(OP, "weight inputs", layout.k(), k)?;
    same(OP, "weight bytes", segment.weight.len(), layout.weight_bytes().saturating_mul(experts))?;
    let scales = segment.scales.map_or(0, <[f32]>::len);
    same(OP, "weight scales", scales, layout.num_scales().saturating_mul(experts))?;
    if let Some(bias) = segment.bias {
        same(OP, "bias values", bias.len(), layout.n().saturating_mul(experts))?;
    }
    Ok(())
}
