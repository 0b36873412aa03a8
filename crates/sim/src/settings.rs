//! What a user may set: `QWEN_SIM`, and the options of `device_open`, which go before it. Both are a list of `key=value`; in `QWEN_SIM`
//! `key@N=value` is for device N of each chip alone, and goes before `key=value`.
//!
//! | key | |
//! |---|---|
//! | `seed` | seed of delays and bit flips, 1 |
//! | `devices` | devices of each chip, 2; of the environment alone |
//! | `sockets`, `switches` | the machine: so many sockets, so many PCIe switches at each (1); 0 sockets: nothing is told of it; of the environment alone |
//! | `delay_us` | longest pause before a command of a stream, 50; 0 = none |
//! | `memory` | bytes of device memory instead of the sheet's |
//! | `oom` | this allocation (1 = the first) finds no memory |
//! | `hang` | this launch (or collective) does not end until `watchdog_ms`, then its stream fails |
//! | `watchdog_ms` | 2000 |
//! | `lost` | at this launch (or collective) the device is lost |
//! | `nan` | the result of this launch begins with a value that is no number, and nobody is told |
//! | `flip` | after every so many launches one bit of a result is another, and nobody is told |
//! | `slow_link` | the links to host and peers are so many times slower |

use std::ops::RangeInclusive;

use qwen_hal_abi::{qhal_kv, qhal_str};
use qwen_hal_plugin::Failure;

/// Environment variable with settings, `key=value` with commas between them.
pub(crate) const VARIABLE: &str = "QWEN_SIM";
/// Most devices of each chip: of all sheets together a host believes some thousands.
const MAX_DEVICES: u64 = 256;
/// What no device has settings of its own for.
const MACHINE: [&str; 3] = ["devices", "sockets", "switches"];

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Settings {
    pub(crate) seed: u64,
    pub(crate) devices: u64,
    pub(crate) sockets: u64,
    pub(crate) switches: u64,
    pub(crate) delay_us: u64,
    pub(crate) memory: Option<u64>,
    pub(crate) oom: Option<u64>,
    pub(crate) hang: Option<u64>,
    pub(crate) watchdog_ms: u64,
    pub(crate) lost: Option<u64>,
    pub(crate) nan: Option<u64>,
    pub(crate) flip: Option<u64>,
    pub(crate) slow_link: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            seed: 1,
            devices: 2,
            sockets: 0,
            switches: 1,
            delay_us: 50,
            memory: None,
            oom: None,
            hang: None,
            watchdog_ms: 2000,
            lost: None,
            nan: None,
            flip: None,
            slow_link: 1,
        }
    }
}

impl Settings {
    /// The environment's settings, those that are for all devices.
    pub(crate) fn from_environment() -> Result<Self, Failure> {
        Self::read(&std::env::var_os(VARIABLE).unwrap_or_default().to_string_lossy(), None)
    }

    /// The environment's settings for device `number` of each chip.
    pub(crate) fn of_device(number: u32) -> Result<Self, Failure> {
        Self::read(&std::env::var_os(VARIABLE).unwrap_or_default().to_string_lossy(), Some(number))
    }

