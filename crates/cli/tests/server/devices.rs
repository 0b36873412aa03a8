//! Several devices, simulated ones among them: health, figures, and answers while devices are lost.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::client::Server;

const CHAT: &str = "/v1/chat/completions";

/// A folder with the simulator, as a user installs it. Cargo puts its library beside the test.
fn plugins() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let library = std::env::current_exe().unwrap().with_file_name("libhal_sim.so");
    std::fs::copy(library, folder.path().join("libhal_sim.so")).unwrap();
    let manifest: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sim/libhal_sim.toml");
    std::fs::copy(manifest, folder.path().join("libhal_sim.toml")).unwrap();
    folder
}

fn start(plugins: &TempDir, device: &str, settings: &str) -> Server {
    start_in_groups(plugins, device, "1", settings)
}

fn start_in_groups(plugins: &TempDir, device: &str, size: &str, settings: &str) -> Server {
    start_with(plugins, &["--device", device, "--tensor_parallel_size", size], settings)
}

fn start_with(plugins: &TempDir, arguments: &[&str], settings: &str) -> Server {
    let environment = [("QWEN_HAL_PATH", plugins.path().to_str().unwrap()), ("QWEN_SIM", settings)];
    let always = ["--precision", "exact", "--guard_interval", "1"];
    Server::start_with(&[arguments, &always].concat(), &environment)
}

fn chat() -> Value {
    json!({
        "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 12, "ignore_eos": true, "temperature": 0,
    })
}

/// Asks until a device is lost and a request has gone on elsewhere; all answers must be what is expected.
fn ask_until_reexecuted(server: &Server, expected: &Value) {
    let mut asked = 0;
    while server.figure("qwen:reexecuted_requests_total") == 0.0 {
        // Requests that begin alike go to the same device; a salt of its own sends each elsewhere.
        let mut salted = chat();
        salted["cache_salt"] = format!("{asked}").into();
        let answer = server.ok(CHAT, &salted);
        assert_eq!(answer["choices"], expected["choices"]);
        let counted =
            |answer: &Value| (answer["usage"]["prompt_tokens"].clone(), answer["usage"]["completion_tokens"].clone());
        assert_eq!(counted(&answer), counted(expected));
        asked += 1;
        assert!(asked < 500, "no device was lost");
    }
}

#[test]
fn lost_devices_are_not_seen_by_clients() {
    let plugins = plugins();
    let calm = start(&plugins, "sim:mlu370:0", "delay_us=0");
    let expected = calm.ok(CHAT, &chat());
    drop(calm);
    let server = start(&plugins, "sim:mlu370:0,1 + cpu", "delay_us=0,lost=1200");
    ask_until_reexecuted(&server, &expected);
    let mut streamed = chat();
    streamed["stream"] = true.into();
    let text: String = server
        .post(CHAT, &streamed)
        .chunks()
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(text, expected["choices"][0]["message"]["content"].as_str().unwrap());
    assert_eq!(server.get("/readyz").status, 200);
    let figures = server.get("/metrics").body;
    assert!(figures.contains("engine=\"2\"") && figures.contains("trust=\"quarantined\""), "{figures}");
}

/// Two groups of two: the text of one device, members by name, and a lost member whose requests the other group takes.
#[test]
fn groups_answer_as_one_device_does() {
    let plugins = plugins();
    let calm = start(&plugins, "cpu", "");
    let expected = calm.ok(CHAT, &chat());
    drop(calm);
    let server = start_in_groups(&plugins, "sim:ascend910b:0,1,2,3", "2", "delay_us=0,devices=4,lost=1500");
    let health = server.get("/healthz").json();
    for (name, members) in [("sim_ascend910b_0,1", [0, 1]), ("sim_ascend910b_2,3", [2, 3])] {
        let names: Vec<&str> =
            health[name]["members"].as_array().unwrap().iter().map(|member| member["name"].as_str().unwrap()).collect();
        assert_eq!(names, members.map(|n| format!("sim:ascend910b:{n}")), "{health}");
        assert!(health[name]["title"].as_str().unwrap().starts_with("2 x "), "{health}");
    }
    ask_until_reexecuted(&server, &expected);
    let figures = server.get("/metrics").body;
    assert!(figures.contains("device=\"sim:ascend910b:0,1\""), "{figures}");
}

