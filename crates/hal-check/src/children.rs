//! The suite in child processes, so that a crash or a hang of the plugin is the failure of one case.
//!
//! One child runs case after case and prints a line before and after each. When it dies or stands still, the case that was
//! running has failed, and a new child goes on behind it: a process for every case would open the device hundreds of times.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use qwen_hal::loader::{end_of, wait_for_child};
use serde::{Deserialize, Serialize};

use crate::case::{Outcome, Record};
use crate::suite::{Selection, Subject, case_names, compare_threads, run};

/// What lines of the child begin with.
const MARK: &str = "qhal-check ";

#[derive(Debug, Serialize, Deserialize)]
enum Line {
    Subject {
        plugin: String,
        device: String,
    },
    Begin(String),
    End(Box<Record>),
    /// The device can't be opened at all.
    Refused(String),
}

/// How a child is started.
#[derive(Debug, Clone)]
pub struct Children {
    /// Program that calls [`child`].
    pub program: PathBuf,
    /// Arguments that choose the plugin and make the program call [`child`].
    pub arguments: Vec<OsString>,
    /// How long one case may take.
    pub limit: Duration,
}

/// What came of a run in children.
#[derive(Debug)]
pub struct Ran {
    /// Plugin and version.
    pub plugin: String,
    /// Device and its name.
    pub device: String,
    /// A record for each case.
    pub records: Vec<Record>,
}

/// Arguments that [`Children`] adds: level, threads, skip, `ops` or `all`, filter.
#[must_use]
pub fn parse_arguments(arguments: &[String]) -> Option<(Selection, usize)> {
    let [level, threads, skip, only, filter] = arguments else { return None };
    let selection = Selection {
        level: level.parse().ok()?,
        filter: (!filter.is_empty()).then(|| filter.clone()),
        only_ops: only == "ops",
        skip: skip.parse().ok()?,
    };
    Some((selection, threads.parse().ok()?))
}

impl Children {
    /// Runs the selected cases with `threads` threads, and ops with one more time, to compare their bits.
    ///
    /// # Errors
    /// A sentence if the device can't be opened in a child.
    pub fn run(&self, selection: &Selection, threads: usize, on: &mut dyn FnMut(&Record)) -> Result<Ran, String> {
        let mut ran = self.pass(selection, threads, on)?;
        let alone = self.pass(&Selection { only_ops: true, ..selection.clone() }, 1, &mut |_| {})?;
        compare_threads(&mut ran.records, &alone.records);
        Ok(ran)
    }

    fn pass(&self, selection: &Selection, threads: usize, on: &mut dyn FnMut(&Record)) -> Result<Ran, String> {
        let names = case_names(selection);
        let mut ran = Ran { plugin: String::new(), device: String::new(), records: Vec::new() };
        while ran.records.len() < names.len() {
            let before = ran.records.len();
            let rest = Selection { skip: selection.skip + before, ..selection.clone() };
            let end = self.child(&rest, threads, &mut ran, on)?;
            let done = ran.records.len();
            let Some((name, level)) = names.get(done) else { break };
            let Some(how) = end else {
                return Err(format!("the child ended before case {name}"));
            };
            let record = Record::new(name, *level, Outcome::Failed, how);
            on(&record);
            ran.records.push(record);
        }
        Ok(ran)
    }

    /// Runs one child: none if it ended well, or how it failed.
    fn child(
        &self,
        selection: &Selection,
        threads: usize,
        ran: &mut Ran,
        on: &mut dyn FnMut(&Record),
    ) -> Result<Option<String>, String> {
        let mut child = Command::new(&self.program)
            .args(&self.arguments)
            .args([selection.level.to_string(), threads.to_string(), selection.skip.to_string()])
            .arg(if selection.only_ops { "ops" } else { "all" })
            .arg(selection.filter.as_deref().unwrap_or(""))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("{}: {error}", self.program.display()))?;
        let (send, lines) = channel();
        if let Some(output) = child.stdout.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                    let line = String::from_utf8_lossy(&line);
                    let Some((_, json)) = line.split_once(MARK) else { continue };
                    let Ok(line) = serde_json::from_str::<Line>(json) else { continue };
                    if send.send(line).is_err() {
                        break;
                    }
                }
            });
        }
        let (mut running, mut opened) = (None, false);
        loop {
            match lines.recv_timeout(self.limit) {
                Ok(Line::Subject { plugin, device }) => {
                    opened = true;
                    (ran.plugin, ran.device) = (plugin, device);
                }
                Ok(Line::Begin(name)) => running = Some(name),
                Ok(Line::End(record)) => {
                    running = None;
                    on(&record);
                    ran.records.push(*record);
                }
                Ok(Line::Refused(why)) => {
                    let _ = wait_for_child(&mut child, self.limit);
                    return Err(why);
                }
                Err(RecvTimeoutError::Timeout) => {
                    let _ = wait_for_child(&mut child, Duration::ZERO);
                    if !opened {
                        return Err(format!(
                            "the plugin hung for {} s while its device was opened",
                            self.limit.as_secs_f32()
                        ));
                    }
                    let what = running.map_or("before the first case".to_owned(), |_| "in this case".to_owned());
                    return Ok(Some(format!("hung {what} for {} s", self.limit.as_secs_f32())));
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        match wait_for_child(&mut child, self.limit) {
            Some(status) if !opened => {
                Err(format!("the plugin crashed while it was loaded or its device opened: {}", end_of(status)))
            }
            None => Ok(Some(format!("the process did not end within {} s", self.limit.as_secs_f32()))),
            Some(status) if status.success() && running.is_none() => Ok(None),
            Some(status) if running.is_some() => Ok(Some(format!("crashed: {}", end_of(status)))),
            // All cases were run, and closing the device killed it.
            Some(status) => Ok(Some(format!("crashed between cases or at the end: {}", end_of(status)))),
        }
    }
}

fn say(line: &Line) {
    let Ok(json) = serde_json::to_string(line) else { return };
    let mut out = std::io::stdout();
    // Without a reader there is nobody to tell.
    let _ = writeln!(out, "\n{MARK}{json}").and_then(|()| out.flush());
}

/// The child's part: runs the selected cases on a subject and prints them.
pub fn child(subject: Result<Subject, String>, selection: &Selection) {
    let subject = match subject {
        Ok(subject) => subject,
        Err(why) => return say(&Line::Refused(why)),
    };
    let (plugin, device) = subject.names();
    say(&Line::Subject { plugin, device });
    run(&subject, selection, &mut |name| say(&Line::Begin(name.to_owned())), &mut |record| {
        say(&Line::End(Box::new(record.clone())))
    });
}
