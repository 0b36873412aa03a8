//! Opening simulated chips in this process.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part of this module")]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::sync::Arc;

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

pub fn buffer(device: &Device, size: u64) -> Buffer {
    device.alloc(&BufferDesc::new(size, QHAL_USAGE_STAGING, Scope::Temporary, "test")).unwrap()
}
