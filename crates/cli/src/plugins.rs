//! Backends: the CPU, which is part of the program, and plugins, which are looked for and loaded by name.

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use qwen_chips::Status;
use qwen_dispatch::bandwidth_text;
use qwen_engine::Placement;
use qwen_hal::loader::{Candidate, LoadError, Loader, PATH_VARIABLE, Prober, run_probe};
use qwen_hal::{Device, Host, Plugin, Pool, abi};

use crate::arguments::DeviceArguments;
use crate::dispatch;
use crate::error::{CliError, sentence};

/// The one backend that is linked in.
pub const CPU: &str = "cpu";
/// First argument of this program as the child of a self test; the library's path follows.
pub const PROBE_ARGUMENT: &str = "--hal-probe";
/// Seconds that a plugin's self test may take.
const LIMIT_VARIABLE: &str = "QWEN_HAL_PROBE_SECONDS";

/// Chooses by itself.
pub const AUTO: &str = "auto";

/// Devices by name: `cpu`, `opencl:1`, `sim:ascend910b`, `sim:ascend910b:0,1`, `auto`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DeviceName {
    /// The plugin.
    pub plugin: String,
    /// Model of the device, of plugins that serve several.
    pub model: Option<String>,
    /// Indices among the devices of the model, or of the plugin; at least one.
    pub indices: Vec<u32>,
}

impl Default for DeviceName {
    fn default() -> Self {
        Self { plugin: CPU.to_owned(), model: None, indices: vec![0] }
    }
}

impl std::str::FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            Err("expected NAME, NAME:N, NAME:MODEL or NAME:MODEL:N, such as cpu, opencl:0 or sim:mlu370:1".to_owned())
        };
        let indices = |text: &str| text.split(',').map(|n| n.parse().ok()).collect::<Option<Vec<u32>>>();
        let word = |text: &str| {
            text.starts_with(|c: char| c.is_ascii_alphabetic())
                && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
        };
        let parts: Vec<&str> = text.split(':').collect();
        let (plugin, model, indices) = match parts.as_slice() {
            [plugin] => (plugin, None, Some(vec![0])),
            [plugin, model] if word(model) => (plugin, Some(model), Some(vec![0])),
            [plugin, numbers] => (plugin, None, indices(numbers)),
            [plugin, model, numbers] if word(model) => (plugin, Some(model), indices(numbers)),
            _ => return wrong(),
        };
        match indices {
            Some(indices) if !plugin.is_empty() => {
                Ok(Self { plugin: (*plugin).to_owned(), model: model.map(|model| (*model).to_owned()), indices })
            }
            _ => wrong(),
        }
    }
}

impl std::fmt::Display for DeviceName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:", self.plugin)?;
        if let Some(model) = &self.model {
            write!(f, "{model}:")?;
        }
        let indices: Vec<String> = self.indices.iter().map(ToString::to_string).collect();
        f.write_str(&indices.join(","))
    }
}

impl DeviceName {
    /// The one device that is meant.
    ///
    /// # Errors
    /// If several are, which nothing can use yet.
    fn only(&self) -> Result<u32, CliError> {
        match self.indices.as_slice() {
            [index] => Ok(*index),
            several => Err(CliError::input(
                format!("device {self}"),
                "one device",
                format!("{}", several.len()),
                "a model runs on one device: name one of them",
            )),
        }
    }

    /// Index in the plugin of the one device that is meant.
    ///
    /// # Errors
    /// If there is none, or several are meant.
    pub fn index_in(&self, plugin: &Arc<Plugin>) -> Result<u32, CliError> {
        let wanted = self.only()?;
        let Some(model) = &self.model else { return Ok(wanted) };
        let mut known: Vec<(String, u32)> = Vec::new();
        for index in 0..plugin.device_count()? {
            let info = plugin.device_info(index)?;
            let Some(name) = info.model() else { continue };
            let count = match known.iter_mut().find(|(known, _)| known == name) {
                Some((_, count)) => count,
                None => {
                    known.push((name.to_owned(), 0));
                    let Some((_, count)) = known.last_mut() else { continue };
                    count
                }
            };
            if info.models().any(|name| name == model) && *count == wanted {
                return Ok(index);
            }
            *count += 1;
        }
        let known: Vec<String> = known.iter().map(|(name, count)| format!("{name} (0 to {})", count - 1)).collect();
        let found = if known.is_empty() { "a plugin that names no models".to_owned() } else { known.join(", ") };
        Err(CliError::input(
            format!("device {self}"),
            format!("device {wanted} of the model {model}"),
            found,
            "see `qwen devices`",
        ))
    }
}

