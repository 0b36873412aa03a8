//! Programs on devices that are not the CPU: simulated chips, OpenCL where there is a device, and the plugin that computes nothing.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use crate::common::{fixtures, hal_check, qwen, qwen_bench, qwen_compile, qwen_eval, stdout, transcript};

/// A folder with the simulator and the plugin that computes nothing.
fn plugins() -> TempDir {
    plugins_of(&["sim", "null"])
}

/// A folder with plugins, as a user installs them. Cargo puts their libraries beside the test.
fn plugins_of(names: &[&str]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in names {
        let manifest = format!("../{name}/libhal_{name}.toml");
        let library = PathBuf::from(format!("libhal_{name}.so"));
        std::fs::copy(std::env::current_exe().unwrap().with_file_name(&library), folder.path().join(&library)).unwrap();
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join(manifest);
        std::fs::copy(manifest, folder.path().join(library.with_extension("toml"))).unwrap();
    }
    folder
}

/// Whether the machine has a device for OpenCL; `./test` says when it must have one.
fn has_opencl(plugins: &TempDir) -> bool {
    let answer = json(&mut with(qwen(), plugins, &["devices", "--json"]));
    let found = answer["devices"].as_array().unwrap().iter().any(|device| device["device"] == "opencl:0");
    assert!(found || std::env::var_os("QWEN_OPENCL_REQUIRED").is_none(), "an OpenCL device was expected: {answer}");
    found
}

/// Instruction sets of the CPU backend change no bit, which is tested elsewhere: what is slow runs with one of them.
fn is_first_run() -> bool {
    std::env::var_os("QWEN_CPU_ISA").is_none()
}

/// Compares a model on a device with the CPU in float32: the limit on divergence, and the same words or a reason why not.
fn is_as_on_the_cpu(plugins: &TempDir, model: &str, device: &str, more: &[&str]) {
    let arguments = ["compare", "--model", model, "--a", "cpu", "--b", device, "--generate", "8", "--json"];
    let found = json(&mut with(qwen_eval(), plugins, &[&arguments[..], more].concat()));
    let kl = found["kl_mean"].as_f64().unwrap();
    assert!((-1e-9..=0.002).contains(&kl), "{model} on {device}: {found}");
    let greedy = &found["greedy"];
    assert!(greedy["equal"] == true || greedy["divergence"]["explained"] == true, "{model} on {device}: {greedy}");
}

#[test]
fn every_family_gives_the_same_on_opencl() {
    let folder = plugins_of(&["opencl"]);
    if !is_first_run() || !has_opencl(&folder) {
        println!("skipped: no OpenCL device, or not the first instruction set");
        return;
    }
    let models = std::fs::read_dir(fixtures().join("models")).unwrap();
    let models = models.map(|entry| format!("models/{}", entry.unwrap().file_name().into_string().unwrap()));
    let files = ["llama-q4_k", "llama-q8_0", "llama-bf16", "qwen2moe"].map(|name| format!("gguf/{name}.gguf"));
    let mut models: Vec<String> = models.chain(files).collect();
    models.sort();
    for model in models {
        // Rounded activations can turn a router's choice in a model of random weights, and that says nothing of a device.
        let tokens = "1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16";
        is_as_on_the_cpu(&folder, &model, "opencl:0", &["--tokens", tokens, "--precision-b", "exact"]);
    }
}

/// Long enough for a mean.
const TEXT: &str = "The capital of France is Paris. Water boils at a hundred degrees, and freezes at none. A library lends books, \
    a bank lends money, and both want them back. When the sun went down, the fishermen came home with full nets and sang the old \
    songs of the harbour until the children had fallen asleep and the lamps were put out one by one.";

#[test]
fn the_default_model_says_the_same_on_four_devices() {
    let folder = plugins_of(&["sim", "opencl"]);
    if !is_first_run() {
        println!("skipped: not the first instruction set");
        return;
    }
    stdout(qwen().args(["models", "fetch", "smollm2"]));
    let opencl = has_opencl(&folder).then_some("opencl:0");
    for device in ["sim:ascend910b", "sim:mlu370", "sim:dcu-z100"].into_iter().chain(opencl) {
        is_as_on_the_cpu(&folder, "smollm2", device, &["--text", TEXT]);
    }
}

