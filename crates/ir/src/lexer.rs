//! Tokens of the text form, with positions for messages.

use crate::IrError;

/// A position in the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mark(usize);

/// Walks over a text.
#[derive(Debug)]
pub(crate) struct Lexer<'t> {
    text: &'t str,
    at: usize,
}

impl<'t> Lexer<'t> {
    pub(crate) const fn new(text: &'t str) -> Self {
        Self { text, at: 0 }
    }

    fn rest(&self) -> &'t str {
        self.text.get(self.at..).unwrap_or_default()
    }

    /// Skips spaces and comments.
    fn skip(&mut self) {
        loop {
            let rest = self.rest();
            let trimmed = rest.trim_start();
            self.at += rest.len() - trimmed.len();
            if !trimmed.starts_with("//") {
                return;
            }
            self.at += trimmed.find('\n').unwrap_or(trimmed.len());
        }
    }

    pub(crate) const fn mark(&self) -> Mark {
        Mark(self.at)
    }

    pub(crate) fn fault_at(&self, mark: Mark, expected: &str, found: &str) -> IrError {
        let before = self.text.get(..mark.0).unwrap_or(self.text);
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        let short: String = found.chars().take(40).collect();
        IrError::Parse { line, column, expected: expected.to_owned(), found: short }
    }

    fn fault(&self, expected: &str) -> IrError {
        let found = self.rest().lines().next().unwrap_or_default();
        self.fault_at(self.mark(), expected, if found.is_empty() { "the end" } else { found })
    }

    /// Whether the next characters are these.
    pub(crate) fn at(&mut self, token: &str) -> bool {
        self.skip();
        self.rest().starts_with(token)
    }
    pub(crate) fn at_digit(&mut self) -> bool {
        self.skip();
        self.rest().starts_with(|c: char| c.is_ascii_digit())
    }
    pub(crate) fn eat(&mut self, token: &str) -> bool {
        let found = self.at(token);
        if found {
            self.at += token.len();
        }
        found
    }
    pub(crate) fn expect(&mut self, token: &str) -> Result<(), IrError> {
        if self.eat(token) { Ok(()) } else { Err(self.fault(&format!("`{token}`"))) }
    }
    pub(crate) fn end(&mut self) -> Result<(), IrError> {
        self.skip();
        if self.rest().is_empty() { Ok(()) } else { Err(self.fault("the end of the text")) }
    }

    fn take_while(&mut self, accept: impl Fn(char) -> bool) -> &'t str {
        let rest = self.rest();
        let length = rest.find(|c| !accept(c)).unwrap_or(rest.len());
        self.at += length;
        rest.get(..length).unwrap_or_default()
    }
    fn peek_word(&mut self) -> &'t str {
        self.skip();
        let start = self.at;
        let word = self.take_while(|c| c.is_ascii_alphanumeric() || c == '_');
        self.at = start;
        word
    }
    pub(crate) fn any_word(&mut self) -> Result<&'t str, IrError> {
        let word = self.peek_word();
        if word.is_empty() {
            return Err(self.fault("a name"));
        }
        self.at += word.len();
        Ok(word)
    }
    pub(crate) fn eat_word(&mut self, wanted: &str) -> bool {
        let found = self.peek_word() == wanted;
        if found {
            self.at += wanted.len();
        }
        found
    }
    pub(crate) fn word(&mut self, wanted: &str) -> Result<(), IrError> {
        if self.eat_word(wanted) { Ok(()) } else { Err(self.fault(&format!("`{wanted}`"))) }
    }

    pub(crate) fn integer(&mut self) -> Result<u64, IrError> {
        self.skip();
        let mark = self.mark();
        let digits = self.take_while(|c| c.is_ascii_digit());
        digits.parse().map_err(|_| self.fault_at(mark, "an integer below 2^64", digits))
    }
    pub(crate) fn small(&mut self) -> Result<u32, IrError> {
        self.skip();
        let mark = self.mark();
        let n = self.integer()?;
        u32::try_from(n).map_err(|_| self.fault_at(mark, "an integer below 2^32", &n.to_string()))
    }
    /// `%7`
    pub(crate) fn value(&mut self) -> Result<(Mark, u32), IrError> {
        self.skip();
        let mark = self.mark();
        self.expect("%")?;
        Ok((mark, self.small()?))
    }

    /// A quoted string with the escapes of Rust's debug form.
    pub(crate) fn string(&mut self) -> Result<String, IrError> {
        self.expect("\"")?;
        let mut text = String::new();
        loop {
            text.push_str(self.take_while(|c| c != '"' && c != '\\' && c != '\n'));
            if self.rest().starts_with('"') {
                self.at += 1;
                return Ok(text);
            }
            if !self.rest().starts_with('\\') {
                return Err(self.fault("the closing quote of a string"));
            }
            self.at += 1;
            text.push(self.escape()?);
        }
    }

    fn escape(&mut self) -> Result<char, IrError> {
        let mark = self.mark();
        let mut rest = self.rest().chars();
        let kind = rest.next().ok_or_else(|| self.fault("an escape"))?;
        self.at += kind.len_utf8();
        Ok(match kind {
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            '0' => '\0',
            '"' | '\\' | '\'' => kind,
            'u' => {
                self.expect("{")?;
                let digits = self.take_while(|c| c.is_ascii_hexdigit());
                let code = u32::from_str_radix(digits, 16).ok().and_then(char::from_u32);
                let code = code.ok_or_else(|| self.fault_at(mark, "the code of a character", digits))?;
                self.expect("}")?;
                code
            }
            _ => return Err(self.fault_at(mark, "an escape", &kind.to_string())),
        })
    }

    /// `{key=value, ..}`
    pub(crate) fn settings(&mut self) -> Result<Settings<'t>, IrError> {
        let mut settings = Settings { list: Vec::new() };
        self.expect("{")?;
        while !self.eat("}") {
            if !settings.list.is_empty() {
                self.expect(",")?;
            }
            let key = self.any_word()?;
            self.expect("=")?;
            self.skip();
            let mark = self.mark();
            let value = self.setting()?;
            settings.list.push(Setting { key, mark, value });
            if settings.list.len() > 32 {
                return Err(self.fault_at(mark, "at most 32 attributes", "more"));
            }
        }
        Ok(settings)
    }

    fn setting(&mut self) -> Result<Raw<'t>, IrError> {
        if self.at("\"") {
            return Ok(Raw::Text(self.string()?));
        }
        if self.eat("[") {
            let mut list = Vec::new();
            while !self.eat("]") {
                if !list.is_empty() {
                    self.expect(",")?;
                }
                list.push(self.bare()?);
            }
            return Ok(Raw::List(list));
        }
        Ok(Raw::Word(self.bare()?))
    }

    /// A name, a number or a reference.
    fn bare(&mut self) -> Result<&'t str, IrError> {
        self.skip();
        let word =
            self.take_while(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-' | '+' | '@' | '$' | '#'));
        if word.is_empty() { Err(self.fault("a value")) } else { Ok(word) }
    }
}

