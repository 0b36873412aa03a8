//! The backend passes levels 0 to 2 on the first OpenCL device of the machine, with the way to cut work that
//! `QWEN_OPENCL_TILING` names. Without a device nothing is tested; `./test` says so, and sets `QWEN_OPENCL_REQUIRED` where one is.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::sync::Arc;

use qwen_hal::{HalError, Host, Plugin, Pool};
use qwen_hal_check::{Outcome, Report, Selection, Subject, run_with_threads};

fn plugin(threads: usize) -> Result<Arc<Plugin>, HalError> {
    Plugin::linked(&hal_opencl::PLUGIN, &Host::new(Arc::new(Pool::new(Some(threads)))))
}

#[test]
fn the_opencl_backend_passes() {
    if plugin(1).unwrap().device_count().unwrap() == 0 {
        assert!(std::env::var_os("QWEN_OPENCL_REQUIRED").is_none(), "an OpenCL device was expected, there is none");
        return;
    }
    let subject = |threads| Subject::new(&plugin(threads)?, 0);
    let records = run_with_threads(&subject, &Selection::level(2)).unwrap();
    let report = Report::new("opencl".into(), "opencl:0".into(), 2, records);
    assert_eq!(report.summary.failed, 0, "{}", report.text(false));
    assert_eq!(report.summary.level_reached, Some(2));
    // What the backend says itself that it does not have: rounded forms of products, and three functions.
    let unsupported = report.cases.iter().filter(|record| record.outcome == Outcome::Unsupported);
    let other: Vec<&str> = unsupported
        .map(|record| record.name.as_str())
        .filter(|name| !["i8_g32", "i8_g16", "i8x2_g32", "i8s_g32", ".bf16"].iter().any(|form| name.contains(form)))
        .collect();
    assert_eq!(other, ["0/device/link", "0/memory/map", "0/memory/vmm"]);
}
