//! `qwen devices explain`, `QWEN_DEBUG_DISPATCH` and `qwen-bench kernels`, as users meet them.

use serde_json::Value;

use crate::common::{qwen, qwen_bench, stdout, transcript};

/// A cache of its own, so that a test measures and keeps what it wants.
fn cache() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn decisions_are_told_before_anything_runs() {
    let cache = cache();
    let mut command = qwen();
    command.args(["devices", "explain", "--model", "gguf/llama.gguf", "--seq", "64", "--json"]);
    let answer: Value = serde_json::from_str(&stdout(command.env("QWEN_CACHE", cache.path()))).unwrap();
    assert_eq!((&answer["device"], &answer["chip"]), (&"cpu:0".into(), &"cpu".into()));
    assert_eq!(answer["bandwidth_origin"], "measured");
    let decisions = answer["decisions"].as_array().unwrap();
    for step in ["prefill", "decode"] {
        let products = decisions.iter().filter(|d| d["step"] == step && d["op"] == "gemm");
        assert!(products.clone().count() > 0, "{answer}");
        for decision in products {
            assert_eq!((&decision["library"], &decision["chosen_by"]), (&"qwen-cpu".into(), &"backend".into()));
            let tokens = if step == "decode" { 1 } else { 64 };
            // The head is computed for the last row alone.
            assert!(decision["variable"].is_null() || decision["min"] == tokens || decision["min"] == 1, "{decision}");
        }
        let attention = decisions.iter().find(|d| d["step"] == step && d["op"] == "attention").unwrap();
        assert_eq!(attention["seq_len"], 64);
    }
    let text =
        stdout(qwen().args(["devices", "explain", "--model", "gguf/llama.gguf"]).env("QWEN_CACHE", cache.path()));
    for (option, named) in [("--seq", " --seq: expected 1 to"), ("--max-seq-len", " max-seq-len: expected 1 to")] {
        let mut command = qwen();
        command.args(["devices", "explain", "--model", "gguf/llama.gguf", option, "1000000"]);
        let refused = transcript(command.env("QWEN_CACHE", cache.path()));
        assert!(refused.starts_with("exit 1") && refused.contains(named), "{refused}");
    }
    assert!(
        text.starts_with("cpu:0  qwen-cpu for cpu-") && text.contains("measured\nprefill  tokens 256, context 256\n"),
        "{text}"
    );
}

/// The lines of the specification, on standard error and only if they are asked for.
#[test]
fn dispatch_lines_have_the_specified_form() {
    let cache = cache();
    let run = |debug: &str| {
        let mut command = qwen();
        command.args(["generate", "--model", "gguf/llama.gguf", "--prompt", "1 2 3", "--max-tokens", "1"]);
        let output = command.env("QWEN_CACHE", cache.path()).env("QWEN_DEBUG_DISPATCH", debug).output().unwrap();
        assert!(output.status.success());
        (output.stdout, String::from_utf8(output.stderr).unwrap())
    };
    let (answer, lines) = run("1");
    let (same, silent) = run("0");
    assert_eq!(answer, same);
    assert!(!silent.contains("[DISPATCH]"), "{silent}");
    let lines: Vec<&str> = lines.lines().filter(|line| line.starts_with("[DISPATCH]")).collect();
    assert!(!lines.is_empty() && lines.len().is_multiple_of(3));
    for three in lines.chunks(3) {
        assert!(three[0].starts_with("[DISPATCH] Top-level: selected qwen-cpu backend for cpu-"), "{three:?}");
        assert!(three[1].starts_with("[DISPATCH] Mid-level: memory bandwidth "), "{three:?}");
        assert!(three[1].contains("GB/s -> ") || three[1].contains("TB/s -> "), "{three:?}");
        assert!(
            three[2].starts_with("[DISPATCH] Bottom-level: ") && three[2].contains(" -> tiling_config="),
            "{three:?}"
        );
    }
    let distinct: std::collections::BTreeSet<_> = lines.chunks(3).collect();
    assert_eq!(distinct.len(), lines.len() / 3, "each decision is printed once");
}

