//! From a job to a stream of outputs: submission, merging of several answers, accounting, spans. Dropping a [`Running`] cancels all
//! that it stands for.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream, SelectAll};
use qwen_engine::{
    ClientKey, Constraint, Epoch, FinishReason, Fleet, FleetOutputs, Logprobs, Output, Pooling, Request,
    SamplingParams, SubmitError,
};
use serde::Serialize;
use utoipa::ToSchema;

use crate::Server;
use crate::answer::{AnswerParser, ParserOptions, Piece, Whole};
use crate::error::{ApiError, Kind, Words};
use crate::gate::RequestId;
use crate::keys::{Client, Place};

/// What is to be generated.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    /// The parameter that the prompts were made of.
    pub prompt_param: &'static str,
    /// Prompts.
    pub prompts: Vec<Vec<u32>>,
    /// Answers per prompt.
    pub n: u32,
    /// Sampling; answer `i` has seed + i.
    pub sampling: SamplingParams,
    /// Log-probabilities of the prompt.
    pub prompt_logprobs: Option<u32>,
    /// Grammar.
    pub constraint: Option<Constraint>,
    /// The parameter that it was made of.
    pub grammar_param: &'static str,
    /// What parameters are called in the protocol of the request.
    pub words: Words,
    /// Lower runs earlier.
    pub priority: i32,
    /// Salt of the prefix cache.
    pub salt: u64,
    /// How answers are read.
    pub parser: ParserOptions,
    /// Vectors of the prompts, made so, instead of answers.
    pub embed: Option<Pooling>,
    /// Id for logs, where it came in, and its span.
    pub request_id: RequestId,
}

/// Texts of a job that are embedded at a time; the others wait here, not in the engine.
const EMBEDDED_AT_A_TIME: usize = 64;

impl Job {
    /// Vectors of texts.
    pub(crate) fn embed(prompts: Vec<Vec<u32>>, pooling: Pooling, priority: i32, request_id: RequestId) -> Self {
        Self {
            prompt_param: "input",
            prompts,
            n: 1,
            sampling: SamplingParams { max_tokens: 0, ..SamplingParams::default() },
            prompt_logprobs: None,
            constraint: None,
            grammar_param: "response_format",
            words: &[],
            priority,
            salt: 0,
            parser: ParserOptions::default(),
            embed: Some(pooling),
            request_id,
        }
    }
}

/// What errors about one of a job's prompts must tell.
#[derive(Debug, Clone, Copy)]
struct Names {
    prompt: &'static str,
    grammar: &'static str,
    words: Words,
    /// Whether there is more than one.
    several: bool,
    /// Answers of each prompt.
    n: usize,
}

impl Names {
    /// An error of an answer's request, by the name of the parameter, and which of several it is about.
    fn tell(self, choice: usize, error: ApiError) -> ApiError {
        let about_prompt = error.param.as_deref() == Some("prompt");
        let error = if error.code == Some("invalid_grammar") {
            ApiError { param: Some(self.grammar.into()), ..error }
        } else if self.several && (about_prompt || error.kind == Kind::Internal) {
            error.of_one(self.prompt, choice / self.n.max(1))
        } else if about_prompt {
            ApiError { param: Some(self.prompt.into()), ..error }
        } else {
            error
        };
        error.in_words(self.words)
    }
}

/// Tokens that were computed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tokens {
    /// Of the prompts, each counted once.
    pub prompt: u64,
    /// Of these, found in the prefix cache.
    pub cached: u64,
    /// Of all answers.
    pub completion: u64,
    /// Of these, thinking.
    pub reasoning: u64,
}

/// One token of an answer.
#[derive(Debug, Clone)]
pub(crate) struct Token {
    /// Token.
    pub id: u32,
    /// If asked for.
    pub logprobs: Option<Logprobs>,
    /// Whether it belongs to the thinking.
    pub thinking: bool,
    /// Whether it ended the answer and has no text.
    pub end: bool,
}

