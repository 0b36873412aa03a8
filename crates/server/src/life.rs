//! Where the server is in its life, and how many requests it is working on.

use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

/// A stage of life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The model is being loaded.
    Loading,
    /// The model computes its first tokens.
    Warming,
    /// Requests are taken.
    Ready,
    /// Requests in flight are finished, new ones are not taken.
    Draining,
}

impl State {
    /// Name in health reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Loading => "loading",
            Self::Warming => "warming",
            Self::Ready => "ready",
            Self::Draining => "draining",
        }
    }
}

/// The life of a server.
#[derive(Debug)]
pub struct Life {
    state: AtomicU8,
    active: AtomicUsize,
    idle: Notify,
}

impl Default for Life {
    fn default() -> Self {
        Self::new()
    }
}

impl Life {
    /// At its beginning.
    #[must_use]
    pub fn new() -> Self {
        Self { state: AtomicU8::new(State::Loading as u8), active: AtomicUsize::new(0), idle: Notify::new() }
    }

    /// Now.
    #[must_use]
    pub fn state(&self) -> State {
        match self.state.load(Ordering::Acquire) {
            0 => State::Loading,
            1 => State::Warming,
            2 => State::Ready,
            _ => State::Draining,
        }
    }

    /// Life goes one way.
    pub fn advance(&self, state: State) {
        self.state.fetch_max(state as u8, Ordering::AcqRel);
    }

    /// Generations at work.
    #[must_use]
    pub fn active(&self) -> usize {
        self.active.load(Ordering::Acquire)
    }

    pub(crate) fn enter(&self) {
        self.active.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn leave(&self) {
        if self.active.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.idle.notify_waiters();
        }
    }

    /// Waits until nothing is at work, or for so long. Returns whether nothing is.
    pub async fn until_idle(&self, limit: Duration) -> bool {
        let wait = async {
            loop {
                let notified = self.idle.notified();
                if self.active() == 0 {
                    return;
                }
                // The last one may have left between the look and the wait.
                tokio::select! {
                    () = notified => {}
                    () = tokio::time::sleep(Duration::from_millis(50)) => {}
                }
            }
        };
        tokio::time::timeout(limit, wait).await.is_ok()
    }
}
