//! Order within and between streams, events, failures, threads.

use std::time::{Duration, Instant};

use qwen_hal::abi::ops::*;
use qwen_hal::abi::*;
use qwen_hal::{BufferDesc, Device, Dim, LaunchArgs, OpDesc, Plan, Scope, Stream, TensorDesc};

use super::Function;
use crate::case::{Checked, Trouble, ensure, failed, unsupported};
use crate::execute::{bytes_of, bytes_of_ints, download, f32s, plan, upload};
use crate::random::Random;
use crate::suite::Subject;

pub(super) const CASES: &[Function] = &[
    ("streams/order", order),
    ("streams/poll", poll),
    ("streams/many", many),
    ("streams/events", events),
    ("streams/event_reuse", event_reuse),
    ("streams/failure_sticks", failure_sticks),
    ("streams/failure_is_inherited", failure_is_inherited),
    ("threads/memory", threads_memory),
    ("threads/plans_and_launches", threads_plans),
];

/// Bytes of the buffers that copies run between: large, so that work takes a while.
const SIZE: u64 = 1 << 20;

pub(super) fn buffers(subject: &Subject, count: usize) -> Result<Vec<qwen_hal::Buffer>, Trouble> {
    let make = |_| Ok(subject.device.alloc(&BufferDesc::new(SIZE, QHAL_USAGE_STAGING, Scope::Temporary, "check"))?);
    (0..count).map(make).collect()
}

/// Each copy needs the one before; nothing waits in between.
fn order(subject: &Subject) -> Checked {
    let stream = subject.device.stream("s")?;
    let chain = buffers(subject, 8)?;
    for round in 0..3_u8 {
        upload(&stream, &chain[0], 0, &vec![round + 1; SIZE as usize])?;
        for pair in chain.windows(2) {
            stream.copy(&pair[0].whole(), &pair[1].whole())?;
        }
        stream.wait()?;
        let found = download(&stream, &chain[7], 0, SIZE)?;
        ensure(found.iter().all(|byte| *byte == round + 1), || "copies of one stream overtake each other".into())?;
    }
    Ok(())
}

fn poll(subject: &Subject) -> Checked {
    let stream = subject.device.stream("s")?;
    ensure(stream.poll()?, || "an empty stream is not ready".into())?;
    let pair = buffers(subject, 2)?;
    stream.copy(&pair[0].whole(), &pair[1].whole())?;
    let start = Instant::now();
    while !stream.poll()? {
        ensure(start.elapsed() < Duration::from_secs(10), || "a copy of 1 MiB is not ready after 10 s".into())?;
    }
    ensure(stream.wait_for(Duration::from_millis(1))?, || "a stream that was ready is not any more".into())
}

fn many(subject: &Subject) -> Checked {
    let streams: Vec<Stream> = (0..16).map(|_| subject.device.stream("s")).collect::<Result<_, _>>()?;
    let sources = buffers(subject, streams.len())?;
    let targets = buffers(subject, streams.len())?;
    for (at, (stream, source)) in streams.iter().zip(&sources).enumerate() {
        upload(stream, source, 0, &vec![at as u8; SIZE as usize])?;
    }
    for (stream, (source, target)) in streams.iter().zip(sources.iter().zip(&targets)) {
        stream.copy(&source.whole(), &target.whole())?;
    }
    for (at, (stream, target)) in streams.iter().zip(&targets).enumerate() {
        stream.wait()?;
        let found = download(stream, target, 0, SIZE)?;
        ensure(found.iter().all(|byte| *byte == at as u8), || format!("work of stream {at} of 16 is lost"))?;
    }
    Ok(())
}

pub(super) fn event(subject: &Subject) -> Result<qwen_hal::Event, Trouble> {
    match subject.device.event() {
        Err(error) if error.call_error().is_some_and(qwen_hal::CallError::is_unsupported) => {
            if subject.device.caps().has(QHAL_FEATURE_EVENTS) {
                return failed("event_create: the caps promise events, found UNIMPLEMENTED");
            }
            unsupported("no events")
        }
        other => Ok(other?),
    }
}

