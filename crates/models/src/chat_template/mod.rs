//! Conversations to prompts, by the model's own Jinja template.
//!
//! In: the template that a model carries (GGUF `tokenizer.chat_template`, `tokenizer_config.json`,
//! `chat_template.jinja`), messages, tools. Out: the text to encode with
//! [`EncodeOptions::TEMPLATE`](crate::tokenizer::EncodeOptions::TEMPLATE). The environment is that
//! of the Hugging Face library: `trim_blocks`, `lstrip_blocks`, loop controls, Python's methods.
//!
//! Invariants: a template is untrusted. It ends within [`Limits::fuel`] steps (which bound its
//! memory too), its output within [`Limits::output_bytes`], its recursion within
//! [`Limits::recursion`], all within [`Limits::time`], or the result is a [`TemplateError`]. It reads no file and no variable of
//! the process. Callers' extra variables never replace messages, tools or the generation prompt.

mod error;
mod python;
mod source;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, ErrorKind, UndefinedBehavior, Value, context};
use serde_json::{Map, Value as Json};

pub use error::TemplateError;
pub use source::{SpecialTokens, TemplateSource};

/// Variables that only [`TemplateInput`]'s own fields set.
const RESERVED: &[&str] = &[
    "messages",
    "tools",
    "add_generation_prompt",
    "chat_template",
    "tokenize",
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "raise_exception",
    "strftime_now",
];

/// Longest template that is read. Those of real models have some 10 KB.
const SOURCE_BYTES: usize = 128 << 10;

/// Stack for compiling and rendering. A template of this length, in this many steps, can nest
/// expressions and values some 300,000 deep, and freeing them is recursive.
const STACK_BYTES: usize = 256 << 20;

/// What a template may use up.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Steps; each step may create about 64 bytes.
    pub fuel: u64,
    /// Bytes of output.
    pub output_bytes: usize,
    /// Depth of calls.
    pub recursion: usize,
    /// Time. The engine counts no steps while it prints or compares one value, and a template can
    /// make a value that holds itself many times over; only time ends that.
    pub time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { fuel: 2_000_000, output_bytes: 64 << 20, recursion: 100, time: Duration::from_secs(10) }
    }
}

/// What is rendered.
#[derive(Debug, Clone, Default)]
pub struct TemplateInput<'a> {
    /// The conversation, as objects of the chat completions API.
    pub messages: &'a [Json],
    /// Tools that the model may call.
    pub tools: Option<&'a [Json]>,
    /// End with the beginning of the answer.
    pub add_generation_prompt: bool,
    /// Further variables, as `enable_thinking`.
    pub kwargs: Option<&'a Map<String, Json>>,
    /// The time for `strftime_now`, in seconds since 1970 and shown as UTC; `None` is now, local.
    pub now: Option<i64>,
}

/// A compiled chat template.
pub struct ChatTemplate {
    engine: Arc<Engine>,
}

/// What rendering needs, shared with the thread that renders.
struct Engine {
    environment: Environment<'static>,
    special: SpecialTokens,
    has_tool_use: bool,
    limits: Limits,
    sources: Vec<String>,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("ChatTemplate")
            .field("special", &self.engine.special)
            .field("limits", &self.engine.limits)
            .finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles one template.
    pub fn new(source: &str, special: SpecialTokens) -> Result<Self, TemplateError> {
        Self::from_source(&TemplateSource { default: source.to_owned(), tool_use: None, special })
    }

    /// Compiles what a model carries.
    pub fn from_source(source: &TemplateSource) -> Result<Self, TemplateError> {
        Self::with_limits(source, Limits::default())
    }

    /// Compiles with other limits than the default ones.
    pub fn with_limits(source: &TemplateSource, limits: Limits) -> Result<Self, TemplateError> {
        let source = source.clone();
        let engine = on_own_thread(limits.time, move || Engine::compile(&source, limits))??;
        Ok(Self { engine: Arc::new(engine) })
    }

    /// The template of a GGUF file, if it has one.
    pub fn from_gguf(metadata: &qwen_formats::GgufMetadata) -> Result<Option<Self>, TemplateError> {
        TemplateSource::from_gguf(metadata)?.as_ref().map(Self::from_source).transpose()
    }

