//! What a rewritten grammar allows, by llguidance, beside what the grammar says.

use std::collections::BTreeSet;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities};
use llguidance::{Matcher, ParserFactory};
use proptest::prelude::*;

use super::*;

/// Whether the rewritten grammar allows a text, byte by byte.
fn allows(factory: &ParserFactory, lark: &str, text: &str) -> bool {
    let parser = factory.create_parser(TopLevelGrammar::from_lark(lark.to_owned()));
    let mut matcher = Matcher::new(Ok(parser.unwrap_or_else(|error| panic!("{error}: {lark}"))));
    let taken = text.bytes().all(|byte| matcher.consume_token(u32::from(byte)).is_ok());
    taken && matcher.is_accepting().unwrap()
}

fn factory() -> ParserFactory {
    let environment = ApproximateTokEnv::single_byte_env();
    let mut factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &[]).unwrap();
    factory.quiet();
    factory
}

fn check(gbnf: &str, allowed: &[&str], refused: &[&str]) {
    let (factory, lark) = (factory(), gbnf_to_lark(gbnf).unwrap());
    for text in allowed {
        assert!(allows(&factory, &lark, text), "{text:?} is refused by {gbnf}\n{lark}");
    }
    for text in refused {
        assert!(!allows(&factory, &lark, text), "{text:?} is allowed by {gbnf}\n{lark}");
    }
}

/// llama.cpp's grammar of JSON.
const JSON: &str = r#"
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"#;

#[test]
fn grammars_of_llama_cpp() {
    check(
        JSON,
        &["{}", "{ }", "{\"a\": [1, -2.5e+3, \"\\u00e9\\n\", {\"b\":null}], \"c\":true}", "{\"中\":[]}"],
        &["", "[]", "{\"a\"}", "{\"a\":01}", "{\"a\":\"\u{1}\"}", "{\"a\":\"\\x\"}", "{\"a\":1,}"],
    );
    let older = JSON.replace("ws ::= | \" \" | \"\\n\" [ \\t]{0,20}", "ws ::= ([ \\t\\n] ws)?");
    assert_ne!(older, JSON);
    check(&older, &["{ \n\t \"a\" : 1 \n }"], &["{ ", "{\"a\" 1}"]);
    let arithmetic = "root ::= (expr \"=\" ws term \"\\n\")+\nexpr ::= term ([-+*/] term)*\n\
                      term ::= ident | num | \"(\" ws expr \")\" ws\nident ::= [a-z] [a-z0-9_]* ws\nnum ::= [0-9]+ ws\nws ::= [ \\t\\n]*\n";
    check(arithmetic, &["x1 +(2*y) = 3\n", "a=b\n1-2=c\n"], &["x+=3\n", "(x=3\n", "x=3", "x + y=3\n"]);
    let list = "root ::= item+\nitem ::= \"- \" [^\\r\\n\\x0b\\x0c\\x85\\u2028\\u2029]+ \"\\n\"\n";
    check(list, &["- a\n", "- a\n- 中 b\n"], &["", "- \n", "a\n", "- a\u{85}\n"]);
}

#[test]
fn what_is_regular_is_exact() {
    // A lexeme by itself would have taken the end of the text that follows.
    check("root ::= word \"end\"\nword ::= [a-z]+", &["fooend", "endend"], &["end", "foo"]);
    check("root ::= \"a\" root | \"b\"", &["b", "aaab"], &["", "a", "ba"]);
    check("root ::= (\"x\" | \"y\" root)?", &["", "x", "yx", "yyy"], &["xy"]);
    check("root ::= \"\"", &[""], &["a"]);
    check(
        "root ::= \"a\"{2} \"b\"{0} \"c\"{1,2} \"d\"{3,}",
        &["aacddd", "aaccdddd"],
        &["aabcddd", "aacdd", "aacccddd"],
    );
    check(
        "root ::= . \"\\x41\\u00e9\\U0001F600\"\n| \"\\\"\\\\\\[\\]/\\x7f\"",
        &["\nAé😀", "\"\\[]/\u{7f}"],
        &["Aé😀"],
    );
    check("root ::= [^a-c\\]-]+ | [a-]", &["d[e", "-", "a"], &["a-", "]", "b"]);
    check("root ::= even\neven ::= \"\" | \"a\" odd\nodd ::= \"a\" even", &["", "aa", "aaaa"], &["a", "aaa"]);
}

