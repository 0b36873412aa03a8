//! Which device a request goes to: one that need not make it wait, then the nearest to where the request came in, then the
//! least loaded, then the one that requests with the same beginning go to, because its prefix cache may know it.

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::{ClientKey, Distance};

/// Tokens of a prompt that requests must have in common to be sent to the same device.
const PREFIX_TOKENS: usize = 64;

/// What of a request decides.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wish<'a> {
    pub(super) prompt: &'a [u32],
    pub(super) client: ClientKey,
    pub(super) salt: u64,
}

/// A device that may be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) index: usize,
    pub(super) distance: Distance,
    /// Requests in flight.
    pub(super) load: usize,
    /// Most requests of a step.
    pub(super) places: usize,
}

/// The index of the best one.
pub(super) fn choose(candidates: impl IntoIterator<Item = Candidate>, wish: Wish<'_>) -> Option<usize> {
    let rank = |candidate: &Candidate| {
        let waits = candidate.load >= candidate.places;
        // Among those that make it wait, the shortest queue: near or far matters less than that.
        let load = if waits { candidate.load - candidate.places } else { candidate.load };
        let distance = if waits { Distance::Unknown } else { candidate.distance };
        (waits, distance, load, affinity(candidate.index, wish))
    };
    candidates.into_iter().min_by_key(rank).map(|candidate| candidate.index)
}

/// A number by chance, the same for the same beginning and device: the device of the least one is the same for all such
/// requests, and those of a device that goes are spread over all others.
fn affinity(index: usize, wish: Wish<'_>) -> u64 {
    let mut hasher = DefaultHasher::new();
    (wish.client, wish.salt, &wish.prompt[..wish.prompt.len().min(PREFIX_TOKENS)], index).hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WISH: Wish<'_> = Wish { prompt: &[1, 2, 3], client: ClientKey(1), salt: 0 };

    fn candidate(index: usize, distance: Distance, load: usize) -> Candidate {
        Candidate { index, distance, load, places: 4 }
    }

    #[test]
    fn near_then_idle() {
        let (near, far) = (Distance::SameSwitch, Distance::OtherNode(21));
        let all = [candidate(0, far, 0), candidate(1, near, 3), candidate(2, near, 2)];
        assert_eq!(choose(all, WISH), Some(2));
        // Nobody waits for a near device while a far one has a place.
        let full = [candidate(0, far, 3), candidate(1, near, 4), candidate(2, near, 9)];
        assert_eq!(choose(full, WISH), Some(0));
        let waiting = [candidate(0, far, 5), candidate(1, near, 7)];
        assert_eq!(choose(waiting, WISH), Some(0));
        assert_eq!(choose([], WISH), None);
    }

    #[test]
    fn equal_beginnings_meet_and_others_spread() {
        let all = || (0..4).map(|index| candidate(index, Distance::Unknown, 0));
        let of = |first: u32| choose(all(), Wish { prompt: &[first, 7, 7], ..WISH });
        let mut count = [0; 4];
        for first in 0..400 {
            assert_eq!(of(first), of(first));
            count[of(first).unwrap_or(0)] += 1;
        }
        assert!(count.iter().all(|n| (50..150).contains(n)), "{count:?}");
        // Without the chosen one the others keep theirs.
        let chosen = of(1);
        let rest = all().filter(|c| Some(c.index) != chosen);
        assert_ne!(choose(rest, Wish { prompt: &[1, 7, 7], ..WISH }), chosen);
    }
}
