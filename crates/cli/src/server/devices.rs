//! The devices of a server: from names to instances of a fleet, and how each is, in the words of `/healthz`.
//!
//! All devices share one host and one loaded plugin of a kind, so that their kernels on the host take turns on one pool of
//! threads.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use qwen_dispatch::{HardwareProfile, ProbeOptions, ProfileCache};
use qwen_engine::{
    Build, DeviceRates, Engine, EngineOptions, Fleet, GroupMember, GuardOptions, Instance, InstanceReport, LoadOptions,
    Place, Topology,
};
use qwen_hal::{Device, Health, Host, abi};
use qwen_server::{DeviceReport, MemberReport};

use crate::arguments::DeviceArguments;
use crate::dispatch;
use crate::error::{CliError, sentence};
use crate::model;
use crate::plugins::{self, DeviceName, Group, Placer};

/// Models up to this size are loaded onto the host too, for a moment, to compare a device's known answer with the host's.
const REFERENCE_BYTES: u64 = 2 << 30;
/// A device whose rates are not known is measured so long for each figure. That is kept apart from what `qwen devices` measures,
/// which takes longer and replaces it.
const PROBE: ProbeOptions = ProbeOptions { each: Duration::from_millis(5), memory: 64 << 20 };

/// Names of `QHAL_HEALTH_*`.
const STATES: &[(u32, &str)] = &[
    (abi::QHAL_HEALTH_OK, "ok"),
    (abi::QHAL_HEALTH_DEGRADED, "degraded"),
    (abi::QHAL_HEALTH_THROTTLED, "throttled"),
    (abi::QHAL_HEALTH_UNRESPONSIVE, "unresponsive"),
    (abi::QHAL_HEALTH_LOST, "lost"),
];

fn state_name(state: u32) -> &'static str {
    STATES.iter().find(|(known, _)| *known == state).map_or("unknown", |(_, name)| name)
}

/// What every instance of a server needs.
#[derive(Clone)]
pub(super) struct Common {
    pub(super) path: PathBuf,
    pub(super) load: LoadOptions,
    pub(super) guard: Option<GuardOptions>,
}

/// What is known of a device, or of a group of them, besides how it is.
pub(super) struct Known {
    /// Where its rates come from, in words.
    rates: &'static str,
    /// Names of a group's devices.
    members: Vec<String>,
}

/// By the name of the device or group.
pub(super) type Rates = BTreeMap<String, Known>;

/// Opens every device, and says where its rates come from.
///
/// # Errors
/// If a device does not exist or can't be opened.
pub(super) fn instances(
    arguments: &DeviceArguments,
    common: &Common,
    topology: &Topology,
) -> Result<(Vec<Instance>, Rates), CliError> {
    let placer = Arc::new(Placer::new(arguments, model::file_bytes(&common.path))?);
    let (mut instances, mut sources, mut known) = (Vec::new(), Rates::new(), HashSet::new());
    for group in arguments.groups()? {
        let devices = placer.open_group(&group)?;
        let Some(device) = devices.first() else { continue };
        let is_auto = group.only().is_some_and(|name| name.plugin == plugins::AUTO);
        let shown = if is_auto { device.label() } else { group.to_string() };
        devices.iter().try_for_each(|device| plugins::is_new(device, &mut known))?;
        let (rates, source) = rates(device);
        tracing::info!(device = shown, rates = source, "rates that load is compared with");
        sources.insert(shown.clone(), Known { rates: source, members: group.members() });
        // A group is where its first device is: requests go in and logits come out there.
        let place = place_of(device, topology);
        let build = build(Arc::clone(&placer), group, devices, common.clone(), rates);
        instances.push(Instance { name: shown, place, build });
    }
    Ok((instances, sources))
}

/// An engine on the host to compare with, if the model is small enough to be loaded twice.
pub(super) fn reference(arguments: &DeviceArguments, common: &Common) -> Option<Build> {
    let bytes = model::file_bytes(&common.path);
    let (threads, common) = (arguments.threads, common.clone());
    (bytes <= REFERENCE_BYTES).then(|| -> Build {
        Box::new(move || {
            let device = plugins::open(&DeviceName::default(), &[], threads).map_err(|error| sentence(&error))?;
            let load = LoadOptions { max_sequences: 1, max_cached_tokens: None, ..common.load.clone() };
            model::load_on(&common.path, device.into(), &load).map_err(|error| sentence(&error))
        })
    })
}

