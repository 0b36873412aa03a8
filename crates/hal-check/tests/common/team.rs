//! Collectives for the CPU backend's table: threads that meet on memory of the host. Right, or with one defect.

use std::collections::HashMap;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use qwen_hal::abi::ops::{QHAL_DTYPE_F32, QHAL_DTYPE_I32, dtype_block};
use qwen_hal::abi::*;

type Error = *mut qhal_error;

/// A defect of the exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Bug {
    None,
    LosesLastRank,
    SumsBackwards,
    SumsAsTheyCome,
    RanksDiffer,
    SwapsParts,
    WritesPastTheEnd,
    RootIsZero,
    AnythingFits,
    NobodyIsMissed,
    GoesOnAfterFailure,
    WritesBeforeAllHaveRead,
    ReducesOneShort,
    ClaimsAllTypes,
}

const BUGS: [Bug; 14] = [
    Bug::None,
    Bug::LosesLastRank,
    Bug::SumsBackwards,
    Bug::SumsAsTheyCome,
    Bug::RanksDiffer,
    Bug::SwapsParts,
    Bug::WritesPastTheEnd,
    Bug::RootIsZero,
    Bug::AnythingFits,
    Bug::NobodyIsMissed,
    Bug::GoesOnAfterFailure,
    Bug::WritesBeforeAllHaveRead,
    Bug::ReducesOneShort,
    Bug::ClaimsAllTypes,
];

static BUG: AtomicU32 = AtomicU32::new(0);
static CPU: OnceLock<qhal_plugin_api> = OnceLock::new();
/// Which device a stream is of, by address.
static STREAMS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
fn bug() -> Bug {
    BUGS[BUG.load(Ordering::Relaxed) as usize]
}

/// Puts collectives with a defect into the CPU backend's table.
pub(crate) fn add(table: &mut qhal_plugin_api, bug: Bug) {
    CPU.get_or_init(|| *table);
    BUG.store(bug as u32, Ordering::Relaxed);
    table.stream_create = Some(stream_create);
    table.device_caps = Some(device_caps);
    table.query_extension = Some(query_extension);
}

macro_rules! cpu {
    ($entry:ident($($arg:expr),*)) => { unsafe { (CPU.get().unwrap().$entry.unwrap())($($arg),*) } };
}

unsafe extern "C" fn stream_create(
    d: *mut qhal_device,
    desc: *const qhal_stream_desc,
    out: *mut *mut qhal_stream,
    e: Error,
) -> i32 {
    let status = cpu!(stream_create(d, desc, out, e));
    if status == QHAL_OK {
        let stream = unsafe { *out }.addr();
        let mut streams = lock(&STREAMS);
        streams.retain(|(other, _)| *other != stream);
        streams.push((stream, d.addr()));
    }
    status
}
unsafe extern "C" fn device_caps(d: *mut qhal_device, out: *mut qhal_device_caps, e: Error) -> i32 {
    let status = cpu!(device_caps(d, out, e));
    if status == QHAL_OK {
        unsafe { (*out).features |= QHAL_FEATURE_COLLECTIVES };
    }
    status
}
unsafe extern "C" fn query_extension(
    d: *mut qhal_device,
    id: u32,
    v: u32,
    out: *mut *const std::ffi::c_void,
    e: Error,
) -> i32 {
    static TABLE: qhal_collectives_api = qhal_collectives_api {
        struct_size: size_of::<qhal_collectives_api>() as u32,
        version: 1,
        comm_create: Some(comm_create),
        comm_destroy: Some(comm_destroy),
        supports: Some(supports),
        enqueue: Some(enqueue),
    };
    if id != QHAL_EXT_COLLECTIVES {
        return cpu!(query_extension(d, id, v, out, e));
    }
    unsafe { *out = (&raw const TABLE).cast() };
    QHAL_OK
}

type Told = Result<(), (i32, String)>;

fn refuse<T>(code: i32, what: impl Into<String>) -> Result<T, (i32, String)> {
    Err((code, what.into()))
}
unsafe fn tell(e: Error, told: Told) -> i32 {
    let Err((code, what)) = told else { return QHAL_OK };
    if let Some(e) = unsafe { e.as_mut() } {
        e.code = code;
        e.message.fill(0);
        e.message.iter_mut().zip(what.bytes().take(200)).for_each(|(to, from)| *to = from);
    }
    code
}

