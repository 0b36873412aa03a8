//! Shares attention out over threads. Two ways to do a sequence, with the same bits:
//!
//! - whole: a task takes a tile of query tokens of one key/value head and walks over all splits that they see;
//! - split: a task takes some splits that follow each other, stores their states in the workspace, and a second launch merges
//!   states in order. Used where a sequence is so large a part of the step that threads would idle, as long as the workspace
//!   has room for the states.
//!
//! A task should have a sixteenth of a thread's part: larger ones leave threads idle at the end, smaller ones cost more than
//! they balance. It takes all heads if that leaves enough tasks, for then the cache is read as it lies.
//!
//! Workspace: a plan entry for each sequence, scratch for each thread, states of splits. Nothing is allocated.

use super::flash::{Dims, MergeRows, Queries, SPLIT, Scratch, State, finish_row};
use super::paged::Geometry;
use crate::isa::Isa;
use crate::kernels::cache::{CacheView, check_block};
use crate::kernels::error::{KernelError, same};
use crate::kernels::gemm::shares::Shares;
use crate::kernels::simd::{Kernel, LANES, Simd, dispatch};
use crate::matrix::{Matrix, MatrixMut};
use crate::parallel::Parallel;

/// Alignment within the workspace.
const ALIGN: usize = 64;
/// Most heads of a task that share keys and values.
const MAX_HEADS: usize = 64;
/// Tasks of a thread that balance well enough.
const TASKS: usize = 16;
/// Rows of a head times positions that a task should have at least.
const LEAST: usize = 128;
/// States of a row that a task merges at least.
const MERGED: usize = 128;
/// Most bytes of workspace for the states of splits.
const MAX_STATES: usize = 64 << 20;

/// Sequences of a step and their cached positions.
#[derive(Debug, Clone, Copy)]
pub struct Sequences<'a> {
    /// First query row of each sequence, and the end of the last.
    pub query_start: &'a [i32],
    /// Cached tokens of each sequence, the step's own included.
    pub context_len: &'a [i32],
    /// Cache block of each `block_size` positions of each sequence.
    pub block_table: Matrix<'a, i32>,
}

/// What is attended, after checks.
#[derive(Clone, Copy)]
pub(crate) struct Problem<'a> {
    pub(crate) op: &'static str,
    pub(crate) q: Matrix<'a, f32>,
    /// Values from query head to query head.
    pub(crate) head_stride: usize,
    pub(crate) out: MatrixMut<'a, f32>,
    pub(crate) sequences: Sequences<'a>,
    /// Query rows to do, of those of the step: the matrices hold these alone.
    pub(crate) first_row: usize,
    pub(crate) cache: CacheView<'a>,
    pub(crate) geometry: Geometry,
    pub(crate) key_value_heads: usize,
    /// Query heads that share a key/value head.
    pub(crate) group: usize,
    pub(crate) dims: Dims,
    pub(crate) window: usize,
}

/// Where keys and values come from.
pub(crate) trait Source: Sync {
    /// Most query rows of a task.
    fn max_rows(&self) -> usize;
    /// Scratch values of its own.
    fn extra(&self) -> usize;
    /// Attends over one split into `scratch.part`; the task goes on until position `until`.
    ///
    /// # Safety
    /// The problem was checked and scratch has room for the rows.
    unsafe fn attend<S: Simd>(
        &self,
        s: S,
        p: &Problem<'_>,
        task: &Task<'_>,
        split: usize,
        until: usize,
        scratch: &Scratch,
    );
}

/// Query rows of one sequence that share keys and values.
pub(crate) struct Task<'a> {
    pub(crate) queries: Queries,
    pub(crate) blocks: &'a [i32],
    /// First of its key/value heads.
    pub(crate) key_value_head: usize,
    /// First row in the problem's matrices.
    row: usize,
    /// First query head.
    head: usize,
}

