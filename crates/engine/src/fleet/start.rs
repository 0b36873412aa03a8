//! Making a fleet: engines one after the other, their known answers, and who is right if these differ.
//!
//! Before anything is served, every device computes the known sequence twice. It must give the same bits both times, devices
//! of one type must give the same bits as each other, and all must be near the host's, if there is one to compare with: so a
//! device that is wrong from the start is not what later answers are measured by.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, RwLock, Weak, mpsc};
use std::time::{Duration, Instant};

use qwen_hal::Device;
use qwen_hal::abi::QHAL_KIND_CPU;
use tokio::sync::watch;

use super::supervisor::Supervisor;
use super::{Build, Condition, Fleet, FleetOptions, Instance, Live, Seat, Shared, Trust, group};
use crate::stats::EngineStats;
use crate::{Engine, EngineHandle, KnownAnswer, Placement};

/// Most divergence of a device's known answer from the host's, in nats. Rounding gives less than 0.002 in the mean over
/// sensible texts; the known sequence is no text and short, so there is room. Garbage is far above.
const MOST_DIVERGENCE: f64 = 0.05;

/// The first known answer may take so many times as long as a step: a model is read from its file by then.
const PATIENCE: u32 = 4;

/// Why there is no fleet.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FleetError {
    /// No device was named.
    #[error("expected at least one device, found none; name one")]
    Empty,
    /// A device can't be opened or the model can't be loaded onto it.
    #[error("{device}: {reason}")]
    Build {
        /// Device.
        device: String,
        /// What it said.
        reason: String,
    },
    /// Devices of one type give different answers, and none is in the majority.
    #[error(
        "{devices} are of one type and must give the same bits, but give different ones for a known sequence, and nobody can \
         tell which is right; start with one of them at a time, or with a third one or the CPU beside them"
    )]
    Disagree {
        /// The devices.
        devices: String,
    },
    /// No device gives a right answer.
    #[error("no device computes correctly: {reasons}; run qwen-hal-check on it, and look at its driver's log")]
    Wrong {
        /// Each device and what is wrong.
        reasons: String,
    },
    /// No thread can be started.
    #[error("no thread can be started: {0}")]
    Thread(#[from] std::io::Error),
}

/// An engine before it has a thread.
struct Made {
    name: String,
    kind: String,
    is_host: bool,
    answer: Answer,
}

/// A known answer, or why there is none; nothing if it was not asked for.
type Answer = Option<Result<KnownAnswer, String>>;

