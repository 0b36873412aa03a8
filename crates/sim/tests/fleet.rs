//! Several devices behind one door: what a reader sees when one of them is lost, hangs, or computes wrongly. Everything here is
//! simulated.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use common::{cpu, fixture, open};
use proptest::prelude::*;
use qwen_engine::{
    Constraint, Engine, EngineOptions, FinishReason, Fleet, FleetOptions, FleetOutputs, Grammar, GuardOptions,
    Instance, LoadOptions, LoadedModel, Output, Place, Placement, Policy, Pooling, Request, SamplingParams,
    SubmitError, Topology, Trust,
};
use qwen_hal::Device;
use qwen_hal::abi::QHAL_HEALTH_UNRESPONSIVE;

type Options = Vec<(&'static str, String)>;

const MODEL: &str = "models/qwen2";
const CHIP: &str = "ascend910b";

fn engine(device: Device, share: f64) -> Engine {
    let options = LoadOptions {
        policy: Policy::Exact,
        max_seq_len: Some(128),
        max_sequences: 8,
        max_cached_tokens: Some(1024),
        embeddings: true,
        ..LoadOptions::default()
    };
    let placement = Placement::from(device).with_fallback(cpu(1));
    let loaded = LoadedModel::load(&fixture(MODEL), placement, &options, &mut |_| {}).unwrap();
    let guard = (share > 0.0).then_some(GuardOptions { share });
    Engine::with_options(loaded, EngineOptions { guard, ..EngineOptions::default() })
}

/// A chip that is opened with these settings the first time, and without faults when it is opened anew.
fn chip(name: &str, number: usize, faults: Options, share: f64) -> Instance {
    let plugin = common::plugin();
    let (chip, mut faults) = (name.to_owned(), Some(faults));
    let build = move || {
        let faults = faults.take().unwrap_or_default();
        let mut options = vec![("delay_us", "0")];
        options.extend(faults.iter().map(|(key, value)| (*key, value.as_str())));
        Ok(engine(open(&plugin, &chip, number, &options), share))
    };
    Instance { name: format!("sim:{name}:{number}"), place: Place::default(), build: Box::new(build) }
}

fn options() -> FleetOptions {
    FleetOptions {
        tests: Some(Duration::from_secs(3600)),
        retest: Duration::from_millis(5),
        topology: Topology::read(Path::new("/nowhere")),
        ..FleetOptions::default()
    }
}

fn pair(faults: Options, share: f64) -> Fleet {
    Fleet::start(vec![chip(CHIP, 0, faults, share), chip(CHIP, 1, Vec::new(), share)], options()).unwrap()
}

/// Requests that use everything that an answer may depend on.
fn requests() -> Vec<Request> {
    let greedy = || SamplingParams { temperature: 0.0, max_tokens: 24, ignore_eos: true, ..SamplingParams::default() };
    let sampled = SamplingParams {
        temperature: 1.0,
        seed: 7,
        repetition_penalty: 1.2,
        presence_penalty: 0.5,
        logprobs: Some(2),
        ..greedy()
    };
    let stopped = SamplingParams { stop: vec!["e".into(), "qu".into()], seed: 3, temperature: 0.9, ..greedy() };
    let prompt = |from: u32, count: u32| (from..from + count).collect::<Vec<u32>>();
    let choice = Constraint { grammar: Grammar::Regex("[a-z]{18}".into()), after: None };
    vec![
        Request::new(prompt(1, 20), greedy()),
        Request { prompt_logprobs: Some(1), ..Request::new(prompt(9, 6), sampled) },
        Request::new(prompt(40, 9), stopped),
        Request {
            constraint: Some(choice),
            ..Request::new(prompt(5, 7), SamplingParams { temperature: 1.0, ..greedy() })
        },
        embedding(Pooling::Last),
        embedding(Pooling::Mean),
    ]
}

fn embedding(pooling: Pooling) -> Request {
    let sampling = SamplingParams { max_tokens: 0, ..SamplingParams::default() };
    Request { embed: Some(pooling), ..Request::new((3..30).collect(), sampling) }
}

/// What a reader sees of an answer.
#[derive(Debug, PartialEq)]
struct Seen {
    tokens: Vec<u32>,
    texts: Vec<String>,
    logprobs: Vec<String>,
    prompt: Option<String>,
    vector: Option<Vec<u32>>,
    finish: FinishReason,
    counted: (usize, usize),
}

fn read(mut answer: FleetOutputs) -> Seen {
    let outputs: Vec<Output> = std::iter::from_fn(|| answer.blocking_recv()).collect();
    let last = outputs.last().unwrap();
    let timings = last.timings.unwrap();
    assert_eq!(outputs.iter().filter(|output| output.finish.is_some()).count(), 1);
    assert!(outputs.iter().filter(|output| output.prompt_logprobs.is_some()).count() <= 1);
    Seen {
        tokens: outputs.iter().filter_map(|output| output.token).collect(),
        texts: outputs.iter().map(|output| output.text.clone()).collect(),
        logprobs: outputs.iter().map(|output| format!("{:?}", output.logprobs)).collect(),
        prompt: outputs.iter().find_map(|output| output.prompt_logprobs.as_ref()).map(|found| format!("{found:?}")),
        vector: last.embedding.as_ref().map(|vector| vector.iter().map(|value| value.to_bits()).collect()),
        finish: last.finish.clone().unwrap(),
        counted: (timings.prompt_tokens, timings.generated_tokens),
    }
}

/// All requests at once.
fn ask(fleet: &Fleet) -> Vec<Seen> {
    let answers: Vec<FleetOutputs> =
        requests().into_iter().map(|request| fleet.submit_from(request, Place::default()).unwrap()).collect();
    answers.into_iter().map(read).collect()
}

fn undisturbed() -> Vec<Seen> {
    ask(&Fleet::start(vec![chip(CHIP, 0, Vec::new(), 0.0)], options()).unwrap())
}

/// Waits for something that other threads bring about.
fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(300), "{what} did not happen");
        std::thread::yield_now();
    }
}

