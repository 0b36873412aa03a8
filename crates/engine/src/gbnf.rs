//! Grammars in llama.cpp's GBNF, rewritten in the Lark dialect that llguidance compiles.
//!
//! In: the text of a grammar, of whoever asks. Out: Lark text whose length is in proportion, or [`GbnfError`]. GBNF speaks of
//! characters alone, llguidance of lexemes, the longest of which counts. So what is regular becomes a lexeme, as large as
//! possible: a grammar without recursion is one, and exact; `r ::= x r | y` is `x* y`; in what is left, neighbours are one, less
//! white space and the like at their end, whose characters are lexemes of their own.
//! Invariant: every text that the result allows, the grammar allows. The reverse holds but where a lexeme could end early because
//! what follows begins with what it may go on with.

use std::collections::HashMap;
use std::fmt::Write;

/// Deepest nesting of groups.
const MAX_DEPTH: usize = 48;
/// Most repetitions in braces, as in llama.cpp.
const MAX_REPETITIONS: u32 = 2000;
/// Most characters of a class whose repetition at the end of a lexeme is taken off it. A lexeme for each character is exact, but
/// work for each token that is made of such characters alone.
const FEW: u32 = 8;
/// Rules up to this size are looked into for that.
const SMALL: usize = 64;
/// And so many of them, one in the other.
const MOST_LOOKS: usize = 16;

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
    grammar.unroll()?;
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

    /// Whether it is a class of few characters.
    fn is_few(&self) -> bool {
        let Self::Class { negated: false, ranges } = self else { return false };
        let count = |(first, last): &(char, char)| u32::from(*last) - u32::from(*first) + 1;
        ranges.iter().map(count).fold(0, u32::saturating_add) <= FEW
    }

    /// Takes the size off what is left of a budget; whether there was enough.
    fn fits(&self, left: &mut usize) -> bool {
        let own = match self {
            Self::Text(text) => text.len(),
            Self::Class { ranges, .. } => ranges.len(),
            _ => 0,
        };
        let Some(rest) = left.checked_sub(1 + own) else { return false };
        *left = rest;
        match self {
            Self::Text(_) | Self::Class { .. } | Self::Rule(_) => true,
            Self::Sequence(nodes) | Self::Choice(nodes) => nodes.iter().all(|node| node.fits(left)),
            Self::Repeat { node, .. } => node.fits(left),
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
    /// Makes repetitions of rules that lead to themselves at the end of their alternatives alone.
    fn unroll(&mut self) -> Result<(), GbnfError> {
        for rule in 0..self.bodies.len() {
            let Some(split) = self.bodies[rule].split_at_end(rule) else { continue };
            let Some(before) = split.before else { continue };
            let without = split.without.ok_or_else(|| GbnfError::Endless { name: self.names[rule].clone() })?;
            self.bodies[rule] = Node::Sequence(vec![before.flat().star(), without.flat()]).flat();
        }
        Ok(())
    }
}

struct Parser {
    text: Vec<char>,
    at: usize,
    line: usize,
    known: HashMap<String, usize>,
    names: Vec<String>,
    bodies: Vec<Option<Node>>,
}

impl Parser {
    fn new(text: &str) -> Self {
        let mut parser = Self {
            text: text.chars().collect(),
            at: 0,
            line: 1,
            known: HashMap::new(),
            names: Vec::new(),
            bodies: Vec::new(),
        };
        parser.rule("root".to_owned());
        parser
    }

    fn parse(mut self) -> Result<Rules, GbnfError> {
        self.space(true);
        while self.peek().is_some() {
            let line = self.line;
            let name = self.name().ok_or_else(|| self.wrong("a rule, as name ::= …"))?;
            let rule = self.rule(name);
            self.space(false);
            for part in "::=".chars() {
                self.take(part, "::= after the name of a rule")?;
            }
            self.space(true);
            let body = self.choice(0)?;
            if self.bodies[rule].replace(body).is_some() {
                return Err(GbnfError::Twice { name: self.names[rule].clone(), line });
            }
            if !matches!(self.peek(), None | Some('\n' | '\r')) {
                return Err(self.wrong("text in quotes, [characters], a rule, a group, or the end of the line"));
            }
            self.space(true);
        }
        let names = self.names;
        let defined = |(rule, body): (usize, Option<Node>)| {
            body.ok_or_else(|| GbnfError::Undefined { name: names[rule].clone() })
        };
        let bodies = self.bodies.into_iter().enumerate().map(defined).collect::<Result<_, _>>()?;
        Ok(Rules { names, bodies })
    }

    fn rule(&mut self, name: String) -> usize {
        if let Some(rule) = self.known.get(&name) {
            return *rule;
        }
        let rule = self.names.len();
        self.known.insert(name.clone(), rule);
        self.names.push(name);
        self.bodies.push(None);
        rule
    }

    fn peek(&self) -> Option<char> {
        self.text.get(self.at).copied()
    }

    fn next(&mut self) -> Option<char> {
        let found = self.peek()?;
        self.at += 1;
        self.line += usize::from(found == '\n');
        Some(found)
    }

    fn take(&mut self, wanted: char, expected: &'static str) -> Result<(), GbnfError> {
        if self.peek() != Some(wanted) {
            return Err(self.wrong(expected));
        }
        self.next();
        Ok(())
    }

    fn wrong(&self, expected: &'static str) -> GbnfError {
        let found = match self.peek() {
            None => "the end".to_owned(),
            Some('\n' | '\r') => "the end of the line".to_owned(),
            Some(found) => format!("{found:?}"),
        };
        GbnfError::Syntax { line: self.line, expected, found }
    }

    /// Skips blanks and comments, and ends of lines if they are nothing else here.
    fn space(&mut self, lines: bool) {
        while let Some(found) = self.peek() {
            match found {
                ' ' | '\t' => {}
                '\n' | '\r' if lines => {}
                '#' => {
                    while self.peek().is_some_and(|c| c != '\n' && c != '\r') {
                        self.at += 1;
                    }
                    continue;
                }
                _ => return,
            }
            self.next();
        }
    }

    fn name(&mut self) -> Option<String> {
        let start = self.at;
        while self.peek().is_some_and(is_word) {
            self.at += 1;
        }
        (self.at > start).then(|| self.text[start..self.at].iter().collect())
    }

    fn choice(&mut self, depth: usize) -> Result<Node, GbnfError> {
        let mut nodes = vec![self.sequence(depth)?];
        loop {
            // Outside of groups an alternative may begin the next line too.
            let (at, line) = (self.at, self.line);
            self.space(true);
            if self.peek() != Some('|') {
                (self.at, self.line) = (at, line);
                break;
            }
            self.next();
            self.space(true);
            nodes.push(self.sequence(depth)?);
        }
        Ok(if nodes.len() == 1 { nodes.remove(0) } else { Node::Choice(nodes) })
    }

    fn sequence(&mut self, depth: usize) -> Result<Node, GbnfError> {
        let mut nodes: Vec<Node> = Vec::new();
        while let Some(found) = self.peek() {
            let node = match found {
                '"' => self.literal()?,
                '[' => self.class()?,
                '.' => {
                    self.next();
                    Node::Class { negated: true, ranges: Vec::new() }
                }
                '(' if depth == MAX_DEPTH => return Err(self.wrong("groups that are nested less deeply")),
                '(' => {
                    self.next();
                    self.space(true);
                    let group = self.choice(depth + 1)?;
                    self.space(true);
                    self.take(')', "a closing parenthesis")?;
                    group
                }
                '*' | '+' | '?' | '{' => {
                    let (least, most) = self.repetition()?;
                    let node = nodes.pop().ok_or_else(|| self.wrong("something to repeat before it"))?;
                    Node::Repeat { node: Box::new(node), least, most }
                }
                '<' | '!' => return Err(self.wrong("the text of a token instead of its name or number")),
                found if is_word(found) => {
                    let name = self.name().unwrap_or_default();
                    Node::Rule(self.rule(name))
                }
                _ => break,
            };
            nodes.push(node);
            self.space(depth > 0);
        }
        Ok(if nodes.len() == 1 { nodes.remove(0) } else { Node::Sequence(nodes) })
    }

    fn repetition(&mut self) -> Result<(u32, Option<u32>), GbnfError> {
        match self.next() {
            Some('*') => return Ok((0, None)),
            Some('+') => return Ok((1, None)),
            Some('?') => return Ok((0, Some(1))),
            _ => {}
        }
        self.space(true);
        let least = self.number()?;
        self.space(true);
        let most = if self.peek() == Some(',') {
            self.next();
            self.space(true);
            let most = if self.peek() == Some('}') { None } else { Some(self.number()?) };
            self.space(true);
            most
        } else {
            Some(least)
        };
        if most.is_some_and(|most| most < least) {
            return Err(self.wrong("at least as many repetitions at most as at least"));
        }
        self.take('}', "a closing brace")?;
        Ok((least, most))
    }

    fn number(&mut self) -> Result<u32, GbnfError> {
        let start = self.at;
        while self.peek().is_some_and(|c| c.is_ascii_digit()) {
            self.at += 1;
        }
        let digits: String = self.text[start..self.at].iter().collect();
        let number = digits.parse().ok().filter(|number| *number <= MAX_REPETITIONS);
        number.ok_or_else(|| self.wrong("a number of repetitions up to 2000"))
    }

    fn literal(&mut self) -> Result<Node, GbnfError> {
        self.next();
        let mut text = String::new();
        while self.peek() != Some('"') {
            text.push(self.character()?);
        }
        self.next();
        Ok(Node::Text(text))
    }

    fn class(&mut self) -> Result<Node, GbnfError> {
        self.next();
        let negated = self.peek() == Some('^');
        if negated {
            self.next();
        }
        let mut ranges = Vec::new();
        while self.peek() != Some(']') {
            let first = self.character()?;
            let is_range = self.peek() == Some('-') && self.text.get(self.at + 1) != Some(&']');
            let last = if is_range {
                self.next();
                self.character()?
            } else {
                first
            };
            if last < first {
                return Err(self.wrong("a range of characters from the lower to the higher"));
            }
            ranges.push((first, last));
        }
        if ranges.is_empty() && !negated {
            return Err(self.wrong("at least one character"));
        }
        self.next();
        Ok(Node::Class { negated, ranges })
    }

    /// A character as it is, or an escape.
    fn character(&mut self) -> Result<char, GbnfError> {
        let digits = match self.next() {
            None => return Err(self.wrong("a closing quote or bracket")),
            Some('\\') => match self.next() {
                Some('n') => return Ok('\n'),
                Some('r') => return Ok('\r'),
                Some('t') => return Ok('\t'),
                Some('x') => 2,
                Some('u') => 4,
                Some('U') => 8,
                Some(found) if found.is_ascii_punctuation() => return Ok(found),
                _ => {
                    self.at -= 1;
                    return Err(self.wrong("an escape: \\n, \\r, \\t, \\x, \\u, \\U or one of a punctuation mark"));
                }
            },
            Some(found) => return Ok(found),
        };
        let code = self.text.get(self.at..self.at + digits).map(|digits| digits.iter().collect::<String>());
        let code = code.filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let character = code.and_then(|digits| char::from_u32(u32::from_str_radix(&digits, 16).ok()?));
        let character = character.ok_or_else(|| self.wrong("the hexadecimal digits of a character"))?;
        self.at += digits;
        Ok(character)
    }
}

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

/// Writes rules that are regular as terminals `R0`, `R1`, …, others as `r0`, `r1`, …, and lexemes of the latter as `T0`, `T1`, ….
struct Writer<'a> {
    rules: &'a Rules,
    /// By rule: none if it is not regular.
    regular: Vec<Option<Empty>>,
    out: String,
    /// Lexemes by what they are.
    lexemes: HashMap<String, String>,
}

