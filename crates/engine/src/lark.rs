//! How deeply llguidance descends into a Lark text, which it does not bound itself.
//!
//! In: the text of whoever asks. Out: a number of levels that is never too small for a text that llguidance takes. Its compiler
//! follows each rule into those that it names, and within a rule each group into those that it holds, so they come to one level for
//! each rule and one for each bracket within another, all rules together. The text is read as llguidance's lexer reads it.

/// Most levels of a text.
pub(crate) const MAX_LEVELS: usize = 4096;

/// An upper bound of the levels of a text.
pub(crate) fn levels(text: &str) -> usize {
    let (mut levels, mut depth, mut deepest) = (0, 0usize, 0);
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '#' => comment(rest),
            '/' if rest.starts_with("//") => comment(rest),
            '"' | '/' => quoted(rest),
            '<' => special_token(rest),
            '%' => directive(rest),
            ':' => {
                levels += 1 + deepest;
                deepest = depth;
                if rest.starts_with("::") { 2 } else { 1 }
            }
            '(' | '[' | '{' => {
                depth += 1;
                deepest = deepest.max(depth);
                1
            }
            ')' | ']' | '}' => {
                depth = depth.saturating_sub(1);
                1
            }
            other => other.len_utf8(),
        };
        rest = &rest[length..];
    }
    levels + deepest
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
}
