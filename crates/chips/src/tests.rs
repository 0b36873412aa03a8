//! Every built-in sheet, the schema, and what sheets from outside may not do.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::*;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../chips")
}

/// (file stem, text) of every sheet of the repository.
fn sheets() -> Vec<(String, String)> {
    let entries = std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path());
    let paths = entries.filter(|path| path.extension().is_some_and(|extension| extension == "toml"));
    let read = |path: PathBuf| {
        (path.file_stem().unwrap().to_str().unwrap().to_owned(), std::fs::read_to_string(path).unwrap())
    };
    paths.map(read).collect()
}

#[test]
fn every_file_is_a_built_in_sheet_of_its_name() {
    for (stem, text) in sheets() {
        parse(&stem, &text).unwrap();
        assert_eq!(Chip::by_name(&stem).map(|chip| chip.name.as_str()), Some(stem.as_str()));
    }
    assert_eq!(Chip::all().len(), sheets().len());
    Catalogue::built_in().unwrap();
}

#[test]
fn the_schema_is_the_one_of_the_types_and_holds_for_every_sheet() {
    let schema = serde_json::to_value(schemars::schema_for!(Chip)).unwrap();
    let path = folder().join("schema.json");
    let text = format!("{}\n", serde_json::to_string_pretty(&schema).unwrap());
    if std::env::var_os("QWEN_WRITE_SCHEMA").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    // As values: the order of keys depends on what else is built.
    let stored: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert!(
        stored == schema,
        "chips/schema.json is old: QWEN_WRITE_SCHEMA=1 cargo test -p qwen-chips, and look at the diff"
    );
    let validator = jsonschema::validator_for(&stored).unwrap();
    let as_json = |text: &str| serde_json::to_value(toml::from_str::<toml::Table>(text).unwrap()).unwrap();
    for (stem, text) in sheets() {
        let errors: Vec<String> = validator.iter_errors(&as_json(&text)).map(|error| error.to_string()).collect();
        assert!(errors.is_empty(), "{stem}: {errors:?}");
    }
    assert!(!validator.is_valid(&as_json("name = \"x\"")));
    let (_, mut text) = sheets().swap_remove(0);
    text.insert_str(0, "colour = \"red\"\n");
    assert!(!validator.is_valid(&as_json(&text)));
}

#[test]
fn what_runs_elsewhere_is_untested() {
    for chip in Chip::all() {
        assert_eq!(chip.status == Status::Measured, chip.kind == Kind::Cpu, "{}", chip.name);
    }
    assert_eq!(Status::Untested.label(), "UNTESTED");
}

#[test]
fn the_seven_vendors_are_there_with_their_strengths() {
    let strengths = |plugin: &str| -> BTreeSet<&str> {
        let own = Chip::all().iter().filter(|chip| chip.plugin == plugin);
        let tilings = own.flat_map(|chip| &chip.dispatch.tilings);
        tilings.filter(|tiling| tiling.strength.is_some()).map(|tiling| tiling.op.as_str()).collect()
    };
    for (plugin, op) in [
        ("ascend", "gemm"),
        ("mlu", "attention"),
        ("dcu", "attention"),
        ("biren", "attention"),
        ("iluvatar", "norm"),
        ("musa", "embed"),
        ("enflame", "kv_append"),
    ] {
        assert!(strengths(plugin).contains(op), "{plugin} lacks its entry for {op}");
    }
}

#[test]
fn names_and_devices_are_recognised() {
    let catalogue = Catalogue::built_in().unwrap();
    assert_eq!(catalogue.get("ascend910b").unwrap().name, "ascend910b3");
    let of = |plugin, text| catalogue.recognise(plugin, &[text]).map(|chip| chip.name.as_str());
    assert_eq!(of("ascend", "Ascend910B4-1"), Some("ascend910b4"));
    assert_eq!(of("dcu", "gfx928:sramecc+:xnack-"), Some("dcu-k100-ai"));
    assert_eq!(of("cpu", "Some processor"), Some("cpu"));
    assert_eq!(of("elsewhere", "Ascend910B4"), None);
    assert_eq!(catalogue.get("b100").unwrap_err().to_string().split(';').next(), Some("no chip is called \"b100\""));
}

#[test]
fn dispatch_takes_the_first_entry_that_holds() {
    let dispatch = &Chip::by_name("ascend910b3").unwrap().dispatch;
    let family = |bandwidth| dispatch.family(bandwidth).map(|family| family.name.as_str());
    assert_eq!(family(2.1e12), Some("high_bw_kernel"));
    assert_eq!(family(2.0e12), Some("high_bw_kernel"));
    assert_eq!(family(1.0e12), Some("balanced_kernel"));
    assert_eq!(family(0.99e12), Some("low_latency_kernel"));
    let attention = |length| {
        let value = |variable| (variable == Variable::SeqLen).then_some(length);
        dispatch.tiling("attention", None, value).map(|tiling| tiling.name.as_str())
    };
    assert_eq!(attention(65536), Some("block_sparse_v2"));
    assert_eq!(attention(32768), Some("cube_128x128"));
    assert_eq!(dispatch.tiling("norm", None, |_| None), None);
}

/// A small sheet, with one line replaced or added.
fn sheet(line: &str) -> String {
    format!(
        "format = 1\nname = \"test\"\ntitle = \"Test\"\nvendor = \"any\"\nkind = \"npu\"\nstatus = \"untested\"\n\
         plugin = \"test\"\n{line}\n[sources]\ndoc = {{ title = \"document\", trust = \"data_sheet\" }}\n"
    )
}

