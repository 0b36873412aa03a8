//! Guard against silent corruption: a device that computes wrongly without saying so.
//!
//! What it rests on: the same model on the same device type gives the same bits for a row of logits, whatever else is in the
//! step. So a right answer is known exactly, and any difference, however small, is a fault. Two checks:
//! - **Known answers** ([`Engine::known_answer`]): a fixed sequence, as a prompt and token by token; its logits as a digest.
//!   The digest of a device that was found right is kept, and every later one must be equal. It finds what *stays* wrong: bits
//!   of weights in memory, a broken unit, a wrong kernel; and logits that are no numbers. Weights that the sequence does not
//!   touch (experts that are not chosen, rows of the embedding) are not looked at.
//! - **Sampled recomputation** on the hot path: now and then the last row of one request of a step is computed a second
//!   time, alone, and compared bit by bit before any token of the step is handed out. It covers every op of the step for
//!   that row. It finds what *comes and goes*: flips in registers, in activations, on the way to and from the device, races.
//!   What gives the same wrong bits twice is left to the known answers.
//!
//! Why not checksums of products (a sum of columns carried along, as in ABFT): products here quantise their activations, so
//! such a sum holds only up to rounding, and a flipped low bit hides in it; the activations would have to come back to the
//! host; and norms, attention and the cache would go unchecked. Recomputing needs nothing of a device but what it has, and no
//! tolerance.
//!
//! The cost is bounded by bookkeeping, not by hope: each step earns a share of its time ([`GuardOptions::share`]), and the next
//! check waits until what the last one took has been earned. Of a device that is wrong in one of `k` steps, where a check
//! comes every `n` steps, it is found after about `n * k` steps; until then wrong tokens get out. What a wrong step left in the
//! cache is read by both computations and so not seen. That is the price of a bound on cost, and why known answers are asked for
//! as well.
//!
//! After a difference nobody can tell which of the two was wrong, nor since when: the step's tokens are dropped, every request
//! ends with [`FinishReason::Device`], and the prefix cache is forgotten, so that no wrong key or value outlives it.

use std::ops::Range;
use std::time::Instant;

use qwen_runtime::{Batch, LogitRows, RuntimeError, SequenceKv};

use crate::engine::Engine;
use crate::queue::Waiting;
use crate::schedule::Part;
use crate::{EngineError, FinishReason, Output};

/// How much checking on the hot path may take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GuardOptions {
    /// Share of the time of steps; above 1, every step is checked.
    pub share: f64,
}

impl Default for GuardOptions {
    fn default() -> Self {
        Self { share: 0.005 }
    }
}

/// Account of the checks on the hot path.
#[derive(Debug, Default)]
pub(crate) struct Guard {
    share: f64,
    /// Seconds that were earned and not spent.
    credit: f64,
    /// Seconds of the last check.
    price: f64,
    /// Whose turn it is.
    turn: usize,
    row: Vec<f32>,
    /// Something computed was wrong: what is cached must go.
    tainted: bool,
}

impl Guard {
    pub(crate) fn new(options: Option<GuardOptions>) -> Self {
        let share = options.map_or(0.0, |options| options.share.max(0.0));
        Self { share, ..Self::default() }
    }

    /// Whether the next step is to be checked; the step's time counts.
    fn is_due(&mut self, seconds: f64) -> bool {
        self.credit += self.share * seconds;
        self.share > 0.0 && self.credit >= self.price
    }

    fn pay(&mut self, seconds: f64) {
        self.credit -= seconds;
        self.price = seconds;
    }

    pub(crate) const fn is_tainted(&self) -> bool {
        self.tainted
    }
}

/// Most tokens of the known sequence.
const KNOWN_TOKENS: usize = 16;
/// Of these, tokens that are computed one by one as well.
const KNOWN_STEPS: usize = 4;

/// Logits of the known sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct KnownAnswer {
    /// Of all bits; equal only if they are.
    pub digest: u64,
    /// Of the prompt, row by row.
    pub rows: Vec<Vec<f32>>,
}

