//! How loaded the device is, and how much of a prompt fits beside answers that are being generated.
//!
//! In: what each step computed and how long it took. Out: utilisations, the hardware load index (HLI = 0.6 x compute + 0.4 x
//! bandwidth), and a budget of prompt tokens for the next step. Utilisation is what the step's mathematics needs at least, over
//! what the device does at most in the time it took; the device's rates come from whoever probed it, or else are the best that
//! steps have reached so far; a rate that steps exceed was measured on a bad day, and what they reach counts from then on. Steps of generating sequences alone say what a token costs them; what a step with prompts takes
//! longer is the prompts' price. The HLI says how large a piece of a prompt may be that a step takes beside answers:
//! - below 0.7, merging costs little: the whole room above a step without prompts;
//! - above 0.85 the device has nothing to give: half of it;
//! - between, in between.
//!
//! The room is what a target for the time per output token leaves; without one it is [`PIECE`] times a step without prompts,
//! and prompts then wait for as many steps as their share of the time demands.

use std::time::Duration;

use qwen_runtime::Cost;

/// What a device does at most. Rates of float32 stand for those that are missing.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct DeviceRates {
    /// Bytes read from memory per second.
    pub read_bytes: f64,
    /// Operations per second on int8, a multiplication and an addition counting as two.
    pub int8_operations: Option<f64>,
    /// Operations per second on bfloat16.
    pub bf16_operations: Option<f64>,
    /// Operations per second on float32.
    pub f32_operations: Option<f64>,
}

/// Below it, prompts and answers are merged eagerly.
pub const HLI_MERGE: f64 = 0.7;
/// Above it, steps are split to protect the time per output token.
pub const HLI_SPLIT: f64 = 0.85;
/// Without a target: time of a step's piece of prompts, in steps without prompts. Large pieces leave most steps without any, so that
/// most gaps between tokens are the shortest possible.
const PIECE: f64 = 4.0;
/// Without a target: most time of prompts for each second of answers; the least is 1. What is prompted joins a batch whose steps
/// cost all of it together little more, so it is worth more than its number says.
const MOST_FAVOUR: f64 = 4.0;
/// Fewest prompt tokens of a step that takes any: prompts get on, whatever the target.
const LEAST_BUDGET: u32 = 16;
/// Prompt tokens beside answers while nothing is known of their price.
const FIRST_BUDGET: u32 = 64;
/// Steps between two looks at what a step needs: the look itself costs some 0.1 ms.
const LOOK_EVERY: u32 = 16;
/// Weight of the newest value in a mean.
const NEWEST: f64 = 0.2;

/// A mean in which old values fade.
#[derive(Debug, Clone, Copy, Default)]
struct Mean(Option<f64>);

impl Mean {
    fn add(&mut self, value: f64) {
        self.0 = Some(self.0.map_or(value, |old| old + NEWEST * (value - old)));
    }
}

/// What a step computed.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct StepLoad {
    /// Tokens of prompts.
    pub(crate) prompt_tokens: u32,
    /// Tokens of sequences that generate, drafts included.
    pub(crate) decode_tokens: u32,
    /// Seconds of the model.
    pub(crate) seconds: f64,
}

/// Rates, means and the budget that follows from them.
#[derive(Debug)]
pub(crate) struct LoadMeter {
    rates: Option<DeviceRates>,
    target: Option<f64>,
    /// Seconds of a step without prompts, by the power of two of its tokens.
    decode: [Mean; 16],
    /// Seconds of a prompt token.
    prompt: Mean,
    /// Whether the step that is being computed has answers.
    is_shared: bool,
    /// Seconds that prompts have had beyond their share.
    ahead: f64,
    compute: Mean,
    bandwidth: Mean,
    /// The best rates of all steps so far, for a device whose rates are unknown.
    best: (f64, f64),
    /// How many times as much as the rates say steps have reached; at least 1.
    beyond: (f64, f64),
    until_look: u32,
}

impl LoadMeter {
    pub(crate) fn new(rates: Option<DeviceRates>, target: Option<Duration>) -> Self {
        Self {
            rates: rates.filter(|rates| rates.read_bytes > 0.0),
            target: target.map(|target| target.as_secs_f64()),
            decode: [Mean::default(); 16],
            prompt: Mean::default(),
            is_shared: false,
            ahead: 0.0,
            compute: Mean::default(),
            bandwidth: Mean::default(),
            best: (0.0, 0.0),
            beyond: (1.0, 1.0),
            until_look: 0,
        }
    }

    /// Whether the cost of the next step is wanted.
    pub(crate) const fn wants_cost(&mut self) -> bool {
        let wanted = self.until_look == 0;
        self.until_look = if wanted { LOOK_EVERY } else { self.until_look - 1 };
        wanted
    }