#[test]
fn a_small_sheet_is_enough() {
    let chip = parse("x", &sheet("")).unwrap();
    assert_eq!(chip.allocator_kind(), (AllocatorKind::BestFit, false));
    assert_eq!(chip.bandwidth(), None);
    let chip = parse("x", &sheet("memory.bandwidth = { value = 1e12, source = \"doc\" }")).unwrap();
    assert_eq!(chip.bandwidth(), Some(1e12));
    assert_eq!(chip.trust(chip.memory.bandwidth.as_ref().unwrap()), Trust::DataSheet);
}

#[test]
fn hostile_sheets_get_one_clear_sentence() {
    let deep = format!("aliases = {}{}", "[".repeat(3000), "]".repeat(3000));
    let long = format!("matches = [\"{}\"]", "x".repeat(1001));
    for (line, expected) in [
        ("memory.bandwidth = { value = nan, source = \"doc\" }", "memory.bandwidth.value: expected a number"),
        ("memory.bandwidth = { value = inf, source = \"doc\" }", "memory.bandwidth.value: expected a number"),
        ("memory.capacity = { value = -1, source = \"doc\" }", "memory.capacity.value: expected a number"),
        ("memory.capacity = { value = 1e30, source = \"doc\" }", "memory.capacity.value: expected a number"),
        ("memory.capacity = { value = 0, source = \"doc\" }", "leave out what is not known"),
        ("memory.capacity = { value = 1, source = \"rumour\" }", "\"rumour\" is no entry of sources"),
        ("memory.capacity = 5", "line 8: invalid type"),
        ("memory.speed = 5", "line 8: unknown field `speed`"),
        ("name = \"twice\"", "line 8: duplicate key"),
        ("title = 3", "line 8: duplicate key"),
        ("aliases = [\"With Space\"]", "name: expected up to 64 lower-case letters"),
        ("matches = [\"a\"]", "at least 3 characters"),
        ("preferences.environment = { \"A\\nB\" = \"\" }", "printable bytes"),
        ("matches = [\"abc\\u001b[31m\"]", "printable text"),
        (long.as_str(), "printable text"),
        (deep.as_str(), "recursion depth"),
        ("alignment.required = { value = 48, source = \"doc\" }", "powers of two"),
        ("allocator.kind = \"buddy\"", "kind and kind_source together"),
        ("compute.tiles = [{ dtype = \"f16\", shape = [0, 16, 16], source = \"doc\" }]", "sides of 1 to 65536"),
        ("compute.dtypes.f12 = { can = [] }", "unknown variant `f12`"),
        ("dispatch.tilings = [{ op = \"gem\", name = \"x\" }]", "\"gem\" is no op"),
        ("dispatch.tilings = [{ op = \"gemm\", name = \"x\", family = \"y\" }]", "no entry of dispatch.families"),
        ("dispatch.tilings = [{ op = \"gemm\", name = \"x\", when = { tokens = { min = 2, max = 1 } } }]", "no value"),
        ("dispatch.families = [{ name = \"x\", min_bandwidth = 2.0, below_bandwidth = 1.0 }]", "no bandwidth"),
        ("simulation.compute_efficiency = 1.5", "a share above 0 and up to 1"),
        ("simulation.granularity = 3", "power of two"),
        ("= =", "line 8"),
    ] {
        let error = parse("x.toml", &sheet(line)).unwrap_err().to_string();
        assert!(error.starts_with("x.toml: ") && error.contains(expected), "{line}\n{error}");
        assert!(!error.contains('\n'), "{error}");
    }
    let error = parse("x.toml", &sheet("").replace("format = 1", "format = 2")).unwrap_err().to_string();
    assert!(error.contains("expected 1, found 2"), "{error}");
    let error = parse("x.toml", &sheet(&format!("{} = 1", "k".repeat(5000)))).unwrap_err().to_string();
    assert!(error.len() < 400, "{error}");
    let error = parse("x.toml", &" ".repeat(300 << 10)).unwrap_err().to_string();
    assert!(error.contains("at most 262144 bytes, found 307200"), "{error}");
}

#[test]
fn a_folder_replaces_and_adds() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("own.toml", &sheet(""));
    write("ascend.toml", &sheet("").replace("\"test\"", "\"ascend910b3\""));
    write("notes.txt", "not a sheet");
    let catalogue = Catalogue::with_folder(folder.path()).unwrap();
    assert_eq!(catalogue.all().len(), Chip::all().len() + 1);
    assert_eq!(catalogue.get("ascend910b3").unwrap().title, "Test");
    write("twice.toml", &sheet(""));
    let error = Catalogue::with_folder(folder.path()).unwrap_err().to_string();
    assert!(error.contains("\"test\" is already a name of test"), "{error}");
    write("twice.toml", &sheet("aliases = [\"mlu370\"]").replace("\"test\"", "\"other\""));
    let error = Catalogue::with_folder(folder.path()).unwrap_err().to_string();
    assert!(error.contains("\"mlu370\" is already a name of mlu370"), "{error}");
    let missing = Catalogue::with_folder(&folder.path().join("missing")).unwrap_err().to_string();
    assert!(missing.contains("missing: "), "{missing}");
}
