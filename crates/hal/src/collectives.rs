//! The extension `collectives`: exchange between devices of one plugin.
//!
//! Sizes, ranges and overlaps are checked here for each rank; whether the parts of the ranks fit each other only the plugin sees, when
//! they meet. A communicator is given back when no stream has a pending part of it.

use std::ptr::NonNull;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use qwen_hal_abi::ops::dtype_block;
use qwen_hal_abi::{
    QHAL_COLLECTIVE_ALL_GATHER, QHAL_COLLECTIVE_ALL_REDUCE, QHAL_COLLECTIVE_ALL_TO_ALL, QHAL_COLLECTIVE_BROADCAST,
    QHAL_COLLECTIVE_RECV, QHAL_COLLECTIVE_REDUCE_SCATTER, QHAL_COLLECTIVE_SEND, QHAL_EXT_COLLECTIVES,
    QHAL_FEATURE_COLLECTIVES, QHAL_REDUCE_MAX, QHAL_REDUCE_SUM, QHAL_REDUCE_SUM_IN_ORDER, qhal_collective_desc,
    qhal_collectives_api, qhal_comm, qhal_comm_desc, qhal_support,
};

use crate::buffer::Slice;
use crate::device::{Device, Zeroed};
use crate::error::{HalError, LaunchError};
use crate::plan::Support;
use crate::plugin::{call_extension, extension};
use crate::stream::{NO_SLICE, Stream, check_slice};

/// Most ranks.
const MAX_RANKS: usize = 4096;

/// How values of several ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Their sum; integers wrap around.
    Sum,
    /// The largest; NaN if one is.
    Max,
    /// Their sum in order of rank: the bits of an element depend on neither the count nor its position.
    SumInOrder,
}

/// What is exchanged, between ranks or a pair of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Exchange {
    /// Every rank gets the reduction of all.
    AllReduce(Reduction),
    /// Every rank gets the elements of each, in order of rank.
    AllGather,
    /// Rank r gets the reduction of part r.
    ReduceScatter(Reduction),
    /// Every rank gets the root's elements.
    Broadcast {
        /// Rank that gives.
        root: usize,
    },
    /// Rank r gets part r of each, in order of rank.
    AllToAll,
    /// Elements for another rank.
    Send {
        /// Rank that takes.
        to: usize,
    },
    /// Elements of another rank.
    Recv {
        /// Rank that gives.
        from: usize,
    },
}

impl Exchange {
    /// Name in messages.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::AllReduce(_) => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::Broadcast { .. } => "broadcast",
            Self::AllToAll => "all_to_all",
            Self::Send { .. } => "send",
            Self::Recv { .. } => "recv",
        }
    }

    /// (kind, reduction, peer) as the ABI has them.
    const fn codes(&self) -> (u32, u32, usize) {
        const fn code(reduction: Reduction) -> u32 {
            match reduction {
                Reduction::Sum => QHAL_REDUCE_SUM,
                Reduction::Max => QHAL_REDUCE_MAX,
                Reduction::SumInOrder => QHAL_REDUCE_SUM_IN_ORDER,
            }
        }
        match *self {
            Self::AllReduce(reduction) => (QHAL_COLLECTIVE_ALL_REDUCE, code(reduction), 0),
            Self::AllGather => (QHAL_COLLECTIVE_ALL_GATHER, 0, 0),
            Self::ReduceScatter(reduction) => (QHAL_COLLECTIVE_REDUCE_SCATTER, code(reduction), 0),
            Self::Broadcast { root } => (QHAL_COLLECTIVE_BROADCAST, 0, root),
            Self::AllToAll => (QHAL_COLLECTIVE_ALL_TO_ALL, 0, 0),
            Self::Send { to } => (QHAL_COLLECTIVE_SEND, 0, to),
            Self::Recv { from } => (QHAL_COLLECTIVE_RECV, 0, from),
        }
    }

    /// Elements that a rank gives and gets, as multiples of the count; none where it has no such side.
    const fn shares(&self, rank: usize, ranks: u64) -> (Option<u64>, Option<u64>) {
        match self {
            Self::AllReduce(_) => (Some(1), Some(1)),
            Self::AllGather => (Some(1), Some(ranks)),
            Self::ReduceScatter(_) => (Some(ranks), Some(1)),
            Self::Broadcast { root } => (if *root == rank { Some(1) } else { None }, Some(1)),
            Self::AllToAll => (Some(ranks), Some(ranks)),
            Self::Send { .. } => (Some(1), None),
            Self::Recv { .. } => (None, Some(1)),
        }
    }
}

/// A collective of so many elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Collective {
    /// What is exchanged.
    pub exchange: Exchange,
    /// `QHAL_DTYPE_*` code of a plain type.
    pub dtype: u32,
    /// Elements of a rank's part.
    pub count: u64,
}

