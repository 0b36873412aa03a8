//! Streams and events. A stream has a worker thread that takes commands in order and pauses by chance before it does, so that work
//! that nobody waits for is not done yet: a missing wait or event shows as wrong results.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use qwen_hal_abi::*;
use qwen_hal_plugin::{Failure, answer, caught, guard};

use crate::buffer::Slice;
use crate::collective::Part;
use crate::device::{DEVICES, Device, transfer};
use crate::inner::InnerStream;
use crate::plan::{Launch, Prepack};
use crate::registry::Registry;
use crate::settings::Random;

pub(crate) static STREAMS: Registry<Stream> = Registry::new("stream");
pub(crate) static EVENTS: Registry<Event> = Registry::new("event");

/// Commands that fit into a queue; whoever enqueues more waits, as with a driver's ring.
const QUEUE: usize = 1024;

/// Host memory of a copy; the host keeps it valid until the copy is done.
#[derive(Clone, Copy)]
pub(crate) struct Host(*mut u8);
// SAFETY: the contract of `copy` lets the plugin use it from its own thread until the copy is done.
unsafe impl Send for Host {}

/// One side of a copy.
pub(crate) enum Side {
    Host(Host),
    Device(Slice),
}

pub(crate) struct Copy {
    src: Side,
    dst: Side,
    row_bytes: u64,
    rows: u64,
    src_pitch: u64,
    dst_pitch: u64,
}

/// What a worker does.
#[expect(
    clippy::large_enum_variant,
    reason = "commands lie in a ring that is allocated once: a launch allocates nothing"
)]
pub(crate) enum Command {
    Copy(Copy),
    Fill { dst: Slice, pattern: [u8; 16], length: usize },
    Prepack(Prepack),
    Launch(Launch),
    Collective(Part),
    Record { event: Arc<Event>, generation: u64 },
    Wait { event: Arc<Event>, generation: u64 },
}

#[derive(Default)]
struct State {
    commands: VecDeque<Command>,
    enqueued: u64,
    done: u64,
    failure: Option<Failure>,
    closed: bool,
}

struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a `qhal_stream` stands for.
pub(crate) struct Stream {
    pub(crate) device: Arc<Device>,
    queue: Arc<Queue>,
    worker: Mutex<Option<JoinHandle<()>>>,
}

impl Stream {
    fn start(device: Arc<Device>) -> Result<Self, Failure> {
        device.alive()?;
        let inner = device.inner.stream()?;
        let state = State { commands: VecDeque::with_capacity(QUEUE), ..State::default() };
        let queue = Arc::new(Queue { state: Mutex::new(state), changed: Condvar::new() });
        let number = device.counters.streams.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let random = Random::new(device.settings.seed.wrapping_add(number.wrapping_mul(0x5851_f42d_4c95_7f2d)));
        let mut worker = Worker { device: Arc::clone(&device), queue: Arc::clone(&queue), inner, random };
        let thread = std::thread::Builder::new().name(format!("sim-{number}")).spawn(move || worker.run());
        let thread = thread.map_err(|error| Failure::new(QHAL_RESOURCE_EXHAUSTED, format!("no thread: {error}")))?;
        Ok(Self { device, queue, worker: Mutex::new(Some(thread)) })
    }