/// Two groups of two stages: bit for bit the answers of one such device, members by name with their memory, and the second stage of both lost
/// in turn, which the other group's requests do not show.
#[test]
fn stages_answer_as_one_device_does() {
    let plugins = plugins();
    let calm = start(&plugins, "sim:ascend910b:0", "delay_us=0");
    let expected = calm.ok(CHAT, &chat());
    drop(calm);
    let arguments = ["--device", "sim:ascend910b:0,1,2,3", "--pipeline_parallel_size", "2"];
    let server = start_with(&plugins, &arguments, "delay_us=0,devices=4,lost@1=700");
    let health = server.get("/healthz").json();
    for (name, members) in [("sim_ascend910b_0,1", [0, 1]), ("sim_ascend910b_2,3", [2, 3])] {
        for (member, n) in health[name]["members"].as_array().unwrap().iter().zip(members) {
            assert_eq!(member["name"], format!("sim:ascend910b:{n}"), "{health}");
            assert!(member["memory_util"].as_f64().is_some_and(|percent| percent < 100.0), "{health}");
        }
    }
    ask_until_reexecuted(&server, &expected);
    let reason = &server.get("/healthz").json()["sim_ascend910b_0,1"]["reason"];
    assert!(reason.as_str().unwrap().contains("sim:ascend910b3:1"), "{reason}");
    let figures = server.get("/metrics").body;
    let of_member =
        |line: &&str| line.starts_with("qwen:member_memory_percent{") && line.contains("member=\"sim:ascend910b:3\"");
    assert!(figures.lines().any(|line| of_member(&line)), "{figures}");
}

/// A device that never ends its first launches keeps nobody waiting: the others answer, and it is opened anew.
#[test]
fn a_device_that_hangs_from_the_start_does_not_keep_others() {
    let plugins = plugins();
    let environment =
        [("QWEN_HAL_PATH", plugins.path().to_str().unwrap()), ("QWEN_SIM", "delay_us=0,hang@1=1,watchdog_ms=3600000")];
    let arguments = ["--device", "sim:ascend910b:0,1", "--stall_timeout", "1", "--warmup=true"];
    let server = Server::start_with(&arguments, &environment);
    server.ok(CHAT, &chat());
    let health = server.get("/healthz").json();
    let (first, second) = (&health["sim_ascend910b_0"], &health["sim_ascend910b_1"]);
    assert_eq!((&health["status"], &first["trust"]), (&"degraded".into(), &"healthy".into()), "{health}");
    assert_eq!(second["trust"], "quarantined", "{health}");
    assert!(second["reason"].as_str().unwrap().contains("no answer to a known sequence"), "{health}");
}

#[test]
fn every_device_says_how_it_is() {
    let plugins = plugins();
    let server = start(&plugins, "sim:ascend910b:0,1+cpu", "delay_us=0");
    let health = server.get("/healthz").json();
    assert_eq!(health["status"], "ok");
    for (name, kind) in [("sim_ascend910b_0", "simulated"), ("sim_ascend910b_1", "simulated"), ("cpu_0", "cpu")] {
        let device = &health[name];
        assert_eq!(
            (&device["kind"], &device["status"], &device["trust"], &device["error_count"]),
            (&kind.into(), &"ok".into(), &"healthy".into(), &0.into()),
            "{health}"
        );
        // Told by what the simulator models; the CPU does not know, and nothing is made up for it.
        assert_eq!((device["temperature"].is_null(), device["compute_util"].is_null()), (kind == "cpu", kind == "cpu"));
        let used = device["memory_util"].as_f64().unwrap();
        assert!((0.0..=100.0).contains(&used) && device["last_reset_time"].is_null(), "{device}");
    }
    assert!(health["cpu_0"]["rates"].as_str().unwrap().starts_with("measured"), "{health}");
    assert!(health["sim_ascend910b_0"]["rates"].as_str().unwrap().contains("not real"), "{health}");
}

