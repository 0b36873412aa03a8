//! Dependencies between the project's own crates point one way, as ARCHITECTURE.md draws them.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

/// Each crate and the own crates that it may depend on, lowest first: an entry names only crates above it.
const ALLOWED: &[(&str, &[&str])] = &[
    ("qwen-hal-abi", &[]),
    ("qwen-formats", &[]),
    ("qwen-chips", &["qwen-hal-abi"]),
    ("qwen-hal", &["qwen-hal-abi"]),
    ("qwen-hal-plugin", &["qwen-hal-abi"]),
    ("qwen-dispatch", &["qwen-hal", "qwen-chips"]),
    ("qwen-hal-check", &["qwen-hal", "qwen-formats"]),
    ("qwen-ir", &["qwen-formats"]),
    ("qwen-models", &["qwen-formats", "qwen-ir"]),
    ("qwen-cpu", &["qwen-hal-abi", "qwen-hal-plugin", "qwen-formats"]),
    ("qwen-runtime", &["qwen-hal", "qwen-ir", "qwen-formats"]),
    ("qwen-engine", &["qwen-runtime", "qwen-models", "qwen-formats", "qwen-hal", "qwen-ir"]),
    ("qwen-bench", &["qwen-engine", "qwen-runtime", "qwen-ir"]),
    ("qwen-server", &["qwen-engine", "qwen-models"]),
    ("qwen-null", &["qwen-hal-abi", "qwen-hal-plugin"]),
    ("qwen-opencl", &["qwen-hal-abi", "qwen-hal-plugin"]),
    ("qwen-sim", &["qwen-hal-abi", "qwen-hal-plugin", "qwen-chips", "qwen-formats", "qwen-cpu"]),
    (
        "qwen-cli",
        &[
            "qwen-bench",
            "qwen-engine",
            "qwen-models",
            "qwen-formats",
            "qwen-hal",
            "qwen-hal-check",
            "qwen-cpu",
            "qwen-chips",
            "qwen-dispatch",
            "qwen-server",
        ],
    ),
    ("qwen-fuzz", &["qwen-formats", "qwen-ir", "qwen-models", "qwen-chips", "qwen-engine"]),
];

/// Crates that may contain `unsafe`: kernels, foreign functions, memory.
const UNSAFE: &[&str] = &[
    "qwen-hal-abi",
    "qwen-hal",
    "qwen-hal-plugin",
    "qwen-hal-check",
    "qwen-cpu",
    "qwen-null",
    "qwen-opencl",
    "qwen-sim",
    "qwen-formats",
];

/// The workspace as cargo sees it: manifest path and own normal and build dependencies of every member.
fn workspace() -> BTreeMap<String, (String, Vec<String>)> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let output = std::process::Command::new(env!("CARGO"))
        .args(["metadata", "--offline", "--no-deps", "--format-version", "1", "--manifest-path"])
        .arg(manifest)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let packages = metadata["packages"].as_array().unwrap();
    packages
        .iter()
        .map(|package| {
            let own = package["dependencies"]
                .as_array()
                .unwrap()
                .iter()
                .filter(|dependency| dependency["kind"] != "dev" && text(&dependency["name"]).starts_with("qwen-"));
            let own = own.map(|dependency| text(&dependency["name"])).collect();
            (text(&package["name"]), (text(&package["manifest_path"]), own))
        })
        .collect()
}

#[test]
fn dependencies_point_one_way() {
    let workspace = workspace();
    let allowed: BTreeMap<&str, &[&str]> = ALLOWED.iter().copied().collect();
    for (name, (_, dependencies)) in &workspace {
        let Some(allowed) = allowed.get(name.as_str()) else {
            panic!("{name} has no place in the picture: add it to ARCHITECTURE.md and to this table");
        };
        for dependency in dependencies {
            assert!(
                allowed.contains(&dependency.as_str()),
                "{name} must not depend on {dependency}; it may depend on {allowed:?}. Move what it needs down, or \
                 change ARCHITECTURE.md and this table with the reason."
            );
        }
    }
    assert_eq!(workspace.len(), ALLOWED.len(), "a crate of the table is gone: remove it here and in ARCHITECTURE.md");
}

/// The table itself has no way back: what it is checked against is one direction.
#[test]
fn the_table_is_ordered() {
    for (position, (name, dependencies)) in ALLOWED.iter().enumerate() {
        for dependency in *dependencies {
            let lower = ALLOWED[..position].iter().any(|(lower, _)| lower == dependency);
            assert!(lower, "{name} -> {dependency} points up");
        }
    }
}

/// Other crates forbid `unsafe` in their first lines of code.
#[test]
fn only_low_crates_are_unsafe() {
    for (name, (manifest, _)) in workspace() {
        if UNSAFE.contains(&name.as_str()) {
            continue;
        }
        let root = Path::new(&manifest).with_file_name("src").join("lib.rs");
        let source = std::fs::read_to_string(&root).unwrap();
        assert!(source.contains("#![forbid(unsafe_code)]"), "{} lacks #![forbid(unsafe_code)]", root.display());
    }
}

/// Files longer than this hide their point; those that need it say why in their first comment.
#[test]
fn files_are_short() {
    const LIMIT: usize = 800;
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let source = std::fs::read_to_string(&path).unwrap();
                let lines = source.lines().count();
                let reason =
                    source.lines().take_while(|line| line.starts_with("//!")).any(|line| line.contains("long because"));
                assert!(
                    lines <= LIMIT || reason,
                    "{} has {lines} lines; at most {LIMIT}, or \"long because\" in its opening comment",
                    path.display()
                );
            }
        }
    }
}

/// What is decided by chip is an entry of its sheet: outside the crate of sheets no code names one.
#[test]
fn no_code_knows_a_chip_by_name() {
    // Kinds of devices rather than chips.
    const KINDS: [&str; 3] = ["cpu", "opencl", "cuda"];
    let names: Vec<String> = qwen_chips::Chip::all()
        .iter()
        .flat_map(|chip| std::iter::once(&chip.name).chain(&chip.aliases).chain([&chip.plugin]))
        .filter(|name| !KINDS.contains(&name.as_str()))
        .map(|name| format!("\"{name}\""))
        .collect();
    assert!(names.len() > 20, "{names:?}");
    for (krate, (manifest, _)) in workspace() {
        if krate == "qwen-chips" {
            continue;
        }
        let mut folders = vec![Path::new(&manifest).with_file_name("src")];
        while let Some(folder) = folders.pop() {
            for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let source = std::fs::read_to_string(&path).unwrap();
                    // Tests may ask for a chip.
                    let code = source.split("#[cfg(test)]").next().unwrap_or_default();
                    let found = names.iter().find(|name| code.contains(name.as_str()));
                    let is_test = path.file_name().is_some_and(|name| name == "tests.rs");
                    assert!(found.is_none() || is_test, "{} names a chip: {found:?}", path.display());
                }
            }
        }
    }
}