impl Collective {
    /// As a plugin sees it, without slices.
    #[must_use]
    pub fn raw(&self) -> qhal_collective_desc {
        let (kind, reduction, peer) = self.exchange.codes();
        qhal_collective_desc {
            struct_size: size_of::<qhal_collective_desc>() as u32,
            kind,
            dtype: self.dtype,
            reduction,
            peer: u32::try_from(peer).unwrap_or(u32::MAX),
            flags: 0,
            count: self.count,
            src: NO_SLICE,
            dst: NO_SLICE,
        }
    }
}

struct CommInner {
    devices: Vec<Device>,
    table: qhal_collectives_api,
    raw: NonNull<qhal_comm>,
}

// SAFETY: the ABI lets any thread use a communicator.
unsafe impl Send for CommInner {}
// SAFETY: as above.
unsafe impl Sync for CommInner {}

impl Drop for CommInner {
    fn drop(&mut self) {
        let Some(device) = self.devices.first() else { return };
        let result = call_extension!(
            device.plugin(),
            "",
            "collectives.comm_destroy",
            self.table,
            comm_destroy(self.raw.as_ptr())
        );
        if let Err(error) = result {
            tracing::warn!(%error, "the plugin did not take a communicator back");
        }
    }
}

/// Devices that exchange data; rank r is the r-th. Clones share it. Each rank enqueues its part, on a stream of its own device.
#[derive(Clone)]
pub struct Communicator(Arc<CommInner>);

impl PartialEq for Communicator {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
impl Eq for Communicator {}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Communicator").field("devices", &self.0.devices).finish_non_exhaustive()
    }
}