    /// Takes a step, and what it needed if that was asked for.
    pub(crate) fn observe(&mut self, step: StepLoad, cost: Option<Cost>) {
        if step.seconds <= 0.0 {
            return;
        }
        let rest = step.seconds - self.decode_seconds(step.decode_tokens).unwrap_or(0.0);
        if step.prompt_tokens == 0 {
            self.decode[bucket(step.decode_tokens)].add(step.seconds);
        } else if step.prompt_tokens >= LEAST_BUDGET && rest > 0.0 {
            self.prompt.add(rest / f64::from(step.prompt_tokens));
        }
        if step.prompt_tokens > 0 && self.is_shared {
            self.ahead += rest.max(0.0);
        }
        let Some(cost) = cost else { return };
        let (bytes, operations) = ((cost.weight_bytes + cost.cache_bytes) as f64, cost.operations as f64);
        self.best.0 = self.best.0.max(bytes / step.seconds);
        self.best.1 = self.best.1.max(operations / step.seconds);
        let (read, multiply) = match self.rates {
            Some(rates) => {
                let (read, multiply) = (bytes / rates.read_bytes, multiply_seconds(&rates, &cost));
                self.beyond.0 = self.beyond.0.max(read / step.seconds);
                self.beyond.1 = self.beyond.1.max(multiply / step.seconds);
                (read / self.beyond.0, multiply / self.beyond.1)
            }
            None => (bytes / self.best.0.max(1.0), operations / self.best.1.max(1.0)),
        };
        self.bandwidth.add((read / step.seconds).min(1.0));
        self.compute.add((multiply / step.seconds).min(1.0));
    }

    /// Seconds of a step without prompts, from the nearest number of tokens that is known.
    fn decode_seconds(&self, tokens: u32) -> Option<f64> {
        if tokens == 0 {
            return Some(0.0);
        }
        let at = bucket(tokens);
        let near = (0..self.decode.len()).filter(|i| self.decode[*i].0.is_some()).min_by_key(|i| i.abs_diff(at));
        near.and_then(|i| self.decode[i].0)
    }

    pub(crate) fn compute_utilisation(&self) -> f64 {
        self.compute.0.unwrap_or(0.0)
    }
    pub(crate) fn bandwidth_utilisation(&self) -> f64 {
        self.bandwidth.0.unwrap_or(0.0)
    }
    pub(crate) fn hli(&self) -> f64 {
        0.6 * self.compute_utilisation() + 0.4 * self.bandwidth_utilisation()
    }

    /// Most prompt tokens of the next step beside so many tokens of sequences that generate; `waiting` is how many requests wait
    /// for their prompt for each one that generates, `most` what a step holds. Asked once for each step.
    ///
    /// Without a target, prompts have between as much of the time as answers, where few wait, and [`MOST_FAVOUR`] times as much,
    /// where as many wait as generate: one long prompt at most doubles the time per output token, a burst of short ones gets
    /// in and is then generated together.
    pub(crate) fn prompt_budget(&mut self, decode_tokens: u32, waiting: f64, most: u32) -> u32 {
        self.is_shared = decode_tokens > 0;
        if !self.is_shared {
            self.ahead = 0.0;
            return most;
        }
        let (Some(decode), Some(price)) = (self.decode_seconds(decode_tokens), self.prompt.0) else {
            return FIRST_BUDGET.min(most);
        };
        let share = 1.0 - 0.5 * ((self.hli() - HLI_MERGE) / (HLI_SPLIT - HLI_MERGE)).clamp(0.0, 1.0);
        let room = match self.target {
            Some(target) => target.max(decode) - decode,
            None => {
                self.ahead = (self.ahead - decode * (MOST_FAVOUR * waiting).clamp(1.0, MOST_FAVOUR)).max(0.0);
                if self.ahead > 0.0 {
                    return 0;
                }
                PIECE * decode
            }
        };
        ((room * share / price) as u32).max(LEAST_BUDGET).min(most)
    }
}

fn bucket(tokens: u32) -> usize {
    (u32::BITS - tokens.max(1).leading_zeros() - 1).min(15) as usize
}

