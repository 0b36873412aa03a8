//! Collectives between devices of one chip. The workers of the ranks' streams meet; the last that comes moves the data of all, in order of
//! rank, so that neither bits nor time depend on who came first.
//!
//! A communicator fails as a whole: a rank that does not come in time, parts that do not fit each other, and a rank whose stream or device
//! has failed end it for everybody.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use half::{bf16, f16};
use qwen_chips::Dtype;
use qwen_hal_abi::ops::{self, dtype_block};
use qwen_hal_abi::*;
use qwen_hal_plugin::{Failure, answer, guard, sized, sized_ref, write_text};

use crate::buffer::Slice;
use crate::device::{DEVICES, Device, link_between};
use crate::fabric::Wire;
use crate::plan::begin_launch;
use crate::registry::Registry;
use crate::stream::{Command, STREAMS};

pub(crate) static COMMS: Registry<Comm> = Registry::new("communicator");

/// Most ranks.
const MAX_RANKS: u32 = 1024;
/// How often a rank that waits looks whether a device was lost.
const GLANCE: Duration = Duration::from_millis(20);

/// Who meets: all ranks, or a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Lane {
    All,
    Pair { from: usize, to: usize },
}

/// What a rank asks for, without its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Wish {
    kind: u32,
    dtype: u32,
    reduction: u32,
    peer: usize,
    count: u64,
    element: u64,
}

impl Wish {
    fn of(desc: &qhal_collective_desc, comm: &Comm) -> Result<Self, Failure> {
        let refuse = |what: String| Err(Failure::unsupported(what));
        let reduces = matches!(desc.kind, QHAL_COLLECTIVE_ALL_REDUCE | QHAL_COLLECTIVE_REDUCE_SCATTER);
        if !(QHAL_COLLECTIVE_ALL_REDUCE..=QHAL_COLLECTIVE_RECV).contains(&desc.kind) || desc.flags != 0 {
            return refuse(format!("a collective of kind {} with flags {}", desc.kind, desc.flags));
        }
        let Some((1, element)) = dtype_block(desc.dtype) else {
            return refuse(format!("elements of type {}, expected a plain one", desc.dtype));
        };
        if reduces {
            let summed = [ops::QHAL_DTYPE_F32, ops::QHAL_DTYPE_F16, ops::QHAL_DTYPE_BF16, ops::QHAL_DTYPE_I32]
                .contains(&desc.dtype);
            let chip = comm.devices[0].model.chip;
            let lacks = |dtype: &Dtype| {
                dtype.code() == Some(desc.dtype)
                    && chip.compute.dtypes.get(dtype).is_some_and(|sheet| sheet.can.is_empty())
            };
            if !summed || [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::I32].iter().any(lacks) {
                return refuse(format!("the chip does not reduce elements of type {}", desc.dtype));
            }
            if !matches!(desc.reduction, QHAL_REDUCE_SUM | QHAL_REDUCE_MAX | QHAL_REDUCE_SUM_IN_ORDER) {
                return refuse(format!("reduction {}, expected a sum or a maximum", desc.reduction));
            }
        }
        let (ranks, element) = (comm.devices.len() as u64, u64::from(element));
        if desc.count == 0 || desc.count.checked_mul(element).and_then(|bytes| bytes.checked_mul(ranks)).is_none() {
            return Err(Failure::invalid(format!("{} elements, expected at least one", desc.count)));
        }
        let (peer, reduction) = (desc.peer as usize, if reduces { desc.reduction } else { 0 });
        Ok(Self { kind: desc.kind, dtype: desc.dtype, reduction, peer, count: desc.count, element })
    }

