//! Fork and join over the host's compute pool.

/// Runs tasks on several threads.
pub trait Parallel: Sync {
    /// Most tasks that run at the same time, the caller's thread included.
    fn threads(&self) -> usize;
    /// Calls `body(i)` once for each `i < tasks`, on any thread, in any order; returns when all are done.
    fn run(&self, tasks: usize, body: &(dyn Fn(usize) + Sync));
}

/// Runs tasks one after the other.
#[derive(Debug, Clone, Copy, Default)]
pub struct Serial;

impl Parallel for Serial {
    fn threads(&self) -> usize {
        1
    }
    fn run(&self, tasks: usize, body: &(dyn Fn(usize) + Sync)) {
        (0..tasks).for_each(body);
    }
}