impl<'a> Writer<'a> {
    fn new(rules: &'a Rules) -> Self {
        let mut writer =
            Self { rules, regular: vec![None; rules.bodies.len()], out: String::new(), lexemes: HashMap::new() };
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

    fn write(mut self) -> String {
        let root = if self.regular[0].is_some() { self.lexeme(&Node::Rule(0)) } else { "r0".to_owned() };
        self.line("start", &root);
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
                self.line(&format!("R{rule}"), &text);
            } else {
                let text = self.in_rule(body);
                self.line(&format!("r{rule}"), &text);
            }
        }
        self.out
    }

    fn line(&mut self, name: &str, text: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.out, "{name}: {text}");
    }

    fn in_lexeme(&self, node: &Node) -> String {
        match node {
            Node::Text(text) => quoted(text),
            Node::Class { negated, ranges } => class(*negated, ranges),
            Node::Rule(rule) => format!("R{rule}"),
            Node::Sequence(nodes) if nodes.is_empty() => quoted(""),
            Node::Sequence(nodes) => joined(nodes.iter().map(|node| self.in_lexeme(node)), " "),
            Node::Choice(nodes) => joined(nodes.iter().map(|node| self.in_lexeme(node)), " | "),
            Node::Repeat { node, least, most } => repeated(&self.in_lexeme(node), *least, *most),
        }
    }

    fn in_rule(&mut self, node: &Node) -> String {
        if self.is_regular(node) {
            return self.lexemes(node);
        }
        match node {
            Node::Rule(rule) => format!("r{rule}"),
            Node::Sequence(nodes) => {
                let runs = nodes.chunk_by(|a, b| self.is_regular(a) && self.is_regular(b));
                let runs: Vec<Node> = runs.map(|run| Node::Sequence(run.to_vec())).collect();
                let text = |run: &Node| match run {
                    Node::Sequence(nodes) if nodes.len() == 1 => self.in_rule(&nodes[0]),
                    run => self.in_rule(run),
                };
                joined(runs.iter().map(text), " ")
            }
            Node::Choice(nodes) => joined(nodes.iter().map(|node| self.in_rule(node)), " | "),
            Node::Repeat { node, least, most } => repeated(&self.in_rule(node), *least, *most),
            Node::Text(_) | Node::Class { .. } => self.lexeme(node),
        }
    }

    /// Whether a rule is small and may end in a repetition of few characters.
    fn ends_in_few(&self, rule: usize) -> bool {
        let (body, mut left) = (&self.rules.bodies[rule], SMALL);
        let is_open = match body {
            Node::Sequence(_) => true,
            Node::Repeat { node, .. } => node.is_few(),
            _ => false,
        };
        is_open && body.fits(&mut left)
    }

    /// A lexeme, and those of what can be taken off its end.
    fn lexemes(&mut self, node: &Node) -> String {
        let mut head = vec![node.clone()];
        let (mut tail, mut looks) = (Vec::new(), 0);
        while let Some(last) = head.pop() {
            match last {
                Node::Sequence(nodes) => head.extend(nodes),
                Node::Rule(rule) if looks < MOST_LOOKS && self.ends_in_few(rule) => {
                    looks += 1;
                    head.push(self.rules.bodies[rule].clone());
                }
                Node::Repeat { node, least, most } if node.is_few() => {
                    tail.push(repeated(&self.lexeme(&node), least, most));
                }
                last => {
                    head.push(last);
                    break;
                }
            }
        }
        if head.is_empty() && tail.is_empty() {
            return quoted("");
        }
        if !head.is_empty() {
            tail.push(self.lexeme(&Node::Sequence(head).flat()));
        }
        joined(tail.into_iter().rev(), " ")
    }

    /// A lexeme by name; lexemes are never empty.
    fn lexeme(&mut self, node: &Node) -> String {
        let empty = self.empty(node);
        if empty == Empty::Alone {
            return quoted("");
        }
        let text = self.in_lexeme(node);
        let nullable = empty == Empty::Allowed;
        let name = match self.lexemes.get(&text) {
            Some(name) => name.clone(),
            None => {
                let name = format!("T{}", self.lexemes.len());
                self.lexemes.insert(text.clone(), name.clone());
                let text = if nullable { format!("({text}) & /(?s:.)+/") } else { text };
                self.line(&name, &text);
                name
            }
        };
        if nullable { format!("{name}?") } else { name }
    }
}

fn joined(parts: impl Iterator<Item = String>, between: &str) -> String {
    format!("({})", parts.collect::<Vec<_>>().join(between))
}

fn repeated(text: &str, least: u32, most: Option<u32>) -> String {
    match (least, most) {
        (_, Some(0)) => quoted(""),
        (0, None) => format!("({text})*"),
        (1, None) => format!("({text})+"),
        (0, Some(1)) => format!("({text})?"),
        (least, None) => format!("({text}){{{least},}}"),
        (least, Some(most)) => format!("({text}){{{least},{most}}}"),
    }
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

#[cfg(test)]
mod tests;