/// Devices of one command: names with `+` between them, of which some may stand for several (`sim:mlu370:0,1+cpu`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceList {
    first: DeviceName,
    others: Vec<DeviceName>,
}

impl From<DeviceName> for DeviceList {
    fn from(first: DeviceName) -> Self {
        Self { first, others: Vec::new() }
    }
}

impl std::str::FromStr for DeviceList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut names = text.split('+').map(|name| name.trim().parse());
        let first = names.next().unwrap_or_else(|| "".parse())?;
        Ok(Self { first, others: names.collect::<Result<_, _>>()? })
    }
}

impl std::fmt::Display for DeviceList {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.first)?;
        self.others.iter().try_for_each(|name| write!(f, "+{name}"))
    }
}

impl DeviceList {
    /// The one device that is meant.
    ///
    /// # Errors
    /// If several are.
    pub fn only(&self) -> Result<&DeviceName, CliError> {
        if self.others.is_empty() && self.first.only().is_ok() {
            return Ok(&self.first);
        }
        let help = "this command uses one device: name one of them; qwen-server uses several";
        Err(CliError::input(format!("device {self}"), "one device", self.each().count().to_string(), help))
    }

    /// The devices in groups of so many ranks in each of so many stages, in the order in which they are named.
    ///
    /// # Errors
    /// If they can't be divided so, or one is named twice.
    pub fn groups(&self, ranks: u32, stages: u32) -> Result<Vec<Group>, CliError> {
        let each: Vec<DeviceName> = self.each().collect();
        let (ranks, stages) = (ranks.max(1) as usize, stages.max(1) as usize);
        let size = ranks * stages;
        let refuse = |expected: String, found: String, help| {
            Err(CliError::input(format!("device {self}"), expected, found, help))
        };
        if !each.len().is_multiple_of(size) {
            let product =
                if ranks > 1 && stages > 1 { format!(" ({stages} stages of {ranks} ranks)") } else { String::new() };
            let option = if stages > 1 { "--pipeline-parallel-size" } else { "--tensor-parallel-size" };
            let found = format!("{} device{}", each.len(), if each.len() == 1 { "" } else { "s" });
            let help = format!("name a multiple of {size} devices, or change {option}");
            return refuse(format!("groups of {size} devices{product}"), found, help);
        }
        if size > 1 && each.iter().any(|name| name.plugin == AUTO) {
            return refuse(
                "devices by name".into(),
                AUTO.into(),
                "name the devices of a group, as sim:mlu370:0,1".into(),
            );
        }
        let mut named = HashSet::new();
        if let Some(twice) = each.iter().find(|name| name.plugin != AUTO && !named.insert(*name)) {
            return refuse("different devices".into(), format!("{twice} twice"), "name each device once".into());
        }
        Ok(each.chunks(size).map(|names| Group { names: names.to_vec(), stages }).collect())
    }

    /// Each device by itself.
    pub fn each(&self) -> impl Iterator<Item = DeviceName> {
        let one = |name: &DeviceName| {
            let name = name.clone();
            name.indices.clone().into_iter().map(move |index| DeviceName { indices: vec![index], ..name.clone() })
        };
        std::iter::once(&self.first).chain(&self.others).flat_map(one)
    }
}

/// Devices that compute one model together, those of a stage next to each other; mostly one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    names: Vec<DeviceName>,
    stages: usize,
}

impl std::fmt::Display for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Some((first, others)) = self.names.split_first() else { return Ok(()) };
        let alike = |name: &DeviceName| (&name.plugin, &name.model) == (&first.plugin, &first.model);
        if others.iter().all(alike) {
            let indices = self.names.iter().flat_map(|name| name.indices.iter().copied()).collect();
            return write!(f, "{}", DeviceName { indices, ..first.clone() });
        }
        write!(f, "{first}")?;
        others.iter().try_for_each(|name| write!(f, "+{name}"))
    }
}

impl Group {
    /// The one device, if it is alone.
    #[must_use]
    pub fn only(&self) -> Option<&DeviceName> {
        if let [name] = self.names.as_slice() { Some(name) } else { None }
    }

