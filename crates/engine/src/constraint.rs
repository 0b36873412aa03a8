//! Grammars: which tokens an answer may go on with.
//!
//! In: a [`Constraint`], then the tokens of the answer one by one. Out: a set of tokens that are possible now. The automata
//! are llguidance's; what is ours is the vocabulary that it sees, the budgets, and where a grammar begins and ends.
//! Invariants:
//! - a grammar is untrusted: its text, its compiled size, its states, the work to compile it and the work of each step have
//!   limits, and exceeding one refuses or ends that request alone, with a sentence that names the limit;
//! - a set is a function of the tokens of the answer: not of drafts, of preemption, or of when it was computed;
//! - end of text is possible exactly where the grammar may end; an answer that can't go on ends.

mod schema;
mod threads;

use std::fmt::Display;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::earley::lexerspec::LexerSpec;
use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use qwen_models::tokenizer::Tokenizer;

use crate::{ClientKey, Constraint, EngineError, Grammar, gbnf_to_lark, lark};
use threads::{NoResult, ThreadPool, Threads};

/// Most bytes of the text of a grammar.
pub const MAX_GRAMMAR_BYTES: usize = 64 << 10;
/// Bytes that a grammar's automaton may come to while it runs: its states at 2 KiB each and its rules.
pub const GRAMMAR_MEMORY: u64 = 24 << 20;
/// Work of llguidance for the first character of any text, in the unit of its limits: 0.1 to 0.3 s.
const FIRST_BYTES_WORK: u64 = 2_000_000;
/// Most classes of an expression that come to hundreds of ranges each: reading one takes up to 1.5 ms, before any limit counts.
const MAX_CLASSES: usize = 256;
/// Longest that anybody waits for a grammar. Its work is limited, so this is for work that nobody foresaw, and for machines whose
/// processors others have.
const COMPILE_TIME: Duration = Duration::from_secs(60);
/// Threads that compile grammars.
const THREADS: Threads = Threads {
    at_once: 8,
    of_a_client: 6,
    waiting: 256,
    // 16 KiB for each of the levels that a grammar may have.
    stack: lark::MAX_LEVELS << 14,
};

/// Work that llguidance does at most: about 20 ms for compiling what is usual, 0.4 s for what was made to cost, 4 ms for a step.
fn parser_limits() -> ParserLimits {
    ParserLimits {
        initial_lexer_fuel: 400_000,
        step_lexer_fuel: 50_000,
        step_max_items: 30_000,
        max_lexer_states: 10_000,
        max_grammar_size: 100_000,
        // Its cost is not covered by any fuel.
        precompute_large_lexemes: false,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// Compiles grammars for a vocabulary.
pub(crate) struct GrammarCompiler {
    vocabulary: Arc<Vocabulary>,
    threads: ThreadPool,
}

/// What the grammars of a model share.
struct Vocabulary {
    factory: ParserFactory,
    tokenizer: Arc<Tokenizer>,
}

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarCompiler").field("threads", &self.threads).finish_non_exhaustive()
    }
}

fn refused(found: impl Into<String>) -> EngineError {
    EngineError::Grammar { reason: found.into() }
}

/// As llguidance tells it.
fn refused_by(error: impl Display) -> EngineError {
    refused(one_line(&error.to_string()))
}