    /// Puts a command at the end of the queue.
    pub(crate) fn enqueue(&self, command: Command) -> Result<(), Failure> {
        self.device.alive()?;
        let mut state = self.queue.state();
        while state.commands.len() >= QUEUE && state.failure.is_none() {
            state = self.queue.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        state.commands.push_back(command);
        state.enqueued += 1;
        self.queue.changed.notify_all();
        Ok(())
    }

    fn wait(&self, timeout_ns: u64) -> Result<(), Failure> {
        let reached = |state: &State| state.done == state.enqueued;
        let (state, done) = wait_until(&self.queue.changed, self.queue.state(), timeout_ns, reached);
        if !done {
            return Err(Failure::new(QHAL_NOT_READY, "work is pending"));
        }
        match &state.failure {
            Some(failure) => Err(failure.clone()),
            None => self.device.alive(),
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.queue.state().closed = true;
        self.queue.changed.notify_all();
        if let Some(worker) = self.worker.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            // A worker guards its work, so it does not panic; if it did, there is nobody left to tell.
            let _ = worker.join();
        }
    }
}

/// Waits for a condition at most so long, without limit for `u64::MAX`; whether it holds.
fn wait_until<'a, T>(
    changed: &Condvar,
    mut guard: MutexGuard<'a, T>,
    timeout_ns: u64,
    holds: impl Fn(&T) -> bool,
) -> (MutexGuard<'a, T>, bool) {
    let start = Instant::now();
    let limit = Duration::from_nanos(timeout_ns);
    while !holds(&guard) {
        let left = limit.saturating_sub(start.elapsed());
        if left.is_zero() {
            return (guard, false);
        }
        let left = left.min(Duration::from_secs(3600));
        guard = changed.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    (guard, true)
}

/// What a stream's thread owns.
pub(crate) struct Worker {
    pub(crate) device: Arc<Device>,
    queue: Arc<Queue>,
    pub(crate) inner: InnerStream,
    pub(crate) random: Random,
}

impl Worker {
    fn run(&mut self) {
        loop {
            let command = {
                let mut state = self.queue.state();
                loop {
                    match state.commands.pop_front() {
                        Some(command) => break (command, state.failure.is_some()),
                        None if state.closed => return,
                        None => state = self.queue.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                    }
                }
            };
            let (command, failed) = command;
            self.pause();
            let collective = match &command {
                Command::Collective(part) => Some((Arc::clone(&part.comm), part.rank)),
                _ => None,
            };
            let failure = match command {
                // Events pass a failure on instead of waiting for what will not come.
                Command::Record { event, generation } => {
                    event.reach(generation, self.queue.state().failure.clone());
                    None
                }
                _ if failed => None,
                command => caught(|| self.execute(command)).err(),
            };
            let mut state = self.queue.state();
            state.done += 1;
            if let Some(failure) = failure {
                self.device.failed(&failure);
                state.failure.get_or_insert(failure.sticky());
            }
            // The other ranks must not wait for one that will not come.
            let absent = collective.zip(state.failure.clone());
            drop(state);
            if let Some(((comm, rank), failure)) = absent {
                comm.fail(rank, &failure);
            }
            self.queue.changed.notify_all();
        }
    }

    /// Mostly nothing, sometimes another thread's turn, sometimes a sleep.
    fn pause(&mut self) {
        let longest = self.device.settings.delay_us;
        if longest == 0 {
            return;
        }
        match self.random.below(8) {
            0 => std::thread::sleep(Duration::from_micros(self.random.below(longest))),
            1 => std::thread::yield_now(),
            _ => {}
        }
    }

    fn execute(&mut self, command: Command) -> Result<(), Failure> {
        self.device.alive()?;
        match command {
            Command::Copy(copy) => copy.run(&self.device),
            Command::Fill { dst, pattern, length } => {
                let to = dst.address(dst.size)?;
                for at in (0..dst.size as usize).step_by(length.max(1)) {
                    // SAFETY: within the slice, of which the pattern's length is a divisor.
                    unsafe { to.add(at).copy_from_nonoverlapping(pattern.as_ptr(), length) };
                }
                crate::device::work(&self.device, qwen_chips::Dtype::F32, 0.0, dst.size as f64);
                Ok(())
            }
            Command::Prepack(prepack) => prepack.run(self),
            Command::Launch(launch) => launch.run(self),
            Command::Collective(part) => part.run(&self.device),
            Command::Wait { event, generation } => event.wait(generation, u64::MAX),
            Command::Record { .. } => Ok(()),
        }
    }
}

impl Copy {
    /// A copy that was asked for, if it has bytes.
    pub(crate) fn new(desc: &qhal_copy_desc) -> Result<Option<Self>, Failure> {
        let (read, written) = (extent(desc, desc.src_pitch)?, extent(desc, desc.dst_pitch)?);
        let src = side(&desc.src, desc.src_host.cast_mut(), read)?;
        let dst = side(&desc.dst, desc.dst_host, written)?;
        let &qhal_copy_desc { row_bytes, rows, src_pitch, dst_pitch, .. } = desc;
        Ok((read > 0).then_some(Self { src, dst, row_bytes, rows, src_pitch, dst_pitch }))
    }

    fn run(&self, device: &Device) -> Result<(), Failure> {
        let extent = |pitch: u64| (self.rows - 1) * pitch + self.row_bytes;
        let address = |side: &Side, bytes: u64| match side {
            Side::Host(host) => Ok(host.0),
            Side::Device(slice) => slice.address(bytes),
        };
        let (from, to) = (address(&self.src, extent(self.src_pitch))?, address(&self.dst, extent(self.dst_pitch))?);
        for row in 0..self.rows {
            // SAFETY: both extents were checked; host ranges are valid by the contract of `copy`.
            unsafe {
                let (from, to) = (from.add((row * self.src_pitch) as usize), to.add((row * self.dst_pitch) as usize));
                from.copy_to(to, self.row_bytes as usize);
            }
        }
        let bytes = self.rows * self.row_bytes;
        let (host, latency) = device.model.host_link();
        match (&self.src, &self.dst) {
            (Side::Device(src), Side::Device(dst)) if Arc::ptr_eq(&src.buffer.device, &dst.buffer.device) => {
                crate::device::work(device, qwen_chips::Dtype::F32, 0.0, 2.0 * bytes as f64);
            }
            (Side::Device(_), Side::Device(_)) => {
                let (_, bandwidth, latency) = device.model.peer_link().unwrap_or((0, host / 2.0, 2.0 * latency));
                transfer(device, bytes, bandwidth / device.settings.slow_link as f64, latency);
            }
            _ => transfer(device, bytes, host / device.settings.slow_link as f64, latency),
        }
        Ok(())
    }
}

/// What a `qhal_event` stands for: how often it was recorded, and up to which recording the work is done.
#[derive(Default)]
pub(crate) struct Event {
    state: Mutex<EventState>,
    changed: Condvar,
}

#[derive(Default)]
struct EventState {
    recorded: u64,
    reached: u64,
    failure: Option<Failure>,
}

impl Event {
    fn state(&self) -> MutexGuard<'_, EventState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reach(&self, generation: u64, failure: Option<Failure>) {
        let mut state = self.state();
        if generation >= state.reached {
            (state.reached, state.failure) = (generation, failure);
        }
        drop(state);
        self.changed.notify_all();
    }

    fn wait(&self, generation: u64, timeout_ns: u64) -> Result<(), Failure> {
        let reached = |state: &EventState| state.reached >= generation;
        let (state, done) = wait_until(&self.changed, self.state(), timeout_ns, reached);
        match &state.failure {
            _ if !done => Err(Failure::new(QHAL_NOT_READY, "the marked work is pending")),
            Some(failure) => Err(failure.clone()),
            None => Ok(()),
        }
    }
}