    /// Name of each device; none for one alone.
    #[must_use]
    pub fn members(&self) -> Vec<String> {
        if self.names.len() < 2 { Vec::new() } else { self.names.iter().map(ToString::to_string).collect() }
    }
}

/// Opens the devices of a command: all on one host, a plugin once.
pub struct Placer {
    host: Host,
    loader: Loader,
    plugins: Mutex<HashMap<String, Arc<Plugin>>>,
    max_crossings: u32,
    /// Of the model, for `auto`.
    bytes: u64,
}

impl std::fmt::Debug for Placer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Placer").field("host", &self.host).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Placer {
    /// For a model of so many bytes.
    ///
    /// # Errors
    /// If a setting of the environment is wrong.
    pub fn new(arguments: &DeviceArguments, bytes: u64) -> Result<Self, CliError> {
        Ok(Self {
            host: host(arguments.threads),
            loader: loader(&arguments.plugins)?,
            plugins: Mutex::default(),
            max_crossings: arguments.max_crossings,
            bytes,
        })
    }

    /// A device by name, or the best one.
    ///
    /// # Errors
    /// If there is no such device, or it can't be opened.
    pub fn open(&self, name: &DeviceName) -> Result<Device, CliError> {
        if name.plugin == AUTO {
            return best(&self.loader, self.bytes, &self.host);
        }
        let mut plugins = self.plugins.lock().unwrap_or_else(PoisonError::into_inner);
        let plugin = match plugins.get(&name.plugin) {
            Some(plugin) => Arc::clone(plugin),
            None => {
                let plugin = find(&name.plugin, &self.loader, &self.host)?;
                plugins.insert(name.plugin.clone(), Arc::clone(&plugin));
                plugin
            }
        };
        drop(plugins);
        Ok(tuned(plugin.open(name.index_in(&plugin)?, &[])?))
    }

    /// The devices of a group.
    ///
    /// # Errors
    /// As [`Placer::open`], and if two names are of one device.
    pub fn open_group(&self, group: &Group) -> Result<Vec<Device>, CliError> {
        let mut known = HashSet::new();
        let open = |name| {
            let device = self.open(name)?;
            is_new(&device, &mut known)?;
            Ok(device)
        };
        group.names.iter().map(open).collect()
    }

    /// The opened devices of a group, with the CPU for what they refuse.
    ///
    /// # Errors
    /// If there is none, or the CPU can't be opened.
    pub fn beside_cpu(&self, group: &Group, devices: Vec<Device>) -> Result<Placement, CliError> {
        let mut devices = devices.into_iter();
        let Some(first) = devices.next() else {
            return Err(CliError::input("--device", "a device", "none", "name one"));
        };
        let mut placement = Placement::from(first).with_peers(devices.collect()).with_stages(group.stages);
        placement.max_crossings = self.max_crossings;
        Ok(if placement.device.plugin().name() == CPU {
            placement
        } else {
            placement.with_fallback(tuned(cpu(&self.host)?.open(0, &[])?))
        })
    }
}

/// Refuses a device that is known already: it may have several names.
///
/// # Errors
/// If it is.
pub fn is_new(device: &Device, known: &mut HashSet<String>) -> Result<(), CliError> {
    let label = device.label();
    if known.insert(label.clone()) {
        return Ok(());
    }
    Err(CliError::input("--device", "different devices", format!("{label} twice"), "name each device once"))
}

/// What this program lends to plugins.
#[must_use]
pub fn host(threads: Option<u32>) -> Host {
    Host::new(Arc::new(Pool::new(threads.map(|n| n as usize))))
}

/// The CPU as a plugin.
///
/// # Errors
/// If it can't be initialised.
pub fn cpu(host: &Host) -> Result<Arc<Plugin>, CliError> {
    Ok(Plugin::linked(&qwen_cpu::PLUGIN, host)?)
}

/// Where plugins are looked for: libraries that were named, then the usual places.
#[must_use]
pub fn places(named: &[PathBuf]) -> Loader {
    let loader = named.iter().fold(Loader::new(), Loader::named);
    loader.usual(std::env::var_os(PATH_VARIABLE).as_deref(), std::env::current_exe().ok().as_deref())
}