/// The end of a server must not wait for a device that does not come back.
#[test]
fn what_is_cancelled_ends_on_a_device_that_hangs() {
    let hangs = vec![("hang", "1500".into()), ("watchdog_ms", "3600000".into())];
    let fleet = Fleet::start(vec![chip(CHIP, 0, hangs, 0.0)], options()).unwrap();
    let sampling = SamplingParams { max_tokens: 100, ignore_eos: true, ..SamplingParams::default() };
    let mut waiting = fleet.submit_from(Request::new((1..9).collect(), sampling), Place::default()).unwrap();
    let state = || fleet.instances()[0].health.as_ref().map(|health| health.state);
    until("a hang", || state() == Some(QHAL_HEALTH_UNRESPONSIVE));
    fleet.cancel_all();
    let last = std::iter::from_fn(|| waiting.blocking_recv()).last().unwrap();
    assert_eq!(last.finish, Some(FinishReason::Cancelled));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    /// Wherever a device is lost, from its start to the end of the answers, nobody sees it.
    #[test]
    fn a_lost_device_is_not_seen(at in 1u64..2500) {
        let fleet = pair(vec![("lost", at.to_string())], 0.0);
        prop_assert_eq!(ask(&fleet), undisturbed());
        let first = &fleet.instances()[0];
        prop_assert!(first.trust == Trust::Healthy || first.quarantines > 0 || first.faults > 0, "{:?}", first);
    }

    /// The same of a value that is no number.
    #[test]
    fn a_value_that_is_no_number_is_not_seen(at in 1u64..2500) {
        let fleet = pair(vec![("nan", at.to_string())], 0.0);
        let seen = ask(&fleet);
        for (seen, expected) in seen.iter().zip(undisturbed()) {
            prop_assert_eq!(&seen.finish, &expected.finish);
            prop_assert_eq!(seen.tokens.len(), expected.tokens.len());
        }
    }
}

