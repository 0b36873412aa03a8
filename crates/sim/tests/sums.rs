//! A chip whose matrix unit sums in half precision: what the compiler makes of it.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::path::Path;

use common::{cpu, open, plugin};
use qwen_engine::{Engine, LoadOptions, LoadedModel, PassName, Placement, Policy};
use qwen_hal::Device;

const SHEET: &str = r#"
format = 1
name = "NAME"
title = "Half sums"
vendor = "nobody"
kind = "npu"
status = "untested"
plugin = "nothing"
[compute]
tiles = [{ dtype = "f16", shape = [16, 16, 1], source = "test" }]
[sources]
test = { title = "made for a test", trust = "estimate" }
[compute.dtypes]
f16 = { can = ["store", "convert", "compute", "matrix", "accumulate"], accumulate = "f16" }
f32 = { can = ["store", "convert", "compute"F32] }
"#;

fn load(device: Device) -> Engine {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/llama");
    let options =
        LoadOptions { policy: Policy::Exact, dump_after: Some(PassName::Precision), ..LoadOptions::default() };
    let placement = Placement::from(device).with_fallback(cpu(2));
    Engine::new(LoadedModel::load(&path, placement, &options, &mut |_| {}).unwrap())
}

fn logits(engine: &mut Engine) -> Vec<f32> {
    let mut all = Vec::new();
    engine.logits(&(1..20).collect::<Vec<_>>(), false, &mut |row| all.extend_from_slice(row)).unwrap();
    all
}

#[test]
fn sums_are_widened_where_the_chip_can_and_compensated_where_it_cannot() {
    let folder = tempfile::tempdir().unwrap();
    for (name, f32_sums) in [("halfsums", ""), ("widesums", r#", "accumulate""#)] {
        let sheet = SHEET.replace("NAME", name).replace("F32", f32_sums);
        std::fs::write(folder.path().join(format!("{name}.toml")), sheet).unwrap();
    }
    // SAFETY: the only test of this program, before its first other thread.
    unsafe { std::env::set_var("QWEN_CHIPS", folder.path()) };
    let plugin = plugin();
    let mut exact = load(cpu(2));
    let expected = logits(&mut exact);
    let difference = |found: &[f32]| found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let notes = |engine: &Engine| {
        engine.loaded().model.reports().iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    };

    let mut wide = load(open(&plugin, "widesums", 0, &[]));
    assert!(notes(&wide).contains("sums in f32, the device's own f16 would break its error class"), "{}", notes(&wide));
    assert!(!wide.loaded().model.dump().unwrap().contains("sums="));
    assert!(difference(&logits(&mut wide)) < 1e-4);

    let mut half = load(open(&plugin, "halfsums", 0, &[]));
    let dump = half.loaded().model.dump().unwrap();
    assert!(dump.contains("sums=\"f16/"), "{dump}");
    assert!(notes(&half).contains("sums in f16/"), "{}", notes(&half));
    assert!(half.loaded().model.fallbacks().is_empty(), "{:?}", half.loaded().model.fallbacks());
    let (plain, found) = (difference(&expected), difference(&logits(&mut half)));
    // Rounded, so not the same; compensated, so close.
    assert!(plain < found && found < 0.05, "{found}");
}