    /// Settings as the variable has them, for all devices or for one of each chip.
    pub(crate) fn read(text: &str, device: Option<u32>) -> Result<Self, Failure> {
        let (mut settings, mut own) = (Self::default(), Vec::new());
        for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            let (key, value) = entry.split_once('=').ok_or_else(|| {
                Failure::invalid(format!("{VARIABLE}: expected key=value with commas between them, found {entry:?}"))
            })?;
            let (key, value) = (key.trim(), value.trim());
            let Some((key, number)) = key.split_once('@') else {
                settings.set(key, value)?;
                continue;
            };
            let number: u32 = number.parse().map_err(|_| {
                Failure::invalid(format!("{VARIABLE}: {key}@: expected the number of a device, found {number:?}"))
            })?;
            if MACHINE.contains(&key) {
                return Err(Failure::invalid(format!(
                    "{VARIABLE}: {key} is of the machine: expected no device, found {number}"
                )));
            }
            // What is wrong is told whoever it is for.
            Self::default().set(key, value)?;
            own.extend((device == Some(number)).then_some((key, value)));
        }
        own.into_iter().try_for_each(|(key, value)| settings.set(key, value))?;
        Ok(settings)
    }

    /// These settings with the options of a call before them.
    ///
    /// # Safety
    /// `options` is null or `count` options whose strings are readable.
    pub(crate) unsafe fn with_options(mut self, options: *const qhal_kv, count: u32) -> Result<Self, Failure> {
        for i in 0..if options.is_null() { 0 } else { count as usize } {
            // SAFETY: by the caller's promise.
            let (key, value) = unsafe {
                let option = &*options.add(i);
                (read(&option.key), read(&option.value))
            };
            self.set(&key, &value)?;
        }
        Ok(self)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), Failure> {
        let number: u64 = value
            .parse()
            .map_err(|_| Failure::invalid(format!("{VARIABLE}: {key}: expected a whole number, found {value:?}")))?;
        let within = |range: RangeInclusive<u64>| {
            let (least, most) = (range.start(), range.end());
            let expected = if *most == u64::MAX { format!("{least} or more") } else { format!("{least} to {most}") };
            let wrong = || Failure::invalid(format!("{VARIABLE}: {key}: expected {expected}, found {number}"));
            range.contains(&number).then_some(number).ok_or_else(wrong)
        };
        match key {
            "seed" => self.seed = number,
            "devices" => self.devices = within(1..=MAX_DEVICES)?,
            "sockets" => self.sockets = within(0..=16)?,
            "switches" => self.switches = within(1..=15)?,
            "delay_us" => self.delay_us = within(0..=1_000_000)?,
            "memory" => self.memory = Some(number),
            "oom" => self.oom = Some(number),
            "hang" => self.hang = Some(number),
            "watchdog_ms" => self.watchdog_ms = within(0..=3_600_000)?,
            "lost" => self.lost = Some(number),
            "nan" => self.nan = Some(number),
            "flip" => self.flip = Some(within(1..=u64::MAX)?),
            "slow_link" => self.slow_link = within(1..=u64::MAX)?,
            other => {
                return Err(Failure::invalid(format!(
                    "{VARIABLE}: expected seed, devices, sockets, switches, delay_us, memory, oom, hang, watchdog_ms, lost, nan, \
                     flip or slow_link, found {other:?}"
                )));
            }
        }
        Ok(())
    }
}

/// # Safety
/// The string is readable, or null with length 0.
unsafe fn read(text: &qhal_str) -> String {
    if text.data.is_null() {
        return String::new();
    }
    // SAFETY: by the caller's promise.
    let bytes = unsafe { std::slice::from_raw_parts(text.data, text.len.min(4096) as usize) };
    String::from_utf8_lossy(bytes).into_owned()
}

/// Numbers by chance, the same for the same seed.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }
    /// splitmix64.
    pub(crate) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }
    pub(crate) const fn below(&mut self, n: u64) -> u64 {
        if n == 0 { 0 } else { self.next() % n }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_numbers_of_known_names() {
        let mut settings = Settings::default();
        settings.set("oom", "3").unwrap();
        assert_eq!(settings.oom, Some(3));
        for (key, value, part) in [
            ("oom", "x", "a whole number"),
            ("magic", "1", "found \"magic\""),
            ("devices", "0", "devices: expected 1 to 256, found 0"),
            ("devices", "999999999", "expected 1 to 256"),
            ("slow_link", "0", "expected 1 or more, found 0"),
            ("watchdog_ms", "18446744073709551615", "expected 0 to 3600000"),
        ] {
            let message = settings.set(key, value).unwrap_err().message;
            assert!(message.contains(part), "{message}");
        }
        assert_eq!(settings, Settings { oom: Some(3), ..Settings::default() });
    }

    #[test]
    fn a_device_has_settings_of_its_own() {
        let lost = |device| Settings::read("lost@1=7, delay_us=0,lost=9", device).unwrap().lost;
        assert_eq!([lost(None), lost(Some(0)), lost(Some(1))], [Some(9), Some(9), Some(7)]);
        for (text, part) in [
            ("lost@x=1", "the number of a device, found \"x\""),
            ("devices@1=4", "expected no device, found 1"),
            ("lost@1=x", "a whole number"),
            ("magic@1=1", "found \"magic\""),
        ] {
            let message = Settings::read(text, Some(0)).unwrap_err().message;
            assert!(message.contains(part), "{message}");
        }
    }
}