/// A range of memory of the host.
#[derive(Clone, Copy)]
struct Memory {
    at: *mut u8,
    bytes: usize,
}
unsafe impl Send for Memory {}

impl Memory {
    fn of(slice: &qhal_slice, bytes: u64) -> Result<Self, (i32, String)> {
        if slice.buffer.is_null() || slice.size != bytes {
            return refuse(QHAL_INVALID_ARGUMENT, "a slice of another size");
        }
        let (mut at, access) = (null_mut(), QHAL_ACCESS_READ | QHAL_ACCESS_WRITE);
        match cpu!(buffer_map(slice.buffer, slice.offset, slice.size, access, &raw mut at, null_mut())) {
            QHAL_OK => Ok(Self { at: at.cast(), bytes: bytes as usize }),
            code => refuse(code, "a slice beyond its buffer"),
        }
    }
    fn read(self) -> Vec<u8> {
        unsafe { std::slice::from_raw_parts(self.at, self.bytes) }.to_vec()
    }
    fn write(self, bytes: &[u8]) {
        let more = usize::from(bug() == Bug::WritesPastTheEnd);
        unsafe {
            self.at.copy_from_nonoverlapping(bytes.as_ptr(), self.bytes.min(bytes.len()));
            self.at.add(self.bytes).write_bytes(0, more);
        }
    }
}

struct Part {
    rank: usize,
    desc: qhal_collective_desc,
    src: Option<Memory>,
    dst: Option<Memory>,
}
unsafe impl Send for Part {}

#[derive(Default)]
struct Meeting {
    parts: Vec<Part>,
    done: bool,
}

/// All ranks, or from one to another.
type Lane = Option<(usize, usize)>;

#[derive(Default)]
struct State {
    failure: Option<(i32, String)>,
    numbers: HashMap<(usize, Lane), u64>,
    meetings: HashMap<(Lane, u64), Meeting>,
}

