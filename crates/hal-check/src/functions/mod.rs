//! Functions of the table, level 0, and the extensions, level 3.

mod cmdlist;
mod collectives;
mod device;
mod memory;
mod refusals;
mod streams;

use qwen_hal::abi::{QHAL_EXT_REGION, QHAL_FEATURE_REGION, QHAL_OK};

use crate::case::{Body, Case, Checked, Trouble, failed, unsupported};
use crate::raw::{raw, text};
use crate::suite::Subject;

type Function = (&'static str, fn(&Subject) -> Checked);

pub(crate) fn cases(level: u32) -> Vec<Case> {
    let make = |level: u32| {
        move |(name, check): &Function| Case { name: format!("{level}/{name}"), level, body: Body::Function(*check) }
    };
    let zero = [device::CASES, memory::CASES, streams::CASES, refusals::CASES].concat();
    let mut cases: Vec<Case> = zero.iter().map(make(0)).collect();
    if level >= 3 {
        let three = [cmdlist::CASES, &collectives::cases(), REGION].concat();
        cases.extend(three.iter().map(make(3)));
    }
    cases
}

const REGION: &[Function] = &[("region/claim", |subject| {
    claim::<u32>(subject, QHAL_EXT_REGION, QHAL_FEATURE_REGION, "regions")?;
    failed("regions: expected a refusal, as this version of the ABI defines no table, found a claim")
})];

/// The table of an extension, which is there if, and only if, the device says so.
fn claim<T>(subject: &Subject, id: u32, feature: u64, what: &str) -> Result<*const T, Trouble> {
    let mut table = std::ptr::null();
    let device = subject.device.raw_handle();
    let (status, err) = raw!(subject.plugin.raw_table(), query_extension(device, id, 1, &raw mut table));
    match (subject.device.caps().has(feature), status == QHAL_OK) {
        (false, false) => unsupported(format!("the plugin has no {what}")),
        (true, false) => failed(format!("{what}: the device claims them, query_extension refuses: {}", text(&err))),
        (false, true) => failed(format!("{what}: query_extension has a table, the device does not claim them")),
        (true, true) if table.is_null() => failed(format!("{what}: a null table with status OK")),
        (true, true) => Ok(table.cast()),
    }
}
