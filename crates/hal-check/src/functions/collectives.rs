//! Collectives: values against float64, the same bits whichever rank comes first, guards around what is written, and an error for everybody
//! where one rank does it wrong or does not come.

use std::sync::Mutex;
use std::time::Duration;

use half::{bf16, f16};
use qwen_hal::abi::ops::*;
use qwen_hal::abi::*;
use qwen_hal::{Collective, Communicator, Device, Exchange, HalError, Reduction, Slice, Stream, Support, status_name};

use super::refusals::refused;
use super::streams::fail;
use super::{Function, claim};
use crate::case::{Checked, Trouble, ensure, failed, unsupported};
use crate::execute::{Guarded, NAN, decode};
use crate::random::Random;
use crate::raw::{NO_SLICE, raw, text, zeroed};
use crate::suite::Subject;

/// A case of values for each number of ranks.
macro_rules! ranks {
    ($name:literal, $check:ident, [$($ranks:literal),*]) => {
        [$((concat!("collectives/", $name, ".", $ranks), |subject| $check(subject, $ranks))),*]
    };
}

const VALUES: [[Function; 5]; 6] = [
    ranks!("all_reduce", all_reduce, [1, 2, 3, 4, 8]),
    ranks!("all_gather", all_gather, [1, 2, 3, 4, 8]),
    ranks!("reduce_scatter", reduce_scatter, [1, 2, 3, 4, 8]),
    ranks!("broadcast", broadcast, [1, 2, 3, 4, 8]),
    ranks!("all_to_all", all_to_all, [1, 2, 3, 4, 8]),
    ranks!("send_recv", send_recv, [2, 3, 4, 5, 8]),
];

const OTHERS: &[Function] = &[
    ("collectives/claim", |subject| table(subject).map(drop)),
    ("collectives/in_place", in_place),
    ("collectives/determinism", determinism),
    ("collectives/one_after_the_other", one_after_the_other),
    ("collectives/supports", supports),
    ("collectives/mismatch", mismatch),
    ("collectives/missing_rank", missing_rank),
    ("collectives/failed_rank", failed_rank),
    ("collectives/refusals", refusals),
];

pub(super) fn cases() -> Vec<Function> {
    [OTHERS, VALUES.as_flattened()].concat()
}

/// Elements of a part: one, odd numbers, more than a vector or a page.
const COUNTS: [u64; 4] = [1, 7, 64, 1025];
/// How long a rank waits where all should come.
const PATIENCE: Duration = Duration::from_secs(20);
/// And where one does not come.
const IMPATIENCE: Duration = Duration::from_millis(200);

fn table(subject: &Subject) -> Result<&'static qhal_collectives_api, Trouble> {
    let table: *const qhal_collectives_api =
        claim(subject, QHAL_EXT_COLLECTIVES, QHAL_FEATURE_COLLECTIVES, "collectives")?;
    // SAFETY: a table of the plugin, which is never unloaded; it states its size.
    let size = unsafe { table.cast::<u32>().read() } as usize;
    ensure(size >= size_of::<qhal_collectives_api>(), || format!("the table of collectives has {size} bytes"))?;
    // SAFETY: as large as ours.
    let table = unsafe { &*table };
    let holes =
        [table.comm_create.is_none(), table.comm_destroy.is_none(), table.supports.is_none(), table.enqueue.is_none()];
    ensure(!holes.contains(&true), || "collectives are claimed, functions of the table are missing".into())?;
    Ok(table)
}

/// Devices of the subject's kind that are joined, with a stream for each.
struct Team {
    devices: Vec<Device>,
    streams: Vec<Mutex<Stream>>,
    comm: Communicator,
    inline: bool,
}

impl Team {
    /// So many ranks: other devices of the same name first, then further handles of the same ones.
    fn new(subject: &Subject, ranks: usize, patience: Duration) -> Result<Self, Trouble> {
        table(subject)?;
        let name = &subject.device.info().name;
        let count = subject.plugin.device_count()?;
        let mut of_a_kind = vec![subject.index];
        for index in (0..count).filter(|index| *index != subject.index) {
            if subject.plugin.device_info(index)?.name == *name {
                of_a_kind.push(index);
            }
        }
        let indices = of_a_kind.iter().cycle().take(ranks);
        let devices = indices.map(|index| subject.plugin.open(*index, &[])).collect::<Result<Vec<_>, _>>()?;
        let comm = match Communicator::new(&devices, Some(patience)) {
            Err(HalError::Call(error)) if error.is_unsupported() => {
                return unsupported(format!("{ranks} ranks: {}", error.message));
            }
            other => other?,
        };
        let streams = devices.iter().map(|device| Ok(Mutex::new(device.stream("rank")?)));
        let streams = streams.collect::<Result<_, HalError>>()?;
        let inline = subject.device.caps().has(QHAL_FEATURE_INLINE);
        Ok(Self { devices, streams, comm, inline })
    }

    const fn ranks(&self) -> usize {
        self.devices.len()
    }

