//! Threads that compile grammars.
//!
//! In: work of a client, and until when its result is of use. Out: the result, or why there is none. A thread can't be ended from
//! outside, so work that takes longer goes on alone, and keeps its place until it ends.
//! Invariants: there are [`Threads::at_once`] at most, of these [`Threads::of_a_client`] of one client, so whatever a client's
//! grammars do, those of others are compiled; so many wait at most as [`Threads::waiting`] says, and nobody longer than until then.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Instant;

use crate::ClientKey;

/// How many threads there are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Threads {
    /// At the same time.
    pub at_once: usize,
    /// Of these, of one client.
    pub of_a_client: usize,
    /// That wait for a place.
    pub waiting: usize,
    /// Bytes of the stack of each.
    pub stack: usize,
}

/// Why work has no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoResult {
    /// It never began: there was no place.
    Busy,
    /// It has begun and goes on, but its time is over.
    Late,
    /// It failed, or there is no thread for it.
    Failed,
}

/// Runs work on threads of its own; clones share the places.
#[derive(Debug, Clone)]
pub(crate) struct ThreadPool(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    most: Threads,
    state: Mutex<State>,
    /// A place became free.
    freed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Whose work runs.
    running: Vec<ClientKey>,
    waiting: usize,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_place(&self, state: &State, client: ClientKey) -> bool {
        let own = state.running.iter().filter(|running| **running == client).count();
        state.running.len() < self.most.at_once && own < self.most.of_a_client
    }
}

/// A place of a client; dropping it frees it.
struct Place {
    shared: Arc<Shared>,
    client: ClientKey,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        if let Some(at) = state.running.iter().position(|running| *running == self.client) {
            state.running.swap_remove(at);
        }
        drop(state);
        // All: the next in line may be of a client that has its share.
        self.shared.freed.notify_all();
    }
}

impl ThreadPool {
    pub(crate) fn new(most: Threads) -> Self {
        Self(Arc::new(Shared { most, state: Mutex::default(), freed: Condvar::new() }))
    }

    /// Runs work on a thread that gives way to those that compute, and waits for it.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        client: ClientKey,
        until: Instant,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NoResult> {
        let place = self.place(client, until).ok_or(NoResult::Busy)?;
        let (result, done) = mpsc::sync_channel(1);
        let thread = std::thread::Builder::new().name("grammar".to_owned()).stack_size(self.0.most.stack);
        let started = thread.spawn(move || {
            qwen_hal::work_in_background();
            let made = work();
            // Free before the result is seen: who asks for the next at once finds the place.
            drop(place);
            // If nobody waits any more, it is of no use.
            let _ = result.send(made);
        });
        started.map_err(|_| NoResult::Failed)?;
        done.recv_timeout(until.saturating_duration_since(Instant::now())).map_err(|error| match error {
            mpsc::RecvTimeoutError::Timeout => NoResult::Late,
            mpsc::RecvTimeoutError::Disconnected => NoResult::Failed,
        })
    }

    /// A place, as soon as there is one.
    fn place(&self, client: ClientKey, until: Instant) -> Option<Place> {
        let shared = &self.0;
        let mut state = shared.state();
        if !shared.has_place(&state, client) {
            if state.waiting >= shared.most.waiting {
                return None;
            }
            state.waiting += 1;
            let left = until.saturating_duration_since(Instant::now());
            let wait = shared.freed.wait_timeout_while(state, left, |state| !shared.has_place(state, client));
            state = wait.unwrap_or_else(PoisonError::into_inner).0;
            state.waiting -= 1;
            if !shared.has_place(&state, client) {
                return None;
            }
        }
        state.running.push(client);
        drop(state);
        Some(Place { shared: Arc::clone(shared), client })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const FIRST: ClientKey = ClientKey(1);
    const OTHER: ClientKey = ClientKey(2);

    fn pool() -> ThreadPool {
        ThreadPool::new(Threads { at_once: 3, of_a_client: 2, waiting: 1, stack: 1 << 20 })
    }

    fn long() -> Instant {
        Instant::now() + Duration::from_secs(3600)
    }

    /// Work that goes on until the other end is dropped.
    fn stuck() -> (mpsc::Sender<()>, impl FnOnce() -> u32) {
        let (release, held) = mpsc::channel::<()>();
        (release, move || {
            let _ = held.recv();
            7
        })
    }

    #[test]
    fn stuck_work_is_left_at_its_time_and_others_go_on() {
        let pool = pool();
        let (release, work) = stuck();
        assert_eq!(pool.run(FIRST, Instant::now(), work), Err(NoResult::Late));
        let (more, work) = stuck();
        assert_eq!(pool.run(FIRST, Instant::now(), work), Err(NoResult::Late));
        // Its share is used up; that of others is not.
        assert_eq!(pool.run(FIRST, Instant::now(), || 1), Err(NoResult::Busy));
        for number in 0..10 {
            assert_eq!(pool.run(OTHER, long(), move || number), Ok(number));
        }
        drop(release);
        // Waits until the place is free.
        assert_eq!(pool.run(FIRST, long(), || 3), Ok(3));
        drop(more);
    }

    #[test]
    fn so_many_wait_and_no_more() {
        let pool = pool();
        let held: Vec<_> = (0..2)
            .map(|_| {
                let (release, work) = stuck();
                assert_eq!(pool.run(FIRST, Instant::now(), work), Err(NoResult::Late));
                release
            })
            .collect();
        let waits = {
            let pool = pool.clone();
            std::thread::spawn(move || pool.run(FIRST, long(), || 5))
        };
        while pool.0.state().waiting == 0 {
            std::thread::yield_now();
        }
        assert_eq!(pool.run(FIRST, long(), || 6), Err(NoResult::Busy));
        drop(held);
        assert_eq!(waits.join().unwrap(), Ok(5));
    }

    #[test]
    fn work_that_panics_frees_its_place() {
        let pool = pool();
        for _ in 0..5 {
            assert_eq!(pool.run(FIRST, long(), || panic!("as a compiler might")), Err::<(), _>(NoResult::Failed));
        }
        assert_eq!(pool.run(FIRST, long(), || 1), Ok(1));
    }
}
