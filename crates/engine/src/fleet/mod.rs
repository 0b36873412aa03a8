//! Several devices behind one door: which one a request goes to, and what happens to it when its device fails.
//!
//! In: [`Instance`]s (a device with the model on it, or rather how to make one) and [`Request`]s. Out: an [`FleetOutputs`] for each
//! request. Invariants:
//! - an answer does not depend on the device that gives it, nor on how many gave it one after the other: when a device fails
//!   or is found wrong, another one of the same type goes on after the tokens that were handed out, with the same random
//!   numbers, grammar and stop texts, so that the reader sees neither a gap nor a difference. Devices of different types round
//!   differently: then the answer goes on as the other type would, and the log says so;
//! - a device whose trust is gone ([`Trust`]) gets no requests until a test of it succeeded;
//! - nothing here touches a token on its way but to remember it: an answer reads its engine's channel itself.
//!
//! [`route`] chooses, [`supervisor`] tests and repairs, [`answer`] goes on elsewhere, [`state`] is the table of states.

mod answer;
mod group;
mod route;
mod start;
mod state;
mod supervisor;

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use qwen_hal::{Device, Health};
use tokio::sync::watch;

use crate::handle::About;
use crate::stats::EngineStats;
use crate::topology::{Distance, Place, Topology};
use crate::{Engine, EngineError, EngineHandle, Outputs, Progress, Request, SubmitError};

pub use answer::FleetOutputs;
pub use group::GroupMember;
pub use start::FleetError;
pub use state::Trust;

use route::{Candidate, Wish, choose};
use state::Event;
use supervisor::Message;

/// Opens a device and loads the model onto it; called again when a device has to be opened anew.
pub type Build = Box<dyn FnMut() -> Result<Engine, String> + Send>;

/// A device that is to take part.
pub struct Instance {
    /// Name in reports, as the user named the device.
    pub name: String,
    /// Where it is plugged in.
    pub place: Place,
    /// Makes its engine.
    pub build: Build,
}

impl std::fmt::Debug for Instance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Instance").field("name", &self.name).field("place", &self.place).finish_non_exhaustive()
    }
}

/// Choices of a fleet.
pub struct FleetOptions {
    /// Most requests in flight, over all devices.
    pub max_in_flight: usize,
    /// Time between two tests of a device by known answers; none: devices are never tested.
    pub tests: Option<Duration>,
    /// A device with work that makes no step for so long is out of order.
    pub stall: Duration,
    /// How long a request whose device failed waits for another one.
    pub patience: Duration,
    /// From quarantine to the first test; doubled after each that fails.
    pub retest: Duration,
    /// Buses, nodes and interfaces.
    pub topology: Topology,
    /// Makes an engine on the host, whose known answer the devices' are compared with at the start; then it is dropped.
    pub reference: Option<Build>,
}

impl Default for FleetOptions {
    fn default() -> Self {
        Self {
            max_in_flight: 1024,
            tests: Some(Duration::from_secs(60)),
            stall: Duration::from_secs(30),
            patience: Duration::from_secs(60),
            retest: Duration::from_secs(1),
            topology: Topology::read(std::path::Path::new("/")),
            reference: None,
        }
    }
}

impl std::fmt::Debug for FleetOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FleetOptions").field("tests", &self.tests).field("stall", &self.stall).finish_non_exhaustive()
    }
}

/// An engine at work.
struct Live {
    handle: EngineHandle,
    thread: JoinHandle<()>,
    /// Those that compute the model together; mostly one.
    devices: Vec<Device>,
}

/// What is known of a device over its time.
#[derive(Debug, Clone)]
struct Condition {
    trust: Trust,
    reason: String,
    faults: u64,
    quarantines: u64,
    tests: u64,
    failed_tests: u64,
    last_reset: Option<SystemTime>,
    /// Figures of its engines before the present one.
    past: EngineStats,
}

/// A device's place in the fleet.
struct Seat {
    name: String,
    place: Place,
    /// Devices of one type give the same bits.
    kind: String,
    title: String,
    hal_kind: u32,
    memory_total: Option<u64>,
    /// Digest of the right known answer; none if it is not tested.
    digest: Option<u64>,
    build: Mutex<Build>,
    live: RwLock<Option<Live>>,
    condition: Mutex<Condition>,
}

impl Seat {
    fn condition(&self) -> MutexGuard<'_, Condition> {
        self.condition.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn trust(&self) -> Trust {
        self.condition().trust
    }

