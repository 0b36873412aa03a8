//! Buffers, copies, fills, mappings, imports, virtual memory.

use std::sync::Arc;

use qwen_hal::abi::*;
use qwen_hal::{Buffer, BufferDesc, Scope};

use super::Function;
use crate::case::{Checked, Trouble, ensure, failed, unsupported};
use crate::execute::{Guarded, download, upload};
use crate::raw::{Handles, copy_desc, raw, text};
use crate::suite::Subject;

pub(super) const CASES: &[Function] = &[
    ("memory/sizes", sizes),
    ("memory/apart", apart),
    ("memory/alignment", alignment),
    ("memory/copy_offsets", copy_offsets),
    ("memory/copy_2d", copy_2d),
    ("memory/copy_on_device", copy_on_device),
    ("memory/copy_nothing", copy_nothing),
    ("memory/fill", fill),
    ("memory/map", map),
    ("memory/import_host", import_host),
    ("memory/vmm", vmm),
];

fn pattern(size: u64, seed: u64) -> Vec<u8> {
    (0..size).map(|i| ((i * 7 + seed * 13 + i / 251) % 251) as u8).collect()
}

fn alloc(subject: &Subject, size: u64) -> Result<Buffer, Trouble> {
    Ok(subject.device.alloc(&BufferDesc::new(size, QHAL_USAGE_STAGING, Scope::Temporary, "check"))?)
}

/// Every byte of every size can be written and read, the last one too.
fn sizes(subject: &Subject) -> Checked {
    let stream = subject.device.stream("s")?;
    for size in [1, 2, 3, 7, 63, 64, 65, 255, 4096, 4097, (1 << 20) + 1, 9 << 20] {
        let buffer = alloc(subject, size)?;
        let sent = pattern(size, size);
        upload(&stream, &buffer, 0, &sent)?;
        ensure(download(&stream, &buffer, 0, size)? == sent, || format!("{size} bytes come back changed"))?;
    }
    Ok(())
}

/// Buffers do not overlap, and stay what they are while others come and go.
fn apart(subject: &Subject) -> Checked {
    let stream = subject.device.stream("s")?;
    let mut buffers = Vec::new();
    for i in 0..24_u64 {
        let size = 100 + i * 77;
        let buffer = alloc(subject, size)?;
        upload(&stream, &buffer, 0, &pattern(size, i))?;
        buffers.push((i, buffer));
        if i % 3 == 2 {
            buffers.remove(0);
        }
    }
    for (i, buffer) in &buffers {
        let content = download(&stream, buffer, 0, buffer.size())?;
        ensure(content == pattern(buffer.size(), *i), || format!("buffer {i} was changed by work on other buffers"))?;
    }
    Ok(())
}

fn alignment(subject: &Subject) -> Checked {
    let table = subject.plugin.raw_table();
    let handles = Handles::new(subject, 64)?;
    for alignment in [64, 4096, 65536] {
        let desc = qhal_buffer_desc { alignment, ..crate::raw::buffer_desc(alignment + 64) };
        let mut buffer = std::ptr::null_mut();
        let (status, err) = raw!(table, buffer_alloc(handles.device, &raw const desc, &raw mut buffer));
        ensure(status == QHAL_OK, || format!("alignment {alignment} is refused: {}", text(&err)))?;
        let mut address = std::ptr::null_mut();
        let mapped = if subject.device.caps().has(QHAL_FEATURE_MAP) {
            raw!(table, buffer_map(buffer, 0, 64, QHAL_ACCESS_READ, &raw mut address)).0
        } else {
            QHAL_UNIMPLEMENTED
        };
        if mapped == QHAL_OK {
            let _ = raw!(table, buffer_unmap(buffer));
        }
        let _ = raw!(table, buffer_free(buffer));
        ensure(mapped != QHAL_OK || (address as usize).is_multiple_of(alignment as usize), || {
            format!("alignment {alignment}: the buffer begins at {address:?}")
        })?;
    }
    Ok(())
}