/// What one output meant.
#[derive(Debug)]
pub(crate) struct Event {
    /// Which answer: prompt x n + number of the answer.
    pub choice: usize,
    /// Text as it came.
    pub text: String,
    /// What the parser made of it.
    pub pieces: Vec<Piece>,
    /// Token.
    pub token: Option<Token>,
    /// Log-probabilities of the prompt.
    pub prompt_logprobs: Option<Vec<Option<Logprobs>>>,
    /// The prompt's vector.
    pub embedding: Option<Vec<f32>>,
    /// The end.
    pub finish: Option<FinishReason>,
}

struct Choice {
    parser: AnswerParser,
    tokens: u64,
    first: Option<Instant>,
    last: Option<Instant>,
}

/// Generations at work.
pub(crate) struct Running {
    server: Arc<Server>,
    outputs: SelectAll<BoxStream<'static, (usize, Output)>>,
    /// What was not submitted yet.
    rest: std::vec::IntoIter<Request>,
    choices: Vec<Choice>,
    open: usize,
    n: usize,
    names: Names,
    /// Texts become vectors.
    embeds: bool,
    /// When it was accepted.
    epoch: Epoch,
    begun: Instant,
    arrival: SystemTime,
    tokens: Tokens,
    place: Place,
    client: String,
    request_id: RequestId,
}

impl std::fmt::Debug for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Running")
            .field("request_id", &self.request_id.id)
            .field("open", &self.open)
            .finish_non_exhaustive()
    }
}

/// Submits a job, all of it or nothing.
///
/// # Errors
/// If the client's limits are reached, or the engine refuses it.
pub(crate) async fn start(server: &Arc<Server>, client: &Arc<Client>, job: Job) -> Result<Running, ApiError> {
    let place = client.begin()?;
    start_at(place, server, client, job).await
}

/// The same for a client that has its place already.
///
/// # Errors
/// If the engine refuses the job.
pub(crate) async fn start_at(
    place: Place,
    server: &Arc<Server>,
    client: &Arc<Client>,
    job: Job,
) -> Result<Running, ApiError> {
    let model = server.admit(None)?;
    let (begun, arrival) = (Instant::now(), SystemTime::now());
    let mut requests = requests(server, client, &job, begun);
    let count = requests.len();
    let at_once = match job.embed {
        // A sixteenth of the queue at most: a job of many texts leaves room to others.
        Some(_) => EMBEDDED_AT_A_TIME.min(model.engine.max_in_flight() / 16).max(1),
        None => usize::MAX,
    };
    let names = Names {
        prompt: job.prompt_param,
        grammar: job.grammar_param,
        words: job.words,
        several: job.prompts.len() > 1,
        n: job.n as usize,
    };
    // All are looked at before the first costs anything.
    for (choice, request) in requests.iter().enumerate() {
        model.engine.check(request).map_err(|error| names.tell(choice, error.into()))?;
    }
    let rest = requests.split_off(at_once.min(count));
    let (engine, by, epoch) = (model.engine.clone(), job.request_id.by, model.engine.epoch());
    let prompt = match job.embed {
        // Those that wait count when they are submitted.
        Some(_) => prompt_tokens(requests.iter().map(|request| &request.prompt)),
        None => prompt_tokens(&job.prompts),
    };
    let outputs = if job.constraint.is_some() {
        // Compiling a grammar may take as long as its budget.
        let submitted = tokio::task::spawn_blocking(move || submit(&engine, requests, by)).await;
        submitted.map_err(|_| ApiError::new(Kind::Internal, "the grammar's compiler failed"))?
    } else {
        submit(&engine, requests, by)
    };
    let outputs = outputs.map_err(|(choice, error)| names.tell(choice, error.into()))?;
    let parser = AnswerParser::new(job.parser.clone());
    let new = || Choice { parser: parser.clone(), tokens: 0, first: None, last: None };
    server.life.enter();
    if job.embed.is_none() {
        server.metrics.started(&job.sampling, job.n);
    }
    Ok(Running {
        server: Arc::clone(server),
        outputs: stream::select_all(outputs.into_iter().enumerate().map(|(choice, answer)| of_choice(choice, answer))),
        rest: rest.into_iter(),
        choices: std::iter::repeat_with(new).take(count).collect(),
        open: count,
        n: job.n as usize,
        names,
        embeds: job.embed.is_some(),
        epoch,
        begun,
        arrival,
        tokens: Tokens { prompt, ..Tokens::default() },
        place,
        client: client.name.clone(),
        request_id: job.request_id,
    })
}

