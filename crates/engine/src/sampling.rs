//! From logits to a token.
//!
//! In: one row of logits, the tokens so far, [`SamplingParams`]. Out: a token and, if wanted, log-probabilities. The order is:
//! bias, repetition penalty, frequency and presence penalty, temperature, top-k, top-p, min-p, draw. Log-probabilities are
//! those of the model, before any of it. Token `n` of a request is drawn with the `n`-th number of the request's own
//! generator, so a request gives the same text alone, in a batch, or executed again. Ties go to the lower token id.

use std::collections::{HashMap, HashSet};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::EngineError;

/// How tokens are chosen and when to stop.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0 = always the most probable token.
    pub temperature: f32,
    /// Only the so many most probable tokens, 0 = all.
    pub top_k: u32,
    /// Only the most probable tokens that together reach this probability, 1 = all.
    pub top_p: f32,
    /// Only tokens at least so probable relative to the most probable one, 0 = all.
    pub min_p: f32,
    /// Logits of tokens in the prompt or the answer are divided (positive) or multiplied (negative) by it, 1 = off.
    pub repetition_penalty: f32,
    /// Subtracted once per occurrence in the answer.
    pub frequency_penalty: f32,
    /// Subtracted once if the token occurs in the answer.
    pub presence_penalty: f32,
    /// Seed of the request's generator.
    pub seed: u64,
    /// Added to logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// Most tokens of the answer.
    pub max_tokens: u32,
    /// End-of-text tokens are impossible before so many tokens.
    pub min_tokens: u32,
    /// End-of-text tokens are ordinary ones.
    pub ignore_eos: bool,
    /// Texts that end the answer; they are cut off.
    pub stop: Vec<String>,
    /// Tokens that end the answer, besides those of the model.
    pub stop_token_ids: Vec<u32>,
    /// Log-probabilities of the chosen token and so many best ones.
    pub logprobs: Option<u32>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            seed: 0,
            logit_bias: Vec::new(),
            max_tokens: 256,
            min_tokens: 0,
            ignore_eos: false,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            logprobs: None,
        }
    }
}

impl SamplingParams {
    /// Checks ranges against a vocabulary.
    ///
    /// # Errors
    /// [`EngineError::Parameter`] naming the first one out of range.
    pub fn validate(&self, vocab_size: u32) -> Result<(), EngineError> {
        let in_range = |name: &'static str, value: f32, low: f32, high: f32| {
            if value >= low && value <= high {
                Ok(())
            } else {
                Err(EngineError::Parameter { name, expected: format!("{low} to {high}"), found: value.to_string() })
            }
        };
        in_range("temperature", self.temperature, 0.0, 100.0)?;
        in_range("top_p", self.top_p, f32::MIN_POSITIVE, 1.0)?;
        in_range("min_p", self.min_p, 0.0, 1.0)?;
        in_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)?;
        in_range("frequency_penalty", self.frequency_penalty, -100.0, 100.0)?;
        in_range("presence_penalty", self.presence_penalty, -100.0, 100.0)?;
        for (_, bias) in &self.logit_bias {
            in_range("logit_bias", *bias, -1000.0, 1000.0)?;
        }
        if self.max_tokens == 0 {
            return Err(EngineError::Parameter {
                name: "max_tokens",
                expected: "at least 1".into(),
                found: "0".into(),
            });
        }
        let ids = self.logit_bias.iter().map(|(id, _)| id).chain(&self.stop_token_ids);
        if let Some(id) = ids.into_iter().find(|id| **id >= vocab_size) {
            return Err(EngineError::TokenRange { id: *id, vocab_size });
        }
        if self.stop.iter().any(String::is_empty) {
            return Err(EngineError::Parameter {
                name: "stop",
                expected: "texts of at least one character".into(),
                found: "an empty text".into(),
            });
        }
        Ok(())
    }
}

/// A token with its log-probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogprob {
    /// Token.
    pub id: u32,
    /// Natural logarithm of its probability under the model.
    pub logprob: f32,
}

/// Log-probabilities at one position.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprobs {
    /// The chosen token.
    pub chosen: TokenLogprob,
    /// The best ones, best first.
    pub top: Vec<TokenLogprob>,
}

/// A drawn token.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// Token.
    pub id: u32,
    /// If asked for.
    pub logprobs: Option<Logprobs>,
}