/// A copy changes its range and nothing else, wherever it lies.
fn copy_offsets(subject: &Subject) -> Checked {
    let stream = subject.device.stream("s")?;
    let step = subject.device.caps().buffer_alignment.max(1);
    let size = 4096 + 8 * step;
    for (offset, length) in [(0, 1), (step, 1), (step, 17), (3 * step, 255), (8 * step, 4096), (0, size)] {
        let buffer = alloc(subject, size)?;
        let mut expected = vec![0xa5; size as usize];
        upload(&stream, &buffer, 0, &expected)?;
        let sent = pattern(length, offset);
        upload(&stream, &buffer, offset, &sent)?;
        expected[offset as usize..][..length as usize].copy_from_slice(&sent);
        let found = download(&stream, &buffer, 0, size)?;
        if let Some(at) = found.iter().zip(&expected).position(|(a, b)| a != b) {
            return failed(format!("{length} bytes to offset {offset}: byte {at} is wrong"));
        }
        let part = download(&stream, &buffer, offset, length)?;
        ensure(part == sent, || format!("{length} bytes from offset {offset} come back changed"))?;
    }
    Ok(())
}

/// Rows with gaps: what lies between them stays.
fn copy_2d(subject: &Subject) -> Checked {
    let step = subject.device.caps().buffer_alignment.max(4);
    let handles = Handles::new(subject, 64 * step)?;
    let (row_bytes, rows, pitch) = (2 * step, 5_u64, 7 * step);
    let mut expected = vec![0xa5; handles.size as usize];
    handles.write(&expected)?;
    let sent = pattern(row_bytes * rows, 3);
    let offset = step;
    let extent = (rows - 1) * pitch + row_bytes;
    let desc = qhal_copy_desc {
        dst: handles.slice(offset, extent),
        src_host: sent.as_ptr().cast(),
        rows,
        dst_pitch: pitch,
        ..copy_desc(row_bytes)
    };
    handles.done("copy of rows", raw!(handles.table, copy(handles.stream, &raw const desc)))?;
    for row in 0..rows {
        let to = (offset + row * pitch) as usize;
        expected[to..to + row_bytes as usize]
            .copy_from_slice(&sent[(row * row_bytes) as usize..][..row_bytes as usize]);
    }
    let found = handles.read()?;
    if let Some(at) = found.iter().zip(&expected).position(|(a, b)| a != b) {
        return failed(format!("{rows} rows of {row_bytes} bytes at a pitch of {pitch}: byte {at} is wrong"));
    }
    let mut back = vec![0; sent.len()];
    let desc = qhal_copy_desc {
        src: handles.slice(offset, extent),
        dst_host: back.as_mut_ptr().cast(),
        rows,
        src_pitch: pitch,
        ..copy_desc(row_bytes)
    };
    handles.done("copy of rows back", raw!(handles.table, copy(handles.stream, &raw const desc)))?;
    ensure(back == sent, || "rows with a pitch come back changed".into())
}

fn copy_on_device(subject: &Subject) -> Checked {
    let stream = subject.device.stream("s")?;
    let size = 100_000;
    let source = alloc(subject, size)?;
    let sent = pattern(size, 1);
    upload(&stream, &source, 0, &sent)?;
    let target = Guarded::new(&subject.device, &stream, size, 0, QHAL_USAGE_STAGING)?;
    stream.copy(&source.whole(), &target.slice()?)?;
    stream.wait()?;
    ensure(target.read(&stream, "the target of a copy")? == sent, || "a copy on the device changes bytes".into())?;
    // Within one buffer.
    let half = size / 2 / 64 * 64;
    stream.copy(&source.slice(0, 64)?, &source.slice(half, 64)?)?;
    stream.wait()?;
    ensure(download(&stream, &source, half, 64)? == sent[..64], || "a copy within a buffer changes bytes".into())
}

fn copy_nothing(subject: &Subject) -> Checked {
    let handles = Handles::new(subject, 256)?;
    let before = pattern(256, 5);
    handles.write(&before)?;
    let host = [0_u8; 8];
    let desc = qhal_copy_desc { dst: handles.slice(0, 8), src_host: host.as_ptr().cast(), rows: 0, ..copy_desc(8) };
    handles.done("a copy of 0 rows", raw!(handles.table, copy(handles.stream, &raw const desc)))?;
    ensure(handles.read()? == before, || "a copy of 0 rows changes memory".into())
}

