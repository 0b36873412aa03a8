//! The suite against seeded bugs: the CPU backend's table with one defect each. Every defect must be the failure of the case
//! that is there for it.
#![expect(
    clippy::undocumented_unsafe_blocks,
    clippy::unwrap_used,
    reason = "the defects forward to the CPU backend with what the host passed; helpers are part of tests"
)]

mod common;

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use common::subject;
use qwen_hal::abi::ops::*;
use qwen_hal::abi::*;
use qwen_hal_check::{Outcome, Selection, run, run_with_threads};

type Error = *mut qhal_error;

static CPU: OnceLock<qhal_plugin_api> = OnceLock::new();
static CALLS: AtomicU32 = AtomicU32::new(0);
static THREADS: AtomicU32 = AtomicU32::new(0);

fn cpu() -> &'static qhal_plugin_api {
    CPU.get().unwrap()
}

/// Calls the CPU backend.
macro_rules! cpu {
    ($entry:ident($($arg:expr),*)) => { unsafe { (cpu().$entry.unwrap())($($arg),*) } };
}

unsafe extern "C" fn alloc_one_short(
    d: *mut qhal_device,
    desc: *const qhal_buffer_desc,
    out: *mut *mut qhal_buffer,
    e: Error,
) -> i32 {
    let mut desc = unsafe { *desc };
    desc.size -= u64::from(desc.size > 1);
    cpu!(buffer_alloc(d, &raw const desc, out, e))
}
unsafe extern "C" fn never_freed(_: *mut qhal_buffer, _: Error) -> i32 {
    QHAL_OK
}
unsafe extern "C" fn copy_one_short(s: *mut qhal_stream, desc: *const qhal_copy_desc, e: Error) -> i32 {
    let mut desc = unsafe { *desc };
    desc.row_bytes -= u64::from(desc.row_bytes > 200);
    cpu!(copy(s, &raw const desc, e))
}
unsafe extern "C" fn copy_one_beyond(s: *mut qhal_stream, desc: *const qhal_copy_desc, e: Error) -> i32 {
    let (status, dst) = (cpu!(copy(s, desc, e)), unsafe { (*desc).dst });
    if status == QHAL_OK && !dst.buffer.is_null() {
        touch(&dst, dst.size, &[0]);
    }
    status
}
unsafe extern "C" fn copy_without_pitch(s: *mut qhal_stream, desc: *const qhal_copy_desc, e: Error) -> i32 {
    let mut desc = unsafe { *desc };
    desc.dst_pitch = desc.row_bytes;
    cpu!(copy(s, &raw const desc, e))
}
unsafe extern "C" fn copy_without_bounds(s: *mut qhal_stream, desc: *const qhal_copy_desc, e: Error) -> i32 {
    match cpu!(copy(s, desc, e)) {
        QHAL_OUT_OF_RANGE => QHAL_OK,
        other => other,
    }
}
unsafe extern "C" fn fill_first_byte(
    s: *mut qhal_stream,
    dst: qhal_slice,
    pattern: *const c_void,
    n: u32,
    e: Error,
) -> i32 {
    cpu!(fill(s, dst, pattern, n.min(if n == 3 { 3 } else { 1 }), e))
}
unsafe extern "C" fn missed_event(_: *mut qhal_stream, _: *mut qhal_event, _: Error) -> i32 {
    QHAL_OK
}
unsafe extern "C" fn deaf_event_wait(_: *mut qhal_event, _: u64, _: Error) -> i32 {
    QHAL_OK
}
unsafe extern "C" fn deaf_stream_wait(s: *mut qhal_stream, t: u64, e: Error) -> i32 {
    let status = cpu!(stream_wait(s, t, e));
    if s.is_null() { status } else { QHAL_OK }
}
unsafe extern "C" fn any_device(_: u32, out: *mut qhal_device_info, e: Error) -> i32 {
    cpu!(device_info(0, out, e))
}
unsafe extern "C" fn long_record(i: u32, out: *mut qhal_device_info, e: Error) -> i32 {
    let status = cpu!(device_info(i, out, e));
    if unsafe { (*out).struct_size } as usize > size_of::<qhal_device_info>() {
        unsafe { out.add(1).cast::<u64>().write(0) };
    }
    status
}
unsafe extern "C" fn moody_caps(d: *mut qhal_device, out: *mut qhal_device_caps, e: Error) -> i32 {
    let status = cpu!(device_caps(d, out, e));
    if status == QHAL_OK && CALLS.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
        unsafe { (*out).features |= QHAL_FEATURE_EVENT_TIMING };
    }
    status
}
unsafe extern "C" fn silent_refusal(i: u32, o: *const qhal_kv, n: u32, out: *mut *mut qhal_device, _: Error) -> i32 {
    cpu!(device_open(i, o, n, out, null_mut()))
}
unsafe extern "C" fn claims_all(
    d: *mut qhal_device,
    desc: *const qhal_op_desc,
    out: *mut qhal_support,
    e: Error,
) -> i32 {
    let status = cpu!(op_supports(d, desc, out, e));
    if status == QHAL_OK {
        unsafe { (*out).level = QHAL_SUPPORT_NATIVE };
    }
    status
}
/// Each seventh answer is no.
unsafe extern "C" fn forgets(d: *mut qhal_device, desc: *const qhal_op_desc, out: *mut qhal_support, e: Error) -> i32 {
    let status = cpu!(op_supports(d, desc, out, e));
    if status == QHAL_OK && CALLS.fetch_add(1, Ordering::Relaxed).is_multiple_of(7) {
        unsafe { ((*out).level, (*out).reason) = (QHAL_SUPPORT_NO, [b'x'; 128]) };
        unsafe { (*out).reason[1] = 0 };
    }
    status
}

