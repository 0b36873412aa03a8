//! The incremental parser.
//!
//! A state and a buffer of text that is not decided yet. Each round looks at the buffer's beginning: it takes what is certain
//! and stops where more text could change the decision.

use super::json::{CallObject, Found, Span, Step};
use super::tools::{DEEPSEEK_CALL_BEGIN, DEEPSEEK_CALL_END, DEEPSEEK_CALLS_END, DEEPSEEK_SEPARATOR, ToolFormat};
use super::{Piece, THINK_BEGIN, THINK_END};

/// Whether a model thinks in the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Thinking {
    /// Everything is content.
    #[default]
    Off,
    /// If the answer begins with `<think>`.
    IfOpened,
    /// The prompt has opened it already: all text before `</think>` is thinking.
    Inside,
}

/// What to look for.
#[derive(Debug, Clone, Default)]
pub struct ParserOptions {
    /// Thinking.
    pub thinking: Thinking,
    /// Form of calls; none: the text has none.
    pub tools: Option<ToolFormat>,
    /// Names of tools: where a call has no markup, only an object with one of these names is one.
    pub names: Vec<String>,
}

#[derive(Debug, Clone)]
enum State {
    /// It is not known yet whether the answer begins with thinking.
    Start,
    Thinking,
    Content,
    /// An object with name and arguments, of Hermes or Llama 3.
    Object(Box<CallObject>),
    /// After an object of Hermes: the closing tag.
    ObjectEnd,
    /// After an object of Llama 3: a semicolon and another one, or the end.
    ObjectNext,
    /// DeepSeek: between calls.
    Between,
    /// DeepSeek: kind and name of a call.
    Header,
    /// DeepSeek: before the arguments of a call of this tool.
    BeforeArguments(String),
    /// DeepSeek: within the arguments.
    Arguments(Span),
    /// DeepSeek: arguments that are no JSON object; the client gets them as they are. The name, until there is one of them.
    RawArguments(Option<String>),
    /// DeepSeek: after the arguments, up to the end of the call.
    CallEnd,
}

const HERMES_CALL_END: &str = "</tool_call>";

/// Arguments of a call that has none.
const NO_ARGUMENTS: &str = "{}";

/// Longest name of a tool with what is around it; longer text is no call.
const MAX_HEADER: usize = 256;

/// Parses one answer.
#[derive(Debug, Clone)]
pub struct AnswerParser {
    options: ParserOptions,
    state: State,
    buffer: String,
    /// What was taken for the beginning of a call and may turn out to be content.
    raw: String,
    /// White space at this place is dropped.
    trim_start: bool,
    /// Whether content was handed out.
    spoken: bool,
    calls: usize,
}

impl AnswerParser {
    /// At the beginning of an answer.
    #[must_use]
    pub fn new(options: ParserOptions) -> Self {
        let (state, trim_start) = match options.thinking {
            Thinking::Off => (State::Content, false),
            Thinking::IfOpened => (State::Start, false),
            Thinking::Inside => (State::Thinking, true),
        };
        Self { options, state, buffer: String::new(), raw: String::new(), trim_start, spoken: false, calls: 0 }
    }

    /// Whether the next text is, as far as is known, thinking.
    #[must_use]
    pub const fn is_thinking(&self) -> bool {
        matches!(self.state, State::Thinking)
    }

    /// Takes more text.
    pub fn push(&mut self, text: &str, pieces: &mut Vec<Piece>) {
        self.buffer.push_str(text);
        while self.round(pieces) {}
    }

