//! An engine on a thread of its own, and the way to it from any other thread or task.
//!
//! In: [`Request`]s, from anywhere. Out: a receiver of [`Output`]s for each. Invariants:
//! - submitting never waits for a step: a request is checked on the caller's thread and put into a channel;
//! - a receiver ends with an output that has a finish reason, unless it is dropped before: that cancels the request, and its
//!   blocks are free after at most one more step;
//! - an idle engine's thread sleeps in its channel and uses no CPU;
//! - a failing device ends requests ([`FinishReason::Device`](crate::FinishReason::Device)), not the thread;
//! - requests can be taken from an engine that does not answer ([`EngineHandle::abandon`]): their ends are told by whoever
//!   does that, and the engine finds nobody to tell when it wakes up.
//!
//! The channel of outputs is unbounded, but holds at most one output for each token that the request may come to and is read
//! by a task that has nothing else to do; a bounded one would let a slow reader hold up every other request.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use qwen_models::chat_template::ChatTemplate;
use qwen_models::family::{ModelConfig, ModelInfo};
use qwen_models::tokenizer::Tokenizer;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::stats::EngineStats;
use crate::{Engine, EngineError, FinishReason, Limits, Output, Prepared, Preparer, Request, RequestId};

/// Outputs of one request; dropping it cancels the request.
pub type Outputs = UnboundedReceiver<Output>;

/// Why a request was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// The request itself: it would be refused again.
    #[error(transparent)]
    Refused(EngineError),
    /// There is no thread for the request's grammar: try again later.
    #[error("{at_once} grammars at a time are compiled, and too many wait; try again later, or ask without one")]
    CompilersBusy {
        /// Grammars that are compiled at the same time.
        at_once: usize,
    },
    /// Too many requests are in flight: try again later.
    #[error("{in_flight} requests are in flight, at most {limit} are taken; try again later")]
    Overloaded {
        /// Requests in flight.
        in_flight: usize,
        /// Most that are taken.
        limit: usize,
    },
    /// The engine finishes what it has and takes nothing new.
    #[error("the engine is draining: it finishes what it has and takes no new requests")]
    Draining,
    /// The engine's thread has ended.
    #[error("the engine has stopped")]
    Stopped,
    /// Every device is out of order.
    #[error("no device is in order now: each is in quarantine until a test of it succeeds; try again later")]
    Unavailable,
}

impl From<EngineError> for SubmitError {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::CompilersBusy { at_once } => Self::CompilersBusy { at_once },
            error => Self::Refused(error),
        }
    }
}

/// What a model is, for whoever speaks to its engine.
#[derive(Debug)]
pub struct About {
    /// Neutral config.
    pub config: ModelConfig,
    /// Sizes for people.
    pub info: ModelInfo,
    /// Text to ids and back.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// How messages become a prompt.
    pub chat_template: Option<Arc<ChatTemplate>>,
    /// What requests can ask for.
    pub limits: Limits,
}

/// Forward progress of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Steps since the start.
    pub steps: u64,
    /// Requests in flight.
    pub in_flight: usize,
    /// Of these, those that the engine has; the grammars of the others are being compiled.
    pub submitted: usize,
    /// Since the last step ended, or since the engine got work after having none; zero while it has none.
    pub stalled: Duration,
}

enum Command {
    Submit(Box<Prepared>, RequestId),
    Cancel(RequestId),
    CancelAll,
    Call(Box<dyn FnOnce(&mut Engine) + Send>),
}

/// Where outputs go; none once the engine's thread has ended.
type Sinks = Option<HashMap<RequestId, UnboundedSender<Output>>>;

struct Shared {
    about: Arc<About>,
    sinks: Mutex<Sinks>,
    preparer: Preparer,
    stats: Mutex<EngineStats>,
    next_id: AtomicU64,
    in_flight: AtomicUsize,
    max_in_flight: usize,
    draining: AtomicBool,
    steps: AtomicU64,
    started: Instant,
    /// Milliseconds after `started`.
    last_progress: AtomicU64,
}

impl Shared {
    fn sinks(&self) -> MutexGuard<'_, Sinks> {
        self.sinks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mark_progress(&self) {
        let now = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_progress.store(now, Ordering::Relaxed);
    }
}

/// The way to an engine that runs on a thread of its own; clones are the same way.
#[derive(Clone)]
pub struct EngineHandle {
    shared: Arc<Shared>,
    commands: Sender<Command>,
}

