//! Figures of an engine: what it holds now and what it has done since it started.
//!
//! Counters only grow; a monitor takes differences. Times are seconds of the engine's thread.

/// Upper bounds of the histogram of tokens in a step.
pub const STEP_TOKENS_BOUNDS: [u32; 11] = [1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048];

/// Pools of an engine's memory, in bytes.
///
/// Only the pool of the KV cache hands memory out and takes it back, so it alone can have fragments. Activations have one
/// piece of memory whose places are planned beforehand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolStats {
    /// Weights in the device's form, and those that were copied or converted; not those that lie in a mapped file as they are.
    pub weights: u64,
    /// Activations and workspace.
    pub activations: u64,
    /// Inputs and results of steps.
    pub step_buffers: u64,
    /// The KV cache: what has memory behind it.
    pub kv_backed: u64,
    /// The KV cache: blocks that nobody has, whether or not they have memory behind them yet.
    pub kv_free: u64,
    /// The KV cache: the longest run of such blocks, or the sum of several engines' longest.
    pub kv_largest_free: u64,
}

impl PoolStats {
    /// Share of the KV cache's free memory that lies outside its longest run, 0 to 1.
    #[must_use]
    pub fn kv_fragmentation(&self) -> f64 {
        if self.kv_free == 0 { 0.0 } else { 1.0 - self.kv_largest_free as f64 / self.kv_free as f64 }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            weights: self.weights + other.weights,
            activations: self.activations + other.activations,
            step_buffers: self.step_buffers + other.step_buffers,
            kv_backed: self.kv_backed + other.kv_backed,
            kv_free: self.kv_free + other.kv_free,
            kv_largest_free: self.kv_largest_free + other.kv_largest_free,
        }
    }
}

/// A picture of an engine, taken after a step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct EngineStats {
    /// Requests that wait to start, preempted ones included.
    pub waiting: usize,
    /// Requests that take part in steps.
    pub running: usize,
    /// Most requests of a step.
    pub max_sequences: usize,
    /// Most tokens of a step.
    pub max_step_tokens: usize,
    /// Most rows of logits of a step, guesses aside.
    pub max_step_rows: usize,
    /// Tokens of a block of the KV cache.
    pub block_size: u32,
    /// Blocks of the KV cache.
    pub blocks_total: u32,
    /// Blocks that running requests hold.
    pub blocks_used: u32,
    /// Blocks that nobody holds but whose contents the prefix cache keeps; they are given away when needed.
    pub blocks_cached: u32,
    /// Pools of memory; looked at once a second while there is work, and when there is none.
    pub memory: PoolStats,
    /// Prompt tokens that were looked up in the prefix cache.
    pub prefix_query_tokens: u64,
    /// Of these, tokens that were found.
    pub prefix_hit_tokens: u64,
    /// Times that a request gave its blocks away to be computed again later.
    pub preemptions: u64,
    /// Prompt tokens of requests that have started.
    pub prompt_tokens: u64,
    /// Generated tokens.
    pub generated_tokens: u64,
    /// Requests that ended by end of text, a stop token or a stop text.
    pub finished_stop: u64,
    /// Requests that ended at a limit of tokens.
    pub finished_length: u64,
    /// Requests that were cancelled.
    pub finished_cancelled: u64,
    /// Requests whose deadline passed.
    pub finished_deadline: u64,
    /// Requests that ended by broken logits, an empty grammar or a failed device.
    pub finished_error: u64,
    /// Rows of logits that held NaN or an infinity.
    pub corrupted: u64,
    /// Steps that the device failed to compute.
    pub device_errors: u64,
    /// Steps of which a row was computed twice to be compared.
    pub guard_checks: u64,
    /// Of these, steps that were not equal.
    pub guard_mismatches: u64,
    /// Seconds of these checks.
    pub guard_seconds: f64,
    /// Steps.
    pub steps: u64,
    /// Seconds of all steps: the four parts below and what is around them.
    pub step_seconds: f64,
    /// Seconds of planning: queue, blocks, prefix cache.
    pub plan_seconds: f64,
    /// Seconds of the model: inputs, launches, logits to the host.
    pub forward_seconds: f64,
    /// Seconds of choosing tokens.
    pub sample_seconds: f64,
    /// Seconds of grammars' masks, most of them beside `forward_seconds`.
    pub mask_seconds: f64,
    /// Tokens computed in steps: prompts, answers, drafts, and what preemption made necessary again.
    pub computed_tokens: u64,
    /// Steps by the tokens that they computed; entry `i` counts those of at most [`STEP_TOKENS_BOUNDS`]`[i]`, the last one the
    /// others.
    pub step_tokens: [u64; STEP_TOKENS_BOUNDS.len() + 1],
    /// Tokens of the last step.
    pub last_step_tokens: u32,
    /// Sequences of the last step.
    pub last_step_sequences: u32,
    /// Seconds of the last step.
    pub last_step_seconds: f64,
    /// Drafts made by prompt lookup.
    pub drafts: u64,
    /// Tokens of these drafts.
    pub draft_tokens: u64,
    /// Of these, tokens that the model chose too.
    pub accepted_tokens: u64,
    /// Share of the device's compute that recent steps used, 0 to 1.
    pub compute_utilisation: f64,
    /// Share of the device's memory bandwidth that recent steps used, 0 to 1.
    pub bandwidth_utilisation: f64,
    /// Hardware load index: 0.6 x compute + 0.4 x bandwidth.
    pub hli: f64,
    /// Most prompt tokens that a step takes beside generating sequences, if it takes any.
    pub prefill_budget: u32,
}

