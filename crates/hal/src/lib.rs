//! Host side of the HAL: safe handles over a plugin's function table.
//!
//! In: the two entry points of a plugin ([`Plugin`]) and what the host lends it ([`Host`]). Out: [`Device`], [`Buffer`],
//! [`Stream`], [`Event`], [`Plan`], [`CommandList`], [`Communicator`], each holding its parent, so that children are always
//! destroyed first. Invariants:
//! - argument checks happen here (ranges, alignment, sizes, aliasing, symbol values), not in plugins;
//! - what a plugin returns is data of unknown quality: it is checked, never trusted with a panic;
//! - a buffer is given back when no work that may use it is pending;
//! - a launch allocates nothing.
//!
//! Concurrent work on overlapping slices without an order between it (one stream, or events) leaves undefined bytes there,
//! as on any device.

mod background;
mod buffer;
mod cmdlist;
mod collectives;
mod device;
mod error;
mod host;
#[cfg(unix)]
pub mod loader;
mod op;
mod operand;
mod plan;
mod plugin;
mod pool;
mod stream;
mod text;
mod variants;

pub use background::work_in_background;
pub use buffer::{Buffer, BufferDesc, HostOwner, Scope, Slice};
pub use cmdlist::{CommandList, Patches, Recorder};
pub use collectives::{Collective, Communicator, Exchange, Reduction};
pub use device::{Caps, Device, DeviceInfo, DtypeCaps, Health, Link};
pub use error::{CallError, HalError, LaunchError, PlanError, status_name};
pub use host::{ComputePool, Host, SerialPool};
pub use op::{Dim, OpDesc, Phase, TensorDesc, Tolerance};
pub use plan::{Estimate, LaunchArgs, Plan, PlanInfo, PlanOptions, Support};
pub use plugin::{Manifest, Plugin};
pub use pool::{Pool, available_threads};
pub use qwen_hal_abi as abi;
pub use stream::{Event, Stream};
pub use variants::Variant;

/// Handles that any thread may use, and those that one thread at a time may.
const _: () = {
    const fn any_thread<T: Send + Sync>() {}
    const fn one_thread<T: Send>() {}
    any_thread::<Host>();
    any_thread::<Plugin>();
    any_thread::<Device>();
    any_thread::<Buffer>();
    any_thread::<Plan>();
    any_thread::<LaunchArgs>();
    any_thread::<Communicator>();
    one_thread::<Stream>();
    one_thread::<Event>();
    one_thread::<Recorder>();
    one_thread::<CommandList>();
};
