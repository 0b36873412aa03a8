//! Sharing rows out over threads. How they are shared never shows in a result.

use std::ops::Range;

use crate::parallel::Parallel;

/// Values below which a task isn't worth handing to another thread: a microsecond's work, about what handing over takes.
pub(crate) const TASK_VALUES: usize = 4 * 1024;

/// Calls `body` with ranges that cover `0..rows`; `row_values` says how much work a row is.
pub(crate) fn for_rows(parallel: &dyn Parallel, rows: usize, row_values: usize, body: &(dyn Fn(Range<usize>) + Sync)) {
    let values = rows.saturating_mul(row_values);
    let tasks = (values / TASK_VALUES).clamp(1, (parallel.threads() * 4).max(1)).min(rows);
    if tasks <= 1 {
        if rows > 0 {
            body(0..rows);
        }
        return;
    }
    parallel.run(tasks, &|task| body(task * rows / tasks..(task + 1) * rows / tasks));
}