impl Fleet {
    /// Makes every engine, tests it, and starts it.
    ///
    /// # Errors
    /// If an engine can't be made, or no device computes correctly.
    pub fn start(instances: Vec<Instance>, mut options: FleetOptions) -> Result<Self, FleetError> {
        let (mut engines, mut made) = (Vec::new(), Vec::new());
        for instance in instances {
            let Instance { name, place, mut build } = instance;
            let engine = build().map_err(|reason| FleetError::Build { device: name.clone(), reason })?;
            let model = &engine.loaded().model;
            let (kind, devices) = (group::kind(model), model.devices().cloned().collect::<Vec<Device>>());
            let hal_kind = model.device().info().kind;
            let (engine, answer) = match options.tests {
                None => (Some(engine), None),
                Some(_) => first_answer(engine, options.stall * PATIENCE)?,
            };
            made.push(Made { name, kind, is_host: hal_kind == QHAL_KIND_CPU, answer });
            engines.push((engine, hal_kind, devices, place, build));
        }
        if engines.is_empty() {
            return Err(FleetError::Empty);
        }
        let reference = reference(&mut options, &made);
        let wrong = judge(&made, reference.as_ref())?;
        let (supervisor, inbox) = mpsc::channel();
        let mut seats = Vec::with_capacity(made.len());
        let mut about = None;
        let right: BTreeMap<String, u64> = right_digests(&made, &wrong);
        for ((made, wrong), (engine, hal_kind, devices, place, build)) in made.into_iter().zip(wrong).zip(engines) {
            let (title, memory_total) = (Placement::title(&devices), group::memory_total(&devices));
            let live = match engine {
                Some(engine) => {
                    let (handle, thread) = EngineHandle::spawn(engine, usize::MAX)?;
                    about.get_or_insert_with(|| Arc::clone(handle.about()));
                    Some(Live { handle, thread, devices })
                }
                None => None,
            };
            let trust = if wrong.is_some() { Trust::Quarantined } else { Trust::Healthy };
            if let Some(reason) = &wrong {
                tracing::error!(device = made.name, reason, "the device starts in quarantine");
            }
            seats.push(Arc::new(Seat {
                digest: right.get(&made.kind).copied(),
                name: made.name,
                place,
                kind: made.kind,
                title,
                hal_kind,
                memory_total,
                build: Mutex::new(build),
                live: RwLock::new(live),
                condition: Mutex::new(Condition {
                    trust,
                    quarantines: u64::from(wrong.is_some()),
                    reason: wrong.unwrap_or_default(),
                    faults: 0,
                    tests: 0,
                    failed_tests: 0,
                    last_reset: None,
                    past: EngineStats::default(),
                }),
            }));
        }
        let shared = Arc::new(Shared {
            about: about.ok_or(FleetError::Empty)?,
            seats,
            topology: options.topology,
            max_in_flight: options.max_in_flight.max(1),
            patience: options.patience,
            draining: AtomicBool::new(false),
            cancelled: AtomicU64::new(0),
            moved: AtomicU64::new(0),
            routed: std::array::from_fn(|_| AtomicU64::new(0)),
            changes: watch::Sender::new(0),
            supervisor: Mutex::new(supervisor.clone()),
        });
        let weak: Weak<Shared> = Arc::downgrade(&shared);
        let times = (options.tests, options.stall, options.retest);
        let supervisor = Supervisor::new(weak, supervisor, inbox, shared.seats.len(), times);
        std::thread::Builder::new().name("supervisor".into()).spawn(move || supervisor.run())?;
        Ok(Self(shared))
    }
}

/// The engine's known answer. One that does not come to an end keeps its engine, and the device is opened anew later: so a device that hangs
/// does not keep the others from starting.
fn first_answer(engine: Engine, limit: Duration) -> Result<(Option<Engine>, Answer), FleetError> {
    let (sender, receiver) = mpsc::channel();
    let ask = move || {
        let mut engine = engine;
        let answer = engine.repeated_answer(2).map_err(|error| error.to_string());
        // Whoever waited too long has gone.
        let _ = sender.send((engine, answer));
    };
    std::thread::Builder::new().name("known answer".into()).spawn(ask)?;
    // A process that was stopped and goes on must not take that time for the device's.
    let (tick, mut waited) = (limit / 16, Duration::ZERO);
    while waited < limit {
        let before = Instant::now();
        match receiver.recv_timeout(tick) {
            Ok((engine, answer)) => return Ok((Some(engine), Some(answer))),
            Err(RecvTimeoutError::Timeout) => waited += before.elapsed().min(2 * tick),
            Err(RecvTimeoutError::Disconnected) => return Ok((None, Some(Err("its engine has stopped".to_owned())))),
        }
    }
    let reason = format!("it gave no answer to a known sequence in {:.1} s", waited.as_secs_f64());
    Ok((None, Some(Err(reason))))
}

/// The host's answer: that of a device which is the host, or of an engine that is made for it.
fn reference(options: &mut FleetOptions, made: &[Made]) -> Option<KnownAnswer> {
    let of_host = made.iter().filter(|made| made.is_host).find_map(|made| made.answer.as_ref()?.as_ref().ok());
    if let Some(answer) = of_host {
        return Some(answer.clone());
    }
    let mut build: Build = options.reference.take().filter(|_| options.tests.is_some())?;
    let mut engine =
        build().inspect_err(|reason| tracing::warn!(reason, "the host has no answer to compare with")).ok()?;
    engine.known_answer().ok()
}

