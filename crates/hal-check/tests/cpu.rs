//! The CPU backend passes levels 0 to 3, as far as it claims: command lists, no collectives.

mod common;

use common::subject;
use qwen_hal_check::{Outcome, Report, Selection, run_with_threads};

/// A form that only some processors have.
const BF16: &str = "1/gemm/bf16.bf16";

#[test]
fn the_cpu_backend_passes() {
    let records = run_with_threads(&|threads| subject(&qwen_cpu::PLUGIN, threads), &Selection::level(3)).unwrap();
    let report = Report::new("cpu".into(), "cpu:0".into(), 3, None, records);
    assert_eq!(report.summary.failed, 0, "{}", report.text(false));
    assert_eq!(report.summary.level_reached, Some(3));
    assert!(report.summary.passed > 150, "{}", report.text(true));
    // Only what the CPU says itself that it does not have.
    let unsupported = report.cases.iter().filter(|record| record.outcome == Outcome::Unsupported);
    let unsupported: Vec<&str> = unsupported
        .map(|record| record.name.as_str())
        .filter(|name| *name != BF16 && !name.starts_with("3/collectives/"))
        .collect();
    assert_eq!(unsupported, ["0/device/link", "3/region/claim"]);
}