impl GrammarCompiler {
    /// Sorts the vocabulary; takes some tens of milliseconds. `eos` ends an answer.
    pub(crate) fn new(tokenizer: Arc<Tokenizer>, vocab_size: u32, eos: &[u32]) -> Result<Self, EngineError> {
        let Some(first) = eos.first().copied() else {
            return Err(refused("the model has no token that ends an answer, so no grammar can end"));
        };
        let word = |id: u32| {
            let bytes = tokenizer.token_bytes(id);
            // Markup must not be taken for the text that it is written as.
            if tokenizer.is_special(id) { [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes.as_slice()].concat() } else { bytes }
        };
        let words: Vec<Vec<u8>> = (0..vocab_size).map(word).collect();
        let trie = TokTrie::from(&TokRxInfo::new(vocab_size, first), &words).with_eos_tokens(eos);
        // Not canonical: any way to cut a text into tokens is possible, and the model chooses.
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)
            .map_err(|error| refused(format!("the vocabulary: {error}")))?;
        factory.quiet();
        *factory.limits_mut() = parser_limits();
        Ok(Self { vocabulary: Arc::new(Vocabulary { factory, tokenizer }), threads: ThreadPool::new(THREADS) })
    }

    /// Checks and compiles. Work is limited, and time only as a last resort: whether a grammar is taken does not depend on who else is
    /// busy.
    pub(crate) fn compile(
        &self,
        constraint: &Constraint,
        client: ClientKey,
        deadline: Option<Instant>,
    ) -> Result<ConstraintState, EngineError> {
        let latest = Instant::now() + COMPILE_TIME;
        let until = deadline.map_or(latest, |deadline| deadline.min(latest));
        let (vocabulary, constraint) = (Arc::clone(&self.vocabulary), constraint.clone());
        self.threads
            .run(client, until, move || vocabulary.compile(&constraint))
            .unwrap_or_else(|why| Err(no_result(why)))
    }
}

fn no_result(why: NoResult) -> EngineError {
    match why {
        NoResult::Busy => EngineError::CompilersBusy { at_once: THREADS.at_once },
        NoResult::Late => refused(format!(
            "compiling it takes longer than it may: {} s, or as long as the request may take",
            COMPILE_TIME.as_secs()
        )),
        NoResult::Failed => refused("its compiler failed"),
    }
}

impl Vocabulary {
    fn compile(&self, constraint: &Constraint) -> Result<ConstraintState, EngineError> {
        let source = GrammarInit::Serialized(source(&constraint.grammar)?);
        let (limits, tokens) = (self.factory.limits().clone(), self.factory.tok_env().clone());
        let read = || source.to_internal(Some(tokens), limits.clone());
        let (rules, lexer) = catch_unwind(AssertUnwindSafe(read)).map_err(refused_by)?;
        check_first_bytes(&lexer, limits)?;
        let parser = self.factory.create_parser_from_init_default(GrammarInit::Internal(rules, lexer));
        let mut state = ConstraintState {
            matcher: Matcher::new(Ok(parser.map_err(refused_by)?)),
            tokenizer: Arc::clone(&self.tokenizer),
            after: constraint
                .after
                .as_ref()
                .filter(|text| !text.is_empty())
                .map(|text| After { text: text.clone().into_bytes(), tail: Vec::new() }),
            mask: None,
            mask_time: Duration::ZERO,
        };
        // The first set shows what can't be fulfilled and what is too much work, before the request takes anybody's time.
        let first = state.matcher.compute_mask().map_err(refused_by)?;
        if first.is_zero() {
            return Err(refused("no token of the vocabulary can begin a text that it allows: it can't be fulfilled"));
        }
        state.mask = Some(first);
        Ok(state)
    }
}

/// Takes the steps that llguidance takes as it makes the parser: from the first state of the lexer by each byte. There, they have no
/// limit, and a few repetitions within each other are enough for minutes.
fn check_first_bytes(lexer: &LexerSpec, mut limits: ParserLimits) -> Result<(), EngineError> {
    let mut states = lexer.to_regex_vec(&mut limits).map_err(refused_by)?;
    states.set_fuel(FIRST_BYTES_WORK);
    let start = states.initial_state(&lexer.all_lexemes());
    for byte in 0..=u8::MAX {
        states.transition(start, byte);
        if states.has_error() {
            return Err(refused(format!(
                "its first character takes more than {FIRST_BYTES_WORK} steps of work; look for repetitions within repetitions, and \
                 for many that may come first"
            )));
        }
    }
    Ok(())
}

