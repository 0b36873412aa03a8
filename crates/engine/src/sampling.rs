//! From logits to a token.
//!
//! In: one row of logits, the tokens so far, [`SamplingParams`]. Out: a token and, if wanted, log-probabilities. The order
//! is: bias, repetition penalty, frequency and presence penalty, temperature, top-k, top-p, min-p, draw. Log-probabilities
//! are those of the model, before any of it. Token `n` of a request is drawn with the `n`-th number of the request's own
//! generator, so a request gives the same text alone, in a batch, or executed again. Ties go to the lower token id.
//! Exponentials are our own and sums have a fixed order, so a choice is the same on every platform.

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
    /// Put the text that ended the answer into it.
    pub include_stop: bool,
    /// Leave markup of the model out of the text.
    pub skip_special: bool,
    /// Only these tokens are possible.
    pub allowed_token_ids: Option<Vec<u32>>,
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
            include_stop: false,
            skip_special: true,
            allowed_token_ids: None,
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
        if self.allowed_token_ids.as_ref().is_some_and(Vec::is_empty) {
            return Err(EngineError::Parameter {
                name: "allowed_token_ids",
                expected: "at least one token".into(),
                found: "none".into(),
            });
        }
        let ids = self.logit_bias.iter().map(|(id, _)| id).chain(&self.stop_token_ids);
        let ids = ids.chain(self.allowed_token_ids.iter().flatten());
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

/// Memory that choosing a token works in; any number of samplers can share it one after the other.
#[derive(Debug, Default)]
pub struct Scratch {
    /// Logits with everything added that a request asks for.
    changed: Vec<f32>,
    weights: Vec<f32>,
    sums: Vec<f64>,
    buckets: Vec<f64>,
    best: Best,
}

/// State of one request: its counts and its generator.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplingParams,
    in_prompt: HashSet<u32>,
    in_answer: HashMap<u32, u32>,
    generator: ChaCha8Rng,
    drawn: u32,
}

impl Sampler {
    /// A sampler for an answer to a prompt.
    #[must_use]
    pub fn new(params: SamplingParams, prompt: &[u32]) -> Self {
        let penalised = if params.repetition_penalty == 1.0 { &[] } else { prompt };
        let in_prompt = penalised.iter().copied().collect();
        let generator = ChaCha8Rng::seed_from_u64(params.seed);
        Self { params, in_prompt, in_answer: HashMap::new(), generator, drawn: 0 }
    }

    /// What it was made with.
    #[must_use]
    pub const fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Goes on as if it had chosen this token.
    pub fn replay(&mut self, token: u32) {
        self.drawn += 1;
        *self.in_answer.entry(token).or_insert(0) += 1;
    }

    /// Chooses the next token. `forbidden` are tokens that can't be chosen now (end of text before `min_tokens`, padding);
    /// `allowed`, if given, has a bit for each token that can, the lowest bit of a word first.
    ///
    /// # Errors
    /// [`EngineError::NonFinite`] if a logit is NaN or no token is possible.
    pub fn sample(
        &mut self,
        logits: &[f32],
        forbidden: &[u32],
        allowed: Option<&[u32]>,
        scratch: &mut Scratch,
    ) -> Result<Sampled, EngineError> {
        let of_model = largest(logits).map_err(|token| {
            let value = logits.get(token).copied().unwrap_or(f32::NAN);
            EngineError::NonFinite { token: token as u32, value }
        })?;
        let mut changed = std::mem::take(&mut scratch.changed);
        let is_changed = self.change(logits, forbidden, allowed, &mut changed);
        let final_logits = if is_changed { changed.as_slice() } else { logits };
        let top = if is_changed { largest(final_logits).unwrap_or(f32::INFINITY) } else { of_model };
        let id = match top {
            top if !top.is_finite() => None,
            top if self.params.temperature < 1e-5 => first_equal(final_logits, top),
            top => self.draw(final_logits, top, scratch),
        };
        scratch.changed = changed;
        let id = id.ok_or(EngineError::NonFinite { token: 0, value: f32::NEG_INFINITY })?;
        self.replay(id);
        let logprobs = self.params.logprobs.map(|n| logprobs_with(logits, of_model, id, n as usize, scratch));
        Ok(Sampled { id, logprobs })
    }