/// A description with other attributes.
fn with_attrs<R>(
    desc: *const qhal_op_desc,
    change: impl Fn(u32, &mut qhal_attr),
    call: impl FnOnce(*const qhal_op_desc) -> R,
) -> R {
    let mut desc = unsafe { *desc };
    if desc.num_attrs > 64 || desc.attrs.is_null() {
        return call(&raw const desc);
    }
    let mut attrs = unsafe { std::slice::from_raw_parts(desc.attrs, desc.num_attrs as usize) }.to_vec();
    attrs.iter_mut().for_each(|attr| change(desc.op_kind, attr));
    desc.attrs = attrs.as_ptr();
    call(&raw const desc)
}
fn real(attr: &mut qhal_attr, value: impl Fn(f64) -> f64) {
    *attr = qhal_attr::real(attr.key, value(attr.as_real().unwrap_or(0.0)));
}
fn int(attr: &mut qhal_attr, value: impl Fn(i64) -> i64) {
    *attr = qhal_attr::int(attr.key, value(attr.as_int().unwrap_or(0)));
}

/// plan_create and op_supports of a description that was understood otherwise.
macro_rules! misread {
    ($name:ident, $supports:ident, $change:expr) => {
        unsafe extern "C" fn $name(
            d: *mut qhal_device,
            desc: *const qhal_op_desc,
            opts: *const qhal_plan_opts,
            out: *mut *mut qhal_plan,
            info: *mut qhal_plan_info,
            e: Error,
        ) -> i32 {
            with_attrs(desc, $change, |desc| cpu!(plan_create(d, desc, opts, out, info, e)))
        }
        unsafe extern "C" fn $supports(
            d: *mut qhal_device,
            desc: *const qhal_op_desc,
            out: *mut qhal_support,
            e: Error,
        ) -> i32 {
            with_attrs(desc, $change, |desc| cpu!(op_supports(d, desc, out, e)))
        }
    };
}
misread!(wrong_scale, wrong_scale_s, |kind, attr| {
    if kind == QHAL_OP_ATTENTION && attr.key == QHAL_ATTR_SCALE {
        real(attr, |scale| scale * 1.01);
    }
});
misread!(no_epsilon, no_epsilon_s, |_, attr| {
    if attr.key == QHAL_ATTR_EPS {
        real(attr, |_| 0.0);
    }
});
misread!(other_style, other_style_s, |_, attr| {
    if attr.key == QHAL_ATTR_STYLE && attr.as_int().is_some_and(|style| style < 2) {
        int(attr, |style| 1 - style);
    }
});
misread!(wide_window, wide_window_s, |_, attr| {
    if attr.key == QHAL_ATTR_WINDOW {
        int(attr, |window| if window > 0 { window + 1 } else { window });
    }
});
misread!(guesses, guesses_s, |_, attr| {
    if attr.key == QHAL_ATTR_FUNCTION && attr.as_int().is_some_and(|function| function > 2) {
        int(attr, |_| 0);
    }
});
misread!(not_normalised, not_normalised_s, |_, attr| {
    if attr.key == QHAL_ATTR_RENORMALISE && attr.as_int() == Some(1) {
        int(attr, |_| 0);
    }
});
misread!(rope_offset, rope_offset_s, |_, attr| {
    if attr.key == QHAL_ATTR_ROTARY_OFFSET && attr.as_int() == Some(16) {
        int(attr, |_| 14);
    }
});

