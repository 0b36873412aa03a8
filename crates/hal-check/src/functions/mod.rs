//! Functions of the table, level 0, and the extensions, level 3.

mod device;
mod memory;
mod refusals;
mod streams;

use qwen_hal::abi::{
    QHAL_EXT_CMDLIST, QHAL_EXT_COLLECTIVES, QHAL_EXT_REGION, QHAL_FEATURE_CMDLIST, QHAL_FEATURE_COLLECTIVES,
    QHAL_FEATURE_REGION, QHAL_OK,
};

use crate::case::{Body, Case, Checked, failed, unsupported};
use crate::raw::{Handles, raw};
use crate::suite::Subject;

type Function = (&'static str, fn(&Subject) -> Checked);

pub(crate) fn cases(level: u32) -> Vec<Case> {
    let make = |level: u32| {
        move |(name, check): &Function| Case { name: format!("{level}/{name}"), level, body: Body::Function(*check) }
    };
    let zero = [device::CASES, memory::CASES, streams::CASES, refusals::CASES].concat();
    let mut cases: Vec<Case> = zero.iter().map(make(0)).collect();
    if level >= 3 {
        cases.extend(EXTENSIONS.iter().map(make(3)));
    }
    cases
}

const EXTENSIONS: &[Function] = &[
    ("extensions/cmdlist", |subject| extension(subject, QHAL_EXT_CMDLIST, QHAL_FEATURE_CMDLIST, "command lists")),
    ("extensions/collectives", |subject| {
        extension(subject, QHAL_EXT_COLLECTIVES, QHAL_FEATURE_COLLECTIVES, "collectives")
    }),
    ("extensions/region", |subject| extension(subject, QHAL_EXT_REGION, QHAL_FEATURE_REGION, "regions")),
];

/// The ABI has ids for these, but no tables yet, so that nothing can be claimed.
fn extension(subject: &Subject, id: u32, feature: u64, what: &str) -> Checked {
    let handles = Handles::new(subject, 64)?;
    let mut table = std::ptr::null();
    let (status, _) = raw!(handles.table, query_extension(handles.device, id, 1, &raw mut table));
    let claimed = subject.device.caps().has(feature);
    if status == QHAL_OK || claimed {
        return failed(format!(
            "{what}: expected a refusal, as this version of the ABI defines no table, found a claim"
        ));
    }
    unsupported(format!("the plugin has no {what}"))
}
