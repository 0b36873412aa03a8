//! Devices that compute one model together: each has its part of the program (`passes::shard`), and they exchange sums.
//!
//! In: the devices of a group. Out: a [`Member`] for each rank, which enqueues the rank's part of an exchange on the rank's stream. A sum is
//! taken in order of rank, so that a result depends on the number of devices alone: not on the step that a token is in, nor on who came
//! first. Two addends have one order only; of more it is asked for, and a plugin that can't is refused.

use std::time::Duration;

use qwen_hal::abi::ops::QHAL_DTYPE_F32;
use qwen_hal::abi::{QHAL_FEATURE_COLLECTIVES, QHAL_FEATURE_INLINE};
use qwen_hal::{Collective, Communicator, Device, Exchange, LaunchError, Reduction, Slice, Stream, Support};
use qwen_ir::Op;

use crate::RuntimeError;

/// How long a rank waits for the others: much longer than a step takes, shorter than what a server takes for a hang.
const PATIENCE: Duration = Duration::from_secs(20);

/// Whether an instruction is an exchange between ranks, which no plan is made for.
pub(crate) const fn is_exchange(op: &Op) -> bool {
    matches!(op, Op::AllReduce { .. })
}

/// A rank's place in its group.
#[derive(Debug, Clone)]
pub(crate) struct Member {
    communicator: Communicator,
    rank: usize,
    reduction: Reduction,
}

/// Refuses devices that don't give the same bits.
pub(crate) fn check_types(devices: &[Device]) -> Result<(), RuntimeError> {
    let of_type = |device: &Device| (device.plugin().name().to_owned(), device.info().fingerprint.clone());
    let Some(first) = devices.first() else { return Ok(()) };
    match devices.iter().find(|device| of_type(device) != of_type(first)) {
        None => Ok(()),
        Some(other) => {
            let found = format!("{} is of another type than {}", other.label(), first.label());
            Err(refusal(devices, found, "name devices of one type"))
        }
    }
}

/// Why devices can't compute a model together.
pub(crate) fn refusal(devices: &[Device], reason: String, help: &'static str) -> RuntimeError {
    let names: Vec<String> = devices.iter().map(Device::label).collect();
    RuntimeError::Group { devices: names.join(" and "), reason, help }
}

impl Member {
    /// Joins devices of one type; gives a member for each.
    pub(crate) fn join(devices: &[Device]) -> Result<Vec<Self>, RuntimeError> {
        let refuse = |reason: String, help| Err(refusal(devices, reason, help));
        let one_each = "leave --tensor-parallel-size out, so that each device has whole layers";
        let Some(first) = devices.first() else { return Ok(Vec::new()) };
        if !first.caps().has(QHAL_FEATURE_COLLECTIVES) {
            let reason = format!("the plugin {} has no collectives", first.plugin().name());
            return refuse(reason, one_each);
        }
        if first.caps().has(QHAL_FEATURE_INLINE) {
            let reason = format!(
                "calls of the plugin {} return when work is done, so each rank would wait",
                first.plugin().name()
            );
            return refuse(reason, one_each);
        }
        let communicator = Communicator::new(devices, Some(PATIENCE))?;
        let reduction = if devices.len() == 2 { Reduction::Sum } else { Reduction::SumInOrder };
        let asked = Collective { exchange: Exchange::AllReduce(reduction), dtype: QHAL_DTYPE_F32, count: 1 };
        if let Support::No { reason } = communicator.supports(&asked)? {
            let what = if devices.len() == 2 { "sums over devices" } else { "sums over devices in order of rank" };
            return refuse(format!("{what} are not supported ({reason})"), one_each);
        }
        let member = |rank| Self { communicator: communicator.clone(), rank, reduction };
        Ok((0..devices.len()).map(member).collect())
    }

    /// Enqueues the rank's part of a sum of f32 values.
    pub(crate) fn all_reduce(&self, stream: &Stream, count: u64, from: &Slice, to: &Slice) -> Result<(), LaunchError> {
        let exchange = Exchange::AllReduce(self.reduction);
        let collective = Collective { exchange, dtype: QHAL_DTYPE_F32, count };
        self.communicator.enqueue(self.rank, stream, &collective, Some(from), Some(to))
    }
}
