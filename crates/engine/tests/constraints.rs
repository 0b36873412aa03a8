//! Answers with grammars: what comes out fulfils them, whatever else the engine does; what can't be fulfilled is refused in
//! time.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod support;

use proptest::prelude::*;
use qwen_engine::constraint::MAX_GRAMMAR_BYTES;
use qwen_engine::{
    Constraint, Engine, EngineOptions, FinishReason, Grammar, LoadOptions, LoadedModel, Output, Request,
    SamplingParams, Speculation,
};
use support::{cpu, fixture};

/// A model of random weights with a vocabulary of single bytes and some merges: left to itself it writes noise.
const MODEL: &str = "gguf/llama.gguf";

fn engine(sequences: u32, blocks: u64, speculation: Option<Speculation>) -> Engine {
    let load = LoadOptions {
        max_sequences: sequences,
        max_seq_len: Some(128),
        max_cached_tokens: Some(blocks * 16),
        ..LoadOptions::default()
    };
    let options = EngineOptions { speculation, ..EngineOptions::default() };
    Engine::with_options(LoadedModel::load(&fixture(MODEL), cpu(1), &load, &mut |_| {}).unwrap(), options)
}

fn request(grammar: Grammar, seed: u64) -> Request {
    let sampling = SamplingParams { seed, max_tokens: 80, ..SamplingParams::default() };
    let constraint = Some(Constraint { grammar, after: None });
    Request { constraint, ..Request::new(vec![5, 6, 7, 8, 9, 10], sampling) }
}

#[derive(Debug, PartialEq)]
struct Answer {
    text: String,
    tokens: Vec<u32>,
    finish: Option<FinishReason>,
}

fn answers(engine: &mut Engine, requests: Vec<Request>) -> Vec<Answer> {
    let ids: Vec<_> = requests.into_iter().map(|request| engine.submit(request).unwrap()).collect();
    let mut outputs: Vec<Output> = Vec::new();
    while engine.has_work() {
        outputs.extend(engine.step());
    }
    let of = |id| {
        let own: Vec<&Output> = outputs.iter().filter(|output| output.id == id).collect();
        Answer {
            text: own.iter().map(|output| output.text.as_str()).collect(),
            tokens: own.iter().filter_map(|output| output.token).collect(),
            finish: own.last().unwrap().finish.clone(),
        }
    };
    ids.into_iter().map(of).collect()
}

const SCHEMA: &str = r#"{"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99},
    "b": {"enum": ["x", "yy"]}}, "required": ["a", "b"], "additionalProperties": false}"#;

fn fulfils(grammar: &Grammar, text: &str) -> bool {
    match grammar {
        Grammar::Choice(texts) => texts.iter().any(|choice| choice == text),
        Grammar::Regex(_) => {
            let bytes = text.as_bytes();
            let digits = bytes.iter().take_while(|b| b.is_ascii_digit()).count();
            (2..=4).contains(&digits) && &bytes[digits..] == b"-ab"
        }
        Grammar::Lark(_) | Grammar::Gbnf(_) => text == "yes!" || text == "no!",
        Grammar::JsonSchema(_) => {
            let value: serde_json::Value = serde_json::from_str(text).unwrap();
            (0..=99).contains(&value["a"].as_i64().unwrap()) && ["x", "yy"].contains(&value["b"].as_str().unwrap())
        }
        Grammar::JsonObject => serde_json::from_str::<serde_json::Value>(text).is_ok_and(|value| value.is_object()),
    }
}

fn grammars() -> Vec<Grammar> {
    vec![
        Grammar::Choice(vec!["red".into(), "green \"light\"".into(), "\u{4e2d}".into()]),
        Grammar::Regex("[0-9]{2,4}-ab".into()),
        Grammar::Lark("start: (\"yes\" | \"no\") \"!\"".into()),
        Grammar::Gbnf("root ::= (\"yes\" | no) \"!\" # which\nno ::= \"n\" [o]".into()),
        Grammar::JsonSchema(SCHEMA.into()),
        Grammar::JsonObject,
    ]
}

#[test]
fn answers_fulfil_their_grammar_and_end() {
    let mut engine = engine(4, 64, None);
    for grammar in grammars() {
        let requests = (0..12).map(|seed| request(grammar.clone(), seed)).collect();
        for answer in answers(&mut engine, requests) {
            match answer.finish {
                Some(FinishReason::EndOfText) => assert!(fulfils(&grammar, &answer.text), "{grammar:?}: {answer:?}"),
                // A model of random weights may fill strings and white space for ever.
                Some(FinishReason::Length) => assert!(matches!(grammar, Grammar::JsonObject | Grammar::JsonSchema(_))),
                other => panic!("{grammar:?}: {other:?}"),
            }
        }
    }
}

