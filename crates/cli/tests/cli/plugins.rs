//! Plugins as a user meets them: `qwen devices` and `--device`.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::common::{fixtures, hal_check, qwen, stdout, transcript};

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
    command.args(["devices", "--json"]).env("QWEN_HAL_PATH", folder.path()).env("QWEN_HAL_PROBE_SECONDS", "5");
    // What is measured here is nobody's profile.
    command.env("QWEN_CACHE", folder.path());
    let answer: Value = serde_json::from_str(&stdout(&mut command)).unwrap();
    let devices: Vec<&str> =
        answer["devices"].as_array().unwrap().iter().map(|device| device["plugin"].as_str().unwrap()).collect();
    assert_eq!(devices, ["cpu", "example"]);
    let loaded = plugin_of(&answer, &good);
    assert_eq!(answer["devices"][1]["instruction_set"], Value::Null);
    assert_eq!((loaded["status"].as_str(), loaded["abi"].as_str()), (Some("loaded"), Some("0.2")));
    let why = |path: &Path| {
        let report = plugin_of(&answer, path);
        assert_eq!(report["status"], "refused");
        report["errors"][0].as_str().unwrap().to_owned()
    };
    assert!(why(&crash).contains("crashed in its self test, in qhal_plugin_query, plugin_init"), "{}", why(&crash));
    assert!(why(&hang).contains("hung in its self test, in device_open, device_caps, for 5 s"), "{}", why(&hang));
    let text = stdout(qwen().args(["devices", "--plugin"]).arg(&good).env("QWEN_CACHE", folder.path()));
    assert!(
        text.contains("example:0  Example in host memory") && text.contains("plugin example 0.1.0: loaded"),
        "{text}"
    );
}

/// Quotas of control groups are the standard library's matter; the mask is too, but can be set here.
#[cfg(target_os = "linux")]
#[test]
fn threads_are_those_that_the_process_may_use() {
    let cache = tempfile::tempdir().unwrap();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    let first = allowed.trim().split([',', '-']).next().unwrap();
    let mut command = Command::new("taskset");
    command.args(["-c", first, qwen().get_program().to_str().unwrap(), "devices", "--json"]);
    command.env("QWEN_CACHE", cache.path()).env_remove("QWEN_THREADS").env_remove("QWEN_HAL_PATH");
    let answer: Value = serde_json::from_str(&stdout(&mut command)).unwrap();
    assert_eq!((&answer["devices"][0]["device"], &answer["devices"][0]["threads"]), (&"cpu:0".into(), &1.into()));
}

#[test]
fn a_plugin_that_was_named_and_is_not_used_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let empty = tempfile::tempdir().unwrap();
    let crash = folder.path().join("libhal_crash.so");
    compile(&crash, 8);
    let devices = |plugin: &Path| {
        let mut command = qwen();
        command.args(["devices", "--plugin"]).arg(plugin).env("QWEN_CACHE", folder.path());
        transcript(&mut command)
    };
    let missing = devices(&folder.path().join("libhal_missing.so"));
    assert!(missing.starts_with("exit 1") && missing.contains("check the path"), "{missing}");
    let nothing = devices(empty.path());
    assert!(nothing.starts_with("exit 1") && nothing.contains("found a folder without any"), "{nothing}");
    // What there is is listed all the same.
    let refused = devices(&crash);
    assert!(refused.starts_with("exit 1") && refused.contains("cpu:0") && refused.contains("crashed"), "{refused}");
    // Also where nobody asks for a device of it.
    let mut generate = qwen();
    generate.args(["generate", "--model", "models/qwen2", "--prompt", "a", "--max-tokens", "1", "--plugin"]);
    let missing = transcript(generate.arg(folder.path().join("libhal_missing.so")));
    assert!(missing.starts_with("exit 1") && missing.contains("check the path"), "{missing}");
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
        refused.starts_with("exit 1") && refused.contains("computes nothing of this model; choose another device"),
        "{refused}"
    );
    let refused = generate("cpu:1");
    assert!(refused.contains("expected an index below 1, found 1"), "{refused}");
    let refused = generate("ascend");
    assert!(refused.contains("expected one of: cpu, example") && refused.contains("libhal_ascend.so"), "{refused}");
    let refused = generate("example:b");
    assert!(refused.contains("expected device 0 of the model b, found a plugin that names no models"), "{refused}");
    assert!(generate("a:b:c").starts_with("exit 2"));
}

