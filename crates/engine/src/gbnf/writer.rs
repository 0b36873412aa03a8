//! From rules to Lark text.
//!
//! Rules that are regular are terminals `R0`, `R1`, …, others rules `r0`, `r1`, …, lexemes of the latter `T0`, `T1`, …. A regular
//! rule that ends in repetitions of few characters is `H` and its number without them, and they alone are `t` and its number.
//! Invariants: each rule is written twice at most, so the text is in proportion; parentheses are where a group must be one, so they
//! nest as deeply as the grammar's do and three levels more.

use std::collections::HashMap;
use std::fmt::Write;

use super::{Node, Rules};

/// Most characters of a class whose repetition at the end of a lexeme is taken off it. A lexeme for each character is exact, but
/// work for each token that is made of such characters alone.
const FEW: u32 = 8;

/// What something regular says of the empty text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Empty {
    /// It does not allow it.
    Refused,
    /// It allows it and others.
    Allowed,
    /// It allows nothing else.
    Alone,
}

/// Writes a grammar.
pub(super) struct Writer<'a> {
    rules: &'a Rules,
    /// By rule: none if it is not regular.
    regular: Vec<Option<Empty>>,
    out: String,
    /// Lexemes by what they are.
    lexemes: HashMap<String, String>,
    /// By rule that ends in repetitions of few characters: what was written of it.
    opened: HashMap<usize, Opened>,
    /// Regular rules, those that a rule names before it.
    order: Vec<usize>,
}

/// A regular rule in two.
#[derive(Debug, Clone)]
struct Opened {
    /// The terminal without its end; none if there is nothing else.
    head: Option<(Written, Empty)>,
    /// The rule that is its end.
    tail: Written,
}

/// How closely a text holds together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Binds {
    Choice,
    Sequence,
    Repeat,
    Atom,
}

/// A text of the result.
#[derive(Debug, Clone)]
struct Written {
    text: String,
    binds: Binds,
}

impl Written {
    const fn atom(text: String) -> Self {
        Self { text, binds: Binds::Atom }
    }

    fn nothing() -> Self {
        Self::atom(quoted(""))
    }

    /// The text, in parentheses where it would fall apart.
    fn within(&self, least: Binds) -> String {
        if self.binds < least { format!("({})", self.text) } else { self.text.clone() }
    }

    fn sequence(parts: impl IntoIterator<Item = Self>) -> Self {
        Self::joined(parts, Binds::Sequence, " ")
    }

    fn choice(parts: impl IntoIterator<Item = Self>) -> Self {
        Self::joined(parts, Binds::Choice, " | ")
    }

    fn joined(parts: impl IntoIterator<Item = Self>, binds: Binds, between: &str) -> Self {
        let mut parts: Vec<Self> = parts.into_iter().collect();
        match parts.len() {
            0 => Self::nothing(),
            1 => parts.remove(0),
            _ => {
                let texts: Vec<String> = parts.iter().map(|part| part.within(binds)).collect();
                Self { text: texts.join(between), binds }
            }
        }
    }

    fn repeated(self, least: u32, most: Option<u32>) -> Self {
        let suffix = match (least, most) {
            (_, Some(0)) => return Self::nothing(),
            (0, None) => "*".to_owned(),
            (1, None) => "+".to_owned(),
            (0, Some(1)) => "?".to_owned(),
            (least, None) => format!("{{{least},}}"),
            (least, Some(most)) => format!("{{{least},{most}}}"),
        };
        Self { text: self.within(Binds::Atom) + &suffix, binds: Binds::Repeat }
    }
}

impl<'a> Writer<'a> {
    pub(super) fn new(rules: &'a Rules) -> Self {
        let mut writer = Self {
            rules,
            regular: vec![None; rules.bodies.len()],
            out: String::new(),
            lexemes: HashMap::new(),
            opened: HashMap::new(),
            order: Vec::new(),
        };
        // A rule is regular if all are that it names; so those that name nothing come first.
        let mut users: Vec<Vec<usize>> = vec![Vec::new(); rules.bodies.len()];
        let mut missing = vec![0usize; rules.bodies.len()];
        for (rule, body) in rules.bodies.iter().enumerate() {
            body.rules(&mut |named| {
                users[named].push(rule);
                missing[rule] += 1;
            });
        }
        let mut next: Vec<usize> = (0..missing.len()).filter(|rule| missing[*rule] == 0).collect();
        while let Some(rule) = next.pop() {
            writer.regular[rule] = Some(writer.empty(&rules.bodies[rule]));
            writer.order.push(rule);
            for user in &users[rule] {
                missing[*user] -= 1;
                if missing[*user] == 0 {
                    next.push(*user);
                }
            }
        }
        writer
    }

