//! Hostile headers must not make the parser ask for more memory than the file could justify.

use peak_alloc::PeakAlloc;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use qwen_formats::DType;
use qwen_formats::gguf::parse_gguf_bytes;
use qwen_formats::safetensors::parse_safetensors_bytes;
use qwen_formats::test_support::{GgufBuilder, raw_safetensors, safetensors};

#[global_allocator]
static PEAK: PeakAlloc = PeakAlloc;

/// Error texts and the bookkeeping of a handful of entries.
const SLACK: usize = 16 << 10;

/// Runs `parse` on `bytes` and gives back how far the heap grew above what it held before.
fn growth(bytes: &[u8], parse: fn(&[u8])) -> usize {
    let before = PEAK.current_usage();
    PEAK.reset_peak_usage();
    parse(bytes);
    PEAK.peak_usage().saturating_sub(before)
}

fn parse_gguf(bytes: &[u8]) {
    drop(parse_gguf_bytes(bytes));
}

fn parse_safetensors(bytes: &[u8]) {
    drop(parse_safetensors_bytes(bytes));
}

// One test: the allocator's counters belong to the whole process.
#[test]
fn memory_is_bounded_by_the_file() {
    let gguf = GgufBuilder::new()
        .strings("tokens", (0..2000).map(|i| format!("token {i}")))
        .f32s("scores", &[0.5; 2000])
        .i32s("types", &[1; 2000])
        .tensor("a", DType::Q4_0, &[4, 64], &[0; 144])
        .tensor("b", DType::F32, &[100], &[0; 400])
        .build();
    let tensors = safetensors(&[("a", "F32", &[50], &[0; 200]), ("b", "U8", &[30], &[0; 30])]);
    assert!(parse_gguf_bytes(&gguf).is_ok() && parse_safetensors_bytes(&tensors).is_ok());
    let mut runner = TestRunner::new(Config { cases: 2000, failure_persistence: None, ..Config::default() });
    // Mostly in the first bytes, where counts and lengths are dense.
    let flip = (
        prop_oneof![
            any::<prop::sample::Index>().prop_map(|i| i.index(200)),
            any::<prop::sample::Index>().prop_map(|i| i.index(usize::MAX))
        ],
        0..8u32,
    );
    let flips = prop::collection::vec(flip, 0..4);
    runner
        .run(&flips, |flips| {
            for (original, parse) in [(&gguf, parse_gguf as fn(&[u8])), (&tensors, parse_safetensors)] {
                let mut bytes = original.clone();
                for &(place, bit) in &flips {
                    let place = place % bytes.len();
                    bytes[place] ^= 1 << bit;
                }
                let (grown, limit) = (growth(&bytes, parse), bytes.len() + SLACK);
                prop_assert!(grown <= limit, "{grown} bytes of heap for a file of {}", bytes.len());
            }
            Ok(())
        })
        .unwrap();
    many_minimal_entries();
}

/// The densest hostile files: each entry as small as it can be. Bookkeeping may cost a small multiple, no more.
fn many_minimal_entries() {
    let name = |i: u32| i.to_be_bytes().map(|byte| byte & 0x7F);
    let tensors = |count| (0..count).fold(GgufBuilder::new(), |file, i| file.raw_tensor(&name(i), &[], 0, 0));
    let keys = |count| (0..count).fold(GgufBuilder::new(), |file, i| file.raw_key(&name(i), 7, &[1]));
    let strings = GgufBuilder::new().strings("k", vec![""; 100_000]);
    for builder in [tensors(20_000), tensors(100_000), keys(8_000), keys(20_000), strings] {
        let bytes = builder.build();
        let grown = growth(&bytes, parse_gguf);
        assert!(grown <= 10 * bytes.len(), "{grown} bytes of heap for a file of {}", bytes.len());
    }
    let dimensions = format!("{{\"a\":{{\"shape\":[{}1]}}}}", "1,".repeat(100_000));
    let entry = r#":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
    let entries: Vec<String> = (0..20_000).map(|i| format!("\"{i}\"{entry}")).collect();
    for json in [dimensions, format!("{{{}}}", entries.join(","))] {
        let bytes = raw_safetensors(&json, &[]);
        let grown = growth(&bytes, parse_safetensors);
        assert!(grown <= 10 * bytes.len(), "{grown} bytes of heap for a file of {}", bytes.len());
    }
}
