//! Command lists: a replay gives the bits of the same launches one by one, with what its patches say, in its place in the stream.

use std::sync::Arc;

use qwen_hal::abi::ops::*;
use qwen_hal::abi::*;
use qwen_hal::{
    Buffer, BufferDesc, CommandList, Device, Dim, LaunchArgs, OpDesc, Patches, Plan, PlanOptions, Scope, Stream,
    TensorDesc, status_name,
};

use super::refusals::refused;
use super::streams::{buffers, event, fail, in_threads};
use super::{Function, claim};
use crate::case::{Body, Checked, Trouble, ensure, failed, unsupported};
use crate::execute::{Guarded, NAN, bytes_of, plan, upload};
use crate::ops;
use crate::random::Random;
use crate::raw::{NO_SLICE, copy_desc, raw, text};
use crate::suite::Subject;

pub(super) const CASES: &[Function] = &[
    ("cmdlist/claim", |subject| table(subject).map(drop)),
    ("cmdlist/replay", replay),
    ("cmdlist/patched_slices", patched_slices),
    ("cmdlist/patched_values", patched_values),
    ("cmdlist/replayed_twice", replayed_twice),
    ("cmdlist/copies", copies),
    ("cmdlist/long", long),
    ("cmdlist/events", events),
    ("cmdlist/failed_stream", failed_stream),
    ("cmdlist/threads", threads),
    ("cmdlist/destroyed_in_flight", destroyed_in_flight),
    ("cmdlist/capture_safe", capture_safe),
    ("cmdlist/refusals", refusals),
];

const ROWS: usize = 64;
const COLUMNS: usize = 32;
const BYTES: u64 = (ROWS * COLUMNS * 4) as u64;

fn table(subject: &Subject) -> Result<&'static qhal_cmdlist_api, Trouble> {
    let table: *const qhal_cmdlist_api = claim(subject, QHAL_EXT_CMDLIST, QHAL_FEATURE_CMDLIST, "command lists")?;
    // SAFETY: a table of the plugin, which is never unloaded; it states its size.
    let size = unsafe { table.cast::<u32>().read() } as usize;
    ensure(size >= size_of::<qhal_cmdlist_api>(), || format!("the table of command lists has {size} bytes"))?;
    // SAFETY: as large as ours.
    let table = unsafe { &*table };
    let holes = [
        table.begin.is_none(),
        table.record_launch.is_none(),
        table.record_copy.is_none(),
        table.end.is_none(),
        table.replay.is_none(),
        table.destroy.is_none(),
    ];
    ensure(!holes.contains(&true), || "command lists are claimed, functions of the table are missing".into())?;
    Ok(table)
}

/// Two launches in a row, over 1 to 64 rows, with guards around what they write.
struct Chain {
    device: Device,
    plan: Arc<Plan>,
    x: Guarded,
    middle: Guarded,
    out: Guarded,
    workspace: Option<Guarded>,
}

impl Chain {
    fn new(subject: &Subject, stream: &Stream, seed: u64) -> Result<Self, Trouble> {
        table(subject)?;
        let device = subject.device.clone();
        let x = TensorDesc::f32(&[Dim::symbol(0, 1, ROWS as i64), COLUMNS.into()]);
        let ops = [
            OpDesc::new(QHAL_OP_UNARY).attr_int(QHAL_ATTR_FUNCTION, QHAL_ACT_SILU).input(x).output(x),
            OpDesc::new(QHAL_OP_SOFTMAX).input(x).output(x),
            OpDesc::new(QHAL_OP_COPY).input(x).output(x),
        ];
        let plans = ops.iter().filter_map(|op| device.plan(op, &PlanOptions::default()).ok());
        let plan = plans.into_iter().find(|plan| plan.info().flags & QHAL_PLAN_CAPTURE_SAFE != 0);
        let Some(plan) = plan else { return unsupported("none of silu, softmax and copy can be recorded") };
        let memory = |poison: u8| Guarded::new(&device, stream, BYTES, poison, QHAL_USAGE_ACTIVATION);
        let scratch = plan.info().workspace_bytes;
        let workspace = Guarded::new(&device, stream, scratch.max(1), NAN, QHAL_USAGE_WORKSPACE)?;
        let (x, middle, out) = (memory(NAN)?, memory(NAN)?, memory(NAN)?);
        stream.copy_from_host(&values(seed), &x.slice()?)?;
        Ok(Self { plan: Arc::new(plan), x, middle, out, workspace: (scratch > 0).then_some(workspace), device })
    }