    fn is_regular(&self, node: &Node) -> bool {
        node.all_rules(|rule| self.regular[rule].is_some())
    }

    /// What a regular node says of the empty text.
    fn empty(&self, node: &Node) -> Empty {
        let of = |nodes: &[Node]| nodes.iter().map(|node| self.empty(node)).collect::<Vec<Empty>>();
        match node {
            Node::Text(text) if text.is_empty() => Empty::Alone,
            Node::Text(_) | Node::Class { .. } => Empty::Refused,
            Node::Rule(rule) => self.regular[*rule].unwrap_or(Empty::Refused),
            // The least of a sequence's, but for the empty text alone, which is nothing in it.
            Node::Sequence(nodes) => of(nodes).into_iter().min().unwrap_or(Empty::Alone),
            Node::Choice(nodes) => {
                let all = of(nodes);
                match (all.iter().min(), all.iter().max()) {
                    (Some(Empty::Refused), Some(Empty::Refused)) => Empty::Refused,
                    (Some(Empty::Alone), _) => Empty::Alone,
                    _ => Empty::Allowed,
                }
            }
            Node::Repeat { most: Some(0), .. } => Empty::Alone,
            Node::Repeat { node, least, .. } => match self.empty(node) {
                Empty::Refused if *least == 0 => Empty::Allowed,
                empty => empty,
            },
        }
    }

    pub(super) fn write(mut self) -> String {
        let root = match self.regular[0] {
            Some(empty) => self.lexeme(self.in_lexeme(&Node::Rule(0)), empty),
            None => Written::atom("r0".to_owned()),
        };
        self.line("start", &root.text);
        // Where all is one lexeme, nothing is taken off.
        if self.regular[0].is_none() {
            for rule in std::mem::take(&mut self.order) {
                self.open(rule);
            }
        }
        // Those that are reached, each once.
        let mut reached = vec![false; self.rules.bodies.len()];
        let mut next = vec![0];
        while let Some(rule) = next.pop() {
            if std::mem::replace(&mut reached[rule], true) {
                continue;
            }
            let body = &self.rules.bodies[rule];
            body.rules(&mut |named| next.push(named));
            if self.regular[rule].is_some() {
                let text = self.in_lexeme(body);
                self.line(&format!("R{rule}"), &text.text);
            } else {
                let text = self.in_rule(body);
                self.line(&format!("r{rule}"), &text.text);
            }
        }
        self.out
    }