#[test]
fn a_lost_device_comes_back_and_gets_requests_again() {
    let fleet = pair(vec![("lost", "400".into())], 0.0);
    assert_eq!(ask(&fleet), undisturbed());
    until("the loss", || fleet.instances()[0].quarantines >= 1);
    until("the return", || fleet.instances()[0].trust.is_usable());
    let back = &fleet.instances()[0];
    assert!(back.last_reset.is_some() && back.tests > 0 && back.failed_tests > 0, "{back:?}");
    assert!(fleet.moved() > 0);
    let before = back.stats.generated_tokens;
    assert_eq!(ask(&fleet), undisturbed());
    assert!(fleet.instances()[0].stats.generated_tokens > before, "it gets requests");
}

#[test]
fn one_device_alone_is_waited_for() {
    let fleet = Fleet::start(vec![chip(CHIP, 0, vec![("lost", "400".into())], 0.0)], options()).unwrap();
    // As parts of accepted work: the device may be gone before the last one is there, and a new request would be refused then.
    let later = |request| fleet.submit_later(request, None, fleet.epoch());
    let answers: Vec<FleetOutputs> = requests().into_iter().map(later).collect();
    assert_eq!(answers.into_iter().map(read).collect::<Vec<_>>(), undisturbed());
    assert!(fleet.moved() > 0 && fleet.instances()[0].last_reset.is_some());
}

#[test]
fn what_was_accepted_is_taken_while_the_fleet_drains() {
    let fleet = pair(Vec::new(), 0.0);
    let expected = read(fleet.submit_from(embedding(Pooling::Mean), Place::default()).unwrap());
    let epoch = fleet.epoch();
    fleet.drain();
    assert!(matches!(fleet.submit(embedding(Pooling::Mean), None), Err(SubmitError::Draining)));
    assert_eq!(read(fleet.submit_later(embedding(Pooling::Mean), None, epoch)), expected);
}

#[test]
fn what_was_accepted_before_all_was_cancelled_is_not_taken() {
    let fleet = pair(Vec::new(), 0.0);
    let epoch = fleet.epoch();
    fleet.cancel_all();
    let mut outputs = fleet.submit_later(embedding(Pooling::Mean), None, epoch);
    assert!(matches!(outputs.blocking_recv().and_then(|output| output.finish), Some(FinishReason::Cancelled)));
}

#[test]
fn a_device_that_hangs_is_left() {
    let hang = vec![("hang", "400".into()), ("watchdog_ms", "3600000".into())];
    let devices = vec![chip(CHIP, 0, hang, 0.0), chip(CHIP, 1, Vec::new(), 0.0)];
    let fleet = Fleet::start(devices, FleetOptions { stall: Duration::from_millis(400), ..options() }).unwrap();
    assert_eq!(ask(&fleet), undisturbed());
    let first = &fleet.instances()[0];
    assert!(first.quarantines == 1 && first.reason.contains("no step ended"), "{first:?}");
}

#[test]
fn a_grammar_that_takes_long_is_not_the_devices_fault() {
    let options = FleetOptions { tests: None, stall: Duration::from_millis(4), ..options() };
    let fleet = Fleet::start(vec![chip(CHIP, 0, Vec::new(), 0.0)], options).unwrap();
    // Written out, R0 is 8,192 letters; only then it shows that there is no other rule.
    let rules: String = (0..13).map(|i| format!("R{i}: R{next} R{next}\n", next = i + 1)).collect();
    let grammar = Grammar::Lark(format!("start: R0 other\n{rules}R13: /[ab]/"));
    for _ in 0..4 {
        let constraint = Some(Constraint { grammar: grammar.clone(), after: None });
        let request = Request { constraint, ..Request::new(vec![1, 2, 3], SamplingParams::default()) };
        let refused = fleet.submit_from(request, Place::default()).map(drop).unwrap_err();
        assert!(matches!(&refused, SubmitError::Refused(error) if error.to_string().contains("other")), "{refused}");
    }
    let report = fleet.instances().remove(0);
    assert_eq!((report.quarantines, report.trust), (0, Trust::Healthy), "{}", report.reason);
}