impl std::fmt::Debug for EngineHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineHandle").field("progress", &self.progress()).finish_non_exhaustive()
    }
}

impl EngineHandle {
    /// Moves an engine to a thread of its own that takes at most `max_in_flight` requests, waiting and running ones together.
    /// The thread ends when every handle is dropped and every request has ended.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn spawn(mut engine: Engine, max_in_flight: usize) -> std::io::Result<(Self, JoinHandle<()>)> {
        let about = Arc::new(engine.about());
        let shared = Arc::new(Shared {
            about,
            sinks: Mutex::new(Some(HashMap::new())),
            preparer: engine.preparer(),
            stats: Mutex::new(engine.stats()),
            next_id: AtomicU64::new(1),
            in_flight: AtomicUsize::new(0),
            max_in_flight: max_in_flight.max(1),
            draining: AtomicBool::new(false),
            steps: AtomicU64::new(0),
            started: Instant::now(),
            last_progress: AtomicU64::new(0),
        });
        let (commands, inbox) = mpsc::channel();
        let worker = Worker { engine, shared: Arc::clone(&shared), inbox, open: true };
        let thread = std::thread::Builder::new().name("engine".into()).spawn(move || worker.run())?;
        Ok((Self { shared, commands }, thread))
    }

    /// Takes a request. Never waits for the engine, but compiles the request's grammar, which may take
    /// some tens of milliseconds: with one, a task should call this from a blocking thread.
    ///
    /// # Errors
    /// If the request can't be computed, too many are in flight, or the engine takes none.
    pub fn submit(&self, request: Request) -> Result<(RequestId, Outputs), SubmitError> {
        if self.is_draining() {
            return Err(SubmitError::Draining);
        }
        self.submit_within(request, self.shared.max_in_flight)
    }

    /// As [`EngineHandle::submit`], for a request that was accepted before, elsewhere: it is taken however many there are, and
    /// while the engine drains.
    pub(crate) fn submit_again(&self, request: Request) -> Result<(RequestId, Outputs), SubmitError> {
        self.submit_within(request, usize::MAX)
    }

    fn submit_within(&self, request: Request, limit: usize) -> Result<(RequestId, Outputs), SubmitError> {
        // Taken before the work of preparing, so that a flood is refused cheaply.
        let place = Place::take(&self.shared, limit)?;
        let prepared = self.shared.preparer.prepare(request)?;
        let id = RequestId(self.shared.next_id.fetch_add(1, Ordering::Relaxed));
        let (sink, outputs) = unbounded_channel();
        {
            let mut sinks = self.shared.sinks();
            let sinks = sinks.as_mut().ok_or(SubmitError::Stopped)?;
            if sinks.is_empty() {
                self.shared.mark_progress();
            }
            sinks.insert(id, sink);
        }
        self.commands.send(Command::Submit(Box::new(prepared), id)).map_err(|_| SubmitError::Stopped)?;
        // The worker gives the place back when the request ends.
        std::mem::forget(place);
        Ok((id, outputs))
    }

    /// Checks a request as [`EngineHandle::submit`] does, without submitting it or compiling its grammar.
    ///
    /// # Errors
    /// If the request can't be computed.
    pub fn check(&self, request: &Request) -> Result<(), EngineError> {
        self.shared.about.limits.check(request)
    }

    /// Sorts the vocabulary for grammars, which the first grammar would wait for otherwise.
    ///
    /// # Errors
    /// If the model has no tokenizer or no token that ends an answer.
    pub fn warm_up_grammars(&self) -> Result<(), EngineError> {
        self.shared.preparer.warm_up_grammars()
    }

    /// Ends a request within a step; its last output says so. One that has ended is left alone.
    pub fn cancel(&self, id: RequestId) {
        // An engine that has stopped has ended every request.
        let _ = self.commands.send(Command::Cancel(id));
    }

    /// Ends every request within a step.
    pub fn cancel_all(&self) {
        let _ = self.commands.send(Command::CancelAll);
    }

    /// Ends every request now, whether or not the engine answers; it drops them when it does.
    pub(crate) fn abandon(&self, reason: &str) {
        let sinks = self.shared.sinks().as_mut().map(std::mem::take).unwrap_or_default();
        self.shared.in_flight.fetch_sub(sinks.len(), Ordering::AcqRel);
        for (id, sink) in sinks {
            // A reader that is gone needs no end.
            let _ = sink.send(Output::end(id, FinishReason::Device(reason.to_owned())));
        }
        self.cancel_all();
    }

    /// Takes no new requests from now on; those in flight are finished.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::Release);
    }

    /// Whether new requests are refused.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.shared.draining.load(Ordering::Acquire)
    }

    /// Whether no request is in flight.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.shared.in_flight.load(Ordering::Acquire) == 0
    }

    /// Config, tokenizer, template, limits.
    #[must_use]
    pub fn about(&self) -> &Arc<About> {
        &self.shared.about
    }

    /// Figures after the last step.
    #[must_use]
    pub fn stats(&self) -> EngineStats {
        *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the engine gets on: for a readiness check that asks for more than an open socket.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let in_flight = self.shared.in_flight.load(Ordering::Acquire);
        let last = Duration::from_millis(self.shared.last_progress.load(Ordering::Relaxed));
        let submitted = self.shared.sinks().as_ref().map_or(0, HashMap::len);
        let stalled = if submitted == 0 { Duration::ZERO } else { self.shared.started.elapsed().saturating_sub(last) };
        Progress { steps: self.shared.steps.load(Ordering::Relaxed), in_flight, submitted, stalled }
    }

    /// Runs something with the engine between two steps: known-answer tests, reports. Requests wait while it runs.
    ///
    /// # Errors
    /// [`SubmitError::Stopped`] if the engine's thread has ended.
    pub fn call(&self, job: impl FnOnce(&mut Engine) + Send + 'static) -> Result<(), SubmitError> {
        self.commands.send(Command::Call(Box::new(job))).map_err(|_| SubmitError::Stopped)
    }
}