/// As [`places`]; each library is tried out in a child process before it is loaded.
///
/// # Errors
/// If there is no plugin where one was named, or `QWEN_HAL_PROBE_SECONDS` is not a number of seconds.
pub fn loader(named: &[PathBuf]) -> Result<Loader, CliError> {
    for place in named {
        match Loader::new().named(place).candidates().first() {
            Some(Candidate { refused: Some(missing @ LoadError::Missing { .. }), .. }) => {
                return Err(missing.clone().into());
            }
            Some(_) => {}
            None => {
                let help = "name a libhal_*.so, or a folder of such libraries";
                let shown = place.display().to_string();
                return Err(CliError::input(shown, "a plugin's library", "a folder without any", help));
            }
        }
    }
    let loader = places(named);
    let Ok(program) = std::env::current_exe() else { return Ok(loader) };
    let mut prober = Prober::new(program, &[PROBE_ARGUMENT]);
    if let Ok(limit) = std::env::var(LIMIT_VARIABLE) {
        let seconds = limit.parse().ok().filter(|seconds| (0.01..=3600.0).contains(seconds));
        let seconds = seconds.ok_or_else(|| {
            CliError::input(LIMIT_VARIABLE, "seconds from 0.01 to 3600", limit, "set it anew or unset it")
        })?;
        prober.limit = Duration::from_secs_f64(seconds);
    }
    Ok(loader.with_prober(prober))
}

/// The child's part of a self test, if this program was started as one: its exit status.
#[must_use]
pub fn probe_child() -> Option<bool> {
    let mut arguments = std::env::args_os().skip(1);
    let (first, path) = (arguments.next()?, arguments.next()?);
    (first == PROBE_ARGUMENT).then(|| run_probe(Path::new(&path)))
}

/// The plugin of this name.
///
/// # Errors
/// If there is none, or why it is not used.
pub fn find(name: &str, loader: &Loader, host: &Host) -> Result<Arc<Plugin>, CliError> {
    if name == CPU {
        return cpu(host);
    }
    let candidates = loader.candidates();
    let of_name = |candidate: &&Candidate| candidate.name() == name;
    let usable = candidates.iter().filter(of_name).find(|candidate| candidate.refused.is_none());
    if let Some(candidate) = usable.or_else(|| candidates.iter().find(of_name)) {
        return Ok(loader.load(candidate, host)?);
    }
    let known: Vec<&str> = std::iter::once(CPU).chain(candidates.iter().map(Candidate::name)).collect();
    Err(CliError::input(
        format!("device {name}"),
        format!("one of: {}", known.join(", ")),
        "no plugin of that name",
        format!("run `qwen devices`, or put libhal_{name}.so into a folder of {PATH_VARIABLE}"),
    ))
}

/// Opens a device by name.
///
/// # Errors
/// If there is none, or it can't be opened.
pub fn open(name: &DeviceName, named: &[PathBuf], threads: Option<u32>) -> Result<Device, CliError> {
    name.only()?;
    let host = host(threads);
    let plugin = find(&name.plugin, &loader(named)?, &host)?;
    Ok(tuned(plugin.open(name.index_in(&plugin)?, &[])?))
}

/// Where a model of so many bytes will compute: the device by name, or the best one, and the CPU for what it refuses.
///
/// # Errors
/// If there is no such device, or it can't be opened.
pub fn place(arguments: &DeviceArguments, bytes: u64) -> Result<Placement, CliError> {
    let placer = Placer::new(arguments, bytes)?;
    let size = arguments.tensor_parallel_size.saturating_mul(arguments.pipeline_parallel_size);
    if size == 1 {
        arguments.device.only()?;
    }
    let groups = arguments.groups()?;
    let [group] = groups.as_slice() else {
        let help = format!("this command uses one group: name {size} devices; qwen-server uses several groups");
        let (what, found) = (format!("device {}", arguments.device), format!("{} groups", groups.len()));
        return Err(CliError::input(what, format!("one group of {size} devices"), found, help));
    };
    placer.beside_cpu(group, placer.open_group(group)?)
}

/// The device with the variants that were tuned for it.
fn tuned(device: Device) -> Device {
    dispatch::use_tuned_variants(&device);
    device
}

/// A kind of devices (`QHAL_KIND_*`) by name.
#[must_use]
pub const fn kind_name(kind: u32) -> &'static str {
    match kind {
        abi::QHAL_KIND_CPU => "cpu",
        abi::QHAL_KIND_GPU => "gpu",
        abi::QHAL_KIND_NPU => "npu",
        abi::QHAL_KIND_SIMULATED => "simulated",
        abi::QHAL_KIND_NULL => "null",
        _ => "unknown",
    }
}