/// Requests that went this far.
fn routed(server: &Server, distance: &str) -> u64 {
    let figures = server.get("/metrics").body;
    let label = format!("distance=\"{distance}\"");
    let line = figures.lines().find(|line| line.starts_with("qwen:routed_requests_total") && line.contains(&label));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or_else(|| panic!("{figures}"))
}

/// Simulated: two sockets, two PCIe switches at each, an interface and two devices below each switch. What crosses a switch is
/// counted, not timed: all requests move equally many bytes, so requests are counted.
#[test]
fn requests_go_to_devices_near_where_they_came_in() {
    const MACHINE: &str = "delay_us=0,devices=8,sockets=2,switches=2";
    const REQUESTS: usize = 48;
    let (plugins, machine) = (plugins(), tempfile::tempdir().unwrap());
    hal_sim::write_machine(MACHINE, machine.path()).unwrap();
    let environment = [("QWEN_HAL_PATH", plugins.path().to_str().unwrap()), ("QWEN_SIM", MACHINE)];
    let topology = machine.path().to_str().unwrap();
    let devices = "sim:ascend910b:0,1,2,3,4,5,6,7";
    let arguments = ["--device", devices, "--topology", topology, "--host", "0.0.0.0", "--guard=false"];
    let server = Server::start_with(&[&arguments[..], &["--max_batch_size", "4"]].concat(), &environment);
    let health = server.get("/healthz").json();
    for device in 0..8 {
        let report = &health[format!("sim_ascend910b_{device}")];
        let root = format!("pci710{}:00/", device / 2);
        assert_eq!(report["numa_node"], device / 4, "{report}");
        assert!(report["pci"].as_str().unwrap().starts_with(&root), "{report}");
    }
    // One at a time: each goes to one of the two devices below the switch of its interface.
    let computed = |device: usize| {
        let figures = server.get("/metrics").body;
        let label = format!("engine=\"{device}\"");
        let line =
            figures.lines().find(|line| line.starts_with("vllm:generation_tokens_total") && line.contains(&label));
        line.unwrap().rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    for switch in 0..4 {
        let before = computed(2 * switch) + computed(2 * switch + 1);
        server.ok_at(&format!("127.0.{}.1", switch + 1), CHAT, &chat());
        assert_eq!(computed(2 * switch) + computed(2 * switch + 1) - before, 12.0, "switch {switch}");
    }
    assert_eq!(routed(&server, "same_switch"), 4);
    // Sixteen at a time take half of the places, with shares of 40, 30, 20 and 10 of a hundred on the four interfaces.
    let interface_of = |i: usize| [0, 0, 0, 0, 1, 1, 1, 2, 2, 3][i * 7 % 10];
    let next = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    if i >= REQUESTS {
                        return;
                    }
                    let mut salted = chat();
                    salted["cache_salt"] = format!("{i}").into();
                    server.ok_at(&format!("127.0.{}.1", interface_of(i) + 1), CHAT, &salted);
                }
            });
        }
    });
    let near = routed(&server, "same_switch") - 4;
    let all: u64 =
        near + ["same_root", "same_node", "other_node", "unknown"].map(|far| routed(&server, far)).iter().sum::<u64>();
    assert_eq!(all, REQUESTS as u64);
    let share = |crossing: usize| 100.0 * crossing as f64 / REQUESTS as f64;
    let (nearest, round_robin) =
        (share(REQUESTS - near as usize), share((0..REQUESTS).filter(|i| i % 8 / 2 != interface_of(*i)).count()));
    let cut = 100.0 * (1.0 - nearest / round_robin);
    println!("simulated: {nearest:.0}% cross a switch, round robin {round_robin:.0}%, cut by {cut:.0}%");
    assert!(cut > 50.0, "{nearest} of {round_robin}");
}
