//! Specialise: fits the graph to one kind of step. In: a graph for any step. Out: bounds of the symbols, the phase on every
//! node, the form of latent attention.
//!
//! Latent attention is expanded for prompts (fewer operations per query) and absorbed for generated tokens and mixed steps
//! (fewer bytes per query). Both forms are equal but for rounding.

use super::{CompileOptions, PassName, Report};
use crate::{Bounds, Graph, IrError, MlaForm, Op, Phase, Symbol};

/// Runs the pass.
///
/// # Errors
/// If the bounds are empty.
pub fn run(graph: &mut Graph, options: &CompileOptions) -> Result<Report, IrError> {
    let mut report = Report::new(PassName::Specialise);
    let mut bounds = options.bounds;
    if options.phase == Phase::Decode {
        // One token per sequence: the arena need not hold more.
        let tokens = bounds.get(Symbol::Tokens);
        bounds = bounds.with(Symbol::Tokens, tokens.min, tokens.max.min(bounds.get(Symbol::Sequences).max));
    }
    let (rows, tokens) = (bounds.get(Symbol::Rows), bounds.get(Symbol::Tokens));
    bounds = bounds.with(Symbol::Rows, rows.min, rows.max.min(tokens.max));
    for symbol in Symbol::ALL {
        let Bounds { min, max } = bounds.get(symbol);
        if min > max || max > i32::MAX as u64 {
            let what = format!("bounds of {} must be min <= max < 2^31, found {min}..{max}", symbol.name());
            return Err(IrError::Pass { pass: "specialise", what });
        }
        if graph.bounds.get(symbol) != bounds.get(symbol) {
            report.changes += 1;
        }
        report.notes.push(format!("{} in {min}..{max}", symbol.name()));
    }
    graph.bounds = bounds;
    let by_phase = if options.phase == Phase::Prefill { MlaForm::Expanded } else { MlaForm::Absorbed };
    let form = options.mla_form.unwrap_or(by_phase);
    for node in &mut graph.nodes {
        node.attributes.phase = Some(options.phase);
        if let Op::MlaAttention { attention, .. } = &mut node.op {
            attention.form = Some(form);
            report.changes += 1;
            report.notes.push(format!("{}: {form:?}", node.attributes.origin));
        }
    }
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support;

    fn form(phase: Phase, forced: Option<MlaForm>) -> Option<MlaForm> {
        let mut graph = test_support::latent().unwrap();
        let options = CompileOptions { mla_form: forced, ..CompileOptions::new(phase, test_support::bounds()) };
        run(&mut graph, &options).unwrap();
        graph.nodes.iter().find_map(|node| match &node.op {
            Op::MlaAttention { attention, .. } => attention.form,
            _ => None,
        })
    }

    #[test]
    fn the_phase_chooses_the_form_unless_told_otherwise() {
        assert_eq!(form(Phase::Prefill, None), Some(MlaForm::Expanded));
        assert_eq!(form(Phase::Decode, None), Some(MlaForm::Absorbed));
        assert_eq!(form(Phase::Decode, Some(MlaForm::Expanded)), Some(MlaForm::Expanded));
    }

    #[test]
    fn decode_has_a_token_per_sequence() {
        let mut graph = test_support::dense().unwrap();
        run(&mut graph, &CompileOptions::new(Phase::Decode, test_support::bounds())).unwrap();
        assert_eq!(graph.bounds.get(Symbol::Tokens).max, graph.bounds.get(Symbol::Sequences).max);
    }

    #[test]
    fn empty_bounds_are_refused() {
        let mut graph = test_support::dense().unwrap();
        let bounds = test_support::bounds().with(Symbol::Blocks, 9, 8);
        let error = run(&mut graph, &CompileOptions::new(Phase::Mixed, bounds)).unwrap_err();
        assert!(error.to_string().contains("bounds of B"), "{error}");
    }
}