    /// Runs a rank's work in this order; in threads where a call returns only when all ranks have come.
    fn in_order(&self, order: &[usize], work: &(dyn Fn(usize, &Stream) -> Checked + Sync)) -> Checked {
        let run = |rank: usize| match self.streams[rank].lock() {
            Ok(stream) => work(rank, &stream),
            Err(_) => failed("a thread of the check stumbled"),
        };
        if !self.inline {
            return order.iter().try_for_each(|rank| run(*rank));
        }
        std::thread::scope(|scope| {
            let threads: Vec<_> = order.iter().map(|rank| scope.spawn(move || run(*rank))).collect();
            let results: Vec<Checked> = threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|_| failed("a thread stumbled")))
                .collect();
            results.into_iter().collect()
        })
    }

    fn order(&self) -> Vec<usize> {
        (0..self.ranks()).collect()
    }

    fn all(&self, work: &(dyn Fn(usize, &Stream) -> Checked + Sync)) -> Checked {
        self.in_order(&self.order(), work)
    }

    fn clone_without_streams(&self) -> Self {
        let Self { devices, comm, inline, .. } = self;
        Self { devices: devices.clone(), streams: Vec::new(), comm: comm.clone(), inline: *inline }
    }

    /// Each rank by itself, one after the other.
    fn each<T>(&self, mut work: impl FnMut(usize, &Stream) -> Result<T, Trouble>) -> Result<Vec<T>, Trouble> {
        let streams = self.streams.iter().enumerate();
        streams
            .map(|(rank, stream)| match stream.lock() {
                Ok(stream) => work(rank, &stream),
                Err(_) => failed("a thread of the check stumbled"),
            })
            .collect()
    }

    fn enqueue(
        &self,
        rank: usize,
        stream: &Stream,
        collective: &Collective,
        src: Option<&Slice>,
        dst: Option<&Slice>,
    ) -> Checked {
        Ok(self.comm.enqueue(rank, stream, collective, src, dst)?)
    }

    /// From the first memory to the second.
    fn enqueue_pair(
        &self,
        rank: usize,
        stream: &Stream,
        collective: &Collective,
        (src, dst): &(Guarded, Guarded),
    ) -> Checked {
        self.enqueue(rank, stream, collective, Some(&src.slice()?), Some(&dst.slice()?))
    }

    /// Waits for a rank's stream, which must end.
    fn finish(&self) -> Checked {
        self.each(|rank, stream| match stream.wait_for(PATIENCE) {
            Ok(true) => Ok(()),
            Ok(false) => failed(format!("rank {rank} is still waiting after {} s", PATIENCE.as_secs())),
            Err(error) => failed(format!("rank {rank}: {error}")),
        })
        .map(drop)
    }

    /// Memory of each rank with a content of its own, and memory for results.
    fn memory(&self, parts: &[Vec<u8>], result: u64) -> Result<Vec<(Guarded, Guarded)>, Trouble> {
        self.each(|rank, stream| {
            let (device, size) = (&self.devices[rank], parts[rank].len() as u64);
            let src = Guarded::new(device, stream, size, 0, QHAL_USAGE_ACTIVATION)?;
            stream.copy_from_host(&parts[rank], &src.slice()?)?;
            Ok((src, Guarded::new(device, stream, result, NAN, QHAL_USAGE_ACTIVATION)?))
        })
    }

    /// Runs one collective in this order; what each rank got. Guards are whole and inputs unchanged.
    fn run(
        &self,
        of: &(dyn Fn(usize) -> Collective + Sync),
        parts: &[Vec<u8>],
        result: u64,
        order: &[usize],
    ) -> Result<Vec<Vec<u8>>, Trouble> {
        let memory = self.memory(parts, result)?;
        self.in_order(order, &|rank, stream| self.enqueue_pair(rank, stream, &of(rank), &memory[rank]))?;
        self.finish()?;
        self.each(|rank, stream| {
            let given = memory[rank].0.read(stream, &format!("the source of rank {rank}"))?;
            ensure(given == parts[rank], || format!("the source of rank {rank} was changed"))?;
            memory[rank].1.read(stream, &format!("the target of rank {rank}"))
        })
    }

    fn has(&self, collective: &Collective) -> Result<bool, Trouble> {
        match self.comm.supports(collective)? {
            Support::No { reason } => {
                ensure(!reason.is_empty(), || "supports says no without a reason".into())?;
                Ok(false)
            }
            _ => Ok(true),
        }
    }
}

/// Elements of a type: of mixed magnitudes, so that the order of sums shows, or bytes by chance where they are only moved.
fn elements(dtype: u32, count: u64, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed + 1);
    let count = count as usize;
    let scaled = |random: &mut Random, x: f32| x * [1.0, 1e-3, 100.0][random.below(3) as usize];
    match dtype {
        QHAL_DTYPE_F32 | QHAL_DTYPE_F16 | QHAL_DTYPE_BF16 => {
            let values = random.f32s(count).into_iter().map(|x| scaled(&mut random, x));
            values.flat_map(|x| encode(dtype, x)).collect()
        }
        other => random.bytes(count * dtype_block(other).map_or(1, |(_, bytes)| bytes as usize)),
    }
}

