//! Wrong arguments are refused with an error: no crash, no change of anything.
//!
//! The host checks arguments first, so a plugin meets these only from a defective host. What is tested is what a plugin can
//! tell at little cost: null handles, indices, ranges of buffers, sizes that cannot be.

use std::ptr::{null, null_mut};

use qwen_hal::abi::ops::*;
use qwen_hal::abi::*;
use qwen_hal::status_name;

use super::Function;
use crate::case::{Checked, ensure, unsupported};
use crate::raw::{Handles, NO_SLICE, NO_TEXT, buffer_desc, copy_desc, raw, text, zeroed};
use crate::suite::Subject;

pub(super) const CASES: &[Function] = &[
    ("refusals/device_index", device_index),
    ("refusals/null_handles", null_handles),
    ("refusals/no_record", no_record),
    ("refusals/zero_size", zero_size),
    ("refusals/absurd_size", absurd_size),
    ("refusals/copy_beyond_the_end", copy_beyond_the_end),
    ("refusals/copy_overflow", copy_overflow),
    ("refusals/fill_pattern", fill_pattern),
    ("refusals/unknown_op", unknown_op),
    ("refusals/short_description", short_description),
    ("refusals/launch_operands", launch_operands),
];

/// A refusal has a code of the header, and a record with the same code and a sentence.
pub(super) fn refused(what: &str, (status, err): (qhal_status, qhal_error)) -> Checked {
    ensure(status != QHAL_OK, || format!("{what}: expected a refusal, found OK"))?;
    ensure(status == QHAL_UNKNOWN || status_name(status) != "UNKNOWN", || format!("{what}: status {status} is none"))?;
    ensure(err.code == status, || format!("{what}: the record says {}, the status {status}", err.code))?;
    ensure(err.message.contains(&0), || format!("{what}: the message has no end"))?;
    ensure(!text(&err).is_empty(), || format!("{what}: refused without a message"))
}

fn device_index(subject: &Subject) -> Checked {
    let table = subject.plugin.raw_table();
    let count = subject.plugin.device_count()?;
    for index in [count, u32::MAX] {
        // SAFETY: integers.
        let mut info = unsafe { zeroed::<qhal_device_info>() };
        info.struct_size = size_of::<qhal_device_info>() as u32;
        refused("device_info of a device that is not there", raw!(table, device_info(index, &raw mut info)))?;
        let mut device = null_mut();
        refused(
            "device_open of a device that is not there",
            raw!(table, device_open(index, null(), 0, &raw mut device)),
        )?;
    }
    Ok(())
}

fn null_handles(subject: &Subject) -> Checked {
    let table = subject.plugin.raw_table();
    let (mut buffer, mut stream) = (null_mut(), null_mut());
    let desc = buffer_desc(64);
    refused("buffer_alloc without a device", raw!(table, buffer_alloc(null_mut(), &raw const desc, &raw mut buffer)))?;
    let desc = qhal_stream_desc { struct_size: size_of::<qhal_stream_desc>() as u32, priority: 0, name: NO_TEXT };
    refused(
        "stream_create without a device",
        raw!(table, stream_create(null_mut(), &raw const desc, &raw mut stream)),
    )?;
    refused("stream_wait without a stream", raw!(table, stream_wait(null_mut(), 0)))?;
    let host = [0_u8; 8];
    let handles = Handles::new(subject, 64)?;
    let desc = qhal_copy_desc { dst: handles.slice(0, 8), src_host: host.as_ptr().cast(), ..copy_desc(8) };
    refused("copy without a stream", raw!(table, copy(null_mut(), &raw const desc)))?;
    let desc = qhal_copy_desc { dst: NO_SLICE, src_host: host.as_ptr().cast(), ..copy_desc(8) };
    refused("copy to nothing", raw!(table, copy(handles.stream, &raw const desc)))
}

/// The record may be null: the status is enough.
fn no_record(subject: &Subject) -> Checked {
    let table = subject.plugin.raw_table();
    let mut device = null_mut();
    // SAFETY: an index that is not there, and no record, which the ABI allows.
    let status = table.device_open.map(|open| unsafe { open(u32::MAX, null(), 0, &raw mut device, null_mut()) });
    ensure(status.is_some_and(|status| status != QHAL_OK), || "device_open: expected a refusal, found OK".into())
}

fn zero_size(subject: &Subject) -> Checked {
    let handles = Handles::new(subject, 64)?;
    let (desc, mut buffer) = (buffer_desc(0), null_mut());
    refused(
        "buffer_alloc of 0 bytes",
        raw!(handles.table, buffer_alloc(handles.device, &raw const desc, &raw mut buffer)),
    )
}