/// One stream fills a chain, another reads its end after an event.
fn events(subject: &Subject) -> Checked {
    let (writer, reader) = (subject.device.stream("writer")?, subject.device.stream("reader")?);
    let event = event(subject)?;
    let chain = buffers(subject, 6)?;
    for round in 0..4_u8 {
        upload(&writer, &chain[0], 0, &vec![round + 10; SIZE as usize])?;
        for pair in chain[..5].windows(2) {
            writer.copy(&pair[0].whole(), &pair[1].whole())?;
        }
        writer.record(&event)?;
        reader.wait_event(&event)?;
        reader.copy(&chain[4].whole(), &chain[5].whole())?;
        reader.wait()?;
        let found = download(&reader, &chain[5], 0, SIZE)?;
        ensure(found.iter().all(|byte| *byte == round + 10), || {
            "a stream did not wait for an event of another".into()
        })?;
        ensure(event.wait_for(Duration::from_secs(10))?, || "an event of finished work is not ready".into())?;
    }
    Ok(())
}

fn event_reuse(subject: &Subject) -> Checked {
    let stream = subject.device.stream("s")?;
    let first = event(subject)?;
    for _ in 0..50 {
        stream.record(&first)?;
        ensure(first.wait_for(Duration::from_secs(10))?, || "a recorded event is not ready after 10 s".into())?;
    }
    let others: Vec<_> = (0..50).map(|_| event(subject)).collect::<Result<_, _>>()?;
    others.iter().try_for_each(|event| stream.record(event))?;
    Ok(stream.wait()?)
}

/// A launch that only the data makes fail: a slot behind the cache.
pub(super) fn fail(device: &Device, stream: &Stream) -> Result<(), Trouble> {
    let rows = Dim::symbol(0, 1, 4);
    let cache = TensorDesc::f32(&[2.into(), (4 * 2 * 8).into()]);
    let op = OpDesc::new(QHAL_OP_KV_APPEND)
        .attr_int(QHAL_ATTR_NUM_KV_HEADS, 1)
        .attr_int(QHAL_ATTR_HEAD_DIM, 8)
        .attr_int(QHAL_ATTR_VALUE_DIM, 8)
        .attr_int(QHAL_ATTR_BLOCK_SIZE, 4)
        .input(TensorDesc::f32(&[rows, 8.into()]))
        .input(TensorDesc::f32(&[rows, 8.into()]))
        .input(TensorDesc::new(QHAL_DTYPE_I32, &[rows]))
        .output(cache);
    let plan = plan(device, &op)?;
    let make = |bytes: &[u8]| -> Result<qwen_hal::Buffer, Trouble> {
        let desc = BufferDesc::new(bytes.len() as u64, QHAL_USAGE_ACTIVATION, Scope::Temporary, "check");
        let buffer = device.alloc(&desc)?;
        upload(stream, &buffer, 0, bytes)?;
        Ok(buffer)
    };
    let (values, slots, memory) = (make(&[0; 32])?, make(&bytes_of_ints(&[1_000_000]))?, make(&[0; 2 * 64 * 4])?);
    let mut args = LaunchArgs::new(&plan);
    args.set_input(0, &values.whole()).set_input(1, &values.whole()).set_input(2, &slots.whole());
    args.set_output(0, &memory.whole()).set_symbol(0, 1);
    let workspace = plan.info().workspace_bytes;
    let scratch = make(&vec![0; workspace.max(1) as usize])?;
    if workspace > 0 {
        args.set_workspace(&scratch.whole());
    }
    let launched = plan.launch(stream, &args);
    if launched.is_ok() && stream.wait().is_ok() {
        return unsupported("a slot behind the cache is not reported, so that no failure could be followed");
    }
    Ok(())
}

fn failure_sticks(subject: &Subject) -> Checked {
    let stream = subject.device.stream("s")?;
    fail(&subject.device, &stream)?;
    ensure(stream.wait().is_err(), || "a failed stream reports OK afterwards".into())?;
    let pair = buffers(subject, 2)?;
    let later = stream.copy(&pair[0].whole(), &pair[1].whole());
    ensure(later.is_err() || stream.wait().is_err(), || "a failed stream takes further work without an error".into())?;
    let other = subject.device.stream("other")?;
    other.copy(&pair[0].whole(), &pair[1].whole())?;
    Ok(other.wait()?)
}

fn failure_is_inherited(subject: &Subject) -> Checked {
    let (failing, waiting) = (subject.device.stream("failing")?, subject.device.stream("waiting")?);
    let event = event(subject)?;
    fail(&subject.device, &failing)?;
    // May itself tell of the failure.
    let recorded = failing.record(&event);
    let waited = waiting.wait_event(&event);
    if recorded.is_err() {
        return Ok(());
    }
    ensure(waited.is_err() || waiting.wait().is_err(), || {
        "a stream that waits for an event behind a failure does not inherit the failure".into()
    })?;
    ensure(event.wait_for(Duration::from_secs(10)).is_err(), || "event_wait hides the failure before the event".into())
}

