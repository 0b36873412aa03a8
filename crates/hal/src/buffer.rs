//! Memory of a device: buffers, ranges of them, and address space that is backed step by step.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use qwen_hal_abi::{
    QHAL_ACCESS_READ, QHAL_IMPORT_HOST, QHAL_MEMORY_DEVICE, QHAL_SCOPE_DYNAMIC, QHAL_SCOPE_PERSISTENT,
    QHAL_SCOPE_TEMPORARY, qhal_buffer, qhal_buffer_desc, qhal_import_desc, qhal_slice,
};

use crate::device::{Dead, DeviceInner};
use crate::error::HalError;
use crate::plugin::call;
use crate::text::as_str;

/// How long memory lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scope {
    /// As long as the model.
    Persistent,
    /// Grows with requests.
    Dynamic,
    /// Within one step.
    Temporary,
}

/// Wanted memory.
#[derive(Debug, Clone)]
pub struct BufferDesc {
    /// Bytes.
    pub size: u64,
    /// Power of two, 0 = the device's own.
    pub alignment: u64,
    /// `QHAL_MEMORY_*` bits.
    pub memory: u32,
    /// `QHAL_USAGE_*` bits.
    pub usage: u32,
    /// Lifetime.
    pub scope: Scope,
    /// Expected final size of what grows, 0 unknown.
    pub growth_hint: u64,
    /// Preferred NUMA node.
    pub numa_node: Option<u32>,
    /// For reports.
    pub name: String,
}

impl BufferDesc {
    /// Device memory of so many bytes.
    #[must_use]
    pub fn new(size: u64, usage: u32, scope: Scope, name: impl Into<String>) -> Self {
        let name = name.into();
        Self { size, alignment: 0, memory: QHAL_MEMORY_DEVICE, usage, scope, growth_hint: 0, numa_node: None, name }
    }

    fn raw(&self) -> qhal_buffer_desc {
        qhal_buffer_desc {
            struct_size: size_of::<qhal_buffer_desc>() as u32,
            memory: self.memory,
            size: self.size,
            alignment: self.alignment,
            usage: self.usage,
            scope: match self.scope {
                Scope::Persistent => QHAL_SCOPE_PERSISTENT,
                Scope::Dynamic => QHAL_SCOPE_DYNAMIC,
                Scope::Temporary => QHAL_SCOPE_TEMPORARY,
            },
            growth_hint: self.growth_hint,
            numa_node: self.numa_node.unwrap_or(u32::MAX),
            reserved: 0,
            name: as_str(&self.name),
        }
    }
}

/// Host memory that a buffer borrows; kept alive by the buffer. `as_ref` must give the same bytes each time, unchanged as
/// long as the owner lives.
pub type HostOwner = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// Which parts of an address range are backed.
#[derive(Debug, Default)]
struct Committed {
    /// End of the backed part that starts at 0: the common case, read without a lock.
    prefix: AtomicU64,
    /// Start to end, disjoint, not touching.
    ranges: Mutex<BTreeMap<u64, u64>>,
}

impl Committed {
    fn contains(&self, start: u64, end: u64) -> bool {
        if end <= self.prefix.load(Ordering::Acquire) {
            return true;
        }
        let ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        ranges.range(..=start).next_back().is_some_and(|(_, have)| end <= *have)
    }

    fn publish(&self, ranges: &BTreeMap<u64, u64>) {
        self.prefix.store(ranges.get(&0).copied().unwrap_or(0), Ordering::Release);
    }

    fn insert(&self, mut start: u64, mut end: u64) {
        let mut ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some((have, until)) =
            ranges.range(..=end).next_back().map(|(a, b)| (*a, *b)).filter(|(_, until)| *until >= start)
        {
            ranges.remove(&have);
            start = start.min(have);
            end = end.max(until);
        }
        ranges.insert(start, end);
        self.publish(&ranges);
    }

    fn remove(&self, start: u64, end: u64) {
        let mut ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some((have, until)) =
            ranges.range(..end).next_back().map(|(a, b)| (*a, *b)).filter(|(_, until)| *until > start)
        {
            ranges.remove(&have);
            if until > end {
                ranges.insert(end, until);
            }
            if have < start {
                ranges.insert(have, start);
            }
        }
        self.publish(&ranges);
    }

    fn total(&self) -> u64 {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner).iter().map(|(start, end)| end - start).sum()
    }
}

/// The one owner of a plugin's memory object.
pub(crate) struct BufferInner {
    pub(crate) device: Arc<DeviceInner>,
    pub(crate) raw: NonNull<qhal_buffer>,
    pub(crate) size: u64,
    pub(crate) writable: bool,
    committed: Option<Committed>,
    owner: Option<HostOwner>,
    name: String,
}

// SAFETY: the ABI lets any thread use a buffer handle; the rest is Send and Sync by itself.
unsafe impl Send for BufferInner {}
// SAFETY: as above.
unsafe impl Sync for BufferInner {}

impl BufferInner {
    pub(crate) const fn is_reserved(&self) -> bool {
        self.committed.is_some()
    }