fn encode(dtype: u32, x: f32) -> Vec<u8> {
    match dtype {
        QHAL_DTYPE_F16 => f16::from_f32(x).to_le_bytes().to_vec(),
        QHAL_DTYPE_BF16 => bf16::from_f32(x).to_le_bytes().to_vec(),
        _ => x.to_le_bytes().to_vec(),
    }
}

fn size_of_type(dtype: u32) -> u64 {
    dtype_block(dtype).map_or(1, |(_, bytes)| bytes.into())
}

/// Bytes of all ranks' elements reduced, within what rounding to the type at each step allows.
fn check_reduced(dtype: u32, reduction: Reduction, given: &[&[u8]], found: &[u8]) -> Checked {
    if dtype == QHAL_DTYPE_I32 {
        let ints = |bytes: &[u8]| -> Vec<i32> {
            bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
        };
        let reduce = |a: i32, b: i32| if reduction == Reduction::Max { a.max(b) } else { a.wrapping_add(b) };
        let all: Vec<Vec<i32>> = given.iter().map(|bytes| ints(bytes)).collect();
        let expected = (0..all[0].len()).map(|i| all.iter().map(|values| values[i]).reduce(reduce).unwrap_or(0));
        let at = expected.zip(ints(found)).position(|(a, b)| a != b);
        return ensure(at.is_none(), || format!("element {at:?} of integers is wrong"));
    }
    // The unit in the last place: a chip may cut halves off instead of rounding them.
    let step = match dtype {
        QHAL_DTYPE_F16 => 2_f64.powi(-10),
        QHAL_DTYPE_BF16 => 2_f64.powi(-7),
        _ => 2_f64.powi(-23),
    };
    let (all, found): (Vec<Vec<f64>>, _) =
        (given.iter().map(|bytes| decode(dtype, bytes)).collect(), decode(dtype, found));
    for (i, found) in found.iter().enumerate() {
        let column = || all.iter().map(|values| values[i]);
        let (expected, limit) = match reduction {
            Reduction::Sum | Reduction::SumInOrder => {
                (column().sum::<f64>(), (all.len() as f64 - 1.0) * step * column().map(f64::abs).sum::<f64>())
            }
            Reduction::Max => (column().fold(f64::NEG_INFINITY, f64::max), 0.0),
        };
        let difference = (found - expected).abs();
        if difference.is_nan() || difference > limit {
            return failed(format!(
                "element {i} is {found}, expected {expected} within {limit:.1e} of {} ranks",
                all.len()
            ));
        }
    }
    Ok(())
}

/// float32 values of all ranks, added in order of rank.
fn sum_in_order(given: &[&[u8]]) -> Vec<u8> {
    let all: Vec<Vec<f64>> = given.iter().map(|bytes| decode(QHAL_DTYPE_F32, bytes)).collect();
    let sum = |i: usize| all.iter().map(|values| values[i] as f32).reduce(|a, b| a + b).unwrap_or(0.0);
    (0..all[0].len()).flat_map(|i| sum(i).to_le_bytes()).collect()
}

const REDUCED: [u32; 4] = [QHAL_DTYPE_F32, QHAL_DTYPE_F16, QHAL_DTYPE_BF16, QHAL_DTYPE_I32];
const MOVED: [u32; 4] = [QHAL_DTYPE_F32, QHAL_DTYPE_BF16, QHAL_DTYPE_I8, QHAL_DTYPE_I64];

/// What each rank gave or got.
type Parts<'a> = &'a [Vec<u8>];

/// Every type and count that the plugin has, at least one; `check` is told what each rank gave and got.
fn values(
    subject: &Subject,
    ranks: usize,
    exchanges: &[Exchange],
    dtypes: &[u32],
    (gives, gets): (u64, u64),
    check: &dyn Fn(&Collective, Parts<'_>, Parts<'_>) -> Checked,
) -> Checked {
    let team = Team::new(subject, ranks, PATIENCE)?;
    let order: Vec<usize> = (0..ranks).collect();
    let mut seen = 0;
    for exchange in exchanges {
        for (dtype, count) in dtypes.iter().flat_map(|dtype| COUNTS.map(|count| (*dtype, count))) {
            let collective = Collective { exchange: *exchange, dtype, count };
            if !team.has(&collective)? {
                continue;
            }
            seen += 1;
            let parts: Vec<Vec<u8>> =
                (0..ranks as u64).map(|rank| elements(dtype, count * gives, 100 * count + rank)).collect();
            let found = team.run(&|_| collective, &parts, count * gets * size_of_type(dtype), &order)?;
            check(&collective, &parts, &found).map_err(|trouble| match trouble {
                Trouble::Failed(what) => Trouble::Failed(format!("{count} elements of type {dtype}: {what}")),
                other => other,
            })?;
        }
    }
    if seen > 0 { Ok(()) } else { unsupported("none of the types that were tried") }
}