    fn args(&self, from: &Guarded, to: &Guarded, rows: usize) -> Result<LaunchArgs, Trouble> {
        let mut args = LaunchArgs::new(&self.plan);
        args.set_input(0, &from.slice()?).set_output(0, &to.slice()?).set_symbol(0, rows as i64);
        if let Some(workspace) = &self.workspace {
            args.set_workspace(&workspace.slice()?);
        }
        Ok(args)
    }

    fn launches(&self, rows: usize) -> Result<[LaunchArgs; 2], Trouble> {
        Ok([self.args(&self.x, &self.middle, rows)?, self.args(&self.middle, &self.out, rows)?])
    }

    fn record(&self, rows: usize) -> Result<CommandList, Trouble> {
        let mut recorder = self.device.record()?;
        for args in self.launches(rows)? {
            recorder.launch(&self.plan, &args)?;
        }
        Ok(recorder.finish()?)
    }

    /// Poison in everything that is written.
    fn poison(&self, stream: &Stream) -> Checked {
        for memory in [&self.middle, &self.out] {
            stream.copy_from_host(&vec![NAN; BYTES as usize], &memory.slice()?)?;
        }
        Ok(())
    }

    /// What the launches give one by one, for these values.
    fn direct(&self, stream: &Stream, x: &[u8], rows: usize) -> Result<Vec<u8>, Trouble> {
        let kept = self.x.read(stream, "the input")?;
        stream.copy_from_host(x, &self.x.slice()?)?;
        self.poison(stream)?;
        for args in self.launches(rows)? {
            self.plan.launch(stream, &args)?;
        }
        let out = self.out.read(stream, "the output")?;
        stream.copy_from_host(&kept, &self.x.slice()?)?;
        self.poison(stream)?;
        Ok(out)
    }

    fn result(&self, stream: &Stream) -> Result<Vec<u8>, Trouble> {
        stream.wait()?;
        self.middle.read(stream, "the intermediate result")?;
        self.out.read(stream, "the output")
    }
}

fn values(seed: u64) -> Vec<u8> {
    bytes_of(&Random::new(seed).f32s(ROWS * COLUMNS))
}

fn stream(subject: &Subject) -> Result<Stream, Trouble> {
    Ok(subject.device.stream("s")?)
}

fn replay(subject: &Subject) -> Checked {
    let stream = stream(subject)?;
    let chain = Chain::new(subject, &stream, 1)?;
    for rows in [ROWS, 1, 7] {
        let expected = chain.direct(&stream, &values(1), rows)?;
        let mut list = chain.record(rows)?;
        ensure(chain.out.read(&stream, "the output")?.iter().all(|byte| *byte == NAN), || {
            "recording alone computed something".into()
        })?;
        list.replay(&stream, &Patches::new())?;
        ensure(chain.result(&stream)? == expected, || {
            format!("a replay gives other bits than the launches one by one, {rows} rows")
        })?;
        chain.poison(&stream)?;
    }
    Ok(())
}