/// Refuses index tensors that would lead outside the operands.
pub(crate) fn check(
    op: &'static str,
    sequences: &Sequences<'_>,
    rows: usize,
    cache: &CacheView<'_>,
    geometry: &Geometry,
    window: usize,
) -> Result<(), KernelError> {
    let count = sequences.context_len.len();
    same(op, "query_start", sequences.query_start.len(), count + 1)?;
    same(op, "rows of block_table", sequences.block_table.rows, count)?;
    let g = geometry;
    check_block(op, cache.dtype, cache.block_bytes, g.block_size, g.token_values)?;
    let index = |what, index: usize, found: i32, low: usize, high: usize| {
        Err(KernelError::Index { op, what, index, found: found.into(), low: low as i64, high: high as i64 })
    };
    let mut start = 0;
    for (i, &found) in sequences.query_start.iter().enumerate() {
        match usize::try_from(found) {
            Ok(next) if next >= start && next <= rows => start = next,
            _ => return index("query_start", i, found, start, rows + 1),
        }
    }
    let capacity = sequences.block_table.cols.saturating_mul(g.block_size);
    for (s, &found) in sequences.context_len.iter().enumerate() {
        let tokens = (sequences.query_start[s + 1] - sequences.query_start[s]) as usize;
        if tokens == 0 {
            continue;
        }
        let context = match usize::try_from(found) {
            Ok(context) if context >= tokens && context <= capacity => context,
            _ => return index("context_len", s, found, tokens, capacity + 1),
        };
        let first = if window == 0 { 0 } else { (context - tokens + 1).saturating_sub(window) };
        let blocks = sequences.block_table.row(s);
        for (i, &block) in blocks.iter().enumerate().take(context.div_ceil(g.block_size)).skip(first / g.block_size) {
            if usize::try_from(block).map_or(true, |block| block >= cache.num_blocks) {
                return index("block_table", s * blocks.len() + i, block, 0, cache.num_blocks);
            }
        }
    }
    Ok(())
}

/// A sequence's tasks.
#[derive(Clone, Copy)]
#[repr(C)]
struct Plan {
    /// First row in the problem's matrices.
    row: u32,
    tokens: u32,
    /// Position of the first token.
    position: u32,
    first_task: u32,
    first_split: u32,
    /// Key/value heads of a task.
    span: u32,
    /// Splits whose states are stored, 0 if the sequence is done whole.
    splits: u32,
    /// Splits of a task.
    run: u32,
    /// First state in the workspace.
    first_state: u32,
}

/// How heads and tokens are cut into tasks.
#[derive(Clone, Copy)]
struct Cut {
    /// Heads of a task.
    heads: usize,
    /// Tasks of a key/value head.
    chunks: usize,
    /// Tokens of a task.
    tokens: usize,
}

impl Cut {
    fn new(group: usize, max_rows: usize) -> Self {
        let chunks = group.div_ceil(MAX_HEADS.min(max_rows));
        let heads = group.div_ceil(chunks);
        Self { heads, chunks, tokens: (max_rows / heads).max(1) }
    }
    /// Key/value heads of a task for a sequence of so many tokens.
    fn span(&self, tokens: usize, key_value_heads: usize, max_rows: usize) -> usize {
        if self.chunks > 1 { 1 } else { (max_rows / (self.heads * tokens)).clamp(1, key_value_heads) }
    }
}

/// Sizes that a workspace depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) threads: usize,
    pub(crate) sequences: usize,
    pub(crate) tokens: usize,
    pub(crate) max_context: usize,
    pub(crate) heads: usize,
}

/// Bytes of workspace for steps of at most these sizes.
pub(crate) fn workspace_bytes(sizes: &Sizes, dims: &Dims, max_rows: usize, extra: usize) -> usize {
    let fixed = fixed_bytes(sizes, dims, max_rows, extra);
    if sizes.threads < 2 || sizes.max_context <= SPLIT {
        return fixed;
    }
    let row = sizes.max_context.div_ceil(SPLIT) * states_len(dims, sizes.heads) * 4;
    fixed + row.saturating_mul(sizes.tokens.clamp(1, 16)).min(MAX_STATES.max(row))
}

fn fixed_bytes(sizes: &Sizes, dims: &Dims, max_rows: usize, extra: usize) -> usize {
    let plan = (sizes.sequences * size_of::<Plan>()).next_multiple_of(ALIGN);
    let scratch = (Scratch::len(dims, max_rows, extra) * 4).next_multiple_of(ALIGN);
    // Alignment of the start.
    ALIGN + plan + sizes.threads * scratch
}

/// Values of a token's stored states of a split: outputs of all heads, maxima, sums. Heads lie together, so that they are
/// merged together.
const fn states_len(dims: &Dims, heads: usize) -> usize {
    heads * dims.padded() + 2 * heads.next_multiple_of(LANES)
}