impl EngineStats {
    pub(crate) fn count_step(&mut self, tokens: u32, sequences: u32) {
        self.steps += 1;
        self.computed_tokens += u64::from(tokens);
        let at = STEP_TOKENS_BOUNDS.iter().position(|bound| tokens <= *bound).unwrap_or(STEP_TOKENS_BOUNDS.len());
        self.step_tokens[at] += 1;
        self.last_step_tokens = tokens;
        self.last_step_sequences = sequences;
    }

    pub(crate) const fn count_finish(&mut self, reason: &crate::FinishReason) {
        use crate::FinishReason as F;
        match reason {
            F::EndOfText | F::StopToken(_) | F::StopText(_) => self.finished_stop += 1,
            F::Length => self.finished_length += 1,
            F::Cancelled => self.finished_cancelled += 1,
            F::Deadline => self.finished_deadline += 1,
            F::Logits(_) | F::Grammar(_) | F::Error(_) | F::Device(_) => self.finished_error += 1,
        }
    }

    /// The figures of several engines as one: sums of what is counted and held, means of shares (of those at work, if any is),
    /// the latest and longest of what belongs to one step.
    #[must_use]
    pub fn together(all: impl IntoIterator<Item = Self>) -> Self {
        let all: Vec<Self> = all.into_iter().collect();
        let mut sum = all.iter().fold(Self::default(), |sum, one| one.after(sum));
        let busy: Vec<&Self> = all.iter().filter(|one| one.running > 0).collect();
        let looked = if busy.is_empty() { all.iter().collect() } else { busy };
        let mean =
            |of: &dyn Fn(&Self) -> f64| looked.iter().map(|one| of(one)).sum::<f64>() / looked.len().max(1) as f64;
        sum.compute_utilisation = mean(&|one| one.compute_utilisation);
        sum.bandwidth_utilisation = mean(&|one| one.bandwidth_utilisation);
        sum.hli = mean(&|one| one.hli);
        sum.memory = all.iter().fold(PoolStats::default(), |sum, one| sum.plus(one.memory));
        let held = |of: &dyn Fn(&Self) -> usize| all.iter().map(of).sum();
        (sum.waiting, sum.running, sum.max_sequences) =
            (held(&|one| one.waiting), held(&|one| one.running), held(&|one| one.max_sequences));
        let largest = |of: &dyn Fn(&Self) -> usize| all.iter().map(of).max().unwrap_or(0);
        (sum.max_step_tokens, sum.max_step_rows) =
            (largest(&|one| one.max_step_tokens), largest(&|one| one.max_step_rows));
        let blocks = |of: &dyn Fn(&Self) -> u32| all.iter().map(of).fold(0, u32::saturating_add);
        (sum.blocks_total, sum.blocks_used, sum.blocks_cached) =
            (blocks(&|one| one.blocks_total), blocks(&|one| one.blocks_used), blocks(&|one| one.blocks_cached));
        let most = |of: &dyn Fn(&Self) -> u32| all.iter().map(of).max().unwrap_or(0);
        (sum.last_step_tokens, sum.last_step_sequences, sum.prefill_budget) =
            (most(&|one| one.last_step_tokens), most(&|one| one.last_step_sequences), most(&|one| one.prefill_budget));
        sum.last_step_seconds = all.iter().map(|one| one.last_step_seconds).fold(0.0, f64::max);
        sum
    }

    /// What is now, with everything that an earlier engine of the device had counted.
    #[must_use]
    pub fn after(&self, earlier: Self) -> Self {
        let mut sum = *self;
        let counters: [(&mut u64, u64); 19] = [
            (&mut sum.prefix_query_tokens, earlier.prefix_query_tokens),
            (&mut sum.prefix_hit_tokens, earlier.prefix_hit_tokens),
            (&mut sum.preemptions, earlier.preemptions),
            (&mut sum.prompt_tokens, earlier.prompt_tokens),
            (&mut sum.generated_tokens, earlier.generated_tokens),
            (&mut sum.finished_stop, earlier.finished_stop),
            (&mut sum.finished_length, earlier.finished_length),
            (&mut sum.finished_cancelled, earlier.finished_cancelled),
            (&mut sum.finished_deadline, earlier.finished_deadline),
            (&mut sum.finished_error, earlier.finished_error),
            (&mut sum.corrupted, earlier.corrupted),
            (&mut sum.device_errors, earlier.device_errors),
            (&mut sum.guard_checks, earlier.guard_checks),
            (&mut sum.guard_mismatches, earlier.guard_mismatches),
            (&mut sum.steps, earlier.steps),
            (&mut sum.computed_tokens, earlier.computed_tokens),
            (&mut sum.drafts, earlier.drafts),
            (&mut sum.draft_tokens, earlier.draft_tokens),
            (&mut sum.accepted_tokens, earlier.accepted_tokens),
        ];
        counters.into_iter().for_each(|(now, before)| *now += before);
        let seconds: [(&mut f64, f64); 6] = [
            (&mut sum.guard_seconds, earlier.guard_seconds),
            (&mut sum.step_seconds, earlier.step_seconds),
            (&mut sum.plan_seconds, earlier.plan_seconds),
            (&mut sum.forward_seconds, earlier.forward_seconds),
            (&mut sum.sample_seconds, earlier.sample_seconds),
            (&mut sum.mask_seconds, earlier.mask_seconds),
        ];
        seconds.into_iter().for_each(|(now, before)| *now += before);
        sum.step_tokens.iter_mut().zip(earlier.step_tokens).for_each(|(now, before)| *now += before);
        sum
    }

    /// Share of the KV cache's blocks that running requests hold, 0 to 1.
    #[must_use]
    pub fn kv_utilisation(&self) -> f64 {
        f64::from(self.blocks_used) / f64::from(self.blocks_total.max(1))
    }
}