    /// The answer has ended: by itself, or because it was `cut`, at this stop text, or at an empty one for its length. What might
    /// have become markup is text in an answer that ended so; of one that was cut it is dropped, as is a call that has no arguments
    /// yet. A call that has some keeps them.
    pub fn finish(&mut self, cut: Option<&str>, pieces: &mut Vec<Piece>) {
        let rest = std::mem::take(&mut self.buffer);
        // What more text could have turned into markup.
        let certain = |marker: &str| match cut {
            Some(next) => &rest[..rest.len() - overlap(&rest, marker, next)],
            None => rest.as_str(),
        };
        let is_markup = |markers: &[&str]| {
            let begun = rest.trim_start();
            cut.is_some_and(|next| markers.iter().any(|marker| goes_on(marker, begun, next)))
        };
        match &mut self.state {
            State::Thinking => {
                let text = certain(THINK_END);
                let text = if self.trim_start { text.trim_start() } else { text };
                self.reason(text.trim_end(), pieces);
            }
            State::Start if !rest.trim().is_empty() && is_markup(&[THINK_BEGIN]) => {}
            State::Between if is_markup(&[DEEPSEEK_CALL_BEGIN, DEEPSEEK_CALLS_END]) => {}
            State::ObjectEnd if is_markup(&[HERMES_CALL_END]) => {}
            State::Content => {
                let text = self.options.tools.map_or(rest.as_str(), |format| certain(format.marker()));
                let text = if text.len() < rest.len() { text.trim_end() } else { text };
                self.last_content(text, pieces);
            }
            State::Object(object) if object.begun() => {}
            // An object without markup is a call where it names a tool: others are content by now.
            State::Object(object) if cut.is_some() && (self.raw.starts_with(['<', ';']) || object.name().is_some()) => {
            }
            State::Header | State::BeforeArguments(_) if cut.is_some() => {}
            State::Object(_) | State::Header => {
                let text = std::mem::take(&mut self.raw) + &rest;
                self.last_content(&text, pieces);
            }
            State::Start | State::Between | State::ObjectEnd | State::ObjectNext => self.last_content(&rest, pieces),
            State::BeforeArguments(name) => {
                let name = std::mem::take(name);
                self.begin_call(name, pieces);
                self.argue(NO_ARGUMENTS.to_owned(), pieces);
            }
            State::RawArguments(name) => {
                let name = name.take();
                let text = certain(DEEPSEEK_CALL_END).trim_end();
                if cut.is_none() || !text.is_empty() {
                    self.argue_as(name, text.to_owned(), pieces);
                }
            }
            State::Arguments(_) | State::CallEnd => {}
        }
    }

    fn last_content(&mut self, text: &str, pieces: &mut Vec<Piece>) {
        if (self.calls > 0 || self.trim_start) && text.trim().is_empty() {
            return;
        }
        self.speak(text, pieces);
    }

    /// Decides what it can; false if it needs more text.
    fn round(&mut self, pieces: &mut Vec<Piece>) -> bool {
        match &mut self.state {
            State::Start => self.start(),
            State::Thinking => self.think(pieces),
            State::Content => self.content(pieces),
            State::Object(_) => self.object(pieces),
            State::ObjectEnd => self.skip_tag(HERMES_CALL_END, State::Content),
            State::ObjectNext => self.next_object(),
            State::Between => self.between(),
            State::Header => self.header(pieces),
            State::BeforeArguments(_) => self.before_arguments(pieces),
            State::Arguments(_) => self.arguments(pieces),
            State::RawArguments(_) => self.raw_arguments(pieces),
            State::CallEnd => self.call_end(),
        }
    }

    fn start(&mut self) -> bool {
        let text = self.buffer.trim_start();
        if let Some(rest) = text.strip_prefix(THINK_BEGIN) {
            self.buffer = rest.to_owned();
            self.state = State::Thinking;
            self.trim_start = true;
            return true;
        }
        if THINK_BEGIN.starts_with(text) {
            return false;
        }
        self.state = State::Content;
        true
    }

    fn think(&mut self, pieces: &mut Vec<Piece>) -> bool {
        if self.trim_start {
            self.drop_blank();
            self.trim_start = self.buffer.is_empty();
        }
        if let Some(at) = self.buffer.find(THINK_END) {
            let rest = self.buffer.split_off(at + THINK_END.len());
            let text = std::mem::replace(&mut self.buffer, rest);
            self.reason(text[..at].trim_end(), pieces);
            self.state = State::Content;
            self.trim_start = true;
            return true;
        }
        let keep = overlap(&self.buffer, THINK_END, "");
        let certain = self.buffer[..self.buffer.len() - keep].trim_end().len();
        let rest = self.buffer.split_off(certain);
        let text = std::mem::replace(&mut self.buffer, rest);
        self.reason(&text, pieces);
        false
    }

    fn content(&mut self, pieces: &mut Vec<Piece>) -> bool {
        if self.trim_start {
            self.drop_blank();
            if self.buffer.is_empty() {
                return false;
            }
            self.trim_start = false;
        }
        let Some(format) = self.options.tools else {
            let text = std::mem::take(&mut self.buffer);
            self.speak(&text, pieces);
            return false;
        };
        if format == ToolFormat::Llama3 && !self.spoken {
            let text = self.buffer.trim_start();
            if text.is_empty() {
                return false;
            }
            if text.starts_with('{') {
                self.begin_object("");
                return true;
            }
        }
        let marker = format.marker();
        if let Some(at) = self.buffer.find(marker) {
            let rest = self.buffer.split_off(at + marker.len());
            let mut text = std::mem::replace(&mut self.buffer, rest);
            text.truncate(at);
            self.speak(text.trim_end(), pieces);
            match format {
                ToolFormat::Hermes | ToolFormat::Llama3 => self.begin_object(marker),
                ToolFormat::DeepSeekV3 | ToolFormat::DeepSeekV31 => {
                    self.raw = marker.to_owned();
                    self.state = State::Between;
                }
            }
            return true;
        }
        let keep = overlap(&self.buffer, marker, "");
        let certain = self.buffer[..self.buffer.len() - keep].trim_end().len();
        if certain > 0 {
            let rest = self.buffer.split_off(certain);
            let text = std::mem::replace(&mut self.buffer, rest);
            self.speak(&text, pieces);
        }
        false
    }