fn patched_slices(subject: &Subject) -> Checked {
    let stream = stream(subject)?;
    let chain = Chain::new(subject, &stream, 1)?;
    let (own, expected) = (chain.direct(&stream, &values(1), ROWS)?, chain.direct(&stream, &values(2), ROWS)?);
    let memory = || Guarded::new(&subject.device, &stream, BYTES, NAN, QHAL_USAGE_ACTIVATION);
    let (x, middle, out) = (memory()?, memory()?, memory()?);
    stream.copy_from_host(&values(2), &x.slice()?)?;
    let mut list = chain.record(ROWS)?;
    let mut patches = Patches::new();
    patches.output(1, 0, &out.slice()?).input(0, 0, &x.slice()?);
    list.replay(&stream, &patches)?;
    stream.wait()?;
    ensure(out.read(&stream, "the patched output")? == expected, || {
        "a replay with another input and output gives other bits than launches with them".into()
    })?;
    ensure(chain.result(&stream)?.iter().all(|byte| *byte == NAN), || {
        "a replay with another output wrote to the one that was recorded".into()
    })?;
    // The slice between the two launches.
    patches.clear();
    patches.output(0, 0, &middle.slice()?).input(1, 0, &middle.slice()?);
    chain.poison(&stream)?;
    list.replay(&stream, &patches)?;
    ensure(chain.result(&stream)? == own, || "a replay with another intermediate slice gives other bits".into())?;
    ensure(chain.middle.read(&stream, "the intermediate result")?.iter().all(|byte| *byte == NAN), || {
        "a replay with another intermediate slice wrote to the one that was recorded".into()
    })?;
    // A patch is of one replay.
    chain.poison(&stream)?;
    stream.copy_from_host(&vec![NAN; BYTES as usize], &middle.slice()?)?;
    list.replay(&stream, &Patches::new())?;
    ensure(chain.result(&stream)? == own, || "after a patched replay one without patches gives other bits".into())?;
    ensure(middle.read(&stream, "the patched slice")?.iter().all(|byte| *byte == NAN), || {
        "a patch outlives its replay".into()
    })
}

fn patched_values(subject: &Subject) -> Checked {
    let stream = stream(subject)?;
    let chain = Chain::new(subject, &stream, 3)?;
    let mut list = chain.record(5)?;
    let mut patches = Patches::new();
    for rows in [7, ROWS, 1, 33] {
        let expected = chain.direct(&stream, &values(3), rows)?;
        patches.symbol(0, 0, rows as i64).symbol(1, 0, rows as i64);
        list.replay(&stream, &patches)?;
        ensure(chain.result(&stream)? == expected, || {
            format!("a replay recorded with 5 rows and patched to {rows} differs from launches of {rows} rows")
        })?;
        chain.poison(&stream)?;
    }
    let expected = chain.direct(&stream, &values(3), 5)?;
    list.replay(&stream, &Patches::new())?;
    ensure(chain.result(&stream)? == expected, || "a patched value outlives its replay".into())
}

/// Twice without a wait in between, on inputs that change between the two.
fn replayed_twice(subject: &Subject) -> Checked {
    let stream = stream(subject)?;
    let chain = Chain::new(subject, &stream, 1)?;
    let expected = [chain.direct(&stream, &values(1), ROWS)?, chain.direct(&stream, &values(2), ROWS)?];
    let memory = || Guarded::new(&subject.device, &stream, BYTES, NAN, QHAL_USAGE_ACTIVATION);
    let (other, first) = (memory()?, memory()?);
    stream.copy_from_host(&values(2), &other.slice()?)?;
    let mut list = chain.record(ROWS)?;
    list.replay(&stream, &Patches::new())?;
    stream.copy(&chain.out.slice()?, &first.slice()?)?;
    stream.copy(&other.slice()?, &chain.x.slice()?)?;
    list.replay(&stream, &Patches::new())?;
    let second = chain.result(&stream)?;
    ensure(first.read(&stream, "the first result")? == expected[0], || {
        "the first of two replays without a wait gives other bits".into()
    })?;
    ensure(second == expected[1], || "the second of two replays without a wait gives other bits".into())
}