/// Attends all rows of the problem; rows of no sequence become zero.
pub(crate) fn run<A: Source>(
    isa: Isa,
    parallel: &dyn Parallel,
    problem: &Problem<'_>,
    source: &A,
    workspace: &mut [u8],
) -> Result<(), KernelError> {
    let threads = parallel.threads().max(1);
    let sizes = Sizes {
        threads,
        sequences: problem.sequences.context_len.len(),
        tokens: problem.q.rows,
        max_context: 0,
        heads: problem.key_value_heads * problem.group,
    };
    let expected = fixed_bytes(&sizes, &problem.dims, source.max_rows(), source.extra());
    if workspace.len() < expected {
        return Err(KernelError::Workspace { op: problem.op, expected, found: workspace.len() });
    }
    let cut = Cut::new(problem.group, source.max_rows());
    let skew = workspace.as_ptr().align_offset(ALIGN).min(ALIGN);
    let plan_bytes = (sizes.sequences * size_of::<Plan>()).next_multiple_of(ALIGN);
    let scratch_len = (Scratch::len(&problem.dims, source.max_rows(), source.extra()) * 4).next_multiple_of(ALIGN) / 4;
    let (plan_memory, rest) = workspace[skew..].split_at_mut(plan_bytes);
    let (scratch_memory, states) = rest.split_at_mut(threads * scratch_len * 4);
    // SAFETY: the memory is aligned and large enough, and any bytes are a valid plan.
    let plans = unsafe { std::slice::from_raw_parts_mut(plan_memory.as_mut_ptr().cast::<Plan>(), sizes.sequences) };
    let room = states.len() / (states_len(&problem.dims, sizes.heads) * 4);
    let tasks = plan(problem, &cut, source.max_rows(), threads, room, plans);
    clear_uncovered(problem);
    let run = Run {
        problem,
        source,
        cut,
        plans,
        scratch: Memory(scratch_memory.as_mut_ptr().cast()),
        scratch_len,
        states: Memory(states.as_mut_ptr().cast()),
    };
    let workers = threads.min(tasks);
    let shares = Shares::new(tasks, workers);
    parallel.run(workers, &|worker| {
        while let Some(task) = shares.next(worker) {
            dispatch(isa, Attend { run: &run, task, worker });
        }
    });
    if plans.iter().any(|plan| plan.splits > 0) {
        let split = || plans.iter().filter(|p| p.splits > 0);
        let rows: usize = split().map(|p| p.tokens as usize).sum();
        let states = sizes.heads * split().map(|p| (p.tokens * p.splits) as usize).sum::<usize>();
        // Few states are merged sooner than threads are called.
        let tasks = threads.min(states / MERGED).max(1);
        parallel.run(tasks, &|task| dispatch(isa, Merge { run: &run, task, tasks, rows }));
    }
    Ok(())
}

/// Writes zeros to rows that belong to no sequence (a step padded to its bucket).
fn clear_uncovered(problem: &Problem<'_>) {
    let starts = problem.sequences.query_start;
    let (first, last) = (starts.first().copied().unwrap_or(0) as usize, starts.last().copied().unwrap_or(0) as usize);
    for row in 0..problem.out.rows {
        if !(first..last).contains(&(row + problem.first_row)) {
            // SAFETY: no task has started.
            unsafe { problem.out.row_mut(row) }.fill(0.0);
        }
    }
}

/// Fills in the plans and returns the number of tasks.
fn plan(
    problem: &Problem<'_>,
    cut: &Cut,
    max_rows: usize,
    threads: usize,
    mut room: usize,
    plans: &mut [Plan],
) -> usize {
    let mut work = 0;
    for (s, plan) in plans.iter_mut().enumerate() {
        let [start, end] = [problem.sequences.query_start[s], problem.sequences.query_start[s + 1]].map(|r| r as usize);
        let context = problem.sequences.context_len[s].max(0) as usize;
        let first = start.max(problem.first_row);
        let last = end.min(problem.first_row + problem.q.rows).max(first);
        *plan = Plan {
            row: (first - problem.first_row) as u32,
            tokens: (last - first) as u32,
            position: (context + first).saturating_sub(end) as u32,
            first_task: 0,
            first_split: 0,
            span: 0,
            splits: 0,
            run: 1,
            first_state: 0,
        };
        work += problem.key_value_heads * cut.chunks * plan.tokens as usize * seen(plan, problem.window).len();
    }
    let share = (work / (threads * TASKS)).max(LEAST);
    let (mut tasks, mut states) = (0, 0);
    for plan in plans {
        let tokens = plan.tokens as usize;
        plan.first_task = tasks as u32;
        if tokens == 0 {
            continue;
        }
        let seen = seen(plan, problem.window);
        let (first_split, end_split) = (seen.start / SPLIT, seen.end.div_ceil(SPLIT));
        let splits = end_split - first_split;
        let rows = tokens.min(cut.tokens);
        let most = cut.span(tokens, problem.key_value_heads, max_rows);
        let span = if threads > 1 { (share / (rows * seen.len().min(SPLIT))).clamp(1, most) } else { most };
        plan.span = span as u32;
        let units = problem.key_value_heads.div_ceil(span) * cut.chunks;
        let needed = tokens.saturating_mul(splits);
        let tiles = tokens.div_ceil(cut.tokens);
        let run = (share / (span * rows * SPLIT)).max(1);
        if threads > 1 && run < splits && needed <= room {
            plan.first_split = first_split as u32;
            plan.splits = splits as u32;
            plan.run = run as u32;
            plan.first_state = states as u32;
            states += needed;
            room -= needed;
            tasks += tiles * units * splits.div_ceil(run);
        } else {
            tasks += tiles * units;
        }
    }
    tasks
}

