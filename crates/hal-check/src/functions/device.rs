//! Manifest, devices, facts, state.

use qwen_hal::abi::*;

use super::Function;
use crate::case::{Checked, ensure, unsupported};
use crate::execute::{download, upload};
use crate::raw::{Handles, Newer, raw, zeroed};
use crate::suite::Subject;

pub(super) const CASES: &[Function] = &[
    ("device/manifest", manifest),
    ("device/count", count),
    ("device/info", info),
    ("device/caps", caps),
    ("device/dtypes", dtypes),
    ("device/newer_records", newer_records),
    ("device/open_twice", open_twice),
    ("device/open_again", open_again),
    ("device/health", health),
    ("device/unknown_extension", unknown_extension),
    ("device/link", link),
];

fn manifest(subject: &Subject) -> Checked {
    let manifest = subject.plugin.manifest();
    ensure(!manifest.name.is_empty() && !manifest.name.contains([':', '/', ' ']), || {
        format!("name: expected one word without colon and slash, found {:?}", manifest.name)
    })?;
    ensure(!manifest.version.is_empty(), || "version: expected a semver, found nothing".into())?;
    ensure(!manifest.build_id.is_empty(), || "build_id: expected an identity for caches, found nothing".into())?;
    ensure((QHAL_KIND_CPU..=QHAL_KIND_NULL).contains(&manifest.kind), || {
        format!("kind: expected QHAL_KIND_*, found {}", manifest.kind)
    })?;
    ensure(manifest.min_host_minor <= manifest.abi.1, || {
        format!("min_host_minor: expected at most the minor that it was built with, found {}", manifest.min_host_minor)
    })
}

fn count(subject: &Subject) -> Checked {
    let (first, second) = (subject.plugin.device_count()?, subject.plugin.device_count()?);
    ensure(first == second, || format!("device_count: {first}, then {second}"))?;
    ensure(subject.index < first, || format!("device {} was opened, device_count says {first}", subject.index))
}

fn info(subject: &Subject) -> Checked {
    for index in 0..subject.plugin.device_count()? {
        let (first, second) = (subject.plugin.device_info(index)?, subject.plugin.device_info(index)?);
        ensure(first == second, || format!("device_info of {index} differs between two calls"))?;
        ensure(first.index == index, || format!("device_info of {index}: id.index is {}", first.index))?;
        ensure(!first.name.is_empty(), || format!("device_info of {index}: no name"))?;
        ensure(!first.fingerprint.is_empty(), || {
            format!("device_info of {index}: no fingerprint, which caches of measurements need")
        })?;
        ensure((QHAL_KIND_CPU..=QHAL_KIND_NULL).contains(&first.kind), || format!("kind {}", first.kind))?;
    }
    Ok(())
}

fn raw_caps(handles: &Handles<'_>) -> qhal_device_caps {
    // SAFETY: integers, floats and pointers.
    let mut caps = unsafe { zeroed::<qhal_device_caps>() };
    caps.struct_size = size_of::<qhal_device_caps>() as u32;
    // Its status was seen when the subject was opened.
    let _ = raw!(handles.table, device_caps(handles.device, &raw mut caps));
    caps
}

fn caps(subject: &Subject) -> Checked {
    let handles = Handles::new(subject, 64)?;
    let (first, second) = (raw_caps(&handles), raw_caps(&handles));
    let constant = (first.valid_fields, first.features, first.memory_total, first.buffer_alignment, first.num_dtypes)
        == (second.valid_fields, second.features, second.memory_total, second.buffer_alignment, second.num_dtypes);
    ensure(constant, || "device_caps differ between two calls, they are constant for the life of a device".into())?;
    let known = (QHAL_CAPS_BANDWIDTH << 1) - 1;
    ensure(first.valid_fields & !known == 0, || format!("valid_fields {:#x}: unknown bits", first.valid_fields))?;
    ensure(first.estimated_fields & !first.valid_fields == 0, || "estimated fields that are not valid".into())?;
    let known = (QHAL_FEATURE_INLINE << 1) - 1;
    ensure(first.features & !known == 0, || format!("features {:#x}: unknown bits", first.features))?;
    if first.valid_fields & QHAL_CAPS_MAX_ALLOCATION != 0 && first.valid_fields & QHAL_CAPS_MEMORY_TOTAL != 0 {
        ensure(first.max_allocation <= first.memory_total, || "max_allocation is above memory_total".into())?;
    }
    if first.valid_fields & QHAL_CAPS_BANDWIDTH != 0 {
        ensure(first.bandwidth > 0.0 && (1..=2).contains(&first.bandwidth_source), || {
            "bandwidth: expected a positive number that is declared (1) or measured (2)".into()
        })?;
    }
    Ok(())
}

fn dtypes(subject: &Subject) -> Checked {
    let mut seen = Vec::new();
    for entry in &subject.device.caps().dtypes {
        ensure(!seen.contains(&entry.dtype), || format!("dtype {} is listed twice", entry.dtype))?;
        ensure(ops::dtype_block(entry.dtype).is_some(), || format!("dtype {} is not of this ABI", entry.dtype))?;
        ensure(entry.bits != 0 && entry.bits < 32, || format!("dtype {}: bits {:#x}", entry.dtype, entry.bits))?;
        seen.push(entry.dtype);
    }
    if seen.is_empty() { unsupported("no table of dtypes") } else { Ok(()) }
}

