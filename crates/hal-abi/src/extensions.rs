//! Extensions of minor version 2: recorded lists of launches, and collectives between the devices of a plugin.

use crate::{
    qhal_copy_desc, qhal_device, qhal_error, qhal_launch_args, qhal_plan, qhal_slice, qhal_status, qhal_stream,
    qhal_support,
};

/// Opaque recorded list of launches and copies, owned by the plugin.
#[repr(C)]
#[derive(Debug)]
pub struct qhal_cmdlist {
    _opaque: [u8; 0],
}
/// Opaque communicator, owned by the plugin.
#[repr(C)]
#[derive(Debug)]
pub struct qhal_comm {
    _opaque: [u8; 0],
}

/// Patches an operand that a launch reads, or the source of a copy (index 0).
pub const QHAL_PATCH_INPUT: u32 = 1;
/// Patches an operand that a launch writes, or the target of a copy (index 0).
pub const QHAL_PATCH_OUTPUT: u32 = 2;
/// Patches the workspace of a launch (index 0).
pub const QHAL_PATCH_WORKSPACE: u32 = 3;
/// Patches the value of a symbol of a launch.
pub const QHAL_PATCH_SYMBOL: u32 = 4;

/// What one replay uses in place of what was recorded. An operand that was recorded as absent stays absent, and none becomes absent.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_patch {
    /// Size of this struct.
    pub struct_size: u32,
    /// The command, counted from 0 in the order of recording.
    pub command: u32,
    /// `QHAL_PATCH_*`.
    pub kind: u32,
    /// Operand or symbol.
    pub index: u32,
    /// The slice, unless a symbol is patched.
    pub slice: qhal_slice,
    /// The value of a symbol.
    pub value: i64,
}

/// Extension `cmdlist`: launches and copies recorded once and enqueued together as often as wanted. A replay gives the bits that the
/// same launches one by one would give. Only plans with [`crate::QHAL_PLAN_CAPTURE_SAFE`] can be recorded.
///
/// A list belongs to a device and is used by one thread at a time. What is recorded is copied: arrays of arguments may go at once. Plans
/// and buffers that a list names live until it is destroyed, those that a patch names until its replay is done.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_cmdlist_api {
    /// Size of this struct.
    pub struct_size: u32,
    /// Version of the extension, 1.
    pub version: u32,
    /// An empty list that takes commands.
    pub begin: Option<unsafe extern "C" fn(*mut qhal_device, *mut *mut qhal_cmdlist, *mut qhal_error) -> qhal_status>,
    /// Adds a launch; nothing is enqueued. FAILED_PRECONDITION if the plan is not capture-safe, or the list has ended.
    pub record_launch: Option<
        unsafe extern "C" fn(
            *mut qhal_cmdlist,
            *mut qhal_plan,
            *const qhal_launch_args,
            *mut qhal_error,
        ) -> qhal_status,
    >,
    /// Adds a copy within the device; host memory is refused. FAILED_PRECONDITION if the list has ended.
    pub record_copy:
        Option<unsafe extern "C" fn(*mut qhal_cmdlist, *const qhal_copy_desc, *mut qhal_error) -> qhal_status>,
    /// The list takes no more commands and can be replayed.
    pub end: Option<unsafe extern "C" fn(*mut qhal_cmdlist, *mut qhal_error) -> qhal_status>,
    /// Enqueues the commands in order on a stream of the list's device, with `count` patches that hold for this replay alone, sorted by
    /// command. Allocates nothing on the device and does not wait. A patch that cannot be is refused before anything is enqueued.
    /// FAILED_PRECONDITION if the list has not ended.
    pub replay: Option<
        unsafe extern "C" fn(
            *mut qhal_cmdlist,
            *mut qhal_stream,
            *const qhal_patch,
            u32,
            *mut qhal_error,
        ) -> qhal_status,
    >,
    /// Destroys it. Replays that are pending end as they would have, or this is refused with FAILED_PRECONDITION and the list stays.
    pub destroy: Option<unsafe extern "C" fn(*mut qhal_cmdlist, *mut qhal_error) -> qhal_status>,
}

/// Every rank gets the reduction of `count` elements of all ranks.
pub const QHAL_COLLECTIVE_ALL_REDUCE: u32 = 1;
/// Every rank gets the `count` elements of each rank, in order of rank: the target has ranks x count.
pub const QHAL_COLLECTIVE_ALL_GATHER: u32 = 2;
/// Rank r gets the reduction of part r, of `count` elements: the source has ranks x count.
pub const QHAL_COLLECTIVE_REDUCE_SCATTER: u32 = 3;
/// Every rank gets the `count` elements of rank `peer`; other ranks may pass no source.
pub const QHAL_COLLECTIVE_BROADCAST: u32 = 4;
/// Rank r gets part r of each rank, in order of rank: source and target have ranks x count.
pub const QHAL_COLLECTIVE_ALL_TO_ALL: u32 = 5;
/// Gives `count` elements to rank `peer`, whose next [`QHAL_COLLECTIVE_RECV`] from this rank takes them. No target.
pub const QHAL_COLLECTIVE_SEND: u32 = 6;
/// Takes `count` elements from rank `peer`. No source.
pub const QHAL_COLLECTIVE_RECV: u32 = 7;

