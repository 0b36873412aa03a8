//! Work of a request that takes its time: off the threads that serve connections, so that nobody's stream waits for it.
//!
//! Large work gives way to the threads that compute, and little of it is done at a time: it would take processors from everybody's
//! answers. Small work does not: it is over before that matters, and its client waits for a first token.

use qwen_engine::work_in_background;
use tokio::sync::{Semaphore, oneshot};

use crate::error::{ApiError, Kind};

/// Bytes of JSON from which on reading is large: some ten milliseconds.
pub(crate) const LARGE: usize = 1 << 20;
/// Encoding takes so many times as long as reading.
pub(crate) const ENCODING: usize = 8;
/// Most large works at a time; others wait.
const LARGE_AT_ONCE: usize = 2;

static PLACES: Semaphore = Semaphore::const_new(LARGE_AT_ONCE);

/// Runs work on a thread where it may take its time; `size` says how much it is, in bytes of JSON that take as long to read.
///
/// # Errors
/// If it fails, or there is no thread for it.
pub(crate) async fn apart<T: Send + 'static>(
    size: usize,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let failed = || ApiError::new(Kind::Internal, "a worker of the server failed; see its log");
    if size < LARGE {
        return tokio::task::spawn_blocking(work).await.map_err(|_| failed())?;
    }
    let place = PLACES.acquire().await.map_err(|_| failed())?;
    let (sender, result) = oneshot::channel();
    // A thread of its own: what gives way once can't take that back.
    let thread = std::thread::Builder::new().name("large".into()).spawn(move || {
        let done = {
            // Held to the end of the work, also if nobody waits for the result any more; free before somebody sees the result.
            let _place = place;
            work_in_background();
            work()
        };
        // Fails if the client is gone.
        let _ = sender.send(done);
    });
    thread.map_err(|error| {
        tracing::error!(%error, "no thread for large work");
        failed()
    })?;
    result.await.map_err(|_| failed())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn large_work_is_done_like_small_and_its_panic_is_an_error() {
        for size in [0, LARGE] {
            assert_eq!(apart(size, || Ok(1)).await.unwrap(), 1);
            assert_eq!(apart::<()>(size, || panic!("on purpose")).await.unwrap_err().kind, Kind::Internal);
            // The place of the one that failed is free again.
            assert_eq!(PLACES.available_permits(), LARGE_AT_ONCE);
        }
    }
}
