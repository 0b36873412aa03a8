//! The whole op: checks, rounding of activations, panels shared out over threads.
//!
//! Rows of an expert (or all rows) are cut into blocks whose activations fit the second-level cache; an item of work is a block
//! times some consecutive panels. Items of a block are consecutive, so each thread reads its weights as one stream.

use std::ops::Range;

use super::activations::{
    Format, MAX_WIDTH, Seconds, Term, count_groups, find_spikes, round_spikes, round_tile, set_words, tiles,
};
use super::bf16;
use super::epilogue::{self, Store};
use super::exact;
use super::experts::{Block, active, blocks, max_slots};
use super::form::PANEL;
use super::panel::{CHUNK, Job, Mode, Rows, Spiked, Terms, Worker, run_stride};
use super::shares::Shares;
use super::way::Way;
use super::wide::{GROUP, WideGroup};
use super::workspace::{ALIGN, Cutter, SharedMut, piece_bytes};
use super::{Compute, Epilogue, Groups, MAX_SEGMENTS, OP, Segment, WeightLayout};
use crate::kernels::error::{KernelError, same};
use crate::kernels::simd::finish_streaming;
use crate::matrix::{Matrix, MatrixMut};
use crate::parallel::{Parallel, Serial};

/// Most rows of a block.
const MAX_BLOCK: usize = 16 * MAX_WIDTH;
/// Products below which waking another thread costs more than it gains.
const SERIAL_PRODUCTS: usize = 64 << 10;
/// Activations below which rounding them is left to the calling thread.
const SERIAL_ROUNDING: usize = 16 << 10;
/// Most panels of a run, and values of their accumulators: a quarter of a first-level cache.
const RUN_UNITS: usize = 16;
const RUN_VALUES: usize = 2048;
/// Items per thread, so that a thread that is held up leaves little to wait for.
const ITEMS_PER_THREAD: usize = 8;

/// What is wanted of a format.
#[derive(Clone, Copy)]
struct Rounding {
    format: Format,
    /// Second terms of groups with a spike.
    spiked: bool,
    /// Second terms of all rows.
    all: bool,
}

