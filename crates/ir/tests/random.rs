//! Properties of passes, text form and memory plan over random graphs.

use proptest::prelude::*;
use qwen_ir::passes::{CompileOptions, DeviceModel, PermissiveDevice, canonicalise, compile, expand, fuse};
use qwen_ir::program::{Instruction, StepResult};
use qwen_ir::test_support::{self, equivalent, random};
use qwen_ir::{Graph, Phase, Symbol, check, parse, text, verify};

/// A device that fuses nothing and does nothing in place.
struct PlainDevice;
impl DeviceModel for PlainDevice {
    fn supports(&self, instruction: &Instruction) -> bool {
        use qwen_ir::{Epilogue, Op};
        match &instruction.op {
            Op::Gemm { epilogue, .. } | Op::GroupedGemm { epilogue, .. } => *epilogue == Epilogue::None,
            Op::Combine { addend } => !addend,
            _ => true,
        }
    }
    fn in_place(&self, _: &Instruction, _: usize) -> bool {
        false
    }
    fn tiling(&self, _: &Instruction) -> Option<String> {
        Some("plain".to_owned())
    }
    fn arena_alignment(&self) -> u64 {
        128
    }
}

fn round_trip(graph: &Graph) -> Result<(), TestCaseError> {
    let printed = text::print(graph);
    let parsed = match parse::parse(&printed) {
        Ok(parsed) => parsed,
        Err(error) => return Err(TestCaseError::fail(format!("{error}\n{printed}"))),
    };
    prop_assert_eq!(&parsed, &graph.compacted());
    prop_assert_eq!(text::print(&parsed), printed);
    Ok(())
}

/// The word that a byte is in, or the next one; nothing if there is none.
fn word_at(bytes: &[u8], at: usize) -> std::ops::Range<usize> {
    let is_of_word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    let inside = (at..bytes.len()).find(|i| is_of_word(&bytes[*i])).unwrap_or(bytes.len());
    let first = (0..inside).rev().take_while(|i| is_of_word(&bytes[*i])).last().unwrap_or(inside);
    let length = bytes[inside..].iter().take_while(|byte| is_of_word(byte)).count();
    first..inside + length
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(96) })]

    /// compile() verifies after every pass and plays the program through the independent check.
    #[test]
    fn random_graphs_compile(choices in prop::collection::vec(any::<u32>(), 1..60)) {
        let graph = random(&choices).unwrap();
        verify(&graph).unwrap();
        let options = CompileOptions { verify: true, ..CompileOptions::new(Phase::Mixed, test_support::bounds()) };
        let compiled = compile(&graph, &options, &PermissiveDevice).unwrap();
        for (arena, peak) in compiled.memory.arena_bytes.into_iter().zip(compiled.memory.peak_live_bytes) {
            prop_assert!(arena >= peak);
            prop_assert!(arena <= peak * 2 + 64, "{arena} for {peak}");
        }
        compile(&graph, &options, &PlainDevice).unwrap();
        // Smaller steps use prefixes of the same places.
        let tokens = u64::from(choices[0] % 32) + 1;
        let smaller = compiled.graph.bounds.with(Symbol::Tokens, 1, tokens).with(Symbol::Rows, 1, tokens.min(4));
        check::check(&compiled.graph, &compiled.program, &PermissiveDevice, &smaller).unwrap();
    }

    #[test]
    fn text_round_trips(choices in prop::collection::vec(any::<u32>(), 1..60)) {
        let graph = random(&choices).unwrap();
        round_trip(&graph)?;
        let options = CompileOptions::new(Phase::Decode, test_support::bounds());
        round_trip(&compile(&graph, &options, &PermissiveDevice).unwrap().graph)?;
    }

    #[test]
    fn canonical_graphs_fuse_and_unfuse(choices in prop::collection::vec(any::<u32>(), 1..60)) {
        let mut graph = random(&choices).unwrap();
        canonicalise::run(&mut graph, &PermissiveDevice).unwrap();
        let before = graph.clone();
        let report = fuse::run(&mut graph, &PermissiveDevice).unwrap();
        let restored = fuse::unfuse(&mut graph).unwrap();
        verify(&graph).unwrap();
        prop_assert_eq!(report.changes, restored);
        prop_assert!(equivalent(&before, &graph), "{}", text::diff(&before, &graph));
    }

    /// Whatever is done to a text, the parser answers; and what it accepts, the verifier judges without a panic.
    #[test]
    fn mangled_texts_are_refused_without_panic(
        which in 0_usize..3,
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0_u8..8), 1..6),
    ) {
        let graph = test_support::all().unwrap().swap_remove(which);
        let mut bytes = text::print(&graph).into_bytes();
        for (at, other, kind) in edits {
            let (at, other) = (at.index(bytes.len()), other.index(bytes.len()));
            match kind {
                0 => bytes.truncate(at.max(1)),
                1 => bytes[at] = bytes[other],
                2 => { bytes.remove(at); }
                3 => bytes[at] = b'9',
                4 => bytes.swap(at, other),
                // A word for another, or the largest numbers for it: what stays a text of the form, and says something else.
                5 => {
                    let word = bytes[word_at(&bytes, other)].to_vec();
                    bytes.splice(word_at(&bytes, at), word);
                }
                6 => { bytes.splice(word_at(&bytes, at), *b"4294967295"); }
                _ => { bytes.splice(word_at(&bytes, at), *b"18446744073709551615"); }
            }
            if bytes.is_empty() { return Ok(()); }
        }
        test_support::fuzz_text(&bytes);
    }
}

#[test]
fn small_models_round_trip_at_every_stage() {
    for graph in test_support::all().unwrap() {
        round_trip(&graph).unwrap();
        for phase in [Phase::Prefill, Phase::Decode] {
            let options = CompileOptions::new(phase, test_support::bounds());
            round_trip(&compile(&graph, &options, &PermissiveDevice).unwrap().graph).unwrap();
        }
    }
}

#[test]
fn what_the_builder_joined_is_taken_apart_where_the_device_needs_it() {
    for mut graph in test_support::all().unwrap() {
        fuse::run(&mut graph, &PermissiveDevice).unwrap();
        let options = CompileOptions::new(Phase::Decode, test_support::bounds());
        let program = compile(&graph, &options, &PlainDevice).unwrap().program;
        assert!(program.instructions.iter().all(|i| PlainDevice.supports(i)));
    }
}

#[test]
fn fused_models_unfuse_to_the_canonical_ones() {
    for mut graph in test_support::all().unwrap() {
        canonicalise::run(&mut graph, &PermissiveDevice).unwrap();
        let before = graph.clone();
        let report = fuse::run(&mut graph, &PermissiveDevice).unwrap();
        assert!(report.changes >= 2, "{report}");
        assert!(!equivalent(&before, &graph));
        let (flat, _) = expand::run(&graph, StepResult::Logits).unwrap();
        verify(&flat).unwrap();
        assert_eq!(fuse::unfuse(&mut graph).unwrap(), report.changes);
        assert!(equivalent(&before, &graph), "{}", text::diff(&before, &graph));
    }
}
