//! Errors of the IR.

/// What can be wrong with a graph or its text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IrError {
    /// Operands of a node do not fit.
    #[error("{op} ({origin}): expected {expected}, found {found}")]
    Operand {
        /// Kind of the node.
        op: &'static str,
        /// Where it comes from.
        origin: String,
        /// What the op needs.
        expected: String,
        /// What it got.
        found: String,
    },
    /// The graph breaks an invariant.
    #[error("graph {graph}: {what}")]
    Invalid {
        /// Name of the graph.
        graph: String,
        /// Which invariant, where.
        what: String,
    },
    /// The text form can't be read.
    #[error("line {line}, column {column}: expected {expected}, found {found}")]
    Parse {
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// What would be right.
        expected: String,
        /// What stands there.
        found: String,
    },
    /// A pass can't do its work.
    #[error("pass {pass}: {what}")]
    Pass {
        /// Name of the pass.
        pass: &'static str,
        /// What is missing.
        what: String,
    },
}