#[test]
fn a_device_in_quarantine_gets_nothing() {
    let devices = vec![chip(CHIP, 0, vec![("lost", "400".into())], 0.0), chip(CHIP, 1, Vec::new(), 0.0)];
    let fleet = Fleet::start(devices, FleetOptions { retest: Duration::from_secs(3600), ..options() }).unwrap();
    assert_eq!(ask(&fleet), undisturbed());
    until("quarantine", || fleet.instances()[0].trust == Trust::Quarantined);
    let before = fleet.instances()[0].stats;
    for _ in 0..3 {
        assert_eq!(ask(&fleet), undisturbed());
    }
    assert_eq!(fleet.instances()[0].stats.prompt_tokens, before.prompt_tokens);
    assert!(fleet.is_degraded() && fleet.is_usable());
}

#[test]
fn wrong_from_the_start() {
    // Three bits in a hundred launches: the known answer differs from itself.
    let flips = || vec![("flip", "30".to_owned())];
    let devices = vec![chip(CHIP, 0, flips(), 0.0), chip(CHIP, 1, Vec::new(), 0.0)];
    let fleet = Fleet::start(devices, FleetOptions { retest: Duration::from_secs(3600), ..options() }).unwrap();
    let first = &fleet.instances()[0];
    assert!(first.trust == Trust::Quarantined && first.reason.contains("twice"), "{first:?}");
    assert_eq!(ask(&fleet), undisturbed());
    let error = Fleet::start(vec![chip(CHIP, 0, flips(), 0.0)], options()).unwrap_err();
    assert!(error.to_string().contains("no device computes correctly"), "{error}");
    assert!(Fleet::start(Vec::new(), options()).is_err());
}

/// One request at a time, so that the row that is computed twice is the only one.
#[test]
fn steps_that_differ_are_caught_before_a_token_gets_out() {
    let request = || requests().remove(0);
    let expected = read(pair(Vec::new(), 0.0).submit_from(request(), Place::default()).unwrap());
    let mut caught = 0;
    for at in (900..1500).step_by(100) {
        let fleet = pair(vec![("flip", at.to_string())], 100.0);
        let seen = read(fleet.submit_to(0, request()).unwrap());
        let first = &fleet.instances()[0];
        caught += first.stats.guard_mismatches;
        println!("flip at {at}: {} checks, {} mismatches", first.stats.guard_checks, first.stats.guard_mismatches);
        assert_eq!(seen, expected, "flip at {at}");
    }
    assert!(caught > 0);
}

#[test]
fn other_types_go_on_as_they_would() {
    let devices = vec![chip(CHIP, 0, vec![("lost", "300".into())], 0.0), chip("mlu370", 0, Vec::new(), 0.0)];
    let fleet = Fleet::start(devices, options()).unwrap();
    // On a slow machine the device is lost before all have been handed in.
    let hand_in = |i: usize| match fleet.submit_to(0, requests().remove(i)) {
        Ok(answer) => answer,
        Err(_) => fleet.submit_from(requests().remove(i), Place::default()).unwrap(),
    };
    let answers: Vec<FleetOutputs> = (0..requests().len()).map(hand_in).collect();
    for (seen, expected) in answers.into_iter().map(read).zip(undisturbed()) {
        assert_eq!((&seen.finish, seen.counted), (&expected.finish, expected.counted));
    }
    assert!(fleet.moved() > 0);
}

/// A machine with two sockets, two PCIe switches at each, an interface and two devices below each switch.
const TWO_SOCKETS: &str = "sockets=2,switches=2,devices=8";
const SWITCHES: usize = 4;

/// The places of its devices of one chip, in order.
fn places(topology: &Topology, machine: &Path) -> Vec<Place> {
    let entries = std::fs::read_dir(machine.join("sys/bus/pci/devices")).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    // Each chip has a bus of its own below a switch.
    names.retain(|name| name.contains(":02:"));
    names.sort();
    let address = |name: &String| {
        let parts: Vec<u64> = name.split([':', '.']).map(|part| u64::from_str_radix(part, 16).unwrap()).collect();
        topology.of_bus_address((parts[0] << 32) | (parts[1] << 16) | (parts[2] << 8) | parts[3])
    };
    names.iter().map(address).collect()
}

