//! Requests of every kind at random for some time, with few blocks: cancels, deadlines, dropped receivers, priorities,
//! grammars. Every request that was taken must end with a finish reason, and every block must come back.
//!
//! `cargo run --release -p qwen-engine --example soak -- MODEL.gguf SECONDS [CLIENTS]`
#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::panic, reason = "a test that takes long")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use qwen_engine::{
    ClientKey, Constraint, Engine, EngineHandle, EngineOptions, Grammar, LoadOptions, LoadedModel, Request,
    SamplingParams, Speculation, SubmitError,
};
use qwen_hal::{Host, Plugin, Pool};

/// Random numbers that differ by client.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }
    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

type Ends = Mutex<BTreeMap<String, u64>>;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().unwrap();
    let seconds: u64 = arguments.next().unwrap().parse().unwrap();
    let clients: u64 = arguments.next().map_or(24, |n| n.parse().unwrap());
    let pool = Arc::new(Pool::new(None));
    let host = Host::new(pool.clone());
    let device = Plugin::linked(&qwen_cpu::PLUGIN, &host).unwrap().open(0, &[]).unwrap();
    let load = LoadOptions {
        max_sequences: 12,
        max_seq_len: Some(512),
        // A third of what the running ones may come to.
        max_cached_tokens: Some(2048),
        prefill_chunk_size: 128,
        ..LoadOptions::default()
    };
    let loaded = LoadedModel::load(Path::new(&path), device, &load, &mut |_| {}).unwrap();
    let options =
        EngineOptions { speculation: Some(Speculation::default()), pool: Some(pool), ..EngineOptions::default() };
    let (handle, thread) = EngineHandle::spawn(Engine::with_options(loaded, options), 20).unwrap();
    let (end, ends) = (Instant::now() + Duration::from_secs(seconds), Ends::default());
    std::thread::scope(|scope| {
        for client in 0..clients {
            let (handle, ends) = (handle.clone(), &ends);
            scope.spawn(move || {
                let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ ((client + 1) * 0x1234_5678_9abc));
                while Instant::now() < end {
                    let outcome = one(&handle, &mut random, client);
                    *ends.lock().unwrap().entry(outcome).or_default() += 1;
                }
            });
        }
        while Instant::now() < end {
            std::thread::sleep(Duration::from_secs(5).min(end.saturating_duration_since(Instant::now())));
            let stats = handle.stats();
            println!(
                "steps {} running {} waiting {} blocks {}/{} cached {} preemptions {} tokens {} resident {} MiB",
                stats.steps,
                stats.running,
                stats.waiting,
                stats.blocks_used,
                stats.blocks_total,
                stats.blocks_cached,
                stats.preemptions,
                stats.generated_tokens,
                resident_mib(),
            );
        }
    });
    let start = Instant::now();
    while !handle.is_idle() {
        assert!(start.elapsed() < Duration::from_secs(60), "requests are stuck: {:?}", handle.stats());
        std::thread::sleep(Duration::from_millis(5));
    }
    for (outcome, n) in ends.lock().unwrap().iter() {
        println!("{n:>8} {outcome}");
    }
    // The last step's report may be a moment behind its outputs.
    std::thread::sleep(Duration::from_millis(200));
    let stats = handle.stats();
    assert_eq!((stats.blocks_used, stats.running, stats.waiting), (0, 0, 0), "{stats:?}");
    handle
        .call(|engine| {
            engine.clear_prefix_cache().unwrap();
            assert_eq!(engine.loaded().model.free_blocks(), engine.stats().blocks_total, "a block is lost");
        })
        .unwrap();
    drop(handle);
    thread.join().unwrap();
    println!("every request ended, every block is back; {} preemptions", stats.preemptions);
}

/// One request; what became of it.
fn one(handle: &EngineHandle, random: &mut Random, client: u64) -> String {
    let vocabulary = u64::from(handle.about().limits.vocab_size);
    let length = if random.one_in(8) { 1 + random.below(500) } else { 1 + random.below(80) };
    let mut prompt: Vec<u32> = (0..length).map(|i| ((i * 7 + client % 3) % vocabulary) as u32).collect();
    if random.one_in(2) {
        let own = random.below(length) as usize;
        prompt.iter_mut().skip(own).for_each(|id| *id = random.below(vocabulary) as u32);
    }
    let most = if random.one_in(6) { 400 } else { 40 };
    let sampling = SamplingParams {
        temperature: random.below(3) as f32 * 0.5,
        max_tokens: 1 + random.below(most) as u32,
        seed: random.below(1000),
        logprobs: random.one_in(4).then_some(3),
        ignore_eos: random.one_in(2),
        ..SamplingParams::default()
    };
    let grammar = match random.below(12) {
        0 => Some(Grammar::JsonObject),
        1 => Some(Grammar::Regex("[a-z]{3,60}".into())),
        2 => Some(Grammar::Choice(vec!["yes".into(), "no".into()])),
        _ => None,
    };
    let request = Request {
        priority: random.below(3) as i32 - 1,
        deadline: random.one_in(8).then(|| Instant::now() + Duration::from_millis(random.below(400))),
        client: ClientKey(client % 5),
        prompt_logprobs: random.one_in(15).then_some(2),
        constraint: grammar.map(|grammar| Constraint { grammar, after: None }),
        ..Request::new(prompt, sampling)
    };
    let (id, mut outputs) = match handle.submit(request) {
        Ok(taken) => taken,
        Err(SubmitError::Overloaded { .. }) => {
            std::thread::sleep(Duration::from_millis(random.below(20)));
            return "refused: overloaded".into();
        }
        Err(error) => return format!("refused: {error}").chars().take(60).collect(),
    };
    let (drop_after, cancel_after) = (random.below(60), random.below(60));
    let (drops, cancels) = (random.one_in(6), random.one_in(6));
    for n in 0u64.. {
        if drops && n == drop_after {
            return "dropped".into();
        }
        if cancels && n == cancel_after {
            handle.cancel(id);
        }
        let Some(output) = outputs.blocking_recv() else { panic!("request {id:?} ended without a finish reason") };
        if let Some(finish) = output.finish {
            assert!(outputs.blocking_recv().is_none(), "an output after the last one");
            return format!("{finish:?}").chars().take(60).collect();
        }
    }
    unreachable!()
}

fn resident_mib() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0);
    (pages * 4096) >> 20
}
