//! The table below the safe handles, for arguments that the host would not let pass.

use std::ptr::{null, null_mut};

use qwen_hal::abi::{
    QHAL_MEMORY_DEVICE, QHAL_OK, QHAL_SCOPE_TEMPORARY, QHAL_USAGE_STAGING, qhal_buffer, qhal_buffer_desc,
    qhal_copy_desc, qhal_device, qhal_error, qhal_plugin_api, qhal_slice, qhal_str, qhal_stream, qhal_stream_desc,
};
use qwen_hal::status_name;

use crate::case::{Trouble, failed};
use crate::suite::Subject;

/// Calls an entry of the table with exactly these arguments: (status, record).
macro_rules! raw {
    ($table:expr, $entry:ident($($arg:expr),* $(,)?)) => {{
        let mut err = ::qwen_hal::abi::qhal_error::default();
        let status = match $table.$entry {
            // SAFETY: handles are alive or null, pointers to records are valid; whether the plugin bears the rest is the test.
            Some(entry) => unsafe { entry($($arg,)* &raw mut err) },
            None => ::qwen_hal::abi::QHAL_UNIMPLEMENTED,
        };
        (status, err)
    }};
}
pub(crate) use raw;

pub(crate) const NO_TEXT: qhal_str = qhal_str { data: null(), len: 0 };
pub(crate) const NO_SLICE: qhal_slice = qhal_slice { buffer: null_mut(), offset: 0, size: 0 };

/// A record with bytes behind it that belong to a newer version: a plugin must not touch them.
#[repr(C)]
pub(crate) struct Newer<T> {
    pub(crate) record: T,
    pub(crate) rest: [u8; 64],
}

impl<T> Newer<T> {
    pub(crate) const fn new(record: T) -> Self {
        Self { record, rest: [0xa5; 64] }
    }
    pub(crate) fn is_whole(&self) -> bool {
        self.rest.iter().all(|byte| *byte == 0xa5)
    }
    pub(crate) const fn size() -> u32 {
        size_of::<Self>() as u32
    }
}

/// A record of zeros.
///
/// # Safety
/// All-zero bytes are a value of T.
pub(crate) const unsafe fn zeroed<T>() -> T {
    // SAFETY: by the caller's promise.
    unsafe { std::mem::MaybeUninit::zeroed().assume_init() }
}

pub(crate) const fn buffer_desc(size: u64) -> qhal_buffer_desc {
    qhal_buffer_desc {
        struct_size: size_of::<qhal_buffer_desc>() as u32,
        memory: QHAL_MEMORY_DEVICE,
        size,
        alignment: 0,
        usage: QHAL_USAGE_STAGING,
        scope: QHAL_SCOPE_TEMPORARY,
        growth_hint: 0,
        numa_node: u32::MAX,
        reserved: 0,
        name: NO_TEXT,
    }
}

pub(crate) const fn copy_desc(row_bytes: u64) -> qhal_copy_desc {
    qhal_copy_desc {
        struct_size: size_of::<qhal_copy_desc>() as u32,
        flags: 0,
        dst: NO_SLICE,
        src: NO_SLICE,
        dst_host: null_mut(),
        src_host: null(),
        row_bytes,
        rows: 1,
        dst_pitch: row_bytes,
        src_pitch: row_bytes,
    }
}

/// What the record says.
pub(crate) fn text(err: &qhal_error) -> String {
    let end = err.message.iter().position(|byte| *byte == 0).unwrap_or(err.message.len());
    String::from_utf8_lossy(&err.message[..end]).into_owned()
}

/// A device, a stream and a buffer by their handles, given back when dropped.
pub(crate) struct Handles<'a> {
    pub(crate) table: &'a qhal_plugin_api,
    pub(crate) device: *mut qhal_device,
    pub(crate) stream: *mut qhal_stream,
    pub(crate) buffer: *mut qhal_buffer,
    pub(crate) size: u64,
}

impl<'a> Handles<'a> {
    pub(crate) fn new(subject: &'a Subject, size: u64) -> Result<Self, Trouble> {
        let table = subject.plugin.raw_table();
        let mut handles = Self { table, device: null_mut(), stream: null_mut(), buffer: null_mut(), size };
        let told = |what: &str, (status, err): (i32, qhal_error)| {
            if status == QHAL_OK { Ok(()) } else { failed(format!("{what}: {} {}", status_name(status), text(&err))) }
        };
        told("device_open", raw!(table, device_open(subject.index, null(), 0, &raw mut handles.device)))?;
        let desc = qhal_stream_desc { struct_size: size_of::<qhal_stream_desc>() as u32, priority: 0, name: NO_TEXT };
        told("stream_create", raw!(table, stream_create(handles.device, &raw const desc, &raw mut handles.stream)))?;
        let desc = buffer_desc(size);
        told("buffer_alloc", raw!(table, buffer_alloc(handles.device, &raw const desc, &raw mut handles.buffer)))?;
        Ok(handles)
    }
    pub(crate) const fn slice(&self, offset: u64, size: u64) -> qhal_slice {
        qhal_slice { buffer: self.buffer, offset, size }
    }
    /// Everything that the buffer holds.
    pub(crate) fn read(&self) -> Result<Vec<u8>, Trouble> {
        let mut bytes = vec![0; self.size as usize];
        let desc = qhal_copy_desc {
            src: self.slice(0, self.size),
            dst_host: bytes.as_mut_ptr().cast(),
            ..copy_desc(self.size)
        };
        self.done("copy to the host", raw!(self.table, copy(self.stream, &raw const desc)))?;
        Ok(bytes)
    }
    pub(crate) fn write(&self, bytes: &[u8]) -> Result<(), Trouble> {
        let size = bytes.len() as u64;
        let desc = qhal_copy_desc { dst: self.slice(0, size), src_host: bytes.as_ptr().cast(), ..copy_desc(size) };
        self.done("copy from the host", raw!(self.table, copy(self.stream, &raw const desc)))
    }
    /// Work that was enqueued must succeed and end.
    pub(crate) fn done(&self, what: &str, (status, err): (i32, qhal_error)) -> Result<(), Trouble> {
        if status != QHAL_OK {
            return failed(format!("{what}: {} {}", status_name(status), text(&err)));
        }
        let (status, err) = raw!(self.table, stream_wait(self.stream, u64::MAX));
        if status == QHAL_OK {
            Ok(())
        } else {
            failed(format!("{what}, stream_wait: {} {}", status_name(status), text(&err)))
        }
    }
}

impl Drop for Handles<'_> {
    fn drop(&mut self) {
        // A failure to give back is another case's.
        if !self.buffer.is_null() {
            let _ = raw!(self.table, buffer_free(self.buffer));
        }
        if !self.stream.is_null() {
            let _ = raw!(self.table, stream_destroy(self.stream));
        }
        if !self.device.is_null() {
            let _ = raw!(self.table, device_close(self.device));
        }
    }
}