fn multiply_seconds(rates: &DeviceRates, cost: &Cost) -> f64 {
    let seconds = |operations: u64, rate: Option<f64>| {
        rate.or(rates.f32_operations).filter(|rate| *rate > 0.0).map_or(0.0, |rate| operations as f64 / rate)
    };
    seconds(cost.int8_operations, rates.int8_operations)
        + seconds(cost.bf16_operations, rates.bf16_operations)
        + seconds(cost.f32_operations, rates.f32_operations)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATES: DeviceRates =
        DeviceRates { read_bytes: 1e9, int8_operations: Some(1e12), bf16_operations: None, f32_operations: Some(1e11) };

    fn step(prompt_tokens: u32, decode_tokens: u32, seconds: f64) -> StepLoad {
        StepLoad { prompt_tokens, decode_tokens, seconds }
    }

    #[test]
    fn utilisation_is_the_least_time_over_the_time() {
        let mut meter = LoadMeter::new(Some(RATES), None);
        let cost =
            Cost { weight_bytes: 4_000_000, cache_bytes: 1_000_000, f32_operations: 200_000_000, ..Cost::default() };
        meter.observe(step(0, 1, 0.01), Some(cost));
        assert!((meter.bandwidth_utilisation() - 0.5).abs() < 1e-9);
        assert!((meter.compute_utilisation() - 0.2).abs() < 1e-9);
        assert!((meter.hli() - 0.32).abs() < 1e-9);
    }

    #[test]
    fn without_rates_the_best_step_is_the_measure() {
        let mut meter = LoadMeter::new(None, None);
        let cost = |bytes, operations| Cost { weight_bytes: bytes, operations, ..Cost::default() };
        meter.observe(step(0, 1, 0.01), Some(cost(1000, 10)));
        assert!((meter.hli() - 1.0).abs() < 1e-9);
        for _ in 0..50 {
            meter.observe(step(0, 1, 0.02), Some(cost(1000, 10)));
        }
        assert!((meter.hli() - 0.5).abs() < 1e-3, "{}", meter.hli());
    }

    #[test]
    fn rates_that_steps_exceed_are_raised() {
        let mut meter = LoadMeter::new(Some(RATES), None);
        let cost = |bytes| Cost { weight_bytes: bytes, ..Cost::default() };
        meter.observe(step(0, 1, 0.01), Some(cost(40_000_000)));
        assert!((meter.bandwidth_utilisation() - 1.0).abs() < 1e-9);
        for _ in 0..50 {
            meter.observe(step(0, 1, 0.01), Some(cost(10_000_000)));
        }
        assert!((meter.bandwidth_utilisation() - 0.25).abs() < 1e-3, "{}", meter.bandwidth_utilisation());
    }

    #[test]
    fn the_budget_fills_the_target() {
        let mut meter = LoadMeter::new(Some(RATES), Some(Duration::from_millis(50)));
        assert_eq!(meter.prompt_budget(0, 0.0, 512), 512);
        assert_eq!(meter.prompt_budget(8, 3.0, 512), FIRST_BUDGET);
        meter.observe(step(0, 8, 0.01), None);
        meter.observe(step(100, 0, 0.05), None);
        // 40 ms are left at 0.5 ms a token.
        assert_eq!(meter.prompt_budget(8, 3.0, 512), 80);
        assert_eq!(meter.prompt_budget(8, 3.0, 32), 32);
        // A loaded device splits.
        let busy = Cost { weight_bytes: 10_000_000, int8_operations: 10_000_000_000, ..Cost::default() };
        for _ in 0..60 {
            meter.observe(step(0, 8, 0.01), Some(busy));
        }
        assert!(meter.hli() > HLI_SPLIT);
        assert_eq!(meter.prompt_budget(8, 3.0, 512), 40);
        // A target that can't be met still lets prompts through.
        let mut late = LoadMeter::new(Some(RATES), Some(Duration::from_millis(1)));
        late.observe(step(0, 8, 0.01), None);
        late.observe(step(100, 0, 0.05), None);
        assert_eq!(late.prompt_budget(8, 3.0, 512), LEAST_BUDGET);
    }

    /// Runs steps of 10 ms for eight answers beside prompts that never end; the budgets.
    fn budgets(waiting: f64, steps: usize) -> Vec<u32> {
        let mut meter = LoadMeter::new(Some(RATES), None);
        meter.observe(step(0, 8, 0.01), None);
        meter.observe(step(100, 0, 0.05), None);
        let next = |_| {
            let budget = meter.prompt_budget(8, waiting, 512);
            meter.observe(step(budget, 8, 0.01 + 0.0005 * f64::from(budget)), None);
            budget
        };
        (0..steps).map(next).collect()
    }

    #[test]
    fn without_a_target_time_is_shared_by_number() {
        // A piece is worth four steps; few that wait have half of the time, many four fifths.
        for (waiting, every) in [(0.0, 4), (0.125, 4), (0.5, 2), (1.0, 1), (100.0, 1)] {
            let expected: Vec<u32> = (0..32).map(|at| if at % every == 0 { 80 } else { 0 }).collect();
            assert_eq!(budgets(waiting, 32), expected, "{waiting}");
        }
    }

    #[test]
    fn time_without_prompts_is_not_saved_up() {
        let mut meter = LoadMeter::new(Some(RATES), None);
        meter.observe(step(0, 8, 0.01), None);
        meter.observe(step(100, 0, 0.05), None);
        for _ in 0..100 {
            assert_eq!(meter.prompt_budget(8, 0.0, 512), 80);
        }
        // Of models whose phases differ, prompts are a part of their own.
        meter.observe(step(160, 0, 0.08), None);
        assert_eq!(meter.prompt_budget(8, 0.0, 512), 0);
        // Nobody generates any more: nobody is kept waiting for.
        assert_eq!(meter.prompt_budget(0, 1.0, 512), 512);
        assert_eq!(meter.prompt_budget(8, 0.0, 512), 80);
    }
}