    /// The template of a Hugging Face folder, if it has one.
    pub fn from_checkpoint_dir(dir: &std::path::Path) -> Result<Option<Self>, TemplateError> {
        TemplateSource::from_checkpoint_dir(dir)?.as_ref().map(Self::from_source).transpose()
    }

    /// Whether the template's source holds a text: what a model can do is told nowhere else.
    #[must_use]
    pub fn mentions(&self, text: &str) -> bool {
        self.engine.sources.iter().any(|source| source.contains(text))
    }

    /// The prompt of a conversation.
    ///
    /// Arguments of past tool calls are JSON texts in the API; most templates want objects, some
    /// want the text. Objects are tried first.
    pub fn render(&self, input: &TemplateInput<'_>) -> Result<String, TemplateError> {
        let has_tools = input.tools.is_some_and(|tools| !tools.is_empty());
        let name = if self.engine.has_tool_use && has_tools { "tool_use" } else { "default" };
        let messages: Vec<Json> = input.messages.iter().map(flatten_content).collect();
        let parsed = parse_arguments(&messages);
        let variables = Variables {
            tools: input.tools.map(<[Json]>::to_vec),
            add_generation_prompt: input.add_generation_prompt,
            extra: extra(input.kwargs)?,
            now: input.now,
        };
        let engine = Arc::clone(&self.engine);
        on_own_thread(self.engine.limits.time, move || match parsed {
            None => engine.render(name, &messages, &variables),
            Some(parsed) => match engine.render(name, &parsed, &variables) {
                Err(error @ TemplateError::Render { .. }) => {
                    engine.render(name, &messages, &variables).map_err(|_| error)
                }
                result => result,
            },
        })?
    }
}

impl Engine {
    fn compile(source: &TemplateSource, limits: Limits) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        environment.set_syntax(syntax()?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_fuel(Some(limits.fuel));
        environment.set_recursion_limit(limits.recursion);
        environment.set_debug(false);
        python::install(&mut environment);
        let templates = [("default", Some(&source.default)), ("tool_use", source.tool_use.as_ref())];
        for (name, text) in templates.into_iter().filter_map(|(name, text)| Some((name, text?))) {
            if text.len() > SOURCE_BYTES {
                return Err(TemplateError::SourceTooLong { bytes: text.len(), limit: SOURCE_BYTES });
            }
            environment
                .add_template_owned(name, source::without_generation_blocks(text))
                .map_err(|error| syntax_error(&error))?;
        }
        Ok(Self {
            environment,
            special: source.special.clone(),
            has_tool_use: source.tool_use.is_some(),
            limits,
            sources: std::iter::once(&source.default).chain(&source.tool_use).cloned().collect(),
        })
    }

    fn render(&self, name: &str, messages: &[Json], variables: &Variables) -> Result<String, TemplateError> {
        let mut output = Bounded { bytes: Vec::new(), limit: self.limits.output_bytes, exceeded: false };
        let context = self.context(messages, variables);
        let rendered = self
            .environment
            .get_template(name)
            .and_then(|template| template.render_captured_to(context, &mut output).map(|_| ()));
        match rendered {
            Ok(()) => String::from_utf8(output.bytes)
                .map_err(|error| TemplateError::Render { line: None, message: error.to_string() }),
            Err(_) if output.exceeded => Err(TemplateError::OutputTooLong { limit: self.limits.output_bytes }),
            Err(error) => Err(self.render_error(&error)),
        }
    }

    fn context(&self, messages: &[Json], variables: &Variables) -> Value {
        let mut extra: BTreeMap<&str, Value> =
            variables.extra.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value)))).collect();
        let SpecialTokens { bos, eos, unk, pad } = &self.special;
        for (name, token) in [("bos_token", bos), ("eos_token", eos), ("unk_token", unk), ("pad_token", pad)] {
            if let Some(token) = token {
                extra.insert(name, Value::from(token.as_str()));
            }
        }
        let now = variables.now;
        context! {
            messages => Value::from(Serde(messages)),
            tools => variables.tools.as_ref().map(|tools| Value::from(Serde(tools))),
            documents => Value::from(()),
            add_generation_prompt => variables.add_generation_prompt,
            strftime_now => Value::from_function(move |format: &str| python::strftime_now(format, now)),
            ..Value::from(extra)
        }
    }

    fn render_error(&self, error: &minijinja::Error) -> TemplateError {
        let mut source = std::error::Error::source(error);
        while let Some(cause) = source {
            if let Some(python::Raised(message)) = cause.downcast_ref() {
                return TemplateError::Raised(message.clone());
            }
            source = cause.source();
        }
        if has_kind(error, ErrorKind::OutOfFuel) {
            return TemplateError::TooManySteps { fuel: self.limits.fuel };
        }
        TemplateError::Render { line: error.line(), message: message(error) }
    }
}

