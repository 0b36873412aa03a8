//! Shared objects as plugins: the C example, and the same with one misbehaviour each. Whatever a library does, the host gets a
//! sentence and lives.
#![cfg(unix)]
#![expect(clippy::unwrap_used, clippy::exit, reason = "helpers are part of tests")]

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use qwen_hal::loader::{LoadError, Loader, Prober, Source, run_probe, wait_for_child};
use qwen_hal::{Host, Plugin, SerialPool};

const CHILD: &str = "QHAL_LOADER_TEST_CHILD";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// A folder of this test program, emptied by nobody: names differ by test.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("loader").join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// Compiles a plugin of C: 0 is the example as it is, other numbers are those of `hostile.c`.
fn compile(hostile: u32, library: &Path) {
    let source = if hostile == 0 { "examples/c-plugin/plugin.c" } else { "crates/hal/tests/plugins/hostile.c" };
    let output = Command::new("cc")
        .args(["-std=gnu99", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"])
        .arg(format!("-DHOSTILE={hostile}"))
        .arg("-I")
        .arg(root().join("include"))
        .arg("-I")
        .arg(root().join("examples/c-plugin"))
        .arg(root().join(source))
        .arg("-o")
        .arg(library)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The child of a self test: this program again.
#[test]
fn probe_child() {
    if std::env::var_os(CHILD).is_some() {
        let path = std::env::args_os().next_back().unwrap();
        std::process::exit(i32::from(!run_probe(Path::new(&path))));
    }
}

fn prober() -> Prober {
    let mut prober = Prober::new(std::env::current_exe().unwrap(), &["--exact", "probe_child", "--nocapture"]);
    prober.environment.push((CHILD.into(), "1".into()));
    prober
}

fn host() -> &'static Host {
    static HOST: OnceLock<Host> = OnceLock::new();
    HOST.get_or_init(|| Host::new(Arc::new(SerialPool)))
}

fn load_with(path: &Path, prober: Prober) -> Result<Arc<Plugin>, LoadError> {
    let loader = Loader::new().named(path).with_prober(prober);
    let candidates = loader.candidates();
    assert_eq!(candidates.len(), 1, "{candidates:?}");
    loader.load(&candidates[0], host())
}

fn hostile(number: u32) -> Result<Arc<Plugin>, LoadError> {
    let library = folder(&format!("hostile{number}")).join("libhal_hostile.so");
    compile(number, &library);
    load_with(&library, prober())
}

#[test]
fn the_example_is_loaded_and_used() {
    let folder = folder("example");
    let library = folder.join("libhal_example.so");
    compile(0, &library);
    std::fs::copy(root().join("examples/c-plugin/libhal_example.toml"), folder.join("libhal_example.toml")).unwrap();
    let loader = Loader::new().usual(Some(folder.as_os_str()), None).with_prober(prober());
    let candidates = loader.candidates();
    let candidate = candidates.iter().find(|candidate| candidate.path == library).unwrap();
    assert_eq!((candidate.name(), candidate.source), ("example", Source::Environment));
    let plugin = loader.load(candidate, host()).unwrap();
    // Loading it again gives the same plugin, which is initialised once.
    assert!(Arc::ptr_eq(&plugin, &loader.load(candidate, host()).unwrap()));
    let device = plugin.open(0, &[]).unwrap();
    assert_eq!(device.info().name, "Example in host memory");
    assert!(device.health().unwrap_err().call_error().unwrap().is_unsupported());
}

#[test]
fn versions_are_what_is_needed_not_what_was_built_with() {
    assert_eq!(hostile(1).unwrap().manifest().abi, (0, 0));
    assert_eq!(hostile(2).unwrap().manifest().abi, (0, 99));
    let words = |number: u32| hostile(number).unwrap_err().to_string();
    assert!(words(3).contains("one that needs 99 or newer"), "{}", words(3));
    assert!(words(4).contains("expected ABI major 0, found 7"), "{}", words(4));
}

#[test]
fn broken_tables_are_refused_with_their_holes() {
    let words = |number: u32| hostile(number).unwrap_err().to_string();
    assert!(words(5).contains("none for buffer_free, plan_launch"), "{}", words(5));
    assert!(words(6).contains("struct_size 4"), "{}", words(6));
    assert!(words(7).contains("declines this host"), "{}", words(7));
    assert!(words(15).contains("expected the symbol qhal_plugin_manifest, found none"), "{}", words(15));
}

#[test]
fn crashes_are_reported_with_the_call() {
    let crashed = |number: u32| match hostile(number).unwrap_err() {
        LoadError::Crashed { stage, how, .. } => (stage, how),
        other => panic!("{other}"),
    };
    let (stage, how) = crashed(8);
    assert!(stage.contains("plugin_init") && how.contains("abort"), "{stage}: {how}");
    let (stage, how) = crashed(9);
    assert!(stage.contains("plugin_init") && how == "exit status 0", "{stage}: {how}");
    let (stage, how) = crashed(12);
    assert!(stage.contains("device_caps") && how.contains("segmentation fault"), "{stage}: {how}");
    let (stage, how) = crashed(16);
    assert!(stage == "dlopen" && how.contains("abort"), "{stage}: {how}");
}

/// The call never returns, so whatever comes back is by the limit. How far a child gets in a given time is the machine's affair: the
/// limit grows until it has come to that call.
#[test]
fn a_hang_ends_at_the_limit_and_names_the_call() {
    let library = folder("hang").join("libhal_hang.so");
    compile(11, &library);
    let growing = std::iter::successors(Some(Duration::from_millis(250)), |limit| Some(*limit * 4));
    let mut stages = Vec::new();
    for limit in std::iter::once(Duration::ZERO).chain(growing.take(6)) {
        match load_with(&library, Prober { limit, ..prober() }).unwrap_err() {
            LoadError::Hung { stage, limit: told, .. } if told == limit => stages.push(stage),
            other => panic!("{other}"),
        }
        if stages.last().is_some_and(|stage| stage.contains("device_open")) {
            return;
        }
    }
    panic!("the call was never reached: {stages:?}");
}

#[test]
fn a_child_at_its_limit_is_killed_and_reaped() {
    // It reads from a pipe that nobody writes to or closes.
    let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    assert!(wait_for_child(&mut child, Duration::ZERO).is_none());
    let status = child.try_wait().unwrap().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
}

#[test]
fn orderly_failures_keep_the_plugins_words() {
    let error = hostile(10).unwrap_err().to_string();
    assert!(error.contains("expected version 5, found 4; update it"), "{error}");
    let error = hostile(13).unwrap_err().to_string();
    assert!(error.contains("copy: expected 4096 bytes back"), "{error}");
    // Noise on standard output and a machine without the card are no faults.
    hostile(14).unwrap();
    assert_eq!(hostile(17).unwrap().device_count().unwrap(), 0);
}

#[test]
fn manifests_and_libraries_must_agree() {
    let library = folder("disagree").join("libhal_example.so");
    compile(0, &library);
    let with = |text: &str| {
        std::fs::write(library.with_extension("toml"), text).unwrap();
        load_with(&library, prober()).unwrap_err().to_string()
    };
    let words = with("name = \"other\"\nabi = \"0.1\"\nmin_host_minor = 1");
    assert!(words.contains("name is example, its manifest file says other"), "{words}");
    let words = with("name = \"example\"\nversion = \"9.9.9\"\nabi = \"0.1\"\nmin_host_minor = 1");
    assert!(words.contains("version is 0.1.0"), "{words}");
    let words = with("name = 1");
    assert!(words.contains("libhal_example.toml"), "{words}");
    // Refused by its file alone: the library, which would crash, is not opened.
    let library = folder("unopened").join("libhal_crash.so");
    compile(16, &library);
    std::fs::write(library.with_extension("toml"), "name = \"crash\"\nabi = \"3.0\"\nmin_host_minor = 0").unwrap();
    let loader = Loader::new().named(&library);
    assert!(matches!(loader.load(&loader.candidates()[0], host()), Err(LoadError::Hal(_))));
}

#[test]
fn places_have_an_order_and_the_current_directory_is_none() {
    let (first, second) = (folder("first"), folder("second"));
    for folder in [&first, &second] {
        for name in ["libhal_twin.so", "libother.so", "libhal_notes.txt", "libhal_a.so"] {
            std::fs::write(folder.join(name), "not a library").unwrap();
        }
    }
    let manifest = |score: u32| format!("name = \"twin\"\nabi = \"0.1\"\nmin_host_minor = 0\nscore = {score}");
    std::fs::write(second.join("libhal_twin.toml"), manifest(5)).unwrap();
    let variable: OsString = std::env::join_paths([&first, &second]).unwrap();
    let candidates = Loader::new().usual(Some(&variable), None).candidates();
    let of = |path: PathBuf| candidates.iter().find(|candidate| candidate.path == path).unwrap();
    // One with a higher score wins, of equals the earlier one.
    assert!(
        matches!(&of(first.join("libhal_twin.so")).refused, Some(LoadError::Shadowed { by, .. }) if by.starts_with(&second))
    );
    assert!(of(second.join("libhal_twin.so")).refused.is_none());
    assert!(of(first.join("libhal_a.so")).refused.is_none());
    assert!(of(second.join("libhal_a.so")).refused.is_some());
    assert_eq!(candidates.iter().filter(|candidate| candidate.path.starts_with(&first)).count(), 2);
    let loader = Loader::new().usual(Some(&variable), None);
    let words = loader.load(of(first.join("libhal_a.so")), host()).unwrap_err().to_string();
    assert!(words.contains("dynamic linker refuses it"), "{words}");

    let relative = Loader::new().usual(Some(OsStr::new("plugins::.")), None).candidates();
    let refused = relative.iter().filter(|c| matches!(c.refused, Some(LoadError::Relative { .. }))).count();
    assert_eq!((relative.len(), refused), (2, 2), "{relative:?}");
    let absent = Loader::new().named("/nowhere/at/all").candidates();
    assert!(matches!(absent[0].refused, Some(LoadError::Missing { .. })));
    // Beside the program: ../lib/qwen/plugins from its folder.
    let prefix = folder("prefix");
    std::fs::create_dir_all(prefix.join("bin")).unwrap();
    std::fs::create_dir_all(prefix.join("lib/qwen/plugins")).unwrap();
    std::fs::write(prefix.join("lib/qwen/plugins/libhal_b.so"), "").unwrap();
    let beside = Loader::new().usual(None, Some(&prefix.join("bin/qwen"))).candidates();
    assert!(beside.iter().any(|candidate| candidate.name() == "b" && candidate.source == Source::Program));
}
