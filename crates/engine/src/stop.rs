//! Stop strings over streamed text: nothing that may be the start of a stop string is handed out.

/// Watches one answer.
#[derive(Debug, Clone)]
pub struct StopWatch {
    stops: Vec<String>,
    held: String,
}

/// What may be handed out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Released {
    /// Text that can't be part of a stop string any more.
    pub text: String,
    /// Index of the stop string that ended the answer, among those that the watch was made with.
    pub stopped: Option<usize>,
}

impl StopWatch {
    /// A watch for the given texts; empty ones are ignored.
    #[must_use]
    pub fn new(stops: &[String]) -> Self {
        Self { stops: stops.to_vec(), held: String::new() }
    }

    /// Takes new text; hands out what is safe. The match that is complete first wins, of several the one that starts first:
    /// so the result does not depend on how the text is cut into pieces.
    pub fn push(&mut self, text: &str) -> Released {
        self.held.push_str(text);
        let found = |(i, stop): (usize, &String)| self.held.find(stop.as_str()).map(|at| (at + stop.len(), at, i));
        let matched = self.stops.iter().enumerate().filter(|(_, stop)| !stop.is_empty()).filter_map(found).min();
        if let Some((_, at, index)) = matched {
            self.held.truncate(at);
            return Released { text: std::mem::take(&mut self.held), stopped: Some(index) };
        }
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        Released { text: std::mem::replace(&mut self.held, rest), stopped: None }
    }

    /// The answer ended otherwise: the held text is safe.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Bytes of the longest proper prefix of `stop` that `text` ends with.
fn overlap(text: &str, stop: &str) -> usize {
    let most = text.len().min(stop.len().saturating_sub(1));
    (1..=most)
        .rev()
        .find(|n| stop.is_char_boundary(*n) && text.as_bytes().ends_with(&stop.as_bytes()[..*n]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn holds_a_possible_start_and_cuts_a_match() {
        let mut watch = StopWatch::new(&["<end>".into(), "\n\n".into()]);
        assert_eq!(watch.push("a<e"), Released { text: "a".into(), stopped: None });
        assert_eq!(watch.push("x"), Released { text: "<ex".into(), stopped: None });
        assert_eq!(watch.push("b\n"), Released { text: "b".into(), stopped: None });
        assert_eq!(watch.push("\nrest"), Released { text: String::new(), stopped: Some(1) });
    }

    #[test]
    fn an_empty_text_stops_nothing_and_keeps_its_place() {
        let mut watch = StopWatch::new(&[String::new(), "x".into()]);
        assert_eq!(watch.push("a"), Released { text: "a".into(), stopped: None });
        assert_eq!(watch.push("bx"), Released { text: "b".into(), stopped: Some(1) });
    }

    proptest! {
        /// However the text is cut into pieces, the result is that of the whole text.
        #[test]
        fn chunking_does_not_matter(
            text in "[ab\u{4e2d}]{0,40}",
            stops in proptest::collection::vec("[ab\u{4e2d}]{1,4}", 0..3),
            cuts in proptest::collection::vec(0usize..40, 0..10),
        ) {
            let end = stops.iter().filter_map(|s| text.find(s.as_str()).map(|at| (at + s.len(), at))).min();
            let expected = end.map_or(text.as_str(), |(_, at)| &text[..at]);
            let mut watch = StopWatch::new(&stops);
            let mut found = String::new();
            let mut stopped = false;
            let mut chars: Vec<String> = text.chars().map(String::from).collect();
            for cut in cuts {
                if cut + 1 < chars.len() {
                    let next = chars.remove(cut + 1);
                    chars[cut].push_str(&next);
                }
            }
            for piece in chars {
                let released = watch.push(&piece);
                found.push_str(&released.text);
                if released.stopped.is_some() {
                    stopped = true;
                    break;
                }
            }
            if !stopped {
                found.push_str(&watch.finish());
            }
            prop_assert_eq!(found, expected);
            prop_assert_eq!(stopped, end.is_some());
        }
    }
}