fn copies(subject: &Subject) -> Checked {
    let stream = stream(subject)?;
    let chain = Chain::new(subject, &stream, 1)?;
    let expected = chain.direct(&stream, &values(2), ROWS)?;
    let memory = || Guarded::new(&subject.device, &stream, BYTES, NAN, QHAL_USAGE_ACTIVATION);
    let (source, second, kept, elsewhere) = (memory()?, memory()?, memory()?, memory()?);
    stream.copy_from_host(&values(2), &source.slice()?)?;
    stream.copy_from_host(&values(1), &second.slice()?)?;
    let mut recorder = subject.device.record()?;
    recorder.copy(&source.slice()?, &chain.x.slice()?)?;
    for args in chain.launches(ROWS)? {
        recorder.launch(&chain.plan, &args)?;
    }
    let last = recorder.copy(&chain.out.slice()?, &kept.slice()?)?;
    let mut list = recorder.finish()?;
    list.replay(&stream, &Patches::new())?;
    stream.wait()?;
    ensure(kept.read(&stream, "the copied result")? == expected, || {
        "recorded copies and launches give other bits".into()
    })?;
    let own = chain.direct(&stream, &values(1), ROWS)?;
    let mut patches = Patches::new();
    patches.input(0, 0, &second.slice()?).output(last, 0, &elsewhere.slice()?);
    list.replay(&stream, &patches)?;
    stream.wait()?;
    ensure(elsewhere.read(&stream, "the patched target")? == own, || "patched copies give other bits".into())?;
    ensure(kept.read(&stream, "the recorded target")? == expected, || {
        "a copy with another target wrote to the one that was recorded".into()
    })
}

/// More commands than a driver's ring takes at once.
fn long(subject: &Subject) -> Checked {
    const PAIRS: usize = 1200;
    let stream = stream(subject)?;
    let chain = Chain::new(subject, &stream, 4)?;
    let there = chain.args(&chain.x, &chain.out, 1)?;
    let back = chain.args(&chain.out, &chain.x, 1)?;
    for args in [&there, &back].into_iter().cycle().take(2 * PAIRS) {
        chain.plan.launch(&stream, args)?;
    }
    stream.wait()?;
    let expected = chain.x.read(&stream, "the result")?;
    stream.copy_from_host(&values(4), &chain.x.slice()?)?;
    let mut recorder = subject.device.record()?;
    for args in [&there, &back].into_iter().cycle().take(2 * PAIRS) {
        recorder.launch(&chain.plan, args)?;
    }
    let mut list = recorder.finish()?;
    list.replay(&stream, &Patches::new())?;
    stream.wait()?;
    ensure(chain.x.read(&stream, "the result")? == expected, || {
        format!("a list of {} launches gives other bits than the launches", 2 * PAIRS)
    })
}

/// Recorded by one stream's user, replayed on another behind an event; a third reads behind an event of the replay.
fn events(subject: &Subject) -> Checked {
    let [writer, worker, reader] = [stream(subject)?, stream(subject)?, stream(subject)?];
    let (written, computed) = (event(subject)?, event(subject)?);
    let chain = Chain::new(subject, &writer, 1)?;
    let slow = buffers(subject, 2)?;
    let other = Guarded::new(&subject.device, &writer, BYTES, NAN, QHAL_USAGE_ACTIVATION)?;
    let kept = Guarded::new(&subject.device, &writer, BYTES, NAN, QHAL_USAGE_ACTIVATION)?;
    let mut list = chain.record(ROWS)?;
    for seed in 10..14 {
        let expected = chain.direct(&writer, &values(seed), ROWS)?;
        writer.copy_from_host(&values(seed), &other.slice()?)?;
        for _ in 0..20 {
            writer.copy(&slow[0].whole(), &slow[1].whole())?;
        }
        writer.copy(&other.slice()?, &chain.x.slice()?)?;
        writer.record(&written)?;
        worker.wait_event(&written)?;
        list.replay(&worker, &Patches::new())?;
        worker.record(&computed)?;
        reader.wait_event(&computed)?;
        reader.copy(&chain.out.slice()?, &kept.slice()?)?;
        reader.wait()?;
        worker.wait()?;
        ensure(kept.read(&reader, "the result")? == expected, || {
            "a replay did not wait for an event of another stream, or an event behind a replay came too early".into()
        })?;
    }
    Ok(())
}

