//! Pools of temporaries: one buffer per [`ArenaPool`], as large as the largest bucket needs.
//!
//! - Temporary: activations, offsets planned by lifetime.
//! - Router: logits of routers and the tables of dispatch; one fixed block for the longest step, page-locked where the
//!   device has such memory, so that it can be read while the experts run.
//! - Expert: activations of experts, in slabs of 8 KiB, 64 KiB or 512 KiB: a request is rounded up to whole slabs of the
//!   largest class that it fills, so that what models with different experts leave behind can be used again.

use qwen_hal::abi::{
    QHAL_FEATURE_PINNED, QHAL_MEMORY_DEVICE, QHAL_MEMORY_PINNED, QHAL_USAGE_ACTIVATION, QHAL_USAGE_WORKSPACE,
};
use qwen_hal::{Buffer, BufferDesc, Device, Scope, Slice};
use qwen_ir::program::ArenaPool;

use crate::RuntimeError;

/// Slab classes of the expert pool, in bytes.
pub const SLAB_BYTES: [u64; 3] = [8 << 10, 64 << 10, 512 << 10];

/// Bytes that a request of the expert pool takes: whole slabs of the largest class that it fills at least once.
#[must_use]
pub fn slab_bytes(bytes: u64) -> u64 {
    let class = SLAB_BYTES.into_iter().rev().find(|class| bytes >= *class).unwrap_or(SLAB_BYTES[0]);
    bytes.max(1).div_ceil(class).saturating_mul(class)
}

/// Bytes that a pool takes of a device's memory to have room for so many.
pub(crate) fn taken(pool: ArenaPool, bytes: u64) -> u64 {
    if pool == ArenaPool::Expert && bytes > 0 { slab_bytes(bytes) } else { bytes }
}

/// Alignment of the pools, and so of every place in them: a cache line, or more if the device wants more.
#[must_use]
pub fn alignment(device: &Device) -> u64 {
    device.caps().buffer_alignment.max(64)
}

/// Buffers of temporaries and the workspace of plans.
#[derive(Debug, Default)]
pub struct Arenas {
    pools: [Option<Buffer>; 3],
    workspace: Option<Buffer>,
    epoch: u64,
}

impl Arenas {
    /// Makes every pool at least so large. Changes [`Arenas::epoch`] if a buffer moved; nothing may be running then.
    ///
    /// # Errors
    /// If memory is short; the old buffers stay.
    pub fn ensure(&mut self, device: &Device, pools: [u64; 3], workspace: u64) -> Result<(), RuntimeError> {
        for pool in ArenaPool::ALL {
            let wanted = taken(pool, pools[pool as usize]);
            let name = match pool {
                ArenaPool::Temporary => "arena.temporary",
                ArenaPool::Router => "arena.router",
                ArenaPool::Expert => "arena.expert",
            };
            let pinned = pool == ArenaPool::Router && device.caps().has(QHAL_FEATURE_PINNED);
            self.epoch += u64::from(grow(device, &mut self.pools[pool as usize], wanted, name, pinned)?);
        }
        self.epoch += u64::from(grow(device, &mut self.workspace, workspace, "arena.workspace", false)?);
        Ok(())
    }

    /// Bytes from `offset` to the end of a pool.
    #[must_use]
    pub fn slice(&self, pool: ArenaPool, offset: u64) -> Option<Slice> {
        let buffer = self.pools[pool as usize].as_ref()?;
        buffer.slice(offset, buffer.size().checked_sub(offset)?).ok()
    }
    /// The workspace.
    #[must_use]
    pub fn workspace(&self) -> Option<Slice> {
        self.workspace.as_ref().map(Buffer::whole)
    }
    /// Changes when a buffer moves: slices taken before are stale.
    #[must_use]
    pub const fn epoch(&self) -> u64 {
        self.epoch
    }
    /// Bytes of each pool and of the workspace.
    #[must_use]
    pub fn bytes(&self) -> [u64; 4] {
        let size = |buffer: &Option<Buffer>| buffer.as_ref().map_or(0, Buffer::size);
        [size(&self.pools[0]), size(&self.pools[1]), size(&self.pools[2]), size(&self.workspace)]
    }
}

fn grow(
    device: &Device,
    buffer: &mut Option<Buffer>,
    wanted: u64,
    name: &str,
    pinned: bool,
) -> Result<bool, RuntimeError> {
    if buffer.as_ref().map_or(0, Buffer::size) >= wanted {
        return Ok(false);
    }
    let usage = if name == "arena.workspace" { QHAL_USAGE_WORKSPACE } else { QHAL_USAGE_ACTIVATION };
    let mut desc = BufferDesc::new(wanted, usage, Scope::Temporary, name);
    desc.memory = if pinned { QHAL_MEMORY_DEVICE | QHAL_MEMORY_PINNED } else { QHAL_MEMORY_DEVICE };
    desc.alignment = alignment(device);
    *buffer = Some(device.alloc(&desc)?);
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_take_whole_slabs() {
        assert_eq!(slab_bytes(1), 8 << 10);
        assert_eq!(slab_bytes(8 << 10), 8 << 10);
        assert_eq!(slab_bytes(60 << 10), 64 << 10);
        assert_eq!(slab_bytes((64 << 10) + 1), 128 << 10);
        assert_eq!(slab_bytes(3 << 20), 3 << 20);
    }
}