    fn line(&mut self, name: &str, text: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.out, "{name}: {text}");
    }

    fn in_lexeme(&self, node: &Node) -> Written {
        match node {
            Node::Text(text) => Written::atom(quoted(text)),
            Node::Class { negated, ranges } => Written::atom(class(*negated, ranges)),
            Node::Rule(rule) => Written::atom(format!("R{rule}")),
            Node::Sequence(nodes) => Written::sequence(nodes.iter().map(|node| self.in_lexeme(node))),
            Node::Choice(nodes) => Written::choice(nodes.iter().map(|node| self.in_lexeme(node))),
            Node::Repeat { node, least, most } => self.in_lexeme(node).repeated(*least, *most),
        }
    }

    fn in_rule(&mut self, node: &Node) -> Written {
        match node {
            Node::Text(_) | Node::Class { .. } => self.lexemes(std::slice::from_ref(node)),
            node if self.is_regular(node) => self.lexemes(std::slice::from_ref(node)),
            Node::Rule(rule) => Written::atom(format!("r{rule}")),
            Node::Sequence(nodes) => {
                let runs = nodes.chunk_by(|a, b| self.is_regular(a) && self.is_regular(b)).collect::<Vec<_>>();
                let part = |run: &[Node]| match run {
                    [node] => self.in_rule(node),
                    run => self.lexemes(run),
                };
                let parts: Vec<Written> = runs.into_iter().map(part).collect();
                Written::sequence(parts)
            }
            Node::Choice(nodes) => {
                let parts: Vec<Written> = nodes.iter().map(|node| self.in_rule(node)).collect();
                Written::choice(parts)
            }
            Node::Repeat { node, least, most } => self.in_rule(node).repeated(*least, *most),
        }
    }

    /// A lexeme, and those of what can be taken off its end.
    fn lexemes(&mut self, nodes: &[Node]) -> Written {
        let (head, mut parts) = self.parted(nodes);
        if let Some((text, empty)) = head {
            parts.push(self.lexeme(text, empty));
        }
        parts.reverse();
        Written::sequence(parts)
    }

    /// Regular nodes without what can be taken off their end, and that, the last first.
    fn parted(&mut self, nodes: &[Node]) -> (Option<(Written, Empty)>, Vec<Written>) {
        let mut head = match Node::Sequence(nodes.to_vec()).flat() {
            Node::Sequence(nodes) => nodes,
            node => vec![node],
        };
        let (mut inner, mut tail) = (None, Vec::new());
        while let Some(last) = head.pop() {
            match last {
                Node::Repeat { node, least, most } if is_few(&node) => {
                    tail.push(self.lexeme(self.in_lexeme(&node), Empty::Refused).repeated(least, most));
                }
                Node::Rule(rule) if self.opened.contains_key(&rule) => {
                    let opened = self.opened[&rule].clone();
                    tail.push(opened.tail);
                    inner = opened.head;
                    if inner.is_some() {
                        break;
                    }
                }
                last => {
                    head.push(last);
                    break;
                }
            }
        }
        let (mut texts, mut empties): (Vec<Written>, Vec<Empty>) =
            head.iter().map(|node| (self.in_lexeme(node), self.empty(node))).unzip();
        if let Some((text, empty)) = inner {
            texts.push(text);
            empties.push(empty);
        }
        let empty = empties.into_iter().min().unwrap_or(Empty::Alone);
        ((empty != Empty::Alone).then(|| (Written::sequence(texts), empty)), tail)
    }

    /// Writes a regular rule in two, if something can be taken off its end. Those that it names come first.
    fn open(&mut self, rule: usize) {
        let body = &self.rules.bodies[rule];
        let may_part = match body {
            Node::Sequence(_) | Node::Rule(_) => true,
            Node::Repeat { node, .. } => is_few(node),
            _ => false,
        };
        if !may_part {
            return;
        }
        let (head, mut tail) = self.parted(std::slice::from_ref(body));
        if tail.is_empty() {
            return;
        }
        tail.reverse();
        let name = format!("t{rule}");
        self.line(&name, &Written::sequence(tail).text);
        let tail = Written::atom(name);
        let head = head.map(|(text, empty)| {
            let name = format!("H{rule}");
            self.line(&name, &text.text);
            (Written::atom(name), empty)
        });
        self.opened.insert(rule, Opened { head, tail });
    }

    /// A lexeme by name; lexemes are never empty.
    fn lexeme(&mut self, written: Written, empty: Empty) -> Written {
        if empty == Empty::Alone {
            return Written::nothing();
        }
        let nullable = empty == Empty::Allowed;
        let name = match self.lexemes.get(&written.text) {
            Some(name) => name.clone(),
            None => {
                let name = format!("T{}", self.lexemes.len());
                self.lexemes.insert(written.text.clone(), name.clone());
                let text = if nullable { format!("({}) & /(?s:.)+/", written.text) } else { written.text };
                self.line(&name, &text);
                name
            }
        };
        let name = Written::atom(name);
        if nullable { name.repeated(0, Some(1)) } else { name }
    }
}

/// Whether a node is a class of few characters.
fn is_few(node: &Node) -> bool {
    let Node::Class { negated: false, ranges } = node else { return false };
    let count = |(first, last): &(char, char)| u32::from(*last) - u32::from(*first) + 1;
    ranges.iter().map(count).fold(0, u32::saturating_add) <= FEW
}

/// A text as Lark writes it: as JSON, and without a raw delete character.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

fn class(negated: bool, ranges: &[(char, char)]) -> String {
    if ranges.is_empty() {
        return "/(?s:.)/".to_owned();
    }
    let mut text = String::from(if negated { "/[^" } else { "/[" });
    for (first, last) in ranges {
        // Writing to a string does not fail.
        let _ = write!(text, "\\x{{{:X}}}-\\x{{{:X}}}", u32::from(*first), u32::from(*last));
    }
    text + "]/"
}