#[derive(Debug)]
enum Raw<'t> {
    Word(&'t str),
    List(Vec<&'t str>),
    Text(String),
}

/// One attribute.
#[derive(Debug)]
pub(crate) struct Setting<'t> {
    key: &'t str,
    pub(crate) mark: Mark,
    value: Raw<'t>,
}

impl<'t> Setting<'t> {
    fn word(&self, lexer: &Lexer<'_>) -> Result<&'t str, IrError> {
        match self.value {
            Raw::Word(word) => Ok(word),
            _ => Err(lexer.fault_at(self.mark, &format!("one value for {}", self.key), "a list or a string")),
        }
    }
    fn parsed<T: std::str::FromStr>(&self, lexer: &Lexer<'_>, what: &str) -> Result<T, IrError> {
        let word = self.word(lexer)?;
        word.parse().map_err(|_| lexer.fault_at(self.mark, &format!("{what} for {}", self.key), word))
    }
    pub(crate) fn list(&self, lexer: &Lexer<'_>) -> Result<&[&'t str], IrError> {
        match &self.value {
            Raw::List(list) => Ok(list),
            _ => Err(lexer.fault_at(self.mark, &format!("a list for {}", self.key), "one value")),
        }
    }
    pub(crate) fn text(self, lexer: &Lexer<'_>) -> Result<String, IrError> {
        match self.value {
            Raw::Text(text) => Ok(text),
            _ => Err(lexer.fault_at(self.mark, &format!("a string for {}", self.key), "something else")),
        }
    }
    pub(crate) fn number(&self, lexer: &Lexer<'_>) -> Result<u32, IrError> {
        self.parsed(lexer, "an integer below 2^32")
    }
    pub(crate) fn reference(&self, lexer: &Lexer<'_>, sigil: char) -> Result<u32, IrError> {
        let word = self.word(lexer)?;
        word.strip_prefix(sigil)
            .and_then(|digits| digits.parse().ok())
            .ok_or_else(|| lexer.fault_at(self.mark, &format!("{sigil} and a number for {}", self.key), word))
    }
}

/// The attributes of a node, taken one by one.
#[derive(Debug)]
pub(crate) struct Settings<'t> {
    list: Vec<Setting<'t>>,
}