fn all_reduce(subject: &Subject, ranks: usize) -> Checked {
    let exchanges = [Reduction::Sum, Reduction::Max, Reduction::SumInOrder].map(Exchange::AllReduce);
    values(subject, ranks, &exchanges, &REDUCED, (1, 1), &|collective, given, found| {
        let Exchange::AllReduce(reduction) = collective.exchange else { return Ok(()) };
        let given: Vec<&[u8]> = given.iter().map(Vec::as_slice).collect();
        check_reduced(collective.dtype, reduction, &given, &found[0])?;
        if (reduction, collective.dtype) == (Reduction::SumInOrder, QHAL_DTYPE_F32) {
            let same = found[0] == sum_in_order(&given);
            ensure(same, || {
                "a sum in order of rank has other bits than adding the ranks' values one after the other".into()
            })?;
        }
        ensure(found.iter().all(|other| *other == found[0]), || "ranks got different bits".into())
    })
}

fn reduce_scatter(subject: &Subject, ranks: usize) -> Checked {
    let exchanges = [Exchange::ReduceScatter(Reduction::Sum), Exchange::ReduceScatter(Reduction::Max)];
    values(subject, ranks, &exchanges, &REDUCED, (ranks as u64, 1), &|collective, given, found| {
        let Exchange::ReduceScatter(reduction) = collective.exchange else { return Ok(()) };
        for (rank, found) in found.iter().enumerate() {
            let shares: Vec<&[u8]> = given.iter().map(|bytes| &bytes[rank * found.len()..][..found.len()]).collect();
            check_reduced(collective.dtype, reduction, &shares, found)?;
        }
        Ok(())
    })
}

/// Compares what was moved.
fn same(rank: usize, expected: &[u8], found: &[u8]) -> Checked {
    let at = expected.iter().zip(found).position(|(a, b)| a != b);
    ensure(at.is_none() && expected.len() == found.len(), || format!("rank {rank}: byte {at:?} of the target is wrong"))
}

fn all_gather(subject: &Subject, ranks: usize) -> Checked {
    values(subject, ranks, &[Exchange::AllGather], &MOVED, (1, ranks as u64), &|_, given, found| {
        let expected = given.concat();
        found.iter().enumerate().try_for_each(|(rank, found)| same(rank, &expected, found))
    })
}

fn broadcast(subject: &Subject, ranks: usize) -> Checked {
    let exchanges = [Exchange::Broadcast { root: 0 }, Exchange::Broadcast { root: ranks - 1 }];
    values(subject, ranks, &exchanges, &MOVED, (1, 1), &|collective, given, found| {
        let Exchange::Broadcast { root } = collective.exchange else { return Ok(()) };
        found.iter().enumerate().try_for_each(|(rank, found)| same(rank, &given[root], found))
    })
}

fn all_to_all(subject: &Subject, ranks: usize) -> Checked {
    let all = ranks as u64;
    values(subject, ranks, &[Exchange::AllToAll], &MOVED, (all, all), &|_, given, found| {
        found.iter().enumerate().try_for_each(|(rank, found)| {
            let part = found.len() / ranks;
            let expected: Vec<u8> = given.iter().flat_map(|bytes| bytes[rank * part..][..part].to_vec()).collect();
            same(rank, &expected, found)
        })
    })
}

/// Around a ring, on two streams a rank, twice without a wait in between.
fn send_recv(subject: &Subject, ranks: usize) -> Checked {
    const COUNT: u64 = 333;
    let team = Team::new(subject, ranks, PATIENCE)?;
    let taking = team.devices.iter().map(|device| Ok(Mutex::new(device.stream("taking")?)));
    let taking: Vec<Mutex<Stream>> = taking.collect::<Result<_, HalError>>()?;
    let element = size_of_type(QHAL_DTYPE_F32);
    let parts: Vec<Vec<u8>> = (0..ranks as u64).map(|rank| elements(QHAL_DTYPE_F32, 2 * COUNT, rank)).collect();
    let memory = team.memory(&parts, 2 * COUNT * element)?;
    let half = |memory: &Guarded, i: u64| -> Result<Slice, Trouble> {
        Ok(memory.slice()?.slice(i * COUNT * element, COUNT * element)?)
    };
    let of = |exchange| Collective { exchange, dtype: QHAL_DTYPE_F32, count: COUNT };
    if !team.has(&of(Exchange::Send { to: ranks - 1 }))? {
        return unsupported("no send");
    }
    // The halves are not aligned alike on a chip that demands much: then one message has to do.
    let alignment = subject.device.caps().buffer_alignment.max(element);
    let messages = if (COUNT * element).is_multiple_of(alignment) { 2 } else { 1 };
    let give = |rank: usize, stream: &Stream| -> Checked {
        (0..messages).try_for_each(|i| {
            let to = (rank + 1) % ranks;
            team.enqueue(rank, stream, &of(Exchange::Send { to }), Some(&half(&memory[rank].0, i)?), None)
        })
    };
    let take = |rank: usize| -> Checked {
        let Ok(stream) = taking[rank].lock() else { return failed("a thread of the check stumbled") };
        (0..messages).try_for_each(|i| {
            let from = (rank + ranks - 1) % ranks;
            team.enqueue(rank, &stream, &of(Exchange::Recv { from }), None, Some(&half(&memory[rank].1, i)?))
        })
    };
    if team.inline {
        std::thread::scope(|scope| -> Checked {
            let takers: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || take(rank))).collect();
            team.all(&give)?;
            takers.into_iter().try_for_each(|taker| taker.join().unwrap_or_else(|_| failed("a thread stumbled")))
        })?;
    } else {
        team.all(&give)?;
        (0..ranks).try_for_each(take)?;
    }
    for stream in &taking {
        let Ok(stream) = stream.lock() else { return failed("a thread of the check stumbled") };
        stream.wait()?;
    }
    team.finish()?;
    let taken = (messages * COUNT * element) as usize;
    team.each(|rank, stream| {
        let found = memory[rank].1.read(stream, &format!("the target of rank {rank}"))?;
        same(rank, &parts[(rank + ranks - 1) % ranks][..taken], &found[..taken])
    })
    .map(drop)
}

