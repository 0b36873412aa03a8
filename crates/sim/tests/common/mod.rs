//! Opening simulated chips in this process, and asking models.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part of this module")]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use qwen_engine::{
    Engine, Fleet, FleetOptions, FleetOutputs, Instance, LoadOptions, LoadedModel, Output, Place, Placement, Policy,
    Request, SamplingParams, Topology,
};
use qwen_hal::abi::QHAL_USAGE_STAGING;
use qwen_hal::{Buffer, BufferDesc, Device, Host, Plugin, Pool, Scope};

pub fn plugin() -> Arc<Plugin> {
    Plugin::linked(&hal_sim::PLUGIN, &Host::new(Arc::new(Pool::new(Some(2))))).unwrap()
}

/// Device `number` of a chip.
pub fn open(plugin: &Arc<Plugin>, chip: &str, number: usize, options: &[(&str, &str)]) -> Device {
    let of_chip = |index: &u32| plugin.device_info(*index).unwrap().models().any(|name| name == chip);
    let index = (0..plugin.device_count().unwrap()).filter(of_chip).nth(number).unwrap();
    plugin.open(index, options).unwrap()
}

pub fn chip(name: &str, options: &[(&str, &str)]) -> Device {
    open(&plugin(), name, 0, options)
}

/// The CPU by itself.
pub fn cpu(threads: usize) -> Device {
    let host = Host::new(Arc::new(Pool::new(Some(threads))));
    Plugin::linked(&qwen_cpu::PLUGIN, &host).unwrap().open(0, &[]).unwrap()
}

pub fn buffer(device: &Device, size: u64) -> Buffer {
    device.alloc(&BufferDesc::new(size, QHAL_USAGE_STAGING, Scope::Temporary, "test")).unwrap()
}

pub fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(path)
}

pub fn logits(engine: &mut Engine, tokens: &[u32], decode: bool) -> Vec<Vec<f32>> {
    let mut rows = Vec::new();
    engine.logits(tokens, decode, &mut |row| rows.push(row.to_vec())).unwrap();
    rows
}

pub fn greedy(engine: &mut Engine, tokens: &[u32], count: u32) -> Vec<u32> {
    let sampling =
        SamplingParams { temperature: 0.0, max_tokens: count, ignore_eos: true, ..SamplingParams::default() };
    engine.submit(Request::new(tokens.to_vec(), sampling)).unwrap();
    let mut said = Vec::new();
    while engine.has_work() {
        said.extend(engine.step().iter().filter_map(|output| output.token));
    }
    said
}

/// Mean divergence of rows of logits, in nats.
pub fn divergence(a: &[Vec<f32>], b: &[Vec<f32>]) -> f64 {
    let log_sum = |row: &[f32]| {
        let most = f64::from(row.iter().copied().fold(f32::MIN, f32::max));
        most + row.iter().map(|x| (f64::from(*x) - most).exp()).sum::<f64>().ln()
    };
    let row = |a: &[f32], b: &[f32]| {
        let (norm_a, norm_b) = (log_sum(a), log_sum(b));
        a.iter().zip(b).fold(0.0, |sum, (a, b)| {
            let (a, b) = (f64::from(*a) - norm_a, f64::from(*b) - norm_b);
            sum + a.exp() * (a - b)
        })
    };
    a.iter().zip(b).map(|(a, b)| row(a, b)).sum::<f64>() / a.len() as f64
}

/// The chip whose devices compute models together.
pub const GROUP_CHIP: &str = "ascend910b";

/// Devices that compute together, from number `first` on; the options are the second one's. There are two of each chip; one that is opened
/// again is another member.
pub fn group(first: usize, size: usize, options: &[(&str, &str)]) -> Placement {
    let plugin = plugin();
    let calm: &[(&str, &str)] = &[("delay_us", "0")];
    let device = |at: usize| open(&plugin, GROUP_CHIP, (first + at) % 2, if at == 1 { options } else { calm });
    let mut devices = (0..size).map(device);
    let placement = Placement::from(devices.next().unwrap()).with_fallback(cpu(1));
    placement.with_peers(devices.collect())
}

pub fn load(path: &str, placement: impl Into<Placement>, options: &LoadOptions) -> Result<Engine, String> {
    let loaded = LoadedModel::load(&fixture(path), placement, options, &mut |_| {});
    loaded.map(Engine::new).map_err(|error| error.to_string())
}

pub fn exact() -> LoadOptions {
    LoadOptions { policy: Policy::Exact, max_seq_len: Some(128), ..LoadOptions::default() }
}

/// Devices that are opened with these settings the first time, and without faults afterwards.
pub fn faulty_instance(
    name: &str,
    mut faults: Option<(&'static str, String)>,
    place: impl Fn(&[(&str, &str)]) -> Placement + Send + 'static,
) -> Instance {
    let build = move || {
        let fault = faults.take();
        let mut settings = vec![("delay_us", "0")];
        settings.extend(fault.iter().map(|(key, value)| (*key, value.as_str())));
        let options = LoadOptions { max_sequences: 8, max_cached_tokens: Some(1024), ..exact() };
        load("models/qwen2", place(&settings), &options)
    };
    Instance { name: name.to_owned(), place: Place::default(), build: Box::new(build) }
}

pub fn fleet(instances: Vec<Instance>) -> Fleet {
    let options = FleetOptions {
        tests: Some(Duration::from_secs(3600)),
        retest: Duration::from_millis(5),
        topology: Topology::read(Path::new("/nowhere")),
        ..FleetOptions::default()
    };
    Fleet::start(instances, options).unwrap()
}

fn read(mut answer: FleetOutputs) -> (Vec<u32>, String) {
    let outputs: Vec<Output> = std::iter::from_fn(|| answer.blocking_recv()).collect();
    assert!(outputs.last().unwrap().finish.is_some());
    (outputs.iter().filter_map(|o| o.token).collect(), outputs.iter().map(|o| o.text.as_str()).collect())
}

/// Tokens and text of three requests, greedy and drawn.
pub fn ask(fleet: &Fleet) -> Vec<(Vec<u32>, String)> {
    let requests = [(1, 20, 0.0), (9, 6, 1.0), (40, 9, 0.8)].map(|(from, count, temperature)| {
        let sampling =
            SamplingParams { temperature, seed: 7, max_tokens: 24, ignore_eos: true, ..SamplingParams::default() };
        Request::new((from..from + count).collect(), sampling)
    });
    let answers = requests.map(|request| fleet.submit_from(request, Place::default()).unwrap());
    answers.into_iter().map(read).collect()
}