/// Streams and buffers of many threads at once.
fn threads_memory(subject: &Subject) -> Checked {
    let work = |seed: u8| -> Checked {
        let stream = subject.device.stream("s")?;
        for round in 0..20_u64 {
            let size = 1000 + u64::from(seed) * 37 + round * 11;
            let desc = BufferDesc::new(size, QHAL_USAGE_STAGING, Scope::Temporary, "check");
            let (a, b) = (subject.device.alloc(&desc)?, subject.device.alloc(&desc)?);
            let sent = vec![seed.wrapping_add(round as u8); size as usize];
            upload(&stream, &a, 0, &sent)?;
            stream.copy(&a.whole(), &b.whole())?;
            stream.wait()?;
            ensure(download(&stream, &b, 0, size)? == sent, || "threads disturb each other's buffers".into())?;
        }
        Ok(())
    };
    in_threads(8, &work)
}

pub(super) fn in_threads(count: u8, work: &(dyn Fn(u8) -> Checked + Sync)) -> Checked {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|seed| scope.spawn(move || work(seed))).collect();
        let mut results = threads.into_iter().map(|thread| thread.join());
        results.try_for_each(|result| result.unwrap_or_else(|_| failed("a thread of the check stumbled")))
    })
}

/// Some op that the device has, with a size that varies.
fn some_op(subject: &Subject) -> Result<OpDesc, Trouble> {
    let x = TensorDesc::f32(&[Dim::symbol(0, 1, 64), 32.into()]);
    let ops = [
        OpDesc::new(QHAL_OP_SOFTMAX).input(x).output(x),
        OpDesc::new(QHAL_OP_UNARY).attr_int(QHAL_ATTR_FUNCTION, QHAL_ACT_SILU).input(x).output(x),
        OpDesc::new(QHAL_OP_COPY).input(x).output(x),
    ];
    let has = |op: &OpDesc| subject.device.op_supports(op).is_ok_and(|support| support.is_supported());
    ops.into_iter().find(has).map_or_else(|| unsupported("none of softmax, silu and copy"), Ok)
}

fn launch(subject: &Subject, stream: &Stream, plan: &Plan, x: &[f32]) -> Result<Vec<f32>, Trouble> {
    let bytes = (x.len() * 4) as u64;
    let desc = BufferDesc::new(bytes, QHAL_USAGE_ACTIVATION, Scope::Temporary, "check");
    let (input, output) = (subject.device.alloc(&desc)?, subject.device.alloc(&desc)?);
    upload(stream, &input, 0, &bytes_of(x))?;
    let mut args = LaunchArgs::new(plan);
    args.set_input(0, &input.whole()).set_output(0, &output.whole()).set_symbol(0, (x.len() / 32) as i64);
    let workspace = plan.info().workspace_bytes;
    let desc = BufferDesc::new(workspace.max(1), QHAL_USAGE_WORKSPACE, Scope::Temporary, "check");
    let scratch = subject.device.alloc(&desc)?;
    if workspace > 0 {
        args.set_workspace(&scratch.whole());
    }
    plan.launch(stream, &args)?;
    stream.wait()?;
    Ok(f32s(&download(stream, &output, 0, bytes)?))
}

/// One plan launched by many threads, while they make and destroy plans of their own.
fn threads_plans(subject: &Subject) -> Checked {
    let op = some_op(subject)?;
    let shared = plan(&subject.device, &op)?;
    let inputs: Vec<Vec<f32>> = (0..8_u64).map(|seed| Random::new(seed).f32s(32 * (1 + seed as usize * 7))).collect();
    let stream = subject.device.stream("s")?;
    let alone = inputs.iter().map(|x| launch(subject, &stream, &shared, x)).collect::<Result<Vec<_>, _>>()?;
    let work = |seed: u8| -> Checked {
        let stream = subject.device.stream("s")?;
        let at = usize::from(seed);
        for round in 0..20 {
            let own = plan(&subject.device, &op)?;
            let used = if round % 2 == 0 { &shared } else { &own };
            let found = launch(subject, &stream, used, &inputs[at])?;
            ensure(found == alone[at], || "a launch gives another result while other threads work".into())?;
        }
        Ok(())
    };
    in_threads(8, &work)
}