    /// Writes the logits that the request asks for; false if they are those of the model.
    fn change(&self, logits: &[f32], forbidden: &[u32], allowed: Option<&[u32]>, out: &mut Vec<f32>) -> bool {
        let p = &self.params;
        let counts = p.repetition_penalty != 1.0 || p.frequency_penalty != 0.0 || p.presence_penalty != 0.0;
        let is_restricted = allowed.is_some() || p.allowed_token_ids.is_some() || !forbidden.is_empty();
        if !counts && !is_restricted && p.logit_bias.is_empty() {
            return false;
        }
        out.clear();
        out.extend_from_slice(logits);
        let mut change = |id: u32, f: &dyn Fn(f32) -> f32| {
            if let Some(logit) = out.get_mut(id as usize) {
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
        if let Some(ids) = &p.allowed_token_ids {
            let kept: Vec<(usize, f32)> =
                ids.iter().filter_map(|id| Some((*id as usize, *out.get(*id as usize)?))).collect();
            out.fill(f32::NEG_INFINITY);
            kept.into_iter().for_each(|(id, logit)| out[id] = logit);
        }
        if let Some(words) = allowed {
            let mut words = words.iter();
            for logits in out.chunks_mut(32) {
                match words.next().copied().unwrap_or(0) {
                    u32::MAX => {}
                    0 => logits.fill(f32::NEG_INFINITY),
                    word => {
                        let impossible = logits.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 0);
                        impossible.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
                    }
                }
            }
        }
        true
    }

    fn unit(&mut self) -> f64 {
        self.generator.set_word_pos(u128::from(self.drawn) * 2);
        (self.generator.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Weights are relative to the best token, whose weight is 1: so min-p is a bound on them, whatever top-k and top-p leave.
    fn draw(&mut self, logits: &[f32], top: f32, scratch: &mut Scratch) -> Option<u32> {
        let unit = self.unit();
        let p = &self.params;
        let scale = 1.0 / p.temperature;
        if p.top_k == 0 || p.top_k as usize >= logits.len() {
            weigh(logits, top, scale, &mut scratch.weights);
            if p.top_p < 1.0 {
                scratch.cut(p.top_p);
            }
            if p.min_p > 0.0 {
                scratch.weights.iter_mut().filter(|weight| **weight < p.min_p).for_each(|weight| *weight = 0.0);
            }
            return pick(&scratch.weights, &mut scratch.sums, unit);
        }
        scratch.best.find(logits, p.top_k as usize);
        let weights = scratch.best.found.iter().map(|(id, logit)| (*id, f64::from(exp((logit - top) * scale))));
        let limit = f64::from(p.top_p) * weights.clone().map(|(_, weight)| weight).sum::<f64>();
        let mut sum = 0.0;
        let reached = weights.clone().position(|(_, weight)| {
            sum += weight;
            p.top_p < 1.0 && sum >= limit
        });
        let kept = weights.take(reached.map_or(usize::MAX, |i| i + 1));
        let kept = kept.filter(|(_, weight)| *weight >= f64::from(p.min_p) && *weight > 0.0);
        let mut rest = unit * kept.clone().map(|(_, weight)| weight).sum::<f64>();
        let mut chosen = None;
        for (id, weight) in kept {
            chosen = Some(id);
            rest -= weight;
            if rest < 0.0 {
                break;
            }
        }
        chosen
    }
}

impl Scratch {
    /// Leaves the largest weights that together reach a share of the sum, and zeros the others. Nothing is sorted but the
    /// weights near the one where the share is reached: weights are counted by their leading bits first.
    fn cut(&mut self, share: f32) {
        let total = block_sums(&self.weights, &mut self.sums);
        let limit = f64::from(share) * total;
        let bucket = |weight: f32| (weight.to_bits() >> BUCKET_SHIFT) as usize;
        self.buckets.clear();
        self.buckets.resize(bucket(1.0) + 1, 0.0);
        let highest = self.buckets.len() - 1;
        for weight in &self.weights {
            self.buckets[bucket(*weight).min(highest)] += f64::from(*weight);
        }
        let mut sum = 0.0;
        let mut last = highest + 1;
        while last > 0 && sum + self.buckets[last - 1] < limit {
            last -= 1;
            sum += self.buckets[last];
        }
        let Some(last) = last.checked_sub(1) else { return };
        let (low, high) = ((last as u32) << BUCKET_SHIFT, (last as u32 + 1) << BUCKET_SHIFT);
        let found = &mut self.best.found;
        found.clear();
        let bits = |weight: f32| weight.to_bits();
        let edge = (0u32..).zip(self.weights.iter().copied());
        found.extend(edge.filter(|(_, weight)| bits(*weight) >= low && bits(*weight) < high));
        found.sort_unstable_by(descending);
        let reached = found.iter().position(|(_, weight)| {
            sum += f64::from(*weight);
            sum >= limit
        });
        let kept = found.len().min(reached.map_or(usize::MAX, |i| i + 1));
        for weight in &mut self.weights {
            *weight = if bits(*weight) >= high { *weight } else { 0.0 };
        }
        for (id, weight) in &found[..kept] {
            self.weights[*id as usize] = *weight;
        }
    }
}

/// What is left of a weight's bits: its exponent and six bits of its mantissa.
const BUCKET_SHIFT: u32 = 17;
/// Values that are looked at together.
const BLOCK: usize = 64;

/// The largest value, or where one is NaN or positive infinity.
fn largest(values: &[f32]) -> Result<f32, usize> {
    const LANES: usize = 16;
    let mut tops = [f32::NEG_INFINITY; LANES];
    let mut broken = [0u32; LANES];
    let mut chunks = values.chunks_exact(LANES);
    for chunk in &mut chunks {
        for i in 0..LANES {
            tops[i] = if chunk[i] > tops[i] { chunk[i] } else { tops[i] };
            // Neither NaN nor infinity is below infinity.
            broken[i] |= u32::from(!is_below_infinity(chunk[i]));
        }
    }
    let is_broken = |x: &f32| x.is_nan() || *x == f32::INFINITY;
    if broken.iter().any(|b| *b != 0) || chunks.remainder().iter().any(is_broken) {
        return Err(values.iter().position(is_broken).unwrap_or(0));
    }
    Ok(tops.iter().chain(chunks.remainder()).copied().fold(f32::NEG_INFINITY, f32::max))
}

/// False for NaN too.
fn is_below_infinity(x: f32) -> bool {
    x < f32::INFINITY
}

/// The lowest index of a value.
fn first_equal(values: &[f32], value: f32) -> Option<u32> {
    let block = values.chunks(BLOCK).position(|block| block.iter().fold(false, |found, x| found | (*x == value)))?;
    let at = values[block * BLOCK..].iter().position(|x| *x == value)?;
    Some((block * BLOCK + at) as u32)
}

/// e to the power of `x`, for `x` at most 0: the same bits on every platform, within 2e-7 of the value; 0 below -87. Without
/// branches or conversions, so that compilers make vector code of loops over it.
fn exp(x: f32) -> f32 {
    // Added to a number of less than 22 bits, it leaves the nearest integer in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    let bounded = if x > -87.0 { x } else { -87.0 };
    let rounded = bounded * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    // ln 2 in two parts, the first with few enough bits that its product with n is exact.
    let r = bounded - n * 0.693_359_4 - n * -2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let value = p * r * r + r + 1.0;
    let power = f32::from_bits((rounded.to_bits() << 23).wrapping_add(127 << 23));
    if x > -87.0 { value * power } else { 0.0 }
}

/// Weights of logits relative to the largest.
fn weigh(logits: &[f32], top: f32, scale: f32, weights: &mut Vec<f32>) {
    weights.clear();
    weights.extend(logits.iter().map(|logit| exp((logit - top) * scale)));
}

/// Sums of blocks in a fixed order, and the sum of these.
fn block_sums(weights: &[f32], sums: &mut Vec<f64>) -> f64 {
    sums.clear();
    sums.extend(weights.chunks(BLOCK).map(|block| {
        let mut lanes = [0.0f64; 8];
        let mut parts = block.chunks_exact(8);
        for part in &mut parts {
            for i in 0..8 {
                lanes[i] += f64::from(part[i]);
            }
        }
        let rest: f64 = parts.remainder().iter().map(|weight| f64::from(*weight)).sum();
        lanes.iter().sum::<f64>() + rest
    }));
    sums.iter().sum()
}

/// The index that `unit`, from 0 to below 1, falls on if every index is as long as its weight.
fn pick(weights: &[f32], sums: &mut Vec<f64>, unit: f64) -> Option<u32> {
    let mut rest = unit * block_sums(weights, sums);
    let mut last = None;
    for (block, sum) in sums.iter().enumerate() {
        if *sum <= 0.0 {
            continue;
        }
        let start = block * BLOCK;
        let here = weights[start..].iter().take(BLOCK).enumerate().filter(|(_, weight)| **weight > 0.0);
        if rest < *sum {
            for (i, weight) in here {
                last = Some((start + i) as u32);
                rest -= f64::from(*weight);
                if rest < 0.0 {
                    break;
                }
            }
            return last;
        }
        last = here.map(|(i, _)| (start + i) as u32).next_back();
        rest -= sum;
    }
    last
}

/// The largest value of a block without NaN.
fn top_of(block: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; 16];
    let mut parts = block.chunks_exact(16);
    for part in &mut parts {
        for i in 0..16 {
            lanes[i] = larger(lanes[i], part[i]);
        }
    }
    lanes.iter().chain(parts.remainder()).copied().fold(f32::NEG_INFINITY, larger)
}

/// The larger value first, of equal ones the lower index.
fn descending(a: &(u32, f32), b: &(u32, f32)) -> std::cmp::Ordering {
    b.1.partial_cmp(&a.1).unwrap_or(std::cmp::Ordering::Equal).then(a.0.cmp(&b.0))
}

/// Finds the largest of many values.
#[derive(Debug, Default)]
struct Best {
    tops: Vec<f32>,
    order: Vec<f32>,
    /// Index and value, the largest first, of equal ones the lower index.
    found: Vec<(u32, f32)>,
}

impl Best {
    /// The `n` largest values that are not negative infinity. Exact: the `n`-th largest top of a block is a lower bound of the
    /// `n`-th largest value, so few values are left to be ordered.
    fn find(&mut self, values: &[f32], n: usize) {
        self.found.clear();
        if n == 0 {
            return;
        }
        self.tops.clear();
        self.tops.extend(values.chunks(BLOCK).map(top_of));
        let mut bound = f32::NEG_INFINITY;
        if n <= self.tops.len() {
            self.order.clone_from(&self.tops);
            bound = *self.order.select_nth_unstable_by(n - 1, |a, b| b.total_cmp(a)).1;
        }
        for (block, top) in self.tops.iter().enumerate().filter(|(_, top)| **top >= bound) {
            if *top == f32::NEG_INFINITY {
                continue;
            }
            let start = block * BLOCK;
            let here = values[start..].iter().take(BLOCK).enumerate();
            let here = here.filter(|(_, value)| **value >= bound && **value > f32::NEG_INFINITY);
            self.found.extend(here.map(|(i, value)| ((start + i) as u32, *value)));
        }
        if n < self.found.len() {
            self.found.select_nth_unstable_by(n - 1, descending);
            self.found.truncate(n);
        }
        self.found.sort_unstable_by(descending);
    }
}

/// Log-probabilities of a token and of the `n` best.
#[must_use]
pub fn logprobs(logits: &[f32], chosen: u32, n: usize) -> Logprobs {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    logprobs_with(logits, top, chosen, n, &mut Scratch::default())
}

fn logprobs_with(logits: &[f32], top: f32, chosen: u32, n: usize, scratch: &mut Scratch) -> Logprobs {
    weigh(logits, top, 1.0, &mut scratch.weights);
    let norm = f64::from(top) + block_sums(&scratch.weights, &mut scratch.sums).ln();
    // -9999 is what clients of the OpenAI API get for an impossible token; JSON has no infinity.
    let logprob = |logit: f32| ((f64::from(logit) - norm) as f32).max(-9999.0);
    scratch.best.find(logits, n.min(logits.len()));
    let of = |(id, logit): &(u32, f32)| TokenLogprob { id: *id, logprob: logprob(*logit) };
    Logprobs {
        chosen: TokenLogprob { id: chosen, logprob: logits.get(chosen as usize).map_or(-9999.0, |l| logprob(*l)) },
        top: scratch.best.found.iter().map(of).collect(),
    }
}

#[cfg(test)]
mod tests;