/// Products in eight bits where float32 was asked for.
unsafe extern "C" fn cheap_products(
    d: *mut qhal_device,
    desc: *const qhal_op_desc,
    opts: *const qhal_plan_opts,
    out: *mut *mut qhal_plan,
    info: *mut qhal_plan_info,
    e: Error,
) -> i32 {
    let mut cheap = unsafe { *desc };
    if cheap.op_kind == QHAL_OP_GEMM && cheap.compute == QHAL_COMPUTE_F32 {
        cheap.compute = QHAL_COMPUTE_I8_G32;
    }
    cpu!(plan_create(d, &raw const cheap, opts, out, info, e))
}

unsafe extern "C" fn packs_short(
    p: *mut qhal_plan,
    s: *mut qhal_stream,
    i: u32,
    src: qhal_slice,
    dst: qhal_slice,
    e: Error,
) -> i32 {
    let status = cpu!(plan_prepack(p, s, i, src, dst, e));
    touch(&dst, dst.size - 16, &[0; 16]);
    status
}

/// Bytes of a buffer.
fn touch(slice: &qhal_slice, at: u64, bytes: &[u8]) {
    let mut address = null_mut();
    let length = bytes.len() as u64;
    if cpu!(buffer_map(slice.buffer, slice.offset + at, length, QHAL_ACCESS_WRITE, &raw mut address, null_mut()))
        == QHAL_OK
    {
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address.cast(), bytes.len()) };
    }
}
fn flip(slice: &qhal_slice) {
    let mut address = null_mut();
    if cpu!(buffer_map(slice.buffer, slice.offset, 1, QHAL_ACCESS_WRITE, &raw mut address, null_mut())) == QHAL_OK {
        unsafe { *address.cast::<u8>() ^= 1 };
    }
}

/// A launch, and a defect after it.
macro_rules! after_launch {
    ($name:ident, |$args:ident| $defect:expr) => {
        unsafe extern "C" fn $name(
            p: *mut qhal_plan,
            s: *mut qhal_stream,
            args: *const qhal_launch_args,
            e: Error,
        ) -> i32 {
            let status = cpu!(plan_launch(p, s, args, e));
            let $args = unsafe { &*args };
            if status == QHAL_OK && $args.num_outputs > 0 {
                $defect;
            }
            status
        }
    };
}
fn output(args: &qhal_launch_args) -> qhal_slice {
    unsafe { *args.outputs }
}
fn rows(args: &qhal_launch_args) -> i64 {
    if args.num_symbols > 0 { unsafe { *args.symbol_values } } else { 0 }
}
after_launch!(writes_beyond, |args| touch(&output(args), output(args).size, &[0]));
after_launch!(writes_before, |args| {
    let mut before = output(args);
    before.offset -= u64::from(before.offset > 0);
    touch(&before, 0, &[0]);
});
after_launch!(workspace_overrun, |args| if !args.workspace.buffer.is_null() {
    touch(&args.workspace, args.workspace.size, &[0]);
});
after_launch!(forgets_last, |args| touch(&output(args), output(args).size - 4, &[0xff; 4]));
after_launch!(never_the_same, |args| if CALLS.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
    flip(&output(args));
});
after_launch!(alone_is_different, |args| if rows(args) == 1 {
    flip(&output(args));
});
after_launch!(clobbers_input, |args| if args.num_inputs > 0 {
    flip(unsafe { &*args.inputs });
});
after_launch!(counts_threads, |args| if THREADS.load(Ordering::Relaxed) > 1 {
    flip(&output(args));
});
/// Rows beyond the plan's range are cut off without a word.
unsafe extern "C" fn clamps_rows(
    p: *mut qhal_plan,
    s: *mut qhal_stream,
    args: *const qhal_launch_args,
    e: Error,
) -> i32 {
    let mut args = unsafe { *args };
    let value = rows(&args).min(8);
    if args.num_symbols == 1 {
        args.symbol_values = &raw const value;
    }
    cpu!(plan_launch(p, s, &raw const args, e))
}

/// (name, the case that is there for it, the defect).
type Seeded = (&'static str, &'static str, fn(&mut qhal_plugin_api));