fn fill(subject: &Subject) -> Checked {
    let stream = subject.device.stream("s")?;
    let handles = Handles::new(subject, 64)?;
    let byte = 7_u8;
    let (status, _) = raw!(handles.table, fill(handles.stream, handles.slice(0, 64), (&raw const byte).cast(), 1));
    if status == QHAL_UNIMPLEMENTED {
        return unsupported("no fill; the host fills by copies");
    }
    handles.done("fill", (status, qhal_error::default()))?;
    for length in [1_usize, 2, 4, 8, 16] {
        let memory = Guarded::new(&subject.device, &stream, 4096, 0, QHAL_USAGE_STAGING)?;
        let bytes: Vec<u8> = (1..=length as u8).collect();
        stream.fill(&memory.slice()?, &bytes)?;
        stream.wait()?;
        let found = memory.read(&stream, "a filled range")?;
        ensure(found == bytes.repeat(4096 / length), || format!("a pattern of {length} bytes is not repeated"))?;
    }
    Ok(())
}

fn map(subject: &Subject) -> Checked {
    if !subject.device.caps().has(QHAL_FEATURE_MAP) {
        return unsupported("the device does not map");
    }
    let handles = Handles::new(subject, 4096)?;
    let sent = pattern(4096, 9);
    handles.write(&sent)?;
    let mut address = std::ptr::null_mut();
    let access = QHAL_ACCESS_READ | QHAL_ACCESS_WRITE;
    let (status, err) = raw!(handles.table, buffer_map(handles.buffer, 128, 1024, access, &raw mut address));
    ensure(status == QHAL_OK && !address.is_null(), || format!("buffer_map: {}", text(&err)))?;
    // SAFETY: 1024 bytes are mapped there.
    let mapped = unsafe { std::slice::from_raw_parts_mut(address.cast::<u8>(), 1024) };
    ensure(mapped[..] == sent[128..1152], || "a mapping shows other bytes than were copied there".into())?;
    mapped[5] = 250;
    let (status, err) = raw!(handles.table, buffer_unmap(handles.buffer));
    ensure(status == QHAL_OK, || format!("buffer_unmap: {}", text(&err)))?;
    ensure(handles.read()?[133] == 250, || "what was written to a mapping is not in the buffer".into())?;
    let (status, _) = raw!(handles.table, buffer_map(handles.buffer, 4000, 97, QHAL_ACCESS_READ, &raw mut address));
    ensure(status != QHAL_OK, || "buffer_map: expected a refusal of a range beyond the end, found OK".into())
}

fn import_host(subject: &Subject) -> Checked {
    if !subject.device.caps().has(QHAL_FEATURE_IMPORT_HOST) {
        return unsupported("the device does not import host memory");
    }
    let stream = subject.device.stream("s")?;
    let bytes = pattern(10_000, 2);
    let buffer = subject.device.import_host(Arc::new(bytes.clone()), QHAL_USAGE_WEIGHT, "check")?;
    ensure(download(&stream, &buffer, 0, 10_000)? == bytes, || "imported memory reads as other bytes".into())?;
    ensure(download(&stream, &buffer, 9_999, 1)? == bytes[9_999..], || "its last byte reads as another".into())
}

fn vmm(subject: &Subject) -> Checked {
    let caps = subject.device.caps();
    if !caps.has(QHAL_FEATURE_VMM) {
        return unsupported("the device has no virtual memory");
    }
    let Some(page) = caps.vmm_granularity else { return failed("vmm is claimed without vmm_granularity") };
    let stream = subject.device.stream("s")?;
    let desc = BufferDesc::new(64 * page, QHAL_USAGE_KV, Scope::Dynamic, "check");
    let buffer = subject.device.reserve(&desc)?;
    buffer.commit(4 * page, 2 * page)?;
    let zeros = download(&stream, &buffer, 4 * page, 2 * page)?;
    ensure(zeros.iter().all(|byte| *byte == 0), || "committed memory is not zeroed".into())?;
    let sent = pattern(page, 4);
    upload(&stream, &buffer, 5 * page, &sent)?;
    buffer.commit(6 * page, page)?;
    ensure(download(&stream, &buffer, 5 * page, page)? == sent, || "a further commit changes what is there".into())?;
    buffer.decommit(5 * page, page)?;
    buffer.commit(5 * page, page)?;
    let zeros = download(&stream, &buffer, 5 * page, page)?;
    ensure(zeros.iter().all(|byte| *byte == 0), || "memory that was given back and committed anew is not zeroed".into())
}
