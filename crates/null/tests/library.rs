//! The plugin as it is shipped: a shared object and its manifest file in a folder.
#![cfg(target_os = "linux")]

use std::path::Path;
use std::sync::Arc;

use qwen_hal::loader::{Loader, Source};
use qwen_hal::{Host, SerialPool};

#[test]
fn the_library_is_found_and_loaded() {
    // Cargo puts the library of a test beside the test.
    let program = std::env::current_exe().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libhal_null.so");
    std::fs::copy(program.with_file_name("libhal_null.so"), &library).unwrap();
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("libhal_null.toml");
    std::fs::copy(manifest, library.with_extension("toml")).unwrap();
    let loader = Loader::new().usual(Some(folder.path().as_os_str()), None);
    let candidates = loader.candidates();
    let candidate = candidates.iter().find(|candidate| candidate.name() == "null").unwrap();
    assert_eq!(candidate.source, Source::Environment);
    let plugin = loader.load(candidate, &Host::new(Arc::new(SerialPool))).unwrap();
    assert_eq!(plugin.open(0, &[]).unwrap().info().name, "Null (computes nothing)");
}