/// What `auto` knows of a device.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Rank {
    /// The bandwidth was timed on the device; else it is what the device declares.
    measured: bool,
    /// Bytes per second, which bound generation; 0 unknown.
    bandwidth: f64,
    /// 0 idle to 1 busy.
    load: f64,
}

impl Rank {
    /// Measures the device if it has no profile yet. One that can't be measured is told, and has its declared figure.
    fn of(device: &Device) -> Self {
        let measured = match dispatch::profile(device, false) {
            Ok(profile) => profile
                .and_then(|profile| profile.bandwidth())
                .ok_or_else(|| "it has no product to read memory with".to_owned()),
            Err(error) => Err(sentence(&error)),
        };
        let declared = || device.caps().bandwidth.unwrap_or(0.0);
        if let Err(reason) = &measured {
            tracing::warn!(
                "--device auto: {} could not be measured ({reason}): the {} that it declares count only beside other \
                 figures that nobody measured",
                device.label(),
                bandwidth_text(declared())
            );
        }
        let load = device.health().ok().and_then(|health| health.utilisation).unwrap_or(0.0).clamp(0.0, 1.0);
        Self { measured: measured.is_ok(), bandwidth: measured.unwrap_or_else(|_| declared()), load }
    }

    /// Greater is better: what was measured goes before what is declared, then what is left of the bandwidth counts.
    fn order(&self, other: &Self) -> Ordering {
        let left = |rank: &Self| rank.bandwidth * (1.0 - rank.load);
        self.measured.cmp(&other.measured).then(left(self).total_cmp(&left(other)))
    }
}

/// Whether `auto` may take a device: an accelerator with room for a model of so many bytes. Simulated ones are none.
fn is_candidate(kind: u32, memory_free: Option<u64>, bytes: u64) -> bool {
    // Beside the weights: cache, temporaries, and what the vendor's runtime keeps.
    let needed = bytes.saturating_add(bytes / 4);
    [abi::QHAL_KIND_GPU, abi::QHAL_KIND_NPU].contains(&kind) && memory_free.is_none_or(|free| free >= needed)
}