#[test]
fn variants_are_timed_and_kept() {
    let cache = cache();
    let bench = |arguments: &[&str]| {
        let mut command = qwen_bench();
        command.arg("kernels").args(arguments).args(["--seconds", "0.01"]).env("QWEN_CACHE", cache.path());
        stdout(&mut command)
    };
    let answer: Value = serde_json::from_str(&bench(&["--filter", "q4_0.i8_g32 16x576", "--json"])).unwrap();
    let cases = answer["cases"].as_array().unwrap();
    // Portable code has one way, and nothing to choose.
    let choice = !answer["fingerprint"].as_str().unwrap().contains("scalar");
    assert_eq!(cases.len(), usize::from(choice));
    for case in cases {
        let timings = case["timings"].as_array().unwrap();
        assert_eq!(timings.iter().filter(|timing| timing["chosen"] == true).count(), 1);
        assert!(timings.len() > 1 && timings.iter().all(|timing| timing["seconds"].as_f64().unwrap() > 0.0));
    }
    // Keeping and forgetting leaves answers as they are.
    let generate = || {
        let mut command = qwen();
        command.args(["generate", "--model", "gguf/llama.gguf", "--prompt", "1 2 3", "--max-tokens", "4"]);
        stdout(command.env("QWEN_CACHE", cache.path()))
    };
    let before = generate();
    assert!(bench(&["--model", "gguf/llama.gguf", "--tune"]).contains(" variants kept"));
    assert_eq!(generate(), before);
    bench(&["--forget"]);
    assert_eq!(generate(), before);
}

/// Nobody can say which variant a measurement finds the fastest, so one is put into the profile by hand.
#[test]
fn what_the_profile_prefers_is_what_the_next_run_takes() {
    let cache = cache();
    let model = ["--model", "gguf/llama.gguf"];
    let bench = |arguments: &[&str]| {
        let mut command = qwen_bench();
        command.arg("kernels").args(model).args(arguments).args(["--seconds", "0.01"]);
        stdout(command.env("QWEN_CACHE", cache.path()))
    };
    let answer: Value = serde_json::from_str(&bench(&["--json"])).unwrap();
    let Some(case) = answer["cases"].as_array().unwrap().first() else {
        println!("skipped: this instruction set has one way to compute a product");
        return;
    };
    let other = case["timings"].as_array().unwrap().iter().find(|timing| timing["chosen"] == false).unwrap();
    let profile = std::fs::read_dir(cache.path().join("profiles")).unwrap().next().unwrap().unwrap().path();
    let mut stored: Value = serde_json::from_slice(&std::fs::read(&profile).unwrap()).unwrap();
    stored["variants"][case["plan"].as_str().unwrap()] = other["variant"].clone();
    std::fs::write(&profile, stored.to_string()).unwrap();

    let explain = || -> Value {
        let mut command = qwen();
        command.args(["devices", "explain"]).args(model).arg("--json").env("QWEN_CACHE", cache.path());
        serde_json::from_str(&stdout(&mut command)).unwrap()
    };
    let tuned = |answer: &Value| -> Vec<String> {
        let decisions = answer["decisions"].as_array().unwrap().iter().filter(|d| d["chosen_by"] == "tuning");
        decisions.map(|d| format!("{}.{}", d["family"].as_str().unwrap(), d["tiling"].as_str().unwrap())).collect()
    };
    let (family, tiling) = other["kernel"].as_str().unwrap().split_once('.').unwrap();
    let found = tuned(&explain());
    assert!(found.contains(&format!("{family}.gemm.{tiling}")), "{other}: {found:?}");
    let mut command = qwen();
    command.args(["generate", "--prompt", "1 2 3", "--max-tokens", "1"]).args(model);
    let lines = transcript(command.env("QWEN_CACHE", cache.path()).env("QWEN_DEBUG_DISPATCH", "1"));
    assert!(lines.contains(&format!("tiling_config=gemm.{tiling}\n")), "{tiling}: {lines}");
    bench_forget(&cache);
    assert_eq!(tuned(&explain()), Vec::<String>::new());
}

fn bench_forget(cache: &tempfile::TempDir) {
    stdout(qwen_bench().args(["kernels", "--forget"]).env("QWEN_CACHE", cache.path()));
}

#[test]
fn sheets_of_a_folder_are_read_and_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("x.toml"), "format = 1\nname = \"X\"\n").unwrap();
    let mut command = qwen();
    command.arg("devices").env("QWEN_CHIPS", folder.path()).current_dir(folder.path());
    let text = transcript(&mut command);
    assert!(text.starts_with("exit 1\n") && text.contains("x.toml: "), "{text}");
    let text = transcript(qwen().arg("devices").env("QWEN_CHIPS", folder.path().join("none")));
    assert!(text.contains("none: ") && text.lines().count() == 2, "{text}");
}

#[test]
fn times_that_cannot_be_are_refused() {
    insta::assert_snapshot!(transcript(qwen_bench().args(["kernels", "--seconds", "0"])));
}
