//! The CPU backend as a device like any other: profile, cache, decisions, timings.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::sync::Arc;
use std::time::Duration;

use qwen_chips::{Chip, Variable};
use qwen_dispatch::{
    Budget, Case, Chooser, OpShape, Origin, ProbeOptions, ProfileCache, cases, measure, time_variants,
};
use qwen_hal::{Device, Host, PlanOptions, Plugin, Pool};

fn device() -> Device {
    let host = Host::new(Arc::new(Pool::new(Some(2))));
    Plugin::linked(&qwen_cpu::PLUGIN, &host).unwrap().open(0, &[]).unwrap()
}

/// Small and quick: the figures are no good, but they are there.
const QUICK: ProbeOptions = ProbeOptions { each: Duration::from_millis(1), memory: 32 << 20 };

#[test]
fn a_profile_holds_what_the_device_has_and_is_measured_once() {
    let device = device();
    let folder = tempfile::tempdir().unwrap();
    let cache = ProfileCache::new(folder.path().join("profiles"));
    assert_eq!(cache.load(&device, 2), None);
    let profile = cache.load_or_measure(&device, 2, false, &QUICK).unwrap();
    assert_eq!(profile.origin, Origin::Measured);
    for figure in
        [profile.bandwidth(), profile.copy_bandwidth, profile.upload_bandwidth, profile.launch_ns, profile.barrier_ns]
    {
        assert!(figure.is_some_and(|figure| figure > 0.0), "{profile:?}");
    }
    assert_eq!(profile.rates.len(), 4, "{profile:?}");
    assert!(profile.levels.windows(2).all(|pair| pair[0].working_set < pair[1].working_set));
    // Stored, and found again; other threads are another profile.
    assert_eq!(cache.load(&device, 2).as_ref(), Some(&profile));
    assert_eq!(cache.load(&device, 1), None);
    let again = cache.load_or_measure(&device, 2, false, &QUICK).unwrap();
    assert_eq!(again, profile);
}

#[test]
fn a_profile_of_another_driver_or_a_damaged_one_is_measured_anew() {
    let device = device();
    let folder = tempfile::tempdir().unwrap();
    let cache = ProfileCache::new(folder.path());
    let mut profile = measure(&device, 2, &QUICK).unwrap();
    profile.variants.insert("0".into(), "amx".into());
    let path = cache.store(&device, &profile).unwrap();
    assert!(cache.load(&device, 2).is_some());
    for (from, to) in [
        (profile.driver.as_str(), "another"),
        ("\"format\": ", "\"format\": 1"),
        ("\"launch_ns\": ", "\"launch_ns\": -"),
        ("{", "["),
    ] {
        let text = serde_json::to_string_pretty(&profile).unwrap();
        std::fs::write(&path, text.replacen(from, to, 1)).unwrap();
        assert_eq!(cache.load(&device, 2), None, "{from} -> {to}");
    }
    cache.store(&device, &profile).unwrap();
    let refreshed = cache.load_or_measure(&device, 2, true, &QUICK).unwrap();
    assert_eq!(refreshed.variants, profile.variants, "what was tuned is kept");
}

/// What is printed is what the plan says, and the plan says what its launches do.
#[test]
fn decisions_are_the_backend_s_own() {
    let device = device();
    let chip = Chip::by_name("cpu");
    let case = Case::gemm(("q4_0", 2, qwen_hal::abi::ops::QHAL_COMPUTE_I8_G32, "i8_g32"), 1, 512, 256, 64);
    let plan = device.plan(&case.op, &PlanOptions::default()).unwrap();
    let variants = plan.variants().unwrap();
    let chooser = Chooser::new(&device, chip, None);
    let one = chooser.decide(&OpShape {
        op: plan.op(),
        kernel: &plan.info().kernel,
        variants: &variants,
        symbols: &[Some(Variable::Tokens)],
        values: &[(Variable::Tokens, 1)],
        tuned: false,
    });
    assert_eq!(one.len(), 1);
    let lines = one[0].lines();
    assert!(lines[0].starts_with("[DISPATCH] Top-level: selected qwen-cpu backend for cpu-"), "{lines:?}");
    assert!(lines[2].starts_with("[DISPATCH] Bottom-level: tokens=1 -> tiling_config=gemm."), "{lines:?}");
}

#[test]
fn a_preferred_variant_is_planned_without_being_named() {
    let device = device();
    let case = Case::gemm(("q4_0", 2, qwen_hal::abi::ops::QHAL_COMPUTE_I8_G32, "i8_g32"), 1, 512, 256, 64);
    let plan = device.plan(&case.op, &PlanOptions::default()).unwrap();
    let other = plan.variants().unwrap().into_iter().find(|variant| !variant.chosen);
    let Some(other) = other else { return };
    device.prefer([(plan.info().content_hash, other.name.clone())]);
    let taken = |device: &Device| {
        let plan = device.plan(&case.op, &PlanOptions::default()).unwrap();
        plan.variants().unwrap().into_iter().find(|variant| variant.chosen).map(|variant| variant.name)
    };
    assert_eq!(taken(&device), Some(other.name));
    device.prefer([(plan.info().content_hash, "of an older version".to_owned())]);
    assert_ne!(taken(&device), Some("of an older version".to_owned()));
}

#[test]
fn variants_are_timed_in_turns() {
    let device = device();
    let case = Case::gemm(("q4_0", 2, qwen_hal::abi::ops::QHAL_COMPUTE_I8_G32, "i8_g32"), 16, 64, 256, 64);
    let budget = Budget { time: Duration::from_millis(1), sample: Duration::from_micros(100), least: 3 };
    let Some(report) = time_variants(&device, &case, None, &budget).unwrap() else { return };
    assert!(report.timings.len() >= 2 && report.timings[0].chosen, "{report:?}");
    assert!(report.timings.iter().all(|timing| timing.seconds > 0.0 && timing.samples >= 2));
    assert!(report.loss() >= 1.0 && report.operations > 0.0 && report.bytes > 0.0);
    assert!(cases().len() > 20);
}