fn build(placer: Arc<Placer>, group: Group, devices: Vec<Device>, common: Common, rates: Option<DeviceRates>) -> Build {
    // The devices that were opened to be looked at serve the first time.
    let mut first = Some(devices);
    Box::new(move || {
        let devices = first.take().map_or_else(|| placer.open_group(&group), Ok);
        let load = |devices: Vec<Device>| -> Result<Engine, CliError> {
            let placement = placer.beside_cpu(&group, devices)?;
            let host: Host = *placement.device.plugin().host();
            let loaded = model::load_files(&common.path, placement, &common.load)?;
            let pool = Some(Arc::clone(host.pool()));
            let options = EngineOptions { rates, pool, guard: common.guard, ..EngineOptions::default() };
            Ok(Engine::with_options(loaded, options))
        };
        devices.and_then(load).map_err(|error| sentence(&error))
    })
}

/// Where it is plugged in: by its PCI address, else by its NUMA node, else nobody knows.
fn place_of(device: &Device, topology: &Topology) -> Place {
    let place = device.info().bus_address.map_or_else(Place::default, |address| topology.of_bus_address(address));
    Place { node: place.node.or(device.caps().numa_node), ..place }
}

/// What a device does at most, and where that is known from. A simulated one has rates of a chip, but takes the host's time: the
/// two can't be compared.
fn rates(device: &Device) -> (Option<DeviceRates>, &'static str) {
    if [abi::QHAL_KIND_NULL, abi::QHAL_KIND_SIMULATED].contains(&device.info().kind) {
        return (None, "the best that steps have reached: the device is not real");
    }
    let threads = dispatch::threads(device);
    if let Some(rates) = dispatch::profiles().load(device, threads).and_then(|profile| of_profile(&profile)) {
        return (Some(rates), "measured before, by the device's profile");
    }
    let brief = ProfileCache::new(dispatch::profiles().folder().join("brief"));
    match brief.load_or_measure(device, threads, false, &PROBE).map(|profile| of_profile(&profile)) {
        Ok(Some(rates)) => (Some(rates), "measured briefly at the first start; `qwen devices` measures longer"),
        Ok(None) => (None, "the best that steps have reached: the device has no figures"),
        Err(error) => {
            tracing::warn!(%error, "rates of a device");
            (None, "the best that steps have reached: the device could not be measured")
        }
    }
}

/// The best rate of each form of products.
fn of_profile(profile: &HardwareProfile) -> Option<DeviceRates> {
    let best = |is_of: &dyn Fn(&str) -> bool| {
        let rates = profile.rates.iter().filter(|(name, _)| is_of(name));
        rates.map(|(_, rate)| rate.operations).max_by(f64::total_cmp)
    };
    Some(DeviceRates {
        read_bytes: profile.bandwidth()?,
        int8_operations: best(&|name| name.contains(".i8")),
        bf16_operations: best(&|name| name.ends_with(".bf16")),
        f32_operations: best(&|name| name.ends_with(".f32")),
    })
}

/// Every device as `/healthz` tells of it.
pub(super) fn reports(fleet: &Fleet, rates: &Rates) -> Vec<DeviceReport> {
    let report = |instance: InstanceReport| report(&instance, rates.get(&instance.name));
    fleet.instances().into_iter().map(report).collect()
}

fn report(instance: &InstanceReport, known: Option<&Known>) -> DeviceReport {
    let health = instance.health.as_ref();
    let stats = &instance.stats;
    let counted = instance.faults + instance.failed_tests;
    let uncorrected = health.and_then(|health| health.memory_errors_uncorrected).unwrap_or(0);
    DeviceReport {
        name: instance.name.clone(),
        title: instance.title.clone(),
        kind: plugins::kind_name(instance.kind).to_owned(),
        status: health.map_or("unknown", |health| state_name(health.state)).to_owned(),
        numa_node: instance.place.node,
        pci: (!instance.place.bus.is_empty()).then(|| instance.place.bus.join("/")),
        trust: instance.trust.name().to_owned(),
        reason: (!instance.reason.is_empty()).then(|| instance.reason.clone()),
        temperature: health.and_then(|health| health.temperature).map(|degrees| (10.0 * degrees).round() / 10.0),
        compute_util: health.and_then(|health| health.utilisation).and_then(percent),
        memory_util: health.and_then(|health| memory_share(health, instance.memory_total)).and_then(percent),
        power: health.and_then(|health| health.power).map(|watts| (10.0 * watts).round() / 10.0),
        error_count: counted.max(stats.device_errors + stats.guard_mismatches) + uncorrected,
        last_reset_time: instance.last_reset.and_then(utc),
        step_compute_util: percent(stats.compute_utilisation).unwrap_or(0.0),
        step_bandwidth_util: percent(stats.bandwidth_utilisation).unwrap_or(0.0),
        hli: stats.hli,
        rates: known.map_or("unknown", |known| known.rates).to_owned(),
        members: known.map(|known| members(&known.members, &instance.members)).unwrap_or_default(),
        in_flight: instance.in_flight,
        quarantines: instance.quarantines,
        known_answer_tests: instance.tests,
    }
}

