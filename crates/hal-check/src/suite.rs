//! The cases in order, and running them in this process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use qwen_hal::{Device, HalError, Plugin};

use crate::case::{Body, Case, Checked, Outcome, Record, Trouble};
use crate::{functions, honesty, ops};

/// What is tested: a device of a plugin.
#[derive(Debug, Clone)]
pub struct Subject {
    pub(crate) plugin: Arc<Plugin>,
    pub(crate) device: Device,
    pub(crate) index: u32,
}

impl Subject {
    /// Opens a device of a plugin.
    ///
    /// # Errors
    /// If it can't be opened.
    pub fn new(plugin: &Arc<Plugin>, index: u32) -> Result<Self, HalError> {
        Ok(Self { plugin: Arc::clone(plugin), device: plugin.open(index, &[])?, index })
    }
    /// Plugin and version, device and its name.
    #[must_use]
    pub fn names(&self) -> (String, String) {
        let manifest = self.plugin.manifest();
        (
            format!("{} {}", manifest.name, manifest.version),
            format!("{}:{} {}", manifest.name, self.index, self.device.info().name),
        )
    }
}

/// Which cases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selection {
    /// Cases up to this level.
    pub level: u32,
    /// Only cases whose name contains this.
    pub filter: Option<String>,
    /// Only cases whose results are compared between numbers of threads.
    pub only_ops: bool,
    /// Cases of the selection that are left out from the beginning.
    pub skip: usize,
}

impl Selection {
    /// All cases up to a level.
    #[must_use]
    pub const fn level(level: u32) -> Self {
        Self { level, filter: None, only_ops: false, skip: 0 }
    }
}

pub(crate) fn cases(selection: &Selection) -> Vec<Case> {
    let mut cases = functions::cases(selection.level);
    cases.extend(honesty::cases());
    cases.extend(ops::cases(selection.level));
    let wanted = |case: &Case| {
        selection.filter.as_ref().is_none_or(|part| case.name.contains(part))
            && (!selection.only_ops || matches!(case.body, Body::Op(_)))
    };
    cases.retain(wanted);
    cases.sort_by_key(|case| case.level);
    cases.drain(..selection.skip.min(cases.len()));
    cases
}

/// Names and levels of the selected cases, in order.
#[must_use]
pub fn case_names(selection: &Selection) -> Vec<(String, u32)> {
    cases(selection).into_iter().map(|case| (case.name, case.level)).collect()
}

/// Runs the selected cases one after the other. `begin` is told each name before, `end` each record after.
pub fn run(
    subject: &Subject,
    selection: &Selection,
    begin: &mut dyn FnMut(&str),
    end: &mut dyn FnMut(&Record),
) -> Vec<Record> {
    let mut records = Vec::new();
    for case in cases(selection) {
        begin(&case.name);
        let record = run_case(subject, &case);
        end(&record);
        records.push(record);
    }
    records
}

/// Runs the selected cases on the subject of a pool with many threads, and compares the bits of ops with those of one thread.
/// `make` opens the subject for a number of threads.
///
/// # Errors
/// If the subject can't be opened.
pub fn run_with_threads(
    make: &dyn Fn(usize) -> Result<Subject, HalError>,
    selection: &Selection,
) -> Result<Vec<Record>, HalError> {
    let mut records = run(&make(4)?, selection, &mut |_| {}, &mut |_| {});
    let alone = run(&make(1)?, &Selection { only_ops: true, ..selection.clone() }, &mut |_| {}, &mut |_| {});
    compare_threads(&mut records, &alone);
    Ok(records)
}

/// Fails cases whose bits depend on the number of threads.
pub(crate) fn compare_threads(records: &mut [Record], alone: &[Record]) {
    for record in records.iter_mut().filter(|record| record.outcome == Outcome::Passed) {
        let Some(other) = alone.iter().find(|other| other.name == record.name) else { continue };
        if record.bits != other.bits {
            record.outcome = Outcome::Failed;
            record.message = if other.outcome == Outcome::Passed {
                "threads: the plan claims to be deterministic, one thread gives other bits than several".into()
            } else {
                format!("threads: passes with several threads, with one: {}", other.message)
            };
        }
    }
}

fn run_case(subject: &Subject, case: &Case) -> Record {
    let start = Instant::now();
    // What a plugin returns may be anything; a check that stumbles over it has found something.
    let checked = catch_unwind(AssertUnwindSafe(|| run_body(subject, case)));
    let mut record = checked.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
        let message = format!("the check itself stumbled: {}", text.unwrap_or("no message"));
        Record::new(&case.name, case.level, Outcome::Failed, message)
    });
    record.milliseconds = (start.elapsed().as_secs_f64() * 1e6).round() / 1e3;
    record
}

fn run_body(subject: &Subject, case: &Case) -> Record {
    let with = |result: Checked| {
        let (outcome, message) = match result {
            Ok(()) => (Outcome::Passed, String::new()),
            Err(Trouble::Failed(message)) => (Outcome::Failed, message),
            Err(Trouble::Unsupported(reason)) => (Outcome::Unsupported, reason),
        };
        Record::new(&case.name, case.level, outcome, message)
    };
    match &case.body {
        Body::Function(check) => with(check(subject)),
        Body::Variants(op) => with(op.check_variants(&subject.device)),
        Body::Coverage(kind) => with(coverage(subject, case.level, *kind)),
        Body::Op(op) => {
            let (result, measured) = match op.check(&subject.device) {
                Ok(measured) => (Ok(()), measured),
                Err((trouble, measured)) => (Err(trouble), measured),
            };
            let limit = measured.nmse.is_some();
            Record {
                // JSON has no infinity.
                nmse: measured.nmse.filter(|error| error.is_finite()),
                max_abs: measured.max_abs.filter(|error| error.is_finite()),
                limit_nmse: limit.then_some(op.limit.nmse),
                limit_max_abs: limit.then_some(op.limit.max_abs),
                kernel: (!measured.kernel.is_empty()).then_some(measured.kernel),
                bits: measured.bits.map(|bits| format!("{bits:016x}")),
                ..with(result)
            }
        }
    }
}

/// A level means something only if every kind of op in it is there in some form.
fn coverage(subject: &Subject, level: u32, kind: u32) -> Checked {
    let mut refused = String::new();
    for case in ops::cases(level) {
        let Body::Op(op) = case.body else { continue };
        if op.op.kind() != kind {
            continue;
        }
        match subject.device.op_supports(&op.op) {
            Ok(support) if support.is_supported() => return Ok(()),
            Ok(support) => refused = format!("{support:?}"),
            Err(error) => refused = error.to_string(),
        }
    }
    let name = qwen_hal::abi::ops::op_name(kind);
    Err(Trouble::Failed(format!(
        "level {level} needs {name} in at least one form, none is supported; the last: {refused}"
    )))
}
