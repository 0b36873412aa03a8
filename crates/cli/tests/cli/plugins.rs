//! Plugins as a user meets them: `qwen devices` and `--device`.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::common::{fixtures, qwen, stdout, transcript};

/// Compiles the C example, or the hostile variant of this number (see crates/hal/tests/plugins/hostile.c).
fn compile(library: &Path, hostile: u32) {
    let root = fixtures().join("..");
    let source = if hostile == 0 { "examples/c-plugin/plugin.c" } else { "crates/hal/tests/plugins/hostile.c" };
    let output = Command::new("cc")
        .args(["-std=gnu99", "-shared", "-fPIC"])
        .arg(format!("-DHOSTILE={hostile}"))
        .arg("-I")
        .arg(root.join("include"))
        .arg("-I")
        .arg(root.join("examples/c-plugin"))
        .arg(root.join(source))
        .arg("-o")
        .arg(library)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn plugin_of(answer: &Value, path: &Path) -> Value {
    let plugins = answer["plugins"].as_array().unwrap();
    plugins.iter().find(|plugin| plugin["path"] == path.to_str().unwrap()).unwrap().clone()
}

#[test]
fn devices_and_refused_plugins_are_listed() {
    let folder = tempfile::tempdir().unwrap();
    let [good, crash, hang]: [PathBuf; 3] =
        ["libhal_example.so", "libhal_crash.so", "libhal_hang.so"].map(|name| folder.path().join(name));
    compile(&good, 0);
    compile(&crash, 8);
    compile(&hang, 11);
    let mut command = qwen();
    command.args(["devices", "--json"]).env("QWEN_HAL_PATH", folder.path()).env("QWEN_HAL_PROBE_SECONDS", "3");
    let answer: Value = serde_json::from_str(&stdout(&mut command)).unwrap();
    let devices: Vec<&str> =
        answer["devices"].as_array().unwrap().iter().map(|device| device["plugin"].as_str().unwrap()).collect();
    assert_eq!(devices, ["cpu", "example"]);
    let loaded = plugin_of(&answer, &good);
    assert_eq!((loaded["status"].as_str(), loaded["abi"].as_str()), (Some("loaded"), Some("0.1")));
    let why = |path: &Path| {
        let report = plugin_of(&answer, path);
        assert_eq!(report["status"], "refused");
        report["errors"][0].as_str().unwrap().to_owned()
    };
    assert!(why(&crash).contains("crashed in its self test, in qhal_plugin_query, plugin_init"), "{}", why(&crash));
    assert!(why(&hang).contains("hung in its self test, in device_open, device_caps, for 3 s"), "{}", why(&hang));
    let text = stdout(qwen().args(["devices", "--plugin"]).arg(&good));
    assert!(
        text.contains("example:0  Example in host memory") && text.contains("plugin example 0.1.0: loaded"),
        "{text}"
    );
}

#[test]
fn a_device_is_chosen_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libhal_example.so");
    compile(&library, 0);
    let generate = |device: &str| {
        let mut command = qwen();
        command.args(["generate", "--model", "models/qwen2", "--prompt", "a", "--max-tokens", "1", "--device", device]);
        command.env("QWEN_HAL_PATH", folder.path());
        transcript(&mut command)
    };
    assert!(generate("cpu:0").starts_with("exit 0"));
    // It has no ops, and says so.
    let refused = generate("example");
    assert!(
        refused.starts_with("exit 1") && refused.contains("the device supports no form of its products"),
        "{refused}"
    );
    let refused = generate("cpu:1");
    assert!(refused.contains("expected an index below 1, found 1"), "{refused}");
    let refused = generate("ascend");
    assert!(refused.contains("expected one of: cpu, example") && refused.contains("libhal_ascend.so"), "{refused}");
    assert!(generate("a:b").starts_with("exit 2"));
}
