//! Opening simulated chips in this process, and asking models.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part of this module")]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use qwen_engine::{Engine, Request, SamplingParams};
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