/// State of one request: its counts and its generator.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplingParams,
    in_prompt: HashSet<u32>,
    in_answer: HashMap<u32, u32>,
    generator: ChaCha8Rng,
    drawn: u32,
    candidates: Vec<(u32, f32)>,
}

impl Sampler {
    /// A sampler for an answer to a prompt.
    #[must_use]
    pub fn new(params: SamplingParams, prompt: &[u32]) -> Self {
        let penalised = if params.repetition_penalty == 1.0 { &[] } else { prompt };
        let in_prompt = penalised.iter().copied().collect();
        let generator = ChaCha8Rng::seed_from_u64(params.seed);
        Self { params, in_prompt, in_answer: HashMap::new(), generator, drawn: 0, candidates: Vec::new() }
    }

    /// What it was made with.
    #[must_use]
    pub const fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Chooses the next token. `forbidden` are tokens that can't be chosen now (end of text before `min_tokens`, padding).
    ///
    /// # Errors
    /// [`EngineError::NonFinite`] if a logit is NaN or no token is possible.
    pub fn sample(&mut self, logits: &[f32], forbidden: &[u32]) -> Result<Sampled, EngineError> {
        if let Some(at) = logits.iter().position(|l| l.is_nan() || *l == f32::INFINITY) {
            return Err(EngineError::NonFinite { token: at as u32, value: logits[at] });
        }
        self.candidates.clear();
        self.candidates.extend((0u32..).zip(logits.iter().copied()));
        self.penalise(forbidden);
        let id = if self.params.temperature < 1e-5 { best(&self.candidates).map(|c| c.0) } else { self.draw() };
        let id = id.ok_or(EngineError::NonFinite { token: 0, value: f32::NEG_INFINITY })?;
        self.drawn += 1;
        *self.in_answer.entry(id).or_insert(0) += 1;
        let logprobs = self.params.logprobs.map(|n| logprobs(logits, id, n as usize));
        Ok(Sampled { id, logprobs })
    }

    fn penalise(&mut self, forbidden: &[u32]) {
        let p = &self.params;
        let candidates = &mut self.candidates;
        let mut change = |id: u32, f: &dyn Fn(f32) -> f32| {
            if let Some((_, logit)) = candidates.get_mut(id as usize) {
                *logit = f(*logit);
            }
        };
        for (id, bias) in &p.logit_bias {
            change(*id, &|l| l + bias);
        }
        if p.repetition_penalty != 1.0 {
            let only_prompt = self.in_prompt.iter().filter(|id| !self.in_answer.contains_key(id));
            for id in self.in_answer.keys().chain(only_prompt) {
                change(*id, &|l| if l > 0.0 { l / p.repetition_penalty } else { l * p.repetition_penalty });
            }
        }
        if p.frequency_penalty != 0.0 || p.presence_penalty != 0.0 {
            for (id, count) in &self.in_answer {
                change(*id, &|l| l - p.frequency_penalty * *count as f32 - p.presence_penalty);
            }
        }
        for id in forbidden {
            change(*id, &|_| f32::NEG_INFINITY);
        }
    }