/// Counted, not timed: bytes of token ids to a device and of logits from it, for requests that come in on four interfaces, unevenly.
#[test]
fn near_devices_cut_the_traffic_between_switches() {
    use qwen_engine::Distance;
    const REQUESTS: usize = 128;
    let machine = tempfile::tempdir().unwrap();
    hal_sim::write_machine(TWO_SOCKETS, machine.path()).unwrap();
    let topology = Topology::read(machine.path());
    let nics: Vec<Place> = (0..SWITCHES).map(|nic| topology.of_interface(&format!("eth{nic}"))).collect();
    let places = places(&topology, machine.path());
    assert_eq!(topology.distance(&nics[1], &places[2]), Distance::SameSwitch);
    assert_eq!(topology.distance(&nics[1], &places[0]), Distance::SameNode);
    assert_eq!(topology.distance(&nics[0], &places[7]), Distance::OtherNode(21));
    let devices = (0..8).map(|at| Instance { place: places[at].clone(), ..chip(CHIP, at % 2, Vec::new(), 0.0) });
    let fleet = Fleet::start(devices.collect(), FleetOptions { topology: Topology::read(machine.path()), ..options() })
        .unwrap();
    let vocab = fleet.about().limits.model_vocab_size as usize;
    // Shares of 40, 30, 20 and 10 of a hundred.
    let nic_of = |i: usize| [0, 0, 0, 0, 1, 1, 1, 2, 2, 3][i * 7 % 10];
    let request = |i: usize| {
        let sampling =
            SamplingParams { temperature: 0.0, max_tokens: 4, ignore_eos: true, ..SamplingParams::default() };
        Request::new((0..8).map(|k| ((i * 31 + k * 7) % 97) as u32 + 1).collect(), sampling)
    };
    // Bytes that cross switches, and those that cross sockets.
    let run = |together: usize, place: &dyn Fn(usize) -> (Option<usize>, Place)| {
        let (mut crossed, mut sockets, mut all) = (0, 0, 0);
        for wave in (0..REQUESTS).collect::<Vec<_>>().chunks(together) {
            let start = |i: &usize| match place(*i) {
                (Some(device), _) => (*i, fleet.submit_to(device, request(*i)).unwrap()),
                (None, from) => (*i, fleet.submit_from(request(*i), from).unwrap()),
            };
            let answers: Vec<(usize, FleetOutputs)> = wave.iter().map(start).collect();
            for (i, answer) in answers {
                let distance = topology.distance(&nics[nic_of(i)], &places[answer.instance().unwrap()]);
                let (prompt, generated) = read(answer).counted;
                let bytes = 4 * (prompt + generated * vocab);
                all += bytes;
                crossed += if distance > Distance::SameSwitch { bytes } else { 0 };
                sockets += if matches!(distance, Distance::OtherNode(_)) { bytes } else { 0 };
            }
        }
        [crossed, sockets].map(|bytes| 100.0 * bytes as f64 / all as f64)
    };
    println!(
        "simulated: two sockets, four switches, eight devices of eight places; bytes that cross a switch, a socket"
    );
    // A light load, and one that fills every place, so that near devices have none left for the busiest interface.
    for together in [24, 64] {
        let round_robin = run(together, &|i| (Some(i % 8), Place::default()));
        let by_load = run(together, &|_| (None, Place::default()));
        let nearest = run(together, &|i| (None, nics[nic_of(i)].clone()));
        println!("{together} at a time: nearest {nearest:.1?}%");
        for (name, other) in [("round robin", round_robin), ("by load alone", by_load)] {
            let cut = [0, 1].map(|at| 100.0 * (1.0 - nearest[at] / other[at]));
            println!("{together} at a time: {name} {other:.1?}%, cut by {cut:.0?}%");
            assert!(cut[0] > 50.0 && cut[1] > 50.0, "{name}: {other:?}, nearest {nearest:?}");
        }
    }
}