/// Positions that any token of the plan sees.
fn seen(plan: &Plan, window: usize) -> std::ops::Range<usize> {
    let position = plan.position as usize;
    let start = if window == 0 { 0 } else { (position + 1).saturating_sub(window) };
    start..position + plan.tokens as usize
}

/// Memory that threads use in disjoint parts.
#[derive(Clone, Copy)]
struct Memory(*mut f32);

// SAFETY: tasks use disjoint parts.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

struct Run<'a, A> {
    problem: &'a Problem<'a>,
    source: &'a A,
    cut: Cut,
    plans: &'a [Plan],
    scratch: Memory,
    scratch_len: usize,
    states: Memory,
}

impl<A: Source> Run<'_, A> {
    /// Scratch of a worker.
    fn scratch(&self, worker: usize) -> Scratch {
        Scratch::new(self.scratch.0.wrapping_add(worker * self.scratch_len), &self.problem.dims, self.source.max_rows())
    }

    /// Stored state of a token's head, and of those that follow it, in one of its sequence's splits.
    fn state(&self, plan: &Plan, token: usize, head: usize, split: usize) -> State {
        let (dims, heads) = (&self.problem.dims, self.problem.key_value_heads * self.problem.group);
        let index = plan.first_state as usize + token * plan.splits as usize + split;
        let states = self.states.0.wrapping_add(index * states_len(dims, heads));
        let max = states.wrapping_add(heads * dims.padded());
        let state = State { max, sum: max.wrapping_add(heads.next_multiple_of(LANES)), out: states };
        state.row(head, dims.padded())
    }
}

struct Attend<'a, A> {
    run: &'a Run<'a, A>,
    task: usize,
    worker: usize,
}

impl<A: Source> Kernel for Attend<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (run, p) = (self.run, self.run.problem);
        let index = run.plans.partition_point(|plan| plan.first_task as usize <= self.task) - 1;
        let plan = &run.plans[index];
        let local = self.task - plan.first_task as usize;
        let span = plan.span as usize;
        let units = p.key_value_heads.div_ceil(span) * run.cut.chunks;
        let (part, local) = match (plan.splits as usize).div_ceil(plan.run as usize) {
            0 => (None, local),
            parts => (Some(local % parts), local / parts),
        };
        let (unit, tile) = (local % units, local / units);
        // Later tiles see more: they go first.
        let tiles = (plan.tokens as usize).div_ceil(run.cut.tokens);
        let token = (tiles - 1 - tile) * run.cut.tokens;
        let tokens = run.cut.tokens.min(plan.tokens as usize - token);
        let (key_value_head, chunk) = (unit / run.cut.chunks * span, unit % run.cut.chunks);
        let chunk_head = chunk * run.cut.heads;
        let head = key_value_head * p.group + chunk_head;
        let row = plan.row as usize + token;
        let task = Task {
            queries: Queries {
                ptr: p.q.row_ptr(row).wrapping_add(head * p.head_stride),
                token_stride: p.q.stride,
                head_stride: p.head_stride,
                group_stride: p.group * p.head_stride,
                key_value_heads: span.min(p.key_value_heads - key_value_head),
                tokens,
                heads: run.cut.heads.min(p.group - chunk_head),
                position: plan.position as usize + token,
                window: p.window,
            },
            blocks: p.sequences.block_table.row(index),
            key_value_head,
            row,
            head,
        };
        // SAFETY: the problem was checked; scratch is this worker's, rows and states this task's own.
        unsafe {
            match part {
                None => attend_whole(s, run, &task, &run.scratch(self.worker)),
                Some(part) => attend_part(s, run, &task, plan, token, part, &run.scratch(self.worker)),
            }
        }
    }
}