    fn draw(&mut self) -> Option<u32> {
        let p = &self.params;
        let (_, top) = best(&self.candidates)?;
        if top == f32::NEG_INFINITY {
            return None;
        }
        // Weights are relative to the best, whose weight is 1: so min-p is a bound on them, whatever top-k and top-p leave.
        let temperature = f64::from(p.temperature);
        let mut weights: Vec<(u32, f64)> = self
            .candidates
            .iter()
            .map(|(id, logit)| (*id, (f64::from(logit - top) / temperature).exp()))
            .filter(|(_, weight)| *weight > 0.0)
            .collect();
        let order = |a: &(u32, f64), b: &(u32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        let keep = p.top_k as usize;
        if keep > 0 && keep < weights.len() {
            weights.select_nth_unstable_by(keep - 1, order);
            weights.truncate(keep);
        }
        if p.top_p < 1.0 {
            weights.sort_unstable_by(order);
            let limit = f64::from(p.top_p) * weights.iter().map(|w| w.1).sum::<f64>();
            let mut sum = 0.0;
            let reached = weights.iter().position(|(_, weight)| {
                sum += weight;
                sum >= limit
            });
            weights.truncate(reached.map_or(weights.len(), |i| i + 1));
        } else {
            // A fixed order makes the draw a function of the distribution alone.
            weights.sort_unstable_by_key(|(id, _)| *id);
        }
        weights.retain(|(_, weight)| *weight >= f64::from(p.min_p));
        let total: f64 = weights.iter().map(|w| w.1).sum();
        self.generator.set_word_pos(u128::from(self.drawn) * 2);
        let unit = (self.generator.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let mut rest = unit * total;
        for (id, weight) in &weights {
            rest -= weight;
            if rest < 0.0 {
                return Some(*id);
            }
        }
        weights.last().map(|(id, _)| *id)
    }
}

fn best(candidates: &[(u32, f32)]) -> Option<(u32, f32)> {
    candidates.iter().copied().reduce(|a, b| if b.1 > a.1 { b } else { a })
}

/// Log-probabilities of a token and of the `n` best.
#[must_use]
pub fn logprobs(logits: &[f32], chosen: u32, n: usize) -> Logprobs {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|l| f64::from(l - top).exp()).sum();
    let norm = f64::from(top) + sum.ln();
    // -9999 is what clients of the OpenAI API get for an impossible token; JSON has no infinity.
    let logprob = |logit: f32| ((f64::from(logit) - norm) as f32).max(-9999.0);
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let n = n.min(order.len());
    let by_logit = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    if n > 0 && n < order.len() {
        order.select_nth_unstable_by(n - 1, by_logit);
    }
    order.truncate(n);
    order.sort_unstable_by(by_logit);
    Logprobs {
        chosen: TokenLogprob { id: chosen, logprob: logits.get(chosen as usize).map_or(-9999.0, |l| logprob(*l)) },
        top: order.into_iter().map(|id| TokenLogprob { id, logprob: logprob(logits[id as usize]) }).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(params: SamplingParams) -> Sampler {
        Sampler::new(params, &[])
    }
    fn frequencies(params: &SamplingParams, logits: &[f32], n: u64) -> Vec<f64> {
        let mut counts = vec![0u32; logits.len()];
        for seed in 0..n {
            let mut s = sampler(SamplingParams { seed, ..params.clone() });
            counts[s.sample(logits, &[]).unwrap().id as usize] += 1;
        }
        counts.into_iter().map(|c| f64::from(c) / n as f64).collect()
    }

    #[test]
    fn greedy_takes_the_first_of_equals() {
        let mut s = sampler(SamplingParams { temperature: 0.0, ..Default::default() });
        assert_eq!(s.sample(&[1.0, 3.0, 3.0, 2.0], &[]).unwrap().id, 1);
        assert_eq!(s.sample(&[1.0, 3.0, 3.0, 2.0], &[1, 2]).unwrap().id, 3);
    }

    #[test]
    fn draws_follow_the_distribution() {
        let logits = [0.0f32, 1.0, 2.0];
        let sum: f64 = logits.iter().map(|l| f64::from(*l / 0.7).exp()).sum();
        let params = SamplingParams { temperature: 0.7, ..Default::default() };
        for (found, logit) in frequencies(&params, &logits, 20_000).into_iter().zip(logits) {
            let expected = f64::from(logit / 0.7).exp() / sum;
            assert!((found - expected).abs() < 0.015, "{found} {expected}");
        }
    }

    #[test]
    fn filters_cut_the_tail() {
        let logits = [0.0f32, 1.0, 2.0, 3.0];
        let cases = [
            (SamplingParams { top_k: 2, ..Default::default() }, [false, false, true, true]),
            (SamplingParams { top_p: 0.6, ..Default::default() }, [false, false, false, true]),
            (SamplingParams { top_p: 0.7, ..Default::default() }, [false, false, true, true]),
            (SamplingParams { min_p: 0.1, ..Default::default() }, [false, true, true, true]),
        ];
        for (params, possible) in cases {
            let found = frequencies(&params, &logits, 2000);
            let found: Vec<bool> = found.into_iter().map(|f| f > 0.0).collect();
            assert_eq!(found, possible, "{params:?}");
        }
    }

    #[test]
    fn penalties_apply_as_documented() {
        let params = SamplingParams {
            temperature: 0.0,
            repetition_penalty: 2.0,
            frequency_penalty: 0.5,
            presence_penalty: 0.25,
            ..Default::default()
        };
        let mut s = Sampler::new(params, &[0]);
        // Token 0 is in the prompt: 4.0 / 2 = 2.0 < 3.0.
        assert_eq!(s.sample(&[4.0, 3.0, 1.0], &[]).unwrap().id, 1);
        // Token 1 is in the answer now: 3.0 / 2 - 0.5 - 0.25 = 0.75 < 1.0; token 0: -4 * 2.
        assert_eq!(s.sample(&[-4.0, 3.0, 1.0], &[]).unwrap().id, 2);
    }

    #[test]
    fn penalties_do_not_depend_on_the_order_of_a_map() {
        let params = SamplingParams {
            repetition_penalty: 1.3,
            frequency_penalty: 0.4,
            presence_penalty: 0.2,
            logit_bias: vec![(3, 0.5), (3, 0.25)],
            ..Default::default()
        };
        let prompt: Vec<u32> = (0..40).map(|i| i * 7 % 50).collect();
        let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
        // Written once more without maps: bits of the penalised logits after every token.
        let expected = |answer: &[u32]| -> Vec<u32> {
            let penalised = logits.iter().zip(0u32..).map(|(logit, id)| {
                let mut l = if id == 3 { logit + 0.5 + 0.25 } else { *logit };
                let count = answer.iter().filter(|a| **a == id).count();
                if count > 0 || prompt.contains(&id) {
                    l = if l > 0.0 { l / 1.3 } else { l * 1.3 };
                }
                if count > 0 { l - 0.4 * count as f32 - 0.2 } else { l }
            });
            penalised.map(f32::to_bits).collect()
        };
        // Each sampler's maps have an order of their own.
        let run = || {
            let mut s = Sampler::new(params.clone(), &prompt);
            let mut answer = Vec::new();
            for _ in 0..60 {
                let id = s.sample(&logits, &[]).unwrap().id;
                assert_eq!(s.candidates.iter().map(|c| c.1.to_bits()).collect::<Vec<_>>(), expected(&answer));
                answer.push(id);
            }
            answer
        };
        assert_eq!(run(), run());
    }

    #[test]
    fn the_same_seed_gives_the_same_tokens_and_another_seed_others() {
        let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.37).sin()).collect();
        let run = |seed| {
            let mut s = sampler(SamplingParams { seed, ..Default::default() });
            (0..40).map(|_| s.sample(&logits, &[]).unwrap().id).collect::<Vec<_>>()
        };
        assert_eq!(run(7), run(7));
        assert_ne!(run(7), run(8));
    }