/// Sizes of scratch.
pub(super) struct Scratch {
    k: usize,
    threads: usize,
    slots: usize,
    formats: [Option<Rounding>; Format::COUNT],
    /// Rows of a block.
    pub(super) block: usize,
    wide_groups: usize,
    values: usize,
    /// Values of a row that is rounded to bfloat16, 0 if none is.
    bf16: usize,
    /// Words of a row in tiles of f32 values, 0 if there are none.
    floats: usize,
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
        let (mut k, mut wide_groups, mut values, mut bf16, mut floats, mut row_bytes) = (0, 0, 0, 0, 0, 1);
        for (layout, compute) in segments {
            k = layout.k();
            match Mode::of(&layout, compute) {
                Mode::Rounded(_, format, seconds) => {
                    let wanted = formats[format.index()].get_or_insert(Rounding { format, spiked: false, all: false });
                    wanted.spiked |= seconds == Seconds::Spiked;
                    wanted.all |= seconds == Seconds::All;
                    wide_groups = 2 * CHUNK;
                    row_bytes = row_bytes.max(4 * format.row_words(k));
                }
                Mode::Widened => {
                    values = PANEL * k;
                    row_bytes = row_bytes.max(4 * k);
                }
                Mode::InPlace(_) => row_bytes = row_bytes.max(4 * k),
                Mode::Exact(_) => {
                    floats = exact::row_words(k);
                    wide_groups = 2 * CHUNK;
                    row_bytes = row_bytes.max(4 * floats);
                }
                Mode::Bf16 => {
                    bf16 = k;
                    row_bytes = row_bytes.max(2 * bf16);
                }
            }
        }
        let block = ((way.block_kib << 10) / row_bytes / MAX_WIDTH * MAX_WIDTH).clamp(2 * MAX_WIDTH, MAX_BLOCK);
        let slots = max_slots(rows, experts);
        Self { k, threads: threads.max(1), slots, formats, block, wide_groups, values, bf16, floats }
    }

    /// Words of all rows in a format.
    const fn words(&self, format: Format) -> usize {
        self.slots * format.row_words(self.k)
    }

    fn has_spiked(&self) -> bool {
        self.formats.iter().flatten().any(|wanted| wanted.spiked)
    }

    /// Accumulators of a panel: for first terms and, if there are any, for second ones.
    fn acc(&self) -> usize {
        let seconds = self.formats.iter().flatten().any(|wanted| wanted.spiked || wanted.all);
        (1 + usize::from(seconds)) * self.block * PANEL
    }

    pub(super) fn bytes(&self) -> usize {
        let words = self.formats.iter().flatten().map(|wanted| {
            let pieces = 1 + usize::from(wanted.spiked) + usize::from(wanted.all);
            pieces * piece_bytes::<u32>(self.words(wanted.format))
        });
        let sets = self.slots.saturating_mul(set_words(self.k));
        let spikes = if self.has_spiked() { piece_bytes::<u32>(self.slots) + 2 * piece_bytes::<u32>(sets) } else { 0 };
        let worker = 2 * piece_bytes::<f32>(self.acc())
            + piece_bytes::<WideGroup>(self.wide_groups)
            + piece_bytes::<f32>(self.values);
        let bf16 = piece_bytes::<u16>(self.slots.saturating_mul(self.bf16));
        let floats = piece_bytes::<f32>(self.slots.saturating_mul(self.floats));
        ALIGN + words.sum::<usize>() + bf16 + floats + spikes + self.threads * worker
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

/// Room for the tiles of a format.
struct Tiles<'w> {
    format: Format,
    first: SharedMut<'w, u32>,
    /// Second terms of all rows and groups, where they are wanted.
    all: Option<SharedMut<'w, u32>>,
}

/// Rounded activations: tiles by format.
#[derive(Default)]
struct Words<'a> {
    first: [&'a [u32]; Format::COUNT],
    /// Second terms of all rows and groups.
    all: [&'a [u32]; Format::COUNT],
    /// Second terms of rows and groups with a spike, from each block's first slot on.
    spiked: [&'a [u32]; Format::COUNT],
    spikes: Spikes<'a>,
    /// Rows rounded to bfloat16.
    bf16: &'a [u16],
    /// Tiles of f32 values.
    floats: &'a [f32],
}

/// Where spikes are.
#[derive(Clone, Copy, Default)]
struct Spikes<'a> {
    /// Rows with a spike, counted within their block, from each block's first slot on; the end is marked if it isn't the block's.
    rows: &'a [u32],
    /// The groups of each slot, [`set_words`] each.
    sets: &'a [u32],
    /// The groups of any row of a block, at its first slot.
    unions: &'a [u32],
}

/// Behind the last of a block's rows with a spike.
const END: u32 = u32::MAX;

impl<'a> Spikes<'a> {
    fn of_block(self, block: Block, k: usize) -> Spiked<'a> {
        let rows = &self.rows[block.first_slot..][..block.rows];
        let rows = &rows[..rows.iter().position(|&row| row == END).unwrap_or(rows.len())];
        Spiked { rows, groups: &self.unions[block.first_slot * set_words(k)..][..set_words(k)] }
    }
}