/// What a template sees beside the messages.
struct Variables {
    tools: Option<Vec<Json>>,
    add_generation_prompt: bool,
    extra: Map<String, Json>,
    now: Option<i64>,
}

/// The caller's own variables, if they hide none of ours.
fn extra(kwargs: Option<&Map<String, Json>>) -> Result<Map<String, Json>, TemplateError> {
    let Some(kwargs) = kwargs else { return Ok(Map::new()) };
    match kwargs.keys().find(|name| RESERVED.contains(&name.as_str())) {
        Some(name) => Err(TemplateError::Reserved(name.clone())),
        None => Ok(kwargs.clone()),
    }
}

/// Runs `work` where it cannot run out of stack, and waits for it no longer than `time`. Work that
/// takes longer is left to itself: the caller should refuse the model.
fn on_own_thread<T: Send + 'static>(
    time: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, TemplateError> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let thread = std::thread::Builder::new().name("chat-template".to_owned()).stack_size(STACK_BYTES);
    // The receiver is gone where the time is over; nobody wants the result then.
    thread.spawn(move || drop(sender.send(work()))).map_err(TemplateError::Thread)?;
    receiver.recv_timeout(time).map_err(|error| match error {
        mpsc::RecvTimeoutError::Timeout => TemplateError::TooSlow { seconds: time.as_secs_f64() },
        mpsc::RecvTimeoutError::Disconnected => {
            TemplateError::Render { line: None, message: "the template engine panicked".to_owned() }
        }
    })
}

fn syntax() -> Result<SyntaxConfig, TemplateError> {
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(|error| syntax_error(&error))
}

fn syntax_error(error: &minijinja::Error) -> TemplateError {
    TemplateError::Syntax { line: error.line(), message: message(error) }
}

/// One line of an error and of what it came from.
fn message(error: &minijinja::Error) -> String {
    let own = |error: &minijinja::Error| match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    let mut text = own(error);
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.downcast_ref::<minijinja::Error>().map_or_else(|| cause.to_string(), own));
        source = cause.source();
    }
    text
}

fn has_kind(error: &minijinja::Error, kind: ErrorKind) -> bool {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = source {
        if cause.downcast_ref::<minijinja::Error>().is_some_and(|error| error.kind() == kind) {
            return true;
        }
        source = cause.source();
    }
    false
}

/// Output up to a limit.
struct Bounded {
    bytes: Vec<u8>,
    limit: usize,
    exceeded: bool,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len().saturating_add(bytes.len()) > self.limit {
            self.exceeded = true;
            return Err(io::Error::other("output too long"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A message whose content is a list of texts, with that content as one text: templates of text
/// models expect a string.
fn flatten_content(message: &Json) -> Json {
    let Some(parts) = message.get("content").and_then(Json::as_array) else { return message.clone() };
    let text = |part: &Json| match part.get("type").and_then(Json::as_str) {
        Some("text") => part.get("text").and_then(Json::as_str).map(str::to_owned),
        _ => None,
    };
    let Some(texts) = parts.iter().map(text).collect::<Option<Vec<_>>>() else { return message.clone() };
    let mut message = message.clone();
    if let Some(content) = message.get_mut("content") {
        *content = Json::String(texts.join("\n"));
    }
    message
}

/// Messages with the arguments of their tool calls as objects, if any were texts.
fn parse_arguments(messages: &[Json]) -> Option<Vec<Json>> {
    let mut parsed = messages.to_vec();
    let mut any = false;
    for message in &mut parsed {
        let calls = message.get_mut("tool_calls").and_then(Json::as_array_mut);
        for arguments in calls.into_iter().flatten().filter_map(|call| call.pointer_mut("/function/arguments")) {
            let object = arguments.as_str().and_then(|text| serde_json::from_str::<Map<String, Json>>(text).ok());
            if let Some(object) = object {
                *arguments = Json::Object(object);
                any = true;
            }
        }
    }
    any.then_some(parsed)
}