fn with(mut command: Command, plugins: &TempDir, arguments: &[&str]) -> Command {
    command.args(arguments).env("QWEN_HAL_PATH", plugins.path());
    command
}

fn json(command: &mut Command) -> Value {
    serde_json::from_str(&stdout(command)).unwrap()
}

const GENERATE: [&str; 8] = ["generate", "--model", "models/qwen2", "--prompt", "a", "--max-tokens", "6", "--device"];

#[test]
fn the_same_text_on_every_device_that_computes() {
    let folder = plugins();
    let generate = |device: &str| transcript(&mut with(qwen(), &folder, &[&GENERATE[..], &[device]].concat()));
    let on_cpu = generate("cpu");
    assert!(on_cpu.starts_with("exit 0\n"), "{on_cpu}");
    for device in ["sim:ascend910b", "sim:mlu370:1", "sim:br100:0", "auto"] {
        assert_eq!(generate(device), on_cpu, "{device}");
    }
    // Nothing is computed there, and nothing breaks.
    assert!(generate("null").starts_with("exit 0\n"), "{}", generate("null"));
}

#[test]
fn devices_are_named_with_their_model_and_called_simulated() {
    let folder = plugins();
    let answer = json(&mut with(qwen(), &folder, &["devices", "--json"]));
    let devices = answer["devices"].as_array().unwrap();
    let of = |name: &str| devices.iter().find(|device| device["device"] == name).unwrap();
    let chip = of("sim:mlu370:1");
    assert_eq!(chip["kind"], "simulated");
    assert!(chip["name"].as_str().unwrap().ends_with("(simulated)"), "{chip}");
    assert_eq!(of("cpu:0")["kind"], "cpu");
}

#[test]
fn what_cannot_be_is_refused_in_words() {
    let folder = plugins();
    let generate = |device: &str| transcript(&mut with(qwen(), &folder, &[&GENERATE[..], &[device]].concat()));
    for (device, part) in [
        ("sim:mlu370:0,1", "expected one device, found 2; this command uses one device"),
        ("sim:mlu370:2", "expected device 2 of the model mlu370"),
        ("sim:mlu999", "mlu370 (0 to 1)"),
        ("null:a", "a plugin that names no models"),
    ] {
        let told = generate(device);
        assert!(told.starts_with("exit 1\n") && told.contains(part), "{told}");
    }
    assert!(generate("sim:0:0").starts_with("exit 2\n"));
    // A device by two of its names.
    let twice = ["--device", "sim:ascend910b:0+sim:ascend910b3:0", "--pipeline-parallel-size", "2"];
    let told = transcript(&mut with(qwen(), &folder, &[&GENERATE[..7], &twice].concat()));
    assert!(told.starts_with("exit 1\n") && told.contains("found sim:ascend910b3:0 twice; name each"), "{told}");
}

const GROUP: [&str; 4] = ["--device", "sim:ascend910b:0,1", "--tensor-parallel-size", "2"];

#[test]
fn the_same_text_on_a_group_of_devices() {
    let folder = plugins();
    for model in ["qwen2", "llama", "qwen3_moe", "deepseek_v2", "deepseek_v3"] {
        let model = format!("models/{model}");
        let generate = |device: &[&str]| {
            let arguments =
                ["generate", "--model", &model, "--prompt", "a b", "--max-tokens", "8", "--precision", "exact"];
            transcript(&mut with(qwen(), &folder, &[&arguments[..], device].concat()))
        };
        let on_cpu = generate(&["--device", "cpu"]);
        assert!(on_cpu.starts_with("exit 0\n"), "{on_cpu}");
        assert_eq!(generate(&GROUP), on_cpu, "{model}");
    }
    // More ranks than key/value heads: each head is held by two of them.
    let four = ["--device", "sim:ascend910b:0,1,2,3", "--tensor-parallel-size", "4"];
    let generate = |device: &[&str]| {
        let arguments = [&GENERATE[..7], device].concat();
        transcript(with(qwen(), &folder, &arguments).env("QWEN_SIM", "devices=4"))
    };
    assert_eq!(generate(&four), generate(&["--device", "cpu"]));
    // Two stages of two ranks, spelled as in vLLM's Python interface too.
    let stages = ["--device", "sim:ascend910b:0,1,2,3", "--tensor_parallel_size", "2", "--pipeline_parallel_size", "2"];
    assert_eq!(generate(&stages), generate(&["--device", "cpu"]));
}