impl KnownAnswer {
    /// Mean Kullback-Leibler divergence from another answer in nats; infinite if their forms differ.
    #[must_use]
    pub fn divergence(&self, other: &Self) -> f64 {
        let is_alike = self.rows.len() == other.rows.len() && !self.rows.is_empty();
        if !is_alike || self.rows.iter().zip(&other.rows).any(|(a, b)| a.len() != b.len()) {
            return f64::INFINITY;
        }
        let sum: f64 = self.rows.iter().zip(&other.rows).map(|(a, b)| row_divergence(a, b)).sum();
        sum / self.rows.len() as f64
    }
}

fn row_divergence(a: &[f32], b: &[f32]) -> f64 {
    let log_sum = |row: &[f32]| {
        let most = row.iter().copied().fold(f32::MIN, f32::max);
        f64::from(most) + row.iter().map(|x| f64::from(x - most).exp()).sum::<f64>().ln()
    };
    let (norm_a, norm_b) = (log_sum(a), log_sum(b));
    a.iter().zip(b).fold(0.0, |sum, (a, b)| {
        let (a, b) = (f64::from(*a) - norm_a, f64::from(*b) - norm_b);
        sum + a.exp() * (a - b)
    })
}

/// FNV-1a over the bits of a row.
fn digest(seed: u64, row: &[f32]) -> u64 {
    row.iter().fold(seed, |hash, value| (hash ^ u64::from(value.to_bits())).wrapping_mul(0x0100_0000_01b3))
}

fn differs(a: &[f32], b: &[f32]) -> bool {
    a.len() != b.len() || a.iter().zip(b).any(|(a, b)| a.to_bits() != b.to_bits())
}

impl Engine {
    /// Computes the known sequence beside the requests in flight, which are not touched.
    ///
    /// # Errors
    /// If a logit is no number, the device fails, or the cache has no room now ([`is_no_room`]).
    pub fn known_answer(&mut self) -> Result<KnownAnswer, EngineError> {
        let limits = self.limits();
        // Scattered over the vocabulary, the same for every load of a model.
        let token = |i: usize| (i as u64 + 1).wrapping_mul(2_654_435_761) % u64::from(limits.vocab_size.max(1));
        let count = KNOWN_TOKENS.min(limits.max_seq_len as usize);
        let tokens: Vec<u32> = (0..count).map(|i| token(i) as u32).collect();
        let (mut rows, mut hash, mut broken) = (Vec::with_capacity(count), 0xcbf2_9ce4_8422_2325, None);
        let mut take = |row: &[f32], keep: bool| {
            hash = digest(hash, row);
            broken = broken.or_else(|| row.iter().enumerate().find(|(_, x)| !x.is_finite()).map(|(at, x)| (at, *x)));
            if keep {
                rows.push(row.to_vec());
            }
        };
        self.logits(&tokens, false, &mut |row| take(row, true))?;
        self.logits(&tokens[..count.min(KNOWN_STEPS)], true, &mut |row| take(row, false))?;
        match broken {
            Some((token, value)) => Err(EngineError::NonFinite { token: token as u32, value }),
            None => Ok(KnownAnswer { digest: hash, rows }),
        }
    }

    /// The known answer, if it is the same every time.
    ///
    /// # Errors
    /// As [`Engine::known_answer`], or that answers differ.
    pub(crate) fn repeated_answer(&mut self, runs: u32) -> Result<KnownAnswer, EngineError> {
        let first = self.known_answer()?;
        for _ in 1..runs {
            if self.known_answer()?.digest != first.digest {
                return Err(EngineError::NotRepeated);
            }
        }
        Ok(first)
    }

