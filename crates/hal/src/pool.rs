//! The hot thread pool: workers spin for a moment after each job and then sleep, so that the ops of a step start within
//! about a microsecond and an idle process uses no CPU.
//!
//! It lives on the host's side because the host lends it to every plugin (`parallel_for`): one pool for all kernels of the
//! process. Invariants:
//! - the caller works too; a job is done when every task ran exactly once, however many workers woke up in time;
//! - tasks are handed out one by one, so a slow core takes fewer; results must not depend on who runs what;
//! - a task that runs a job itself runs it serially; callers on different threads take turns;
//! - a panic in a task is raised again on the caller's thread, after all running tasks have ended.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::host::ComputePool;

/// How long an idle worker spins before it sleeps: longer than the gaps within a step, shorter than those between requests.
const SPIN: Duration = Duration::from_micros(200);
/// Spins between two looks at the clock or two yields.
const SPIN_BATCH: u32 = 256;
/// More threads than this are a mistake.
const MAX_THREADS: usize = 1024;

/// Set in `state` while workers may join the current job. Below it: workers inside the job. Above: number of the job.
const OPEN: u64 = 1 << 32;
const INSIDE: u64 = OPEN - 1;
const JOB_SHIFT: u32 = 33;

type Task<'a> = dyn Fn(usize) + Sync + 'a;

/// Keeps what different cores write apart.
#[repr(align(128))]
struct Line<T>(T);

struct Job {
    body: *const Task<'static>,
    tasks: usize,
}

struct Shared {
    /// Number of the job, whether it is open, how many workers are inside.
    state: Line<AtomicU64>,
    /// Next task to hand out.
    next: Line<AtomicUsize>,
    /// Written by the caller while the job is closed and nobody is inside; read by those inside.
    job: Line<UnsafeCell<Job>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
}

// SAFETY: `job` follows the protocol stated at the field, everything else is Sync by itself.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is only followed while the caller of `run` keeps its target alive.
unsafe impl Send for Shared {}

struct Worker {
    thread: Thread,
    asleep: Arc<Line<AtomicBool>>,
    handle: Option<JoinHandle<()>>,
}

/// A fixed set of threads that run the tasks of one job after the other.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<Worker>,
    /// Callers take turns.
    turn: Mutex<()>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &(self.workers.len() + 1)).finish_non_exhaustive()
    }
}