    /// Says why a range must not be used, if so.
    pub(crate) fn fault(&self, offset: u64, size: u64, write: bool) -> Option<(String, String)> {
        let found = || format!("{size} bytes at {offset} of {:?} ({} bytes)", self.name, self.size);
        match offset.checked_add(size) {
            Some(end) if end <= self.size => {
                if write && !self.writable {
                    return Some(("a writable buffer".into(), format!("read-only {:?}", self.name)));
                }
                match &self.committed {
                    Some(committed) if size > 0 && !committed.contains(offset, end) => {
                        Some(("a committed range".into(), found()))
                    }
                    _ => None,
                }
            }
            _ => Some(("a range within the buffer".into(), found())),
        }
    }
}

impl Drop for BufferInner {
    fn drop(&mut self) {
        self.device.retire(Dead::Buffer { raw: self.raw, _owner: self.owner.take() });
    }
}

/// Memory of a device. Clones share it; it is given back when the last one is gone and no pending work may use it.
#[derive(Clone)]
pub struct Buffer(pub(crate) Arc<BufferInner>);

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("name", &self.0.name).field("size", &self.0.size).finish_non_exhaustive()
    }
}

impl PartialEq for Buffer {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
impl Eq for Buffer {}

impl Buffer {
    pub(crate) fn alloc(device: &Arc<DeviceInner>, desc: &BufferDesc, reserve: bool) -> Result<Self, HalError> {
        let plugin = &*device.plugin;
        let call = if reserve { "vmm.reserve" } else { "buffer_alloc" };
        if desc.size == 0 {
            return Err(plugin.argument(call, "at least one byte", "0"));
        }
        if desc.alignment != 0 && !desc.alignment.is_power_of_two() {
            return Err(plugin.argument(call, "an alignment that is a power of two", desc.alignment.to_string()));
        }
        let raw_desc = desc.raw();
        let mut raw = std::ptr::null_mut();
        if reserve {
            device.vmm_reserve(&raw_desc, &mut raw)?;
        } else {
            call!(plugin, "", buffer_alloc(device.raw.as_ptr(), &raw const raw_desc, &raw mut raw))?;
        }
        let raw = NonNull::new(raw).ok_or_else(|| plugin.contract(call, "a buffer", "null with status OK"))?;
        Ok(Self(Arc::new(BufferInner {
            device: Arc::clone(device),
            raw,
            size: desc.size,
            writable: true,
            committed: reserve.then(Committed::default),
            owner: None,
            name: desc.name.clone(),
        })))
    }

    pub(crate) fn import(
        device: &Arc<DeviceInner>,
        owner: HostOwner,
        usage: u32,
        name: &str,
    ) -> Result<Self, HalError> {
        let plugin = &*device.plugin;
        let bytes = (*owner).as_ref();
        let (host, size) = (bytes.as_ptr(), bytes.len() as u64);
        if size == 0 {
            return Err(plugin.argument("buffer_import", "at least one byte", "0"));
        }
        let desc = qhal_import_desc {
            struct_size: size_of::<qhal_import_desc>() as u32,
            kind: QHAL_IMPORT_HOST,
            host: host.cast_mut().cast(),
            fd: -1,
            peer: std::ptr::null_mut(),
            size,
            access: QHAL_ACCESS_READ,
            usage,
            name: as_str(name),
        };
        let mut raw = std::ptr::null_mut();
        call!(plugin, "", buffer_import(device.raw.as_ptr(), &raw const desc, &raw mut raw))?;
        let raw =
            NonNull::new(raw).ok_or_else(|| plugin.contract("buffer_import", "a buffer", "null with status OK"))?;
        Ok(Self(Arc::new(BufferInner {
            device: Arc::clone(device),
            raw,
            size,
            writable: false,
            committed: None,
            owner: Some(owner),
            name: name.to_owned(),
        })))
    }

