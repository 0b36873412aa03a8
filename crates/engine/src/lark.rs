//! What llguidance makes of a Lark text before it counts: how deeply it descends into it, and how much it writes out.
//!
//! In: the text of whoever asks. Out: numbers that are never too small for a text that llguidance takes. Its compiler follows each rule
//! into those that it names, and within a rule each group into those that it holds, so they come to one level for each rule and one for
//! each bracket within another, all rules together. And it writes each terminal out with all that the terminals have that it names, so
//! twenty of them, each twice the next, come to a million parts. The text is read as llguidance's lexer reads it.

use std::collections::HashMap;

/// Most levels of a text.
pub(crate) const MAX_LEVELS: usize = 4096;
/// Most parts of a text whose terminals are written out: each costs about a microsecond and 100 bytes.
pub(crate) const MAX_PARTS: u64 = 1 << 17;

/// Parts of a terminal that is defined elsewhere: of those that llguidance brings along.
const IMPORTED_PARTS: u64 = 64;

/// What a text consists of, as far as it matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lexeme<'a> {
    Name(&'a str),
    /// Something regular, and an upper bound of its parts.
    Leaf(u64),
    /// A word that begins with a percent sign, with what belongs to it.
    Directive(&'a str),
    Colon,
    DoubleColon,
    Open,
    Close,
    Newline,
    Other,
}

/// The lexemes of a text.
fn lexemes(text: &str) -> impl Iterator<Item = Lexeme<'_>> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let first = rest.chars().next()?;
        let (lexeme, length) = match first {
            '#' => (Lexeme::Other, comment(rest)),
            '/' if rest.starts_with("//") => (Lexeme::Other, comment(rest)),
            '"' | '/' => {
                let length = quoted(rest);
                (Lexeme::Leaf(parts(&rest[..length])), length)
            }
            '<' => (Lexeme::Other, special_token(rest)),
            '%' => {
                let length = directive(rest);
                (Lexeme::Directive(&rest[..length]), length)
            }
            ':' if rest.starts_with("::") => (Lexeme::DoubleColon, 2),
            ':' => (Lexeme::Colon, 1),
            '(' | '[' | '{' => (Lexeme::Open, 1),
            ')' | ']' | '}' => (Lexeme::Close, 1),
            '\n' => (Lexeme::Newline, 1),
            other => match name(rest) {
                0 => (Lexeme::Other, other.len_utf8()),
                length => (Lexeme::Name(&rest[..length]), length),
            },
        };
        rest = &rest[length..];
        Some(lexeme)
    })
}

/// An upper bound of the levels of a text.
pub(crate) fn levels(text: &str) -> usize {
    let (mut levels, mut depth, mut deepest) = (0, 0usize, 0);
    for lexeme in lexemes(text) {
        match lexeme {
            Lexeme::Colon | Lexeme::DoubleColon => {
                levels += 1 + deepest;
                deepest = depth;
            }
            Lexeme::Open => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            Lexeme::Close => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    levels + deepest
}

/// The JSON schemas within a text.
pub(crate) fn schemas(text: &str) -> impl Iterator<Item = serde_json::Value> + '_ {
    lexemes(text).filter_map(|lexeme| match lexeme {
        Lexeme::Directive(text) => serde_json::from_str(text.strip_prefix("%json")?).ok(),
        _ => None,
    })
}

/// A definition.
#[derive(Debug, Default)]
struct Definition<'a> {
    /// Its parts; with those of the terminals that it names once it is counted.
    parts: u64,
    /// What it names.
    named: Vec<&'a str>,
    /// Set before the counting, which ends circles: llguidance refuses them.
    is_counted: bool,
}

/// An upper bound of the parts of a text whose terminals are written out, all definitions together. Needs a stack for as many levels as
/// the text has.
pub(crate) fn parts_written_out(text: &str) -> u64 {
    let mut definitions: Vec<Definition<'_>> = vec![Definition::default()];
    let mut known: HashMap<&str, Vec<usize>> = HashMap::new();
    // Names of the line so far: those before a colon are defined, whatever signs stand between.
    let mut line: Vec<&str> = Vec::new();
    for lexeme in lexemes(text).chain([Lexeme::Newline]) {
        let current = definitions.len() - 1;
        match lexeme {
            Lexeme::Name(name) => line.push(name),
            Lexeme::Leaf(parts) => definitions[current].parts += parts,
            Lexeme::Directive(text) => definitions[current].parts += text.len() as u64,
            Lexeme::Newline => definitions[current].named.append(&mut line),
            Lexeme::Colon => {
                definitions.push(Definition::default());
                line.drain(..).for_each(|name| known.entry(name).or_default().push(current + 1));
            }
            Lexeme::DoubleColon | Lexeme::Open | Lexeme::Close | Lexeme::Other => {}
        }
    }
    (0..definitions.len()).fold(0, |sum: u64, index| sum.saturating_add(count(index, &mut definitions, &known)))
}

