//! One answer: a request in, its text as it comes and what is known of it in the end out.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use qwen_engine::{Engine, FinishReason, Logprobs, Request, RequestTimings, SamplingParams};

use crate::arguments::SamplingArguments;
use crate::error::CliError;

/// A complete answer.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Text.
    pub text: String,
    /// Tokens, the one that ended it included.
    pub tokens: Vec<u32>,
    /// Of each token, if asked for.
    pub logprobs: Vec<Logprobs>,
    /// Why it ended.
    pub finish: FinishReason,
    /// Where the time went.
    pub timings: RequestTimings,
    /// From the request to the first token.
    pub time_to_first_token: Duration,
    /// From the start of the program to the first token.
    pub start_to_first_token: Duration,
}

/// Runs a request to its end. `on_text` gets each piece of text; when `stop` turns true, the answer ends.
///
/// # Errors
/// If the request is refused, the device fails, or `on_text` fails.
pub fn run(
    engine: &mut Engine,
    request: Request,
    stop: &AtomicBool,
    on_text: &mut dyn FnMut(&str) -> Result<(), CliError>,
) -> Result<Answer, CliError> {
    let begin = Instant::now();
    let id = engine.submit(request)?;
    let mut answer = Answer {
        text: String::new(),
        tokens: Vec::new(),
        logprobs: Vec::new(),
        finish: FinishReason::Cancelled,
        timings: RequestTimings::default(),
        time_to_first_token: Duration::ZERO,
        start_to_first_token: Duration::ZERO,
    };
    while engine.has_work() {
        if stop.load(Ordering::Relaxed) {
            engine.cancel(id);
        }
        for output in engine.step() {
            if answer.tokens.is_empty() && output.token.is_some() {
                answer.time_to_first_token = begin.elapsed();
                answer.start_to_first_token = crate::entry::since_start();
            }
            answer.tokens.extend(output.token);
            answer.logprobs.extend(output.logprobs);
            answer.text.push_str(&output.text);
            if let Some(finish) = output.finish {
                answer.finish = finish;
                answer.timings = output.timings.unwrap_or_default();
            }
            if let Err(error) = on_text(&output.text) {
                // The engine must be free for the next request.
                engine.cancel(id);
                while engine.has_work() {
                    engine.step();
                }
                return Err(error);
            }
        }
    }
    match answer.finish {
        FinishReason::Logits(reason)
        | FinishReason::Grammar(reason)
        | FinishReason::Error(reason)
        | FinishReason::Device(reason) => Err(CliError::Answer(reason)),
        _ => Ok(answer),
    }
}

/// Puts what the user said over the defaults.
#[must_use]
pub fn sampling(defaults: SamplingParams, arguments: &SamplingArguments) -> SamplingParams {
    SamplingParams {
        temperature: arguments.temperature.unwrap_or(defaults.temperature),
        top_k: arguments.top_k.unwrap_or(defaults.top_k),
        top_p: arguments.top_p.unwrap_or(defaults.top_p),
        min_p: arguments.min_p.unwrap_or(defaults.min_p),
        repetition_penalty: arguments.repetition_penalty.unwrap_or(defaults.repetition_penalty),
        frequency_penalty: arguments.frequency_penalty.unwrap_or(defaults.frequency_penalty),
        presence_penalty: arguments.presence_penalty.unwrap_or(defaults.presence_penalty),
        seed: arguments.seed.unwrap_or(defaults.seed),
        stop: arguments.stop.clone(),
        ignore_eos: arguments.ignore_eos,
        ..defaults
    }
}