const STAGES: [&str; 4] = ["--device", "sim:ascend910b:0,1", "--pipeline-parallel-size", "2"];

/// Not only the text: every logit, which `compare` would show.
#[test]
fn stages_are_one_device_in_every_bit() {
    let folder = plugins();
    for model in ["qwen2", "qwen3_moe", "deepseek_v2"] {
        let model = format!("models/{model}");
        let arguments = ["compare", "--model", &model, "--a", "sim:ascend910b", "--b", "sim:ascend910b:0,1", "--json"];
        let precisions = ["--precision-a", "balanced", "--precision-b", "balanced"];
        let more = [&["--pipeline-parallel-size", "2"], &precisions[..]].concat();
        let found = json(&mut with(qwen_eval(), &folder, &[&arguments[..], &more].concat()));
        assert_eq!(found["max_abs_difference"], 0.0, "{found}");
        assert!(found["b"]["name"].as_str().unwrap().starts_with("2 x "), "{found}");
    }
    for (more, part) in [
        (&["--pipeline-parallel-size", "2", "--b", "sim:ascend910b"][..], "expected several devices in --a or --b"),
        (&["--b", "sim:ascend910b:0,1", "--per-op"], "--per-op: expected one device"),
        (&["--b", "sim:ascend910b:0,1"], "expected one device, found 2"),
    ] {
        let arguments = ["compare", "--model", "models/qwen2", "--a", "cpu"];
        let told = transcript(&mut with(qwen_eval(), &folder, &[&arguments[..], more].concat()));
        assert!(told.starts_with("exit 1\n") && told.contains(part), "{told}");
    }
}

/// A stage takes whole weights, so a compiled file is as good as its source; a rank wants a part of each.
#[test]
fn stages_take_compiled_files() {
    let folder = plugins();
    let compiled = folder.path().join("compiled.gguf");
    let compiled = compiled.to_str().unwrap();
    let arguments = ["--model", "gguf/llama.gguf", "--target", "sim:ascend910b", "--output", compiled];
    stdout(&mut with(qwen_compile(), &folder, &arguments));
    let generate = |model: &str, device: &[&str]| {
        let arguments = ["generate", "--model", model, "--prompt", "a b", "--max-tokens", "8"];
        transcript(&mut with(qwen(), &folder, &[&arguments[..], device].concat()))
    };
    let source = generate("gguf/llama.gguf", &["--device", "sim:ascend910b"]);
    assert!(source.starts_with("exit 0\n"), "{source}");
    assert_eq!(generate(compiled, &STAGES), source);
    let told = generate(compiled, &GROUP);
    assert!(told.contains("is compiled: it holds weights packed whole") && told.contains("--pipeline-parallel-size"));
}

