//! Where Jinja templates see Python: how values print, `tojson` as `json.dumps`, `strftime_now`,
//! `raise_exception`.

use std::fmt;
use std::io;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter};

/// Values are nested no deeper than this when printed; a template can build any depth.
const DEEPEST: usize = 100;

/// The words of `raise_exception`.
#[derive(Debug)]
pub(super) struct Raised(pub(super) String);

impl fmt::Display for Raised {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// Adds what Hugging Face adds to a Jinja environment.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(|output, state, value| {
        let text = match value.kind() {
            ValueKind::None => Some("None".to_owned()),
            ValueKind::Bool => Some(python_bool(value).to_owned()),
            ValueKind::Seq | ValueKind::Map => Some(representation(state, value)?),
            ValueKind::Number if value.as_i64().is_none() && value.as_usize().is_none() => number(value),
            _ => None,
        };
        let written = match text {
            Some(text) => output.write_str(&text),
            None => write!(output, "{value}"),
        };
        written.map_err(Error::from)
    });
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
    });
}

/// `strftime_now(format)` at a fixed time, or at the time of the call and in local time.
pub(super) fn strftime_now(format: &str, now: Option<i64>) -> Result<String, Error> {
    let time = match now {
        Some(seconds) => Timestamp::from_second(seconds)
            .map(|time| time.to_zoned(TimeZone::UTC))
            .map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))?,
        None => jiff::Zoned::now(),
    };
    jiff::fmt::strtime::format(format, &time)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {error}")))
}

fn python_bool(value: &Value) -> &'static str {
    if value.is_true() { "True" } else { "False" }
}

fn number(value: &Value) -> Option<String> {
    f64::try_from(value.clone()).ok().map(python_float)
}

/// A float as Python prints it.
fn python_float(value: f64) -> String {
    let magnitude = value.abs();
    if !value.is_finite() {
        return if value.is_nan() {
            "nan"
        } else if value > 0.0 {
            "inf"
        } else {
            "-inf"
        }
        .to_owned();
    }
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{value:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let exponent: i32 = exponent.parse().unwrap_or_default();
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.unsigned_abs());
    }
    format!("{value:?}")
}

/// A list or a dictionary as Python prints it.
fn representation(state: &State<'_, '_>, value: &Value) -> Result<String, Error> {
    let mut text = String::new();
    write_representation(&mut text, state, value, 0)?;
    Ok(text)
}

fn write_representation(text: &mut String, state: &State<'_, '_>, value: &Value, depth: usize) -> Result<(), Error> {
    visit(state, depth)?;
    match value.kind() {
        ValueKind::None => text.push_str("None"),
        ValueKind::Bool => text.push_str(python_bool(value)),
        ValueKind::String => write_python_string(text, value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            text.push('[');
            for (index, item) in value.try_iter()?.enumerate() {
                if index > 0 {
                    text.push_str(", ");
                }
                write_representation(text, state, &item, depth + 1)?;
            }
            text.push(']');
        }
        ValueKind::Map => {
            text.push('{');
            for (index, key) in value.try_iter()?.enumerate() {
                if index > 0 {
                    text.push_str(", ");
                }
                write_representation(text, state, &key, depth + 1)?;
                text.push_str(": ");
                write_representation(text, state, &value.get_item(&key)?, depth + 1)?;
            }
            text.push('}');
        }
        ValueKind::Number if value.as_i64().is_none() => {
            text.push_str(&number(value).unwrap_or_else(|| value.to_string()));
        }
        _ => text.push_str(&value.to_string()),
    }
    Ok(())
}

fn write_python_string(text: &mut String, value: &str) {
    let quote = if value.contains('\'') && !value.contains('"') { '"' } else { '\'' };
    text.push(quote);
    for character in value.chars() {
        match character {
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\\' => text.push_str("\\\\"),
            _ if character == quote => text.extend(['\\', quote]),
            _ => text.push(character),
        }
    }
    text.push(quote);
}