struct Comm {
    devices: Vec<usize>,
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

unsafe extern "C" fn comm_create(desc: *const qhal_comm_desc, out: *mut *mut qhal_comm, e: Error) -> i32 {
    let made = || {
        let Some(desc) = (unsafe { desc.as_ref() }) else { return refuse(QHAL_INVALID_ARGUMENT, "no description") };
        if desc.num_devices == 0 || desc.devices.is_null() {
            return refuse(QHAL_INVALID_ARGUMENT, "no devices");
        }
        let devices: Vec<usize> =
            (0..desc.num_devices as usize).map(|i| unsafe { *desc.devices.add(i) }.addr()).collect();
        if devices.contains(&0) {
            return refuse(QHAL_INVALID_ARGUMENT, "a device that is none");
        }
        let timeout = Duration::from_nanos(desc.timeout_ns);
        let comm = Comm { devices, timeout, state: Mutex::default(), changed: Condvar::new() };
        unsafe { *out = Box::into_raw(Box::new(comm)).cast() };
        Ok(())
    };
    unsafe { tell(e, made()) }
}

unsafe extern "C" fn comm_destroy(comm: *mut qhal_comm, _: Error) -> i32 {
    drop(unsafe { Box::from_raw(comm.cast::<Comm>()) });
    QHAL_OK
}

fn understood(desc: &qhal_collective_desc) -> Told {
    let kind = (QHAL_COLLECTIVE_ALL_REDUCE..=QHAL_COLLECTIVE_RECV).contains(&desc.kind);
    let plain = matches!(dtype_block(desc.dtype), Some((1, _)));
    let reduces = matches!(desc.kind, QHAL_COLLECTIVE_ALL_REDUCE | QHAL_COLLECTIVE_REDUCE_SCATTER);
    let type_fits = !reduces
        || (matches!(desc.dtype, QHAL_DTYPE_F32 | QHAL_DTYPE_I32)
            && matches!(desc.reduction, QHAL_REDUCE_SUM | QHAL_REDUCE_MAX | QHAL_REDUCE_SUM_IN_ORDER));
    if kind && plain && type_fits { Ok(()) } else { refuse(QHAL_UNIMPLEMENTED, "not understood") }
}

unsafe extern "C" fn supports(
    _: *mut qhal_comm,
    desc: *const qhal_collective_desc,
    out: *mut qhal_support,
    _: Error,
) -> i32 {
    let (desc, out) = unsafe { (&*desc, &mut *out) };
    out.level = QHAL_SUPPORT_NATIVE;
    if understood(desc).is_err() && bug() != Bug::ClaimsAllTypes {
        out.level = QHAL_SUPPORT_NO;
        out.reason[0] = b'x';
    }
    QHAL_OK
}

unsafe extern "C" fn enqueue(
    comm: *mut qhal_comm,
    rank: u32,
    stream: *mut qhal_stream,
    desc: *const qhal_collective_desc,
    e: Error,
) -> i32 {
    let work = || {
        let Some(comm) = (unsafe { comm.cast::<Comm>().as_ref() }) else {
            return refuse(QHAL_INVALID_ARGUMENT, "no communicator");
        };
        let (rank, desc) = (rank as usize, unsafe { *desc });
        let device = comm.devices.get(rank);
        let of_the_rank = device.is_some_and(|device| lock(&STREAMS).contains(&(stream.addr(), *device)));
        if stream.is_null() || !of_the_rank {
            return refuse(QHAL_INVALID_ARGUMENT, "no stream of the rank's device");
        }
        understood(&desc)?;
        let part = comm.part(rank, &desc)?;
        let failed = cpu!(stream_wait(stream, 0, null_mut()));
        if failed != QHAL_OK {
            lock(&comm.state).failure.get_or_insert((QHAL_ABORTED, "a rank's stream has failed".into()));
            comm.changed.notify_all();
            return refuse(failed, "the stream has failed");
        }
        comm.meet(part)
    };
    unsafe { tell(e, work()) }
}

impl Comm {
    fn part(&self, rank: usize, desc: &qhal_collective_desc) -> Result<Part, (i32, String)> {
        let (ranks, peer) = (self.devices.len() as u64, desc.peer as usize);
        let pair = matches!(desc.kind, QHAL_COLLECTIVE_SEND | QHAL_COLLECTIVE_RECV);
        if peer >= self.devices.len() || (pair && peer == rank) {
            return refuse(QHAL_OUT_OF_RANGE, "no such peer");
        }
        let element = u64::from(dtype_block(desc.dtype).map_or(1, |(_, bytes)| bytes));
        let one = desc.count.checked_mul(element).filter(|bytes| *bytes > 0 && *bytes < 1 << 40);
        let Some(one) = one else { return refuse(QHAL_INVALID_ARGUMENT, "no such count") };
        let (src, dst) = match desc.kind {
            QHAL_COLLECTIVE_ALL_GATHER => (Some(one), Some(one * ranks)),
            QHAL_COLLECTIVE_REDUCE_SCATTER => (Some(one * ranks), Some(one)),
            QHAL_COLLECTIVE_ALL_TO_ALL => (Some(one * ranks), Some(one * ranks)),
            QHAL_COLLECTIVE_BROADCAST => ((rank == peer).then_some(one), Some(one)),
            QHAL_COLLECTIVE_SEND => (Some(one), None),
            QHAL_COLLECTIVE_RECV => (None, Some(one)),
            _ => (Some(one), Some(one)),
        };
        let memory = |slice: &qhal_slice, bytes: Option<u64>| bytes.map(|bytes| Memory::of(slice, bytes)).transpose();
        Ok(Part { rank, desc: *desc, src: memory(&desc.src, src)?, dst: memory(&desc.dst, dst)? })
    }