    const fn bytes(&self) -> u64 {
        self.count * self.element
    }
    const fn is_pair(&self) -> bool {
        matches!(self.kind, QHAL_COLLECTIVE_SEND | QHAL_COLLECTIVE_RECV)
    }
    const fn name(&self) -> &'static str {
        match self.kind {
            QHAL_COLLECTIVE_ALL_REDUCE => "all_reduce",
            QHAL_COLLECTIVE_ALL_GATHER => "all_gather",
            QHAL_COLLECTIVE_REDUCE_SCATTER => "reduce_scatter",
            QHAL_COLLECTIVE_BROADCAST => "broadcast",
            QHAL_COLLECTIVE_ALL_TO_ALL => "all_to_all",
            QHAL_COLLECTIVE_SEND => "send",
            _ => "recv",
        }
    }

    /// Bytes that a rank gives and gets.
    const fn sides(&self, rank: usize, ranks: u64) -> (Option<u64>, Option<u64>) {
        let part = self.bytes();
        match self.kind {
            QHAL_COLLECTIVE_ALL_GATHER => (Some(part), Some(part * ranks)),
            QHAL_COLLECTIVE_REDUCE_SCATTER => (Some(part * ranks), Some(part)),
            QHAL_COLLECTIVE_BROADCAST => (if rank == self.peer { Some(part) } else { None }, Some(part)),
            QHAL_COLLECTIVE_ALL_TO_ALL => (Some(part * ranks), Some(part * ranks)),
            QHAL_COLLECTIVE_SEND => (Some(part), None),
            QHAL_COLLECTIVE_RECV => (None, Some(part)),
            _ => (Some(part), Some(part)),
        }
    }
}

/// A rank's part on its way.
#[derive(Clone)]
pub(crate) struct Part {
    pub(crate) comm: Arc<Comm>,
    pub(crate) rank: usize,
    wish: Wish,
    lane: Lane,
    /// Which of the lane.
    number: u64,
    src: Option<Slice>,
    dst: Option<Slice>,
}

impl Part {
    /// A rank's part, whose memory is checked.
    fn new(comm: &Arc<Comm>, rank: u32, desc: &qhal_collective_desc) -> Result<Self, Failure> {
        let (rank, ranks) = (rank as usize, comm.devices.len());
        let device = comm.devices.get(rank);
        let device = device.ok_or_else(|| Failure::out_of_range(format!("rank {rank}, expected below {ranks}")))?;
        let wish = Wish::of(desc, comm)?;
        if wish.peer >= ranks || (wish.is_pair() && wish.peer == rank) {
            return Err(Failure::out_of_range(format!("peer {}, expected another rank below {ranks}", wish.peer)));
        }
        let (gives, gets) = wish.sides(rank, ranks as u64);
        let alignment = device.model.alignment().max(wish.element);
        let side = |slice: &qhal_slice, bytes: Option<u64>| {
            let Some(bytes) = bytes else { return Ok(None) };
            let slice = Slice::of(slice)?;
            slice.address(bytes)?;
            if !Arc::ptr_eq(&slice.buffer.device, device) {
                return Err(Failure::invalid("a buffer of another device, expected one of the rank's"));
            }
            if slice.size != bytes || !slice.offset.is_multiple_of(alignment) {
                let (size, at) = (slice.size, slice.offset);
                return Err(Failure::invalid(format!(
                    "{size} bytes at {at}, expected {bytes} at a multiple of {alignment}"
                )));
            }
            Ok(Some(slice))
        };
        let (src, dst) = (side(&desc.src, gives)?, side(&desc.dst, gets)?);
        let lane = match wish.kind {
            QHAL_COLLECTIVE_SEND => Lane::Pair { from: rank, to: wish.peer },
            QHAL_COLLECTIVE_RECV => Lane::Pair { from: wish.peer, to: rank },
            _ => Lane::All,
        };
        let number = comm.number(rank, lane)?;
        Ok(Self { comm: Arc::clone(comm), rank, wish, lane, number, src, dst })
    }

    /// Meets the other ranks; afterwards data has moved.
    pub(crate) fn run(&self, device: &Device) -> Result<(), Failure> {
        begin_launch(device)?;
        self.comm.meet(self)?;
        device.add_time(self.comm.nanoseconds(&self.wish));
        Ok(())
    }

    fn members(&self) -> usize {
        if self.wish.is_pair() { 2 } else { self.comm.devices.len() }
    }

    fn given(&self) -> Result<Vec<u8>, Failure> {
        let Some(src) = &self.src else { return Ok(Vec::new()) };
        let from = src.address(src.size)?;
        // SAFETY: so many bytes are there, and the stream of the rank has come to this point.
        Ok(unsafe { std::slice::from_raw_parts(from, src.size as usize) }.to_vec())
    }

