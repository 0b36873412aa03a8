//! From the text of a grammar to its rules.
//!
//! In: text of whoever asks. Out: [`Rules`], each rule defined once, nested no deeper than [`MAX_DEPTH`]; or the line that is wrong.

use std::collections::HashMap;

use super::{GbnfError, Node, Rules, is_word};

/// Deepest nesting of groups and of repetitions of repetitions: llguidance takes 28 levels, and rewriting adds three at most.
const MAX_DEPTH: usize = 24;
/// Most repetitions in braces, as in llama.cpp.
const MAX_REPETITIONS: u32 = 2000;

pub(super) struct Parser {
    text: Vec<char>,
    at: usize,
    line: usize,
    known: HashMap<String, usize>,
    names: Vec<String>,
    bodies: Vec<Option<Node>>,
}

impl Parser {
    pub(super) fn new(text: &str) -> Self {
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

    pub(super) fn parse(mut self) -> Result<Rules, GbnfError> {
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
            let (body, _) = self.choice(0)?;
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

    /// Alternatives, and how deeply they are nested in themselves.
    fn choice(&mut self, depth: usize) -> Result<(Node, usize), GbnfError> {
        let (first, mut height) = self.sequence(depth)?;
        let mut nodes = vec![first];
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
            let (node, inner) = self.sequence(depth)?;
            nodes.push(node);
            height = height.max(inner);
        }
        Ok((if nodes.len() == 1 { nodes.remove(0) } else { Node::Choice(nodes) }, height))
    }

    fn sequence(&mut self, depth: usize) -> Result<(Node, usize), GbnfError> {
        let mut nodes: Vec<Node> = Vec::new();
        let (mut highest, mut height, mut is_repeated) = (0, 0, false);
        while let Some(found) = self.peek() {
            let is_suffix = matches!(found, '*' | '+' | '?' | '{');
            height = match (is_suffix, is_repeated) {
                (false, _) => 0,
                (true, false) => height,
                (true, true) => height + 1,
            };
            if depth + height + usize::from(found == '(') > MAX_DEPTH {
                return Err(self.wrong("groups and repetitions of repetitions that are nested less deeply, 24 at most"));
            }
            is_repeated = is_suffix;
            let node = match found {
                '"' => self.literal()?,
                '[' => self.class()?,
                '.' => {
                    self.next();
                    Node::Class { negated: true, ranges: Vec::new() }
                }
                '(' => {
                    self.next();
                    self.space(true);
                    let (group, inner) = self.choice(depth + 1)?;
                    height = inner + 1;
                    self.space(true);
                    self.take(')', "a closing parenthesis")?;
                    group
                }
                _ if is_suffix => {
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
            highest = highest.max(height);
            nodes.push(node);
            self.space(depth > 0);
        }
        Ok((if nodes.len() == 1 { nodes.remove(0) } else { Node::Sequence(nodes) }, highest))
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
            Some('\\') => {
                let plain = match self.peek() {
                    Some('n') => Ok('\n'),
                    Some('r') => Ok('\r'),
                    Some('t') => Ok('\t'),
                    Some('x') => Err(2),
                    Some('u') => Err(4),
                    Some('U') => Err(8),
                    Some(found) if found.is_ascii_punctuation() => Ok(found),
                    _ => return Err(self.wrong("an escape: \\n, \\r, \\t, \\x, \\u, \\U or one of a punctuation mark")),
                };
                self.next();
                match plain {
                    Ok(character) => return Ok(character),
                    Err(digits) => digits,
                }
            }
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