    /// Bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.0.size
    }
    /// Name for reports.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }
    /// Whether ops may write it.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.0.writable
    }
    /// Bytes that are backed: all of them unless the buffer was reserved.
    #[must_use]
    pub fn committed_bytes(&self) -> u64 {
        self.0.committed.as_ref().map_or(self.0.size, Committed::total)
    }

    /// The whole buffer.
    #[must_use]
    pub fn whole(&self) -> Slice {
        Slice { buffer: self.clone(), offset: 0, size: self.0.size }
    }

    /// A range of it.
    ///
    /// # Errors
    /// [`HalError::Argument`] if it does not lie within the buffer.
    pub fn slice(&self, offset: u64, size: u64) -> Result<Slice, HalError> {
        match offset.checked_add(size) {
            Some(end) if end <= self.0.size => Ok(Slice { buffer: self.clone(), offset, size }),
            _ => Err(self.0.device.plugin.argument(
                "slice",
                format!("a range within {} bytes of {:?}", self.0.size, self.0.name),
                format!("{size} bytes at {offset}"),
            )),
        }
    }

    /// Backs a range of a reserved buffer with zeroed memory. What is backed already keeps its content.
    ///
    /// # Errors
    /// [`HalError::Argument`] for a buffer that was not reserved or a range off the granularity; else what the plugin reports.
    pub fn commit(&self, offset: u64, size: u64) -> Result<(), HalError> {
        let committed = self.check_vmm("vmm.commit", offset, size)?;
        self.0.device.vmm_commit(self.0.raw, offset, size)?;
        committed.insert(offset, offset + size);
        Ok(())
    }

    /// Gives the memory of a range back; its content is lost. No pending work may use it.
    ///
    /// # Errors
    /// As [`Buffer::commit`]; also [`HalError::Argument`] while a stream of the device has work that was not waited for.
    pub fn decommit(&self, offset: u64, size: u64) -> Result<(), HalError> {
        let committed = self.check_vmm("vmm.decommit", offset, size)?;
        let device = &self.0.device;
        // No launch may be between its check of the range and the end of its use.
        let _gate = device.gate.write().unwrap_or_else(PoisonError::into_inner);
        if device.is_busy() {
            return Err(device.plugin.argument("vmm.decommit", "streams that were waited for", "pending work"));
        }
        committed.remove(offset, offset + size);
        device.vmm_decommit(self.0.raw, offset, size)
    }

    fn check_vmm(&self, call: &'static str, offset: u64, size: u64) -> Result<&Committed, HalError> {
        let plugin = &*self.0.device.plugin;
        let Some(committed) = &self.0.committed else {
            return Err(plugin.argument(call, "a reserved buffer", format!("{:?}, which is allocated", self.0.name)));
        };
        let granularity = self.0.device.caps.vmm_granularity.unwrap_or(1).max(1);
        let aligned = offset.is_multiple_of(granularity) && size.is_multiple_of(granularity);
        match offset.checked_add(size) {
            Some(end) if aligned && size > 0 && end <= self.0.size => Ok(committed),
            _ => Err(plugin.argument(
                call,
                format!("a range within {} bytes in steps of {granularity}", self.0.size),
                format!("{size} bytes at {offset}"),
            )),
        }
    }
}

/// A range of a buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    pub(crate) buffer: Buffer,
    pub(crate) offset: u64,
    pub(crate) size: u64,
}

impl Slice {
    /// The buffer.
    #[must_use]
    pub const fn buffer(&self) -> &Buffer {
        &self.buffer
    }
    /// First byte.
    #[must_use]
    pub const fn offset(&self) -> u64 {
        self.offset
    }
    /// Bytes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size
    }
    /// A part of it, `offset` counted from its own start.
    ///
    /// # Errors
    /// [`HalError::Argument`] if the part does not lie within it.
    pub fn slice(&self, offset: u64, size: u64) -> Result<Self, HalError> {
        match offset.checked_add(size) {
            Some(end) if end <= self.size => self.buffer.slice(self.offset + offset, size),
            _ => Err(self.buffer.0.device.plugin.argument(
                "slice",
                format!("a part of {} bytes", self.size),
                format!("{size} bytes at {offset}"),
            )),
        }
    }
    /// Whether two slices share bytes.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let apart = self.offset + self.size <= other.offset || other.offset + other.size <= self.offset;
        self.buffer == other.buffer && !apart
    }
    /// As a plugin sees it; valid as long as the buffer.
    #[must_use]
    pub fn raw(&self) -> qhal_slice {
        qhal_slice { buffer: self.buffer.0.raw.as_ptr(), offset: self.offset, size: self.size }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn committed_ranges_merge_and_split() {
        let c = Committed::default();
        c.insert(0, 10);
        c.insert(20, 30);
        assert!(c.contains(0, 10) && c.contains(22, 30) && !c.contains(5, 25));
        c.insert(10, 20);
        assert!(c.contains(0, 30));
        assert_eq!(c.total(), 30);
        c.remove(5, 25);
        assert!(c.contains(0, 5) && c.contains(25, 30) && !c.contains(4, 6) && !c.contains(24, 26));
        assert_eq!(c.total(), 10);
        c.remove(0, 5);
        assert!(!c.contains(0, 1));
        c.insert(0, 30);
        assert_eq!(c.total(), 30);
    }

    proptest::proptest! {
        #[test]
        fn committed_ranges_are_a_set(steps in proptest::collection::vec((0..2_u8, 0..64_u64, 1..16_u64), 0..40)) {
            let (committed, mut model) = (Committed::default(), [false; 80]);
            for (kind, start, len) in steps {
                let end = start + len;
                if kind == 0 { committed.insert(start, end) } else { committed.remove(start, end) }
                model[start as usize..end as usize].fill(kind == 0);
                assert_eq!(committed.total(), model.iter().filter(|set| **set).count() as u64);
                for from in 0..80_u64 {
                    for until in from + 1..=80 {
                        let expected = model[from as usize..until as usize].iter().all(|set| *set);
                        assert_eq!(committed.contains(from, until), expected, "{from}..{until}");
                    }
                }
            }
        }
    }
}