/// Targets that are the source, or a part of it, where the contract allows that.
fn in_place(subject: &Subject) -> Checked {
    const COUNT: u64 = 64;
    for ranks in [2, 3] {
        let team = Team::new(subject, ranks, PATIENCE)?;
        let part = COUNT * size_of_type(QHAL_DTYPE_F32);
        for exchange in [
            Exchange::AllReduce(Reduction::Sum),
            Exchange::Broadcast { root: 1 },
            Exchange::AllGather,
            Exchange::ReduceScatter(Reduction::Sum),
        ] {
            let collective = Collective { exchange, dtype: QHAL_DTYPE_F32, count: COUNT };
            if !team.has(&collective)? {
                continue;
            }
            let whole = matches!(exchange, Exchange::AllGather | Exchange::ReduceScatter(_));
            let given = if matches!(exchange, Exchange::ReduceScatter(_)) { ranks as u64 } else { 1 };
            let parts: Vec<Vec<u8>> =
                (0..ranks as u64).map(|rank| elements(QHAL_DTYPE_F32, COUNT * given, rank)).collect();
            let gets = if matches!(exchange, Exchange::AllGather) { part * ranks as u64 } else { part };
            let order: Vec<usize> = (0..ranks).collect();
            let apart = team.run(&|_| collective, &parts, gets, &order)?;
            let size = if whole { part * ranks as u64 } else { part };
            let memory = team.each(|rank, stream| {
                let memory = Guarded::new(&team.devices[rank], stream, size, NAN, QHAL_USAGE_ACTIVATION)?;
                let at = if given == 1 && whole { rank as u64 * part } else { 0 };
                stream.copy_from_host(&parts[rank], &memory.slice()?.slice(at, parts[rank].len() as u64)?)?;
                Ok(memory)
            })?;
            team.all(&|rank, stream| {
                let (all, own) = (
                    memory[rank].slice()?,
                    memory[rank].slice()?.slice(if whole { rank as u64 * part } else { 0 }, part)?,
                );
                let (src, dst) = if given == 1 { (&own, &all) } else { (&all, &own) };
                team.enqueue(rank, stream, &collective, Some(src), Some(dst))
            })?;
            team.finish()?;
            team.each(|rank, stream| {
                let found = memory[rank].read(stream, &format!("the memory of rank {rank}"))?;
                let at = if given == 1 { 0 } else { rank * part as usize };
                ensure(found[at..][..apart[rank].len()] == apart[rank][..], || {
                    format!(
                        "{} in place of {ranks} ranks: rank {rank} got other bits than with a target apart",
                        exchange.name()
                    )
                })
            })?;
        }
    }
    Ok(())
}

