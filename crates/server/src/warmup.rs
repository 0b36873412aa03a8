//! The warm-up: one-time work (plans of each size, pages, caches of the processor) is done before the first request.
//!
//! All devices are warmed up at the same time. Requests are taken when the first is warm: one that hangs keeps nobody waiting, and is put
//! into quarantine as at any other time.

use std::sync::Arc;

use qwen_engine::{FinishReason, FleetOutputs, InstanceReport, Request, SamplingParams};
use qwen_models::tokenizer::EncodeOptions;

use tokio::task::JoinSet;

use crate::config::Warmup;
use crate::openai::new_id;
use crate::prompt::encode;
use crate::{ServedModel, Server};

/// Tokens of each answer where many are generated together.
const TOGETHER_TOKENS: u32 = 4;

/// Warms up every device, sorts the vocabulary for grammars, and has weights that steps read from files in memory; returns when the first
/// device is warm, or with the reason of one if none can be.
pub(crate) async fn run(server: &Arc<Server>, wanted: &Warmup) -> Result<(), String> {
    let model = server.model().map_err(|error| error.message)?;
    let about = model.engine.about();
    let prompt = match &about.tokenizer {
        Some(_) => encode(model, wanted.prompt.clone(), EncodeOptions::PROMPT).await.map_err(|error| error.message)?,
        None => vec![0],
    };
    let cached = about.limits.block_size as usize * about.limits.cache_blocks as usize;
    let room = (about.limits.max_seq_len as usize).min(cached).saturating_sub(wanted.tokens as usize + 1).max(1);
    let prompt: Vec<u32> = if prompt.is_empty() { vec![0] } else { prompt.into_iter().take(room).collect() };
    model.engine.populate_weights();
    // Beside the first answers; a model without a tokenizer, or without an end of text, has no grammars.
    let engine = model.engine.clone();
    let grammars = tokio::task::spawn_blocking(move || engine.warm_up_grammars());
    let mut devices = JoinSet::new();
    for (at, instance) in model.engine.instances().into_iter().enumerate().filter(|(_, at)| at.trust.is_usable()) {
        let (server, prompt, tokens) = (Arc::clone(server), prompt.clone(), wanted.tokens);
        devices.spawn(async move {
            let model = server.model().map_err(|error| error.message)?;
            let warmed = device(model, at, &instance, &prompt, (tokens, room)).await;
            if let Err(reason) = &warmed {
                tracing::warn!(device = instance.name, reason, "the warm-up of a device failed");
            }
            warmed
        });
    }
    let mut result = Ok(());
    while let Some(warmed) = devices.join_next().await {
        result = warmed.map_err(|error| error.to_string()).flatten();
        if result.is_ok() {
            break;
        }
    }
    devices.detach_all();
    if let Ok(Err(error)) = grammars.await {
        tracing::debug!(%error, "there will be no grammars");
    }
    result
}

/// Computes on a device an answer alone, answers together, a prompt as long as a step takes, log-probabilities of as many tokens as a step
/// takes (the memory of steps is as large then as it gets), and a vector if there are any.
async fn device(
    model: &ServedModel,
    at: usize,
    instance: &InstanceReport,
    prompt: &[u32],
    (tokens, room): (u32, usize),
) -> Result<(), String> {
    finish(vec![submit(model, at, prompt.to_vec(), tokens)?]).await?;
    let few = || prompt.iter().copied().take(16).collect();
    let together = 0..instance.stats.max_sequences.clamp(1, 64);
    let answers: Result<Vec<_>, _> = together.map(|_| submit(model, at, few(), TOGETHER_TOKENS)).collect();
    finish(answers?).await?;
    let long = |tokens: usize| prompt.iter().copied().cycle().take(tokens.clamp(1, room)).collect();
    finish(vec![submit(model, at, long(instance.stats.max_step_tokens), 1)?]).await?;
    let sampling = SamplingParams { max_tokens: 0, ..SamplingParams::default() };
    let scored = Request::new(long(instance.stats.max_step_rows), sampling);
    let scored = Request { prompt_logprobs: Some(0), ..scored };
    finish(vec![model.engine.submit_to(at, scored).map_err(|error| error.to_string())?]).await?;
    if model.pooling.is_some() {
        let sampling = SamplingParams { max_tokens: 0, ..SamplingParams::default() };
        let request = Request { embed: model.pooling, ..Request::new(few(), sampling) };
        finish(vec![model.engine.submit_to(at, request).map_err(|error| error.to_string())?]).await?;
    }
    Ok(())
}

fn submit(model: &ServedModel, instance: usize, prompt: Vec<u32>, tokens: u32) -> Result<FleetOutputs, String> {
    let sampling =
        SamplingParams { temperature: 0.0, max_tokens: tokens.max(1), ignore_eos: true, ..model.defaults.clone() };
    // A salt of its own: nothing of the warm-up is found in the prefix cache.
    let salt = new_id("").bytes().fold(1u64, |salt, byte| salt.wrapping_mul(31).wrapping_add(u64::from(byte)));
    let request = Request { cache_salt: salt, ..Request::new(prompt, sampling) };
    model.engine.submit_to(instance, request).map_err(|error| error.to_string())
}

async fn finish(all: Vec<FleetOutputs>) -> Result<(), String> {
    for mut outputs in all {
        while let Some(output) = outputs.recv().await {
            if let Some(FinishReason::Logits(reason) | FinishReason::Error(reason) | FinishReason::Device(reason)) =
                output.finish
            {
                return Err(reason);
            }
        }
    }
    Ok(())
}