#[test]
fn a_group_is_explained_and_what_it_cannot_do_is_refused() {
    let folder = plugins();
    let explain = |more: &[&str]| {
        let arguments = ["devices", "explain", "--model", "models/qwen2"];
        with(qwen(), &folder, &[&arguments[..], &GROUP, more].concat())
    };
    let answer = json(&mut explain(&["--json"]));
    assert_eq!(answer["members"], serde_json::json!(["sim:ascend910b:0", "sim:ascend910b:1"]));
    // After attention and after the feed-forward part of two layers.
    assert!(answer["steps"].as_array().unwrap().iter().all(|step| step["exchanges"] == 4), "{answer}");
    assert!(stdout(&mut explain(&[])).contains(", 4 sums exchanged between 2 devices"));
    let arguments = ["generate", "--model", "models/qwen2", "--prompt", "a", "--dump-ir", "after:shard"];
    let stages = with(qwen(), &folder, &[&["devices", "explain", "--model", "models/qwen2"], &STAGES[..]].concat());
    let told = stdout(&mut { stages });
    assert!(told.contains("stage 1  sim:ascend910b:1, layer 1, "), "{told}");
    let arguments_of_stages = [&["devices", "explain", "--model", "models/qwen2", "--json"], &STAGES[..]].concat();
    let answer = json(&mut with(qwen(), &folder, &arguments_of_stages));
    assert_eq!(answer["stages"][1]["devices"], serde_json::json!(["sim:ascend910b:1"]));
    assert_eq!((&answer["stages"][0]["layers"], &answer["steps"][0]["exchanges"]), (&1.into(), &0.into()));
    let graph = stdout(&mut with(qwen(), &folder, &[&arguments[..], &GROUP].concat()));
    assert!(graph.contains("all_reduce {ranks=2") && graph.contains(" slice(0,0,64)"), "{graph}");
    for (device, size, part) in [
        ("sim:ascend910b:0,1,2", "2", "expected groups of 2 devices, found 3 devices"),
        ("sim:ascend910b:0", "2", "expected groups of 2 devices, found 1 device"),
        ("sim:ascend910b:0,1,2,3", "2", "expected one group of 2 devices, found 2 groups"),
        ("sim:ascend910b:0,1,2", "3", "4 query heads can't be split evenly among 3 devices"),
        ("sim:ascend910b:0+sim:mlu370:0", "2", "is of another type than"),
        ("sim:ascend910b:0,0", "2", "expected different devices, found sim:ascend910b:0 twice; name each device once"),
    ] {
        let more = [device, "--tensor-parallel-size", size];
        let mut command = with(qwen(), &folder, &[&GENERATE[..], &more].concat());
        let told = transcript(command.env("QWEN_SIM", "devices=4"));
        assert!(told.starts_with("exit 1\n") && told.contains(part), "{told}");
    }
    let stages = |device: &str, size: &str, settings: &str, part: &str| {
        let more = [device, "--pipeline-parallel-size", size];
        let told = transcript(with(qwen(), &folder, &[&GENERATE[..], &more].concat()).env("QWEN_SIM", settings));
        assert!(told.starts_with("exit 1\n") && told.contains(part), "{told}");
    };
    stages("sim:ascend910b:0,1,2", "3", "devices=3", "2 layers can't be divided into 3 stages");
    stages("sim:ascend910b:0,1", "4", "", "expected groups of 4 devices, found 2 devices");
    stages("sim:ascend910b:0,1", "2", "memory@1=65536", "sim:ascend910b3:1, stage 1 of 2: ");
    stages("sim:ascend910b:0,1", "2", "lost@1=9", "sim:ascend910b3:1, stage 1 of 2: ");
}

#[test]
fn what_a_chip_lacks_the_cpu_computes_and_says_so() {
    let folder = plugins();
    let arguments = ["generate", "--model", "models/deepseek_v3_fp8", "--prompt", "a", "--max-tokens", "2", "--device"];
    let run = |more: &[&str]| transcript(&mut with(qwen(), &folder, &[&arguments[..], more].concat()));
    let told = run(&["sim:mlu370"]);
    assert!(told.starts_with("exit 0\n"), "{told}");
    for part in ["computed on cpu instead of sim: gemm (", "the chip has no f8_e4m3", "at most 256 are allowed"] {
        assert!(told.contains(part), "{told}");
    }
    let refused = run(&["sim:mlu370", "--max-crossings", "1"]);
    assert!(refused.starts_with("exit 1\n") && refused.contains("raise --max-crossings"), "{refused}");
}