fn prompt_tokens<'a>(prompts: impl IntoIterator<Item = &'a Vec<u32>>) -> u64 {
    prompts.into_iter().map(|prompt| prompt.len() as u64).sum()
}

fn of_choice(choice: usize, answer: FleetOutputs) -> BoxStream<'static, (usize, Output)> {
    let next = |mut answer: FleetOutputs| async move { Some((answer.recv().await?, answer)) };
    stream::unfold(answer, next).map(move |output| (choice, output)).boxed()
}

fn requests(server: &Server, client: &Client, job: &Job, begun: Instant) -> Vec<Request> {
    let mut requests = Vec::with_capacity(job.prompts.len() * job.n as usize);
    for prompt in &job.prompts {
        for i in 0..job.n {
            let seed = job.sampling.seed.wrapping_add(u64::from(i));
            requests.push(Request {
                prompt: prompt.clone(),
                sampling: SamplingParams { seed, ..job.sampling.clone() },
                prompt_logprobs: job.prompt_logprobs,
                embed: job.embed,
                constraint: job.constraint.clone(),
                priority: job.priority,
                deadline: server.config.request_timeout.map(|time| begun + time),
                client: ClientKey(client.number),
                cache_salt: job.salt,
                ..Request::default()
            });
        }
    }
    requests
}

type Submitted = Result<Vec<FleetOutputs>, (usize, SubmitError)>;

fn submit(engine: &Fleet, requests: Vec<Request>, by: Option<IpAddr>) -> Submitted {
    // Answers of a job that is refused half way are dropped, which cancels what was submitted.
    let submit = |(choice, request)| engine.submit(request, by).map_err(|error| (choice, error));
    requests.into_iter().enumerate().map(submit).collect()
}

impl Running {
    /// Tokens up to now.
    pub(crate) const fn tokens(&self) -> Tokens {
        self.tokens
    }

    /// The next event; none when every answer has ended.
    pub(crate) async fn next(&mut self) -> Option<Event> {
        if self.open == 0 {
            return None;
        }
        match self.outputs.next().await {
            Some((choice, output)) => {
                let event = self.take(choice, output);
                if event.finish.is_some() {
                    self.submit_next();
                }
                Some(event)
            }
            None => {
                // The engine's thread is gone and took the channels with it.
                self.open = 0;
                let finish = Some(FinishReason::Error("the engine has stopped".into()));
                Some(Event {
                    choice: 0,
                    text: String::new(),
                    pieces: Vec::new(),
                    token: None,
                    prompt_logprobs: None,
                    embedding: None,
                    finish,
                })
            }
        }
    }

    /// What the end of an answer means, if it means failure.
    pub(crate) fn error_of(&self, choice: usize, finish: &FinishReason) -> Option<ApiError> {
        ApiError::of_finish(finish).map(|error| self.names.tell(choice, error))
    }

    /// Takes one of those that wait, in the place of one that has ended.
    fn submit_next(&mut self) {
        let Some(request) = self.rest.next() else { return };
        let choice = self.choices.len() - self.rest.len() - 1;
        if let Ok(model) = self.server.model() {
            self.tokens.prompt += prompt_tokens([&request.prompt]);
            let answer = model.engine.submit_later(request, self.request_id.by, self.epoch);
            self.outputs.push(of_choice(choice, answer));
        }
    }

