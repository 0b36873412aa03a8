//! Every file that fuzzing has kept, fed to its target: inputs that once found new paths, and those that once failed.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

static PANICS: AtomicUsize = AtomicUsize::new(0);

/// Panics count wherever they happen: parsers that contain them on a thread of their own must not have any either.
#[test]
fn kept_inputs_do_not_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        report(panic);
    }));
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (name, target) in qwen_fuzz::TARGETS {
        let kept = replay(&root.join("corpus").join(name), *target);
        assert!(kept > 0, "no corpus for {name}: see fuzz/README.md");
        let failed_once = replay(&root.join("artifacts").join(name), *target);
        println!("{name}: {kept} kept inputs, {failed_once} that failed once");
    }
}

/// Every target has its program, every program its target.
#[test]
fn targets_are_complete() {
    let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz_targets");
    let mut programs: Vec<String> = std::fs::read_dir(programs)
        .unwrap()
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    programs.sort();
    let mut targets: Vec<&str> = qwen_fuzz::TARGETS.iter().map(|(name, _)| *name).collect();
    targets.sort_unstable();
    assert_eq!(programs, targets);
}

fn replay(folder: &Path, target: fn(&[u8])) -> usize {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_file()).collect();
    paths.sort();
    for path in &paths {
        let panics = PANICS.load(Ordering::Relaxed);
        target(&std::fs::read(path).unwrap());
        assert_eq!(PANICS.load(Ordering::Relaxed), panics, "{} made a thread panic", path.display());
    }
    paths.len()
}
