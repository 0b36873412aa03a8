//! Level 3 against seeded bugs: the CPU backend's command lists, and collectives over its memory, with one defect each; and a missed event
//! on a device that works asynchronously. Every defect must be the failure of the case that is there for it.
#![expect(
    clippy::undocumented_unsafe_blocks,
    clippy::unwrap_used,
    reason = "the defects forward to the backend with what the host passed; helpers are part of tests"
)]

mod common;
#[path = "common/team.rs"]
mod team;

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock};

use common::subject;
use qwen_hal::abi::*;
use qwen_hal_check::{Outcome, Record, Selection, run};
use team::Bug;

type Error = *mut qhal_error;

static CPU: OnceLock<qhal_plugin_api> = OnceLock::new();
static OWN: OnceLock<qhal_cmdlist_api> = OnceLock::new();
/// What the next table of command lists has.
static LISTS: Mutex<Option<qhal_cmdlist_api>> = Mutex::new(None);

fn cpu() -> &'static qhal_plugin_api {
    CPU.get().unwrap()
}

/// Calls the CPU backend's command lists.
macro_rules! own {
    ($entry:ident($($arg:expr),*)) => { unsafe { (OWN.get().unwrap().$entry.unwrap())($($arg),*) } };
}

/// A replay with other patches.
macro_rules! patched {
    ($name:ident, |$patches:ident| $change:expr) => {
        unsafe extern "C" fn $name(
            l: *mut qhal_cmdlist,
            s: *mut qhal_stream,
            patches: *const qhal_patch,
            count: u32,
            e: Error,
        ) -> i32 {
            let given = if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(patches, count as usize) } };
            #[allow(unused_mut, reason = "some defects only read")]
            let mut $patches = given.to_vec();
            let patches: Vec<qhal_patch> = $change;
            own!(replay(l, s, patches.as_ptr(), patches.len() as u32, e))
        }
    };
}
fn without(patches: Vec<qhal_patch>, kind: u32) -> Vec<qhal_patch> {
    patches.into_iter().filter(|patch| patch.kind != kind).collect()
}
patched!(deaf_to_inputs, |patches| without(patches, QHAL_PATCH_INPUT));
patched!(deaf_to_outputs, |patches| without(patches, QHAL_PATCH_OUTPUT));
patched!(stale_values, |patches| without(patches, QHAL_PATCH_SYMBOL));
patched!(first_patch_only, |patches| {
    let first = patches.first().map(|patch| patch.command);
    patches.into_iter().filter(|patch| Some(patch.command) == first).collect()
});
static REMEMBERED: Mutex<Vec<usize>> = Mutex::new(Vec::new());
patched!(patches_stay, |patches| {
    // Addresses of leaked patches: handles are no Send.
    let mut remembered = REMEMBERED.lock().unwrap();
    if !patches.is_empty() {
        *remembered =
            patches.iter().map(|patch| std::ptr::from_ref(Box::leak(Box::new(*patch))).expose_provenance()).collect();
    }
    let of = |at: &usize| unsafe { *std::ptr::with_exposed_provenance::<qhal_patch>(*at) };
    if patches.is_empty() { remembered.iter().map(of).collect() } else { patches }
});
unsafe extern "C" fn ignores_failures(
    l: *mut qhal_cmdlist,
    s: *mut qhal_stream,
    patches: *const qhal_patch,
    count: u32,
    e: Error,
) -> i32 {
    let failed = !s.is_null() && unsafe { (cpu().stream_wait.unwrap())(s, 0, std::ptr::null_mut()) } != QHAL_OK;
    if !failed {
        return own!(replay(l, s, patches, count, e));
    }
    // On another stream, as if this one had not failed.
    let (mut device, mut other) = (std::ptr::null_mut(), std::ptr::null_mut());
    unsafe {
        (cpu().device_open.unwrap())(0, std::ptr::null(), 0, &raw mut device, e);
        (cpu().stream_create.unwrap())(device, std::ptr::null(), &raw mut other, e);
    }
    own!(replay(l, other, patches, count, e))
}
unsafe extern "C" fn refuses_late(
    l: *mut qhal_cmdlist,
    s: *mut qhal_stream,
    patches: *const qhal_patch,
    count: u32,
    e: Error,
) -> i32 {
    // Computes with what was recorded before it looks at the patches.
    let status = own!(replay(l, s, patches, count, e));
    if status != QHAL_OK && count > 0 {
        own!(replay(l, s, std::ptr::null(), 0, std::ptr::null_mut()));
    }
    status
}
static RECORDED: AtomicU32 = AtomicU32::new(0);
unsafe extern "C" fn forgets_the_second(
    l: *mut qhal_cmdlist,
    p: *mut qhal_plan,
    args: *const qhal_launch_args,
    e: Error,
) -> i32 {
    match RECORDED.fetch_add(1, Ordering::Relaxed) % 2 {
        0 => own!(record_launch(l, p, args, e)),
        _ => QHAL_OK,
    }
}
unsafe extern "C" fn computes_while_recording(
    l: *mut qhal_cmdlist,
    p: *mut qhal_plan,
    args: *const qhal_launch_args,
    e: Error,
) -> i32 {
    let status = own!(record_launch(l, p, args, e));
    let (mut device, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
    if status == QHAL_OK {
        unsafe {
            (cpu().device_open.unwrap())(0, std::ptr::null(), 0, &raw mut device, e);
            (cpu().stream_create.unwrap())(device, std::ptr::null(), &raw mut stream, e);
            (cpu().plan_launch.unwrap())(p, stream, args, e);
        }
    }
    status
}
/// Longer rows than were asked for: bytes behind the output.
unsafe extern "C" fn copies_too_much(l: *mut qhal_cmdlist, desc: *const qhal_copy_desc, e: Error) -> i32 {
    let mut desc = unsafe { *desc };
    (desc.row_bytes, desc.src.size, desc.dst.size) = (desc.row_bytes + 8, desc.src.size + 8, desc.dst.size + 8);
    own!(record_copy(l, &raw const desc, e))
}
unsafe extern "C" fn never_ends(_: *mut qhal_cmdlist, _: Error) -> i32 {
    QHAL_OK
}
unsafe extern "C" fn not_capture_safe(
    d: *mut qhal_device,
    desc: *const qhal_op_desc,
    opts: *const qhal_plan_opts,
    out: *mut *mut qhal_plan,
    info: *mut qhal_plan_info,
    e: Error,
) -> i32 {
    let status = unsafe { (cpu().plan_create.unwrap())(d, desc, opts, out, info, e) };
    // All but silu, which the other cases need.
    if status == QHAL_OK && unsafe { (*desc).op_kind } != ops::QHAL_OP_UNARY {
        unsafe { (*info).flags &= !QHAL_PLAN_CAPTURE_SAFE };
    }
    status
}
unsafe extern "C" fn other_lists(d: *mut qhal_device, id: u32, v: u32, out: *mut *const c_void, e: Error) -> i32 {
    let status = unsafe { (cpu().query_extension.unwrap())(d, id, v, out, e) };
    if status == QHAL_OK && id == QHAL_EXT_CMDLIST {
        let table: &'static qhal_cmdlist_api = Box::leak(Box::new(LISTS.lock().unwrap().unwrap()));
        unsafe { *out = std::ptr::from_ref(table).cast() };
    }
    status
}
unsafe extern "C" fn no_lists(d: *mut qhal_device, id: u32, v: u32, out: *mut *const c_void, e: Error) -> i32 {
    let id = if id == QHAL_EXT_CMDLIST { 0xffff_0000 } else { id };
    unsafe { (cpu().query_extension.unwrap())(d, id, v, out, e) }
}
unsafe extern "C" fn claims_regions(d: *mut qhal_device, out: *mut qhal_device_caps, e: Error) -> i32 {
    let status = unsafe { (cpu().device_caps.unwrap())(d, out, e) };
    unsafe { (*out).features |= QHAL_FEATURE_REGION };
    status
}
unsafe extern "C" fn claims_no_lists(d: *mut qhal_device, out: *mut qhal_device_caps, e: Error) -> i32 {
    let status = unsafe { (cpu().device_caps.unwrap())(d, out, e) };
    unsafe { (*out).features &= !QHAL_FEATURE_CMDLIST };
    status
}

enum Defect {
    Lists(fn(&mut qhal_cmdlist_api)),
    Table(fn(&mut qhal_plugin_api)),
    Team(Bug),
}
use Defect::{Lists, Table, Team};

/// (name, the case that is there for it, the defect).
const SEEDED: &[(&str, &str, Defect)] = &[
    ("patched inputs are ignored", "cmdlist/patched_slices", Lists(|t| t.replay = Some(deaf_to_inputs))),
    ("patched outputs are ignored", "cmdlist/patched_slices", Lists(|t| t.replay = Some(deaf_to_outputs))),
    ("patched values are stale", "cmdlist/patched_values", Lists(|t| t.replay = Some(stale_values))),
    ("only the first command is patched", "cmdlist/patched_values", Lists(|t| t.replay = Some(first_patch_only))),
    ("patches outlive their replay", "cmdlist/patched_slices", Lists(|t| t.replay = Some(patches_stay))),
    ("a replay does not see failures before it", "cmdlist/failed_stream", Lists(|t| t.replay = Some(ignores_failures))),
    ("a refused replay has computed", "cmdlist/refusals", Lists(|t| t.replay = Some(refuses_late))),
    ("a launch is not recorded", "cmdlist/replay", Lists(|t| t.record_launch = Some(forgets_the_second))),
    ("recording computes", "cmdlist/replay", Lists(|t| t.record_launch = Some(computes_while_recording))),
    ("a recorded copy writes past the end", "cmdlist/copies", Lists(|t| t.record_copy = Some(copies_too_much))),
    ("a list never ends", "cmdlist/replay", Lists(|t| t.end = Some(never_ends))),
    ("functions are missing", "cmdlist/claim", Lists(|t| t.record_copy = None)),
    ("plans are recorded that may not be", "cmdlist/capture_safe", Table(|t| t.plan_create = Some(not_capture_safe))),
    ("a claim without a table", "cmdlist/claim", Table(|t| t.query_extension = Some(no_lists))),
    ("a table without a claim", "cmdlist/claim", Table(|t| t.device_caps = Some(claims_no_lists))),
    ("regions are claimed", "region/claim", Table(|t| t.device_caps = Some(claims_regions))),
    ("the last rank is lost", "collectives/all_reduce.3", Team(Bug::LosesLastRank)),
    ("sums in order begin with the last rank", "collectives/all_reduce.3", Team(Bug::SumsBackwards)),
    ("the last element is not reduced", "collectives/reduce_scatter.2", Team(Bug::ReducesOneShort)),
    ("sums are in order of arrival", "collectives/determinism", Team(Bug::SumsAsTheyCome)),
    ("ranks get different bits", "collectives/all_reduce.2", Team(Bug::RanksDiffer)),
    ("parts are of the neighbour", "collectives/all_gather.4", Team(Bug::SwapsParts)),
    ("targets are written past their end", "collectives/broadcast.3", Team(Bug::WritesPastTheEnd)),
    ("the root is always 0", "collectives/broadcast.2", Team(Bug::RootIsZero)),
    ("parts that do not fit are exchanged", "collectives/mismatch", Team(Bug::AnythingFits)),
    ("a missing rank is not missed", "collectives/missing_rank", Team(Bug::NobodyIsMissed)),
    ("a failed communicator goes on", "collectives/mismatch", Team(Bug::GoesOnAfterFailure)),
    ("a target is written before sources are read", "collectives/in_place", Team(Bug::WritesBeforeAllHaveRead)),
    ("all types are claimed", "collectives/supports", Team(Bug::ClaimsAllTypes)),
];

static CHOSEN: AtomicU32 = AtomicU32::new(u32::MAX);

unsafe extern "C" fn query(major: u32, minor: u32, host: *const qhal_host_api) -> *const qhal_plugin_api {
    let original = unsafe { qwen_cpu::query(major, minor, host) };
    let mut table = *CPU.get_or_init(|| unsafe { *original });
    let own = OWN.get_or_init(|| {
        let mut own = std::ptr::null();
        let query = cpu().query_extension.unwrap();
        unsafe {
            query(std::ptr::null_mut(), QHAL_EXT_CMDLIST, 1, &raw mut own, std::ptr::null_mut());
            *own.cast()
        }
    });
    match SEEDED.get(CHOSEN.load(Ordering::Relaxed) as usize) {
        Some((_, _, Lists(defect))) => {
            let mut lists = *own;
            defect(&mut lists);
            *LISTS.lock().unwrap() = Some(lists);
            table.query_extension = Some(other_lists);
        }
        Some((_, _, Table(defect))) => defect(&mut table),
        Some((_, _, Team(bug))) => team::add(&mut table, *bug),
        None => team::add(&mut table, Bug::None),
    }
    Box::leak(Box::new(table))
}

const PLUGIN: LinkedPlugin = unsafe { LinkedPlugin::new(qwen_cpu::manifest, query) };

fn records(plugin: &LinkedPlugin, case: &str) -> Vec<Record> {
    let selection = Selection { filter: Some(case.to_owned()), ..Selection::level(3) };
    run(&subject(plugin, 2).unwrap(), &selection, &mut |_| {}, &mut |_| {})
}

/// One test, because the defects share statics.
#[test]
fn every_seeded_bug_is_caught() {
    // Without a defect everything passes that is not refused.
    let whole = records(&PLUGIN, "3/");
    let failed: Vec<&Record> = whole.iter().filter(|record| record.outcome == Outcome::Failed).collect();
    assert!(whole.len() > 50 && failed.is_empty(), "{failed:#?}");
    let mut missed = Vec::new();
    for (at, (name, case, _)) in SEEDED.iter().enumerate() {
        let passes = |record: &&Record| record.outcome == Outcome::Passed || *case == "region/claim";
        assert!(whole.iter().find(|record| record.name.contains(case)).as_ref().is_some_and(passes), "{case}");
        CHOSEN.store(at as u32, Ordering::Relaxed);
        match records(&PLUGIN, case).iter().find(|record| record.outcome == Outcome::Failed) {
            Some(record) => println!("{name}: {} ({})", record.name, record.message),
            None => missed.push(*name),
        }
    }
    assert!(missed.is_empty(), "not caught: {missed:#?}");
}

static SIM: OnceLock<qhal_plugin_api> = OnceLock::new();
unsafe extern "C" fn missed_event(_: *mut qhal_stream, _: *mut qhal_event, _: Error) -> i32 {
    QHAL_OK
}
unsafe extern "C" fn deaf_sim(major: u32, minor: u32, host: *const qhal_host_api) -> *const qhal_plugin_api {
    let original = unsafe { (hal_sim::PLUGIN.query())(major, minor, host) };
    SIM.get_or_init(|| qhal_plugin_api { stream_wait_event: Some(missed_event), ..unsafe { *original } })
}

/// On a simulated chip work is not done when a call returns, so that a missed event gives wrong results.
#[test]
fn a_replay_that_misses_an_event_is_caught() {
    let deaf = unsafe { LinkedPlugin::new(hal_sim::PLUGIN.manifest(), deaf_sim) };
    let outcome = |plugin: &LinkedPlugin| records(plugin, "cmdlist/events")[0].clone();
    let (whole, deaf) = (outcome(&hal_sim::PLUGIN), outcome(&deaf));
    assert_eq!(whole.outcome, Outcome::Passed, "{}", whole.message);
    assert_eq!(deaf.outcome, Outcome::Failed, "a missed event is not caught");
}