    fn meet(&self, part: Part) -> Told {
        let (rank, peer) = (part.rank, part.desc.peer as usize);
        let lane = match part.desc.kind {
            QHAL_COLLECTIVE_SEND => Some((rank, peer)),
            QHAL_COLLECTIVE_RECV => Some((peer, rank)),
            _ => None,
        };
        let members = if lane.is_some() { 2 } else { self.devices.len() };
        let mut state = lock(&self.state);
        if let Some(failure) = state.failure.clone().filter(|_| bug() != Bug::GoesOnAfterFailure) {
            return Err(failure);
        }
        let number = state.numbers.entry((rank, lane)).or_default();
        *number += 1;
        let key = (lane, *number);
        let meeting = state.meetings.entry(key).or_default();
        meeting.parts.push(part);
        if meeting.parts.len() == members {
            let moved = exchange(&mut meeting.parts);
            meeting.done = true;
            if let Err(failure) = moved {
                state.failure.get_or_insert(failure);
                state.meetings.remove(&key);
            }
            self.changed.notify_all();
        }
        let start = Instant::now();
        loop {
            if state.meetings.get(&key).is_some_and(|meeting| meeting.done) {
                return Ok(());
            }
            if start.elapsed() >= self.timeout && bug() == Bug::NobodyIsMissed {
                return Ok(());
            }
            if start.elapsed() >= self.timeout {
                state.failure.get_or_insert((QHAL_DEADLINE_EXCEEDED, "a rank did not come".into()));
                self.changed.notify_all();
            }
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            let left = self.timeout.saturating_sub(start.elapsed());
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

fn reduce(given: &[Vec<u8>], desc: &qhal_collective_desc) -> Vec<u8> {
    let sum = desc.reduction != QHAL_REDUCE_MAX;
    if bug() == Bug::SumsBackwards && desc.reduction == QHAL_REDUCE_SUM_IN_ORDER && given.len() > 1 {
        let backwards: Vec<Vec<u8>> = given.iter().rev().cloned().collect();
        return reduce(&backwards, &qhal_collective_desc { reduction: QHAL_REDUCE_SUM, ..*desc });
    }
    let mut result = given[0].clone();
    let last = given.len() - usize::from(bug() == Bug::LosesLastRank && given.len() > 1);
    for other in &given[1..last] {
        let short = 4 * usize::from(bug() == Bug::ReducesOneShort);
        let end = result.len().saturating_sub(short);
        for (to, from) in result[..end].chunks_exact_mut(4).zip(other.chunks_exact(4)) {
            let (a, b): ([u8; 4], [u8; 4]) = (to.try_into().unwrap(), from.try_into().unwrap());
            let (x, y) = (f32::from_le_bytes(a), f32::from_le_bytes(b));
            let (i, j) = (i32::from_le_bytes(a), i32::from_le_bytes(b));
            to.copy_from_slice(&match (desc.dtype == QHAL_DTYPE_F32, sum) {
                (true, true) => (x + y).to_le_bytes(),
                (true, false) => x.max(y).to_le_bytes(),
                (false, true) => i.wrapping_add(j).to_le_bytes(),
                (false, false) => i.max(j).to_le_bytes(),
            });
        }
    }
    result
}

fn exchange(parts: &mut [Part]) -> Told {
    if bug() != Bug::SumsAsTheyCome {
        parts.sort_by_key(|part| part.rank);
    }
    let first = parts[0].desc;
    let same = |part: &Part| {
        let Part { desc, .. } = part;
        let pair = matches!(desc.kind, QHAL_COLLECTIVE_SEND | QHAL_COLLECTIVE_RECV);
        (desc.count, desc.dtype) == (first.count, first.dtype)
            && (pair || (desc.kind, desc.reduction, desc.peer) == (first.kind, first.reduction, first.peer))
    };
    if !parts.iter().all(same) && bug() != Bug::AnythingFits {
        return refuse(QHAL_INVALID_ARGUMENT, "parts that do not fit each other");
    }
    if bug() == Bug::WritesBeforeAllHaveRead
        && let (Some(dst), Some(src)) = (parts[0].dst, parts[parts.len() - 1].src)
    {
        dst.write(&src.read());
    }
    let given: Vec<Vec<u8>> = parts.iter().map(|part| part.src.map_or_else(Vec::new, Memory::read)).collect();
    let one = first.count as usize * dtype_block(first.dtype).map_or(1, |(_, bytes)| bytes as usize);
    let share = |bytes: &[u8], at: usize| bytes.get(at * one..(at + 1) * one).unwrap_or_default().to_vec();
    for part in parts.iter() {
        let Some(dst) = part.dst else { continue };
        let mut bytes = match first.kind {
            QHAL_COLLECTIVE_ALL_REDUCE => reduce(&given, &first),
            QHAL_COLLECTIVE_REDUCE_SCATTER => share(&reduce(&given, &first), part.rank),
            QHAL_COLLECTIVE_BROADCAST => {
                let root = if bug() == Bug::RootIsZero { 0 } else { first.peer as usize };
                given[root].clone()
            }
            QHAL_COLLECTIVE_ALL_TO_ALL => given.iter().flat_map(|bytes| share(bytes, part.rank)).collect(),
            _ => given.concat(),
        };
        if bug() == Bug::SwapsParts && bytes.len() >= 2 * one {
            bytes.rotate_left(one);
        }
        if bug() == Bug::RanksDiffer && part.rank > 0 {
            bytes[0] ^= 1;
        }
        dst.write(&bytes);
    }
    Ok(())
}