    /// Computes a row of a step once more, if it is time, and compares.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub(crate) fn check_step(&mut self, part: &Part, rows: &[Range<usize>], seconds: f64) -> Result<(), String> {
        if !self.guard.is_due(seconds) {
            return Ok(());
        }
        let is_whole = |at: &usize| {
            let member = &part.members[*at];
            !rows[*at].is_empty() && member.tokens == self.running[member.at].pending()
        };
        let whole: Vec<usize> = (0..part.members.len()).filter(is_whole).collect();
        if whole.is_empty() {
            return Ok(());
        }
        let start = Instant::now();
        self.guard.turn = self.guard.turn.wrapping_add(1);
        let at = whole[self.guard.turn % whole.len()];
        let sequence = &self.running[part.members[at].at];
        let before = SequenceKv { blocks: sequence.kv.blocks.clone(), len: sequence.tokens.len() as u32 - 1 };
        let last = &sequence.tokens[sequence.tokens.len() - 1..];
        let first_row = rows[at].end - 1 - sequence.draft.len();
        let mut row = std::mem::take(&mut self.guard.row);
        let mut batch = Batch::new(self.loaded.model.block_size());
        let again = batch
            .push(&before, last, LogitRows::Last)
            .and_then(|()| self.loaded.model.compute(part.result, part.phase, &batch, &mut row));
        let width = self.loaded.model.width(part.result).max(1);
        let known = self.rows.get(first_row * width..(first_row + 1) * width).unwrap_or_default();
        let result = match again {
            Err(error) => Err(error.to_string()),
            Ok(()) if differs(known, &row) => {
                let unequal = known.iter().zip(&row).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                Err(format!(
                    "a step computed twice gave different values ({unequal} of {width}): the device computes wrongly now \
                     and then; its answers since the last check are in doubt"
                ))
            }
            Ok(()) => Ok(()),
        };
        self.guard.row = row;
        let seconds = start.elapsed().as_secs_f64();
        self.guard.pay(seconds);
        self.stats.guard_checks += 1;
        self.stats.guard_seconds += seconds;
        result
    }

    /// Ends every request, because what was computed for them can't be trusted.
    pub(crate) fn distrust(&mut self, reason: &str, outputs: &mut Vec<Output>) {
        self.stats.guard_mismatches += 1;
        self.guard.tainted = true;
        let finish = || FinishReason::Device(reason.to_owned());
        for sequence in self.running.iter_mut().filter(|sequence| !sequence.is_ended) {
            outputs.push(sequence.ended(finish()));
            sequence.is_ended = true;
        }
        for mut sequence in self.waiting.take_if(|_| true) {
            outputs.push(sequence.ended(finish()));
            self.waiting.close(sequence.client());
        }
    }

    /// Forgets what was cached, if it is in doubt; nobody holds blocks any more.
    pub(crate) fn forget_tainted(&mut self) {
        if std::mem::take(&mut self.guard.tainted)
            && let Err(error) = self.blocks.clear(&mut self.loaded.model)
        {
            tracing::error!(%error, "blocks of the prefix cache");
        }
    }
}

/// Whether a known answer could not be asked for because requests hold the cache: no fault, try again later.
#[must_use]
pub const fn is_no_room(error: &EngineError) -> bool {
    matches!(error, EngineError::Runtime(RuntimeError::KvExhausted { .. }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_cost_what_was_earned() {
        let mut guard = Guard::new(Some(GuardOptions { share: 0.01 }));
        let (mut spent, mut worked) = (0.0, 0.0);
        for _ in 0..10_000 {
            worked += 0.02;
            if guard.is_due(0.02) {
                guard.pay(0.015);
                spent += 0.015;
            }
        }
        assert!(spent / worked > 0.0095 && spent / worked < 0.0102, "{}", spent / worked);
        let mut off = Guard::new(None);
        assert!(!off.is_due(1e9));
    }

    #[test]
    fn divergence_of_answers() {
        let answer = |rows: &[[f32; 3]]| KnownAnswer { digest: 0, rows: rows.iter().map(|row| row.to_vec()).collect() };
        let a = answer(&[[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]]);
        assert!(a.divergence(&a).abs() < 1e-12);
        assert!(a.divergence(&answer(&[[1.0, 2.0, 3.0], [1.0, 0.0, 0.0]])) > 0.1);
        assert_eq!(a.divergence(&answer(&[[1.0, 2.0, 3.0]])), f64::INFINITY);
    }

    #[test]
    fn a_digest_tells_every_bit() {
        let row = [1.0_f32, -2.5, 0.0];
        for at in 0..row.len() {
            for bit in 0..32 {
                let mut other = row;
                other[at] = f32::from_bits(row[at].to_bits() ^ (1 << bit));
                assert_ne!(digest(7, &row), digest(7, &other));
                assert!(differs(&row, &other));
            }
        }
    }
}