fn absurd_size(subject: &Subject) -> Checked {
    let handles = Handles::new(subject, 64)?;
    for size in [1_u64 << 60, u64::MAX, u64::MAX - 63] {
        let (desc, mut buffer) = (buffer_desc(size), null_mut());
        let answer = raw!(handles.table, buffer_alloc(handles.device, &raw const desc, &raw mut buffer));
        refused(&format!("buffer_alloc of {size} bytes"), answer)?;
    }
    // Nothing is broken by that.
    Handles::new(subject, 64)?.write(&[1; 64])
}

fn copy_beyond_the_end(subject: &Subject) -> Checked {
    let handles = Handles::new(subject, 256)?;
    let before: Vec<u8> = (0..=255).collect();
    handles.write(&before)?;
    let mut host = vec![0_u8; 4096];
    for (offset, bytes) in [(0_u64, 257_u64), (256, 1), (192, 65), (1 << 40, 1), (u64::MAX - 3, 8)] {
        let (slice, what) = (handles.slice(offset, bytes), format!("copy of {bytes} bytes at {offset} of 256"));
        let to = qhal_copy_desc { dst: slice, src_host: host.as_ptr().cast(), ..copy_desc(bytes) };
        refused(&format!("{what}, to the device"), raw!(handles.table, copy(handles.stream, &raw const to)))?;
        let from = qhal_copy_desc { src: slice, dst_host: host.as_mut_ptr().cast(), ..copy_desc(bytes) };
        refused(&format!("{what}, to the host"), raw!(handles.table, copy(handles.stream, &raw const from)))?;
    }
    // A slice that is shorter than what is copied.
    let short = qhal_copy_desc { dst: handles.slice(0, 7), src_host: host.as_ptr().cast(), ..copy_desc(8) };
    refused("copy of 8 bytes to a slice of 7", raw!(handles.table, copy(handles.stream, &raw const short)))?;
    ensure(handles.read()? == before, || "a copy that was refused changed the buffer".into())
}

fn copy_overflow(subject: &Subject) -> Checked {
    let handles = Handles::new(subject, 256)?;
    let host = [0_u8; 64];
    let desc = qhal_copy_desc {
        dst: handles.slice(0, 256),
        src_host: host.as_ptr().cast(),
        rows: 1 << 40,
        dst_pitch: 1 << 40,
        src_pitch: 0,
        ..copy_desc(8)
    };
    refused("copy whose extent overflows", raw!(handles.table, copy(handles.stream, &raw const desc)))
}

fn fill_pattern(subject: &Subject) -> Checked {
    let handles = Handles::new(subject, 256)?;
    let before: Vec<u8> = (0..=255).collect();
    handles.write(&before)?;
    let pattern = [7_u8; 16];
    let table = handles.table;
    let fill =
        |slice: qhal_slice, length: u32| raw!(table, fill(handles.stream, slice, pattern.as_ptr().cast(), length));
    if fill(handles.slice(0, 0), 1).0 == QHAL_UNIMPLEMENTED {
        return unsupported("no fill");
    }
    refused("fill with a pattern of 3 bytes", fill(handles.slice(0, 12), 3))?;
    refused("fill of 10 bytes with a pattern of 4", fill(handles.slice(0, 10), 4))?;
    refused("fill beyond the end", fill(handles.slice(192, 128), 4))?;
    ensure(handles.read()? == before, || "a fill that was refused changed the buffer".into())
}

fn unknown_op(subject: &Subject) -> Checked {
    let handles = Handles::new(subject, 64)?;
    let table = handles.table;
    for (kind, version) in [(0xffff, 1), (QHAL_OP_SOFTMAX, 99)] {
        let tensor = softmax_tensor();
        let mut desc = softmax(&tensor);
        (desc.op_kind, desc.op_version) = (kind, version);
        // SAFETY: integers and floats.
        let mut support = unsafe { zeroed::<qhal_support>() };
        support.struct_size = size_of::<qhal_support>() as u32;
        let (status, err) = raw!(table, op_supports(handles.device, &raw const desc, &raw mut support));
        ensure(status == QHAL_OK && support.level == QHAL_SUPPORT_NO, || {
            format!(
                "op_supports of kind {kind} version {version}: expected OK with level NO, found {} level {} {}",
                status_name(status),
                support.level,
                text(&err)
            )
        })?;
        ensure(support.reason[0] != 0 && support.reason.contains(&0), || {
            "op_supports says no without a reason".into()
        })?;
        // SAFETY: integers and floats.
        let mut info = unsafe { zeroed::<qhal_plan_info>() };
        info.struct_size = size_of::<qhal_plan_info>() as u32;
        let mut plan = null_mut();
        let answer = raw!(table, plan_create(handles.device, &raw const desc, null(), &raw mut plan, &raw mut info));
        ensure(answer.0 == QHAL_UNIMPLEMENTED, || {
            format!(
                "plan_create of kind {kind} version {version}: expected UNIMPLEMENTED, found {}",
                status_name(answer.0)
            )
        })?;
        refused("plan_create", answer)?;
    }
    Ok(())
}