    fn handle(&self) -> Option<EngineHandle> {
        self.live.read().unwrap_or_else(PoisonError::into_inner).as_ref().map(|live| live.handle.clone())
    }

    /// What an event makes of it; whether that is a change.
    fn apply(&self, event: Event, reason: &str) -> bool {
        let mut condition = self.condition();
        let before = condition.trust;
        let after = before.after(event);
        let was_out = before == Trust::Quarantined;
        match event {
            // The ends of requests that were taken from it.
            Event::Doubt | Event::Fault if was_out => return false,
            Event::Doubt | Event::Fault => condition.faults += 1,
            Event::Passed => condition.tests += 1,
            Event::Failed => {
                condition.tests += 1;
                condition.failed_tests += 1;
            }
        }
        if event != Event::Passed && !was_out {
            reason.clone_into(&mut condition.reason);
        }
        condition.quarantines += u64::from(after == Trust::Quarantined && before != after);
        condition.trust = after;
        drop(condition);
        if before == after {
            return false;
        }
        let (device, before, after) = (&self.name, before.name(), after.name());
        match event {
            Event::Passed => tracing::info!(device, before, after, "a test of the device succeeded"),
            _ => tracing::error!(device, before, after, reason, "the device is in doubt"),
        }
        true
    }
}

/// When work was accepted: everything of an epoch is cancelled at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Epoch(u64);

struct Shared {
    about: Arc<About>,
    seats: Vec<Arc<Seat>>,
    topology: Topology,
    max_in_flight: usize,
    patience: Duration,
    draining: AtomicBool,
    /// Raised to end every request.
    cancelled: AtomicU64,
    /// Requests that went on on another device, or on the same one after a test.
    moved: AtomicU64,
    /// Requests by the distance that they went, as in [`Distance::NAMES`].
    routed: [AtomicU64; Distance::NAMES.len()],
    /// Told of every change of a device's state.
    changes: watch::Sender<u64>,
    supervisor: Mutex<Sender<Message>>,
}

impl Shared {
    fn epoch(&self) -> Epoch {
        Epoch(self.cancelled.load(Ordering::Acquire))
    }

    /// Comes when all work of an epoch is cancelled.
    async fn cancelled_since(&self, epoch: Epoch) {
        let mut changes = self.changes.subscribe();
        while self.epoch() == epoch && changes.changed().await.is_ok() {}
    }

    fn tell(&self, message: Message) {
        // A supervisor that is gone ends with the fleet.
        let _ = self.supervisor.lock().unwrap_or_else(PoisonError::into_inner).send(message);
    }

    fn wake(&self) {
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Something happened to a device; what follows at once is that it gets no new requests.
    fn report(&self, seat: usize, event: Event, reason: &str) {
        let Some(at) = self.seats.get(seat) else { return };
        at.apply(event, reason);
        self.tell(Message::Look);
        self.wake();
    }

    /// Gives a request to a device: its seat and where its outputs come; none if one may be usable soon.
    fn launch(&self, request: &Request, from: &Place, again: bool) -> Result<Option<(usize, Outputs)>, SubmitError> {
        let wish = Wish { prompt: &request.prompt, client: request.client, salt: request.cache_salt };
        let mut tried = Vec::new();
        loop {
            let candidate = |(index, seat): (usize, &Arc<Seat>)| {
                let usable = !tried.contains(&index) && seat.trust().is_usable();
                let handle = if usable { seat.handle()? } else { return None };
                let distance = self.topology.distance(from, &seat.place);
                let (load, places) = (handle.progress().in_flight, handle.stats().max_sequences);
                Some(Candidate { index, distance, load, places })
            };
            let Some(index) = choose(self.seats.iter().enumerate().filter_map(candidate), wish) else {
                let soon = self.seats.iter().any(|seat| seat.trust() == Trust::Suspect);
                return if soon { Ok(None) } else { Err(SubmitError::Unavailable) };
            };
            tried.push(index);
            let Some(handle) = self.seats[index].handle() else { continue };
            let request = request.clone();
            match if again { handle.submit_again(request) } else { handle.submit(request) } {
                Ok((_, outputs)) => {
                    let distance = self.topology.distance(from, &self.seats[index].place);
                    self.routed[distance.kind()].fetch_add(1, Ordering::Relaxed);
                    return Ok(Some((index, outputs)));
                }
                Err(SubmitError::Stopped) => self.report(index, Event::Failed, "its engine has stopped"),
                Err(error) => return Err(error),
            }
        }
    }
}

/// A device of a fleet and how it is.
#[derive(Debug, Clone)]
pub struct InstanceReport {
    /// Name, as the user named it.
    pub name: String,
    /// Name of the device for people.
    pub title: String,
    /// `QHAL_KIND_*`.
    pub kind: u32,
    /// Where it is plugged in.
    pub place: Place,
    /// How far it is trusted.
    pub trust: Trust,
    /// Why it was in doubt the last time; empty if it never was.
    pub reason: String,
    /// Times that it failed or computed wrongly.
    pub faults: u64,
    /// Times that it came into quarantine.
    pub quarantines: u64,
    /// Tests by known answers.
    pub tests: u64,
    /// Of these, tests that failed.
    pub failed_tests: u64,
    /// When it was opened anew.
    pub last_reset: Option<SystemTime>,
    /// What it says of itself; none while it is not open, or if it says nothing.
    pub health: Option<Health>,
    /// Of a group, its devices as they are named; empty for a device alone.
    pub members: Vec<GroupMember>,
    /// Its memory in bytes, if known.
    pub memory_total: Option<u64>,
    /// Requests in flight.
    pub in_flight: usize,
    /// Figures of its engine.
    pub stats: EngineStats,
}

/// Engines on several devices; clones are the same ones. It ends when the last clone and answer are dropped.
#[derive(Clone)]
pub struct Fleet(Arc<Shared>);

impl std::fmt::Debug for Fleet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let seats = self.0.seats.iter().map(|seat| (&seat.name, seat.trust()));
        f.debug_map().entries(seats).finish()
    }
}