    fn take(&mut self, at: usize, output: Output) -> Event {
        let now = Instant::now();
        let choice = &mut self.choices[at];
        let metrics = &self.server.metrics;
        let mut pieces = Vec::new();
        let thought = choice.parser.is_thinking();
        choice.parser.push(&output.text, &mut pieces);
        let thinking = thought || choice.parser.is_thinking();
        if let Some(finish) = &output.finish {
            let cut = match finish {
                FinishReason::StopText(text) => Some(text.as_str()),
                FinishReason::Length => Some(""),
                _ => None,
            };
            choice.parser.finish(cut, &mut pieces);
        }
        let ends = matches!(output.finish, Some(FinishReason::EndOfText | FinishReason::StopToken(_)));
        let token = output.token.map(|id| Token { id, logprobs: output.logprobs, thinking, end: ends });
        if token.is_some() {
            choice.tokens += 1;
            self.tokens.completion += 1;
            self.tokens.reasoning += u64::from(thinking);
            match choice.last {
                None => metrics.first_token(now - self.begun),
                Some(last) => metrics.next_token(now - last),
            }
            choice.first.get_or_insert(now);
            choice.last = Some(now);
        }
        if let Some(finish) = &output.finish {
            self.open -= 1;
            let timings = output.timings.unwrap_or_default();
            if at.is_multiple_of(self.n.max(1)) {
                self.tokens.cached += timings.cached_tokens as u64;
            }
            let latency = now - self.begun;
            if self.embeds {
                let whole = (self.open == 0).then_some(latency);
                metrics.embedded(output.embedding.is_some(), finish, &timings, whole);
            } else {
                metrics.finished(finish, &timings, latency);
            }
            self.request_id.trace.ended(at, self.arrival, finish, &timings);
            if let FinishReason::Logits(reason) | FinishReason::Error(reason) | FinishReason::Device(reason) = finish {
                tracing::error!(request_id = self.request_id.id, reason, "an answer ended by an error");
            }
        }
        Event {
            choice: at,
            text: output.text,
            pieces,
            token,
            prompt_logprobs: output.prompt_logprobs,
            embedding: output.embedding,
            finish: output.finish,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.place.charge(self.tokens.prompt + self.tokens.completion);
        self.server.life.leave();
        if self.open > 0 {
            self.server.metrics.abandoned(self.open as u64);
        }
        let model = self.server.model().ok().and_then(|model| model.names.first()).map_or("", String::as_str);
        self.request_id.trace.finished(model, self.tokens, self.open);
        tracing::info!(
            request_id = self.request_id.id,
            client = self.client,
            prompt_tokens = self.tokens.prompt,
            cached_tokens = self.tokens.cached,
            completion_tokens = self.tokens.completion,
            seconds = self.begun.elapsed().as_secs_f64(),
            abandoned = self.open,
            "generated"
        );
    }
}

/// A whole answer.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    /// Text as it came.
    pub text: String,
    /// What the parser made of it.
    pub whole: Whole,
    /// Tokens.
    pub tokens: Vec<Token>,
    /// Log-probabilities of the prompt.
    pub prompt_logprobs: Option<Vec<Option<Logprobs>>>,
    /// The prompt's vector.
    pub embedding: Option<Vec<f32>>,
    /// The end.
    pub finish: Option<FinishReason>,
}

/// All answers of a job.
///
/// # Errors
/// If one of them ended by an error.
pub(crate) async fn collect(mut running: Running) -> Result<(Vec<Answer>, Tokens), ApiError> {
    let mut answers: Vec<Answer> = std::iter::repeat_with(Answer::default).take(running.choices.len()).collect();
    while let Some(event) = running.next().await {
        let answer = &mut answers[event.choice];
        answer.text.push_str(&event.text);
        event.pieces.iter().for_each(|piece| answer.whole.add(piece));
        answer.tokens.extend(event.token);
        answer.prompt_logprobs = event.prompt_logprobs.or(answer.prompt_logprobs.take());
        answer.embedding = event.embedding.or(answer.embedding.take());
        if let Some(finish) = event.finish {
            if let Some(error) = running.error_of(event.choice, &finish) {
                return Err(error);
            }
            answer.finish = Some(finish);
        }
    }
    Ok((answers, running.tokens()))
}

/// `finish_reason` in the OpenAI protocol.
pub(crate) fn finish_name(finish: &FinishReason, has_calls: bool) -> &'static str {
    match finish.name() {
        "stop" if has_calls => "tool_calls",
        name => name,
    }
}

/// What ended the answer besides its natural end.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum StopReason {
    /// A stop text.
    Text(String),
    /// The id of a stop token.
    Token(u32),
}

impl StopReason {
    pub(crate) fn of(finish: &FinishReason) -> Option<Self> {
        match finish {
            FinishReason::StopText(text) => Some(Self::Text(text.clone())),
            FinishReason::StopToken(id) => Some(Self::Token(*id)),
            _ => None,
        }
    }
}