pub(crate) unsafe extern "C" fn create(
    device: *mut qhal_device,
    _: *const qhal_stream_desc,
    out: *mut *mut qhal_stream,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes room for the answer.
    unsafe { guard(err, || answer(out, STREAMS.insert(Arc::new(Stream::start(DEVICES.get(device)?)?)))) }
}

pub(crate) unsafe extern "C" fn destroy(stream: *mut qhal_stream, err: *mut qhal_error) -> qhal_status {
    // SAFETY: the host passes null or a record.
    unsafe { guard(err, || if stream.is_null() { Ok(()) } else { STREAMS.remove(stream).map(drop) }) }
}

pub(crate) unsafe extern "C" fn wait(stream: *mut qhal_stream, timeout_ns: u64, err: *mut qhal_error) -> qhal_status {
    // SAFETY: the host passes null or a record.
    unsafe { guard(err, || STREAMS.get(stream)?.wait(timeout_ns)) }
}

/// Bytes from the first to the last of a copy.
fn extent(desc: &qhal_copy_desc, pitch: u64) -> Result<u64, Failure> {
    if desc.rows == 0 || desc.row_bytes == 0 {
        return Ok(0);
    }
    if desc.rows > 1 && pitch < desc.row_bytes {
        return Err(Failure::invalid(format!("a pitch of {pitch} bytes, expected at least {}", desc.row_bytes)));
    }
    let steps = (desc.rows - 1).checked_mul(pitch).and_then(|n| n.checked_add(desc.row_bytes));
    steps.filter(|n| *n <= isize::MAX as u64).ok_or_else(|| Failure::invalid("a copy beyond the address space"))
}