#[test]
fn auto_does_not_believe_figures_that_nobody_measured() {
    let folder = tempfile::tempdir().unwrap();
    compile(&folder.path().join("libhal_example.so"), 21);
    let generate = |device: &str| {
        let mut command = qwen();
        command.args(["generate", "--model", "models/qwen2", "--prompt", "a", "--max-tokens", "2", "--device", device]);
        command.env("QWEN_HAL_PATH", folder.path()).env("QWEN_CACHE", folder.path());
        command.output().unwrap()
    };
    let (auto, cpu) = (generate("auto"), generate("cpu"));
    let told = String::from_utf8(auto.stderr).unwrap();
    assert!(auto.status.success() && auto.stdout == cpu.stdout, "{told}");
    assert!(
        told.contains("example:0 could not be measured") && told.contains("the 1000.0 TB/s that it declares"),
        "{told}"
    );
}

/// (exit code, report)
fn check(arguments: &[&str], plugin: Option<&Path>) -> (i32, Value) {
    let mut command = hal_check();
    command.arg("--json").args(arguments);
    if let Some(plugin) = plugin {
        command.arg("--plugin").arg(plugin);
    }
    let output = command.output().unwrap();
    let report = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    (output.status.code().unwrap(), report)
}

fn failures(report: &Value) -> Vec<(&str, &str)> {
    let cases = report["cases"].as_array().unwrap().iter().filter(|case| case["outcome"] == "failed");
    cases.map(|case| (case["name"].as_str().unwrap(), case["message"].as_str().unwrap())).collect()
}

#[test]
fn the_example_reaches_level_0_and_not_level_1() {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libhal_example.so");
    compile(&library, 0);
    let (code, report) = check(&["--level", "0"], Some(&library));
    assert_eq!((code, failures(&report)), (0, vec![]));
    assert_eq!((&report["summary"]["failed"], &report["summary"]["level_reached"]), (&0.into(), &0.into()));
    assert!(report["summary"]["passed"].as_u64().unwrap() > 25, "{}", report["summary"]);
    assert_eq!(report["plugin"], "example 0.1.0");
    // Level 1 is not reached by refusing everything.
    let (code, report) = check(&["--level", "1", "--case", "1/"], Some(&library));
    assert_eq!((code, &report["summary"]["passed"]), (1, &0.into()));
    assert!(failures(&report).iter().all(|(name, _)| name.starts_with("1/coverage/")), "{:?}", failures(&report));
}

#[test]
fn the_cpu_passes_in_child_processes() {
    let (code, report) = check(&["--device", "cpu", "--level", "2"], None);
    assert_eq!((code, failures(&report)), (0, vec![]));
    assert_eq!(report["summary"]["level_reached"], 2);
    let gemm = report["cases"].as_array().unwrap().iter().find(|case| case["name"] == "1/gemm/q4_k.f32").unwrap();
    assert!(gemm["nmse"].as_f64().unwrap() <= gemm["limit_nmse"].as_f64().unwrap(), "{gemm}");
    assert_eq!(gemm["bits"].as_str().unwrap().len(), 16);
}