/// `tojson` as Hugging Face defines it: `json.dumps` with `ensure_ascii=False` unless asked, and no
/// escaping for HTML.
#[expect(clippy::needless_pass_by_value, reason = "the signature that minijinja calls")]
fn tojson(state: &State<'_, '_>, value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<Value> = options.get("indent")?;
    let style = Style {
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        separators: options.get::<Option<Vec<String>>>("separators")?,
    };
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(indent)?.min(64)),
        }),
    };
    let failed = |error: serde_json::Error| Error::new(ErrorKind::InvalidOperation, format!("tojson: {error}"));
    check_size(state, value, 0)?;
    let mut value = serde_json::to_value(value).map_err(failed)?;
    if sort_keys {
        value.sort_all_objects();
    }
    let mut bytes = Vec::new();
    match &indent {
        None => {
            let formatter = Python { inner: CompactFormatter, style: &style, indented: false };
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, formatter)).map_err(failed)?;
        }
        Some(indent) => {
            let inner = PrettyFormatter::with_indent(indent.as_bytes());
            let formatter = Python { inner, style: &style, indented: true };
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, formatter)).map_err(failed)?;
        }
    }
    state.consume_fuel((bytes.len() / 64) as u64)?;
    let text = String::from_utf8(bytes).map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))?;
    Ok(Value::from(text))
}

/// Refuses values that would overflow the stack of a recursive writer, or never end.
fn check_size(state: &State<'_, '_>, value: &Value, depth: usize) -> Result<(), Error> {
    visit(state, depth)?;
    match value.kind() {
        ValueKind::Seq => value.try_iter()?.try_for_each(|item| check_size(state, &item, depth + 1)),
        ValueKind::Map => value.try_iter()?.try_for_each(|key| check_size(state, &value.get_item(&key)?, depth + 1)),
        _ => Ok(()),
    }
}

/// Pays for one value within a value. A few steps can make a value that holds itself many times
/// over, so its size on paper has no bound of its own.
fn visit(state: &State<'_, '_>, depth: usize) -> Result<(), Error> {
    if depth > DEEPEST {
        return Err(Error::new(ErrorKind::InvalidOperation, format!("a value is nested deeper than {DEEPEST} levels")));
    }
    state.consume_fuel(1)
}

struct Style {
    ascii: bool,
    /// Between items, and between key and value.
    separators: Option<Vec<String>>,
}

impl Style {
    fn separator(&self, index: usize) -> Option<&str> {
        self.separators.as_ref()?.get(index).map(String::as_str)
    }
}

/// JSON with Python's spaces, floats and escapes.
struct Python<'a, F> {
    inner: F,
    style: &'a Style,
    indented: bool,
}

impl<F: Formatter> Python<'_, F> {
    fn between<W: ?Sized + io::Write>(&self, writer: &mut W, first: bool) -> io::Result<()> {
        match (first, self.style.separator(0)) {
            (true, _) => Ok(()),
            (false, Some(separator)) => writer.write_all(separator.as_bytes()),
            (false, None) => writer.write_all(b", "),
        }
    }
}

impl<F: Formatter> Formatter for Python<'_, F> {
    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(python_float(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        if !self.style.ascii {
            return writer.write_all(fragment.as_bytes());
        }
        for unit in fragment.encode_utf16() {
            match u8::try_from(unit) {
                Ok(byte) if byte.is_ascii() => writer.write_all(&[byte])?,
                _ => write!(writer, "\\u{unit:04x}")?,
            }
        }
        Ok(())
    }

    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.inner.begin_array(writer)
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.inner.end_array(writer)
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if self.indented { self.inner.begin_array_value(writer, first) } else { self.between(writer, first) }
    }

    fn end_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.inner.end_array_value(writer)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.inner.begin_object(writer)
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.inner.end_object(writer)
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if self.indented { self.inner.begin_object_key(writer, first) } else { self.between(writer, first) }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.style.separator(1).unwrap_or(": ").as_bytes())
    }

    fn end_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.inner.end_object_value(writer)
    }
}

#[cfg(test)]
mod tests {
    use super::python_float;

    #[test]
    fn floats_print_as_in_python() {
        for (value, expected) in [
            (0.0, "0.0"),
            (-1.0, "-1.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e100, "1e+100"),
            (f64::INFINITY, "inf"),
        ] {
            assert_eq!(python_float(value), expected);
        }
    }
}
