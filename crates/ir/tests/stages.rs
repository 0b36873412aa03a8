//! Snapshots of small graphs after each pass: what `--dump-ir=after:<pass>` shows.

use qwen_ir::passes::{CompileOptions, PassName, PermissiveDevice, Policy, compile};
use qwen_ir::program::{Place, Program, StepResult};
use qwen_ir::{Compute, Graph, Phase, test_support, text};

fn after(graph: &Graph, phase: Phase, pass: PassName) -> Option<String> {
    let options = CompileOptions { dump_after: Some(pass), ..CompileOptions::new(phase, test_support::bounds()) };
    compile(graph, &options, &PermissiveDevice).ok()?.dump
}

/// Lines that a pass changed, without those of the declarations.
fn changes(before: &str, after: &str) -> String {
    let diff = similar::TextDiff::from_lines(before, after);
    let lines = diff.iter_all_changes().filter(|c| c.tag() != similar::ChangeTag::Equal);
    lines.map(|c| format!("{}{}", c.tag(), c.value())).collect()
}

#[test]
fn built() {
    insta::assert_snapshot!("dense_built", text::print(&test_support::dense().unwrap()));
}

#[test]
fn canonicalise_joins_projections() {
    for graph in test_support::all().unwrap() {
        let text = after(&graph, Phase::Mixed, PassName::Canonicalise).unwrap();
        let bodies = text.split_once("  body").unwrap().1;
        insta::assert_snapshot!(format!("{}_canonicalise", graph.name), bodies);
    }
}

#[test]
fn fuse_joins_activations_and_sums() {
    for graph in test_support::all().unwrap() {
        let text = after(&graph, Phase::Mixed, PassName::Fuse).unwrap();
        insta::assert_snapshot!(format!("{}_fuse", graph.name), text.split_once("  body").unwrap().1);
    }
}

#[test]
fn each_pass_changes_what_it_says() {
    let graph = test_support::latent().unwrap();
    let mut shown = String::new();
    for pair in [PassName::Canonicalise, PassName::Specialise, PassName::Fuse, PassName::Precision].windows(2) {
        let [before, pass] = pair else { continue };
        let (a, b) = (after(&graph, Phase::Prefill, *before).unwrap(), after(&graph, Phase::Prefill, *pass).unwrap());
        if *pass != PassName::Specialise {
            shown.push_str(&format!("== {pass}\n{}", changes(&a, &b)));
        }
    }
    insta::assert_snapshot!("latent_changes", shown);
}

#[test]
fn places_and_program() {
    let graph = test_support::experts().unwrap();
    let text = after(&graph, Phase::Decode, PassName::PlanMemory).unwrap();
    insta::assert_snapshot!("experts_places", text.split_once("  body").unwrap().1);
    insta::assert_snapshot!("experts_program", after(&graph, Phase::Decode, PassName::Lower).unwrap());
    insta::assert_snapshot!(
        "dense_program",
        after(&test_support::dense().unwrap(), Phase::Decode, PassName::Lower).unwrap()
    );
    insta::assert_snapshot!(
        "latent_program",
        after(&test_support::latent().unwrap(), Phase::Prefill, PassName::Lower).unwrap()
    );
}

#[test]
fn reports() {
    let mut shown = String::new();
    for policy in [Policy::Fast, Policy::Balanced, Policy::Exact] {
        let options = CompileOptions { policy, ..CompileOptions::new(Phase::Decode, test_support::bounds()) };
        let compiled = compile(&test_support::experts().unwrap(), &options, &PermissiveDevice).unwrap();
        shown.push_str(&format!("== {policy:?}\n"));
        for report in &compiled.reports {
            shown.push_str(&format!("{report}\n"));
        }
    }
    insta::assert_snapshot!("experts_reports", shown);
}

/// Both kinds of step share packed weights only if they want them in the same forms.
#[test]
fn a_step_that_gives_hidden_states_is_the_same_but_for_its_head() {
    for graph in test_support::all().unwrap() {
        let program = |result| -> Program {
            let options = CompileOptions { result, ..CompileOptions::new(Phase::Mixed, test_support::bounds()) };
            compile(&graph, &options, &PermissiveDevice).unwrap().program
        };
        let (logits, hidden) = (program(StepResult::Logits), program(StepResult::Hidden));
        assert_eq!((logits.result, hidden.result), (StepResult::Logits, StepResult::Hidden));
        assert!(hidden.result_width < logits.result_width, "{}", graph.name);
        assert_eq!(hidden.instructions.last().unwrap().outputs[0].place, Place::Result);
        let forms = |program: &Program| -> Vec<(String, Vec<Compute>)> {
            program.instructions.iter().map(|i| (i.origin.clone(), i.compute.clone())).collect()
        };
        let (with, without) = (forms(&logits), forms(&hidden));
        assert_eq!(with[..with.len() - 1], without[..], "{}", graph.name);
    }
}
