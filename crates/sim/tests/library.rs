//! The plugin as it is shipped: a shared object and its manifest file in a folder.
#![cfg(target_os = "linux")]

use std::path::Path;
use std::sync::Arc;

use qwen_hal::abi::{QHAL_FEATURE_UNIFIED, QHAL_KIND_SIMULATED};
use qwen_hal::loader::Loader;
use qwen_hal::{Host, SerialPool};

#[test]
fn the_library_is_found_and_everything_in_it_is_called_simulated() {
    // Cargo puts the library of a test beside the test.
    let program = std::env::current_exe().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libhal_sim.so");
    std::fs::copy(program.with_file_name("libhal_sim.so"), &library).unwrap();
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("libhal_sim.toml");
    std::fs::copy(manifest, library.with_extension("toml")).unwrap();
    let loader = Loader::new().usual(Some(folder.path().as_os_str()), None);
    let candidates = loader.candidates();
    let candidate = candidates.iter().find(|candidate| candidate.name() == "sim").unwrap();
    let plugin = loader.load(candidate, &Host::new(Arc::new(SerialPool))).unwrap();
    let count = plugin.device_count().unwrap();
    assert!(count >= 14, "{count}");
    for index in 0..count {
        let info = plugin.device_info(index).unwrap();
        assert!(info.name.ends_with("(simulated)") && info.driver.starts_with("simulated"), "{info:?}");
        assert_eq!(info.kind, QHAL_KIND_SIMULATED);
        assert!(info.models().count() >= 1, "{info:?}");
        let device = plugin.open(index, &[]).unwrap();
        assert!(!device.caps().has(QHAL_FEATURE_UNIFIED));
        assert!(device.caps().estimated_fields != 0 && device.caps().bandwidth_source != 2);
    }
}
