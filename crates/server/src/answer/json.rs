//! JSON that is still being written: where a value ends, and an object with a tool's name and arguments.

/// Finds the end of one JSON value, character by character. It checks balance, not grammar.
#[derive(Debug, Clone, Default)]
pub(super) struct Span {
    depth: usize,
    in_text: bool,
    escaped: bool,
    /// A number, true, false or null.
    bare: bool,
}

/// What a character was to a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Part of it; it goes on.
    Inside,
    /// Its last character.
    Last,
    /// The first one after it.
    After,
}

impl Span {
    /// Takes the next character; white space before the value is the caller's matter.
    pub(super) fn push(&mut self, character: char) -> Step {
        if self.in_text {
            match character {
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                '"' => {
                    self.in_text = false;
                    return if self.depth == 0 { Step::Last } else { Step::Inside };
                }
                _ => {}
            }
            return Step::Inside;
        }
        if self.bare {
            let ends = matches!(character, ',' | '}' | ']') || character.is_whitespace();
            return if ends { Step::After } else { Step::Inside };
        }
        match character {
            '"' => self.in_text = true,
            '{' | '[' => self.depth += 1,
            '}' | ']' => {
                self.depth = self.depth.saturating_sub(1);
                if self.depth == 0 {
                    return Step::Last;
                }
            }
            _ if self.depth == 0 => self.bare = true,
            _ => {}
        }
        Step::Inside
    }
}

/// What an object reader has found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Found {
    /// The tool's name: the call is certain.
    Name(String),
    /// More of its arguments.
    Arguments(String),
    /// The object ended.
    End,
}

/// The text is no call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NoCall;

#[derive(Debug, Clone)]
enum State {
    Open,
    KeyOrEnd,
    Key,
    Colon,
    BeforeValue,
    Value,
    CommaOrEnd,
    Done,
}

/// Reads `{"name": …, "arguments": {…}}` with its entries in any order, others passed over, and hands arguments on as they come.
#[derive(Debug, Clone)]
pub(super) struct CallObject {
    state: State,
    span: Span,
    /// The key or value being read.
    text: String,
    key: String,
    name: Option<String>,
    /// Arguments that came before the name.
    early: Option<String>,
    /// Arguments are handed on as they come.
    passing: bool,
    begun: bool,
    argued: bool,
}

impl CallObject {
    pub(super) fn new() -> Self {
        Self {
            state: State::Open,
            span: Span::default(),
            text: String::new(),
            key: String::new(),
            name: None,
            early: None,
            passing: false,
            begun: false,
            argued: false,
        }
    }

    /// Whether a [`Found::Name`] was handed out.
    pub(super) const fn begun(&self) -> bool {
        self.begun
    }

    /// Takes a character; pushes what it completes.
    pub(super) fn push(&mut self, character: char, found: &mut Vec<Found>) -> Result<(), NoCall> {
        let blank = character.is_whitespace();
        match self.state {
            State::Open if blank => {}
            State::Open if character == '{' => self.state = State::KeyOrEnd,
            State::KeyOrEnd | State::Colon | State::BeforeValue | State::CommaOrEnd if blank => {}
            State::KeyOrEnd if character == '}' => self.end(found)?,
            State::KeyOrEnd if character == '"' => {
                self.begin_text(character);
                self.state = State::Key;
            }
            State::Key => {
                self.text.push(character);
                if self.span.push(character) == Step::Last {
                    self.key = serde_json::from_str(&self.text).map_err(|_| NoCall)?;
                    self.state = State::Colon;
                }
            }
            State::Colon if character == ':' => self.state = State::BeforeValue,
            State::BeforeValue => {
                self.begin_text(character);
                // Arguments that are a text hold JSON once more escaped: they are handed on when complete.
                self.passing = self.is_arguments() && self.name.is_some() && matches!(character, '{' | '[');
                if self.passing {
                    self.begin(found);
                    self.argued = true;
                    found.push(Found::Arguments(character.to_string()));
                }
                self.state = State::Value;
            }
            State::Value => match self.span.push(character) {
                Step::Inside => self.take(character, found),
                Step::Last => {
                    self.take(character, found);
                    self.end_value(found)?;
                    self.state = State::CommaOrEnd;
                }
                Step::After => {
                    self.end_value(found)?;
                    self.state = State::CommaOrEnd;
                    if !blank {
                        return self.push(character, found);
                    }
                }
            },
            State::CommaOrEnd if character == ',' => self.state = State::KeyOrEnd,
            State::CommaOrEnd if character == '}' => self.end(found)?,
            _ => return Err(NoCall),
        }
        Ok(())
    }

