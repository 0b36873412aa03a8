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
    let environment = [("QWEN_HAL_PATH", plugins.path().to_str().unwrap()), ("QWEN_SIM", settings)];
    Server::start_with(&["--device", device, "--precision", "exact", "--guard_interval", "1"], &environment)
}

fn chat() -> Value {
    json!({
        "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 12, "ignore_eos": true, "temperature": 0,
    })
}

#[test]
fn lost_devices_are_not_seen_by_clients() {
    let plugins = plugins();
    let calm = start(&plugins, "sim:mlu370:0", "delay_us=0");
    let expected = calm.ok(CHAT, &chat());
    drop(calm);
    let server = start(&plugins, "sim:mlu370:0,1 + cpu", "delay_us=0,lost=1200");
    let mut asked = 0;
    while server.figure("qwen:reexecuted_requests_total") == 0.0 {
        // Requests that begin alike go to the same device; a salt of its own sends each elsewhere.
        let mut salted = chat();
        salted["cache_salt"] = format!("{asked}").into();
        let answer = server.ok(CHAT, &salted);
        assert_eq!(answer["choices"], expected["choices"]);
        let counted =
            |answer: &Value| (answer["usage"]["prompt_tokens"].clone(), answer["usage"]["completion_tokens"].clone());
        assert_eq!(counted(&answer), counted(&expected));
        asked += 1;
        assert!(asked < 500, "no device was lost");
    }
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