/// Behind a failure, of the stream itself or inherited by an event, a replay does nothing and tells of it.
fn failed_stream(subject: &Subject) -> Checked {
    let [failing, waiting, whole] = [stream(subject)?, stream(subject)?, stream(subject)?];
    let chain = Chain::new(subject, &whole, 1)?;
    let mut list = chain.record(ROWS)?;
    let marker = event(subject)?;
    fail(&subject.device, &failing)?;
    let recorded = failing.record(&marker);
    let replayed = list.replay(&failing, &Patches::new());
    ensure(replayed.is_err() || failing.wait().is_err(), || "a replay on a failed stream reports no error".into())?;
    if recorded.is_ok() {
        let waited = waiting.wait_event(&marker);
        let replayed = list.replay(&waiting, &Patches::new());
        ensure(waited.is_err() || replayed.is_err() || waiting.wait().is_err(), || {
            "a replay behind an event of a failed stream reports no error".into()
        })?;
    }
    ensure(chain.result(&whole)?.iter().all(|byte| *byte == NAN), || "a replay on a failed stream computed".into())?;
    // The list itself is not broken by that.
    let expected = chain.direct(&whole, &values(1), ROWS)?;
    list.replay(&whole, &Patches::new())?;
    ensure(chain.result(&whole)? == expected, || "after a failed stream a list gives other bits".into())
}

/// A list and a stream for each thread.
fn threads(subject: &Subject) -> Checked {
    let work = |seed: u8| -> Checked {
        let stream = stream(subject)?;
        let chain = Chain::new(subject, &stream, seed.into())?;
        let expected = chain.direct(&stream, &values(seed.into()), ROWS)?;
        let mut list = chain.record(ROWS)?;
        for _ in 0..10 {
            list.replay(&stream, &Patches::new())?;
            ensure(chain.result(&stream)? == expected, || "lists of several threads disturb each other".into())?;
            chain.poison(&stream)?;
        }
        Ok(())
    };
    in_threads(4, &work)
}

/// A list by its handle, destroyed when dropped.
struct RawList<'a> {
    table: &'a qhal_cmdlist_api,
    raw: *mut qhal_cmdlist,
}

impl<'a> RawList<'a> {
    fn begin(subject: &Subject, table: &'a qhal_cmdlist_api) -> Result<Self, Trouble> {
        let mut raw = std::ptr::null_mut();
        let (status, err) = raw!(table, begin(subject.device.raw_handle(), &raw mut raw));
        ensure(status == QHAL_OK && !raw.is_null(), || format!("begin: {} {}", status_name(status), text(&err)))?;
        Ok(Self { table, raw })
    }

    /// Both launches of a chain, ended.
    fn of(subject: &Subject, table: &'a qhal_cmdlist_api, chain: &Chain) -> Result<Self, Trouble> {
        let list = Self::begin(subject, table)?;
        for args in chain.launches(ROWS)? {
            let (raw_args, plan) = (args.raw(), chain.plan.raw_handle());
            let (status, err) = raw!(table, record_launch(list.raw, plan, &raw const raw_args));
            ensure(status == QHAL_OK, || format!("record_launch: {} {}", status_name(status), text(&err)))?;
        }
        let (status, err) = raw!(table, end(list.raw));
        ensure(status == QHAL_OK, || format!("end: {} {}", status_name(status), text(&err)))?;
        Ok(list)
    }

    fn replay(&self, stream: &Stream, patches: &[qhal_patch]) -> (qhal_status, qhal_error) {
        raw!(self.table, replay(self.raw, stream.raw_handle(), patches.as_ptr(), patches.len() as u32))
    }
}

impl Drop for RawList<'_> {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            let _ = raw!(self.table, destroy(self.raw));
        }
    }
}