const SEEDED: [Seeded; 37] = [
    ("buffers are a byte short", "memory/sizes", |t| t.buffer_alloc = Some(alloc_one_short)),
    ("freed memory stays in use", "device/health", |t| t.buffer_free = Some(never_freed)),
    ("copies are a byte short", "memory/sizes", |t| t.copy = Some(copy_one_short)),
    ("copies write a byte too many", "memory/copy_offsets", |t| t.copy = Some(copy_one_beyond)),
    ("copies ignore the pitch", "memory/copy_2d", |t| t.copy = Some(copy_without_pitch)),
    ("copies beyond the end succeed", "refusals/copy_beyond_the_end", |t| t.copy = Some(copy_without_bounds)),
    ("fills repeat one byte", "memory/fill", |t| t.fill = Some(fill_first_byte)),
    ("an event is not waited for", "streams/failure_is_inherited", |t| t.stream_wait_event = Some(missed_event)),
    ("event_wait hides failures", "streams/failure_is_inherited", |t| t.event_wait = Some(deaf_event_wait)),
    ("stream_wait hides failures", "streams/failure_sticks", |t| t.stream_wait = Some(deaf_stream_wait)),
    ("there is any device", "refusals/device_index", |t| t.device_info = Some(any_device)),
    ("a newer record is overwritten", "device/newer_records", |t| t.device_info = Some(long_record)),
    ("facts change", "device/caps", |t| t.device_caps = Some(moody_caps)),
    ("refusals say nothing", "refusals/device_index", |t| t.device_open = Some(silent_refusal)),
    ("everything is claimed", "honesty/random_descriptions", |t| t.op_supports = Some(claims_all)),
    ("claims depend on the order of questions", "honesty/order_of_questions", |t| t.op_supports = Some(forgets)),
    ("unknown functions are guessed", "honesty/unknown_mathematics", |t| {
        t.plan_create = Some(guesses);
        t.op_supports = Some(guesses_s);
    }),
    ("attention has a wrong scale", "attention/f32.prefill", |t| {
        t.plan_create = Some(wrong_scale);
        t.op_supports = Some(wrong_scale_s);
    }),
    ("norm has no epsilon", "norm/strided", |t| {
        t.plan_create = Some(no_epsilon);
        t.op_supports = Some(no_epsilon_s);
    }),
    ("rotary styles are swapped", "rope/half_whole", |t| {
        t.plan_create = Some(other_style);
        t.op_supports = Some(other_style_s);
    }),
    ("rotation begins two elements early", "rope/interleaved_partial", |t| {
        t.plan_create = Some(rope_offset);
        t.op_supports = Some(rope_offset_s);
    }),
    ("the window is a token too wide", "attention/f16.window", |t| {
        t.plan_create = Some(wide_window);
        t.op_supports = Some(wide_window_s);
    }),
    ("router weights are not normalised", "route/softmax_renormalised", |t| {
        t.plan_create = Some(not_normalised);
        t.op_supports = Some(not_normalised_s);
    }),
    ("float32 products are made of int8", "gemm/q8_0.f32", |t| t.plan_create = Some(cheap_products)),
    ("packing loses the end", "gemm/q4_k.f32", |t| t.plan_prepack = Some(packs_short)),
    ("outputs are written beyond their end", "softmax/rows", |t| t.plan_launch = Some(writes_beyond)),
    ("outputs are written before their start", "glu/silu", |t| t.plan_launch = Some(writes_before)),
    ("the workspace is overrun", "gemm/q8_0.i8_g32", |t| t.plan_launch = Some(workspace_overrun)),
    ("the last element is not written", "binary/add", |t| t.plan_launch = Some(forgets_last)),
    ("results differ from launch to launch", "norm/row_f32", |t| t.plan_launch = Some(never_the_same)),
    ("a row alone has other bits", "gemm/f32.f32", |t| t.plan_launch = Some(alone_is_different)),
    ("inputs are changed", "unary/silu", |t| t.plan_launch = Some(clobbers_input)),
    ("rows beyond the plan are cut off", "refusals/launch_operands", |t| t.plan_launch = Some(clamps_rows)),
    ("poll of an empty stream never ends", "streams/poll", |t| t.stream_wait = Some(never_ready)),
    ("an extension of any id is there", "device/unknown_extension", |t| t.query_extension = Some(any_extension)),
    ("a variant computes something else", "variants/q4_0.i8_g32.9", |t| t.query_extension = Some(odd_variants)),
    ("zero bytes are a buffer", "refusals/zero_size", |t| t.buffer_alloc = Some(empty_buffer)),
];

