//! The thread that looks after devices: tests them in time, notices those that hang or are lost, takes requests away from those
//! that are out of order, and brings devices back.
//!
//! A device in doubt is tested at once. One in quarantine is tested after a pause that doubles each time: as it is the first
//! time, and opened anew, with the model loaded anew, if that fails or it was lost or hung. A test runs on the engine's own
//! thread between two steps, loading on a thread of its own, so a device that does not answer holds up nobody.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime};

use qwen_hal::Device;
use qwen_hal::abi::QHAL_HEALTH_LOST;

use super::state::{Event, Trust};
use super::{Live, Seat, Shared};
use crate::guard::is_no_room;
use crate::{Engine, EngineHandle};

/// Known answers in a row that bring a device back.
const RETESTS: u32 = 3;
/// Longest pause between two tests of a device in quarantine.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// Longest time between two looks at all devices.
const TICK: Duration = Duration::from_secs(1);

/// What a test found.
#[derive(Debug)]
pub(super) enum Found {
    /// Digest of the known answer, the same in all runs.
    Answer(u64),
    /// Requests hold the cache: later.
    NoRoom,
    /// The device failed, or its answers differ among themselves.
    Wrong(String),
}

/// What the supervisor is told.
pub(super) enum Message {
    /// A device's state changed.
    Look,
    /// A test ended.
    Tested { seat: usize, ticket: u64, found: Found },
    /// A device was opened anew, or not.
    Built { seat: usize, result: Result<Box<Live>, String> },
}

/// What is planned for a device.
#[derive(Debug)]
struct Plan {
    /// The test that runs, since when.
    test: Option<(u64, Instant)>,
    is_building: bool,
    /// The device can't be used as it is.
    must_rebuild: bool,
    /// Requests were taken away since it came into quarantine.
    is_cleared: bool,
    next: Instant,
    pause: Duration,
    /// Steps at the last look, when that was, and for how long there was work and no step. A process that was stopped and goes
    /// on must not take that time for its device's: a look adds no more than two ticks.
    seen: (u64, Instant),
    quiet: Duration,
}

pub(super) struct Supervisor {
    fleet: Weak<Shared>,
    sender: Sender<Message>,
    inbox: Receiver<Message>,
    plans: Vec<Plan>,
    tickets: u64,
    interval: Option<Duration>,
    stall: Duration,
    retest: Duration,
    tick: Duration,
}

impl Supervisor {
    pub(super) fn new(
        fleet: Weak<Shared>,
        sender: Sender<Message>,
        inbox: Receiver<Message>,
        seats: usize,
        (interval, stall, retest): (Option<Duration>, Duration, Duration),
    ) -> Self {
        let now = Instant::now();
        let plan = || Plan {
            test: None,
            is_building: false,
            must_rebuild: false,
            is_cleared: false,
            next: now + interval.unwrap_or_default(),
            pause: retest,
            seen: (0, now),
            quiet: Duration::ZERO,
        };
        let plans = std::iter::repeat_with(plan).take(seats).collect();
        let tick = TICK.min(stall / 4).min(retest).max(Duration::from_millis(1));
        Self { fleet, sender, inbox, plans, tickets: 0, interval, stall, retest, tick }
    }