    #[test]
    fn broken_logits_are_an_error() {
        let mut s = sampler(SamplingParams::default());
        assert!(s.sample(&[0.0, f32::NAN], &[]).is_err());
        assert!(s.sample(&[f32::INFINITY, 0.0], &[]).is_err());
        assert!(s.sample(&[f32::NEG_INFINITY; 2], &[]).is_err());
        assert!(s.sample(&[1.0, 2.0], &[0, 1]).is_err());
    }

    #[test]
    fn logprobs_are_those_of_the_model() {
        let found = logprobs(&[0.0, 1.0, 2.0, 1.0], 0, 3);
        let sum = 1.0f64 + 2.0 * 1f64.exp() + 2f64.exp();
        assert!((f64::from(found.chosen.logprob) + sum.ln()).abs() < 1e-6);
        assert_eq!(found.top.iter().map(|t| t.id).collect::<Vec<_>>(), [2, 1, 3]);
        assert!((f64::from(found.top[0].logprob) - (2.0 - sum.ln())).abs() < 1e-6);
    }

    #[test]
    fn parameters_out_of_range_are_named() {
        let check = |params: SamplingParams| params.validate(10).unwrap_err().to_string();
        assert!(check(SamplingParams { top_p: 0.0, ..Default::default() }).contains("top_p"));
        assert!(check(SamplingParams { temperature: f32::NAN, ..Default::default() }).contains("temperature"));
        assert!(check(SamplingParams { logit_bias: vec![(10, 1.0)], ..Default::default() }).contains("10"));
        assert!(check(SamplingParams { stop: vec![String::new()], ..Default::default() }).contains("stop"));
        SamplingParams::default().validate(10).unwrap();
    }
}