thread_local! {
    /// This thread is running a task: a job within it must not wait for the pool.
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

/// Threads that the process may use: its affinity mask and its cgroup's CPU quota, or `QWEN_THREADS`.
#[must_use]
pub fn available_threads() -> usize {
    let have = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let wish = std::env::var_os("QWEN_THREADS").and_then(|text| wished_threads(&text.to_string_lossy()));
    wish.unwrap_or_else(have).min(MAX_THREADS)
}

fn wished_threads(text: &str) -> Option<usize> {
    let wish = text.trim().parse().ok().filter(|wish| (1..=MAX_THREADS).contains(wish));
    if wish.is_none() && !text.is_empty() {
        tracing::warn!("QWEN_THREADS: expected a number from 1 to {MAX_THREADS}, found {text:?}; it is ignored");
    }
    wish
}

impl Pool {
    /// A pool of so many threads, the caller's included; by default [`available_threads`]. If the system refuses a thread,
    /// the pool is smaller.
    #[must_use]
    pub fn new(threads: Option<usize>) -> Self {
        let threads = threads.unwrap_or_else(available_threads).clamp(1, MAX_THREADS);
        let shared = Arc::new(Shared {
            state: Line(AtomicU64::new(0)),
            next: Line(AtomicUsize::new(0)),
            job: Line(UnsafeCell::new(Job { body: std::ptr::from_ref::<Task<'static>>(&|_| {}), tasks: 0 })),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
        });
        let spawn = |index: usize| {
            let asleep = Arc::new(Line(AtomicBool::new(false)));
            let (shared, flag) = (Arc::clone(&shared), Arc::clone(&asleep));
            let handle = std::thread::Builder::new()
                .name(format!("compute-{index}"))
                .spawn(move || work(&shared, &flag.0))
                .map_err(|error| tracing::warn!(%error, "fewer compute threads than asked for"))
                .ok()?;
            Some(Worker { thread: handle.thread().clone(), asleep, handle: Some(handle) })
        };
        let workers = (1..threads).map_while(spawn).collect();
        Self { shared, workers, turn: Mutex::new(()) }
    }

    fn run_parallel(&self, tasks: usize, body: &Task<'_>) {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &*self.shared;
        let job = (shared.state.0.load(Ordering::Relaxed) >> JOB_SHIFT) + 1;
        // SAFETY: only the lifetime is erased. The pointer is used by threads inside the job, and this function does not
        // return before the job is closed and nobody is inside.
        let body: *const Task<'static> = unsafe { std::mem::transmute::<&Task<'_>, &'static Task<'static>>(body) };
        // SAFETY: the previous job was closed and left by all before its caller gave up the turn.
        unsafe { *shared.job.0.get() = Job { body, tasks } };
        shared.next.0.store(0, Ordering::Relaxed);
        // SeqCst here and at `asleep`: either the worker sees the job before it sleeps, or we see that it sleeps.
        shared.state.0.store((job << JOB_SHIFT) | OPEN, Ordering::SeqCst);
        for worker in self.workers.iter().take(tasks - 1) {
            if worker.asleep.0.load(Ordering::SeqCst) {
                worker.thread.unpark();
            }
        }
        run_tasks(shared);
        shared.state.0.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0_u32;
        while shared.state.0.load(Ordering::Acquire) & INSIDE != 0 {
            spins = spins.wrapping_add(1);
            if spins.is_multiple_of(SPIN_BATCH) {
                // A worker lost its core; give it ours.
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        let panic = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            drop(_turn);
            resume_unwind(panic);
        }
    }
}

impl ComputePool for Pool {
    fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    fn run(&self, tasks: usize, body: &Task<'_>) {
        if tasks <= 1 || self.workers.is_empty() || IN_TASK.get() {
            (0..tasks).for_each(body);
        } else {
            self.run_parallel(tasks, body);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in &mut self.workers {
            worker.thread.unpark();
            if let Some(handle) = worker.handle.take() {
                // A worker catches the panics of tasks; it has none of its own to report.
                let _ = handle.join();
            }
        }
    }
}

/// Takes tasks of the current job until none is left. The calling thread is the job's caller or is counted as inside.
fn run_tasks(shared: &Shared) {
    // SAFETY: the job is not rewritten while its caller or a thread inside uses it.
    let (body, tasks) = unsafe {
        let job = &*shared.job.0.get();
        (&*job.body, job.tasks)
    };
    IN_TASK.set(true);
    let result = catch_unwind(AssertUnwindSafe(|| {
        loop {
            let task = shared.next.0.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                return;
            }
            body(task);
        }
    }));
    IN_TASK.set(false);
    if let Err(panic) = result {
        // The job has failed: what was not begun is not needed any more.
        shared.next.0.store(tasks, Ordering::Relaxed);
        shared.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
    }
}

fn work(shared: &Shared, asleep: &AtomicBool) {
    let mut last_job = 0;
    let mut idle_since = Instant::now();
    while !shared.stop.load(Ordering::Relaxed) {
        for _ in 0..SPIN_BATCH {
            let state = shared.state.0.load(Ordering::Acquire);
            if state >> JOB_SHIFT != last_job {
                last_job = state >> JOB_SHIFT;
                if join(shared, state) {
                    run_tasks(shared);
                    shared.state.0.fetch_sub(1, Ordering::Release);
                }
                idle_since = Instant::now();
            }
            std::hint::spin_loop();
        }
        if idle_since.elapsed() > SPIN {
            asleep.store(true, Ordering::SeqCst);
            while shared.state.0.load(Ordering::SeqCst) >> JOB_SHIFT == last_job && !shared.stop.load(Ordering::SeqCst)
            {
                std::thread::park();
            }
            asleep.store(false, Ordering::Relaxed);
            idle_since = Instant::now();
        }
    }
}

/// Counts this thread into the job, unless it is over.
fn join(shared: &Shared, mut state: u64) -> bool {
    let job = state >> JOB_SHIFT;
    while state & OPEN != 0 && state >> JOB_SHIFT == job {
        match shared.state.0.compare_exchange_weak(state, state + 1, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return true,
            Err(now) => state = now,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn a_wish_out_of_range_is_ignored() {
        assert_eq!(wished_threads(" 3 "), Some(3));
        for text in ["", "0", "-1", "1.5", "x", "1000000", "99999999999999999999"] {
            assert_eq!(wished_threads(text), None, "{text}");
        }
    }

    #[test]
    fn each_task_runs_exactly_once() {
        let pool = Pool::new(Some(4));
        for tasks in [0, 1, 2, 3, 7, 64, 1000] {
            let counts: Vec<AtomicU32> = (0..tasks).map(|_| AtomicU32::new(0)).collect();
            pool.run(tasks, &|i| {
                counts[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1), "{tasks}");
        }
    }

    #[test]
    fn writes_of_tasks_are_visible_over_many_short_jobs() {
        let pool = Pool::new(Some(3));
        let mut data = [0_u64; 16];
        for round in 0..20_000_u64 {
            let cells: Vec<Mutex<&mut u64>> = data.iter_mut().map(Mutex::new).collect();
            pool.run(cells.len(), &|i| **cells[i].lock().unwrap() += round);
        }
        assert!(data.iter().all(|v| *v == 20_000 * 19_999 / 2));
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_works_on() {
        let pool = Pool::new(Some(3));
        for bad in 0..20 {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.run(20, &|i| assert!(i != bad, "task {i}"));
            }));
            let text = *caught.unwrap_err().downcast::<String>().unwrap();
            assert_eq!(text, format!("task {bad}"));
            let sum = AtomicUsize::new(0);
            pool.run(10, &|i| {
                sum.fetch_add(i, Ordering::Relaxed);
            });
            assert_eq!(sum.load(Ordering::Relaxed), 45);
        }
    }

    #[test]
    fn nested_jobs_run_serially_on_the_same_thread() {
        let pool = Pool::new(Some(2));
        let total = AtomicUsize::new(0);
        pool.run(8, &|_| {
            let me = std::thread::current().id();
            pool.run(5, &|i| {
                assert_eq!(std::thread::current().id(), me);
                total.fetch_add(i, Ordering::Relaxed);
            });
        });
        assert_eq!(total.load(Ordering::Relaxed), 80);
    }

    #[test]
    fn callers_take_turns() {
        let pool = Pool::new(Some(2));
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        pool.run(7, &|i| {
                            total.fetch_add(i, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 4 * 500 * 21);
    }

    #[test]
    fn idle_workers_sleep_and_wake_again() {
        let pool = Pool::new(Some(3));
        for _ in 0..3 {
            while !pool.workers.iter().all(|w| w.asleep.0.load(Ordering::SeqCst)) {
                std::thread::yield_now();
            }
            // Both tasks wait for each other, so a sleeping worker has to come.
            let barrier = std::sync::Barrier::new(2);
            pool.run(2, &|_| {
                barrier.wait();
            });
        }
    }

    #[test]
    fn the_size_is_what_was_asked_for() {
        assert_eq!(Pool::new(Some(0)).threads(), 1);
        assert_eq!(Pool::new(Some(5)).threads(), 5);
        assert!(available_threads() >= 1);
    }
}