/// The same bits from run to run, and whichever rank comes first or last.
fn determinism(subject: &Subject) -> Checked {
    const COUNT: u64 = 4099;
    let ranks = if Team::new(subject, 4, PATIENCE).is_ok() { 4 } else { 3 };
    let ranks = if Team::new(subject, ranks, PATIENCE).is_ok() { ranks } else { 2 };
    let team = Team::new(subject, ranks, PATIENCE)?;
    for dtype in [QHAL_DTYPE_F32, QHAL_DTYPE_F16, QHAL_DTYPE_BF16] {
        let collective = Collective { exchange: Exchange::AllReduce(Reduction::Sum), dtype, count: COUNT };
        if !team.has(&collective)? {
            continue;
        }
        let parts: Vec<Vec<u8>> = (0..ranks as u64).map(|rank| elements(dtype, COUNT, rank)).collect();
        let bytes = COUNT * size_of_type(dtype);
        let mut first: Option<Vec<Vec<u8>>> = None;
        for late in 0..2 * ranks {
            // A rotation of the ranks, the last of which has other work first.
            let order: Vec<usize> = (0..ranks).map(|i| (i + late) % ranks).collect();
            let late = order[ranks - 1];
            let memory = team.memory(&parts, bytes)?;
            let slow = late_work(&team, late)?;
            team.in_order(&order, &|rank, stream| {
                if rank == late {
                    for _ in 0..20 {
                        stream.copy(&slow[0].whole(), &slow[1].whole())?;
                    }
                }
                team.enqueue_pair(rank, stream, &collective, &memory[rank])
            })?;
            team.finish()?;
            let found = team.each(|rank, stream| memory[rank].1.read(stream, &format!("the target of rank {rank}")))?;
            let expected = first.get_or_insert_with(|| found.clone());
            ensure(found == *expected, || {
                format!(
                    "sums of type {dtype} have other bits when rank {late} comes last: the order of a sum must be fixed"
                )
            })?;
        }
    }
    Ok(())
}

/// Buffers of a rank's device that copies take a while between.
fn late_work(team: &Team, rank: usize) -> Result<[qwen_hal::Buffer; 2], Trouble> {
    let desc = qwen_hal::BufferDesc::new(1 << 20, QHAL_USAGE_STAGING, qwen_hal::Scope::Temporary, "check");
    Ok([team.devices[rank].alloc(&desc)?, team.devices[rank].alloc(&desc)?])
}

/// Many without a wait in between, each of which needs the one before.
fn one_after_the_other(subject: &Subject) -> Checked {
    const COUNT: u64 = 33;
    const ROUNDS: u32 = 8;
    let team = Team::new(subject, 2, PATIENCE)?;
    let collective = Collective { exchange: Exchange::AllReduce(Reduction::Sum), dtype: QHAL_DTYPE_F32, count: COUNT };
    if !team.has(&collective)? {
        return unsupported("no sums of float32");
    }
    // Small integers, so that sums are exact.
    let parts: Vec<Vec<u8>> = (0..2_u64)
        .map(|rank| (0..COUNT).flat_map(|i| encode(QHAL_DTYPE_F32, (rank * 10 + i) as f32)).collect())
        .collect();
    let memory = team.memory(&parts, COUNT * 4)?;
    team.all(&|rank, stream| {
        let (a, b) = (memory[rank].0.slice()?, memory[rank].1.slice()?);
        for round in 0..ROUNDS {
            let (src, dst) = if round % 2 == 0 { (&a, &b) } else { (&b, &a) };
            team.enqueue(rank, stream, &collective, Some(src), Some(dst))?;
        }
        Ok(())
    })?;
    team.finish()?;
    team.each(|rank, stream| {
        let found = decode(QHAL_DTYPE_F32, &memory[rank].0.read(stream, "the last target")?);
        let expected = (0..COUNT).map(|i| f64::from(1_u32 << (ROUNDS - 1)) * (10 + 2 * i) as f64);
        ensure(found.iter().copied().eq(expected), || {
            format!("rank {rank}: {ROUNDS} sums of sums are wrong: collectives of one stream overtake each other")
        })
    })
    .map(drop)
}

/// Unknown kinds and types are refused, by `supports` and by `enqueue`.
fn supports(subject: &Subject) -> Checked {
    let table = table(subject)?;
    let team = Team::new(subject, 2, PATIENCE)?;
    let memory = team.memory(&[vec![0; 64], vec![0; 64]], 64)?;
    let good = Collective { exchange: Exchange::AllReduce(Reduction::Sum), dtype: QHAL_DTYPE_F32, count: 16 }.raw();
    let stream = team.streams[0].lock().map_err(|_| Trouble::Failed("a thread of the check stumbled".into()))?;
    for (what, desc) in [
        ("kind 99", qhal_collective_desc { kind: 99, ..good }),
        ("reduction 99", qhal_collective_desc { reduction: 99, ..good }),
        ("blocks of Q4_0", qhal_collective_desc { dtype: 2, ..good }),
        ("type 9999", qhal_collective_desc { dtype: 9999, ..good }),
    ] {
        // SAFETY: integers and floats.
        let mut support = unsafe { zeroed::<qhal_support>() };
        support.struct_size = size_of::<qhal_support>() as u32;
        let (status, err) = raw!(table, supports(team.comm.raw_handle(), &raw const desc, &raw mut support));
        ensure(status == QHAL_OK && support.level == QHAL_SUPPORT_NO && support.reason[0] != 0, || {
            let (status, text) = (status_name(status), text(&err));
            format!(
                "supports of {what}: expected OK, level NO and a reason, found {status} level {} {text}",
                support.level
            )
        })?;
        let mut desc = desc;
        (desc.src, desc.dst) = (memory[0].0.slice()?.raw(), memory[0].1.slice()?.raw());
        let answer = raw!(table, enqueue(team.comm.raw_handle(), 0, stream.raw_handle(), &raw const desc));
        ensure(answer.0 == QHAL_UNIMPLEMENTED, || {
            format!("enqueue of {what}: expected UNIMPLEMENTED, found {}", status_name(answer.0))
        })?;
        refused("enqueue", answer)?;
    }
    Ok(())
}