#[test]
fn a_grammar_may_begin_after_a_text() {
    let mut engine = engine(2, 64, None);
    let grammar = Grammar::Choice(vec!["red".into(), "green".into()]);
    let plain = Request { constraint: None, ..request(grammar.clone(), 3) };
    let free = answers(&mut engine, vec![plain.clone()]).remove(0);
    // Something that the model writes by itself: then the answer is its own up to there, and a colour afterwards.
    let after: String = free.text.chars().filter(char::is_ascii_alphanumeric).take(1).collect();
    let constrained = Request { constraint: Some(Constraint { grammar, after: Some(after.clone()) }), ..plain };
    let answer = answers(&mut engine, vec![constrained]).remove(0);
    let own = free.text.find(&after).unwrap() + after.len();
    assert!(answer.text.starts_with(&free.text[..own]), "{after:?} {answer:?}");
    assert!(answer.text.ends_with("red") || answer.text.ends_with("green"), "{answer:?}");
    assert_eq!(answer.finish, Some(FinishReason::EndOfText));
}

/// Rules of which each names the next, and the last a letter.
fn chain(rules: usize, first: &str, name: &str, defines: &str, beside: &str) -> String {
    let mut text = format!("{first}{defines} {name}0\n");
    for rule in 0..rules {
        text += &format!("{name}{rule}{defines}{beside} {name}{}\n", rule + 1);
    }
    text + &format!("{name}{rules}{defines} \"a\"\n")
}

/// The deepest that is followed fits the stack, and so does what it became where the engine has a thread of the usual size.
#[test]
fn long_chains_of_rules_are_followed() {
    let deep = |rules: usize, name: &str| {
        let (open, close) = ("(".repeat(27), ")".repeat(27));
        let line = |rule: usize| format!("{name}{rule}: {open}{name}{}{close}\n", rule + 1);
        format!("start: {name}0\n{}{name}{rules}: \"a\"\n", (0..rules).map(line).collect::<String>())
    };
    let mut engine = engine(2, 64, None);
    for (grammar, expected) in [
        (Grammar::Lark(chain(4000, "start", "r", ":", "")), Some("a")),
        (Grammar::Lark(chain(4000, "start", "R", ":", "")), Some("a")),
        (Grammar::Lark(chain(2500, "start", "R", ":", " \"b\" | \"c\"")), None),
        (Grammar::Lark(chain(2500, "start", "r", ":", " \"b\" | \"c\"")), None),
        (Grammar::Lark(deep(140, "r")), Some("a")),
        (Grammar::Lark(deep(140, "R")), Some("a")),
        (Grammar::Gbnf(chain(4000, "root", "r", "::=", "")), Some("a")),
        (Grammar::Gbnf(chain(2500, "root", "r", "::=", "\"b\"|\"c\"")), None),
        (Grammar::Gbnf(chain(2500, "root", "r", "::=", "\"b\"root|")), None),
    ] {
        let text = format!("{grammar:?}").chars().take(60).collect::<String>();
        match engine.submit(request(grammar, 1)) {
            Ok(_) => {
                let mut found = String::new();
                while engine.has_work() {
                    found.extend(engine.step().into_iter().map(|output| output.text));
                }
                assert!(expected.is_none_or(|expected| expected == found), "{text}: {found}");
            }
            // As much work as is too much, but no more.
            Err(error) => assert!(expected.is_none(), "{text}: {error}"),
        }
    }
}

/// Rules of which each is twice the next, and the first named several times.
fn doubling(root: &str, name: &str, defines: &str, levels: usize, times: usize) -> String {
    let rule = |i: usize| format!("{name}{i} {defines} {name}{next} {name}{next}\n", next = i + 1);
    let first = format!("{root} {defines}{}\n", format!(" {name}0").repeat(times));
    format!("{first}{}{name}{levels} {defines} \"a\" | \"b\"", (0..levels).map(rule).collect::<String>())
}

