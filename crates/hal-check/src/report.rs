//! All records of a run, for people and programs.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use crate::case::{Outcome, Record};

/// Counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Cases as the contract says.
    pub passed: usize,
    /// Cases that are not.
    pub failed: usize,
    /// Cases that the plugin says it does not have.
    pub unsupported: usize,
    /// Highest level of which no case failed, with all below; absent if level 0 has failures, or only some cases ran.
    pub level_reached: Option<u32>,
}

/// All records of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Plugin and version.
    pub plugin: String,
    /// Device, `name:index` and its name for people.
    pub device: String,
    /// Level that was asked for.
    pub level: u32,
    /// Text that the names of cases had to contain: where it is there, only some ran.
    pub filter: Option<String>,
    /// Counts.
    pub summary: Summary,
    /// A record for each case.
    pub cases: Vec<Record>,
}

impl Report {
    /// Counts the records of a run up to a level.
    #[must_use]
    pub fn new(plugin: String, device: String, level: u32, filter: Option<String>, cases: Vec<Record>) -> Self {
        let count = |outcome: Outcome| cases.iter().filter(|record| record.outcome == outcome).count();
        let fails = |level: u32| cases.iter().any(|record| record.level == level && record.outcome == Outcome::Failed);
        let passes = |level: u32| cases.iter().any(|record| record.level == level && record.outcome == Outcome::Passed);
        let level_reached = (0..=level).take_while(|level| !fails(*level) && passes(*level)).last();
        let level_reached = level_reached.filter(|_| filter.is_none());
        let summary = Summary {
            passed: count(Outcome::Passed),
            failed: count(Outcome::Failed),
            unsupported: count(Outcome::Unsupported),
            level_reached,
        };
        Self { plugin, device, level, filter, summary, cases }
    }

    /// What the run says of levels.
    fn verdict(&self) -> String {
        match (&self.filter, self.summary.level_reached) {
            (Some(filter), _) => {
                format!("some cases of levels 0 to {}, by --case {filter}: no level is judged by them", self.level)
            }
            (None, Some(level)) => format!("level reached: {level}"),
            (None, None) => "level reached: none".to_owned(),
        }
    }

    /// Lines for people: failures and what is not supported in full, passes as a count; all of them if `verbose`.
    #[must_use]
    pub fn text(&self, verbose: bool) -> String {
        let mut text = format!("plugin {}, device {}, levels 0 to {}\n", self.plugin, self.device, self.level);
        for record in &self.cases {
            let word = match record.outcome {
                Outcome::Passed if !verbose => continue,
                Outcome::Passed => "passed",
                Outcome::Failed => "FAILED",
                Outcome::Unsupported => "unsupported",
            };
            // Writing to a string does not fail.
            let _ = write!(text, "{word:<12}{}", record.name);
            if let (Some(nmse), Some(limit)) = (record.nmse, record.limit_nmse) {
                let _ = write!(text, "  nmse {nmse:.1e} (limit {limit:.0e})");
            }
            if !record.message.is_empty() {
                let _ = write!(text, ": {}", record.message);
            }
            text.push('\n');
        }
        let Summary { passed, failed, unsupported, .. } = self.summary;
        let _ = writeln!(text, "{passed} passed, {failed} failed, {unsupported} unsupported; {}", self.verdict());
        text
    }

    /// One page without scripts.
    #[must_use]
    pub fn html(&self) -> String {
        let escape = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        let number = |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.1e}"));
        let mut rows = String::new();
        for record in &self.cases {
            let (class, word) = match record.outcome {
                Outcome::Passed => ("p", "passed"),
                Outcome::Failed => ("f", "failed"),
                Outcome::Unsupported => ("u", "unsupported"),
            };
            let _ = writeln!(
                rows,
                "<tr class={class}><td>{}<td>{word}<td>{}<td>{}<td>{}<td>{}<td>{}",
                escape(&record.name),
                number(record.nmse),
                number(record.limit_nmse),
                number(record.max_abs),
                escape(record.kernel.as_deref().unwrap_or("")),
                escape(&record.message)
            );
        }
        let Summary { passed, failed, unsupported, .. } = self.summary;
        format!(
            "<!doctype html><meta charset=utf-8><title>Conformance of {plugin}</title>\n\
             <style>body{{font:14px sans-serif;margin:2em}}td,th{{padding:2px 8px;text-align:left;vertical-align:top}}\
             .f{{background:#fdd}}.u{{color:#777}}</style>\n\
             <h1>Conformance of {plugin}</h1><p>Device {device}, levels 0 to {level}: {passed} passed, {failed} failed, \
             {unsupported} unsupported; {verdict}.\n\
             <table><tr><th>case<th>outcome<th>nmse<th>limit<th>max-abs<th>kernel<th>message\n{rows}</table>\n",
            plugin = escape(&self.plugin),
            device = escape(&self.device),
            level = self.level,
            verdict = escape(&self.verdict()),
        )
    }
}