/// A grammar as llguidance wants it.
fn source(grammar: &Grammar) -> Result<TopLevelGrammar, EngineError> {
    let bytes = match grammar {
        Grammar::JsonObject => 0,
        Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text) | Grammar::Gbnf(text) => text.len(),
        Grammar::Choice(texts) => texts.iter().map(|text| text.len() + 4).sum(),
    };
    if bytes > MAX_GRAMMAR_BYTES {
        return Err(refused(format!("its text has {bytes} bytes, at most {MAX_GRAMMAR_BYTES} are read")));
    }
    if let Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text) = grammar {
        let classes = large_classes(text, !matches!(grammar, Grammar::JsonSchema(_)));
        if classes > MAX_CLASSES {
            return Err(refused(format!(
                "its expressions have {classes} classes of all scripts (\\w, \\p, and with the flag i each [class]), at most \
                 {MAX_CLASSES} are read; name the characters"
            )));
        }
    }
    match grammar {
        Grammar::JsonObject => Ok(TopLevelGrammar::from_json_schema(serde_json::json!({"type": "object"}))),
        Grammar::JsonSchema(text) => {
            let schema: serde_json::Value =
                serde_json::from_str(text).map_err(|error| refused(format!("the JSON schema is no JSON: {error}")))?;
            if !schema.is_object() && !schema.is_boolean() {
                return Err(refused("a JSON schema is an object, such as {\"type\": \"object\"}"));
            }
            check_choices(&schema)?;
            Ok(TopLevelGrammar::from_json_schema(schema))
        }
        Grammar::Regex(text) => {
            if text.is_empty() {
                return Err(refused("the regular expression is empty: it would allow no text at all"));
            }
            Ok(TopLevelGrammar::from_regex(text))
        }
        Grammar::Choice(texts) => {
            if texts.is_empty() || texts.iter().any(String::is_empty) {
                return Err(refused("a choice needs at least one text, and none of them empty"));
            }
            // Lark writes strings as JSON does.
            let quoted: Vec<String> =
                texts.iter().map(|text| serde_json::Value::from(text.as_str()).to_string()).collect();
            Ok(TopLevelGrammar::from_lark(format!("start: {}", quoted.join(" | "))))
        }
        Grammar::Lark(text) => {
            if text.trim().is_empty() {
                return Err(refused("the grammar is empty; a grammar has a rule \"start\""));
            }
            from_lark(text.clone())
        }
        Grammar::Gbnf(text) => from_lark(gbnf_to_lark(text).map_err(|error| refused(format!("GBNF: {error}")))?),
    }
}

/// An upper bound of the classes in a text that come to hundreds of ranges. The words of a JSON schema are those of ASCII.
fn large_classes(text: &str, has_words: bool) -> usize {
    let is_class = |after: &[u8]| match after {
        [b'w' | b'W', ..] => has_words,
        [b'p' | b'P', b'{' | b'A'..=b'Z', ..] => true,
        _ => false,
    };
    let named = text.as_bytes().split(|byte| *byte == b'\\').skip(1).filter(|after| is_class(after)).count();
    let is_flag = |c: char| c.is_ascii_alphabetic() || c == '-';
    let ignores_case = |after: &str| after.chars().take_while(|c| is_flag(*c)).any(|c| c == 'i');
    let folded = text.split("(?").skip(1).any(ignores_case) || text.contains("/i");
    named + if folded { text.matches('[').count() } else { 0 }
}

fn check_choices(schema: &serde_json::Value) -> Result<(), EngineError> {
    let (parts, most) = (schema::parts_combined(schema), schema::MAX_PARTS);
    if parts > most {
        return Err(refused(format!(
            "the choices of its anyOf, oneOf and minProperties that hold at the same time (allOf) come to {parts} schemas, each with each of the \
             others, and at most {most} are combined; give fewer choices at once"
        )));
    }
    Ok(())
}