impl Fleet {
    /// Takes a request that came in by a local address. Never waits, but compiles the request's grammar, as
    /// [`EngineHandle::submit`] does.
    ///
    /// # Errors
    /// As [`EngineHandle::submit`], and if every device is in quarantine.
    pub fn submit(&self, request: Request, by: Option<IpAddr>) -> Result<FleetOutputs, SubmitError> {
        if self.is_draining() {
            return Err(SubmitError::Draining);
        }
        let (in_flight, limit) = (self.progress().in_flight, self.0.max_in_flight);
        if in_flight >= limit {
            return Err(SubmitError::Overloaded { in_flight, limit });
        }
        self.submit_from(request, self.place_of(by))
    }

    /// A further part of work that was accepted at `epoch`: it is taken when its outputs are asked for first, however many
    /// requests there are and while the fleet drains, and waits for a device if there is none now. If all work has been cancelled
    /// since, so is this.
    #[must_use]
    pub fn submit_later(&self, request: Request, by: Option<IpAddr>, epoch: Epoch) -> FleetOutputs {
        FleetOutputs::new(Arc::clone(&self.0), request, self.place_of(by), None).of(epoch)
    }

    /// The time between two cancellations of all work.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.0.epoch()
    }

    /// Most requests that are taken at a time, waiting and running ones together.
    #[must_use]
    pub fn max_in_flight(&self) -> usize {
        self.0.max_in_flight
    }

    fn place_of(&self, by: Option<IpAddr>) -> Place {
        by.map_or_else(Place::default, |address| self.0.topology.of_local_address(address))
    }

    /// As [`Fleet::submit`], for a request that came in at a place.
    ///
    /// # Errors
    /// As [`Fleet::submit`].
    pub fn submit_from(&self, request: Request, from: Place) -> Result<FleetOutputs, SubmitError> {
        self.check(&request)?;
        let running = self.0.launch(&request, &from, false)?;
        Ok(FleetOutputs::new(Arc::clone(&self.0), request, from, running))
    }

    /// As [`Fleet::submit`], to one device whatever its load: for the warm-up of each.
    ///
    /// # Errors
    /// As [`EngineHandle::submit`], and if there is no such device or it is not in use.
    pub fn submit_to(&self, instance: usize, request: Request) -> Result<FleetOutputs, SubmitError> {
        let handle = self.0.seats.get(instance).and_then(|seat| seat.handle()).ok_or(SubmitError::Unavailable)?;
        let (_, outputs) = handle.submit(request.clone())?;
        Ok(FleetOutputs::new(Arc::clone(&self.0), request, Place::default(), Some((instance, outputs))))
    }

    /// Checks a request without submitting it or compiling its grammar.
    ///
    /// # Errors
    /// If the request can't be computed.
    pub fn check(&self, request: &Request) -> Result<(), EngineError> {
        self.0.about.limits.check(request)
    }

    /// Sorts the vocabulary for grammars on every device, which the first grammar would wait for otherwise.
    ///
    /// # Errors
    /// If the model has no tokenizer or no token that ends an answer.
    pub fn warm_up_grammars(&self) -> Result<(), EngineError> {
        self.handles().try_for_each(|handle| handle.warm_up_grammars())
    }

    /// Brings to memory what steps read from files, on every device before its next step.
    pub fn populate_weights(&self) {
        // An engine that has stopped reads nothing.
        self.handles().for_each(|handle| drop(handle.call(|engine| engine.loaded.model.populate())));
    }

    /// Ends every request within a step.
    pub fn cancel_all(&self) {
        self.0.cancelled.fetch_add(1, Ordering::AcqRel);
        self.0.wake();
        self.handles().for_each(|handle| handle.cancel_all());
    }

    /// Takes no new requests from now on; those in flight are finished.
    pub fn drain(&self) {
        self.0.draining.store(true, Ordering::Release);
    }

    /// Whether new requests are refused.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.0.draining.load(Ordering::Acquire)
    }

    /// Config, tokenizer, template, limits: the same on every device.
    #[must_use]
    pub fn about(&self) -> &About {
        &self.0.about
    }

    fn handles(&self) -> impl Iterator<Item = EngineHandle> {
        self.0.seats.iter().filter_map(|seat| seat.handle())
    }

    /// Figures of all devices together.
    #[must_use]
    pub fn stats(&self) -> EngineStats {
        EngineStats::together(self.instances().iter().map(|instance| instance.stats))
    }

    /// Whether the devices in use get on: steps and requests of all, and the longest time that one of them has made no step.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let mut all = Progress { steps: 0, in_flight: 0, submitted: 0, stalled: Duration::ZERO };
        for seat in &self.0.seats {
            let Some(handle) = seat.handle() else { continue };
            let one = handle.progress();
            all.steps += one.steps;
            all.in_flight += one.in_flight;
            all.submitted += one.submitted;
            if seat.trust().is_usable() {
                all.stalled = all.stalled.max(one.stalled);
            }
        }
        all
    }

    /// Whether a device takes requests.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.0.seats.iter().any(|seat| seat.trust() != Trust::Quarantined)
    }

    /// Whether a device is in quarantine.
    #[must_use]
    pub fn is_degraded(&self) -> bool {
        self.0.seats.iter().any(|seat| seat.trust() == Trust::Quarantined)
    }

    /// Requests that went on after their device failed.
    #[must_use]
    pub fn moved(&self) -> u64 {
        self.0.moved.load(Ordering::Relaxed)
    }

    /// Requests that were sent to devices, by the distance from where they came in, as in [`Distance::NAMES`].
    #[must_use]
    pub fn routed(&self) -> [u64; Distance::NAMES.len()] {
        std::array::from_fn(|kind| self.0.routed[kind].load(Ordering::Relaxed))
    }

    /// Runs something with the engine of a device between two steps.
    ///
    /// # Errors
    /// If there is no such device or it is not in use.
    pub fn call(&self, instance: usize, job: impl FnOnce(&mut Engine) + Send + 'static) -> Result<(), SubmitError> {
        let handle = self.0.seats.get(instance).and_then(|seat| seat.handle());
        handle.ok_or(SubmitError::Unavailable)?.call(job)
    }

    /// Each device and how it is.
    #[must_use]
    pub fn instances(&self) -> Vec<InstanceReport> {
        let report = |seat: &Arc<Seat>| {
            let condition = seat.condition().clone();
            let live = seat.live.read().unwrap_or_else(PoisonError::into_inner);
            let stats = live.as_ref().map(|live| live.handle.stats()).unwrap_or_default();
            InstanceReport {
                name: seat.name.clone(),
                title: seat.title.clone(),
                kind: seat.hal_kind,
                place: seat.place.clone(),
                trust: condition.trust,
                reason: condition.reason,
                faults: condition.faults,
                quarantines: condition.quarantines,
                tests: condition.tests,
                failed_tests: condition.failed_tests,
                last_reset: condition.last_reset,
                health: live.as_ref().and_then(|live| group::health(&live.devices)),
                members: live.as_ref().map(|live| group::members(&live.devices)).unwrap_or_default(),
                memory_total: seat.memory_total,
                in_flight: live.as_ref().map_or(0, |live| live.handle.progress().in_flight),
                stats: stats.after(condition.past),
            }
        };
        self.0.seats.iter().map(report).collect()
    }
}