/// What is told before is what the run says: the same op, reason and number of copies, in both forms.
#[test]
fn what_the_cpu_will_compute_is_told_before() {
    let folder = plugins();
    let explain = |more: &[&str]| {
        let arguments = ["devices", "explain", "--model", "models/deepseek_v3_fp8", "--device", "sim:mlu370"];
        with(qwen(), &folder, &[&arguments[..], more].concat())
    };
    let answer = json(&mut explain(&["--json"]));
    assert_eq!((&answer["device"], &answer["fallback"]), (&"sim:mlu370:0".into(), &"cpu:0".into()));
    let delegated = answer["computed_by_fallback"].as_array().unwrap();
    let gemm = delegated.iter().find(|line| line["op"] == "gemm").unwrap();
    let reason = gemm["reason"].as_str().unwrap();
    assert!(reason.contains("the chip has no f8_e4m3"), "{gemm}");
    let decisions = answer["decisions"].as_array().unwrap();
    for decision in decisions {
        let on_fallback = decision["on_fallback"] == true;
        assert_eq!(on_fallback, decision["refused"].is_string(), "{decision}");
        assert_eq!(decision["library"] == "qwen-cpu", on_fallback, "{decision}");
    }
    assert!(decisions.iter().any(|decision| decision["on_fallback"] == true));
    let crossings: Vec<u64> =
        answer["steps"].as_array().unwrap().iter().map(|step| step["crossings"].as_u64().unwrap()).collect();
    assert!(crossings.len() == 2 && crossings[0] > 0, "{answer}");
    assert!(answer["refused"].is_null(), "{answer}");
    // The run.
    let arguments = ["generate", "--model", "models/deepseek_v3_fp8", "--prompt", "a", "--max-tokens", "1", "--device"];
    let told = transcript(&mut with(qwen(), &folder, &[&arguments[..], &["sim:mlu370"]].concat()));
    let copies = crossings.iter().max().unwrap();
    assert!(told.contains(reason) && told.contains(&format!("each step copies {copies} values")), "{copies}: {told}");
    // The text has every decision of the JSON.
    let text = stdout(&mut explain(&[]));
    let lines = text.lines().filter(|line| line.starts_with("  ") && line.contains(" x  ")).count();
    assert_eq!(lines, decisions.len(), "{text}");
    let delegated_lines = text.lines().filter(|line| line.contains(", on cpu:0")).count();
    assert_eq!(delegated_lines, decisions.iter().filter(|decision| decision["on_fallback"] == true).count(), "{text}");
    assert!(text.contains(reason) && text.contains(&format!(", {} copies between devices", crossings[0])), "{text}");
    // What would be refused is told, and no error.
    let answer = json(&mut explain(&["--max-crossings", "1", "--json"]));
    assert!(answer["refused"].as_str().unwrap().contains("raise --max-crossings"), "{answer}");
    let text = stdout(&mut explain(&["--max-crossings", "1"]));
    assert!(text.contains("would not be loaded: ") && text.contains("raise --max-crossings"), "{text}");
}

#[test]
fn faults_are_told() {
    let folder = plugins();
    for (fault, part) in [
        ("lost=20", "the simulated device is lost"),
        ("hang=20,watchdog_ms=200", "did not end in 200 ms"),
        ("oom=3", "allocation 3 finds no memory"),
        ("memory=65536", "but 64.0 KiB is available"),
        ("magic=1", "found \"magic\""),
    ] {
        let mut command = with(qwen(), &folder, &[&GENERATE[..], &["sim:mlu370"]].concat());
        let told = transcript(command.env("QWEN_SIM", fault));
        assert!(told.starts_with("exit 1\n") && told.contains(part), "{fault}: {told}");
    }
}