/// The best of the accelerators that have room for a model, and of the CPU. Where there is no such accelerator, nothing is measured.
fn best(loader: &Loader, bytes: u64, host: &Host) -> Result<Device, CliError> {
    let mut devices = Vec::new();
    for candidate in loader.candidates().iter().filter(|candidate| candidate.refused.is_none()) {
        let Ok(plugin) = loader.load(candidate, host) else { continue };
        for index in 0..plugin.device_count().unwrap_or(0) {
            let Ok(device) = plugin.open(index, &[]) else { continue };
            let free = device.health().ok().and_then(|health| health.memory_free).or(device.caps().memory_total);
            if is_candidate(device.info().kind, free, bytes) {
                devices.push(device);
            }
        }
    }
    let cpu = cpu(host)?.open(0, &[])?;
    if devices.is_empty() {
        tracing::info!("--device auto: no accelerator has room for the model, the CPU computes");
        return Ok(tuned(cpu));
    }
    let mut best = (Rank::of(&cpu), cpu);
    for device in devices {
        let rank = Rank::of(&device);
        if rank.order(&best.0).is_gt() {
            best = (rank, device);
        }
    }
    let (rank, device) = best;
    let origin = if rank.measured { "measured" } else { "declared, not measured" };
    tracing::info!(
        "--device auto: {} ({}, {origin}, load {:.2})",
        device.label(),
        bandwidth_text(rank.bandwidth),
        rank.load
    );
    let catalogue = dispatch::catalogue()?;
    if let Some(chip) = dispatch::chip_of(&catalogue, &device).filter(|chip| chip.status == Status::Untested) {
        tracing::warn!("--device auto: {} is {}: nobody has run this on one", chip.title, chip.status.label());
    }
    Ok(tuned(device))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices() {
        let parse = |text: &str| text.parse::<DeviceName>().map(|name| name.to_string());
        assert_eq!(parse("cpu").unwrap(), "cpu:0");
        assert_eq!(parse("opencl:3").unwrap(), "opencl:3");
        assert_eq!(parse("sim:mlu370").unwrap(), "sim:mlu370:0");
        assert_eq!(parse("sim:gcu-s60:0,1").unwrap(), "sim:gcu-s60:0,1");
        for wrong in ["", ":1", "sim:", "sim:-1", "sim:1:2", "sim:a:b", "sim:a:0:1", "sim:0,", "sim:a:"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn several_devices_are_refused_where_one_is_used() {
        let list = |text: &str| text.parse::<DeviceList>().unwrap();
        for (text, count) in [("sim:mlu370:0,1", 2), ("cpu+sim:br100:0,1", 3)] {
            let error = list(text).only().unwrap_err().to_string();
            assert!(error.contains(&format!("expected one device, found {count}")), "{error}");
        }
        assert_eq!(list("cpu").only().unwrap(), &DeviceName::default());
        let each: Vec<String> = list("sim:mlu370:0,1 + cpu").each().map(|name| name.to_string()).collect();
        assert_eq!(each, ["sim:mlu370:0", "sim:mlu370:1", "cpu:0"]);
        for wrong in ["", "cpu+", "+cpu", "cpu++cpu"] {
            assert!(wrong.parse::<DeviceList>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn devices_are_taken_in_groups() {
        let groups = |text: &str, size: u32| {
            let groups = text.parse::<DeviceList>().unwrap().groups(size, 1)?;
            Ok::<_, CliError>(groups.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        assert_eq!(groups("sim:mlu370:0,1,2,3", 2).unwrap(), ["sim:mlu370:0,1", "sim:mlu370:2,3"]);
        assert_eq!(groups("sim:mlu370:0,1", 1).unwrap(), ["sim:mlu370:0", "sim:mlu370:1"]);
        assert_eq!(groups("sim:a:0+sim:b:0", 2).unwrap(), ["sim:a:0+sim:b:0"]);
        let error = groups("sim:mlu370:0,1,2", 2).unwrap_err().to_string();
        assert!(error.contains("groups of 2 devices") && error.contains("3 devices"), "{error}");
        assert!(groups("auto+cpu", 2).is_err());
        for (text, size) in [("sim:mlu370:0,1,0", 1), ("cpu:0,0", 2), ("sim:a:0+sim:a", 2)] {
            let error = groups(text, size).unwrap_err().to_string();
            assert!(error.contains(":0 twice; name each device once"), "{error}");
        }
    }

    #[test]
    fn a_group_has_as_many_devices_as_ranks_and_stages_make() {
        let list: DeviceList = "sim:mlu370:0,1,2,3,4,5".parse().unwrap();
        let names: Vec<String> = list.groups(1, 3).unwrap().iter().map(ToString::to_string).collect();
        assert_eq!(names, ["sim:mlu370:0,1,2", "sim:mlu370:3,4,5"]);
        assert_eq!(list.groups(3, 2).unwrap().len(), 1);
        let error = list.groups(2, 2).unwrap_err().to_string();
        assert!(error.contains("groups of 4 devices (2 stages of 2 ranks)") && error.contains("6 devices"), "{error}");
    }

    #[test]
    fn auto_takes_accelerators_with_room() {
        for kind in [abi::QHAL_KIND_GPU, abi::QHAL_KIND_NPU] {
            assert!(
                is_candidate(kind, Some(10), 8)
                    && is_candidate(kind, None, 1 << 40)
                    && !is_candidate(kind, Some(10), 9)
            );
        }
        for kind in [abi::QHAL_KIND_CPU, abi::QHAL_KIND_SIMULATED, abi::QHAL_KIND_NULL] {
            assert!(!is_candidate(kind, None, 0));
        }
    }

    #[test]
    fn what_was_measured_goes_before_what_is_declared() {
        let gpu = Rank { measured: true, bandwidth: 1e12, load: 0.0 };
        let declared = Rank { measured: false, bandwidth: 9e12, load: 0.0 };
        assert_eq!(gpu.order(&declared), Ordering::Greater);
        assert_eq!(gpu.order(&Rank { bandwidth: 2e12, ..gpu }), Ordering::Less);
        // Half of its bandwidth is in use.
        assert_eq!(gpu.order(&Rank { bandwidth: 1.9e12, load: 0.5, ..gpu }), Ordering::Greater);
        assert_eq!(declared.order(&Rank { bandwidth: 8e12, ..declared }), Ordering::Greater);
    }
}