#[test]
fn liars_crashes_and_hangs_are_failures_of_their_cases() {
    let folder = tempfile::tempdir().unwrap();
    let library = |hostile: u32| {
        let library = folder.path().join(format!("libhal_hostile{hostile}.so"));
        compile(&library, hostile);
        library
    };
    let (code, report) = check(&["--level", "0"], Some(&library(18)));
    let liar = failures(&report);
    assert!(
        code == 1 && liar.iter().any(|(name, why)| *name == "0/honesty/random_descriptions" && why.contains("claimed")),
        "{liar:?}"
    );
    // The cases after the crash are run too.
    let (code, report) = check(&["--level", "0"], Some(&library(19)));
    let crashed = failures(&report);
    assert!(code == 1 && crashed.contains(&("0/memory/copy_2d", "crashed: signal 6, abort")), "{crashed:?}");
    let last = report["cases"].as_array().unwrap().last().unwrap();
    assert_eq!((&last["name"], &last["outcome"]), (&"0/honesty/order_of_questions".into(), &"passed".into()));
    let (code, report) = check(&["--level", "0", "--limit", "1.5", "--case", "streams/"], Some(&library(20)));
    let hung = failures(&report);
    assert!(code == 1 && hung.contains(&("0/streams/poll", "hung in this case for 1.5 s")), "{hung:?}");
    assert!(report["summary"]["passed"].as_u64().unwrap() >= 2, "{report}");
    // Another plugin's device is not looked at in place of the one that was named.
    let other = transcript(hal_check().args(["--level", "0", "--device", "cpu", "--plugin"]).arg(library(19)));
    assert!(other.starts_with("exit 1") && other.contains("--device: expected a device of "), "{other}");
    // What can't be opened at all is one sentence.
    for (hostile, part) in [
        (5, "none for buffer_free, plan_launch"),
        (8, "crashed while it was loaded or its device opened: signal 6, abort"),
        (3, "needs 99 or newer"),
    ] {
        let refused = transcript(hal_check().args(["--level", "0", "--plugin"]).arg(library(hostile)));
        assert!(refused.starts_with("exit 1") && refused.contains(part), "{refused}");
    }
}

#[test]
fn other_forms_of_the_report() {
    let html = stdout(hal_check().args(["--device", "cpu", "--level", "1", "--case", "softmax/", "--html"]));
    assert!(html.starts_with("<!doctype html>") && html.contains("1/softmax/rows"), "{html}");
    let text = stdout(hal_check().args(["--device", "cpu", "--level", "1", "--case", "softmax/", "--verbose"]));
    assert!(text.contains("passed      1/softmax/rows  nmse"), "{text}");
    assert!(text.contains("some cases of levels 0 to 1, by --case softmax/: no level is judged by them"), "{text}");
    let part = check(&["--device", "cpu", "--case", "3/"], None).1;
    assert_eq!((&part["filter"], &part["summary"]["level_reached"]), (&"3/".into(), &Value::Null));
    let list = stdout(hal_check().args(["--list", "--level", "3"]));
    let json: Value = serde_json::from_str(&stdout(hal_check().args(["--list", "--json"]))).unwrap();
    let listed = json["cases"].as_array().unwrap();
    assert_eq!(listed.len(), list.lines().count());
    assert!(listed.iter().all(|case| case["name"].as_str().unwrap().starts_with(&format!("{}/", case["level"]))));
    for other in [&["--device", "cpu"][..], &["--plugin", "x.so"], &["--html"], &["--threads", "2"], &["--verbose"]] {
        let refused = transcript(hal_check().arg("--list").args(other));
        assert!(refused.starts_with("exit 2") && refused.contains("cannot be used with"), "{refused}");
    }
    assert!(list.lines().count() > 200 && list.contains("3/collectives/all_reduce.8"), "{list}");
    insta::assert_snapshot!("help_qwen_hal_check", transcript(hal_check().arg("--help")));
    let wrong = transcript(hal_check().args(["--device", "cpu", "--case", "nothing of the kind"]));
    assert!(wrong.contains("expected part of a case's name"), "{wrong}");
    assert!(transcript(&mut hal_check()).starts_with("exit 2"));
}
