//! The outputs of a request, whoever computes them.
//!
//! In: the channel of an engine. Out: its outputs as they are. When the engine's device fails, or is found wrong, or its engine
//! is taken away, the end that says so is kept back: the request goes to another device together with the tokens that were
//! handed out ([`Request::resume`]), and what comes from there follows. If no device is usable now, it waits for one. When all work is
//! cancelled it ends, whether or not its device still makes steps.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use super::state::Event;
use super::{Epoch, Place, Shared};
use crate::{FinishReason, Output, Outputs, Request, RequestId, RequestTimings, SubmitError};

/// Times in a row that a request's device may fail before the next token, beyond one for each device there is.
const MORE_TRIES: u32 = 2;
/// The same for logits that are no numbers: if two devices say so, it is the checkpoint.
const LOGITS_TRIES: u32 = 2;

/// Outputs of one request; dropping it cancels the request.
pub struct FleetOutputs {
    fleet: Arc<Shared>,
    request: Request,
    from: Place,
    /// Seat and channel; none while it waits for a device.
    running: Option<(usize, Outputs)>,
    /// Tokens that were handed out.
    sent: Vec<u32>,
    /// Seats that failed it, in order.
    failed: Vec<usize>,
    /// Failures since the last token.
    fruitless: u32,
    /// Where the time went on devices that failed.
    before: Option<RequestTimings>,
    /// Raised by whoever ends all requests.
    epoch: Epoch,
    done: bool,
}

impl std::fmt::Debug for FleetOutputs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FleetOutputs")
            .field("sent", &self.sent.len())
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

impl FleetOutputs {
    pub(super) fn new(fleet: Arc<Shared>, request: Request, from: Place, running: Option<(usize, Outputs)>) -> Self {
        let epoch = fleet.epoch();
        Self {
            fleet,
            request,
            from,
            running,
            sent: Vec::new(),
            failed: Vec::new(),
            fruitless: 0,
            before: None,
            epoch,
            done: false,
        }
    }

    /// The same as part of what was accepted at `epoch`.
    pub(super) fn of(self, epoch: Epoch) -> Self {
        Self { epoch, ..self }
    }

    /// The next output; none after the one that has a finish reason. Nothing is lost if the future is dropped before it is
    /// ready.
    pub async fn recv(&mut self) -> Option<Output> {
        while !self.done {
            let Some((seat, outputs)) = &mut self.running else {
                if let Some(reason) = self.launch().await {
                    return Some(self.end(Output::end(RequestId(0), reason)));
                }
                continue;
            };
            let seat = *seat;
            let Some(output) = or_end(outputs.recv(), self.fleet.cancelled_since(self.epoch)).await else {
                return Some(self.end(Output::end(RequestId(0), FinishReason::Cancelled)));
            };
            let Some((event, reason)) = trouble(output.as_ref()) else {
                let output = output?;
                return Some(if output.finish.is_some() { self.end(output) } else { self.pass(output) });
            };
            self.running = None;
            self.fleet.report(seat, event, &reason);
            self.before = merged(self.before, output.as_ref().and_then(|output| output.timings));
            self.failed.push(seat);
            self.fruitless += 1;
            let tries = if event == Event::Doubt { LOGITS_TRIES } else { self.fleet.seats.len() as u32 + MORE_TRIES };
            if self.fruitless >= tries {
                let output = output.unwrap_or_else(|| Output::end(RequestId(0), FinishReason::Device(reason)));
                return Some(self.end(output));
            }
        }
        None
    }

    /// The device that computes it now, as a number among the fleet's; none while it waits for one.
    #[must_use]
    pub fn instance(&self) -> Option<usize> {
        self.running.as_ref().map(|(seat, _)| *seat)
    }

    /// As [`FleetOutputs::recv`], from a thread.
    pub fn blocking_recv(&mut self) -> Option<Output> {
        struct Unpark(Thread);
        impl Wake for Unpark {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }
        let waker: Waker = Arc::new(Unpark(std::thread::current())).into();
        let mut context = Context::from_waker(&waker);
        let mut next = pin!(self.recv());
        loop {
            match next.as_mut().poll(&mut context) {
                Poll::Ready(output) => return output,
                Poll::Pending => std::thread::park(),
            }
        }
    }

    fn pass(&mut self, output: Output) -> Output {
        if let Some(token) = output.token {
            self.sent.push(token);
            self.fruitless = 0;
        }
        output
    }

    fn end(&mut self, output: Output) -> Output {
        self.done = true;
        self.running = None;
        let timings = if self.before.is_some() { merged(self.before, output.timings) } else { output.timings };
        Output { timings, ..output }
    }