    pub(super) fn run(mut self) {
        loop {
            let message = match self.inbox.recv_timeout(self.tick) {
                Ok(message) => Some(message),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            // Our own sender keeps the inbox open; the fleet's end is seen here.
            let Some(fleet) = self.fleet.upgrade() else { return };
            match message {
                Some(Message::Tested { seat, ticket, found }) => self.tested(&fleet, seat, ticket, found),
                Some(Message::Built { seat, result }) => self.built(&fleet, seat, result),
                Some(Message::Look) | None => {}
            }
            for (index, seat) in fleet.seats.iter().enumerate() {
                self.look(index, seat);
            }
            if fleet.seats.iter().any(|seat| seat.trust() != Trust::Healthy) {
                fleet.wake();
            }
        }
    }

    fn look(&mut self, index: usize, seat: &Arc<Seat>) {
        let now = Instant::now();
        if let Some(reason) = self.is_dead(index, seat) {
            self.plans[index].must_rebuild = true;
            self.plans[index].test = None;
            seat.apply(Event::Failed, &reason);
        }
        let trust = seat.trust();
        if trust == Trust::Quarantined && !self.plans[index].is_cleared {
            self.clear(index, seat);
        }
        let plan = &mut self.plans[index];
        plan.is_cleared = trust == Trust::Quarantined;
        if plan.test.is_some() || plan.is_building {
            return;
        }
        match trust {
            Trust::Suspect => self.test(index, seat, RETESTS),
            Trust::Quarantined if now < plan.next => {}
            Trust::Quarantined if plan.must_rebuild => self.rebuild(index, seat),
            Trust::Quarantined => self.test(index, seat, RETESTS),
            Trust::Retested if now >= plan.next => self.test(index, seat, 1),
            Trust::Healthy if self.interval.is_some() && now >= plan.next => self.test(index, seat, 1),
            Trust::Healthy | Trust::Retested => {}
        }
    }

    /// Why a device is beyond testing, if it is and that is news.
    fn is_dead(&mut self, index: usize, seat: &Seat) -> Option<String> {
        let plan = &mut self.plans[index];
        if plan.must_rebuild || plan.is_building {
            return None;
        }
        let live = seat.live.read().unwrap_or_else(PoisonError::into_inner);
        let Some(live) = live.as_ref() else { return Some("it is not open".into()) };
        if live.thread.is_finished() {
            return Some("its engine has stopped".into());
        }
        let lost = |device: &Device| device.health().is_ok_and(|health| health.state == QHAL_HEALTH_LOST);
        if let Some(device) = live.devices.iter().find(|device| lost(device)) {
            return Some(match live.devices.len() {
                1 => "the device is lost".into(),
                _ => format!("{} is lost", device.label()),
            });
        }
        let (progress, now) = (live.handle.progress(), Instant::now());
        // What the engine does not have yet is not its fault: a grammar may take its time where processors are busy.
        let has_work = progress.submitted > 0 || plan.test.is_some();
        if has_work && progress.steps == plan.seen.0 {
            plan.quiet += (now - plan.seen.1).min(2 * self.tick);
        } else {
            plan.quiet = Duration::ZERO;
        }
        plan.seen = (progress.steps, now);
        (plan.quiet > self.stall).then(|| format!("no step ended for {:.1} s", plan.quiet.as_secs_f64()))
    }

    /// Takes the requests of a device that came into quarantine, so that others go on with them.
    fn clear(&mut self, index: usize, seat: &Seat) {
        let plan = &mut self.plans[index];
        plan.next = Instant::now() + plan.pause;
        let reason = seat.condition().reason.clone();
        if let Some(handle) = seat.handle() {
            handle.abandon(&format!("{} is in quarantine: {reason}", seat.name));
        }
    }

    fn test(&mut self, index: usize, seat: &Seat, runs: u32) {
        self.tickets += 1;
        let (ticket, sender) = (self.tickets, self.sender.clone());
        let job = move |engine: &mut Engine| {
            let found = ask(engine, runs);
            // A supervisor that is gone does not want to know.
            let _ = sender.send(Message::Tested { seat: index, ticket, found });
        };
        let sent = seat.handle().is_some_and(|handle| handle.call(job).is_ok());
        self.plans[index].test = sent.then(|| (ticket, Instant::now()));
        if !sent {
            self.plans[index].must_rebuild = true;
            seat.apply(Event::Failed, "its engine has stopped");
        }
    }

    fn tested(&mut self, fleet: &Shared, index: usize, ticket: u64, found: Found) {
        let (Some(seat), Some(plan)) = (fleet.seats.get(index), self.plans.get_mut(index)) else { return };
        if plan.test.is_none_or(|(current, _)| current != ticket) {
            return;
        }
        plan.test = None;
        plan.quiet = Duration::ZERO;
        let trust = seat.trust();
        let wrong = match found {
            Found::NoRoom => {
                plan.next = Instant::now() + self.retest;
                return;
            }
            Found::Answer(digest) if self.interval.is_none() || seat.digest == Some(digest) => None,
            Found::Answer(_) if seat.digest.is_none() => {
                Some("no right answer of a device of its type is known".into())
            }
            Found::Answer(_) => Some("the known answer is not the one that it was".to_owned()),
            Found::Wrong(reason) => Some(reason),
        };
        match wrong {
            None => {
                plan.pause = if trust == Trust::Healthy { self.retest } else { plan.pause };
                plan.next = Instant::now() + self.interval.unwrap_or(LONGEST_PAUSE);
                seat.apply(Event::Passed, "");
                fleet.wake();
            }
            Some(reason) => {
                // What is wrong as it is may be right when it is loaded anew.
                plan.must_rebuild = trust == Trust::Quarantined;
                self.failed(index, seat, &reason);
            }
        }
    }

    fn failed(&mut self, index: usize, seat: &Seat, reason: &str) {
        let plan = &mut self.plans[index];
        if seat.trust() == Trust::Quarantined {
            plan.pause = (2 * plan.pause).min(LONGEST_PAUSE);
            plan.next = Instant::now() + plan.pause;
            tracing::warn!(device = seat.name, reason, seconds = plan.pause.as_secs_f64(), "still in quarantine");
        }
        seat.apply(Event::Failed, reason);
    }

    /// Lets the device go and opens it anew.
    fn rebuild(&mut self, index: usize, seat: &Arc<Seat>) {
        self.plans[index].is_building = true;
        let old = seat.live.write().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(live) = &old {
            let mut condition = seat.condition();
            condition.past = live.handle.stats().after(condition.past);
        }
        let (seat, sender) = (Arc::clone(seat), self.sender.clone());
        let job = move || {
            if let Some(Live { handle, thread, devices }) = old {
                drop((handle, devices));
                // An engine whose device never answers ends here: it can't be opened twice.
                let _ = thread.join();
            }
            let result = build(&seat);
            let _ = sender.send(Message::Built { seat: index, result });
        };
        if let Err(error) = std::thread::Builder::new().name("rebuild".into()).spawn(job) {
            let _ = self.sender.send(Message::Built { seat: index, result: Err(error.to_string()) });
        }
    }

    fn built(&mut self, fleet: &Shared, index: usize, result: Result<Box<Live>, String>) {
        let (Some(seat), Some(plan)) = (fleet.seats.get(index), self.plans.get_mut(index)) else { return };
        plan.is_building = false;
        match result {
            Ok(live) => {
                *seat.live.write().unwrap_or_else(PoisonError::into_inner) = Some(*live);
                seat.condition().last_reset = Some(SystemTime::now());
                plan.must_rebuild = false;
                plan.seen = (0, Instant::now());
                plan.quiet = Duration::ZERO;
                plan.next = Instant::now();
                tracing::info!(device = seat.name, "opened anew; to be tested");
            }
            Err(reason) => self.failed(index, seat, &reason),
        }
    }
}

/// The known answer, so many times.
fn ask(engine: &mut Engine, runs: u32) -> Found {
    match engine.repeated_answer(runs) {
        Ok(answer) => Found::Answer(answer.digest),
        Err(error) if is_no_room(&error) => Found::NoRoom,
        Err(error) => Found::Wrong(error.to_string()),
    }
}

fn build(seat: &Seat) -> Result<Box<Live>, String> {
    let mut make = seat.build.lock().unwrap_or_else(PoisonError::into_inner);
    let engine = make()?;
    drop(make);
    let devices = engine.loaded().model.devices().cloned().collect();
    let (handle, thread) = EngineHandle::spawn(engine, usize::MAX).map_err(|error| error.to_string())?;
    Ok(Box::new(Live { handle, thread, devices }))
}