impl Communicator {
    /// Joins devices of one plugin. A rank waits for the others at most as long as `timeout`, or the plugin's own limit.
    ///
    /// # Errors
    /// [`HalError::Argument`] for no devices, devices of several plugins, or ones without collectives; else what the plugin reports,
    /// UNIMPLEMENTED for devices that it cannot join.
    pub fn new(devices: &[Device], timeout: Option<Duration>) -> Result<Self, HalError> {
        const CALL: &str = "collectives.comm_create";
        let Some(first) = devices.first().filter(|_| devices.len() <= MAX_RANKS) else {
            return Err(HalError::Argument {
                plugin: "?".into(),
                call: CALL,
                expected: format!("1 to {MAX_RANKS} devices"),
                found: devices.len().to_string(),
            });
        };
        let plugin = first.plugin();
        for device in devices {
            if !Arc::ptr_eq(device.plugin(), plugin) {
                let found = format!("one of {}", device.plugin().name());
                return Err(plugin.argument(CALL, "devices of one plugin", found));
            }
            if !device.caps().has(QHAL_FEATURE_COLLECTIVES) {
                return Err(plugin.argument(CALL, "devices with collectives", "one without"));
            }
        }
        // SAFETY: the table of this extension.
        let table: qhal_collectives_api =
            unsafe { extension(plugin, first.0.raw, QHAL_EXT_COLLECTIVES, "collectives") }?;
        let handles: Vec<_> = devices.iter().map(|device| device.0.raw.as_ptr()).collect();
        let desc = qhal_comm_desc {
            struct_size: size_of::<qhal_comm_desc>() as u32,
            num_devices: handles.len() as u32,
            devices: handles.as_ptr(),
            timeout_ns: timeout.map_or(0, |limit| u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX).max(1)),
        };
        let mut raw = std::ptr::null_mut();
        call_extension!(plugin, "", "collectives.comm_create", table, comm_create(&raw const desc, &raw mut raw))?;
        let raw = NonNull::new(raw).ok_or_else(|| plugin.contract(CALL, "a communicator", "null with status OK"))?;
        Ok(Self(Arc::new(CommInner { devices: devices.to_vec(), table, raw })))
    }

    /// The plugin's handle, for tools that test a plugin below the safe handles; alive as long as this.
    #[must_use]
    pub fn raw_handle(&self) -> *mut qhal_comm {
        self.0.raw.as_ptr()
    }
    /// Number of ranks.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.0.devices.len()
    }
    /// The device of each rank.
    #[must_use]
    pub fn devices(&self) -> &[Device] {
        &self.0.devices
    }

    /// Whether a collective can be enqueued, and what it would cost a rank.
    ///
    /// # Errors
    /// [`HalError::Contract`] if the answer is unusable; else what the plugin reports.
    pub fn supports(&self, collective: &Collective) -> Result<Support, HalError> {
        let CommInner { devices, table, raw } = &*self.0;
        let plugin = devices[0].plugin();
        let desc = collective.raw();
        let mut support = qhal_support::zeroed();
        support.struct_size = size_of::<qhal_support>() as u32;
        call_extension!(
            plugin,
            collective.exchange.name(),
            "collectives.supports",
            table,
            supports(raw.as_ptr(), &raw const desc, &raw mut support)
        )?;
        Support::read(plugin, "collectives.supports", &support)
    }

    /// Enqueues a rank's part. `src` is what the rank gives, `dst` what it gets; a side that the exchange does not have is not looked at.
    ///
    /// # Errors
    /// [`LaunchError::Argument`] if rank, stream, sizes or overlaps are wrong, then nothing was enqueued; else what the plugin reports.
    /// What the other ranks do wrong, or not at all, is an error of the stream.
    pub fn enqueue(
        &self,
        rank: usize,
        stream: &Stream,
        collective: &Collective,
        src: Option<&Slice>,
        dst: Option<&Slice>,
    ) -> Result<(), LaunchError> {
        let (src, dst) = self.check(rank, stream, collective, src, dst)?;
        let device = &self.0.devices[rank].0;
        let reserved = [src, dst].into_iter().flatten().any(|slice| slice.buffer.0.is_reserved());
        let _gate = reserved.then(|| device.gate.read().unwrap_or_else(PoisonError::into_inner));
        for (slice, write) in [(src, false), (dst, true)] {
            let Some(slice) = slice else { continue };
            if let Err(HalError::Argument { expected, found, .. }) = check_slice(device, "collective", slice, write) {
                return Err(self.refuse(collective, side(write), expected, found));
            }
        }
        let mut desc = collective.raw();
        (desc.src, desc.dst) = (src.map_or(NO_SLICE, Slice::raw), dst.map_or(NO_SLICE, Slice::raw));
        stream.mark_busy();
        stream.keep(self);
        Ok(call_extension!(
            &device.plugin,
            collective.exchange.name(),
            "collectives.enqueue",
            self.0.table,
            enqueue(self.0.raw.as_ptr(), rank as u32, stream.raw.as_ptr(), &raw const desc)
        )?)
    }

    fn refuse(
        &self,
        collective: &Collective,
        what: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> LaunchError {
        LaunchError::Argument {
            plugin: Arc::clone(self.0.devices[0].plugin().name_arc()),
            op: collective.exchange.name(),
            what: what.into(),
            expected: expected.into(),
            found: found.into(),
        }
    }

    /// The sides that the exchange has, of the right sizes.
    fn check<'a>(
        &self,
        rank: usize,
        stream: &Stream,
        collective: &Collective,
        src: Option<&'a Slice>,
        dst: Option<&'a Slice>,
    ) -> Result<(Option<&'a Slice>, Option<&'a Slice>), LaunchError> {
        let refuse = |what: &str, expected: String, found: String| self.refuse(collective, what, expected, found);
        let ranks = self.ranks();
        let Some(device) = self.0.devices.get(rank) else {
            return Err(refuse("rank", format!("below {ranks}"), rank.to_string()));
        };
        if !Arc::ptr_eq(&stream.device, &device.0) {
            return Err(refuse("stream", format!("one of the device of rank {rank}"), "one of another device".into()));
        }
        let (.., peer) = collective.exchange.codes();
        let pair = matches!(collective.exchange, Exchange::Send { .. } | Exchange::Recv { .. });
        if peer >= ranks || (pair && peer == rank) {
            return Err(refuse("peer", format!("another rank below {ranks}"), peer.to_string()));
        }
        let Some((1, element)) = dtype_block(collective.dtype) else {
            let found = format!("type {}", collective.dtype);
            return Err(refuse("element type", "one whose values stand alone".into(), found));
        };
        let of = |share: u64| collective.count.checked_mul(share)?.checked_mul(element.into());
        let whole = of(ranks as u64).filter(|_| collective.count > 0);
        if whole.is_none() {
            return Err(refuse(
                "count",
                "at least one element, within 64 bits of bytes".into(),
                format!("{}", collective.count),
            ));
        }
        let alignment = u64::from(element).max(device.caps().buffer_alignment);
        let sized = |write: bool, share: Option<u64>, slice: Option<&'a Slice>| {
            let Some(bytes) = share.and_then(of) else { return Ok(None) };
            match slice {
                Some(slice) if slice.size == bytes && slice.offset.is_multiple_of(alignment) => Ok(Some(slice)),
                Some(slice) => {
                    let expected = format!("{bytes} bytes at a multiple of {alignment}");
                    Err(refuse(&side(write), expected, format!("{} at {}", slice.size, slice.offset)))
                }
                None => Err(refuse(&side(write), format!("{bytes} bytes"), "none".into())),
            }
        };
        let (gives, gets) = collective.exchange.shares(rank, ranks as u64);
        let (src, dst) = (sized(false, gives, src)?, sized(true, gets, dst)?);
        if let (Some(src), Some(dst)) = (src, dst)
            && src.overlaps(dst)
        {
            let part =
                |whole: &Slice, part: &Slice| whole.offset.checked_add(rank as u64 * part.size) == Some(part.offset);
            let in_place = match collective.exchange {
                Exchange::AllReduce(_) | Exchange::Broadcast { .. } => src.offset == dst.offset,
                Exchange::AllGather => part(dst, src),
                Exchange::ReduceScatter(_) => part(src, dst),
                _ => false,
            };
            if !in_place {
                let expected = "memory of its own, or the very place of the rank's part";
                return Err(refuse("target", expected.into(), "bytes of the source".into()));
            }
        }
        Ok((src, dst))
    }
}

fn side(write: bool) -> String {
    if write { "target".into() } else { "source".into() }
}