/// A host of a newer minor passes longer records: what a plugin does not know it must leave alone.
fn newer_records(subject: &Subject) -> Checked {
    let handles = Handles::new(subject, 64)?;
    // SAFETY: integers, floats and pointers.
    let (mut info, mut caps, mut support) = unsafe {
        (
            Newer::new(zeroed::<qhal_device_info>()),
            Newer::new(zeroed::<qhal_device_caps>()),
            Newer::new(zeroed::<qhal_support>()),
        )
    };
    info.record.struct_size = Newer::<qhal_device_info>::size();
    caps.record.struct_size = Newer::<qhal_device_caps>::size();
    support.record.struct_size = Newer::<qhal_support>::size();
    let (status, _) = raw!(handles.table, device_info(subject.index, &raw mut info.record));
    ensure(status == QHAL_OK && info.is_whole(), || {
        "device_info: a longer record is refused, or bytes behind the known fields were written".into()
    })?;
    let (status, _) = raw!(handles.table, device_caps(handles.device, &raw mut caps.record));
    ensure(status == QHAL_OK && caps.is_whole(), || {
        "device_caps: a longer record is refused, or bytes behind the known fields were written".into()
    })?;
    // SAFETY: integers and pointers.
    let mut desc = unsafe { zeroed::<qhal_op_desc>() };
    (desc.struct_size, desc.op_kind, desc.op_version) = (size_of::<qhal_op_desc>() as u32, 0xffff, 1);
    // An answer of any kind will do; the bytes count.
    let _ = raw!(handles.table, op_supports(handles.device, &raw const desc, &raw mut support.record));
    ensure(support.is_whole(), || "op_supports: bytes behind the known fields were written".into())
}

fn open_twice(subject: &Subject) -> Checked {
    let (first, second) = (subject.plugin.open(subject.index, &[])?, subject.plugin.open(subject.index, &[])?);
    let buffer = |device: &qwen_hal::Device| {
        device.alloc(&qwen_hal::BufferDesc::new(4096, QHAL_USAGE_STAGING, qwen_hal::Scope::Temporary, "check"))
    };
    let (a, b) = (buffer(&first)?, buffer(&second)?);
    let (left, right) = (first.stream("a")?, second.stream("b")?);
    upload(&left, &a, 0, &[1; 4096])?;
    upload(&right, &b, 0, &[2; 4096])?;
    let seen = download(&left, &a, 0, 4096)?;
    ensure(seen == [1; 4096], || "two open handles of a device share memory of their buffers".into())?;
    drop((a, left, first));
    let seen = download(&right, &b, 0, 4096)?;
    ensure(seen == [2; 4096], || "closing one handle of a device damages the other".into())
}

fn open_again(subject: &Subject) -> Checked {
    for _ in 0..3 {
        let device = subject.plugin.open(subject.index, &[])?;
        let stream = device.stream("s")?;
        stream.wait()?;
    }
    Ok(())
}

fn health(subject: &Subject) -> Checked {
    let ask = || subject.device.health();
    let health = match ask() {
        Err(error) if error.call_error().is_some_and(qwen_hal::CallError::is_unsupported) => {
            return unsupported("no device_health");
        }
        other => other?,
    };
    ensure(health.utilisation.is_none_or(|u| (0.0..=1.0).contains(&u)), || {
        format!("utilisation: expected 0 to 1, found {:?}", health.utilisation)
    })?;
    let elsewhere = std::thread::scope(|scope| scope.spawn(ask).join());
    ensure(matches!(elsewhere, Ok(Ok(_))), || "device_health fails from another thread".into())?;
    // What is allocated is used, what is freed is not.
    let Some(before) = health.memory_used else { return Ok(()) };
    let size = 8 << 20;
    let desc = qwen_hal::BufferDesc::new(size, QHAL_USAGE_STAGING, qwen_hal::Scope::Temporary, "check");
    let buffer = subject.device.alloc(&desc)?;
    let during = ask()?.memory_used.unwrap_or(0);
    drop(buffer);
    let after = ask()?.memory_used.unwrap_or(0);
    ensure(during >= before + size, || format!("memory_used: {before}, with {size} bytes more {during}"))?;
    ensure(after < during, || format!("memory_used: {during}, after freeing {size} bytes {after}"))
}

fn unknown_extension(subject: &Subject) -> Checked {
    let handles = Handles::new(subject, 64)?;
    let mut table = std::ptr::null();
    let (status, _) = raw!(handles.table, query_extension(handles.device, 0xffff_0000, 1, &raw mut table));
    ensure(status != QHAL_OK, || "query_extension: expected a refusal of an unknown id, found OK".into())?;
    let (status, _) = raw!(handles.table, query_extension(handles.device, QHAL_EXT_VMM, 99, &raw mut table));
    ensure(status != QHAL_OK, || "query_extension: expected a refusal of version 99 of vmm, found OK".into())
}

fn link(subject: &Subject) -> Checked {
    let handles = Handles::new(subject, 64)?;
    let id = qhal_device_id {
        struct_size: size_of::<qhal_device_id>() as u32,
        index: subject.index,
        uuid: [0; 16],
        bus_address: u64::MAX,
    };
    let mut link = qhal_link { struct_size: size_of::<qhal_link>() as u32, ..Default::default() };
    let (status, _) = raw!(handles.table, device_link(handles.device, &raw const id, &raw mut link));
    if status != QHAL_OK {
        return unsupported("no device_link");
    }
    ensure((QHAL_LINK_SAME..=QHAL_LINK_ISOLATED).contains(&link.class), || format!("class {}", link.class))
}