impl<'a> Words<'a> {
    /// First and second terms of a block's rows, and where the second are if not everywhere.
    fn terms(&self, format: Format, seconds: Seconds, k: usize, block: Block) -> ([Terms<'a>; 2], Option<Spiked<'a>>) {
        let first_word = block.first_slot * format.row_words(k);
        let tiles =
            |words: &'a [u32], count: usize, groups: usize| Terms { words: &words[first_word..], count, groups };
        let groups = k / GROUP;
        let index = format.index();
        let first = tiles(self.first[index], block.rows, groups);
        match seconds {
            Seconds::None => ([first, Terms::default()], None),
            Seconds::All => ([first, tiles(self.all[index], block.rows, groups)], None),
            Seconds::Spiked => {
                let spiked = self.spikes.of_block(block, k);
                ([first, tiles(self.spiked[index], spiked.rows.len(), count_groups(spiked.groups))], Some(spiked))
            }
        }
    }
}

/// Rows that are rounded together.
#[derive(Clone, Copy)]
struct RowTile {
    slot: usize,
    first_row: usize,
    count: usize,
    width: usize,
}

/// Writes a tile of so many rows, of which some exist.
type FillTile<'f, T> = dyn Fn(&[&[f32]], usize, &mut [T]) + Sync + 'f;

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
        let mut words = Words::default();
        let sets = if scratch.has_spiked() { scratch.slots * set_words(self.x.cols) } else { 0 };
        let rows = if scratch.has_spiked() { scratch.slots } else { 0 };
        let (rows, sets, unions) = (cutter.take(rows)?, cutter.take(sets)?, cutter.take(sets)?);
        let mut roundings = [const { None }; Format::COUNT];
        for &Rounding { format, all, .. } in scratch.formats.iter().flatten() {
            let first = SharedMut::new(cutter.take(scratch.words(format))?);
            let second = SharedMut::new(cutter.take(if all { scratch.words(format) } else { 0 })?);
            roundings[format.index()] = Some(Tiles { format, first, all: all.then_some(second) });
        }
        self.round(parallel, &roundings, scratch.has_spiked().then_some((&mut *rows, &mut *sets)));
        for Tiles { format, first, all } in roundings.into_iter().flatten() {
            // SAFETY: rounding has ended.
            words.first[format.index()] = unsafe { first.whole() };
            // SAFETY: as above.
            words.all[format.index()] = all.map_or(&[], |all| unsafe { all.whole() });
        }
        if scratch.has_spiked() {
            words.spikes = self.list_spikes(scratch.block, rows, sets, unions);
        }
        for &Rounding { format, .. } in scratch.formats.iter().flatten().filter(|wanted| wanted.spiked) {
            let spiked = cutter.take(scratch.words(format))?;
            words.spiked[format.index()] = self.round_spikes(parallel, format, scratch.block, words.spikes, spiked);
        }
        if scratch.bf16 > 0 {
            words.bf16 = self.round_bf16(parallel, cutter.take(scratch.slots * scratch.bf16)?);
        }
        if scratch.floats > 0 {
            words.floats = self.tile_floats(parallel, cutter.take(scratch.slots * scratch.floats)?);
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

    /// Whether the output is written past the caches.
    fn streams(&self) -> bool {
        matches!(self.epilogue, Epilogue::None) && epilogue::streams(&self.out)
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

    /// Tiles of all rows.
    fn tiles(&self) -> impl Iterator<Item = RowTile> + Clone + Sync + use<'a> {
        active(&self.groups).flat_map(|expert| {
            tiles(expert.rows).map(move |(first, width)| RowTile {
                slot: expert.first_slot + first,
                first_row: expert.first_row + first,
                count: width.min(expert.rows - first),
                width,
            })
        })
    }

    /// Does something with each of some tiles, shared out over threads.
    fn each<T>(
        &self,
        parallel: &dyn Parallel,
        tiles: &(impl Iterator<Item = T> + Clone + Sync),
        work: &(dyn Fn(T) + Sync),
    ) {
        let count = tiles.clone().count();
        let threads =
            if count * self.x.cols * MAX_WIDTH <= SERIAL_ROUNDING || count <= 1 { 1 } else { parallel.threads() };
        let body = |thread: usize| tiles.clone().skip(thread).step_by(threads).for_each(work);
        if threads == 1 { Serial.run(1, &body) } else { parallel.run(threads, &body) }
    }

    /// Lists the rows and groups of each block that have a spike, of flags and sets by slot.
    fn list_spikes<'w>(
        &self,
        block_rows: usize,
        rows: &'w mut [u32],
        sets: &'w [u32],
        unions: &'w mut [u32],
    ) -> Spikes<'w> {
        let width = set_words(self.x.cols);
        for block in blocks(&self.groups, block_rows) {
            let union = &mut unions[block.first_slot * width..][..width];
            union.fill(0);
            let rows = &mut rows[block.first_slot..][..block.rows];
            let mut count = 0;
            for row in 0..rows.len() {
                if rows[row] != 0 {
                    let set = &sets[(block.first_slot + row) * width..][..width];
                    union.iter_mut().zip(set).for_each(|(all, set)| *all |= set);
                    rows[count] = row as u32;
                    count += 1;
                }
            }
            if let Some(end) = rows.get_mut(count) {
                *end = END;
            }
        }
        Spikes { rows, sets, unions }
    }

    /// Rounds all rows, each tile to every format that is wanted, and flags the rows and the groups that have a spike, where flags and sets
    /// are wanted: each row is looked at once, by one thread.
    fn round(
        &self,
        parallel: &dyn Parallel,
        roundings: &[Option<Tiles<'_>>; Format::COUNT],
        spikes: Option<(&mut [u32], &mut [u32])>,
    ) {
        if roundings.iter().all(Option::is_none) {
            return;
        }
        let (isa, width) = (self.way.isa, set_words(self.x.cols));
        let spikes = spikes.map(|(flags, sets)| (SharedMut::new(flags), SharedMut::new(sets)));
        self.each(parallel, &self.tiles(), &|tile| {
            let rows = &self.rows_of(tile)[..tile.count];
            if let Some((flags, sets)) = &spikes {
                // SAFETY: each tile is one task's.
                let (flags, sets) =
                    unsafe { (flags.range(tile.slot, tile.count), sets.range(tile.slot * width, tile.count * width)) };
                for ((flag, set), row) in flags.iter_mut().zip(sets.chunks_exact_mut(width)).zip(rows) {
                    *flag = find_spikes(isa, row, set).into();
                }
            }
            for Tiles { format, first, all } in roundings.iter().flatten() {
                let row_words = format.row_words(self.x.cols);
                for (term, words) in [(Term::First, Some(first)), (Term::Second, all.as_ref())] {
                    let Some(words) = words else { continue };
                    // SAFETY: as above.
                    let words = unsafe { words.range(tile.slot * row_words, tile.width * row_words) };
                    round_tile(isa, *format, term, rows, tile.width, words);
                }
            }
        });
    }

    /// The rows of a tile; those that it lacks are empty.
    fn rows_of(&self, tile: RowTile) -> [&[f32]; MAX_WIDTH] {
        let mut rows = [&[][..]; MAX_WIDTH];
        for (i, row) in rows.iter_mut().enumerate().take(tile.count) {
            *row = self.x.row(self.source_row(tile.first_row + i));
        }
        rows
    }

    /// Lays all rows out as tiles of f32 values; gives them back.
    fn tile_floats<'w>(&self, parallel: &dyn Parallel, words: &'w mut [f32]) -> &'w [f32] {
        self.fill(parallel, exact::row_words(self.x.cols), words, &exact::fill_tile)
    }

    /// Rounds all rows to bfloat16; gives them back.
    fn round_bf16<'w>(&self, parallel: &dyn Parallel, rounded: &'w mut [u16]) -> &'w [u16] {
        self.fill(parallel, self.x.cols, rounded, &|rows, _, tile| {
            for (row, rounded) in rows.iter().zip(tile.chunks_exact_mut(self.x.cols)) {
                bf16::round(self.way.isa, row, rounded);
            }
        })
    }

    /// Fills every tile from its rows and their number with padding; `row_words` are what a row takes. Gives all tiles back.
    fn fill<'w, T: Send>(
        &self,
        parallel: &dyn Parallel,
        row_words: usize,
        words: &'w mut [T],
        fill_tile: &FillTile<'_, T>,
    ) -> &'w [T] {
        let shared = SharedMut::new(words);
        self.each(parallel, &self.tiles(), &|tile| {
            // SAFETY: each tile is one task's.
            let words = unsafe { shared.range(tile.slot * row_words, tile.width * row_words) };
            fill_tile(&self.rows_of(tile)[..tile.count], tile.width, words);
        });
        words
    }

    /// Fills tiles with the second terms of rows with a spike, in the groups that any row of the block has one in.
    fn round_spikes<'w>(
        &self,
        parallel: &dyn Parallel,
        format: Format,
        block_rows: usize,
        spikes: Spikes<'_>,
        words: &'w mut [u32],
    ) -> &'w [u32] {
        let (k, row_words) = (self.x.cols, format.row_words(self.x.cols));
        let tiles = blocks(&self.groups, block_rows).flat_map(|block| {
            let count = spikes.of_block(block, k).rows.len();
            tiles(count).map(move |(first, width)| (block, first, width))
        });
        let shared = SharedMut::new(words);
        self.each(parallel, &tiles, &|(block, first, width)| {
            let Spiked { rows, groups } = spikes.of_block(block, k);
            let rows = &rows[first..];
            let spike_words = count_groups(groups) * format.group_words();
            // SAFETY: each tile is one task's; a block's tiles are no larger than with all groups.
            let words =
                unsafe { shared.range(block.first_slot * row_words + first * spike_words, width * spike_words) };
            for slot in 0..width {
                let row = rows.get(slot).map(|&row| {
                    let set = &spikes.sets[(block.first_slot + row as usize) * set_words(k)..][..set_words(k)];
                    (self.x.row(self.source_row(block.first_row + row as usize)), set)
                });
                round_spikes(self.way.isa, format, row, groups, slot, width, words);
            }
        });
        words
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
        let num_blocks = blocks(&self.groups, scratch.block).count();
        let rows: usize = active(&self.groups).map(|expert| expert.rows).sum();
        let products = rows.saturating_mul(self.x.cols).saturating_mul(units * PANEL);
        let threads = if products <= SERIAL_PRODUCTS { 1 } else { scratch.threads };
        let parts = (threads * ITEMS_PER_THREAD).div_ceil(num_blocks).min(units);
        let share = units.div_ceil(parts);
        let parts = units.div_ceil(share);
        let shares = Shares::new(num_blocks * parts, threads);
        let body = |thread: usize| {
            let mut worker = worker(thread);
            while let Some(item) = shares.next(thread) {
                let Some(block) = blocks(&self.groups, scratch.block).nth(item / parts) else { continue };
                let first = item % parts * share;
                let mut rows = [None; MAX_SEGMENTS];
                for (rows, segment) in rows.iter_mut().zip(self.segments) {
                    *rows = Some(self.rows(segment, block, words));
                }
                let (end, run) = (units.min(first + share), Self::run_units(scratch, block));
                for first in (first..end).step_by(run) {
                    self.units(first..end.min(first + run), block, &rows, &mut worker);
                }
            }
            if self.streams() {
                finish_streaming();
            }
        };
        if threads == 1 { Serial.run(1, &body) } else { parallel.run(threads, &body) }
    }

    /// The rows of a block as a segment wants them.
    fn rows<'w>(&self, segment: &Segment<'_>, block: Block, words: &Words<'w>) -> Rows<'w> {
        let (mode, k) = (Mode::of(&segment.layout, segment.compute), self.x.cols);
        let mut rows = Rows { mode, terms: Default::default(), bf16: &[], floats: &[], spiked: None };
        match mode {
            Mode::Rounded(_, format, seconds) => (rows.terms, rows.spiked) = words.terms(format, seconds, k, block),
            Mode::Bf16 => rows.bf16 = &words.bf16[block.first_slot * k..],
            Mode::Exact(_) => rows.floats = &words.floats[block.first_slot * exact::row_words(k)..],
            Mode::InPlace(_) | Mode::Widened => {}
        }
        rows
    }

    /// Panels that are computed before any of them is stored, if rows are few: processors read ahead in streams, which turns between the
    /// weights of a gated unit and work between panels would break.
    fn run_units(scratch: &Scratch, block: Block) -> usize {
        let most = scratch.acc().min(RUN_VALUES);
        if block.rows <= MAX_WIDTH { (most / run_stride(block.rows)).clamp(1, RUN_UNITS) } else { 1 }
    }

    /// Some consecutive panels of output, of both segments for a gated unit. `rows` are the block's, for each segment.
    fn units(
        &self,
        mut units: Range<usize>,
        block: Block,
        rows: &[Option<Rows<'_>>; MAX_SEGMENTS],
        worker: &mut Worker<'_>,
    ) {
        while !units.is_empty() {
            let (mut first_panel, mut first_col, mut index) = (units.start, 0, 0);
            while !self.glu() && first_panel >= self.segments[index].layout.panels() {
                first_panel -= self.segments[index].layout.panels();
                first_col += self.segments[index].layout.n();
                index += 1;
            }
            let used = if self.glu() { &self.segments[..2] } else { &self.segments[index..=index] };
            let count = units.len().min(used[0].layout.panels() - first_panel);
            let run = Run { segments: used, panels: first_panel..first_panel + count, first_col };
            self.run_of_panels(run, block, &rows[index..], worker);
            units.start += count;
        }
    }

    /// Consecutive panels of a segment, of both for a gated unit.
    fn run_of_panels(&self, run: Run<'_>, block: Block, rows: &[Option<Rows<'_>>], worker: &mut Worker<'_>) {
        let Run { segments, panels, first_col } = run;
        let acc_stride = run_stride(block.rows);
        let tokens = |i: usize| self.x.row_ptr(self.source_row(block.first_row + i));
        for (side, (segment, rows)) in segments.iter().zip(rows.iter().flatten()).enumerate() {
            let job = |panel: usize| Job { way: self.way, segment, panel, block, rows: *rows, tokens: &tokens };
            let first = job(panels.start);
            if first.takes_runs() {
                first.run_of_panels(worker, side, panels.len());
                continue;
            }
            for (i, panel) in panels.clone().enumerate() {
                // SAFETY: row numbers were checked, and rows have as many values as the weight has inputs.
                unsafe { job(panel).run(worker, side, i * acc_stride) };
            }
        }
        let first = panels.start * PANEL;
        let cols = (panels.len() * PANEL).min(segments[0].layout.n() - first);
        let mut bias = [None; 2];
        for (bias, segment) in bias.iter_mut().zip(segments) {
            *bias = segment.bias.map(|bias| &bias[block.expert * segment.layout.n() + first..][..cols]);
        }
        let store = Store {
            acc: [&*worker.acc[0], &*worker.acc[1]],
            acc_stride,
            bias,
            first_row: block.first_row,
            rows: block.rows,
            first_col: first_col + first,
            cols,
            out: self.out,
            epilogue: self.epilogue,
            streaming: self.streams() && first_col.is_multiple_of(PANEL),
        };
        // SAFETY: the columns of the panels and the rows of the block were checked to lie within the output; each pair is one
        // item's.
        unsafe { epilogue::store(self.way.isa, store) };
    }
}

/// Panels that are computed together.
struct Run<'a> {
    /// One, or both of a gated unit.
    segments: &'a [Segment<'a>],
    panels: Range<usize>,
    /// Where the first segment's columns begin in the output.
    first_col: usize,
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