    fn get(&self, bytes: &[u8]) -> Result<(), Failure> {
        let Some(dst) = &self.dst else { return Ok(()) };
        let to = dst.address(bytes.len() as u64)?;
        // SAFETY: as above.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }
}

/// Ranks that have come to one collective.
#[derive(Default)]
struct Meeting {
    parts: Vec<Part>,
    done: bool,
    left: usize,
}

#[derive(Default)]
struct State {
    failure: Option<Failure>,
    numbers: HashMap<(usize, Lane), u64>,
    meetings: HashMap<(Lane, u64), Meeting>,
}

impl State {
    /// The first failure is everybody's. Parts that wait are forgotten; they hold their communicator.
    fn fail(&mut self, failure: Failure) {
        self.failure.get_or_insert(failure);
        self.meetings.retain(|_, meeting| meeting.done);
    }
}

/// What a `qhal_comm` stands for.
pub(crate) struct Comm {
    devices: Vec<Arc<Device>>,
    timeout: Duration,
    wire: Wire,
    state: Mutex<State>,
    changed: Condvar,
}

impl Comm {
    fn new(desc: &qhal_comm_desc) -> Result<Self, Failure> {
        if !(1..=MAX_RANKS).contains(&desc.num_devices) || desc.devices.is_null() {
            return Err(Failure::invalid(format!("{} devices, expected 1 to {MAX_RANKS}", desc.num_devices)));
        }
        let mut devices: Vec<Arc<Device>> = Vec::new();
        for i in 0..desc.num_devices as usize {
            // SAFETY: the host passes an array of the stated length.
            let device = DEVICES.get(unsafe { *desc.devices.add(i) })?;
            device.alive()?;
            if devices.iter().any(|other| Arc::ptr_eq(other, &device)) {
                return Err(Failure::unsupported(format!("rank {i}: a device that is a rank already")));
            }
            if devices.first().is_some_and(|first| !std::ptr::eq(first.model, device.model)) {
                return Err(Failure::unsupported(format!(
                    "rank {i}: devices of different simulated chips have no fabric"
                )));
            }
            devices.push(device);
        }
        let neighbours = devices.iter().zip(devices.iter().cycle().skip(1));
        let wires = neighbours.map(|(a, b)| {
            let (_, bandwidth, latency_ns) = link_between(a, b);
            let slow = a.settings.slow_link.max(b.settings.slow_link).max(1) as f64;
            Wire { bandwidth: bandwidth / slow, latency_ns }
        });
        let wire = wires.reduce(|a, b| Wire {
            bandwidth: a.bandwidth.min(b.bandwidth),
            latency_ns: a.latency_ns.max(b.latency_ns),
        });
        let timeout = match desc.timeout_ns {
            0 => Duration::from_millis(devices[0].settings.watchdog_ms),
            limit => Duration::from_nanos(limit),
        };
        let wire = wire.unwrap_or(Wire { bandwidth: f64::INFINITY, latency_ns: 0.0 });
        Ok(Self { devices, timeout, wire, state: Mutex::default(), changed: Condvar::new() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn nanoseconds(&self, wish: &Wish) -> f64 {
        self.wire.nanoseconds(wish.kind, self.devices.len(), wish.bytes() as f64)
    }

    /// The place of a rank's next part in a lane.
    fn number(&self, rank: usize, lane: Lane) -> Result<u64, Failure> {
        let mut state = self.state();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let next = state.numbers.entry((rank, lane)).or_default();
        *next += 1;
        Ok(*next)
    }

    /// Ends the communicator for everybody, because a rank will not come.
    pub(crate) fn fail(&self, rank: usize, why: &Failure) {
        let failure = Failure::new(QHAL_ABORTED, format!("rank {rank} left the collective: {}", why.message));
        self.state().fail(failure);
        self.changed.notify_all();
    }

    fn meet(&self, part: &Part) -> Result<(), Failure> {
        let (key, members) = ((part.lane, part.number), part.members());
        let mut state = self.state();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let meeting = state.meetings.entry(key).or_default();
        meeting.parts.push(part.clone());
        if meeting.parts.len() == members {
            meeting.parts.sort_by_key(|part| part.rank);
            // A rank whose part waits here may have lost its device meanwhile.
            match self.lost(part).map_or_else(|| exchange(&meeting.parts), Err) {
                Ok(()) => {
                    meeting.parts.clear();
                    meeting.done = true;
                }
                Err(failure) => state.fail(failure),
            }
            self.changed.notify_all();
        }
        let start = Instant::now();
        loop {
            if let Some(meeting) = state.meetings.get_mut(&key)
                && meeting.done
            {
                meeting.left += 1;
                if meeting.left == members {
                    state.meetings.remove(&key);
                }
                return Ok(());
            }
            let absent = state.meetings.get(&key).map(|meeting| self.absent(part, meeting)).unwrap_or_default();
            if state.failure.is_none()
                && let Some(failure) = self.lost(part)
            {
                state.fail(failure);
                self.changed.notify_all();
            }
            if state.failure.is_none() && start.elapsed() >= self.timeout {
                let (name, rank, ms) = (part.wish.name(), part.rank, self.timeout.as_millis());
                state.fail(Failure::new(
                    QHAL_DEADLINE_EXCEEDED,
                    format!("{name}: rank {rank} waited {ms} ms for ranks {absent:?}, which did not come"),
                ));
                self.changed.notify_all();
            }
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            let left = self.timeout.saturating_sub(start.elapsed()).min(GLANCE);
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ranks that a meeting waits for.
    fn absent(&self, part: &Part, meeting: &Meeting) -> Vec<usize> {
        let members = self.members(part).into_iter();
        members.filter(|rank| meeting.parts.iter().all(|part| part.rank != *rank)).collect()
    }

    /// Ranks that take part.
    fn members(&self, part: &Part) -> Vec<usize> {
        match part.lane {
            Lane::All => (0..self.devices.len()).collect(),
            Lane::Pair { from, to } => vec![from, to],
        }
    }

    /// Why nobody can finish, if a member's device is lost.
    fn lost(&self, part: &Part) -> Option<Failure> {
        let rank = self.members(part).into_iter().find(|rank| self.devices[*rank].alive().is_err())?;
        Some(Failure::new(QHAL_ABORTED, format!("rank {rank} left the collective: its device is lost")))
    }
}

/// Moves the data of all parts, which are in order of rank.
fn exchange(parts: &[Part]) -> Result<(), Failure> {
    let Some(first) = parts.first() else { return Ok(()) };
    for part in parts {
        // Send and recv name each other by their lane.
        let same = match part.wish.is_pair() {
            true => (part.wish.count, part.wish.dtype) == (first.wish.count, first.wish.dtype),
            false => part.wish == first.wish,
        };
        if !same {
            let words = |part: &Part| {
                let Wish { dtype, count, peer, .. } = part.wish;
                format!("rank {}: {} of {count} elements of type {dtype}, peer {peer}", part.rank, part.wish.name())
            };
            return Err(Failure::invalid(format!("parts that do not fit: {}; {}", words(first), words(part))));
        }
    }
    let given = parts.iter().map(Part::given).collect::<Result<Vec<_>, _>>()?;
    let size = first.wish.bytes() as usize;
    let share = |bytes: &[u8], rank: usize| bytes[rank * size..][..size].to_vec();
    let chip = first.comm.devices[0].model.chip;
    let reduced = || reduce(&first.wish, &given, chip.accuracy.truncates_bf16);
    match first.wish.kind {
        QHAL_COLLECTIVE_ALL_REDUCE => {
            let reduced = reduced();
            parts.iter().try_for_each(|part| part.get(&reduced))
        }
        QHAL_COLLECTIVE_REDUCE_SCATTER => {
            let reduced = reduced();
            parts.iter().try_for_each(|part| part.get(&share(&reduced, part.rank)))
        }
        QHAL_COLLECTIVE_ALL_GATHER => {
            let all = given.concat();
            parts.iter().try_for_each(|part| part.get(&all))
        }
        QHAL_COLLECTIVE_BROADCAST => parts.iter().try_for_each(|part| part.get(&given[first.wish.peer])),
        QHAL_COLLECTIVE_ALL_TO_ALL => parts.iter().try_for_each(|part| {
            let shares: Vec<Vec<u8>> = given.iter().map(|bytes| share(bytes, part.rank)).collect();
            part.get(&shares.concat())
        }),
        // One of the two gives, the other gets.
        _ => parts.iter().try_for_each(|part| part.get(&given.concat())),
    }
}

/// Reduces values rank by rank, rounded to their type after each step.
fn reduce(wish: &Wish, given: &[Vec<u8>], truncates_bf16: bool) -> Vec<u8> {
    let sum = wish.reduction != QHAL_REDUCE_MAX;
    let float = |a: f32, b: f32| match sum {
        true => a + b,
        false if a.is_nan() || b.is_nan() => f32::NAN,
        false => a.max(b),
    };
    let mut result = given.first().cloned().unwrap_or_default();
    for other in given.iter().skip(1) {
        let pairs = result.chunks_exact_mut(wish.element as usize).zip(other.chunks_exact(wish.element as usize));
        for (to, from) in pairs {
            match (wish.dtype, to, from) {
                (ops::QHAL_DTYPE_F32, to @ &mut [a, b, c, d], &[w, x, y, z]) => {
                    let value = float(f32::from_le_bytes([a, b, c, d]), f32::from_le_bytes([w, x, y, z]));
                    to.copy_from_slice(&value.to_le_bytes());
                }
                (ops::QHAL_DTYPE_I32, to @ &mut [a, b, c, d], &[w, x, y, z]) => {
                    let (a, b) = (i32::from_le_bytes([a, b, c, d]), i32::from_le_bytes([w, x, y, z]));
                    to.copy_from_slice(&if sum { a.wrapping_add(b) } else { a.max(b) }.to_le_bytes());
                }
                (ops::QHAL_DTYPE_F16, to @ &mut [a, b], &[x, y]) => {
                    let value = float(f16::from_le_bytes([a, b]).to_f32(), f16::from_le_bytes([x, y]).to_f32());
                    to.copy_from_slice(&f16::from_f32(value).to_le_bytes());
                }
                (ops::QHAL_DTYPE_BF16, to @ &mut [a, b], &[x, y]) => {
                    let value = float(bf16::from_le_bytes([a, b]).to_f32(), bf16::from_le_bytes([x, y]).to_f32());
                    let rounded = match truncates_bf16 {
                        true => bf16::from_bits((value.to_bits() >> 16) as u16),
                        false => bf16::from_f32(value),
                    };
                    to.copy_from_slice(&rounded.to_le_bytes());
                }
                // Other types were refused.
                _ => {}
            }
        }
    }
    result
}

unsafe extern "C" fn comm_create(
    desc: *const qhal_comm_desc,
    out: *mut *mut qhal_comm,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes a description and room for the answer.
    unsafe { guard(err, || answer(out, COMMS.insert(Arc::new(Comm::new(sized_ref(desc)?)?)))) }
}

unsafe extern "C" fn comm_destroy(comm: *mut qhal_comm, err: *mut qhal_error) -> qhal_status {
    // SAFETY: the host passes null or a record.
    unsafe { guard(err, || if comm.is_null() { Ok(()) } else { COMMS.remove(comm).map(drop) }) }
}

unsafe extern "C" fn supports(
    comm: *mut qhal_comm,
    desc: *const qhal_collective_desc,
    out: *mut qhal_support,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes a description and a record.
    unsafe {
        guard(err, || {
            let (comm, desc, out) = (COMMS.get(comm)?, sized_ref(desc)?, sized(out)?);
            (out.level, out.estimated_ns, out.estimated_bytes) = (QHAL_SUPPORT_NATIVE, 0.0, 0.0);
            out.reason.fill(0);
            match Wish::of(desc, &comm) {
                Ok(wish) => {
                    out.estimated_ns = comm.nanoseconds(&wish);
                    out.estimated_bytes = Wire::sent(wish.kind, comm.devices.len(), wish.bytes() as f64);
                    Ok(())
                }
                Err(failure) if failure.code == QHAL_UNIMPLEMENTED => {
                    out.level = QHAL_SUPPORT_NO;
                    write_text(&mut out.reason, &failure.message);
                    Ok(())
                }
                Err(failure) => Err(failure),
            }
        })
    }
}

unsafe extern "C" fn enqueue(
    comm: *mut qhal_comm,
    rank: u32,
    stream: *mut qhal_stream,
    desc: *const qhal_collective_desc,
    err: *mut qhal_error,
) -> qhal_status {
    // SAFETY: the host passes handles of ours and a description.
    unsafe {
        guard(err, || {
            let (comm, stream) = (COMMS.get(comm)?, STREAMS.get(stream)?);
            let ranked = comm.devices.get(rank as usize);
            if ranked.is_some_and(|device| !Arc::ptr_eq(device, &stream.device)) {
                return Err(Failure::invalid("a stream of another device, expected one of the rank's"));
            }
            let part = Part::new(&comm, rank, sized_ref(desc)?)?;
            // A part that cannot be enqueued never comes.
            stream.enqueue(Command::Collective(part)).inspect_err(|failure| comm.fail(rank as usize, failure))
        })
    }
}

/// The `collectives` extension.
pub(crate) static COLLECTIVES: qhal_collectives_api = qhal_collectives_api {
    struct_size: size_of::<qhal_collectives_api>() as u32,
    version: 1,
    comm_create: Some(comm_create),
    comm_destroy: Some(comm_destroy),
    supports: Some(supports),
    enqueue: Some(enqueue),
};
