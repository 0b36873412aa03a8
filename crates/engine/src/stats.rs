//! Figures of an engine: what it holds now and what it has done since it started.
//!
//! Counters only grow; a monitor takes differences. Times are seconds of the engine's thread.

/// Upper bounds of the histogram of tokens in a step.
pub const STEP_TOKENS_BOUNDS: [u32; 11] = [1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048];

/// A picture of an engine, taken after a step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct EngineStats {
    /// Requests that wait to start, preempted ones included.
    pub waiting: usize,
    /// Requests that take part in steps.
    pub running: usize,
    /// Most requests of a step.
    pub max_sequences: usize,
    /// Tokens of a block of the KV cache.
    pub block_size: u32,
    /// Blocks of the KV cache.
    pub blocks_total: u32,
    /// Blocks that running requests hold.
    pub blocks_used: u32,
    /// Blocks that nobody holds but whose contents the prefix cache keeps; they are given away when needed.
    pub blocks_cached: u32,
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
    /// Most prompt tokens that a step takes beside generating sequences now.
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
            F::Logits(_) | F::Error(_) | F::Device(_) => self.finished_error += 1,
        }
    }

    /// Share of the KV cache's blocks that running requests hold, 0 to 1.
    #[must_use]
    pub fn kv_utilisation(&self) -> f64 {
        f64::from(self.blocks_used) / f64::from(self.blocks_total.max(1))
    }
}
