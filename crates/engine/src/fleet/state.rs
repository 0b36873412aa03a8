//! Whether a device is in order, as a table: states, events, and what follows.

/// How far a device is trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Trust {
    /// In order.
    Healthy,
    /// Something was wrong; it is being tested and gets no new requests.
    Suspect,
    /// Out of order: no requests until a test succeeds.
    Quarantined,
    /// A test succeeded after something was wrong: in use, on probation until the next test in time.
    Retested,
}

impl Trust {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Healthy, Self::Suspect, Self::Quarantined, Self::Retested];

    /// Name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Suspect => "suspect",
            Self::Quarantined => "quarantined",
            Self::Retested => "retested",
        }
    }

    /// Whether it gets requests.
    #[must_use]
    pub const fn is_usable(self) -> bool {
        matches!(self, Self::Healthy | Self::Retested)
    }

    /// What it becomes.
    #[must_use]
    pub(super) fn after(self, event: Event) -> Self {
        TABLE.iter().find(|(from, by, _)| (*from, *by) == (self, event)).map_or(self, |(_, _, to)| *to)
    }
}

/// What happens to a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Event {
    /// An answer had logits that are no numbers: the device, or the checkpoint with this prompt. A client can bring it about,
    /// so alone it never leads to quarantine.
    Doubt,
    /// It failed, or a step that was computed twice differed.
    Fault,
    /// All tests of a turn succeeded.
    Passed,
    /// A test failed, the device is lost or does not answer.
    Failed,
}

use Event::{Doubt, Failed, Fault, Passed};
use Trust::{Healthy, Quarantined, Retested, Suspect};

/// From, by, to. What is not there changes nothing.
const TABLE: &[(Trust, Event, Trust)] = &[
    (Healthy, Doubt, Suspect),
    (Healthy, Fault, Suspect),
    (Healthy, Failed, Quarantined),
    (Suspect, Passed, Retested),
    (Suspect, Failed, Quarantined),
    (Quarantined, Passed, Retested),
    (Retested, Passed, Healthy),
    (Retested, Doubt, Suspect),
    (Retested, Fault, Quarantined),
    (Retested, Failed, Quarantined),
];

#[cfg(test)]
mod tests {
    use super::*;

    const EVENTS: [Event; 4] = [Doubt, Fault, Passed, Failed];

    #[test]
    fn the_way_out_and_back() {
        let path = [Fault, Failed, Fault, Passed, Passed];
        let mut state = Healthy;
        let states: Vec<Trust> = path
            .iter()
            .map(|event| {
                state = state.after(*event);
                state
            })
            .collect();
        assert_eq!(states, [Suspect, Quarantined, Quarantined, Retested, Healthy]);
    }

    #[test]
    fn every_failed_test_ends_in_quarantine_and_only_tests_end_it() {
        for state in Trust::ALL {
            assert_eq!(state.after(Failed), Quarantined);
            assert!(state.after(Passed).is_usable());
        }
        for event in EVENTS.into_iter().filter(|event| *event != Passed) {
            assert_eq!(Quarantined.after(event), Quarantined);
        }
    }

    #[test]
    fn doubts_alone_never_lead_to_quarantine() {
        let mut reached = vec![Healthy];
        while let Some(new) =
            reached.iter().flat_map(|s| [s.after(Doubt), s.after(Passed)]).find(|s| !reached.contains(s))
        {
            reached.push(new);
        }
        assert!(!reached.contains(&Quarantined), "{reached:?}");
    }
}