#[test]
fn what_is_no_grammar_is_refused_by_line() {
    let deep = format!("root ::= {}\"a\"{}", "(".repeat(1000), ")".repeat(1000));
    let stars = "root ::= \"a\"".to_owned() + &"*".repeat(60_000);
    for (gbnf, told) in [
        ("", "root is used and not defined"),
        ("other ::= \"a\"", "root is used and not defined"),
        ("root ::= a\n# b\nb ::= \"b\"", "the rule a is used"),
        ("root ::= \"a\"\nroot ::= \"b\"", "line 2: the rule root is defined already"),
        ("root ::= \"a", "line 1: expected a closing quote"),
        ("root ::= [a", "expected a closing quote or bracket, found the end"),
        ("root ::= []", "at least one character"),
        ("root ::= [b-a]", "from the lower to the higher"),
        ("root ::= \"\\q\"", "an escape"),
        ("root ::= \"\\ud800\"", "hexadecimal digits"),
        ("root ::= \"\\x4", "hexadecimal digits"),
        ("root ::= (\"a\"\n\n", "line 3: expected a closing parenthesis"),
        ("root ::= *", "something to repeat"),
        ("root ::= \"a\"{3,2}", "as many repetitions"),
        ("root ::= \"a\"{2001}", "up to 2000"),
        ("root ::= \"a\"{99999999999999999999}", "up to 2000"),
        ("root ::= <think>", "the text of a token"),
        ("root ::= \"a\" ) \"b\"", "or the end of the line, found ')'"),
        ("root = \"a\"", "::= after the name"),
        ("root ::= \"a\" root", "the rule root leads to itself"),
        ("root ::= \"(\" root \")\"", "the rule root leads to itself"),
        ("root ::= \"a\" | other\nother ::= \"x\" other \"y\"", "the rule other leads to itself"),
        ("root ::= a\na ::= \"x\" (b | c) \"x\"\nb ::= [x] c+\nc ::= b \"y\"", "the rule b leads to itself"),
        ("root ::= \"\\\n\"", "line 1: expected an escape"),
        (deep.as_str(), "nested less deeply"),
        (stars.as_str(), "nested less deeply"),
        ("root ::= ((((((((((((\"a\"****)*)*)*)*)*)*)*)*)*)*)*)**************", "nested less deeply"),
    ] {
        let error = gbnf_to_lark(gbnf).unwrap_err().to_string();
        assert!(error.contains(told), "{gbnf:?}: {error}");
    }
    assert!(is_gbnf("\n # x\n root::=a") && !is_gbnf("start: \"::=\"") && !is_gbnf("") && !is_gbnf("::= a"));
}

/// llguidance takes what is nested as deeply as is told, whatever the groups hold.
#[test]
fn the_deepest_nesting_is_taken() {
    let nested = |open: &str, inner: &str, close: &str| {
        format!(
            "{}{inner}{}",
            open.repeat(24 / open.matches('(').count()),
            close.repeat(24 / open.matches('(').count())
        )
    };
    for (body, rest) in [
        (nested("(", "\"a\"{1,2}", ")"), ""),
        (nested("(\"b\" | ", "\"a\"{2}", ")?"), ""),
        (nested("(\"b\" ", "\"a\"*", " | \"c\")*"), ""),
        (nested("(", "[ab]{2}", "){1,2}"), ""),
        (nested("(", "\"a\" | \"c\" root", " \"b\")"), ""),
        (nested("(\"c\" root | ", "\"a\"{2} \"c\" root", "){1,2}"), " | \"b\""),
        (nested("((other \"c\" | ", "other", ") other)*"), " | \"x\"\nother ::= \"x\" other \"y\" | [ \\n]*"),
        (format!("\"a\"{}", "*+?{1,2}".repeat(6) + "*"), ""),
    ] {
        let gbnf = format!("root ::= {body}{rest}");
        let lark = gbnf_to_lark(&gbnf).unwrap_or_else(|error| panic!("{gbnf}: {error}"));
        let made = factory().create_parser(TopLevelGrammar::from_lark(lark.clone()));
        // Some of these are too much work; none of them may be nested too deeply.
        if let Err(error) = made {
            assert!(!error.to_string().contains("nested"), "{error}: {gbnf}\n{lark}");
        }
        let deeper = format!("root ::= (\"a\" {body})*{rest}");
        assert!(gbnf_to_lark(&deeper).unwrap_err().to_string().contains("nested less deeply"), "{deeper}");
    }
}