#[test]
fn rules_that_are_named_twice_are_followed() {
    let mut engine = engine(2, 64, None);
    for grammar in [doubling("root", "r", "::=", 5, 1), doubling("start", "R", ":", 5, 1)] {
        let is_gbnf = grammar.starts_with("root");
        let grammar = if is_gbnf { Grammar::Gbnf(grammar) } else { Grammar::Lark(grammar) };
        let answer = answers(&mut engine, vec![request(grammar, 1)]).remove(0);
        assert!(answer.text.len() == 32 && answer.text.bytes().all(|byte| b"ab".contains(&byte)), "{answer:?}");
    }
}

/// So many choices of so many objects at the same time.
fn choices(count: usize, options: usize) -> String {
    let object = |i: usize, j: usize| format!(r#"{{"properties": {{"k{i}_{j}": {{"type": "string"}}}}}}"#);
    let choice = |i| format!(r#"{{"anyOf": [{}]}}"#, (0..options).map(|j| object(i, j)).collect::<Vec<_>>().join(","));
    format!(r#"{{"type": "object", "allOf": [{}]}}"#, (0..count).map(choice).collect::<Vec<_>>().join(","))
}

/// Multiples of large numbers: a remainder is a state.
fn multiples(count: usize) -> String {
    let number = |i: usize| format!(r#""p{i}": {{"type": "integer", "multipleOf": {}}}"#, 1_000_003 + 2 * i);
    format!(r#"{{"type": "object", "properties": {{{}}}}}"#, (0..count).map(number).collect::<Vec<_>>().join(","))
}

#[test]
fn what_cannot_be_is_refused_with_a_reason() {
    let mut engine = engine(2, 64, None);
    engine.preparer().warm_up_grammars().unwrap();
    let nested =
        |n: usize| format!("{}{}", "{\"type\":\"array\",\"items\":".repeat(n), "{}".to_owned() + &"}".repeat(n));
    let cases = [
        Grammar::Regex("(".into()),
        Grammar::Regex(String::new()),
        Grammar::Regex("a".repeat(MAX_GRAMMAR_BYTES + 1)),
        Grammar::Regex("(a|b|ab)*{1,1000}(?=c)".into()),
        Grammar::Choice(vec![]),
        Grammar::Choice(vec!["a".into(), String::new()]),
        Grammar::Gbnf("root ::= \"a".into()),
        Grammar::Gbnf("root ::= other".into()),
        Grammar::Gbnf(format!("root ::= {}", "(".repeat(10_000))),
        Grammar::Gbnf(format!("root ::= \"a\"{}", "*".repeat(60_000))),
        Grammar::Gbnf("root ::= \"(\" root \")\"".into()),
        Grammar::Gbnf(chain(4200, "root", "r", "::=", "")),
        Grammar::Lark(chain(5000, "start", "r", ":", "")),
        Grammar::Lark(chain(5000, "start", "R", ":", "")),
        Grammar::Lark(format!("start: {}", "a{".repeat(30_000))),
        // Each rule twice the next: written out, more than any memory holds.
        Grammar::Gbnf(doubling("root", "r", "::=", 16, 2000)),
        Grammar::Gbnf(doubling("root", "r", "::=", 4000, 1)),
        Grammar::Lark(doubling("start", "R", ":", 16, 2000)),
        Grammar::Lark(doubling("start", "R", ":", 30, 1)),
        Grammar::Lark(format!("start: {}", "%lark {start: ".repeat(4000))),
        // Work before the first character.
        Grammar::Regex((0..4000).map(|i| format!("[\\w--[{}]]", char::from_u32(0x4e00 + i).unwrap())).collect()),
        Grammar::Regex(format!("(?i){}", "[^a]".repeat(10_000))),
        Grammar::JsonSchema(choices(10, 2)),
        Grammar::Lark(format!("start: %json {}", choices(10, 2))),
        Grammar::JsonSchema(multiples(100)),
        Grammar::Gbnf(include_str!("../../../fuzz/corpus/gbnf/nested_repetitions").into()),
        Grammar::JsonSchema("{".into()),
        Grammar::JsonSchema("7".into()),
        Grammar::JsonSchema("{\"type\": \"nothing\"}".into()),
        Grammar::JsonSchema("false".into()),
        Grammar::JsonSchema(r#"{"$ref": "http://localhost:1/schema"}"#.into()),
        Grammar::JsonSchema(nested(200)),
        Grammar::Lark("start: rule".into()),
        Grammar::Lark(" ".into()),
        Grammar::Lark("start: start".into()),
    ];
    for grammar in cases {
        let text = format!("{grammar:?}").chars().take(60).collect::<String>();
        let error = engine.submit(request(grammar, 1)).expect_err(&text).to_string();
        assert!(error.contains("grammar") && error.len() < 700, "{text}: {error}");
    }
    assert!(!engine.has_work());
}

/// How often something may be repeated is a number, not as much work.
#[test]
fn large_numbers_that_people_ask_for_are_taken() {
    let mut engine = engine(2, 64, None);
    let row = r#"{"type": "object", "properties": {"a": {"type": "string", "maxLength": 200}, "b": {"type": "integer"}},
        "required": ["a"], "additionalProperties": false}"#;
    for grammar in [
        Grammar::Gbnf("root ::= [a-z]{0,1000}".into()),
        Grammar::Gbnf("root ::= .{0,2000}".into()),
        Grammar::Gbnf("root ::= ([a-z]{1,20} \" \"){1,1000}".into()),
        Grammar::Regex(".{0,10000}".into()),
        Grammar::Regex("(([^,\\n]{0,50},){9}[^,\\n]{0,50}\\n){1,100}".into()),
        Grammar::Lark("start: WORD (\" \" WORD){0,1000}\nWORD: /[a-z]{1,50}/".into()),
        Grammar::JsonSchema(r#"{"type": "string", "maxLength": 10000}"#.into()),
        Grammar::JsonSchema(r#"{"type": "string", "pattern": "^[a-z]{1,64}@[a-z.]{1,255}$", "maxLength": 300}"#.into()),
        Grammar::JsonSchema(format!(r#"{{"type": "array", "maxItems": 1000, "items": {row}}}"#)),
        Grammar::JsonSchema(choices(8, 2)),
        Grammar::Regex("(?:[\\w.-]{1,64}@[\\w.-]{1,255}\\n){1,100}".into()),
        Grammar::JsonSchema(format!(r#"{{"type": "array", "minItems": 500, "maxItems": 10000, "items": {row}}}"#)),
    ] {
        let taken = engine.submit(request(grammar.clone(), 1));
        assert!(taken.is_ok(), "{grammar:?}: {taken:?}");
    }
}

#[test]
fn a_grammar_that_becomes_too_much_work_ends_its_request_alone() {
    let mut engine = engine(3, 64, None);
    let calm = request(Grammar::Regex("[0-9]{2,4}-ab".into()), 7);
    let expected = answers(&mut engine, vec![calm.clone()]);
    let bombs = [
        // Ambiguous in every way: the parser's items grow with each byte.
        Grammar::Lark("start: a\na: a a a | a a | \"a\" | \"b\" | a \"a\" a".into()),
        Grammar::Regex("((((a{1,999}){1,999}){1,999}){1,999})".into()),
        Grammar::Regex("(.*a.{1000}|.*b.{1000})c".into()),
    ];
    for bomb in bombs {
        let taken = engine.submit(request(bomb.clone(), 1));
        let found = answers(&mut engine, vec![calm.clone()]);
        assert_eq!(found, expected, "{bomb:?} {taken:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]
    /// Grammars, guesses, preemption and company together: each answer is the one that its request gets alone.
    #[test]
    fn grammars_compose_with_everything(
        picks in proptest::collection::vec((0usize..6, 0u64..50), 2..10),
        blocks in 8u64..16,
        guess in any::<bool>(),
    ) {
        let speculation = guess.then_some(Speculation { max_draft: 4, min_match: 1, max_step_tokens: 24 });
        let grammars = grammars();
        let request = |(pick, seed): &(usize, u64)| match grammars.get(*pick) {
            Some(grammar) => request(grammar.clone(), *seed),
            None => Request { constraint: None, ..request(Grammar::JsonObject, *seed) },
        };
        let mut alone = engine(1, 16, None);
        let expected: Vec<_> = picks.iter().map(|pick| answers(&mut alone, vec![request(pick)]).remove(0)).collect();
        let mut engine = engine(8, blocks, speculation);
        prop_assert_eq!(answers(&mut engine, picks.iter().map(request).collect()), expected.as_slice());
        // And from the middle on.
        let cut = expected[0].tokens.len() / 2;
        let resume = expected[0].tokens[..cut].to_vec();
        let rest = answers(&mut engine, vec![Request { resume, ..request(&picks[0]) }]).remove(0);
        prop_assert_eq!(&rest.tokens, &expected[0].tokens[cut..]);
    }
}