/// What is wrong with each device, if something is.
fn judge(made: &[Made], reference: Option<&KnownAnswer>) -> Result<Vec<Option<String>>, FleetError> {
    let far = |answer: &KnownAnswer| {
        let divergence = reference.map_or(0.0, |reference| reference.divergence(answer));
        // Not a number is far, too.
        (divergence.is_nan() || divergence > MOST_DIVERGENCE).then_some(divergence)
    };
    // Who is far from the host has no vote.
    let mut kinds: BTreeMap<&str, BTreeMap<u64, usize>> = BTreeMap::new();
    for made in made {
        if let Some(Ok(answer)) = &made.answer
            && (made.is_host || far(answer).is_none())
        {
            *kinds.entry(&made.kind).or_default().entry(answer.digest).or_default() += 1;
        }
    }
    let one = |at: &Made| {
        let Some(answer) = &at.answer else { return Ok(None) };
        let answer = match answer {
            Ok(answer) => answer,
            Err(reason) => return Ok(Some(reason.clone())),
        };
        if let Some(divergence) = far(answer).filter(|_| !at.is_host) {
            return Ok(Some(format!(
                "its known answer is {divergence:.3} nats from the host's, at most {MOST_DIVERGENCE}"
            )));
        }
        let digests = &kinds[at.kind.as_str()];
        let votes = digests[&answer.digest];
        let others = digests.iter().filter(|(digest, _)| **digest != answer.digest).map(|(_, votes)| *votes).max();
        match others {
            None => Ok(None),
            Some(others) if votes > others => Ok(None),
            Some(others) if votes < others => Ok(Some("its known answer is not that of the others of its type".into())),
            Some(_) => {
                let same = made.iter().filter(|other| other.kind == at.kind).map(|other| other.name.as_str());
                Err(FleetError::Disagree { devices: same.collect::<Vec<_>>().join(" and ") })
            }
        }
    };
    let wrong = made.iter().map(one).collect::<Result<Vec<_>, _>>()?;
    if wrong.iter().all(Option::is_some) {
        let reasons =
            made.iter().zip(&wrong).map(|(made, wrong)| format!("{}: {}", made.name, wrong.as_deref().unwrap_or("")));
        return Err(FleetError::Wrong { reasons: reasons.collect::<Vec<_>>().join("; ") });
    }
    Ok(wrong)
}

/// The right digest of each type: that of its trusted devices.
fn right_digests(made: &[Made], wrong: &[Option<String>]) -> BTreeMap<String, u64> {
    let trusted = made.iter().zip(wrong).filter(|(_, wrong)| wrong.is_none());
    trusted.filter_map(|(made, _)| Some((made.kind.clone(), made.answer.as_ref()?.as_ref().ok()?.digest))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(name: &str, kind: &str, value: f32) -> Made {
        let rows = vec![vec![value, 0.0, 1.0, -1.0]];
        let answer = KnownAnswer { digest: u64::from(value.to_bits()), rows };
        Made { name: name.into(), kind: kind.into(), is_host: kind == "cpu", answer: Some(Ok(answer)) }
    }

    fn wrong(all: &[Made]) -> Vec<bool> {
        let reference = all.iter().find(|made| made.is_host).and_then(|made| made.answer.clone()?.ok());
        judge(all, reference.as_ref()).unwrap().iter().map(Option::is_some).collect()
    }

    #[test]
    fn the_majority_of_a_type_is_right() {
        assert_eq!(wrong(&[made("a", "x", 1.0), made("b", "x", 2.0), made("c", "x", 1.0)]), [false, true, false]);
        assert_eq!(wrong(&[made("a", "x", 1.0), made("b", "y", 1.1)]), [false, false]);
        let error = judge(&[made("a", "x", 1.0), made("b", "x", 1.1)], None).unwrap_err();
        assert!(error.to_string().starts_with("a and b are of one type"), "{error}");
    }

    #[test]
    fn the_host_tells_who_is_right() {
        assert_eq!(wrong(&[made("a", "x", 9.0), made("h", "cpu", 1.0), made("b", "x", 1.01)]), [true, false, false]);
        let none = judge(&[made("a", "x", f32::NAN)], made("h", "cpu", 1.0).answer.and_then(Result::ok).as_ref());
        assert!(matches!(none, Err(FleetError::Wrong { .. })));
    }

    #[test]
    fn an_answer_that_changes_is_wrong() {
        let broken = Made { answer: Some(Err("differs".into())), ..made("a", "x", 1.0) };
        assert_eq!(wrong(&[broken, made("b", "x", 1.0)]), [true, false]);
        assert_eq!(wrong(&[Made { answer: None, ..made("a", "x", 1.0) }]), [false]);
    }
}