/// Every rank must get an error, at once or from its stream.
fn all_fail(team: &Team, what: &str, told: &[Checked]) -> Checked {
    team.each(|rank, stream| {
        if told.get(rank).is_some_and(Result::is_err) {
            return Ok(());
        }
        match stream.wait_for(PATIENCE) {
            Err(_) => Ok(()),
            Ok(true) => failed(format!("{what}: rank {rank} reports OK, expected an error for every rank")),
            Ok(false) => failed(format!("{what}: rank {rank} waits for ever, expected an error")),
        }
    })?;
    // The communicator is of no use any more, for nobody.
    let sum = Collective { exchange: Exchange::AllReduce(Reduction::Sum), dtype: QHAL_DTYPE_F32, count: 16 };
    let later = team.devices.iter().map(|device| Ok(Mutex::new(device.stream("later")?)));
    let later = Team { streams: later.collect::<Result<_, HalError>>()?, ..team.clone_without_streams() };
    let memory = later.memory(&vec![vec![0; 64]; later.ranks()], 64)?;
    let told = attempt(&later, &|rank, stream| later.enqueue_pair(rank, stream, &sum, &memory[rank]), &later.order())?;
    later
        .each(|rank, stream| {
            ensure(told[rank].is_err() || stream.wait_for(PATIENCE).is_err(), || {
                format!("{what}: a communicator that failed takes further collectives without an error (rank {rank})")
            })
        })
        .map(drop)
}

/// Runs ranks that may be told an error when they enqueue.
fn attempt(
    team: &Team,
    work: &(dyn Fn(usize, &Stream) -> Checked + Sync),
    ranks: &[usize],
) -> Result<Vec<Checked>, Trouble> {
    let told: Mutex<Vec<Checked>> = Mutex::new((0..team.ranks()).map(|_| Ok(())).collect());
    team.in_order(ranks, &|rank, stream| {
        let result = work(rank, stream);
        match told.lock() {
            Ok(mut told) => told[rank] = result,
            Err(_) => return failed("a thread of the check stumbled"),
        }
        Ok(())
    })?;
    told.into_inner().map_err(|_| Trouble::Failed("a thread of the check stumbled".into()))
}

fn mismatch(subject: &Subject) -> Checked {
    let sum = Collective { exchange: Exchange::AllReduce(Reduction::Sum), dtype: QHAL_DTYPE_F32, count: 16 };
    let others = [
        ("another count", sum, Collective { count: 15, ..sum }),
        ("another type", sum, Collective { dtype: QHAL_DTYPE_I32, ..sum }),
        ("another reduction", sum, Collective { exchange: Exchange::AllReduce(Reduction::Max), ..sum }),
        ("another kind", sum, Collective { exchange: Exchange::Broadcast { root: 0 }, ..sum }),
        (
            "another root",
            Collective { exchange: Exchange::Broadcast { root: 0 }, ..sum },
            Collective { exchange: Exchange::Broadcast { root: 1 }, ..sum },
        ),
    ];
    for (what, usual, odd) in others {
        let team = Team::new(subject, 2, PATIENCE)?;
        if !team.has(&usual)? || !team.has(&odd)? {
            continue;
        }
        let bytes = |collective: &Collective| (collective.count * 4) as usize;
        let parts = [vec![0; bytes(&usual)], vec![0; bytes(&odd)]];
        let memory = team.each(|rank, stream| {
            let make =
                || Guarded::new(&team.devices[rank], stream, parts[rank].len() as u64, NAN, QHAL_USAGE_ACTIVATION);
            Ok((make()?, make()?))
        })?;
        let told = attempt(
            &team,
            &|rank, stream| {
                let collective = if rank == 0 { &usual } else { &odd };
                team.enqueue_pair(rank, stream, collective, &memory[rank])
            },
            &[0, 1],
        )?;
        all_fail(&team, &format!("a rank with {what}"), &told)?;
    }
    Ok(())
}

fn missing_rank(subject: &Subject) -> Checked {
    let ranks = if Team::new(subject, 3, IMPATIENCE).is_ok() { 3 } else { 2 };
    let team = Team::new(subject, ranks, IMPATIENCE)?;
    let sum = Collective { exchange: Exchange::AllReduce(Reduction::Sum), dtype: QHAL_DTYPE_F32, count: 16 };
    let memory = team.memory(&vec![vec![0; 64]; ranks], 64)?;
    let come: Vec<usize> = (0..ranks - 1).collect();
    let mut told = attempt(&team, &|rank, stream| team.enqueue_pair(rank, stream, &sum, &memory[rank]), &come)?;
    // The one that does not come has nothing to tell.
    told[ranks - 1] = failed("did not come");
    all_fail(&team, "a rank that does not come", &told)
}