/// Rules that end in each other are each written once, however often they are named.
#[test]
fn rules_at_the_ends_of_rules_are_no_copies() {
    let mut gbnf = "root ::= \"(\" root \")\" | x1\n".to_owned();
    for rule in 1..16 {
        gbnf += &format!("x{rule} ::= {}\n", format!("x{} ", rule + 1).repeat(60));
    }
    gbnf += "x16 ::= [a-z]+ [ ]*\n";
    gbnf += &(0..1000).fold("more ::=".to_owned(), |more, i| more + &format!(" \"{i}\" x1 root"));
    let lark = gbnf_to_lark(&gbnf.replace("root ::= ", "root ::= more | ")).unwrap();
    assert!(lark.len() < 8 * gbnf.len(), "{} of {}", lark.len(), gbnf.len());
    check(
        "root ::= \"(\" root \")\" | x1 x1\nx1 ::= x2 x2\nx2 ::= [a-z] ws\nws ::= sp [\\n]*\nsp ::= [ ]*",
        &["abcd", "(a b  \nc\nd)", "((abcd \n\n))"],
        &["abc", "(abcd", "a\n bcd", " abcd"],
    );
}

/// Where a regular node may end in a text that it begins at some place of.
fn ends(rules: &Rules, node: &Node, text: &[char], from: usize) -> BTreeSet<usize> {
    let after =
        |node: &Node, from: BTreeSet<usize>| from.into_iter().flat_map(|at| ends(rules, node, text, at)).collect();
    match node {
        Node::Text(wanted) => {
            let wanted: Vec<char> = wanted.chars().collect();
            text[from..].starts_with(&wanted).then_some(from + wanted.len()).into_iter().collect()
        }
        Node::Class { negated, ranges } => {
            let is_in = |c: &char| ranges.iter().any(|(first, last)| (first..=last).contains(&c)) != *negated;
            text.get(from).filter(|c| is_in(c)).map(|_| from + 1).into_iter().collect()
        }
        Node::Rule(rule) => ends(rules, &rules.bodies[*rule], text, from),
        Node::Sequence(nodes) => nodes.iter().fold(BTreeSet::from([from]), |from, node| after(node, from)),
        Node::Choice(nodes) => nodes.iter().flat_map(|node| ends(rules, node, text, from)).collect(),
        Node::Repeat { node, least, most } => {
            let (mut now, mut all) = (BTreeSet::from([from]), BTreeSet::new());
            for i in 0..=most.unwrap_or(text.len() as u32 + least) {
                if i >= *least {
                    all.extend(&now);
                }
                now = after(node, now);
            }
            all
        }
    }
}

/// Expressions of GBNF over a small alphabet; rules named in them come later, so nothing leads to itself.
fn expression() -> impl Strategy<Value = String> {
    let leaf = proptest::sample::select(&["\"a\"", "\"ab\"", "\"\"", "[ab]", "[^a]", "\"b\" \"c\"", ".", "other"][..]);
    leaf.prop_map(str::to_owned).prop_recursive(4, 16, 3, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 1..3).prop_map(|parts| format!("({})", parts.join(" "))),
            proptest::collection::vec(inner.clone(), 1..3).prop_map(|parts| format!("({})", parts.join(" | "))),
            (inner, proptest::sample::select(&["*", "+", "?", "{2}", "{1,2}", "{0,0}", "{1,}"][..]))
                .prop_map(|(part, suffix)| format!("({part}){suffix}")),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn regular_grammars_allow_what_they_say(
        root in expression(), other in expression(), texts in proptest::collection::vec("[abc]{0,6}", 8),
    ) {
        let gbnf = format!("root ::= {root}\nother ::= {}", other.replace("other", "\"c\""));
        let (factory, lark) = (factory(), gbnf_to_lark(&gbnf).unwrap());
        let rules = Parser::new(&gbnf).parse().unwrap();
        for text in texts {
            let characters: Vec<char> = text.chars().collect();
            let expected = ends(&rules, &rules.bodies[0], &characters, 0).contains(&characters.len());
            prop_assert_eq!(allows(&factory, &lark, &text), expected, "{:?} by {}\n{}", text, gbnf, lark);
        }
    }

    /// Whatever the text, it is an answer or a sentence, and no longer than in proportion.
    #[test]
    fn any_text_is_rewritten_or_refused(
        parts in proptest::collection::vec(
            proptest::sample::select(&[
                "root", "::=", " ", "\n", "\"", "[", "]", "(", ")", "|", "*", "{", "}", "1", ",", "\\", "x4", "a", "-", "^", ".", "#",
                "root ::= ", "a ::= ", "\"a\"", "[a-z]", "中",
            ][..]),
            0..60,
        ),
    ) {
        let gbnf = parts.concat();
        match gbnf_to_lark(&gbnf) {
            Ok(lark) => prop_assert!(lark.len() <= 100 * gbnf.len() + 100, "{}", lark),
            Err(error) => prop_assert!(!error.to_string().contains('\n')),
        }
    }
}
