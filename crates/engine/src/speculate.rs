//! Drafts by prompt lookup: what followed the last tokens when they occurred before may follow now.
//!
//! In: the tokens of a sequence. Out: a guess of the next ones. A guess costs nothing but the positions that the model
//! computes for it in the same step; each is accepted only if the sampler, at its place in the request's own sequence of
//! random numbers, chooses just that token from the model's logits. Since logits do not depend on what is computed beside
//! them, the answer is the same as without drafts, token for token. What a guess is good for changes with the text: a
//! [`Drafter`] drafts more where drafts come true, less where they don't, and pauses where they never do.

/// When drafts are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Speculation {
    /// Most tokens of a draft.
    pub max_draft: u32,
    /// Tokens that must have occurred before, in a row.
    pub min_match: u32,
    /// Most tokens of a step, drafts included: beyond, computing a draft costs as much as what it may save.
    pub max_step_tokens: u32,
}

impl Default for Speculation {
    fn default() -> Self {
        Self { max_draft: 8, min_match: 3, max_step_tokens: 16 }
    }
}

/// Longest run of tokens that is looked for.
const MAX_MATCH: usize = 8;
/// How far back is looked.
const WINDOW: usize = 8192;
/// Longest pause, in tokens.
const MAX_PAUSE: u32 = 64;

/// Drafts of one sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Drafter {
    /// Length of the next draft.
    length: u32,
    /// Tokens until the next draft, and how long the next pause will be.
    pause: u32,
    next_pause: u32,
}

impl Drafter {
    pub(crate) const fn new() -> Self {
        Self { length: 2, pause: 0, next_pause: 1 }
    }

    /// A guess of what follows `tokens`, at most `most` tokens; empty if there is none.
    pub(crate) fn draft<'a>(&mut self, options: &Speculation, tokens: &'a [u32], most: usize) -> &'a [u32] {
        if self.pause > 0 {
            self.pause -= 1;
            return &[];
        }
        let most = most.min(self.length.min(options.max_draft) as usize);
        if most == 0 {
            return &[];
        }
        lookup(&tokens[tokens.len().saturating_sub(WINDOW)..], options.min_match.max(1) as usize, most)
    }

    /// What became of a draft.
    pub(crate) fn learn(&mut self, options: &Speculation, drafted: usize, accepted: usize) {
        if drafted == 0 {
            return;
        }
        if accepted == drafted {
            self.length = (self.length * 2).min(options.max_draft.max(1));
            self.next_pause = 1;
        } else if accepted == 0 {
            self.length = 2;
            self.pause = self.next_pause;
            self.next_pause = (self.next_pause * 2).min(MAX_PAUSE);
        } else {
            self.length = (accepted as u32 + 1).min(options.max_draft.max(1));
            self.next_pause = 1;
        }
    }
}

/// What followed the longest earlier occurrence of the last tokens; of equally long ones, the latest.
fn lookup(tokens: &[u32], min_match: usize, most: usize) -> &[u32] {
    let (Some(last), len) = (tokens.last(), tokens.len()) else { return &[] };
    let mut best = (0, 0);
    for end in (min_match..len).rev().filter(|end| tokens[end - 1] == *last) {
        let run = (1..=MAX_MATCH.min(end)).take_while(|n| tokens[end - n] == tokens[len - n]).last().unwrap_or(0);
        if run > best.0 {
            best = (run, end);
            if run == MAX_MATCH {
                break;
            }
        }
    }
    let (run, end) = best;
    if run < min_match { &[] } else { &tokens[end..(end + most).min(len)] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_the_longest_match_then_the_latest() {
        let tokens = [7, 1, 2, 3, 50, 51, 9, 2, 3, 60, 61, 7, 1, 2, 3];
        assert_eq!(lookup(&tokens, 2, 2), [50, 51]);
        assert_eq!(lookup(&[1, 2, 3, 4, 1, 2, 5, 1, 2], 2, 3), [5, 1, 2]);
        assert!(lookup(&[1, 2, 3, 4, 5], 1, 4).is_empty());
        assert!(lookup(&[4, 2, 3, 9, 2, 3], 3, 4).is_empty());
        assert!(lookup(&[], 1, 4).is_empty());
        // A run of equal tokens goes on.
        assert_eq!(lookup(&[5; 6], 3, 4), [5]);
    }

    #[test]
    fn drafts_follow_their_success() {
        let options = Speculation { max_draft: 8, min_match: 1, max_step_tokens: 16 };
        let tokens: Vec<u32> = (0..40).map(|i| i % 10).collect();
        let mut drafter = Drafter::new();
        let mut lengths = Vec::new();
        for accepted in [2, 4, 8, 3, 0] {
            let draft = drafter.draft(&options, &tokens, 100).len();
            lengths.push(draft);
            drafter.learn(&options, draft, accepted);
        }
        assert_eq!(lengths, [2, 4, 8, 8, 4]);
        assert!(drafter.draft(&options, &tokens, 100).is_empty(), "a pause after a failure");
        assert_eq!(drafter.draft(&options, &tokens, 1).len(), 1);
        for _ in 0..20 {
            drafter.learn(&options, 2, 0);
        }
        assert_eq!((drafter.pause, drafter.length), (MAX_PAUSE, 2));
    }
}