    fn is_arguments(&self) -> bool {
        matches!(self.key.as_str(), "arguments" | "parameters")
    }

    fn begin_text(&mut self, character: char) {
        self.text.clear();
        self.text.push(character);
        self.span = Span::default();
        self.span.push(character);
    }

    fn take(&mut self, character: char, found: &mut Vec<Found>) {
        if self.passing {
            found.push(Found::Arguments(character.to_string()));
        } else {
            self.text.push(character);
        }
    }

    fn begin(&mut self, found: &mut Vec<Found>) {
        if let (false, Some(name)) = (self.begun, &self.name) {
            found.push(Found::Name(name.clone()));
            self.begun = true;
        }
    }

    fn end_value(&mut self, found: &mut Vec<Found>) -> Result<(), NoCall> {
        if std::mem::take(&mut self.passing) {
            return Ok(());
        }
        if self.key == "name" && self.name.is_none() {
            let name: String = serde_json::from_str(&self.text).map_err(|_| NoCall)?;
            if name.is_empty() {
                return Err(NoCall);
            }
            self.name = Some(name);
            if let Some(arguments) = self.early.take() {
                self.begin(found);
                found.push(Found::Arguments(arguments));
            }
        } else if self.is_arguments() && !self.argued {
            let text = std::mem::take(&mut self.text);
            let arguments = match serde_json::from_str::<String>(&text) {
                Ok(inner) => inner,
                Err(_) if text == "null" => "{}".to_owned(),
                Err(_) => text,
            };
            self.argued = true;
            if self.name.is_some() {
                self.begin(found);
                found.push(Found::Arguments(arguments));
            } else {
                self.early = Some(arguments);
            }
        }
        Ok(())
    }

    fn end(&mut self, found: &mut Vec<Found>) -> Result<(), NoCall> {
        if self.name.is_none() {
            return Err(NoCall);
        }
        self.begin(found);
        if !self.argued {
            found.push(Found::Arguments("{}".to_owned()));
        }
        self.state = State::Done;
        found.push(Found::End);
        Ok(())
    }

    /// The tool's name as far as it is known, before it is certain that this is a call.
    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<(String, String), NoCall> {
        let (mut object, mut found) = (CallObject::new(), Vec::new());
        for character in text.chars() {
            object.push(character, &mut found)?;
        }
        assert_eq!(found.last(), Some(&Found::End), "{text}");
        let mut result = (String::new(), String::new());
        for part in found {
            match part {
                Found::Name(name) => result.0 = name,
                Found::Arguments(text) => result.1.push_str(&text),
                Found::End => {}
            }
        }
        Ok(result)
    }

    #[test]
    fn entries_in_any_order_and_form() {
        let expected = |arguments: &str| Ok(("f".to_owned(), arguments.to_owned()));
        for (text, arguments) in [
            (r#"{"name": "f", "arguments": {"a": "}\"{", "b": [1, {}]}}"#, r#"{"a": "}\"{", "b": [1, {}]}"#),
            (r#"{"arguments": {"a": 1}, "name": "f"}"#, r#"{"a": 1}"#),
            (r#"{"parameters": {}, "type": "function", "name": "f", "id": 7}"#, "{}"),
            (r#" {"name": "f"}"#, "{}"),
            (r#"{"name": "f", "arguments": null}"#, "{}"),
            (r#"{"name": "f", "arguments": "{\"a\": 1}"}"#, r#"{"a": 1}"#),
            (r#"{"name":"f","id":1,"arguments":{}}"#, "{}"),
        ] {
            assert_eq!(read(text), expected(arguments), "{text}");
        }
    }

    #[test]
    fn other_texts_are_no_calls() {
        for text in [r#"{"a": 1}"#, "{}", "[1]", r#"{"name": 1}"#, r#"{"name": ""}"#, r#"{"name": "f" "x"}"#, "x"] {
            assert_eq!(read(text), Err(NoCall), "{text}");
        }
    }
}