    fn begin_object(&mut self, opened_with: &str) {
        self.raw = opened_with.to_owned();
        self.state = State::Object(Box::new(CallObject::new()));
    }

    fn object(&mut self, pieces: &mut Vec<Piece>) -> bool {
        let State::Object(object) = &mut self.state else { return false };
        let is_llama = self.options.tools == Some(ToolFormat::Llama3);
        let (mut taken, mut outcome) = (0, None);
        let mut found = Vec::new();
        for (at, character) in self.buffer.char_indices() {
            let result = object.push(character, &mut found);
            // Without markup, an object is a call only if it names a tool.
            let foreign =
                is_llama && object.name().is_some_and(|name| !self.options.names.iter().any(|known| known == name));
            if result.is_err() || foreign {
                outcome = Some(false);
                break;
            }
            taken = at + character.len_utf8();
            if found.last() == Some(&Found::End) {
                outcome = Some(true);
                break;
            }
        }
        let begun = object.begun();
        let text: String = self.buffer.drain(..taken).collect();
        if outcome == Some(false) && !begun {
            // No call: all of it is content, and no call begins within it.
            let text = std::mem::take(&mut self.raw) + &text;
            self.speak(&text, pieces);
            self.state = State::Content;
            return true;
        }
        self.raw.push_str(&text);
        self.call_pieces(found, pieces);
        match outcome {
            None => false,
            Some(true) => {
                self.raw.clear();
                self.state = if is_llama { State::ObjectNext } else { State::ObjectEnd };
                true
            }
            Some(false) => {
                self.raw.clear();
                self.state = State::Content;
                true
            }
        }
    }

    fn call_pieces(&mut self, found: Vec<Found>, pieces: &mut Vec<Piece>) {
        let mut arguments = String::new();
        for part in found {
            match part {
                Found::Name(name) => self.begin_call(name, pieces),
                Found::Arguments(text) => arguments.push_str(&text),
                Found::End => {}
            }
        }
        self.argue(arguments, pieces);
    }

    fn begin_call(&mut self, name: String, pieces: &mut Vec<Piece>) {
        pieces.push(Piece::CallBegin { index: self.calls, name });
        self.calls += 1;
    }

    fn argue(&mut self, text: String, pieces: &mut Vec<Piece>) {
        if let (false, Some(index)) = (text.is_empty(), self.calls.checked_sub(1)) {
            pieces.push(Piece::CallArguments { index, text });
        }
    }

    /// Arguments that may be the first of a call of this tool; one without any has an object without entries.
    fn argue_as(&mut self, name: Option<String>, text: String, pieces: &mut Vec<Piece>) {
        let text = if name.is_some() && text.is_empty() { NO_ARGUMENTS.to_owned() } else { text };
        if let Some(name) = name {
            self.begin_call(name, pieces);
        }
        self.argue(text, pieces);
    }

    /// Skips white space and a tag, which may be missing.
    fn skip_tag(&mut self, tag: &str, next: State) -> bool {
        let text = self.buffer.trim_start();
        if let Some(rest) = text.strip_prefix(tag) {
            self.buffer = rest.to_owned();
        } else if tag.starts_with(text) {
            return false;
        }
        self.state = next;
        true
    }

    fn next_object(&mut self) -> bool {
        let text = self.buffer.trim_start();
        match text.strip_prefix(';') {
            _ if text.is_empty() => return false,
            Some(rest) => {
                self.buffer = rest.to_owned();
                self.begin_object(";");
            }
            None => {
                self.spoken = true;
                self.state = State::Content;
            }
        }
        true
    }

    fn between(&mut self) -> bool {
        let text = self.buffer.trim_start();
        if let Some(rest) = text.strip_prefix(DEEPSEEK_CALL_BEGIN) {
            self.raw.push_str(DEEPSEEK_CALL_BEGIN);
            self.buffer = rest.to_owned();
            self.state = State::Header;
        } else if let Some(rest) = text.strip_prefix(DEEPSEEK_CALLS_END) {
            self.buffer = rest.to_owned();
            self.raw.clear();
            self.state = State::Content;
        } else if DEEPSEEK_CALL_BEGIN.starts_with(text) || DEEPSEEK_CALLS_END.starts_with(text) {
            return false;
        } else {
            // Calls announced and none made: what follows is content.
            self.raw.clear();
            self.state = State::Content;
        }
        true
    }

