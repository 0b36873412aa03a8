//! Devices that compute one model together, as one device of a fleet: of what type it is, and how it is.
//!
//! A group is as well as its worst device, as hot as its hottest, and has the memory of all. One device alone is a group of one, of
//! which everything is its own.

use qwen_hal::{Device, Health};
use qwen_runtime::Model;

/// A device of a group.
#[derive(Debug, Clone)]
pub struct GroupMember {
    /// What it says of itself; none if it says nothing.
    pub health: Option<Health>,
    /// Its memory in bytes, if known.
    pub memory_total: Option<u64>,
}

/// Type of a group: groups with as many ranks of one type give the same bits, whatever the stages that layers are divided into.
pub(super) fn kind(model: &Model) -> String {
    let device = model.device();
    let kind = format!("{} {}", device.plugin().name(), device.info().fingerprint);
    if model.ranks() > 1 { format!("{kind} x {}", model.ranks()) } else { kind }
}

/// Memory of all, if that of each is known.
pub(super) fn memory_total(devices: &[Device]) -> Option<u64> {
    devices.iter().map(|device| device.caps().memory_total).sum()
}

/// How each device of a group is.
pub(super) fn members(devices: &[Device]) -> Vec<GroupMember> {
    if devices.len() < 2 {
        return Vec::new();
    }
    let of = |device: &Device| GroupMember { health: device.health().ok(), memory_total: device.caps().memory_total };
    devices.iter().map(of).collect()
}

/// What a group says of itself; none if none of its devices says anything.
pub(super) fn health(devices: &[Device]) -> Option<Health> {
    devices.iter().filter_map(|device| device.health().ok()).reduce(|a, b| together(&a, &b))
}

fn together(a: &Health, b: &Health) -> Health {
    let sum = |a: Option<u64>, b: Option<u64>| Some(a?.saturating_add(b?));
    let most = |a: Option<f64>, b: Option<f64>| a.into_iter().chain(b).reduce(f64::max);
    Health {
        // States are in order of how bad they are.
        state: a.state.max(b.state),
        memory_free: sum(a.memory_free, b.memory_free),
        memory_used: sum(a.memory_used, b.memory_used),
        memory_reserved: sum(a.memory_reserved, b.memory_reserved),
        utilisation: most(a.utilisation, b.utilisation),
        temperature: most(a.temperature, b.temperature),
        power: a.power.zip(b.power).map(|(a, b)| a + b),
        throttle_reasons: a.throttle_reasons.zip(b.throttle_reasons).map(|(a, b)| a | b),
        memory_errors_corrected: sum(a.memory_errors_corrected, b.memory_errors_corrected),
        memory_errors_uncorrected: sum(a.memory_errors_uncorrected, b.memory_errors_uncorrected),
        link_errors: sum(a.link_errors, b.link_errors),
        // The one that showed no progress for the longest time.
        heartbeat_ns: a.heartbeat_ns.zip(b.heartbeat_ns).map(|(a, b)| a.min(b)),
        last_error: a.last_error.or(b.last_error),
    }
}