fn softmax_tensor() -> qhal_tensor_desc {
    *qwen_hal::TensorDesc::f32(&[qwen_hal::Dim::symbol(0, 1, 8), 16.into()]).raw()
}

/// Softmax over rows of 16, 1 to 8 of them.
const fn softmax(tensor: &qhal_tensor_desc) -> qhal_op_desc {
    qhal_op_desc {
        struct_size: size_of::<qhal_op_desc>() as u32,
        op_kind: QHAL_OP_SOFTMAX,
        op_version: 1,
        phase: QHAL_PHASE_MIXED,
        compute: QHAL_COMPUTE_F32,
        accumulate: QHAL_DTYPE_F32,
        tolerance: QHAL_TOLERANCE_TIGHT,
        num_inputs: 1,
        num_outputs: 1,
        num_attrs: 0,
        num_epilogues: 0,
        num_symbols: 1,
        inputs: std::ptr::from_ref(tensor),
        outputs: std::ptr::from_ref(tensor),
        attrs: null(),
        epilogues: null(),
        next: null(),
    }
}

/// A description shorter than the first version, or without its arrays, is no description.
fn short_description(subject: &Subject) -> Checked {
    let handles = Handles::new(subject, 64)?;
    let tensor = softmax_tensor();
    for change in [(8_u32, 1_u32), (size_of::<qhal_op_desc>() as u32, u32::MAX)] {
        let mut desc = softmax(&tensor);
        (desc.struct_size, desc.num_inputs) = change;
        // SAFETY: integers and floats.
        let mut info = unsafe { zeroed::<qhal_plan_info>() };
        info.struct_size = size_of::<qhal_plan_info>() as u32;
        let mut plan = null_mut();
        let answer =
            raw!(handles.table, plan_create(handles.device, &raw const desc, null(), &raw mut plan, &raw mut info));
        refused("plan_create of a description that cannot be", answer)?;
    }
    Ok(())
}

/// Launches with too few operands, slices that are too short, and values outside of the planned range.
fn launch_operands(subject: &Subject) -> Checked {
    let handles = Handles::new(subject, 4096)?;
    let table = handles.table;
    let tensor = softmax_tensor();
    let desc = softmax(&tensor);
    // SAFETY: integers and floats.
    let mut info = unsafe { zeroed::<qhal_plan_info>() };
    info.struct_size = size_of::<qhal_plan_info>() as u32;
    let mut plan = null_mut();
    let (status, err) = raw!(table, plan_create(handles.device, &raw const desc, null(), &raw mut plan, &raw mut info));
    if status == QHAL_UNIMPLEMENTED {
        return unsupported("no softmax to launch wrongly");
    }
    ensure(status == QHAL_OK, || format!("plan_create: {}", text(&err)))?;
    let result = wrong_launches(&handles, plan, info.workspace_bytes);
    let _ = raw!(table, plan_destroy(plan));
    result
}

fn wrong_launches(handles: &Handles<'_>, plan: *mut qhal_plan, workspace: u64) -> Checked {
    handles.write(&[0xa5; 4096])?;
    let launch = |what: &str, input: qhal_slice, output: qhal_slice, inputs: u32, value: i64| {
        let args = qhal_launch_args {
            struct_size: size_of::<qhal_launch_args>() as u32,
            num_inputs: inputs,
            num_outputs: 1,
            num_symbols: 1,
            inputs: &raw const input,
            outputs: &raw const output,
            workspace: handles.slice(2048, workspace.min(2048)),
            symbol_values: &raw const value,
        };
        let (status, err) = raw!(handles.table, plan_launch(plan, handles.stream, &raw const args));
        // An asynchronous device may tell later.
        let later =
            if status == QHAL_OK { raw!(handles.table, stream_wait(handles.stream, u64::MAX)) } else { (status, err) };
        refused(what, later)
    };
    let (input, output) = (handles.slice(0, 512), handles.slice(1024, 512));
    launch("launch with no inputs", input, output, 0, 4)?;
    launch("launch with an input that is too short", handles.slice(0, 8), output, 1, 8)?;
    launch("launch with an output that is too short", input, handles.slice(1024, 508), 1, 8)?;
    launch("launch with an output beyond its buffer", input, handles.slice(4096 - 256, 512), 1, 8)?;
    launch("launch with no buffer", NO_SLICE, output, 1, 4)?;
    launch("launch with 9 rows of at most 8", handles.slice(0, 1024), output, 1, 9)?;
    launch("launch with -1 rows", input, output, 1, -1)?;
    // Nothing of that was written, and the stream is not broken by arguments.
    let found = handles.read()?;
    ensure(found[1024..2048].iter().chain(&found[3840..]).all(|byte| *byte == 0xa5), || {
        "a launch that was refused wrote to memory".into()
    })
}