/// Each device of a group, as far as the group is open.
fn members(names: &[String], open: &[GroupMember]) -> Vec<MemberReport> {
    let of = |(at, name): (usize, &String)| {
        let member = open.get(at);
        let health = member.and_then(|member| member.health.as_ref());
        let memory = health.and_then(|health| memory_share(health, member.and_then(|member| member.memory_total)));
        MemberReport {
            name: name.clone(),
            status: health.map_or("unknown", |health| state_name(health.state)).to_owned(),
            temperature: health.and_then(|health| health.temperature),
            memory_util: memory.and_then(percent),
        }
    };
    names.iter().enumerate().map(of).collect()
}

/// A share in percent, with one decimal.
fn percent(share: f64) -> Option<f64> {
    share.is_finite().then(|| (1000.0 * share.clamp(0.0, 1.0)).round() / 10.0)
}

/// What is not free counts as used, by whomever.
fn memory_share(health: &Health, total: Option<u64>) -> Option<f64> {
    let share = |used: u64, total: u64| (total > 0).then(|| used as f64 / total as f64);
    match (health.memory_free, health.memory_used, total) {
        (Some(free), _, Some(total)) => share(total.saturating_sub(free), total),
        (Some(free), Some(used), None) => share(used, used.saturating_add(free)),
        (None, Some(used), Some(total)) => share(used, total),
        _ => None,
    }
}

/// A time as RFC 3339 writes it, in whole seconds; none outside the years that it can write.
fn utc(time: SystemTime) -> Option<String> {
    Timestamp::try_from(time).ok().map(|time| format!("{time:.0}"))
}

/// The topology below a folder, by default of this machine.
///
/// # Errors
/// If a folder is named that tells of no machine.
pub(super) fn topology(named: Option<&Path>) -> Result<Topology, CliError> {
    let root = named.unwrap_or_else(|| Path::new("/"));
    if named.is_some() && !root.join("sys").is_dir() {
        let help = "leave it out for this machine's own";
        let found = "no folder sys in it";
        return Err(CliError::input(
            format!("--topology {}", root.display()),
            "a folder with sys and proc",
            found,
            help,
        ));
    }
    Ok(Topology::read(root))
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    fn a_folder_that_tells_of_no_machine_is_refused() {
        let empty = tempfile::tempdir().unwrap();
        let error = topology(Some(empty.path())).unwrap_err().to_string();
        assert!(error.contains("expected a folder with sys and proc"), "{error}");
        assert!(topology(None).is_ok());
    }

    #[test]
    fn times_in_utc() {
        let at = |seconds: u64| utc(UNIX_EPOCH + Duration::from_millis(1000 * seconds + 400));
        // By `date -u -d @N +%FT%TZ`.
        assert_eq!(at(0).as_deref(), Some("1970-01-01T00:00:00Z"));
        assert_eq!(at(951_782_399).as_deref(), Some("2000-02-28T23:59:59Z"));
        assert_eq!(at(951_782_400).as_deref(), Some("2000-02-29T00:00:00Z"));
        assert_eq!(at(1_709_251_199).as_deref(), Some("2024-02-29T23:59:59Z"));
        assert_eq!(at(1_735_689_600).as_deref(), Some("2025-01-01T00:00:00Z"));
        assert_eq!(at(4_107_542_400).as_deref(), Some("2100-03-01T00:00:00Z"));
        assert_eq!(at(1 << 40), None);
    }

    #[test]
    fn memory_that_is_not_free_is_used() {
        let health = |free, used| {
            let mut health = sample();
            (health.memory_free, health.memory_used) = (free, used);
            health
        };
        assert_eq!(memory_share(&health(Some(25), Some(10)), Some(100)), Some(0.75));
        assert_eq!(memory_share(&health(Some(30), Some(10)), None), Some(0.25));
        assert_eq!(memory_share(&health(None, Some(10)), Some(100)), Some(0.1));
        assert_eq!(memory_share(&health(None, None), Some(100)), None);
    }

    fn sample() -> Health {
        Health {
            state: abi::QHAL_HEALTH_OK,
            memory_free: None,
            memory_used: None,
            memory_reserved: None,
            utilisation: None,
            temperature: None,
            power: None,
            throttle_reasons: None,
            memory_errors_corrected: None,
            memory_errors_uncorrected: None,
            link_errors: None,
            heartbeat_ns: None,
            last_error: None,
        }
    }
}
