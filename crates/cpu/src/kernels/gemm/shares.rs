//! Items of work shared out over threads: each thread walks its own contiguous range, then helps with the others'.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Most ranges; further threads start in the range of another.
const MAX_SHARES: usize = 16;

/// A counter on its own cache line.
#[repr(align(64))]
struct Cursor(AtomicUsize);

pub(in crate::kernels) struct Shares {
    cursors: [Cursor; MAX_SHARES],
    count: usize,
    items: usize,
}

impl Shares {
    pub(in crate::kernels) fn new(items: usize, threads: usize) -> Self {
        let count = threads.clamp(1, MAX_SHARES);
        let cursors = std::array::from_fn(|i| Cursor(AtomicUsize::new(if i < count { i * items / count } else { 0 })));
        Self { cursors, count, items }
    }

    /// The next item for a thread; each is given out once.
    pub(in crate::kernels) fn next(&self, thread: usize) -> Option<usize> {
        (0..self.count).find_map(|i| {
            let share = (thread + i) % self.count;
            let end = (share + 1) * self.items / self.count;
            let cursor = &self.cursors[share].0;
            // A plain look first: a finished range costs no exclusive access.
            if cursor.load(Ordering::Relaxed) >= end {
                return None;
            }
            let item = cursor.fetch_add(1, Ordering::Relaxed);
            (item < end).then_some(item)
        })
    }
}