#[test]
fn two_devices_are_compared_end_to_end_and_op_by_op() {
    let folder = plugins();
    let compare = |a: &str, b: &str| {
        let arguments = ["compare", "--model", "gguf/llama-q4_k.gguf", "--a", a, "--b", b, "--per-op", "--json"];
        json(&mut with(qwen_eval(), &folder, &[&arguments[..], &["--tokens", "1,2,3,4,5,6,7,8,9,10"]].concat()))
    };
    let found = compare("cpu", "sim:dcu-z100");
    assert_eq!(found["tokens"], 10);
    assert!(found["kl_mean"].as_f64().unwrap() <= 0.002, "{found}");
    let greedy = &found["greedy"];
    assert!(greedy["equal"] == true || greedy["divergence"]["explained"] == true, "{greedy}");
    assert_eq!(found["b"]["device"], "sim:dcu-z100:0");
    let ops = found["ops"].as_array().unwrap();
    assert!(ops.len() > 10, "{}", ops.len());
    for op in ops {
        assert!(op["nmse"].as_f64().unwrap() < 1e-6, "{op}");
        assert!(op["kernel"].as_str().unwrap().starts_with("dcu-z100/"), "{op}");
    }
    // A device that computes nothing is as wrong as can be. Later ops are judged by their own inputs, which are zeros here.
    let found = compare("cpu", "null");
    assert!(found["kl_mean"].as_f64().unwrap() > 0.01, "{found}");
    let embed = found["ops"].as_array().unwrap().iter().find(|op| op["op"] == "embed").unwrap();
    assert!(embed["nmse"].as_f64().unwrap() > 0.5, "{embed}");
    let told = transcript(&mut with(qwen_eval(), &folder, &["compare", "--a", "cpu", "--b", "x.safetensors"]));
    assert!(told.contains("expected two files or two devices"), "{told}");
}

#[test]
fn simulated_chips_conform() {
    let folder = plugins();
    for chip in ["ascend910b", "mlu370", "dcu-z100", "bi-v100"] {
        let mut command = with(hal_check(), &folder, &["--device", &format!("sim:{chip}"), "--json"]);
        let report: Value = serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
        let failed: Vec<&Value> =
            report["cases"].as_array().unwrap().iter().filter(|case| case["outcome"] == "failed").collect();
        assert!(failed.is_empty(), "{chip}: {failed:?}");
        assert_eq!(report["summary"]["level_reached"], 3, "{chip}");
        // Command lists and collectives are there, not only refused.
        let passed = |part: &str| {
            let cases = report["cases"].as_array().unwrap().iter();
            cases.filter(|case| case["outcome"] == "passed" && case["name"].as_str().unwrap().starts_with(part)).count()
        };
        assert!(passed("3/cmdlist/") == 13 && passed("3/collectives/") == 39, "{chip}: {report}");
    }
}

#[test]
fn a_bench_runs_on_a_plugin() {
    let folder = plugins();
    let arguments = ["throughput", "--model", "models/qwen2", "-p", "8", "-n", "4", "-r", "1", "--no-limits", "--json"];
    let found = json(&mut with(qwen_bench(), &folder, &[&arguments[..], &["--device", "sim:gcu-s60"]].concat()));
    assert!(found["device"].as_str().unwrap().ends_with("(simulated)"), "{found}");
    assert!(found["tensor_parallel_size"].is_null(), "{found}");
}

#[test]
fn a_bench_of_a_group_says_so_and_knows_no_limits_of_it() {
    let folder = plugins();
    let group = ["--device", "sim:ascend910b:0,1", "--tensor-parallel-size", "2"];
    let arguments = ["throughput", "--model", "models/qwen2", "-p", "8", "-n", "4", "-r", "1", "--json"];
    let found = json(&mut with(qwen_bench(), &folder, &[&arguments[..], &group].concat()));
    assert!(found["device"].as_str().unwrap().starts_with("2 x "), "{found}");
    assert_eq!(found["tensor_parallel_size"], 2);
    assert!(found["pipeline_parallel_size"].is_null(), "{found}");
    let found = json(&mut with(qwen_bench(), &folder, &[&arguments[..], &STAGES].concat()));
    assert_eq!((&found["pipeline_parallel_size"], found["tensor_parallel_size"].is_null()), (&2.into(), true));
    let arguments = ["generate", "--model", "models/qwen2", "--prompt", "a", "--max-tokens", "1", "--json"];
    let found = json(&mut with(qwen(), &folder, &[&arguments[..], &STAGES].concat()));
    assert_eq!(found["devices"], serde_json::json!(["sim:ascend910b3:0", "sim:ascend910b3:1"]));
    assert!(found["limits"].is_null() && found["prefill"]["share_of_limit"].is_null(), "{found}");
}