impl<'t> Settings<'t> {
    pub(crate) fn has(&self, key: &str) -> bool {
        self.list.iter().any(|s| s.key == key)
    }
    pub(crate) fn take(&mut self, key: &str) -> Option<Setting<'t>> {
        let at = self.list.iter().position(|s| s.key == key)?;
        Some(self.list.remove(at))
    }
    pub(crate) fn required(&mut self, lexer: &Lexer<'_>, key: &str) -> Result<Setting<'t>, IrError> {
        self.take(key).ok_or_else(|| lexer.fault_at(lexer.mark(), &format!("attribute {key} before here"), "none"))
    }
    pub(crate) fn number(&mut self, lexer: &Lexer<'_>, key: &str) -> Result<u32, IrError> {
        self.required(lexer, key)?.number(lexer)
    }
    pub(crate) fn float(&mut self, lexer: &Lexer<'_>, key: &str) -> Result<f64, IrError> {
        let setting = self.required(lexer, key)?;
        let x: f64 = setting.parsed(lexer, "a number")?;
        if x.is_finite() {
            Ok(x)
        } else {
            Err(lexer.fault_at(setting.mark, &format!("a finite number for {key}"), "another"))
        }
    }
    pub(crate) fn flag(&mut self, lexer: &Lexer<'_>, key: &str) -> Result<bool, IrError> {
        self.required(lexer, key)?.parsed(lexer, "true or false")
    }
    pub(crate) fn flags(&mut self, lexer: &Lexer<'_>, key: &str) -> Result<Vec<bool>, IrError> {
        let setting = self.required(lexer, key)?;
        let flags = setting.list(lexer)?.iter().map(|word| match *word {
            "0" => Ok(false),
            "1" => Ok(true),
            other => Err(lexer.fault_at(setting.mark, &format!("0 or 1 in {key}"), other)),
        });
        flags.collect()
    }
    pub(crate) fn named<T>(
        &mut self,
        lexer: &Lexer<'_>,
        key: &str,
        find: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, IrError> {
        let setting = self.required(lexer, key)?;
        let word = setting.word(lexer)?;
        find(word).ok_or_else(|| lexer.fault_at(setting.mark, &format!("a known name for {key}"), word))
    }
    /// Complains about what nobody took.
    pub(crate) fn finish(&self, lexer: &Lexer<'_>) -> Result<(), IrError> {
        match self.list.first() {
            None => Ok(()),
            Some(setting) => Err(lexer.fault_at(setting.mark, "an attribute of this op", setting.key)),
        }
    }
}
