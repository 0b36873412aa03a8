//! Memory behind the blocks of the KV cache: one buffer per layer, of which the first `n` blocks are backed.
//!
//! On a device with virtual memory the whole address range is reserved at once and backed as the pool grows, so that block
//! tables and slices stay valid and nothing is ever copied. On another device the limit is allocated up front.

use qwen_formats::DType;
use qwen_hal::abi::{QHAL_FEATURE_VMM, QHAL_USAGE_KV};
use qwen_hal::{Buffer, BufferDesc, Device, Scope, Slice};
use qwen_ir::{Graph, StateDecl, StateId};

use crate::{Bytes, RuntimeError};

/// Buffers of every state and layer.
#[derive(Debug)]
pub struct KvMemory {
    /// By state and layer; none for a layer that another device holds.
    layers: Vec<Vec<Option<Layer>>>,
    limit: u32,
    committed: u32,
    growable: bool,
    granularity: u64,
}

#[derive(Debug)]
struct Layer {
    buffer: Buffer,
    block_bytes: u64,
    committed: u64,
}

/// Bytes of one block of one layer.
#[must_use]
pub fn block_bytes(state: &StateDecl, dtype: DType, block_size: u32) -> u64 {
    let elements = state.layout.elements_per_token().saturating_mul(u64::from(block_size));
    elements.saturating_mul(dtype.block_bytes() as u64)
}

/// Bytes of one block over all layers of states that `held` says are on a device.
#[must_use]
pub fn bytes_per_block(graph: &Graph, dtype: DType, block_size: u32, held: &dyn Fn(StateId, u32) -> bool) -> u64 {
    let bytes = |(at, state): (usize, &StateDecl)| {
        let layers = (0..state.layers).filter(|i| held(StateId(at as u32), state.first_layer.saturating_add(*i)));
        block_bytes(state, dtype, block_size).saturating_mul(layers.count() as u64)
    };
    graph.states.iter().enumerate().map(bytes).fold(0, u64::saturating_add)
}

impl KvMemory {
    /// Address space for `limit` blocks of every layer of a state that `held` says is on this device.
    ///
    /// # Errors
    /// If the device has not so much address space or memory.
    pub fn reserve(
        device: &Device,
        graph: &Graph,
        dtype: DType,
        block_size: u32,
        limit: u32,
        held: &dyn Fn(StateId, u32) -> bool,
    ) -> Result<Self, RuntimeError> {
        let growable = device.caps().has(QHAL_FEATURE_VMM);
        let granularity = device.caps().vmm_granularity.unwrap_or(1).max(1);
        let mut layers = Vec::with_capacity(graph.states.len());
        for (at, state) in graph.states.iter().enumerate() {
            let block_bytes = block_bytes(state, dtype, block_size);
            let bytes = block_bytes
                .checked_mul(u64::from(limit))
                .and_then(|bytes| bytes.checked_next_multiple_of(granularity))
                .ok_or_else(|| RuntimeError::Memory {
                    what: format!("the KV cache of {limit} blocks"),
                    needed: Bytes(u64::MAX),
                    available: Bytes(0),
                })?;
            let layer = |i: u32| {
                let layer = state.first_layer.saturating_add(i);
                if !held(StateId(at as u32), layer) {
                    return Ok(None);
                }
                let name = format!("{}.{layer}", state.name);
                let mut desc = BufferDesc::new(bytes, QHAL_USAGE_KV, Scope::Dynamic, name);
                desc.growth_hint = bytes;
                let buffer = if growable { device.reserve(&desc)? } else { device.alloc(&desc)? };
                Ok(Some(Layer { buffer, block_bytes, committed: if growable { 0 } else { bytes } }))
            };
            layers.push((0..state.layers).map(layer).collect::<Result<Vec<_>, RuntimeError>>()?);
        }
        Ok(Self { layers, limit, committed: if growable { 0 } else { limit }, growable, granularity })
    }

    /// Bytes of one block over all layers.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        self.layers.iter().flatten().flatten().map(|layer| layer.block_bytes).sum()
    }

    /// Backs blocks `0..total`.
    ///
    /// # Errors
    /// If memory is short; what was backed before stays.
    pub fn commit(&mut self, total: u32) -> Result<(), RuntimeError> {
        if total <= self.committed || !self.growable {
            return Ok(());
        }
        let total = total.min(self.limit);
        for layer in self.layers.iter_mut().flatten().flatten() {
            let end = (u64::from(total) * layer.block_bytes).next_multiple_of(self.granularity);
            if end > layer.committed {
                layer.buffer.commit(layer.committed, end - layer.committed)?;
                layer.committed = end;
            }
        }
        self.committed = total;
        Ok(())
    }

    /// The whole cache of a layer, backed or not.
    #[must_use]
    pub fn slice(&self, state: StateId, layer: u32) -> Option<Slice> {
        self.layers.get(state.index())?.get(layer as usize)?.as_ref().map(|layer| layer.buffer.whole())
    }

    /// Whether a cache is held here.
    #[must_use]
    pub fn has_states(&self) -> bool {
        self.layers.iter().flatten().any(Option::is_some)
    }

    /// Blocks that are backed.
    #[must_use]
    pub const fn committed(&self) -> u32 {
        self.committed
    }

    /// Bytes that are backed, over all layers.
    #[must_use]
    pub fn committed_bytes(&self) -> u64 {
        self.layers.iter().flatten().flatten().map(|layer| layer.committed).sum()
    }
}
