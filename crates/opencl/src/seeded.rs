//! The conformance suite against seeded faults of the kernels: a changed operator or constant each, which must be the failure of the case
//! that is there for it. Faults are put into the sources when a program is made; the whole sources pass those cases.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use qwen_hal::{Host, Plugin, Pool};
use qwen_hal_check::{Outcome, Record, Selection, Subject, run};

/// (what is wrong, the case that is there for it, what the source says, what it says instead).
type Fault = (&'static str, &'static str, &'static str, &'static str);

const FAULTS: [Fault; 16] = [
    (
        "softmax multiplies by the sum",
        "softmax/rows",
        "load_up_to(out + c, cols - c) / sum",
        "load_up_to(out + c, cols - c) * sum",
    ),
    ("the epsilon has the wrong sign", "norm/strided", "/ axis + eps", "/ axis - eps"),
    ("rotation the other way", "rope/half_whole", "a * cosine[j] - b * sine[j]", "a * cosine[j] + b * sine[j]"),
    ("the window is one too wide", "attention/f16.window", "position - window + 1", "position - window"),
    (
        "the last position is lost",
        "attention/f32.prefill",
        "min(TILE, position + 1 - start)",
        "min(TILE, position - start)",
    ),
    ("a neighbour's keys", "attention/f32.prefill", "kv_head = head / queries_per_head", "kv_head = head % kv_heads"),
    ("the next slot is written", "kv_append/joined", "place = slot % block_size", "place = (slot + 1) % block_size"),
    ("halves are cut off, not rounded", "cast/f32_to_bf16", "(bits + 0x7fffu + (bits >> 16 & 1u)) >> 16", "bits >> 16"),
    ("a sum is a difference", "binary/add", "multiply ? x * y : x + y", "multiply ? x * y : x - y"),
    (
        "the last chunk is lost",
        "gemm/f32.f32.2x1x32",
        "(blocks + CHUNK_BLOCKS - 1) / CHUNK_BLOCKS",
        "blocks / CHUNK_BLOCKS",
    ),
    ("a neighbour's bias", "gemm/segments_and_bias", "load_up_to(bias + n0, n)", "load_up_to(bias + n0 + (n0 > 0), n)"),
    (
        "the gate is not activated",
        "gemm/glu_epilogue",
        "activate(load_up_to(out + n0, n), function) * y",
        "load_up_to(out + n0, n) * y",
    ),
    ("the zero of the codes is off by one", "gemm/q4_0.f32", "(float)(8 << at)", "(float)(7 << at)"),
    ("one column too many", "gemm/f32.f32.2x1x32", "int n = min(V, N - n0);", "int n = min(V, N - n0 + 1);"),
    ("ties go to the higher index", "route/ties", "values[i] > values[found]", "values[i] >= values[found]"),
    (
        "the last expert of a token is lost",
        "combine/with_addend",
        "for (int j = 0; j < top_k; j++) {\n        int slot",
        "for (int j = 0; j < top_k - 1; j++) {\n        int slot",
    ),
];

/// Number of the fault that programs get, from 1; 0 for none.
static CHOSEN: AtomicUsize = AtomicUsize::new(0);
const OPTION: &str = " -DSEEDED_FAULT=";

/// Options that tell programs with a fault from those without.
pub(crate) fn mark(options: String) -> String {
    match CHOSEN.load(Ordering::Relaxed) {
        0 => options,
        number => format!("{options}{OPTION}{number}"),
    }
}

/// The source with the fault that the options name.
pub(crate) fn spoil(source: String, options: &str) -> String {
    let number = options.split_once(OPTION).and_then(|(_, number)| number.parse::<usize>().ok()).unwrap_or(0);
    match number.checked_sub(1).and_then(|at| FAULTS.get(at)) {
        Some((_, _, right, wrong)) => source.replace(right, wrong),
        None => source,
    }
}

fn records(subject: &Subject, case: &str) -> Vec<Record> {
    let selection = Selection { filter: Some(case.to_owned()), ..Selection::level(2) };
    run(subject, &selection, &mut |_| {}, &mut |_| {})
}

#[test]
fn every_seeded_fault_of_a_kernel_is_caught() {
    let plugin = Plugin::linked(&crate::PLUGIN, &Host::new(Arc::new(Pool::new(Some(2))))).unwrap();
    if plugin.device_count().unwrap() == 0 {
        assert!(std::env::var_os("QWEN_OPENCL_REQUIRED").is_none(), "an OpenCL device was expected, there is none");
        return;
    }
    let subject = Subject::new(&plugin, 0).unwrap();
    let mut missed = Vec::new();
    for (at, (name, case, right, _)) in FAULTS.iter().enumerate() {
        let sources = crate::program::sources();
        assert!(sources.iter().any(|source| source.contains(right)), "{name}: the kernels do not say {right:?}");
        let whole = records(&subject, case);
        let passes = |record: &Record| record.outcome == Outcome::Passed;
        assert!(whole.iter().any(passes) && whole.iter().all(|r| r.outcome != Outcome::Failed), "{name}: {whole:?}");
        CHOSEN.store(at + 1, Ordering::Relaxed);
        match records(&subject, case).iter().find(|record| record.outcome == Outcome::Failed) {
            Some(record) => println!("{name}: {} ({})", record.name, record.message),
            None => missed.push(*name),
        }
        CHOSEN.store(0, Ordering::Relaxed);
    }
    assert!(missed.is_empty(), "not caught: {missed:#?}");
}