/// A request's place among those in flight, given back when dropped.
struct Place<'a>(&'a Shared);

impl<'a> Place<'a> {
    fn take(shared: &'a Shared, limit: usize) -> Result<Self, SubmitError> {
        shared
            .in_flight
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| (n < limit).then_some(n + 1))
            .map_err(|in_flight| SubmitError::Overloaded { in_flight, limit })?;
        Ok(Self(shared))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}

struct Worker {
    engine: Engine,
    shared: Arc<Shared>,
    inbox: Receiver<Command>,
    /// Whether a handle is left.
    open: bool,
}

impl Worker {
    fn run(mut self) {
        while self.open || self.engine.has_work() {
            self.take_commands();
            if !self.engine.has_work() {
                continue;
            }
            self.cancel_unread();
            let outputs = self.engine.step();
            self.shared.steps.fetch_add(1, Ordering::Relaxed);
            self.shared.mark_progress();
            self.publish();
            self.deliver(outputs);
        }
    }

    /// Ends what nobody reads any more.
    fn cancel_unread(&mut self) {
        for (id, sink) in self.shared.sinks().iter().flatten() {
            if sink.is_closed() {
                self.engine.cancel(*id);
            }
        }
    }

    /// Everything in the inbox; waits for something if there is no work.
    fn take_commands(&mut self) {
        loop {
            let command = match self.inbox.try_recv() {
                Ok(command) => command,
                Err(TryRecvError::Empty) if self.engine.has_work() => return,
                Err(TryRecvError::Empty) => match self.inbox.recv() {
                    Ok(command) => command,
                    Err(_) => return self.open = false,
                },
                Err(TryRecvError::Disconnected) => return self.open = false,
            };
            match command {
                Command::Submit(prepared, id) => {
                    // It may have been taken away again before it came here.
                    if self.shared.sinks().as_ref().is_some_and(|sinks| sinks.contains_key(&id)) {
                        self.engine.enqueue(*prepared, id);
                    }
                }
                Command::Cancel(id) => {
                    self.engine.cancel(id);
                }
                Command::CancelAll => self.engine.cancel_all(),
                Command::Call(job) => {
                    job(&mut self.engine);
                    self.publish();
                }
            }
        }
    }

    fn publish(&self) {
        *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner) = self.engine.stats();
    }

    fn deliver(&self, outputs: Vec<Output>) {
        let mut sinks = self.shared.sinks();
        let Some(sinks) = sinks.as_mut() else { return };
        for output in outputs {
            // A reader that is gone is noticed before the next step; one that was taken away has been told.
            if output.finish.is_none() {
                if let Some(sink) = sinks.get(&output.id) {
                    let _ = sink.send(output);
                }
            } else if let Some(sink) = sinks.remove(&output.id) {
                // First, so that whoever reads the last output finds the place free.
                self.shared.in_flight.fetch_sub(1, Ordering::AcqRel);
                let _ = sink.send(output);
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Whoever still waits sees the end of the channel.
        *self.shared.sinks() = None;
    }
}
