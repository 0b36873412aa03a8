//! Grammars in llama.cpp's GBNF, rewritten in the Lark dialect that llguidance compiles.
//!
//! In: the text of a grammar, of whoever asks. Out: Lark text whose length is in proportion, or [`GbnfError`]. GBNF speaks of
//! characters alone, llguidance of lexemes, the longest of which counts. So what is regular becomes a lexeme, as large as
//! possible: a grammar without recursion is one, and exact; `r ::= x r | y` is `x* y`; in what is left, neighbours are one, less
//! white space and the like at their end, whose characters are lexemes of their own.
//! Invariant: every text that the result allows, the grammar allows. The reverse holds but where a lexeme could end early because
//! what follows begins with what it may go on with.

mod parser;
mod writer;

use parser::Parser;
use writer::Writer;

/// Why a text is no GBNF grammar.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GbnfError {
    /// Something else was expected.
    #[error("line {line}: expected {expected}, found {found}")]
    Syntax {
        /// Line, from 1.
        line: usize,
        /// What would be right.
        expected: &'static str,
        /// What is there.
        found: String,
    },
    /// A rule that is not defined.
    #[error("the rule {name} is used and not defined")]
    Undefined {
        /// Its name.
        name: String,
    },
    /// A rule that is defined again.
    #[error("line {line}: the rule {name} is defined already")]
    Twice {
        /// Its name.
        name: String,
        /// Line, from 1.
        line: usize,
    },
    /// A rule that no text fulfils.
    #[error("the rule {name} leads to itself in every alternative, so no text can end it")]
    Endless {
        /// Its name.
        name: String,
    },
}

/// Whether a text is GBNF: it begins, after comments, with a rule as GBNF writes them.
#[must_use]
pub fn is_gbnf(text: &str) -> bool {
    let rest = text.lines().map(str::trim_start).find(|line| !line.is_empty() && !line.starts_with('#'));
    let Some(rest) = rest else { return false };
    let name = rest.find(|c: char| !is_word(c)).unwrap_or(rest.len());
    name > 0 && rest[name..].trim_start().starts_with("::=")
}

