//! An engine on its own thread: answers, cancelling by dropping, limits, draining, an idle thread.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod support;

use std::time::{Duration, Instant};

use qwen_engine::{EngineHandle, FinishReason, LoadOptions, Output, Outputs, Request, SubmitError};
use support::{engine, exact, greedy, reference, run};

const MODEL: &str = "models/llama";

fn request(tokens: usize, max_tokens: u32) -> Request {
    let ids = reference(&format!("{MODEL}/reference.safetensors")).input_ids;
    Request::new(ids[..tokens].to_vec(), greedy(max_tokens))
}

fn options() -> LoadOptions {
    LoadOptions { max_seq_len: Some(128), max_cached_tokens: Some(512), ..exact() }
}

fn spawn(max_in_flight: usize) -> EngineHandle {
    EngineHandle::spawn(engine(MODEL, &options(), 1), max_in_flight).unwrap().0
}

fn all(mut outputs: Outputs) -> Vec<Output> {
    std::iter::from_fn(|| outputs.blocking_recv()).collect()
}

/// Waits for something that another thread brings about, however long a busy machine takes.
fn until(mut condition: impl FnMut() -> bool) {
    while !condition() {
        std::thread::yield_now();
    }
}

#[test]
fn answers_are_those_of_the_engine_and_end_once() {
    let expected = run(&mut engine(MODEL, &options(), 1), vec![request(20, 8), request(5, 3)]);
    let handle = spawn(8);
    let receivers: Vec<_> = [request(20, 8), request(5, 3)].map(|r| handle.submit(r).unwrap().1).into();
    for (outputs, expected) in receivers.into_iter().map(all).zip(expected) {
        assert_eq!(outputs.iter().filter_map(|output| output.token).collect::<Vec<_>>(), expected);
        assert_eq!(outputs.iter().filter(|output| output.finish.is_some()).count(), 1);
        assert_eq!(outputs.last().unwrap().finish, Some(FinishReason::Length));
    }
    assert!(handle.is_idle());
    let stats = handle.stats();
    assert_eq!((stats.generated_tokens, stats.finished_length, stats.running, stats.blocks_used), (11, 2, 0, 0));
}

#[test]
fn dropping_the_receiver_cancels() {
    let handle = spawn(8);
    drop(handle.submit(request(20, 100)).unwrap());
    until(|| handle.is_idle());
    until(|| handle.stats().finished_cancelled == 1);
    assert_eq!(handle.stats().blocks_used, 0);
}

#[test]
fn too_many_are_refused_and_a_refused_one_takes_no_place() {
    let handle = spawn(2);
    let held: Vec<_> = (0..2).map(|_| handle.submit(request(20, 100)).unwrap()).collect();
    let error = handle.submit(request(4, 4)).unwrap_err();
    assert!(matches!(error, SubmitError::Overloaded { in_flight: 2, limit: 2 }), "{error}");
    drop(held);
    until(|| handle.is_idle());
    for _ in 0..5 {
        assert!(matches!(handle.submit(request(4, 0)), Err(SubmitError::Refused(_))));
    }
    assert_eq!(all(handle.submit(request(4, 4)).unwrap().1).len(), 4);
}

#[test]
fn a_deadline_ends_a_request_wherever_it_is() {
    let handle = spawn(8);
    let late = Request { deadline: Some(Instant::now()), ..request(4, 4) };
    let outputs = all(handle.submit(late).unwrap().1);
    assert_eq!(outputs.len(), 1);
    assert_eq!(outputs[0].finish, Some(FinishReason::Deadline));
    let soon = Request { deadline: Some(Instant::now() + Duration::from_millis(2)), ..request(20, 100) };
    assert!(matches!(
        all(handle.submit(soon).unwrap().1).last().unwrap().finish,
        Some(FinishReason::Deadline | FinishReason::Length)
    ));
}

#[test]
fn draining_finishes_what_is_there_and_the_thread_ends() {
    let (handle, thread) = EngineHandle::spawn(engine(MODEL, &options(), 1), 8).unwrap();
    let (_, outputs) = handle.submit(request(20, 30)).unwrap();
    handle.drain();
    assert!(matches!(handle.submit(request(4, 4)), Err(SubmitError::Draining)));
    drop(handle);
    assert_eq!(all(outputs).len(), 30);
    thread.join().unwrap();
}

/// Seconds of CPU that the threads named `engine` have used.
fn engine_seconds() -> f64 {
    let mut ticks = 0.0;
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap_or_default();
        if let Some((_, fields)) = stat.split_once("(engine) ") {
            ticks += fields.split(' ').skip(11).take(2).map(|n| n.parse::<f64>().unwrap()).sum::<f64>();
        }
    }
    ticks / 100.0
}

#[test]
fn an_idle_engine_sleeps() {
    let handle = spawn(8);
    all(handle.submit(request(4, 4)).unwrap().1);
    assert_eq!(handle.progress().stalled, Duration::ZERO);
    // Other tests of this process have engines too, which work: the least of several looks counts.
    let idle = (0..40).map(|_| {
        let before = engine_seconds();
        std::thread::sleep(Duration::from_millis(50));
        engine_seconds() - before
    });
    assert!(idle.fold(f64::INFINITY, f64::min) < 0.02);
}

#[test]
fn a_job_runs_between_steps() {
    let handle = spawn(8);
    let (sender, receiver) = std::sync::mpsc::channel();
    handle.call(move |engine| sender.send(engine.has_work()).unwrap()).unwrap();
    assert!(!receiver.recv().unwrap());
}