/// Sum. Integers wrap around. Halves may be rounded after each addition.
pub const QHAL_REDUCE_SUM: u32 = 1;
/// Maximum. NaN if one value is NaN.
pub const QHAL_REDUCE_MAX: u32 = 2;
/// Sum of each element in order of rank, beginning with rank 0: its bits depend on neither the count nor the element's position. May
/// not be supported.
pub const QHAL_REDUCE_SUM_IN_ORDER: u32 = 3;

/// Wanted communicator.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_comm_desc {
    /// Size of this struct.
    pub struct_size: u32,
    /// Number of ranks.
    pub num_devices: u32,
    /// The device of each rank, all of this plugin.
    pub devices: *const *mut qhal_device,
    /// Nanoseconds that a rank waits for the others before the communicator fails; 0 = the plugin's own limit.
    pub timeout_ns: u64,
}

/// One rank's part of a collective.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_collective_desc {
    /// Size of this struct.
    pub struct_size: u32,
    /// `QHAL_COLLECTIVE_*`.
    pub kind: u32,
    /// Type of the elements; what is only moved may be of any plain type.
    pub dtype: u32,
    /// `QHAL_REDUCE_*` for all_reduce and reduce_scatter, else 0.
    pub reduction: u32,
    /// Root of a broadcast, other side of send and recv, else 0.
    pub peer: u32,
    /// Zero.
    pub flags: u32,
    /// Elements, as the kind says.
    pub count: u64,
    /// What this rank gives.
    pub src: qhal_slice,
    /// What this rank gets. It may be the very source of all_reduce and broadcast; the source of all_gather may be this rank's part of it,
    /// and it may be this rank's part of the source of reduce_scatter. Otherwise the two do not overlap. Offsets are multiples of the
    /// device's buffer alignment, so these two are in place only where a part's size is one too.
    pub dst: qhal_slice,
}

/// Extension `collectives`: exchange between devices of one plugin.
///
/// Each rank enqueues its part on a stream of its device, from any thread; it is done when all ranks' parts are there and data has moved.
/// The n-th collective that is enqueued for a rank belongs with the n-th of every other rank (send and recv: with the n-th of the same
/// pair). On a device with [`crate::QHAL_FEATURE_INLINE`] the call returns when the collective is done, so that each rank needs a thread.
///
/// **Order.** How a result is summed depends on the number of ranks, the count and the element's position alone: the same inputs give the
/// same bits whichever rank comes first, and every rank gets the same bits.
///
/// **Failure.** Ranks whose parts do not fit each other, a rank that does not come in time, and one whose stream or device fails make the
/// communicator fail: every rank's stream gets an error (INVALID_ARGUMENT, DEADLINE_EXCEEDED, ABORTED; DEVICE_LOST where the device itself
/// is lost), later collectives are refused with it, and nobody waits for ever. A failed communicator can only be destroyed.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qhal_collectives_api {
    /// Size of this struct.
    pub struct_size: u32,
    /// Version of the extension, 1.
    pub version: u32,
    /// A communicator. UNIMPLEMENTED for devices that the plugin cannot join, such as one that is named twice.
    pub comm_create:
        Option<unsafe extern "C" fn(*const qhal_comm_desc, *mut *mut qhal_comm, *mut qhal_error) -> qhal_status>,
    /// Destroys it; no collective of it is pending.
    pub comm_destroy: Option<unsafe extern "C" fn(*mut qhal_comm, *mut qhal_error) -> qhal_status>,
    /// Whether a collective of this kind, type, reduction and count can be enqueued, and its estimated time and bytes that a rank sends;
    /// slices are not looked at. OK with level NO and a reason if not.
    pub supports: Option<
        unsafe extern "C" fn(
            *mut qhal_comm,
            *const qhal_collective_desc,
            *mut qhal_support,
            *mut qhal_error,
        ) -> qhal_status,
    >,
    /// Enqueues a rank's part: (communicator, rank, stream of that rank's device, part).
    pub enqueue: Option<
        unsafe extern "C" fn(
            *mut qhal_comm,
            u32,
            *mut qhal_stream,
            *const qhal_collective_desc,
            *mut qhal_error,
        ) -> qhal_status,
    >,
}