    /// Finds a device, or the reason why the request ends without one.
    async fn launch(&mut self) -> Option<FinishReason> {
        let mut changes = self.fleet.changes.subscribe();
        let give_up = Instant::now() + self.fleet.patience;
        loop {
            changes.borrow_and_update();
            if self.fleet.epoch() != self.epoch {
                return Some(FinishReason::Cancelled);
            }
            if self.request.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Some(FinishReason::Deadline);
            }
            match self.fleet.launch(&self.rest(), &self.from, true) {
                Ok(Some(running)) => {
                    self.tell(running.0);
                    self.running = Some(running);
                    return None;
                }
                Ok(None) | Err(SubmitError::Unavailable | SubmitError::CompilersBusy { .. })
                    if Instant::now() < give_up => {}
                Err(SubmitError::Refused(error)) => return Some(FinishReason::Error(error.to_string())),
                Ok(None) | Err(_) => return Some(FinishReason::Device(SubmitError::Unavailable.to_string())),
            }
            if changes.changed().await.is_err() {
                return Some(FinishReason::Device("the fleet has ended".into()));
            }
        }
    }

    /// What is left of the request.
    fn rest(&self) -> Request {
        let mut request = self.request.clone();
        request.resume.extend_from_slice(&self.sent);
        if !self.sent.is_empty() {
            // They came with the first token.
            request.prompt_logprobs = None;
        }
        request
    }

    fn tell(&self, to: usize) {
        let Some(from) = self.failed.last() else { return };
        self.fleet.moved.fetch_add(1, Ordering::Relaxed);
        let (from, to) = (&self.fleet.seats[*from], &self.fleet.seats[to]);
        let (left, taken, tokens) = (&from.name, &to.name, self.sent.len());
        if from.kind == to.kind {
            tracing::warn!(left, taken, tokens, "a request goes on after its tokens so far, with the same bits");
        } else {
            tracing::warn!(
                left,
                taken,
                tokens,
                "a request goes on after its tokens so far on a device of another type, which rounds differently: what \
                 follows may not be what would have followed"
            );
        }
    }
}

/// What a future gives; none if `end` comes before.
async fn or_end<T>(next: impl Future<Output = T>, end: impl Future<Output = ()>) -> Option<T> {
    let (mut next, mut end) = (pin!(next), pin!(end));
    poll_fn(|context| match next.as_mut().poll(context) {
        Poll::Ready(value) => Poll::Ready(Some(value)),
        Poll::Pending => end.as_mut().poll(context).map(|()| None),
    })
    .await
}

/// Whether an output means that another device should go on, and why.
fn trouble(output: Option<&Output>) -> Option<(Event, String)> {
    match output.map(|output| &output.finish) {
        None => Some((Event::Failed, "its engine has stopped".into())),
        Some(Some(FinishReason::Device(reason))) => Some((Event::Fault, reason.clone())),
        Some(Some(FinishReason::Logits(reason))) => Some((Event::Doubt, reason.clone())),
        Some(_) => None,
    }
}

/// The times of a request that was computed by two devices one after the other: what it waited for until its first token, the
/// rest as time between tokens. Tokens are those that the later one counted, which include the earlier one's.
fn merged(first: Option<RequestTimings>, then: Option<RequestTimings>) -> Option<RequestTimings> {
    let (Some(first), Some(then)) = (first, then) else { return then.or(first) };
    let again: Duration = then.queue + then.prefill + then.decode;
    let had_tokens = first.generated_tokens > 0;
    Some(RequestTimings {
        cached_tokens: first.cached_tokens,
        preemptions: first.preemptions + then.preemptions,
        queue: if had_tokens { first.queue } else { first.queue + first.prefill + then.queue },
        prefill: if had_tokens { first.prefill } else { then.prefill },
        decode: if had_tokens { first.decode + again } else { then.decode },
        ..then
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_add_up_and_tokens_count_once() {
        let seconds = Duration::from_secs;
        let first = RequestTimings {
            prompt_tokens: 8,
            cached_tokens: 4,
            generated_tokens: 3,
            queue: seconds(1),
            prefill: seconds(2),
            decode: seconds(3),
            ..RequestTimings::default()
        };
        let then = RequestTimings { generated_tokens: 10, cached_tokens: 0, ..first };
        let both = merged(Some(first), Some(then)).unwrap();
        assert_eq!((both.prompt_tokens, both.cached_tokens, both.generated_tokens), (8, 4, 10));
        assert_eq!((both.queue, both.prefill, both.decode), (seconds(1), seconds(2), seconds(9)));
        let none = RequestTimings { generated_tokens: 0, ..first };
        let both = merged(Some(none), Some(then)).unwrap();
        assert_eq!((both.queue, both.prefill, both.decode), (seconds(4), seconds(2), seconds(3)));
        assert_eq!(merged(None, Some(then)), Some(then));
        assert_eq!(merged(Some(first), None), Some(first));
    }
}