/// The same grammar in Lark form.
///
/// # Errors
/// If the text is no GBNF grammar with a rule `root`.
pub fn gbnf_to_lark(text: &str) -> Result<String, GbnfError> {
    let mut grammar = Parser::new(text).parse()?;
    grammar.check_ends()?;
    grammar.unroll();
    Ok(Writer::new(&grammar).write())
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Node {
    Text(String),
    /// Ranges of characters, or all others.
    Class {
        negated: bool,
        ranges: Vec<(char, char)>,
    },
    Rule(usize),
    Sequence(Vec<Self>),
    Choice(Vec<Self>),
    Repeat {
        node: Box<Self>,
        least: u32,
        most: Option<u32>,
    },
}

impl Node {
    const EMPTY: Self = Self::Sequence(Vec::new());

    fn star(self) -> Self {
        Self::Repeat { node: Box::new(self), least: 0, most: None }
    }

    /// Without sequences within sequences, of one node, or of nothing beside others.
    fn flat(self) -> Self {
        match self {
            Self::Sequence(nodes) => {
                let inner = |node: Self| match node.flat() {
                    Self::Sequence(nodes) => nodes,
                    node => vec![node],
                };
                let mut nodes: Vec<Self> = nodes.into_iter().flat_map(inner).collect();
                if nodes.len() == 1 { nodes.remove(0) } else { Self::Sequence(nodes) }
            }
            Self::Choice(mut nodes) if nodes.len() == 1 => nodes.remove(0).flat(),
            node => node,
        }
    }

    /// Calls `visit` with each rule that is named.
    fn rules(&self, visit: &mut impl FnMut(usize)) {
        match self {
            Self::Text(_) | Self::Class { .. } => {}
            Self::Rule(rule) => visit(*rule),
            Self::Sequence(nodes) | Self::Choice(nodes) => nodes.iter().for_each(|node| node.rules(visit)),
            Self::Repeat { node, .. } => node.rules(visit),
        }
    }

    fn all_rules(&self, holds: impl Fn(usize) -> bool) -> bool {
        let mut all = true;
        self.rules(&mut |rule| all &= holds(rule));
        all
    }

    /// Whether a text can end it, where rules are known that can be ended.
    fn can_end(&self, rules: &[bool]) -> bool {
        match self {
            Self::Text(_) | Self::Class { .. } | Self::Repeat { least: 0, .. } => true,
            Self::Rule(rule) => rules[*rule],
            Self::Sequence(nodes) => nodes.iter().all(|node| node.can_end(rules)),
            Self::Choice(nodes) => nodes.iter().any(|node| node.can_end(rules)),
            Self::Repeat { node, .. } => node.can_end(rules),
        }
    }

    /// What comes before a rule at the end, and what there is without it: a node is `before rule | without`. None if the rule is
    /// elsewhere too.
    fn split_at_end(&self, rule: usize) -> Option<Split> {
        if self.all_rules(|named| named != rule) {
            return Some(Split { before: None, without: Some(self.clone()) });
        }
        match self {
            Self::Rule(_) => Some(Split { before: Some(Self::EMPTY), without: None }),
            Self::Sequence(nodes) => {
                let (last, first) = nodes.split_last()?;
                if !first.iter().all(|node| node.all_rules(|named| named != rule)) {
                    return None;
                }
                let behind = |node: Self| Self::Sequence(first.iter().cloned().chain([node]).collect());
                let last = last.split_at_end(rule)?;
                Some(Split { before: last.before.map(behind), without: last.without.map(behind) })
            }
            Self::Choice(nodes) => {
                let splits = nodes.iter().map(|node| node.split_at_end(rule)).collect::<Option<Vec<Split>>>()?;
                let (before, without): (Vec<_>, Vec<_>) = splits.into_iter().map(|s| (s.before, s.without)).unzip();
                let choice = |nodes: Vec<Option<Self>>| {
                    let nodes: Vec<Self> = nodes.into_iter().flatten().collect();
                    (!nodes.is_empty()).then_some(Self::Choice(nodes))
                };
                Some(Split { before: choice(before), without: choice(without) })
            }
            Self::Repeat { node, least: 0, most: Some(1) } => {
                let Split { before, without } = node.split_at_end(rule)?;
                let without = without.into_iter().chain([Self::EMPTY]).collect();
                Some(Split { before, without: Some(Self::Choice(without)) })
            }
            Self::Repeat { .. } | Self::Text(_) | Self::Class { .. } => None,
        }
    }
}

struct Split {
    before: Option<Node>,
    without: Option<Node>,
}

/// Rules by number; 0 is the root.
#[derive(Debug)]
struct Rules {
    names: Vec<String>,
    bodies: Vec<Node>,
}

impl Rules {
    /// Refuses rules that no text fulfils, because each alternative leads to themselves.
    fn check_ends(&self) -> Result<(), GbnfError> {
        let mut users: Vec<Vec<usize>> = vec![Vec::new(); self.bodies.len()];
        for (rule, body) in self.bodies.iter().enumerate() {
            body.rules(&mut |named| users[named].push(rule));
        }
        // A rule can end if its body can, where each rule that is known to can.
        let mut can_end = vec![false; self.bodies.len()];
        let mut next: Vec<usize> = (0..self.bodies.len()).collect();
        while let Some(rule) = next.pop() {
            if !can_end[rule] && self.bodies[rule].can_end(&can_end) {
                can_end[rule] = true;
                next.extend(users[rule].iter().filter(|user| !can_end[**user]));
            }
        }
        let Some(mut rule) = can_end.iter().position(|ends| !ends) else { return Ok(()) };
        // One that can't because of another leads to one that can't because of itself.
        let mut seen = vec![false; self.bodies.len()];
        while !std::mem::replace(&mut seen[rule], true) {
            let mut stuck = None;
            self.bodies[rule].rules(&mut |named| stuck = stuck.or((!can_end[named]).then_some(named)));
            rule = stuck.unwrap_or(rule);
        }
        Err(GbnfError::Endless { name: self.names[rule].clone() })
    }

    /// Makes repetitions of rules that lead to themselves at the end of their alternatives alone.
    fn unroll(&mut self) {
        for rule in 0..self.bodies.len() {
            let split = self.bodies[rule].split_at_end(rule);
            if let Some(Split { before: Some(before), without: Some(without) }) = split {
                self.bodies[rule] = Node::Sequence(vec![before.flat().star(), without.flat()]).flat();
            }
        }
    }
}

#[cfg(test)]
mod tests;