fn side(slice: &qhal_slice, host: *mut c_void, bytes: u64) -> Result<Side, Failure> {
    match host.is_null() {
        false if !slice.buffer.is_null() => {
            Err(Failure::invalid("a side with a slice and a host address, expected one"))
        }
        false => Ok(Side::Host(Host(host.cast()))),
        true => {
            let slice = Slice::of(slice)?;
            slice.address(bytes)?;
            Ok(Side::Device(slice))
        }
    }
}

pub(crate) unsafe extern "C" fn copy(
    stream: *mut qhal_stream,
    desc: *const qhal_copy_desc,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes a description, and host ranges that are valid until the copy is done.
    unsafe {
        guard(err, || {
            let stream = STREAMS.get(stream)?;
            let desc = desc.as_ref().ok_or_else(|| Failure::invalid("no description, expected one"))?;
            match Copy::new(desc)? {
                Some(copy) => stream.enqueue(Command::Copy(copy)),
                None => Ok(()),
            }
        })
    }
}

pub(crate) unsafe extern "C" fn fill(
    stream: *mut qhal_stream,
    dst: qhal_slice,
    pattern: *const c_void,
    length: u32,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes `length` readable bytes.
    unsafe {
        guard(err, || {
            let stream = STREAMS.get(stream)?;
            if !matches!(length, 1 | 2 | 4 | 8 | 16) || !dst.size.is_multiple_of(u64::from(length)) || pattern.is_null()
            {
                return Err(Failure::invalid(format!("a pattern of {length} bytes for {}", dst.size)));
            }
            let mut bytes = [0; 16];
            pattern.cast::<u8>().copy_to_nonoverlapping(bytes.as_mut_ptr(), length as usize);
            let dst = Slice::of(&dst)?;
            dst.address(dst.size)?;
            stream.enqueue(Command::Fill { dst, pattern: bytes, length: length as usize })
        })
    }
}

pub(crate) unsafe extern "C" fn event_create(
    device: *mut qhal_device,
    _: u32,
    out: *mut *mut qhal_event,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes room for the answer.
    unsafe {
        guard(err, || {
            DEVICES.get(device)?.alive()?;
            answer(out, EVENTS.insert(Arc::<Event>::default()))
        })
    }
}

pub(crate) unsafe extern "C" fn event_destroy(event: *mut qhal_event, err: *mut qhal_error) -> qhal_status {
    // SAFETY: the host passes null or a record.
    unsafe { guard(err, || if event.is_null() { Ok(()) } else { EVENTS.remove(event).map(drop) }) }
}

pub(crate) unsafe extern "C" fn event_record(
    stream: *mut qhal_stream,
    event: *mut qhal_event,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes null or a record.
    unsafe {
        guard(err, || {
            let (stream, event) = (STREAMS.get(stream)?, EVENTS.get(event)?);
            let generation = {
                let mut state = event.state();
                state.recorded += 1;
                state.recorded
            };
            let record = Command::Record { event: Arc::clone(&event), generation };
            // A stream that failed records its failure.
            stream.enqueue(record).or_else(|failure| {
                event.reach(generation, Some(failure));
                Ok(())
            })
        })
    }
}

pub(crate) unsafe extern "C" fn wait_event(
    stream: *mut qhal_stream,
    event: *mut qhal_event,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes null or a record.
    unsafe {
        guard(err, || {
            let (stream, event) = (STREAMS.get(stream)?, EVENTS.get(event)?);
            let generation = event.state().recorded;
            stream.enqueue(Command::Wait { event, generation })
        })
    }
}

pub(crate) unsafe extern "C" fn event_wait(
    event: *mut qhal_event,
    timeout_ns: u64,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes null or a record.
    unsafe {
        guard(err, || {
            let event = EVENTS.get(event)?;
            let generation = event.state().recorded;
            event.wait(generation, timeout_ns)
        })
    }
}