fn from_lark(text: String) -> Result<TopLevelGrammar, EngineError> {
    let (levels, most) = (lark::levels(&text), lark::MAX_LEVELS);
    if levels > most {
        return Err(refused(format!(
            "its rules come to {levels} levels, one for each and one for each group within another, and at most {most} are \
             followed; write fewer rules, or flatter ones"
        )));
    }
    lark::schemas(&text).try_for_each(|schema| check_choices(&schema))?;
    let most = lark::MAX_PARTS;
    if lark::parts_written_out(&text) > most {
        return Err(refused(format!(
            "its terminals, written out with all those that they name, come to more than {most} parts; name them less often"
        )));
    }
    Ok(TopLevelGrammar::from_lark(text))
}

/// The first lines of a message, as one; llguidance adds the state of its parser below.
fn one_line(message: &str) -> String {
    let lines = message.lines().map(str::trim).filter(|line| !line.is_empty());
    let mut text = lines.take(4).collect::<Vec<_>>().join(" ");
    if text.len() > 400 {
        let end = (0..=400).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
    }
    text
}

/// A text that must come before the grammar begins.
#[derive(Debug, Clone)]
struct After {
    text: Vec<u8>,
    /// The end of the answer so far, shorter than `text`.
    tail: Vec<u8>,
}

impl After {
    /// Takes bytes of the answer; whether the text is there now. What follows it within the same token is not looked at.
    fn push(&mut self, bytes: &[u8]) -> bool {
        self.tail.extend_from_slice(bytes);
        if self.tail.windows(self.text.len()).any(|window| window == self.text) {
            return true;
        }
        let keep = self.tail.len().min(self.text.len() - 1);
        self.tail.drain(..self.tail.len() - keep);
        false
    }
}

/// The grammar of one answer, as far as it has come.
pub(crate) struct ConstraintState {
    matcher: Matcher,
    tokenizer: Arc<Tokenizer>,
    after: Option<After>,
    /// What is possible now, if that was computed.
    mask: Option<SimpleVob>,
    mask_time: Duration,
}

impl std::fmt::Debug for ConstraintState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConstraintState").field("after", &self.after).finish_non_exhaustive()
    }
}

impl ConstraintState {
    /// Computes what is possible now, unless that is known or the grammar has not begun. A failure shows in
    /// [`ConstraintState::mask`].
    pub(crate) fn prepare(&mut self) {
        if self.after.is_none() && self.mask.is_none() {
            let start = Instant::now();
            self.mask = self.matcher.compute_mask().ok();
            self.mask_time += start.elapsed();
        }
    }

    /// What is possible now, a bit for each token; none: everything is.
    pub(crate) fn mask(&mut self) -> Result<Option<&[u32]>, String> {
        if self.after.is_some() {
            return Ok(None);
        }
        self.prepare();
        match &self.mask {
            Some(mask) => Ok(Some(mask.as_slice())),
            None => Err(format!("the grammar: {}", one_line(&self.matcher.get_error().unwrap_or_default()))),
        }
    }

    /// Takes the next token of the answer; whether the answer is complete and can't go on.
    pub(crate) fn accept(&mut self, token: u32) -> Result<bool, String> {
        if let Some(after) = &mut self.after {
            if after.push(&self.tokenizer.token_bytes(token)) {
                self.after = None;
            }
            return Ok(false);
        }
        self.mask = None;
        self.matcher.consume_token(token).map_err(|error| format!("the grammar: {}", one_line(&error.to_string())))?;
        Ok(self.matcher.is_stopped())
    }

    /// How many of these tokens are possible one after the other; nothing is taken.
    pub(crate) fn possible(&mut self, tokens: &[u32]) -> usize {
        if self.after.is_some() { tokens.len() } else { self.matcher.validate_tokens(tokens).unwrap_or(0) }
    }

    /// Time that sets took since the last call.
    pub(crate) fn take_mask_time(&mut self) -> Duration {
        std::mem::take(&mut self.mask_time)
    }
}
