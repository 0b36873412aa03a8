//! The backend passes levels 0 to 3, the last with command lists and without collectives, on the first OpenCL device of the machine. Without a device nothing is tested; `./test` says so, and
//! sets `QWEN_OPENCL_REQUIRED` where one is.
//!
//! With `QWEN_OPENCL_TILING`, which cuts work otherwise, only cases whose kernels depend on that, for a few types of weights: PoCL
//! compiles each kernel anew.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::sync::Arc;

use qwen_hal::{HalError, Host, Plugin, Pool};
use qwen_hal_check::{Outcome, Record, Report, Selection, Subject, run_with_threads};

/// Cases whose results could depend on how work is cut.
const CUT: [&str; 10] = [
    "q4_k.f32",
    "q8_0.f32",
    "segments_and_bias",
    "epilogue",
    "block_scales",
    "attention/f16",
    "mla_attention/absorbed.f16",
    "norm/",
    "softmax/",
    "route/",
];

fn plugin(threads: usize) -> Result<Arc<Plugin>, HalError> {
    Plugin::linked(&hal_opencl::PLUGIN, &Host::new(Arc::new(Pool::new(Some(threads)))))
}

/// None if the machine has no device.
fn run(selection: &Selection) -> Option<Vec<Record>> {
    if plugin(1).unwrap().device_count().unwrap() == 0 {
        assert!(std::env::var_os("QWEN_OPENCL_REQUIRED").is_none(), "an OpenCL device was expected, there is none");
        return None;
    }
    let subject = |threads| Subject::new(&plugin(threads)?, 0);
    Some(run_with_threads(&subject, selection).unwrap())
}

/// What names of cases with rounded products contain.
const ROUNDED: [&str; 6] = ["i8_g32", "i8_g16", "i8x2_g32", "i8s_g32", ".bf16", "products_of_bf16"];

#[test]
fn the_opencl_backend_passes() {
    if std::env::var_os("QWEN_OPENCL_TILING").is_some() {
        for case in CUT {
            let Some(records) = run(&Selection { filter: Some(case.into()), ..Selection::level(2) }) else { return };
            let passed = records.iter().filter(|record| record.outcome == Outcome::Passed).count();
            let report = Report::new("opencl".into(), "opencl:0".into(), 2, Some(case.into()), records);
            assert!(passed > 0 && report.summary.failed == 0, "{case}: {}", report.text(false));
        }
        return;
    }
    let Some(records) = run(&Selection::level(3)) else { return };
    let report = Report::new("opencl".into(), "opencl:0".into(), 3, None, records);
    assert_eq!(report.summary.failed, 0, "{}", report.text(false));
    assert_eq!(report.summary.level_reached, Some(3));
    // What the backend says itself that it does not have: rounded forms of products, and three functions.
    let unsupported = report.cases.iter().filter(|record| record.outcome == Outcome::Unsupported);
    let other: Vec<&str> = unsupported
        .map(|record| record.name.as_str())
        .filter(|name| !ROUNDED.iter().any(|form| name.contains(form)))
        .filter(|name| !name.starts_with("3/collectives/"))
        .collect();
    assert_eq!(other, ["0/device/link", "0/memory/map", "0/memory/vmm", "3/region/claim"]);
}