/// A rank whose stream has failed before.
fn failed_rank(subject: &Subject) -> Checked {
    let team = Team::new(subject, 2, PATIENCE)?;
    let sum = Collective { exchange: Exchange::AllReduce(Reduction::Sum), dtype: QHAL_DTYPE_F32, count: 16 };
    let memory = team.memory(&[vec![0; 64], vec![0; 64]], 64)?;
    let told = attempt(
        &team,
        &|rank, stream| {
            if rank == 1 {
                fail(&team.devices[1], stream)?;
            }
            team.enqueue_pair(rank, stream, &sum, &memory[rank])
        },
        &[0, 1],
    )?;
    if let Err(Trouble::Unsupported(reason)) = &told[1] {
        return unsupported(reason.clone());
    }
    all_fail(&team, "a rank whose stream has failed", &told)
}

fn refusals(subject: &Subject) -> Checked {
    let table = table(subject)?;
    let mut comm = std::ptr::null_mut();
    let device = subject.device.raw_handle();
    let (handles, nobody) = ([device, device], [std::ptr::null_mut()]);
    let desc = |num_devices, devices| qhal_comm_desc {
        struct_size: size_of::<qhal_comm_desc>() as u32,
        num_devices,
        devices,
        timeout_ns: 0,
    };
    for (what, desc) in [
        ("comm_create of no devices", desc(0, handles.as_ptr())),
        ("comm_create without an array", desc(2, std::ptr::null())),
        ("comm_create of a device that is none", desc(1, nobody.as_ptr())),
    ] {
        refused(what, raw!(table, comm_create(&raw const desc, &raw mut comm)))?;
    }
    refused("comm_create without a description", raw!(table, comm_create(std::ptr::null(), &raw mut comm)))?;
    let team = Team::new(subject, 2, PATIENCE)?;
    let memory = team.memory(&[vec![0; 64], vec![0; 64]], 64)?;
    let lock =
        |rank: usize| team.streams[rank].lock().map_err(|_| Trouble::Failed("a thread of the check stumbled".into()));
    let (own, other) = (lock(0)?.raw_handle(), lock(1)?.raw_handle());
    let good = Collective { exchange: Exchange::AllReduce(Reduction::Sum), dtype: QHAL_DTYPE_F32, count: 16 }.raw();
    let (src, dst) = (memory[0].0.slice()?.raw(), memory[0].1.slice()?.raw());
    let good = qhal_collective_desc { src, dst, ..good };
    let send = qhal_collective_desc { kind: QHAL_COLLECTIVE_SEND, reduction: 0, ..good };
    let short = qhal_slice { size: 60, ..dst };
    let beyond = qhal_slice { offset: 1 << 40, ..dst };
    let handle = team.comm.raw_handle();
    for (what, comm, rank, stream, desc) in [
        ("enqueue without a communicator", std::ptr::null_mut(), 0, own, good),
        ("enqueue without a stream", handle, 0, std::ptr::null_mut(), good),
        ("enqueue of a rank that is not there", handle, 2, own, good),
        ("enqueue on a stream of another rank", handle, 0, other, good),
        ("enqueue without a source", handle, 0, own, qhal_collective_desc { src: NO_SLICE, ..good }),
        ("enqueue with a target that is too short", handle, 0, own, qhal_collective_desc { dst: short, ..good }),
        ("enqueue with a target beyond its buffer", handle, 0, own, qhal_collective_desc { dst: beyond, ..good }),
        ("enqueue of no elements", handle, 0, own, qhal_collective_desc { count: 0, ..good }),
        ("enqueue of absurdly many elements", handle, 0, own, qhal_collective_desc { count: u64::MAX / 4, ..good }),
        ("send to a rank that is not there", handle, 0, own, qhal_collective_desc { peer: 2, ..send }),
        ("send to oneself", handle, 0, own, qhal_collective_desc { peer: 0, ..send }),
    ] {
        refused(what, raw!(table, enqueue(comm, rank, stream, &raw const desc)))?;
    }
    // None of that was a rank's part: the next one is the first.
    let sum = Collective { exchange: Exchange::AllReduce(Reduction::Sum), dtype: QHAL_DTYPE_F32, count: 16 };
    team.all(&|rank, stream| team.enqueue_pair(rank, stream, &sum, &memory[rank]))?;
    team.finish()?;
    // The host's own checks.
    let stream = lock(0)?;
    let whole = memory[0].1.slice()?;
    for (rank, src, dst) in [(0, Some(&whole), None), (2, Some(&whole), Some(&whole)), (1, Some(&whole), Some(&whole))]
    {
        if team.comm.enqueue(rank, &stream, &sum, src, dst).is_ok() {
            return failed("the host lets a collective pass whose arguments do not fit");
        }
    }
    Ok(())
}