/// A list that is destroyed while a replay is pending: refused, or the replay ends as it would have.
fn destroyed_in_flight(subject: &Subject) -> Checked {
    let table = table(subject)?;
    let stream = stream(subject)?;
    let chain = Chain::new(subject, &stream, 6)?;
    let expected = chain.direct(&stream, &values(6), ROWS)?;
    let slow = buffers(subject, 2)?;
    for safe in [false, true] {
        chain.poison(&stream)?;
        for _ in 0..10 {
            stream.copy(&slow[0].whole(), &slow[1].whole())?;
        }
        if safe {
            let mut list = chain.record(ROWS)?;
            list.replay(&stream, &Patches::new())?;
        } else {
            let mut list = RawList::of(subject, table, &chain)?;
            let (status, err) = list.replay(&stream, &[]);
            ensure(status == QHAL_OK, || format!("replay: {} {}", status_name(status), text(&err)))?;
            let (status, _) = raw!(table, destroy(list.raw));
            if status == QHAL_OK {
                list.raw = std::ptr::null_mut();
            }
            ensure(matches!(status, QHAL_OK | QHAL_FAILED_PRECONDITION), || {
                format!("destroy in flight: expected OK or FAILED_PRECONDITION, found {}", status_name(status))
            })?;
            stream.wait()?;
        }
        ensure(chain.result(&stream)? == expected, || {
            "a replay gives other bits when its list is destroyed while it is pending".into()
        })?;
    }
    Ok(())
}

/// Arguments with memory of their own for every operand of a plan.
fn some_args(device: &Device, plan: &Plan) -> Result<(LaunchArgs, Vec<Buffer>), Trouble> {
    let mut args = LaunchArgs::new(plan);
    let mut kept = Vec::new();
    let mut memory = |bytes: u64| {
        let buffer = device.alloc(&BufferDesc::new(bytes, QHAL_USAGE_ACTIVATION, Scope::Temporary, "check"))?;
        kept.push(buffer.clone());
        Ok::<_, Trouble>(buffer.whole())
    };
    for i in 0..plan.num_inputs() {
        let packed = plan.info().packed_bytes.get(i).copied().unwrap_or(0);
        let bytes = packed.max(if packed > 0 { 0 } else { plan.input_bytes(i) });
        if bytes > 0 {
            // Starts of queries have one element more than their description says.
            args.set_input(i, &memory(bytes + 4)?);
        }
    }
    for o in 0..plan.num_outputs() {
        args.set_output(o, &memory(plan.output_bytes(o).max(1))?);
    }
    if plan.info().workspace_bytes > 0 {
        args.set_workspace(&memory(plan.info().workspace_bytes)?);
    }
    Ok((args, kept))
}

/// What a plan says of itself holds: one that is not capture-safe is refused by the plugin, others are recorded.
fn capture_safe(subject: &Subject) -> Checked {
    let table = table(subject)?;
    let device = &subject.device;
    let (mut safe, mut refusals) = (0, 0);
    for case in ops::cases(2) {
        let Body::Op(case) = case.body else { continue };
        let Ok(plan) = plan(device, &case.op) else { continue };
        let (args, _memory) = some_args(device, &plan)?;
        let list = RawList::begin(subject, table)?;
        let raw_args = args.raw();
        let answer = raw!(table, record_launch(list.raw, plan.raw_handle(), &raw const raw_args));
        let name = case.op.name();
        if plan.info().flags & QHAL_PLAN_CAPTURE_SAFE != 0 {
            safe += 1;
            ensure(answer.0 == QHAL_OK, || {
                format!(
                    "record_launch of {name}: the plan is capture-safe, found {} {}",
                    status_name(answer.0),
                    text(&answer.1)
                )
            })?;
        } else {
            refusals += 1;
            ensure(answer.0 == QHAL_FAILED_PRECONDITION, || {
                let found = status_name(answer.0);
                format!(
                    "record_launch of {name}: the plan is not capture-safe, expected FAILED_PRECONDITION, found {found}"
                )
            })?;
            refused("record_launch", answer)?;
        }
    }
    ensure(safe + refusals > 0, || "command lists are claimed, and there is no op to record".into())
}