    fn header(&mut self, pieces: &mut Vec<Piece>) -> bool {
        // The kind is told apart by what it is: `function` in V3, the name itself in V3.1.
        let complete = self.buffer.split_once(DEEPSEEK_SEPARATOR).and_then(|(kind, rest)| {
            if kind.trim() != "function" {
                return Some((kind.trim().to_owned(), rest.to_owned()));
            }
            let end = rest.find(['\n', '{'])?;
            Some((rest[..end].trim().to_owned(), rest[end..].to_owned()))
        });
        let header = |rest: &String| self.buffer.len() - rest.len();
        match complete {
            Some((name, rest)) if !name.is_empty() && header(&rest) <= MAX_HEADER => {
                self.buffer = rest;
                self.raw.clear();
                self.state = State::BeforeArguments(name);
                true
            }
            None if self.buffer.len() <= MAX_HEADER => false,
            _ => {
                let text = std::mem::take(&mut self.raw);
                self.speak(&text, pieces);
                self.state = State::Content;
                true
            }
        }
    }

    fn before_arguments(&mut self, pieces: &mut Vec<Piece>) -> bool {
        let State::BeforeArguments(name) = &mut self.state else { return false };
        let mut text = self.buffer.trim_start();
        for fence in ["```json", "```"] {
            if let Some(rest) = text.strip_prefix(fence) {
                text = rest.trim_start();
                break;
            }
            if fence.starts_with(text) {
                return false;
            }
        }
        if text.is_empty() {
            return false;
        }
        let name = std::mem::take(name);
        let is_object = text.starts_with('{');
        self.buffer = text.to_owned();
        if is_object {
            self.begin_call(name, pieces);
            self.state = State::Arguments(Span::default());
        } else {
            self.state = State::RawArguments(Some(name));
        }
        true
    }

    fn arguments(&mut self, pieces: &mut Vec<Piece>) -> bool {
        let State::Arguments(span) = &mut self.state else { return false };
        let end = self.buffer.char_indices().find(|(_, character)| span.push(*character) != Step::Inside);
        let taken = end.map_or(self.buffer.len(), |(at, character)| at + character.len_utf8());
        let text: String = self.buffer.drain(..taken).collect();
        self.argue(text, pieces);
        if end.is_some() {
            self.state = State::CallEnd;
        }
        end.is_some()
    }

    fn raw_arguments(&mut self, pieces: &mut Vec<Piece>) -> bool {
        let State::RawArguments(name) = &mut self.state else { return false };
        let mut name = name.take();
        let end = self.buffer.find(DEEPSEEK_CALL_END);
        let keep = overlap(&self.buffer, DEEPSEEK_CALL_END, "");
        let certain = self.buffer[..end.unwrap_or(self.buffer.len() - keep)].trim_end().len();
        let text: String = self.buffer.drain(..certain).collect();
        if end.is_some() || !text.is_empty() {
            self.argue_as(name.take(), text, pieces);
        }
        self.state = if end.is_some() { State::CallEnd } else { State::RawArguments(name) };
        end.is_some()
    }

    fn call_end(&mut self) -> bool {
        let Some(at) = self.buffer.find(DEEPSEEK_CALL_END) else {
            return false;
        };
        self.buffer.drain(..at + DEEPSEEK_CALL_END.len());
        self.state = State::Between;
        true
    }

    fn drop_blank(&mut self) {
        let blank = self.buffer.len() - self.buffer.trim_start().len();
        self.buffer.drain(..blank);
    }

    fn reason(&self, text: &str, pieces: &mut Vec<Piece>) {
        if !text.is_empty() {
            pieces.push(Piece::Reasoning(text.to_owned()));
        }
    }

    fn speak(&mut self, text: &str, pieces: &mut Vec<Piece>) {
        if !text.is_empty() {
            self.spoken |= !text.trim().is_empty();
            pieces.push(Piece::Content(text.to_owned()));
        }
    }
}

/// Whether a text may have been the beginning of `marker`, before the text `next`, of which nothing is known beyond its end.
fn goes_on(marker: &str, begun: &str, next: &str) -> bool {
    marker.strip_prefix(begun).is_some_and(|rest| rest.starts_with(next) || next.starts_with(rest))
}

/// Bytes of the longest proper prefix of `marker` that `text` ends with and that goes on with `next`.
fn overlap(text: &str, marker: &str, next: &str) -> usize {
    let most = text.len().min(marker.len() - 1);
    let fits = |n: usize| text.ends_with(&marker[..n]) && goes_on(marker, &marker[..n], next);
    (1..=most).rev().find(|n| marker.is_char_boundary(*n) && fits(*n)).unwrap_or(0)
}