unsafe extern "C" fn never_ready(s: *mut qhal_stream, t: u64, e: Error) -> i32 {
    if t == 0 && !s.is_null() { QHAL_NOT_READY } else { cpu!(stream_wait(s, t, e)) }
}
unsafe extern "C" fn any_extension(d: *mut qhal_device, _: u32, _: u32, out: *mut *const c_void, e: Error) -> i32 {
    cpu!(query_extension(d, QHAL_EXT_VMM, 1, out, e))
}
/// Variants by the CPU, but in float32 where eight bits were asked for.
unsafe extern "C" fn odd_variants(d: *mut qhal_device, id: u32, v: u32, out: *mut *const c_void, e: Error) -> i32 {
    static ODD: OnceLock<qhal_variants_api> = OnceLock::new();
    let status = cpu!(query_extension(d, id, v, out, e));
    if status == QHAL_OK && id == QHAL_EXT_VARIANTS {
        let own = unsafe { *(*out).cast::<qhal_variants_api>() };
        VARIANTS.get_or_init(|| own);
        let odd = ODD.get_or_init(|| qhal_variants_api { plan_create_as: Some(other_form), ..own });
        unsafe { *out = std::ptr::from_ref(odd).cast() };
    }
    status
}
static VARIANTS: OnceLock<qhal_variants_api> = OnceLock::new();
unsafe extern "C" fn other_form(
    d: *mut qhal_device,
    desc: *const qhal_op_desc,
    opts: *const qhal_plan_opts,
    name: qhal_str,
    out: *mut *mut qhal_plan,
    info: *mut qhal_plan_info,
    e: Error,
) -> i32 {
    let mut other = unsafe { *desc };
    other.compute = QHAL_COMPUTE_F32;
    let create = VARIANTS.get().and_then(|own| own.plan_create_as).unwrap();
    unsafe { create(d, &raw const other, opts, name, out, info, e) }
}
unsafe extern "C" fn empty_buffer(
    d: *mut qhal_device,
    desc: *const qhal_buffer_desc,
    out: *mut *mut qhal_buffer,
    e: Error,
) -> i32 {
    let mut desc = unsafe { *desc };
    desc.size = desc.size.max(1);
    cpu!(buffer_alloc(d, &raw const desc, out, e))
}

/// Which defect the next query has.
static CHOSEN: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn query(major: u32, minor: u32, host: *const qhal_host_api) -> *const qhal_plugin_api {
    THREADS.store(unsafe { (*host).num_threads }, Ordering::Relaxed);
    let original = unsafe { qwen_cpu::query(major, minor, host) };
    let mut table = *CPU.get_or_init(|| unsafe { *original });
    let chosen = CHOSEN.load(Ordering::Relaxed) as usize;
    match SEEDED.get(chosen) {
        Some((_, _, defect)) => defect(&mut table),
        None => table.plan_launch = Some(counts_threads),
    }
    Box::leak(Box::new(table))
}

const PLUGIN: LinkedPlugin = unsafe { LinkedPlugin::new(qwen_cpu::manifest, query) };

/// One test, because the defects share statics.
#[test]
fn every_seeded_bug_is_caught() {
    let mut missed = Vec::new();
    for (at, (name, case, _)) in SEEDED.iter().enumerate() {
        let selection = Selection { filter: Some((*case).to_owned()), ..Selection::level(2) };
        let whole = run(&subject(&qwen_cpu::PLUGIN, 2).unwrap(), &selection, &mut |_| {}, &mut |_| {});
        assert!(!whole.is_empty() && whole.iter().all(|record| record.outcome == Outcome::Passed), "{case}: {whole:?}");
        CHOSEN.store(at as u32, Ordering::Relaxed);
        // A defect may show already when the device is opened.
        let Ok(subject) = subject(&PLUGIN, 2) else { continue };
        let records = run(&subject, &selection, &mut |_| {}, &mut |_| {});
        match records.iter().find(|record| record.outcome == Outcome::Failed) {
            Some(record) => println!("{name}: {} ({})", record.name, record.message),
            None => missed.push(*name),
        }
    }
    CHOSEN.store(u32::MAX, Ordering::Relaxed);
    let selection = Selection { filter: Some("gemm/q4_k".into()), ..Selection::level(1) };
    let records = run_with_threads(&|threads| subject(&PLUGIN, threads), &selection).unwrap();
    if records.iter().all(|record| record.outcome != Outcome::Failed) {
        missed.push("results depend on the number of threads");
    }
    assert!(missed.is_empty(), "not caught: {missed:#?}");
}