/// All splits of a task's rows, merged and written out.
///
/// # Safety
/// Scratch and output rows are the task's own.
#[inline(always)]
unsafe fn attend_whole<S: Simd, A: Source>(s: S, run: &Run<'_, A>, task: &Task<'_>, scratch: &Scratch) {
    let (p, queries) = (run.problem, &task.queries);
    let (rows, padded) = (queries.rows(), p.dims.padded());
    let seen = queries.all_seen();
    // SAFETY: the caller's promise.
    unsafe {
        scratch.total.clear(rows, padded);
        for split in seen.start / SPLIT..seen.end.div_ceil(SPLIT) {
            run.source.attend(s, p, task, split, seen.end, scratch);
            s.enter(MergeRows::new(scratch.total, scratch.part, rows, padded));
        }
        for i in 0..rows {
            let (token, head) = queries.place(i, p.group);
            let out = p.out.row_ptr(task.row + token).add((task.head + head) * p.dims.value_dim);
            finish_row(s, scratch.total.row(i, padded), p.dims.value_dim, out);
        }
    }
}

/// Some splits of a task's rows, stored.
///
/// # Safety
/// Scratch and states are the task's own.
#[inline(always)]
unsafe fn attend_part<S: Simd, A: Source>(
    s: S,
    run: &Run<'_, A>,
    task: &Task<'_>,
    plan: &Plan,
    token: usize,
    part: usize,
    scratch: &Scratch,
) {
    let (p, queries) = (run.problem, &task.queries);
    let padded = p.dims.padded();
    let splits = part * plan.run as usize..((part + 1) * plan.run as usize).min(plan.splits as usize);
    let seen = queries.all_seen();
    for split in splits {
        // SAFETY: the caller's promise.
        unsafe {
            let absolute = plan.first_split as usize + split;
            let visible = absolute * SPLIT < seen.end && seen.start < (absolute + 1) * SPLIT;
            if visible {
                // The splits after the task's are most likely this thread's too.
                run.source.attend(s, p, task, absolute, seen.end, scratch);
            }
            for i in 0..queries.rows() {
                let (row, head) = queries.place(i, p.group);
                let state = run.state(plan, token + row, task.head + head, split);
                if !visible {
                    // The maximum counts in a merge even if the sum is 0, so what lay there before must not stay.
                    *state.max = f32::NEG_INFINITY;
                    *state.sum = 0.0;
                    continue;
                }
                let part = scratch.part.row(i, padded);
                *state.max = *part.max;
                *state.sum = *part.sum;
                std::ptr::copy_nonoverlapping(part.out, state.out, padded);
            }
        }
    }
}

/// Merges the stored states of one of `tasks` parts of all rows and heads.
struct Merge<'a, A> {
    run: &'a Run<'a, A>,
    task: usize,
    tasks: usize,
    /// Rows of split sequences.
    rows: usize,
}

impl<A: Source> Kernel for Merge<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (run, p) = (self.run, self.run.problem);
        let heads = p.key_value_heads * p.group;
        let padded = p.dims.padded();
        let items = self.rows * heads;
        let (mut item, end) = (self.task * items / self.tasks, (self.task + 1) * items / self.tasks);
        let mut first = 0;
        let total = run.scratch(self.task).total;
        for plan in run.plans {
            if plan.splits == 0 {
                continue;
            }
            let count = plan.tokens as usize * heads;
            while item < end.min(first + count) {
                let (token, head) = ((item - first) / heads, (item - first) % heads);
                let n = (heads - head).min(end - item).min(run.source.max_rows()).min(LANES);
                // SAFETY: states and output are these rows' own; tasks are as many as workers at most.
                unsafe {
                    total.clear(n, padded);
                    ask(s, run.state(plan, token, head, 0), n * padded);
                    for split in 0..plan.splits as usize {
                        let state = run.state(plan, token, head, split);
                        if split + 1 < plan.splits as usize {
                            // Another thread may have written it.
                            ask(s, run.state(plan, token, head, split + 1), n * padded);
                        }
                        s.enter(MergeRows::new(total, state, n, padded));
                    }
                    for i in 0..n {
                        let out = p.out.row_ptr(plan.row as usize + token).add((head + i) * p.dims.value_dim);
                        finish_row(s, total.row(i, padded), p.dims.value_dim, out);
                    }
                }
                item += n;
            }
            first += count;
        }
    }
}

/// Asks for some rows' state of `values` values.
#[inline(always)]
fn ask<S: Simd>(s: S, state: State, values: usize) {
    s.prefetch(state.max.cast_const().cast());
    s.prefetch(state.sum.cast_const().cast());
    for value in (0..values).step_by(LANES) {
        s.prefetch(state.out.wrapping_add(value).cast_const().cast());
    }
}