const fn patch(command: u32, kind: u32, index: u32, slice: qhal_slice, value: i64) -> qhal_patch {
    qhal_patch { struct_size: size_of::<qhal_patch>() as u32, command, kind, index, slice, value }
}

fn refusals(subject: &Subject) -> Checked {
    let table = table(subject)?;
    let stream = stream(subject)?;
    let chain = Chain::new(subject, &stream, 7)?;
    let mut none = std::ptr::null_mut();
    refused("begin without a device", raw!(table, begin(std::ptr::null_mut(), &raw mut none)))?;
    refused("end without a list", raw!(table, end(std::ptr::null_mut())))?;
    let open = RawList::begin(subject, table)?;
    let args = chain.launches(ROWS)?[0].clone();
    let (raw_args, plan) = (args.raw(), chain.plan.raw_handle());
    refused(
        "record_launch without a plan",
        raw!(table, record_launch(open.raw, std::ptr::null_mut(), &raw const raw_args)),
    )?;
    refused("record_launch without arguments", raw!(table, record_launch(open.raw, plan, std::ptr::null())))?;
    let host = [0_u8; 64];
    let from_host = qhal_copy_desc { dst: chain.x.slice()?.raw(), src_host: host.as_ptr().cast(), ..copy_desc(64) };
    refused("record_copy with host memory", raw!(table, record_copy(open.raw, &raw const from_host)))?;
    refused("replay of a list that has not ended", open.replay(&stream, &[]))?;
    let list = RawList::of(subject, table, &chain)?;
    refused("record_launch behind the end", raw!(table, record_launch(list.raw, plan, &raw const raw_args)))?;
    refused("a second end", raw!(table, end(list.raw)))?;
    let x = chain.x.slice()?.raw();
    let beyond = qhal_slice { offset: 1 << 40, ..x };
    let good = patch(1, QHAL_PATCH_INPUT, 0, x, 0);
    for (what, patches) in [
        ("a patch of a command that is not there", vec![patch(2, QHAL_PATCH_INPUT, 0, x, 0)]),
        ("a patch of an operand that is not there", vec![patch(0, QHAL_PATCH_INPUT, 9, x, 0)]),
        ("a patch of a symbol that is not there", vec![patch(0, QHAL_PATCH_SYMBOL, 9, NO_SLICE, 1)]),
        ("a patch of an unknown kind", vec![patch(0, 77, 0, x, 0)]),
        ("a patch without a buffer", vec![patch(0, QHAL_PATCH_INPUT, 0, NO_SLICE, 0)]),
        ("a patch beyond its buffer", vec![good, patch(1, QHAL_PATCH_OUTPUT, 0, beyond, 0)]),
        ("patches that are not sorted", vec![good, patch(0, QHAL_PATCH_SYMBOL, 0, NO_SLICE, 1)]),
    ] {
        refused(what, list.replay(&stream, &patches))?;
    }
    ensure(chain.result(&stream)?.iter().all(|byte| *byte == NAN), || "a replay that was refused computed".into())?;
    // Nothing is broken by that.
    let expected = chain.direct(&stream, &values(7), ROWS)?;
    let (status, err) = list.replay(&stream, &[]);
    ensure(status == QHAL_OK, || format!("replay after refusals: {} {}", status_name(status), text(&err)))?;
    ensure(chain.result(&stream)? == expected, || "after refusals a replay gives other bits".into())?;
    // The host's own checks.
    let mut list = chain.record(ROWS)?;
    for patches in [
        Patches::new().symbol(0, 0, ROWS as i64 + 1).clone(),
        Patches::new().input(0, 0, &chain.x.buffer.slice(0, 4)?).clone(),
        Patches::new().input(2, 0, &chain.x.slice()?).clone(),
        Patches::new().output(0, 1, &chain.x.slice()?).clone(),
    ] {
        if list.replay(&stream, &patches).is_ok() {
            return failed("the host lets a replay pass whose patches do not fit");
        }
    }
    upload(&stream, &chain.x.buffer, 0, &[0])
}