fn count(index: usize, definitions: &mut [Definition<'_>], known: &HashMap<&str, Vec<usize>>) -> u64 {
    if definitions[index].is_counted {
        return definitions[index].parts;
    }
    definitions[index].is_counted = true;
    let mut parts = definitions[index].parts;
    for name in std::mem::take(&mut definitions[index].named) {
        let is_terminal = name.contains(|c: char| c.is_ascii_uppercase());
        let named = match known.get(name).filter(|_| is_terminal) {
            Some(of_name) => {
                of_name.iter().fold(0, |sum: u64, named| sum.saturating_add(count(*named, definitions, known)))
            }
            None if is_terminal => IMPORTED_PARTS,
            // Rules are not written out.
            None => 1,
        };
        parts = parts.saturating_add(named);
    }
    definitions[index].parts = parts;
    parts
}

/// An upper bound of the parts of a text in quotes or of an expression: a class is one.
fn parts(text: &str) -> u64 {
    let (mut parts, mut in_class, mut is_escaped) = (0, false, false);
    for c in text.chars() {
        parts += u64::from(!in_class) * c.len_utf8() as u64;
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            '[' if text.starts_with('/') => in_class = true,
            ']' => in_class = false,
            _ => {}
        }
    }
    parts
}

fn comment(text: &str) -> usize {
    text.find('\n').unwrap_or(text.len())
}

/// A text or an expression up to the same sign without a backslash before it.
fn quoted(text: &str) -> usize {
    let mut characters = text.char_indices();
    let end = characters.next().map(|(_, sign)| sign);
    while let Some((at, found)) = characters.next() {
        if found == '\\' {
            characters.next();
        } else if Some(found) == end {
            return at + found.len_utf8();
        }
    }
    text.len()
}

/// Length of the name that a text begins with: of a rule in small letters, of a terminal in capital ones, which may follow each other
/// without anything between.
fn name(text: &str) -> usize {
    let word = text.strip_prefix('_').unwrap_or(text);
    let is_terminal = match word.chars().next() {
        Some('A'..='Z') => true,
        Some('a'..='z') => false,
        _ => return 0,
    };
    let is_letter = |c: char| if is_terminal { c.is_ascii_uppercase() } else { c.is_ascii_lowercase() };
    let is_part = |c: char| is_letter(c) || c.is_ascii_digit() || c == '_' || c == '-';
    text.len() - word.len() + word.find(|c| !is_part(c)).unwrap_or(word.len())
}

fn special_token(text: &str) -> usize {
    match text[1..].find(|c: char| matches!(c, '<' | '>') || c.is_ascii_whitespace()) {
        Some(at) if text[1 + at..].starts_with('>') => at + 2,
        _ => 1,
    }
}

/// A word that begins with a percent sign, with the JSON that follows some of them.
fn directive(text: &str) -> usize {
    let Some(word) = ["%json", "%llguidance", "%regex"].into_iter().find(|word| text.starts_with(word)) else {
        return 1;
    };
    let mut values = serde_json::Deserializer::from_str(&text[word.len()..]).into_iter::<serde_json::Value>();
    match values.next() {
        Some(Ok(_)) => word.len() + values.byte_offset(),
        // llguidance refuses it.
        _ => word.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_and_brackets_are_levels_and_what_is_quoted_is_none() {
        for (text, expected) in [
            ("", 0),
            ("start: a\na: \"b\"\n", 2),
            ("start: (a (b)) (c)\na: [b]", 5),
            ("start: \"a: ((\\\"((\" /((:\\/((:/ # ((: \"\n// ((: \"\nA: \"x\"", 2),
            ("start: <a:\"> %json {\"a\": [[[\":\"]]]} a\na: (\"b\")", 3),
            ("start: a{a{a{b}}}", 4),
            ("start: %lark { a: (b) \n b: c }\na: b", 8),
        ] {
            assert_eq!(levels(text), expected, "{text}");
        }
        assert_eq!(levels(&"a{".repeat(30_000)), 30_000);
    }

    #[test]
    fn schemas_are_found_where_they_are_read() {
        let text = "start: %json {\"a\": [1]} b # %json 1\nb: \"%json 2\" | %json true | %regex {\"x\": 1} | %json {";
        let found: Vec<serde_json::Value> = schemas(text).collect();
        assert_eq!(found, [serde_json::json!({"a": [1]}), serde_json::json!(true)]);
    }

    #[test]
    fn terminals_count_wherever_they_are_named() {
        for (text, expected) in [
            ("", 0),
            // A text in quotes counts with them.
            ("start: A A\nA: \"a\"\n", 6 + 3),
            ("start: AA a-Ab\nA: \"a\"\nAA: A\nb: A", 8 + 3 + 3 + 3),
            ("start: a a\na: \"a\"\n", 2 + 3),
            ("start: A\nA.2[capture]: B\n  | /[^a\\]]b/ B\nB: _C\n_C: \"c\"", 10 + 10 + 3 + 3),
            ("%import common.INT\nstart: INT INT", 3 + 64 + 2 * 64),
            // A circle ends.
            ("start: A\nA: A B\nB: A \"b\"", 3 + 3 + 3),
        ] {
            assert_eq!(parts_written_out(text), expected, "{text}");
        }
        let doubling = |levels: usize| {
            let rules = (0..levels).map(|i| format!("R{i}: R{} R{}\n", i + 1, i + 1));
            format!("start: R0\n{}R{levels}: /[ab]/", rules.collect::<String>())
        };
        assert!(parts_written_out(&doubling(10)) < 20_000);
        assert!(parts_written_out(&doubling(20)) > MAX_PARTS);
        assert_eq!(parts_written_out(&doubling(4000)), u64::MAX);
    }
}
